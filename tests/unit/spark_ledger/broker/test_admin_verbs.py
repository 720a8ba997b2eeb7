"""Verbs of the admin API on messages, their ids, single partitions, properties and brokers."""

import asyncio
import json
from unittest.mock import AsyncMock

import pytest

from spark_ledger import __version__
from spark_ledger.broker import names
from spark_ledger.broker.admin import brokers as admin_brokers
from spark_ledger.broker.admin import facts, messages, stats
from spark_ledger.broker.log.membership import Registered
from spark_ledger.topic.log.records import TOPIC_PROPERTIES_BYTES_MAX
from tests.kit.pulsar_batches import batch_of, lone, message
from tests.unit.spark_ledger.broker.admin_requests import Asked, at_a_broker
from tests.unit.spark_ledger.broker.sessions import TOPIC, session_of
from tests.unit.spark_ledger.broker.two_brokers import Brokers
from tests.unit.spark_ledger.topic.stage import play

V2 = "/admin/v2"
T = f"{V2}/persistent/public/default"
P = f"{T}/t-partition-0"


async def in_this_thread(call, *args):
    """The simulated loop has no threads."""
    return call(*args)


def with_messages(act, monkeypatch):
    """`act(ask, broker, ledger)` at a broker with a lone message at offset 0, and batches of two
    messages at offsets 1 and 3."""
    monkeypatch.setattr(messages.asyncio, "to_thread", in_this_thread)

    async def main(stage):
        broker, session = await session_of(stage)
        monkeypatch.setattr(type(session.connection), "address", "/h:1")
        await session.answer("producer_success", "producer", topic=TOPIC, producer_id=1)
        sent = [
            (1, lone(message(b"zero", properties={"p": "é"}), sequence_id=0)),
            (2, batch_of([message(b"one"), message(b"two")], sequence_id=1)),
            (2, batch_of([message(b"three"), message(b"four")], sequence_id=3)),
        ]
        for count, data in sent:
            await session.answer("send_receipt", "send", data, producer_id=1, num_messages=count)
        await act(Asked(broker), broker, names.ledger_number(stage.topic.id))
        session.connection.connection_lost(None)
        await broker.seal()

    play(main)


def test_positions_from_both_ends_count_batches(monkeypatch):
    async def act(ask, broker, ledger):
        assert await ask("PUT", f"{T}/t/subscription/s", "earliest") == (204, None)
        for path, words in (
            ("subscription/s/position/1", b"zero"),
            ("subscription/s/position/2", b"two"),
            ("subscription/s/position/3", b"four"),
            ("subscription/gone/position/2", b"two"),
            ("examinemessage?initialPosition=earliest&messagePosition=2", b"two"),
            ("examinemessage?initialPosition=earliest&messagePosition=9", b"four"),
            ("examinemessage?initialPosition=latest&messagePosition=1", b"four"),
            ("examinemessage?initialPosition=latest&messagePosition=3", b"zero"),
            ("examinemessage?initialPosition=latest&messagePosition=9", b"zero"),
            ("examinemessage", b"four"),
        ):
            status, body = await ask("GET", f"{P}/{path}")
            assert status == 200 and body.endswith(words), path
        assert await ask("POST", f"{T}/t/subscription/s/skip/2") == (204, None)
        status, body = await ask("GET", f"{P}/subscription/s/position/1")
        assert b"one" in body and body.endswith(b"two"), "the batch has a message that is left"
        for path, status in (
            ("subscription/s/position/3", 404),
            ("subscription/s/position/x", 400),
            ("examinemessage?messagePosition=x", 400),
            ("examinemessage?messagePosition=10001", 412),
        ):
            assert (await ask("GET", f"{P}/{path}"))[0] == status, path

    with_messages(act, monkeypatch)


