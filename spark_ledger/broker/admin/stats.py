"""Statistics of a topic's clients and subscriptions, as Pulsar's JSON.

Always true: a partition's statistics come from its owner. If no broker has the partition, or its
owner does not answer, the statistics come from the records in the store: then no client is shown,
and positions are the durable ones. Rates are 0: they are not measured. Brokers ask each other by
requests that any client may send.
"""

import asyncio
import json
import logging
from collections.abc import AsyncIterator, Mapping, Set
from dataclasses import replace
from http import HTTPStatus
from typing import Any

from pyroaring import BitMap64

from spark_ledger import errors, http
from spark_ledger.broker.admin.access import HttpRefusal
from spark_ledger.broker.admin.call import WHOLE_NAMESPACE, Call
from spark_ledger.broker.admin.facts import (
    PartitionSize,
    SubscriptionFacts,
    internal_info,
    internal_stats,
    merged,
    partition_stats,
    publisher_stats,
    subscription_stats,
    without,
)
from spark_ledger.broker.broker import Broker
from spark_ledger.broker.dispatch.dispatcher import Consumer
from spark_ledger.broker.dispatch.shared_dispatcher import SharedDispatcher
from spark_ledger.broker.dispatch.subscriptions import Subscription
from spark_ledger.broker.log.membership import brokers_alive
from spark_ledger.broker.names import ledger_number
from spark_ledger.broker.owner.owned_partition import OwnedPartition
from spark_ledger.broker.owner.owned_topic import OwnedTopic
from spark_ledger.http import HttpFailure, HttpResponse
from spark_ledger.topic.acks.sets import first_ranges
from spark_ledger.topic.log.state import PartitionState, TopicState
from spark_ledger.topic.log.topics import TopicInfo
from spark_ledger.topic.read.live import EMPTY_END, LiveEnd, ends_of
from spark_ledger.topic.subscription.lag import PartitionLag, partition_lag
from spark_ledger.topic.subscription.listing import SubscriptionInfo
from spark_ledger.topic.subscription.records import NO_PROPERTIES

HERE = "here"
"""With this flag in a request, the broker answers only for its own partitions."""
PARTITIONS_AT_ONCE = 16
"""So many partitions are encoded in one step of the loop; each takes some 60 us and 3 KB."""
ACKED_RANGES_MAX = 100
"""How many ranges of acknowledged messages are shown of a subscription."""
_log = logging.getLogger(__name__)

Stats = dict[str, Any]


async def topic_stats(call: Call) -> Any:
    """The statistics of a topic that is not partitioned, or of one partition."""
    info, number = await call.existing_topic(), call.name.partition
    if number is None and info.policies.partitioned:
        raise errors.TopicNotFound(
            f"topic '{info.name}' is partitioned", "Ask for .../partitioned-stats."
        )
    by_partition = await _stats_of_all(call.broker, info)
    return _asked_for(call, by_partition[number or 0])


def _asked_for(call: Call, stats: Stats) -> Stats:
    return without(
        stats,
        publishers=call.is_on("excludePublishers"),
        consumers=call.is_on("excludeConsumers"),
        times=not call.is_on("getEarliestTimeInBacklog"),
    )


async def partitioned_stats(call: Call) -> Any:
    if call.is_on(HERE):
        info = await call.existing_topic()
        return {"partitions": _named(info, await _stats_here(call.broker, info))}
    info = await _partitioned(call)
    by_partition = await _stats_of_all(call.broker, info)
    whole = _asked_for(call, merged(by_partition.values()))
    whole["metadata"] = _metadata(by_partition)
    whole["partitions"] = {}
    if call.request.query.get("perPartition", "true").lower() == "true":
        shown = {number: _asked_for(call, part) for number, part in by_partition.items()}
        whole["partitions"] = _named(info, shown)
    return whole


async def _partitioned(call: Call) -> TopicInfo:
    info = await call.existing_topic()
    if not info.policies.partitioned or call.name.partition is not None:
        raise errors.TopicNotFound(f"topic '{info.name}' is not partitioned", "Ask for .../stats.")
    return info


def _metadata(by_partition: Mapping[int, Stats]) -> Stats:
    return {"partitions": len(by_partition), "deleted": False}


async def internal(call: Call) -> Any:
    info = await call.existing_topic()
    await call.one_partition(info, "Get internal stats")
    return (await _internal_of_all(call.broker, info))[call.name.partition or 0]


async def partitioned_internal(call: Call) -> Any:
    info = await _partitioned(call)
    by_partition = await _internal_of_all(call.broker, info)
    return {"metadata": _metadata(by_partition), "partitions": _named(info, by_partition)}


