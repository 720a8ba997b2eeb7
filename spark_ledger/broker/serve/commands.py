"""The commands of Pulsar's clients: how each is carried out and refused, and which right it needs.

Always true: a feature that is not implemented is refused by NotAllowedError, and the message names
the feature. An error of the topic layer becomes the code after which a client does the right thing.
After ServiceNotReady, for example, the client looks the topic up and tries again; a lookup itself
is refused by another code (`_asked_again`).
"""

import asyncio
from collections.abc import Awaitable, Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from enum import Enum
from typing import Any, Protocol

from spark_ledger import __version__, errors
from spark_ledger.broker import names
from spark_ledger.broker.admin.stats import stats_of_consumer
from spark_ledger.broker.broker import Broker
from spark_ledger.broker.dispatch.acking import AckHandler, ConnectedConsumer
from spark_ledger.broker.dispatch.dispatcher import Consumer, Dispatcher
from spark_ledger.broker.dispatch.policies import KeyShared
from spark_ledger.broker.dispatch.positions import last_and_mark, start_of_reader, target_of_seek
from spark_ledger.broker.dispatch.sharing import UnackedLimits
from spark_ledger.broker.dispatch.subscriptions import SubscribeRequest
from spark_ledger.broker.nonpersistent.topic import PassingTopic
from spark_ledger.broker.owner.owned_topic import OwnedTopic
from spark_ledger.broker.produce.intake import Intake
from spark_ledger.broker.produce.producer import Producer, ProducersLink
from spark_ledger.broker.serve.declared_schemas import (
    check_consumer_schema,
    declared_by_producer,
    declared_schema,
    schema_of_version,
)
from spark_ledger.broker.serve.topic_watches import TopicWatches
from spark_ledger.broker.topic_lists import (
    PatternRefused,
    TopicsPattern,
    check_length,
    topics_hash,
)
from spark_ledger.broker.wire.commands import (
    NO_TRANSACTIONS,
    PROTOCOL_VERSION,
    AccessMode,
    BaseCommand,
    FeatureFlags,
    InitialPosition,
    KeySharedMode,
    LookupType,
    Refusal,
    ServerError,
    SubscriptionType,
    TopicsMode,
    checked,
    command,
    signed,
)
from spark_ledger.broker.wire.frames import encode
from spark_ledger.broker.wire.link import ClientFacts, Link, all_properties
from spark_ledger.metadata.store import StoreUnavailable
from spark_ledger.topic.log.topics import TopicInfo
from spark_ledger.topic.schema.client_schemas import ClientSchema, ClientSchemaType
from spark_ledger.topic.subscription import nodes

_TEXT_MAX = 1000
_CODES: tuple[tuple[type[Exception], ServerError], ...] = (
    (errors.TopicNotFound, ServerError.TOPIC_NOT_FOUND),
    (errors.TopicDeleted, ServerError.TOPIC_NOT_FOUND),
    (errors.NamespaceNotFound, ServerError.TOPIC_NOT_FOUND),
    (errors.TopicTerminated, ServerError.TOPIC_TERMINATED),
    (errors.TopicNameInvalid, ServerError.NOT_ALLOWED),
    (errors.SubscriptionBusy, ServerError.CONSUMER_BUSY),
    (errors.SubscriptionNotFound, ServerError.SUBSCRIPTION_NOT_FOUND),
    (errors.OptionInvalid, ServerError.NOT_ALLOWED),
    (errors.BadConfig, ServerError.NOT_ALLOWED),
    (errors.SchemaIncompatible, ServerError.INCOMPATIBLE_SCHEMA),
    (errors.SchemaUnreadable, ServerError.INCOMPATIBLE_SCHEMA),
    (errors.UnsupportedFormat, ServerError.PERSISTENCE),
    (errors.RowsLost, ServerError.PERSISTENCE),
    (errors.Unauthorized, ServerError.PERSISTENCE),
    (errors.LedgerError, ServerError.SERVICE_NOT_READY),
    (StoreUnavailable, ServerError.SERVICE_NOT_READY),
)


