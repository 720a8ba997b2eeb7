"""The history of a subscription is judged: each fault is found, and what is right passes."""

import pytest

from tests.kit.deliveries import Deliveries


class Story:
    """Consumers a, b of one subscription; messages of a key "k" are at the offsets of their
    numbers. Each session lives on: `prove` is the receipt of a message of its own."""

    def __init__(self, *, by_key=False):
        self.of = Deliveries("s", lambda: 0.0, by_key=by_key)

    def deliver(self, session, *numbers, key="k"):
        for number in numbers:
            self.of.delivered(session, (key, number), (0, number))
        return self

    def ask(self, session, *numbers, key="k"):
        for number in numbers:
            self.of.asked(session, (key, number))
        return self

    def confirm(self, session, *numbers, key="k"):
        for number in numbers:
            self.of.receipt(session, (key, number))
        return self

    def acknowledge(self, session, *numbers, key="k"):
        return self.ask(session, *numbers, key=key).confirm(session, *numbers, key=key)

    def nack(self, session, *numbers, key="k"):
        for number in numbers:
            self.of.nacked(session, (key, number))
        return self

    def leave(self, session):
        self.of.left(session)
        return self

    def prove(self, session):
        """The session gets, acknowledges and has the receipt of a message of another key."""
        return self.deliver(session, 0, key=session).acknowledge(session, 0, key=session)

    def seek(self, offset):
        self.of.seek_begins({0: offset})
        self.of.seek_ends()
        return self

    def faults(self, stored=3):
        """The kinds."""
        rows = [("k", number) for number in range(stored)]
        try:
            self.of.check([*rows, *((session, 0) for session in "abc")])
        except AssertionError:
            names = {f"('{session}', 0)" for session in "abc"}
            faults = [(kind, text) for kind, text in self.of.faults() if text[:8] not in names]
            return sorted({kind for kind, _ in faults})
        return []


@pytest.fixture
def shared():
    return Story()


@pytest.fixture
def by_key():
    return Story(by_key=True)


def test_messages_that_come_once_and_are_acknowledged_are_right(shared):
    shared.deliver("a", 0, 2).deliver("b", 1).acknowledge("a", 2, 0).acknowledge("b", 1)
    assert shared.prove("a").prove("b").faults() == []
    assert shared.of.counts["receipts"] == 5


def test_what_a_session_held_when_it_left_may_come_again(shared):
    shared.deliver("a", 0, 1, 2).acknowledge("a", 0).ask("a", 1).leave("a")
    shared.deliver("b", 1, 2).acknowledge("b", 1, 2)
    assert shared.prove("b").faults() == []
    assert shared.of.counts["redeliveries"] == 2


def test_what_was_nacked_may_come_again_to_the_same_session(shared):
    shared.deliver("a", 0, 1, 2).nack("a", 1).deliver("a", 1).acknowledge("a", 0, 1, 2)
    assert shared.prove("a").faults() == []


def test_a_stored_message_that_did_not_come_is_lost(shared):
    shared.deliver("a", 0, 2).acknowledge("a", 0, 2)
    assert shared.faults() == ["lost"]


def test_a_message_that_no_session_acknowledged_is_found(shared):
    shared.deliver("a", 0, 1, 2).acknowledge("a", 0, 1).leave("a")
    assert shared.of.missing([("k", 1), ("k", 2), ("k", 3)]) == [("k", 2), ("k", 3)]
    assert shared.faults() == ["unacknowledged"]


def test_a_message_that_comes_after_its_receipt_is_found(shared):
    shared.deliver("a", 0, 1, 2).acknowledge("a", 0, 1, 2).leave("a")
    assert shared.deliver("b", 1).faults() == []
    assert shared.acknowledge("b", 1).faults() == ["again"]


def test_a_message_that_comes_between_its_acknowledgement_and_the_receipt_is_found(shared):
    shared.deliver("a", 0, 1, 2).ask("a", 0, 1, 2).deliver("b", 1).confirm("a", 0, 1, 2)
    assert shared.faults() == []
    assert shared.prove("b").faults() == ["again"]


def test_a_message_at_two_sessions_that_both_get_receipts_later_is_found(shared):
    shared.deliver("a", 0, 1, 2).deliver("b", 1).acknowledge("b", 1)
    assert not shared.of.faults()
    assert shared.acknowledge("a", 0, 2).faults() == ["two"]


def test_a_message_at_a_session_that_gets_no_receipt_any_more_may_be_at_another_one(shared):
    shared.deliver("a", 0, 1, 2).deliver("b", 0, 1, 2).ask("a", 0).acknowledge("b", 0, 1, 2)
    assert shared.prove("b").leave("a").faults() == []


def test_what_a_broker_sends_that_gives_no_receipts_any_more_is_no_fault(by_key):
    by_key.deliver("a", 0, 1, 2).acknowledge("a", 0, 1, 2).deliver("b", 2, 1).ask("b", 1)
    assert by_key.leave("b").prove("a").faults() == []


