"""Verbs on topics whose messages are only in memory (`/admin/v2/non-persistent`).

Always true: the statistics of a partition come from the broker on which it falls. If that broker
gives no answer, the partition has no clients and no numbers. Rates are 0, except that `msgDropRate`
is the mean since the broker has the partition; `msgDropCount`, which Pulsar lacks, is exact.
"""

import asyncio
import logging
from collections.abc import Iterable
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
from spark_ledger.broker.admin.stats import HERE
from spark_ledger.broker.admin.topics import partitions_in
from spark_ledger.broker.catalog import names_of_partitions
from spark_ledger.broker.log.membership import brokers_alive
from spark_ledger.broker.names import PartitionName
from spark_ledger.broker.nonpersistent.dispatchers import PassingDispatcher
from spark_ledger.broker.nonpersistent.topic import PassingTopic
from spark_ledger.http import HttpFailure

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
    if await records.partitions(name.topic) is not None:
        raise errors.TopicExists(f"there is a topic '{name.topic}' already")
    await records.put(name.topic, count)


async def grow(call: Call) -> None:
    count, current = partitions_in(call)[0], await _existing(call)
    if not current:
        raise HttpRefusal(HTTPStatus.CONFLICT, f"topic {_name(call).topic} is not partitioned")
    if count < current:
        reason = f"topic {_name(call).topic} has {current} partitions, it cannot have only {count}"
        raise HttpRefusal(HTTPStatus.UNPROCESSABLE_ENTITY, reason)
    await call.broker.non_persistent.records.put(_name(call).topic, count)


async def delete_topic(call: Call) -> None:
    """Delete a topic, partitioned or not. Its clients are sent away within some seconds."""
    await _existing(call)
    name = _name(call)
    if not call.is_on("force"):
        used = [s["publishers"] or s["subscriptions"] for s in (await _stats_of_all(call)).values()]
        if any(used):
            reason = f"Topic has active producers/subscriptions: {name.topic} has connected clients"
            raise HttpRefusal(HTTPStatus.PRECONDITION_FAILED, reason)
    await call.broker.non_persistent.records.delete(name.topic)


async def delete_all(call: Call) -> None:
    """Delete the topics of a namespace."""
    records = call.broker.non_persistent.records
    for topic in await records.in_namespace(call.namespace):
        await records.delete(topic)


# -- statistics ------------------------------------------------------------------------------------


async def topic_stats(call: Call) -> Any:
    """The statistics of a topic that is not partitioned, or of one partition."""
    count, number = await _existing(call), _name(call).partition
    if (number is None) == (count > 0) or (number or 0) >= max(1, count):
        raise errors.TopicNotFound(f"topic '{_name(call).topic}' has {count} partitions")
    return await _stats(call, number or 0)


async def partitioned_stats(call: Call) -> Any:
    count, topic = await _existing(call), _name(call).topic
    if not count:
        raise errors.TopicNotFound(f"topic '{topic}' is not partitioned", "Ask for .../stats.")
    by_partition = await _stats_of_all(call)
    whole = merged(by_partition.values())
    for subscription in whole["subscriptions"].values():
        subscription["msgDropCount"] = sum(_drops(by_partition.values(), subscription["name"]))
    named = dict(zip(names_of_partitions(topic, count), by_partition.values(), strict=True))
    is_wanted = call.request.query.get("perPartition", "true").lower() == "true"
    whole["metadata"] = {"partitions": count, "deleted": False}
    return whole | {"partitions": named if is_wanted else {}}


def _drops(parts: Iterable[Stats], name: str) -> list[int]:
    subscriptions = (part["subscriptions"].get(name) for part in parts)
    return [sub["msgDropCount"] for sub in subscriptions if sub is not None]


async def _stats_of_all(call: Call) -> dict[int, Stats]:
    count = await _existing(call)
    numbers = range(max(1, count))
    stats = await asyncio.gather(*(_stats(call, number) for number in numbers))
    return dict(zip(numbers, stats, strict=True))


async def _stats(call: Call, number: int) -> Stats:
    topic, passing = _name(call).topic, call.broker.non_persistent
    served = passing.open.get(topic)
    if served is not None and number in served.partitions:
        return _stats_here(served, number)
    broker, _ = await passing.owner_of(topic, number)
    if broker != call.broker.ownership.broker_id and not call.is_on(HERE):
        registered = (await brokers_alive(call.client.store)).get(broker)
        last = f"-partition-{number}" if await passing.records.partitions(topic) else ""
        path = f"{topic.tenant}/{topic.namespace}/{topic.name}{last}/stats?{HERE}=true"
        try:
            if registered is not None and registered.admin_url:
                url = f"{registered.admin_url}/admin/v2/non-persistent/{path}"
                return dict(await http.ask(url))
        except (HttpFailure, *errors.MALFORMED) as error:
            _log.warning("broker %s gives no statistics of %s: %s", broker, topic, error)
    return _stats_of([], {})


def _stats_here(topic: PassingTopic, number: int) -> Stats:
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
    return _stats_of([publisher_stats(producer) for producer in producers], subscriptions)


def _stats_of(publishers: list[Stats], subscriptions: dict[str, Stats]) -> Stats:
    drop_rate = sum(subscription["msgDropRate"] for subscription in subscriptions.values())
    rates = ("msgRateIn", "msgThroughputIn", "msgRateOut", "msgThroughputOut", "averageMsgSize")
    numbers = dict.fromkeys(rates, 0.0) | {"storageSize": 0, "backlogSize": 0}
    clients = {"publishers": publishers, "subscriptions": subscriptions}
    return numbers | clients | {"msgDropRate": drop_rate}


def _name(call: Call) -> PartitionName:
    """Raises Refusal."""
    return names.parse("non-persistent://{tenant}/{namespace}/{topic}".format(**call.request.parts))


async def _existing(call: Call) -> int:
    """The topic's number of partitions. Raises errors.TopicNotFound, errors.NamespaceNotFound."""
    await call.namespaces.check(call.namespace)
    topic = _name(call).topic
    partitions = await call.broker.non_persistent.records.partitions(topic)
    if partitions is None:
        raise errors.TopicNotFound(f"there is no topic '{topic}'")
    return partitions