async def _internal_of_all(broker: Broker, info: TopicInfo) -> dict[int, Stats]:
    ledger = ledger_number(info.id)
    by_partition = await _stats_of_all(broker, info)
    terminated = (await broker.client.log(info.id).fold()).terminated
    return {
        number: internal_stats(ledger, stats, terminated=terminated)
        for number, stats in by_partition.items()
    }


async def internal_info_of(call: Call) -> Any:
    info, number = await call.existing_topic(), call.name.partition
    by_partition = await _stats_of_all(call.broker, info)
    ledger = ledger_number(info.id)
    shown = {at: internal_info(ledger, stats) for at, stats in by_partition.items()}
    if number is None and info.policies.partitioned:
        return {"version": 0, "partitions": _named(info, shown)}
    return shown[number or 0]


async def of_this_broker(call: Call) -> Any:
    """The statistics of every partition of this broker, from its memory alone: without the
    subscriptions that no client uses here, and without the bytes of open ledgers. The response is
    sent while it is made, so that no step is long and memory does not have the whole response."""
    return HttpResponse(_in_pieces(call))


async def _in_pieces(call: Call) -> AsyncIterator[bytes]:
    by_namespace: dict[str, list[tuple[OwnedTopic, OwnedPartition]]] = {}
    for topic in call.broker.open_topics():
        owned = by_namespace.setdefault(f"{topic.info.name.tenant}/{topic.info.name.namespace}", [])
        owned += [(topic, partition) for partition in topic.partitions.values()]
    now_ms, opening = call.broker.clock.now_ms(), "{"
    for namespace, owned in by_namespace.items():
        name = json.dumps(namespace)
        yield f'{opening}{name}:{{"{WHOLE_NAMESPACE}":{{"persistent":'.encode()
        opening = "{"
        for first in range(0, len(owned), PARTITIONS_AT_ONCE):
            shown = {
                _partition_name(topic.info, partition.number): _asked_for(
                    call, _stats_from_memory(topic, partition, now_ms)
                )
                for topic, partition in owned[first : first + PARTITIONS_AT_ONCE]
                if topic.partitions.get(partition.number) is partition
            }
            if shown:
                yield (opening + json.dumps(shown)[1:-1]).encode()
                opening = ","
            await asyncio.sleep(0)
        yield b"}}}" if opening == "," else b"{}}}"
        opening = ","
    yield b"}" if by_namespace else b"{}"


def _stats_from_memory(topic: OwnedTopic, partition: OwnedPartition, now_ms: int) -> Stats:
    end = partition.log.open_end
    rows = 0 if end.live is None else end.end - end.live.base
    live = LiveEnd(last_entry=end.last_entry, rows=rows)
    return _stats_of_owned(topic, partition, {}, live, now_ms)


def _partition_name(info: TopicInfo, number: int) -> str:
    partitioned = info.policies.partitioned
    return f"{info.name.full}-partition-{number}" if partitioned else info.name.full


async def bytes_since(broker: Broker, owned: OwnedPartition, info: TopicInfo, offset: int) -> int:
    """The bytes of the partition's rows from the offset on."""
    state = await broker.client.log(info.id).fold()
    live_ends = await _live_ends(broker, state, [state.partitions[owned.number]])
    live = live_ends.get(owned.number, EMPTY_END)
    return _Sizes(owned.log.held, live, owned.log.end, now_ms=0).lag(offset).bytes


def stats_of_consumer(subscription: Subscription, consumer: Consumer) -> Stats:
    """The statistics of a consumer. Under "subscription" are those of its subscription in the
    consumer's partition; there the offsets of earlier chunks in the open ledger count as
    backlog."""
    partition = consumer.dispatcher.partition
    sizes = _Sizes(partition.held, EMPTY_END, partition.end, now_ms=0)
    stats = _stats_of_used(sizes, subscription, partition.number, NO_PROPERTIES)
    own: Stats = stats["consumers"][consumer.dispatcher.consumers.index(consumer)]
    return own | {"subscription": stats}


async def is_in_use(broker: Broker, info: TopicInfo) -> bool:
    """Whether a producer or a consumer of the topic is connected at any broker. Raises HttpRefusal
    if a broker that has a partition cannot be asked."""
    stats, silent = await _stats_from_owners(broker, info)
    if silent:
        raise HttpRefusal(
            HTTPStatus.SERVICE_UNAVAILABLE,
            f"broker {silent[0]} cannot be asked which clients topic {info.name} has: try again,"
            " or give force=true",
        )
    return any(
        part["publishers"] or any(sub["consumers"] for sub in part["subscriptions"].values())
        for part in stats.values()
    )


