"""The node against its model: operations at random, crashes at any moment, everything verified.

STORAGE_CASES and STORAGE_EXAMPLES make the run longer; `python -m tests.storage` is the long one.
`make test` takes a quarter of the numbered cases.
"""

import os

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.simulation.mutants import MUTANTS
from tests.storage.__main__ import run_chunk
from tests.storage.case import case_of, run_case
from tests.storage.model import Broken
from tests.storage.operations import OPERATION_BYTES, operations
from tests.storage.shrink import failure_of, shrunk

CASES = int(os.environ.get("STORAGE_CASES", 1200))
EXAMPLES = int(os.environ.get("STORAGE_EXAMPLES", 300))
CHUNKS, NOT_SLOW = 8, 2
CAUGHT = (
    "fence forgotten at replay",
    "entries forgotten at replay",
    "ack before sync",
    "reply before the fence",
    "adds taken when fenced",
    "checkpoint without fences",
    "checkpoint mark too far",
    "other bytes under the same id",
)
"""Mutants of the simulation that one node alone shows."""
MISJUDGED = {
    "an add to a ledger without a record, after a torn tail": (
        "00000000ef000000f600710000ef0000009d0000ed00000000930000"
    ),
}
"""Cases in which the model once expected too much."""

words = st.binary(min_size=OPERATION_BYTES, max_size=OPERATION_BYTES)


@pytest.mark.parametrize(
    "chunk",
    [
        pytest.param(chunk, marks=() if chunk < NOT_SLOW else pytest.mark.slow)
        for chunk in range(CHUNKS)
    ],
)
def test_a_node_keeps_its_promises_in_every_numbered_case(chunk: int):
    seeds = range(chunk * CASES // CHUNKS, (chunk + 1) * CASES // CHUNKS)
    failed, _ = run_chunk(seeds)
    assert failed is None, f"python -m tests.storage --seed {failed}"


@settings(
    max_examples=EXAMPLES,
    deadline=None,
    derandomize="STORAGE_EXAMPLES" not in os.environ,
    suppress_health_check=list(HealthCheck),
)
@given(st.lists(words, min_size=31, max_size=45))
def test_a_node_keeps_its_promises_whatever_is_done_to_it(case: list[bytes]):
    run_case(b"".join(case))


@pytest.mark.parametrize("case", MISJUDGED.values(), ids=MISJUDGED.keys())
def test_a_case_that_was_once_misjudged_passes(case: str):
    run_case(bytes.fromhex(case))


def test_the_same_case_runs_the_same():
    first, second = (run_case(case_of(7)) for _ in range(2))
    assert first[:3] == second[:3]


@pytest.mark.parametrize("name", CAUGHT)
def test_a_known_bug_is_caught_within_a_hundred_cases(name: str):
    mutant = next(mutant for mutant in MUTANTS if mutant.name == name)
    with mutant.applied():
        found = next(seed for seed in range(100) if _broken(case_of(seed)))
    assert not _broken(case_of(found))


def test_a_failing_case_is_made_small():
    mutant = next(mutant for mutant in MUTANTS if mutant.name == "entries forgotten at replay")
    with mutant.applied():
        small = shrunk(case_of(0))
        assert isinstance(failure_of(small), Broken)
    assert len(list(operations(small))) <= 4


def _broken(case: bytes) -> bool:
    return isinstance(failure_of(case), Broken)
