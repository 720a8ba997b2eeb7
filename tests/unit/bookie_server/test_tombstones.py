"""Ledgers that were deleted: found out by a sweep, refused for ever, and never by mistake."""

import asyncio

import pytest

from bookie_server.api.status import Status
from bookie_server.ledgers.cluster_ledgers import READS_PER_S, ClusterLedgers
from bookie_server.reclaim.collect import Tombstones
from spark_ledger.metadata import cluster, deleted_ledgers, paths
from spark_ledger.metadata.cluster import ClusterRecord, Hold
from spark_ledger.metadata.deleted_ledgers import IDS_PER_FOLDER
from spark_ledger.metadata.store import ANY_VERSION, NoNode, StoreUnavailable, Versioned
from tests.kit.deleting import lose_records
from tests.kit.nodes import on_a_node
from tests.kit.settings import with_settings
from tests.simulation.loop import current, run
from tests.unit.bookie_server.node import CONFIG, Node, delete, entry

OK, DELETED = Status.OK, Status.LEDGER_DELETED
CLUSTER_ID = "cluster-1"
SWEEP_S = 60.0


async def with_ledgers(sweep_s=SWEEP_S, ledgers=20):
    """A bookie that has entry 0 of ledgers 1..n and sweeps."""
    config = with_settings(CONFIG, tombstone_sweep_s=sweep_s)
    node = Node(config, cluster_id=CLUSTER_ID)
    admin = node.store.session("admin")
    await cluster.ensure(admin, CLUSTER_ID)
    await node.create_ledger(*range(1, ledgers + 1))
    await node.start()
    for ledger_id in range(1, ledgers + 1):
        assert await node.add(entry(ledger_id, 0)) == [OK]
    return node


async def buried(node, ledgers=20):
    """Which ledgers take no normal add: asked with the entry they have, which changes nothing."""
    found = []
    for ledger_id in range(1, ledgers + 1):
        if await node.add(entry(ledger_id, 0)) == [DELETED]:
            found.append(ledger_id)
    return found


def test_a_ledger_deleted_after_first_contact_takes_no_adds_after_the_next_sweep():
    async def test(node):
        await delete(node, 3, 5)
        assert await node.add(entry(3, 1)) == [OK], "nobody knows yet"
        await asyncio.sleep(SWEEP_S + 1)
        assert await buried(node) == [3, 5]
        assert await node.add(entry(3, 2)) == [DELETED]
        assert await node.write_lac(3, 1) is DELETED
        assert await node.add(entry(4, 1)) == [OK]

    on_a_node(test, with_ledgers())


def test_recoverys_adds_are_taken_and_served_after_the_burial():
    async def test(node):
        await delete(node, 3)
        await asyncio.sleep(SWEEP_S + 1)
        assert await node.add(entry(3, 1), recovery=True) == [OK]
        assert await node.statuses(3, 1, 2) == [OK, Status.NO_SUCH_ENTRY]
        assert await node.fence(3) is OK
        assert await node.add(entry(3, 2)) == [DELETED]

    on_a_node(test, with_ledgers())


@pytest.mark.parametrize("keep", ["none", "random", "all"])
@pytest.mark.parametrize("flushed", [False, True])
def test_a_burial_survives_crashes(keep, flushed):
    async def test(node):
        await delete(node, 3)
        await asyncio.sleep(SWEEP_S + 1)
        if flushed:
            await asyncio.sleep(20)
        for _ in range(2):
            await node.crash(keep)
            assert await node.add(entry(3, 1)) == [DELETED]
            assert await node.add(entry(3, 0)) == [DELETED]
            assert await node.add(entry(4, 0)) == [OK]

    on_a_node(test, with_ledgers())


def test_a_burial_keeps_the_fence_and_the_fence_the_burial():
    async def test(node):
        assert await node.fence(3) is OK
        await delete(node, 3, 4)
        await asyncio.sleep(SWEEP_S + 1)
        assert await node.fence(4) is OK
        for _ in range(2):
            assert (await node.read_lac(3)).fenced
            assert (await node.read_lac(4)).fenced
            assert await buried(node) == [3, 4]
            await node.crash()

    on_a_node(test, with_ledgers())


def test_adds_are_refused_from_the_decision_on_even_before_it_is_durable():
    async def test(node):
        await delete(node, 3)
        node.journal_disk.faults.sync_s = (30.0, 30.0)
        await asyncio.sleep(SWEEP_S + 1)
        began = current().time()
        assert await node.add(entry(3, 1)) == [DELETED]
        assert current().time() == began

    on_a_node(test, with_ledgers())


