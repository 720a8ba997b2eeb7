"""Which partition a row goes to.

Always true: the hash is murmur3 (x86, 32 bit, seed 0) of the key's bytes, or the default hash of a
client; partition = (hash & 0x7fffffff) % partitions (crc32, pulsarGo: hash % partitions). The rule
is equal in every language and never changes, because the rule decides where a key's rows are. numpy
hashes whole columns: one step mixes the next bytes of all rows that have more bytes; keys that
repeat are hashed once. Python loops run only over the few rows that are far longer than the others,
and over keys of pulsarJava that are not ASCII. A task that is run again routes the same rows to the
same partitions.
"""

import base64
import zlib
from collections.abc import Callable, Iterable
from enum import Enum
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from spark_ledger import errors
from spark_ledger.topic.entry.arrow_arrays import as_numpy, offsets_of

_C1 = np.uint32(0xCC9E2D51)
_C2 = np.uint32(0x1B873593)
_MURMUR2_FACTOR = 0x5BD1E995
_MURMUR2_SEED = 0x9747B28C
"""The seed of murmur2 in Kafka's producers."""
_MASK = 0xFFFFFFFF
_MASK_WITHOUT_SIGN = 0x7FFFFFFF
_MASK64 = (1 << 64) - 1
ONE_BY_ONE_ROWS = 16  # a numpy step costs as much as 16 Python steps
SAMPLE_ROWS = 512  # the keys of this many rows show whether the keys of all rows repeat

_WEYL, _BOOST = 0x9E3779B97F4A7C15, 0xDF442D22CE4859B9
_BOOST_SEED = (_WEYL * _BOOST ^ _WEYL * _BOOST >> 64) & _MASK64
"""Constants of Boost's hash of a range of bytes."""
Hashes = npt.NDArray[np.uint32]
Longs = npt.NDArray[np.uint64]
Bytes = npt.NDArray[np.uint8]
Counts = npt.NDArray[np.int64]


_CRC_TABLE = np.array(
    [zlib.crc32(bytes([n ^ 0xFF])) ^ 0xFF000000 for n in range(256)], dtype=np.uint32
)
"""How a byte changes a CRC, made from zlib's own CRC of the byte."""


class Routing(Enum):
    """How rows get their partition; the values are those of the option `routing`."""

    HASH = "hash"
    """By the key; rows without a key go to partition `task index % partitions`."""
    MURMUR2 = "murmur2"
    """As HASH, to the partition that the default partitioner of Kafka's Java client chooses for the
    key."""
    CRC32 = "crc32"
    """As HASH, as librdkafka chooses (confluent-kafka in Python, Go, .NET): an empty key counts as
    no key."""
    PULSAR_JAVA = "pulsarJava"
    """As HASH, as Pulsar's Java client chooses: String.hashCode; keys that are not UTF-8 are hashed
    as their Base64."""
    PULSAR_CPP = "pulsarCpp"
    """As HASH, as Pulsar's C++ and Python clients choose: boost::hash of a string, since Boost
    1.81."""
    PULSAR_GO = "pulsarGo"
    """As HASH, as Pulsar's Go client chooses."""
    ROUND_ROBIN = "roundRobin"
    """The task's rows in turn, beginning with partition `task index % partitions`."""
    SINGLE = "single"
    """All of the task's rows to the partition of rows without a key."""
    COLUMN = "column"
    """By the rows' column `partition`."""
    SPARK = "spark"
    """All of the task's rows to partition `task index % partitions`."""


