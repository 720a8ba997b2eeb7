"""Gives one slot of a fragment to another bookie: join, copy, swap.

    a compare-and-set names the joining bookie in the record -> the joining bookie gets the missing
    entries of the slot, synced -> a compare-and-set replaces the old member by it

Always true:
- only complete fragments are repaired: all fragments of a CLOSED ledger, and of an OPEN ledger all
  but the last; the first entry of a fragment and the end of the ledger never change
  (transitions.py);
- the record names the joining bookie before its first copy, so its copies are no garbage; no reader
  asks the joining bookie before the swap. A joining has a token, and the swap succeeds only with
  the token of the joining whose copies were compared: if the bookie left, dropped its copies and
  joined again while a worker slept, the swap fails;
- for a CLOSED ledger the joining bookie is fenced before it has a copy: it may have been a member
  before, and a writer of that time may still send adds to it;
- if no peer supplies an entry, the other entries are copied, and the slot is not swapped;
- a misplaced copy goes only to a bookie that clashes with fewer other members (placement.py), so
  an ensemble gets better with each move, and moves end;
- a joining bookie that takes no copies, or does not respond, leaves the slot to another bookie, if
  another bookie can join.
"""

import random
from collections.abc import Collection, Sequence
from typing import NamedTuple

from spark_ledger.bookies.directory import BookieInfo
from spark_ledger.ledger import transitions
from spark_ledger.ledger.client import LedgerStore
from spark_ledger.ledger.cluster import Cluster
from spark_ledger.ledger.placement import clashes, neighbours
from spark_ledger.ledger.quorum import Quorum
from spark_ledger.ledger.records import LedgerRecords, MoveRefused, VersionedRecord
from spark_ledger.metadata.ledger_record import JoiningBookie, LedgerRecord, Tokens, entries_of
from spark_ledger.repair.copies import CannotCompare, Copies, Pace, unpaced

NO_SPARE = "no other bookie can take its copies"
NO_RACK = " (racks are hard: its rack must have no other member)"
NO_BETTER = "no bookie is placed better any more"
NO_COPY = "none of the bookies that hold its copies is registered"


class FragmentSlot(NamedTuple):
    """A slot of the fragment that begins at `first_entry`, and the member to replace, `old`."""

    first_entry: int
    slot: int
    old: str


class SlotResult(NamedTuple):
    """The result for a slot: without a `why`, `new` owns the slot. `copied` counts entries."""

    slot: FragmentSlot
    new: str = ""
    copied: int = 0
    why: str = ""
    damaged: tuple[int, ...] = ()
    """Entries that no bookie supplies."""


def slots_of(record: LedgerRecord, bookie_ids: Collection[str]) -> list[FragmentSlot]:
    """The slots of complete fragments that these bookies own."""
    return [
        FragmentSlot(fragment.first_entry, slot, bookie)
        for fragment in record.fragments
        if transitions.is_fragment_complete(record, fragment.first_entry)
        for slot, bookie in enumerate(fragment.ensemble)
        if bookie in bookie_ids
    ]


def misplaced(
    cluster: Cluster, record: LedgerRecord, avoid: Collection[str] = ()
) -> list[FragmentSlot]:
    """The slots of complete fragments that a better placed bookie can take."""
    quorum = Quorum.of(record)
    return [
        FragmentSlot(fragment.first_entry, slot, fragment.ensemble[slot])
        for fragment in record.fragments
        if transitions.is_fragment_complete(record, fragment.first_entry)
        for slot in misplaced_in(cluster, quorum, fragment.ensemble, avoid)
    ]


def misplaced_in(
    cluster: Cluster, quorum: Quorum, ensemble: Sequence[str], avoid: Collection[str] = ()
) -> list[int]:
    """The slots in which a writable bookie would share its rack or host with fewer members of a
    write set than the slot's member does; [] if not all members of the ensemble are registered."""
    if not all(map(cluster.directory.is_registered, ensemble)):
        return []
    return [
        slot
        for slot in range(len(ensemble))
        if (better := _better_placed(cluster, quorum, ensemble, slot, {*ensemble, *avoid}))
        and _choose(cluster, quorum, ensemble, slot, better)
    ]


