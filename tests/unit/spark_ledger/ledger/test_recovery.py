"""Recovery against scripted bookies: the tail's decisions, fencing, write-backs, rivals."""

import asyncio
import dataclasses

import pytest

from bookie_server.api import messages as m
from bookie_server.api.entry import EntryHeader, pack_header, payload_crc, unpack_entry
from bookie_server.api.status import Status
from spark_ledger import errors
from spark_ledger.metadata import ledger_record, paths
from spark_ledger.metadata.ledger_record import Fragment, RecordState
from tests.simulation.loop import current
from tests.unit.spark_ledger.ledger.fakes import (
    SilentFor,
    cluster_of,
    ledger_on,
    put,
    simulated,
)


def unknown(request):
    if isinstance(request, m.ReadRequest):
        return m.ReadResponse(Status.IO_ERROR)
    return None


@simulated
async def test_a_ledger_never_written_closes_at_minus_one():
    cluster, ledgers = await cluster_of(3)
    record = (await ledgers.recover(await ledger_on(cluster, ledgers))).record
    assert record.state is RecordState.CLOSED
    assert (record.last_entry, record.length_bytes, record.rows) == (-1, 0, 0)


@simulated
async def test_entries_beyond_the_last_add_confirmed_are_found_written_back_and_counted():
    cluster, ledgers = await cluster_of(3)
    ledger_id = await ledger_on(cluster, ledgers)
    put(cluster, ledger_id, 0, "abc")
    put(cluster, ledger_id, 1, "ab", lac=0)
    put(cluster, ledger_id, 2, "c", lac=0)
    record = (await ledgers.recover(ledger_id)).record
    assert (record.last_entry, record.length_bytes, record.rows) == (2, 6, 3)
    assert [cluster.holders(ledger_id, e) for e in range(3)] == [["a", "b", "c"]] * 3


@pytest.mark.parametrize("confirmed", [2**63 - 4, 2**63 - 2, 2**63 - 1])
@pytest.mark.parametrize("beyond", [0, 1])
def test_the_last_ids_there_are_can_be_recovered(confirmed, beyond):
    @simulated
    async def test():
        cluster, ledgers = await cluster_of(3)
        ledger_id = await ledger_on(cluster, ledgers)
        last = min(confirmed + beyond, 2**63 - 1)
        for entry_id in range(confirmed, last + 1):
            for bookie in cluster.bookies.values():
                header = EntryHeader(ledger_id, entry_id, confirmed - 1, 9, 9, 0, payload_crc([]))
                bookie.entries[ledger_id, entry_id] = pack_header(header)
                bookie.lac[ledger_id] = confirmed
        record = (await ledgers.recover(ledger_id)).record
        assert (record.last_entry, record.length_bytes, record.rows) == (last, 9, 9)

    test()


@simulated
async def test_the_length_comes_from_the_last_entry_itself_when_nothing_is_recovered():
    cluster, ledgers = await cluster_of(3)
    ledger_id = await ledger_on(cluster, ledgers)
    put(cluster, ledger_id, 0, "abc")
    cluster.bookies["a"].lac[ledger_id] = 0  # by an explicit LAC
    record = (await ledgers.recover(ledger_id)).record
    assert (record.last_entry, record.length_bytes, record.rows) == (0, 2, 1)


@simulated
async def test_an_empty_last_fragment_closes_below_its_first_entry_and_stays():
    cluster, ledgers = await cluster_of(4)
    fragments = (Fragment(0, ("a", "b", "c")), Fragment(2, ("a", "b", "d")))
    ledger_id = await ledger_on(cluster, ledgers)
    known = await ledgers.record(ledger_id, fresh=True)
    changed = dataclasses.replace(known.record, fragments=fragments)
    await cluster.admin.set(paths.ledger(ledger_id), ledger_record.encode(changed), known.version)
    put(cluster, ledger_id, 0, "abc")
    put(cluster, ledger_id, 1, "bc")
    record = (await ledgers.recover(ledger_id)).record
    assert (record.last_entry, record.length_bytes, record.rows) == (1, 4, 2)
    assert record.fragments == fragments
    reads = [r for r in cluster.bookies["a"].requests if isinstance(r, m.ReadRequest) and r.fence]
    assert all(read.first_entry >= 2 for read in reads)


