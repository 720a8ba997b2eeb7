"""What processes share, as values: the metadata store's nodes, ledgers, and what was ever done.

Always true: a world does not change; carrying an operation out gives another world (or the same
one) and the answer. Equal worlds have one number. Besides the store's operations there are those
of ledgers, which here are a list of entries each: `add` (refused once fenced), `fence`, `entries`,
and one of the explorer's own: `later` (an hour passes on the store's clock).
"""

from collections.abc import Hashable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

from spark_ledger.metadata.store import (
    Check,
    Create,
    MultiFailed,
    NoNode,
    OutcomeUnknown,
    StoreError,
    StoreUnavailable,
    Versioned,
)
from tests.simulation.store import EPOCH_MS
from tests.simulation.store_tree import Tree, Write, split

HOUR_MS = 3_600_000
READS = ("get", "children", "sync")
WRITES = ("create", "set", "delete", "multi")
APPLIED, LOST_AFTER, LOST_BEFORE, REFUSED = "applied", "lost after", "lost before", "refused"
"""What becomes of a write: the answer comes; it was applied and the answer is lost; the request was
lost, and nobody knows; it was certainly not applied."""
Operation = tuple[Any, ...]
Answer = tuple[Any, ...]
"""("value", it) or ("raised", kind, arguments)."""


class Entries(NamedTuple):
    """What a ledger holds: a row for each entry, acknowledged in this order."""

    rows: tuple[str, ...] = ()
    fenced: bool = False


@dataclass(frozen=True)
class World:
    """`history` is every commit ever applied to a topic and every intent ever made, in order:
    ("commit", topic, number, body) and ("intent", id). Nothing takes anything out of it."""

    nodes: Mapping[str, Versioned]
    ledgers: Mapping[int, Entries] = field(default_factory=dict)
    history: tuple[tuple[Any, ...], ...] = ()
    hours: int = 0

    def identity(self) -> Hashable:
        return (
            frozenset(self.nodes.items()),
            frozenset(self.ledgers.items()),
            self.history,
            self.hours,
        )

    def with_row(self, ledger_id: int, row: str) -> "World":
        """With one more entry in the ledger."""
        held = self.ledgers.get(ledger_id, Entries())
        return _with_ledger(self, ledger_id, held._replace(rows=(*held.rows, row)))

    def below(self, path: str) -> tuple[tuple[str, Versioned], ...]:
        """The nodes at and below the path, in order."""
        begins = f"{path}/"
        return tuple(
            sorted((p, n) for p, n in self.nodes.items() if p == path or p.startswith(begins))
        )


FIRST = World({"/": Versioned(b"", 0)})


def paths_of(operation: Operation) -> tuple[str, ...]:
    """Those that a store's operation names; of a listing the node whose children it lists."""
    kind = operation[0]
    if kind == "multi":
        return tuple(one.path for one in operation[1])
    return (operation[1],) if kind in READS or kind in WRITES else ()


def written(operation: Operation) -> tuple[str, ...]:
    """The paths that it may change."""
    kind = operation[0]
    if kind == "multi":
        return tuple(one.path for one in operation[1] if not isinstance(one, Check))
    return (operation[1],) if kind in WRITES else ()


def carried_out(world: World, operation: Operation, fate: str = APPLIED) -> tuple[World, Answer]:
    """The world after the operation, and what whoever asked for it is told."""
    if fate == REFUSED:
        return world, ("raised", StoreUnavailable, ("the store does not answer",))
    if fate == LOST_BEFORE:
        return world, ("raised", OutcomeUnknown, ("the answer was lost",))
    after, answer = _STEPS[operation[0]](world, operation)
    if fate == LOST_AFTER:
        answer = ("raised", OutcomeUnknown, ("the answer was lost",))
    return after, answer


# -- the metadata store ------------------------------------------------------------------------


def _get(world: World, operation: Operation) -> tuple[World, Answer]:
    node = world.nodes.get(operation[1])
    return world, ("raised", *_no_node(operation[1])) if node is None else ("value", node)


def _children(world: World, operation: Operation) -> tuple[World, Answer]:
    path = operation[1]
    if path not in world.nodes:
        return world, ("raised", *_no_node(path))
    return world, ("value", tuple(sorted(split(p)[1] for p in world.nodes if _is_child(p, path))))


def _sync(world: World, operation: Operation) -> tuple[World, Answer]:
    return world, ("value", None)


