"""A live ledger whose last entries no owner wrote, or that cannot be read: its partition opens, or
says why not, and a person may have it opened."""

import asyncio
import pickle

import pytest

from spark_ledger import errors
from spark_ledger.ledger.reader import AsyncLedgerReader
from spark_ledger.topic.commit.seal import seal_live_segment
from spark_ledger.topic.read.live import LiveEnds, live_task
from spark_ledger.topic.upkeep import compactor
from spark_ledger.topic.upkeep.live_repair import Fault, find_unopened, repair
from tests.kit.rows import read_rows
from tests.unit.spark_ledger.broker.owners import another_of, owner_of
from tests.unit.spark_ledger.topic.batches import FOREIGN, JUNK, header
from tests.unit.spark_ledger.topic.live_segments import with_live
from tests.unit.spark_ledger.topic.stage import play


async def live_of(stage):
    return (await stage.client.log(stage.topic.id).fold(fresh=True)).partitions[0].live


@pytest.mark.parametrize("payload", FOREIGN.values(), ids=FOREIGN)
@pytest.mark.parametrize("count", [1, 3])
def test_a_segment_ends_in_front_of_entries_that_no_owner_wrote(payload, count, caplog):
    async def act(stage):
        owner = await with_live(stage, 0, 3, 2)
        for _ in range(count):
            await owner.writer.append([payload], rows=1)

        found = await seal_live_segment(stage.client.ledgers, await live_of(stage))

        assert (found.segment.rows, found.segment.entries) == (5, ((0, 1),))
        length = (await stage.client.ledgers.record(owner.writer.ledger_id)).record.length_bytes
        assert found.segment.bytes == length - count * len(payload)

    play(act)
    told = [
        one.getMessage() for one in caplog.records if "ends before this entry" in one.getMessage()
    ]
    assert len(told) == count
    assert repr(payload[:32]) in told[0]


def test_a_segment_of_foreign_entries_alone_is_sealed_as_nothing():
    async def act(stage):
        owner = await with_live(stage, 0)
        await owner.writer.append([JUNK], rows=1)
        assert (await seal_live_segment(stage.client.ledgers, await live_of(stage))).segment is None

    play(act)


def test_a_foreign_entry_between_an_owners_is_a_row_that_a_read_meets():
    async def act(stage):
        owner = await with_live(stage, 0, 3)
        await owner.writer.append([JUNK], rows=1)
        owner.rows += 1
        await owner.append(2)

        found = await seal_live_segment(stage.client.ledgers, await live_of(stage))
        assert (found.segment.rows, found.segment.entries) == (6, ((0, 2),))

    play(act)


def test_the_next_owner_opens_the_partition_and_goes_on_at_the_offset_of_what_is_foreign():
    async def act(stage):
        owner = await owner_of(stage)
        await owner.all_stored(owner.send([b"a", b"b"]))
        await owner.writer._ledger.writer.append([JUNK], rows=1)
        successor = await (await another_of(stage)).take()
        sent = successor.send([b"c"])

        assert await successor.all_stored(sent) == [[2]]
        await successor.writer.close()
        assert await stage.rows() == [(0, b"a"), (1, b"b"), (2, b"c")]

    play(act)


def test_of_a_live_segment_what_is_foreign_at_its_end_is_not_read_and_what_follows_it_is():
    async def act(stage):
        owner, ends = await with_live(stage, 0, 3), LiveEnds(stage.client.ledgers)
        await owner.writer.append([JUNK], rows=1)
        live = await live_of(stage)
        await ends.refresh([live])
        assert (ends.end_of(live).rows, ends.end_of(live).closed) == (3, False)

        owner.rows += 1
        await owner.append(2)
        await ends.refresh([live])
        assert ends.end_of(live).rows == 6
        state = await stage.client.log(stage.topic.id).fold(fresh=True)
        for lo, expected in ((4, [(4, b"4"), (5, b"5")]), (5, [(5, b"5")])):
            task = live_task("t", state, 0, lo, ends.end_of(live))
            found = []
            async for rows in read_rows(stage.client, task):
                found += enumerate(rows.record_batch.column("value").to_pylist(), rows.offset)
            assert found == expected
        with pytest.raises(errors.BadEntry, match=r"topic 't', partition 0, offset 3 \(ledger"):
            task = live_task("t", state, 0, 0, ends.end_of(live))
            [rows async for rows in read_rows(stage.client, task)]

    play(act)