@simulated
async def test_write_backs_carry_the_last_add_confirmed_of_when_recovery_began():
    cluster, ledgers = await cluster_of(3)
    ledger_id = await ledger_on(cluster, ledgers)
    put(cluster, ledger_id, 0, "abc")
    put(cluster, ledger_id, 1, "a", lac=0)
    put(cluster, ledger_id, 2, "a", lac=0)
    await ledgers.recover(ledger_id)
    headers = [unpack_entry(cluster.bookies["c"].entries[ledger_id, e]).header for e in (1, 2)]
    assert [header.last_add_confirmed for header in headers] == [0, 0]
    originals = [unpack_entry(cluster.bookies["a"].entries[ledger_id, e]).header for e in (1, 2)]
    assert [header.identity for header in headers] == [header.identity for header in originals]


@simulated
async def test_everything_asked_for_fences_and_every_add_is_a_recovery_add():
    cluster, ledgers = await cluster_of(3)
    ledger_id = await ledger_on(cluster, ledgers)
    put(cluster, ledger_id, 0, "a")
    await ledgers.recover(ledger_id)
    for bookie in cluster.bookies.values():
        for request in bookie.requests:
            if isinstance(request, m.AddRequest):
                assert all(add.recovery for add in request.adds)
            else:
                assert request.fence


@simulated
async def test_both_holders_silent_and_the_third_denying_is_given_up_and_stays_in_recovery():
    cluster, ledgers = await cluster_of(3)
    ledger_id = await ledger_on(cluster, ledgers)
    put(cluster, ledger_id, 0, "ab")
    for name in "ab":
        cluster.bookies[name].override = unknown
    with pytest.raises(errors.DataUnavailable, match="stays IN_RECOVERY"):
        await ledgers.recover(ledger_id)
    assert (await ledgers.record(ledger_id)).record.state is RecordState.IN_RECOVERY
    for name in "ab":
        cluster.bookies[name].override = None
    assert (await ledgers.recover(ledger_id)).record.last_entry == 0


@simulated
async def test_one_denial_and_two_silent_is_given_up_even_when_nobody_has_it():
    cluster, ledgers = await cluster_of(3)
    ledger_id = await ledger_on(cluster, ledgers)
    for name in "ab":
        cluster.bookies[name].override = unknown
    with pytest.raises(errors.DataUnavailable):
        await ledgers.recover(ledger_id)


@simulated
async def test_a_fence_that_two_of_three_do_not_answer_is_given_up_naming_them():
    cluster, ledgers = await cluster_of(3)
    ledger_id = await ledger_on(cluster, ledgers)
    for name in "ac":
        cluster.bookies[name].refusing = True
    with pytest.raises(errors.DataUnavailable, match=r"a \(a:1\).*c \(c:1\)"):
        await ledgers.recover(ledger_id)


@simulated
async def test_a_silent_bookie_blocks_recovery_for_a_moment_only():
    cluster, ledgers = await cluster_of(3)
    ledger_id = await ledger_on(cluster, ledgers)
    put(cluster, ledger_id, 0, "ab")
    cluster.bookies["c"].silent = True
    began = current().time()
    assert (await ledgers.recover(ledger_id)).record.last_entry == 0
    assert current().time() - began < 8


