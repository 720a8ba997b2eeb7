"""The acknowledgements of a partition: durable, taken over, moved by others, without bookies."""

import asyncio

import pytest

from spark_ledger import errors
from spark_ledger.broker.dispatch.delays import DelayIndex
from spark_ledger.metadata import paths
from spark_ledger.metadata.store import MultiFailed
from spark_ledger.topic.acks import partition_acks, steps
from spark_ledger.topic.acks.entries import AckKey
from spark_ledger.topic.acks.nodes import AckNodes
from tests.unit.spark_ledger.topic.ack_owners import (
    KEY,
    durable,
    eventually,
    owner,
    play_here,
)
from tests.unit.spark_ledger.topic.janitors import DELAY_S, delayed, janitor_of

OTHER = AckKey("other", "token-2", 1)


async def pointer(stage):
    node = await AckNodes(stage.client.ledgers, stage.topic.id).get(0)
    return None if node is None else node.pointer


def test_an_acknowledgement_whose_receipt_was_given_is_read_by_the_next_owner():
    async def act(stage):
        first = await owner(stage, 1)
        _, acks = first.serve()
        await first.acknowledge(acks, 0, 1, 5, 7)
        assert await durable(stage) == (2, [5, 7])
        second = await owner(stage, 2)
        subscription, acks = second.serve()
        assert (acks.mark, acks.missing(0, 9)) == (2, [(2, 5), (6, 7), (8, 9)])
        await second.acknowledge(acks, 2, 3, 4)
        assert await durable(stage) == (6, [7])
        assert subscription.shares == {0: (2, 6)}

    play_here(act)


def test_an_earlier_owner_gives_no_receipt_once_a_later_one_has_read():
    async def act(stage):
        first = await owner(stage, 1)
        subscription, acks = first.serve()
        await first.acknowledge(acks, 3)
        second = await owner(stage, 2)
        with pytest.raises(errors.LedgerFenced):
            await first.acknowledge(acks, 4)
        assert isinstance(subscription.failure, errors.LedgerFenced)
        assert second.acks.state(KEY).rows.to_array().tolist() == [3]
        with pytest.raises(errors.LedgerFenced):
            await owner(stage, 1)

    play_here(act)


def test_a_receipt_of_an_earlier_owner_that_made_the_node_later_is_kept():
    """Both took the partition over before it had a node."""

    async def act(stage):
        first = await owner(stage, 1)
        _, first_acks = first.serve()
        second = await owner(stage, 2)
        subscription, second_acks = second.serve()
        await first.acknowledge(first_acks, 5)
        with pytest.raises(errors.LedgerFenced):
            await second.acknowledge(second_acks, 9)
        assert isinstance(subscription.failure, errors.LedgerFenced)
        anew = await owner(stage, 2)
        _, acks = anew.serve()
        assert list(acks.rows) == [5]
        await anew.acknowledge(acks, 9)
        with pytest.raises(errors.LedgerFenced):
            await first.acknowledge(first_acks, 6)
        third = await owner(stage, 3)
        assert list(third.acks.state(KEY).rows) == [5, 9]

    play_here(act)


@pytest.mark.parametrize("has_node", [True, False])
def test_of_two_takers_of_one_epoch_each_receipt_is_kept(has_node):
    async def act(stage):
        if has_node:
            made = await owner(stage, 1)
            _, acks = made.serve()
            await made.acknowledge(acks, 1)
        first, second = await owner(stage, 2), await owner(stage, 2)
        takers = [first, second]
        receipts = {1} if has_node else set()
        served = [taker.serve()[1] for taker in takers]
        for offset in range(3, 23, 2):
            for taker, acks in zip(takers, served, strict=True):
                try:
                    await taker.acknowledge(acks, offset + takers.index(taker) * 100)
                except errors.LedgerFenced:
                    continue
                receipts.add(offset + takers.index(taker) * 100)
        assert len(receipts) >= 10
        third = await owner(stage, 3)
        assert receipts <= set(third.acks.state(KEY).rows)

    play_here(act)


