"""Rot in the last batch of a journal may take a fence along that was acknowledged: no add is taken
that it would have refused, before the walk is over and after it."""

import asyncio

import pytest

from bookie_server.api import messages as m
from bookie_server.api.status import Status
from bookie_server.journal.format import BATCH_HEADER_BYTES, BATCH_MAGIC
from bookie_server.journal.writer import JournalFailed, segment_ids, segment_path
from bookie_server.ledgers.registry import LedgerJudgement
from spark_ledger.metadata import paths
from spark_ledger.metadata.ledger_record import Fragment, RecordState
from spark_ledger.metadata.store import NoNode
from tests.kit.deleting import delete_ledgers
from tests.kit.nodes import on_a_node
from tests.simulation.loop import run
from tests.unit.bookie_server.limbo_node import (
    CLOSED,
    OK,
    OPEN,
    RECOVERING,
    TORN,
    UNMET,
    change,
    lacks,
    with_ledgers_in_all_states,
)
from tests.unit.bookie_server.node import CONFIG, ID, Node, entry
from tests.unit.bookie_server.wide_node import wide_node

BLOCK = 4096
ELSEWHERE = (Fragment(0, ("another",)),)
FENCED, UNAVAILABLE = Status.FENCED, Status.METADATA_UNAVAILABLE
EMPTY = {"state": RecordState.CLOSED, "last_entry": -1, "length_bytes": 0, "rows": 0}


async def rot_the_last_batch(node, batches=1):
    """Kill the node, all of whose writes are on disk; nothing of the last batches can be read."""
    node.die("all")
    found = []
    for file_id in await segment_ids(node.journal_disk):
        content = node.journal_disk.content(path := segment_path(file_id))
        places = range(BLOCK, len(content), BLOCK)
        magic = len(BATCH_MAGIC)
        found += [(path, at) for at in places if content[at : at + magic] == BATCH_MAGIC]
    for path, at in found[-batches:]:
        for header_at in (at, at + BATCH_HEADER_BYTES):
            node.journal_disk.flip_bit(path, 8 * (header_at + 20))


async def fence_and_rot(node, *ledger_ids):
    for ledger_id in ledger_ids:
        assert await node.fence(ledger_id) is OK
        assert await node.add(entry(ledger_id, 2)) == [FENCED]
    await rot_the_last_batch(node)


def test_a_fence_that_rot_took_along_refuses_adds_before_the_walk_came_to_its_ledger():
    async def test(node):
        await fence_and_rot(node, RECOVERING)
        await node.start()
        assert await node.add(entry(RECOVERING, 2)) == [FENCED]
        await node.crash("none")
        assert node.storage.state(RECOVERING).fenced, "durable before it was answered"

    on_a_node(test, with_ledgers_in_all_states())


def test_while_the_store_does_not_answer_an_add_is_to_come_again():
    async def test(node):
        await fence_and_rot(node, RECOVERING)
        node.store.stall(5.0)
        await node.start()
        for ledger_id in (RECOVERING, OPEN):
            assert await node.add(entry(ledger_id, 2)) == [UNAVAILABLE]
        assert await node.add(entry(RECOVERING, 2), recovery=True) == [OK]
        assert await node.statuses(OPEN, 0, 2) == [OK, OK, TORN]
        assert await node.fence(CLOSED) is OK
        await asyncio.sleep(10)
        assert await node.add(entry(RECOVERING, 3)) == [FENCED]
        assert await node.add(entry(OPEN, 2)) == [OK]

    on_a_node(test, with_ledgers_in_all_states())


def test_a_frame_of_both_kinds_of_adds_is_judged_add_by_add():
    async def test(node):
        await fence_and_rot(node, RECOVERING)
        await node.start()
        hold(node)
        frame = [node.request("Add", mixed(RECOVERING, 2)), node.request("Add", mixed(OPEN, 2))]
        fenced, taken = [[r.status for r in (await each).results] for each in frame]
        assert fenced == [OK, FENCED]
        assert taken == [OK, OK]

    on_a_node(test, with_ledgers_in_all_states())


def mixed(ledger_id, first):
    """A frame: recovery's add, then a normal one."""
    adds = [m.Add([entry(ledger_id, first)], True), m.Add([entry(ledger_id, first + 1)], False)]
    return m.AddRequest(ID, adds)


def hold(node):
    """The walk does not begin: the node's store is not known to be its cluster's. Returns what
    lets it begin."""
    plain, held = node.session.get, True

    async def get(path, watch=None):
        if held and path == paths.CLUSTER:
            raise NoNode(path)
        return await plain(path, watch)

    def let_go():
        nonlocal held
        held = False

    node.session.get = get
    return let_go


