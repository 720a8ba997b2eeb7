"""Which bookies there are and where, by the last look at the metadata store (`BookieDirectory`);
which of them are chosen last, because they lately gave no response or a slow one (`Quarantine`);
and, for operators, all bookies that ever registered (`registered`, after a sync: each once, in the
best state it has).

Always true of the directory: `writable` and `address` read from memory; one look at the store runs
at a time, when a watch fired, and after `refresh_s` if none did, for a watch may be missed. A look
lists the bookies, and reads new registrations. If a watch fired and no bookie came or went, one
registered anew: then it reads all. If no watch fired, it reads AGAIN_AT_ONCE of the others, those
read longest ago: free space changes without a watch. So the load of many processes does not grow
with the bookies. A bookie's last known address is kept when its registration goes, as it may still
respond, and replaced by the address that the bookie recorded of itself since: under a hold it
serves and may not register. A look that fails is repeated, and its failure never raised; a listener
that fails is reported and harms no other.

Always true of the quarantine: no bookie is excluded, only put last; a bookie is *in doubt* from
a call without response until DOUBT_S later or its next response, whichever is first, and
*overtaken* for as long from a read that another bookie delivered sooner; it is *in quarantine* once
enough calls failed or were slow within the window, and a response in between does not end that.
Calls that fail together (all frames under way to a bookie that dies) count once. Memory: a few
numbers a bookie.
"""

import asyncio
import json
import logging
from collections import deque
from collections.abc import Callable, Collection, Mapping
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import lru_cache
from typing import Any

from spark_ledger import errors, net
from spark_ledger.async_tasks import cancel, woken
from spark_ledger.metadata import paths
from spark_ledger.metadata.cluster import why_held
from spark_ledger.metadata.store import MetadataStore, NoNode, SessionState, StoreError
from spark_ledger.metadata.store_calls import names_in, read

_log = logging.getLogger(__name__)
RETRY_S = 1.0
AGAIN_AT_ONCE = 16
_FOLDERS = (paths.BOOKIES_AVAILABLE, paths.BOOKIES_READONLY)


@dataclass(frozen=True, slots=True)
class BookieInfo:
    """A bookie's registration: its id, where it speaks frames ("host:port"), its rack ("" = not
    known), free bytes."""

    id: str
    address: str
    rack: str = ""
    free_bytes: int = 0
    reason: str = ""  # why it is read-only

    @property
    def host(self) -> str:
        """Where it runs, "" if its address is not known."""
        return net.host_of(self.address)


Registrations = dict[str, BookieInfo]


