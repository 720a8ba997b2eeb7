"""What a LagListener makes of a query's progress."""

import io
import json
from types import SimpleNamespace

import pytest

from spark_ledger.spark.read import lag_listener
from spark_ledger.spark.read.lag_listener import LagListener, lags_of

IDS = {"t": "id-of-t"}


def progress(end, latest, *, query="q-1", name="copy", batch=7, second=0, **extra):
    """As Spark tells of it; offsets are objects there."""
    return {
        "id": query,
        "name": name,
        "batchId": batch,
        "timestamp": f"2026-01-01T00:00:{second:02d}.000Z",
        "sources": [
            {
                "endOffset": {"_ids": IDS, "t": end},
                "latestOffset": {"_ids": IDS, "t": latest, **extra},
            }
        ],
    }


def heard(listener, *told):
    for one in told:
        event = SimpleNamespace(progress=SimpleNamespace(json=json.dumps(one)))
        listener.onQueryProgress(event)


def test_rows_behind_are_counted_by_partition_under_kafkas_names():
    (lag,) = lags_of(progress({"0": 10, "1": 4}, {"0": 10, "1": 10}))
    assert (lag.minOffsetsBehindLatest, lag.maxOffsetsBehindLatest) == (0, 6)
    assert (lag.avgOffsetsBehindLatest, lag.rowsBehind) == (3.0, 6)
    assert (lag.query_id, lag.name, lag.batch_id) == ("q-1", "copy", 7)
    assert lag.estimatedTotalBytesBehindLatest is lag.millisBehind is None


def test_bytes_and_time_are_what_the_source_says():
    (lag,) = lags_of(progress({"0": 1}, {"0": 3}, _bytesBehind=200, _millisBehind="40"))
    assert (lag.estimatedTotalBytesBehindLatest, lag.millisBehind) == (200, 40)


def test_of_the_bytes_before_a_batch_those_that_it_left_are_told():
    said = {"_rowsBehind": 10, "_bytesBehind": 1000, "_millisBehind": 40}
    (some,) = lags_of(progress({"0": 6}, {"0": 10}, **said))
    assert (some.estimatedTotalBytesBehindLatest, some.millisBehind) == (400, 40)
    (none,) = lags_of(progress({"0": 10}, {"0": 10}, **said))
    assert (none.estimatedTotalBytesBehindLatest, none.millisBehind) == (0, 0)


def test_a_partition_that_the_query_has_not_met_counts_whole():
    (lag,) = lags_of(progress({"0": 5}, {"0": 5, "1": 8}))
    assert (lag.minOffsetsBehindLatest, lag.rowsBehind) == (0, 8)


def test_a_query_that_is_beyond_what_was_known_at_its_poll_is_not_behind():
    (lag,) = lags_of(progress({"0": 9}, {"0": 5}))
    assert lag.rowsBehind == 0


def test_offsets_given_as_text_are_read_too():
    told = progress({"0": 1}, {"0": 3})
    (source,) = told["sources"]
    told["sources"] = [{side: json.dumps(offset) for side, offset in source.items()}]
    assert lags_of(told) == lags_of(progress({"0": 1}, {"0": 3}))


@pytest.mark.parametrize("latest", [{"t": {"0": 3}}, 17, None, "17", "no offset"])
def test_sources_that_read_no_topics_are_left_out(latest):
    told = progress({}, {})
    told["sources"] = [{"endOffset": latest, "latestOffset": latest}]
    assert lags_of(told) == []


def test_lags_are_kept_by_query_and_the_newest_is_found_by_id_or_name():
    listener = LagListener(echo=False)
    heard(
        listener,
        progress({"0": 0}, {"0": 9}, second=1),
        progress({"0": 4}, {"0": 9}, second=2),
        progress({"0": 1}, {"0": 2}, query="q-2", name=None, second=3),
    )
    assert [lag.rowsBehind for lag in listener.lags("copy")] == [9, 5]
    assert listener.last("q-1").rowsBehind == 5
    assert listener.last().query_id == "q-2"
    assert listener.last("nobody") is None


def test_what_is_kept_is_bounded(monkeypatch):
    monkeypatch.setattr(lag_listener, "LAGS_KEPT", 2)
    monkeypatch.setattr(lag_listener, "QUERIES_KEPT", 2)
    listener = LagListener(echo=False)
    for query in ("a", "b", "c"):
        heard(listener, *(progress({}, {"0": n}, query=query, second=n) for n in range(1, 4)))
    assert {lag.query_id for lag in listener.lags()} == {"b", "c"}
    assert [lag.rowsBehind for lag in listener.lags("c")] == [2, 3]
    heard(listener, *(progress({}, {"0": 9}, query=query, second=9) for query in ("b", "d")))
    assert {lag.query_id for lag in listener.lags()} == {"b", "d"}  # those heard of last


def test_each_lag_is_printed_as_one_line():
    printed = io.StringIO()
    told = progress({"0": 1}, {"0": 3}, _bytesBehind=200, _millisBehind=40)
    heard(LagListener(file=printed), told)
    assert printed.getvalue() == (
        "2026-01-01T00:00:00.000Z copy batch 7: 2 rows behind"
        " (a partition 2 to 2, 2.0 on average), 200 bytes, 40 ms\n"
    )
