"""Recovery is never stuck behind bulk adds or reads: it has budgets, batches and threads."""

import asyncio
import os
import threading

import pytest

from bookie_server.api import codec
from bookie_server.api import messages as m
from bookie_server.api.status import Status
from bookie_server.disk.os_disk import OsDisk
from bookie_server.lanes import Lane, calling, request_lane
from bookie_server.serve.handler import REQUEST_OVERHEAD_BYTES, respond
from tests.kit.nodes import on_a_node
from tests.kit.settings import with_settings
from tests.simulation.loop import current
from tests.unit.bookie_server.node import CONFIG, ID, KIB, OK, entry, with_two_ledgers

SYNC_S = 5.0


async def fill_bulk(node, ledger_id):
    """Slow syncs, and the budget for adds used up by one ledger: several batches wait."""
    node.journal_disk.faults.sync_s = (SYNC_S, SYNC_S)
    adds = [asyncio.ensure_future(node.add(entry(ledger_id, e, bytes(30 * KIB)))) for e in range(8)]
    await asyncio.sleep(0.1)
    assert Status.BUSY in await node.add(entry(ledger_id, 8, bytes(30 * KIB)))
    return adds


@pytest.mark.parametrize("ask", ["fence", "fencing read", "recovery add", "unknown ledger"])
def test_recovery_waits_for_the_sync_under_way_and_its_own_however_much_bulk_waits(ask):
    async def test(node):
        await node.create_ledger(3)
        await node.add(entry(2, 0))
        adds = await fill_bulk(node, 1)
        before = current().time()
        if ask == "recovery add":
            assert await node.add(entry(2, 1, bytes(30 * KIB)), recovery=True) == [OK]
        elif ask == "fencing read":
            assert await node.statuses(2, 0, 0, fence=True) == [OK]
        else:
            assert await node.fence(2 if ask == "fence" else 3) is OK
        assert current().time() - before <= 2 * SYNC_S
        assert not adds[-1].done(), "the bulk still waits"
        assert [await each for each in adds] == [[OK]] * 8

    on_a_node(test, with_two_ledgers())


def test_a_fence_waits_for_what_its_own_ledger_has_queued_and_no_longer():
    async def test(node):
        adds = await fill_bulk(node, 1)
        before = current().time()
        await node.fence(1)
        batches = CONFIG.journal_pending_bytes_max // (CONFIG.journal_batch_bytes_max // 2)
        assert current().time() - before <= (batches + 2) * SYNC_S
        assert all(each.done() for each in adds)

    on_a_node(test, with_two_ledgers())


def test_fencing_reads_have_disk_threads_of_their_own():
    async def test(node):
        for e in range(4):
            await node.add(entry(1, e, bytes(KIB)), entry(2, e, bytes(KIB)))
        await asyncio.sleep(2 * CONFIG.flush_interval_s)
        await node.crash("all")
        node.ledger_disk.faults.readers = 1
        node.ledger_disk.faults.read_s = (2.0, 2.0)
        bulk = [asyncio.ensure_future(node.read(1, e, e, max_bytes=1)) for e in (0, 2) * 10]
        await asyncio.sleep(0.1)
        before = current().time()
        assert await node.statuses(2, 1, 1, fence=True, max_bytes=1) == [OK]
        assert current().time() - before < 8
        assert not all(read.done() for read in bulk)
        for read in bulk:
            read.cancel()

    on_a_node(test, with_two_ledgers())


def test_a_fence_that_joins_a_first_contact_begun_by_an_add_does_not_wait_for_bulk_reads():
    async def test(node):
        await node.add(*[entry(1, e, bytes(KIB)) for e in range(4)], entry(2, 0))
        await asyncio.sleep(2 * CONFIG.flush_interval_s)
        await node.crash("all")
        await node.read_lac(1)
        node.ledger_disk.faults.readers = 1
        node.ledger_disk.faults.read_s = (2.0, 2.0)
        bulk = [asyncio.ensure_future(node.read(1, e, e, max_bytes=1)) for e in (0, 2) * 10]
        await asyncio.sleep(0.1)
        adding = asyncio.ensure_future(node.add(entry(2, 1)))
        await asyncio.sleep(0.1)
        before = current().time()
        assert await node.fence(2) is OK
        assert current().time() - before < 8
        for each in [*bulk, adding]:
            each.cancel()

    on_a_node(test, with_two_ledgers())


