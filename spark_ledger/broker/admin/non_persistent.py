"""Verbs on topics whose messages are only in memory (`/admin/v2/non-persistent`).

Always true: the statistics of a partition come from the broker on which it falls. If that broker
gives no answer, the partition has no clients and no numbers. Rates are 0, except that `msgDropRate`
is the mean since the broker has the partition; `msgDropCount`, which Pulsar lacks, is exact.
"""

import logging
from collections.abc import Iterable, Sequence
from functools import partial
from http import HTTPStatus
from typing import Any

from spark_ledger import errors, http
from spark_ledger.broker import names
from spark_ledger.broker.admin.access import HttpRefusal, check_no_page
from spark_ledger.broker.admin.call import Call
from spark_ledger.broker.admin.facts import (
    SubscriptionFacts,
    merged,
    publisher_stats,
    subscription_stats,
)
from spark_ledger.broker.admin.stats import HERE, ask_brokers
from spark_ledger.broker.admin.topics import partitions_in
from spark_ledger.broker.catalog import names_of_partitions
from spark_ledger.broker.log.membership import brokers_alive
from spark_ledger.broker.names import PartitionName
from spark_ledger.broker.nonpersistent.dispatchers import PassingDispatcher
from spark_ledger.broker.nonpersistent.topic import PassingTopic
from spark_ledger.broker.wire.commands import Refusal
from spark_ledger.http import HttpFailure
from spark_ledger.metadata.store_calls import call_each
from spark_ledger.topic.log.topics import TopicInfo

BROKERS_AT_ONCE = 16
"""How many brokers are asked for statistics at a time."""
_log = logging.getLogger(__name__)

Stats = dict[str, Any]


async def names_in(call: Call) -> list[str]:
    """The names of all topics, also of those without clients; a partitioned topic has the names of
    its partitions."""
    return await call.broker.non_persistent.names_in(call.namespace)


async def partitioned_topics(call: Call) -> Any:
    await call.namespaces.check(call.namespace)
    topics = await call.broker.non_persistent.records.in_namespace(call.namespace)
    return [topic.full for topic, partitions in topics.items() if partitions]


async def partitions(call: Call) -> Any:
    create = call.is_on("checkAllowAutoCreation")
    if create:
        check_no_page(call.request)
    return {"partitions": await call.broker.partitions_of(_name(call), create=create)}


async def create_topic(call: Call) -> None:
    if call.json():
        raise HttpRefusal(HTTPStatus.NOT_IMPLEMENTED, "such topics have no properties")
    await _make(call, 0)


async def create_partitioned(call: Call) -> None:
    await _make(call, partitions_in(call)[0])


async def _make(call: Call, count: int) -> None:
    await call.namespaces.check(call.namespace)
    name, records = _name(call), call.broker.non_persistent.records
    if name.partition is not None:
        reason = f"{call.request.parts['topic']} is the name of a partition"
        raise HttpRefusal(HTTPStatus.PRECONDITION_FAILED, reason)
    if await records.find(name.topic) is not None:
        raise errors.TopicExists(f"there is a topic '{name.topic}' already")
    await records.put(name.topic, count)


async def grow(call: Call) -> None:
    count, current = partitions_in(call)[0], _count(await _existing(call))
    if not current:
        raise HttpRefusal(HTTPStatus.CONFLICT, f"topic {_name(call).topic} is not partitioned")
    if count < current:
        reason = f"topic {_name(call).topic} has {current} partitions, it cannot have only {count}"
        raise HttpRefusal(HTTPStatus.UNPROCESSABLE_ENTITY, reason)
    await call.broker.non_persistent.records.put(_name(call).topic, count)


async def delete_topic(call: Call) -> None:
    """Delete a topic that is not partitioned. Its clients are sent away within some seconds."""
    await _delete(call, partitioned=False)


async def delete_partitioned(call: Call) -> None:
    await _delete(call, partitioned=True)


