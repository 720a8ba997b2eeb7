"""The destination of an append: the journal of its ledger (`Journals`) or, for a large entry, the
direct log of a ledger directory (`DirectWrites`).

Always true of `Journals`, which has one journal in each journal directory:
- the records of a ledger go to one journal while that journal lives. At the ledger's first record
  of a run the journal with the fewest pending bytes is chosen; if several have equally few, the
  journal with the fewest ledgers;
- when a journal fails, the appends that wait in it fail, and each of its ledgers goes on in another
  journal, with a record of its present state first: so each journal can be replayed by itself;
- records appended before a journal failed may be in no journal: no later append of its ledgers
  counts as durable until a flush has written these records (the failure's *relief*).

Always true of large entries, which are written once:
- an entry is acknowledged after its record in the directory's direct log was synced, and after a
  ledger record that names the directory is durable in a journal: without that ledger record a start
  would not count the directory's entries;
- an append waits for earlier large entries of its ledger too. But a recovery does not wait for a
  directory, which may be slow or hang: the journal takes over the ledger's unwritten entries;
- when a directory fails or has no space, its large entries go to the journal: the write cache still
  has them.

Only appends of the bulk lane go to direct logs: recovery has its own lane, and page-cache ledgers
gain nothing by direct logs.
"""

import asyncio
import logging
from collections.abc import Awaitable, Callable, Mapping, Sequence
from functools import partial
from typing import NamedTuple

from bookie_server.disk.interface import DiskFailed
from bookie_server.journal.format import Position, Record, RecordKind
from bookie_server.journal.writer import Journal, JournalFailed, retrieve_error
from bookie_server.lanes import Lane
from bookie_server.logs.index import LedgerStates, Location
from bookie_server.storage.directories import DirectoryStore, Stores
from bookie_server.storage.write_cache import CacheHalf, DirectLocation, WriteCache

_log = logging.getLogger(__name__)

DoneFuture = asyncio.Future[None]


