"""Several consumers of one subscription, over scripted batches: each message to one of them."""

import asyncio
import logging
from collections import Counter

import pytest

from spark_ledger import errors
from spark_ledger.broker.dispatch import active_dispatcher, shared_dispatcher
from spark_ledger.broker.dispatch import dispatcher as dispatchers
from spark_ledger.broker.dispatch.dispatcher import Consumer
from spark_ledger.broker.dispatch.lone import FEW_BYTES, FEW_MESSAGES
from spark_ledger.broker.dispatch.shared_dispatcher import SharingRules
from spark_ledger.broker.dispatch.sharing import Sharing, UnackedLimits
from spark_ledger.broker.dispatch.subscriptions import Subscription
from spark_ledger.broker.log.partition import READ_BYTES
from spark_ledger.broker.log.tail import Stored
from spark_ledger.broker.wire.commands import AckType, MessageId
from spark_ledger.broker.wire.link import ClientFacts
from spark_ledger.topic.acks.sets import AckBudget
from tests.kit.pulsar_batches import chunked, whole_of
from tests.unit.spark_ledger.broker.consumers import (
    FAILOVER,
    LEDGER,
    SHARED,
    Batches,
    Losing,
    Wire,
    consumer_of,
    play,
    settle,
    until,
)


def subscription_of(*limits):
    return Subscription("s", SHARED, None, SharingRules(UnackedLimits(*(limits or (0, 0)))))


def joined(subscription, partition, *names, permits=100, priority=0):
    made = [consumer_of(subscription, partition, name, priority) for name in names]
    for consumer in made:
        consumer.dispatcher.flow(consumer, permits)
    return made


def offsets(consumer):
    return [at for at, _ in consumer.link.messages]


def acknowledge(consumer, offset, **fields):
    id_ = MessageId(ledgerId=LEDGER, entryId=offset, **fields)
    list(consumer.dispatcher.acknowledge(consumer, id_, AckType.INDIVIDUAL))


def test_each_message_goes_to_one_consumer_in_turns():
    async def act(made):
        partition = Batches(*[1] * 50)
        a, b = joined(subscription_of(), partition, "a", "b")
        made += [a, b]
        await settle()
        await until(lambda: len(offsets(a)) + len(offsets(b)) == 50)
        assert sorted(offsets(a) + offsets(b)) == list(range(50))
        assert offsets(a)[:6] == [0, 1, 4, 5, 8, 9]  # two batches are read together
        for count in range(4):  # messages that come one by one go round
            partition.add(1)
            await settle()
            assert len(offsets(a)) + len(offsets(b)) == 51 + count
        assert {len(offsets(a)), len(offsets(b))} <= {26, 27, 28}

    play(act)


def test_a_consumer_without_permits_and_one_with_a_full_connection_stop_no_other():
    async def act(made):
        partition, subscription = Batches(*[2] * 6), subscription_of()
        (none,) = joined(subscription, partition, "none", permits=0)
        (full,) = joined(subscription, partition, "full")
        full.link.open.clear()
        (reads,) = joined(subscription, partition, "reads", permits=5)
        made += [none, full, reads]
        await settle()
        assert offsets(reads) == [0, 2, 4]
        assert reads.permits == -1
        full.link.open.set()
        for listener in full.link.room_listeners.values():
            listener.set()
        await settle()
        assert offsets(full) == [6, 8, 10]

    play(act)


def test_messages_of_a_consumer_that_goes_come_to_another_before_new_ones_with_the_same_count():
    async def act(made):
        partition, subscription = Batches(1, 3, 1, 1, 1), subscription_of()
        (a,) = joined(subscription, partition, "a", permits=5)
        (b,) = joined(subscription, partition, "b", permits=0)
        made += [a, b]
        await settle()
        assert offsets(a) == [0, 1, 4]
        acknowledge(a, 0)
        acknowledge(a, 1, batch_index=1)
        a.dispatcher.leave(a)
        b.dispatcher.flow(b, 4)
        await settle()
        assert b.link.messages == [(1, [0b101]), (4, []), (5, [])]
        assert b.link.redeliveries == [0, 0, 0]

    play(act)


