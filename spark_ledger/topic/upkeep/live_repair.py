"""Partitions that no owner can open, since the end of their live ledger cannot be sealed as it is:
what is there, and what a person can have done about it.

    the CLOSED ledger's last entries -> a fault with the bytes, the copies, the offsets -> a person
    says yes -> a seal, and a hole where rows are given up

Always true: looking changes nothing, and looks at closed ledgers alone: of an open one the owner
tells where it ends. Rows that are given up keep their offsets: no other row gets them.
"""

from dataclasses import dataclass
from enum import Enum

from spark_ledger import errors
from spark_ledger.ledger.quorum import Quorum
from spark_ledger.ledger.reader import AsyncLedgerReader
from spark_ledger.metadata.cluster import not_held
from spark_ledger.metadata.ledger_record import LedgerRecord, LedgerState
from spark_ledger.metadata.store_calls import reachable
from spark_ledger.topic.client import TopicClient
from spark_ledger.topic.commit.seal import Tail, sealed, tail_of
from spark_ledger.topic.log.actions import Action, Hole
from spark_ledger.topic.log.segments import LiveSegment
from spark_ledger.topic.log.topics import TopicInfo


class Fault(Enum):
    FOREIGN = "no owner of the partition wrote its last entries"
    DAMAGED = "its last entries are damaged on every copy"
    LATER = "a later version wrote its last entry"
    UNDECIDED = "where its ledger ends cannot be decided now"


_WOULD = {
    Fault.FOREIGN: "the partition ends in front of them, as its next owner would have it, too",
    Fault.DAMAGED: "the rows at these offsets are given up: they become a hole",
    Fault.LATER: "nothing: start a broker of that version, which opens the partition",
    Fault.UNDECIDED: "nothing: start the bookies that have it, or `ledger recover` without them",
}


@dataclass(frozen=True, slots=True)
class SeenEntry:
    """`begins` are its first bytes (None: no copy of it can be read) of so many; `copies` are the
    bookies that keep it."""

    entry_id: int
    why: str
    copies: tuple[str, ...]
    payload_bytes: int = 0
    begins: bytes | None = None


@dataclass(frozen=True, slots=True)
class Unopened:
    """A partition that cannot be opened. `offsets`, from the first up to before the second, have
    rows that would be given up, if any would."""

    live: LiveSegment
    fault: Fault
    entries: tuple[SeenEntry, ...]
    offsets: tuple[int, int]

    @property
    def mendable(self) -> bool:
        return self.fault in (Fault.FOREIGN, Fault.DAMAGED)

    @property
    def would(self) -> str:
        return _WOULD[self.fault]


async def unopened(client: TopicClient, info: TopicInfo) -> list[Unopened]:
    """The partitions of a topic that cannot be opened. Raises errors.MetadataHeld (no partition is
    opened then), errors.Unavailable, errors.DataUnavailable, errors.NoSuchLedger."""
    with reachable(f"asking for partitions of {info.name.short} that cannot be opened"):
        await not_held(client.store)
    state = await client.log(info.id).fold(fresh=True)
    lives = (held.live for held in state.partitions if held.live is not None)
    found = [await _looked_at(client, live) for live in lives]
    return [one for one in found if one is not None]


async def repair(client: TopicClient, info: TopicInfo, one: Unopened) -> None:
    """Seal the partition as `would` says, in one commit; its next owner opens it. Raises
    errors.TxnConflict where an owner did meanwhile, and as seal.sealed."""
    if not one.mendable:
        raise ValueError(f"{one.fault} is not mended by a commit")
    actions: list[Action] = [await sealed(client.ledgers, one.live, without_damaged=True)]
    lo, hi = one.offsets
    if lo < hi:
        actions.append(Hole(one.live.partition, lo, hi))
    intent = await client.intents.open_system_intent("repair", info.name.full)
    try:
        await client.commit_actions(info.id, actions, intent, finish_intent=True)
    except errors.LedgerError:
        await client.intents.try_finish(intent)
        raise


async def _looked_at(client: TopicClient, live: LiveSegment) -> Unopened | None:
    version = live.metadata_version
    reader = await client.ledgers.open(live.ledger_id, recover=False, min_version=version)
    await reader.refresh_record()
    record = reader.record
    nothing = (live.base, live.base)
    if record.state is LedgerState.IN_RECOVERY:
        return Unopened(live, Fault.UNDECIDED, (), nothing)
    last = reader.last_add_confirmed
    if not record.closed or last < live.first_entry:
        return None
    try:
        tail = await tail_of(reader, live, last, without_damaged=True)
    except errors.UnsupportedFormat as why:
        entry = SeenEntry(last, why.what, _copies(record, last))
        return Unopened(live, Fault.LATER, (entry,), nothing)
    return _judged(live, reader, tail)


def _judged(live: LiveSegment, reader: AsyncLedgerReader, tail: Tail) -> Unopened | None:
    record = reader.record
    seen = [
        SeenEntry(
            *(one.entry_id, one.why.what, _copies(record, one.entry_id)),
            *(one.payload_bytes, one.begins),
        )
        for one in tail.foreign
    ]
    if tail.damaged:
        seen += [
            SeenEntry(one, "damaged on every copy", _copies(record, one)) for one in tail.damaged
        ]
        before = live.rows_before if tail.entry is None else tail.entry.header.cumulative_rows
        offsets = (live.origin + before, live.origin + (record.rows or 0))
        ordered = sorted(seen, key=lambda one: one.entry_id)
        return Unopened(live, Fault.DAMAGED, tuple(ordered), offsets)
    if not tail.foreign:
        return None
    return Unopened(live, Fault.FOREIGN, tuple(reversed(seen)), (live.base, live.base))


def _copies(record: LedgerRecord, entry_id: int) -> tuple[str, ...]:
    """The bookies that keep the entry."""
    ensemble = record.fragment_of(entry_id).ensemble
    return tuple(ensemble[slot] for slot in Quorum.of(record).write_set(entry_id))
