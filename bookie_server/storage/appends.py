"""Where an append goes: to the journal of its ledger (`Journals`), or, a large entry, to a ledger
directory at once and to no journal (`DirectWrites`).

Always true of the journals of a node, one in each journal directory, as one place to append to:
- the records of a ledger go to one journal as long as it lives: the one that had the fewest bytes
  pending when the ledger's first record of this run came, and of equal ones the fewest ledgers;
- when a journal fails, the appends that wait in it fail, and its ledgers go on in another, each
  beginning with a record of the ledger's present state, so each journal can be replayed by itself;
- records appended before a journal failed may be in no journal: until a flush that began after the
  failure has ended (`relieve`), no later append of its ledgers counts as durable.

Always true of large entries, which are written once:
- an entry is acknowledged after its record in the directory's log was synced, which a start reads
  as it reads a journal, and after a ledger record that names the directory is in a journal: without
  that record a start would not count the directory's entries;
- an append after large entries of a ledger waits for them too; but a recovery does not wait for a
  directory, which may be slow or hang: the journal takes over the ledger's unwritten entries;
- a directory that fails, or has no space, costs nothing but time: the write cache still has the
  entries, and they go to the journal like any others.

Only appends of the bulk lane go to directories: recovery has its own lane, and page-cache ledgers
gain nothing by it.
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

Appended = asyncio.Future[None]


class Journals:
    """`present` gives the journal record of a ledger's present state; None: there is no state."""

    def __init__(self, present: Callable[[int], Record | None]) -> None:
        self._live: dict[str, Journal] = {}
        self._present = present
        self.home: dict[int, str] = {}
        """By ledger: the journal that its records go to."""
        self._ledgers: dict[str, int] = {}  # by journal: how many ledgers have it as home
        self._unrelieved: dict[int, Appended] = {}  # by ledger of a failed journal
        self._reliefs: list[Appended] = []
        self.failures: dict[str, str] = {}
        """By directory id: why its journal failed."""
        self.on_failure: Callable[[], None] = lambda: None
        """Called after a failure while other journals live."""
        self.ended: Appended = asyncio.get_running_loop().create_future()
        """Done when the journals were closed, or with the exception that ended the last one."""

    def begin(self, journals: Mapping[str, Journal], failures: Mapping[str, str]) -> None:
        """Use these journals from now on; `failures`: why others could not be opened."""
        self._live.update(journals)
        self._ledgers.update(dict.fromkeys(journals, 0))
        self.failures.update(failures)
        for journal_id, journal in self._live.items():
            journal.task.add_done_callback(partial(self._on_end, journal_id))

    # -- writing --

    def append(
        self, records: Sequence[Record], lane: Lane = Lane.BULK, after: Sequence[int] = ()
    ) -> Appended:
        """See Journal.append."""
        if not records and not after:
            return gathered([journal.append([]) for journal in self._live.values()])
        if not self._live:
            return _failed(JournalFailed("no journal is left"))
        if len(self._live) == 1 and not self._unrelieved and not self.failures:
            (journal,) = self._live.values()
            return journal.append(records, lane, after)
        return self._split(records, lane, after)

    def append_state(self, ledger_id: int) -> Appended:
        """Append the record of the ledger's state; the node has one. See Journal.append."""
        record = self._present(ledger_id)
        assert record is not None
        return self.append([record])

    def _split(self, records: Sequence[Record], lane: Lane, after: Sequence[int]) -> Appended:
        parts: dict[str, tuple[list[Record], list[int]]] = {}
        moved: list[Appended] = []
        for record in records:
            if record.ledger_id not in self.home:
                moved += self._move(record.ledger_id)
            parts.setdefault(self.home[record.ledger_id], ([], []))[0].append(record)
        for ledger_id in after:
            if ledger_id in self.home:
                parts.setdefault(self.home[ledger_id], ([], []))[1].append(ledger_id)
        ledgers = dict.fromkeys([*(record.ledger_id for record in records), *after])
        waiting = [self._unrelieved[i] for i in ledgers if i in self._unrelieved]
        waiting += [
            self._live[home].append(part, lane, behind) for home, (part, behind) in parts.items()
        ]
        return gathered([*moved, *waiting])

    def _move(self, ledger_id: int) -> list[Appended]:
        """Choose the ledger's journal; after a failure its record comes first there."""
        home = min(self._live, key=lambda i: (self._live[i].pending_bytes, self._ledgers[i]))
        self.home[ledger_id] = home
        self._ledgers[home] += 1
        record = self._present(ledger_id) if self.failures else None
        return [self._live[home].append([record])] if record is not None else []

    # -- their state --

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
        """Of each living journal: everything before it is durable."""
        return {journal_id: journal.synced for journal_id, journal in self._live.items()}

    # -- checkpoint and end --

    def reliefs(self) -> Sequence[Appended]:
        """A future for each failure that no flush has made good yet. A flush takes them when it
        begins, and gives them to `relieve` when it has ended."""
        return list(self._reliefs)

    def is_under_way(self, ledger_id: int) -> bool:
        """Whether a record of the ledger was appended and is not durable, or was in a journal that
        failed and is not in its final place yet."""
        journals = self._live.values()
        under_way = any(journal.is_under_way(ledger_id) for journal in journals)
        return under_way or ledger_id in self._unrelieved

    def relieve(self, reliefs: Sequence[Appended], error: Exception | None = None) -> None:
        """The flush has ended: records of a failed journal are in their final place; with `error`,
        they never will be."""
        for relief in reliefs:
            if relief.done():  # a flush that began meanwhile had this relief too
                continue
            self._reliefs.remove(relief)
            if error is not None:
                relief.set_exception(JournalFailed(f"the records of a journal are lost: {error}"))
            else:
                relief.set_result(None)
        self._unrelieved = {
            i: relief for i, relief in self._unrelieved.items() if not relief.done()
        }

    def fail(self, journal_id: str, error: DiskFailed) -> None:
        """The directory was found to be lost."""
        if journal_id in self._live:
            self._live[journal_id].fail(error)

    async def forget_before(self, marks: Mapping[str, Position]) -> None:
        """Remove the segments that the durable marks no longer need."""
        for journal_id, mark in marks.items():
            await self._on(journal_id, partial(Journal.forget_before, mark=mark))

    def forget(self, ledger_id: int) -> None:
        """No record of the ledger waits or is needed; its later records may go to another
        journal."""
        if (home := self.home.pop(ledger_id, None)) is not None:
            self._ledgers[home] -= 1

    async def set_aside(self, journal_id: str, file_id: int) -> None:
        """See Journal.set_aside. A failed journal keeps the segment as it is."""
        await self._on(journal_id, partial(Journal.set_aside, file_id=file_id))

    async def _on(self, journal_id: str, work: Callable[[Journal], Awaitable[None]]) -> None:
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
        """Write what is queued and the seals. Raises JournalFailed."""
        for journal in list(self._live.values()):
            await journal.close()
        if not self.ended.done():
            self.ended.set_result(None)

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
            if not self.ended.done():
                self.ended.set_exception(error)
                self.ended.exception()  # counts as retrieved even if no task awaits it
            return
        _log.error("journal directory %s failed and is dropped: %s", journal_id, error)
        del self._live[journal_id]
        self.failures[journal_id] = str(error)
        relief: Appended = asyncio.get_running_loop().create_future()
        relief.add_done_callback(retrieve_error)
        self._reliefs.append(relief)
        for ledger_id in [i for i, home in self.home.items() if home == journal_id]:
            del self.home[ledger_id]
            self._unrelieved[ledger_id] = relief
        self.on_failure()


