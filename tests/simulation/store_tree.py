"""The nodes of the simulated metadata store, and one write being evaluated on them.

Always true: a write changes all of what it names or, after `undo`, nothing.
"""

from dataclasses import dataclass, replace

from spark_ledger.metadata.store import (
    ANY_VERSION,
    BadVersion,
    Check,
    Create,
    Delete,
    NodeExists,
    NoNode,
    NotEmpty,
    Operation,
    Set,
    Versioned,
)


@dataclass(frozen=True, slots=True)
class Change:
    """One node before and after; None is absent."""

    path: str
    before: Versioned | None
    after: Versioned | None


class Tree:
    """Nodes by path, and each node's children."""

    def __init__(self) -> None:
        self.nodes: dict[str, Versioned] = {"/": Versioned(b"", 0)}
        self.children: dict[str, dict[str, None]] = {"/": {}}

    def put(self, path: str, node: Versioned | None) -> None:
        parent, name = split(path)
        if node is None:
            self.nodes.pop(path, None)
            self.children.pop(path, None)
            self.children.get(parent, {}).pop(name, None)
            return
        if path not in self.nodes:
            self.children[path] = {}
            self.children[parent][name] = None
        self.nodes[path] = node

    def get(self, path: str) -> Versioned:
        node = self.nodes.get(path)
        if node is None:
            raise NoNode(path)
        return node


def split(path: str) -> tuple[str, str]:
    parent, _, name = path.rpartition("/")
    return parent or "/", name


class Write:
    """A transaction being evaluated on the leader's tree; `undo` takes it back."""

    def __init__(self, tree: Tree, now_ms: int, number: int = 0) -> None:
        self._tree = tree
        self._now_ms = now_ms
        self._number = number
        self.changes: list[Change] = []

    def create(self, path: str, value: bytes, owner: int = 0) -> None:
        if path in self._tree.nodes:
            raise NodeExists(path)
        self._tree.get(split(path)[0])
        times = (self._now_ms, owner, self._now_ms, self._number)
        self._put(path, Versioned(bytes(value), 0, *times))

    def create_parents(self, path: str) -> None:
        parent = split(path)[0]
        if parent not in self._tree.nodes:
            self.create_parents(parent)
            self.create(parent, b"")

    def check(self, path: str, version: int) -> Versioned:
        node = self._tree.get(path)
        if version not in (ANY_VERSION, node.version):
            raise BadVersion(f"{path}: version is {node.version}, not {version}")
        return node

    def set(self, path: str, value: bytes, version: int) -> int:
        node = self.check(path, version)
        times = {"modified_ms": self._now_ms, "set_in": self._number}
        new = replace(node, value=bytes(value), version=node.version + 1, **times)
        self._put(path, new)
        return new.version

    def delete(self, path: str, version: int) -> None:
        self.check(path, version)
        if self._tree.children[path]:
            raise NotEmpty(path)
        self._put(path, None)

    def become(self, nodes: dict[str, Versioned]) -> None:
        """These nodes, with their versions, and no others."""
        for path in sorted({*self._tree.nodes} - {*nodes}, reverse=True):
            self._put(path, None)
        for path in sorted(nodes):
            if self._tree.nodes.get(path) != nodes[path]:
                self._put(path, nodes[path])

    def run(self, operation: Operation) -> None:
        if isinstance(operation, Create):
            self.create(operation.path, operation.value)
        elif isinstance(operation, Set):
            self.set(operation.path, operation.value, operation.version)
        elif isinstance(operation, Delete):
            self.delete(operation.path, operation.version)
        else:
            assert isinstance(operation, Check)
            self.check(operation.path, operation.version)

    def undo(self) -> None:
        for change in reversed(self.changes):
            self._tree.put(change.path, change.before)
        self.changes.clear()

    def _put(self, path: str, node: Versioned | None) -> None:
        self.changes.append(Change(path, self._tree.nodes.get(path), node))
        self._tree.put(path, node)