@pytest.mark.parametrize("which", ["add", "recovery add", "read", "fencing read", "info"])
def test_beyond_the_bytes_received_requests_are_busy_undecoded_and_recovery_has_a_reserve(which):
    async def test(node):
        bookie = node.bookie
        bookie.received.take(CONFIG.receive_bytes_max)
        if "add" in which:
            adds = [m.Add([entry(1, e)], recovery="recovery" in which) for e in range(3)]
            request = codec.encode(m.AddRequest(ID, adds))
            if which == "add":  # entries that would not decode are not looked at
                request = request[:-7] + b"garbage"
            response = codec.decode_response("Add", (await respond(bookie, "Add", request)).data)
            told = [(result.status, result.retry_after_ms > 0) for result in response.results]
            refused = which == "add"
            assert told == [(Status.BUSY, True) if refused else (OK, False)] * 3
        elif "read" in which:
            status = (await node.read(1, 0, 0, fence="fencing" in which)).status
            assert status is (OK if "fencing" in which else Status.BUSY)
        else:
            response = await node.request("Info", m.InfoRequest(ID))
            assert response.status is OK
        bookie.received.give_back(CONFIG.receive_bytes_max)
        assert bookie.received.used == 0

    on_a_node(test, with_two_ledgers())


def test_recoverys_reserve_of_bytes_received_ends_too():
    async def test(node):
        used = CONFIG.receive_bytes_max + CONFIG.recovery_reserve_bytes
        node.bookie.received.take(used - REQUEST_OVERHEAD_BYTES)
        assert await node.add(entry(1, 0), recovery=True) == [Status.BUSY]

    on_a_node(test, with_two_ledgers())


def test_a_reply_counts_with_its_own_bytes_until_it_is_sent():
    async def test(node):
        await node.add(*[entry(1, e, bytes(20 * KIB)) for e in range(3)])
        request = codec.encode(m.ReadRequest(ID, 1, 0, 9, 64 * KIB))
        replies = [await respond(node.bookie, "Read", request) for _ in range(3)]
        assert node.bookie.responses.used == sum(len(reply.data) for reply in replies)
        assert (await node.read(1, 0, 9, max_bytes=64 * KIB)).status is OK
        replies.append(await respond(node.bookie, "Read", request))
        assert (await node.read(1, 0, 9, max_bytes=64 * KIB)).status is Status.BUSY
        assert (await node.read(1, 0, 9, max_bytes=64 * KIB, fence=True)).status is OK
        for reply in replies:
            reply.sent()
        assert node.bookie.responses.used == 0

    on_a_node(test, with_two_ledgers())


def test_a_stream_of_large_adds_does_not_starve_recovery_of_the_write_cache():
    """The active half is full of bulk whenever a recovery add comes: it has its reserve."""

    async def test(node):
        await node.create_ledger(3)
        node.ledger_disk.faults.sync_s = (0.5, 0.5)
        large = CONFIG.entry_bytes_max
        streaming = True

        async def stream(ledger_id):
            e = 0
            while streaming:
                if await node.add(entry(ledger_id, e, bytes(large))) == [OK]:
                    e += 1
                else:
                    await asyncio.sleep(0.005)

        streams = [asyncio.ensure_future(stream(ledger_id)) for ledger_id in (1, 2)]
        await asyncio.sleep(10)
        for e in range(3):
            before = current().time()
            await node.add_all(entry(3, e, bytes(large)), recovery=True)
            assert current().time() - before < 5, "it waits for the flush under way at most"
        streaming = False
        await asyncio.gather(*streams)

    on_a_node(test, with_two_ledgers())


