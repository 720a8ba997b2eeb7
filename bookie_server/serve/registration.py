"""How clients find a bookie: `Registration` keeps the bookie's node in the metadata store up to
date. `refuse_beside_twin` checks at the start whether another process serves as this bookie
already, from a copy of its directories (the directories themselves are locked).

Always true of the node: it is /bookies/available/<id> or /bookies/readonly/<id>, our session owns
it, and when the bookie moves between the two folders, the new node is written before the old node
is deleted; changes are published at once, free space every `refresh_s`. A node of an earlier
session of this bookie is replaced. If a node names another address while we are registered, another
process serves from a copy of our directories: an error is logged. After a lost session the bookie
registers as soon as it has a new session. While `may_register` is False (for example, the metadata
store went back in time, ledgers/lineage.py) the bookie does not register, and tries again every
RETRY_S. /bookies/known/<id> is written once and never deleted here.

Always true of a twin: before a start is refused, the process that is registered under our id gets a
request for its id, by frames. If it does not respond, or responds with another id, it is a dead
predecessor. If its registration has no address of frames, as in an earlier version, it cannot be
asked: the process counts as running until its registration ends.
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
"""A stop does not wait longer for a store that hangs: the end of the session deletes the node."""
log = logging.getLogger(__name__)


async def always() -> bool:
    return True


@dataclass(frozen=True, slots=True)
class RegistrationState:
    """The parts of a registration that change while a bookie runs. The bytes are the sums over the
    living ledger directories; `readonly_reason` is empty while the bookie is writable; `degraded`
    names the directories that failed or are missing."""

    free_bytes: int
    total_bytes: int
    readonly_reason: str = ""
    degraded: str = ""


class Registration:
    """The registration of one bookie, which serves gRPC at `address`, and frames, which our own
    clients use, at `frames`."""

    def __init__(
        self,
        store: MetadataStore,
        bookie_id: str,
        address: str,
        frames: str,
        rack: str,
        read_state: Callable[[], Awaitable[RegistrationState]],
        refresh_s: float,
        may_register: Callable[[], Awaitable[bool]] = always,
    ) -> None:
        self._store = store
        self._id = bookie_id
        self.address = address
        self.frames = frames
        self._rack = rack
        self._read_state = read_state
        self._refresh_s = refresh_s
        self._may_register = may_register
        self.is_registered = False
        """As of the last publication."""
        self._changed = asyncio.Event()
        self._keep_task: asyncio.Task[None] | None = None

    async def start(self, first_seen_ms: int) -> None:
        """Register, unless `may_register` is False, and keep the bookie registered until `stop`.
        Raises StoreError."""
        await self._write_known(first_seen_ms)
        self._store.add_session_listener(self._session_changed)
        await self._publish()
        self._keep_task = asyncio.create_task(self._keep(), name="registration")

    def publish_soon(self) -> None:
        """Publish at once, not at the next refresh: the registration's state has changed."""
        self._changed.set()

    async def stop(self) -> None:
        """Deregister; gives up after DEREGISTER_TIMEOUT_S."""
        if self._keep_task is None:
            return
        self._keep_task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await self._keep_task
        if self._store.session_state is not SessionState.CONNECTED:
            return  # the session's end deletes the node
        try:
            async with asyncio.timeout(DEREGISTER_TIMEOUT_S):
                for folder in (paths.BOOKIES_AVAILABLE, paths.BOOKIES_READONLY):
                    await self._remove(folder)
        except (TimeoutError, StoreError) as error:
            log.warning("could not deregister; the session's end will do it: %r", error)

    def _session_changed(self, state: SessionState) -> None:
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
        return self._refresh_s if self.is_registered else min(RETRY_S, self._refresh_s)

    async def _publish(self) -> None:
        """Write our node in its folder, then remove it from the other folder."""
        state = await self._read_state()
        folder, other_folder = paths.BOOKIES_AVAILABLE, paths.BOOKIES_READONLY
        if state.readonly_reason:
            folder, other_folder = other_folder, folder
        self.is_registered = await self._is_registered() or await self._may_register()
        if self.is_registered:
            await self._put(f"{folder}/{self._id}", self._record(state))
            await self._remove(other_folder)

    async def _is_registered(self) -> bool:
        """Whether this session owns a node of this bookie."""
        for folder in (paths.BOOKIES_AVAILABLE, paths.BOOKIES_READONLY):
            node = await read(self._store, f"{folder}/{self._id}")
            if node is not None and node.owner == self._store.session_id:
                return True
        return False

    def _record(self, state: RegistrationState) -> bytes:
        record = {
            "address": self.address,
            "frames": self.frames,
            "rack": self._rack,
            "free_bytes": state.free_bytes,
            "total_bytes": state.total_bytes,
            "version": VERSION,
            "server_version": __version__,
        }
        if state.readonly_reason:
            record["reason"] = state.readonly_reason
        if state.degraded:
            record["degraded"] = state.degraded
        return _json(record)

    async def _put(self, path: str, value: bytes) -> None:
        node = await read(self._store, path)
        if node is None:
            await self._store.create(path, value, ephemeral=True, parents=True)
        elif node.owner != self._store.session_id:
            address = addresses_of(node.value)[0]
            if self._keep_task is not None and address not in ("", self.address):
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

    async def _write_known(self, first_seen_ms: int) -> None:
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
            with contextlib.suppress(ValueError, KeyError, TypeError):  # malformed: a new time
                record["first_seen_ms"] = int(json.loads(node.value)["first_seen_ms"])
            if _json(record) != node.value:
                await self._store.set(path, _json(record), node.version)


