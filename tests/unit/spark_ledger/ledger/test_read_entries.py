"""Entries that lie apart, read together: who is asked, in how many requests, and what comes."""

import random

import pytest

from bookie_server.api import messages as m
from bookie_server.api.messages import ids_in, spans_of
from bookie_server.api.status import Status
from spark_ledger import errors
from tests.simulation.loop import current
from tests.unit.spark_ledger.ledger.collecting import ENTRY, collect, into
from tests.unit.spark_ledger.ledger.fakes import cluster_of, simulated
from tests.unit.spark_ledger.ledger.reads import reads_of, watch_bytes, written

SIZES = [(1, 1, 1), (3, 3, 2), (3, 2, 2), (4, 2, 1), (5, 3, 2)]


def asked(request):
    return list(ids_in(request.spans, 1 << 20))


@pytest.mark.parametrize("sizes", SIZES, ids=str)
def test_what_is_read_together_is_what_is_read_one_by_one(sizes):
    @simulated
    async def test():
        cluster, ledgers = await cluster_of(5, read_request_bytes=400, read_ahead_bytes=2400)
        writer = await written(ledgers, 120, sizes=sizes)
        rng = random.Random(repr(sizes))
        most = watch_bytes(cluster)
        for count in (1, 2, 7, 40, 100, 120):
            ids = sorted(rng.sample(range(120), count))
            reader = await ledgers.open(writer.ledger_id, recover=False)
            assert await collect(reader, ids) == ids
        assert max(most) <= 2400

    test()


@simulated
async def test_of_a_range_with_steps_only_its_entries_are_read():
    _, ledgers = await cluster_of(3)
    writer = await written(ledgers, 20)
    reader = await ledgers.open(writer.ledger_id, recover=False)
    assert await collect(reader, range(1, 20, 3)) == [1, 4, 7, 10, 13, 16, 19]
    assert await collect(reader, range(3, 4, 2)) == [3]
    with pytest.raises(ValueError, match="rise"):
        await collect(reader, range(9, 0, -2))


@simulated
async def test_one_request_asks_for_as_many_entries_as_fit_it():
    cluster, ledgers = await cluster_of(3, read_request_bytes=5 * ENTRY, read_ahead_bytes=4000)
    writer = await written(ledgers, 100, close=False)
    reader = await ledgers.open(writer.ledger_id, recover=False)
    ids = list(range(1, 99, 3))
    assert await collect(reader, ids, entry_bytes=10, known_confirmed=99) == ids
    assert sorted(len(asked(r)) for r in reads_of(cluster)) == [3, *[5] * 6]
    assert sorted(e for r in reads_of(cluster) for e in asked(r)) == ids


@pytest.mark.parametrize("sizes", [(4, 2, 1), (5, 3, 2)], ids=str)
def test_where_entries_are_striped_each_bookie_is_asked_for_those_it_has(sizes):
    @simulated
    async def test():
        cluster, ledgers = await cluster_of(sizes[0])
        writer = await written(ledgers, 100, sizes=sizes)
        reader = await ledgers.open(writer.ledger_id, recover=False)
        ids = list(range(0, 100, 3))
        assert await collect(reader, ids) == ids
        for name, bookie in cluster.bookies.items():
            for request in reads_of(cluster, name):
                assert all((writer.ledger_id, e) in bookie.entries for e in asked(request))
        assert sorted(e for r in reads_of(cluster) for e in asked(r)) == ids

    test()


@pytest.mark.parametrize("status", [Status.IO_ERROR, Status.NO_SUCH_ENTRY, Status.LIMBO])
def test_what_one_replica_cannot_deliver_comes_from_the_next_and_only_that(status):
    @simulated
    async def test():
        cluster, ledgers = await cluster_of(3)
        writer = await written(ledgers, 60)
        reader = await ledgers.open(writer.ledger_id, recover=False)
        ensemble = reader.record.fragments[0].ensemble
        first = cluster.bookies[ensemble[(writer.ledger_id + 1) % 3]]

        def lacking(request):
            response = first.read(request)
            results = [
                m.EntryResult(status) if e in (21, 30) else result
                for e, result in zip(asked(request), response.results, strict=True)
            ]
            return response._replace(results=results)

        first.override = lacking
        ids = list(range(0, 60, 3))
        assert await collect(reader, ids) == ids
        assert [asked(r) for r in reads_of(cluster)] in ([ids, [21, 30]], [[21, 30], ids])

    test()


@pytest.mark.parametrize("down", [0, 1, 3])
def test_only_where_all_bookies_answer_is_the_remedy_for_damage_not_to_start_them(down):
    @simulated
    async def test():
        cluster, ledgers = await cluster_of(3)
        writer = await written(ledgers, 6)
        reader = await ledgers.open(writer.ledger_id, recover=False)
        bad = m.ReadResponse(Status.OK, [m.EntryResult(Status.IO_ERROR)], 5)
        for number, bookie in enumerate(cluster.bookies.values()):
            bookie.override, bookie.refusing = (lambda _: bad), number < down
        with pytest.raises(errors.DataUnavailable) as failed:
            await collect(reader, [3])
        assert ("restore their disks" in str(failed.value)) == (down == 0)
        assert ("Start the bookies named" in str(failed.value)) == (down > 0)

    test()


