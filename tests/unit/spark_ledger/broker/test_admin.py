"""The admin API's verbs, at a broker of a simulated cluster."""

import re
from unittest.mock import AsyncMock

import pytest

from spark_ledger import errors
from spark_ledger.broker.dispatch.dispatcher import Consumer
from spark_ledger.broker.dispatch.subscriptions import SubscribeRequest
from spark_ledger.broker.names import ledger_number
from spark_ledger.broker.serve.routes import ROUTES
from spark_ledger.broker.wire.commands import AccessMode, SubscriptionType
from spark_ledger.broker.wire.link import ClientFacts
from spark_ledger.topic.log.policies import PARTITIONS_MAX
from spark_ledger.topic.subscription.records import PROPERTIES_BYTES_MAX
from tests.tidy.sources import ROOT
from tests.unit.spark_ledger.broker.admin_requests import HEADERS, Asked, at_a_broker
from tests.unit.spark_ledger.broker.consumers import Wire
from tests.unit.spark_ledger.broker.two_brokers import Brokers, Producer, named
from tests.unit.spark_ledger.topic.stage import play

T = "/admin/v2/persistent/public/default"


def test_a_partitioned_topic_is_made_grown_listed_and_deleted():
    async def act(ask, broker, stage):
        assert await ask("PUT", f"{T}/p/partitions", 3) == (204, None)
        assert (await ask("PUT", f"{T}/p/partitions", 3))[0] == 409
        assert await ask("GET", f"{T}/p/partitions") == (200, {"partitions": 3, "deleted": False})
        assert (await ask("PUT", f"{T}/p"))[0] == 409
        assert await ask("POST", f"{T}/p/partitions", 5) == (204, None)
        assert await ask("POST", f"{T}/p/partitions", 5) == (204, None)
        assert (await ask("POST", f"{T}/p/partitions", 4))[0] == 422
        assert await ask("GET", f"{T}/p/partitions") == (200, {"partitions": 5, "deleted": False})
        assert await ask("PUT", f"{T}/plain") == (204, None)
        assert (await ask("POST", f"{T}/plain/partitions", 4))[0] == 409
        _, names = await ask("GET", T)
        full = "persistent://public/default/"
        plain = [f"{full}{name}" for name in (*(f"p-partition-{n}" for n in range(5)), "plain")]
        assert [name for name in names if not name.startswith(f"{full}t")] == plain
        _, partitioned = await ask("GET", f"{T}/partitioned")
        assert f"{full}p" in partitioned and f"{full}plain" not in partitioned
        assert (await ask("DELETE", f"{T}/p"))[0] == 409
        assert (await ask("DELETE", f"{T}/plain/partitions"))[0] == 409
        assert await ask("DELETE", f"{T}/p/partitions") == (204, None)
        assert (await ask("DELETE", f"{T}/p/partitions"))[0] == 404
        assert await ask("DELETE", f"{T}/plain") == (204, None)
        assert await broker.client.topics.find("plain") is None

    at_a_broker(act)


@pytest.mark.parametrize(
    ("body", "status"),
    [
        (0, 406),
        (-1, 406),
        (10**9, 406),
        ("x", 400),
        (None, 400),
        (True, 400),
        (1.5, 400),
        ([3], 400),
        (b"{", 400),
        (b"[" * 60_000, 400),
        ({"partitions": 0}, 406),
        ({"partitions": 2, "properties": {"a": 1}}, 400),
        ({"partitions": 2, "properties": {}}, 204),
        ({"partitions": 2, "properties": None}, 204),
    ],
)
def test_the_number_of_partitions_is_checked_before_anything_is_made(body, status):
    async def act(ask, broker, stage):
        assert (await ask("PUT", f"{T}/p/partitions", body))[0] == status
        assert (await broker.client.topics.find("p") is None) == (status != 204)

    at_a_broker(act)


