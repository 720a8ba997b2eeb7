"""Verbs on topics: make, grow, list, delete.

Always true: each verb is one step of the topic layer, so no client ever sees half of a change. A
topic with connected clients is deleted only with `force`. The check for clients comes before the
deletion: a client that connects in between is sent away.
"""

from http import HTTPStatus
from typing import Any

from spark_ledger import errors
from spark_ledger.broker.admin.access import HttpRefusal, check_no_page
from spark_ledger.broker.admin.call import WHOLE_NAMESPACE, Call
from spark_ledger.broker.admin.messages import shown_id
from spark_ledger.broker.admin.stats import (
    HERE,
    ask_brokers,
    ask_other_owners,
    is_in_use,
)
from spark_ledger.broker.admin.subscriptions import properties_of
from spark_ledger.broker.log.membership import brokers_alive
from spark_ledger.broker.names import ledger_number, parse
from spark_ledger.broker.owner.owned_topic import OwnedTopic
from spark_ledger.http import HttpResponse
from spark_ledger.topic.log.policies import PARTITIONS_MAX
from spark_ledger.topic.log.topics import TopicInfo
from spark_ledger.topic.upkeep.admin import TopicAdmin

UNPROCESSABLE = HTTPStatus.UNPROCESSABLE_ENTITY


# -- partitioned topics ----------------------------------------------------------------------------


async def partitions(call: Call) -> Any:
    """With `checkAllowAutoCreation` the topic is made if it does not exist, as Pulsar's clients
    expect. Requests of all machines may do this, except requests of web pages."""
    create = call.is_on("checkAllowAutoCreation")
    if create:
        check_no_page(call.request)
    count = await call.broker.catalog.partitions_of(call.name, create=create)
    shown: dict[str, Any] = {"partitions": count, "deleted": False}
    info = await call.client.topics.find(call.name.topic.full, fresh=False) if count else None
    if info is not None and info.properties:
        shown["properties"] = dict(info.properties)
    return shown


async def create_partitioned(call: Call) -> None:
    topic, (count, properties) = await call.whole_topic(), partitions_in(call)
    await call.client.topics.create(
        topic.full, count, {"partitioned": True}, makes_namespace=False, properties=properties
    )


async def create_missed(call: Call) -> None:
    """Nothing is missed: a topic is made with all its partitions, and grows by one commit."""
    await _partitioned_topic(call, HTTPStatus.NOT_FOUND)


async def _partitioned_topic(call: Call, status: HTTPStatus) -> TopicInfo:
    """Raises HttpRefusal with this status if there is no such partitioned topic."""
    topic = await call.whole_topic()
    info = await call.client.topics.find(topic.full)
    if info is None or not info.policies.partitioned:
        raise HttpRefusal(status, f"there is no partitioned topic {topic}")
    return info


async def grow(call: Call) -> None:
    count, _ = partitions_in(call)
    info = await _partitioned_topic(call, HTTPStatus.CONFLICT)
    topic = info.name
    current = await _count(call, info)
    if count < current:
        raise HttpRefusal(
            UNPROCESSABLE, f"topic {topic} has {current} partitions, it cannot have only {count}"
        )
    if count > current:
        await TopicAdmin(call.client).grow(topic.full, count)


async def delete_partitioned(call: Call) -> None:
    await call.whole_topic()
    info = await call.existing_topic()
    if not info.policies.partitioned:
        raise HttpRefusal(
            HTTPStatus.CONFLICT, f"topic {info.name} is not partitioned: delete it as .../{{topic}}"
        )
    await _delete(call, info)


def partitions_in(call: Call) -> tuple[int, dict[str, str]]:
    """The number of partitions in the body, alone or with properties. Raises HttpRefusal."""
    count, properties = call.json(), {}
    if isinstance(count, dict):
        properties = properties_of(count.get("properties"))
        count = count.get("partitions")
    if type(count) is not int:
        raise HttpRefusal(
            HTTPStatus.BAD_REQUEST, f"a number of partitions is needed, not {count!r}"
        )
    if not 1 <= count <= PARTITIONS_MAX:
        raise HttpRefusal(
            HTTPStatus.NOT_ACCEPTABLE, f"partitions must be 1 to {PARTITIONS_MAX}, not {count}"
        )
    return count, properties


# -- topics that are not partitioned ---------------------------------------------------------------


async def create_topic(call: Call) -> None:
    properties, name = properties_of(call.json()), call.name
    if name.partition is not None and await _has_partition(call, name.partition):
        raise errors.TopicExists(f"there is a topic '{call.request.parts['topic']}' already")
    topic = await call.whole_topic()
    await call.client.topics.create(
        topic.full, 1, {"partitioned": False}, makes_namespace=False, properties=properties
    )


