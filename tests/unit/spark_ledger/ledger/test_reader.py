"""The reader against scripted bookies: only what is confirmed, from whoever has it."""

import asyncio

import pytest

from bookie_server.api import messages as m
from bookie_server.api.status import Status
from spark_ledger import errors
from spark_ledger.bookies.directory import BookieDirectory
from spark_ledger.ledger.reader import LedgerReader
from spark_ledger.metadata.tokens import derive
from tests.simulation.loop import current
from tests.unit.spark_ledger.ledger.fakes import cluster_of, simulated


async def written(ledgers, count, size=10, sizes=(3, 3, 2), close=True):
    writer = await ledgers.create(*sizes)
    await asyncio.gather(*(writer.append(bytes([n % 256]) * size, 1) for n in range(count)))
    await writer.fully_replicated(1)
    if close:
        await writer.close()
    return writer


async def collect(reader, first, last, **options):
    found = []
    async for entry_id, entry in reader.read(first, last, **options):
        assert entry.header.entry_id == entry_id
        assert bytes(entry.payload[:1]) == bytes([entry_id % 256])
        found.append(entry_id)
    return found


@pytest.mark.parametrize("sizes", [(1, 1, 1), (3, 3, 2), (3, 2, 2), (4, 2, 1), (5, 3, 2)], ids=str)
def test_a_closed_ledger_reads_whole_and_in_parts_whatever_its_striping(sizes):
    @simulated
    async def test():
        _, ledgers = await cluster_of(5, read_request_bytes=400, read_ahead_bytes=1200)
        writer = await written(ledgers, 100, sizes=sizes)
        reader = await ledgers.open(writer.ledger_id, recover=False)
        assert reader.is_closed
        assert reader.last_add_confirmed == 99
        for first, last in ((0, 99), (7, 7), (33, 98)):
            assert await collect(reader, first, last) == list(range(first, last + 1))

    test()


@simulated
async def test_an_open_ledger_is_read_up_to_its_last_add_confirmed_and_no_further():
    _, ledgers = await cluster_of(3)
    writer = await written(ledgers, 10, close=False)
    await writer.append(b"\x0a")
    reader = await ledgers.open(writer.ledger_id, recover=False)
    confirmed = await reader.refresh_last_add_confirmed()
    assert confirmed == 9
    assert await collect(reader, 0, 9) == list(range(10))
    with pytest.raises(errors.NoSuchEntry):
        await collect(reader, 0, 10)


@simulated
async def test_what_the_caller_knows_to_be_confirmed_is_read():
    _, ledgers = await cluster_of(3)
    writer = await written(ledgers, 10, close=False)
    reader = await ledgers.open(writer.ledger_id, recover=False)
    assert await collect(reader, 0, 9, known_confirmed=9) == list(range(10))


@simulated
async def test_beyond_the_end_of_a_closed_ledger_nothing_is_confirmed_whoever_says_so():
    _, ledgers = await cluster_of(3)
    writer = await written(ledgers, 10)
    reader = await ledgers.open(writer.ledger_id, recover=False)
    with pytest.raises(errors.NoSuchEntry):
        await collect(reader, 5, 10, known_confirmed=10)


@simulated
async def test_a_dead_bookie_costs_nothing_but_a_moment():
    cluster, ledgers = await cluster_of(3, read_request_bytes=400, read_ahead_bytes=1200)
    writer = await written(ledgers, 100)
    cluster.bookies["a"].refusing = True
    reader = await ledgers.open(writer.ledger_id, recover=False)
    assert await collect(reader, 0, 99) == list(range(100))


@simulated
async def test_one_of_three_bookies_is_enough_to_read():
    cluster, ledgers = await cluster_of(3, read_request_bytes=400, read_ahead_bytes=1200)
    writer = await written(ledgers, 100)
    cluster.bookies["a"].refusing = cluster.bookies["b"].silent = True
    reader = await ledgers.open(writer.ledger_id, recover=False)
    began = current().time()
    assert await collect(reader, 0, 99) == list(range(100))
    assert current().time() - began < 12


