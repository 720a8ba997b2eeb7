"""Names and message ids as Pulsar's clients use them. Pure.

`persistent://tenant/namespace/t-partition-3` is partition 3 of topic `t`. Of a topic with one
partition, the topic's own name also means partition 0. A message id is (ledger, entry, batch
index). The ledger is a number made from the topic's id, so a deleted topic with the same name had
other message ids. The entry is the offset of the first message of the batch.
Always true: offset = entry + max(batch index, 0).
"""

import re
from dataclasses import dataclass

from spark_ledger import errors
from spark_ledger.broker.wire.commands import MessageId, Refusal, ServerError, signed, unsigned
from spark_ledger.metadata import paths
from spark_ledger.topic.log.names import TopicName, parse_partition_name, parse_topic
from spark_ledger.topic.log.producers import PRODUCER_NAME_BYTES_MAX

_LEDGER_BITS = 47
_TEXT_MAX = 1000
_PERSISTENT, _NON_PERSISTENT = "persistent://", "non-persistent://"
_IS_PATTERN = re.compile(r"/.*[][(){}^$|*+?\\]")
NO_BATCH = -1
NOWHERE = unsigned(-1)
"""The ledger and entry of the id that names no message."""
NOT_PARTITIONED = -1


@dataclass(frozen=True, slots=True, order=True)
class NonPersistentName(TopicName):
    """The name of a topic whose messages are only in memory. It is never the name of a topic of
    the topic layer, which refuses it."""

    @property
    def full(self) -> str:
        return f"{_NON_PERSISTENT}{self.tenant}/{self.namespace}/{self.name}"

    @property
    def short(self) -> str:
        return self.full

    @property
    def path(self) -> str:
        """The path of the topic's record."""
        return f"{paths.non_persistent_topics(self.tenant, self.namespace)}/{self.name}"

    def __str__(self) -> str:
        return self.full


@dataclass(frozen=True, slots=True)
class PartitionName:
    """A topic, and the number of a partition; None: the client's name has no number."""

    topic: TopicName
    partition: int | None


def parse(text: str) -> PartitionName:
    """Raises Refusal."""
    is_stored = not text.startswith(_NON_PERSISTENT)
    try:
        topic = parse_topic(text if is_stored else text.removeprefix("non-"))
    except errors.TopicNameInvalid as error:
        # after InvalidTopicName the C++ client would repeat the request until it times out
        raise Refusal(ServerError.NOT_ALLOWED, str(error)[:_TEXT_MAX]) from error
    topic, number = parse_partition_name(topic) or (topic, None)
    if not is_stored:
        topic = NonPersistentName(topic.tenant, topic.namespace, topic.name)
    return PartitionName(topic, number)


def parse_for_lookup(text: str) -> PartitionName | None:
    """As `parse`; None: the text is a pattern for topics of a namespace. A client looks a pattern
    up to find a broker that watches these topics for the client."""
    tenant, _, rest = text.removeprefix(_PERSISTENT).partition("/")
    if text.startswith(_PERSISTENT) and rest.count("/") == 1 and _IS_PATTERN.search(rest):
        parse(f"{_PERSISTENT}{tenant}/{rest.partition('/')[0]}/t")
        return None
    return parse(text)


def fault_of_name(kind: str, name: str | bytes) -> str | None:
    """Why the name that a client gives to a `kind` (producer, consumer, subscription, chunked
    message) is refused; None: the name is allowed. A name takes memory of the broker while a client
    uses the name (hazard 95). `name` is bytes if it is not UTF-8."""
    size = len(name.encode() if isinstance(name, str) else name)
    if size <= PRODUCER_NAME_BYTES_MAX:
        return None
    return f"the name of a {kind} has {size} bytes, at most {PRODUCER_NAME_BYTES_MAX} are allowed"


def check_name(kind: str, name: str) -> None:
    """Raises Refusal."""
    if (fault := fault_of_name(kind, name)) is not None:
        raise Refusal(ServerError.NOT_ALLOWED, f"{fault}: give a shorter name")


def ledger_number(topic_id: str) -> int:
    """The ledger in every message id of the topic: positive, and the same at every broker."""
    return (int(topic_id.replace("-", ""), 16) >> (128 - _LEDGER_BITS)) | 1


def message_id(ledger: int, offset: int, partition: int, batch_index: int = NO_BATCH) -> MessageId:
    id_ = MessageId(ledgerId=ledger, entryId=unsigned(offset), partition=partition)
    if batch_index != NO_BATCH:
        id_.batch_index = batch_index
    return id_


def id_of_no_message(partition: int) -> MessageId:
    """The id that names no message: the last message id of an empty partition."""
    return MessageId(ledgerId=NOWHERE, entryId=NOWHERE, partition=partition)


def offset_of(id_: MessageId, ledger: int) -> int:
    """The offset that an id names. Raises Refusal for an id of another topic."""
    if id_.ledgerId != ledger:
        raise Refusal(
            ServerError.NOT_ALLOWED,
            f"message id {signed(id_.ledgerId)}:{signed(id_.entryId)} is of another topic: the ids"
            f" of this topic begin with {ledger}",
        )
    offset: int = signed(id_.entryId) + max(0, id_.batch_index)
    return offset
