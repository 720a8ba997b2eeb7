"""The history of a topic, and its checkpoints."""

import random
from dataclasses import replace

from spark_ledger import errors
from spark_ledger.topic.commit import draft as commit_draft
from spark_ledger.topic.log import checkpoint
from spark_ledger.topic.log.actions import (
    Append,
    Grow,
    Hole,
    OpenLive,
    Overwrite,
    Replace,
    SealLive,
    Terminate,
    Trim,
)
from spark_ledger.topic.log.blobs import StoredEntries
from spark_ledger.topic.log.checkpoint import Root
from spark_ledger.topic.log.records import Commit
from spark_ledger.topic.log.segment_table import BlobPointer, SegmentTable, TableChunk
from spark_ledger.topic.log.segments import INLINE, Segment
from tests.kit.segments_seen import entry_ids
from tests.unit.spark_ledger.topic.stage import segment


class History:
    """Random commits that guards let through."""

    def __init__(self, seed):
        self.rng = random.Random(seed)
        self.ledger = 100

    def commit(self, topic):
        """The next commit, or None if the one thought of does not hold."""
        rare = (self.replace, self.trim, self.hole, self.overwrite, self.grow, self.terminate)
        kind = self.rng.choice((*[self.append] * 6, *rare, self.open, self.seal, self.seal))
        actions = kind(topic)
        app = self.rng.choice(("a", "b"))
        others = ("other",) if self.rng.random() < 0.2 else ()
        body = self.rng.randrange(1, 9) if self.rng.random() < 0.1 else None
        made = Commit("c", app, "t", 0, "r", "i", actions, others=others, body_ledger=body)
        try:
            commit_draft.check_guards(topic, app, actions)
        except (errors.TxnConflict, errors.TopicTerminated, ValueError):
            return None
        return made

    def partition(self, topic):
        return self.rng.choice(topic.partitions)

    def segment(self, partition, rows):
        counts = []
        while rows:
            counts.append(self.rng.randrange(1, rows + 1))
            rows -= counts[-1]
        self.ledger += 1
        if self.rng.random() < 0.3:
            payloads = tuple(b"%d/%d" % (self.ledger, n) for n in range(len(counts)))
            entries, total = ((0, len(counts) - 1),), sum(counts)
            return Segment(
                partition, INLINE, 0, entries, tuple(counts), total, 9, 1, 2, inline=payloads
            )
        return segment(self.ledger, *counts, partition=partition, first=self.rng.randrange(3))

    def some(self, topic):
        return tuple(
            self.segment(self.partition(topic).number, self.rng.randrange(1, 9))
            for _ in range(self.rng.randrange(1, 5))
        )

    def append(self, topic):
        return (Append(self.some(topic)),)

    def overwrite(self, topic):
        return (Overwrite(self.some(topic), topic.next - self.rng.randrange(2), (1, 2)),)

    def range_of(self, topic):
        held = self.partition(topic)
        start = self.rng.randint(held.start_offset, held.end_offset)
        return held, start, self.rng.randint(start, held.end_offset)

    def replace(self, topic):
        held, start, end = self.range_of(topic)
        if start == end:
            return (Append(()),)
        rows = [end - start] if self.rng.random() < 0.5 or end - start < 2 else [1, end - start - 1]
        new = tuple(self.segment(held.number, count) for count in rows)
        return (Replace(held.number, start, end, new, topic.next, (self.ledger - 3,)),)

    def hole(self, topic):
        held, start, end = self.range_of(topic)
        return (Hole(held.number, start, end),)

    def trim(self, topic):
        held, start, _ = self.range_of(topic)
        return (Trim(((held.number, start),), (self.ledger - 5,)),)

    def grow(self, topic):
        return (Grow(len(topic.partitions) + 1),)

    def open(self, topic):
        self.ledger += 1
        return (OpenLive(self.partition(topic).number, self.ledger, 0, "owner", 1),)

    def seal(self, topic):
        live = [held.live for held in topic.partitions if held.live is not None]
        if not live:
            return (Append(()),)
        one = self.rng.choice(live)
        sealed = segment(one.ledger_id, self.rng.randrange(1, 5), partition=one.partition)
        return (SealLive(one.partition, one.ledger_id, self.rng.choice((sealed, None))),)

    def terminate(self, topic):
        return (Terminate(),) if self.rng.random() < 0.1 else (Append(()),)


