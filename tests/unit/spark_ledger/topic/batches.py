"""Batches of producers, in the entries of segments."""

import asyncio
import zlib

import pyarrow as pa

from spark_ledger.broker.log.entry_batches import batches_in
from spark_ledger.topic.commit.seal import seal_live_segment
from spark_ledger.topic.entry import pulsar_batch
from spark_ledger.topic.entry.message_batch import Share, decode_header, encode_header
from spark_ledger.topic.entry.pulsar_batch import frame_batches
from spark_ledger.topic.read.plan import plan_read
from spark_ledger.topic.task_reader import fetch_with_replans
from tests.kit.pulsar_batches import batch_of, message
from tests.kit.rows import parts_of
from tests.unit.spark_ledger.topic.live_segments import Owner
from tests.unit.spark_ledger.topic.stage import NOW_MS


class Producer(Owner):
    """Its entries have batches of Pulsar's producers, several each."""

    sent: list[bytes]

    async def append(self, *sizes):
        self.sent = getattr(self, "sent", [])
        for size in sizes:
            values = [b"%d" % n for n in range(self.rows, self.rows + size)]
            cut = max(1, size // 2)
            batches = [some for some in (values[:cut], values[cut:]) if some]
            framed_ = [(len(some), batch_of([message(one) for one in some])) for some in batches]
            share = Share(0, size, self.rows - self.base)
            head = encode_header([share], self.now_ms, has_batches=True)
            await self.writer.append(b"".join([head, *frame_batches(framed_)]), rows=size)
            self.sent += [data for _, data in framed_]
            self.rows += size


async def batches_of(client, state):
    """Each batch with its first offset, as a broker finds it."""
    held = state.partitions[0]
    found = []
    for task in plan_read(state, {0: (held.start_offset, held.end_offset)}):
        async for run in fetch_with_replans(client, task):
            for fetched in run:
                if decode_header(fetched.entry.payload).has_batches:
                    found += [
                        (one.offset, one.data) for some in batches_in(fetched) for one in some
                    ]
    return found


async def produced(stage, *sizes):
    """Segments born live, sealed, of such entries each."""
    made = []
    for some in sizes:
        owner = Producer(stage)
        await owner.open(sum(sum(one) for one in sizes[: len(made)]))
        await appended(stage, owner, *some)
        live = (await stage.client.log(stage.topic.id).fold(fresh=True)).partitions[0].live
        seal = await seal_live_segment(stage.client.ledgers, live)
        await stage.client.commit_actions(stage.topic.id, [seal], owner.intent)
        made.append(owner)
        await asyncio.sleep(1)
    return made


async def rows_of(client, task, **options):
    found = []
    async for run in fetch_with_replans(client, task, **options):
        for rows in (r for fetched in run for b in fetched.blocks() for r in parts_of(b)):
            values = rows.record_batch.column("value").to_pylist()
            found += enumerate(values, rows.offset)
    return found


def numbered(*ranges):
    return [(n, b"%d" % n) for lo, hi in ranges for n in range(lo, hi)]


async def appended(stage, owner, *sizes):
    """Entries of so many rows, one each second; when the first was stored."""
    first_ms = NOW_MS + int(stage.world.loop.now * 1000)
    for at, size in enumerate(sizes):
        await asyncio.sleep(max(0, (first_ms - NOW_MS) / 1000 + at - stage.world.loop.now))
        owner.now_ms = first_ms + 1000 * at
        await owner.append(size)
    return first_ms


JUNK = b"another program wrote this"


def header(rows=1, first_row=0, partition=0, version=2):
    made = bytearray(encode_header([Share(partition, rows, first_row)], 1))
    made[4] = version
    return bytes(made)


FOREIGN = {
    "junk": JUNK,
    "nothing": b"",
    "a header cut short": header()[:20],
    "another partition's": header(first_row=5, partition=3),
    "another place": header(first_row=9),
    "flags that contradict each other": b"SLM1\x02\x0a" + bytes(26),
}


CODECS = {
    "none": (0, bytes),
    "lz4": (1, lambda data: pa.Codec("lz4_raw").compress(data, asbytes=True)),
    "zlib": (2, zlib.compress),
    "zstd": (3, lambda data: pa.Codec("zstd").compress(data, asbytes=True)),
    "snappy": (4, lambda data: pa.Codec("snappy").compress(data, asbytes=True)),
}


def entry_of(*batches, written_ms=9):
    rows = sum(count for count, _ in batches)
    head = encode_header([Share(2, rows, 5)], written_ms, has_batches=True)
    return b"".join([head, *pulsar_batch.frame_batches(batches)])


def data(made):
    return [one.data for one in made]
