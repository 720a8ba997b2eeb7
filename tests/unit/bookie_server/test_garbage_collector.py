"""What of the stored ledgers may go: only what is surely gone, or surely kept elsewhere."""

import asyncio
import contextlib
from dataclasses import replace

import pytest

from bookie_server.api.messages import StoredResponse, spans_of
from bookie_server.api.status import Status
from bookie_server.lanes import Pace
from bookie_server.ledgers.cluster_ledgers import ClusterLedgers
from bookie_server.ledgers.peers import WINDOW, Peers
from bookie_server.logs.index import LedgerState
from bookie_server.reclaim.collect import GarbageCollector, StoreLogs
from spark_ledger.metadata import cluster, ledger_record, paths
from spark_ledger.metadata import ledger_record as record_of
from spark_ledger.metadata.cluster import ClusterRecord, Hold
from spark_ledger.metadata.ledger_record import Fragment, LedgerRecord
from spark_ledger.metadata.store import ANY_VERSION, NoNode, StoreError, StoreUnavailable
from tests.kit.deleting import delete_ledgers, lose_records
from tests.simulation.loop import run
from tests.simulation.store import SimStore
from tests.unit.bookie_server.log_store import ONE_LOG, LogStore, text

CLUSTER_ID, US, THEM = "cluster-1", "us", "them"


class Node:
    """A node's engine and handles, as far as collection sees them."""

    def __init__(self, stores):
        self.directories = self.reader = self
        self.flushes = 0
        self.stores = stores
        self.known = {}
        self.cached = {}
        self.met = {}
        self.meeting = {}
        self.absent_directories = {}
        self.added = {}

    def state(self, ledger_id):
        return self.known.get(ledger_id)

    def states(self):
        return [self.known[i] for i in sorted(self.known)]

    def in_cache(self, ledger_id):
        return ledger_id in self.cached

    is_complete = True

    def is_whole(self, state):
        return not any(each in self.absent_directories for each in state.directories)

    def unburied_ids(self):
        return [i for i in sorted(self.known) if not self.known[i].deleted]

    def drop_ledger(self, ledger_id):
        assert ledger_id in self.known

    def forget(self, ledger_id):
        """Both the engine's and the handles'."""
        if ledger_id in self.meeting:
            return False
        self.known.pop(ledger_id, None)
        return True

    def use_count(self, ledger_id):
        return self.added.get(ledger_id, 0)

    def removing_from_index(self, ledger_id):
        return contextlib.nullcontext()

    def bury(self, *ledger_ids):
        for ledger_id in ledger_ids:
            self.known[ledger_id] = replace(self.known[ledger_id], deleted=True)


class Others:
    """The other bookies, which have everything but `lacking`; `silent`: they do not respond."""

    def __init__(self):
        self.lacking = {}
        self.silent = False
        self.asked = []

    async def __call__(self, request):
        self.asked.append(request)
        if self.silent:
            return None
        ids = range(request.first_entry, request.last_entry + 1)
        missing = self.lacking.get(request.ledger_id, ())
        spans = spans_of([i for i in ids if i not in missing])
        return StoredResponse(Status.OK, request.last_entry, spans)


class Setting:
    """A node with ledgers 1..n, one log each, whose records name it; and its collector."""

    def __init__(self, node, metadata, session, records, collector, logs, others):
        self.node = node
        self.metadata = metadata
        self.session = session
        self.records = records
        self.collector = collector
        self.logs = logs
        self.others = others
        self.store = node.stores[0]

    @classmethod
    async def of(cls, ledgers=5, directories=1, count=ONE_LOG):
        stores = [await LogStore(seed).start() for seed in range(directories)]
        node = Node(stores)
        metadata = SimStore()
        session = metadata.session("client")
        await cluster.ensure(session, CLUSTER_ID)
        for ledger_id in range(1, ledgers + 1):
            home = stores[ledger_id % directories]
            await home.flush(*((ledger_id, e) for e in range(count)))
            node.known[ledger_id] = LedgerState(ledger_id)
        for store in stores:
            await store.fill(1000, count=1)
        node.known[1000] = LedgerState(1000)
        for ledger_id in node.known:
            path, value = paths.ledger(ledger_id), record_of.encode(record(ledger_id, US))
            await session.create(path, value, parents=True)
        bookies_session = metadata.session("bookie")
        records = ClusterLedgers(bookies_session, CLUSTER_ID)
        others = Others()
        collector = GarbageCollector(node, node, records, US, Peers(others, b"repair"))
        logs = [StoreLogs(store, collector.lives, Pace(1 << 40)) for store in stores]
        return cls(node, session, bookies_session, records, collector, logs, others)

    async def delete(self, *ledger_ids, buried=True):
        await delete_ledgers(self.metadata, *ledger_ids)
        if buried:
            self.node.bury(*ledger_ids)

    async def moved_away(self, *ledger_ids, closed=True, last_entry=9):
        for ledger_id in ledger_ids:
            value = ledger_record.encode(record(ledger_id, THEM, closed, last_entry))
            await self.metadata.set(paths.ledger(ledger_id), value, ANY_VERSION)

    async def collect(self):
        """One pass; the flush that follows it."""
        dropped = await self.collector.drop_deleted(self.logs)
        for logs in self.logs:
            await logs.look()
            await logs.remove_dead_logs()
        self.node.flushes += 1
        return dropped

    async def stored(self):
        """The ledgers of which anything is stored in the index."""
        found = []
        for store in self.node.stores:
            found += [i for i in await store.index.ledger_ids() if i != 1000]
        return sorted(found)


