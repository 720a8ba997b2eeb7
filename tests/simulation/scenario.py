"""One run of the simulation: chaos, heal, a bound on everything under way, the final audit.

Always true: the seed decides everything; a run that ends without an exception has kept every
invariant at every moment it was judged, and everything acked or committed was there at the end.
"""

import asyncio
from collections.abc import Callable, Coroutine
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from tests.kit.budgets import CLIENT, LEDGERS, REQUEST_S, SHORT, STORAGE, TIGHT
from tests.kit.settings import with_settings
from tests.simulation import invariants, racks
from tests.simulation.audit import Audit
from tests.simulation.brokers.work import BrokerWork
from tests.simulation.chaos import Chaos, Injected, Plan, draw_plan
from tests.simulation.copies import every_entry_has_its_copies
from tests.simulation.healing import SESSION_S, Healing, draw_settings
from tests.simulation.hung import one_bookie_hangs
from tests.simulation.lasting import a_core_goes_on, cut_for_ever
from tests.simulation.ledger_limits import draw_limits
from tests.simulation.ledger_limits import limited as ledgers_limited
from tests.simulation.ledger_work import LedgerWork
from tests.simulation.limbo_work import NAME, SETTINGS, LimboWork
from tests.simulation.local_files import small_blocks
from tests.simulation.loop import SimLoop, current, run
from tests.simulation.operators import NAME as OPERATOR
from tests.simulation.operators import LedgerOperator, TopicOperator
from tests.simulation.strikes import Strikes
from tests.simulation.topic_cursors import TopicCursors
from tests.simulation.topic_fresh import a_fresh_reader_reads_all
from tests.simulation.topic_idle import follow_often
from tests.simulation.topic_keys import TopicKeys, every_entry_filtered
from tests.simulation.topic_limits import limited
from tests.simulation.topic_live import TopicLive
from tests.simulation.topic_rest import TopicRest
from tests.simulation.topic_source import TopicSource
from tests.simulation.topic_upkeep import TopicUpkeep
from tests.simulation.topic_work import TopicWork
from tests.simulation.undecided import Undecided
from tests.simulation.verbs import counted
from tests.simulation.waiting import a_reader_waits
from tests.simulation.world import Client, World

HEALED_S = 200.0
"""Simulated seconds after healing in which everything under way must end."""


@dataclass(frozen=True)
class Outcome:
    """What a clean run was."""

    seed: int
    plan: Plan
    digest: str
    events: int
    steps: int
    simulated_s: float
    faults: int
    entries: int
    """How many were appended, acked or not."""
    checks: dict[str, int] = field(default_factory=dict)
    met: dict[str, int] = field(default_factory=dict)
    injected: tuple[Injected, ...] = ()


class SeedFailed(AssertionError):
    """A run that broke an invariant, deadlocked or met a defect, with its story."""

    def __init__(self, seed: int, plan: str, cause: BaseException, trace: str) -> None:
        super().__init__(f"seed {seed}: {cause!r}\n  {plan}")
        self.seed = seed
        self.trace = trace
        self.cause = cause


Fork = Callable[[str], int | None]
"""What is asked at each first meeting with a situation: what to reseed the run with, if at all."""


def run_seed(seed: int, plan: Plan | None = None, fork: Fork = lambda situation: None) -> Outcome:
    """Run one seed. Raises SeedFailed."""
    drawn = plan or draw_plan(SimLoop(seed).random_for("plan"))
    scenario = Scenario(seed, drawn, fork)
    try:
        return run(scenario.main(), seed)
    except Exception as met:
        world = scenario.world
        seen = world.observers.violations if world else []
        cause = seen[0] if seen else met  # what came first: all else may follow from it
        raise SeedFailed(seed, str(drawn), cause, world.trace.tail() if world else "") from met


