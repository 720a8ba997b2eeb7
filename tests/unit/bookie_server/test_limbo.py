"""Ledgers in limbo: who gets into it, what is answered meanwhile, and what gets them out."""

import asyncio

import pytest

from bookie_server.api.status import Status
from bookie_server.ledgers.limbo import absence
from bookie_server.ledgers.registry import LedgerJudgement
from bookie_server.logs.index import worse_reason
from spark_ledger.metadata import cluster, ledger_record, paths
from spark_ledger.metadata.ledger_record import (
    Fragment,
    LedgerRecord,
    derive,
    verifiers,
)
from spark_ledger.metadata.store import NoNode, StoreUnavailable
from tests.kit.deleting import delete_ledgers, lose_records
from tests.kit.nodes import on_a_node
from tests.unit.bookie_server.limbo_node import (
    ABSENT,
    CLOSED,
    LIMBO,
    OK,
    OPEN,
    OURS_NOT,
    RECOVERING,
    TORN,
    UNMET,
    ask,
    change,
    lacks,
    listed,
    tear,
    with_ledgers_in_all_states,
)
from tests.unit.bookie_server.node import ID, entry

PASSWORD = derive(b"secret")


async def lose_the_index(node):
    await asyncio.sleep(10)  # flushed
    node.die("none")
    for path in node.files(node.ledger_disk, "index"):
        await node.ledger_disk.remove(path)


def test_after_a_torn_tail_nothing_is_denied_until_the_ledgers_concerned_are_known():
    async def test(node):
        await tear(node)
        node.store.stall(3.0)
        await node.start()
        assert await lacks(node, OPEN) is TORN
        assert await lacks(node, CLOSED) is TORN
        assert (await ask(node, OPEN)).status is LIMBO
        assert node.bookie.readonly_reason == "", "it takes adds all the while"
        await asyncio.sleep(10)
        assert await lacks(node, OPEN) is TORN
        assert await lacks(node, RECOVERING) is TORN
        assert await lacks(node, UNMET) is TORN
        assert await lacks(node, CLOSED) is ABSENT
        assert await lacks(node, OURS_NOT) is ABSENT
        torn = '{"reason": "torn"}'
        assert await listed(node) == {OPEN: torn, RECOVERING: torn, UNMET: torn}
        assert await node.statuses(OPEN, 0, 1) == [OK, OK], "what is stored is served"
        assert await node.add(entry(OPEN, 2)) == [OK]

    on_a_node(test, with_ledgers_in_all_states())


def test_an_absence_in_a_ledger_never_met_is_torn_too_while_the_walk_is_not_over():
    async def test(node):
        await tear(node)
        node.store.stall(1.5)  # first contact waits for it
        await node.start()
        assert await lacks(node, UNMET) is TORN

    on_a_node(test, with_ledgers_in_all_states())


def test_a_fence_that_the_tail_took_along_comes_back_from_the_record():
    async def test(node):
        assert await node.add(entry(RECOVERING, 2)) == [OK], "it was never fenced here"
        await tear(node)
        await node.start()
        await asyncio.sleep(10)
        assert await node.add(entry(RECOVERING, 3)) == [Status.FENCED]
        assert await node.add(entry(CLOSED, 3)) == [Status.FENCED]
        assert await node.add(entry(OPEN, 2)) == [OK]
        await node.crash("none")
        assert await node.add(entry(RECOVERING, 3)) == [Status.FENCED]

    on_a_node(test, with_ledgers_in_all_states())


def test_a_lost_index_concerns_every_ledger_that_names_the_node_and_it_is_writable_again():
    async def test(node):
        await lose_the_index(node)
        node.store.stall(1.0)
        await node.start()
        assert "limbo" in node.bookie.readonly_reason
        await asyncio.sleep(10)
        assert node.bookie.readonly_reason == ""
        lost = '{"reason": "lost"}'
        assert await listed(node) == {i: lost for i in (OPEN, RECOVERING, CLOSED, UNMET)}
        for ledger_id in (OPEN, RECOVERING, CLOSED, UNMET):
            assert await lacks(node, ledger_id) is LIMBO
        assert await node.statuses(OURS_NOT, 0, 0) == [Status.NO_SUCH_LEDGER]

    on_a_node(test, with_ledgers_in_all_states())


def test_an_index_lost_again_is_not_made_good_by_what_was_logged_after_its_first_loss():
    async def test(node):
        await lose_the_index(node)
        await node.start()
        await asyncio.sleep(2)
        told = await ask(node, OPEN)
        assert (await ask(node, OPEN, told.revision)).status is OK
        node.die("none")  # the journal still says that neither it nor every ledger is in limbo
        for path in node.files(node.ledger_disk, "index"):
            await node.ledger_disk.remove(path)
        node.store.stall(1.0)
        await node.start()
        assert "limbo" in node.bookie.readonly_reason
        assert await lacks(node, OPEN) is LIMBO
        await asyncio.sleep(10)
        assert await lacks(node, OPEN) is LIMBO

    on_a_node(test, with_ledgers_in_all_states())


