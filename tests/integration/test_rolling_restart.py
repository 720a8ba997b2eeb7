"""Every bookie is restarted in good order, one after another, while a ledger and a topic are
written: no append fails, and of what is back in time nothing is copied elsewhere."""

import json
import threading
import time
import uuid
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager

import pytest

from bookie_server.__main__ import STOPPED
from spark_ledger import LedgerClient
from spark_ledger.local import LocalCluster
from spark_ledger.topic import blocking
from tests.integration.healing import all_records, heals, status
from tests.integration.topic_rows import read_all, write_and_commit
from tests.kit.cli import succeeds

DELAY_S = 60
BETWEEN_S = 0.005
E, QW, QA = 3, 3, 2


@contextmanager
def all_the_time(once: Callable[[], None]) -> Iterator[list[BaseException]]:
    """It is done again and again beside the block; what it failed with, once the block is left."""
    over, failed = threading.Event(), []

    def again() -> None:
        try:
            while not over.is_set():
                once()
        except BaseException as failure:
            failed.append(failure)

    thread = threading.Thread(target=again)
    thread.start()
    try:
        yield failed
    finally:
        over.set()
        thread.join()


def is_writable(cluster: LocalCluster, bookie_id: str) -> bool:
    listed = json.loads(succeeds("bookie", "list", "--json", "--service-url", cluster.service_url))
    return ("rw", bookie_id) in [(one["state"], one["id"]) for one in listed]


@pytest.mark.parametrize(
    "bookies",
    [pytest.param(4, id="with-a-spare", marks=pytest.mark.slow), pytest.param(3, id="no-spare")],
)
def test_every_bookie_is_restarted_under_load_and_no_append_fails(fresh_cluster, bookies):
    cluster: LocalCluster = fresh_cluster(
        bookies=bookies, autorecovery=True, lost_bookie_delay_s=DELAY_S
    )
    topics = blocking.topics(cluster.service_url)
    info = topics.run(topics.client.topics.create(f"t-{uuid.uuid4()}"))
    rows: list[bytes] = []
    adds: list[Future[int]] = []

    def commit() -> None:
        batch = [b"row %d of batch %d" % (number, len(rows)) for number in range(100)]
        write_and_commit(topics, info, len(rows) // 100, batch)
        rows.extend(batch)

    with LedgerClient(cluster.service_url) as client:
        writer = client.create_ledger(E, QW, QA)

        def append() -> None:
            adds.append(writer.append_async(b"entry %d" % len(adds)))
            time.sleep(BETWEEN_S)

        with all_the_time(append) as failed_appends, all_the_time(commit) as failed_commits:
            for bookie in cluster.bookies:
                begun = len(adds), len(rows)
                bookie.stop()
                assert bookie.exit_code == STOPPED
                bookie.start()
                assert heals(lambda bookie=bookie: is_writable(cluster, bookie.id))
                went_on = len(adds) > begun[0] and len(rows) > begun[1]
                assert went_on or heals(lambda begun=begun: len(rows) > begun[1])
        assert (failed_appends, failed_commits) == ([], [])
        assert [add.result(60) for add in adds] == list(range(len(adds)))
        assert status(cluster)["lost"] == {}
        assert status(cluster)["by_reason"].keys() <= {"lacking"}
        writer.close()
        with client.open_ledger(writer.ledger_id) as reader:
            found = [bytes(payload) for _, payload in reader.read(0, len(adds) - 1)]
        assert found == [b"entry %d" % number for number in range(len(adds))]
    assert read_all(topics, info) == rows
    assert not any(record.joining for record in all_records(cluster))
    assert "Moved(" not in (cluster.data_dir / "autorecovery.log").read_text()
