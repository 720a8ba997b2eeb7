"""The tests of the known bugs fail when the bug is there: each is put in for the length of a run.

Always true: a bug is one function replaced by one that does what the report describes; it is seen
when a promise is broken, not when the bug merely raises.
"""

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any

import pytest

from bookie_server.journal import scan
from bookie_server.journal import writer as journal
from tests.simulation.disk import SimDisk
from tests.simulation.loop import run
from tests.simulation.mutants import MUTANTS, Mutant
from tests.storage import scenarios
from tests.storage.points import PointFailed, enumerate_points
from tests.storage.rig import Shape
from tests.storage.stage import Stage

Scenario = Callable[[Stage], Coroutine[Any, Any, None]]
SEEN = (AssertionError,)
"""Broken and PointFailed are such."""


def of_the_simulation(name: str) -> Mutant:
    return next(mutant for mutant in MUTANTS if mutant.name == name)


def early(write_batch: Any) -> Any:
    """Whoever waits is told when the batch was written; it is synced afterwards."""

    async def acked_first(self: Any, groups: Any) -> None:
        for group in groups:
            group.ack.count_written()
        await write_batch(self, groups)

    return acked_first


def no_damage(damage: Any) -> Any:
    return property(lambda self: [])


def names_only_in_the_cache(sync_dir: Any) -> Any:
    async def nothing(self: SimDisk, folder: str = "") -> None:
        await asyncio.sleep(0)

    return nothing


async def fence_alone(stage: Stage) -> None:
    await scenarios.a_fence_and_nothing_else(stage, "crash")


async def fence_of_nothing(stage: Stage) -> None:
    await scenarios.a_fence_of_nothing(stage, False)  # a read that fences waits for all it shows


async def flipped_bit(stage: Stage) -> None:
    await scenarios.a_bit_of_the_journal_flips(stage, 0)


async def acked_in_a_new_segment(stage: Stage) -> None:
    await stage.start()
    await stage.add(1, range(4))
    await stage.crash("none")


BUGS: tuple[tuple[str, Mutant, Scenario], ...] = (
    ("BK#4843", of_the_simulation("checkpoint without fences"), fence_alone),
    ("3.2.2", of_the_simulation("reply before the fence"), fence_of_nothing),
    ("BK#3830", Mutant("", "", journal.Journal, "_write", early), acked_in_a_new_segment),
    ("BK#2220", Mutant("", "", scan.Replay, "damage", no_damage), flipped_bit),
    (
        "3.2.11",
        Mutant("", "", SimDisk, "sync_dir", names_only_in_the_cache),
        acked_in_a_new_segment,
    ),
)


@pytest.mark.parametrize(("report", "bug", "scenario"), BUGS, ids=[bug[0] for bug in BUGS])
def test_a_known_bug_breaks_its_test(report: str, bug: Mutant, scenario: Scenario):
    with bug.applied(), pytest.raises(SEEN):
        run(scenario(Stage(Shape())))
    run(scenario(Stage(Shape())))


def test_a_broken_promise_at_one_point_ends_the_enumeration_and_says_where():
    from tests.storage.deeds import DEEDS

    flush = next(deed for deed in DEEDS if deed.name == "flush")
    bug = of_the_simulation("checkpoint mark too far")
    with bug.applied(), pytest.raises(PointFailed, match="flush: after operation"):
        enumerate_points(flush)