def record(ledger_id, bookie, closed=False, last_entry=9):
    plain = LedgerRecord(ledger_id, 1, 1, 1, (Fragment(0, (bookie,)),))
    if not closed:
        return plain
    state = ledger_record.RecordState.CLOSED
    return replace(plain, state=state, last_entry=last_entry, length_bytes=1, rows=1)


def test_a_deleted_ledger_goes_from_the_index_and_its_log_from_the_disk():
    async def main():
        at = await Setting.of()
        await at.delete(2)
        assert await at.collect() == [2]
        assert await at.stored() == [1, 3, 4, 5]
        assert "2.log" not in at.store.names()
        await at.store.crash()
        assert await at.stored() == [1, 3, 4, 5]

    run(main())


def test_a_deleted_ledger_goes_from_every_directory():
    async def main():
        at = await Setting.of(directories=2)
        await at.node.stores[1].flush((2, 99))  # it had another home once
        await at.delete(2)
        await at.collect()
        assert await at.stored() == [1, 3, 4, 5]

    run(main())


def test_what_is_not_buried_yet_is_kept_whatever_the_store_says():
    async def main():
        at = await Setting.of()
        await at.delete(2, buried=False)
        assert await at.collect() == []
        assert await at.stored() == [1, 2, 3, 4, 5]

    run(main())


def test_a_buried_ledger_whose_record_is_back_is_kept():
    async def main():
        at = await Setting.of()
        at.node.bury(2)
        assert await at.collect() == []
        assert await at.stored() == [1, 2, 3, 4, 5]

    run(main())


# -- when it may be a mistake ----------------------------------------------------------------------


@pytest.mark.parametrize(
    "found",
    [None, ClusterRecord("another"), ClusterRecord(CLUSTER_ID, 1, Hold("older", "b")), b"?"],
)
def test_bk870_the_store_of_another_cluster_or_of_none_drops_nothing(found):
    """BK#870: a bookie whose metadata root was another cluster's, or empty, took all its ledgers
    for deleted."""

    async def main():
        at = await Setting.of()
        assert await at.collect() == []
        await at.delete(2)
        assert await at.records.store_is_ours()
        await at.metadata.delete(paths.CLUSTER)
        if found is not None:
            value = found if isinstance(found, bytes) else cluster.encode(found)
            await at.metadata.create(paths.CLUSTER, value)
        try:
            assert await at.collect() == []
        except cluster.BadClusterRecord:
            assert found == b"?"
        assert await at.stored() == [1, 2, 3, 4, 5]

    run(main())


def test_yahoo15_a_store_that_changes_while_it_is_read_drops_nothing():
    """YahooArchive #15: the listing was of another moment than the look at what is stored. Here
    the cluster becomes another one between the first comparison and the last."""

    async def main():
        at = await Setting.of()
        await at.delete(2)
        session = at.session
        plain = session.get

        async def get(path, watch=None):
            found = await plain(path) if path != paths.ledger(2) else None
            if path == paths.ledger(2):
                version = (await at.metadata.get(paths.CLUSTER)).version
                value = cluster.encode(ClusterRecord(CLUSTER_ID, epoch=1))
                await at.metadata.set(paths.CLUSTER, value, version)
                raise NoNode(path)
            return found

        session.get = get
        assert await at.collect() == []
        assert await at.stored() == [1, 2, 3, 4, 5]

    run(main())


def test_yahoo17_a_missing_parent_node_is_an_error_and_not_an_empty_listing():
    """YahooArchive #17: a folder of the hierarchy was missing, and all below it taken for gone."""

    async def main():
        at = await Setting.of()
        at.node.bury(*range(1, 6))
        session = at.session
        plain = session.get

        async def get(path, watch=None):
            if path.startswith(paths.LEDGERS):
                raise NoNode(path)
            return await plain(path)

        session.get = get
        assert await at.collect() == []
        assert await at.stored() == [1, 2, 3, 4, 5]

    run(main())


