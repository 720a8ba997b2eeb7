"""Sealing a live segment: an owner that has stopped says what is there; or its ledger is recovered,
and what the CLOSED record says is the segment.

Always true: nothing is added to what a seal says. An owner that seals has nothing under way, and
sends nothing before it has read back what the log has then. Who else seals has fenced and closed
the ledger: safety comes from the fence (hazards 29, 30); the rows are those of the CLOSED record,
which are those that the header of its last entry has (hazard 32), else nothing is sealed. A seal is
small whatever the ledger has: the rows of each entry stay in the entries' headers.
"""

from collections.abc import Mapping, Sequence
from contextlib import aclosing
from dataclasses import dataclass
from types import MappingProxyType

from spark_ledger import errors
from spark_ledger.ledger.client import LedgerStore, VersionedRecord
from spark_ledger.ledger.reader import AsyncLedgerReader
from spark_ledger.topic.entry.message_batch import NONE, Rowless, decode_header
from spark_ledger.topic.log.actions import SealLive
from spark_ledger.topic.log.segments import LiveSegment, Segment
from spark_ledger.topic.log.state import PRODUCERS_MAX

EVENT_MS_MAX = 2**62
"""What producers sent is not decoded to seal it: its event times may be any."""


@dataclass(frozen=True, slots=True)
class Extent:
    """What a ledger has, from its first entry on."""

    entries: int = 0
    rows: int = 0
    bytes: int = 0


NOTHING = Extent()


async def sealed(ledgers: LedgerStore, live: LiveSegment) -> SealLive:
    """What seals the segment, whoever owns it; its owner can add nothing more. Of a deduplicated
    one every entry is read, of others the first and the last.

    Raises errors.DataUnavailable (its end cannot be decided now), errors.NotEnoughBookies,
    errors.NoSuchLedger, errors.Unavailable, errors.UnsupportedFormat (its last entry is not what
    the CLOSED record says).
    """
    reader = await ledgers.open(live.ledger_id, recover=True)
    known = VersionedRecord(reader.record, reader.version)
    last = reader.last_add_confirmed
    first = live.first_entry
    if last < first:
        return seal_of(live, known.version, ended_at(known, first, live.rows_before), ())
    ends = [
        await reader.read_entry(entry_id, known_confirmed=last)
        for entry_id in dict.fromkeys((first, last))
    ]
    header = ends[-1].header
    if header.cumulative_bytes != known.record.length_bytes:
        raise _another_end(known, last + 1, header.cumulative_rows)
    headers = [decode_header(entry.payload) for entry in ends]
    times = [one.written_ms for one in headers]
    producers: dict[str, int] = {}
    if live.deduplicated:
        await _read_producers(reader, range(first, last + 1), producers)
    extent = ended_at(known, last + 1, header.cumulative_rows)
    return seal_of(live, known.version, extent, times, producers, headers[-1].rowless)


async def _read_producers(reader: AsyncLedgerReader, ids: range, producers: dict[str, int]) -> None:
    """How far each producer has come with the batches of these entries, the one that sent last at
    the end."""
    from spark_ledger.topic.entry import pulsar_batch

    async with aclosing(reader.read_entries(ids, known_confirmed=ids.stop - 1)) as runs:
        async for run in runs:
            for payload in (entry.payload for entry in run):
                header = decode_header(payload)
                if header.batches:
                    body = memoryview(payload)[header.body_at :]
                    for name, last in pulsar_batch.producers_of(body, header.rows):
                        producers[name] = max(last, producers.pop(name, last))


def ended_at(known: VersionedRecord, entries: int, rows: int) -> Extent:
    """What a ledger of that CLOSED record has, which has so many entries, and rows by the last
    one's header. Raises errors.UnsupportedFormat."""
    record = known.record
    if not record.closed or record.last_entry != entries - 1 or record.rows != rows:
        raise _another_end(known, entries, rows)
    return Extent(entries, rows, record.length_bytes or 0)


def seal_of(
    live: LiveSegment,
    version: int,
    extent: Extent,
    written_ms: Sequence[int],
    producers: Mapping[str, int] = MappingProxyType({}),
    rowless: Rowless = NONE,
) -> SealLive:
    """What seals a live segment whose ledger, whose record has that version, has so much up to the
    segment's end; `written_ms` are times between which those of the segment's entries are,
    `producers` as SealLive has them, `rowless` are its offsets without a row."""
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
    known = tuple(producers.items())[-PRODUCERS_MAX:]
    rowless = rowless.moved(-live.base)
    return SealLive(live.partition, live.ledger_id, segment, known, live.opened, rowless)


def _another_end(known: VersionedRecord, entries: int, rows: int) -> errors.UnsupportedFormat:
    record = known.record
    return errors.UnsupportedFormat(
        f"ledger {record.ledger_id} ended at entry {record.last_entry} with {record.rows} rows, its"
        f" {entries} entries have {rows}",
        ledger_id=record.ledger_id,
    )
