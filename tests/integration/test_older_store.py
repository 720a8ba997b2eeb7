"""ZooKeeper's folder copied and put back, with real parts: what was acknowledged and is still named
is read, nothing is deleted, nothing is built on the older store before a person accepts it."""

import shutil
import uuid
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import pulsar
import pytest

from spark_ledger import LedgerClient, errors
from spark_ledger.local import LocalCluster
from spark_ledger.metadata.cluster import IDS_PER_EPOCH
from spark_ledger.topic import blocking
from tests.integration.holds import command, registered, standing
from tests.integration.pulsar_clients import connected
from tests.integration.topic_rows import read_all, write_and_commit
from tests.kit.processes import eventually

SOON = {"gc_interval_s": 0.5, "tombstone_sweep_s": 0.5, "overreplicated_wait_s": 0.5}
"""Bookies look for what was deleted all the time."""


@pytest.fixture
def cluster(fresh_cluster, tmp_path) -> LocalCluster:
    return fresh_cluster(3, tmp_path / "cluster", bookie_settings=SOON)


class Copy:
    """Of ZooKeeper's folder, taken and put back while ZooKeeper is stopped for a moment."""

    def __init__(self, cluster: LocalCluster, kept: Path) -> None:
        self._cluster = cluster
        self._folder = Path(cluster.data_dir) / "zookeeper"
        self._kept = kept
        self._while_stopped(lambda: shutil.copytree(self._folder, kept))

    def put_back(self) -> None:
        def replace() -> None:
            shutil.rmtree(self._folder)
            shutil.copytree(self._kept, self._folder)

        self._while_stopped(replace)

    def _while_stopped(self, act: Callable[[], object]) -> None:
        self._cluster.zookeeper.stop()
        act()
        self._cluster.zookeeper.start()


def test_a_store_put_back_while_all_runs_is_held_and_goes_on_after_accept(cluster, tmp_path):
    topics = blocking.topics(cluster.service_url)
    info = topics.run(topics.client.topics.create(f"t-{uuid.uuid4()}", 1))
    early = [b"%04d" % number for number in range(2000)]
    write_and_commit(topics, info, 0, early)
    with LedgerClient(cluster.service_url) as client:
        running = client.create_ledger(3, 3, 2)
        running.append(b"before")
        copy = Copy(cluster, tmp_path / "copy")
        assert eventually(lambda: registered(cluster) == 3, 60)
        later = client.create_ledger(3, 3, 2)  # out of a block of before
        ids = [client.create_ledger(3, 3, 2) for _ in range(20)]
        for writer in (later, *ids):
            writer.append(b"later")
            writer.close()
        running.append(b"between")

        copy.put_back()

        assert eventually(lambda: standing(cluster).cluster.hold is not None, 60)
        running.append(b"after")  # what is open is written on
        with pytest.raises(errors.MetadataHeld):  # of a block that the client took before
            client.create_ledger(3, 3, 2)
        with pytest.raises(errors.MetadataHeld, match="metadata accept"):
            write_and_commit(topics, info, 1, early)
        assert read_all(topics, info) == early
        assert eventually(lambda: not standing(cluster).silent, 60)
        found = standing(cluster)
        assert {later.ledger_id, *(one.ledger_id for one in ids)} <= set(found.missing)

        done = command(cluster, "metadata", "accept", "--yes")

        assert done["accepted"] and done["epoch"] == 1
        assert later.ledger_id in [one["ledger"] for one in done["unnamed"]]
        assert eventually(lambda: registered(cluster) == 3, 60)
        new = client.create_ledger(3, 3, 2)
        assert new.ledger_id >= IDS_PER_EPOCH
        running.append(b"last")
        running.close()
        with client.open_ledger(running.ledger_id, recover=False) as reader:
            entries = [bytes(entry) for _, entry in reader.read(0, 3)]
        assert entries == [b"before", b"between", b"after", b"last"]
        new.close()
    fresh = blocking.topics(cluster.service_url)
    with pytest.raises(errors.LedgerFenced, match="accepted"):  # this process began before it
        write_and_commit(fresh, info, 1, early)
    write_and_commit(fresh, info, 1, [b"new"])
    assert read_all(fresh, info) == [*early, b"new"]
    with LedgerClient(cluster.service_url) as client:
        ledgers = []
        for _ in range(17):
            ledgers.append(client.create_ledger(3, 3, 2))
            ledgers[-1].close()
    assert all(one.ledger_id >= IDS_PER_EPOCH for one in ledgers)


async def positions_of(topics: Any, info: Any) -> dict[int, int]:
    (subscription,) = await topics.client.subscriptions.list(info.id, exact=True)
    return dict(subscription.positions)


