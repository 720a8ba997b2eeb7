"""The writer against scripted bookies: order, failures, ensemble changes, closing."""

import asyncio

import numpy as np
import pytest

from bookie_server.api import messages as m
from bookie_server.api.entry import unpack_entry
from bookie_server.api.status import Status
from spark_ledger import errors
from spark_ledger.bookies.bookie_client import CallFailed
from spark_ledger.ledger.writer import read_only_parts
from spark_ledger.metadata import paths
from spark_ledger.metadata.ledger_record import RecordState, decode
from spark_ledger.metadata.store import OutcomeUnknown, StoreUnavailable
from tests.simulation.loop import current
from tests.unit.spark_ledger.ledger.fakes import cluster_of, failure_of, refuses, simulated


def lose_the_answer_of_a_write(session, away_s):
    """The next write is applied, its answer is lost, and for a time nobody can be asked."""
    back_at = current().time() + away_s
    plain = {name: getattr(session, name) for name in ("set", "sync")}
    writes = []

    async def set_once(*arguments):
        writes.append(arguments)
        if len(writes) > 1 and current().time() < back_at:
            raise StoreUnavailable("not sent")
        version = await plain["set"](*arguments)
        if len(writes) == 1:
            raise OutcomeUnknown("the answer was lost")
        return version

    async def sync_later(*arguments):
        if current().time() < back_at:
            raise StoreUnavailable("not sent")
        await plain["sync"](*arguments)

    session.set, session.sync = set_once, sync_later


@simulated
async def test_entries_get_ids_in_order_and_headers_count_bytes_and_rows():
    cluster, ledgers = await cluster_of(3)
    writer = await ledgers.create(3, 3, 2)
    assert await asyncio.gather(*(writer.append(b"x" * n, n) for n in (3, 0, 4))) == [0, 1, 2]
    assert await writer.append([b"ab", memoryview(b"c")]) == 3
    entry = unpack_entry(cluster.bookies["a"].entries[writer.ledger_id, 3])
    assert bytes(entry.payload) == b"abc"
    assert (entry.header.cumulative_bytes, entry.header.cumulative_rows) == (10, 7)
    assert entry.header.last_add_confirmed == 2


@pytest.mark.parametrize(
    "wrap",
    [lambda b: b, memoryview, lambda b: [b"", b]],
    ids=["bytearray", "memoryview", "in a list"],
)
def test_a_buffer_that_is_used_again_once_an_append_returned_changes_no_copy(wrap):
    @simulated
    async def test():
        cluster, ledgers = await cluster_of(3)
        writer = await ledgers.create(3, 3, 2)
        late = cluster.bookies["c"]
        late.override = refuses(Status.BUSY, retry_after_ms=300)
        buffer = bytearray(b"first" * 20_000)
        payload = wrap(buffer)
        added = writer.append(payload)
        buffer[:] = b"other" * 20_000
        assert await added == 0
        buffer[:] = b"third" * 20_000
        late.override = None
        assert await writer.wait_for_copies(5) == []
        for bookie in cluster.bookies.values():
            stored = unpack_entry(bookie.entries[writer.ledger_id, 0])
            assert bytes(stored.payload) == b"first" * 20_000

    test()


@pytest.mark.parametrize("payload", [b"abc", memoryview(b"abc"), [b"a", memoryview(b"bc")]])
def test_what_nobody_can_change_is_not_copied(payload):
    def address(buffer):
        return np.frombuffer(buffer, np.uint8).ctypes.data

    given = payload if isinstance(payload, list) else [payload]
    assert list(map(address, read_only_parts(payload))) == list(map(address, given))


@simulated
async def test_striped_entries_go_to_their_write_set():
    cluster, ledgers = await cluster_of(3)
    writer = await ledgers.create(3, 2, 2)
    await asyncio.gather(*(writer.append(b"x") for _ in range(6)))
    ensemble = writer.record.last_fragment.ensemble
    for entry in range(6):
        expected = {ensemble[entry % 3], ensemble[(entry + 1) % 3]}
        assert set(cluster.holders(writer.ledger_id, entry)) == expected


@simulated
async def test_a_failed_bookie_is_replaced_by_a_spare_and_the_copies_are_made():
    cluster, ledgers = await cluster_of(4)
    writer = await ledgers.create(3, 3, 2)
    await writer.append(b"0")
    first = writer.record.last_fragment.ensemble
    cluster.bookies[first[1]].refusing = True
    await asyncio.gather(*(writer.append(b"1") for _ in range(3)))
    assert await writer.wait_for_copies(5) in ([], [first[1]])
    assert await writer.wait_for_copies(0, 2) == []
    last = writer.record.last_fragment
    spare = ({"a", "b", "c", "d"} - set(first)).pop()
    assert last.ensemble == (first[0], spare, first[2])
    assert spare in cluster.holders(writer.ledger_id, 3)
    assert (await writer.close()).last_entry == 3


