"""The record of the cluster itself, and the folders that every cluster has.

Always true: the id is written once, by the process that starts the cluster first; a bookie keeps it
on its disks and serves no other cluster. The epoch counts how often a person accepted a store that
had gone back in time (hold.py): ledger ids of an epoch begin at epoch x IDS_PER_EPOCH, above every
id of an earlier epoch. While the store is held (a bookie stopped commits, because the store went
back in time), the record has a `hold` and HELD_FORMAT, which an earlier version refuses.
"""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from spark_ledger import errors
from spark_ledger.metadata import paths, store_calls
from spark_ledger.metadata.store import (
    Check,
    MetadataStore,
    MultiFailed,
    Operation,
    StoreUnavailable,
    Versioned,
)

FORMAT, HELD_FORMAT = 1, 2
IDS_PER_EPOCH = 10**12
VERSIONS_PER_EPOCH = 100
EPOCH_MAX = paths.LEDGER_ID_MAX // IDS_PER_EPOCH - 1
FOLDERS = (
    paths.BOOKIES_AVAILABLE,
    paths.BOOKIES_READONLY,
    paths.BOOKIES_KNOWN,
    paths.LEDGERS,
)


class BadClusterRecord(ValueError):
    """A malformed record of a cluster, or a record of a format that this version does not know."""


@dataclass(frozen=True, slots=True)
class Hold:
    """A hold: its reason (`why`), and the bookie that put it (`by`). `epoch` is the highest epoch
    on any bookie's disk; the next epoch will be higher."""

    why: str
    by: str
    epoch: int = 0


@dataclass(frozen=True, slots=True)
class ClusterRecord:
    """`cluster_id` is a UUID in text."""

    cluster_id: str
    epoch: int = 0
    hold: Hold | None = None


def encode(cluster: ClusterRecord) -> bytes:
    plain: dict[str, Any] = {"id": cluster.cluster_id, "epoch": cluster.epoch, "format": FORMAT}
    if (hold := cluster.hold) is not None:
        plain |= {"format": HELD_FORMAT}
        plain |= {"hold": {"why": hold.why, "by": hold.by, "epoch": hold.epoch}}
    return json.dumps(plain, sort_keys=True, separators=(",", ":")).encode()


def decode(value: bytes) -> ClusterRecord:
    """Raises BadClusterRecord."""
    try:
        plain = json.loads(value)
        if plain["format"] not in (FORMAT, HELD_FORMAT):
            raise BadClusterRecord(f"the cluster's record has format {plain['format']}")
        hold = plain.get("hold")
        if (hold is None) != (plain["format"] == FORMAT):
            raise BadClusterRecord(f"a cluster's record of format {plain['format']}: {hold}")
        if hold is not None:
            hold = Hold(str(hold["why"]), str(hold["by"]), int(hold["epoch"]))
        return ClusterRecord(str(plain["id"]), int(plain["epoch"]), hold)
    except errors.MALFORMED as error:
        raise BadClusterRecord(f"not a cluster's record: {error}") from error


async def read(store: MetadataStore) -> ClusterRecord | None:
    """The cluster at the store's root; None if no cluster was started there."""
    await store.sync()
    node = await store_calls.read(store, paths.CLUSTER)
    return None if node is None else decode(node.value)


async def ensure(store: MetadataStore, new_id: str) -> ClusterRecord:
    """The cluster at the store's root; without one, a cluster with the id `new_id` is made."""
    for folder in FOLDERS:
        await store_calls.ensure(store, folder)
    cluster = await read(store)
    if cluster is None:
        await store_calls.ensure(store, paths.CLUSTER, encode(ClusterRecord(new_id)))
        cluster = await read(store)
    assert cluster is not None, "a process has made the record, and no process deletes it"
    return cluster


def hold_error(cluster: ClusterRecord | None) -> errors.MetadataHeld | None:
    """The error of a commit or deletion if the cluster is held; None if it is not held."""
    if cluster is None or cluster.hold is None:
        return None
    return errors.MetadataHeld(f"the metadata store is held: {cluster.hold.why}")


