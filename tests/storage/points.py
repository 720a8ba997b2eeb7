"""A crash between every two disk operations of a deed, one after the other, none left out.

Always true: a deed is prepared in the same way each time, so its operations are the same each
time; for each number n the node does the first n of them, dies with each of PERSISTENCES, starts
again and is verified; for every SECOND-th point it dies once more while it starts, after a number
of operations that is another one each time.
"""

import asyncio
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from tests.simulation.disk import Keep
from tests.simulation.loop import run
from tests.storage.rig import Shape
from tests.storage.stage import Stage

PERSISTENCES: tuple[tuple[Keep, int], ...] = (("none", 0), ("all", 0), ("random", 1), ("random", 2))
SECOND = 3
STARTED_S = 1.0
"""Simulated: in which a node has finished what it found to finish when it started."""


@dataclass(frozen=True)
class Deed:
    """`prepare` makes the state, `act` is what is cut short; `mend` is what an operator does before
    the node is started again, `check` what is true after the whole act, also
    if it is the second one, after one that was cut short."""

    name: str
    shape: Shape
    prepare: Callable[[Stage], Coroutine[Any, Any, None]]
    act: Callable[[Stage], Coroutine[Any, Any, None]]
    mend: Callable[[Stage], Coroutine[Any, Any, None]] | None = None
    check: Callable[[Stage], Coroutine[Any, Any, None]] | None = None


class Points(NamedTuple):
    """What an enumeration did."""

    operations: Sequence[str]
    crashes: int
    second_crashes: int


class PointFailed(AssertionError):
    """A crash after which a promise was broken."""


def enumerate_points(
    deed: Deed, persistences: Sequence[tuple[Keep, int]] = PERSISTENCES, second: int = SECOND
) -> Points:
    """Raises PointFailed."""
    whole = run(_whole(deed))
    seconds = 0
    for done in range(len(whole) + 1):
        for number, (keep, seed) in enumerate(persistences):
            again = (done + number) % second == 0
            seconds += again
            try:
                run(_cut_short(deed, done, keep, seed, again))
            except Exception as error:
                last = whole[done - 1] if done else "nothing"
                where = f"{deed.name}: after operation {done} of {len(whole)} ({last})"
                more = ", and once more while it starts" if again else ""
                raise PointFailed(f"{where}, {keep} kept ({seed}){more}: {error!r}") from error
    return Points(whole, (len(whole) + 1) * len(persistences), seconds)


async def _whole(deed: Deed) -> list[str]:
    """All operations of the deed, after which everything is in order."""
    stage = await prepared(deed)
    stage.rig.steps.begin()
    await deed.act(stage)
    stage.rig.steps.end()
    if deed.check is not None:
        await deed.check(stage)
    await stage.crash("none")
    await stage.verify()
    return stage.rig.steps.log


async def prepared(deed: Deed) -> Stage:
    stage = Stage(deed.shape)
    await deed.prepare(stage)
    return stage


async def _cut_short(deed: Deed, done: int, keep: Keep, seed: int, again: bool) -> None:
    stage = await prepared(deed)
    await _die_after(stage, deed.act(stage), done, keep, seed)
    if deed.mend is not None:
        await deed.mend(stage)
    if again:
        await _die_after(stage, stage.rig.start(), 1 + (7 * done + seed) % 23, "random", done)
    await stage.back()
    await stage.verify()
    if done % 2:  # while it still finishes what it found
        await stage.crash("none")
    elif deed.check is not None:
        await asyncio.sleep(STARTED_S)
        await deed.act(stage)
        await deed.check(stage)


async def _die_after(
    stage: Stage, work: Coroutine[Any, Any, None], limit: int, keep: Keep, seed: int
) -> None:
    """Carry out the first `limit` disk operations of the work, or all if there are no more; then
    the node dies."""
    stopped = stage.rig.steps.begin(limit)
    acting = asyncio.ensure_future(work)
    acting.add_done_callback(lambda _: stopped.done() or stopped.set_result(None))
    await stopped
    if acting.done():
        acting.result()
    stage.rig.crash(keep, seed)
    acting.cancel()
    await asyncio.gather(acting, return_exceptions=True)
    stage.rig.steps.end()
