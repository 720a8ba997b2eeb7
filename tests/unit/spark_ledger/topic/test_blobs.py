import asyncio
from dataclasses import replace

import pytest

from bookie_server.api.entry import payload_crc
from bookie_server.api.status import Status
from spark_ledger import errors
from spark_ledger.metadata import paths
from spark_ledger.metadata.store import Create, MultiFailed
from spark_ledger.topic.log.blobs import Blobs, pack, read_blob, stored_segments, unpack
from spark_ledger.topic.log.ledger_cache import LedgerCache
from spark_ledger.topic.log.segment_table import BlobPointer
from spark_ledger.topic.log.segments import INLINE, Segment
from tests.unit.spark_ledger.topic.stage import play

DATA = bytes(range(256)) * 400  # a dozen entries of the simulated bookies' size


def blobs_of(client):
    return Blobs(client.ledgers, client.cache)


def held_by(blobs, stage, intent):
    return blobs.writer(intent, stage.topic.id, stage.topic.policies)


def test_a_blob_is_read_by_another_process_while_its_ledger_is_open():
    async def act(stage):
        intent = await stage.intent()
        async with held_by(blobs_of(stage.client), stage, intent) as held:
            pointers = [await held.write(DATA), await held.write(memoryview(DATA)[:5])]

            reader = (await stage.another()).ledgers
            assert [await read_blob(reader, p) for p in pointers] == [DATA, DATA[:5]]
        assert pointers[0].ledger_id == pointers[1].ledger_id
        assert pointers[0].last > pointers[0].first == 0
        assert pointers[1].first == pointers[0].last + 1
        assert (pointers[0].bytes, pointers[0].crc) == (len(DATA), payload_crc([DATA]))

    play(act)


def test_every_copy_of_a_blob_is_on_a_bookie_when_its_pointer_is_given_out():
    async def act(stage):
        intent = await stage.intent()
        stage.world.nodes[0].kill()
        async with held_by(blobs_of(stage.client), stage, intent) as held:
            pointer = await held.write(DATA, every_copy=True)
        record = (await stage.client.ledgers.record(pointer.ledger_id)).record
        for node in stage.world.nodes[1:]:
            answer = await stage.client.ledgers.cluster.bookies.read(
                node.bookie_id, pointer.ledger_id, pointer.last, pointer.last, max_bytes=1 << 20
            )
            assert len(answer.results) == 1 and answer.results[0].status is Status.OK
        assert stage.world.nodes[0].bookie_id not in record.last_fragment.ensemble

    play(act)


async def two_of_three(stage, held):
    """The held ledger's bookies but for one, and nobody else, are up."""
    pointer = await held.write(b"first")
    record = (await stage.client.ledgers.record(pointer.ledger_id)).record
    ensemble = record.last_fragment.ensemble
    for node in stage.world.nodes:
        if node.bookie_id == ensemble[0] or node.bookie_id not in ensemble:
            node.kill()


def test_with_bookies_down_a_blob_has_the_copies_that_can_be_made():
    async def act(stage):
        intent = await stage.intent()
        async with held_by(blobs_of(stage.client), stage, intent) as held:
            await two_of_three(stage, held)
            pointer = await held.write(DATA)
            assert await read_blob(stage.client.ledgers, pointer) == DATA
            assert len(await held.checks()) == 2  # of the first blob's ledger and of this one's

    play(act)


def test_a_blob_that_must_have_every_copy_is_not_given_out_with_fewer():
    async def act(stage):
        intent = await stage.intent()
        async with held_by(blobs_of(stage.client), stage, intent) as held:
            await two_of_three(stage, held)
            with pytest.raises((errors.Unavailable, errors.NotEnoughBookies)):
                await held.write(DATA, every_copy=True)

    play(act)


def test_a_ledger_that_is_held_is_nobody_elses():
    async def act(stage):
        intent = await stage.intent()
        blobs = blobs_of(stage.client)
        async with (
            held_by(blobs, stage, intent) as one,
            held_by(blobs, stage, intent) as other,
        ):
            first, second = await one.write(b"one"), await other.write(b"other")
        assert first.ledger_id != second.ledger_id
        async with held_by(blobs, stage, intent) as third:
            again = await third.write(b"third")
        assert again.ledger_id in (first.ledger_id, second.ledger_id)

    play(act)


def test_a_blob_that_was_cut_in_its_ledger_is_written_to_another():
    async def act(stage):
        intent = await stage.intent()
        async with held_by(blobs_of(stage.client), stage, intent) as held:
            first = await held.write(b"before")
            other = await stage.another()
            await other.ledgers.recover(first.ledger_id)
            second = await held.write(DATA)
            assert second.ledger_id != first.ledger_id
            assert await read_blob(other.ledgers, first) == b"before"
            assert await read_blob(other.ledgers, second) == DATA

    play(act)


