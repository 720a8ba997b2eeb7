"""Deeds of self-healing: filling the list of work, working at it, and draining a bookie; and what
happens to a ledger, to a bookie and to the garbage of both during healing.

Always true: three of five bookies keep each ledger, and one of them is gone, or is to go; a closed
ledger and an open one have two fragments each, both with that member, so that slots are given away
in both; the open one's writer lives, or does not.
"""

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any

from spark_ledger.errors import LedgerError
from spark_ledger.metadata import paths
from spark_ledger.metadata.autorecovery import AutorecoverySettings
from spark_ledger.metadata.store import StoreError
from spark_ledger.repair import work_list
from spark_ledger.repair.auditor import Auditor
from spark_ledger.repair.decommission import begin, decommission
from spark_ledger.repair.worker import Worker
from tests.simulation import invariants
from tests.simulation.audit import Audit
from tests.simulation.invariants import require
from tests.simulation.invariants.repair import Swap
from tests.simulation.limbo_work import TOKENS, lacking
from tests.simulation.points.enumerate import Deed
from tests.simulation.points.fates import Fate
from tests.simulation.points.stage import QUORUM, Stage
from tests.simulation.promises import PASSWORD
from tests.simulation.store import Commit
from tests.simulation.world import BookieNode, Client

BOOKIES = 5
DELAY_S, SESSION_S = 4.0, 5.0
ENTRIES, ENTRY_BYTES = 4, 1_500
WINDOW = 3
"""So many entries are copied before it is asked again whether they are missing."""
FLUSHED_S = 4.0
WHOLE_S = 200.0
LOOKS, ROUNDS = 8, 8
SETTINGS = AutorecoverySettings(lost_bookie_delay_s=DELAY_S, repair_bytes_per_s=0)


