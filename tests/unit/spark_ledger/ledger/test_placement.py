import random

from spark_ledger.bookies.directory import BookieInfo
from spark_ledger.ledger.placement import choose


def bookies(*racks, free=1000):
    return [BookieInfo(f"b{i}", f"h{i}:1", rack, free) for i, rack in enumerate(racks)]


def pick(candidates, count, taken=(), doubtful=(), seed=0):
    return choose(candidates, count, taken, doubtful, random.Random(seed))


def test_what_is_chosen_are_different_bookies():
    for seed in range(50):
        chosen = pick(bookies("", "", "", "", ""), 3, seed=seed)
        assert len(set(chosen)) == 3


def test_fewer_are_chosen_when_there_are_fewer():
    assert sorted(pick(bookies("", ""), 3)) == ["b0", "b1"]


def test_racks_differ_as_long_as_there_are_racks():
    for seed in range(50):
        chosen = pick(bookies("r1", "r1", "r1", "r2", "r3"), 3, seed=seed)
        assert {"b3", "b4"} <= set(chosen)


def test_a_rack_that_is_taken_is_used_only_when_no_other_is_left():
    assert pick(bookies("r1", "r2"), 1, taken=["r1"]) == ["b1"]
    assert pick(bookies("r1"), 1, taken=["r1"]) == ["b0"]


def test_a_doubtful_bookie_comes_last_but_comes():
    for seed in range(20):
        assert "b1" not in pick(bookies("", "", ""), 2, doubtful=["b1"], seed=seed)
    assert "b1" in pick(bookies("", "", ""), 3, doubtful=["b1"])


def test_free_space_is_the_weight():
    roomy = [BookieInfo("full", "h:1", "", 1), BookieInfo("roomy", "h:2", "", 10**9)]
    assert [pick(roomy, 1, seed=seed) for seed in range(30)] == [["roomy"]] * 30


def test_the_same_generator_chooses_the_same():
    candidates = bookies(*[""] * 9)
    assert pick(candidates, 5, seed=3) == pick(candidates, 5, seed=3)
