"""Clients that open connections and leave them idle cost others their connections, not the bookies
their storage, nor the broker its work."""

import errno
import selectors
import socket
import time
import uuid

import pytest

from spark_ledger import net
from spark_ledger.client.admin import Admin
from spark_ledger.local import LocalCluster, processes
from tests.integration.pulsar_clients import connected
from tests.kit.processes import eventually

DESCRIPTORS, IDLE = 512, 1200


class Idle:
    """Connections that nothing is sent on, as many as the server and its kernel take."""

    def __init__(self, addresses):
        self._sockets = []
        selector = selectors.DefaultSelector()
        for address in addresses:
            for _ in range(IDLE):
                sock = socket.socket()
                sock.setblocking(False)
                assert sock.connect_ex(net.split(address)) in (0, errno.EINPROGRESS)
                self._sockets.append(sock)
                selector.register(sock, selectors.EVENT_WRITE)
        selector.close()

    def close(self):
        for sock in self._sockets:
            sock.close()


@pytest.fixture
def few(monkeypatch):
    """Processes have DESCRIPTORS each."""
    child = processes.Child

    def limited(name, command, log):
        return child(name, ["sh", "-c", f'ulimit -n {DESCRIPTORS}; exec "$@"', "sh", *command], log)

    monkeypatch.setattr(processes, "Child", limited)
    with LocalCluster(bookies=3, autorecovery=False, broker_port=processes.free_port()) as cluster:
        yield cluster


def test_thousands_of_idle_connections_end_no_bookie_and_no_broker(few):
    topic = f"t-{uuid.uuid4()}"
    addresses = [one.frames for one in few.bookies] + [one.address for one in few.bookies]
    with connected(few.broker_url) as client:
        producer = client.create_producer(topic)
        producer.send(b"before")
        idle = Idle([*addresses, few.broker_url.removeprefix("pulsar://")])
        try:
            until = time.monotonic() + 10
            count = 0
            while time.monotonic() < until:
                producer.send(b"during")
                count += 1
            assert count > 50
            Admin(few.service_url).create_topic(f"{topic}-other")
        finally:
            idle.close()
        assert eventually(lambda: producer.send(b"after") is not None)
    assert few.broker.running
    assert all(bookie.running for bookie in few.bookies)
    logs = [few.broker.log, *(bookie.log for bookie in few.bookies)]
    for log in logs:
        text = log.read_text(errors="replace")
        assert "the storage failed" not in text
        assert text.count("\n") < 200, text[-2000:]
    assert any("No more connections are taken" in log.read_text() for log in logs)
