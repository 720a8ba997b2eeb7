import asyncio

import pytest

from bookie_server.api import codec
from bookie_server.api import messages as m
from bookie_server.api.entry import EntryHeader, pack_header, payload_crc, unpack_entry
from bookie_server.api.status import Status, StopReason
from bookie_server.disk.interface import DiskFailed
from spark_ledger.metadata.ledger_record import derive
from tests.kit.deleting import delete_ledgers
from tests.kit.handling import handle_bytes
from tests.kit.nodes import on_a_node
from tests.kit.settings import with_settings
from tests.simulation.loop import current
from tests.unit.bookie_server.node import ABSENT, CONFIG, ID, KIB, OK, entry, with_two_ledgers

# -- durability --------------------------------------------------------------------------------


@pytest.mark.parametrize("keep", ["none", "random", "all"])
def test_an_acknowledged_entry_is_read_after_a_crash(keep):
    async def test(node):
        assert await node.add(entry(1, 0), entry(1, 1), entry(2, 0)) == [OK] * 3
        await node.crash(keep)
        assert await node.statuses(1, 0, 2) == [OK, OK, ABSENT]
        found = (await node.read(2, 0, 0)).results[0].entry
        assert bytes(found) == entry(2, 0)

    on_a_node(test, with_two_ledgers())


def test_no_add_is_answered_before_the_sync_that_covers_it():
    async def test(node):
        node.journal_disk.faults.sync_s = (1.0, 1.0)
        syncs = node.journal_disk.syncs
        adding = asyncio.ensure_future(node.add(entry(1, 0)))
        await asyncio.sleep(0.9)
        assert not adding.done()
        assert await adding == [OK]
        assert node.journal_disk.syncs > syncs

    on_a_node(test, with_two_ledgers())


def test_entries_survive_flush_roll_and_a_crash_in_any_mixture():
    async def test(node):
        payload = bytes(5000)
        for first in range(0, 300, 10):
            frame = [
                entry(ledger, e, payload) for e in range(first, first + 10) for ledger in (1, 2)
            ]
            await node.add_all(*frame)
            if first % 70 == 0:
                await node.crash("random")
        for ledger in (1, 2):
            at = 0
            while at < 300:
                results = (await node.read(ledger, at, 299)).results
                assert results
                for result in results:
                    assert bytes(result.entry) == entry(ledger, at, payload)
                    at += 1
        assert len(node.files(node.ledger_disk, "entrylog")) > 3

    on_a_node(test, with_two_ledgers())


def test_flushed_journal_segments_are_removed_and_a_restart_reads_little():
    async def test(node):
        for e in range(200):
            await node.add_all(entry(1, e, bytes(10_000)))
        await asyncio.sleep(20)
        assert len(node.files(node.journal_disk, "journal")) <= 2
        await node.crash()
        assert await node.statuses(1, 199, 200) == [OK, ABSENT]

    on_a_node(test, with_two_ledgers())


def test_a_clean_stop_seals_the_journal_and_closes_the_entry_log_with_its_map():
    async def test(node):
        await node.add(entry(1, 0))
        await node.bookie.stop()
        log = node.ledger_disk.durable(node.files(node.ledger_disk, "entrylog")[-1])
        assert log[-40:-36] == b"SLEF"
        await node.start()
        assert await node.statuses(1, 0, 1) == [OK, ABSENT]

    on_a_node(test, with_two_ledgers())


def test_a_failed_sync_is_never_acknowledged_and_ends_the_bookie():
    async def test(node):
        await node.add(entry(1, 0))
        node.journal_disk.faults.sync_fails = 1
        assert await node.add(entry(1, 1)) == [Status.IO_ERROR]
        assert await node.add(entry(1, 2)) == [Status.IO_ERROR]
        assert await node.fence(1) is Status.IO_ERROR
        assert isinstance(node.bookie.failed.exception(), DiskFailed)

    on_a_node(test, with_two_ledgers())


def test_a_failed_flush_ends_the_bookie_and_loses_nothing():
    async def test(node):
        assert await node.add(entry(1, 0)) == [OK]
        node.ledger_disk.faults.sync_fails = 1
        await asyncio.sleep(20)
        assert isinstance(node.bookie.failed.exception(), DiskFailed)
        assert await node.add(entry(1, 1)) == [Status.IO_ERROR]
        await node.crash()
        assert await node.statuses(1, 0, 0) == [OK]

    on_a_node(test, with_two_ledgers())


