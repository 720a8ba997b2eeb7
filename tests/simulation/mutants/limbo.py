"""Bugs of limbo: what a node that may have lost something says, and when that is over."""

from typing import Any

from bookie_server.api.status import Meaning, Status
from bookie_server.ledgers import limbo as bookie_limbo
from spark_ledger.ledger import cluster, recovery
from spark_ledger.repair import limbo as repair_limbo
from tests.simulation.mutants.mutant import Mutant

TORN = {
    "quorum": (3, 3, 2),
    "bookies": 3,
    "faults": ("power cut while writing", "slow network"),
    "slow": 0.1,
    "between_s": 0.8,
    "writers": 2,
    "recoverers": 3,
    "tailers": 0,
    "journals": 1,
    "directories": 1,
}
MIXED = {**TORN, "faults": ("power cut while writing", "lost directory"), "between_s": 0.6}
BEREFT = {**TORN, "faults": ("lost directory", "kill", "slow network"), "slow": 0.05}


def torn_is_negative(verdict: Any) -> Any:
    def judged(quorum: Any, said: Any) -> Any:
        return verdict(quorum, [Meaning.NEGATIVE if m is Meaning.TORN else m for m in said])

    return judged


def lost_is_torn(recovery_meaning: Any) -> Any:
    def told(status: Status) -> Meaning:
        meaning: Meaning = recovery_meaning(status)
        return Meaning.TORN if status is Status.LIMBO else meaning

    return told


def copies_nothing(bring_back: Any) -> Any:
    async def nothing(self: Any) -> None:
        return

    return nothing


def concerns_nobody(judge: Any) -> Any:
    async def judged(self: Any, ledger_id: int, reason: str) -> tuple[str, bool]:
        return "", False

    return judged


MUTANTS = (
    Mutant(
        "torn counts as a plain negative at once",
        "limbo",
        recovery,
        "recovery_verdict",
        torn_is_negative,
        TORN,
    ),
    Mutant("lost counts like torn", "limbo", cluster, "recovery_meaning", lost_is_torn, MIXED),
    Mutant(
        "limbo cleared without its copies",
        "BP-46",
        repair_limbo._Repair,
        "_compare",
        copies_nothing,
        BEREFT,
    ),
    Mutant(
        "limbo of all cleared and no ledger put in it",
        "BP-46",
        bookie_limbo.Limbo,
        "_judge",
        concerns_nobody,
        BEREFT,
    ),
)
