"""Failed slots: replaced, put off, tolerated, taken back; and that no stall blocks for ever."""

import asyncio

import pytest

from bookie_server.api import messages as m
from bookie_server.api.status import Status
from spark_ledger import errors
from spark_ledger.bookies.bookie_client import CallFailed
from spark_ledger.ledger.records import OutcomeUnresolved
from spark_ledger.metadata.store import StoreUnavailable
from tests.simulation.loop import current
from tests.unit.spark_ledger.ledger import policies
from tests.unit.spark_ledger.ledger.fakes import (
    cluster_of,
    cluster_on,
    failure_of,
    refuses,
    simulated,
)

POLICIES = policies.__name__


async def writes_of(ledgers, writer):
    """How often the ledger's record was written since it was made."""
    return (await ledgers.record(writer.ledger_id, fresh=True)).version


def ensemble(writer):
    return writer.record.last_fragment.ensemble


def others(cluster, writer):
    return [name for name in cluster.bookies if name not in ensemble(writer)]


# -- delayed ----------------------------------------------------------------------------------


@simulated
async def test_delayed_tolerates_a_failure_while_every_write_set_keeps_an_ack_quorum():
    cluster, ledgers = await cluster_of(5, ensemble_change="delayed")
    writer = await ledgers.create(3, 3, 2)
    first = ensemble(writer)
    cluster.bookies[first[1]].refusing = True
    for entry in range(5):
        assert await writer.append(b"x") == entry
        await asyncio.sleep(2)
    assert await writes_of(ledgers, writer) == 0
    assert await writer.wait_for_copies(1) == [first[1]]


@simulated
async def test_delayed_replaces_all_that_failed_once_a_write_set_would_lose_its_ack_quorum():
    cluster, ledgers = await cluster_of(5, ensemble_change="delayed")
    writer = await ledgers.create(3, 3, 2)
    first = ensemble(writer)
    cluster.bookies[first[1]].refusing = True
    assert await writer.append(b"0") == 0
    cluster.bookies[first[2]].refusing = True
    assert await writer.append(b"1") == 1
    assert ensemble(writer)[0] == first[0]
    assert set(ensemble(writer)[1:]) == set(cluster.bookies) - set(first)
    assert await writes_of(ledgers, writer) == 1
    assert writer.record.last_fragment.first_entry == 1


@simulated
async def test_delayed_takes_a_bookie_back_that_answers_again():
    cluster, ledgers = await cluster_of(4, ensemble_change="delayed")
    writer = await ledgers.create(3, 3, 2)
    failing = cluster.bookies[ensemble(writer)[0]]
    failing.refusing = True
    await writer.append(b"0")
    failing.refusing = False
    await asyncio.sleep(6)
    await writer.append(b"1")
    await writer.wait_for_copies(1)
    assert failing.name in cluster.holders(writer.ledger_id, 1)
    assert await writes_of(ledgers, writer) == 0


@simulated
async def test_delayed_counts_failures_in_each_write_set_of_a_striped_ledger():
    """E=6 Qw=3 Qa=2: slots 0 and 3 share no write set, slots 0, 3 and 1 do."""
    cluster, ledgers = await cluster_of(9, ensemble_change="delayed")
    writer = await ledgers.create(6, 3, 2)
    first = ensemble(writer)
    for slot in (0, 3):
        cluster.bookies[first[slot]].refusing = True
    await asyncio.gather(*(writer.append(b"x") for _ in range(12)))
    assert await writes_of(ledgers, writer) == 0
    cluster.bookies[first[1]].refusing = True
    await asyncio.gather(*(writer.append(b"x") for _ in range(12)))
    assert await writes_of(ledgers, writer) == 1
    assert [i for i in range(6) if ensemble(writer)[i] != first[i]] == [0, 1, 3]


@simulated
async def test_delayed_has_nothing_to_delay_when_all_copies_must_answer():
    cluster, ledgers = await cluster_of(4, ensemble_change="delayed")
    writer = await ledgers.create(3, 3, 3)
    cluster.bookies[ensemble(writer)[0]].refusing = True
    assert await writer.append(b"0") == 0
    assert await writes_of(ledgers, writer) == 1


