"""What a node says after its disks were damaged: unknown where it might have known, never no."""

import asyncio

import pytest

from bookie_server.api.messages import InfoRequest
from bookie_server.api.status import Status
from bookie_server.journal import checkpoint
from bookie_server.journal.writer import segment_path
from tests.kit.nodes import on_a_node
from tests.unit.bookie_server.node import Node, entry

OK, ABSENT, LIMBO = Status.OK, Status.NO_SUCH_ENTRY, Status.LIMBO


async def with_three_ledgers():
    """Ledgers 1, 2 and 3, the first two of three entries each.

    They are in blocks of the first segment: 1 and 2 of first contact, then one for each entry.
    """

    node = await Node().start()
    await node.create_ledger(1, 2, 3)
    for ledger in (1, 2):
        for e in range(3):
            assert await node.add(entry(ledger, e)) == [OK]
    return node


def flip(node, marker, offset=0):
    """Flip a bit at `offset` bytes after the first `marker` in the segment that is written."""
    path = segment_path(1)
    node.journal_disk.flip_bit(path, 8 * (node.journal_disk.content(path).index(marker) + offset))


@pytest.mark.parametrize("keep", ["none", "all"])
def test_a_damaged_entry_in_the_journal_puts_its_ledger_in_limbo_and_no_other(keep):
    async def test(node):
        node.die(keep)
        flip(node, entry(1, 1))
        await node.start()
        assert await node.statuses(1, 0, 3) == [OK, LIMBO, OK, LIMBO]
        assert await node.statuses(2, 0, 3) == [OK, OK, OK, ABSENT]
        assert await node.add(entry(2, 3), entry(1, 3)) == [OK, OK]

    on_a_node(test, with_three_ledgers())


def test_limbo_survives_restarts_and_the_damaged_segment_is_kept():
    async def test(node):
        node.die()
        flip(node, entry(1, 1))
        await node.start()
        await node.crash("random")
        await node.bookie.stop()
        await node.start()
        assert await node.statuses(1, 0, 3) == [OK, LIMBO, OK, LIMBO]
        assert "journal/0000000001.damaged" in node.journal_disk.paths()

    on_a_node(test, with_three_ledgers())


def test_a_damaged_record_that_may_have_been_a_fence_counts_as_one():
    async def test(node):
        await node.write_lac(1, 0)
        await node.add(entry(2, 3))
        node.die()
        flip(node, b'{"deleted"', 3)
        await node.start()
        assert await node.add(entry(1, 3)) == [Status.FENCED]
        assert await node.add(entry(1, 3), recovery=True) == [OK]
        assert await node.statuses(1, 0, 4) == [OK, OK, OK, OK, LIMBO]
        assert await node.add(entry(2, 4)) == [OK]

    on_a_node(test, with_three_ledgers())


@pytest.mark.parametrize("harm", ["batch header", "record header", "segment", "index"])
def test_damage_of_nobody_knows_whom_makes_every_negative_unknown(harm):
    async def test(node):
        assert await node.fence(2) is OK
        await node.add(entry(1, 3))
        if harm == "index":
            await asyncio.sleep(20)
        node.die()
        if harm == "batch header":
            flip(node, b"SLJB")
        elif harm == "record header":
            flip(node, entry(1, 1), -5)
        elif harm == "segment":
            await node.journal_disk.remove(segment_path(1))
        else:
            for path in node.files(node.ledger_disk, "index"):
                await node.ledger_disk.remove(path)
        for _ in range(2):
            await node.start()
            for ledger in (1, 2, 3):
                statuses = await node.statuses(ledger, 0, 5)
                assert set(statuses) <= {OK, LIMBO}
                assert await node.add(entry(ledger, 9)) == [Status.READ_ONLY]
                assert await node.add(entry(ledger, 4), recovery=True) == [OK]
            info = await node.bookie.handle(InfoRequest())
            assert info.state == "readonly"
            assert "limbo" in info.reason
            assert await node.fence(1) is OK
            node.die("none")

    on_a_node(test, with_three_ledgers())


