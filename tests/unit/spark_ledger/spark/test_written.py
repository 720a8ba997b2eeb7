"""The columns of the sink."""

import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from spark_ledger.errors import (
    NullTopic,
    OptionMissing,
    SchemaMissingColumn,
    SchemaReservedColumn,
    SchemaTypeMismatch,
    SchemaUnknownColumn,
    TopicNameInvalid,
)
from spark_ledger.spark.options.options import shape_options, stream_write_options
from spark_ledger.spark.rows import written
from spark_ledger.spark.rows.columns import read_schema
from spark_ledger.spark.rows.written import WrittenRows
from tests.unit.spark_ledger.spark.typed_rows import ddl

ALL = "Value STRING, KEY BINARY, topic STRING, partition INT, headers MAP, eventTime TIMESTAMP"
TYPED = (
    "price DOUBLE, key STRING, __key STRING, __topic STRING, __partition INT, "
    "__messageProperties TEXTS, __eventTime TIMESTAMP"
)


def plan(text: str, **options: str) -> written.WritePlan:
    return written.plan_write(ddl(text), stream_write_options(options))


@pytest.mark.parametrize(
    ("declared", "kind", "says"),
    [
        ("key BINARY", SchemaMissingColumn, "'value'"),
        ("value INT", SchemaTypeMismatch, "'value' is INT, not STRING or BINARY"),
        ("key BIGINT, value STRING", SchemaTypeMismatch, "'key' is BIGINT"),
        ("value STRING, price DOUBLE", SchemaUnknownColumn, "'price'"),
        ("value STRING, offset STRING", SchemaUnknownColumn, "'offset'"),
        ("value STRING, __offset BIGINT", SchemaUnknownColumn, "'__offset'"),
        ("value STRING, deliverAt TIMESTAMP", SchemaUnknownColumn, "'deliverAt'"),
        ("value STRING, orderingKey STRING", SchemaUnknownColumn, "'orderingKey'"),
        ("value STRING, sequenceId STRING", SchemaUnknownColumn, "'sequenceId'"),
        ("value STRING, VALUE STRING", SchemaUnknownColumn, "two columns 'value'"),
        ("value STRING, topic BINARY", SchemaTypeMismatch, "'topic' is BINARY, not STRING"),
        ("value STRING, partition BIGINT", SchemaTypeMismatch, "'partition' is BIGINT, not INT"),
        ("value STRING, headers STRING", SchemaTypeMismatch, "'headers' is STRING, not ARRAY"),
        ("value STRING, eventTime BIGINT", SchemaTypeMismatch, "'eventTime' is BIGINT"),
    ],
)
def test_columns_that_cannot_be_written_are_refused_by_name(declared, kind, says):
    with pytest.raises(kind, match=says):
        plan(declared, topic="t")


def test_columns_written_without_a_format_are_told_of_the_format_that_takes_them():
    with pytest.raises(SchemaUnknownColumn, match="Set valueFormat=arrow"):
        plan("__key STRING, price DOUBLE", topic="t")


def test_every_column_is_found_whatever_its_order_and_case():
    made = plan(ALL)
    assert made == written.WritePlan(
        *("column", (), "Value", "KEY", "topic", "partition", "headers", "eventTime")
    )
    batch = pa.record_batch(
        {
            "eventTime": pa.array([1], pa.timestamp("us", "UTC")),
            "headers": pa.array([[("h", "1")]], pa.map_(pa.string(), pa.string())),
            "partition": pa.array([0], pa.int32()),
            "topic": ["t"],
            "KEY": [b"k"],
            "Value": ["v"],
        }
    )
    rows = made.rows(batch)
    assert rows.values.to_pylist() == ["v"]
    assert rows.keys.to_pylist() == [b"k"]
    assert rows.topics.to_pylist() == ["t"]
    assert rows.partitions.to_pylist() == [0]
    assert rows.headers.to_pylist() == [[("h", "1")]]
    assert rows.event_times.cast(pa.int64()).to_pylist() == [1]
    assert len(rows) == 1


def test_columns_that_are_not_there_are_none():
    rows = plan("value STRING", topic="t").rows(pa.record_batch({"value": ["v"]}))
    assert rows == WrittenRows(rows.values)


def test_headers_are_structs_or_maps_and_the_event_time_has_two_names():
    for kind in ("HEADERS", "TEXTS", "MAP"):
        assert plan(f"value STRING, headers {kind}", topic="t").headers == "headers"
    assert plan("value STRING, timestamp TIMESTAMP", topic="t").event_time == "timestamp"


def test_the_topic_is_named_by_the_option_or_by_each_row():
    assert plan("value STRING, topic STRING").topic == "topic"
    assert plan("value STRING, topic STRING", topic="t").topic is None
    with pytest.raises(OptionMissing, match="option 'topic' or a column topic"):
        plan("value STRING")


def test_routing_is_by_the_column_if_there_is_one_and_by_key_if_not():
    assert plan("value STRING", topic="t").routing == "hash"
    assert plan("value STRING", topic="t", routing="roundrobin").routing == "roundRobin"
    assert plan("value STRING, partition INT", topic="t").routing == "column"
    assert plan("value STRING, partition INT", topic="t", routing="column").routing == "column"
    with_column = plan("value STRING, partition INT", topic="t", routing="hash")
    assert (with_column.routing, with_column.partition) == ("hash", None)
    with pytest.raises(SchemaMissingColumn, match="no column 'partition'"):
        plan("value STRING", topic="t", routing="column")


