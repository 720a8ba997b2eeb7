"""Pulsar's commands by name, with the numbers of its protocol. Pure.

Always true: a command's number is the number of its field in BaseCommand, so what makes one sets
both; a number that is not known here stays a number, so a frame with it can be refused by name of
its request. The enums of Pulsar's clients are IntEnums here.
"""

from enum import IntEnum
from typing import Any

from spark_ledger.broker.wire.commands_pb2 import BaseCommand, MessageId

__all__ = ["BaseCommand", "MessageId"]

PROTOCOL_VERSION = 21
NO_TRANSACTIONS = "there are no transactions here"
EARLIEST, LATEST = -1, 2**63 - 1
"""Ledger and entry of the ids that mean the two ends."""
_FIELDS = {field.number: field.name for field in BaseCommand.DESCRIPTOR.fields if field.number > 1}
_NUMBERS = {name: number for number, name in _FIELDS.items()}
SEND = _NUMBERS["send"]


class ServerError(IntEnum):
    UNKNOWN = 0
    METADATA = 1
    PERSISTENCE = 2
    CONSUMER_BUSY = 5
    SERVICE_NOT_READY = 6
    QUOTA_HOLD = 7
    QUOTA_EXCEEDED = 8
    CHECKSUM = 9
    TOPIC_NOT_FOUND = 11
    SUBSCRIPTION_NOT_FOUND = 12
    CONSUMER_NOT_FOUND = 13
    TOPIC_TERMINATED = 15
    PRODUCER_BUSY = 16
    INCOMPATIBLE_SCHEMA = 18
    CONSUMER_ASSIGN = 19
    NOT_ALLOWED = 22
    PRODUCER_FENCED = 25


class SubscriptionType(IntEnum):
    EXCLUSIVE = 0
    SHARED = 1
    FAILOVER = 2
    KEY_SHARED = 3


class AccessMode(IntEnum):
    SHARED = 0
    EXCLUSIVE = 1
    WAIT_FOR_EXCLUSIVE = 2
    EXCLUSIVE_WITH_FENCING = 3


class AckType(IntEnum):
    INDIVIDUAL = 0
    CUMULATIVE = 1


class InitialPosition(IntEnum):
    LATEST = 0
    EARLIEST = 1


class TopicsMode(IntEnum):
    PERSISTENT = 0
    NON_PERSISTENT = 1
    ALL = 2


class SchemaType(IntEnum):
    """Those that leave values bytes (NONE, as which BYTES comes, too), or only call them text."""

    NONE = 0
    STRING = 1


class LookupType(IntEnum):
    REDIRECT = 0
    CONNECT = 1
    FAILED = 2


class Refusal(Exception):
    """What a client asked for is refused, with the protocol's own error code."""

    def __init__(self, code: ServerError, message: str) -> None:
        super().__init__(message)
        self.code = code
        self.message = message


def command(name: str, **fields: Any) -> BaseCommand:
    """The command of that name (a field of BaseCommand)."""
    made = BaseCommand(type=_NUMBERS[name])
    part = getattr(made, name)
    part.SetInParent()
    for field, value in fields.items():
        if isinstance(value, MessageId):
            getattr(part, field).CopyFrom(value)
        elif isinstance(value, (list, tuple)):
            getattr(part, field).extend(value)
        else:
            setattr(part, field, value)
    return made


def name_of(received: BaseCommand) -> str | None:
    """Which command it is; None for an unknown one, or without the part that its type names."""
    name = _FIELDS.get(received.type)
    return name if name is not None and received.HasField(name) else None


def not_text(part: Any) -> str | None:
    """The field of a command's part that is to be text and is not UTF-8: it reads as bytes."""
    for field, value in part.ListFields():
        if field.type == field.TYPE_STRING and isinstance(value, bytes):
            return str(field.name)
    return None


def signed(number: int) -> int:
    """An unsigned number of the protocol where it stands for a signed one: ids of the two ends come
    as -1 in 64 bits."""
    return number - (1 << 64) if number >= 1 << 63 else number


def unsigned(number: int) -> int:
    return number + (1 << 64) if number < 0 else number
