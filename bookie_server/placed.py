"""Where an entry lies that was written to a ledger directory before it was flushed."""

from typing import NamedTuple

from bookie_server.entry_index import Location


class Place(NamedTuple):
    """An entry's record, and the id of the ledger directory that holds it."""

    directory: str
    location: Location
