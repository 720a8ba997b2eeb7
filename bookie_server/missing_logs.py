"""Entry logs that an index names and that are not there, looked for once after a start.

Always true: a ledger is quarantined for it only if an entry of it lies, by the index asked again,
in a log whose file is gone; the walk through the index is paced (PLACES_PER_S), reads no log that
is there, and gives way to whoever wants the index meanwhile.
"""

import asyncio
import logging

from bookie_server.compactor import Quarantine
from bookie_server.directory_store import DirectoryStore
from bookie_server.disk import NoSuchFile
from bookie_server.entry_index import Location

PLACES_PER_S = 200_000
_PAGE_BYTES = 4 << 20
_ID_MAX = 2**63 - 1
_log = logging.getLogger(__name__)


async def find_missing_logs(store: DirectoryStore, quarantine: Quarantine) -> dict[int, int]:
    """By log that is not there: how many ledgers have an entry in it. Raises DiskFailed."""
    missing: dict[int, int] = {}
    for ledger_id in await store.index.ledger_ids():
        of_ledger: dict[int, None] = {}
        first = 0
        while page := await store.index.range(ledger_id, first, _ID_MAX, _PAGE_BYTES):
            first = page[-1].entry_id + 1
            for place in {place.log_id: place for place in page}.values():
                if place.log_id not in of_ledger and await _is_missing(store, place):
                    why = f"log {place.log_id} is not there"
                    of_ledger[place.log_id] = None
                    quarantine(ledger_id, place.entry_id, why)
            await asyncio.sleep(len(page) / PLACES_PER_S)
        for log_id in of_ledger:
            missing[log_id] = missing.get(log_id, 0) + 1
    for log_id, count in missing.items():
        _log.error("entry log %d is not there: %d ledgers have entries in it", log_id, count)
    return missing


async def _is_missing(store: DirectoryStore, place: Location) -> bool:
    """Asked of the disk, and then of the index again: a log may just have been compacted."""
    if place.log_id in store.logs.sealed():
        return False
    (read,) = await store.logs.read_run([place])
    if not isinstance(read, NoSuchFile):
        return False
    return await store.index.get(place.ledger_id, place.entry_id) == place
