"""What cannot be read of one item, or a defect there, ends that item and no background task."""

import asyncio
import logging
from dataclasses import replace

import pytest

from spark_ledger import errors
from spark_ledger.metadata import deleted_ledgers, paths
from spark_ledger.metadata.hold import encode_counter
from spark_ledger.metadata.store import ANY_VERSION
from spark_ledger.topic.client import TopicClient
from spark_ledger.topic.log import records
from spark_ledger.topic.upkeep.upkeep import Upkeep
from tests.unit.spark_ledger.topic.consumers import broker, play_here, written
from tests.unit.spark_ledger.topic.stage import play

NAMES = ("s0", "s1", "s2")


@pytest.fixture(autouse=True)
def logs_again():
    """What cannot be read is logged once in a process."""
    records.log_unreadable.cache_clear()


async def used(stage):
    """A broker with three subscriptions, and those of their cursors that have failed."""
    a, failed = await broker(stage, "a"), []
    cursors = [await a.open(5, name) for name in NAMES]
    for one in cursors:
        await one.adopt(0, 1)
        one.on_failure = lambda name=one.name: failed.append(name)
    await written(*cursors)
    return a, cursors, failed


async def floors(stage, *names):
    found = await stage.client.subscriptions.list(stage.topic.id)
    return {one.name: one.positions[0] for one in found if one.name in names}


@pytest.mark.parametrize("what", ["record", "share of another broker", "marks"])
def test_a_subscription_that_cannot_be_read_stops_the_positions_of_no_other(what):
    async def act(stage):
        a, cursors, failed = await used(stage)
        store, topic_id = stage.client.store, stage.topic.id
        path, value = paths.subscription(topic_id, "s1"), await _value(stage, "s1")
        if what == "record":
            await store.set(path, b"{", ANY_VERSION)
        elif what == "marks":
            await store.set(paths.subscription_marks(topic_id, "s1", 0), b"{}", ANY_VERSION)
            cursors[1].advance(0, 3)  # a step back, for which marks are read
        else:
            await store.create(paths.subscription_share(topic_id, "s1", "b"), b"[]")
            cursors[1].must_reread = True
        for at in (20, 30):
            for one in (cursors[0], cursors[2]):
                one.advance(0, at)
            if what == "record":
                cursors[1].advance(0, at)
            await asyncio.sleep(30)
        if what == "marks":  # no rows are trimmed by them
            assert (failed, await floors(stage, "s1")) == ([], {"s1": 3})
        else:
            assert failed == ["s1"], "its consumers are sent away"
            with pytest.raises(errors.UnsupportedFormat):
                await a.open(5, "s1")
        if what == "record":
            await store.set(path, value, ANY_VERSION)
        elif what == "share of another broker":
            await store.delete(paths.subscription_share(topic_id, "s1", "b"))
        assert await floors(stage, "s0", "s2") == {"s0": 30, "s2": 30}

    play_here(act)


async def _value(stage, name):
    return (await stage.client.store.get(paths.subscription(stage.topic.id, name))).value


def test_a_defect_at_one_subscription_lets_the_others_be_written(caplog):
    async def act(stage):
        _, cursors, failed = await used(stage)

        async def failing(share):
            raise RuntimeError("a defect")

        cursors[1].operations = failing
        for one in cursors:
            one.advance(0, 20)
        await asyncio.sleep(10)
        assert await floors(stage, *NAMES) == {"s0": 20, "s1": 5, "s2": 20}
        del cursors[1].operations
        await written(*cursors)
        assert (await floors(stage, "s1"), failed) == ({"s1": 20}, [])

    with caplog.at_level(logging.ERROR):
        play_here(act)
    assert "the position of subscription 's1' is not written" in caplog.text


def test_a_defect_at_one_topic_does_not_end_the_upkeep_of_the_others():
    async def act(stage):
        other = await stage.client.topics.create("u")
        await stage.client.topics.change_policies("u", {"retention_ms": 1})
        upkeep, retained, looked = Upkeep(stage.client), [], []

        async def retain(info, now_ms, dry_run):
            if info.id == stage.topic.id:
                raise RuntimeError("a defect")
            retained.append(info.id)
            return await Upkeep._retain(upkeep, info, now_ms, dry_run)

        def ack_copies(topic_id):
            looked.append(topic_id)
            return TopicClient.ack_copies(stage.client, topic_id)

        upkeep._retain, stage.client.ack_copies = retain, ack_copies
        report = await upkeep.once()
        assert report.problems == {"t": "RuntimeError('a defect')"}
        assert retained == [other.id]
        assert sorted(looked) == sorted([stage.topic.id, other.id]), "the other work is done"
        await upkeep.close()

    play(act)


