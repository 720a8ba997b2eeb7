"""What the journal says of an entry that was written to a ledger directory before: where it lies.

Always true: such a record is appended only after the entry's own record and its log's name are
durable, and after a ledger record that names the directory: so it never speaks of bytes that a
crash may have cost. docs/formats.md has the picture.
"""

import struct
from typing import NamedTuple

from bookie_server.entry_index import Location
from bookie_server.journal_format import Kind, Record, body_crc

_PLACE = struct.Struct("<QQI")


class Place(NamedTuple):
    """An entry's record, and the id of the ledger directory that holds it."""

    directory: str
    location: Location


def encode_place(place: Place) -> Record:
    """The journal's record."""
    ledger_id, entry_id, *where = place.location
    body = _PLACE.pack(*where) + place.directory.encode()
    return Record(Kind.PLACED, ledger_id, entry_id, body, body_crc(body))


def decode_place(record: Record) -> Place:
    """Of a record whose CRC is right."""
    body = bytes(record.body)
    where = _PLACE.unpack_from(body)
    location = Location(record.ledger_id, record.entry_id, *where)
    return Place(body[_PLACE.size :].decode(), location)