def test_an_entry_of_a_later_version_is_not_left_out():
    async def act(stage):
        owner = await with_live(stage, 0, 3)
        await owner.writer.append([header(first_row=3, version=3)], rows=1)
        live = await live_of(stage)
        with pytest.raises(errors.UnsupportedFormat, match="is of a later version") as raised:
            await seal_live_segment(stage.client.ledgers, live)
        assert not isinstance(raised.value, errors.BadEntry)
        (one,) = await find_unopened(stage.client, stage.topic)
        assert (one.fault, one.is_repairable) == (Fault.LATER, False)

    play(act)


@pytest.fixture(params=["readers find it", "bookies find it"])
def damage(request, monkeypatch):
    """Entries, by their ids, of which every copy is damaged from now on."""
    real, damaged = AsyncLedgerReader.read_entries, set()

    async def read_entries(reader, ids, **options):
        async for run in real(reader, ids, **options):
            for entry in run:
                entry_id = entry.header.entry_id
                if entry_id not in damaged:
                    yield [entry]
                elif request.param == "readers find it":
                    raise errors.DigestMismatch(f"entry {entry_id} cannot be read")
                else:
                    raise errors.DataUnavailable(f"entry {entry_id} cannot be read", damaged=True)

    monkeypatch.setattr(AsyncLedgerReader, "read_entries", read_entries)
    return damaged


def test_a_last_entry_that_is_damaged_on_every_copy_is_a_loss_that_names_its_offsets(damage):
    async def act(stage):
        await with_live(stage, 0, 3, 2)
        damage.add(1)
        with pytest.raises(errors.DigestMismatch, match="offsets up to 4 of partition 0") as raised:
            await seal_live_segment(stage.client.ledgers, await live_of(stage))
        assert "topic repair" in raised.value.remedy

    play(act)


def test_rows_that_are_damaged_on_every_copy_are_given_up_by_a_person_and_keep_their_offsets(
    damage,
):
    async def act(stage):
        owner = await with_live(stage, 0, 3, 2, 1)
        damage.update((1, 2))
        with pytest.raises(errors.DigestMismatch):  # an owner tries, which closes the ledger
            await seal_live_segment(stage.client.ledgers, await live_of(stage))

        (one,) = await find_unopened(stage.client, stage.topic)
        assert (one.fault, one.offsets) == (Fault.DAMAGED, (3, 6))
        assert [entry.entry_id for entry in one.entries] == [1, 2]
        assert all(len(entry.copies) == 2 for entry in one.entries)
        assert (await live_of(stage)).ledger_id == owner.writer.ledger_id, "a look changes nothing"

        commits = (await stage.client.log(stage.topic.id).fold(fresh=True)).next
        await repair(stage.client, stage.topic, one)
        state = await stage.client.log(stage.topic.id).fold(fresh=True)
        assert state.next == commits + 1, "a crash leaves all of it or nothing"
        held = state.partitions[0]
        assert (held.live, held.end_offset, held.rows_between(0, 6)) == (None, 6, 3)
        assert await stage.rows() == [(0, b"0"), (1, b"1"), (2, b"2")]
        assert await find_unopened(stage.client, stage.topic) == []

    play(act)


def test_an_owners_entry_among_damaged_ones_in_a_window_is_the_end_in_front_of_what_is_foreign(
    damage,
):
    """The window that is read back over the foreign entries begins with damaged ones."""

    async def act(stage):
        owner = await with_live(stage, 0, 1, 1, 1, 1)
        for _ in range(5):
            await owner.writer.append([JUNK], rows=1)
        damage.update((0, 1, 2))
        found = await seal_live_segment(stage.client.ledgers, await live_of(stage))
        assert (found.segment.rows, found.segment.entries) == (4, ((0, 3),))

    play(act)


