"""Following a ledger that is written: woken by every kind of news, ended by nothing but its end."""

import asyncio

import pytest

from bookie_server.api import messages as m
from bookie_server.api.status import Status
from spark_ledger import errors
from spark_ledger.metadata import paths
from tests.simulation.loop import current
from tests.unit.spark_ledger.ledger.fakes import cluster_of, simulated
from tests.unit.spark_ledger.ledger.tails import append, ended_within, payload, waiting, written


async def read_elsewhere(**settings):
    """Five entries of an open ledger, and a reader of it in another client."""
    cluster, ledgers = await cluster_of(3, **settings)
    writer = await written(ledgers, 5)
    other = await cluster.client("reader")
    return cluster, ledgers, writer, other, await other.open(writer.ledger_id, recover=False)


async def collect(reader, first=0):
    found = []
    async for entry_id, entry in reader.tail(first):
        assert bytes(entry.payload) == payload(entry_id)
        found.append(entry_id)
    return found


def following(reader, first=0):
    return asyncio.ensure_future(collect(reader, first))


def questions(cluster):
    return [
        r for b in cluster.bookies.values() for r in b.requests if isinstance(r, m.ReadLacRequest)
    ]


# -- the stream ---------------------------------------------------------------------------------


@pytest.mark.parametrize("sizes", [(1, 1, 1), (3, 3, 2), (3, 2, 2), (5, 2, 1)], ids=str)
def test_a_ledger_being_written_is_followed_to_its_close_every_entry_once_in_order(sizes):
    @simulated
    async def test():
        cluster, ledgers = await cluster_of(5, read_request_bytes=400, read_ahead_bytes=1600)
        writer = await written(ledgers, 30, sizes)
        reader = await (await cluster.client("reader")).open(writer.ledger_id, recover=False)
        tail = following(reader)
        for n in range(30, 90, 3):
            await append(writer, n, n + 3)
            await asyncio.sleep(0.3 if n % 2 else 0.0)
        assert not tail.done()
        await writer.close()
        assert await ended_within(tail, 1) == list(range(90))
        assert reader.is_closed
        assert waiting(cluster) == 0

    test()


@simulated
async def test_a_tail_begins_where_it_is_told_to():
    _, ledgers = await cluster_of(3)
    writer = await written(ledgers, 10)
    reader = await ledgers.open(writer.ledger_id, recover=False)
    for first in (4, 9, 12):
        tail = following(reader, first)
        await asyncio.sleep(1)
        assert not tail.done()
        tail.cancel()
    tail = following(reader, 12)
    await append(writer, 10, 14)
    await writer.close()
    assert await ended_within(tail, 1) == [12, 13]
    assert await collect(reader, 14) == []
    with pytest.raises(ValueError, match="start at 0"):
        reader.tail(-1)


@simulated
async def test_each_entry_is_seen_soon_after_it_was_acknowledged():
    cluster, ledgers = await cluster_of(3, explicit_lac_s=0.1)
    writer = await written(ledgers, 0)
    reader = await ledgers.open(writer.ledger_id, recover=False)
    tail, late = reader.tail(), []
    for n in range(20):
        seen = asyncio.ensure_future(anext(tail))
        await asyncio.sleep(7.3 if n % 5 == 0 else 0.4)
        assert not seen.done()
        acked = current().time()
        await writer.append(payload(n))
        assert (await seen)[0] == n
        late.append(current().time() - acked)
    assert max(late) < 0.2  # the next add, or the explicit LAC
    await tail.aclose()
    await asyncio.sleep(0.1)
    assert waiting(cluster) == 0


@simulated
async def test_a_wiped_bookie_that_never_heard_of_anything_ends_no_stream():
    cluster, ledgers = await cluster_of(3)
    writer = await written(ledgers, 10, (3, 3, 2))
    await asyncio.sleep(1)
    for bookie in cluster.bookies.values():
        bookie.lac.clear()  # all of them: a last add confirmed of -1 from everybody
    reader = await ledgers.open(writer.ledger_id, recover=False)
    tail = following(reader)
    await asyncio.sleep(100)
    assert not tail.done()
    assert reader.last_add_confirmed == -1
    await append(writer, 10, 11)
    await writer.close()
    assert await ended_within(tail, 6) == list(range(11))


