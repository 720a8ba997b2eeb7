"""The nodes that name the ack ledgers of a topic's partitions, the states in these ledgers, and how
a process takes subscriptions from the owners of partitions.

    /topic-ids/<id>/acks               {}; its version counts the nodes that were made
    /topic-ids/<id>/acks/<partition>   the owner's epoch, and the ack ledger or a small state
    /topic-ids/<id>/acks/moves         {}; its version counts subscriptions that others moved

Always true: only the owner of a partition writes its node, by compare-and-set on the version that
it read. The same multi checks `moves` at the version that the owner read before it read the records
of the subscriptions that it serves. A process that moves, deletes or takes over a subscription
fences the ack ledgers. Then one multi raises `moves`, changes the subscription's record, and checks
that no node was written or made meanwhile. So an owner adds nothing for the subscription
afterwards: its ledger is fenced, and before it names another ledger it reads the record again. Rows
that consumers acknowledged beyond the new position may have to stay acknowledged: then the multi
also notes a succession in the node, by which the subscription's state in the node's ledger becomes
its state under its new key. The owner takes the succession over before it writes the node again.
Successions that one multi has no room for are noted before it: a succession is a copy, so without
the move it changes nothing that a subscription uses. A ledger that was made before a person
accepted an older metadata store has no states, because its offsets may belong to other rows now.
"""

import base64
import json
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

from spark_ledger import errors
from spark_ledger.ledger.client import LedgerStore
from spark_ledger.metadata import paths
from spark_ledger.metadata.shared_multis import SharedMultis
from spark_ledger.metadata.store import ANY_VERSION as ANY
from spark_ledger.metadata.store import (
    Check,
    Create,
    MultiFailed,
    NoNode,
    Operation,
    OutcomeUnknown,
    Set,
    StoreUnavailable,
    Versioned,
)
from spark_ledger.metadata.store_calls import TRIES_MAX, call_each, names_in, read
from spark_ledger.topic.acks.entries import AckFold, AckKey, AckState
from spark_ledger.topic.acks.ledger import add_entry, fold_ledger, is_of_this_store
from spark_ledger.topic.acks.sets import run_end
from spark_ledger.topic.log.records import FIRST_VERSION, load

LEDGERS_AT_ONCE = 64
SUCCESSIONS_MAX = 200
"""How many successions, of some 250 bytes each, a node may have until an owner writes the node
again."""
MOVE_BYTES_MAX = 600_000
"""Of the nodes that one multi of a move writes; the metadata store takes VALUE_BYTES_MAX."""
NEW = -1  # the version of a node that does not exist yet

States = Mapping[AckKey, AckState]


class Succession(NamedTuple):
    """The acknowledgements of a subscription under its key `before` count for its key `after`, too,
    from `position` on; all rows below `position` are acknowledged."""

    before: AckKey
    after: AckKey
    position: int

    def state(self, before: AckState) -> AckState:
        """The state under the new key; its set of rows is a copy."""
        rows = before.rows.copy()
        position = run_end(rows, max(self.position, before.position))
        rows.remove_range(0, position)
        return AckState(position, rows, before.owner_epoch)


@dataclass(frozen=True, slots=True)
class AckPointer:
    """The record of a partition's node. `epoch` is the epoch of the partition's owner. The states
    are in the ledger, or in `inline` (the entries of one snapshot); the `successions` change the
    states, in order."""

    epoch: int
    ledger_id: int | None = None
    inline: tuple[bytes, ...] = ()
    successions: tuple[Succession, ...] = ()


class AckNode(NamedTuple):
    pointer: AckPointer
    version: int


def encode_pointer(pointer: AckPointer) -> bytes:
    plain: dict[str, Any] = {"min_reader": FIRST_VERSION, "min_writer": FIRST_VERSION}
    plain |= {"epoch": pointer.epoch, "ledger": pointer.ledger_id}
    if pointer.inline:
        plain["inline"] = [base64.b64encode(entry).decode() for entry in pointer.inline]
    if pointer.successions:
        plain["successions"] = pointer.successions
    return json.dumps(plain, separators=(",", ":")).encode()


def decode_pointer(value: bytes) -> AckPointer:
    def build(plain: dict[str, Any]) -> AckPointer:
        ledger = plain["ledger"]
        inline = tuple(base64.b64decode(entry, validate=True) for entry in plain.get("inline", ()))
        successions = tuple(
            Succession(_key(before), _key(after), int(position))
            for before, after, position in plain.get("successions", ())
        )
        ledger_id = None if ledger is None else int(ledger)
        return AckPointer(int(plain["epoch"]), ledger_id, inline, successions)

    return load(value, "partition's acknowledgements", build)


def _key(plain: Sequence[Any]) -> AckKey:
    name, token, epoch = plain
    return AckKey(str(name), str(token), int(epoch))


NO_SUCCESSIONS: Mapping[int, Succession] = {}


