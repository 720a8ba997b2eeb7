"""Schemas of Pulsar's own client for Python on a cluster: objects in, objects out."""

import json

import pulsar
import pulsar.schema
import pyarrow as pa
import pytest
from pulsar.schema import Array, Integer, JsonSchema, Long, Map, Record, String

from spark_ledger import errors
from spark_ledger.topic import blocking
from tests.integration.pulsar_clients import ask, connected, write_columns

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


class Place(Record):
    city = String()


class Reading(Record):
    id = Long()
    place = Place()


class ReadingLater(Record):
    id = Long()
    note = String()


def columns(notes=None, first=1):
    places = pa.array([{"city": "Bern"}, None], pa.struct([("city", pa.string())]))
    arrays = {"id": pa.array([first, first + 1]), "place": places}
    if notes:
        arrays["note"] = pa.array(notes)
    fields = [pa.field(name, array.type, name != "id") for name, array in arrays.items()]
    return pa.record_batch(list(arrays.values()), schema=pa.schema(fields))


def make_with_columns(topics, name):
    info = topics.run(topics.client.topics.create(name, 1))
    topics.run(topics.client.schemas.register(info, columns().schema))


def received_values(consumer, count):
    return [consumer.receive(TIMEOUT_MS).value() for _ in range(count)]


def test_rows_of_columns_come_as_objects_with_the_version_of_their_columns(
    client, cluster, topics, name
):
    make_with_columns(topics, name)
    assert write_columns(topics, name, columns()) == 1
    assert write_columns(topics, name, columns(["x", None], first=3)) == 2
    consumer = client.subscribe(name, "s", schema=JsonSchema(Reading), initial_position=EARLIEST)
    values = received_values(consumer, 4)
    assert [value.id for value in values] == [1, 2, 3, 4]
    assert [value.place and value.place.city for value in values] == ["Bern", None] * 2
    later = client.subscribe(name, "t", schema=JsonSchema(ReadingLater), initial_position=EARLIEST)
    values = received_values(later, 4)
    assert [value.note for value in values] == [None, None, "x", None]
    path = f"schemas/public/default/{name}"
    status, latest = ask(cluster.admin_url, "GET", f"{path}/schema")
    assert (status, latest["version"], latest["type"]) == (200, 1, "JSON")
    fields = [field["name"] for field in json.loads(latest["data"])["fields"]]
    assert fields == ["id", "place", "note"]
    status, all_versions = ask(cluster.admin_url, "GET", f"{path}/schemas")
    assert [v["version"] for v in all_versions["getSchemaResponses"]] == [0, 1]


def test_a_consumer_that_cannot_read_the_columns_is_refused(client, topics, name):
    make_with_columns(topics, name)
    for wrong in ({"id": Integer(required=True)}, {"place": String()}, {"x": String()}):
        with pytest.raises(pulsar.IncompatibleSchema):
            client.subscribe(name, "s", schema=JsonSchema(type("Reading", (Record,), wrong)))
    for other in (pulsar.schema.StringSchema(), pulsar.schema.JsonSchema(Other)):
        with pytest.raises(pulsar.IncompatibleSchema):
            client.subscribe(name, "s", schema=other)
    client.subscribe(name, "s").close()


class ReadingMore(Record):
    id = Long()
    place = Place()
    note = String(required_default=True)


def test_producers_of_objects_write_beside_columns_and_both_worlds_read_all(client, topics, name):
    topics.run(topics.client.topics.create(name, 1))
    rows = columns()
    plain = pa.schema([field.with_nullable(True) for field in rows.schema])
    write_columns(topics, name, rows.cast(plain))
    producer = client.create_producer(name, schema=JsonSchema(Reading))
    producer.send(Reading(id=3, place=Place(city="Basel")))
    write_columns(topics, name, columns(first=4).cast(plain))  # which the open segment gives way to
    producer.send(Reading(id=6))
    more = client.create_producer(name, schema=JsonSchema(ReadingMore))
    more.send(ReadingMore(id=7, note="more"))
    consumer = client.subscribe(name, "s", schema=JsonSchema(Reading), initial_position=EARLIEST)
    values = received_values(consumer, 7)
    assert [value.id for value in values] == [1, 2, 3, 4, 5, 6, 7]
    assert [value.place and value.place.city for value in values[:4]] == [
        *("Bern", None, "Basel", "Bern")
    ]
    later = client.subscribe(name, "t", schema=JsonSchema(ReadingMore), initial_position=EARLIEST)
    assert [value.note for value in received_values(later, 7)] == [None] * 6 + ["more"]
    wrong = type("Reading", (Record,), {"id": String()})
    for schema in (JsonSchema(wrong), pulsar.schema.StringSchema(), pulsar.schema.BytesSchema()):
        with pytest.raises(pulsar.IncompatibleSchema):
            client.create_producer(name, schema=schema)
    notes = pa.record_batch({"id": [8], "note": pa.array([1])})
    with pytest.raises(errors.SchemaIncompatible, match="column 'note' is null or"):
        write_columns(topics, name, notes)


def test_producers_of_bytes_from_before_the_columns_are_refused(client, topics, name):
    topics.run(topics.client.topics.create(name, 1))
    producer = client.create_producer(name)
    rows = columns()
    plain = pa.schema([field.with_nullable(True) for field in rows.schema])
    write_columns(topics, name, rows.cast(plain))
    with pytest.raises(pulsar.PulsarException):
        producer.send(b"bytes")
    objects = client.create_producer(name, schema=JsonSchema(Reading))
    objects.send(Reading(id=3))
    consumer = client.subscribe(name, "s", schema=JsonSchema(Reading), initial_position=EARLIEST)
    assert [value.id for value in received_values(consumer, 3)] == [1, 2, 3]


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
