"""What a step of the program works with: a broker, two clients, and short ways to use them."""

import json
import uuid
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol
from urllib.error import HTTPError
from urllib.request import Request, urlopen

import pulsar

TIMEOUT_MS = 30_000
NOTHING_MS = 700
"""How long nothing comes, where nothing is to come."""
EARLIEST, LATEST = pulsar.InitialPosition.Earliest, pulsar.InitialPosition.Latest
EXCLUSIVE, FAILOVER = pulsar.ConsumerType.Exclusive, pulsar.ConsumerType.Failover
SHARED, KEY_SHARED = pulsar.ConsumerType.Shared, pulsar.ConsumerType.KeyShared
MODE = pulsar.ProducerAccessMode
Seen = dict[str, Any]


class World(Protocol):
    """A broker with what a client cannot ask for."""

    url: str
    closed_url: str
    """Where no client makes a topic in the namespace public/closed."""

    def create(self, topic: str, partitions: int = 0, *, once: bool = False) -> None:
        """Make a topic; 0: not partitioned. `once`: with deduplication, in public/once."""

    def terminate(self, topic: str) -> None:
        """Take no more messages in it."""

    def ask(self, verb: str, path: str, body: object = None) -> tuple[int, Any]:
        """Status and answer of the admin API, for a path below /admin/v2."""


@dataclass
class Case:
    """What a step works with."""

    world: World
    client: pulsar.Client
    other: pulsar.Client
    seen: Seen = field(default_factory=dict)

    def topic(
        self, partitions: int | None = None, *, once: bool = False, ns: str = "default"
    ) -> str:
        """A new name; with `partitions` the topic is there."""
        name = f"persistent://public/{ns}/d-{uuid.uuid4().hex[:12]}"
        if partitions is not None:
            self.world.create(name, partitions, once=once)
        return name

    def error(self, act: Callable[[], object]) -> str:
        """The name of the client's error; "none" where it works."""
        return error_of(act)


def error_of(act: Callable[[], object]) -> str:
    try:
        act()
    except pulsar.PulsarException as error:
        return type(error).__name__
    except ValueError as error:
        return f"ValueError: {error}"
    return "none"


def asked(url: str, verb: str, path: str, body: object = None) -> tuple[int, Any]:
    """Of the admin API at this URL: the status, and the answer; text that is no JSON as it is."""
    data = b"" if body is None else json.dumps(body).encode()
    headers = {"Content-Type": "application/json"}
    request = Request(f"{url}/admin/v2/{path}", data, headers, method=verb)
    try:
        with urlopen(request, timeout=30) as response:
            status, answer = response.status, response.read()
    except HTTPError as error:
        return error.code, None
    try:
        return status, json.loads(answer) if answer else None
    except ValueError:
        return status, answer.decode()


def sent(producer: pulsar.Producer, values: Sequence[bytes], **said: Any) -> list[pulsar.MessageId]:
    return [producer.send(value, **said) for value in values]


def received(consumer: pulsar.Consumer, count: int, *, ack: bool = True) -> list[pulsar.Message]:
    found = []
    for _ in range(count):
        found.append(consumer.receive(TIMEOUT_MS))
        if ack:
            consumer.acknowledge(found[-1])
    return found


def drained(
    consumer: pulsar.Consumer, first_ms: int = 1500, *, ack: bool = True
) -> list[pulsar.Message]:
    """What comes until nothing comes any more; the first message is waited for longer."""
    found: list[pulsar.Message] = []
    while True:
        try:
            found.append(consumer.receive(NOTHING_MS if found else first_ms))
        except pulsar.Timeout:
            return found
        if ack:
            consumer.acknowledge(found[-1])


def text(messages: Sequence[pulsar.Message]) -> list[str]:
    return [one.data().decode() for one in messages]


def numbered(count: int) -> list[bytes]:
    return [b"%d" % number for number in range(count)]


def nothing(consumer: pulsar.Consumer) -> bool:
    """Whether nothing comes."""
    return error_of(lambda: consumer.receive(NOTHING_MS)) == "Timeout"


def batch(producer: pulsar.Producer, values: Sequence[bytes]) -> list[pulsar.MessageId]:
    """Sent together, in one batch."""
    ids: list[pulsar.MessageId] = []
    for value in values:
        producer.send_async(value, lambda _, at: ids.append(at))
    producer.flush()
    return ids


def batching(case: Case, topic: str, **said: Any) -> pulsar.Producer:
    return case.client.create_producer(
        topic, batching_enabled=True, batching_max_publish_delay_ms=1000, **said
    )