@pytest.mark.parametrize("block", ["file header", "batch", "entry"])
def test_a_block_of_the_only_journal_that_cannot_be_read_is_damage_and_no_end(block):
    async def test(node):
        large = [entry(1, 3 + number, b"%d" % number * 20_000) for number in range(3)]
        assert await node.add(*large) == [OK] * 3
        assert await node.add(entry(2, 3)) == [OK]
        node.die()
        content = node.journal_disk.content(segment_path(1))
        spoiled = {
            "file header": 0,
            "batch": content.rindex(b"SLJB", 0, content.index(large[0])),
            "entry": content.index(large[1]) + 9000,
        }
        node.journal_disk.make_unreadable(segment_path(1), spoiled[block])
        await node.start()
        assert await node.statuses(2, 0, 3) == [OK] * 4
        expected = {"file header": ABSENT, "batch": LIMBO, "entry": LIMBO}[block]
        assert await node.statuses(1, 6, 6) == [expected]
        held = await node.statuses(1, 3, 5)
        assert held == {"file header": [OK] * 3, "entry": [OK, LIMBO, OK]}.get(block, [LIMBO] * 3)
        await node.crash()
        assert await node.statuses(1, 6, 6) == [expected]

    on_a_node(test, with_three_ledgers())


def test_a_torn_tail_was_never_acknowledged_and_the_node_serves():
    async def test(node):
        tail = asyncio.ensure_future(node.add(entry(1, 3)))
        await asyncio.sleep(0.0001)
        assert not tail.done(), "written, and not synced yet"
        node.die("all")
        tail.cancel()
        flip(node, entry(1, 3), 9)
        await node.start()
        assert await node.statuses(1, 0, 3) == [OK, OK, OK, Status.LIMBO_TORN]
        assert await node.statuses(2, 0, 3) == [OK, OK, OK, Status.LIMBO_TORN]
        assert node.bookie.readonly_reason == ""

    on_a_node(test, with_three_ledgers())


@pytest.mark.parametrize("harm", ["damaged", "lost"])
def test_without_its_checkpoint_a_node_replays_everything_and_loses_nothing(harm):
    async def test(node):
        await asyncio.sleep(20)
        await node.fence(2)
        await node.add(entry(1, 3))
        node.die()
        if harm == "damaged":
            node.ledger_disk.flip_bit(checkpoint.PATH, 70)
        else:
            await node.ledger_disk.remove(checkpoint.PATH)
        await node.start()
        assert await node.statuses(1, 0, 4) == [OK, OK, OK, OK, ABSENT]
        assert await node.add(entry(2, 3)) == [Status.FENCED]
        assert node.bookie.readonly_reason == ""

    on_a_node(test, with_three_ledgers())


def test_a_wiped_journal_disk_makes_every_negative_unknown():
    async def test(node):
        node.die()
        node.journal_disk.wipe()
        await node.start()
        assert await node.statuses(3, 0, 0) == [LIMBO]
        assert await node.add(entry(1, 3)) == [Status.READ_ONLY]

    on_a_node(test, with_three_ledgers())


def test_replay_that_is_itself_interrupted_is_repeated():
    async def test(node):
        for e in range(3, 40):
            await node.add_all(entry(1, e, bytes(9000)))
        await node.fence(2)
        node.die()
        for steps in (1, 5, 20, 60, 150):
            starting = asyncio.ensure_future(node.start())
            for _ in range(steps):
                await asyncio.sleep(0.0005)
            starting.cancel()
            node.journal_disk.crash("random")
            node.ledger_disk.crash("random")
        await node.start()
        results = (await node.read(1, 30, 40)).results
        assert [result.status for result in results[:6]] == [OK] * 6
        assert await node.add(entry(2, 3)) == [Status.FENCED]
        assert node.bookie.readonly_reason == ""

    on_a_node(test, with_three_ledgers())
