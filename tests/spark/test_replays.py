"""A checkpoint that goes back: batches planned anew under numbers that the topic has already."""

import shutil
import threading
from pathlib import Path

import pytest
from pyspark.sql import DataFrame

import spark_ledger
from tests.spark.topics import SparkTopics, files_of_numbers, forget_the_newest, stream_of_files

DIFFERS, BEHIND = "[LEDGER_WRITE.REPLAY_DIFFERS]", "[LEDGER_WRITE.CHECKPOINT_BEHIND]"


class Query:
    """Of files into `topic`, one file a micro-batch; its checkpoint is copied and put back."""

    def __init__(self, spark, topics: SparkTopics, topic: str, folder: Path) -> None:
        self._spark, self._topics, self.topic = spark, topics, topic
        self._folder = folder
        self.source, self.checkpoint = folder / "in", folder / "checkpoint"
        self.source.mkdir()

    def feed(self, *batches: range) -> None:
        files_of_numbers(self.source, *batches)

    def swap_the_newest(self, numbers: range) -> None:
        """The newest file is not there any more; another one is."""
        max(self.source.iterdir()).rename(self._folder / "gone.json")
        files_of_numbers(self.source, numbers)
        max(self.source.iterdir()).rename(self.source / f"other-{numbers.start}.json")

    def rows(self) -> DataFrame:
        return stream_of_files(self._spark, self.source)

    def run(self, rows: DataFrame | None = None, mode: str = "append", **options) -> None:
        rows = self.rows() if rows is None else rows
        writer = rows.writeStream.format("ledger").option("serviceUrl", self._topics.service_url)
        writer = writer.options(**options).outputMode(mode).trigger(availableNow=True)
        writer = writer.option("checkpointLocation", str(self.checkpoint))
        writer.start(self.topic).awaitTermination(120)

    def refused(self, *rows: DataFrame, mode: str = "append", **options) -> str:
        with pytest.raises(Exception) as told:
            self.run(*rows, mode=mode, **options)
        return str(told.value)

    def numbers(self) -> list[int]:
        return self._topics.numbers(self.topic)

    def backup(self, name: str) -> None:
        shutil.copytree(self.checkpoint, self._folder / name)

    def restore(self, name: str) -> None:
        shutil.rmtree(self.checkpoint)
        shutil.copytree(self._folder / name, self.checkpoint)


@pytest.fixture
def query(spark, topics, topic, tmp_path) -> Query:
    return Query(spark, topics, topic, tmp_path)


def test_a_checkpoint_one_batch_back_is_refused_and_appends_where_that_is_wanted(query):
    query.feed(range(10))
    query.run()
    query.backup("old")
    query.feed(range(10, 20))
    query.run()
    query.restore("old")
    query.swap_the_newest(range(20, 30))

    said = query.refused()

    assert DIFFERS in said and "batch 1 of query" in said and "onReplay=append" in said
    assert query.numbers() == [*range(20)]
    query.run(onReplay="append")
    assert query.numbers() == [*range(30)]
    forget_the_newest(query.checkpoint / "commits")
    query.feed(range(30, 40))
    query.run()  # exactly once again: batch 1 is a replay now, batch 2 is new
    assert query.numbers() == [*range(40)]


def test_a_checkpoint_several_batches_back_is_refused_before_a_row_is_read(query):
    query.feed(range(10))
    query.run()
    query.backup("old")
    query.feed(range(10, 20), range(20, 30))
    query.run()
    query.restore("old")

    for options in ({}, {"onReplay": "skip"}):
        assert BEHIND in query.refused(**options)
    assert query.numbers() == [*range(30)]
    query.swap_the_newest(range(30, 40))
    query.run(onReplay="append")  # batch 1 is below the record; batch 2 is above it then
    assert query.numbers() == sorted([*range(40), *range(10, 20)])
    query.feed(range(40, 50))
    query.run()
    assert query.numbers()[-10:] == [*range(40, 50)]


def test_a_batch_planned_anew_with_the_same_rows_is_a_replay(query):
    query.feed(range(10), range(10, 20))
    query.run()
    for log in ("offsets", "commits", "sources/0"):
        forget_the_newest(query.checkpoint / log)
    query.feed(range(20, 30))

    query.run()

    assert query.numbers() == [*range(30)]


def test_a_query_that_gives_other_rows_each_time_goes_on_with_skip(query):
    rows = "concat(string(int(value)), string(int(rand() * 9000) + 1000)) AS value"
    query.feed(range(1, 4))
    query.run(query.rows().selectExpr("key", rows))
    before = query.numbers()
    forget_the_newest(query.checkpoint / "commits")
    query.feed(range(4, 6))

    assert DIFFERS in query.refused(query.rows().selectExpr("key", rows))
    query.run(query.rows().selectExpr("key", rows), onReplay="skip")

    assert len(query.numbers()) == 5 and set(before) < set(query.numbers())


def test_complete_mode_replaces_a_batch_that_differs(query):
    def counts() -> DataFrame:
        counted = query.rows().groupBy("key").count()
        return counted.selectExpr("key", "cast(count AS string) AS value")

    query.feed(range(10))
    query.run(counts(), "complete")
    query.backup("old")
    query.feed(range(10))
    query.run(counts(), "complete")
    query.restore("old")
    query.swap_the_newest(range(5, 20))

    query.run(counts(), "complete")

    assert query.numbers() == [5] * 5


def test_foreach_batch_with_txn_options_follows_the_same_rule(query, topics):
    def write_with(**more):
        def write(rows: DataFrame, number: int) -> None:
            options = {"txnAppId": "copier", "txnVersion": number, **more}
            topics.write(rows, query.topic, **options)

        stream = query.rows().writeStream.foreachBatch(write).trigger(availableNow=True)
        stream.option("checkpointLocation", str(query.checkpoint)).start().awaitTermination(120)

    query.feed(range(10))
    write_with()
    query.backup("old")
    query.feed(range(10, 20), range(20, 30))
    write_with()
    forget_the_newest(query.checkpoint / "commits")
    write_with()  # a replay
    assert query.numbers() == [*range(30)]
    query.restore("old")
    query.swap_the_newest(range(30, 40))
    with pytest.raises(Exception, match=r"LEDGER_WRITE\.CHECKPOINT_BEHIND"):
        write_with()
    assert query.numbers() == [*range(30)]
    write_with(onReplay="append")
    assert set(query.numbers()) == set(range(40))


def test_a_thread_of_foreach_batch_that_knows_the_query_follows_its_rule(query, spark, topics):
    said: list[str] = []

    def write(rows: DataFrame, number: int) -> None:
        def copy(more: DataFrame) -> None:
            try:
                topics.write(more, query.topic, txnAppId="copier", txnVersion=number)
            except Exception as error:
                said.append(str(error))

        for more in (rows, rows, rows.limit(3)):
            knows = spark_ledger.in_session(rows.sparkSession, copy)
            thread = threading.Thread(target=knows, args=(more,))
            thread.start()
            thread.join()

    query.feed(range(10))
    stream = query.rows().writeStream.foreachBatch(write).trigger(availableNow=True)
    stream.option("checkpointLocation", str(query.checkpoint)).start().awaitTermination(120)

    (refused,) = said  # the second write is a replay, the third has other rows
    assert DIFFERS in refused and "has 3 rows" in refused
    assert query.numbers() == [*range(10)]
