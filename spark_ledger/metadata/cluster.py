"""The record of the cluster itself, and the folders that are there from its first moment.

Always true: the id is written once, by the process that starts the cluster first; a bookie's disk
remembers it and serves no other cluster. The epoch counts re-creations from a backup.
"""

import json
from dataclasses import dataclass

from spark_ledger.metadata import paths, store_calls
from spark_ledger.metadata.store import MetadataStore

FORMAT = 1
FOLDERS = (
    paths.BOOKIES_AVAILABLE,
    paths.BOOKIES_READONLY,
    paths.BOOKIES_KNOWN,
    paths.LEDGERS,
)


class BadClusterRecord(ValueError):
    """Bytes that are no record of a cluster, or one of a format this version does not know."""


@dataclass(frozen=True, slots=True)
class Cluster:
    """`cluster_id` is a UUID in text."""

    cluster_id: str
    epoch: int = 0


def encode(cluster: Cluster) -> bytes:
    plain = {"id": cluster.cluster_id, "epoch": cluster.epoch, "format": FORMAT}
    return json.dumps(plain, sort_keys=True, separators=(",", ":")).encode()


def decode(value: bytes) -> Cluster:
    """Raises BadClusterRecord."""
    try:
        plain = json.loads(value)
        if plain["format"] != FORMAT:
            raise BadClusterRecord(f"the cluster's record has format {plain['format']}")
        return Cluster(str(plain["id"]), int(plain["epoch"]))
    except (KeyError, TypeError, ValueError) as error:
        raise BadClusterRecord(f"not a cluster's record: {error}") from error


async def read(store: MetadataStore) -> Cluster | None:
    """The cluster at the store's root, None when none was started there."""
    await store.sync()
    node = await store_calls.read(store, paths.CLUSTER)
    return None if node is None else decode(node.value)


async def ensure(store: MetadataStore, new_id: str) -> Cluster:
    """The cluster at the store's root; one with the id `new_id` is made if there is none."""
    for folder in FOLDERS:
        await store_calls.ensure(store, folder)
    found = await read(store)
    if found is None:
        await store_calls.ensure(store, paths.CLUSTER, encode(Cluster(new_id)))
        found = await read(store)
    assert found is not None, "made, or made by somebody else, and never deleted"
    return found
