"""Which consumer gets which rows of a shared subscription, beside plain sets and dictionaries."""

from collections import Counter, deque
from types import SimpleNamespace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from spark_ledger.broker.dispatch import sharing as rules
from spark_ledger.broker.dispatch.acks import Acks, BatchPart, PendingParts, ack_set, part_of
from spark_ledger.broker.dispatch.lone import acknowledge_lone, lone_run, share_lone
from spark_ledger.broker.dispatch.round_robin import TURN_PARTS_MAX, RoundRobin
from spark_ledger.broker.dispatch.sharing import (
    Sharing,
    UnackedLimits,
)
from spark_ledger.broker.log.tail import Stored
from spark_ledger.broker.wire.commands import MessageId, Refusal, command
from spark_ledger.topic.acks.sets import AckBudget, common, rows_in
from tests.kit.pulsar_batches import batch_of, lone, message
from tests.unit.spark_ledger.broker.shared_members import (
    NO_LIMITS,
    acknowledge,
    member,
    send,
    sharing_of,
)


class SharedSubscription(RuleBasedStateMachine):
    """Batches of one to five rows; consumers join, leave, and acknowledge as they like."""

    @initialize(
        sizes=st.lists(st.integers(1, 5), min_size=12, max_size=12),
        most=st.sampled_from([0, 3, 8]),
        most_of_all=st.sampled_from([0, 6, 20]),
    )
    def begin(self, sizes, most, most_of_all):
        self.most, self.most_of_all = most, most_of_all
        self.sharing = sharing_of(limits=UnackedLimits(most, most_of_all))
        self.sizes, at = {}, 0
        for size in sizes:
            self.sizes[at] = size
            at += size
        self.position, self.end = 0, at
        self.acked, self.waiting = set(), set()
        self.pending = {}  # row -> member
        self.counts = Counter()

    @property
    def members(self):
        return self.sharing.members

    def entry_of(self, row):
        return max(start for start in self.sizes if start <= row)

    def pending_of(self, member):
        return {row for row, owner in self.pending.items() if owner is member}

    @rule(priority=st.integers(0, 2), permits=st.integers(0, 9))
    def join(self, priority, permits):
        if len(self.members) < 4:
            self.sharing.join(member(priority=priority, permits=permits))

    @precondition(lambda self: self.members)
    @rule(data=st.data())
    def leave(self, data):
        leaving = data.draw(st.sampled_from(self.members))
        back = self.pending_of(leaving)
        self.sharing.leave(leaving)
        while self.sharing.work():
            pass
        for row in back:
            del self.pending[row]
        self.waiting |= back
        if not self.members:
            self.waiting.clear()
            self.counts.clear()
            self.position = self.sharing.acks.mark

    @precondition(lambda self: self.members)
    @rule(data=st.data(), permits=st.integers(1, 9))
    def flow(self, data, permits):
        self.sharing.flow(data.draw(st.sampled_from(self.members)), permits)

    @precondition(lambda self: self.members)
    @rule(data=st.data())
    def fill_or_empty_a_connection(self, data):
        room = data.draw(st.sampled_from(self.members)).has_room
        room.has_room = not room.has_room

    @precondition(lambda self: self.members)
    @rule()
    def send_one_batch(self):
        available = [one for one in self.members if one.is_available]
        replay = self.sharing.next_replay()
        if replay is not None:
            assert replay == min(self.waiting)
            start = self.entry_of(replay)
        elif self.sharing.may_read_on() and self.position < self.end:
            start = self.entry_of(self.position)
        else:
            unacked = sum(one.unacked for one in self.members)
            blocked = self.most_of_all and unacked >= self.most_of_all / 2
            assert not available or blocked or self.position >= self.end
            return
        size = self.sizes[start]
        if replay is None and not self.sharing.acks.missing(start, start + size):
            self.position = start + size
            return
        receiver = send(self.sharing, start, size)
        self.position = max(self.position, start + size)
        if receiver is None:
            assert self.members and not available
            return
        assert receiver in available
        assert receiver.priority == min(one.priority for one in available)
        for row in range(start, start + size):
            if row not in self.acked:
                assert row not in self.pending
                self.pending[row] = receiver
                self.waiting.discard(row)

    @precondition(lambda self: self.members and self.sharing.next_replay() is None)
    @rule()
    def share_a_run_of_lone_messages(self):
        offsets = []
        while self.sizes.get(self.position + len(offsets)) == 1:
            offsets.append(self.position + len(offsets))
        if not offsets or self.acked.intersection(offsets):
            return
        permits = {one: one.permits for one in self.members if one.is_available}
        turns = share_lone(self.sharing, offsets, [0] * len(offsets))
        for turn in turns:
            assert len(turn.offsets) <= permits[turn.member]
            permits[turn.member] -= len(turn.offsets)
            self.pending |= dict.fromkeys(turn.offsets, turn.member)
        assert [offset for turn in turns for offset in turn.offsets] == offsets[
            : sum(len(turn.offsets) for turn in turns)
        ]
        self.position += sum(len(turn.offsets) for turn in turns)
        if self.position <= offsets[-1]:
            assert not self.sharing.may_read_on()

    @precondition(lambda self: self.members and self.sharing.next_replay() is not None)
    @rule()
    def replay_a_run_of_lone_messages(self):
        first = end = self.sharing.next_replay()
        while self.sizes.get(end) == 1:
            end += 1
        offsets = list(self.sharing.choice.replays_in(first, end))
        assert offsets == sorted(self.waiting.intersection(range(first, end)))
        if offsets:
            for turn in share_lone(self.sharing, offsets, [0] * len(offsets)):
                self.pending |= dict.fromkeys(turn.offsets, turn.member)
                self.waiting.difference_update(turn.offsets)

    @precondition(lambda self: self.members)
    @rule(data=st.data())
    def acknowledge_lone_messages(self, data):
        asker = data.draw(st.sampled_from(self.members))
        rows = data.draw(st.lists(st.integers(0, self.end - 1), unique=True, max_size=30))
        ids = [MessageId(ledgerId=1, entryId=row) for row in rows]
        ack = command("ack", consumer_id=1, ack_type=0, message_id=ids).ack
        ids_left = acknowledge_lone(self.sharing, asker, ack, 1)
        lone = {row for row in rows if self.sizes.get(row) == 1}
        acked = lone & self.pending_of(asker)
        assert {message_id.entryId for message_id in ids_left} == set(rows) - acked
        self.acked |= acked
        for row in acked:
            del self.pending[row]
            self.counts.pop(row, None)

    @precondition(lambda self: self.members)
    @rule(data=st.data())
    def acknowledge(self, data):
        asker = data.draw(st.sampled_from(self.members))
        row = data.draw(st.integers(0, self.end - 1))
        start = self.entry_of(row)
        if start >= self.position:
            return
        size = self.sizes[start]
        how = data.draw(st.sampled_from(["whole", "index", "set"]))
        rows = set(range(start, start + size)) if how == "whole" else {row}
        fields = {}
        if how == "index":
            fields["batch_index"] = row - start
        elif how == "set":
            left = [(n, n + 1) for n in range(start, start + size) if n != row]
            words = ack_set(left, start, size) if left else [0]
            fields["ack_set"] = [word % 2**64 for word in words]
        if how != "index" and not self.was_sent(start):
            with pytest.raises(Refusal):
                acknowledge(self.sharing, asker, start, **fields)
        else:
            acknowledge(self.sharing, asker, start, **fields)
        acked = {n for n in range(start, start + size) if not self.missing(n)} - self.acked
        assert acked <= rows
        if self.was_sent(start):
            assert acked == rows - self.acked
        self.acked |= acked
        for row in self.acked:
            self.pending.pop(row, None)
        self.waiting -= self.acked
        if not any(self.missing(n) for n in range(start, start + size)):
            self.counts.pop(start, None)

    def was_sent(self, start):
        return self.sharing.sent.message_count(start) is not None

    def missing(self, row):
        return bool(self.sharing.acks.missing(row, row + 1))

    @precondition(lambda self: self.members)
    @rule(data=st.data(), everything=st.booleans())
    def redeliver(self, data, everything):
        asker = data.draw(st.sampled_from(self.members))
        entries = {self.entry_of(row) for row in self.pending_of(asker)}
        named = data.draw(st.lists(st.sampled_from(sorted(self.sizes)), unique=True))
        self.sharing.redeliver(asker, None if everything else named)
        while self.sharing.work():
            pass
        for entry in entries if everything else entries & set(named):
            self.counts[entry] += 1
            for row in range(entry, entry + self.sizes[entry]):
                if self.pending.get(row) is asker:
                    del self.pending[row]
                    self.waiting.add(row)

    @invariant()
    def rows_are_where_the_plain_sets_have_them(self):
        if not hasattr(self, "sharing"):
            return
        assert set(self.sharing.waiting) == self.waiting
        for consumer in self.members:
            rows = {
                row
                for part in consumer.pending.values()
                for lo, hi in part.ranges
                for row in range(lo, hi)
            }
            assert rows - self.acked == self.pending_of(consumer)
            assert consumer.unacked == len(self.pending_of(consumer))
            assert consumer.unacked == sum(part.unacked for part in consumer.pending.values())
            assert consumer.permits > -5
            assert not consumer.is_blocked or consumer.unacked > self.most // 2
            assert not consumer.kept_permits or consumer.is_blocked
        assert self.sharing.unacked.messages == len(self.pending)
        assert self.sharing.unacked.parts == sum(len(consumer.pending) for consumer in self.members)
        read = set(range(self.position)) - self.acked
        if self.members:
            assert read == set(self.pending) | self.waiting
        for entry in self.sizes:
            assert self.sharing.sent.redeliveries[entry] == self.counts[entry]


