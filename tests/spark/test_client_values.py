"""Values of Pulsar's client with a schema are typed rows to Spark."""

import json
import urllib.request
from decimal import Decimal
from pathlib import Path

import _pulsar
import pulsar
import pyspark
import pytest
from pulsar.schema import Array, Integer, JsonSchema, Map, Record, Schema, String, StringSchema
from pyspark.sql.functions import col

from spark_ledger import Admin
from spark_ledger_demo.jars import IN_SPARK, JarsMissing, Library, jars_of
from tests.kit import pulsar_java
from tests.kit.client_values import avro_bytes, descriptors, record

SPARK_AVRO = Library(
    "spark-avro", "org.apache.spark", "spark-avro_2.13", pyspark.__version__, IN_SPARK
)

PROGRAMS = Path(__file__).parent.parent / "integration" / "pulsar"


class Flight(Record):
    number = Integer(required=True)
    carrier = String()


class FlightLater(Record):
    number = Integer(required=True)
    carrier = String()
    stops = Array(String(), required_default=True)
    delays = Map(Integer(), required_default=True)


class Encoded(Schema):
    """Sends bytes as they are, under a schema."""

    def __init__(self, kind, plain):
        super().__init__(bytes, kind, plain, "encoded")

    def encode(self, obj):
        return obj

    def decode(self, data):
        return data


@pytest.fixture
def client(cluster):
    quiet = pulsar.ConsoleLogger(pulsar.LoggerLevel.Error)
    client = pulsar.Client(cluster.broker_url, logger=quiet)
    yield client
    client.close()


@pytest.fixture
def read(spark, cluster):
    def load(topic, value_format="schema", **options):
        options = {"serviceUrl": cluster.service_url, "valueFormat": value_format} | options
        return spark.read.format("ledger").options(**options).load(topic)

    return load


def payload(rows):
    """The rows without the columns that each read has, in order of their offsets."""
    return [
        {name: value for name, value in row.asDict(recursive=True).items() if name[:2] != "__"}
        for row in sorted(rows, key=lambda row: row["__offset"])
    ]


def test_json_of_two_versions_is_typed_and_a_running_query_keeps_its_columns_until_it_restarts(
    spark, cluster, client, topic, read, tmp_path
):
    first = client.create_producer(topic, schema=JsonSchema(Flight))
    for number, carrier in ((1, "AA"), (2, None)):
        first.send(Flight(number=number, carrier=carrier), partition_key="k")
    first.send(None)
    batches = []

    def start():
        options = {"serviceUrl": cluster.service_url, "valueFormat": "schema"}
        stream = spark.readStream.format("ledger").options(**options, startingOffsets="earliest")
        return (
            stream.load(topic)
            .writeStream.foreachBatch(lambda rows, _: batches.extend(rows.collect()))
            .option("checkpointLocation", str(tmp_path / "checkpoint"))
            .start()
        )

    expected = [
        {"number": 1, "carrier": "AA"},
        {"number": 2, "carrier": None},
        {"number": None, "carrier": None},
    ]
    query = start()
    try:
        query.processAllAvailable()
        assert payload(batches) == expected
        second = client.create_producer(topic, schema=JsonSchema(FlightLater))
        second.send(FlightLater(number=3, carrier="UA", stops=["EWR"], delays={"EWR": 5}))
        first.send(Flight(number=4, carrier="DL"))
        query.processAllAvailable()
    finally:
        query.stop()
    expected += [{"number": 3, "carrier": "UA"}, {"number": 4, "carrier": "DL"}]
    assert payload(batches) == expected
    rows = read(topic, includeMetadata="true").collect()
    nothing = {"stops": None, "delays": None}
    grown = [row | nothing for row in expected]
    grown[3] |= {"stops": ["EWR"], "delays": {"EWR": 5}}
    assert payload(rows) == grown
    versions = {row["__offset"]: row["__schemaVersion"] for row in rows}
    assert [versions[offset] for offset in (0, 1, 3, 4)] == [1, 1, 2, 1]
    assert [bytes(row["__key"]) for row in rows if row["__offset"] < 2] == [b"k", b"k"]
    del batches[:]
    second.send(FlightLater(number=5, carrier="B6", stops=[], delays={}))
    query = start()
    try:
        query.processAllAvailable()
    finally:
        query.stop()
    assert payload(batches) == [{"number": 5, "carrier": "B6", "stops": [], "delays": {}}]


