"""Rows that cannot be written, and what becomes of them."""

import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from spark_ledger.errors import LedgerError
from spark_ledger.spark.rows import written
from spark_ledger.spark.rows.written import WrittenRows
from spark_ledger.topic.entry.batch_encoder import BatchEncoder
from spark_ledger.topic.entry.routing import Router, Routing

ENTRY_BYTES = 8192


def test_good_rows_have_no_misfit():
    rows = WrittenRows(pa.array(["1", None]), topics=pa.array(["t", "u"]))
    assert written.misfits(rows, entry_bytes_max=ENTRY_BYTES) is None


def test_each_misfit_has_the_class_of_its_error():
    rows = WrittenRows(
        pa.array(["1", "2", "3", "x" * 9000, "5", "6"]),
        topics=pa.array(["t", None, "no/good", "t", "t", "t"]),
        partitions=pa.array([0, 0, 0, 1, 2, None], pa.int32()),
    )
    reasons = written.misfits(rows, entry_bytes_max=ENTRY_BYTES, partitions=2)
    assert [None if one is None else one.split("]")[0] for one in reasons.to_pylist()] == [
        None,
        "[LEDGER_NULL_TOPIC_IN_DATA",
        "[LEDGER_TOPIC.INVALID_NAME",
        "[LEDGER_WRITE.MESSAGE_TOO_BIG",
        "[LEDGER_WRITE.PARTITION_INVALID",
        "[LEDGER_WRITE.PARTITION_INVALID",
    ]


def test_of_two_misfits_the_first_is_told():
    rows = WrittenRows(pa.array(["x" * 9000]), topics=pa.array([None], pa.string()))
    (reason,) = written.misfits(rows, entry_bytes_max=ENTRY_BYTES).to_pylist()
    assert reason.startswith("[LEDGER_NULL_TOPIC_IN_DATA]")


def test_a_bad_row_is_kept_with_its_reason_and_where_it_came_from():
    rows = WrittenRows(
        pa.array(["good", "x" * 70_000, "good too"]),
        keys=pa.array(["a", "b", "c"]),
        topics=pa.array(["t", "u", "v"]),
        partitions=pa.array([0, 7, 0], pa.int32()),
    )
    reasons = written.misfits(rows, entry_bytes_max=ENTRY_BYTES)
    good, bad = written.good_and_bad(rows, reasons, {"queryId": "q", "batchId": "9"})
    assert good.values.to_pylist() == ["good", "good too"]
    assert good.topics.to_pylist() == ["t", "v"]
    assert bad.values.to_pylist() == [b"x" * 65_536]
    assert bad.keys.to_pylist() == [b"b"]
    (headers,) = bad.headers.to_pylist()
    assert {one["key"]: one["value"] for one in headers[1:]} == {
        "topic": b"u",
        "partition": b"7",
        "queryId": b"q",
        "batchId": b"9",
    }
    assert headers[0]["value"].startswith(b"[LEDGER_WRITE.MESSAGE_TOO_BIG] larger than the ")


def test_of_a_bad_row_of_columns_the_key_and_the_reason_are_kept():
    payload = pa.record_batch({"text": ["small", "x" * 9000]})
    rows = WrittenRows(payload, keys=pa.array([b"a", b"b"]))
    reasons = written.misfits(rows, entry_bytes_max=ENTRY_BYTES)
    good, bad = written.good_and_bad(rows, reasons, {})
    assert good.values.to_pydict() == {"text": ["small"]}
    assert (bad.values.to_pylist(), bad.keys.to_pylist()) == ([None], [b"b"])
    assert [one["key"] for one in bad.headers.to_pylist()[0]] == ["reason", "topic", "partition"]


SIZES = st.integers(0, 10) | st.integers(ENTRY_BYTES - 2200, ENTRY_BYTES)
ROW = st.tuples(SIZES, st.sampled_from(["t", None, "no/good"]), st.none() | st.integers(-1, 4))


@settings(deadline=None, max_examples=60)
@given(st.lists(ROW, min_size=1, max_size=8))
def test_no_good_row_is_refused_later_and_every_bad_one_would_have_been(parts):
    sizes, topics, partitions = zip(*parts, strict=True)
    rows = WrittenRows(
        pa.array(["x" * size for size in sizes]),
        keys=pa.array([str(i) for i in range(len(parts))]),
        topics=pa.array(topics, pa.string()),
        partitions=pa.array(partitions, pa.int32()),
    )
    reasons = written.misfits(rows, entry_bytes_max=ENTRY_BYTES, partitions=3)
    good, bad = (rows, None) if reasons is None else written.good_and_bad(rows, reasons, {})
    if len(good):
        write(good)
    for i in [] if bad is None else bad.keys.to_pylist():
        with pytest.raises(LedgerError):
            write(rows.take(pa.array([int(i)])))
    assert len(good) + (0 if bad is None else len(bad)) == len(parts)


def write(rows: WrittenRows) -> None:
    for _, part in written.by_topic(rows):
        encoder = BatchEncoder(Router(Routing.COLUMN, 3, 0), lambda: 1, entry_bytes_max=ENTRY_BYTES)
        list(encoder.add(part.keys, part.values, partitions=part.partitions))
        list(encoder.flush())
