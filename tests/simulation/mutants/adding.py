"""Bugs of the writer: acknowledgements, ensemble changes, closing."""

from typing import Any

from spark_ledger.ledger import add_pipeline, pending_adds
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


MUTANTS = (
    Mutant(
        "acks of replaced bookies kept",
        "BK#4097",
        pending_adds.PendingAdds,
        "drop_acks",
        keeps_acks_of_the_replaced,
    ),
    Mutant(
        "un-ack interleaved with delivery",
        "BK#3005",
        add_pipeline.AddPipeline,
        "adopt",
        delivers_while_unacking,
        STRIPED,
    ),
)