TestSharedSubscription = SharedSubscription.TestCase
TestSharedSubscription.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)


def test_consumers_get_turns_of_twenty_parts_or_of_what_their_permits_pay_for():
    few, many = member("few", permits=3), member("many", permits=100)
    sharing = sharing_of(few, many)
    receivers = [send(sharing, offset).name for offset in range(3 + TURN_PARTS_MAX + 1)]
    assert receivers == ["few"] * 3 + ["many"] * (TURN_PARTS_MAX + 1)
    few.permits = 100
    many.permits = 100
    turns = deque(maxlen=3)
    for offset in range(100, 160):
        name = send(sharing, offset).name
        if not turns or turns[-1][0] != name:
            turns.append([name, 0])
        turns[-1][1] += 1
    assert [count for _, count in list(turns)[:-1]] == [TURN_PARTS_MAX] * 2


def test_a_turn_ends_by_permits_that_batches_take():
    a, b = member("a", permits=100), member("b", permits=100)
    sharing = sharing_of(a, b)
    a.messages_per_part = b.messages_per_part = 40.0
    assert [send(sharing, 40 * n, 40).name for n in range(6)] == ["a", "a", "b", "b", "a", "b"]
    assert (a.permits, b.permits) == (-20, -20)


def test_a_lower_level_gets_parts_only_while_no_consumer_of_a_higher_one_is_available():
    low, high = member("low", 1, permits=5), member("high", 0, permits=2)
    sharing = sharing_of(low, high)
    assert [send(sharing, n).name for n in range(3)] == ["high", "high", "low"]
    sharing.flow(high, 1)
    assert [send(sharing, n).name for n in (3, 4)] == ["high", "low"]
    sharing.flow(high, 10)
    high.has_room.has_room = False
    assert send(sharing, 5).name == "low"


