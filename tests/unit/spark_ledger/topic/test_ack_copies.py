"""Copies of what consumers acknowledged, each frozen for a query."""

import asyncio

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pyroaring import BitMap64

from spark_ledger import errors
from spark_ledger.metadata import paths
from spark_ledger.metadata.store import NodeExists, OutcomeUnknown
from spark_ledger.topic.acks import copies
from spark_ledger.topic.acks.copies import KEPT_MS, CopyPointer, decode_copy, encode_copy
from spark_ledger.topic.acks.nodes import AckNodes
from spark_ledger.topic.log.blobs import StoredEntries
from tests.unit.spark_ledger.topic.acking_brokers import acking_broker, acknowledge
from tests.unit.spark_ledger.topic.stage import play

OFFSETS = st.sets(st.integers(0, 2**40) | st.integers(0, 300), min_size=1, max_size=60)
SMALL = {0: BitMap64([3, 5, 9]), 7: BitMap64([1])}
LARGE = {2: BitMap64(n * n % 3_000_017 for n in range(200_000))}
"""Squares, which no form compresses to 32 KiB."""


@settings(max_examples=30, deadline=None)
@given(st.dictionaries(st.integers(0, 5000), OFFSETS, max_size=5))
def test_a_copy_reads_as_the_sets_that_were_copied(sets):
    acked = {partition: BitMap64(offsets) for partition, offsets in sets.items()}
    read = decode_copy(encode_copy(acked))
    assert {partition: set(offsets) for partition, offsets in read.items()} == sets


@settings(max_examples=30)
@given(st.data())
def test_a_copy_that_misses_an_entry_or_a_byte_is_refused(data):
    entries = encode_copy({p: BitMap64([0, 2]) for p in range(9)}, 300)
    assert len(entries) > 2
    at = data.draw(st.integers(0, len(entries) - 1))
    if data.draw(st.booleans()):
        damaged = entries[:at] + entries[at + 1 :]
    else:
        end = data.draw(st.integers(0, len(entries[at]) - 1))
        damaged = [*entries[:at], entries[at][:end], *entries[at + 1 :]]
    with pytest.raises(errors.UnsupportedFormat):
        decode_copy(damaged)


@pytest.mark.parametrize(
    "pointer",
    [
        CopyPointer(inline=(b"one", b"other")),
        CopyPointer(stored=StoredEntries(312, 1, 0, 3)),
    ],
)
def test_a_pointer_reads_as_it_was_written(pointer):
    assert copies.decode_pointer(copies.encode_pointer(pointer)) == pointer


@pytest.mark.parametrize(
    "value",
    [
        b"{}",
        b'{"min_reader":1,"ledger":[1,2,3]}',
        b'{"min_reader":1,"ledger":[1,2,4,3]}',
        b'{"min_reader":1,"inline":["%"]}',
        b'{"min_reader":999,"inline":[]}',
    ],
)
def test_a_malformed_pointer_is_refused(value):
    with pytest.raises(errors.UnsupportedFormat):
        copies.decode_pointer(value)


def play_here(act):
    play(act, partitions=1)


async def made(stage, acked=SMALL, copy_id="a1"):
    copies = stage.client.ack_copies(stage.topic.id)
    await copies.make(copy_id, acked, stage.topic.policies)
    return copies


async def ledger_of(stage, copy_id="a1"):
    node = await stage.client.store.get(paths.ack_copy(stage.topic.id, copy_id))
    stored = copies.decode_pointer(node.value).stored
    return None if stored is None else stored.ledger_id


@pytest.mark.parametrize("acked", [SMALL, LARGE], ids=["in its node", "in a ledger"])
def test_any_process_reads_a_copy_until_it_is_deleted(acked):
    async def act(stage):
        await made(stage, acked)
        assert (await ledger_of(stage) is None) is (acked is SMALL)
        from_another_process = (await stage.another()).ack_copies(stage.topic.id)
        assert await from_another_process.read("a1") == acked
        await from_another_process.delete("a1")
        with pytest.raises(errors.CopyGone, match=r"COPY_GONE.*copy a1 .* is gone"):
            await from_another_process.read("a1")
        await from_another_process.delete("a1")

    play_here(act)


