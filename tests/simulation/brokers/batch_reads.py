"""Somebody who reads once, as a batch of Spark does, when producers have had receipts.

Always true: it is judged only where nothing stands in the way: no fault is on, or all has healed;
and of a live segment only if its owner is the partition's, lived and went on all the while, and if
its ledger was not fenced meanwhile.
"""

import asyncio
from typing import TYPE_CHECKING

from spark_ledger.broker.log.ownership import Ownership
from spark_ledger.errors import LedgerError
from spark_ledger.metadata.ledger_record import RecordState
from spark_ledger.metadata.store import StoreError
from spark_ledger.topic.commit.hand_over import owner_name
from spark_ledger.topic.read import live
from tests.simulation import invariants
from tests.simulation.world import Client

if TYPE_CHECKING:
    from tests.simulation.brokers.work import BrokerWork

REST_S = 0.5
HEALED_S = 1.0
"""How often it is looked whether all is well."""


class BatchReads:
    """Of one run."""

    def __init__(self, work: "BrokerWork") -> None:
        self._work = work
        self._rng = work.world.loop.random_for("batch reads")
        self._told: dict[int, int] = {}
        """By partition: one past the last offset with a receipt."""
        self._came = asyncio.Event()

    def receipt(self, partition: int, end: int) -> None:
        """A producer has had one for what ends there."""
        self._told[partition] = max(end, self._told.get(partition, 0))
        self._came.set()

    async def go_on(self) -> None:
        """Until it is cancelled."""
        world = self._work.world
        client = await world.client("batch reader")
        while True:
            while self._work.work.plan.faults and world.observers.well_since is None:  # noqa: ASYNC110
                await asyncio.sleep(HEALED_S)
            await self._came.wait()
            self._came.clear()
            doing = client.run(self._read(client), "reads a batch")
            (outcome,) = await asyncio.gather(doing, return_exceptions=True)
            if isinstance(outcome, Exception) and not isinstance(outcome, LedgerError | StoreError):
                raise outcome
            await asyncio.sleep(self._rng.uniform(0.0, REST_S))

    async def _read(self, client: Client) -> None:
        told, before = dict(self._told), self._awake()
        topics, topic_id = self._work.work.client(client), self._work.log.topic_id
        state = await topics.log(topic_id).fold(fresh=True)
        ends = await live.ends_of(client.ledgers, state)
        owners = await Ownership(client.session, "", "").owners(topic_id, fresh=True)
        awake = [name for name in self._awake() if name in before]
        for partition, end in told.items():
            held = state.partitions[partition]
            found = held.end_offset
            if held.live is not None:
                owner = owners.of(partition)
                its = owner is not None and owner_name(owner.broker) == held.live.owner
                record = self._work.world.ghost.ledgers[held.live.ledger_id].record
                if not (its and held.live.owner in awake and record.state is RecordState.OPEN):
                    continue
                found += ends[partition].rows
            self._work.judged(
                invariants.a_read_has_what_had_a_receipt_before,
                *(self._work.world.ghost, partition, found, end),
            )

    def _awake(self) -> list[str]:
        living = (one for one in self._work.living() if not one.process.paused)
        return [owner_name(one.broker.id) for one in living]
