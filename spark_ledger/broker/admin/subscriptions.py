"""Verbs on subscriptions of a topic.

Always true: a subscription is of the whole topic, so a verb on one partition is refused. When a
subscription is moved or deleted, its consumers are sent away, and come back by themselves. Its
consumers stay only if the broker that owns the whole topic moves the subscription forward. A verb
that would change a subscription of a running Spark query is refused.
"""

from contextlib import suppress
from functools import partial
from http import HTTPStatus
from typing import Any

from spark_ledger import errors
from spark_ledger.broker import names
from spark_ledger.broker.admin.access import HttpRefusal
from spark_ledger.broker.admin.call import Call
from spark_ledger.broker.dispatch.acks import Acks, after_unacknowledged
from spark_ledger.broker.names import PartitionName
from spark_ledger.broker.owner.owned_topic import OwnedTopic
from spark_ledger.broker.wire.commands import Refusal, signed
from spark_ledger.topic.acks.asking import encode_answer
from spark_ledger.topic.log.topics import TopicInfo
from spark_ledger.topic.subscription.records import SubscriptionKind, check_properties
from spark_ledger.topic.subscription.seek_target import CommittedSince, End, SeekTarget
from spark_ledger.topic.upkeep.subscription_moves import SubscriptionMoves

LATEST_LEDGER = 2**63 - 1
EARLIEST_LEDGER = -1
DIGITS_MAX = 15


async def subscriptions(call: Call) -> Any:
    info = await call.existing_topic()
    # `unreadable`: subscriptions that cannot be read are left out
    infos = await call.client.subscriptions.list(info.id, unreadable={})
    return [subscription.name for subscription in infos]


async def create_subscription(call: Call) -> None:
    info, name = await _subscription_of(call)
    plain = call.json()
    given = plain.get("properties") if isinstance(plain, dict) else None
    await call.client.subscriptions.create(
        *(info.id, name, _target_of(plain, info)),
        kind=SubscriptionKind.CONSUMER,
        properties=_properties_of(given or {}),
    )


async def properties(call: Call) -> Any:
    info, name = await _subscription_of(call)
    return await SubscriptionMoves(call.client, info.id).properties(name)


async def set_properties(call: Call) -> None:
    """The given properties replace all properties."""
    info, name = await _subscription_of(call)
    given = _properties_of(call.json() or {})
    await SubscriptionMoves(call.client, info.id).set_properties(name, given)


def _properties_of(plain: Any) -> dict[str, str]:
    """Raises HttpRefusal, errors.OptionInvalid."""
    if not isinstance(plain, dict) or not all(isinstance(value, str) for value in plain.values()):
        text = f"properties are an object of names with texts, not {plain!r}"
        raise HttpRefusal(HTTPStatus.BAD_REQUEST, text)
    check_properties(plain)
    return plain


async def delete_subscription(call: Call) -> None:
    info, name = await _subscription_of(call)
    if call.is_on("force"):
        await SubscriptionMoves(call.client, info.id).delete(name)
    else:
        await call.client.subscriptions.delete(info.id, name)


async def skip_all(call: Call) -> None:
    info, name = await _subscription_of(call)
    await SubscriptionMoves(call.client, info.id).clear(name)


async def skip(call: Call) -> None:
    info, name = await _subscription_of(call)
    count, moves = _number_of(call, "count"), SubscriptionMoves(call.client, info.id)
    topic = await _topic_if_owned_whole(call, info)
    if topic is None or info.partitions > 1:
        await moves.skip(name, count)
        return
    await moves.check_no_query(name)
    end = topic.readable_partition(0).end
    new_position = partial(after_unacknowledged, count=count, end=end)
    await topic.subscriptions.move_up(name, 0, new_position, durable=True)


