"""What subscriptions cost a broker and the stores: idle, at a take-over, at a move, in use.

    python benchmarks/subscription_costs.py idle            10,000 without a consumer, one topic
    python benchmarks/subscription_costs.py idle --topics 100
    python benchmarks/subscription_costs.py partitions      1,000 partitions, the broker is killed
    python benchmarks/subscription_costs.py partitions --acks 20    with as many acknowledgements
    python benchmarks/subscription_costs.py holes           1,000 subscriptions with 1 M holes
    python benchmarks/subscription_costs.py move            acknowledgements beside a planned move
    python benchmarks/subscription_costs.py rates           requests a minute for acknowledgements
    python benchmarks/subscription_costs.py dead            one, then two, of three bookies are dead

Three bookies, ZooKeeper and the brokers are processes of this machine; the clients are plain
sockets in this process. Requests are counted by ZooKeeper itself (srvr: what it received, and its
transactions), and by TCP's segments with data that reached the bookies.
"""

import argparse
import asyncio
import contextlib
import re
import socket
import statistics
import subprocess
import tempfile
import time
import urllib.request
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks.broker_socket import batch_of
from benchmarks.processes import below, cpu_s, memory_mib
from benchmarks.socket_client import SocketClient
from spark_ledger.broker.wire.commands import MessageId
from spark_ledger.local import LocalCluster
from spark_ledger.local.processes import LocalBroker
from spark_ledger.topic import blocking
from spark_ledger.topic.acks.nodes import AckNodes

AT_ONCE = 64
SERVED_WITHIN_S = 180.0


class Requests(NamedTuple):
    """Since the start of the processes."""

    received: int  # by ZooKeeper, pings included
    writes: int  # ZooKeeper's transactions
    segments: int  # of TCP with data, that the bookies received

    def since(self, before: "Requests") -> str:
        received, writes, segments = (now - then for now, then in zip(self, before, strict=True))
        return f"{received} requests to ZooKeeper, {writes} writes, {segments} segments to bookies"


class World:
    """A cluster and its brokers."""

    def __init__(self, cluster: LocalCluster, folder: Path) -> None:
        self.cluster = cluster
        self.folder = folder
        self.brokers: list[LocalBroker] = []
        self.topics = blocking.topics(cluster.service_url)

    def broker(self) -> LocalBroker:
        made = LocalBroker(self.folder / f"{len(self.brokers)}.log", self.cluster.service_url)
        made.start()
        self.brokers.append(made)
        return made

    def topic(self, partitions: int) -> str:
        name = f"public/default/t-{uuid.uuid4()}"
        self.topics.run(self.topics.client.topics.create(name, partitions))
        return f"persistent://{name}"

    def nodes(self) -> int:
        """How many ZooKeeper has."""
        found = re.search(r"Node count: (\d+)", self._zookeeper_says())
        assert found
        return int(found[1])

    def _zookeeper_says(self) -> str:
        host, _, port = self.cluster.zookeeper.address.rpartition(":")
        with socket.create_connection((host, int(port))) as link:
            link.sendall(b"srvr")
            return link.makefile("rb").read().decode()

    def requests(self) -> Requests:
        text = self._zookeeper_says()
        received = re.search(r"Received: (\d+)", text)
        zxid = re.search(r"Zxid: 0x([0-9a-f]+)", text)
        assert received and zxid
        segments = 0
        for bookie in self.cluster.bookies:
            ports = {at.rpartition(":")[2] for at in (bookie.frames, bookie.address)}
            for number in ports:
                asked = ["ss", "-tinH", "sport", "=", f":{number}"]
                shown = subprocess.run(asked, capture_output=True, text=True, check=True).stdout
                segments += sum(map(int, re.findall(r"data_segs_in:(\d+)", shown)))
        return Requests(int(received[1]), int(zxid[1], 16) & 0xFFFFFFFF, segments)


@contextlib.contextmanager
def world() -> Iterator[World]:
    with (
        LocalCluster(bookies=3, autorecovery=False) as cluster,
        tempfile.TemporaryDirectory() as folder,
    ):
        made = World(cluster, Path(folder))
        try:
            yield made
        finally:
            for broker in made.brokers:
                broker.stop()


class Consumed:
    """The ids of the messages that a consumer got."""

    def __init__(self, wanted: int) -> None:
        self.ids: dict[int, MessageId] = {}
        self.wanted = wanted
        self.done = asyncio.get_running_loop().create_future()

    def __call__(self, part: object, _batch: bytes) -> None:
        id_ = part.message_id  # type: ignore[attr-defined]
        self.ids[id_.entryId] = id_
        if len(self.ids) >= self.wanted and not self.done.done():
            self.done.set_result(None)


