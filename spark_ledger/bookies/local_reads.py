"""Entries of bookies on this host, read from the files at the locations that the bookies give.

Always true:
- what is read is checked as what comes over the network is (header, digest, which entry it is);
  where anything is wrong (the file is gone, ends too early, may not be read, holds something else)
  nothing is returned: the bookie is asked for the bytes, and learns of damage by reading them;
- a directory counts as the bookie's only if its identity file has the bookie's id: on another host
  or in another container the same path may be another bookie's;
- after a failure the client leaves the bookie's files alone for RETRY_S; a disk that hangs holds a
  caller up for LOCAL_S. An entry that is not at the location of an earlier response is no failure:
  it may have moved since, and the bookie is asked for its location now.

The idea is HDFS's short-circuit reads (HDFS-347).
"""

import asyncio
import logging
from collections.abc import Awaitable, Callable, Sequence
from functools import partial

from bookie_server.api import messages as m
from bookie_server.api.entry import BadEntry, Entry, unpack_entry
from bookie_server.api.messages import EntryIds, ids_in, spans_of
from bookie_server.api.status import Status, StopReason
from spark_ledger.bookies.local_files import HostFiles

LOCAL_S = 1.0
RETRY_S = 10.0
_IDENTITY_BYTES_MAX = 1024
_log = logging.getLogger(__name__)

Locations = dict[int, m.EntryLocation]
"""By entry id, ascending: where entries of one ledger are at one bookie."""
Ask = Callable[[m.ReadRequest], Awaitable[m.ReadResponse]]


class LocalReads:
    """Of one client; `now` gives seconds."""

    def __init__(self, now: Callable[[], float], files: HostFiles) -> None:
        self._now = now
        self._files = files
        self._identified: dict[tuple[str, str], None] = {}
        self._again_at: dict[str, float] = {}

    def may_read(self, bookie_id: str) -> bool:
        """Whether the bookie's files may be readable here."""
        return self._now() >= self._again_at.get(bookie_id, 0.0)

    async def read(
        self, request: m.ReadRequest, locations: Locations, ahead: EntryIds, ask: Ask
    ) -> m.ReadResponse:
        """The response to the request. `locations` is its reader's map, from which a read takes
        what it uses. If it lacks an entry the bookie is asked, also for the locations of the
        entries `ahead`, which then are all that the map has."""
        for known in (locations, {}):
            if not self.may_read(request.bookie_id):
                break
            response = _of_map(request, known)
            asked = response is None
            if response is None:
                response = await ask(request._replace(locations=True, ahead=spans_of(ahead)))
                locations.clear()
                locations.update(zip(ahead, response.ahead, strict=False))
            if (whole := await self._fill(request, response, asked)) is not None:
                return whole
            locations.clear()
        return await ask(request)

    async def _fill(
        self, request: m.ReadRequest, response: m.ReadResponse, asked: bool
    ) -> m.ReadResponse | None:
        """The response with the entries themselves; None: they cannot be read here. `asked`: the
        bookie has just given the locations."""
        ids = ids_in(request.spans, len(response.results))
        results = dict(zip(ids, response.results, strict=False))
        located = {each: result.location for each, result in results.items() if result.location}
        if not located:
            return response
        try:
            async with asyncio.timeout(LOCAL_S):
                entries = await self._read(request, located)
        except (OSError, BadEntry) as error:
            if asked or isinstance(error, TimeoutError):
                _log.info("files of bookie %s are not read here: %r", request.bookie_id, error)
                self._again_at[request.bookie_id] = self._now() + RETRY_S
            return None
        for entry in entries:
            results[entry.header.entry_id] = m.EntryResult(Status.OK, checked=entry)
        return response._replace(results=list(results.values()))

    async def _read(self, request: m.ReadRequest, located: Locations) -> list[Entry]:
        """In one call of a thread. Raises OSError, BadEntry (also of bytes that end too early)."""
        for directory in dict.fromkeys(location.directory for location in located.values()):
            await self._identify(request.bookie_id, directory)
        check = partial(_checked, request.ledger_id, list(located))
        return await self._files.read(list(located.values()), check)

    async def _identify(self, bookie_id: str, directory: str) -> None:
        """Raises OSError unless the directory is the bookie's."""
        if (bookie_id, directory) not in self._identified:
            file = m.EntryLocation(directory, m.IDENTITY_FILE, 0, _IDENTITY_BYTES_MAX)
            identity = await self._files.read([file], lambda found: bytes(found[0]))
            if bookie_id.encode() not in identity.split():
                raise OSError(f"{directory} belongs to another bookie")
            self._identified[bookie_id, directory] = None


def _of_map(request: m.ReadRequest, locations: Locations) -> m.ReadResponse | None:
    """What the bookie would respond: locations, as far as `max_bytes` reach, of one entry at least;
    None if one of these is not in the map."""
    ids = ids_in(request.spans, len(locations) + 1)
    used, left = 0, request.max_bytes
    while used < len(ids) and (left > 0 or not used):
        if ids[used] not in locations:
            return None
        left -= locations[ids[used]].entry_bytes
        used += 1
    results = [m.EntryResult(Status.OK, location=locations.pop(each)) for each in ids[:used]]
    whole = ids[used - 1] == request.spans[-1][1]
    stop = StopReason.END_OF_RANGE if whole else StopReason.BYTE_LIMIT
    return m.ReadResponse(Status.OK, results, stop=stop)


def _checked(ledger_id: int, ids: Sequence[int], found: Sequence[memoryview]) -> list[Entry]:
    """Raises BadEntry."""
    entries = [unpack_entry(data) for data in found]
    for entry_id, entry in zip(ids, entries, strict=True):
        if (entry.header.ledger_id, entry.header.entry_id) != (ledger_id, entry_id):
            raise BadEntry(f"another entry is at the location of {ledger_id}:{entry_id}")
    return entries
