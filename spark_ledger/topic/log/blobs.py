"""Blobs: bytes of the topic layer that are too big for the metadata store, kept in ledgers.

A blob's bytes fill consecutive entries of one ledger, of 4 MiB at most each; the blob's pointer has
the length and the CRC of the bytes. Always true: a blob is in a synced ledger, and was acknowledged
entry by entry and read back before its pointer is returned. The writer waited some seconds for
every copy, and wrote the blob to a second ledger if copies were still missing (hazard 8). No other
writer gets the ledger until the node that names the blob is written. The multi that writes this
node checks the ledger's record, so the multi fails if another process recovered or deleted the
ledger meanwhile. If only one node may name a ledger of the intent (`Intent.names_once`), a writer
takes a new ledger, and adds nothing to the ledger after that node is written (hazard 94).
"""

import asyncio
from collections.abc import AsyncIterator, Iterable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from functools import partial

import pyarrow as pa

from bookie_server.api.entry import HEADER_BYTES, Buffer, payload_crc
from spark_ledger import errors
from spark_ledger.async_tasks import SharedTasks
from spark_ledger.ledger.client import LedgerStore
from spark_ledger.metadata import paths
from spark_ledger.metadata.store import Check
from spark_ledger.process import LruCache
from spark_ledger.topic.log.intents import Intent
from spark_ledger.topic.log.ledger_cache import LedgerCache, TaskLedger
from spark_ledger.topic.log.policies import TopicPolicies
from spark_ledger.topic.log.segment_table import BlobPointer, SegmentTable, TableChunk
from spark_ledger.topic.log.segments import Segment

ENTRY_BYTES_MAX = 4 * 1024 * 1024
UNPACKED_BYTES_MAX = 256 * 1024 * 1024
REPLICATED_WAIT_S = 2.0
FAILED_LEDGERS_MAX = 3  # for one blob; then the caller gets the error of the last ledger
_ZSTD = pa.Codec("zstd")


@dataclass(frozen=True, slots=True)
class StoredEntries:
    """Entries `first` to `last` of a ledger. When they were acknowledged, the ledger's record had
    the version `metadata_version` or an older version."""

    ledger_id: int
    metadata_version: int
    first: int
    last: int


class Blobs:
    """Writes the blobs of one process."""

    def __init__(self, ledgers: LedgerStore, cache: LedgerCache) -> None:
        self.ledgers = ledgers
        self.cache = cache

    @asynccontextmanager
    async def writer(
        self, intent: Intent, topic_id: str, policies: TopicPolicies
    ) -> AsyncIterator["BlobWriter"]:
        """A writer of blobs and entries for the topic under an open intent. No other writer gets
        its ledgers before the `async with` block ends."""
        synced = replace(policies, durability="synced")
        blob_writer = BlobWriter(self, intent, topic_id, synced)
        try:
            yield blob_writer
        finally:
            blob_writer.release()


