"""A client that hangs loses what another one asks for; one that lives keeps it."""

import signal
import subprocess
import sys
import time

import pulsar
import pytest

from tests.integration.pulsar_clients import TIMEOUT_MS, connected

AT_ONCE_S = 15.0
"""Five seconds for the client that hangs, and time on a busy machine."""
HOLDER = """
import sys, pulsar
url, topic = sys.argv[1:]
client = pulsar.Client(url, logger=pulsar.ConsoleLogger(pulsar.LoggerLevel.Error))
consumer = client.subscribe(topic, "s", consumer_type=pulsar.ConsumerType.Exclusive)
producer = client.create_producer(topic, "p", access_mode=pulsar.ProducerAccessMode.Exclusive)
print("ready", flush=True)
sys.stdin.read()
"""


@pytest.fixture
def holder(cluster, name):
    """A process that has the topic's producer and the consumer of its subscription."""
    command = [sys.executable, "-c", HOLDER, cluster.broker_url, name]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    with subprocess.Popen(command, **pipes) as process:
        assert process.stdout.readline() == b"ready\n"
        yield process
        process.kill()


def test_a_client_that_hangs_loses_its_subscription_and_its_producer_to_who_asks(
    cluster,
    holder,
    name,
):
    with connected(cluster.broker_url) as client:
        with pytest.raises(pulsar.ConsumerBusy):
            client.subscribe(name, "s")
        with pytest.raises(pulsar.ProducerFenced):
            client.create_producer(name, access_mode=pulsar.ProducerAccessMode.Exclusive)

        holder.send_signal(signal.SIGSTOP)
        began_s = time.monotonic()
        consumer = client.subscribe(name, "s")
        client.create_producer(name, "p").send(b"x")
        assert time.monotonic() - began_s < AT_ONCE_S
        assert consumer.receive(TIMEOUT_MS).data() == b"x"