@pytest.mark.parametrize(
    ("method", "path", "status"),
    [
        ("PUT", f"{T}/a-partition-1/partitions", 412),
        ("PUT", f"{T}/a-partition-1", 412),
        ("PUT", f"{T}/t-partition-0", 409),
        ("PUT", f"{T}/é/partitions", 412),
        ("PUT", "/admin/v2/persistent/public/gone/t/partitions", 404),
        ("PUT", "/admin/v2/persistent/gone/default/t", 404),
        ("POST", f"{T}/gone/partitions", 409),
        ("DELETE", f"{T}/t-partition-0", 501),
        ("DELETE", f"{T}/t-partition-99", 404),
        ("DELETE", f"{T}/gone", 404),
        ("DELETE", "/admin/v2/persistent/public/gone/t", 404),
        ("GET", "/admin/v2/persistent/public/gone", 404),
        ("GET", "/admin/v2/persistent/public/gone/partitioned", 404),
        ("GET", "/admin/v2/namespaces/public/gone/topics", 404),
        ("GET", "/admin/v2/namespaces/public/default/topics?mode=BOGUS", 400),
        ("GET", f"{T}/t-partition-0/examinemessage?initialPosition=bogus", 400),
        ("GET", "/admin/v2/namespaces/gone", 404),
        ("GET", "/admin/v2/namespaces/public/gone", 404),
        ("DELETE", "/admin/v2/namespaces/public/gone", 404),
        ("DELETE", "/admin/v2/namespaces/public/default", 409),
        ("GET", "/admin/v2/tenants/gone", 404),
        ("DELETE", "/admin/v2/tenants/public", 409),
        ("GET", f"{T}/gone/stats", 404),
        ("GET", f"{T}/t/stats", 404),
        ("GET", f"{T}/t-partition-99/stats", 404),
        ("GET", f"{T}/gone/subscriptions", 404),
        ("DELETE", f"{T}/t/subscription/gone", 404),
        ("POST", f"{T}/t/subscription/gone/skip_all", 404),
        ("POST", f"{T}/t/subscription/gone/resetcursor/x", 400),
        ("PUT", f"{T}/t-partition-0/subscription/s", 501),
        ("GET", f"{T}/t-partition-0/subscription/s/position/0", 412),
        ("GET", f"{T}/t-partition-0/subscription/s/position/10001", 412),
        ("GET", "/admin/v2/brokers/standalone/stats", 501),
        ("PATCH", f"{T}/t/partitions", 501),
    ],
)
def test_a_request_that_cannot_be_done_has_pulsars_status_and_words(method, path, status):
    async def act(ask, broker, stage):
        await broker.client.topics.create("t-2")
        answer = await ask(method, path, 2 if path.endswith("/partitions") else None)
        assert answer[0] == status
        assert len(answer[1]["reason"]) > 10
        assert len(await broker.client.topics.names()) == 2

    at_a_broker(act)


def test_an_error_of_the_store_is_503_and_a_defect_500_with_words():
    async def act(ask, broker, stage):
        for failure, status, words in (
            (errors.Unavailable("it is away"), 503, "away"),
            (KeyError("x"), 500, "a defect of the broker"),
        ):
            broker.client.topics.in_namespace = AsyncMock(side_effect=failure)
            answer = await ask("GET", T)
            assert answer[0] == status and words in answer[1]["reason"]

    at_a_broker(act)


