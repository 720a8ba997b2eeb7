"""The checkpoint: the journal position before which nothing is needed any more.

Always true: it is written only by LedgerStorage, after entry logs and index were synced; it is
replaced whole (temporary file, sync, rename, folder sync), so there is the old one or the new.
docs/formats.md has the picture.
"""

import struct

from crc32c import crc32c

from bookie_server.disk import Disk, NoSuchFile
from bookie_server.journal_format import Position

MAGIC, VERSION = b"SLCP", 1
FOLDER, PATH, TEMPORARY = "checkpoint", "checkpoint/mark", "checkpoint/mark.tmp"

_BODY = struct.Struct("<4sHHQQ")
_CRC = struct.Struct("<I")


class BadCheckpoint(Exception):
    """The checkpoint file is damaged."""


def encode(mark: Position) -> bytes:
    body = _BODY.pack(MAGIC, VERSION, 0, mark.file_id, mark.offset)
    return body + _CRC.pack(crc32c(body))


def decode(data: bytes) -> Position:
    """Raises BadCheckpoint."""
    if len(data) != _BODY.size + _CRC.size:
        raise BadCheckpoint(f"a checkpoint has {_BODY.size + _CRC.size} bytes, got {len(data)}")
    magic, version, _, file_id, offset = _BODY.unpack_from(data)
    if _CRC.unpack_from(data, _BODY.size)[0] != crc32c(data[: _BODY.size]):
        raise BadCheckpoint("the checkpoint's CRC does not match")
    if (magic, version) != (MAGIC, VERSION):
        raise BadCheckpoint(f"unknown checkpoint format {magic!r} version {version}")
    return Position(file_id, offset)


async def write(disk: Disk, mark: Position) -> None:
    """Durable when it returns. Raises DiskFailed."""
    await disk.make_folder(FOLDER)
    if TEMPORARY.split("/")[1] in await disk.list(FOLDER):
        await disk.remove(TEMPORARY)
    file = await disk.create(TEMPORARY)
    await file.append([encode(mark)], sync=True)
    await file.close()
    await disk.rename(TEMPORARY, PATH)
    await disk.sync_dir(FOLDER)


async def read(disk: Disk) -> Position | None:
    """The mark, None when none was ever written. Raises BadCheckpoint, DiskFailed."""
    try:
        file = await disk.open(PATH)
    except NoSuchFile:
        return None
    try:
        return decode(await file.read(0, file.end))
    finally:
        await file.close()
