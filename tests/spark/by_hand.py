"""The topic layer beside Spark: what no option does, and producers of live segments."""

import pyarrow as pa

from spark_ledger.topic import blocking
from spark_ledger.topic.commit.commit import TxnKey
from spark_ledger.topic.commit.seal import seal_live_segment
from spark_ledger.topic.entry.message_batch import Share
from spark_ledger.topic.log.actions import Grow, OpenLive
from tests.kit.message_batches import encode_batch


class Cluster:
    """For somebody who does as he likes."""

    def __init__(self, service_url):
        self._topics = blocking.topics(service_url)
        self.client = self._topics.client
        self.run = self._topics.run

    def info(self, topic):
        return self.run(self.client.topics.open(topic))

    def commit(self, topic, *actions):
        info = self.info(topic)
        intent = self.run(self.client.intents.open_system_intent("by hand", info.id))
        self.run(self.client.commit_actions(info.id, actions, intent))

    def grow(self, topic, partitions):
        self.commit(topic, Grow(partitions))

    def write(self, topic, numbers, partitions=1):
        """Rows of these numbers, keyed by themselves, in one commit."""
        made = self.client.topics.create(topic, partitions, exist_ok=True)
        info, app_id = self.run(made), f"{topic}-{numbers[0]}"
        intent = self.run(self.client.intents.open_batch_intent(app_id, "run", topic))
        writer = self._topics.task_writer(info, intent, task_index=0)
        column = pa.array([b"%d" % number for number in numbers], pa.binary())
        writer.write(column, column)
        txn = TxnKey(intent.app_id, intent.target, 0, intent.run_id)
        results = {info.id: [writer.start_finish()()]}
        self.run(self.client.commit_topics(results, txn, intent.id, finish_intent=True))


class Owner:
    """Appends rows to the open end of a topic's only partition, as a broker does."""

    def __init__(self, by_hand, topic, base):
        self._by_hand, self._topic, self._base = by_hand, topic, base
        self._next = base
        by_hand.run(self._open())

    async def _open(self):
        client = self._by_hand.client
        self._info = await client.topics.open(self._topic)
        self._intent = await client.intents.open_system_intent("own", self._topic)
        self._writer = await client.ledgers.create(
            3, 2, 2, intent=self._intent.id, topic=self._info.id, announce_lac=True
        )
        live = OpenLive(0, self._writer.ledger_id, 0, "owner", 1)
        await client.commit_actions(self._info.id, [live], self._intent)

    def append(self, rows, written_ms=1):
        self._by_hand.run(self._append(rows, written_ms))

    async def _append(self, rows, written_ms):
        values = [b"%d" % n for n in range(self._next, self._next + rows)]
        batch = pa.RecordBatch.from_arrays([pa.array(values, pa.binary())], ["value"])
        shares = [Share(0, rows, self._next - self._base)]
        await self._writer.append(encode_batch(batch, shares, written_ms=written_ms), rows=rows)
        self._next += rows

    def seal(self):
        self._by_hand.run(self._seal())

    async def _seal(self):
        await self._writer.close()
        client = self._by_hand.client
        state = await client.log(self._info.id).fold(fresh=True)
        seal = await seal_live_segment(client.ledgers, state.partitions[0].live)
        await client.commit_actions(self._info.id, [seal], self._intent)
