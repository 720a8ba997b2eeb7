"""What is particular to Spark 4.1. What it does as Spark 4.2 does is tested by tests/spark there:
`make spark41` runs both."""

import pytest

import spark_ledger
from spark_ledger.errors import NewerSparkNeeded
from tests.spark.by_hand import Cluster
from tests.spark.topics import forget_the_newest, wait_until

LIMITS = [
    {"maxOffsetsPerTrigger": 10},
    {"maxBytesPerTrigger": "1m"},
    {"minOffsetsPerTrigger": 10},
    {"minOffsetsPerTrigger": 10, "maxTriggerDelay": "1s"},
]


def sizes(query) -> list[int]:
    return [one["numInputRows"] for one in query.recentProgress if one["numInputRows"]]


def rows_of(topics, topic, **options):
    return topics.stream(topic, startingOffsets="earliest", **options).select("key", "value")


@pytest.mark.parametrize("limit", LIMITS, ids=lambda limit: "-".join(limit))
def test_an_option_that_limits_a_micro_batch_is_refused_with_what_to_do(
    topics, topic, keyed, tmp_path, limit
):
    topics.write(keyed(5), topic)
    query = topics.start_copy(rows_of(topics, topic, **limit), f"{topic}-copy", tmp_path / "c")
    with pytest.raises(Exception) as caught:
        query.awaitTermination(120)
    said = str(caught.value)
    assert "[LEDGER_OPTION.NEWER_SPARK_NEEDED]" in said
    assert f"Leave {next(iter(limit))} out, or run Spark 4.2." in said


def test_a_listener_for_lag_is_refused_with_what_to_do():
    with pytest.raises(NewerSparkNeeded, match=r"metadata=lag, or run Spark 4\.2\."):
        spark_ledger.LagListener()


def test_available_now_is_one_micro_batch_and_a_repeated_one_is_all_of_its_run(
    topics, topic, keyed, tmp_path
):
    topics.write(keyed(100, keys=50), topic, partitions=3)
    copy, checkpoint = f"{topic}-copy", tmp_path / "checkpoint"
    assert sizes(topics.copy(rows_of(topics, topic), copy, checkpoint)) == [100]
    topics.write(keyed(20, start=100), topic)
    assert sizes(topics.copy(rows_of(topics, topic), copy, checkpoint)) == [20]
    forget_the_newest(checkpoint / "commits")
    topics.write(keyed(30, start=120), topic)
    for expected in (120, 150, 150):
        topics.copy(rows_of(topics, topic), copy, checkpoint)
        assert topics.numbers(copy) == list(range(expected))


def test_a_query_that_began_at_latest_and_died_in_batch_0_begins_there_again(
    topics, topic, keyed, tmp_path
):
    topics.write(keyed(5), topic)
    rows = topics.stream(topic).select("key", "value")
    copy, checkpoint = f"{topic}-copy", tmp_path / "checkpoint"
    topics.copy(rows, copy, checkpoint)
    forget_the_newest(checkpoint / "commits")
    topics.write(keyed(7, start=5), topic)
    topics.copy(rows, copy, checkpoint)  # batch 0 again, and nothing else
    assert topics.numbers(copy) == []
    topics.copy(rows, copy, checkpoint)
    assert topics.numbers(copy) == list(range(5, 12))


def test_a_query_that_is_stopped_and_started_reads_every_row_once_and_its_subscription_follows(
    topics, topic, keyed, tmp_path, cluster
):
    by_hand = Cluster(cluster.service_url)
    topics.write(keyed(20, tasks=1), topic)
    topic_id = by_hand.info(topic).id
    lag = lambda: by_hand.run(by_hand.client.subscriptions.lag(topic_id, "mine", 0))  # noqa: E731
    copy, checkpoint = f"{topic}-copy", tmp_path / "checkpoint"
    rows = rows_of(topics, topic, subscription="mine")
    topics.write(keyed(0), copy)
    for start in (20, 40):
        query = topics.start_copy(rows, copy, checkpoint, once=False)
        try:
            wait_until(lambda start=start: topics.numbers(copy) == list(range(start)))
            wait_until(lambda: lag()[0].rows == 0)
            topics.write(keyed(10, tasks=1, start=start), topic)
            end = start + 10
            wait_until(lambda end=end: topics.numbers(copy) == list(range(end)))
        finally:
            query.stop()
        topics.write(keyed(10, tasks=1, start=end), topic)
    topics.copy(rows, copy, checkpoint)
    assert topics.numbers(copy) == list(range(60))


def test_a_subscription_stays_where_it_was_while_an_uncommitted_batch_is_repeated(
    topics, topic, keyed, tmp_path, cluster
):
    by_hand = Cluster(cluster.service_url)
    topics.write(keyed(20, tasks=1), topic)
    topic_id = by_hand.info(topic).id
    copy, checkpoint = f"{topic}-copy", tmp_path / "checkpoint"
    rows = rows_of(topics, topic, subscription="mine")
    topics.copy(rows, copy, checkpoint)
    topics.write(keyed(5, tasks=1, start=20), topic)
    topics.copy(rows, copy, checkpoint)
    forget_the_newest(checkpoint / "commits")
    topics.copy(rows, copy, checkpoint)  # repeats [20, 25), which is done when it is over
    lag = by_hand.run(by_hand.client.subscriptions.lag(topic_id, "mine", 0))
    assert lag[0].position == 20
    assert topics.numbers(copy) == list(range(25))
