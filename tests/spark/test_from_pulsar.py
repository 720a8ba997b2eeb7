"""docs/from-pulsar.md is run as it stands, from a cluster that stands for Pulsar: only the ports of
the new cluster are others."""

import json
import os
import subprocess
import sys
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace

import _pulsar
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


@pytest.fixture
def names():
    """What the block of step 7 defines, without its last part, which runs it."""
    block = next(block for block in blocks(PAGE) if block.name == "bridge")
    names = {"schemas": {}}
    exec(block.text[: block.text.index("\n\nquiet = ")], names)
    return names


def message_at(ledger, entry, index=-1):
    id_ = pulsar.MessageId(0, ledger, entry, index)
    return SimpleNamespace(message_id=lambda: id_)


def test_the_bridges_sequence_rises_with_ledger_entry_and_index(names):
    edge = 2**20
    places = [
        *((0, entry) for entry in (0, 1, edge - 1)),
        *((0, edge, index) for index in (-1, 1, 2, 999, 4_095)),
        (0, edge + 1),
        (0, 2**26 - 1, 4_095),
        (1, 0),
        (1, edge),
        (2**25 - 1, 2**26 - 1, 4_094),
    ]
    sequences = [names["sequence_of"](message_at(*place), is_ours=False) for place in places]
    assert sequences[0] > 0, "Python's client takes 0 for no sequence id"
    assert all(one < following for one, following in pairwise(sequences))
    assert sequences[-1] < 2**63


@pytest.mark.parametrize("place", [(2**25, 0), (1, 2**26), (1, 0, 4_096)])
def test_a_place_for_which_a_sequence_has_no_room_is_an_error_in_words(names, place):
    with pytest.raises(ValueError, match="does not fit into a sequence id"):
        names["sequence_of"](message_at(*place), is_ours=False)


def test_of_our_own_partition_the_offset_alone_is_the_sequence(names):
    places = [(0, -1), (1, -1), (2, 0), (2, 1), (2, 5_000), (5_003, -1), (2**27, 3)]
    messages = [message_at(2**46 + 1, *place) for place in places]
    sequences = [names["sequence_of"](message, is_ours=True) for message in messages]
    assert sequences == [1, 2, 3, 4, 5_003, 5_004, 2**27 + 4]


class Renamed:
    """A client whose producers send to another topic, as if that were in another cluster."""

    def __init__(self, client, topic):
        self.client, self.topic = client, topic

    def create_producer(self, _, **settings):
        return self.client.create_producer(self.topic, **settings)


def record(name):
    field = {"name": name, "type": ["null", "int"], "default": None}
    return json.dumps({"type": "record", "name": "R", "fields": [field]})


VERSIONS = {0: ("a", b'{"a": 1}'), 1: ("b", b'{"b": 2}')}


def test_the_bridge_keeps_nulls_keys_and_the_version_of_each_value(cluster, names):
    old, new = (f"persistent://public/default/bridged-{end}" for end in ("old", "new"))

    def admin(method, path, body=None):
        answer = ask(cluster.admin_url, method, path, body)
        assert answer[0] in (200, 204), (method, path, answer)
        return answer[1]

    properties = {"__alwaysAllowNull": "true"}
    for topic in (old, new):
        admin("PUT", topic.replace("://", "/"))
        for field, _ in VERSIONS.values():
            body = {"type": "JSON", "schema": record(field), "properties": properties}
            admin("POST", f"schemas/{topic.partition('://')[2]}/schema", body)
    names["ask"] = lambda _, path: admin("GET", path)
    with connected(cluster.broker_url) as client:
        for version, (_, value) in VERSIONS.items():
            schema = names["schema_of"](client, old, version)
            producer = client.create_producer(old, schema=schema)
            producer.send(value, partition_key="key", ordering_key="order")
            producer.send(None, partition_key="gone", properties={"p": "1"}, event_timestamp=7)
        arguments = (client, None, Renamed(client, new), old, "moving")
        assert names["bridge"](*arguments) == 2 * len(VERSIONS)
        assert names["bridge"](*arguments) == 0, "all is acknowledged"
        earliest = pulsar.InitialPosition.Earliest
        consumers = [client.subscribe(one, "s", initial_position=earliest) for one in (old, new)]
        seen = set()
        for _ in range(2 * len(VERSIONS)):
            before, after = (facts(consumer.receive(30_000)) for consumer in consumers)
            assert after == before
            seen.add(after[:3])
    shown = admin("GET", f"schemas/{new.partition('://')[2]}/schemas")["getSchemaResponses"]
    assert [version["properties"] for version in shown] == [properties] * len(VERSIONS)
    nulls = {(b"", True, number) for number in VERSIONS}
    assert seen == {(value, False, number) for number, (_, value) in VERSIONS.items()} | nulls


