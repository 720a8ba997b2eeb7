"""Subscriptions that consumers have not used for a time are deleted, and no other subscription."""

import asyncio

import pytest

from spark_ledger.metadata import paths
from spark_ledger.metadata.store import ANY_VERSION
from spark_ledger.topic.subscription.nodes import SubscriptionView
from spark_ledger.topic.subscription.records import (
    SubscriptionKind,
    SubscriptionLife,
    SubscriptionRecord,
    SubscriptionShare,
)
from spark_ledger.topic.upkeep.subscription_expiry import LastUse, use_of
from spark_ledger.topic.upkeep.upkeep import Upkeep
from tests.unit.spark_ledger.topic.acking_brokers import acking_broker
from tests.unit.spark_ledger.topic.consumers import (
    NAME,
    adopted,
    broker,
    opened,
    play_here,
    written,
)
from tests.unit.spark_ledger.topic.stage import before_the_first_multi

EXPIRY_S = 120
EARLIEST_MS = 1000


def view(*shares, kind=SubscriptionKind.CONSUMER, life=SubscriptionLife.RELEASED, used_ms=999):
    record = SubscriptionRecord(kind, epoch=3, life=life)
    by_broker = {f"b{at}": (share, 0) for at, share in enumerate(shares)}
    return SubscriptionView(NAME, record, 0, 0, by_broker, used_ms, used_ms)


def share(*, used, epoch=3, used_ms=None):
    return SubscriptionShare(epoch, used, {}, used_ms)


@pytest.mark.parametrize(
    ("subscription", "alive", "use"),
    [
        (view(), (), LastUse.EXPIRED),
        (view(used_ms=EARLIEST_MS), (), LastUse.KEPT),
        (view(kind=SubscriptionKind.QUERY), (), LastUse.KEPT),
        (view(life=SubscriptionLife.LIVE), (), LastUse.KEPT),
        (view(share(used=False), share(used=False)), ("b0",), LastUse.EXPIRED),
        (view(share(used=False), share(used=True)), ("b1",), LastUse.KEPT),
        (view(share(used=True, used_ms=1)), ("b0",), LastUse.KEPT),
        (view(share(used=False), share(used=True)), ("b0",), LastUse.UNKNOWN),
        (view(share(used=True, epoch=2)), ("b0",), LastUse.EXPIRED),
        (view(share(used=True, used_ms=1)), (), LastUse.UNKNOWN),
    ],
    ids=[
        "no consumer ever came",
        "the last use is not long ago",
        "a query has it",
        "its earlier owner may be at work",
        "consumers left at both brokers",
        "consumers are connected at one broker",
        "its broker moves it now",
        "a broker with consumers has gone",
        "the broker's consumers were sent away by a seek",
        "a broker that moved it, perhaps with consumers, has gone",
    ],
)
def test_a_subscription_expires_if_its_last_use_is_known_and_long_ago(subscription, alive, use):
    assert use_of(subscription, alive, EARLIEST_MS) is use


async def names(stage):
    return [info.name for info in await stage.client.subscriptions.list(stage.topic.id)]


async def expiring(stage, seconds=EXPIRY_S):
    await stage.client.topics.change_policies("t", {"subscription_expiry_ms": seconds * 1000})
    return Upkeep(stage.client)


def test_a_subscription_that_no_consumer_uses_is_deleted_after_the_time_and_not_before():
    async def act(stage):
        upkeep = await expiring(stage)
        a = await broker(stage, "a")
        cursor = await a.open()
        await a.cursors.release(cursor, 5)
        await asyncio.sleep(EXPIRY_S - 20)
        await upkeep.once()
        assert await names(stage) == [NAME]
        await asyncio.sleep(40)
        await upkeep.once()
        assert await names(stage) == []
        await upkeep.close()

    play_here(act)


def test_while_no_broker_lives_no_subscription_expires_nor_soon_after():
    """Consumers could not come: a cluster that was down for days, for instance."""

    async def act(stage):
        upkeep = await expiring(stage)
        a = await broker(stage, "a")
        await a.cursors.release(await a.open(), 5)
        await a.die()
        await asyncio.sleep(3 * EXPIRY_S)
        await upkeep.once()
        assert await names(stage) == [NAME]
        await broker(stage, "b")
        await asyncio.sleep(EXPIRY_S - 20)
        await upkeep.once()
        assert await names(stage) == [NAME]
        await asyncio.sleep(40)
        await upkeep.once()
        assert await names(stage) == []
        await upkeep.close()

    play_here(act)


def test_without_the_policy_and_for_a_query_a_subscription_stays():
    async def act(stage):
        a = await broker(stage, "a")
        await a.cursors.release(await a.open(name="unused"), 5)
        query = await opened(stage)
        await query.release()
        await asyncio.sleep(2 * EXPIRY_S)
        await Upkeep(stage.client).once()
        assert await names(stage) == [NAME, "unused"]
        upkeep = await expiring(stage)
        await upkeep.once()
        assert await names(stage) == [NAME]
        await upkeep.close()

    play_here(act)


