"""The list of under-replicated ledgers: one node for each, in the metadata store.

    the auditor, or a process that met a damaged copy, adds a reason -> a worker takes the lock, an
    ephemeral node, and works -> it takes the ledger off the list at the version that it saw

Always true: a reason that is added meanwhile makes another version, so it is not taken off with
the others; a lock ends with its worker's session; two workers at one ledger cost work, no data
(slots.py). The worker that meets a deleted ledger on the list takes it off.
"""

import json
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass, replace
from enum import StrEnum
from typing import Any, NamedTuple

from spark_ledger import errors
from spark_ledger.metadata import ledger_record, paths
from spark_ledger.metadata.store import (
    BadVersion,
    MetadataStore,
    NodeExists,
    NoNode,
    OutcomeUnknown,
    StoreError,
)
from spark_ledger.metadata.store_calls import reachable, read


class Cause(StrEnum):
    """Why copies are missing, or should be elsewhere; the value is in the node and for people."""

    LOST = "lost"
    """The bookie is lost."""
    DRAINED = "drained"
    """The bookie is to be drained."""
    LIMBO = "limbo"
    """The bookie lists the ledger as in limbo."""
    LACKING = "lacking"
    """Entries are not at the bookie, or damaged."""
    JOINING = "joining"
    """The bookie was given copies for a slot that it did not take."""
    MISPLACED = "misplaced"
    """No copy is missing: another is on the bookie's host or rack, and other ones are free."""

    @classmethod
    def _missing_(cls, value: object) -> "Cause":
        """A cause that a newer version writes: a worker looks at the copies."""
        return cls.LACKING

    @property
    def goes(self) -> bool:
        """Whether the bookie is to leave the ledger."""
        return self in (Cause.LOST, Cause.DRAINED)

    @property
    def lacks(self) -> bool:
        """Whether copies are missing, or are going."""
        return self not in (Cause.JOINING, Cause.MISPLACED)


class Reason(NamedTuple):
    """Why a ledger is listed, for one bookie. `since_ms`: by the clock of the metadata store."""

    why: Cause
    bookie_id: str
    since_ms: int


@dataclass(frozen=True, slots=True)
class ListedLedger:
    """A ledger on the list. `blocked`: the obstacle that a worker met last; `damaged`: entries that
    no bookie supplied to it."""

    ledger_id: int
    reasons: tuple[Reason, ...]
    blocked: str = ""
    damaged: tuple[int, ...] = ()
    version: int = 0


def encode(work: ListedLedger) -> bytes:
    plain: dict[str, Any] = {"reasons": [list(reason) for reason in work.reasons]}
    if work.blocked:
        plain["blocked"] = work.blocked
    if work.damaged:
        plain["damaged"] = list(work.damaged)
    return json.dumps(plain, sort_keys=True, separators=(",", ":")).encode()


def decode(ledger_id: int, value: bytes, version: int) -> ListedLedger:
    """The work of a node's value. A value that cannot be understood is a ledger with no reason, so
    the next worker takes it off the list."""
    try:
        plain: dict[str, Any] = json.loads(value)
        reasons = tuple(Reason(Cause(w), str(b), int(s)) for w, b, s in plain["reasons"])
        damaged = tuple(map(int, plain.get("damaged", ())))
        return ListedLedger(ledger_id, reasons, str(plain.get("blocked", "")), damaged, version)
    except errors.MALFORMED:
        return ListedLedger(ledger_id, (), version=version)


async def listed(store: MetadataStore) -> list[int]:
    """The ledgers on the list, ascending. Raises Unavailable."""
    with reachable("listing what is under-replicated"):
        await store.sync(paths.UNDERREPLICATED)
        if await read(store, paths.UNDERREPLICATED) is None:
            return []  # nothing was ever listed
        return [number async for number in ledger_record.ledger_ids(store, paths.UNDERREPLICATED)]


async def find(store: MetadataStore, ledger_id: int) -> ListedLedger | None:
    """The ledger's work on the list, as this session sees it. Raises StoreError."""
    node = await read(store, paths.underreplicated(ledger_id))
    return None if node is None else decode(ledger_id, node.value, node.version)


async def is_anything_missing(store: MetadataStore) -> bool:
    """Whether any ledger is listed for missing or going copies that a bookie may supply. Raises
    Unavailable, StoreError."""
    for ledger_id in await listed(store):
        work = await find(store, ledger_id)
        if work is not None and lacks(work) and not work.damaged:
            return True
    return False


def lacks(work: ListedLedger) -> bool:
    """Whether copies are missing, or are going."""
    return any(reason.why.lacks for reason in work.reasons)


async def add(store: MetadataStore, ledger_id: int, reasons: Iterable[Reason]) -> bool:
    """List the reasons, durably; whether any was new. A reason that is listed for its bookie stays
    as it is. If the given one began later, the node gets a new version: the bookie was back
    meanwhile, and a worker that saw that may be about to take the ledger off. Raises StoreError."""
    given = {reason[:2]: reason for reason in reasons}
    while True:
        work = await find(store, ledger_id)
        if work is None:
            value = encode(ListedLedger(ledger_id, tuple(given.values())))
            try:
                await store.create(paths.underreplicated(ledger_id), value, parents=True)
                return True
            except (NodeExists, OutcomeUnknown):
                await store.sync(paths.UNDERREPLICATED)
                continue
        present = {reason[:2]: reason for reason in work.reasons}
        new = tuple(reason for key, reason in given.items() if key not in present)
        if not new and all(present[key] == reason for key, reason in given.items()):
            return False
        if await _put(store, replace(work, reasons=(*work.reasons, *new), blocked="")):
            return bool(new)


async def keep(store: MetadataStore, work: ListedLedger) -> None:
    """Keep the ledger listed, with the reasons that are left and the obstacle. Without effect if
    the node has changed meanwhile. Raises StoreError."""
    await _put(store, work)


async def done(store: MetadataStore, work: ListedLedger) -> None:
    """Take the ledger off the list, if no reason was added meanwhile. Raises StoreError."""
    with suppress(NoNode, BadVersion, OutcomeUnknown):
        await store.delete(paths.underreplicated(work.ledger_id), work.version)


async def lock(store: MetadataStore, ledger_id: int) -> bool:
    """Take the lock; whether this session has it now. Raises StoreError."""
    path = paths.underreplicated_lock(ledger_id)
    try:
        await store.create(path, ephemeral=True, parents=True)
        return True
    except (NodeExists, OutcomeUnknown):
        await store.sync(path)
    node = await read(store, path)
    return node is not None and node.owner == store.session_id


async def unlock(store: MetadataStore, ledger_id: int) -> bool:
    """Give the lock back, if this session has it; whether the session certainly does not have it
    any more."""
    path = paths.underreplicated_lock(ledger_id)
    try:
        await store.sync(path)
        node = await read(store, path)
        if node is not None and node.owner == store.session_id:
            with suppress(NoNode):
                await store.delete(path, node.version)
        return True
    except StoreError:
        return False


async def _put(store: MetadataStore, work: ListedLedger) -> bool:
    try:
        await store.set(paths.underreplicated(work.ledger_id), encode(work), work.version)
        return True
    except (BadVersion, NoNode, OutcomeUnknown):
        await store.sync(paths.UNDERREPLICATED)
        return False
