"""Processes that hang, die and come back, and a network that loses: nothing acknowledged is lost,
nothing appears twice, and whose ledger was taken over learns it."""

import contextlib
import json
import random
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator

import pytest

from spark_ledger import LedgerClient
from spark_ledger.config import ClientConfig
from spark_ledger.errors import LedgerError
from spark_ledger.local import LocalCluster
from spark_ledger.local.processes import free_port
from tests.integration.proxy import Proxy

BOOKIES = 4  # one more than the ensemble, so that a failed one can be replaced
HANGS_S = 14
REPLICA_TIMEOUT_S = 1.5

ZOMBIE = """
import json, sys
from spark_ledger import LedgerClient
writer = LedgerClient(sys.argv[1]).create_ledger(3, 3, 2)
print(json.dumps({"ledger": writer.ledger_id}), flush=True)
number = 0
while True:
    try:
        writer.append(b"%d" % number)
    except Exception as error:
        print(json.dumps({"error": type(error).__name__, "says": str(error)}), flush=True)
        break
    print(json.dumps({"acked": number}), flush=True)
    number += 1
"""


pytestmark = pytest.mark.alone


class Rig:
    """A cluster whose bookies are reached through proxies, and a client of it."""

    def __init__(self) -> None:
        self.proxies = [Proxy(free_port()) for _ in range(BOOKIES)]
        self.cluster = LocalCluster(
            bookies=BOOKIES, bookie_settings=self._settings, autorecovery=False
        )
        config = ClientConfig(replica_timeout_s=REPLICA_TIMEOUT_S)
        self.client = LedgerClient(self.cluster.service_url, config)

    def _settings(self, number: int) -> dict[str, object]:
        proxy = self.proxies[number]
        return {
            "frames_listen": f"127.0.0.1:{proxy.upstream_port}",
            "frames_advertised": proxy.address,
        }

    def close(self) -> None:
        self.client.close()
        self.cluster.stop()
        for proxy in self.proxies:
            proxy.close()

    def member(self, ledger_id: int, slot: int) -> int:
        """The number of the bookie in a slot of the ledger's last fragment."""
        bookie_id = self.client.ledger_metadata(ledger_id).last_fragment.ensemble[slot]
        return [bookie.id for bookie in self.cluster.bookies].index(bookie_id)


class Load:
    """Appends numbers, one ledger after the other when one ends, until it is stopped."""

    def __init__(self, client: LedgerClient) -> None:
        self._client = client
        self._stop = threading.Event()
        self._news = threading.Condition()
        self.ledgers: list[int] = []
        self.acked: dict[int, int] = {}
        """By ledger, how many of its entries were acknowledged, from entry 0 on."""
        self.failures: list[LedgerError] = []
        self.longest_s = 0.0
        """The longest time between two acknowledgements."""
        self._thread = threading.Thread(target=self._write, name="load")
        self._thread.start()

    def wait_for(self, count: int, timeout_s: float = 60.0) -> None:
        """Return once so many more entries were acknowledged."""
        with self._news:
            target = self.total + count
            assert self._news.wait_for(lambda: self.total >= target, timeout_s), self.failures

    def go_on_for(self, seconds: float) -> None:
        """Return after so long, in which entries were acknowledged all the time."""
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline:
            self.wait_for(20)

    @property
    def total(self) -> int:
        return sum(self.acked.values())

    def end(self) -> None:
        self._stop.set()
        self._thread.join(90)
        assert not self._thread.is_alive()

    def _write(self) -> None:
        while not self._stop.is_set():
            try:
                with self._client.create_ledger(3, 3, 2) as writer:
                    self.ledgers.append(writer.ledger_id)
                    self._append(writer)
            except LedgerError as failure:
                self.failures.append(failure)

    def _append(self, writer) -> None:
        ledger_id = writer.ledger_id
        number, last = 0, time.monotonic()
        while not self._stop.is_set():
            ahead = [writer.append_async(_payload(ledger_id, number + i)) for i in range(20)]
            for i, future in enumerate(ahead):
                assert future.result() == number + i
            number += len(ahead)
            now = time.monotonic()
            self.longest_s, last = max(self.longest_s, now - last), now
            with self._news:
                self.acked[ledger_id] = number
                self._news.notify_all()


def _payload(ledger_id: int, number: int) -> bytes:
    return b"%d/%d" % (ledger_id, number) + b"." * (number % 2000)


@pytest.fixture(scope="module")
def rig() -> Iterator[Rig]:
    made = Rig()
    yield made
    made.close()


@pytest.fixture
def load(rig: Rig) -> Iterator[Load]:
    made = Load(rig.client)
    try:
        made.wait_for(100)
        yield made
    finally:
        made.end()
        for proxy in rig.proxies:
            proxy.heal()


def wait_until(condition: Callable[[], bool], timeout_s: float = 30.0) -> None:
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.05)