OLD = record(("id", "int"), ("dropped", "string"), ("name", "string"), name="Order")
INNER = record(("street", "string"), ("zip", ["null", "int"]), name="Address")
NEW = record(
    ("id", "long"),
    ("name", ["null", "string"]),
    ("kind", {"type": "enum", "name": "Kind", "symbols": ["NEW", "PAID"]}, "NEW"),
    ("address", ["null", INNER], None),
    ("lines", {"type": "array", "items": record(("n", "int"), ("p", "double"), name="L")}, []),
    ("tags", {"type": "map", "values": {"type": "array", "items": "string"}}, {}),
    ("either", ["null", "long", "string"], None),
    ("day", ["null", {"type": "int", "logicalType": "date"}], None),
    ("at", ["null", {"type": "long", "logicalType": "timestamp-millis"}], None),
    ("wall", ["null", {"type": "long", "logicalType": "local-timestamp-micros"}], None),
    ("clock", ["null", {"type": "int", "logicalType": "time-millis"}], None),
    (
        "price",
        ["null", {"type": "bytes", "logicalType": "decimal", "precision": 9, "scale": 2}],
        None,
    ),
    ("uuid", {"type": "string", "logicalType": "uuid"}, ""),
    ("digest", {"type": "fixed", "name": "D", "size": 2}, "\u0000\u0001"),
    name="Order",
)


def without_logical(plain):
    """The schema without logical types: Avro's library then takes numbers."""
    if isinstance(plain, dict):
        return {name: without_logical(p) for name, p in plain.items() if name != "logicalType"}
    return [without_logical(part) for part in plain] if isinstance(plain, list) else plain


def orders():
    for i in range(300):
        yield {
            "id": i * 10**10,
            "name": f"n{i}" if i % 3 else None,
            "kind": "PAID" if i % 2 else "NEW",
            "address": {"street": f"s{i}", "zip": i if i % 5 else None} if i % 4 else None,
            "lines": [{"n": n, "p": n / 8} for n in range(i % 6)],
            "tags": {f"k{n}": ["x"] * n for n in range(i % 3)},
            "either": [None, i, f"t{i}"][i % 3],
            "day": i if i % 7 else None,
            "at": 1_764_147_600_000 + i if i % 7 else None,
            "wall": i * 1000 if i % 7 else None,
            "clock": i * 1000 if i % 7 else None,
            "price": (i - 150).to_bytes(2, "big", signed=True) if i % 7 else None,
            "uuid": f"u{i}",
            "digest": bytes([i % 256, 7]),
        }


def test_avro_is_what_sparks_from_avro_makes_of_it(spark, client, topic, read):
    try:
        (jar,) = (jar for jar in jars_of(SPARK_AVRO) if "spark-avro" in jar.name)
    except JarsMissing as error:
        pytest.skip(str(error))
    spark.sql(f"ADD JAR '{jar}'")
    old = client.create_producer(topic, schema=Encoded(_pulsar.SchemaType.AVRO, OLD))
    for i in range(20):
        old.send(avro_bytes(OLD, {"id": i - 10, "dropped": "x" * i, "name": f"o{i}"}))
    new = client.create_producer(topic, schema=Encoded(_pulsar.SchemaType.AVRO, NEW))
    for order in orders():
        new.send_async(avro_bytes(without_logical(NEW), order), lambda *_: None)
    new.flush()
    values = read(topic, "binary")
    older = "map('avroSchema', '{}')".format(json.dumps(NEW).replace("\\", "\\\\"))
    oracles = [
        values.where("offset < 20").selectExpr(
            f"from_avro(value, '{json.dumps(OLD)}', {older}) AS v", "offset"
        ),
        values.where("offset >= 20").selectExpr(
            "from_avro(value, '{}', map()) AS v".format(json.dumps(NEW).replace("\\", "\\\\")),
            "offset",
        ),
    ]
    expected = [
        row
        for oracle in oracles
        for row in oracle.select("v.*", col("offset").alias("__offset")).collect()
    ]
    rows = read(topic).collect()
    columns = read(topic).select(*NEW_NAMES).dtypes
    oracle_types = dict(oracles[1].select("v.*").dtypes)
    assert len(rows) == 320
    assert [pair for pair in columns if oracle_types[pair[0]] != pair[1]] == [
        pair for pair in columns if pair[0] == "clock" and pair[1] == "time(6)"
    ]
    for row, from_avro in zip(payload(rows), payload(expected), strict=True):
        clock, number = row.pop("clock"), from_avro.pop("clock")
        assert row == from_avro
        millis = None if clock is None else (clock.hour * 3600 + clock.minute * 60) * 1000
        assert clock is None or isinstance(number, type(clock)) or number >= millis
    assert payload(rows)[21]["price"] == Decimal("-1.49")