def test_tenants_and_namespaces_are_made_shown_changed_and_deleted():
    tenant = {"adminRoles": [], "allowedClusters": ["standalone"]}

    async def act(ask, broker, stage):
        v2 = "/admin/v2"
        assert await ask("GET", f"{v2}/clusters") == (200, ["standalone"])
        assert await ask("GET", f"{v2}/tenants") == (200, ["public"])
        assert (await ask("PUT", f"{v2}/namespaces/acme/a"))[0] == 404
        assert await ask("PUT", f"{v2}/tenants/acme", tenant) == (204, None)
        assert (await ask("PUT", f"{v2}/tenants/acme", tenant))[0] == 409
        assert await ask("GET", f"{v2}/tenants/acme") == (200, tenant)
        changed = tenant | {"adminRoles": ["anonymous"]}
        assert await ask("POST", f"{v2}/tenants/acme", changed) == (204, None)
        for roles in (["anonymous", "root"], "root"):
            bad = tenant | {"adminRoles": roles}
            assert (await ask("POST", f"{v2}/tenants/acme", bad))[0] == 501
        assert await ask("GET", f"{v2}/tenants/acme") == (200, changed)
        assert await ask("GET", f"{v2}/tenants/public") == (200, tenant)

        assert await ask("GET", f"{v2}/namespaces/acme") == (200, [])
        assert await ask("PUT", f"{v2}/namespaces/acme/a") == (204, None)
        assert (await ask("PUT", f"{v2}/namespaces/acme/a"))[0] == 409
        assert await ask("GET", f"{v2}/namespaces/acme") == (200, ["acme/a"])
        assert (await ask("DELETE", f"{v2}/tenants/acme"))[0] == 409
        await ask("PUT", f"{v2}/persistent/acme/a/x/partitions", 2)
        await ask("PUT", f"{v2}/persistent/acme/a/y")
        _, topics = await ask("GET", f"{v2}/namespaces/acme/a/topics")
        x, y = "persistent://acme/a/x-partition-", "persistent://acme/a/y"
        assert topics == [f"{x}0", f"{x}1", y]
        assert await ask("GET", f"{v2}/namespaces/acme/a/topics?mode=NON_PERSISTENT") == (200, [])
        assert (await ask("DELETE", f"{v2}/namespaces/acme/a"))[0] == 409
        assert await ask("DELETE", f"{v2}/namespaces/acme/a?force=true") == (204, None)
        assert (await ask("GET", f"{v2}/namespaces/acme/a"))[0] == 404
        assert [name.short for name in await broker.client.topics.names()] == ["t"]
        assert await ask("DELETE", f"{v2}/tenants/acme") == (204, None)
        assert await ask("GET", f"{v2}/tenants") == (200, ["public"])

    at_a_broker(act)


def test_a_policy_that_is_taken_counts_and_one_that_is_not_built_is_refused():
    policies = {
        "auth_policies": {"namespace_auth": {"anonymous": ["produce", "consume"]}},
        "replication_clusters": ["standalone"],
        "bundles": {"boundaries": None, "numBundles": 4},
        "backlog_quota_map": {},
        "schema_compatibility_strategy": "UNDEFINED",
        "offload_threshold": -1,
        "deleted": False,
        "deduplicationEnabled": True,
        "autoTopicCreationOverride": {
            "allowAutoTopicCreation": True,
            "topicType": "partitioned",
            "defaultNumPartitions": 3,
        },
    }

    async def act(ask, broker, stage):
        path = "/admin/v2/namespaces/public/n"
        for name, value, status in [
            ("encryption_required", True, 501),
            ("persistence", {"bookkeeperEnsemble": 3}, 400),
            ("max_producers_per_topic", -1, 412),
            ("compaction_threshold", 5, 501),
            ("what", 1, 400),
            ("inactive_topic_policies", {"x": 1}, 501),
            ("schema_compatibility_strategy", "SIDEWARD", 400),
            ("deleted", 0, 501),
            ("replication_clusters", ["other"], 412),
            ("auth_policies", {"namespace_auth": {"bob": ["produce"]}}, 501),
            ("auth_policies", [3], 400),
            ("deduplicationEnabled", "yes", 400),
        ]:
            answer = await ask("PUT", path, policies | {name: value})
            assert (name, answer[0]) == (name, status)
        assert (await ask("GET", path))[0] == 404
        assert await ask("PUT", path, policies) == (204, None)
        _, shown = await ask("GET", path)
        taken = ("deduplicationEnabled", "autoTopicCreationOverride", "replication_clusters")
        assert {name: shown[name] for name in taken} == {name: policies[name] for name in taken}
        topic = "/admin/v2/persistent/public/n/made/partitions"
        await ask("GET", f"{topic}?checkAllowAutoCreation=true")
        made = await broker.client.topics.open("public/n/made")
        assert made.policies.deduplication and made.partitions == 3
        assert await ask("POST", f"{path}/deduplication", False) == (204, None)
        made = await broker.client.topics.open("public/n/made")
        assert not made.policies.deduplication
        assert (await ask("POST", f"{path}/deduplication", "x"))[0] == 400
        assert await ask("DELETE", f"{path}/deduplication") == (204, None)
        assert (await ask("GET", path))[1]["deduplicationEnabled"] is None

    at_a_broker(act)