@simulated
async def test_delayed_without_a_spare_fails_after_the_grace_like_at_once():
    cluster, ledgers = await cluster_of(3, ensemble_change="delayed", spare_grace_s=4)
    writer = await ledgers.create(3, 3, 2)
    for name in ("a", "b"):
        cluster.bookies[name].refusing = True
    began = current().time()
    failure = await failure_of(writer.append(b"0"))
    assert isinstance(failure, errors.NotEnoughBookies)
    assert 4 <= current().time() - began < 5


@simulated
async def test_the_grace_of_a_second_trouble_is_not_cut_short_by_the_first():
    cluster, ledgers = await cluster_of(3, spare_grace_s=8, replica_timeout_s=5)
    writer = await ledgers.create(3, 3, 2)
    for name in "ab":
        cluster.bookies[name].refusing = True
    first = writer.append(b"0")
    await asyncio.sleep(3)
    for name in "ab":
        cluster.bookies[name].refusing = False
    assert await first == 0
    await asyncio.sleep(60)
    for name in "ab":
        cluster.bookies[name].silent = True
    began = current().time()
    assert isinstance(await failure_of(writer.append(b"1")), errors.NotEnoughBookies)
    assert 12.99 < current().time() - began < 14  # 5 + 8, as far as floats go


# -- overload ---------------------------------------------------------------------------------


@simulated
async def test_a_burst_of_busy_below_the_replica_timeout_changes_nothing_in_the_store():
    cluster, ledgers = await cluster_of(6)
    writer = await ledgers.create(3, 3, 2)
    first = ensemble(writer)
    for bookie in cluster.bookies.values():
        bookie.override = refuses(Status.BUSY, retry_after_ms=100)
    adds = [writer.append(b"x") for _ in range(50)]
    await asyncio.sleep(ledgers.config.replica_timeout_s - 0.5)
    for bookie in cluster.bookies.values():
        bookie.override = None
    assert await asyncio.gather(*adds) == list(range(50))
    assert await writer.wait_for_copies(1) == []
    assert ensemble(writer) == first
    assert await writes_of(ledgers, writer) == 0
    assert ledgers.cluster.bookies.quarantine.suspects() == []


# -- replacing --------------------------------------------------------------------------------


@simulated
async def test_failures_that_come_during_a_change_are_mended_by_the_next_and_nothing_is_lost():
    cluster, ledgers = await cluster_of(5)
    writer = await ledgers.create(3, 3, 3)
    await writer.append(b"0")
    first = ensemble(writer)
    cluster.bookies[first[0]].refusing = True
    cluster.store.stall(3)
    adding = [writer.append(b"x") for _ in range(2)]
    await asyncio.sleep(1)  # the first change is on its way to the store
    cluster.bookies[first[2]].refusing = True
    adding.append(writer.append(b"x"))
    await asyncio.sleep(1)
    assert not any(add.done() for add in adding)
    assert await asyncio.gather(*adding) == [1, 2, 3]
    assert set(ensemble(writer)) == {first[1], *(set(cluster.bookies) - set(first))}
    assert len(writer.record.fragments) == 2  # the second change replaced the fragment at 1
    for entry in (1, 2, 3):
        assert set(ensemble(writer)) <= set(cluster.holders(writer.ledger_id, entry))


@simulated
async def test_a_change_that_may_have_been_made_is_looked_up_though_a_later_try_was_not_sent():
    cluster, ledgers = await cluster_of(4)
    writer = await ledgers.create(3, 3, 2)
    first = ensemble(writer)
    records, move = ledgers.cluster.records, ledgers.cluster.records.move
    failures = [OutcomeUnresolved("it may be made"), errors.Unavailable("it was not sent")]

    async def failing(known, decide, **options):
        if len(failures) == 2:
            await move(known, decide, **options)
        elif failures:
            cluster.bookies[first[0]].refusing = False  # it is back
        if failures:
            raise failures.pop(0)
        return await move(known, decide, **options)

    records.move = failing
    cluster.bookies[first[0]].refusing = True
    cluster.bookies[first[2]].silent = True
    assert await writer.append(b"0") == 0
    record = (await ledgers.record(writer.ledger_id, fresh=True)).record
    members = {*record.last_fragment.ensemble}
    assert (failures, first[0] in members) == ([], False)
    stored = members.intersection(cluster.holders(writer.ledger_id, 0))
    assert len(stored) >= 2, "acknowledged, and on an ack quorum of those that the record names"