def test_permits_that_come_while_a_consumer_is_blocked_count_once_half_is_acknowledged():
    blocked = member(permits=3)
    sharing = sharing_of(blocked, limits=UnackedLimits(4, 0))
    for offset in range(0, 6, 2):
        send(sharing, offset, 2)
    assert (blocked.is_blocked, blocked.unacked) == (True, 4)
    sharing.flow(blocked, 10)
    assert blocked.permits == -1
    sharing.wakes.clear()
    acknowledge(sharing, blocked, 0, batch_index=1)
    assert not sharing.wakes
    acknowledge(sharing, blocked, 2, batch_index=0)
    assert (blocked.is_blocked, blocked.permits, blocked.unacked) == (False, 9, 2)
    assert sharing.wakes


def test_a_consumer_that_reached_a_limit_goes_on_at_its_next_acknowledgement_without_a_limit():
    blocked = member(permits=9)
    sharing = sharing_of(blocked, limits=UnackedLimits(3, 0))
    for offset in range(3):
        send(sharing, offset)
    sharing.unacked.limits = UnackedLimits(0, 0)
    acknowledge(sharing, blocked, 0)
    assert (blocked.is_blocked, blocked.unacked) == (False, 2)


def test_no_consumer_gets_more_while_the_subscription_has_its_limit_of_unacknowledged_messages():
    a, b = member("a", permits=9), member("b", permits=9)
    sharing = sharing_of(a, b, limits=UnackedLimits(0, 4))
    for offset in range(4):
        send(sharing, offset)
    assert not sharing.may_read_on()
    assert send(sharing, 4) is None
    acknowledge(sharing, b, 0)
    acknowledge(sharing, b, 1)
    assert not sharing.may_read_on()
    sharing.wakes.clear()
    acknowledge(sharing, b, 2)
    assert sharing.may_read_on()
    assert sharing.wakes


