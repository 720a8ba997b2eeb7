"""Subscriptions from the command line, as a user steers them."""

import json

import pulsar
import pytest

from spark_ledger.local import LocalCluster
from tests.integration.pulsar_clients import TIMEOUT_MS
from tests.integration.topic_rows import write
from tests.kit.cli import fails, succeeds
from tests.kit.processes import eventually


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
    row = succeeds("subscription", "list", "cli-sub", "--service-url", cli.url).splitlines()[1]
    assert row.split()[:4] == ["mine", "-", "no", "0=2"] and "None" not in row

    cli("subscription", "delete", "cli-sub", "mine", "--yes")
    assert cli("subscription", "list", "cli-sub") == []


def test_what_is_no_place_and_what_is_not_there_are_refused(cli):
    url = ("--service-url", cli.url)
    cli("topic", "create", "cli-sub-refused")
    where = ("subscription", "seek", "cli-sub-refused", "mine")
    assert "Give either --to or --to-offset" in fails(*where, *url)
    assert "is not a time" in fails(*where, "--to", "yesterday", *url)
    assert "PARTITION=OFFSET" in fails(*where, "--to-offset", "0", *url)
    twice = ("--to-offset", "0=1", "--to-offset", "0=2")
    assert "name a partition twice" in fails(*where, *twice, *url)
    absent = fails(*where, "--to", "latest", *url)
    assert "LEDGER_SUBSCRIPTION.NOT_FOUND" in absent and "subscription create" in absent


def test_a_subscription_is_skipped_cleared_reset_and_peeked_at(cli):
    cli("topic", "create", "cli-moves")
    where = ("cli-moves", "mine")
    url = ("--service-url", cli.url)
    write(cli.url, "cli-moves", ["a", "b", "c"], ["d"])
    cli("subscription", "create", *where, "--to", "earliest")
    peeked = succeeds("subscription", "peek", *where, "--count", 2, "--json", *url).splitlines()
    assert [json.loads(line)["value"] for line in peeked] == ["a", "b"]
    assert cli("subscription", "skip", *where, 2)["offsets"] == {"0": 2}
    assert cli("subscription", "expire", *where, "1d")["offsets"] == {}
    assert "does not move" in succeeds("subscription", "expire", *where, "1d", *url)
    assert cli("subscription", "expire", *where, "1ms")["offsets"] == {"0": 4}
    assert cli("subscription", "reset", *where)["offsets"] == {"0": 0}
    assert cli("subscription", "reset", *where, "--to-offset", "0=1")["offsets"] == {"0": 1}
    assert cli("subscription", "clear", *where)["offsets"] == {"0": 4}
    assert succeeds("subscription", "peek", *where, *url) == ""
    assert "LEDGER_CONFIG" in fails("subscription", "skip", *where, 1, "--partition", 3, *url)
    assert "is not an age" in fails("subscription", "expire", *where, "long", *url)
    gone = "cli-moves", "gone"
    for verb in (("clear", *gone), ("skip", *gone, 1), ("expire", *gone, "1s"), ("peek", *gone)):
        assert "LEDGER_SUBSCRIPTION.NOT_FOUND" in fails("subscription", *verb, *url)


