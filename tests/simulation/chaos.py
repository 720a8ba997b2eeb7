"""What goes wrong in a run: drawn from its seed, within the budget of losses.

Always true:
- every fault goes through one place, which gives it an index and notes it; each has a generator of
  its own, by its index and class, so that a fault that is switched off changes no other's draws;
- in a run within the budget at most Qa - 1 bookies ever lose their disk or have it damaged; where
  copies are made elsewhere, at most Qa - 1 of those whose copies some ledger's record still counts
  on; everything else is undone when the chaos ends.
"""

import asyncio
import random
from collections.abc import Callable, Coroutine
from typing import TYPE_CHECKING, Any, NamedTuple

from tests.simulation import disk_faults as _more
from tests.simulation import plan as plans
from tests.simulation.faults import EVENTS, STEADY, Fault
from tests.simulation.invariants import Violation
from tests.simulation.plan import Plan
from tests.simulation.strikes import NAME as STRIKE
from tests.simulation.strikes import Moment, struck
from tests.simulation.world import BookieNode, World

if TYPE_CHECKING:
    from tests.simulation.ledger_work import LedgerWork

__all__ = ["FAULTS", "Chaos", "Injected", "Plan", "draw_plan"]

FAULTS = (*STEADY, *EVENTS)
assert _more.rotten_copy in EVENTS.values()


GONE = "blank"
"""The fault that takes a bookie away for good."""


class Injected(NamedTuple):
    """A fault that happened; `index` is what Plan.skip names."""

    index: int
    time_s: float
    name: str
    detail: str


def draw_plan(rng: random.Random) -> Plan:
    return plans.draw(rng, FAULTS)


class Chaos:
    """Injects the plan's faults until its time is over."""

    def __init__(self, world: World, plan: Plan, work: "LedgerWork") -> None:
        self.world = world
        self.plan = plan
        self.work = work
        self.injected: list[Injected] = []
        self.heals = False
        """The chaos is over: nothing more happens."""
        self._drawn = 0
        self._rng = world.loop.random_for("chaos")
        self._lost: dict[str, None] = {}
        self._tasks: list[asyncio.Task[None]] = []
        world.ghost.over_budget = plan.over_budget
        world.exit_keeps = "all" if plan.page_cache else "random"

    async def run(self) -> None:
        """Steady faults first, then one event after the other."""
        end = self.world.loop.now + self.plan.chaos_s
        for name in self.plan.faults:
            if name in STEADY:
                self._inject(name)
        events = [name for name in self.plan.faults if name in EVENTS]
        if self.plan.healing:  # every third, about
            events += [GONE] * (1 + len(events) // 2)
        while events and self.world.loop.now < end:
            await asyncio.sleep(self._rng.expovariate(1 / self.plan.between_s))
            self._inject(self._rng.choice(events))
        await asyncio.sleep(max(0.0, end - self.world.loop.now))

    async def heal(self) -> None:
        """Everything up and calm; every bookie serves when it returns."""
        self.heals = True
        self.world.trace.note("chaos", "heals")
        self.world.calm()
        for task in self._tasks:
            task.cancel()
        for outcome in await asyncio.gather(*self._tasks, return_exceptions=True):
            if isinstance(outcome, Exception):
                raise outcome
        for node in self.world.nodes:
            if node.stopping or node.doomed or node.degraded:
                node.kill("all")
            await node.start()
            if node.degraded or not node.running:  # it was starting, and met a fault of before
                node.kill("all")
                await node.start()
        for node in self.world.nodes:
            await self._replace(node)

    def strike(self, moment: Moment) -> None:
        self._inject(STRIKE, lambda chaos, rng: struck(chaos, rng, moment))

    def _inject(self, name: str, fault: Fault | None = None) -> None:
        """The one place through which every fault goes."""
        index, self._drawn = self._drawn, self._drawn + 1
        if name in self.plan.without or index in self.plan.skip:
            return
        fault = fault or STEADY.get(name) or EVENTS[name]
        detail = fault(self, self.world.loop.random_for(f"chaos {index} {name}"))
        if detail:
            self.injected.append(Injected(index, self.world.loop.now, name, detail))
            self.world.trace.note("chaos", f"#{index} {name}: {detail}")
            self.world.ghost.meet(f"fault: {name}")

    async def _replace(self, node: BookieNode) -> None:
        """Give a node a new disk that cannot start on its own, or that serves nothing any more
        while others are too few: what an operator would do, and it was counted as lost before."""
        if node.running and not node.unusable:
            return
        if node.bookie_id not in self._lost:
            raise Violation("15", f"{node.address} cannot start, and nothing was done to its disk")
        node.kill("all")
        node.blank()
        await node.start()

    # -- the budget ----------------------------------------------------------------------------

    def may_lose(self, node: BookieNode) -> bool:
        """Whether one more disk may be lost or damaged, and be it this one."""
        if self.plan.healing:
            self._lost = {each: None for each in self._lost if not self._is_made_good(each)}
        return node.bookie_id in self._lost or len(self._lost) < self.plan.losses_max

    def _is_made_good(self, bookie_id: str) -> bool:
        """Whether it is gone for good, and no ledger's record counts on it any more."""
        ghost = self.world.ghost
        ledgers = [each for each in ghost.ledgers.values() if not each.deleted]
        if not ghost.bookie(bookie_id).wiped or any(each.names(bookie_id) for each in ledgers):
            return False
        ghost.meet("lost bookie's copies all made elsewhere")
        return True

    def lose(self, node: BookieNode) -> None:
        assert self.may_lose(node)
        self._lost[node.bookie_id] = None

    # -- means of the faults -------------------------------------------------------------------

    def kill(self, node: BookieNode, keep: str, *, back_s: float, blank: bool = False) -> None:
        """Kill the node; with `blank` its disk is lost. It starts again after `back_s`."""
        if self.plan.page_cache and keep != "all":
            keep = self._power_lost(node, keep)
        node.kill(keep)  # type: ignore[arg-type]
        if blank:
            self.lose(node)
            node.blank()
        self.start_later(node, back_s)

    def _power_lost(self, node: BookieNode, keep: str) -> str:
        """What the cut leaves, where acknowledged entries may be in the page cache alone: it counts
        as a loss, and beyond the budget of losses the process dies and the power stays on."""
        if not self.may_lose(node):
            return "all"
        self.lose(node)
        self.world.ghost.bookie(node.bookie_id).unsynced = True
        self.world.ghost.meet("power lost with entries in the page cache alone")
        return keep

    def start_later(self, node: BookieNode, after_s: float) -> None:
        self.spawn(self._start(node, after_s), f"{node.address} comes back")

    async def restart(self, node: BookieNode, back_s: float) -> None:
        """Stop the node in good order; it starts again after `back_s`."""
        await node.stop()
        await self._start(node, back_s)

    async def _start(self, node: BookieNode, after_s: float) -> None:
        await asyncio.sleep(after_s)
        await asyncio.shield(asyncio.ensure_future(node.start()))

    def spawn(self, work: Coroutine[Any, Any, None], name: str) -> None:
        """Run `work` beside the chaos; it is cancelled when everything heals."""
        self._tasks.append(asyncio.create_task(work, name=name))

    def after(self, seconds: float, undo: Callable[[], None]) -> None:
        loop = self.world.loop
        loop.call_later(seconds, undo, context=loop.outside)

    def running(self) -> list[BookieNode]:
        return [node for node in self.world.nodes if node.running]
