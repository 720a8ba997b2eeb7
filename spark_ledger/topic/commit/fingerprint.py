"""A batch as one number: the same rows give the same number in any order and over any tasks.

A row's hash is made of the hashes of its columns and of the columns' names; the fingerprint is the
sum of the rows' hashes modulo 2**64. Bytes are hashed as 64-bit words. Each word is xored with its
own upper half, so that every bit changes 32 bits of the product at least; the word is then
multiplied by an odd number that depends on the word's place. The products are summed, and the sum
and the length are mixed. Always true: a fingerprint depends neither on the process nor on the
version of numpy or pyarrow, since it is compared with a fingerprint that another process stored.
Batches that differ by chance get different fingerprints; an adversary can make two batches with the
same fingerprint.
"""

import hashlib
from collections import Counter
from collections.abc import Iterable

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from spark_ledger.topic.entry.arrow_arrays import (
    OFFSET_BYTES,
    as_numpy,
    is_any,
    of_numpy,
    offsets_of,
)
from spark_ledger.topic.log.records import Content

ALGORITHM = 1
"""Each fingerprint begins with this number: replay.py compares only fingerprints of one algorithm.
"""
SLICE_BYTES = 32 << 20
"""About this many bytes are hashed at a time; padded values are in memory twice."""
PADDED_RATIO_MAX = 2
"""Values are padded to the longest value if they then take at most this many times the bytes."""

