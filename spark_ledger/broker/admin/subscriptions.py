"""Verbs on subscriptions of a topic.

Always true: a subscription is of the whole topic, so it is not made or deleted in one partition.
With the name of a partition a subscription is moved in this partition only. When a subscription is
moved or deleted, its consumers are sent away, and come back by themselves. Its consumers stay only
if the broker that owns the partitions moves the subscription forward. A verb that would change a
subscription of a running Spark query is refused.
"""

from collections.abc import Awaitable, Callable, Mapping
from contextlib import suppress
from functools import partial
from http import HTTPStatus
from typing import Any

from spark_ledger import errors
from spark_ledger.broker import names
from spark_ledger.broker.admin.access import HttpRefusal
from spark_ledger.broker.admin.call import Call
from spark_ledger.broker.admin.stats import bytes_since
from spark_ledger.broker.dispatch.acks import Acks, after_unacknowledged
from spark_ledger.broker.names import PartitionName
from spark_ledger.broker.owner.owned_topic import OwnedTopic
from spark_ledger.broker.wire.commands import Refusal, signed
from spark_ledger.metadata.store_calls import call_each
from spark_ledger.topic.acks.asking import encode_answer
from spark_ledger.topic.log.topics import ListedTopic, TopicInfo
from spark_ledger.topic.subscription.nodes import check_name
from spark_ledger.topic.subscription.records import SubscriptionKind, check_properties
from spark_ledger.topic.subscription.seek_target import CommittedSince, End, SeekTarget
from spark_ledger.topic.upkeep.subscription_moves import SubscriptionMoves

LATEST_LEDGER = 2**63 - 1
EARLIEST_LEDGER = -1


async def subscriptions(call: Call) -> Any:
    info = await call.existing_topic()
    # `unreadable`: subscriptions that cannot be read are left out
    infos = await call.client.subscriptions.list(info.id, unreadable={})
    return [subscription.name for subscription in infos]


async def create_subscription(call: Call) -> None:
    """If the topic does not exist, it is made, if clients may make it."""
    plain = call.json()
    given = properties_of(plain.get("properties") if isinstance(plain, dict) else None)
    check_properties(given)
    check_name(call.request.parts["subscription"])
    position = _position_in(plain)
    if isinstance(position, End) and call.name.partition is None:
        await call.broker.catalog.find(call.name.topic, create=True)
    info, name = await _subscription_of(call)
    await call.client.subscriptions.create(
        *(info.id, name, _target_of(plain, info)),
        kind=SubscriptionKind.CONSUMER,
        properties=given,
    )


async def properties(call: Call) -> Any:
    info, name = await _subscription_of(call)
    return await SubscriptionMoves(call.client, info.id).properties(name)


async def set_properties(call: Call) -> None:
    """The given properties replace all properties."""
    info, name = await _subscription_of(call)
    given = properties_of(call.json())
    check_properties(given)
    await SubscriptionMoves(call.client, info.id).set_properties(name, given)


def properties_of(plain: Any) -> dict[str, str]:
    """The properties in a body; null and an empty list: none. Raises HttpRefusal."""
    if plain in (None, []):
        return {}
    if not isinstance(plain, dict) or not all(isinstance(value, str) for value in plain.values()):
        text = f"properties are an object of names with texts, not {plain!r}"
        raise HttpRefusal(HTTPStatus.BAD_REQUEST, text[:200])
    return plain


async def delete_subscription(call: Call) -> None:
    info, name = await _subscription_of(call)
    if call.is_on("force"):
        await SubscriptionMoves(call.client, info.id).delete(name)
    else:
        await call.client.subscriptions.delete(info.id, name)


# -- of a namespace --------------------------------------------------------------------------------


async def clear_backlogs(call: Call) -> None:
    """Move a subscription in each topic to the end; without a name, all that consumers use."""
    name = call.request.parts.get("subscription")

    async def clear(topic: ListedTopic) -> None:
        names = [] if name is None else [name]
        if name is None:
            infos = await call.client.subscriptions.list(topic.id, unreadable={})
            names = [info.name for info in infos if info.kind is SubscriptionKind.CONSUMER]
        for each in names:
            with suppress(errors.SubscriptionNotFound, errors.TopicDeleted):
                await _clear(call, topic.id, each, _served_whole(call, topic.id, topic.partitions))

    await _in_each_topic(call, clear)


async def unsubscribe(call: Call) -> None:
    """Delete the subscription in each topic that has it."""

    async def delete(topic: ListedTopic) -> None:
        with suppress(errors.SubscriptionNotFound, errors.TopicDeleted):
            await call.client.subscriptions.delete(topic.id, call.request.parts["subscription"])

    await _in_each_topic(call, delete)


