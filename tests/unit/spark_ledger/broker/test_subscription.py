"""Who gets which batches, with what is acknowledged masked, and never more than was asked for."""

import asyncio

import pytest

from spark_ledger.broker.dispatch import active_dispatcher
from spark_ledger.broker.dispatch.acks import acknowledged_ranges, cumulative_end
from spark_ledger.broker.dispatch.subscriptions import SubscribeRequest, Subscription
from spark_ledger.broker.log.tail import (
    BATCH_OVERHEAD_BYTES,
    BLOCK_OVERHEAD_BYTES,
    Stored,
    Tail,
    TailBudget,
)
from spark_ledger.broker.wire.commands import AckType, MessageId, Refusal, ServerError
from tests.kit.pulsar_batches import chunked, whole_of
from tests.unit.spark_ledger.broker.consumers import (
    EXCLUSIVE,
    FAILOVER,
    LEDGER,
    Batches,
    consumer_of,
    play,
    settle,
)


@pytest.fixture
def no_delay(monkeypatch):
    """A newly active consumer gets messages at once, and learns that it is active."""
    monkeypatch.setattr(active_dispatcher, "FAILOVER_DELAY_S", 0.0)
    monkeypatch.setattr(active_dispatcher, "ANNOUNCE_S", 0.0)


def ranges_of(consumer, id_, offset):
    return acknowledged_ranges(id_, offset, consumer.sent.message_count(id_.entryId))


def end_of(consumer, id_, offset):
    return cumulative_end(id_, offset, consumer.sent.message_count(id_.entryId))


def test_a_consumer_gets_no_more_than_its_permits_and_one_batch():
    async def act(made):
        one = consumer_of(Subscription("s", EXCLUSIVE, None), Batches(3, 3, 3, 1))
        made.append(one)
        await settle()
        assert one.link.messages == []
        one.dispatcher.flow(one, 4)
        await settle()
        assert [at for at, _ in one.link.messages] == [0, 3]
        one.dispatcher.flow(one, 1)  # of two messages too many one is still to be paid for
        await settle()
        assert len(one.link.messages) == 2
        one.dispatcher.flow(one, 2)
        await settle()
        assert [at for at, _ in one.link.messages] == [0, 3, 6]

    play(act)


def test_the_chunks_of_a_message_come_with_one_id_and_each_takes_a_permit():
    async def act(made):
        partition = Batches()
        data = whole_of(chunked(b"abc", 3))
        partition.stored, partition.end = [Stored(0, 1, data, False)], 1
        partition.add(1)
        partition.add(1)
        one = consumer_of(Subscription("s", EXCLUSIVE, None), partition)
        made.append(one)
        one.dispatcher.flow(one, 4)
        await settle()
        assert [at for at, _ in one.link.messages] == [0, 0, 0, 1]
        chunk = MessageId(ledgerId=LEDGER, entryId=0, partition=0)
        assert [ranges_of(one, chunk, 0) for _ in range(3)] == [[(0, 1)]] * 3
        assert end_of(one, chunk, 0) == 1

    play(act)


def test_a_full_connection_waits_between_the_batches_of_one_read():
    async def act(made):
        one = consumer_of(Subscription("s", EXCLUSIVE, None), Batches(1, 1, 1))
        made.append(one)
        wire, send = one.link, one.link.send

        def send_and_fill(frame):
            send(frame)
            wire.open.clear()

        wire.send = send_and_fill
        one.dispatcher.flow(one, 100)
        await settle()
        assert wire.messages == [(0, [])]
        wire.open.set()
        await settle()
        assert wire.messages == [(0, []), (1, [])]

    play(act)


def test_what_comes_later_is_sent_when_it_comes_and_a_full_connection_waits():
    async def act(made):
        partition = Batches()
        one = consumer_of(Subscription("s", EXCLUSIVE, None), partition)
        made.append(one)
        one.dispatcher.flow(one, 100)
        await settle()
        partition.add(2)
        await settle()
        assert one.link.messages == [(0, [])]
        one.link.open.clear()
        partition.add(1)
        await settle()
        assert len(one.link.messages) == 1
        one.link.open.set()
        await settle()
        assert one.link.messages[1:] == [(2, [])]

    play(act)


