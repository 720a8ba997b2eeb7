import asyncio
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bookie_server.config import StorageConfig
from bookie_server.disk import identity
from bookie_server.disk.interface import Disk, DiskFailed, DiskFull
from bookie_server.disk.monitor import (
    RESERVE,
    DirectoryState,
    DiskLimits,
    DiskMonitor,
    Role,
    Space,
    WatchedDirectory,
    degraded_reason,
    is_exhausted,
    is_full,
    readonly_reason,
    total_space,
)
from bookie_server.journal import checkpoint
from tests.kit.settings import with_settings
from tests.simulation.disk import SimDisk
from tests.simulation.loop import run

MIB = 1 << 20
LIMITS = DiskLimits(usage_high=0.95, usage_low=0.90, free_bytes_min=10)
CONFIG = with_settings(
    StorageConfig(),
    disk_free_bytes_min=4 * MIB,
    disk_reserve_bytes=2 * MIB,
    disk_check_s=10.0,
)
SIZE = 100 * MIB


# -- one directory: full or not ---------------------------------------------------------------


def full(free: int, was_full: bool, missing: int = 0, total: int = 1000) -> bool:
    return is_full(Space(free, total), was_full, missing, LIMITS)


def test_a_directory_is_full_above_the_high_share_and_until_it_is_below_the_low_one():
    assert not full(free=51, was_full=False)
    assert full(free=49, was_full=False)
    assert full(free=99, was_full=True)
    assert not full(free=101, was_full=True)


def test_a_directory_is_full_below_the_free_bytes_whatever_its_share():
    assert full(free=9, was_full=False, total=20)
    assert not full(free=10, was_full=False, total=20)
    assert full(free=19, was_full=True, total=20)
    assert not full(free=20, was_full=True, total=21)


def test_a_reserve_that_is_to_be_made_again_is_no_free_space():
    assert full(free=120, was_full=True, missing=30)
    assert not full(free=131, was_full=True, missing=30)


def test_a_file_system_without_a_size_is_full():
    assert is_full(Space(0, 0), False, 0, LIMITS)


SPACES = st.integers(0, 1000)


@given(free=SPACES, missing=st.integers(0, 200), was_full=st.booleans())
def test_what_the_node_does_by_itself_never_changes_its_mind(free: int, missing: int, was_full):
    """Giving the reserve back, or making it again, is no reason to go the other way."""
    if full(free, was_full, missing if was_full else 0):
        assert full(free + (0 if was_full else missing), True, missing)
    elif was_full:
        assert not full(free - missing, False)


# -- the node: what its directories make of it ------------------------------------------------


def state(name: str, role: Role = Role.LEDGER, full: bool = False, failure: str = ""):
    return DirectoryState(name, role, Space(10, 20), full, failure)


JOURNAL = state("/j", Role.JOURNAL)


@pytest.mark.parametrize(
    ("directories", "reason"),
    [
        ((JOURNAL, state("/a"), state("/b")), ""),
        ((JOURNAL, state("/a", full=True), state("/b")), ""),
        ((JOURNAL, state("/a", full=True), state("/b", full=True)), "disk full: /a, /b"),
        ((JOURNAL, state("/a", full=True), state("/b", failure="EIO")), "disk full: /a"),
        ((JOURNAL, state("/a"), state("/b", full=True, failure="EIO")), ""),
        ((state("/j", Role.JOURNAL, full=True), state("/a")), "disk full: /j"),
        ((state("/j", Role.JOURNAL, full=True), state("/a", full=True)), "disk full: /j, /a"),
        ((state("/j", Role.JOURNAL, True, "EIO"), JOURNAL, state("/a")), ""),
    ],
)
def test_the_node_is_read_only_when_a_journal_or_all_ledger_directories_that_live_are_full(
    directories, reason
):
    assert readonly_reason(directories) == reason


def test_recoverys_adds_are_taken_while_what_was_taken_still_fits_a_ledger_directory():
    config = with_settings(CONFIG, disk_reserve_bytes=10)
    full, other = state("/a", full=True), state("/b")  # 10 bytes free each
    assert not is_exhausted([JOURNAL, full], 0, config)
    assert is_exhausted([JOURNAL, full], 1, config)
    assert not is_exhausted([JOURNAL, full, other], 1, config)
    assert is_exhausted([JOURNAL, full, state("/b", failure="EIO")], 1, config)
    assert not is_exhausted([state("/j", Role.JOURNAL, full=True), other], 1, config)


def test_limbo_of_every_ledger_is_a_reason_of_its_own():
    assert readonly_reason([JOURNAL, state("/a")], "in limbo") == "in limbo"