def test_a_leave_raises_no_count_and_a_request_for_redelivery_does():
    a, b = member("a", permits=9), member("b")
    sharing = sharing_of(a, b)
    send(sharing, 0)
    send(sharing, 1)
    sharing.redeliver(a, [1, 7])
    sharing.leave(a)
    assert [sharing.sent.redeliveries[offset] for offset in (0, 1, 7)] == [0, 1, 0]
    assert list(sharing.waiting) == [0, 1]
    sharing.redeliver(b, [0, 1])  # not pending there
    assert sharing.sent.redeliveries[1] == 1
    sharing.leave(b)
    assert (sharing.sent.redeliveries[1], list(sharing.waiting)) == (0, [])


def test_an_ack_through_another_consumer_frees_the_one_that_has_the_message():
    a, b = member("a", permits=1), member("b")
    sharing = sharing_of(a, b)
    send(sharing, 0)
    assert acknowledge(sharing, b, 0) == [True]
    assert (a.unacked, list(a.pending)) == (0, [])


def test_an_id_without_a_set_acknowledges_only_the_rows_of_a_masked_batch_that_were_sent():
    a, b = member("a", permits=9), member("b", permits=9)
    sharing = sharing_of(a, b)
    batch = SimpleNamespace(offset=0, messages=6, data=b"")
    part = part_of(batch, [(0, 6)], [(0, 2), (4, 6)])
    sharing.give(a, part, 4)
    acknowledge(sharing, a, 0)
    assert sharing.acks.missing(0, 6) == [(2, 4)]
    sharing.give(a, part, 4)
    sharing.redeliver(a, [0])
    with pytest.raises(Refusal):  # which rows it had is forgotten: no row is acknowledged
        acknowledge(sharing, a, 0)
    assert sharing.acks.missing(0, 6) == [(2, 4)]