def test_what_a_consumer_asks_for_again_comes_with_its_count_the_oldest_first():
    async def act(made):
        partition, subscription = Batches(1, 1, 1, 1), subscription_of()
        (a,) = joined(subscription, partition, "a", permits=3)
        made.append(a)
        await settle()
        a.dispatcher.redeliver(a, None, [2, 0, 3])
        a.dispatcher.flow(a, 3)
        await settle()
        assert offsets(a) == [0, 1, 2, 0, 2, 3]
        assert a.link.redeliveries == [0, 0, 0, 1, 1, 0]
        acknowledge(a, 0)
        a.dispatcher.redeliver(a, None)
        a.dispatcher.flow(a, 9)
        await settle()
        assert list(zip(offsets(a), a.link.redeliveries, strict=True))[6:] == [
            (1, 1),
            (2, 2),
            (3, 1),
        ]

    play(act)


def test_the_last_consumer_goes_and_the_next_begins_at_the_mark_past_what_is_acknowledged():
    async def act(made):
        partition, subscription = Batches(1, 1, 1, 1), subscription_of()
        (a,) = joined(subscription, partition, "a", permits=3)
        await settle()
        a.dispatcher.redeliver(a, None, [2])
        acknowledge(a, 0)
        acknowledge(a, 1)
        dispatcher = a.dispatcher
        dispatcher.leave(a)
        b = Consumer(Wire(), 1, "b", 0, dispatcher, lambda _: None)
        dispatcher.join(b)
        dispatcher.flow(b, 100)
        made.append(b)
        await settle()
        assert offsets(b) == [2, 3]
        assert b.link.redeliveries == [0, 0]

    play(act)


def test_a_seek_forgets_what_was_sent_and_acknowledged():
    async def act(made):
        partition, subscription = Batches(1, 1, 1, 1), subscription_of()
        (a,) = joined(subscription, partition, "a", permits=3)
        a.on_end = a.dispatcher.leave
        await settle()
        acknowledge(a, 0)
        acknowledge(a, 2)
        a.dispatcher.seek(1)
        (b,) = joined(subscription, partition, "b")
        made.append(b)
        await settle()
        assert offsets(b) == [1, 2, 3]
        assert b.dispatcher.acks.mark == 1

    play(act)


def test_a_cumulative_ack_is_logged_and_counts_for_nothing(caplog):
    async def act(made):
        (a,) = joined(subscription_of(), Batches(1, 1, 1), "a")
        made.append(a)
        await settle()
        id_ = MessageId(ledgerId=LEDGER, entryId=2)
        assert list(a.dispatcher.acknowledge(a, id_, AckType.CUMULATIVE)) == [False]
        assert a.dispatcher.acks.mark == 0
        assert "counts for nothing" in caplog.text

    with caplog.at_level(logging.WARNING):
        play(act)


def test_a_message_in_chunks_goes_to_one_consumer_and_stops_no_other():
    async def act(made):
        partition = Batches()
        partition.stored.append(Stored(0, 1, whole_of(chunked(b"abc", 3)), False))
        partition.end = 1
        for _ in range(25):
            partition.add(1)
        subscription = subscription_of()
        (a,) = joined(subscription, partition, "a")
        send = a.link.send

        def send_and_fill(frame):
            send(frame)
            a.link.open.clear()

        a.link.send = send_and_fill
        await settle()
        assert offsets(a) == [0]
        (b,) = joined(subscription, partition, "b")
        made += [a, b]
        await until(lambda: len(offsets(b)) == 25)
        a.link.send = send
        a.link.open.set()
        await settle()
        assert offsets(a) == [0, 0, 0]
        assert a.permits == 97

    play(act)


def test_a_consumer_that_goes_in_the_middle_of_a_message_leaves_all_its_chunks_to_another():
    async def act(made):
        partition = Batches()
        partition.stored.append(Stored(0, 1, whole_of(chunked(b"abc", 3)), False))
        partition.end = 1
        subscription = subscription_of()
        (a,) = joined(subscription, partition, "a")
        (b,) = joined(subscription, partition, "b")
        made.append(b)
        send = a.link.send

        def send_and_fill(frame):
            send(frame)
            a.link.open.clear()

        a.link.send = send_and_fill
        await settle()
        a.dispatcher.leave(a)
        await settle()
        assert offsets(a) == [0]
        assert offsets(b) == [0, 0, 0]

    play(act)


