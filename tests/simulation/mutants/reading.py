"""Bugs of readers: the end of the stream, damaged copies, what is confirmed."""

import asyncio
from contextlib import suppress
from typing import Any

from bookie_server.api.entry import HEADER_BYTES, NO_ENTRY, Entry, unpack_header
from bookie_server.api.status import Meaning, Status
from spark_ledger.bookies import local_reads
from spark_ledger.errors import NoSuchEntry
from spark_ledger.ledger import cluster, ledger_view, reader, recovery
from tests.simulation.mutants.mutant import Mutant

TAILED = {
    "quorum": (4, 3, 2),
    "bookies": 6,
    "faults": ("slow network", "kill", "blank", "lagging store"),
    "between_s": 0.6,
    "tailers": 2,
    "writers": 2,
}
GARBLED = {**TAILED, "faults": ("garbled copies", "slow network"), "slow": 0.05}
TAKEN_OVER = {
    **GARBLED,
    "quorum": (3, 2, 2),
    "bookies": 3,
    "faults": ("garbled copies", "slow network", "zombie"),
    "between_s": 0.4,
    "recoverers": 3,
}
WAITING = {**TAILED, "quorum": (5, 2, 2), "bookies": 5, "faults": (), "chaos_s": 8.0}
NEAR = {**TAILED, "faults": ("slow network",), "places": 1, "tight": True}
ROTTEN = {**NEAR, "quorum": (4, 4, 4), "bookies": 5, "faults": ("bit rot",)}


def undelivered_is_the_end(unreadable: Any) -> Any:
    def ended(self: Any, entry_id: int, refusals: Any) -> Any:
        return NoSuchEntry(f"there is no entry {entry_id}", ledger_id=self.ledger_id)

    return ended


def lac_as_last_heard(heard: Any) -> Any:
    def forgetful(self: Any, lac: int) -> None:
        self._lac = lac

    return forgetful


def bad_digest_is_negative(judge: Any) -> Any:
    def judged(*args: Any) -> Any:
        said = judge(*args)
        if said is not None and str(said[1]).startswith(Status.BAD_DIGEST.name):
            return Meaning.NEGATIVE, said[1]
        return said

    return judged


def unchecked_entry(unpack_entry: Any) -> Any:
    def unpacked(data: Any) -> Any:
        return Entry(unpack_header(data), memoryview(data)[HEADER_BYTES:])

    return unpacked


def unchecked_at_its_location(_checked: Any) -> Any:
    def unchecked(_ledger_id: int, _ids: Any, found: list[memoryview]) -> list[Entry]:
        return [Entry(unpack_header(data), data[HEADER_BYTES:]) for data in found]

    return unchecked


def bookie_not_asked(fill: Any) -> Any:
    async def filled(self: Any, request: Any, response: Any, asked: bool) -> Any:
        whole = await fill(self, request, response, asked)
        return response if whole is None and asked else whole

    return filled


def nothing_confirmed_is_the_end(wait_for_entry: Any) -> Any:
    async def waited(self: Any, entry_id: int) -> int:
        last: int = await self.refresh_last_add_confirmed()
        return last if last == NO_ENTRY else await wait_for_entry(self, entry_id)

    return waited


def polls_one_write_set(listen_to_all: Any) -> Any:
    async def listen(self: Any, after: int, deadline: float, heard: Any) -> None:
        members = self._view.record.last_fragment.ensemble
        of_one = [members[slot] for slot in self._view.quorum.write_set(max(0, after))]
        listening = [self._listen(bookie, after, deadline, heard) for bookie in of_one]
        with suppress(TimeoutError):
            async with asyncio.timeout_at(deadline):
                await ledger_view.run_until_one_ends([*listening, self._follow_record()])

    return listen


L = reader.AsyncLedgerReader
MUTANTS = (
    Mutant(
        "undelivered taken for the end",
        "1.6",
        L,
        "_unreadable_error",
        undelivered_is_the_end,
        TAILED,
    ),
    Mutant(
        "a reader's LAC goes back",
        "1.6 (9)",
        ledger_view.LedgerView,
        "note_lac",
        lac_as_last_heard,
        TAILED,
    ),
    Mutant(
        "bad digest counted as negative",
        "BK#4789",
        recovery,
        "judge_response",
        bad_digest_is_negative,
        TAKEN_OVER,
    ),
    Mutant("entries not checked", "invariant 5", cluster, "unpack_entry", unchecked_entry, GARBLED),
    Mutant(
        "entries not checked at their locations",
        "invariant 5",
        local_reads,
        "_unpack_checked",
        unchecked_at_its_location,
        ROTTEN,
    ),
    Mutant(
        "bookie not asked for what cannot be read",
        "invariant 36",
        local_reads.LocalReads,
        "_fill",
        bookie_not_asked,
        NEAR,
    ),
    Mutant(
        "nothing confirmed taken for the end",
        "BK#2612",
        L,
        "wait_for_entry",
        nothing_confirmed_is_the_end,
        TAILED,
    ),
    Mutant(
        "long poll of one write set",
        "BK#1404",
        ledger_view.NewsListener,
        "_listen_to_all",
        polls_one_write_set,
        WAITING,
    ),
)
