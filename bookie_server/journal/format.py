"""The bytes of a journal segment, and the records that can be read from a damaged one.

Always true:
- a segment is a file header and batches; file header and batches start at multiples of 4096, so a
  new batch never rewrites a block that holds acknowledged bytes;
- the file header has the length with which the file was made: a shorter file was cut;
- a batch is the records that one sync makes durable; its header has the position up to which the
  journal was synced when the batch was written: bad bytes below that position are damage, bad bytes
  beyond it a torn write;
- every header has a CRC, its file id and its position, so bytes from another file or position
  never count as records;
- an entry's record has the payload's CRC from the entry's header, so that CRC is computed once.

docs/formats.md has the pictures. All integers are little-endian.
"""

import struct
from collections.abc import Sequence
from enum import IntEnum
from itertools import accumulate, chain, repeat
from operator import add
from typing import NamedTuple

from crc32c import crc32c

from bookie_server.api import entry as entry_format
from bookie_server.api.entry import Buffer, fault

BLOCK_BYTES = 4096
FILE_MAGIC, BATCH_MAGIC, RECORD_MAGIC = b"SLJF", b"SLJB", b"SLJR"
VERSION, FILE_VERSION = 1, 2
BATCH_HEADER_BYTES = 64
RECORD_HEADER_BYTES = 64

_FILE = struct.Struct("<4sHHQQ")
_BATCH = struct.Struct("<4sHHQQQQQIII")
_RECORD = struct.Struct("<4sBBHqqQQQIII")
_CRC = struct.Struct("<I")
_BOTH_HEADERS = struct.Struct("<8sqqQQQII8x5s3xqq24xII8x")  # of a record and of its entry
_RECORD_START = _RECORD.pack(RECORD_MAGIC, VERSION, 1, *[0] * 9)[:8]
_ENTRY_START = struct.pack("<4sB", entry_format.MAGIC, entry_format.VERSION)
_CRC_OF_CHECKED = crc32c(bytes(4) + _CRC.pack(crc32c(bytes(4))))  # of any bytes with their CRC
assert _BOTH_HEADERS.size == RECORD_HEADER_BYTES + entry_format.HEADER_BYTES
assert _BATCH.size + _CRC.size == BATCH_HEADER_BYTES
assert _RECORD.size + _CRC.size == RECORD_HEADER_BYTES


class RecordKind(IntEnum):
    """The kinds of records; the numbers are on disk."""

    ENTRY = 1  # body: the entry
    LEDGER = 2  # body: the ledger's state (index.encode_ledger_state)
    FENCE = 3  # the ledger is fenced
    LAC = 4  # the entry id field is an explicit last add confirmed
    SEAL = 5  # the bookie stopped cleanly; nothing follows


class Position(NamedTuple):
    """A position in the journal. A later write has a greater position."""

    file_id: int
    offset: int


class Record(NamedTuple):
    """A record of the journal. `body_crc`: the CRC of the body or, of an entry, of its payload."""

    kind: RecordKind
    ledger_id: int
    entry_id: int
    body: Buffer
    body_crc: int


class BatchHeader(NamedTuple):
    """`records_bytes` are the bytes of the records, without padding. All bytes before `synced` were
    durable when the batch was written."""

    file_id: int
    offset: int
    batch_no: int
    synced: Position
    records_bytes: int

    @property
    def end(self) -> int:
        """Where the next batch starts."""
        return self.offset + padded(BATCH_HEADER_BYTES + self.records_bytes)


class UnreadableBytes(NamedTuple):
    """Unreadable bytes of the batch at `position`. `ledger_id` and `kind` are None if the bytes do
    not name their ledger. `is_end`: the readable part of the segment ends at `position`, as that of
    every segment does somewhere."""

    position: Position
    ledger_id: int | None
    kind: RecordKind | None
    why: str
    is_end: bool = False


class BadJournal(Exception):
    """Bytes that do not parse as the expected structure of a journal."""


def body_crc(body: Buffer) -> int:
    """The CRC of a body that is not an entry."""
    return crc32c(body)


