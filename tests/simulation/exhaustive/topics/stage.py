"""Setting a scope's first world up, and running production code on a world by itself."""

from collections.abc import Awaitable, Callable
from functools import partial
from typing import Any

from spark_ledger.topic.client import TopicClient
from spark_ledger.topic.log.policies import TopicPolicies
from spark_ledger.topic.log.topics import TopicInfo
from tests.simulation.exhaustive.topics.ledgers import ModelLedgers
from tests.simulation.exhaustive.topics.processes import Live, Note, Process
from tests.simulation.exhaustive.topics.worlds import FIRST, World, carried_out
from tests.simulation.store import EPOCH_MS

Act = Callable[[TopicClient], Awaitable[Any]]


def client_of(process: Process) -> TopicClient:
    """The topic layer of a process, on model ledgers."""
    return TopicClient(ModelLedgers(process), process.rng, lambda: EPOCH_MS)  # type: ignore[arg-type]


def run_alone(
    world: World, program: Callable[[Process], Awaitable[None]], name: str = "alone"
) -> tuple[World, tuple[Note, ...]]:
    """The world after the program ran on it and nobody else did, and what it noted."""
    live = Live(name, program)
    notes = live.process.take_notes()
    while live.operation is not None:
        world, answer = carried_out(world, live.operation)
        live.answer(answer)
        notes += live.process.take_notes()
    live.discard()
    return world, notes


def done(world: World, act: Act, name: str = "stage") -> tuple[World, Any]:
    """The world after `act`, and what it returned."""
    results: list[Any] = []

    async def program(process: Process) -> None:
        results.append(await act(client_of(process)))

    world, _ = run_alone(world, program, name)
    return world, results[0]


def with_topics(
    names: tuple[str, ...], partitions: int = 1, **policies: Any
) -> tuple[World, tuple[str, ...]]:
    """A world with these topics, and their ids."""
    world, ids, kept = FIRST, [], TopicPolicies(**policies)
    for name in names:
        world, info = done(world, partial(_create, name, partitions, kept), name)
        ids.append(info.id)
    return world, tuple(ids)


async def _create(
    name: str, partitions: int, policies: TopicPolicies, client: TopicClient
) -> TopicInfo:
    return await client.topics.create(name, partitions, policies)
