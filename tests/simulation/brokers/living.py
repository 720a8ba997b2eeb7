"""Brokers that live on: after healing, and before any of them stops, maintenance cleans beside them
until nothing changes any more, and what is left is compared with what may be left (T14).

Always true: nobody is killed, and no intent of a broker ends: what the topic dropped goes all the
same, after its delete delay. A ledger to which the topic never referred stays while its intent is
open, and what a query wrote until a later version is committed; neither is judged here.
"""

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from spark_ledger.broker import watch
from spark_ledger.errors import LedgerError
from spark_ledger.metadata import paths
from spark_ledger.metadata.store import StoreError
from spark_ledger.topic.client import TopicClient
from spark_ledger.topic.log.intents import QUERY
from spark_ledger.topic.log.records import IntentRecord, IntentState, decode_intent
from spark_ledger.topic.upkeep.compactor import compact
from spark_ledger.topic.upkeep.janitor import Janitor
from tests.simulation import invariants
from tests.simulation.topic_ghost import BROKERED
from tests.simulation.topic_rest import needed_ledgers
from tests.simulation.world import Client

if TYPE_CHECKING:
    from tests.simulation.brokers.work import BrokerWork

PASS_S = 300.0
PASSES_MAX = 40
AT_REST = 3
SELDOM_S = 600.0
"""How often brokers look whether others live, so that hours cost no time."""
LEASE_S = 1e9
"""Nobody is taken for gone."""


class Living:
    """Of one run."""

    def __init__(self, brokers: "BrokerWork") -> None:
        self._brokers = brokers
        self._work = brokers.work
        self._world = brokers.world

    async def comes_to_rest(self) -> None:
        """Everything is well, and each process that uses topics is at work or idle."""
        client = await self._world.client("maintenance beside brokers")
        with _seldom():
            await client.run(self._clean(client), "cleans")
        self._world.ghost.meet("brokers came to rest alive")

    async def _clean(self, client: Client) -> None:
        topics = self._work.client(client)
        await topics.topics.change_policies(BROKERED, {"delete_delay_ms": 0})
        try:
            await compact(topics, BROKERED)
        except (LedgerError, StoreError) as error:  # it is judged all the same
            self._work.met(client, "compact beside brokers", error)
        janitor = Janitor(client.session, client.ledgers, client.rng, lease_s=LEASE_S)
        calm = 0
        for _ in range(PASSES_MAX):
            await asyncio.sleep(PASS_S)
            report = await janitor.clean(force=True)
            calm = 0 if report.closed or report.deleted else calm + 1
            if calm == AT_REST:
                break
        invariants.cleaning_ends(self._world.ghost, f"beside brokers: {report}", calm == AT_REST)
        await self._judge_ledgers(topics)
        self._judge_memory()

    async def _judge_ledgers(self, topics: TopicClient) -> None:
        log = self._brokers.log
        needed = await needed_ledgers(self._work, topics, log)
        folded = await topics.log(log.topic_id).fold(fresh=True)
        for ledger_id, ledger in self._world.ghost.ledgers.items():
            record = ledger.record
            if ledger.deleted or record.topic != log.topic_id or not ledger.closed:
                continue
            intent = self._intent(record.intent)
            at_work = intent.state is IntentState.OPEN
            waits = at_work and (intent.kind == QUERY or ledger_id not in folded.dropped)
            kept = ledger_id in needed or waits
            invariants.nothing_unreferred_is_left(self._world.ghost, ledger_id, kept)

    def _intent(self, intent_id: str) -> IntentRecord:
        node = self._world.store.peek(paths.intent(intent_id))
        assert node is not None, "it is kept for days"
        return decode_intent(node.value)

    def _judge_memory(self) -> None:
        """Of what is gone a broker keeps nothing."""
        left = []
        for one in self._brokers.living():
            held = [topic.info.id for topic in one.broker.open_topics()]
            followed = tuple(one.broker.client._followers)
            left += [f"{one.name} follows {id_}" for id_ in followed if id_ not in held]
        invariants.what_is_gone_is_forgotten(self._world.ghost, left)


@contextmanager
def _seldom() -> Iterator[None]:
    names = ("TICK_S", "PROBE_EVERY_S")
    before = {name: getattr(watch, name) for name in names}
    try:
        for name in names:
            setattr(watch, name, SELDOM_S)
        yield
    finally:
        for name, value in before.items():
            setattr(watch, name, value)