def test_connected_consumers_that_acknowledge_nothing_keep_the_subscription():
    async def act(stage):
        upkeep = await expiring(stage)
        a = await broker(stage, "a")
        cursor = await a.open()
        await written(cursor)
        await asyncio.sleep(3 * EXPIRY_S)
        await upkeep.once()
        assert (await names(stage), cursor.failure) == ([NAME], None)
        await upkeep.close()

    play_here(act)


def test_after_the_death_of_a_broker_the_time_counts_from_the_first_look_at_it():
    """The consumers were there until the death, although nothing was written for long."""

    async def act(stage):
        upkeep = await expiring(stage)
        a, _ = await broker(stage, "a"), await broker(stage, "b")
        await written(await a.open())
        await asyncio.sleep(3 * EXPIRY_S)
        await a.die()
        for _ in range(2):
            await upkeep.once()
            assert await names(stage) == [NAME]
            await asyncio.sleep(EXPIRY_S - 20)
        await asyncio.sleep(40)
        await upkeep.once()
        assert await names(stage) == []
        await upkeep.close()

    play_here(act)


def test_a_broker_that_only_counted_as_dead_writes_at_once_that_its_consumers_are_there():
    async def act(stage):
        upkeep = await expiring(stage)
        a = await acking_broker(stage, "a")
        cursor, _ = await a.consume(1)
        await written(cursor)
        await asyncio.sleep(2 * EXPIRY_S)
        store = a.client.store
        await store.delete(paths.broker("a"))
        await upkeep.once()
        await store.create(paths.broker("a"), b"{}", ephemeral=True)
        a.cursors.reread_all()
        await asyncio.sleep(5)
        assert not cursor.dirty
        await asyncio.sleep(2 * EXPIRY_S)
        await upkeep.once()
        assert (await names(stage), cursor.failure) == ([NAME], None)
        await upkeep.close()

    play_here(act)


def test_what_a_broker_does_by_itself_is_no_use_until_a_consumer_joins():
    async def act(stage):
        upkeep = await expiring(stage)
        a = await broker(stage, "a")
        await a.cursors.release(await a.open(), 5)
        for _ in range(4):  # messages expire again and again, also at the next broker
            await asyncio.sleep(EXPIRY_S / 8)
            cursor = await a.open(is_use=False)
            await adopted(cursor, 0, 1)
            cursor.advance(0, 3)
            await a.cursors.release(cursor, 5)
            await a.die()
            a = await broker(stage, "b")
        await a.cursors.release(await a.open(is_use=False), 5)
        await upkeep.once()
        assert await names(stage) == [NAME]
        cursor = await a.open(is_use=False)
        cursor.count_use()
        await asyncio.sleep(EXPIRY_S / 2 + 20)
        await a.cursors.release(cursor, 5)
        await upkeep.once()
        assert await names(stage) == [NAME]
        await a.cursors.release(await a.open(is_use=False), 5)
        await asyncio.sleep(EXPIRY_S + 20)
        await a.cursors.release(await a.open(is_use=False), 5)
        await upkeep.once()
        assert await names(stage) == []
        await upkeep.close()

    play_here(act)


def test_a_consumer_that_comes_just_before_the_deletion_keeps_its_subscription():
    async def act(stage):
        upkeep = await expiring(stage)
        a = await broker(stage, "a")
        await a.cursors.release(await a.open(), 5)
        await asyncio.sleep(2 * EXPIRY_S)
        opened_again = []

        async def consumer_comes():
            opened_again.append(await a.open())

        before_the_first_multi(stage.client.store, consumer_comes)
        await upkeep.once()
        assert await names(stage) == [NAME]
        assert opened_again[0].failure is None
        await upkeep.close()

    play_here(act)


def test_a_subscription_that_cannot_be_read_stays_and_stops_no_other(caplog):
    async def act(stage):
        upkeep = await expiring(stage)
        a = await broker(stage, "a")
        for name in ("bad", "other"):
            await a.cursors.release(await a.open(name=name), 5)
        await stage.client.store.set(paths.subscription(stage.topic.id, "bad"), b"{", ANY_VERSION)
        await asyncio.sleep(2 * EXPIRY_S)
        await upkeep.once()
        infos = await stage.client.subscriptions.list(stage.topic.id, unreadable=(bad := {}))
        assert (infos, list(bad)) == ([], ["bad"])
        assert "subscription 'bad' of topic t stays" in caplog.text
        await upkeep.close()

    play_here(act)


def test_after_an_older_store_was_accepted_the_time_counts_from_then():
    async def act(stage):
        upkeep = await expiring(stage)
        store = stage.client.store
        a = await broker(stage, "a")
        await a.cursors.release(await a.open(), 5)
        await asyncio.sleep(2 * EXPIRY_S)
        node = await store.get(paths.CLUSTER)
        await store.set(paths.CLUSTER, node.value, ANY_VERSION)
        await upkeep.once()
        assert await names(stage) == [NAME]
        await asyncio.sleep(EXPIRY_S + 20)
        await upkeep.once()
        assert await names(stage) == []
        await upkeep.close()

    play_here(act)
