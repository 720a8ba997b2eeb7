import random
from collections.abc import Coroutine
from typing import Any

import pytest

from bookie_server import identity as identities
from bookie_server.disk import DiskFailed
from bookie_server.identity import BadIdentity, Identity
from tests.simulation.disk import DiskFaults, SimDisk
from tests.simulation.loop import run

BOOKIE = "11111111-2222-4333-8444-555555555555"
CLUSTER = "99999999-8888-4777-8666-555555555555"
US = Identity(BOOKIE, CLUSTER)


def disks(*made: SimDisk):
    return tuple(zip(("journal", "ledgers"), made, strict=True))


def new_disk() -> SimDisk:
    return SimDisk(random.Random(1))


def done(coroutine: Coroutine[Any, Any, Any]) -> Any:
    return run(coroutine, seed=1)


async def fill(disk: SimDisk) -> None:
    file = await disk.create("something")
    await file.append([b"x"], sync=True)
    await file.close()
    await disk.sync_dir()


def test_the_identity_file_is_one_line_of_text():
    assert identities.encode(US) == (
        b"spark-ledger-bookie 1 11111111-2222-4333-8444-555555555555 "
        b"99999999-8888-4777-8666-555555555555 fffda949\n"
    )
    assert identities.decode(identities.encode(US)) == US


@pytest.mark.parametrize("damaged", range(0, 105, 7))
def test_a_byte_changed_anywhere_is_found(damaged: int):
    data = bytearray(identities.encode(US))
    data[damaged] ^= 1
    with pytest.raises(BadIdentity):
        identities.decode(bytes(data))


@pytest.mark.parametrize("length", [0, 1, 50, 104])
def test_a_file_cut_short_is_found(length: int):
    with pytest.raises(BadIdentity):
        identities.decode(identities.encode(US)[:length])


def test_empty_disks_have_no_identity_and_are_given_one_that_survives_power_loss():
    journal, ledgers = new_disk(), new_disk()

    async def scenario() -> None:
        assert await identities.read(disks(journal, ledgers)) is None
        await identities.write(disks(journal, ledgers), US)
        journal.crash("none")
        ledgers.crash("none")
        assert await identities.read(disks(journal, ledgers)) == US

    done(scenario())


def test_a_format_interrupted_between_disks_is_taken_up_again():
    journal, ledgers = new_disk(), new_disk()

    async def scenario() -> None:
        await identities.write((("journal", journal),), US)
        assert await identities.read(disks(journal, ledgers)) == US
        await identities.write(disks(journal, ledgers), US)
        assert await identities.read((("ledgers", ledgers),)) == US

    done(scenario())


def test_a_format_interrupted_by_power_loss_leaves_an_identity_or_none():
    async def scenario(seed: int) -> None:
        disk = SimDisk(random.Random(seed), DiskFaults(sync_fails=seed % 2))
        try:
            await identities.write((("journal", disk),), US)
        except DiskFailed:
            disk.crash("random")
        assert await identities.read((("journal", disk),)) in (None, US)
        await identities.write((("journal", disk),), US)
        assert await identities.read((("journal", disk),)) == US

    for seed in range(20):
        run(scenario(seed), seed=seed)


@pytest.mark.parametrize("wiped", [0, 1])
def test_a_wiped_disk_beside_a_used_one_is_refused(wiped: int):
    pair = (new_disk(), new_disk())

    async def scenario() -> None:
        await identities.write(disks(*pair), US)
        await fill(pair[1 - wiped])
        pair[wiped].wipe()
        with pytest.raises(BadIdentity, match=("journal", "ledgers")[wiped]):
            await identities.read(disks(*pair))

    done(scenario())


def test_disks_of_two_bookies_are_refused():
    journal, ledgers = new_disk(), new_disk()

    async def scenario() -> None:
        await identities.write((("journal", journal),), US)
        await identities.write((("ledgers", ledgers),), Identity(CLUSTER, CLUSTER))
        with pytest.raises(BadIdentity, match="different bookies"):
            await identities.read(disks(journal, ledgers))

    done(scenario())


def test_a_folder_with_files_of_others_is_never_formatted():
    async def scenario() -> None:
        disk = new_disk()
        await fill(disk)
        with pytest.raises(BadIdentity, match=r"no bookie\.identity"):
            await identities.read((("journal", disk),))

    done(scenario())


def test_locks_and_what_file_systems_put_there_do_not_count_as_used():
    async def scenario() -> None:
        disk = new_disk()
        for name in (identities.LOCK_FILE, "lost+found"):
            await (await disk.create(name)).close()
        assert await identities.read((("journal", disk),)) is None

    done(scenario())
