"""Ledgers of which bookies keep copies though they have no record and are not named as deleted: the
bookies' lists of them, and an operator's statement that they were deleted.

Always true: a bookie's list is for operators, no copy goes because of it; a ledger is named as
deleted here only in a multi that checks that it has no record and that the store is not held.

The node /unrecorded/<bookie> is JSON: `ledgers`: how many there are; `ids`: the lowest LISTED_MAX.
"""

import json
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

from spark_ledger import errors
from spark_ledger.metadata import cluster, deleted_ledgers, hold, paths
from spark_ledger.metadata.cluster import ClusterGuard
from spark_ledger.metadata.deleted_ledgers import BadDeletedSet
from spark_ledger.metadata.store import (
    ANY_VERSION,
    Create,
    Delete,
    MetadataStore,
    MultiFailed,
    NodeExists,
    NoNode,
    Operation,
    OutcomeUnknown,
    StoreUnavailable,
)
from spark_ledger.metadata.store_calls import TRIES_MAX, ensure, names_in, read

LISTED_MAX = 40_000
TOGETHER_MAX = 100


async def publish(store: MetadataStore, bookie_id: str, ledger_ids: Sequence[int]) -> None:
    """What the bookie keeps without a record, as of now. Raises StoreError."""
    path = paths.unrecorded(bookie_id)
    node = await read(store, path)
    if not ledger_ids:
        if node is not None:
            await store.delete(path)
        return
    plain = {"ledgers": len(ledger_ids), "ids": sorted(ledger_ids)[:LISTED_MAX]}
    value = json.dumps(plain, separators=(",", ":")).encode()
    if node is None:
        await ensure(store, path, value)
    else:  # also the same: the node's time is when they were counted
        await store.set(path, value, node.version)


class UnrecordedLedgers(NamedTuple):
    """The bookies that keep such a ledger, by its id; when each of these bookies counted them, by
    the store's clock; why the store is held, empty where it is not."""

    bookies: Mapping[int, list[str]]
    counted_ms: Mapping[str, int]
    held: str = ""


async def listed(store: MetadataStore) -> UnrecordedLedgers:
    """While the store is held also what bookies reported since (hold.py), for they count nothing
    then. Raises BadClusterRecord, StoreError."""
    record = await cluster.read(store)
    bookies: dict[int, list[str]] = {}
    for report in await hold.reports_of(store, record):
        for ledger_id, _, _ in report.missing:
            bookies.setdefault(ledger_id, []).append(report.bookie_id)
    counted_ms: dict[str, int] = {}
    for bookie_id in await names_in(store, paths.UNRECORDED):
        node = await read(store, paths.unrecorded(bookie_id))
        if node is None:
            continue
        counted_ms[bookie_id] = node.modified_ms
        for ledger_id in _ids(node.value):
            if bookie_id not in (keepers := bookies.setdefault(ledger_id, [])):
                keepers.append(bookie_id)
    held = "" if record is None or record.hold is None else record.hold.why
    return UnrecordedLedgers(dict(sorted(bookies.items())), counted_ms, held)


async def kept_by(store: MetadataStore, bookie_id: str) -> list[int]:
    """Those that the bookie listed and that still have no record and no word of their deletion.
    Raises StoreError."""
    node = await read(store, paths.unrecorded(bookie_id))
    kept = []
    for folder, ids in deleted_ledgers.by_folder([] if node is None else _ids(node.value)).items():
        try:
            deleted_ids = await deleted_ledgers.read_deleted(store, folder)
        except BadDeletedSet:
            deleted_ids = frozenset()
        nodes = await store.get_many([paths.ledger(ledger_id) for ledger_id in ids])
        pairs = zip(ids, nodes, strict=True)
        kept += [i for i, record in pairs if record is None and i not in deleted_ids]
    return kept


def _ids(value: bytes) -> list[int]:
    """None of a list that is damaged: it is for people."""
    try:
        return [int(ledger_id) for ledger_id in json.loads(value)["ids"]]
    except errors.MALFORMED:
        return []


async def name_as_deleted(store: MetadataStore, ledger_ids: Iterable[int]) -> list[int]:
    """Name those of the ledgers as deleted that have no record; returns which. Raises
    errors.MetadataHeld, BadDeletedSet, StoreError."""
    guard, done = ClusterGuard(store), []
    await guard.refresh()
    for folder, ids in deleted_ledgers.by_folder(sorted(ledger_ids)).items():
        await ensure(store, folder)
        for at in range(0, len(ids), TOGETHER_MAX):
            done += await _name_absent(store, guard, ids[at : at + TOGETHER_MAX])
    return done


async def _name_absent(store: MetadataStore, guard: ClusterGuard, ids: Sequence[int]) -> list[int]:
    for _ in range(TRIES_MAX):
        absent = [i for i in ids if await read(store, paths.ledger(i)) is None]
        if not absent:
            return []
        try:
            await store.multi([*await guard.checks(), *await _writes_that_name(store, absent)])
            return absent
        except (MultiFailed, OutcomeUnknown, NoNode, NodeExists):
            await guard.refresh()
    raise StoreUnavailable(f"others wrote the folder of ledger {ids[0]} again and again")


async def _writes_that_name(store: MetadataStore, absent: Sequence[int]) -> list[Operation]:
    """A node that is made and taken away in one multi was not there, and no read ever sees it."""
    records = map(paths.ledger, absent)
    none = [step for path in records for step in (Create(path), Delete(path, ANY_VERSION))]
    return [*none, *await deleted_ledgers.writes_that_name(store, absent)]
