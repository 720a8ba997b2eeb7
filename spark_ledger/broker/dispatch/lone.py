"""Lone messages (messages outside of batches) are shared, sent and acknowledged in runs. A message
that is handled alone takes four times as long.

Always true: a run saves time, and changes nothing else: each message is a part of its own, as if it
had been sent alone.
"""

from functools import partial
from itertools import compress
from typing import Any

from spark_ledger.broker.dispatch.delays import is_plain_and_due
from spark_ledger.broker.dispatch.dispatcher import Consumer
from spark_ledger.broker.dispatch.sharing import (
    PENDING_PARTS_MAX,
    LoneGroup,
    Member,
    Sharing,
    UnackedLimits,
)
from spark_ledger.broker.log.partition import READ_BYTES
from spark_ledger.broker.log.tail import Stored
from spark_ledger.broker.wire.commands import MessageId
from spark_ledger.broker.wire.sends import entries_of

RUN_MAX = 500
"""How many messages are sent in one step, some 5 us each."""
FEW_MESSAGES, FEW_BYTES = 20, 16 << 10
"""If the consumers may get FEW_MESSAGES at most, FEW_BYTES are read. A read of READ_BYTES lists up
to 1,000 batches, which takes 0.5 ms: too long for a consumer that asks for one message at a
time."""


def lone_run(batches: list[Stored], at: int, position: int, sharing: Sharing) -> list[Stored]:
    """The messages outside of batches from index `at` on that follow each other from the offset
    `position` on, none of them acknowledged, delayed or in chunks: as many as the consumers may
    get. Empty if there are fewer than two. Later messages are not looked at: the next run does
    that."""
    if batches[at].batched:  # as a rule all messages are in batches, or none is
        return []
    room = min(RUN_MAX, len(batches) - at, _room_of_all(sharing))
    end = offset = position
    if room > 1:
        end = sharing.acks.missing_end(position, position + room)
    for batch in batches[at : at + end - position]:
        if batch.offset != offset or not is_plain_and_due(batch):
            break
        offset += 1
    count = offset - position
    return batches[at : at + count] if count > 1 else []


def replay_run(batches: list[Stored], at: int, sharing: Sharing) -> list[Stored]:
    """The first messages outside of batches from index `at` on that wait, may be sent now, and have
    a redelivery count of 0. Empty if there are fewer than two."""
    begin, run = batches[at].offset, list[Stored]()
    if batches[at].batched or sharing.sent.redeliveries or sharing.is_full:
        return run
    end = begin + min(RUN_MAX, len(batches) - at)
    for offset in sharing.choice.replays_in(begin, end):
        batch = batches[at + offset - begin]
        if (
            batch.offset != offset
            or offset in sharing.sent.masked  # other rows of an id may be at a consumer
            or not is_plain_and_due(batch)
        ):
            break
        run.append(batch)
    return run if len(run) > 1 else []


def _room(sharing: Sharing) -> int:
    """How many new messages may be sent to all consumers, or wait."""
    room = PENDING_PARTS_MAX - sharing.unacked.parts
    most_of_all = sharing.unacked.limits.subscription_max
    return min(room, most_of_all - sharing.unacked.messages) if most_of_all else room


def _messages_max_of(limits: UnackedLimits, member: Member) -> int:
    """How many messages the consumer may get now."""
    if not member.is_available:
        return 0
    most = limits.consumer_max
    return min(member.permits, most - member.unacked) if most else member.permits


def _room_of_all(sharing: Sharing) -> int:
    return sum(_messages_max_of(sharing.unacked.limits, member) for member in sharing.members)


def bytes_for(sharing: Sharing) -> int:
    """About how many bytes to read for the messages that consumers may get now."""
    return FEW_BYTES if _room_of_all(sharing) <= FEW_MESSAGES else READ_BYTES


def share_lone(sharing: Sharing, offsets: list[int], slots: list[int]) -> list[LoneGroup]:
    """Give messages to consumers or let them wait, as far as that is possible now. No message is
    acknowledged; either all are new or all wait. Returns the groups of the first messages; the
    caller sends these messages."""
    groups: list[LoneGroup] = []
    at, messages_max_of = 0, partial(_messages_max_of, sharing.unacked.limits)
    while at < len(offsets) and sharing.may_read_on():
        end = at + _room(sharing)
        next_groups = sharing.choice.lone_groups(offsets[at:end], slots[at:end], messages_max_of)
        if not next_groups:
            break
        for group in next_groups:
            if group.member is not None:
                sharing.give_lone(group)
            elif group.offsets[0] not in sharing.waiting:
                sharing.wait_lone(dict(zip(group.offsets, group.slots, strict=True)))
            at += len(group.offsets)
        groups += next_groups
    return groups


def send_lone(sharing: Sharing, run: list[Stored]) -> int:
    """Send the first messages of a run, or let them wait. Returns the number of these messages."""
    messages_at = {batch.offset: batch.data for batch in run}
    groups = share_lone(sharing, list(messages_at), sharing.choice.slots_of_lone(run))
    for member, sent_offsets, _ in groups:
        if member is not None:
            assert isinstance(member, Consumer)
            messages = map(messages_at.__getitem__, sent_offsets)
            frames = member.messages.lone_frames(sent_offsets, messages)
            member.deliver(frames, len(sent_offsets))
    return sum(len(group.offsets) for group in groups)


def replay_lone(sharing: Sharing, run: list[Stored]) -> bool:
    """As `send_lone`, for a `replay_run`. Returns whether any message was sent."""
    parts = sharing.unacked.parts
    send_lone(sharing, run)
    return sharing.unacked.parts > parts


def acknowledge_lone(sharing: Sharing, asker: Member, ack: Any, ledger: int) -> list[MessageId]:
    """Acknowledge the messages of an ACK that are pending at the asker. Returns the ids that name
    other messages."""
    ids, ids_left, entries = ack.message_id, list[MessageId](), entries_of(ack, ledger)
    if not entries:
        is_whole = [
            message_id.batch_index < 0 and not message_id.ack_set and message_id.ledgerId == ledger
            for message_id in ids
        ]
        named = zip(ids, is_whole, strict=True)
        ids_left += [message_id for message_id, whole in named if not whole]
        ids = list(compress(ids, is_whole))
        entries = [message_id.entryId for message_id in ids]
    slots = sharing.acknowledge_lone(asker, entries)
    if len(slots) < len(entries):
        pairs = zip(ids, entries, strict=True)
        ids_left += [message_id for message_id, entry in pairs if entry not in slots]
    return ids_left
