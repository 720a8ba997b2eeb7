"""What callers hand over wrongly is refused with a class and what to do, before anything is asked
of a cluster: there is none here."""

import pytest

import spark_ledger
from spark_ledger import errors

URL = "zk://127.0.0.1:1/nobody"


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"schema": 5}, "schema is 5, neither a StructType nor text"),
        ({"app_id": 5}, "app_id is 5, not a name"),
        ({"app_id": ""}, "app_id is '', not a name"),
    ],
)
def test_a_foreach_writer_says_what_it_cannot_be_made_of(given, said):
    with pytest.raises(errors.OptionInvalid, match=said):
        spark_ledger.foreach_writer("t", **given)


@pytest.mark.parametrize("use", ["sql_setup", "compact"])
@pytest.mark.parametrize("given", [None, "spark"])
def test_what_is_no_session_is_refused(use, given):
    do = getattr(spark_ledger, use)
    with pytest.raises(errors.OptionInvalid, match=f"spark is {given!r}, not a SparkSession"):
        do(given, **({"topic": "t", "service_url": URL} if use == "compact" else {}))


@pytest.mark.parametrize("given", [{"merged_bytes": 0}, {"merged_bytes": -1}])
def test_segments_of_no_bytes_are_not_merged(given, monkeypatch):
    monkeypatch.setattr("spark_ledger.client.admin.blocking.topics", lambda *_: Nobody())
    with pytest.raises(errors.BadConfig, match="bytes at most"):
        spark_ledger.Admin(URL).compact("t", **given)


@pytest.mark.parametrize("rate", [0, -1.0, float("nan")])
def test_a_merge_that_would_never_end_is_refused(rate, monkeypatch):
    monkeypatch.setattr("spark_ledger.client.admin.blocking.topics", lambda *_: Nobody())
    with pytest.raises(errors.BadConfig, match="bytes a second does not end"):
        spark_ledger.Admin(URL).compact("t", bytes_per_s=rate)


class Nobody:
    """A cluster of which nothing may be asked."""

    client = None

    def run(self, coroutine):
        coroutine.send(None)