@simulated
async def test_a_damaged_copy_is_read_from_the_next_replica():
    cluster, ledgers = await cluster_of(3)
    writer = await written(ledgers, 9)
    for entry in range(9):
        for name in ("ab", "bc", "ca")[entry % 3]:
            data = cluster.bookies[name].entries[writer.ledger_id, entry]
            cluster.bookies[name].entries[writer.ledger_id, entry] = data[:-1] + b"\xff"
    reader = await ledgers.open(writer.ledger_id, recover=False)
    assert await collect(reader, 0, 8) == list(range(9))


@simulated
async def test_when_every_copy_is_damaged_the_error_says_so():
    cluster, ledgers = await cluster_of(3)
    writer = await written(ledgers, 3)
    for bookie in cluster.bookies.values():
        data = bookie.entries[writer.ledger_id, 1]
        bookie.entries[writer.ledger_id, 1] = data[:-1] + b"\xff"
    reader = await ledgers.open(writer.ledger_id, recover=False)
    with pytest.raises(errors.DigestMismatch):
        await collect(reader, 0, 2)


@simulated
async def test_a_confirmed_entry_that_all_deny_is_unavailable_and_never_the_end():
    cluster, ledgers = await cluster_of(3)
    writer = await written(ledgers, 3)
    for bookie in cluster.bookies.values():
        del bookie.entries[writer.ledger_id, 2]
    reader = await ledgers.open(writer.ledger_id, recover=False)
    with pytest.raises(errors.DataUnavailable, match="NO_SUCH_ENTRY"):
        await collect(reader, 0, 2)


@simulated
async def test_a_reader_with_an_old_record_reads_it_again_when_entries_are_denied():
    cluster, ledgers = await cluster_of(6)
    writer = await written(ledgers, 5, close=False)
    reader = await ledgers.open(writer.ledger_id, recover=False)
    old = writer.record.last_fragment.ensemble
    for name in old:
        cluster.bookies[name].refusing = True
    await asyncio.gather(*(writer.append(bytes([n])) for n in range(5, 10)))
    await writer.close()
    for name in old:
        cluster.bookies[name].refusing = False
    assert await collect(reader, 0, 9, known_confirmed=9) == list(range(10))
    assert reader.is_closed


@simulated
async def test_what_was_fetched_ahead_by_an_old_record_is_fetched_again_by_the_new_one():
    cluster, ledgers = await cluster_of(6, read_request_bytes=100, read_ahead_bytes=1000)
    writer = await written(ledgers, 200, close=False)
    reader = await ledgers.open(writer.ledger_id, recover=False)
    old = writer.record.last_fragment.ensemble
    for name in old:
        cluster.bookies[name].refusing = True
    await asyncio.gather(*(writer.append(bytes([n]) * 10) for n in range(200, 250)))
    for name in old:
        cluster.bookies[name].refusing = False
    assert await collect(reader, 0, 249, known_confirmed=249) == list(range(250))
    await writer.close()


@simulated
async def test_what_is_fetched_ahead_stays_within_its_bytes():
    cluster, ledgers = await cluster_of(3, read_request_bytes=2000, read_ahead_bytes=8000)
    writer = await written(ledgers, 200, size=200)
    reader = await ledgers.open(writer.ledger_id, recover=False)
    entries = reader.read(0, 199)
    await anext(entries)
    await asyncio.sleep(5)
    asked = [
        r
        for bookie in cluster.bookies.values()
        for r in bookie.requests
        if isinstance(r, m.ReadRequest)
    ]
    assert 2 <= len(asked) <= 5
    assert len({r.bookie_id for r in asked}) == 3
    await entries.aclose()


@simulated
async def test_entries_larger_than_a_request_are_read_one_by_one():
    _, ledgers = await cluster_of(3, read_request_bytes=100, read_ahead_bytes=300)
    writer = await written(ledgers, 12, size=500)
    reader = await ledgers.open(writer.ledger_id, recover=False)
    assert await collect(reader, 0, 11) == list(range(12))


@simulated
async def test_a_wrong_password_is_told_apart_from_lost_data():
    cluster, ledgers = await cluster_of(3)
    writer = await written(ledgers, 3)
    for bookie in cluster.bookies.values():
        bookie.override = lambda request: m.ReadResponse(Status.UNAUTHORIZED)
    reader = await ledgers.open(writer.ledger_id, recover=False)
    with pytest.raises(errors.Unauthorized):
        await collect(reader, 0, 2)


