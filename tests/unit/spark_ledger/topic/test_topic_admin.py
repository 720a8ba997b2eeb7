"""Steering topics: each change is one commit, and nothing that is still needed goes unasked."""

import asyncio

import pyarrow as pa
import pytest

from spark_ledger import errors
from spark_ledger.metadata import paths
from spark_ledger.metadata.store_calls import store_now_ms
from spark_ledger.topic.log.actions import OpenLive
from spark_ledger.topic.log.policies import INHERIT, TopicPolicies
from spark_ledger.topic.subscription.seek_target import CommittedSince, End
from spark_ledger.topic.upkeep.admin import TRIES_MAX, TopicAdmin, retain
from spark_ledger.topic.write import TaskSettings
from tests.kit.loop_task import LoopTask
from tests.kit.slices import read_task
from tests.unit.spark_ledger.topic.stage import play


async def filled(stage, *, every_s=0):
    """Ten rows in each of three commits; the admin."""
    intent = await stage.intent()
    for version in range(3):
        rows = [b"%d" % (10 * version + n) for n in range(10)]
        await stage.commit(intent, version, await stage.written(intent, rows))
        await asyncio.sleep(every_s)
    return TopicAdmin(stage.client)


async def subscribed(stage, name, offset):
    await stage.client.subscriptions.create(stage.topic.id, name, {0: offset})


def starts(facts):
    return [one.start_offset for one in facts.partitions]


def test_a_topic_is_described_with_what_it_has():
    async def act(stage):
        facts = await (await filled(stage)).describe("t")

        (one,) = facts.partitions
        assert (one.start_offset, one.end_offset, one.rows, one.segments) == (0, 30, 30, 3)
        assert (facts.rows, facts.commits, facts.terminated, one.live) == (30, 3, False, False)
        assert (len(facts.ledgers), facts.reclaimable) == (1, ())
        assert facts.bytes == one.bytes > 0

    play(act)


def test_a_topic_gets_no_ensemble_larger_than_the_bookies_that_are_registered():
    async def act(stage):
        admin, too_many = TopicAdmin(stage.client), {"ensemble_size": 5}
        with pytest.raises(errors.NotEnoughBookies, match="'n' would need 5 bookies, and 4 are"):
            await admin.create("n", policies=too_many)
        with pytest.raises(errors.NotEnoughBookies, match="'t' would need 5 bookies, and 4 are"):
            await admin.change_policies("t", too_many)
        with pytest.raises(errors.TopicExists):
            await admin.create("t", policies=too_many)
        assert [info.name.short for info in await stage.client.topics.list()] == ["t"]
        assert (await admin.describe("t")).info.policies.ensemble_size == 3
        await admin.change_policies("t", {"ensemble_size": 4})
        assert (await admin.create("n", policies={"ensemble_size": 4})).policies.ensemble_size == 4

    play(act)


def test_the_quorums_of_a_topic_are_its_namespaces_again():
    async def act(stage):
        admin = TopicAdmin(stage.client)
        await stage.client.topics.set_namespace("public/default", {"ensemble_size": 4})
        await admin.create("n", policies={"ensemble_size": 3})
        again = await admin.change_policies("n", {"ensemble_size": "inherit"})
        assert again.policies.ensemble_size == 4
        own = {"ensemble_size": 3, "retention_ms": "inherit"}
        assert (await admin.change_policies("n", own)).policies.ensemble_size == 3

    play(act)


def test_a_write_that_lacks_bookies_names_the_policy_and_how_to_change_it():
    async def act(stage):
        policies = TopicPolicies(9, 6, 2)
        stage.topic = await stage.client.topics.create("big", policies=policies)
        intent = await stage.intent()
        with pytest.raises(errors.NotEnoughBookies) as caught:
            await stage.written(intent, [b"x"])
        said = str(caught.value)
        assert "needs 9 writable bookies, there are 4" in said
        assert "policy ensemble_size of topic 'big' is 9" in said
        command = "spark-ledger topic set big ensemble_size=4 write_quorum=4 ack_quorum=2"
        assert command in said
        settings = TaskSettings(inline_bytes_max=0, policies=TopicPolicies(7, 3, 2))
        writer = LoopTask(stage.client, stage.topic, intent, task_index=1, settings=settings)
        with pytest.raises(
            errors.NotEnoughBookies, match="this write asks for an ensemble of 7, policy"
        ):
            await writer.write(None, pa.array([b"x"]))
            await writer.finish()

    play(act)