def test_lost_wins_over_torn():
    async def test(node):
        await lose_the_index(node)
        await node.start()
        await asyncio.sleep(10)
        assert await node.add(entry(OPEN, 2)) == [OK]
        await tear(node)
        await node.start()
        await asyncio.sleep(10)
        assert await lacks(node, OPEN) is LIMBO
        assert set((await listed(node)).values()) == {'{"reason": "lost"}'}

    on_a_node(test, with_ledgers_in_all_states())


@pytest.mark.parametrize("keep", ["none", "random", "all"])
def test_limbo_survives_crashes_until_it_is_cleared_and_then_does_not_come_back(keep):
    async def test(node):
        await tear(node)
        await node.start()
        await asyncio.sleep(10)
        await node.crash(keep)
        told = await ask(node, OPEN)
        assert (told.status, told.limbo) == (OK, "torn")
        assert (await ask(node, OPEN, told.revision)).status is OK
        await node.crash("none")
        assert await lacks(node, OPEN) is ABSENT
        assert await lacks(node, UNMET) is TORN
        await asyncio.sleep(10)
        assert list(await listed(node)) == [RECOVERING, UNMET]

    on_a_node(test, with_ledgers_in_all_states())


def test_limbo_is_not_cleared_if_anything_changed_since_it_was_asked():
    async def test(node):
        await tear(node)
        await node.start()
        await asyncio.sleep(10)
        told = await ask(node, OPEN)
        await node.handles.put_in_limbo_or_fence([LedgerJudgement(OPEN, "lost", False)])
        again = await ask(node, OPEN, told.revision)
        assert (again.status, again.limbo) == (LIMBO, "lost")
        assert again.revision != told.revision
        assert await lacks(node, OPEN) is LIMBO
        assert (await ask(node, OPEN, again.revision)).status is OK
        assert await lacks(node, OPEN) is ABSENT

    on_a_node(test, with_ledgers_in_all_states())


def test_limbo_is_not_cleared_if_more_damage_was_found_since_it_was_asked():
    """Whoever compared had read that entry by then."""

    async def test(node):
        await asyncio.sleep(2)
        storage = node.storage
        storage.quarantine(OPEN, 0, "a bad block")
        told = await ask(node, OPEN)
        assert told.limbo == "lost"
        storage.quarantine(OPEN, 1, "another one, found later")
        again = await ask(node, OPEN, told.revision)
        assert (again.status, again.limbo) == (LIMBO, "lost")
        assert again.revision != told.revision
        assert await lacks(node, OPEN) is LIMBO
        assert (await ask(node, OPEN, again.revision)).status is OK

    on_a_node(test, with_ledgers_in_all_states())


def test_a_cleared_ledger_goes_from_the_list_at_once_and_clearing_again_is_success():
    async def test(node):
        await tear(node)
        await node.start()
        await asyncio.sleep(10)
        told = await ask(node, OPEN)
        await ask(node, OPEN, told.revision)
        await asyncio.sleep(1)
        assert list(await listed(node)) == [RECOVERING, UNMET]
        assert (await ask(node, OPEN, told.revision)).status is OK
        assert (await ask(node, 99)).status is OK, "never met, nothing lost"
        assert (await ask(node, -1)).status is Status.BAD_REQUEST

    on_a_node(test, with_ledgers_in_all_states(check_s=1000))


def test_only_the_recover_token_clears():
    async def test(node):
        await change(node, UNMET, verifiers=verifiers(PASSWORD))
        await tear(node)
        await node.start()
        await asyncio.sleep(10)
        for token in (b"", PASSWORD.read, PASSWORD.add):
            assert (await ask(node, UNMET, 1, token)).status is Status.UNAUTHORIZED
        told = await ask(node, UNMET, token=PASSWORD.recover)
        assert told.limbo == "torn"
        assert (await ask(node, UNMET, told.revision, PASSWORD.recover)).status is OK

    on_a_node(test, with_ledgers_in_all_states())


def test_a_deleted_ledger_is_nobodys_and_leaves_the_list():
    async def test(node):
        await tear(node)
        await node.start()
        await asyncio.sleep(10)
        await delete_ledgers(node.store.session("deleter"), OPEN)
        await asyncio.sleep(10)
        assert list(await listed(node)) == [RECOVERING, UNMET]
        assert await node.add(entry(OPEN, 3)) == [Status.LEDGER_DELETED]

    on_a_node(test, with_ledgers_in_all_states())


