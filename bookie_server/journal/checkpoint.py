"""The checkpoint: for each journal directory, the position before which nothing is needed any more.

Always true: each mark by itself is a statement about all stores of the node: everything before it
is durable in every ledger directory that lives. So marks are never compared with each other
(BK#4844), of several copies the furthest mark of each journal is right, and none moves back
(BK#4105). It is written only by LedgerStorage, to every living ledger directory; a copy is replaced
whole (temporary file, sync, rename, folder sync), so there is the old one or the new.
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
_VERSION_1 = struct.Struct("<4sHHQQ")


class Mark(NamedTuple):
    """Of one journal directory. `retired`: nothing in it is needed, nor ever will be: it may be
    missing; if it is there it is not replayed. `missed`: retired because it was missing at a start,
    which put every ledger in limbo: if it is there it is replayed after all (start/replayed.py)."""

    position: Position
    retired: bool = False
    missed: bool = False


Marks = Mapping[str, Mark]
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


def decode(data: bytes, first_journal: str) -> Marks:
    """`first_journal` is whose mark a file of version 1 holds. Raises BadCheckpoint."""
    body = data[: -_CRC.size]
    if len(body) < _HEAD.size or _CRC.unpack(data[-_CRC.size :])[0] != crc32c(body):
        raise BadCheckpoint("the checkpoint is cut short, or its CRC does not match")
    magic, version = _HEAD.unpack_from(body)[:2]
    if (magic, version) == (MAGIC, 1) and len(body) == _VERSION_1.size:
        return {first_journal: Mark(Position(*_VERSION_1.unpack(body)[3:]))}
    if (magic, version) != (MAGIC, VERSION):
        raise BadCheckpoint(f"unknown checkpoint format {magic!r} version {version}")
    try:
        return _decode_items(body)
    except (struct.error, UnicodeDecodeError) as error:
        raise BadCheckpoint(f"the checkpoint's marks do not fit into it: {error}") from error


def _decode_items(body: bytes) -> Marks:
    marks: dict[str, Mark] = {}
    at = _HEAD.size
    for _ in range(_HEAD.unpack_from(body)[3]):
        file_id, offset, flags, length = _ITEM.unpack_from(body, at)
        at += _ITEM.size + length
        name = body[at - length : at].decode()
        position = Position(file_id, offset)
        marks[name] = Mark(position, bool(flags & _RETIRED), bool(flags & _MISSED))
    return marks


def furthest(one: Marks, other: Marks) -> Marks:
    """Of each journal the mark that says more."""
    names = [*one, *(name for name in other if name not in one)]
    return {n: max(each[n] for each in (one, other) if n in each) for n in names}


async def write(disk: Disk, marks: Marks) -> None:
    """Durable when it returns. Raises DiskFailed."""
    await disk.make_folder(FOLDER)
    await replace_file(disk, PATH, encode(marks), TEMPORARY)


async def read(disk: Disk, first_journal: str) -> Marks | None:
    """The marks, None when none were ever written. Raises BadCheckpoint, DiskFailed."""
    try:
        return decode(await read_file(disk, PATH), first_journal)
    except NoSuchFile:
        return None
