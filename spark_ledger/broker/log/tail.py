"""The newest batches of partitions in memory, for consumers at the end. Pure.

Always true: the batches of all partitions of a broker take at most `bytes_max` of memory, overhead
included (the newest block always stays). The oldest blocks are evicted first, whatever their
partition. A block has one list for each property of its batches: with one object for each batch,
small messages took five times their bytes, and the garbage collector went through all these
objects.
"""

from bisect import bisect_left, bisect_right
from collections import deque
from collections.abc import Sequence
from functools import cached_property, partial
from itertools import accumulate, repeat
from typing import NamedTuple, Protocol

from spark_ledger.topic.entry import pulsar_batch

STEP_BATCHES_MAX = 1000
"""How many batches are read, encoded or sent in one step of the loop."""
BATCH_OVERHEAD_BYTES, BLOCK_OVERHEAD_BYTES = 80, 1024
"""The memory that a batch takes beside its bytes (the object, and its places in two lists with
spare room); and the memory that a block takes."""
BLOCK_BYTES_MAX = 256 << 10
PLAIN_BEGIN = pulsar_batch.MAGIC.to_bytes(2, "big")
_FRESH_PARTS = 8
"""A block takes no more batches after all tails together got 1/8 of `bytes_max` since its begin:
all batches of a block are evicted together, so they should be of one age."""


class Stored(NamedTuple):
    """A batch of a partition as its consumers get it. `offset` is that of its first message;
    `batched`: the batch has metadata of each message."""

    offset: int
    messages: int
    data: bytes
    batched: bool

    @property
    def has_rows(self) -> bool:
        """Whether the batch has a row: a chunk that is not the last chunk of its message has no
        row."""
        return self.messages > 1 or not pulsar_batch.is_earlier_chunk(self.data)

    @property
    def is_plain(self) -> bool:
        """Whether `data` is one whole batch; otherwise `data` has chunks of a message."""
        return self.data.startswith(PLAIN_BEGIN)

    @property
    def end(self) -> int:
        return self.offset + self.messages


_stored = partial(tuple.__new__, Stored)
"""Stored of a tuple with its fields: a block makes up to STEP_BATCHES_MAX for each read."""


class BatchBlock:
    """Batches that follow each other without a gap."""

    __slots__ = ("batched", "batches", "began_at_bytes", "bytes", "counts", "end", "first")

    def __init__(self, first: int, batched: bool, began_at_bytes: int) -> None:
        self.first = self.end = first
        self.batched = batched
        self.counts: list[int] = []
        self.batches: list[bytes] = []
        self.began_at_bytes = began_at_bytes
        self.bytes = BLOCK_OVERHEAD_BYTES

    def add(self, counts: Sequence[int], batches: Sequence[bytes], size: int) -> None:
        self.counts += counts
        self.batches += batches
        self.end += sum(counts)
        self.bytes += size

    def takes(self, offset: int, batched: bool) -> bool:
        follows = (offset, batched) == (self.end, self.batched)
        return follows and len(self.batches) < STEP_BATCHES_MAX and self.bytes < BLOCK_BYTES_MAX

    def since(self, offset: int, bytes_max: int, count_max: int) -> list[Stored]:
        """`count_max` batches at most from `offset` on, about `bytes_max` bytes; no batches if none
        begins at `offset`."""
        if offset >= self.end:
            return []
        at = offset - self.first
        begins: Sequence[int] = range(offset, self.end)
        if self.end - self.first > len(self.counts):  # else each batch has one message
            begins = list(accumulate(self.counts, initial=self.first))
            at = bisect_left(begins, offset)
            if begins[at] != offset:
                return []
            begins = begins[at:]
        end = at
        for size in accumulate(map(len, self.batches[at : at + count_max])):
            end += 1
            if size >= bytes_max:
                break
        fields = zip(begins, self.counts[at:end], self.batches[at:end], repeat(self.batched))
        return list(map(_stored, fields))


def bytes_of(batches: Sequence[bytes]) -> int:
    """The memory that the batches take."""
    return sum(map(len, batches)) + BATCH_OVERHEAD_BYTES * len(batches)


