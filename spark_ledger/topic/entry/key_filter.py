"""Which entries may hold a key: each entry has a filter of its keys, and an entry of the same
ledger stores these filters.

Always true: a filter matches every key that its entry has, so a skipped entry has no row with the
key. A filter matches another key in about 1 of 85 cases. A filter takes 1.5 bytes for each distinct
key, and at most 7 bytes more. Null is no key. An entry without a filter may hold any key; an empty
filter belongs to an entry without keys. docs/topics.md ("Filters of keys") has the picture, and how
a key's bits in its Bloom filter are chosen.
"""

import struct
from collections.abc import Iterable, Sequence

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from bookie_server.api.entry import Buffer
from spark_ledger import errors
from spark_ledger.topic.entry.arrow_arrays import distinct_values
from spark_ledger.topic.entry.routing import Hashes, finish_murmur3, murmur3_32

MAGIC = b"SLK1"
VERSION = 1
BITS_PER_KEY = 12
ENTRIES_MIN = 4
"""A segment of fewer entries gets no filters: a reader reads all its entries."""

_HEADER = struct.Struct("<4sB3xI")
HEADER_BYTES = _HEADER.size
_PLACE_DTYPE = np.dtype([("partition", "<u4"), ("bytes", "<u4"), ("entry", "<i8")])
Words = npt.NDArray[np.uint64]
Mask = npt.NDArray[np.bool_]


def key_filter(hashes: Hashes) -> bytes:
    """The filter of the keys with these hashes. Hashes may repeat; the array is not changed."""
    if not len(hashes):
        return b""
    spread_hashes = distinct_values(_spread_bits(hashes))  # rising, so `indices` rise, too
    words = -(-len(spread_hashes) * BITS_PER_KEY // 64)
    indices, bits = _bits(spread_hashes, words)
    starts = np.flatnonzero(np.diff(indices, prepend=-1))
    filter_words = np.zeros(words, dtype="<u8")
    filter_words[indices[starts]] = np.bitwise_or.reduceat(bits, starts)
    return filter_words.tobytes()


def encode_filters(filters: Iterable[tuple[int, int, bytes]]) -> bytes:
    """The payload of an entry with these filters, each (partition, entry id, filter), in any
    order."""
    ordered = sorted(filters)
    places = np.array(
        [(p, len(filter_bytes), entry) for p, entry, filter_bytes in ordered], dtype=_PLACE_DTYPE
    )
    head = _HEADER.pack(MAGIC, VERSION, len(ordered))
    return b"".join([head, places.tobytes(), *(filter_bytes for _, _, filter_bytes in ordered)])


class KeyFilters:
    """The filters in the entry that a segment's `filter_entry` names."""

    def __init__(self, payload: Buffer) -> None:
        """Raises errors.UnsupportedFormat if the payload is damaged or of another kind."""
        view = memoryview(payload)
        if len(view) < HEADER_BYTES:
            raise errors.UnsupportedFormat(f"a damaged entry of key filters: {len(view)} bytes")
        magic, version, count = _HEADER.unpack_from(view)
        if (magic, version) != (MAGIC, VERSION):
            raise errors.UnsupportedFormat(
                f"an entry of key filters begins with magic {magic!r}, version {version}, not"
                f" {MAGIC!r}, {VERSION}"
            )
        begin = HEADER_BYTES + count * _PLACE_DTYPE.itemsize
        if len(view) < begin:
            raise errors.UnsupportedFormat(f"a damaged entry of key filters: {count} are missing")
        places = np.frombuffer(view[HEADER_BYTES:begin], dtype=_PLACE_DTYPE)
        ends = begin + np.cumsum(places["bytes"], dtype=np.int64)
        if (int(ends[-1]) if count else begin) != len(view) or (places["bytes"] % 8).any():
            raise errors.UnsupportedFormat(
                f"a damaged entry of key filters: {count} filters in {len(view)} bytes"
            )
        self._filters = {
            (partition, entry): view[end - size : end]
            for (partition, size, entry), end in zip(places.tolist(), ends.tolist(), strict=True)
        }

    def might_contain(self, partition: int, entry_ids: Sequence[int], keys: Hashes) -> Mask:
        """For each entry whether it may hold a row of the partition with one of the keys. `keys`
        are the hashes of the keys (`hashes_of`)."""
        return np.fromiter(
            (self._may_hold(partition, entry, keys) for entry in entry_ids),
            dtype=np.bool_,
            count=len(entry_ids),
        )

    def _may_hold(self, partition: int, entry: int, keys: Hashes) -> bool:
        filter_bytes = self._filters.get((partition, entry))
        if filter_bytes is None:
            return True
        if not len(filter_bytes):
            return False
        words = np.frombuffer(filter_bytes, dtype="<u8")
        indices, bits = _bits(_spread_bits(keys), len(words))
        return bool((words[indices] & bits == bits).any())


def hashes_of(keys: Sequence[bytes]) -> Hashes:
    """The hashes of keys, as `KeyFilters.might_contain` takes them."""
    return murmur3_32(pa.array(keys, pa.binary()))


def _spread_bits(hashes: Hashes) -> Hashes:
    with np.errstate(over="ignore"):
        return finish_murmur3(hashes ^ np.uint32(0x7F4A7C15))


def _bits(spread_hashes: Hashes, words: int) -> tuple[npt.NDArray[np.int64], Words]:
    """For each key the index of its word, which rises with the hash, and its bits in this word."""
    indices = (spread_hashes.astype(np.uint64) * np.uint64(words)) >> np.uint64(32)
    with np.errstate(over="ignore"):
        bit_numbers = finish_murmur3(spread_hashes ^ np.uint32(0x9E3779B9)).astype(np.uint64)
    bit, low = np.uint64(1), np.uint64(63)
    bits = bit << (bit_numbers & low)
    for shift in (6, 12, 18):
        bits |= bit << ((bit_numbers >> np.uint64(shift)) & low)
    return indices.astype(np.int64), bits