class AckNodesSeen(NamedTuple):
    """The versions of `moves` and of the folder."""

    moves: int
    folder: int


class FencedAcks(NamedTuple):
    """A partition's node, and the states in its ledger, which is fenced: the owner adds nothing
    more."""

    node: AckNode
    states: States


@dataclass(frozen=True, slots=True)
class AckMove:
    """What a process read that has fenced a topic's ack ledgers; `fenced` is by partition."""

    seen: AckNodesSeen
    nodes: "AckNodes"
    fenced: Mapping[int, FencedAcks]

    @property
    def states(self) -> dict[int, States]:
        return {partition: fenced.states for partition, fenced in self.fenced.items()}

    async def operations(
        self, successions: Mapping[int, Succession] = NO_SUCCESSIONS
    ) -> list[Operation]:
        """The operations for the multi with which the process moves a subscription. `successions`:
        by partition the succession to note in the node. Those that do not fit into that multi are
        durable when this returns, or the multi fails. Raises errors.Unavailable if a node has too
        many successions; StoreUnavailable."""
        nodes = {number: fenced.node for number, fenced in self.fenced.items()}
        last, left = dict[int, Set](), MOVE_BYTES_MAX
        for number in [number for number in nodes if number in successions]:
            noted = self._noted(number, nodes[number], successions[number])
            left -= len(noted.value)
            if left < 0 and last:
                await self._note(last, nodes)
                last, left = {}, MOVE_BYTES_MAX - len(noted.value)
            last[number] = noted
        return [
            *self.nodes.checks(self.seen),
            *(last.get(n) or Check(self.nodes.path(n), node.version) for n, node in nodes.items()),
        ]

    async def _note(self, noted: Mapping[int, Set], nodes: dict[int, AckNode]) -> None:
        """Writes the nodes, and puts their new versions into `nodes`. If a node has another version
        by now, the versions stay: the multi of the move fails. Raises StoreUnavailable."""
        if await self.nodes.note(list(noted.values()), self.seen):
            for number in noted:
                nodes[number] = nodes[number]._replace(version=nodes[number].version + 1)

    def _noted(self, partition: int, node: AckNode, succession: Succession) -> Set:
        successions = (*node.pointer.successions, succession)
        if len(successions) > SUCCESSIONS_MAX:
            raise errors.Unavailable(
                f"subscriptions of partition {partition} were moved {SUCCESSIONS_MAX} times, and no"
                " broker has written their acknowledgements since",
                "Connect a consumer to the partition, then try again.",
            )
        pointer = replace(node.pointer, successions=successions)
        return Set(self.nodes.path(partition), encode_pointer(pointer), node.version)