class HealingStage(Stage):
    """Without topics."""

    def __init__(self) -> None:
        super().__init__()
        self.member: BookieNode
        """Of both ledgers: it is lost, or is drained."""
        self.old = ""
        """Its identity."""
        self.writer: Any = None
        """Of the open ledger."""
        self.idle = False
        """Whether the writer lives, and appends nothing meanwhile."""
        self.drained = ""
        self.back: tuple[int, int] | None = None
        """How many copies had been given, and at most how many more may be, since it is back."""

    async def begin(self, **_: Any) -> None:
        world = self.world
        world.store.faults.session_timeout_s = SESSION_S
        world.ghost.lost_bookie_delay_s = DELAY_S
        await world.prepare(BOOKIES, healing=SETTINGS)
        world.observers.swaps.append(self._swapped)
        world.store.listeners.append(self._stands)

    # -- what is there -------------------------------------------------------------------------

    async def ledgers_made(self, *, lives: bool = False) -> None:
        """One closed, with a password, and one open, whose writer `lives`."""
        client = await self.world.client("writer")
        closed = await client.run(self._written(client, PASSWORD))
        await client.run(closed.close())
        self.writer = await client.run(self._written(client, b""))
        ledgers = self.world.ghost.ledgers.values()
        members = [{*one.record.last_fragment.ensemble} for one in ledgers]
        members += [{*one.record.fragments[0].ensemble} for one in ledgers]
        self.old = min(set.intersection(*members))
        self.member = self.node(self.old)
        if not lives:
            client.kill()

    async def _written(self, client: Client, password: bytes) -> Any:
        """A ledger of two fragments."""
        writer = await client.ledgers.create(*QUORUM, password=password)
        for _ in range(2):
            await self.append(writer)
            if len(writer.record.fragments) == 1:
                *_, last = writer.record.last_fragment.ensemble
                await self.replaced(writer, self.node(last))
        return writer

    async def append(self, writer: Any, count: int = ENTRIES) -> None:
        for number in range(count):
            await writer.append([bytes([number]) * ENTRY_BYTES], rows=1)

    async def replaced(self, writer: Any, node: BookieNode) -> None:
        """The node is down for a moment, in which the writer takes another in its place."""
        node.kill("all")
        await self.append(writer, 1)
        await node.start()

    async def goes_on(self) -> None:
        """The idle writer, which replaced the drained member by itself."""
        try:
            await self.append(self.writer, 1)
        except LedgerError as failure:
            require(False, "R5", f"its writer lives, and cannot append: {failure}")

    def node(self, bookie_id: str) -> BookieNode:
        return next(node for node in self.world.nodes if node.bookie_id == bookie_id)

    async def lose(self, *, for_good: bool) -> None:
        self.member.kill("all")
        if for_good:
            self.member.blank()
            await self.member.start()

    async def listed(self) -> None:
        """An auditor has seen it, if any ledger names it."""
        client = await self.world.client("auditor")
        auditor = Auditor(client.ledgers, TOKENS)
        naming = [one for one in self.world.ghost.ledgers.values() if one.names(self.old)]
        while len(self._names_listed()) < len(naming):
            await client.run(auditor.look())
            await asyncio.sleep(1)
        client.kill()

    def _names_listed(self) -> list[str]:
        store = self.world.store
        found = [f"{one}" for one in self.world.ghost.ledgers]
        return [n for n in found if store.peek(paths.underreplicated(int(n))) is not None]

    def copies_given(self) -> int:
        return sum(len(ledger.copied) for ledger in self.world.ghost.ledgers.values())

    # -- what is seen --------------------------------------------------------------------------

    def _stands(self, commit: Commit) -> None:
        """As a bookie's own watch does."""
        folder = f"{paths.draining('')}"
        for change in commit.changes:
            if change.path.startswith(folder) and change.path != folder:
                bookie_id = change.path.removeprefix(folder)
                if change.after is not None:
                    self.world.drained[bookie_id] = self.world.ghost.drained[bookie_id] = None
                else:
                    self.world.drained.pop(bookie_id, None)
                self.node(bookie_id).standing_changed()

    def _swapped(self, swap: Swap) -> None:
        loop = self.world.loop
        work = self._look_at(swap)
        loop.call_soon(lambda: asyncio.ensure_future(work), context=loop.outside)

    async def _look_at(self, swap: Swap) -> None:
        node = next(one for one in self.world.nodes if one.bookie_id == swap.new)
        if node.running and node.bookie is not None:
            missing = await lacking(node, swap.record, swap.fragment.first_entry, denied=True)
            judge = invariants.who_took_a_slot_has_all_of_it
            try:
                judge(self.world.ghost, swap.new, swap.record.ledger_id, missing)
            except invariants.Violation as violation:
                self.world.observers.violated(violation)

    # -- the end -------------------------------------------------------------------------------

    async def judge(self) -> None:
        world = self.world
        if self.back is not None:
            given, most = self.back
            more = self.copies_given() - given
            require(more <= most, "R4", f"{more} copies are given of a bookie that is back")
        for client in world.clients:
            if client.process.alive:
                client.kill()
        world.observers.well_since = world.loop.now
        for node in world.nodes:
            await node.start()
        await self.made_whole()
        await Audit(world, self.ledgers, await world.client("reader")).every_ledger()
        await self.made_whole()
        for ledger in world.ghost.ledgers.values():
            for node in world.nodes if not ledger.deleted else ():
                missing = await lacking(node, ledger.record)
                where = f"{node.bookie_id} is a member of ledger {ledger.ledger_id}"
                require(not missing, "R1", f"{where} and lacks {missing}")
        world.check()

    async def made_whole(self) -> None:
        """By a process that comes fresh, until nothing is left to do."""
        client = await self.world.client("healer")
        auditor, worker = Auditor(client.ledgers, TOKENS), Worker(client.ledgers, TOKENS)
        deadline = self.world.loop.now + WHOLE_S
        looks = 0
        while (left := self._left()) or looks < 2:
            if self.world.loop.now > deadline:
                invariants.work_ends(self.world.ghost, left, WHOLE_S)
            await client.run(_pass(auditor, worker))
            looks += 1
            await asyncio.sleep(1)
        client.kill()

    def _left(self) -> list[str]:
        ledgers = [one for one in self.world.ghost.ledgers.values() if not one.deleted]
        there = [n.bookie_id for n in self.world.nodes if n.running and n.bookie_id != self.drained]
        found = [f"ledger {one} is listed" for one in self._names_listed()]
        for ledger in ledgers:
            members = {b for each in ledger.record.fragments for b in each.ensemble}
            if ledger.closed and (ledger.record.joining or members - {*there}):
                found.append(f"{ledger.record}")
        return found