async def delete_topic(call: Call) -> None:
    info, name = await call.existing_topic(), call.name
    if name.partition is not None and await _has_partition(call, name.partition):
        raise HttpRefusal(
            HTTPStatus.NOT_IMPLEMENTED,
            "one partition cannot be deleted: DELETE .../partitions removes the topic",
        )
    if info.policies.partitioned:
        raise HttpRefusal(
            HTTPStatus.CONFLICT,
            f"topic {info.name} is partitioned: delete it as .../{{topic}}/partitions",
        )
    await _delete(call, info)


async def _delete(call: Call, info: TopicInfo) -> None:
    if not call.is_on("force") and await is_in_use(call.broker, info):
        raise HttpRefusal(
            HTTPStatus.PRECONDITION_FAILED,
            f"Topic has active producers/subscriptions: {info.name} has connected clients",
        )
    await TopicAdmin(call.client).delete(info.name.full)


async def _has_partition(call: Call, number: int) -> bool:
    info = await call.client.topics.find(call.name.topic.full)
    return info is not None and info.policies.partitioned and number < await _count(call, info)


async def terminate(call: Call) -> Any:
    """End the topic: it takes no more messages. Returns the id of its last message."""
    info = await call.existing_topic()
    if info.policies.partitioned:
        raise HttpRefusal(
            HTTPStatus.METHOD_NOT_ALLOWED, "Termination of a partitioned topic is not allowed"
        )
    return (await _terminated(call, info))[0] | {"partitionIndex": -1}


async def terminate_partitioned(call: Call) -> Any:
    """End the topic; returns the ids of the last messages by partition."""
    await call.whole_topic()
    info = await call.existing_topic()
    if not info.policies.partitioned:
        raise HttpRefusal(
            HTTPStatus.METHOD_NOT_ALLOWED,
            f"topic {info.name} is not partitioned: end it by .../{{topic}}/terminate",
        )
    return {str(id_["partitionIndex"]): id_ for id_ in await _terminated(call, info)}


async def _terminated(call: Call, info: TopicInfo) -> list[dict[str, Any]]:
    await TopicAdmin(call.client).terminate(info.name.full)
    state = await call.client.log(info.id).fold(fresh=True)
    ledger = ledger_number(info.id)
    return [shown_id(ledger, held.end_offset - 1, held.number) for held in state.partitions]


async def unload(call: Call) -> None:
    """Send the topic's clients away, at every broker; the clients come back by themselves."""
    info = await call.existing_topic()
    topic, number = call.broker.open_topic(info.id), call.name.partition
    if topic is not None:
        _send_clients_away(topic, number)
    if not call.is_on(HERE):
        await ask_other_owners(call.broker, info, f"{call.request.path}?{HERE}=true", "PUT")


async def unload_namespace(call: Call) -> None:
    """As `unload`, the topics of the namespace. A bundle is the whole namespace."""
    await call.check_namespace()
    for topic in call.broker.open_topics():
        if _namespace_of(topic.info) == call.namespace:
            _send_clients_away(topic, None)
    for passing in call.broker.non_persistent.open.values():
        if _namespace_of(passing.info) == call.namespace:
            passing.leave_each()
    if not call.is_on(HERE):
        path = f"{call.request.path}?{HERE}=true"
        others = (await brokers_alive(call.client.store)).keys() - {call.broker.id}
        await ask_brokers(call.broker, others, path, "PUT")


def _namespace_of(info: TopicInfo) -> str:
    return f"{info.name.tenant}/{info.name.namespace}"


def _send_clients_away(topic: OwnedTopic, number: int | None) -> None:
    for at in [at for at in topic.partitions if number in (None, at)]:
        topic.send_clients_away(at)


async def bundles(call: Call) -> Any:
    await call.namespaces.check(call.namespace)
    return {"boundaries": WHOLE_NAMESPACE.split("_"), "numBundles": 1}


async def bundle_of_topic(call: Call) -> Any:
    parse("{domain}://{tenant}/{namespace}/{topic}".format(**call.request.parts))
    return HttpResponse(WHOLE_NAMESPACE.encode(), media="text/plain")


# -- properties ------------------------------------------------------------------------------------


async def properties(call: Call) -> Any:
    return dict((await call.existing_topic()).properties)


async def set_properties(call: Call) -> None:
    """Adds these properties to those of the topic."""
    info, given = await call.existing_topic(), properties_of(call.json())
    await call.client.topics.change_properties(info.name.full, given)


async def remove_property(call: Call) -> None:
    info = await call.existing_topic()
    if key := call.request.query.get("key"):
        await call.client.topics.change_properties(info.name.full, {key: None})


# -- lists -----------------------------------------------------------------------------------------


async def topics(call: Call) -> Any:
    """The topics of the namespace; a partitioned topic appears as the names of its partitions."""
    return await call.broker.catalog.names_in(call.namespace)


async def partitioned_topics(call: Call) -> Any:
    await call.namespaces.check(call.namespace)
    topics = await call.client.topics.in_namespace(call.namespace)
    return [topic.name.full for topic in topics if topic.is_partitioned]


async def _count(call: Call, info: TopicInfo) -> int:
    return len((await call.client.log(info.id).fold(fresh=True)).partitions)