def test_typed_rows_have_any_columns_and_metadata_with_reserved_names():
    made = plan(TYPED, valueFormat="arrow")
    assert (made.payload, made.value) == (("price", "key"), None)
    assert (made.key, made.topic, made.partition) == ("__key", "__topic", "__partition")
    assert (made.headers, made.event_time) == ("__messageProperties", "__eventTime")
    assert written.payload_of(ddl(TYPED), made) == ddl("price DOUBLE, key STRING")
    batch = pa.record_batch({"price": [1.5], "__key": ["k"], "__topic": ["t"], "key": ["x"]})
    narrow = plan("price DOUBLE, __key STRING, __topic STRING, key STRING", valueFormat="json")
    rows = narrow.rows(batch)
    assert rows.values.to_pydict() == {"price": [1.5], "key": ["x"]}
    assert (rows.keys.to_pylist(), rows.topics.to_pylist(), len(rows)) == (["k"], ["t"], 1)


def test_typed_rows_need_a_column_of_their_own_and_no_other_reserved_names():
    with pytest.raises(SchemaMissingColumn, match="payload"):
        plan("__key STRING", topic="t", valueFormat="arrow")
    with pytest.raises(SchemaReservedColumn, match="'__offset'"):
        plan("price DOUBLE, __offset DOUBLE", topic="t", valueFormat="arrow")
    with pytest.raises(SchemaTypeMismatch, match="'__key' is DOUBLE"):
        plan("price DOUBLE, __key DOUBLE", topic="t", valueFormat="arrow")


@pytest.mark.parametrize("value_format", ["binary", "string", "json", "arrow", "schema"])
def test_what_a_reader_offers_can_be_written_to_another_topic(value_format):
    for more in ("true", "false"):
        shape = shape_options(
            {"valueFormat": value_format, "includeHeaders": more, "includeMetadata": more}
        )
        offered = read_schema(shape, ddl("price DOUBLE"))
        options = stream_write_options({"topic": "t", "valueFormat": value_format})
        made = written.plan_write(offered, options)
        typed = value_format not in ("binary", "string")
        assert made.payload == (("price",) if typed else ())
        assert made.key == ("__key" if typed else "key")
        assert (made.routing, made.topic) == ("column", None)
        untyped_time = "eventTime" if more == "true" else "timestamp"
        assert made.event_time == ("__eventTime" if typed else untyped_time)


def test_the_event_time_goes_before_the_timestamp_wherever_they_stand():
    for names in (("EVENTTIME", "timestamp"), ("timestamp", "EVENTTIME")):
        columns = f"value STRING, {names[0]} TIMESTAMP, {names[1]} TIMESTAMP"
        assert plan(columns, topic="t").event_time == "EVENTTIME"


def test_a_row_without_a_topic_is_an_error_that_says_how_many_there_are():
    rows = WrittenRows(pa.array(["1", "2", "3"]), topics=pa.array(["t", None, None]))
    said = "2 of the 3 rows of one batch of a task have no topic: the first is row 1 of this batch"
    with pytest.raises(NullTopic, match=said):
        list(written.by_topic(rows))


def test_a_row_with_a_topic_that_cannot_be_is_an_error():
    rows = WrittenRows(pa.array(["1", "2"]), topics=pa.array(["t", "no/good"]))
    with pytest.raises(TopicNameInvalid, match="no/good"):
        list(written.by_topic(rows))


def test_a_topic_is_the_same_however_its_rows_spell_it():
    topics = pa.array(["t", "public/default/t", "persistent://public/default/t"])
    rows = WrittenRows(pa.array(["1", "2", "3"]), topics=topics)
    ((name, found),) = written.by_topic(rows)
    assert (name, found.values.to_pylist(), found.topics) == ("t", ["1", "2", "3"], None)


def test_rows_of_no_batch_are_of_no_topic():
    assert (
        list(
            written.by_topic(
                WrittenRows(pa.array([], pa.string()), topics=pa.array([], pa.string()))
            )
        )
        == []
    )


@settings(deadline=None)
@given(
    st.lists(st.sampled_from(["a", "public/default/a", "b", "x/y/z"]), min_size=1), st.booleans()
)
def test_every_row_goes_to_its_topic_once_and_in_order(names, typed):
    numbers = pa.array(range(len(names)))
    values = pa.record_batch({"n": numbers}) if typed else numbers.cast(pa.string())
    rows = WrittenRows(values, keys=numbers.cast(pa.string()), topics=pa.array(names))
    found = {name: part.keys.to_pylist() for name, part in written.by_topic(rows)}
    short = [name.removeprefix("public/default/") for name in names]
    short = [f"persistent://{name}" if "/" in name else name for name in short]
    wanted: dict[str, list[str]] = {}
    for i, name in enumerate(short):
        wanted.setdefault(name, []).append(str(i))
    assert found == wanted
    assert written.topic_names(rows) == list(found)
    assert list(found) == list(wanted)