def can_be_taken(
    cluster: Cluster, quorum: Quorum, ensemble: Sequence[str], slot: int, spares: Collection[str]
) -> bool:
    """Whether placement finds a spare for the slot."""
    return (
        _choose(cluster, quorum, ensemble, slot, _eligible_spares(cluster, ensemble, spares))
        is not None
    )


def kept_slots(
    cluster: Cluster,
    quorum: Quorum,
    ensemble: Sequence[str],
    stays: Collection[str],
    spares: Collection[str],
) -> int:
    """A mask of the slots whose member `stays`, or for which placement finds a spare."""
    info = cluster.directory.info
    members = {slot: info(bookie) for slot, bookie in enumerate(ensemble) if bookie in stays}
    others = [slot for slot in range(len(ensemble)) if slot not in members]
    eligible = _eligible_spares(cluster, ensemble, spares)
    placed = cluster.place(quorum, others, eligible, members) if others and eligible else {}
    return sum(1 << slot for slot in (*members, *placed))


def _eligible_spares(
    cluster: Cluster, ensemble: Sequence[str], spares: Collection[str]
) -> list[BookieInfo]:
    """The spares that are not members of the ensemble."""
    info = cluster.directory.info
    return [info(bookie) for bookie in sorted(spares) if bookie not in ensemble]


def _better_placed(
    cluster: Cluster, quorum: Quorum, ensemble: Sequence[str], slot: int, excluded: Collection[str]
) -> list[BookieInfo]:
    """The writable bookies that are not `excluded` and clash with fewer members than the slot's
    member does."""
    info = cluster.directory.info
    neighbour_slots = neighbours(slot, quorum.ensemble_size, quorum.write_quorum)
    others = [info(ensemble[other]) for other in neighbour_slots]
    present_clashes = clashes(info(ensemble[slot]), others)
    if not present_clashes:
        return []
    spares = [bookie for bookie in cluster.directory.writable() if bookie.id not in excluded]
    return [bookie for bookie in spares if clashes(bookie, others) < present_clashes]


def _choose(
    cluster: Cluster,
    quorum: Quorum,
    ensemble: Sequence[str],
    slot: int,
    spares: Sequence[BookieInfo],
) -> str | None:
    """The spare that placement chooses for the slot; None if it chooses no spare."""
    info = cluster.directory.info
    members = {index: info(b) for index, b in enumerate(ensemble) if index != slot}
    return cluster.place(quorum, [slot], spares, members).get(slot)


async def give_away(
    ledgers: LedgerStore,
    ledger_id: int,
    slot: FragmentSlot,
    tokens: Tokens,
    *,
    avoid: Collection[str] = (),
    better: bool = False,
    pace: Pace = unpaced,
) -> SlotResult:
    """Have another bookie take the slot. `avoid`: bookies that must not take the slot, because they
    also leave; `better`: only a bookie that is placed better than the member may take the slot.

    On return without a `why`, every entry of the slot at `new` and the record that names `new` are
    durable. Raises NoSuchLedger, Unavailable, and as `pace`; may be called again at any time.
    """
    return await _Move(ledgers, ledger_id, slot, tokens, avoid, better, pace).run()


async def withdraw(ledgers: LedgerStore, ledger_id: int, joining: JoiningBookie) -> None:
    """End the joining: the joining bookie's copies become garbage. Raises NoSuchLedger,
    Unavailable."""
    records = ledgers.cluster.records
    versioned = await records.read(ledger_id, fresh=True)
    await records.move(versioned, lambda record: transitions.leave(record, joining))


