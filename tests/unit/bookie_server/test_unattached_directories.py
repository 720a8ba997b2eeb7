"""A ledger directory that was formatted and never attached, at a start without those that were: an
old node is not taken for a new one."""

import pytest

from bookie_server.api.status import Status
from bookie_server.disk.interface import DiskFailed
from bookie_server.storage.storage import LedgerStorage
from tests.kit.nodes import on_a_node
from tests.simulation.disk import SimDisk
from tests.simulation.loop import run
from tests.unit.bookie_server.node import entry
from tests.unit.bookie_server.wide_node import LEDGERS, Wide, flushed

OK, LIMBO, READ_ONLY = Status.OK, Status.LIMBO, Status.READ_ONLY


async def all_in_one_directory(journals=1):
    """Ledgers 1 to 8 of an entry each, the last one fenced, all in d0 alone."""
    node = await Wide(journals, ledgers=1).start()
    await node.create_ledger(*LEDGERS)
    for ledger in LEDGERS:
        assert await node.add(entry(ledger, 0)) == [OK]
    assert await node.fence(LEDGERS[-1]) is OK
    return node


async def start_on_a_new_directory_alone(node):
    node.die()
    node.ledgers["d1"] = SimDisk()
    node.out = ["d0"]
    await node.start()


async def nothing_is_denied(node):
    for ledger in LEDGERS:
        assert await node.statuses(ledger, 0, 0) in ([OK], [LIMBO])
        assert await node.add(entry(ledger, 1)) == [READ_ONLY]
    assert "limbo" in node.bookie.readonly_reason


def test_a_blank_directory_beside_a_journal_whose_beginning_is_gone_is_no_new_node():
    async def test(node):
        await flushed(node)
        await node.crash()
        await start_on_a_new_directory_alone(node)
        await nothing_is_denied(node)

    on_a_node(test, all_in_one_directory())


def test_a_blank_directory_beside_a_whole_journal_gets_everything_from_it():
    async def test(node):
        await flushed(node)
        await start_on_a_new_directory_alone(node)
        assert node.bookie.readonly_reason == ""
        assert await node.of_each(0) == {i: {OK} for i in LEDGERS}
        assert await node.add(entry(LEDGERS[-1], 1)) == [Status.FENCED]
        assert await node.add(entry(1, 1)) == [OK]

    on_a_node(test, all_in_one_directory())


def test_states_that_an_unfinished_start_left_in_a_directory_are_of_long_ago(monkeypatch):
    async def attach(*_):
        raise DiskFailed("the start ends here")

    async def test(node):
        await flushed(node)
        node.die()
        node.ledgers["d1"] = SimDisk()
        with monkeypatch.context() as cut, pytest.raises(DiskFailed):
            cut.setattr(LedgerStorage, "attach", attach)
            await node.start()
        node.out = ["d1"]
        await node.crash()
        assert await node.fence(1) is OK
        await flushed(node)
        await node.crash()
        node.die()
        node.out = ["d0"]
        await node.start()
        await nothing_is_denied(node)

    on_a_node(test, all_in_one_directory())


@pytest.mark.parametrize("emptied", ["j0", "j1"])
def test_beside_a_journal_that_was_emptied_the_others_are_not_all(emptied):
    async def test(node):
        await flushed(node)
        node.journals[emptied] = SimDisk()
        await start_on_a_new_directory_alone(node)
        await nothing_is_denied(node)

    on_a_node(test, all_in_one_directory(journals=2))


@pytest.mark.parametrize("journals", [1, 2])
def test_a_first_start_that_was_cut_off_before_it_attached_leaves_a_new_node(journals, monkeypatch):
    async def attach(*_):
        raise DiskFailed("the start ends here")

    async def main():
        node = Wide(journals, ledgers=1)
        for _ in range(2):
            with monkeypatch.context() as cut, pytest.raises(DiskFailed):
                cut.setattr(LedgerStorage, "attach", attach)
                await node.start()
        await node.start()
        assert node.bookie.readonly_reason == ""

    run(main())