def test_a_refused_add_is_told_to_come_when_the_flush_should_have_made_room():
    async def test(node):
        node.ledger_disk.faults.sync_s = (0.4, 0.4)
        waits = []
        for e in range(60):
            while True:
                add = m.Add([entry(1, e, bytes(60 * KIB))])
                (result,) = (await node.bookie.handle(m.AddRequest(ID, [add]))).results
                if result.status is OK:
                    break
                waits.append(result.retry_after_ms / 1000)
                await asyncio.sleep(waits[-1])
        assert 0.1 < max(waits) <= 1.0
        assert len(waits) < 60, "most need to come again once"

    on_a_node(test, with_two_ledgers())


def test_recovery_reads_in_threads_of_its_own_named_by_their_work(tmp_path, monkeypatch):
    go, names = threading.Event(), []

    def pread(fd, length, position):
        names.append(threading.current_thread().name)
        if "recovery" not in names[-1]:
            go.wait(30)
        return bytes(length)

    async def main():
        disk = OsDisk(tmp_path, "ledger-0")
        file = await disk.create("a")
        monkeypatch.setattr(os, "pread", pread)
        bulk = [asyncio.ensure_future(file.read(0, 1)) for _ in range(40)]
        await asyncio.sleep(0)
        request_lane.set(Lane.RECOVERY)
        assert await file.read(0, 1) == bytes(1)
        assert sum(name.startswith("ledger-0-recovery") for name in names) == 1
        assert not any(each.done() for each in bulk)
        go.set()
        await asyncio.gather(*bulk)
        disk.shut_down()

    asyncio.run(main())


def test_without_space_for_a_next_segment_recovery_adds_end_before_fences_do():
    """BUSY, and not taken and waiting: a fence would wait behind them."""

    async def test(node):
        await asyncio.sleep(1)
        node.journal_disk.fill_up(0)
        node.ledger_disk.faults.sync_s = (1000.0, 1000.0)  # no flush makes space
        for e in range(40):  # beyond what the segment in use and the one made ahead hold
            (status,) = await asyncio.wait_for(
                node.add(entry(1, e, bytes(60 * KIB)), recovery=True), 20
            )
            if status is not OK:
                break
            await asyncio.sleep(1)
        assert status is Status.BUSY
        for ledger_id in (1, 2):
            assert await asyncio.wait_for(node.fence(ledger_id), 1) is OK
        node.journal_disk.empty_out()
        await asyncio.sleep(2)
        assert await node.add(entry(1, e, bytes(60 * KIB)), recovery=True) == [OK]

    space = {"disk_reserve_bytes": 0, "disk_free_bytes_min": 1, "write_cache_bytes": 8192 * KIB}
    on_a_node(test, with_two_ledgers(with_settings(CONFIG, **space)))


def test_a_reply_counts_while_locations_are_looked_up_for_it():
    async def test(node):
        await node.add(entry(1, 0, bytes(20 * KIB)))
        seen = []

        async def locations(*_):
            seen.append(node.bookie.responses.used)
            return []

        node.storage.reader.locations = locations
        asked = m.ReadRequest(ID, 1, 0, 0, 64 * KIB, locations=True, ahead=((1, 2),))
        assert (await node.bookie.handle(asked)).status is OK
        assert seen == [64 * KIB]
        assert node.bookie.responses.used == 0

    on_a_node(test, with_two_ledgers())


def test_a_reader_that_takes_nothing_leaves_half_of_the_replies_to_others():
    async def test(node):
        await node.add(*[entry(1, e, bytes(20 * KIB)) for e in range(3)])
        request = codec.encode(m.ReadRequest(ID, 1, 0, 9, 64 * KIB))
        calling.set("slow")
        replies = [await respond(node.bookie, "Read", request)]
        while (await node.read(1, 0, 9, max_bytes=64 * KIB)).status is OK:
            replies.append(await respond(node.bookie, "Read", request))
        assert node.bookie.responses.used <= CONFIG.read_pending_bytes_max / 2 + 4 * KIB
        assert (await node.read(1, 0, 9, max_bytes=64 * KIB, fence=True)).status is OK
        calling.set("another")
        assert (await node.read(1, 0, 9, max_bytes=64 * KIB)).status is OK
        for reply in replies:
            reply.sent()
        calling.set("slow")
        assert (await node.read(1, 0, 9, max_bytes=64 * KIB)).status is OK
        assert node.bookie.responses.used == 0

    on_a_node(test, with_two_ledgers())