def test_what_changes_something_is_answered_on_this_machine_and_to_no_web_page():
    async def act(ask, broker, stage):
        path = f"{T}/p/partitions"
        for peer, headers, status in [
            ("10.0.0.7", HEADERS, 403),
            ("::ffff:10.0.0.7", HEADERS, 403),
            ("", HEADERS, 403),
            ("127.0.0.1", HEADERS | {"origin": "http://localhost:8080"}, 403),
            ("127.0.0.1", HEADERS | {"sec-fetch-site": "same-site"}, 403),
            ("127.0.0.1", HEADERS | {"host": "evil.example:8080"}, 403),
            ("127.0.0.1", HEADERS | {"host": ""}, 403),
            ("127.0.0.1", HEADERS | {"content-type": "text/plain"}, 415),
            ("127.0.0.1", {"host": "localhost"}, 415),
            ("::ffff:127.0.0.1", HEADERS | {"host": "[::1]:8080"}, 204),
        ]:
            answer = await ask("PUT", path, 3, peer=peer, headers=headers)
            assert answer[0] == status, answer
            assert (await broker.client.topics.find("p") is None) == (status != 204)
        partition_json = "application/vnd.partitioned-topic-metadata+json; charset=UTF-8"
        headers = HEADERS | {"content-type": partition_json}
        assert (await ask("PUT", f"{T}/q/partitions", 3, headers=headers))[0] == 204

    at_a_broker(act)


@pytest.mark.parametrize("text", ["half", "a", "[" * 100_000])
def test_a_body_that_is_no_text_or_no_json_is_refused_and_makes_nothing(text):
    body = b'{"properties": {"\\ud800": "x"}, "partitions": 3}' if text == "half" else text.encode()

    async def act(ask, broker, stage):
        assert (await ask("PUT", f"{T}/p/partitions", body))[0] == 400
        assert await broker.client.topics.find("p") is None
        assert (await ask("PUT", f"{T}/t/subscription/s", body))[0] == 400

    at_a_broker(act)


def test_an_open_broker_is_changed_from_elsewhere_but_not_by_a_web_page():
    async def act(ask, broker, stage):
        for headers, status in (
            (HEADERS | {"host": "10.0.0.1:8080", "origin": "http://x"}, 403),
            (HEADERS | {"host": "10.0.0.1:8080"}, 204),
        ):
            answer = await ask("PUT", f"{T}/p", peer="10.0.0.7", headers=headers)
            assert answer[0] == status
        for host in ("Broker.example", "other.example:80"):
            assert (await ask("GET", T, headers={"host": host}))[0] == 200
        assert (await ask("GET", T, headers={"host": "evil.example"}))[0] == 403

    at_a_broker(
        act,
        admin_open=True,
        admin_hosts="x, other.example",
        advertised_host="broker.example",
    )


def test_a_get_makes_a_topic_only_where_a_client_may_and_never_for_a_web_page():
    async def act(ask, broker, stage):
        path = f"{T}/p/partitions?checkAllowAutoCreation=true"
        creation = {
            "allowAutoTopicCreation": True,
            "topicType": "partitioned",
            "defaultNumPartitions": 2,
        }
        namespace = "/admin/v2/namespaces/public/default"
        assert (await ask("POST", f"{namespace}/autoTopicCreation", creation))[0] == 204
        for page in ({"origin": "http://x"}, {"sec-fetch-site": "cross-site"}):
            status, body = await ask("GET", path, headers=HEADERS | page)
            assert (status, "from the web page" in body["reason"]) == (403, True)
        assert (await ask("GET", f"{T}/p/partitions", headers=HEADERS | page))[0] == 404
        assert await broker.client.topics.find("p") is None
        typed = HEADERS | {"sec-fetch-site": "none"}
        answer = await ask("GET", path, peer="10.0.0.7", headers=typed)
        assert answer == (200, {"partitions": 2, "deleted": False})

    at_a_broker(act)


def produced(partition):
    """A producer is connected to the partition."""
    producer = Producer("maker", AccessMode.SHARED)
    producer.id, producer.client = 7, ClientFacts(Wire(), "v1", 5, {"k": "v"}, True)
    producer.client.link.address = "/h:1"
    partition.add_producer(producer)
    return producer


