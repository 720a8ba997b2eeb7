"""The journals of a node, one in each journal directory, as one place to append to.

Always true:
- the records of a ledger go to one journal as long as it lives: to the one that had the fewest
  bytes pending when the first of them came in this run, and of equal ones the fewest ledgers;
- when a journal fails, what waits in it fails, and its ledgers go on in another, each beginning
  with a ledger record of what is known of it by then, so each journal can be replayed by itself;
- what was taken before a journal failed may be in no journal: until a flush that began after the
  failure has ended (`relieve`), nothing more of its ledgers is called durable.
"""

import asyncio
import logging
from collections.abc import Callable, Mapping, Sequence
from functools import partial

from bookie_server.disk.interface import DiskFailed
from bookie_server.journal.format import Position, Record
from bookie_server.journal.writer import Journal, JournalFailed, retrieve
from bookie_server.lanes import Lane

_log = logging.getLogger(__name__)


class Journals:
    """`present` gives the ledger record of a ledger's present state; None: the node knows none."""

    def __init__(
        self, journals: Mapping[str, Journal], present: Callable[[int], Record | None]
    ) -> None:
        self._live = dict(journals)
        self._present = present
        self.home: dict[int, str] = {}
        """By ledger: the journal that its records go to."""
        self._ledgers = dict.fromkeys(journals, 0)  # how many of them are at home in each
        self._unrelieved: dict[int, asyncio.Future[None]] = {}  # by ledger of a failed journal
        self._reliefs: list[asyncio.Future[None]] = []
        self.failures: dict[str, str] = {}
        """By directory id: why its journal failed."""
        self.on_failure: Callable[[], None] = lambda: None
        """Called after a failure that left others."""
        self.ended: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        """Done when the journals were closed, or with the exception that ended the last one."""
        for journal_id, journal in self._live.items():
            journal.task.add_done_callback(partial(self._on_end, journal_id))

    # -- writing --

    def append(
        self, records: Sequence[Record], lane: Lane = Lane.BULK, after: Sequence[int] = ()
    ) -> asyncio.Future[None]:
        """See Journal.append."""
        if not records and not after:
            return gathered([journal.append([]) for journal in self._live.values()])
        if not self._live:
            return _failed(JournalFailed("no journal is left"))
        if len(self._live) == 1 and not self._unrelieved and not self.failures:
            (journal,) = self._live.values()
            return journal.append(records, lane, after)
        return self._split(records, lane, after)

    def tell(self, ledger_id: int) -> asyncio.Future[None]:
        """Append the ledger's record, of which the node knows. See Journal.append."""
        record = self._present(ledger_id)
        assert record is not None
        return self.append([record])

    def _split(
        self, records: Sequence[Record], lane: Lane, after: Sequence[int]
    ) -> asyncio.Future[None]:
        parts: dict[str, tuple[list[Record], list[int]]] = {}
        moved: list[asyncio.Future[None]] = []
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

    def _move(self, ledger_id: int) -> list[asyncio.Future[None]]:
        """Choose the ledger's journal; after a failure its record comes first there."""
        home = min(self._live, key=lambda i: (self._live[i].pending_bytes, self._ledgers[i]))
        self.home[ledger_id] = home
        self._ledgers[home] += 1
        record = self._present(ledger_id) if self.failures else None
        return [self._live[home].append([record])] if record is not None else []

    # -- what is known of them --

    @property
    def pending_bytes(self) -> int:
        return sum(journal.pending_bytes for journal in self._live.values())

    @property
    def room_bytes(self) -> int:
        """See Journal.room_bytes: of the one with the least."""
        return min((journal.room_bytes for journal in self._live.values()), default=0)

    @property
    def wait_s(self) -> float:
        """Seconds until what waits now should be written."""
        return max((journal.wait_s for journal in self._live.values()), default=0.0)

    @property
    def live(self) -> Sequence[str]:
        return list(self._live)

    def synced(self) -> dict[str, Position]:
        """Of each living journal: everything before it is durable."""
        return {journal_id: journal.synced for journal_id, journal in self._live.items()}

    # -- checkpoint and end --

    def reliefs(self) -> Sequence[asyncio.Future[None]]:
        """One for each failure that no flush has made good yet; for `relieve`, after a flush that
        began when this was called."""
        return list(self._reliefs)

    def relieve(
        self, reliefs: Sequence[asyncio.Future[None]], error: Exception | None = None
    ) -> None:
        """The flush has ended: what was in a failed journal is in its final place; with `error`,
        it never will be."""
        for relief in reliefs:
            if relief.done():  # a flush that began meanwhile had it too
                continue
            self._reliefs.remove(relief)
            if error is not None:
                relief.set_exception(JournalFailed(f"what a journal had is lost: {error}"))
            else:
                relief.set_result(None)
        self._unrelieved = {i: each for i, each in self._unrelieved.items() if not each.done()}

    def fail(self, journal_id: str, error: DiskFailed) -> None:
        """The directory was found to be lost."""
        if journal_id in self._live:
            self._live[journal_id].fail(error)

    async def forget_before(self, marks: Mapping[str, Position]) -> None:
        """Remove the segments that the durable marks no longer need."""
        for journal_id, mark in marks.items():
            if (journal := self._live.get(journal_id)) is not None:
                try:
                    await journal.forget_before(mark)
                except DiskFailed as error:  # this directory's failure, not the stores'
                    journal.fail(error)

    def forget(self, ledger_id: int) -> None:
        """Nothing of the ledger waits or is needed; what comes of it later may go elsewhere."""
        if (home := self.home.pop(ledger_id, None)) is not None:
            self._ledgers[home] -= 1

    async def set_aside(self, journal_id: str, file_id: int) -> None:
        """See Journal.set_aside. One that failed keeps it as it is."""
        if (journal := self._live.get(journal_id)) is not None:
            try:
                await journal.set_aside(file_id)
            except DiskFailed as error:  # this directory's failure, not the stores'
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
                self.ended.exception()  # a watcher gets it; there may be none
            return
        _log.error("journal directory %s failed and is dropped: %s", journal_id, error)
        del self._live[journal_id]
        self.failures[journal_id] = str(error)
        relief: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        relief.add_done_callback(retrieve)
        self._reliefs.append(relief)
        for ledger_id in [i for i, home in self.home.items() if home == journal_id]:
            del self.home[ledger_id]
            self._unrelieved[ledger_id] = relief
        self.on_failure()


def gathered(futures: Sequence[asyncio.Future[None]]) -> asyncio.Future[None]:
    """Done when all are; fails when one did."""
    if len(futures) == 1:
        return futures[0]
    done: asyncio.Future[None] = asyncio.get_running_loop().create_future()
    done.add_done_callback(retrieve)
    left = len(futures)

    def ended(one: asyncio.Future[None]) -> None:
        nonlocal left
        left -= 1
        error = None if one.cancelled() else one.exception()
        if error is not None and not done.done():
            done.set_exception(error)
        elif not left and not done.done():
            done.set_result(None)

    for future in futures:
        future.add_done_callback(ended)
    if not futures:
        done.set_result(None)
    return done


def _failed(error: Exception) -> asyncio.Future[None]:
    done: asyncio.Future[None] = asyncio.get_running_loop().create_future()
    done.add_done_callback(retrieve)
    done.set_exception(error)
    return done