class BookieDirectory:
    """Watches the registrations of writable and read-only bookies; `refresh_s` as above."""

    def __init__(self, metadata: MetadataStore, refresh_s: float) -> None:
        self._metadata = metadata
        self._refresh_s = refresh_s
        self._read_at: dict[str, BookieInfo | None] = {}  # by path, read longest ago first
        self._armed: dict[str, int] = {}
        self._writable: Registrations = {}
        self._readonly: Registrations = {}
        self._latest: Registrations = {}  # id, address and rack of each, as last registered
        self._left: dict[str, None] = {}  # bookies that left, the last one to leave at the end
        self._listeners: list[Callable[[], None]] = []
        self._changed = asyncio.Event()
        self._refreshing = asyncio.Lock()
        self._watching: asyncio.Task[None] | None = None

    async def start(self) -> None:
        """Read all registrations once and follow the changes from then on. Raises
        StoreUnavailable."""
        await self.refresh()
        self._watching = asyncio.get_running_loop().create_task(
            self._follow(), name="bookie directory"
        )

    async def close(self) -> None:
        if self._watching is not None:
            await cancel(self._watching)

    def writable(self) -> list[BookieInfo]:
        """Bookies that take new entries, by id."""
        return [self._writable[bookie] for bookie in sorted(self._writable)]

    def readonly(self) -> list[BookieInfo]:
        """Bookies that only serve reads and recovery, by id."""
        return [self._readonly[bookie] for bookie in sorted(self._readonly)]

    def is_writable(self, bookie_id: str) -> bool:
        return bookie_id in self._writable

    def is_readonly(self, bookie_id: str) -> bool:
        return bookie_id in self._readonly

    def is_registered(self, bookie_id: str) -> bool:
        return bookie_id in self._writable or bookie_id in self._readonly

    def address(self, bookie_id: str) -> str | None:
        """The bookie's address, or the one when last registered; None if it is unknown."""
        latest = self._latest.get(bookie_id)
        return None if latest is None else latest.address

    def rack(self, bookie_id: str) -> str:
        """The bookie's rack, or the one when last registered; "" if unknown."""
        return self.info(bookie_id).rack

    def info(self, bookie_id: str) -> BookieInfo:
        """Id, address and rack, as last registered."""
        return self._latest.get(bookie_id) or BookieInfo(bookie_id, "")

    async def find(self, bookie_id: str) -> str | None:
        """`address`; if it is not in memory, by the list of all bookies that ever registered."""
        if bookie_id not in self._latest:
            recorded = await self._read(f"{paths.BOOKIES_KNOWN}/{bookie_id}", bookie_id)
            if recorded is not None and bookie_id not in self._latest:
                self._heard_of(recorded)
        return self.address(bookie_id)

    async def known(self) -> int:
        """How many bookies ever registered. Raises StoreError."""
        names = await names_in(self._metadata, paths.BOOKIES_KNOWN)
        for name in names:
            await self.find(name)
        return len({**dict.fromkeys(names), **self._latest})

    async def down(self) -> list[BookieInfo]:
        """Bookies that ever registered and are not registered now, as they last were: first those
        that this process saw, the last one to leave first; then the others, by id. Raises
        StoreError."""
        names = await names_in(self._metadata, paths.BOOKIES_KNOWN)
        seen = [name for name in reversed(self._left) if name in names]
        others = sorted(name for name in names if name not in self._left)
        gone = [name for name in (*seen, *others) if not self.is_registered(name)]
        for name in gone:
            await self.find(name)
        return [self.info(name) for name in gone]

    def heard_of(self, without: Collection[str]) -> list[str]:
        """All bookies with a known address, except those in `without`, by id."""
        return [bookie for bookie in sorted(self._latest) if bookie not in without]

    def describe(self, bookie_id: str) -> str:
        """One bookie for an error text: its id, its address, how it is registered."""
        where = self.address(bookie_id) or "address unknown"
        if bookie_id in self._writable:
            return f"{bookie_id} ({where})"
        if bookie_id in self._readonly:
            return f"{bookie_id} ({where}, read-only: {self._readonly[bookie_id].reason})"
        return f"{bookie_id} ({where}, not registered)"

    def add_listener(self, listener: Callable[[], None]) -> None:
        """Call `listener` on the event loop after each change of registrations, except when only
        free space changed."""
        self._listeners.append(listener)

    def remove_listener(self, listener: Callable[[], None]) -> None:
        """Never call the listener again. An unknown listener is no error."""
        if listener in self._listeners:
            self._listeners.remove(listener)

    async def refresh(self) -> None:
        """Re-read all registrations. Raises StoreError."""
        await self._look(lambda others, moved: others)

    async def _look(self, again: Callable[[list[str], bool], list[str]]) -> None:
        """Learn the registrations of both folders: read the new ones, and of the others those that
        `again` picks from their paths, read longest ago first, and from whether any bookie came or
        went. Raises StoreError."""
        async with self._refreshing:
            paths_in = {
                folder: [f"{folder}/{name}" for name in await self._names(folder)]
                for folder in _FOLDERS
            }
            listed = dict.fromkeys(path for folder in _FOLDERS for path in paths_in[folder])
            others = [path for path in self._read_at if path in listed]
            moved = len(others) < max(len(listed), len(self._read_at))
            came = [path for path in listed if path not in self._read_at]
            for path in (*came, *again(others, moved)):
                bookie = await self._read(path, path.rpartition("/")[2])
                self._read_at.pop(path, None)
                self._read_at[path] = bookie
            self._read_at = {path: info for path, info in self._read_at.items() if path in listed}
            before = _places(self._writable, self._readonly)
            were = [*self._writable, *self._readonly]
            self._writable, self._readonly = (
                {info.id: info for path in paths_in[folder] if (info := self._read_at[path])}
                for folder in _FOLDERS
            )
            for bookie in (*self._readonly.values(), *self._writable.values()):
                self._heard_of(bookie)
            self._left |= dict.fromkeys(were)
            self._left = {id_: None for id_ in self._left if not self.is_registered(id_)}
            for id_ in [*reversed(self._left)][:AGAIN_AT_ONCE]:
                remembered = await self._read(f"{paths.BOOKIES_KNOWN}/{id_}", id_)
                if remembered is not None:
                    self._heard_of(replace(remembered, rack=self.rack(id_)))
            if _places(self._writable, self._readonly) != before:
                self._call_listeners()

    def _heard_of(self, bookie: BookieInfo) -> None:
        self._latest[bookie.id] = BookieInfo(bookie.id, bookie.address, bookie.rack)

    def _call_listeners(self) -> None:
        for listener in list(self._listeners):
            if listener not in self._listeners:
                continue  # removed by a listener before it
            try:
                listener()
            except Exception as defect:
                asyncio.get_running_loop().call_exception_handler(
                    {"message": "a listener of the bookie directory failed", "exception": defect}
                )

    async def _follow(self) -> None:
        pause_s, fired = self._refresh_s, False
        while True:
            fired |= await woken(self._changed, pause_s)  # without a watch that fired look too
            self._changed.clear()
            if self._metadata.session_state is not SessionState.CONNECTED:
                pause_s = min(RETRY_S, self._refresh_s)  # no call waits for this look
                continue
            try:
                if fired:
                    await self._look(lambda others, moved: [] if moved else others)
                else:
                    await self._look(lambda others, moved: others[:AGAIN_AT_ONCE])
                pause_s, fired = self._refresh_s, False
            except StoreError:
                pause_s = min(RETRY_S, self._refresh_s)
            except Exception:
                _log.exception("the list of bookies cannot be read now: a defect")
                pause_s = min(RETRY_S, self._refresh_s)

    async def _names(self, folder: str) -> list[str]:
        watch = self._watch(folder)
        with suppress(NoNode):
            return await self._metadata.children(folder, watch)
        try:
            await self._metadata.get(folder, watch)
        except NoNode:
            return []  # no bookie ever registered; the watch fires when one does
        return await self._metadata.children(folder, watch)

    def _watch(self, folder: str) -> Callable[[], None]:
        """The watch of the present listing; watches of earlier listings are ignored, as this
        listing sees their change."""
        number = self._armed[folder] = self._armed.get(folder, 0) + 1

        def fired() -> None:
            if self._armed[folder] == number:
                self._changed.set()

        return fired

    async def _read(self, path: str, bookie_id: str) -> BookieInfo | None:
        """One registration; None if it is gone or damaged."""
        try:
            return _decode((await self._metadata.get(path)).value, bookie_id)
        except (NoNode, ValueError, KeyError, TypeError, OverflowError):
            return None