def test_a_message_of_which_a_chunk_cannot_be_sent_comes_again(monkeypatch):
    monkeypatch.setattr(dispatchers, "RETRY_S", 0.001)

    async def act(made):
        partition = Batches()
        partition.stored.append(Stored(0, 1, whole_of(chunked(b"abc", 3)), False))
        partition.end = 1
        (a,) = joined(subscription_of(), partition, "a")
        made.append(a)
        send, failures = a.link.send, [errors.Unavailable("for a while")]

        def send_or_fail(frame):
            if failures and offsets(a) == [0]:
                raise failures.pop()
            send(frame)

        a.link.send = send_or_fail
        await until(lambda: offsets(a) == [0] * 4)
        assert list(a.pending) == [0] and not a.is_busy

    play(act)


def test_no_new_rows_are_read_for_want_of_memory_while_rows_that_wait_are_sent(monkeypatch):
    full = [False]
    monkeypatch.setattr(Sharing, "is_full", property(lambda _: full[0]))
    monkeypatch.setattr(shared_dispatcher, "MEMORY_WAIT_S", 0.001)

    async def act(made):
        partition = Batches(1)
        (a,) = joined(subscription_of(), partition, "a")
        made.append(a)
        await until(lambda: offsets(a) == [0])
        full[0] = True
        partition.add(1)
        await until(lambda: a.dispatcher.pause.reason == "acknowledged")
        a.dispatcher.redeliver(a, None)
        await until(lambda: offsets(a) == [0, 0])
        full[0] = False
        await until(lambda: offsets(a) == [0, 0, 1])
        assert a.dispatcher.pause.reason == ""

    play(act)


def test_rows_that_were_trimmed_while_they_waited_are_not_sent_and_need_no_acknowledgement():
    async def act(made):
        partition, subscription = Batches(1, 1, 2, 1), subscription_of()
        (a,) = joined(subscription, partition, "a", permits=4)
        made.append(a)
        await settle()
        assert offsets(a) == [0, 1, 2]
        a.dispatcher.redeliver(a, None)
        partition.start = 3
        a.dispatcher.flow(a, 100)
        await settle()
        assert a.link.messages[3:] == [(2, [0b10]), (4, [])]
        acknowledge(a, 2)
        acknowledge(a, 4)
        assert a.dispatcher.acks.mark == 5
        assert not a.dispatcher.sharing.waiting

    play(act)


@pytest.mark.parametrize("skips", [False, True])
def test_at_lost_rows_consumers_wait_or_pass_over_them_by_the_policy(skips, monkeypatch):
    monkeypatch.setattr(dispatchers, "RETRY_S", 0.001)
    monkeypatch.setattr(dispatchers, "LOST_RETRY_S", 0.002)

    async def act(made):
        partition = Losing(1, 1, 1, 1, why=errors.RowsLost("they are gone", rows=1))
        partition.skips = skips
        (a,) = joined(subscription_of(), partition, "a", permits=3)
        made.append(a)
        await settle()
        assert offsets(a) == [0, 1, 2]
        partition.gone = [1, 2]
        a.dispatcher.redeliver(a, None)
        a.dispatcher.flow(a, 100)
        await until(lambda: partition.reads > 12 or skips)
        await settle()
        assert offsets(a)[3:] == ([0, 3] if skips else [0])
        partition.gone = []
        await until(lambda: skips or len(offsets(a)) == 7)
        assert offsets(a)[4:] == ([3] if skips else [1, 2, 3])
        if skips:
            acknowledge(a, 0)
            acknowledge(a, 3)
            assert a.dispatcher.acks.mark == 4
            assert not a.dispatcher.sharing.waiting

    play(act)


def test_a_consumer_at_its_limit_gets_more_once_half_is_acknowledged():
    async def act(made):
        partition, subscription = Batches(*[1] * 12), subscription_of(4, 6)
        a, b = joined(subscription, partition, "a", "b", permits=50)
        made += [a, b]
        await settle()
        assert len(offsets(a)) == 4
        assert len(offsets(b)) == 2  # the subscription's limit
        for offset in (0, 1):
            acknowledge(b, offset)  # pending at a: any consumer may acknowledge
        await settle()
        assert len(offsets(b)) == 2
        for offset in (2, 3):
            acknowledge(b, offset)
        await settle()
        assert len(offsets(a) + offsets(b)) == 10

    play(act)


