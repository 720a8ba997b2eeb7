"""A cluster that is down, or half down, is a clear error within 30 seconds, and long before the
outageTimeout of 5 minutes; nothing is lost."""

import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager

import pytest

from tests.spark.topics import SparkTopics, nobody_listens, too_large_for_a_commit, wait_until

IN_TIME_S = 30 + 60  # what clients wait at most, and what Spark takes on a slow machine


@contextmanager
def refused_in_time(*expected: str):
    """The body raises an error that has the texts, soon enough."""
    started = time.monotonic()
    with pytest.raises(Exception) as caught:
        yield
    assert time.monotonic() - started < IN_TIME_S
    for text in expected:
        assert text in str(caught.value)


def test_a_metadata_store_that_is_down_at_the_start_is_named_by_a_batch_and_by_streams(
    spark, topics, topic, keyed, tmp_path
):
    down = SparkTopics(spark, f"zk://127.0.0.1:{nobody_listens()}/ledger")
    topics.write(keyed(1), topic)
    rows = topics.stream(topic, startingOffsets="earliest").select("value")

    def named(action):
        # Spark looks for data sources in the active session of a thread, and a new one has none.
        spark._jvm.SparkSession.setActiveSession(spark._jsparkSession)
        with refused_in_time("[LEDGER_UNAVAILABLE]", down.service_url):
            action()

    with ThreadPoolExecutor() as pool:  # each waits for as long as a client tries to connect
        waiting = [
            pool.submit(named, lambda: down.values("t")),
            pool.submit(named, lambda: down.copy(rows, "t", tmp_path / "to")),
            pool.submit(named, lambda: topics.copy(down.stream("t"), topic, tmp_path / "from")),
        ]
    for one in waiting:
        one.result()


@pytest.mark.parametrize("url", ["http://127.0.0.1:80/ledger", "zk://", "nonsense"])
def test_a_service_url_that_is_none_is_refused(spark, url):
    with refused_in_time("[LEDGER_CONFIG.INVALID]", url):
        SparkTopics(spark, url).values("t")


def test_a_service_url_with_another_root_has_no_cluster(spark, topics, keyed):
    with refused_in_time("[LEDGER_"):
        SparkTopics(spark, topics.service_url + "-other").write(keyed(1), "t")


def standings(topics: SparkTopics) -> list[tuple[str, bool]]:
    """Of every bookie its state and whether there is a reason for it, as Spark lists them."""
    reader = topics.spark.read.format("ledger").option("serviceUrl", topics.service_url)
    listed = reader.option("metadata", "bookies").load().collect()
    return sorted((row.state, bool(row.why)) for row in listed)


@pytest.mark.slow
def test_with_two_of_three_bookies_down_writes_stop_and_reads_go_on(spark, fresh_cluster, keyed):
    cluster = fresh_cluster(bookies=3)
    topics = SparkTopics(spark, cluster.service_url)
    topics.write(keyed(2_000), "t", partitions=2)
    for bookie in cluster.bookies[:2]:
        bookie.kill()
    with refused_in_time("[LEDGER_WRITE.NOT_ENOUGH_BOOKIES]", cluster.bookies[0].id):
        topics.write(keyed(2_000, start=5_000), "t")
    assert topics.numbers("t") == list(range(2_000))
    down, writable = ("down", True), ("writable", False)
    wait_until(lambda: standings(topics) == [down, down, writable])
    for bookie in cluster.bookies[:2]:
        bookie.start()
    topics.write(keyed(1_000, start=2_000), "t")
    assert topics.numbers("t") == list(range(3_000))


def test_with_all_bookies_down_everything_is_refused_and_nothing_lost(spark, fresh_cluster, keyed):
    cluster = fresh_cluster(bookies=3)
    topics = SparkTopics(spark, cluster.service_url)
    topics.write(keyed(2_000), "t")
    for bookie in cluster.bookies:
        bookie.kill()
    with refused_in_time("[LEDGER_UNAVAILABLE]"):
        topics.values("t")
    with refused_in_time("[LEDGER_WRITE.NOT_ENOUGH_BOOKIES]"):
        topics.write(too_large_for_a_commit(keyed(10, start=5_000)), "t")
    for bookie in cluster.bookies:
        bookie.start()
    assert topics.numbers("t") == list(range(2_000))


def test_a_bookie_killed_while_rows_stream_neither_loses_nor_doubles_any(
    spark, fresh_cluster, keyed, tmp_path
):
    cluster = fresh_cluster(bookies=4)
    topics = SparkTopics(spark, cluster.service_url)
    topics.write(keyed(40_000), "t", partitions=2)
    rows = topics.stream("t", startingOffsets="earliest", maxOffsetsPerTrigger=5_000)
    query = topics.start_copy(rows.select("key", "value"), "copy", tmp_path / "c", partitions=2)
    while not query.recentProgress:
        query.awaitTermination(0.2)
    cluster.bookies[1].kill()
    query.awaitTermination(120)
    assert query.exception() is None
    assert topics.numbers("copy") == list(range(40_000))
