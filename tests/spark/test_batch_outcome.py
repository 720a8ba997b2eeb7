"""A batch whose commit is answered by nobody: the user is told that its outcome is unknown, and the
same batch again is in the topic once, whatever had become of the first."""

from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from pyspark.sql.datasource import DataSource, DataSourceArrowWriter

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


class ImpatientWriter(DataSourceArrowWriter):
    def __init__(self, writer: Any) -> None:
        self._writer = writer

    def write(self, iterator: Any) -> Any:
        return self._writer.write(iterator)

    def commit(self, messages: Any) -> None:
        from spark_ledger.topic.commit import Committer

        patient = Committer.commit

        async def impatient(committer: Any, wanted: Any, timeout_s: float) -> Any:
            return await patient(committer, wanted, PATIENCE_S)

        Committer.commit = impatient
        try:
            self._writer.commit(messages)
        finally:
            Committer.commit = patient

    def abort(self, messages: Any) -> None:
        self._writer.abort(messages)


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
    options = {"serviceUrl": url, "txnAppId": "job", "txnVersion": 2}
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
