"""The four small scopes: who does what to which topic."""

from collections.abc import Sequence
from functools import partial

from spark_ledger import errors
from spark_ledger.metadata import paths
from spark_ledger.topic.client import TopicClient
from spark_ledger.topic.commit.commit import CommitOutcome, TxnKey
from spark_ledger.topic.log import records
from spark_ledger.topic.log.actions import Append
from spark_ledger.topic.log.intents import Intent
from spark_ledger.topic.write import TaskResult
from tests.simulation.exhaustive.topics.judge import content_of
from tests.simulation.exhaustive.topics.ledgers import segment
from tests.simulation.exhaustive.topics.processes import Process, Program
from tests.simulation.exhaustive.topics.scope import Actor, Scope, faults_told
from tests.simulation.exhaustive.topics.stage import client_of, done, with_topics
from tests.simulation.exhaustive.topics.worlds import World

OWN = ("/intents/system-", "/txns/checkpoint-")
_TOPIC = "t"


def topic_writes(topic: str) -> tuple[str, ...]:
    """What commits to the topic write there."""
    return (paths.topic_head(topic), paths.topic_log(topic))


def result_of(intent: Intent, topic: str, ledger: int, entries: Sequence[int]) -> TaskResult:
    return TaskResult(topic, intent.id, 0, 0, (segment(ledger, entries),))


def note_outcome(process: Process, intent: Intent, version: int, outcome: CommitOutcome) -> None:
    numbers = tuple((topic, made.number) for topic, made in outcome.topics.items())
    process.note("committed", outcome.kind.value, intent.run_id, version, intent.id, numbers)


# -- 1: commits, checkpoints, trims, a reader ----------------------------------------------------


def committer(topic: str, intent: Intent, commits: int, ledger: int) -> Program:
    """So many commits of a row each, one after another."""

    async def program(process: Process) -> None:
        client = client_of(process)
        for version in range(commits):
            txn = TxnKey(intent.app_id, intent.target, version, intent.run_id)
            rows = [result_of(intent, topic, ledger, [version])]
            try:
                outcome = await client.commit_topics({topic: rows}, txn, intent.id)
            except errors.LedgerError as error:
                process.note("failed", type(error).__name__)
                return
            note_outcome(process, intent, version, outcome)

    return program


def checkpointer(topic: str, times: int) -> Program:
    """Makes a checkpoint, and trims the log, so many times."""

    async def program(process: Process) -> None:
        client = client_of(process)
        for _ in range(times):
            try:
                await client.checkpoints.make(topic)
            except errors.LedgerError as error:
                process.note("failed", type(error).__name__)
                return

    return program


def reader(topic: str) -> Program:
    async def program(process: Process) -> None:
        client = client_of(process)
        folded = await client.log(topic).fold(fresh=True)
        rows = content_of(folded, _NOBODY)
        least = records.decode_head(process.first[paths.topic_head(topic)].value).next
        process.note("read", topic, least, folded.next, tuple(sorted(rows.items())))

    return program


_NOBODY = World(nodes={})  # type: ignore[arg-type]


def commits(
    commits_each: tuple[int, ...],
    checkpoints: tuple[int, ...],
    *,
    read: bool,
    faults: int,
    begun: bool = False,
) -> Scope:
    """One committer for each of `commits_each`, one checkpointer for each of `checkpoints`. If the
    topic has `begun`, there was one commit, which is in a checkpoint."""
    world, (topic,) = with_topics((_TOPIC,))
    if begun:
        world, _ = done(world, partial(_begin, topic), "before")
    actors = []
    for at, times in enumerate(commits_each):
        name = f"c{at + 1}"
        world, intent = done(world, partial(_batch_intent, name), name)
        writes = (f"/txns/{name}", *topic_writes(topic))
        actors.append(Actor(name, committer(topic, intent, times, 101 + at), writes))
    for at, times in enumerate(checkpoints):
        writes = (paths.topic_checkpoint(topic), paths.topic_log(topic))
        actors.append(Actor(f"k{at + 1}", checkpointer(topic, times), writes))
    if read:
        actors.append(Actor("reader", reader(topic)))
    total = sum(commits_each)
    told = f"{len(commits_each)} committers, {total} commits, {len(checkpoints)} checkpointer(s)"
    told += " that trim" + (", after a first checkpoint" if begun else "")
    told += (", 1 reader" if read else "") + faults_told(faults)
    return Scope("commits", told, tuple(actors), world, (topic,), faults, OWN)


async def _begin(topic: str, client: TopicClient) -> None:
    intent = await client.intents.open_system_intent("begin", topic)
    await client.commit_actions(topic, [Append((segment(100, [0]),))], intent)
    await client.checkpoints.make(topic)


async def _batch_intent(name: str, client: TopicClient) -> Intent:
    return await client.intents.open_batch_intent(name, name, _TOPIC)