class TailBudget:
    """The memory for the tails of one broker."""

    def __init__(self, bytes_max: int) -> None:
        self._bytes_max = bytes_max
        self.bytes = 0
        """The memory that the tails take now."""
        self._added_bytes = 0
        self._order: deque[tuple[Tail, BatchBlock]] = deque()

    @cached_property
    def for_reads(self) -> "TailBudget":
        """A second budget, a quarter of this one, for batches that are read from ledgers: they must
        not evict the newest batches."""
        return TailBudget(self._bytes_max // 4)

    def block(self, tail: "Tail", first: int, batched: bool) -> BatchBlock:
        """Returns a new block of that tail."""
        block = BatchBlock(first, batched, self._added_bytes)
        self._order.append((tail, block))
        self.bytes += block.bytes
        return block

    def is_fresh(self, block: BatchBlock) -> bool:
        """Whether the block may take more batches; see _FRESH_PARTS."""
        return _FRESH_PARTS * (self._added_bytes - block.began_at_bytes) < self._bytes_max

    def count_added(self, size: int) -> None:
        self._added_bytes += size
        self.bytes += size
        while self.bytes > self._bytes_max and len(self._order) > 1:
            tail, block = self._order.popleft()
            self.bytes -= block.bytes
            tail.forget(block)


class Tail:
    """The batches in memory of one partition."""

    def __init__(self, budget: TailBudget) -> None:
        self._budget = budget
        self._firsts: list[int] = []
        self._blocks: list[BatchBlock] = []
        self._newest: BatchBlock | None = None

    def add(
        self, offset: int, counts: Sequence[int], batches: Sequence[bytes], batched: bool
    ) -> None:
        """Add batches that follow each other from `offset` on, with the message `counts` of
        each."""
        block, size = self._newest, bytes_of(batches)
        if block is None or not block.takes(offset, batched) or not self._budget.is_fresh(block):
            block = self._newest = self._budget.block(self, offset, batched)
            self._put(block)
        block.add(counts, batches, size)
        self._budget.count_added(size)

    def add_read(self, batches: Sequence[Stored]) -> None:
        """Add batches that were read, in the order of their offsets."""
        begin = 0
        for at in range(1, len(batches) + 1):
            first, last = batches[begin], batches[at - 1]
            following = batches[at] if at < len(batches) else None
            if following and (following.offset, following.batched) == (last.end, first.batched):
                continue
            run = batches[begin:at]
            counts, payloads = [batch.messages for batch in run], [batch.data for batch in run]
            self.add(first.offset, counts, payloads, first.batched)
            begin = at

    def _put(self, block: BatchBlock) -> None:
        at = bisect_left(self._firsts, block.first)
        if at < len(self._firsts) and self._firsts[at] == block.first:
            self._blocks[at] = block
            return
        self._firsts.insert(at, block.first)
        self._blocks.insert(at, block)

    def forget(self, block: BatchBlock) -> None:
        if self._newest is block:
            self._newest = None
        at = bisect_left(self._firsts, block.first)
        if at < len(self._firsts) and self._blocks[at] is block:
            del self._firsts[at], self._blocks[at]

    def since(self, offset: int, bytes_max: int) -> list[Stored]:
        """The batches that follow each other from `offset` on: about `bytes_max` bytes, and
        STEP_BATCHES_MAX batches at most; an empty list if no batch here begins at `offset`."""
        batches: list[Stored] = []
        size = 0
        while at := bisect_right(self._firsts, offset):
            left = STEP_BATCHES_MAX - len(batches)
            run = self._blocks[at - 1].since(offset, bytes_max - size, left)
            batches += run
            size += sum([len(batch.data) for batch in run])
            if not run or size >= bytes_max or len(batches) >= STEP_BATCHES_MAX:
                break
            offset = run[-1].end
        return batches


class StoredRun(Protocol):
    """Batches that are confirmed, in the order of their offsets."""

    batches: list[bytes]
    counts: list[int]
    batched: bool


class RecentBatches:
    """The batches that a partition has in memory: its newest batches, batches that were read from
    ledgers, and the last batch with a row. `end` is one past the newest batch."""

    def __init__(self, budget: TailBudget) -> None:
        self.end = 0
        self.added_bytes = 0
        """How many bytes of batches were added so far."""
        self._budget = budget
        self.forget()

    def forget(self) -> None:
        self._newest, self._read = Tail(self._budget), Tail(self._budget.for_reads)
        self._last: Stored | None = None
        self._last_until = 0  # no batch with a row is between `_last` and this offset

    def add(self, offset: int, run: StoredRun) -> None:
        """Add a run of batches that are confirmed, from the offset on."""
        self.end = end = offset + sum(run.counts)
        self.added_bytes += sum(map(len, run.batches))
        last = Stored(end - run.counts[-1], run.counts[-1], run.batches[-1], run.batched)
        if last.has_rows:
            self.note_last(last, end)
        elif self._last_until == offset:
            self._last_until = end
        self._newest.add(offset, run.counts, run.batches, run.batched)

    def add_read(self, batches: Sequence[Stored]) -> None:
        self._read.add_read(batches)

    def since(self, offset: int, bytes_max: int) -> list[Stored]:
        """As Tail.since. Batches that were read from ledgers are kept in memory too, for consumers
        that had no permits when the batches were read."""
        return self._newest.since(offset, bytes_max) or self._read.since(offset, bytes_max)

    def note_last(self, batch: Stored, until: int) -> None:
        """Note that `batch` is the last batch with a row before `until`."""
        self._last, self._last_until = batch, until

    def last_before(self, end: int) -> Stored | None:
        """The last batch with a row before `end`; None if it was not noted."""
        return self._last if self._last_until == end else None