@simulated
async def test_a_failed_bookie_without_a_spare_puts_the_change_off_and_writes_go_on():
    cluster, ledgers = await cluster_of(3)
    writer = await ledgers.create(3, 3, 2)
    cluster.bookies["b"].refusing = True
    assert await asyncio.gather(*(writer.append(b"x") for _ in range(5))) == [0, 1, 2, 3, 4]
    assert len(writer.record.fragments) == 1
    assert await writer.wait_for_copies(1) == ["b"]
    assert await writer.wait_for_copies(1, 4) == ["b"]
    assert await writer.wait_for_copies(1, 5) == []


@simulated
async def test_a_change_that_was_put_off_is_made_when_a_bookie_registers():
    cluster, ledgers = await cluster_of(3)
    writer = await ledgers.create(3, 3, 2)
    cluster.bookies["b"].refusing = True
    await writer.append(b"0")
    await cluster.register("d")
    await asyncio.sleep(1)
    await writer.append(b"1")
    assert "d" in writer.record.last_fragment.ensemble
    assert writer.record.last_fragment.first_entry == 1


@simulated
async def test_a_bookie_that_comes_back_is_taken_back_without_a_change():
    cluster, ledgers = await cluster_of(3)
    writer = await ledgers.create(3, 3, 2)
    cluster.bookies["b"].refusing = True
    await writer.append(b"0")
    cluster.bookies["b"].refusing = False
    await asyncio.sleep(6)
    await writer.append(b"1")
    await writer.wait_for_copies(1)
    assert cluster.holders(writer.ledger_id, 1) == ["a", "b", "c"]
    assert len(writer.record.fragments) == 1


@simulated
async def test_with_fewer_than_the_ack_quorum_adds_fail_naming_the_bookies_within_30_s():
    cluster, ledgers = await cluster_of(3)
    writer = await ledgers.create(3, 3, 2)
    await writer.append(b"0")
    for name in ("a", "c"):
        cluster.bookies[name].refusing = True
    began = current().time()
    failure = await failure_of(writer.append(b"1"))
    assert isinstance(failure, errors.NotEnoughBookies)
    assert current().time() - began < 30
    assert failure.facts["bookies"] == sorted(
        failure.facts["bookies"], key=writer.record.last_fragment.ensemble.index
    )
    assert set(failure.facts["bookies"]) == {"a", "c"}
    assert "connection refused" in failure.what
    assert isinstance(await failure_of(writer.append(b"2")), errors.NotEnoughBookies)
    assert writer.failure is failure
    assert (await writer.close()).last_entry == 0


@simulated
async def test_a_short_restart_of_two_bookies_is_survived():
    cluster, ledgers = await cluster_of(3)
    writer = await ledgers.create(3, 3, 2)
    for name in ("a", "c"):
        cluster.bookies[name].refusing = True
    adding = writer.append(b"0")
    await asyncio.sleep(4)
    for name in ("a", "c"):
        cluster.bookies[name].refusing = False
    assert await adding == 0


@simulated
async def test_a_silent_bookie_is_replaced_after_the_replica_timeout_and_blocks_nothing():
    cluster, ledgers = await cluster_of(4)
    writer = await ledgers.create(3, 3, 2)
    silent = writer.record.last_fragment.ensemble[0]
    cluster.bookies[silent].silent = True
    began = current().time()
    await writer.append(b"0")
    assert current().time() - began < 1
    await asyncio.sleep(6)
    assert silent not in writer.record.last_fragment.ensemble


@simulated
async def test_busy_is_asked_again_of_the_same_bookie():
    cluster, ledgers = await cluster_of(4)
    writer = await ledgers.create(3, 3, 3)
    busy = cluster.bookies[writer.record.last_fragment.ensemble[0]]
    busy.override = refuses(Status.BUSY, retry_after_ms=300)
    current().call_later(2, setattr, busy, "override", None)
    assert await writer.append(b"0") == 0
    assert len(writer.record.fragments) == 1
    assert busy.name in writer.record.last_fragment.ensemble


@simulated
async def test_a_bookie_busy_for_longer_than_the_replica_timeout_is_replaced():
    cluster, ledgers = await cluster_of(4)
    writer = await ledgers.create(3, 3, 3)
    busy = writer.record.last_fragment.ensemble[0]
    cluster.bookies[busy].override = refuses(Status.BUSY)
    assert await writer.append(b"0") == 0
    assert busy not in writer.record.last_fragment.ensemble


