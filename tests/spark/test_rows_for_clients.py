"""Typed rows of Spark, of every type, as objects of Pulsar's client for Python."""

import base64
import json
import urllib.request

import _pulsar
import pulsar
import pytest
from pulsar.schema import (
    Array,
    Boolean,
    Bytes,
    Double,
    Float,
    Integer,
    JsonSchema,
    Long,
    Map,
    Record,
    Schema,
    String,
)

WAIT_MS = 120_000
EARLIEST = pulsar.InitialPosition.Earliest


class Place(Record):
    city = String()
    floor = Integer()


class Row(Record):
    flag = Boolean()
    tiny = Integer()
    short = Integer()
    number = Integer()
    big = Long()
    ratio = Float()
    exact = Double()
    price = String()
    text = String()
    data = Bytes()
    day = String()
    at = String()
    local = String()
    lasting = Long()
    place = Place()
    places = Array(Place())
    names = Array(String())
    counts = Map(Long())
    by_number = Map(String())


COLUMNS = """
    true AS flag, 1Y AS tiny, 2S AS short, 3 AS number, 9007199254740993L AS big, 0.5F AS ratio,
    0.1D AS exact, CAST('123456789012345678901234567890.12' AS DECIMAL(32, 2)) AS price,
    'é' AS text, X'0071' AS data, DATE '2024-05-01' AS day,
    TIMESTAMP '2024-05-01 12:00:00.5+02:00' AS at,
    TIMESTAMP_NTZ '2024-05-01 12:00:00' AS local, INTERVAL '1' SECOND AS lasting,
    named_struct('city', 'Bern', 'floor', 2) AS place,
    array(named_struct('city', 'Basel', 'floor', CAST(NULL AS INT))) AS places,
    array('a', 'b') AS names, map('x', 1L) AS counts, map(7, 'seven') AS by_number
"""
EXPECTED = {
    "flag": True,
    "tiny": 1,
    "short": 2,
    "number": 3,
    "big": 9007199254740993,
    "ratio": 0.5,
    "exact": 0.1,
    "price": "123456789012345678901234567890.12",
    "text": "é",
    "data": b"AHE=",
    "day": "2024-05-01",
    "at": "2024-05-01T10:00:00.500000Z",
    "local": "2024-05-01T12:00:00.000000",
    "lasting": 1_000_000,
    "names": ["a", "b"],
    "counts": {"x": 1},
    "by_number": {"7": "seven"},
}


@pytest.fixture
def client(cluster):
    one = pulsar.Client(cluster.broker_url, logger=pulsar.ConsoleLogger(pulsar.LoggerLevel.Error))
    yield one
    one.close()


def test_a_row_of_every_type_is_an_object_and_nulls_are_none(spark, topics, topic, client):
    rows = spark.sql(f"SELECT {COLUMNS}")
    nulls = rows.selectExpr(
        *(
            f"nullif({name}, {name}) AS {name}"
            for name in rows.columns
            if name not in ("counts", "by_number")
        ),
        "CAST(NULL AS MAP<STRING, BIGINT>) AS counts",
        "CAST(NULL AS MAP<INT, STRING>) AS by_number",
    )
    topics.write(rows, topic, valueFormat="arrow", partitions="1")
    topics.write(nulls, topic, valueFormat="arrow")
    consumer = client.subscribe(topic, "s", schema=JsonSchema(Row), initial_position=EARLIEST)
    whole, empty = (consumer.receive(WAIT_MS).value() for _ in range(2))
    assert {name: getattr(whole, name) for name in EXPECTED} == EXPECTED
    assert base64.b64decode(whole.data) == b"\0q"
    assert (whole.place.city, whole.place.floor) == ("Bern", 2)
    assert [(place.city, place.floor) for place in whole.places] == [("Basel", None)]
    of_none = {name: getattr(empty, name) for name in EXPECTED if name != "flag"}
    assert set(of_none.values()) == {None} and empty.places is None
    assert empty.flag is False  # the client's own default for a field that is not there


