"""Ledger records and ids over a store that loses answers, lags, expires, and is not there."""

import asyncio
import dataclasses
import json
import tracemalloc

import pytest

from spark_ledger import errors
from spark_ledger.ledger import transitions as t
from spark_ledger.ledger.records import (
    IdSpent,
    LedgerIds,
    LedgerRecords,
    MoveRefused,
    OutcomeUnresolved,
)
from spark_ledger.metadata import ledger_record, paths
from spark_ledger.metadata.ledger_record import Fragment, RecordState
from spark_ledger.metadata.store import NoNode, StoreUnavailable, Versioned
from tests.simulation.store import SimStore
from tests.unit.spark_ledger.ledger.fakes import cluster_of, simulated
from tests.unit.spark_ledger.ledger.stored_records import (
    ABC,
    APPLIED,
    CHANGE,
    CLOSE,
    END,
    GONE,
    LOST,
    MARK,
    NAMES,
    UNKNOWN,
    Scripted,
    flaky,
    record_of,
    stored,
)

RECOVERED = (
    record_of(state=RecordState.IN_RECOVERY),
    lambda record: t.close_recovered(record, Fragment(0, ABC), (Fragment(0, ABC),), END),
    lambda record: t.end_of(record) == END,
)
MOVES = [CHANGE, CLOSE, MARK, RECOVERED]


# -- moves ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("script", UNKNOWN, ids=str)
@pytest.mark.parametrize(("began", "move", "made"), MOVES, ids=NAMES)
@simulated
async def test_a_move_whose_answers_are_lost_is_made_once(began, move, made, script):
    store, records, known = await stored(began)
    after = await flaky(store, *script).move(known, move)
    assert made(after.record)
    assert after == await records.read(7, fresh=True)
    assert after.version == known.version + 1


@pytest.mark.parametrize(("began", "move", "made"), MOVES, ids=NAMES)
@simulated
async def test_a_move_is_judged_on_what_is_there_and_not_on_what_was_known(began, move, made):
    """The local copy is old, and replicas lag behind: the re-read that decides syncs first."""
    store, records, old = await stored(began)
    stale = LedgerRecords(store.session("stale"))
    await stale.read(7)
    store.faults.lag_s = 500.0
    touched = dataclasses.replace(began, custom={"touched": "yes"})
    await records.metadata.set(paths.ledger(7), ledger_record.encode(touched), old.version)
    after = await stale.move(old, move)
    assert made(after.record)
    assert after.record.custom == {"touched": "yes"}


@pytest.mark.parametrize("fate", [APPLIED, LOST])
@pytest.mark.parametrize(("began", "move", "made"), MOVES, ids=NAMES)
@simulated
async def test_a_move_nobody_can_be_asked_about_is_unresolved(began, move, made, fate):
    store, _, known = await stored(began)
    disturbed = flaky(store, fate)
    plain_write = disturbed.metadata.write

    async def write_then_vanish(call, *args, **options):
        try:
            return await plain_write(call, *args, **options)
        finally:
            disturbed.metadata.gone = True

    disturbed.metadata.write = write_then_vanish
    with pytest.raises(OutcomeUnresolved):
        await disturbed.move(known, move)


@simulated
async def test_a_move_that_was_not_sent_is_unavailable_and_not_unresolved():
    store, _, known = await stored()
    disturbed = flaky(store)
    disturbed.metadata.gone = True
    with pytest.raises(errors.Unavailable) as met:
        await disturbed.move(known, t.mark_in_recovery)
    assert not isinstance(met.value, OutcomeUnresolved)


@simulated
async def test_after_one_unknown_outcome_a_lost_race_does_not_make_it_certain():
    """Lost, judged again, another wins the race, and now the store is gone: still unresolved."""
    store, records, known = await stored()
    disturbed = flaky(store, LOST)
    plain_set = disturbed.metadata.set

    async def set_beaten(*args):
        if disturbed.metadata.sent == 1:
            touched = dataclasses.replace(known.record, custom={"by": "another"})
            path = paths.ledger(7)
            await records.metadata.set(path, ledger_record.encode(touched), known.version)
            disturbed.metadata.sync = vanished
        return await plain_set(*args)

    async def vanished(*args):
        raise StoreUnavailable("nobody answers")

    disturbed.metadata.set = set_beaten
    with pytest.raises(OutcomeUnresolved):
        await disturbed.move(known, lambda record: t.close(record, END))


