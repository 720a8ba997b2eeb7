"""Consumers of a shared subscription, without connections."""

from types import SimpleNamespace

from spark_ledger.broker.dispatch.acks import Acks
from spark_ledger.broker.dispatch.round_robin import RoundRobin
from spark_ledger.broker.dispatch.sharing import Member, Sharing, UnackedLimits
from spark_ledger.broker.wire.commands import MessageId
from spark_ledger.topic.acks.sets import rows_in

ROWS = 60
NO_LIMITS = UnackedLimits(0, 0)


class Room:
    """Whether a connection takes more."""

    def __init__(self):
        self.has_room = True

    def __call__(self):
        return self.has_room


def member(name="a", priority=0, permits=0):
    made = Member(name, priority, Room())
    made.permits = permits
    return made


def sharing_of(*members, limits=NO_LIMITS, mark=0):
    wakes = []
    sharing = Sharing(Acks(mark), limits, RoundRobin(), lambda: wakes.append(1))
    sharing.wakes = wakes
    for joining in members:
        sharing.join(joining)
    return sharing


def send(sharing, offset, messages=1, permits=None):
    """Send what of a batch is missing and not pending; returns the receiver."""
    missing = sharing.acks.missing(offset, offset + messages)
    ranges = [gap for lo, hi in missing for gap in rows_in(sharing.waiting, lo, hi)] or missing
    batch = SimpleNamespace(offset=offset, messages=messages, data=b"")
    (part,) = sharing.choice.parts_of(batch, missing, ranges)
    receiver = sharing.receiver_of(part)
    if receiver is not None:
        sharing.give(receiver, part, part.unacked if permits is None else permits)
    return receiver


def acknowledge(sharing, asker, entry, **fields):
    id_ = MessageId(ledgerId=1, entryId=entry, **fields)
    return list(sharing.acknowledge(asker, id_, entry + max(0, id_.batch_index), ROWS))