def test_ids_are_those_of_batches_and_a_backlog_is_measured_from_an_id(monkeypatch):
    async def act(ask, broker, ledger):
        last = {"ledgerId": ledger, "entryId": 3, "partitionIndex": 0}
        assert await ask("GET", f"{P}/lastMessageId") == (
            200,
            last | {"batchIndex": 1, "batchSize": 2},
        )
        _, first = await ask("GET", f"{P}/messageid/0")
        assert (first["ledgerId"], first["entryId"]) == (ledger, 0)
        _, none = await ask("GET", f"{P}/messageid/{10**14}")
        assert none["entryId"] == 5
        sizes = [
            (await ask("PUT", f"{P}/backlogSize", last | {"entryId": entry}))[1]
            for entry in (-1, 0, 3, 4, 5000)
        ]
        assert sizes == sorted(sizes, reverse=True) and sizes[0] > sizes[1] > sizes[2] > 0
        assert sizes[3:] == [0, 0]
        _, whole = await ask("PUT", f"{P}/backlogSize", {"ledgerId": -1, "entryId": -1})
        assert whole == sizes[0]
        latest = {"ledgerId": 2**63 - 1, "entryId": 2**63 - 1}
        assert await ask("PUT", f"{P}/backlogSize", latest) == (200, 0)
        for body, status in ((None, 400), ([1], 400), ({"ledgerId": 3, "entryId": 0}, 412)):
            assert (await ask("PUT", f"{P}/backlogSize", body))[0] == status

    with_messages(act, monkeypatch)


def test_a_subscription_moves_in_the_partition_that_is_named(monkeypatch):
    async def act(ask, broker, ledger):
        path = f"{P}/subscription/s"
        assert await ask("PUT", f"{T}/t/subscription/s", "earliest") == (204, None)

        async def backlog():
            _, stats = await ask("GET", f"{P}/stats")
            return stats["subscriptions"]["s"]["msgBacklog"]

        at = {"ledgerId": ledger, "entryId": 1}
        for verb, body, left in (
            ("skip/1", None, 4),
            ("expireMessages", at, 3),
            ("expireMessages", at | {"entryId": 0}, 3),
            ("skip_all", None, 0),
            ("resetcursor", at, 4),
            ("resetcursor/0", None, 5),
            ("expireMessages", {"ledgerId": -1, "entryId": -1}, 5),
            ("expireMessages", at | {"entryId": 10**6}, 0),
        ):
            assert await ask("POST", f"{path}/{verb}", body) == (204, None), verb
            assert await backlog() == left, verb
        for verb, body in (("expireMessages", None), ("expireMessages", {"ledgerId": "x"})):
            assert (await ask("POST", f"{path}/{verb}", body))[0] == 400
        for count, why in (("-1", "must not be negative"), ("-x", "is not a number")):
            status, body = await ask("POST", f"{path}/skip/{count}")
            assert (status, body["reason"]) == (400, f"'{count}', given as count, {why}")
        assert (await ask("POST", f"{T}/t-partition-7/subscription/s/skip_all"))[0] == 404
        assert await ask("POST", f"{T}/t/subscription/s/resetcursor/0") == (204, None)
        assert await ask("POST", f"{T}/t/all_subscription/expireMessages/9999") == (204, None)
        assert await backlog() == 5
        await asyncio.sleep(2)
        assert await ask("POST", f"{T}/t/all_subscription/expireMessages/0") == (204, None)
        assert await backlog() == 0

    with_messages(act, monkeypatch)


@pytest.mark.parametrize(
    ("method", "path"),
    [
        ("GET", "examinemessage"),
        ("GET", "messageid/0"),
        ("GET", "lastMessageId"),
        ("PUT", "backlogSize"),
        ("GET", "internalStats"),
        ("GET", "subscription/s/position/1"),
        ("POST", "subscription/s/skip/1"),
        ("POST", "subscription/s/expireMessages"),
    ],
)
def test_what_is_of_one_partition_is_405_for_several_and_404_where_nothing_is(method, path):
    async def act(ask, broker, stage):
        id_ = {"ledgerId": -1, "entryId": -1}
        await ask("PUT", f"{T}/several/partitions", 3)
        await ask("PUT", f"{T}/several/subscription/s", "earliest")
        for topic, status in (("several", 405), ("gone", 404), ("several-partition-3", 404)):
            body = id_ if method != "GET" else None
            answer = await ask(method, f"{T}/{topic}/{path}", body)
            assert (answer[0], len(answer[1]["reason"]) > 10) == (status, True)

    at_a_broker(act)


def test_an_empty_topic_has_an_id_of_no_message_and_nothing_to_show():
    async def act(ask, broker, stage):
        await ask("PUT", f"{T}/plain")
        _, last = await ask("GET", f"{T}/plain/lastMessageId")
        assert (last["entryId"], last["partitionIndex"], last["batchIndex"]) == (-1, -1, -1)
        assert (await ask("GET", f"{T}/plain/examinemessage"))[0] == 412
        assert (await ask("GET", f"{T}/plain/messageid/0"))[1]["entryId"] == 0

    at_a_broker(act)


