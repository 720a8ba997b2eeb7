"""Deletes subscriptions that Pulsar's consumers have not used for the topic's
`subscription_expiry_ms`.

Always true: a subscription with a consumer is not deleted, nor that of a query, nor one that cannot
be read. The time is the metadata store's, and counts from the last of these: consumers of the
subscription came, left, or acknowledged; another process moved it; a person accepted an older
store, which may lack later uses; the broker that has lived longest registered, since no consumer
can come while there is no broker. What a broker does by itself (messages expire) is no use. If a
broker has gone with consumers, this process notes that, and the time counts from the note: the
consumers may be on their way to another broker, and may have used the subscription until then. A
deletion fails if a consumer has come since the subscription was read.
"""

import logging
from collections.abc import Container
from enum import Enum

from spark_ledger import errors
from spark_ledger.metadata import paths
from spark_ledger.metadata.store_calls import call_each, read
from spark_ledger.topic.client import TopicClient
from spark_ledger.topic.log.topics import TopicInfo
from spark_ledger.topic.subscription.nodes import (
    SubscriptionNodes,
    SubscriptionView,
    brokers_alive,
    served_since_ms,
)
from spark_ledger.topic.subscription.records import SubscriptionKind

AT_ONCE = 8
_log = logging.getLogger(__name__)


class LastUse(Enum):
    KEPT = "kept"
    UNKNOWN = "unknown"  # the consumers' broker has gone, and wrote no end of their use
    EXPIRED = "expired"


def use_of(subscription: SubscriptionView, alive: Container[str], used_ms_min: int) -> LastUse:
    """Pure. `alive`: the brokers that were alive after the subscription was read. A use before
    `used_ms_min` was too long ago."""
    record = subscription.record
    if record.kind is not SubscriptionKind.CONSUMER or record.live or subscription.used_by(alive):
        return LastUse.KEPT
    if subscription.lost_users(alive):
        return LastUse.UNKNOWN
    return LastUse.EXPIRED if subscription.used_ms < used_ms_min else LastUse.KEPT


async def expire_subscriptions(client: TopicClient, topic: TopicInfo, now_ms: int) -> None:
    """One pass over the topic's subscriptions, at `now_ms` by the store's clock. Raises
    StoreError."""
    expiry_ms = topic.policies.subscription_expiry_ms
    if expiry_ms is None:
        return
    cluster = await read(client.store, paths.CLUSTER)
    if cluster is not None and now_ms - cluster.modified_ms < expiry_ms:
        return
    served_ms = await served_since_ms(client.store)
    if served_ms is None or now_ms - served_ms < expiry_ms:
        return
    nodes = SubscriptionNodes(client.store, topic.id)

    async def judge(name: str) -> None:
        try:
            subscription = await nodes.read(name)
            if subscription is None:
                return
            alive = await brokers_alive(client.store)
            use = use_of(subscription, alive, now_ms - expiry_ms)
            if use is LastUse.UNKNOWN:
                await nodes.note_lost_users(subscription, subscription.lost_users(alive))
            elif use is LastUse.EXPIRED and await client.subscriptions.delete(
                topic.id, name, seen=subscription
            ):
                _log.warning(
                    "subscription '%s' of topic %s is deleted: no consumer used it for %d s",
                    *(name, topic.name.short, (now_ms - subscription.used_ms) // 1000),
                )
        except (errors.SubscriptionNotFound, errors.SubscriptionBusy):
            return  # it was deleted, or a query took it
        except errors.LedgerError as error:
            _log.warning("subscription '%s' of topic %s stays: %s", name, topic.name.short, error)

    await client.store.sync(nodes.folder)
    await call_each(judge, await nodes.names(), AT_ONCE)
