import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from spark_ledger import errors
from spark_ledger.topic.schema import rules as schema_rules
from spark_ledger.topic.schema.records import Compatibility, SchemaHead, canonical, version_of
from spark_ledger.topic.schema.rules import SchemaMode, can_read, decide, union

REQUIRED = False
A32 = ("a", pa.int32())
A64 = ("a", pa.int64())
B = ("b", pa.string())
VALIDATE, EVOLVE = SchemaMode.VALIDATE, SchemaMode.EVOLVE


def schema(*fields):
    return canonical(pa.schema([pa.field(*field) for field in fields]))


def versions(*schemas):
    return [version_of(n, one) for n, one in enumerate(schemas, 1)]


def decided(written, known, mode, compatibility=Compatibility.BACKWARD):
    head = SchemaHead(len(known), compatibility)
    return decide("t", written, head, versions(*known), mode)


def test_the_first_write_registers_its_columns_all_of_them_nullable():
    made = decided(schema(("a", pa.int32(), REQUIRED), B), [], VALIDATE)

    assert (made.number, made.schema) == (1, schema(A32, B))


def test_a_write_uses_the_newest_version_that_it_is_whatever_its_order_and_case():
    known = [schema(A32), schema(A32, B), schema(A32)]

    assert decided(schema(("A", pa.int32())), known, VALIDATE).number == 3
    assert decided(schema(("B", pa.string()), A32), known, EVOLVE).number == 2


def test_not_null_is_not_compared_with_what_is_written():
    required = schema(("a", pa.int32(), REQUIRED), B)

    assert decided(schema(A32, B), [required], VALIDATE).schema == required
    assert decided(required, [schema(A32, B)], VALIDATE).number == 1
    assert decided(required, [required, schema(A32, B)], VALIDATE).number == 1
    assert decided(schema(A32, B), [schema(A32, B), required], VALIDATE).number == 1


@pytest.mark.parametrize(
    ("written", "says"),
    [
        (schema(A64, B), "column 'a' is of type int64, not int32, compared with version 1"),
        (schema(A32), "column 'b' is missing, compared with version 1"),
        (schema(A32, B, ("c", pa.int8())), "column 'c' is new, compared with version 1"),
    ],
)
def test_a_write_of_other_columns_says_which_and_how_to_evolve(written, says):
    with pytest.raises(errors.SchemaIncompatible) as raised:
        decided(written, [schema(A32, B)], VALIDATE)

    assert says in str(raised.value)
    assert "topic 't'" in str(raised.value)
    assert "register the columns as version 2 by schemaMode=evolve" in str(raised.value)
    assert decided(written, [schema(A32, B)], EVOLVE).number == 2


def test_a_write_that_may_not_evolve_is_not_told_to():
    with pytest.raises(errors.SchemaIncompatible) as raised:
        decided(schema(("a", pa.string())), [schema(A32)], VALIDATE)
    assert "evolve" not in str(raised.value)

    with pytest.raises(errors.SchemaIncompatible, match=r"column 'a' of type int32 is not read as"):
        decided(schema(("a", pa.string())), [schema(A32)], EVOLVE)


def test_a_version_is_compared_with_every_one_before_it():
    """b was text in version 1, was dropped in 2: it cannot come back as a number in 3."""
    known = [schema(A32, B), schema(A32)]

    with pytest.raises(errors.SchemaIncompatible, match="rows of version 1"):
        decided(schema(A32, ("b", pa.int32())), known, EVOLVE)


def test_a_new_version_spells_its_columns_as_the_ones_before_it():
    inner = pa.struct([("Y", pa.int8()), ("z", pa.int8())])
    known = [schema(("Id", pa.int32()), ("s", pa.struct([("y", pa.int8())])))]

    made = decided(schema(("ID", pa.int32()), ("S", inner), B), known, EVOLVE)

    assert made.schema == schema(
        ("Id", pa.int32()), ("s", pa.struct([("y", pa.int8()), ("z", pa.int8())])), B
    )


NULLABLE_A, REQUIRED_A = schema(A32, B), schema(("a", pa.int32(), REQUIRED), B)
NONE, BACKWARD, FORWARD, FULL = "none", "backward", "forward", "full"