@simulated
async def test_a_bit_flipped_on_the_way_is_never_returned():
    cluster, ledgers = await cluster_of(3)
    writer = await written(ledgers, 60)
    for bookie in cluster.bookies.values():
        data = bytearray(bookie.entries[writer.ledger_id, 9])
        data[-1] ^= 1
        bookie.entries[writer.ledger_id, 9] = bytes(data)
    reader = await ledgers.open(writer.ledger_id, recover=False)
    found = []
    with pytest.raises(errors.DigestMismatch):
        await into(found, reader.read_entries([3, 6, 9, 12]))
    assert found == [3, 6]


@simulated
async def test_what_nobody_has_is_unavailable_and_what_comes_before_it_is_returned():
    cluster, ledgers = await cluster_of(3)
    writer = await written(ledgers, 60)
    for bookie in cluster.bookies.values():
        del bookie.entries[writer.ledger_id, 30]
    reader = await ledgers.open(writer.ledger_id, recover=False)
    found = []
    with pytest.raises(errors.DataUnavailable) as raised:
        await into(found, reader.read_entries([3, 20, 30, 33]))
    assert found == [3, 20]
    assert str(raised.value).count("NO_SUCH_ENTRY") == 3, "of each bookie, why"
    for bookie in cluster.bookies.values():
        bookie.entries[writer.ledger_id, 30] = bookie.entries[writer.ledger_id, 31]
    with pytest.raises(errors.DigestMismatch):
        await collect(reader, [30, 33])


@simulated
async def test_a_bookie_that_knows_of_no_spans_is_asked_for_each_in_turn():
    cluster, ledgers = await cluster_of(3)
    writer = await written(ledgers, 60)
    for bookie in cluster.bookies.values():
        bookie.override = lambda r, b=bookie: (
            b.read(r._replace(further=())) if isinstance(r, m.ReadRequest) else None
        )
    reader = await ledgers.open(writer.ledger_id, recover=False)
    ids = [0, 1, 5, 7, 8, 9, 40]
    assert await collect(reader, ids) == ids
    assert len(reads_of(cluster)) == len(spans_of(ids))


@simulated
async def test_a_request_never_spans_fragments():
    cluster, ledgers = await cluster_of(4)
    writer = await ledgers.create(3, 3, 2)
    for n in range(40):
        if n in (10, 25):
            name = writer.record.last_fragment.ensemble[0]
            cluster.bookies[name].refusing = True
        await writer.append(bytes([n]) * 10, 1)
        for bookie in cluster.bookies.values():
            bookie.refusing = False
    await writer.close()
    starts = [fragment.first_entry for fragment in writer.record.fragments]
    assert len(starts) > 1
    reader = await ledgers.open(writer.ledger_id, recover=False)
    ids = list(range(1, 40, 2))
    assert await collect(reader, ids) == ids
    for request in reads_of(cluster):
        spans = asked(request)
        assert not any(spans[0] < start <= spans[-1] for start in starts)


@simulated
async def test_a_bookie_that_hangs_costs_entries_apart_the_speculative_delay():
    cluster, ledgers = await cluster_of(3, read_request_bytes=400, read_ahead_bytes=2400)
    writer = await written(ledgers, 200)
    cluster.bookies["a"].silent = True
    reader = await ledgers.open(writer.ledger_id, recover=False)
    began = current().time()
    ids = list(range(0, 200, 2))
    assert await collect(reader, ids) == ids
    assert current().time() - began < 3 * 0.3


@simulated
async def test_after_a_read_that_failed_another_goes_on_after_what_it_returned():
    cluster, ledgers = await cluster_of(3, read_timeout_s=1.0)
    writer = await written(ledgers, 60)
    reader = await ledgers.open(writer.ledger_id, recover=False)
    runs, found = reader.read_entries([1, 5, 9, 50], entry_bytes=1 << 22), []
    found += [entry.header.entry_id for entry in await anext(runs)]
    assert found == [1]
    for bookie in cluster.bookies.values():
        bookie.refusing = True
    with pytest.raises(errors.DataUnavailable):
        await into(found, runs)
    for bookie in cluster.bookies.values():
        bookie.refusing = False
    assert found + await collect(reader, [1, 5, 9, 50][len(found) :]) == [1, 5, 9, 50]


@simulated
async def test_long_runs_among_entries_apart_are_streamed_and_come_in_their_place():
    cluster, ledgers = await cluster_of(3, read_request_bytes=400, read_ahead_bytes=1600)
    writer = await written(ledgers, 250)
    reader = await ledgers.open(writer.ledger_id, recover=False)
    begin, streams = ledgers.cluster.bookies.read_stream, []

    async def noted(bookie_id, ledger_id, first, last, **options):
        streams.append((first, last))
        return await begin(bookie_id, ledger_id, first, last, **options)

    ledgers.cluster.bookies.read_stream = noted
    ids = [0, 2, 4, *range(10, 100), 110, 120, *range(130, 200), 201]
    assert await collect(reader, ids) == ids
    assert streams == [(10, 99), (130, 199)]
    assert len(reads_of(cluster)) < 50


@simulated
async def test_ids_that_do_not_rise_or_are_not_confirmed_are_refused():
    _, ledgers = await cluster_of(3)
    writer = await written(ledgers, 10)
    reader = await ledgers.open(writer.ledger_id, recover=False)
    for wrong in ([3, 3], [4, 2], [-1, 5]):
        with pytest.raises(ValueError, match=r"rise|start at 0"):
            reader.read_entries(wrong)
    assert await collect(reader, []) == []
    with pytest.raises(errors.NoSuchEntry):
        await collect(reader, [3, 10])
