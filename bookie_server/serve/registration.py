"""How clients find a bookie: its node in the metadata store, kept true while it serves
(`Registration`); and whether another process serves as this bookie already (`refuse_beside_twin`):
on a copy of its directories, as this process holds the lock on the directories themselves.

Always true of the node: at most one of /bookies/available/<id> and /bookies/readonly/<id> stays,
our session owns it, and the new node is there before the old one goes; changes are published at
once, free space every `refresh_s`; a node that an earlier session of this bookie left is replaced,
after the process behind it was asked for its id; a node that names another address once we are
registered is logged as an error: another process serves from a copy of our directories; after a
lost session the bookie registers as soon as a new session is there. It does not register while
`may_register` is False, as in a metadata store that went back in time (ledgers/lineage.py), and
tries again every RETRY_S. /bookies/known/<id> is written once and never deleted here.

Always true of a twin: before a start is refused, the process that is registered under our id is
asked for its id, by frames. A process that does not respond, or responds with another id, is a dead
predecessor. A process that registered no frames, as an earlier version could, cannot be asked: it
counts as running until its registration goes.
"""

import asyncio
import contextlib
import json
import logging
from collections.abc import Awaitable, Callable
from dataclasses import dataclass

from bookie_server import __version__
from bookie_server.api import codec
from bookie_server.api.frames import (
    HEAD_BYTES,
    METHOD_NUMBERS,
    BadFrame,
    FrameHead,
    FrameKind,
    pack_head,
    unpack_head,
)
from bookie_server.api.messages import (
    InfoRequest,
    InfoResponse,
    Response,
    StoredRequest,
    StoredResponse,
)
from bookie_server.disk.identity import WrongDisks
from bookie_server.disk.interface import DiskFailed
from spark_ledger import net
from spark_ledger.async_tasks import woken
from spark_ledger.metadata import paths
from spark_ledger.metadata.store import MetadataStore, NodeExists, NoNode, SessionState, StoreError
from spark_ledger.metadata.store_calls import read

VERSION = 1
RETRY_S = 1.0
DEREGISTER_TIMEOUT_S = 1.0
"""The stop does not wait for a store that hangs: the end of the session deregisters the node."""
log = logging.getLogger(__name__)


async def always() -> bool:
    return True


@dataclass(frozen=True, slots=True)
class Standing:
    """The parts of a registration that change while a bookie runs. Space is that of the living
    ledger directories; `readonly_reason` is empty while the bookie is writable, `degraded` names
    the directories that it lost."""

    free_bytes: int
    total_bytes: int
    readonly_reason: str = ""
    degraded: str = ""


class Registration:
    """The registration of one bookie. It serves gRPC at `address` and frames, by which our own
    clients reach it, at `frames`."""

    def __init__(
        self,
        store: MetadataStore,
        bookie_id: str,
        address: str,
        frames: str,
        rack: str,
        standing: Callable[[], Awaitable[Standing]],
        refresh_s: float,
        may_register: Callable[[], Awaitable[bool]] = always,
    ) -> None:
        self._store = store
        self._id = bookie_id
        self.address = address
        self.frames = frames
        self._rack = rack
        self._standing = standing
        self._refresh_s = refresh_s
        self._may_register = may_register
        self.registered = False
        """As of the last publication."""
        self._changed = asyncio.Event()
        self._keeper: asyncio.Task[None] | None = None

    async def start(self, first_seen_ms: int) -> None:
        """Register, unless `may_register` is False, and keep the bookie registered until `stop`.
        Raises StoreError."""
        await self._remember(first_seen_ms)
        self._store.add_session_listener(self._heard_of_session)
        await self._publish()
        self._keeper = asyncio.create_task(self._keep(), name="registration")

    def publish_soon(self) -> None:
        """`standing` has changed: do not wait for the next refresh."""
        self._changed.set()

    async def stop(self) -> None:
        """Deregister; gives up after DEREGISTER_TIMEOUT_S."""
        if self._keeper is None:
            return
        self._keeper.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await self._keeper
        if self._store.session_state is not SessionState.CONNECTED:
            return  # the session's end will do it
        try:
            async with asyncio.timeout(DEREGISTER_TIMEOUT_S):
                for folder in (paths.BOOKIES_AVAILABLE, paths.BOOKIES_READONLY):
                    await self._remove(folder)
        except (TimeoutError, StoreError) as error:
            log.warning("could not deregister; the session's end will do it: %r", error)

    def _heard_of_session(self, state: SessionState) -> None:
        if state is SessionState.CONNECTED:
            self.publish_soon()

    async def _keep(self) -> None:
        pause_s = self._pause_s()
        while True:
            await woken(self._changed, pause_s)
            self._changed.clear()
            try:
                await self._publish()
                pause_s = self._pause_s()
            except (StoreError, DiskFailed) as error:
                log.warning("could not register, trying again: %r", error)
                pause_s = min(RETRY_S, self._refresh_s)
            except Exception:
                log.exception("could not register, trying again: a defect")
                pause_s = min(RETRY_S, self._refresh_s)

    def _pause_s(self) -> float:
        return self._refresh_s if self.registered else min(RETRY_S, self._refresh_s)

    async def _publish(self) -> None:
        """Make our node in the store true: first write it in its folder, then remove the other."""
        standing = await self._standing()
        here, there = paths.BOOKIES_AVAILABLE, paths.BOOKIES_READONLY
        if standing.readonly_reason:
            here, there = there, here
        self.registered = await self._is_registered() or await self._may_register()
        if self.registered:
            await self._put(f"{here}/{self._id}", self._record(standing))
            await self._remove(there)

    async def _is_registered(self) -> bool:
        """Whether this session registered the bookie."""
        for folder in (paths.BOOKIES_AVAILABLE, paths.BOOKIES_READONLY):
            node = await read(self._store, f"{folder}/{self._id}")
            if node is not None and node.owner == self._store.session_id:
                return True
        return False

    def _record(self, standing: Standing) -> bytes:
        record = {
            "address": self.address,
            "frames": self.frames,
            "rack": self._rack,
            "free_bytes": standing.free_bytes,
            "total_bytes": standing.total_bytes,
            "version": VERSION,
            "server_version": __version__,
        }
        if standing.readonly_reason:
            record["reason"] = standing.readonly_reason
        if standing.degraded:
            record["degraded"] = standing.degraded
        return _json(record)

    async def _put(self, path: str, value: bytes) -> None:
        node = await read(self._store, path)
        if node is None:
            await self._store.create(path, value, ephemeral=True, parents=True)
        elif node.owner != self._store.session_id:
            address = registered(node.value)[0]
            if self._keeper is not None and address not in ("", self.address):
                log.error(
                    "another process registered as this bookie %s, at %s: it serves from a copy of"
                    " our directories; stop one of the two now: readers may get entries as absent"
                    " that the other acknowledged",
                    self._id,
                    address,
                )
            await self._store.delete(path, node.version)
            await self._store.create(path, value, ephemeral=True)
        elif node.value != value:
            await self._store.set(path, value, node.version)

    async def _remove(self, folder: str) -> None:
        with contextlib.suppress(NoNode):
            await self._store.delete(f"{folder}/{self._id}")

    async def _remember(self, first_seen_ms: int) -> None:
        path = f"{paths.BOOKIES_KNOWN}/{self._id}"
        record = {
            "address": self.address,
            "frames": self.frames,
            "first_seen_ms": first_seen_ms,
        }
        try:
            await self._store.create(path, _json(record), parents=True)
        except NodeExists:
            node = await self._store.get(path)
            with contextlib.suppress(ValueError, KeyError, TypeError):  # else it is seen anew
                record["first_seen_ms"] = int(json.loads(node.value)["first_seen_ms"])
            if _json(record) != node.value:
                await self._store.set(path, _json(record), node.version)