def padded(length: int) -> int:
    """The next multiple of 4096."""
    return -(-length // BLOCK_BYTES) * BLOCK_BYTES


def records_bytes(records: Sequence[Record]) -> int:
    """The length of these records with their headers."""
    return RECORD_HEADER_BYTES * len(records) + sum([len(record.body) for record in records])


# -- writing ----------------------------------------------------------------------------------


def encode_file_header(file_id: int, segment_bytes: int) -> bytes:
    """The first block of a segment whose file was made with the length `segment_bytes`."""
    head = _FILE.pack(FILE_MAGIC, FILE_VERSION, 0, file_id, segment_bytes)
    return (head + _CRC.pack(crc32c(head))).ljust(BLOCK_BYTES, b"\0")


def encode_batch(
    file_id: int, offset: int, batch_no: int, synced: Position, records: Sequence[Record]
) -> list[Buffer]:
    """The buffers of a batch to be written at `offset`; bodies are not copied. The work is done
    column by column: a Python loop over the records would be a small batch's largest cost."""
    kinds, ledger_ids, entry_ids, bodies, crcs = zip(*records, strict=True)
    sizes = list(map(len, bodies))
    starts = [RECORD_HEADER_BYTES + size for size in sizes]
    *offsets, end = accumulate(starts, initial=offset + BATCH_HEADER_BYTES)
    heads = list(
        map(
            _RECORD.pack, repeat(RECORD_MAGIC), repeat(VERSION), kinds, repeat(0), ledger_ids,
            entry_ids, repeat(file_id), offsets, repeat(batch_no), sizes, crcs, repeat(0),
        )
    )  # fmt: skip
    headers = map(add, heads, map(_CRC.pack, map(crc32c, heads)))
    head = _BATCH.pack(
        BATCH_MAGIC, VERSION, 0, file_id, offset, batch_no, *synced,
        end - offset - BATCH_HEADER_BYTES, len(records), 0,
    )  # fmt: skip
    filler = bytes(offset + padded(end - offset) - end)
    parts = chain.from_iterable(zip(headers, bodies, strict=True))
    return [head + _CRC.pack(crc32c(head)), *parts, filler]


# -- reading ----------------------------------------------------------------------------------


def decode_file_header(data: Buffer, file_id: int) -> int:
    """The length with which the file was made. Raises BadJournal when these are not the first bytes
    of segment `file_id`."""
    if len(data) < _FILE.size + _CRC.size:
        raise BadJournal("the segment is shorter than its header")
    magic, version, _, named_id, segment_bytes = _FILE.unpack_from(data)
    if not _crc_matches(data, 0, _FILE.size):
        raise BadJournal("the segment header's CRC does not match")
    if (magic, version, named_id) != (FILE_MAGIC, FILE_VERSION, file_id):
        raise BadJournal(
            f"the header of segment {file_id} names {magic!r} version {version} file {named_id}"
        )
    return int(segment_bytes)


def decode_batch_header(data: Buffer, file_id: int, offset: int) -> BatchHeader:
    """Raises BadJournal when `data` does not begin with the header of a batch at that position."""
    if len(data) < BATCH_HEADER_BYTES:
        raise BadJournal("the segment ends inside a batch header")
    magic, version, _, file, at, number, synced_file, synced_at, length, _, _ = _BATCH.unpack_from(
        data
    )
    if magic != BATCH_MAGIC or not _crc_matches(data, 0, _BATCH.size):
        raise BadJournal("no batch header, or its CRC does not match")
    if (version, file, at) != (VERSION, file_id, offset):
        raise BadJournal(f"a batch of version {version} for file {file} at {at}")
    return BatchHeader(file, at, number, Position(synced_file, synced_at), length)


def decode_records(data: Buffer, batch: BatchHeader) -> tuple[list[Record], list[UnreadableBytes]]:
    """The undamaged records of a batch, and its unreadable bytes. `data` starts at the batch's
    header.

    With a damaged body one record is lost, with a damaged record header the rest of the batch.
    """
    view = memoryview(data)
    records: list[Record] = []
    unreadable: list[UnreadableBytes] = []
    where = Position(batch.file_id, batch.offset)
    at, end = BATCH_HEADER_BYTES, BATCH_HEADER_BYTES + batch.records_bytes
    while (at := _take_entries(view, at, end, batch, records)) < end:
        try:
            record, length = _decode_record_header(view[at:end], batch, at)
        except BadJournal as error:
            unreadable.append(UnreadableBytes(where, None, None, str(error)))
            break
        at += RECORD_HEADER_BYTES
        record = record._replace(body=view[at : at + length])
        at += length
        if why := _body_fault(record, length):
            unreadable.append(UnreadableBytes(where, record.ledger_id, record.kind, why))
        else:
            records.append(record)
    return records, unreadable


def _take_entries(
    view: memoryview, at: int, end: int, batch: BatchHeader, records: list[Record]
) -> int:
    """Append the undamaged entry records from `at` on to `records`. Stops at the first record that
    is no entry, or has an unexpected field or CRC, and returns the position of that record, which
    the caller decodes.

    Nearly all records are undamaged entries, so this loop has few steps for each. The three CRCs
    cover record header, entry header and payload.
    """
    unpack, new, entry_kind = _BOTH_HEADERS.unpack_from, tuple.__new__, RecordKind.ENTRY
    shift, file_id, batch_no = batch.offset, batch.file_id, batch.batch_no
    last = min(end, len(view)) - _BOTH_HEADERS.size
    while at <= last:
        (
            record_head, ledger_id, entry_id, file, offset, number, length, crc,
            entry_head, ledger, entry, payload_bytes, payload_crc,
        ) = unpack(view, at)  # fmt: skip
        header, payload = at + RECORD_HEADER_BYTES, at + _BOTH_HEADERS.size
        after = header + length
        if not (
            record_head == _RECORD_START
            and offset == shift + at
            and file == file_id
            and number == batch_no
            and entry_head == _ENTRY_START
            and ledger == ledger_id
            and entry == entry_id
            and payload_bytes == after - payload
            and after <= end
            and crc32c(view[at:header]) == _CRC_OF_CHECKED
            and crc32c(view[header:payload]) == _CRC_OF_CHECKED
            and len(body := view[header:after]) == length
            and crc32c(view[payload:after]) == payload_crc
        ):
            break
        records.append(new(Record, (entry_kind, ledger_id, entry_id, body, crc)))
        at = after
    return at


def _decode_record_header(data: memoryview, batch: BatchHeader, at: int) -> tuple[Record, int]:
    """The record without its body, and the body's length."""
    if len(data) < RECORD_HEADER_BYTES:
        raise BadJournal("the segment ends inside a record header")
    magic, version, kind, _, ledger_id, entry_id, file_id, offset, batch_no, length, crc, _ = (
        _RECORD.unpack_from(data)
    )
    if magic != RECORD_MAGIC or not _crc_matches(data, 0, _RECORD.size):
        raise BadJournal("no record header, or its CRC does not match")
    if (file_id, offset, batch_no) != (batch.file_id, batch.offset + at, batch.batch_no):
        raise BadJournal(f"a record of file {file_id} at {offset}, batch {batch_no}")
    if version != VERSION or kind not in _KINDS:
        raise BadJournal(f"a record of kind {kind} version {version}")
    return Record(RecordKind(kind), ledger_id, entry_id, b"", crc), length


def _body_fault(record: Record, length: int) -> str:
    """What is wrong with the body; empty if it is undamaged."""
    if len(record.body) < length:
        return "the segment ends inside a record"
    if record.kind is not RecordKind.ENTRY:
        return "" if crc32c(record.body) == record.body_crc else "a record's CRC does not match"
    return fault(record.body, record.ledger_id, record.entry_id)


_KINDS = frozenset(RecordKind)


def _crc_matches(data: Buffer, at: int, size: int) -> bool:
    view = memoryview(data)
    return bool(_CRC.unpack_from(view, at + size)[0] == crc32c(view[at : at + size]))
