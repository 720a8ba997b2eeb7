"""The runs of one partition that wait to be stored or are under way, until each has its outcome.

Always true: runs are sent, and sent again, in the order in which they came; runs of a producer that
has gone are not sent; only the ledger decides the outcome of runs under way.
"""

from collections import deque
from collections.abc import Callable, Iterable, Mapping

from spark_ledger import errors
from spark_ledger.broker.produce.waiting import (
    EntryBytesLimit,
    EntryRuns,
    PendingEntry,
    RunCounts,
    SequenceIds,
    Waiters,
    WaitingRun,
    take_runs,
    without_gone,
)


class Backlog:
    """`on_stored` is called for each stored run in order, with its first offset, before
    `run.stored`."""

    def __init__(
        self, on_stored: Callable[[int, WaitingRun], None], bytes_max: int, deduplicates: bool
    ) -> None:
        self.deduplicates = deduplicates
        self.waiting: deque[WaitingRun] = deque()
        self.under_way: deque[PendingEntry] = deque()
        self.sequence_ids = SequenceIds()
        self._on_stored = on_stored
        self._late_runs: deque[WaitingRun] = deque()  # came while the partition was given up
        self._gone_producers: dict[object, None] = {}  # only those with runs under way
        self.run_counts = RunCounts()  # the runs of the three queues above
        self._entry_limit = EntryBytesLimit(bytes_max)
        self._outcome_waiters = Waiters()  # tasks that wait until runs are stored or fail
        self._failures = 0

    @property
    def is_broken(self) -> bool:
        """Whether the first entry under way has failed. Call this only after `next_stored` has
        returned None."""
        return bool(self.under_way) and self.under_way[0].acked.done()

    def add(self, run: WaitingRun) -> None:
        """Put the run into the queue; with deduplication, without the batches that were sent
        before."""
        new_runs = self.sequence_ids.new_part_of(run) if self.deduplicates else (run,)
        self.waiting.extend(new_runs)
        self.run_counts.add(new_runs)

    def add_late(self, run: WaitingRun) -> None:
        """Note a run that is never sent: it fails after the runs before it have their outcome."""
        self._late_runs.append(run)
        self.run_counts.add((run,))

    def begin(self, last_ids: Mapping[str, int]) -> None:
        """Begin a segment; `last_ids` has each producer's last sequence id in the log."""
        if self.deduplicates:
            self.sequence_ids.begin(last_ids)
            self.waiting = self.sequence_ids.still_new(self.waiting)
            self._recount()

    def take_runs(self) -> EntryRuns:
        """Take the runs of the next entry off the queue; the caller sends them."""
        return take_runs(self.waiting, self._entry_limit.bytes_max)

    def next_stored(self) -> PendingEntry | None:
        """Take the first entry under way off its queue, if the entry was acknowledged."""
        if not self.under_way or not self.under_way[0].acked.done():
            return None
        acked = self.under_way[0].acked
        if acked.cancelled() or acked.exception() is not None:
            return None
        return self.under_way.popleft()

    def store(self, entry: PendingEntry, offset: int) -> None:
        """Note that the entry is stored, from this offset on."""
        self.run_counts.remove(entry.runs)
        for run in entry.runs:
            self._on_stored(offset, run)
            run.stored(offset)
            offset += run.messages
            if self.deduplicates:
                self.sequence_ids.note_stored(run)

    def take_ids(self) -> dict[str, int]:
        """The last sequence ids that are stored in the segment that ends, by producer."""
        stored, self.sequence_ids.of_segment = self.sequence_ids.of_segment, {}
        return stored

    def take_back(self, entry_id: int) -> None:
        """Let the runs under way wait again: they are not stored, and the first entry under way has
        this id."""
        producers = self._entry_limit.shrink(self.under_way, entry_id)
        for entry in reversed(self.under_way):
            self.waiting.extendleft(reversed(entry.runs))
        self.under_way.clear()
        self.drop(producers)

    def drop(self, gone: Iterable[object]) -> None:
        """Note that these producers have gone: their waiting runs fail. Their runs under way are
        stored, or fail when they would have to be sent again."""
        self._gone_producers.update(dict.fromkeys(gone))
        if not self._gone_producers:
            return
        ids = self.sequence_ids if self.deduplicates else None
        self.waiting, dropped = without_gone(
            self.waiting, self._gone_producers, ids, self.under_way
        )
        self._recount()
        sent = [run.producer for entry in self.under_way for run in entry.runs]
        still_sent = (producer for producer in sent if producer in self._gone_producers)
        self._gone_producers = dict.fromkeys(still_sent)
        for run in dropped:
            run.failed(errors.LedgerClosed("the run's producer has gone"))
        self.wake_waiters()

    def fail(self, error: errors.LedgerError) -> None:
        """Fail all runs, waiting or under way; the bookies may still store runs under way."""
        runs = [run for entry in self.under_way for run in entry.runs]
        runs += [*self.waiting, *self.sequence_ids.take_repeated()]
        for entry in self.under_way:
            entry.drop()
        self.under_way.clear()
        self.waiting.clear()
        self._recount()
        self._failures += 1
        self.take_ids()
        self.sequence_ids.doubt()
        for run in runs:
            run.failed(error)
        self.wake_waiters()

    def fail_late(self, error: errors.LedgerError) -> None:
        """Fail the late runs: their producers are sent away, and send again the messages without a
        receipt."""
        while self._late_runs:
            self._late_runs.popleft().failed(error)
        self._recount()
        self.wake_waiters()

    def wake_waiters(self) -> None:
        """Wake the callers of `until_decided`: a run has its outcome, or the ledger that was
        undecided is sealed."""
        self._outcome_waiters.wake_all()

    async def until_decided(
        self, matches: Callable[[object], bool], is_undecided: Callable[[], bool]
    ) -> bool:
        """Wait until `is_undecided` does not hold and no run of the producers that match waits or
        is under way. False: all runs have failed meanwhile."""
        failures = self._failures

        def is_decided() -> bool:
            return self._failures != failures or not (
                is_undecided() or self.run_counts.has_any(matches)
            )

        await self._outcome_waiters.until(is_decided)
        return self._failures == failures

    def _recount(self) -> None:
        entries = (entry.runs for entry in self.under_way)
        self.run_counts.count(*entries, self.waiting, self._late_runs)
