"""One slot of a fragment given to another bookie: joined, copied, swapped.

    a compare-and-set names the joining bookie in the record -> it gets every entry of the slot that
    it lacks, synced -> a compare-and-set puts it in the place of the old member

Always true:
- only settled fragments are repaired: every fragment of a CLOSED ledger, all but the last of an
  OPEN one; the first entry of a fragment and the end of the ledger never change (transitions.py);
- the joining bookie is named before its first copy, so its copies are no garbage; no reader asks it
  before the swap; the swap needs the same joining (its token) that was compared, so a worker that
  slept while the bookie left, dropped its copies and joined again swaps nothing;
- for a CLOSED ledger the joining bookie is fenced before it has a copy: it may have been a member
  before, and a writer of that time may still send adds to it;
- if no peer supplies an entry, the others are copied, and the slot is not swapped;
- a copy that is misplaced goes only to a bookie that clashes with fewer of the others (placement.py
  counts), so an ensemble gets better with each move, and moves end;
- a joining bookie that takes no copies, or gives no response, leaves the slot to another bookie, if
  one can join.
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
NO_RACK = " (racks are hard: it needs one on a rack of its own)"
NO_BETTER = "no bookie is placed better any more"
NO_COPY = "none of the bookies that hold its copies is registered"


class FragmentSlot(NamedTuple):
    """A slot of the fragment that begins at `first_entry`, and the member to replace, `old`."""

    first_entry: int
    slot: int
    old: str


class Moved(NamedTuple):
    """The result for a slot: without a `why`, `new` owns it. `copied` counts entries."""

    slot: FragmentSlot
    new: str = ""
    copied: int = 0
    why: str = ""
    damaged: tuple[int, ...] = ()
    """Entries that no bookie supplies."""


def slots_of(record: LedgerRecord, bookie_ids: Collection[str]) -> list[FragmentSlot]:
    """The settled slots that these bookies own."""
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
    """The settled slots that a better placed bookie can take."""
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
        if (better := _better(cluster, quorum, ensemble, slot, {*ensemble, *avoid}))
        and _choose(cluster, quorum, ensemble, slot, better)
    ]


def can_be_taken(
    cluster: Cluster, quorum: Quorum, ensemble: Sequence[str], slot: int, spares: Collection[str]
) -> bool:
    """Whether placement finds one of the spares for the slot."""
    return _choose(cluster, quorum, ensemble, slot, _able(cluster, ensemble, spares)) is not None


def kept(
    cluster: Cluster,
    quorum: Quorum,
    ensemble: Sequence[str],
    stays: Collection[str],
    spares: Collection[str],
) -> int:
    """A mask of the slots whose member `stays`, or for which placement finds one of the spares."""
    info = cluster.directory.info
    members = {slot: info(bookie) for slot, bookie in enumerate(ensemble) if bookie in stays}
    others = [slot for slot in range(len(ensemble)) if slot not in members]
    able = _able(cluster, ensemble, spares)
    taken = cluster.place(quorum, others, able, members) if others and able else {}
    return sum(1 << slot for slot in (*members, *taken))


def _able(cluster: Cluster, ensemble: Sequence[str], spares: Collection[str]) -> list[BookieInfo]:
    """Those of the spares that are not members of the ensemble."""
    info = cluster.directory.info
    return [info(bookie) for bookie in sorted(spares) if bookie not in ensemble]


def _better(
    cluster: Cluster, quorum: Quorum, ensemble: Sequence[str], slot: int, taken: Collection[str]
) -> list[BookieInfo]:
    """The writable bookies that are not `taken` and clash less than the slot's member does."""
    info = cluster.directory.info
    near = neighbours(slot, quorum.ensemble_size, quorum.write_quorum)
    others = [info(ensemble[other]) for other in near]
    present = clashes(info(ensemble[slot]), others)
    if not present:
        return []
    spares = [bookie for bookie in cluster.directory.writable() if bookie.id not in taken]
    return [bookie for bookie in spares if clashes(bookie, others) < present]


def _choose(
    cluster: Cluster,
    quorum: Quorum,
    ensemble: Sequence[str],
    slot: int,
    spares: Sequence[BookieInfo],
) -> str | None:
    """The spare that placement takes for the slot, if any."""
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
) -> Moved:
    """Have another bookie take the slot. `avoid`: bookies that must not take it, because they go,
    too; `better`: only a bookie that is placed better than the member.

    On return without a `why`, every entry of the slot at `new` and the record that names `new` are
    durable. Raises NoSuchLedger, Unavailable, what `pace` raises; can be called again at any time.
    """
    return await _Move(ledgers, ledger_id, slot, tokens, avoid, better, pace).run()


