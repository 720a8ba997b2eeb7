"""A topic followed over a metadata store that went back."""

import asyncio

import pyarrow as pa

from spark_ledger.metadata import hold
from spark_ledger.metadata.cluster import Hold
from spark_ledger.topic.commit.draft import TxnKey
from tests.kit.loop_task import LoopTask
from tests.simulation.restoring import go_back
from tests.simulation.world import CLUSTER_ID


async def committed(stage, client, run_id, version, rows):
    """A commit of a process that has no memory of the store before."""
    intent = await client.intents.open_query_intent("other", run_id, "t")
    task = LoopTask(client, stage.topic, intent, task_index=0)
    column = pa.array(rows, pa.binary())
    await task.write(column, column)
    txn = TxnKey("other", "t", version, run_id)
    await client.commit_topics({stage.topic.id: [await task.finish()]}, txn, intent.id)


async def accepted_older(stage, copy, pause_s):
    go_back(stage.world.store, copy)
    await asyncio.sleep(pause_s)
    await hold.put(stage.world.store.session("bookie"), CLUSTER_ID, Hold("older", "b1"))
    await asyncio.sleep(pause_s)
    await hold.accept(stage.world.store.session("person"))
