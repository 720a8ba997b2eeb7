"""Who is chosen: free space, racks inside write sets, suspects last, policies of one's own."""

import asyncio
import itertools
import random

import pytest

from spark_ledger.bookies.directory import BookieInfo
from spark_ledger.config import ClientConfig
from spark_ledger.errors import BadConfig
from spark_ledger.ledger.placement import PlacementRequest, choose, resolve
from spark_ledger.process import connect
from tests.unit.spark_ledger.ledger import policies

POLICIES = policies.__name__


def bookies(*racks, free=1000):
    return [BookieInfo(f"b{i}", f"h{i}:1", rack, free) for i, rack in enumerate(racks)]


def request(candidates, sizes=(3, 3, 2), slots=None, members=None, suspects=(), racks="soft"):
    members = members or {}
    if slots is None:
        slots = [slot for slot in range(sizes[0]) if slot not in members]
    return PlacementRequest(
        tuple(candidates), tuple(slots), *sizes, members, tuple(suspects), racks
    )


def pick(candidates, *args, seed=0, **fields):
    return choose(request(candidates, *args, **fields), random.Random(seed))


def clashes(asked, chosen):
    """Pairs of slots that share a write set and lie on one rack, by definition."""
    rack = {bookie.id: bookie.rack for bookie in asked.candidates}
    by_slot = {slot: member.rack for slot, member in asked.members.items()}
    by_slot |= {slot: rack[bookie] for slot, bookie in chosen.items()}
    found = set()
    for first in range(asked.ensemble_size):
        window = [(first + i) % asked.ensemble_size for i in range(asked.write_quorum)]
        for pair in itertools.combinations(sorted(window), 2):
            racks = [by_slot.get(slot, "") for slot in pair]
            if racks[0] and racks[0] == racks[1] and any(slot in chosen for slot in pair):
                found.add(pair)
    return found


def fewest_clashes(asked):
    """Over every way to fill the slots."""
    ways = itertools.permutations([b.id for b in asked.candidates], len(asked.slots))
    return min(len(clashes(asked, dict(zip(asked.slots, way, strict=True)))) for way in ways)


def test_what_is_chosen_are_different_bookies():
    for seed in range(50):
        chosen = pick(bookies("", "", "", "", ""), seed=seed)
        assert sorted(chosen) == [0, 1, 2]
        assert len(set(chosen.values())) == 3


def test_fewer_are_chosen_when_there_are_fewer():
    assert sorted(pick(bookies("", "")).values()) == ["b0", "b1"]
    assert pick([]) == {}


def test_racks_differ_as_long_as_there_are_racks():
    for seed in range(50):
        chosen = pick(bookies("r1", "r1", "r1", "r2", "r3"), seed=seed)
        assert {"b3", "b4"} <= set(chosen.values())


def test_a_rack_that_a_member_has_is_used_only_when_no_other_is_left():
    members = {0: BookieInfo("m", "m:1", "r1"), 1: BookieInfo("n", "n:1", "r3")}
    assert pick(bookies("r1", "r2"), members=members) == {2: "b1"}
    assert pick(bookies("r1"), members=members) == {2: "b0"}


def test_a_suspect_comes_last_but_comes():
    for seed in range(20):
        candidates = bookies("", "", "", "")
        assert "b1" not in pick(candidates, suspects=["b1"], seed=seed).values()
    assert "b1" in pick(bookies("", "", ""), suspects=["b1"]).values()


def test_a_suspect_is_worse_than_a_shared_rack_unless_racks_are_hard():
    candidates = bookies("r1", "r1", "r2", "r3")
    soft = pick(candidates, (3, 3, 2), suspects=["b3"])
    assert sorted(soft.values()) == ["b0", "b1", "b2"]
    hard = pick(candidates, (3, 3, 2), suspects=["b3"], racks="hard")
    assert {"b2", "b3"} <= set(hard.values())