def test_a_write_that_lacks_bookies_which_are_down_is_not_told_to_ask_for_fewer():
    async def act(stage):
        stage.topic = await stage.client.topics.create("all", policies=TopicPolicies(4, 3, 2))
        for node in stage.world.nodes[:2]:
            await node.stop()
        directory = stage.client.ledgers.cluster.directory
        while len(directory.writable()) > 2:
            await directory.refresh()
            await asyncio.sleep(0.1)
        with pytest.raises(errors.NotEnoughBookies, match="topic 'all' is 4") as caught:
            await stage.written(await stage.intent(), [b"x"])
        assert "topic set" not in str(caught.value)

    play(act)


def test_a_truncated_topic_is_empty_and_goes_on_with_its_offsets():
    async def act(stage):
        admin = await filled(stage)
        trimmed = await admin.trim("t", End.LATEST)
        assert (dict(trimmed.starts), trimmed.rows) == ({0: 30}, 30)

        intent = await stage.intent()
        await stage.commit(intent, 3, await stage.written(intent, [b"new"]))

        assert [row async for row in rows_of(stage)] == [(30, b"new")]
        facts = await admin.describe("t")
        assert (facts.rows, len(facts.reclaimable)) == (1, 0)  # its ledger is in use again
        assert (await admin.trim("t", End.LATEST)).rows == 1
        assert (await admin.trim("t", End.LATEST)).rows == 0

    play(act)


async def rows_of(stage):
    from spark_ledger.topic.read.plan import plan_read

    client = await stage.another()
    state = await client.log(stage.topic.id).fold(fresh=True)
    held = state.partitions[0]
    for task in plan_read(state, {0: (held.start_offset, held.end_offset)}):
        async for part in read_task(client.ledgers, task):
            for at, value in enumerate(part.record_batch.column("value").to_pylist()):
                yield part.offset + at, value


def test_rows_below_an_offset_go_and_those_that_are_gone_already_are_no_error():
    async def act(stage):
        admin = await filled(stage)

        assert (await admin.trim("t", {0: 13})).rows == 13
        assert (await admin.trim("t", {0: 5})).rows == 0
        assert starts(await admin.describe("t")) == [13]
        with pytest.raises(errors.OffsetsOutOfRange):
            await admin.trim("t", {0: 31})

    play(act)


def test_rows_that_were_committed_before_a_time_go():
    async def act(stage):
        admin = await filled(stage, every_s=100)
        now_ms = await store_now_ms(stage.client.store)

        await admin.trim("t", CommittedSince(now_ms - 150_000))

        assert starts(await admin.describe("t")) == [20]

    play(act)


def test_what_a_subscription_needs_goes_only_by_force():
    async def act(stage):
        admin = await filled(stage)
        await subscribed(stage, "s", 12)

        with pytest.raises(errors.SubscriptionBusy, match="partition 0 from offset 12 on") as busy:
            await admin.trim("t", {0: 20})
        assert "subscription 's' of topic" in str(busy.value)
        assert "in the last 60 minutes; the trim would go to 20" in str(busy.value)
        assert starts(await admin.describe("t")) == [0]
        await admin.trim("t", {0: 12})
        await admin.trim("t", {0: 20}, force=True)
        assert starts(await admin.describe("t")) == [20]

    play(act)


def test_a_subscription_made_while_a_trim_is_decided_is_seen():
    async def act(stage):
        admin = await filled(stage)
        commit = stage.client.commit_actions

        async def late(*arguments, **options):
            stage.client.commit_actions = commit
            await subscribed(stage, "s", 5)
            return await commit(*arguments, **options)

        stage.client.commit_actions = late
        with pytest.raises(errors.SubscriptionBusy):
            await admin.trim("t", {0: 20})
        assert starts(await admin.describe("t")) == [0]

    play(act)


def test_a_topic_grows_and_rows_stay_where_they_are():
    async def act(stage):
        admin = await filled(stage)
        await admin.grow("t", 3)

        (listed,) = await stage.client.topics.in_namespace("public/default")
        info = await stage.client.topics.open("t")
        assert (listed.name.name, listed.partitions, info.partitions) == ("t", 3, 1)
        facts = await admin.describe("t")
        assert [one.end_offset for one in facts.partitions] == [30, 0, 0]
        with pytest.raises(errors.BadConfig, match="has 3 partitions, and cannot get 3"):
            await admin.grow("t", 3)
        with pytest.raises(errors.BadConfig, match="1 to 100000"):
            await admin.grow("t", 100_001)

    play(act)


