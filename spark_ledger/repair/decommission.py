"""Emptying a bookie that is up: its copies are made elsewhere, then it may be stopped and
forgotten.

    check which copies would remain -> make a node that names it as draining: from then on it is
    read-only, and writers replace it -> list its ledgers; workers give its slots away -> no record
    names it

Always true: no draining begins that would leave a ledger with fewer copies than its write quorum
(if forced: than its ack quorum) and with fewer than it would have without the draining, both
counted once all copies are made that can be. Bookies that are down or drain, too, count as gone;
the check also covers ledgers that need the bookie as a spare. If two drainings begin at once and
only one can be, not both go on. A caller that stops looking stops no draining. `forget` takes a
bookie off the list of those ever seen, but never one that is registered or that a ledger's record
names, because its copies may still be needed. Its limbo list, the mark that it was drained and the
declaration that it is lost go with it.
"""

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import lru_cache
from typing import NamedTuple

from spark_ledger.errors import (
    BadConfig,
    NoSuchLedger,
    NotEnoughBookies,
    Unavailable,
    UnsupportedFormat,
    counted,
)
from spark_ledger.ledger.client import LedgerStore
from spark_ledger.ledger.cluster import Cluster
from spark_ledger.ledger.quorum import Quorum
from spark_ledger.metadata import autorecovery, paths, unrecorded
from spark_ledger.metadata.autorecovery import BadAutorecoverySettings
from spark_ledger.metadata.cluster import multi_unless_held
from spark_ledger.metadata.ledger_record import LedgerRecord, entries_of
from spark_ledger.metadata.store import (
    ANY_VERSION,
    Delete,
    MetadataStore,
    MultiFailed,
    NodeExists,
    NoNode,
    OutcomeUnknown,
)
from spark_ledger.metadata.store_calls import (
    call_each,
    in_batches,
    names_in,
    reachable,
    store_now_ms,
)
from spark_ledger.repair import slots, status, work_list
from spark_ledger.repair.limbo import never_seen
from spark_ledger.repair.work_list import Cause, Reason
from spark_ledger.repair.worker import bookies

RECORDS_AT_ONCE = 128
ENSEMBLES_MAX = 10_000  # many ledgers have one ensemble
LOOK_S = 1.0
CANCELLED = "the decommission was cancelled"


@dataclass(frozen=True, slots=True)
class Left:
    """What the bookie still holds: how many `ledgers`, and about how many `bytes` of closed ones.
    `blocked`: why a ledger does not move for now; `hindrance`: why no ledger moves. `stuck` ledgers
    stay, because no other bookie can take their copies and the draining was forced; `unrecorded`
    ones have no record, so no process knows where else they are."""

    ledgers: int
    bytes: int
    blocked: Mapping[int, str] = field(default_factory=dict)
    hindrance: str = ""
    stuck: int = 0
    unrecorded: int = 0

    @property
    def done(self) -> bool:
        """Whether the bookie may be stopped; and forgotten, if nothing is stuck."""
        return self.ledgers == self.stuck and not self.unrecorded


async def decommission(
    ledgers: LedgerStore, bookie_id: str, *, force: bool = False, look_s: float = LOOK_S
) -> AsyncGenerator[Left, None]:
    """Drain the bookie; returns again and again what it still holds, the last time when the
    draining is `done` or was cancelled. A caller that stops looking stops no draining; a later call
    looks on.

    Raises BadConfig for a bookie that was never seen or is down, NotEnoughBookies if too few others
    would remain (the draining does not begin then), Unavailable.
    """
    store = ledgers.metadata
    holding = await begin(ledgers, bookie_id, force=force)
    while True:
        records = await _naming(ledgers, bookie_id, holding)
        if not records:  # other ledgers may name the bookie meanwhile
            records = await _all_naming(ledgers, bookie_id)
            await _list(store, bookie_id, records)
        then = (await _standing(store, bookie_id)).without(bookie_id)
        cluster = ledgers.cluster
        stuck = [r for r in records if force and _is_stuck(cluster, r, bookie_id, then)]
        left = await _left(store, bookie_id, records, len(stuck))
        yield left
        if left.done or left.hindrance == CANCELLED:
            return
        holding = [record.ledger_id for record in records]
        await asyncio.sleep(look_s)


