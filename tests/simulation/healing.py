"""A cluster that heals itself in a run: auditors and workers, bookies that are lost for good one
after another, and an operator who drains others.

Always true: auditor and worker are the product's own, in processes that are paused, killed or lose
their session in the middle of a look or a round, and come again. No more bookies are lost than the
protocol bears, of those whose copies were not made elsewhere yet (chaos.py): the others may all go,
so that in the end no original copy need be left. When all is over the list of work is empty, or
each ledger on it has its reason (R3), no copy is where a bookie on another rack could take it (R3),
and each bookie that took a slot has every entry of it (R1).
"""

import asyncio
import random
from collections.abc import Callable, Coroutine, Mapping
from contextlib import suppress
from typing import Any

from spark_ledger.errors import LedgerError
from spark_ledger.metadata import autorecovery, paths
from spark_ledger.metadata.autorecovery import AutorecoverySettings
from spark_ledger.metadata.ledger_record import JoiningBookie
from spark_ledger.metadata.store import NodeExists, NoNode, SessionState, StoreError
from spark_ledger.metadata.store_calls import take_role
from spark_ledger.repair import slots, work_list
from spark_ledger.repair.auditor import Auditor, AuditReport
from spark_ledger.repair.service import Autorecovery
from spark_ledger.repair.worker import Worker
from tests.simulation import invariants
from tests.simulation.chaos import Chaos
from tests.simulation.ghost import Ghost, LedgerGhost
from tests.simulation.invariants import Violation
from tests.simulation.invariants.repair import Swap, is_better
from tests.simulation.limbo_work import NAME as REPAIRER
from tests.simulation.limbo_work import TOKENS, lacking
from tests.simulation.loop import current
from tests.simulation.store import EPOCH_MS, Commit
from tests.simulation.world import BookieNode, Client, World

NAME = "healer"
SESSION_S = 5.0
"""Sessions end so soon: a bookie that is down counts as gone in a run's time."""
WHOLE_S = 200.0
"""Simulated seconds in which everything must be whole again, after the audit."""
PAUSE_TIMES, PAUSE_S_MAX = 100, 3600.0
"""A pass over all records finds what is misplaced; the next may come so many times later than the
last one took, an hour at most."""
CALM = {"kill", "blank", "power", "restart", "power everywhere"}
"""In runs without other classes of fault nothing but healing itself holds up workers of repair."""
DRAINED_S = 25.0
"""An operator gives up then."""


def draw_settings(rng: random.Random) -> AutorecoverySettings:
    return AutorecoverySettings(
        lost_bookie_delay_s=rng.choice((1.5, 4.0, 8.0)),
        repair_bytes_per_s=rng.choice((0, 0, 3_000)),
    )


class _Mind:
    """Of one process that heals: its auditor and worker, and what the auditor must have seen."""

    def __init__(self, client: Client, world: World) -> None:
        self.auditor = Auditor(client.ledgers, TOKENS)
        self.worker = Worker(client.ledgers, TOKENS)
        self.gone_since: dict[str, float] = {}
        """By bookie that is not registered: the earliest moment since which a look may have seen it
        gone."""
        self.whole_since = world.loop.now
        """Since when its session is."""
        self._world = world
        self.looked_for_s = 0.0
        """The longest of its looks, which may have been a pass over all records."""
        self.seen: dict[str, int] = {}
        """By path on the list of work: the version that was read last."""
        client.session.add_session_listener(self._heard)
        plain_get = client.session.get

        async def get(path: str, *more: Any) -> Any:
            node = await plain_get(path, *more)
            if path.startswith(paths.UNDERREPLICATED):
                self.seen[path] = node.version
            return node

        client.session.get = get  # type: ignore[method-assign]

    def _heard(self, state: SessionState) -> None:
        if state is not SessionState.CONNECTED:
            self.whole_since = self._world.loop.now

    async def look(self) -> tuple[AuditReport, dict[str, float], float]:
        """A look of the auditor, and what `gone_since` and `whole_since` were when it began. It may
        take long: a bookie that goes meanwhile it may see gone at once."""
        begun_s = self._world.loop.now
        ghost = self._world.ghost
        seen = self.gone_since = gone_since(ghost, self.gone_since, begun_s)
        whole_since = self.whole_since
        try:
            return await self.auditor.look(), seen, whole_since
        finally:
            self.gone_since = gone_since(ghost, seen, begun_s)
            self.looked_for_s = max(self.looked_for_s, self._world.loop.now - begun_s)