def test_nothing_is_left_of_a_consumer_that_goes():
    async def act(made):
        partition = Batches(1, 1)
        (a,) = joined(subscription_of(), partition, "a")
        await settle()
        dispatcher = a.dispatcher
        dispatcher.leave(a)
        await settle()
        assert not a.link.room_listeners
        assert not partition.listeners
        assert dispatcher._sending.done()
        assert not dispatcher.sharing.members
        assert not dispatcher.sharing.unacked.messages

    play(act)


def test_a_rewind_while_a_read_waits_sends_nothing_of_that_read():
    async def act(made):
        partition = Batches(1, 1, 1)
        opened, read = asyncio.Event(), partition.read

        async def slow(*args, **kwargs):
            batches = await read(*args, **kwargs)
            await opened.wait()
            return batches

        partition.read = slow
        (a,) = joined(subscription_of(), partition, "a")
        a.on_end = a.dispatcher.leave
        await settle()
        a.dispatcher.seek(2)
        (b,) = joined(subscription_of(), partition, "unused")  # another subscription
        c = consumer_of(subscription_of(), partition, "c", mark=2)
        made += [b, c]
        opened.set()
        await settle()
        assert offsets(a) == []

    play(act)


def test_rows_that_expire_are_neither_pending_nor_sent_again():
    async def act(made):
        partition, subscription = Batches(1, 1, 1, 1), subscription_of(2, 0)
        a, b = joined(subscription, partition, "a", "b", permits=2)
        made += [a, b]
        await settle()
        assert (offsets(a), offsets(b)) == ([0, 1], [2, 3])
        a.dispatcher.redeliver(a, None, [1])
        a.dispatcher.move_up(3)
        assert (a.unacked, b.unacked, list(a.dispatcher.sharing.waiting)) == (0, 1, [])
        partition.add(1)
        a.dispatcher.flow(a, 5)
        await settle()
        assert offsets(a) == [0, 1, 4]

    play(act)


def test_new_messages_wait_while_the_acknowledged_sets_take_too_much(monkeypatch, caplog):
    monkeypatch.setattr(shared_dispatcher, "MEMORY_WAIT_S", 0.01)

    async def act(made):
        partition, subscription = Batches(1, 1), subscription_of()
        (a,) = joined(subscription, partition, "a", permits=0)
        made.append(a)
        may_send = []
        a.dispatcher.acks.may_send = lambda offset: offset in may_send
        a.dispatcher.flow(a, 9)
        await settle()
        assert offsets(a) == []
        assert a.dispatcher.pause.reason == "acknowledged"
        assert caplog.text.count("pauses at offset 0: its acknowledged messages take") == 1
        may_send += [0, 1]
        await until(lambda: offsets(a) == [0, 1])
        await until(lambda: a.dispatcher.pause.reason == "")

    play(act)


def scattered(dispatcher, until):
    """Acknowledge every 40th message from the fourth on."""
    for offset in range(3, until, 40):
        dispatcher.acks.add(offset, offset + 1)
    dispatcher.acks.memory.measure()


@pytest.mark.parametrize("kind", [SHARED, FAILOVER])
def test_a_subscription_over_its_budget_pauses_is_shown_takes_acknowledgements_and_goes_on(
    kind, monkeypatch, caplog
):
    for module in (shared_dispatcher, active_dispatcher):
        monkeypatch.setattr(module, "MEMORY_WAIT_S", 0.001)

    async def act(made):
        partition = Batches(*[1] * 2)
        rules = SharingRules(UnackedLimits(0, 0), ack_bytes_max=20_000)
        subscription = Subscription("s", kind, None, rules)
        (a,) = joined(subscription, partition, "a")
        made.append(a)
        dispatcher = a.dispatcher
        await until(lambda: offsets(a) == [0, 1])
        assert dispatcher.pause.reason == ""
        scattered(dispatcher, 1_000_000)
        dispatcher.position = dispatcher.acks.end
        partition.stored = [Stored(dispatcher.position, 1, partition.stored[0].data, False)]
        partition.end = dispatcher.position + 1
        for listener in partition.listeners:
            listener.set()
        await until(lambda: caplog.records)
        assert dispatcher.pause.reason == "acknowledged" and offsets(a) == [0, 1]
        for _ in range(5):
            await asyncio.sleep(0.005)
        assert len(caplog.records) == 1, "at most one line in a minute"
        acknowledge(a, 1)
        assert dispatcher.acks.missing(0, 2) == [(0, 1)], "an acknowledgement is taken"
        dispatcher.acks.add(0, dispatcher.position)
        await until(lambda: len(offsets(a)) == 3)
        assert dispatcher.pause.reason == ""

    with caplog.at_level(logging.WARNING):
        play(act)


