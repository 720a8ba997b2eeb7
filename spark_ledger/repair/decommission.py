"""Emptying a bookie that is up: its copies are made elsewhere, then it may be stopped and
forgotten.

    what would remain is checked -> a node says that it is draining: it is read-only from then on,
    writers replace it -> its ledgers are listed, workers give its slots away -> no record names it

Always true: nothing is begun that would leave a ledger below its write quorum of copies, forced:
below its ack quorum, once the bookie is stopped, and other bookies that drain count as gone; of two
that are begun at once and cannot both be, neither goes on; who looks on may go away and come back.
"""

import asyncio
from collections.abc import AsyncGenerator, Collection, Mapping
from contextlib import suppress
from dataclasses import dataclass, field

from spark_ledger.errors import BadConfig, NoSuchLedger, NotEnoughBookies, Unavailable
from spark_ledger.ledger.client import LedgerStore
from spark_ledger.metadata import autorecovery, paths
from spark_ledger.metadata.ledger_record import LedgerRecord, entries_of
from spark_ledger.metadata.store import MetadataStore, NodeExists, NoNode, OutcomeUnknown
from spark_ledger.metadata.store_calls import each, reachable, store_now_ms
from spark_ledger.repair import status, work_list
from spark_ledger.repair.work_list import Reason
from spark_ledger.repair.worker import Bookies, bookies

RECORDS_AT_ONCE = 128
LOOK_S = 1.0
CANCELLED = "the decommission was cancelled"


@dataclass(frozen=True, slots=True)
class Left:
    """What the bookie still holds: `ledgers`, and about so many `bytes` of closed ones. `blocked`:
    why a ledger does not move for now; `hindrance`: why none does. `stuck` ledgers stay, for no
    other bookie can take their copies, which was forced."""

    ledgers: int
    bytes: int
    blocked: Mapping[int, str] = field(default_factory=dict)
    hindrance: str = ""
    stuck: int = 0

    @property
    def done(self) -> bool:
        """Whether the bookie may be stopped; and forgotten, if nothing is stuck."""
        return self.ledgers == self.stuck


async def decommission(
    ledgers: LedgerStore, bookie_id: str, *, force: bool = False, look_s: float = LOOK_S
) -> AsyncGenerator[Left, None]:
    """Drain the bookie: what is left, again and again, the last time when it is `done`, or was
    cancelled. To stop looking stops nothing; a later call goes on.

    Raises BadConfig for a bookie that was never seen or is down, NotEnoughBookies if too few others
    would remain (nothing is begun then), Unavailable.
    """
    store = ledgers.metadata
    holding = await begin(ledgers, bookie_id, force=force)
    while True:
        records = await _naming(ledgers, bookie_id, holding)
        if not records:  # others may have come meanwhile
            records = await _naming(ledgers, bookie_id, None)
            await _list(store, bookie_id, records)
        with reachable("asking which bookies are registered"):
            now = await bookies(store)
            writable = await _children(store, paths.BOOKIES_AVAILABLE)
        stuck = [one for one in records if force and _short(one, bookie_id, now, writable)]
        left = await _left(store, bookie_id, records, len(stuck))
        yield left
        if left.done or left.hindrance == CANCELLED:
            return
        holding = [record.ledger_id for record in records]
        await asyncio.sleep(look_s)


async def begin(ledgers: LedgerStore, bookie_id: str, *, force: bool = False) -> list[int]:
    """The bookie drains from now on. Durable on return: it does, whoever looks on. The ledgers that
    name it. Raises as `decommission`."""
    store, path = ledgers.metadata, paths.draining(bookie_id)
    with reachable("beginning to drain a bookie"):
        begun = bookie_id in (await bookies(store)).draining
        if not begun:
            await _check_bookie(store, bookie_id)
        records = await _naming(ledgers, bookie_id, None)
        if not begun:
            await _check_others(store, bookie_id, records, force)
            with suppress(NodeExists, OutcomeUnknown):
                await store.create(path, parents=True)
            try:  # another may have begun at the same time
                await _check_others(store, bookie_id, records, force)
            except BaseException:
                await cancel(ledgers, bookie_id)
                raise
            await store.sync(path)
            if bookie_id not in await autorecovery.draining(store):
                raise Unavailable(f"whether bookie {bookie_id} drains is not known")
        await _list(store, bookie_id, records)
    return [record.ledger_id for record in records]


async def cancel(ledgers: LedgerStore, bookie_id: str) -> bool:
    """The bookie keeps what it has and takes entries again. Whether it was draining. Durable on
    return. Raises Unavailable."""
    store, path = ledgers.metadata, paths.draining(bookie_id)
    with reachable("ending the draining of a bookie"):
        await store.sync(path)
        with suppress(OutcomeUnknown):
            try:
                await store.delete(path)
            except NoNode:
                return False
        return True


async def _list(store: MetadataStore, bookie_id: str, records: Collection[LedgerRecord]) -> None:
    """The auditor may have listed what it saw before these ledgers named the bookie."""
    with reachable("asking the metadata store for the time"):
        since_ms = await store_now_ms(store) if records else 0
    reason = Reason(work_list.DRAINED, bookie_id, since_ms)

    async def add(record: LedgerRecord) -> None:
        await work_list.add(store, record.ledger_id, [reason])

    with reachable("listing the ledgers of a bookie"):
        await each(add, records, RECORDS_AT_ONCE)