class Journals:
    """The journals of a node. `record_of` makes the journal record of a ledger's present state;
    None: the ledger has no state."""

    def __init__(self, record_of: Callable[[int], Record | None]) -> None:
        self._live: dict[str, Journal] = {}
        self._record_of = record_of
        self.homes: dict[int, str] = {}
        """By ledger: the journal that takes its records."""
        self._ledger_counts: dict[str, int] = {}  # by journal: how many ledgers it is the home of
        self._reliefs_by_ledger: dict[int, DoneFuture] = {}  # of ledgers of a failed journal
        self._reliefs: list[DoneFuture] = []
        self.failures: dict[str, str] = {}
        """By directory id: why its journal failed."""
        self.on_failure: Callable[[], None] = lambda: None
        """Called when a journal has failed and others live."""
        self.end: DoneFuture = asyncio.get_running_loop().create_future()
        """Done when the journals were closed; fails when the last journal fails."""

    def begin(self, journals: Mapping[str, Journal], failures: Mapping[str, str]) -> None:
        """Use these journals; `failures`: by directory id, why other journals could not be
        opened."""
        self._live.update(journals)
        self._ledger_counts.update(dict.fromkeys(journals, 0))
        self.failures.update(failures)
        for journal_id, journal in self._live.items():
            journal.task.add_done_callback(partial(self._on_end, journal_id))

    # -- writing --

    def append(
        self, records: Sequence[Record], lane: Lane = Lane.BULK, after: Sequence[int] = ()
    ) -> DoneFuture:
        """See Journal.append."""
        if not records and not after:
            return gathered([journal.append([]) for journal in self._live.values()])
        if not self._live:
            return _failed_future(JournalFailed("no journal is left"))
        if len(self._live) == 1 and not self._reliefs_by_ledger and not self.failures:
            (journal,) = self._live.values()
            return journal.append(records, lane, after)
        return self._append_by_journal(records, lane, after)

    def append_state(self, ledger_id: int) -> DoneFuture:
        """Append the record of the ledger's state, which the node has. See Journal.append."""
        record = self._record_of(ledger_id)
        assert record is not None
        return self.append([record])

    def _append_by_journal(
        self, records: Sequence[Record], lane: Lane, after: Sequence[int]
    ) -> DoneFuture:
        parts: dict[str, tuple[list[Record], list[int]]] = {}
        state_appends: list[DoneFuture] = []
        for record in records:
            if record.ledger_id not in self.homes:
                state_appends += self._choose_journal(record.ledger_id)
            parts.setdefault(self.homes[record.ledger_id], ([], []))[0].append(record)
        for ledger_id in after:
            if ledger_id in self.homes:
                parts.setdefault(self.homes[ledger_id], ([], []))[1].append(ledger_id)
        ledgers = dict.fromkeys([*(record.ledger_id for record in records), *after])
        waiting = [self._reliefs_by_ledger[i] for i in ledgers if i in self._reliefs_by_ledger]
        waiting += [
            self._live[home].append(part, lane, part_after)
            for home, (part, part_after) in parts.items()
        ]
        return gathered([*state_appends, *waiting])

    def _choose_journal(self, ledger_id: int) -> list[DoneFuture]:
        """Choose the ledger's journal. If a journal has failed, first append the ledger's state
        record to the chosen journal."""
        home = min(self._live, key=lambda i: (self._live[i].pending_bytes, self._ledger_counts[i]))
        self.homes[ledger_id] = home
        self._ledger_counts[home] += 1
        record = self._record_of(ledger_id) if self.failures else None
        return [self._live[home].append([record])] if record is not None else []

    # -- state of the journals --

    @property
    def pending_bytes(self) -> int:
        return sum(journal.pending_bytes for journal in self._live.values())

    @property
    def room_bytes(self) -> int:
        """The least Journal.room_bytes of the living journals."""
        return min((journal.room_bytes for journal in self._live.values()), default=0)

    @property
    def wait_s(self) -> float:
        """Seconds until the records that wait now should be written."""
        return max((journal.wait_s for journal in self._live.values()), default=0.0)

    @property
    def live(self) -> Sequence[str]:
        return list(self._live)

    def synced(self) -> dict[str, Position]:
        """Journal.synced of each living journal."""
        return {journal_id: journal.synced for journal_id, journal in self._live.items()}

    # -- checkpoint and end --

    def reliefs(self) -> Sequence[DoneFuture]:
        """The relief of each failed journal whose records are not all flushed yet. A flush takes
        the reliefs when it begins, and gives them to `relieve` when it has ended."""
        return list(self._reliefs)

    def is_under_way(self, ledger_id: int) -> bool:
        """Whether an appended record of the ledger is not durable yet, or was in a journal that
        failed and is not flushed yet."""
        journals = self._live.values()
        is_in_journal = any(journal.is_under_way(ledger_id) for journal in journals)
        return is_in_journal or ledger_id in self._reliefs_by_ledger

    def relieve(self, reliefs: Sequence[DoneFuture], error: Exception | None = None) -> None:
        """End these reliefs, as a flush has ended: the failed journals' records are flushed or,
        with `error`, lost."""
        for relief in reliefs:
            if relief.done():  # an earlier flush has ended this relief
                continue
            self._reliefs.remove(relief)
            if error is not None:
                relief.set_exception(JournalFailed(f"the records of a journal are lost: {error}"))
            else:
                relief.set_result(None)
        self._reliefs_by_ledger = {
            i: relief for i, relief in self._reliefs_by_ledger.items() if not relief.done()
        }

    def fail(self, journal_id: str, error: DiskFailed) -> None:
        """End the journal: its directory is lost."""
        if journal_id in self._live:
            self._live[journal_id].fail(error)

    async def forget_before(self, marks: Mapping[str, Position]) -> None:
        """Remove the segments that the durable marks no longer need."""
        for journal_id, mark in marks.items():
            await self._use(journal_id, partial(Journal.forget_before, mark=mark))

    def forget(self, ledger_id: int) -> None:
        """Forget the ledger's journal. No record of the ledger may wait or be needed."""
        if (home := self.homes.pop(ledger_id, None)) is not None:
            self._ledger_counts[home] -= 1

    async def set_aside(self, journal_id: str, file_id: int) -> None:
        """See Journal.set_aside. Nothing happens if the journal has failed."""
        await self._use(journal_id, partial(Journal.set_aside, file_id=file_id))

    async def _use(self, journal_id: str, work: Callable[[Journal], Awaitable[None]]) -> None:
        if (journal := self._live.get(journal_id)) is not None:
            try:
                await work(journal)
            except DiskFailed as error:  # only this directory has failed
                journal.fail(error)

    def hurry(self) -> None:
        """See Journal.hurry."""
        for journal in self._live.values():
            journal.hurry()

    async def close(self) -> None:
        """Write the queued records and the seals. Raises JournalFailed."""
        for journal in list(self._live.values()):
            await journal.close()
        if not self.end.done():
            self.end.set_result(None)

    def abandon(self) -> None:
        """End at once, as a crash would."""
        for journal in self._live.values():
            journal.abandon()

    def _on_end(self, journal_id: str, task: asyncio.Task[None]) -> None:
        error = None if task.cancelled() else task.exception()
        if error is None:
            return
        if len(self._live) == 1:
            self.failures[journal_id] = str(error)
            if not self.end.done():
                self.end.set_exception(error)
                self.end.exception()  # counts as retrieved even if no task awaits it
            return
        _log.error("journal directory %s failed and is dropped: %s", journal_id, error)
        del self._live[journal_id]
        self.failures[journal_id] = str(error)
        relief: DoneFuture = asyncio.get_running_loop().create_future()
        relief.add_done_callback(retrieve_error)
        self._reliefs.append(relief)
        for ledger_id in [i for i, home in self.homes.items() if home == journal_id]:
            del self.homes[ledger_id]
            self._reliefs_by_ledger[ledger_id] = relief
        self.on_failure()


