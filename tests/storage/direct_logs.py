"""What may go wrong with entries that were placed in a directory's log, which a start reads as it
does a journal, as one node lives through it; each ends in a restart that is verified.

Always true: a scenario raises Broken, or an AssertionError of its own, when the bug is there.
"""

import asyncio
from collections.abc import Coroutine, Sequence
from contextlib import asynccontextmanager
from typing import Any

from bookie_server.api import messages as m
from bookie_server.api.status import Status
from bookie_server.lanes import Pace
from bookie_server.logs import rebuild
from bookie_server.logs.entry_log import BLOCK_BYTES
from bookie_server.logs.scan import LogMap, scan_for_map
from tests.kit.budgets import ENGINE
from tests.kit.settings import with_settings
from tests.simulation.disk import Keep, SimDisk
from tests.simulation.index import SimIndex
from tests.storage.model import entry_of
from tests.storage.rig import BOOKIE_ID, Shape
from tests.storage.stage import Stage

NO_RECLAIM = with_settings(ENGINE, gc_interval_s=1000, tombstone_sweep_s=1000, read_cache_bytes=0)
PLACING = with_settings(NO_RECLAIM, large_entry_bytes=800, flush_interval_s=1000.0)
"""No flush and no pass of reclaim but those that are asked for."""
ONE = Shape(config=PLACING)
TWO = Shape(ledgers=2, config=PLACING)
TWO_JOURNALS = Shape(journals=2, config=PLACING)
SMALL_LOGS_TWO_JOURNALS = Shape(
    journals=2, config=with_settings(PLACING, entry_log_bytes_max=9 << 10)
)
SMALL_LOGS = Shape(config=with_settings(PLACING, entry_log_bytes_max=9 << 10))


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


async def bytes_of(stage: Stage, ledger_id: int, entry_id: int) -> bytes:
    asked = m.ReadRequest(BOOKIE_ID, ledger_id, entry_id, entry_id, 1 << 20)
    (found,) = (await stage.rig.ask(asked)).results
    assert found.status is Status.OK, found.status
    return bytes(found.entry)


def direct_log(disk: SimDisk, entry: bytes) -> tuple[str, int]:
    """The log that has the entry, and where the entry begins in it."""
    path = next(each for each in disk.paths() if entry in disk.content(each))
    return path, disk.content(path).index(entry)


def wipe(disk: SimDisk, path: str, start: int, end: int) -> None:
    """Rot: zeros."""
    for at, byte in enumerate(disk.content(path)[start:end], start):
        for bit in range(8):
            if byte >> bit & 1:
                disk.flip_bit(path, 8 * at + bit)


async def an_entry_is_placed(stage: Stage, keep: Keep) -> None:
    """And acknowledged; nothing else is in its log."""
    await stage.start()
    await stage.add(1, [0])
    await stage.crash(keep)
    assert await stage.served(1) == [0]
    await stage.verify()


async def a_log_is_full(stage: Stage, *, stopped: bool) -> None:
    """Several logs ended with their footers, and nothing of them is flushed; or all is."""
    await stage.start()
    for entry_id in range(16):
        await stage.add(1, [entry_id])
    if stopped:
        await stage.rig.stop()
        await stage.back()
    await stage.crash("none")
    assert await stage.served(1) == list(range(16))
    await stage.verify()


async def the_journal_fails_beside_it(stage: Stage) -> None:
    """The ledger's record is not durable, the entry is: who sent it is not told that it counts."""
    await stage.start()
    stage.model.failing = True
    slow(stage.rig.ledger_disks[0], 0.5)
    stage.rig.journal_disks[0].faults.sync_fails = 1
    await stage.add(1, [0])
    await stage.crash("none")
    await stage.verify()


async def a_flush_waits(stage: Stage) -> None:
    """For an entry that is on its way to one directory; in the other one an entry is placed and
    acknowledged meanwhile, which that flush has not."""
    await stage.start()
    slow_one, quick = stage.rig.ledger_disks
    await lives_in(stage, 1, quick)
    await lives_in(stage, 2, slow_one)
    await stage.add(1, [1])
    slow(slow_one, 50.0)
    async with under_way(stage, stage.add(2, [1])) as waited_for:
        stage.rig.begin_flush()
        await stage.add(1, [2, 3])
        assert not waited_for.done()
    slow(slow_one, 0.001)
    await asyncio.sleep(200)
    assert not stage.rig.is_flushing
    await stage.crash("none")
    assert await stage.served(1) == [0, 1, 2, 3]
    await stage.crash("none")


