"""A consumer of a Key_Shared subscription that takes nothing stops no other consumer; when it takes
messages again, it gets all of its own, in the order of each key."""

import asyncio
from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pyroaring import BitMap64

from spark_ledger.broker.dispatch import slot_owners
from spark_ledger.broker.dispatch.dispatcher import Consumer
from spark_ledger.broker.dispatch.key_slots import slot_of
from spark_ledger.broker.dispatch.lone import acknowledge_lone
from spark_ledger.broker.dispatch.slot_owners import EvenSlots, WaitingBySlot
from spark_ledger.broker.dispatch.subscriptions import Subscription
from spark_ledger.broker.log.tail import Stored
from spark_ledger.broker.wire.commands import AckType, SubscriptionType, command
from spark_ledger.broker.wire.frames import PulsarFrameReader
from spark_ledger.topic.entry.pulsar_batch import build_batch
from spark_ledger.topic.entry.pulsar_message_pb2 import MessageMetadata
from tests.kit.pulsar_batches import lone, message
from tests.unit.spark_ledger.broker.consumers import (
    LEDGER,
    Batches,
    play,
    settle,
    until,
)

KEY_SHARED = SubscriptionType.KEY_SHARED
KEYS = [f"key {i}" for i in range(64)]
READ_BATCHES = 1_000


class Keyed(Batches):
    """A partition with the keys in turns, a message or a batch for each; it counts reads."""

    def __init__(self, batches, messages):
        super().__init__()
        data = [self._data(key, messages) for key in KEYS]
        self.messages, self.reads = messages, Counter()
        self.stored = [
            Stored(at * messages, messages, data[at % len(data)], messages > 1)
            for at in range(batches)
        ]
        self.end = batches * messages

    def _data(self, key, messages):
        if messages == 1:
            return lone(message(b"x", key=key))
        metadata = MessageMetadata(partition_key=key, num_messages_in_batch=messages)
        return build_batch(metadata, b"")

    async def read(self, offset, bytes_max=None, *, lossy=False):
        at = offset // self.messages
        self.reads[at] += 1
        return self.stored[at : at + (READ_BATCHES if bytes_max > 1 else 1)]


class Taking:
    """The connection of a consumer that acknowledges each message a little later."""

    def __init__(self):
        self.offsets, self.unacked = [], []
        self.has_room, self.room_listeners = asyncio.Event(), {}
        self.has_room.set()
        self.reader = PulsarFrameReader()

    def send(self, frames):
        for got in self.reader.feed(frames):
            self.offsets.append(got.command.message.message_id.entryId)
            self.unacked.append(got.command.message.message_id)

    async def room(self):
        await self.has_room.wait()


def taking(subscription, partition, name):
    dispatcher = subscription.dispatcher(partition, 0)
    consumer = Consumer(Taking(), 1, name, 0, dispatcher, lambda consumer: None)
    dispatcher.join(consumer)
    return consumer


def turn(consumer):
    """Acknowledge what came, and take as much again."""
    ids, consumer.link.unacked = consumer.link.unacked, []
    dispatcher, sharing = consumer.dispatcher, consumer.dispatcher.sharing
    before = consumer.unacked
    ack = command("ack", consumer_id=1, ack_type=0, message_id=ids).ack
    for id_ in acknowledge_lone(sharing, consumer, ack, LEDGER):
        list(dispatcher.acknowledge(consumer, id_, AckType.INDIVIDUAL))
    dispatcher.flow(consumer, before - consumer.unacked)