async def begin(ledgers: LedgerStore, bookie_id: str, *, force: bool = False) -> list[int]:
    """Begin to drain the bookie; returns the ledgers that name it. On return this is durable: the
    draining goes on without this caller. Raises as `decommission`."""
    store, path = ledgers.metadata, paths.draining(bookie_id)
    with reachable("beginning to drain a bookie"):
        if bookie_id in (await bookies(store)).draining:
            records = await _all_naming(ledgers, bookie_id)
        else:
            await _check_bookie(store, bookie_id)
            before = await _standing(store, bookie_id)
            await _check_copies(ledgers, bookie_id, before, force)
            with suppress(NodeExists, OutcomeUnknown):
                await store.create(path, parents=True)
            try:  # another may have begun at the same time, and this one is read-only by now
                now = await _standing(store, bookie_id)
                now = now._replace(spares=now.spares | before.spares & {bookie_id})
                records = await _check_copies(ledgers, bookie_id, now, force)
            except BaseException:
                await cancel(ledgers, bookie_id)
                raise
            await store.sync(path)
            if bookie_id not in await autorecovery.draining(store):
                raise Unavailable(f"whether bookie {bookie_id} drains is not known")
        await _list(store, bookie_id, records)
    return [record.ledger_id for record in records]


async def cancel(ledgers: LedgerStore, bookie_id: str) -> bool:
    """End the draining: the bookie keeps what it has and takes entries again. Whether it was
    draining. Durable on return. Raises Unavailable."""
    store = ledgers.metadata
    with reachable("ending the draining of a bookie"):
        await store.sync(paths.BOOKIES_DRAINING)
        if bookie_id not in await autorecovery.draining(store):
            return False
        with suppress(NoNode, OutcomeUnknown):
            await store.delete(paths.draining(bookie_id))
        return True


async def _list(store: MetadataStore, bookie_id: str, records: Collection[LedgerRecord]) -> None:
    """List the ledgers: the auditor may have made its pass before they named the bookie."""
    with reachable("asking the metadata store for the time"):
        since_ms = await store_now_ms(store) if records else 0
    reason = Reason(Cause.DRAINED, bookie_id, since_ms)

    async def add(record: LedgerRecord) -> None:
        await work_list.add(store, record.ledger_id, [reason])

    with reachable("listing the ledgers of a bookie"):
        await call_each(add, records, RECORDS_AT_ONCE)


async def _check_bookie(store: MetadataStore, bookie_id: str) -> None:
    if bookie_id in (await bookies(store)).registered:
        return
    if bookie_id in await names_in(store, paths.BOOKIES_KNOWN):
        raise BadConfig(
            f"bookie {bookie_id} is not registered: it is down",
            "Start it and drain it then; or leave it: what a lost bookie held is copied from the"
            " others after lost_bookie_delay_s (`spark-ledger autorecovery status`).",
        )
    raise never_seen(bookie_id)


# -- what would remain -------------------------------------------------------------------------


class _Standing(NamedTuple):
    """`stays`: the bookies that are registered and do not drain; `spares`: those of them that take
    copies."""

    stays: frozenset[str]
    spares: frozenset[str]

    def without(self, bookie_id: str) -> "_Standing":
        return _Standing(self.stays - {bookie_id}, self.spares - {bookie_id})


async def _standing(store: MetadataStore, bookie_id: str) -> _Standing:
    """The bookies that stay, as if this bookie did not drain. Raises Unavailable."""
    with reachable("asking which bookies are registered"):
        now = await bookies(store)
        stays = now.registered - (now.draining - {bookie_id})
        return _Standing(stays, stays & {*await names_in(store, paths.BOOKIES_AVAILABLE)})


def _copies_then(
    cluster: Cluster, quorum: Quorum, ensemble: Sequence[str], now: _Standing, spares: bool = True
) -> int:
    """The fewest copies that an entry of the ensemble has once the members that do not stay are
    replaced by spares, as far as placement finds one for each (`spares` False: not at all)."""
    kept = slots.kept(cluster, quorum, ensemble, now.stays, now.spares if spares else ())
    return min((mask & kept).bit_count() for mask in quorum.write_masks())