async def hold_reason(store: MetadataStore) -> str:
    """Why the cluster is held, for operators; "" if it is not held, as far as this session sees.
    Raises StoreError."""
    node = await store_calls.read(store, paths.CLUSTER)
    try:
        record = None if node is None else decode(node.value)
    except BadClusterRecord:  # `metadata status` reports it
        return ""
    return "" if record is None or record.hold is None else record.hold.why


async def not_held_checks(store: MetadataStore) -> list[Check]:
    """Checks for a multi, which fails if the cluster is held by then; empty without a cluster's
    node. Raises errors.MetadataHeld, errors.UnsupportedFormat, StoreUnavailable."""
    node = await store_calls.read(store, paths.CLUSTER)
    if node is not None and _refusal(node.value) is not None:
        await store.sync(paths.CLUSTER)  # a person may have ended the hold
        node = await store_calls.read(store, paths.CLUSTER)
    if node is None:
        return []
    if (refusal := _refusal(node.value)) is not None:
        raise refusal
    return [Check(paths.CLUSTER, node.version)]


async def multi_unless_held(store: MetadataStore, operations: Sequence[Operation]) -> None:
    """Carry out a multi that a hold forbids: its result would be lost if a person puts back the
    newest copy of the store. Raises errors.MetadataHeld, errors.UnsupportedFormat (nothing was
    written), and what `multi` raises; MultiFailed has an index into `operations`."""
    for _ in range(store_calls.TRIES_MAX):
        checks = await not_held_checks(store)
        try:
            return await store.multi([*checks, *operations])
        except MultiFailed as failed:
            if failed.index >= len(checks):
                raise MultiFailed(failed.index - len(checks), failed.cause) from None
        await store.sync(paths.CLUSTER)
    raise StoreUnavailable("others wrote the cluster's record again and again")


class ClusterGuard:
    """Makes this process's multis fail when the cluster is held: they check the version of the
    cluster's node. The node is read first, and again (`refresh`) after this check failed a multi.
    An accept raises the version by VERSIONS_PER_EPOCH, so two epochs never share a version,
    whatever copy of the store was put back. While `refresh` raises, the version stays, so no multi
    succeeds."""

    def __init__(self, store: MetadataStore) -> None:
        self._store = store
        self._version: int | None = None
        self._epoch: int | None = None
        self._has_refused = False
        """Whether the last `refresh` raised MetadataHeld or UnsupportedFormat."""
        self.invalidations = 0
        """How often `refresh` found a hold, or another epoch: each time, the process's unused
        ledger ids become invalid."""

    @property
    def epoch(self) -> int:
        """The epoch as of the last refresh."""
        return self._epoch or 0

    async def checks(self) -> list[Check]:
        """The checks for a multi; empty without a cluster's node. Raises as `refresh`."""
        if self._version is None or self._has_refused:
            node = await store_calls.read(self._store, paths.CLUSTER)
            if node is None:
                return []
            if _refusal(node.value) is not None:
                await self.refresh()
            elif self._version is None:
                self._remember(node)
        return [] if self._version is None else [Check(paths.CLUSTER, self._version)]

    async def refresh(self) -> bool:
        """Read the node after a sync. Returns False if the epoch has changed since the last
        refresh: a person accepted an older store, which may lack nodes that this process read or
        wrote. Raises errors.MetadataHeld, errors.UnsupportedFormat, StoreError."""
        await self._store.sync(paths.CLUSTER)
        node = await store_calls.read(self._store, paths.CLUSTER)
        if node is None:
            return True
        if (refusal := _refusal(node.value)) is not None:
            self._has_refused = True
            self.invalidations += 1
            raise refusal
        before, self._has_refused = self._epoch, False
        self._remember(node)
        is_same_epoch = before in (None, self._epoch)
        self.invalidations += not is_same_epoch
        return is_same_epoch

    def _remember(self, node: Versioned) -> None:
        self._version, self._epoch = node.version, decode(node.value).epoch


def _refusal(value: bytes) -> errors.LedgerError | None:
    """The error that forbids commits, by the cluster's record; None if they are allowed."""
    try:
        return hold_error(decode(value))
    except BadClusterRecord as damage:
        return errors.UnsupportedFormat(f"the cluster at the service URL: {damage}")
