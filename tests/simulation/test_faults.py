"""Each class of fault does what it says, within its budget, and can be switched off alone."""

import asyncio
import random
from dataclasses import replace
from pathlib import Path

import pytest

from bookie_server.api import messages as m
from bookie_server.api.status import Meaning, Status, meaning
from bookie_server.ledgers.registry import LedgerHandle
from tests.simulation.chaos import FAULTS, Chaos, draw_plan
from tests.simulation.faults import EVENTS
from tests.simulation.intruder import intrude
from tests.simulation.invariants import Violation
from tests.simulation.ledger_work import LedgerWork
from tests.simulation.loop import SimLoop, run
from tests.simulation.plan import Plan
from tests.simulation.promises import PASSWORD
from tests.simulation.scenario import run_seed
from tests.simulation.warm import quiet
from tests.simulation.world import World

PLAN = Plan((3, 3, 2), 3, (), 5.0, 1.0, 1, 0, 0, topics=False)


@pytest.fixture(autouse=True)
def _quiet():
    with quiet():
        yield


async def a_world(plan: Plan = PLAN) -> Chaos:
    world = World()
    await world.prepare(plan.bookies)
    return Chaos(world, plan, LedgerWork(world, plan))


async def written(chaos: Chaos, entries: int = 8, password: bytes = b""):
    """A ledger with so many acked entries, its writer, and its client."""
    client = await chaos.world.client("writer")

    async def write():
        writer = await client.ledgers.create(3, 3, 2, password=password)
        for number in range(entries):
            await writer.append(b"entry %d" % number * 100)
        await writer.wait_for_copies(5.0)
        return writer

    return client, await client.run(write())


def inject(chaos: Chaos, name: str, rng: random.Random | None = None) -> str:
    return EVENTS[name](chaos, rng or random.Random(1))


async def all_of(node, ledger_id: int, last: int) -> list[Status]:
    """What the bookie says, past the network, of entries 0..last."""
    statuses: list[Status] = []
    while len(statuses) <= last:
        request = m.ReadRequest(node.bookie_id, ledger_id, len(statuses), last, 1 << 20)
        answer = await node.bookie.handle(request)
        if not answer.results:
            return statuses + [answer.status] * (last + 1 - len(statuses))
        statuses += [result.status for result in answer.results]
    return statuses


# -- the recorder ----------------------------------------------------------------------------------


def busy_plan(seed: int) -> Plan:
    drawn = draw_plan(SimLoop(seed).random_for("plan"))
    faults = tuple(name for name in FAULTS if name not in ("blank", "bit rot"))
    return replace(drawn, faults=faults, topics=False, chaos_s=9.0, between_s=0.15)