class Caller(Protocol):
    """What commands need of their client."""

    link: Link
    broker: Broker
    intake: Intake
    ack_handler: AckHandler
    topic_watches: TopicWatches
    consumers: dict[int, ConnectedConsumer]
    subscribing: dict[int, int]
    """By consumer id, the request id of the SUBSCRIBE that is being carried out."""

    def set_version(self, version: str) -> None:
        """Note that the client sent CONNECT with this name and version."""

    def facts(self, properties: Any) -> ClientFacts:
        """What statistics show of this client, for a producer or consumer with these
        properties."""

    def forget_consumer(self, consumer: Consumer) -> bool:
        """Take the consumer out of its subscription; returns whether the client had it."""

    def send_consumer_away(self, consumer: Consumer) -> None:
        """End the consumer; the client then looks the topic up again."""


class Right(Enum):
    """The rights that commands need."""

    LOOK_UP = "look up"
    PRODUCE = "produce"
    CONSUME = "consume"


@dataclass(frozen=True, slots=True)
class Request:
    """A command that a task of its own carries out; `carry_out` or `refuse` sends the response."""

    carry_out: Callable[[Caller, Any], Awaitable[None]]
    refuse: Callable[[Caller, Any, Refusal], None]
    right: Right | None


@dataclass(frozen=True, slots=True)
class AtOnce:
    """A command that is carried out before the next command is taken."""

    carry_out: Callable[[Caller, Any], None]
    right: Right | None


def refusal_of(error: Exception) -> Refusal:
    if isinstance(error, Refusal):
        return error
    for kind, code in _CODES:
        if isinstance(error, kind):
            return Refusal(code, str(error)[:_TEXT_MAX])
    return Refusal(ServerError.UNKNOWN, f"a defect of the broker: {error!r}"[:_TEXT_MAX])


def connected(client_version: int, message_bytes_max: int) -> BaseCommand:
    return command(
        "connected",
        server_version=f"Spark Ledger {__version__}",
        protocol_version=min(PROTOCOL_VERSION, client_version),
        max_message_size=message_bytes_max,
        feature_flags=FeatureFlags(
            supports_topic_watchers=True,
            supports_get_partitioned_metadata_without_auto_creation=True,
        ),
    )


def _reply(client: Caller, part: Any, name: str, **fields: Any) -> None:
    """Send the response `name` to the request whose fields are `part`."""
    client.link.send(encode(command(name, request_id=part.request_id, **fields)))


def _refuse_by(
    name: str, code_field: str = "error", message_field: str = "message", **fields: Any
) -> Callable[[Caller, Any, Refusal], None]:
    """A `Request.refuse` that sends the response `name`. Its fields `code_field` and
    `message_field` get the refusal's code and message."""

    def refuse(client: Caller, part: Any, refusal: Refusal) -> None:
        reason = {code_field: refusal.code, message_field: refusal.message}
        _reply(client, part, name, **fields, **reason)

    return refuse


_refuse_by_error = _refuse_by("error")


# -- where topics are ------------------------------------------------------------------------------


@contextmanager
def _asked_again() -> Iterator[None]:
    """For the two lookups. A client whose lookup is refused by ServiceNotReady closes its
    connection, with all producers and consumers on it; after MetadataError it asks again."""
    try:
        yield
    except (errors.LedgerError, StoreUnavailable) as error:
        refusal = refusal_of(error)
        if refusal.code is ServerError.SERVICE_NOT_READY:
            raise Refusal(ServerError.METADATA, refusal.message) from error
        raise


async def _partitioned_metadata(client: Caller, part: Any) -> None:
    create = part.metadata_auto_creation_enabled
    with _asked_again():
        count = await client.broker.partitions_of(names.parse(part.topic), create=create)
    _reply(client, part, "partitioned_metadata_response", partitions=count, response=0)


def check_no_listener(name: str) -> None:
    """Raises Refusal if a client asks for the address of a named listener: brokers have no named
    listeners. By these very words Pulsar's client for C++ sees that it need not try again."""
    if name:
        reason = f"the broker do not have {name} listener"
        raise Refusal(ServerError.SERVICE_NOT_READY, reason)


