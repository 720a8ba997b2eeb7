"""Every wait of a deed lasts very long, one after the other, while the node does all else.

Always true: a deed is prepared in the same way each time, so its waits are the same each time; at
the n-th of them (stepping.py) the call of the disk, the index or the metadata store stands still,
entries come, a fence, a flush and reads, a ledger in limbo is repaired, space is reclaimed, and a
ledger is deleted or not; then it goes on, or its caller has given it up. A call of the store fails,
too. Nothing stays under way or counted; what the node promised holds at once, and after a crash.
"""

import asyncio
from collections.abc import Coroutine, Sequence
from typing import Any, NamedTuple

from tests.simulation.loop import run
from tests.storage import deeds
from tests.storage.points import Deed, PointFailed, prepared
from tests.storage.stage import Stage

LONG_S = 2.0
ENDS_S = 120.0
"""Simulated: nothing takes longer after the wait is over."""
DELETES = 3
"""At every so manieth wait a ledger is deleted."""
RECLAIMS = (
    deeds.collects,
    deeds.compacts,
    deeds.reclaims_beside_a_flush,
    deeds.collects_and_is_named,
)
"""A node has one pass at a time."""
UNSERVED = (deeds.stops, deeds.rebuilds, deeds.rebuilds_without_states)
PAUSED = tuple(deed for deed in deeds.DEEDS if deed.act not in UNSERVED)
"""Deeds after which the node serves."""


class Pauses(NamedTuple):
    """What an enumeration did."""

    waits: Sequence[str]
    failures: int
    """How many calls of the store failed."""


def enumerate_pauses(deed: Deed, first: int = 0, every: int = 1) -> Pauses:
    """Raises PointFailed."""
    waits: list[str] = []
    run(_whole(deed, waits))
    failures = 0
    for number in range(first % every, len(waits), every):
        for fails in (False, True) if waits[number].startswith("store") else (False,):
            failures += fails
            try:
                run(_held(deed, number, fails))
            except Exception as error:
                what = "fails" if fails else "takes long"
                where = f"{deed.name}: wait {number} of {len(waits)} {what}: {waits[number]}"
                raise PointFailed(f"{where}: {error!r}") from error
    return Pauses(waits, failures)


async def _whole(deed: Deed, waits: list[str]) -> None:
    stage = await prepared(deed)
    stage.rig.steps.hold()
    await deed.act(stage)
    waits += stage.rig.steps.waits
    await _holds(stage, "none")


async def _held(deed: Deed, number: int, fails: bool) -> None:
    stage = await prepared(deed)
    held = stage.rig.steps.hold(number, fails=fails)
    acting = asyncio.ensure_future(deed.act(stage))
    await asyncio.wait({acting, held}, return_when=asyncio.FIRST_COMPLETED)
    if number % DELETES == 1:
        stage.delete(1)
    others = [asyncio.ensure_future(each) for each in _others(stage, deed)]
    if held.done() and not fails:
        await asyncio.wait({acting, *others}, timeout=LONG_S)
        if deed.act is deeds.gives_up:
            acting.cancel()
        stage.rig.steps.let_go()
    async with asyncio.timeout(ENDS_S):
        await asyncio.gather(*others)
        await asyncio.wait([acting])
        if not acting.cancelled():
            acting.result()
        await stage.flushed()
    await stage.verify()
    stage.is_at_rest()
    await _holds(stage, "random" if number % 2 else "none")


def _others(stage: Stage, deed: Deed) -> list[Coroutine[Any, Any, None]]:
    """What comes while something stands still: what is new, and what is there, once more."""
    if not stage.rig.running:
        return []
    work: list[Coroutine[Any, Any, None]] = [
        stage.add(1, range(40, 43)),
        stage.add(2, range(3), recovery=True),
        stage.add(3, range(40, 42), recovery=True),
        stage.add_again(3),
        stage.add(3, [20], size=60),
        stage.announce(3, 7),
        stage.fence(3),
        stage.reads(),
    ]
    if not stage.rig.is_flushing:
        work.append(stage.flushed())
    work += map(stage.repaired, stage.model.ledgers)
    if deed.act not in RECLAIMS:
        work.append(stage.rig.reclaim())
    return work


async def _holds(stage: Stage, keep: Any) -> None:
    await stage.crash(keep)
    await stage.verify()
