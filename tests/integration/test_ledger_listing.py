"""Ledger records in a real ZooKeeper: many of them, and one that is too large."""

import asyncio
import dataclasses
from collections.abc import Iterator
from pathlib import Path

import pytest

from spark_ledger.errors import RecordTooBig
from spark_ledger.ledger.records import LedgerRecords
from spark_ledger.local.embedded_zookeeper import EmbeddedZooKeeper
from spark_ledger.metadata import cluster, ledger_record, paths
from spark_ledger.metadata.ledger_record import Fragment, LedgerRecord
from spark_ledger.metadata.store import Create, ValueTooBig
from spark_ledger.metadata.zookeeper import ZooKeeperStore, connect

IDS = range(4_000, 24_000)  # over three folders
BATCH = 500


@pytest.fixture(scope="module")
def zookeeper(tmp_path_factory: pytest.TempPathFactory) -> Iterator[EmbeddedZooKeeper]:
    server = EmbeddedZooKeeper(Path(tmp_path_factory.mktemp("zookeeper")))
    server.start()
    yield server
    server.stop()


def record_of(ledger_id: int) -> LedgerRecord:
    return LedgerRecord(ledger_id, 3, 3, 2, (Fragment(0, ("a", "b", "c")),), creator="me")


async def a_cluster(zookeeper: EmbeddedZooKeeper, root: str) -> ZooKeeperStore:
    store = await connect(f"zk://{zookeeper.address}/{root}")
    await cluster.ensure(store, "a cluster")
    return store


def test_twenty_thousand_ledgers_are_listed_whole_and_in_order(
    zookeeper: EmbeddedZooKeeper,
) -> None:
    async def scenario() -> None:
        store = await a_cluster(zookeeper, "many")
        records = LedgerRecords(store)
        firsts = [ledger_id for ledger_id in IDS if ledger_id in (IDS[0], 10_000, 20_000)]
        for ledger_id in firsts:  # makes the folders
            await records.create(record_of(ledger_id))
        others = [ledger_id for ledger_id in IDS if ledger_id not in firsts]
        creations = [
            Create(paths.ledger(ledger_id), ledger_record.encode(record_of(ledger_id)))
            for ledger_id in others
        ]
        batches = [creations[at : at + BATCH] for at in range(0, len(creations), BATCH)]
        await asyncio.gather(*(store.multi(batch) for batch in batches))
        other = await connect(f"zk://{zookeeper.address}/many")
        assert [ledger_id async for ledger_id in LedgerRecords(other).list()] == [*IDS]
        await store.close()
        await other.close()

    asyncio.run(scenario())


def test_a_record_or_a_value_beyond_the_limit_is_refused_and_the_session_lives_on(
    zookeeper: EmbeddedZooKeeper,
) -> None:
    async def scenario() -> None:
        store = await a_cluster(zookeeper, "large")
        records = LedgerRecords(store)
        session = store.session_id
        with pytest.raises(RecordTooBig, match="524288"):
            large = {"key": "v" * 600_000}
            await records.create(dataclasses.replace(record_of(1), custom=large))
        with pytest.raises(ValueTooBig, match="1000000"):
            await store.create("/large", bytes(1_000_001))
        with pytest.raises(ValueTooBig):
            await store.multi([Create("/one", bytes(600_000)), Create("/two", bytes(600_000))])
        await store.create("/largest", bytes(1_000_000))
        fitting = dataclasses.replace(record_of(1), custom={"key": "v" * 520_000})
        assert (await records.create(fitting)).version == 0
        assert [ledger_id async for ledger_id in records.list()] == [1]
        assert store.session_id == session
        await store.close()

    asyncio.run(scenario())
