"""Topics on real processes, through the blocking facade that Spark's tasks and drivers use."""

import random
import uuid

import pyarrow as pa
import pytest

from spark_ledger import LedgerClient, errors
from spark_ledger.topic.commit.commit import CommitKind, TxnKey
from spark_ledger.topic.entry.message_batch import column_of
from spark_ledger.topic.entry.routing import Routing
from spark_ledger.topic.log.segments import INLINE
from spark_ledger.topic.read.plan import Cutting, plan_read
from spark_ledger.topic.upkeep.janitor import Janitor
from spark_ledger.topic.write import TaskSettings
from tests.integration.topic_rows import read_all, write_and_commit


@pytest.mark.parametrize("compression", ["none", "lz4", "zstd"])
def test_what_tasks_write_is_read_after_its_commit_once(topics, compression):
    info = topics.run(topics.client.topics.create(f"t-{uuid.uuid4()}", 3))
    rng = random.Random(7)
    rows = [b"%06d" % n + rng.randbytes(300) for n in range(20_000)]

    first = write_and_commit(topics, info, 0, rows, compression)
    again = write_and_commit(topics, info, 0, rows, compression)

    assert (first.kind, again.kind) == (CommitKind.COMMITTED, CommitKind.ALREADY)
    assert sorted(read_all(topics, info)) == rows
    assert sorted(read_all(topics, info, cutting=Cutting(20))) == rows


def test_a_reader_that_stops_early_can_read_again(topics):
    info = topics.run(topics.client.topics.create(f"t-{uuid.uuid4()}"))
    write_and_commit(topics, info, 0, [b"x" * 1000] * 20_000)
    state = topics.run(topics.client.log(info.id).fold(fresh=True))
    (task,) = plan_read(state, {0: (0, 20_000)})

    for _ in range(3):
        reading = topics.read(task)
        assert next(reading).place_of(0) == (0, 0)
        reading.close()

    assert sum(rows.record_batch.num_rows for rows in topics.read(task)) == 20_000


def test_a_row_too_big_fails_its_task_and_the_next_one_goes_on(topics):
    info = topics.run(topics.client.topics.create(f"t-{uuid.uuid4()}"))
    intent = topics.run(topics.client.intents.open_batch_intent("app", "run", "target"))
    task = topics.task_writer(info, intent, task_index=0)

    with pytest.raises(errors.MessageTooBig):
        task.write(None, pa.array([b"fits", b"x" * (16 << 20)], pa.binary()))
    task.abort()

    write_and_commit(topics, info, 0, [b"a"])
    assert read_all(topics, info) == [b"a"]


def test_the_janitor_takes_what_an_ended_run_left(topics):
    info = topics.run(topics.client.topics.create(f"t-{uuid.uuid4()}"))
    client = topics.client
    intent = topics.run(client.intents.open_batch_intent(f"app-{info.id}", "run", "target"))
    settings = TaskSettings(inline_bytes_max=0)
    task = topics.task_writer(info, intent, task_index=0, settings=settings)
    task.write(None, pa.array([b"left behind"], pa.binary()))
    ledger_id = task.start_finish()().segments[0].ledger_id

    report = topics.run(
        Janitor(client.store, client.ledgers, client.rng).clean(condemn=[intent.id])
    )

    assert ledger_id in report.deleted
    with pytest.raises(errors.NoSuchLedger):
        topics.run(client.ledgers.record(ledger_id, fresh=True))


def test_a_ledger_of_a_topic_is_not_the_ledger_clients_to_delete(cluster, topics):
    info = topics.run(topics.client.topics.create(f"t-{uuid.uuid4()}"))
    rows = [b"kept" + b"x" * 10_000]
    write_and_commit(topics, info, 0, rows)
    (ledger_id,) = topics.run(topics.client.log(info.id).fold(fresh=True)).ledgers()

    with LedgerClient(cluster.service_url) as client, pytest.raises(errors.LedgerInUse):
        client.delete_ledger(ledger_id)

    assert read_all(topics, info) == rows


@pytest.mark.parametrize("inline_bytes_max", [0, 8192])
def test_columns_of_a_task_in_a_ledger_or_in_the_commit_come_back_by_partition(
    topics, inline_bytes_max
):
    info = topics.run(topics.client.topics.create(f"t-{uuid.uuid4()}", 5))
    intent = topics.run(topics.client.intents.open_batch_intent(f"app-{info.id}", "run", "t"))
    settings = TaskSettings(routing=Routing.COLUMN, inline_bytes_max=inline_bytes_max)
    task = topics.task_writer(info, intent, task_index=0, settings=settings)
    times = pa.array([1_000_000, None, 3_000_000], pa.timestamp("us", tz="UTC"))
    headers = pa.array([None, [{"key": "h", "value": b"1"}], None])
    task.write(
        None,
        pa.array([b"a", b"b", b"c"]),
        event_times=times,
        headers=headers,
        partitions=pa.array([4, 1, 4]),
    )
    result = task.start_finish()()
    txn = TxnKey(intent.app_id, intent.target, 0, intent.run_id)
    topics.run(topics.client.commit_topics({info.id: [result]}, txn, intent.id))

    assert {s.ledger_id == INLINE for s in result.segments} == {inline_bytes_max > 0}
    state = topics.run(topics.client.log(info.id).fold(fresh=True))
    (task_of_4,) = plan_read(state, {4: (0, 2)})
    (rows,) = topics.read(task_of_4)
    assert column_of(rows.record_batch, "value").to_pylist() == [b"a", b"c"]
    assert column_of(rows.record_batch, "event_time").equals(times.take(pa.array([0, 2])))
    assert column_of(rows.record_batch, "headers").null_count == 2
    assert column_of(rows.record_batch, "key").null_count == 2
