"""The hold on a metadata store that went back in time: which process puts the hold, what it stops,
and how it ends.

A bookie puts the hold if its disk has something that the store lacks: a link (chain.py), or a
ledger with an id that the counter has not given out. One multi writes the hold into the cluster's
record and into the counter of ledger ids. From then on no process takes ledger ids (an earlier
version reports the counter as damaged), commits (each commit checks the version of the cluster's
record), registers, deletes, repairs or merges. Open ledgers can still be written and read. A person
ends the hold (`accept`): the epoch rises, so that the ids of later ledgers are above all ids on any
disk.

Always true: the hold and its end are each one multi on the versions that were read: if a hold and
an accept meet, the slower one fails and is tried again. The reports of bookies below /held are for
operators; only the next epoch depends on them: it is above the ids that they name.

The node of a bookie's report is JSON: `missing`: [[ledger id, last entry, bytes], ...] that the
bookie has and the store does not name, LISTED_MAX at most; `others`: ids whose record names another
ledger than the bookie has; `buried`: ids that have a record again, though the bookie has marked
them as deleted; `ledgers`, `bytes`: how many ledgers are missing, and their bytes; `id_max`: the
highest ledger id that the bookie knows; `epoch`: the store's epoch at the time of the report, so
that reports of an earlier hold do not count.
"""

import json
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

from spark_ledger import errors
from spark_ledger.metadata import chain as chains
from spark_ledger.metadata import cluster as clusters
from spark_ledger.metadata import paths
from spark_ledger.metadata.cluster import (
    EPOCH_MAX,
    IDS_PER_EPOCH,
    VERSIONS_PER_EPOCH,
    ClusterRecord,
    Hold,
)
from spark_ledger.metadata.store import (
    Create,
    MetadataStore,
    MultiFailed,
    NodeExists,
    NoNode,
    Operation,
    OutcomeUnknown,
    Set,
    StoreUnavailable,
    Versioned,
)
from spark_ledger.metadata.store_calls import TRIES_MAX, ensure, names_in, read, unavailable_while

LISTED_MAX = 10_000  # a report with so many ids in each list is below VALUE_BYTES_MAX
FIRST_ID = 1
EPOCHS_APART_MAX = 30  # bounds the multi of `accept` by 3,000 small writes


# -- the counter of ledger ids ----------------------------------------------------------------


def encode_counter(next_id: int) -> bytes:
    return json.dumps({"next": next_id}).encode()


def _held_counter(why: str) -> bytes:
    """The counter under a hold; an earlier version reports it as damaged, and shows this text."""
    return json.dumps({"held": why, "next": "held: run `spark-ledger metadata accept`"}).encode()


def decode_counter(value: bytes) -> int:
    """The next id. Raises errors.MetadataHeld, errors.LedgerError when the counter is damaged."""
    try:
        plain = json.loads(value)
        if "held" in plain:
            raise errors.MetadataHeld(f"the metadata store is held: {plain['held']}")
        return int(plain["next"])
    except errors.MALFORMED as error:
        raise errors.LedgerError(f"{paths.LEDGER_IDS} is damaged: {value[:100]!r}") from error


# -- the hold ---------------------------------------------------------------------------------


async def put(store: MetadataStore, cluster_id: str, hold: Hold) -> ClusterRecord | None:
    """Hold the store, if it belongs to this cluster and its epoch is not above `hold.epoch`. A hold
    that is there stays, with the higher epoch of the two. Returns the cluster's record afterwards.
    Raises BadClusterRecord, StoreError."""
    for _ in range(TRIES_MAX):
        await store.sync(paths.CLUSTER)
        node = await read(store, paths.CLUSTER)
        cluster = None if node is None else clusters.decode(node.value)
        if node is None or cluster is None or cluster.cluster_id != cluster_id:
            return cluster
        new_hold = cluster.hold or hold
        new_hold = replace(new_hold, epoch=max(new_hold.epoch, hold.epoch))
        if cluster.hold == new_hold or cluster.epoch > hold.epoch:
            return cluster
        value = clusters.encode(replace(cluster, hold=new_hold))
        counter = await _write_of_counter(store, _held_counter(new_hold.why))
        try:
            await store.multi([Set(paths.CLUSTER, value, node.version), counter])
            return replace(cluster, hold=new_hold)
        except (MultiFailed, OutcomeUnknown):
            continue
    raise StoreUnavailable("others wrote the cluster's record or the counter again and again")


async def _write_of_counter(store: MetadataStore, value: bytes) -> Operation:
    return _write_of(paths.LEDGER_IDS, value, await read(store, paths.LEDGER_IDS))


def _write_of(path: str, value: bytes, node: Versioned | None) -> Operation:
    return Create(path, value) if node is None else Set(path, value, node.version)


# -- reports of bookies -----------------------------------------------------------------------


class MissingLedger(NamedTuple):
    """A bookie's ledger without a record. `bytes`: the ledger's bytes, by the header of its last
    entry; 0 if the bookie cannot read that entry."""

    ledger_id: int
    last_entry: int
    bytes: int


@dataclass(frozen=True, slots=True)
class Report:
    """A bookie's report; see the head of this file."""

    bookie_id: str
    missing: Sequence[MissingLedger] = ()
    others: Sequence[int] = ()
    buried: Sequence[int] = ()
    ledgers: int = 0
    bytes: int = 0
    id_max: int = 0
    epoch: int = 0


def encode_report(report: Report) -> bytes:
    plain = {
        "missing": [list(ledger) for ledger in report.missing[:LISTED_MAX]],
        "others": list(report.others[:LISTED_MAX]),
        "buried": list(report.buried[:LISTED_MAX]),
        "ledgers": report.ledgers,
        "bytes": report.bytes,
        "id_max": report.id_max,
        "epoch": report.epoch,
    }
    return json.dumps(plain, separators=(",", ":")).encode()