@simulated
async def test_a_damaged_copy_is_unknown_and_not_a_denial():
    cluster, ledgers = await cluster_of(3)
    ledger_id = await ledger_on(cluster, ledgers)
    put(cluster, ledger_id, 0, "abc")
    for name in "bc":
        data = cluster.bookies[name].entries[ledger_id, 0]
        cluster.bookies[name].entries[ledger_id, 0] = data[:-1] + b"!"
    assert (await ledgers.recover(ledger_id)).record.last_entry == 0


@simulated
async def test_a_failing_write_back_changes_the_ensemble_in_the_closing_write_only():
    cluster, ledgers = await cluster_of(5)
    ledger_id = await ledger_on(cluster, ledgers)
    put(cluster, ledger_id, 0, "ab")

    def no_adds(request):
        if isinstance(request, m.AddRequest):
            return m.AddResponse([m.AddResult(Status.IO_ERROR) for _ in request.adds])
        return None

    for name in "bc":
        cluster.bookies[name].override = no_adds
    record = (await ledgers.recover(ledger_id)).record
    assert [fragment.first_entry for fragment in record.fragments] == [0]
    assert sorted(record.fragments[0].ensemble) == ["a", "d", "e"]
    writes = [
        ledger_record.decode(change.after.value)
        for commit in cluster.store.log
        for change in commit.changes
        if change.path == paths.ledger(ledger_id) and change.after is not None
    ]
    in_recovery = [r for r in writes if r.state is RecordState.IN_RECOVERY]
    assert [r.last_fragment.ensemble for r in in_recovery] == [("a", "b", "c")]


@simulated
async def test_a_long_tail_is_recovered_whole_across_windows_and_byte_limits():
    cluster, ledgers = await cluster_of(3, read_request_bytes=2000, inflight_bytes=3000)
    ledger_id = await ledger_on(cluster, ledgers)
    for entry in range(700):
        put(cluster, ledger_id, entry, ("ab", "bc", "ca", "abc")[entry % 4])
    record = (await ledgers.recover(ledger_id)).record
    assert (record.last_entry, record.rows) == (699, 700)
    # what a later window writes back does not know of what an earlier one has confirmed: a next
    # recovery begins after the highest last add confirmed that it hears of
    copies = [unpack_entry(cluster.bookies["c"].entries[ledger_id, e]) for e in range(0, 700, 4)]
    assert {copy.header.last_add_confirmed for copy in copies} == {-1}
    reader = await ledgers.open(ledger_id, recover=False)
    assert [e async for e, _ in reader.read(0, 699)] == list(range(700))


@simulated
async def test_a_striped_tail_is_decided_by_each_entrys_own_write_set():
    cluster, ledgers = await cluster_of(4)
    ledger_id = await ledger_on(cluster, ledgers, sizes=(4, 2, 2))
    put(cluster, ledger_id, 0, "ab")
    put(cluster, ledger_id, 1, "c")
    put(cluster, ledger_id, 2, "d")
    record = (await ledgers.recover(ledger_id)).record
    # with Qa = Qw one denial proves that the entry was never acknowledged; a holder may be late
    assert record.last_entry in (0, 1, 2)
    for entry in range(record.last_entry + 1):
        expected = {"abcd"[entry % 4], "abcd"[(entry + 1) % 4]}
        assert expected <= set(cluster.holders(ledger_id, entry))


@simulated
async def test_recoverers_at_the_same_time_find_the_same_end():
    cluster, ledgers = await cluster_of(4)
    others = [await cluster.client(f"other {n}", seed=n) for n in range(3)]
    ledger_id = await ledger_on(cluster, ledgers)
    put(cluster, ledger_id, 0, "abc")
    put(cluster, ledger_id, 1, "b")
    found = await asyncio.gather(*(each.recover(ledger_id) for each in (ledgers, *others)))
    assert len({ledger_record.encode(known.record) for known in found}) == 1


