"""Entries that were placed in a ledger directory, where directories, journals and logs go and come
back; and the bugs that would show there, put in for the length of a run."""

import logging
from collections.abc import Callable, Coroutine, Iterator
from typing import Any

import pytest

from bookie_server import journal, replay
from bookie_server.entry_log import GrowingLog
from bookie_server.late_replay import LateReplayed
from bookie_server.ledger_storage import LedgerStorage
from bookie_server.placed_log import PlacedLog
from bookie_server.placing import Placing
from bookie_server.replayed import Replayed
from bookie_server.stores import Stores
from tests.simulation.disk import Keep
from tests.simulation.loop import run
from tests.simulation.mutants import Mutant
from tests.storage import placed
from tests.storage.rig import Shape
from tests.storage.stage import Stage

Scenario = Callable[..., Coroutine[Any, Any, None]]


FLUSHING = ("flushing", "flushing, full")


@pytest.fixture(autouse=True)
def _quiet() -> Iterator[None]:
    logging.disable(logging.CRITICAL)
    yield
    logging.disable(logging.NOTSET)


def staged(shape: Shape, scenario: Scenario, *more: Any, **named: Any) -> None:
    run(scenario(Stage(shape), *more, **named))


def test_what_is_placed_in_a_new_home_before_any_flush_is_there_after_a_crash():
    staged(placed.TWO, placed.the_home_changes)


@pytest.mark.parametrize("when", ["full", "flushing", "flushed"])
def test_a_placed_log_is_not_compacted_before_index_and_checkpoint_know_all_of_it(when: str):
    staged(placed.SMALL_LOGS, placed.a_log_is_compacted, when)


@pytest.mark.parametrize("keep", ["none", "all"])
def test_what_was_placed_in_a_directory_that_one_start_missed_is_never_denied(keep: Keep):
    staged(placed.TWO, placed.a_directory_is_missing_at_one_start, keep)


@pytest.mark.parametrize("shape", [placed.ONE, placed.TWO_JOURNALS], ids=["one", "two journals"])
def test_what_recovery_brought_for_a_placed_copy_that_rotted_is_not_replaced_at_replay(
    shape: Shape,
):
    staged(shape, placed.a_copy_rots_and_is_replaced)


@pytest.mark.parametrize("when", ["under way", "after", "after, at once", *FLUSHING])
def test_a_directory_dropped_beside_placed_entries_takes_none_of_them_along(when: str):
    staged(placed.TWO, placed.a_directory_is_dropped, when)


@pytest.mark.parametrize("back", [False, True])
def test_what_was_placed_in_a_directory_that_was_given_up_is_never_denied(back: bool):
    staged(placed.TWO, placed.a_directory_is_given_up, back)


@pytest.mark.parametrize("compacted", [False, True])
def test_places_of_a_journal_that_was_away_count_only_where_the_entry_lies(compacted: bool):
    staged(placed.TWO_JOURNALS, placed.a_journal_is_missing_at_one_start, compacted=compacted)


@pytest.mark.parametrize("keep", ["none", "torn", "random"])
@pytest.mark.parametrize("with_states", [False, True])
def test_an_index_is_rebuilt_from_placed_logs_that_a_crash_cut_off(keep: Keep, with_states: bool):
    staged(placed.ONE, placed.the_index_is_rebuilt, keep, with_states=with_states)


@pytest.mark.parametrize("seed", range(8))
def test_a_torn_record_of_places_costs_nothing_that_was_acknowledged(seed: int):
    staged(placed.ONE, placed.a_record_of_places_is_torn, seed)


@pytest.mark.parametrize("at", [0, 9, 17, 24])
def test_a_place_that_rotted_in_the_journal_puts_its_ledger_in_limbo(at: int):
    staged(placed.ONE, placed.a_bit_of_a_place_flips, at)


# -- the bugs -----------------------------------------------------------------------------------


def no_ledger_record(records: Any) -> Any:
    def places_alone(self: Any, large: Any, places: Any) -> Any:
        self._told[large.ledger_id] = large.store.id
        return records(self, large, places)

    return places_alone