def test_an_owner_whose_write_of_the_node_had_no_answer_goes_on(monkeypatch):
    async def act(stage):
        made = await owner(stage, 1)
        subscription, acks = made.serve()
        plain, lost = AckNodes.put, []

        async def put(*arguments):
            version = await plain(*arguments)
            if not lost:
                lost.append(version)
                return None
            return version

        monkeypatch.setattr(AckNodes, "put", put)
        await made.acknowledge(acks, 3)
        assert lost == [0]
        assert subscription.failure is None
        assert await durable(stage) == (0, [3])

    play_here(act)


def test_a_subscription_that_never_acknowledged_costs_no_write():
    async def act(stage):
        made = await owner(stage, 1)
        made.serve()
        await asyncio.sleep(400)
        assert await pointer(stage) is None
        assert made.ledgers == []

    play_here(act)


def test_changes_without_receipts_share_a_write_a_second():
    async def act(stage):
        made = await owner(stage, 1)
        _, acks = made.serve()
        await made.acknowledge(acks, 0)
        (ledger,) = made.ledgers
        for offset in range(2, 200, 2):
            acks.add(offset, offset + 1)
            made.acks.changed(KEY)
            await asyncio.sleep(0.1)
        await made.acks.durable(KEY)
        last = (await stage.client.ledgers.open(ledger, recover=False)).last_add_confirmed
        assert last <= 13
        assert (await durable(stage))[1] == list(range(2, 200, 2))

    play_here(act)


def test_a_subscription_released_with_gaps_is_in_later_ledgers_until_it_is_moved():
    async def act(stage):
        made = await owner(stage, 1)
        _, acks = made.serve()
        _, others = made.serve(OTHER)
        await made.acknowledge(acks, 4)
        await made.acknowledge(others, 0, key=OTHER)
        made.acks.release(KEY, is_written=True)
        made.acks.release(OTHER, is_written=True)
        assert await durable(stage, OTHER) == (1, [])
        await asyncio.sleep(3 * steps.IDLE_S)
        assert (await pointer(stage)).ledger_id is None, "an idle ledger is left"
        assert await durable(stage) == (0, [4])
        assert await durable(stage, OTHER) is None, "its share has all of it"
        second = await owner(stage, 2)
        _, others = second.serve(OTHER)
        await second.acknowledge(others, 9, key=OTHER)
        assert await durable(stage) == (0, [4])
        third = await owner(stage, 3)
        third.moved.add(KEY)
        _, others = third.serve(OTHER)
        await third.acknowledge(others, 8, key=OTHER)
        assert await durable(stage) is None
        assert await durable(stage, OTHER) == (0, [8, 9])

    play_here(act)


def test_a_seek_takes_back_what_was_acknowledged_beyond_it():
    async def act(stage):
        made = await owner(stage, 1)
        _, acks = made.serve()
        await made.acknowledge(acks, 0, 1, 2, 8)
        acks.reset(1)
        made.acks.changed(KEY)
        await made.acks.durable(KEY)
        assert await durable(stage) == (1, [])
        await made.acknowledge(acks, 5)
        second = await owner(stage, 2)
        assert second.acks.state(KEY).position == 1
        assert list(second.acks.state(KEY).rows) == [5]

    play_here(act)


def test_a_snapshot_within_the_ledger_bounds_what_is_read(monkeypatch):
    monkeypatch.setattr(steps, "ENTRIES_READ_MAX", 5)

    async def act(stage):
        made = await owner(stage, 1)
        _, acks = made.serve()
        for offset in range(2, 60, 2):
            await made.acknowledge(acks, offset)
        assert len(made.ledgers) == 1
        assert await durable(stage) == (0, list(range(2, 60, 2)))

    play_here(act)


def test_without_bookies_small_states_go_into_the_node_with_a_warning_and_back_into_a_ledger(
    caplog,
):
    async def act(stage):
        made = await owner(stage, 1)
        _, acks = made.serve()
        made.refuses = True
        await made.acknowledge(acks, 3)
        assert (await pointer(stage)).inline
        assert await durable(stage) == (0, [3])
        made.refuses = False
        await asyncio.sleep(2 * steps.REFUSED_S)
        await made.acknowledge(acks, 5)
        assert (await pointer(stage)).ledger_id == made.ledgers[-1]
        assert await durable(stage) == (0, [3, 5])
        second = await owner(stage, 2)
        assert list(second.acks.state(KEY).rows) == [3, 5]

    play_here(act)
    assert "are written later" in caplog.text


