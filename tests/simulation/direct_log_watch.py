"""What becomes of large entries at one bookie identity: where they were placed, what a start finds
of them beyond a log's mark, and how that ends.

Always true: the watched bookie behaves as if it were not watched; what a start finds is read from
the disk, from the mark that the index gives to the start, and compared with the places that the
bookie gave.
"""

import asyncio
from collections.abc import Sequence
from typing import Any, NamedTuple

from bookie_server.logs.entry_log import (
    BLOCK_BYTES,
    FOOTER_BYTES,
    BadEntryLog,
    decode_record,
    log_path,
    map_start,
    record_end,
)
from bookie_server.logs.index import Location
from bookie_server.logs.scan import parse
from bookie_server.storage.directories import DirectoryStore
from tests.simulation.disk import SimDisk
from tests.simulation.ghost import Ghost
from tests.simulation.index import SimIndex

Log = tuple[str, int]
"""Directory and log id."""


class _Unread(NamedTuple):
    """An entry whose place the bookie gave and that a start cannot read; `synced`: the bytes there
    were not written last."""

    directory: str
    ledger_id: int
    entry_id: int
    synced: bool


class DirectLogWatch:
    """Of one identity, across its runs."""

    def __init__(self, ghost: Ghost) -> None:
        self._ghost = ghost
        self._logs: dict[Log, None] = {}
        self._replayed: dict[Log, None] = {}  # those that this start reads
        self._away: dict[str, None] = {}  # directories that the latest run did not have
        self._told: dict[Log, list[Location]] = {}  # places that no start found passed by a mark
        self._unread: list[_Unread] = []  # by this start
        self._starting = False
        self._storage: Any = None  # of the bookie that runs

    def starts(self) -> None:
        """A run begins."""
        self._starting = True
        self._replayed.clear()
        self._unread.clear()

    def crashes(self) -> None:
        for store in self._storage.stores if self._storage is not None else ():
            if store.direct_log._writing:
                self._ghost.meet("crashed while large entries were written")
            if store.direct_log._unmarked:
                self._ghost.meet("crashed between a large entry's ack and its flush")
        self._storage = None

    def forgets_logs(self) -> None:
        """Its only directory is empty: log ids begin anew."""
        self._logs.clear()
        self._told.clear()

    def unsaid(self) -> list[str]:
        """Entries whose places the bookie had given, and that this start could not read and did not
        report."""
        storage, found = self._storage, []
        for directory, ledger_id, entry_id, synced in self._unread:
            state = storage.state(ledger_id)
            if state is None or state.deleted or directory not in state.directories:
                continue
            limbo = storage.limbo(ledger_id)
            if limbo != "lost" and (synced or not limbo):
                found.append(f"ledger {ledger_id} entry {entry_id}")
        return found

    def watch_index(self, directory: str, index: SimIndex, disk: SimDisk) -> None:
        plain_put, plain_marked = index.put, index.marked_logs

        async def put(locations: Sequence[Location]) -> None:
            await plain_put(locations)
            logs = {(directory, location.log_id): None for location in locations}
            if self._starting and any(log in self._replayed for log in logs):
                self._ghost.meet("places replayed at a start")
                if directory in self._away:
                    self._ghost.meet("places replayed of a directory that was away")

        async def marked_logs() -> dict[int, int]:
            marks = await plain_marked()
            for log_id, mark in marks.items():
                if self._starting and (directory, log_id) not in self._replayed:
                    self._replayed[directory, log_id] = None
                    self._begins_to_read(disk, directory, log_id, mark)
            return marks

        index.put, index.marked_logs = put, marked_logs  # type: ignore[method-assign]

    def _begins_to_read(self, disk: SimDisk, directory: str, log_id: int, mark: int) -> None:
        path = log_path(log_id)
        data = disk.content(path) if path in disk.paths() else b""
        told = self._told.get((directory, log_id), [])
        told = self._told[directory, log_id] = [each for each in told if each.position >= mark]
        ended = _records_end(data, log_id)
        synced, torn = _synced(data, mark, ended or len(data), log_id)
        if torn and not ended:
            self._ghost.meet("torn write in a direct log at a start")
        for location in [each for each in told if not _is_whole(data, each)]:
            was_synced = location.position < max(synced, ended)
            unread = _Unread(directory, location.ledger_id, location.entry_id, was_synced)
            self._unread.append(unread)
            if was_synced:
                self._ghost.meet("damage in a direct log at a start")

    def watch(self, storage: Any) -> None:
        """Of a bookie that has started: what it found is flushed."""
        self._starting = False
        self._storage = storage
        self._away = dict.fromkeys(storage.failures)
        self._away.update(storage.absent()["ledger"])
        self._watch_writes(storage._direct_writes)
        self._watch_flushes(storage)
        for store in storage.stores:
            self._watch_logs(store)

    def _watch_writes(self, writes: Any) -> None:
        plain_take, plain_written = writes._take_over, writes._finish
        plain_acknowledge = writes._acknowledge

        def take_over(ledger_id: int) -> None:
            if writes._unwritten.get(ledger_id):
                self._ghost.meet("large entry on its way taken over by the journal")
            plain_take(ledger_id)

        def written(large: Any, placed: Any, told: "asyncio.Future[list[Location]]") -> None:
            if told.cancelled() or told.exception() is not None:
                self._ghost.meet("large entry that could not be placed went to the journal")
            else:
                log = large.store.id, told.result()[0].log_id
                self._told.setdefault(log, []).extend(told.result())
            plain_written(large, placed, told)

        def acknowledged(done: "asyncio.Future[None]") -> None:
            if not done.cancelled() and done.exception() is None:
                self._ghost.meet("large entry acknowledged where it was placed")

        def placed(large: Any) -> None:
            if large.ledger_id in writes._state_records:
                self._ghost.meet("large entry waited for the record of its ledger")
            plain_acknowledge(large)
            large.done.add_done_callback(acknowledged)

        writes._take_over, writes._finish = take_over, written
        writes._acknowledge = placed

    def _watch_flushes(self, storage: Any) -> None:
        plain_begin, plain_rescue = storage.begin_flush, storage.rescue

        def begin_flush() -> None:
            plain_begin()
            half = storage._current_flush.half
            if half.direct_writes:
                self._ghost.meet("flush waited for large entries")
            plain_drop_locations = half.drop_locations

            def drop_locations(lives: Any) -> None:
                if any(half.with_lost_locations(ledger_id, lives) for ledger_id in half.locations):
                    self._ghost.meet("large entry flushed elsewhere, its directory was lost")
                plain_drop_locations(lives)

            half.drop_locations = drop_locations

        def rescue(ledger_id: int) -> list["asyncio.Future[None]"]:
            rescued: list[asyncio.Future[None]] = plain_rescue(ledger_id)
            if rescued:
                self._ghost.meet("large entry rescued before its directory was given up")
            return rescued

        storage.begin_flush, storage.rescue = begin_flush, rescue

    def _watch_logs(self, store: DirectoryStore) -> None:
        log, logs = store.direct_log, store.logs
        plain_seal, plain_finish, plain_begin = logs.seal, logs.finish_copy, logs.begin

        async def begin() -> Any:
            growing = await plain_begin()
            self._told.pop((store.id, growing.log_id), None)  # of a log that is gone
            self._logs.pop((store.id, growing.log_id), None)
            if log._task is asyncio.current_task():
                self._logs[store.id, growing.log_id] = None
            return growing

        def seal(log_id: int) -> None:
            plain_seal(log_id)
            self._ghost.meet("log of large entries sealed")

        async def finish_copy(log_id: int) -> None:
            source = (store.id, logs.unfinished_copies()[log_id])
            await plain_finish(log_id)
            if source in self._logs:
                self._ghost.meet("log of large entries compacted")

        logs.seal = seal  # type: ignore[method-assign]
        logs.begin, logs.finish_copy = begin, finish_copy  # type: ignore[method-assign]


def _synced(data: bytes, start: int, end: int, log_id: int) -> tuple[int, bool]:
    """Up to where a direct log was synced, as its writes say, and whether anything after that
    cannot be read."""
    at, synced, bad_end = start, start, 0
    while at < end:
        parsed = parse(memoryview(data)[at:end], at, end, log_id)
        synced = max([synced, *(record.write_start for record in parsed.records)])
        bad_end = max([bad_end, *(bad.end for bad in parsed.damage)])
        at = parsed.position
    return synced, bad_end > synced


def _is_whole(data: bytes, location: Location) -> bool:
    try:
        decode_record(memoryview(data)[location.position : record_end(location)], location)
    except BadEntryLog:
        return False
    return True


def _records_end(data: bytes, log_id: int) -> int:
    """The end of the blocks that have records, if the log has a footer; else 0."""
    try:
        return map_start(log_id, data[-FOOTER_BYTES:], len(data)) // BLOCK_BYTES * BLOCK_BYTES
    except BadEntryLog:
        return 0
