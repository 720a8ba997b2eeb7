"""Which bookies there are and where, by the last look at the metadata store (`BookieDirectory`);
which bookies are chosen last, because they lately gave no response or responded slowly
(`Quarantine`); and, for operators, all bookies that ever registered (`registered`).

Always true of the directory:
- `writable` and `address` read from memory. One look at the store runs at a time: when a watch
  fired, or after `refresh_s`, because a watch may be missed;
- a look lists the bookies and reads new registrations. If a watch fired and the list has not
  changed, a bookie has registered anew, and the look reads all registrations. If no watch fired, it
  reads again the REREADS_PER_LOOK registrations that were read longest ago, because free space
  changes without a watch. So the load of many processes does not grow with the number of bookies;
- the last address of a bookie that is no longer registered is kept, as the bookie may still
  respond. If the bookie recorded a newer address, that replaces it: while the store is held (it
  went back in time) a bookie serves without registering;
- a look that fails in the background is repeated, and raises no error; a listener that fails is
  reported, and the other listeners are still called.

Always true of the quarantine:
- no bookie is excluded, only chosen last;
- a bookie is *in doubt* from a call without response until its next response, DOUBT_S at most, and
  *overtaken* from a read that another bookie delivered sooner until its next response, DOUBT_S at
  most. It is *in quarantine* after enough calls failed or were slow within the window; a response
  does not end that;
- calls that fail together (all frames under way to a bookie that dies) count as one failure.
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
from spark_ledger.metadata.cluster import hold_reason
from spark_ledger.metadata.store import MetadataStore, NoNode, SessionState, StoreError
from spark_ledger.metadata.store_calls import names_in, read

_log = logging.getLogger(__name__)
RETRY_S = 1.0
REREADS_PER_LOOK = 16
_FOLDERS = (paths.BOOKIES_AVAILABLE, paths.BOOKIES_READONLY)


@dataclass(frozen=True, slots=True)
class BookieInfo:
    """A bookie's registration: its id, its address for clients ("host:port"), its rack ("": not
    known), its free bytes."""

    id: str
    address: str
    rack: str = ""
    free_bytes: int = 0
    reason: str = ""  # why it is read-only

    @property
    def host(self) -> str:
        """The host of its address; "" if the address is not known."""
        return net.host_of(self.address)


Registrations = dict[str, BookieInfo]


class BookieDirectory:
    """Watches the registrations of writable and read-only bookies; `refresh_s` as above."""

    def __init__(self, metadata: MetadataStore, refresh_s: float) -> None:
        self._metadata = metadata
        self._refresh_s = refresh_s
        self._infos_by_path: dict[str, BookieInfo | None] = {}  # by path, read longest ago first
        self._watches: dict[str, Callable[[], None]] = {}  # the current one, by folder
        self._writable: Registrations = {}
        self._readonly: Registrations = {}
        self._last_infos: Registrations = {}  # id, address and rack, as last registered
        self._departed_ids: dict[str, None] = {}  # no longer registered, the latest at the end
        self._listeners: list[Callable[[], None]] = []
        self._has_changed = asyncio.Event()
        self._refreshing = asyncio.Lock()
        self._follow_task: asyncio.Task[None] | None = None

    async def start(self) -> None:
        """Read all registrations, and follow their changes. Raises StoreUnavailable."""
        await self.refresh()
        self._follow_task = asyncio.get_running_loop().create_task(
            self._follow(), name="bookie directory"
        )

    async def close(self) -> None:
        if self._follow_task is not None:
            await cancel(self._follow_task)

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
        """The bookie's address, as last registered; None if it is unknown."""
        latest = self._last_infos.get(bookie_id)
        return None if latest is None else latest.address

    def rack(self, bookie_id: str) -> str:
        """The bookie's rack, as last registered; "" if it is unknown."""
        return self.info(bookie_id).rack

    def info(self, bookie_id: str) -> BookieInfo:
        """Id, address and rack, as last registered."""
        return self._last_infos.get(bookie_id) or BookieInfo(bookie_id, "")

    async def find(self, bookie_id: str) -> str | None:
        """As `address`; if it is not in memory, read from the list of all bookies that ever
        registered."""
        if bookie_id not in self._last_infos:
            recorded = await self._read(f"{paths.BOOKIES_KNOWN}/{bookie_id}", bookie_id)
            if recorded is not None and bookie_id not in self._last_infos:
                self._remember_address(recorded)
        return self.address(bookie_id)

    async def count_ever_registered(self) -> int:
        """How many bookies ever registered, by the store. Raises StoreError."""
        names = await names_in(self._metadata, paths.BOOKIES_KNOWN)
        for name in names:
            await self.find(name)
        return len({**dict.fromkeys(names), **self._last_infos})

    async def read_down(self) -> list[BookieInfo]:
        """Bookies that ever registered and are not registered now, as last registered. First come
        the bookies whose registration this process saw end, the latest first; then the others, by
        id. Raises StoreError."""
        names = await names_in(self._metadata, paths.BOOKIES_KNOWN)
        seen = [name for name in reversed(self._departed_ids) if name in names]
        others = sorted(name for name in names if name not in self._departed_ids)
        gone = [name for name in (*seen, *others) if not self.is_registered(name)]
        for name in gone:
            await self.find(name)
        return [self.info(name) for name in gone]

    def ids_with_address(self, without: Collection[str]) -> list[str]:
        """All bookies with a known address, except those in `without`, by id."""
        return [bookie for bookie in sorted(self._last_infos) if bookie not in without]

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
        """Do not call the listener any more. An unknown listener is no error."""
        if listener in self._listeners:
            self._listeners.remove(listener)

    async def refresh(self) -> None:
        """Read all registrations again. Raises StoreError."""
        await self._look(lambda others, has_new_or_gone: others)

    async def _look(self, choose_rereads: Callable[[list[str], bool], list[str]]) -> None:
        """Read the new registrations of both folders, and again the registrations that
        `choose_rereads(paths, has_new_or_gone)` returns: `paths` are those read before, the longest
        ago first; `has_new_or_gone`: a registration is new or gone. Raises StoreError."""
        async with self._refreshing:
            paths_in = {
                folder: [f"{folder}/{name}" for name in await self._names(folder)]
                for folder in _FOLDERS
            }
            listed = dict.fromkeys(path for folder in _FOLDERS for path in paths_in[folder])
            others = [path for path in self._infos_by_path if path in listed]
            has_new_or_gone = len(others) < max(len(listed), len(self._infos_by_path))
            new_paths = [path for path in listed if path not in self._infos_by_path]
            for path in (*new_paths, *choose_rereads(others, has_new_or_gone)):
                bookie = await self._read(path, path.rpartition("/")[2])
                self._infos_by_path.pop(path, None)
                self._infos_by_path[path] = bookie
            self._infos_by_path = {
                path: info for path, info in self._infos_by_path.items() if path in listed
            }
            before = _without_free_bytes(self._writable, self._readonly)
            ids_before = [*self._writable, *self._readonly]
            self._writable, self._readonly = (
                {info.id: info for path in paths_in[folder] if (info := self._infos_by_path[path])}
                for folder in _FOLDERS
            )
            for bookie in (*self._readonly.values(), *self._writable.values()):
                self._remember_address(bookie)
            self._departed_ids |= dict.fromkeys(ids_before)
            self._departed_ids = {
                id_: None for id_ in self._departed_ids if not self.is_registered(id_)
            }
            for id_ in [*reversed(self._departed_ids)][:REREADS_PER_LOOK]:
                remembered = await self._read(f"{paths.BOOKIES_KNOWN}/{id_}", id_)
                if remembered is not None:
                    self._remember_address(replace(remembered, rack=self.rack(id_)))
            if _without_free_bytes(self._writable, self._readonly) != before:
                self._call_listeners()

    def _remember_address(self, bookie: BookieInfo) -> None:
        self._last_infos[bookie.id] = BookieInfo(bookie.id, bookie.address, bookie.rack)

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
            fired |= await woken(self._has_changed, pause_s)  # after the pause, look in any case
            self._has_changed.clear()
            if self._metadata.session_state is not SessionState.CONNECTED:
                pause_s = min(RETRY_S, self._refresh_s)  # no call waits for this look
                continue
            try:
                if fired:
                    self._watches.clear()
                    await self._look(
                        lambda others, has_new_or_gone: [] if has_new_or_gone else others
                    )
                else:
                    await self._look(lambda others, has_new_or_gone: others[:REREADS_PER_LOOK])
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
        """The watch for the listing that is made now: the last one, unless a watch fired since, so
        that watches which do not fire do not add up. Earlier watches are ignored: this one shows
        what they would report."""

        def fired() -> None:
            if self._watches.get(folder) is fired:
                self._has_changed.set()

        return self._watches.setdefault(folder, fired)

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
        client_address(plain),
        str(plain.get("rack", "")),
        int(plain.get("free_bytes", 0)),
        str(plain.get("reason", "")),
    )


