"""Values of AVRO as raw columns: all values of a batch are decoded together, field by field. Pure.

    positions of the values -> each field is read at all positions, and moves the positions on

Always true: a row's bytes never influence another row. A row that is odd (damaged, or with a list
that is much longer than those of the others) is marked, and its values are arbitrary: plain.py
decodes the row by itself, and finds out what is wrong. A field of a record costs some operations on
arrays of numbers, whatever the number of rows. Items of lists are read round by round, item k of
all rows together, or all at once if their positions are known (numbers).
"""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from spark_ledger.topic.entry.arrow_arrays import of_list, of_numpy, offsets_of
from spark_ledger.topic.entry.message_batch import Longs
from spark_ledger.topic.entry.pulsar_columns import (
    LAST_BITS,
    PADDING,
    SEVENS,
    copy_spans,
    join_sevens,
)
from spark_ledger.topic.schema.shapes import ValueShape
from spark_ledger.topic.values.types import raw_type

ROUNDS_MIN, ROWS_FEW = 16, 8
"""After ROUNDS_MIN rounds of items, rows are odd that are fewer than ROWS_FEW."""
VARINT_BYTES_MAX = 10
_CONTINUES, _ONE = np.uint64(0x80), np.uint64(1)
_INT_MIN, _INT_MAX = -(2**31), 2**31 - 1
_FIXED_BYTES = {"boolean": 1, "float": 4, "double": 8}
_VARINTS = ("int", "long", "enum")

Flags = npt.NDArray[np.bool_]


class _Varints(NamedTuple):
    numbers: Longs
    sizes: Longs
    are_odd: Flags