def test_a_terminated_topic_takes_no_rows_and_keeps_those_it_has():
    async def act(stage):
        admin = await filled(stage)
        await admin.terminate("t")
        await admin.terminate("t")

        intent = await stage.intent()
        with pytest.raises(errors.TopicTerminated):
            await stage.commit(intent, 3, await stage.written(intent, [b"late"]))
        facts = await admin.describe("t")
        assert (facts.terminated, facts.rows) == (True, 30)
        assert (await admin.trim("t", {0: 10})).rows == 10

    play(act)


def test_who_appends_to_a_deleted_topics_live_segment_is_fenced_before_the_call_returns():
    async def act(stage):
        client = stage.client
        intent = await client.intents.open_system_intent("live", "t")
        ledger_id = await client.intents.ledger_id(intent)
        owner = await client.ledgers.create(
            3, 3, 2, ledger_id=ledger_id, intent=intent.id, topic=stage.topic.id
        )
        await owner.append(b"acknowledged")
        live = OpenLive(0, ledger_id, owner.version, "owner", 1)
        await client.commit_actions(stage.topic.id, [live], intent)

        await TopicAdmin(client).delete("t")

        with pytest.raises(errors.LedgerError):
            await owner.append(b"too late")
        assert (await client.ledgers.record(ledger_id, fresh=True)).record.closed

    play(act)


def test_every_change_ends_the_intent_it_was_made_under_also_if_it_fails():
    async def act(stage):
        admin = await filled(stage)
        await admin.grow("t", 2)
        await admin.trim("t", End.LATEST)
        stage.client.commit_actions = fails
        with pytest.raises(errors.TxnConflict):
            await admin.terminate("t")

        names = stage.world.store.peek_children(paths.INTENTS)
        intents = [await stage.client.intents.get(name) for name in names]
        made = [one.is_open for one in intents if one.record.kind == "system"]
        assert made == [False] * (2 + TRIES_MAX)

    async def fails(*arguments, **options):
        raise errors.TxnConflict("no")

    play(act)


# -- retention ----------------------------------------------------------------------------------


async def retained(stage):
    intent = await stage.client.intents.open_system_intent("retain", "t")
    now_ms = await store_now_ms(stage.client.store)
    return await retain(stage.client, stage.topic, intent, now_ms)


def test_retention_lets_go_what_was_committed_long_ago_and_is_not_held():
    async def act(stage):
        admin = await filled(stage, every_s=100)
        assert (await retained(stage)).rows == 0
        await admin.change_policies("t", {"retention_ms": 150_000})
        await subscribed(stage, "s", 15)

        assert dict((await retained(stage)).starts) == {0: 10}
        await asyncio.sleep(1000)
        assert (await retained(stage)).rows == 0
        await stage.client.subscriptions.delete(stage.topic.id, "s", force=True)
        assert dict((await retained(stage)).starts) == {0: 30}

    play(act)


def test_a_policy_that_is_changed_while_retention_decides_is_followed():
    async def act(stage):
        admin = await filled(stage, every_s=100)
        await admin.change_policies("t", {"retention_ms": 1})
        commit = stage.client.commit_actions

        async def late(*arguments, **options):
            await admin.change_policies("t", {"retention_ms": None})
            return await commit(*arguments, **options)

        stage.client.commit_actions = late
        with pytest.raises(errors.TxnConflict):
            await retained(stage)
        assert starts(await admin.describe("t")) == [0]

    play(act)


def test_a_policy_of_the_namespace_that_is_changed_while_retention_decides_is_followed():
    async def act(stage):
        admin = await filled(stage, every_s=100)
        topics = stage.client.topics
        await admin.change_policies("t", {"retention_ms": INHERIT})
        await topics.set_namespace("public/default", {"retention_ms": 1})
        commit = stage.client.commit_actions

        async def late(*arguments, **options):
            await topics.set_namespace("public/default", {"retention_ms": 10**9})
            return await commit(*arguments, **options)

        stage.client.commit_actions = late
        with pytest.raises(errors.TxnConflict):
            await retained(stage)
        stage.client.commit_actions = commit
        assert (await retained(stage)).rows == 0
        await topics.set_namespace("public/default", {"retention_ms": 1})
        assert (await retained(stage)).rows == 30

    play(act)
