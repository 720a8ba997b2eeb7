from hypothesis import given
from hypothesis import strategies as st

from spark_ledger.topic.subscription.records import Mark, lowest_positions, needed_before_going_back

HOUR = 3_600_000


def marks(*found):
    return [Mark(number, at, {0: offset}) for number, (at, offset) in enumerate(found)]


def test_what_is_held_is_where_the_subscription_was_a_grace_period_ago():
    some = marks((0, 100), (HOUR, 500), (2 * HOUR, 900))
    assert lowest_positions(some, {0: 950}, 3 * HOUR, HOUR).positions == {0: 900}
    assert lowest_positions(some, {0: 950}, 3 * HOUR - 1, HOUR).positions == {0: 500}


def test_a_young_subscription_holds_from_where_it_began():
    assert lowest_positions(marks((0, 100)), {0: 900}, HOUR - 1, HOUR).positions == {0: 100}


def test_a_step_back_within_the_grace_period_is_held():
    some = marks((0, 800), (2 * HOUR, 200))
    assert lowest_positions(some, {0: 900}, 2 * HOUR + 10, HOUR).positions == {0: 200}


def test_marks_before_the_one_that_counts_are_forgotten_and_that_one_is_not():
    some = marks((0, 100), (HOUR, 500), (2 * HOUR, 900))
    assert lowest_positions(some, {0: 950}, 2 * HOUR + 5, HOUR).forget == (0,)


def test_a_mark_is_added_when_the_newest_is_old_and_says_something_else():
    some = marks((0, 100))
    assert lowest_positions(some, {0: 200}, HOUR // 4, HOUR).add == 1
    assert lowest_positions(some, {0: 200}, HOUR // 4 - 1, HOUR).add is None
    assert lowest_positions(some, {0: 100}, 5 * HOUR, HOUR).add is None


def test_without_a_mark_or_for_a_partition_without_one_everything_is_held():
    assert lowest_positions([], {0: 900}, 9 * HOUR, HOUR).positions == {}
    assert lowest_positions(marks((0, 100)), {0: 900, 1: 50}, 9 * HOUR, HOUR).positions == {0: 100}


def test_a_step_back_makes_a_mark_unless_the_newest_says_as_much():
    some = marks((0, 800), (5, 300))
    assert needed_before_going_back(some, {0: 299}) == 2
    assert needed_before_going_back(some, {0: 300}) is None
    assert needed_before_going_back(some, {0: 700}) is None


moves = st.lists(
    st.tuples(st.integers(1, HOUR // 2), st.integers(0, 1000), st.booleans()), max_size=40
)


@given(moves)
def test_nothing_that_a_subscription_was_at_within_the_grace_period_is_let_go(moves):
    """A history of moves and passes: each pass holds no more than the lowest position since."""
    now, position = 0, 500
    history = [(0, position)]
    some = [Mark(0, 0, {0: position})]
    for wait, offset, asked in moves:
        now += wait
        if offset < position:
            number = needed_before_going_back(some, {0: offset})
            some += [] if number is None else [Mark(number, now, {0: offset})]
        position = offset
        history.append((now, position))
        if asked:
            found = lowest_positions(some, {0: position}, now, HOUR)
            was_at = [at for at, _ in history if at <= now - HOUR]
            since = max(was_at, default=0)
            lowest = min(offset for at, offset in history if at >= since)
            assert found.positions[0] <= lowest
            some = [one for one in some if one.number not in found.forget]
            some += [] if found.add is None else [Mark(found.add, now, {0: position})]