async def call_many(calls: list, at_once: int = AT_ONCE) -> None:  # type: ignore[type-arg]
    """Await calls (functions without arguments), so many at once."""
    left = iter(calls)

    async def worker() -> None:
        for call in left:
            await call()

    await asyncio.gather(*(worker() for _ in range(at_once)))


def partition_names(topic: str, partitions: int) -> list[str]:
    return [f"{topic}-partition-{number}" for number in range(partitions)]


async def fill(url: str, names: list[str], messages: int) -> None:
    """Messages in every partition; the broker has all of them then."""
    client = await SocketClient.connected(url)
    batches = [batch_of(0, 100)]

    async def one(number: int, name: str) -> None:
        await client.look_up(name)
        await client.produce(name, number, messages, batches)

    await call_many([lambda n=n, name=name: one(n, name) for n, name in enumerate(names)])
    await client.close()


# -- idle subscriptions ------------------------------------------------------------------------


def idle(count: int, topics: int, seconds: float) -> None:
    with world() as made:
        broker = made.broker()
        names = [made.topic(1) + "-partition-0" for _ in range(topics)]
        asyncio.run(fill(broker.url, names, 4))
        time.sleep(10)
        assert broker.pid is not None
        before_mib = memory_mib(broker.pid)
        without, without_cpu = counted(made, broker, seconds)
        began_s = time.monotonic()
        asyncio.run(make_idle(broker.url, names, count))
        took_s = time.monotonic() - began_s
        time.sleep(150)  # the ledgers of acknowledgements are left after two minutes
        with_mib = memory_mib(broker.pid)
        with_them, with_cpu = counted(made, broker, seconds)
        print(f"{count} idle subscriptions, {topics} topics, made in {took_s:.0f} s")
        print(f"  broker {before_mib:.0f} MiB before, {with_mib:.0f} MiB with them")
        print(f"  {seconds:.0f} s without: {without}, {without_cpu:.2f} CPU-s of the broker")
        print(f"  {seconds:.0f} s with:    {with_them}, {with_cpu:.2f} CPU-s of the broker")
        broker.stop()
        broker.start()
        asyncio.run(fill(broker.url, names, 1))
        time.sleep(10)
        print(f"  a broker after them: {memory_mib(broker.pid):.0f} MiB")
        again, again_cpu = counted(made, broker, seconds)
        print(f"  {seconds:.0f} s there:   {again}, {again_cpu:.2f} CPU-s of the broker")


def counted(made: World, broker: LocalBroker, seconds: float) -> tuple[str, float]:
    assert broker.pid is not None
    began, cpu = made.requests(), cpu_s(broker.pid)
    time.sleep(seconds)
    return made.requests().since(began), cpu_s(broker.pid) - cpu


async def make_idle(url: str, names: list[str], count: int) -> None:
    """Every second one has acknowledged a message beyond a gap, the others the first message."""
    client = await SocketClient.connected(url)

    async def one(number: int) -> None:
        name = names[number % len(names)]
        consumed = Consumed(4)
        await client.subscribe(name, f"s-{number}", number, consumed, 10)
        await consumed.done
        offset = sorted(consumed.ids)[number % 2]
        await client.acknowledge(number, [consumed.ids[offset]])
        await client.close_consumer(number)

    await call_many([lambda n=n: one(n) for n in range(count)])
    await client.close()


# -- a broker is killed ------------------------------------------------------------------------


class Clients(NamedTuple):
    """Which clients each partition has."""

    produces: bool
    subscribes: bool

    def __str__(self) -> str:
        kinds = {"a producer": self.produces, "a subscription": self.subscribes}
        return " and ".join(kind for kind, has in kinds.items() if has) or "a reader"

    @property
    def fields(self) -> dict[str, Any]:
        """Of a subscribe."""
        return {} if self.subscribes else {"durable": False, "start_message_id": earliest()}


KINDS = (Clients(True, False), Clients(True, True), Clients(False, False), Clients(False, True))


