"""Whom a reader asks: every entry of one replica, of the next one when it is time to."""

import itertools

import pytest

from bookie_server.api.messages import has_id
from spark_ledger.ledger.quorum import Quorum
from spark_ledger.ledger.range_fetch import (
    SlotRequest,
    order_of_slots,
    plan_first_requests,
    plan_next_requests,
)

SIZES = [Quorum(e, w, 1) for e in range(1, 8) for w in range(1, e + 1)]
LAST = 2**63 - 1


def named(quorum):
    return f"E={quorum.ensemble_size} Qw={quorum.write_quorum}"


def expected_of(quorum, asks, entry):
    """The slots that will answer with the entry."""
    return [a.slot for a in asks if entry in a.ids and holds(quorum, a.slot, entry)]


def holds(quorum, slot, entry):
    return slot in quorum.write_set(entry)


@pytest.mark.parametrize("quorum", SIZES, ids=named)
def test_every_entry_is_asked_for_and_of_as_few_bookies_as_hold_all(quorum):
    for turn, length in itertools.product(range(2 * quorum.ensemble_size), (1, 2, 5, 40)):
        asks = plan_first_requests(
            quorum, range(100, 100 + length), order_of_slots(quorum, turn, [])
        )
        assert all(expected_of(quorum, asks, e) for e in range(100, 100 + length))
        assert len(asks) <= -(-quorum.ensemble_size // quorum.write_quorum)
        assert len({ask.slot for ask in asks}) == len(asks)


FITTING = [quorum for quorum in SIZES if quorum.ensemble_size % quorum.write_quorum == 0]


@pytest.mark.parametrize("quorum", FITTING, ids=named)
def test_no_entry_is_asked_of_two_where_the_stripes_fit(quorum):
    for turn in range(quorum.ensemble_size):
        asks = plan_first_requests(quorum, range(3, 61), order_of_slots(quorum, turn, []))
        assert all(len(expected_of(quorum, asks, e)) == 1 for e in range(3, 61))


@pytest.mark.parametrize("quorum", SIZES, ids=named)
def test_a_long_range_is_divided_as_if_each_entry_had_been_looked_at(quorum):
    for turn, suspect in itertools.product(range(quorum.ensemble_size), repeat=2):
        order = order_of_slots(quorum, turn, [suspect])
        for first in (0, 7, 2**31 - 3, 2**53 - 3, LAST - 59):
            one_by_one = plan_next_requests(quorum, range(first, first + 60), [], None, order)
            assert plan_first_requests(quorum, range(first, first + 60), order) == one_by_one


@pytest.mark.parametrize("quorum", SIZES, ids=named)
def test_bookies_whose_files_can_be_read_come_first_and_those_in_doubt_last_all_the_same(quorum):
    size = quorum.ensemble_size
    for turn, near, suspect in itertools.product(range(size), repeat=3):
        order = order_of_slots(quorum, turn, [suspect], [near])
        assert sorted(order) == list(range(size))
        assert order[0] == near or suspect in (near, order[0])
        assert order[-1] == suspect


@pytest.mark.parametrize("quorum", SIZES, ids=named)
def test_who_is_asked_first_changes_from_turn_to_turn(quorum):
    orders = [order_of_slots(quorum, turn, []) for turn in range(5, 5 + quorum.ensemble_size)]
    assert sorted(order[0] for order in orders) == list(range(quorum.ensemble_size))
    assert all(sorted(order) == list(range(quorum.ensemble_size)) for order in orders)


@pytest.mark.parametrize("quorum", SIZES, ids=named)
def test_a_suspect_is_asked_only_where_nobody_else_holds_the_entry(quorum):
    size = quorum.ensemble_size
    for turn, suspect in itertools.product(range(size), repeat=2):
        asks = plan_first_requests(quorum, range(31), order_of_slots(quorum, turn, [suspect]))
        assert (suspect in [ask.slot for ask in asks]) == (quorum.write_quorum == 1)


@pytest.mark.parametrize("quorum", SIZES, ids=named)
def test_when_all_refuse_each_member_of_a_write_set_is_asked_once(quorum):
    order, asked, missing = order_of_slots(quorum, 1, []), [], list(range(10, 25))
    while asks := plan_next_requests(quorum, missing, asked, None, order):
        asked += [SlotRequest(ask.slot, ask.ids, 0.0, is_open=False) for ask in asks]
    for entry in missing:
        slots = [q.slot for q in asked if has_id(q.ids, entry) and holds(quorum, q.slot, entry)]
        assert set(slots) == set(quorum.write_set(entry))
        if quorum.write_quorum == quorum.ensemble_size:
            assert len(slots) == len(set(slots))


THREE = Quorum(3, 3, 2)


def test_while_an_answer_is_expected_nobody_else_is_asked():
    asked = [SlotRequest(0, range(10), due_at=0.3)]
    assert plan_next_requests(THREE, range(10), asked, None, [0, 1, 2]) == []
    assert plan_next_requests(THREE, range(10), asked, 0.29, [0, 1, 2]) == []


def test_when_an_answer_is_overdue_one_other_is_asked_and_another_once_its_is_too():
    asked = [SlotRequest(0, range(10), due_at=0.3)]
    (second,) = plan_next_requests(THREE, range(10), asked, 0.3, [0, 1, 2])
    assert second.slot == 1
    asked.append(SlotRequest(1, range(10), due_at=0.6))
    assert plan_next_requests(THREE, range(10), asked, 0.59, [0, 1, 2]) == []
    (third,) = plan_next_requests(THREE, range(10), asked, 0.6, [0, 1, 2])
    assert third.slot == 2
    asked.append(SlotRequest(2, range(10), due_at=0.9))
    assert plan_next_requests(THREE, range(10), asked, 5.0, [0, 1, 2]) == []


def test_only_what_is_missing_is_asked_of_the_next():
    asked = [SlotRequest(0, range(100), due_at=0.3, is_open=False)]
    (ask,) = plan_next_requests(THREE, [37, 41], asked, None, [0, 1, 2])
    assert (ask.slot, ask.ids) == (1, range(37, 42))


@pytest.mark.parametrize("quorum", SIZES, ids=named)
def test_of_entries_apart_each_bookie_is_asked_for_its_own_and_none_for_the_same(quorum):
    for turn, step in itertools.product(range(2 * quorum.ensemble_size), (2, 3, 7)):
        ids = tuple(range(11, 11 + 20 * step, step))
        asks = plan_first_requests(quorum, ids, order_of_slots(quorum, turn, []))
        assert sorted(e for ask in asks for e in ask.ids) == list(ids)
        assert all(holds(quorum, ask.slot, e) for ask in asks for e in ask.ids)
        assert len({ask.slot for ask in asks}) == len(asks)


@pytest.mark.parametrize("quorum", SIZES, ids=named)
def test_of_entries_apart_the_next_is_asked_for_those_alone_that_are_missing(quorum):
    order, ids = order_of_slots(quorum, 1, []), (3, 5, 9, 12, 20, 31)
    asked, answered = [], {e: [] for e in ids}
    while asks := plan_next_requests(quorum, ids[1:], asked, None, order, apart=True):
        for ask in asks:
            asked.append(SlotRequest(ask.slot, ask.ids, 0.0, is_open=False))
            for entry in ask.ids:
                answered[entry].append(ask.slot)
    assert answered[3] == []
    assert all(sorted(answered[e]) == sorted(quorum.write_set(e)) for e in ids[1:])