def test_stats_show_who_is_connected_and_what_is_not_acknowledged():
    async def act(ask, broker, stage):
        topic, partition = await broker.partition(named(0))
        produced(partition)
        await broker.client.subscriptions.create(topic.info.id, "idle")

        async def start():
            return 0

        def make(dispatcher):
            made = Consumer(Wire(), 1, "eater", 0, dispatcher, lambda one: None)
            made.link.address = "/h:2"
            made.client = ClientFacts(made.link, "v2", 0, {"a": "b"})
            return made

        await topic.subscriptions.subscribe(
            partition.log,
            "s",
            SubscribeRequest(SubscriptionType.FAILOVER),
            durable=True,
            start=start,
            make=make,
            earliest=True,
        )
        status, stats = await ask("GET", f"{T}/t-partition-0/stats")
        assert status == 200
        (publisher,) = stats["publishers"]
        assert publisher["producerName"] == "maker" and publisher["producerId"] == 7
        assert publisher["metadata"] == {"k": "v"} and publisher["address"] == "/h:1"
        assert publisher["encrypted"] is True
        assert publisher["clientVersion"] == "v1" and publisher["accessMode"] == "Shared"
        assert publisher["connectedSince"] == "1970-01-01T00:00:00.005+00:00"
        used, idle = stats["subscriptions"]["s"], stats["subscriptions"]["idle"]
        assert (used["type"], idle["type"]) == ("Failover", "None")
        assert [one["consumerName"] for one in used["consumers"]] == ["eater"]
        assert used["consumers"][0]["metadata"] == {"a": "b"}
        assert used["activeConsumerName"] == "eater" and idle["consumers"] == []
        assert used["isDurable"] and used["msgBacklog"] == idle["msgBacklog"] == 0

        status, whole = await ask("GET", f"{T}/t/partitioned-stats")
        assert [one["producerName"] for one in whole["publishers"]] == ["maker"]
        assert whole["subscriptions"]["s"]["type"] == "Failover"
        assert whole["metadata"]["partitions"] == len(whole["partitions"]) == 12
        _, whole = await ask("GET", f"{T}/t/partitioned-stats?perPartition=false")
        assert whole["partitions"] == {}

        assert (await ask("DELETE", f"{T}/t/partitions"))[0] == 412
        status, body = await ask("DELETE", f"{T}/t/subscription/s")
        assert status == 412 and "with force=true" in body["reason"]
        status, body = await ask("DELETE", f"{T}/t/subscription/gone")
        assert status == 404 and "PUT .../subscription/{name}" in body["reason"]
        assert await broker.client.topics.find("t") is not None
        assert await ask("DELETE", f"{T}/t/partitions?force=true") == (204, None)

    at_a_broker_with_partitions(act)


def at_a_broker_with_partitions(act):
    async def main(stage):
        await stage.client.topics.delete("t")
        await stage.client.topics.create("t", 12)
        broker = await Brokers(stage).new("a")
        await act(Asked(broker), broker, stage)
        await broker.close()

    play(main)


def test_subscriptions_are_made_at_a_message_moved_and_deleted():
    async def act(ask, broker, stage):
        path = f"{T}/t/subscription"
        assert await ask("PUT", f"{path}/s") == (204, None)
        assert (await ask("PUT", f"{path}/s"))[0] == 409
        assert await ask("PUT", f"{path}/e", {"ledgerId": -1, "entryId": -1}) == (204, None)
        latest = {"ledgerId": 2**63 - 1, "entryId": 2**63 - 1}
        assert await ask("PUT", f"{path}/l", latest) == (204, None)
        assert (await ask("PUT", f"{path}/x", {"ledgerId": 3, "entryId": 0}))[0] == 412
        for bad in ({"ledgerId": "x"}, [], 7, {"ledgerId": 1, "entryId": float("inf")}):
            assert (await ask("PUT", f"{path}/x", bad))[0] == 400
        assert await ask("GET", f"{T}/t/subscriptions") == (200, ["e", "l", "s"])
        for bad, status in (({"a": 1}, 400), ({"a": "x" * PROPERTIES_BYTES_MAX}, 412)):
            assert (await ask("PUT", f"{path}/s/properties", bad))[0] == status
        assert await ask("GET", f"{path}/s/properties") == (200, {})
        assert await ask("POST", f"{path}/s/skip_all") == (204, None)
        assert await ask("POST", f"{path}/s/resetcursor/0") == (204, None)
        assert await ask("POST", f"{path}/s/skip/5") == (204, None)
        assert await ask("POST", f"{path}/s/expireMessages/5") == (204, None)
        for bad in ("skip/-1", "skip/x", "expireMessages/x", "skip/" + 99 * "9"):
            assert (await ask("POST", f"{path}/s/{bad}"))[0] == 400
        for verb in ("skip/1", "expireMessages/1", "resetcursor/1", "skip_all"):
            assert (await ask("POST", f"{path}/gone/{verb}"))[0] == 404
        assert await ask("POST", f"{path}/s/resetcursor", latest) == (204, None)
        lone = {"ledgerId": ledger_number(stage.topic.id), "entryId": 0, "batchIndex": -1}
        assert await ask("POST", f"{path}/s/resetcursor", lone) == (204, None)
        assert await ask("DELETE", f"{path}/s") == (204, None)
        assert await ask("DELETE", f"{path}/e?force=true") == (204, None)
        assert await ask("GET", f"{T}/t/subscriptions") == (200, ["l"])

    at_a_broker(act)