@pytest.mark.parametrize("messages", [1, 5])
def test_three_consumers_get_all_of_their_rows_while_the_fourth_takes_none_and_then_it_gets_its_own(
    messages,
):
    batches = 88_000 if messages == 1 else 5_000

    async def act(made):
        partition, subscription = Keyed(batches, messages), Subscription("s", KEY_SHARED, None)
        consumers = [taking(subscription, partition, name) for name in "abcd"]
        made += consumers
        *others, still = consumers
        dispatcher = still.dispatcher
        slots = EvenSlots()
        for consumer in consumers:
            slots.join(consumer)
        owners = [slots.owner_of(slot_of(key.encode())) for key in KEYS]
        expected = {consumer: [] for consumer in consumers}
        for at in range(batches):
            expected[owners[at % len(KEYS)]].append(at * messages)
        assert min(map(len, expected.values())) > 0
        for consumer in others:
            dispatcher.flow(consumer, 1_000)
        while any(len(c.link.offsets) < len(expected[c]) for c in others):
            await asyncio.sleep(0)
            for consumer in others:
                turn(consumer)
        assert [c.link.offsets for c in consumers] == [
            *(expected[consumer] for consumer in others),
            [],
        ]
        assert messages > 1 or sum(len(c.link.offsets) for c in others) > 60_000
        dispatcher.flow(still, 1_000)
        partition.reads.clear()
        while len(still.link.offsets) < len(expected[still]):
            await asyncio.sleep(0)
            turn(still)
        assert still.link.offsets == expected[still]
        turn(still)
        assert dispatcher.acks.mark == partition.end
        assert max(partition.reads.values()) <= 3, partition.reads.most_common(5)

    play(act)


def test_others_get_new_rows_while_a_consumer_catches_up():
    async def act(made):
        partition, subscription = Keyed(9_000, 1), Subscription("s", KEY_SHARED, None)
        still, other = (taking(subscription, partition, name) for name in "ab")
        made += [still, other]
        other.dispatcher.flow(other, 100)
        while other.dispatcher.position < 6_000:
            await asyncio.sleep(0)
            turn(other)
        got = len(other.link.offsets)
        still.dispatcher.flow(still, 10_000)
        while len(still.link.offsets) < 2_000:
            await asyncio.sleep(0)
            turn(other)
        assert len(other.link.offsets) > got

    play(act)


def test_no_rows_are_read_on_while_no_consumer_can_take_any():
    async def act(made):
        partition, subscription = Keyed(50_000, 1), Subscription("s", KEY_SHARED, None)
        consumers = [taking(subscription, partition, name) for name in "abcd"]
        made += consumers
        dispatcher = consumers[0].dispatcher
        for consumer in consumers:
            dispatcher.flow(consumer, 10)
        await until(lambda: not any(consumer.permits for consumer in consumers))
        for _ in range(10):
            await settle()
        assert dispatcher.position < 2 * READ_BATCHES
        assert len(dispatcher.sharing.waiting) < 2 * READ_BATCHES

    play(act)


@settings(max_examples=150, deadline=None)
@given(
    st.lists(
        st.tuples(
            st.sampled_from(["waits", "waits", "goes"]),
            st.integers(0, 2),
            st.integers(0, 60),
            st.integers(1, 9),
        )
    )
)
def test_the_waiting_rows_of_a_slot_are_those_of_plain_sets(steps):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(slot_owners, "LIST_ROWS_MAX", 5)
        patch.setattr(slot_owners, "RUN_ROWS_MAX", 3)
        patch.setattr(slot_owners, "LIST_SPAN", 45)
        waiting, slots = BitMap64(), {}
        by_slot = WaitingBySlot(waiting)
        plain = {slot: set() for slot in range(3)}
        for step, slot, lo, rows in steps:
            hi = lo + rows
            if step == "goes":
                waiting.remove_range(lo, hi)
                for of_slot in plain.values():
                    of_slot -= set(range(lo, hi))
            else:  # a row is of one slot for ever
                run = [row for row in range(lo, hi) if slots.setdefault(row, slot) == slot]
                for row in run if len(run) < rows else ():
                    waiting.add(row)
                    by_slot.add(slot, row, row + 1)
                if len(run) == rows:
                    waiting.add_range(lo, hi)
                    by_slot.add(slot, lo, hi)
                plain[slot] |= set(run)
            for of_slot, of_plain in plain.items():
                assert by_slot.first(of_slot) == min(of_plain, default=None)
                assert (of_slot in by_slot) == bool(of_plain)
                if of_plain:
                    assert set(by_slot.rows(of_slot) & waiting) == of_plain
            assert set(by_slot) == {of_slot for of_slot in plain if plain[of_slot]}
        waiting.clear()
        assert [by_slot.first(of_slot) for of_slot in plain] == [None] * 3
        assert by_slot.bytes in (0, slot_owners.SLOTS_BYTES)
