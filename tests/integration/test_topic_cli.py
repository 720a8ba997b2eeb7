"""Steering topics from the command line, as a user does."""

import json

import pyarrow as pa
import pytest

from spark_ledger import Admin
from spark_ledger.cli.common import with_topics
from spark_ledger.local import LocalCluster
from spark_ledger.topic import blocking
from spark_ledger.topic.client import TopicClient
from spark_ledger.topic.entry.message_batch import Share
from spark_ledger.topic.log.actions import OpenLive
from spark_ledger.topic.subscription.unheld import note_reads
from tests.integration.topic_rows import write
from tests.kit.cli import fails, spark_ledger, succeeds
from tests.kit.message_batches import encode_batch


@pytest.fixture
def topic(cluster: LocalCluster):
    """Runs `spark-ledger topic VERB ...` on the cluster; its JSON."""

    def run(*arguments: object):
        return json.loads(
            succeeds("topic", *arguments, "--json", "--service-url", cluster.service_url)
        )

    run.url = cluster.service_url
    return run


def values(topic, name: str) -> list[str]:
    tail = succeeds("topic", "tail", name, "--no-follow", "--json", "--service-url", topic.url)
    return [json.loads(line)["value"] for line in tail.splitlines()]


def test_policies_are_given_at_creation_changed_and_shown(topic):
    topic("create", "cli-policies", "--policy", "retention_ms=7d", "--policy", "ack_quorum=2")
    changed = topic("set", "cli-policies", "retention_bytes=1GiB", "retention_ms=none")

    assert changed["policies"]["retention_bytes"] == 1 << 30
    described = topic("describe", "cli-policies")
    assert described["policies"] == changed["policies"]
    assert described["policies"]["retention_ms"] is None
    url = ("--service-url", topic.url)
    assert "Did you mean 'retention_ms'" in fails(
        "topic", "set", "cli-policies", "retentionms=1", *url
    )
    acknowledged = ("topic", "set", "cli-policies", "retention=acknowledged", *url)
    changed = spark_ledger(*acknowledged)
    assert (changed.returncode, changed.stderr) == (0, "")
    topics = blocking.topics(topic.url)
    info = topics.run(topics.client.topics.open("cli-policies"))
    topics.run(note_reads(topics.client.store, [info.id], 0))  # as a query does
    warned = spark_ledger(*acknowledged)
    assert warned.returncode == 0 and "holds no rows" in warned.stderr
    assert "cannot be '7 days'" in fails(
        "topic", "set", "cli-policies", "retention_ms=7 days", *url
    )


def test_rows_are_trimmed_merged_and_let_go_and_a_topic_grows_and_ends(topic):
    topic("create", "cli-steered", "--policy", "delete_delay_ms=0")
    write(topic.url, "cli-steered", ["a", "b"], ["c"], ["d"])

    assert topic("trim", "cli-steered", "--to-offset", "0=1", "--yes")["rows"] == 1
    compacted = topic("compact", "cli-steered")
    assert (compacted["segments"], compacted["merged"]) == (3, 1)
    assert values(topic, "cli-steered") == ["b", "c", "d"]
    described = topic("describe", "cli-steered")
    assert (described["rows"], described["offsets"][0]["segments"]) == (3, 1)
    cleaned = topic("clean")
    assert set(described["reclaimable"]) <= set(cleaned["deleted"])
    assert values(topic, "cli-steered") == ["b", "c", "d"]

    assert topic("grow", "cli-steered", 2)["partitions"] == 2
    assert topic("schema", "cli-steered") == {
        "topic": "cli-steered",
        "inForce": False,
        "versions": [],
        "numbers": [],
    }
    with Admin(topic.url) as admin:
        admin.register_schema("cli-steered", pa.schema([("id", pa.int64())]))
    assert topic("schema", "cli-steered")["inForce"] is True
    withdrawn = topic("schema", "cli-steered", "--withdraw")
    assert (withdrawn["inForce"], withdrawn["versions"]) == (False, [{"id": "int64"}])
    assert topic("truncate", "cli-steered", "--yes")["starts"] == {"0": 4}
    topic("terminate", "cli-steered", "--yes")
    assert topic("describe", "cli-steered")["terminated"] is True
    deleted = topic("delete", "cli-steered", "--yes")
    assert deleted["id"] in topic("clean")["topics"]


def test_what_cannot_be_is_one_line_that_says_what_to_do(topic):
    topic("create", "cli-wrong")
    url = ("--service-url", topic.url)
    trim = ("topic", "trim", "cli-wrong", "--yes", *url)

    assert "--to-offset PARTITION=OFFSET or --before" in fails(*trim)
    assert "Give PARTITION=OFFSET" in fails(*trim, "--to-offset", "1200")
    assert "is not a time" in fails(*trim, "--before", "yesterday")
    assert "[LEDGER_OFFSETS" in fails(*trim, "--to-offset", "0=5")
    assert "partitions only grow" in fails("topic", "grow", "cli-wrong", 1, *url)
    assert "is not a policy" in fails("topic", "set", "cli-wrong", "7d", *url)


def test_a_namespace_is_set_and_shown_and_its_topics_take_its_policies(topic):
    def namespace(*arguments: object):
        return json.loads(succeeds("namespace", *arguments, "--json", "--service-url", topic.url))

    wanted = {"auto_create": False, "auto_create_partitions": 4, "retention_ms": 604_800_000}
    given = ("auto_create=false", "auto_create_partitions=4", "retention_ms=7d")
    assert namespace("set", "acme/cli", *given) == wanted
    assert namespace("show", "acme/cli") == wanted
    assert "acme/cli" in namespace("list")
    topic("create", "acme/cli/t")
    assert topic("describe", "acme/cli/t")["policies"]["retention_ms"] == 604_800_000


def left_open(service_url: str, name: str) -> None:
    """A live ledger that an owner left with bytes at its end that it did not write."""

    async def work(client: TopicClient) -> None:
        info = await client.topics.open(name)
        intent = await client.intents.open_system_intent("own", info.id)
        writer = await client.ledgers.create(3, 3, 2, intent=intent.id, topic=info.id)
        live = OpenLive(0, writer.ledger_id, 0, "owner", 1)
        await client.commit_actions(info.id, [live], intent)
        rows = pa.RecordBatch.from_arrays([pa.array([b"a", b"b"], pa.binary())], ["value"])
        await writer.append(encode_batch(rows, [Share(0, 2, 0)], written_ms=1), rows=2)
        await writer.append([b"another program's"], rows=1)
        await writer.close()

    with_topics(service_url, work)


def test_a_partition_whose_live_end_no_owner_wrote_is_shown_and_mended_on_a_yes(topic):
    topic("create", "cli-repair")
    url = ("--service-url", topic.url)
    assert "every partition can be opened" in succeeds("topic", "repair", "cli-repair", *url)
    left_open(topic.url, "cli-repair")

    (seen,) = topic("repair", "cli-repair")
    assert (seen["partition"], seen["done"], seen["offsets_given_up"]) == (0, False, [])
    (entry,) = seen["entries"]
    assert bytes.fromhex(entry["begins"]) == b"another program's"
    assert len(entry["copies"]) == 3
    assert topic("repair", "cli-repair")[0]["done"] is False, "nothing is done without a yes"

    said = succeeds("topic", "repair", "cli-repair", "--yes", *url)
    assert 'b"another program\'s"' in said
    assert "1 partition(s) repaired" in said
    assert topic("repair", "cli-repair") == []
    assert values(topic, "cli-repair") == ["a", "b"]
