"""Pulsar's commands by name, with the numbers of its protocol. Pure.

Always true: the type of a command is the number of its field in BaseCommand, so `command` sets both
from one name. An unknown number of an enum stays a number, so that its frame can still be decoded
and refused. The enums of Pulsar's clients are IntEnums here.
"""

from enum import IntEnum
from typing import Any, TypeVar

from spark_ledger.broker.wire.commands_pb2 import BaseCommand, FeatureFlags, MessageId

__all__ = ["BaseCommand", "FeatureFlags", "MessageId"]

PROTOCOL_VERSION = 21
NO_TRANSACTIONS = "there are no transactions here"
EARLIEST, LATEST = -1, 2**63 - 1
"""Ledger and entry in the message ids that mean the first and the last message."""
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


class KeySharedMode(IntEnum):
    AUTO_SPLIT = 0
    STICKY = 1


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


class LookupType(IntEnum):
    REDIRECT = 0
    CONNECT = 1
    FAILED = 2


class Refusal(Exception):
    """The broker refuses a client's request, with an error code of the protocol."""

    def __init__(self, code: ServerError, message: str) -> None:
        super().__init__(message)
        self.code = code
        self.message = message


E = TypeVar("E", bound=IntEnum)


def checked(kind: type[E], number: int, what: str) -> E:
    """The enum's member with this number. `what`: the enum's meaning in words. Raises Refusal for
    an unknown number."""
    try:
        return kind(number)
    except ValueError:
        members = ", ".join(f"{member.name} ({member.value})" for member in kind)
        raise Refusal(
            ServerError.NOT_ALLOWED, f"there is no {what} {number}: give one of {members}"
        ) from None


def command(name: str, **fields: Any) -> BaseCommand:
    """The command of this name (a field of BaseCommand), with these fields."""
    base = BaseCommand(type=_NUMBERS[name])
    part = getattr(base, name)
    part.SetInParent()
    for field, value in fields.items():
        if isinstance(value, (MessageId, FeatureFlags)):
            getattr(part, field).CopyFrom(value)
        elif isinstance(value, (list, tuple)):
            getattr(part, field).extend(value)
        else:
            setattr(part, field, value)
    return base


def name_of(received: BaseCommand) -> str | None:
    """The name of the command; None: its type is unknown, or the field of its type is missing."""
    name = _FIELDS.get(received.type)
    return name if name is not None and received.HasField(name) else None


def not_text(part: Any) -> str | None:
    """The name of a command's text field that is not UTF-8 (the value is bytes), or None."""
    for field, value in part.ListFields():
        if field.type == field.TYPE_STRING and isinstance(value, bytes):
            return str(field.name)
    return None


def signed(number: int) -> int:
    """The signed number for an unsigned number of the protocol: the protocol has -1 as 2**64 - 1 in
    the ids of the two ends."""
    return number - (1 << 64) if number >= 1 << 63 else number


def unsigned(number: int) -> int:
    return number + (1 << 64) if number < 0 else number