async def no_directory_has_space(stage: Stage) -> None:
    """The one in which entries lie is full, and so is the one to which the ledger goes on: the
    index of neither is told where they lie."""
    await stage.start()
    full, other = stage.rig.ledger_disks
    await lives_in(stage, 1, full)
    await stage.add(1, [1, 2])
    await stage.add(1, [3], size=60)
    full.fill_up(1 << 20)
    await stage.rig.look_at_space()
    other.fill_up((1 << 10) - (32 << 20))  # not even with what is kept in reserve
    stage.rig.begin_flush()
    await asyncio.sleep(3)
    assert stage.rig.is_flushing
    full.empty_out()
    other.empty_out()
    await stage.crash("none")
    assert await stage.served(1) == [0, 1, 2, 3]
    await stage.crash("none")


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
    """What was placed there is there when it is back: no ledger is in doubt for it."""
    await stage.start()
    disk = stage.rig.ledger_disks[1]
    await lives_in(stage, 1, disk)
    await stage.flushed()
    await stage.add(1, range(1, 5))
    await stage.add(3, [0], size=60)
    stage.misses(disk)
    await stage.crash(keep)
    assert await statuses(stage, 1, range(6)) == [Status.LIMBO] * 6
    await stage.flushed()
    stage.finds_again()
    await stage.crash(keep)
    found = await statuses(stage, 1, range(6))
    assert found == [Status.OK] * 5 + [Status.NO_SUCH_ENTRY], found
    await stage.verify()


async def another_is_taken_while_the_directory_is_away(stage: Stage, *, flushed: bool) -> None:
    """The directory brings an entry back that another one was taken for meanwhile."""
    await stage.start()
    disk = stage.rig.ledger_disks[1]
    await lives_in(stage, 1, disk)
    await stage.add(1, [1])
    stage.misses(disk)
    await stage.crash("none")
    await stage.add(1, [1], size=300, variant=1)
    if flushed:
        await stage.flushed()
    stage.finds_again()
    await stage.crash("none")
    assert (await bytes_of(stage, 1, 1)) == entry_of(1, 1, 1, 0, 300)
    await stage.crash("none")


async def a_copy_rots_and_is_replaced(stage: Stage) -> None:
    """The entry is flushed where it was placed; its copy rots, recovery brings another. Of two
    journals, one fails before it brings it."""
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
    assert [each for each in await stage.served(1) if each] == [1, 2]


async def a_directory_is_given_up(stage: Stage, back: bool) -> None:
    """Who compared copied what was flushed there; what was placed since was found in memory, and
    nothing else has it any more."""
    await stage.start()
    disk, other = stage.rig.ledger_disks
    await lives_in(stage, 1, disk)
    await stage.flushed()
    await stage.add(1, range(1, 4))
    slow(other, 1000.0)
    stage.rig.drop(disk)
    stage.model.unknown_allowed = True
    await stage.add(1, [0], size=60, recovery=True)
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
    assert await statuses(stage, 1, range(1, 4)) == [Status.OK] * 3


async def another_is_taken_after_the_directory_was_given_up(stage: Stage) -> None:
    """The entry was denied and another one acknowledged; then the node dies before any flush, and
    the directory is back at once: its index was told of the first one alone."""
    await stage.start()
    disk = stage.rig.ledger_disks[1]
    await lives_in(stage, 1, disk)
    await stage.add(1, [1])
    await stage.flushed()
    stage.rig.drop(disk)
    stage.model.unknown_allowed = True
    asked = await stage.rig.ask(m.ClearLimboRequest(BOOKIE_ID, 1))
    cleared = m.ClearLimboRequest(BOOKIE_ID, 1, clear=True, revision=asked.revision)
    assert (await stage.rig.ask(cleared)).status is Status.OK
    assert await statuses(stage, 1, [1]) == [Status.NO_SUCH_ENTRY]
    await stage.add(1, [1], variant=1)
    assert (await bytes_of(stage, 1, 1)) == entry_of(1, 1, 1, 0, 900)
    await stage.crash("none")
    assert (await bytes_of(stage, 1, 1)) == entry_of(1, 1, 1, 0, 900)


async def a_log_ends_while_the_node_stops(stage: Stage) -> None:
    """In good order; one of its journals, of which nothing is needed, is not there afterwards."""
    await stage.start()
    disk = stage.rig.ledger_disks[0]
    slow(disk, 0.5)
    for entry_id in range(2):  # the second one fills the log
        await stage.add(1, [entry_id], size=3900)
    await stage.rig.ended()
    stage.rig.crash("none")
    stage.rig.missing.append(stage.rig.journal_disks[1])
    await stage.back()
    assert await statuses(stage, 1, range(3)) == [Status.OK, Status.OK, Status.NO_SUCH_ENTRY]