async def _pass(auditor: Auditor, worker: Worker) -> None:
    try:
        await auditor.look()
        await worker.round()
    except (LedgerError, StoreError):
        return  # the next one may not meet it


# -- what is prepared -----------------------------------------------------------------------------


async def a_member_lost(stage: Stage) -> None:
    assert isinstance(stage, HealingStage)
    await stage.ledgers_made()
    await stage.lose(for_good=True)


async def a_member_lost_and_listed(stage: Stage) -> None:
    assert isinstance(stage, HealingStage)
    await a_member_lost(stage)
    await stage.listed()


async def a_member_away(stage: Stage) -> None:
    assert isinstance(stage, HealingStage)
    await stage.ledgers_made()
    await stage.lose(for_good=False)
    await stage.listed()


async def a_member_lost_of_who_writes(stage: Stage) -> None:
    """The writer lives, and has taken another in its place."""
    assert isinstance(stage, HealingStage)
    await stage.ledgers_made(lives=True)
    await stage.lose(for_good=True)
    await stage.append(stage.writer, 1)
    await stage.listed()


async def a_member_to_be_drained(stage: Stage) -> None:
    assert isinstance(stage, HealingStage)
    await stage.ledgers_made()
    await somebody_heals(stage)


async def a_member_drained_and_listed(stage: Stage) -> None:
    """The member is up, and still has its copies: it responds to requests for them."""
    assert isinstance(stage, HealingStage)
    await stage.ledgers_made()
    client = await stage.world.client("operator")
    await client.run(begin(client.ledgers, stage.old))
    stage.drained = stage.old
    client.kill()


async def a_member_of_who_is_idle_to_be_drained(stage: Stage) -> None:
    assert isinstance(stage, HealingStage)
    await stage.ledgers_made(lives=True)
    stage.idle = True
    await somebody_heals(stage)


async def somebody_heals(stage: Stage) -> None:
    """All the while."""
    client = await stage.world.client("healer")
    auditor, worker = Auditor(client.ledgers, TOKENS), Worker(client.ledgers, TOKENS)

    async def heals() -> None:
        while True:
            await _pass(auditor, worker)
            await asyncio.sleep(1)

    client.run(heals(), "heals")
    await asyncio.sleep(1)


# -- what is done ---------------------------------------------------------------------------------


async def looks(stage: Stage, client: Client) -> None:
    auditor = Auditor(client.ledgers, TOKENS)
    for _ in range(LOOKS):
        await auditor.look()
        await asyncio.sleep(1)


async def works(stage: Stage, client: Client) -> None:
    worker = Worker(client.ledgers, TOKENS)
    for _ in range(ROUNDS):
        await worker.round()
        await asyncio.sleep(1)
        if not await work_list.listed_ledgers(client.session):
            break
    await worker.round()  # as the next pass of a process: a lock that is not given back yet is


async def drains(stage: Stage, client: Client) -> None:
    assert isinstance(stage, HealingStage)
    stage.drained = stage.old
    async for left in decommission(client.ledgers, stage.old):
        if left.done:
            named = [one for one in stage.world.ghost.ledgers.values() if one.names(stage.old)]
            require(not named, "R3", f"drained, and named by {named}")
            if stage.idle:
                await stage.goes_on()


# -- what others do -------------------------------------------------------------------------------


async def others_heal(stage: Stage) -> None:
    assert isinstance(stage, HealingStage)
    await stage.made_whole()


async def another_drains(stage: Stage) -> None:
    await stage.patiently("operator", lambda client: drains(stage, client))