@pytest.mark.parametrize(
    ("status", "kind"),
    [
        (Status.FENCED, errors.LedgerFenced),
        (Status.UNAUTHORIZED, errors.Unauthorized),
        (Status.LEDGER_DELETED, errors.NoSuchLedger),
        (Status.CONFLICTING_ENTRY, errors.LedgerError),
    ],
)
def test_a_terminal_answer_fails_all_adds_and_all_later_ones(status, kind):
    @simulated
    async def test():
        cluster, ledgers = await cluster_of(4)
        writer = await ledgers.create(3, 3, 3)
        await writer.append(b"0")
        bookie = writer.record.last_fragment.ensemble[2]
        cluster.bookies[bookie].override = refuses(status)
        adds = [writer.append(b"x") for _ in range(3)]
        for add in (*adds, writer.append(b"later")):
            assert isinstance(await failure_of(add), kind)
        assert writer.last_add_confirmed == 0
        assert isinstance(await failure_of(writer.append(b"still later")), kind)

    test()


@simulated
async def test_an_entry_too_large_fails_alone_and_takes_no_id():
    _, ledgers = await cluster_of(3, entry_bytes_max=1000)
    writer = await ledgers.create(3, 3, 2)
    assert isinstance(await failure_of(writer.append(b"x" * 1000)), errors.MessageTooBig)
    assert await writer.append(b"x" * 900) == 0


@pytest.mark.parametrize(
    ("rows", "error"), [(-1, ValueError), (2**63, ValueError), (1.5, TypeError)], ids=str
)
def test_rows_that_cannot_be_counted_are_refused_and_the_writer_goes_on(rows, error):
    @simulated
    async def test():
        _, ledgers = await cluster_of(3)
        writer = await ledgers.create(3, 3, 2)
        await writer.append(b"0", 2)
        with pytest.raises(error):
            writer.append(b"refused", rows)
        assert await writer.append(b"1", 3) == 1
        record = await writer.close()
        assert (record.last_entry, record.length_bytes, record.rows) == (1, 2, 5)

    test()


@simulated
async def test_an_add_that_nobody_answers_ends_within_its_time():
    cluster, ledgers = await cluster_of(3)
    writer = await ledgers.create(3, 3, 2)
    for bookie in cluster.bookies.values():
        bookie.override = refuses(Status.METADATA_UNAVAILABLE)
    began = current().time()
    failure = await failure_of(writer.append(b"0"))
    assert isinstance(failure, errors.NotEnoughBookies | errors.TimedOut)
    assert current().time() - began <= 30


@simulated
async def test_a_flapping_change_resends_what_is_missing():
    """C fails, its spare D fails, C answers again: nothing may hang (BK#4459, BK#4261)."""
    cluster, ledgers = await cluster_of(4)
    writer = await ledgers.create(3, 3, 3)
    members = writer.record.last_fragment.ensemble
    spare = ({"a", "b", "c", "d"} - set(members)).pop()
    cluster.bookies[members[2]].refusing = True
    cluster.bookies[spare].refusing = True
    adds = [writer.append(b"x") for _ in range(4)]
    await asyncio.sleep(2)
    cluster.bookies[members[2]].refusing = False
    assert await asyncio.gather(*adds) == [0, 1, 2, 3]
    owners = writer.record.last_fragment.ensemble
    assert all(set(owners) <= set(cluster.holders(writer.ledger_id, e)) for e in range(4))


@simulated
async def test_nothing_is_confirmed_by_an_ensemble_that_is_not_in_the_store():
    """The store stalls during a change: what the spare would say must wait (BK#1591)."""
    cluster, ledgers = await cluster_of(4)
    writer = await ledgers.create(3, 3, 3)
    await writer.append(b"0")
    cluster.bookies[writer.record.last_fragment.ensemble[1]].refusing = True
    cluster.store.stall(6)
    adding = writer.append(b"1")
    await asyncio.sleep(5)
    assert not adding.done()
    assert await adding == 1
    assert writer.record.last_fragment.first_entry == 1
    path_record = await ledgers.record(writer.ledger_id, fresh=True)
    assert path_record.record.last_fragment == writer.record.last_fragment


