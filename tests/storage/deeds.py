"""What is cut short by a crash between every two of its disk operations (points.py).

Always true: a deed does little else than what it is named after, so that its points are points of
that; adds and fences that run beside it are answered or not, and count as what they are.
"""

import asyncio
from dataclasses import replace

from bookie_server.journal.format import BATCH_MAGIC
from bookie_server.logs import rebuild
from bookie_server.logs.index import LedgerState
from spark_ledger.metadata.ledger_record import Fragment, RecordState
from tests.kit.budgets import SMALL_LOGS
from tests.kit.settings import with_settings
from tests.simulation.index import SimIndex
from tests.storage.points import Deed
from tests.storage.rig import BOOKIE_ID, Shape
from tests.storage.stage import Stage

ONE = Shape(stepped=True)
TWO = Shape(journals=2, ledgers=2, stepped=True)
LOGS = Shape(
    stepped=True, config=with_settings(SMALL_LOGS, gc_interval_s=1000, tombstone_sweep_s=1000)
)
"""Small logs, and no pass of reclaim but those that are asked for."""
LOGS_OF_TWO = replace(LOGS, journals=2, ledgers=2)
PLACED = replace(LOGS, config=with_settings(LOGS.config, large_entry_bytes=800))
"""The same, and entries of the size that Stage.add has are placed."""
PLACED_IN_TWO = replace(PLACED, journals=2, ledgers=2)


# -- what is prepared ---------------------------------------------------------------------------


async def nothing(stage: Stage) -> None:
    """A node that was never started."""


async def filled(stage: Stage) -> None:
    """Entries of three ledgers, a fence and an explicit LAC, all in the journals only."""
    await stage.start()
    for ledger_id in (1, 2, 3):
        await stage.add(ledger_id, range(8))
    await stage.fence(2)
    await stage.announce(3, 5)


async def small_alone(stage: Stage) -> None:
    """Entries that are not large: no direct log was begun."""
    await stage.start()
    for ledger_id in (1, 2, 3):
        await stage.add(ledger_id, range(8), size=60)


async def flushed(stage: Stage) -> None:
    """The same, flushed, and more since."""
    await filled(stage)
    await stage.flushed()
    await stage.add(1, range(8, 14))
    await stage.add(3, range(8, 12))


async def fenced_only(stage: Stage) -> None:
    """Since the last flush: a fence, and no entry."""
    await flushed(stage)
    await stage.flushed()
    await stage.fence(1)
    await stage.announce(3, 9)


async def much(stage: Stage) -> None:
    """More than two entry logs' worth."""
    await filled(stage)
    for first in range(8, 20, 4):
        await stage.add(1, range(first, first + 4), size=3900)


async def half_a_log_placed(stage: Stage) -> None:
    """A direct log that is full of a ledger that is collected and of one that lives, settled."""
    await stage.start()
    for first in range(0, 6, 2):
        for ledger_id in (1, 2):
            await stage.add(ledger_id, range(first, first + 2))
    await stage.flushed()
    await stage.flushed()  # and the checkpoint is beyond all places
    stage.delete(2)
    await stage.rig.reclaim(0.0)
    await stage.add(1, range(6, 8))


async def placed_in_both(stage: Stage) -> None:
    """Two ledgers, each placed in another directory; some flushed, more since."""
    await stage.start()
    for ledger_id in (1, 2):
        await stage.add(ledger_id, range(8))
    await stage.flushed()
    for ledger_id in (1, 2):
        await stage.add(ledger_id, range(8, 12))
    await stage.add(3, range(2), size=60)
    assert stage.rig.directories(1) != stage.rig.directories(2)


async def a_directory_failing_next(stage: Stage) -> None:
    """The one in which the first entry of the next large add is placed."""
    await placed_in_both(stage)
    stage.model.failing = True
    stage.rig.ledger_disks[0].faults.append_fails = 1


async def stopped_badly(stage: Stage) -> None:
    """Down, with journals to replay."""
    await flushed(stage)
    stage.rig.crash("random", 3)


async def logs_ended_and_not(stage: Stage) -> None:
    """Direct logs that ended, some of them settled, and one that goes on."""
    await filled(stage)
    await stage.flushed()
    await rolls_a_direct_log(stage)