def test_free_space_is_the_weight():
    roomy = [BookieInfo("full", "h:1", "", 1), BookieInfo("roomy", "h:2", "", 10**9)]
    for seed in range(30):
        assert pick(roomy, (1, 1, 1), seed=seed) == {0: "roomy"}
    third = [BookieInfo("small", "h:1", "", 100), BookieInfo("big", "h:2", "", 200)]
    small = sum(pick(third, (1, 1, 1), seed=s)[0] == "small" for s in range(3000))
    assert 900 < small < 1100


def test_the_same_generator_chooses_the_same():
    candidates = bookies(*[""] * 9)
    assert pick(candidates, (5, 3, 2), seed=3) == pick(candidates, (5, 3, 2), seed=3)


def test_slots_of_a_striped_ledger_that_share_no_entry_may_share_a_rack():
    """E=4, Qw=2 on two racks: r1, r2, r1, r2, and nobody needs a third."""
    for seed in range(20):
        asked = request(bookies("r1", "r1", "r2", "r2"), (4, 2, 2), racks="hard")
        chosen = choose(asked, random.Random(seed))
        assert sorted(chosen) == [0, 1, 2, 3]
        assert not clashes(asked, chosen)


def test_hard_racks_leave_a_slot_empty_rather_than_share_a_rack_or_trust_an_unknown_one():
    assert len(pick(bookies("r1", "r1", "r2"), racks="hard")) == 2
    assert len(pick(bookies("r1", "r2", "", ""), racks="hard")) == 2
    members = {0: BookieInfo("m", "m:1", "r1"), 1: BookieInfo("n", "n:1", "r2")}
    assert pick(bookies("r1", "r2"), members=members, racks="hard") == {}
    assert pick(bookies("r1", "r3"), members=members, racks="hard") == {2: "b1"}


def test_with_too_few_racks_for_all_failed_slots_hard_fills_those_it_can():
    members = {0: BookieInfo("m", "m:1", "r1")}
    assert len(pick(bookies("r1", "r2", "r2"), members=members, racks="hard")) == 1


def test_by_chance_write_sets_share_racks_as_little_as_any_choice_could():
    """Against every permutation: soft has the fewest clashes, hard none or nothing complete."""
    for seed in range(250):
        rng = random.Random(seed)
        e = rng.randint(1, 5)
        w = rng.randint(1, e)
        names = ["r1", "r2", "r3", "r4", ""][: rng.randint(1, 5)]
        candidates = bookies(*(rng.choice(names) for _ in range(rng.randint(e, 6))))
        kept = rng.sample(range(e), rng.randint(0, e - 1))
        members = {s: BookieInfo(f"m{s}", "m:1", rng.choice(names)) for s in kept}
        soft = request(candidates, (e, w, 1), members=members)
        chosen = choose(soft, rng)
        best = fewest_clashes(soft)
        assert sorted(chosen) == list(soft.slots)
        assert len(clashes(soft, chosen)) == best
        hard = request([b for b in candidates if b.rack], (e, w, 1), members=members, racks="hard")
        strict = choose(hard, rng)
        assert not clashes(hard, strict)
        feasible = len(hard.candidates) >= len(hard.slots) and fewest_clashes(hard) == 0
        assert (len(strict) == len(hard.slots)) == feasible


def test_by_chance_no_more_suspects_are_taken_than_are_needed():
    for seed in range(200):
        rng = random.Random(seed)
        candidates = bookies(*(rng.choice(["", "r1", "r2"]) for _ in range(6)))
        suspects = [b.id for b in candidates if rng.random() < 0.5]
        asked = request(candidates, (4, 2, 2), suspects=suspects)
        taken = [b for b in choose(asked, rng).values() if b in suspects]
        assert len(taken) == max(0, 4 - (6 - len(suspects)))


def test_many_bookies_on_few_racks_are_no_long_search():
    """It is bounded in steps: what it finds then may share racks, but every slot is filled."""
    asked = request(bookies(*(f"r{i % 3}" for i in range(1000))), (20, 11, 6))
    assert len(set(choose(asked, random.Random(1)).values())) == 20


# -- policies of one's own --------------------------------------------------------------------


