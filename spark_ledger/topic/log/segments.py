"""A segment: entries of one ledger that hold consecutive rows of one partition.

Always true: entry ids rise strictly; `entry_rows` has one positive count for each entry, in
order; `rows` is their sum. A segment that was born live is one range of entries of a ledger of
one partition and lists no `entry_rows`. Such a segment is `counted`: the headers of its entries
count the rows of the ledger up to each entry. Its ledger may still be open, with another segment
after it. Every entry was acknowledged, in order, to the handle that wrote it (hazard 18), so the
entries of a committed segment are confirmed, even if a bookie has a lower last add confirmed.
Entries count their rows from the segment's first row, so a commit may place the segment at any
offset. A `shared` entry holds rows of several partitions; the segment has only the rows of its own
partition. An inline segment's entries are in the commit itself, until a checkpoint moves them.
"""

import zlib
from base64 import b64decode, b64encode
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

INLINE = -1
"""The ledger id of a segment whose payloads are in the commit."""
NO_ENTRY = -1
NO_MS = -1

Payload = bytes
CommitTimes = tuple[tuple[int, int], ...]
"""Runs of rows: the number of rows, and their commit time (ms, the store's clock); times never
fall."""
CommitTokens = tuple[tuple[int, int], ...]
"""Runs of rows: the number of rows, and the token of their commit (NO_TOKEN if it is not known)."""
NO_TOKEN = 0


@dataclass(frozen=True, slots=True)
class Segment:
    """`entries` are ranges (first, last), both included. `metadata_version` is a version of the
    ledger's record at or after the last ack: a reader must not use an older record (hazard 27).
    `min_ms` and `max_ms` are the least and the greatest time of writing, by the writers' clocks. In
    a `counted` segment they are times of its owner's clock, set to the store's time, and the rows'
    commit times are between them. `event_min_ms` and `event_max_ms` are the least and the greatest
    event time, NO_MS if no row has an event time. `filter_entry` is the entry of the same ledger
    with the filter of these entries' keys (key_filter.py), NO_ENTRY if there is no filter. `inline`
    has the payload of each entry of an inline segment, whose entry ids count from 0. `rows_before`
    is the number of rows before a `counted` segment in its ledger."""

    partition: int
    ledger_id: int
    metadata_version: int
    entries: tuple[tuple[int, int], ...]
    entry_rows: tuple[int, ...]
    rows: int
    bytes: int
    min_ms: int
    max_ms: int
    shared: bool = False
    filter_entry: int = NO_ENTRY
    event_min_ms: int = NO_MS
    event_max_ms: int = NO_MS
    inline: tuple[Payload, ...] = ()
    rows_before: int = 0

    def __post_init__(self) -> None:
        last_before, count = -1, 0
        for first, last in self.entries:
            if not last_before < first <= last:
                raise ValueError(f"entry ranges must rise from 0 on: {self.entries}")
            last_before, count = last, count + last - first + 1
        if self.partition < 0 or not count:
            raise ValueError(f"entries {self.entries} of partition {self.partition}")
        if self.counted:
            is_one_range = len(self.entries) == 1 and not self.shared
            has_filter = self.filter_entry != NO_ENTRY
            if not is_one_range or self.rows < count or has_filter or self.inline:
                raise ValueError(f"{self.rows} rows without row counts in entries {self.entries}")
            check_rows_before(self.entries[0][0], self.rows_before)
            return
        if self.rows_before:
            raise ValueError(
                f"{self.rows_before} rows before entries {self.entries} with row counts"
            )
        if count != len(self.entry_rows):
            raise ValueError(f"{len(self.entry_rows)} row counts for entries {self.entries}")
        if min(self.entry_rows) < 1 or sum(self.entry_rows) != self.rows:
            raise ValueError(f"{self.rows} rows in entries of {self.entry_rows} rows")
        if (self.ledger_id == INLINE) != bool(self.inline):
            raise ValueError(f"ledger {self.ledger_id} with {len(self.inline)} payloads inline")
        if self.inline and self.entries != ((0, len(self.inline) - 1),):
            raise ValueError(f"{len(self.inline)} payloads inline for entries {self.entries}")

    @property
    def counted(self) -> bool:
        """Whether only the headers of the entries have the numbers of rows."""
        return not self.entry_rows


@dataclass(frozen=True, slots=True)
class PlacedSegment:
    """A segment in its topic: its first row has offset `base` in the partition. `commit` is the
    number of the commit that added the segment, `commit_ms` this commit's time by the store's
    clock. In a merged segment `times` has the commit times of its rows, and `commit_ms` is the last
    of these times; with empty `times` all rows have `commit_ms`. In a `counted` segment `commit_ms`
    is the time at which its last row was stored, and its entries have their own times. `tokens` are
    the tokens of the commits that made the rows, which a merge does not change (for a segment born
    live: the token of the commit that opened it); empty if software without tokens wrote the
    segment."""

    segment: Segment
    base: int
    commit: int
    commit_ms: int
    times: CommitTimes = ()
    tokens: CommitTokens = field(default=(), compare=False)


