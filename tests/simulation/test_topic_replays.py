"""Batches that are planned anew: each plan is committed once, also one without rows, which nothing
but its number tells from another."""

from random import Random

import pytest

from spark_ledger.topic.commit import draft
from tests.simulation.loop import current, run
from tests.simulation.points.stage import Stage
from tests.simulation.topic_work import TOPIC

QUERY = "q"


def planned_next(stage: Stage, *, rows: bool) -> None:
    """The checkpoint goes back to before batch 0, and what is planned as that has rows, or none."""
    checkpoints, seed = stage.work.checkpoints, current().seed
    number = checkpoints.numbers + 1
    while (Random(f"{QUERY}:{number}:{seed}:topics").random() < 0.1) is rows:  # as topic_work draws
        number += 1
    checkpoints.numbers = number - 1
    checkpoints.plans.clear()


async def begun() -> Stage:
    """A query of one batch, which overwrites, and whose checkpoint may go back."""
    stage = Stage()
    await stage.begin()
    work = stage.work
    work.targets[QUERY], work.overwriters, work.batches = TOPIC, [QUERY], 1
    work.checkpoints.on = True
    return stage


async def batch_done(stage: Stage) -> int:
    """A run of the query to its end. How many commits the topic has then."""
    work, client = stage.work, await stage.world.client("driver")
    work.ghost.next_version[QUERY] = 0
    work.checkpoints.restored = lambda query: None  # the test says when it goes back
    try:
        await client.run(work._run_batches(client, client, QUERY, work.next_run()))
    finally:
        for violation in stage.world.observers.violations[:1]:  # what came first
            raise violation
    return len(stage.log().commits)


def test_two_plans_of_one_number_may_both_have_no_rows():
    async def main() -> None:
        stage = await begun()
        for number, rows in enumerate((False, True, False)):
            planned_next(stage, rows=rows)
            assert await batch_done(stage) == number + 1
        await stage.judge()

    run(main(), seed=1)


def test_a_plan_without_rows_may_be_taken_for_a_replay_of_another():
    async def main() -> None:
        stage = await begun()
        for _ in range(2):
            planned_next(stage, rows=False)
            assert await batch_done(stage) == 1
        await stage.judge()

    run(main(), seed=1)


@pytest.mark.parametrize("rows", [True, False])
def test_a_plan_that_is_committed_twice_is_found(monkeypatch, rows):
    async def main() -> None:
        stage = await begun()
        planned_next(stage, rows=rows)
        await batch_done(stage)
        monkeypatch.setattr(draft, "recorded_outcome", lambda *_: None)  # whatever the record has
        with pytest.raises(Exception, match=r"T2.* contributes rows 2 times"):
            await batch_done(stage)

    run(main(), seed=1)
