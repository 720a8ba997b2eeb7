"""A failing seed is made small, and told so that a reader sees what went wrong."""

from dataclasses import replace

import pytest

from tests.simulation import replay, story
from tests.simulation.chaos import Plan
from tests.simulation.recorder import recording
from tests.simulation.scenario import run_seed
from tests.simulation.shrink import broken_in, shrink
from tests.simulation.story import Told, tell
from tests.simulation.warm import quiet

MUTANT = "reply before the fence"  # D1
NEEDED = ("power", "slow disk")
BESIDES = ("loss", "partition", "duplicate", "pause")
"""Faults that this bug does not need."""
CHANGES = {
    "quorum": (3, 3, 2),
    "bookies": 3,
    "faults": (*NEEDED, *BESIDES),
    "chaos_s": 10.0,
    "between_s": 0.4,
    "recoverers": 2,
    "tailers": 0,
    "topics": False,
}
SEEDS = 60
PLAN = replay.drawn_plan(0)


@pytest.fixture(autouse=True)
def _quiet():
    with quiet():
        yield


def failing() -> tuple[int, Plan, str]:
    """The first seed that forgets a fence under the mutant."""
    for seed in range(SEEDS):
        plan = replay.changed_plan(seed, CHANGES)
        found = replay.broken_by(seed, plan)
        if found is not None and found[0] == "13":
            return seed, plan, found[0]
    raise AssertionError(f"no seed of {SEEDS} forgets a fence")


@pytest.mark.slow
def test_a_lost_fence_is_made_small_and_told_with_the_bookie_that_forgot_it():
    with replay.mutated(MUTANT):
        seed, plan, invariant = failing()
        small = shrink(plan, broken_in(seed), runs_max=80)
        found = replay.broken_by(seed, small.plan)
        told = tell(seed, small.plan)
    assert found is not None and found[0] == small.invariant == invariant
    on = [name for name in small.plan.faults if name not in small.plan.without]
    assert len(on) < len(plan.faults)
    lines = told.split("\n")
    assert len(lines) <= 80
    forgetful = [line.split()[0] for line in lines if "no fence record, and it had said" in line]
    assert any(f"{name} had replied to a fence of ledger" in lines[0] for name in forgetful)
    assert any("fences and asks for the LAC" in line for line in lines)


def test_the_line_that_replays_a_run_gives_the_same_plan_back():
    plan = replace(
        PLAN, without=frozenset(["kill", "loss"]), skip=frozenset([3, 1]), entries=(1, 2)
    )
    words = replay.command(0, plan)
    assert '"skip": [1, 3]' in words
    changes = replay.parsed(words.split("--plan ")[1].strip("'"))
    assert replay.changed_plan(0, changes) == plan


def test_a_plan_or_a_mutant_that_nobody_knows_is_refused():
    with pytest.raises(ValueError, match="has no 'colour'"):
        replay.changed_plan(0, {"colour": 1})
    with pytest.raises(ValueError, match="no mutant"), replay.mutated("nothing of the kind"):
        pass


def test_a_seed_over_budget_that_is_to_have_topics_is_brought_back_within_it():
    over = next(seed for seed in range(200) if replay.drawn_plan(seed).over_budget)
    assert replay.changed_plan(over, {}).over_budget
    for name in ("topics", "page_cache", "lasting", "healing"):
        assert not replay.changed_plan(over, {name: True}).over_budget
        with pytest.raises(ValueError, match=f"a run with {name} is within the budget"):
            replay.changed_plan(over, {name: True, "over_budget": True})


def test_a_seed_with_ways_that_stay_cut_that_is_to_heal_has_none_unless_both_are_asked_for():
    lasting = next(seed for seed in range(200) if replay.drawn_plan(seed).lasting)
    assert not replay.changed_plan(lasting, {"healing": True}).lasting
    assert replay.changed_plan(lasting, {"healing": True, "lasting": True}).lasting


def test_a_recorded_run_is_the_run_that_was_not_recorded():
    for seed in range(4):
        plain = run_seed(seed)
        with recording() as recorders:
            recorded = run_seed(seed)
        assert (plain.digest, plain.steps) == (recorded.digest, recorded.steps)
        assert recorders[0].messages and recorders[0].notes


# -- the search, without runs ------------------------------------------------------------------


def broken_when(needs_classes, needs_events, writers=1):
    """Runs of ten faults of each class; broken when what is needed happens."""

    def broken(plan: Plan) -> tuple[str, str] | None:
        events = [(n, plan.faults[n % len(plan.faults)]) for n in range(10 * len(plan.faults))]
        happen = [e for e in events if e[1] not in plan.without and e[0] not in plan.skip]
        enough = needs_events <= {n for n, _ in happen} and plan.writers >= writers
        if not (enough and needs_classes <= {name for _, name in happen}):
            return None
        return "13", "\n".join(f"    1.5 chaos          #{n} {name}: done" for n, name in happen)

    return broken


def test_nothing_is_left_that_is_not_needed():
    plan = replace(PLAN, faults=("a", "b", "c"), writers=2, recoverers=2, without=frozenset())
    small = shrink(plan, broken_when({"b"}, {4, 7}), runs_max=1000)
    assert (small.invariant, small.faults) == ("13", ("b",))
    left = [n for n in range(30) if n % 3 == 1 and n not in small.plan.skip]
    assert left == [4, 7]
    assert (small.plan.writers, small.plan.recoverers) == (1, 0)


def test_what_is_needed_stays():
    plan = replace(PLAN, faults=("a", "b"), writers=2)
    small = shrink(plan, broken_when({"a", "b"}, set(), writers=2), runs_max=1000)
    assert small.plan.writers == 2
    assert set(small.faults) == {"a", "b"}


def test_the_search_ends_when_its_runs_are_used_up():
    plan = replace(PLAN, faults=("a", "b", "c"), writers=2)
    assert shrink(plan, broken_when({"b"}, {4}), runs_max=3).runs == 3


def test_a_run_that_breaks_nothing_cannot_be_made_small():
    with pytest.raises(ValueError, match="breaks nothing"):
        shrink(PLAN, lambda plan: None)


# -- fewer lines ---------------------------------------------------------------------------------


def test_lines_that_say_the_same_are_told_once():
    failed = [Told(1.0, f"its writer: entry {n} failed") for n in (3, 4, 5)]
    fenced = [Told(2.0, "writer.1: append: fenced")] * 2
    told = [line.text for line in story.repeated([*failed, *fenced, Told(3.0, "end")])]
    assert told == [
        "its writer: entries failed: 3 to 5",
        "writer.1: append: fenced (2 times)",
        "end",
    ]


def test_adds_that_went_well_are_told_together_but_not_the_entry_it_is_about():
    plain = [Told(float(n), f"its writer: entry {n} acked", True, n) for n in range(9)]
    told = story.merged_lines(plain, about=4)
    assert [line.text.split(";")[-1].split("(")[0].strip() for line in told] == [
        "acked: 0-3",
        "its writer: entry 4 acked",
        "acked: 5-8",
    ]


def test_a_long_story_says_what_it_leaves_out():
    told = story.shortened([Told(float(n), str(n)) for n in range(100)], 20)
    assert len(told) == 20
    assert told[5].text == "... 81 events are left out ..."
    assert told[-1].text == "99"
