"""Entries of a live ledger that no owner of the partition wrote: bytes of another program, or bytes
that contradict themselves. Pure but for the log.

Always true: an entry is an owner's if its payload is a message batch of this partition alone whose
first row is where the ledger's own count has it. An entry of a later version is neither an owner's
nor foreign: it is an error. Foreign entries at a segment's end are not part of the segment; foreign
entries between an owner's entries are, since the later entries count their rows: a read meets them
(bad_entries.py).
"""

import logging
from dataclasses import dataclass

from bookie_server.api.entry import Entry
from spark_ledger import errors
from spark_ledger.topic.entry.message_batch import Header, decode_header
from spark_ledger.topic.log.segments import LiveSegment

SHOWN_BYTES = 32

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Foreign:
    """A foreign entry, and the fault in it. It keeps only the size and the first bytes of the
    payload, since a ledger may end with many foreign entries."""

    entry_id: int
    why: errors.BadEntry
    payload_bytes: int
    begins: bytes


def foreign_of(entry: Entry, why: errors.BadEntry) -> Foreign:
    payload = entry.payload
    return Foreign(entry.header.entry_id, why, len(payload), bytes(payload[:SHOWN_BYTES]))


def owned_header(live: LiveSegment, entry: Entry) -> Header:
    """The header of an owner's entry, in the segment or in a later segment of its ledger. Raises
    errors.BadEntry for a foreign entry, errors.UnsupportedFormat for an entry of a later version.
    """
    header = decode_header(entry.payload)
    partition, rows, first_row = header.shares[0]
    if len(header.index) > 1 or partition != live.partition:
        raise errors.BadEntry(
            f"it has rows of {len(header.index)} partitions, {partition} the first of them"
        )
    row = entry.header.cumulative_rows - rows
    if not header.at_offset and first_row != row:
        raise errors.BadEntry(f"its first row is row {first_row} of the ledger, not row {row}")
    return header


def log_foreign(live: LiveSegment, foreign: Foreign) -> None:
    _log.warning(
        "entry %d:%d belongs to no owner of partition %d, which ends in front of it: %s; %d bytes,"
        " %r...",
        *(live.ledger_id, foreign.entry_id, live.partition, foreign.why.what),
        *(foreign.payload_bytes, foreign.begins),
    )