def test_after_a_rewind_come_those_batches_and_messages_that_are_not_acknowledged():
    async def act(made):
        one = consumer_of(Subscription("s", EXCLUSIVE, None), Batches(3, 3, 1))
        made.append(one)
        one.dispatcher.flow(one, 100)
        await settle()
        acks = one.dispatcher.acks
        for start, end in ranges_of(one, MessageId(ledgerId=LEDGER, entryId=3), 3):
            acks.add(start, end)
        middle = MessageId(ledgerId=LEDGER, entryId=0, batch_index=1)
        for start, end in ranges_of(one, middle, 1):
            acks.add(start, end)
        one.link.messages.clear()
        one.dispatcher.rewind()
        await settle()
        assert one.link.messages == [(0, [0b101]), (6, [])]

    play(act)


def test_messages_after_a_client_asked_for_all_again_are_of_the_epoch_that_it_named():
    async def act(made):
        one = consumer_of(Subscription("s", EXCLUSIVE, None), Batches(2, 1))
        made.append(one)
        one.dispatcher.flow(one, 100)
        await settle()
        one.dispatcher.redeliver(one, 5)
        await settle()
        one.dispatcher.rewind()  # as when it becomes the active one
        await settle()
        assert one.link.epochs == [None, None, 5, 5, 5, 5]

    play(act)


@pytest.mark.parametrize(
    ("found", "end"),
    [
        (MessageId(entryId=3), 6),  # a batch that was sent
        (MessageId(entryId=2), 3),  # the message before a batch: its consumer is within that
        (MessageId(entryId=3, batch_index=1), 5),
        (MessageId(entryId=3, ack_set=[0b100]), 5),
        (MessageId(entryId=3, ack_set=[0b001]), 3),  # not the first message of the batch
        (MessageId(entryId=3, ack_set=[0], batch_size=10_000_000), 6),
        (MessageId(entryId=2, ack_set=[0], batch_size=10_000_000), 2),  # no batch that was sent
        (MessageId(entryId=3, batch_index=2**31 - 1), 6),
    ],
)
def test_a_cumulative_ack_ends_where_its_id_says(found, end):
    async def act(made):
        one = consumer_of(Subscription("s", EXCLUSIVE, None), Batches(3, 3, 1))
        made.append(one)
        one.dispatcher.flow(one, 100)
        await settle()
        offset = found.entryId + max(0, found.batch_index)
        assert end_of(one, found, offset) == end

    play(act)


def test_a_cumulative_ack_beyond_the_end_is_refused_and_acknowledges_nothing():
    async def act(made):
        consumer = consumer_of(Subscription("s", EXCLUSIVE, None), Batches(3, 3, 1))
        made.append(consumer)
        beyond = MessageId(ledgerId=LEDGER, entryId=7)
        with pytest.raises(Refusal):
            list(consumer.dispatcher.acknowledge(consumer, beyond, AckType.CUMULATIVE))
        assert consumer.dispatcher.acks.mark == 0

    play(act)


@pytest.mark.parametrize(
    ("found", "ranges"),
    [
        (MessageId(entryId=3), [(3, 6)]),
        (MessageId(entryId=3, batch_index=2), [(5, 6)]),
        (MessageId(entryId=3, batch_index=3), []),
        (MessageId(entryId=3, batch_size=10_000_000), [(3, 6)]),
        (MessageId(entryId=3, batch_size=10_000_000, ack_set=[0]), [(3, 6)]),
        (MessageId(entryId=7, batch_size=10_000_000, ack_set=[0]), []),  # not sent from here
        (MessageId(entryId=7, batch_size=10_000_000), [(7, 8)]),
    ],
)
def test_an_ack_is_judged_by_what_was_sent_never_by_its_own_counts(found, ranges):
    async def act(made):
        one = consumer_of(Subscription("s", EXCLUSIVE, None), Batches(3, 3, 1))
        made.append(one)
        one.dispatcher.flow(one, 100)
        await settle()
        for _ in range(2):  # what is sent again is known before it comes
            offset = found.entryId + max(0, found.batch_index)
            assert ranges_of(one, found, offset) == ranges
            one.dispatcher.rewind()

    play(act)


