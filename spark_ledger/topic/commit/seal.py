"""Sealing a live segment: its ledger is recovered, and what the CLOSED record says is a segment.

Always true: a ledger is sealed only after it was fenced and closed, so nothing is added to what the
seal says; the rows of each entry come from its own header, and together are those of the CLOSED
record (hazard 32), else nothing is sealed. Who seals need not be the owner: safety comes from the
fence (hazards 29, 30).
"""

from collections.abc import Mapping, Sequence
from contextlib import aclosing
from types import MappingProxyType

from bookie_server.api.entry import Buffer
from spark_ledger import errors
from spark_ledger.ledger.client import LedgerStore, VersionedRecord
from spark_ledger.topic.entry.message_batch import decode_header
from spark_ledger.topic.log.actions import SealLive
from spark_ledger.topic.log.segments import LiveSegment, Segment

EVENT_MS_MAX = 2**62
"""What producers sent is not decoded to seal it: its event times may be any."""


async def sealed(ledgers: LedgerStore, live: LiveSegment) -> SealLive:
    """What seals the segment, whoever owns it; its owner can add nothing more.

    Raises errors.DataUnavailable (its end cannot be decided now), errors.NotEnoughBookies,
    errors.NoSuchLedger, errors.Unavailable, errors.UnsupportedFormat (its entries are not what the
    CLOSED record says).
    """
    reader = await ledgers.open(live.ledger_id, recover=True)
    known = VersionedRecord(reader.record, reader.version)
    entry_rows: list[int] = []
    written_ms: list[int] = []
    producers: dict[str, int] = {}
    before, last = 0, reader.last_add_confirmed
    async with aclosing(reader.read_entries(range(last + 1), known_confirmed=last)) as runs:
        async for run in runs:
            for entry in run:
                entry_rows.append(entry.header.cumulative_rows - before)
                before = entry.header.cumulative_rows
                if entry.header.entry_id in (0, last):
                    written_ms.append(decode_header(entry.payload).written_ms)
                if live.deduplicated:
                    _note_producers(entry.payload, producers)
    return seal_of(live.partition, known, entry_rows, written_ms, producers)


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
    entry_rows: Sequence[int],
    written_ms: Sequence[int],
    producers: Mapping[str, int] = MappingProxyType({}),
) -> SealLive:
    """What seals a ledger of that CLOSED record, whose entries have so many rows each; `written_ms`
    are times among which those of its rows are, `producers` as SealLive has them. Raises
    errors.UnsupportedFormat."""
    record = known.record
    last, rows = record.last_entry, record.rows
    if not record.closed or last is None or len(entry_rows) != last + 1 or sum(entry_rows) != rows:
        raise errors.UnsupportedFormat(
            f"ledger {record.ledger_id} ended at entry {last} with {rows} rows, its"
            f" {len(entry_rows)} entries have {sum(entry_rows)}",
            ledger_id=record.ledger_id,
        )
    if not entry_rows:
        return SealLive(partition, record.ledger_id, None)
    segment = Segment(
        partition=partition,
        ledger_id=record.ledger_id,
        metadata_version=known.version,
        entries=((0, last),),
        entry_rows=tuple(entry_rows),
        rows=rows,
        bytes=record.length_bytes or 0,
        min_ms=min(written_ms),
        max_ms=max(written_ms),
        event_min_ms=-EVENT_MS_MAX,
        event_max_ms=EVENT_MS_MAX,
    )
    return SealLive(partition, record.ledger_id, segment, tuple(sorted(producers.items())))
