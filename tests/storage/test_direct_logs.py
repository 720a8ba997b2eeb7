"""Entries that were placed in a ledger directory, where directories, journals and logs go and come
back; and the bugs that would show there, put in for the length of a run."""

from collections.abc import Callable, Coroutine
from typing import Any

import pytest

from bookie_server.logs.direct_log import DirectLog
from bookie_server.logs.entry_log import GrowingLog
from bookie_server.logs.scan import Scanned
from bookie_server.start import replay
from bookie_server.start.applier import Coverage, RecordApplier
from bookie_server.storage.appends import DirectWrites
from bookie_server.storage.directories import DirectoryStore, Stores
from bookie_server.storage.storage import LedgerStorage
from tests.simulation.disk import Keep
from tests.simulation.loop import run
from tests.simulation.mutants import Mutant
from tests.simulation.mutants.direct_logs import no_sync_of_the_mark
from tests.storage import direct_logs
from tests.storage.deeds import DEEDS
from tests.storage.points import PointFailed, enumerate_points
from tests.storage.rig import Shape
from tests.storage.stage import Stage

Scenario = Callable[..., Coroutine[Any, Any, None]]


FLUSHING = ("flushing", "flushing, full")


def staged(shape: Shape, scenario: Scenario, *more: Any, **named: Any) -> None:
    run(scenario(Stage(shape), *more, **named))


@pytest.mark.parametrize("keep", ["none", "random", "all"])
def test_a_placed_entry_that_was_acknowledged_is_there_after_a_crash(keep: Keep):
    staged(direct_logs.ONE, direct_logs.an_entry_is_placed, keep)


@pytest.mark.parametrize("stopped", [False, True])
def test_logs_that_ended_are_replayed_and_put_nothing_in_doubt(stopped: bool):
    staged(direct_logs.SMALL_LOGS, direct_logs.a_log_is_full, stopped=stopped)


def test_nothing_counts_before_the_journal_durably_tells_of_its_ledger():
    staged(direct_logs.ONE, direct_logs.the_journal_fails_beside_it)


def test_what_is_placed_in_a_new_home_before_any_flush_is_there_after_a_crash():
    staged(direct_logs.TWO, direct_logs.the_home_changes)


def test_a_flush_moves_no_mark_past_what_was_placed_after_it_began():
    staged(direct_logs.TWO, direct_logs.a_flush_waits)


def test_a_flush_moves_no_mark_past_what_no_index_was_told():
    staged(direct_logs.TWO, direct_logs.no_directory_has_space)


@pytest.mark.parametrize("when", ["full", "flushing", "flushed"])
def test_a_direct_log_is_not_compacted_before_the_index_knows_all_of_it(when: str):
    staged(direct_logs.SMALL_LOGS, direct_logs.a_log_is_compacted, when)


@pytest.mark.parametrize("keep", ["none", "all"])
def test_what_was_placed_in_a_directory_that_one_start_missed_is_served_when_it_is_back(keep: Keep):
    staged(direct_logs.TWO, direct_logs.a_directory_is_missing_at_one_start, keep)


@pytest.mark.parametrize("flushed", [False, True])
def test_what_a_directory_brings_back_replaces_nothing_that_was_taken_since(flushed: bool):
    staged(
        direct_logs.TWO, direct_logs.another_is_taken_while_the_directory_is_away, flushed=flushed
    )


@pytest.mark.parametrize(
    "shape", [direct_logs.ONE, direct_logs.TWO_JOURNALS], ids=["one", "two journals"]
)
def test_what_recovery_brought_for_a_placed_copy_that_rotted_is_not_replaced_at_replay(
    shape: Shape,
):
    staged(shape, direct_logs.a_copy_rots_and_is_replaced)


@pytest.mark.parametrize("when", ["under way", "after", "after, at once", *FLUSHING])
def test_a_directory_dropped_beside_placed_entries_takes_none_of_them_along(when: str):
    staged(direct_logs.TWO, direct_logs.a_directory_is_dropped, when)


@pytest.mark.parametrize("back", [False, True])
def test_what_was_placed_in_a_directory_that_was_given_up_is_served(back: bool):
    staged(direct_logs.TWO, direct_logs.a_directory_is_given_up, back)


def test_what_was_placed_after_a_directory_was_given_up_is_served_when_that_one_is_back():
    staged(direct_logs.TWO, direct_logs.another_is_taken_after_the_directory_was_given_up)


def test_a_stop_retires_the_journals_though_a_direct_log_ends_meanwhile():
    staged(direct_logs.SMALL_LOGS_TWO_JOURNALS, direct_logs.a_log_ends_while_the_node_stops)


@pytest.mark.parametrize("entry_id", range(3))
def test_a_log_of_a_flush_in_which_a_header_rotted_gets_no_map(entry_id: int):
    assert not run(direct_logs.a_log_without_footer_rots(Stage(direct_logs.ONE), entry_id)).is_whole


def test_what_was_placed_of_a_ledger_is_served_though_its_journal_is_missing():
    staged(direct_logs.TWO_JOURNALS, direct_logs.a_journal_is_missing_at_one_start)