def client_address(record: Mapping[str, Any]) -> str:
    """The address at which clients reach the bookie of a registration: `frames`. A record of an
    earlier version may lack `frames`; then it is `address`, which serves gRPC only, and the error
    of the connection names that address."""
    address = record["address"]
    return str(record.get("frames") or address)


def _without_free_bytes(*groups: Registrations) -> list[Registrations]:
    """The registrations without free bytes, which always change."""
    return [{i: replace(info, free_bytes=0) for i, info in group.items()} for group in groups]


DOUBT_S = 10.0
SAME_FAILURE_S = 1.0  # a failure closer than this to the one before counts as the same


@dataclass(slots=True)
class BookieDoubts:
    """The doubts about one bookie. Times are seconds of the loop's clock."""

    doubted_at: float | None = None
    overtaken_at: float | None = None
    troubles: deque[float] = field(default_factory=deque)
    quarantined_until: float = 0.0


class Quarantine:
    """Judges bookies by the outcomes of all calls. `failures` failed or slow calls within
    `window_s` put a bookie in quarantine for `quarantine_s` after the last of them (0: never).
    """

    def __init__(
        self, failures: int, window_s: float, quarantine_s: float, clock: Callable[[], float]
    ) -> None:
        self._failures = failures
        self._window_s = window_s
        self._quarantine_s = quarantine_s
        self._clock = clock
        self._doubts: dict[str, BookieDoubts] = {}

    # -- what happened ------------------------------------------------------------------------

    def note_failure(self, bookie_id: str) -> None:
        """A call got no response."""
        doubts = self._note_trouble(bookie_id)
        doubts.doubted_at = self._clock()

    def note_slow(self, bookie_id: str) -> None:
        """A response came, but took too long."""
        doubts = self._note_trouble(bookie_id)
        doubts.doubted_at = doubts.overtaken_at = None

    def note_overtaken(self, bookie_id: str) -> None:
        """A read was given up, because another bookie, asked later, delivered it sooner. The bookie
        is not in doubt, only chosen last: perhaps it just had more to do."""
        self._doubts.setdefault(bookie_id, BookieDoubts()).overtaken_at = self._clock()

    def note_response(self, bookie_id: str) -> None:
        """A response came in good time, whatever its status."""
        doubts = self._doubts.get(bookie_id)
        if doubts is not None:
            doubts.doubted_at = doubts.overtaken_at = None

    # -- the bookies that are chosen last -----------------------------------------------------

    def suspects(self) -> list[str]:
        """Bookies in doubt, overtaken or in quarantine now, by id."""
        return [bookie for bookie in sorted(self._doubts) if self.reason_for(bookie)]

    def ids_in_doubt(self) -> list[str]:
        """Bookies that lately gave no response and have given none since, by id."""
        return [bookie for bookie in sorted(self._doubts) if self._is_in_doubt(bookie)]

    def reason_for(self, bookie_id: str) -> str:
        """For an error text: why the bookie is chosen last; "" if it is not."""
        doubts = self._doubts.get(bookie_id)
        if doubts is None:
            return ""
        left_s = doubts.quarantined_until - self._clock()
        if left_s > 0:
            return f"in quarantine for another {left_s:.0f} s: it failed or was slow"
        if self._is_in_doubt(bookie_id):
            return "gave no answer lately"
        return "another responded sooner" if self._was_lately(doubts.overtaken_at) else ""

    def _is_in_doubt(self, bookie_id: str) -> bool:
        return self._was_lately(self._doubts[bookie_id].doubted_at)

    def _was_lately(self, at: float | None) -> bool:
        return at is not None and self._clock() - at < DOUBT_S

    def _note_trouble(self, bookie_id: str) -> BookieDoubts:
        doubts = self._doubts.setdefault(bookie_id, BookieDoubts())
        now, troubles = self._clock(), doubts.troubles
        if troubles and now - troubles[-1] < SAME_FAILURE_S:
            return doubts
        troubles.append(now)
        while len(troubles) > self._failures or now - troubles[0] > self._window_s:
            troubles.popleft()
        if len(troubles) == self._failures and self._quarantine_s > 0:
            doubts.quarantined_until = now + self._quarantine_s
        return doubts