def test_whoever_waits_for_news_of_the_ledger_is_woken():
    async def test(node):
        waiting = asyncio.ensure_future(node.read_lac(3, previous_lac=0, wait_ms=60_000))
        await delete(node, 3)
        began = current().time()
        assert (await waiting).status is OK
        assert current().time() - began < 10

    on_a_node(test, with_ledgers(sweep_s=5.0))


def test_a_ledger_met_while_it_is_buried_is_buried():
    """The handle is made while the burial goes on: it does not bring the old state back."""

    async def test(node):
        await node.crash("all")  # states are known, no handle is
        ledgers = node.handles
        plain_last = node.storage.reader.last_entry

        async def slow_last(ledger_id):
            await asyncio.sleep(1)
            return await plain_last(ledger_id)

        node.storage.reader.last_entry = slow_last
        adding = asyncio.ensure_future(node.add(entry(3, 1)))
        await asyncio.sleep(0.5)
        await ledgers.bury([3])
        assert await adding == [DELETED]

    on_a_node(test, with_ledgers())


# -- what looks like a deletion and is none ------------------------------------------------------


async def nothing_is_buried(node, ledgers=20):
    await asyncio.sleep(3 * (SWEEP_S + 5))
    assert await buried(node, ledgers) == []


def test_a_store_that_does_not_answer_buries_nothing():
    async def test(node):
        node.store.stall(2 * SWEEP_S)
        await nothing_is_buried(node)
        await delete(node, 3)
        await asyncio.sleep(SWEEP_S + 20)
        assert await buried(node) == [3], "it goes on once the store is back"

    on_a_node(test, with_ledgers())


def test_a_record_that_one_replica_lacks_and_a_sync_brings_is_there():
    """It was made again under an id that had been deleted; the replica is behind that."""

    async def test(node):
        await asyncio.sleep(SWEEP_S + 1)  # the first sweep syncs before it reads
        await delete(node, 3, 9)
        await node.create_ledger(3, 9)
        session = node.session
        plain_get, plain_sync = session.get, session.sync
        behind = True

        async def get(path, watch=None):
            if behind and path in (paths.ledger(3), paths.ledger(9)):
                raise NoNode(path)
            return await plain_get(path, watch)

        async def sync(path="/"):
            nonlocal behind
            await plain_sync(path)
            behind = False

        session.get, session.sync = get, sync
        await nothing_is_buried(node)
        assert not behind

    on_a_node(test, with_ledgers())


def test_c9_a_store_that_is_an_older_copy_buries_nothing():
    """No record of all ledgers but one, and nobody named them: they are kept, and counted."""

    async def test(node):
        admin = node.store.session("admin")
        await lose_records(admin, *range(2, 21))
        await nothing_is_buried(node)
        await node.bookie.reclaim.collect(sweep=True, surplus=True)
        assert "19 kept without a record" in node.bookie.reclaim.describe()
        await delete(node, 1)
        await asyncio.sleep(SWEEP_S + 1)
        assert await buried(node) == [1], "what was deleted goes all the same"
        await node.create_ledger(*range(2, 21))
        await node.bookie.reclaim.collect(sweep=True, surplus=True)
        assert "0 kept without a record" in node.bookie.reclaim.describe()

    on_a_node(test, with_ledgers())


def test_one_record_that_is_lost_deletes_nothing():
    async def test(node):
        await lose_records(node.store.session("admin"), 3)
        await nothing_is_buried(node)

    on_a_node(test, with_ledgers())


def test_ledgers_whose_record_is_there_are_not_deleted_whatever_is_named():
    async def test(node):
        await delete(node, *range(1, 21))
        await node.create_ledger(*range(1, 21))
        await nothing_is_buried(node)

    on_a_node(test, with_ledgers())


def test_a_damaged_set_of_deleted_ledgers_names_none(caplog):
    async def test(node):
        await delete(node, 3)
        admin, folder = node.store.session("admin"), paths.ledger_folder(3)
        await admin.sync()
        value = (await admin.get(folder)).value
        await admin.set(folder, value[:-1] + bytes([value[-1] ^ 1]), ANY_VERSION)
        await nothing_is_buried(node)

    on_a_node(test, with_ledgers())
    assert "is damaged: no ledger of it counts as deleted" in caplog.text


def test_a_store_that_was_another_clusters_from_the_start_buries_nothing():
    async def test(node):
        node.cluster_id = "the one on its disks"
        await node.crash("all")
        await delete(node, 3)
        await nothing_is_buried(node)

    on_a_node(test, with_ledgers())


