"""What goes wrong in a run: drawn from its seed, within the budget of losses.

Always true: a seed first draws which classes of fault are on at all (a run with few kinds finds
what a run with all of them hides); at most Qa - 1 bookies lose their disk for good, ever, for
nobody repairs yet; everything else is undone when the chaos ends.
"""

import asyncio
import random
from dataclasses import dataclass, field

from tests.simulation.network import ANY
from tests.simulation.world import BookieNode, World

QUORUMS = ((3, 3, 2), (3, 3, 2), (3, 3, 2), (4, 3, 2), (5, 3, 2), (3, 2, 2), (3, 3, 3), (4, 2, 1))
FAULTS = (
    "kill",
    "power",
    "blank",
    "partition",
    "loss",
    "slow network",
    "duplicate",
    "unknown outcomes",
    "lagging store",
    "suspension",
    "expiry",
    "stall",
    "disk error",
    "slow disk",
    "pause",
    "client killed",
)


@dataclass(frozen=True)
class Plan:
    """What a seed draws before anything runs."""

    quorum: tuple[int, int, int]
    bookies: int
    faults: tuple[str, ...]
    chaos_s: float
    between_s: float
    writers: int
    recoverers: int
    tailers: int
    topics: bool
    slow: float | None = None
    """The share of slow messages, when it is not to be drawn."""
    entries: tuple[int, int] = field(default=(3, 30))

    def __str__(self) -> str:
        e, qw, qa = self.quorum
        return (
            f"E={e} Qw={qw} Qa={qa} bookies={self.bookies} writers={self.writers}"
            f" recoverers={self.recoverers} tailers={self.tailers} topics={self.topics}"
            f" chaos={self.chaos_s:.1f}s faults={', '.join(self.faults) or 'none'}"
        )


def draw_plan(rng: random.Random) -> Plan:
    quorum = rng.choice(QUORUMS)
    share = rng.choice((0.0, 0.15, 0.3, 0.5, 0.8))
    return Plan(
        quorum=quorum,
        bookies=quorum[0] + rng.choice((0, 1, 1, 2)),
        faults=tuple(fault for fault in FAULTS if rng.random() < share),
        chaos_s=rng.uniform(8, 30),
        between_s=rng.uniform(0.3, 3.0),
        writers=rng.choice((1, 1, 2)),
        recoverers=rng.choice((0, 1, 1, 2)),
        tailers=rng.choice((0, 0, 1)),
        topics=rng.random() < 0.45,
    )


