"""After healing: all clients of topics end, then a fresh process checkpoints and cleans until
nothing changes any more, and what is left is compared with what may be left (T14).

Always true: the writers are gone by kill -9, so only leases and delete delays keep anything; a fold
from the newest checkpoint (which T1 compares with all commits ever) decides what may be left, not
the janitor.
"""

import asyncio
from collections.abc import Callable

from spark_ledger.errors import LedgerError
from spark_ledger.metadata import paths
from spark_ledger.metadata.ledger_record import RecordState
from spark_ledger.topic.acks.nodes import decode_pointer
from spark_ledger.topic.checkpointer import LOG_NODES_MAX
from spark_ledger.topic.client import TopicClient
from spark_ledger.topic.log import checkpoint
from spark_ledger.topic.log.records import IntentState, decode_intent
from spark_ledger.topic.subscription.records import decode_subscription
from spark_ledger.topic.upkeep.admin import TopicAdmin
from spark_ledger.topic.upkeep.garbage import UNUSED_LEASES
from spark_ledger.topic.upkeep.janitor import Janitor
from tests.simulation import invariants
from tests.simulation.ghost import LedgerGhost
from tests.simulation.store import EPOCH_MS
from tests.simulation.topic_ghost import LogGhost
from tests.simulation.topic_work import TopicWork
from tests.simulation.world import Client

LEASE_S = 0.4
"""Nobody is alive to show a heartbeat: each pass finds the silence that the one before it began."""
PASS_S = 0.8
TOLD_S = 5.0
"""After this time every watch has learned of the change."""
CLEANED_S = 1500.0 + UNUSED_LEASES * LEASE_S
"""Simulated: of many writers that fell silent together a few at a time are taken as gone; a job
that never gave a sign of life has many leases of time."""
JOBS_PASS_S = 12.0
"""Between two passes while only such jobs are left."""
AT_REST = 3
"""So many passes that change nothing are the end."""