@pytest.mark.parametrize("keep", ["none", "torn", "random"])
@pytest.mark.parametrize("with_states", [False, True])
def test_an_index_is_rebuilt_from_direct_logs_that_a_crash_cut_off(keep: Keep, with_states: bool):
    staged(direct_logs.ONE, direct_logs.the_index_is_rebuilt, keep, with_states=with_states)


@pytest.mark.parametrize("seed", range(12))
def test_a_torn_write_costs_nothing_that_was_acknowledged_and_the_node_goes_on(seed: int):
    staged(direct_logs.ONE, direct_logs.the_last_write_is_torn, seed)


@pytest.mark.parametrize("where", ["header", "payload", "zeros", "block"])
def test_what_rotted_below_what_was_synced_is_told_from_a_torn_write(where: str):
    staged(direct_logs.ONE, direct_logs.what_was_synced_rots, where)


def test_a_marked_log_that_is_gone_puts_every_ledger_in_limbo():
    staged(direct_logs.ONE, direct_logs.a_marked_log_is_gone)


# -- the bugs -----------------------------------------------------------------------------------


def told_at_once(tell: Any) -> Any:
    def nothing(self: Any, ledger_id: int, store: Any) -> None:
        self._named_directories[ledger_id] = store.id

    return nothing


def whatever_the_journal_says(placed_in: Any) -> Any:
    def acknowledged(self: Any, large: Any) -> None:
        self.pending_bytes -= large.bytes
        large.done.set_result(None)

    return acknowledged


def sealed_when_it_ended(end: Any) -> Any:
    async def ended(self: Any, log: Any) -> None:
        await end(self, log)
        self._logs.seal(log.log_id)

    return ended


def unmarked_when_it_ended(end: Any) -> Any:
    async def ended(self: Any, log: Any) -> None:
        await end(self, log)
        await self._index.mark_logs({log.log_id: None})
        await self._index.sync()

    return ended


def unmarked_before_the_index(write: Any) -> Any:
    async def written(
        self: Any, entries: Any, changes: Any, placed: Any = (), puts: int = 0
    ) -> None:
        await self.index.mark_logs(self.direct_log.marks(puts))
        await self.index.sync()
        await write(self, entries, changes, placed, puts)

    return written


def past_all_that_was_put(write: Any) -> Any:
    async def written(
        self: Any, entries: Any, changes: Any, placed: Any = (), puts: int = 0
    ) -> None:
        await write(self, entries, changes, placed, self.direct_log.puts if puts else 0)

    return written


def past_what_found_no_space(write: Any) -> Any:
    async def written(
        self: Any, entries: Any, changes: Any, placed: Any = (), puts: int = 0
    ) -> None:
        await write(self, entries, changes, placed, puts or self.direct_log.puts)

    return written


def synced_later(append: Any) -> Any:
    async def appended(self: Any, chunk: Any, *, sync: bool = False) -> Any:
        file = self.file

        class Unsynced:
            end = property(lambda _: file.end)

            async def append(self, buffers: Any, *, sync: bool = False) -> int:
                return int(await file.append(buffers))

        self.file = Unsynced()
        try:
            return await append(self, chunk, sync=sync)
        finally:
            self.file = file

    return appended


def forgotten_at_once(replay_direct_logs: Any) -> Any:
    async def replayed(storage: Any, *more: Any) -> None:
        await replay_direct_logs(storage, *more)
        await storage.forget_replayed_logs()

    return replayed


def nothing_is_done(_: Any) -> Any:
    async def nothing(*_: Any) -> None: ...

    return nothing


def nothing_is_known(stored: Any) -> Any:
    async def nothing(*_: Any) -> dict[int, None]:
        return {}

    return nothing


def gaps_are_filler(take: Any) -> Any:
    def taken(self: Any, chunk: Scanned) -> None:
        for record in chunk.records:
            self._next = record.location.position
            take(self, Scanned([record], [], 0))

    return taken


def only_of_ledgers_that_are_known(place: Any) -> Any:
    async def placed_of_known(self: Any, directory: str, ledger_id: int, locations: Any) -> None:
        if self._storage.state(ledger_id) is not None:
            await place(self, directory, ledger_id, locations)

    return placed_of_known


def all_is_torn(judge: Any) -> Any:
    def judged(self: Any, *more: Any) -> Any:
        damaged, torn = judge(self, *more)
        return [], [*damaged, *torn]

    return judged


def all_is_damage(judge: Any) -> Any:
    def judged(self: Any, *more: Any) -> Any:
        damaged, torn = judge(self, *more)
        return [*damaged, *torn], []

    return judged


def says(value: Any) -> Callable[[Any], Any]:
    return lambda _: lambda *_, **__: value


