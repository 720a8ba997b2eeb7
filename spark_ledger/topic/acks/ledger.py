"""A ledger of positions and acknowledgements: appending to it, and reading what it has.

Always true: a write counts once all its entries are acknowledged, synced on Qa bookies. A process
that reads a ledger to go on from its states fences the ledger first, so that the process misses no
later write. An entry that is damaged on every copy is passed over, and the fold decides which
states are then unknown. An entry that cannot be read now is an error. A ledger that was made before
a person accepted an older metadata store is not read: its offsets may belong to other rows now.
"""

import asyncio
import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from spark_ledger import errors
from spark_ledger.ledger.client import LedgerStore
from spark_ledger.ledger.reader import AsyncLedgerReader
from spark_ledger.ledger.writer import AsyncLedgerWriter
from spark_ledger.metadata import cluster, paths
from spark_ledger.metadata.cluster import IDS_PER_EPOCH
from spark_ledger.metadata.store import StoreError
from spark_ledger.metadata.store_calls import read
from spark_ledger.topic.acks.entries import (
    NO_SNAPSHOT,
    AckEntry,
    AckFold,
    BadAckEntry,
    WriteKind,
    decode,
)
from spark_ledger.topic.acks.steps import AckLedgerSize

GOOD_ENTRY_WITHIN = 10

Decode = Callable[[bytes | memoryview], AckEntry]
"""Raises BadAckEntry, errors.UnsupportedFormat."""

_log = logging.getLogger(__name__)


@dataclass(slots=True)
class OpenAckLedger:
    """The ledger that its owner appends to, one write at a time. A snapshot is a write of all
    states; `snapshot` is the first entry of the last snapshot."""

    writer: AsyncLedgerWriter
    opened_s: float
    snapshot: int = NO_SNAPSHOT
    entries: int = 0
    appended_bytes: int = 0
    bytes_before_snapshot: int = 0
    snapshot_bytes: int = 0

    @property
    def size(self) -> AckLedgerSize:
        return AckLedgerSize(
            self.entries,
            self.entries - max(self.snapshot, 0),
            self.appended_bytes - self.bytes_before_snapshot,
            self.snapshot_bytes,
            self.opened_s,
            len(self.writer.record.fragments),
        )

    async def append(self, kind: WriteKind, entries: Sequence[bytes]) -> None:
        """All entries of a write are durable when this returns. Raises errors.LedgerError."""
        first, bytes_before = self.entries, self.appended_bytes
        self.entries += len(entries)
        self.appended_bytes += sum(map(len, entries))
        adds = [self.writer.append(entry) for entry in entries]
        outcomes = await asyncio.gather(*adds, return_exceptions=True)
        for outcome in outcomes:
            if isinstance(outcome, BaseException):
                raise outcome
        if kind is WriteKind.SNAPSHOT:
            self.snapshot, self.bytes_before_snapshot = first, bytes_before
            self.snapshot_bytes = self.appended_bytes - bytes_before


async def fold_ledger(
    fold: AckFold, ledgers: LedgerStore, ledger_id: int, *, fence: bool, decode: Decode = decode
) -> None:
    """Adds the ledger's entries to `fold`, from the last snapshot on. With `fence` the ledger gets
    no more writes; without `fence` a later write may be under way. Raises errors.NoSuchLedger,
    errors.DataUnavailable, errors.Unavailable, errors.NotEnoughBookies, errors.UnsupportedFormat.
    """
    reader = await ledgers.open(ledger_id, recover=fence, small=True)
    if not reader.is_closed:
        await reader.refresh_last_add_confirmed()
    last, next_id = reader.last_add_confirmed, 0
    last_good = await _last_good_entry(reader, last, decode)
    if last_good is not None:
        good_id, good_entry = last_good
        if good_entry.is_whole_snapshot:
            fold.add(good_entry)
            next_id = good_id + 1
        elif NO_SNAPSHOT < good_entry.snapshot <= good_id:
            next_id = good_entry.snapshot  # where the last snapshot before this entry begins
    while next_id <= last:
        try:
            async for entry_id, entry in reader.read(next_id, last):
                add_entry(fold, entry.payload, f"{ledger_id}, entry {entry_id}", decode)
                next_id = entry_id + 1
        except errors.DigestMismatch as error:
            _log.error("ack ledger %d: entry %d is damaged: %s", ledger_id, next_id, error)
            fold.damaged()
            next_id += 1


async def _last_good_entry(
    reader: AsyncLedgerReader, last: int, decode: Decode
) -> tuple[int, AckEntry] | None:
    for entry_id in range(last, max(last - GOOD_ENTRY_WITHIN, -1), -1):
        try:
            return entry_id, decode((await reader.read_entry(entry_id)).payload)
        except (BadAckEntry, errors.DigestMismatch):
            continue
    return None


def add_entry(
    fold: AckFold, payload: bytes | memoryview, where: str, decode: Decode = decode
) -> None:
    try:
        fold.add(decode(payload))
    except BadAckEntry as error:
        _log.error("acknowledgements in %s are damaged: %s", where, error)
        fold.damaged()


async def is_of_this_store(ledgers: LedgerStore, ledger_id: int, epoch: int | None = None) -> bool:
    """Whether no person has accepted an older metadata store since the ledger was made. `epoch` is
    the present epoch of the cluster (None: the epoch is read). Raises StoreUnavailable."""
    if epoch is None:
        node = await read(ledgers.metadata, paths.CLUSTER)
        epoch = 0 if node is None else cluster.decode(node.value).epoch
    if ledger_id // IDS_PER_EPOCH == epoch:
        return True
    _log.warning("ledger %d of positions is of an earlier metadata store", ledger_id)
    return False


async def discard_ledger(
    ledgers: LedgerStore, ledger_id: int, undeleted: dict[int, None] | None = None
) -> None:
    """Closes and deletes a ledger of positions or acknowledgements that no node names any more. If
    that fails, the ledger is put into `undeleted`, for a caller that tries again; without
    `undeleted` the janitor deletes it after its intent has ended."""
    try:
        await ledgers.recover(ledger_id)
        await ledgers.delete(ledger_id)
    except (errors.LedgerError, StoreError) as error:
        _log.info("ledger %d of positions is deleted later: %s", ledger_id, error)
        if undeleted is not None:
            undeleted[ledger_id] = None