def test_a_long_tail_of_foreign_entries_is_read_in_windows_and_not_entry_by_entry(monkeypatch):
    real, reads = AsyncLedgerReader.read_entries, []

    def read_entries(reader, ids, **options):
        reads.append(ids)
        return real(reader, ids, **options)

    monkeypatch.setattr(AsyncLedgerReader, "read_entries", read_entries)

    async def act(stage):
        owner, ends = await with_live(stage, 0, 3, 2), LiveEnds(stage.client.ledgers)
        await asyncio.gather(*(owner.writer.append([JUNK], rows=1) for _ in range(500)))
        live = await live_of(stage)
        reads.clear()
        await ends.refresh([live])
        assert ends.end_of(live).rows == 5
        assert len(reads) <= 10

        reads.clear()
        found = await seal_live_segment(stage.client.ledgers, live)
        assert found.segment.entries == ((0, 1),)
        assert len(reads) <= 10

    play(act)


def test_a_ledger_of_which_all_rows_are_given_up_is_dropped(damage):
    async def act(stage):
        owner = await with_live(stage, 0, 3, 2)
        damage.update((0, 1))
        with pytest.raises(errors.DigestMismatch):
            await seal_live_segment(stage.client.ledgers, await live_of(stage))
        (one,) = await find_unopened(stage.client, stage.topic)
        assert one.offsets == (0, 5)
        await repair(stage.client, stage.topic, one)
        state = await stage.client.log(stage.topic.id).fold(fresh=True)
        assert state.partitions[0].rows_between(0, 5) == 0
        assert owner.writer.ledger_id in state.dropped

    play(act)


def test_a_person_sees_the_bytes_and_the_copies_and_what_would_be_done():
    async def act(stage):
        owner = await with_live(stage, 0, 3)
        await owner.writer.append([JUNK], rows=1)
        assert await find_unopened(stage.client, stage.topic) == [], "its owner is at work"
        await stage.client.ledgers.recover(owner.writer.ledger_id)

        (one,) = await find_unopened(stage.client, stage.topic)
        (entry,) = one.entries
        assert (one.fault, one.is_repairable, one.live.partition) == (Fault.FOREIGN, True, 0)
        assert (entry.entry_id, entry.payload_bytes, entry.begins) == (1, len(JUNK), JUNK[:32])
        assert len(set(entry.copies)) == 2

        await repair(stage.client, stage.topic, one)
        assert await stage.rows() == [(0, b"0"), (1, b"1"), (2, b"2")]
        assert await find_unopened(stage.client, stage.topic) == []

    play(act)


async def six_small_segments(stage):
    """Each of 20 rows, and in a ledger of its own."""
    for version in range(6):
        intent = await stage.intent()
        rows = [b"%d of %d" % (row, version) for row in range(20)]
        await stage.commit(intent, version, await stage.written(intent, rows))
        await stage.client.cache.close()


def test_a_merge_that_meets_a_foreign_entry_leaves_its_segments_as_they_are_and_ends(
    caplog, monkeypatch
):
    def met(fetched):
        raise errors.BadEntry("topic 't', partition 0, offset 3: another program's")

    monkeypatch.setattr(compactor, "blocks_and_batches", met)

    async def act(stage):
        await six_small_segments(stage)

        done = await compactor.compact(stage.client, "t")

        assert (done.segments, len(await stage.rows())) == (0, 120)

    play(act)
    assert "stay as they are: " in caplog.text


def test_a_merge_in_another_process_that_meets_a_foreign_entry_is_not_planned_again(monkeypatch):
    def met(fetched):
        raise errors.BadEntry("topic 't', partition 0, offset 3: another program's")

    async def act(stage):
        await six_small_segments(stage)
        executor = await stage.another()
        compaction = compactor.Compaction(stage.client, stage.topic)
        (task,) = await compaction.plan()
        monkeypatch.setattr(compactor, "blocks_and_batches", met)

        results = await compactor.merge(executor, stage.topic, compaction.intent, task)
        await compaction.commit(pickle.loads(pickle.dumps(results)))

        assert await compaction.plan() == ()
        assert (compaction.total.segments, len(results)) == (0, len(task.merges))
        await compaction.aclose()
        await executor.cache.close()
        monkeypatch.undo()
        assert len(await stage.rows()) == 120

    play(act)