def test_a_second_exclusive_consumer_and_another_type_are_busy():
    async def act(made):
        subscription = Subscription("s", EXCLUSIVE, None)
        made.append(consumer_of(subscription, Batches(1)))
        for kind in (EXCLUSIVE, FAILOVER):
            with pytest.raises(Refusal) as refused:
                subscription.check(SubscribeRequest(kind), 0)
            assert refused.value.code is ServerError.CONSUMER_BUSY
        made[0].dispatcher.leave(made[0])
        subscription.check(SubscribeRequest(FAILOVER), 0)

    play(act)


def test_those_are_asked_whether_they_are_there_because_of_which_another_is_not_active():
    async def act(made):
        partition, other = Batches(), Batches(number=1)
        alone, several = Subscription("s", EXCLUSIVE, None), Subscription("s", FAILOVER, None)
        assert alone.rivals(EXCLUSIVE, 0) == []
        one = consumer_of(alone, partition)
        first, second = consumer_of(several, partition, "a"), consumer_of(several, partition, "b")
        made += [one, first, second]
        assert alone.rivals(EXCLUSIVE, 0) == [one] == alone.rivals(FAILOVER, 1)
        assert alone.rivals(EXCLUSIVE, 1) == []
        assert several.rivals(FAILOVER, 0) == [first]
        assert several.rivals(EXCLUSIVE, 1) == [first, second]
        made.append(consumer_of(alone, other))

    play(act)


@pytest.mark.usefixtures("no_delay")
def test_of_failover_consumers_the_next_begins_at_the_mark():
    async def act(made):
        partition, subscription = Batches(1, 1, 1), Subscription("s", FAILOVER, None)
        first = consumer_of(subscription, partition, "a")
        second = consumer_of(subscription, partition, "b")
        made += [first, second]
        for one in made:
            one.dispatcher.flow(one, 100)
        await settle()
        assert [at for at, _ in first.link.messages] == [0, 1, 2]
        assert second.link.messages == []
        assert (first.link.active[-1], second.link.active[-1]) == (True, False)
        first.dispatcher.acks.add_up_to(2)
        first.dispatcher.leave(first)
        await settle()
        assert second.link.active[-1]
        assert [at for at, _ in second.link.messages] == [2]

    play(act)


def test_a_seek_of_one_partition_keeps_its_place_while_consumers_of_others_come_back():
    async def act(made):
        subscription = Subscription("s", EXCLUSIVE, None)
        partitions = [Batches(1, 1, 1, number=number) for number in range(3)]
        made += [consumer_of(subscription, partition) for partition in partitions]
        for one, offset in zip(made, (1, 2, 3), strict=True):
            one.dispatcher.seek(offset)
            one.dispatcher.leave(one)
        assert subscription.awaits_consumers
        back = [consumer_of(subscription, partition) for partition in partitions]
        assert [one.dispatcher.acks.mark for one in back] == [1, 2, 3]
        assert not subscription.awaits_consumers
        made += back
        for one in back:
            one.dispatcher.leave(one)
        again = consumer_of(subscription, partitions[1], mark=0)  # a reader begins where it asks
        assert again.dispatcher.acks.mark == 0
        made.append(again)

    play(act)


