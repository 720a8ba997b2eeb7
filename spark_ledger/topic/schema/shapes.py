"""The shape of a value that a client's schema of Avro describes: a tree without names to look up.
Pure.

Always true: a shape is complete by itself and picklable, so that a task needs no parser. A schema
of JSON and a schema of AVRO have the same shapes. A logical type that Avro does not know for its
kind is left out, as Avro demands. A record within itself has no shape; the number of parts is
bounded, as names let a small schema describe an endless tree.
"""

import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import pyarrow as pa

from spark_ledger import errors
from spark_ledger.topic.schema.client_schemas import ClientSchema, parsed

PARTS_MAX = 10_000
DECIMAL_DIGITS_MAX = 38
NO_DEFAULT = ...
_LOGICAL = {
    "int": ("date", "time-millis"),
    "long": (
        *("time-micros", "timestamp-millis", "timestamp-micros"),
        *("local-timestamp-millis", "local-timestamp-micros"),
    ),
    "bytes": ("decimal",),
    "fixed": ("decimal",),
}
"""By kind the logical types that have columns of their own. A uuid is text, as its kind."""


@dataclass(frozen=True, slots=True)
class ValueShape:
    """A type of Avro's. `inner` are a union's branches, the type of an array's items, or of a map's
    values. `default` is an enum's. `column` is the type of Spark's column for a value of JSON: of a
    map the type of its keys, of an array that is a map in Spark this map."""

    kind: str
    name: str = ""
    logical: str = ""
    precision: int = 0
    scale: int = 0
    fields: tuple["Field", ...] = ()
    symbols: tuple[str, ...] = ()
    default: str | None = None
    size: int = 0
    inner: tuple["ValueShape", ...] = ()
    column: pa.DataType | None = None

    @property
    def branches(self) -> tuple["ValueShape", ...]:
        """The branches of a union that are not null; the shape itself if it is no union."""
        branches = self.inner if self.kind == "union" else (self,)
        return tuple(branch for branch in branches if branch.kind != "null")


@dataclass(frozen=True, slots=True)
class Field:
    """A field of a record. `default` is JSON as Avro writes it, or NO_DEFAULT."""

    name: str
    shape: ValueShape
    aliases: tuple[str, ...] = ()
    default: Any = NO_DEFAULT


def shape_of(schema: ClientSchema) -> ValueShape:
    """Raises errors.SchemaUnreadable, errors.SchemaTypeMismatch for a schema without a shape."""
    with warnings.catch_warnings():  # a logical type that is not known is left out, by Avro's rule
        warnings.simplefilter("ignore")
        return _shape(parsed(schema), (), iter(range(PARTS_MAX)))


def _shape(schema: Any, around: tuple[str, ...], parts: Iterator[int]) -> ValueShape:
    """`around` are the names of the records around the schema."""
    if next(parts, None) is None:
        raise errors.SchemaTypeMismatch(f"the client's schema has more than {PARTS_MAX} parts")
    kind = "record" if schema.type == "error" else schema.type
    name = getattr(schema, "fullname", "") if kind in ("record", "enum", "fixed") else ""
    if kind == "record":
        if name in around:
            raise errors.SchemaTypeMismatch(f"record {name!r} of the client's schema has itself")
        within = (*around, name)
        fields = tuple(
            Field(
                field.name,
                _shape(field.type, within, parts),
                _texts(field.get_prop("aliases")),
                field.default if field.has_default else NO_DEFAULT,
            )
            for field in schema.fields
        )
        return ValueShape(kind, name, fields=fields)
    if kind == "enum":
        default = schema.get_prop("default")
        return ValueShape(kind, name, symbols=tuple(schema.symbols), default=default)
    if kind in ("array", "map"):
        inner = schema.items if kind == "array" else schema.values
        return ValueShape(kind, inner=(_shape(inner, around, parts),))
    if kind == "union":
        return ValueShape(kind, inner=tuple(_shape(part, around, parts) for part in schema.schemas))
    size = schema.size if kind == "fixed" else 0
    logical = schema.get_prop("logicalType")
    if logical not in _LOGICAL.get(kind, ()):
        return ValueShape(kind, name, size=size)
    if logical != "decimal":
        return ValueShape(kind, logical=logical)
    precision, scale = schema.get_prop("precision"), schema.get_prop("scale") or 0
    if not (isinstance(precision, int) and isinstance(scale, int)):
        return ValueShape(kind, name, size=size)
    if not 0 <= scale <= precision <= DECIMAL_DIGITS_MAX or not precision:
        return ValueShape(kind, name, size=size)
    return ValueShape(kind, name, logical, precision, scale, size=size)


def _texts(plain: Any) -> tuple[str, ...]:
    return tuple(text for text in plain or () if isinstance(text, str))
