"""Which partition a row goes to.

Always true: the hash is murmur3 (x86, 32 bit, seed 0) of the key's bytes, or murmur2 as Kafka's
producers compute it; partition = (hash & 0x7fffffff) % partitions, the same in every language and
for ever: it decides where a key's rows are. Whole columns are hashed by numpy, one step for all
rows that have so many bytes; where keys repeat, each once. No Python loop runs over rows but for
the few that are far longer than the rest. A task that is run again routes the same rows to the same
partitions.
"""

from collections.abc import Callable
from enum import Enum

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from spark_ledger import errors
from spark_ledger.topic.entry.arrow_arrays import as_numpy, offsets_of

_C1 = np.uint32(0xCC9E2D51)
_C2 = np.uint32(0x1B873593)
_M = 0x5BD1E995
_SEED2 = 0x9747B28C
"""The seed of murmur2 that Kafka's producers hash with."""
_MASK = 0xFFFFFFFF
FEW_ROWS = 16  # fewer are hashed one by one: a numpy step costs as much as 16 Python steps
SAMPLE_ROWS = 512  # a look at so many says whether the keys of many more repeat

Hashes = npt.NDArray[np.uint32]
Bytes = npt.NDArray[np.uint8]
Counts = npt.NDArray[np.int64]


class Routing(Enum):
    """How rows find their partition; the values are what the option `routing` takes."""

    HASH = "hash"
    """By the key; rows without one where the task's rows go."""
    MURMUR2 = "murmur2"
    """As HASH, to the partition that Kafka's default partitioner chooses for the key."""
    ROUND_ROBIN = "roundRobin"
    """The task's rows in turn, beginning with partition `task index % partitions`."""
    SINGLE = "single"
    """All of the task's rows to one partition, the one that rows without a key go to."""
    COLUMN = "column"
    """By the rows' own column `partition`."""
    SPARK = "spark"
    """All of the task's rows to partition `task index % partitions`."""


class Router:
    """One task's routing. Its rows without a key go to partition `task index % partitions`."""

    def __init__(self, routing: Routing, partitions: int, task_index: int) -> None:
        self.routing = routing
        self.partitions = partitions
        self._first = task_index % partitions
        self._turn = self._first

    def route(
        self, rows: int, keys: pa.Array | None, hashes: Hashes | None, column: pa.Array | None
    ) -> int | Counts:
        """The partition of each of the task's next rows, or of all of them. `hashes` are the
        keys', asked for by HASH only.

        Raises errors.OptionInvalid for a partition that is null or none of the topic's.
        """
        if self.routing is Routing.COLUMN:
            return self._by_column(rows, column)
        if self.partitions == 1:
            return 0
        if self.routing is Routing.ROUND_ROBIN:
            wanted = (np.arange(rows, dtype=np.int64) + self._turn) % self.partitions
            self._turn = (self._turn + rows) % self.partitions
            return wanted
        if self.routing in (Routing.SPARK, Routing.SINGLE) or keys is None:
            return self._first
        if self.routing is Routing.MURMUR2:
            hashes = key_hashes(keys, murmur2)
        return partitions_of(keys, self.partitions, self._first, hashes)

    @property
    def hashes_keys(self) -> bool:
        return self.routing is Routing.HASH and self.partitions > 1

    def _by_column(self, rows: int, column: pa.Array | None) -> Counts:
        if column is None or not pa.types.is_integer(column.type):
            kind = "missing" if column is None else f"of type {column.type}"
            raise errors.ColumnTypeMismatch(
                f"column partition is {kind}, routing by it needs an INT", column="partition"
            )
        if len(column) != rows:
            raise ValueError(f"{len(column)} partitions for {rows} rows")
        if column.null_count:
            row = int(np.flatnonzero(as_numpy(column.is_null()))[0])
            raise errors.PartitionInvalid(f"the partition of row {row} of a batch is null")
        wanted = as_numpy(column)
        wrong = np.flatnonzero((wanted < 0) | (wanted >= self.partitions))
        if len(wrong):
            raise errors.PartitionInvalid(
                f"a row is for partition {wanted[wrong[0]]}, the topic has {self.partitions}"
            )
        return np.asarray(wanted, dtype=np.int64)