@simulated
async def test_as_many_slots_are_replaced_as_there_are_spares_and_the_rest_later():
    cluster, ledgers = await cluster_of(5)
    writer = await ledgers.create(4, 4, 2)
    first = ensemble(writer)
    for slot in (1, 2):
        cluster.bookies[first[slot]].refusing = True
    assert await writer.append(b"0") == 0
    await asyncio.sleep(0.5)
    assert len(set(ensemble(writer)) - set(first)) == 1
    await cluster.register("f")
    await asyncio.sleep(1)
    assert set(ensemble(writer)) & set(first) == {first[0], first[3]}
    assert await writer.append(b"1") == 1
    assert await writer.wait_for_copies(1, 1) == []


@simulated
async def test_a_bookie_in_quarantine_is_a_spare_only_when_there_is_no_other():
    for spares, expected in ((2, False), (1, True)):
        cluster, ledgers = await cluster_of(3 + spares)
        writer = await ledgers.create(3, 3, 2)
        bad, *good = others(cluster, writer)
        quarantine = ledgers.cluster.bookies.quarantine
        for _ in range(3):
            quarantine.note_failure(bad)
            quarantine.note_response(bad)
            await asyncio.sleep(2)
        assert quarantine.suspects() == [bad]
        cluster.bookies[ensemble(writer)[0]].refusing = True
        assert await writer.append(b"0") == 0
        await asyncio.sleep(0.5)
        assert (bad in ensemble(writer)) == expected
        assert all((name in ensemble(writer)) != expected for name in good)


@simulated
async def test_a_bookie_that_another_only_answered_sooner_than_is_a_spare_when_there_is_no_other():
    for spares, expected in ((2, False), (1, True)):
        cluster, ledgers = await cluster_of(3 + spares)
        writer = await ledgers.create(3, 3, 2)
        busy = others(cluster, writer)[0]
        ledgers.cluster.bookies.quarantine.note_overtaken(busy)
        cluster.bookies[ensemble(writer)[0]].refusing = True
        assert await writer.append(b"0") == 0
        await asyncio.sleep(0.5)
        assert (busy in ensemble(writer)) == expected


@simulated
async def test_a_bookie_in_quarantine_is_chosen_last_for_new_ledgers_but_not_refused():
    _, ledgers = await cluster_of(4)
    for _ in range(3):
        ledgers.cluster.bookies.quarantine.note_slow("b")
        await asyncio.sleep(1)
    for _ in range(20):
        assert "b" not in ensemble(await ledgers.create(3, 3, 2))
    assert "b" in ensemble(await ledgers.create(4, 3, 2))


@simulated
async def test_slow_answers_bring_a_bookie_into_quarantine():
    cluster, ledgers = await cluster_of(4, slow_add_s=1.0)
    writer = await ledgers.create(3, 3, 2)
    slow = cluster.bookies[ensemble(writer)[0]]
    plain = slow.handle

    async def slowly(request, timeout_s):
        await asyncio.sleep(1.2)
        return await plain(request, timeout_s)

    slow.handle = slowly
    for _ in range(4):
        await writer.append(b"x")
        await asyncio.sleep(1.5)
    assert ledgers.cluster.bookies.quarantine.suspects() == [slow.name]
    assert slow.name in ensemble(writer)  # slow is not failed
    for _ in range(10):
        assert slow.name not in ensemble(await ledgers.create(3, 3, 2))


@simulated
async def test_changes_do_not_go_round_in_circles_when_bookies_answer_but_store_nothing():
    """Everybody answers questions and fails every add: each is tried at most every ten seconds,
    and the record is written a few times, not in a loop."""
    cluster, ledgers = await cluster_of(5, add_timeout_s=60, spare_grace_s=60)
    writer = await ledgers.create(3, 3, 2)
    for bookie in cluster.bookies.values():
        bookie.override = refuses(Status.IO_ERROR, reason="no space")
    failure = await failure_of(writer.append(b"x"))
    assert isinstance(failure, errors.NotEnoughBookies | errors.TimedOut)
    assert await writes_of(ledgers, writer) <= 12
    assert len(writer.record.fragments) == 1


