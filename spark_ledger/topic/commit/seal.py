"""Sealing a live segment: its ledger is recovered, and what the CLOSED record says is a segment.

Always true: a ledger is sealed only after it was fenced and closed, so nothing is added to what the
seal says; its rows are those of the CLOSED record, which are those that the header of its last
entry has (hazard 32), else nothing is sealed. Who seals need not be the owner: safety comes from
the fence (hazards 29, 30). A seal is small whatever the ledger has: the rows of each entry stay in
the entries' headers.
"""

from collections.abc import Mapping, Sequence
from contextlib import aclosing
from types import MappingProxyType

from bookie_server.api.entry import Buffer
from spark_ledger import errors
from spark_ledger.ledger.client import LedgerStore, VersionedRecord
from spark_ledger.ledger.read.reader import AsyncLedgerReader
from spark_ledger.topic.entry.message_batch import decode_header
from spark_ledger.topic.entry.rowless import NONE, Rowless
from spark_ledger.topic.log.actions import SealLive
from spark_ledger.topic.log.segments import LiveSegment, Segment

EVENT_MS_MAX = 2**62
"""What producers sent is not decoded to seal it: its event times may be any."""


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
    if last < 0:
        return seal_of(live.partition, known, 0, 0, ())
    ends = [
        await reader.read_entry(entry_id, known_confirmed=last)
        for entry_id in dict.fromkeys((0, last))
    ]
    header = ends[-1].header
    if header.cumulative_bytes != known.record.length_bytes:
        raise _another_end(known, last + 1, header.cumulative_rows)
    headers = [decode_header(entry.payload) for entry in ends]
    times = [one.written_ms for one in headers]
    producers: dict[str, int] = {}
    if live.deduplicated:
        await _read_producers(reader, producers)
    rows = header.cumulative_rows
    rowless = headers[-1].rowless.moved(-live.base)
    return seal_of(live.partition, known, last + 1, rows, times, producers, rowless)


async def _read_producers(reader: AsyncLedgerReader, producers: dict[str, int]) -> None:
    last = reader.last_add_confirmed
    async with aclosing(reader.read_entries(range(last + 1), known_confirmed=last)) as runs:
        async for run in runs:
            for entry in run:
                _note_producers(entry.payload, producers)


def _note_producers(payload: Buffer, producers: dict[str, int]) -> None:
    """How far each producer has come with an entry's batches."""
    from spark_ledger.topic.entry import pulsar_batch

    header = decode_header(payload)
    if header.batches:
        body = memoryview(payload)[header.body_at :]
        for name, last in pulsar_batch.producers_of(body, header.rows):
            producers[name] = max(last, producers.get(name, last))


def seal_of(
    partition: int,
    known: VersionedRecord,
    entries: int,
    rows: int,
    written_ms: Sequence[int],
    producers: Mapping[str, int] = MappingProxyType({}),
    rowless: Rowless = NONE,
) -> SealLive:
    """What seals a ledger of that CLOSED record, which has so many entries and rows by the last
    entry's header; `written_ms` are times between which those of its entries are, `producers` and
    `rowless` as SealLive has them. Raises errors.UnsupportedFormat."""
    record = known.record
    if not record.closed or record.last_entry != entries - 1 or record.rows != rows:
        raise _another_end(known, entries, rows)
    if not entries:
        return SealLive(partition, record.ledger_id, None)
    segment = Segment(
        partition=partition,
        ledger_id=record.ledger_id,
        metadata_version=known.version,
        entries=((0, entries - 1),),
        entry_rows=(),
        rows=rows,
        bytes=record.length_bytes or 0,
        min_ms=min(written_ms),
        max_ms=max(written_ms),
        event_min_ms=-EVENT_MS_MAX,
        event_max_ms=EVENT_MS_MAX,
    )
    return SealLive(partition, record.ledger_id, segment, tuple(sorted(producers.items())), rowless)


def _another_end(known: VersionedRecord, entries: int, rows: int) -> errors.UnsupportedFormat:
    record = known.record
    return errors.UnsupportedFormat(
        f"ledger {record.ledger_id} ended at entry {record.last_entry} with {record.rows} rows, its"
        f" {entries} entries have {rows}",
        ledger_id=record.ledger_id,
    )
