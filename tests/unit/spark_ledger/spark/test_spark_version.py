"""A reader as Spark 4.1 calls it. The calls are those that Spark 4.1.1 was seen to make."""

import pytest

from spark_ledger.errors import NewerSparkNeeded
from spark_ledger.spark import spark_version
from spark_ledger.spark.spark_version import ReadAllAvailable, UnlimitedStreamReader, check_limits


class Reader:
    """Counts its rows, and keeps what it was asked."""

    def __init__(self, rows: int) -> None:
        self.rows = rows
        self.asked: list[object] = []

    def initialOffset(self) -> dict:
        return {"at": 0}

    def latestOffset(self, start: dict, limit: object) -> dict:
        assert isinstance(limit, ReadAllAvailable)
        self.asked.append(("latest", start["at"]))
        return start if start["at"] == self.rows else {"at": self.rows}

    def partitions(self, start: dict, end: dict) -> list:
        self.asked.append(("plan", start["at"], end["at"]))
        return [(start["at"], end["at"])]


def test_a_new_query_goes_from_its_first_offset_to_the_newest_and_on_from_there():
    reader = Reader(5)
    run = UnlimitedStreamReader(reader)
    end = run.latestOffset()
    assert run.partitions(run.initialOffset(), end) == [(0, 5)]
    assert run.latestOffset() is end
    reader.rows = 7
    assert run.partitions(end, run.latestOffset()) == [(5, 7)]
    assert reader.asked == [
        *(("latest", 0), ("plan", 0, 5), ("latest", 5)),
        *(("latest", 5), ("plan", 5, 7)),
    ]


def test_a_batch_that_spark_did_not_plan_is_asked_for_again_from_where_it_began():
    reader = Reader(5)
    run = UnlimitedStreamReader(reader)
    assert [run.latestOffset(), run.latestOffset()] == [{"at": 5}, {"at": 5}]
    assert reader.asked == [("latest", 0), ("latest", 0)]


def test_a_run_that_resumes_goes_on_where_the_checkpoint_ends_and_tells_the_reader_nothing_done():
    reader = Reader(9)
    run = UnlimitedStreamReader(reader)
    assert run.partitions({"at": 7}, {"at": 7}) == []
    assert reader.asked == []
    assert run.partitions({"at": 5}, {"at": 7}) == [(5, 7)]  # the batch that was not committed
    assert run.latestOffset() == {"at": 9}
    assert reader.asked == [("plan", 5, 7), ("latest", 7)]


def test_a_first_batch_without_rows_is_planned_as_any_other():
    reader = Reader(0)
    run = UnlimitedStreamReader(reader)
    assert run.partitions(run.initialOffset(), run.latestOffset()) == [(0, 0)]
    assert reader.asked == [("latest", 0), ("plan", 0, 0)]


def test_limits_are_refused_where_spark_has_none(monkeypatch):
    check_limits(["maxOffsetsPerTrigger"])
    monkeypatch.setattr(spark_version, "ADMISSION_CONTROL", False)
    check_limits([])
    with pytest.raises(NewerSparkNeeded, match=r"^\[LEDGER_OPTION.*minOffsetsPerTrigger is given"):
        check_limits(["minOffsetsPerTrigger"])
