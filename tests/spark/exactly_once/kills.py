"""The driver killed with -9 at each step of a batch.

Queries of one driver are each brought to a point of their own and held there; then one kill meets
them all, and another driver goes on with them. Each point says whether the batch was applied.
"""

import contextlib
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass

from tests.spark.exactly_once.query import Query
from tests.spark.exactly_once.world import SEVERAL, World
from tests.spark.exactly_once.zookeeper_proxy import is_commit, names


@contextlib.contextmanager
def before_tasks(world: World, query: Query) -> Iterator[None]:
    """Spark has noted the batch's offsets and plans it."""
    with query.gate(f"plan-{query.next_step}") as gate:
        query.feed()
        world.driver.wait_at(gate)
        yield


@contextlib.contextmanager
def during_tasks(world: World, query: Query) -> Iterator[None]:
    """One task is in the middle, with entries already acknowledged."""
    with query.gate(f"half-{query.next_step}-1-0") as gate:
        query.feed(big=True)
        world.driver.wait_at(gate)
        world.pause()
        yield


@contextlib.contextmanager
def after_the_last_task(world: World, query: Query) -> Iterator[None]:
    """Commit has begun to look, and has sent nothing."""
    with (
        query.gate(f"end-{query.next_step}-1-0") as gate,
        world.proxy.trap(names(f"/txns/{query.id}/"), hold="request") as trap,
    ):
        query.feed(big=True)
        world.driver.wait_at(gate)
        assert not trap.caught, "a task of a run that has committed looks at no transaction"
        gate.open()
        trap.wait()
        yield


@contextlib.contextmanager
def before_the_write(world: World, query: Query) -> Iterator[None]:
    """Commit has sent its multi, which never arrives."""
    with world.proxy.trap(is_commit(world.topic_id(query)), hold="request") as trap:
        query.feed(big=True)
        trap.wait()
        yield


@contextlib.contextmanager
def after_the_write(world: World, query: Query) -> Iterator[None]:
    """ZooKeeper has done it and has answered."""
    with world.proxy.trap(is_commit(world.topic_id(query)), hold="answer") as trap:
        query.feed(big=True)
        trap.wait()
        yield


@contextlib.contextmanager
def before_sparks_commit_file(world: World, query: Query) -> Iterator[None]:
    """Commit returns to a JVM that does nothing any more: this point comes last."""
    with world.proxy.trap(is_commit(world.topic_id(query)), hold="answer") as trap:
        query.feed()
        trap.wait()
        world.driver.freeze_jvm()
        trap.pass_on()
        yield
    assert query.newest("commits") < query.newest("offsets")


Hold = Callable[[World, Query], AbstractContextManager[None]]


@dataclass(frozen=True, slots=True)
class Point:
    """`several`: of a query that writes to so many topics."""

    hold: Hold
    applied: bool
    several: int = 0

    @property
    def name(self) -> str:
        return self.hold.__name__ + ("_of_several_topics" if self.several else "")


# Those whose requests are held come late: a client that hears nothing for the most of its session's
# time-out sends again on another connection, and an answer that was held is not needed any more.
POINTS = (
    Point(before_tasks, applied=False),
    Point(during_tasks, applied=False),
    Point(after_the_write, applied=True),
    Point(after_the_write, applied=True, several=SEVERAL),
    Point(after_the_last_task, applied=False),
    Point(before_the_write, applied=False),
    Point(before_the_write, applied=False, several=SEVERAL),
    Point(before_sparks_commit_file, applied=True),
)


@dataclass(frozen=True, slots=True)
class Killed:
    """A query at its point, and how many commits its topic had: before the batch, after the kill,
    after the batch was run again."""

    query: Query
    point: Point
    before: int
    at_kill: int
    replayed: int

    def check(self) -> None:
        assert self.at_kill == self.before + self.point.applied, f"{self.point.name}: at the kill"
        assert self.replayed == self.before + 1, f"{self.point.name}: after the replay"


def kill_at_each_point(world: World) -> dict[str, Killed]:
    """By the point's name. All queries have gone on to the end of what they were fed."""
    queries = {point.name: world.new_query(point.several) for point in POINTS}
    for query in queries.values():
        world.moving(query)
    before = {name: world.commits(query) for name, query in queries.items()}
    with contextlib.ExitStack() as held:
        for point in POINTS:
            held.enter_context(point.hold(world, queries[point.name]))
        world.clean()
        world.pause()
        world.driver.kill()
    at_kill = {name: world.commits(query) for name, query in queries.items()}
    world.clean()
    for query in queries.values():
        world.start(query)  # one by one: Spark waits 10 s only for each source's process
        world.until_done(query, query.next_step - 1)
    return {
        point.name: Killed(
            queries[point.name],
            point,
            before[point.name],
            at_kill[point.name],
            world.commits(queries[point.name]),
        )
        for point in POINTS
    }


def kill_at_any_moment(world: World) -> None:
    """Drawn by the seed; the query that all cases share."""
    query = world.moving(world.query)
    step = query.feed(big=True)
    for _ in range(world.rng.randrange(10)):
        world.pause()
    world.driver.kill()
    world.clean()
    world.start(query)
    world.until_done(query, step)