def test_properties_come_with_a_topic_and_are_added_shown_and_removed():
    async def act(ask, broker, stage):
        assert await ask("PUT", f"{T}/plain", {"a": "1"}) == (204, None)
        both = {"partitions": 2, "properties": {"a": "1"}}
        assert await ask("PUT", f"{T}/p/partitions", both) == (204, None)
        assert (await ask("GET", f"{T}/p/partitions"))[1]["properties"] == {"a": "1"}
        for topic in ("plain", "p"):
            path = f"{T}/{topic}/properties"
            assert await ask("PUT", path, {"b": "2", "a": "3"}) == (204, None)
            assert await ask("GET", path) == (200, {"a": "3", "b": "2"})
            await broker.client.topics.change_policies(topic, {"deduplication": True})
            assert await ask("DELETE", f"{path}?key=a") == (204, None)
            assert await ask("DELETE", f"{path}?key=gone") == (204, None)
            assert await ask("DELETE", path) == (204, None)
            for bad, status in (({"a": 1}, 400), ([1], 400), (7, 400)):
                assert (await ask("PUT", path, bad))[0] == status
            large = {"a": "x" * TOPIC_PROPERTIES_BYTES_MAX}
            assert (await ask("PUT", path, large))[0] == 412
            assert (await ask("PUT", f"{T}/new", large))[0] == 412
            assert await ask("GET", path) == (200, {"b": "2"})
        assert (await ask("GET", f"{T}/gone/properties"))[0] == 404
        assert (await ask("GET", f"{T}/new/properties"))[0] == 404

    at_a_broker(act)


def test_a_partitioned_topic_ends_with_an_id_for_each_partition_and_has_none_missed():
    async def act(ask, broker, stage):
        await ask("PUT", f"{T}/p/partitions", 2)
        await ask("PUT", f"{T}/plain")
        assert await ask("POST", f"{T}/p/createMissedPartitions") == (204, None)
        for topic in ("gone", "plain"):
            assert (await ask("POST", f"{T}/{topic}/createMissedPartitions"))[0] == 404
        assert (await ask("POST", f"{T}/plain/terminate/partitions"))[0] == 405
        assert (await ask("POST", f"{T}/gone/terminate/partitions"))[0] == 404
        status, last = await ask("POST", f"{T}/p/terminate/partitions")
        assert status == 200 and set(last) == {"0", "1"} and last["1"]["partitionIndex"] == 1
        _, internal = await ask("GET", f"{T}/p-partition-1/internalStats")
        assert internal["state"] == "Terminated"

    at_a_broker(act)


def test_internal_statistics_have_the_ledger_of_the_message_ids(monkeypatch):
    async def act(ask, broker, ledger):
        await ask("PUT", f"{T}/t/subscription/s", {"ledgerId": ledger, "entryId": 1})
        _, internal = await ask("GET", f"{P}/internalStats")
        assert internal["lastConfirmedEntry"] == f"{ledger}:4" and internal["numberOfEntries"] == 5
        assert internal["ledgers"][0]["ledgerId"] == ledger and internal["totalSize"] > 0
        assert internal["cursors"]["s"]["markDeletePosition"] == f"{ledger}:0"
        assert internal["state"] == "LedgerOpened"
        _, whole = await ask("GET", f"{T}/t/partitioned-internalStats")
        assert whole["metadata"]["partitions"] == len(whole["partitions"]) == 1
        _, info = await ask("GET", f"{P}/internal-info")
        assert info["cursors"]["s"]["markDelete"] == {"ledgerId": ledger, "entryId": 0}
        _, info = await ask("GET", f"{T}/t/internal-info")
        assert list(info["partitions"]) == ["persistent://public/default/t-partition-0"]
        for path in ("gone/internalStats", "gone/partitioned-internalStats", "gone/internal-info"):
            assert (await ask("GET", f"{T}/{path}"))[0] == 404

    with_messages(act, monkeypatch)