def test_a_lost_directory_is_named_with_why_and_its_space_does_not_count():
    directories = [JOURNAL, state("/a"), state("/b", failure="EIO")]
    assert degraded_reason(directories) == "ledger directory /b failed: EIO"
    assert degraded_reason(directories[:2]) == ""
    assert total_space(directories) == Space(10, 20)


def test_directories_that_share_a_file_system_have_its_space_once():
    shared = [state(name)._replace(file_system="1") for name in ("/a", "/b")]
    assert total_space(shared) == Space(10, 20)
    assert total_space([*shared, state("/c")._replace(file_system="2")]) == Space(20, 40)
    assert total_space([state("/a"), state("/b")]) == Space(20, 40)


# -- the watch over simulated disks -----------------------------------------------------------


class Node:
    """A journal and two ledger directories, each of SIZE, and the monitor over them."""

    def __init__(self, config: StorageConfig = CONFIG) -> None:
        rng = random.Random(3)
        self.disks = {name: SimDisk(rng) for name in ("j", "a", "b")}
        for disk in self.disks.values():
            disk.faults.bytes_max = SIZE
        self.dropped: dict[str, str] = {}
        self.said: list[str] = []
        roles = {"j": Role.JOURNAL, "a": Role.LEDGER, "b": Role.LEDGER}
        self.monitor = DiskMonitor(
            [
                WatchedDirectory(name, f"/{name}", roles[name], disk)
                for name, disk in self.disks.items()
            ],
            config,
            small=(f"{checkpoint.FOLDER}/",),
        )
        self.monitor.attach(
            lambda name: self.dropped.get(name, ""),
            lambda name, error: self.dropped.update({name: str(error)}),
        )
        self.monitor.listeners.append(lambda: self.said.append(self.reason))

    @property
    def reason(self) -> str:
        return readonly_reason(self.monitor.states)

    def watched(self, name: str) -> Disk:
        return self.monitor.disk(name)

    def holds_reserve(self, name: str) -> bool:
        return RESERVE in self.disks[name].paths()

    async def occupy(self, name: str, left_bytes: int) -> None:
        """Somebody uses all but so many bytes of what is free."""
        disk = self.disks[name]
        await disk.create("somebody's", await disk.free_bytes() - left_bytes)

    async def vacate(self, name: str) -> None:
        await self.disks[name].remove("somebody's")


def test_each_directory_gets_a_reserve_and_has_space():
    async def scenario() -> None:
        node = Node()
        await node.monitor.look()
        assert all(node.holds_reserve(name) for name in node.disks)
        assert all(node.monitor.has_space(name) for name in node.disks)
        assert node.monitor.free_bytes("a") == SIZE - CONFIG.disk_reserve_bytes

    run(scenario(), seed=1)


def test_a_full_directory_gives_its_reserve_back_and_makes_it_again_by_itself():
    async def scenario() -> None:
        node = Node()
        await node.monitor.look()
        watching = asyncio.ensure_future(node.monitor.run())
        await node.occupy("j", left_bytes=3 * MIB)
        await asyncio.sleep(CONFIG.disk_check_s + 1)
        assert node.reason == "disk full: /j"
        assert not node.holds_reserve("j")
        assert await node.disks["j"].free_bytes() == 5 * MIB
        await node.vacate("j")
        await asyncio.sleep(2)  # looked at more often while it is full
        assert node.reason == ""
        assert node.holds_reserve("j")
        assert node.said == ["", "disk full: /j", ""]
        watching.cancel()

    run(scenario(), seed=1)


def test_a_full_ledger_directory_takes_no_new_ledgers_and_the_others_do():
    async def scenario() -> None:
        node = Node()
        await node.monitor.look()
        await node.occupy("a", left_bytes=3 * MIB)
        await node.monitor.look()
        assert not node.monitor.has_space("a")
        assert node.monitor.has_space("b")
        assert node.reason == ""

    run(scenario(), seed=1)


def test_a_directory_between_the_thresholds_stays_what_it_was():
    async def scenario() -> None:
        node = Node()
        await node.monitor.look()
        await node.occupy("j", left_bytes=3 * MIB)
        for _ in range(5):
            await node.monitor.look()
        await node.vacate("j")
        await node.occupy("j", left_bytes=11 * MIB)  # 2 of them for the reserve: 9 % free
        for _ in range(5):
            await node.monitor.look()
        assert node.said == ["", "disk full: /j"]

    run(scenario(), seed=1)


def test_a_new_file_is_a_look_that_does_not_wait():
    async def scenario() -> None:
        node = Node()
        await node.monitor.look()
        watching = asyncio.ensure_future(node.monitor.run())
        await asyncio.sleep(0)
        await node.watched("j").create("segment", 94 * MIB)
        await asyncio.sleep(0.1)
        assert node.reason == "disk full: /j"
        watching.cancel()

    run(scenario(), seed=1)


