"""How a writer ends: drained, failed, given up, overtaken by a recovery; and what it announces."""

import asyncio

import pytest

from bookie_server.api import messages as m
from bookie_server.api.status import Status
from spark_ledger import errors
from spark_ledger.ledger import transitions
from spark_ledger.metadata.ledger_record import RecordState
from spark_ledger.metadata.store import OutcomeUnknown, StoreUnavailable
from tests.simulation.loop import current
from tests.unit.spark_ledger.ledger.fakes import cluster_of, failure_of, refuses, simulated


@simulated
async def test_close_waits_for_adds_on_their_way_however_slow():
    cluster, ledgers = await cluster_of(3)
    writer = await ledgers.create(3, 3, 2)
    for bookie in cluster.bookies.values():
        bookie.override = refuses(Status.BUSY, retry_after_ms=100)
    adds = [writer.append(b"x", 1) for _ in range(3)]
    closing = asyncio.ensure_future(writer.close())
    await asyncio.sleep(2)
    assert not closing.done()
    assert isinstance(await failure_of(writer.append(b"late")), errors.LedgerClosed)
    for bookie in cluster.bookies.values():
        bookie.override = None
    record = await closing
    assert [add.result() for add in adds] == [0, 1, 2]
    assert (record.last_entry, record.rows) == (2, 3)


@simulated
async def test_closes_at_the_same_time_write_the_record_once_and_return_the_same():
    _, ledgers = await cluster_of(3)
    writer = await ledgers.create(3, 3, 2)
    await writer.append(b"x")
    records = await asyncio.gather(*(writer.close() for _ in range(3)))
    assert records[0] is records[1] is records[2] is await writer.close()
    assert writer.version == 1


@simulated
async def test_close_after_a_failure_keeps_what_was_acknowledged_and_nothing_else():
    cluster, ledgers = await cluster_of(3)
    writer = await ledgers.create(3, 3, 2)
    assert await writer.append(b"four", 2) == 0
    for name in ("a", "b"):
        cluster.bookies[name].refusing = True
    assert isinstance(await failure_of(writer.append(b"lost")), errors.NotEnoughBookies)
    for bookie in cluster.bookies.values():
        bookie.refusing = False
    record = await writer.close()
    assert (record.last_entry, record.length_bytes, record.rows) == (0, 4, 2)
    reader = await ledgers.open(writer.ledger_id, recover=True)
    assert reader.last_add_confirmed == 0


@simulated
async def test_close_when_pending_adds_fail_ends_at_what_was_acknowledged_before_them():
    cluster, ledgers = await cluster_of(3, spare_grace_s=3)
    writer = await ledgers.create(3, 3, 2)
    await writer.append(b"0")
    for name in ("a", "b"):
        cluster.bookies[name].refusing = True
    pending = writer.append(b"1")
    record = await writer.close()
    assert isinstance(pending.exception(), errors.NotEnoughBookies)
    assert record.last_entry == 0


@simulated
async def test_close_that_cannot_reach_the_store_says_so_and_can_be_repeated():
    _, ledgers = await cluster_of(3)
    writer = await ledgers.create(3, 3, 2)
    await writer.append(b"0")
    plain = ledgers.metadata.set

    async def away(*_):
        raise StoreUnavailable("not sent")

    ledgers.metadata.set = away
    with pytest.raises(errors.Unavailable):
        await writer.close()
    ledgers.metadata.set = plain
    assert (await writer.close()).last_entry == 0


@pytest.mark.parametrize("applied", [True, False])
def test_close_with_a_lost_answer_of_the_store_closes_once(applied):
    @simulated
    async def test():
        _, ledgers = await cluster_of(3)
        writer = await ledgers.create(3, 3, 2)
        await writer.append(b"0")
        plain, lost = ledgers.metadata.set, []

        async def once(*arguments):
            if lost:
                return await plain(*arguments)
            lost.append(arguments)
            if applied:
                await plain(*arguments)
            raise OutcomeUnknown("the answer was lost")

        ledgers.metadata.set = once
        record = await writer.close()
        assert (record.state, record.last_entry) == (RecordState.CLOSED, 0)
        assert writer.version == 1

    test()


