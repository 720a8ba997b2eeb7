"""By which copies of acknowledgements a source plans, with topics and copies in the test."""

import json
from types import SimpleNamespace

import pytest
from pyroaring import BitMap64

from spark_ledger.errors import CopyGone, OffsetOfAnotherStore, OffsetsMalformed
from spark_ledger.spark.options.limits import GivenCurve
from spark_ledger.spark.options.offsets import TopicEnds
from spark_ledger.spark.options.options import stream_read_options
from spark_ledger.spark.read import copies as copies_of
from spark_ledger.spark.read.copies import ACKED, CopyName, QueryCopies, names_in, with_names
from spark_ledger.spark.read.planning import ReadStart
from spark_ledger.spark.read.source import LedgerStreamReader
from spark_ledger.spark.rows.columns import DEFAULT_SCHEMA
from spark_ledger.topic.read.acked import NO_ACKED, AckedRows
from tests.kit import curves


class Store:
    """The copies of all runs: by id what they have, and what was asked for."""

    def __init__(self):
        self.copies, self.calls = {}, []


class Topics:
    """A run's topic `t`, whose subscription stands at `positions` and has `acked` beyond them."""

    def __init__(self, store, positions, acked, *ends):
        self.store, self.positions, self.seen = store, positions, ends
        self.acked = {"t": AckedRows({p: BitMap64(rows) for p, rows in acked.items()})}
        self.infos = {"t": SimpleNamespace(id="id-1", policies=None)}
        self.shorter_logs, self.planned, self.token = 0, [], None
        self.cluster = SimpleNamespace(client=self, run=lambda result: result)

    def ack_copies(self, topic_id):
        return self

    def make(self, copy_id, rows, policies):
        assert copy_id not in self.store.copies, "a copy never changes"
        self.store.calls.append("make")
        self.store.copies[copy_id] = dict(rows)

    def read(self, copy_id):
        self.store.calls.append("read")
        if copy_id not in self.store.copies:
            raise CopyGone(copy_id)
        return self.store.copies[copy_id]

    def renew(self, copy_id):
        self.store.calls.append("renew")

    def delete(self, copy_id):
        self.store.copies.pop(copy_id, None)

    def ends(self):
        return {"t": TopicEnds("id-1", (0,) * len(self.seen), self.seen)}

    fresh_ends = ends

    def catch_up(self):
        return False

    def start(self, place, topic_ends):
        acked = {topic: rows for topic, rows in self.acked.items() if rows}
        return ReadStart({"t": dict(self.positions)}, acked)

    def tokens(self, positions):
        """Of rows that exist; partition 0 is in one live segment."""
        is_there = self.token is not None and 0 < positions["t"].get(0, 0) <= self.seen[0]
        return {"t": {0: self.token}} if is_there else {}

    def check_tokens(self, positions, tokens, what):
        if self.tokens(positions) != tokens:
            raise OffsetOfAnotherStore(what)

    def curves(self, start, end, acked):
        def curve_of(topic, partition, lo, hi):
            curve = curves.even(lo, hi, 10 * (hi - lo))
            rows = acked.get(topic, NO_ACKED)
            return GivenCurve(curve, partition, rows) if rows.count(partition, lo, hi) else curve

        return curve_of

    def plan(self, start, end, acked):
        rows = acked.get("t", NO_ACKED)
        self.planned = sorted(
            (p, offset)
            for p, at in start["t"].items()
            for offset in range(at, end["t"][p])
            if not rows.count(p, offset, offset + 1)
        )
        return []

    def values(self, declared):
        return None


def run_of(topics, **given):
    made = LedgerStreamReader(stream_read_options({"topic": "t", **given}), DEFAULT_SCHEMA)
    made._topics = topics
    return made


def logged(offset):
    """As Spark's checkpoint has it."""
    return json.loads(json.dumps(offset))


def poll(run, start):
    return logged(run.latestOffset(start, run.getDefaultReadLimit()))


def planned(run, start, end):
    run.partitions(start, end)
    return run._topics.planned


EVERY_THIRD = {0: range(3, 30, 3)}
GIVEN = [(0, n) for n in range(1, 40) if n % 3 or n >= 30]


def first_run(**given):
    store = Store()
    return store, run_of(Topics(store, {0: 1}, EVERY_THIRD, 40), **given)


def test_a_batch_leaves_out_the_copy_and_every_plan_of_it_again_leaves_out_the_same():
    store, run = first_run()
    start = logged(run.initialOffset())
    assert not store.copies, "nothing is made for a query that gets no batch"
    end = poll(run, start)
    assert len(store.copies) == 1
    assert planned(run, start, end) == GIVEN
    later = run_of(Topics(store, {0: 20}, {0: range(1, 40)}, 40))
    assert planned(later, logged(later.initialOffset()), end) == GIVEN
    assert store.calls == ["make", "read", "renew"]


