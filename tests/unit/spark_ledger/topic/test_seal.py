"""Sealing a live segment, and a batch's commit that comes past one (hazards 29, 30, 32)."""

import pytest

from spark_ledger import errors
from spark_ledger.topic.commit.seal import closed_extent, seal_live_segment
from spark_ledger.topic.log.actions import OpenLive
from tests.unit.spark_ledger.topic.live_segments import with_live
from tests.unit.spark_ledger.topic.stage import play


def test_a_seal_has_the_rows_of_the_last_entrys_header_and_lists_no_entry():
    async def act(stage):
        await with_live(stage, 0, 5, 7, 1)
        state = await stage.client.log(stage.topic.id).fold(fresh=True)
        found = await seal_live_segment(stage.client.ledgers, state.partitions[0].live)
        assert found.segment.counted
        assert found.segment.rows == 13
        assert found.segment.entries == ((0, 2),)

    play(act)


def test_a_live_segment_without_an_entry_is_sealed_as_nothing():
    async def act(stage):
        await with_live(stage, 0)
        state = await stage.client.log(stage.topic.id).fold(fresh=True)
        assert (
            await seal_live_segment(stage.client.ledgers, state.partitions[0].live)
        ).segment is None

    play(act)


def test_rows_that_are_not_those_of_the_closed_record_are_not_sealed():
    async def act(stage):
        owner = await with_live(stage, 0, 5)
        await owner.writer.close()
        known = await stage.client.ledgers.record(owner.writer.ledger_id)
        for entries, rows in ((1, 4), (2, 6), (0, 0)):
            with pytest.raises(errors.UnsupportedFormat, match="ended at entry 0 with 5 rows"):
                closed_extent(known, entries, rows)
        assert closed_extent(known, 1, 5).rows == 5

    play(act)


@pytest.mark.parametrize("overwrite", [False, True])
def test_a_batch_is_committed_past_a_live_segment_whose_owner_is_fenced(overwrite):
    async def act(stage):
        owner = await with_live(stage, 0, 2, 1)
        more = {"overwrites": [stage.topic.id]} if overwrite else {}
        intent = await stage.client.intents.open_batch_intent("job", "run", "t", **more)
        await stage.commit(
            intent, 1, await stage.written(intent, [b"of", b"spark"]), overwrite=overwrite
        )
        found = await stage.rows() if not overwrite else []
        if not overwrite:
            values = [(0, b"0"), (1, b"1"), (2, b"2"), (3, b"of"), (4, b"spark")]
            assert found == values
        state = await stage.client.log(stage.topic.id).fold(fresh=True)
        held = state.partitions[0]
        assert (held.live, held.start_offset, held.end_offset) == (None, 3 if overwrite else 0, 5)
        with pytest.raises(errors.LedgerError):
            await owner.append(1)

    play(act)


def test_a_batch_for_another_partition_leaves_the_live_segment_alone():
    async def act(stage):
        client = stage.client
        intent = await client.intents.open_system_intent("own", "t")
        writer = await client.ledgers.create(3, 2, 2, intent=intent.id, topic=stage.topic.id)
        live = OpenLive(1, writer.ledger_id, 0, "owner", 1)
        await client.commit_actions(stage.topic.id, [live], intent)
        mine = await stage.intent()
        result = await stage.written(mine, [b"x"])
        assert result.segments[0].partition != 1
        await stage.commit(mine, 1, result)
        await writer.append(b"still")

    play(act, partitions=3)
