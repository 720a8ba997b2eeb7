"""Topics by name: created, opened, listed, deleted.

Always true: a topic is its id, minted when it is created; a name deleted and created again is
another topic. Creating and deleting are one multi each: a name without a log, or a log that can
be committed to without a name, is never seen.
"""

import random
from dataclasses import dataclass

from spark_ledger.metadata.store import MetadataStore
from spark_ledger.topic.names import TopicName
from spark_ledger.topic.policies import TopicPolicies

PARTITIONS_MAX = 100_000


@dataclass(frozen=True, slots=True)
class TopicInfo:
    """`partitions` are those at creation; they only grow (the folded state has today's)."""

    id: str
    name: TopicName
    partitions: int
    policies: TopicPolicies


class Topics:
    """Every method takes a name as a user types it and raises errors.TopicNameInvalid."""

    def __init__(self, store: MetadataStore, rng: random.Random) -> None:
        self.store = store

    async def create(
        self,
        name: str,
        partitions: int = 1,
        policies: TopicPolicies | None = None,
        *,
        exist_ok: bool = False,
    ) -> TopicInfo:
        """Make a topic. With `exist_ok` the topic that is there is returned as it is.

        Raises errors.TopicExists, errors.BadConfig for partitions out of 1 .. PARTITIONS_MAX.
        """
        raise NotImplementedError

    async def open(self, name: str, *, fresh: bool = True) -> TopicInfo:
        """The topic of that name. Raises errors.TopicNotFound, which lists the nearest names."""
        raise NotImplementedError

    async def list(self) -> list[TopicInfo]:
        """Every topic, by full name."""
        raise NotImplementedError

    async def delete(self, name: str) -> TopicInfo:
        """Remove the name and set the head to deleted, in one multi: when it returns nobody can
        commit to the topic. Its ledgers go later. Raises errors.TopicNotFound."""
        raise NotImplementedError