def sealed_when_full(seal: Any) -> Any:
    def sealed(self: Any, log_id: int) -> None:
        self._unsettled[log_id] = 0
        seal(self, log_id)

    return sealed


def nothing_is_judged(judge: Any) -> Any:
    async def nothing(*_: Any) -> None: ...

    return nothing


def nothing_is_known(stored: Any) -> Any:
    async def nothing(*_: Any) -> dict[int, None]:
        return {}

    return nothing


def acknowledged_when_written(written: Any) -> Any:
    def early(self: Any, large: Any, *more: Any) -> None:
        if not large.done.done():
            large.done.set_result(None)
        written(self, large, *more)

    return early


def not_synced(append_synced: Any) -> Any:
    async def appended(self: Any, chunk: Any, disk: Any) -> Any:
        return await self.append(chunk)

    return appended


def says(value: Any) -> Callable[[Any], Any]:
    return lambda _: lambda *_, **__: value


Bug = tuple[Any, str, Callable[[Any], Any]]
BUGS: dict[str, tuple[Bug, Shape, Scenario, dict[str, Any]]] = {
    "no ledger record before the first place": (
        (Placing, "_records", no_ledger_record),
        *(placed.TWO, placed.the_home_changes, {}),
    ),
    "a log is sealed when it is full": (
        (PlacedLog, "_seal", sealed_when_full),
        *(placed.SMALL_LOGS, placed.a_log_is_compacted, {"when": "full"}),
    ),
    "places in directories that are missing are forgotten": (
        (replay, "_judge_absent", nothing_is_judged),
        *(placed.TWO, placed.a_directory_is_missing_at_one_start, {"keep": "none"}),
    ),
    "places in directories that were given up are forgotten": (
        (replay, "_judge_absent", nothing_is_judged),
        *(placed.TWO, placed.a_directory_is_given_up, {"back": False}),
    ),
    "a place counts whatever is stored": (
        (Replayed, "_stored", nothing_is_known),
        *(placed.TWO_JOURNALS, placed.a_copy_rots_and_is_replaced, {}),
    ),
    "a place of a journal that was away counts unread": (
        (LateReplayed, "_place", lambda _: Replayed._place),
        *(placed.TWO_JOURNALS, placed.a_journal_is_missing_at_one_start, {"compacted": True}),
    ),
    "places of a journal that was away are forgotten": (
        (LateReplayed, "_place", nothing_is_judged),
        *(placed.TWO_JOURNALS, placed.a_journal_is_missing_at_one_start, {"compacted": False}),
    ),
    "a directory lost beside the flush of its places": (
        (Stores, "_misplaced", says(False)),
        *(placed.TWO, placed.a_directory_is_dropped, {"when": "flushing, full"}),
    ),
    "a directory lost before the flush of its places": (
        (LedgerStorage, "_directory_dropped", says(None)),
        *(placed.TWO, placed.a_directory_is_dropped, {"when": "after"}),
    ),
    "a directory lost beside a write": (
        (PlacedLog, "fail", says(None)),
        *(placed.TWO, placed.a_directory_is_dropped, {"when": "under way"}),
    ),
    "a placed log is not synced": (
        (GrowingLog, "append_synced", not_synced),
        *(placed.ONE, placed.the_index_is_rebuilt, {"keep": "none", "with_states": True}),
    ),
    "acknowledged before the journal": (
        (Placing, "_written", acknowledged_when_written),
        *(placed.ONE, placed.a_record_of_places_is_torn, {"seed": 0}),
    ),
    "rot is not seen": (
        (journal.Replay, "damage", lambda _: property(lambda self: [])),
        *(placed.ONE, placed.a_bit_of_a_place_flips, {"at": 9}),
    ),
}


@pytest.mark.parametrize("name", BUGS)
def test_a_bug_of_placed_entries_breaks_its_test(name: str):
    bug, shape, scenario, how = BUGS[name]
    with Mutant("", "", *bug).applied(), pytest.raises(AssertionError):
        staged(shape, scenario, **how)
    staged(shape, scenario, **how)