def test_messages_of_a_batch_that_were_removed_are_masked_and_acknowledged():
    async def act(made):
        partition = Batches(3, 3, 1)
        partition.start = 4
        one = consumer_of(Subscription("s", EXCLUSIVE, None), partition)
        made.append(one)
        one.dispatcher.flow(one, 100)
        await settle()
        assert one.link.messages == [(3, [0b110]), (6, [])]
        assert one.dispatcher.acks.mark == 4

    play(act)


def test_messages_that_were_taken_out_of_the_middle_are_passed_over():
    async def act(made):
        partition = Batches(3, 3, 2, 1)
        partition.holes = [(1, 2), (3, 6), (7, 8)]
        one = consumer_of(Subscription("s", EXCLUSIVE, None), partition)
        made.append(one)
        one.dispatcher.flow(one, 100)
        await settle()
        assert one.link.messages == [(0, [0b101]), (6, [0b01]), (8, [])]
        for offset in (0, 2, 6, 8):
            one.dispatcher.acks.add(offset, offset + 1)
        assert one.dispatcher.acks.mark == 9

    play(act)


def test_partitions_are_shared_out_among_the_consumers_of_the_best_priority():
    async def act(made):
        subscription, active = Subscription("s", FAILOVER, None), []
        for number in range(3):
            partition = Batches(number=number)
            some = [
                consumer_of(subscription, partition, name, priority)
                for name, priority in (("b", 0), ("a", 0), ("c", 1))
            ]
            made += some
            active.append(some[0].dispatcher.active.name)
        assert active == ["a", "b", "a"]

    play(act)


def test_the_newest_batches_are_kept_within_their_budget():
    each = BLOCK_OVERHEAD_BYTES + BATCH_OVERHEAD_BYTES
    tail, other = (lambda budget: (Tail(budget), Tail(budget)))(TailBudget(2 * each + 2500))
    for i in range(3):
        tail.add(2 * i, [2], [b"x" * 1000], True)
    assert [one.offset for one in tail.since(2, 10_000)] == [2, 4]
    assert tail.since(0, 1000) == []  # it was the oldest
    assert tail.since(3, 1000) == []  # no batch begins there
    other.add(0, [1], [b"y" * 2000], False)
    assert tail.since(4, 1000) == []
    assert len(other.since(0, 1)) == 1


@pytest.mark.parametrize("way", ["leave", "seek"])
def test_the_next_active_failover_consumer_waits_if_another_may_hold_messages(way, monkeypatch):
    monkeypatch.setattr(active_dispatcher, "FAILOVER_DELAY_S", 0.05)
    monkeypatch.setattr(active_dispatcher, "ANNOUNCE_S", 0.0)

    async def act(made):
        partition, subscription = Batches(1, 1), Subscription("s", FAILOVER, None)
        first = consumer_of(subscription, partition, "a")
        first.on_end = first.dispatcher.leave
        second = consumer_of(subscription, partition, "b")
        second.on_end = lambda _: None
        made.append(second)
        for one in (first, second):
            one.dispatcher.flow(one, 100)
        await settle()
        assert [at for at, _ in first.link.messages] == [0, 1], "no other was active before"
        if way == "leave":
            first.dispatcher.leave(first)
        else:
            first.dispatcher.seek(1)
        await settle()
        assert second.link.messages == []
        assert second.link.active[-1]
        await asyncio.sleep(0.06)
        await settle()
        assert [at for at, _ in second.link.messages] == ([0, 1] if way == "leave" else [1])

    play(act)


def test_the_next_active_failover_consumer_does_not_wait_if_everything_sent_is_acknowledged():
    async def act(made):
        partition, subscription = Batches(1, 1), Subscription("s", FAILOVER, None)
        first = consumer_of(subscription, partition, "a")
        second = consumer_of(subscription, partition, "b")
        made.append(second)
        for one in (first, second):
            one.dispatcher.flow(one, 100)
        await settle()
        first.dispatcher.acks.add_up_to(2)
        first.dispatcher.leave(first)
        partition.add(1)
        await settle()
        assert [at for at, _ in second.link.messages] == [2]

    play(act)
