"""The demo's look at its topics, on real processes."""

import uuid

import pyarrow as pa

from spark_ledger.topic import blocking
from spark_ledger.topic.commit.commit import TxnKey
from spark_ledger.topic.write import TaskSettings
from spark_ledger_demo.job import TopicHistory

TO_A_LEDGER = TaskSettings(inline_bytes_max=0)


class Query:
    """Commits batches of one row, each in a ledger, under one run."""

    def __init__(self, cluster):
        self.name, self.batches = f"a-{uuid.uuid4().hex}", 0
        self.topics = blocking.topics(cluster.service_url)
        client = self.topics.client
        self.info = self.topics.run(client.topics.create(self.name))
        self.intent = self.topics.run(client.intents.open_query_intent(self.name, "run", "t"))

    def commit(self, batches: int) -> None:
        for _ in range(batches):
            task = self.topics.task_writer(
                self.info, self.intent, task_index=0, settings=TO_A_LEDGER
            )
            column = pa.array([b"x"])
            task.write(column, column)
            txn = TxnKey(self.name, "t", self.batches, "run")
            results = {self.info.id: [task.start_finish()()]}
            made = self.topics.client.commit_topics(results, txn, self.intent.id)
            self.topics.run(made)
            self.batches += 1

    def checkpoint(self) -> None:
        self.topics.run(self.topics.client.checkpoints.make(self.info.id, self.intent.id))


def test_commits_that_were_seen_and_all_ledgers_are_told_after_the_log_was_trimmed(cluster):
    query, audit = Query(cluster), TopicHistory(cluster.service_url)
    query.commit(4)
    assert audit.versions(query.name, query.name) == [0, 1, 2, 3]
    (first,) = audit.ledgers(query.name)
    query.topics.run(query.topics.client.cache.close())  # the next batch needs another
    for _ in range(3):
        query.commit(2)
        query.checkpoint()
    later = TopicHistory(cluster.service_url)
    assert later.versions(query.name, query.name)[-2:] == [8, 9]
    assert len(later.commits(query.name)) < query.batches
    assert audit.versions(query.name, query.name)[:4] == [0, 1, 2, 3]
    assert audit.versions(query.name, query.name)[-1] == 9
    before, newest = later.ledgers(query.name)
    assert before.ledger_id == first.ledger_id != newest.ledger_id