def test_a_cancelled_caller_disturbs_neither_its_own_add_nor_others():
    async def test(node):
        node.journal_disk.faults.sync_s = (1.0, 1.0)
        callers = [asyncio.ensure_future(node.add(entry(1, e))) for e in range(3)]
        await asyncio.sleep(0.5)
        callers[0].cancel()
        assert await callers[1] == await callers[2] == [OK]
        assert await node.statuses(1, 0, 2) == [OK, OK, OK]
        assert not node.bookie.failed.done()

    on_a_node(test, with_two_ledgers())


# -- identity of entries -----------------------------------------------------------------------


@pytest.mark.parametrize("flushed", [False, True])
def test_an_equal_entry_again_is_ok_and_another_under_its_id_is_refused(flushed):
    async def test(node):
        await node.add(entry(1, 0, b"first", lac=-1), entry(1, 1, b"other"))
        if flushed:
            await asyncio.sleep(20)
        assert await node.add(entry(1, 0, b"first", lac=-1)) == [OK]
        assert await node.add(entry(1, 0, b"first", lac=7), recovery=True) == [OK]
        assert await node.add(entry(1, 0, b"FIRST")) == [Status.CONFLICTING_ENTRY]
        assert await node.add(entry(1, 0, b"FIRST"), recovery=True) == [Status.CONFLICTING_ENTRY]
        found = (await node.read(1, 0, 0)).results[0].entry
        assert bytes(found) == entry(1, 0, b"first", lac=-1), "the first header is kept"

    on_a_node(test, with_two_ledgers())


def test_a_conflict_inside_one_frame_is_seen():
    async def test(node):
        statuses = await node.add(entry(1, 0, b"a"), entry(1, 0, b"a"), entry(1, 0, b"b"))
        assert statuses == [OK, OK, Status.CONFLICTING_ENTRY]

    on_a_node(test, with_two_ledgers())


def test_entries_of_a_frame_are_judged_one_by_one_in_any_order_and_of_any_ledger():
    async def test(node):
        await node.add(entry(1, 5, b"five"))
        frame = [entry(1, 6), entry(1, 7), entry(2, 9), entry(2, 3), entry(1, 5, b"FIVE")]
        frame += [entry(1, 4), entry(1, 8), entry(3, 0), entry(1, 9)]
        statuses = await node.add(*frame)
        assert statuses[:4] == [OK] * 4
        assert statuses[4:] == [Status.CONFLICTING_ENTRY, OK, OK, Status.LEDGER_DELETED, OK]
        assert await node.statuses(1, 3, 10) == [ABSENT, *[OK] * 6, ABSENT]
        assert await node.statuses(2, 3, 9) == [OK, *[ABSENT] * 5, OK]

    on_a_node(test, with_two_ledgers())


def test_an_equal_entry_is_acknowledged_only_when_the_first_is_durable():
    async def test(node):
        node.journal_disk.faults.sync_s = (1.0, 1.0)
        first = asyncio.ensure_future(node.add(entry(1, 0)))
        await asyncio.sleep(0.5)
        second = asyncio.ensure_future(node.add(entry(1, 0)))
        await asyncio.sleep(0.1)
        assert not second.done()
        assert await second == await first == [OK]

    on_a_node(test, with_two_ledgers())


def test_damaged_oversized_and_misaddressed_adds_are_refused_one_by_one():
    async def test(node):
        damaged = entry(1, 1)[:-1] + b"?"
        large = entry(1, 2, bytes(64 * KIB + 1))
        statuses = await node.add(entry(1, 0), damaged, large, entry(99, 0), entry(2, 0))
        assert statuses == [OK, Status.BAD_DIGEST, Status.TOO_LARGE, Status.LEDGER_DELETED, OK]
        other = m.AddRequest("another bookie", [m.Add([entry(1, 5)])])
        response = await node.bookie.handle(other)
        assert [result.status for result in response.results] == [Status.WRONG_BOOKIE]

    on_a_node(test, with_two_ledgers())


# -- fencing -----------------------------------------------------------------------------------