Bug = tuple[Any, str, Callable[[Any], Any]]
BUGS: dict[str, tuple[Bug, Shape, Scenario, dict[str, Any]]] = {
    "a direct log is not synced": (
        (GrowingLog, "append", synced_later),
        *(direct_logs.ONE, direct_logs.an_entry_is_placed, {"keep": "none"}),
    ),
    "direct logs are not replayed": (
        (replay, "replay_direct_logs", nothing_is_done),
        *(direct_logs.ONE, direct_logs.an_entry_is_placed, {"keep": "all"}),
    ),
    "a direct log is acknowledged from before its mark is durable": (
        (DirectLog, "_begin_log", no_sync_of_the_mark),
        *(direct_logs.ONE, direct_logs.an_entry_is_placed, {"keep": "none"}),
    ),
    "no ledger record before the first place": (
        (DirectWrites, "_name_directory", told_at_once),
        *(direct_logs.TWO, direct_logs.the_home_changes, {}),
    ),
    "nobody waits for the ledger record": (
        (DirectWrites, "_acknowledge", whatever_the_journal_says),
        *(direct_logs.ONE, direct_logs.the_journal_fails_beside_it, {}),
    ),
    "a log is sealed when it ended": (
        (DirectLog, "_end", sealed_when_it_ended),
        *(direct_logs.SMALL_LOGS, direct_logs.a_log_is_compacted, {"when": "full"}),
    ),
    "the mark goes when the log ended": (
        (DirectLog, "_end", unmarked_when_it_ended),
        *(direct_logs.SMALL_LOGS, direct_logs.a_log_is_full, {"stopped": False}),
    ),
    "the mark moves past all that was put": (
        (DirectoryStore, "write", past_all_that_was_put),
        *(direct_logs.TWO, direct_logs.a_flush_waits, {}),
    ),
    "the mark moves past what found no space": (
        (DirectoryStore, "write", past_what_found_no_space),
        *(direct_logs.TWO, direct_logs.no_directory_has_space, {}),
    ),
    "a place counts whatever is stored": (
        (RecordApplier, "_stored", nothing_is_known),
        *(
            direct_logs.TWO,
            direct_logs.another_is_taken_while_the_directory_is_away,
            {"flushed": False},
        ),
    ),
    "places of ledgers that no journal tells of are forgotten": (
        (RecordApplier, "add_locations", only_of_ledgers_that_are_known),
        *(direct_logs.TWO_JOURNALS, direct_logs.a_journal_is_missing_at_one_start, {}),
    ),
    "nothing is rescued from memory": (
        (LedgerStorage, "rescue", says([])),
        *(direct_logs.TWO, direct_logs.a_directory_is_given_up, {"back": False}),
    ),
    "a directory lost beside the flush of its places": (
        (Stores, "_has_lost_locations", says(False)),
        *(direct_logs.TWO, direct_logs.a_directory_is_dropped, {"when": "flushing, full"}),
    ),
    "a directory lost before the flush of its places": (
        (LedgerStorage, "_directory_dropped", says(None)),
        *(direct_logs.TWO, direct_logs.a_directory_is_dropped, {"when": "after"}),
    ),
    "a directory lost beside a write": (
        (DirectLog, "fail", says(None)),
        *(direct_logs.TWO, direct_logs.a_directory_is_dropped, {"when": "under way"}),
    ),
    "damage is taken for a torn write": (
        (Coverage, "judge", all_is_torn),
        *(direct_logs.ONE, direct_logs.what_was_synced_rots, {"where": "payload"}),
    ),
    "a torn write is taken for damage": (
        (Coverage, "judge", all_is_damage),
        *(direct_logs.ONE, direct_logs.the_last_write_is_torn, {"seed": 0}),
    ),
    "damage is overlooked": (
        (Coverage, "judge", says(([], []))),
        *(direct_logs.ONE, direct_logs.what_was_synced_rots, {"where": "header"}),
    ),
    "zeros are taken for filler": (
        (Coverage, "take", gaps_are_filler),
        *(direct_logs.ONE, direct_logs.what_was_synced_rots, {"where": "zeros"}),
    ),
}


@pytest.mark.parametrize("name", BUGS)
def test_a_bug_of_placed_entries_breaks_its_test(name: str):
    bug, shape, scenario, how = BUGS[name]
    with Mutant("", "", *bug).applied(), pytest.raises(AssertionError):
        staged(shape, scenario, **how)
    staged(shape, scenario, **how)


BUGS_AT_POINTS: dict[str, tuple[Bug, str]] = {
    "the mark moves before the index has what it passes": (
        (DirectoryStore, "write", unmarked_before_the_index),
        "flush of placed entries",
    ),
    "the mark goes before the index has what the log holds": (
        (DirectoryStore, "write", unmarked_before_the_index),
        "end of a direct log",
    ),
    "marks are forgotten before what was replayed is flushed": (
        (replay, "replay_direct_logs", forgotten_at_once),
        "replay of places",
    ),
}


@pytest.mark.parametrize("name", BUGS_AT_POINTS)
def test_a_bug_of_placed_entries_shows_between_two_operations(name: str):
    bug, of = BUGS_AT_POINTS[name]
    deed = next(deed for deed in DEEDS if deed.name == of)
    with Mutant("", "", *bug).applied(), pytest.raises(PointFailed):
        enumerate_points(deed, (("none", 0),))
