"""The list, but for kills of the driver (kills.py) and speculation (speculation.py): how a query is
hurt, between a batch that went well and one that does again.

A case leaves every step done that was fed so far, by whatever driver it leaves running. Where it
holds the query the janitor comes by.
"""

import os
import signal
from collections.abc import Callable

from tests.crash.procfs import python_workers
from tests.kit.processes import eventually
from tests.spark.exactly_once.query import Query
from tests.spark.exactly_once.world import World
from tests.spark.exactly_once.zookeeper_proxy import is_commit
from tests.spark.topics import forget_the_newest

FENCED = "[LEDGER_WRITE.FENCED]"
UNKNOWN = "[LEDGER_WRITE.OUTCOME_UNKNOWN]"
BEHIND = "[LEDGER_WRITE.CHECKPOINT_BEHIND]"
DIFFERS = "[LEDGER_WRITE.REPLAY_DIFFERS]"
Case = Callable[[World], None]


# -- what Spark does ----------------------------------------------------------------------------


def commit_raises_after_the_write(world: World) -> None:
    query = world.query
    world.driver.stop(query)
    world.start(query, "failing-ledger", failing=str(query.failing))
    world.until_done(query, query.feed())
    commits = world.commits(query)
    query.failing.touch()
    step = query.feed(big=True)
    world.driver.wait_failed(query)
    assert query.failing.with_suffix(".aborted").exists(), "Spark has called abort"
    assert world.commits(query) == commits + 1
    world.clean()
    query.failing.unlink()
    world.start(query)
    world.until_done(query, step)
    assert world.commits(query) == commits + 1, "the replay has changed nothing"


def last_commit_file_lost(world: World) -> None:
    query = world.moving(world.query)
    world.driver.stop(query)
    commits, done = world.commits(query), query.next_step - 1
    forget_the_newest(query.checkpoint / "commits")
    world.clean()
    world.start(query)
    world.until_done(query, done)
    assert world.commits(query) == commits, "the replay has changed nothing"


def newest_batch_forgotten(world: World) -> None:
    """The newest offsets and commit are lost: Spark plans the batch anew, with the same rows."""
    query = world.moving(world.query)
    world.driver.stop(query)
    commits, done = world.commits(query), query.next_step - 1
    for log in ("offsets", "commits"):
        forget_the_newest(query.checkpoint / log)
    world.start(query)
    world.until_done(query, done)
    assert world.commits(query) == commits, "the replay has changed nothing"


def checkpoint_went_back(world: World) -> None:
    """Two batches, and then one with other rows: both are refused, and the newest goes on."""
    query = world.moving(world.query)
    world.driver.stop(query)
    older = query.save("older")
    world.start(query)
    for _ in range(2):
        world.until_done(query, query.feed())
    world.driver.stop(query)
    newest, commits = query.save("newest"), world.commits(query)
    step = query.feed()
    query.restore(older)
    world.start(query)
    assert BEHIND in world.driver.wait_failed(query)
    query.restore(newest)
    for log in ("offsets", "commits"):
        forget_the_newest(query.checkpoint / log)
    world.start(query)
    assert DIFFERS in world.driver.wait_failed(query)
    world.clean()
    assert world.commits(query) == commits
    query.restore(newest)
    world.start(query)
    world.until_done(query, step)
    assert world.commits(query) == commits + 1


def task_retried_with_another_layout(world: World) -> None:
    """Both tasks fail at their half; the next attempts route the same rows to other partitions."""
    query = world.moving(world.query)
    for task in (0, 1):
        (query.gates / f"fail-{query.next_step}-{task}-0").touch()
    with query.gate(f"half-{query.next_step}-1-1") as gate:
        step = query.feed(big=True)
        world.driver.wait_at(gate)
        world.clean()
    world.until_done(query, step)
    assert query.ran(step, 0, 1) and query.ran(step, 1, 1)


def python_workers_killed(world: World) -> None:
    """All of them, in mid-task. Those of tasks are replaced; if it was one that the query itself
    relies on, the query fails and is started again, as whoever runs it would."""
    query = world.moving(world.query)
    with query.gate(world.point_in_tasks(query)) as gate:
        step = query.feed(big=True)
        world.driver.wait_at(gate)
        world.pause()
        for pid in python_workers(world.driver.pid):
            os.kill(pid, signal.SIGKILL)
        world.clean()
    finish(world, query, step)


def finish(world: World, query: Query, step: int) -> None:
    """Until the step is done; a query that fails on the way is started again."""
    if world.driver.fails_before(query, lambda: query.steps_done() > step) is not None:
        world.start(query)
        world.until_done(query, step)


# -- two runs of one query ----------------------------------------------------------------------