def _json(record: dict[str, object]) -> bytes:
    return json.dumps(record, sort_keys=True, separators=(",", ":")).encode()


RESPONSE_S = 3.0
_INFO_BYTES_MAX = 1 << 20

WhoIs = Callable[[str], Awaitable[str]]
"""The id of the bookie that speaks frames at an address; empty: no bookie responds there."""


async def refuse_beside_twin(
    store: MetadataStore, bookie_id: str, address: str, who_is: WhoIs
) -> None:
    """Raises WrongDisks when a process at another address than ours serves as this bookie; raises
    StoreError."""
    for folder in (paths.BOOKIES_AVAILABLE, paths.BOOKIES_READONLY):
        node = await read(store, f"{folder}/{bookie_id}")
        if node is None:
            continue
        other_address, frames = addresses_of(node.value)
        if node.owner == store.session_id or other_address in ("", address):
            continue
        if not frames or await who_is(frames) == bookie_id:
            raise WrongDisks(
                f"bookie {bookie_id} is running already, at {other_address}: these directories are"
                " a copy of its own. Give this bookie empty directories, or stop the other bookie"
                " for good"
            )


def addresses_of(record: bytes) -> tuple[str, str]:
    """The addresses of gRPC and of frames in a registration; empty where it lacks one."""
    try:
        fields = json.loads(record)
    except ValueError:
        fields = None
    if not isinstance(fields, dict):
        return "", ""
    return str(fields.get("address", "")), str(fields.get("frames", ""))


async def who_is(frames: str) -> str:
    """As WhoIs, by a call of Info on a new connection; in RESPONSE_S at most."""
    response = await _response_or_none(frames, "Info", InfoRequest())
    return response.bookie_id if isinstance(response, InfoResponse) else ""


async def stored_at(store: MetadataStore, request: StoredRequest) -> StoredResponse | None:
    """The response of the bookie that the request names; None if it is not registered, or does not
    respond. Raises StoreError."""
    for folder in (paths.BOOKIES_AVAILABLE, paths.BOOKIES_READONLY):
        node = await read(store, f"{folder}/{request.bookie_id}")
        frames = "" if node is None else addresses_of(node.value)[1]
        if frames:
            response = await _response_or_none(frames, "Stored", request)
            return response if isinstance(response, StoredResponse) else None
    return None


async def _response_or_none(
    frames: str, method: str, request: InfoRequest | StoredRequest
) -> Response | None:
    """The response of the bookie at the address; None if no bookie responds there."""
    try:
        async with asyncio.timeout(RESPONSE_S):
            return await _call(frames, method, request)
    except (OSError, EOFError, BadFrame, codec.BadMessage, ValueError):
        return None


async def _call(frames: str, method: str, request: InfoRequest | StoredRequest) -> Response:
    body = codec.encode(request)
    reader, writer = await net.dial_streams(frames)
    try:
        await _read_head(reader, FrameKind.HELLO)
        number = METHOD_NUMBERS[method]
        writer.write(pack_head(FrameKind.CALL, call=1, length=len(body), method=number) + body)
        answer = await reader.readexactly((await _read_head(reader, FrameKind.ANSWER)).length)
    finally:
        writer.close()
    return codec.decode_response(method, answer)


async def _read_head(reader: asyncio.StreamReader, kind: FrameKind) -> FrameHead:
    """The next frame's head. Raises BadFrame if the frame is of another kind; EOFError."""
    head = unpack_head(await reader.readexactly(HEAD_BYTES), 0, _INFO_BYTES_MAX)
    if head.kind is not kind:
        raise BadFrame(f"a {head.kind.name} where a {kind.name} was expected")
    return head