async def _in_each_topic(call: Call, act: Callable[[ListedTopic], Awaitable[None]]) -> None:
    """The first error ends the call; topics that were changed before stay changed."""
    await call.check_namespace()
    await call_each(act, await call.client.topics.in_namespace(call.namespace))


# -- moves -----------------------------------------------------------------------------------------


async def skip_all(call: Call) -> None:
    info, name = await call.existing_topic(), call.request.parts["subscription"]
    topic = await _topic_if_owned(call, info)
    await _clear(call, info.id, name, topic, call.name.partition)


async def _clear(
    call: Call, topic_id: str, name: str, topic: OwnedTopic | None, number: int | None = None
) -> None:
    """Move the subscription to the end, in this partition or in all. `topic` as `_topic_if_owned`
    returns it."""
    moves = SubscriptionMoves(call.client, topic_id)
    if topic is None:
        await moves.reset(name, End.LATEST, number)
        return

    async def end_in(topic: OwnedTopic, number: int) -> int:
        return topic.readable_partition(number).end

    await _move_up_here(moves, topic, name, number, end_in)


async def skip(call: Call) -> None:
    info, name = await call.existing_topic(), call.request.parts["subscription"]
    await call.one_partition(info, "Skip messages")
    number, count = call.name.partition or 0, call.number("count")
    moves, topic = SubscriptionMoves(call.client, info.id), await _topic_if_owned(call, info)
    if topic is None:
        await moves.skip(name, count, number)
        return
    await moves.check_no_query(name)
    end = topic.readable_partition(number).end
    new_position = partial(after_unacknowledged, count=count, end=end)
    await topic.subscriptions.move_up(name, number, new_position, durable=True)


async def expire(call: Call) -> None:
    info = await call.existing_topic()
    await _expire(call, info, call.request.parts["subscription"])


async def expire_all(call: Call) -> None:
    """In all subscriptions that consumers use."""
    info = await call.existing_topic()
    for subscription in await call.client.subscriptions.list(info.id, unreadable={}):
        if subscription.kind is SubscriptionKind.CONSUMER:
            with suppress(errors.SubscriptionNotFound):  # it was deleted meanwhile
                await _expire(call, info, subscription.name)


async def _expire(call: Call, info: TopicInfo, name: str) -> None:
    before_ms = call.broker.clock.now_ms() - call.number("seconds") * 1000
    target = CommittedSince(before_ms)

    async def first_kept(topic: OwnedTopic, number: int) -> int:
        return await topic.readable_partition(number).since(before_ms)

    await _move_up(call, info, name, target, first_kept)


async def expire_to_message(call: Call) -> None:
    """The message that the id names expires too."""
    info = await call.existing_topic()
    await call.one_partition(info, "Expire messages at a position")
    target = _target_of(_id_in(call), info, call.name.partition or 0)
    if isinstance(target, Mapping):
        target = {number: offset + 1 for number, offset in target.items()}

    async def offset_in(topic: OwnedTopic, number: int) -> int:
        partition = topic.readable_partition(number)
        if isinstance(target, Mapping):
            return min(target[number], partition.end)
        return partition.end if target is End.LATEST else partition.start

    await _move_up(call, info, call.request.parts["subscription"], target, offset_in)


async def _move_up(
    call: Call,
    info: TopicInfo,
    name: str,
    target: SeekTarget,
    offset_in: Callable[[OwnedTopic, int], Awaitable[int]],
) -> None:
    """Move the subscription forward to the target, in the partition that the call names or in all.
    `offset_in` is what the target means in a partition of this broker."""
    moves, topic = SubscriptionMoves(call.client, info.id), await _topic_if_owned(call, info)
    number = call.name.partition
    if topic is None:
        await moves.expire(name, target, number)
    else:
        await _move_up_here(moves, topic, name, number, offset_in)


async def _move_up_here(
    moves: SubscriptionMoves,
    topic: OwnedTopic,
    name: str,
    number: int | None,
    offset_in: Callable[[OwnedTopic, int], Awaitable[int]],
) -> None:
    """As `_move_up`, at the broker that owns the partitions: the consumers stay."""
    await moves.check_no_query(name)
    for at in list(topic.partitions) if number is None else [number]:
        offset = await offset_in(topic, at)
        await topic.subscriptions.move_up(name, at, partial(_at_least, offset), durable=True)


def _at_least(offset: int, acks: Acks) -> int:
    return max(offset, acks.mark)


