"""Changes of many parts of a shared subscription: no step of the loop is long."""

from spark_ledger.broker.dispatch import sharing as rules
from spark_ledger.broker.wire.commands import MessageId
from tests.unit.spark_ledger.broker.shared_members import acknowledge, member, send, sharing_of


def shared_by_two(parts):
    a, b = member("a", permits=parts), member("b")
    sharing = sharing_of(a, b)
    for offset in range(parts):
        send(sharing, offset)
    sharing.flow(b, parts)
    return sharing, a, b


def test_the_parts_of_a_consumer_that_leaves_come_back_in_steps_and_it_gets_nothing_meanwhile():
    parts = 2 * rules.STEP_PARTS + 9
    sharing, a, b = shared_by_two(parts)
    sharing.wakes.clear()
    sharing.flow(a, 50)
    sharing.leave(a)
    assert len(sharing.waiting) == rules.STEP_PARTS and sharing.wakes
    assert sharing.unacked.messages == parts - rules.STEP_PARTS == len(a.pending)
    assert send(sharing, parts) is b
    late = MessageId(ledgerId=1, entryId=parts - 1)  # no step has come to it yet
    list(sharing.acknowledge(b, late, parts - 1, 2 * parts))
    assert sharing.work()
    sharing.redeliver(b, [parts])  # begins when the leave is done
    assert list(b.pending) == [parts] and not b.is_available
    assert not sharing.work()
    assert list(sharing.waiting) == [*range(parts - 1), parts] and b.is_available
    assert (sharing.unacked.messages, sharing.unacked.parts, len(a.pending)) == (0, 0, 0)
    assert [sharing.sent.redeliveries[n] for n in (0, parts - 2, parts)] == [0, 0, 1]


def test_a_consumer_that_asks_for_everything_gets_nothing_until_all_is_back_with_one_count_more():
    parts = 2 * rules.STEP_PARTS
    sharing, a, b = shared_by_two(parts)
    sharing.flow(a, 100)
    sharing.redeliver(a, None)
    sharing.redeliver(a, None)
    assert not a.is_available and len(sharing.waiting) == rules.STEP_PARTS
    assert send(sharing, 0) is b
    sharing.leave(a)  # what is asked for counts, though its consumer goes
    while sharing.work():
        pass
    assert {sharing.sent.redeliveries[n] for n in range(parts)} == {1}
    assert len(sharing.waiting) == parts - 1


def test_a_seek_forgets_what_is_under_way():
    sharing, a, _ = shared_by_two(3 * rules.STEP_PARTS)
    sharing.flow(a, 100)
    sharing.redeliver(a, None)
    sharing.forget()
    assert not sharing.work() and not sharing.waiting and a.is_available
    assert sharing.unacked.parts == 0


def test_an_acknowledgement_in_steps_leaves_the_counts_of_rows_that_are_forgotten_meanwhile():
    parts = 2 * rules.STEP_PARTS
    sharing, a, b = shared_by_two(parts)
    steps = sharing.acknowledge(b, MessageId(ledgerId=1, entryId=parts - 1), parts - 1, parts)
    next(steps)
    sharing.leave(a)
    assert parts - 1 in a.pending, "no step has come to it yet"
    sharing.leave(b)
    steps.close()
    assert (sharing.unacked.messages, sharing.unacked.parts) == (0, 0)


def test_what_is_pending_below_a_mark_is_taken_out_in_steps():
    parts = 2 * rules.STEP_PARTS + 1
    sharing, a, _ = shared_by_two(parts)
    sharing.acks.add_up_to(parts - 2)
    sharing.passed(parts - 2)
    assert len(a.pending) == parts - rules.STEP_PARTS
    while sharing.work():
        pass
    assert list(a.pending) == [parts - 2, parts - 1] and sharing.unacked.messages == 2


def test_an_id_is_looked_for_at_few_consumers_in_a_step():
    a, b = member("a", permits=1), member("b")
    sharing = sharing_of(a, b, *(member() for _ in range(3 * rules.MEMBERS_PER_STEP)))
    send(sharing, 0)
    assert acknowledge(sharing, b, 0) == [False] * 3 + [True]
    assert not a.pending