def test_what_is_in_memory_of_brokers_is_listed_and_consumers_are_moved(cli, cluster, client, name):
    consumer = client.subscribe(name, "s", consumer_name="eater", receiver_queue_size=2)
    producer = client.create_producer(name)
    for number in range(4):
        producer.send(b"%d" % number)
    consumer.receive(TIMEOUT_MS)

    def listed():
        (subscription,) = cli("subscription", "list", name)
        assert subscription["asked"]
        return [subscription[column] for column in ("type", "consumers", "unacked", "delayed")]

    assert eventually(lambda: listed() == ["Exclusive", 1, 2, 0] or listed()[2] == 3)
    row = succeeds("subscription", "list", name, "--service-url", cli.url).splitlines()[1]
    assert row.split()[:6] == ["s", "consumer", "yes", "0=0", "-", "Exclusive"]
    url = ("--service-url", cli.url)
    refusal = fails("subscription", "seek", name, "s", "--to", "earliest", *url)
    assert "`clear`" in refusal and "force=true" in refusal and "killed" not in refusal
    stats = cli("topic", "stats", name)
    assert stats["subscriptions"]["s"]["msgBacklog"] == 4
    shown = succeeds("topic", "stats", name, "--service-url", cli.url)
    assert "Exclusive" in shown and producer.producer_name() in shown
    (lag,) = cli("subscription", "lag", name, "s")
    assert (lag["position"], lag["rows"], lag["floor_age_ms"]) == (0, 4, None)
    consumer.receive(TIMEOUT_MS)
    consumer.acknowledge(consumer.receive(TIMEOUT_MS))  # a hole beyond the position
    assert eventually(lambda: cli("subscription", "lag", name, "s")[0]["rows"] == 3)
    assert cli("subscription", "lag", name, "s")[0]["position"] == 0
    assert " - " in succeeds("subscription", "lag", name, "s", "--service-url", cli.url) + " "
    cli("subscription", "clear", name, "s")
    producer.send(b"new")
    assert eventually(lambda: consumer.receive(TIMEOUT_MS).data() == b"new")


def test_lines_are_produced_and_consumed_each_once(cli):
    url = ("--service-url", cli.url)
    cli("topic", "create", "cli-lines", "--partitions", 2)
    assert cli("produce", "cli-lines", "one", "two", "--key", "k")["rows"] == 2
    produced = succeeds("produce", "cli-lines", "three", *url)
    assert "1 rows were written to topic cli-lines" in produced
    one_pass = ("consume", "cli-lines", "-s", "mine", "--no-follow", "--earliest", *url)
    lines = succeeds(*one_pass).splitlines()
    assert sorted(line.split("\t")[2:] for line in lines) == [
        ["k", "one"],
        ["k", "two"],
        ["null", "three"],
    ]
    assert succeeds(*one_pass) == ""
    cli("produce", "cli-lines", "four", "five")
    (row,) = succeeds(*one_pass, "--count", 1, "--json").splitlines()
    (rest,) = succeeds(*one_pass, "--json").splitlines()
    assert {json.loads(row)["value"], json.loads(rest)["value"]} == {"four", "five"}
    assert "LEDGER_TOPIC.NOT_FOUND" in fails("produce", "cli-gone", "x", *url)
    assert "LEDGER_TOPIC.NOT_FOUND" in fails("consume", "cli-gone", "-s", "x", *url)


def test_a_pass_over_a_subscription_leaves_out_what_its_consumers_acknowledged_one_by_one(
    cli, client
):
    name = "cli-gaps"
    producer = client.create_producer(name)
    consumer = client.subscribe(name, "s", pulsar.ConsumerType.Shared)
    for number in range(6):
        producer.send(b"%d" % number)
    messages = [consumer.receive(TIMEOUT_MS) for _ in range(6)]
    for number in (0, 2, 4, 5):
        consumer.acknowledge(messages[number])
    consumer.close()
    one_pass = ("consume", name, "-s", "s", "--no-follow", "--service-url", cli.url)
    values = [succeeds(*one_pass, "--count", 1).split()[3] for _ in range(2)]
    assert values == ["1", "3"] and succeeds(*one_pass) == ""
    consumer = client.subscribe(name, "s", pulsar.ConsumerType.Shared)
    producer.send(b"new")
    assert consumer.receive(TIMEOUT_MS).data() == b"new"


def test_without_a_broker_lag_has_the_age_of_the_position(fresh_cluster):
    cluster = fresh_cluster(bookies=3)
    url = ("--service-url", cluster.service_url)
    succeeds("topic", "create", "t", *url)
    write(cluster.service_url, "t", ["a", "b", "c"])
    succeeds("subscription", "create", "t", "mine", "--to", "earliest", *url)
    (lag,) = json.loads(succeeds("subscription", "lag", "t", "mine", "--json", *url))
    assert (lag["position"], lag["rows"]) == (0, 3)
    assert lag["floor_age_ms"] >= 0
    assert succeeds("subscription", "lag", "t", "mine", *url).rstrip().endswith("s")