class Shelf:
    """Where the chunks and the moved payloads of a test are."""

    def __init__(self, rng):
        self.rng = rng
        self.chunks = {}
        self.payloads = {}
        self.ledger = 10_000

    def checkpointed(self, topic):
        """The state as it is read back from a checkpoint of it."""
        sparse = checkpoint.sparse_chunks(topic)
        read = {chunk: self.chunks[chunk] for chunk in sparse}
        parts = [checkpoint.merge_intervals(held, read) for held in topic.partitions]
        payloads, rows = checkpoint.inline_payloads(parts)
        assert len(payloads) == len(rows)
        if payloads:
            self.ledger += 1
            first = self.rng.randrange(5)
            for n, payload in enumerate(payloads):
                self.payloads[self.ledger, first + n] = payload
            stored = StoredEntries(self.ledger, 3, first, first + len(payloads) - 1)
            parts = checkpoint.with_inline_moved(parts, stored)
        if self.rng.random() < 0.5:
            size = self.rng.choice((1, 2, 1000)) * checkpoint.CHUNK_BYTES_MAX
            for part in checkpoint.cut_into_chunks(parts, size):
                parts = checkpoint.with_chunk(parts, part, self.chunk(part))
            assert len(checkpoint.tail_table(parts)) == 0
        return self.stored(topic, parts)

    def stored(self, topic, parts):
        small = checkpoint.checkpoint_state(
            topic, parts, trimmed=0, unnamed_ledgers=(), deleted_ledgers=()
        )
        read_back = checkpoint.decode_root(checkpoint.encode_root(Root(small, (4, 5))))
        assert read_back.earlier_ledgers == (4, 5)
        for one in in_memory(read_back.state):
            assert bool((one.source.ledgers != INLINE).all())
        return replace(read_back.state, head_version=topic.head_version)

    def chunk(self, part):
        self.ledger += 1
        table = SegmentTable.decode(checkpoint.tail_table(part).encode())
        pointer = BlobPointer(self.ledger, 0, 0, 0, 1, 0)
        chunk = TableChunk(pointer, len(table), checkpoint.rows_of(part))
        self.chunks[chunk] = table
        return chunk

    def contents(self, topic):
        """Everything a reader can see: each row's entry and row in it, its commit and times."""
        found = {}
        for held in topic.partitions:
            for part in held.stretches(held.start_offset, held.end_offset, self.chunks):
                for placed in part.table:
                    for offset, entry in self.rows(placed):
                        if part.lo <= offset < part.hi:
                            times = (placed.commit, placed.commit_ms, placed.segment.max_ms)
                            assert (held.number, offset) not in found
                            found[held.number, offset] = (entry, *times)
        return found

    def rows(self, placed):
        """(offset, (entry or its payload, row in it)) of each row."""
        one, offset = placed.segment, placed.base
        payloads = iter(one.inline)
        for entry, rows in zip(entry_ids(one), one.entry_rows, strict=True):
            at = next(payloads, self.payloads.get((one.ledger_id, entry), (one.ledger_id, entry)))
            for row in range(rows):
                yield offset, (at, row)
                offset += 1


def in_memory(topic):
    intervals = [one for held in topic.partitions for one in held.intervals]
    return [one for one in intervals if isinstance(one.source, SegmentTable)]


def inline(*rows, partition=0, payload=b"p"):
    """A segment in the commit itself, with an entry for each count of rows."""
    return Segment(
        partition,
        INLINE,
        0,
        ((0, len(rows) - 1),),
        rows,
        sum(rows),
        sum(rows) * 10,
        1,
        2,
        inline=tuple(b"%s%d" % (payload, n) for n in range(len(rows))),
    )


async def commits(stage, intent, count, client=None, **options):
    for _ in range(count):
        segment = inline(2, 1, **options)
        await (client or stage.client).commit_actions(stage.topic.id, [Append((segment,))], intent)
