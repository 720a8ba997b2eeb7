"""docs/from-pulsar.md is run as it stands, from a cluster that stands for Pulsar: only the ports of
the new cluster are others."""

import os
import subprocess
import sys
from pathlib import Path

import pulsar
import pytest

from spark_ledger.local.processes import free_port
from tests.integration.pulsar_clients import ask, connected
from tests.spark.pages import blocks

ROOT = Path(__file__).resolve().parents[2]
PAGE = ROOT / "docs" / "from-pulsar.md"
PORTS = ("2281", "6651", "8081")
TOPIC = "persistent://shop/orders/placed"
STEPS = 10
READ = (0, 1, 8)
"""The orders that were read before, the last one beyond a gap."""


class Order(pulsar.schema.Record):
    item = pulsar.schema.String()
    count = pulsar.schema.Integer()


@pytest.fixture
def old(cluster):
    """A namespace of an old cluster: ten orders, some of which are read, and two notes."""
    requests = {
        "PUT tenants/shop": {"allowedClusters": ask(cluster.admin_url, "GET", "clusters")[1]},
        "PUT namespaces/shop/orders": {},
        "POST namespaces/shop/orders/messageTTL": 7 * 86_400,
        "PUT persistent/shop/orders/placed/partitions": 2,
        "PUT persistent/shop/orders/notes": None,
    }
    for request, body in requests.items():
        method, path = request.split()
        assert ask(cluster.admin_url, method, path, body) == (204, None), request
    with connected(cluster.broker_url) as client:
        schema = pulsar.schema.JsonSchema(Order)
        consumer = client.subscribe(TOPIC, "billing", schema=schema)
        notes = client.create_producer("persistent://shop/orders/notes")
        for text in (b"first", b"second"):
            notes.send(text)
        producer = client.create_producer(TOPIC, schema=schema)
        for count in range(10):
            item = f"item {count % 3}"
            producer.send(Order(item=item, count=count), partition_key=item)
        for _ in range(10):
            message = consumer.receive(30_000)
            if message.value().count in READ:
                consumer.acknowledge(message)
    yield cluster
    ask(cluster.admin_url, "DELETE", "namespaces/shop/orders?force=true")
    ask(cluster.admin_url, "DELETE", "tenants/shop")


def test_the_ten_steps_move_a_namespace_as_they_stand(old, tmp_path):
    text = PAGE.read_text()
    for port in PORTS:
        text = text.replace(port, str(free_port()))
    page = tmp_path / PAGE.name
    page.write_text(text)
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
    environment = {
        **os.environ,
        "OLD_URL": old.broker_url,
        "OLD_ADMIN": old.admin_url,
        "PATH": path,
        "PYTHONPATH": os.pathsep.join([str(ROOT), *sys.path]),
        "SPARK_LOCAL_IP": "127.0.0.1",
    }
    try:
        done = subprocess.run(
            [sys.executable, "-m", "tests.spark.pages", str(page)],
            cwd=tmp_path,
            env=environment,
            capture_output=True,
            text=True,
            timeout=600,
        )
    finally:
        down = ["spark-ledger", "down", "--data-dir", "new-cluster"]
        subprocess.run(down, cwd=tmp_path, env=environment, check=False)
    assert done.returncode == 0, f"{done.stdout[-2000:]}\n{done.stderr[-3000:]}"


def test_there_are_ten_steps_and_no_code_on_the_page_that_is_not_run():
    text = PAGE.read_text()
    assert [block.line for block in blocks(PAGE) if block.name is None] == []
    for number in range(1, STEPS + 1):
        section = text[text.index(f"\n### {number}. ") :].split("\n#", 2)[1]
        assert "<!-- run: " in section, f"step {number} shows nothing"
    assert f"\n### {STEPS + 1}." not in text
