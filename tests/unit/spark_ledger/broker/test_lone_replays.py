"""Messages outside of batches that wait are sent again in runs, also after their keys have changed
consumers."""

from spark_ledger.broker.dispatch import key_shared
from spark_ledger.broker.dispatch.acks import Acks
from spark_ledger.broker.dispatch.key_shared import KeyChoice
from spark_ledger.broker.dispatch.lone import replay_lone, replay_run, share_lone
from spark_ledger.broker.dispatch.sharing import Member, Sharing, UnackedLimits
from spark_ledger.broker.dispatch.slot_owners import EvenSlots
from spark_ledger.broker.log.tail import Stored
from spark_ledger.topic.entry import pulsar_batch
from spark_ledger.topic.entry.pulsar_message_pb2 import MessageMetadata
from tests.kit.pulsar_batches import lone, message

LONE = lone(message(b""))


def waiting_lone(rows, permits, slot=7):
    """Two consumers, the first with these permits, and messages outside of batches of one key of it
    that wait."""
    choice = KeyChoice(EvenSlots(), in_order=True)
    sharing = Sharing(Acks(0), UnackedLimits(0, 0), choice, lambda: None)
    first, second = (Member(name, 0, lambda: True) for name in "ab")
    for joining in (first, second):
        sharing.join(joining)
    sharing.flow(first, permits)
    sharing.flow(second, 1)
    sharing.wait_lone(dict.fromkeys(rows, slot))
    return sharing, first


def test_of_the_rows_that_were_ready_only_those_that_wait_still_are_sent_again():
    sharing, member = waiting_lone(range(6), 9)
    sharing.acks.add_each([1, 3])
    sharing.drop(1, 2)
    sharing.drop(3, 4)
    assert list(sharing.choice.replays_in(0, 5)) == [0, 2, 4]
    member.permits = 0
    assert list(sharing.choice.replays_in(0, 5)) == []


def test_rows_for_which_there_is_no_room_keep_waiting_and_are_kept_once():
    sharing, member = waiting_lone(range(4), 1)
    before = sharing.choice.bytes
    (given, kept) = share_lone(sharing, [0, 1, 2, 3], [7] * 4)
    assert (given.member, given.offsets) == (member, [0])
    assert (kept.member, kept.offsets) == (None, [1, 2, 3])
    assert list(sharing.waiting) == [1, 2, 3]
    assert sharing.choice.bytes <= before


def test_messages_go_again_in_a_run_only_if_all_of_them_are_plain_and_have_ids_of_their_own():
    sharing, _ = waiting_lone(range(5), 9)
    plain = [Stored(row, 1, LONE, False) for row in range(5)]

    def run_of(batches, at=0):
        return [batch.offset for batch in replay_run(batches, at, sharing)]

    assert run_of(plain) == [0, 1, 2, 3, 4]
    assert run_of(plain, 2) == [2, 3, 4]
    metadata = MessageMetadata(producer_name="p", sequence_id=1, publish_time=1, deliver_at_time=1)
    delayed = pulsar_batch.build_batch(metadata, b"")
    assert run_of([*plain[:3], Stored(3, 1, delayed, False), plain[4]]) == [0, 1, 2]
    assert run_of([*plain[:2], Stored(2, 3, LONE, True)]) == [0, 1]
    sharing.sent.masked.add(3)
    assert run_of(plain) == [0, 1, 2]
    assert run_of(plain, 2) == [], "a single message is no run"
    sharing.sent.redeliveries.add(4)
    assert run_of(plain) == [], "each has its own count"


def test_of_several_changes_of_owners_only_the_last_one_is_followed_by_a_whole_sort(monkeypatch):
    monkeypatch.setattr(key_shared, "STEP_COST", 1)
    sharing = Sharing(
        Acks(0), UnackedLimits(0, 0), KeyChoice(EvenSlots(), in_order=True), lambda: None
    )
    sharing.join(Member("first", 0, lambda: True))
    rows = 50
    sharing.wait_lone({row: 1 + row for row in range(rows)})
    for name in "abcdefgh":
        sharing.join(Member(name, 0, lambda: True))
    steps = 1
    while sharing.work():
        steps += 1
    assert rows <= steps < 2 * rows


def test_a_run_of_which_nothing_is_sent_changes_nothing():
    sharing, _ = waiting_lone(range(3), 0)
    for member in sharing.members:
        member.permits = 0
    assert not replay_lone(sharing, [Stored(row, 1, LONE, False) for row in range(3)])
    assert list(sharing.waiting) == [0, 1, 2]
