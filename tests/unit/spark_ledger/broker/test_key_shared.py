"""Which consumer gets which keys: slots of keys, their owners, and the order of each key, beside
plain sets."""

from collections import Counter
from types import SimpleNamespace

import mmh3
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule
from pyroaring import BitMap64

from spark_ledger.broker.dispatch import key_shared
from spark_ledger.broker.dispatch import sharing as sharing_rules
from spark_ledger.broker.dispatch.acks import Acks, BatchPart
from spark_ledger.broker.dispatch.key_shared import KeyChoice
from spark_ledger.broker.dispatch.key_slots import (
    KEPT_ROWS_MAX,
    SLOTS,
    KeyedBatches,
    key_of,
    keyed_by,
    slot_of,
    slots_of,
)
from spark_ledger.broker.dispatch.lone import acknowledge_lone, replay_run, share_lone
from spark_ledger.broker.dispatch.sharing import Member, Sharing, UnackedLimits
from spark_ledger.broker.dispatch.slot_owners import (
    LIST_ROWS_MAX,
    ROW_BYTES,
    SLOTS_BYTES,
    EvenSlots,
    StickyRanges,
    check_ranges,
)
from spark_ledger.broker.log.tail import Stored
from spark_ledger.broker.wire.commands import MessageId, Refusal, ServerError, command
from spark_ledger.topic.acks.sets import rows_in
from spark_ledger.topic.entry import pulsar_batch
from spark_ledger.topic.entry.message_batch import TYPES
from spark_ledger.topic.entry.pulsar_columns import decode_batches
from spark_ledger.topic.entry.pulsar_message_pb2 import MessageMetadata
from tests.kit.pulsar_batches import lone, message

LONE = lone(message(b""))

# -- slots -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("key", "hashed"),
    [
        (b"", 0),
        (b"test", 0xBA6BD213),
        (b"Hello, world!", 0xC0363E43),
        (b"\xff\xff\xff\xff", 0x76293B50),
    ],
)
def test_a_slot_is_the_murmur_hash_of_the_key(key, hashed):
    assert mmh3.hash(key, 0, False) == hashed
    assert slot_of(key) == (hashed & 0x7FFFFFFF) % SLOTS or slot_of(key) == 1


@pytest.mark.parametrize(
    ("fields", "key"),
    [
        ({"ordering_key": b"o", "partition_key": "p"}, b"o"),
        ({"partition_key": "ü"}, "ü".encode()),
        ({"partition_key": "AP8=", "partition_key_b64_encoded": True}, b"\x00\xff"),
        ({"partition_key": "?", "partition_key_b64_encoded": True}, b"?"),
        ({"producer_name": "p", "sequence_id": 7}, b"p-7"),
        ({}, b"NONE_KEY"),
    ],
)
def test_the_key_of_a_clients_batch_is_the_one_that_pulsar_takes(fields, key):
    assert key_of(MessageMetadata(**fields)) == key


def of_spark(keys):
    """A batch of Spark's rows with these keys, as consumers get it."""
    rows = pa.RecordBatch.from_arrays(
        [
            pa.array([keys[i] if n == "key" else None for i in range(len(keys))], TYPES[n])
            for n in TYPES
        ],
        names=list(TYPES),
    )
    (made,) = [e for e in pulsar_batch.encode_rows([rows], [5] * len(keys), 100) if e is not None]
    return Stored(100, made.rows, made.data, made.batched)