def _named(info: TopicInfo, by_partition: Mapping[int, Stats]) -> dict[str, Stats]:
    return {f"{info.name.full}-partition-{number}": part for number, part in by_partition.items()}


async def _stats_of_all(broker: Broker, info: TopicInfo) -> dict[int, Stats]:
    """The statistics of every partition: from its owner, else from the records."""
    state = await broker.client.log(info.id).fold(fresh=True)
    stats, _ = await _stats_from_owners(broker, info)
    others = [partition for partition in state.partitions if partition.number not in stats]
    now_ms = broker.clock.now_ms()
    if others:
        durable = await _durable_subscriptions(broker, info)
        live_ends = await _live_ends(broker, state, others)
        for partition in others:
            live = live_ends.get(partition.number, EMPTY_END)
            end = partition.end_offset + live.rows
            sizes = _Sizes(partition, live, end, now_ms)
            subscriptions = {
                name: _stats_from_records(sizes, subscription)
                for name, subscription in durable.items()
            }
            stats[partition.number] = partition_stats(info, sizes.whole, [], subscriptions, now_ms)
    return dict(sorted(stats.items()))


async def _stats_from_owners(broker: Broker, info: TopicInfo) -> tuple[dict[int, Stats], list[str]]:
    """The statistics from the owners of the topic's partitions, and the ids of owners that gave no
    answer."""
    owners = await broker.ownership.owners(info.id, fresh=True)
    others = {owner.broker for owner in owners.by_partition.values()} - {broker.id}
    registered = await brokers_alive(broker.client.store) if others else {}
    asked = [id_ for id_ in sorted(others) if id_ in registered]
    answers = await asyncio.gather(
        _stats_here(broker, info),
        *(_stats_from_broker(registered[id_].admin_url, info) for id_ in asked),
    )
    stats: dict[int, Stats] = {}
    for answer in answers:
        stats |= answer or {}
    silent = [id_ for id_, answer in zip(asked, answers[1:], strict=True) if answer is None]
    return stats, silent


async def ask_other_owners(broker: Broker, info: TopicInfo, path: str, method: str) -> None:
    """Send a request to each other broker that has a partition of the topic. Raises HttpRefusal if
    a broker does not carry the request out."""
    owners = await broker.ownership.owners(info.id, fresh=True)
    others = {owner.broker for owner in owners.by_partition.values()} - {broker.id}
    await ask_brokers(broker, others, path, method)


async def ask_brokers(broker: Broker, others: Set[str], path: str, method: str) -> None:
    """As `ask_other_owners`, those of these brokers that live."""
    registered = await brokers_alive(broker.client.store) if others else {}
    for id_ in sorted(others & registered.keys()):
        try:
            await http.ask(f"{registered[id_].admin_url}{path}", method)
        except HttpFailure as error:
            message = f"broker {id_} has not carried out {method} {path}: {error}"
            raise HttpRefusal(HTTPStatus.SERVICE_UNAVAILABLE, message) from error


async def _stats_from_broker(admin_url: str, info: TopicInfo) -> dict[int, Stats] | None:
    name = info.name
    path = f"admin/v2/persistent/{name.tenant}/{name.namespace}/{name.name}/partitioned-stats"
    if not admin_url:
        return None  # the broker is of a version that does not answer this request
    try:
        plain = await http.ask(f"{admin_url}/{path}?{HERE}=true")
        return {int(key.rpartition("-")[2]): part for key, part in plain["partitions"].items()}
    except (HttpFailure, *errors.MALFORMED) as error:
        _log.warning("the broker at %s gives no statistics of %s: %s", admin_url, name, error)
        return None


# -- at this broker --------------------------------------------------------------------------------


async def _stats_here(broker: Broker, info: TopicInfo) -> dict[int, Stats]:
    topic = broker.open_topic(info.id)
    owned = [] if topic is None else list(topic.partitions.values())
    if topic is None or not owned:
        return {}
    state, durable = topic.state, await _durable_subscriptions(broker, info)
    states = [state.partitions[partition.number] for partition in owned]
    live_ends = await _live_ends(broker, state, states)
    now_ms = broker.clock.now_ms()
    return {
        partition.number: _stats_of_owned(
            topic, partition, durable, live_ends.get(partition.number, EMPTY_END), now_ms
        )
        for partition in owned
    }