async def stopped_badly_with_logs(stage: Stage) -> None:
    """Down, with several direct logs to replay; the last write is torn."""
    await logs_ended_and_not(stage)
    under_way = asyncio.ensure_future(stage.add(3, range(8, 14)))
    await asyncio.sleep(0.0004)
    stage.rig.crash("torn", 3)
    await asyncio.gather(under_way, return_exceptions=True)


async def stopped_badly_with_two(stage: Stage) -> None:
    """Down, with a direct log in each of two directories to replay."""
    await placed_in_both(stage)
    stage.rig.crash("random", 3)


async def stopped_well(stage: Stage) -> None:
    await flushed(stage)
    await stage.rig.stop()


async def one_directory_more(stage: Stage) -> None:
    await stopped_badly(stage)
    stage.rig.add_ledger_directory()
    stage.rig.add_journal_directory()


async def one_directory_less(stage: Stage) -> None:
    await stopped_badly(stage)
    stage.rig.missing.append(stage.rig.ledger_disks[1])
    stage.model.unknown_allowed = True


async def a_dead_ledger(stage: Stage) -> None:
    """Several logs, each shared by ledgers of which one is deleted."""
    await stage.start()
    for first in range(0, 12, 3):
        for ledger_id in (1, 2, 3):
            await stage.add(ledger_id, range(first, first + 3))
        await stage.flushed()
    stage.delete(2)
    await stage.add(1, range(12, 15))


async def a_collected_ledger(stage: Stage) -> None:
    """The same, the ledger buried and out of the index, the logs not compacted yet."""
    await a_dead_ledger(stage)
    await stage.rig.reclaim(0.0)


async def a_failing_ledger_directory(stage: Stage) -> None:
    await flushed(stage)
    stage.model.failing = True
    stage.rig.ledger_disks[1].faults.append_fails = 1


async def a_failing_journal(stage: Stage) -> None:
    await flushed(stage)
    stage.model.failing = True
    stage.rig.journal_disks[0].faults.sync_fails = 1


async def without_index(stage: Stage) -> None:
    """Stopped in good order, and the index is gone."""
    await a_dead_ledger(stage)
    await stage.rig.stop()
    disk = stage.rig.ledger_disks[0]
    index = await SimIndex.open(disk)
    stage.states = await index.ledgers()
    await index.close()
    for path in [path for path in disk.paths() if path.startswith(f"{rebuild.INDEX}/")]:
        await disk.remove(path)
    await disk.sync_dir(rebuild.INDEX)


async def a_lost_fence(stage: Stage) -> None:
    """Down; what the journal has last, a fence whose ledger's record says so, is damaged."""
    await _before_the_last(stage)
    stage.rig.records.change_ledger(2, state=RecordState.IN_RECOVERY)
    await stage.fence(2)
    await _damaged_at_its_end(stage)


async def a_lost_entry(stage: Stage) -> None:
    """The same, and it is the last entry of a closed ledger."""
    await _before_the_last(stage)
    await stage.add(1, [8])
    ends = {"last_entry": 8, "length_bytes": 9 * 900, "rows": 9}
    stage.rig.records.change_ledger(1, state=RecordState.CLOSED, **ends)
    stage.model.ledgers[1].fence_asked = True
    await _damaged_at_its_end(stage)


async def a_doubted_ledger(stage: Stage) -> None:
    """The same, and the node is up: the ledger is in limbo for the entry."""
    await a_lost_entry(stage)
    await starts_and_walks(stage)


async def a_surplus(stage: Stage) -> None:
    """The same, and it was seen once: what is here may go, but not what comes from now on."""
    await a_copy_of_anothers(stage)
    await stage.rig.reclaim(0.0)
    stage.model.ledgers[3].acked.clear()


async def _before_the_last(stage: Stage) -> None:
    await stage.start()
    for ledger_id in (1, 2, 3):
        await stage.add(ledger_id, range(8))
    await stage.flushed()
    await stage.add(3, range(8, 12))