@pytest.mark.parametrize("keep", ["none", "random", "all"])
@pytest.mark.parametrize("flushed", [False, True])
def test_a_fenced_ledger_stays_fenced_over_a_crash(keep, flushed):
    async def test(node):
        await node.add(entry(1, 0))
        assert await node.fence(1) is OK
        if flushed:
            await asyncio.sleep(20)
        for _ in range(2):
            await node.crash(keep)
            assert await node.add(entry(1, 1)) == [Status.FENCED]
            assert (await node.read_lac(1)).fenced
        assert await node.add(entry(2, 0)) == [OK]

    on_a_node(test, with_two_ledgers())


@pytest.mark.parametrize("ask", ["lac", "read of nothing", "read of an entry", "again"])
def test_every_answer_to_a_fencing_request_waits_for_the_durable_fence(ask):
    async def test(node):
        await node.add(entry(1, 0))
        node.journal_disk.faults.sync_s = (1.0, 1.0)
        if ask == "again":
            asyncio.ensure_future(node.fence(1))  # noqa: RUF006
            await asyncio.sleep(0.1)
        entry_id = 0 if ask == "read of an entry" else 9
        request = node.read(1, entry_id, entry_id, fence=True) if "read" in ask else node.fence(1)
        before = current().time()
        await request
        assert current().time() - before > 0.8
        await node.crash()
        assert await node.add(entry(1, 1)) == [Status.FENCED]

    on_a_node(test, with_two_ledgers())


def test_what_a_fencing_read_shows_is_no_garbage_any_more_nor_shown_while_it_goes():
    async def test(node):
        await node.add(entry(1, 0))
        await node.fence(1)
        handles = node.handles
        before = handles.use_count(1)
        await node.read(1, 0, 0, fence=True)
        assert handles.use_count(1) == before + 1, "so that collection looks twice again"
        with handles.removing_from_index(1):
            reading = asyncio.ensure_future(node.read(1, 0, 0, fence=True))
            await asyncio.sleep(5)
            assert not reading.done()
        await reading
        await node.read(1, 0, 0)
        assert handles.use_count(1) == before + 2

    on_a_node(test, with_two_ledgers())


def test_an_add_after_the_fencing_request_is_refused_even_before_the_fence_is_durable():
    async def test(node):
        await node.add(entry(1, 0))
        node.journal_disk.faults.sync_s = (1.0, 1.0)
        fencing = asyncio.ensure_future(node.fence(1))
        await asyncio.sleep(0.1)
        assert await node.add(entry(1, 1)) == [Status.FENCED]
        await fencing
        assert await node.add(entry(1, 1), recovery=True) == [OK]

    on_a_node(test, with_two_ledgers())


@pytest.mark.parametrize("in_limbo", [False, True])
def test_of_a_ledgers_tail_come_the_last_entries_and_one_result_for_all_that_follow(in_limbo):
    async def test(node):
        await node.add_all(*(entry(1, entry_id) for entry_id in (0, 1, 2, 4)))
        if in_limbo:
            await node.bookie.put_all_in_limbo(until_restart=True)
        absent = Status.LIMBO if in_limbo else ABSENT
        for tail, first, expected in (
            (3, 0, [OK, absent, OK, absent]),
            (99, 1, [OK, OK, absent, OK, absent]),
            (2, 9, [absent]),
        ):
            response = await node.read(1, first, first, fence=True, tail_entries=tail)
            assert [result.status for result in response.results] == expected
            assert response.stop is StopReason.REST_IS_ABSENT
            assert first + response.skipped + len(expected) - 1 == max(first, 5)
        cut = await node.read(1, 0, 0, fence=True, tail_entries=3, max_bytes=1)
        assert [result.status for result in cut.results] == [OK]
        assert (cut.stop, cut.skipped) == (StopReason.BYTE_LIMIT, 2)

    on_a_node(test, with_two_ledgers())


def test_the_tail_of_a_ledger_ends_at_the_last_id_there_is():
    async def test(node):
        last = 2**63 - 1
        header = EntryHeader(1, last, -1, 0, 0, 0, payload_crc([]))
        assert await node.add(pack_header(header), recovery=True) == [OK]
        response = await node.read(1, 0, 0, fence=True, tail_entries=2)
        assert [result.status for result in response.results] == [ABSENT, OK]
        assert (response.stop, response.skipped) == (StopReason.END_OF_RANGE, last - 1)

    on_a_node(test, with_two_ledgers())