class Router:
    """One task's routing. Its rows without a key go to partition `task index % partitions`."""

    def __init__(self, routing: Routing, partitions: int, task_index: int) -> None:
        self.routing = routing
        self.partitions = partitions
        self._keyless_partition = task_index % partitions
        self._next_partition = self._keyless_partition

    def route(
        self, rows: int, keys: pa.Array | None, hashes: Hashes | None, column: pa.Array | None
    ) -> int | Counts:
        """The partition of each of the task's next rows, or the single partition of all rows.
        `hashes` are the hashes of the keys, for HASH only; other routings compute their own hashes.

        Raises errors.OptionInvalid for a partition that is null or that the topic does not have.
        """
        if self.routing is Routing.COLUMN:
            return self._by_column(rows, column)
        if self.partitions == 1:
            return 0
        if self.routing is Routing.ROUND_ROBIN:
            partitions = (np.arange(rows, dtype=np.int64) + self._next_partition) % self.partitions
            self._next_partition = (self._next_partition + rows) % self.partitions
            return partitions
        if self.routing in (Routing.SPARK, Routing.SINGLE) or keys is None:
            return self._keyless_partition
        if self.routing is Routing.HASH:
            return partitions_of(keys, self.partitions, self._keyless_partition, hashes)
        hash_of, bits = _CLIENT_HASHES[self.routing]
        partitions = partitions_of(
            keys, self.partitions, self._keyless_partition, key_hashes(keys, hash_of), bits
        )
        if self.routing is Routing.CRC32:
            partitions[_layout(keys).lengths == 0] = self._keyless_partition
        return partitions

    @property
    def hashes_keys(self) -> bool:
        return self.routing is Routing.HASH and self.partitions > 1

    def _by_column(self, rows: int, column: pa.Array | None) -> Counts:
        if column is None or not pa.types.is_integer(column.type):
            kind = "missing" if column is None else f"of type {column.type}"
            raise errors.ColumnTypeMismatch(
                f"column partition is {kind}, but routing=column needs an INT", column="partition"
            )
        if len(column) != rows:
            raise ValueError(f"{len(column)} partitions for {rows} rows")
        if column.null_count:
            row = int(np.flatnonzero(as_numpy(column.is_null()))[0])
            raise errors.PartitionInvalid(f"the partition of row {row} of a batch is null")
        partitions = as_numpy(column)
        invalid_rows = np.flatnonzero((partitions < 0) | (partitions >= self.partitions))
        if len(invalid_rows):
            raise errors.PartitionInvalid(
                f"a row is for partition {partitions[invalid_rows[0]]}, but the topic has"
                f" {self.partitions} partitions"
            )
        return np.asarray(partitions, dtype=np.int64)


def partitions_of(
    keys: pa.Array,
    partitions: int,
    keyless_partition: int,
    hashes: Hashes | None = None,
    bits: int = _MASK_WITHOUT_SIGN,
) -> Counts:
    """The partition of each row of the binary column `keys`; null keys go to `keyless_partition`.
    `bits` is the mask of the bits of a hash that count."""
    hashed = murmur3_32(keys) if hashes is None else hashes
    numbers = (hashed & np.uint32(bits)).astype(np.int64) % partitions
    if keys.null_count:
        numbers[as_numpy(keys.is_null())] = keyless_partition
    return numbers


def key_hashes(keys: pa.Array, hash_of: Callable[[pa.Array], Hashes] | None = None) -> Hashes:
    """The hash of each key, by `hash_of` or murmur3_32; keys that repeat often are hashed once."""
    hash_of = hash_of or murmur3_32
    if not keys_repeat(keys):
        return hash_of(keys)
    encoded = keys.dictionary_encode("encode")
    hashed = hash_of(encoded.dictionary)
    hashes: Hashes = hashed[as_numpy(encoded.indices)]
    return hashes