NEW_NAMES = [field["name"] for field in NEW["fields"]]


def test_a_value_that_cannot_be_decoded_is_met_as_the_query_says(client, topic, read):
    plain = record(("a", "long"), ("b", "string"))
    producer = client.create_producer(topic, schema=Encoded(_pulsar.SchemaType.AVRO, plain))
    good = [avro_bytes(plain, {"a": i, "b": "x"}) for i in range(3)]
    for value in (good[0], b"\x02\x7fshort", good[1], good[2]):
        producer.send(value)
    place = (
        rf"\[LEDGER_TOPIC.BAD_ENTRY\] topic '{topic}', partition 0, offset 1 \(ledger \d+, entry"
        r" \d+\): the value cannot be decoded: b: -64 bytes at 2 of 7"
    )
    with pytest.raises(Exception, match=place):
        read(topic).collect()
    rows = read(topic, onBadEntry="skip", keyFilter="no key").collect()
    assert rows == []
    rows = read(topic, onBadEntry="skip").collect()
    assert {row["__offset"]: row["a"] for row in rows} == {0: 0, 2: 1, 3: 2}
    only_b = read(topic, onBadEntry="skip").select("b", "__offset").collect()
    assert len(only_b) == 3


def test_a_message_without_version_is_a_row_of_bytes_among_columns(client, topic, read):
    producer = client.create_producer(topic, schema=JsonSchema(Flight))
    producer.send(Flight(number=1, carrier="AA"))
    client.create_producer(topic).send(b'{"number":2}')
    place = (
        rf"LEDGER_SCHEMA.INCOMPATIBLE\] topic '{topic}', partition 0, offset 1: the row is bytes"
    )
    with pytest.raises(Exception, match=place):
        read(topic).collect()
    assert payload(read(topic, onOtherFormat="skip").collect()) == [{"number": 1, "carrier": "AA"}]
    rows = read(topic, onOtherFormat="null", includeMetadata="true").collect()
    assert payload(rows)[1] == {"number": None, "carrier": None}
    assert sorted((row["__offset"], row["__schemaVersion"]) for row in rows) == [(0, 1), (1, 0)]


def test_values_without_columns_are_bytes_with_the_number_of_their_version(client, topic, read):
    kind = _pulsar.SchemaType.PROTOBUF_NATIVE
    producer = client.create_producer(topic, schema=Encoded(kind, descriptors("Order", "id")))
    producer.send(b"\x08\x01")
    (row,) = read(topic).collect()
    assert (bytes(row["value"]), row["__schemaVersion"]) == (b"\x08\x01", 1)
    assert read(topic).columns[:2] == ["value", "__key"]


def test_typed_rows_of_spark_and_values_of_clients_are_rows_of_one_read(
    spark, cluster, client, topic, read
):
    write = spark.createDataFrame([(7, "x")], "number INT, gate STRING").write.format("ledger")
    write = write.options(serviceUrl=cluster.service_url, valueFormat="arrow")
    write.mode("append").save(topic)
    with Admin(cluster.service_url) as admin:
        admin.withdraw_schema(topic)
    producer = client.create_producer(topic, schema=JsonSchema(Flight))
    producer.send(Flight(number=1, carrier="AA"))
    rows = payload(read(topic).collect())
    assert rows == [
        {"number": 7, "carrier": None, "gate": "x"},
        {"number": 1, "carrier": "AA", "gate": None},
    ]