@simulated
async def test_recovery_against_a_live_writer_keeps_all_it_acknowledged():
    cluster, ledgers = await cluster_of(3)
    other = await cluster.client("other", seed=1)
    writer = await ledgers.create(3, 3, 2)
    adds = [writer.append(b"x%d" % n) for n in range(50)]
    await asyncio.sleep(0.003)
    record = (await other.recover(writer.ledger_id)).record
    results = await asyncio.gather(*adds, return_exceptions=True)
    acked = [r for r in results if isinstance(r, int)]
    assert record.last_entry >= max(acked, default=-1)
    assert isinstance(
        (await asyncio.gather(writer.append(b"y"), return_exceptions=True))[0], errors.LedgerFenced
    )


@simulated
async def test_lost_answers_of_the_store_do_not_change_the_result():
    cluster, ledgers = await cluster_of(3)
    ledger_id = await ledger_on(cluster, ledgers)
    put(cluster, ledger_id, 0, "ab")
    cluster.store.faults.unknown = 0.7
    record = (await ledgers.recover(ledger_id)).record
    assert (record.state, record.last_entry) == (RecordState.CLOSED, 0)


@simulated
async def test_a_wrong_password_recovers_nothing_and_says_so():
    cluster, ledgers = await cluster_of(3)
    ledger_id = await ledger_on(cluster, ledgers)
    for bookie in cluster.bookies.values():
        bookie.override = lambda request: m.ReadLacResponse(Status.UNAUTHORIZED)
    with pytest.raises(errors.Unauthorized):
        await ledgers.recover(ledger_id, password=b"wrong")


# -- attempts, and what they cost ----------------------------------------------------------------


@simulated
async def test_recovery_tries_again_until_a_bookie_is_back():
    cluster, ledgers = await cluster_of(3)
    ledger_id = await ledger_on(cluster, ledgers)
    put(cluster, ledger_id, 0, "ab")
    for name in "ac":
        cluster.bookies[name].refusing = True
    recovery = asyncio.create_task(ledgers.recover(ledger_id))
    await asyncio.sleep(10)
    assert not recovery.done()
    cluster.bookies["a"].refusing = False
    began = current().time()
    assert (await recovery).record.last_entry == 0
    assert current().time() - began < 5


@simulated
async def test_the_time_over_recovery_raises_what_its_last_attempt_met():
    cluster, ledgers = await cluster_of(3, recovery_timeout_s=9.0)
    ledger_id = await ledger_on(cluster, ledgers)
    for name in "ac":
        cluster.bookies[name].refusing = True
    began = current().time()
    with pytest.raises(errors.DataUnavailable, match=r"it cannot be fenced; a .*refused.*; c "):
        await ledgers.recover(ledger_id)
    assert 8.9 < current().time() - began < 9.5
    assert (await ledgers.record(ledger_id)).record.state is RecordState.IN_RECOVERY


@simulated
async def test_write_backs_that_nobody_takes_are_not_enough_bookies():
    cluster, ledgers = await cluster_of(3)
    ledger_id = await ledger_on(cluster, ledgers)
    put(cluster, ledger_id, 0, "a")
    for name in "bc":
        cluster.bookies[name].override = takes_no_adds_until(1000.0)
    with pytest.raises(errors.NotEnoughBookies):
        await ledgers.recover(ledger_id)
    assert (await ledgers.record(ledger_id)).record.state is RecordState.IN_RECOVERY
    for name in "bc":
        cluster.bookies[name].override = None
    assert (await ledgers.recover(ledger_id)).record.last_entry == 0


@simulated
async def test_write_backs_are_tried_again_too():
    cluster, ledgers = await cluster_of(3)
    ledger_id = await ledger_on(cluster, ledgers)
    put(cluster, ledger_id, 0, "a")
    for name in "bc":
        cluster.bookies[name].override = takes_no_adds_until(20.0)
    assert (await ledgers.recover(ledger_id)).record.last_entry == 0
    assert current().time() > 20