def test_a_subscription_makes_its_topic_where_a_client_may():
    async def act(ask, broker, stage):
        made = "/admin/v2/persistent/public/default/new"
        elsewhere = {"ledgerId": 3, "entryId": 0}
        for body, status in ((elsewhere, 404), ({"ledgerId": "x"}, 400), ({"properties": 1}, 400)):
            assert (await ask("PUT", f"{made}/subscription/s", body))[0] == status
        assert (await ask("PUT", f"{made}-partition-0/subscription/s"))[0] == 404
        assert (await ask("PUT", made.replace("default", "gone") + "/subscription/s"))[0] == 404
        assert await broker.client.topics.find("new") is None
        assert await ask("PUT", f"{made}/subscription/s") == (204, None)
        assert await ask("GET", f"{made}/subscriptions") == (200, ["s"])
        await broker.client.topics.set_namespace("public/default", {"auto_create": False})
        assert (await ask("PUT", f"{made}2/subscription/s"))[0] == 404

    at_a_broker(act)


def test_a_query_keeps_its_subscription():
    async def act(ask, broker, stage):
        topic = await broker.client.topics.open("t")
        cursor = await broker.client.subscriptions.open(topic, "q", "query", "run")
        for method, verb in (("DELETE", "?force=true"), ("DELETE", ""), ("POST", "/skip_all")):
            status, body = await ask(method, f"{T}/t/subscription/q{verb}")
            assert status == 412 and "query" in body["reason"]
        cursor.check()
        await cursor.release()

    at_a_broker(act)


DEFAULT = "/admin/v2/namespaces/public/default"


async def policies_of(broker):
    return (await broker.client.topics.open("t")).policies


def test_quotas_are_policies_of_the_namespace():
    def quota(limit, kind="Size", policy="producer_exception"):
        return {f"limit{kind}": limit, "policy": policy}

    async def act(ask, broker, stage):
        path = DEFAULT
        assert await ask("GET", f"{path}/backlogQuotaMap") == (200, {})
        assert await ask("POST", f"{path}/backlogQuota", quota(1000)) == (204, None)
        assert (await policies_of(broker)).backlog_bytes_max == 1000
        assert (await policies_of(broker)).on_backlog == "exception"
        assert (await ask("POST", f"{path}/backlogQuota", quota("2000", "")))[0] == 204
        assert (await policies_of(broker)).backlog_bytes_max == 2000
        age = f"{path}/backlogQuota?backlogQuotaType=message_age"
        hold = quota(60, "Time", "producer_request_hold")
        assert (await ask("POST", age, hold))[0] == 501
        assert await ask("POST", age, quota(60, "Time")) == (204, None)
        assert (await policies_of(broker)).backlog_ms_max == 60_000
        for body, status in (
            (quota(0), 412),
            (quota("x"), 400),
            (quota(5, policy="what"), 400),
            (7, 400),
            ({}, 400),
        ):
            assert (await ask("POST", f"{path}/backlogQuota", body))[0] == status
        assert (await ask("POST", f"{path}/backlogQuota?backlogQuotaType=x", quota(5)))[0] == 400
        _, shown = await ask("GET", f"{path}/backlogQuotaMap")
        assert shown["destination_storage"]["limitSize"] == 2000
        assert shown["message_age"]["limitTime"] == 60
        assert {quota["policy"] for quota in shown.values()} == {"producer_exception"}
        assert await ask("DELETE", age) == (204, None)
        assert await ask("DELETE", f"{path}/backlogQuota") == (204, None)
        assert await ask("GET", f"{path}/backlogQuotaMap") == (200, {})

    at_a_broker(act)