def test_rows_stay_readable_after_their_schema_was_deleted_until_it_is_deleted_with_force(
    spark, cluster, client, topic, read
):
    def send(schema, value):
        producer = client.create_producer(topic, schema=schema)
        producer.send(value)
        producer.close()

    def delete(query=""):
        url = f"{cluster.admin_url}/admin/v2/schemas/public/default/{topic}/schema{query}"
        urllib.request.urlopen(urllib.request.Request(url, method="DELETE"), timeout=30).close()

    write = spark.createDataFrame([(7,)], "number INT").write.format("ledger")
    write.options(serviceUrl=cluster.service_url, valueFormat="arrow").mode("append").save(topic)
    plain = record(("number", ["null", "int"], None), ("carrier", ["null", "string"], None))
    send(Encoded(_pulsar.SchemaType.JSON, plain), b'{"number":1,"carrier":"AA"}')
    rows = [{"number": 7, "carrier": None}, {"number": 1, "carrier": "AA"}]
    assert payload(read(topic).collect()) == rows
    delete()
    assert payload(read(topic).collect()) == rows
    send(StringSchema(), "text")
    rows = [{"value": None} | row for row in rows]
    rows.append({"value": "text", "number": None, "carrier": None})
    assert payload(read(topic).collect()) == rows
    delete("?force=true")
    with pytest.raises(Exception, match="the values are bytes, not columns"):
        read(topic).collect()
    send(Encoded(_pulsar.SchemaType.JSON, plain), b'{"number":2}')
    with pytest.raises(Exception, match="no version 1 of its schema: it was deleted with force"):
        read(topic).collect()


def test_keys_and_values_of_javas_client_are_two_columns_inline_and_separated(cluster, topic, read):
    try:
        jars_of(pulsar_java.CLIENT)
    except JarsMissing as error:
        pytest.skip(str(error))
    names = [f"persistent://public/default/{topic}-{encoding}" for encoding in ("in", "apart")]
    program = PROGRAMS / "Pairs.java"
    lines = pulsar_java.run(program, cluster.broker_url, *names).splitlines()
    assert lines == [
        *("INLINE: 10 t1 false", "INLINE by AUTO_CONSUME: 10 t1"),
        "INLINE by another key: refused",
        *("SEPARATED: 10 t1 true", "SEPARATED by AUTO_CONSUME: 10 t1"),
        "SEPARATED by another key: refused",
    ]
    for name in names:
        assert payload(read(name).collect()) == [
            {"key": 10 * number, "value": {"number": number, "text": text}}
            for number, text in ((1, "t1"), (2, None), (3, "t3"))
        ]


NAMES = {
    "by case": (record(("a", "int"), ("A", "int")), "LEDGER_SCHEMA.UNKNOWN_COLUMN"),
    "metadata": (record(("__offset", "int")), "LEDGER_SCHEMA.RESERVED_COLUMN"),
    "itself": (record(("next", ["null", "R"])), "LEDGER_SCHEMA.TYPE_MISMATCH"),
}


@pytest.mark.parametrize("case", NAMES)
def test_a_schema_that_spark_cannot_have_is_an_error_before_a_row_is_read(
    client, topic, read, case
):
    plain, error = NAMES[case]
    client.create_producer(topic, schema=Encoded(_pulsar.SchemaType.JSON, plain))
    with pytest.raises(Exception, match=rf"{error}\] topic '.*{topic}', the schema that clients"):
        read(topic).schema  # noqa: B018


def test_a_topic_of_bytes_alone_has_no_columns_to_read_by(client, topic, read):
    client.create_producer(topic).send(b"x")
    with pytest.raises(Exception, match=r"LEDGER_SCHEMA.NOT_REGISTERED"):
        read(topic).schema  # noqa: B018