def test_each_row_of_spark_has_the_slot_of_its_key_and_rows_without_one_are_spread():
    keys = [b"a", None, b"\xff\x00", b"a", None]
    slots = slots_of(of_spark(keys))
    assert [slots[0], slots[2], slots[3]] == [slot_of(b"a"), slot_of(b"\xff\x00"), slot_of(b"a")]
    assert slots[1] != slots[4]
    assert slots == slots_of(of_spark(keys))
    in_blocks = slots_of(of_spark([None] * 800))
    assert len(set(in_blocks)) > 100
    assert in_blocks[4:12] == in_blocks[4:5] * 8
    quarters = Counter(slot // 16_384 for slot in in_blocks)
    assert all(180 <= count <= 220 for count in quarters.values())


@pytest.mark.parametrize("count", [3, 300])
def test_a_batch_that_is_cut_out_has_the_bytes_of_its_messages(count):
    keys = [f"key {i}".encode() if i % 7 else None for i in range(count)]
    batch, batches = of_spark(keys), KeyedBatches()
    whole = pulsar_batch.parse(batch.data)
    for at, size in [(0, 1), (1, 2), (count - 1, 1), (0, count)]:
        parsed = pulsar_batch.parse(batches.cut(batch, 100 + at, size), check=True)
        assert parsed.messages == size and parsed.batched
        assert parsed.metadata.publish_time == whole.metadata.publish_time
        assert parsed.metadata.sequence_id == 100 + at
        assert parsed.last_sequence_id == 100 + at + size - 1
        rows, every = decode_batches([parsed]), decode_batches([whole]).slice(at, size).to_pylist()
        shown = {name: None for name in every[0]}
        assert [shown | row for row in rows.to_pylist()] == every


def test_only_the_last_batches_are_kept_by_rows():
    batches = KeyedBatches(lambda batch: keyed_by(range(batch.messages)))
    for offset in range(0, 300_000, 1000):
        batches.of(Stored(offset, 1000, b"x", True))
    assert batches.rows == KEPT_ROWS_MAX


def test_a_batch_of_a_client_has_one_slot_and_a_damaged_one_too():
    metadata = MessageMetadata(producer_name="p", partition_key="k", num_messages_in_batch=3)
    batch = Stored(0, 3, pulsar_batch.build_batch(metadata, b""), True)
    assert slots_of(batch) == (slot_of(b"k"),)
    assert len(slots_of(Stored(0, 3, b"\x0e\x01damaged", True))) == 1


# -- owners ----------------------------------------------------------------------------------------


@given(st.lists(st.integers(0, 4), max_size=8))
@settings(deadline=None, max_examples=20)
def test_every_slot_has_an_owner_all_have_as_many_and_few_move(steps):
    owners, members = EvenSlots(), []
    before = [None] * SLOTS
    for step in steps:
        joins = step not in members
        if joins:
            owners.join(step)
            members.append(step)
        else:
            members.remove(step)
            owners.leave(step)
        now = [owners.owner_of(slot) for slot in range(SLOTS)]
        counts = Counter(now)
        if members:
            assert set(counts) == set(members)
            assert max(counts.values()) - min(counts.values()) <= 1
        else:
            assert set(counts) == {None}
        for old, new in zip(before, now, strict=True):
            if old != new:
                assert new == step if joins else old == step
        before = now


@given(
    st.lists(st.lists(st.tuples(st.integers(-2, 70), st.integers(0, 70)), max_size=2), max_size=4)
)
def test_sticky_ranges_never_overlap_and_slots_outside_have_no_owner(ranges_of):
    owners, taken, members = StickyRanges(), {}, []
    for ranges in ranges_of:
        covered = [slot for lo, hi in ranges for slot in range(lo, hi + 1)]
        valid = ranges and all(0 <= lo <= hi for lo, hi in ranges)
        others = [of_other for member in members for of_other in member.ranges]
        if valid and len(set(covered)) == len(covered) and not taken.keys() & set(covered):
            check_ranges(ranges, others)
            member = SimpleNamespace(ranges=ranges)
            members.append(member)
            owners.join(member)
            taken |= dict.fromkeys(covered, member)
        else:
            with pytest.raises(Refusal) as refused:
                check_ranges(ranges, others)
            assert refused.value.code is ServerError.CONSUMER_ASSIGN
        assert [owners.owner_of(s) for s in range(80)] == [taken.get(s) for s in range(80)]
    for member in members:
        owners.leave(member)
    assert {owners.owner_of(s) for s in range(80)} == {None}
    with pytest.raises(Refusal):
        check_ranges([(0, SLOTS)])


# -- rows of Spark by slot -------------------------------------------------------------------------


class Rows:
    """One batch of rows with these slots, for consumers that share the slots evenly."""

    def __init__(self, slots, consumers):
        self.batch = Stored(100, len(slots), b"", True)
        self.choice = KeyChoice(EvenSlots(), in_order=True, keyed=lambda batch: keyed_by(slots))
        self.sharing = Sharing(Acks(100), UnackedLimits(0, 0), self.choice, lambda: None)
        self.members = [Member(f"m{i}", 0, lambda: True) for i in range(consumers)]
        for member in self.members:
            member.permits = 1000
            self.sharing.join(member)

    def give(self):
        """By consumer what it is given now: (first offset, messages, ranges)."""
        missing = self.sharing.acks.missing(100, self.batch.end)
        waiting = waiting_in(self.sharing, missing) if self.sharing.waiting else missing
        given = {}
        for part in list(self.choice.parts_of(self.batch, missing, waiting)):
            member = self.sharing.receiver_of(part)
            self.sharing.give(member, part, part.unacked)
            given.setdefault(member.name, []).append((part.offset, part.messages, part.ranges))
        return given

    def acknowledge(self, member, entry):
        return list(
            self.sharing.acknowledge(
                member, MessageId(ledgerId=1, entryId=entry), entry, self.batch.end
            )
        )


LOW, HIGH = 1, 65_535  # of the first consumer of two, and of the second


def test_who_owns_a_batch_gets_it_whole_and_else_neighbours():
    rows = Rows([LOW, LOW, HIGH, LOW, HIGH, HIGH, LOW, LOW], 2)
    assert rows.give() == {
        "m0": [(100, 2, [(100, 102)]), (103, 1, [(103, 104)]), (106, 2, [(106, 108)])],
        "m1": [(102, 1, [(102, 103)]), (104, 2, [(104, 106)])],
    }
    assert Rows([LOW, LOW], 2).give() == {"m0": [(100, 2, [(100, 102)])]}


def test_a_batch_that_was_acknowledged_in_part_comes_again_whole():
    rows = Rows([LOW, LOW, HIGH], 1)
    rows.give()
    (m0,) = rows.members
    rows.sharing.redeliver(m0, [100])
    id_ = MessageId(ledgerId=1, entryId=100, batch_index=1)
    list(rows.sharing.acknowledge(m0, id_, 101, 103))
    assert rows.give() == {"m0": [(100, 3, [(100, 101), (102, 103)])]}


def test_a_cut_batch_comes_again_with_no_more_messages_than_before():
    rows = Rows([LOW] * 3 + [33_000, HIGH], 3)
    given = rows.give()
    assert given["m1"] == [(103, 1, [(103, 104)])]
    assert given["m2"] == [(104, 1, [(104, 105)])]
    _, m1, m2 = rows.members
    rows.sharing.leave(m2)
    rows.sharing.redeliver(m1, None)
    assert rows.give() == {"m1": [(103, 1, [(103, 104)]), (104, 1, [(104, 105)])]}


def test_a_batch_of_which_a_cut_batch_was_sent_comes_again_in_cut_batches():
    """A client's late acknowledgement of the cut batch would else name the whole batch."""
    rows = Rows([LOW, HIGH], 2)
    rows.give()
    m0, m1 = rows.members
    rows.sharing.leave(m1)
    rows.sharing.redeliver(m0, [100])
    assert rows.give() == {"m0": [(100, 1, [(100, 101)]), (101, 1, [(101, 102)])]}


# -- the order of each key -------------------------------------------------------------------------


def test_the_dispatcher_is_woken_when_a_key_that_waits_may_go_to_its_new_consumer():
    wakes = []
    choice = KeyChoice(EvenSlots(), in_order=True, keyed=lambda batch: keyed_by([40_000]))
    sharing = Sharing(Acks(0), UnackedLimits(0, 0), choice, lambda: wakes.append(1))
    batches = [SimpleNamespace(offset=at, messages=1, end=at + 1, data=b"") for at in range(2)]
    first, second = (Member(name, 0, lambda: True) for name in "ab")
    for member in (first, second):
        member.permits = 9
    sharing.join(first)
    (part,) = choice.parts_of(batches[0], [(0, 1)], [(0, 1)])
    sharing.give(sharing.receiver_of(part), part, 1)
    sharing.join(second)
    (later,) = choice.parts_of(batches[1], [(1, 2)], [(1, 2)])
    assert sharing.receiver_of(later) is None
    sharing.wait(later)
    wakes.clear()
    list(sharing.acknowledge(first, MessageId(ledgerId=1, entryId=0), 0, 2))
    assert wakes and sharing.next_replay() == 1
    assert sharing.receiver_of(later) is second


def test_a_new_row_waits_behind_an_earlier_row_of_its_slot():
    sharing = Sharing(
        Acks(0), UnackedLimits(0, 0), KeyChoice(EvenSlots(), in_order=True), lambda: None
    )
    member = Member("a", 0, lambda: True)
    sharing.join(member)
    sharing.wait_lone({5: 7})
    sharing.flow(member, 9)
    turns = share_lone(sharing, [6, 7], [7, 8])
    assert {turn.member: turn.offsets for turn in turns} == {None: [6], member: [7]}
    assert list(member.pending) == [7] and list(sharing.waiting) == [5, 6]


def test_rows_that_wait_no_more_take_no_memory_and_many_of_a_slot_less_than_a_list():
    choice = KeyChoice(EvenSlots(), in_order=True)
    sharing = Sharing(Acks(0), UnackedLimits(0, 0), choice, lambda: None)
    sharing.join(Member("a", 0, lambda: True))
    empty_bytes = choice.bytes
    for row in range(2 * LIST_ROWS_MAX):
        sharing.wait_lone({row: 7})
    assert choice.bytes < SLOTS_BYTES + ROW_BYTES * LIST_ROWS_MAX + (16 << 10)
    sharing.drop(0, 2 * LIST_ROWS_MAX)
    sharing.memory.measure()
    assert choice.bytes == empty_bytes == sharing.memory.bytes == 0


def test_a_part_that_waits_again_costs_its_own_rows_however_many_of_its_key_wait(monkeypatch):
    added = []

    class Rows(BitMap64):
        def update(self, *others):
            added.extend(len(other) for other in others)
            super().update(*others)

    monkeypatch.setattr(key_shared, "BitMap64", Rows)
    choice = KeyChoice(EvenSlots(), in_order=True, keyed=lambda batch: keyed_by([7]))
    sharing = Sharing(Acks(0), UnackedLimits(0, 0), choice, lambda: None)
    first, second = (Member(name, 0, lambda: True) for name in "ab")
    sharing.join(first)
    sharing.flow(first, 1000)
    for offset in range(100):
        sharing.give(first, BatchPart(offset, 1, [(offset, offset + 1)], 1, slots=(7,)), 1)
    sharing.redeliver(first, None)
    assert sharing.next_replay() == 0 and sum(added) == 100
    added.clear()
    for offset in range(100):
        sharing.give(first, BatchPart(offset, 1, [(offset, offset + 1)], 1, slots=(7,)), 1)
    sharing.join(second)
    sharing.flow(second, 1000)
    sharing.leave(first)
    assert sharing.next_replay() == 0 and sum(added) <= 300


def waiting_in(sharing, ranges):
    return [gap for lo, hi in ranges for gap in rows_in(sharing.waiting, lo, hi)]


class KeySharedSubscription(RuleBasedStateMachine):
    """Batches of rows, of one slot or of several; consumers join, leave, nack and acknowledge as
    they like; the model is driven as a dispatcher drives it."""

    in_order = True
    step_parts = sharing_rules.STEP_PARTS

    def __init__(self):
        super().__init__()
        self.patch = pytest.MonkeyPatch()
        self.patch.setattr(sharing_rules, "STEP_PARTS", self.step_parts)
        self.patch.setattr(key_shared, "STEP_COST", 40 * self.step_parts)
        self.leaving = []
        self.batches, self.slots = [], {}
        self.end = self.position = 0
        choice = KeyChoice(
            EvenSlots(),
            in_order=self.in_order,
            keyed=lambda batch: keyed_by(
                [self.slots[r] for r in range(batch.offset, batch.end)]
                if batch.messages > 1
                else [self.slots[batch.offset]]
            ),
        )
        self.sharing = Sharing(Acks(0), UnackedLimits(0, 0), choice, lambda: None)
        self.members, self.joined = [], 0
        self.cuts, self.sent = {}, {}
        """By offset how many messages a cut batch had last; by consumer and offset the rows that
        it was sent."""
        self.join(permits=6)

    @rule(slots=st.lists(st.sampled_from([300, 40_000, 65_535]), min_size=1, max_size=3))
    def store(self, slots):
        self.add(slots)
        self.dispatch()

    @rule(slots=st.lists(st.sampled_from([300, 40_000, 65_535]), min_size=2, max_size=5))
    def store_lone_messages(self, slots):
        for slot in slots:
            self.add([slot])
        self.dispatch()

    def add(self, slots):
        batch = Stored(self.end, len(slots), LONE, len(slots) > 1)
        self.slots |= {self.end + i: slot for i, slot in enumerate(slots)}
        self.end = batch.end
        self.batches.append(batch)

    @precondition(lambda self: len(self.members) < 4)
    @rule(permits=st.sampled_from([0, 2, 6]))
    def join(self, permits):
        self.joined += 1
        member = Member(f"m{self.joined}", 0, lambda: True)
        member.permits = permits
        self.members.append(member)
        self.sharing.join(member)

    @precondition(lambda self: self.members)
    @rule(data=st.data())
    def leave(self, data):
        member = data.draw(st.sampled_from(self.members))
        self.members.remove(member)
        self.sharing.leave(member)
        self.leaving.append(member)
        if not self.members:
            self.leaving.clear()
            self.position = self.sharing.acks.mark
            self.cuts.clear()  # no client is left that has them

    @precondition(lambda self: self.members)
    @rule(data=st.data(), permits=st.integers(1, 6))
    def flow(self, data, permits):
        self.sharing.flow(data.draw(st.sampled_from(self.members)), permits)

    @precondition(lambda self: any(member.pending for member in self.members))
    @rule(data=st.data(), nacks=st.booleans())
    def answer(self, data, nacks):
        member = data.draw(st.sampled_from([m for m in self.members if m.pending]))
        entry = data.draw(st.sampled_from(sorted(member.pending)))
        if nacks:
            self.sharing.redeliver(member, [entry])
        else:
            self.acknowledge(member, entry)

    def acknowledge(self, member, entry):
        message_id = MessageId(ledgerId=1, entryId=entry)
        ack = command("ack", consumer_id=1, ack_type=0, message_id=[message_id]).ack
        if acknowledge_lone(self.sharing, member, ack, 1):
            list(self.sharing.acknowledge(member, message_id, entry, self.end))

    @precondition(lambda self: self.members)
    @rule(data=st.data())
    def ask_for_everything_again(self, data):
        self.sharing.redeliver(data.draw(st.sampled_from(self.members)), None)

    @rule()
    def take_a_step_of_a_change(self):
        self.sharing.work()

    @rule()
    def dispatch(self):
        at = self.sharing.next_replay()
        while at is not None:
            (batch,) = [b for b in self.batches if b.offset <= at < b.end]
            run = replay_run(self.batches, self.batches.index(batch), self.sharing)
            if run:
                position = self.position
                self.offer_lone([waiting.offset for waiting in run])
                self.position = position
                at = self.sharing.next_replay(run[-1].end)
                continue
            missing = self.sharing.acks.missing(batch.offset, batch.end)
            for part in self.sharing.choice.parts_of(
                batch, missing, waiting_in(self.sharing, missing)
            ):
                self.offer(part)
            at = self.sharing.next_replay(max(at + 1, batch.end))
        for batch in self.batches:
            if batch.end <= self.position or not self.sharing.may_read_on():
                continue
            run = self.lone_run(batch)
            if run:
                self.offer_lone(run)
                if self.position < batch.end:
                    return
                continue
            missing = self.sharing.acks.missing(batch.offset, batch.end)
            given = self.sharing.acks.missing(max(batch.offset, self.position), batch.end)
            if given:
                for part in self.sharing.choice.parts_of(batch, missing, given):
                    if not self.offer(part):
                        self.sharing.wait(part)
            self.position = batch.end

    def lone_run(self, first):
        """The messages from the batch on that follow each other, as in `lone_run`."""
        run = []
        for batch in self.batches[self.batches.index(first) :]:
            if batch.messages > 1 or not self.sharing.acks.missing(batch.offset, batch.end):
                break
            run.append(batch.offset)
        return run if self.position <= first.offset else []

    def offer_lone(self, run):
        for turn in share_lone(self.sharing, run, [self.slots[row] for row in run]):
            for row in turn.offsets if turn.member else ():
                if self.in_order:
                    self.check_order(row, turn.offsets, turn.member)
                self.sent.setdefault((turn.member, row), set()).add(row)
            self.position += len(turn.offsets)

    def offer(self, part):
        receiver = self.sharing.receiver_of(part)
        if receiver is None:
            return False
        rows = [row for lo, hi in part.ranges for row in range(lo, hi)]
        if self.in_order:
            for row in rows:
                self.check_order(row, rows, receiver)
        if part.is_cut:
            assert part.ranges == [(part.offset, part.offset + part.messages)]
            before = self.cuts.setdefault(part.offset, part.messages)
            assert part.messages <= before, "a cut batch that comes again has no more messages"
            self.cuts[part.offset] = part.messages
        self.sharing.give(receiver, part, part.unacked)
        self.sent.setdefault((receiver, part.offset), set()).update(rows)
        return True

    @precondition(lambda self: any(member in self.members for member, _ in self.sent))
    @rule(data=st.data())
    def acknowledge_late_or_again(self, data):
        """An id that a client had names no messages that this client did not have."""
        ids = [(member, entry) for member, entry in self.sent if member in self.members]
        member, entry = data.draw(st.sampled_from(ids))
        before = self.sharing.acks.missing(0, self.end)
        self.acknowledge(member, entry)
        after = {row for lo, hi in self.sharing.acks.missing(0, self.end) for row in range(lo, hi)}
        acked = {row for lo, hi in before for row in range(lo, hi)} - after
        had = set().union(*(rows for (had_by, _), rows in self.sent.items() if had_by is member))
        assert acked <= had

    def check_order(self, row, rows, receiver):
        """Each earlier row of the slot is acknowledged, at the same consumer, or in the part."""
        acks = self.sharing.acks
        for earlier in range(row):
            if self.slots[earlier] == self.slots[row] and acks.missing(earlier, earlier + 1):
                assert earlier in rows or earlier in self.pending_rows(receiver), (earlier, row)

    def pending_rows(self, member):
        return {
            row
            for part in member.pending.values()
            for lo, hi in part.ranges
            for row in range(lo, hi)
            if self.sharing.acks.missing(row, row + 1)
        }

    @invariant()
    def a_slot_is_at_one_consumer(self):
        members = self.members + self.leaving
        at = [(self.slots[row], m.name) for m in members for row in self.pending_rows(m)]
        if self.in_order:
            assert max(Counter(slot for slot, _ in set(at)).values(), default=0) <= 1
        rows = [row for m in members for row in self.pending_rows(m)]
        assert len(rows) == len(set(rows))

    def teardown(self):
        """Consumers with permits get everything that is not acknowledged."""
        if not self.members:
            self.join(100)
        self.patch.undo()
        while self.sharing.work():
            pass
        assert not any(member.returns for member in self.members)
        for _ in range(3 * len(self.batches) + 3):
            for member in self.members:
                self.sharing.flow(member, 100)
                for entry in list(member.pending):
                    self.acknowledge(member, entry)
            self.dispatch()
        assert self.sharing.acks.mark == self.end


class UnorderedSubscription(KeySharedSubscription):
    in_order = False


class SubscriptionInSteps(KeySharedSubscription):
    """Each part that comes back takes a step, and other things happen between two steps."""

    step_parts = 1


TestInOrder = KeySharedSubscription.TestCase
TestInOrder.settings = settings(max_examples=100, stateful_step_count=25, deadline=None)
TestWithoutOrder = UnorderedSubscription.TestCase
TestWithoutOrder.settings = settings(max_examples=30, stateful_step_count=20, deadline=None)
TestInSteps = SubscriptionInSteps.TestCase
TestInSteps.settings = settings(max_examples=100, stateful_step_count=25, deadline=None)