async def _lookup(client: Caller, part: Any) -> None:
    check_no_listener(part.advertised_listener_name)
    with _asked_again():
        name = names.parse_for_lookup(part.topic)
        url, is_here = await client.broker.lookup(name, authoritative=part.authoritative)
    kind = LookupType.CONNECT if is_here else LookupType.REDIRECT
    fields = {"brokerServiceUrl": url, "response": kind, "authoritative": True}
    _reply(client, part, "lookup_response", **fields)


async def _topics_of_namespace(client: Caller, part: Any) -> None:
    mode = checked(TopicsMode, part.mode, "mode of lists of topics")
    topics: list[str] = []
    with suppress(errors.NamespaceNotFound):  # Pulsar's broker responds with an empty list, too
        if mode is not TopicsMode.NON_PERSISTENT:
            topics += await client.broker.catalog.names_in(part.namespace)
        if mode is not TopicsMode.PERSISTENT:
            topics += await client.broker.non_persistent.names_in(part.namespace)
    pattern = None
    with suppress(PatternRefused):  # then the client filters the list by itself
        pattern = TopicsPattern.parse(part.topics_pattern) if part.topics_pattern else None
    if pattern is not None:
        topics = await client.broker.topic_lists.matching(pattern, topics)
    hash_ = topics_hash(topics)
    changed = hash_ != part.topics_hash
    topics = check_length(topics) if changed else []
    fields = {"topics": topics, "filtered": pattern is not None, "changed": changed}
    _reply(client, part, "topics_of_namespace_response", topics_hash=hash_, **fields)


async def _watch_topic_list(client: Caller, part: Any) -> None:
    matching = await client.topic_watches.open(client.broker.topic_lists, part)
    is_new = matching.hash != part.topics_hash
    fields = {"topic": matching.topics if is_new else [], "topics_hash": matching.hash}
    _reply(client, part, "watch_topic_list_success", watcher_id=part.watcher_id, **fields)


async def _watch_topic_list_close(client: Caller, part: Any) -> None:
    client.topic_watches.close(part.watcher_id)
    _reply(client, part, "success")


# -- producers -------------------------------------------------------------------------------------


async def _producer(client: Caller, part: Any) -> None:
    names.check_name("producer", part.producer_name)
    names.check_name("subscription", part.initial_subscription_name)
    if part.initial_subscription_name:
        nodes.check_name(part.initial_subscription_name)
    mode = checked(AccessMode, part.producer_access_mode, "access mode")
    if part.txn_enabled:
        raise Refusal(ServerError.NOT_ALLOWED, NO_TRANSACTIONS)
    topic, partition = await client.broker.partition(names.parse(part.topic), create=True)
    if isinstance(topic, OwnedTopic):
        await topic.backlogs.check(partition.number)
    info = await _with_policies_of_now(client.broker, topic)
    partition.send_limits.change(info.policies, asyncio.get_running_loop().time())
    declared = await declared_by_producer(client.broker, info, part)
    if isinstance(topic, OwnedTopic) and part.initial_subscription_name:
        await topic.subscriptions.make(part.initial_subscription_name)
    existing = client.intake.producers.get(part.producer_id)
    if existing is not None:
        client.intake.remove(existing)
    producer = Producer(
        client.intake,
        part.producer_id,
        part.request_id,
        part.producer_name or client.broker.new_name(),
        mode,
        part.epoch,
        part.topic_epoch,
        partition,
        partition.remove_producer,
        declared,
    )
    producer.client = replace(client.facts(part.metadata), encrypts=part.encrypted)
    await _probe_clients(other.connection for other in partition.producers_before(producer))
    may_send = partition.add_producer(producer, info.policies.producers_max)
    if not client.link.open:
        partition.remove_producer(producer)
        return
    client.intake.add(producer)
    if may_send:
        await partition.await_turn(producer)
    else:
        _reply(client, part, "producer_success", producer_name=producer.name, producer_ready=False)


async def _with_policies_of_now(broker: Broker, topic: OwnedTopic | PassingTopic) -> TopicInfo:
    """The topic's info with the policies that are set now: `topic.info` keeps the policies with
    which the topic was opened. The limits of the present policies hold for the client that
    comes."""
    info = topic.info
    if isinstance(topic, OwnedTopic):
        info = await broker.client.topics.again(info) or info
    sharing = topic.subscriptions.sharing
    sharing.limits = UnackedLimits.of(broker.settings, info.policies)
    sharing.delays, sharing.rates.policies = info.policies.delayed_delivery, info.policies
    topic.subscriptions.policies = info.policies
    return info


