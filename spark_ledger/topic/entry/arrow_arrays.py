"""Arrow arrays made of numpy arrays and Python lists, numpy arrays made of Arrow arrays, and
distinct numbers. Nothing here loads pandas or numpy.ma (numpy.unique loads numpy.ma).

pyarrow.array and Array.to_numpy look for pandas' types, and so load pandas if it is installed: this
costs every Python process that Spark starts a quarter of a second. The functions here give equal
arrays without pandas.
"""

from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt
import pyarrow as pa

_OFFSET_DTYPE = np.int32
TypeTests = Sequence[Callable[[pa.DataType], bool]]
TEXT: TypeTests = (pa.types.is_string, pa.types.is_large_string, pa.types.is_string_view)
BYTES: TypeTests = (
    pa.types.is_binary,
    pa.types.is_large_binary,
    pa.types.is_binary_view,
    pa.types.is_fixed_size_binary,
)
LISTS: TypeTests = (pa.types.is_list, pa.types.is_large_list, pa.types.is_fixed_size_list)
OFFSET_BYTES: TypeTests = (*TEXT[:2], *BYTES[:2])
OFFSET_LISTS: TypeTests = (pa.types.is_list, pa.types.is_map, pa.types.is_large_list)
"""Types with offsets: a value is between two offsets into a buffer or an array of all values."""
Numbers = TypeVar("Numbers", bound=np.generic)


def of_numpy(values: npt.NDArray[Any]) -> pa.Array:
    """A view of a column of numbers or booleans, without nulls."""
    assert values.ndim == 1, "one column"
    if values.dtype == np.bool_:
        bits = np.packbits(values, bitorder="little")
        return pa.Array.from_buffers(pa.bool_(), len(values), [None, pa.py_buffer(bits)])
    data = pa.py_buffer(np.ascontiguousarray(values))
    return pa.Array.from_buffers(pa.from_numpy_dtype(values.dtype), len(values), [None, data])


def as_numpy(column: pa.Array) -> npt.NDArray[Any]:
    """A view of a column of numbers, or a copy of a column of booleans. A null becomes an arbitrary
    value."""
    start, count = column.offset, len(column)
    data = column.buffers()[1]
    if pa.types.is_boolean(column.type):
        if data is None:
            return np.zeros(0, dtype=np.bool_)
        bits = np.frombuffer(data, dtype=np.uint8)
        bools = np.unpackbits(bits, count=start + count, bitorder="little")
        return bools[start:].view(np.bool_)
    assert column.type.bit_width >= 8, "numbers"
    kind = np.dtype(f"i{column.type.bit_width // 8}")
    if pa.types.is_integer(column.type) or pa.types.is_floating(column.type):
        kind = np.dtype(column.type.to_pandas_dtype())
    if data is None:
        return np.zeros(0, dtype=kind)
    return np.frombuffer(data, dtype=kind, count=count, offset=start * kind.itemsize)


def is_any(kind: pa.DataType, tests: TypeTests) -> bool:
    return any(test(kind) for test in tests)


def offsets_of(column: pa.Array) -> npt.NDArray[Any]:
    """The position at which each value begins, and the end of the last value, in the buffer or the
    array of all values: a view of numbers of 32 or 64 bits. `column` must have a type of
    OFFSET_BYTES or OFFSET_LISTS."""
    if not len(column):
        return np.zeros(1, dtype=_OFFSET_DTYPE)
    is_large = is_any(column.type, _LARGE_TYPES)
    offsets = np.frombuffer(column.buffers()[1], dtype=np.int64 if is_large else _OFFSET_DTYPE)
    return offsets[column.offset : column.offset + len(column) + 1]


_LARGE_TYPES = (pa.types.is_large_string, pa.types.is_large_binary, pa.types.is_large_list)


def distinct_values(values: npt.NDArray[Numbers]) -> npt.NDArray[Numbers]:
    """The different numbers, rising."""
    ordered = np.sort(values)
    return ordered[_is_first(ordered)]


def distinct_with_indices(
    values: npt.NDArray[np.int64],
) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
    """The distinct numbers, rising, and for each of `values` its index among the distinct
    numbers."""
    order = np.argsort(values, kind="stable")
    ordered = values[order]
    firsts = _is_first(ordered)
    indices = np.empty(len(values), dtype=np.int64)
    indices[order] = np.cumsum(firsts) - 1
    return ordered[firsts], indices


def _is_first(ordered: npt.NDArray[Any]) -> npt.NDArray[np.bool_]:
    """For each number whether it differs from the number before."""
    firsts = np.ones(len(ordered), dtype=np.bool_)
    np.not_equal(ordered[1:], ordered[:-1], out=firsts[1:])
    return firsts


def of_list(values: Sequence[Any], kind: pa.DataType) -> pa.Array:
    """A column of these values: numbers, booleans, text, bytes, and lists and structs (as dicts) of
    such values; None becomes null.

    Raises TypeError for another type, OverflowError for a number that does not fit.
    """
    is_valid = [value is not None for value in values]
    null_bits = None if all(is_valid) else _bits(is_valid)
    if pa.types.is_boolean(kind):
        return _array(kind, values, null_bits, [_bits([bool(value) for value in values])])
    if pa.types.is_integer(kind) or pa.types.is_floating(kind):
        numbers = np.array([0 if v is None else v for v in values], dtype=kind.to_pandas_dtype())
        return _array(kind, values, null_bits, [pa.py_buffer(numbers)])
    if pa.types.is_binary(kind) or pa.types.is_string(kind):
        parts = [_encoded_bytes(value) for value in values]
        data = [_offsets(parts), pa.py_buffer(b"".join(parts))]
        return _array(kind, values, null_bits, data)
    if pa.types.is_list(kind):
        lists = [() if value is None else value for value in values]
        items = of_list([item for items in lists for item in items], kind.value_type)
        return _array(kind, values, null_bits, [_offsets(lists)], [items])
    if pa.types.is_struct(kind):
        fields = [_member(values, field) for field in kind]
        return _array(kind, values, null_bits, [], fields)
    raise TypeError(f"columns of {kind} are not made of Python values here")


def _array(
    kind: pa.DataType,
    values: Sequence[Any],
    null_bits: pa.Buffer | None,
    data: list[pa.Buffer],
    children: list[pa.Array] | None = None,
) -> pa.Array:
    return pa.Array.from_buffers(kind, len(values), [null_bits, *data], children=children)


def _member(values: Sequence[Any], field: pa.Field) -> pa.Array:
    members = [None if value is None else value[field.name] for value in values]
    return of_list(members, field.type)


def _encoded_bytes(value: Any) -> bytes:
    if value is None:
        return b""
    return value.encode() if isinstance(value, str) else bytes(value)


def _offsets(parts: Sequence[Any]) -> pa.Buffer:
    offsets = np.zeros(len(parts) + 1, dtype=np.int64)
    np.cumsum([len(part) for part in parts], out=offsets[1:])
    if offsets[-1] > np.iinfo(_OFFSET_DTYPE).max:
        raise OverflowError(f"{offsets[-1]} bytes or items do not fit into one column")
    return pa.py_buffer(offsets.astype(_OFFSET_DTYPE))


def _bits(flags: Sequence[bool]) -> pa.Buffer:
    return pa.py_buffer(np.packbits(np.array(flags, dtype=np.bool_), bitorder="little"))