@simulated
async def test_the_ledger_ends_at_its_most_fragments_and_says_so():
    cluster, ledgers = await cluster_of(4, fragments_max=64)
    writer = await ledgers.create(3, 3, 2)
    failure = None
    for turn in range(70):
        failing = cluster.bookies[ensemble(writer)[turn % 3]]
        failing.refusing = True
        try:
            await writer.append(b"x")
            await asyncio.sleep(0.5)
            await writer.append(b"x")
        except errors.LedgerError as error:
            failure = error
            break
        failing.refusing = False
        await asyncio.sleep(11)
    assert isinstance(failure, errors.LedgerClosed)
    assert "64 fragments" in failure.what
    assert "new ledger" in failure.remedy
    record = await writer.close()
    assert len(record.fragments) == 64
    assert record.last_entry == writer.last_add_confirmed


# -- racks and policies -----------------------------------------------------------------------


@simulated
async def test_hard_racks_put_a_change_off_rather_than_share_a_rack():
    cluster, ledgers = await cluster_on("r1", "r2", "r3", racks="hard")
    writer = await ledgers.create(3, 3, 2)
    await cluster.register("d", "r1")
    await cluster.register("e", "")
    cluster.bookies["b"].refusing = True
    assert await writer.append(b"0") == 0
    await asyncio.sleep(2)
    assert set(ensemble(writer)) == {"a", "b", "c"}
    await cluster.register("f", "r2")
    await asyncio.sleep(1)
    assert set(ensemble(writer)) == {"a", "f", "c"}


@simulated
async def test_the_rack_of_a_member_that_answers_but_is_not_registered_counts_still():
    cluster, ledgers = await cluster_on("r1", "r2", "r3", racks="hard")
    writer = await ledgers.create(3, 3, 2)
    await cluster.deregister("a")
    await cluster.register("d", "r1")
    await asyncio.sleep(1)
    cluster.bookies["b"].refusing = True
    assert await writer.append(b"0") == 0
    await asyncio.sleep(2)
    assert set(ensemble(writer)) == {"a", "b", "c"}


@simulated
async def test_the_rack_of_a_failed_member_that_nobody_takes_the_place_of_counts_still():
    for seed in range(4):
        cluster, ledgers = await cluster_on("r1", "r2", "r3", racks="hard")
        ledgers.cluster.rng.seed(seed)
        writer = await ledgers.create(3, 3, 1)
        before = ensemble(writer)
        for name in ("a", "b"):
            cluster.bookies[name].refusing = True
        await writer.append(b"0")
        await cluster.register("d", "r2")
        await asyncio.sleep(2)
        assert ensemble(writer) == tuple("d" if name == "b" else name for name in before)


@simulated
async def test_soft_racks_share_one_rather_than_miss_a_copy():
    cluster, ledgers = await cluster_on("r1", "r2", "r3")
    writer = await ledgers.create(3, 3, 2)
    await cluster.register("d", "r1")
    cluster.bookies["b"].refusing = True
    assert await writer.append(b"0") == 0
    await asyncio.sleep(1)
    assert set(ensemble(writer)) == {"a", "c", "d"}


@simulated
async def test_hard_racks_refuse_a_ledger_naming_racks_and_bookies():
    cluster, ledgers = await cluster_on("r1", "r2", "r2", "", racks="hard")
    began = current().time()
    with pytest.raises(errors.NotEnoughBookies) as caught:
        await ledgers.create(3, 3, 2)
    assert current().time() - began < 1  # all that ever registered are there: no use in waiting
    text = caught.value.what
    assert 'racks = "hard"' in text
    assert "any 3 neighbours" in text
    assert "there are r1, r2" in text
    assert "c (c:1), rack r2" in text
    assert caught.value.facts["writable"] == ["a", "b", "c", "d"]
    assert caught.value.remedy == 'Start bookies on more racks, or set racks = "soft".'
    assert set(ensemble(await ledgers.create(2, 2, 1))) <= set(cluster.bookies) - {"d"}