class _Move:
    def __init__(
        self,
        ledgers: LedgerStore,
        ledger_id: int,
        slot: FragmentSlot,
        tokens: Tokens,
        avoid: Collection[str],
        better: bool,
        pace: Pace,
    ) -> None:
        self._cluster: Cluster = ledgers.cluster
        self._records: LedgerRecords = ledgers.cluster.records
        self._rng: random.Random = ledgers.cluster.rng
        self._ledger_id = ledger_id
        self._slot = slot
        self._tokens = tokens
        self._avoid = [*avoid]
        self._better = better
        self._pace = pace
        self._copied = 0

    async def run(self) -> SlotResult:
        versioned = await self._records.read(self._ledger_id, fresh=True)
        if not self._has_source(versioned.record):
            return SlotResult(self._slot, why=NO_COPY)
        for member in versioned.record.fragment_of(self._slot.first_entry).ensemble:
            await self._cluster.directory.find(member)  # learns the rack, also of a lost member
        joining = self._choose_joining(versioned.record)
        if joining is None:
            if self._better:
                return SlotResult(self._slot, why=NO_BETTER)
            rack_hint = NO_RACK if self._cluster.config.racks == "hard" else ""
            return SlotResult(self._slot, why=NO_SPARE + rack_hint)
        await self._pace(0)  # raises if the copies are no longer needed
        old, joining_now = self._slot.old, versioned.record.joining_at(*self._slot[:2])
        try:
            versioned = await self._records.move(
                versioned, lambda record: transitions.join(record, old, joining, joining_now)
            )
        except MoveRefused as refused:
            return SlotResult(self._slot, why=refused.why)
        return await self._fill(versioned, joining)

    def _has_source(self, record: LedgerRecord) -> bool:
        """Whether a registered member may supply the slot's entries; true if it has no entries."""
        if not self._entries(record):
            return True
        directory = self._cluster.directory
        registered = {bookie.id for bookie in (*directory.writable(), *directory.readonly())}
        return not registered.isdisjoint(record.fragment_of(self._slot.first_entry).ensemble)

    def _choose_joining(self, record: LedgerRecord) -> JoiningBookie | None:
        """The present joining bookie, if it takes copies; otherwise a new bookie; None if no bookie
        can join."""
        first_entry, slot, _ = self._slot
        joining_now = record.joining_at(first_entry, slot)
        ensemble, quorum = record.fragment_of(first_entry).ensemble, Quorum.of(record)
        spares = self._spares(quorum, ensemble)
        if joining_now is not None and any(bookie.id == joining_now.bookie_id for bookie in spares):
            return joining_now
        others = [j.bookie_id for j in record.joining if j.first_entry == first_entry]
        spares = [bookie for bookie in spares if bookie.id not in others]
        chosen = _choose(self._cluster, quorum, ensemble, slot, spares)
        if chosen is None:
            return None
        return JoiningBookie(first_entry, slot, chosen, f"{self._rng.getrandbits(64):016x}")

    def _spares(self, quorum: Quorum, ensemble: Sequence[str]) -> list[BookieInfo]:
        """The bookies that may take the slot."""
        excluded = {*ensemble, *self._avoid}
        if self._better:
            return _better_placed(self._cluster, quorum, ensemble, self._slot.slot, excluded)
        return [
            bookie for bookie in self._cluster.directory.writable() if bookie.id not in excluded
        ]

    def _entries(self, record: LedgerRecord) -> range:
        """The entries of the fragment, which is complete."""
        last = record.last_entry
        if last is None:  # every entry below the last fragment is confirmed
            last = record.last_fragment.first_entry - 1
        return next(
            entries
            for fragment, entries in entries_of(record, last)
            if fragment.first_entry == self._slot.first_entry
        )

    async def _fill(self, versioned: VersionedRecord, joining: JoiningBookie) -> SlotResult:
        record, entries = versioned.record, self._entries(versioned.record)
        copies = Copies(
            *(self._cluster, versioned, self._tokens, joining.bookie_id),
            fence=record.closed,
            pace=self._pace,
        )
        try:
            if record.closed and not entries:
                await copies.fence_at(joining.first_entry)
            await copies.bring_back(entries, joining.slot)
        except CannotCompare as failure:
            self._copied += copies.copied
            return await self._try_another(record, joining, f"{joining.bookie_id}: {failure}")
        self._copied += copies.copied
        if copies.unsupplied:
            damaged = tuple(copies.unsupplied)
            return SlotResult(self._slot, "", self._copied, copies.unsupplied_text(), damaged)
        try:
            old = self._slot.old
            await self._records.move(versioned, lambda now: transitions.swap(now, old, joining))
        except MoveRefused as refused:
            return SlotResult(self._slot, "", self._copied, refused.why)
        return SlotResult(self._slot, joining.bookie_id, self._copied)

    async def _try_another(
        self, record: LedgerRecord, joining: JoiningBookie, why: str
    ) -> SlotResult:
        """Replace the joining bookie by another bookie and try again. If no other bookie can join,
        `joining` stays, because it may take copies later."""
        self._avoid.append(joining.bookie_id)
        if self._choose_joining(record) is None:
            return SlotResult(self._slot, "", self._copied, why)
        return await self.run()
