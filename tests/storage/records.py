"""A metadata store that answers at once: what a storage node alone needs of one.

Always true: there is one truth and no lag; nothing is lost. (tests/simulation/store.py is the one
that lags and loses; here the disks are on trial, and this one costs no step of the loop.)
"""

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from spark_ledger.metadata import cluster, deleted_ledgers, ledger_record, paths
from spark_ledger.metadata.ledger_record import Fragment, LedgerRecord
from spark_ledger.metadata.store import (
    ANY_VERSION,
    MultiFailed,
    NoNode,
    Operation,
    SessionState,
    StoreError,
    StoreUnavailable,
    Versioned,
    Watcher,
)
from tests.simulation.store_tree import Tree, Write

CLUSTER_ID = "cluster-1"
_CLUSTER = cluster.encode(cluster.ClusterRecord(CLUSTER_ID))


class Records:
    """spark_ledger.metadata.store.MetadataStore in memory, for one process after the other."""

    session_state = SessionState.CONNECTED
    connections = 1
    session_id = 1

    def __init__(self) -> None:
        self.illness = ""
        """"fails": every read raises; "no folder": the ledgers' nodes and their folder are not
        there; "other cluster": the cluster's record is another one, and the ledgers are gone."""
        self._tree = Tree()
        for folder in (*cluster.FOLDERS, paths.CLUSTER):
            self._write().create_parents(folder)
            value = _CLUSTER if folder == paths.CLUSTER else b""
            self._write().create(folder, value)

    # -- what tests do ---------------------------------------------------------------------------

    def add_ledger(self, ledger_id: int, bookie_id: str, durability: str = "synced") -> None:
        fragments = (Fragment(0, (bookie_id,)),)
        record = LedgerRecord(ledger_id, 1, 1, 1, fragments, durability=durability)
        self._write().create_parents(paths.ledger(ledger_id))
        self._write().create(paths.ledger(ledger_id), ledger_record.encode(record))

    def drop_ledger(self, ledger_id: int) -> None:
        folder = paths.ledger_folder(ledger_id)
        named = deleted_ledgers.decode(self._tree.get(folder).value, folder)
        self._write().set(folder, deleted_ledgers.encode({*named, ledger_id}), ANY_VERSION)
        self._write().delete(paths.ledger(ledger_id), ANY_VERSION)

    def change_ledger(self, ledger_id: int, **changes: Any) -> None:
        path = paths.ledger(ledger_id)
        record = replace(ledger_record.decode(self._tree.get(path).value), **changes)
        self._write().set(path, ledger_record.encode(record), ANY_VERSION)

    def has_ledger(self, ledger_id: int) -> bool:
        return paths.ledger(ledger_id) in self._tree.nodes

    # -- MetadataStore ---------------------------------------------------------------------------

    def add_session_listener(self, listener: Callable[[SessionState], None]) -> None:
        """The session never changes."""

    async def get(self, path: str, watch: Watcher | None = None) -> Versioned:
        if self.illness == "fails":
            raise StoreUnavailable(path)
        if self.illness == "other cluster" and path == paths.CLUSTER:
            return Versioned(cluster.encode(cluster.ClusterRecord("cluster-2")), 0)
        if self.illness and path.startswith(paths.LEDGERS):
            raise NoNode(path)
        return self._tree.get(path)

    async def children(self, path: str, watch: Watcher | None = None) -> list[str]:
        self._tree.get(path)
        return sorted(self._tree.children[path])

    async def create(
        self, path: str, value: bytes = b"", *, ephemeral: bool = False, parents: bool = False
    ) -> None:
        if parents:
            self._write().create_parents(path)
        self._write().create(path, value, 1 if ephemeral else 0)

    async def set(self, path: str, value: bytes, version: int) -> int:
        return self._write().set(path, value, version)

    async def delete(self, path: str, version: int = ANY_VERSION) -> None:
        self._write().delete(path, version)

    async def multi(self, operations: Sequence[Operation]) -> None:
        write = self._write()
        for index, operation in enumerate(operations):
            try:
                write.run(operation)
            except StoreError as error:
                write.undo()
                raise MultiFailed(index, error) from error

    async def sync(self, path: str = "/") -> None:
        """Every read sees every write."""

    async def close(self) -> None:
        """Ephemerals are no matter here."""

    def _write(self) -> Write:
        return Write(self._tree, 0)
