"""Committed rows that are gone: told with their offsets, or left out exactly."""

import asyncio
from types import SimpleNamespace

import pytest

from spark_ledger.errors import NoSuchLedger, RowsLost
from spark_ledger.spark.read import planning
from spark_ledger.topic.log.segment_table import SegmentTable
from spark_ledger.topic.log.segments import PlacedSegment, Segment
from spark_ledger.topic.read.pieces import Span, slices_of
from spark_ledger.topic.read.plan import EMPTY_LEDGER_END, LedgerEnd, ReadTask


def task(ledger_id: int, entries: range, start: int) -> ReadTask:
    """Ten rows an entry, from offset `start` on."""
    rows = 10 * len(entries)
    ends = ((entries[0], entries[-1]),)
    segment = Segment(2, ledger_id, 0, ends, (10,) * len(entries), rows, 1000, 1, 2)
    table = SegmentTable.of([PlacedSegment(segment, start, 0, 0)])
    return ReadTask("t", "id-1", (Span(2, start, start + rows, 0, 1),), table)


def test_nothing_is_lost_where_ledgers_are_open_or_end_behind_the_rows():
    tasks = [task(7, range(3, 5), 100), task(8, range(2), 120)]
    assert planning.without_lost_rows(tasks, {7: None, 8: LedgerEnd(1, 20)}, True) == tasks


def test_a_loss_is_told_with_its_rows_and_offsets():
    with pytest.raises(RowsLost, match="20 committed rows are gone") as caught:
        planning.without_lost_rows([task(7, range(3, 6), 100)], {7: LedgerEnd(3, 40)}, True)
    assert "partition 2 offsets 110 to 129 (ledger 7)" in str(caught.value)


def test_a_loss_that_is_accepted_leaves_out_exactly_these_rows():
    (kept,) = planning.without_lost_rows([task(7, range(3, 6), 100)], {7: LedgerEnd(4, 50)}, False)
    (part,) = slices_of(kept.table, kept.spans)
    assert [int(pieces["offset"][0]) for _, pieces in part.entries] == [100, 110]


def test_a_task_whose_ledger_is_gone_has_nothing_left():
    tasks = [task(7, range(2), 0), task(8, range(2), 20)]
    assert planning.without_lost_rows(tasks, {7: EMPTY_LEDGER_END, 8: None}, False) == tasks[1:]


def test_a_ledger_that_a_lagging_replica_does_not_show_yet_is_not_lost():
    class Lagging:
        async def record(self, ledger_id, *, fresh=False):
            if ledger_id == 8 or not fresh:
                raise NoSuchLedger(f"there is no ledger {ledger_id}")
            return SimpleNamespace(record=SimpleNamespace(last_entry=4, rows=50))

    ends = planning.LedgerEndsCache(Lagging())
    tasks = [task(7, range(2), 0), task(8, range(2), 20)]
    assert asyncio.run(ends.of_tasks(tasks)) == {7: LedgerEnd(4, 50), 8: planning.NO_LEDGER}