def test_an_event_that_is_skipped_changes_no_index_and_no_draw_of_the_others():
    plan = busy_plan(5)
    whole = run_seed(5, plan).injected
    skipped = whole[len(whole) // 2].index
    rest = run_seed(5, replace(plan, skip=frozenset({skipped}))).injected
    assert skipped not in [fault.index for fault in rest]
    names = {fault.index: fault.name for fault in whole}
    assert all(names.get(fault.index, fault.name) == fault.name for fault in rest)
    stalls = [fault.detail for fault in whole if fault.name == "stall" and fault.index != skipped]
    assert [fault.detail for fault in rest if fault.name == "stall"] == stalls


def test_a_class_that_is_left_out_leaves_the_others_as_they_were():
    plan = busy_plan(6)
    whole = run_seed(6, plan).injected
    rest = run_seed(6, replace(plan, without=frozenset({"stall", "loss"}))).injected
    assert {"stall", "loss"} <= {fault.name for fault in whole}
    assert not {"stall", "loss"} & {fault.name for fault in rest}
    steady = [(f.index, f.name, f.detail) for f in whole if f.time_s < 0.5 and f.name != "loss"]
    assert [(f.index, f.name, f.detail) for f in rest][: len(steady)] == steady


def test_every_class_happens_in_some_seed():
    happened: set[str] = set()
    for seed in range(30):
        excluded = (("forgery",), ("lost directory", "directory away"))[seed % 2]  # by each other
        faults = tuple(name for name in FAULTS if name not in excluded)
        plan = replace(busy_plan(seed), faults=faults, password=True, quorum=(3, 3, 2))
        plan = replace(plan, directories=2)
        happened |= {fault.name for fault in run_seed(seed, plan).injected}
        if happened == {*FAULTS}:
            return
    assert sorted({*FAULTS} - happened) == []


def test_every_class_is_in_the_documentation():
    table = (Path(__file__).parents[2] / "docs/simulation.md").read_text()
    rows = [line.split("|")[1] for line in table.splitlines() if line.count("|") == 3]
    named = {name.strip() for row in rows for name in row.split(",")}
    assert sorted({*FAULTS} - named) == []


# -- the budget --------------------------------------------------------------------------------


def test_no_more_disks_are_lost_or_rot_than_the_budget_allows():
    async def main() -> int:
        chaos = await a_world()
        await written(chaos)
        for number in range(30):
            inject(chaos, "blank", random.Random(number))
            inject(chaos, "bit rot", random.Random(number))
        bookies = chaos.world.ghost.bookies.values()
        return sum(bookie.wiped or bookie.rotten for bookie in bookies)

    assert run(main()) == 1


def test_over_budget_a_ledger_may_be_unavailable_and_says_so():
    met: dict[str, int] = {}
    for seed in range(12):
        plan = replace(
            PLAN, over_budget=True, faults=("blank", "bit rot"), between_s=0.4, chaos_s=6.0
        )
        for name, times in run_seed(seed, plan).met.items():
            met[name] = met.get(name, 0) + times
    assert met["audit: a ledger is unavailable, over budget"] > 0


# -- disks ---------------------------------------------------------------------------------------


def test_a_bookie_with_a_full_disk_is_read_only_until_there_is_space_and_serves_all_it_acked():
    async def main() -> None:
        chaos = await a_world()
        client, writer = await written(chaos)
        node = chaos.world.nodes[0]
        node.journal_disk.fill_up(0)
        node.ledger_disk.fill_up(0)
        await asyncio.sleep(15)

        async def write_more():
            return await writer.append(b"x" * 5000)

        last = await client.run(write_more())
        assert node.running and node.bookie.readonly_reason.startswith("disk full")
        assert await all_of(node, writer.ledger_id, 7) == [Status.OK] * 8
        assert (await all_of(node, writer.ledger_id, last))[-1] is not Status.OK
        node.journal_disk.empty_out()
        node.ledger_disk.empty_out()
        await asyncio.sleep(30)
        assert node.running and not node.bookie.readonly_reason
        assert await all_of(node, writer.ledger_id, 7) == [Status.OK] * 8

    run(main())


def test_of_what_rotted_a_bookie_knows_nothing_and_denies_nothing():
    seen: dict[Meaning, int] = {}

    async def main(seed: int) -> None:
        chaos = await a_world()
        _, writer = await written(chaos)
        await asyncio.sleep(5 * (seed % 2))  # in the journal only, or flushed
        rng = random.Random(seed)
        while not inject(chaos, "bit rot", rng):
            await written(chaos)
        node = next(
            node for node in chaos.world.nodes if chaos.world.ghost.bookie(node.bookie_id).rotten
        )
        for _ in range(2):
            for status in await all_of(node, writer.ledger_id, 7):
                seen[meaning(status)] = seen.get(meaning(status), 0) + 1
            node.kill("none")
            await node.start()
            if not node.running:
                return  # it does not serve with a rotten index
        assert not chaos.world.observers.violations

    for seed in range(60):
        run(main(seed))
    assert Meaning.NEGATIVE not in seen
    assert seen[Meaning.UNKNOWN] > 20
    assert seen[Meaning.POSITIVE] > 100


# -- bookies ---------------------------------------------------------------------------------------


def test_an_overloaded_bookie_says_busy_and_takes_adds_again_afterwards():
    async def main() -> list[Status]:
        chaos = await a_world()
        _, writer = await written(chaos, 1)
        node = chaos.world.nodes[0]
        request = m.ReadRequest(node.bookie_id, writer.ledger_id, 0, 0, 1000)
        over = node.crowd(whole=True)
        busy = await node.bookie.handle(request)
        over()
        return [busy.status, (await node.bookie.handle(request)).status]

    assert run(main()) == [Status.BUSY, Status.OK]


def test_a_hung_bookie_neither_answers_nor_refuses_until_it_goes_on():
    async def main() -> None:
        chaos = await a_world()
        client, writer = await written(chaos, 1)
        node = chaos.world.nodes[0]
        node.process.pause()
        asked = client.run(client.bookies.read_lac(node.bookie_id, writer.ledger_id))
        await asyncio.sleep(4)
        assert not asked.done()
        node.process.resume()
        assert (await asked).status is Status.OK

    run(main())


# -- clients -------------------------------------------------------------------------------------


def test_an_intruder_is_kept_out_of_every_door():
    async def main(seed: int) -> None:
        chaos = await a_world()
        _, writer = await written(chaos, 3, PASSWORD)
        intruder = await chaos.world.client("intruder")
        await intruder.run(intrude(intruder, writer.record, random.Random(seed)))
        chaos.world.check()

    for seed in range(12):
        run(main(seed))


def test_an_intruder_who_is_let_in_is_noticed(monkeypatch):
    monkeypatch.setattr(LedgerHandle, "allows", lambda self, use, token: True)

    async def main(seed: int) -> None:
        chaos = await a_world()
        _, writer = await written(chaos, 3, PASSWORD)
        intruder = await chaos.world.client("intruder")
        await intruder.run(intrude(intruder, writer.record, random.Random(seed)))

    noticed = 0
    for seed in range(12):
        try:
            run(main(seed))
        except Violation as violation:
            noticed += violation.name == "tokens"
    assert noticed >= 6  # the others met an entry that is there already


def test_a_zombie_goes_on_after_its_ledger_was_recovered_and_is_refused():
    met: dict[str, int] = {}
    for seed in range(10):
        plan = replace(PLAN, faults=("zombie",), chaos_s=10.0, between_s=0.5)
        for name, times in run_seed(seed, plan).met.items():
            met[name] = met.get(name, 0) + times
    assert met["fault: zombie"] > 10
    assert met["append: LedgerFenced"] > 10
