"""What tests of the shared cluster ask for by name."""

import uuid

import pytest

from spark_ledger.topic import blocking
from tests.integration.pulsar_clients import connected


@pytest.fixture
def name():
    """Of a topic that no other test has."""
    return f"t-{uuid.uuid4()}"


@pytest.fixture
def topics(cluster):
    return blocking.topics(cluster.service_url)


@pytest.fixture
def client(cluster):
    with connected(cluster.broker_url) as pulsar_client:
        yield pulsar_client