U64 = npt.NDArray[np.uint64]
_MASK = (1 << 64) - 1
_BLOCK_WORDS = 512
_CACHED_WORDS = 25_000  # a block of this many words stays in a core's cache
_NARROW_WORDS = 4  # values of this many words or fewer are summed faster word by word
_HALF_BITS = np.uint64(32)
_LENGTH_FACTOR, _NULL_NUMBER = np.uint64(0x9E3779B97F4A7C15), np.uint64(0xD1B54A32D192ED03)
_MIX_1, _MIX_2 = np.uint64(0xBF58476D1CE4E5B9), np.uint64(0x94D049BB133111EB)
_BLOCK_FACTOR = 0xDA942042E4DD58B5  # the factor between the places of a block and of the next block
_ITEM_FACTOR = np.uint64(0xC2B2AE3D27D4EB4F)  # the factor of an item's place in a list
_PLACE_FACTORS = np.frombuffer(
    b"".join(hashlib.blake2b(b"%d" % i, digest_size=64).digest() for i in range(_BLOCK_WORDS // 8)),
    dtype="<u8",
) | np.uint64(1)


class Fingerprint:
    """The fingerprint of one task's rows. Not for several threads."""

    def __init__(self) -> None:
        self._rows = 0
        self._sum = 0

    def add(self, rows: pa.RecordBatch) -> None:
        if not rows.num_rows:
            return
        self._rows += rows.num_rows
        step = max(1, rows.num_rows * SLICE_BYTES // max(1, rows.get_total_buffer_size()))
        for start in range(0, rows.num_rows, step):
            self._sum += int(row_hashes(rows.slice(start, step)).sum())

    @property
    def content(self) -> Content:
        return Content(self._rows, f"{ALGORITHM}-{self._sum & _MASK:016x}")


def batch_content(tasks: Iterable[Content]) -> Content:
    """The content of a batch, made of the contents of its tasks, which all used ALGORITHM."""
    rows, total = 0, 0
    for task in tasks:
        rows += task.rows
        total += int(task.fingerprint.partition("-")[2], 16)
    return Content(rows, f"{ALGORITHM}-{total & _MASK:016x}")


def row_hashes(rows: pa.RecordBatch) -> U64:
    """The hash of each row, which depends on the names of the columns, not on their order."""
    total = np.zeros(rows.num_rows, np.uint64)
    seen: Counter[str] = Counter()
    for name, column in zip(rows.schema.names, rows.columns, strict=True):
        place = hashlib.blake2b(f"{name}:{seen[name]}".encode(), digest_size=8).digest()
        seen[name] += 1
        folded = _fold_halves(_value_numbers(column))
        folded *= np.frombuffer(place, "<u8") | np.uint64(1)
        total += folded
    return _mix(total)


def _value_numbers(column: pa.Array) -> U64:
    """One number for each value of a column of any type that Spark has; the caller has to `_mix`
    the numbers."""
    kind = column.type
    if pa.types.is_struct(kind) and not kind.num_fields:
        numbers = np.zeros(len(column), np.uint64)
    elif pa.types.is_struct(kind):
        names = [field.name for field in kind]
        numbers = row_hashes(pa.RecordBatch.from_arrays(column.flatten(), names))
    elif pa.types.is_map(kind) or pa.types.is_list(kind) or pa.types.is_large_list(kind):
        numbers = _list_numbers(column)
    elif pa.types.is_null(kind):
        return np.full(len(column), _NULL_NUMBER)
    elif pa.types.is_boolean(kind):
        numbers = as_numpy(column).astype(np.uint64)
    elif is_any(kind, OFFSET_BYTES):
        numbers = _byte_numbers(column)
    elif is_any(kind, _FIXED_WIDTH_CHECKS):
        numbers = _fixed_width_numbers(column)
    else:  # types that Spark does not give: views of bytes, and types that can be cast to bytes
        numbers = _byte_numbers(column.cast(pa.large_binary()))
    return (
        np.where(as_numpy(column.is_null()), _NULL_NUMBER, numbers)
        if column.null_count
        else numbers
    )


_FIXED_WIDTH_CHECKS = (pa.types.is_primitive, pa.types.is_decimal, pa.types.is_fixed_size_binary)


def _fixed_width_numbers(column: pa.Array) -> U64:
    """Numbers made of the bytes of numbers, times and decimals."""
    width, count = column.type.bit_width // 8, len(column)
    data = column.buffers()[1]
    if data is None or not count:
        return np.zeros(count, np.uint64)
    raw = np.frombuffer(data, np.uint8, count * width, column.offset * width)
    if width in (1, 2, 4, 8):
        return raw.view(f"<u{width}").astype(np.uint64, copy=False)
    words = np.zeros((count, -(-width // 8) * 8), np.uint8)
    words[:, :width] = raw.reshape(count, width)
    return _word_numbers(words.view("<u8"), width)


def _list_numbers(column: pa.Array) -> U64:
    """For each list the sum of its length and of its items' hashes, into each of which the item's
    place was mixed."""
    offsets = as_numpy(column.offsets).astype(np.int64)
    first, last = int(offsets[0]), int(offsets[-1])
    if pa.types.is_map(column.type):
        parts = [column.keys.slice(first, last - first), column.items.slice(first, last - first)]
        items = row_hashes(pa.RecordBatch.from_arrays(parts, ["key", "value"]))
    else:
        items = _value_numbers(column.values.slice(first, last - first))
    lengths = np.diff(offsets)
    places = (np.arange(first, last) - np.repeat(offsets[:-1], lengths)).astype(np.uint64)
    sums = np.zeros(last - first + 1, np.uint64)
    np.cumsum(_mix(items + places * _ITEM_FACTOR), out=sums[1:])
    hashes: U64 = sums[offsets[1:] - first] - sums[offsets[:-1] - first]
    return hashes + lengths.astype(np.uint64) * _LENGTH_FACTOR


def _byte_numbers(column: pa.Array) -> U64:
    """Numbers made of text and bytes of any lengths."""
    count, content = len(column), column.buffers()[2]
    if not count or content is None:
        return _word_numbers(np.zeros((count, 1), np.uint64), 0)
    offsets = offsets_of(column).astype(np.int64)
    lengths = np.diff(offsets)
    longest, total = int(lengths.max()), int(offsets[-1] - offsets[0])
    if count * longest == total and longest and longest % 8 == 0:
        content_bytes = np.frombuffer(content, np.uint8, total, int(offsets[0]))
        return _word_numbers(content_bytes.view("<u8").reshape(count, -1), longest)
    if longest <= 8 or count * longest <= PADDED_RATIO_MAX * total + (1 << 16):
        return _word_numbers(_pad(offsets, content, longest), lengths)
    hashes = np.empty(count, np.uint64)
    is_short = lengths <= max(8, total // count)  # both groups have values, and are padded less
    for indices in (np.flatnonzero(is_short), np.flatnonzero(~is_short)):
        hashes[indices] = _byte_numbers(column.take(of_numpy(indices)))
    return hashes


def _pad(offsets: npt.NDArray[np.int64], content: pa.Buffer, longest: int) -> U64:
    """A row of words for each value, with zeros after the value's end."""
    count, words = len(offsets) - 1, max(1, -(-longest // 8))
    buffers = [None, pa.py_buffer(offsets), content]
    text = pa.Array.from_buffers(pa.large_string(), count, buffers)
    padded = pc.ascii_rpad(text, width=8 * words, padding="\0")
    return np.frombuffer(padded.buffers()[2], "<u8", words * count).reshape(count, words)


def _word_numbers(words: U64, lengths: npt.NDArray[np.int64] | int) -> U64:
    """The number of each value; a value is a row of `words`. Only the first `lengths` bytes of a
    row belong to the value; the other bytes are zeros."""
    count, width = words.shape
    sizes = np.broadcast_to(np.asarray(lengths, np.uint64), count)
    if width <= _NARROW_WORDS:
        sums = sizes * _LENGTH_FACTOR
        for at, word in enumerate(_fold_halves(words.T)):
            sums += word * _PLACE_FACTORS[at]
        return sums
    sums = np.zeros(count, np.uint64)
    step = max(1, _CACHED_WORDS // max(1, min(width, _BLOCK_WORDS)))
    folded = np.empty((min(step, count), min(width, _BLOCK_WORDS)), np.uint64)
    factor = 1
    for left in range(0, width, _BLOCK_WORDS):
        for top in range(0, count, step):
            block = words[top : top + step, left : left + _BLOCK_WORDS]
            block_folded = folded[: block.shape[0], : block.shape[1]]
            _fold_halves(block, out=block_folded)
            part = np.einsum("ij,j->i", block_folded, _PLACE_FACTORS[: block.shape[1]])
            sums[top : top + step] += part if not left else part * np.uint64(factor)
        factor = factor * _BLOCK_FACTOR & _MASK
    return sums + sizes * _LENGTH_FACTOR


def _fold_halves(value: U64, out: U64 | None = None) -> U64:
    """Each word xored with its own upper half."""
    halves = np.right_shift(value, _HALF_BITS, out=out)
    return np.bitwise_xor(value, halves, out=halves)


def _mix(value: U64) -> U64:
    """A number whose every bit depends on every bit of `value`."""
    value = (value ^ (value >> np.uint64(30))) * _MIX_1
    value = (value ^ (value >> np.uint64(27))) * _MIX_2
    mixed: U64 = value ^ (value >> np.uint64(31))
    return mixed