def test_a_column_that_spark_adds_is_a_version_that_clients_see(spark, topics, topic, client):
    topics.write(spark.sql("SELECT 1 AS number"), topic, valueFormat="arrow", partitions="1")
    only_numbers = type("Row", (Record,), {"number": Integer()})
    consumer = client.subscribe(
        topic, "s", schema=JsonSchema(only_numbers), initial_position=EARLIEST
    )
    assert consumer.receive(WAIT_MS).value().number == 1
    more = spark.sql("SELECT 2 AS number, 'later' AS text, double('NaN') AS exact")
    topics.write(more, topic, valueFormat="arrow", schemaMode="evolve")
    assert consumer.receive(WAIT_MS).value().number == 2
    later = type("Row", (Record,), {"number": Integer(), "text": String()})
    other = client.subscribe(topic, "t", schema=JsonSchema(later), initial_position=EARLIEST)
    values = [other.receive(WAIT_MS).value() for _ in range(2)]
    assert [(value.number, value.text) for value in values] == [(1, None), (2, "later")]
    floats = type("Row", (Record,), {"exact": Double()})
    third = client.subscribe(topic, "u", schema=JsonSchema(floats), initial_position=EARLIEST)
    assert third.receive(WAIT_MS).value().exact is None
    with pytest.raises(TypeError, match="exact"):  # the client has no number for the text "NaN"
        third.receive(WAIT_MS).value()


class OfColumns(Schema):
    """Sends bytes under the schema of a topic's columns."""

    def __init__(self, plain):
        super().__init__(bytes, _pulsar.SchemaType.JSON, plain, "row")

    def encode(self, obj):
        return obj

    def decode(self, data):
        return data


def latest_schema(cluster, topic):
    url = f"{cluster.admin_url}/admin/v2/schemas/public/default/{topic}/schema"
    with urllib.request.urlopen(url, timeout=30) as response:
        return OfColumns(json.loads(json.load(response)["data"]))


def test_spark_reads_its_columns_and_the_objects_of_clients_together(
    spark, cluster, topics, topic, client
):
    rows = spark.sql("SELECT 1 AS number, 'spark' AS text, DATE '2024-05-01' AS day")
    topics.write(rows, topic, valueFormat="arrow", partitions="1")
    fields = {"number": Integer(), "text": String(), "day": String()}
    record = type("Row", (Record,), fields)
    producer = client.create_producer(topic, schema=JsonSchema(record))
    producer.send(record(number=2, text="client", day="2024-05-02"))
    producer.send(record(number=3))
    of_columns = latest_schema(cluster, topic)
    produce = client.create_producer(topic, schema=of_columns)  # as AUTO_PRODUCE does
    produce.send(b'{"number":4,"day":"2024-05-04"}')
    expected = [
        (1, "spark", "2024-05-01"),
        (2, "client", "2024-05-02"),
        (3, None, "None"),
        (4, None, "2024-05-04"),
    ]
    declared = "number INT, text STRING, day DATE"
    for columns, value_format in ((declared, "json"), (declared, "schema"), (None, "schema")):
        read = topics.read(topic, columns, valueFormat=value_format).orderBy("number").collect()
        assert [(row.number, row.text, str(row.day)) for row in read] == expected
    with pytest.raises(Exception, match="the values are bytes, not columns"):
        topics.read(topic, valueFormat="arrow").collect()
    skipped = topics.read(topic, valueFormat="arrow", onOtherFormat="skip").collect()
    assert [row.number for row in skipped] == [1]
    messages = topics.read(topic, onOtherFormat="skip").orderBy("offset").collect()
    assert [json.loads(row.value)["number"] for row in messages] == [2, 3, 4]
    wider = spark.sql("SELECT 5 AS number, 'x' AS text, DATE '2024-05-03' AS day, 1 AS more")
    topics.write(wider, topic, valueFormat="arrow", schemaMode="evolve")
    assert topics.read(topic, f"{declared}, more INT", valueFormat="json").count() == 5
    grown = topics.read(topic, valueFormat="schema").orderBy("number").collect()
    assert [row.more for row in grown] == [None] * 4 + [1]
    produce.send(b'{"number":"six"}')
    with pytest.raises(Exception, match=r"BAD_ENTRY.* offset 5 .*number: \"six\" is no int"):
        topics.read(topic, valueFormat="schema").collect()
