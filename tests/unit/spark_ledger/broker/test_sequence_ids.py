"""What the owner of a partition with deduplication remembers of its producers."""

from types import SimpleNamespace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from spark_ledger.broker.produce import waiting
from spark_ledger.broker.produce.waiting import NEW_BYTES_MAX, SequenceIds
from spark_ledger.topic.log import producers


def run_of(name, number):
    return SimpleNamespace(
        producer_name=name,
        first_sequence_id=number,
        last_sequence_id=number,
        chunk=None,
        batches=[b""],
        duplicate=lambda: None,
    )


def stores(ids, name, number=1):
    run = run_of(name, number)
    assert ids.new_part_of(run) == [run]
    ids.note_stored(run)


@pytest.mark.parametrize("size", [1, 30, 1024])
def test_an_owner_remembers_those_that_sent_last_whatever_their_names_are(size):
    ids = SequenceIds()
    ids.begin({})
    names = [f"{n:05}".ljust(size, "x") for n in range(30_000 if size < 1024 else 3000)]
    for name in names:
        stores(ids, name)
    remembered = [name for name in names if ids.last(name) >= 0]
    for kept in (remembered, list(ids.of_segment)):
        newer = NEW_BYTES_MAX // len(names[0]) if size > 30 else NEW_BYTES_MAX // 29
        assert len(kept) <= producers.PRODUCERS_MAX + newer
        assert producers.record_bytes(kept) <= producers.PRODUCERS_BYTES_MAX + 2 * NEW_BYTES_MAX
        assert kept == names[-len(kept) :]
        assert len(kept) >= min(producers.PRODUCERS_MAX, producers.PRODUCERS_BYTES_MAX // 1100)


def test_a_producer_that_sends_again_and_again_stays(monkeypatch):
    monkeypatch.setattr(waiting, "NEW_BYTES_MAX", 100)
    monkeypatch.setattr(producers, "PRODUCERS_MAX", 20)
    ids = SequenceIds()
    ids.begin({"first": 7})
    for number in range(500):
        stores(ids, "always", number)
        stores(ids, f"once-{number}")
    assert (ids.last("always"), ids.last("first"), ids.last("once-0")) == (499, -1, -1)
    assert ids.of_segment["always"] == 499
    assert len(ids.of_segment) < 30


def test_a_producer_that_has_something_on_its_way_stays(monkeypatch):
    monkeypatch.setattr(waiting, "NEW_BYTES_MAX", 100)
    monkeypatch.setattr(producers, "PRODUCERS_MAX", 20)
    ids = SequenceIds()
    ids.begin({})
    stores(ids, "slow", 4)
    run = run_of("slow", 5)
    assert ids.new_part_of(run) == [run]
    for number in range(500):
        stores(ids, f"once-{number}")
    assert ids.last("slow") == 5
    ids.drop(lambda run: False, ["slow"], [])  # what it sent is not to be stored
    assert ids.last("slow") == 4


class Model:
    """The same without a limit."""

    def __init__(self):
        self.stored, self.sent, self.unsure = {}, {}, False

    def last(self, name):
        return (self.stored if self.unsure else self.sent).get(name, -1)

    def is_new(self, name, number):
        if self.unsure or number > self.sent.get(name, -1):
            self.sent[name] = max(number, self.sent.get(name, number))
            return True
        return False

    def note(self, name, number):
        self.stored[name] = max(number, self.stored.get(name, number))


STEPS = st.lists(
    st.one_of(
        st.tuples(st.just("send"), st.sampled_from("abc"), st.integers(0, 9)),
        st.tuples(st.just("store")),
        st.tuples(st.just("drop"), st.sampled_from("abc")),
        st.tuples(st.just("fail")),
        st.tuples(st.just("begin")),
    ),
    max_size=40,
)


@settings(deadline=None, max_examples=300)
@given(STEPS)
def test_what_counts_as_sent_before_is_what_it_was_without_a_limit(steps):
    ids, model, under_way = SequenceIds(), Model(), []
    ids.begin({})
    for kind, *of in steps:
        if kind == "send":
            run = run_of(*of)
            is_new = model.is_new(*of)
            assert ids.new_part_of(run) == ([run] if is_new else [])
            under_way += [run] if is_new else []
        elif kind == "store" and under_way:
            run = under_way.pop(0)
            ids.note_stored(run)
            model.note(run.producer_name, run.last_sequence_id)
        elif kind == "drop":
            (name,) = of
            under_way = [run for run in under_way if run.producer_name != name]
            ids.drop(lambda run, name=name: run.producer_name == name, [name], under_way)
            model.sent[name] = model.stored.get(name, -1)
        elif kind == "fail":
            under_way.clear()
            ids.take_repeated()
            ids.doubt()
            model.unsure = True
        elif kind == "begin" and not under_way:
            ids.begin(model.stored)
            model.sent, model.unsure = dict(model.stored), False
        for name in "abc":
            assert ids.last(name) == model.last(name)
