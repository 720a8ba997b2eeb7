"""Consumers of a Shared and of a Key_Shared subscription under load, while brokers are killed.

    python -m tests.crash.sharing_kills --seconds 120

Twenty consumers of each subscription at each partition join, leave, hang, give back and acknowledge
with receipts (sharing_consumers.py). Every nine seconds the broker that owns a partition is killed
with SIGKILL, and starts again; bookies are killed and return, one at a time. Partitions move
because a broker stops in good order, and because the topic is unloaded. Both subscriptions are
sought back from outside at half time.

What consumers see is judged by tests/kit/deliveries.py, and the topic's rows as in broker_kills.py.
At the end the backlog is 0, and a subscription that is made anew by the name of one that was
deleted begins at the first message.
"""

import argparse
import asyncio
import json
import random
import secrets
import sys
import tempfile
import time
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pulsar

from benchmarks.socket_client import SocketClient
from spark_ledger import errors
from spark_ledger.local import LocalCluster
from spark_ledger.local.processes import LocalBroker
from spark_ledger.topic import blocking
from spark_ledger.topic.log.policies import TopicPolicies
from tests.crash.broker_kills import PATIENCE_S, Kept, Sender, read_whole
from tests.crash.sharing_consumers import JOIN_TIMEOUT_S, Consuming
from tests.kit.deliveries import Deliveries, Message

TOPIC = "shared-by-many"
PARTITIONS, BROKERS, BOOKIES = 2, 3, 3
LONE_SENDERS, BATCH_SENDERS = 3, 2
KEYS_OF_SENDER, RUN_MAX = 16, 8
AHEAD_MAX = 3_000
"""How many messages consumers may be behind their producers: as fast as the machine is."""
KILL_EVERY_S, BOOKIE_EVERY_S = 9.0, 25.0
DOWN_MAX_S = 3.0
SHARED, BY_KEY = "shared", "by-key"
KINDS = {SHARED: pulsar.ConsumerType.Shared, BY_KEY: pulsar.ConsumerType.KeyShared}


class KeyedSender(Sender):
    """Sends values of the form key:number, while consumers are not too far behind. With batching,
    each batch has messages of one key."""

    def __init__(
        self,
        client: pulsar.Client,
        kept: Kept,
        name: str,
        is_ahead: Callable[[int], bool],
        *,
        batching: bool,
    ) -> None:
        self._is_ahead = is_ahead
        self.numbers = {f"{name}-{key}": 0 for key in range(KEYS_OF_SENDER)}
        self._rng = random.Random(name)
        self._batching = batching
        super().__init__(client, kept, name, batching=batching)

    def send_next(self) -> None:
        if self._is_ahead(self.sent):
            return
        key = self._rng.choice(list(self.numbers))
        for _ in range(self._rng.randint(1, RUN_MAX) if self._batching else 1):
            self.send(f"{key}:{self.numbers[key]}", key)
            self.numbers[key] += 1
        if self._batching:
            self._producer.flush()

    def messages(self) -> Iterator[Message]:
        for key, count in self.numbers.items():
            yield from ((key, number) for number in range(count))


