"""Verbs on topics: make, grow, list, delete.

Always true: each verb is one step of the topic layer, so no client ever sees half of a change. A
topic with connected clients is deleted only with `force`. The check for clients comes before the
deletion: a client that connects in between is sent away.
"""

from http import HTTPStatus
from typing import Any

from spark_ledger import errors
from spark_ledger.broker.admin.access import HttpRefusal, check_no_page
from spark_ledger.broker.admin.call import Call
from spark_ledger.broker.admin.stats import HERE, ask_other_owners, is_in_use
from spark_ledger.broker.names import ledger_number
from spark_ledger.metadata.store_calls import call_each
from spark_ledger.topic.log.policies import PARTITIONS_MAX
from spark_ledger.topic.log.topics import TopicInfo
from spark_ledger.topic.upkeep.admin import TopicAdmin

LIST_AT_ONCE = 64
UNPROCESSABLE = HTTPStatus.UNPROCESSABLE_ENTITY


# -- partitioned topics ----------------------------------------------------------------------------


async def partitions(call: Call) -> Any:
    """With `checkAllowAutoCreation` the topic is made if it does not exist, as Pulsar's clients
    expect. Requests of all machines may do this, except requests of web pages."""
    create = call.is_on("checkAllowAutoCreation")
    if create:
        check_no_page(call.request)
    return {"partitions": await call.broker.catalog.partitions_of(call.name, create=create)}


async def create_partitioned(call: Call) -> None:
    topic, count = await call.whole_topic(), _count_of(call)
    policies = {"partitioned": True}
    await call.client.topics.create(topic.full, count, policies, makes_namespace=False)


async def grow(call: Call) -> None:
    count = _count_of(call)
    topic = await call.whole_topic()
    info = await call.existing_topic()
    if not info.policies.partitioned:
        raise HttpRefusal(HTTPStatus.CONFLICT, f"topic {topic} is not partitioned")
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
        raise errors.TopicNotFound(
            f"topic '{info.name}' is not partitioned", "Delete it as .../{topic}."
        )
    await _delete(call, info)


def _count_of(call: Call) -> int:
    """The number of partitions in the body, alone or with properties. Raises HttpRefusal."""
    count = call.json()
    if isinstance(count, dict):
        _check_properties(count.get("properties"))
        count = count.get("partitions")
    if type(count) is not int:
        raise HttpRefusal(
            HTTPStatus.BAD_REQUEST, f"a number of partitions is needed, not {count!r}"
        )
    if not 1 <= count <= PARTITIONS_MAX:
        raise HttpRefusal(
            HTTPStatus.NOT_ACCEPTABLE, f"partitions must be 1 to {PARTITIONS_MAX}, not {count}"
        )
    return count


def _check_properties(properties: Any) -> None:
    if properties:
        raise HttpRefusal(
            HTTPStatus.NOT_IMPLEMENTED, "properties of topics are not built yet: leave them out"
        )


# -- topics that are not partitioned ---------------------------------------------------------------


async def create_topic(call: Call) -> None:
    _check_properties(call.json())
    name = call.name
    if name.partition is not None and await _has_partition(call, name.partition):
        raise errors.TopicExists(f"there is a topic '{call.request.parts['topic']}' already")
    topic = await call.whole_topic()
    policies = {"partitioned": False}
    await call.client.topics.create(topic.full, 1, policies, makes_namespace=False)


async def delete_topic(call: Call) -> None:
    info, name = await call.existing_topic(), call.name
    if name.partition is not None and await _has_partition(call, name.partition):
        raise HttpRefusal(
            HTTPStatus.NOT_IMPLEMENTED,
            "one partition cannot be deleted: DELETE .../partitions removes the topic",
        )
    if name.partition is not None or info.policies.partitioned:
        raise errors.TopicNotFound(
            f"there is no topic '{call.request.parts['topic']}' without partitions",
            "A topic with partitions is deleted as .../partitions.",
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
    await TopicAdmin(call.client).terminate(info.name.full)
    state = await call.client.log(info.id).fold(fresh=True)
    end = state.partitions[0].end_offset
    return {"ledgerId": ledger_number(info.id), "entryId": end - 1, "partitionIndex": -1}


async def unload(call: Call) -> None:
    """Send the topic's clients away, at every broker; the clients come back by themselves."""
    info = await call.existing_topic()
    topic = call.broker.open_topic(info.id)
    numbers = [] if topic is None else list(topic.partitions)
    if call.name.partition is not None:
        numbers = [number for number in numbers if number == call.name.partition]
    for number in numbers:
        assert topic is not None, "numbers come from an open topic"
        topic.send_clients_away(number)
    if not call.is_on(HERE):
        await ask_other_owners(call.broker, info, f"{call.request.path}?{HERE}=true", "PUT")


# -- lists -----------------------------------------------------------------------------------------


async def topics(call: Call) -> Any:
    """The topics of the namespace; a partitioned topic appears as the names of its partitions."""
    await call.namespaces.check(call.namespace)

    async def names(info: TopicInfo) -> list[str]:
        if not info.policies.partitioned:
            return [info.name.full]
        count = await _count(call, info)
        return [f"{info.name.full}-partition-{number}" for number in range(count)]

    infos = await call.client.topics.in_namespace(call.namespace)
    return [name for group in await call_each(names, infos, LIST_AT_ONCE) for name in group]


async def partitioned_topics(call: Call) -> Any:
    await call.namespaces.check(call.namespace)
    infos = await call.client.topics.in_namespace(call.namespace)
    return [info.name.full for info in infos if info.policies.partitioned]


async def _count(call: Call, info: TopicInfo) -> int:
    return len((await call.client.log(info.id).fold(fresh=True)).partitions)