def test_limits_count_only_rows_that_are_given():
    _, run = first_run(maxOffsetsPerTrigger="7")
    at, sizes, rows = logged(run.initialOffset()), [], []
    while (end := poll(run, at)) != at:
        batch = planned(run, at, end)
        sizes.append(len(batch))
        rows += batch
        at = end
    assert rows == GIVEN
    assert sizes == [7] * (len(GIVEN) // 7) + [len(GIVEN) % 7]


def test_a_copy_is_deleted_once_spark_has_committed_an_end_beyond_it():
    store, run = first_run(maxOffsetsPerTrigger="8")
    at = logged(run.initialOffset())
    for _ in range(2):
        at = poll(run, at)
        run.commit(at)
        assert store.copies, at["t"]
    end = poll(run, at)
    assert end["t"] == {"0": 34}
    assert store.copies, "the batch may be planned again"
    run.commit(end)
    assert not store.copies
    run._topics.seen = (60,)
    assert ACKED not in poll(run, end)


def test_a_run_that_starts_beyond_the_copy_needs_it_no_more_and_deletes_it():
    store, run = first_run()
    end = poll(run, logged(run.initialOffset()))
    again = run_of(Topics(store, {0: 0}, {}, 60))
    last = poll(again, end)
    assert planned(again, end, last) == [(0, n) for n in range(40, 60)]
    assert store.calls == ["make"]
    again.commit(end)
    assert not store.copies
    once_more = run_of(Topics(store, {0: 0}, {}, 60))
    assert planned(once_more, end, last) == [(0, n) for n in range(40, 60)]


def test_a_copy_of_rows_in_whose_place_are_others_ends_the_query():
    """All copies of live rows were lost, acknowledged ones among them."""
    store = Store()
    topics = Topics(store, {0: 1}, EVERY_THIRD, 40)
    topics.token = 7
    run = run_of(topics, maxOffsetsPerTrigger="2")
    start = logged(run.initialOffset())
    end = poll(run, start)
    del end["_commits"]  # the rows before the offset itself are the same
    again = Topics(store, {0: 1}, {}, 40)
    again.token = 7
    assert poll(run_of(again, maxOffsetsPerTrigger="2"), end)["t"] == {"0": 7}
    again.token = 8
    for call in (lambda run: poll(run, end), lambda run: run.partitions(start, end)):
        with pytest.raises(OffsetOfAnotherStore, match="copy of acknowledgements"):
            call(run_of(again, maxOffsetsPerTrigger="2"))


def test_no_row_is_compared_that_was_not_known_to_exist_when_the_copy_was_made():
    store = Store()
    topics = Topics(store, {0: 40}, {0: [41]}, 40)  # written and acknowledged just now
    topics.token = 7
    run = run_of(topics)
    (name,) = names_in(logged(run.initialOffset())).values()
    assert name == CopyName(name.id, {0: 42})


def test_a_checkpoint_that_went_back_behind_done_batches_gets_a_clear_error():
    store, run = first_run(maxOffsetsPerTrigger="10")
    middle = poll(run, logged(run.initialOffset()))
    store.copies.clear()
    again = run_of(Topics(store, {0: 0}, {}, 40))
    with pytest.raises(CopyGone, match="new checkpoint and startingSubscription"):
        poll(again, middle)
    with pytest.raises(CopyGone):
        planned(again, middle, {**middle, "t": {"0": 40}})


def test_a_subscription_without_gaps_makes_no_copy():
    store = Store()
    run = run_of(Topics(store, {0: 7}, {}, 40))
    start = logged(run.initialOffset())
    assert ACKED not in start
    assert planned(run, start, poll(run, start)) == [(0, n) for n in range(7, 40)]
    assert not store.calls


def test_a_copy_in_use_is_renewed_once_a_day(monkeypatch):
    now_s = [1000.0]
    monkeypatch.setattr(copies_of.time, "monotonic", lambda: now_s[0])
    store, run = first_run(maxOffsetsPerTrigger="1")
    at = logged(run.initialOffset())
    for _ in range(6):
        at = poll(run, at)
        now_s[0] += 40_000
    assert store.calls == ["make", "renew"]


def test_an_empty_first_batch_has_its_copy_as_its_end_is_in_the_checkpoint():
    store = Store()
    run = run_of(Topics(store, {0: 40}, {0: [41]}, 40))  # written and acknowledged just now
    start = logged(run.initialOffset())
    assert poll(run, start) == start
    again = run_of(Topics(store, {0: 40}, {}, 43))
    assert planned(again, start, poll(again, start)) == [(0, 40), (0, 42)]


def test_only_partitions_with_rows_of_the_copy_are_waited_for():
    store = Store()
    run = run_of(Topics(store, {0: 1, 1: 0}, {0: [5]}, 40, 40), maxOffsetsPerTrigger="20")
    at = poll(run, logged(run.initialOffset()))
    assert min(at["t"].values()) < 40
    run.commit(at)
    assert not store.copies


@pytest.mark.parametrize(
    "value", [7, [], {"t": 1}, {"t": {"id": "x"}}, {"t": {"id": "x", "ends": {"a": 1}}}]
)
def test_a_malformed_name_of_a_copy_is_refused(value):
    with pytest.raises(OffsetsMalformed, match="_acked"):
        names_in({ACKED: value})


def test_names_of_copies_read_as_they_were_written():
    names = {"t": CopyName("a1", {0: 5, 7: 9}, {7: 11}), "_odd": CopyName("b2", {0: 1})}
    offset = with_names({"t": {"0": 1}}, names)
    assert list(offset) == sorted(offset)
    assert names_in(logged(offset)) == names
    assert with_names({"t": {"0": 1}}, {}) == {"t": {"0": 1}}


def test_a_topic_that_is_left_out_needs_no_copy():
    offset = with_names({"t": {"0": 1}}, {"gone": CopyName("a1", {0: 5})})
    topics = Topics(Store(), {0: 1}, {}, 40)
    assert QueryCopies().acked(topics, offset, {"t": {0: 1}}) == {}
    QueryCopies().delete_passed(topics, offset, {"t": {0: 1}})