def test_other_rows_of_a_batch_wait_while_the_consumer_has_some_of_it():
    a = member(permits=20)
    sharing = sharing_of(a)
    send(sharing, 0, 3)  # then the rows are stored anew, in a batch of six
    batch = SimpleNamespace(offset=0, messages=6, data=b"")
    part = part_of(batch, [(0, 6)], [(3, 6)])
    assert sharing.receiver_of(part) is None
    sharing.wait(part)
    assert sharing.may_read_on()
    acknowledge(sharing, a, 0)
    assert sharing.next_replay() == 3
    assert send(sharing, 0, 6) is a


def test_reading_on_ends_when_the_rows_that_wait_take_too_much_memory():
    a = member(permits=9)
    acks = Acks(0, budget=AckBudget(30_000))
    sharing = Sharing(acks, NO_LIMITS, RoundRobin(), lambda: None)
    sharing.join(a)
    rows = 0
    while sharing.may_read_on() and rows < 300_000:
        sharing.wait(BatchPart(rows, 1, [(rows, rows + 1)], 1))
        rows += 10
    assert 100_000 < rows < 300_000
    assert sharing.may_send_more()
    sharing.drop(0, rows)
    assert sharing.may_read_on()


def test_the_turn_of_a_consumer_ends_when_it_goes():
    a, b = member("a", permits=9), member("b", permits=9)
    sharing = sharing_of(a, b)
    assert send(sharing, 0) is a
    sharing.leave(a)
    assert send(sharing, 1) is b


def test_nothing_is_sent_beyond_the_most_parts_that_may_be_pending(monkeypatch):
    monkeypatch.setattr(rules, "PENDING_PARTS_MAX", 4)
    a = member(permits=99)
    sharing = sharing_of(a)
    assert [send(sharing, n) for n in range(5)] == [a] * 4 + [None]
    acknowledge(sharing, a, 0)
    assert not sharing.may_read_on()
    acknowledge(sharing, a, 1)
    assert sharing.may_read_on()


@pytest.mark.parametrize(
    ("ranges", "others", "both"),
    [
        ([(0, 9)], [(1, 2), (4, 12)], [(1, 2), (4, 9)]),
        ([(0, 2), (3, 5)], [(2, 3)], []),
        ([(0, 2), (3, 9)], [(1, 4), (8, 9)], [(1, 2), (3, 4), (8, 9)]),
    ],
)
def test_ranges_in_common(ranges, others, both):
    assert common(ranges, others) == both


def test_the_ranges_of_rows_between_two_offsets():
    rows = rules.BitMap64([1, 2, 3, 7, 9, 10])
    assert rows_in(rows, 0, 11) == [(1, 4), (7, 8), (9, 11)]
    assert rows_in(rows, 2, 10) == [(2, 4), (7, 8), (9, 10)]
    assert rows_in(rows, 4, 7) == []
    assert rows_in(rows, 1, 4) == [(1, 4)]


@given(
    st.dictionaries(
        st.integers(0, 30),
        st.tuples(
            st.integers(1, 3), st.booleans(), st.booleans(), st.sampled_from([(), (5,), (5, 6)])
        ),
    )
)
def test_pending_parts_are_what_was_put_there(parts):
    pending, plain = PendingParts(), {}
    for entry, (messages, is_masked, is_cut, slots) in parts.items():
        ranges = [(entry, entry + messages)]
        part = BatchPart(entry, messages, ranges, messages, is_masked, slots, is_cut)
        pending[entry] = plain[entry] = part
    assert list(pending) == list(plain)
    assert pending.values() == list(plain.values())
    for entry in range(31):
        assert pending.get(entry) == plain.get(entry)
        assert (entry in pending) == (entry in plain)
    for entry in list(plain)[::2]:
        del pending[entry]
    assert len(pending) == len(plain) // 2


def test_many_messages_in_chunks_leave_a_consumer_a_turn():
    a = member(permits=100_000)
    sharing = sharing_of(a)
    for offset in range(8_000):  # each chunk takes its permit by itself
        assert send(sharing, offset, permits=0) is a
        id_ = MessageId(ledgerId=1, entryId=offset)
        list(sharing.acknowledge(a, id_, offset, 8_000))