def partitions_taken_over(count: int, topics: int, rounds: int, acks: int, kinds: str) -> None:
    for clients in [KINDS[int(kind)] for kind in kinds] * rounds:
        with world() as made:
            first = made.broker()
            each = count // topics
            names = [
                name
                for topic in [made.topic(each) for _ in range(topics)]
                for name in partition_names(topic, each)
            ]
            asyncio.run(fill(first.url, names, acks + 2))
            took, cpu = asyncio.run(killed(made, first, names, clients, acks))
            print(
                f"{count} partitions of {topics} topics, each with {clients} and {acks}"
                f" acknowledgements: all served {took:.2f} s after the kill; ms of a processor a"
                f" partition: {', '.join(f'{1e3 * each / count:.2f}' for each in cpu)}",
                flush=True,
            )


async def killed(
    made: World, first: LocalBroker, names: list[str], clients: Clients, acks: int
) -> tuple[float, list[float]]:
    """Seconds from the kill until each client was served by the other broker: a consumer has a
    message, and a producer a receipt. And seconds of a processor in that time: of the broker,
    ZooKeeper, the bookies and this process."""
    client = await SocketClient.connected(first.url)

    async def begin(number: int, name: str) -> None:
        consumed = Consumed(acks + 2)
        await client.subscribe(name, f"s-{number}", number, consumed, acks + 2, **clients.fields)
        await consumed.done
        for offset in sorted(consumed.ids)[1:-1] if clients.subscribes else ():
            await client.acknowledge(number, [consumed.ids[offset]])

    await call_many([lambda n=n, name=name: begin(n, name) for n, name in enumerate(names)])
    second = await asyncio.to_thread(made.broker)
    await asyncio.sleep(5)
    began_s, cpu_before = time.monotonic(), cpu_of(made, second)
    first.kill()
    await client.close()
    await served(second.url, names, clients)
    took_s, cpu_after = time.monotonic() - began_s, cpu_of(made, second)
    return took_s, [after - before for before, after in zip(cpu_before, cpu_after, strict=True)]


def cpu_of(made: World, broker: LocalBroker) -> list[float]:
    keeper = made.cluster.zookeeper.pid or 0
    pids = [[broker.pid], [*below(keeper)], [bookie.pid for bookie in made.cluster.bookies]]
    return [*(sum(cpu_s(pid) for pid in of if pid) for of in pids), time.process_time()]


async def served(url: str, names: list[str], clients: Clients) -> None:
    client, batches = await SocketClient.connected(url), [batch_of(0, 100)]
    numbers = iter(range(10**9))

    async def serve(number: int, name: str) -> None:
        if clients.produces:
            await client.produce(name, next(numbers), 1, batches)
        if clients.subscribes or not clients.produces:
            consumed = Consumed(1)
            await client.subscribe(
                name, f"s-{number}", next(numbers), consumed, 10, **clients.fields
            )
            await asyncio.wait_for(consumed.done, SERVED_WITHIN_S)

    async def one(number: int, name: str) -> None:
        until_s = time.monotonic() + SERVED_WITHIN_S
        while True:
            try:
                if await client.look_up(name) == url:
                    await serve(number, name)
                    return
            except RuntimeError as error:
                if time.monotonic() > until_s:
                    raise error
            await asyncio.sleep(0.1)

    await call_many([lambda n=n, name=name: one(n, name) for n, name in enumerate(names)], 200)
    await client.close()


def earliest() -> MessageId:
    return MessageId(ledgerId=2**64 - 1, entryId=2**64 - 1)


# -- one partition with many holes -------------------------------------------------------------


def holes(subscriptions: int, holes_each: int, rounds: int) -> None:
    for count, each in ((0, 0), (subscriptions, 1), (subscriptions, holes_each)) * rounds:
        with world() as made:
            first = made.broker()
            name = made.topic(1) + "-partition-0"
            asyncio.run(fill(first.url, [name], 2 * holes_each + 1))
            first_s, all_s = asyncio.run(holes_taken_over(made, first, name, count, each))
            print(
                f"{count} subscriptions, {count * each} holes: first served {first_s:.2f} s,"
                f" all {all_s:.2f} s after the kill",
                flush=True,
            )


async def holes_taken_over(
    made: World, first: LocalBroker, name: str, count: int, holes_each: int
) -> tuple[float, float]:
    """Seconds from the kill until the first consumer has a message again, and until each has."""
    client = await SocketClient.connected(first.url)
    reading = Consumed(2 * max(holes_each, 1) + 1)
    clients = Clients(False, count > 0)
    await client.subscribe(name, "reader", 10**6, reading, 10**6, **KINDS[2].fields)
    await reading.done
    acked = [reading.ids[offset] for offset in sorted(reading.ids)[1::2]]

    async def begin(number: int) -> None:
        await client.subscribe(name, f"s-{number}", number, Consumed(1), 0)
        await client.acknowledge(number, acked)

    await call_many([lambda n=n: begin(n) for n in range(count)], 16)
    second = await asyncio.to_thread(made.broker)
    await asyncio.sleep(5)
    began_s = time.monotonic()
    first.kill()
    await client.close()
    await served(second.url, [name], clients)
    first_s = time.monotonic() - began_s
    await served(second.url, [name] * max(1, count), clients)
    return first_s, time.monotonic() - began_s


