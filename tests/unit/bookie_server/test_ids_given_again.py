"""An id that a metadata store gave out again, after it went back in time: nothing of the two
ledgers is mixed on a bookie."""

import asyncio
import contextlib

import pytest

from bookie_server.api.status import Status
from bookie_server.ledgers.lineage import Lineage
from bookie_server.logs.index import decode_ledger_state, encode_ledger_state
from spark_ledger.metadata import cluster, hold, ledger_record, paths
from spark_ledger.metadata.cluster import Hold
from spark_ledger.metadata.hold import Report
from spark_ledger.metadata.ledger_record import Fragment, LedgerRecord
from spark_ledger.metadata.store import NoNode
from tests.simulation.loop import run
from tests.unit.bookie_server.node import ID, Node, entry

CLUSTER_ID = "99999999-8888-4777-8666-555555555555"


async def create(node: Node, creator: str, ledger_id: int = 7) -> None:
    """The record of a new ledger of that id, in the place of one that is there."""
    session = node.store.session("client")
    record = LedgerRecord(ledger_id, 1, 1, 1, (Fragment(0, (ID,)),), creator=creator)
    with contextlib.suppress(NoNode):
        await session.delete(paths.ledger(ledger_id))
    await session.create(paths.ledger(ledger_id), ledger_record.encode(record), parents=True)


async def with_ledger(entries: list[int]) -> Node:
    """A node that has these entries of ledger 7, made by A; the store has it made by B now, and the
    node's session with it is a new one."""
    node = await Node().start()
    await create(node, "A")
    await node.add_all(*(entry(7, number) for number in entries))
    await create(node, "B")
    node.session.expire()
    await node.session.sync()
    return node


@pytest.mark.parametrize("recovery", [False, True])
@pytest.mark.parametrize("entries", [[0, 1, 2], [5, 6]])
def test_an_add_of_another_ledger_of_the_id_is_refused(entries, recovery):
    async def act() -> None:
        node = await with_ledger(entries)
        assert await node.add(entry(7, 0, b"B"), recovery=recovery) == [Status.CONFLICTING_ENTRY]
        assert await node.add(entry(7, 9, b"B"), recovery=recovery) == [Status.CONFLICTING_ENTRY]

    run(act(), seed=1)


def test_what_is_another_ledgers_is_never_read_and_never_denied():
    async def act() -> None:
        node = await with_ledger([0, 1, 2])
        node.bookie.ledgers.store_went_back()
        for more in ({}, {"fence": True}):
            assert await node.statuses(7, 0, 5, **more) == [Status.LIMBO]
        assert (await node.read_lac(7)).status is Status.LIMBO

    run(act(), seed=1)


def test_a_record_that_was_read_of_the_store_before_says_nothing_of_the_store_since():
    async def act() -> None:
        node = await Node().start()
        await create(node, "A")
        await node.add_all(*(entry(7, number) for number in range(3)))
        node.bookie.ledgers.store_went_back()
        get, given_again = node.session.get, []

        async def late(path, *more):
            found = await get(path, *more)
            if path == paths.ledger(7) and not given_again:
                given_again.append(path)
                await create(node, "B")
                node.bookie.ledgers.store_went_back()
            return found

        node.session.get = late
        await node.statuses(7, 0, 2)
        assert given_again
        assert await node.statuses(7, 0, 2) == [Status.LIMBO]

    run(act(), seed=1)


def test_it_is_so_after_a_restart_too():
    async def act() -> None:
        node = await with_ledger([0, 1, 2])
        await node.crash()
        assert await node.add(entry(7, 0, b"B")) == [Status.CONFLICTING_ENTRY]
        assert await node.statuses(7, 0, 2) == [Status.LIMBO]

    run(act(), seed=1)


def test_the_ledger_whose_record_is_gone_is_written_and_read_on():
    async def act() -> None:
        node = await Node().start()
        await create(node, "A")
        await node.add_all(entry(7, 0))
        await node.store.session("admin").delete(paths.ledger(7))
        node.bookie.ledgers.store_went_back()
        assert await node.add(entry(7, 0), entry(7, 1)) == [Status.OK, Status.OK]
        assert await node.statuses(7, 0, 1) == [Status.OK, Status.OK]

    run(act(), seed=1)


def test_the_same_ledger_is_written_on_after_the_store_went_back():
    async def act() -> None:
        node = await with_ledger([0, 1])
        await create(node, "A")
        node.bookie.ledgers.store_went_back()
        assert await node.add(entry(7, 1), entry(7, 2)) == [Status.OK, Status.OK]

    run(act(), seed=1)