@simulated
async def test_the_end_that_recovery_found_ends_the_tail():
    cluster, ledgers = await cluster_of(3, explicit_lac_s=100)
    writer = await written(ledgers, 10)
    reader = await (await cluster.client("reader")).open(writer.ledger_id, recover=False)
    tail = following(reader)
    await asyncio.sleep(2)
    await ledgers.recover(writer.ledger_id)
    assert await ended_within(tail, 1) == list(range(10))


@simulated
async def test_a_tail_goes_over_ensemble_changes():
    cluster, ledgers = await cluster_of(6)
    writer = await written(ledgers, 5)
    reader = await (await cluster.client("reader")).open(writer.ledger_id, recover=False)
    tail = following(reader)
    await asyncio.sleep(1)
    for name in writer.record.last_fragment.ensemble[:2]:
        cluster.bookies[name].refusing = True
    await append(writer, 5, 20)
    await asyncio.sleep(1)
    await append(writer, 20, 25)
    await writer.close()
    assert await ended_within(tail, 1) == list(range(25))
    assert len(reader.record.fragments) > 1


# -- what wakes it ------------------------------------------------------------------------------


@simulated
async def test_all_members_are_asked_at_once_for_news_may_come_to_any_write_set():
    cluster, ledgers = await cluster_of(4)
    writer = await written(ledgers, 0, (4, 2, 2))
    reader = await ledgers.open(writer.ledger_id, recover=False)
    for slot in range(4):
        tail = asyncio.ensure_future(reader.wait_beyond(slot - 1, 60))
        await asyncio.sleep(0.5)
        assert waiting(cluster) == 4
        await writer.append(payload(slot))
        bookie = cluster.bookies[writer.record.last_fragment.ensemble[slot]]
        for other in cluster.bookies.values():
            other.lac.clear()
        bookie.answer(m.WriteLacRequest(bookie.name, writer.ledger_id, slot))
        assert await ended_within(tail, 0.1) == slot


@simulated
async def test_a_hung_bookie_keeps_no_news_from_anybody():
    cluster, ledgers = await cluster_of(3)
    writer = await written(ledgers, 5)
    reader = await ledgers.open(writer.ledger_id, recover=False)
    cluster.bookies["a"].silent = True
    tail = following(reader)
    await asyncio.sleep(3)
    await append(writer, 5, 10)
    seen = await asyncio.wait_for(reader.wait_beyond(8, 60), 6)
    assert seen == 9
    await writer.close()
    assert await ended_within(tail, 6) == list(range(10))


@simulated
async def test_the_close_is_seen_though_the_watch_was_missed():
    _, _, writer, other, reader = await read_elsewhere(long_poll_s=5.0)
    tail = following(reader)
    await asyncio.sleep(3)
    other.metadata.data_watches.clear()
    await writer.close()
    assert await ended_within(tail, 5.1) == list(range(5))


@simulated
async def test_a_fence_makes_it_look_at_the_record_and_a_stuck_recovery_does_not_keep_it_busy():
    cluster, ledgers = await cluster_of(3)
    writer = await written(ledgers, 5)
    await asyncio.sleep(1)
    other = await cluster.client("reader")
    reader = await other.open(writer.ledger_id, recover=False)
    tail = following(reader)
    await asyncio.sleep(1)
    other.metadata.data_watches.clear()
    for bookie in cluster.bookies.values():
        fence = m.ReadLacRequest(bookie.name, writer.ledger_id, True)
        bookie.answer(fence)
    asked = len(questions(cluster))
    await asyncio.sleep(60)
    assert len(questions(cluster)) - asked < 60 * 4  # one a second of each
    assert not tail.done()
    await ledgers.recover(writer.ledger_id)
    assert await ended_within(tail, 2) == list(range(5))


@simulated
async def test_a_fence_leads_to_the_end_that_recovery_found_though_the_watch_was_missed():
    cluster, ledgers, writer, other, reader = await read_elsewhere(long_poll_s=50.0)
    tail = following(reader)
    await asyncio.sleep(1)
    other.metadata.data_watches.clear()
    cluster.store.faults.lag_s = 20.0
    await ledgers.recover(writer.ledger_id)
    assert await ended_within(tail, 2) == list(range(5))


