"""What a task's rows take in memory, counted, while one of three bookies does not answer."""

import gc
import random
from collections.abc import Iterator

import pyarrow as pa
import pytest

from spark_ledger.ledger.quorum import PendingAdd
from spark_ledger.topic.client import TopicClient
from spark_ledger.topic.log.policies import TopicPolicies
from spark_ledger.topic.write import TaskSettings
from tests.kit.loop_task import LoopTask
from tests.unit.spark_ledger.ledger.fakes import cluster_of, simulated

MIB = 1 << 20
ROW_BYTES = 4096
BATCH_ROWS = 64


@pytest.fixture(autouse=True)
def _older_objects_are_not_asked() -> Iterator[None]:
    """They are many more than those of a test, and each would be asked after every write."""
    gc.collect()
    gc.freeze()
    yield
    gc.unfreeze()


def sent_bytes() -> int:
    """Of entries that were sent and not answered by every bookie, whoever keeps them."""
    return sum(one.size for one in gc.get_objects() if isinstance(one, PendingAdd))


async def most_held(whole: int, written_bytes: int, policies: TopicPolicies | None = None) -> int:
    """Write so much with an allowance of `whole` bytes; the most that was held at a time."""
    cluster, ledgers = await cluster_of(3)
    client = TopicClient(ledgers, random.Random(1), lambda: 1)
    topic = await client.topics.create("t", policies=policies)
    intent = await client.intents.open_query_intent("q", "r", "t")
    settings = TaskSettings(inflight_bytes_max=whole)
    writer = LoopTask(client, topic, intent, task_index=0, settings=settings)
    cluster.bookies["a"].silent = True
    assert sent_bytes() == 0
    most = 0
    for number in range(written_bytes // ROW_BYTES // BATCH_ROWS):
        column = pa.array([b"%d" % number + b"x" * ROW_BYTES] * BATCH_ROWS, pa.binary())
        await writer.write(None, column)
        most = max(most, writer._encoder.waiting_bytes + sent_bytes())
    result = await writer.finish()
    assert sum(one.bytes for one in result.segments) > written_bytes
    await client.close()
    return most


@pytest.mark.parametrize("whole", [MIB, 4 * MIB, 64 * MIB])
@simulated
async def test_copies_that_a_hung_bookie_owes_count_in_what_a_task_may_hold(whole):
    assert await most_held(whole, max(24 * MIB, 2 * whole)) <= whole


@simulated
async def test_what_ledgers_left_behind_are_owed_counts_too():
    assert await most_held(4 * MIB, 24 * MIB, TopicPolicies(ledger_bytes_max=MIB)) <= 4 * MIB
