"""What topics refer to, and that the janitor leaves all of it alone."""

import asyncio
import random
from dataclasses import replace

import pytest

from spark_ledger import errors
from spark_ledger.metadata import paths
from spark_ledger.metadata.store import ANY_VERSION
from spark_ledger.topic import checkpointer
from spark_ledger.topic.log import checkpoint
from spark_ledger.topic.read.plan import plan_read
from spark_ledger.topic.subscription import records as subscription_records
from spark_ledger.topic.upkeep import ledger_inventory
from spark_ledger.topic.upkeep.compactor import compact
from spark_ledger.topic.upkeep.janitor import Janitor
from spark_ledger.topic.upkeep.ledger_inventory import References
from tests.kit.slices import read_task
from tests.unit.spark_ledger.topic.stage import play
from tests.unit.spark_ledger.topic.subscription_stage import cursor_ledgers


@pytest.fixture(autouse=True)
def _chunks_are_small_and_roots_in_ledgers(monkeypatch):
    monkeypatch.setattr(checkpoint, "TAIL_BYTES_MAX", 1)
    monkeypatch.setattr(checkpoint, "CHUNK_BYTES_MAX", 4_000)
    monkeypatch.setattr(checkpointer, "ROOT_INLINE_BYTES_MAX", 0)


async def committed(stage, count, *, inline=False):
    intent = await stage.intent()
    known = await stage.client.log(stage.topic.id).fold(fresh=True)
    for version in range(known.next, known.next + count):
        written = await stage.written(intent, [b"%d" % version], inline=inline)
        await stage.commit(intent, version, written)
    return intent


async def ended(stage, intent):
    """The query is over; nobody works under its intent any more."""
    await stage.client.cache.close()
    await stage.client.intents.finish(intent.id)


async def janitor_of(stage):
    client = await stage.another()
    return Janitor(client.store, client.ledgers, random.Random(1), lease_s=10**6)


async def values(stage):
    reader = await stage.another()
    state = await reader.log(stage.topic.id).fold(fresh=True)
    ranges = {0: (0, state.partitions[0].end_offset)}
    found = []
    for task in plan_read(state, ranges, read=await reader.tables(state, ranges)):
        async for part in read_task(reader.ledgers, task):
            found += part.record_batch.column("value").to_pylist()
    return found


@pytest.mark.parametrize("inline", [False, True])
def test_chunks_roots_and_moved_rows_of_checkpoints_are_kept_by_a_janitor_that_saw_the_log_before(
    inline,
):
    async def act(stage):
        janitor = await janitor_of(stage)
        await committed(stage, 5, inline=inline)
        await janitor.clean(force=True)
        for _ in range(2):
            await stage.client.cache.close()
            await stage.client.checkpoints.make(stage.topic.id)
            await stage.client.cache.close()
            intent = await committed(stage, 5, inline=inline)
        await ended(stage, intent)

        report = await janitor.clean(force=True)

        assert report.deleted == ()
        log = (await stage.another()).log(stage.topic.id)
        assert (await log.fold(fresh=True)).chunks()
        assert await values(stage) == [b"%d" % n for n in range(15)]

    play(act)


def test_what_checkpoints_do_not_name_any_more_goes_after_the_delay_and_the_rest_stays():
    async def act(stage):
        await stage.client.topics.change_policies("t", {"delete_delay_ms": 100_000})
        janitor = await janitor_of(stage)
        deleted = []
        for _ in range(4):
            intent = await committed(stage, 5)
            await stage.client.checkpoints.make(stage.topic.id)
            await stage.client.cache.close()
            await compact(stage.client, "t")
            await stage.client.cache.close()
            deleted += (await janitor.clean(force=True)).deleted
            await asyncio.sleep(200)
        await ended(stage, intent)

        report = await janitor.clean(force=True)

        assert len([*deleted, *report.deleted]) >= 4
        assert report.kept
        rows = [int(value) for value in await values(stage)]
        assert (len(set(rows)), rows) == (20, sorted(rows))

    play(act)


def test_a_subscriptions_cursor_ledger_is_kept_while_its_record_names_it():
    async def act(stage):
        await committed(stage, 1)
        ledger_id = 77
        client = stage.client
        references = References(client.store, client.ledgers)

        async def referred():
            return ledger_id in (await references.of([stage.topic.id], {}))[stage.topic.id].referred

        await client.subscriptions.create(stage.topic.id, "s", {0: 0})
        assert not await referred()
        path = paths.subscription(stage.topic.id, "s")
        record = subscription_records.decode_subscription((await client.store.get(path)).value)
        named = subscription_records.encode_subscription(replace(record, ledger_id=ledger_id))
        await client.store.set(path, named, ANY_VERSION)

        assert await referred()
        assert await cursor_ledgers(client, stage.topic.id) == [ledger_id]

    play(act)


def test_a_topic_whose_newest_checkpoint_cannot_be_read_keeps_all_its_ledgers(monkeypatch):
    async def act(stage):
        for _ in range(2):
            intent = await committed(stage, 5)
            await stage.client.checkpoints.make(stage.topic.id)
        await stage.client.cache.close()
        left = await stage.written(intent, [b"left behind"])
        await ended(stage, intent)
        decode_root = checkpoint.decode_root

        def damaged(value):
            root = decode_root(value)
            if root.state.next == 10:
                raise errors.UnsupportedFormat("damaged")
            return root

        monkeypatch.setattr(checkpoint, "decode_root", damaged)
        report = await (await janitor_of(stage)).clean(force=True)

        assert report.deleted == ()
        assert left.segments[0].ledger_id in report.waiting

    play(act)


def test_a_closed_ledger_is_looked_at_once(monkeypatch):
    reads = []
    read = ledger_inventory.read

    async def counted(store, path):
        reads.append(path)
        return await read(store, path)

    monkeypatch.setattr(ledger_inventory, "read", counted)

    async def act(stage):
        intent = await committed(stage, 3)
        await ended(stage, intent)
        janitor = await janitor_of(stage)
        await janitor.clean()
        assert reads
        reads.clear()

        await janitor.clean()

        assert reads == []

    play(act)