class Disturbance:
    """What happens to the cluster meanwhile. A broker ends only while another one runs; one bookie
    is down at a time."""

    def __init__(
        self,
        cluster: LocalCluster,
        brokers: list[LocalBroker],
        topics: blocking.BlockingTopics,
        rng: random.Random,
        say: Callable[[str], None],
    ) -> None:
        self._cluster = cluster
        self._brokers = brokers
        self._topics = topics
        self._rng = rng
        self._say = say
        self._begun = time.monotonic()
        self._restarts: list[asyncio.Task[None]] = []
        self.counts = dict.fromkeys(("kills", "bookie kills", "moves", "unloads"), 0)

    async def disturb(self, seconds: float, subscriptions: list[Deliveries]) -> None:
        calls = [self._kill_brokers(), self._kill_bookies(), self._move(seconds)]
        tasks = [asyncio.create_task(call) for call in calls]
        await asyncio.sleep(seconds / 2)
        for deliveries in subscriptions:
            await self._seek(deliveries)
        await asyncio.sleep(max(0.0, self._begun + seconds - time.monotonic()))
        for task in tasks:
            task.cancel()
        for result in await asyncio.gather(*tasks, return_exceptions=True):
            if not isinstance(result, asyncio.CancelledError):
                raise AssertionError("a disturbance ended early") from result
        await asyncio.gather(*self._restarts)
        for process in (*self._brokers, *self._cluster.bookies):
            if not process.running:
                await asyncio.to_thread(process.start)

    async def _kill_brokers(self) -> None:
        while True:
            await asyncio.sleep(KILL_EVERY_S - (time.monotonic() - self._begun) % KILL_EVERY_S)
            await self._end_owner(LocalBroker.kill, "kills")

    async def _end_owner(self, end: Callable[[LocalBroker], None], what: str) -> None:
        """End the broker that owns a partition, and start it again a little later."""
        while sum(broker.running for broker in self._brokers) < 2:  # noqa: ASYNC110
            await asyncio.sleep(0.1)
        owner = await self._owner()
        await asyncio.to_thread(end, owner)
        self._count(what)
        self._restarts.append(asyncio.create_task(self._restart(owner)))

    async def _restart(self, broker: LocalBroker) -> None:
        await asyncio.sleep(self._rng.uniform(0.0, DOWN_MAX_S))
        await asyncio.to_thread(broker.start)

    async def _kill_bookies(self) -> None:
        while True:
            await asyncio.sleep(BOOKIE_EVERY_S * self._rng.uniform(0.5, 1.0))
            bookie = self._rng.choice(self._cluster.bookies)
            await asyncio.to_thread(bookie.kill)
            self._count("bookie kills")
            await asyncio.sleep(self._rng.uniform(0.0, 2 * DOWN_MAX_S))
            await asyncio.shield(asyncio.to_thread(bookie.start))

    async def _move(self, seconds: float) -> None:
        """A broker hands its partitions over as it stops, then the topic is unloaded, in turns."""
        while True:
            await asyncio.sleep(seconds / 6)
            await self._end_owner(LocalBroker.stop, "moves")
            await asyncio.sleep(seconds / 6)
            with suppress(OSError):  # the broker was killed meanwhile
                await asyncio.to_thread(_admin, self._rng.choice(self._brokers), "unload", "PUT")
                self._count("unloads")

    async def _seek(self, deliveries: Deliveries) -> None:
        client = self._topics.client
        info = await asyncio.to_thread(self._topics.run, client.topics.open(TOPIC))
        calls = client.subscriptions
        at = await asyncio.to_thread(self._topics.run, calls.positions(info.id, deliveries.name))
        target = {partition: offset // 2 for partition, offset in at.items()}
        deliveries.seek_begins(target)
        while True:
            call = calls.seek(info.id, deliveries.name, target, force=True)
            try:
                await asyncio.to_thread(self._topics.run, call)
                break
            except errors.Unavailable as error:
                self._say(f"the seek is tried again: {error}")
        deliveries.seek_ends()
        self._say(f"{self._at()}: {deliveries.name} sought from {at} back to {target}")

    async def _owner(self) -> LocalBroker:
        """The broker that has a partition."""
        topic = f"persistent://public/default/{TOPIC}-partition-{self._rng.randrange(PARTITIONS)}"
        while True:
            try:
                async with asyncio.timeout(JOIN_TIMEOUT_S):
                    client = await SocketClient.connected(self._rng.choice(self._brokers).url)
                    try:
                        url = await client.look_up(topic)
                    finally:
                        await client.close()
                return next(broker for broker in self._brokers if broker.url == url)
            except (OSError, RuntimeError, TimeoutError):
                await asyncio.sleep(0.1)

    def backlog(self, name: str) -> int:
        """As a broker answers; -1: it does not."""
        try:
            stats = _admin(self._brokers[0], "partitioned-stats")
        except OSError:
            return -1
        return int(stats["subscriptions"][name]["msgBacklog"])

    def _count(self, what: str) -> None:
        self.counts[what] += 1
        self._say(f"{self._at()}: {self.counts}")

    def _at(self) -> str:
        return f"{time.monotonic() - self._begun:.1f} s"


def _admin(broker: LocalBroker, path: str, method: str = "GET") -> Any:
    url = f"{broker.admin_url}/admin/v2/persistent/public/default/{TOPIC}/{path}"
    request = urllib.request.Request(url, method=method)
    with urllib.request.urlopen(request, timeout=JOIN_TIMEOUT_S) as response:
        text = response.read()
    return json.loads(text) if text else None


async def _play(
    seconds: float, senders: list[KeyedSender], disturbance: Disturbance, consuming: list[Consuming]
) -> None:
    """Raises AssertionError as soon as a consumer has seen a fault."""

    async def watch() -> None:
        while True:
            await asyncio.sleep(1.0)
            for consumers in consuming:
                consumers.check_alive()

    watching = asyncio.create_task(watch())
    disturbing = asyncio.create_task(
        disturbance.disturb(seconds, [consumers.deliveries for consumers in consuming])
    )
    await asyncio.wait({watching, disturbing}, return_when=asyncio.FIRST_COMPLETED)
    if watching.done():
        disturbing.cancel()
    watching.cancel()
    for task in (watching, disturbing):
        with suppress(asyncio.CancelledError):
            await task
    await asyncio.gather(*(asyncio.to_thread(sender.finish) for sender in senders))
    stored = [message for sender in senders for message in sender.messages()]
    for consumers in consuming:
        name = consumers.deliveries.name
        await consumers.drained(stored, lambda name=name: disturbance.backlog(name))
    for consumers in consuming:
        await consumers.finish()
    for consumers in consuming:
        consumers.deliveries.check(stored)


def _end_subscriptions(client: pulsar.Client, topics: blocking.BlockingTopics) -> None:
    """Unsubscribe, subscribe by the same names and begin anew, unsubscribe again. Raises
    AssertionError if something of the first subscriptions is left."""
    _unsubscribe(client, topics)
    for name, kind in KINDS.items():
        start = pulsar.InitialPosition.Earliest
        consumer = client.subscribe(TOPIC, name, kind, initial_position=start)
        first: dict[int, int] = {}
        while len(first) < PARTITIONS:
            message = consumer.receive(int(PATIENCE_S * 1000))
            id_ = message.message_id()
            first.setdefault(id_.partition(), id_.entry_id())
            consumer.acknowledge(message)
        assert set(first.values()) == {0}, f"{name} begins at {first}"
        consumer.close()
    _unsubscribe(client, topics)


def _unsubscribe(client: pulsar.Client, topics: blocking.BlockingTopics) -> None:
    """Again if a subscription is made anew: a client that connects again while it unsubscribes, as
    partitions move, may subscribe once more. Raises AssertionError if an old one is left."""
    info = topics.run(topics.client.topics.open(TOPIC))
    until_s, left = time.monotonic() + PATIENCE_S, dict.fromkeys(KINDS, 0)
    while left:
        assert time.monotonic() < until_s, left
        for name in left:
            consumer = client.subscribe(TOPIC, name, KINDS[name])
            asked_ms = time.time() * 1000
            consumer.unsubscribe()
            created = {
                subscription.name: subscription.created_ms
                for subscription in topics.run(topics.client.subscriptions.list(info.id))
            }
            assert created.get(name, asked_ms) >= asked_ms, f"{name} is left"
        left = created


def run(seconds: float, folder: Path, seed: int, say: Callable[[str], None] = print) -> None:
    """Raises AssertionError for what is lost, comes again, or is left over."""
    say(f"seed {seed}")
    rng = random.Random(seed)
    with LocalCluster(bookies=BOOKIES, autorecovery=False) as cluster:
        topics = blocking.topics(cluster.service_url)
        policies = TopicPolicies(deduplication=True)
        topics.run(topics.client.topics.create(TOPIC, PARTITIONS, policies))
        brokers = [LocalBroker(folder / f"{i}.log", cluster.service_url) for i in range(BROKERS)]
        for broker in brokers:
            broker.start()
        client = pulsar.Client(
            "pulsar://" + ",".join(broker.url.removeprefix("pulsar://") for broker in brokers),
            logger=pulsar.FileLogger(pulsar.LoggerLevel.Info, str(folder / "client.log")),
        )
        kept = Kept(TOPIC)
        senders: list[KeyedSender] = []
        try:
            for name, kind in KINDS.items():
                client.subscribe(TOPIC, name, kind).close()
            kinds = [False] * LONE_SENDERS + [True] * BATCH_SENDERS
            deliveries = {
                name: Deliveries(name, time.monotonic, by_key=name == BY_KEY) for name in KINDS
            }

            def is_ahead(sent: int) -> bool:
                return len(kinds) * sent > AHEAD_MAX + min(map(len, deliveries.values()))

            senders += [
                KeyedSender(client, kept, f"p{number}", is_ahead, batching=batching)
                for number, batching in enumerate(kinds)
            ]

            async def play() -> None:
                urls = [broker.url for broker in brokers]
                consuming = [
                    Consuming(history, TOPIC, PARTITIONS, urls, rng)
                    for history in deliveries.values()
                ]
                disturbance = Disturbance(cluster, brokers, topics, rng, say)
                try:
                    await _play(seconds, senders, disturbance, consuming)
                finally:
                    for consumers in consuming:
                        counts = dict(sorted(consumers.deliveries.counts.items()))
                        say(f"{consumers.deliveries.name}: {counts}")
                say(f"{sum(sender.sent for sender in senders)} messages, {disturbance.counts}")

            asyncio.run(play())
            _end_subscriptions(client, topics)
        finally:
            for sender in senders:
                sender.stop()
            with suppress(pulsar.PulsarException):
                client.close()
            for broker in brokers:
                broker.stop()
        begun = time.monotonic()
        kept.history.read(TOPIC, read_whole(topics, TOPIC), begun=begun, start=0)
        kept.history.check()


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seconds", type=float, default=120.0)
    parser.add_argument("--seed", type=int, default=secrets.randbelow(1 << 32))
    parser.add_argument("--folder", type=Path, help="for logs; a temporary one by default")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as temporary:
        folder = options.folder or Path(temporary)
        folder.mkdir(parents=True, exist_ok=True)
        run(options.seconds, folder, options.seed, lambda text: print(text, flush=True))
    return 0


if __name__ == "__main__":
    sys.exit(main())