def test_a_ledgers_record_is_read_once_and_not_at_all_after_the_walk():
    async def test(node):
        await rot_the_last_batch(node)
        await node.start()
        let_go = hold(node)
        read = reads_of(node, OPEN)
        frames = [node.add(entry(OPEN, e)) for e in range(2, 8)]
        assert await asyncio.gather(*frames) == [[OK]] * 6
        assert await node.add(entry(OPEN, 8)) == [OK]
        assert len(read) == 1
        let_go()
        assert await node.statuses(CLOSED, 0, 0) == [OK], "it is met, and not sure"
        await asyncio.sleep(10)
        closed = reads_of(node, CLOSED)
        assert await node.add(entry(CLOSED, 2)) == [FENCED]
        assert closed == []

    on_a_node(test, with_ledgers_in_all_states())


def reads_of(node, ledger_id):
    """Counts what is asked of the ledger's record from now on."""
    found = []
    metadata = node.session
    plain = metadata.get

    async def get(path, watch=None):
        if path == paths.ledger(ledger_id):
            found.append(path)
        return await plain(path, watch)

    metadata.get = get
    return found


def test_a_ledger_without_a_record_takes_no_adds_while_a_fence_may_be_forgotten():
    async def test(node):
        await rot_the_last_batch(node)
        await delete_ledgers(node.store.session("deleter"), OPEN)
        await node.start()
        hold(node)
        assert await node.add(entry(OPEN, 2)) == [UNAVAILABLE]
        assert await node.add(entry(OPEN, 2)) == [UNAVAILABLE]

    on_a_node(test, with_ledgers_in_all_states())


@pytest.mark.parametrize("walked", [False, True])
def test_a_ledger_of_which_rot_took_everything_is_met_as_fenced_when_its_record_is_not_open(walked):
    """It was met by its fence alone, and closed without an entry."""

    async def test(node):
        await change(node, UNMET, state=RecordState.IN_RECOVERY)
        assert await node.fence(UNMET) is OK
        await rot_the_last_batch(node, batches=2)
        await change(node, UNMET, **EMPTY)
        await node.start()
        assert node.storage.state(UNMET) is None
        if walked:
            await asyncio.sleep(10)
            assert await lacks(node, OPEN) is TORN, "the walk is over"
            assert not node.handles.every_ledger_state().limbo
        else:
            hold(node)
        assert await node.add(entry(UNMET, 0)) == [FENCED]

    on_a_node(test, with_ledgers_in_all_states())


def test_a_fence_comes_back_of_a_ledger_that_names_others_only_by_now():
    async def test(node):
        await fence_and_rot(node, RECOVERING)
        end = {"last_entry": 1, "length_bytes": 14, "rows": 2}
        await change(node, RECOVERING, state=RecordState.CLOSED, fragments=ELSEWHERE, **end)
        await node.start()
        await asyncio.sleep(10)
        assert await node.add(entry(RECOVERING, 2)) == [FENCED]

    on_a_node(test, with_ledgers_in_all_states())


def test_an_undamaged_start_asks_nobody_before_it_takes_adds():
    async def test(node):
        await node.crash("none")
        node.store.stall(5.0)
        assert await node.add(entry(OPEN, 2)) == [OK]

    on_a_node(test, with_ledgers_in_all_states())


def test_a_fence_by_first_contact_is_durable_before_anybody_is_told():
    async def main():
        node = Node(CONFIG)
        await node.create_ledger(1)
        await node.start()
        await change(node, 1, fragments=ELSEWHERE, **EMPTY)
        node.journal_disk.faults.sync_s = (1.0, 1.0)
        first = asyncio.ensure_future(node.add(entry(1, 0)))
        await asyncio.sleep(0.5)
        assert node.storage.state(1).fenced
        fence = asyncio.ensure_future(node.fence(1))
        await asyncio.sleep(0.1)
        assert not fence.done()
        assert await fence is OK
        assert await first == [FENCED]
        await node.crash("none")
        assert node.storage.state(1).fenced

    run(main())


def test_a_fence_whose_journal_failed_is_made_durable_for_whoever_meets_the_ledger_next():
    async def test(node):
        await node.crash("none")
        for disk in node.ledgers.values():
            disk.faults.sync_s = (5.0, 5.0)  # the flush that makes the failure good takes long
        node.journals["j0"].faults.sync_fails = 1
        with pytest.raises(JournalFailed):
            await node.handles.put_in_limbo_or_fence([LedgerJudgement(1, "", True)])
        fence = asyncio.ensure_future(node.fence(1))
        await asyncio.sleep(1)
        assert not fence.done()
        assert await fence is OK
        await node.crash("none")
        assert node.storage.state(1).fenced

    on_a_node(test, wide_node(journals=2))