@simulated
async def test_a_ledger_whose_password_one_bookie_took_for_wrong_is_not_called_unauthorized():
    cluster, ledgers = await cluster_of(3)
    writer = await written(ledgers, 3)
    cluster.bookies["a"].override = lambda request: m.ReadResponse(Status.UNAUTHORIZED)
    cluster.bookies["b"].refusing = cluster.bookies["c"].refusing = True
    reader = await ledgers.open(writer.ledger_id, recover=False)
    with pytest.raises(errors.DataUnavailable, match="UNAUTHORIZED"):
        await collect(reader, 0, 2)


# -- whom it asks, and when ---------------------------------------------------------------------


def reads_of(cluster, *names):
    return [
        r
        for name in names or cluster.bookies
        for r in cluster.bookies[name].requests
        if isinstance(r, m.ReadRequest)
    ]


def watch_bytes(cluster):
    """The most bytes that reads under way could bring at a time, once it is over."""
    under_way, most = {}, [0]
    for bookie in cluster.bookies.values():

        async def handle(request, timeout_s, handle=bookie.handle):
            if isinstance(request, m.ReadRequest):
                under_way[id(request)] = request.max_bytes
                most.append(sum(under_way.values()))
            try:
                return await handle(request, timeout_s)
            finally:
                under_way.pop(id(request), None)

        bookie.handle = handle
    return most


@pytest.mark.parametrize("sizes", [(3, 3, 2), (3, 2, 2), (4, 2, 1), (5, 3, 2), (5, 4, 2)], ids=str)
def test_a_hung_bookie_costs_a_read_the_speculative_delay_once(sizes):
    @simulated
    async def test():
        cluster, ledgers = await cluster_of(
            sizes[0], read_request_bytes=400, read_ahead_bytes=1600, speculative_read_delay_s=0.3
        )
        writer = await written(ledgers, 200, sizes=sizes)
        cluster.bookies["a"].silent = True
        most = watch_bytes(cluster)
        reader = await ledgers.open(writer.ledger_id, recover=False)
        began = current().time()
        assert await collect(reader, 0, 199) == list(range(200))
        assert 0.3 <= current().time() - began < 0.9
        assert max(most) <= 1600
        in_window = 1600 // 400
        assert len(reads_of(cluster, "a")) <= in_window

    test()


@simulated
async def test_the_bookie_that_hung_is_asked_again_after_a_while():
    cluster, ledgers = await cluster_of(3, read_request_bytes=400, read_ahead_bytes=1600)
    writer = await written(ledgers, 200)
    cluster.bookies["a"].silent = True
    reader = await ledgers.open(writer.ledger_id, recover=False)
    await collect(reader, 0, 199)
    cluster.bookies["a"].silent = False
    cluster.bookies["a"].requests.clear()
    assert await collect(reader, 0, 199) == list(range(200))
    assert reads_of(cluster, "a") == []
    await asyncio.sleep(20)
    await collect(reader, 0, 199)
    assert reads_of(cluster, "a")


@simulated
async def test_an_entry_is_asked_of_one_bookie_while_that_one_has_time():
    cluster, ledgers = await cluster_of(3, read_request_bytes=400, read_ahead_bytes=1600)
    for bookie in cluster.bookies.values():
        bookie.delay_s = 0.25
    writer = await written(ledgers, 100)
    reader = await ledgers.open(writer.ledger_id, recover=False)
    assert await collect(reader, 0, 99) == list(range(100))
    asked = [e for r in reads_of(cluster) for e in range(r.first_entry, r.last_entry + 1)]
    assert sorted(asked) == list(range(100))


@simulated
async def test_of_two_replicas_asked_the_first_answer_counts_whosever_it_is():
    for delays, spent in (((0.35, 0.2, 0.2), 0.35), ((5.0, 0.2, 0.2), 0.5)):
        cluster, ledgers = await cluster_of(3)
        writer = await written(ledgers, 5)
        reader = await ledgers.open(writer.ledger_id, recover=False)
        names = reader.record.fragments[0].ensemble
        first = (writer.ledger_id + 1) % 3  # the slot whose turn it is
        for step, delay_s in enumerate(delays):
            cluster.bookies[names[(first + step) % 3]].delay_s = delay_s
        began = current().time()
        assert await collect(reader, 0, 4) == list(range(5))
        assert abs(current().time() - began - spent) < 0.02
        assert len(reads_of(cluster)) == 2