class _LargeWrite(NamedTuple):
    """Large entries of one ledger, in `half`, that are being written to `store`. `state_record`:
    done when the ledger record that names `store` is durable; None: it is durable."""

    ledger_id: int
    records: Sequence[Record]
    bytes: int
    store: DirectoryStore
    half: CacheHalf
    state_record: DoneFuture | None
    done: DoneFuture


class DirectWrites:
    """The large entries of a node. `bytes_min`: the least size of a large entry; 0: no entry is
    large."""

    def __init__(
        self,
        journals: Journals,
        states: LedgerStates,
        directories: Stores,
        cache: WriteCache,
        bytes_min: int,
    ) -> None:
        self._journals = journals
        self._states = states
        self._directories = directories
        self._cache = cache
        self._bytes_min = bytes_min
        self._under_way: dict[int, DoneFuture] = {}
        """By ledger: done when all its large entries are durable."""
        self._unwritten: dict[int, dict[DoneFuture, _LargeWrite]] = {}
        """By ledger: its large entries that are not in a direct log yet."""
        self._named_directories: dict[int, str] = {}
        """By ledger: the directory that an appended ledger record names."""
        self._state_records: dict[int, DoneFuture] = {}
        """By ledger: the append of the record in `_named_directories`, until it is durable."""
        self.pending_bytes = 0
        """Bytes of large entries that are not durable yet and that no journal counts."""

    def append(self, records: Sequence[Record], lane: Lane, after: Sequence[int]) -> DoneFuture:
        """See LedgerStorage.append. The caller has put the entries into the write cache in this
        step of the event loop."""
        large = self._large_entries(records) if lane is Lane.BULK else {}
        if not large and not self._under_way:
            return self._journals.append(records, lane, after)
        waiting = self._earlier_appends(records, lane, after)
        direct_appends = [self._begin_direct(*item) for item in large.items()]
        direct = {
            ledger_id: done for ledger_id, done in zip(large, direct_appends, strict=True) if done
        }
        rest = [r for r in records if not (r.ledger_id in direct and self._is_large(r))]
        if rest or after or not records:
            waiting.append(self._journals.append(rest, lane, after))
        for ledger_id, done in direct.items():
            self._add_under_way(ledger_id, done)
        return gathered([*waiting, *direct.values()])

    @property
    def wait_s(self) -> float:
        """Seconds until the direct logs should have room again."""
        return max([store.direct_log.wait_s for store in self._directories.live], default=0.0)

    def is_under_way(self, ledger_id: int) -> bool:
        """Whether large entries of the ledger are not durable yet."""
        return ledger_id in self._under_way

    def forget(self, ledger_id: int) -> None:
        """Forget the ledger's directory: its next large entry needs a ledger record again."""
        self._named_directories.pop(ledger_id, None)

    # -- under way --

    def _is_large(self, record: Record) -> bool:
        return record.kind is RecordKind.ENTRY and len(record.body) >= self._bytes_min

    def _large_entries(self, records: Sequence[Record]) -> dict[int, list[Record]]:
        """The records that are large entries, by ledger."""
        large: dict[int, list[Record]] = {}
        least = self._bytes_min
        if least and any([len(record.body) >= least for record in records]):
            for record in filter(self._is_large, records):
                large.setdefault(record.ledger_id, []).append(record)
        return large

    def _earlier_appends(
        self, records: Sequence[Record], lane: Lane, after: Sequence[int]
    ) -> list[DoneFuture]:
        """The appends under way that have to be durable before these records."""
        if not records and not after:
            return list(self._under_way.values())
        ids = dict.fromkeys([*(record.ledger_id for record in records), *after])
        before = [i for i in ids if i in self._under_way]
        if lane is Lane.RECOVERY:
            for ledger_id in before:
                self._take_over(ledger_id)
        return [self._under_way[i] for i in before]

    def _begin_direct(self, ledger_id: int, records: Sequence[Record]) -> DoneFuture | None:
        """Write the records to the direct log of the ledger's directory. Returns None, and writes
        no record, if the records have to go to a journal."""
        state = self._states.get(ledger_id)
        store = None if state is None else self._directories.home_with_space(state)
        if store is None:
            return None
        halves: dict[CacheHalf, list[Record]] = {}  # two, if a flush began between these entries
        for record in records:
            half = self._cache.half_with(ledger_id, record.entry_id)
            halves.setdefault(half, []).append(record)
        return gathered([self._put(store, *item) for item in halves.items()], at_once=False)

    def _put(self, store: DirectoryStore, half: CacheHalf, records: Sequence[Record]) -> DoneFuture:
        loop, ledger_id = asyncio.get_running_loop(), records[0].ledger_id
        done: DoneFuture = loop.create_future()
        done.add_done_callback(retrieve_error)
        size = sum([len(record.body) for record in records])
        state_record = self._name_directory(ledger_id, store)
        large = _LargeWrite(ledger_id, records, size, store, half, state_record, done)
        self.pending_bytes += size
        entries = [(ledger_id, record.entry_id, record.body) for record in records]
        written = store.direct_log.put(ledger_id, entries)
        under_way: DoneFuture = loop.create_future()
        half.direct_writes[under_way] = None
        self._unwritten.setdefault(ledger_id, {})[under_way] = large
        written.add_done_callback(partial(self._finish, large, under_way))
        return done

    def _name_directory(self, ledger_id: int, store: DirectoryStore) -> DoneFuture | None:
        """Append to a journal a ledger record that names the directory. Returns None if such a
        record is durable already."""
        if self._named_directories.get(ledger_id) == store.id:
            return self._state_records.get(ledger_id)
        self._named_directories[ledger_id] = store.id
        state_record = self._state_records[ledger_id] = self._journals.append_state(ledger_id)
        state_record.add_done_callback(partial(self._end_naming, ledger_id))
        return state_record

    def _end_naming(self, ledger_id: int, state_record: DoneFuture) -> None:
        if self._state_records.get(ledger_id) is state_record:
            del self._state_records[ledger_id]
            if state_record.cancelled() or state_record.exception() is not None:
                self.forget(ledger_id)

    def _add_under_way(self, ledger_id: int, done: DoneFuture) -> None:
        """Make later appends of the ledger wait for this append and for earlier appends."""
        earlier = self._under_way.get(ledger_id)
        both = done if earlier is None else gathered([earlier, done], at_once=False)
        self._under_way[ledger_id] = both
        both.add_done_callback(partial(self._drop_under_way, ledger_id))

    def _drop_under_way(self, ledger_id: int, done: DoneFuture) -> None:
        if self._under_way.get(ledger_id) is done:
            del self._under_way[ledger_id]

    def _take_over(self, ledger_id: int) -> None:
        """Append the ledger's unwritten entries to the journal, as a recovery waits for them."""
        for large in self._unwritten.pop(ledger_id, {}).values():
            self._journal(large, Lane.RECOVERY)

    def _finish(
        self, large: _LargeWrite, under_way: DoneFuture, written: asyncio.Future[list[Location]]
    ) -> None:
        """End a put of a direct log. If the put failed, append its entries to a journal."""
        store, ledger_id = large.store, large.ledger_id
        del large.half.direct_writes[under_way]
        locations: list[Location] = []
        if not written.cancelled() and written.exception() is None and self._is_counted(large):
            locations = written.result()
        direct = [DirectLocation(store.id, location) for location in locations]
        large.half.set_locations(ledger_id, direct)
        writes = self._unwritten.get(ledger_id, {})
        if writes.pop(under_way, None) is not None:  # else the journal took the entries over
            if not writes:
                del self._unwritten[ledger_id]
            if locations:
                self._acknowledge(large)
            else:
                self._journal(large, Lane.BULK)
        under_way.set_result(None)

    def _acknowledge(self, large: _LargeWrite) -> None:
        self.pending_bytes -= large.bytes
        if large.state_record is not None:
            large.state_record.add_done_callback(partial(_pass_on, large.done))
        else:
            large.done.set_result(None)

    def _journal(self, large: _LargeWrite, lane: Lane) -> None:
        self.pending_bytes -= large.bytes  # the journals count these bytes now
        append = self._journals.append(large.records, lane)
        append.add_done_callback(partial(_pass_on, large.done))

    def _is_counted(self, large: _LargeWrite) -> bool:
        """Whether the directory lives and the ledger's state records it."""
        state = self._states.get(large.ledger_id)
        is_recorded = state is not None and large.store.id in state.directories
        return is_recorded and self._directories.lives(large.store.id)


