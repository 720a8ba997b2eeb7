"""Pulsar's client sees of our broker what it sees of Pulsar, but for what is listed here.

`transcript.json` is what it sees of Pulsar (record.py). What is seen here instead stands in
DIFFERENCES with the reason; docs/pulsar.md has each of them.
"""

import json
import sys

import pytest

from spark_ledger.local.processes import Child
from spark_ledger.topic import blocking
from spark_ledger.topic.log.policies import TopicPolicies
from spark_ledger.topic.upkeep.admin import TopicAdmin
from tests.integration.pulsar import program
from tests.integration.pulsar.case import asked
from tests.integration.pulsar.record import TRANSCRIPT

PULSARS = json.loads(TRANSCRIPT.read_text())
DIFFERENCES = {
    # slots of keys are shared out evenly, not by a ring: here the first of two has 8 of 12 keys
    "the_keys_of_a_consumer_that_leaves_go_on_in_order": {"all": 32},
    # an acknowledgement by index is as durable as any other one
    "the_rest_of_a_batch_comes_after_an_unload": {"rest": ["3", "4"]},
}


class Ours:
    """Our broker, as the program's world."""

    def __init__(self, cluster, closed_url):
        self.url = cluster.broker_url
        self._admin_url = cluster.admin_url
        self.closed_url = closed_url
        self._topics = blocking.topics(cluster.service_url)

    def create(self, topic, partitions=0, *, once=False):
        policies = TopicPolicies(deduplication=once, partitioned=partitions > 0)
        self._topics.run(self._topics.client.topics.create(topic, max(1, partitions), policies))

    def terminate(self, topic):
        self._topics.run(TopicAdmin(self._topics.client).terminate(topic))

    def ask(self, verb, path, body=None):
        return asked(self._admin_url, verb, path, body)


@pytest.fixture(scope="module")
def world(cluster, tmp_path_factory):
    """With a second broker, and a namespace in which no client makes a topic."""
    client = blocking.topics(cluster.service_url)
    client.run(client.client.topics.set_namespace("public/closed", {"auto_create": False}))
    options = ["--parent-pipe", "--broker-port", "0", "--admin-port", "0"]
    options += ["--service-url", cluster.service_url]
    command = [sys.executable, "-m", "spark_ledger.cli.main", "broker", "start", *options]
    log = tmp_path_factory.mktemp("second") / "broker.log"
    url = cluster.broker_url
    second = Child("a second broker", command, log)
    try:
        yield Ours(cluster, json.loads(second.first_line(60))["broker_url"])
        assert cluster.broker_url == url
    finally:
        second.terminate()  # in good order: who shares the cluster finds nothing of it
        second.wait(60)


@pytest.mark.parametrize("step", program.STEPS, ids=lambda step: step.__name__)
def test_a_client_sees_here_what_it_sees_of_pulsar(world, step):
    name = step.__name__
    expected = {**PULSARS[name], **DIFFERENCES.get(name, {})}
    assert program.run(world, [step])[name] == expected


def test_every_difference_is_one_and_every_step_was_recorded():
    assert list(PULSARS) == [step.__name__ for step in program.STEPS]
    for step, seen in DIFFERENCES.items():
        for what, value in seen.items():
            assert PULSARS[step][what] != value, f"{step}, {what}: no difference any more"
