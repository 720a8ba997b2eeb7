"""The checkpoint: for each journal directory a mark. A start needs no record before the mark.

Always true:
- every living ledger directory durably has all records before a journal's mark;
- marks of two journals are never compared (BK#4844);
- of several copies of the checkpoint, the furthest mark of each journal is right;
- no mark moves back (BK#4105);
- only LedgerStorage writes the checkpoint, to every living ledger directory, by a temporary file,
  sync, rename and folder sync: a crash leaves either the old copy or the new one.
docs/formats.md has the picture.
"""

import struct
from collections.abc import Mapping
from typing import NamedTuple

from crc32c import crc32c

from bookie_server.disk.interface import Disk, NoSuchFile, read_file, replace_file
from bookie_server.journal.format import Position

MAGIC, VERSION = b"SLCP", 2
FOLDER, PATH, TEMPORARY = "checkpoint", "checkpoint/mark", "checkpoint/mark.tmp"

_HEAD = struct.Struct("<4sHHI")
_ITEM = struct.Struct("<QQHH")
_RETIRED, _MISSED = 1, 2
_CRC = struct.Struct("<I")


class JournalMark(NamedTuple):
    """The mark of one journal directory. `retired`: no record of the directory is needed any more,
    so the directory may be missing, and a start does not replay it. `missed`: the directory was
    retired because it was missing at a start, which put every ledger in limbo. A later start that
    finds the directory replays its journal (LateRecordApplier in start/applier.py)."""

    position: Position
    retired: bool = False
    missed: bool = False


Marks = Mapping[str, JournalMark]
"""By the journal directory's id."""


class BadCheckpoint(Exception):
    """The checkpoint file is damaged."""


def encode(marks: Marks) -> bytes:
    parts = [_HEAD.pack(MAGIC, VERSION, 0, len(marks))]
    for journal_id in sorted(marks):
        position, retired, missed = marks[journal_id]
        flags = (_RETIRED if retired else 0) | (_MISSED if missed else 0)
        name = journal_id.encode()
        parts += (_ITEM.pack(*position, flags, len(name)), name)
    body = b"".join(parts)
    return body + _CRC.pack(crc32c(body))


def decode(data: bytes) -> Marks:
    """Raises BadCheckpoint."""
    body = data[: -_CRC.size]
    if len(body) < _HEAD.size or _CRC.unpack(data[-_CRC.size :])[0] != crc32c(body):
        raise BadCheckpoint("the checkpoint is cut short, or its CRC does not match")
    magic, version = _HEAD.unpack_from(body)[:2]
    if (magic, version) != (MAGIC, VERSION):
        raise BadCheckpoint(f"unknown checkpoint format {magic!r} version {version}")
    try:
        return _decode_items(body)
    except (struct.error, UnicodeDecodeError) as error:
        raise BadCheckpoint(f"the checkpoint's marks cannot be decoded: {error}") from error


def _decode_items(body: bytes) -> Marks:
    marks: dict[str, JournalMark] = {}
    at = _HEAD.size
    for _ in range(_HEAD.unpack_from(body)[3]):
        file_id, offset, flags, length = _ITEM.unpack_from(body, at)
        at += _ITEM.size + length
        name = body[at - length : at].decode()
        position = Position(file_id, offset)
        marks[name] = JournalMark(position, bool(flags & _RETIRED), bool(flags & _MISSED))
    return marks


def furthest(first: Marks, second: Marks) -> Marks:
    """Of each journal the mark that is further on."""
    names = [*first, *(name for name in second if name not in first)]
    return {n: max(marks[n] for marks in (first, second) if n in marks) for n in names}


async def write(disk: Disk, marks: Marks) -> None:
    """Durable when it returns. Raises DiskFailed."""
    await disk.make_folder(FOLDER)
    await replace_file(disk, PATH, encode(marks), TEMPORARY)


async def read(disk: Disk) -> Marks | None:
    """The marks; None if no checkpoint was written. Raises BadCheckpoint, DiskFailed."""
    try:
        return decode(await read_file(disk, PATH))
    except NoSuchFile:
        return None
