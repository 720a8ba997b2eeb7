"""Which plans of Spark look into every entry for chunks of messages, and the rows they read."""

from spark_ledger.spark.options.options import batch_read_options
from spark_ledger.spark.read.planning import Planner
from spark_ledger.topic.read.live import LiveEnds
from spark_ledger.topic.task_reader import fetch_with_replans, with_chunks
from tests.kit.pulsar_batches import chunked
from tests.kit.rows import read_rows
from tests.unit.spark_ledger.broker.owners import owner_of
from tests.unit.spark_ledger.broker.sending import WHOLE, Sending, all_sent, closed
from tests.unit.spark_ledger.topic.stage import play


async def planned_by_spark(client, stage, lo, hi):
    """The tasks of a read of Spark's."""
    state, live = await client.log(stage.topic.id).fold(fresh=True), LiveEnds(client.ledgers)
    await live.refresh(held.live for held in state.partitions if held.live is not None)
    planner = Planner(client, live, batch_read_options({"topic": "t"}))
    return await planner.plan({"t": state}, {"t": {0: lo}}, {"t": {0: hi}})


async def values_of(client, tasks):
    values = []
    for task in tasks:
        async for part in read_rows(client, task):
            values += part.record_batch.column("value").to_pylist()
    return values


def test_sparks_tasks_look_for_chunks_only_in_partitions_that_have_some():
    async def act(stage):
        owner = await owner_of(stage)
        sending = Sending(owner)
        sending.lone(b"before")
        await all_sent(owner)
        tasks = await planned_by_spark(stage.client, stage, 0, 1)
        assert [task.chunked for task in tasks] == [False]
        fetched = fetch_with_replans(stage.client, tasks[0])
        assert with_chunks(stage.client, tasks[0], fetched) is fetched
        assert await values_of(stage.client, tasks) == [b"before"]

        sending.send(*chunked(WHOLE, 3))
        sending.lone(b"after")
        await all_sent(owner)
        live = await planned_by_spark(stage.client, stage, 0, 5)
        assert await values_of(stage.client, live) == [b"before", WHOLE, b"after"]
        await closed(owner)
        sealed = await planned_by_spark(stage.client, stage, 0, 5)
        assert await values_of(stage.client, sealed) == [b"before", WHOLE, b"after"]
        assert [task.chunked for task in (*live, *sealed)] == [True, True]
        assert await values_of(stage.client, live) == [b"before", WHOLE, b"after"]

        following = await owner_of(stage)
        Sending(following).lone(b"later")
        await all_sent(following)
        live = await planned_by_spark(stage.client, stage, 3, 6)
        assert [task.live is None for task in live] == [True, False]
        assert [task.chunked for task in live] == [True, True]
        assert await values_of(stage.client, live) == [WHOLE, b"after", b"later"]
        await closed(following)

    play(act)