# -- a planned move ----------------------------------------------------------------------------


def move(partitions: int, seconds: float) -> None:
    with world() as made:
        broker = made.broker()
        topic = made.topic(partitions)
        names = partition_names(topic, partitions)
        asyncio.run(fill(broker.url, names, 5_000))
        waits = asyncio.run(moved(broker, names, seconds))
        for what, each in waits.items():
            each.sort()
            print(
                f"{what}: {len(each)} receipts, p50 {1e3 * statistics.median(each):.1f} ms, p99"
                f" {1e3 * each[int(0.99 * len(each))]:.1f} ms, the longest {1e3 * each[-1]:.1f} ms"
            )


async def moved(broker: LocalBroker, names: list[str], seconds: float) -> dict[str, list[float]]:
    """By whether a move was under way: seconds until receipts of the partitions that stay."""
    client = await SocketClient.connected(broker.url)
    consumed = [Consumed(5_000) for _ in names]
    for number, name in enumerate(names):
        await client.subscribe(name, "s", number, consumed[number], 10_000)
        await consumed[number].done
    waits: dict[str, list[float]] = {"no move": [], "while one partition moves": []}
    is_moving = False

    async def acknowledge(number: int) -> None:
        until_s = time.monotonic() + seconds
        for offset in sorted(consumed[number].ids)[1::2]:
            began_s, was_moving = time.monotonic(), is_moving
            await client.acknowledge(number, [consumed[number].ids[offset]])
            key = "while one partition moves" if was_moving or is_moving else "no move"
            waits[key].append(time.monotonic() - began_s)
            if began_s > until_s:
                return
            await asyncio.sleep(0.01)

    acking = asyncio.gather(*map(acknowledge, range(1, len(names))))
    moves = 0
    while not acking.done():
        await asyncio.sleep(1)
        is_moving = True
        await asyncio.to_thread(unload, broker, names[0])
        await served(broker.url, names[:1], KINDS[3])
        is_moving = False
        moves += 1
    await acking
    print(f"{moves} moves of one partition of {len(names)}")
    await client.close()
    return waits


def unload(broker: LocalBroker, name: str) -> None:
    path = name.removeprefix("persistent://")
    url = f"{broker.admin_url}/admin/v2/persistent/{path}/unload"
    urllib.request.urlopen(urllib.request.Request(url, method="PUT")).read()


# -- rates -------------------------------------------------------------------------------------


def rates(partitions: int, seconds: float) -> None:
    with world() as made:
        broker = made.broker()
        topic = made.topic(partitions)
        names = partition_names(topic, partitions)
        asyncio.run(fill(broker.url, names, int(20 * (seconds + 30)) + 100))
        asyncio.run(acked_for(made, topic, broker, names, seconds))


async def acked_for(
    made: World, topic: str, broker: LocalBroker, names: list[str], seconds: float
) -> None:
    client = await SocketClient.connected(broker.url)
    consumed = [Consumed(int(20 * seconds)) for _ in names]
    for number, name in enumerate(names):
        await client.subscribe(name, "s", number, consumed[number], 100_000)
    await asyncio.gather(*(each.done for each in consumed))
    await asyncio.sleep(20)
    quiet = made.requests()
    await asyncio.sleep(60)
    idle_text = made.requests().since(quiet)
    entries = await asyncio.to_thread(ack_entries, made, topic)
    began, until_s = made.requests(), time.monotonic() + seconds
    at, acks = 0, 0
    order = [sorted(each.ids)[1:] for each in consumed]
    from spark_ledger.broker.wire.commands import command

    while time.monotonic() < until_s:
        for number, offsets in enumerate(order):
            if at < len(offsets):
                id_ = consumed[number].ids[offsets[at]]
                client.send(command("ack", consumer_id=number, ack_type=0, message_id=[id_]))
                acks += 1
        at += 2
        await asyncio.sleep(0.1)
    text = made.requests().since(began)
    entries = await asyncio.to_thread(ack_entries, made, topic) - entries
    print(f"{len(names)} partitions, {acks / seconds:,.0f} acknowledgements/s without receipts")
    print(f"  60 s without: {idle_text}")
    print(f"  {seconds:.0f} s with them: {text}; {entries} entries of ack ledgers,")
    print(f"  {entries / seconds / len(names):.2f} adds/s for each partition")
    await client.close()


