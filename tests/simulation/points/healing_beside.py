"""Deeds of self-healing beside which something else goes on: a member loses more while it is
repaired, and a ledger is made at a bookie that is being drained.

Always true: as in healing.py; what is done beside a call is done in no time.
"""

import asyncio
from collections.abc import Sequence
from typing import Any

from spark_ledger.metadata import paths
from spark_ledger.metadata.store import Create, Operation
from spark_ledger.repair.decommission import decommission
from tests.simulation.invariants import require
from tests.simulation.ledger_limits import REQUESTS
from tests.simulation.points.enumerate import Deed
from tests.simulation.points.fates import Fate
from tests.simulation.points.healing import (
    FLUSHED_S,
    HealingStage,
    its_ledgers_are_closed,
    somebody_heals,
    works,
)
from tests.simulation.points.stage import QUORUM, Stage
from tests.simulation.world import Client


class BesideStage(HealingStage):
    """With a process that has chosen bookies for a ledger, and has not asked yet for its record."""

    def __init__(self) -> None:
        super().__init__()
        self.goes_on_making = asyncio.Event()
        self.makers: list[tuple[Client, asyncio.Task[Any]]] = []
        self.chosen = ""
        """The record that it is about to write."""


def _of(stage: Stage) -> BesideStage:
    assert isinstance(stage, BesideStage)
    return stage


# -- more is lost ----------------------------------------------------------------------------------


async def a_member_lacks_all(stage: Stage) -> None:
    """It lost its ledger directory, and reports that."""
    stage = _of(stage)
    await stage.ledgers_made()
    await its_ledgers_are_closed(stage)
    await it_loses_all(stage)
    await stage.listed()


async def it_loses_all(stage: Stage) -> None:
    """What is flushed, so that no journal has it any more, which a start would read again."""
    member = _of(stage).member
    await member.stop()
    await member.start()
    await asyncio.sleep(FLUSHED_S)
    member.kill("all")
    member.lose_directory()
    await member.start()
    await asyncio.sleep(1)


# -- a ledger more ---------------------------------------------------------------------------------


async def a_ledger_is_almost_made(stage: Stage) -> None:
    """At the bookie that is drained then."""
    stage = _of(stage)
    await stage.ledgers_made()
    while not stage.makers:
        client = await stage.world.client("maker")
        asked = asyncio.Event()
        task = client.run(_makes(stage, client, asked), "makes a ledger")
        await asked.wait()
        if stage.old in stage.chosen:
            stage.makers.append((client, task))
        else:
            client.kill()
    await somebody_heals(stage)


async def _makes(stage: BesideStage, client: Client, asked: asyncio.Event) -> None:
    plain = client.session.multi

    async def multi(operations: Sequence[Operation]) -> None:
        for made in operations:
            if isinstance(made, Create) and made.path.startswith(paths.LEDGERS):
                stage.chosen = made.value.decode()
                asked.set()
                await stage.goes_on_making.wait()
        await plain(operations)

    client.session.multi = multi  # type: ignore[method-assign]
    await client.ledgers.create(*QUORUM)


async def it_is_made(stage: Stage) -> None:
    stage = _of(stage)
    stage.goes_on_making.set()
    await asyncio.gather(*(task for _, task in stage.makers))


async def drains_all(stage: Stage, client: Client) -> None:
    """Whatever was made before the last look at all records is drained too."""
    stage = _of(stage)
    stage.drained = stage.old
    plain, made = client.session.sync, stage.world.ghost.ledgers

    async def sync(path: str = "/") -> None:
        known.update(made)
        await plain(path)

    known: dict[int, Any] = {}
    client.session.sync = sync  # type: ignore[method-assign]
    async for left in decommission(client.ledgers, stage.old):
        if left.done:
            named = [i for i, one in made.items() if i in known and one.names(stage.old)]
            require(not named, "R3", f"drained, and named by {named}")


DEEDS = (
    Deed(
        *("healing, it loses all once more", a_member_lacks_all, works, it_loses_all, {**REQUESTS}),
        fates=(Fate.BESIDE,),
        stage=BesideStage,
    ),
    Deed(
        *("decommission, a ledger is made", a_ledger_is_almost_made, drains_all, it_is_made),
        fates=(Fate.BESIDE,),
        stage=BesideStage,
    ),
)