def test_an_old_ledger_is_deleted_once_the_node_names_another():
    async def act(stage):
        first = await owner(stage, 1)
        _, acks = first.serve()
        await first.acknowledge(acks, 3)
        second = await owner(stage, 2)
        _, acks = second.serve()
        await second.acknowledge(acks, 4)

        async def is_gone():
            names = [ledger async for ledger in stage.client.ledgers.list()]
            return first.ledgers[0] not in names and second.ledgers[0] in names

        await eventually(is_gone)

    play_here(act)


async def move(stage, *, between=None):
    """Another process takes a subscription, as a seek does; returns what was durable before."""
    client = await stage.another()
    nodes = AckNodes(client.ledgers, stage.topic.id)
    for _ in range(10):
        taken = await nodes.move()
        if between is not None:
            await between()
            between = None
        try:
            await client.store.multi(await taken.operations())
        except MultiFailed:
            continue
        return taken.states.get(0, {}).get(KEY)
    raise AssertionError("it was not moved")


def test_a_ledger_whose_deletion_failed_is_deleted_after_the_next_write_of_the_node(monkeypatch):
    async def act(stage):
        first = await owner(stage, 1)
        _, acks = first.serve()
        await first.acknowledge(acks, 1)
        second = await owner(stage, 2)
        _, acks = second.serve()

        async def away(_):
            raise errors.Unavailable("the test has no store")

        with monkeypatch.context() as patched:
            patched.setattr(second.client.ledgers, "delete", away)
            await second.acknowledge(acks, 2)
            await asyncio.sleep(5)
        assert stage.world.store.peek(paths.ledger(first.ledgers[0])) is not None
        await asyncio.sleep(2 * steps.IDLE_S)  # the states go into the node
        await asyncio.sleep(5)
        assert stage.world.store.peek(paths.ledger(first.ledgers[0])) is None

    play_here(act)


def test_after_a_move_from_outside_no_receipt_is_given_and_others_go_on_without_a_warning(caplog):
    async def act(stage):
        made = await owner(stage, 1)
        subscription, acks = made.serve()
        _, others = made.serve(OTHER)
        await made.acknowledge(acks, 3)
        subscription.is_moved = True
        state = await move(stage)
        assert list(state.rows) == [3]
        await made.acknowledge(others, 7, key=OTHER)
        with pytest.raises(errors.LedgerFenced):
            await made.acknowledge(acks, 4)
        assert await durable(stage, OTHER) == (0, [7])

    play_here(act)
    assert "are written later" not in caplog.text


@pytest.mark.parametrize("served_before", [True, False])
def test_a_move_waits_for_acknowledgements_that_come_while_it_fences(served_before):
    """What has a receipt when the move succeeds is in what it read."""

    async def act(stage):
        made = await owner(stage, 1)
        subscription, acks = made.serve()
        if served_before:
            await made.acknowledge(acks, 3)

        async def between():
            await made.acknowledge(acks, 5)
            subscription.is_moved = True

        state = await move(stage, between=between)
        assert 5 in state.rows
        with pytest.raises(errors.LedgerFenced):
            await made.acknowledge(acks, 6)

    play_here(act)


def test_an_owner_without_a_ledger_sees_a_move_before_it_gives_a_receipt():
    async def act(stage):
        made = await owner(stage, 1)
        subscription, acks = made.serve()
        await made.acknowledge(acks, 3)
        await asyncio.sleep(3 * steps.IDLE_S)
        subscription.is_moved = True
        await move(stage)
        with pytest.raises(errors.LedgerFenced):
            await made.acknowledge(acks, 4)

    play_here(act)