def _stats_of_owned(
    topic: OwnedTopic,
    partition: OwnedPartition,
    durable: Mapping[str, SubscriptionInfo],
    live: LiveEnd,
    now_ms: int,
) -> Stats:
    sizes = _Sizes(partition.log.held, live, partition.log.end, now_ms)
    subscriptions = {name: _stats_from_records(sizes, info) for name, info in durable.items()}
    for subscription in topic.subscriptions.used_here():
        if subscription.has_dispatcher(partition.number):
            name, info = subscription.name, durable.get(subscription.name)
            properties = NO_PROPERTIES if info is None else info.properties
            subscriptions[name] = _stats_of_used(sizes, subscription, partition.number, properties)
    publishers = [publisher_stats(producer) for producer in partition.producers]
    return partition_stats(topic.info, sizes.whole, publishers, subscriptions, now_ms)


def _stats_of_used(
    sizes: "_Sizes", subscription: Subscription, number: int, properties: Mapping[str, str]
) -> Stats:
    dispatcher = subscription.dispatcher_of(number)
    assert dispatcher is not None, "the caller has checked this"
    acks = dispatcher.acks
    lag = sizes.lag(acks.mark)
    acknowledged = max(0, lag.end - lag.position) - acks.missing_count(acks.mark, lag.end)
    unacked = acks.missing_count(acks.mark, dispatcher.position)
    facts = SubscriptionFacts(
        type=subscription.kind.name if dispatcher.consumers else "None",
        is_durable=subscription.durable,
        backlog=max(0, lag.rows - acknowledged),
        backlog_bytes=lag.bytes,
        unacked=unacked,
        position=acks.mark,
        acked=tuple(first_ranges(acks.rows, ACKED_RANGES_MAX)),
        since_ms=sizes.since_ms(lag),
        consumers=tuple(dispatcher.consumers),
        active=dispatcher.active,
        pause=dispatcher.pause.reason,
        properties=properties,
    )
    if isinstance(dispatcher, SharedDispatcher):
        sharing, held = dispatcher.sharing, dispatcher.held
        facts = replace(
            facts,
            unacked=sharing.unacked.messages,
            redelivered=len(sharing.sent.redeliveries),
            delayed=len(held.rows) + len(held.due),
            is_blocked=sharing.unacked.is_blocked,
        )
    return subscription_stats(facts)


def _stats_from_records(sizes: "_Sizes", subscription: SubscriptionInfo) -> Stats:
    number = sizes.held.number
    acked = subscription.acked.get(number, BitMap64())
    lag = sizes.lag(subscription.positions.get(number, sizes.held.start_offset))
    facts = SubscriptionFacts(
        type="None",
        is_durable=True,
        backlog=max(0, lag.rows - len(acked)),
        backlog_bytes=lag.bytes,
        position=lag.position,
        acked=tuple(first_ranges(acked, ACKED_RANGES_MAX)),
        since_ms=sizes.since_ms(lag),
        properties=subscription.properties,
    )
    return subscription_stats(facts)


class _Sizes:
    """Rows and bytes of a partition. `end`: one past its last row; `live`: the confirmed end of its
    live segment."""

    def __init__(self, held: PartitionState, live: LiveEnd, end: int, now_ms: int) -> None:
        self.held = held
        self._live, self._end, self._now_ms = live, end, now_ms

    def lag(self, position: int) -> PartitionLag:
        return partition_lag(self.held, position, self._end, self._live, self._now_ms)

    @property
    def whole(self) -> PartitionSize:
        start = self.held.start_offset
        lag = self.lag(start)
        last_ms = max((interval.last_ms for interval in self.held.intervals.last()), default=0)
        return PartitionSize(lag.rows, lag.bytes, start, lag.end, self._live.last_ms or last_ms)

    def since_ms(self, lag: PartitionLag) -> int:
        """The time of the first row of the lag; 0: there is no such row."""
        return self._now_ms - lag.millis if lag.rows else 0


async def _durable_subscriptions(broker: Broker, info: TopicInfo) -> dict[str, SubscriptionInfo]:
    unreadable: dict[str, errors.LedgerError] = {}
    infos = await broker.client.subscriptions.list(info.id, exact=True, unreadable=unreadable)
    return {subscription.name: subscription for subscription in infos}


async def _live_ends(
    broker: Broker, state: TopicState, held: list[PartitionState]
) -> dict[int, LiveEnd]:
    """The ends of live segments, by partition; an end that cannot be read is left out."""
    unreadable: dict[int, errors.LedgerError] = {}
    numbers = [partition.number for partition in held]
    ends = await ends_of(broker.client.ledgers, state, numbers, unreadable)
    for number, error in unreadable.items():
        _log.warning(
            "the bytes of the live segment of partition %d are not known: %s", number, error
        )
    return ends