@simulated
async def test_close_that_meets_a_recovery_under_way_gives_up_and_adopts_its_result():
    """The recoverer died after IN_RECOVERY, or is busy: whoever ends it, the writer does not
    close at its own last add confirmed but at what recovery finds."""
    cluster, ledgers = await cluster_of(3)
    writer = await ledgers.create(3, 3, 2)
    for _ in range(3):
        await writer.append(b"x", 1)
    other = await cluster.client("other", seed=1)
    known = await other.record(writer.ledger_id, fresh=True)
    await other.cluster.records.move(known, transitions.mark_in_recovery)
    record = await writer.close()
    assert (record.state, record.last_entry, record.rows) == (RecordState.CLOSED, 2, 3)
    assert all(bookie.fenced[writer.ledger_id] for bookie in cluster.bookies.values())
    assert (await other.recover(writer.ledger_id)).record == record


@simulated
async def test_close_adopts_an_end_beyond_its_own_for_a_failed_add_may_have_been_stored():
    cluster, ledgers = await cluster_of(3)
    writer = await ledgers.create(3, 3, 2)
    await writer.append(b"0")
    plain = {name: bookie.handle for name, bookie in cluster.bookies.items()}
    for name, bookie in cluster.bookies.items():

        async def store_and_say_nothing(request, timeout_s, name=name):
            answer = await plain[name](request, timeout_s)
            if isinstance(request, m.AddRequest):
                await asyncio.sleep(1e9)
            return answer

        bookie.handle = store_and_say_nothing
    pending = writer.append(b"1")
    await asyncio.sleep(0.1)
    other = await cluster.client("other", seed=1)
    for name, bookie in cluster.bookies.items():
        bookie.handle = plain[name]
    recovered = (await other.recover(writer.ledger_id)).record
    assert recovered.last_entry == 1
    writer.abandon(errors.TimedOut("too late"))
    assert isinstance(await failure_of(pending), errors.TimedOut)
    assert await writer.close() == recovered


@simulated
async def test_close_of_a_ledger_that_was_deleted_meanwhile_says_so():
    cluster, ledgers = await cluster_of(3)
    writer = await ledgers.create(3, 3, 2)
    await writer.append(b"0")
    other = await cluster.client("other", seed=1)
    await other.recover(writer.ledger_id)
    await other.delete(writer.ledger_id)
    with pytest.raises(errors.NoSuchLedger):
        await writer.close()


@simulated
async def test_close_does_not_wait_for_a_bookie_that_hangs_once_the_others_acknowledged():
    cluster, ledgers = await cluster_of(3)
    writer = await ledgers.create(3, 3, 2)
    cluster.bookies["a"].silent = True
    await writer.append(b"0")
    began = current().time()
    assert (await writer.close()).last_entry == 0
    assert current().time() - began < 1


@simulated
async def test_giving_up_fails_what_is_pending_and_leaves_the_ledger_open_for_recovery():
    cluster, ledgers = await cluster_of(3)
    writer = await ledgers.create(3, 3, 2)
    await writer.append(b"0")
    for bookie in cluster.bookies.values():
        bookie.silent = True
    pending = writer.append(b"1")
    writer.abandon()
    assert isinstance(await failure_of(pending), errors.LedgerClosed)
    assert (await ledgers.record(writer.ledger_id)).record.state is RecordState.OPEN


# -- the last add confirmed, announced --------------------------------------------------------


def announced(cluster, ledger_id):
    """The last adds confirmed written by themselves, in order, by bookie."""
    return {
        name: [
            request.last_add_confirmed
            for request in bookie.requests
            if isinstance(request, m.WriteLacRequest) and request.ledger_id == ledger_id
        ]
        for name, bookie in cluster.bookies.items()
    }


@simulated
async def test_it_is_announced_at_once_and_the_next_time_after_the_pause_of_the_settings():
    cluster, ledgers = await cluster_of(3, explicit_lac_s=2.0)
    writer = await ledgers.create(3, 3, 2, announce_lac=True)
    await writer.append(b"0")
    await asyncio.sleep(0.1)
    assert announced(cluster, writer.ledger_id) == {"a": [0], "b": [0], "c": [0]}
    await writer.append(b"1")
    await asyncio.sleep(1.9)
    assert announced(cluster, writer.ledger_id) == {"a": [0], "b": [0], "c": [0]}
    await asyncio.sleep(0.2)
    assert announced(cluster, writer.ledger_id) == {"a": [0, 1], "b": [0, 1], "c": [0, 1]}


