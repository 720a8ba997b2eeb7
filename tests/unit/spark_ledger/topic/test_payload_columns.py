import decimal

import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from spark_ledger import errors
from spark_ledger.topic.entry.payload_columns import check_convertible, conform
from spark_ledger.topic.schema.rules import nullable

REQUIRED = False


def batch(**columns):
    return pa.RecordBatch.from_pydict(columns)


def schema(*fields):
    return pa.schema([pa.field(*field) for field in fields])


def element(kind, null=True):
    return pa.list_(pa.field("element", kind, null))


def test_columns_are_found_by_name_whatever_their_order_and_case():
    found = conform(batch(B=["x"], a=[1]), schema(("a", pa.int64()), ("b", pa.string())))

    assert found.schema.names == ["a", "b"]
    assert found.to_pylist() == [{"a": 1, "b": "x"}]


def test_a_column_of_its_type_is_passed_on_without_a_copy():
    column = pa.array([{"x": ["a", None]}, None], pa.struct([("x", element(pa.string()))]))

    found = conform(batch(s=column), schema(("s", column.type)))

    assert found.column(0).buffers()[-1].address == column.buffers()[-1].address


def test_a_column_that_is_not_there_is_null_and_one_not_asked_for_is_left_aside():
    found = conform(batch(x=[1, 2], a=[3, 4]), schema(("a", pa.int64()), ("b", pa.string())))

    assert found.to_pylist() == [{"a": 3, "b": None}, {"a": 4, "b": None}]
    assert conform(batch(x=[1, 2]), schema()).num_rows == 2


@pytest.mark.parametrize("kind", [element(pa.int8()), pa.map_(pa.string(), pa.int8())])
def test_no_rows_are_no_rows_of_any_type(kind):
    found = conform(batch(a=pa.array([], kind)), schema(("a", widest(kind))))

    assert (found.num_rows, found.schema.field("a").type) == (0, widest(kind))


@pytest.mark.parametrize(
    ("column", "kind"),
    [
        (pa.array([1, None, -128], pa.int8()), pa.int64()),
        (pa.array([1.5, None, float("nan")], pa.float32()), pa.float64()),
        (pa.array(["a", None], pa.large_string()), pa.string()),
        (pa.array([b"a", None], pa.large_binary()), pa.binary()),
        (pa.array(["a", None, "a"]).dictionary_encode(), pa.string()),
        (pa.array([0, None], pa.timestamp("us", tz="Europe/Berlin")), pa.timestamp("us", "UTC")),
        (pa.array([None, None], pa.null()), pa.struct([("x", pa.int8())])),
        (pa.array([decimal.Decimal("1.5")], pa.decimal128(3, 1)), pa.decimal128(9, 1)),
        (pa.array([[1, None], None, []], pa.large_list(pa.int8())), element(pa.int64())),
        (pa.array([[1, 2], None], pa.list_(pa.int8(), 2)), element(pa.int8())),
        (pa.array([{"k": 1}, None, {}], pa.map_(pa.string(), pa.int8())), None),
        (pa.array([{"x": 1}, None, {"x": None}], pa.struct([("x", pa.int8())])), None),
        (pa.array([[{"x": 1}], None, [None]], element(pa.struct([("x", pa.int8())]))), None),
    ],
)
@pytest.mark.parametrize("start", [0, 1])
def test_wider_types_hold_the_same_values_in_whole_columns_and_in_slices(column, kind, start):
    kind = kind or widest(column.type)
    sliced = batch(a=column).slice(start)

    found = conform(sliced, schema(("a", kind)))

    found.validate(full=True)
    assert found.schema.field("a").type == kind
    if not pa.types.is_floating(kind):
        assert found.column(0).cast(kind).to_pylist() == unzoned(sliced.column(0), kind)
    else:
        assert str(found.column(0).to_pylist()) == str(sliced.column(0).to_pylist())


def unzoned(column, kind):
    return column.cast(kind).to_pylist() if pa.types.is_timestamp(kind) else column.to_pylist()


def widest(kind):
    """The type with 64-bit integers in it."""
    if pa.types.is_map(kind):
        return pa.map_(kind.key_type, widest(kind.item_type))
    if pa.types.is_struct(kind):
        return pa.struct([(field.name, widest(field.type)) for field in kind])
    return element(widest(kind.value_type)) if pa.types.is_list(kind) else pa.int64()


def test_a_struct_takes_new_fields_as_null_and_lets_old_ones_go():
    column = pa.array([{"x": 1, "old": 2}, None], pa.struct([("x", pa.int8()), ("old", pa.int8())]))
    kind = pa.struct([("new", pa.string()), ("X", pa.int32())])

    found = conform(batch(s=column), schema(("s", kind)))

    assert found.column(0).to_pylist() == [{"new": None, "X": 1}, None]