@pytest.mark.parametrize(
    "record",
    [None, ClusterRecord("another"), ClusterRecord(CLUSTER_ID, 1, Hold("older", "b")), b"?"],
)
def test_the_store_of_another_cluster_or_of_none_buries_nothing(record):
    """An empty root, another cluster's, one that is held because it went back in time, a damaged
    record."""

    async def test(node):
        await asyncio.sleep(SWEEP_S + 1)
        admin = node.store.session("admin")
        await delete(node, 2, 3)
        await admin.delete(paths.CLUSTER)
        if record is not None:
            value = record if isinstance(record, bytes) else cluster.encode(record)
            await admin.create(paths.CLUSTER, value)
        await nothing_is_buried(node)

    on_a_node(test, with_ledgers())


def test_a_store_without_the_folder_of_ledgers_buries_nothing():
    async def test(node):
        plain_get = node.session.get

        async def get(path, watch=None):
            if path.startswith(paths.LEDGERS):
                raise NoNode(path)
            return await plain_get(path, watch)

        node.session.get = get
        await nothing_is_buried(node, 5)

    on_a_node(test, with_ledgers(ledgers=5))


def test_an_error_in_the_middle_of_a_sweep_buries_nothing_of_it():
    async def test(node):
        session = node.session
        plain_get = session.get

        async def get(path, watch=None):
            if path == paths.ledger(9):
                raise StoreUnavailable(path)
            return await plain_get(path, watch)

        session.get = get
        await delete(node, 3, 9)
        await nothing_is_buried(node)

    on_a_node(test, with_ledgers())


def test_however_many_were_deleted_together_the_next_sweep_buries_them():
    async def test(node):
        await delete(node, *range(2, 21))
        await asyncio.sleep(SWEEP_S + 2)
        assert await buried(node) == [*range(2, 21)]

    on_a_node(test, with_ledgers())


def test_a_node_that_does_not_know_its_cluster_buries_nothing():
    async def scenario():
        node = Node(with_settings(CONFIG, tombstone_sweep_s=SWEEP_S))
        await cluster.ensure(node.store.session("admin"), CLUSTER_ID)
        await node.create_ledger(1)
        await node.start()
        assert await node.add(entry(1, 0)) == [OK]
        await delete(node, 1)
        await asyncio.sleep(3 * SWEEP_S)
        assert await node.add(entry(1, 0)) == [OK]

    run(scenario(), seed=1)


# -- what it costs ---------------------------------------------------------------------------------


class Ledgers:
    """So many ledgers that were met; nothing is ever buried in this test."""

    def __init__(self, count):
        self.count = count

    def unburied_ids(self):
        return list(range(self.count))

    async def bury(self, ledger_ids):
        raise AssertionError(ledger_ids)


class CountingStore:
    """Every ledger has its record, but those that were deleted."""

    def __init__(self, deleted=()):
        self.deleted = deleted
        self.folders = self.records = 0

    async def sync(self, path="/"):
        pass

    async def get(self, path, watch=None):
        if path == paths.CLUSTER:
            return Versioned(cluster.encode(ClusterRecord(CLUSTER_ID)), 0)
        if path == paths.LEDGERS:
            return Versioned(b"", 0)
        if len(path) < len(paths.ledger(0)):
            self.folders += 1
            first = paths.first_in_folder(path)
            named = [i for i in self.deleted if first <= i < first + IDS_PER_FOLDER]
            return Versioned(deleted_ledgers.encode(named), 0)
        self.records += 1
        if path in map(paths.ledger, self.deleted):
            raise NoNode(path)
        return Versioned(b"", 0)


def test_a_sweep_reads_one_node_for_ten_thousand_ids_and_records_only_of_what_is_named():
    async def scenario():
        store = CountingStore()
        await Tombstones(Ledgers(50_000), ClusterLedgers(store, CLUSTER_ID)).sweep()
        assert (store.folders, store.records) == (5, 0)

    run(scenario(), seed=1)


def test_a_look_at_records_is_made_at_a_bounded_rate():
    async def scenario():
        store = CountingStore()
        ledgers = Ledgers(5000).unburied_ids()
        assert await ClusterLedgers(store, CLUSTER_ID).find_unrecorded(ledgers) == []
        assert store.records == 5000
        assert current().time() >= (5000 - READS_PER_S) / READS_PER_S

    run(scenario(), seed=1)


def test_stopping_a_bookie_ends_its_sweeps():
    async def test(node):
        stopped = node.bookie
        await stopped.stop()
        await delete(node, 3)
        await asyncio.sleep(10 * SWEEP_S)
        assert not stopped.failed.done(), "it would have failed to log the burial"
        await node.start()
        assert await node.add(entry(1, 0)) == [OK]

    on_a_node(test, with_ledgers())
