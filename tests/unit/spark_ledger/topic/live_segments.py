"""Live segments, their owner, and tasks that read them."""

import pickle

import pyarrow as pa

from spark_ledger.topic import views
from spark_ledger.topic.entry.message_batch import Share
from spark_ledger.topic.log.actions import OpenLive, SealLive
from spark_ledger.topic.log.segments import Segment
from tests.kit.message_batches import encode_batch


async def with_live(stage, base=0, *sizes):
    """An owner that has appended so many rows an entry."""
    owner = Owner(stage)
    await owner.open(base)
    await owner.append(*sizes)
    return owner


async def deleted(stage, ledger_id):
    await stage.client.ledgers.recover(ledger_id)
    await stage.client.ledgers.delete(ledger_id)


class Owner:
    """Appends rows to a live segment of partition 0, as a broker does."""

    def __init__(self, stage):
        self.stage = stage
        self.rows = 0
        self.now_ms = 1

    async def open(self, base):
        ledgers = self.stage.client.ledgers
        self.base = self.rows = base
        self.intent = await self.stage.client.intents.open_system_intent("own", "t")
        self.writer = await ledgers.create(
            3, 2, 2, intent=self.intent.id, topic=self.stage.topic.id, announce_lac=True
        )
        live = OpenLive(0, self.writer.ledger_id, 0, "owner", 1)
        await self.stage.client.commit_actions(self.stage.topic.id, [live], self.intent)

    async def append(self, *sizes):
        for size in sizes:
            values = [b"%d" % n for n in range(self.rows, self.rows + size)]
            batch = pa.RecordBatch.from_arrays([pa.array(values, pa.binary())], ["value"])
            shares = [Share(0, size, self.rows - self.base)]
            await self.writer.append(encode_batch(batch, shares, written_ms=self.now_ms), rows=size)
            self.rows += size

    async def seal(self, *sizes):
        record = await self.writer.close()
        last = record.last_entry
        rows = self.rows - self.base
        segment = Segment(
            0, self.writer.ledger_id, 9, ((0, last),), sizes, rows, record.length_bytes, 1, 1
        )
        sealed = SealLive(0, self.writer.ledger_id, segment)
        await self.stage.client.commit_actions(self.stage.topic.id, [sealed], self.intent)


async def listed(client, view, names=None):
    """The whole view as dictionaries, its parts sent as Spark would."""
    found = []
    for part in await views.plan(client, view, names):
        for batch in await views.read(client, pickle.loads(pickle.dumps(part))):
            assert batch.schema.equals(views.SCHEMAS[view])
            found += batch.to_pylist()
    return found
