"""The queue of pending adds: order, acknowledgement, and taking acknowledgements back."""

import random

import pytest

from bookie_server.api.codec import encode_add
from bookie_server.api.messages import Add
from spark_ledger.ledger.quorum import PendingAdd, PendingAdds, Quorum


def queue(count, sizes=(3, 3, 2)):
    pending = PendingAdds(Quorum(*sizes), -1)
    adds = [
        PendingAdd(entry, encode_add(Add([b"x"])), 1, entry + 1, 0, 0.0) for entry in range(count)
    ]
    for add in adds:
        pending.push(add)
    return pending, adds


def ids(adds):
    return [add.entry_id for add in adds]


def test_an_add_is_confirmed_by_its_ack_quorum():
    pending, (add,) = queue(1)
    assert not pending.note_acks([add], 0)
    assert pending.confirm() == []
    assert pending.note_acks([add], 2)
    assert ids(pending.confirm()) == [0]
    assert pending.last_add_confirmed == 0


def test_the_same_bookie_acknowledging_twice_counts_once():
    pending, (add,) = queue(1)
    pending.note_acks([add], 1)
    pending.note_acks([add], 1)
    assert pending.confirm() == []


def test_adds_are_confirmed_in_id_order_only():
    pending, adds = queue(3)
    for add in adds[1:]:
        for slot in (0, 1):
            assert not pending.note_acks([add], slot)
    assert pending.confirm() == []
    pending.note_acks([adds[0]], 0)
    assert pending.note_acks([adds[0]], 1)
    assert ids(pending.confirm()) == [0, 1, 2]


def test_nothing_is_confirmed_while_an_ensemble_change_is_in_flight():
    pending, (add,) = queue(1)
    pending.change_in_flight = True
    pending.note_acks([add], 0)
    assert not pending.note_acks([add], 1)
    assert pending.confirm() == []
    pending.change_in_flight = False
    assert ids(pending.confirm()) == [0]


def test_acks_of_a_replaced_slot_are_dropped_from_all_adds_before_any_is_confirmed():
    """Striped, the head outside the replaced slot: the order of BK#3005 and BK#4097."""
    pending, adds = queue(3, sizes=(3, 2, 2))  # write sets 01, 12, 20
    pending.change_in_flight = True
    for add, slots in zip(adds, ((0, 1), (1, 2), (2, 0)), strict=True):
        for slot in slots:
            pending.note_acks([add], slot)
    pending.drop_acks(1 << 2)
    pending.change_in_flight = False
    assert ids(pending.confirm()) == [0]
    assert ids(pending.without_ack_of(2)) == [1, 2]
    pending.note_acks([adds[1]], 2)
    assert ids(pending.confirm()) == [1]


def test_lacking_names_only_adds_that_the_slot_should_keep():
    pending, adds = queue(6, sizes=(3, 2, 1))
    assert ids(pending.without_ack_of(0)) == [0, 2, 3, 5]
    pending.note_acks([adds[2]], 0)
    assert ids(pending.without_ack_of(0)) == [0, 3, 5]


def test_copies_are_counted_after_confirmation_too():
    pending, (add,) = queue(1)
    for slot in (0, 1):
        pending.note_acks([add], slot)
    pending.confirm()
    assert not pending.note_acks([add], 2)
    assert add.acks == 0b111


def test_after_a_failure_nothing_is_left():
    pending, adds = queue(2)
    assert pending.fail_all() == adds
    assert len(pending) == 0
    assert not pending.note_acks([adds[0]], 0)


def test_ids_that_do_not_follow_are_a_defect():
    pending, _ = queue(1)
    with pytest.raises(AssertionError):
        pending.push(PendingAdd(2, encode_add(Add([b"x"])), 1, 1, 0, 0.0))


@pytest.mark.parametrize("seed", range(50))
def test_by_chance_what_is_confirmed_has_an_ack_quorum_of_present_owners(seed):
    """A model beside the queue: what the present owner of each slot has acknowledged."""
    rng = random.Random(seed)
    e = rng.randint(1, 5)
    w = rng.randint(1, e)
    quorum = Quorum(e, w, rng.randint(1, w))
    pending = PendingAdds(quorum, -1)
    held: dict[int, set[int]] = {slot: set() for slot in range(e)}
    adds: list[PendingAdd] = []
    confirmed: list[int] = []
    for _ in range(120):
        step = rng.random()
        if step < 0.3:
            add = PendingAdd(len(adds), encode_add(Add([b"x"])), 1, 1, 0, 0.0)
            adds.append(add)
            pending.push(add)
        elif step < 0.85 and adds:
            add = rng.choice(adds)
            slot = rng.choice(quorum.write_set(add.entry_id))
            held[slot].add(add.entry_id)
            pending.note_acks([add], slot)
        elif step < 0.93:
            pending.change_in_flight = True
        elif pending.change_in_flight:
            slot = rng.randrange(e)
            held[slot] = set()
            pending.drop_acks(1 << slot)
            pending.change_in_flight = False
        for add in pending.confirm():
            owners = [s for s in quorum.write_set(add.entry_id) if add.entry_id in held[s]]
            assert len(owners) >= quorum.ack_quorum
            confirmed.append(add.entry_id)
    assert confirmed == list(range(len(confirmed)))