class TopicRest:
    """Of one run. `undecidable`: ledgers whose end no process can decide (undecided.py)."""

    def __init__(self, work: TopicWork, undecidable: Callable[[LedgerGhost], bool]) -> None:
        self.work = work
        self.world = work.world
        self._undecidable = undecidable

    async def comes(self) -> None:
        """Everything is well and no client is at work."""
        there = [log for log in self.work.ghost.logs.values() if not log.state.deleted]
        used, client = list(self.work.used), await self.world.client("settler")
        await self._stop_following(used, client, there)
        for one, _ in used:
            if one.process.alive:
                one.kill()
        topics = self.work.client(client)
        await client.run(self._judge_logs(client, topics, there), "makes checkpoints")
        await client.run(self._clean(client), "cleans")
        await client.run(self._judge_ledgers(topics, there), "looks")
        self.world.ghost.meet("topics came to rest")

    async def _stop_following(
        self, used: list[tuple[Client, TopicClient]], client: Client, there: list[LogGhost]
    ) -> None:
        """Every process closes what it has, each topic changes once, and no watch is left."""
        for one, topics in used:
            if one.process.alive:
                await asyncio.gather(one.run(topics.close(), "closes"), return_exceptions=True)
        admin = TopicAdmin(self.work.client(client))
        for log in there:
            await client.run(admin.grow(log.name, len(log.state.partitions) + 1), "grows")
        await asyncio.sleep(TOLD_S)
        heads = [paths.topic_head(log.topic_id) for log in there]
        left = [f"{one.name}: {path}" for one, _ in used for path in one.session.watched()]
        left = [watch for watch in left if watch.partition(": ")[2] in heads]
        invariants.watches_come_back_to_the_baseline(self.world.ghost, left)

    # -- cleaning ------------------------------------------------------------------------------

    async def _clean(self, client: Client) -> None:
        """Pass after pass, until several change nothing and no client counts as at work."""
        rng = self.world.loop.random_for("topic rest")
        janitors = [
            Janitor(client.session, client.ledgers, client.rng, lease_s=LEASE_S)
            for _ in range(rng.choice((1, 2)))
        ]
        if len(janitors) > 1:
            self.world.ghost.meet("two janitors at once")
        deadline, calm, left = self.world.loop.now + CLEANED_S, 0, ""
        opened: list[str] = []
        while calm < AT_REST and self.world.loop.now < deadline:
            jobs = opened and all(name.startswith("batch-") for name in opened)
            await asyncio.sleep(JOBS_PASS_S if jobs else PASS_S)
            reports = await asyncio.gather(*(one.clean(force=True) for one in janitors))
            opened = self._opened()
            left = f"{reports[0]}, {len(opened)} intents are open"
            done = any(r.condemned or r.closed or r.deleted or r.topics for r in reports)
            calm = 0 if done or opened else calm + 1
        self.world.trace.note(client.name, f"cleaned: {left}")
        invariants.cleaning_ends(self.world.ghost, left, calm == AT_REST)

    def _opened(self) -> list[str]:
        """The intents that are open."""
        store, found = self.world.store, []
        for name in store.peek_children(paths.INTENTS):
            node = store.peek(paths.intent(name))
            if node is not None and decode_intent(node.value).state is IntentState.OPEN:
                found.append(name)
        return found

    # -- what is left --------------------------------------------------------------------------

    async def _judge_logs(self, client: Client, topics: TopicClient, there: list[LogGhost]) -> None:
        """A checkpoint more, and of the log that is left which a fold needs."""
        for log in there:
            try:
                record = await topics.checkpoints.make(log.topic_id)
            except LedgerError as error:  # a bookie that is not whole any more takes no copy
                self.work.met(client, "last checkpoint", error)
                continue
            previous = 0 if record is None else record.previous
            left = self.world.store.peek_children(paths.topic_log(log.topic_id))
            numbers = sorted(int(name) for name in left)
            span = (previous, log.state.next)
            invariants.a_log_is_its_tail(
                self.world.ghost, log.topic_id, numbers, span, LOG_NODES_MAX
            )

    async def _judge_ledgers(self, topics: TopicClient, there: list[LogGhost]) -> None:
        needed: dict[int, str] = {}
        for log in there:
            needed |= await needed_ledgers(self.work, topics, log)
        now_ms = EPOCH_MS + int(self.world.loop.now * 1000)
        for ledger_id, ledger in self.world.ghost.ledgers.items():
            if ledger.deleted or not ledger.record.intent:
                continue
            invariants.no_task_ledger_stays_open(
                self.world.ghost,
                ledger_id,
                ledger.record.state is not RecordState.CLOSED and not self._undecidable(ledger),
            )
            kept = ledger_id in needed or not ledger.closed
            since = self.work.ghost.logs.get(ledger.record.topic)
            if since is not None and since.deleted_ms is not None:
                kept = kept or now_ms < since.deleted_ms + since.policies.delete_delay_ms
            invariants.nothing_unreferred_is_left(self.world.ghost, ledger_id, kept)


async def needed_ledgers(work: TopicWork, topics: TopicClient, log: LogGhost) -> dict[int, str]:
    """The ledgers that a topic names, or did until less than its delete delay ago."""
    folded, newest = await topics.log(log.topic_id).fold_from_checkpoint()
    found = dict.fromkeys(checkpoint.chunk_ledgers(folded), "chunk")
    previous = 0
    if newest is not None:
        previous = newest.record.previous
        found |= dict.fromkeys(checkpoint.chunk_ledgers(newest.root.state), "chunk")
        found |= dict.fromkeys(
            (*newest.record.root_ledgers(), *newest.root.earlier_ledgers), "root"
        )
    rows = folded.ledgers(await topics.chunks.load(folded.chunks()))
    bodies = [one for one, last in folded.bodies.items() if last >= previous]
    found |= dict.fromkeys(rows, "rows") | dict.fromkeys(bodies, "body")
    now_ms = EPOCH_MS + int(work.world.loop.now * 1000)
    for state in (log.state, folded):
        for ledger_id, dropped_ms in state.dropped.items():
            if now_ms < dropped_ms + log.policies.delete_delay_ms:
                found[ledger_id] = "dropped"
    folder = paths.subscriptions(log.topic_id)
    for name in work.world.store.peek_children(folder):
        node = work.world.store.peek(f"{folder}/{name}")
        assert node is not None
        cursor = decode_subscription(node.value).ledger_id
        if cursor is not None:
            found[cursor] = "cursor"
    acks = paths.acks(log.topic_id)
    for name in work.world.store.peek_children(acks):
        node = work.world.store.peek(f"{acks}/{name}")
        if name.isdigit() and node is not None:
            ack_ledger = decode_pointer(node.value).ledger_id
            if ack_ledger is not None:
                found[ack_ledger] = "acks"
    return found
