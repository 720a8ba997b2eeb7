"""A history is judged: each way of being wrong is found, and what is right passes."""

import pytest

from tests.kit.history import History, HistoryBroken


@pytest.fixture
def history():
    history = History()
    for number in range(4):
        history.promised("t", f"v{number}", at=number, lane="k" if number % 2 else None)
    return history


def read(history, *values, first=0, **options):
    rows = [((0, offset), value) for offset, value in enumerate(values, first)]
    history.read("t", rows, **{"begun": 9.0, **options})


def broken(history):
    with pytest.raises(HistoryBroken) as failure:
        history.check()
    return failure.value.kind


def test_a_history_in_which_all_that_was_promised_is_there_once_is_right(history):
    read(history, "v0", "v1", "v2", "v3")
    read(history, "v2", first=2, whole=False)
    history.check()


def test_what_was_promised_before_a_read_began_is_in_it(history):
    read(history, "v0", "v1", begun=1.5)
    history.check()
    read(history, "v0", "v1", begun=2.5)
    assert broken(history) == "lost"


def test_what_was_let_go_may_be_missing(history):
    history.let_go("t", ["v0"])
    read(history, "v1", "v2", "v3", first=1)
    history.check()


def test_a_value_at_two_places_is_doubled(history):
    read(history, "v0", "v1", "v2", "v3", "v0")
    assert broken(history) == "doubled"


def test_a_place_that_is_given_twice_is_doubled(history):
    with pytest.raises(HistoryBroken, match="doubled"):
        history.read("t", [((0, 0), "v0"), ((0, 0), "v0")])


def test_a_place_holds_one_value_for_ever(history):
    read(history, "v0", whole=False)
    read(history, "v2", "v0", "v1", "v3")
    assert broken(history) == "moved"


def test_an_acknowledged_place_holds_what_was_acknowledged():
    history = History()
    history.promised("ledger 1", b"x", place=(0, 0))
    history.read("ledger 1", [((0, 0), b"y")], whole=False)
    assert broken(history) == "moved"


def test_a_partition_starts_where_it_should(history):
    history.let_go("t", ["v0"])
    read(history, "v1", "v2", "v3", first=1, start=0)
    assert broken(history) == "gap"


def test_offsets_have_no_gap(history):
    history.read("t", [((0, 0), "v0"), ((0, 1), "v1"), ((0, 3), "v2"), ((0, 4), "v3")], begun=9.0)
    assert broken(history) == "gap"


def test_what_nobody_wrote_is_unknown_and_what_was_attempted_may_be_there(history):
    history.attempted("t", ["v4"])
    read(history, "v0", "v1", "v2", "v3", "v4")
    history.check()
    read(history, "v0", "v1", "v2", "v3", "v4", "v5")
    assert broken(history) == "unknown"


def test_the_values_of_a_lane_are_in_their_order_in_each_partition(history):
    read(history, "v1", "v0", "v3", "v2")
    history.check()
    history = History()
    history.promised("t", "a", lane="k")
    history.promised("t", "b", lane="k")
    history.read("t", [((0, 0), "b"), ((1, 0), "a")])
    history.check()
    history.read("t", [((0, 0), "b"), ((0, 1), "a")])
    assert broken(history) == "order"
