"""What waits and what is under way in a partition, until each run has its outcome."""

from concurrent.futures import Future

from spark_ledger import errors
from spark_ledger.broker.produce.backlog import Backlog
from spark_ledger.broker.produce.waiting import PendingEntry
from spark_ledger.topic.entry.message_batch import NO_ROWLESS


class Run:
    chunk, size, unpacked, messages, producer_name = None, 10, 10, 1, "p"

    def __init__(self, name, producer="p"):
        self.name, self.producer = name, producer
        self.outcome = None

    def stored(self, offset):
        self.outcome = offset

    def failed(self, error):
        self.outcome = type(error)


def backlog_of(*runs):
    seen = []
    backlog = Backlog(lambda offset, run: seen.append((offset, run.name)), 20, deduplicates=False)
    for run in runs:
        backlog.add(run)
    return backlog, seen


def sent(backlog):
    """The next entry, under way."""
    taken = backlog.take_runs()
    entry = PendingEntry(taken.runs, taken.rows, NO_ROWLESS, Future())
    backlog.under_way.append(entry)
    return entry


def names_of(runs):
    return [run.name for run in runs]


def test_runs_share_an_entry_within_its_bytes_and_are_stored_in_the_order_in_which_they_came():
    runs = [Run(name) for name in "abc"]
    backlog, seen = backlog_of(*runs)
    first, second = sent(backlog), sent(backlog)
    assert [names_of(entry.runs) for entry in (first, second)] == [["a", "b"], ["c"]]
    second.acked.set_result(1)
    assert backlog.next_stored() is None, "the entry before it is not acknowledged"
    first.acked.set_result(0)
    for offset in (7, 9):
        backlog.store(backlog.next_stored(), offset)
    assert seen == [(7, "a"), (8, "b"), (9, "c")]
    assert [run.outcome for run in runs] == [7, 8, 9]


def test_an_entry_that_failed_is_not_stored_and_waits_again_before_what_came_later():
    backlog, _ = backlog_of(*map(Run, "abcd"))
    first, _ = sent(backlog), sent(backlog)
    backlog.add(Run("e"))
    first.acked.set_exception(errors.LedgerFenced("by another owner"))
    assert backlog.next_stored() is None
    assert backlog.is_broken
    backlog.take_back(0)
    assert not backlog.is_broken
    assert names_of(backlog.waiting) == ["a", "b", "c", "d", "e"]


def test_what_waits_of_a_producer_that_has_gone_fails_and_what_is_under_way_does_not():
    runs = [Run("a", "gone"), Run("b"), Run("c", "gone"), Run("d")]
    backlog, _ = backlog_of(*runs)
    entry = sent(backlog)
    backlog.drop(["gone"])
    assert [run.outcome for run in runs] == [None, None, errors.LedgerClosed, None]
    backlog.store(backlog.under_way.popleft(), 0)
    assert names_of(entry.runs) == ["a", "b"]
    assert runs[0].outcome == 0
    assert names_of(backlog.waiting) == ["d"]


def test_what_comes_late_fails_after_the_rest_of_the_work_and_is_never_sent():
    early, late = Run("a"), Run("b")
    backlog, _ = backlog_of(early)
    backlog.add_late(late)
    backlog.fail(errors.Unavailable("the store is away"))
    assert (early.outcome, late.outcome) == (errors.Unavailable, None)
    assert not backlog.waiting
    backlog.fail_late(errors.LedgerClosed("given up"))
    assert late.outcome is errors.LedgerClosed
