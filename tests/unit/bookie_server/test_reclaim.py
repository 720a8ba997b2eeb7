"""Reclaim on a whole bookie: what is deleted goes, what is wanted stays readable all the while."""

import asyncio

import pytest

from bookie_server.api.status import Status
from bookie_server.logs.entry_log import log_path
from spark_ledger.metadata import cluster, ledger_record, paths
from spark_ledger.metadata.ledger_record import Fragment, JoiningBookie, LedgerRecord
from spark_ledger.metadata.store import ANY_VERSION
from tests.kit.handling import reclaim_once
from tests.kit.nodes import on_a_node
from tests.kit.settings import with_settings
from tests.simulation.loop import current
from tests.unit.bookie_server.node import CONFIG, KIB, Node, delete, entry

OK = Status.OK
CLUSTER_ID = "cluster-1"
PAYLOAD = 4000
SETTINGS = with_settings(
    CONFIG,
    entry_log_bytes_max=64 * KIB,
    tombstone_sweep_s=60.0,
    gc_interval_s=30.0,
    overreplicated_wait_s=600.0,
    minor_compaction_s=300.0,
    major_compaction_s=3000.0,
    compaction_bytes_per_s=1 << 20,
    scrub_bytes_per_s=1 << 20,
)


def text(ledger_id, entry_id):
    return entry(ledger_id, entry_id, bytes([ledger_id, entry_id]) * (PAYLOAD // 2))


async def filled_node(ledgers=4, entries=16, **settings):
    """A bookie with so many entries of ledgers 1..n, all flushed."""
    node = Node(with_settings(SETTINGS, **settings), cluster_id=CLUSTER_ID)
    await cluster.ensure(node.store.session("admin"), CLUSTER_ID)
    await node.create_ledger(*range(1, ledgers + 1), 99)
    await node.start()
    for ledger_id in range(1, ledgers + 1):
        await fill(node, ledger_id, entries)
    return node


async def fill(node, ledger_id, count, first=0):
    """Entries of a ledger, and a flush of their own for them, which the next one seals."""
    await node.add_all(*(text(ledger_id, e) for e in range(first, first + count)))
    await asyncio.sleep(2 * SETTINGS.flush_interval_s)


async def flushes(node, count=3):
    """So many flushes happen, with a little of ledger 99."""
    for _ in range(count):
        last = await node.storage.reader.last_entry(99)
        await fill(node, 99, 1, first=0 if last is None else last + 1)


async def whole(node, *ledger_ids, entries=16):
    for ledger_id in ledger_ids:
        found = await node.read(ledger_id, 0, entries - 1)
        while len(found.results) < entries:
            more = await node.read(ledger_id, len(found.results), entries - 1)
            assert more.status is OK and more.results, more
            found = found._replace(results=[*found.results, *more.results])
        assert [r.status for r in found.results] == [OK] * entries, ledger_id
        assert [bytes(r.entry) for r in found.results] == [
            text(ledger_id, e) for e in range(entries)
        ]


def log_bytes(node):
    return sum(
        len(node.ledger_disk.content(path)) for path in node.files(node.ledger_disk, "entrylog")
    )


def states(node):
    return [state.ledger_id for state in node.storage.states() if state.ledger_id >= 0]


def test_a_deleted_ledgers_space_comes_back_by_itself_and_it_is_forgotten():
    async def test(node):
        place = await node.storage.stores[0].index.get(2, 5)
        await delete(node, 2)
        await asyncio.sleep(100)
        await flushes(node, 8)
        assert log_path(place.log_id) not in node.files(node.ledger_disk, "entrylog")
        assert states(node) == [1, 3, 4, 99]
        await whole(node, 1, 3, 4)
        await node.crash()
        assert states(node) == [1, 3, 4, 99]
        await whole(node, 1, 3, 4)

    on_a_node(test, filled_node())


def test_an_idle_bookie_gives_back_the_log_that_it_writes_when_all_of_it_is_dead():
    async def test(node):
        await delete(node, 1, 2, 3, 4)
        await asyncio.sleep(SETTINGS.tombstone_sweep_s + 2 * SETTINGS.gc_interval_s)
        await asyncio.sleep(2 * SETTINGS.gc_interval_s)
        assert log_bytes(node) == 0

    on_a_node(test, filled_node(entry_log_bytes_max=1024 * KIB))


def test_an_idle_bookie_compacts_the_log_that_it_writes_when_most_of_it_is_dead():
    async def test(node):
        await delete(node, 1, 2, 3)
        await asyncio.sleep(SETTINGS.tombstone_sweep_s + 4 * SETTINGS.gc_interval_s)
        await asyncio.sleep(SETTINGS.minor_compaction_s + SETTINGS.gc_interval_s)
        assert log_bytes(node) < 20 * PAYLOAD
        await whole(node, 4)
        await node.crash()
        await whole(node, 4)

    on_a_node(test, filled_node(entry_log_bytes_max=1024 * KIB, minor_compaction_share=0.4))


def test_a_log_that_is_written_is_not_ended_while_it_grows_or_lives_or_has_little_dead():
    async def test(node):
        (path,) = node.files(node.ledger_disk, "entrylog")
        await delete(node, 1)  # a quarter
        await asyncio.sleep(1000)
        await fill(node, 4, 1, first=16)
        assert [path] == node.files(node.ledger_disk, "entrylog")
        await delete(node, 2, 3)
        for count in range(60):
            await fill(node, 4, 1, first=17 + count)
        assert [path] == node.files(node.ledger_disk, "entrylog")

    on_a_node(test, filled_node(entry_log_bytes_max=1024 * KIB))


def test_between_two_compactions_one_log_that_lives_is_ended_early():
    async def test(node):
        ended = []
        for round_ in range(4):
            first = 10 + 4 * round_
            await node.create_ledger(*range(first, first + 4))
            for ledger_id in range(first, first + 4):
                await fill(node, ledger_id, 16)
            await delete(node, *range(first + 1, first + 4))
            await asyncio.sleep(200)
            ended.append(len(node.files(node.ledger_disk, "entrylog")))
        assert ended == [1, 2, 2, 2]  # the first one; a compaction comes after 100,000 s
        await whole(node, 10, 14, 18, 22)

    on_a_node(
        test,
        filled_node(
            ledgers=0,
            entry_log_bytes_max=1024 * KIB,
            minor_compaction_s=100_000.0,
            major_compaction_s=100_000.0,
        ),
    )


def test_a_late_writer_of_a_forgotten_ledger_is_refused():
    """BK#4462: a ledger deleted here and forgotten was created anew by a zombie's add."""

    async def test(node):
        await delete(node, 2)
        await asyncio.sleep(100)
        await flushes(node, 8)
        assert 2 not in states(node)
        assert await node.add(text(2, 16)) == [Status.LEDGER_DELETED]
        assert await node.add(text(2, 16), recovery=True) == [Status.LEDGER_DELETED]
        assert 2 not in states(node)

    on_a_node(test, filled_node())


def test_bk4840_an_add_under_way_when_its_ledger_is_forgotten_is_not_taken_by_the_old_handle():
    """It decides after the handle was forgotten: its entry would have no state, and after a crash
    nobody would know whose it is. It is sent again, and meets the ledger anew."""

    async def test(node):
        ledgers = node.handles
        old = await ledgers.meet(2)
        assert old.refusal_of_add(b"", recovery=True) is None
        assert ledgers.forget(2)
        assert old.refusal_of_add(b"", recovery=True) is Status.BUSY
        assert await ledgers.meet(2) is not old

    on_a_node(test, filled_node())


def test_a_ledger_that_is_just_being_met_is_not_forgotten():
    async def test(node):
        await node.crash("all")  # states are known, no handle is
        ledgers = node.handles
        plain = node.storage.reader.last_entry

        async def slow(ledger_id):
            await asyncio.sleep(1)
            return await plain(ledger_id)

        node.storage.reader.last_entry = slow
        meeting = asyncio.ensure_future(ledgers.meet(2))
        await asyncio.sleep(0.5)
        assert not ledgers.forget(2)
        assert not (await meeting).is_forgotten

    on_a_node(test, filled_node())


@pytest.mark.parametrize("keep", ["none", "random", "all"])
def test_bk4462_bk4840_adds_of_a_ledger_that_is_being_deleted_leave_nothing_behind(keep):
    """Recovery adds all the time while the ledger is buried, dropped and forgotten, over crashes;
    in the end there is neither an entry nor a state of it, nor doubt about it."""

    async def test(node):
        await delete(node, 2)
        for turn in range(60):
            statuses = await node.add(text(2, 16 + turn), recovery=True)
            assert statuses[0] in (OK, Status.LEDGER_DELETED, Status.BUSY)
            await asyncio.sleep(7)
            if turn % 20 == 19:
                await node.crash(keep)
        await flushes(node, 30)
        assert states(node) == [1, 3, 4, 99]
        for store in node.storage.stores:
            assert await store.index.ledger_ids() == [1, 3, 4, 99]
        await whole(node, 1, 3, 4)

    on_a_node(test, filled_node())


def test_compaction_keeps_every_entry_readable_all_the_while():
    async def test(node):
        for round_ in range(1, 5):
            ids = [ledger_id for ledger_id in range(1, 9) if ledger_id >= round_]
            await asyncio.gather(*(fill(node, i, 4, first=16 + 4 * round_) for i in ids))
        await delete(node, 1, 2, 3)
        end = current().time() + 4000
        while current().time() < end:
            await whole(node, 4, 5, 6, 7, 8)
            await asyncio.sleep(5)
        await flushes(node, 2)
        assert node.bookie.reclaim.facts.logs_compacted > 0
        assert node.bookie.reclaim.facts.failures == 0

    on_a_node(test, filled_node(ledgers=8))


def test_a_reader_that_had_looked_up_the_old_place_gets_the_entry():
    """The log is compacted away between the look at the index and the read of the log."""

    async def test(node):
        await flushes(node, 1)
        store = node.storage.stores[0]
        plain = store.logs.read_run
        old = await store.index.get(3, 5)

        async def read_run(run):
            store.logs.read_run = plain
            await node.bookie.reclaim.compact(2.0)
            assert await store.index.get(3, 5) != old
            return await plain(run)

        store.logs.read_run = read_run
        assert await node.statuses(3, 5, 5) == [OK]
        assert store.logs.read_run == plain

    on_a_node(test, filled_node(read_cache_bytes=0))


def test_it_goes_on_when_the_disk_is_full():
    async def test(node):
        await flushes(node, 1)
        before = log_bytes(node)
        node.ledger_disk.fill_up(4 * KIB)
        await asyncio.sleep(30)
        assert node.bookie.readonly_reason
        await delete(node, 2, 3)
        await asyncio.sleep(1000)
        assert log_bytes(node) < before - 64 * KIB
        node.ledger_disk.empty_out()
        await whole(node, 1, 4)

    on_a_node(test, filled_node(disk_reserve_bytes=512 * KIB))


def test_rot_is_found_by_the_scrub_and_the_ledger_is_in_limbo():
    async def test(node):
        await flushes(node, 1)
        place = await node.storage.stores[0].index.get(2, 5)
        node.ledger_disk.flip_bit(log_path(place.log_id), 8 * (place.position + 500))
        await asyncio.sleep(2 * 3600)
        assert node.storage.state(2).limbo == "lost"
        assert node.storage.state(1).limbo == ""
        statuses = await node.statuses(2, 4, 16)
        assert statuses[:2] == [OK, Status.IO_ERROR] and statuses[-1] is Status.LIMBO
        assert "1 bad entries" in node.bookie.reclaim.describe()

    on_a_node(test, filled_node(scrub_interval_s=3600.0))


def test_the_scrub_does_not_push_out_what_the_read_cache_has():
    async def test(node):
        await flushes(node, 1)
        assert await node.statuses(1, 0, 3) == [OK] * 4
        await asyncio.sleep(1)
        await node.bookie.reclaim.scrub.once(0)
        reads = []
        store = node.storage.stores[0]
        store.logs.read_run = reads.append
        assert await node.statuses(1, 0, 3) == [OK] * 4
        assert reads == []

    on_a_node(test, filled_node())


async def close_elsewhere(node, ledger_id, *joining):
    record = LedgerRecord(
        *(ledger_id, 1, 1, 1, (Fragment(0, ("another",)),)),
        state=ledger_record.RecordState.CLOSED,
        last_entry=15,
        length_bytes=1,
        rows=1,
        joining=joining,
    )
    value = ledger_record.encode(record)
    await node.store.session("closer").set(paths.ledger(ledger_id), value, ANY_VERSION)


@pytest.mark.parametrize("joins", [False, True])
def test_a_closed_ledger_that_others_keep_is_dropped_and_a_late_writer_of_it_is_fenced(joins):
    """Its fence here was forgotten with it; the writer that was fenced must not get an ack, not
    either when the node is just joining to take a slot."""

    async def test(node):
        assert await node.fence(2) is OK
        await close_elsewhere(node, 2)
        await asyncio.sleep(1300)
        await flushes(node, 8)
        assert states(node) == [1, 3, 4, 99]
        assert await node.statuses(2, 0, 0) == [Status.NO_SUCH_LEDGER]
        if joins:
            await close_elsewhere(node, 2, JoiningBookie(0, 0, node.bookie.bookie_id))
        assert await node.add(text(2, 16)) == [Status.FENCED]
        assert await node.add(text(2, 16), recovery=True) == [OK], "repair may copy it here"

    on_a_node(test, filled_node())


def test_an_idle_node_hardly_does_anything():
    async def test(node):
        await flushes(node, 1)
        await asyncio.sleep(1000)
        before = current().steps
        await asyncio.sleep(3600)
        assert (current().steps - before) / 3600 < 20, "steps of the loop in a second"

    on_a_node(test, filled_node())


def test_stopping_ends_all_of_it_at_once():
    async def test(node):
        await delete(node, 2)
        await asyncio.sleep(61)
        began = current().time()
        await node.bookie.stop()
        assert current().time() - began < 5
        await asyncio.sleep(10_000)
        await node.start()
        await whole(node, 1, 3, 4)

    on_a_node(test, filled_node())


def test_a_pass_on_demand_does_everything():
    async def test(node):
        await flushes(node, 1)
        await delete(node, 1, 3)
        await reclaim_once(node.bookie)
        facts = node.bookie.reclaim.facts
        assert facts.ledgers == 2
        assert facts.logs_removed + facts.logs_compacted >= 2
        assert facts.live_share == 1.0
        await whole(node, 2, 4)
        assert node.bookie.reclaim.describe().startswith("1 passes: ")

    on_a_node(test, filled_node(tombstone_sweep_s=100_000.0, gc_interval_s=100_000.0))