class Scenario:
    """The actors of one seed and the order of its phases."""

    def __init__(self, seed: int, plan: Plan, fork: Fork) -> None:
        self.seed = seed
        self.plan = plan
        self.world: World | None = None
        self._fork = fork

    async def main(self) -> Outcome:
        with ExitStack() as self._until_the_end:
            return await self._main()

    async def _main(self) -> Outcome:
        world = await self._make_world()
        self.ledgers = LedgerWork(world, self.plan)
        self.limbo = LimboWork(world, self.plan, self.ledgers)
        chaos = self.chaos = Chaos(world, self.plan, self.ledgers)
        self.healing = Healing(chaos, self._healing_rng) if self.plan.healing else None
        alone = self.healing is None and not self.plan.ledgers  # else disks are lost, or more
        world.ghost.only_overload = alone and set(self.plan.faults) == {"overload"}
        if self.plan.ledgers:
            limits = draw_limits(world.loop.random_for("limits of ledgers"))
            self._until_the_end.enter_context(ledgers_limited(limits))
            Strikes(chaos)
        actors = await self._start(world)
        await chaos.run()
        await chaos.heal()
        if self.plan.lasting and self.plan.racks != "hard":  # where nobody else may fit
            cut_for_ever(chaos)
        world.observers.well_since = world.loop.now
        world.ghost.only_overload = False
        world.check()
        await self._finish(world, actors)
        if not self.plan.ledgers:
            await one_bookie_hangs(world, self.plan)
            await a_reader_waits(world, self.plan)
            await a_core_goes_on(world, self.plan)
        await self._audit(world)
        world.check()
        return Outcome(
            self.seed,
            self.plan,
            world.trace.digest,
            world.trace.events,
            current().steps,
            current().now,
            len(chaos.injected),
            sum(len(ledger.submitted) for ledger in world.ghost.ledgers.values()),
            world.ghost.checks,
            world.ghost.met,
            tuple(chaos.injected),
        )

    async def _make_world(self) -> World:
        """With its bookies registered, and nobody who does anything yet."""
        change = "delayed" if self.plan.delayed else "at-once"
        choices = {"ensemble_change": change, "add_timeout_s": self.plan.add_timeout_s}
        if self.plan.racks:
            choices["racks"] = self.plan.racks
        limits = TIGHT if self.plan.tight else LEDGERS if self.plan.ledgers else STORAGE
        if self.plan.places:
            self._until_the_end.enter_context(small_blocks())
        world = self.world = World(
            with_settings(
                limits, large_entry_bytes=self.plan.large, place_bytes_min=self.plan.places
            ),
            (SHORT if self.plan.ledgers else CLIENT).model_copy(update=choices),
            (self.plan.journals, self.plan.directories),
            racks.policy(self.plan),
        )
        world.ghost.discovered = self._discovered
        garbled = "garbled copies" in self.plan.faults
        world.ghost.answers_come_whole = not garbled and not self.plan.places
        if self.plan.ledgers:
            world.store.faults.request_timeout_s = REQUEST_S
        if self.plan.healing or self.plan.ledgers:
            world.store.faults.session_timeout_s = SESSION_S
        if not self.plan.ledgers:
            self._until_the_end.enter_context(counted(world.ghost))
        world.trace.note("seed", f"{self.seed}: {self.plan.noted()}")
        number = racks.banned(self.plan)
        world.ghost.banned = "" if number is None else f"b{number + 1}:1"
        world.ghost.hard_racks = self.plan.racks == "hard"
        drawn = racks.draw(self.plan, world.loop.random_for("racks"))
        self._healing_rng = rng = world.loop.random_for("healing")
        settings = draw_settings(rng) if self.plan.healing else SETTINGS
        world.ghost.lost_bookie_delay_s = settings.lost_bookie_delay_s
        await world.prepare(self.plan.bookies, drawn, settings)
        return world

    def _discovered(self, situation: str) -> None:
        """The run goes on by other draws if the plan says so, or if it was forked here."""
        world = self.world
        assert world is not None
        if world.observers.well_since is not None:
            return
        number = dict(self.plan.reseeds).get(situation)
        if number is None:
            number = self._fork(situation)
        if number is not None:
            world.loop.reseed(number)
            world.trace.note("chaos", f"reseeded with {number}: {situation}")

    async def _start(self, world: World) -> list["asyncio.Task[Any]"]:
        self.topics: TopicWork | None = None
        self.brokers: BrokerWork | None = None
        tasks: list[asyncio.Task[Any]] = []
        kinds: list[tuple[str, int, Callable[[Client], Coroutine[Any, Any, None]]]] = [
            ("writer", self.plan.writers, self.ledgers.write),
            ("recoverer", self.plan.recoverers, self.ledgers.recover),
            ("tailer", self.plan.tailers, self.ledgers.tail),
            (NAME, 1, self.limbo.repair_often),
            (OPERATOR, int(self.plan.operators), LedgerOperator(self.ledgers).operate),
        ]
        if self.plan.old_readers:
            self.ledgers.onlooker = await world.client("onlooker")
        for name, count, work in kinds:
            for _ in range(count):
                if self.plan.ledgers:
                    tasks.append(asyncio.create_task(self._kept_going(world, name, work)))
                    continue
                client = await world.client(name)
                tasks.append(client.run(work(client), "works"))
        if self.plan.topics:
            tasks += await self._start_topics(world)
        if self.healing is not None:
            tasks += [asyncio.create_task(one, name=name) for name, one in self.healing.actors()]
        return tasks

    async def _kept_going(
        self, world: World, name: str, work: Callable[[Client], Coroutine[Any, Any, None]]
    ) -> None:
        """One process after another, until the chaos' time is over."""
        end = world.loop.now + self.plan.chaos_s
        while world.loop.now < end:
            client = await world.client(name)
            doing = client.run(work(client), "works")
            (outcome,) = await asyncio.gather(doing, return_exceptions=True)
            if isinstance(outcome, Exception):
                raise outcome
            await asyncio.sleep(0.1)

    async def _start_topics(self, world: World) -> list["asyncio.Task[Any]"]:
        work = self.topics = TopicWork(world, self.plan)
        self._until_the_end.enter_context(limited(work.limits, work.noted))
        upkeep, live = TopicUpkeep(work), TopicLive(work)
        self.brokers = BrokerWork(work) if self.plan.brokers else None
        if self.brokers is not None:
            self._until_the_end.enter_context(self.brokers.in_place())
        self.live, self.source, self.keys = live, TopicSource(work), TopicKeys(work)
        if "keys" in self.plan.also:
            self._until_the_end.enter_context(every_entry_filtered())
        kinds: list[tuple[str, int, Callable[[Client], Coroutine[Any, Any, None]]]] = [
            ("reader", 1, work.read_often),
            ("janitor", upkeep.janitors, upkeep.clean),
            ("maintainer", upkeep.maintainers, upkeep.maintain),
            ("deleter", 1, upkeep.recreate),
            ("follower", work.followers, partial(follow_often, work)),
            ("grower", int("growth" in self.plan.also), upkeep.grow),
            ("source", int("sources" in self.plan.also), self.source.read_on),
            (OPERATOR, int(self.plan.operators), TopicOperator(work).operate),
            ("keyed reader", int("keys" in self.plan.also), self.keys.read_often),
        ]
        supervised = [
            *((f"supervisor of {query}", work.supervise(query)) for query in work.queries),
            ("supervisor of a subscription", TopicCursors(work).supervise()),
            ("supervisor of owners", live.supervise()),
            *(
                (f"supervisor of a {name}", upkeep.kept_going(name, doing))
                for name, count, doing in kinds
                for _ in range(count)
            ),
        ]
        if self.brokers is not None:
            supervised.append(("supervisor of brokers", self.brokers.supervise()))
        return [asyncio.create_task(doing, name=name) for name, doing in supervised]

    async def _finish(self, world: World, actors: list["asyncio.Task[Any]"]) -> None:
        """All that was under way ends within the bound, or fails with a reason (34)."""
        try:
            async with asyncio.timeout(HEALED_S):
                ended = await asyncio.gather(*actors, return_exceptions=True)
        except TimeoutError:
            waiting = world.loop.waiting()
            invariants.everything_under_way_ends(world.ghost, waiting, HEALED_S)
        invariants.everything_under_way_ends(world.ghost, [], HEALED_S)
        for actor, outcome in zip(actors, ended, strict=True):
            if isinstance(outcome, asyncio.CancelledError):
                continue  # its process was killed
            if isinstance(outcome, BaseException):
                raise outcome
            assert actor.done()

    async def _audit(self, world: World) -> None:
        """Recover and read every ledger, and compare with what was acknowledged."""
        if self.topics is not None:
            if self.brokers is not None:
                await self.brokers.ends()
            await a_fresh_reader_reads_all(self.topics, self.chaos)
        auditor = await world.client("auditor")
        audit = Audit(world, self.ledgers, auditor)
        if self.topics is not None:
            await TopicRest(self.topics, Undecided(world).is_undecidable).comes()
        await audit.every_ledger()
        if self.topics is not None:
            await auditor.run(self.topics.audit(auditor))
            await auditor.run(self.live.audit(auditor))
            if self.brokers is not None:
                self.brokers.audit()
            if "keys" in self.plan.also:
                await auditor.run(self.keys.audit(auditor))
            if "sources" in self.plan.also:
                await auditor.run(self.source.audit(auditor))
        if self.healing is not None:
            await self.healing.ends()
        await self.limbo.ends()
        if self.plan.ledgers:
            await every_entry_has_its_copies(world)
        await audit.nothing_is_left()
        world.observers.situations.at_the_end()