async def _probe_clients(connections: Iterable[ProducersLink | Link]) -> None:
    """Ask clients whether they live, before another client is refused because of them. A client
    that hangs loses its connection."""
    await asyncio.gather(*(connection.answers() for connection in dict.fromkeys(connections)))


async def _close_producer(client: Caller, part: Any) -> None:
    existing = client.intake.producers.get(part.producer_id)
    if existing is not None:
        client.intake.remove(existing)
        await existing.partition.writer.until_decided(lambda producer: producer is existing)
    _reply(client, part, "success")


# -- consumers -------------------------------------------------------------------------------------


async def _subscribe(client: Caller, part: Any) -> None:
    """Make the consumer. If the client has this consumer already, SUBSCRIBE only succeeds."""
    if part.consumer_id in client.subscribing:
        message = f"consumer {part.consumer_id} is being made: wait, then subscribe again"
        raise Refusal(ServerError.SERVICE_NOT_READY, message)
    if part.consumer_id not in client.consumers:
        client.subscribing[part.consumer_id] = part.request_id
        try:
            await _make_consumer(client, part)
        finally:
            if client.subscribing.get(part.consumer_id) == part.request_id:
                del client.subscribing[part.consumer_id]
    _reply(client, part, "success")


async def _make_consumer(client: Caller, part: Any) -> None:
    if not part.subscription:
        raise Refusal(ServerError.PRODUCER_BUSY, "the subscription name is empty: give a name")
    names.check_name("subscription", part.subscription)
    names.check_name("consumer", part.consumer_name)
    if part.durable:
        nodes.check_name(part.subscription)
    declared = await declared_schema(part)
    request = _subscribe_request(part)
    create = part.force_topic_creation
    topic, owned = await client.broker.partition(names.parse(part.topic), create=create)
    partition, subscriptions = owned.log, topic.subscriptions
    info = await _with_policies_of_now(client.broker, topic)
    if info.policies.subscribe_rate is not None:
        host = client.link.address.rpartition(":")[0]
        asker = (host, part.consumer_name, part.consumer_id, part.topic)
        now_s = asyncio.get_running_loop().time()
        subscriptions.sharing.subscribes.admit(asker, info.policies, now_s)
    if declared is not None:
        await check_consumer_schema(client.broker, info, partition, declared)

    async def start() -> int:
        return await start_of_reader(partition, part, client.broker.clock.now_ms())

    def make(dispatcher: Dispatcher) -> Consumer:
        return Consumer(
            client.link,
            part.consumer_id,
            part.consumer_name or client.broker.new_name(),
            part.priority_level,
            dispatcher,
            client.send_consumer_away,
            part.consumer_epoch if part.HasField("consumer_epoch") else None,
        )

    rivals = subscriptions.rivals(part.subscription, request.kind, partition.number)
    await _probe_clients(other.link for other in rivals if other.link is not client.link)
    consumer = await subscriptions.subscribe(
        partition,
        part.subscription,
        request,
        durable=part.durable and isinstance(topic, OwnedTopic),
        start=start,
        make=make,
        earliest=part.initialPosition == InitialPosition.EARLIEST,
    )
    is_awaited = client.subscribing.get(part.consumer_id) == part.request_id
    if not (is_awaited and client.link.open):
        subscriptions.leave(part.subscription, consumer)
        message = f"consumer {part.consumer_id} was closed before it was made"
        raise Refusal(ServerError.SERVICE_NOT_READY, message)
    consumer.client = client.facts(part.metadata)
    client.consumers[part.consumer_id] = ConnectedConsumer(
        consumer, subscriptions, part.subscription
    )


def _subscribe_request(part: Any) -> SubscribeRequest:
    """How the client wants to consume. Raises Refusal, errors.OptionInvalid."""
    kind = checked(SubscriptionType, part.subType, "type of subscriptions")
    keys, meta = None, part.keySharedMeta
    if kind is SubscriptionType.KEY_SHARED:
        mode = checked(KeySharedMode, meta.keySharedMode, "mode of Key_Shared subscriptions")
        keys = KeyShared(mode is KeySharedMode.STICKY, not meta.allowOutOfOrderDelivery)
    ranges = tuple((given.start, given.end) for given in meta.hashRanges)
    request = SubscribeRequest(kind, keys, ranges, all_properties(part.subscription_properties))
    request.check()
    return request