def test_the_checkpoint_that_each_flush_writes_is_no_reason_to_look():
    async def scenario() -> None:
        node = Node()
        await node.monitor.look()
        watching = asyncio.ensure_future(node.monitor.run())
        await asyncio.sleep(0)
        disk = node.watched("j")
        await disk.make_folder(checkpoint.FOLDER)
        await node.occupy("j", left_bytes=MIB)
        await disk.create(checkpoint.TEMPORARY)
        await asyncio.sleep(0.1)
        assert not node.reason
        await disk.create("segment")
        await asyncio.sleep(0.1)
        assert node.reason == "disk full: /j"
        watching.cancel()

    run(scenario(), seed=1)


def test_a_file_that_does_not_fit_gets_the_reserve_and_the_directory_is_full():
    async def scenario() -> None:
        node = Node()
        await node.monitor.look()
        await node.occupy("j", left_bytes=30 * MIB)
        await node.watched("j").create("segment", 31 * MIB)
        assert not node.holds_reserve("j")
        assert node.reason == "disk full: /j"
        await node.vacate("j")
        await node.occupy("j", left_bytes=50 * MIB)  # above all thresholds, not twice the segment
        await node.monitor.look()
        assert node.reason == "disk full: /j"
        await node.vacate("j")
        await node.monitor.look()
        assert node.reason == ""

    run(scenario(), seed=1)


def test_a_file_that_does_not_fit_even_so_leaves_nothing():
    async def scenario() -> None:
        node = Node()
        await node.monitor.look()
        await node.occupy("j", left_bytes=10 * MIB)
        with pytest.raises(DiskFull):
            await node.watched("j").create("segment", 31 * MIB)
        assert node.disks["j"].paths() == ["somebody's"]

    run(scenario(), seed=1)


def test_an_append_that_does_not_fit_gets_the_reserve_first():
    async def scenario() -> None:
        node = Node()
        await node.monitor.look()
        log = await node.watched("a").create("log")
        await node.occupy("a", left_bytes=MIB)
        await log.append([bytes(MIB), bytes(MIB)])
        assert not node.monitor.has_space("a")
        assert not node.holds_reserve("a")
        assert log.end == 2 * MIB
        with pytest.raises(DiskFull):
            await log.append([bytes(2 * MIB)])

    run(scenario(), seed=1)


def test_a_full_directory_is_full_from_the_first_look_on_and_no_reserve_is_made():
    async def scenario() -> None:
        node = Node()
        await node.occupy("a", left_bytes=5 * MIB)  # the reserve would leave too little
        await node.monitor.look()
        assert not node.monitor.has_space("a")
        assert not node.holds_reserve("a")

    run(scenario(), seed=1)


def test_a_reserve_of_an_earlier_run_is_taken_up_and_one_of_another_size_replaced():
    async def scenario() -> None:
        node = Node()
        await node.disks["a"].create(RESERVE, CONFIG.disk_reserve_bytes)
        await node.disks["b"].create(RESERVE, MIB)
        await node.monitor.look()
        for name in ("a", "b"):
            assert (await node.disks[name].open(RESERVE)).end == CONFIG.disk_reserve_bytes

    run(scenario(), seed=1)


def test_a_directory_that_cannot_be_looked_at_is_dropped_once():
    async def scenario() -> None:
        node = Node()
        await node.monitor.look()

        async def dies() -> int:
            raise DiskFailed("statvfs: EIO")

        node.disks["a"].free_bytes = dies  # type: ignore[method-assign]
        await node.monitor.look()
        await node.monitor.look()
        assert node.dropped == {"a": "statvfs: EIO"}
        assert not node.monitor.has_space("a")
        assert degraded_reason(node.monitor.states) == "ledger directory /a failed: statvfs: EIO"
        assert node.said == ["", ""]

    run(scenario(), seed=1)


def test_a_directory_whose_identity_is_gone_was_unmounted_and_is_dropped():
    async def scenario() -> None:
        node = Node()
        await node.disks["b"].create(identity.FILE)
        await node.monitor.look()
        await node.disks["b"].remove(identity.FILE)
        await node.monitor.look()
        assert "unmounted" in node.dropped["b"]

    run(scenario(), seed=1)


def test_a_directory_that_is_not_there_at_all_is_named_too():
    monitor = DiskMonitor([], CONFIG, {"id-7": "/gone cannot be opened: EIO"})
    said = degraded_reason(monitor.states)
    assert said == "ledger directory id-7 failed: /gone cannot be opened: EIO"


def test_without_a_reserve_nothing_is_made():
    async def scenario() -> None:
        node = Node(with_settings(CONFIG, disk_reserve_bytes=0))
        await node.monitor.look()
        assert node.disks["a"].paths() == []
        assert node.monitor.has_space("a")

    run(scenario(), seed=1)