def test_a_damaged_set_of_deleted_ledgers_keeps_the_ledgers_of_its_folder_alone():
    async def act(stage):
        store, ledgers = stage.client.store, []
        await store.create(paths.LEDGER_IDS, encode_counter(1))
        for first in (1, deleted_ledgers.IDS_PER_FOLDER):
            await store.set(paths.LEDGER_IDS, encode_counter(first), ANY_VERSION)
            intent = await stage.intent(f"run-{first}")
            result = await stage.written(intent, [b"never committed"])
            ledgers += [segment.ledger_id for segment in result.segments]
            await stage.client.intents.finish(intent.id)
        folders = [paths.ledger_folder(ledger) for ledger in ledgers]
        assert folders[0] != folders[1]
        get = store.get

        async def get_damaged(path, watch=None):
            node = await get(path, watch)
            return replace(node, value=b"junk") if path == folders[0] else node

        store.get = get_damaged
        report = await stage.janitor.clean(force=True)
        assert report.deleted == (ledgers[1],)
        assert folders[0] in report.waiting[ledgers[0]]

    play(act)


@pytest.mark.parametrize(
    ("what", "is_open"),
    [("intent", False), ("block", False), ("block", True), ("ledger", False), ("ledger", True)],
)
def test_what_the_janitor_cannot_read_stops_no_other_work_and_nothing_of_it_is_deleted(
    what, is_open, caplog
):
    async def act(stage):
        store, client = stage.client.store, stage.client
        gone = await client.topics.create("gone", policies={"delete_delay_ms": 0})
        bad = await client.intents.open_batch_intent("bad", "r", "t")
        good = await client.intents.open_batch_intent("good", "r", "t")
        (hidden,) = (await replace(stage, topic=gone).written(bad, [b"a"])).segments
        (other,) = (await stage.written(good, [b"b"])).segments
        await client.cache.close()
        for intent in (good,) if is_open else (good, bad):
            await client.intents.finish(intent.id)
        await client.topics.delete("gone")
        blocks = paths.intent_blocks(bad.id)
        path = {
            "intent": paths.intent(bad.id),
            "block": f"{blocks}/{(await store.children(blocks))[0]}",
            "ledger": paths.ledger(hidden.ledger_id),
        }[what]
        get = store.get

        async def get_damaged(asked, watch=None):
            node = await get(asked, watch)
            return replace(node, value=b"{") if asked == path else node

        store.get = get_damaged

        def there():
            nodes = (paths.ledger(other.ledger_id), paths.ledger(hidden.ledger_id))
            return [stage.world.store.peek(node) is not None for node in nodes]

        for _ in range(3):
            await stage.janitor.clean()
            assert there() == [False, True]
            assert stage.world.store.peek(paths.topic(gone.id)) is not None
        assert "cannot be read" in caplog.text
        assert (str(hidden.ledger_id) if what == "ledger" else bad.id) in caplog.text
        store.get = get
        await stage.janitor.clean()
        assert there() == [False, False]
        await stage.janitor.clean()
        assert stage.world.store.peek(paths.topic(gone.id)) is None

    play(act)


def test_a_writer_without_a_heartbeats_node_counts_as_at_work(caplog):
    async def act(stage):
        bad = await stage.client.intents.open_batch_intent("bad", "r", "t")
        await stage.client.store.delete(paths.intent_heartbeat(bad.id))
        good = await stage.client.intents.open_batch_intent("good", "r", "t")
        (other,) = (await stage.written(good, [b"b"])).segments
        await stage.client.cache.close()
        await stage.client.intents.finish(good.id)
        report = await stage.janitor.clean()
        assert (report.deleted, report.condemned) == ((other.ledger_id,), ())
        assert f"the heartbeat of intent {bad.id} cannot be read" in caplog.text

    play(act)


def test_a_mark_that_cannot_be_read_holds_all_rows_and_goes_with_its_subscription(caplog):
    async def act(stage):
        a, cursors, _ = await used(stage)
        subscriptions, topic_id = stage.client.subscriptions, stage.topic.id
        marks = paths.subscription_marks(topic_id, "s1")
        assert (await subscriptions.holds(topic_id, 1)).offsets == {0: 5}
        await stage.client.store.set(f"{marks}/{0:010d}", b"{", ANY_VERSION)
        await stage.client.store.create(f"{marks}/x", b"")
        held = await subscriptions.holds(topic_id, 1)
        assert (held.offsets, held.holders) == ({0: 0}, {0: "s1"})
        assert f"{marks}/x" in caplog.text
        await a.cursors.release(cursors[1], 5)
        await subscriptions.delete(topic_id, "s1")
        assert (await subscriptions.holds(topic_id, 1)).offsets == {0: 5}

    play_here(act)


def test_a_topic_that_cannot_be_read_stops_the_maintenance_of_no_other():
    async def act(stage):
        bad = await stage.client.topics.create("bad")
        await stage.client.topics.change_policies("t", {"retention_ms": 1})
        intent = await stage.intent()
        await stage.commit(intent, 0, await stage.written(intent, [b"a"]))
        await stage.client.store.set(paths.topic(bad.id), b"{", ANY_VERSION)
        with pytest.raises(errors.UnsupportedFormat):
            await stage.client.topics.list()
        assert [info.name.short for info in await stage.client.topics.list({})] == ["t"]
        await asyncio.sleep(7200)
        report = await Upkeep(stage.client).once()
        assert "bad" in report.problems
        assert report.trimmed.keys() == {"t"}

    play(act)