@pytest.mark.parametrize("is_closed", [True, False])
def test_what_a_subscription_acknowledged_before_its_release_is_written_later(
    is_closed, monkeypatch
):
    """No ledger could be made until after the release, and it was too much for the node."""
    monkeypatch.setattr(partition_acks, "INLINE_BYTES_MAX", 0)

    async def act(stage):
        made = await owner(stage, 1)
        _, acks = made.serve()
        await made.acknowledge(acks, 5)
        await asyncio.sleep(2 * steps.IDLE_S)
        made.refuses = True
        for offset in range(10, 400, 3):
            acks.add(offset, offset + 1)
        made.acks.changed(KEY)
        await asyncio.sleep(10)
        made.acks.release(KEY, is_written=True)
        made.refuses = False
        if is_closed:
            await made.acks.close(3 * steps.REFUSED_S)
        else:
            await asyncio.sleep(5 * steps.REFUSED_S)
        assert len((await durable(stage))[1]) == 131

    play_here(act)


def test_a_subscription_served_again_before_its_acknowledgements_were_written_has_them_written():
    async def act(stage):
        made = await owner(stage, 1)
        _, acks = made.serve()
        acks.add(4, 5)
        made.acks.changed(KEY)
        made.acks.release(KEY, is_written=False)
        _, acks = made.serve()
        assert list(acks.rows) == [4]
        await made.acks.durable(KEY)
        assert await durable(stage) == (0, [4])

    play_here(act)


def test_a_subscription_released_without_an_acknowledgement_costs_no_write():
    async def act(stage):
        first = await owner(stage, 1)
        _, acks = first.serve()
        await first.acknowledge(acks, 4)
        second = await owner(stage, 2)
        second.serve()
        second.acks.release(KEY, is_written=True)
        await asyncio.sleep(400)
        assert second.ledgers == []
        assert await durable(stage) == (0, [4])

    play_here(act)


def test_receipts_that_wait_get_the_reason_when_the_partition_is_left():
    async def act(stage):
        made = await owner(stage, 1)
        _, acks = made.serve()
        made.refuses = True
        for offset in range(1, 1 << 24, 64):  # too much for the node
            acks.add(offset, offset + 1)
        made.acks.changed(KEY)
        waiting = asyncio.ensure_future(made.acks.durable(KEY))
        await asyncio.sleep(20)
        assert not waiting.done()
        made.acks.drop(errors.LedgerFenced("the partition is another broker's"))
        with pytest.raises(errors.LedgerFenced):
            await waiting

    play_here(act)


def test_closing_writes_what_is_not_durable():
    async def act(stage):
        made = await owner(stage, 1)
        _, acks = made.serve()
        await made.acknowledge(acks, 3)
        acks.add(4, 5)
        made.acks.changed(KEY)
        await made.acks.close(10.0)
        assert await durable(stage) == (0, [3, 4])
        assert (await stage.client.ledgers.open(made.ledgers[0], recover=False)).is_closed

    play_here(act)


def test_a_ledger_of_an_earlier_metadata_store_has_no_states(monkeypatch):
    async def act(stage):
        made = await owner(stage, 1)
        _, acks = made.serve()
        await made.acknowledge(acks, 3)
        monkeypatch.setattr("spark_ledger.topic.acks.ledger.IDS_PER_EPOCH", made.ledgers[0])
        assert await durable(stage) is None

    play_here(act)


def test_a_lost_ledger_leaves_the_subscriptions_at_their_shares():
    async def act(stage):
        made = await owner(stage, 1)
        _, acks = made.serve()
        await made.acknowledge(acks, 3)
        await stage.client.ledgers.recover(made.ledgers[0])
        await stage.client.ledgers.delete(made.ledgers[0])
        second = await owner(stage, 2)
        assert second.acks.state(KEY) is None
        _, acks = second.serve(mark=2)
        await second.acknowledge(acks, 4)
        assert await durable(stage) == (2, [4])

    play_here(act)


