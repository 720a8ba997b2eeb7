"""Sealing a live segment: an owner that has stopped seals its own entries; or another process
recovers the ledger, and the segment has the entries of the CLOSED record.

Always true: nothing is added to a segment after its seal was made. An owner that seals has no add
under way, and sends nothing before it has read the log again. Any other process that seals has
fenced and closed the ledger: safety comes from the fence (hazards 29, 30). The rows are those of
the CLOSED record; if the header of the last entry has another count, nothing is sealed (hazard 32).
An entry is an owner's if its payload is a message batch of this partition alone, and the payload
gives the same number of rows before it as the entry's header; any other entry is foreign. An entry
of a later version is an error. Foreign entries at a segment's end, with a valid checksum, are not
part of the segment. Foreign entries between an owner's entries are part of the segment, since the
later entries count their rows; read/bad_entries.py decides what a read does there. A seal is small
however large the ledger is: the number of rows of each entry stays in the entry's header.
"""

import asyncio
import logging
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import aclosing
from dataclasses import dataclass
from types import MappingProxyType

from bookie_server.api.entry import Buffer, Entry
from spark_ledger import errors
from spark_ledger.ledger.client import LedgerStore, VersionedRecord
from spark_ledger.ledger.reader import AsyncLedgerReader
from spark_ledger.metadata.ledger_record import LedgerRecord
from spark_ledger.topic.entry.message_batch import NO_ROWLESS, Header, Rowless, decode_header
from spark_ledger.topic.log.actions import SealLive
from spark_ledger.topic.log.producers import newest_producers
from spark_ledger.topic.log.segments import LiveSegment, Segment

_log = logging.getLogger(__name__)

STEP_MESSAGES, BATCH_COST_MESSAGES = 20_000, 10
"""A step of the event loop walks about this many messages of an entry, 0.5 microseconds each;
parsing a batch takes as long as walking BATCH_COST_MESSAGES messages."""
LOGGED_BYTES = 32
"""How many bytes of a foreign entry a log line shows."""
EVENT_MS_MAX = 2**62
"""A process that seals does not decode producers' messages: a seal allows all event times."""


@dataclass(frozen=True, slots=True)
class Extent:
    """How many entries, rows and bytes a ledger has, from its first entry up to some last entry."""

    entries: int = 0
    rows: int = 0
    bytes: int = 0


EMPTY_EXTENT = Extent()


@dataclass(frozen=True, slots=True)
class ForeignEntry:
    """A foreign entry, and the fault in it. Of its payload only the size and the first bytes are
    kept, since a ledger may end with many foreign entries."""

    entry_id: int
    why: errors.BadEntry
    payload_bytes: int
    first_bytes: bytes


async def seal_live_segment(
    ledgers: LedgerStore, live: LiveSegment, *, accept_damaged: bool = False
) -> SealLive:
    """Recovers the ledger of a live segment, so that the owner can add nothing more; returns the
    action that seals the segment. Reads every entry of a deduplicated segment; of other segments
    only the first and the last entry. Leaves out foreign entries at the end. With `accept_damaged`
    (a person accepted the loss) entries that are damaged on every copy stay in the segment, as rows
    that cannot be read.

    Raises errors.DataUnavailable (the ledger's end cannot be decided now), errors.NotEnoughBookies,
    errors.NoSuchLedger, errors.Unavailable, errors.UnsupportedFormat (a later version wrote the
    last entry, or the entry and the CLOSED record differ), errors.DigestMismatch (the last entry is
    damaged on every copy).
    """
    reader = await ledgers.open(live.ledger_id, recover=True)
    closed_record = VersionedRecord(reader.record, reader.version)
    last, first = reader.last_add_confirmed, live.first_entry
    if last < first:
        return seal_action(
            live, closed_record.version, closed_extent(closed_record, first, live.rows_before), ()
        )
    tail = await read_tail(reader, live, last, accept_damaged=accept_damaged)
    extent = _extent_of(closed_record, live, tail)
    for foreign in () if tail.damaged else tail.foreign:
        log_foreign(live, foreign)
    if extent.entries == first:
        return seal_action(live, closed_record.version, extent, ())
    times = [0 if tail.header is None else tail.header.written_ms]
    if tail.header is not None and extent.entries - 1 > first:
        times.append(await _first_ms(reader, first, last))
    producers: dict[str, int] = {}
    if live.deduplicated:
        await _read_producers(reader, range(first, extent.entries), producers, accept_damaged)
    rowless = NO_ROWLESS if tail.header is None else tail.header.rowless
    return seal_action(live, closed_record.version, extent, times, producers, rowless)


