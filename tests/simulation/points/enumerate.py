"""Every point of a deed, with every fate: none left out."""

import asyncio
from collections.abc import Callable, Coroutine, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from spark_ledger.errors import LedgerError, LedgerFenced, TxnConflict
from spark_ledger.metadata.store import StoreError
from tests.simulation.invariants import require
from tests.simulation.loop import run
from tests.simulation.points.fates import ALONE, Boundary, Fate
from tests.simulation.points.stage import Stage
from tests.simulation.topic_limits import TopicLimits, limited
from tests.simulation.world import Client

AWAY_S = 100.0
"""A process stands still for so long, if its deed says nothing else: beyond its session, its leases
and every time-out."""
EXPIRES_S = 30.0
WHOLE_S = 400.0
"""Simulated: the deed, undisturbed or not, ends."""

Act = Callable[[Stage, Client], Coroutine[Any, Any, None]]
Alone = Callable[[Stage], Coroutine[Any, Any, None]]


@dataclass(frozen=True)
class Deed:
    """`prepare` makes the state; `act` is what meets its fate, done by one process; `others` is
    what is done while that is dead or stands still, or after it; `small`: limits of the topic layer
    (topic_limits.py), `policies` of topic "t"."""

    name: str
    prepare: Alone
    act: Act
    others: Alone
    small: dict[Any, Any] = field(default_factory=dict)
    policies: dict[str, Any] = field(default_factory=dict)
    commits_once: bool = False
    """The act makes one commit, so that one which is refused is not in the log."""
    fates: tuple[Fate, ...] = ALONE
    stage: Callable[[], Stage] = Stage
    away_s: float = AWAY_S
    """So long it stands still, where it does."""


class Point(NamedTuple):
    deed: Deed
    call: int
    fate: Fate

    def __str__(self) -> str:
        return f"{self.deed.name}: {self.fate.value} at call {self.call}"


class PointFailed(AssertionError):
    """A point at which something broke. `cause` is a Violation, or what else went wrong."""

    def __init__(self, point: Point, calls: Sequence[str], cause: BaseException) -> None:
        what = calls[point.call] if point.call < len(calls) else "after all"
        super().__init__(f"{point} ({what}): {cause!r}")
        self.point = point
        self.cause = cause


def calls_of(deed: Deed) -> list[str]:
    """The calls of the deed when nothing happens to it; everything is in order then."""
    calls: list[str] = []
    _run(deed, len(calls), None, calls)
    return calls


def points_of(deed: Deed, calls: Sequence[str]) -> list[Point]:
    """Each call with each fate that can happen there."""
    every = [(number, call, fate) for number, call in enumerate(calls) for fate in deed.fates]
    return [Point(deed, number, fate) for number, call, fate in every if fate.meets(call)]


def run_point(point: Point) -> None:
    """Raises PointFailed."""
    calls: list[str] = []
    try:
        _run(point.deed, point.call, point.fate, calls)
    except Exception as error:
        raise PointFailed(point, calls, error) from error


def _run(deed: Deed, call: int, fate: Fate | None, calls: list[str]) -> None:
    with ExitStack() as until_the_end:
        run(_point(deed, call, fate, calls, until_the_end), seed=1)


async def _point(
    deed: Deed, call: int, fate: Fate | None, calls: list[str], until_the_end: ExitStack
) -> None:
    stage = deed.stage()
    limits = TopicLimits(1 << 30, 0, deed.small)
    until_the_end.enter_context(limited(limits, stage.work.noted))
    stage.work.limits = limits
    try:
        await stage.begin(**deed.policies)
        await deed.prepare(stage)
        victim = await stage.world.client("victim")
        boundary = Boundary(victim, call, fate)
        boundary.begin()
        acting = victim.run(deed.act(stage, victim), "acts")
        async with asyncio.timeout(WHOLE_S):
            await asyncio.wait({acting, boundary.met}, return_when=asyncio.FIRST_COMPLETED)
        calls += boundary.log
        if boundary.met.done() and fate is Fate.PAUSED:
            await _stands_still(stage, deed, victim)
        elif boundary.met.done() and fate is Fate.BESIDE:
            await deed.others(stage)
            victim.process.resume()
        else:
            boundary.end()
            await deed.others(stage)
        boundary.end()
        await _ended(acting, bool(fate))
        if deed.commits_once:
            _judge_refusal(stage, acting, victim)
        await stage.judge()
    except Exception as error:
        seen = stage.world.observers.violations
        if seen and error is not seen[0]:  # what came first: all else may follow from it
            raise seen[0] from error
        raise


async def _ended(acting: "asyncio.Task[None]", may_fail: bool) -> None:
    """The deed has ended; with an error of the product's own, if something happened to it."""
    async with asyncio.timeout(WHOLE_S):
        await asyncio.wait({acting})
    if acting.cancelled():
        return
    error = acting.exception()
    if error is not None and not (may_fail and isinstance(error, LedgerError | StoreError)):
        raise error


def _judge_refusal(stage: Stage, acting: "asyncio.Task[None]", victim: Client) -> None:
    """Who is told that the commit is refused, for good, has not made it."""
    if acting.cancelled() or not isinstance(acting.exception(), LedgerFenced | TxnConflict):
        return
    made = [
        change.path
        for written in stage.world.store.log
        if written.session == victim.name
        for change in written.changes
        if "/log/" in change.path and change.before is None
    ]
    require(not made, "T1", f"{acting.exception()!r}, and the commit is there: {made}")


async def _stands_still(stage: Stage, deed: Deed, victim: Client) -> None:
    """Others go on, and then the process does, for which no time has passed."""
    loop, session = stage.world.loop, victim.session
    until = loop.now + deed.away_s
    if deed.away_s > EXPIRES_S:
        loop.call_later(EXPIRES_S, session.expire, context=loop.outside)
    await deed.others(stage)
    await asyncio.sleep(max(0.0, until - loop.now))
    victim.process.resume()