@lru_cache(maxsize=256)
def _decode(value: bytes, bookie_id: str) -> BookieInfo:
    """A registration, cached: most have not changed since the last read."""
    plain = json.loads(value)
    return BookieInfo(
        bookie_id,
        reached_at(plain),
        str(plain.get("rack", "")),
        int(plain.get("free_bytes", 0)),
        str(plain.get("reason", "")),
    )


def reached_at(record: Mapping[str, Any]) -> str:
    """The address at which clients reach the bookie of a registration: its frames. An earlier
    version recorded no frames if they were switched off, or for a bookie that is not registered
    now: then it is `address`, where gRPC is served, and the failure to connect names that."""
    address = record["address"]
    return str(record.get("frames") or address)


def _places(*groups: Registrations) -> list[Registrations]:
    """The registrations without free bytes, which change all the time."""
    return [{i: replace(info, free_bytes=0) for i, info in group.items()} for group in groups]


DOUBT_S = 10.0
APART_S = 1.0  # a failure closer than this to the one before counts as the same


@dataclass(slots=True)
class BookieDoubts:
    """The doubts about one bookie. Times are seconds of the loop's clock."""

    doubted_at: float | None = None
    overtaken_at: float | None = None
    troubles: deque[float] = field(default_factory=deque)
    quarantined_until: float = 0.0


class Quarantine:
    """Gets the outcome of every call. `clock` gives the seconds of all times here.

    `failures` failed or slow calls within `window_s` put a bookie in quarantine for `quarantine_s`
    after the last of them (0: never).
    """

    def __init__(
        self, failures: int, window_s: float, quarantine_s: float, clock: Callable[[], float]
    ) -> None:
        self._failures = failures
        self._window_s = window_s
        self._quarantine_s = quarantine_s
        self._clock = clock
        self._standings: dict[str, BookieDoubts] = {}

    # -- what happened ------------------------------------------------------------------------

    def failed(self, bookie_id: str) -> None:
        """A call got no response."""
        standing = self._trouble(bookie_id)
        standing.doubted_at = self._clock()

    def slow(self, bookie_id: str) -> None:
        """A response came, but took too long."""
        standing = self._trouble(bookie_id)
        standing.doubted_at = standing.overtaken_at = None

    def overtaken(self, bookie_id: str) -> None:
        """A read was given up, because another bookie, asked later, delivered it sooner. The bookie
        may only have had more to do: it is chosen last, and is a spare only without another."""
        self._standings.setdefault(bookie_id, BookieDoubts()).overtaken_at = self._clock()

    def responded(self, bookie_id: str) -> None:
        """A response came in good time, whatever its status."""
        standing = self._standings.get(bookie_id)
        if standing is not None:
            standing.doubted_at = standing.overtaken_at = None

    # -- the bookies that are chosen last -----------------------------------------------------

    def suspects(self) -> list[str]:
        """Bookies in doubt, overtaken or in quarantine now, by id."""
        return [bookie for bookie in sorted(self._standings) if self.why(bookie)]

    def in_doubt(self) -> list[str]:
        """Bookies that lately gave no response and have given none since, by id."""
        return [bookie for bookie in sorted(self._standings) if self._doubted(bookie)]

    def why(self, bookie_id: str) -> str:
        """For an error text: why the bookie is chosen last; "" if it is not."""
        standing = self._standings.get(bookie_id)
        if standing is None:
            return ""
        left_s = standing.quarantined_until - self._clock()
        if left_s > 0:
            return f"in quarantine for another {left_s:.0f} s: it failed or was slow"
        if self._doubted(bookie_id):
            return "gave no answer lately"
        return "another responded sooner" if self._lately(standing.overtaken_at) else ""

    def _doubted(self, bookie_id: str) -> bool:
        return self._lately(self._standings[bookie_id].doubted_at)

    def _lately(self, at: float | None) -> bool:
        return at is not None and self._clock() - at < DOUBT_S

    def _trouble(self, bookie_id: str) -> BookieDoubts:
        standing = self._standings.setdefault(bookie_id, BookieDoubts())
        now, troubles = self._clock(), standing.troubles
        if troubles and now - troubles[-1] < APART_S:
            return standing
        troubles.append(now)
        while len(troubles) > self._failures or now - troubles[0] > self._window_s:
            troubles.popleft()
        if len(troubles) == self._failures and self._quarantine_s > 0:
            standing.quarantined_until = now + self._quarantine_s
        return standing