def decode_report(bookie_id: str, value: bytes) -> Report:
    """The report; an empty report for damaged bytes, as reports are for operators only."""
    try:
        plain = json.loads(value)
        missing = [
            MissingLedger(int(i), int(last), int(size)) for i, last, size in plain["missing"]
        ]
        others, buried = ([int(i) for i in plain[name]] for name in ("others", "buried"))
        sums = (int(plain[name]) for name in ("ledgers", "bytes", "id_max", "epoch"))
        return Report(bookie_id, missing, others, buried, *sums)
    except errors.MALFORMED:
        return Report(bookie_id)


async def publish(store: MetadataStore, report: Report) -> None:
    """Write the bookie's report, unless the store has an equal report. Raises StoreError."""
    path, value = paths.held(report.bookie_id), encode_report(report)
    node = await read(store, path)
    if node is None:
        await ensure(store, path, value)
    elif node.value != value:
        await store.set(path, value, node.version)


@dataclass(frozen=True, slots=True)
class StoreStatus:
    """The status of the metadata store. `newest`: the chain's newest link (number, token);
    `silent`: the bookies that ever registered and have not reported since the hold."""

    cluster: ClusterRecord
    newest: tuple[int, str] | None = None
    reports: Sequence[Report] = ()
    silent: Sequence[str] = ()

    @property
    def missing(self) -> dict[int, tuple[int, int]]:
        """(last entry, bytes) by id of the ledgers that bookies have and the store does not name;
        of several copies, those of the longest."""
        longest: dict[int, tuple[int, int]] = {}
        for report in self.reports:
            for ledger_id, last, size in report.missing:
                longest[ledger_id] = max(longest.get(ledger_id, (-1, 0)), (last, size))
        return dict(sorted(longest.items()))

    @property
    def next_epoch(self) -> int:
        """The epoch above every epoch and every id that a bookie has reported."""
        epochs = [report.id_max // IDS_PER_EPOCH for report in self.reports]
        seen = self.cluster.hold.epoch if self.cluster.hold else 0
        return max([self.cluster.epoch, seen, *epochs]) + 1


async def status(store: MetadataStore) -> StoreStatus:
    """Raises errors.Unavailable, errors.UnsupportedFormat."""
    try:
        with unavailable_while("reading how the metadata store stands"):
            cluster = await clusters.read(store)
            chain = chains.chain_of_node(await read(store, paths.CHAIN))
            reports = await reports_of(store, cluster)
            bookies = await names_in(store, paths.BOOKIES_KNOWN)
    except (clusters.BadClusterRecord, chains.BadChain) as damage:
        raise errors.UnsupportedFormat(str(damage)) from damage
    if cluster is None:
        raise errors.Unavailable("there is no cluster at the service URL")
    reported = {report.bookie_id for report in reports}
    silent = sorted(set(bookies) - reported) if cluster.hold is not None else []
    newest = None if chain is None else (chain.newest, chain.links[chain.newest])
    return StoreStatus(cluster, newest, reports, silent)


async def reports_of(store: MetadataStore, cluster: ClusterRecord | None) -> list[Report]:
    """The reports of bookies in this hold; empty if the cluster is not held. Raises StoreError."""
    if cluster is None or cluster.hold is None:
        return []
    names = await names_in(store, paths.HELD)
    nodes = await store.get_many([paths.held(name) for name in names])
    pairs = zip(names, nodes, strict=True)
    reports = [decode_report(name, node.value) for name, node in pairs if node is not None]
    return [report for report in reports if report.epoch == cluster.epoch]


async def accept(store: MetadataStore) -> StoreStatus:
    """Accept the store: the epoch rises, the counter of ids goes to the first id of the epoch, the
    chain gets a link, and the hold ends. A store that is not held stays unchanged. Returns the
    status afterwards. Raises errors.Unavailable, errors.UnsupportedFormat."""
    with unavailable_while("accepting the metadata store"):
        for _ in range(TRIES_MAX):
            before = await status(store)
            if before.cluster.hold is None:
                return before
            await _accept(store, before)
            await store.sync(paths.CLUSTER)
    raise errors.Unavailable("others wrote the cluster's record again and again")


async def _accept(store: MetadataStore, before: StoreStatus) -> None:
    """One try, which fails without harm if another process writes first."""
    node, link = await read(store, paths.CLUSTER), await read(store, paths.CHAIN)
    if node is None or clusters.decode(node.value) != before.cluster:
        return
    if before.next_epoch > EPOCH_MAX:
        raise errors.UnsupportedFormat(f"epoch {before.next_epoch} is above {EPOCH_MAX}")
    after = ClusterRecord(before.cluster.cluster_id, before.next_epoch)
    first_id = encode_counter(after.epoch * IDS_PER_EPOCH)
    longer = chains.encode(chains.with_link(chains.chain_of_node(link), chains.new_token()))
    first = min(after.epoch, EPOCHS_APART_MAX) * VERSIONS_PER_EPOCH
    versions = range(node.version, max(node.version + 1, first))  # see ClusterGuard
    operations = [
        *(Set(paths.CLUSTER, clusters.encode(after), version) for version in versions),
        await _write_of_counter(store, first_id),
        _write_of(paths.CHAIN, longer, link),
    ]
    try:
        await store.multi(operations)
    except (MultiFailed, OutcomeUnknown):
        return
    for report in before.reports:
        try:
            await store.delete(paths.held(report.bookie_id))
        except (NoNode, NodeExists, OutcomeUnknown):
            continue