def test_a_copy_whose_ledger_is_gone_is_gone():
    async def act(stage):
        copies = await made(stage, LARGE)
        ledger_id = await ledger_of(stage)
        await stage.client.ledgers.recover(ledger_id)
        await stage.client.ledgers.delete(ledger_id)
        with pytest.raises(errors.CopyGone):
            await copies.read("a1")

    play_here(act)


def test_the_janitor_keeps_the_ledger_of_a_copy_and_deletes_it_after_the_copy():
    async def act(stage):
        await made(stage, LARGE)
        ledger_id = await ledger_of(stage)
        for _ in range(3):
            report = await stage.janitor.clean()
            assert ledger_id in report.kept
            await asyncio.sleep(3600)
        await stage.client.store.delete(paths.ack_copy(stage.topic.id, "a1"))
        assert ledger_id in (await stage.janitor.clean()).deleted

    play_here(act)


def test_a_copy_is_removed_when_no_run_has_renewed_it_for_its_time():
    async def act(stage):
        copies = await made(stage)
        await copies.make("b2", SMALL, stage.topic.policies)
        node = await stage.client.store.get(paths.ack_copy(stage.topic.id, "a1"))
        due_ms = node.modified_ms + KEPT_MS
        assert await copies.expire(due_ms - 1000) == []
        await asyncio.sleep(60)
        await copies.renew("b2")
        assert await copies.expire(due_ms + 1000) == ["a1"]
        assert await copies.read("b2") == SMALL
        await copies.renew("a1")
        with pytest.raises(errors.CopyGone):
            await copies.read("a1")

    play_here(act)


def test_a_copy_renewed_while_it_is_removed_stays():
    async def act(stage):
        copies = await made(stage)
        store = stage.client.store
        delete = store.delete

        async def renewed_before(path, version):
            from_another_process = (await stage.another()).ack_copies(stage.topic.id)
            await from_another_process.renew("a1")
            await delete(path, version)

        store.delete = renewed_before
        await copies.expire(10**15)
        assert await copies.read("a1") == SMALL

    play_here(act)


def test_a_copy_is_made_although_the_response_was_lost():
    async def act(stage):
        multi, calls = stage.client.store.multi, []

        async def lost(operations):
            calls.append(operations)
            await multi(operations)
            if len(calls) == 2:  # the first makes the folder
                raise OutcomeUnknown("its response was lost")

        stage.client.store.multi = lost
        copies = await made(stage)
        assert await copies.read("a1") == SMALL
        with pytest.raises(NodeExists):
            await stage.client.store.create(paths.ack_copy(stage.topic.id, "a1"))

    play_here(act)


def test_no_copy_names_a_ledger_whose_intent_another_process_ended():
    async def act(stage):
        store = stage.client.store
        multi = store.multi

        async def ended_before(operations):
            if any(operation.path.endswith("copy-a1") for operation in operations):
                (intent,) = await stage.intents()
                node = await store.get(paths.intent(intent.id))
                await store.set(paths.intent(intent.id), node.value, node.version)
            await multi(operations)

        store.multi = ended_before
        with pytest.raises(errors.CommitContended):
            await made(stage, LARGE)
        with pytest.raises(errors.CopyGone):
            await stage.client.ack_copies(stage.topic.id).read("a1")

    play_here(act)


def test_owners_and_movers_of_subscriptions_pass_over_copies():
    async def act(stage):
        a, b = await acking_broker(stage, "a"), await acking_broker(stage, "b")
        cursor, acks = await a.consume(1)
        await acknowledge(cursor, acks, 0, 4)
        await made(stage)
        await acknowledge(cursor, acks, 6)
        nodes = AckNodes(stage.client.ledgers, stage.topic.id)
        assert await nodes.partitions() == [0]
        await stage.client.subscriptions.seek(stage.topic.id, cursor.name, {0: 0}, force=True)
        await a.die()
        cursor, acks = await b.consume(2)
        assert (acks.mark, list(acks.rows)) == (0, [])
        await b.release(cursor)
        await stage.client.subscriptions.delete(stage.topic.id, cursor.name)
        assert await stage.client.ack_copies(stage.topic.id).read("a1") == SMALL

    play_here(act)
