"""What led to known bugs, as one node lives through it; each ends in a restart that is verified.

Always true: a scenario raises Broken, or an AssertionError of its own, when the bug is there.
"""

import asyncio

from bookie_server.api import messages as m
from tests.simulation.disk import Keep
from tests.storage.model import entry_of
from tests.storage.rig import BOOKIE_ID
from tests.storage.stage import Stage


async def a_fence_and_nothing_else(stage: Stage, end: str) -> None:
    """The write cache is empty when the checkpoint passes the fence."""
    await stage.start()
    await stage.add(1, range(4))
    await stage.announce(2, -1)
    await stage.flushed()
    await stage.fence(1)
    await stage.fence(2)
    await stage.flushed()
    await asyncio.sleep(20)
    if end == "stop":
        await stage.rig.stop()
        await stage.back()
    await stage.crash("none")
    assert stage.model.ledgers[1].fenced


async def a_fence_of_nothing(stage: Stage, by_read: bool) -> None:
    """A fencing request that finds no entry, while the disk takes its time."""
    await stage.start()
    await stage.announce(1, -1)
    disk = stage.rig.journal_disks[0]
    disk.faults.sync_s = (1.0, 1.0)
    ledger = stage.model.ledgers[1]
    ledger.fence_asked = True
    if by_read:
        request: m.Request = m.ReadRequest(BOOKIE_ID, 1, 7, 7, 100, fence=True)
    else:
        request = m.ReadLacRequest(BOOKIE_ID, 1, fence=True)
    syncs = disk.syncs
    await stage.rig.ask(request)
    assert disk.syncs > syncs, "the answer came before any sync"
    ledger.fenced = True
    await stage.crash("none")


async def a_flush_fails(stage: Stage) -> None:
    """The ledger disk refuses one write; what comes later would succeed."""
    await stage.start()
    await stage.add(1, range(6))
    stage.rig.ledger_disks[0].faults.append_fails = 1
    stage.model.failing = True
    stage.rig.begin_flush()
    await asyncio.sleep(1)
    for _ in range(3):
        await stage.add(1, range(6, 10))
        await asyncio.sleep(10)
    assert stage.rig.failed, "a node whose only ledger disk failed goes on"
    await stage.crash("none")
    assert len(stage.model.ledgers[1].acked) >= 6


async def a_bit_of_the_journal_flips(stage: Stage, where: int) -> None:
    """In the header of a batch, of a record, in an entry, in padding: below what was synced."""
    await stage.start()
    for entry_id in range(8):
        await stage.add(1, [entry_id], size=200)
        await stage.add(2, [entry_id], size=900)
    stage.rig.crash("all")
    disk = stage.rig.journal_disks[0]
    path = next(path for path in disk.paths() if path.startswith("journal/"))
    data = disk.content(path)
    entry = entry_of(1, 3, 0, 2, 200)
    record = data.index(entry) - 64
    batch = record - 64
    places = (batch + 2, batch + 9, batch + 30, record + 1, record + 20, record + 70, 1, 5000)
    disk.flip_bit(path, 8 * places[where] + where)
    stage.model.unknown_allowed = True
    await stage.back()


async def a_deletion_beside_a_flush(stage: Stage, keep: Keep) -> None:
    """The ledger's state is being written as fenced when it becomes deleted."""
    await stage.start()
    await stage.add(1, range(8))
    await stage.add(2, range(8))
    stage.delete(1)
    disk = stage.rig.ledger_disks[0]
    disk.faults.sync_s = (0.4, 0.6)
    asked = asyncio.ensure_future(stage.fence(1))
    await asyncio.sleep(7.0 - 5.0)
    for _ in range(6):  # the sweep comes at 7 s, in the middle of a flush
        stage.rig.begin_flush()
        await asyncio.sleep(1)
    await asked
    await stage.add(1, [8])
    assert stage.model.ledgers[1].buried, "the sweep did not come"
    await stage.crash(keep, 5)
    await stage.add(1, [9])
    await stage.crash("none")


async def two_journals_at_different_places(stage: Stage) -> None:
    """One journal is segments ahead of the other when the checkpoint moves past both."""
    await stage.start()
    await stage.add(1, range(4))
    await stage.add(2, range(4))
    for first in range(4, 44, 4):
        await stage.add(1, range(first, first + 4), size=3900)
    await stage.flushed()
    await stage.add(2, range(4, 8))
    await stage.add(1, range(44, 46))
    await stage.crash("none")
    assert len(stage.model.ledgers[2].acked) == 8


async def one_directory_is_slow(stage: Stage, slow: int) -> None:
    """One ledger directory has its part of a flush durably, the other not yet."""
    await stage.start()
    for ledger_id in (1, 2, 3):
        await stage.add(ledger_id, range(6))
    stage.rig.ledger_disks[slow].faults.sync_s = (5.0, 5.0)
    stage.rig.begin_flush()
    await asyncio.sleep(2)
    await stage.crash("none")
    assert [len(ledger.acked) for ledger in stage.model.ledgers.values()] == [6, 6, 6]


async def a_map_is_garbage(stage: Stage) -> None:
    """Every byte of the footer of each log is another: no log is empty because of that."""
    await stage.start()
    for first in range(0, 12, 3):
        for ledger_id in (1, 2, 3):
            await stage.add(ledger_id, range(first, first + 3))
        await stage.flushed()
    await stage.rig.stop()
    disk = stage.rig.ledger_disks[0]
    for path in [path for path in disk.paths() if path.endswith(".log")]:
        length = len(disk.content(path))
        for at in range(length - 110, length):
            disk.flip_bit(path, 8 * at + at % 8)
    await stage.back()
    await stage.rig.reclaim()
    await stage.crash("none")


async def the_metadata_store_is_ill(stage: Stage, how: str) -> None:
    """It fails, or has lost its ledgers, or is another cluster's, while reclaim asks it."""
    await stage.start()
    for ledger_id in (1, 2, 3):
        await stage.add(ledger_id, range(6))
    await stage.flushed()
    await stage.rig.reclaim()
    stage.rig.records.illness = how
    for _ in range(3):
        await stage.rig.reclaim()
    stage.rig.records.illness = ""
    await stage.crash("none")
    assert [len(ledger.acked) for ledger in stage.model.ledgers.values()] == [6, 6, 6]
