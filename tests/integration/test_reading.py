"""Reading with real processes: a bookie that hangs, a ledger that is being written."""

import contextlib
import signal
import subprocess
import sys
import threading
import time

import pytest

from spark_ledger import LedgerClient, errors
from spark_ledger.config import ClientConfig

SOON_S = ClientConfig().read_timeout_s / 2
"""What takes longer has waited for a bookie that hangs."""
WRITER = """
import sys, time
from spark_ledger import LedgerClient
with LedgerClient(sys.argv[1]) as client:
    with client.create_ledger(3, 3, 2) as writer:
        print(writer.ledger_id, flush=True)
        for burst in range(30):
            futures = [writer.append_async(b"%d" % (burst * 20 + n)) for n in range(20)]
            [future.result() for future in futures]
            time.sleep(0.05 if burst % 3 else 0.0)
            if burst == 20:
                sys.stdin.readline()  # not before somebody follows
        print("closing", flush=True)
"""


@pytest.fixture
def client(cluster):
    with LedgerClient(cluster.service_url) as client:
        yield client


@contextlib.contextmanager
def hung(bookie):
    """The bookie does not run, as under SIGSTOP; its connections stay open."""
    bookie.signal(signal.SIGSTOP)
    try:
        yield
    finally:
        bookie.signal(signal.SIGCONT)


def written(client, count, size):
    with client.create_ledger(3, 3, 2) as writer:
        for future in [writer.append_async(b"%d" % n * size) for n in range(count)]:
            future.result()
    return writer.ledger_id


def test_a_bookie_that_hangs_does_not_cost_a_read_its_time_out(cluster):
    config = ClientConfig(read_timeout_s=20.0, read_request_bytes=40_000, read_ahead_bytes=200_000)
    with LedgerClient(cluster.service_url, config) as client:
        ledger_id = written(client, 200, 1000)
        reader = client.open_ledger(ledger_id)
        whole = [(n, b"%d" % n * 1000) for n in range(200)]
        assert [(e, bytes(p)) for e, p in reader.read(0, 199)] == whole  # connected to all
        for bookie in cluster.bookies:
            with hung(bookie):
                began = time.monotonic()
                assert [(e, bytes(p)) for e, p in reader.read(0, 199)] == whole
                assert time.monotonic() - began < config.read_timeout_s / 2


def test_a_ledger_is_followed_while_another_process_writes_it_to_its_close(cluster, client):
    command = [sys.executable, "-c", WRITER, cluster.service_url]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    with subprocess.Popen(command, **pipes) as process:
        ledger_id = int(process.stdout.readline())
        reader = client.open_ledger(ledger_id, recover=False)
        found, open_at_first = [], not reader.is_closed
        process.stdin.write("go on\n")
        process.stdin.flush()
        for entry_id, payload in reader.tail():
            found.append((entry_id, bytes(payload)))
        assert process.wait(60) == 0
    assert open_at_first
    assert found == [(n, b"%d" % n) for n in range(600)]
    assert reader.is_closed
    assert reader.read_when_confirmed(599, 60.0) == []


def test_a_tail_goes_on_while_a_bookie_hangs_and_gets_what_recovery_found(cluster, client):
    with LedgerClient(cluster.service_url) as other:
        writer = other.create_ledger(3, 3, 2)
        reader = client.open_ledger(writer.ledger_id, recover=False)
        found = []
        following = threading.Thread(target=lambda: found.extend(e for e, _ in reader.tail()))
        following.start()
        for n in range(20):
            writer.append(b"%d" % n)
        with hung(cluster.bookies[1]):
            for n in range(20, 40):
                writer.append(b"%d" % n)
            wait_until(lambda: len(found) == 40)  # the explicit LAC brings the last
            assert found == list(range(40))
        assert other.open_ledger(writer.ledger_id).last_add_confirmed == 39  # recovered
        following.join(90)
        assert not following.is_alive()
    assert found == list(range(40))


