"""The times that a partition's entries have, from owner to owner."""

import asyncio

from spark_ledger.metadata.store_calls import store_now_ms
from tests.kit.segments_seen import segments_of
from tests.unit.spark_ledger.broker.owners import another_of, owner_of
from tests.unit.spark_ledger.topic.stage import play


def test_the_stamps_of_an_owner_whose_clock_is_late_do_not_fall_below_the_commits_before():
    async def act(stage):
        await asyncio.sleep(1000)
        old = await owner_of(stage)
        old.clock_ms = await store_now_ms(stage.client.store)
        await old.all_stored(old.send([b"a"]))
        await old.writer.close()
        late = await another_of(stage)
        late.clock_ms = old.clock_ms - 500_000
        await late.take()
        await late.all_stored(late.send([b"b"]))
        await late.writer.close()
        state = await stage.client.log(stage.topic.id).fold(fresh=True)
        segments = segments_of(state.partitions[0], 0, 2)
        assert [one.segment.rows for one in segments] == [1, 1]
        assert old.clock_ms <= segments[0].segment.max_ms <= segments[1].segment.min_ms

    play(act)