async def _check_copies(
    ledgers: LedgerStore, bookie_id: str, now: _Standing, force: bool
) -> list[LedgerRecord]:
    """The records that name the bookie. Every ledger is checked: one that does not name the bookie
    may need it as a spare. Raises NotEnoughBookies, Unavailable."""
    then = now.without(bookie_id)

    @lru_cache(maxsize=ENSEMBLES_MAX)
    def left_of(quorum: Quorum, ensemble: tuple[str, ...]) -> int | None:
        """The copies that are left, if they are too few, and fewer than without the draining."""
        left = _copies_then(ledgers.cluster, quorum, ensemble, then)
        few = left < quorum.write_quorum
        return left if few and left < _copies_then(ledgers.cluster, quorum, ensemble, now) else None

    naming, short = [], 0
    lowest: tuple[int, int, LedgerRecord] | None = None
    async for record in _all_records(ledgers):
        if record.names(bookie_id):
            naming.append(record)
        quorum = Quorum.of(record)
        lefts = [left_of(quorum, fragment.ensemble) for fragment in record.fragments]
        left = min((few for few in lefts if few is not None), default=None)
        if left is not None:
            short += 1
            if lowest is None or left - record.ack_quorum < lowest[0]:
                lowest = left - record.ack_quorum, left, record
    if lowest is not None and not (force and lowest[0] >= 0):
        raise _too_few(bookie_id, then, short, *lowest[1:])
    return naming


def _too_few(
    bookie_id: str, then: _Standing, short: int, left: int, lowest: LedgerRecord
) -> NotEnoughBookies:
    members = {bookie: None for fragment in lowest.fragments for bookie in fragment.ensemble}
    gone = [bookie for bookie in members if bookie not in then.stays and bookie != bookie_id]
    also = f"; {', '.join(gone)} of it: down, or drained too" if gone else ""
    what = (
        f"without bookie {bookie_id} {counted(len(then.spares), 'writable bookie')} would remain,"
        f" and no other can take the copies of {counted(short, 'ledger')}: ledger"
        f" {lowest.ledger_id} (E={lowest.ensemble_size}, Qw={lowest.write_quorum},"
        f" Qa={lowest.ack_quorum}{also}) would keep {left} of each entry"
    )
    remedy = "Add bookies, or end another decommission; "
    if left < lowest.ack_quorum:
        return NotEnoughBookies(what, f"{remedy}it cannot be forced below Qa.")
    return NotEnoughBookies(what, f"{remedy}--force leaves such ledgers with fewer copies.")


def _is_stuck(cluster: Cluster, record: LedgerRecord, bookie_id: str, then: _Standing) -> bool:
    """Whether no other bookie can take any of its places, and the ledger keeps its ack quorum of
    copies without it."""
    quorum = Quorum.of(record)
    ensembles = [f.ensemble for f in record.fragments if bookie_id in f.ensemble]
    return bool(ensembles) and not any(
        slots.can_be_taken(cluster, quorum, ensemble, ensemble.index(bookie_id), then.spares)
        or _copies_then(cluster, quorum, ensemble, then, spares=False) < quorum.ack_quorum
        for ensemble in ensembles
    )


# -- which ledgers -----------------------------------------------------------------------------


async def _all_records(ledgers: LedgerStore) -> AsyncIterator[LedgerRecord]:
    """Raises Unavailable; UnsupportedFormat, because the bookies that such a record names are not
    known."""
    with reachable("listing the ledgers of a bookie"):
        await ledgers.metadata.sync()
    async for batch in in_batches(ledgers.list(), RECORDS_AT_ONCE):
        for versioned in await ledgers.cluster.records.read_many(batch):
            if isinstance(versioned, UnsupportedFormat):
                raise versioned
            if versioned is not None:  # else it was deleted meanwhile
                yield versioned.record


async def _all_naming(ledgers: LedgerStore, bookie_id: str) -> list[LedgerRecord]:
    """Raises as `_all_records`."""
    return [record async for record in _all_records(ledgers) if record.names(bookie_id)]


async def _naming(
    ledgers: LedgerStore, bookie_id: str, among: Collection[int]
) -> list[LedgerRecord]:
    """The records of those of these ledgers that still name the bookie. Raises LedgerError."""
    naming: list[LedgerRecord] = []

    async def see(ledger_id: int) -> None:
        with suppress(NoSuchLedger):  # deleted meanwhile
            record = (await ledgers.record(ledger_id, fresh=True)).record
            if record.names(bookie_id):
                naming.append(record)

    await call_each(see, among, RECORDS_AT_ONCE)
    return naming


