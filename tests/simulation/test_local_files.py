"""Clients on the bookies' hosts: what they see of the bookies' files."""

import random
from types import SimpleNamespace

import pytest

from bookie_server.api import codec
from bookie_server.api.messages import IDENTITY_FILE, EntryLocation, EntryResult, ReadResponse
from bookie_server.api.status import Status
from tests.simulation.disk import SimDisk
from tests.simulation.garble import garble
from tests.simulation.local_files import SimFiles
from tests.simulation.loop import run

FOLDER = "/b1:1/ledger"


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
        ledger_names=names,
        missing=dict.fromkeys(missing),
    )


async def look(files, position=0, length=9, *, folder=FOLDER, file="1.log"):
    located = EntryLocation(folder, file, position, length)
    return await files.read([located], lambda found: bytes(found[0]))


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
        assert await look(files, 2, 3) == b"234"
        assert await look(files, 8, 5) == b"89"
        disk.crash("none")
        assert await look(files, 2, 3) == b""

    run(main())


def test_another_process_sees_the_files_of_a_bookie_that_was_killed():
    async def main():
        disk = await written(sync=True)
        disk.crash("all")
        assert await look(SimFiles([host(disk)], Chance()), 0, 4) == b"0123"

    run(main())


def test_a_file_that_is_removed_or_in_a_directory_that_is_away_is_not_found():
    async def main():
        disk = await written()
        away = SimFiles([host(disk, SimDisk(), missing=[0])], Chance())
        with pytest.raises(FileNotFoundError):
            await look(away, 0, 1)
        with pytest.raises(FileNotFoundError):
            await look(away, file=IDENTITY_FILE)
        assert await look(away, folder=f"{FOLDER}-2", file=IDENTITY_FILE) == b"an id"
        await disk.remove("1.log")
        with pytest.raises(FileNotFoundError):
            await look(SimFiles([host(disk)], Chance()), 0, 1)

    run(main())


def test_rot_is_seen_and_a_block_that_cannot_be_read_is_an_error():
    async def main():
        disk = await written()
        files = SimFiles([host(disk)], Chance())
        disk.flip_bit("1.log", 0)
        assert await look(files, 0, 1) == b"1"
        disk.make_unreadable("1.log", 0)
        with pytest.raises(OSError, match="EIO"):
            await look(files, 0, 1)

    run(main())


def test_some_clients_may_read_nothing():
    async def main():
        disk = await written()
        refused = 0
        for seed in range(50):
            try:
                await look(SimFiles([host(disk)], random.Random(seed)), 0, 1)
            except PermissionError:
                refused += 1
        assert 2 <= refused <= 25

    run(main())


def test_an_answer_that_only_has_a_location_is_not_garbled():
    located = EntryResult(Status.OK, location=EntryLocation(FOLDER, "1.log", 0, 100))
    answer = bytes(codec.encode(ReadResponse(Status.OK, [located])))
    assert garble("Read", answer, random.Random(1)) == answer