DOWN, READ_ONLY, WRITABLE = "down", "read-only", "writable"
_BY_STATE = {
    DOWN: paths.BOOKIES_KNOWN,
    READ_ONLY: paths.BOOKIES_READONLY,
    WRITABLE: paths.BOOKIES_AVAILABLE,
}


async def registered(store: MetadataStore) -> list[dict[str, Any]]:
    """Every bookie that ever registered, by id: its registration, a `state` (WRITABLE, READ_ONLY or
    DOWN), how many ledgers it lists as in limbo, and, while the store is held and so no bookie
    registers, the reason (`held`). Read after a sync. Raises StoreUnavailable."""
    await store.sync()
    held = await hold_reason(store)
    bookies: dict[str, dict[str, Any]] = {}
    for state, folder in _BY_STATE.items():
        for bookie_id, record in (await _read_folder(store, folder)).items():
            bookies[bookie_id] = {"id": bookie_id, "state": state, **record}
    for bookie_id, record in bookies.items():
        record["limbo_ledgers"] = len(await names_in(store, paths.limbo(bookie_id)))
        start = await read(store, paths.bookie_start(bookie_id))
        record["twin"] = start is not None and bool(_decode_or_malformed(start.value).get("twin"))
        if held:
            record["held"] = held
    return [bookies[bookie_id] for bookie_id in sorted(bookies)]


def listed_status(bookie: dict[str, Any]) -> dict[str, Any]:
    """A bookie of `registered` as listings show it; of a bookie that is down, free bytes are
    unknown."""
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


async def _read_folder(store: MetadataStore, folder: str) -> dict[str, dict[str, Any]]:
    names = await names_in(store, folder)
    nodes = await store.get_many([f"{folder}/{name}" for name in names])
    pairs = zip(names, nodes, strict=True)  # a bookie without a node just left
    return {name: _decode_or_malformed(node.value) for name, node in pairs if node is not None}


def _decode_or_malformed(value: bytes) -> dict[str, Any]:
    """A bookie's registration; if the node cannot be decoded: `malformed`, and the reason."""
    try:
        plain = json.loads(value)
    except errors.MALFORMED:
        plain = None
    if isinstance(plain, dict):
        return plain
    return {"malformed": True, "reason": f"its node is malformed: {value[:50]!r}"}