@simulated
async def test_what_nobody_waits_for_yet_is_not_asked_twice():
    cluster, ledgers = await cluster_of(3, read_request_bytes=400, read_ahead_bytes=1600)
    writer = await written(ledgers, 100)
    reader = await ledgers.open(writer.ledger_id, recover=False)
    slots = reader.record.fragments[0].ensemble
    cluster.bookies[slots[(writer.ledger_id + 2) % 3]].silent = True  # the second chunk's
    entries = reader.read(0, 99)
    await anext(entries)
    await asyncio.sleep(3)
    firsts = [r.first_entry for r in reads_of(cluster)]
    assert len(firsts) == len(set(firsts))
    began = current().time()
    assert len([e async for e in entries]) == 99
    assert current().time() - began < 0.5


@pytest.mark.parametrize(
    "status",
    [
        Status.NO_SUCH_LEDGER,
        Status.UNAUTHORIZED,
        Status.WRONG_BOOKIE,
        Status.READ_ONLY,
        Status.IO_ERROR,
        Status.SHUTTING_DOWN,
        Status.METADATA_UNAVAILABLE,
        Status.LEDGER_DELETED,
    ],
    ids=lambda status: status.name,
)
def test_whatever_one_bookie_refuses_with_the_next_is_asked_at_once(status):
    @simulated
    async def test():
        cluster, ledgers = await cluster_of(3, read_request_bytes=400, read_ahead_bytes=1600)
        writer = await written(ledgers, 100)
        cluster.bookies["b"].override = lambda request: m.ReadResponse(status)
        reader = await ledgers.open(writer.ledger_id, recover=False)
        began = current().time()
        assert await collect(reader, 0, 99) == list(range(100))
        assert current().time() - began < 0.2

    test()


@pytest.mark.parametrize("status", [Status.NO_SUCH_ENTRY, Status.LIMBO, Status.IO_ERROR])
def test_entries_that_one_bookie_lacks_are_taken_from_the_next_and_only_those(status):
    @simulated
    async def test():
        cluster, ledgers = await cluster_of(3)
        writer = await written(ledgers, 90)
        lacking = [n for n in range(90) if n % 9 == 0]

        def lacks(bookie):
            def answer(request):
                if not isinstance(request, m.ReadRequest):
                    return None
                whole = bookie.read(request)
                results = [
                    m.EntryResult(status) if request.first_entry + n in lacking else result
                    for n, result in enumerate(whole.results)
                ]
                return m.ReadResponse(Status.OK, results, whole.last_add_confirmed)

            return answer

        reader = await ledgers.open(writer.ledger_id, recover=False)
        first = reader.record.fragments[0].ensemble[(writer.ledger_id + 1) % 3]
        cluster.bookies[first].override = lacks(cluster.bookies[first])
        assert await collect(reader, 0, 89) == list(range(90))
        assert [(r.first_entry, r.last_entry) for r in reads_of(cluster)] == [(0, 89), (0, 81)]

    test()


@simulated
async def test_suspects_are_asked_last():
    cluster, ledgers = await cluster_of(3, read_request_bytes=400, read_ahead_bytes=1600)
    writer = await written(ledgers, 100)
    reader = await ledgers.open(writer.ledger_id, recover=False)
    reader._cluster.bookies.quarantine.failed("b")
    assert await collect(reader, 0, 99) == list(range(100))
    assert reads_of(cluster, "b") == []
    cluster.bookies["a"].refusing = cluster.bookies["c"].refusing = True
    assert await collect(reader, 0, 99) == list(range(100))


@simulated
async def test_a_read_that_is_given_up_leaves_no_question_open():
    cluster, ledgers = await cluster_of(3, read_request_bytes=400, read_ahead_bytes=1600)
    writer = await written(ledgers, 100)
    for bookie in cluster.bookies.values():
        bookie.delay_s = 2.0
    most = watch_bytes(cluster)
    reader = await ledgers.open(writer.ledger_id, recover=False)
    reading = asyncio.ensure_future(collect(reader, 0, 99))
    await asyncio.sleep(1)
    asked = len(reads_of(cluster))
    reading.cancel()
    await asyncio.gather(reading, return_exceptions=True)
    await asyncio.sleep(0.1)
    assert max(most) > 0
    assert [task for task in asyncio.all_tasks() if "RangeFetch" in repr(task)] == []
    await asyncio.sleep(10)
    assert len(reads_of(cluster)) == asked


