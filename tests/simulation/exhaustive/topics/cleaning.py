"""A committer and a janitor: one ledger, one intent."""

from functools import partial

from spark_ledger import errors
from spark_ledger.metadata import paths
from spark_ledger.metadata.store import OutcomeUnknown
from spark_ledger.topic.client import TopicClient
from spark_ledger.topic.commit.commit import TxnKey
from spark_ledger.topic.log.intents import IDS_PER_BLOCK, Intent
from spark_ledger.topic.upkeep.janitor import Janitor
from tests.simulation.exhaustive.topics.ledgers import ModelLedgers
from tests.simulation.exhaustive.topics.processes import Process, Program
from tests.simulation.exhaustive.topics.scope import Actor, Scope, faults_told
from tests.simulation.exhaustive.topics.scopes import note_outcome, result_of, topic_writes
from tests.simulation.exhaustive.topics.stage import client_of, done, with_topics

TOPIC, QUERY, RUN = "t", "q", "run-1"


def batches(topic: str, intent: Intent, ledger: int, overwriting: tuple[bool, ...]) -> Program:
    """Micro-batches one after another, each a row in the same ledger and then its commit; one that
    overwrites leaves nothing of those before."""

    async def program(process: Process) -> None:
        client = client_of(process)
        for version, overwrite in enumerate(overwriting):
            txn = TxnKey(intent.app_id, intent.target, version, intent.run_id)
            try:
                entry = await client.ledgers.add(ledger, f"row {version}")
                outcome = await client.commit_topics(
                    {topic: [result_of(intent, topic, ledger, [entry])]},
                    *(txn, intent.id),
                    overwrite=[topic] if overwrite else [],
                    overwrite_held=True,  # there are no subscriptions in the scope
                )
            except (errors.LedgerError, OutcomeUnknown) as error:
                process.note("failed", type(error).__name__)
                return
            note_outcome(process, intent, version, outcome)

    return program


def janitor(intent: Intent, condemning: tuple[bool, ...]) -> Program:
    """A pass for each of `condemning`, with hours in between; where it is true, the intent is taken
    as stale by then."""

    async def program(process: Process) -> None:
        client = client_of(process)
        cleaner = Janitor(client.store, client.ledgers, client.rng)
        for stale in condemning:
            try:
                report = await cleaner.clean(condemn=[intent.id] if stale else [])
            except errors.LedgerError as error:
                process.note("failed", type(error).__name__)
                return
            process.note("deleted", report.deleted)
            await process.ask("later")

    return program


def cleaning(overwriting: tuple[bool, ...], condemning: tuple[bool, ...], *, faults: int) -> Scope:
    world, (topic,) = with_topics((TOPIC,), delete_delay_ms=1000)
    world, (intent, ledger) = done(world, partial(_prepared, topic), "stage")
    committer = Actor(
        "committer",
        batches(topic, intent, ledger, overwriting),
        (f"/txns/{QUERY}", *topic_writes(topic)),
    )
    cleaner = Actor(
        "janitor",
        janitor(intent, condemning),
        (paths.intent(intent.id), paths.LEDGERS, paths.STORE_CLOCK),
    )
    told = f"a committer of {len(overwriting)} batches into one ledger"
    told += f" ({sum(overwriting)} overwrite), a janitor of {len(condemning)} passes"
    told += " that condemns its intent" if any(condemning) else ""
    return Scope(
        "cleaning",
        told + faults_told(faults),
        (committer, cleaner),
        world,
        (topic,),
        faults,
        rules=("ledgers",),
    )


async def _prepared(topic: str, client: TopicClient) -> tuple[Intent, int]:
    intent = await client.intents.open_query_intent(QUERY, RUN, TOPIC, overwrites=[topic])
    first = await client.intents.ledger_id(intent)
    ledgers = client.ledgers
    assert isinstance(ledgers, ModelLedgers)
    await ledgers.make(first, intent=intent.id, topic=topic, creator="task")
    assert IDS_PER_BLOCK > 1, "the janitor looks for others, too"
    return intent, first
