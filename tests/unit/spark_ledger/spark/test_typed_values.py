import pickle

import pyarrow as pa
import pytest
from pyspark.sql.pandas.types import to_arrow_schema
from pyspark.sql.types import (
    ArrayType,
    DoubleType,
    IntegerType,
    LongType,
    MapType,
    NullType,
    StringType,
    StructField,
    StructType,
    TimestampType,
    VariantType,
    YearMonthIntervalType,
)

from spark_ledger import errors
from spark_ledger.spark.rows import typed_values
from spark_ledger.spark.rows.typed_values import ValueReader, ValueWriter
from spark_ledger.topic.commit.draft import RowKind
from spark_ledger.topic.read.plan import plan_read
from spark_ledger.topic.schema.records import Compatibility
from spark_ledger.topic.write import TaskSettings
from tests.kit.loop_task import LoopTask
from tests.kit.rows import Rows
from tests.kit.segments_seen import block_of
from tests.kit.slices import read_task
from tests.unit.spark_ledger.topic.stage import play

ID_NAME = "id INT, name STRING"


def spark(text):
    """A schema as Spark's parser makes it, without its JVM."""
    kinds = {"INT": IntegerType(), "STRING": StringType(), "BIGINT": LongType()}
    columns = [column.split() for column in text.split(", ")] if text else []
    return StructType([StructField(name, kinds[kind]) for name, kind in columns])


def writer(value_format, text=ID_NAME, mode="validate"):
    return ValueWriter.of(value_format, spark(text), mode)


COLLATED = StringType("UTF8_LCASE")


def batch(ids, names):
    return pa.RecordBatch.from_pydict({"id": pa.array(ids, pa.int32()), "name": names})


def typed(payload, *, version=1, offset=100, **beside):
    columns = {**{f"__{name}": column for name, column in beside.items()}}
    columns |= dict(zip(payload.schema.names, payload.columns, strict=True))
    rows = pa.RecordBatch.from_pydict(columns)
    return block_of(Rows(3, offset, 0, rows, typed=True, schema_version=version))


def untyped(*values, offset=100):
    batch = pa.RecordBatch.from_pydict({"value": pa.array(values, pa.binary())})
    return block_of(Rows(3, offset, 0, batch))


def reader(value_format, text=ID_NAME, registered=None):
    return ValueReader.of(value_format, spark(text), registered)


# -- types ----------------------------------------------------------------------------------------


def test_columns_of_spark_come_back_from_a_topic_as_they_were():
    inner = StructType([StructField("x", IntegerType(), False), StructField("t", TimestampType())])
    schema = StructType([StructField("id", LongType(), False), StructField("s", inner)])

    offered = typed_values.spark_payload(typed_values.arrow_payload(schema))

    assert [field.dataType.simpleString() for field in offered.fields] == [
        field.dataType.simpleString() for field in schema.fields
    ]
    assert all(field.nullable for field in offered.fields)
    assert offered["s"].dataType["x"].nullable


@pytest.mark.parametrize("kind", [NullType(), VariantType(), YearMonthIntervalType()])
def test_a_type_of_spark_that_no_topic_has_is_refused_with_its_column(kind):
    inner = StructType([StructField("x", kind)])

    with pytest.raises(
        errors.SchemaTypeMismatch, match=r"column 's\.x' is .* no column of a topic"
    ):
        typed_values.arrow_payload(StructType([StructField("s", inner)]))
    with pytest.raises(errors.SchemaTypeMismatch):
        ValueWriter.of("arrow", StructType([StructField("x", kind)]), "none")


def test_a_projection_without_payload_reads_nothing_of_it():
    found = reader("json", "")

    assert len(found.payload) == 0
    assert found.columns(untyped(b"no json"), "t") == []


def test_a_writer_of_payload_has_columns_to_write_and_none_that_is_reserved():
    with pytest.raises(errors.SchemaMissingColumn):
        writer("arrow", "")
    with pytest.raises(errors.SchemaReservedColumn, match="'__offset'"):
        writer("arrow", "__offset BIGINT")
    with pytest.raises(errors.SchemaUnknownColumn, match="two columns 'ID'"):
        writer("arrow", "id INT, ID INT")


