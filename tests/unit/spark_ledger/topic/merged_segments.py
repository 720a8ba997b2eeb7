"""The segments of a topic, before and after they are merged."""

from spark_ledger.topic.read.plan import plan_read
from spark_ledger.topic.upkeep import compactor
from tests.kit.segments_seen import segments_of
from tests.kit.slices import read_task


async def seen(stage, partition=0):
    """All a reader sees: (offset, written, columns)."""
    client = await stage.another()
    state = await client.log(stage.topic.id).fold(fresh=True)
    held = state.partitions[partition]
    ranges = {partition: (held.start_offset, held.end_offset)}
    found = []
    for task in plan_read(state, ranges, read=await client.tables(state, ranges)):
        async for rows in read_task(client.ledgers, task):
            each = zip(rows.each_ms().tolist(), rows.record_batch.to_pylist(), strict=True)
            for at, (written_ms, row) in enumerate(each, rows.offset):
                found.append((at, written_ms, row))
    return found


async def all_merged(stage, compaction):
    """What was written for the tasks of a round."""
    tasks, intent = await compaction.plan(), compaction.intent
    made = [await compactor.merge(stage.client, stage.topic, intent, one) for one in tasks]
    return [merged for some in made for merged in some]


async def segments(stage, partition=0):
    state = await stage.client.log(stage.topic.id).fold(fresh=True)
    return segments_of(state.partitions[partition])
