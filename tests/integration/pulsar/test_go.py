"""Pulsar's client for Go on a topic of Spark's rows."""

import uuid
from decimal import Decimal
from pathlib import Path

import pyarrow as pa
import pytest

from spark_ledger.topic import blocking
from spark_ledger.topic.log.policies import TopicPolicies
from tests.integration.pulsar_clients import write_columns
from tests.kit import pulsar_go


def test_typed_rows_are_objects_to_go_and_gos_objects_stand_beside_them(cluster, tmp_path):
    topic = f"persistent://public/default/go-{uuid.uuid4()}"
    topics = blocking.topics(cluster.service_url)
    topics.run(topics.client.topics.create(topic, 1, TopicPolicies(partitioned=False)))
    columns = {
        "id": pa.array([1, 2]),
        "price": pa.array([Decimal("12.50"), None], pa.decimal128(30, 2)),
        "data": pa.array([b"bytes", None]),
        "place": pa.array([{"city": "Bern"}, None]),
        "names": pa.array([["a", "b"], None]),
        "counts": pa.array([[("x", 1)], None], pa.map_(pa.string(), pa.int64())),
    }
    write_columns(topics, topic, pa.record_batch(columns))
    program = Path(__file__).with_name("objects.go")
    try:
        said = pulsar_go.run(program, tmp_path / "objects", cluster.broker_url, topic)
    except pulsar_go.GoMissing as missing:
        pytest.skip(f"Pulsar's client for Go is not here: {missing}")
    assert dict(line.split(": ", 1) for line in said.splitlines()) == {
        "row": "1 12.50 bytes Bern [a b] map[x:1]",
        "version": "AAAAAAAAAAA=",
        "nulls": "true",
        "of Go": "3 7.00 go",
        "a wrong type": "true",
        "by the version's schema": "1 Bern",
    }