@pytest.mark.parametrize(
    ("kind", "path"),
    [
        (COLLATED, "c"),
        (StructType([StructField("a", ArrayType(COLLATED))]), r"c\.a\.element"),
        (MapType(COLLATED, StringType()), r"c\.key"),
        (MapType(StringType(), COLLATED), r"c\.value"),
    ],
)
def test_text_with_a_collation_is_not_written_without_it(kind, path):
    column = StructType([StructField("c", kind)])
    says = f"column '{path}' is STRING COLLATE UTF8_LCASE, and a topic keeps no collation"
    for value_format in ("arrow", "json"):
        with pytest.raises(errors.SchemaTypeMismatch, match=says):
            ValueWriter.of(value_format, column, "validate")


def test_plans_of_values_travel_to_tasks():
    for plan in (writer("arrow"), reader("json"), writer("json", mode="none")):
        assert pickle.loads(pickle.dumps(plan)) == plan


# -- writing --------------------------------------------------------------------------------------


def test_typed_values_are_the_columns_in_the_order_and_spelling_of_the_schema():
    async def act(stage):
        first = await stage.client.schemas.register(stage.topic, writer("arrow").schema)
        other = writer("schema", "NAME STRING, ID INT")
        version = await other.version(stage.client.schemas, stage.topic)

        columns = {"NAME": ["a"], "ID": pa.array([1], pa.int32())}
        values = other.values(pa.RecordBatch.from_pydict(columns), version)

        assert version == first
        assert values.schema.names == ["id", "name"]
        assert values.to_pylist() == [{"id": 1, "name": "a"}]
        assert other.schema_version(version) == 1

    play(act)


def test_json_values_are_text_by_the_registered_schema_or_by_none():
    async def act(stage):
        plan = writer("json")
        version = await plan.version(stage.client.schemas, stage.topic)
        values = plan.values(batch([1, None], ["a", None]), version)

        assert values.to_pylist() == [b'{"id":1,"name":"a"}', b"{}"]
        assert (version.number, plan.schema_version(version)) == (1, 0)
        free = writer("json", "other INT", mode="none")
        assert await free.version(stage.client.schemas, stage.topic) is None
        rows = pa.RecordBatch.from_pydict({"other": pa.array([1], pa.int32())})
        assert free.values(rows, None).to_pylist() == [b'{"other":1}']

    play(act)


def test_a_schema_is_grown_by_its_option_and_else_an_error_that_names_the_field():
    async def act(stage):
        schemas = stage.client.schemas
        await schemas.register(stage.topic, writer("arrow").schema)
        wide = "id BIGINT, name STRING, more INT"

        with pytest.raises(errors.SchemaIncompatible, match=r"INCOMPATIBLE\] column 'id' is of"):
            await writer("arrow", wide).version(schemas, stage.topic)
        grown = await writer("arrow", wide, "evolve").version(schemas, stage.topic)

        assert grown.number == 2

    play(act)


def test_by_the_registered_schema_means_that_there_is_one():
    async def act(stage):
        schemas = stage.client.schemas
        with pytest.raises(errors.SchemaNotRegistered):
            await writer("schema").version(schemas, stage.topic)
        with pytest.raises(errors.SchemaNotRegistered):
            await typed_values.registered_schema(schemas, [stage.topic], "schema", declared=True)
        with pytest.raises(errors.SchemaNotRegistered):
            await typed_values.registered_schema(schemas, [stage.topic], "json", declared=False)
        declared = typed_values.registered_schema(schemas, [stage.topic], "arrow", declared=True)
        assert await declared is None

    play(act)
    with pytest.raises(errors.OptionConflict, match="schemaMode=none"):
        writer("schema", mode="none")


