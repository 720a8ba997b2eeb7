"""The entry: a 64-byte header and a payload, the same on the wire and on disk.

Always true: the header has its own CRC, so its lengths are used only after this CRC is checked; the
payload's CRC is in the header; both CRCs are checked before an entry is journalled, after every
read from disk, and again by the reader.

    0        4     5       6          8          16         24
    +--------+-----+-------+----------+----------+----------+
    | "SLE1" | ver | flags | reserved | ledger   | entry    |
    +--------+-----+-------+----------+----------+----------+
    24         32                 40                48           52           56         60
    +----------+------------------+-----------------+------------+------------+----------+--------+
    | LAC      | cumulative bytes | cumulative rows | payload    | payload    | reserved | header |
    |          |                  |                 | length     | CRC32C     |          | CRC32C |
    +----------+------------------+-----------------+------------+------------+----------+--------+
    64 payload ...

All integers are little-endian; ledger, entry, LAC and the cumulative counts are signed 64-bit (-1
is "none"), the other numbers unsigned 32-bit. Cumulative counts include this entry. The identity
of an entry is (ledger, entry, cumulative bytes, cumulative rows, payload length, payload CRC). LAC
and flags are not in the identity, as a write-back of a recovery has another LAC (hazard 41).
"""

import importlib.util
import struct
from collections.abc import Callable, Sequence
from importlib.machinery import ExtensionFileLoader, PathFinder
from itertools import repeat
from operator import itemgetter
from typing import NamedTuple

Buffer = bytes | bytearray | memoryview

MAGIC = b"SLE1"
VERSION = 1
HEADER_BYTES = 64
NO_ENTRY = -1

_BODY = struct.Struct("<4sBBHqqqqqIII")
_CRC = struct.Struct("<I")
_HEADER = struct.Struct(_BODY.format + "I")
_checked, _payload = itemgetter(slice(0, _BODY.size)), itemgetter(slice(HEADER_BYTES, None))
assert _BODY.size + _CRC.size == _HEADER.size == HEADER_BYTES


Checksum = Callable[..., int]
PACKAGE, EXTENSION = "crc32c", "crc32c._crc32c"


def crc32c_without_its_package() -> Checksum | None:
    """The checksum function of the crc32c package, loaded without importing the package; None if
    the package is missing, or has another layout."""
    package = importlib.util.find_spec(PACKAGE)
    if package is None or package.submodule_search_locations is None:
        return None
    spec = PathFinder.find_spec(EXTENSION, package.submodule_search_locations)
    if spec is None or not isinstance(spec.loader, ExtensionFileLoader):
        return None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return getattr(module, "crc32c", None)


def find_crc32c() -> Checksum:
    """The checksum function, without importing the crc32c package if possible: on import the
    package looks up its own version, and so reads the metadata of every package on the path, which
    takes 50 ms in a process whose path has Spark's archives."""
    without_package = crc32c_without_its_package()
    if without_package is not None:
        return without_package
    from crc32c import crc32c as from_package

    return from_package


crc32c = find_crc32c()
"""crc32c(data, value=0): the checksum of `data`, computed by the processor; `value` is the checksum
of the data before it."""


class DamagedEntry(Exception):
    """The bytes are not a complete, undamaged entry."""


class EntryHeader(NamedTuple):
    """The fields of a header. Cumulative counts are over the ledger and include this entry."""

    ledger_id: int
    entry_id: int
    last_add_confirmed: int
    cumulative_bytes: int
    cumulative_rows: int
    payload_bytes: int
    payload_crc: int
    flags: int = 0

    @property
    def identity(self) -> tuple[int, int, int, int, int, int]:
        """Two entries are the same entry if these fields are equal; see the head of this file."""
        return (
            self.ledger_id,
            self.entry_id,
            self.cumulative_bytes,
            self.cumulative_rows,
            self.payload_bytes,
            self.payload_crc,
        )


