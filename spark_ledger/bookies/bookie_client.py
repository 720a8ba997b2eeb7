"""Requests to bookies; each outcome is a value.

Always true: whatever goes wrong on the way (no address, no response, bytes that are no response)
comes back as a status of class *unknown* with its reason, never as a negative and never as an
exception; only a request to a client that was closed, before it or meanwhile, raises ClientClosed.
"Busy" is asked again, of the same bookie, until the request's time is over. Every outcome is told
to `quarantine`, which says what to choose last; "busy" is a response.
"""

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TypeVar, cast

from bookie_server.api import codec
from bookie_server.api.entry import Buffer
from bookie_server.api.entry_ids import EntryIds, Span
from bookie_server.api.messages import (
    Add,
    AddResponse,
    AddResult,
    ClearLimboRequest,
    ClearLimboResponse,
    PackedAddRequest,
    ReadLacRequest,
    ReadLacResponse,
    ReadRequest,
    ReadResponse,
    Request,
    Response,
    StoredRequest,
    StoredResponse,
    WriteLacRequest,
    WriteLacResponse,
)
from bookie_server.api.status import Status
from spark_ledger.bookies.add_lane import AddLane, Unreachable
from spark_ledger.bookies.directory import BookieDirectory
from spark_ledger.bookies.local_files import HostFiles
from spark_ledger.bookies.local_reads import LocalReads, Locations
from spark_ledger.bookies.network import CallFailed, Network
from spark_ledger.bookies.quarantine import Quarantine
from spark_ledger.bookies.read_stream import ReadStream
from spark_ledger.config import ClientConfig
from spark_ledger.errors import ClientClosed
from spark_ledger.metadata.store import StoreError

RETRY_AFTER_MS = 50

AnyResponse = TypeVar(
    "AnyResponse",
    ReadResponse,
    ReadLacResponse,
    WriteLacResponse,
    ClearLimboResponse,
    StoredResponse,
)


@dataclass(slots=True)
class _OneAdd:
    """An add that is no writer's; see add_lane.Packed."""

    packed: Sequence[Buffer]
    size: int


