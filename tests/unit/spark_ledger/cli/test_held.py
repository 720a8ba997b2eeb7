"""What the command line shows and asks while the metadata store is held."""

import json

import pytest
from typer.testing import CliRunner

from spark_ledger.bookies import directory
from spark_ledger.cli import ledger, main, metadata, nodes
from spark_ledger.cli.main import app
from spark_ledger.metadata.cluster import ClusterRecord, Hold
from spark_ledger.metadata.hold import Report, StoreStatus
from spark_ledger.metadata.unrecorded import UnrecordedLedgers

URL = ("--service-url", "zk://127.0.0.1:1/ledger")
WHY = "the store lacks link 7"
NOT_HELD = StoreStatus(ClusterRecord("c", 1), (8, "token"))


def held(*missing):
    report = Report("b1", missing, (), (), len(missing))
    return StoreStatus(ClusterRecord("c", 0, Hold(WHY, "b1")), (3, "token"), [report])


def documents(result):
    """The JSON lines; the runner also shows the answer that was typed."""
    return [json.loads(line) for line in result.stdout.splitlines() if line.startswith("{")]


def invoke(*arguments, **options):
    return CliRunner().invoke(app, [*arguments, *URL], **options)


@pytest.fixture
def store(monkeypatch):
    """Sets how the store is; an accept makes it NOT_HELD."""

    def begin(status):
        monkeypatch.setattr(metadata, "store_status", lambda _url: status)

        async def accepted(_url, _ask):
            return NOT_HELD

        monkeypatch.setattr(metadata, "ask_store", accepted)

    return begin


@pytest.fixture
def nodes_of(monkeypatch):
    """Sets what `bookies_registered` returns."""

    def begin(*bookies):
        async def registered(_url):
            return list(bookies)

        async def alive(_url):
            return []

        for module in (nodes, main):
            monkeypatch.setattr(module, "bookies_registered", registered)
            monkeypatch.setattr(module, "living_brokers", alive)

    return begin


@pytest.mark.parametrize("missing", [(), ((17, 9, 4096),)])
@pytest.mark.parametrize("verb", ["status", "accept"])
def test_the_list_of_what_is_lost_names_what_no_bookie_has(store, verb, missing):
    store(held(*missing))
    shown = invoke("metadata", verb, input="n\n").stdout
    assert "rows of small commits" in shown
    for kind in ("topics", "policies", "schemas", "subscriptions"):
        assert kind in shown
    assert "no such ledgers" not in shown
    assert ("17" in shown) == bool(missing)
    (listed,) = documents(invoke("metadata", verb, "--json", input="n\n"))
    assert "small commits" in listed["not_listed"]


def test_accept_as_json_lists_before_it_asks_on_the_terminal(store):
    store(held((17, 9, 4096)))
    refused = invoke("metadata", "accept", "--json", input="n\n")
    assert refused.exit_code == 1
    (listed,) = documents(refused)
    assert (listed["accepted"], [one["ledger"] for one in listed["unnamed"]]) == (False, [17])
    assert "Accept the store" in refused.stderr
    agreed = invoke("metadata", "accept", "--json", input="y\n")
    first, outcome = documents(agreed)
    assert first == listed
    assert (outcome["accepted"], outcome["epoch"]) == (True, 1)


def test_accept_as_json_without_a_question_is_one_document(store):
    store(held((17, 9, 4096)))
    done = invoke("metadata", "accept", "--json", "--yes")
    assert done.exit_code == 0
    assert json.loads(done.stdout)["accepted"]


@pytest.mark.parametrize("options", [(), ("--json",)])
@pytest.mark.parametrize("verb", [("status",), ("metadata", "status")])
def test_a_status_ends_with_1_while_the_store_is_held_and_else_with_0(
    store, nodes_of, verb, options
):
    nodes_of({"id": "b1", "state": directory.DOWN, "held": WHY, "limbo_ledgers": 0})
    store(held())
    ended = invoke(*verb, *options)
    assert (ended.exit_code, WHY in ended.stdout) == (1, True)
    store(NOT_HELD)
    assert invoke(*verb, *options).exit_code == 0


def test_status_without_a_broker_names_the_command_that_starts_one(store, nodes_of):
    store(NOT_HELD)
    nodes_of()
    assert "`spark-ledger broker start`" in invoke("status").stdout


@pytest.mark.parametrize("why", [WHY, ""])
def test_a_list_of_bookies_begins_with_the_hold_if_there_is_one(nodes_of, why):
    bookie = {"id": "b1", "state": directory.DOWN, "limbo_ledgers": 0}
    nodes_of(bookie | ({"held": why} if why else {}))
    shown = invoke("bookie", "list").stdout
    assert ("HELD" in shown.splitlines()[0]) == bool(why)
    (row,) = json.loads(invoke("bookie", "list", "--json").stdout)
    assert ("held" in row["why"]) == bool(why)


@pytest.mark.parametrize("why", [WHY, ""])
def test_ledgers_without_a_record_are_shown_with_the_hold(monkeypatch, why):
    found = UnrecordedLedgers({17: ["b1"]}, {}, why)
    monkeypatch.setattr(ledger, "with_ledgers", lambda _url, _work: found)
    assert (WHY in invoke("ledger", "unrecorded").stdout) == bool(why)
    plain = json.loads(invoke("ledger", "unrecorded", "--json").stdout)
    assert plain["held"] == (why or None)
