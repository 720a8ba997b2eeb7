"""LagListener with a query that runs."""

import spark_ledger
from tests.spark.topics import wait_until


def test_a_listener_hears_how_far_a_query_is_behind(topics, topic, keyed, tmp_path):
    topics.write(keyed(20), topic, partitions=2)
    listener = spark_ledger.LagListener(echo=False)
    topics.spark.streams.addListener(listener)
    try:
        rows = topics.stream(topic, startingOffsets="earliest", maxOffsetsPerTrigger=5)
        rows = rows.select("key", "value")
        query = topics.copy(rows, f"{topic}-copy", tmp_path / "checkpoint").id
        wait_until(lambda: listener.lags(query) and listener.last(query).rowsBehind == 0)
    finally:
        topics.spark.streams.removeListener(listener)
    behind = [lag.rowsBehind for lag in listener.lags(query) if lag.rowsBehind]
    assert behind == [15, 10, 5]
    assert all(lag.maxOffsetsBehindLatest <= lag.rowsBehind for lag in listener.lags())
