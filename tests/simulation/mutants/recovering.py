"""Bugs of recovery: fencing, the tail, the close."""

from typing import Any

from spark_ledger.bookies import bookie_client
from spark_ledger.ledger import quorum, recovery
from tests.simulation.mutants.mutant import Mutant

R = recovery.Recovery
SLOW = {
    "quorum": (3, 3, 2),
    "bookies": 3,
    "faults": ("slow network",),
    "slow": 0.3,
    "writers": 2,
    "recoverers": 2,
}


def never_fences(read: Any) -> Any:
    async def unfenced(self: Any, *args: Any, **options: Any) -> Any:
        options["fence"] = False
        return await read(self, *args, **options)

    return unfenced


def one_negative_is_enough(needed: Any) -> Any:
    return property(lambda self: 1)


def closes_at_what_was_heard(write_back_tail: Any) -> Any:
    async def nothing(self: Any, pipeline: Any, start: int) -> None:
        return

    return nothing


def advancing_lac_in_write_backs(write_back: Any) -> Any:
    def advancing(self: Any, entry: Any, frozen_lac: int) -> Any:
        return write_back(self, entry, entry.header.entry_id - 1)

    return advancing


def length_of_what_was_heard(end_at: Any) -> Any:
    async def nothing_counted(self: Any, last: int) -> Any:
        return recovery.End(last, 0, 0)

    return nothing_counted


MUTANTS = (
    Mutant(
        "recovery reads do not fence",
        "BK#2614",
        bookie_client.BookieClient,
        "read",
        never_fences,
        SLOW,
    ),
    Mutant(
        "one negative is enough", "1.2", quorum.Quorum, "negatives_needed", one_negative_is_enough
    ),
    Mutant("recovery closes at the LAC", "1.7", R, "_write_back_tail", closes_at_what_was_heard),
    Mutant("write-backs advance the LAC", "D5", R, "_write_back", advancing_lac_in_write_backs),
    Mutant("length not of the last entry", "D3", R, "_end_at", length_of_what_was_heard),
)