@dataclass(frozen=True, slots=True)
class LedgerTail:
    """The end of a closed ledger: the last entry of its segment, with the entry's header (None: the
    segment has no entry). After this entry there may be `foreign` entries, and `damaged` entries;
    if there are damaged entries, foreign and damaged entries count as entries of the segment."""

    entry: Entry | None
    header: Header | None
    foreign: tuple[ForeignEntry, ...] = ()
    damaged: tuple[int, ...] = ()


async def read_tail(
    reader: AsyncLedgerReader, live: LiveSegment, last: int, *, accept_damaged: bool = False
) -> LedgerTail:
    """The tail up to entry `last`. Raises errors.UnsupportedFormat for an entry of a later version,
    errors.DigestMismatch for a damaged entry, and as AsyncLedgerReader.read_back."""
    foreign, damaged = list[ForeignEntry](), list[int]()
    async with aclosing(reader.read_back(last, live.first_entry, known_confirmed=last)) as entries:
        async for entry_id, entry in entries:
            if isinstance(entry, errors.LedgerError):
                if not is_damaged(entry):
                    raise entry
                if not accept_damaged:
                    raise _damaged_error(live, reader.record, entry_id, entry) from entry
                damaged.append(entry_id)
                continue
            try:
                header = owned_header(live, entry)
            except errors.BadEntry as why:
                size, first_bytes = len(entry.payload), bytes(entry.payload[:LOGGED_BYTES])
                foreign.append(ForeignEntry(entry_id, why, size, first_bytes))
            except errors.UnsupportedFormat as why:
                raise _later_version_error(live, entry_id, why) from why
            else:
                return LedgerTail(entry, header, tuple(foreign), tuple(damaged))
    return LedgerTail(None, None, tuple(foreign), tuple(damaged))


def is_damaged(why: errors.LedgerError) -> bool:
    """Whether a read failed because every copy of the entry is damaged."""
    return isinstance(why, errors.DigestMismatch) or bool(why.facts.get("damaged"))


def _later_version_error(
    live: LiveSegment, entry_id: int, why: errors.UnsupportedFormat
) -> errors.UnsupportedFormat:
    return errors.UnsupportedFormat(
        f"entry {entry_id} of ledger {live.ledger_id}, the last of partition {live.partition}, is"
        f" of a later version: {why.what}",
        "Start a broker of the later version: it opens the partition.",
        ledger_id=live.ledger_id,
        entry_id=entry_id,
    )


def _damaged_error(
    live: LiveSegment, record: LedgerRecord, entry_id: int, why: errors.LedgerError
) -> errors.DigestMismatch:
    end = live.origin + (record.rows or 0)
    return errors.DigestMismatch(
        f"offsets up to {end - 1} of partition {live.partition} cannot be read: entry {entry_id} of"
        f" ledger {live.ledger_id}, the last of them, is damaged on every copy ({why.what})",
        "Restore the bookies' disks, or accept the loss of these rows: `spark-ledger topic repair"
        " NAME`.",
        ledger_id=live.ledger_id,
        entry_id=entry_id,
        partition=live.partition,
        end=end,
    )


def _extent_of(closed_record: VersionedRecord, live: LiveSegment, tail: LedgerTail) -> Extent:
    """The extent of the segment's ledger up to the segment's end. Raises errors.UnsupportedFormat
    if the CLOSED record has another end."""
    record = closed_record.record
    if tail.damaged:
        return closed_extent(closed_record, (record.last_entry or 0) + 1, record.rows or 0)
    if tail.entry is None:
        return Extent(live.first_entry, live.rows_before, live.bytes_before)
    header = tail.entry.header
    if not tail.foreign:
        if header.cumulative_bytes != record.length_bytes:
            raise _other_end_error(closed_record, header.entry_id + 1, header.cumulative_rows)
        return closed_extent(closed_record, header.entry_id + 1, header.cumulative_rows)
    return Extent(header.entry_id + 1, header.cumulative_rows, header.cumulative_bytes)


async def _first_ms(reader: AsyncLedgerReader, first: int, last: int) -> int:
    """When the first entry was stored. 0 if the entry cannot be read, so that a read by time does
    not skip the segment."""
    try:
        entry = await reader.read_entry(first, known_confirmed=last)
        return decode_header(entry.payload).written_ms
    except (errors.BadEntry, errors.DigestMismatch, errors.DataUnavailable) as why:
        if isinstance(why, errors.DataUnavailable) and not is_damaged(why):
            raise
        return 0


async def _read_producers(
    reader: AsyncLedgerReader, ids: range, producers: dict[str, int], accept_damaged: bool
) -> None:
    """Puts each producer of these entries into `producers`, with the last sequence id that it sent;
    the producer that sent last is at the end. Lets other tasks run after each entry, and within an
    entry of many messages."""
    async for entry in _read_entries(reader, ids, accept_damaged):
        try:
            await note_producers(entry.payload, producers)
        except errors.BadEntry as why:
            place = (reader.ledger_id, entry.header.entry_id)
            _log.warning("the producers of entry %d:%d cannot be read: %s", *place, why.what)
        await asyncio.sleep(0)


