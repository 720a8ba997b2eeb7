"""The list of under-replicated ledgers: one node for each, in the metadata store.

    the auditor, or a process that met a damaged copy, adds a reason -> a worker takes the lock, an
    ephemeral node, and works -> the worker removes the ledger from the list, if the node still has
    the version that the worker read

Always true: a reason that is added meanwhile gives the node another version, so the removal fails
and the reason stays; a lock ends with its worker's session; two workers at one ledger cost work, no
data (slots.py). The worker that finds a deleted ledger on the list removes it from the list.
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
from spark_ledger.metadata.store_calls import read, unavailable_while


class Cause(StrEnum):
    """Why copies are missing, or should be on another bookie; nodes and texts have the value."""

    LOST = "lost"
    """The bookie is lost."""
    DRAINED = "drained"
    """The bookie is being drained."""
    LIMBO = "limbo"
    """The bookie lists the ledger as in limbo."""
    LACKING = "lacking"
    """The bookie lacks entries, or its copies are damaged."""
    JOINING = "joining"
    """The bookie joined, got copies for a slot, and did not take the slot."""
    MISPLACED = "misplaced"
    """No copy is missing, but another copy is on the bookie's host or rack, and a bookie on another
    host or rack could take the copy."""

    @classmethod
    def _missing_(cls, value: object) -> "Cause":
        """The cause for a value that a newer version writes: a worker then compares the copies."""
        return cls.LACKING

    @property
    def goes(self) -> bool:
        """Whether the bookie has to leave the ledger."""
        return self in (Cause.LOST, Cause.DRAINED)

    @property
    def lacks_copies(self) -> bool:
        """Whether copies are missing, or their bookie has to leave."""
        return self not in (Cause.JOINING, Cause.MISPLACED)


class Reason(NamedTuple):
    """Why a ledger is listed, for one bookie. `since_ms`: by the clock of the metadata store."""

    why: Cause
    bookie_id: str
    since_ms: int


@dataclass(frozen=True, slots=True)
class ListedLedger:
    """A ledger on the list. `blocked`: the obstacle that the last worker met; `damaged`: entries
    that no bookie supplied to the worker."""

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
    """The listed ledger of a node's value. A malformed value gives a ledger without a reason, so
    the next worker removes it from the list."""
    try:
        plain: dict[str, Any] = json.loads(value)
        reasons = tuple(Reason(Cause(w), str(b), int(s)) for w, b, s in plain["reasons"])
        damaged = tuple(map(int, plain.get("damaged", ())))
        return ListedLedger(ledger_id, reasons, str(plain.get("blocked", "")), damaged, version)
    except errors.MALFORMED:
        return ListedLedger(ledger_id, (), version=version)


async def listed_ledgers(store: MetadataStore) -> list[int]:
    """The ledgers on the list, ascending. Raises Unavailable."""
    with unavailable_while("listing under-replicated ledgers"):
        await store.sync(paths.UNDERREPLICATED)
        if await read(store, paths.UNDERREPLICATED) is None:
            return []  # no ledger was ever listed
        return [number async for number in ledger_record.ledger_ids(store, paths.UNDERREPLICATED)]


async def find(store: MetadataStore, ledger_id: int) -> ListedLedger | None:
    """The ledger on the list, by this session's view; None if it is not listed. Raises
    StoreError."""
    node = await read(store, paths.underreplicated(ledger_id))
    return None if node is None else decode(ledger_id, node.value, node.version)


async def is_anything_missing(store: MetadataStore) -> bool:
    """Whether any ledger is listed as lacking copies that a bookie may supply. Raises Unavailable,
    StoreError."""
    for ledger_id in await listed_ledgers(store):
        work = await find(store, ledger_id)
        if work is not None and lacks_copies(work) and not work.damaged:
            return True
    return False


def lacks_copies(work: ListedLedger) -> bool:
    """Whether copies are missing, or their bookie has to leave."""
    return any(reason.why.lacks_copies for reason in work.reasons)


async def add(store: MetadataStore, ledger_id: int, reasons: Iterable[Reason]) -> bool:
    """List the reasons, durably; returns whether a reason is new. A reason that is already listed
    for its bookie stays unchanged. If the new reason began later, the node nevertheless gets a new
    version: the bookie was registered meanwhile, and a worker that saw its registration may be
    about to remove the ledger. Raises StoreError."""
    new_reasons = {reason[:2]: reason for reason in reasons}
    while True:
        work = await find(store, ledger_id)
        if work is None:
            value = encode(ListedLedger(ledger_id, tuple(new_reasons.values())))
            try:
                await store.create(paths.underreplicated(ledger_id), value, parents=True)
                return True
            except (NodeExists, OutcomeUnknown):
                await store.sync(paths.UNDERREPLICATED)
                continue
        listed_reasons = {reason[:2]: reason for reason in work.reasons}
        added = tuple(reason for key, reason in new_reasons.items() if key not in listed_reasons)
        if not added and all(listed_reasons[key] == reason for key, reason in new_reasons.items()):
            return False
        if await _put(store, replace(work, reasons=(*work.reasons, *added), blocked="")):
            return bool(added)


async def update(store: MetadataStore, work: ListedLedger) -> None:
    """Keep the ledger listed, with its remaining reasons and the obstacle. Without effect if the
    node has changed meanwhile. Raises StoreError."""
    await _put(store, work)


async def remove(store: MetadataStore, work: ListedLedger) -> None:
    """Remove the ledger from the list, if no reason was added meanwhile. Raises StoreError."""
    with suppress(NoNode, BadVersion, OutcomeUnknown):
        await store.delete(paths.underreplicated(work.ledger_id), work.version)


async def lock(store: MetadataStore, ledger_id: int) -> bool:
    """Take the lock; returns whether this session has it. Raises StoreError."""
    path = paths.underreplicated_lock(ledger_id)
    try:
        await store.create(path, ephemeral=True, parents=True)
        return True
    except (NodeExists, OutcomeUnknown):
        await store.sync(path)
    node = await read(store, path)
    return node is not None and node.owner == store.session_id


async def unlock(store: MetadataStore, ledger_id: int) -> bool:
    """Give the lock back, if this session has it; returns whether it is certain that the session no
    longer has the lock."""
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
