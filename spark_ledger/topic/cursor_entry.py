"""The entry of a cursor ledger: where a subscription was, whole.

Always true: each entry has all positions, so the last good one is enough; partitions rise; the
acknowledged ranges [lo, hi) of a partition lie beyond its position, rise and do not touch. (A
query's cursor has none: they are for consumers that acknowledge row by row.)

    0        4     5       6          8          16           20        24
    +--------+-----+-------+----------+----------+------------+---------+
    | "SLC1" | ver | flags | reserved | epoch    | partitions | ranges  |
    +--------+-----+-------+----------+----------+------------+---------+
    24  partitions x 4: partition     ranges x 4: partition
        partitions x 8: position      ranges x 8: lo          ranges x 8: hi

The columns follow each other in the order: partition and position of the positions; partition, lo
and hi of the ranges. All integers are little-endian; epoch, position, lo and hi are signed 64-bit,
the rest unsigned 32-bit. The CRC is in the ledger entry's own header.
"""

import struct
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from spark_ledger import errors
from spark_ledger.topic.subscription_records import Positions

MAGIC = b"SLC1"
VERSION = 1
RANGES_MAX = 10_000
"""Of one entry; more is refused, never left out."""

_HEADER = struct.Struct("<4sBBHqII")
_U32: np.dtype[Any] = np.dtype("<u4")
_I64: np.dtype[Any] = np.dtype("<i8")
assert _HEADER.size == 24

Ranges = tuple[tuple[int, int], ...]
Column = npt.NDArray[Any]


@dataclass(frozen=True, slots=True)
class CursorEntry:
    """`epoch` is the subscription's when it was written; `acked` by partition."""

    epoch: int
    positions: Positions
    acked: Mapping[int, Ranges] = field(default_factory=dict)


def encode(entry: CursorEntry) -> bytes:
    """Raises ValueError for ranges or positions that break the rules above."""
    partitions = sorted(entry.positions)
    ranges = [(p, lo, hi) for p in sorted(entry.acked) for lo, hi in entry.acked[p]]
    columns = (
        np.array(partitions, _U32),
        np.array([entry.positions[p] for p in partitions], _I64),
        np.array([p for p, _, _ in ranges], _U32),
        np.array([lo for _, lo, _ in ranges], _I64),
        np.array([hi for _, _, hi in ranges], _I64),
    )
    problem = _problem(*columns)
    if problem:
        raise ValueError(problem)
    header = _HEADER.pack(MAGIC, VERSION, 0, 0, entry.epoch, len(partitions), len(ranges))
    return header + b"".join(column.tobytes() for column in columns)


def decode(payload: bytes | memoryview) -> CursorEntry:
    """What `encode` made. Raises errors.UnsupportedFormat for a later version, and BadCursorEntry
    for what is no such entry."""
    if len(payload) < _HEADER.size:
        raise BadCursorEntry(f"a cursor's entry of {len(payload)} bytes")
    magic, version, flags, _, epoch, count, ranges = _HEADER.unpack_from(payload)
    if magic != MAGIC:
        raise BadCursorEntry(f"a cursor's entry begins with {magic!r}")
    if version > VERSION or flags:
        raise errors.UnsupportedFormat(
            f"a cursor's entry of version {version} with flags {flags:#x}, this is {VERSION}"
        )
    if len(payload) != _HEADER.size + 12 * count + 20 * ranges:
        raise BadCursorEntry(f"{count} positions and {ranges} ranges in {len(payload)} bytes")
    kinds = (_U32, _I64, _U32, _I64, _I64)
    columns: list[Column] = []
    at = _HEADER.size
    for kind, length in zip(kinds, (count, count, ranges, ranges, ranges), strict=True):
        columns.append(np.frombuffer(payload, kind, length, at))
        at += kind.itemsize * length
    problem = _problem(*columns)
    if problem:
        raise BadCursorEntry(problem)
    partitions, positions = columns[0].tolist(), columns[1].tolist()
    acked: dict[int, list[tuple[int, int]]] = {}
    for partition, lo, hi in zip(*(column.tolist() for column in columns[2:]), strict=True):
        acked.setdefault(partition, []).append((lo, hi))
    found = {partition: tuple(some) for partition, some in acked.items()}
    return CursorEntry(epoch, dict(zip(partitions, positions, strict=True)), found)


class BadCursorEntry(Exception):
    """Bytes that are no cursor's entry: the entry before it counts."""


def _problem(partitions: Column, positions: Column, of: Column, los: Column, his: Column) -> str:
    """Which of the rules is broken, "" for none."""
    if bool((np.diff(partitions.astype(np.int64)) <= 0).any()):
        return "the partitions of a cursor's positions do not rise"
    if bool((positions < 0).any()):
        return f"a cursor's position is negative: {int(positions.min())}"
    if len(of) > RANGES_MAX:
        return f"{len(of)} acknowledged ranges, at most {RANGES_MAX} fit"
    if not len(of):
        return ""
    if not bool(np.isin(of, partitions).all()):
        return "acknowledged ranges of a partition without a position"
    begins = positions[np.searchsorted(partitions, of)]
    same = np.diff(of.astype(np.int64)) == 0
    apart = bool((los[1:][same] > his[:-1][same]).all())
    rising = bool((np.diff(of.astype(np.int64)) >= 0).all())
    if not (rising and apart and bool((los < his).all()) and bool((los > begins).all())):
        return "acknowledged ranges do not rise beyond their partition's position"
    return ""