def test_the_python_client_is_not_asked_to_send_under_key_value_which_ends_its_process(names):
    info = _pulsar.SchemaInfo(_pulsar.SchemaType.KEY_VALUE, "", "")
    client = SimpleNamespace(_client=SimpleNamespace(get_schema_info=lambda topic, version: info))
    schema = names["schema_of"](client, "t", 0)
    assert schema.schema_info().schema_type() == _pulsar.SchemaType.BYTES


def facts(message):
    values = (message.data(), message.has_null_value(), message._message.int_schema_version())
    keys = (message.partition_key(), message.ordering_key())
    return *values, *keys, message.properties(), message.event_timestamp()


def test_the_bridge_refuses_keys_that_are_bytes(names):
    names["schemas"]["t"] = {"properties": {"kv.encoding.type": "SEPARATED"}}
    with pytest.raises(ValueError, match="keys that are bytes"):
        names["bridge"](None, None, None, "t", "s")


@pytest.mark.parametrize(("last", "is_error"), [(6, True), (7, False)])
def test_a_duplicate_beyond_the_last_sequence_ends_the_bridge(names, last, is_error):
    """The receipt of offset 6, sequence id 7, has no id: the message counts as stored already."""
    no_id = pulsar.MessageId(-1, -1, -1, -1)
    message, left, acknowledged = message_at(2**46 + 1, 6), [], []
    empty = {"data": b"", "properties": {}, "partition_key": "", "ordering_key": ""}
    for name, value in {**empty, "event_timestamp": 0}.items():
        setattr(message, name, lambda value=value: value)
    message.has_null_value = lambda: False
    message._message = SimpleNamespace(int_schema_version=lambda: -1)
    left.append(message)

    def receive(timeout_millis):
        if not left:
            raise pulsar.Timeout
        return left.pop()

    close = {"close": lambda: None}
    consumer = SimpleNamespace(receive=receive, acknowledge=acknowledged.append, **close)
    producer = SimpleNamespace(
        last_sequence_id=lambda: last, send=lambda *_, **settings: no_id, **close
    )
    source = SimpleNamespace(
        get_topic_partitions=lambda topic: [topic], subscribe=lambda *_, **settings: consumer
    )
    target = SimpleNamespace(create_producer=lambda *_, **settings: producer)
    names["ask"] = lambda *_: {"endOffset": 7, "subscriptions": {"s": {"msgBacklog": 0}}}
    if is_error:
        with pytest.raises(RuntimeError, match="counts as a duplicate"):
            names["bridge"](source, None, target, "persistent://t", "s")
        assert not acknowledged
    else:
        assert names["bridge"](source, None, target, "persistent://t", "s") == 1
        assert acknowledged == [message]


def test_there_are_ten_steps_and_no_code_on_the_page_that_is_not_run():
    text = PAGE.read_text()
    assert [block.line for block in blocks(PAGE) if block.name is None] == []
    for number in range(1, STEPS + 1):
        section = text[text.index(f"\n### {number}. ") :].split("\n#", 2)[1]
        assert "<!-- run: " in section, f"step {number} shows nothing"
    assert f"\n### {STEPS + 1}." not in text