def _connected_consumer(client: Caller, part: Any) -> ConnectedConsumer:
    consuming = client.consumers.get(part.consumer_id)
    if consuming is None:
        raise Refusal(ServerError.CONSUMER_NOT_FOUND, f"there is no consumer {part.consumer_id}")
    return consuming


async def _close_consumer(client: Caller, part: Any) -> None:
    """If a SUBSCRIBE is still making the consumer, that SUBSCRIBE gives the consumer up."""
    client.subscribing.pop(part.consumer_id, None)
    consuming = client.consumers.get(part.consumer_id)
    if consuming is not None:
        consumer, subscriptions, name = consuming
        client.forget_consumer(consumer)
        await subscriptions.wait_released(name)  # so that a query may use the subscription
    _reply(client, part, "success")


async def _unsubscribe(client: Caller, part: Any) -> None:
    consumer, subscriptions, name = _connected_consumer(client, part)
    await subscriptions.unsubscribe(name, consumer, force=part.force)
    client.forget_consumer(consumer)
    _reply(client, part, "success")


async def _seek(client: Caller, part: Any) -> None:
    consumer, subscriptions, name = _connected_consumer(client, part)
    if not (part.HasField("message_id") or part.HasField("message_publish_time")):
        raise Refusal(ServerError.METADATA, "SEEK names neither a message id nor a publish time")
    offset = await target_of_seek(consumer.dispatcher.partition, part)
    await subscriptions.seek(name, consumer.dispatcher, offset)
    _reply(client, part, "success")


async def _get_last_message_id(client: Caller, part: Any) -> None:
    last_id, mark = await last_and_mark(_connected_consumer(client, part).consumer.dispatcher)
    fields = {"last_message_id": last_id, "consumer_mark_delete_position": mark}
    _reply(client, part, "last_message_id_response", **fields)


_CONSUMER_FIELDS = (
    *("msgRateOut", "msgThroughputOut", "msgRateRedeliver", "consumerName", "unackedMessages"),
    *("blockedConsumerOnUnackedMsgs", "address", "connectedSince"),
)


async def _consumer_stats(client: Caller, part: Any) -> None:
    consumer, subscriptions, name = _connected_consumer(client, part)
    stats = stats_of_consumer(subscriptions.named(name), consumer)
    fields = {field: stats[field] for field in _CONSUMER_FIELDS}
    fields["availablePermits"] = max(0, stats["availablePermits"])
    fields |= {field: stats["subscription"][field] for field in ("type", "msgBacklog")}
    _reply(client, part, "consumer_stats_response", **fields)


# -- schemas ---------------------------------------------------------------------------------------


async def _get_schema(client: Caller, part: Any) -> None:
    """Answer with the schema of the requested version; without a version, with the latest schema.
    An empty version means the schema of bytes: messages from the client for Go have it."""
    topic = await client.broker.find(names.parse(part.topic).topic)
    version, schema = part.schema_version, ClientSchema(ClientSchemaType.NONE)
    if version or not part.HasField("schema_version"):
        version, schema = await schema_of_version(client.broker, topic, version)
    response = command("get_schema_response", request_id=part.request_id, schema_version=version)
    fields = response.get_schema_response.schema
    fields.name, fields.type, fields.schema_data = topic.name.name, schema.kind, schema.data
    for key, value in schema.properties.items():
        fields.properties.add(key=key.encode(), value=value.encode())
    client.link.send(encode(response))


async def _get_or_create_schema(client: Caller, part: Any) -> None:
    topic = await client.broker.find(names.parse(part.topic).topic)
    declared = await declared_by_producer(client.broker, topic, part)
    version = declared.schema_version
    _reply(client, part, "get_or_create_schema_response", schema_version=version)


# -- carried out at once --------------------------------------------------------------------------


def _connect(client: Caller, part: Any) -> None:
    client.set_version(part.client_version)
    response = connected(part.protocol_version, client.broker.message_bytes_max)
    client.link.send(encode(response))


