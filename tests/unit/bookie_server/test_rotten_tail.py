"""Rot in the last batch of a journal, which looks like a torn write: what was acknowledged of
ledgers that are CLOSED since is not denied, but told of."""

import asyncio

import pytest

from bookie_server.api.status import Status
from bookie_server.journal.format import RECORD_HEADER_BYTES
from bookie_server.journal.writer import segment_ids, segment_path
from bookie_server.ledgers import limbo
from spark_ledger.metadata.ledger_record import RecordState
from tests.kit.nodes import on_a_node
from tests.unit.bookie_server.limbo_node import (
    CLOSED,
    LIMBO,
    OK,
    OPEN,
    TORN,
    ask,
    change,
    lacks,
    listed,
    tear,
    with_ledgers_in_all_states,
)
from tests.unit.bookie_server.node import entry

TORN_VALUE, LOST_VALUE = '{"reason": "torn"}', '{"reason": "lost"}'


async def rot(node, wanted, back):
    """Kill the node and flip a bit `back` bytes before the entry's payload ends, in the journal."""
    node.die("all")
    for file_id in await segment_ids(node.journal_disk):
        path = segment_path(file_id)
        at = node.journal_disk.content(path).find(wanted)
        if at >= 0:
            node.journal_disk.flip_bit(path, 8 * (at + len(wanted) - back))
            return
    raise AssertionError("the journal does not hold the entry")


async def closed_at(node, last):
    end = {"last_entry": last, "length_bytes": 7 * (last + 1), "rows": last + 1}
    await change(node, CLOSED, state=RecordState.CLOSED, **end)


IN_THE_PAYLOAD, IN_THE_RECORD_HEADER = 2, len(entry(CLOSED, 2)) + RECORD_HEADER_BYTES - 9


@pytest.mark.parametrize("back", [IN_THE_PAYLOAD, IN_THE_RECORD_HEADER])
def test_an_entry_of_a_closed_ledger_lost_to_rot_in_the_last_batch_is_not_denied(back):
    async def test(node):
        assert await node.add(entry(CLOSED, 2)) == [OK]
        await closed_at(node, 2)
        await rot(node, entry(CLOSED, 2), back)
        await node.start()
        assert await node.statuses(CLOSED, 0, 2) in ([OK, OK, TORN], [OK, OK, LIMBO])
        await asyncio.sleep(10)
        assert await node.statuses(CLOSED, 0, 2) == [OK, OK, LIMBO]
        assert (await listed(node))[CLOSED] == LOST_VALUE

    on_a_node(test, with_ledgers_in_all_states())


def test_whose_torn_record_is_readable_is_in_limbo_itself_though_nothing_is_missing():
    async def test(node):
        assert await node.add(entry(CLOSED, 2)) == [OK]
        await rot(node, entry(CLOSED, 2), IN_THE_PAYLOAD)
        await node.start()
        await asyncio.sleep(10)
        assert await node.statuses(CLOSED, 0, 2) == [OK, OK, TORN]
        assert (await listed(node))[CLOSED] == TORN_VALUE

    on_a_node(test, with_ledgers_in_all_states())


def test_a_gap_in_a_closed_ledger_is_found_by_counting_also_after_another_start():
    async def test(node):
        for each in (3, 2):
            assert await node.add(entry(CLOSED, each), recovery=True) == [OK]
        await closed_at(node, 3)
        await rot(node, entry(CLOSED, 2), IN_THE_RECORD_HEADER)
        node.store.stall(3.0)
        await node.start()
        await asyncio.sleep(1)
        await node.crash("all")  # before the walk: what was replayed is not known any more
        await asyncio.sleep(10)
        assert await node.statuses(CLOSED, 0, 3) == [OK, OK, LIMBO, OK]
        assert (await listed(node))[CLOSED] == LOST_VALUE

    on_a_node(test, with_ledgers_in_all_states())


def test_closed_ledgers_that_are_whole_are_not_doubted_after_a_torn_tail():
    async def test(node):
        await asyncio.sleep(10)  # flushed: nothing of it is replayed
        await tear(node)
        await node.start()
        await asyncio.sleep(10)
        assert CLOSED not in await listed(node)
        assert OPEN in await listed(node)

    on_a_node(test, with_ledgers_in_all_states())


def test_a_gap_in_a_closed_ledger_is_found_though_nothing_of_it_was_replayed():
    """Repair filled it, and rot took the copy along."""

    async def test(node):
        assert await node.add(entry(CLOSED, 3), recovery=True) == [OK]
        await closed_at(node, 3)
        await asyncio.sleep(11)  # flushed
        assert await node.add(entry(CLOSED, 2), recovery=True) == [OK]
        await rot(node, entry(CLOSED, 2), IN_THE_RECORD_HEADER)
        await node.start()
        await asyncio.sleep(10)
        assert await node.statuses(CLOSED, 0, 3) == [OK, OK, LIMBO, OK]
        assert (await listed(node))[CLOSED] == LOST_VALUE

    on_a_node(test, with_ledgers_in_all_states())


def test_the_entries_of_closed_ledgers_are_counted_at_a_bounded_rate(monkeypatch):
    monkeypatch.setattr(limbo, "COUNTED_PER_S", 0.1)

    async def test(node):
        await tear(node)
        await node.start()
        await asyncio.sleep(19)
        assert await lacks(node, CLOSED) is TORN, "its two entries are counted in 20 s"
        await asyncio.sleep(5)
        assert await lacks(node, CLOSED) is Status.NO_SUCH_ENTRY

    on_a_node(test, with_ledgers_in_all_states())


def test_a_ledger_quarantined_is_listed_at_once():
    async def test(node):
        await asyncio.sleep(2)  # the first look is over
        node.storage.quarantine(OPEN, 0, "a test says so")
        await asyncio.sleep(1)
        assert await listed(node) == {OPEN: LOST_VALUE}

    on_a_node(test, with_ledgers_in_all_states(check_s=600.0))


def test_what_only_the_read_cache_has_is_not_there_for_who_compares():
    async def test(node):
        await asyncio.sleep(10)  # flushed
        assert await node.statuses(CLOSED, 0, 1) == [OK, OK]
        assert await node.statuses(CLOSED, 0, 1) == [OK, OK]
        for path in node.files(node.ledger_disk, "entrylog"):
            at = node.ledger_disk.content(path).find(entry(CLOSED, 0))
            if at >= 0:
                node.ledger_disk.flip_bit(path, 8 * (at + 66))
        assert await node.statuses(CLOSED, 0, 1) == [OK, OK], "from memory"
        await ask(node, CLOSED)
        assert await node.statuses(CLOSED, 0, 1) == [Status.IO_ERROR, OK]

    on_a_node(test, with_ledgers_in_all_states())


def test_a_damaged_only_index_makes_the_node_read_only():
    async def test(node):
        await asyncio.sleep(10)
        (path,) = node.files(node.ledger_disk, "index")
        node.ledger_disk.flip_bit(path, 8 * 40)
        assert await node.statuses(CLOSED, 0, 1) == [Status.IO_ERROR]
        assert "corruption" in node.bookie.readonly_reason
        assert await node.add(entry(OPEN, 2)) == [Status.READ_ONLY]

    on_a_node(test, with_ledgers_in_all_states())
