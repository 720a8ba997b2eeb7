"""Subscriptions on real processes, through the facade that Spark's driver uses."""

import subprocess
import sys
import threading
import uuid

import pytest

from spark_ledger import errors
from spark_ledger.topic.blocking import open_cursor
from spark_ledger.topic.subscription.seek_target import End

CRASHING_QUERY = """
import os, sys
from spark_ledger.topic import blocking
from spark_ledger.topic.blocking import open_cursor
from spark_ledger.topic.subscription.seek_target import End

topics = blocking.topics(sys.argv[1])
topic = topics.run(topics.client.topics.open(sys.argv[2]))
cursor = open_cursor(topics, topic, "s", "q", "r1", start=End.EARLIEST)
for offset in (1, 2, 3, 4):
    cursor.advance({0: offset})
    topics.run(cursor.cursor.durable())
os._exit(9)
"""


@pytest.fixture
def topic(topics):
    return topics.run(topics.client.topics.create(f"t-{uuid.uuid4()}", 2))


def test_a_killed_driver_leaves_its_position_to_its_querys_next_run(cluster, topics, topic):
    name = topic.name.short
    done = subprocess.run([sys.executable, "-c", CRASHING_QUERY, cluster.service_url, name])
    assert done.returncode == 9
    subscriptions = topics.client.subscriptions
    (found,) = topics.run(subscriptions.list(topic.id))
    assert found.ledger_id is not None
    with pytest.raises(errors.SubscriptionBusy, match="used by query q, run r1"):
        open_cursor(topics, topic, "s", "another", "r")

    cursor = open_cursor(topics, topic, "s", "q", "r2")

    assert topics.run(cursor.cursor.recovered())[0] == 4
    assert open_cursor(topics, topic, "s", "q", "r2") is cursor
    cursor.release()
    assert topics.run(subscriptions.positions(topic.id, "s"))[0] == 4
    open_cursor(topics, topic, "s", "another", "r").release()


def test_any_thread_may_tell_it_and_none_waits(topics, topic):
    cursor = open_cursor(topics, topic, "s", "q", "r", start=End.EARLIEST)
    threads = [
        threading.Thread(target=lambda: [cursor.advance({0: n, 1: n}) for n in range(200)])
        for _ in range(4)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()

    topics.run(cursor.cursor.durable())

    assert cursor.cursor.confirmed == {0: 199, 1: 199}
    cursor.check()
    cursor.advance({0: 50, 1: 199})  # back, in a multi of its own
    topics.run(cursor.cursor.durable())
    assert cursor.cursor.confirmed == {0: 50, 1: 199}
    cursor.release()
    with pytest.raises(errors.LedgerFenced, match="released"):
        cursor.check()


def test_the_verbs_work_on_a_real_store(topics, topic):
    subscriptions, run = topics.client.subscriptions, topics.run
    assert run(subscriptions.create(topic.id, "a/b", End.EARLIEST)) == {0: 0, 1: 0}
    held = run(subscriptions.holds(topic.id, 2, 10**15))
    assert held.offsets == {0: 0, 1: 0}
    assert run(subscriptions.seek(topic.id, "a/b", End.LATEST)) == {0: 0, 1: 0}
    run(subscriptions.delete(topic.id, "a/b"))
    assert run(subscriptions.list(topic.id)) == []
    assert run(subscriptions.holds(topic.id, 2, 10**15)).check.version > held.check.version
