"""The parts with which a broker writes the acknowledgements of a topic's partitions."""

import asyncio
import random
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import dataclass, field
from itertools import count
from typing import NamedTuple, Protocol

from spark_ledger.ledger.client import LedgerStore
from spark_ledger.ledger.writer import AsyncLedgerWriter
from spark_ledger.metadata.cluster import ClusterGuard
from spark_ledger.metadata.shared_multis import SharedMultis
from spark_ledger.topic.acks.entries import AckKey, AckState
from spark_ledger.topic.acks.sets import ACK_BYTES_MAX, AckBudget
from spark_ledger.topic.log.intents import Intent
from spark_ledger.topic.log.topics import TopicInfo

INLINE_WRITES_PER_S = 50
LONG_AGO_S = float("-inf")


class MadeForAcks(Protocol):
    """A new ledger, and the open intent under which it was made."""

    @property
    def writer(self) -> AsyncLedgerWriter: ...

    @property
    def intent(self) -> Intent: ...


class InlinePace:
    """When the next partition of a broker may write its states into its node."""

    def __init__(self) -> None:
        self._next_s = LONG_AGO_S

    async def turn(self) -> None:
        now_s = asyncio.get_running_loop().time()
        self._next_s = max(now_s, self._next_s + 1 / INLINE_WRITES_PER_S)
        await asyncio.sleep(self._next_s - now_s)


class AckLimits(NamedTuple):
    """What bounds the acknowledgements of all topics of a broker."""

    pace: InlinePace
    budget: AckBudget


@dataclass(frozen=True, slots=True)
class AckContext:
    """The parts with which the acknowledgements of a topic are written. `is_needed`: whether
    a subscription needs this state in a partition, by the metadata store as of the call.
    `lowest_position`: an offset below which every subscription has acknowledged all messages of the
    partition; 0 without subscriptions. `now_ms`: about the store's time. `multis` sends the writes
    of the nodes. `budget` counts all sets of acknowledged messages at the broker. `looks` numbers
    reads of nodes and records, in the order in which they begin or end."""

    ledgers: LedgerStore
    topic: TopicInfo
    make_ledger: Callable[[], Awaitable[MadeForAcks]]
    is_needed: Callable[[int, AckKey, AckState], Awaitable[bool]]
    lowest_position: Callable[[int], Awaitable[int]]
    now_ms: Callable[[], int]
    guard: ClusterGuard
    pace: InlinePace
    rng: random.Random
    multis: SharedMultis
    budget: AckBudget = field(default_factory=lambda: AckBudget(ACK_BYTES_MAX))
    looks: Iterator[int] = field(default_factory=lambda: count(1))