@simulated
async def test_hard_racks_wait_for_the_rack_that_restarts():
    cluster, ledgers = await cluster_on("r1", "r2", "r3", "r1", racks="hard")
    await cluster.deregister("c")
    await asyncio.sleep(1)
    creating = asyncio.ensure_future(ledgers.create(3, 3, 2))
    await asyncio.sleep(3)
    assert not creating.done()
    await cluster.register("c", "r3")
    assert "c" in ensemble(await creating)


@simulated
async def test_a_policy_of_ones_own_chooses_for_new_ledgers_and_for_changes():
    cluster, ledgers = await cluster_of(5, placement=f"{POLICIES}:by_name")
    writer = await ledgers.create(3, 3, 2)
    assert ensemble(writer) == ("a", "b", "c")
    cluster.bookies["b"].refusing = True
    await writer.append(b"0")
    await asyncio.sleep(1)
    assert ensemble(writer) == ("a", "d", "c")


@simulated
async def test_a_policy_that_misbehaves_is_named():
    _, ledgers = await cluster_of(4, placement=f"{POLICIES}:strangers")
    with pytest.raises(errors.BadConfig, match=r"policies:strangers.*no candidates"):
        await ledgers.create(3, 3, 2)
    _, ledgers = await cluster_of(4, placement=f"{POLICIES}:too_few")
    with pytest.raises(errors.NotEnoughBookies, match="policies:too_few' takes too few") as caught:
        await ledgers.create(3, 3, 2)
    assert "Start the missing bookies" not in str(caught.value)


# -- errors that name what is missing ---------------------------------------------------------


@simulated
async def test_not_enough_bookies_names_needed_writable_and_why_the_others_are_not():
    cluster, ledgers = await cluster_on("r1", "", "", spare_grace_s=1)
    ledgers.cluster.bookies.quarantine.note_failure("a")
    await cluster.deregister("b")
    await cluster.readonly("c", "disk 97 % full")
    await asyncio.sleep(1)
    with pytest.raises(errors.NotEnoughBookies) as caught:
        await ledgers.create(3, 3, 2)
    text = str(caught.value)
    assert "needs 3 writable bookies, there are 1" in text
    assert "a (a:1), rack r1, gave no answer lately" in text
    assert "b (b:1, not registered)" in text
    assert "c (c:1, read-only: disk 97 % full)" in text
    assert caught.value.facts == {"needed": 3, "writable": ["a"]}
    assert caught.value.remedy.startswith("Start the missing bookies, free space")


@simulated
async def test_adds_without_an_ack_quorum_name_the_failed_and_why_the_others_are_no_spare():
    cluster, ledgers = await cluster_on("r1", "r2", "r3", racks="hard", spare_grace_s=2)
    writer = await ledgers.create(3, 3, 2)
    await cluster.register("d", "r1")
    for name in ("b", "c"):
        cluster.bookies[name].refusing = True
    failure = await failure_of(writer.append(b"0"))
    assert isinstance(failure, errors.NotEnoughBookies)
    assert "needs 2 of 3" in failure.what
    assert "b (b:1), rack r2" in failure.what
    assert "connection refused" in failure.what
    assert "no spare (racks = 'hard'): d (d:1), rack r1" in failure.what
    assert failure.remedy.startswith("Start the bookies named")
    assert failure.facts["bookies"] == [b for b in ensemble(writer) if b in ("b", "c")]


async def with_full_disks(count):
    """Three bookies, of which so many refuse what is added, as one does whose disk is full."""
    cluster, ledgers = await cluster_of(3, spare_grace_s=2)
    writer = await ledgers.create(3, 3, 2)
    for name in "abc"[:count]:
        await cluster.readonly(name, f"disk full: /{name}")
        cluster.bookies[name].override = refuses(Status.READ_ONLY, reason=f"disk full: /{name}")
    return cluster, ledgers, writer