async def _check_bookie(store: MetadataStore, bookie_id: str) -> None:
    if bookie_id in (await bookies(store)).registered:
        return
    if bookie_id in await _children(store, paths.BOOKIES_KNOWN):
        raise BadConfig(
            f"bookie {bookie_id} is not registered: it is down",
            "Start it and drain it then; or leave it: what a lost bookie held is copied from the"
            " others after lost_bookie_delay_s (`spark-ledger autorecovery status`).",
        )
    raise BadConfig(
        f"no bookie {bookie_id} was ever registered there",
        "`spark-ledger bookie list` tells which were.",
    )


async def _check_others(
    store: MetadataStore, bookie_id: str, records: Collection[LedgerRecord], force: bool
) -> None:
    """Raises NotEnoughBookies."""
    now = await bookies(store)
    writable = await _children(store, paths.BOOKIES_AVAILABLE)
    short = [record for record in records if _contested(record, bookie_id, now, writable)]
    if not short:
        return
    lowest = min(short, key=lambda one: _copies_left(one, bookie_id, now) - one.ack_quorum)
    left = _copies_left(lowest, bookie_id, now)
    others = len({*writable} - now.draining - {bookie_id})
    ledger = f"ledger {lowest.ledger_id} (E={lowest.ensemble_size}, Qw={lowest.write_quorum},"
    ledger += f" Qa={lowest.ack_quorum})"
    what = f"without bookie {bookie_id} {others} writable bookies remain, and no other can take the"
    what += f" copies of {len(short)} ledgers: {ledger} would keep {left} of each entry"
    if left < lowest.ack_quorum:
        raise NotEnoughBookies(
            what, "Add bookies, or end another decommission; it cannot be forced below Qa."
        )
    if not force:
        raise NotEnoughBookies(
            what,
            "Add bookies, or end another decommission; --force leaves such ledgers as they are.",
        )


def _short(record: LedgerRecord, bookie_id: str, now: Bookies, writable: Collection[str]) -> bool:
    """Whether no other bookie can take the place of this one in some fragment."""
    spares = {*writable} - now.draining - {bookie_id}
    return any(
        bookie_id in fragment.ensemble and spares <= {*fragment.ensemble}
        for fragment in record.fragments
    )


def _contested(
    record: LedgerRecord, bookie_id: str, now: Bookies, writable: Collection[str]
) -> bool:
    """Whether some fragment that names it names more that are to go than others can replace."""
    going = now.draining | {bookie_id}
    return any(
        bookie_id in fragment.ensemble
        and len({*writable} - going - {*fragment.ensemble}) < len(going & {*fragment.ensemble})
        for fragment in record.fragments
    )


def _copies_left(record: LedgerRecord, bookie_id: str, now: Bookies) -> int:
    """Of the entry that has the fewest once the bookie is gone."""
    size, fewest = record.ensemble_size, record.write_quorum
    for fragment in record.fragments:
        if bookie_id not in fragment.ensemble:
            continue
        stays = [
            one in now.registered and one not in now.draining and one != bookie_id
            for one in fragment.ensemble
        ]
        for first in range(size):
            write_set = [stays[(first + place) % size] for place in range(record.write_quorum)]
            fewest = min(fewest, sum(write_set))
    return fewest


async def _naming(
    ledgers: LedgerStore, bookie_id: str, among: Collection[int] | None
) -> list[LedgerRecord]:
    """Records that name the bookie, of these ledgers or of all. Raises Unavailable."""
    found: list[LedgerRecord] = []

    async def see(ledger_id: int) -> None:
        with suppress(NoSuchLedger):  # deleted meanwhile
            record = (await ledgers.record(ledger_id, fresh=among is not None)).record
            if record.names(bookie_id):
                found.append(record)

    if among is not None:
        await each(see, among, RECORDS_AT_ONCE)
        return found
    with reachable("listing the ledgers of a bookie"):
        await ledgers.metadata.sync()
    batch: list[int] = []
    async for ledger_id in ledgers.list():
        batch.append(ledger_id)
        if len(batch) == RECORDS_AT_ONCE:
            await each(see, batch, RECORDS_AT_ONCE)
            batch = []
    await each(see, batch, RECORDS_AT_ONCE)
    return found


async def _left(
    store: MetadataStore, bookie_id: str, records: Collection[LedgerRecord], stuck: int
) -> Left:
    blocked: dict[int, str] = {}
    hindrance = ""
    if len(records) > stuck:
        with reachable("asking what hinders the draining"):
            works = await each(
                lambda record: work_list.find(store, record.ledger_id), records, RECORDS_AT_ONCE
            )
        blocked = {one.ledger_id: one.blocked for one in works if one is not None and one.blocked}
        now = await status.status(store)
        if bookie_id not in now.draining:
            hindrance = CANCELLED
        elif not now.enabled:
            hindrance = "autorecovery is disabled: `spark-ledger autorecovery enable`"
        elif not now.auditor:
            hindrance = "no process hosts autorecovery: `spark-ledger autorecovery start`"
    size = round(sum(_bytes_at(record, bookie_id) for record in records))
    return Left(len(records), size, blocked, hindrance, stuck)


def _bytes_at(record: LedgerRecord, bookie_id: str) -> float:
    """About as much as the bookie holds of a closed ledger."""
    if not record.last_entry or not record.length_bytes:
        return float(record.length_bytes or 0)
    kept = sum(
        len(entries) * record.write_quorum / record.ensemble_size
        for fragment, entries in entries_of(record, record.last_entry)
        if bookie_id in fragment.ensemble
    )
    return record.length_bytes * kept / (record.last_entry + 1)


async def _children(store: MetadataStore, folder: str) -> list[str]:
    try:
        return await store.children(folder)
    except NoNode:
        return []