async def a_log_without_footer_rots(stage: Stage, entry_id: int) -> LogMap:
    """Of a flush, whose records lie in one block: the map that a scan makes of it, of which one
    entry's header is bad."""
    await stage.start()
    await stage.add(1, range(4), size=60)
    await stage.flushed()
    (store,) = stage.rig.storage.stores
    (place,) = await store.index.range(1, entry_id, entry_id, 1)
    path, _ = direct_log(stage.rig.ledger_disks[0], entry_of(1, entry_id, 0, entry_id - 1, 60))
    stage.rig.ledger_disks[0].truncate(path, 2 * BLOCK_BYTES)
    stage.rig.ledger_disks[0].flip_bit(path, 8 * place.position + 40)
    return await scan_for_map(store.logs, store.index, place.log_id, Pace(1 << 30))


async def a_journal_is_missing_at_one_start(stage: Stage) -> None:
    """It alone told of a ledger of which entries lie in a directory."""
    await stage.start()
    await stage.add(2, [0], size=60)
    await stage.add(1, range(4))
    await stage.add(3, [0], size=60)
    told = [disk for disk in stage.rig.journal_disks if tells_of(disk, 1)]
    assert len(told) == 1
    stage.rig.missing += told
    stage.model.unknown_allowed = True
    for ledger in stage.model.ledgers.values():
        ledger.fence_asked = True
    await stage.crash("none")
    found = await statuses(stage, 1, range(6))
    assert found == [Status.OK] * 4 + [Status.LIMBO] * 2, found
    stage.rig.missing.clear()
    await stage.crash("none")
    assert await stage.served(1) == list(range(4))
    await stage.crash("none")


def tells_of(disk: SimDisk, ledger_id: int) -> bool:
    """Whether the journal has a record of the ledger."""
    said = f'"ledger_id":{ledger_id},'.encode()
    return any(said in disk.content(path) for path in disk.paths() if path.startswith("journal/"))


async def the_index_is_rebuilt(stage: Stage, keep: Keep, *, with_states: bool) -> None:
    """Of a directory in which a crash cut a direct log off."""
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
    disk.calm()
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

    await rebuild.rebuild(disk, stage.rig.ids[disk], make_index, PLACING, states)
    await stage.back()
    assert [each for each in await stage.served(1)] == list(range(8))
    await stage.crash("none")


async def the_last_write_is_torn(stage: Stage, seed: int) -> None:
    """The power goes while many entries are written: what was acknowledged is served, what is not
    served may be anything, and the node goes on."""
    await stage.start()
    await stage.add(1, range(4))
    await stage.add(2, [0], size=60)
    slow(stage.rig.ledger_disks[0], 50.0)
    async with under_way(stage, stage.add(2, range(1, 9))):
        await stage.crash("torn", seed)
    assert await stage.served(1) == list(range(4))
    assert Status.LIMBO not in await statuses(stage, 2, range(12))
    await stage.verify()
    await stage.crash("none")


async def what_was_synced_rots(stage: Stage, where: str) -> None:
    """An entry that was acknowledged before the last one was: its header, its payload, all of it,
    or the disk cannot read the block; or what was synced last, which a footer follows."""
    await stage.start()
    await stage.add(2, [0], size=60)
    for entry_id in range(12 if where == "last of a log" else 4):
        await stage.add(1, [entry_id])
    stage.rig.crash("none")
    disk = stage.rig.ledger_disks[0]
    path, at = direct_log(disk, entry_of(1, 1, 0, 0, 900))
    if where == "header":
        disk.flip_bit(path, 8 * (at - 20))
    elif where == "payload":
        disk.flip_bit(path, 8 * (at + 500))
    elif where == "block":
        disk.make_unreadable(path, at)
    else:
        wipe(disk, path, at - 48, at + 956)
    stage.model.unknown_allowed = True
    await stage.back()
    whole = await statuses(stage, 1, [0, 2, 3])
    assert whole[0] is Status.OK and whole[2] is Status.OK
    found = await statuses(stage, 1, range(5))
    assert found[1] is Status.LIMBO and found[4] is Status.LIMBO, found
    other = await statuses(stage, 2, [0, 1])
    one_ledger = where == "payload"
    assert other == [Status.OK, Status.NO_SUCH_ENTRY if one_ledger else Status.LIMBO], other
    await stage.crash("none")


async def a_marked_log_is_gone(stage: Stage) -> None:
    """Nobody knows what it held."""
    await stage.start()
    await stage.add(1, range(4))
    stage.rig.crash("none")
    disk = stage.rig.ledger_disks[0]
    path, _ = direct_log(disk, entry_of(1, 1, 0, 0, 900))
    await disk.remove(path)
    await disk.sync_dir("entrylog")
    stage.model.unknown_allowed = True
    await stage.back()
    assert await statuses(stage, 1, range(5)) == [Status.LIMBO] * 5
    await stage.crash("none")
    assert await statuses(stage, 1, range(5)) == [Status.LIMBO] * 5
