"""Whom the reader asks for an entry, when it asks another, and how many bytes may be under way."""

import asyncio

import pytest

from bookie_server.api import messages as m
from bookie_server.api.status import Status
from tests.simulation.loop import current
from tests.unit.spark_ledger.ledger.fakes import cluster_of, simulated
from tests.unit.spark_ledger.ledger.reads import collect, reads_of, watch_bytes, written


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


@pytest.mark.parametrize("sizes", [(3, 3, 2), (4, 4, 2), (5, 3, 2), (5, 4, 2)], ids=str)
def test_all_but_one_replica_hung_cost_a_read_that_many_delays_within_the_bytes(sizes):
    @simulated
    async def test():
        cluster, ledgers = await cluster_of(
            sizes[0], read_request_bytes=400, read_ahead_bytes=2400, speculative_read_delay_s=0.3
        )
        writer = await written(ledgers, 200, sizes=sizes)
        reader = await ledgers.open(writer.ledger_id, recover=False)
        hung = reader.record.fragments[0].ensemble[1 : sizes[1]]
        for name in hung:
            cluster.bookies[name].silent = True
        most = watch_bytes(cluster)
        began = current().time()
        assert await collect(reader, 0, 199) == list(range(200))
        assert 0.3 <= current().time() - began < 0.3 * len(hung) * 2
        assert max(most) <= 2400

    test()


@simulated
async def test_the_bookie_that_hung_is_asked_again_after_a_while():
    cluster, ledgers = await cluster_of(3, read_request_bytes=400, read_ahead_bytes=1600)
    writer = await written(ledgers, 200)
    cluster.bookies["a"].silent = True
    reader = await ledgers.open(writer.ledger_id, recover=False)
    for _ in range(3):  # each bookie's turn
        await collect(reader, 0, 199)
    assert reads_of(cluster, "a")
    cluster.bookies["a"].silent = False
    cluster.bookies["a"].requests.clear()
    for _ in range(3):
        assert await collect(reader, 0, 199) == list(range(200))
    assert reads_of(cluster, "a") == []
    await asyncio.sleep(20)
    for _ in range(3):
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


@pytest.mark.parametrize(
    "status", [Status.NO_SUCH_ENTRY, Status.LIMBO, Status.LIMBO_TORN, Status.IO_ERROR]
)
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
    ledgers.cluster.bookies.quarantine.note_failure("b")
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
