"""What the garbage collector need not look at, and in which processes only."""

import gc

import pytest

from spark_ledger.spark import worker
from spark_ledger.spark.worker import Moment, exclude_from_gc


@pytest.fixture
def frozen(monkeypatch):
    """How often everything was set aside, in a process in which nothing has been."""
    times = []
    monkeypatch.setattr(worker, "moments_seen", {})
    monkeypatch.setattr(gc, "freeze", lambda: times.append(1))
    return times


def test_a_worker_sets_aside_what_it_has_once_at_each_moment(frozen, monkeypatch):
    monkeypatch.setenv("SPARK_PYTHON_RUNTIME", "PYTHON_WORKER")
    for _ in range(3):
        exclude_from_gc(Moment.LOADING)
    assert len(frozen) == 1
    for _ in range(3):
        exclude_from_gc(Moment.CONNECTED)
    assert len(frozen) == 2


@pytest.mark.parametrize("runtime", [None, "", "PYTHON_DRIVER"])
def test_in_a_process_that_is_no_worker_of_sparks_nothing_is_set_aside(
    frozen, monkeypatch, runtime
):
    monkeypatch.delenv("SPARK_PYTHON_RUNTIME", raising=False)
    if runtime is not None:
        monkeypatch.setenv("SPARK_PYTHON_RUNTIME", runtime)
    for moment in Moment:
        exclude_from_gc(moment)
    assert frozen == []