DOWN, READ_ONLY, WRITABLE = "down", "read-only", "writable"
_BY_STATE = {
    DOWN: paths.BOOKIES_KNOWN,
    READ_ONLY: paths.BOOKIES_READONLY,
    WRITABLE: paths.BOOKIES_AVAILABLE,
}


async def registered(store: MetadataStore) -> list[dict[str, Any]]:
    """Every bookie that ever registered, by id, with its registration, a `state` (WRITABLE,
    READ_ONLY or DOWN), how many ledgers it lists as in limbo, and why the store is `held`, if it
    is: then no bookie registers. Raises StoreUnavailable."""
    await store.sync()
    held = await why_held(store)
    bookies: dict[str, dict[str, Any]] = {}
    for state, folder in _BY_STATE.items():
        for bookie_id, record in (await _those_in(store, folder)).items():
            bookies[bookie_id] = {"id": bookie_id, "state": state, **record}
    for bookie_id, record in bookies.items():
        record["limbo_ledgers"] = len(await names_in(store, paths.limbo(bookie_id)))
        start = await read(store, paths.bookie_start(bookie_id))
        record["twin"] = start is not None and bool(_plain(start.value).get("twin"))
        if held:
            record["held"] = held
    return [bookies[bookie_id] for bookie_id in sorted(bookies)]


def listed_status(bookie: dict[str, Any]) -> dict[str, Any]:
    """A bookie of `registered` as listings show it; free bytes are unknown for one that is
    down."""
    why = bookie.get("reason") or bookie.get("degraded") or ""
    if bookie["state"] == DOWN:
        why = "not registered: it is down, or cannot reach ZooKeeper"
        if bookie.get("held"):
            why = (
                "not registered: no bookie registers while the metadata store is held; it serves"
                " open ledgers and reads if its process runs"
            )
        if bookie.get("twin"):
            why = (
                "two processes served as it, from copies of its directories, and ended: give one of"
                " them empty directories, start the other"
            )
    return {
        "id": bookie["id"],
        "state": bookie["state"],
        "why": why,
        "address": bookie.get("address", ""),
        "frames": bookie.get("frames", ""),
        "rack": bookie.get("rack", ""),
        "version": bookie.get("server_version", ""),
        "free_bytes": bookie.get("free_bytes"),
        "total_bytes": bookie.get("total_bytes"),
        "limbo_ledgers": bookie["limbo_ledgers"],
    }


async def alive(store: MetadataStore) -> frozenset[str]:
    """Ids of the bookies that are registered now, writable or not. Raises StoreUnavailable."""
    names = await names_in(store, paths.BOOKIES_AVAILABLE)
    return frozenset(names + await names_in(store, paths.BOOKIES_READONLY))


async def _those_in(store: MetadataStore, folder: str) -> dict[str, dict[str, Any]]:
    names = await names_in(store, folder)
    nodes = await store.get_many([f"{folder}/{name}" for name in names])
    pairs = zip(names, nodes, strict=True)  # a bookie without a node just left
    return {name: _plain(node.value) for name, node in pairs if node is not None}


def _plain(value: bytes) -> dict[str, Any]:
    """A bookie's registration; of a node that cannot be decoded: `malformed`, and the reason."""
    try:
        plain = json.loads(value)
    except errors.MALFORMED:
        plain = None
    if isinstance(plain, dict):
        return plain
    return {"malformed": True, "reason": f"its node is malformed: {value[:50]!r}"}
