"""When delayed messages are due: the index beside plain dictionaries."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from spark_ledger.broker.dispatch.delays import MESSAGE_BYTES, DelayIndex
from spark_ledger.broker.dispatch.dispatcher import Consumer
from spark_ledger.broker.dispatch.sharing import UnackedLimits
from spark_ledger.broker.dispatch.subscriptions import SharingRules, Subscription
from spark_ledger.broker.owner.tail import Stored
from spark_ledger.topic.entry import pulsar_batch
from spark_ledger.topic.entry.pulsar_message_pb2 import MessageMetadata
from tests.unit.spark_ledger.broker.consumers import (
    SHARED,
    Batches,
    Wire,
    consumer_of,
    play,
    settle,
)

OFFSETS = st.integers(0, 40)
TIMES = st.integers(0, 5_000)
DELAYED = st.dictionaries(OFFSETS, TIMES)


def index_of(delayed):
    index = DelayIndex()
    for offset, due_ms in delayed.items():
        index.add(offset, due_ms)
    return index


@given(DELAYED, TIMES, TIMES)
def test_what_became_due_between_two_times_is_found_whatever_the_order_of_adding(
    delayed, after_ms, until_ms
):
    due = [offset for offset, ms in delayed.items() if after_ms < ms <= until_ms]
    assert index_of(delayed).due_between(after_ms, until_ms) == sorted(due)


@given(DELAYED, TIMES)
def test_the_next_time_is_the_first_one_after_that_time(delayed, after_ms):
    later = [ms for ms in delayed.values() if ms > after_ms]
    assert index_of(delayed).next_due_ms(after_ms) == min(later, default=None)


@given(DELAYED, TIMES, TIMES, OFFSETS)
def test_what_is_forgotten_is_what_is_due_and_what_is_below(delayed, due_ms, after_ms, offset):
    index = index_of(delayed)
    index.forget_due(due_ms)
    index.forget_below(offset)
    kept = {o: ms for o, ms in delayed.items() if ms > due_ms and o >= offset}
    assert dict(zip(*(column.tolist() for column in index.columns()), strict=True)) == kept
    assert index.due_between(due_ms, 10_000) == sorted(kept)
    assert index.next_due_ms(max(after_ms, due_ms)) == min(
        (ms for ms in kept.values() if ms > max(after_ms, due_ms)), default=None
    )
    assert index.bytes == MESSAGE_BYTES * len(kept)


@given(DELAYED, OFFSETS, TIMES)
def test_a_reader_passes_over_the_run_of_messages_that_it_would_hold(delayed, offset, now_ms):
    end = offset
    while delayed.get(end, now_ms) > now_ms:
        end += 1
    assert index_of(delayed).held_until(offset, now_ms) == end


@given(DELAYED)
def test_a_snapshot_has_the_whole_index(delayed):
    index, loaded = index_of(delayed), DelayIndex()
    loaded.load(*index.columns())
    assert [loaded.due_of(offset) for offset in range(41)] == [
        delayed.get(offset) for offset in range(41)
    ]


def test_a_message_that_is_added_twice_is_due_once():
    index = index_of({3: 50})
    index.add(3, 50)
    assert index.due_between(0, 100) == [3]


@pytest.mark.parametrize(
    ("ranges", "covered"),
    [
        ([(0, 5), (5, 9)], (0, 9)),
        ([(0, 5), (3, 4)], (0, 5)),
        ([(4, 8), (2, 5)], (2, 8)),
        ([(0, 5), (7, 9)], (7, 9)),
        ([(7, 9), (0, 5)], (0, 5)),
    ],
)
def test_the_covered_range_grows_by_what_follows_it_and_is_never_more_than_was_added(
    ranges, covered
):
    index = DelayIndex()
    for lo, hi in ranges:
        index.cover(lo, hi)
    assert index.covered == covered


# -- messages that a subscription holds ------------------------------------------------------------


class DelayedBatches(Batches):
    """A partition of lone messages that are to be delivered at these times."""

    def delay(self, *dues_ms):
        for due_ms in dues_ms:
            metadata = MessageMetadata(producer_name="p", deliver_at_time=due_ms)
            data = pulsar_batch.build_batch(metadata, b"x")
            self.stored.append(Stored(self.end, 1, data, False))
            self.end += 1
        for listener in self.listeners:
            listener.set()


class Clock:
    def __init__(self):
        self.ms = 100

    def __call__(self):
        return self.ms


def shared_of(clock, partition, *names):
    rules = SharingRules(UnackedLimits(0, 0), clock)
    subscription = Subscription("s", SHARED, None, rules)
    consumers = [consumer_of(subscription, partition, name) for name in names]
    for consumer in consumers:
        consumer.dispatcher.flow(consumer, 100)
    return consumers


def offsets(consumer):
    return [at for at, _ in consumer.link.messages]


async def passes(clock, partition, ms):
    clock.ms = ms
    for listener in partition.listeners:
        listener.set()
    await settle()


def test_a_message_comes_once_it_is_due_and_blocks_no_other():
    async def act(made):
        clock, partition = Clock(), DelayedBatches()
        partition.delay(300, 200, 0, 100, 250)
        (reads,) = shared_of(clock, partition, "a")
        made.append(reads)
        await settle()
        assert offsets(reads) == [2, 3]
        await passes(clock, partition, 199)
        assert offsets(reads) == [2, 3]
        await passes(clock, partition, 250)
        assert offsets(reads) == [2, 3, 1, 4]
        assert reads.dispatcher.acks.mark == 0
        await passes(clock, partition, 300)
        assert offsets(reads) == [2, 3, 1, 4, 0]

    play(act)


def test_without_a_known_time_no_delayed_message_is_due():
    async def act(made):
        clock, partition = Clock(), DelayedBatches()
        clock.ms = None
        partition.delay(1, 0)
        (reads,) = shared_of(clock, partition, "a")
        made.append(reads)
        await settle()
        assert offsets(reads) == [1]
        await passes(clock, partition, 1)
        assert offsets(reads) == [1, 0]

    play(act)


def test_the_next_consumer_gets_what_is_due_by_then_and_known_delays_are_not_read_again():
    async def act(made):
        clock, partition = Clock(), DelayedBatches()
        partition.delay(300, 300, 300, 0)
        (first,) = shared_of(clock, partition, "a")
        await settle()
        assert offsets(first) == [3]
        dispatcher = first.dispatcher
        dispatcher.leave(first)
        reads = []
        read = partition.read

        async def counted(offset, *rest, **options):
            reads.append(offset)
            return await read(offset, *rest, **options)

        partition.read = counted
        second = Consumer(Wire(), 2, "b", 0, dispatcher, lambda _: None)
        dispatcher.join(second)
        dispatcher.flow(second, 100)
        made.append(second)
        await settle()
        assert (offsets(second), reads[0]) == ([3], 3)
        await passes(clock, partition, 300)
        assert offsets(second) == [3, 0, 1, 2]

    play(act)


def test_a_due_message_without_a_receiver_waits_for_permits():
    async def act(made):
        clock, partition = Clock(), DelayedBatches()
        partition.delay(200, 200)
        (reads,) = shared_of(clock, partition, "a")
        made.append(reads)
        await settle()
        reads.permits = 1
        await passes(clock, partition, 200)
        assert offsets(reads) == [0]
        reads.dispatcher.flow(reads, 5)
        await settle()
        assert offsets(reads) == [0, 1]

    play(act)
