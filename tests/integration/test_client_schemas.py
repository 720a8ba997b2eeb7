"""Schemas of Pulsar's own client for Python on a cluster: objects in, objects out."""

import pulsar
import pulsar.schema
import pytest
from pulsar.schema import Array, Integer, JsonSchema, Map, Record, String

from spark_ledger.topic import blocking
from tests.integration.pulsar_clients import connected

TIMEOUT_MS = 30_000


class Flight(Record):
    number = Integer(required=True)
    carrier = String()


class FlightLater(Record):
    number = Integer(required=True)
    carrier = String()
    stops = Array(String(), required_default=True)
    delays = Map(Integer(), required_default=True)


class Other(Record):
    weather = Integer(required=True)


FlightLater.__name__ = "Flight"
EARLIEST = pulsar.InitialPosition.Earliest


def test_objects_of_two_versions_come_back_as_objects(client, cluster, name):
    first = client.create_producer(name, schema=JsonSchema(Flight))
    second = client.create_producer(name, schema=JsonSchema(FlightLater))
    first.send(Flight(number=1, carrier="AA"))
    second.send(FlightLater(number=2, carrier="UA", stops=["EWR"], delays={"EWR": 5}))
    with connected(cluster.broker_url) as second_client:
        consumer = second_client.subscribe(
            name, "s", schema=JsonSchema(Flight), initial_position=EARLIEST
        )
        messages = [consumer.receive(TIMEOUT_MS) for _ in range(2)]
        assert [(m.value().number, m.value().carrier) for m in messages] == [(1, "AA"), (2, "UA")]
        later = second_client.subscribe(
            name, "later", schema=JsonSchema(FlightLater), initial_position=EARLIEST
        )
        values = [later.receive(TIMEOUT_MS).value() for _ in range(2)]
    assert [value.stops for value in values] == [None, ["EWR"]]
    assert values[1].delays == {"EWR": 5}
    topics = blocking.topics(cluster.service_url)
    info = topics.run(topics.client.topics.open(name))
    versions = topics.run(topics.client.schemas.of(info)).client_versions
    assert [(v.number, v.schema.kind.name) for v in versions] == [(0, "JSON"), (1, "JSON")]


def test_what_does_not_fit_is_refused_at_the_producer_and_at_the_consumer(client, name):
    client.create_producer(name, schema=JsonSchema(Flight)).send(Flight(number=1))
    with pytest.raises(pulsar.IncompatibleSchema):
        client.create_producer(name, schema=JsonSchema(Other))
    with pytest.raises(pulsar.IncompatibleSchema):
        client.create_producer(name, schema=pulsar.schema.StringSchema())
    with pytest.raises(pulsar.IncompatibleSchema):
        client.subscribe(name, "s", schema=JsonSchema(Other))
    client.create_producer(name).send(b"bytes go without a schema")


def test_a_schema_of_300_fields_is_compared_beside_the_brokers_loop(client, name):
    fields = {f"field{i}": Integer(required=True) for i in range(300)}
    wide = type("Wide", (Record,), fields)
    client.create_producer(name, schema=JsonSchema(wide))
    wider = type("Wide", (Record,), {**fields, "more": Integer(required_default=True)})
    client.create_producer(name, schema=JsonSchema(wider))
    client.subscribe(name, "s", schema=JsonSchema(wide))
    with pytest.raises(pulsar.IncompatibleSchema):
        client.create_producer(name, schema=JsonSchema(type("Wide", (Record,), {"a": Integer()})))
