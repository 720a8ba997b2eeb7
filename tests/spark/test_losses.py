"""Ledgers that somebody else closed or deleted, below a topic that Spark writes and reads."""

import pytest

from spark_ledger.topic import blocking
from spark_ledger.topic.log.actions import Hole
from tests.spark.by_hand import Cluster
from tests.spark.topics import files_of_numbers, stream_of_files, too_large_for_a_commit, wait_until


class LedgersOf:
    """The ledgers that hold a topic, for somebody who may do as he likes with them."""

    def __init__(self, service_url: str, topic: str) -> None:
        self._cluster = blocking.topics(service_url)
        self._topic = topic

    def ids(self) -> list[int]:
        client = self._cluster.client
        info = self._cluster.run(client.topics.open(self._topic))
        return self._cluster.run(client.log(info.id).fold(fresh=True)).ledgers()

    def close(self, ledger_id: int) -> None:
        self._cluster.run(self._cluster.client.ledgers.recover(ledger_id))

    def delete(self, ledger_id: int) -> None:
        self.close(ledger_id)
        self._cluster.run(self._cluster.client.ledgers.delete(ledger_id))


@pytest.fixture
def holed(topics, topic, keyed) -> str:
    """A topic of 30 rows whose offsets 10 to 19 are gone with their ledger."""
    for start in (0, 10, 20):
        topics.write(too_large_for_a_commit(keyed(10, tasks=1, start=start)), topic)
    ledgers = LedgersOf(topics.service_url, topic)
    ledgers.delete(ledgers.ids()[1])
    return topic


def test_rows_that_are_gone_are_told_with_their_offsets(topics, holed, tmp_path):
    expected = f"10 committed rows are gone: {holed} partition 0 offsets 10 to 19"
    with pytest.raises(Exception, match=r"\[LEDGER_DATA_LOSS.ROWS_MISSING\]") as caught:
        topics.values(holed)
    assert expected in str(caught.value)
    rows = topics.stream(holed, startingOffsets="earliest").select("value")
    with pytest.raises(Exception, match=r"\[LEDGER_DATA_LOSS.ROWS_MISSING\]"):
        topics.copy(rows, f"{holed}-copy", tmp_path / "checkpoint")


def test_a_loss_that_is_accepted_leaves_the_other_rows_at_their_offsets(topics, holed, tmp_path):
    kept = [*range(10), *range(20, 30)]
    assert topics.numbers(holed, failOnDataLoss="false") == kept
    read = topics.read(holed, "value STRING, offset BIGINT", failOnDataLoss="false").collect()
    assert all(int(row.value) == row.offset for row in read)
    rows = topics.stream(holed, startingOffsets="earliest", failOnDataLoss="false")
    topics.copy(rows.select("value"), f"{holed}-copy", tmp_path / "checkpoint")
    assert topics.numbers(f"{holed}-copy") == kept


def test_a_dataframe_whose_rows_were_replaced_since_its_first_query_says_to_load_it_again(
    topics, topic, keyed
):
    topics.write(too_large_for_a_commit(keyed(10, tasks=1)), topic)
    rows = topics.read(topic)
    assert rows.count() == 10
    ledgers = LedgersOf(topics.service_url, topic)
    (planned,) = ledgers.ids()
    topics.write(keyed(5), topic, mode="overwrite")
    assert rows.count() == 10, "its ledger is still there"
    ledgers.delete(planned)
    with pytest.raises(
        Exception, match=r"DATA_LOSS\.TRIMMED\] 10 rows .* Load the DataFrame again: Spark"
    ):
        rows.count()
    assert topics.read(topic).count() == 5


def test_a_hole_in_a_topic_is_no_loss(topics, topic, keyed, tmp_path):
    topics.write(too_large_for_a_commit(keyed(30, tasks=1)), topic)
    Cluster(topics.service_url).commit(topic, Hole(0, 5, 25))
    kept = [*range(5), *range(25, 30)]
    read = topics.read(topic, "value STRING, offset BIGINT", failOnDataLoss="true").collect()
    assert sorted(int(row.value) for row in read) == kept
    assert all(int(row.value) == row.offset for row in read)
    rows = topics.stream(topic, startingOffsets="earliest", failOnDataLoss="true")
    topics.copy(rows.select("value"), f"{topic}-copy", tmp_path / "checkpoint")
    assert topics.numbers(f"{topic}-copy") == kept


def test_a_stream_goes_on_when_somebody_closes_the_ledgers_it_writes(
    spark, topics, topic, tmp_path
):
    source = tmp_path / "in"
    files_of_numbers(source, range(100))
    query = topics.start_copy(
        stream_of_files(spark, source), topic, tmp_path / "checkpoint", once=False
    )
    try:
        wait_until(lambda: query.lastProgress is not None and topics.numbers(topic) != [])
        ledgers = LedgersOf(topics.service_url, topic)
        for _ in range(2):
            for ledger_id in ledgers.ids():
                ledgers.close(ledger_id)
            have = len(topics.numbers(topic))
            files_of_numbers(source, range(have, have + 100))
            wait_until(lambda have=have: len(topics.numbers(topic)) > have)
        assert query.exception() is None
        assert topics.numbers(topic) == list(range(300))
    finally:
        query.stop()
