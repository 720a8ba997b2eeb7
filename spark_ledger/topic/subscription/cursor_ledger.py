"""The ledger of a cursor's positions: to append positions, and to read the last positions.

Always true: an entry counts once it is acknowledged, synced on Qa bookies. A process that goes on
from the last entry fences the ledger before it reads the entry, so the writer adds no entry that
this process misses. An entry that is damaged on every copy is skipped, and the entry before counts;
an entry that cannot be read now is an error. One entry is under way at a time.

An entry has all positions of the subscription, so the last good entry is enough. Always true:
partitions rise, no position is negative.

    0        4     5       6          8          16           20         24
    +--------+-----+-------+----------+----------+------------+----------+
    | "SLC1" | ver | flags | reserved | epoch    | partitions | reserved |
    +--------+-----+-------+----------+----------+------------+----------+
    24  partitions x 4: partition
        partitions x 8: position

All integers are little-endian; epoch and position are signed 64-bit, the rest unsigned 32-bit. The
CRC is in the ledger entry's own header.
"""

import asyncio
import logging
import struct
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from spark_ledger import errors
from spark_ledger.ledger.client import LedgerStore
from spark_ledger.ledger.records import IdSpent
from spark_ledger.ledger.writer import AsyncLedgerWriter
from spark_ledger.topic.log.intents import Intent, Intents
from spark_ledger.topic.log.policies import OWN_ROLL_S_MAX
from spark_ledger.topic.log.topics import TopicInfo
from spark_ledger.topic.subscription.records import Positions

ENTRIES_MAX = 50_000

_log = logging.getLogger(__name__)

MAGIC = b"SLC1"
VERSION = 1

_HEADER = struct.Struct("<4sBBHqII")
_U32: np.dtype[Any] = np.dtype("<u4")
_I64: np.dtype[Any] = np.dtype("<i8")
assert _HEADER.size == 24

Column = npt.NDArray[Any]


@dataclass(frozen=True, slots=True)
class CursorEntry:
    """`epoch` is the subscription's epoch when the entry was written."""

    epoch: int
    positions: Positions


def encode(entry: CursorEntry) -> bytes:
    """Raises ValueError for positions that break the rules at the head of this file."""
    partitions = sorted(entry.positions)
    columns = (
        np.array(partitions, _U32),
        np.array([entry.positions[p] for p in partitions], _I64),
    )
    problem = _problem(*columns)
    if problem:
        raise ValueError(problem)
    header = _HEADER.pack(MAGIC, VERSION, 0, 0, entry.epoch, len(partitions), 0)
    return header + b"".join(column.tobytes() for column in columns)


def decode(payload: bytes | memoryview) -> CursorEntry:
    """The entry that `encode` got. Raises errors.UnsupportedFormat for a later version, and
    BadCursorEntry for malformed bytes."""
    if len(payload) < _HEADER.size:
        raise BadCursorEntry(f"a cursor's entry of {len(payload)} bytes")
    magic, version, flags, _, epoch, count, _ = _HEADER.unpack_from(payload)
    if magic != MAGIC:
        raise BadCursorEntry(f"a cursor's entry begins with {magic!r}")
    if version > VERSION or flags:
        raise errors.UnsupportedFormat(
            f"a cursor's entry of version {version} with flags {flags:#x}, this is {VERSION}"
        )
    if len(payload) != _HEADER.size + 12 * count:
        raise BadCursorEntry(f"{count} positions in {len(payload)} bytes")
    partitions: Column = np.frombuffer(payload, _U32, count, _HEADER.size)
    positions: Column = np.frombuffer(payload, _I64, count, _HEADER.size + 4 * count)
    problem = _problem(partitions, positions)
    if problem:
        raise BadCursorEntry(problem)
    return CursorEntry(epoch, dict(zip(partitions.tolist(), positions.tolist(), strict=True)))


class BadCursorEntry(Exception):
    """The bytes of a cursor's entry are malformed: the entry before counts."""


def _problem(partitions: Column, positions: Column) -> str:
    """The rule that the positions break; "" if they break no rule."""
    if bool((np.diff(partitions.astype(np.int64)) <= 0).any()):
        return "the partitions of a cursor's positions do not rise"
    if bool((positions < 0).any()):
        return f"a cursor's position is negative: {int(positions.min())}"
    return ""


@dataclass(slots=True)
class CursorLedger:
    """An open ledger of a cursor, and when it was opened. Made by `create`."""

    writer: AsyncLedgerWriter
    opened_s: float
    fragments_max: int
    entries: int = 0

    @property
    def id(self) -> int:
        return self.writer.ledger_id

    def full(self, now_s: float) -> bool:
        """Whether the next entry goes to another ledger, because this ledger failed, is too long or
        too old, or has too many fragments."""
        return (
            self.writer.failure is not None
            or self.entries >= ENTRIES_MAX
            or now_s - self.opened_s >= OWN_ROLL_S_MAX
            or len(self.writer.record.fragments) >= self.fragments_max
        )

    async def append(self, entry: CursorEntry) -> None:
        """The entry is durable when this returns. Raises as AsyncLedgerWriter.append."""
        self.entries += 1
        await self.writer.append(encode(entry))


async def create(
    ledgers: LedgerStore, intents: Intents, intent: Intent, topic: TopicInfo
) -> CursorLedger:
    """A ledger with the topic's quorums, always synced, that announces its end to readers.

    Raises errors.LedgerFenced (the intent ended), errors.NotEnoughBookies, errors.Unavailable.
    """
    policies = topic.policies
    writer: AsyncLedgerWriter | None = None
    while writer is None:
        ledger_id = await intents.ledger_id(intent)
        with suppress(IdSpent):
            writer = await ledgers.create(
                policies.ensemble_size,
                policies.write_quorum,
                policies.ack_quorum,
                intent=intent.id,
                topic=topic.id,
                ledger_id=ledger_id,
                announce_lac=True,
            )
    now_s = asyncio.get_running_loop().time()
    return CursorLedger(writer, now_s, ledgers.config.fragments_max)


async def last_entry(ledgers: LedgerStore, ledger_id: int, *, fence: bool) -> CursorEntry | None:
    """The last good entry; None if there is no good entry. With `fence` the writer can add no later
    entry; without `fence` a later entry may be under way.

    Raises errors.NoSuchLedger, errors.DataUnavailable, errors.Unavailable, errors.NotEnoughBookies,
    errors.UnsupportedFormat.
    """
    reader = await ledgers.open(ledger_id, recover=fence)
    if not reader.is_closed:
        await reader.refresh_last_add_confirmed()
    for entry_id in range(reader.last_add_confirmed, -1, -1):
        with suppress(BadCursorEntry, errors.DigestMismatch):
            payloads = [entry.payload async for _, entry in reader.read(entry_id, entry_id)]
            return decode(payloads[0])
        _log.error("entry %d of cursor ledger %d is damaged", entry_id, ledger_id)
    return None