@simulated
async def test_who_begins_to_wait_while_another_reads_the_record_hears_of_it_too():
    cluster, ledgers = await cluster_of(3, long_poll_s=50.0)
    writer = await written(ledgers, 5)
    reader = await (await cluster.client("reader")).open(writer.ledger_id, recover=False)
    await writer.close()
    cluster.store.faults.delay_s = (0.2, 0.2)
    first = following(reader, 5)
    await asyncio.sleep(0.1)
    second = following(reader, 5)
    assert await ended_within(first, 1) == await ended_within(second, 1) == []


@simulated
async def test_two_who_wait_on_one_reader_both_hear_of_the_end():
    cluster, ledgers = await cluster_of(3)
    writer = await written(ledgers, 5)
    reader = await (await cluster.client("reader")).open(writer.ledger_id, recover=False)
    tails = [following(reader) for _ in range(3)]
    await asyncio.sleep(7)
    await writer.close()
    for tail in tails:
        assert await ended_within(tail, 0.5) == list(range(5))


@simulated
async def test_the_end_is_heard_of_though_entries_come_while_the_record_is_read():
    cluster, ledgers = await cluster_of(3, long_poll_s=50.0)
    writer = await written(ledgers, 5, announce=False)
    other = await cluster.client("reader")
    reader = await other.open(writer.ledger_id, recover=False)
    tail = following(reader)
    await asyncio.sleep(1)
    await writer.close()  # the last entry is not told by any bookie yet
    cluster.store.faults.delay_s = (0.2, 0.2)
    await asyncio.sleep(0.1)
    for bookie in cluster.bookies.values():
        bookie.answer(m.WriteLacRequest(bookie.name, writer.ledger_id, 4))
    assert await ended_within(tail, 2) == list(range(5))


# -- trouble ------------------------------------------------------------------------------------


@simulated
async def test_without_the_metadata_store_a_tail_goes_on():
    _, _, writer, other, reader = await read_elsewhere()
    tail = reader.tail()
    assert [(await anext(tail))[0] for _ in range(5)] == list(range(5))
    other.metadata.suspend(120.0)
    for n in range(5, 10):
        await asyncio.sleep(4)
        await append(writer, n, n + 1)
        assert (await asyncio.wait_for(anext(tail), 2))[0] == n
    await writer.close()
    with pytest.raises(StopAsyncIteration):
        await asyncio.wait_for(anext(tail), 200)


@simulated
async def test_when_no_bookie_answers_for_long_the_error_names_them_and_the_tail_can_go_on():
    cluster, ledgers = await cluster_of(3)
    writer = await written(ledgers, 5)
    await asyncio.sleep(1)
    reader = await ledgers.open(writer.ledger_id, recover=False)
    tail = following(reader)
    await asyncio.sleep(1)
    for bookie in cluster.bookies.values():
        bookie.refusing = True
    with pytest.raises(errors.DataUnavailable, match=r"a .*connection refused.*b .*c ") as caught:
        await asyncio.wait_for(tail, 60)
    assert caught.value.facts["ledger_id"] == writer.ledger_id
    for bookie in cluster.bookies.values():
        bookie.refusing = False
    tail = following(reader, 5)
    await writer.close()
    assert await ended_within(tail, 6) == []


@simulated
async def test_a_time_out_around_one_entry_is_no_end_of_a_tail():
    cluster, ledgers = await cluster_of(3)
    writer = await written(ledgers, 1)
    reader = await (await cluster.client("reader")).open(writer.ledger_id, recover=False)
    tail = reader.tail()
    assert (await anext(tail))[0] == 0
    for _ in range(3):
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(anext(tail), 1)
    assert waiting(cluster) == 0
    await append(writer, 1, 3)
    assert [(await asyncio.wait_for(anext(tail), 1))[0] for _ in range(2)] == [1, 2]
    await writer.close()
    for _ in range(2):
        with pytest.raises(StopAsyncIteration):
            await anext(tail)


@simulated
async def test_an_error_is_no_end_of_a_tail_but_being_closed_is():
    cluster, ledgers = await cluster_of(3)
    writer = await written(ledgers, 1, announce=False)
    reader = await ledgers.open(writer.ledger_id, recover=False)
    for bookie in cluster.bookies.values():
        bookie.refusing = True
    tail = reader.tail()
    for _ in range(2):
        with pytest.raises(errors.DataUnavailable):
            await anext(tail)
    for bookie in cluster.bookies.values():
        bookie.refusing = False
    await writer.close()
    assert (await anext(tail))[0] == 0
    tail = reader.tail()
    await tail.aclose()
    with pytest.raises(StopAsyncIteration):
        await anext(tail)


