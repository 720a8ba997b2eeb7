"""Verbs on subscriptions of a topic.

Always true: a subscription is of the whole topic, so a verb that names one partition is refused.
Moving or deleting one that consumers use sends them away, and they come back by themselves; one
that a query of Spark uses is left as it is.
"""

from http import HTTPStatus
from typing import Any

from spark_ledger import errors
from spark_ledger.broker import names
from spark_ledger.broker.admin.access import HttpRefusal
from spark_ledger.broker.admin.call import Call
from spark_ledger.broker.wire.commands import signed
from spark_ledger.topic.log.topics import TopicInfo
from spark_ledger.topic.subscription.records import SubscriptionKind
from spark_ledger.topic.subscription.seek_target import CommittedSince, End, SeekTarget

LATEST_LEDGER = 2**63 - 1
EARLIEST_LEDGER = -1


async def subscriptions(call: Call) -> Any:
    info = await call.existing()
    return [of.name for of in await call.client.subscriptions.list(info.id, unreadable={})]


async def create_subscription(call: Call) -> None:
    info, name = await _subscription_of(call)
    target = _target_of(call.json(), info)
    await call.client.subscriptions.create(info.id, name, target, kind=SubscriptionKind.CONSUMER)


async def delete_subscription(call: Call) -> None:
    info, name = await _subscription_of(call)
    if call.is_on("force"):
        await _check_no_query(call, info, name)
    await call.client.subscriptions.delete(info.id, name, force=call.is_on("force"))


async def skip_all(call: Call) -> None:
    await _move(call, End.LATEST)


async def reset_to_message(call: Call) -> None:
    info, _ = await _subscription_of(call)
    await _move(call, _target_of(call.json(), info))


async def reset_to_time(call: Call) -> None:
    text = call.request.parts["ms"]
    if not text.isdecimal() or int(text) > LATEST_LEDGER:
        raise HttpRefusal(HTTPStatus.BAD_REQUEST, f"'{text}' is no time in milliseconds")
    await _move(call, CommittedSince(int(text)))


async def _move(call: Call, target: SeekTarget) -> None:
    info, name = await _subscription_of(call)
    await _check_no_query(call, info, name)
    await call.client.subscriptions.seek(info.id, name, target, force=True)


async def _subscription_of(call: Call) -> tuple[TopicInfo, str]:
    info = await call.existing()
    if call.name.partition is not None:
        raise HttpRefusal(
            HTTPStatus.NOT_IMPLEMENTED,
            f"a subscription is of all partitions: name topic {info.name} as a whole",
        )
    return info, call.request.parts["subscription"]


async def _check_no_query(call: Call, info: TopicInfo, name: str) -> None:
    """Raises errors.SubscriptionNotFound, errors.SubscriptionBusy."""
    listed = await call.client.subscriptions.list(info.id, unreadable={})
    subscription = next((of for of in listed if of.name == name), None)
    if subscription is None:
        raise errors.SubscriptionNotFound(f"there is no subscription '{name}'", subscription=name)
    if subscription.live and subscription.kind is SubscriptionKind.QUERY:
        raise errors.SubscriptionBusy(
            f"query {subscription.query_id} of Spark uses subscription '{name}'", subscription=name
        )


def _target_of(plain: Any, info: TopicInfo) -> SeekTarget:
    """The position that a message id names; without one it is the end. Raises HttpRefusal."""
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
        raise HttpRefusal(HTTPStatus.BAD_REQUEST, f"{plain!r} is no message id") from error
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
