"""LedgerClient against real bookies and a real ZooKeeper."""

import subprocess
import sys
import threading
import time

import pytest

from spark_ledger import LedgerClient, errors
from spark_ledger.config import ClientConfig

WRITER = """
import sys
from spark_ledger import LedgerClient
client = LedgerClient(sys.argv[1])
writer = client.create_ledger(3, 3, 2)
print(writer.ledger_id, flush=True)
while True:
    print(writer.append(b"entry"), flush=True)
"""

FORKS = """
import os, sys, traceback
from spark_ledger import LedgerClient
from spark_ledger.process import ledger_store

def reads_back(client, payload):
    with client.create_ledger(3, 3, 2) as writer:
        writer.append(payload)
    with client.open_ledger(writer.ledger_id) as reader:
        assert [bytes(found) for _, found in reader.read(0, 0)] == [payload]

def is_refused(work):
    try:
        work()
    except RuntimeError as refused:
        assert "do not survive a fork; connect again" in str(refused)
    else:
        raise AssertionError("what the parent connected was used")

client, store = LedgerClient(sys.argv[1]), ledger_store(sys.argv[1])
writer = client.create_ledger(3, 3, 2)
writer.append(b"before")
child = os.fork()
if not child:
    try:
        is_refused(lambda: writer.append(b"by the child"))
        is_refused(lambda: client.open_ledger(writer.ledger_id))
        assert ledger_store(sys.argv[1]) is not store
        with LedgerClient(sys.argv[1]) as own:
            reads_back(own, b"by the child")
    except BaseException:
        traceback.print_exc()
        os._exit(1)
    os._exit(0)
assert writer.append(b"meanwhile") == 1
assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
assert writer.append(b"after") == 2
assert ledger_store(sys.argv[1]) is store
reads_back(client, b"by the parent")
"""


@pytest.fixture(scope="module")
def client(cluster):
    with LedgerClient(cluster.service_url) as shared:
        yield shared


def member(cluster, client, writer, slot=0):
    """The bookie process in a slot of the ledger's last fragment."""
    ensemble = client.ledger_metadata(writer.ledger_id).last_fragment.ensemble
    return next(bookie for bookie in cluster.bookies if bookie.id == ensemble[slot])


def test_what_is_appended_is_read_in_order_after_close(client):
    with client.create_ledger(3, 3, 2, metadata={"made": "by a test"}) as writer:
        assert writer.append(b"first", rows=2) == 0
        futures = [writer.append_async(b"%d" % n) for n in range(1, 500)]
        assert [future.result() for future in futures] == list(range(1, 500))
    with client.open_ledger(writer.ledger_id) as reader:
        assert reader.is_closed
        assert reader.last_add_confirmed == 499
        assert reader.metadata == {"made": "by a test"}
        found = [(entry, bytes(payload)) for entry, payload in reader.read(0, 499)]
    assert found == [(0, b"first"), *((n, b"%d" % n) for n in range(1, 500))]


def test_large_entries_of_several_buffers_come_back_whole(client):
    part = bytes(range(256)) * 4096
    with client.create_ledger(3, 3, 2) as writer:
        for _ in range(5):
            writer.append([part, memoryview(part)])
    reader = client.open_ledger(writer.ledger_id)
    for _, payload in reader.read(0, 4):
        assert payload == part + part


def test_a_ledger_is_read_while_it_is_written(client):
    writer = client.create_ledger(3, 3, 2)
    reader = client.open_ledger(writer.ledger_id, recover=False)
    seen = []
    stop = threading.Event()

    def follow():
        while not (stop.is_set() and len(seen) == 200):
            confirmed = reader.last_add_confirmed
            if confirmed >= len(seen):
                seen.extend(entry for entry, _ in reader.read(len(seen), confirmed))

    follower = threading.Thread(target=follow)
    follower.start()
    for _ in range(200):
        writer.append(b"x")
    stop.set()
    follower.join(timeout=30)
    assert seen == list(range(200))
    assert not reader.is_closed
    writer.close()
    assert reader.is_closed


def test_appends_from_several_threads_each_get_an_id_of_their_own(client):
    writer = client.create_ledger(3, 3, 2)
    ids = []

    def work():
        ids.extend(writer.append_async(b"x" * 100).result() for _ in range(50))

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(ids) == list(range(200))
    writer.close()


def test_a_ledger_whose_writer_was_killed_is_recovered_with_all_it_acknowledged(cluster, client):
    command = [sys.executable, "-c", WRITER, cluster.service_url]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        ledger_id = int(process.stdout.readline())
        acked = [int(process.stdout.readline()) for _ in range(100)]
        process.kill()
        acked += [int(line) for line in process.stdout.read().split("\n")[:-1]]
    with client.open_ledger(ledger_id) as reader:
        assert reader.last_add_confirmed >= acked[-1]
        assert [e for e, _ in reader.read(0, acked[-1])] == acked