async def _delete(call: Call, *, partitioned: bool) -> None:
    info = await _existing(call)
    if _name(call).partition is not None:
        reason = "one partition cannot be deleted: DELETE .../partitions removes the topic"
        raise HttpRefusal(HTTPStatus.NOT_IMPLEMENTED, reason)
    if info.policies.partitioned is not partitioned:
        is_, path = ("is not", "{topic}") if partitioned else ("is", "{topic}/partitions")
        reason = f"topic {info.name} {is_} partitioned: delete it as .../{path}"
        raise HttpRefusal(HTTPStatus.CONFLICT, reason)
    if not call.is_on("force"):
        used = [
            s["publishers"] or s["subscriptions"] for s in (await _stats_of(call, info)).values()
        ]
        if any(used):
            reason = f"Topic has active producers/subscriptions: {info.name} has connected clients"
            raise HttpRefusal(HTTPStatus.PRECONDITION_FAILED, reason)
    await call.broker.non_persistent.records.delete(info.name)


async def delete_all(call: Call) -> None:
    """Delete the topics of a namespace."""
    records = call.broker.non_persistent.records
    for topic in await records.in_namespace(call.namespace):
        await records.delete(topic)


async def unload(call: Call) -> None:
    """Send the topic's clients away, at every broker; the clients come back by themselves."""
    info, number = await _existing(call), _name(call).partition
    _numbers(info, number)  # raises if there is no such partition
    topic = call.broker.non_persistent.open.get(info.name)
    if topic is not None:
        topic.leave_each(number)
    await _ask_others(call, "PUT")


# -- subscriptions ---------------------------------------------------------------------------------


async def subscriptions(call: Call) -> Any:
    """The subscriptions that have consumers: there are no others."""
    parts = await _stats_of(call, await _existing(call))
    return sorted({name for part in parts.values() for name in part["subscriptions"]})


async def delete_subscription(call: Call) -> None:
    """Only with `force`, which sends the consumers away: they come back by themselves."""
    info, name = await _existing(call), call.request.parts["subscription"]
    if not call.is_on(HERE):
        if name not in await subscriptions(call):
            text = f"there is no subscription '{name}'"
            raise errors.SubscriptionNotFound(text, subscription=name)
        if not call.is_on("force"):
            text = f"Subscription has active connected consumers: '{name}' of topic {info.name}"
            raise HttpRefusal(HTTPStatus.PRECONDITION_FAILED, text)
    topic = call.broker.non_persistent.open.get(info.name)
    if topic is not None:
        topic.subscriptions.send_away_from(name, _name(call).partition)
    await _ask_others(call, "DELETE")


async def _ask_others(call: Call, method: str) -> None:
    """Let the other brokers carry the request out too, unless another broker sent it."""
    if not call.is_on(HERE):
        others = (await brokers_alive(call.client.store)).keys() - {call.broker.id}
        await ask_brokers(call.broker, others, f"{call.request.path}?{HERE}=true", method)


# -- statistics ------------------------------------------------------------------------------------


async def topic_stats(call: Call) -> Any:
    """The statistics of a topic that is not partitioned, or of one partition."""
    info, number = await _existing(call), _name(call).partition
    if info.policies.partitioned and number is None:
        raise errors.TopicNotFound(
            f"topic '{info.name}' is partitioned", "Ask for .../partitioned-stats."
        )
    return (await _stats_of(call, info)).get(number or 0) or _partition_stats([], {})


async def partitioned_stats(call: Call) -> Any:
    """With the flag `here`: only of the partitions of this broker, by name, and of the partition
    that the request names."""
    info, is_here = await _existing(call), call.is_on(HERE)
    if not info.policies.partitioned and not is_here:
        raise errors.TopicNotFound(f"topic '{info.name}' is not partitioned", "Ask for .../stats.")
    by_partition = await _stats_of(call, info)
    names_ = names_of_partitions(info.name, _count(info))
    named = {names_[number]: part for number, part in by_partition.items()}
    if is_here:
        return {"partitions": named}
    whole = merged(by_partition.values())
    for subscription in whole["subscriptions"].values():
        subscription["msgDropCount"] = sum(_drops(by_partition.values(), subscription["name"]))
    is_wanted = call.request.query.get("perPartition", "true").lower() == "true"
    whole["metadata"] = {"partitions": info.partitions, "deleted": False}
    return whole | {"partitions": named if is_wanted else {}}


def _drops(parts: Iterable[Stats], name: str) -> list[int]:
    subscriptions = (part["subscriptions"].get(name) for part in parts)
    return [sub["msgDropCount"] for sub in subscriptions if sub is not None]