def test_a_ledger_never_seen_is_fenced_all_the_same():
    async def test(node):
        assert await node.statuses(2, 0, 1, fence=True) == [ABSENT, ABSENT]
        await node.crash()
        assert await node.add(entry(2, 0)) == [Status.FENCED]

    on_a_node(test, with_two_ledgers())


def test_what_the_metadata_store_cannot_say_is_unknown():
    async def test(node):
        node.store.stall(60)
        assert await node.add(entry(1, 0)) == [Status.METADATA_UNAVAILABLE]
        assert await node.fence(1) is Status.METADATA_UNAVAILABLE
        assert await node.statuses(1, 0, 0) == [Status.NO_SUCH_LEDGER]
        assert await node.fence(77) is Status.METADATA_UNAVAILABLE
        node.store.calm()

    on_a_node(test, with_two_ledgers())


def test_a_deleted_ledger_takes_no_adds():
    async def test(node):
        await delete_ledgers(node.store.session("client"), 2)
        assert await node.add(entry(2, 0)) == [Status.LEDGER_DELETED]
        assert await node.fence(2) is Status.LEDGER_DELETED

    on_a_node(test, with_two_ledgers())


def test_a_password_is_asked_for_by_what_the_metadata_says():
    async def test(node):
        good, bad = derive(b"secret"), derive(b"guess")
        await node.create_ledger(3, tokens=good)
        assert await node.add(entry(3, 0), token=bad.add) == [Status.UNAUTHORIZED]
        assert await node.add(entry(3, 0), token=good.read) == [Status.UNAUTHORIZED]
        assert await node.add(entry(3, 0), token=good.add) == [OK]
        assert (await node.read(3, 0, 0)).status is Status.UNAUTHORIZED
        assert await node.statuses(3, 0, 0, token=good.read) == [OK]
        assert (await node.read_lac(3, fence=True, token=good.add)).status is Status.UNAUTHORIZED
        assert await node.add(entry(3, 1), token=good.add) == [OK], "it was not fenced"
        assert (await node.read_lac(3, fence=True, token=good.recover)).fenced
        await node.crash()
        assert await node.add(entry(3, 2), token=bad.add) == [Status.UNAUTHORIZED]
        assert await node.add(entry(3, 2), recovery=True, token=good.recover) == [OK]

    on_a_node(test, with_two_ledgers())


# -- reading -----------------------------------------------------------------------------------


@pytest.mark.parametrize("flushed", [0, 1, 2])
def test_a_ranged_read_gives_each_entry_or_its_absence(flushed):
    async def test(node):
        await node.add(entry(1, 0), entry(1, 2))
        if flushed >= 1:
            await asyncio.sleep(20)
        await node.add(entry(1, 5))
        if flushed == 2:
            await asyncio.sleep(20)
        response = await node.read(1, 0, 6)
        statuses = [result.status for result in response.results]
        assert statuses == [OK, ABSENT, OK, ABSENT, ABSENT, OK, ABSENT]
        assert response.stop is StopReason.END_OF_RANGE
        assert await node.statuses(7, 0, 0) == [Status.NO_SUCH_LEDGER]

    on_a_node(test, with_two_ledgers())


@pytest.mark.parametrize("flushed", ["none", "even", "all"])
def test_a_read_stops_at_its_byte_limit_and_says_so_and_never_invents_absence(flushed):
    async def test(node):
        even = [entry(1, e, bytes(1000)) for e in range(0, 20, 2)]
        odd = [entry(1, e, bytes(1000)) for e in range(1, 20, 2)]
        await node.add(*even)
        if flushed != "none":
            await asyncio.sleep(20)
        await node.add(*odd)
        if flushed == "all":
            await asyncio.sleep(20)
        response = await node.read(1, 0, 30, max_bytes=5000)
        assert response.stop is StopReason.BYTE_LIMIT
        assert [result.status for result in response.results] == [OK] * 5
        assert (await node.statuses(1, 3, 30, max_bytes=0)) == [OK], "one entry at least"
        assert await node.statuses(1, 17, 20, max_bytes=5000) == [OK, OK, OK, ABSENT]

    on_a_node(test, with_two_ledgers())


