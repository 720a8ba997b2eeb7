"""Our broker beside Pulsar standalone in the same run, by Pulsar's own client and plain sockets.

    python benchmarks/broker.py                        everything; beside Pulsar if it is installed
    python benchmarks/broker.py --with pulsar          fetches Pulsar (Maven, Java 17) if needed
    python benchmarks/broker.py --only produce,latency parts: idle, produce, shared, ...
    python benchmarks/broker.py --by socket --bytes 200        some cases of produce and shared
    python benchmarks/broker.py --only shared --consumers 4    ... by four consumers
    python benchmarks/broker.py --page-cache           nobody syncs before a receipt

Pulsar is looked for in $PEERS_HOME (default .peers). One server after the other, each empty, on
ports of its own: Pulsar with one copy, ours with one, ours with three of which two are synced. The
first round of each case is a warm-up; medians of the others count. With three copies the disk's
rate is printed: the goal is 1x where three times the bytes take less than 70 % of it, else 0.6x.
"""

import argparse
import multiprocessing
import os
import signal
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from functools import partial
from multiprocessing.pool import Pool
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks import (
    broker_client,
    broker_java,
    broker_servers,
    broker_shared,
    broker_socket,
    contenders,
    repair,
    workload,
)
from benchmarks.broker_servers import OURS, OURS_3, PULSAR, Server
from benchmarks.figures import Figure, show
from benchmarks.processes import memory_mib

CLIENT, JAVA, SOCKET = "client", "java", "socket"
PARTS = ("idle", "produce", "shared", "latency", "catchup", "spark")
SIZES = {200: "200 B", 1024: "1 KiB"}
BATCH = 1_000
"""Messages of a socket's batch; the client's own batches have as many at most."""
BATCH_BYTES_MAX = 128 << 10  # the client's default
COUNTS = {  # of messages, by who sends, batched and size
    (CLIENT, True, 200): 200_000,
    (CLIENT, True, 1024): 100_000,
    (CLIENT, False, 200): 40_000,
    (CLIENT, False, 1024): 40_000,
    (JAVA, True, 200): 1_000_000,
    (JAVA, True, 1024): 300_000,
    (JAVA, False, 200): 100_000,
    (JAVA, False, 1024): 100_000,
    (SOCKET, True, 200): 1_000_000,
    (SOCKET, True, 1024): 300_000,
    (SOCKET, False, 200): 80_000,
    (SOCKET, False, 1024): 80_000,
}
WINDOW_BATCHES, WINDOW_MESSAGES = 64, 2_000
KEYS = 200
LATENCY_RATE, LATENCY_S = 200, 15
BEHIND_BYTES, PACED_RATE, PACED_S = 1 << 30, 20_000, 10
IDLE_CONNECTIONS, IDLE_TOPICS, IDLE_SETTLE_S = 1_000, 100, 5
DISK_BYTES = 600 << 20
SPARK_ROWS, SPARK_VALUE_BYTES, SPARK_PARTITIONS = 6_000_000, 100, 2
Found = dict[str, float]
"""What a server reached, by figure."""


