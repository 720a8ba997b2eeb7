"""The entries of a ledger of positions: of an ack ledger, with what the subscriptions of one
partition acknowledged, or of a cursor ledger, with a query's position in each partition. Pure.

Always true: a write is one entry, or several consecutive entries, and counts only when all its
entries are there; so a snapshot whose last part is missing changes nothing. A complete snapshot
replaces all earlier states. A state belongs to a subscription's name, owner token and epoch: an
entry with another token or epoch does not change the state. A state without a first complete record
is unknown, never guessed: damage between two snapshots makes all states unknown, and their
subscriptions begin at the position in the metadata store (at least once). But in a ledger in which
positions only rise, the states before the damage stay known: an earlier position is at least once.

    0        4     5      6          8            16         24     28      32        36
    +--------+-----+------+----------+------------+----------+------+-------+---------+----------+
    | "SLA1" | ver | kind | reserved | own. epoch | snapshot | part | parts | records | reserved |
    +--------+-----+------+----------+------------+----------+------+-------+---------+----------+
    40  records (of version 2: compressed, a zlib stream of all of them), each:
        0            8               16         24      26       28      29         32
        +------------+---------------+----------+-------+--------+-------+----------+------+
        | sub. epoch | owner's epoch | position | token | name   | flags | reserved | rows |
        |            |               |          | bytes | bytes  |       |          | bytes|
        +------------+---------------+----------+-------+--------+-------+----------+------+
        36  token, name (UTF-8), rows (a roaring bitmap of 64 bit, portable format)

`kind`: 0 changes, 1 snapshot. `own. epoch`: the epoch of the partition's owner that wrote the
entry; `owner's epoch`: the epoch of the owner that wrote the state last. `snapshot`: the entry at
which the last complete snapshot before this write begins (-1: there is no snapshot); a reader
begins at this entry. `parts`: the number of entries of this write; `part`: the number of this
entry, from 0. `flags`: with 1 the record replaces the state; with 0 its rows are added to the
state. `rows` are acknowledged offsets at or beyond the position. In a cursor ledger the name is the
partition's number in decimal digits, and no record has rows. All
integers are little-endian: epochs, position and snapshot signed 64-bit, `token bytes` and `name
bytes` unsigned 16-bit, the rest unsigned 32-bit or bytes. The CRC is in the ledger entry's own
header.
"""

import struct
import zlib
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from enum import IntEnum
from typing import NamedTuple

from pyroaring import BitMap64

from spark_ledger import errors

MAGIC = b"SLA1"
VERSION, COMPRESSED_VERSION = 1, 2
ENTRY_BYTES_MAX = 1 << 20
"""About the largest size of an entry; a record takes ROWS_BYTES_MAX and its names at most."""
ROWS_BYTES_MAX = 256 << 10
RECORDS_BYTES_MAX = 2 * ENTRY_BYTES_MAX
"""Of one entry, before they are compressed."""
PARTS_MAX = 1 << 16
ZLIB_LEVEL = 1
NO_SNAPSHOT = -1

_HEADER = struct.Struct("<4sBBHqqIIII")
_RECORD = struct.Struct("<qqqHHB3xI")
assert (_HEADER.size, _RECORD.size) == (40, 36)
NO_ROWS = BitMap64().serialize()
_REPLACES = 1
_OFFSET_END = 1 << 63


class WriteKind(IntEnum):
    CHANGES = 0
    SNAPSHOT = 1


class AckKey(NamedTuple):
    """Identifies a subscription until another process moves it or makes it again. `token` is the
    random token of the owner in the subscription's record."""

    name: str
    token: str
    epoch: int


@dataclass(frozen=True, slots=True)
class AckState:
    """What a subscription acknowledged in the partition: all rows below `position`, and `rows`
    beyond the position. `owner_epoch`: the epoch of the partition's owner that wrote the state."""

    position: int
    rows: BitMap64
    owner_epoch: int

    @property
    def end(self) -> int:
        """One past the highest acknowledged row, or the position."""
        return max(self.position, self.rows.max() + 1) if self.rows else self.position


def released(key: AckKey) -> errors.LedgerFenced:
    return errors.LedgerFenced(f"subscription '{key.name}' was released", subscription=key.name)


@dataclass(frozen=True, slots=True)
class AckRecord:
    """A whole state (`replaces`), or rows to add to a state and the state's new position."""

    key: AckKey
    owner_epoch: int
    position: int
    rows: BitMap64
    replaces: bool


@dataclass(frozen=True, slots=True)
class AckEntry:
    kind: WriteKind
    owner_epoch: int
    snapshot: int
    part: int
    parts: int
    records: tuple[AckRecord, ...]

    @property
    def is_whole_snapshot(self) -> bool:
        """Whether the entry replaces all earlier states."""
        return self.kind is WriteKind.SNAPSHOT and self.parts == 1


