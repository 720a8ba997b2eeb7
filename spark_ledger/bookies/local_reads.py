"""Entries of bookies on this host, read from the files that the bookies say they lie in.

Always true:
- what is read is checked as what comes over the network is (header, digest, which entry it is);
  where anything is wrong (the file is gone, ends too early, may not be read, holds something else)
  nothing is returned: the bookie is asked for the bytes, and learns of damage by reading them;
- a directory counts as the bookie's only where its identity file has the bookie's id: another host
  or container may have another one of that name;
- after a failure the bookie's files are left alone for RETRY_S; a disk that hangs holds a caller up
  for LOCAL_S. That an entry is not where it was told ahead of time is no failure: it may have moved
  meanwhile, and the bookie is asked where it lies now.

The idea is HDFS's short-circuit reads (HDFS-347).
"""

import asyncio
import logging
import os
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from itertools import chain
from typing import NamedTuple

from bookie_server.api.entry import BadEntry, Entry, unpack_entry
from bookie_server.api.entry_ids import ids_in
from bookie_server.api.messages import EntryPlace, EntryResult, ReadRequest, ReadResponse
from bookie_server.api.status import Status, StopReason
from spark_ledger.bookies.network import LocalFiles
from spark_ledger.bookies.told_places import PLACES_MAX, Reading, ToldPlaces

LOCAL_S = 1.0
RETRY_S = 10.0
GAP_BYTES_MAX = 8192  # headers of records, and what fills a block up
RUN_BYTES_MAX = 4 << 20
_log = logging.getLogger(__name__)


class _Told(NamedTuple):
    """Which entry an answer tells the place of, at which of its results."""

    at: int
    ledger_id: int
    entry_id: int
    place: EntryPlace


class LocalReads:
    """Of one client; `now` gives seconds."""

    def __init__(self, now: Callable[[], float], files: LocalFiles) -> None:
        self._now = now
        self._files = files
        self._known: dict[tuple[str, str], None] = {}
        self._again_at: dict[str, float] = {}
        self._ahead = ToldPlaces()

    def may_be_read(self, bookie_id: str) -> bool:
        """Whether the bookie's files may be readable here."""
        return self._now() >= self._again_at.get(bookie_id, 0.0)

    async def known(self, request: ReadRequest) -> ReadResponse | None:
        """An answer to the request by places that were told ahead of time; None: ask."""
        reading = Reading(request.bookie_id, request.ledger_id, request.token)
        ids = ids_in(request.spans, PLACES_MAX)
        places = self._ahead.take(reading, ids, request.max_bytes)
        if not places:
            return None
        told = [
            _Told(at, request.ledger_id, entry_id, place)
            for at, (entry_id, place) in enumerate(zip(ids, places, strict=False))
        ]
        try:
            async with asyncio.timeout(LOCAL_S):
                entries = await self._read(request.bookie_id, told)
        except (OSError, BadEntry) as error:
            self._ahead.forget(reading)
            if isinstance(error, TimeoutError):
                self._leave_alone(request.bookie_id, error)
            return None
        whole = told[-1].entry_id == request.spans[-1][1]
        stop = StopReason.END_OF_RANGE if whole else StopReason.BYTE_LIMIT
        results = [EntryResult(Status.OK, checked=entry) for entry in entries]
        return ReadResponse(Status.OK, results, stop=stop)

    async def carried_out(
        self, request: ReadRequest, response: ReadResponse
    ) -> ReadResponse | None:
        """The response with all entries that it tells the places of; None: they cannot be had.
        What it tells of entries `ahead` is remembered."""
        reading = Reading(request.bookie_id, request.ledger_id, request.token)
        ids = ids_in(request.spans, max(1, len(response.results)))
        self._ahead.drop(reading, ids)
        self._ahead.remember(reading, ids_in(request.ahead, len(response.ahead)), response.ahead)
        told = [
            _Told(at, request.ledger_id, entry_id, result.place)
            for at, (entry_id, result) in enumerate(zip(ids, response.results, strict=False))
            if result.place is not None
        ]
        if not told:
            return response
        try:
            async with asyncio.timeout(LOCAL_S):
                entries = await self._read(request.bookie_id, told)
        except (OSError, BadEntry) as error:  # TimeoutError is an OSError
            self._leave_alone(request.bookie_id, error)
            return None
        results = list(response.results)
        for each, entry in zip(told, entries, strict=True):
            results[each.at] = EntryResult(Status.OK, checked=entry)
        return response._replace(results=results)

    def close(self) -> None:
        """See LocalFiles.close."""
        self._files.close()

    def _leave_alone(self, bookie_id: str, error: OSError | BadEntry) -> None:
        _log.info("files of bookie %s are not read here: %r", bookie_id, error)
        self._again_at[bookie_id] = self._now() + RETRY_S

    async def _read(self, bookie_id: str, told: Sequence[_Told]) -> list[Entry]:
        """Raises OSError, BadEntry."""
        for directory in dict.fromkeys(each.place.directory for each in told):
            if (bookie_id, directory) not in self._known:
                if bookie_id.encode() not in (await self._files.identity(directory)).split():
                    raise OSError(f"{directory} belongs to another bookie")
                self._known[bookie_id, directory] = None
        reads = [self._read_run(run) for run in _runs(told)]
        return list(chain.from_iterable(await asyncio.gather(*reads)))

    async def _read_run(self, run: Sequence[_Told]) -> list[Entry]:
        """One read of the file. Raises OSError, BadEntry (of bytes that end too early, too)."""
        first, last = run[0].place, run[-1].place
        length = last.position + last.entry_bytes - first.position
        path = os.path.join(first.directory, first.file)
        return await self._files.read(path, first.position, length, partial(_all_checked, run))


def _runs(told: Sequence[_Told]) -> Iterator[list[_Told]]:
    """Cut into what lies together in one file."""
    run: list[_Told] = []
    for each in told:
        if run and not _follows(each.place, run[0].place, run[-1].place):
            yield run
            run = []
        run.append(each)
    if run:
        yield run


def _follows(place: EntryPlace, first: EntryPlace, last: EntryPlace) -> bool:
    gap = place.position - last.position - last.entry_bytes
    return (
        (place.directory, place.file) == (first.directory, first.file)
        and 0 <= gap <= GAP_BYTES_MAX
        and place.position + place.entry_bytes - first.position <= RUN_BYTES_MAX
    )


def _all_checked(run: Sequence[_Told], data: memoryview) -> list[Entry]:
    """The payloads are views into the data. Raises BadEntry."""
    start = run[0].place.position
    return [_checked(each, data[each.place.position - start :]) for each in run]


def _checked(told: _Told, data: memoryview) -> Entry:
    entry = unpack_entry(data[: told.place.entry_bytes])
    if (entry.header.ledger_id, entry.header.entry_id) != (told.ledger_id, told.entry_id):
        raise BadEntry(f"another entry lies where {told.ledger_id}:{told.entry_id} should")
    return entry