# -- how far it may read ------------------------------------------------------------------------


@simulated
async def test_an_old_handle_reads_what_recovery_found_though_its_session_lags():
    cluster, ledgers = await cluster_of(6)
    writer = await written(ledgers, 10, close=False)
    other = await cluster.client("other")
    reader = await other.open(writer.ledger_id, recover=False)
    assert await reader.refresh_last_add_confirmed() < 9
    cluster.store.faults.lag_s = 3.0
    closed = await ledgers.recover(writer.ledger_id)
    assert closed.record.last_entry == 9
    assert await collect(reader, 0, 9) == list(range(10))
    assert reader.is_closed


@simulated
async def test_an_old_handle_reads_what_recovery_wrote_elsewhere():
    cluster, ledgers = await cluster_of(6)
    writer = await written(ledgers, 10, close=False)
    other = await cluster.client("other")
    reader = await other.open(writer.ledger_id, recover=False)
    old = writer.record.last_fragment.ensemble
    gone = cluster.bookies[old[0]]
    gone.refusing = True
    await ledgers.recover(writer.ledger_id)
    for name in old[1:]:
        if not cluster.bookies[name].refusing:
            del cluster.bookies[name].entries[writer.ledger_id, 9]
    assert await collect(reader, 0, 9) == list(range(10))


@simulated
async def test_entries_that_moved_are_found_though_the_session_lags():
    cluster, ledgers = await cluster_of(6)
    writer = await written(ledgers, 5, close=False)
    other = await cluster.client("other")
    reader = await other.open(writer.ledger_id, recover=False)
    cluster.store.faults.lag_s = 30.0
    for name in writer.record.last_fragment.ensemble:
        cluster.bookies[name].refusing = True
    await asyncio.gather(*(writer.append(bytes([n])) for n in range(5, 10)))
    for name in reader.record.last_fragment.ensemble:
        cluster.bookies[name].refusing = False
    assert await collect(reader, 0, 9, known_confirmed=9) == list(range(10))


@simulated
async def test_a_record_older_than_the_one_known_is_not_taken():
    cluster, ledgers = await cluster_of(3)
    writer = await written(ledgers, 5, close=False)
    other = await cluster.client("other")
    await other.record(writer.ledger_id)
    cluster.store.faults.lag_s = 30.0
    await writer.close()
    newest = await ledgers.record(writer.ledger_id, fresh=True)
    old = await other.record(writer.ledger_id)
    assert old.version < newest.version  # what this session would say
    reader = LedgerReader(other._cluster, newest, derive(b""))
    await reader._view.reread()
    assert (reader.version, reader.is_closed) == (newest.version, True)


@simulated
async def test_a_ledger_closed_before_what_was_confirmed_is_data_loss_said_aloud():
    cluster, ledgers = await cluster_of(3)
    writer = await written(ledgers, 10, close=False)
    await writer.append(b"\x0a")
    reader = await ledgers.open(writer.ledger_id, recover=False)
    assert await reader.refresh_last_add_confirmed() == 9
    for bookie in cluster.bookies.values():
        bookie.lac.clear()
        for entry in range(5, 11):
            bookie.entries.pop((writer.ledger_id, entry), None)
    await ledgers.recover(writer.ledger_id)
    with pytest.raises(errors.RowsLost, match="closed at entry 4"):
        await reader.refresh_last_add_confirmed()
    assert reader.last_add_confirmed == 9


@simulated
async def test_without_the_metadata_store_an_open_ledger_is_read_on():
    cluster, ledgers = await cluster_of(3)
    writer = await written(ledgers, 10, close=False)
    other = await cluster.client("other")
    reader = await other.open(writer.ledger_id, recover=False)
    other.metadata.suspend(60.0)
    await writer.append(b"\x0a")
    assert await reader.refresh_last_add_confirmed() == 9
    assert await collect(reader, 0, 9) == list(range(10))