def test_a_policy_is_named_by_module_and_function():
    assert resolve("spark_ledger.ledger.placement:choose") is choose
    asked = request(bookies("", "", "", ""))
    rng = random.Random(0)
    assert resolve(f"{POLICIES}:by_name")(asked, rng) == {0: "b0", 1: "b1", 2: "b2"}
    assert policies.calls[-1] is asked
    assert len(resolve(f"{POLICIES}:Policies.ours")(asked, rng)) == 3


@pytest.mark.parametrize(
    ("name", "why"),
    [
        ("choose", "no module:function"),
        ("os:", "no module:function"),
        ("no.such.module:f", "cannot be imported"),
        (f"{POLICIES}:missing", "has no missing"),
        (f"{POLICIES}:no_function", "it is a int, no function"),
        (f"{POLICIES}:a_coroutine", "it is an async function"),
    ],
)
def test_a_name_that_is_no_function_is_refused_before_anything_is_connected(name, why):
    with pytest.raises(BadConfig, match=why) as caught:
        resolve(name)
    assert name in str(caught.value)
    assert caught.value.error_class == "LEDGER_CONFIG.INVALID"


@pytest.mark.parametrize(
    ("function", "why"),
    [
        ("raises", "it raised RuntimeError.*the inventory is away"),
        ("strangers", "no candidates: 'x0', 'x1', 'x2'"),
        ("twice", "a bookie twice"),
        ("a_list", "it returned a list"),
        ("other_slots", "not asked for: 99"),
        ("nonsense", "no candidates"),
        ("objects", "returned BookieInfo objects, ids are expected: bookie.id"),
        ("hidden_coroutine", "it returned a coroutine, not a mapping"),
    ],
)
@pytest.mark.filterwarnings("error")  # a coroutine that nobody awaited
def test_what_a_policy_returns_is_checked_and_the_error_names_it(function, why):
    policy = resolve(f"{POLICIES}:{function}")
    with pytest.raises(BadConfig, match=why) as caught:
        policy(request(bookies("", "", "", "")), random.Random(0))
    assert f"{POLICIES}:{function}" in str(caught.value)


def test_a_client_with_such_a_name_does_not_connect():
    config = ClientConfig(placement="no.such.module:f")
    with pytest.raises(BadConfig, match=r"no\.such\.module"):
        asyncio.run(connect("zk://127.0.0.1:1/nowhere", config))


def test_a_policy_may_leave_slots_empty():
    assert resolve(f"{POLICIES}:too_few")(request(bookies("", "")), random.Random(0)) == {0: "b0"}


def on(host, number, rack=""):
    return BookieInfo(f"{host}-{number}", f"{host}:{number}", rack, 1000)


@pytest.mark.parametrize("seed", range(20))
def test_copies_are_on_different_hosts_while_hosts_suffice(seed):
    many = [on("h1", number) for number in range(6)]
    chosen = pick([*many, on("h2", 1), on("h3", 1)], seed=seed)
    assert {bookie.partition("-")[0] for bookie in chosen.values()} == {"h1", "h2", "h3"}


@pytest.mark.parametrize("seed", range(20))
def test_on_one_rack_they_are_on_different_hosts_all_the_same(seed):
    many = [on("h1", number, "r") for number in range(6)]
    chosen = pick([*many, on("h2", 1, "r"), on("h3", 1, "r")], seed=seed)
    assert {bookie.partition("-")[0] for bookie in chosen.values()} == {"h1", "h2", "h3"}


def test_one_host_takes_all_copies_where_there_is_no_other():
    chosen = pick([on("h1", number) for number in range(4)])
    assert len({*chosen.values()}) == 3


@pytest.mark.parametrize("seed", range(20))
def test_a_member_that_stays_keeps_others_from_its_host(seed):
    asked = [on("h1", number) for number in range(1, 5)] + [on("h2", 1)]
    chosen = choose(request(asked, (2, 2, 2), members={0: on("h1", 0)}), random.Random(seed))
    assert chosen == {1: "h2-1"}
