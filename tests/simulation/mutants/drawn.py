"""Bugs that show only in what is drawn apart: ways that stay cut, copies that rot while they are
made, reads of a few keys, live segments that are read from the middle of an entry."""

from dataclasses import replace
from typing import Any

from bookie_server.logs import rebuild
from bookie_server.reclaim import compact as compactor
from spark_ledger.bookies import directory
from spark_ledger.ledger import cluster, quorum
from spark_ledger.topic.entry import key_filter
from spark_ledger.topic.read import slice_reader
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
CHANGED = {
    "quorum": (3, 3, 2),
    "bookies": 5,
    "faults": ("kill", "partition"),
    "between_s": 0.5,
    "over_budget": False,
    "lasting": False,
}
REBUILT = {**CHANGED, "faults": ("index lost",), "directories": 2, "tight": False}
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


def rack_of_a_member_forgotten(info: Any) -> Any:
    """A change does not know on which racks the members are that stay."""

    def without(self: Any, bookie_id: str) -> Any:
        return replace(info(self, bookie_id), rack="")

    return without


def policy_asked_once(place: Any) -> Any:
    """One's own policy decides about new ensembles, not about changes of them."""

    def placed(self: Any, quorum: Any, slots: Any, candidates: Any, members: Any) -> Any:
        if members:
            return cluster.Cluster(
                *(self.records, self.bookies, self.directory, self.config, self.rng)
            ).place(quorum, slots, candidates, {})
        return place(self, quorum, slots, candidates, members)

    return placed


def last_record_left_out(put: Any) -> Any:
    """An index that is made anew lacks the last record of each log."""

    async def without(self: Any, chunk: Any, counts: Any) -> None:
        await put(self, chunk._replace(records=chunk.records[:-1]), counts)

    return without


def cut_forgotten(piece_of: Any) -> Any:
    """Rows are taken from the beginning of the entry that is cut."""

    def of(wanted: Any, header: Any, before: int) -> Any:
        piece = piece_of(wanted, header, before)
        piece["skip"] = 0
        return piece

    return of


MUTANTS = (
    Mutant(
        "every fence is needed",
        "liveness",
        quorum.Quorum,
        "covers_ensemble",
        every_fence_is_needed,
        LASTING,
    ),
    Mutant(
        "copy taken as it was written",
        "compaction",
        compactor.Compactor,
        "_move_index",
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
        "rack of a member forgotten",
        "placement",
        directory.BookieDirectory,
        "info",
        rack_of_a_member_forgotten,
        {**CHANGED, "racks": "hard"},
    ),
    Mutant(
        "policy asked once",
        "placement",
        cluster.Cluster,
        "place",
        policy_asked_once,
        {**CHANGED, "own_policy": True},
    ),
    Mutant(
        "last record left out of a new index",
        "rebuild",
        rebuild._Rebuild,
        "_put_chunk",
        last_record_left_out,
        REBUILT,
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