def test_internal_statistics_name_what_is_acknowledged_beyond_a_gap(monkeypatch):
    async def act(ask, broker, ledger):
        await ask("PUT", f"{T}/t/subscription/s", "earliest")
        topic = broker.open_topic((await broker.client.topics.open("t")).id)

        def acknowledged(acks):
            for offset in (1, 2, 4):
                acks.add(offset, offset + 1)
            return 0

        await topic.subscriptions.move_up("s", 0, acknowledged)
        cursor = (await ask("GET", f"{P}/internalStats"))[1]["cursors"]["s"]
        ranges = f"[({ledger}:0..{ledger}:2],({ledger}:3..{ledger}:4]]"
        assert cursor["individuallyDeletedMessages"] == ranges
        assert cursor["totalNonContiguousDeletedMessagesRange"] == 2
        assert cursor["markDeletePosition"] == f"{ledger}:-1"
        monkeypatch.setattr(stats, "ACKED_RANGES_MAX", 1)
        cursor = (await ask("GET", f"{P}/internalStats"))[1]["cursors"]["s"]
        assert cursor["individuallyDeletedMessages"] == f"[({ledger}:0..{ledger}:2]]"

    with_messages(act, monkeypatch)


def test_statistics_leave_out_what_is_not_asked_for(monkeypatch):
    async def act(ask, broker, ledger):
        await ask("PUT", f"{T}/t/subscription/s", "earliest")
        await asyncio.sleep(1)
        _, whole = await ask("GET", f"{P}/stats")
        assert len(whole["publishers"]) == 1 and whole["msgInCounter"] == 5
        assert whole["subscriptions"]["s"]["earliestMsgPublishTimeInBacklog"] == 0
        assert whole["oldestBacklogMessageAgeSeconds"] >= 0
        _, joined = await ask("GET", f"{T}/t/partitioned-stats")
        assert joined["oldestBacklogMessageAgeSeconds"] >= 0
        assert whole["lastPublishTimeStamp"] >= whole["topicCreationTimeStamp"] > 0
        _, timed = await ask("GET", f"{P}/stats?getEarliestTimeInBacklog=true")
        assert timed["subscriptions"]["s"]["earliestMsgPublishTimeInBacklog"] > 0
        for path in (f"{P}/stats?", f"{T}/t/partitioned-stats?"):
            _, less = await ask("GET", f"{path}excludePublishers=true&excludeConsumers=true")
            assert less["publishers"] == []
            assert all(part["publishers"] == [] for part in less.get("partitions", {}).values())

    with_messages(act, monkeypatch)


def test_a_broker_shows_its_own_partitions_from_memory(monkeypatch):
    async def act(ask, broker, ledger):
        _, shown = await ask("GET", f"{V2}/broker-stats/topics?excludePublishers=true")
        of_topics = shown["public/default"]["0x00000000_0xffffffff"]["persistent"]
        (part,) = of_topics.values()
        assert list(of_topics) == ["persistent://public/default/t-partition-0"]
        assert (part["msgInCounter"], part["endOffset"], part["publishers"]) == (5, 5, [])

    with_messages(act, monkeypatch)


def test_sums_take_statistics_of_owners_of_other_versions():
    new = {"lastPublishTimeStamp": 7, "msgInCounter": 3, "storageSize": 2, "publishers": []}
    old = {"storageSize": 5, "publishers": [{}]}
    whole = facts.merged([new, old])
    assert whole == {
        "lastPublishTimeStamp": 7,
        "msgInCounter": 3,
        "storageSize": 7,
        "publishers": [{}],
    }


@pytest.mark.parametrize("bundle", ["", "0x00000000_0xffffffff/", "0x00000000_0x40000000/"])
def test_a_namespace_is_unloaded_as_the_one_bundle_that_it_is(bundle):
    async def act(ask, broker, stage):
        topic, _ = await broker.partition(names.parse(TOPIC))
        sent_away = []
        topic.send_clients_away = sent_away.append
        namespaces = f"{V2}/namespaces/public"
        expected = 204 if bundle.endswith("ffff/") or not bundle else 412
        assert (await ask("PUT", f"{namespaces}/default/{bundle}unload"))[0] == expected
        assert sent_away == ([0] if expected == 204 else [])
        assert (await ask("PUT", f"{namespaces}/gone/{bundle}unload"))[0] == 404
        _, bundles = await ask("GET", f"{namespaces}/default/bundles")
        assert bundles == {"boundaries": ["0x00000000", "0xffffffff"], "numBundles": 1}
        lookup = "/lookup/v2/topic/persistent/public/default/t/bundle"
        assert await ask("GET", lookup) == (200, b"0x00000000_0xffffffff")

    at_a_broker(act)


