"""Deeds at one ledger: its writer changes the ensemble; processes recover it, one after another.

Always true: nothing but a fate is left to chance. Of the entries that were not acknowledged to the
writer one member has a copy; a member is down when recovery begins, and back before the next
process comes; in the end all bookies are up, and each entry of the closed ledger has as many
copies at the members that its record names as the ledger promises.
"""

import asyncio
from collections.abc import Callable
from functools import partial
from itertools import permutations
from typing import Any, NamedTuple

from spark_ledger.errors import LedgerError
from tests.simulation.audit import Audit
from tests.simulation.copies import every_entry_has_its_copies
from tests.simulation.invariants import require
from tests.simulation.ledger_limits import REQUESTS
from tests.simulation.points.enumerate import Deed
from tests.simulation.points.fates import Fate
from tests.simulation.points.stage import Stage
from tests.simulation.world import BookieNode, Client

Quorum = tuple[int, int, int]
SETTLED = 3
"""Entries that all members of their write sets have."""
TAIL = 4
"""Entries of which one member has a copy."""
SENT_S = BIT_LATER_S = 0.05
LATE_S = 1.0
SETTLED_S = 8.0
"""Beyond every time-out of a send to a bookie."""
WRITES = (Fate.KILLED, Fate.PAUSED, Fate.ANSWER_LOST, Fate.ANSWER_LOST_AWAY, Fate.REQUEST_LOST_AWAY)
RECOVERS = (Fate.KILLED, Fate.PAUSED, Fate.BESIDE, Fate.ANSWER_LOST_AWAY)


class LedgerStage(Stage):
    """Of one ledger, with one bookie more than its ensemble has."""

    quorum: Quorum = (2, 2, 2)
    ledger_id = -1

    async def begin(self, **_: Any) -> None:
        await self.world.prepare(self.quorum[0] + 1)

    async def made(self, client: Client) -> Any:
        writer = await client.ledgers.create(*self.quorum)
        self.ledger_id = writer.ledger_id
        for number in range(SETTLED):
            await writer.append([b"%d" % number], rows=1)
        await writer.wait_for_copies(5.0)
        return writer

    def members(self) -> list[BookieNode]:
        """By slot, in the first ensemble of the ledger."""
        nodes = {node.bookie_id: node for node in self.world.nodes}
        ensemble = self.world.ghost.ledgers[self.ledger_id].record.fragments[0].ensemble
        return [nodes[bookie_id] for bookie_id in ensemble]

    async def judge(self) -> None:
        world = self.world
        for client in world.clients:
            client.kill()
        world.observers.well_since = world.loop.now
        world.network.calm()
        for node in world.nodes:
            await node.start()
        await Audit(world, self.ledgers, await world.client("reader")).every_ledger()
        await every_entry_has_its_copies(world)
        world.check()


def _of(stage: Stage) -> LedgerStage:
    assert isinstance(stage, LedgerStage)
    return stage


async def nothing(stage: Stage) -> None:
    return


# -- recoveries ------------------------------------------------------------------------------------


async def half_written(stage: Stage, last: bool, down: int, late: int) -> None:
    """Each entry of the tail has one copy: at the first or the last of its write set, but for the
    member of slot `down`, which is down from then on; that of slot `late` is a bit slow."""
    stage, world = _of(stage), stage.world
    client = await world.client("writer")
    writer = await client.run(stage.made(client))
    members = stage.members()

    async def appends() -> None:
        for number in range(SETTLED, SETTLED + TAIL):
            slots = [(number + n) % len(members) for n in range(stage.quorum[1])]
            has = [slot for slot in slots if slot != down][-1 if last else 0]
            for slot, node in enumerate(members):
                if slot != has:
                    world.network.cut(client.name, node.address)
            writer.append([b"tail %d" % number], rows=1)
            await asyncio.sleep(SENT_S)
            world.network.heal()

    await client.run(appends())
    client.kill()
    members[down].kill("all")
    world.network.slow_down(members[late].address, (BIT_LATER_S, BIT_LATER_S))