class BlobWriter:
    """Writes blobs and entries to ledgers that no other writer has. Made by Blobs.writer; takes one
    call at a time."""

    def __init__(
        self, blobs: Blobs, intent: Intent, topic_id: str, policies: TopicPolicies
    ) -> None:
        self._ledgers = blobs.ledgers
        self._cache = blobs.cache
        self._acquire_arguments = topic_id, policies, intent
        self._named_once = intent.names_once
        self._ledger: TaskLedger | None = None
        self._last_entry_by_ledger: dict[int, int] = {}
        """By ledger the last entry that `store` returned."""

    async def write(self, data: Buffer, *, every_copy: bool = False) -> BlobPointer:
        """Stores the bytes. When this returns, the bytes are durable and were read back: at least
        Qa bookies have them, and all Qw bookies if these responded in time. With `every_copy` fewer
        copies than Qw are an error.

        Raises errors.LedgerFenced (the intent ended), errors.NotEnoughBookies, errors.Unavailable,
        or the error of the last of FAILED_LEDGERS_MAX ledgers. ValueError for no bytes.
        """
        view = memoryview(data).cast("B")
        if not len(view):
            raise ValueError("a blob has at least one byte")
        size = min(ENTRY_BYTES_MAX, self._ledgers.config.entry_bytes_max - HEADER_BYTES)
        parts = [view[at : at + size] for at in range(0, len(view), size)]
        stored = await self.store(parts, [0] * len(parts), every_copy=every_copy)
        pointer = BlobPointer(
            *(stored.ledger_id, stored.metadata_version, stored.first, stored.last),
            *(len(view), payload_crc([view])),
        )
        await read_blob(self._ledgers, pointer)
        return pointer

    async def store(
        self, payloads: Sequence[Buffer], rows: Sequence[int], *, every_copy: bool = False
    ) -> StoredEntries:
        """Stores the payloads as consecutive entries of one ledger; `rows` has the number of rows
        of each payload. The entries are as durable as after `write`, but were not read back. Raises
        as `write`."""
        stored, missing = await self._store_once(payloads, rows)
        if missing:
            try:
                stored, missing = await self._store_once(payloads, rows)
            except errors.LedgerError:
                if every_copy:
                    raise
        if missing and every_copy:
            raise errors.Unavailable(
                f"copies are missing in each of two ledgers: bookies {', '.join(missing)} did not"
                " confirm their copies"
            )
        self._last_entry_by_ledger[stored.ledger_id] = stored.last
        return stored

    async def checks(self) -> list[Check]:
        """For the multi that names the blobs: checks that fail if the record of a ledger has
        changed since this call. Then the caller calls this again. Raises errors.NoSuchLedger;
        errors.RowsLost if a ledger lost stored entries."""
        checks = []
        for ledger_id, last in self._last_entry_by_ledger.items():
            current = await self._ledgers.record(ledger_id, fresh=True)
            end = current.record.last_entry
            if end is not None and end < last:
                raise errors.RowsLost(
                    f"ledger {ledger_id} was closed at entry {end}, but {last} was acknowledged"
                )
            checks.append(Check(paths.ledger(ledger_id), current.version))
        return checks

    def release(self) -> None:
        """Gives the ledger back to the cache, or closes a ledger that only one node may name."""
        if self._named_once:
            self._discard_ledger()
        elif self._ledger is not None:
            self._cache.release(self._ledger)
            self._ledger = None

    async def _store_once(
        self, payloads: Sequence[Buffer], rows: Sequence[int]
    ) -> tuple[StoredEntries, list[str]]:
        """Stores the payloads in one ledger. Returns the stored entries, and the bookies that did
        not confirm their copies in time. If there are such bookies, the ledger is discarded, so
        that the next ledger has bookies that respond."""
        failed = 0
        while True:
            ledger = await self._open()
            try:
                stored = await self._append(ledger, payloads, rows)
            except errors.MessageTooBig:
                raise
            except errors.LedgerError:
                self._discard_ledger()
                failed += 1
                if failed >= FAILED_LEDGERS_MAX:
                    raise
                continue
            missing = await ledger.writer.wait_for_copies(REPLICATED_WAIT_S, stored.first)
            if missing:
                self._discard_ledger()
            return stored, missing

    async def _open(self) -> TaskLedger:
        if self._ledger is None:
            self._ledger = await self._cache.acquire(*self._acquire_arguments, new=self._named_once)
        return self._ledger

    def _discard_ledger(self) -> None:
        """Closes the ledger for more entries; its acknowledged entries stay."""
        if self._ledger is not None:
            self._cache.discard(self._ledger)
            self._ledger = None

    async def _append(
        self, ledger: TaskLedger, payloads: Sequence[Buffer], rows: Sequence[int]
    ) -> StoredEntries:
        """Appends all payloads and waits for their acknowledgements. Raises the error of the first
        payload that failed."""
        ledger_writer = ledger.writer
        first = ledger_writer.last_add_pushed + 1
        acks: list[asyncio.Future[int]] = []
        try:
            for payload, count in zip(payloads, rows, strict=True):
                await ledger_writer.room()
                acks.append(ledger_writer.append(payload, count))
                ledger.bytes += len(payload)
        finally:
            outcomes = await asyncio.gather(*acks, return_exceptions=True)
        for outcome in outcomes:
            if isinstance(outcome, BaseException):
                raise outcome
        last = first + len(payloads) - 1
        assert list(outcomes) == list(range(first, last + 1)), "there is no other writer"
        return StoredEntries(ledger_writer.ledger_id, ledger_writer.version, first, last)


async def read_blob(ledgers: LedgerStore, pointer: BlobPointer) -> bytes:
    """The blob's bytes, with the length and the CRC of the pointer.

    Raises errors.NoSuchLedger (the node that names the blob was replaced since: read the node
    again), errors.DataUnavailable, errors.DigestMismatch, errors.Unavailable.
    """
    reader = await ledgers.open(
        pointer.ledger_id, recover=False, min_version=pointer.metadata_version
    )
    try:
        entries = reader.read(pointer.first, pointer.last, known_confirmed=pointer.last)
        parts = [entry.payload async for _, entry in entries]
    except errors.NoSuchEntry as error:  # the ledger was closed before the end of the blob
        raise errors.DataUnavailable(f"{_place_of(pointer)} is cut off: {error.what}") from error
    size = sum(map(len, parts))
    if size != pointer.bytes or payload_crc(parts) != pointer.crc:
        raise errors.DigestMismatch(
            f"{_place_of(pointer)} has {size} bytes with another checksum than its pointer"
        )
    return b"".join(parts)


