"""Bookies' looks, links, ids, commits, holds and accepts, interleaved by seed over a store that
lags, loses responses, and goes back to copies of itself."""

import asyncio
import random
from collections.abc import Awaitable, Callable
from contextlib import suppress

import pytest

from bookie_server.ledgers.lineage import Lineage
from spark_ledger import errors
from spark_ledger.ledger.records import LedgerIds
from spark_ledger.metadata import chain, cluster, hold, paths
from spark_ledger.metadata.chain import Extender
from spark_ledger.metadata.cluster import ClusterGuard
from spark_ledger.metadata.store import Check, Create, MultiFailed, OutcomeUnknown, StoreError
from spark_ledger.metadata.store_calls import ensure
from tests.simulation.disk import SimDisk
from tests.simulation.loop import run
from tests.simulation.restoring import copied, go_back
from tests.simulation.store import SimStore

ID = "99999999-8888-4777-8666-555555555555"
SEEDS, STEPS, BOOKIES = 40, 60, 3


class History:
    """One cluster's history, and what must hold of it."""

    def __init__(self, seed: int) -> None:
        self.rng = random.Random(seed)
        self.store = SimStore(random.Random(seed + 1))
        self.disks = [[SimDisk(self.store.rng)] for _ in range(BOOKIES)]
        self.running: dict[int, Lineage] = {}
        self.session = self.store.session("client")
        self.now_s = 0.0
        self.ids: dict[int, int] = {}  # given out, with the epoch then
        self.commits = 0
        self.copies = []
        self.under_hold: list[str] = []
        """What was written although the store was held."""

    async def begin(self) -> None:
        await cluster.ensure(self.session, ID)
        await ensure(self.session, "/log")
        for number in range(BOOKIES):
            await self.start(number)
        self.copies.append(copied(self.store))
        self.store.faults.unknown, self.store.faults.lag_s = 0.1, 0.5

    # -- what may happen ----------------------------------------------------------------------

    async def start(self, number: int) -> None:
        session = self.store.session(f"bookie {number}")
        self.running[number] = await Lineage.open(session, f"b{number}", ID, self.disks[number])
        await self.running[number].look()

    async def stop(self, number: int) -> None:
        if len(self.running) > 1:
            self.running.pop(number, None)

    async def look(self, number: int) -> None:
        lineage = self.running.get(number)
        await (self.start(number) if lineage is None else lineage.look())

    async def link(self) -> None:
        """The process of maintenance, five minutes later."""
        await ClusterGuard(self.session).refresh()
        extender = Extender(self.store.session("maintenance"), 300.0, lambda: self.now_s)
        for _ in range(2):
            self.now_s += 300.0
            await extender.once()

    async def allocate(self) -> None:
        session = self.store.session("writer")
        ids = await LedgerIds(session).allocate(4)
        epoch = cluster.decode(self.store.peek(paths.CLUSTER).value).epoch
        for ledger_id in ids:
            assert self.ids.get(ledger_id, -1) < epoch or epoch == 0, f"{ledger_id} again"
            self.ids[ledger_id] = epoch

    async def commit(self) -> None:
        session = self.store.session("committer")
        guard = ClusterGuard(session)
        checks = await guard.checks()
        await asyncio.sleep(self.rng.uniform(0, 0.2))  # others come between
        self.commits += 1
        with suppress(MultiFailed):
            await session.multi([*checks, Create(f"/log/{self.commits}")])

    async def copy(self) -> None:
        self.copies.append(copied(self.store))

    async def restore(self) -> None:
        go_back(self.store, self.rng.choice(self.copies))

    async def accept(self) -> None:
        await hold.accept(self.store.session("person"))

    def step(self) -> Callable[[], Awaitable[None]]:
        number = self.rng.randrange(BOOKIES)
        acts: list[tuple[Callable[[], Awaitable[None]], int]] = [
            (lambda: self.look(number), 8),
            (lambda: self.stop(number), 2),
            (self.link, 6),
            (self.allocate, 4),
            (self.commit, 6),
            (self.copy, 1),
            (self.restore, 1),
            (self.accept, 1),
        ]
        return self.rng.choices([act for act, _ in acts], [weight for _, weight in acts])[0]

    # -- what must hold -----------------------------------------------------------------------

    def judge_writes(self) -> None:
        """While the store is held no commit is made, and no id given out."""

        def judge(commit: object) -> None:
            node = self.store.peek(paths.CLUSTER)
            if node is None or cluster.decode(node.value).hold is None:
                return
            for change in commit.changes:  # type: ignore[attr-defined]
                if change.path.startswith("/log/"):
                    self.under_hold.append(change.path)
                if change.path == paths.LEDGER_IDS and change.after is not None:
                    with suppress(errors.MetadataHeld):
                        hold.decode_counter(change.after.value)
                        self.under_hold.append(change.path)

        self.store.listeners.append(judge)

    async def end(self) -> None:
        """All is well again: bookies are back, a person accepts as often as it takes."""
        self.store.calm()
        for _ in range(2 * BOOKIES):
            for number in range(BOOKIES):
                await self.start(number)
            await hold.accept(self.store.session("person"))
        for number in range(BOOKIES):
            await self.start(number)
            assert self.running[number].refusal == ""
        found = await hold.status(self.store.session("person"))
        assert found.cluster.hold is None
        newest = await LedgerIds(self.store.session("writer")).allocate(1)
        if found.cluster.epoch:
            assert newest[0] > max(self.ids, default=0) or newest[0] not in self.ids
        assert chain.decode(self.store.peek(paths.CHAIN).value).newest == found.newest[0]


def play(seed: int) -> list[str]:
    """What was written under a hold."""

    async def act() -> list[str]:
        history = History(seed)
        await history.begin()
        history.judge_writes()
        under_way = []
        for _ in range(STEPS):
            under_way.append(asyncio.ensure_future(history.step()()))
            await asyncio.sleep(history.rng.choice((0.0, 0.01, 0.3, 5.0)))
            if not history.store.listeners:  # it went back
                history.judge_writes()
        outcomes = await asyncio.gather(*under_way, return_exceptions=True)
        for outcome in outcomes:
            if isinstance(outcome, Exception):
                assert isinstance(
                    outcome, errors.MetadataHeld | errors.Unavailable | OutcomeUnknown | StoreError
                ), repr(outcome)
        await history.end()
        return history.under_hold

    return run(act(), seed=seed)


@pytest.mark.parametrize("seed", range(SEEDS))
def test_over_any_interleaving_no_id_or_commit_comes_under_a_hold_and_all_goes_on(seed):
    assert play(seed) == []


def test_a_commit_without_the_check_of_the_clusters_node_is_seen_to_come_under_a_hold(monkeypatch):
    async def none(self: ClusterGuard) -> list[Check]:
        return []

    monkeypatch.setattr(ClusterGuard, "checks", none)
    assert any(play(seed) for seed in range(SEEDS))