async def recovers(stage: Stage, client: Client) -> None:
    await client.ledgers.recover(_of(stage).ledger_id)


async def another_recovers(stage: Stage, down: int) -> None:
    """The member is back."""
    stage = _of(stage)
    stage.world.network.calm()
    await stage.members()[down].start()
    await stage.patiently("recoverer", lambda client: recovers(stage, client))


def _recovery(quorum: Quorum, last: bool, down: int, late: int) -> Deed:
    where = "last" if last else "first"
    return Deed(
        f"recovery of {_named(quorum)}, the {where} have the tail, {down} is down, {late} late",
        partial(half_written, last=last, down=down, late=late),
        recovers,
        partial(another_recovers, down=down),
        {**REQUESTS},
        fates=RECOVERS,
        stage=_stage(quorum),
    )


# -- changes of the ensemble -----------------------------------------------------------------------


class Case(NamedTuple):
    """The member of slot `down` has the next entry, or is `busy`, and dies; that of slot `late`
    answers after the change of the ensemble began, or, if the other is busy, before."""

    late: int
    down: int
    busy: bool


async def changes(stage: Stage, client: Client, case: Case) -> None:
    stage, network = _of(stage), stage.world.network
    writer = await stage.made(client)
    late, down = (stage.members()[slot] for slot in (case.late, case.down))
    late_s = BIT_LATER_S if case.busy else LATE_S
    network.slow_down(late.address, (late_s, late_s))
    if case.busy:
        down.crowd(whole=True)
    appended = [writer.append([b"before"], rows=1)]
    await asyncio.sleep(LATE_S / 4)
    down.kill("all")
    appended += [writer.append([b"while it is down"], rows=1) for _ in range(2)]
    await asyncio.sleep(2 * LATE_S)
    network.quicken(late.address)
    ended = await asyncio.gather(*appended, return_exceptions=True)
    failed = [error for error in ended if isinstance(error, LedgerError)]
    if failed:
        raise failed[0]
    await writer.append([b"after"], rows=1)
    await _settled(writer)
    await writer.close()


async def _settled(writer: Any) -> None:
    """All members that are there have all: no entry is held for one that is gone."""
    await asyncio.sleep(SETTLED_S)
    left = writer.held_bytes
    idle = writer.failure is None and left
    require(not idle, "34", f"{left} bytes are held by appends that have ended, for good")


async def it_is_recovered(stage: Stage, case: Case) -> None:
    """The member that died is back, and the one that was late is down."""
    stage = _of(stage)
    if stage.ledger_id not in stage.world.ghost.ledgers:
        return
    members = stage.members()
    members[case.down].calm()
    await members[case.down].start()
    members[case.late].kill("all")
    await stage.patiently("recoverer", lambda client: recovers(stage, client))


def _change(quorum: Quorum, late: int, down: int, busy: bool) -> Deed:
    case = Case(late, down, busy)
    return Deed(
        f"ensemble change of {_named(quorum)}, {late} late, {down} {'busy, ' * busy}dies",
        nothing,
        partial(changes, case=case),
        partial(it_is_recovered, case=case),
        fates=WRITES,
        stage=_stage(quorum),
    )


# -- all of them -----------------------------------------------------------------------------------


def _named(quorum: Quorum) -> str:
    return "/".join(map(str, quorum))


def _stage(quorum: Quorum) -> Callable[[], Stage]:
    def stage() -> Stage:
        made = LedgerStage()
        made.quorum = quorum
        return made

    return stage


QUORUMS: tuple[Quorum, ...] = ((2, 2, 2), (3, 2, 2), (3, 3, 2))
DEEDS = (
    *(
        _recovery(quorum, last=last, down=down, late=late)
        for quorum in QUORUMS
        for down, late in permutations(range(quorum[0]), 2)
        for last in (False, True)
    ),
    *(
        _change(quorum, late=late, down=down, busy=busy)
        for quorum in QUORUMS
        for late, down in permutations(range(quorum[0]), 2)
        for busy in (False, True)
    ),
)