def test_sets_of_readers_and_all_sets_of_a_subscription_count_and_go_with_it():
    async def act(made):
        whole = AckBudget(1 << 30)
        rules = SharingRules(UnackedLimits(0, 0), ack_budget=whole)
        for kind in (SHARED, FAILOVER):
            partition = Batches(*[1] * 4)
            subscription = Subscription("reader", kind, None, rules)
            (a,) = joined(subscription, partition, "a")
            made.append(a)
            await until(lambda a=a: len(offsets(a)) == 4)
            before = whole.bytes
            scattered(a.dispatcher, 1_000_000)
            assert whole.bytes > before
            if kind is SHARED:
                sharing, held = a.dispatcher.sharing, a.dispatcher.held
                sizes = [whole.bytes]
                for rows in (sharing.waiting, sharing.sent.masked, held.rows, held.due):
                    rows.add(700_000)
                    sharing.memory.measure()
                    held.memory.measure()
                    sizes.append(whole.bytes)
                sharing.sent.redeliveries.add(700_000)
                sharing.memory.measure()
                assert sizes == sorted(set(sizes)) and whole.bytes > sizes[-1]
            subscription.drop()
            assert whole.bytes == 0

    play(act)


@pytest.mark.parametrize("kind", [SHARED, FAILOVER])
def test_consumers_learn_once_that_a_terminated_topic_has_no_more_for_them_but_those_of_cpp(kind):
    async def act(made):
        partition, subscription = Batches(1, 1), Subscription("s", kind, None)
        a, b, of_cpp = joined(subscription, partition, "a", "b", "c")
        of_cpp.client = ClientFacts(of_cpp.link, "Pulsar-CPP-v4.2.0 ")
        late = consumer_of(subscription, partition, "late")
        made += [a, b, of_cpp, late]
        await settle()
        partition.is_terminated = True
        for listener in partition.listeners:
            listener.set()
        acknowledge(a, 0)
        a.dispatcher.save_position()
        await settle()
        assert (a.link.ends, b.link.ends) == (0, 0)
        acknowledge(a, 1)
        a.dispatcher.save_position()
        await settle()
        assert (a.link.ends, b.link.ends, late.link.ends) == (1, 1, 0)
        late.dispatcher.flow(late, 1)
        await settle()
        assert (a.link.ends, b.link.ends, late.link.ends, of_cpp.link.ends) == (1, 1, 1, 0)

    play(act)


class Many(Batches):
    """A partition that reads a thousand batches together."""

    async def read(self, offset, bytes_max=None, *, lossy=False):
        return [batch for batch in self.stored if batch.end > offset][:1000]


def test_batches_are_sent_and_sent_again_in_bounded_steps():
    async def act(made):
        partition, turns = Many(*[2] * 1000), [0]
        a, b = joined(subscription_of(), partition, "a", "b", permits=10_000)
        made += [a, b]
        sent = []
        for consumer in made:
            plain = consumer.link.send
            consumer.link.send = lambda frame, send=plain: sent.append(turns[0]) or send(frame)
        for count in (1000, 2000):
            async with asyncio.timeout(30):
                while len(sent) < count:
                    await asyncio.sleep(0)
                    turns[0] += 1
            for consumer in made:
                consumer.dispatcher.redeliver(consumer, None)
        assert max(Counter(sent).values()) <= shared_dispatcher.STEP_SENDS_MAX

    play(act)


def test_for_few_messages_few_bytes_are_read():
    async def act(made):
        partition, sizes = Batches(*[1] * 9), []

        async def read(offset, bytes_max=None, **how):
            sizes.append(bytes_max)
            return await Batches.read(partition, offset, bytes_max, **how)

        partition.read = read
        (a,) = joined(subscription_of(), partition, "a", permits=1)
        made.append(a)
        await settle()
        assert offsets(a) == [0]
        a.dispatcher.flow(a, FEW_MESSAGES + 1)
        await settle()
        assert offsets(a) == list(range(9))
        assert (sizes[0], max(sizes)) == (FEW_BYTES, READ_BYTES)

    play(act)
