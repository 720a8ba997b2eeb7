"""Clients on the bookies' hosts: what they see of the bookies' files."""

import random
from types import SimpleNamespace

import pytest

from bookie_server.api import codec
from bookie_server.api.messages import EntryLocation, EntryResult, ReadResponse
from bookie_server.api.status import Status
from tests.simulation.disk import SimDisk
from tests.simulation.garble import garble
from tests.simulation.local_files import SimFiles
from tests.simulation.loop import run

PATH = "/b1:1/ledger/1.log"


class Chance(random.Random):
    """Nothing is late, nobody is refused."""

    def random(self) -> float:
        return 0.99


def host(*disks, missing=()):
    names = ["ledger", "ledger-2"][: len(disks)]
    return SimpleNamespace(
        address="b1:1",
        bookie_id="an id",
        ledger_disks=disks,
        _ledger_names=names,
        _missing=dict.fromkeys(missing),
    )


async def written(data=b"0123456789", *, sync=False):
    disk = SimDisk(random.Random(1))
    file = await disk.create("1.log")
    await file.append([data], sync=sync)
    await disk.sync_dir()
    return disk


def test_another_process_sees_what_is_not_synced_and_after_a_power_cut_what_the_disk_kept():
    async def main():
        disk = await written()
        files = SimFiles([host(disk)], Chance())
        assert await files.read(PATH, 2, 3, bytes) == b"234"
        assert await files.read(PATH, 8, 5, bytes) == b"89"
        disk.crash("none")
        assert await files.read(PATH, 2, 3, bytes) == b""

    run(main())


def test_another_process_sees_the_files_of_a_bookie_that_was_killed():
    async def main():
        disk = await written(sync=True)
        disk.crash("all")
        assert await SimFiles([host(disk)], Chance()).read(PATH, 0, 4, bytes) == b"0123"

    run(main())


def test_a_file_that_is_removed_or_in_a_directory_that_is_away_is_not_found():
    async def main():
        disk = await written()
        away = SimFiles([host(disk, SimDisk(), missing=[0])], Chance())
        with pytest.raises(FileNotFoundError):
            await away.read(PATH, 0, 1, bytes)
        with pytest.raises(FileNotFoundError):
            await away.read("/b1:1/ledger/bookie.identity", 0, 9, bytes)
        assert await away.read("/b1:1/ledger-2/bookie.identity", 0, 9, bytes) == b"an id"
        await disk.remove("1.log")
        with pytest.raises(FileNotFoundError):
            await SimFiles([host(disk)], Chance()).read(PATH, 0, 1, bytes)

    run(main())


def test_rot_is_seen_and_a_block_that_cannot_be_read_is_an_error():
    async def main():
        disk = await written()
        files = SimFiles([host(disk)], Chance())
        disk.flip_bit("1.log", 0)
        assert await files.read(PATH, 0, 1, bytes) == b"1"
        disk.make_unreadable("1.log", 0)
        with pytest.raises(OSError, match="EIO"):
            await files.read(PATH, 0, 1, bytes)

    run(main())


def test_some_clients_may_read_nothing():
    async def main():
        disk = await written()
        refused = 0
        for seed in range(50):
            try:
                await SimFiles([host(disk)], random.Random(seed)).read(PATH, 0, 1, bytes)
            except PermissionError:
                refused += 1
        assert 2 <= refused <= 25

    run(main())


def test_an_answer_that_only_has_a_location_is_not_garbled():
    located = EntryResult(Status.OK, location=EntryLocation("/b1:1/ledger", "1.log", 0, 100))
    answer = bytes(codec.encode(ReadResponse(Status.OK, [located])))
    assert garble("Read", answer, random.Random(1)) == answer
