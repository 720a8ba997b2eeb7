import random
from collections.abc import Coroutine
from typing import Any
from uuid import UUID, uuid5

import pytest

from bookie_server.disk import identity as identities
from bookie_server.disk.identity import BadIdentity, Directory, Identity, Stamp, WrongDisks
from bookie_server.disk.interface import DiskFailed
from tests.simulation.disk import DiskFaults, SimDisk
from tests.simulation.loop import run

BOOKIE = "11111111-2222-4333-8444-555555555555"
CLUSTER = "99999999-8888-4777-8666-555555555555"
US = Identity(BOOKIE, CLUSTER)


HERE, THERE = "11111111-0000-4000-8000-000000000001", "11111111-0000-4000-8000-000000000002"


def disks(*made: SimDisk) -> list[Directory]:
    kinds = ("journal", "ledger")
    return [Directory(kind, f"{kind}s", disk) for kind, disk in zip(kinds, made, strict=False)]


async def write(*places: Directory, owner: Identity = US) -> None:
    for number, place in enumerate(places):
        await identities.write(place.disk, owner, (HERE, THERE)[number])


def new_disk() -> SimDisk:
    return SimDisk(random.Random(1))


def done(coroutine: Coroutine[Any, Any, Any]) -> Any:
    return run(coroutine, seed=1)


async def fill(disk: SimDisk) -> None:
    file = await disk.create("something")
    await file.append([b"x"], sync=True)
    await file.close()
    await disk.sync_dir()


STAMP = Stamp(US, HERE)
VERSION_1 = (
    b"spark-ledger-bookie 1 11111111-2222-4333-8444-555555555555 "
    b"99999999-8888-4777-8666-555555555555 fffda949\n"
)


def test_the_identity_file_is_one_line_of_text():
    assert identities.encode(STAMP) == (
        b"spark-ledger-bookie 2 11111111-2222-4333-8444-555555555555 "
        b"99999999-8888-4777-8666-555555555555 11111111-0000-4000-8000-000000000001 b81d1045\n"
    )
    assert identities.decode(identities.encode(STAMP)) == STAMP


def test_a_directory_of_version_1_has_an_id_that_follows_from_its_bookie():
    assert identities.decode(VERSION_1) == Stamp(US, "")

    async def scenario() -> None:
        disk = new_disk()
        file = await disk.create(identities.FILE)
        await file.append([VERSION_1], sync=True)
        ids = [await identities.directory_id(disk, kind) for kind in ("journal", "ledger")]
        assert ids == [str(uuid5(UUID(BOOKIE), kind)) for kind in ("journal", "ledger")]

    done(scenario())


@pytest.mark.parametrize("damaged", range(0, 141, 7))
def test_a_byte_changed_anywhere_is_found(damaged: int):
    data = bytearray(identities.encode(STAMP))
    data[damaged] ^= 1
    with pytest.raises(BadIdentity):
        identities.decode(bytes(data))


@pytest.mark.parametrize("length", [0, 1, 50, 104, 140])
def test_a_file_cut_short_is_found(length: int):
    with pytest.raises(BadIdentity):
        identities.decode(identities.encode(STAMP)[:length])


def test_a_blank_directory_beside_one_of_its_kind_becomes_a_new_one():
    old, new, journal = new_disk(), new_disk(), new_disk()
    places = [*disks(journal, old), Directory("ledger", "new", new)]

    async def scenario() -> None:
        await write(*places[:2])
        await fill(old)
        assert await identities.read(places) == US
        await identities.write(new, US, BOOKIE)
        assert await identities.read(places) == US
        ids = [await identities.directory_id(place.disk, place.kind) for place in places]
        assert ids == [HERE, THERE, BOOKIE]

    done(scenario())


def test_a_copy_of_a_directory_is_refused():
    async def scenario() -> None:
        places = disks(new_disk(), new_disk())
        for place in places:
            await identities.write(place.disk, US, HERE)
        with pytest.raises(WrongDisks, match="copies"):
            await identities.read(places)

    done(scenario())


def test_empty_disks_have_no_identity_and_are_given_one_that_survives_power_loss():
    journal, ledgers = new_disk(), new_disk()

    async def scenario() -> None:
        assert await identities.read(disks(journal, ledgers)) is None
        await write(*disks(journal, ledgers))
        journal.crash("none")
        ledgers.crash("none")
        assert await identities.read(disks(journal, ledgers)) == US

    done(scenario())


def test_a_format_interrupted_between_disks_is_taken_up_again():
    journal, ledgers = new_disk(), new_disk()

    async def scenario() -> None:
        await write(*disks(journal))
        assert await identities.read(disks(journal, ledgers)) == US
        await write(*disks(journal, ledgers))
        assert await identities.read(disks(journal, ledgers)[1:]) == US

    done(scenario())


def test_a_format_interrupted_by_power_loss_leaves_an_identity_or_none():
    async def scenario(seed: int) -> None:
        disk = SimDisk(random.Random(seed), DiskFaults(sync_fails=seed % 2))
        try:
            await write(*disks(disk))
        except DiskFailed:
            disk.crash("random")
        assert await identities.read(disks(disk)) in (None, US)
        await write(*disks(disk))
        assert await identities.read(disks(disk)) == US

    for seed in range(20):
        run(scenario(seed), seed=seed)


@pytest.mark.parametrize("wiped", [0, 1])
def test_a_wiped_disk_beside_a_used_one_is_refused(wiped: int):
    pair = (new_disk(), new_disk())

    async def scenario() -> None:
        await write(*disks(*pair))
        await fill(pair[1 - wiped])
        pair[wiped].wipe()
        with pytest.raises(BadIdentity, match=("journal", "ledgers")[wiped]):
            await identities.read(disks(*pair))

    done(scenario())


def test_disks_of_two_bookies_are_refused():
    journal, ledgers = new_disk(), new_disk()

    async def scenario() -> None:
        await write(*disks(journal))
        await write(*disks(journal, ledgers)[1:], owner=Identity(CLUSTER, CLUSTER))
        with pytest.raises(BadIdentity, match="different bookies"):
            await identities.read(disks(journal, ledgers))

    done(scenario())


def test_a_folder_with_files_of_others_is_never_formatted():
    async def scenario() -> None:
        disk = new_disk()
        await fill(disk)
        with pytest.raises(BadIdentity, match=r"no bookie\.identity but holds files"):
            await identities.read(disks(disk))

    done(scenario())


def test_locks_and_what_file_systems_put_there_do_not_count_as_used():
    async def scenario() -> None:
        disk = new_disk()
        for name in (identities.LOCK_FILE, "lost+found"):
            await (await disk.create(name)).close()
        assert await identities.read(disks(disk)) is None

    done(scenario())
