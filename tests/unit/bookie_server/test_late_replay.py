"""A journal directory that was missing at one start, or could not be read, and is there again at
the next: what it alone has is taken, and nothing that happened meanwhile is taken back."""

import asyncio

import pytest

from bookie_server.api.status import Status
from bookie_server.journal import checkpoint
from bookie_server.journal.format import Record, RecordKind, body_crc
from bookie_server.logs.index import EVERY_LEDGER, LedgerState, encode_ledger_state
from bookie_server.start.applier import LateRecordApplier, RecordApplier
from spark_ledger.metadata import cluster
from tests.kit.deleting import delete_ledgers
from tests.kit.nodes import on_a_node
from tests.simulation.disk import SimDisk
from tests.simulation.loop import run
from tests.unit.bookie_server.clustered_node import CLUSTER_ID, Clustered, home_of
from tests.unit.bookie_server.node import entry
from tests.unit.bookie_server.several_journals import HOME, added, ids, opened, placed, state
from tests.unit.bookie_server.wide_node import flushed

OK, ABSENT, LIMBO = Status.OK, Status.NO_SUCH_ENTRY, Status.LIMBO
LEDGERS = range(1, 9)


async def with_an_entry_of_each(flushed=False):
    """Two journals; each of eight ledgers has an entry."""
    node = Clustered(2, 1)
    await cluster.ensure(node.store.session("admin"), CLUSTER_ID)
    await node.start()
    await node.create_ledger(*LEDGERS)
    for each in LEDGERS:
        assert await node.add(entry(each, 0)) == [OK]
    if flushed:
        await asyncio.sleep(11)
    return node


async def without_j1(node, how="missing", seconds=10.0):
    """Crash, start without j1, and wait until the ledgers are in limbo one by one."""
    node.die("all")
    if how == "missing":
        node.out = ["j1"]
    else:
        node.journals["j1"].faults.read_s = (1e9, 1e9)
    await node.start()
    await asyncio.sleep(seconds)
    node.out = []
    node.journals["j1"].speed_up()


async def cleared(node, ledger):
    asked = await node.ask(ledger)
    assert (await node.ask(ledger, asked.revision)).status is OK


@pytest.mark.parametrize("how", ["missing", "hangs"])
@pytest.mark.parametrize("seconds", [0.1, 10.0])
@pytest.mark.parametrize("stop", ["crash", "clean"])
def test_what_only_a_journal_has_that_was_away_is_there_when_it_is_back(how, seconds, stop):
    async def test(node):
        await without_j1(node, how, seconds)
        if stop == "clean":
            await node.bookie.stop()
            await node.start()
        else:
            await node.crash()
        assert {i: await node.statuses(i, 0, 0) for i in LEDGERS} == {i: [OK] for i in LEDGERS}
        await node.crash()
        assert {i: await node.statuses(i, 0, 0) for i in LEDGERS} == {i: [OK] for i in LEDGERS}

    on_a_node(test, with_an_entry_of_each())


def test_what_only_a_journal_has_is_there_also_where_it_was_away_at_two_starts():
    async def test(node):
        await without_j1(node)
        node.out = ["j1"]
        await node.crash()
        await asyncio.sleep(10)
        node.out = []
        await node.crash()
        assert {i: await node.statuses(i, 0, 0) for i in LEDGERS} == {i: [OK] for i in LEDGERS}

    on_a_node(test, with_an_entry_of_each())


def test_a_fence_that_only_a_journal_has_that_was_away_counts_when_it_is_back():
    async def test(node):
        ledger = home_of(node, "j1")
        assert await node.fence(ledger) is OK
        await without_j1(node)
        await cleared(node, ledger)
        await node.crash()
        assert await node.add(entry(ledger, 1)) == [Status.FENCED]

    on_a_node(test, with_an_entry_of_each(flushed=True))


def test_starts_without_a_missing_journal_doubt_nothing_again_nor_does_its_return():
    async def test(node):
        await without_j1(node)
        for each in LEDGERS:
            await node.add(entry(each, 0), recovery=True)
            await cleared(node, each)
        for out in (["j1"], ["j1"], [], []):
            node.out = out
            await node.crash()
            storage = node.storage
            assert [storage.limbo(i) for i in (EVERY_LEDGER, *LEDGERS)] == [""] * 9
            assert await node.statuses(1, 0, 1) == [OK, ABSENT]

    on_a_node(test, with_an_entry_of_each())


def test_an_entry_that_was_replaced_meanwhile_is_not_taken_back():
    async def test(node):
        ledger = home_of(node, "j1")
        await without_j1(node)
        assert await node.add(entry(ledger, 0, b"another"), recovery=True) == [OK]
        await node.crash()
        found = await node.read(ledger, 0, 0)
        assert bytes(found.results[0].entry).endswith(b"another")

    on_a_node(test, with_an_entry_of_each())