@simulated
async def test_bookies_that_restart_are_no_end_of_a_tail():
    cluster, ledgers = await cluster_of(3)
    writer = await written(ledgers, 5)
    reader = await ledgers.open(writer.ledger_id, recover=False)
    tail = following(reader)
    await asyncio.sleep(1)
    for bookie in cluster.bookies.values():
        bookie.refusing = True
    await asyncio.sleep(4)
    for bookie in cluster.bookies.values():
        bookie.refusing = False
    await asyncio.sleep(1)
    await append(writer, 5, 9)
    await writer.close()
    assert await ended_within(tail, 2) == list(range(9))


@simulated
async def test_a_deleted_ledger_is_told_from_one_that_ended():
    cluster, ledgers = await cluster_of(3)
    writer = await written(ledgers, 5)
    reader = await (await cluster.client("reader")).open(writer.ledger_id, recover=False)
    tail = following(reader)
    await asyncio.sleep(1)
    await cluster.admin.delete(paths.ledger(writer.ledger_id))
    with pytest.raises(errors.NoSuchLedger):
        await asyncio.wait_for(tail, 6)
    assert waiting(cluster) == 0


@simulated
async def test_bookies_that_call_it_deleted_are_believed_once_the_record_is_gone():
    cluster, _, writer, other, reader = await read_elsewhere(long_poll_s=50.0)
    tail = following(reader)
    await asyncio.sleep(1)
    other.metadata.data_watches.clear()
    for bookie in cluster.bookies.values():
        bookie.override = lambda request: m.ReadLacResponse(Status.LEDGER_DELETED)
        bookie.fenced[writer.ledger_id] = True  # whoever waits is woken
        bookie.answer(m.ReadLacRequest(bookie.name, writer.ledger_id))
    await asyncio.sleep(5)
    assert not tail.done()
    other.metadata.data_watches.clear()
    await cluster.admin.delete(paths.ledger(writer.ledger_id))
    with pytest.raises(errors.NoSuchLedger):
        await asyncio.wait_for(tail, 2)


@simulated
async def test_a_wrong_password_is_said_and_one_bookie_alone_does_not_make_it_wrong():
    cluster, ledgers = await cluster_of(3)
    writer = await written(ledgers, 5)
    reader = await ledgers.open(writer.ledger_id, recover=False)

    def refuse(request):
        return m.ReadLacResponse(Status.UNAUTHORIZED)

    cluster.bookies["a"].override = refuse
    waited = asyncio.ensure_future(reader.wait_beyond(100, 3))
    assert await ended_within(waited, 3) == 4
    assert await reader.refresh_last_add_confirmed() == 4
    cluster.bookies["b"].refusing = cluster.bookies["c"].refusing = True
    with pytest.raises(errors.DataUnavailable):
        await reader.refresh_last_add_confirmed()
    cluster.bookies["b"].refusing = cluster.bookies["c"].refusing = False
    cluster.bookies["b"].override = refuse
    with pytest.raises(errors.Unauthorized, match="password"):
        await reader.wait_beyond(100, 3)
    with pytest.raises(errors.Unauthorized, match="password"):
        cluster.bookies["c"].override = refuse
        await reader.refresh_last_add_confirmed()


@simulated
async def test_a_ledger_closed_before_what_was_confirmed_is_data_loss_and_no_end():
    cluster, ledgers = await cluster_of(3)
    writer = await written(ledgers, 10)
    reader = await (await cluster.client("reader")).open(writer.ledger_id, recover=False)
    tail = following(reader)
    await asyncio.sleep(1)
    assert reader.last_add_confirmed == 9
    for bookie in cluster.bookies.values():
        bookie.lac.clear()
        for entry in range(5, 10):
            bookie.entries.pop((writer.ledger_id, entry), None)
    await ledgers.recover(writer.ledger_id)
    with pytest.raises(errors.RowsLost):
        await asyncio.wait_for(tail, 10)
