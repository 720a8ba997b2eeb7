"""When delayed messages are due: the index beside plain dictionaries."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st
from pyroaring import BitMap64

from spark_ledger.broker.dispatch import delays
from spark_ledger.broker.dispatch.delays import (
    FORGOTTEN_EVERY_MS,
    MESSAGE_BYTES,
    DelayIndex,
    HeldMessages,
)
from spark_ledger.broker.dispatch.dispatcher import Consumer
from spark_ledger.broker.dispatch.shared_dispatcher import SharingRules
from spark_ledger.broker.dispatch.sharing import UnackedLimits
from spark_ledger.broker.dispatch.subscriptions import Subscription
from spark_ledger.broker.log.tail import Stored
from spark_ledger.topic.acks.delayed import DelayedRows
from spark_ledger.topic.acks.sets import AckBudget
from spark_ledger.topic.entry import pulsar_batch
from spark_ledger.topic.entry.pulsar_message_pb2 import MessageMetadata
from tests.unit.spark_ledger.broker.consumers import (
    SHARED,
    Batches,
    Wire,
    consumer_of,
    play,
    settle,
    until,
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
    assert index_of(delayed).due_between(after_ms, until_ms).tolist() == sorted(due)


@given(DELAYED, TIMES)
def test_the_next_time_is_the_first_one_after_that_time(delayed, after_ms):
    later = [ms for ms in delayed.values() if ms > after_ms]
    assert index_of(delayed).next_due_ms(after_ms) == min(later, default=None)


@given(DELAYED, TIMES, TIMES, OFFSETS)
def test_what_is_forgotten_is_what_is_due_and_what_is_below(delayed, due_ms, after_ms, offset):
    index = index_of(delayed)
    index.forget_due(due_ms)
    index.forget_below(offset)
    until_ms = due_ms if due_ms >= FORGOTTEN_EVERY_MS else -1
    kept = {o: ms for o, ms in delayed.items() if ms > until_ms and o >= offset}
    assert index.due_between(-1, 10_000).tolist() == sorted(kept)
    assert index.held_in(0, 100, -1).tolist() == sorted(kept)
    later_ms = [ms for ms in kept.values() if ms > after_ms]
    assert index.next_due_ms(after_ms) == min(later_ms, default=None)
    assert index.bytes == MESSAGE_BYTES * len(kept)


@given(DELAYED, st.sets(OFFSETS), OFFSETS, TIMES)
def test_a_reader_passes_over_the_run_of_messages_that_are_held_or_acknowledged(
    delayed, acked, offset, now_ms
):
    (held,) = held_of(lambda: now_ms, 1, index_of(delayed))
    end, rows = offset, set()
    while end in acked or delayed.get(end, now_ms) > now_ms:
        rows |= {end} - acked
        end += 1
    if not delayed:
        end = offset
    assert held.pass_over(offset, BitMap64(acked)) == end
    assert set(held.rows) == rows
    held.look(0)
    assert not held.due


@given(DELAYED, DELAYED, st.integers(0, 20))
def test_an_index_has_what_was_loaded_and_gives_the_rest_as_added(loaded, added, taken):
    index = index_of(added)
    index.load(rows_of(loaded))
    both = loaded | added
    assert index.held_in(0, 100, -1).tolist() == sorted(both)
    assert index.due_between(-1, 10_000).tolist() == sorted(both)
    index.forget_below(taken)
    expected = {o: ms for o, ms in added.items() if o >= taken}
    assert plain(index.take_added()) == expected
    assert plain(index.take_added()) == {}
    index.add(50, 7)
    assert plain(index.take_added()) == {50: 7}
    index.add(51, 8)
    everything = {o: ms for o, ms in both.items() if o >= taken} | {50: 7, 51: 8}
    assert plain(index.take_all()) == everything
    assert plain(index.take_added()) == {}


def rows_of(delayed):
    offsets = sorted(delayed)
    return DelayedRows(
        np.array(offsets, np.int64), np.array([delayed[o] for o in offsets], np.int64)
    )


def plain(rows):
    return dict(zip(rows.offsets.tolist(), rows.dues_ms.tolist(), strict=True))


def test_a_message_that_is_added_twice_is_due_once():
    index = index_of({3: 50})
    index.add(3, 50)
    assert index.due_between(0, 100).tolist() == [3]


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


def test_without_delayed_delivery_messages_come_at_once_and_those_that_are_held_stay_so():
    async def act(made):
        clock, partition = Clock(), DelayedBatches()
        partition.delay(300)
        rules = SharingRules(UnackedLimits(0, 0), clock)
        subscription = Subscription("s", SHARED, None, rules)
        made.append(consumer_of(subscription, partition, "a"))
        made[0].dispatcher.flow(made[0], 100)
        await settle()
        rules.delays = False
        made.append(consumer_of(subscription, partition, "b"))
        made[1].dispatcher.flow(made[1], 100)
        partition.delay(400, 0)
        await settle()
        assert sorted(offsets(made[0]) + offsets(made[1])) == [1, 2]
        await passes(clock, partition, 300)
        assert sorted(offsets(made[0]) + offsets(made[1])) == [0, 1, 2]

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


# -- an index that several subscriptions share, and that is full -----------------------------------


def delayed_batch(offset, due_ms):
    metadata = MessageMetadata(producer_name="p", deliver_at_time=due_ms)
    return Stored(offset, 1, pulsar_batch.build_batch(metadata, b"x"), False)


def held_of(clock, count, index=None):
    index = DelayIndex() if index is None else index
    subscriptions = [HeldMessages(index, clock) for _ in range(count)]
    for held in subscriptions:
        held.begin()
    return subscriptions


def test_what_became_due_is_held_no_more_and_an_end_leaves_nothing_in_the_index():
    clock, index = Clock(), DelayIndex()
    (held,) = held_of(clock, 1, index)
    index.add(3, clock() + 50)
    index.add(4, clock() + 500)
    assert held.pass_over(3, BitMap64()) == 5
    clock.ms += 60
    held.look(0)
    assert (list(held.due), list(held.rows)) == ([3], [4])
    held.end()
    assert not (index.asked_ms or index.marks or held.due or held.rows)


def test_what_an_index_had_counts_as_added_for_a_ledger_that_lacks_it():
    index = index_of({5: 9})
    assert index.take_added().offsets.tolist() == [5]
    no_rows = np.empty(0, np.int64)
    assert index.load(DelayedRows(no_rows, no_rows))
    assert index.take_added().offsets.tolist() == [5]


def test_a_subscription_that_a_full_index_keeps_from_reading_wakes_and_keeps_nothing_in_it(
    monkeypatch,
):
    monkeypatch.setattr(delays, "INDEX_BYTES_MAX", 3 * MESSAGE_BYTES)
    clock = Clock()
    reads, waits = held_of(clock, 2)
    for offset in range(3):
        assert reads.holds(delayed_batch(offset, 2000 + offset))
    waits.look(0)
    assert waits.is_full and waits.wait_s() == delays.FULL_WAIT_S
    clock.ms = 5000
    reads.look(0)
    assert list(reads.due) == [0, 1, 2] and not waits.is_full


def test_a_full_index_is_logged_and_shown_until_some_of_its_messages_are_due(monkeypatch, caplog):
    monkeypatch.setattr(delays, "INDEX_BYTES_MAX", 3 * MESSAGE_BYTES)
    monkeypatch.setattr(delays, "FULL_WAIT_S", 0.01)

    async def act(made):
        clock, partition = Clock(), DelayedBatches()
        partition.delay(1000, 1000, 1000)
        (reads,) = shared_of(clock, partition, "a")
        made.append(reads)
        await settle()
        assert reads.dispatcher.pause.reason == ""  # nothing more is there to be read
        partition.delay(0)
        for _ in range(3):
            await settle()
        assert reads.dispatcher.pause.reason == "delayed"
        assert offsets(reads) == []
        assert caplog.text.count("pauses at offset 3: its delayed messages take 96 bytes") == 1
        await passes(clock, partition, 1000)
        await until(lambda: offsets(reads) == [0, 1, 2, 3])
        assert reads.dispatcher.pause.reason == ""

    play(act)


def test_messages_below_the_marks_of_all_subscriptions_make_room_in_a_full_index(monkeypatch):
    monkeypatch.setattr(delays, "INDEX_BYTES_MAX", 3 * MESSAGE_BYTES)
    first, second = held_of(Clock(), 2)
    for offset in range(3):
        first.holds(delayed_batch(offset, 9000 + offset))
    assert second.pass_over(0, BitMap64()) == 3
    first.look(2)
    assert first.is_full  # the other one may still get them
    second.look(1)
    assert not first.is_full and list(first.rows) == [2] and list(second.rows) == [1, 2]


def test_a_subscription_that_went_back_keeps_what_it_holds_below_its_earlier_mark():
    clock = Clock()
    back, other = held_of(clock, 2)
    back.look(8)
    back.begin()
    assert back.holds(delayed_batch(3, 500))
    other.look(9)
    clock.ms = 500
    back.look(0)
    assert list(back.due) == [3]


def test_a_message_that_became_due_between_look_and_wait_is_waited_for_no_longer():
    clock = Clock()
    (held,) = held_of(clock, 1)
    for offset, due_ms in enumerate([200, 5000]):
        held.holds(delayed_batch(offset, due_ms))
    held.look(0)
    clock.ms = 250
    assert held.wait_s() == 0
    held.look(0)
    assert list(held.due) == [0] and held.wait_s() == 4.75


def test_a_step_looks_at_no_held_message_before_one_may_be_due(monkeypatch):
    clock = Clock()
    (held,) = held_of(clock, 1)
    for offset in range(3):
        held.holds(delayed_batch(offset, 7000))
    looks = []
    for name in ("due_between", "next_due_ms"):
        look = getattr(DelayIndex, name)
        monkeypatch.setattr(
            *(DelayIndex, name),
            lambda *of, name=name, look=look: (looks.append(name), look(*of))[1],
        )
    for clock.ms in range(6000, 7000, 100):
        held.look(0)
        assert held.wait_s() == (7000 - clock.ms) / 1000
    assert not looks
    clock.ms = 7000
    held.look(0)
    assert list(held.due) == [0, 1, 2] and looks


@given(
    st.lists(
        st.one_of(
            st.tuples(st.just("store"), st.integers(1, 4000)),
            st.tuples(st.just("time"), st.integers(0, 1500)),
            st.tuples(st.just("read"), st.integers(0, 1)),
            st.tuples(st.just("look"), st.integers(0, 1)),
            st.tuples(st.just("rewind"), st.integers(0, 1)),
        ),
        max_size=40,
    )
)
def test_each_subscription_gets_every_message_once_it_is_due_and_never_before(steps):
    clock, dues_ms, index = Clock(), [], DelayIndex()
    subscriptions = held_of(clock, 2, index)
    positions, got = [0, 0], [set(), set()]

    def read(which):
        held = subscriptions[which]
        at = held.pass_over(positions[which], BitMap64())
        for offset in range(at, len(dues_ms)):
            if not held.holds(delayed_batch(offset, dues_ms[offset])):
                assert dues_ms[offset] <= clock.ms
                got[which].add(offset)
        positions[which] = len(dues_ms)

    def look(which):
        mark = min({*range(len(dues_ms) + 1)} - got[which])
        subscriptions[which].look(mark)
        for offset in list(subscriptions[which].due):
            assert dues_ms[offset] <= clock.ms
            got[which].add(offset)
            subscriptions[which].due.discard(offset)
        wait_s = subscriptions[which].wait_s()
        left_ms = [dues_ms[row] - clock.ms for row in range(positions[which])]
        left_ms = [ms for row, ms in enumerate(left_ms) if row not in got[which]]
        assert not left_ms or wait_s <= min(left_ms) / 1000

    for step, value in steps:
        if step == "store":
            dues_ms.append(clock.ms + value)
        elif step == "time":
            clock.ms += value
        elif step == "read":
            read(value)
        elif step == "look":
            look(value)
        else:
            positions[value] = 0
            got[value].clear()
            subscriptions[value].begin()
    for which in range(2):
        read(which)
    clock.ms += 10_000
    for which in range(2):
        look(which)
        assert got[which] == set(range(len(dues_ms)))
    assert len(index) == 0


def test_the_indexes_of_a_broker_share_a_budget_and_a_small_index_waits_for_no_other():
    budget = AckBudget(1000 * MESSAGE_BYTES)
    small, large = DelayIndex(budget), DelayIndex(budget)
    small.add(0, 50)
    for offset in range(999):
        large.add(offset, 10_000 + offset)
    assert not large.is_full and budget.bytes == 1000 * MESSAGE_BYTES
    large.add(999, 20_000)
    assert large.is_full and not small.is_full
    large.forget_due(10_000)
    assert not large.is_full and budget.bytes == 1000 * MESSAGE_BYTES
    small.load(DelayedRows(np.arange(5), np.arange(5)))
    assert large.is_full
    large.drop()
    assert budget.bytes == 5 * MESSAGE_BYTES
    large.add(0, 1)  # a step that still runs
    assert budget.bytes == 5 * MESSAGE_BYTES


def test_a_full_budget_lets_an_index_forget_what_its_subscriptions_have_behind_them():
    budget = AckBudget(1000 * MESSAGE_BYTES)
    index = DelayIndex(budget)
    held = HeldMessages(index, lambda: 1)
    held.begin()
    for offset in range(1001):
        index.add(offset, 1 << 40)
    assert index.is_full
    held.look(500)
    assert not index.is_full and len(index) == 501
