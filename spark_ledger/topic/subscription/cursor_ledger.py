"""The ledger of the positions of a query's subscription, in the form of ack ledgers, and the form
that earlier versions wrote.

Always true: a ledger has the positions of one owner of the subscription, and they only rise in it;
so an entry that is damaged on every copy is passed over, and the positions before it count. A write
is a snapshot, except for a few positions among many, which are changes.

The earlier form: an entry has all positions. Always true: partitions rise, no position is negative.

    0        4     5       6          8          16           20         24
    +--------+-----+-------+----------+----------+------------+----------+
    | "SLC1" | ver | flags | reserved | epoch    | partitions | reserved |
    +--------+-----+-------+----------+----------+------------+----------+
    24  partitions x 4: partition
        partitions x 8: position

All integers are little-endian; epoch and position are signed 64-bit, the rest unsigned 32-bit.
"""

import asyncio
import re
import struct
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field, replace
from itertools import pairwise

from pyroaring import BitMap64

from spark_ledger import errors
from spark_ledger.ledger.client import LedgerStore
from spark_ledger.ledger.records import IdSpent
from spark_ledger.ledger.writer import AsyncLedgerWriter
from spark_ledger.metadata import paths
from spark_ledger.metadata.store import Check, Operation
from spark_ledger.topic.acks.entries import (
    NO_SNAPSHOT,
    AckEntry,
    AckFold,
    AckKey,
    AckRecord,
    BadAckEntry,
    WriteKind,
    decode,
    encode,
)
from spark_ledger.topic.acks.ledger import OpenAckLedger, fold_ledger, is_of_this_store
from spark_ledger.topic.log.intents import Intent, Intents
from spark_ledger.topic.log.policies import TopicPolicies
from spark_ledger.topic.log.topics import read_policies
from spark_ledger.topic.subscription.records import (
    Positions,
    SubscriptionRecord,
    fits,
    later,
    storable,
)

CHANGES_MAX = 50
"""How many entries a reader reads after the last snapshot, at most."""
FEW = 4
"""Moved positions are written as changes if they are at most 1/FEW of the positions."""
NO_OWNER_EPOCH = 0  # of a partition: a query owns no partition


@dataclass(slots=True)
class CursorLedger:
    """An open ledger of a cursor, and the positions in it. Made by `create`."""

    ledger: OpenAckLedger
    fragments_max: int
    positions: Positions = field(default_factory=dict)

    @property
    def id(self) -> int:
        return self.writer.ledger_id

    @property
    def writer(self) -> AsyncLedgerWriter:
        return self.ledger.writer

    def full(self, now_s: float) -> bool:
        """Whether the next write goes to another ledger: this one failed, or is long, old or
        fragmented."""
        is_full = self.ledger.size.is_full(now_s, self.fragments_max)
        return is_full or self.writer.failure is not None

    async def append(self, record: SubscriptionRecord, positions: Positions) -> None:
        """The positions, of the owner that `record` names, are durable when this returns. Raises as
        AsyncLedgerWriter.append; then the ledger is not to be used any more."""
        moved = {p: o for p, o in positions.items() if self.positions.get(p) != o}
        is_few = FEW * len(moved) <= len(positions)
        is_few = is_few and self.ledger.size.entries_since < CHANGES_MAX
        kind = WriteKind.CHANGES if is_few else WriteKind.SNAPSHOT
        written = moved if is_few else positions
        records = _records(record.owner, record.epoch, written)
        entries = encode(kind, NO_OWNER_EPOCH, records, self.ledger.snapshot, compressed=True)
        await self.ledger.append(kind, entries)
        self.positions = dict(positions)


def _records(token: str, epoch: int, positions: Positions) -> list[AckRecord]:
    no_rows = BitMap64()
    return [
        AckRecord(
            AckKey(str(partition), token, epoch),
            *(NO_OWNER_EPOCH, positions[partition], no_rows),
            replaces=True,
        )
        for partition in sorted(positions)
    ]


async def create(
    ledgers: LedgerStore, intents: Intents, intent: Intent, topic_id: str, policies: TopicPolicies
) -> CursorLedger:
    """A ledger with the topic's quorums, always synced, that announces its end to readers.

    Raises errors.LedgerFenced (the intent ended), errors.NotEnoughBookies, errors.Unavailable.
    """
    writer: AsyncLedgerWriter | None = None
    while writer is None:
        ledger_id = await intents.ledger_id(intent)
        with suppress(IdSpent):
            writer = await ledgers.create(
                policies.ensemble_size,
                policies.write_quorum,
                policies.ack_quorum,
                intent=intent.id,
                topic=topic_id,
                ledger_id=ledger_id,
                announce_lac=True,
            )
    now_s = asyncio.get_running_loop().time()
    return CursorLedger(OpenAckLedger(writer, now_s), ledgers.config.fragments_max)


