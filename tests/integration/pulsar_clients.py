"""Pulsar's own client beside the topics of a real cluster."""

import json
import urllib.error
import urllib.request
import uuid
from contextlib import contextmanager, suppress

import pulsar
import pyarrow as pa

from spark_ledger.topic.commit.commit import TxnKey
from spark_ledger.topic.commit.draft import RowKind
from spark_ledger.topic.entry.message_batch import TYPES, column_of
from spark_ledger.topic.read.plan import plan_read
from spark_ledger.topic.schema.rules import SchemaMode
from spark_ledger.topic.write import TaskSettings
from tests.kit.rows import parts_of

TIMEOUT_MS = 60_000


@contextmanager
def connected(url, **settings):
    quiet = pulsar.ConsoleLogger(pulsar.LoggerLevel.Error)
    client = pulsar.Client(url, logger=quiet, **{"operation_timeout_seconds": 30, **settings})
    try:
        yield client
    finally:
        with suppress(pulsar.AlreadyClosed):  # it tells of a fenced producer, then forgets it
            client.close()


def rows_of(topics, name):
    """(offset, row, published ms) of all that is committed, by partition, once all is sealed or
    not: what is live is looked up by another reader."""
    info = topics.run(topics.client.topics.open(name))
    state = topics.run(topics.client.log(info.id).fold(fresh=True))
    ranges = {p: (0, end) for p, end in state.end_offsets().items()}
    found = {p: [] for p in ranges}
    for task in plan_read(state, ranges):
        for block in topics.read(task):
            for part in parts_of(block):
                columns = [column_of(part.record_batch, one).to_pylist() for one in TYPES]
                rows = zip(*columns, part.each_ms().tolist(), strict=True)
                found[part.partition] += enumerate(rows, part.offset)
    return found


def sealed(topics, name):
    """A batch's commit brings all that was sent before it into commits."""
    write(topics, name, [b"end"] * 40)


def write(topics, name, values, keys=None, event_times_us=None):
    """A batch as Spark writes it."""
    event_times = event_times_us and pa.array(event_times_us, TYPES["event_time"])
    _write(
        topics,
        topics.run(topics.client.topics.open(name)),
        pa.array(keys or [b"%d" % i for i in range(len(values))], pa.binary()),
        pa.array(values, pa.binary()),
        headers=pa.array([[{"key": "from", "value": b"spark"}]] * len(values), TYPES["headers"]),
        event_times=event_times,
    )


def write_columns(topics, name, rows):
    """A batch of typed rows as Spark writes it with schemaMode=evolve; returns the version."""
    info = topics.run(topics.client.topics.open(name))
    version = topics.run(topics.client.schemas.for_write(info, rows.schema, SchemaMode.EVOLVE))
    row_kinds = {info.id: RowKind(frozenset({version.number}), evolves=True)}
    _write(topics, info, None, rows, schema_version=version.number, row_kinds=row_kinds)
    return version.number


def _write(topics, info, *columns, schema_version=0, row_kinds=None, **more_columns):
    app = str(uuid.uuid4())
    intent = topics.run(topics.client.intents.open_batch_intent(app, "run", info.id, random=True))
    settings = TaskSettings(inline_bytes_max=0, schema_version=schema_version)
    partitions = len(topics.run(topics.client.log(info.id).fold(fresh=True)).partitions)
    task = topics.task_writer(info, intent, task_index=0, partitions=partitions, settings=settings)
    task.write(*columns, **more_columns)
    txn = TxnKey(intent.app_id, intent.target, 0, intent.run_id)
    parts = {info.id: [task.start_finish()()]}
    topics.run(topics.client.commit_topics(parts, txn, intent.id, row_kinds=row_kinds or {}))


def ask(admin_url, method, path, body=None, **headers):
    """The status and the JSON of the admin API's response."""
    data = None if body is None else json.dumps(body).encode()
    headers = {"Content-Type": "application/json"} | headers
    request = urllib.request.Request(f"{admin_url}/admin/v2/{path}", data, headers, method=method)
    try:
        with urllib.request.urlopen(request, timeout=30) as answer:
            content = answer.read()
            return answer.status, json.loads(content) if content else None
    except urllib.error.HTTPError as refused:
        return refused.code, json.loads(refused.read())