async def _left(
    store: MetadataStore, bookie_id: str, records: Collection[LedgerRecord], stuck: int
) -> Left:
    blocked: dict[int, str] = {}
    hindrance = ""
    with reachable("asking for ledgers without a record"):
        kept = len(await unrecorded.kept_by(store, bookie_id))
    if kept:
        hindrance = f"it keeps {counted(kept, 'ledger')} without a record: `ledger unrecorded`"
    if len(records) > stuck or kept:
        with reachable("asking what hinders the draining"):
            works = await call_each(
                lambda record: work_list.find(store, record.ledger_id), records, RECORDS_AT_ONCE
            )
        blocked = {w.ledger_id: w.blocked for w in works if w is not None and w.blocked}
        now = await status.status(store)
        if bookie_id not in now.draining:
            hindrance = CANCELLED
        elif now.held:
            hindrance = "the metadata store is held: `spark-ledger metadata status`"
        elif not now.enabled:
            hindrance = "autorecovery is disabled: `spark-ledger autorecovery enable`"
        elif not now.auditor:
            hindrance = "no process hosts autorecovery: `spark-ledger autorecovery start`"
    size = round(sum(_bytes_at(record, bookie_id) for record in records))
    return Left(len(records), size, blocked, hindrance, stuck, kept)


def _bytes_at(record: LedgerRecord, bookie_id: str) -> float:
    """About how many bytes the bookie holds of a closed ledger."""
    if not record.last_entry or not record.length_bytes:
        return float(record.length_bytes or 0)
    kept = sum(
        len(entries) * record.write_quorum / record.ensemble_size
        for fragment, entries in entries_of(record, record.last_entry)
        if bookie_id in fragment.ensemble
    )
    return record.length_bytes * kept / (record.last_entry + 1)


# -- forgetting --------------------------------------------------------------------------------


async def forget(ledgers: LedgerStore, bookie_id: str) -> None:
    """Take the bookie off the list of those ever seen. Raises BadConfig when it was never seen, is
    registered, or is named by a ledger; MetadataHeld (`metadata accept` names the bookies that have
    not responded to it); Unavailable: nodes that were deleted already stay deleted, and a second
    call goes on."""
    with reachable("forgetting a bookie"):
        await _forget(ledgers, bookie_id)


async def _forget(ledgers: LedgerStore, bookie_id: str) -> None:
    store = ledgers.metadata
    await store.sync()
    if bookie_id not in await names_in(store, paths.BOOKIES_KNOWN):
        raise never_seen(bookie_id)
    for folder in (paths.BOOKIES_AVAILABLE, paths.BOOKIES_READONLY):
        if bookie_id in await names_in(store, folder):
            raise BadConfig(f"bookie {bookie_id} is registered: it runs", "Stop it first.")
    named = [record.ledger_id for record in await _all_naming(ledgers, bookie_id)]
    if named:
        raise BadConfig(
            f"{counted(len(named), 'ledger')} still on bookie {bookie_id}, the first is {named[0]}",
            "It may hold the copy that is needed: bring it back, or wait until its copies were made"
            " elsewhere (`spark-ledger autorecovery status`).",
        )
    for name in await names_in(store, paths.limbo(bookie_id)):
        await _delete(store, f"{paths.limbo(bookie_id)}/{name}")
    await _delete(store, paths.limbo(bookie_id))
    await _delete(store, paths.draining(bookie_id))
    await _delete(store, paths.unrecorded(bookie_id))
    await _delete(store, paths.bookie_start(bookie_id))
    with suppress(BadAutorecoverySettings):
        accepted = (await autorecovery.read_settings(store)).accepted
        if bookie_id in accepted:
            others = tuple(bookie for bookie in accepted if bookie != bookie_id)
            await autorecovery.change_settings(store, accepted=others)
    await _delete(store, f"{paths.BOOKIES_KNOWN}/{bookie_id}")


async def _delete(store: MetadataStore, path: str) -> None:
    try:
        await multi_unless_held(store, [Delete(path, ANY_VERSION)])
    except MultiFailed as failed:
        if not isinstance(failed.cause, NoNode):
            raise failed.cause from None
