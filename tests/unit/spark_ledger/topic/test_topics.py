import asyncio
import json

import pytest

from spark_ledger import errors
from spark_ledger.metadata import paths
from spark_ledger.metadata.store import ANY_VERSION, NoNode, OutcomeUnknown
from spark_ledger.topic.log import records
from spark_ledger.topic.log.policies import INHERIT, NamespacePolicies, TopicPolicies
from spark_ledger.topic.log.topics import read_policies
from tests.unit.spark_ledger.topic.stage import play


def test_a_topic_is_opened_and_listed_as_it_was_made():
    async def act(stage):
        policies = TopicPolicies(3, 2, 2)
        made = await stage.client.topics.create("a/b/c", 7, policies)
        other = await stage.another()

        assert await other.topics.open("persistent://a/b/c") == made
        assert [info.name.short for info in await other.topics.list()] == [
            "persistent://a/b/c",
            "t",
        ]
        assert (made.partitions, made.policies) == (7, policies)
        assert [name.short for name in await other.topics.names()] == ["persistent://a/b/c", "t"]

    play(act)


@pytest.mark.parametrize("is_answer_lost", [False, True])
def test_a_topic_has_its_time_and_its_properties_from_the_moment_it_is_made(is_answer_lost):
    async def act(stage):
        store, topics = stage.client.store, stage.client.topics
        multi = store.multi

        async def losing_the_answer(operations):
            store.multi = multi
            await multi(operations)
            raise OutcomeUnknown("the answer was lost")

        if is_answer_lost:
            store.multi = losing_the_answer
        made = await topics.create("x", properties={"team": "blue"})
        found = await topics.open("x")
        assert made.created_ms == found.created_ms > 0
        assert made.properties == found.properties == {"team": "blue"}

    play(act)


def test_a_name_is_given_once_also_when_two_ask_at_once():
    async def act(stage):
        other = await stage.another()
        made = await asyncio.gather(
            *(topics.create("x", exist_ok=True) for topics in (stage.client.topics, other.topics))
        )

        assert made[0].id == made[1].id
        with pytest.raises(errors.TopicExists):
            await other.topics.create("x")

    play(act)


def test_a_topic_that_is_not_there_is_an_error_with_the_nearest_name():
    async def act(stage):
        await stage.client.topics.create("flights")
        with pytest.raises(
            errors.TopicNotFound, match="no topic 'flihgts'; similar names: flights"
        ):
            await stage.client.topics.open("flihgts")

    play(act)


@pytest.mark.parametrize("partitions", [0, -1, 100_001])
def test_a_topic_has_at_least_one_partition_and_not_too_many(partitions):
    async def act(stage):
        with pytest.raises(errors.BadConfig, match="partitions must be"):
            await stage.client.topics.create("x", partitions)

    play(act)


def test_a_topic_made_again_under_its_name_is_another_topic_and_the_old_one_takes_nothing():
    async def act(stage):
        intent = await stage.intent()
        result = await stage.written(intent, [b"a"])
        await stage.client.topics.delete("t")
        again = await stage.client.topics.create("t")

        assert again.id != stage.topic.id
        with pytest.raises(errors.TopicDeleted):
            await stage.commit(intent, 0, result)
        with pytest.raises(errors.TopicNotFound):
            await stage.client.topics.delete("gone")

    play(act)


def test_making_and_deleting_end_well_while_answers_are_lost():
    async def act(stage):
        stage.world.store.faults.unknown = 0.4
        for number in range(10):
            info = await stage.client.topics.create(f"x{number}")
            assert (await stage.client.topics.open(f"x{number}")).id == info.id
            await stage.client.topics.delete(f"x{number}")
        assert [info.name.short for info in await stage.client.topics.list()] == ["t"]

    play(act, seed=3)


def test_policies_are_changed_later_by_name_and_a_bad_change_changes_nothing():
    async def act(stage):
        topics = stage.client.topics
        changed = await topics.change_policies("t", {"retention_ms": 5, "ack_quorum": 3})

        assert changed.policies == TopicPolicies(3, 3, 3, retention_ms=5)
        assert await (await stage.another()).topics.open("t") == changed
        with pytest.raises(errors.BadConfig, match="quorums 2/3/3"):
            await topics.change_policies("t", {"ensemble_size": 2})
        with pytest.raises(errors.TopicNotFound):
            await topics.change_policies("gone", {})
        assert await topics.open("t") == changed

    play(act)


def test_of_two_who_change_policies_at_once_neither_loses_its_change():
    async def act(stage):
        stage.world.store.faults.unknown = 0.3
        other = await stage.another()
        await asyncio.gather(
            stage.client.topics.change_policies("t", {"retention_ms": 5}),
            other.topics.change_policies("t", {"retention_bytes": 7}),
        )
        stage.world.store.calm()

        policies = (await stage.client.topics.open("t")).policies
        assert (policies.retention_ms, policies.retention_bytes) == (5, 7)

    play(act, seed=2)


