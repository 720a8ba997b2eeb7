"""Checkpoints made, read and trimmed behind, on simulated bookies and a simulated store."""

from spark_ledger.metadata import paths
from spark_ledger.topic import checkpoint_record
from spark_ledger.topic.actions import Append
from spark_ledger.topic.segments import INLINE, Segment
from tests.unit.spark_ledger.topic.stage import play


def inline(*rows, partition=0, payload=b"p"):
    """A segment in the commit itself, with an entry for each count of rows."""
    return Segment(
        partition,
        INLINE,
        0,
        ((0, len(rows) - 1),),
        rows,
        sum(rows),
        sum(rows) * 10,
        1,
        2,
        inline=tuple(b"%s%d" % (payload, n) for n in range(len(rows))),
    )


async def commits(stage, intent, count, client=None, **options):
    for _ in range(count):
        segment = inline(2, 1, **options)
        await (client or stage.client).commit_actions(stage.topic.id, [Append((segment,))], intent)


def record_of(stage):
    node = stage.world.store.peek(paths.topic_checkpoint(stage.topic.id))
    return None if node is None else checkpoint_record.decode(node.value)


def logged(stage):
    """The numbers of the commits that are left in the log."""
    return [int(n) for n in stage.world.store.peek_children(paths.topic_log(stage.topic.id))]


async def folded(stage):
    """The topic as a new reader finds it."""
    return await (await stage.another()).log(stage.topic.id).fold(fresh=True)


def test_a_topic_is_the_same_from_its_checkpoint_and_the_commits_after_it():
    async def act(stage):
        intent = await stage.intent()
        await commits(stage, intent, 5)
        await stage.client.checkpoints.make(stage.topic.id, intent.id)
        await commits(stage, intent, 3)

        state = await folded(stage)

        assert state.next == 8 and state.end_offsets() == {0: 24}
        assert record_of(stage).next == 5
        assert logged(stage) == list(range(8))

    play(act)
