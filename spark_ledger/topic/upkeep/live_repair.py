"""Partitions that no owner can open, because the end of their live ledger cannot be sealed: the
fault, and the repair that a person can request.

    the CLOSED ledger's last entries -> a fault with the bytes, the copies, the offsets -> a person
    agrees -> a seal, and a hole for rows that are given up

Always true: `find_unopened` changes nothing and reads only closed ledgers, because the owner of an
open ledger decides where it ends. The offsets of rows that are given up stay: no other row gets
these offsets.
"""

from dataclasses import dataclass
from enum import Enum

from spark_ledger import errors
from spark_ledger.ledger.quorum import Quorum
from spark_ledger.ledger.reader import AsyncLedgerReader
from spark_ledger.metadata.cluster import not_held_checks
from spark_ledger.metadata.ledger_record import LedgerRecord, RecordState
from spark_ledger.metadata.store_calls import unavailable_while
from spark_ledger.topic.client import TopicClient
from spark_ledger.topic.commit.seal import LedgerTail, read_tail, seal_live_segment
from spark_ledger.topic.log.actions import Action, Hole
from spark_ledger.topic.log.segments import LiveSegment
from spark_ledger.topic.log.topics import TopicInfo


class Fault(Enum):
    FOREIGN = "no owner of the partition wrote its last entries"
    DAMAGED = "its last entries are damaged on every copy"
    LATER = "a later version wrote its last entry"
    UNDECIDED = "where its ledger ends cannot be decided now"


_REPAIR_EFFECTS = {
    Fault.FOREIGN: "the partition ends before these entries, as its next owner would decide, too",
    Fault.DAMAGED: "the rows at these offsets are given up: they become a hole",
    Fault.LATER: "nothing: start a broker of the later version, which opens the partition",
    Fault.UNDECIDED: "nothing: start the bookies of its ledger, or `ledger recover` without them",
}


@dataclass(frozen=True, slots=True)
class FaultyEntry:
    """An entry at the end of a live ledger, and why it prevents a seal. `begins` are the first
    bytes of its payload (None: no copy can be read); `payload_bytes` is the payload's size;
    `copies` are the bookies that keep the entry."""

    entry_id: int
    why: str
    copies: tuple[str, ...]
    payload_bytes: int = 0
    begins: bytes | None = None


@dataclass(frozen=True, slots=True)
class UnopenedPartition:
    """A partition that no owner can open. The repair would give up the rows at `offsets`
    [first, end), which may be empty."""

    live: LiveSegment
    fault: Fault
    entries: tuple[FaultyEntry, ...]
    offsets: tuple[int, int]

    @property
    def is_repairable(self) -> bool:
        return self.fault in (Fault.FOREIGN, Fault.DAMAGED)

    @property
    def repair_effect(self) -> str:
        return _REPAIR_EFFECTS[self.fault]


async def find_unopened(client: TopicClient, info: TopicInfo) -> list[UnopenedPartition]:
    """The partitions of a topic that no owner can open. Raises errors.MetadataHeld (in a held
    cluster no partition is opened), errors.Unavailable, errors.DataUnavailable,
    errors.NoSuchLedger."""
    with unavailable_while(f"looking for partitions of {info.name.short} that cannot be opened"):
        await not_held_checks(client.store)
    state = await client.log(info.id).fold(fresh=True)
    lives = (partition.live for partition in state.partitions if partition.live is not None)
    results = [await _find_fault(client, live) for live in lives]
    return [result for result in results if result is not None]


async def repair(client: TopicClient, info: TopicInfo, partition: UnopenedPartition) -> None:
    """Seals the partition's live segment as `repair_effect` describes, in one commit; the next
    owner opens the partition. Raises errors.TxnConflict if an owner opened the partition meanwhile,
    and as seal.seal_live_segment."""
    if not partition.is_repairable:
        raise ValueError(f"a commit cannot repair {partition.fault}")
    live, (lo, hi) = partition.live, partition.offsets
    actions: list[Action] = [await seal_live_segment(client.ledgers, live, accept_damaged=True)]
    if lo < hi:
        actions.append(Hole(live.partition, lo, hi))
    intent = await client.intents.open_system_intent("repair", info.name.full)
    try:
        await client.commit_actions(info.id, actions, intent, finish_intent=True)
    except errors.LedgerError:
        await client.intents.try_finish(intent)
        raise


async def _find_fault(client: TopicClient, live: LiveSegment) -> UnopenedPartition | None:
    version = live.metadata_version
    reader = await client.ledgers.open(live.ledger_id, recover=False, min_version=version)
    await reader.refresh_record()
    record = reader.record
    no_offsets = (live.base, live.base)
    if record.state is RecordState.IN_RECOVERY:
        return UnopenedPartition(live, Fault.UNDECIDED, (), no_offsets)
    last = reader.last_add_confirmed
    if not record.closed or last < live.first_entry:
        return None
    try:
        tail = await read_tail(reader, live, last, accept_damaged=True)
    except errors.UnsupportedFormat as error:
        entry = FaultyEntry(last, error.what, _copies(record, last))
        return UnopenedPartition(live, Fault.LATER, (entry,), no_offsets)
    return _fault_of_tail(live, reader, tail)


def _fault_of_tail(
    live: LiveSegment, reader: AsyncLedgerReader, tail: LedgerTail
) -> UnopenedPartition | None:
    record = reader.record
    faulty = [
        FaultyEntry(
            *(foreign.entry_id, foreign.why.what, _copies(record, foreign.entry_id)),
            *(foreign.payload_bytes, foreign.first_bytes),
        )
        for foreign in tail.foreign
    ]
    if tail.damaged:
        faulty += [
            FaultyEntry(id_, "damaged on every copy", _copies(record, id_)) for id_ in tail.damaged
        ]
        before = live.rows_before if tail.entry is None else tail.entry.header.cumulative_rows
        offsets = (live.origin + before, live.origin + (record.rows or 0))
        ordered = sorted(faulty, key=lambda entry: entry.entry_id)
        return UnopenedPartition(live, Fault.DAMAGED, tuple(ordered), offsets)
    if not tail.foreign:
        return None
    return UnopenedPartition(live, Fault.FOREIGN, tuple(reversed(faulty)), (live.base, live.base))


def _copies(record: LedgerRecord, entry_id: int) -> tuple[str, ...]:
    """The bookies that keep the entry."""
    ensemble = record.fragment_of(entry_id).ensemble
    return tuple(ensemble[slot] for slot in Quorum.of(record).write_set(entry_id))