def check(rig: Rig, load: Load) -> None:
    """Every ledger holds what was acknowledged, each entry once, in order, and no other bytes."""
    load.end()
    for ledger_id in load.ledgers:
        reader = rig.client.open_ledger(ledger_id)
        last = reader.last_add_confirmed
        assert last + 1 >= load.acked.get(ledger_id, 0)
        found = [(entry, bytes(payload)) for entry, payload in reader.read(0, last)]
        assert found == [(number, _payload(ledger_id, number)) for number in range(last + 1)]


@pytest.mark.slow
def test_appends_go_on_while_a_bookie_hangs_and_nothing_acknowledged_is_lost(rig, load):
    victim = rig.cluster.bookies[rig.member(load.ledgers[-1], 0)]
    victim.signal(signal.SIGSTOP)
    try:
        load.go_on_for(HANGS_S)
    finally:
        victim.signal(signal.SIGCONT)
    load.wait_for(200)
    check(rig, load)
    assert load.failures == []
    assert load.longest_s < HANGS_S / 2  # it was replaced, not waited for


def test_every_bookie_killed_in_turn_under_load_loses_nothing(rig, load):
    for bookie in rig.cluster.bookies:
        bookie.kill()
        load.wait_for(100)
        bookie.start()
        load.wait_for(100)
    check(rig, load)


def test_a_metadata_store_restarted_under_load_is_not_noticed_by_appends(rig, load):
    before = len(load.ledgers)
    rig.cluster.zookeeper.kill()
    load.wait_for(100)
    rig.cluster.zookeeper.start()
    load.wait_for(100)
    check(rig, load)
    assert load.failures == []
    assert len(load.ledgers) == before


@pytest.mark.slow
def test_a_bad_network_delays_drops_and_cuts_but_loses_nothing(rig, load):
    chance = random.Random(20261120)
    faults = {
        "slow": lambda proxy: proxy.delay(0.15),
        "deaf": lambda proxy: proxy.drop(requests=True),
        "dumb": lambda proxy: proxy.drop(answers=True),
        "cut": lambda proxy: proxy.cut(),
    }
    for name in [*faults, *faults]:
        ledger_id = load.ledgers[-1]
        victim = rig.member(ledger_id, chance.randrange(3))
        faults[name](rig.proxies[victim])
        load.go_on_for(1.5 * REPLICA_TIMEOUT_S)
        rig.proxies[victim].heal()
        load.wait_for(60)
    check(rig, load)
    assert load.failures == []


def test_a_cluster_whose_frames_cannot_be_reached_says_so_and_goes_on_when_they_can(rig):
    with rig.client.create_ledger(3, 3, 2) as writer:
        writer.append(b"before")
        with rig.client.open_ledger(writer.ledger_id, recover=False) as reader:
            for proxy in rig.proxies:
                proxy.cut()
            with pytest.raises(LedgerError, match=r"no frames at 127\.0\.0\.1:"):
                list(reader.read(0, 0))
            for proxy in rig.proxies:
                proxy.heal()

            def is_read() -> bool:
                with contextlib.suppress(LedgerError):  # until it has tried to connect again
                    return [bytes(payload) for _, payload in reader.read(0, 0)] == [b"before"]
                return False

            wait_until(is_read)
        assert writer.append(b"after") == 1


def test_adds_whose_answers_are_lost_are_stored_once(rig, load):
    ledger_id = load.ledgers[-1]
    others = [rig.proxies[rig.member(ledger_id, slot)] for slot in (0, 1)]
    for proxy in others:  # without an ack quorum every add waits, and is sent again
        proxy.drop(answers=True)
    wait_until(lambda: len(rig.client.ledger_metadata(ledger_id).fragments) > 1)
    for proxy in others:
        proxy.heal()
    load.wait_for(100)
    check(rig, load)
    assert load.failures == []


def test_a_writer_that_wakes_up_after_its_ledger_was_recovered_is_fenced(rig):
    command = [sys.executable, "-c", ZOMBIE, rig.cluster.service_url]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as zombie:
        assert zombie.stdout is not None
        try:
            ledger_id = json.loads(zombie.stdout.readline())["ledger"]
            for _ in range(50):
                said = json.loads(zombie.stdout.readline())
            zombie.send_signal(signal.SIGSTOP)
            with rig.client.open_ledger(ledger_id) as reader:
                end = reader.last_add_confirmed
            zombie.send_signal(signal.SIGCONT)
            told = [json.loads(line) for line in zombie.stdout]
        finally:
            zombie.kill()
    acked = [said["acked"], *(line["acked"] for line in told if "acked" in line)]
    assert told[-1]["error"] == "LedgerFenced", told[-1]
    assert acked == list(range(acked[0], acked[-1] + 1))
    assert acked[-1] <= end
    found = [bytes(payload) for _, payload in rig.client.open_ledger(ledger_id).read(0, end)]
    assert found == [b"%d" % number for number in range(end + 1)]