def test_c9_a_torn_ledger_that_an_older_copy_of_the_store_lacks_is_in_limbo_and_fenced():
    """With the newer copy put back its absences would be denials, and a recovery would cut off what
    was acknowledged."""

    async def test(node):
        await tear(node)
        record = node.store.peek(paths.ledger(OPEN)).value
        admin = node.store.session("admin")
        await lose_records(admin, OPEN)
        await node.start()
        await asyncio.sleep(10)
        assert not node.handles.every_ledger_state().limbo, "the walk is over"
        await admin.create(paths.ledger(OPEN), record)
        assert await node.statuses(OPEN, 99, 99) == [Status.LIMBO_TORN]
        assert await node.add(entry(OPEN, 3)) == [Status.FENCED]

    on_a_node(test, with_ledgers_in_all_states())


def test_a_list_that_an_older_copy_of_the_store_lacks_is_made_again_in_the_next_session():
    async def test(node):
        await tear(node)
        await node.start()
        await asyncio.sleep(10)
        before = await listed(node)
        admin = node.store.session("admin")
        for ledger_id in before:
            await admin.delete(paths.limbo(ID, ledger_id))
        node.session.expire()
        await asyncio.sleep(60)
        assert await listed(node) == before

    on_a_node(test, with_ledgers_in_all_states())


def test_what_is_halted_leaves_limbo_at_the_next_start_alone():
    """As of a bookie that met a process on a copy of its directories."""

    async def test(node):
        await node.bookie.put_all_in_limbo(until_restart=True)
        assert await node.statuses(OPEN, 99, 99) == [Status.LIMBO]
        await asyncio.sleep(60)
        assert node.handles.every_ledger_state().limbo == "lost"
        await node.crash("none")
        assert node.handles.every_ledger_state().limbo == "lost"
        await asyncio.sleep(60)
        assert not node.handles.every_ledger_state().limbo
        assert await node.statuses(OPEN, 99, 99) == [Status.LIMBO]

    on_a_node(test, with_ledgers_in_all_states())


@pytest.mark.parametrize("harm", ["another cluster", "no folder", "broken listing", "stalls"])
def test_a_store_that_cannot_be_believed_clears_nothing(harm):
    async def test(node):
        admin = node.store.session("admin")
        await tear(node)
        if harm == "another cluster":
            value = cluster.encode(cluster.ClusterRecord("another"))
            await admin.set(paths.CLUSTER, value, (await admin.get(paths.CLUSTER)).version)
        elif harm == "broken listing":
            await admin.create(f"{paths.LEDGERS}/000/0000/none of ours")
        elif harm == "no folder":
            node.store.session = _without(node.store.session, paths.LEDGERS)
        else:
            node.store.stall(60)
        await node.start()
        await asyncio.sleep(30)
        assert await lacks(node, OPEN) is TORN
        assert await lacks(node, CLOSED) is TORN
        if harm == "stalls":
            await asyncio.sleep(60)
            assert await lacks(node, CLOSED) is ABSENT

    on_a_node(test, with_ledgers_in_all_states())


def _without(session, path):
    """Sessions to which that node does not exist."""

    def opened(name):
        found = session(name)
        get = found.get

        async def without(wanted, watch=None):
            if wanted == path:
                raise NoNode(path)
            return await get(wanted, watch)

        found.get = without
        return found

    return opened


@pytest.mark.parametrize("step", range(40))
def test_a_crash_at_any_moment_of_the_walk_leaves_nothing_out(step):
    """The walk takes some 30 ms of simulated time."""

    async def test(node):
        await tear(node)
        await node.start()
        await asyncio.sleep(step * 0.001)
        await node.crash("random")
        await asyncio.sleep(10)
        assert list(await listed(node)) == [OPEN, RECOVERING, UNMET]
        for ledger_id in (OPEN, RECOVERING, UNMET):
            assert await lacks(node, ledger_id) is TORN
        assert await lacks(node, CLOSED) is ABSENT

    on_a_node(test, with_ledgers_in_all_states())


@pytest.mark.parametrize("keep", ["none", "all"])
def test_ledgers_acknowledged_from_the_page_cache_are_torn_after_any_unclean_end(keep):
    async def test(node):
        record = LedgerRecord(8, 1, 1, 1, (Fragment(0, (ID,)),), durability="page-cache")
        admin = node.store.session("admin")
        await admin.create(paths.ledger(8), ledger_record.encode(record), parents=True)
        assert await node.add(entry(8, 0)) == [OK]
        await asyncio.sleep(5)
        await node.crash(keep)
        assert await lacks(node, 8) is TORN
        assert await lacks(node, OPEN) is ABSENT
        await asyncio.sleep(10)
        assert list(await listed(node)) == [8]
        told = await ask(node, 8)
        await ask(node, 8, told.revision)
        await node.bookie.stop()
        await node.start()
        assert await lacks(node, 8) is ABSENT, "a clean stop leaves nothing in doubt"

    on_a_node(test, with_ledgers_in_all_states())


