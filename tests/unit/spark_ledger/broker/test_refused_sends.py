"""SENDs that would take too much memory or time: they are refused, and those around them taken."""

import asyncio
from itertools import pairwise

import pyarrow as pa
import pytest

from spark_ledger.topic.entry.pulsar_batch import WALKED_MESSAGES_MAX
from tests.kit.pulsar_batches import batch_of, chunked, lone, message
from tests.unit.spark_ledger.broker.connections import LONG, Partition, connected, runs_of, sent
from tests.unit.spark_ledger.broker.sessions import TOPIC, session_of
from tests.unit.spark_ledger.topic.stage import play


@pytest.mark.parametrize(
    ("batch", "what"),
    [
        (lone(message(b"x"), producer=LONG, sequence_id=1), "the name of a producer has 1026"),
        (batch_of([message(b"x")], producer=LONG, sequence_id=1), "the name of a producer has"),
        (chunked(b"xy", 2, uuid=LONG, sequence_id=1)[0], "the name of a chunked message has 1026"),
    ],
)
def test_a_send_under_a_longer_name_than_is_remembered_is_refused(batch, what):
    runs, answers = asyncio.run(runs_of([sent(1, 0), sent(1, 1, batch), sent(1, 2)]))
    assert [numbers for _, numbers in runs] == [[0], [2]]
    assert what in answers[1].send_error.message


def test_a_batch_beyond_the_size_that_its_topic_takes_is_refused_and_those_around_it_are_stored():
    async def act(stage):
        broker, session = await session_of(stage)
        await broker.client.topics.change_policies("t", {"message_bytes_max": 200})
        await session.answer("producer_success", "producer", topic=TOPIC, producer_id=1)
        payloads = [b"x", b"y", b"x" * 300, b"z", b"x"]
        batches = [lone(message(data), sequence_id=at) for at, data in enumerate(payloads)]
        batches.append(batch_of([message(b"x" * 300)], sequence_id=5))
        frames = [sent(1, at, batch) for at, batch in enumerate(batches)]
        session.connection.data_received(b"".join(frames))
        for at in range(6):
            name = "send_error" if at in (2, 5) else "send_receipt"
            answer = await session.socket.answer(name)
            assert answer.sequence_id == at
            if name == "send_error":
                assert (answer.error, "message size" in answer.message) == (22, True)
        await broker.client.topics.change_policies("t", {"message_bytes_max": None})
        session.ask("send", batches[2], producer_id=1, sequence_id=6, num_messages=1)
        assert (await session.socket.answer("send_error")).sequence_id == 6
        await session.answer("producer_success", "producer", topic=TOPIC, producer_id=2)
        session.ask("send", batches[2], producer_id=2, sequence_id=0, num_messages=1)
        assert (await session.socket.answer("send_receipt")).producer_id == 2
        session.connection.connection_lost(None)
        await broker.seal()

    play(act)


@pytest.mark.parametrize("deduplication", [False, True])
@pytest.mark.parametrize("names_highest", [False, True])
def test_of_a_batch_too_long_to_walk_deduplication_needs_the_highest_sequence_id(
    deduplication, names_highest
):
    many = [message(b"x")] * (WALKED_MESSAGES_MAX + 1)
    batch = batch_of(many, sequence_id=1, names_highest=names_highest)
    runs, answers = asyncio.run(
        runs_of([sent(1, 0), sent(1, 1, batch), sent(1, 10**6)], deduplication=deduplication)
    )
    refused = [one.send_error for one in answers if one.HasField("send_error")]
    assert len(refused) == (deduplication and not names_highest)
    for one in refused:
        assert f"a batch of {len(many)} messages" in one.message
    assert sum(len(numbers) for _, numbers in runs) == 3 - len(refused)


# -- steps -----------------------------------------------------------------------------------------


def zeros(count, sequence_id):
    """A batch of many messages in few bytes, whose last sequence id is to be found."""
    compress = pa.Codec("zstd").compress
    return batch_of(
        [message(bytes(200))] * count,
        sequence_id=sequence_id,
        names_highest=False,
        compression=3,
        compress=lambda data: compress(data, asbytes=True),
    )


def test_a_client_whose_batches_take_long_to_walk_leaves_turns_to_others():
    frames = [sent(1, 100 + 8000 * n, zeros(8000, 100 + 8000 * n)) for n in range(12)]
    assert len(b"".join(frames)) < 256 << 10, "so much comes in one read"

    async def main():
        async with connected() as (connection, _):
            partition = Partition(deduplication=True)
            partition.produce(connection, 1)
            steps = []
            connection.data_received(b"".join((*frames, sent(1, 10**6))))
            async with asyncio.timeout(30):
                while not steps or steps[-1] < 13:
                    steps.append(sum(len(numbers) for _, numbers in partition.runs))
                    assert connection.is_read == (steps[-1] == 13)
                    await asyncio.sleep(0)
            connection.close()
            return steps, [number for _, numbers in partition.runs for number in numbers]

    steps, numbers = asyncio.run(main())
    assert max(after - before for before, after in pairwise([0, *steps])) == 2  # of 20,000 messages
    assert numbers == [*(100 + 8000 * n for n in range(12)), 10**6]
