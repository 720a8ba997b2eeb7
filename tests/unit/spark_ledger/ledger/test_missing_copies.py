from spark_ledger.ledger.quorum import MissingCopies, MissingCopy, Quorum


def test_neighbours_become_one_range_per_bookie():
    missing = MissingCopies(Quorum(3, 3, 2))
    for entry in range(5, 105):
        missing.note(entry, [("b", "down")])
    missing.note(50, [("c", "slow")])
    assert missing.ranges() == [MissingCopy(5, 104, "b", "down"), MissingCopy(50, 50, "c", "slow")]


def test_a_gap_begins_a_new_range():
    missing = MissingCopies(Quorum(3, 3, 2))
    for entry in (0, 1, 50, 51):
        missing.note(entry, [("b", "down")])
    assert missing.ranges() == [MissingCopy(0, 1, "b", "down"), MissingCopy(50, 51, "b", "down")]


def test_ranges_can_be_asked_for_from_an_entry_on():
    missing = MissingCopies(Quorum(3, 3, 2))
    for entry in range(10):
        missing.note(entry, [("b", "down")])
    assert missing.ranges(4) == [MissingCopy(4, 9, "b", "down")]
    assert missing.ranges(10) == []
