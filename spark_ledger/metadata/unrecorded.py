"""An unrecorded ledger has copies on bookies, but no record, and is not named as deleted
(deleted_ledgers.py). Here are the lists that bookies write of such ledgers, and the call by which
an operator names such ledgers as deleted.

Always true: a bookie's list is for operators; no copy is removed because of it. The multi that
names a ledger as deleted checks that the ledger has no record and that the store is not held.

The node /unrecorded/<bookie> is JSON: `ledgers`: the number of ledgers; `ids`: the lowest
LISTED_MAX ids.
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
TOGETHER_MAX = 100  # ledgers that one multi names


async def publish(store: MetadataStore, bookie_id: str, ledger_ids: Sequence[int]) -> None:
    """Write the bookie's list of unrecorded ledgers. Raises StoreError."""
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
    else:  # written even if unchanged, so that the node's time shows when the list was made
        await store.set(path, value, node.version)


class UnrecordedLedgers(NamedTuple):
    """`bookies`: by ledger id the bookies that keep the ledger. `counted_ms`: by bookie the time of
    its list, by the store's clock. `held`: why the store is held (hold.py); "" if it is not."""

    bookies: Mapping[int, list[str]]
    counted_ms: Mapping[str, int]
    held: str = ""


async def read_unrecorded(store: MetadataStore) -> UnrecordedLedgers:
    """The unrecorded ledgers of all lists. While the store is held, bookies write reports (hold.py)
    instead of lists: then also those of the reports. Raises BadClusterRecord, StoreError."""
    cluster_record = await cluster.read(store)
    bookies: dict[int, list[str]] = {}
    for report in await hold.reports_of(store, cluster_record):
        for ledger in report.missing:  # the ledgers that have no record
            bookies.setdefault(ledger.ledger_id, []).append(report.bookie_id)
    counted_ms: dict[str, int] = {}
    for bookie_id in await names_in(store, paths.UNRECORDED):
        node = await read(store, paths.unrecorded(bookie_id))
        if node is None:
            continue
        counted_ms[bookie_id] = node.modified_ms
        for ledger_id in _ids(node.value):
            if bookie_id not in (keepers := bookies.setdefault(ledger_id, [])):
                keepers.append(bookie_id)
    store_hold = None if cluster_record is None else cluster_record.hold
    held = "" if store_hold is None else store_hold.why
    return UnrecordedLedgers(dict(sorted(bookies.items())), counted_ms, held)


async def unrecorded_of(store: MetadataStore, bookie_id: str) -> list[int]:
    """The ledgers of the bookie's list that still have no record and are not named as deleted.
    Raises StoreError."""
    node = await read(store, paths.unrecorded(bookie_id))
    kept = []
    # The value of each folder of records names the deleted ledgers with an id in this folder.
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
    """The ids of a list. A malformed list gives no ids and no error: lists only inform people."""
    try:
        return [int(ledger_id) for ledger_id in json.loads(value)["ids"]]
    except errors.MALFORMED:
        return []


async def name_as_deleted(store: MetadataStore, ledger_ids: Iterable[int]) -> list[int]:
    """Of `ledger_ids`, name those that have no record as deleted; returns their ids. Raises
    errors.MetadataHeld, BadDeletedSet, StoreError."""
    guard, named_ids = ClusterGuard(store), []  # with its checks, no multi succeeds under a hold
    await guard.refresh()
    for folder, ids in deleted_ledgers.by_folder(sorted(ledger_ids)).items():
        await ensure(store, folder)  # the folder's value names its deleted ledgers
        for at in range(0, len(ids), TOGETHER_MAX):
            named_ids += await _name_without_record(store, guard, ids[at : at + TOGETHER_MAX])
    return named_ids


async def _name_without_record(
    store: MetadataStore, guard: ClusterGuard, ids: Sequence[int]
) -> list[int]:
    for _ in range(TRIES_MAX):
        without_record = [i for i in ids if await read(store, paths.ledger(i)) is None]
        if not without_record:
            return []
        try:
            writes = await _checked_writes(store, without_record)
            await store.multi([*await guard.checks(), *writes])
            return without_record
        except (MultiFailed, OutcomeUnknown, NoNode, NodeExists):
            await guard.refresh()
    raise StoreUnavailable(f"others wrote the folder of ledger {ids[0]} again and again")


async def _checked_writes(store: MetadataStore, without_record: Sequence[int]) -> list[Operation]:
    """Operations that name the ledgers as deleted, and that fail if any of the ledgers has a
    record. The check that a record's node does not exist: the multi creates the node and deletes
    it. No read ever sees this node."""
    records = map(paths.ledger, without_record)
    checks = [step for path in records for step in (Create(path), Delete(path, ANY_VERSION))]
    return [*checks, *await deleted_ledgers.writes_that_name(store, without_record)]