def test_a_bookie_that_has_no_entry_of_the_first_ledger_takes_those_of_the_second():
    async def act() -> None:
        node = await with_ledger([])
        assert await node.read_lac(7)  # met by a request of A, say: nothing came
        node.bookie.ledgers.store_went_back()
        assert await node.add(entry(7, 0, b"B")) == [Status.OK]
        await node.crash()
        assert await node.add(entry(7, 0, b"B"), entry(7, 1, b"B")) == [Status.OK, Status.OK]

    run(act(), seed=1)


def test_a_store_that_is_away_stops_no_add():
    async def act() -> None:
        node = await with_ledger([0, 1])
        await create(node, "A")
        node.session.suspend(20.0)
        assert await node.add(entry(7, 1), entry(7, 2)) == [Status.OK, Status.OK]

    run(act(), seed=1)


async def with_entries_of_before(entries: list[int]) -> Node:
    """As `with_ledger`, but the entries came to an earlier version, which kept no creator; and the
    record is still A's."""
    node = await Node().start()
    await create(node, "")
    await node.add_all(*(entry(7, number) for number in entries))
    await create(node, "A")
    await node.crash()
    assert node.bookie.storage.state(7).creation == ""
    return node


def test_the_creator_of_a_ledger_of_before_writes_on_after_an_update():
    async def act() -> None:
        node = await with_entries_of_before([0, 1, 4])
        again = [entry(7, number) for number in (1, 2, 5)]
        assert await node.add(*again) == [Status.OK] * 3
        assert await node.add(entry(7, 3), recovery=True) == [Status.OK]
        assert await node.statuses(7, 0, 5) == [Status.OK] * 6

    run(act(), seed=1)


@pytest.mark.parametrize("recovery", [False, True])
@pytest.mark.parametrize("seen_before", [False, True])
def test_no_record_names_the_creator_of_entries_of_before_once_the_store_went_back(
    recovery, seen_before
):
    async def act() -> None:
        node = await with_entries_of_before([0, 2])
        if seen_before:  # the node compares the record that was made again before it knows
            await node.add(entry(7, 2))
        await create(node, "B")
        if seen_before:
            await node.add(entry(7, 0))
        node.bookie.ledgers.store_went_back()
        for number in (1, 3):
            assert await node.add(entry(7, number, b"B"), recovery=recovery) == [Status.LIMBO]
        assert await node.add(entry(7, 0, b"B"), recovery=recovery) == [Status.CONFLICTING_ENTRY]
        assert await node.add(entry(7, 2), recovery=recovery) == [Status.OK]  # stored already
        assert (await node.statuses(7, 0, 0)) == [Status.OK]

    run(act(), seed=1)


def test_a_bookie_that_starts_after_an_accept_still_does_not_know_whose_they_are():
    async def act() -> None:
        node = await with_entries_of_before([0, 2])
        await create(node, "B")
        node.bookie.ledgers.epoch = 1
        assert await node.add(entry(7, 3, b"B")) == [Status.LIMBO]
        await create(node, "C", 10**12)
        assert await node.add(entry(10**12, 0)) == [Status.OK]

    run(act(), seed=1)


def test_disks_of_before_have_no_creation_and_take_what_is_there():
    state = decode_ledger_state(
        b'{"deleted":false,"directories":[],"durability":"synced","explicit_lac":-1,"fenced":false,'
        b'"ledger_id":7,"limbo":"","met":true,"revision":3,"verifiers":null}'
    )
    assert state.creation == ""
    assert b"creation" not in encode_ledger_state(state)


def test_a_bookie_reports_what_it_has_and_a_held_store_does_not_name():
    async def act() -> None:
        node = await Node(cluster_id=CLUSTER_ID).start()
        admin = node.store.session("admin")
        await cluster.ensure(admin, CLUSTER_ID)
        for ledger_id in (1, 2, 3, 4):
            await create(node, "A", ledger_id)
            await node.add_all(*(entry(ledger_id, number) for number in range(ledger_id)))
        await node.bookie.ledgers.bury([4])
        await admin.delete(paths.ledger(2))
        await create(node, "B", 3)
        await admin.create(paths.LEDGER_IDS, hold.encode_counter(5))

        lineage = await Lineage.open(node.session, ID, CLUSTER_ID, [node.journal_disk])
        lineage.attach(node.bookie.storage, node.bookie.ledgers)
        looking = asyncio.ensure_future(lineage.run())
        await asyncio.sleep(5)
        assert lineage.refusal == ""
        await hold.put(admin, CLUSTER_ID, Hold("older", "another"))
        await asyncio.sleep(90)

        (report,) = (await hold.status(admin)).reports
        size = 2 * len(b"payload")
        assert report == Report(ID, [(2, 1, size)], [3], [4], 1, size, 4, 0)
        await hold.accept(admin)
        await asyncio.sleep(5)
        assert lineage.refusal == ""
        looking.cancel()

    run(act(), seed=1)