async def _damaged_at_its_end(stage: Stage) -> None:
    """Nobody can tell it from a write that was torn: what may be lost is doubted."""
    disk = stage.rig.journal_disks[0]
    path = max(path for path in disk.paths() if BATCH_MAGIC in disk.content(path))
    end = disk.content(path).rindex(BATCH_MAGIC)
    stage.rig.crash("all")
    disk.flip_bit(path, 8 * (end + 70))
    stage.model.unknown_allowed = stage.walks = True


async def a_copy_of_anothers(stage: Stage) -> None:
    """Somebody repairs a closed ledger: it has its entries here, and its record does not say so
    yet."""
    ends = {"last_entry": 7, "length_bytes": 8 * 900, "rows": 8}
    elsewhere = (Fragment(0, ("another",)),)
    records = stage.rig.records
    records.change_ledger(3, state=RecordState.CLOSED, fragments=elsewhere, **ends)
    stage.model.ledgers[3].fence_asked = True
    await stage.start()
    await stage.add(1, range(8))
    await stage.add(3, range(8), recovery=True)
    await stage.flushed()


# -- what is done -------------------------------------------------------------------------------


async def starts(stage: Stage) -> None:
    await stage.rig.start()


async def starts_and_walks(stage: Stage) -> None:
    """Until the node knows which ledgers are in limbo."""
    await stage.rig.start()
    await stage.rig.walked()


async def collects_and_is_named(stage: Stage) -> None:
    """A look at what is surplus, and then the copies here are the ledger's own."""
    await stage.rig.reclaim(0.0)
    stage.rig.records.change_ledger(3, fragments=(Fragment(0, (BOOKIE_ID,)),))


async def flushes(stage: Stage) -> None:
    """A flush, and adds of entries and a fence beside it."""
    await asyncio.gather(
        stage.flushed(), stage.add(1, range(14, 18)), stage.fence(3), stage.add(2, [9])
    )


async def adds_large(stage: Stage) -> None:
    """Several group commits; small entries, a fence and a repeat are beside them."""
    await asyncio.gather(
        stage.add(1, range(8, 11)),
        stage.add(3, [8, 9], size=60),
        stage.add(1, [11], size=60),
        stage.add(3, range(10, 12)),
        stage.fence(3),
        stage.add(1, [8, 12]),
    )


async def rolls_a_direct_log(stage: Stage) -> None:
    for first in range(8, 20, 4):
        await stage.add(1, range(first, first + 4))


async def reads(stage: Stage) -> None:
    await stage.reads()


async def gives_up(stage: Stage) -> None:
    """Reads; their caller may give them up."""
    await stage.reads()


async def flushes_alone(stage: Stage) -> None:
    await stage.flushed()


async def rolls_the_journal(stage: Stage) -> None:
    """Adds one after the other, over the end of a segment and of the next one."""
    for first in range(8, 8 + 4 * 12, 4):
        await stage.add(1, range(first, first + 4), size=3000)


async def stops(stage: Stage) -> None:
    await asyncio.gather(stage.rig.ended(), stage.add(1, range(14, 16)))


async def adds_and_flushes(stage: Stage) -> None:
    """What goes on where a directory fails."""
    for first in (14, 18, 22):
        await _add_and_flush(stage, first)


async def adds_and_flushes_once(stage: Stage) -> None:
    await _add_and_flush(stage, 14)


async def _add_and_flush(stage: Stage, first: int) -> None:
    await asyncio.gather(*(stage.add(i, range(first, first + 3)) for i in (1, 2, 3)))
    await stage.flushed()


async def collects(stage: Stage) -> None:
    await stage.rig.reclaim(0.0)


async def compacts(stage: Stage) -> None:
    await stage.rig.reclaim()


async def reclaims_beside_a_flush(stage: Stage) -> None:
    await asyncio.gather(stage.rig.reclaim(), stage.flushed(), stage.add(3, range(12, 15)))


async def rebuilds(stage: Stage) -> None:
    await _rebuild(stage, stage.states)


async def rebuilds_without_states(stage: Stage) -> None:
    _every_ledger_is_doubted(stage)
    await _rebuild(stage, None)


def _every_ledger_is_doubted(stage: Stage) -> None:
    """In limbo, and fenced."""
    stage.model.unknown_allowed = True
    for ledger in stage.model.ledgers.values():
        ledger.fence_asked = True