@dataclass(frozen=True)
class Case:
    by: str
    batched: bool
    size: int

    @property
    def count(self) -> int:
        return COUNTS[self.by, self.batched, self.size]

    @property
    def batch(self) -> int:
        """Messages of a socket's batch; 0: lone ones."""
        return min(BATCH, BATCH_BYTES_MAX // self.size) if self.batched else 0

    @property
    def shared_count(self) -> int:
        return 100_000 if self.batched else 20_000

    def __str__(self) -> str:
        return f"{SIZES[self.size]}, {'batched' if self.batched else 'unbatched'}, {self.by}"


CASES = [
    Case(by, batched, size)
    for by in (CLIENT, JAVA, SOCKET)
    for batched in (True, False)
    for size in SIZES
]


class Measure:
    """One server's figures."""

    def __init__(self, server: Server, wanted: argparse.Namespace) -> None:
        self.server = server
        self.found: Found = {}
        self._wanted = wanted
        self._topics = 0

    def topic(self, stem: str, partitions: int = 0) -> str:
        self._topics += 1
        name = f"persistent://public/default/{stem}-{self._topics}-{os.getpid()}"
        self.server.create(name, partitions)
        return name

    def tell(self, what: str, value: float) -> None:
        self.found[what] = value
        print(f"  {self.server.name}: {what}: {value:,.3f}", flush=True)

    # -- produce and consume -------------------------------------------------------------------

    def produce(self) -> None:
        some = self._wanted
        cases = [one for one in CASES if one.by in some.by and str(one.size) in some.bytes]
        rounds: dict[Case, list[tuple[float, ...]]] = {case: [] for case in cases}
        with self._clients() as clients:
            for _ in range(1 + self._wanted.runs):
                for case in cases:
                    rounds[case].append(self._round(case, clients))
        for case, each in rounds.items():
            produced, produce_cpu, consumed, consume_cpu, all_cpu = (
                statistics.median(one) for one in zip(*each[1:], strict=True)
            )
            self.tell(f"produce, {case}", produced)
            self.tell(f"consume, {case}", consumed)
            self.tell(f"CPU of the broker, produce, {case}", produce_cpu)
            self.tell(f"CPU of all servers, produce, {case}", all_cpu)
            self.tell(f"CPU of the broker, consume, {case}", consume_cpu)

    @contextmanager
    def _clients(self) -> Iterator["Clients"]:
        """Pulsar's clients in processes of their own, as young for each server."""
        with ExitStack() as stack:
            pool = stack.enter_context(multiprocessing.get_context("spawn").Pool(1))
            java = None
            if JAVA in self._wanted.by:
                java = stack.enter_context(broker_java.connected(self.server.url))
            yield Clients(pool, java)

    def _round(self, case: Case, clients: "Clients") -> tuple[float, ...]:
        """Messages/s and CPU-s a million messages: produced, then consumed."""
        topic, server = self.topic("rate"), self.server
        broker_s, all_s = server.cpu_s()
        if case.by == CLIENT:
            message = os.urandom(case.size)
            count = case.count
            sent = (server.url, topic, message, count, case.batched)
            took = clients.python.apply(broker_client.produce_by_itself, sent)
        elif case.by == JAVA:
            count = case.count
            took = clients.java.produce(topic, count, case.size, case.batched)
        else:
            batch = broker_socket.batch_of(case.batch, case.size)
            batches = case.count // max(1, case.batch)
            count = batches * max(1, case.batch)
            window = WINDOW_BATCHES if case.batched else WINDOW_MESSAGES
            took = broker_socket.produce(server.url, topic, batch, batches, case.batch, window)
        between_s, all_between_s = server.cpu_s()
        if case.by == CLIENT:
            read = (server.url, topic, count)
            read_s = clients.python.apply(broker_client.consume_by_itself, read)
        elif case.by == JAVA:
            read_s = clients.java.consume(topic, count, "Exclusive", 1)
        else:
            read_s = broker_socket.read(server.url, topic, batches, case.batch)
        after_s, _ = server.cpu_s()
        million = count / 1e6
        return (
            count / took,
            (between_s - broker_s) / million,
            count / read_s,
            (after_s - between_s) / million,
            (all_between_s - all_s) / million,
        )

    # -- several consumers of one subscription --------------------------------------------------

    def shared(self) -> None:
        """The topic is read by one new subscription after the other."""
        options = self._wanted
        cases = [
            case for case in CASES if case.by in options.by and str(case.size) in options.bytes
        ]
        with self._clients() as clients:
            for case in cases:
                topic, batches = self.topic("shared"), case.shared_count // max(1, case.batch)
                self._fill(topic, case, batches)
                count = batches * max(1, case.batch)
                for kind in broker_shared.TYPES:
                    for number in map(int, options.consumers):
                        self._shared_rounds(topic, case, count, kind, number, clients)

    def _fill(self, topic: str, case: Case, count: int) -> None:
        """Entries of `KEYS` keys in turn; all messages of a batch have one key, as the batches of a
        producer for Key_Shared."""
        keys = [f"key-{number}" for number in range(KEYS)]
        batches = [broker_socket.batch_of(case.batch, case.size, key=key) for key in keys]
        window = WINDOW_BATCHES if case.batched else WINDOW_MESSAGES
        broker_socket.produce_in_turn(self.server.url, topic, batches, count, case.batch, window)

    def _shared_rounds(
        self, topic: str, case: Case, count: int, kind: str, number: int, clients: "Clients"
    ) -> None:
        rates, costs = [], []
        for _ in range(1 + self._wanted.runs):
            before_s, _ = self.server.cpu_s()
            asked = (topic, count, kind, number)
            if case.by == CLIENT:
                took = clients.python.apply(broker_shared.by_client, (self.server.url, *asked))
            elif case.by == JAVA:
                took = clients.java.consume(*asked)
            else:
                batches = count // max(1, case.batch)
                took = broker_shared.by_socket(
                    self.server.url, topic, batches, case.batch, kind, number
                )
            rates.append(count / took)
            costs.append((self.server.cpu_s()[0] - before_s) / count * 1e6)
        label = f"{kind}, {number} consumers, {case}"
        self.tell(f"consume, {label}", statistics.median(rates[1:]))
        self.tell(f"CPU of the broker, {label}", statistics.median(costs[1:]))

    # -- the other parts -----------------------------------------------------------------------

    def latency(self) -> None:
        with broker_client.connected(self.server.url) as client:
            each = [
                broker_client.latency(client, self.topic("latency"), LATENCY_RATE, LATENCY_S)
                for _ in range(1 + self._wanted.runs)
            ][1:]
        self.tell("produce -> consume, p50 ms", statistics.median(one.p50_ms for one in each))
        self.tell("produce -> consume, p99 ms", statistics.median(one.p99_ms for one in each))

    def catchup(self) -> None:
        """1 GiB is written first; then a producer is paced alone, and beside its reader."""
        url, behind, busy = self.server.url, self.topic("behind"), self.topic("busy")
        messages = BATCH_BYTES_MAX // 1024
        batch = broker_socket.batch_of(messages, 1024)
        batches = BEHIND_BYTES // len(batch)
        broker_socket.produce(url, behind, batch, batches, messages, WINDOW_BATCHES)
        small = broker_socket.batch_of(20, 1024)
        offered = (url, busy, small, 20, PACED_RATE)
        broker_socket.paced(*offered, 3)
        alone = broker_socket.paced(*offered, PACED_S)
        context = multiprocessing.get_context("spawn")
        with context.Pool(1) as pool:
            pool.apply(os.getpid)
            reading = pool.apply_async(_read_again, (url, behind, batches, messages, PACED_S))
            beside = broker_socket.paced(*offered, PACED_S)
            read_bytes_s = reading.get(600)
        self.tell("kept beside a reader far behind", beside.rate / alone.rate)
        self.tell("paced producer, msg/s", alone.rate)
        self.tell("its receipts, p99 ms", alone.p99_ms)
        self.tell("its receipts beside the reader, p99 ms", beside.p99_ms)
        self.tell("the reader far behind, MB/s", read_bytes_s / 1e6)

    def idle(self) -> None:
        """Each of the connections has a producer and a reader."""
        before = sum(map(memory_mib, self.server.pids))
        topics = [self.topic("idle") for _ in range(IDLE_TOPICS)]
        links = []
        for number in range(IDLE_CONNECTIONS):
            link = broker_socket.Link(self.server.url)
            link.produce_on(topics[number % IDLE_TOPICS])
            link.read_on(topics[number % IDLE_TOPICS])
            link.flow(1000)
            links.append(link)
        time.sleep(IDLE_SETTLE_S)
        self.tell("memory before, MiB", before)
        self.tell("memory with 1,000 idle, MiB", sum(map(memory_mib, self.server.pids)))
        for link in links:
            link.close()

    def spark(self) -> None:
        """Batches with keys, read by Spark out of our ledgers, from two partitions."""
        if not self.server.service_url:
            return
        topic = self.topic("spark", SPARK_PARTITIONS)
        batch = broker_socket.batch_of(BATCH, SPARK_VALUE_BYTES, keys=True)
        batches = SPARK_ROWS // BATCH // SPARK_PARTITIONS
        for number in range(SPARK_PARTITIONS):
            one = f"{topic}-partition-{number}"
            broker_socket.produce(self.server.url, one, batch, batches, BATCH, WINDOW_BATCHES)
        spark = workload.session(contenders.spark_conf([]))
        source = contenders.ledger(topic, self.server.service_url)
        source = replace(source, schema=contenders.KEY_AND_VALUE)
        for columns, schema in ((("key", "value"), None), (("value",), "value BINARY")):
            read = partial(workload.read_batch, spark, source, columns=columns, schema=schema)
            each = [workload.seconds(read) for _ in range(1 + self._wanted.runs)][1:]
            rate = SPARK_ROWS / statistics.median(each)
            self.tell(f"Spark reads {', '.join(columns)}, rows/s", rate)


@dataclass(frozen=True)
class Clients:
    """Pulsar's clients at work for one server."""

    python: Pool
    java: Any


def _read_again(url: str, topic: str, batches: int, messages: int, seconds: float) -> float:
    """Reads the whole topic again and again for so long; bytes/s."""
    began, read = time.perf_counter(), 0
    while time.perf_counter() < began + seconds:
        broker_socket.read(url, topic, batches, messages)
        read += BEHIND_BYTES
    return read / (time.perf_counter() - began)


# -- figures beside their goals -------------------------------------------------------------------

BESIDE_PULSAR: Sequence[tuple[str, float | None, bool, str]] = (
    ("produce, ", 1.0, True, "msg/s"),
    ("consume, ", 1.0, True, "msg/s"),
    ("CPU of the broker", None, False, "s a million"),
    ("CPU of all servers", None, False, "s a million"),
    ("produce -> consume, p50", 0.5, False, "ms"),
    ("produce -> consume, p99", 1.0, False, "ms"),
)
ALONE: Sequence[tuple[str, float | None, bool, str]] = (
    ("kept beside", 0.8, True, ""),
    ("memory with", 200, False, "MiB"),
    ("Spark reads key, value", 1e6, True, "rows/s"),
)


def figures(found: Mapping[str, Found]) -> list[Figure]:
    """Ours with one copy beside Pulsar's, then ours with three beside it."""
    told = []
    pulsar = found.get(PULSAR, {})
    for name in (OURS, OURS_3):
        for what, value in found.get(name, {}).items():
            told.append(_figure(f"{name}: {what}", what, value, pulsar.get(what)))
    return told


def _figure(label: str, what: str, value: float, peer: float | None) -> Figure:
    for begin, goal, at_least, unit in ALONE:
        if what.startswith(begin):
            return Figure(label, value, unit, goal, at_least)
    for begin, goal, at_least, unit in BESIDE_PULSAR:
        if what.startswith(begin):
            goal = goal if peer is not None else None
            return Figure(label, value, unit, goal, at_least, peer, PULSAR)
    return Figure(label, value, "", None, False, peer, PULSAR)


def main() -> int:
    signal.signal(signal.SIGTERM, lambda number, _: sys.exit(128 + number))
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    default = "pulsar" if broker_servers.has_pulsar() else "none"
    parser.add_argument("--with", dest="peer", default=default, choices=["pulsar", "none"])
    parser.add_argument("--only", type=_some_of(PARTS), default=list(PARTS))
    parser.add_argument(
        "--by", type=_some_of((CLIENT, JAVA, SOCKET)), default=[CLIENT, JAVA, SOCKET]
    )
    parser.add_argument("--bytes", type=_some_of([*map(str, SIZES)]), default=[*map(str, SIZES)])
    numbers = ("1", "4", "20")
    parser.add_argument("--consumers", type=_some_of(numbers), default=[*numbers])
    parser.add_argument("--copies", type=_some_of(("1", "3")), default=["1", "3"])
    parser.add_argument("--page-cache", action="store_true")
    parser.add_argument("--runs", type=int, default=3)
    wanted = parser.parse_args()
    names = [OURS] * ("1" in wanted.copies) + [OURS_3] * ("3" in wanted.copies)
    if wanted.peer == "pulsar":
        broker_servers.install_pulsar()
        names.insert(0, PULSAR)
    found: dict[str, Found] = {}
    for name in names:
        with broker_servers.running(name, synced=not wanted.page_cache) as server:
            measure = Measure(server, wanted)
            for part in wanted.only:
                getattr(measure, part)()
            found[name] = measure.found
    if OURS_3 in names and "produce" in wanted.only and not wanted.page_cache:
        disk_mb_s = repair.copying(DISK_BYTES)
        print(f"three processes copy files, each MiB synced: {disk_mb_s:,.0f} MB/s")
    synced = "in the page cache" if wanted.page_cache else "synced before a receipt"
    show(
        figures(found),
        f"all copies {synced}, {os.cpu_count()} cores, load {os.getloadavg()[0]:.1f}",
    )
    print("command: python benchmarks/broker.py", *sys.argv[1:])
    return 0


def _some_of(known: Sequence[str]) -> Callable[[str], list[str]]:
    def parsed(text: str) -> list[str]:
        some = text.split(",")
        for one in some:
            if one not in known:
                raise argparse.ArgumentTypeError(f"{one} is none of {', '.join(known)}")
        return some

    return parsed


if __name__ == "__main__":
    raise SystemExit(main())