def test_the_janitor_keeps_the_named_ledger_of_a_dead_owner_and_deletes_those_without_a_name():
    async def act(stage):
        await delayed(stage)
        made = await owner(stage, 1)
        _, acks = made.serve()
        await made.acknowledge(acks, 3)
        orphan = (await made.make_ledger()).writer.ledger_id
        made.acks.drop(errors.LedgerFenced("its process died"))
        janitor = await janitor_of(stage)
        deleted = [*(await janitor.clean(condemn=[made.intent.id])).deleted]
        for _ in range(3):
            await asyncio.sleep(DELAY_S)
            deleted += (await janitor.clean()).deleted
        assert deleted == [orphan]
        assert await durable(stage) == (0, [3])
        await stage.client.topics.delete("t")
        for _ in range(3):
            await asyncio.sleep(DELAY_S)
            deleted += (await janitor.clean()).deleted
        assert deleted == [orphan, made.ledgers[0]]
        assert stage.world.store.peek_children(paths.TOPIC_IDS) == []

    play_here(act)


# -- delayed messages ----------------------------------------------------------------------------


def index_of(delayed):
    index = DelayIndex()
    for offset, due_ms in delayed.items():
        index.add(offset, due_ms)
    return index


def delayed_by(index):
    rows = index.take_all()
    return dict(zip(rows.offsets.tolist(), rows.dues_ms.tolist(), strict=True))


def test_delayed_messages_are_written_with_acknowledgements_and_read_by_the_next_owner():
    async def act(stage):
        first = await owner(stage, 1)
        _, acks = first.serve()
        index = index_of({1: 1000, 2: 500})
        first.acks.delays.keep(index)
        await first.acknowledge(acks, 3)
        index.add(8, 700)
        await first.acknowledge(acks, 4)
        index.add(9, 800)  # without an acknowledgement it is written within a second
        await asyncio.sleep(3)
        second = await owner(stage, 2)
        _, acks = second.serve()
        assert list(acks.rows) == [3, 4]
        index = index_of({20: 9})
        second.acks.delays.keep(index)
        expected = {1: 1000, 2: 500, 8: 700, 9: 800, 20: 9}
        assert delayed_by(index) == expected
        await second.acknowledge(acks, 5)
        third = await owner(stage, 3)
        _, acks = third.serve(OTHER)
        await third.acknowledge(acks, 0, key=OTHER)  # nothing here delays messages
        fourth = await owner(stage, 4)
        fourth.acks.delays.keep(index := DelayIndex())
        assert delayed_by(index) == expected

    play_here(act)


def test_an_index_without_a_new_message_costs_no_write():
    async def act(stage):
        first = await owner(stage, 1)
        first.acks.delays.keep(DelayIndex())
        await asyncio.sleep(5)
        assert not first.ledgers and await pointer(stage) is None
        index = index_of({1: 10})
        again = await owner(stage, 1)
        again.serve()
        again.acks.delays.keep(index)
        await asyncio.sleep(5)
        assert again.ledgers or (await pointer(stage)).inline
        made, second = len(again.ledgers), await owner(stage, 2)
        before = await pointer(stage)
        second.acks.delays.keep(DelayIndex())
        await asyncio.sleep(5)
        assert await pointer(stage) == before and len(again.ledgers) == made

    play_here(act)


def test_a_large_index_stays_in_its_ledger_and_keeps_no_position_from_the_node_without_bookies(
    monkeypatch,
):
    monkeypatch.setattr(partition_acks, "INLINE_BYTES_MAX", 1024)

    async def act(stage):
        first = await owner(stage, 1)
        _, acks = first.serve()
        large = {offset: offset for offset in range(1024 // 32 + 1)}
        first.acks.delays.keep(index := index_of(large))
        await first.acknowledge(acks, 3)
        await asyncio.sleep(2 * steps.IDLE_S)
        assert (await pointer(stage)).ledger_id == first.ledgers[-1]
        acks.add(5, 6)
        first.acks.changed(KEY)  # no receipt waits for it
        await asyncio.sleep(2)
        assert len(first.ledgers) == 2
        first.refuses = True
        await first.client.ledgers.recover(first.ledgers[-1])
        index.add(1 << 20, 1)
        await first.acknowledge(acks, 7)
        assert (await pointer(stage)).ledger_id is None
        assert await durable(stage) == (0, [3, 5, 7])
        first.refuses = False
        await asyncio.sleep(steps.REFUSED_S + 1)
        await first.acknowledge(acks, 9)
        second = await owner(stage, 2)
        second.acks.delays.keep(index := DelayIndex())
        assert delayed_by(index) == large | {1 << 20: 1}

    play_here(act)
