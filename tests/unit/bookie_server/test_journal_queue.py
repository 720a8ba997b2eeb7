"""Which records go into the next batch: order per ledger, recovery ahead, bulk never starved."""

import asyncio
import random

import pytest

from bookie_server.journal.format import RECORD_HEADER_BYTES, Record, RecordKind
from bookie_server.journal.writer import JournalQueue
from bookie_server.lanes import Lane
from tests.simulation.loop import run

GROUP, BATCH = 4000, 10_000


def entry(ledger_id, number, size=100):
    return Record(RecordKind.ENTRY, ledger_id, number, bytes(size - RECORD_HEADER_BYTES), 0)


def put(queue, *records, lane=Lane.BULK, after=()):
    done = asyncio.get_running_loop().create_future()
    queue.put(records, lane, after, done)
    return done


def numbers(groups):
    return [record.entry_id for group in groups for record in group.records]


def write(groups):
    for group in groups:
        group.ack.count_written()


def test_recovery_leaves_with_the_next_batch_whatever_waits_of_other_ledgers():
    async def main():
        queue = JournalQueue(GROUP, BATCH)
        for number in range(1000):
            put(queue, entry(number % 5, number, 1000))
        fence = Record(RecordKind.FENCE, 9, -1, b"", 0)
        put(queue, fence, lane=Lane.RECOVERY)
        assert queue.take()[0].records[0] is fence

    run(main())


def test_what_waits_of_the_same_ledger_goes_ahead_of_its_fence_and_nothing_else():
    async def main():
        queue = JournalQueue(GROUP, BATCH)
        for number in range(100):
            put(queue, entry(number % 50, number, 1000))
        put(queue, Record(RecordKind.FENCE, 7, 777, b"", 0), lane=Lane.RECOVERY)
        taken = numbers(queue.take() + queue.take())
        assert taken.index(7) < taken.index(57) < taken.index(777)
        assert taken.index(777) <= 4

    run(main())


def test_a_frame_of_several_ledgers_is_acknowledged_when_all_its_parts_are_written():
    async def main():
        queue = JournalQueue(GROUP, BATCH)
        put(queue, *[entry(0, number, 1000) for number in range(4)])
        done = put(queue, entry(1, 10, 1000), entry(2, 11, 1000))
        put(queue, entry(2, 12), lane=Lane.RECOVERY)  # takes one part along
        first = queue.take()
        assert 11 in numbers(first)
        assert 10 not in numbers(first)
        write(first)
        assert not done.done()
        write(queue.take())
        assert done.done()

    run(main())


@pytest.mark.parametrize("size", [100, 4000, 6000])
def test_recovery_does_not_starve_the_bulk(size):
    async def main():
        queue = JournalQueue(GROUP, BATCH)
        bulk = put(queue, entry(1, 0, size))
        for _ in range(2):
            for number in range(100):
                put(queue, entry(2, number, 6000), lane=Lane.RECOVERY)
            write(queue.take())
        assert bulk.done()

    run(main())


@pytest.mark.parametrize("seed", range(60))
def test_a_ledgers_records_leave_in_order_and_who_waits_is_told_after_all_he_waits_for(seed):
    async def main():
        rng = random.Random(seed)
        queue = JournalQueue(GROUP, BATCH)
        queued, written = {}, {}
        promises = []  # (future, what must be written by then)

        def check():
            for done, needed in promises:
                assert not done.done() or all(n in written.get(i, ()) for i, n in needed)

        for number in range(60):
            lane = rng.choice([Lane.BULK, Lane.BULK, Lane.PAGE_CACHE, Lane.RECOVERY])
            count = rng.choice([0, 1, 1, 2, 30])
            ids = [rng.randrange(4) for _ in range(count)]
            after = rng.sample(range(4), rng.choice([0, 0, 1, 2]))
            records = [entry(i, number * 100 + k, 300) for k, i in enumerate(ids)]
            for record in records:
                queued.setdefault(record.ledger_id, []).append(record.entry_id)
            heard = {*ids, *after} or range(4)
            needed = [(i, n) for i in sorted(heard) for n in queued.get(i, ())]
            promises.append((put(queue, *records, lane=lane, after=after), needed))
            if rng.random() < 0.5 and queue:
                groups = queue.take()
                assert groups
                assert sum(group.bytes for group in groups) <= BATCH
                for group in groups:
                    for record in group.records:
                        written.setdefault(record.ledger_id, []).append(record.entry_id)
                    group.ack.count_written()
                check()
        while queue:
            groups = queue.take()
            for group in groups:
                for record in group.records:
                    written.setdefault(record.ledger_id, []).append(record.entry_id)
                group.ack.count_written()
            check()
        assert written == queued
        assert all(done.done() for done, _ in promises)

    run(main())


def test_a_queue_that_failed_tells_everybody():
    async def main():
        queue = JournalQueue(GROUP, BATCH)
        waiting = [put(queue, entry(1, 0)), put(queue, entry(2, 1), lane=Lane.RECOVERY), put(queue)]
        taken = queue.take()
        queue.put_back(taken)
        queue.fail(OSError("dead"))
        assert [str(done.exception()) for done in waiting] == ["dead"] * 3
        assert not queue

    run(main())