def test_an_error_of_the_store_drops_nothing():
    async def main():
        at = await Setting.of()
        await at.delete(2, 3)
        session = at.session
        plain = session.get

        async def get(path, watch=None):
            if path == paths.ledger(3):
                raise StoreUnavailable(path)
            return await plain(path)

        session.get = get
        with pytest.raises(StoreError):
            await at.collect()
        assert await at.stored() == [1, 2, 3, 4, 5]

    run(main())


def test_a_surplus_ledger_that_is_compared_before_it_is_forgotten_stays_fenced():
    """Repair asks with a fence, then writes a record that names us: with no entry, nothing more
    would come."""

    async def main():
        at = await Setting.of()
        at.node.known[2] = replace(at.node.known[2], fenced=True)
        await at.moved_away(2)
        await look(at)
        assert await look(at) == [2]
        at.node.added[2] = 1
        for _ in range(5):
            await at.collect()
        assert at.node.known[2].fenced
        assert [await look(at) for _ in range(2)] == [[], [2]], "two looks again"
        await at.collect()
        at.node.added[2] = 2
        for _ in range(5):
            await at.collect()
        assert at.node.known[2].fenced

    run(main())


def test_c9_a_buried_ledger_without_a_record_that_is_not_named_as_deleted_is_kept():
    """An earlier version buried what had no record in a store that was an older copy."""

    async def main():
        at = await Setting.of()
        await lose_records(at.metadata, 2)
        at.node.bury(2)
        for _ in range(3):
            assert await at.collect() == []
        assert 2 in await at.stored()

    run(main())


def test_however_many_were_deleted_together_they_go_at_once():
    async def main():
        at = await Setting.of(ledgers=30, count=1)
        await at.delete(*range(1, 30))
        assert await at.collect() == [*range(1, 30)]

    run(main())


# -- forgetting ---------------------------------------------------------------------------------


def test_a_deleted_ledger_is_forgotten_two_flushes_after_nothing_was_left():
    async def main():
        at = await Setting.of()
        await at.delete(2)
        await at.collect()
        assert 2 in at.node.known
        await at.collect()
        assert 2 in at.node.known, "the second flush has not begun after that"
        await at.collect()
        assert 2 not in at.node.known
        assert [*at.node.known] == [1, 3, 4, 5, 1000]

    run(main())


def test_without_flushes_nothing_is_forgotten():
    """A journal segment that a replay would read may speak of it."""

    async def main():
        at = await Setting.of()
        await at.delete(2)
        for _ in range(5):
            await at.collect()
            at.node.flushes = 0
        assert 2 in at.node.known

    run(main())


@pytest.mark.parametrize("reason", ["cache", "index", "state", "meeting", "directory"])
def test_bk4462_bk4840_a_ledger_that_something_comes_for_is_not_forgotten(reason):
    """BK#4462, BK#4840: deletion raced with whoever set something of the same ledger, which was
    resurrected without its fence or lost. Recovery may still add to a deleted ledger."""

    async def main():
        at = await Setting.of()
        at.node.known[2] = LedgerState(2, directories=("a",))
        await at.delete(2)
        for turn in range(8):
            if reason == "cache":
                at.node.cached[2] = None
            elif reason == "index":
                await at.store.flush((2, turn))
            elif reason == "state":
                at.node.known[2] = replace(at.node.known[2], explicit_lac=turn)
            elif reason == "meeting":
                at.node.meeting[2] = None
            else:
                at.node.absent_directories["a"] = None
            await at.collect()
            assert 2 in at.node.known
        at.node.cached, at.node.meeting, at.node.absent_directories = {}, {}, {}
        for _ in range(4):
            await at.collect()
        assert 2 not in at.node.known

    run(main())


def test_bk4462_an_entry_that_a_flush_brings_after_the_deletion_goes_with_the_next_pass():
    async def main():
        at = await Setting.of()
        await at.delete(2)
        await at.collect()
        await at.store.flush((2, 0))
        await at.collect()
        assert await at.stored() == [1, 3, 4, 5]

    run(main())


def test_a_flush_in_the_middle_of_the_look_puts_the_forgetting_off():
    async def main():
        at = await Setting.of()
        await at.delete(2)
        await at.collect()
        await at.collect()
        plain = at.store.index.last

        async def last(ledger_id):
            found = await plain(ledger_id)
            at.node.flushes += 1
            return found

        at.store.index.last = last
        await at.collect()
        assert 2 in at.node.known
        at.store.index.last = plain
        await at.collect()
        assert 2 not in at.node.known

    run(main())