@simulated
async def test_where_disks_are_full_every_add_and_every_new_ledger_says_so_and_to_free_space():
    _, ledgers, writer = await with_full_disks(3)
    first = await failure_of(writer.append(b"x"))
    assert "needs 2 of 3 bookies to take an entry (0 registered as writable)" in first.what
    assert "a (a:1, read-only: disk full: /a): READ_ONLY disk full: /a" in first.what
    assert first.remedy == "Free space where a disk is full, or add bookies."
    later = await failure_of(writer.append(b"y"))
    assert later.what == (
        f"the writer of ledger {writer.ledger_id} ended 0.0 s ago: fewer than 2 of 3 bookies took"
        " an entry; a: READ_ONLY disk full: /a; b: READ_ONLY disk full: /b;"
        " c: READ_ONLY disk full: /c"
    )
    assert later.remedy == f"{first.remedy} Then close this writer and go on in a new ledger."
    with pytest.raises(errors.NotEnoughBookies, match="read-only: disk full: /a") as caught:
        await ledgers.create(3, 3, 2)
    assert caught.value.remedy == first.remedy


@simulated
async def test_where_one_disk_is_full_and_one_bookie_is_down_both_are_to_be_mended():
    cluster, ledgers, writer = await with_full_disks(1)
    cluster.bookies["b"].refusing = True
    await cluster.deregister("b")
    both = "Start the missing bookies, free space where a disk is full, or add bookies."
    assert (await failure_of(writer.append(b"x"))).remedy == both
    assert (await failure_of(writer.append(b"y"))).remedy.startswith(both)
    with pytest.raises(errors.NotEnoughBookies) as caught:
        await ledgers.create(3, 3, 2)
    assert caught.value.remedy == both


# -- the whole add has a time, whatever stalls ------------------------------------------------


def hang_the_store(cluster, ledgers):
    """A change is wanted, and its write is never answered."""

    async def never(*_):
        await asyncio.sleep(ledgers.config.metadata_timeout_s)
        raise StoreUnavailable("not sent")

    ledgers.metadata.set = never


async def stalled_in_a_change(cluster, ledgers, writer):
    hang_the_store(cluster, ledgers)
    for name in ensemble(writer)[:2]:
        cluster.bookies[name].refusing = True


async def all_hung(cluster, ledgers, writer):
    for bookie in cluster.bookies.values():
        bookie.silent = True


async def busy_for_ever(cluster, ledgers, writer):
    for bookie in cluster.bookies.values():
        bookie.override = refuses(Status.BUSY, retry_after_ms=100)


async def no_metadata_at_the_bookies(cluster, ledgers, writer):
    for bookie in cluster.bookies.values():
        bookie.override = refuses(Status.METADATA_UNAVAILABLE)


async def questions_answered_adds_not(cluster, ledgers, writer):
    async def hang(bookie, request, timeout_s):
        if isinstance(request, m.AddRequest):
            await asyncio.sleep(timeout_s)
            raise CallFailed("too late")
        return await type(bookie).handle(bookie, request, timeout_s)

    for bookie in cluster.bookies.values():
        bookie.handle = hang.__get__(bookie)


@pytest.mark.parametrize(
    "stall",
    [
        stalled_in_a_change,
        all_hung,
        busy_for_ever,
        no_metadata_at_the_bookies,
        questions_answered_adds_not,
    ],
    ids=lambda stall: stall.__name__,
)
@pytest.mark.parametrize("spares", [0, 2])
@pytest.mark.parametrize("change", ["at-once", "delayed"])
def test_in_every_stall_adds_end_in_their_time_and_nothing_is_left(stall, spares, change):
    @simulated
    async def test():
        cluster, ledgers = await cluster_of(3 + spares, ensemble_change=change)
        writer = await ledgers.create(3, 3, 2)
        assert await writer.append(b"0") == 0
        await writer.wait_for_copies(1)
        await stall(cluster, ledgers, writer)
        began = current().time()
        adds = [writer.append(b"x") for _ in range(4)]
        for add in adds:
            failure = await failure_of(add)
            assert isinstance(failure, errors.TimedOut | errors.NotEnoughBookies), failure
        assert current().time() - began <= ledgers.config.add_timeout_s + 0.01
        assert isinstance(await failure_of(writer.append(b"later")), type(failure))
        assert writer.last_add_confirmed == 0
        assert await asyncio.wait_for(writer.room(), 1) is None
        await asyncio.sleep(60)
        assert writer.inflight_bytes == 0

    test()