async def _rebuild(stage: Stage, states: list[LedgerState] | None) -> None:
    disk = stage.rig.ledger_disks[0]

    async def make_index(folder: str) -> SimIndex:
        return await SimIndex.open(disk, folder)

    await rebuild.rebuild(disk, stage.rig.ids[disk], make_index, stage.rig.shape.config, states)


async def space_is_free(stage: Stage) -> None:
    """The deleted ledger is in no log any more, and no log is there twice."""
    left = [p for disk in stage.rig.ledger_disks for p in disk.paths() if ".compact" in p]
    assert not left, f"copies of compactions are left: {left}"
    found = await stage.served(2)
    assert not found, f"entries of the deleted ledger are served: {sorted(found)}"


DEEDS = (
    Deed("first start", ONE, nothing, starts),
    Deed("first start of two and two", TWO, nothing, starts),
    Deed("flush", ONE, flushed, flushes),
    Deed("flush of two and two", TWO, flushed, flushes),
    Deed("flush of a fence", ONE, fenced_only, flushes_alone),
    Deed("flush of a fence, two and two", TWO, fenced_only, flushes_alone),
    Deed("roll of entry logs", ONE, much, flushes_alone),
    Deed("roll of the journal", ONE, filled, rolls_the_journal),
    Deed("roll of two journals", TWO, filled, rolls_the_journal),
    Deed("replay", ONE, stopped_badly, starts),
    Deed("replay of two journals", TWO, stopped_badly, starts),
    Deed("start after a stop", TWO, stopped_well, starts),
    Deed("stop", ONE, flushed, stops),
    Deed("stop of two and two", TWO, flushed, stops),
    Deed("directories added", ONE, one_directory_more, starts),
    Deed("directory missing", TWO, one_directory_less, starts),
    Deed("ledger directory fails", TWO, a_failing_ledger_directory, adds_and_flushes),
    Deed("journal fails", TWO, a_failing_journal, adds_and_flushes),
    Deed("collection", LOGS, a_dead_ledger, collects, check=space_is_free),
    Deed("compaction", LOGS, a_collected_ledger, compacts, check=space_is_free),
    Deed("collection of a copy", LOGS, a_copy_of_anothers, collects_and_is_named),
    Deed("collection of a surplus", LOGS, a_surplus, collects_and_is_named),
    Deed("walk after a lost fence", ONE, a_lost_fence, starts_and_walks),
    Deed("walk after a lost entry", ONE, a_lost_entry, starts_and_walks),
    Deed("reads that are given up", ONE, flushed, gives_up),
    Deed("reads of a ledger in limbo", ONE, a_doubted_ledger, reads),
    Deed("reclaim beside a flush", LOGS_OF_TWO, a_dead_ledger, reclaims_beside_a_flush),
    Deed("adds of large entries", PLACED, filled, adds_large),
    Deed("roll of a direct log", PLACED, filled, rolls_a_direct_log),
    Deed("first large entries", PLACED, small_alone, adds_large),
    Deed("end of a direct log", PLACED, logs_ended_and_not, flushes),
    Deed("flush of placed entries", PLACED, flushed, flushes),
    Deed("flush of placed entries, two and two", PLACED_IN_TWO, placed_in_both, flushes),
    Deed("replay of places", PLACED, stopped_badly, starts),
    Deed("replay of several direct logs", PLACED, stopped_badly_with_logs, starts),
    Deed("replay of places in two", PLACED_IN_TWO, stopped_badly_with_two, starts),
    Deed("stop beside large adds", PLACED, flushed, stops),
    Deed("compaction of a direct log", PLACED, half_a_log_placed, compacts, check=space_is_free),
    Deed(
        *("ledger directory fails beneath large adds", PLACED_IN_TWO),
        *(a_directory_failing_next, adds_and_flushes_once),
    ),
    Deed("rebuild", LOGS, without_index, rebuilds, mend=rebuilds),
    Deed(
        *("rebuild without states", LOGS, without_index, rebuilds_without_states),
        mend=rebuilds_without_states,
    ),
)