def test_a_consumer_gets_what_an_accepted_store_has_and_nothing_is_started_again(cluster, tmp_path):
    topics = blocking.topics(cluster.service_url)
    info = topics.run(topics.client.topics.create("t", 1))
    write_and_commit(topics, info, 0, [b"early"] * 10)
    new = [b"new %d" % number for number in range(15)]
    with connected(cluster.broker_url) as client:
        earliest = pulsar.InitialPosition.Earliest
        consumer = client.subscribe("t", "s", initial_position=earliest)

        def receive(count: int) -> list[bytes]:
            messages = [consumer.receive(60_000) for _ in range(count)]
            for message in messages:
                consumer.acknowledge(message)
            return [message.data() for message in messages]

        assert receive(10) == [b"early"] * 10
        assert eventually(lambda: topics.run(positions_of(topics, info))[0] == 10, 30)
        copy = Copy(cluster, tmp_path / "copy")
        for version in (1, 2):
            write_and_commit(topics, info, version, [b"given up"] * 50)
        assert receive(100) == [b"given up"] * 100
        with LedgerClient(cluster.service_url) as ledgers:
            for _ in range(20):  # beyond the ids that the copy gave out
                writer = ledgers.create_ledger(3, 3, 2)
                writer.append(b"an entry, so that bookies know the ledger")
                writer.close()

        copy.put_back()
        assert eventually(lambda: standing(cluster).cluster.hold is not None, 60)
        command(cluster, "metadata", "accept", "--yes")
        assert eventually(lambda: registered(cluster) == 3, 60)
        with pytest.raises(errors.LedgerFenced, match="accepted"):  # this process began before it
            write_and_commit(topics, info, 1, [b"new"])
        for version in (1, 2, 3):
            write_and_commit(topics, info, version, new[5 * version - 5 : 5 * version])

        got: dict[bytes, None] = {}  # each may come once more, from before the accept was seen
        while len(got) < len(new):
            got |= dict.fromkeys(data for data in receive(1) if data != b"given up")
        assert list(got) == new

        def are_acknowledged() -> bool:
            """What was acknowledged before the broker saw the accept comes once more."""
            with suppress(pulsar.Timeout):
                message = consumer.receive(200)
                assert message.data() in new
                consumer.acknowledge(message)
            return topics.run(positions_of(topics, info))[0] == 10 + len(new)

        assert eventually(are_acknowledged, 30)


def test_a_store_put_back_while_all_is_stopped_deletes_nothing(fresh_cluster, tmp_path):
    """C9: a bookie that is down at the accept comes back without another hold, and the newest store
    put back after all has everything again."""
    folder = tmp_path / "cluster"

    def up() -> LocalCluster:
        return fresh_cluster(3, folder, bookie_settings=SOON)

    def append(cluster: LocalCluster, payload: bytes) -> int:
        with LedgerClient(cluster.service_url) as client:
            writer = client.create_ledger(3, 3, 3)
            writer.append(payload)
            writer.close()
            return writer.ledger_id

    def read(cluster: LocalCluster, ledger_id: int) -> bytes:
        with (
            LedgerClient(cluster.service_url) as client,
            client.open_ledger(ledger_id, recover=False) as reader,
        ):
            return bytes(next(reader.read(0, 0))[1])

    def replaced(name: str) -> None:
        shutil.rmtree(folder / "zookeeper")
        shutil.copytree(tmp_path / name, folder / "zookeeper")

    first = up()
    early = append(first, b"early")
    first.stop()
    shutil.copytree(folder / "zookeeper", tmp_path / "older")
    second = up()
    late = append(second, b"late")
    second.stop()
    shutil.copytree(folder / "zookeeper", tmp_path / "newest")

    replaced("older")
    held = up()
    assert standing(held).cluster.hold is not None
    assert read(held, early) == b"early"
    with pytest.raises(errors.MetadataHeld):
        append(held, b"none")
    held.bookies[2].kill()
    assert command(held, "metadata", "accept", "--yes")["accepted"]
    held.bookies[2].start()
    assert eventually(lambda: registered(held) == 3, 60)
    assert append(held, b"new") >= IDS_PER_EPOCH
    assert standing(held).cluster.hold is None
    held.stop()

    replaced("newest")
    newest = up()  # whose epoch is lower than that of the disks: a person decides here, too
    assert (read(newest, early), read(newest, late)) == (b"early", b"late")
    assert standing(newest).cluster.hold is not None
    assert command(newest, "metadata", "accept", "--yes")["epoch"] == 2