def test_a_null_is_not_written_where_somebody_registered_not_null():
    async def act(stage):
        required = pa.schema([pa.field("id", pa.int32(), nullable=False), ("name", pa.string())])
        await stage.client.schemas.register(stage.topic, required)
        plan = writer("arrow")
        version = await plan.version(stage.client.schemas, stage.topic)

        assert plan.values(batch([1], ["a"]), version).num_rows == 1
        with pytest.raises(errors.SchemaIncompatible, match="column 'id' is NOT NULL"):
            plan.values(batch([1, None], ["a", "b"]), version)

    play(act)


def test_rows_that_cannot_be_written_are_told_apart_with_their_reasons():
    payload = pa.RecordBatch.from_pydict({"d": [0.5, float("nan"), None, 1.0, -float("inf")]})
    plan = ValueWriter.of("json", StructType([StructField("d", DoubleType())]), "none")

    reasons = plan.misfits(payload, None)

    says = "[LEDGER_SCHEMA.TYPE_MISMATCH] column 'd' has a NaN"
    assert [row and row[: len(says)] for row in reasons.to_pylist()] == [
        None,
        says,
        None,
        None,
        says,
    ]
    good = payload.filter(reasons.is_null())
    assert plan.misfits(good, None) is None
    assert plan.values(good, None).to_pylist() == [b'{"d":0.5}', b"{}", b'{"d":1}']
    assert plan.misfits(payload.slice(0, 0), None) is None


# -- reading --------------------------------------------------------------------------------------


def test_rows_of_every_version_are_read_by_name_in_the_widest_type():
    wide = reader("arrow", "name STRING, id BIGINT, more INT")

    ids, names, more = wide.columns(typed(batch([1, None], ["a", "b"]), key=[b"k", None]), "t")

    assert ids.to_pylist() == ["a", "b"]
    assert (names.type, names.to_pylist()) == (pa.int64(), [1, None])
    assert (more.type, more.to_pylist()) == (pa.int32(), [None, None])


def test_a_payload_column_may_be_called_as_the_columns_of_bytes_are():
    payload = pa.RecordBatch.from_pydict({"value": pa.array([7], pa.int32()), "key": ["k"]})
    found = reader("arrow", "key STRING, value INT").columns(typed(payload, key=[b"K"]), "t")

    assert [column.to_pylist() for column in found] == [["k"], [7]]


def test_json_is_read_from_text_and_from_columns():
    plan = reader("json")

    for rows in (untyped(b'{"id":1,"name":"a"}', None), typed(batch([1, None], ["a", None]))):
        assert [column.to_pylist() for column in plan.columns(rows, "t")] == [
            [1, None],
            ["a", None],
        ]


@pytest.mark.parametrize(
    ("plan", "rows", "says"),
    [
        (reader("json"), untyped(b"{}", b"{", b"{}"), "partition 3, offset 101: the value"),
        (reader("arrow"), untyped(b"{}"), "offsets 100 to 100: the values are bytes"),
        (
            reader("arrow"),
            typed(pa.RecordBatch.from_pydict({"id": [1 << 40]}), version=7),
            "offsets 100 to 100 (version 7 of its schema): column 'id' of type int64",
        ),
        (
            reader("arrow"),
            typed(pa.RecordBatch.from_pydict({"name": [1]}), version=0),
            "offsets 100 to 100: column 'name' is int64, not string",
        ),
    ],
)
def test_rows_that_do_not_fit_are_an_error_with_their_place(plan, rows, says):
    with pytest.raises(errors.SchemaIncompatible) as raised:
        plan.columns(rows, "t")

    assert (
        f"[LEDGER_SCHEMA.INCOMPATIBLE] topic 't', partition 3, {says[says.find('off') :]}"
        in str(raised.value)
    )