def test_expiry_and_the_creation_of_topics_are_policies_of_the_namespace():
    async def act(ask, broker, stage):
        path = DEFAULT
        assert await ask("GET", f"{path}/messageTTL") == (204, None)
        assert await ask("POST", f"{path}/messageTTL", 60) == (204, None)
        assert (await policies_of(broker)).message_ttl_ms == 60_000
        assert await ask("GET", f"{path}/messageTTL") == (200, 60)
        for bad, status in ((-1, 412), (2**31, 412), ("x", 400), (None, 400), (True, 400)):
            assert (await ask("POST", f"{path}/messageTTL", bad))[0] == status
        assert await ask("POST", f"{path}/messageTTL", 0) == (204, None)
        assert await ask("GET", f"{path}/messageTTL") == (200, 0)
        assert await ask("DELETE", f"{path}/messageTTL") == (204, None)
        assert await ask("GET", f"{path}/messageTTL") == (204, None)

        never = {
            "allowAutoTopicCreation": False,
            "topicType": "non-partitioned",
            "defaultNumPartitions": None,
        }
        assert await ask("POST", f"{path}/autoTopicCreation", never) == (204, None)
        assert await ask("GET", f"{path}/autoTopicCreation") == (200, never)
        may = f"{T}/new/partitions?checkAllowAutoCreation=true"
        assert (await ask("GET", may))[0] == 404
        assert await ask("DELETE", f"{path}/autoTopicCreation") == (204, None)
        assert await ask("GET", f"{path}/autoTopicCreation") == (204, None)
        assert (await ask("GET", may))[0] == 200
        for bad in ({"topicType": "x"}, [], {"allowAutoTopicCreation": 1}):
            assert (await ask("POST", f"{path}/autoTopicCreation", bad))[0] == 400
        for partitions in (0, -1, True, None, "2", PARTITIONS_MAX + 1):
            bad = {"allowAutoTopicCreation": True, "topicType": "partitioned"}
            bad |= {"defaultNumPartitions": partitions}
            assert (await ask("POST", f"{path}/autoTopicCreation", bad))[0] == 406

    at_a_broker(act)


def test_a_topic_is_terminated_and_its_clients_are_sent_away():
    async def act(ask, broker, stage):
        await ask("PUT", f"{T}/plain")
        assert (await ask("POST", f"{T}/t/terminate"))[0] == 405
        status, last = await ask("POST", f"{T}/plain/terminate")
        assert status == 200 and (last["entryId"], last["partitionIndex"]) == (-1, -1)
        assert (
            await broker.client.log((await broker.client.topics.open("plain")).id).fold()
        ).terminated
        _, partition = await broker.partition(named(0))
        producer = produced(partition)
        assert await ask("PUT", f"{T}/t-partition-1/unload") == (204, None)
        assert not producer.away
        assert await ask("PUT", f"{T}/t/unload") == (204, None)
        assert producer.away
        assert (await ask("PUT", f"{T}/gone/unload"))[0] == 404
        assert await ask("GET", "/admin/v2/brokers/health") == (200, b"ok")

    at_a_broker_with_partitions(act)


def test_each_route_is_there_once():
    assert len({(entry.method, entry.path) for entry in ROUTES}) == len(ROUTES)
    assert all(entry.method in {"GET", "PUT", "POST", "DELETE"} for entry in ROUTES)


def test_the_table_of_the_docs_lists_every_route_and_no_other():
    text = (ROOT / "docs/pulsar.md").read_text()
    rows = re.findall(r"^\| ([A-Z ]+) `([^`]+)` \|", text, re.MULTILINE)
    listed = [(method, path) for methods, path in rows for method in methods.split()]
    assert listed == [(entry.method, entry.path) for entry in ROUTES]