async def expire(call: Call) -> None:
    info, name = await _subscription_of(call)
    before_ms = call.broker.clock.now_ms() - _number_of(call, "seconds") * 1000
    moves, topic = SubscriptionMoves(call.client, info.id), await _topic_if_owned_whole(call, info)
    if topic is None:
        await moves.expire(name, before_ms)
        return
    await moves.check_no_query(name)
    for number in range(info.partitions):
        first = await topic.readable_partition(number).since(before_ms)  # the first row that stays
        await topic.subscriptions.move_up(name, number, partial(_at_least, first), durable=True)


def _at_least(offset: int, acks: Acks) -> int:
    return max(offset, acks.mark)


async def acknowledged(call: Call) -> Any:
    """What consumers acknowledged in the partitions of this broker, for queries of Spark."""
    topic_acks = call.broker.cursors.acks_of(call.request.parts["topic_id"])
    name = call.request.query.get("subscription", "")
    return encode_answer([] if topic_acks is None else topic_acks.of_subscription(name))


async def _topic_if_owned_whole(call: Call, info: TopicInfo) -> OwnedTopic | None:
    """The topic, if this broker owns all its partitions. Then the broker can move a subscription
    forward: acknowledgements beyond the new position are kept, and consumers stay. None: other
    brokers own partitions, so the caller moves the subscription in the metadata store."""
    if info.partitions == 1:
        number = 0 if info.policies.partitioned else None
        with suppress(Refusal):  # another broker owns the partition
            owned, _ = await call.broker.partition(PartitionName(info.name, number), create=False)
            return owned
    topics = (topic for topic in call.broker.open_topics() if topic.info.id == info.id)
    topic = next(topics, None)
    return topic if topic is not None and len(topic.partitions) == info.partitions else None


async def reset_to_message(call: Call) -> None:
    info, name = await _subscription_of(call)
    await SubscriptionMoves(call.client, info.id).reset(name, _target_of(call.json(), info))


async def reset_to_time(call: Call) -> None:
    info, name = await _subscription_of(call)
    target = CommittedSince(_number_of(call, "ms"))
    await SubscriptionMoves(call.client, info.id).reset(name, target)


def _number_of(call: Call, name: str) -> int:
    text = call.request.parts[name]
    if not (text.isascii() and text.isdecimal()) or len(text) > DIGITS_MAX:
        raise HttpRefusal(HTTPStatus.BAD_REQUEST, f"'{text}', given as {name}, is not a number")
    return int(text)


async def _subscription_of(call: Call) -> tuple[TopicInfo, str]:
    info = await call.existing_topic()
    if call.name.partition is not None:
        raise HttpRefusal(
            HTTPStatus.NOT_IMPLEMENTED,
            f"a subscription is of all partitions: give the name of topic {info.name}, not of a"
            " partition",
        )
    return info, call.request.parts["subscription"]


def _target_of(plain: Any, info: TopicInfo) -> SeekTarget:
    """The position of a message id; without an id, the end. Raises HttpRefusal."""
    if plain is None or plain == "latest":
        return End.LATEST
    if plain == "earliest":
        return End.EARLIEST
    try:
        ledger, entry = signed(int(plain["ledgerId"])), signed(int(plain["entryId"]))
        batch_index = max(0, int(plain.get("batchIndex", 0)))
        partition = max(0, int(plain.get("partitionIndex", 0)))
        after = 1 if plain.get("isExcluded") else 0
    except (*errors.MALFORMED, OverflowError) as error:
        raise HttpRefusal(HTTPStatus.BAD_REQUEST, f"{plain!r} is not a message id") from error
    if ledger == LATEST_LEDGER:
        return End.LATEST
    if ledger == EARLIEST_LEDGER:
        return End.EARLIEST
    if ledger != names.ledger_number(info.id):
        raise HttpRefusal(
            HTTPStatus.PRECONDITION_FAILED,
            f"message id {ledger}:{entry} is of another topic than {info.name}",
        )
    return {partition: entry + batch_index + after}
