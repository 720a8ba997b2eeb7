"""A batch plan that a query keeps from micro-batch to micro-batch is named in the worker's log."""

import logging

import pytest

from spark_ledger.spark.read import tasks


@pytest.fixture(autouse=True)
def log(caplog, monkeypatch):
    monkeypatch.setattr(tasks, "_first_batches", {})
    caplog.set_level(logging.WARNING)
    return caplog


def test_a_plan_that_a_later_micro_batch_reads_by_is_warned_of_once(log):
    for micro_batch in ("3", "3", "4", "5"):
        tasks.warn_of_old_plan("plan", micro_batch, "names")
    (record,) = log.records
    assert "micro-batch 4 reads topic 'names' by a plan of micro-batch 3" in record.getMessage()


def test_plans_of_one_micro_batch_and_of_batch_jobs_are_not_warned_of(log):
    for plan, micro_batch in (("a", "1"), ("b", "2"), ("c", None), ("c", "7"), ("c", None)):
        tasks.warn_of_old_plan(plan, micro_batch, "names")
    assert not log.records


def test_few_plans_are_remembered():
    for number in range(tasks.PLANS_KEPT_MAX + 5):
        tasks.warn_of_old_plan(str(number), "1", "names")
    assert len(tasks._first_batches) == tasks.PLANS_KEPT_MAX
