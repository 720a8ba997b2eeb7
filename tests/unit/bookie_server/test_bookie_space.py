"""A bookie whose disks fill up: read-only in time, of use to recovery, back by itself."""

import asyncio
from typing import Any

import pytest

from bookie_server.api import messages as m
from bookie_server.api.status import Status
from bookie_server.disk.interface import DiskFailed
from bookie_server.disk.monitor import RESERVE
from tests.kit.settings import with_settings
from tests.simulation.disk import SimDisk
from tests.simulation.loop import run
from tests.unit.bookie_server.node import CONFIG, ID, KIB, Node, entry

SPACE = with_settings(
    CONFIG,
    disk_free_bytes_min=1024 * KIB,
    disk_reserve_bytes=512 * KIB,
    disk_check_s=5.0,
)
LOOKED_S = 2 * SPACE.disk_check_s


async def a_node(**changes: Any) -> Node:
    node = await Node(with_settings(SPACE, **changes)).start()
    await node.create_ledger(1, 2)
    return node


async def info(node: Node) -> m.InfoResponse:
    answer = await node.bookie.handle(m.InfoRequest(ID))
    assert isinstance(answer, m.InfoResponse)
    return answer


@pytest.mark.parametrize("which", ["journal", "ledger"])
def test_a_full_disk_makes_the_node_read_only_and_space_makes_it_writable_again(which: str):
    async def scenario() -> None:
        node = await a_node()
        disk: SimDisk = getattr(node, f"{which}_disk")
        await node.add_all(entry(1, 0))
        disk.fill_up(1000 * KIB)
        await asyncio.sleep(LOOKED_S)
        assert await node.add(entry(1, 1)) == [Status.READ_ONLY]
        answer = await info(node)
        assert (answer.state, answer.reason) == ("readonly", f"disk full: {which}")
        assert [each.path for each in answer.directories if each.full] == [which]
        disk.empty_out()
        await asyncio.sleep(LOOKED_S)
        assert await node.add(entry(1, 1)) == [Status.OK]
        assert (await info(node)).state == "writable"

    run(scenario(), seed=1)


def test_a_read_only_node_fences_takes_recoverys_adds_and_knows_what_it_does_not_have():
    async def scenario() -> None:
        node = await a_node()
        await node.add_all(entry(1, 0))
        node.ledger_disk.fill_up(1000 * KIB)
        await asyncio.sleep(LOOKED_S)
        assert await node.fence(1) is Status.OK
        assert await node.add(entry(1, 1), recovery=True) == [Status.OK]
        assert await node.statuses(1, 0, 2) == [Status.OK, Status.OK, Status.NO_SUCH_ENTRY]
        await asyncio.sleep(LOOKED_S)  # flushed, out of the reserve
        await node.crash()
        assert await node.statuses(1, 0, 1) == [Status.OK] * 2
        assert (await node.read_lac(1)).fenced

    run(scenario(), seed=1)


def test_recoverys_adds_end_before_the_disk_does_and_everything_taken_is_kept():
    async def scenario() -> None:
        node = await a_node()
        node.ledger_disk.fill_up(1000 * KIB)
        await asyncio.sleep(LOOKED_S)
        taken = 0
        for entry_id in range(1000):
            (status,) = await node.add(entry(1, entry_id, bytes(16 * KIB)), recovery=True)
            if status is Status.BUSY:
                await asyncio.sleep(1)
                continue
            if status is Status.READ_ONLY:
                break
            assert status is Status.OK
            taken += 1
        assert taken > 30
        assert await node.fence(2) is Status.OK
        await asyncio.sleep(LOOKED_S)
        assert not node.bookie.failed.done()
        await node.crash()
        assert node.bookie.readonly_reason == "disk full: ledger"
        assert (await node.read_lac(2)).fenced

    run(scenario(), seed=1)


def test_a_disk_that_somebody_else_fills_in_a_moment_costs_the_reserve_and_not_the_node():
    async def scenario() -> None:
        node = await a_node()
        await node.add_all(*(entry(1, entry_id, bytes(900)) for entry_id in range(64)))
        assert RESERVE in node.ledger_disk.paths()
        node.ledger_disk.fill_up(0)
        await asyncio.sleep(SPACE.flush_interval_s + 2)  # the flush meets it first
        assert RESERVE not in node.ledger_disk.paths()
        assert node.bookie.readonly_reason == "disk full: ledger"
        assert not node.bookie.failed.done()
        node.ledger_disk.empty_out()
        await asyncio.sleep(LOOKED_S)
        assert node.bookie.readonly_reason == ""
        assert RESERVE in node.ledger_disk.paths()

    run(scenario(), seed=1)


def test_a_flush_without_space_writes_nothing_and_goes_on_when_there_is_some():
    """BK#4114: every ten seconds the same entries, until nothing at all was left."""

    async def scenario() -> None:
        node = await a_node(disk_reserve_bytes=0)
        await node.add_all(*(entry(1, entry_id, bytes(900)) for entry_id in range(64)))
        node.ledger_disk.fill_up(8 * KIB)
        await asyncio.sleep(SPACE.flush_interval_s + 1)
        free = await node.ledger_disk.free_bytes()
        await asyncio.sleep(10 * SPACE.flush_interval_s)
        assert await node.ledger_disk.free_bytes() == free
        assert await node.add(entry(1, 64)) == [Status.READ_ONLY]
        assert await node.add(entry(1, 64), recovery=True) == [Status.READ_ONLY]
        assert await node.statuses(1, 0, 63) == [Status.OK] * 64
        assert await node.fence(2) is Status.OK
        node.ledger_disk.empty_out()
        await asyncio.sleep(LOOKED_S)
        assert await node.add(entry(1, 64)) == [Status.OK]
        await node.crash()
        assert await node.statuses(1, 0, 63) == [Status.OK] * 64

    run(scenario(), seed=1)


def test_a_node_starts_on_full_disks_read_only_and_serves():
    async def scenario() -> None:
        node = await a_node()
        await node.add_all(*(entry(1, entry_id, bytes(900)) for entry_id in range(64)))
        node.die("none")
        node.ledger_disk.fill_up(4 * KIB)
        node.journal_disk.fill_up(300 * KIB)
        await node.start()
        assert node.bookie.readonly_reason == "disk full: journal, ledger"
        assert await node.statuses(1, 0, 63) == [Status.OK] * 64

    run(scenario(), seed=1)


def test_a_flush_to_a_directory_that_cannot_even_be_asked_for_its_space_ends_the_last_one():
    async def scenario() -> None:
        node = await a_node(disk_check_s=600.0)
        await node.add_all(entry(1, 0))

        async def dies() -> int:
            raise DiskFailed("statvfs: EIO")

        node.ledger_disk.free_bytes = dies  # type: ignore[method-assign]
        await asyncio.sleep(SPACE.flush_interval_s + 2)
        assert "no ledger directory is left" in str(node.bookie.failed.exception())

    run(scenario(), seed=1)
