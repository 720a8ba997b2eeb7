"""One call of a verb: the broker, the request, and the names in the request's path and body."""

from collections.abc import Sequence
from dataclasses import dataclass
from http import HTTPStatus
from typing import Any
from urllib.parse import quote, urlencode

from spark_ledger import errors
from spark_ledger.broker import names
from spark_ledger.broker.admin.access import HttpRefusal, json_of
from spark_ledger.broker.broker import Broker
from spark_ledger.broker.log.membership import brokers_alive
from spark_ledger.broker.names import PartitionName
from spark_ledger.broker.owner.owned_partition import OwnedPartition
from spark_ledger.broker.owner.owned_topic import OwnedTopic
from spark_ledger.http import HttpRequest
from spark_ledger.topic.client import TopicClient
from spark_ledger.topic.log.names import TopicName
from spark_ledger.topic.log.topics import TopicInfo
from spark_ledger.topic.upkeep.namespaces import Namespaces

DIGITS_MAX = 15
WHOLE_NAMESPACE = "0x00000000_0xffffffff"
"""The one bundle of every namespace."""


@dataclass(frozen=True, slots=True)
class Call:
    """The argument of a verb. A verb returns the JSON of the response; None: a response without a
    body. It raises HttpRefusal, Refusal, errors of the topic layer."""

    broker: Broker
    request: HttpRequest

    @property
    def client(self) -> TopicClient:
        return self.broker.client

    @property
    def cluster(self) -> str:
        return self.broker.settings.cluster

    @property
    def namespaces(self) -> Namespaces:
        return Namespaces(self.client.store, self.client.rng)

    @property
    def tenant(self) -> str:
        return self.request.parts["tenant"]

    @property
    def namespace(self) -> str:
        return "{tenant}/{namespace}".format(**self.request.parts)

    async def check_namespace(self) -> None:
        """Raises errors.NamespaceNotFound, and HttpRefusal if the path names a bundle that is not
        the whole namespace."""
        bundle = self.request.parts.get("bundle", WHOLE_NAMESPACE)
        await self.namespaces.check(self.namespace)
        if bundle != WHOLE_NAMESPACE:
            raise HttpRefusal(
                HTTPStatus.PRECONDITION_FAILED,
                f"there is no bundle {bundle}: a namespace is one bundle, {WHOLE_NAMESPACE}",
            )

    @property
    def name(self) -> PartitionName:
        """Raises Refusal."""
        text = "persistent://{tenant}/{namespace}/{topic}".format(**self.request.parts)
        return names.parse(text)

    def is_on(self, flag: str) -> bool:
        """Whether the query has flag=true."""
        return self.request.query.get(flag, "").lower() == "true"

    def choice(self, name: str, choices: Sequence[str]) -> str:
        """The query's value of this name, by default the first choice. Raises HttpRefusal."""
        value = self.request.query.get(name, choices[0])
        if value not in choices:
            raise HttpRefusal(
                HTTPStatus.BAD_REQUEST,
                f"{name} is {' or '.join(choices)}, not '{value[:100]}'",
            )
        return value

    def number(self, name: str) -> int:
        """The number in the part `name` of the path. Raises HttpRefusal."""
        return number_of(self.request.parts[name], name)

    def json(self) -> Any:
        """The body. Raises HttpRefusal."""
        return json_of(self.request)

    async def whole_topic(self) -> TopicName:
        """The topic's name. Raises HttpRefusal if the name is that of a partition,
        errors.NamespaceNotFound."""
        name = self.name
        if name.partition is not None:
            raise HttpRefusal(
                HTTPStatus.PRECONDITION_FAILED,
                f"{self.request.parts['topic']} is the name of partition {name.partition} of topic"
                f" {name.topic.name}: no topic has such a name",
            )
        await self.namespaces.check(self.namespace)
        return name.topic

    async def existing_topic(self) -> TopicInfo:
        """The topic of this name; if the name is that of a partition, the partition's topic. Raises
        errors.TopicNotFound, errors.NamespaceNotFound."""
        await self.namespaces.check(self.namespace)
        name = self.name
        info = await self.client.topics.find(name.topic.full)
        if info is None:
            raise errors.TopicNotFound(f"there is no topic '{name.topic}'")
        if name.partition is not None:
            log = self.client.log(info.id)
            if name.partition >= len((await log.fold()).partitions) and (
                name.partition >= len((await log.fold(fresh=True)).partitions)
            ):
                raise errors.TopicNotFound(f"topic '{info.name}' has no partition {name.partition}")
        return info

    async def one_partition(self, info: TopicInfo, what: str) -> None:
        """Checks that the name means one partition of the topic. Raises HttpRefusal: `what` is done
        with one partition."""
        if self.name.partition is None:
            count = len((await self.client.log(info.id).fold()).partitions)
            if count > 1:
                raise HttpRefusal(
                    HTTPStatus.METHOD_NOT_ALLOWED,
                    f"{what} on a partitioned topic is not allowed: topic {info.name} has {count}"
                    f" partitions, name one as {info.name.name}-partition-0",
                )

    async def owned(self, info: TopicInfo, what: str) -> tuple[OwnedTopic, OwnedPartition]:
        """The partition, if this broker owns it. Raises HttpRefusal, which sends the client to the
        owner if another broker owns the partition; Refusal."""
        await self.one_partition(info, what)
        url, is_here = await self.broker.lookup(self.name, authoritative=False)
        if is_here:
            topic, owned = await self.broker.partition(self.name, create=False)
            assert isinstance(topic, OwnedTopic), "the name is that of a topic with a log"
            return topic, owned
        path = quote(self.request.path)
        path += f"?{urlencode(self.request.query)}" if self.request.query else ""
        raise HttpRefusal(
            HTTPStatus.TEMPORARY_REDIRECT,
            f"the broker at {url} has the partition",
            await self.admin_url_of(url) + path,
        )

    async def admin_url_of(self, url: str) -> str:
        """The address for HTTP of the broker that clients reach at `url`. Raises HttpRefusal."""
        for broker in (await brokers_alive(self.client.store)).values():
            if broker.url == url and broker.admin_url:
                return broker.admin_url
        raise HttpRefusal(
            HTTPStatus.SERVICE_UNAVAILABLE,
            f"the broker at {url} has the partition, and registers no address for HTTP: ask that"
            " broker",
        )


def number_of(text: str, name: str) -> int:
    """The number that `text` is. Raises HttpRefusal."""
    if not (text.isascii() and text.isdecimal()) or len(text) > DIGITS_MAX:
        is_negative = text.startswith("-") and text[1:].isdecimal()
        why = "must not be negative" if is_negative else "is not a number"
        raise HttpRefusal(HTTPStatus.BAD_REQUEST, f"'{text}', given as {name}, {why}")
    return int(text)


def not_implemented(request: HttpRequest) -> HttpRefusal:
    return HttpRefusal(
        HTTPStatus.NOT_IMPLEMENTED,
        f"{request.method} {request.path} is not implemented: docs/pulsar.md lists the verbs",
    )