async def _stats_of(call: Call, info: TopicInfo) -> dict[int, Stats]:
    """The statistics of the partition that the call names, or of all, by number. One request to
    each broker on which partitions fall gets them; with the flag `here` no broker is asked."""
    numbers, here = _numbers(info, _name(call).partition), _stats_here(call, info)
    if call.is_on(HERE):
        return {number: stats for number, stats in here.items() if number in numbers}
    brokers = await call.broker.non_persistent.owners_of(info)
    others = {brokers[number] for number in numbers} - {call.broker.ownership.broker_id}
    registered = await brokers_alive(call.client.store) if others else {}
    addresses = [registered[id_].admin_url for id_ in sorted(others & registered.keys())]
    answers = await call_each(partial(_stats_from, call), addresses, BROKERS_AT_ONCE)
    stats: dict[int, Stats] = {}
    for answer in (*answers, here):
        stats |= answer
    return {number: stats.get(number) or _partition_stats([], {}) for number in numbers}


async def _stats_from(call: Call, admin_url: str) -> dict[int, Stats]:
    path = "{tenant}/{namespace}/{topic}/partitioned-stats".format(**call.request.parts)
    try:
        plain = await http.ask(f"{admin_url}/admin/v2/non-persistent/{path}?{HERE}=true")
        parts = plain["partitions"]
        return {names.parse(name).partition or 0: parts[name] for name in parts}
    except (HttpFailure, Refusal, *errors.MALFORMED) as error:
        _log.warning("the broker at %s gives no statistics of %s: %s", admin_url, path, error)
        return {}


def _stats_here(call: Call, info: TopicInfo) -> dict[int, Stats]:
    topic = call.broker.non_persistent.open.get(info.name)
    if topic is None:
        return {}
    numbers = (number for number in sorted(topic.partitions) if number < info.partitions)
    return {number: _stats_at(topic, number) for number in numbers}


def _stats_at(topic: PassingTopic, number: int) -> Stats:
    subscriptions = {}
    for subscription in topic.subscriptions.used_here():
        dispatcher = subscription.dispatcher_of(number)
        if isinstance(dispatcher, PassingDispatcher) and dispatcher.consumers:
            facts = SubscriptionFacts(
                type=subscription.kind.name,
                is_durable=False,
                backlog=0,
                backlog_bytes=0,
                position=dispatcher.position,
                consumers=tuple(dispatcher.consumers),
                active=dispatcher.active,
            )
            drops = {"msgDropRate": dispatcher.drop_rate, "msgDropCount": dispatcher.dropped}
            stats = subscription_stats(facts) | drops | {"name": subscription.name}
            subscriptions[subscription.name] = stats
    producers = topic.partitions[number].producers
    return _partition_stats([publisher_stats(producer) for producer in producers], subscriptions)


def _partition_stats(publishers: list[Stats], subscriptions: dict[str, Stats]) -> Stats:
    drop_rate = sum(subscription["msgDropRate"] for subscription in subscriptions.values())
    rates = ("msgRateIn", "msgThroughputIn", "msgRateOut", "msgThroughputOut", "averageMsgSize")
    numbers = dict.fromkeys(rates, 0.0) | {"storageSize": 0, "backlogSize": 0}
    clients = {"publishers": publishers, "subscriptions": subscriptions}
    return numbers | clients | {"msgDropRate": drop_rate}


def _name(call: Call) -> PartitionName:
    """Raises Refusal."""
    return names.parse("non-persistent://{tenant}/{namespace}/{topic}".format(**call.request.parts))


async def _existing(call: Call) -> TopicInfo:
    """Raises errors.TopicNotFound, errors.NamespaceNotFound."""
    await call.namespaces.check(call.namespace)
    topic = _name(call).topic
    info = await call.broker.non_persistent.records.find(topic)
    if info is None:
        raise errors.TopicNotFound(f"there is no topic '{topic}'")
    return info


def _count(info: TopicInfo) -> int:
    """The number of partitions as clients count them: 0 if the topic is not partitioned."""
    return info.partitions if info.policies.partitioned else 0


def _numbers(info: TopicInfo, number: int | None) -> Sequence[int]:
    """The partition that a request names, or all. Raises errors.TopicNotFound."""
    if number is None:
        return range(info.partitions)
    if number >= _count(info):
        raise errors.TopicNotFound(f"topic '{info.name}' has {_count(info)} partitions")
    return [number]
