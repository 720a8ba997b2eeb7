"""What a person may set of a broker."""

from dataclasses import dataclass, field

from spark_ledger.broker.owner.tail import TAIL_BYTES_MAX
from spark_ledger.broker.owner.topic_commits import RollLimits


@dataclass(frozen=True, slots=True)
class BrokerSettings:
    """`auto_create`: a topic that a client names and that is not there is made, with so many
    partitions (0: one that is not partitioned, as in Pulsar). `tail_bytes`: of batches kept in
    memory for consumers at the end."""

    auto_create: bool = True
    auto_create_partitions: int = 0
    tail_bytes: int = TAIL_BYTES_MAX
    roll: RollLimits = field(default_factory=RollLimits)