class BadAckEntry(Exception):
    """Malformed bytes of an entry of acknowledgements."""


def state_records(states: Mapping[AckKey, AckState]) -> Iterator[AckRecord]:
    """The records of a snapshot."""
    for key in sorted(states):
        state = states[key]
        yield AckRecord(key, state.owner_epoch, state.position, state.rows, replaces=True)


def encode(
    kind: WriteKind,
    owner_epoch: int,
    records: Iterable[AckRecord],
    snapshot: int = NO_SNAPSHOT,
    bytes_max: int = ENTRY_BYTES_MAX,
    *,
    compressed: bool = False,
) -> list[bytes]:
    """The entries of one write, in order, at least one entry. Raises ValueError for records that
    break the rules at the head of this file, and for more than PARTS_MAX entries."""
    entries: list[list[bytes]] = [[]]
    size = _HEADER.size
    for record in records:
        for piece in _pieces(record, min(bytes_max, ROWS_BYTES_MAX)):
            encoded = _encode_record(piece)
            if entries[-1] and size + len(encoded) > bytes_max:
                entries.append([])
                size = _HEADER.size
            entries[-1].append(encoded)
            size += len(encoded)
    parts = len(entries)
    if parts > PARTS_MAX:
        raise ValueError(f"acknowledged sets of {parts} entries, {PARTS_MAX} at most")
    version = COMPRESSED_VERSION if compressed else VERSION
    encoded_entries = []
    for part, encoded_records in enumerate(entries):
        count = len(encoded_records)
        head = (MAGIC, version, kind, 0, owner_epoch, snapshot, part, parts, count, 0)
        body = b"".join(encoded_records)
        encoded_entries.append(
            _HEADER.pack(*head) + (zlib.compress(body, ZLIB_LEVEL) if compressed else body)
        )
    return encoded_entries


def decode(payload: bytes | memoryview) -> AckEntry:
    """One entry of a write. Raises errors.UnsupportedFormat for a later version, and BadAckEntry
    for malformed bytes."""
    if len(payload) < _HEADER.size:
        raise BadAckEntry(f"an entry of acknowledgements of {len(payload)} bytes")
    head = _HEADER.unpack_from(payload)
    magic, version, kind, _, owner_epoch, snapshot, part, parts, count, _ = head
    if magic != MAGIC:
        raise BadAckEntry(f"an entry of acknowledgements begins with {magic!r}")
    if version > COMPRESSED_VERSION or kind > WriteKind.SNAPSHOT:
        raise errors.UnsupportedFormat(
            f"an entry of acknowledgements of version {version}, kind {kind}; this is"
            f" {COMPRESSED_VERSION}"
        )
    if not part < parts <= PARTS_MAX or snapshot < NO_SNAPSHOT:
        raise BadAckEntry(f"part {part} of {parts} acknowledgements, with snapshot {snapshot}")
    body = memoryview(payload)[_HEADER.size :]
    if version == COMPRESSED_VERSION:
        body = _decompressed(body)
    records, at = [], 0
    for _ in range(count):
        record, at = _decode_record(body, at)
        records.append(record)
    if at != len(body):
        raise BadAckEntry(f"{len(body) - at} bytes after {count} acknowledged sets")
    return AckEntry(WriteKind(kind), owner_epoch, snapshot, part, parts, tuple(records))


def _decompressed(body: memoryview) -> memoryview:
    stream = zlib.decompressobj()
    try:
        records = stream.decompress(body, RECORDS_BYTES_MAX)
    except zlib.error as error:
        raise BadAckEntry(f"compressed acknowledgements: {error}") from error
    if not stream.eof or stream.unused_data:
        raise BadAckEntry(f"{len(body)} compressed bytes are no {RECORDS_BYTES_MAX} at most")
    return memoryview(records)


def _pieces(record: AckRecord, bytes_max: int) -> Iterator[AckRecord]:
    """The record, cut into records with rows of `bytes_max` each at most."""
    if not record.rows:
        yield record
        return
    is_first = True
    for rows in _split(record.rows, bytes_max):
        yield replace(record, rows=rows, replaces=record.replaces and is_first)
        is_first = False