def test_what_a_fenced_ledger_has_of_the_page_cache_is_doubted_once_and_not_at_each_later_start():
    async def test(node):
        record = LedgerRecord(8, 1, 1, 1, (Fragment(0, (ID,)),), durability="page-cache")
        admin = node.store.session("admin")
        await admin.create(paths.ledger(8), ledger_record.encode(record), parents=True)
        assert await node.add(entry(8, 0)) == [OK]
        await node.crash("all")
        assert await lacks(node, 8) is TORN
        assert await node.fence(8) is OK
        told = await ask(node, 8)
        assert (await ask(node, 8, told.revision)).status is OK
        await node.crash("none")
        assert await lacks(node, 8) is ABSENT

    on_a_node(test, with_ledgers_in_all_states())


def test_a_list_left_by_an_earlier_run_is_put_right():
    async def test(node):
        await tear(node)
        await node.start()
        await asyncio.sleep(10)
        admin = node.store.session("admin")
        await admin.create(paths.limbo(ID, 77), b"{}")
        await admin.delete(paths.limbo(ID, OPEN))
        await node.crash("all")
        await asyncio.sleep(10)
        assert list(await listed(node)) == [OPEN, RECOVERING, UNMET]

    on_a_node(test, with_ledgers_in_all_states())


def test_a_first_contact_that_is_under_way_does_not_forget_the_limbo_found_meanwhile():
    async def test(node):
        await tear(node)
        node.store.stall(1.9)
        await node.start()
        meeting = asyncio.ensure_future(node.statuses(UNMET, 9, 9))
        await asyncio.sleep(1)  # it waits for the record
        assert not meeting.done()
        await node.handles.put_in_limbo_or_fence([LedgerJudgement(UNMET, "lost", False)])
        assert await meeting == [LIMBO]
        await asyncio.sleep(10)
        assert await lacks(node, UNMET) is LIMBO

    on_a_node(test, with_ledgers_in_all_states())


def test_the_worse_reason_counts_and_says_what_an_absence_is():
    assert worse_reason("", "torn") == worse_reason("torn", "") == "torn"
    assert worse_reason("torn", "lost") == worse_reason("lost", "") == "lost"
    assert [absence(limbo) for limbo in ("", "torn", "lost")] == [ABSENT, TORN, LIMBO]


def test_a_store_that_fails_ends_one_look_and_no_more():
    async def test(node):
        await tear(node)
        await node.start()
        failures = []

        async def fails(*_):
            failures.append(1)
            raise StoreUnavailable("for now")

        await asyncio.sleep(10)
        node.session.sync = fails
        await asyncio.sleep(20)
        assert len(failures) >= 3
        assert await lacks(node, OPEN) is TORN
        assert not node.bookie.failed.done()

    on_a_node(test, with_ledgers_in_all_states())


def test_a_ledger_in_limbo_that_is_forgotten_while_the_store_is_asked_ends_nothing():
    """Collection forgets what was deleted; the look had it on its list still."""

    async def test(node):
        await lose_the_index(node)
        await node.start()
        await asyncio.sleep(10)
        assert OPEN in await listed(node)
        await delete_ledgers(node.store.session("admin"), OPEN)
        ledgers, storage = node.handles, node.storage
        plain = node.session.get

        async def get(path, watch=None):
            gone = path == paths.ledger(OPEN) and storage.state(OPEN) is not None
            if gone and ledgers.forget(OPEN):
                storage.forget(OPEN)
            return await plain(path, watch)

        node.session.get = get
        await asyncio.sleep(20)
        assert not node.bookie.failed.done()
        assert OPEN not in await listed(node)

    on_a_node(test, with_ledgers_in_all_states())


def test_a_comparison_of_before_another_loss_clears_nothing_though_revisions_begin_anew():
    """Seed 15119: the word to clear was under way while the index was lost a second time."""

    async def test(node):
        revisions = []
        for _ in range(2):
            await lose_the_index(node)
            await node.start()
            await asyncio.sleep(10)
            revisions.append((await ask(node, CLOSED)).revision)
        earlier = revisions[0]
        assert (await ask(node, CLOSED, earlier)).status is LIMBO
        assert await lacks(node, CLOSED) is LIMBO
        assert (await ask(node, CLOSED, revisions[1])).status is OK

    on_a_node(test, with_ledgers_in_all_states())


def test_a_node_without_a_session_yet_tells_nothing_that_could_be_another_runs():
    async def test(node):
        node.storage.quarantine(OPEN, 0, "a bad block")
        session = node.session
        known, session._id = session.session_id, 0
        told = await ask(node, OPEN)
        assert (told.status, told.revision) == (LIMBO, 0)
        session._id = known
        assert (await ask(node, OPEN)).status is OK

    on_a_node(test, with_ledgers_in_all_states())
