"""Values of AVRO and of JSON one by one, as Python's objects. Pure.

Always true: this decodes whatever Avro's specification or JSON allows, and its errors tell what is
wrong in which field; avro_columns.py and json_columns.py decode usual values together, and leave
the others to this file. An object that is returned fits pyarrow.array with types.raw_type. Fields
of JSON are found by the schema's names; Pulsar's clients write JSON as their languages do, not as
Avro does: a union's value without the name of its branch, bytes as base64, a null field left out.
An enum of JSON is the text that the client wrote, which need not be a symbol (Python's client
writes the value of an enum's member; a number becomes text).
"""

import json
import math
import struct
from base64 import b64decode
from decimal import Context, Decimal, Inexact, InvalidOperation
from typing import Any

from spark_ledger.topic.schema.shapes import Field, ValueShape

INT_END, LONG_END = 2**31, 2**63
_FLOATS = {"float": struct.Struct("<f"), "double": struct.Struct("<d")}
_EXACT = Context(prec=100, traps=[Inexact, InvalidOperation])
_VARINT_BITS_MAX = 63
_ITEMS_WITHOUT_BYTES_MAX = 16
_WHOLE_ENDS = {"int": INT_END, "long": LONG_END}
_DECODER = json.JSONDecoder(parse_float=Decimal)  # json.loads would make a decoder for each value


class BadValue(ValueError):
    """A value that is not what its schema describes."""


# -- AVRO -----------------------------------------------------------------------------------------


def read_avro(data: bytes, shape: ValueShape) -> Any:
    """The value in `data`; bytes after it are ignored, as Avro's readers do. Raises BadValue."""
    return _AvroReader(data).read(shape)


class _AvroReader:
    def __init__(self, data: bytes) -> None:
        self._data = data
        self._at = 0

    def read(self, shape: ValueShape) -> Any:
        kind = shape.kind
        if kind == "record":
            return {field.name: self._field(field) for field in shape.fields}
        if kind == "union":
            return self._union(shape)
        if kind == "array":
            return self._items(shape, self.read)
        if kind == "map":
            text = ValueShape("string")
            return self._items(shape, lambda values: (self.read(text), self.read(values)))
        if kind == "null":
            return None
        if kind == "boolean":
            return self._bytes(1) == b"\x01"
        if kind in _FLOATS:
            return _FLOATS[kind].unpack(self._bytes(_FLOATS[kind].size))[0]
        if kind == "fixed":
            return self._bytes(shape.size)
        if kind in ("bytes", "string"):
            data = self._bytes(self._long())
            return data if kind == "bytes" else _text(data)
        number = self._long()
        if kind == "enum":
            return shape.symbols[self._index(number, len(shape.symbols), "symbols")]
        if kind == "int" and not -INT_END <= number < INT_END:
            raise BadValue(f"{number} is no int")
        return number

    def _field(self, field: Field) -> Any:
        try:
            return self.read(field.shape)
        except BadValue as bad_value:
            raise BadValue(f"{field.name}: {bad_value}") from None

    def _union(self, shape: ValueShape) -> Any:
        index = self._index(self._long(), len(shape.inner), "branches")
        branch = shape.inner[index]
        return _member(shape, branch, index, self.read(branch))

    def _items(self, shape: ValueShape, read: Any) -> list[Any]:
        items: list[Any] = []
        begin = self._at
        while count := self._long():
            if count < 0:
                self._long()
            for _ in range(abs(count)):
                items.append(read(shape.inner[0]))
                if len(items) > self._at - begin + _ITEMS_WITHOUT_BYTES_MAX:
                    raise BadValue(f"a list of {count} items without bytes")
        return items

    def _index(self, number: int, count: int, what: str) -> int:
        if not 0 <= number < count:
            raise BadValue(f"number {number} of {count} {what}")
        return number

    def _long(self) -> int:
        number = shift = 0
        while True:
            (byte,) = self._bytes(1)
            number |= (byte & 0x7F) << shift
            if byte < 0x80:
                break
            shift += 7
            if shift > _VARINT_BITS_MAX:
                raise BadValue("a number of more than ten bytes")
        if number >= 2 * LONG_END:
            raise BadValue("a number of more than 64 bits")
        return (number >> 1) ^ -(number & 1)

    def _bytes(self, size: int) -> bytes:
        end = self._at + size
        if size < 0 or end > len(self._data):
            raise BadValue(f"{size} bytes at {self._at} of {len(self._data)}")
        data, self._at = self._data[self._at : end], end
        return data


def _text(data: bytes) -> str:
    try:
        return data.decode()
    except UnicodeDecodeError as error:
        raise BadValue(f"text that is not UTF-8: {error}") from None


def _member(union: ValueShape, branch: ValueShape, index: int, value: Any) -> Any:
    """The value of a branch as types.raw_type has it."""
    if branch.kind == "null":
        return None
    if len(union.branches) == 1:
        return value
    nulls_before = sum(before.kind == "null" for before in union.inner[:index])
    return {f"member{index - nulls_before}": value}