@simulated
async def test_a_change_that_was_applied_and_then_fenced_is_refused():
    store, records, known = await stored()

    async def fenced():
        await records.move(known, t.mark_in_recovery)

    with pytest.raises(MoveRefused) as refused:
        await flaky(store, APPLIED, then=fenced).move(known, CHANGE[1])
    assert refused.value.versioned.record.state is RecordState.IN_RECOVERY
    assert CHANGE[2](refused.value.versioned.record), "it is in the record, and was not made twice"


@simulated
async def test_a_close_that_was_applied_and_then_deleted_is_gone():
    store, records, known = await stored()
    with pytest.raises(errors.NoSuchLedger):
        await flaky(store, APPLIED, then=lambda: records.delete(7)).move(known, CLOSE[1])


@simulated
async def test_a_recovery_that_loses_the_race_adopts_what_the_winner_closed():
    store, records, known = await stored(record_of(state=RecordState.IN_RECOVERY))
    won = await records.move(known, RECOVERED[1])
    tail = (Fragment(0, ABC),)
    late = await flaky(store).move(
        known, lambda record: t.close_recovered(record, tail[0], tail, t.LastEntry(2, 30, 3))
    )
    assert late == won


@simulated
async def test_an_expired_session_does_not_change_what_a_move_does():
    store, records, known = await stored()
    session = store.session("expiring")
    session.expire()
    after = await LedgerRecords(session).move(known, CLOSE[1])
    assert after == await records.read(7, fresh=True)
    assert after.version == 1


@pytest.mark.parametrize("chance", [0.3, 0.7])
@simulated
async def test_a_hundred_changes_by_a_flaky_session_make_a_hundred_versions(chance):
    store, _, known = await stored()
    store.faults.unknown, store.faults.lag_s = chance, 2.0
    flaky_records = LedgerRecords(store.session("flaky"))
    for number in range(100):
        old, new = known.record.last_fragment.ensemble[1], f"new-{number}"
        known = await flaky_records.move(
            known,
            lambda r, old=old, new=new, n=number: t.change_ensemble(r, {1: old}, {1: new}, n + 1),
        )
    assert (known.version, len(known.record.fragments)) == (100, 101)


# -- creation ------------------------------------------------------------------------------------


@simulated
async def test_a_creation_whose_answer_is_lost_is_found_made():
    store, records, _ = await stored()
    made = await flaky(store, APPLIED).create(record_of(8))
    assert made == await records.read(8, fresh=True)
    assert made.version == 0


@simulated
async def test_an_id_whose_creation_is_lost_is_not_used_again():
    store, records, _ = await stored()
    with pytest.raises(IdSpent):
        await flaky(store, LOST).create(record_of(8))
    with pytest.raises(errors.NoSuchLedger):
        await records.read(8, fresh=True)


@simulated
async def test_a_ledger_that_was_made_and_deleted_before_its_maker_heard_of_it_is_not_made_again():
    store, records, _ = await stored()

    async def deleted():
        known = await records.read(8, fresh=True)
        await records.move(known, lambda record: t.close(record, t.LastEntry(-1, 0, 0)))
        await records.delete(8)

    with pytest.raises(IdSpent):
        await flaky(store, APPLIED, then=deleted).create(record_of(8))
    with pytest.raises(errors.NoSuchLedger):
        await records.read(8, fresh=True)


@pytest.mark.parametrize("script", [(), (LOST,)], ids=str)
@simulated
async def test_an_id_that_another_has_is_refused_and_the_other_untouched(script):
    store, records, known = await stored()
    rival = dataclasses.replace(record_of(), creator="theirs")
    with pytest.raises(errors.LedgerError, match="id 7 is taken"):
        await flaky(store, *script).create(rival)
    assert await records.read(7, fresh=True) == known


