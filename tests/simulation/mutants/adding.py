"""Bugs of the writer: acknowledgements, ensemble changes, what it announces, its close."""

from typing import Any

from bookie_server.api.status import Status
from spark_ledger.ledger import add_pipeline, ensemble_change, quorum, writer
from spark_ledger.ledger.transitions import with_replacements
from tests.simulation.mutants.mutant import Mutant

STRIPED = {
    "quorum": (5, 3, 2),
    "bookies": 7,
    "faults": ("slow network", "kill", "stall"),
    "slow": 0.1,
    "between_s": 0.6,
    "writers": 2,
    "recoverers": 0,
    "tailers": 0,
    "entries": (20, 60),
}
STALLED = {**STRIPED, "quorum": (5, 2, 2), "faults": ("kill", "stall", "slow network")}
HUNG = {**STALLED, "chaos_s": 10.0, "add_timeout_s": 60.0}
"""A hang of any moment is told from an add that waits for a reason: it outlives the faults."""
CHANGING = {**HUNG, "faults": ("kill", "slow store")}
NO_SPARE = {
    **HUNG,
    "quorum": (3, 3, 2),
    "bookies": 3,
    "faults": ("slow network", "kill", "partition"),
}
LATE = {**HUNG, "faults": ("slow network", "kill", "clog"), "slow": 0.2}
BUSY = {**STRIPED, "faults": ("overload",), "between_s": 0.4}


def keeps_acks_of_the_replaced(drop_acks: Any) -> Any:
    return lambda self, slots: None


def delivers_while_unacking(adopt: Any) -> Any:
    def one_pass(self: Any, record: Any, replacements: Any) -> None:
        self.record = record
        self.pending.change_in_flight = False
        mask = sum(1 << index for index in replacements)
        for add in list(self.pending):
            add.acks &= ~mask
            self.confirm()  # the rest of the queue still carries acks of the replaced
        self.pending.change_in_flight = True
        adopt(self, record, replacements)

    return one_pass


def adopts_before_the_store_knows(replace: Any) -> Any:
    async def deferred(self: Any, replacements: Any) -> bool:
        pipeline = self._pipeline
        first_entry = pipeline.pending.last_add_confirmed + 1
        failed = {index: pipeline.slots[index].bookie_id for index in replacements}
        local = with_replacements(pipeline.record, replacements, first_entry)
        pipeline.adopt(local, replacements)
        pipeline.record = await self._commit_until_known(failed, replacements, first_entry)
        return True

    return deferred


def resends_what_differs(retry_slot: Any) -> Any:
    """The ensemble is the same as before, so there is nothing to send again."""

    def same_bookie(self: Any, index: int) -> None:
        slot = self.slots[index]
        slot.state, slot.generation = add_pipeline.SlotState.HEALTHY, slot.generation + 1

    return same_bookie


def changes_for_a_late_failure(answered: Any) -> Any:
    """A failure of a bookie that was replaced begins a change that finds nobody to replace."""

    def counted(self: Any, add: Any, index: int, bookie: str, generation: int, *rest: Any) -> None:
        late = generation < self.slots[index].generation
        if late and rest[-1].status is Status.IO_ERROR and self.failure is None:
            self.pending.change_in_flight = True
        answered(self, add, index, bookie, generation, *rest)

    return counted


def delivers_before_the_change_ended(adopt: Any) -> Any:
    def flag_last(self: Any, record: Any, replacements: Any) -> None:
        deliver, self.confirm = self.confirm, lambda: None
        adopt(self, record, replacements)
        self.pending.change_in_flight = True
        self.confirm = deliver
        self.confirm()
        self.pending.change_in_flight = False

    return flag_last


def changes_at_what_was_pushed(commit: Any) -> Any:
    async def from_the_next(self: Any, failed: Any, replacements: Any, first_entry: int) -> Any:
        return await commit(self, failed, replacements, self._next_entry)

    return from_the_next


def closes_without_draining(drained: Any) -> Any:
    async def at_once(self: Any) -> None:
        return

    return at_once


def moves_the_whole_fragment(committed: Any) -> Any:
    async def moved(self: Any, failed: Any, replacements: Any, first_entry: int) -> Any:
        first = self._pipeline.record.last_fragment.first_entry
        return await committed(self, failed, replacements, first)

    return moved


def header_says_all_before_it(pack_header: Any) -> Any:
    return lambda header: pack_header(header._replace(last_add_confirmed=header.entry_id - 1))


def overload_is_failure(refused: Any) -> Any:
    def failed(self: Any, add: Any, index: int, since: float, result: Any) -> None:
        if result.status is Status.BUSY:
            self.slot_failed(index, "BUSY")
        else:
            refused(self, add, index, since, result)

    return failed


P, E = add_pipeline.AddPipeline, ensemble_change.EnsembleChange
W = writer.AsyncLedgerWriter
MUTANTS = (
    Mutant(
        "acks of replaced bookies kept",
        "BK#4097",
        quorum.PendingAdds,
        "drop_acks",
        keeps_acks_of_the_replaced,
        STRIPED,
    ),
    Mutant(
        "un-ack interleaved with delivery",
        "BK#3005",
        P,
        "adopt",
        delivers_while_unacking,
        {**STRIPED, "quorum": (5, 2, 2)},
    ),
    Mutant(
        "acks on an ensemble known only here",
        "BK#1591",
        E,
        "_replace",
        adopts_before_the_store_knows,
        STALLED,
    ),
    Mutant(
        "nothing resent to a bookie that came back",
        "BK#4459",
        P,
        "retry_slot",
        resends_what_differs,
        NO_SPARE,
    ),
    Mutant(
        "late failure begins a change",
        "BK#4261",
        P,
        "_take_result",
        changes_for_a_late_failure,
        LATE,
    ),
    Mutant(
        "delivery while a change is in flight",
        "BK#1857",
        P,
        "adopt",
        delivers_before_the_change_ended,
        CHANGING,
    ),
    Mutant(
        "fragment begins above what is confirmed",
        "BK#4651",
        W,
        "_commit_change",
        changes_at_what_was_pushed,
        STRIPED,
    ),
    Mutant(
        "change moves what was acked",
        "1.5 (8)",
        ensemble_change.EnsembleChange,
        "_commit_until_known",
        moves_the_whole_fragment,
        STRIPED,
    ),
    Mutant(
        "close does not wait for pending adds",
        "1.8",
        P,
        "wait_until_drained",
        closes_without_draining,
    ),
    Mutant(
        "header announces what is not confirmed",
        "1.4 (9)",
        writer,
        "pack_header",
        header_says_all_before_it,
    ),
    Mutant(
        "overload counted as failure", "hazard 43", P, "_handle_refusal", overload_is_failure, BUSY
    ),
)