class OffsetRange(NamedTuple):
    """Offsets [lo, hi) of a partition."""

    partition: int
    lo: int
    hi: int


@dataclass(frozen=True, slots=True)
class LiveSegment:
    """The open end of a partition: `owner`, in its term `epoch`, still appends to a ledger that has
    rows of this partition only. The ledger's entries from `first_entry` on hold the rows from
    offset `base` on, up to the next live segment of the same ledger (the headers of an entry show
    to which live segment it belongs). The ledger, not the log, shows how much of the segment is
    confirmed. `rows_before` and `bytes_before` are the rows and bytes of the ledger's entries
    before `first_entry`. `opened` is the commit that opened this segment, and identifies the
    segment among those of the ledger; `token` is this commit's token. `deduplicated`: the seal has
    the last sequence id of each producer."""

    partition: int
    ledger_id: int
    metadata_version: int
    base: int
    opened: int
    owner: str
    epoch: int
    deduplicated: bool = False
    first_entry: int = 0
    rows_before: int = 0
    bytes_before: int = 0
    token: int = field(default=NO_TOKEN, compare=False)

    @property
    def origin(self) -> int:
        """The offset that the ledger's first row would have if the segment began with that row."""
        return self.base - self.rows_before


def token_of(commit_id: str) -> int:
    """The token of a commit: 32 bits made from its random id, never NO_TOKEN. Two commits with the
    same number, such as before and after a restore of the metadata store from a backup, have
    different tokens."""
    return zlib.crc32(commit_id.encode()) or 1


def check_rows_before(first_entry: int, rows_before: int) -> None:
    """Raises ValueError if `rows_before` rows cannot be in the entries before `first_entry`, since
    each entry has at least one row."""
    if rows_before < first_entry or (rows_before and not first_entry):
        raise ValueError(f"{rows_before} rows before entry {first_entry}")


def merge_ranges(entry_ids: Iterable[int]) -> tuple[tuple[int, int], ...]:
    """Ranges (first, last), both included, of rising entry ids."""
    ranges: list[tuple[int, int]] = []
    for entry in entry_ids:
        if ranges and ranges[-1][1] + 1 == entry:
            ranges[-1] = (ranges[-1][0], entry)
        else:
            ranges.append((entry, entry))
    return tuple(ranges)


def to_json(segment: Segment) -> dict[str, Any]:
    plain: dict[str, Any] = {
        "partition": segment.partition,
        "bytes": segment.bytes,
        "written_ms": [segment.min_ms, segment.max_ms],
    }
    if segment.counted:
        plain["rows"] = segment.rows
        if segment.rows_before:
            plain["rows_before"] = segment.rows_before
    else:
        plain["entry_rows"] = list(segment.entry_rows)
    if segment.inline:
        plain["inline"] = [b64encode(payload).decode() for payload in segment.inline]
    else:
        plain["ledger"] = segment.ledger_id
        plain["version"] = segment.metadata_version
        plain["entries"] = [list(ends) for ends in segment.entries]
    if segment.shared:
        plain["shared"] = True
    if segment.filter_entry != NO_ENTRY:
        plain["filter_entry"] = segment.filter_entry
    if segment.event_max_ms != NO_MS:
        plain["event_ms"] = [segment.event_min_ms, segment.event_max_ms]
    return plain


def from_json(plain: Mapping[str, Any]) -> Segment:
    """Raises KeyError, TypeError or ValueError if `plain` is not a segment."""
    counts = tuple(map(int, plain.get("entry_rows", ())))
    min_ms, max_ms = plain["written_ms"]
    event_min_ms, event_max_ms = plain.get("event_ms", (NO_MS, NO_MS))
    inline = tuple([b64decode(text, validate=True) for text in plain.get("inline", ())])
    entries = [[0, len(inline) - 1]] if inline else plain["entries"]
    return Segment(
        partition=plain["partition"],
        ledger_id=INLINE if inline else plain["ledger"],
        metadata_version=0 if inline else plain["version"],
        entries=tuple([(int(first), int(last)) for first, last in entries]),
        entry_rows=counts,
        rows=sum(counts) if counts else int(plain["rows"]),
        bytes=plain["bytes"],
        min_ms=min_ms,
        max_ms=max_ms,
        shared=plain.get("shared", False),
        filter_entry=plain.get("filter_entry", NO_ENTRY),
        event_min_ms=event_min_ms,
        event_max_ms=event_max_ms,
        inline=inline,
        rows_before=int(plain.get("rows_before", 0)),
    )