def test_entries_are_handed_over_as_soon_as_they_are_confirmed_and_not_before(client):
    writer = client.create_ledger(3, 3, 2)
    reader = client.open_ledger(writer.ledger_id, recover=False)
    assert reader.read_when_confirmed(-1, 0.2) == []
    writer.append(b"first")
    assert [(e, bytes(p)) for e, p in reader.read_when_confirmed(-1, 20.0)] == [(0, b"first")]
    appending = threading.Timer(0.3, lambda: writer.append(b"second"))
    appending.start()
    assert [(e, bytes(p)) for e, p in reader.read_when_confirmed(0, 20.0)] == [(1, b"second")]
    appending.join()
    writer.close()
    assert reader.read_when_confirmed(1, 20.0) == []
    assert reader.is_closed


def test_a_wrong_password_follows_nothing(client):
    writer = client.create_ledger(3, 3, 2, password=b"secret")
    writer.append(b"hidden")
    assert len(reader_of(client, writer, b"secret").read_when_confirmed(-1, 20.0)) == 1
    with pytest.raises(errors.Unauthorized):
        reader_of(client, writer, b"wrong").read_when_confirmed(-1, 20.0)
    writer.close()


def reader_of(client, writer, password):
    return client.open_ledger(writer.ledger_id, recover=False, password=password)


# -- a client that is closed --------------------------------------------------------------------


def wait_until(condition, timeout_s=90.0):
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.02)


def test_closing_a_client_ends_what_other_threads_wait_for_and_says_so(cluster):
    client = LedgerClient(cluster.service_url)
    writer = client.create_ledger(3, 3, 2)
    writer.append(b"first")
    other = client.create_ledger(3, 3, 2)  # to open the same would fence the append
    reader = client.open_ledger(writer.ledger_id, recover=False)
    met = []

    def met_by(work):
        try:
            work()
        except errors.LedgerError as error:
            met.append(type(error))

    works = (
        lambda: list(reader.tail(5)),
        lambda: reader.read_when_confirmed(5, 60),
        lambda: writer.append(b"second"),
        lambda: client.open_ledger(other.ledger_id),
    )
    with hung(cluster.bookies[0]), hung(cluster.bookies[1]):
        threads = [threading.Thread(target=met_by, args=[work]) for work in works]
        for thread in threads:
            thread.start()
        wait_until(lambda: len(client._calls._under_way) == 3)  # all but the append
        wait_until(lambda: writer._writer.last_add_pushed == 1)
        began = time.monotonic()
        client.close()
        for thread in threads:
            thread.join(30)
        assert time.monotonic() - began < 20  # of the 30 or 60 that they would wait
    assert met == [errors.ClientClosed] * len(works)
    for call in (
        client.create_ledger,
        lambda: client.open_ledger(writer.ledger_id),
        lambda: client.delete_ledger(writer.ledger_id),
        lambda: next(client.list_ledgers()),
        lambda: next(reader.read(0, 0)),
        lambda: writer.append(b"third"),
    ):
        with pytest.raises(errors.ClientClosed):
            call()


def test_what_is_confirmed_is_waited_for_no_longer_than_was_asked(cluster, client):
    ledger_id = written(client, 50, 10)
    reader = client.open_ledger(ledger_id)
    assert len(list(reader.read(0, 49))) == 50  # connected to all
    with contextlib.ExitStack() as all_hung:
        for bookie in cluster.bookies:
            all_hung.enter_context(hung(bookie))
        began = time.monotonic()
        assert reader.read_when_confirmed(-1, 0.2) == []
        assert time.monotonic() - began < SOON_S
    for healthy in cluster.bookies:
        with contextlib.ExitStack() as two_hung:
            for bookie in cluster.bookies:
                if bookie is not healthy:
                    two_hung.enter_context(hung(bookie))
            began = time.monotonic()
            assert len(reader.read_when_confirmed(9, 20.0)) == 40
            assert time.monotonic() - began < SOON_S