@simulated
async def test_a_change_with_lost_answers_of_the_store_is_made_once():
    cluster, ledgers = await cluster_of(5)
    writer = await ledgers.create(3, 3, 2)
    await writer.append(b"0")
    cluster.store.faults.unknown = 0.5
    cluster.bookies[writer.record.last_fragment.ensemble[1]].refusing = True
    await asyncio.gather(*(writer.append(b"x") for _ in range(4)))
    await asyncio.sleep(60)
    assert await writer.append(b"y") == 5
    cluster.store.calm()
    assert len(writer.record.fragments) <= 2
    assert (await writer.close()).last_entry == 5


@simulated
async def test_a_change_that_may_be_in_the_store_stays_in_flight_while_the_store_is_away():
    cluster, ledgers = await cluster_of(4)
    writer = await ledgers.create(3, 3, 2)
    busy, failing, silent = (cluster.bookies[b] for b in writer.record.last_fragment.ensemble)
    busy.override, silent.silent = refuses(Status.BUSY, retry_after_ms=10), True
    first = writer.append(b"0")
    await asyncio.sleep(0.1)  # the failing bookie has acknowledged it, nobody else has
    failing.refusing = True
    lose_the_answer_of_a_write(ledgers.metadata, away_s=3)
    second = writer.append(b"1")
    await asyncio.sleep(0.5)
    busy.override = None
    assert await first == 0
    published = cluster.store.peek(paths.ledger(writer.ledger_id))
    members = decode(published.value).fragment_of(0).ensemble
    assert len(set(members) & set(cluster.holders(writer.ledger_id, 0))) >= 2
    assert await second == 1


@simulated
async def test_a_ledger_with_the_most_fragments_tells_the_caller_to_roll():
    cluster, ledgers = await cluster_of(5, fragments_max=2)
    writer = await ledgers.create(3, 3, 3)
    await writer.append(b"0")
    cluster.bookies[writer.record.last_fragment.ensemble[0]].refusing = True
    await writer.append(b"1")
    cluster.bookies[writer.record.last_fragment.ensemble[0]].refusing = True
    failure = await failure_of(writer.append(b"2"))
    assert isinstance(failure, errors.LedgerClosed)
    assert "new ledger" in failure.remedy
    assert (await writer.close()).last_entry == 1


@simulated
async def test_close_waits_for_what_is_pending_and_counts_it():
    _, ledgers = await cluster_of(3)
    writer = await ledgers.create(3, 3, 2)
    adds = [writer.append(b"four", 2) for _ in range(5)]
    record = await writer.close()
    assert [add.result() for add in adds] == [0, 1, 2, 3, 4]
    assert (record.state, record.last_entry) == (RecordState.CLOSED, 4)
    assert (record.length_bytes, record.rows) == (20, 10)
    assert await writer.close() is record
    assert isinstance(await failure_of(writer.append(b"x")), errors.LedgerClosed)


@simulated
async def test_an_empty_ledger_closes_at_minus_one():
    _, ledgers = await cluster_of(3)
    record = await (await ledgers.create(3, 3, 2)).close()
    assert (record.last_entry, record.length_bytes, record.rows) == (-1, 0, 0)


@simulated
async def test_a_close_that_meets_another_recovery_adopts_its_result():
    cluster, ledgers = await cluster_of(3)
    other = await cluster.client("other", seed=1)
    writer = await ledgers.create(3, 3, 2)
    await writer.append(b"0")
    recovered = await other.recover(writer.ledger_id)
    assert isinstance(await failure_of(writer.append(b"1")), errors.LedgerFenced)
    assert await writer.close() == recovered.record


@simulated
async def test_a_fence_is_seen_at_once_although_another_bookie_hangs():
    cluster, ledgers = await cluster_of(3)
    writer = await ledgers.create(3, 3, 2)
    await writer.append(b"x")
    hanging, fenced, _ = cluster.bookies.values()
    hanging.silent = True
    assert not await writer.is_fenced()
    fenced.fenced[writer.ledger_id] = True
    began_s = asyncio.get_running_loop().time()
    assert await writer.is_fenced()
    assert asyncio.get_running_loop().time() < began_s + 1


@simulated
async def test_room_waits_until_bytes_in_flight_have_their_answers():
    _, ledgers = await cluster_of(3, inflight_bytes=1000)
    writer = await ledgers.create(3, 3, 2)
    for _ in range(10):
        await writer.room()
        writer.append(b"x" * 300)
        assert writer.inflight_bytes <= 1000 + 364
    await writer.close()
    assert writer.inflight_bytes == 0


@simulated
async def test_the_last_add_confirmed_is_announced_when_appends_pause():
    cluster, ledgers = await cluster_of(3)
    writer = await ledgers.create(3, 3, 2, announce_lac=True)
    reader = await ledgers.open(writer.ledger_id, recover=False)
    await writer.append(b"0")
    await asyncio.sleep(1)
    assert await reader.refresh_last_add_confirmed() == 0
    told = [r for r in cluster.bookies["a"].requests if isinstance(r, m.WriteLacRequest)]
    await asyncio.sleep(10)
    assert [r for r in cluster.bookies["a"].requests if isinstance(r, m.WriteLacRequest)] == told