def second_driver_on_the_checkpoint(world: World) -> None:
    """While the first is in its tasks; when it comes to commit it is told, and adds nothing."""
    first, second = world.driver, world.spare
    query = world.moving(world.query)
    with query.gate(world.point_in_tasks(query)) as gate:
        step = query.feed(big=True)
        world.driver.wait_at(gate)
        other = query.beside("second")
        second.start(other)
        second.wait(lambda: other.steps_done() > step, "the second driver's batch")
        world.clean()
        gate.open()
        assert FENCED in first.wait_failed(query)
    second.stop(other)
    world.swap_drivers()


def copied_checkpoint_with_other_rows(world: World) -> None:
    """A copy of the checkpoint goes on with rows of its own. They are committed first, so the
    original may not drop its own without a word."""
    first, second = world.driver, world.spare
    query = world.moving(world.query)
    with query.gate(world.point_in_tasks(query)) as gate:
        step = query.feed(big=True)
        world.driver.wait_at(gate)
        other = query.copied("copy")
        other.refeed(step, rows=333)
        second.start(other)
        second.wait(lambda: other.steps_done() > step, "the copy's batch")
        world.clean()
        gate.open()
        assert FENCED in first.wait_failed(query)
    world.swap_drivers()
    world.query = other


# -- ZooKeeper and the janitor ------------------------------------------------------------------


def zookeeper_lost_before_the_write(world: World) -> None:
    query = world.moving(world.query)
    commits = world.commits(query)
    with world.proxy.trap(is_commit(world.topic_id(query)), hold="request") as trap:
        step = query.feed()
        trap.wait()
        world.proxy.cut()
    world.clean()
    world.pause()
    assert world.commits(query) == commits
    world.proxy.heal()
    world.until_done(query, step)
    assert world.commits(query) == commits + 1


def zookeeper_lost_after_the_write(world: World) -> None:
    query = world.moving(world.query)
    commits = world.commits(query)
    with world.proxy.trap(is_commit(world.topic_id(query)), hold="answer") as trap:
        step = query.feed()
        trap.wait()
        world.proxy.cut()
    world.clean()
    world.pause()
    assert world.commits(query) == commits + 1
    world.proxy.heal()
    world.until_done(query, step)
    assert world.commits(query) == commits + 1, "what was unknown was looked up, not sent again"


def janitor_before_the_write(world: World) -> None:
    """It takes the run for dead while its commit is under way: one of the two must lose."""
    query = world.moving(world.query)
    commits = world.commits(query)
    with world.proxy.trap(is_commit(world.topic_id(query)), hold="request") as trap:
        step = query.feed(big=True)
        trap.wait()
        world.condemn(query)
        trap.pass_on()
        assert FENCED in world.driver.wait_failed(query)
    assert world.commits(query) == commits
    world.start(query)
    world.until_done(query, step)


def janitor_during_tasks(world: World) -> None:
    query = world.moving(world.query)
    with query.gate(world.point_in_tasks(query)) as gate:
        step = query.feed(big=True)
        world.driver.wait_at(gate)
        world.condemn(query)
    finish(world, query, step)


def zookeeper_gone_after_the_write(world: World) -> None:
    """For so long that commit gives up and says that it does not know."""
    query = world.moving(world.query)
    commits = world.commits(query)
    with world.proxy.trap(is_commit(world.topic_id(query)), hold="answer") as trap:
        step = query.feed()
        trap.wait()
        world.proxy.cut()
    assert UNKNOWN in world.driver.wait_failed(query)
    world.clean()
    world.proxy.heal()
    world.start(query)
    world.until_done(query, step)
    assert world.commits(query) == commits + 1, "the replay has changed nothing"


def ledgers_fenced_during_tasks(world: World) -> None:
    """Somebody recovers every ledger that the tasks write; they go on in others."""
    query = world.moving(world.query)
    with query.gate(f"half-{query.next_step}-1-0") as gate:
        step = query.feed(big=True)
        world.driver.wait_at(gate)
        topic_id = world.topic_id(query)
        fenced = eventually(lambda: bool(world.onlooker.fence(topic_id)))
    assert fenced, "the tasks have written nothing"
    world.until_done(query, step)


# The longest takes a minute: only chaos has it.
LONG_CASES: tuple[Case, ...] = (zookeeper_gone_after_the_write,)
CASES: tuple[Case, ...] = (
    commit_raises_after_the_write,
    last_commit_file_lost,
    newest_batch_forgotten,
    checkpoint_went_back,
    task_retried_with_another_layout,
    python_workers_killed,
    second_driver_on_the_checkpoint,
    copied_checkpoint_with_other_rows,
    zookeeper_lost_before_the_write,
    zookeeper_lost_after_the_write,
    janitor_before_the_write,
    janitor_during_tasks,
    ledgers_fenced_during_tasks,
)