async def withdraw(ledgers: LedgerStore, ledger_id: int, joining: JoiningBookie) -> None:
    """End the joining: the copies that the bookie was given become garbage. Raises NoSuchLedger,
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

    async def run(self) -> Moved:
        versioned = await self._records.read(self._ledger_id, fresh=True)
        if not self._within_reach(versioned.record):
            return Moved(self._slot, why=NO_COPY)
        for member in versioned.record.fragment_of(self._slot.first_entry).ensemble:
            await self._cluster.directory.find(member)  # its rack, however long it is gone
        joining = self._joining(versioned.record)
        if joining is None:
            if self._better:
                return Moved(self._slot, why=NO_BETTER)
            hard = NO_RACK if self._cluster.config.racks == "hard" else ""
            return Moved(self._slot, why=NO_SPARE + hard)
        await self._pace(0)  # raises if the copies are no longer needed
        old, present = self._slot.old, versioned.record.joining_at(*self._slot[:2])
        try:
            versioned = await self._records.move(
                versioned, lambda record: transitions.join(record, old, joining, present)
            )
        except MoveRefused as refused:
            return Moved(self._slot, why=refused.why)
        return await self._fill(versioned, joining)

    def _within_reach(self, record: LedgerRecord) -> bool:
        """Whether a registered member may supply the entries, if there are any."""
        if not self._entries(record):
            return True
        directory = self._cluster.directory
        registered = {bookie.id for bookie in (*directory.writable(), *directory.readonly())}
        return not registered.isdisjoint(record.fragment_of(self._slot.first_entry).ensemble)

    def _joining(self, record: LedgerRecord) -> JoiningBookie | None:
        """The bookie that is joining already, if it takes copies; otherwise a new one that can."""
        first_entry, slot, _ = self._slot
        present = record.joining_at(first_entry, slot)
        ensemble, quorum = record.fragment_of(first_entry).ensemble, Quorum.of(record)
        spares = self._spares(quorum, ensemble)
        if present is not None and any(bookie.id == present.bookie_id for bookie in spares):
            return present
        others = [j.bookie_id for j in record.joining if j.first_entry == first_entry]
        spares = [bookie for bookie in spares if bookie.id not in others]
        chosen = _choose(self._cluster, quorum, ensemble, slot, spares)
        if chosen is None:
            return None
        return JoiningBookie(first_entry, slot, chosen, f"{self._rng.getrandbits(64):016x}")

    def _spares(self, quorum: Quorum, ensemble: Sequence[str]) -> list[BookieInfo]:
        """The bookies that may take the slot."""
        taken = {*ensemble, *self._avoid}
        if self._better:
            return _better(self._cluster, quorum, ensemble, self._slot.slot, taken)
        return [bookie for bookie in self._cluster.directory.writable() if bookie.id not in taken]

    def _entries(self, record: LedgerRecord) -> range:
        """The settled entries of the fragment."""
        last = record.last_entry
        if last is None:  # every entry below the last fragment is confirmed
            last = record.last_fragment.first_entry - 1
        return next(
            entries
            for fragment, entries in entries_of(record, last)
            if fragment.first_entry == self._slot.first_entry
        )

    async def _fill(self, versioned: VersionedRecord, joining: JoiningBookie) -> Moved:
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
            return await self._without(record, joining, f"{joining.bookie_id}: {failure}")
        self._copied += copies.copied
        if copies.unsupplied:
            damaged = tuple(copies.unsupplied)
            return Moved(self._slot, "", self._copied, copies.missing(), damaged)
        try:
            old = self._slot.old
            await self._records.move(versioned, lambda now: transitions.swap(now, old, joining))
        except MoveRefused as refused:
            return Moved(self._slot, "", self._copied, refused.why)
        return Moved(self._slot, joining.bookie_id, self._copied)

    async def _without(self, record: LedgerRecord, joining: JoiningBookie, why: str) -> Moved:
        """Go on with another bookie in the place of `joining`; if no other can join, `joining`
        stays, because it may be able to take copies later."""
        self._avoid.append(joining.bookie_id)
        if self._joining(record) is None:
            return Moved(self._slot, "", self._copied, why)
        return await self.run()