def _ping(client: Caller, _: Any) -> None:
    client.link.send(encode(command("pong")))


def _pong(client: Caller, _: Any) -> None:
    """Nothing to do: the connection has noted already that the client lives."""


def _flow(client: Caller, part: Any) -> None:
    if part.consumer_id in client.consumers:
        consumer = client.consumers[part.consumer_id].consumer
        consumer.asked_ms = client.broker.clock.now_ms()
        consumer.dispatcher.flow(consumer, part.messagePermits)


def _ack(client: Caller, part: Any) -> None:
    client.ack_handler.add(part)


def _redeliver(client: Caller, part: Any) -> None:
    if part.consumer_id in client.consumers:
        epoch = part.consumer_epoch if part.HasField("consumer_epoch") else None
        consumer = client.consumers[part.consumer_id].consumer
        dispatcher, ids = consumer.dispatcher, part.message_ids
        entries = [
            signed(id_.entryId) for id_ in ids if id_.ledgerId == dispatcher.partition.ledger
        ]
        if entries or not ids:  # without ids all messages are sent again
            dispatcher.redeliver(consumer, epoch, entries)


# -- the table -------------------------------------------------------------------------------------


def _not_implemented(what: str) -> Request:
    async def refuse(client: Caller, part: Any) -> None:
        raise Refusal(ServerError.NOT_ALLOWED, f"{what} are not implemented yet")

    return Request(refuse, _refuse_by_error, right=None)


_REFUSE_PARTITIONS = _refuse_by("partitioned_metadata_response", response=1)
_REFUSE_LOOKUP = _refuse_by("lookup_response", response=LookupType.FAILED)
_REASON_FIELDS = "error_code", "error_message"
_REFUSE_SCHEMA = _refuse_by("get_schema_response", *_REASON_FIELDS)
_REFUSE_NEW_SCHEMA = _refuse_by("get_or_create_schema_response", *_REASON_FIELDS)
_REFUSE_STATS = _refuse_by("consumer_stats_response", *_REASON_FIELDS)
COMMANDS: dict[str, Request | AtOnce] = {
    "connect": AtOnce(_connect, right=None),
    "ping": AtOnce(_ping, right=None),
    "pong": AtOnce(_pong, right=None),
    "partitioned_metadata": Request(_partitioned_metadata, _REFUSE_PARTITIONS, Right.LOOK_UP),
    "lookup": Request(_lookup, _REFUSE_LOOKUP, Right.LOOK_UP),
    "topics_of_namespace": Request(_topics_of_namespace, _refuse_by_error, Right.LOOK_UP),
    "watch_topic_list": Request(_watch_topic_list, _refuse_by_error, Right.LOOK_UP),
    "watch_topic_list_close": Request(_watch_topic_list_close, _refuse_by_error, right=None),
    "producer": Request(_producer, _refuse_by_error, Right.PRODUCE),
    "close_producer": Request(_close_producer, _refuse_by_error, right=None),
    "subscribe": Request(_subscribe, _refuse_by_error, Right.CONSUME),
    "close_consumer": Request(_close_consumer, _refuse_by_error, right=None),
    "unsubscribe": Request(_unsubscribe, _refuse_by_error, Right.CONSUME),
    "seek": Request(_seek, _refuse_by_error, Right.CONSUME),
    "get_last_message_id": Request(_get_last_message_id, _refuse_by_error, Right.CONSUME),
    "flow": AtOnce(_flow, Right.CONSUME),
    "ack": AtOnce(_ack, Right.CONSUME),
    "redeliver": AtOnce(_redeliver, Right.CONSUME),
    "get_schema": Request(_get_schema, _REFUSE_SCHEMA, Right.LOOK_UP),
    "get_or_create_schema": Request(_get_or_create_schema, _REFUSE_NEW_SCHEMA, Right.PRODUCE),
    "consumer_stats": Request(_consumer_stats, _REFUSE_STATS, Right.CONSUME),
    "new_txn": _not_implemented("transactions"),
    "tc_client_connect": _not_implemented("transactions"),
}
"""The commands that a client may send, except SEND, which brings batches (produce/intake.py).
`right` is the right that a command needs; no code checks rights yet."""
