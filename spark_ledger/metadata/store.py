"""The metadata store as everything above it sees it: small values, compared and set.

Always true of an implementation:
- writes are linearizable; reads may lag until `sync` has returned;
- a write with an unknown outcome raises OutcomeUnknown, and the store never repeats it: the caller
  syncs, reads back and compares (a token, a version, its own record);
- a watch fires at most once, on the event loop, after a change *or* after the session was suspended
  or lost: the caller reads again to see which.

Paths are absolute below the cluster's root ("/topics/public/default/t"). Versions count from 0.
`create(..., parents=True)` makes missing parents; the store deletes no parent by itself.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import Protocol

ANY_VERSION = -1
VALUE_BYTES_MAX = 1_000_000
"""The largest value; ZooKeeper closes the connection at a request above 1 MiB (jute.maxbuffer)."""


class StoreError(Exception):
    """Any failure of the metadata store."""


class NoNode(StoreError):
    """There is no node at the path."""


class NodeExists(StoreError):
    """The node to be created exists already."""


class BadVersion(StoreError):
    """The node has another version than expected: it was written meanwhile."""


class NotEmpty(StoreError):
    """A node with children cannot be deleted."""


class ValueTooBig(StoreError):
    """A write of more than VALUE_BYTES_MAX, which was not sent."""


class OutcomeUnknown(StoreError):
    """A write was sent and its response was lost: it may or may not have been applied."""


class StoreUnavailable(StoreError):
    """No response in time. A write that raises this was never sent, so it was not applied."""


@dataclass(frozen=True, slots=True)
class Versioned:
    """A node. The store created it at `created_ms` and set it last at `modified_ms` (the store's
    clock, ms since 1970). `owner`: the session of an ephemeral node, else 0. `set_in`: the number
    of the transaction that set the node last (0: not known). Each write to the store has a higher
    number than the write before, so `set_in` shows which of two nodes was set first."""

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
    """A multi changed nothing, because the operation `index` failed with `cause`."""

    def __init__(self, index: int, cause: StoreError) -> None:
        super().__init__(f"operation {index} of the multi failed: {cause!r}")
        self.index = index
        self.cause = cause


class SessionState(Enum):
    CONNECTED = "connected"
    SUSPENDED = "suspended"  # without contact; watches and ephemerals may still exist
    LOST = "lost"  # expired: ephemerals are gone; the store opens a new session by itself


Watcher = Callable[[], None]


class MetadataStore(Protocol):
    """Every call may raise StoreUnavailable, a write also OutcomeUnknown and ValueTooBig."""

    @property
    def session_state(self) -> SessionState: ...

    @property
    def session_id(self) -> int:
        """The `Versioned.owner` of this session's ephemerals; 0 before the first session."""

    @property
    def connections(self) -> int:
        """How often this process connected to the store. A new connection, even of the same
        session, may be to a server of the store that lags behind."""

    def add_session_listener(self, listener: Callable[[SessionState], None]) -> None:
        """Call `listener` on the event loop at every change of the session's state."""

    async def get(self, path: str, watch: Watcher | None = None) -> Versioned:
        """The node. Raises NoNode; then the watch fires when the node is created."""

    async def get_many(self, paths: Sequence[str]) -> list[Versioned | None]:
        """The nodes, None for a missing node; much faster than a `get` of each."""

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
        """Carry out all operations or none. Raises MultiFailed."""

    async def sync(self, path: str = "/") -> None:
        """Later reads of this session see every write that was acknowledged before this call."""

    async def close(self) -> None:
        """End the session, and with it its ephemerals."""
