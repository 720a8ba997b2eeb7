"""The runs of one partition that wait to be stored or are under way, until each has its outcome.

Always true: runs are sent, and sent again, in the order in which they came; runs of a producer that
has gone are not sent; what was under way has its outcome from the ledger alone.
"""

from collections import deque
from collections.abc import Callable, Iterable, Mapping

from spark_ledger import errors
from spark_ledger.broker.produce.waiting import (
    Changes,
    EntryRuns,
    Joining,
    PendingEntry,
    SequenceIds,
    Undecided,
    WaitingRun,
    take_runs,
    without,
)


class Backlog:
    """`on_stored` is called with the first offset of each stored run and the run, in order, before
    the run's own `stored`."""

    def __init__(
        self, on_stored: Callable[[int, WaitingRun], None], bytes_max: int, deduplicates: bool
    ) -> None:
        self.deduplicates = deduplicates
        self.waiting: deque[WaitingRun] = deque()
        self.under_way: deque[PendingEntry] = deque()
        self.ids = SequenceIds()
        self._on_stored = on_stored
        self._late: deque[WaitingRun] = deque()  # that came while the partition was given up
        self._gone: dict[object, None] = {}  # producers, of which something is under way
        self._runs = Undecided()  # of the three queues above
        self._joining = Joining(bytes_max)
        self._decided = Changes()  # something is stored, or fails
        self._failures = 0

    @property
    def is_broken(self) -> bool:
        """Whether the first entry under way has failed, once `next_stored` has no more."""
        return bool(self.under_way) and self.under_way[0].acked.done()

    def add(self, run: WaitingRun) -> None:
        """The run waits; without batches that were sent before, of a topic with deduplication."""
        new = self.ids.new_of(run) if self.deduplicates else (run,)
        self.waiting.extend(new)
        self._runs.add(new)

    def add_late(self, run: WaitingRun) -> None:
        """The run is not sent any more, and fails after what came before it has its outcome."""
        self._late.append(run)
        self._runs.add((run,))

    def begin(self, last_ids: Mapping[str, int]) -> None:
        """A segment begins, and these are each producer's last sequence ids in the log."""
        if self.deduplicates:
            self.ids.begin(last_ids)
            self.waiting = self.ids.new_in(self.waiting)
            self._recount()

    def take_runs(self) -> EntryRuns:
        """Take the runs of the next entry off the queue; the caller sends them."""
        return take_runs(self.waiting, self._joining.bytes_max)

    def next_stored(self) -> PendingEntry | None:
        """The first entry under way, which was acknowledged; it is under way no more."""
        if not self.under_way or not self.under_way[0].acked.done():
            return None
        acked = self.under_way[0].acked
        if acked.cancelled() or acked.exception() is not None:
            return None
        return self.under_way.popleft()

    def store(self, entry: PendingEntry, offset: int) -> None:
        """The entry is stored, from that offset on."""
        self._runs.remove(entry.runs)
        for run in entry.runs:
            self._on_stored(offset, run)
            run.stored(offset)
            offset += run.messages
            if self.deduplicates:
                self.ids.note(run)

    def take_ids(self) -> dict[str, int]:
        """The last sequence ids that are stored in the segment that ends, by producer."""
        stored, self.ids.of_segment = self.ids.of_segment, {}
        return stored

    def take_back(self, entry_id: int) -> None:
        """What is under way, from that entry on, is not stored, and waits again."""
        refused = self._joining.refused(self.under_way, entry_id)
        for entry in reversed(self.under_way):
            self.waiting.extendleft(reversed(entry.runs))
        self.under_way.clear()
        self.drop(refused)

    def drop(self, gone: Iterable[object]) -> None:
        """These producers have gone: what they sent fails, unless it is under way and is stored."""
        self._gone.update(dict.fromkeys(gone))
        if not self._gone:
            return
        ids = self.ids if self.deduplicates else None
        self.waiting, out = without(self.waiting, self._gone, ids, self.under_way)
        self._recount()
        sent = [run.producer for entry in self.under_way for run in entry.runs]
        self._gone = {producer: None for producer in sent if producer in self._gone}
        for run in out:
            run.failed(errors.LedgerClosed("its producer has gone"))
        self.wake_waiters()

    def fail(self, error: errors.LedgerError) -> None:
        """Whatever waits has failed; what was sent may be stored all the same."""
        waiting = [run for entry in self.under_way for run in entry.runs]
        waiting += [*self.waiting, *self.ids.take_again()]
        for entry in self.under_way:
            entry.drop()
        self.under_way.clear()
        self.waiting.clear()
        self._recount()
        self._failures += 1
        self.take_ids()
        self.ids.doubt()
        for run in waiting:
            run.failed(error)
        self.wake_waiters()

    def fail_late(self, error: errors.LedgerError) -> None:
        """What came late fails: its producer is sent away, and sends again what has no receipt."""
        while self._late:
            self._late.popleft().failed(error)
        self._recount()
        self.wake_waiters()

    def wake_waiters(self) -> None:
        """Some run has its outcome, or the ledger that was undecided is sealed."""
        self._decided.tell()

    async def until_decided(
        self, matches: Callable[[object], bool], is_undecided: Callable[[], bool]
    ) -> bool:
        """Wait until no run of the producers that match waits or is under way, and `is_undecided`
        does not hold. False: what waited has failed meanwhile."""
        failures = self._failures

        def is_decided() -> bool:
            return self._failures != failures or not (is_undecided() or self._runs.has_any(matches))

        await self._decided.until(is_decided)
        return self._failures == failures

    def _recount(self) -> None:
        self._runs.count(*(entry.runs for entry in self.under_way), self.waiting, self._late)