@simulated
async def test_the_last_add_confirmed_is_not_waited_for_where_nobody_answered_lately():
    cluster, ledgers = await cluster_of(3)
    writer = await written(ledgers, 10, sizes=(3, 3, 1), close=False)
    reader = await ledgers.open(writer.ledger_id, recover=False)
    cluster.bookies["a"].silent = True
    await reader.refresh_last_add_confirmed()  # Qa = 1: nobody can be left out, the first time
    began = current().time()
    await reader.refresh_last_add_confirmed()
    assert current().time() - began < 0.1


@simulated
async def test_ranges_up_to_the_last_id_there_is_cost_what_is_there():
    cluster, ledgers = await cluster_of(3)
    writer = await written(ledgers, 10, close=False)
    reader = await ledgers.open(writer.ledger_id, recover=False)
    last = 2**63 - 1
    with pytest.raises(errors.NoSuchEntry):
        await collect(reader, 0, last)
    found = []
    with pytest.raises(errors.DataUnavailable):
        async for entry_id, _ in reader.read(0, last, known_confirmed=last):
            found.append(entry_id)
    assert found == list(range(10))
    assert max(r.last_entry for r in reads_of(cluster)) < 20_000
    with pytest.raises(errors.DataUnavailable):
        await collect(reader, last - 1, last, known_confirmed=last)
    assert max(r.last_entry for r in reads_of(cluster)) == last


# -- the rest of a ledger's life ----------------------------------------------------------------


@simulated
async def test_a_deleted_ledger_is_gone_and_deleting_again_is_no_error():
    _, ledgers = await cluster_of(3)
    writer = await written(ledgers, 1, close=False)
    with pytest.raises(errors.LedgerError, match="not CLOSED"):
        await ledgers.delete(writer.ledger_id)
    await writer.close()
    await ledgers.delete(writer.ledger_id)
    await ledgers.delete(writer.ledger_id)
    with pytest.raises(errors.NoSuchLedger):
        await ledgers.open(writer.ledger_id, recover=True)


@simulated
async def test_all_ledgers_are_listed_in_order_of_their_ids():
    _, ledgers = await cluster_of(3)
    assert [ledger_id async for ledger_id in ledgers.list()] == []
    for ledger_id in (12345678901, 7, 2**63 - 1):
        await ledgers.create(3, 3, 2, ledger_id=ledger_id)
    assert [ledger_id async for ledger_id in ledgers.list()] == [7, 12345678901, 2**63 - 1]


@simulated
async def test_ids_are_never_handed_out_twice_not_even_with_lost_answers():
    cluster, ledgers = await cluster_of(3)
    other = await cluster.client("other")
    cluster.store.faults.unknown = 0.4
    blocks = await asyncio.gather(*(s.allocate_ids(3) for s in (ledgers, other) for _ in range(20)))
    given = [ledger_id for block in blocks for ledger_id in block]
    assert len(set(given)) == len(given) == 120


@simulated
async def test_a_create_whose_answer_was_lost_is_one_ledger():
    cluster, ledgers = await cluster_of(3)
    cluster.store.faults.unknown = 0.6
    writers = [await ledgers.create(3, 3, 2) for _ in range(10)]
    cluster.store.calm()
    assert [i async for i in ledgers.list()] == sorted(w.ledger_id for w in writers)


@simulated
async def test_an_id_that_is_taken_is_refused():
    _, ledgers = await cluster_of(3)
    await ledgers.create(3, 3, 2, ledger_id=5)
    with pytest.raises(errors.LedgerError, match="taken"):
        await ledgers.create(3, 3, 2, ledger_id=5)


@simulated
async def test_the_directory_follows_registrations_and_keeps_addresses():
    cluster, _ = await cluster_of(2)
    directory = BookieDirectory(cluster.store.session("another"))
    await directory.start()
    told = []
    directory.add_listener(lambda: told.append([b.id for b in directory.writable()]))
    await cluster.register("c")
    await asyncio.sleep(1)
    await cluster.deregister("a")
    await asyncio.sleep(1)
    assert told[-1] == ["b", "c"]
    assert directory.address("a") == "a:1"
    assert await directory.find("nobody") is None
    await directory.close()
