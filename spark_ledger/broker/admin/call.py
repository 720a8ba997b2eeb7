"""One call of a verb: the broker, the request, and the names in the request's path and body."""

from dataclasses import dataclass
from http import HTTPStatus
from typing import Any

from spark_ledger import errors
from spark_ledger.broker import names
from spark_ledger.broker.admin.access import HttpRefusal, json_of
from spark_ledger.broker.broker import Broker
from spark_ledger.broker.names import PartitionName
from spark_ledger.http import HttpRequest
from spark_ledger.topic.client import TopicClient
from spark_ledger.topic.log.names import TopicName
from spark_ledger.topic.log.topics import TopicInfo
from spark_ledger.topic.upkeep.namespaces import Namespaces


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

    @property
    def name(self) -> PartitionName:
        """Raises Refusal."""
        text = "persistent://{tenant}/{namespace}/{topic}".format(**self.request.parts)
        return names.parse(text)

    def is_on(self, flag: str) -> bool:
        """Whether the query has flag=true."""
        return self.request.query.get(flag, "").lower() == "true"

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
        return info

    def not_built(self) -> HttpRefusal:
        return not_built(self.request)


def not_built(request: HttpRequest) -> HttpRefusal:
    return HttpRefusal(
        HTTPStatus.NOT_IMPLEMENTED,
        f"{request.method} {request.path} is not built: docs/pulsar.md lists the verbs",
    )