def test_the_multi_that_names_a_blob_fails_when_its_ledger_was_deleted_in_between():
    async def act(stage):
        intent = await stage.intent()
        other = await stage.another()
        async with held_by(blobs_of(stage.client), stage, intent) as held:
            pointer = await held.write(DATA)
            checks = await held.checks()
            await other.ledgers.recover(pointer.ledger_id)
            with pytest.raises(MultiFailed):
                await stage.client.store.multi([*checks, Create("/named")])

            await stage.client.store.multi([*await held.checks(), Create("/named")])
            await other.ledgers.delete(pointer.ledger_id)
            with pytest.raises(errors.NoSuchLedger):
                await held.checks()
        with pytest.raises(errors.NoSuchLedger):
            await read_blob(other.ledgers, pointer)
        assert stage.world.store.peek(paths.ledger(pointer.ledger_id)) is None

    play(act)


def test_bytes_that_are_not_what_the_pointer_says_are_no_blob():
    async def act(stage):
        intent = await stage.intent()
        blobs = blobs_of(stage.client)
        async with held_by(blobs, stage, intent) as held:
            pointer = await held.write(DATA)
            with pytest.raises(errors.DigestMismatch, match="another checksum"):
                await read_blob(stage.client.ledgers, replace(pointer, crc=pointer.crc ^ 1))
            with pytest.raises(errors.DigestMismatch, match="another checksum"):
                await read_blob(stage.client.ledgers, replace(pointer, last=pointer.last - 1))

    play(act)


def test_a_blob_whose_ledger_ends_before_it_is_unavailable_and_never_shorter():
    async def act(stage):
        intent = await stage.intent()
        blobs = blobs_of(stage.client)
        async with held_by(blobs, stage, intent) as held:
            pointer = await held.write(b"x")
        await stage.client.ledgers.recover(pointer.ledger_id)
        beyond = BlobPointer(pointer.ledger_id, 0, 0, 7, 100, 0)
        with pytest.raises(errors.DataUnavailable, match="cut off"):
            await read_blob(stage.client.ledgers, beyond)

    play(act)


def test_nothing_is_written_under_an_intent_that_ended():
    async def act(stage):
        intent = await stage.intent()
        await stage.client.intents.condemn(intent.id, "stale")
        with pytest.raises(errors.LedgerFenced):
            async with held_by(blobs_of(stage.client), stage, intent) as held:
                await held.write(DATA)

    play(act)


def test_payloads_of_a_commit_are_stored_as_entries_and_their_segments_move_there():
    async def act(stage):
        intent = await stage.intent()
        inline = [
            Segment(0, INLINE, 0, ((0, 1),), (3, 4), 7, 70, 1, 2, inline=(b"a", b"bb")),
            Segment(1, INLINE, 0, ((0, 0),), (5,), 5, 50, 1, 2, inline=(b"ccc",)),
        ]
        payloads = [payload for one in inline for payload in one.inline]
        async with held_by(blobs_of(stage.client), stage, intent) as held:
            await held.write(DATA)
            stored = await held.store(payloads, [3, 4, 5])
            assert len(await held.checks()) == 1
        moved = stored_segments(inline, stored)

        assert [one.entries for one in moved] == [
            ((stored.first, stored.first + 1),),
            ((stored.last, stored.last),),
        ]
        assert [(one.rows, one.entry_rows, one.inline) for one in moved] == [
            (7, (3, 4), ()),
            (5, (5,), ()),
        ]
        reader = await (await stage.another()).ledgers.open(stored.ledger_id, recover=True)
        read = reader.read(stored.first, stored.last)
        assert [bytes(entry.payload) async for _, entry in read] == payloads

    play(act)


def test_a_writer_that_is_cancelled_gives_its_ledger_back():
    async def act(stage):
        intent = await stage.intent()
        cache = LedgerCache(stage.client.ledgers, stage.client.intents)
        blobs = Blobs(stage.client.ledgers, cache)

        async def write():
            async with held_by(blobs, stage, intent) as held:
                await held.write(b"x")
                await asyncio.sleep(3600)

        task = asyncio.create_task(write())
        await asyncio.sleep(5)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        (ledger_id,) = [one async for one in stage.client.ledgers.list()]
        await cache.close()
        assert (await stage.client.ledgers.record(ledger_id, fresh=True)).record.closed

    play(act)


def test_what_is_packed_is_a_length_and_a_zstd_frame_and_damage_to_it_is_told():
    packed = pack(DATA)
    assert packed[:12] == len(DATA).to_bytes(8, "little") + b"\x28\xb5\x2f\xfd"
    assert len(packed) < len(DATA) / 10
    assert unpack(packed) == DATA
    assert unpack(pack(b"")) == b""

    longer = (len(DATA) + 1).to_bytes(8, "little") + packed[8:]
    for damaged in (b"", packed[:-3], b"x" + packed, b"no frame at all", longer):
        with pytest.raises(errors.UnsupportedFormat, match="packed bytes"):
            unpack(damaged)