def ack_entries(made: World, topic: str) -> int:
    """The entries of the topic's ack ledgers so far."""

    async def count() -> int:
        client = made.topics.client
        info = await client.topics.find(topic.removeprefix("persistent://"))
        assert info is not None
        nodes, total = AckNodes(client.ledgers, info.id), 0
        for partition in range(info.partitions):
            node = await nodes.get(partition)
            if node is not None and node.pointer.ledger_id is not None:
                reader = await client.ledgers.open(node.pointer.ledger_id, recover=False)
                if not reader.is_closed:
                    await reader.refresh_last_add_confirmed()
                total += reader.last_add_confirmed + 1
        return total

    return made.topics.run(count())


# -- bookies are dead --------------------------------------------------------------------------


def dead_bookies(partitions: int, seconds: float) -> None:
    with world() as made:
        broker = made.broker()
        topic = made.topic(partitions)
        names = partition_names(topic, partitions)
        asyncio.run(fill(broker.url, names, 5_000))
        asyncio.run(acked_while_dead(made, topic, broker, names, seconds))


async def acked_while_dead(
    made: World, topic: str, broker: LocalBroker, names: list[str], seconds: float
) -> None:
    client = await SocketClient.connected(broker.url)
    consumed = [Consumed(5_000) for _ in names]
    for number, name in enumerate(names):
        await client.subscribe(name, "s", number, consumed[number], 10_000)
        await consumed[number].done
    offsets = [iter(sorted(each.ids)[1::2]) for each in consumed]

    async def acknowledge(what: str) -> None:
        """Each partition in turn, one receipt at a time."""
        waits: list[float] = []
        began, began_s = made.requests(), time.monotonic()

        async def of(number: int) -> None:
            while time.monotonic() < began_s + seconds:
                asked_s = time.monotonic()
                id_ = consumed[number].ids[next(offsets[number])]
                await client.acknowledge(number, [id_])
                waits.append(time.monotonic() - asked_s)
                await asyncio.sleep(0.2)

        await asyncio.gather(*map(of, range(len(names))))
        writes = made.requests().writes - began.writes
        in_ledgers = await asyncio.to_thread(partitions_in_ledgers, made, topic)
        print(
            f"{what}: {len(waits)} receipts, p50 {statistics.median(waits):.2f} s, the longest"
            f" {max(waits):.2f} s; {writes / seconds:.1f} writes/s of ZooKeeper;"
            f" {in_ledgers} of {len(names)} partitions in ledgers",
            flush=True,
        )

    await acknowledge("three bookies")
    made.cluster.bookies[0].kill()
    await acknowledge("two bookies")
    made.cluster.bookies[1].kill()
    await acknowledge("one bookie")
    for bookie in made.cluster.bookies[:2]:
        await asyncio.to_thread(bookie.start)
    await acknowledge("three bookies again")
    await acknowledge("later")
    await client.close()


def partitions_in_ledgers(made: World, topic: str) -> int:
    async def count() -> int:
        client = made.topics.client
        info = await client.topics.find(topic.removeprefix("persistent://"))
        assert info is not None
        nodes = AckNodes(client.ledgers, info.id)
        found = [await nodes.get(number) for number in range(info.partitions)]
        return sum(node is not None and node.pointer.ledger_id is not None for node in found)

    return made.topics.run(count())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("part", choices=("idle", "partitions", "holes", "move", "rates", "dead"))
    parser.add_argument("--count", type=int)
    parser.add_argument("--topics", type=int)
    parser.add_argument("--seconds", type=float, default=120.0)
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--acks", type=int, default=1, help="partitions: in each of them")
    parser.add_argument("--kinds", default="0123", help="partitions: which of KINDS")
    given = parser.parse_args()
    if given.part == "idle":
        idle(given.count or 10_000, given.topics or 1, given.seconds)
    elif given.part == "partitions":
        partitions_taken_over(
            given.count or 1_000, given.topics or 10, given.rounds, given.acks, given.kinds
        )
    elif given.part == "holes":
        holes(given.count or 1_000, 1_000, given.rounds)
    elif given.part == "move":
        move(given.count or 20, given.seconds)
    elif given.part == "dead":
        dead_bookies(given.count or 20, given.seconds / 4)
    else:
        rates(given.count or 100, given.seconds)


if __name__ == "__main__":
    main()
