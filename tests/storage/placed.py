"""What may go wrong with entries that were placed in a directory's log, the journal saying where,
as one node lives through it; each ends in a restart that is verified.

Always true: a scenario raises Broken, or an AssertionError of its own, when the bug is there.
"""

import asyncio
from collections.abc import Coroutine, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import Any

from bookie_server import rebuild
from bookie_server.api import messages as m
from bookie_server.api.status import Status
from tests.simulation.disk import Keep, SimDisk
from tests.simulation.index import SimIndex
from tests.storage.model import NEGATIVES, entry_of
from tests.storage.rig import BOOKIE_ID, CONFIG, Shape
from tests.storage.stage import Stage

NO_RECLAIM = replace(CONFIG, gc_interval_s=1000, tombstone_sweep_s=1000, read_cache_bytes=0)
PLACING = replace(NO_RECLAIM, large_entry_bytes=800, flush_interval_s=1000.0)
"""No flush and no pass of reclaim but those that are asked for."""
ONE = Shape(config=PLACING)
TWO = Shape(ledgers=2, config=PLACING)
TWO_JOURNALS = Shape(journals=2, config=PLACING)
SMALL_LOGS = Shape(config=replace(PLACING, entry_log_bytes_max=9 << 10))


def slow(disk: SimDisk, seconds: float) -> None:
    disk.faults.sync_s = (seconds, seconds)


async def lives_in(stage: Stage, ledger_id: int, disk: SimDisk) -> None:
    """The ledger's first entry, a small one; from now on its entries go to the directory."""
    for other in stage.rig.ledger_disks:
        if other is not disk:
            other.fill_up(1 << 30)
    await stage.rig.look_at_space()
    await stage.add(ledger_id, [0], size=60)
    for each in stage.rig.ledger_disks:
        each.empty_out()
    await stage.rig.look_at_space()
    assert stage.rig.directories(ledger_id) == (stage.rig.ids[disk],)


@asynccontextmanager
async def under_way(stage: Stage, work: Coroutine[Any, Any, None]):
    """Requests that the node may die over."""
    task = asyncio.ensure_future(work)
    await asyncio.sleep(0.5)
    yield task
    await asyncio.gather(task, return_exceptions=True)


async def statuses(stage: Stage, ledger_id: int, entry_ids: Sequence[int]) -> list[Status]:
    first, last = entry_ids[0], entry_ids[-1]
    asked = m.ReadRequest(BOOKIE_ID, ledger_id, first, last, 1 << 20)
    answer = await stage.rig.ask(asked)
    return [answer.status] if answer.status else [each.status for each in answer.results]


async def the_home_changes(stage: Stage) -> None:
    """The directory is full: a flush that gives the ledger another waits for something, and an
    entry is placed there and acknowledged meanwhile."""
    await stage.start()
    full, other = stage.rig.ledger_disks
    await lives_in(stage, 1, full)
    await lives_in(stage, 2, full)
    await stage.add(1, [1])
    slow(full, 50.0)
    async with under_way(stage, stage.add(2, [1])) as waited_for:
        slow(full, 0.001)
        full.fill_up(1 << 20)
        await stage.rig.look_at_space()
        stage.rig.begin_flush()
        await stage.add(1, [2, 3])
        assert stage.rig.directories(1) == (stage.rig.ids[full], stage.rig.ids[other])
        assert len(stage.model.ledgers[1].acked) == 4 and not waited_for.done()
        await stage.crash("none")
    assert await stage.served(1) == [0, 1, 2, 3]
    await stage.crash("none")


async def a_log_is_compacted(stage: Stage, when: str) -> None:
    """A full log of which half is dead. Only the journal knows where the other half lies ("full"),
    or the index does too, and the checkpoint ("flushed"), or the flush is under way."""
    await stage.start()
    await stage.add(2, range(4))
    await stage.flushed()
    stage.delete(2)
    await stage.rig.reclaim(0.0)
    for entry_id in range(12):
        await stage.add(1, [entry_id])
    if when == "flushed":
        await stage.flushed()
    elif when == "flushing":
        slow(stage.rig.ledger_disks[0], 0.5)
        stage.rig.begin_flush()
        await asyncio.sleep(0.7)
    await stage.rig.reclaim()
    if when == "flushed":
        await stage.flushed()
        await stage.rig.reclaim()
    await stage.crash("none")
    assert await stage.served(1) == list(range(12))
    await stage.rig.reclaim()
    await stage.crash("none")