class _Large(NamedTuple):
    """Entries of one ledger on their way; `half` has them. `named`: done when the ledger record
    that names `store` is durable; None: it is already."""

    ledger_id: int
    records: Sequence[Record]
    bytes: int
    store: DirectoryStore
    half: CacheHalf
    named: Appended | None
    done: Appended


class DirectWrites:
    """The large entries of one engine. `bytes_min`: entries of that size and above are large; 0: no
    entry is."""

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
        self._under_way: dict[int, Appended] = {}  # by ledger: all its large entries on their way
        self._unwritten: dict[int, dict[Appended, _Large]] = {}  # by ledger: in no directory yet
        self._named: dict[int, str] = {}  # by ledger: the directory that a ledger record named
        self._naming: dict[int, Appended] = {}  # by ledger: that record is not durable yet
        self.pending_bytes = 0
        """Bytes of entries that are neither acknowledged nor counted by a journal."""

    def append(self, records: Sequence[Record], lane: Lane, after: Sequence[int]) -> Appended:
        """See LedgerStorage.append. The entries are in the write cache since this step."""
        large = self._large(records) if lane is Lane.BULK else {}
        if not large and not self._under_way:
            return self._journals.append(records, lane, after)
        waiting = self._before(records, lane, after)
        begun = [self._begin(*item) for item in large.items()]
        direct = {ledger_id: done for ledger_id, done in zip(large, begun, strict=True) if done}
        rest = [r for r in records if not (r.ledger_id in direct and self._is_large(r))]
        if rest or after or not records:
            waiting.append(self._journals.append(rest, lane, after))
        for ledger_id, done in direct.items():
            self._follow(ledger_id, done)
        return gathered([*waiting, *direct.values()])

    @property
    def wait_s(self) -> float:
        """Seconds until the direct logs should have room again."""
        return max([store.direct_log.wait_s for store in self._directories.live], default=0.0)

    def is_under_way(self, ledger_id: int) -> bool:
        """Whether large entries of the ledger are on their way."""
        return ledger_id in self._under_way

    def forget(self, ledger_id: int) -> None:
        """The next large entry of the ledger needs a ledger record again."""
        self._named.pop(ledger_id, None)

    # -- on the way --

    def _is_large(self, record: Record) -> bool:
        return record.kind is RecordKind.ENTRY and len(record.body) >= self._bytes_min

    def _large(self, records: Sequence[Record]) -> dict[int, list[Record]]:
        """The records that are large entries, by ledger."""
        large: dict[int, list[Record]] = {}
        least = self._bytes_min
        if least and any([len(record.body) >= least for record in records]):
            for record in filter(self._is_large, records):
                large.setdefault(record.ledger_id, []).append(record)
        return large

    def _before(
        self, records: Sequence[Record], lane: Lane, after: Sequence[int]
    ) -> list[Appended]:
        """The appends that have to be durable first."""
        if not records and not after:
            return list(self._under_way.values())
        ids = dict.fromkeys([*(record.ledger_id for record in records), *after])
        before = [i for i in ids if i in self._under_way]
        if lane is Lane.RECOVERY:
            for ledger_id in before:
                self._take_over(ledger_id)
        return [self._under_way[i] for i in before]

    def _begin(self, ledger_id: int, records: Sequence[Record]) -> Appended | None:
        """Write the records to the ledger's directory; None: they have to go to a journal."""
        state = self._states.get(ledger_id)
        store = None if state is None else self._directories.home_with_space(state)
        if store is None:
            return None
        halves: dict[CacheHalf, list[Record]] = {}  # two, if a flush began between these entries
        for record in records:
            half = self._cache.half_with(ledger_id, record.entry_id)
            halves.setdefault(half, []).append(record)
        return gathered([self._put(store, *item) for item in halves.items()], at_once=False)

    def _put(self, store: DirectoryStore, half: CacheHalf, records: Sequence[Record]) -> Appended:
        loop, ledger_id = asyncio.get_running_loop(), records[0].ledger_id
        done: Appended = loop.create_future()
        done.add_done_callback(retrieve_error)
        size = sum([len(record.body) for record in records])
        named = self._name(ledger_id, store)
        large = _Large(ledger_id, records, size, store, half, named, done)
        self.pending_bytes += size
        entries = [(ledger_id, record.entry_id, record.body) for record in records]
        written = store.direct_log.put(ledger_id, entries)
        under_way: Appended = loop.create_future()
        half.direct_writes[under_way] = None
        self._unwritten.setdefault(ledger_id, {})[under_way] = large
        written.add_done_callback(partial(self._written, large, under_way))
        return done

    def _name(self, ledger_id: int, store: DirectoryStore) -> Appended | None:
        """Append a ledger record that names the directory to a journal; None: one is durable."""
        if self._named.get(ledger_id) == store.id:
            return self._naming.get(ledger_id)
        self._named[ledger_id] = store.id
        naming = self._naming[ledger_id] = self._journals.append_state(ledger_id)
        naming.add_done_callback(partial(self._name_ended, ledger_id))
        return naming

    def _name_ended(self, ledger_id: int, naming: Appended) -> None:
        if self._naming.get(ledger_id) is naming:
            del self._naming[ledger_id]
            if naming.cancelled() or naming.exception() is not None:
                self.forget(ledger_id)

    def _follow(self, ledger_id: int, done: Appended) -> None:
        """A later append waits for this one, and for those before it."""
        earlier = self._under_way.get(ledger_id)
        both = done if earlier is None else gathered([earlier, done], at_once=False)
        self._under_way[ledger_id] = both
        both.add_done_callback(partial(self._ended, ledger_id))

    def _ended(self, ledger_id: int, done: Appended) -> None:
        if self._under_way.get(ledger_id) is done:
            del self._under_way[ledger_id]

    def _take_over(self, ledger_id: int) -> None:
        """Recovery waits for the ledger's entries on their way: the journal can make them durable
        too."""
        for large in self._unwritten.pop(ledger_id, {}).values():
            self._journal(large, Lane.RECOVERY)

    def _written(
        self, large: _Large, under_way: Appended, written: asyncio.Future[list[Location]]
    ) -> None:
        """The put has ended: if the directory did not take the entries, a journal takes them."""
        store, ledger_id = large.store, large.ledger_id
        del large.half.direct_writes[under_way]
        locations: list[Location] = []
        if not written.cancelled() and written.exception() is None and self._is_kept(large):
            locations = written.result()
        direct = [DirectLocation(store.id, location) for location in locations]
        large.half.set_locations(ledger_id, direct)
        unwritten = self._unwritten.get(ledger_id, {})
        if unwritten.pop(under_way, None) is not None:  # else the journal took it over
            if not unwritten:
                del self._unwritten[ledger_id]
            if locations:
                self._acknowledge(large)
            else:
                self._journal(large, Lane.BULK)
        under_way.set_result(None)

    def _acknowledge(self, large: _Large) -> None:
        self.pending_bytes -= large.bytes
        if large.named is not None:
            large.named.add_done_callback(partial(_pass_on, large.done))
        else:
            large.done.set_result(None)

    def _journal(self, large: _Large, lane: Lane) -> None:
        self.pending_bytes -= large.bytes  # the journals count them now
        journaled = self._journals.append(large.records, lane)
        journaled.add_done_callback(partial(_pass_on, large.done))

    def _is_kept(self, large: _Large) -> bool:
        """Whether the directory's entries count as the ledger's."""
        state = self._states.get(large.ledger_id)
        listed = state is not None and large.store.id in state.directories
        return listed and self._directories.lives(large.store.id)


def _pass_on(done: Appended, outcome: Appended) -> None:
    error = None if outcome.cancelled() else outcome.exception()
    if done.done():
        return
    if error is not None:
        done.set_exception(error)
    else:
        done.set_result(None)


def gathered(futures: Sequence[Appended], *, at_once: bool = True) -> Appended:
    """Done when all futures are. Fails if one of them failed: `at_once`, or when all have ended."""
    if len(futures) == 1:
        return futures[0]
    done: Appended = asyncio.get_running_loop().create_future()
    done.add_done_callback(retrieve_error)
    left = len(futures)

    def ended(last: Appended) -> None:
        nonlocal left
        left -= 1
        if done.done() or (left and not at_once):
            return
        judged = [last] if at_once else futures
        errors = [future.exception() for future in judged if not future.cancelled()]
        error = next((error for error in errors if error is not None), None)
        if error is not None:
            done.set_exception(error)
        elif not left:
            done.set_result(None)

    for future in futures:
        future.add_done_callback(ended)
    if not futures:
        done.set_result(None)
    return done


def _failed(error: Exception) -> Appended:
    done: Appended = asyncio.get_running_loop().create_future()
    done.add_done_callback(retrieve_error)
    done.set_exception(error)
    return done