async def reset_to_message(call: Call) -> None:
    info, name = await call.existing_topic(), call.request.parts["subscription"]
    number = call.name.partition
    target = _target_of(call.json(), info, number)
    await SubscriptionMoves(call.client, info.id).reset(name, target, number)


async def reset_to_time(call: Call) -> None:
    info, name = await call.existing_topic(), call.request.parts["subscription"]
    target = CommittedSince(call.number("ms"))
    await SubscriptionMoves(call.client, info.id).reset(name, target, call.name.partition)


async def backlog_size(call: Call) -> Any:
    """The bytes of the messages after the message that the id names."""
    info = await call.existing_topic()
    target = _target_of(_id_in(call), info, call.name.partition or 0)
    _, owned = await call.owned(info, "Calculate backlog size")
    offset = owned.log.end if target is End.LATEST else owned.log.start
    if isinstance(target, Mapping):
        offset = target[owned.number] + 1
    return await bytes_since(call.broker, owned, info, offset)


async def acknowledged(call: Call) -> Any:
    """What consumers acknowledged in the partitions of this broker, for queries of Spark."""
    topic_acks = call.broker.cursors.acks_of(call.request.parts["topic_id"])
    name = call.request.query.get("subscription", "")
    return encode_answer([] if topic_acks is None else topic_acks.of_subscription(name))


async def _topic_if_owned(call: Call, info: TopicInfo) -> OwnedTopic | None:
    """The topic, if this broker owns the partition that the call names, or all partitions. Then the
    broker can move a subscription forward: acknowledgements beyond the new position are kept, and
    consumers stay. None: other brokers own partitions, so the caller moves the subscription in the
    metadata store."""
    number = call.name.partition
    if number is not None or info.partitions_noted == 1:
        number = number or 0 if info.policies.partitioned else None
        with suppress(Refusal):  # another broker owns the partition
            owned, _ = await call.broker.partition(PartitionName(info.name, number), create=False)
            return owned if isinstance(owned, OwnedTopic) else None
    return _served_whole(call, info.id, info.partitions_noted)


def _served_whole(call: Call, topic_id: str, partitions: int) -> OwnedTopic | None:
    """The topic, if this broker serves all its partitions now."""
    topic = call.broker.open_topic(topic_id)
    return topic if topic is not None and len(topic.partitions) == partitions else None


async def _subscription_of(call: Call) -> tuple[TopicInfo, str]:
    info = await call.existing_topic()
    if call.name.partition is not None:
        raise HttpRefusal(
            HTTPStatus.NOT_IMPLEMENTED,
            f"a subscription is of all partitions: give the name of topic {info.name}, not of a"
            " partition",
        )
    return info, call.request.parts["subscription"]


def _id_in(call: Call) -> Any:
    """The body. Raises HttpRefusal without a body."""
    plain = call.json()
    if plain is None:
        raise HttpRefusal(HTTPStatus.BAD_REQUEST, "a message id is needed in the body")
    return plain


def _target_of(plain: Any, info: TopicInfo, number: int | None = None) -> SeekTarget:
    """The position of a message id; without an id, the end. `number` is the partition that the
    request names. Raises HttpRefusal."""
    position = _position_in(plain, number)
    if isinstance(position, End):
        return position
    ledger, offsets = position
    if ledger != names.ledger_number(info.id):
        raise HttpRefusal(
            HTTPStatus.PRECONDITION_FAILED,
            f"message id {ledger}:{plain['entryId']} is of another topic than {info.name}"[:200],
        )
    return offsets


def _position_in(plain: Any, number: int | None = None) -> End | tuple[int, dict[int, int]]:
    """As `_target_of`: an end of any topic, or offsets by partition in the topic whose message ids
    have this ledger."""
    if plain is None or plain == "latest":
        return End.LATEST
    if plain == "earliest":
        return End.EARLIEST
    try:
        ledger, entry = signed(int(plain["ledgerId"])), signed(int(plain["entryId"]))
        batch_index = max(0, int(plain.get("batchIndex", 0)))
        partition = max(0, int(plain.get("partitionIndex", 0))) if number is None else number
        after = 1 if plain.get("isExcluded") else 0
    except (*errors.MALFORMED, OverflowError) as error:
        raise HttpRefusal(HTTPStatus.BAD_REQUEST, f"{plain!r} is not a message id") from error
    if ledger == LATEST_LEDGER:
        return End.LATEST
    if ledger == EARLIEST_LEDGER:
        return End.EARLIEST
    return ledger, {partition: entry + batch_index + after}