def partitions_of(
    keys: pa.Array, partitions: int, sticky: int, hashes: Hashes | None = None
) -> Counts:
    """The partition of each row of the binary column `keys`; null keys go to `sticky`."""
    hashed = murmur3_32(keys) if hashes is None else hashes
    found = (hashed & np.uint32(0x7FFFFFFF)).astype(np.int64) % partitions
    if keys.null_count:
        found[as_numpy(keys.is_null())] = sticky
    return found


def key_hashes(keys: pa.Array, hash_of: Callable[[pa.Array], Hashes] | None = None) -> Hashes:
    """As `murmur3_32`, or `hash_of`; where few keys repeat often, each is hashed once."""
    hash_of = hash_of or murmur3_32
    if not repeat(keys):
        return hash_of(keys)
    encoded = keys.dictionary_encode("encode")
    hashed = hash_of(encoded.dictionary)
    found: Hashes = hashed[as_numpy(encoded.indices)]
    return found


def repeat(keys: pa.Array) -> bool:
    """Whether, by a look at some, hashing each key once costs less than hashing each row's:
    for 10,000 keys of 12 bytes it took 0.24 ms instead of 0.42 if 500 were different, 0.34 if
    2,000 were, but 0.79 if all were; of 36 bytes 0.39, 0.61 and 1.6 instead of 1.06."""
    if len(keys) < 8 * SAMPLE_ROWS:
        return False
    sample = keys.slice((len(keys) - SAMPLE_ROWS) // 2, SAMPLE_ROWS)
    return len(sample.dictionary_encode().dictionary) <= SAMPLE_ROWS * 7 // 8


def murmur3_32(keys: pa.Array) -> Hashes:
    """The hash of each value of a binary column; for null that of the empty value."""
    starts, lengths, content = _layout(keys)
    hashes = np.zeros(len(keys), dtype=np.uint32)
    with np.errstate(over="ignore"):
        _mix_blocks(hashes, starts, lengths, content, _mixed, murmur3_32_of)
        hashes ^= _scramble(_tails(starts, lengths, content))  # 0 for rows without a rest
        return finish(hashes ^ lengths.astype(np.uint32))


def murmur2(keys: pa.Array) -> Hashes:
    """Kafka's hash of each value of a binary column; for null that of the empty value."""
    starts, lengths, content = _layout(keys)
    hashes = np.uint32(_SEED2) ^ lengths.astype(np.uint32)
    with np.errstate(over="ignore"):
        _mix_blocks(hashes, starts, lengths, content, _mixed2, _murmur2_of)
        rest = _tails(starts, lengths, content)
        hashes = np.where(lengths & 3, (hashes ^ rest) * np.uint32(_M), hashes)
        hashes ^= hashes >> np.uint32(13)
        hashes *= np.uint32(_M)
        return hashes ^ (hashes >> np.uint32(15))


def murmur3_32_of(key: bytes, hashed: int, first_block: int) -> int:
    """The hash after the whole blocks of `key`, from block `first_block` on: for one long key."""
    words = np.frombuffer(key, dtype="<u4", count=len(key) // 4)[first_block:]
    for word in words.tolist():
        mixed = (word * 0xCC9E2D51) & _MASK
        mixed = ((mixed << 15 | mixed >> 17) * 0x1B873593) & _MASK
        hashed ^= mixed
        hashed = (hashed << 13 | hashed >> 19) & _MASK
        hashed = (hashed * 5 + 0xE6546B64) & _MASK
    return hashed


def _murmur2_of(key: bytes, hashed: int, first_block: int) -> int:
    """As murmur3_32_of, for murmur2."""
    words = np.frombuffer(key, dtype="<u4", count=len(key) // 4)[first_block:]
    for word in words.tolist():
        mixed = (word * _M) & _MASK
        mixed = ((mixed ^ mixed >> 24) * _M) & _MASK
        hashed = ((hashed * _M) & _MASK) ^ mixed
    return hashed


def _layout(keys: pa.Array) -> tuple[Counts, Counts, Bytes]:
    """Where each value starts, how long it is (null: 0), and the bytes they are in."""
    content, offsets = keys.buffers()[2], offsets_of(keys)
    starts = offsets[:-1].astype(np.int64)
    lengths = np.diff(offsets).astype(np.int64)
    if keys.null_count:
        lengths[as_numpy(keys.is_null())] = 0
    if content is None:
        return starts, lengths, np.zeros(0, dtype=np.uint8)
    return starts, lengths, np.frombuffer(content, dtype=np.uint8)


def _mix_blocks(
    hashes: Hashes,
    starts: Counts,
    lengths: Counts,
    content: Bytes,
    mixed: Callable[[Hashes, Hashes], Hashes],
    rest_of: Callable[[bytes, int, int], int],
) -> None:
    """Mix in the whole 4-byte blocks, block by block over the rows that have it: `mixed` does that
    for one block of many rows, `rest_of` for the rest of one row."""
    blocks = lengths >> 2
    words = _words(content)
    common = int(blocks.min()) if len(blocks) > FEW_ROWS else 0
    for at in range(common):  # no row is looked for that every row is
        hashes[:] = mixed(hashes, words[starts + 4 * at])
    rows, at = np.flatnonzero(blocks > common), common
    while len(rows) > FEW_ROWS:
        hashes[rows] = mixed(hashes[rows], words[starts[rows] + 4 * at])
        at += 1
        rows = rows[blocks[rows] > at]
    for row in rows.tolist():
        start = int(starts[row])
        key = content[start : start + int(lengths[row])].tobytes()
        hashes[row] = rest_of(key, int(hashes[row]), at)


def _tails(starts: Counts, lengths: Counts, content: Bytes) -> Hashes:
    """The last 1 to 3 bytes of the rows that have such a rest; 0 of the others."""
    rest = lengths & 3
    tails = starts + lengths - rest
    block = np.zeros(len(lengths), dtype=np.uint32)
    common = int(rest.min()) if len(rest) else 0
    for i in range(common):
        block |= content[tails + i].astype(np.uint32) << np.uint32(8 * i)
    for i in range(common, 3):
        rows = np.flatnonzero(rest > i)
        block[rows] |= content[tails[rows] + i].astype(np.uint32) << np.uint32(8 * i)
    return block


def _mixed(hashes: Hashes, block: Hashes) -> Hashes:
    return _rotate(hashes ^ _scramble(block), 13) * np.uint32(5) + np.uint32(0xE6546B64)


def _mixed2(hashes: Hashes, block: Hashes) -> Hashes:
    block = block * np.uint32(_M)
    block ^= block >> np.uint32(24)
    return hashes * np.uint32(_M) ^ block * np.uint32(_M)


def _words(content: Bytes) -> npt.NDArray[np.uint32]:
    """A view of the bytes as little-endian 32-bit words, one beginning at each byte."""
    count = max(0, len(content) - 3)
    return np.ndarray(count, dtype="<u4", buffer=content.data, strides=(1,))


def _scramble(block: Hashes) -> Hashes:
    return _rotate(block * _C1, 15) * _C2


def _rotate(value: Hashes, bits: int) -> Hashes:
    return (value << np.uint32(bits)) | (value >> np.uint32(32 - bits))


def finish(value: Hashes) -> Hashes:
    """murmur3's last step, which spreads every bit; in place."""
    value ^= value >> np.uint32(16)
    value *= np.uint32(0x85EBCA6B)
    value ^= value >> np.uint32(13)
    value *= np.uint32(0xC2B2AE35)
    return value ^ (value >> np.uint32(16))