def _pass_on(done: DoneFuture, outcome: DoneFuture) -> None:
    error = None if outcome.cancelled() else outcome.exception()
    if done.done():
        return
    if error is not None:
        done.set_exception(error)
    else:
        done.set_result(None)


def gathered(futures: Sequence[DoneFuture], *, at_once: bool = True) -> DoneFuture:
    """A future that is done when all futures are done. If one of them fails, the result fails too:
    `at_once`, or only when all have ended."""
    if len(futures) == 1:
        return futures[0]
    done: DoneFuture = asyncio.get_running_loop().create_future()
    done.add_done_callback(retrieve_error)
    pending_count = len(futures)

    def on_end(last: DoneFuture) -> None:
        nonlocal pending_count
        pending_count -= 1
        if done.done() or (pending_count and not at_once):
            return
        ended_futures = [last] if at_once else futures
        errors = [future.exception() for future in ended_futures if not future.cancelled()]
        error = next((error for error in errors if error is not None), None)
        if error is not None:
            done.set_exception(error)
        elif not pending_count:
            done.set_result(None)

    for future in futures:
        future.add_done_callback(on_end)
    if not futures:
        done.set_result(None)
    return done


def _failed_future(error: Exception) -> DoneFuture:
    done: DoneFuture = asyncio.get_running_loop().create_future()
    done.add_done_callback(retrieve_error)
    done.set_exception(error)
    return done
