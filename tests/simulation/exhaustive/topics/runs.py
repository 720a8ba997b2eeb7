"""Two runs of one query: one transaction key, the same versions, two topics."""

from functools import partial

from spark_ledger import errors
from spark_ledger.metadata import paths
from spark_ledger.topic.client import TopicClient
from spark_ledger.topic.commit.commit import TxnKey
from spark_ledger.topic.log import records
from spark_ledger.topic.log.topic_log import fold_agreeing
from tests.simulation.exhaustive.topics.processes import Process, Program
from tests.simulation.exhaustive.topics.scope import Actor, Scope, faults_told
from tests.simulation.exhaustive.topics.scopes import note_outcome, result_of, topic_writes
from tests.simulation.exhaustive.topics.stage import client_of, done, with_topics

QUERY, TARGET = "q", "*"
Layout = tuple[tuple[int, ...], ...]
"""By version the topics (0, 1) to which its rows go."""


def run(name: str, topics: tuple[str, ...], layout: Layout, ledger: int) -> Program:
    """A run of the query: its intent, and then a version after the other."""

    async def program(process: Process) -> None:
        client = client_of(process)
        try:
            intent = await client.intents.open_query_intent(QUERY, name, TARGET)
            for version, going in enumerate(layout):
                txn = TxnKey(QUERY, TARGET, version, name)
                rows = {
                    topics[at]: [result_of(intent, topics[at], ledger + at, [version])]
                    for at in going
                }
                outcome = await client.commit_topics(rows, txn, intent.id)
                note_outcome(process, intent, version, outcome)
        except errors.LedgerError as error:
            process.note("failed", type(error).__name__)

    return program


def reader(topics: tuple[str, ...]) -> Program:
    """Folds all topics until their states agree."""

    async def program(process: Process) -> None:
        client = client_of(process)
        folded = await fold_agreeing([client.log(topic) for topic in topics])
        process.note("read together", tuple((one.topic_id, one.next) for one in folded))

    return program


def runs(layouts: tuple[Layout, ...], *, read: bool, faults: int) -> Scope:
    world, topics = with_topics(("a", "b"))
    world, _ = done(world, partial(_record, QUERY), "stage")
    writes = (f"/txns/{QUERY}", "/intents", "/queries", *topic_writes(topics[0]))
    writes += topic_writes(topics[1])
    actors = [
        Actor(f"run{at + 1}", run(f"run{at + 1}", topics, layout, 101 + 100 * at), writes)
        for at, layout in enumerate(layouts)
    ]
    if read:
        actors.append(Actor("reader", reader(topics)))
    versions = max(len(layout) for layout in layouts)
    told = f"{len(layouts)} runs of one query, {versions} versions, 2 topics"
    told += (", 1 reader of both" if read else "") + faults_told(faults)
    return Scope("runs", told, tuple(actors), world, topics, faults)


async def _record(query: str, client: TopicClient) -> None:
    """The query committed nothing yet: where its record is, is there."""
    value = records.encode_txn(records.TxnRecord())
    await client.store.create(paths.txn(query, "%2A"), value, parents=True)
    await client.store.create(paths.INTENTS)
    await client.store.create(paths.QUERIES)
