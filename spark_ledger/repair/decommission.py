"""Draining a bookie that is up: its copies are made on other bookies, then it may be stopped and
forgotten.

    check which copies would remain -> make a node that names the bookie as draining: from then on
    the bookie is read-only, and writers replace it -> list its ledgers; workers give its slots away
    -> no record names the bookie

Always true: a draining does not begin if a ledger would then have fewer copies than its write
quorum (if forced: than its ack quorum) and fewer copies than without the draining. Copies are
counted as they will be once all possible copies are made. Other bookies that are down or draining
count as gone; the check also covers ledgers that need the bookie as a spare. If two drainings begin
at once and only one of them is possible, at most one continues. The end of a caller's look does not
stop the draining. `forget` removes a bookie from the list of known bookies, but never a bookie that
is registered or that a ledger's record names, because its copies may still be needed. `forget` also
removes the bookie's limbo list, its mark of draining and the declaration that it is lost.
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
    store_now_ms,
    unavailable_while,
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
class DrainProgress:
    """How many `ledgers` the bookie still has copies of, and about how many `bytes` of closed
    ledgers. `blocked`: ledgers that do not move for now, each with the reason; `hindrance`: why no
    ledger moves. `stuck`: how many ledgers no other bookie can take copies of, in a forced
    draining. `unrecorded`: how many ledgers have no record, so that no process knows where other
    copies are."""

    ledgers: int
    bytes: int
    blocked: Mapping[int, str] = field(default_factory=dict)
    hindrance: str = ""
    stuck: int = 0
    unrecorded: int = 0

    @property
    def done(self) -> bool:
        """Whether the bookie may be stopped; and forgotten, if no ledger is stuck."""
        return self.ledgers == self.stuck and not self.unrecorded


async def decommission(
    ledgers: LedgerStore, bookie_id: str, *, force: bool = False, look_s: float = LOOK_S
) -> AsyncGenerator[DrainProgress, None]:
    """Drain the bookie; yields its progress again and again, until the draining is `done` or was
    cancelled. The draining goes on if the caller stops the iteration; a later call continues to
    look.

    Raises BadConfig for a bookie that is not known or is down, NotEnoughBookies if too few other
    bookies would remain (the draining does not begin then), Unavailable.
    """
    store = ledgers.metadata
    ledger_ids = await begin(ledgers, bookie_id, force=force)
    while True:
        records = await _still_naming(ledgers, bookie_id, ledger_ids)
        if not records:  # other ledgers may name the bookie meanwhile
            records = await _all_records_naming(ledgers, bookie_id)
            await _list(store, bookie_id, records)
        after = (await _staying_bookies(store, bookie_id)).without(bookie_id)
        cluster = ledgers.cluster
        stuck = [r for r in records if force and _is_stuck(cluster, r, bookie_id, after)]
        progress = await _progress(store, bookie_id, records, len(stuck))
        yield progress
        if progress.done or progress.hindrance == CANCELLED:
            return
        ledger_ids = [record.ledger_id for record in records]
        await asyncio.sleep(look_s)


async def begin(ledgers: LedgerStore, bookie_id: str, *, force: bool = False) -> list[int]:
    """Begin to drain the bookie; returns the ledgers that name it. On return the draining is
    durable, and continues without this caller. Raises as `decommission`."""
    store, path = ledgers.metadata, paths.draining(bookie_id)
    with unavailable_while("beginning to drain a bookie"):
        if bookie_id in (await bookies(store)).draining:
            records = await _all_records_naming(ledgers, bookie_id)
        else:
            await _check_bookie(store, bookie_id)
            before = await _staying_bookies(store, bookie_id)
            await _check_copies(ledgers, bookie_id, before, force)
            with suppress(NodeExists, OutcomeUnknown):
                await store.create(path, parents=True)
            try:  # another draining may have begun at the same time; this bookie is read-only now
                staying = await _staying_bookies(store, bookie_id)
                staying = staying._replace(spares=staying.spares | before.spares & {bookie_id})
                records = await _check_copies(ledgers, bookie_id, staying, force)
            except BaseException:
                await cancel(ledgers, bookie_id)
                raise
            await store.sync(path)
            if bookie_id not in await autorecovery.draining_bookies(store):
                raise Unavailable(f"whether bookie {bookie_id} drains is not known")
        await _list(store, bookie_id, records)
    return [record.ledger_id for record in records]


async def cancel(ledgers: LedgerStore, bookie_id: str) -> bool:
    """End the draining: the bookie keeps its remaining copies and takes entries again. Returns
    whether it was draining. Durable on return. Raises Unavailable."""
    store = ledgers.metadata
    with unavailable_while("ending the draining of a bookie"):
        await store.sync(paths.BOOKIES_DRAINING)
        if bookie_id not in await autorecovery.draining_bookies(store):
            return False
        with suppress(NoNode, OutcomeUnknown):
            await store.delete(paths.draining(bookie_id))
        return True


async def _list(store: MetadataStore, bookie_id: str, records: Collection[LedgerRecord]) -> None:
    """List the ledgers, as the auditor may have made its pass before these ledgers named the
    bookie."""
    with unavailable_while("asking the metadata store for the time"):
        since_ms = await store_now_ms(store) if records else 0
    reason = Reason(Cause.DRAINED, bookie_id, since_ms)

    async def add(record: LedgerRecord) -> None:
        await work_list.add(store, record.ledger_id, [reason])

    with unavailable_while("listing the ledgers of a bookie"):
        await call_each(add, records, RECORDS_AT_ONCE)


async def _check_bookie(store: MetadataStore, bookie_id: str) -> None:
    if bookie_id in (await bookies(store)).registered:
        return
    if bookie_id in await names_in(store, paths.BOOKIES_KNOWN):
        raise BadConfig(
            f"bookie {bookie_id} is not registered: it is down",
            "Start the bookie, then drain it. Or leave it down: the copies of a lost bookie are"
            " made again from other copies after lost_bookie_delay_s (`spark-ledger autorecovery"
            " status`).",
        )
    raise never_seen(bookie_id)


# -- copies that would remain ------------------------------------------------------------------


class _StayingBookies(NamedTuple):
    """`stays`: the bookies that are registered and do not drain; `spares`: the bookies among them
    that take copies."""

    stays: frozenset[str]
    spares: frozenset[str]

    def without(self, bookie_id: str) -> "_StayingBookies":
        return _StayingBookies(self.stays - {bookie_id}, self.spares - {bookie_id})


async def _staying_bookies(store: MetadataStore, bookie_id: str) -> _StayingBookies:
    """The staying bookies; this bookie counts as not draining. Raises Unavailable."""
    with unavailable_while("asking which bookies are registered"):
        current = await bookies(store)
        stays = current.registered - (current.draining - {bookie_id})
        return _StayingBookies(stays, stays & {*await names_in(store, paths.BOOKIES_AVAILABLE)})


def _copies_after(
    cluster: Cluster,
    quorum: Quorum,
    ensemble: Sequence[str],
    staying: _StayingBookies,
    spares: bool = True,
) -> int:
    """The fewest copies that any entry of the ensemble has, once spares that placement finds have
    replaced the members that do not stay (`spares` False: without replacement)."""
    kept = slots.kept_slots(
        cluster, quorum, ensemble, staying.stays, staying.spares if spares else ()
    )
    return min((mask & kept).bit_count() for mask in quorum.write_masks())


async def _check_copies(
    ledgers: LedgerStore, bookie_id: str, staying: _StayingBookies, force: bool
) -> list[LedgerRecord]:
    """The records that name the bookie. Every ledger is checked: a ledger that does not name the
    bookie may need it as a spare. Raises NotEnoughBookies, Unavailable."""
    after = staying.without(bookie_id)

    @lru_cache(maxsize=ENSEMBLES_MAX)
    def copies_if_too_few(quorum: Quorum, ensemble: tuple[str, ...]) -> int | None:
        """The number of copies that remain, if it is too low, and lower than without the
        draining."""
        copies_left = _copies_after(ledgers.cluster, quorum, ensemble, after)
        is_too_few = copies_left < quorum.write_quorum
        return (
            copies_left
            if is_too_few
            and copies_left < _copies_after(ledgers.cluster, quorum, ensemble, staying)
            else None
        )

    records, short_count = [], 0
    lowest: tuple[int, int, LedgerRecord] | None = None
    async for record in _all_records(ledgers):
        if record.names(bookie_id):
            records.append(record)
        quorum = Quorum.of(record)
        fragment_copies = [
            copies_if_too_few(quorum, fragment.ensemble) for fragment in record.fragments
        ]
        copies_left = min((count for count in fragment_copies if count is not None), default=None)
        if copies_left is not None:
            short_count += 1
            if lowest is None or copies_left - record.ack_quorum < lowest[0]:
                lowest = copies_left - record.ack_quorum, copies_left, record
    if lowest is not None and not (force and lowest[0] >= 0):
        raise _too_few(bookie_id, after, short_count, *lowest[1:])
    return records


def _too_few(
    bookie_id: str, after: _StayingBookies, short_count: int, copies_left: int, lowest: LedgerRecord
) -> NotEnoughBookies:
    members = {bookie: None for fragment in lowest.fragments for bookie in fragment.ensemble}
    absent = [bookie for bookie in members if bookie not in after.stays and bookie != bookie_id]
    absent_text = f"; its members {', '.join(absent)} are down or drained" if absent else ""
    what = (
        f"without bookie {bookie_id} {counted(len(after.spares), 'writable bookie')} would remain,"
        f" and no other bookie can take the copies of {counted(short_count, 'ledger')}: ledger"
        f" {lowest.ledger_id} (E={lowest.ensemble_size}, Qw={lowest.write_quorum},"
        f" Qa={lowest.ack_quorum}{absent_text}) would keep {copies_left} of each entry"
    )
    remedy = "Add bookies, or end another decommission; "
    if copies_left < lowest.ack_quorum:
        return NotEnoughBookies(what, f"{remedy}--force does not allow fewer copies than Qa.")
    return NotEnoughBookies(what, f"{remedy}--force leaves such ledgers with fewer copies.")


def _is_stuck(
    cluster: Cluster, record: LedgerRecord, bookie_id: str, after: _StayingBookies
) -> bool:
    """Whether no other bookie can take any slot of the bookie, and the ledger keeps its ack quorum
    of copies without the bookie."""
    quorum = Quorum.of(record)
    ensembles = [f.ensemble for f in record.fragments if bookie_id in f.ensemble]
    return bool(ensembles) and not any(
        slots.can_be_taken(cluster, quorum, ensemble, ensemble.index(bookie_id), after.spares)
        or _copies_after(cluster, quorum, ensemble, after, spares=False) < quorum.ack_quorum
        for ensemble in ensembles
    )


# -- ledgers that name a bookie ----------------------------------------------------------------


async def _all_records(ledgers: LedgerStore) -> AsyncIterator[LedgerRecord]:
    """The records of all ledgers. Raises Unavailable; UnsupportedFormat, because the bookies of
    such a record are not known."""
    with unavailable_while("listing the ledgers of a bookie"):
        await ledgers.metadata.sync()
    async for batch in in_batches(ledgers.list(), RECORDS_AT_ONCE):
        for versioned in await ledgers.cluster.records.read_many(batch):
            if isinstance(versioned, UnsupportedFormat):
                raise versioned
            if versioned is not None:  # None: the ledger was deleted meanwhile
                yield versioned.record


async def _all_records_naming(ledgers: LedgerStore, bookie_id: str) -> list[LedgerRecord]:
    """Raises as `_all_records`."""
    return [record async for record in _all_records(ledgers) if record.names(bookie_id)]


async def _still_naming(
    ledgers: LedgerStore, bookie_id: str, ledger_ids: Collection[int]
) -> list[LedgerRecord]:
    """The records among these ledgers that still name the bookie. Raises LedgerError."""
    records: list[LedgerRecord] = []

    async def look_up(ledger_id: int) -> None:
        with suppress(NoSuchLedger):  # the ledger was deleted meanwhile
            record = (await ledgers.record(ledger_id, fresh=True)).record
            if record.names(bookie_id):
                records.append(record)

    await call_each(look_up, ledger_ids, RECORDS_AT_ONCE)
    return records


async def _progress(
    store: MetadataStore, bookie_id: str, records: Collection[LedgerRecord], stuck: int
) -> DrainProgress:
    blocked: dict[int, str] = {}
    hindrance = ""
    with unavailable_while("asking for ledgers without a record"):
        kept = len(await unrecorded.unrecorded_of(store, bookie_id))
    if kept:
        hindrance = f"it keeps {counted(kept, 'ledger')} without a record: `ledger unrecorded`"
    if len(records) > stuck or kept:
        with unavailable_while("asking what hinders the draining"):
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
    return DrainProgress(len(records), size, blocked, hindrance, stuck, kept)


def _bytes_at(record: LedgerRecord, bookie_id: str) -> float:
    """An estimate of the bytes that the bookie holds of a closed ledger."""
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
    """Remove the bookie from the list of known bookies. Raises BadConfig if it is not known, is
    registered, or is named by a ledger; MetadataHeld (`metadata accept` names the bookies that have
    not responded to it); Unavailable: some nodes may be deleted then, and a second call
    continues."""
    with unavailable_while("forgetting a bookie"):
        await _forget(ledgers, bookie_id)


async def _forget(ledgers: LedgerStore, bookie_id: str) -> None:
    store = ledgers.metadata
    await store.sync()
    if bookie_id not in await names_in(store, paths.BOOKIES_KNOWN):
        raise never_seen(bookie_id)
    for folder in (paths.BOOKIES_AVAILABLE, paths.BOOKIES_READONLY):
        if bookie_id in await names_in(store, folder):
            raise BadConfig(f"bookie {bookie_id} is registered: it runs", "Stop it first.")
    ledger_ids = [record.ledger_id for record in await _all_records_naming(ledgers, bookie_id)]
    if ledger_ids:
        raise BadConfig(
            f"{counted(len(ledger_ids), 'ledger')} still on bookie {bookie_id}, the first is"
            f" {ledger_ids[0]}",
            "Its copies may be needed: bring the bookie back, or wait until its copies were made on"
            " other bookies (`spark-ledger autorecovery status`).",
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