def test_a_name_that_a_partition_has_is_no_topics():
    async def act(stage):
        with pytest.raises(errors.TopicNameInvalid, match="partition 3 of topic 'rides'"):
            await stage.client.topics.create("rides-partition-3")
        await stage.client.topics.create("rides-partition-x")

    play(act)


def test_a_topic_takes_its_namespaces_policies_when_it_is_made_and_its_own_win():
    async def act(stage):
        topics, other = stage.client.topics, (await stage.another()).topics
        assert await topics.namespace("acme/sales") is None
        await topics.set_namespace("acme/sales", {"retention_ms": 5, "merging": False})
        made = await other.create("acme/sales/a", 1, {"retention_ms": 7})
        assert (made.policies.retention_ms, made.policies.merging) == (7, False)
        assert (await other.create("acme/sales/b")).policies.retention_ms == 5
        assert (await other.create("c")).policies == TopicPolicies()
        whole = await other.create("acme/sales/d", 1, TopicPolicies())
        assert whole.policies == TopicPolicies()
        await other.set_namespace("acme/sales", {"merging": True, "auto_create": False})
        there = await topics.namespace("acme/sales")
        assert there.topics == {"retention_ms": 5, "merging": True}
        assert (there.auto_create, there.auto_create_partitions) == (False, None)
        assert (await topics.open("acme/sales/a")).policies.merging is True
        assert await topics.namespaces() == ["acme/sales", "public/default"]

    play(act)


def test_a_policy_of_a_namespace_counts_for_the_topics_that_are_there_and_did_not_set_it():
    async def act(stage):
        topics, other = stage.client.topics, (await stage.another()).topics
        await topics.create("acme/sales/own", 1, {"retention_ms": 7})
        inherits = await topics.create("acme/sales/inherits", 2)
        whole = await topics.create("acme/sales/whole", 1, TopicPolicies())
        await other.set_namespace("acme/sales", {"retention_ms": 5, "deduplication": True})

        async def of(name):
            policies = (await topics.open(f"acme/sales/{name}")).policies
            return policies.retention_ms, policies.deduplication

        assert await of("own") == (7, True)
        assert await of("inherits") == (5, True)
        assert await of("whole") == (None, False)
        assert (await read_policies(topics.store, inherits.id)).policies.retention_ms == 5
        assert (await read_policies(topics.store, whole.id)).policies.retention_ms is None
        assert {one.policies.retention_ms for one in await other.list()} == {7, 5, None}

        await topics.change_policies("acme/sales/inherits", {"retention_ms": None})
        changed = await topics.change_policies("acme/sales/own", {"retention_ms": INHERIT})
        assert changed.policies.retention_ms == 5
        await other.set_namespace("acme/sales", {"retention_ms": 9, "deduplication": INHERIT})
        assert (await of("own"), await of("inherits")) == ((9, False), (None, False))

    play(act)


def test_quorums_and_whether_a_topic_is_partitioned_never_come_apart_by_its_namespace():
    async def act(stage):
        topics = stage.client.topics
        await topics.create("acme/sales/a", 3, {"ack_quorum": 3})
        quorums = {"ensemble_size": 1, "write_quorum": 1, "ack_quorum": 1}
        await topics.set_namespace("acme/sales", {**quorums, "partitioned": False})
        found = (await topics.open("acme/sales/a")).policies
        assert (found.ensemble_size, found.write_quorum, found.ack_quorum) == (3, 3, 3)
        assert found.partitioned
        assert not (await topics.create("acme/sales/b")).policies.partitioned
        found = (await topics.change_policies("acme/sales/a", {"write_quorum": INHERIT})).policies
        assert (found.ensemble_size, found.write_quorum, found.ack_quorum) == (1, 1, 1)
        for changes in ({"partitioned": INHERIT}, {"retention": INHERIT}, {"no": INHERIT}):
            with pytest.raises(errors.BadConfig):
                await topics.change_policies("acme/sales/a", changes)

    play(act)


def test_a_namespace_switches_retention_by_acknowledgement_on_for_later_topics_only():
    async def act(stage):
        topics = stage.client.topics
        await topics.create("acme/sales/before")
        await topics.set_namespace("acme/sales", {"retention": "acknowledged"})
        await topics.create("acme/sales/after")
        await topics.set_namespace("acme/sales", {"retention": INHERIT})
        assert (await topics.open("acme/sales/before")).policies.retention == "limits"
        assert (await topics.open("acme/sales/after")).policies.retention == "acknowledged"
        await topics.change_policies("acme/sales/after", {"retention": "limits"})
        assert (await topics.open("acme/sales/after")).policies.retention == "limits"

    play(act)