def test_what_a_query_that_runs_does_not_know_yet_is_read_if_it_fits_and_an_error_if_not():
    narrow = schema(("a", pa.int32()), ("f", pa.float32()))
    fits = batch(a=[7, None], f=[0.5, None])
    assert conform(fits, narrow).to_pylist() == fits.to_pylist()

    for rows in (batch(a=[1 << 40], f=[0.5]), batch(a=[1], f=[0.1])):
        with pytest.raises(errors.SchemaIncompatible, match="does not hold"):
            conform(rows, narrow)


@pytest.mark.parametrize(
    ("column", "kind"),
    [
        (pa.array([1]), pa.string()),
        (pa.array(["1"]), pa.int64()),
        (pa.array([1]), pa.float64()),
        (pa.array([b"x"]), pa.string()),
        (pa.array([0], pa.timestamp("us")), pa.timestamp("us", "UTC")),
        (pa.array([[1]]), pa.int64()),
        (pa.array([{"x": 1}]), element(pa.int64())),
        (pa.array([decimal.Decimal("1.5")]), pa.decimal128(9, 2)),
    ],
)
def test_a_column_never_becomes_another_thing(column, kind):
    with pytest.raises(errors.SchemaIncompatible, match=r"column 'a' is"):
        conform(batch(a=column), schema(("a", kind)))
    with pytest.raises(errors.SchemaTypeMismatch, match=r"Declare the column as"):
        check_convertible(batch(a=column).schema, schema(("a", kind)))


def test_a_column_to_be_read_is_one_that_there_is():
    there = schema(("a", pa.int32()))
    check_convertible(there, schema(("A", pa.int64())))

    with pytest.raises(
        errors.SchemaMissingColumn, match=r"no version .* column 'b'.*only columns among: a\."
    ):
        check_convertible(there, schema(("b", pa.int64())))


@pytest.mark.parametrize(
    ("column", "field"),
    [
        (pa.array([1, None]), ("a", pa.int64(), REQUIRED)),
        (
            pa.array([{"x": 1}, {"x": None}, None]),
            ("a", pa.struct([pa.field("x", pa.int64(), REQUIRED)])),
        ),
        (pa.array([[1], [None], None]), ("a", element(pa.int64(), REQUIRED))),
        (
            pa.array([{"k": None}], pa.map_(pa.string(), pa.int8())),
            ("a", pa.map_(pa.string(), pa.field("value", pa.int8(), REQUIRED))),
        ),
    ],
)
def test_a_null_where_the_schema_says_not_null_is_an_error(column, field):
    with pytest.raises(errors.SchemaIncompatible, match=r"column 'a.*' is NOT NULL .* 1 of"):
        conform(batch(a=column), schema(field))


def test_a_null_around_a_not_null_is_no_error():
    inner = pa.struct([pa.field("x", element(pa.int64()), REQUIRED)])
    column = pa.array([{"x": [1]}, None, {"x": []}], pa.struct([("x", pa.list_(pa.int8()))]))

    found = conform(batch(a=column), schema(("a", inner)))

    assert found.column(0).to_pylist() == [{"x": [1]}, None, {"x": []}]
    rows = pa.array([[9], None, [None]]).slice(0, 2)
    assert conform(batch(a=rows), schema(("a", element(pa.int64(), REQUIRED)))).num_rows == 2


def test_a_missing_column_that_is_not_null_is_an_error():
    with pytest.raises(errors.SchemaIncompatible, match="column 'b' is NOT NULL"):
        conform(batch(a=[1]), schema(("a", pa.int64()), ("b", pa.int64(), REQUIRED)))


VALUES = st.recursive(
    st.sampled_from([(pa.int8(), pa.int32()), (pa.float32(), pa.float64())]),
    lambda inner: st.one_of(
        inner.map(lambda kinds: tuple(pa.list_(pa.field("element", kind)) for kind in kinds)),
        inner.map(lambda kinds: tuple(pa.struct([("x", kind)]) for kind in kinds)),
        inner.map(lambda kinds: tuple(pa.map_(pa.string(), kind) for kind in kinds)),
    ),
    max_leaves=4,
)


def value_of(kind):
    if pa.types.is_map(kind):
        inner = st.dictionaries(st.sampled_from("xyz"), value_of(kind.item_type), max_size=2)
        return st.none() | inner.map(lambda found: list(found.items()))
    if pa.types.is_struct(kind):
        return st.none() | value_of(kind.field("x").type).map(lambda x: {"x": x})
    if pa.types.is_list(kind):
        return st.none() | st.lists(value_of(kind.value_type), max_size=3)
    return st.none() | st.integers(-100, 100)


@settings(deadline=None, max_examples=60)
@given(VALUES.flatmap(lambda kinds: st.tuples(st.just(kinds), st.lists(value_of(kinds[0])))))
def test_any_nested_column_keeps_its_rows_when_it_is_widened(drawn):
    (narrow, wide), rows = drawn
    column = pa.array([*rows, None, *rows], narrow).slice(len(rows) // 2)

    found = conform(batch(a=column), nullable(schema(("a", wide))))

    found.validate(full=True)
    assert found.column(0).to_pylist() == column.to_pylist()