def takes_no_adds_until(time):
    def answer(request):
        if isinstance(request, m.AddRequest) and current().time() < time:
            return m.AddResponse([m.AddResult(Status.IO_ERROR) for _ in request.adds])
        return None

    return answer


@simulated
async def test_nobody_waits_for_a_hung_bookie_that_cannot_help():
    """Two refuse, so the third's answer decides nothing; they are back after half a second."""
    cluster, ledgers = await cluster_of(3)
    ledger_id = await ledger_on(cluster, ledgers)
    for name in "ab":
        cluster.bookies[name].refusing = True
    cluster.bookies["c"].silent = True
    began = current().time()
    recovery = asyncio.create_task(ledgers.recover(ledger_id))
    await asyncio.sleep(0.5)
    for name in "ab":
        cluster.bookies[name].refusing = False
    assert (await recovery).record.last_entry == -1
    assert current().time() - began < 4


@simulated
async def test_an_attempt_begins_from_the_record_as_it_is_by_then():
    cluster, ledgers = await cluster_of(3)
    ledger_id = await ledger_on(cluster, ledgers)
    for name in "abc":
        cluster.bookies[name].refusing = True
    recovery = asyncio.create_task(ledgers.recover(ledger_id))
    await asyncio.sleep(5)
    known = await ledgers.record(ledger_id, fresh=True)
    end = {"last_entry": -1, "length_bytes": 0, "rows": 0}
    closed = dataclasses.replace(known.record, state=RecordState.CLOSED, **end)
    await cluster.admin.set(paths.ledger(ledger_id), ledger_record.encode(closed), known.version)
    assert (await recovery).record == closed


@simulated
async def test_a_ledger_deleted_between_two_attempts_is_gone():
    cluster, ledgers = await cluster_of(3)
    ledger_id = await ledger_on(cluster, ledgers)
    for name in "abc":
        cluster.bookies[name].refusing = True
    recovery = asyncio.create_task(ledgers.recover(ledger_id))
    await asyncio.sleep(5)
    await cluster.admin.delete(paths.ledger(ledger_id))
    with pytest.raises(errors.NoSuchLedger):
        await recovery


@simulated
async def test_what_no_waiting_mends_is_said_at_once():
    cluster, ledgers = await cluster_of(3)
    ledger_id = await ledger_on(cluster, ledgers)
    for name in "ab":
        cluster.bookies[name].override = lambda request: (
            m.ReadResponse(Status.LIMBO) if isinstance(request, m.ReadRequest) else None
        )
    began = current().time()
    with pytest.raises(errors.DataUnavailable, match="LIMBO"):
        await ledgers.recover(ledger_id)
    assert current().time() - began < 1


@pytest.mark.parametrize("entries", [0, 3, 40])
@pytest.mark.parametrize("sizes", [(3, 3, 2), (3, 2, 2), (4, 2, 2), (3, 3, 3)], ids=str)
@pytest.mark.parametrize("hung_after", range(6))
@simulated
async def test_a_bookie_that_hangs_from_any_request_on_costs_one_time_out_at_most(
    hung_after, sizes, entries
):
    """Whichever it is; a spare is there. 5 s of time-out, a moment for late and last copies."""
    for hung in "abcd"[: sizes[0]]:
        cluster, ledgers = await cluster_of(sizes[0] + 1)
        ledger_id = await ledger_on(cluster, ledgers, sizes)
        for entry in range(entries):
            put(cluster, ledger_id, entry, holders_of(entry, sizes))
        bookie = cluster.bookies[hung]
        bookie.override = hang_after(hung_after)
        began = current().time()
        assert (await ledgers.recover(ledger_id)).record.last_entry == entries - 1
        assert current().time() - began < 8.5, hung


def holders_of(entry, sizes):
    size, write_quorum, ack_quorum = sizes
    return ["abcdefg"[(entry + i) % size] for i in range(write_quorum)][:ack_quorum]


