"""The thirteen ways in which a storage node of this kind was seen to break its promises.

docs/storage.md has the table: each report, the tests here that are named after it, and where else
it is looked for. Always true: every scenario ends with a restart after which all that was promised
is asked for, and fails when the bug is put in (test_known_bugs_are_seen.py).
"""

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any

import pytest

from bookie_server.api import messages as m
from bookie_server.api.status import Status
from bookie_server.journal import checkpoint
from tests.kit.budgets import SMALL_LOGS
from tests.simulation.disk import Keep
from tests.simulation.loop import run
from tests.storage import scenarios
from tests.storage.deeds import DEEDS
from tests.storage.model import NEGATIVES
from tests.storage.points import enumerate_points
from tests.storage.rig import BOOKIE_ID, Shape
from tests.storage.stage import Stage


def staged(scenario: Callable[..., Coroutine[Any, Any, None]], *more: Any) -> None:
    run(scenario(Stage(Shape()), *more))


@pytest.mark.parametrize("end", ["crash", "stop"])
def test_bk4843_a_fence_on_an_idle_node_is_not_passed_by_the_checkpoint(end: str):
    staged(scenarios.a_fence_and_nothing_else, end)


@pytest.mark.parametrize("by_read", [False, True])
def test_bk_3_2_2_a_fence_is_answered_after_it_is_durable_whatever_the_answer(by_read: bool):
    staged(scenarios.a_fence_of_nothing, by_read)


def test_bk4114_after_a_failed_flush_no_checkpoint_moves():
    staged(scenarios.a_flush_fails)


def test_bk4844_the_marks_of_two_journals_are_never_put_in_one_order():
    run(scenarios.two_journals_at_different_places(Stage(Shape(journals=2))))


@pytest.mark.parametrize("slow", [0, 1])
def test_bk3329_a_flush_of_one_directory_proves_nothing_about_the_other(slow: int):
    run(scenarios.one_directory_is_slow(Stage(Shape(ledgers=2)), slow))


def test_bk4607_a_garbage_map_does_not_make_a_log_empty():
    run(scenarios.a_map_is_garbage(Stage(Shape(config=SMALL_LOGS))))


@pytest.mark.parametrize("how", ["fails", "no folder", "other cluster"])
def test_bk870_nothing_is_collected_because_of_what_an_ill_store_says(how: str):
    run(scenarios.the_metadata_store_is_ill(Stage(Shape(config=SMALL_LOGS)), how))


def test_bk1534_compaction_removes_a_log_after_the_index_is_durable():
    deed = next(deed for deed in DEEDS if deed.name == "compaction")
    assert enumerate_points(deed, persistences=(("none", 0),)).crashes > 30


def test_bk4105_the_mark_never_goes_back_and_the_segment_it_names_is_there():
    async def main(stage: Stage) -> None:
        await stage.start()
        disk, seen = stage.rig.ledger_disks[0], []
        for first in range(0, 120, 4):
            await stage.add(1, range(first, first + 4), size=3000)
            stage.rig.begin_flush()
            await asyncio.sleep(0.004 * (first % 3))
            marks = checkpoint.decode(disk.content(checkpoint.PATH))
            seen.append(marks["journal-0"])
            assert seen == sorted(seen)
        await stage.crash("none")
        assert len(set(seen)) > 5

    staged(main)


def test_bk3830_nothing_is_acknowledged_before_its_sync_across_a_roll():
    deed = next(deed for deed in DEEDS if deed.name == "roll of the journal")
    points = enumerate_points(deed, persistences=(("none", 0),))
    assert sum("create journal" in operation for operation in points.operations) >= 2


@pytest.mark.parametrize("where", range(8))
def test_bk2220_bk3949_a_flipped_bit_in_the_journal_costs_no_start_and_no_false_denial(where: int):
    staged(scenarios.a_bit_of_the_journal_flips, where)


@pytest.mark.parametrize("harm", ["cut off", "gone", "flipped"])
def test_bk2908_what_an_entry_log_lost_is_an_error_and_no_absence(harm: str):
    async def main(stage: Stage) -> None:
        await stage.start()
        await stage.add(1, range(12))
        await stage.flushed()
        disk = stage.rig.ledger_disks[0]
        path = next(path for path in disk.paths() if path.startswith("entrylog/"))
        if harm == "cut off":
            disk.truncate(path, 5000)
        elif harm == "flipped":
            disk.flip_bit(path, 8 * 6000)
        else:
            await disk.remove(path)
        await asyncio.sleep(1)
        stage.model.unknown_allowed = True
        await stage.crash("all")
        asked = m.ReadRequest(BOOKIE_ID, 1, 0, 11, 1 << 20)
        found = [result.status for result in (await stage.rig.ask(asked)).results]
        assert any(status not in (Status.OK, *NEGATIVES) for status in found)

    staged(main)


@pytest.mark.parametrize("keep", ["none", "random", "all"])
def test_bk4462_bk4840_bk1757_a_deletion_beside_a_flush_and_a_fence_is_not_undone(keep: Keep):
    staged(scenarios.a_deletion_beside_a_flush, keep)


def test_bk_3_2_11_names_are_durable_before_anything_relies_on_them():
    async def main(stage: Stage) -> None:
        await stage.start()
        for first in range(0, 40, 4):
            await stage.add(1, range(first, first + 4), size=3900)
            await stage.flushed()
            await stage.crash("none")

    staged(main)


def test_bk4040_bytes_of_another_version_are_refused_by_name_and_never_misread():
    async def main(stage: Stage) -> None:
        await stage.start()
        await stage.add(1, range(4))
        await stage.flushed()
        disk = stage.rig.ledger_disks[0]
        for path in [path for path in disk.paths() if path.startswith("entrylog/")]:
            at = disk.content(path).index(b"SLER") + 4
            disk.flip_bit(path, 8 * at + 1)
        stage.model.unknown_allowed = True
        await stage.crash("all")

    staged(main)