class BookieClient:
    """Speaks to all bookies of a cluster over one Network, and reads `files` of those that are on
    this host."""

    def __init__(
        self,
        network: Network,
        directory: BookieDirectory,
        config: ClientConfig,
        files: HostFiles | None = None,
    ) -> None:
        self._network = network
        self._directory = directory
        self._config = config
        self._lanes: dict[tuple[str, bool], AddLane] = {}
        self._closed = False
        self._files = files or HostFiles()
        self._local_reads = LocalReads(lambda: asyncio.get_running_loop().time(), self._files)
        self.quarantine = Quarantine(
            config.quarantine_failures,
            config.quarantine_window_s,
            config.quarantine_s,
            lambda: asyncio.get_running_loop().time(),
        )

    # -- adds ---------------------------------------------------------------------------------

    def lane(self, bookie_id: str, *, recovery: bool = False) -> AddLane:
        """The lane of adds to the bookie, which the adds of all ledgers share; recovery's go in
        one of their own, and so wait behind no others and share no frame with them."""
        lane = self._lanes.get((bookie_id, recovery))
        if lane is None:
            lane = self._lanes[bookie_id, recovery] = self._new_lane(bookie_id)
        return lane

    async def add(self, bookie_id: str, add: Add) -> AddResult:
        """Send one add and wait for its response. BUSY is returned, not retried."""
        response: asyncio.Future[AddResult] = asyncio.get_running_loop().create_future()

        def responded(_: Sequence[_OneAdd], results: Sequence[AddResult]) -> None:
            if not response.done():
                response.set_result(results[0])

        one = _OneAdd(codec.encode_add(add), sum(map(len, add.entry)))
        self.lane(bookie_id, recovery=add.recovery).submit(one, responded)
        return await response

    def _new_lane(self, bookie_id: str) -> AddLane:
        async def send(adds: list[Sequence[Buffer]]) -> Sequence[AddResult]:
            request = PackedAddRequest(bookie_id, adds)
            response = await self._call(bookie_id, "Add", request, self._config.replica_timeout_s)
            results = cast(AddResponse, response).results
            if len(results) != len(adds):
                raise Unreachable(f"{len(results)} answers to {len(adds)} adds")
            return results

        return AddLane(send, self._config.frame_bytes_max, self._config.frames_in_flight)

    # -- requests ----------------------------------------------------------------------------

    async def read(
        self,
        bookie_id: str,
        ledger_id: int,
        first_entry: int,
        last_entry: int,
        *,
        max_bytes: int,
        fence: bool = False,
        token: bytes = b"",
        further: Sequence[Span] = (),
        locations: Locations | None = None,
        ahead: EntryIds = (),
    ) -> ReadResponse:
        """Entries first..last, both included, and those of `further` spans, which rise, as far as
        `max_bytes` reach. With `locations`, a map that the caller keeps from read to read, those
        that are in files of this host are read there (LocalReads.read); `ahead` are entries after
        all these that the caller will read later."""
        request = ReadRequest(
            bookie_id, ledger_id, first_entry, last_entry, max_bytes, fence, token, further
        )

        async def ask(request: ReadRequest) -> ReadResponse:
            return await self._ask(bookie_id, "Read", request, ReadResponse)

        if locations is None or fence or not self.reads_files_of(bookie_id):
            return await ask(request)
        return await self._local_reads.read(request, locations, ahead, ask)

    def reads_files_of(self, bookie_id: str) -> bool:
        """Whether the bookie is on this host and its files may be readable, as far as is known."""
        address = self._directory.address(bookie_id)
        here = address is not None and self._network.is_here(address)
        return here and self._local_reads.may_read(bookie_id)

    async def read_stream(
        self,
        bookie_id: str,
        ledger_id: int,
        first_entry: int,
        last_entry: int,
        *,
        max_bytes: int,
        credit_bytes: int,
        token: bytes = b"",
    ) -> ReadStream:
        """Begin a stream of the entries; each response has `max_bytes` at most, all that come
        before more credit is granted `credit_bytes`. Raises Unreachable when it cannot begin."""
        address = await self._address(bookie_id)
        request = ReadRequest(bookie_id, ledger_id, first_entry, last_entry, max_bytes, token=token)
        try:
            stream = ReadStream(
                self._network.stream(address, "ReadStream"), partial(self._told, bookie_id)
            )
            await stream.begin(request, credit_bytes)
        except CallFailed as failure:
            self.quarantine.failed(bookie_id)
            raise Unreachable(f"no answer from {address}: {failure}") from failure
        return stream

    def _told(self, bookie_id: str, responded: bool) -> None:
        if responded:
            self.quarantine.responded(bookie_id)
        elif not self._closed:
            self.quarantine.failed(bookie_id)

    async def read_lac(
        self,
        bookie_id: str,
        ledger_id: int,
        *,
        fence: bool = False,
        token: bytes = b"",
        previous_lac: int = -1,
        wait_ms: int = 0,
    ) -> ReadLacResponse:
        """The last add confirmed the bookie has heard of; with `wait_ms` a long poll."""
        request = ReadLacRequest(bookie_id, ledger_id, fence, token, previous_lac, wait_ms)
        return await self._ask(bookie_id, "ReadLac", request, ReadLacResponse, wait_ms / 1000)

    async def write_lac(
        self, bookie_id: str, ledger_id: int, last_add_confirmed: int, *, token: bytes = b""
    ) -> WriteLacResponse:
        """Tell the bookie the last add confirmed, so that readers hear of it."""
        request = WriteLacRequest(bookie_id, ledger_id, last_add_confirmed, token)
        return await self._ask(bookie_id, "WriteLac", request, WriteLacResponse)

    async def clear_limbo(
        self, bookie_id: str, ledger_id: int, revision: int | None = None, *, token: bytes = b""
    ) -> ClearLimboResponse:
        """Tell the bookie that the ledger was compared with its peers since it told `revision`;
        without one, ask how the ledger stands there and of which revision that is."""
        clear = revision is not None
        request = ClearLimboRequest(bookie_id, ledger_id, token, clear, revision or 0)
        return await self._ask(bookie_id, "ClearLimbo", request, ClearLimboResponse)

    async def stored(
        self, bookie_id: str, ledger_id: int, first: int, last: int, *, token: bytes = b""
    ) -> StoredResponse:
        """Which of the entries first..last the bookie has in its index, as far as `through`."""
        request = StoredRequest(bookie_id, ledger_id, first, last, token)
        return await self._ask(bookie_id, "Stored", request, StoredResponse)

    # -- the way there ------------------------------------------------------------------------

    async def close(self) -> None:
        """Give up all that is under way and the connections."""
        self._closed = True
        for lane in self._lanes.values():
            lane.close()
        self._files.close()
        await self._network.close()

    async def _ask(
        self,
        bookie_id: str,
        method: str,
        request: Request,
        kind: Callable[..., AnyResponse],
        extra_s: float = 0.0,
    ) -> AnyResponse:
        loop = asyncio.get_running_loop()
        deadline = loop.time() + self._config.read_timeout_s + extra_s
        while True:
            try:
                left_s = deadline - loop.time()
                response = cast(AnyResponse, await self._call(bookie_id, method, request, left_s))
            except Unreachable as failure:
                if self._closed:
                    raise ClientClosed from failure
                return kind(status=Status.IO_ERROR, reason=str(failure))
            pause_s = (response.retry_after_ms or RETRY_AFTER_MS) / 1000
            if response.status is not Status.BUSY or loop.time() + pause_s >= deadline:
                return response
            await asyncio.sleep(pause_s)

    async def _address(self, bookie_id: str) -> str:
        """Raises Unreachable."""
        try:
            address = self._directory.address(bookie_id) or await self._directory.find(bookie_id)
        except StoreError as failure:
            raise Unreachable(f"its address cannot be looked up: {failure!r}") from failure
        if address is None:
            raise Unreachable("it never registered an address")
        return address

    async def _call(
        self, bookie_id: str, method: str, request: Request | PackedAddRequest, timeout_s: float
    ) -> Response:
        """One call. Raises Unreachable."""
        address = await self._address(bookie_id)
        loop = asyncio.get_running_loop()
        began = loop.time()
        try:
            buffers = codec.encode_buffers(request)
            body = await self._network.call(address, method, buffers, timeout_s)
            response = codec.decode_response(method, body)
        except (CallFailed, codec.BadMessage) as failure:
            self.quarantine.failed(bookie_id)
            raise Unreachable(f"no answer from {address}: {failure}") from failure
        if method == "Add" and loop.time() - began > self._config.slow_add_s:
            self.quarantine.slow(bookie_id)
        else:
            self.quarantine.responded(bookie_id)
        return response