def hang_after(requests):
    """An override: so many answers, then none."""
    left = requests

    def answer(request):
        nonlocal left
        left -= 1
        return None if left >= 0 else SilentFor(60)

    return answer


# -- passwords -----------------------------------------------------------------------------------


@simulated
async def test_a_wrong_password_marks_nothing_fences_nobody_and_asks_no_bookie():
    cluster, ledgers = await cluster_of(3)
    stranger = await cluster.client("stranger")
    writer = await ledgers.create(3, 3, 2, password=b"secret")
    before = (await ledgers.record(writer.ledger_id, fresh=True)).version
    for wrong in (b"", b"guess"):
        with pytest.raises(errors.Unauthorized):
            await stranger.recover(writer.ledger_id, password=wrong)
    assert (await ledgers.record(writer.ledger_id, fresh=True)).version == before
    assert not any(bookie.requests for bookie in cluster.bookies.values())
    assert await writer.append(b"x") == 0
    assert (await stranger.recover(writer.ledger_id, password=b"secret")).record.last_entry == 0


@simulated
async def test_a_refused_password_is_no_answer_and_ends_nothing():
    """Two who refuse it are unknown: the entry that the third denies is not given up."""
    cluster, ledgers = await cluster_of(3)
    ledger_id = await ledger_on(cluster, ledgers)
    put(cluster, ledger_id, 0, "ab")
    for name in "ab":
        cluster.bookies[name].override = lambda request: (
            m.ReadResponse(Status.UNAUTHORIZED) if isinstance(request, m.ReadRequest) else None
        )
    with pytest.raises(errors.Unauthorized):
        await ledgers.recover(ledger_id)
    assert (await ledgers.record(ledger_id)).record.state is RecordState.IN_RECOVERY


@simulated
async def test_one_who_refuses_the_password_that_the_record_verifies_is_waited_out():
    """It is damaged, or has another record; who was away comes back and decides with the third."""
    cluster, ledgers = await cluster_of(3)
    ledger_id = await ledger_on(cluster, ledgers)
    put(cluster, ledger_id, 0, "abc")
    cluster.bookies["b"].override = lambda request: (
        m.ReadLacResponse(Status.UNAUTHORIZED) if isinstance(request, m.ReadLacRequest) else None
    )
    cluster.bookies["c"].refusing = True
    recovering = asyncio.ensure_future(ledgers.recover(ledger_id))
    await asyncio.sleep(3)
    cluster.bookies["c"].refusing = False
    assert (await recovering).record.last_entry == 0


# -- crashes -------------------------------------------------------------------------------------


@pytest.mark.parametrize("sizes", [(3, 3, 2), (4, 2, 2), (4, 3, 2)], ids=str)
@simulated
async def test_recoverers_that_crash_anywhere_leave_the_same_end_to_the_one_that_finishes(sizes):
    """Entries 0..4 may have been acknowledged, 5 was not; recoverers are killed after ever more
    steps until one ends by itself, and each that follows starts on what they left."""
    steps = 0
    while True:
        cluster, ledgers = await cluster_of(5)
        ledger_id = await ledger_on(cluster, ledgers, sizes)
        for entry in range(5):
            put(cluster, ledger_id, entry, holders_of(entry, sizes), lac=entry - 2)
        ended = 0
        for number in range(3):
            client = await cluster.client(f"doomed {number}", seed=number)
            task = asyncio.create_task(client.recover(ledger_id))
            for _ in range(steps + 7 * number):
                await asyncio.sleep(0.0005)
            ended += task.done()
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
        record = (await ledgers.recover(ledger_id)).record
        assert (record.last_entry, record.length_bytes, record.rows) == (4, 10, 5)
        for entry in range(5):
            members = record.fragment_of(entry).ensemble
            held = [name for name in cluster.holders(ledger_id, entry) if name in members]
            assert len(held) >= sizes[2]
        if ended == 3:
            return
        steps += 1
