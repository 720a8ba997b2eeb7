"""Several journals as one: which of them a ledger's records go to."""

import asyncio
import random

import pytest

from bookie_server.disk.interface import DiskFailed
from bookie_server.journal.format import Position, Record, RecordKind, body_crc
from bookie_server.journal.writer import Journal
from bookie_server.storage.appends import Journals
from tests.simulation.disk import SimDisk
from tests.simulation.loop import run
from tests.unit.bookie_server.node import CONFIG


async def two_journals(disks: dict[str, SimDisk] | None = None) -> Journals:
    """On `disks`, which are added there."""
    opened, disks = {}, {} if disks is None else disks
    for name in ("j0", "j1"):
        disk = disks[name] = SimDisk(random.Random(1))
        await disk.make_folder("journal")
        opened[name] = await Journal.open(disk, CONFIG, 1, Position(0, 0))
    journals = Journals(lambda _: None)
    journals.begin(opened, {})
    return journals


@pytest.mark.parametrize("when", ["before it", "in it"])
def test_a_journal_that_fails_before_its_damaged_segment_is_set_aside_fails_alone(when):
    async def main():
        disks: dict[str, SimDisk] = {}
        journals = await two_journals(disks)

        async def rename(old, new):
            raise DiskFailed("EIO")

        if when == "before it":
            journals.fail("j1", DiskFailed("EIO"))
            await asyncio.sleep(1)
        else:
            disks["j1"].rename = rename
        await journals.set_aside("j1", 1)
        await asyncio.sleep(1)
        assert list(journals.live) == ["j0"]
        await journals.append([lac(1)])
        await journals.close()

    run(main())


def lac(ledger_id: int, body: bytes = b"") -> Record:
    return Record(RecordKind.LEDGER if body else RecordKind.LAC, ledger_id, 0, body, body_crc(body))


def test_a_node_without_hurry_spreads_its_ledgers_over_its_journals():
    async def main():
        journals = await two_journals()
        for ledger_id in range(6):
            await journals.append([lac(ledger_id)])
        homes = journals.homes
        assert [homes[i] for i in range(6)] == ["j0", "j1"] * 3
        for ledger_id in (1, 3, 5):
            journals.forget(ledger_id)
        for ledger_id in (7, 8, 9):
            await journals.append([lac(ledger_id)])
        assert [homes[i] for i in (7, 8, 9)] == ["j1"] * 3, "forgotten ledgers do not count"
        await journals.close()

    run(main())


def test_a_journal_that_has_less_to_do_takes_the_next_ledger_whatever_it_has_already():
    async def main():
        journals = await two_journals()
        await journals.append([lac(0)])
        await journals.append([lac(1)])
        await journals.append([lac(2)])
        waiting = journals.append([lac(1, bytes(1000))])
        done = journals.append([lac(3)])
        assert journals.homes[3] == "j0"
        await asyncio.gather(waiting, done)
        await journals.close()

    run(main())
