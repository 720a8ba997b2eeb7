"""The role that a cluster plays for itself while it is up."""

import asyncio
import uuid
from collections.abc import Awaitable, Callable
from functools import partial

import pyarrow as pa
import pytest

from bookie_server.config import BookieConfig
from spark_ledger import errors
from spark_ledger.ledger.client import LedgerStore
from spark_ledger.local import maintenance
from spark_ledger.local.maintenance import maintain, maintain_on
from spark_ledger.process import background_loop, ledger_store
from spark_ledger.topic import blocking
from spark_ledger.topic.commit.commit import TxnKey
from spark_ledger.topic.upkeep import upkeep
from spark_ledger.topic.upkeep.upkeep import Merging
from spark_ledger.topic.write import TaskSettings
from tests.kit.processes import eventually
from tests.kit.segments_seen import segments_of

PATIENCE_S = 90
MANY_SEGMENTS = 8  # so many are merged at once


async def gone(ledgers: LedgerStore, ledger_id: int) -> None:
    async with asyncio.timeout(PATIENCE_S):
        while True:
            try:
                await ledgers.record(ledger_id, fresh=True)
            except errors.NoSuchLedger:
                return
            await asyncio.sleep(0.05)


async def comes_true(condition: Callable[[], Awaitable[bool]]) -> None:
    async with asyncio.timeout(PATIENCE_S):
        while True:
            if await condition():
                return
            await asyncio.sleep(0.05)


def test_who_maintains_a_cluster_has_a_session_as_short_as_a_bookies(monkeypatch):
    asked = []

    async def away(service_url, settings):
        asked.append(settings.session_timeout_s)
        raise errors.Unavailable("not now")

    monkeypatch.setattr(maintenance, "connect", away)
    with pytest.raises(errors.Unavailable):
        asyncio.run(maintain("zk://127.0.0.1:1/ledger"))
    assert asked == [BookieConfig.model_fields["session_timeout_s"].default]


def test_a_cluster_that_is_up_deletes_what_a_finished_writer_left(cluster):
    topics = blocking.topics(cluster.service_url)
    info = topics.run(topics.client.topics.create(f"t-{uuid.uuid4()}"))
    intent = topics.run(topics.client.intents.open_batch_intent(f"app-{info.id}", "run", "t"))
    settings = TaskSettings(inline_bytes_max=0)
    task = topics.task_writer(info, intent, task_index=0, settings=settings)
    task.write(None, pa.array([b"left behind"], pa.binary()))
    ledger_id = task.start_finish()().segments[0].ledger_id

    working = background_loop().submit(maintain(cluster.service_url, pass_s=0.05))
    try:
        topics.run(topics.client.intents.finish(intent.id))
        topics.run(gone(ledger_store(cluster.service_url), ledger_id))
    finally:
        working.cancel()


def test_a_cluster_that_is_up_merges_small_segments_without_being_asked(cluster, monkeypatch):
    monkeypatch.setattr(upkeep, "Merging", partial(Merging, quiet_ms=0))
    topics = blocking.topics(cluster.service_url)
    info = topics.run(topics.client.topics.create(f"t-{uuid.uuid4()}"))
    intent = topics.run(topics.client.intents.open_batch_intent(f"app-{info.id}", "run", "t"))
    for version in range(MANY_SEGMENTS):
        task = topics.task_writer(info, intent, task_index=0)
        task.write(None, pa.array([b"row %d" % version], pa.binary()))
        txn = TxnKey(intent.app_id, intent.target, version, intent.run_id)
        topics.run(topics.client.commit_topics({info.id: [task.start_finish()()]}, txn, intent.id))

    async def merged() -> bool:
        state = await topics.client.log(info.id).fold(fresh=True)
        (partition,) = state.partitions
        return partition.end_offset == MANY_SEGMENTS and len(segments_of(partition)) == 1

    working = background_loop().submit(maintain(cluster.service_url, pass_s=0.05))
    try:
        topics.run(comes_true(merged))
    finally:
        working.cancel()


def test_a_defect_of_upkeep_ends_no_self_healing_for_good(cluster, monkeypatch, caplog):
    begun = []

    async def breaks(_service_url: str, *, merge_bytes: int) -> None:
        begun.append(merge_bytes)
        raise RuntimeError("a defect")

    monkeypatch.setattr(maintenance, "maintain", breaks)
    working = background_loop().submit(maintain_on(cluster.service_url, pause_s=0.01))
    try:
        assert eventually(lambda: len(begun) >= 3)
    finally:
        working.cancel()
    assert "a defect ended maintenance" in caplog.text


def test_maintenance_of_a_cluster_that_is_not_there_says_so():
    with pytest.raises(errors.Unavailable):
        background_loop().run(maintain("zk://127.0.0.1:1/ledger"))