def test_a_writer_that_was_taken_over_is_fenced_and_adopts_the_end(client):
    writer = client.create_ledger(3, 3, 2)
    writer.append(b"mine")
    assert client.open_ledger(writer.ledger_id).last_add_confirmed == 0
    with pytest.raises(errors.LedgerFenced):
        writer.append(b"too late")
    writer.close()


def test_the_password_is_needed_to_read_and_to_recover(client):
    with client.create_ledger(3, 3, 2, password=b"secret") as writer:
        writer.append(b"hidden")
    reader = client.open_ledger(writer.ledger_id, password=b"secret")
    assert [bytes(payload) for _, payload in reader.read(0, 0)] == [b"hidden"]
    with pytest.raises(errors.Unauthorized):
        list(client.open_ledger(writer.ledger_id, password=b"wrong").read(0, 0))


def test_a_deleted_ledger_is_gone_from_the_list(client):
    writer = client.create_ledger(3, 3, 2)
    with pytest.raises(errors.LedgerNotClosed, match="not CLOSED"):
        client.delete_ledger(writer.ledger_id)
    writer.close()
    assert writer.ledger_id in client.list_ledgers()
    client.delete_ledger(writer.ledger_id)
    assert writer.ledger_id not in client.list_ledgers()
    with pytest.raises(errors.NoSuchLedger):
        client.open_ledger(writer.ledger_id)


def test_an_entry_that_is_too_large_is_refused_before_anything_is_sent(client):
    with client.create_ledger(3, 3, 2) as writer:
        with pytest.raises(errors.MessageTooBig):
            writer.append(bytes(17 << 20))
        assert writer.append(b"small") == 0


def test_nobody_at_the_service_url_is_an_error_that_names_it():
    with pytest.raises(errors.Unavailable, match=r"127\.0\.0\.1:1"):
        LedgerClient("zk://127.0.0.1:1/ledger", ClientConfig(connect_timeout_s=1))


def test_a_service_url_with_another_root_is_no_cluster_and_nothing_is_made_there(cluster):
    with pytest.raises(errors.Unavailable, match=r"no cluster at .*/other"):
        LedgerClient(cluster.service_url.replace("/ledger", "/other"))
    with pytest.raises(errors.Unavailable, match=r"no cluster at .*/other"):
        LedgerClient(cluster.service_url.replace("/ledger", "/other"))


def test_killing_a_bookie_opens_a_fragment_and_loses_nothing(fresh_cluster):
    with fresh_cluster(bookies=4) as cluster, LedgerClient(cluster.service_url) as client:
        writer = client.create_ledger(3, 3, 2)
        futures = [writer.append_async(b"%d" % n) for n in range(1000)]
        assert [future.result() for future in futures] == list(range(1000))
        member(cluster, client, writer).kill()
        count = 1000  # something is confirmed: the change is a new fragment, not another first one
        while len(client.ledger_metadata(writer.ledger_id).fragments) == 1:
            assert writer.append(b"%d" % count) == count  # two copies are enough to go on
            count += 1
        writer.close()
        reader = client.open_ledger(writer.ledger_id)
        found = [bytes(payload) for _, payload in reader.read(0, count - 1)]
        assert found == [b"%d" % n for n in range(count)]
        assert len(client.ledger_metadata(writer.ledger_id).fragments) == 2


def test_two_of_three_bookies_down_stop_writes_naming_them_and_reads_go_on(fresh_cluster):
    config = ClientConfig(spare_grace_s=2)
    with fresh_cluster(bookies=3) as cluster, LedgerClient(cluster.service_url, config) as client:
        with client.create_ledger(3, 3, 2) as closed:
            for n in range(100):
                closed.append_async(b"%d" % n)
        writer = client.create_ledger(3, 3, 2)
        writer.append(b"before")
        down = [bookie for bookie in cluster.bookies[:2] if bookie.kill() is None]
        began = time.monotonic()
        with pytest.raises(errors.NotEnoughBookies) as caught:
            writer.append(b"after")
        assert time.monotonic() - began < 30
        assert all(bookie.id in str(caught.value) for bookie in down)
        reader = client.open_ledger(closed.ledger_id)
        found = [bytes(payload) for _, payload in reader.read(0, 99)]
        assert found == [b"%d" % n for n in range(100)]
        for bookie in down:
            bookie.start()
        assert client.open_ledger(writer.ledger_id).last_add_confirmed >= 0


def test_a_restarted_bookie_is_used_again_at_its_new_address(fresh_cluster):
    with fresh_cluster(bookies=3) as cluster, LedgerClient(cluster.service_url) as client:
        writer = client.create_ledger(3, 3, 2)
        for bookie in cluster.bookies:
            writer.append(b"x")
            bookie.kill()
            writer.append(b"y")
            bookie.start()
            writer.append(b"z")
        writer.close()
        reader = client.open_ledger(writer.ledger_id)
        assert b"".join(bytes(payload) for _, payload in reader.read(0, 8)) == b"xyz" * 3


def test_a_forked_process_connects_by_itself_and_is_refused_what_its_parent_connected(cluster):
    command = [sys.executable, "-c", FORKS, cluster.service_url]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=120)
    assert done.returncode == 0, done.stderr