def test_the_receipt_of_a_batch_that_was_not_sent_is_refused_unless_its_size_is_known():
    a = member(permits=9)
    sharing = sharing_of(a)
    with pytest.raises(Refusal):
        acknowledge(sharing, a, 0)
    assert sharing.acks.mark == 1
    with pytest.raises(Refusal):
        acknowledge(sharing, a, 3, ack_set=ack_set([(3, 4)], 3, 5))
    acknowledge(sharing, a, 8, batch_index=1)
    known = Sharing(Acks(0), NO_LIMITS, RoundRobin(), lambda: None, {0: 5}.get)
    known.join(a)
    acknowledge(known, a, 0)
    assert known.acks.mark == 5


class Looked(Stored):
    """A lone message that counts how often a run looks at it."""

    looks = 0

    @property
    def data(self):
        Looked.looks += 1
        return self[2]


def test_a_run_of_lone_messages_ends_before_an_acknowledged_message_and_looks_no_further():
    data = lone(message(b"x"))
    batches = [Looked(offset, 1, data, False) for offset in range(300)]
    sharing = sharing_of(member(permits=1000))
    for acked in range(9, 300, 10):
        sharing.acks.add(acked, acked + 1)
    sharing.acks.pass_over(25, 27)
    Looked.looks, at, runs = 0, 0, []
    while at < len(batches):
        run = lone_run(batches, at, at, sharing)
        runs.append((at, len(run)))
        at += len(run) or 1
    assert runs[:5] == [(0, 9), (9, 0), (10, 9), (19, 0), (20, 5)]
    assert Looked.looks <= 300
    assert lone_run(batches, 18, 18, sharing) == [], "one message is no run"


def test_a_run_of_lone_messages_has_no_more_than_consumers_have_room_for():
    data = lone(message(b"x"))
    batches = [Looked(offset, 1, data, False) for offset in range(300)]
    full = member("full", permits=50)
    full.has_room.has_room = False
    sharing = sharing_of(member(permits=2), member("b", permits=9), full, limits=UnackedLimits(5))
    Looked.looks = 0
    assert len(lone_run(batches, 0, 0, sharing)) == 7
    assert Looked.looks == 7


def test_lone_messages_that_come_back_together_wait_unless_they_are_acknowledged_meanwhile():
    sharing = sharing_of(member(permits=9), member("b"), mark=2)
    (a, b) = sharing.members
    share_lone(sharing, list(range(2, 11)), [0] * 9)
    sharing.acks.add_up_to(4)  # not by a consumer
    sharing.acks.add(6, 7)
    sharing.acks.pass_over(8, 9)
    sharing.redeliver(a, [9, 5, 9, 77])
    assert sorted(sharing.waiting) == [5, 9]
    counts = sharing.sent.redeliveries
    assert (counts[9], counts[77], len(counts)) == (1, 0, 2)
    assert (a.unacked, sharing.unacked.messages, sharing.unacked.parts) == (7, 7, 7)
    sharing.leave(a)
    assert sorted(sharing.waiting) == [4, 5, 7, 9, 10]
    assert (a.unacked, sharing.unacked.messages, sharing.unacked.parts) == (0, 0, 0)
    assert len(sharing.sent.redeliveries) == 2, "a leave raises no count"
    b.permits = 9
    assert [send(sharing, row) for row in (4, 5, 7, 9, 10)] == [b] * 5
    sharing.acks.add_up_to(10)
    sharing.passed(10)
    assert (list(b.pending), sharing.unacked.parts, len(sharing.sent.redeliveries)) == ([10], 1, 0)


def test_no_consumer_is_looked_at_for_a_batch_that_begins_no_run():
    data = batch_of([message(b"x")] * 3)
    assert lone_run([Stored(0, 3, data, True)], 0, 0, None) == []