def keys_repeat(keys: pa.Array) -> bool:
    """Whether a sample shows that keys repeat so often that to hash each different key once costs
    less than to hash the key of each row. For 10,000 keys of 12 bytes, to hash each row took
    0.42 ms; to hash each different key took 0.24 ms with 500 different keys, 0.34 ms with 2,000,
    and 0.79 ms if all were different. For keys of 36 bytes: 1.06 ms; 0.39, 0.61 and 1.6 ms."""
    if len(keys) < 8 * SAMPLE_ROWS:
        return False
    sample = keys.slice((len(keys) - SAMPLE_ROWS) // 2, SAMPLE_ROWS)
    return len(sample.dictionary_encode().dictionary) <= SAMPLE_ROWS * 7 // 8


def murmur3_32(keys: pa.Array) -> Hashes:
    """The hash of each value of a binary column; a null counts as the empty value."""
    starts, lengths, content = _layout(keys)
    hashes = np.zeros(len(keys), dtype=np.uint32)
    with np.errstate(over="ignore"):
        _mix_blocks(hashes, starts, lengths, content, _mix_murmur3, murmur3_32_of)
        hashes ^= _scramble(_tails(starts, lengths, content))  # 0 for rows without a tail
        return finish_murmur3(hashes ^ lengths.astype(np.uint32))


def murmur2(keys: pa.Array) -> Hashes:
    """Kafka's hash of each value of a binary column; a null counts as the empty value."""
    starts, lengths, content = _layout(keys)
    hashes = np.uint32(_MURMUR2_SEED) ^ lengths.astype(np.uint32)
    with np.errstate(over="ignore"):
        _mix_blocks(hashes, starts, lengths, content, _mix_murmur2, _murmur2_of)
        rest = _tails(starts, lengths, content)
        hashes = np.where(lengths & 3, (hashes ^ rest) * np.uint32(_MURMUR2_FACTOR), hashes)
        hashes ^= hashes >> np.uint32(13)
        hashes *= np.uint32(_MURMUR2_FACTOR)
        return hashes ^ (hashes >> np.uint32(15))


def crc32(keys: pa.Array) -> Hashes:
    """zlib's CRC-32 of each value of a binary column; a null counts as the empty value."""
    starts, lengths, content = _layout(keys)
    hashes = np.full(len(keys), _MASK, dtype=np.uint32)
    _mix_blocks(hashes, starts, lengths, content, _mix_crc, _crc_of, 1)
    return ~hashes


def go_string(keys: pa.Array) -> Hashes:
    """31 * hash + byte, over the bytes of each value; 0 for null."""
    starts, lengths, content = _layout(keys)
    hashes = np.zeros(len(keys), dtype=np.uint32)
    with np.errstate(over="ignore"):
        _mix_blocks(hashes, starts, lengths, content, _mix_31, _bytes31, 1)
    return hashes


def java_string(keys: pa.Array) -> Hashes:
    """Java's String.hashCode of each value, over its units of UTF-16; 0 for null. A value that is
    not UTF-8 is hashed as its Base64, the form in which Java's client gets it."""
    hashes = go_string(keys)
    starts, lengths, content = _layout(keys)
    non_ascii = np.concatenate(([0], np.cumsum(content >= 128)))
    for row in np.flatnonzero(non_ascii[starts + lengths] > non_ascii[starts]).tolist():
        key = content[starts[row] : starts[row] + lengths[row]].tobytes()
        try:
            text = key.decode()
        except UnicodeDecodeError:
            text = base64.b64encode(key).decode()
        units = np.frombuffer(text.encode("utf-16-le"), dtype="<u2")
        hashes[row] = _units31(units.tolist(), hashed=0)
    return hashes


def boost_string(keys: pa.Array) -> Hashes:
    """The lower half of the 64 bits of boost::hash<std::string> of each value, as it is since Boost
    1.81; a null counts as the empty value."""
    starts, lengths, content = _layout(keys)
    rest = lengths & 7
    tails = np.zeros(len(keys), dtype=np.uint64)
    for i in range(7):
        rows = np.flatnonzero(rest > i)
        last = content[(starts + lengths - rest)[rows] + i].astype(np.uint64)
        tails[rows] |= last << np.uint64(8 * i)
    with np.errstate(over="ignore"):
        hashes = np.uint64(_BOOST_SEED) ^ lengths.astype(np.uint64)
        _mix_blocks(hashes, starts, lengths, content, _mix_boost, _boost_of, 8)
        weyl = np.uint64(_BOOST_SEED) + ((lengths >> 3) + 1).astype(np.uint64) * np.uint64(_WEYL)
        hashes ^= _mulx(tails + weyl)
        return (_mulx(hashes + weyl) & np.uint64(_MASK)).astype(np.uint32)


_CLIENT_HASHES: dict[Routing, tuple[Callable[[pa.Array], Hashes], int]] = {
    Routing.MURMUR2: (murmur2, _MASK_WITHOUT_SIGN),
    Routing.CRC32: (crc32, _MASK),
    Routing.PULSAR_JAVA: (java_string, _MASK_WITHOUT_SIGN),
    Routing.PULSAR_CPP: (boost_string, _MASK_WITHOUT_SIGN),
    Routing.PULSAR_GO: (go_string, _MASK),
}
"""The default hash of a client, and the mask of the hash's bits that count."""


def murmur3_32_of(key: bytes, hashed: int, first_block: int) -> int:
    """The hash of one long key after its blocks from `first_block` on; `hashed` is the hash before
    these blocks."""
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
        mixed = (word * _MURMUR2_FACTOR) & _MASK
        mixed = ((mixed ^ mixed >> 24) * _MURMUR2_FACTOR) & _MASK
        hashed = ((hashed * _MURMUR2_FACTOR) & _MASK) ^ mixed
    return hashed


class _Layout(NamedTuple):
    """Where each value starts, how long the value is (null: 0), and the bytes of all values."""

    starts: Counts
    lengths: Counts
    content: Bytes


def _layout(keys: pa.Array) -> _Layout:
    content, offsets = keys.buffers()[2], offsets_of(keys)
    starts = offsets[:-1].astype(np.int64)
    lengths = np.diff(offsets).astype(np.int64)
    if keys.null_count:
        lengths[as_numpy(keys.is_null())] = 0
    if content is None:
        return _Layout(starts, lengths, np.zeros(0, dtype=np.uint8))
    return _Layout(starts, lengths, np.frombuffer(content, dtype=np.uint8))


def _mix_blocks(
    hashes: Hashes,
    starts: Counts,
    lengths: Counts,
    content: Bytes,
    mix: Callable[[Any, Any, int], Any],
    rest_of: Callable[[bytes, int, int], int],
    width: int = 4,
) -> None:
    """Mixes the whole blocks of `width` bytes into the hashes, block by block. `mix` mixes one
    block (by its number) for all rows that have the block. When only few rows have more blocks,
    `rest_of` mixes all further blocks of one row."""
    blocks = lengths // width
    words = _words(content, width)
    common = int(blocks.min()) if len(blocks) > ONE_BY_ONE_ROWS else 0
    for number in range(common):  # every row has these blocks
        hashes[:] = mix(hashes, words[starts + width * number], number)
    rows, number = np.flatnonzero(blocks > common), common
    while len(rows) > ONE_BY_ONE_ROWS:
        hashes[rows] = mix(hashes[rows], words[starts[rows] + width * number], number)
        number += 1
        rows = rows[blocks[rows] > number]
    for row in rows.tolist():
        start = int(starts[row])
        key = content[start : start + int(lengths[row])].tobytes()
        hashes[row] = rest_of(key, int(hashes[row]), number)


def _tails(starts: Counts, lengths: Counts, content: Bytes) -> Hashes:
    """The last 1 to 3 bytes of each row, after the row's whole blocks of four; else 0."""
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


def _mix_murmur3(hashes: Hashes, block: Hashes, number: int) -> Hashes:
    return _rotate(hashes ^ _scramble(block), 13) * np.uint32(5) + np.uint32(0xE6546B64)


def _mix_murmur2(hashes: Hashes, block: Hashes, number: int) -> Hashes:
    block = block * np.uint32(_MURMUR2_FACTOR)
    block ^= block >> np.uint32(24)
    return hashes * np.uint32(_MURMUR2_FACTOR) ^ block * np.uint32(_MURMUR2_FACTOR)


def _mix_crc(hashes: Hashes, block: Bytes, number: int) -> Hashes:
    changes: Hashes = _CRC_TABLE[(hashes ^ block) & np.uint32(0xFF)]
    return changes ^ (hashes >> np.uint32(8))


def _crc_of(key: bytes, hashed: int, first_byte: int) -> int:
    return zlib.crc32(key[first_byte:], hashed ^ _MASK) ^ _MASK


def _mix_31(hashes: Hashes, block: Bytes, number: int) -> Hashes:
    return hashes * np.uint32(31) + block


def _bytes31(key: bytes, hashed: int, first_byte: int) -> int:
    return _units31(key[first_byte:], hashed)


def _units31(units: Iterable[int], hashed: int) -> int:
    for unit in units:
        hashed = (31 * hashed + unit) & _MASK
    return hashed


def _mix_boost(hashes: Longs, block: Longs, number: int) -> Longs:
    return hashes ^ _mulx(block + np.uint64((_BOOST_SEED + (number + 1) * _WEYL) & _MASK64))


def _boost_of(key: bytes, hashed: int, first_block: int) -> int:
    for number, word in enumerate(np.frombuffer(key, "<u8", len(key) // 8).tolist()):
        if number >= first_block:
            product = ((word + _BOOST_SEED + (number + 1) * _WEYL) & _MASK64) * _BOOST
            hashed ^= (product ^ product >> 64) & _MASK64
    return hashed


def _mulx(values: Longs) -> Longs:
    """Each value times _BOOST, a product of 128 bits: its upper half xored with its lower half."""
    half, low, high = np.uint64(32), np.uint64(_BOOST & _MASK), np.uint64(_BOOST >> 32)
    below, above = values & np.uint64(_MASK), values >> half
    first, left, right = below * low, below * high, above * low
    middle = (first >> half) + (left & np.uint64(_MASK)) + (right & np.uint64(_MASK))
    lower = (first & np.uint64(_MASK)) | (middle << half)
    upper: Longs = above * high + (left >> half) + (right >> half) + (middle >> half)
    folded: Longs = lower ^ upper
    return folded


def _words(content: Bytes, width: int = 4) -> npt.NDArray[Any]:
    """A view of the bytes as little-endian words; a word begins at each byte."""
    count = max(0, len(content) - width + 1)
    return np.ndarray(count, dtype=f"<u{width}", buffer=content.data, strides=(1,))


def _scramble(block: Hashes) -> Hashes:
    return _rotate(block * _C1, 15) * _C2


def _rotate(value: Hashes, bits: int) -> Hashes:
    return (value << np.uint32(bits)) | (value >> np.uint32(32 - bits))


def finish_murmur3(value: Hashes) -> Hashes:
    """murmur3's last step, which spreads every bit; changes the array."""
    value ^= value >> np.uint32(16)
    value *= np.uint32(0x85EBCA6B)
    value ^= value >> np.uint32(13)
    value *= np.uint32(0xC2B2AE35)
    return value ^ (value >> np.uint32(16))