def test_a_read_of_an_endless_range_ends():
    async def test(node):
        await node.add(entry(1, 0))
        response = await node.read(1, 0, 2**62)
        assert response.stop is StopReason.BYTE_LIMIT
        assert len(response.results) == 16384
        assert (await node.read(1, 5, 4)).status is Status.BAD_REQUEST
        assert (await node.read(1, -1, 4)).status is Status.BAD_REQUEST

    on_a_node(test, with_two_ledgers())


def test_a_damaged_entry_is_an_error_never_an_absence_and_repair_replaces_it():
    async def test(node):
        await node.add(entry(1, 0), entry(1, 1), entry(1, 2))
        await asyncio.sleep(20)
        log = node.files(node.ledger_disk, "entrylog")[-1]
        node.ledger_disk.flip_bit(log, 8 * (4096 + 2 * (48 + 64 + 7) - 1))
        assert await node.statuses(1, 0, 2) == [OK, Status.IO_ERROR, OK]
        assert await node.add(entry(1, 1)) == [Status.IO_ERROR]
        assert await node.add(entry(1, 1), recovery=True) == [OK]
        assert await node.statuses(1, 0, 2) == [OK, OK, OK]
        await asyncio.sleep(20)
        assert await node.statuses(1, 0, 2) == [OK, OK, OK]

    on_a_node(test, with_two_ledgers())


@pytest.mark.parametrize("damage", ["truncate", "remove"])
def test_a_lost_entry_log_is_an_error_never_an_absence(damage):
    async def test(node):
        await node.add(entry(1, 0), entry(1, 1))
        await asyncio.sleep(20)
        log = node.files(node.ledger_disk, "entrylog")[-1]
        if damage == "truncate":
            node.ledger_disk.truncate(log, 4096 + 48 + 64 + 7)
        else:
            await node.ledger_disk.remove(log)
        last = await node.statuses(1, 1, 2)
        assert last == [Status.IO_ERROR, Status.LIMBO]

    on_a_node(test, with_two_ledgers())


# -- last add confirmed ------------------------------------------------------------------------


def test_the_last_add_confirmed_is_the_highest_heard_and_is_found_again():
    async def test(node):
        await node.add(entry(1, 0), entry(1, 1, lac=0), entry(1, 2, lac=1))
        assert (await node.read_lac(1)).last_add_confirmed == 1
        await node.crash()
        assert (await node.read_lac(1)).last_add_confirmed == 1
        assert await node.write_lac(1, 2) is OK
        await node.crash()
        assert (await node.read_lac(1)).last_add_confirmed == 2
        assert await node.write_lac(1, 0) is OK
        assert (await node.read(1, 0, 0)).last_add_confirmed == 2

    on_a_node(test, with_two_ledgers())


# -- budgets -----------------------------------------------------------------------------------


def test_beyond_the_pending_budget_adds_are_busy_and_recovery_has_a_reserve():
    async def test(node):
        await node.add(entry(1, 0))
        node.journal_disk.faults.sync_s = (5.0, 5.0)
        large = [entry(1, e, bytes(60 * KIB)) for e in range(1, 6)]
        first = asyncio.ensure_future(node.add(*large[:4]))
        await asyncio.sleep(0.1)
        refused = await node.bookie.handle(m.AddRequest(ID, [m.Add([large[4]])]))
        assert refused.results[0].status is Status.BUSY
        assert CONFIG.retry_after_ms < refused.results[0].retry_after_ms <= 1000
        assert await node.add(large[4], recovery=True) == [OK]
        assert await first == [OK] * 4

    on_a_node(test, with_two_ledgers())


def test_another_entry_that_came_and_was_flushed_during_a_look_up_is_not_replaced():
    async def test(node):
        await node.add(entry(2, 0))
        await asyncio.sleep(2 * CONFIG.flush_interval_s)
        node.ledger_disk.faults.read_s = (2 * CONFIG.flush_interval_s,) * 2
        late = asyncio.ensure_future(node.add(entry(2, 0), entry(1, 0, b"late")))
        await asyncio.sleep(0.1)
        assert await node.add(entry(1, 0, b"first")) == [OK]
        assert await late == [OK, Status.CONFLICTING_ENTRY]
        assert bytes((await node.read(1, 0, 0)).results[0].entry) == entry(1, 0, b"first")

    on_a_node(test, with_two_ledgers())


