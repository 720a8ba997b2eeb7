"""An entry's batches are made in steps, and a step has a bounded number of rows and cells."""

import subprocess
import sys
from types import SimpleNamespace

import numpy as np
import pyarrow as pa
import pytest

from spark_ledger.broker.log import entry_batches
from spark_ledger.broker.log.entry_batches import (
    ROWS_MAX,
    STEP_CELLS_MAX,
    batches_in,
    cells_of,
    ends_of_steps,
)
from spark_ledger.broker.log.tail import STEP_BATCHES_MAX
from spark_ledger.topic.entry import pulsar_batch
from spark_ledger.topic.entry.message_batch import (
    HEADERS_TYPE,
    Share,
    encode_body,
    encode_header,
)
from spark_ledger.topic.entry.pulsar_message_pb2 import MessageMetadata
from spark_ledger.topic.read.pieces import PIECE_DTYPE
from spark_ledger.topic.read.slice_reader import FetchedEntry

COUNT = 3500


def fetched(body, rows, lo=0, **said):
    head = encode_header([Share(0, rows, 0)], 1, **said)
    header = SimpleNamespace(ledger_id=1, entry_id=0)
    entry = SimpleNamespace(payload=b"".join([head, *body]), header=header)
    return FetchedEntry(entry, np.array([(0, 0, lo, rows - lo, 100 + lo)], dtype=PIECE_DTYPE))


def plain():
    return pa.record_batch({"value": pa.array([b"%d" % i for i in range(COUNT)], pa.binary())})


def with_headers():
    each = [[{"key": "k", "value": b"v"}] * (i % 40) for i in range(COUNT)]
    values = pa.array([b"%d" % i for i in range(COUNT)], pa.binary())
    return pa.record_batch({"value": values, "headers": pa.array(each, HEADERS_TYPE)})


def one_has_all():
    """One row has most of the elements."""
    lists = [[1, 2]] * COUNT
    lists[1700] = [*range(20_000)]
    return pa.record_batch({"list": pa.array(lists), "n": pa.array(range(COUNT))})


def wide():
    return pa.record_batch({f"n{i}": pa.array(range(COUNT)) for i in range(60)})


@pytest.mark.parametrize("make", [plain, with_headers, one_has_all, wide])
def test_a_step_encodes_a_bounded_number_of_rows_and_cells(monkeypatch, make):
    rows = make()
    entry = fetched(encode_body(rows), COUNT, typed="value" not in rows.schema.names)
    with monkeypatch.context() as whole:
        whole.setattr(entry_batches, "STEP_CELLS_MAX", 1 << 40)
        expected = [one for some in batches_in(entry) for one in some]
    untyped, encoded = entry_batches.untyped, []

    def counted(some, typed):
        encoded.append((some.num_rows, int(cells_of(some).sum())))
        return untyped(some, typed)

    monkeypatch.setattr(entry_batches, "untyped", counted)
    found = []
    for batches in batches_in(entry):
        found += batches
        assert len(encoded) <= 1
        for count, cells in encoded:
            assert count <= ROWS_MAX
            assert cells <= STEP_CELLS_MAX or count == 1
        assert sum(len(one.data) for one in batches) <= pulsar_batch.CLIENT_BYTES_MAX
        encoded.clear()
    assert found == expected
    assert [one.offset for one in found] == [100, 1100, 2100, 3100]


def test_the_chunks_of_a_large_row_are_steps():
    values = pa.array([b"x" * (12 << 20), b"small"], pa.binary())
    entry = fetched(encode_body(pa.record_batch({"value": values})), 2)
    steps = [len(some) for some in batches_in(entry)]
    assert steps == [0, 0, 0, 0, 1, 1]


@pytest.mark.parametrize("size", [1, 12 << 20])
def test_rows_of_spark_have_the_version_of_their_schema(size):
    rows = pa.record_batch({"a": pa.array(["x" * size, "y"])})
    entry = fetched(encode_body(rows), 2, typed=True, schema_version=3)
    assert entry_batches.schema_version_of(entry) == 3
    for version in (b"\0\0\0\0\0\0\0\2", b""):
        batches = [one for some in batches_in(entry, version) for one in some]
        pieces = [piece for one in batches for piece in pulsar_batch.chunks_of(one.data)]
        all_metadata = [pulsar_batch.parse(piece, check=True).metadata for piece in pieces]
        assert {metadata.schema_version for metadata in all_metadata} == {version}
        assert all(
            metadata.HasField("schema_version") == bool(version) for metadata in all_metadata
        )


def test_batches_of_producers_come_some_at_a_time():
    lone = pulsar_batch.build_batch(MessageMetadata(producer_name="p", sequence_id=1), b"x")
    count = 2 * STEP_BATCHES_MAX + 7
    body = pulsar_batch.frame_batches([(1, lone)] * count)
    steps = [*batches_in(fetched(body, count, lo=5, has_batches=True))]
    assert [len(some) for some in steps] == [STEP_BATCHES_MAX - 5, STEP_BATCHES_MAX, 7]
    assert [one.offset for some in steps for one in some] == [*range(105, 100 + count)]


def test_cells_are_columns_fields_and_elements_however_deep():
    kind = pa.list_(pa.struct([("a", pa.int64()), ("b", pa.list_(pa.int64()))]))
    rows = [[], None, [{"a": 1, "b": [1, 2, 3]}, {"a": 2, "b": None}], [{"a": 3, "b": []}]]
    column = pa.array([None, *rows], kind).slice(1)
    pairs = pa.array([[], [("k", 1)], None, [("k", 1), ("l", 2)]], pa.map_(pa.string(), pa.int64()))
    found = cells_of(pa.record_batch({"list": column, "n": pa.array(range(4)), "map": pairs}))
    assert found.tolist() == [3, 5, 3 + 2 * 2 + 3, 3 + 2 + 4]


def test_steps_end_before_they_have_too_many_cells():
    cells = np.array([1, STEP_CELLS_MAX - 1, 1, STEP_CELLS_MAX + 1, 1])
    assert ends_of_steps(cells).tolist() == [2, 3, 4, 5]
    assert ends_of_steps(np.array([], dtype=np.int64)).tolist() == []


READS_ALONE = """
import sys
from pathlib import Path
from types import SimpleNamespace
import numpy as np
from spark_ledger.broker.log.entry_batches import batches_in
from spark_ledger.topic.read.pieces import PIECE_DTYPE
from spark_ledger.topic.read.slice_reader import FetchedEntry

header = SimpleNamespace(ledger_id=1, entry_id=0)
entry = SimpleNamespace(payload=Path(sys.argv[1]).read_bytes(), header=header)
pieces = np.array([(0, 0, 0, int(sys.argv[2]), 100)], dtype=PIECE_DTYPE)
print(sum(len(step) for step in batches_in(FetchedEntry(entry, pieces))))
assert "pandas" not in sys.modules
"""


@pytest.mark.parametrize("make", [with_headers, one_has_all])
def test_an_entry_is_encoded_without_loading_pandas_which_takes_more_than_a_step(tmp_path, make):
    rows = make()
    entry = fetched(encode_body(rows), COUNT, typed="value" not in rows.schema.names)
    (tmp_path / "entry").write_bytes(entry.entry.payload)
    command = [sys.executable, "-c", READS_ALONE, str(tmp_path / "entry"), str(COUNT)]
    done = subprocess.run(command, check=True, capture_output=True, text=True)
    assert int(done.stdout) > 1
