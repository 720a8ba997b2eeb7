"""A partition or a subscription that cannot be read stops the expiry and the quota of no other."""

import asyncio
from types import SimpleNamespace

import pytest

from spark_ledger import errors
from spark_ledger.broker.log.partition import Partition
from spark_ledger.broker.owner.backlogs import LOG_EVERY_S, SPREAD_S
from spark_ledger.broker.store_contact import StoreClock
from spark_ledger.broker.wire.commands import Refusal
from spark_ledger.ledger.client import LedgerStore
from spark_ledger.metadata import paths
from spark_ledger.metadata.store import ANY_VERSION
from tests.unit.spark_ledger.broker.owners import Sent
from tests.unit.spark_ledger.broker.two_brokers import Brokers, named
from tests.unit.spark_ledger.topic.stage import NOW_MS, play

TTL_MS = 1000
GONE = errors.RowsLost("the rows are gone", rows=3)


@pytest.fixture(autouse=True)
def clock(monkeypatch):
    """The brokers' clock; its time in ms is set by a test."""
    now = SimpleNamespace(ms=NOW_MS)
    monkeypatch.setattr(StoreClock, "now_ms", lambda _: now.ms)
    return now


async def owned(stage, **policies):
    """The topic at its only broker, which has messages in each partition, and subscriptions at the
    first one."""
    await stage.client.topics.change_policies("t", policies)
    broker = await Brokers(stage).new("a")
    for number in range(stage.topic.partitions):
        await broker.lookup(named(number), authoritative=True)
        topic, partition = await broker.partition(named(number))
        sent = Sent(b"x" * 1000, b"y" * 1000)
        partition.writer.append(sent)
        await sent.over.wait()
    for name in ("s", "t"):
        await topic.subscriptions.make(name)
    return topic


async def positions(stage, name="s"):
    infos = await stage.client.subscriptions.list(stage.topic.id, exact=True, unreadable={})
    return next(dict(info.positions) for info in infos if info.name == name)


def damages(monkeypatch, number):
    since = Partition.since

    async def lost_since(partition, ms):
        if partition.number == number:
            raise GONE
        return await since(partition, ms)

    monkeypatch.setattr(Partition, "since", lost_since)


def test_a_partition_that_cannot_be_read_stops_the_expiry_of_no_other(monkeypatch, caplog, clock):
    async def act(stage):
        topic = await owned(stage, message_ttl_ms=TTL_MS)
        damages(monkeypatch, 0)
        clock.ms += 2 * TTL_MS
        for _ in range(3):
            await topic.backlogs.look()
        assert await positions(stage) == {0: 0, 1: 2, 2: 2}
        lines = [record.message for record in caplog.records if "is judged later" in record.message]
        assert lines == [
            f"the backlog of partition 0 of topic t is judged later: {GONE}",
        ]
        await asyncio.sleep(LOG_EVERY_S)
        await topic.backlogs.look()
        assert caplog.text.count("partition 0 of topic t is judged later") == 2

    play(act, partitions=3)


def test_a_subscription_that_cannot_be_read_stops_the_expiry_of_no_other(caplog, clock):
    async def act(stage):
        topic = await owned(stage, message_ttl_ms=TTL_MS)
        record = paths.subscription(stage.topic.id, "s")
        await stage.client.store.set(record, b"junk", ANY_VERSION)
        clock.ms += 2 * TTL_MS
        await topic.backlogs.look()
        assert await positions(stage, "t") == {0: 2, 1: 2}
        assert "the backlog of subscription 's' of topic t is judged later" in caplog.text

    play(act, partitions=2)


@pytest.mark.parametrize("on_backlog", ["hold", "eviction"])
def test_a_partition_whose_end_cannot_be_read_is_judged_later_than_the_others(
    monkeypatch, caplog, on_backlog
):
    async def act(stage):
        topic = await owned(stage, backlog_bytes_max=1500, on_backlog=on_backlog)
        lost = topic.partition(0).writer.open_end.live.ledger_id
        opened = LedgerStore.open

        async def open_others(ledgers, ledger_id, **options):
            if ledger_id == lost:
                raise GONE
            return await opened(ledgers, ledger_id, **options)

        monkeypatch.setattr(LedgerStore, "open", open_others)
        await topic.backlogs.look()
        assert "the backlog of partition 0 of topic t is judged later" in caplog.text
        if on_backlog == "eviction":
            after = await positions(stage)
            assert (after[0], after[1] > 0) == (0, True)
        else:
            await topic.backlogs.check(0)
            with pytest.raises(Refusal, match="partition 1"):
                await topic.backlogs.check(1)

    play(act, partitions=2)


def test_a_partition_whose_end_cannot_be_read_any_more_keeps_the_last_judgement(monkeypatch):
    async def act(stage):
        topic = await owned(stage, backlog_bytes_max=1500, on_backlog="hold")
        await topic.backlogs.look()

        async def open_none(*_, **options):
            raise GONE

        monkeypatch.setattr(LedgerStore, "open", open_none)
        await topic.backlogs.look()
        with pytest.raises(Refusal, match="partition 0"):
            await topic.backlogs.check(0)

    play(act)


@pytest.mark.parametrize("of_namespace", [False, True])
def test_an_idle_topic_notices_a_time_to_live_within_a_minute_and_reads_nothing_meanwhile(
    monkeypatch, clock, of_namespace
):
    async def act(stage):
        topics, store = stage.client.topics, stage.client.store
        topic = await owned(stage)
        await asyncio.sleep(60)
        reads, get = [], type(store).get

        async def counted_get(self, path, watch=None):
            reads.append(path)
            return await get(self, path, watch)

        monkeypatch.setattr(type(store), "get", counted_get)
        await asyncio.sleep(60)
        assert paths.topic(stage.topic.id) not in reads
        clock.ms += 2 * TTL_MS
        change = {"message_ttl_ms": TTL_MS}
        if of_namespace:
            await topics.set_namespace("public/default", change)
        else:
            await topics.change_policies("t", change)
        await asyncio.sleep(SPREAD_S + 1)
        assert await positions(stage) == {0: 2}
        assert not topic.is_ended

    play(act)