# -- over-replicated -----------------------------------------------------------------------------


async def look(at):
    return await at.collector.drop_surplus(at.logs)


def test_a_closed_ledger_that_others_keep_goes_at_the_second_look():
    async def main():
        at = await Setting.of()
        await at.moved_away(2)
        assert await look(at) == []
        assert await look(at) == [2]
        assert await at.stored() == [1, 3, 4, 5]
        for _ in range(4):
            await at.collect()
        assert 2 not in at.node.known
        assert "2.log" not in at.store.names()

    run(main())


def test_an_open_ledger_is_kept_whoever_has_it():
    async def main():
        at = await Setting.of()
        await at.moved_away(2, closed=False)
        for _ in range(4):
            assert await look(at) == []
        assert await at.stored() == [1, 2, 3, 4, 5]

    run(main())


@pytest.mark.parametrize("reason", ["entry", "state", "cache", "limbo", "named again"])
def test_a_ledger_that_is_just_being_copied_here_is_no_surplus(reason):
    async def main():
        at = await Setting.of()
        await at.moved_away(2)
        for turn in range(4):
            if reason == "entry":
                await at.store.flush((2, ONE_LOG + turn))
            elif reason == "state":
                at.node.known[2] = replace(at.node.known[2], explicit_lac=turn)
            elif reason == "cache":
                at.node.cached[2] = None
            elif reason == "limbo":
                at.node.known[2] = replace(at.node.known[2], limbo="lost")
            elif turn == 1:
                value = ledger_record.encode(record(2, US, closed=True))
                await at.metadata.set(paths.ledger(2), value, ANY_VERSION)
            assert await look(at) == []
        assert 2 in await at.stored()

    run(main())


def test_a_surplus_ledger_that_is_copied_here_again_before_it_is_forgotten_stays():
    async def main():
        at = await Setting.of()
        await at.moved_away(2)
        await look(at)
        await look(at)
        await at.store.flush((2, 0), (2, 1))
        for _ in range(5):
            await at.collect()
        assert 2 in at.node.known
        assert await at.store.stored(2) == [0, 1]

    run(main())


@pytest.mark.parametrize("problem", ["one entry is not there", "no response"])
def test_c9_a_copy_that_only_the_record_says_others_have_is_kept(problem):
    """An older copy of the store names bookies that gave their copies up since."""

    async def main():
        at = await Setting.of()
        await at.moved_away(2, last_entry=WINDOW + 7)
        at.others.silent = problem == "no response"
        at.others.lacking = {2: (WINDOW + 7,)}
        for _ in range(4):
            assert await look(at) == []
        assert 2 in await at.stored()
        at.others.lacking, at.others.silent = {}, False
        assert await look(at) == [2]
        last = at.others.asked[-1]
        assert (last.bookie_id, last.last_entry, last.token) == (THEM, WINDOW + 7, b"repair")

    run(main())


def test_a_record_that_cannot_be_understood_keeps_its_ledger():
    async def main():
        at = await Setting.of()
        await at.metadata.set(paths.ledger(2), b"?", ANY_VERSION)
        for _ in range(3):
            assert await look(at) == []
        assert 2 in await at.stored()

    run(main())


def test_an_index_that_could_not_forget_durably_keeps_its_logs():
    """After a crash it points there again."""

    async def main():
        at = await Setting.of()
        await at.delete(2)
        at.store.disk.faults.sync_fails = 1
        await at.collect()
        assert "2.log" in at.store.names()
        await at.collect()
        assert "2.log" in at.store.names(), "nor later: a sync after one that failed proves nothing"
        await at.store.crash()
        for ledger_id in await at.stored():
            await at.store.stored(ledger_id)

    run(main())


@pytest.mark.parametrize("what", ["a new entry", "entries that are stored already"])
def test_what_is_copied_here_while_a_surplus_ledger_is_about_to_go_stays(what):
    async def main():
        at = await Setting.of()
        await at.moved_away(2)
        assert await at.collector.drop_surplus(at.logs) == []
        async with at.store.index_lock:  # a flush is under way
            dropping = asyncio.ensure_future(at.collector.drop_surplus(at.logs))
            await asyncio.sleep(5)
            assert not dropping.done()
            at.node.added[2] = 1
            if what == "a new entry":
                places = await at.store.logs.write(iter([(2, 500, text(2, 500))]))
                await at.store.index.put(places)
        assert await dropping == []
        assert 2 in await at.stored()
        if what == "a new entry":
            assert 500 in await at.store.stored(2)
        assert await at.collector.drop_surplus(at.logs) == [], "two looks again"
        assert await at.collector.drop_surplus(at.logs) == [2]

    run(main())