class Chaos:
    """Injects the plan's faults until it is cancelled or its time is over."""

    def __init__(self, world: World, plan: Plan) -> None:
        self.world = world
        self.plan = plan
        self.injected = 0
        self._rng = world.loop.random_for("chaos")
        self._blanks_left = plan.quorum[2] - 1
        self._restarts: list[asyncio.Task[None]] = []

    async def run(self) -> None:
        """Steady faults first, then one event after the other."""
        self._set_rates()
        end = self.world.loop.time() + self.plan.chaos_s
        events = [fault for fault in self.plan.faults if fault in _EVENTS]
        while events and self.world.loop.time() < end:
            await asyncio.sleep(self._rng.expovariate(1 / self.plan.between_s))
            fault = self._rng.choice(events)
            self.world.trace.note("chaos", fault)
            self.injected += 1
            _EVENTS[fault](self)
        await asyncio.sleep(max(0.0, end - self.world.loop.time()))

    async def heal(self) -> None:
        """Everything up and calm; every bookie serves when it returns."""
        self.world.trace.note("chaos", "heals")
        self.world.calm()
        for restart in self._restarts:
            restart.cancel()
        await asyncio.gather(*self._restarts, return_exceptions=True)
        for node in self.world.nodes:
            await node.start()

    def _set_rates(self) -> None:
        network, store = self.world.network.faults, self.world.store.faults
        for fault in self.plan.faults:
            if fault == "loss":
                network.loss = self._rng.choice((0.005, 0.02, 0.1))
            elif fault == "slow network":
                network.slow = self.plan.slow or self._rng.choice((0.01, 0.05, 0.2))
            elif fault == "duplicate":
                network.duplicate = 0.1
            elif fault == "unknown outcomes":
                store.unknown = self._rng.choice((0.02, 0.1, 0.3))
            elif fault == "lagging store":
                store.lag_s = self._rng.choice((0.05, 1.0, 5.0))

    # -- events --------------------------------------------------------------------------------

    def kill(self) -> None:
        """One bookie is killed, and starts again after a while."""
        self._kill("all")

    def power(self) -> None:
        """One bookie loses power; sometimes all of them do."""
        if self._rng.random() < 0.15:
            for node in self._running():
                self._kill_node(node, self._rng.choice(("random", "none")))
        else:
            self._kill(self._rng.choice(("random", "none")))

    def blank(self) -> None:
        """One bookie's disk is lost for good, if the budget allows."""
        if self._blanks_left > 0 and self._running():
            self._blanks_left -= 1
            node = self._rng.choice(self._running())
            self._kill_node(node, "random", blank=True)

    def partition(self) -> None:
        """One way between a client, or everybody, and a bookie, for a while."""
        node = self._rng.choice(self.world.nodes)
        names = [client.name for client in self.world.clients]
        other = self._rng.choice([*names, ANY])
        ends = (other, node.address) if self._rng.random() < 0.5 else (node.address, other)
        self.world.network.cut(*ends)
        self._after(self._rng.uniform(0.5, 15), lambda: self.world.network.heal(*ends))

    def suspension(self) -> None:
        self._session().suspend(self._rng.choice((0.5, 3.0, 20.0, 40.0)))

    def expiry(self) -> None:
        self._session().expire()

    def stall(self) -> None:
        self.world.store.stall(self._rng.uniform(0.5, 20))

    def disk_error(self) -> None:
        """The next sync of one bookie's journal or ledger disk fails."""
        running = self._running()
        if running:
            node = self._rng.choice(running)
            disk = node.journal_disk if self._rng.random() < 0.7 else node.ledger_disk
            if self._rng.random() < 0.7:
                disk.faults.sync_fails = 1
            else:
                disk.faults.append_fails = 1
            self._start_later(node)

    def slow_disk(self) -> None:
        disk = self._rng.choice(self.world.nodes).journal_disk
        disk.faults.sync_s = (0.05, self._rng.choice((0.5, 4.0, 10.0)))
        self._after(self._rng.uniform(1, 10), lambda: _fast(disk))

    def pause(self) -> None:
        """A client stands still, as in a long collection, and goes on as if nothing were."""
        living = [client for client in self.world.clients if client.process.alive]
        if living:
            client = self._rng.choice(living)
            client.process.pause()
            self._after(self._rng.uniform(1, 25), client.process.resume)

    def client_killed(self) -> None:
        living = [client for client in self.world.clients if client.process.alive]
        if living and self._rng.random() < 0.5:
            self._rng.choice(living).kill()

    # -- means ---------------------------------------------------------------------------------

    def _kill(self, keep: str) -> None:
        running = self._running()
        if running:
            self._kill_node(self._rng.choice(running), keep)

    def _kill_node(self, node: BookieNode, keep: str, *, blank: bool = False) -> None:
        node.kill(keep)  # type: ignore[arg-type]
        if blank:
            node.blank()
        self._start_later(node)

    def _start_later(self, node: BookieNode) -> None:
        after_s = self._rng.choice((0.1, 2.0, 12.0))
        self._restarts.append(asyncio.create_task(self._start(node, after_s)))

    async def _start(self, node: BookieNode, after_s: float) -> None:
        await asyncio.sleep(after_s)
        await asyncio.shield(asyncio.ensure_future(node.start()))

    def _running(self) -> list[BookieNode]:
        return [node for node in self.world.nodes if node.running]

    def _session(self):
        sessions = [client.session for client in self.world.clients]
        sessions += [node.session for node in self._running()]
        return self._rng.choice(sessions) if sessions else self.world.store.session("nobody")

    def _after(self, seconds: float, undo) -> None:
        loop = self.world.loop
        loop.call_later(seconds, undo, context=loop.outside)


def _fast(disk) -> None:
    disk.faults.sync_s = (0.0005, 0.003)


_EVENTS = {
    "kill": Chaos.kill,
    "power": Chaos.power,
    "blank": Chaos.blank,
    "partition": Chaos.partition,
    "suspension": Chaos.suspension,
    "expiry": Chaos.expiry,
    "stall": Chaos.stall,
    "disk error": Chaos.disk_error,
    "slow disk": Chaos.slow_disk,
    "pause": Chaos.pause,
    "client killed": Chaos.client_killed,
}