# -- JSON -----------------------------------------------------------------------------------------


def read_json(data: bytes, shape: ValueShape) -> Any:
    """Raises BadValue."""
    try:
        value = _DECODER.decode(data.decode())
    except (ValueError, RecursionError, InvalidOperation) as error:
        raise BadValue(f"no JSON: {error}") from None
    return _of_json(shape, value)


def _of_json(shape: ValueShape, value: Any) -> Any:
    kind = shape.kind
    if kind == "union":
        return _union_of_json(shape, value)
    if value is None:  # a client may leave out what is null, whatever its schema
        return None
    end = _WHOLE_ENDS.get(kind, 0)
    if type(value) is int and -end <= value < end:
        return value
    if shape.logical == "decimal":
        return _decimal(shape, value)
    if kind == "record" and isinstance(value, dict):
        return {field.name: _field_of_json(field, value) for field in shape.fields}
    if kind == "array" and isinstance(value, list):
        return [_of_json(shape.inner[0], item) for item in value]
    if kind == "map" and isinstance(value, dict):
        return [(_utf8(key), _of_json(shape.inner[0], item)) for key, item in value.items()]
    if kind == "boolean" and isinstance(value, bool):
        return value
    if kind in ("string", "enum") and isinstance(value, str):
        return _utf8(value)
    if kind in ("bytes", "fixed") and isinstance(value, str):
        return _base64(value)
    is_number = isinstance(value, int) and not isinstance(value, bool)
    if kind == "enum" and is_number:
        return str(value)
    if kind in _FLOATS and (is_number or isinstance(value, float | Decimal)):
        return _float(value)
    if kind in _FLOATS and value in ("NaN", "Infinity", "-Infinity"):
        return float(value)
    raise BadValue(f"{json.dumps(value, default=str)[:100]} is no {kind}")


def _field_of_json(field: Field, members: dict[str, Any]) -> Any:
    try:
        return _of_json(field.shape, members.get(field.name))
    except BadValue as bad_value:
        raise BadValue(f"{field.name}: {bad_value}") from None


def _union_of_json(shape: ValueShape, value: Any) -> Any:
    """The first branch that has the value."""
    if value is None:
        return None
    if len(shape.branches) == 1:
        return _of_json(shape.branches[0], value)
    for index, branch in enumerate(shape.inner):
        if branch.kind != "null":
            try:
                return _member(shape, branch, index, _of_json(branch, value))
            except BadValue:
                continue
    raise BadValue(f"{json.dumps(value, default=str)[:100]} fits no branch of the union")


def _decimal(shape: ValueShape, value: Any) -> Decimal:
    try:
        if isinstance(value, bool) or not isinstance(value, int | str | Decimal):
            raise TypeError
        number = Decimal(value)
        digits = _EXACT.to_integral_exact(_EXACT.scaleb(number, shape.scale))
        if not digits.is_finite() or digits.copy_abs() >= 10**shape.precision:
            raise Inexact
    except (ArithmeticError, TypeError):
        raise BadValue(
            f"{str(value)[:100]} is no decimal of {shape.precision} digits, {shape.scale} of them"
            " after the point"
        ) from None
    return number


def _float(value: Any) -> float:
    try:
        number = float(value)
    except OverflowError:
        number = math.inf
    if math.isinf(number) and not (isinstance(value, float)):
        raise BadValue(f"{str(value)[:100]} is too large")
    return number


def _utf8(text: str) -> str:
    try:
        text.encode()
    except UnicodeEncodeError:
        raise BadValue("text with half of a surrogate pair") from None
    return text


def _base64(text: str) -> bytes:
    try:
        return b64decode(text, validate=True)
    except ValueError:
        raise BadValue(f"{text[:100]!r} is not base64") from None


# -- defaults -------------------------------------------------------------------------------------


def default_of(shape: ValueShape, plain: Any) -> Any:
    """The default of a field, which a schema has as Avro writes JSON: bytes as text of Latin-1, and
    a union's value without its branch. Raises BadValue."""
    kind = shape.kind
    if kind == "union":
        for index, branch in enumerate(shape.inner):
            try:
                return _member(shape, branch, index, default_of(branch, plain))
            except BadValue:
                continue
    elif kind == "null" and plain is None:
        return None
    elif kind == "record" and isinstance(plain, dict):
        return {f.name: default_of(f.shape, plain.get(f.name, f.default)) for f in shape.fields}
    elif kind == "array" and isinstance(plain, list):
        return [default_of(shape.inner[0], item) for item in plain]
    elif kind == "map" and isinstance(plain, dict):
        return [(key, default_of(shape.inner[0], item)) for key, item in plain.items()]
    elif kind in ("bytes", "fixed") and isinstance(plain, str):
        return plain.encode("latin-1", "replace")
    elif plain is not None and shape.logical != "decimal":
        return _of_json(shape, plain)
    raise BadValue(f"{str(plain)[:100]} is no {kind}")
