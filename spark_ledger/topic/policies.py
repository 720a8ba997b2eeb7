"""What a topic asks of the ledgers that hold it; fixed at its creation.

Always true: E >= Qw >= Qa >= 1. Two task ledgers are interchangeable only if their policies are
equal, so the policies are part of the ledger cache's key.
"""

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from spark_ledger import errors

DURABILITIES = ("synced", "page-cache")


@dataclass(frozen=True, slots=True)
class TopicPolicies:
    """Quorums, durability, and when a task ledger is rolled (whichever comes first)."""

    ensemble_size: int = 3
    write_quorum: int = 3
    ack_quorum: int = 2
    durability: str = "synced"
    ledger_bytes_max: int = 1 << 30
    ledger_age_s_max: int = 3600

    def __post_init__(self) -> None:
        if not self.ensemble_size >= self.write_quorum >= self.ack_quorum >= 1:
            raise errors.BadConfig(
                f"quorums {self.ensemble_size}/{self.write_quorum}/{self.ack_quorum}:"
                " ensemble >= write quorum >= ack quorum >= 1 does not hold"
            )
        if self.durability not in DURABILITIES:
            raise errors.BadConfig(f"durability '{self.durability}' is none of {DURABILITIES}")


def to_json(policies: TopicPolicies) -> dict[str, Any]:
    return asdict(policies)


def from_json(plain: Mapping[str, Any]) -> TopicPolicies:
    """Fields of a later version that this one does not know are left out."""
    known = TopicPolicies.__dataclass_fields__
    return TopicPolicies(**{name: value for name, value in plain.items() if name in known})