def stored_segments(segments: Sequence[Segment], stored: StoredEntries) -> tuple[Segment, ...]:
    """The inline segments, changed so that their payloads are in the stored entries, in order."""
    segments_in_ledger, entry = [], stored.first
    for segment in segments:
        last = entry + len(segment.inline) - 1
        segments_in_ledger.append(
            replace(
                segment,
                ledger_id=stored.ledger_id,
                metadata_version=stored.metadata_version,
                entries=((entry, last),),
                inline=(),
            )
        )
        entry = last + 1
    assert entry == stored.last + 1, "each payload has an entry"
    return tuple(segments_in_ledger)


def _place_of(pointer: BlobPointer) -> str:
    return f"the blob in entries {pointer.first}..{pointer.last} of ledger {pointer.ledger_id}"


def pack(data: Buffer) -> bytes:
    """The length of the bytes (8 bytes, little-endian), then the bytes as one zstd frame: the form
    in which bodies and roots are stored."""
    return len(data).to_bytes(8, "little") + bytes(_ZSTD.compress(data, asbytes=True))


def unpack(value: Buffer) -> bytes:
    """The bytes that `pack` got. Raises errors.UnsupportedFormat for a malformed value."""
    view = memoryview(value)
    size = int.from_bytes(view[:8], "little")
    if len(view) <= 8 or size > UNPACKED_BYTES_MAX:
        raise errors.UnsupportedFormat(f"{len(view)} packed bytes cannot hold {size} bytes")
    try:
        data = bytes(_ZSTD.decompress(view[8:], decompressed_size=size, asbytes=True))
    except (pa.ArrowException, OSError) as error:
        raise errors.UnsupportedFormat(f"damaged packed bytes: {error}") from error
    if len(data) != size:
        raise errors.UnsupportedFormat(f"{len(data)} packed bytes instead of {size}")
    return data


# -- a cache of checkpoints' chunks, for the next plan ---------------------------------------------
#
# Always true: the cache keeps the decoded chunks that were used last, KEPT_BYTES_MAX at most. A
# chunk that several callers request at once is read once; READS_AT_ONCE chunks are read at a time.
# Chunks never change, so a kept chunk is never stale.

KEPT_BYTES_MAX = 256 * 1024 * 1024
READS_AT_ONCE = 4


class ChunkStore:
    """Reads chunks and keeps their tables. For one event loop."""

    def __init__(self, ledgers: LedgerStore) -> None:
        self._ledgers = ledgers
        self._kept = LruCache[TableChunk, SegmentTable](KEPT_BYTES_MAX, lambda table: table.nbytes)
        self._reading = SharedTasks[TableChunk, SegmentTable]()
        self._turns = asyncio.Semaphore(READS_AT_ONCE)

    @property
    def kept_bytes(self) -> int:
        """About how much memory the kept chunks take."""
        return self._kept.size

    async def load(self, chunks: Iterable[TableChunk]) -> Mapping[TableChunk, SegmentTable]:
        """The tables of the chunks; a table that is not kept is read.

        Raises errors.NoSuchLedger (a newer checkpoint replaced the chunk: fold again),
        errors.DataUnavailable, errors.DigestMismatch, errors.Unavailable,
        errors.UnsupportedFormat.
        """
        distinct = list(dict.fromkeys(chunks))
        looked_up = ((chunk, self._kept.get(chunk)) for chunk in distinct)
        kept = {chunk: table for chunk, table in looked_up if table is not None}
        missing = [chunk for chunk in distinct if chunk not in kept]
        reads = [self._reading.start(chunk, partial(self._read, chunk)) for chunk in missing]
        tables = await asyncio.gather(*map(asyncio.shield, reads))
        return {**kept, **dict(zip(missing, tables, strict=True))}

    def keep(self, chunk: TableChunk, table: SegmentTable) -> None:
        """Keeps the table of a chunk, so that its writer need not read it."""
        self._kept.put(chunk, table)

    async def close(self) -> None:
        """Cancels the reads under way."""
        await self._reading.close()

    async def _read(self, chunk: TableChunk) -> SegmentTable:
        async with self._turns:
            table = SegmentTable.decode(await read_blob(self._ledgers, chunk.pointer))
        if len(table) != chunk.segments:
            raise errors.UnsupportedFormat(
                f"a chunk in ledger {chunk.pointer.ledger_id} has {len(table)} segments, not"
                f" {chunk.segments}"
            )
        self.keep(chunk, table)
        return table