async def _read_entries(
    reader: AsyncLedgerReader, ids: range, accept_damaged: bool
) -> AsyncIterator[Entry]:
    """These entries; with `accept_damaged` without those that are damaged on every copy."""
    last = ids.stop - 1
    while ids:
        try:
            async with aclosing(reader.read_entries(ids, known_confirmed=last)) as runs:
                async for run in runs:
                    for entry in run:
                        ids = ids[1:]
                        yield entry
        except (errors.DigestMismatch, errors.DataUnavailable) as why:
            if not (accept_damaged and is_damaged(why)):
                raise
            ids = ids[1:]
        else:
            return


async def note_producers(payload: Buffer, producers: dict[str, int]) -> None:
    """Puts the producers of one entry into `producers`. Raises errors.BadEntry."""
    from spark_ledger.topic.entry import pulsar_batch

    header = decode_header(payload)
    if header.has_batches:
        body = memoryview(payload)[header.body_at :]
        work = 0
        for batch in pulsar_batch.producers_of(body, header.rows):
            producer_name, last = batch.metadata.producer_name, batch.last_sequence_id
            producers[producer_name] = max(last, producers.pop(producer_name, last))
            work += (batch.messages if batch.needs_walk else 0) + BATCH_COST_MESSAGES
            if work >= STEP_MESSAGES:
                await asyncio.sleep(0)
                work = 0


def closed_extent(closed_record: VersionedRecord, entries: int, rows: int) -> Extent:
    """The extent of a closed ledger. Raises errors.UnsupportedFormat if its record has another
    number of entries or rows."""
    record = closed_record.record
    if not record.closed or record.last_entry != entries - 1 or record.rows != rows:
        raise _other_end_error(closed_record, entries, rows)
    return Extent(entries, rows, record.length_bytes or 0)


def seal_action(
    live: LiveSegment,
    version: int,
    extent: Extent,
    written_ms: Sequence[int],
    producers: Mapping[str, int] = MappingProxyType({}),
    rowless: Rowless = NO_ROWLESS,
) -> SealLive:
    """The action that seals a live segment. `version` is the version of its ledger's record,
    `extent` the extent of the ledger up to the segment's end. The times of the segment's entries
    are between the least and the greatest of `written_ms`. `producers` is as in SealLive; `rowless`
    are the partition's offsets in the segment that have no row."""
    if extent.entries == live.first_entry:
        return SealLive(live.partition, live.ledger_id, None, (), live.opened)
    segment = Segment(
        partition=live.partition,
        ledger_id=live.ledger_id,
        metadata_version=version,
        entries=((live.first_entry, extent.entries - 1),),
        entry_rows=(),
        rows=extent.rows - live.rows_before,
        bytes=extent.bytes - live.bytes_before,
        min_ms=min(written_ms),
        max_ms=max(written_ms),
        event_min_ms=-EVENT_MS_MAX,
        event_max_ms=EVENT_MS_MAX,
        rows_before=live.rows_before,
    )
    newest = tuple(newest_producers(producers).items())
    rowless = rowless.shift(-live.base)
    return SealLive(live.partition, live.ledger_id, segment, newest, live.opened, rowless)


def _other_end_error(
    closed_record: VersionedRecord, entries: int, rows: int
) -> errors.UnsupportedFormat:
    record = closed_record.record
    return errors.UnsupportedFormat(
        f"ledger {record.ledger_id} ended at entry {record.last_entry} with {record.rows} rows, but"
        f" its {entries} entries have {rows} rows",
        ledger_id=record.ledger_id,
    )


def owned_header(live: LiveSegment, entry: Entry) -> Header:
    """The header of an owner's entry, which is in the segment or in a later segment of its ledger.
    Raises errors.BadEntry for a foreign entry, errors.UnsupportedFormat for an entry of a later
    version."""
    header = decode_header(entry.payload)
    partition, rows, first_row = header.shares[0]
    if len(header.index) > 1 or partition != live.partition:
        raise errors.BadEntry(
            f"it has rows of {len(header.index)} partitions, the first is {partition}"
        )
    row = entry.header.cumulative_rows - rows
    if not header.at_offset and first_row != row:
        raise errors.BadEntry(f"its first row is row {first_row} of the ledger, not row {row}")
    return header


def log_foreign(live: LiveSegment, foreign: ForeignEntry) -> None:
    _log.warning(
        "entry %d:%d belongs to no owner of partition %d, which ends before this entry: %s; %d"
        " bytes, %r...",
        *(live.ledger_id, foreign.entry_id, live.partition, foreign.why.what),
        *(foreign.payload_bytes, foreign.first_bytes),
    )