@pytest.mark.parametrize(
    ("old", "new", "allowed"),
    [
        (schema(A32), schema(A32, B), {NONE, BACKWARD, FORWARD, FULL}),
        (schema(A32, B), schema(A32), {NONE, BACKWARD, FORWARD, FULL}),
        (schema(A32), schema(A64), {NONE, BACKWARD}),
        (schema(A64), schema(A32), {NONE, FORWARD}),
        (schema(("f", pa.float32())), schema(("f", pa.float64())), {NONE, BACKWARD}),
        (schema(A32), schema(("a", pa.float64())), {NONE}),
        (schema(A32), schema(("a", pa.string())), {NONE}),
        (REQUIRED_A, NULLABLE_A, {NONE, BACKWARD}),
        (NULLABLE_A, REQUIRED_A, {NONE, FORWARD}),
        (schema(B), REQUIRED_A, {NONE, FORWARD}),
        (REQUIRED_A, schema(B), {NONE, BACKWARD}),
        (
            schema(("s", pa.list_(pa.struct([A32])))),
            schema(("s", pa.list_(pa.struct([A64, B])))),
            {NONE, BACKWARD},
        ),
        (
            schema(("m", pa.map_(pa.string(), pa.int8()))),
            schema(("m", pa.map_(pa.string(), pa.int64()))),
            {NONE, BACKWARD},
        ),
        (schema(("s", pa.struct([A32]))), schema(("s", pa.struct([("a", pa.bool_())]))), {NONE}),
        (schema(("s", pa.struct([A32]))), schema(("s", pa.list_(pa.int32()))), {NONE}),
    ],
)
def test_what_each_compatibility_allows(old, new, allowed):
    found = {
        compatibility.value
        for compatibility in Compatibility
        if schema_rules.first_misfit(new, versions(old), compatibility) is None
    }

    assert found == allowed


def test_not_null_counts_where_a_schema_is_registered_by_somebody():
    head, known = SchemaHead(1, Compatibility.BACKWARD), versions(NULLABLE_A)

    with pytest.raises(errors.SchemaIncompatible, match="column 'a' is NOT NULL"):
        schema_rules.decide_registration("t", REQUIRED_A, head, known)
    forward = SchemaHead(1, Compatibility.FORWARD)
    made = schema_rules.decide_registration("t", REQUIRED_A, forward, known)
    assert (made.number, made.schema) == (2, REQUIRED_A)
    again = schema_rules.decide_registration("t", NULLABLE_A, head, [*known, made])
    assert again.number == 1


def test_a_reader_sees_every_column_there_ever_was_in_its_widest_type():
    old = schema(A32, B, ("s", pa.struct([pa.field("x", pa.int8(), REQUIRED)])))
    new = schema(("c", pa.int8(), REQUIRED), A64, ("s", pa.struct([("y", pa.int8())])))

    seen = union([old, new])

    inner = pa.struct([("y", pa.int8()), ("x", pa.int8())])
    assert seen == schema(("c", pa.int8()), A64, ("s", inner), B)


def test_a_column_that_is_not_null_everywhere_stays_so():
    assert union([REQUIRED_A, REQUIRED_A]) == REQUIRED_A
    assert union([REQUIRED_A, NULLABLE_A]) == NULLABLE_A


def test_types_of_which_none_is_the_widest_have_no_union():
    with pytest.raises(errors.SchemaIncompatible, match=r"'s\.a' is of type int32 in older rows"):
        union([schema(("s", pa.struct([A32]))), schema(("s", pa.struct([("a", pa.string())])))])


KINDS = st.sampled_from(
    [pa.int8(), pa.int32(), pa.int64(), pa.float32(), pa.float64(), pa.string()]
)
NESTED = st.recursive(
    KINDS,
    lambda kinds: st.one_of(
        kinds.map(lambda kind: pa.list_(pa.field("element", kind))),
        st.dictionaries(st.sampled_from("xy"), kinds, min_size=1).map(
            lambda fields: pa.struct(list(fields.items()))
        ),
    ),
    max_leaves=4,
)
SCHEMAS = st.dictionaries(st.sampled_from("abc"), st.tuples(NESTED, st.booleans()), min_size=1).map(
    lambda fields: canonical(
        pa.schema([pa.field(name, kind, null) for name, (kind, null) in fields.items()])
    )
)


@settings(deadline=None)
@given(
    st.lists(SCHEMAS, min_size=1, max_size=6),
    st.sampled_from([Compatibility.BACKWARD, Compatibility.FORWARD, Compatibility.FULL]),
)
def test_what_any_order_of_compatible_versions_holds_can_be_read_by_their_union(wanted, mode):
    known = []
    for one in wanted:
        head = SchemaHead(len(known), mode)
        try:
            made = schema_rules.decide_registration("t", one, head, known)
        except errors.SchemaIncompatible:
            continue
        if made.number > len(known):
            known.append(made)

    seen = union([version.schema for version in known])

    for version in known:
        assert can_read(seen, version.schema) is None
