"""Records of ledgers that are missing though nobody deleted the ledgers: the copies stay (C9)."""

import json
import re
import shutil
from pathlib import Path
from typing import Any

import pulsar

import spark_ledger
from spark_ledger import LedgerClient
from spark_ledger.local import LocalCluster
from tests.kit.cli import succeeds
from tests.kit.processes import eventually

SETTINGS: dict[str, object] = {
    "tombstone_sweep_s": 0.5,
    "gc_interval_s": 0.5,
    "overreplicated_wait_s": 0.5,
    "flush_interval_s": 0.5,
    "session_timeout_s": 2,
}
PAYLOADS = [b"payload %d" % number for number in range(5)]


def started(folder: Path) -> LocalCluster:
    return LocalCluster(3, folder, bookie_settings=SETTINGS, autorecovery=False)


def written(client: LedgerClient, count: int) -> list[int]:
    ids = []
    for _ in range(count):
        with client.create_ledger(3, 3, 2) as writer:
            for payload in PAYLOADS:
                writer.append(payload)
        ids.append(writer.ledger_id)
    return ids


def entries(client: LedgerClient, ledger_id: int) -> list[bytes]:
    with client.open_ledger(ledger_id) as reader:
        return [bytes(payload) for _, payload in reader.read(0, len(PAYLOADS) - 1)]


def kept_without_a_record(cluster: LocalCluster, count: int) -> bool:
    """Whether each bookie has looked and counts so many."""
    said = [succeeds("bookie", "info", bookie.frames) for bookie in cluster.bookies]
    return all(f" {count} kept without a record" in one for one in said)


def dropped(cluster: LocalCluster) -> list[int]:
    """By bookie: of how many ledgers it dropped the entries in this run."""
    said = [succeeds("bookie", "info", bookie.frames) for bookie in cluster.bookies]
    return [int(match[1]) for one in said if (match := re.search(r"(\d+) ledgers dropped", one))]


def send(cluster: LocalCluster, topic: str, messages: list[bytes]) -> None:
    client = pulsar.Client(cluster.broker_url)
    producer = client.create_producer(topic)
    for message in messages:
        producer.send(message)
    client.close()


def received(cluster: LocalCluster, topic: str, count: int) -> list[bytes]:
    client = pulsar.Client(cluster.broker_url)
    reader = client.create_reader(topic, pulsar.MessageId.earliest)
    found = [reader.read_next(20_000).data() for _ in range(count)]
    client.close()
    return found


def unrecorded(cluster: LocalCluster, *arguments: str) -> Any:
    url = ("--service-url", cluster.service_url)
    return json.loads(succeeds("ledger", "unrecorded", *arguments, "--json", *url))


def accepted(cluster: LocalCluster) -> bool:
    """Whether the store was held, and a person accepted it."""
    said = succeeds("metadata", "accept", "--yes", "--json", "--service-url", cluster.service_url)
    return bool(json.loads(said)["accepted"])


def test_c9_what_was_written_since_an_older_copy_is_kept_after_that_was_accepted(tmp_path):
    folder, older, newest = tmp_path / "cluster", tmp_path / "older", tmp_path / "newest"
    store = folder / "zookeeper" / "data"
    messages = [b"message %d" % number for number in range(20)]

    with started(folder) as cluster, LedgerClient(cluster.service_url) as client:
        before = written(client, 3)
        client.delete_ledger(before.pop())
        spark_ledger.Admin(cluster.service_url).create_topic("before")
        send(cluster, "before", messages)
    shutil.copytree(store, older)

    with started(folder) as cluster, LedgerClient(cluster.service_url) as client:
        after = written(client, 15)
        deleted_later = before.pop()
        client.delete_ledger(deleted_later)
        send(cluster, "after", messages)
    store.rename(newest)
    shutil.copytree(older, store)

    with started(folder) as cluster, LedgerClient(cluster.service_url) as client:
        assert entries(client, before[0]) == PAYLOADS
        assert eventually(lambda: accepted(cluster), 30)
        count = len(after) + 1  # the topic's
        assert eventually(lambda: kept_without_a_record(cluster, count), 30)
        assert {*after} <= {one["ledger"] for one in unrecorded(cluster)["ledgers"]}
        given_up, dropped_before = after.pop(), dropped(cluster)
        said = unrecorded(cluster, str(given_up), "--delete", "--yes")
        assert said["named_as_deleted"] == [given_up]
        assert eventually(lambda: sum(dropped(cluster)) == sum(dropped_before) + 3, 30)
    shutil.rmtree(store)
    newest.rename(store)

    with started(folder) as cluster, LedgerClient(cluster.service_url) as client:
        for ledger_id in [*before, *after]:
            assert entries(client, ledger_id) == PAYLOADS
        assert eventually(lambda: accepted(cluster), 30)
        assert received(cluster, "before", len(messages)) == messages
        assert received(cluster, "after", len(messages)) == messages
        assert eventually(lambda: kept_without_a_record(cluster, 0), 30)
        dropped_before = dropped(cluster)
        client.delete_ledger(before[0])
        assert eventually(lambda: sum(dropped(cluster)) == sum(dropped_before) + 3, 30)
