"""Whatever is done to a query in mid-batch: its topic holds every row once, and in order."""

import itertools
import random
from collections.abc import Callable, Iterator

import pytest

from spark_ledger.local import LocalCluster
from tests.spark.exactly_once import cases, kills, speculation
from tests.spark.exactly_once.cases import Case
from tests.spark.exactly_once.kills import POINTS, Killed
from tests.spark.exactly_once.world import World

SEED = 6


class Worlds:
    """The world that the cases share; another one after a case that failed."""

    def __init__(self, cluster: LocalCluster, folders: pytest.TempPathFactory) -> None:
        self._cluster = cluster
        self._folders = folders
        self._numbers = itertools.count()
        self._world: World | None = None

    @property
    def now(self) -> World:
        if self._world is None:
            name = f"exactly-once-{next(self._numbers)}"
            folder = self._folders.mktemp(name)
            self._world = World(self._cluster, folder, name, random.Random(SEED))
        return self._world

    def close(self) -> None:
        if self._world is not None:
            self._world.close()
            self._world = None


@pytest.fixture(scope="module")
def worlds(cluster: LocalCluster, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Worlds]:
    made = Worlds(cluster, tmp_path_factory)
    yield made
    made.close()


@pytest.fixture
def survives(worlds: Worlds) -> Callable[[Case], None]:
    """Runs a case, and checks the topic after it."""

    def run(case: Case) -> None:
        try:
            case(worlds.now)
            worlds.now.check(worlds.now.query)
        except BaseException:
            worlds.close()
            raise

    return run


def test_a_commit_that_raises_after_its_write_is_neither_undone_nor_repeated(survives):
    survives(cases.commit_raises_after_the_write)


def test_a_batch_whose_commit_file_was_lost_is_not_written_again(survives):
    survives(cases.last_commit_file_lost)


def test_a_batch_planned_anew_with_the_rows_that_were_committed_is_a_replay(survives):
    survives(cases.newest_batch_forgotten)


def test_a_checkpoint_that_went_back_is_never_a_silent_loss(survives):
    survives(cases.checkpoint_went_back)


def test_a_task_that_failed_and_ran_again_with_another_layout_counts_once(survives):
    survives(cases.task_retried_with_another_layout)


def test_python_workers_killed_in_mid_task_leave_nothing_visible(survives):
    survives(cases.python_workers_killed)


def test_a_second_driver_on_the_checkpoint_fences_the_first_one_loudly(survives):
    survives(cases.second_driver_on_the_checkpoint)


def test_a_copied_checkpoint_with_other_rows_is_never_a_silent_loss(survives):
    survives(cases.copied_checkpoint_with_other_rows)


def test_zookeeper_lost_before_the_commit_arrived_commits_once(survives):
    survives(cases.zookeeper_lost_before_the_write)


def test_zookeeper_lost_after_the_commit_was_applied_commits_once(survives):
    survives(cases.zookeeper_lost_after_the_write)


def test_a_run_condemned_before_its_commit_arrived_adds_nothing_and_is_run_again(survives):
    survives(cases.janitor_before_the_write)


def test_a_run_condemned_during_its_tasks_loses_no_row(survives):
    survives(cases.janitor_during_tasks)


def test_ledgers_fenced_under_the_tasks_that_write_them_are_gone_on_from(survives):
    survives(cases.ledgers_fenced_during_tasks)


@pytest.fixture(scope="module")
def killed(worlds: Worlds) -> dict[str, Killed]:
    """One kill meets a query at each point. After the cases: the driver that goes on is the spare
    that they have started."""
    return kills.kill_at_each_point(worlds.now)


@pytest.mark.parametrize("point", POINTS, ids=lambda point: point.name)
def test_a_driver_killed_at_any_step_of_a_batch_goes_on_as_if_nothing_was(worlds, killed, point):
    killed[point.name].check()
    worlds.now.check(killed[point.name].query)


def test_every_case_is_tested():
    here = globals().values()
    used = {name for test in here if callable(test) for name in _names_in(test)}
    assert {case.__name__ for case in cases.CASES} <= used


@pytest.mark.slow
def test_a_task_that_ran_twice_by_speculation_counts_once(worlds, tmp_path):
    with speculation.standalone(tmp_path / "standalone") as master:
        query = speculation.speculated(worlds.now, master)
        worlds.now.check(query)


def _names_in(test: object) -> tuple[str, ...]:
    code = getattr(test, "__code__", None)
    return () if code is None else code.co_names