def test_a_topic_of_an_older_version_has_all_its_policies_of_its_own():
    async def act(stage):
        topics = stage.client.topics
        made = await topics.create("acme/sales/a")
        plain = json.loads((await topics.store.get(paths.topic(made.id))).value)
        assert plain.pop("own") == ["partitioned", "retention"]
        await topics.store.set(paths.topic(made.id), json.dumps(plain).encode(), ANY_VERSION)
        await topics.set_namespace("acme/sales", {"retention_ms": 5})
        assert (await topics.open("acme/sales/a")).policies.retention_ms is None
        await topics.change_policies("acme/sales/a", {"retention_ms": INHERIT})
        assert (await topics.open("acme/sales/a")).policies.retention_ms == 5

    play(act)


def test_a_namespace_that_topics_made_has_no_policies():
    async def act(stage):
        await stage.client.topics.create("acme/sales/a")
        assert await stage.client.topics.namespace("acme/sales") == NamespacePolicies()

    play(act)


@pytest.mark.parametrize(
    ("namespace", "changes", "says"),
    [
        ("acme/sales", {"retain_ms": 5}, "a namespace has no policy 'retain_ms'"),
        ("acme/sales", {"auto_creat": True}, "Did you mean 'auto_create'"),
        ("acme/sales", {"auto_create": "maybe"}, "auto_create must be true or false"),
        ("acme/sales", {"auto_create_partitions": -1}, "auto_create_partitions must not be -1"),
        ("acme/sales", {"auto_create_partitions": 100_001}, "must not be 100001"),
        ("acme/sales", {"auto_create_partitions": 10**8}, "Give a number from 0 to 100000"),
        ("acme/sales", {"topics_max": 0}, "topics_max must not be 0"),
        ("acme/sales", {"topics_max": "x"}, "topics_max must not be 'x'"),
        ("acme/sales", {"properties": "x"}, "properties must not be 'x'"),
        ("acme/sales", {"properties": {"a": 1}}, "Give texts by their names"),
        ("acme/sales", {"properties": {"a": "x" * (16 << 10)}}, "take 16385 bytes"),
        ("acme/sales", {"producers_max": 0}, "producers_max must not be 0"),
        ("acme/sales", {"consumer_unacked_max": -1}, "Give a number from 0 on"),
        ("acme/sales", {"ensemble_size": 1}, "quorums 1/3/2"),
        ("sales", {}, "'sales' is no namespace"),
    ],
)
def test_a_policy_of_a_namespace_that_does_not_hold_changes_nothing(namespace, changes, says):
    async def act(stage):
        with pytest.raises((errors.BadConfig, errors.TopicNameInvalid), match=says):
            await stage.client.topics.set_namespace(namespace, changes)
        assert await stage.client.topics.namespaces() == ["public/default"]

    play(act)


def test_a_namespace_that_an_earlier_version_gave_too_many_partitions_can_still_be_read():
    creation = {"auto_create": None, "auto_create_partitions": 10**8}

    read = records.decode_namespace(records.dump({**creation, "topics": {}}))

    assert read.auto_create_partitions == 10**8
    assert read.with_changes({"topics_max": 5, "properties": {"a": "b"}}).topics_max == 5
    assert records.decode_namespace(records.encode_namespace(read)) == read


@pytest.mark.parametrize(
    "value", [b"{", b'{"id":"a/b","min_reader":1}', b'{"id":7,"min_reader":1}']
)
def test_a_topic_whose_id_or_record_cannot_be_read_is_left_out_of_lists_and_logged_once(
    value, caplog
):
    async def act(stage):
        topics, store = stage.client.topics, stage.client.store
        await topics.set_namespace("a/b", {"topics_max": 3})
        names = [f"a/b/{len(value)}-{number}" for number in range(2)]  # a line each
        for name in names:
            await topics.create(name)
        info = await topics.create("a/b/good")
        pointer, other = [await topics.open(name) for name in names]
        await store.set(pointer.name.path, value, ANY_VERSION)
        await store.set(paths.topic(other.id), b"[]", ANY_VERSION)
        for _ in range(2):
            (listed,) = await topics.in_namespace("a/b")
            assert (listed.id, listed.name) == (info.id, info.name)
        assert caplog.text.count("cannot be read, and is left out") == 2
        assert f"the id of topic {pointer.name} cannot be read" in caplog.text
        await topics.create("a/b/more")  # topics_max counts those that can be read

    play(act)


def test_the_names_of_a_namespace_that_is_made_while_they_are_read_are_watched():
    async def act(stage):
        topics, changed = stage.client.topics, asyncio.Event()
        children, other = topics.store.children, await stage.another()

        async def then_made(path, watch=None):
            try:
                return await children(path, watch)
            except NoNode:
                await other.topics.create("a/b/first", exist_ok=True)
                await topics.store.sync(path)
                raise

        topics.store.children = then_made
        assert await topics.names_in("a/b", changed.set) == ["first"]
        assert not changed.is_set()
        await other.topics.create("a/b/second")
        async with asyncio.timeout(5):
            await changed.wait()
        assert await topics.names_in("a/c", changed.set) == []

    play(act)
