"""A cluster and checkpoints that an earlier version left behind (tests/stored) start with the code
at hand: the rows are the same, and all that was under way goes on or ends as it should."""

import json
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from pyspark.sql import SparkSession

from spark_ledger import Admin, LedgerClient
from spark_ledger.errors import NoSuchLedger, SubscriptionBusy, Unauthorized
from spark_ledger.local import LocalCluster
from tests.spark.topics import wait_until
from tests.stored import contents
from tests.stored.contents import QUERIES, numbered

EXPECTED = contents.expected()
CHANGED_HERE = {"abandoned", "named", *(f"{q}-{end}" for q in QUERIES for end in ("in", "out"))}
"""Topics that a test of this file writes to: it looks at them before."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    made = tmp_path_factory.mktemp("stored")
    contents.unpack(made)
    yield made
    shutil.rmtree(made)


@pytest.fixture(scope="module")
def stored(folder: Path) -> Iterator[LocalCluster]:
    with LocalCluster(contents.BOOKIES, folder / contents.CLUSTER, autorecovery=False) as cluster:
        yield cluster


@pytest.fixture
def url(stored: LocalCluster) -> str:
    return stored.service_url


@pytest.fixture
def client(url: str) -> Iterator[LedgerClient]:
    with LedgerClient(url) as made:
        yield made


def the_rows_are_those_of_then(spark: SparkSession, url: str, *topics: str) -> None:
    then = {topic: EXPECTED["topics"][topic] for topic in topics}
    assert contents.rows_of(spark, url, topics) == then


def run_again(spark: SparkSession, url: str, query: str, folder: Path) -> None:
    """From its checkpoint, to the end of what is there."""
    rows = contents.source(spark, url, query)
    checkpoints = folder / contents.CHECKPOINTS
    contents.start(rows, url, query, checkpoints, ends=True).awaitTermination(120)


def position(url: str, topic: str, name: str) -> dict[str, int]:
    with Admin(url) as admin:
        found = {one.name: one for one in admin.subscriptions(topic)}
    return {str(partition): offset for partition, offset in found[name].positions.items()}


def command(url: str, *words: str) -> Any:
    """What `spark-ledger` prints as JSON."""
    whole = [sys.executable, "-m", "spark_ledger.cli.main", *words, "--json", "--service-url", url]
    return json.loads(subprocess.run(whole, capture_output=True, check=True).stdout)


def ledgers_of(spark: SparkSession, url: str, intent: str) -> list[int]:
    reader = spark.read.format("ledger").option("serviceUrl", url).option("metadata", "ledgers")
    return [row.ledgerId for row in reader.load().where(f"intent = '{intent}'").collect()]


def test_the_bookies_are_those_of_then(stored):
    assert [bookie.id for bookie in stored.bookies] == EXPECTED["bookies"]


def test_every_topic_has_the_rows_of_then(spark, url):
    the_rows_are_those_of_then(
        spark, url, *(EXPECTED["topics"].keys() - CHANGED_HERE - {contents.TYPED})
    )


def test_rows_of_both_versions_of_a_schema_are_those_of_then(spark, url):
    found = contents.typed_rows_of(spark, url, contents.TYPED)
    assert found[contents.TYPED] == EXPECTED["topics"][contents.TYPED]
    with Admin(url) as admin:
        assert len(admin.schema(contents.TYPED).versions) == 2


def test_filters_of_keys_leave_out_no_row_that_is_asked_for(spark, url):
    whole = contents.reading(spark, url, ["filtered"]).where("string(key) = 'k3'").count()
    assert contents.reading(spark, url, ["filtered"], keyFilter="k3").count() == whole == 600


def test_closed_ledgers_have_the_entries_of_then(client):
    for name in EXPECTED["ledgers"].keys() - {"deleted", *contents.LEFT_OPEN}:
        then = EXPECTED["ledgers"][name]
        assert client.ledger_metadata(then["id"]).closed
        password = contents.PASSWORD if name == "secret" else b""
        found = contents.ledger_facts(client, then["id"], password)
        assert (name, found | {"id": then["id"]}) == (name, then)


def test_a_deleted_ledger_is_not_there(client):
    with pytest.raises(NoSuchLedger):
        client.ledger_metadata(EXPECTED["ledgers"]["deleted"]["id"])


def test_a_ledger_with_a_password_is_read_with_no_other(client):
    ledger_id = EXPECTED["ledgers"]["secret"]["id"]
    with pytest.raises(Unauthorized):
        list(client.open_ledger(ledger_id, password=b"simsim").read(0, 0))


@pytest.mark.parametrize("name", contents.LEFT_OPEN)
def test_a_ledger_that_was_left_open_is_closed_with_all_that_was_acknowledged(client, name):
    then = EXPECTED["ledgers"][name]
    assert not client.ledger_metadata(then["id"]).closed

    found = contents.ledger_facts(client, then["id"])

    assert found | {"id": then["id"]} == then
    assert client.ledger_metadata(then["id"]).closed


def test_page_cache_ledgers_are_in_limbo_where_a_bookie_was_killed_until_they_are_repaired(url):
    ledgers = command(url, "ledger", "list")
    in_doubt = {one["ledger_id"] for one in ledgers if one["durability"] == "page-cache"}
    of_the_killed = {(one, EXPECTED["bookies"][0]) for one in in_doubt}
    assert len(of_the_killed) == 3

    def in_limbo() -> set[tuple[int, str]]:
        listed = command(url, "ledger", "limbo")
        return {(one["ledger_id"], one["bookie_id"]) for one in listed}

    wait_until(lambda: in_limbo() >= of_the_killed)
    listed = in_limbo()
    assert {ledger for ledger, _ in listed} == in_doubt
    done = command(url, "ledger", "limbo", "--repair")

    assert (done["repaired"], done["failed"], done["left"]) == (len(listed), 0, 0)
    assert in_limbo() == set()


def test_subscriptions_are_where_they_were_and_hold_their_rows(url):
    for name in ("held", "at-the-end"):
        then = EXPECTED["subscriptions"][name]
        assert position(url, then["topic"], name) == then["positions"]
    with Admin(url) as admin, pytest.raises(SubscriptionBusy):
        admin.trim("small-entries", "latest")


def test_a_version_that_was_committed_under_a_name_changes_nothing(spark, url):
    the_rows_are_those_of_then(spark, url, "named")
    rows = numbered(spark, 500, 510)
    contents.append(rows, url, "named", txnAppId="nightly", txnVersion=7)
    the_rows_are_those_of_then(spark, url, "named")
    contents.append(rows, url, "named", txnAppId="nightly", txnVersion=8)
    assert len(contents.values_of(spark, url, "named")) == 510


@pytest.mark.parametrize("query", QUERIES)
def test_a_query_goes_on_from_its_checkpoint_with_every_row_once(spark, url, folder, query):
    came, went = f"{query}-in", f"{query}-out"
    commits = folder / contents.CHECKPOINTS / query / "commits"
    the_rows_are_those_of_then(spark, url, came, went)
    assert position(url, came, query) == EXPECTED["subscriptions"][query]["positions"]
    assert contents.batches(commits)[-1] == EXPECTED["queries"][query]["committed"]

    run_again(spark, url, query, folder)

    assert contents.values_of(spark, url, went) == contents.values_of(spark, url, came)
    assert contents.batches(commits)[-1] == EXPECTED["queries"][query]["planned"]
    contents.append(numbered(spark, 1_000, 1_040), url, came)
    run_again(spark, url, query, folder)
    assert contents.values_of(spark, url, went) == contents.values_of(spark, url, came)
    assert contents.batches(commits)[-1] == EXPECTED["queries"][query]["planned"] + 1
    with Admin(url) as admin:
        ends = {str(one.partition): one.end_offset for one in admin.describe(came).partitions}
    assert position(url, came, query) == ends


def test_upkeep_ends_what_a_killed_run_left_and_keeps_every_row(spark, url, folder):
    superseded, of_a_job = (EXPECTED["open intents"][kind] for kind in ("query", "batch"))
    run_again(spark, url, "interrupted", folder)
    left = ledgers_of(spark, url, superseded)
    assert left

    done = command(url, "topic", "clean")

    assert not any(done[name] for name in ("problems", "unclosed", "refused", "alarm"))
    assert set(left) <= set(done["deleted"])
    assert ledgers_of(spark, url, superseded) == []
    records = contents.records_below(url, "/intents")
    assert (records[superseded]["state"], records[superseded]["why"]) == ("condemned", "superseded")
    assert records[of_a_job]["state"] == "open"  # its lease begins with who first sees it
    assert ledgers_of(spark, url, of_a_job)
    unchanged = EXPECTED["topics"].keys() - CHANGED_HERE - {contents.TYPED}
    the_rows_are_those_of_then(spark, url, *unchanged)


def test_a_topic_goes_on_after_a_batch_job_that_was_killed(spark, url):
    the_rows_are_those_of_then(spark, url, "abandoned")
    contents.append(numbered(spark, 200, 300), url, "abandoned")
    assert len(contents.values_of(spark, url, "abandoned")) == 300