@simulated
async def test_little_is_announced_while_adds_carry_it_and_nothing_by_a_ledger_that_nobody_tails():
    cluster, ledgers = await cluster_of(3, explicit_lac_s=1.0)
    tailed = await ledgers.create(3, 3, 2, announce_lac=True)
    plain = await ledgers.create(3, 3, 2)
    for _ in range(40):
        await asyncio.gather(tailed.append(b"x"), plain.append(b"x"))
        await asyncio.sleep(0.1)
    assert len(announced(cluster, tailed.ledger_id)["a"]) <= 4
    await asyncio.sleep(60)
    assert announced(cluster, tailed.ledger_id)["a"][-1] == 39
    assert not any(announced(cluster, plain.ledger_id).values())


@simulated
async def test_what_an_add_carries_is_announced_if_that_add_is_stuck():
    cluster, ledgers = await cluster_of(3, explicit_lac_s=0.5)
    writer = await ledgers.create(3, 3, 2, announce_lac=True)
    await writer.append(b"0")
    await writer.append(b"1")
    for bookie in cluster.bookies.values():
        bookie.override = refuses(Status.BUSY, retry_after_ms=100)
    writer.append(b"2")  # says in its header that entry 1 is confirmed
    await asyncio.sleep(0.4)
    assert announced(cluster, writer.ledger_id) == {"a": [0], "b": [0], "c": [0]}
    await asyncio.sleep(0.2)
    assert announced(cluster, writer.ledger_id) == {"a": [0, 1], "b": [0, 1], "c": [0, 1]}


@simulated
async def test_what_is_confirmed_is_announced_though_a_later_add_is_stuck():
    """The three adds left together and carry nothing; the last hangs until its slots change."""
    cluster, ledgers = await cluster_of(3)
    writer = await ledgers.create(3, 1, 1, announce_lac=True)
    stuck = writer.record.last_fragment.ensemble[2]
    cluster.bookies[stuck].silent = True
    adds = [writer.append(b"x") for _ in range(3)]
    await asyncio.gather(*adds[:2])
    await asyncio.sleep(1)
    assert not adds[2].done()
    owner = writer.record.last_fragment.ensemble[1]
    assert announced(cluster, writer.ledger_id)[owner] == [1]


@simulated
async def test_it_goes_to_the_write_set_of_its_entry_only():
    cluster, ledgers = await cluster_of(5)
    writer = await ledgers.create(5, 2, 2, announce_lac=True)
    await asyncio.gather(*(writer.append(b"x") for _ in range(4)))
    await asyncio.sleep(1)
    members = writer.record.last_fragment.ensemble
    told = announced(cluster, writer.ledger_id)
    assert [told[member] for member in members] == [[], [], [], [3], [3]]


@simulated
async def test_it_is_announced_again_until_an_ack_quorum_took_it_and_then_no_more():
    cluster, ledgers = await cluster_of(3)
    writer = await ledgers.create(3, 3, 2, announce_lac=True)

    def refuse(request):
        if isinstance(request, m.WriteLacRequest):
            return m.WriteLacResponse(Status.IO_ERROR)
        return None

    for name in ("a", "b"):
        cluster.bookies[name].override = refuse
    await writer.append(b"0")
    await asyncio.sleep(5)
    assert len(announced(cluster, writer.ledger_id)["a"]) >= 3
    cluster.bookies["a"].override = None
    await asyncio.sleep(2)
    told = len(announced(cluster, writer.ledger_id)["a"])
    await asyncio.sleep(60)
    assert len(announced(cluster, writer.ledger_id)["a"]) == told


@simulated
async def test_a_writer_that_ended_announces_nothing_more():
    cluster, ledgers = await cluster_of(3)
    closed = await ledgers.create(3, 3, 2, announce_lac=True)
    failed = await ledgers.create(3, 3, 2, announce_lac=True)
    given_up = await ledgers.create(3, 3, 2, announce_lac=True)
    for writer in (closed, failed, given_up):
        await writer.append(b"0")
        await writer.append(b"1")
    await closed.close()
    for bookie in cluster.bookies.values():
        bookie.override = refuses(Status.FENCED)
    assert isinstance(await failure_of(failed.append(b"2")), errors.LedgerFenced)
    given_up.abandon()
    await asyncio.sleep(60)
    for writer in (closed, failed, given_up):
        assert announced(cluster, writer.ledger_id) == {"a": [0], "b": [0], "c": [0]}