def test_a_ledger_deleted_and_forgotten_meanwhile_takes_no_adds_and_goes_again():
    async def test(node):
        ledger = home_of(node, "j1")
        await without_j1(node)
        await delete_ledgers(node.store.session("admin"), ledger)
        await asyncio.sleep(200)
        for count in range(12):
            await asyncio.sleep(20)
            await node.add(entry(8 if ledger != 8 else 7, 2 + count))
        assert node.storage.state(ledger) is None
        await node.crash()
        assert await node.add(entry(ledger, 1)) in ([Status.FENCED], [Status.LEDGER_DELETED])
        await asyncio.sleep(200)
        assert await node.add(entry(ledger, 1)) == [Status.LEDGER_DELETED]
        assert ledger not in await node.listed()

    on_a_node(test, with_an_entry_of_each())


def test_a_journal_that_was_away_is_used_again_and_replayed_as_any_other():
    async def test(node):
        await without_j1(node)
        await node.crash()
        assert not node.storage.failures and not node.storage.absent()["journal"]
        await flushed(node)
        mark = (await checkpoint.read(node.ledgers["d0"]))["j1"]
        assert not mark.retired and not mark.missed
        await node.create_ledger(21, 22)
        assert await node.add(entry(21, 0)) == [OK]
        assert await node.add(entry(22, 0)) == [OK]
        await node.crash()
        assert await node.statuses(21, 0, 0) == await node.statuses(22, 0, 0) == [OK]

    on_a_node(test, with_an_entry_of_each())


def test_a_journal_that_was_retired_by_a_clean_stop_is_not_missed():
    async def test(node):
        await node.bookie.stop()
        node.out = ["j1"]
        await node.start()
        mark = (await checkpoint.read(node.ledgers["d0"]))["j1"]
        assert mark.retired and not mark.missed

    on_a_node(test, with_an_entry_of_each())


def logged(revision: int, **more) -> Record:
    body = encode_ledger_state(LedgerState(1, revision=revision, **more))
    return Record(RecordKind.LEDGER, 1, -1, body, body_crc(body))


def test_of_a_known_ledger_only_what_was_set_for_good_counts():
    async def scenario():
        storage = await opened(SimDisk())
        known = storage.set_state(LedgerState(1, explicit_lac=3))
        await LateRecordApplier(storage).apply(
            [logged(99, limbo="lost", fenced=True, explicit_lac=2)]
        )
        now = storage.state(1)
        assert (now.limbo, now.fenced, now.explicit_lac) == ("", True, 3)
        assert now.directories == known.directories
        await LateRecordApplier(storage).apply([logged(99, deleted=True), *added(1, 5)])
        assert storage.state(1).deleted
        assert not await storage.reader.stored(1, 0, 10)

    run(scenario())


@pytest.mark.parametrize("found", [[state(1)], added(1, 0), [Record(RecordKind.LAC, 1, 7, b"", 0)]])
def test_a_ledger_that_only_it_knows_is_fenced_and_in_limbo(found):
    async def scenario():
        storage = await opened(SimDisk())
        await LateRecordApplier(storage).apply([*found, Record(RecordKind.SEAL, -1, -1, b"", 0)])
        assert (storage.state(1).fenced, storage.limbo(1)) == (True, "lost")
        assert storage.state(EVERY_LEDGER) is None

    run(scenario())


def test_what_a_direct_log_has_is_no_newer_than_what_a_journal_has_that_was_away():
    """All journals come first, those that are back too."""

    async def scenario():
        storage = await opened(SimDisk())
        storage.set_state(LedgerState(1, **HOME))
        places = await placed(storage, 1, 0, 1)
        await LateRecordApplier(storage).apply(added(1, 1, payload=b"another"))
        await RecordApplier(storage).add_locations("ledger-1", 1, places)
        await storage.flush()
        assert await ids(storage, 1) == [0, 1]
        assert bytes((await storage.reader.read(1, range(1, 2), 1000)).entries[1]).endswith(
            b"another"
        )
        assert storage.limbo(1) == ""

    run(scenario())


def test_places_count_of_a_ledger_that_only_a_journal_knows_that_was_away():
    async def scenario():
        storage = await opened(SimDisk())
        places = await placed(storage, 1, 0)
        await LateRecordApplier(storage).apply([state(1, **HOME)])
        await RecordApplier(storage).add_locations("ledger-1", 1, places)
        assert (storage.state(1).fenced, storage.limbo(1)) == (True, "lost")
        await storage.flush()
        assert await ids(storage, 1) == [0]

    run(scenario())