def _json(record: dict[str, object]) -> bytes:
    return json.dumps(record, sort_keys=True, separators=(",", ":")).encode()


RESPONSE_S = 3.0
_INFO_BYTES_MAX = 1 << 20

WhoIs = Callable[[str], Awaitable[str]]
"""The id of the bookie that speaks frames at an address; empty: no bookie does."""


async def refuse_beside_twin(
    store: MetadataStore, bookie_id: str, address: str, who_is: WhoIs
) -> None:
    """Raises WrongDisks when a bookie at another address than ours has our id; StoreError."""
    for folder in (paths.BOOKIES_AVAILABLE, paths.BOOKIES_READONLY):
        node = await read(store, f"{folder}/{bookie_id}")
        if node is None:
            continue
        there, frames = registered(node.value)
        if node.owner == store.session_id or there in ("", address):
            continue
        if not frames or await who_is(frames) == bookie_id:
            raise WrongDisks(
                f"bookie {bookie_id} is running already, at {there}: these directories are a copy"
                " of its own. Give this bookie empty directories, or stop the other one for good"
            )


def registered(record: bytes) -> tuple[str, str]:
    """The addresses of gRPC and of frames in the record; empty if it has none."""
    try:
        fields = json.loads(record)
    except ValueError:
        fields = None
    if not isinstance(fields, dict):
        return "", ""
    return str(fields.get("address", "")), str(fields.get("frames", ""))


async def who_is(frames: str) -> str:
    """See WhoIs: one Info call on a connection of its own; RESPONSE_S at most."""
    response = await _responded(frames, "Info", InfoRequest())
    return response.bookie_id if isinstance(response, InfoResponse) else ""


async def stored_at(store: MetadataStore, request: StoredRequest) -> StoredResponse | None:
    """The response of the bookie that the request names; None: it is not registered, or gives no
    response. Raises StoreError."""
    for folder in (paths.BOOKIES_AVAILABLE, paths.BOOKIES_READONLY):
        node = await read(store, f"{folder}/{request.bookie_id}")
        frames = "" if node is None else registered(node.value)[1]
        if frames:
            response = await _responded(frames, "Stored", request)
            return response if isinstance(response, StoredResponse) else None
    return None


async def _responded(
    frames: str, method: str, request: InfoRequest | StoredRequest
) -> Response | None:
    """The response at the address; None: nothing there responds as a bookie does."""
    try:
        async with asyncio.timeout(RESPONSE_S):
            return await _call(frames, method, request)
    except (OSError, EOFError, BadFrame, codec.BadMessage, ValueError):
        return None


async def _call(frames: str, method: str, request: InfoRequest | StoredRequest) -> Response:
    body = codec.encode(request)
    reader, writer = await net.dial_streams(frames)
    try:
        await _head(reader, FrameKind.HELLO)
        number = METHOD_NUMBERS[method]
        writer.write(pack_head(FrameKind.CALL, call=1, length=len(body), method=number) + body)
        answer = await reader.readexactly((await _head(reader, FrameKind.ANSWER)).length)
    finally:
        writer.close()
    return codec.decode_response(method, answer)


async def _head(reader: asyncio.StreamReader, kind: FrameKind) -> FrameHead:
    """Raises BadFrame for any other kind, EOFError."""
    head = unpack_head(await reader.readexactly(HEAD_BYTES), 0, _INFO_BYTES_MAX)
    if head.kind is not kind:
        raise BadFrame(f"a {head.kind.name} where a {kind.name} was expected")
    return head
