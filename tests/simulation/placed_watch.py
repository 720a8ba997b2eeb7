"""What becomes of large entries at one bookie identity: where they were placed, whether its journal
told of that, and whether a checkpoint has passed it.

Always true: what is watched behaves as if it were not; a place counts as told when the journal's
record of it was synced, or the journal failed before it said so, and until a checkpoint passed that
record; what a run did not settle is settled by the next start that succeeds, and lost if its
directory was not there then.
"""

import asyncio
from collections.abc import Sequence
from typing import Any

from bookie_server.directory_store import DirectoryStore
from bookie_server.entry_index import Location
from bookie_server.journal_format import Record
from bookie_server.write_cache import CacheHalf
from tests.simulation.ghost import Ghost
from tests.simulation.index import SimIndex

Log = tuple[str, int]
"""Directory and log id."""


class PlacedWatch:
    """Of one identity, across its runs."""

    def __init__(self, ghost: Ghost) -> None:
        self._ghost = ghost
        self._logs: dict[Log, None] = {}
        self._earlier: dict[Log, None] = {}  # those of them that an earlier run began
        self._told: dict[Log, list[int]] = {}  # the ledgers of each group, oldest first
        self._untold = 0  # groups of entries that lie in a log while the journal's record does not
        self._starting = False
        self.lost: dict[int, None] = {}
        """Ledgers of which a place was told in a directory that a later start had not, or that may
        have failed during a start that failed too."""

    def starts(self) -> None:
        """A run begins."""
        if self._starting:
            self._lose(list(self._told))
        self._starting = True
        self._earlier = dict(self._logs)

    def _lose(self, logs: Sequence[Log]) -> None:
        for told in [self._told[log] for log in logs]:
            self.lost.update(dict.fromkeys(told))

    def crashes(self) -> None:
        if self._untold:
            self._ghost.meet("crashed between a large entry and the record of its place")
        self._untold = 0

    def forgets_logs(self) -> None:
        """Its only directory is empty: log ids begin anew."""
        self._logs.clear()

    def watch_index(self, directory: str, index: SimIndex) -> None:
        plain_put = index.put

        async def put(locations: Sequence[Location]) -> None:
            await plain_put(locations)
            if any((directory, location.log_id) in self._earlier for location in locations):
                self._ghost.meet("places replayed at a start")

        index.put = put  # type: ignore[method-assign]

    def watch(self, storage: Any) -> None:
        """Of a bookie that has started: its replay is in the checkpoint."""
        absent = [
            log for log, told in self._told.items() if told and not storage.has_directory(log[0])
        ]
        if absent:
            self._ghost.meet("started without the directory of a place")
            self._lose(absent)
        self._starting = False
        self._told.clear()
        self._watch_placing(storage._placing)
        self._watch_flushes(storage)
        for store in storage.stores:
            self._watch_logs(store)

    def _watch_placing(self, placing: Any) -> None:
        plain_take, plain_written = placing._take_over, placing._written
        plain_records, plain_journaled = placing._records, placing._journaled
        plain_confirm = placing._confirm

        def take_over(ledger_id: int) -> None:
            if placing._unwritten.get(ledger_id):
                self._ghost.meet("large entry on its way taken over by the journal")
            plain_take(ledger_id)

        def written(large: Any, placed: Any, told: "asyncio.Future[list[Location]]") -> None:
            if told.cancelled() or told.exception() is not None:
                self._ghost.meet("large entry that could not be placed went to the journal")
            plain_written(large, placed, told)

        def records(large: Any, places: Sequence[Location]) -> list[Record]:
            self._untold += 1
            found: list[Record] = plain_records(large, places)
            return found

        def journaled(large: Any, places: Sequence[Location], done: "asyncio.Future[None]") -> None:
            plain_journaled(large, places, done)
            if places:
                self._untold -= 1
                if not done.cancelled() and done.exception() is None:
                    self._ghost.meet("large entry acknowledged where it was placed")
                else:
                    tells(large, places)

        def confirm(large: Any, places: Sequence[Location]) -> None:
            plain_confirm(large, places)
            if places:
                tells(large, places)

        def tells(large: Any, places: Sequence[Location]) -> None:
            log = large.store.id, places[0].log_id
            self._told.setdefault(log, []).append(large.ledger_id)

        placing._take_over, placing._written = take_over, written
        placing._records, placing._journaled = records, journaled
        placing._confirm = confirm

    def _watch_flushes(self, storage: Any) -> None:
        plain_begin, plain_unplace = storage.begin_flush, storage._unplace

        def begin_flush() -> None:
            plain_begin()
            if storage._flush_begun.half.placing:
                self._ghost.meet("flush waited for large entries")

        def unplace(half: CacheHalf) -> None:
            places = [place for of in half.places.values() for place in of.values()]
            if not all(storage.has_directory(place.directory) for place in places):
                self._ghost.meet("large entry flushed elsewhere, its directory was lost")
            plain_unplace(half)

        storage.begin_flush, storage._unplace = begin_flush, unplace

    def _watch_logs(self, store: DirectoryStore) -> None:
        log, logs = store.placed_log, store.logs
        plain_settle, plain_seal, plain_finish = log.settle, logs.seal, logs.finish_copy
        plain_begin = logs.begin

        async def begin() -> Any:
            growing = await plain_begin()
            if log._task is asyncio.current_task():
                self._logs[store.id, growing.log_id] = None
            return growing

        def settle(log_id: int, count: int) -> None:
            self._told[store.id, log_id].pop(0)
            plain_settle(log_id, count)

        def seal(log_id: int) -> None:
            plain_seal(log_id)
            self._ghost.meet("log of large entries sealed")

        async def finish_copy(log_id: int) -> None:
            source = (store.id, logs.unfinished()[log_id])
            await plain_finish(log_id)
            if source in self._logs:
                self._ghost.meet("log of large entries compacted")

        log.settle, logs.seal = settle, seal  # type: ignore[method-assign]
        logs.begin, logs.finish_copy = begin, finish_copy  # type: ignore[method-assign]
