import asyncio
from dataclasses import replace

import pytest

from spark_ledger import errors
from spark_ledger.topic.log import blobs
from spark_ledger.topic.log.blobs import ChunkStore
from spark_ledger.topic.log.segment_table import SegmentTable, TableChunk
from spark_ledger.topic.log.segments import PlacedSegment
from tests.unit.spark_ledger.topic.stage import play, segment


def table(ledger_id, count=20):
    return SegmentTable.of(
        PlacedSegment(segment(ledger_id, 5, first=n), 5 * n, n, n) for n in range(count)
    )


async def stored(stage, count):
    intent = await stage.intent()
    async with stage.client.blobs.writer(intent, stage.topic.id, stage.topic.policies) as held:
        return [TableChunk(await held.write(table(n).encode()), 20, 100) for n in range(count)]


def counted(reader):
    """The ledgers opened by the reader from now on."""
    opened = []
    plain = reader.ledgers.open

    async def open_(ledger_id, **options):
        opened.append(ledger_id)
        return await plain(ledger_id, **options)

    reader.ledgers.open = open_
    return opened


def test_a_chunk_is_read_once_whoever_asks_and_kept():
    async def act(stage):
        chunks = await stored(stage, 6)
        reader = await stage.another()
        opened = counted(reader)
        store = ChunkStore(reader.ledgers)

        both = await asyncio.gather(store.load(chunks), store.load(reversed(chunks)))
        again = await store.load(chunks[2:3])

        assert len(opened) == 6
        assert [[*one] for one in both] == [chunks, chunks[::-1]]
        assert [one.batch for one in both[0].values()] == [table(n).batch for n in range(6)]
        assert again[chunks[2]] is both[0][chunks[2]]

    play(act)


def test_what_is_kept_is_bounded_in_bytes_and_what_was_used_last_stays(monkeypatch):
    async def act(stage):
        chunks = await stored(stage, 4)
        size = table(0).nbytes
        reader = await stage.another()
        monkeypatch.setattr(blobs, "KEPT_BYTES_MAX", 2 * size + size // 2)
        store = ChunkStore(reader.ledgers)

        await store.load(chunks[:2])
        await store.load(chunks[:1])
        await store.load(chunks[2:3])
        assert 0 < store.kept_bytes <= 2.5 * size
        opened = counted(reader)
        await store.load([chunks[0], chunks[2]])
        assert opened == []
        await store.load([chunks[1]])
        assert len(opened) == 1
        assert len(await store.load(chunks)) == 4
        assert store.kept_bytes <= 2.5 * size

    play(act)


def test_a_chunk_that_is_not_what_its_root_says_is_an_error_and_is_read_again_later():
    async def act(stage):
        (chunk,) = await stored(stage, 1)
        store = ChunkStore((await stage.another()).ledgers)
        with pytest.raises(errors.UnsupportedFormat, match="has 20 segments, not 21"):
            await store.load([replace(chunk, segments=21)])
        gone = replace(chunk, pointer=replace(chunk.pointer, ledger_id=999))
        for _ in range(2):
            with pytest.raises(errors.NoSuchLedger):
                await store.load([chunk, gone])
        assert list(await store.load([chunk])) == [chunk]

    play(act)


def test_one_who_gives_up_waiting_does_not_end_the_read_of_others():
    async def act(stage):
        chunks = await stored(stage, 1)
        store = ChunkStore((await stage.another()).ledgers)
        one = asyncio.create_task(store.load(chunks))
        other = asyncio.create_task(store.load(chunks))
        await asyncio.sleep(0)
        one.cancel()
        assert list(await other) == chunks
        await store.close()

    play(act)