class Entry(NamedTuple):
    """A checked entry: its header and a view of its payload."""

    header: EntryHeader
    payload: memoryview


def payload_crc(payload: Sequence[Buffer]) -> int:
    """CRC32C of the concatenated buffers; they are not joined."""
    crc = 0
    for part in payload:
        crc = crc32c(part, crc)
    return crc


def pack_header(header: EntryHeader) -> bytes:
    """The 64 bytes of a header, its own CRC included."""
    body = _BODY.pack(
        MAGIC,
        VERSION,
        header.flags,
        0,
        *header[:-1],  # all fields but the flags, in the order of the bytes
        0,
    )
    return body + _CRC.pack(crc32c(body))


def unpack_header(data: Buffer) -> EntryHeader:
    """Read and check a header from the first 64 bytes of `data`.

    Raises DamagedEntry when there are fewer bytes, another magic or version, or the CRC differs.
    """
    if len(data) < HEADER_BYTES:
        raise DamagedEntry(f"an entry header is {HEADER_BYTES} bytes, got {len(data)}")
    (
        magic,
        version,
        flags,
        _,
        ledger,
        entry,
        lac,
        bytes_so_far,
        rows_so_far,
        length,
        crc,
        _,
        header_crc,
    ) = _HEADER.unpack_from(data)
    if header_crc != crc32c(memoryview(data)[: _BODY.size]):
        raise DamagedEntry("the header's CRC does not match")
    if magic != MAGIC or version != VERSION:
        raise DamagedEntry(f"unknown entry format {magic!r} version {version}")
    return EntryHeader(ledger, entry, lac, bytes_so_far, rows_so_far, length, crc, flags)


def unpack_entry(data: Buffer) -> Entry:
    """Read and check a whole entry; the payload is a view into `data`, not a copy.

    Raises DamagedEntry when the header or the payload is damaged, or the length differs.
    """
    return Entry(check_entry(data), memoryview(data)[HEADER_BYTES:])


def check_entry(data: Buffer) -> EntryHeader:
    """`unpack_entry`, for callers that need the header only. Raises DamagedEntry."""
    header = unpack_header(data)
    if len(data) - HEADER_BYTES != header.payload_bytes:
        size = len(data) - HEADER_BYTES
        raise DamagedEntry(f"payload is {size} bytes, in the header {header.payload_bytes}")
    if crc32c(memoryview(data)[HEADER_BYTES:]) != header.payload_crc:
        raise DamagedEntry(
            f"payload CRC of entry {header.ledger_id}:{header.entry_id} does not match"
        )
    return header


def fault(data: Buffer, ledger_id: int, entry_id: int) -> str:
    """Why the bytes are not this entry, complete and undamaged; empty if they are this entry."""
    try:
        header = check_entry(data)
    except DamagedEntry as error:
        return str(error)
    is_same = (header.ledger_id, header.entry_id) == (ledger_id, entry_id)
    return "" if is_same else "the record holds another entry"


def check_entries(entries: Sequence[Buffer]) -> list[EntryHeader] | None:
    """`check_entry` of each entry, column by column: this takes half the time of a Python loop.
    None if any entry is damaged; `check_entry` finds the damaged entry."""
    if not entries:
        return []
    if min(map(len, entries)) < HEADER_BYTES:
        return None
    columns = zip(*map(_HEADER.unpack_from, entries), strict=True)
    magic, version, flags, _, *middle, lengths, crcs, _, header_crcs = columns
    count = len(entries)
    are_good = (
        magic.count(MAGIC) == version.count(VERSION) == count
        and header_crcs == tuple(map(crc32c, map(_checked, entries)))
        and [HEADER_BYTES + length for length in lengths] == list(map(len, entries))
        and crcs == tuple(map(crc32c, map(_payload, entries)))
    )
    if not are_good:
        return None
    fields = zip(*middle, lengths, crcs, flags, strict=True)
    return list(map(tuple.__new__, repeat(EntryHeader), fields))