def gone_since(ghost: Ghost, before: Mapping[str, float], from_s: float) -> dict[str, float]:
    """By bookie that is not registered, since when a look that began at `from_s` may have seen it
    gone: as it was `before`, else since the look began or since it went, whichever is later."""
    gone = [bookie for bookie in ghost.homes if bookie not in ghost.registered_s]
    went_s = {bookie: ghost.unregistered_s.get(bookie, from_s) for bookie in gone}
    return {bookie: before.get(bookie, max(from_s, went_s[bookie])) for bookie in gone}


class Healing:
    """Of one run."""

    def __init__(self, chaos: Chaos, rng: random.Random) -> None:
        self._chaos = chaos
        self._world = chaos.world
        self._work = chaos.work
        self._healers = rng.choice((1, 2, 2))
        self._drains = rng.random() < 0.5
        self._calm = rng.random() < 0.3
        """Nothing is done to healers but what the chaos does to everybody."""
        ghost = self._world.ghost
        calm = self._calm and not chaos.plan.ledgers  # where strikes hold up everybody
        ghost.calm_repair = calm and {*chaos.plan.faults} <= CALM
        self._jumps = "clock jump" in chaos.plan.faults
        self._minds: dict[Client, _Mind] = {}
        self._end = self._world.loop.now + chaos.plan.chaos_s
        self._accepted: tuple[str, ...] = ()
        self._world.observers.swaps.append(self._swapped)
        self._world.store.listeners.append(self._committed)

    def actors(self) -> list[tuple[str, Coroutine[Any, Any, None]]]:
        """By name."""
        found = [(f"supervisor of healer {n}", self._supervise()) for n in range(self._healers)]
        return [*found, *([("supervisor of drains", self._drain())] if self._drains else [])]

    async def _supervise(self) -> None:
        """One process after another, until the chaos' time is over."""
        while self._world.loop.now < self._end:
            client = await self._world.client(NAME)
            work = client.run(self._heal(client), "heals")
            (outcome,) = await asyncio.gather(work, return_exceptions=True)
            if isinstance(outcome, Exception):
                raise outcome  # else it was killed
            await asyncio.sleep(0.5)

    async def _heal(self, client: Client) -> None:
        if client.rng.random() < 0.25:
            await self._heal_as_hosted(client)
            return
        mind = self._minds[client] = _Mind(client, self._world)
        always = client.rng.random() < 0.4  # two may do it at once
        while self._world.loop.now < self._end:
            await asyncio.sleep(client.rng.uniform(0.1, 1.0))
            if not self._calm and client.rng.random() < 0.25:
                self._disturb(client)
            await self._pass(client, mind, always)

    async def _heal_as_hosted(self, client: Client) -> None:
        """As a process of production does, by itself."""
        with suppress(TimeoutError, LedgerError):
            async with asyncio.timeout(self._end - self._world.loop.now):
                now_ms = lambda: EPOCH_MS + int(current().time() * 1000)  # noqa: E731
                await (await Autorecovery.start(client.ledgers, client.name, 1, now_ms)).run()

    async def _pass(self, client: Client, mind: "_Mind", always: bool) -> None:
        ghost = self._world.ghost
        try:
            if always or await take_role(client.session, paths.AUDITOR):
                report, seen, whole_since = await mind.look()
                if not self._jumps:  # by what was so when it began: a pass may take long
                    self._judge_lost(report, seen, whole_since)
                await self._accept(client, report)
            for outcome in await mind.worker.round():
                ghost.meet("under-replicated ledger " + ("left" if outcome.why else "made whole"))
                if outcome.why:
                    self._world.trace.note(client.name, f"{outcome}")
        except (LedgerError, StoreError) as error:
            what = error if isinstance(error, LedgerError) else LedgerError(str(error))
            self._work.met(client, "heal", what)

    def _judge_lost(self, report: AuditReport, seen: dict[str, float], whole_since: float) -> None:
        now = self._world.loop.now
        gone_s = {bookie: now - since for bookie, since in seen.items()}
        judge = invariants.a_bookie_is_lost_after_the_whole_delay
        self._judge(judge, sorted(report.lost), gone_s, now - whole_since)

    async def _accept(self, client: Client, report: AuditReport) -> None:
        """An operator knows which bookies are gone for good."""
        gone = tuple(b for b in sorted(report.too_many) if self._world.ghost.bookie(b).wiped)
        if gone and not {*gone} <= {*self._accepted}:
            self._accepted = tuple(sorted({*self._accepted, *gone}))
            await autorecovery.change_settings(client.session, accepted=self._accepted)

    def _disturb(self, client: Client) -> None:
        """In the middle of what it does next."""
        loop, rng = self._world.loop, client.rng
        after_s, kind, still_s = rng.uniform(0, 0.3), rng.random(), rng.choice((1.0, 7.0, 20.0))

        def happens() -> None:
            if not client.process.alive or self._world.observers.well_since is not None:
                return
            if kind < 0.35:
                client.kill()
            elif kind < 0.6:
                client.session.expire()
            else:
                client.process.pause()
                loop.call_later(still_s, client.process.resume, context=loop.outside)

        loop.call_later(after_s, happens, context=loop.outside)

    def _committed(self, commit: Commit) -> None:
        """Judge that a worker that takes a ledger off the list has seen all its reasons."""
        for change in commit.changes:
            on_list = change.path.startswith(paths.UNDERREPLICATED)
            minds = [m for client, m in self._minds.items() if client.name == commit.session]
            if on_list and change.before is not None and change.after is None and minds:
                seen = minds[0].seen.get(change.path)
                judge = invariants.no_reason_is_taken_off_unseen
                self._judge(judge, change.path, seen, change.before.version)

    # -- draining ------------------------------------------------------------------------------

    async def _drain(self) -> None:
        """One bookie after another gives its copies away while it is up."""
        client = await self._world.client("drainer")
        while self._world.loop.now < self._end:
            await asyncio.sleep(client.rng.uniform(1, 5))
            running = self._chaos.running()
            if not client.process.alive:
                client = await self._world.client("drainer")
            elif running:
                node = client.rng.choice(running)
                draining = client.run(self._drain_one(client, node), "drains")
                (outcome,) = await asyncio.gather(draining, return_exceptions=True)
                if isinstance(outcome, Exception):
                    raise outcome
                self._world.drained.pop(node.bookie_id, None)

    async def _drain_one(self, client: Client, node: BookieNode) -> None:
        bookie_id, until = node.bookie_id, min(self._end, self._world.loop.now + DRAINED_S)
        try:
            await client.session.create(paths.draining(bookie_id), parents=True)
        except NodeExists:
            pass
        except StoreError:
            return
        self._world.ghost.drained[bookie_id] = None
        self._tell(node, bookie_id, drained=True)
        while self._world.loop.now < until and self._holds(bookie_id):  # noqa: ASYNC110
            await asyncio.sleep(0.5)
        if not self._holds(bookie_id):
            self._world.ghost.meet("bookie drained")
        await self._undrain(client, bookie_id)
        self._tell(node, bookie_id, drained=False)

    async def _undrain(self, client: Client, bookie_id: str) -> None:
        while True:
            try:
                await client.session.delete(paths.draining(bookie_id))
                return
            except NoNode:
                return
            except StoreError:
                await asyncio.sleep(1)

    def _tell(self, node: BookieNode, bookie_id: str, *, drained: bool) -> None:
        """As the bookie's watch does."""
        if drained:
            self._world.drained[bookie_id] = None
        else:
            self._world.drained.pop(bookie_id, None)
        if node.running and node.bookie is not None and node.bookie_id == bookie_id:
            node.standing_changed()

    def _holds(self, bookie_id: str) -> bool:
        return any(not each.deleted and each.names(bookie_id) for each in self._ledgers())

    def _ledgers(self) -> list[LedgerGhost]:
        return list(self._world.ghost.ledgers.values())

    # -- bookies that took a slot --------------------------------------------------------------

    def _swapped(self, swap: Swap) -> None:
        """Look at what the bookie truly has, now."""
        ghost = self._world.ghost
        ghost.meet("slot swapped")
        if swap.old in ghost.registered_s and swap.old not in ghost.drained:
            ghost.meet("slot of a bookie that is there swapped")
        loop = self._world.loop
        loop.call_soon(lambda: self._spawn_look(swap), context=loop.outside)

    def _spawn_look(self, swap: Swap) -> None:
        self._chaos.spawn(self._look_at(swap), "looks at who took a slot")

    async def _look_at(self, swap: Swap) -> None:
        node = self._node_of(swap.new)
        if node is None or node.bookie is None or not self._is_sound(node):
            return  # its next start is asked for everything that it has promised
        boots, bookie = node.boots, node.bookie
        missing = await lacking(node, swap.record, swap.fragment.first_entry, denied=True)
        same = boots == node.boots and node.running and not bookie.failed.done()
        ledger = self._world.ghost.ledgers[swap.record.ledger_id]
        named = not ledger.deleted and ledger.names(swap.new)
        if same and not node.stopping and self._is_sound(node) and named:
            judge = invariants.who_took_a_slot_has_all_of_it
            self._judge(judge, swap.new, ledger.ledger_id, missing)

    def _judge(self, judge: Callable[..., None], *what: Any) -> None:
        try:
            judge(self._world.ghost, *what)
        except Violation as violation:
            self._world.observers.violated(violation)

    def _node_of(self, bookie_id: str) -> BookieNode | None:
        return next((node for node in self._world.nodes if node.bookie_id == bookie_id), None)

    def _is_sound(self, node: BookieNode) -> bool:
        """Whether its disks were not harmed; otherwise it lists itself what is in limbo."""
        mine = self._world.ghost.bookie(node.bookie_id)
        disks = [*node.journal_disks, *node.ledger_disks]
        slow = any(disk.faults.read_s[1] for disk in disks)
        return not (mine.rotten or mine.bereft or mine.unsure or mine.partial or slow)

    # -- the end -------------------------------------------------------------------------------

    async def ends(self) -> None:
        """Everything was audited: all copies are made whole, as far as there are spares."""
        world = self._world
        living = [one for one in self._minds if one.process.alive]
        client = living[0] if living else await world.client(NAME)
        mind = self._minds.get(client) or _Mind(client, world)
        for one in world.clients:  # what they have locked is theirs as long as they live
            others = one.name.startswith((NAME, REPAIRER)) and one is not client
            if one.process.alive and others:
                one.kill()
        for bookie_id in await client.run(autorecovery.draining_bookies(client.session)):
            await client.run(self._undrain(client, bookie_id))
        world.drained.clear()
        for node in world.nodes:
            if node.running and node.bookie is not None:
                node.standing_changed()
        within_s = WHOLE_S + min(PAUSE_TIMES * mind.looked_for_s, PAUSE_S_MAX)
        deadline = world.loop.now + within_s
        while left := await client.run(self._left(client)):
            if world.loop.now > deadline:
                invariants.work_ends(world.ghost, left, within_s)
            await client.run(self._pass(client, mind, True))
            await asyncio.sleep(1)
        invariants.work_ends(world.ghost, [], WHOLE_S)
        for ledger in self._ledgers():
            if ledger.closed and not ledger.deleted:
                await self._compare(ledger)

    async def _left(self, client: Client) -> list[str]:
        """What is not whole and could be."""
        found = []
        for ledger in self._ledgers():
            if ledger.deleted or not ledger.closed:
                continue
            work = await work_list.find(client.session, ledger.ledger_id)
            gone = [b for b in self._gone() if ledger.names(b)]
            explained = work is not None and bool(work.blocked) and self._is_true(ledger, work)
            if (gone or ledger.record.joining or work is not None) and not explained:
                found.append(f"ledger {ledger.ledger_id}, of {gone}: {work}")
        if not found and not await work_list.is_anything_missing(client.session):
            found += self._misplaced()
        return found

    def _misplaced(self) -> list[str]:
        """Copies that a bookie on another rack could take."""
        ghost = self._world.ghost
        may = [n.bookie_id for n in self._world.nodes if n.running and not n.readonly]
        if self._chaos.plan.racks != "soft" or self._chaos.plan.own_policy:
            return []
        return [
            f"ledger {ledger.ledger_id} is misplaced at {member}"
            for ledger in self._ledgers()
            if ledger.closed and not ledger.deleted
            for fragment in ledger.record.fragments
            if all(member in ghost.registered_s for member in fragment.ensemble)
            for slot, member in enumerate(fragment.ensemble)
            if any(
                is_better(
                    ghost, ledger.record, JoiningBookie(fragment.first_entry, slot, bookie_id)
                )
                for bookie_id in may
                if bookie_id not in fragment.ensemble
            )
        ]

    def _gone(self) -> list[str]:
        return [each.bookie_id for each in self._world.ghost.bookies.values() if each.wiped]

    def _is_true(self, ledger: LedgerGhost, work: work_list.ListedLedger) -> bool:
        """Whether what stands in the way does: no other bookie may take the copies."""
        if slots.NO_SPARE not in work.blocked:
            return False
        ghost = self._world.ghost
        may = [n for n in self._world.nodes if n.running and not n.readonly]
        may = [n.bookie_id for n in may if n.address != ghost.banned]
        return ghost.hard_racks or any(
            {*may} <= {*fragment.ensemble} for fragment in ledger.record.fragments
        )

    async def _compare(self, ledger: LedgerGhost) -> None:
        for bookie_id, first_entry in ledger.took:
            node = self._node_of(bookie_id)
            if node is None or node.bookie is None or not self._is_sound(node):
                continue
            missing = await lacking(node, ledger.record, first_entry, denied=True)
            invariants.who_took_a_slot_has_all_of_it(
                self._world.ghost, bookie_id, ledger.ledger_id, missing
            )