def test_a_full_write_cache_is_busy_until_a_flush_made_room():
    async def test(node):
        node.ledger_disk.faults.sync_s = (10.0, 10.0)
        statuses = []
        for e in range(12):
            statuses += await node.add(entry(1, e, bytes(60 * KIB)))
        assert statuses[0] is OK
        assert statuses[-1] is Status.BUSY
        await asyncio.sleep(120)
        refused = statuses.index(Status.BUSY)
        assert await node.add(entry(1, refused, bytes(60 * KIB))) == [OK]
        assert await node.statuses(1, 0, 0) == [OK]

    on_a_node(test, with_two_ledgers())


def test_reads_beyond_their_budget_are_busy_and_recovery_has_a_reserve():
    async def test(node):
        await node.add(entry(1, 0))
        await asyncio.sleep(20)
        node.ledger_disk.faults.read_s = (5.0, 5.0)
        readers = [asyncio.ensure_future(node.read(1, 0, 0)) for _ in range(5)]
        await asyncio.sleep(0.1)
        assert (await readers[4]).status is Status.BUSY
        await node.fence(1)
        assert await node.statuses(1, 0, 0, fence=True) == [OK]
        assert [(await reader).status for reader in readers[:4]] == [OK] * 4

    on_a_node(test, with_two_ledgers())


def test_a_frame_that_is_mostly_refused_is_not_kept_alive():
    async def test(node):
        refused = [entry(99, e, bytes(5000)) for e in range(3)]
        frame = codec.encode(m.AddRequest(ID, [m.Add([e]) for e in [entry(1, 0), *refused]]))
        await handle_bytes(node.bookie, "Add", frame)
        assert isinstance(node.storage.cache.get(1, 0), bytes), "a copy, not a view"

    on_a_node(test, with_two_ledgers())


# -- the rest ----------------------------------------------------------------------------------


def test_info_tells_who_answers_and_how_it_is():
    async def test(node):
        await node.add(entry(1, 0))
        response = await node.bookie.handle(m.InfoRequest())
        assert (response.status, response.bookie_id, response.state) == (OK, ID, "writable")
        assert (response.ledgers, response.entry_bytes_max) == (1, 64 * KIB)
        other = await node.bookie.handle(m.InfoRequest("another bookie"))
        assert other.status is Status.WRONG_BOOKIE

    on_a_node(test, with_two_ledgers())


def test_a_stopping_bookie_refuses_and_a_request_under_way_is_finished():
    async def test(node):
        await node.add(entry(1, 0))
        node.journal_disk.faults.sync_s = (1.0, 1.0)
        adding = asyncio.ensure_future(node.add(entry(1, 1)))
        await asyncio.sleep(0.1)
        stopping = asyncio.ensure_future(node.bookie.stop())
        await asyncio.sleep(0.1)
        assert await node.add(entry(1, 2)) == [Status.SHUTTING_DOWN]
        assert await adding == [OK]
        await stopping
        await node.start()
        assert await node.statuses(1, 0, 2) == [OK, OK, ABSENT]

    on_a_node(test, with_two_ledgers())


def test_bytes_that_are_no_request_are_answered_and_an_unknown_method_is_not():
    async def test(node):
        answer = await handle_bytes(node.bookie, "Read", b"\xff\xff\xff")
        assert codec.decode_response("Read", answer).status is Status.BAD_REQUEST
        answer = await handle_bytes(node.bookie, "Add", b"\xff\xff\xff")
        assert codec.decode_response("Add", answer).results == []
        with pytest.raises(ValueError, match="no method"):
            await handle_bytes(node.bookie, "Drop", b"")

    on_a_node(test, with_two_ledgers())


def test_settings_that_could_not_hold_the_largest_entry_are_refused():
    with pytest.raises(ValueError, match="journal_pending_bytes_max"):
        with_settings(CONFIG, journal_pending_bytes_max=64 * KIB)


def test_an_entry_read_back_is_whole():
    async def test(node):
        await node.add(entry(1, 0, b"x" * 100, lac=-1))
        found = unpack_entry((await node.read(1, 0, 0)).results[0].entry)
        assert found.header.cumulative_rows == 1
        assert bytes(found.payload) == b"x" * 100

    on_a_node(test, with_two_ledgers())