def _split(rows: BitMap64, bytes_max: int) -> Iterator[BitMap64]:
    if len(rows) < 2 or len(rows.serialize()) <= bytes_max:
        yield rows
        return
    middle = rows[len(rows) // 2]
    low, high = rows.copy(), rows.copy()
    low.remove_range(middle, rows.max() + 1)
    high.remove_range(0, middle)
    yield from _split(low, bytes_max)
    yield from _split(high, bytes_max)


def _encode_record(record: AckRecord) -> bytes:
    token, name = record.key.token.encode(), record.key.name.encode()
    rows = record.rows.serialize() if record.rows else NO_ROWS
    problem = _problem(record)
    if problem:
        raise ValueError(problem)
    flags = _REPLACES if record.replaces else 0
    head = _RECORD.pack(
        *(record.key.epoch, record.owner_epoch, record.position),
        *(len(token), len(name), flags, len(rows)),
    )
    return head + token + name + rows


def record_bytes(record: AckRecord) -> int:
    """How many bytes the record takes in an entry."""
    names = len(record.key.token.encode()) + len(record.key.name.encode())
    return _RECORD.size + names + len(record.rows.serialize())


def _decode_record(payload: memoryview, at: int) -> tuple[AckRecord, int]:
    if at + _RECORD.size > len(payload):
        raise BadAckEntry(f"an acknowledged set at byte {at} of {len(payload)}")
    epoch, owner_epoch, position, token_bytes, name_bytes, flags, rows_bytes = _RECORD.unpack_from(
        payload, at
    )
    name_at = at + _RECORD.size + token_bytes
    rows_at = name_at + name_bytes
    end = rows_at + rows_bytes
    if end > len(payload) or flags > _REPLACES:
        raise BadAckEntry(f"an acknowledged set of {end - at} bytes with flags {flags:#x}")
    try:
        token = bytes(payload[at + _RECORD.size : name_at]).decode()
        name = bytes(payload[name_at:rows_at]).decode()
        rows = BitMap64.deserialize(bytes(payload[rows_at:end]))
    except (ValueError, IndexError) as error:  # IndexError for empty rows
        raise BadAckEntry(f"an acknowledged set at byte {at}: {error}") from error
    record = AckRecord(
        AckKey(name, token, epoch), owner_epoch, position, rows, replaces=flags == _REPLACES
    )
    problem = _problem(record)
    if problem:
        raise BadAckEntry(problem)
    return record, end


def _problem(record: AckRecord) -> str:
    """The rule that the record breaks; "" if it breaks no rule."""
    if not 0 <= record.position < _OFFSET_END:
        return f"an acknowledged position is {record.position}"
    if record.rows and not record.position <= record.rows.min() <= record.rows.max() < _OFFSET_END:
        return (
            f"acknowledged offsets from {record.rows.min()} to {record.rows.max()} beyond position"
            f" {record.position}"
        )
    return ""


@dataclass(slots=True)
class AckFold:
    """The states after the entries of a ledger, which are added in order, from a snapshot or from
    the ledger's first entry on."""

    states: dict[AckKey, AckState] = field(default_factory=dict)
    only_rises: bool = False
    """Whether each state is at or after the earlier states of the ledger, and each record has its
    whole state. Then the states before a damaged entry still count."""
    is_lost: bool = False
    """Whether an entry was damaged, and no complete snapshot came after it."""
    _parts: list[AckEntry] = field(default_factory=list)
    """The entries of a write of which some are still to come."""

    def add(self, entry: AckEntry) -> None:
        if entry.part != len(self._parts) or not self._continues(entry):
            self._give_up_parts()
            if entry.part:
                self.damaged()
                return
        self._parts.append(entry)
        if len(self._parts) == entry.parts:
            parts, self._parts = self._parts, []
            self._apply(entry.kind, [record for part in parts for record in part.records])

    def damaged(self) -> None:
        """Called for an entry that cannot be read: its acknowledgements and resets are unknown."""
        self._parts.clear()
        if not self.only_rises:
            self.states.clear()
            self.is_lost = True

    def _continues(self, entry: AckEntry) -> bool:
        if not self._parts:
            return True
        first = self._parts[0]
        return (first.kind, first.parts) == (entry.kind, entry.parts)

    def _give_up_parts(self) -> None:
        """Called if entries of the previous write are missing. A snapshot then changes nothing; but
        later changes may depend on changes whose entries are missing."""
        if self._parts and self._parts[0].kind is WriteKind.CHANGES:
            self.damaged()
        self._parts.clear()

    def _apply(self, kind: WriteKind, records: Iterable[AckRecord]) -> None:
        if kind is WriteKind.SNAPSHOT:
            self.states.clear()
            self.is_lost = False
        elif self.is_lost:
            return
        for record in records:
            before = self.states.get(record.key)
            if record.replaces:
                self.states[record.key] = AckState(record.position, record.rows, record.owner_epoch)
            elif before is not None:
                rows = before.rows
                rows |= record.rows
                rows.remove_range(0, record.position)
                self.states[record.key] = AckState(record.position, rows, record.owner_epoch)