@simulated
async def test_what_is_confirmed_is_announced_at_once_and_not_more_often_than_the_pause():
    cluster, ledgers = await cluster_of(3)
    pause_s = ledgers.config.explicit_lac_s
    writer = await ledgers.create(3, 3, 2, announce_lac=True)
    reader = await ledgers.open(writer.ledger_id, recover=False)
    for _ in range(3):
        await writer.append(b"one")
        await asyncio.sleep(pause_s / 10)
    assert await reader.refresh_last_add_confirmed() == 1, "the third add carried that"
    requests = cluster.bookies["a"].requests
    told = [r.last_add_confirmed for r in requests if isinstance(r, m.WriteLacRequest)]
    assert told == [0]
    await asyncio.sleep(pause_s)
    assert await reader.refresh_last_add_confirmed() == 2


@simulated
async def test_a_ledger_needs_as_many_writable_bookies_as_its_ensemble():
    _, ledgers = await cluster_of(2)
    with pytest.raises(errors.NotEnoughBookies, match="needs 3 writable bookies, there are 2"):
        await ledgers.create(3, 3, 2)


@simulated
async def test_creating_waits_a_moment_for_a_bookie_that_restarts():
    cluster, ledgers = await cluster_of(3)
    await cluster.deregister("b")
    await asyncio.sleep(1)
    creating = asyncio.ensure_future(ledgers.create(3, 3, 2))
    await asyncio.sleep(3)
    await cluster.register("b")
    assert sorted((await creating).record.last_fragment.ensemble) == ["a", "b", "c"]


@simulated
async def test_creating_without_bookies_or_store_says_that_the_store_is_away():
    _, ledgers = await cluster_of(2)
    plain = ledgers.metadata.children

    async def children(path, watch=None):
        if path == paths.BOOKIES_KNOWN:
            raise StoreUnavailable("not sent")
        return await plain(path, watch)

    ledgers.metadata.children = children
    with pytest.raises(errors.Unavailable):
        await ledgers.create(3, 3, 2)


@simulated
async def test_a_late_failure_of_an_earlier_try_does_not_fail_the_slot_again():
    cluster, ledgers = await cluster_of(3)
    writer = await ledgers.create(3, 3, 2)
    answers = [CallFailed("reset"), None]
    cluster.bookies["b"].override = lambda request: answers.pop(0) if answers else None
    for _ in range(5):
        await writer.append(b"x")
        await asyncio.sleep(1)
    await writer.wait_for_copies(1)
    assert "b" in cluster.holders(writer.ledger_id, 4)


@simulated
async def test_closing_the_store_fails_what_its_writers_have_pending():
    cluster, ledgers = await cluster_of(3)
    writer = await ledgers.create(3, 3, 2)
    for bookie in cluster.bookies.values():
        bookie.silent = True
    adding = writer.append(b"x")
    await asyncio.sleep(0.1)
    await ledgers.close()
    assert isinstance(await failure_of(adding), errors.ClientClosed)


@simulated
async def test_appends_after_the_end_of_a_writer_say_when_and_why_it_ended_and_nothing_stale():
    cluster, ledgers = await cluster_of(3, spare_grace_s=2.0)
    writer = await ledgers.create(3, 3, 2)
    for name in "ab":
        cluster.bookies[name].refusing = True
    with pytest.raises(errors.NotEnoughBookies, match="refused"):
        await writer.append(b"x")
    await asyncio.sleep(30)
    with pytest.raises(errors.NotEnoughBookies) as caught:
        await writer.append(b"y")
    assert caught.value.what == (
        f"the writer of ledger {writer.ledger_id} ended 30.0 s ago:"
        " fewer than 2 of 3 bookies took an entry; a: IO_ERROR no answer from a:1: connection"
        " refused; b: IO_ERROR no answer from b:1: connection refused"
    )
    assert "new ledger" in caught.value.remedy
    assert isinstance(writer.failure, errors.NotEnoughBookies)


@simulated
async def test_appends_after_a_fence_are_fenced_and_say_so():
    _, ledgers = await cluster_of(3)
    writer = await ledgers.create(3, 3, 2)
    await ledgers.recover(writer.ledger_id)
    for _ in range(2):
        with pytest.raises(errors.LedgerFenced, match="was fenced"):
            await writer.append(b"x")