async def a_directory_is_missing_at_one_start(stage: Stage, keep: Keep) -> None:
    """The journal's records of what was placed there are gone when it is back."""
    await stage.start()
    disk = stage.rig.ledger_disks[1]
    await lives_in(stage, 1, disk)
    await stage.flushed()
    await stage.add(1, range(1, 5))
    stage.misses(disk)
    await stage.crash(keep)
    await stage.flushed()
    stage.finds_again()
    await stage.crash(keep)
    assert await statuses(stage, 1, [0]) == [Status.OK]
    assert await statuses(stage, 1, range(1, 9)) == [Status.LIMBO] * 8


async def a_copy_rots_and_is_replaced(stage: Stage) -> None:
    """The checkpoint is before the place, which is flushed; the entry's copy rots, recovery brings
    another. Of two journals, the one with the place fails before it brings it."""
    await stage.start()
    disk = stage.rig.ledger_disks[0]
    await stage.add(2, [0])
    await stage.add(1, [0], size=60)
    slow(disk, 1.0)
    async with under_way(stage, stage.add(1, [1])):
        await stage.flushed()
    assert len(stage.model.ledgers[1].acked) == 2 and not stage.rig.in_cache(1)
    wanted = entry_of(1, 1, 0, 0, 900)
    path = next(each for each in disk.paths() if wanted in disk.content(each))
    disk.flip_bit(path, 8 * (disk.content(path).index(wanted) + 500))
    stage.model.unknown_allowed = True
    assert await stage.served(1) == [0]
    slow(disk, 1000.0)
    if len(stage.rig.journal_disks) > 1:
        stage.rig.drop(stage.rig.journal_disks[1])
        await asyncio.sleep(1)
    async with under_way(stage, stage.add(1, [1], recovery=True)):
        await stage.crash("none")
    assert await stage.served(1) == [0, 1]
    await stage.flushed()
    await stage.crash("none")
    assert await stage.served(1) == [0, 1]


async def a_directory_is_dropped(stage: Stage, when: str) -> None:
    """While an entry is being placed there, after that, or while the place is being flushed, when
    it may be full; the next start does not find it, the one after that does."""
    await stage.start()
    disk, other = stage.rig.ledger_disks
    await lives_in(stage, 1, disk)
    await lives_in(stage, 2, other)
    if when == "under way":
        slow(disk, 1000.0)
    async with under_way(stage, stage.add(1, [1, 2])):
        if when.startswith("flushing"):
            await stage.add(2, [1])
            if when.endswith("full"):
                disk.fill_up(1 << 20)
                await stage.rig.look_at_space()
            slow(other, 2.0)
            stage.rig.begin_flush()
            await asyncio.sleep(1)
        stage.rig.drop(disk)
        if when != "after, at once":
            await asyncio.sleep(20)  # a disk may be as slow as that
        stage.rig.missing.append(disk)
        stage.model.unknown_allowed = True
        await stage.crash("none")
    if when != "after, at once":
        assert [each for each in await stage.served(1) if each] == [1, 2]
    stage.rig.missing.clear()
    await stage.crash("none")
    assert [each for each in await stage.served(1) if each] == [1, 2] or when == "after, at once"


async def a_directory_is_given_up(stage: Stage, back: bool) -> None:
    """Who compared found in memory all that was placed there: the journal says where, and that is
    nothing any more."""
    await stage.start()
    disk, other = stage.rig.ledger_disks
    await lives_in(stage, 1, disk)
    await stage.flushed()
    await stage.add(1, range(1, 4))
    slow(other, 1000.0)
    stage.rig.drop(disk)
    stage.model.unknown_allowed = True
    asked = await stage.rig.ask(m.ClearLimboRequest(BOOKIE_ID, 1, b"", False, 0))
    assert asked.limbo
    cleared = m.ClearLimboRequest(BOOKIE_ID, 1, b"", True, asked.revision)
    assert (await stage.rig.ask(cleared)).status is Status.OK
    assert stage.rig.ids[disk] not in stage.rig.directories(1)
    if not back:
        stage.rig.missing.append(disk)
    await stage.crash("none")
    stage.rig.missing.clear()
    await stage.crash("none")
    assert not any(each in NEGATIVES for each in await statuses(stage, 1, range(1, 4)))