class AvroColumns:
    """Reads the fields of values, which have no nulls, one after the other. `odd` marks rows."""

    def __init__(self, values: pa.Array) -> None:
        offsets = offsets_of(values).astype(np.int64)
        first, last = int(offsets[0]), int(offsets[-1])
        data = memoryview(values.buffers()[2] or b"")[first:last]
        self._buffer = b"".join((data, PADDING))
        total = last - first
        size = total + len(PADDING) - 7  # eight bytes can be read at each place
        self._words = np.ndarray((size,), dtype="<u8", buffer=self._buffer, strides=(1,))
        self._stops: Longs | None = None
        self._at = offsets[:-1] - first
        self._ends = offsets[1:] - first
        self.odd: Flags = np.zeros(len(values), dtype=np.bool_)

    def read(self, shape: ValueShape, rows: Longs | None = None) -> pa.Array:
        """The next part of these rows (None: of all rows), of type raw_type(shape)."""
        kind = shape.kind
        if kind == "record":
            return self._record(shape, rows)
        if kind == "union":
            return self._union(shape, rows)
        if kind in ("array", "map"):
            return self._list(shape, rows)
        if kind in ("string", "bytes", "fixed"):
            sizes = self._sizes(shape, rows)
            return self._copy(kind, sizes, rows)
        if kind == "null":
            return pa.nulls(len(self._rows(self._at, rows)))
        at = self._rows(self._at, rows)
        if kind in _FIXED_BYTES:
            self._move(np.full(len(at), _FIXED_BYTES[kind]), rows)
            return self._fixed(kind, at)
        return self._of_varints(shape, self._varints(rows), rows)

    def skip(self, shape: ValueShape) -> None:
        """Move all rows beyond a part that is not needed."""
        if shape.kind in ("string", "bytes", "fixed"):
            self._move(self._sizes(shape, None), None)
        else:
            self.read(shape)

    # -- positions --------------------------------------------------------------------------------

    def _rows(self, values: Longs, rows: Longs | None) -> Longs:
        return values if rows is None else values[rows]

    def _mark(self, are_odd: Flags, rows: Longs | None) -> None:
        if rows is None:
            self.odd |= are_odd
        else:
            self.odd[rows[are_odd]] = True

    def _move(self, sizes: Longs, rows: Longs | None) -> Longs:
        """Move the rows by `sizes`, and return the sizes: 0 for a row that has fewer bytes."""
        at, ends = self._rows(self._at, rows), self._rows(self._ends, rows)
        are_odd = (sizes < 0) | (sizes > ends - at)
        if bool(are_odd.any()):
            self._mark(are_odd, rows)
            sizes = np.where(are_odd, 0, sizes)
        if rows is None:
            self._at = at + sizes
        else:
            self._at[rows] = at + sizes
        return sizes

    # -- numbers ----------------------------------------------------------------------------------

    def _varints(self, rows: Longs | None) -> Longs:
        """The next number of each row; 0 in an odd row."""
        varints = self._varints_at(self._rows(self._at, rows))
        sizes = self._move(varints.sizes, rows)
        are_odd = varints.are_odd | (sizes == 0)
        if not bool(are_odd.any()):
            return varints.numbers
        self._mark(are_odd, rows)
        return np.where(are_odd, 0, varints.numbers)

    def _varints_at(self, at: Longs) -> _Varints:
        words = self._words[at]
        none_odd = np.zeros(len(at), dtype=np.bool_)
        if not bool((words & _CONTINUES).any()):  # numbers of one byte each, as is usual
            return _Varints(_from_zigzag(words & np.uint64(0x7F)), np.ones_like(at), none_odd)
        stop_bits = ~words & LAST_BITS
        below = (stop_bits & (~stop_bits + _ONE)) - _ONE  # the bits below the first stop bit
        numbers = join_sevens(words & below & SEVENS)
        sizes = (np.bitwise_count(below) >> 3).astype(np.int64) + 1
        long_rows = np.flatnonzero(stop_bits == 0)
        if len(long_rows):
            numbers[long_rows], sizes[long_rows] = self._long_varints(at[long_rows])
        return _Varints(_from_zigzag(numbers), sizes, sizes > VARINT_BYTES_MAX)

    def _long_varints(self, at: Longs) -> tuple[npt.NDArray[np.uint64], Longs]:
        """Numbers of more than seven bytes, and their sizes; more than VARINT_BYTES_MAX for a row
        whose bytes are no number of 64 bits."""
        numbers = np.zeros(len(at), dtype=np.uint64)
        sizes = np.full(len(at), VARINT_BYTES_MAX + 1)
        words = (self._words[at], self._words[at + 8])
        for i in range(VARINT_BYTES_MAX):
            byte = (words[i // 8] >> np.uint64(8 * (i % 8))) & np.uint64(0xFF)
            goes_on = sizes > VARINT_BYTES_MAX
            numbers |= np.where(goes_on, (byte & np.uint64(0x7F)) << np.uint64(7 * i), np.uint64(0))
            is_last = goes_on & (byte < (_CONTINUES if i < VARINT_BYTES_MAX - 1 else 2))
            sizes[is_last] = i + 1
        return numbers, sizes

    def _of_varints(self, shape: ValueShape, numbers: Longs, rows: Longs | None) -> pa.Array:
        if shape.kind == "long":
            return of_numpy(numbers)
        low, high = _INT_MIN, _INT_MAX
        if shape.kind == "enum":
            low, high = 0, len(shape.symbols) - 1
        are_odd = (numbers < low) | (numbers > high)
        if bool(are_odd.any()):
            self._mark(are_odd, rows)
            numbers = np.where(are_odd, 0, numbers)
        narrow = of_numpy(numbers.astype(np.int32))
        return narrow if shape.kind == "int" else _symbols(shape).take(narrow)

    def _fixed(self, kind: str, at: Longs) -> pa.Array:
        words = self._words[at]
        if kind == "boolean":
            return of_numpy((words & np.uint64(0xFF)) == _ONE)
        if kind == "float":
            return of_numpy(words.astype(np.uint32).view(np.float32))
        return of_numpy(words.view(np.float64))

    # -- text and bytes ---------------------------------------------------------------------------

    def _sizes(self, shape: ValueShape, rows: Longs | None) -> Longs:
        if shape.kind == "fixed":
            return np.full(len(self._rows(self._at, rows)), shape.size)
        return self._varints(rows)

    def _copy(self, kind: str, sizes: Longs, rows: Longs | None) -> pa.Array:
        at = self._rows(self._at, rows)
        sizes = self._move(sizes, rows)
        copied = copy_spans(pa.py_buffer(self._buffer), (at, at + sizes))
        if kind != "string":
            return copied
        text = copied.view(pa.string())
        if not is_text(text):
            are_odd = np.array([not is_text(text.slice(i, 1)) for i in range(len(text))])
            self._mark(are_odd, rows)
        return text

    # -- nested -----------------------------------------------------------------------------------

    def _record(self, shape: ValueShape, rows: Longs | None) -> pa.Array:
        kind = raw_type(shape)
        children = [self.read(field.shape, rows) for field in shape.fields]
        count = len(self._rows(self._at, rows))
        return pa.Array.from_buffers(kind, count, [None], children=children)

    def _union(self, shape: ValueShape, rows: Longs | None) -> pa.Array:
        indices = self._varints(rows)
        are_odd = (indices < 0) | (indices >= len(shape.inner))
        if bool(are_odd.any()):
            self._mark(are_odd, rows)
        members, masks = list[pa.Array](), list[Flags]()
        for i, branch in enumerate(shape.inner):
            if branch.kind == "null":
                continue
            mask = indices == i
            of_branch = np.flatnonzero(mask)
            if len(of_branch) == len(mask):
                members.append(self.read(branch, rows))
            else:
                chosen = of_branch if rows is None else rows[of_branch]
                members.append(spread(self.read(branch, chosen), mask))
            masks.append(mask)
        if len(members) == 1:
            return members[0]
        kind, valid = raw_type(shape), np.zeros(len(indices), dtype=np.bool_)
        for mask in masks:
            valid |= mask
        bits = None if bool(valid.all()) else bits_of(valid)
        if not members:
            return pa.nulls(len(indices))
        return pa.Array.from_buffers(kind, len(indices), [bits], children=members)

    def _list(self, shape: ValueShape, rows: Longs | None) -> pa.Array:
        all_rows = np.arange(len(self.odd)) if rows is None else rows
        parts, owners = self._items(shape, all_rows)
        lengths = np.bincount(owners, minlength=len(all_rows))
        order = np.argsort(owners, kind="stable")
        columns_of_items = zip(*parts, strict=True)
        columns = [pa.concat_arrays(column).take(of_numpy(order)) for column in columns_of_items]
        offsets = np.zeros(len(all_rows) + 1, dtype=np.int32)
        np.cumsum(lengths, out=offsets[1:])
        kind = raw_type(shape)
        if shape.kind == "map":
            pairs = pa.struct([kind.key_field, kind.item_field])
            columns = [pa.Array.from_buffers(pairs, len(order), [None], children=columns)]
        buffers = [None, pa.py_buffer(offsets)]
        return pa.Array.from_buffers(kind, len(all_rows), buffers, children=columns)

    def _items(self, shape: ValueShape, rows: Longs) -> tuple[list[list[pa.Array]], Longs]:
        """The items in parts (for a map their keys and values), and for each item the index of its
        row within `rows`; the items of a row are in order."""
        shapes = ([ValueShape("string")] if shape.kind == "map" else []) + [shape.inner[0]]
        parts = [[pa.nulls(0, raw_type(of_item)) for of_item in shapes]]
        owners = [np.zeros(0, dtype=np.int64)]
        open_rows, left = np.arange(len(rows)), np.zeros(len(rows), dtype=np.int64)
        read = np.zeros(len(rows), dtype=np.int64)  # how many items were read
        begins = self._at[rows]
        rounds = 0
        while True:
            left = self._block_counts(rows, open_rows, left)
            open_rows = open_rows[(left[open_rows] > 0) & ~self.odd[rows[open_rows]]]
            if not len(open_rows):
                return parts, np.concatenate(owners)
            if shapes[-1].kind in (*_FIXED_BYTES, *_VARINTS) and len(shapes) == 1:
                items, owned = self._numbers(shapes[0], rows[open_rows], left[open_rows])
                parts.append([items])
                owners.append(open_rows[owned])
                left[open_rows] = 0
                continue
            if rounds >= ROUNDS_MIN and len(open_rows) < ROWS_FEW:
                self.odd[rows[open_rows]] = True
                continue
            rounds += 1
            parts.append([self.read(of_item, rows[open_rows]) for of_item in shapes])
            owners.append(open_rows)
            left[open_rows] -= 1
            read[open_rows] += 1
            at = self._at[rows[open_rows]]
            too_many = read[open_rows] > at - begins[open_rows] + ROUNDS_MIN  # items without bytes
            self.odd[rows[open_rows[too_many]]] = True

    def _block_counts(self, rows: Longs, open_rows: Longs, left: Longs) -> Longs:
        """How many items are left of each row's block, after the next blocks have begun: 0 for a
        row that has no further block."""
        at_head = open_rows[left[open_rows] == 0]
        if not len(at_head):
            return left
        counts = self._varints(rows[at_head])
        has_size = counts < 0
        if bool(has_size.any()):
            self._varints(rows[at_head[has_size]])
            counts = np.abs(counts)
        self._mark(counts < 0, rows[at_head])  # the smallest number of 64 bits
        left = left.copy()
        left[at_head] = np.maximum(counts, 0)
        return left

    def _numbers(self, shape: ValueShape, rows: Longs, counts: Longs) -> tuple[pa.Array, Longs]:
        """The next `counts` items of the rows, at once; and for each the index of its row within
        `rows`."""
        at, ends = self._at[rows], self._ends[rows]
        are_odd = counts > ends - at
        size = _FIXED_BYTES.get(shape.kind, 0)
        counts = np.where(are_odd, 0, counts)
        if size:
            are_odd |= counts * size > ends - at
            counts = np.where(are_odd, 0, counts)
        else:
            stops = self._stop_places()
            stop = np.searchsorted(stops, at)
            last = np.minimum(stop + np.maximum(counts, 1) - 1, len(stops) - 1)
            are_odd |= (stop + counts > len(stops)) | (stops[last] >= ends)
            counts = np.where(are_odd, 0, counts)
        self._mark(are_odd, rows)
        owners = np.repeat(np.arange(len(rows)), counts)
        within = np.arange(len(owners)) - np.repeat(np.cumsum(counts) - counts, counts)
        if size:
            self._at[rows] = at + counts * size
            return self._fixed(shape.kind, at[owners] + within * size), owners
        places = np.where(within == 0, at[owners], stops[stop[owners] + within - 1] + 1)
        varints = self._varints_at(places)
        self._at[rows] = np.where(counts > 0, stops[last] + 1, at)
        self._mark(np.bincount(owners[varints.are_odd], minlength=len(rows)) > 0, rows)
        return self._of_varints(shape, varints.numbers, rows[owners]), owners

    def _stop_places(self) -> Longs:
        """The places of all bytes that end a number, if they are part of a number."""
        if self._stops is None:
            self._stops = np.flatnonzero(np.frombuffer(self._buffer, dtype=np.uint8) < 0x80)
        return self._stops


def spread(values: pa.Array, mask: Flags) -> pa.Array:
    """`values` at the rows that the mask marks; null elsewhere."""
    if len(values) == len(mask):
        return values
    indices = pa.py_buffer((np.cumsum(mask) - 1).astype(np.int32))
    return values.take(pa.Array.from_buffers(pa.int32(), len(mask), [bits_of(mask), indices]))


def bits_of(flags: Flags) -> pa.Buffer:
    return pa.py_buffer(np.packbits(flags, bitorder="little"))


def is_text(column: pa.Array) -> bool:
    """Whether all values are UTF-8."""
    try:
        column.validate(full=True)
    except pa.ArrowInvalid:
        return False
    return True


def _from_zigzag(numbers: npt.NDArray[np.uint64]) -> Longs:
    return (numbers >> _ONE).view(np.int64) ^ -(numbers & _ONE).view(np.int64)


def _symbols(shape: ValueShape) -> pa.Array:
    symbols: Sequence[str] = shape.symbols or ("",)
    return of_list(symbols, pa.string())
