"""The metadata store as everything above it sees it: small values, compared and set.

Always true of an implementation:
- writes are linearizable; reads may lag until `sync` has returned;
- a write whose outcome is not known raises OutcomeUnknown and is never repeated by the store
  itself: the caller syncs, reads back and compares (a token, a version, its own record);
- a watch fires at most once, on the event loop, after a change *or* after the session was
  suspended or lost; it means "read again", nothing more.

Paths are absolute below the cluster's root ("/topics/public/default/t"). Versions count from 0.
Parents are made by `create(..., parents=True)`; intermediate nodes are never deleted.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import Protocol

ANY_VERSION = -1
VALUE_BYTES_MAX = 1_000_000
"""Largest value; ZooKeeper cuts the connection at a request beyond 1 MiB (jute.maxbuffer)."""


class StoreError(Exception):
    """Any failure of the metadata store."""


class NoNode(StoreError):
    """There is no node at the path."""


class NodeExists(StoreError):
    """A node to be created exists already."""


class BadVersion(StoreError):
    """The node's version is not the expected one: there was another write."""


class NotEmpty(StoreError):
    """A node with children cannot be deleted."""


class ValueTooBig(StoreError):
    """A write of more than VALUE_BYTES_MAX, which was not sent."""


class OutcomeUnknown(StoreError):
    """A write was sent and its response was lost: it may or may not have been applied."""


class StoreUnavailable(StoreError):
    """A read, or a write that certainly was not applied, could not be served in time."""


@dataclass(frozen=True, slots=True)
class Versioned:
    """A node's value, its version, when the store created it and when it was last set (ms since
    the epoch, the store's clock), and the session that owns it (0 when it is not ephemeral).
    `set_in` is the number of the transaction that set it last: numbers rise with each write to the
    store, so those of two nodes tell which was set first; 0: not known."""

    value: bytes
    version: int
    created_ms: int = 0
    owner: int = 0
    modified_ms: int = field(default=0, compare=False)
    set_in: int = field(default=0, compare=False)


@dataclass(frozen=True, slots=True)
class Create:
    path: str
    value: bytes = b""


@dataclass(frozen=True, slots=True)
class Set:
    path: str
    value: bytes
    version: int


@dataclass(frozen=True, slots=True)
class Delete:
    path: str
    version: int


@dataclass(frozen=True, slots=True)
class Check:
    """The node exists and has the version (ANY_VERSION: it exists)."""

    path: str
    version: int


Operation = Create | Set | Delete | Check


class MultiFailed(StoreError):
    """A multi changed nothing. `index` is the operation that failed, `cause` why."""

    def __init__(self, index: int, cause: StoreError) -> None:
        super().__init__(f"operation {index} of the multi failed: {cause!r}")
        self.index = index
        self.cause = cause


class SessionState(Enum):
    CONNECTED = "connected"
    SUSPENDED = "suspended"  # not heard of; watches and ephemerals may or may not live
    LOST = "lost"  # expired: ephemerals are gone; the store opens a new session by itself


Watcher = Callable[[], None]


class MetadataStore(Protocol):
    """Reads raise NoNode where stated and StoreUnavailable; writes raise OutcomeUnknown and
    ValueTooBig too."""

    @property
    def session_state(self) -> SessionState: ...

    @property
    def session_id(self) -> int:
        """The number that `Versioned.owner` of this session's ephemerals carries; 0 before one."""

    @property
    def connections(self) -> int:
        """How often this process connected to the store, 1 or more: each may be to an older copy of
        it, whatever became of the session."""

    def add_session_listener(self, listener: Callable[[SessionState], None]) -> None:
        """Call `listener` on the event loop at every change of the session's state."""

    async def get(self, path: str, watch: Watcher | None = None) -> Versioned:
        """The node. Raises NoNode (the watch is then set on its creation)."""

    async def get_many(self, paths: Sequence[str]) -> list[Versioned | None]:
        """The nodes, None for a missing one; in a fraction of the time of as many `get`."""

    async def children(self, path: str, watch: Watcher | None = None) -> list[str]:
        """Names of the node's children, sorted. Raises NoNode."""

    async def create(
        self, path: str, value: bytes = b"", *, ephemeral: bool = False, parents: bool = False
    ) -> None:
        """Make a node at version 0. Raises NodeExists, NoNode (the parent)."""

    async def set(self, path: str, value: bytes, version: int) -> int:
        """Replace the value if the version is `version`; returns the new version.

        Raises NoNode, BadVersion.
        """

    async def delete(self, path: str, version: int = ANY_VERSION) -> None:
        """Raises NoNode, BadVersion, NotEmpty."""

    async def multi(self, operations: Sequence[Operation]) -> None:
        """All of them or none. Raises MultiFailed."""

    async def sync(self, path: str = "/") -> None:
        """Reads of this session that begin after it returns see every write acknowledged before
        it was called."""

    async def close(self) -> None:
        """End the session; its ephemerals go."""