def test_a_column_that_the_topics_do_not_have_is_refused_before_any_row():
    registered = pa.schema([("id", pa.int32()), ("name", pa.string())])

    with pytest.raises(errors.SchemaMissingColumn, match="'more'"):
        reader("arrow", "more INT", registered)
    with pytest.raises(errors.SchemaTypeMismatch, match="Declare the column as string"):
        reader("arrow", "name INT", registered)
    assert reader("json", "more INT", registered).columns(untyped(b"{}"), "t")[0].null_count == 1


def test_of_an_entry_only_the_columns_asked_for_are_decoded_however_they_are_spelled():
    registered = pa.schema([("id", pa.int32()), ("name", pa.string())])
    declared = spark("__offset BIGINT, ID INT")

    def decoded(value_format, payload, known):
        return reader(value_format, payload, known).entry_columns(declared)

    assert decoded("arrow", "ID INT", registered) >= {"id"}
    assert "name" not in decoded("arrow", "ID INT", registered)
    assert decoded("json", "ID INT", registered) >= {"id", "value"}
    assert decoded("arrow", "ID INT", None) is None
    only_beside = reader("json", "", None).entry_columns(spark("__key STRING"), with_key=True)
    assert only_beside == {"key", "__key"}


def test_declared_columns_are_read_where_others_have_no_one_type():
    async def act(stage):
        schemas = stage.client.schemas
        await schemas.set_compatibility(stage.topic, Compatibility.NONE)
        for columns in (ID_NAME, "id STRING, name STRING"):
            await schemas.register(stage.topic, writer("arrow", columns).schema)

        async def seen(declared):
            return await typed_values.registered_schema(
                schemas, [stage.topic], "arrow", declared=declared
            )

        with pytest.raises(errors.SchemaIncompatible, match="column 'id'"):
            await seen(declared=False)
        assert await seen(declared=True) is None

    play(act)


def test_a_declared_column_is_not_null_only_if_it_is():
    required = StructType([StructField("id", IntegerType(), False)])
    plan = ValueReader.of("arrow", required, None)

    assert len(plan.columns(typed(batch([1], ["a"])), "t")) == 1
    with pytest.raises(errors.SchemaIncompatible, match="column 'id' is NOT NULL"):
        plan.columns(typed(batch([None], ["a"])), "t")


# -- both -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("value_format", ["arrow", "json"])
def test_rows_written_by_two_versions_are_read_back_by_name(value_format):
    async def act(stage):
        intent = await stage.intent()
        schemas = stage.client.schemas
        old = batch([1, None], ["a", "b"])
        new = pa.RecordBatch.from_pydict({"more": pa.array([5], pa.int32()), "id": [1 << 40]})
        for number, (text, rows) in enumerate(((ID_NAME, old), ("more INT, id BIGINT", new))):
            plan = writer(value_format, text, "evolve")
            version = await plan.version(schemas, stage.topic)
            settings = TaskSettings(schema_version=plan.schema_version(version))
            task = LoopTask(stage.client, stage.topic, intent, task_index=0, settings=settings)
            await task.write(None, plan.values(rows, version))
            row_kinds = {stage.topic.id: RowKind(frozenset({version.number}), evolves=True)}
            await stage.commit(intent, number, await task.finish(), row_kinds=row_kinds)

        assert await read_all(stage, value_format) == [
            {"more": None, "id": 1, "name": "a"},
            {"more": None, "id": None, "name": "b"},
            {"more": 5, "id": 1 << 40, "name": None},
        ]

    play(act)


async def read_all(stage, value_format):
    client = await stage.another()
    registered = await typed_values.registered_schema(
        client.schemas, [stage.topic], value_format, declared=False
    )
    payload = typed_values.spark_payload(registered)
    plan = ValueReader.of(value_format, payload, registered)
    state = await client.log(stage.topic.id).fold(fresh=True)
    found = []
    for task in plan_read(state, {0: (0, state.partitions[0].end_offset)}):
        async for rows in read_task(client.ledgers, task):
            columns = plan.columns(block_of(rows), "t")
            schema = to_arrow_schema(payload, timezone="UTC")
            found += pa.RecordBatch.from_arrays(columns, schema=schema).to_pylist()
    return found
