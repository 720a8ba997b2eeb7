"""A commit that is answered by nobody: the user is told that its outcome is unknown, and the same
batch again is in the topic once, whatever had become of the first."""

from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from pyspark.sql.datasource import (
    DataSource,
    DataSourceArrowWriter,
    DataSourceStreamArrowWriter,
)

from spark_ledger.local.cluster import ROOT
from spark_ledger.spark.data_source import LedgerDataSource
from tests.spark.by_hand import Cluster
from tests.spark.exactly_once.zookeeper_proxy import ZooKeeperProxy, is_commit
from tests.spark.topics import SparkTopics

PATIENCE_S = 3.0


class ImpatientLedger(DataSource):
    """format("impatient-ledger"): whose commits look for a lost answer for seconds, not for 60."""

    @classmethod
    def name(cls) -> str:
        return "impatient-ledger"

    def writer(self, schema: Any, overwrite: bool) -> "ImpatientWriter":
        return ImpatientWriter(LedgerDataSource(self.options).writer(schema, overwrite))

    def streamWriter(self, schema: Any, overwrite: bool) -> "ImpatientStreamWriter":
        return ImpatientStreamWriter(LedgerDataSource(self.options).streamWriter(schema, overwrite))


class Impatient:
    def __init__(self, writer: Any) -> None:
        self._writer = writer

    def write(self, iterator: Any) -> Any:
        return self._writer.write(iterator)

    def commit(self, *arguments: Any) -> None:
        from spark_ledger.topic.commit.commit import Committer

        patient = Committer.commit

        async def impatient(committer: Any, wanted: Any, timeout_s: float) -> Any:
            return await patient(committer, wanted, PATIENCE_S)

        Committer.commit = impatient
        try:
            self._writer.commit(*arguments)
        finally:
            Committer.commit = patient

    def abort(self, *arguments: Any) -> None:
        self._writer.abort(*arguments)


class ImpatientWriter(Impatient, DataSourceArrowWriter):
    pass


class ImpatientStreamWriter(Impatient, DataSourceStreamArrowWriter):
    pass


@pytest.fixture
def proxy(cluster):
    made = ZooKeeperProxy(int(cluster.zookeeper.address.rpartition(":")[2]))
    yield made
    made.close()


@pytest.mark.parametrize(("lost", "committed"), [("request", False), ("answer", True)])
def test_a_batch_of_unknown_outcome_is_told_so_and_done_again_changes_nothing_twice(
    spark, topics, topic, keyed, proxy, lost, committed
):
    spark.dataSource.register(ImpatientLedger)
    topics.write(keyed(5), topic, txnAppId="job", txnVersion=1)
    url = f"zk://{proxy.address}{ROOT}"
    options = {"serviceUrl": url, "outageTimeout": "5s", "txnAppId": "job", "txnVersion": 2}
    rows = keyed(5, start=5)
    writer = rows.write.format("impatient-ledger").options(**options).mode("append")
    topic_id = Cluster(topics.service_url).info(topic).id
    with ThreadPoolExecutor(1) as aside, proxy.trap(is_commit(topic_id), hold=lost) as trap:
        cutting = aside.submit(lambda: (trap.wait(), proxy.cut()))
        with pytest.raises(Exception, match=r"\[LEDGER_WRITE.OUTCOME_UNKNOWN\]"):
            writer.save(topic)
        cutting.result()
    assert topics.numbers(topic) == list(range(10 if committed else 5))
    proxy.heal()
    through = SparkTopics(spark, url)
    for _ in range(2):
        through.write(rows, topic, txnAppId="job", txnVersion=2)
    assert topics.numbers(topic) == list(range(10))


def test_a_micro_batch_of_unknown_outcome_is_told_so_and_a_restart_adds_nothing_twice(
    spark, topics, topic, keyed, proxy, tmp_path
):
    spark.dataSource.register(ImpatientLedger)
    copy, checkpoint = f"{topic}-copy", str(tmp_path / "checkpoint")
    topics.write(keyed(5), copy)
    topics.write(keyed(5, start=5), topic)
    through = SparkTopics(spark, f"zk://{proxy.address}{ROOT}")
    rows = topics.stream(topic, startingOffsets="earliest").select("key", "value")
    writer = rows.writeStream.format("impatient-ledger").option("serviceUrl", through.service_url)
    writer = writer.option("outageTimeout", "5s")
    writer = writer.option("checkpointLocation", checkpoint).trigger(availableNow=True)
    copy_id = Cluster(topics.service_url).info(copy).id
    with proxy.trap(is_commit(copy_id), hold="answer") as trap:
        query = writer.start(copy)
        trap.wait()
        proxy.cut()
        with pytest.raises(Exception, match=r"\[LEDGER_WRITE.OUTCOME_UNKNOWN\]"):
            query.awaitTermination(120)
    assert topics.numbers(copy) == list(range(10))
    proxy.heal()
    through.copy(rows, copy, tmp_path / "checkpoint")
    assert topics.numbers(copy) == list(range(10))
