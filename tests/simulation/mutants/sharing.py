"""Bugs of subscriptions that several consumers share: which consumer has which rows, what
comes again, and what is counted."""

from collections.abc import Iterator
from typing import Any

from spark_ledger.broker.dispatch.shared_dispatcher import SharedDispatcher
from spark_ledger.broker.dispatch.sharing import Member, Sharing
from spark_ledger.broker.wire.commands import AckType
from tests.simulation.mutants.brokers import SERVES
from tests.simulation.mutants.mutant import Mutant

SHARES = {**SERVES, "also": ("sharing",)}


def forgets_what_was_pending(give_back: Any) -> Any:
    """What a consumer had is sent to no consumer once it goes, or asks for it again."""

    def forgotten(self: Any, member: Any, entries: Any) -> None:
        for part in filter(None, map(member.pending.get, entries)):
            self._take(member, part)

    return forgotten


def counts_a_leave(leave: Any) -> Any:
    """What a consumer had that goes counts as asked for again."""

    def counted(self: Any, member: Any) -> None:
        self.redeliver(member, None)
        leave(self, member)

    return counted


def stays_blocked(settle: Any) -> Any:
    """A consumer that has reached its limit gets nothing more, whatever is acknowledged."""

    def blocked(self: Any, member: Any) -> None: ...

    return blocked


def keeps_what_waits(give: Any) -> Any:
    """What is sent again goes on waiting."""

    def kept(self: Any, member: Any, part: Any, permits: int) -> None:
        waiting = self.waiting.copy()
        give(self, member, part, permits)
        self.waiting |= waiting

    return kept


def takes_no_notice_of_permits(is_available: Any) -> Any:
    """A consumer gets whatever there is."""
    return property(lambda self: not self.is_blocked and not self.is_busy and self.has_room())


def acknowledges_cumulatively(acknowledge: Any) -> Any:
    """A cumulative acknowledgement is taken."""

    def taken(self: Any, consumer: Any, id_: Any, ack_type: Any) -> Iterator[bool]:
        if ack_type == AckType.CUMULATIVE:
            yield self.acks.add_up_to(int(id_.entryId) + 1)
            return
        yield from acknowledge(self, consumer, id_, ack_type)

    return taken


def acknowledges_the_whole_batch(acknowledge: Any) -> Any:
    """An acknowledgement of one message of a batch counts for the batch."""

    def whole(self: Any, asker: Any, id_: Any, offset: int, end: int) -> Iterator[bool]:
        entry = int(id_.entryId)
        owner = self._owner(asker, entry)
        if owner is not None:
            part = owner.pending[entry]
            end_of_part = entry + part.messages
            yield end_of_part <= end and self.acks.add(entry, end_of_part)
            self.update(owner, entry)
        else:
            yield from acknowledge(self, asker, id_, offset, end)

    return whole


MUTANTS = (
    Mutant(
        *("what a consumer had is sent to no consumer", "sharing", Sharing, "give_back"),
        *(forgets_what_was_pending, SHARES),
    ),
    Mutant(
        *("count raised at a leave", "sharing", Sharing, "leave"),
        *(counts_a_leave, SHARES),
    ),
    Mutant(
        *("a blocked consumer stays blocked", "sharing", Sharing, "_settle"),
        *(stays_blocked, SHARES),
    ),
    Mutant(
        *("what is sent again goes on waiting", "sharing", Sharing, "give"),
        *(keeps_what_waits, SHARES),
    ),
    Mutant(
        *("permits count for nothing", "sharing", Member, "is_available"),
        *(takes_no_notice_of_permits, SHARES),
    ),
    Mutant(
        *("cumulative acknowledgement of a share", "sharing", SharedDispatcher, "acknowledge"),
        *(acknowledges_cumulatively, SHARES),
    ),
    Mutant(
        *("one message acknowledged with its batch", "sharing", Sharing, "acknowledge"),
        *(acknowledges_the_whole_batch, SHARES),
    ),
)
