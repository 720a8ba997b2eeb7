"""The owner of a live segment and a Spark commit to the same partition.

No production code owns live segments yet, or seals them for a batch: both programs here follow the
rules that `Owner` and `sealed` state, with production commits, folds and guards.
"""

from contextlib import suppress
from functools import partial

from spark_ledger import errors
from spark_ledger.ledger.client import VersionedRecord
from spark_ledger.metadata import paths
from spark_ledger.metadata.store import OutcomeUnknown
from spark_ledger.topic.client import TopicClient
from spark_ledger.topic.commit.commit import TxnKey
from spark_ledger.topic.log.actions import Action, Append, OpenLive, SealLive
from spark_ledger.topic.log.intents import Intent
from spark_ledger.topic.log.segments import LiveSegment
from tests.simulation.exhaustive.topics.ledgers import ModelLedgers, segment
from tests.simulation.exhaustive.topics.processes import Process, Program
from tests.simulation.exhaustive.topics.scope import Actor, Scope, faults_told
from tests.simulation.exhaustive.topics.scopes import topic_writes
from tests.simulation.exhaustive.topics.stage import client_of, done, with_topics

TOPIC = "t"
TRIES_MAX = 2
"""Of the owner for a row and for a ledger, and of a batch: then it gives up. Without a bound the
two can chase each other for ever (hazard 29); what ends that is time, which is not explored."""
OWNED, BATCH = 200, 900
"""The owner's first ledger; the one that holds the batch's row."""


async def recovered(client: TopicClient, ledger_id: int) -> VersionedRecord:
    """The ledger's record, CLOSED; tried again where a write was certainly not made."""
    try:
        return await client.ledgers.recover(ledger_id)
    except errors.Unavailable:
        return await client.ledgers.recover(ledger_id)


async def sealed(client: TopicClient, live: LiveSegment) -> SealLive:
    """What seals the segment: its ledger is closed, its rows are what the CLOSED record says."""
    known = await recovered(client, live.ledger_id)
    rows = known.record.rows
    closed = segment(live.ledger_id, range(rows), version=known.version) if rows else None
    return SealLive(live.partition, live.ledger_id, closed)


class Owner:
    """Appends rows to the open end of partition 0. Always true: nothing is added to a ledger that
    a fold, made after it was to be opened, did not name as the live one (hazard 28); rows whose
    outcome is not known are decided by the CLOSED record alone (hazard 31)."""

    def __init__(self, process: Process, topic: str, intent: Intent, *, looks: bool = True) -> None:
        self._client = client_of(process)
        self._process = process
        self._topic = topic
        self._intent = intent
        self._looks = looks
        self._ledger = OWNED
        self._open = False

    async def append(self, row: str) -> None:
        for _ in range(TRIES_MAX):
            if not self._open:
                await self._reopen()
            try:
                await self._client.ledgers.add(self._ledger, row)  # type: ignore[attr-defined]
                return
            except (errors.LedgerFenced, OutcomeUnknown):
                self._open = False
                if row in await self._closed_rows():
                    return
        raise errors.CommitContended("the owner was sealed again and again")

    async def _closed_rows(self) -> tuple[str, ...]:
        """What its ledger has for ever. Raises errors.Unavailable."""
        known = await recovered(self._client, self._ledger)
        found: tuple[str, ...] = await self._process.ask("entries", self._ledger)
        return found[: known.record.rows]

    async def _reopen(self) -> None:
        """Make a ledger the live one."""
        ledgers = self._client.ledgers
        assert isinstance(ledgers, ModelLedgers)
        self._ledger += 1
        await ledgers.make(
            self._ledger, intent=self._intent.id, topic=self._topic, creator=f"o{self._ledger}"
        )
        for _ in range(TRIES_MAX):
            with suppress(errors.TxnConflict, errors.Unavailable):
                state = await self._client.log(self._topic).fold(fresh=True)
                live = state.partitions[0].live
                if live is not None and live.ledger_id == self._ledger:
                    self._open = True
                    return
                await self._commit_open(live)
            if not self._looks:
                self._open = True
                return
        raise errors.CommitContended("no ledger of the owner came to be the live one")

    async def _commit_open(self, live: LiveSegment | None) -> None:
        actions: list[Action] = [OpenLive(0, self._ledger, 0, "owner", self._ledger)]
        if live is not None:
            actions.insert(0, await sealed(self._client, live))
        await self._client.commit_actions(self._topic, actions, self._intent)


def owner(topic: str, intent: Intent, adds: int, *, looks: bool = True) -> Program:
    async def program(process: Process) -> None:
        owned = Owner(process, topic, intent, looks=looks)
        for at in range(adds):
            try:
                await owned.append(f"live {at}")
            except errors.LedgerError as error:
                process.note("failed", type(error).__name__)
                return
            process.note("acknowledged", at)

    return program


def batch(topic: str, intent: Intent, versions: int) -> Program:
    """Commits of a row each to the partition; what is live there is sealed first, in the same
    commit."""

    async def program(process: Process) -> None:
        client = client_of(process)
        for version in range(versions):
            row = Append((segment(BATCH, [version]),))
            txn = TxnKey(intent.app_id, intent.target, version, intent.run_id)
            for _ in range(TRIES_MAX):
                try:
                    state = await client.log(topic).fold(fresh=True)
                    live = state.partitions[0].live
                    actions = [row] if live is None else [await sealed(client, live), row]
                    await client.commit_actions(topic, actions, intent, txn=txn)
                except (errors.TxnConflict, errors.Unavailable):
                    continue
                process.note("batch", version)
                break
            else:
                process.note("failed", "sealed again and again")
                return

    return program


def live(adds: int, versions: int, *, faults: int, looks: bool = True) -> Scope:
    world, (topic,) = with_topics((TOPIC,))
    world, owners = done(world, partial(_system, "own"), "own")
    world, mine = done(world, partial(_batch), "batch")
    for version in range(versions):
        world = world.with_row(BATCH, f"batch {version}")
    actors = (
        Actor(
            "owner",
            owner(topic, owners, adds, looks=looks),
            (f"/txns/{owners.app_id}", paths.LEDGERS, *topic_writes(topic)),
        ),
        Actor(
            "spark",
            batch(topic, mine, versions),
            (f"/txns/{mine.app_id}", paths.LEDGERS, *topic_writes(topic)),
        ),
    )
    told = f"an owner that adds {adds} rows, a batch writer that seals and commits {versions} times"
    told += ", 1 partition" + faults_told(faults)
    return Scope(
        "live", told, actors, world, (topic,), faults, rules=("live rows",), tasks=(BATCH,)
    )


async def _system(purpose: str, client: TopicClient) -> Intent:
    return await client.intents.open_system_intent(purpose, TOPIC)


async def _batch(client: TopicClient) -> Intent:
    return await client.intents.open_batch_intent("job", "job", TOPIC)