@pytest.mark.parametrize("bundle", ["", "0x00000000_0xffffffff/", "0x00000000_0x40000000/"])
def test_backlogs_of_a_namespace_are_cleared_and_its_subscriptions_deleted(bundle, monkeypatch):
    async def act(ask, broker, ledger):
        space, refused = f"{V2}/namespaces/public/default", bundle.endswith("0x40000000/")
        topic, _ = await broker.client.topics.open("t"), await broker.client.topics.create("u")
        for name, at in (("t", "abc"), ("u", "c")):
            for subscription in at:
                path = f"{T}/{name}/subscription/{subscription}"
                assert await ask("PUT", path, {"ledgerId": -1, "entryId": -1}) == (204, None)

        async def positions():
            subscriptions = broker.client.subscriptions
            return [(await subscriptions.positions(topic.id, name))[0] for name in "abc"]

        async def asked(verb):
            assert (await ask("POST", f"{space}/{bundle}{verb}"))[0] == (412 if refused else 204)
            gone = space.replace("default", "gone")
            assert (await ask("POST", f"{gone}/{bundle}{verb}"))[0] == 404

        await asked("clearBacklog/a")
        assert await positions() == ([0, 0, 0] if refused else [5, 0, 0])
        await asked("clearBacklog")
        assert await positions() == ([0, 0, 0] if refused else [5, 5, 5])
        await asked("unsubscribe/c")
        left = [(await ask("GET", f"{T}/{name}/subscriptions"))[1] for name in "tu"]
        assert left == ([["a", "b", "c"], ["c"]] if refused else [["a", "b"], []])

    with_messages(act, monkeypatch)


def test_brokers_are_named_by_their_addresses_for_http(monkeypatch):
    async def main(stage):
        brokers = Brokers(stage)
        a = await brokers.new("a")
        both = {id_: Registered("pulsar://x", admin_url=f"http://{id_}:8") for id_ in "ab"}
        monkeypatch.setattr(admin_brokers, "brokers_alive", AsyncMock(return_value=both))
        ask, addresses = Asked(a), ["a:8", "b:8"]
        for path in ("brokers", "brokers/standalone"):
            assert await ask("GET", f"{V2}/{path}") == (200, addresses)
        _, leader = await ask("GET", f"{V2}/brokers/leaderBroker")
        assert leader == {"serviceUrl": f"http://{leader['brokerId']}", "brokerId": addresses[0]}
        assert await ask("GET", f"{V2}/brokers/version") == (200, __version__.encode())
        assert await ask("GET", f"{V2}/brokers/ready") == (200, b"ok")
        assert await ask("GET", "/status.html") == (200, b"OK")
        _, plain = await ask("GET", f"{V2}/brokers/configuration/runtime")
        assert plain["broker_port"] == str(a.settings.broker_port)
        assert all(isinstance(value, str) for value in plain.values())
        assert json.dumps(plain)
        assert await ask("GET", f"{V2}/brokers/configuration/values") == (200, {})
        assert (await ask("POST", f"{V2}/brokers/configuration/x/1"))[0] == 412
        await a.partition(names.parse(TOPIC))
        _, owned = await ask("GET", f"{V2}/brokers/standalone/a:8/ownedNamespaces")
        assert list(owned) == ["public/default/0x00000000_0xffffffff"]
        path = f"{V2}/brokers/standalone/b:8/ownedNamespaces"
        assert (await ask("GET", path))[0] == 307
        assert (await ask("GET", f"{V2}/brokers/standalone/x:1/ownedNamespaces"))[0] == 404

    play(main)


@pytest.mark.parametrize("path", ["/admin/v3/functions", "/admin/persistent/a/b", "/admin/x", V2])
def test_what_is_not_built_is_501_with_words_below_admin_and_404_elsewhere(path):
    async def act(ask, broker, stage):
        status, body = await ask("GET", f"{path}/nothing")
        assert status == 501 and "docs/pulsar.md" in body["reason"]
        for method in ("GET", "PUT"):
            status, body = await ask(method, f"{T}/t/compaction")
            assert status == 501 and "compaction" in body["reason"]
        assert (await ask("GET", "/metrics"))[0] == 404

    at_a_broker(act)