def test_a_message_that_comes_twice_to_a_session_is_found(shared):
    shared.deliver("a", 0, 1, 2).deliver("a", 1).acknowledge("a", 0, 1, 2)
    assert shared.faults() == ["two"]


def test_a_message_at_two_places_is_found(shared):
    shared.deliver("a", 0, 1, 2).leave("a")
    shared.of.delivered("b", ("k", 1), (0, 7))
    assert shared.deliver("b", 0, 2).acknowledge("b", 0, 1, 2).faults() == ["moved"]


def test_a_message_that_was_not_stored_is_found(shared):
    shared.deliver("a", 0, 1, 2, 3).acknowledge("a", 0, 1, 2, 3)
    assert shared.faults() == ["unknown"]


def test_the_messages_of_a_key_may_pass_to_another_session_in_order(by_key):
    by_key.deliver("a", 0, 1).acknowledge("a", 0).leave("a").deliver("b", 1, 2)
    assert by_key.acknowledge("b", 1, 2).prove("b").faults() == []


def test_a_key_at_two_sessions_that_both_get_receipts_later_is_found(by_key):
    by_key.deliver("a", 0).deliver("b", 1).acknowledge("b", 1).ask("a", 0)
    assert by_key.faults(2) == []
    assert by_key.confirm("a", 0).faults(2) == ["key"]


def test_a_key_at_two_sessions_is_found_after_a_nack_too(by_key):
    by_key.deliver("a", 0, 1).nack("a", 0).deliver("b", 0).acknowledge("b", 0)
    assert by_key.acknowledge("a", 1).faults(2) == ["key"]


def test_a_message_before_an_earlier_one_of_its_key_is_found(by_key):
    assert by_key.deliver("a", 1, 0).acknowledge("a", 0, 1).faults(2) == ["order"]


def test_a_message_before_an_earlier_one_that_has_to_come_again_is_found(by_key):
    by_key.deliver("a", 0).leave("a").deliver("b", 1, 0)
    assert by_key.acknowledge("b", 0, 1).faults(2) == ["order"]


def test_a_message_before_an_earlier_one_that_comes_to_another_session_is_found(by_key):
    by_key.deliver("a", 0).leave("a").deliver("b", 1).acknowledge("b", 1)
    assert by_key.deliver("c", 0).acknowledge("c", 0).faults(2) == ["order"]


def test_messages_of_a_key_that_come_again_out_of_order_to_a_session_are_found(by_key):
    by_key.deliver("a", 0, 1).ask("a", 0, 1).leave("a")
    assert by_key.deliver("b", 1, 0).acknowledge("b", 0, 1).faults(2) == ["order"]


def test_the_order_of_a_key_does_not_count_after_a_nack(by_key):
    by_key.deliver("a", 0, 1, 2).nack("a", 0).deliver("a", 0).acknowledge("a", 0, 1, 2)
    assert by_key.prove("a").faults() == []


def test_the_order_of_keys_does_not_count_in_a_shared_subscription(shared):
    shared.deliver("a", 2).deliver("b", 1).deliver("a", 0)
    assert shared.acknowledge("a", 0, 2).acknowledge("b", 1).faults() == []


def test_what_was_acknowledged_comes_again_after_a_seek_from_its_target_on(by_key):
    by_key.deliver("a", 0, 1, 2).acknowledge("a", 0, 1, 2).seek(1).leave("a")
    assert by_key.deliver("b", 1, 2).acknowledge("b", 1, 2).prove("b").faults() == []


def test_what_does_not_come_again_after_a_seek_is_found(by_key):
    by_key.deliver("a", 0, 1, 2).acknowledge("a", 0, 1, 2).seek(1).leave("a")
    assert by_key.deliver("b", 2).acknowledge("b", 2).faults() == ["sought"]


def test_what_is_before_the_target_of_a_seek_does_not_come_again(by_key):
    by_key.deliver("a", 0, 1, 2).acknowledge("a", 0, 1, 2).seek(1).leave("a")
    assert by_key.deliver("b", 0, 1, 2).acknowledge("b", 0, 1, 2).faults() == ["again"]


def test_a_receipt_while_a_seek_is_under_way_promises_nothing(shared):
    shared.deliver("a", 0, 1, 2).ask("a", 0, 1, 2)
    shared.of.seek_begins({0: 1})
    shared.confirm("a", 0, 1)
    shared.of.seek_ends()
    shared.confirm("a", 2).leave("a").deliver("b", 1, 2).acknowledge("b", 1, 2)
    assert shared.prove("b").faults() == []


def test_a_receipt_after_a_seek_counts(shared):
    shared.deliver("a", 0, 1, 2).acknowledge("a", 0, 1, 2).seek(1).leave("a")
    shared.deliver("b", 1, 2).acknowledge("b", 1, 2).leave("b").deliver("c", 1)
    assert shared.acknowledge("c", 1).faults() == ["again"]
