"""Merging ends: what is merged is not merged again, also where entries take few rows."""

import random
import zlib
from dataclasses import replace

import pyarrow as pa
import pytest

from spark_ledger.topic.upkeep.compactor import compact
from tests.kit.loop_task import LoopTask
from tests.kit.pulsar_batches import batch_of, chunked, message
from tests.kit.settings import with_settings
from tests.unit.spark_ledger.broker.owners import owner_of
from tests.unit.spark_ledger.broker.sending import Sending, all_sent, rows_between
from tests.unit.spark_ledger.topic.batches import batches_of, produced
from tests.unit.spark_ledger.topic.merged_segments import seen, segments
from tests.unit.spark_ledger.topic.stage import TO_A_LEDGER, play

ROUNDS_MAX = 3
ZLIB = {"compression": 2, "compress": zlib.compress}


async def rounds_until_rest(stage):
    for count in range(ROUNDS_MAX + 1):
        if not (await compact(stage.client, "t")).segments:
            return count
    raise AssertionError(f"segments were merged in each of {ROUNDS_MAX + 1} rounds")


@pytest.mark.parametrize("bytes_max", [10, 900, 2900])
@pytest.mark.parametrize("typed", [False, True])
def test_rows_of_spark_are_merged_until_they_fill_their_entries(typed, bytes_max):
    async def act(stage):
        rng = random.Random(bytes_max)
        intent = await stage.client.intents.open_batch_intent("app", "r", "t")
        results = []
        for task in range(12):
            values = [rng.randbytes(rng.randint(1, bytes_max)) for _ in range(rng.randint(1, 3))]
            if not typed:
                results.append(await stage.written(intent, values, task))
                continue
            settings = replace(TO_A_LEDGER, schema_version=1)
            writer = LoopTask(stage.client, stage.topic, intent, task_index=task, settings=settings)
            keys = pa.array([b"k"] * len(values), pa.binary())
            own = {"n": [task] * len(values), "s": pa.array(values, pa.binary())}
            await writer.write(keys, pa.RecordBatch.from_pydict(own))
            results.append(await writer.finish())
        await stage.commit(intent, 0, *results, finish_intent=True)
        before, count = await seen(stage), len(await segments(stage))

        await rounds_until_rest(stage)

        assert await seen(stage) == before
        assert len(await segments(stage)) <= count

    play(act)


@pytest.mark.parametrize("bytes_max", [10, 900, 3000])
@pytest.mark.parametrize("codec", [{}, ZLIB], ids=["plain", "compressed"])
def test_batches_of_producers_are_merged_until_they_fill_their_entries(
    monkeypatch, codec, bytes_max
):
    rng = random.Random(bytes_max)

    def padded(messages):
        values = [rng.randbytes(rng.randint(1, bytes_max)) for _ in messages]
        return batch_of([message(value) for value in values], **codec)

    monkeypatch.setattr("tests.unit.spark_ledger.topic.batches.batch_of", padded)

    async def act(stage):
        await produced(stage, (1, 1), (2,), (1,), (1, 1, 1), (2,))
        state = await stage.client.log(stage.topic.id).fold(fresh=True)
        before, rows = await batches_of(stage.client, state), await stage.rows()

        assert await rounds_until_rest(stage) > 0

        state = await stage.client.log(stage.topic.id).fold(fresh=True)
        assert await batches_of(stage.client, state) == before
        assert await stage.rows() == rows

    play(act)


@pytest.mark.parametrize("codec", [{}, ZLIB], ids=["plain", "compressed"])
def test_messages_in_chunks_are_merged_until_they_fill_their_entries(codec):
    rng = random.Random(1)

    async def act(stage):
        for number in range(4):
            owner = await owner_of(stage, name=f"b{number}")
            sending = Sending(owner, name=f"p{number}")
            sending.send(*chunked(rng.randbytes(15_000), 5, uuid=f"u{number}", **codec))
            sending.lone(b"%d" % number)
            await all_sent(owner)
            await owner.writer.close()
        before = await rows_between(await stage.another(), stage, 0, 24)
        assert [offset for offset, _ in before] == [4, 5, 10, 11, 16, 17, 22, 23]

        assert await rounds_until_rest(stage) > 0
        assert await rows_between(await stage.another(), stage, 0, 24) == before

    play(act)


def test_rows_that_are_larger_than_entries_may_be_now_stay_where_they_are(monkeypatch, caplog):
    async def act(stage):
        intent = await stage.intent()
        for version in range(6):
            value = b"%d" % version * (3000 if version == 2 else 1)
            await stage.commit(intent, version, await stage.written(intent, [value]))
            await stage.client.cache.close()
        rows = await stage.rows()
        config = with_settings(stage.client.ledgers.config, entry_bytes_max=3000)
        monkeypatch.setattr(stage.client.ledgers, "config", config)

        assert await rounds_until_rest(stage) <= 1
        assert await stage.rows() == rows

    play(act)
    assert "stay as they are: " in caplog.text