@simulated
async def test_without_a_creators_token_nobody_takes_a_record_for_its_own():
    store, _, _ = await stored(dataclasses.replace(record_of(), creator=""))
    with pytest.raises(errors.LedgerError, match="is taken"):
        await flaky(store).create(dataclasses.replace(record_of(), creator=""))


@simulated
async def test_a_creation_that_was_applied_and_written_to_since_is_found_as_it_is():
    store, records, _ = await stored()

    async def marked():
        await records.move(await records.read(8, fresh=True), t.mark_in_recovery)

    found = await flaky(store, APPLIED, then=marked).create(record_of(8))
    assert (found.version, found.record.state) == (1, RecordState.IN_RECOVERY)


@simulated
async def test_a_creation_nobody_can_be_asked_about_is_unresolved():
    store, _, _ = await stored()
    with pytest.raises(OutcomeUnresolved):
        await flaky(store, GONE).create(record_of(8))


# -- what the store would not take -----------------------------------------------------------------


@simulated
async def test_custom_metadata_beyond_the_limit_is_refused_before_anything_is_written():
    cluster, ledgers = await cluster_of(3)
    written = len(cluster.store.log)
    with pytest.raises(errors.RecordTooBig, match=r"RECORD_TOO_BIG.* 6\d\d\d\d\d bytes .*524288"):
        await ledgers.create(3, 3, 2, custom={"key": "v" * 600_000})
    paths_written = [c.path for commit in cluster.store.log[written:] for c in commit.changes]
    assert [path for path in paths_written if path.startswith(paths.LEDGERS + "/")] == []
    writer = await ledgers.create(3, 3, 2, custom={"key": "v" * 500_000})
    assert await writer.append(b"x") == 0


@simulated
async def test_a_record_that_grows_beyond_what_the_store_takes_is_refused_before_it_is_sent():
    store, _, known = await stored()
    grown = dataclasses.replace(known.record, custom={"key": "v" * 1_000_000})
    disturbed = flaky(store)
    with pytest.raises(errors.RecordTooBig):
        await disturbed.move(known, lambda record: t.Write(grown))
    assert disturbed.metadata.sent == 0


@pytest.mark.parametrize("value", [b"", b"{}", b"\xff\xfe", b'{"format":2}', b"null", b"[]"])
@simulated
async def test_a_damaged_record_is_an_error_of_ours(value):
    store, records, known = await stored()
    await store.session("vandal").set(paths.ledger(7), value, known.version)
    with pytest.raises(errors.UnsupportedFormat, match="ledger 7"):
        await records.read(7)


# -- ids -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("script", UNKNOWN, ids=str)
@pytest.mark.parametrize("first", [True, False], ids=["the first block", "a later one"])
@simulated
async def test_a_block_of_ids_whose_answer_was_lost_is_a_gap_and_never_given_twice(script, first):
    store = SimStore()
    taken = [] if first else [*await LedgerIds(store.session("early")).allocate(3)]
    disturbed = LedgerIds(Scripted(store.session("flaky"), *script))
    taken += [*await disturbed.allocate(5)]
    assert len(taken) == len({*taken})
    lost = 5 * script.count(APPLIED)
    counter = json.loads(store.peek(paths.LEDGER_IDS).value)["next"]
    assert counter == 1 + len(taken) + lost


@simulated
async def test_many_who_allocate_at_once_over_lagging_replicas_get_different_ids():
    store = SimStore()
    store.faults.lag_s, store.faults.unknown = 1.0, 0.1
    clients = [LedgerIds(store.session(f"client {n}")) for n in range(8)]
    given = await asyncio.gather(*(client.next() for client in clients for _ in range(40)))
    assert len({*given}) == 320
    assert min(given) == 1


# -- listing -------------------------------------------------------------------------------------


