"""Rows of Spark for consumers of a Key_Shared subscription: what the broker spends, and sends.

Rows with random keys are in batches of 1,000, as the broker makes them. The dispatcher sends them
to 1, 4 and 20 consumers that are clients in name only: they take a frame's bytes, give permits and
acknowledge each message. So the figures are those of one loop of the broker, without sockets.
"""

import argparse
import asyncio
import random
import time
from types import SimpleNamespace
from typing import Any, cast

import pyarrow as pa

from spark_ledger.broker.dispatch.dispatcher import Consumer, Dispatcher
from spark_ledger.broker.dispatch.shared_dispatcher import SharingRules
from spark_ledger.broker.dispatch.sharing import UnackedLimits
from spark_ledger.broker.dispatch.subscriptions import Subscription
from spark_ledger.broker.log.partition import Partition
from spark_ledger.broker.log.tail import Stored
from spark_ledger.broker.wire.commands import AckType, MessageId, SubscriptionType
from spark_ledger.broker.wire.frames import PulsarFrameReader
from spark_ledger.topic.entry import pulsar_batch
from spark_ledger.topic.entry.message_batch import TYPES

ROWS, BATCH_ROWS, VALUE_BYTES, KEYS = 100_000, 1_000, 200, 10_000
PERMITS = 1_000
LEDGER = 1


class Rows:
    """A partition with rows of Spark; `run` neighbours have the same key."""

    number = number_in_ids = start = 0
    ledger, title = LEDGER, "rows"
    held = SimpleNamespace(end_offset=0)

    def __init__(self, run: int) -> None:
        self.listeners: dict[asyncio.Event, None] = {}
        chance = random.Random(1)
        self.batches = [
            self._batch(
                at,
                [f"key {chance.randrange(KEYS)}".encode() for _ in range(0, BATCH_ROWS, run)],
                run,
            )
            for at in range(0, ROWS, BATCH_ROWS)
        ]
        self.end = ROWS
        self.bytes = sum(len(batch.data) for batch in self.batches)

    def _batch(self, at: int, keys: list[bytes], run: int) -> Stored:
        columns = {name: pa.nulls(BATCH_ROWS, kind) for name, kind in TYPES.items()}
        columns["key"] = pa.array(
            [key for key in keys for _ in range(run)][:BATCH_ROWS], TYPES["key"]
        )
        columns["value"] = pa.array([b"v" * VALUE_BYTES] * BATCH_ROWS, TYPES["value"])
        rows = pa.RecordBatch.from_arrays(list(columns.values()), names=list(columns))
        made = [
            one for one in pulsar_batch.encode_rows([rows], [5] * BATCH_ROWS, at) if one is not None
        ]
        return Stored(at, made[0].rows, made[0].data, made[0].batched)

    async def read(
        self, offset: int, bytes_max: int | None = None, *, lossy: bool = False
    ) -> list[Stored]:
        at = offset // BATCH_ROWS
        return self.batches[at : at + 4]

    def removed(self, lo: int, hi: int) -> list[tuple[int, int]]:
        return []

    def messages_at(self, offset: int) -> int | None:
        return None


class Client:
    """The connection of a consumer: it counts what is sent, and acknowledges a step later."""

    def __init__(self) -> None:
        self.has_room = asyncio.Event()
        self.has_room.set()
        self.room_listeners: dict[Consumer, asyncio.Event] = {}
        self.frames: list[bytes] = []
        self.bytes = 0

    def send(self, frame: bytes) -> None:
        self.frames.append(frame)
        self.bytes += len(frame)

    async def room(self) -> None:
        pass


async def measured(partition: Rows, consumers: int, kind: SubscriptionType) -> tuple[float, float]:
    """Processor seconds of the dispatcher, and bytes that it sent for each row."""
    subscription = Subscription("s", kind, None, SharingRules(UnackedLimits(0, 0)))
    dispatcher: Dispatcher = subscription.dispatcher(cast(Partition, partition), 0)
    clients = [Client() for _ in range(consumers)]
    members = [
        Consumer(cast(Any, client), 1, f"c{i}", 0, dispatcher, lambda one: None)
        for i, client in enumerate(clients)
    ]
    for member in members:
        dispatcher.join(member)
    for member in members:
        dispatcher.flow(member, PERMITS)
    spent_s, reader = 0.0, PulsarFrameReader()
    while dispatcher.acks.mark < ROWS:
        began_s = time.process_time()
        await asyncio.sleep(0)
        spent_s += time.process_time() - began_s
        for client, member in zip(clients, members, strict=True):
            frames, client.frames = client.frames, []
            ids = []
            for frame in frames:
                ids += [got.command.message.message_id for got in reader.feed(frame)]
            began_s = time.process_time()
            for message_id in ids:
                unacked, asked = (
                    member.unacked,
                    MessageId(ledgerId=LEDGER, entryId=message_id.entryId),
                )
                list(dispatcher.acknowledge(member, asked, AckType.INDIVIDUAL))
                dispatcher.flow(member, unacked - member.unacked)
            spent_s += time.process_time() - began_s
    for member in members:
        dispatcher.leave(member)
    return spent_s, sum(client.bytes for client in clients) / ROWS


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.parse_args()
    for run in (1, 10):
        partition = Rows(run)
        print(f"{run} neighbours have one key; stored: {partition.bytes / ROWS:.0f} bytes a row")
        for consumers in (1, 4, 20):
            for kind in (SubscriptionType.SHARED, SubscriptionType.KEY_SHARED):
                spent_s, sent = asyncio.run(measured(partition, consumers, kind))
                print(
                    f"  {kind.name:10} {consumers:2} consumers: {ROWS / spent_s:9,.0f} rows/s,"
                    f" {sent:5.0f} bytes sent a row"
                )


if __name__ == "__main__":
    main()