async def it_is_back(stage: Stage) -> None:
    assert isinstance(stage, HealingStage)
    await stage.member.start()
    await asyncio.sleep(1)
    stage.back = stage.copies_given(), 2 * WINDOW


async def its_ledger_changes(stage: Stage) -> None:
    """The writer, which lives, replaces a member."""
    assert isinstance(stage, HealingStage)
    if not stage.writer.record.closed and stage.writer.failure is None:
        *_, last = stage.writer.record.last_fragment.ensemble
        await stage.replaced(stage.writer, stage.node(last))


async def its_ledgers_are_closed(stage: Stage) -> None:
    async def closes(client: Client) -> None:
        for ledger_id, ledger in list(stage.world.ghost.ledgers.items()):
            if not ledger.closed:
                await client.ledgers.recover(ledger_id)

    await stage.patiently("recoverer", closes)


async def its_ledgers_are_deleted(stage: Stage) -> None:
    await its_ledgers_are_closed(stage)

    async def deletes(client: Client) -> None:
        for ledger_id in list(stage.world.ghost.ledgers):
            await client.ledgers.delete(ledger_id)

    await stage.patiently("deleter", deletes)


async def garbage_goes(stage: Stage) -> None:
    """At every bookie, whatever may go: two looks, after flushes."""
    for _ in range(3):
        await asyncio.sleep(FLUSHED_S)
        for node in stage.world.nodes:
            if node.bookie is not None:
                await node.bookie.reclaim.collect(sweep=True, surplus=True)


async def it_is_back_and_garbage_goes(stage: Stage) -> None:
    await it_is_back(stage)
    await garbage_goes(stage)


async def it_is_back_and_gone_again(stage: Stage) -> None:
    """Another worker withdraws the bookie that joined for the member; its copies go; and it joins
    again."""
    assert isinstance(stage, HealingStage)
    await stage.member.start()
    await asyncio.sleep(1)
    await stage.made_whole()
    await garbage_goes(stage)
    stage.member.kill("all")
    await stage.listed()
    client = await stage.world.client("healer")
    worker = Worker(client.ledgers, TOKENS)

    def dies(commit: Commit) -> None:
        """The worker dies once a bookie has joined."""
        ledgers = stage.world.ghost.ledgers.values()
        if client.process.alive and any(one.record.joining for one in ledgers):
            stage.world.loop.call_soon(client.kill, context=stage.world.loop.outside)

    stage.world.store.listeners.append(dies)
    await asyncio.gather(client.run(worker.round()), return_exceptions=True)


def _meanwhile(
    what: str,
    prepare: Callable[[Stage], Coroutine[Any, Any, None]],
    others: Callable[[Stage], Coroutine[Any, Any, None]],
    *fates: Fate,
) -> Deed:
    named = fates or (Fate.BESIDE,)
    return Deed(f"healing, {what}", prepare, works, others, fates=named, stage=HealingStage)


DEEDS = (
    Deed("auditor", a_member_lost, looks, others_heal, stage=HealingStage),
    Deed("healing", a_member_lost_and_listed, works, others_heal, stage=HealingStage),
    Deed("decommission", a_member_to_be_drained, drains, another_drains, stage=HealingStage),
    Deed(
        *("decommission, its writer is idle", a_member_of_who_is_idle_to_be_drained, drains),
        *(another_drains,),
        stage=HealingStage,
    ),
    _meanwhile("it is back", a_member_away, it_is_back),
    _meanwhile("its ledger changes", a_member_lost_of_who_writes, its_ledger_changes),
    _meanwhile("closed by others", a_member_lost_and_listed, its_ledgers_are_closed),
    _meanwhile("deleted by others", a_member_lost_and_listed, its_ledgers_are_deleted),
    _meanwhile("garbage goes", a_member_lost_and_listed, garbage_goes),
    _meanwhile("drained, and garbage goes", a_member_drained_and_listed, garbage_goes),
    _meanwhile("back, and garbage goes", a_member_away, it_is_back_and_garbage_goes),
    _meanwhile("back, and gone again", a_member_away, it_is_back_and_gone_again, Fate.PAUSED),
)