@simulated
async def test_a_listing_sees_what_was_made_before_it_began_over_a_lagging_replica():
    store, records, _ = await stored()
    lagging = LedgerRecords(store.session("lagging"))
    assert [i async for i in lagging.list()] == [7]
    store.faults.lag_s = 500.0
    for ledger_id in (8, 10**4, 10**9, 2**63 - 1):
        await records.create(record_of(ledger_id))
    assert [i async for i in lagging.list()] == [7, 8, 10**4, 10**9, 2**63 - 1]


@pytest.mark.parametrize("broken", ["no root", "a foreign name", "a folder gone", "no answer"])
@simulated
async def test_a_listing_that_is_not_sure_to_be_whole_is_an_error(broken):
    store, records, _ = await stored()
    await records.create(record_of(10**9))
    admin = store.session("vandal")
    lister = flaky(store)
    if broken == "no root":
        lister = LedgerRecords(SimStore().session("elsewhere"))
    elif broken == "a foreign name":
        await admin.create(f"{paths.LEDGERS}/000/lost+found")
    elif broken == "a folder gone":
        lister.metadata.children = one_folder_fails(admin, NoNode)
    else:
        lister.metadata.children = one_folder_fails(admin, StoreUnavailable)
    found = []
    with pytest.raises(errors.Unavailable):
        async for ledger_id in lister.list():
            found.append(ledger_id)
    assert found in ([], [7]), "nothing is skipped before the error"


def one_folder_fails(session, kind):
    """Listing the folder of ledger 10**9 fails."""

    async def children(path, watch=None):
        if path == paths.ledger(10**9).rpartition("/")[0]:
            raise kind(path)
        return await session.children(path, watch)

    return children


class Names(list):
    """What a listing of a folder gave; `alive` counts the names that somebody still holds."""

    alive = 0
    most = 0

    def __init__(self, names):
        super().__init__(names)
        Names.alive += len(self)
        Names.most = max(Names.most, Names.alive)

    def __del__(self):
        Names.alive -= len(self)


@pytest.mark.slow
@simulated
async def test_a_million_ledgers_are_listed_with_one_folder_of_names_in_memory_at_a_time():
    store, count = SimStore(), 1_000_000
    session = store.session("lister")
    session.replica = store.tree
    plant(store.tree, count)
    plain = session.children

    async def children(path, watch=None):
        return Names(await plain(path, watch))

    session.children = children
    Names.alive = Names.most = 0
    seen, last = 0, -1
    async for ledger_id in LedgerRecords(session).list():
        assert ledger_id > last
        seen, last = seen + 1, ledger_id
    assert (seen, last) == (count, count - 1)
    assert Names.most == 10_000
    assert Names.alive == 0


@simulated
async def test_a_listing_takes_memory_for_a_folder_and_not_for_the_ledgers():
    store = SimStore()
    session = store.session("lister")
    session.replica = store.tree
    plant(store.tree, 100_000)
    tracemalloc.start()
    listing = LedgerRecords(session).list()
    assert sum([1 async for _ in listing]) == 100_000
    _, peak_bytes = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak_bytes < 1 << 20


def plant(tree, count):
    """The records of ledgers 0..count-1, without the writes: only what a listing reads."""
    names = [f"{number:04d}" for number in range(10_000)]
    for first in range(0, count, 10_000):
        leaves = paths.ledger(first).rpartition("/")[0]
        above = leaves.split("/")
        for depth in range(1, len(above)):
            path, child = "/".join(above[: depth + 1]), "/".join(above[: depth + 2])
            tree.nodes.setdefault(path, Versioned(b"", 0))
            if depth + 1 < len(above):
                tree.children.setdefault(path, {})[child.rpartition("/")[2]] = None
        tree.children[leaves] = dict.fromkeys(names)


def test_the_digits_of_folders_are_those_of_the_path_of_a_ledger():
    path, digits = paths.ledger(2**63 - 1).removeprefix(paths.LEDGERS + "/").split("/"), 0
    for name in path:
        assert paths.name_digits(digits) == len(name)
        digits += len(name)
    assert digits == 19
