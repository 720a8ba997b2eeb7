"""Maps in JSON: the entries of all rows' maps as objects of a key and a value. Pure.

    {"id":1, "delays":{"EWR":5, "JFK":0}}      {"key":"EWR","value":5}
    {"id":2, "delays":{}}                      {"key":"JFK","value":0}

Arrow's parser knows no maps, but parses these objects. Always true: the rows are objects of JSON
that Arrow has parsed, so their syntax is right. What is rare is a ValueError, and is left to
plain.py: a name with an escape, a name that is twice in an object, a map that is no object.
"""

from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from spark_ledger.topic.entry.arrow_arrays import of_list, offsets_of
from spark_ledger.topic.entry.pulsar_columns import copy_spans

Places = npt.NDArray[np.int64]
KEY, VALUE = "key", "value"
_IS_MARK = np.zeros(256, dtype=np.bool_)
_IS_MARK[list(b"{}[]:,")] = True
_STEPS = np.zeros(256, dtype=np.int8)
_STEPS[list(b"{[")], _STEPS[list(b"}]")] = 1, -1


class Entries(NamedTuple):
    """`objects` are the entries of all maps, in the rows' order, `counts` their number by row;
    `valid` marks the rows that have a map."""

    objects: pa.StringArray
    counts: Places
    valid: npt.NDArray[np.bool_]


class JsonMarks:
    """The brackets, colons and commas outside of strings, by their numbers. `depths` count the
    brackets around a mark, a bracket itself too."""

    def __init__(self, rows: pa.StringArray) -> None:
        offsets = offsets_of(rows).astype(np.int64)
        self._begins = offsets[:-1] - offsets[0]
        self._buffer = rows.buffers()[2].slice(int(offsets[0]), int(offsets[-1] - offsets[0]))
        data = self._data = np.frombuffer(self._buffer, dtype=np.uint8)
        is_quote = data == ord('"')
        self._backslashes = np.flatnonzero(data == ord("\\"))
        if len(self._backslashes):
            is_quote[_escaped(self._backslashes, len(data))] = False
        self._quotes = np.flatnonzero(is_quote)
        outside = (np.cumsum(is_quote, dtype=np.uint8) & 1) == 0
        self._places = np.flatnonzero(_IS_MARK[data] & outside)
        self._bytes = data[self._places]
        steps = _STEPS[self._bytes]
        self._depths = np.cumsum(steps, dtype=np.int32) + (steps < 0)

    def entries(self, name: str) -> Entries:
        """The entries of the rows' field `name`. Raises ValueError."""
        fields = self._fields(name.encode())
        rows = np.searchsorted(self._begins, self._places[fields], side="right") - 1
        if (np.diff(rows) == 0).any():
            raise ValueError(f"a row has two fields {name}")
        is_map = self._bytes[fields + 1] == ord("{")
        nulls = self._text(self._places[fields[~is_map]] + 1, self._places[fields[~is_map] + 1])
        if not all(text.strip() == "null" for text in nulls.to_pylist()):
            raise ValueError(f"a field {name} is no map")
        valid = np.zeros(len(self._begins), dtype=np.bool_)
        valid[rows[is_map]] = True
        begins, colons = fields[is_map] + 1, self._at(2, b":")
        ends = _next(self._at(2, b"}"), begins)
        maps = np.searchsorted(begins, colons, side="right") - 1
        within = maps >= 0
        within[within] = colons[within] < ends[maps[within]]
        colons, maps = colons[within], maps[within]
        key_begins, key_ends = self._names(colons)
        value_ends = self._places[_next(self._at(2, b",}"), colons)]
        parts = (
            *('{"key":', self._text(key_begins - 1, key_ends + 1)),
            *(',"value":', self._text(self._places[colons] + 1, value_ends), "}", ""),
        )
        scalars = (of_list([p], pa.string())[0] if isinstance(p, str) else p for p in parts)
        counts = np.bincount(rows[is_map][maps], minlength=len(valid))
        return Entries(pc.binary_join_element_wise(*scalars), counts, valid)

    def _fields(self, name: bytes) -> Places:
        """The colons behind this name in the rows' objects."""
        colons = self._at(1, b":")
        begins, ends = self._names(colons)
        first = np.searchsorted(self._backslashes, begins)
        if (first != np.searchsorted(self._backslashes, ends)).any():
            raise ValueError("the name of a field has an escape")
        is_long = ends - begins == len(name)
        colons, begins = colons[is_long], begins[is_long]
        letters = self._data[begins[:, None] + np.arange(len(name))]
        fields: Places = colons[(letters == np.frombuffer(name, dtype=np.uint8)).all(axis=1)]
        return fields

    def _at(self, depth: int, kinds: bytes) -> Places:
        is_kind = np.zeros(256, dtype=np.bool_)
        is_kind[list(kinds)] = True
        return np.flatnonzero((self._depths == depth) & is_kind[self._bytes])

    def _names(self, colons: Places) -> tuple[Places, Places]:
        """The places of the names before these colons."""
        closing = np.searchsorted(self._quotes, self._places[colons]) - 1
        return self._quotes[closing - 1] + 1, self._quotes[closing]

    def _text(self, begins: Places, ends: Places) -> pa.StringArray:
        return copy_spans(self._buffer, (begins, ends)).view(pa.string())


def _next(marks: Places, after: Places) -> Places:
    """For each number of `after` the next of `marks`, which there is."""
    return marks[np.searchsorted(marks, after)]


def _escaped(backslashes: Places, size: int) -> Places:
    """The places behind runs of backslashes of an odd length."""
    begins = backslashes[np.diff(backslashes, prepend=-2) > 1]
    ends = backslashes[np.diff(backslashes, append=size + 1) > 1] + 1
    escaped: Places = ends[(ends - begins) % 2 == 1]
    return escaped