@asynccontextmanager
async def storable_record(
    ledgers: LedgerStore, intents: Intents, topic_id: str, record: SubscriptionRecord
) -> AsyncIterator[tuple[SubscriptionRecord, list[Operation]]]:
    """For a process that moves a query's subscription to the record's floor: the record as a node
    keeps it, and the operations of the multi that writes the record. A floor that does not fit into
    a node is in a ledger of its own, which the janitor deletes if the record is not written. Raises
    as `create` and `CursorLedger.append`; errors.TopicNotFound."""
    if fits(record.floor):
        yield record, []
        return
    policies = (await read_policies(ledgers.metadata, topic_id)).policies
    intent = await intents.open_system_intent("move", topic_id)
    try:
        made = await create(ledgers, intents, intent, topic_id, policies)
        await made.append(record, record.floor)
        await made.writer.close()
        check = Check(paths.intent(intent.id), intent.version)
        yield replace(record, ledger_id=made.id, floor=storable(record.floor)), [check]
    finally:
        await intents.try_finish(intent)


async def last_positions(
    ledgers: LedgerStore, record: SubscriptionRecord, *, fence: bool
) -> Positions:
    """The positions of the record: those of the ledger that it names, or of its floor where that is
    later. With `fence` the ledger's writer adds nothing more; without, a later write may be under
    way.

    Raises errors.NoSuchLedger, errors.DataUnavailable, errors.Unavailable, errors.NotEnoughBookies,
    errors.UnsupportedFormat, StoreError.
    """
    if record.ledger_id is None or not await is_of_this_store(ledgers, record.ledger_id):
        return record.floor
    fold = AckFold(only_rises=True)
    await fold_ledger(fold, ledgers, record.ledger_id, fence=fence, decode=decode_either)
    positions = {
        int(key.name): state.position
        for key, state in fold.states.items()
        if key.epoch <= record.epoch  # otherwise the record is older than its ledger
    }
    return later(record.floor, positions)


_PARTITION = re.compile("[0-9]{1,10}")
OLD_MAGIC = b"SLC1"
OLD_VERSION = 1
_OLD_HEADER = struct.Struct("<4sBBHqII")


def decode_either(payload: bytes | memoryview) -> AckEntry:
    """An entry of a cursor ledger, of either form. Raises as `decode`."""
    if bytes(payload[: len(OLD_MAGIC)]) == OLD_MAGIC:
        return decode_old(payload)
    entry = decode(payload)
    for key, rows in ((record.key, record.rows) for record in entry.records):
        if rows or _PARTITION.fullmatch(key.name) is None:
            raise BadAckEntry(f"a cursor's entry has more than positions: {key.name[:20]!r}")
    return entry


def decode_old(payload: bytes | memoryview) -> AckEntry:
    """The snapshot that an entry of the earlier form is. Raises as `decode`."""
    if len(payload) < _OLD_HEADER.size:
        raise BadAckEntry(f"a cursor's entry of {len(payload)} bytes")
    _, version, flags, _, epoch, count, _ = _OLD_HEADER.unpack_from(payload)
    if version > OLD_VERSION or flags:
        raise errors.UnsupportedFormat(
            f"a cursor's entry of version {version} with flags {flags:#x}, this is {OLD_VERSION}"
        )
    if len(payload) != _OLD_HEADER.size + 12 * count:
        raise BadAckEntry(f"{count} positions in {len(payload)} bytes")
    columns = struct.unpack_from(f"<{count}I{count}q", payload, _OLD_HEADER.size)
    partitions, positions = columns[:count], columns[count:]
    if any(right <= left for left, right in pairwise(partitions)):
        raise BadAckEntry("the partitions of a cursor's positions do not rise")
    if min(positions, default=0) < 0:
        raise BadAckEntry(f"a cursor's position is negative: {min(positions)}")
    records = _records("", epoch, dict(zip(partitions, positions, strict=True)))
    return AckEntry(WriteKind.SNAPSHOT, NO_OWNER_EPOCH, NO_SNAPSHOT, 0, 1, tuple(records))
