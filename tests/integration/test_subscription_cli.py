"""Subscriptions from the command line, as a user steers them."""

import json

import pytest

from spark_ledger.local import LocalCluster
from tests.integration.topic_rows import write
from tests.kit.cli import fails, succeeds


@pytest.fixture
def cli(cluster: LocalCluster):
    """Runs `spark-ledger NOUN VERB ...` on the cluster; its JSON."""

    def run(*arguments: object):
        return json.loads(succeeds(*arguments, "--json", "--service-url", cluster.service_url))

    run.url = cluster.service_url
    return run


def test_a_subscription_is_made_moved_listed_and_deleted(cli):
    cli("topic", "create", "cli-sub")
    write(cli.url, "cli-sub", ["a", "b", "c"])
    made = cli("subscription", "create", "cli-sub", "mine", "--to", "earliest")
    assert made["offsets"] == {"0": 0}
    (lag,) = cli("subscription", "lag", "cli-sub", "mine")
    assert (lag["position"], lag["end"], lag["rows"]) == (0, 3, 3)

    assert cli("subscription", "seek", "cli-sub", "mine", "--to-offset", "0=2")["offsets"] == {
        "0": 2
    }
    (listed,) = cli("subscription", "list", "cli-sub")
    assert (listed["subscription"], listed["in_use"]) == ("mine", False)
    assert listed["offsets"] == {"0": 2}
    told = succeeds("subscription", "list", "cli-sub", "--service-url", cli.url)
    assert "mine" in told and "0=2" in told

    cli("subscription", "delete", "cli-sub", "mine", "--yes")
    assert cli("subscription", "list", "cli-sub") == []


def test_what_is_no_place_and_what_is_not_there_are_refused(cli):
    url = ("--service-url", cli.url)
    cli("topic", "create", "cli-sub-refused")
    where = ("subscription", "seek", "cli-sub-refused", "mine")
    assert "Give either --to or --to-offset" in fails(*where, *url)
    assert "is no time" in fails(*where, "--to", "yesterday", *url)
    assert "PARTITION=OFFSET" in fails(*where, "--to-offset", "0", *url)
    assert "LEDGER_SUBSCRIPTION.NOT_FOUND" in fails(*where, "--to", "latest", *url)
