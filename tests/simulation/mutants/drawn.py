"""Bugs that show only in what is drawn apart: ways that stay cut, copies that rot while they are
made, reads of a few keys, live segments that are read from the middle of an entry."""

from typing import Any

from bookie_server import compactor
from spark_ledger.ledger import quorum
from spark_ledger.topic import key_filter, slice_reader
from tests.simulation.mutants.mutant import Mutant
from tests.simulation.mutants.storing import RECLAIMED

LASTING = {
    "quorum": (3, 3, 2),
    "bookies": 4,
    "faults": (),
    "lasting": True,
    "over_budget": False,
    "recoverers": 0,
}
ROTTEN_COPIES = {**RECLAIMED, "faults": ("rotten copy", "restart")}
TOPICS = {
    "topics": True,
    "faults": (),
    "churn": True,
    "over_budget": False,
    "chaos_s": 12.0,
    "operators": False,
    "lasting": False,
}


def every_fence_is_needed(_: Any) -> Any:
    """A recovery begins only when nobody is silent, not when every ack quorum has an answer."""

    def covered(self: Any, silent: int) -> bool:
        return not silent

    return covered


def copy_taken_as_written(turn: Any) -> Any:
    """Compaction does not mind what it reads of its copy: the source goes."""

    async def turned(self: Any, copy_id: int, source: int) -> tuple[int, bool]:
        pointing, _ = await turn(self, copy_id, source)
        return pointing, True

    return turned


def first_key_only(might_contain: Any) -> Any:
    """An entry is asked for the first of the keys, not for each."""

    def asked(self: Any, partition: int, entry_ids: Any, keys: Any) -> Any:
        return might_contain(self, partition, entry_ids, keys[:1])

    return asked


def cut_forgotten(piece_of: Any) -> Any:
    """Rows are taken from the beginning of the entry that is cut."""

    def of(wanted: Any, header: Any, before: int) -> Any:
        return piece_of(wanted, header, before)._replace(skip=0)

    return of


MUTANTS = (
    Mutant(
        "every fence is needed",
        "liveness",
        quorum.Quorum,
        "covered",
        every_fence_is_needed,
        LASTING,
    ),
    Mutant(
        "copy taken as it was written",
        "compaction",
        compactor.Compactor,
        "_turn_to",
        copy_taken_as_written,
        ROTTEN_COPIES,
    ),
    Mutant(
        "one of several keys looked for",
        "key filters",
        key_filter.KeyFilters,
        "might_contain",
        first_key_only,
        {**TOPICS, "also": ("keys",)},
    ),
    Mutant(
        "cut within an entry forgotten",
        "hazard 33",
        slice_reader,
        "piece_of",
        cut_forgotten,
        {**TOPICS, "also": ("live cuts",)},
    ),
)