class AckNodes:
    """The nodes of one topic. All methods raise StoreUnavailable and OutcomeUnknown, except where
    their text describes another result."""

    def __init__(
        self, ledgers: LedgerStore, topic_id: str, multis: SharedMultis | None = None
    ) -> None:
        self._ledgers = ledgers
        self._store = ledgers.metadata
        self._multis = multis or SharedMultis(self._store)
        self.topic_id = topic_id
        self.last_put: AckNode | None = None
        """The node that `put` wrote last, or may have written."""
        self._folder = paths.acks(topic_id)
        self._moves = paths.ack_moves(topic_id)

    def path(self, partition: int) -> str:
        return paths.acks(self.topic_id, partition)

    async def get(self, partition: int, *, fresh: bool = True) -> AckNode | None:
        """The partition's node; None if it has no node. With `fresh` not older than this call."""
        if fresh:
            await self._store.sync(self.path(partition))
        node = await read(self._store, self.path(partition))
        return None if node is None else AckNode(decode_pointer(node.value), node.version)

    async def seen(self) -> AckNodesSeen:
        """Not older than this call. Makes the folder if it is missing. Raises
        errors.TopicNotFound."""
        moves, folder = await self._beside_moves(self._folder)
        assert folder is not None, "it has `moves`"
        return AckNodesSeen(moves.version, folder.version)

    async def seen_by_owner(self, partition: int) -> tuple[int, AckNode | None]:
        """The version of `moves`, and the partition's node; otherwise as `seen`."""
        moves, node = await self._beside_moves(self.path(partition))
        pointer = None if node is None else AckNode(decode_pointer(node.value), node.version)
        return moves.version, pointer

    async def _beside_moves(self, path: str) -> tuple[Versioned, Versioned | None]:
        """The node `moves`, and the node at `path`."""
        for _ in range(TRIES_MAX):
            await self._store.sync(self._folder)
            moves, node = await self._store.get_many([self._moves, path])
            if moves is not None:
                return moves, node
            try:
                await self._store.multi([Create(self._folder, b"{}"), Create(self._moves, b"{}")])
            except OutcomeUnknown:
                continue
            except MultiFailed as failed:
                if isinstance(failed.cause, NoNode):
                    raise errors.TopicNotFound(
                        f"there is no topic with id {self.topic_id}", topic_id=self.topic_id
                    ) from None
        raise StoreUnavailable(f"{self._moves} could not be made: {TRIES_MAX} answers were lost")

    async def put(
        self, partition: int, pointer: AckPointer, version: int, moves: int, *checks: Operation
    ) -> int | None:
        """Writes the node as its owner, or makes the node (version NEW); returns the node's new
        version. None: the node or `moves` has changed, one of `checks` failed, or the outcome is
        unknown until the node is read again."""
        self.last_put = AckNode(pointer, version + 1)
        path, value = self.path(partition), encode_pointer(pointer)
        write: list[Operation] = [Set(path, value, version)]
        if version == NEW:
            write = [Set(self._folder, b"{}", ANY), Create(path, value)]
        try:
            await self._multis.multi([*checks, Check(self._moves, moves), *write])
        except (MultiFailed, OutcomeUnknown):
            return None
        return version + 1

    async def partitions(self) -> list[int]:
        """The partitions that have a node."""
        names = await names_in(self._store, self._folder)
        return sorted(int(name) for name in names if name.isdigit())

    async def states(self, partition: int, *, fence: bool = False) -> States:
        """The durable states of a partition. With `fence` the partition's owner adds nothing more
        to the ledger that was read; without, the last write may be missing. Raises
        errors.LedgerError."""
        node, states = await self.get(partition, fresh=False), None
        for _ in range(TRIES_MAX):
            if node is None:
                return {}
            states = await self.states_of(node.pointer, fence=fence)
            again = None if states is not None else await self.get(partition)
            if states is not None or again == node:
                break
            node = again  # its owner went on in another ledger
        return {} if states is None else states

    async def all_states(self) -> dict[int, States]:
        """As `states`, of all partitions."""
        await self._store.sync(self._folder)
        numbers = await self.partitions()
        return dict(
            zip(numbers, await call_each(self.states, numbers, LEDGERS_AT_ONCE), strict=True)
        )

    async def states_of(
        self, pointer: AckPointer, *, fence: bool, store_epoch: int | None = None
    ) -> dict[AckKey, AckState] | None:
        """The states to which the pointer points; None if its ledger does not exist. `store_epoch`:
        the epoch of the metadata store, if the caller has checked it. Raises errors.LedgerError."""
        fold = AckFold()
        if pointer.ledger_id is None:
            for entry in pointer.inline:
                add_entry(fold, entry, "inline")
        elif await is_of_this_store(self._ledgers, pointer.ledger_id, store_epoch):
            try:
                await fold_ledger(fold, self._ledgers, pointer.ledger_id, fence=fence)
            except errors.NoSuchLedger:
                return None
        earlier = dict[AckKey, AckKey]()
        for succession in pointer.successions:
            if (before := fold.states.get(succession.before)) is not None:
                fold.states[succession.after] = succession.state(before)
            if (unused := earlier.get(succession.before)) is not None:
                fold.states.pop(unused, None)  # the subscription had the key `before` after it
            earlier[succession.after] = succession.before
        return fold.states

    def checks(self, seen: AckNodesSeen) -> list[Operation]:
        """The operations by which the multi of a move fails if an owner has made a node since."""
        return [Set(self._moves, b"{}", seen.moves), Check(self._folder, seen.folder)]

    async def note(self, operations: Sequence[Operation], seen: AckNodesSeen) -> bool:
        """Writes nodes of a move before its own multi; False if one of them, or `moves`, has
        changed. Raises StoreUnavailable if the outcome is unknown: the move must begin again,
        because nodes without their successions may have the versions that its multi checks."""
        try:
            await self._store.multi([Check(self._moves, seen.moves), *operations])
        except OutcomeUnknown as unknown:
            raise StoreUnavailable(
                "a move of a subscription was not noted for certain"
            ) from unknown
        except MultiFailed:
            return False
        return True

    async def move(self, except_partitions: Collection[int] = ()) -> AckMove:
        """For a process that moves, deletes or takes over a subscription: fences the ack ledgers of
        the topic's partitions, except `except_partitions`, which this process owns and in which it
        has stopped. The caller's multi must have the operations of the result; if the multi fails,
        the caller begins again. Raises errors.LedgerError."""
        seen = await self.seen()
        numbers = [number for number in await self.partitions() if number not in except_partitions]

        async def fenced(number: int) -> FencedAcks | None:
            node = await self.get(number, fresh=False)
            if node is None:
                return None
            return FencedAcks(node, await self.states_of(node.pointer, fence=True) or {})

        partition_acks = await call_each(fenced, numbers, LEDGERS_AT_ONCE)
        pairs = zip(numbers, partition_acks, strict=True)
        return AckMove(seen, self, {number: acks for number, acks in pairs if acks is not None})