async def a_journal_is_missing_at_one_start(stage: Stage, *, compacted: bool) -> None:
    """It alone knew where entries lie; their log is compacted meanwhile, or is not."""
    await stage.start()
    await stage.add(2, range(3))
    await stage.add(1, [0], size=60)
    await stage.add(3, [0], size=60)
    await stage.flushed()
    await stage.add(1, range(1, 9))
    await stage.flushed()
    await stage.add(1, range(9, 13))
    stage.rig.missing.append(stage.rig.journal_disks[1])
    stage.model.unknown_allowed = True
    await stage.crash("all")
    if compacted:
        stage.delete(2)
        await asyncio.sleep(10)
        await stage.rig.reclaim(0.0)
        await stage.rig.reclaim()
    stage.rig.missing.clear()
    await stage.crash("all")
    found = await statuses(stage, 1, range(9, 13))
    assert found == [Status.LIMBO if compacted else Status.OK] * 4, found
    assert await stage.rig.stored(1) == list(range(9 if compacted else 13))
    await stage.crash("none")


async def the_index_is_rebuilt(stage: Stage, keep: Keep, *, with_states: bool) -> None:
    """Of a directory in which a crash cut a placed log off."""
    await stage.start()
    await stage.add(1, range(4))
    await stage.flushed()
    await stage.add(1, range(4, 8))
    await stage.fence(3)
    disk = stage.rig.ledger_disks[0]
    slow(disk, 50.0)
    async with under_way(stage, stage.add(2, range(8))):
        stage.rig.crash(keep, 7)
        stage.model.crashed(power=True)
    index = await SimIndex.open(disk)
    states = await index.ledgers() if with_states else None
    await index.close()
    for path in [path for path in disk.paths() if path.startswith(f"{rebuild.INDEX}/")]:
        await disk.remove(path)
    await disk.sync_dir(rebuild.INDEX)
    stage.model.unknown_allowed = True
    for ledger in stage.model.ledgers.values():
        ledger.fence_asked = True

    async def make_index(folder: str) -> SimIndex:
        return await SimIndex.open(disk, folder)

    disk.calm()
    await rebuild.rebuild(disk, stage.rig.ids[disk], make_index, PLACING, states)
    await stage.back()
    assert [each for each in await stage.served(1)] == list(range(8))
    await stage.crash("none")


async def a_record_of_places_is_torn(stage: Stage, seed: int) -> None:
    """The power goes while the journal writes where many entries lie."""
    await stage.start()
    await stage.add(1, range(4))
    await stage.add(2, [0], size=60)
    slow(stage.rig.journal_disks[0], 50.0)
    async with under_way(stage, stage.add(2, range(1, 70))):
        stage.model.unknown_allowed = True
        await stage.crash("torn", seed)
    assert [each for each in await stage.served(1)] == list(range(4))
    stage.model.unknown_allowed = False
    await stage.crash("none")


async def a_bit_of_a_place_flips(stage: Stage, at: int) -> None:
    """In what the journal says of a place: below what was synced."""
    await stage.start()
    for entry_id in range(4):
        await stage.add(1, [entry_id])
    await stage.add(2, range(3), size=60)
    stage.rig.crash("all")
    disk = stage.rig.journal_disks[0]
    path = next(path for path in disk.paths() if path.startswith("journal/"))
    body = disk.content(path).index(stage.rig.ids[stage.rig.ledger_disks[0]].encode() + bytes(64))
    disk.flip_bit(path, 8 * (body - 20 + at) + at % 8)
    stage.model.unknown_allowed = True
    await stage.back()
    assert Status.LIMBO in await statuses(stage, 1, range(4))
    await stage.crash("none")