def _write(world: World, operation: Operation) -> tuple[World, Answer]:
    tree = _tree_of(world)
    write = Write(tree, EPOCH_MS + world.hours * HOUR_MS)
    try:
        result = _evaluated(write, operation)
    except StoreError as error:
        return world, ("raised", type(error), error.args if error.args else ())
    except _Failed as failed:
        return world, ("raised", MultiFailed, (failed.index, failed.cause))
    history = world.history + _events(operation)
    return replace(world, nodes=tree.nodes, history=history), ("value", result)


class _Failed(Exception):
    """An operation of a multi does not hold."""

    def __init__(self, index: int, cause: StoreError) -> None:
        super().__init__(index, cause)
        self.index = index
        self.cause = Failure(type(cause))


@dataclass(frozen=True)
class Failure:
    """Why a multi failed, as a value: the door makes the error of it."""

    kind: type[StoreError]


def _evaluated(write: Write, operation: Operation) -> Any:
    kind = operation[0]
    if kind == "create":
        _, path, value, parents = operation
        if parents:
            write.create_parents(path)
        write.create(path, value)
    elif kind == "set":
        return write.set(*operation[1:])
    elif kind == "delete":
        write.delete(*operation[1:])
    else:
        for index, one in enumerate(operation[1]):
            try:
                write.run(one)
            except StoreError as error:
                raise _Failed(index, error) from error
    return None


def _events(operation: Operation) -> tuple[tuple[Any, ...], ...]:
    """What history keeps of a write."""
    kind = operation[0]
    creates = operation[1] if kind == "multi" else ()
    if kind == "create":
        creates = (Create(operation[1], operation[2]),)
    found: list[tuple[Any, ...]] = []
    for one in creates:
        if isinstance(one, Create):
            levels = one.path.split("/")
            if len(levels) == 5 and levels[1] == "topic-ids" and levels[3] == "log":
                found.append(("commit", levels[2], int(levels[4]), one.value))
            elif len(levels) == 3 and levels[1] == "intents":
                found.append(("intent", levels[2]))
    return tuple(found)


def _tree_of(world: World) -> Tree:
    tree = Tree()
    tree.nodes = dict(world.nodes)
    tree.children = {path: {} for path in tree.nodes}
    for path in tree.nodes:
        if path != "/":
            parent, name = split(path)
            tree.children[parent][name] = None
    return tree


def _is_child(path: str, parent: str) -> bool:
    return path != "/" and split(path)[0] == parent


def _no_node(path: str) -> tuple[type[StoreError], tuple[str, ...]]:
    return NoNode, (path,)


# -- ledgers -----------------------------------------------------------------------------------


def _add(world: World, operation: Operation) -> tuple[World, Answer]:
    _, ledger_id, row = operation
    held = world.ledgers.get(ledger_id, Entries())
    if held.fenced:
        return world, ("value", None)
    return world.with_row(ledger_id, row), ("value", len(held.rows))


def _fence(world: World, operation: Operation) -> tuple[World, Answer]:
    held = world.ledgers.get(operation[1], Entries())
    after = held._replace(fenced=True)
    return _with_ledger(world, operation[1], after), ("value", len(held.rows))


def _entries(world: World, operation: Operation) -> tuple[World, Answer]:
    return world, ("value", world.ledgers.get(operation[1], Entries()).rows)


def _with_ledger(world: World, ledger_id: int, held: Entries) -> World:
    return replace(world, ledgers={**world.ledgers, ledger_id: held})


# -- the explorer's own ------------------------------------------------------------------------


def _later(world: World, operation: Operation) -> tuple[World, Answer]:
    return replace(world, hours=world.hours + 1), ("value", None)


_STEPS = {
    "get": _get,
    "children": _children,
    "sync": _sync,
    **dict.fromkeys(WRITES, _write),
    "add": _add,
    "fence": _fence,
    "entries": _entries,
    "later": _later,
}


@dataclass
class Worlds:
    """Every world met, by number, and each operation on it carried out once."""

    met: list[World] = field(default_factory=list)
    _numbers: dict[Hashable, int] = field(default_factory=dict)
    _steps: dict[Hashable, tuple[int, Answer]] = field(default_factory=dict)

    def number(self, world: World) -> int:
        found = self._numbers.setdefault(world.identity(), len(self.met))
        if found == len(self.met):
            self.met.append(world)
        return found

    def step(self, number: int, operation: Operation, fate: str) -> tuple[int, Answer]:
        key = (number, operation, fate)
        found = self._steps.get(key)
        if found is None:
            after, answer = carried_out(self.met[number], operation, fate)
            found = self._steps[key] = (self.number(after), answer)
        return found


__all__ = ["APPLIED", "FIRST", "LOST_AFTER", "LOST_BEFORE", "REFUSED", "World", "Worlds"]
