"""What a new process can still do when nobody else does anything any more."""

from collections.abc import Iterator

from spark_ledger import errors
from spark_ledger.metadata import ledger_record, paths
from spark_ledger.topic.client import TopicClient
from spark_ledger.topic.log.actions import Append
from spark_ledger.topic.upkeep.janitor import Janitor
from tests.simulation.exhaustive.topics.ledgers import segment
from tests.simulation.exhaustive.topics.scope import Scope
from tests.simulation.exhaustive.topics.stage import done
from tests.simulation.exhaustive.topics.worlds import World

LEDGER = 900
HOURS = 3


def problems(scope: Scope, world: World) -> Iterator[str]:
    """Why nobody can go on, one after another."""
    if "ledgers" in scope.rules:
        yield from _left(world)
    if "live rows" in scope.rules:
        return
    for topic in scope.topics:
        try:
            done(world, lambda client, topic=topic: _commit(client, topic), "auditor")
        except errors.LedgerError as error:
            yield f"nobody can commit to {topic} any more: {error}"


async def _commit(client: TopicClient, topic: str) -> None:
    intent = await client.intents.open_system_intent("audit", topic)
    await client.commit_actions(topic, [Append((segment(LEDGER, [0]),))], intent)
    await client.checkpoints.make(topic)


def _left(world: World) -> Iterator[str]:
    """Ledgers to which nothing refers, and those left open, once a new janitor had its passes."""

    async def clean(client: TopicClient) -> list[int]:
        kept: list[int] = []
        janitor = Janitor(client.store, client.ledgers, client.rng)
        for _ in range(HOURS):
            intents = await client.store.children(paths.INTENTS)
            report = await janitor.clean(condemn=intents, force=True)
            kept = list(report.kept)
            await client.store.ask("later")  # type: ignore[attr-defined]
        return kept

    world, kept = done(world, clean, "last janitor")
    for ledger in sorted(world.ledgers):
        node = world.nodes.get(paths.ledger(ledger))
        if node is None:
            continue
        if not ledger_record.decode(node.value).closed:
            yield f"ledger {ledger} stays open"
        if ledger not in kept:
            yield f"ledger {ledger} is left, and nothing refers to it"
