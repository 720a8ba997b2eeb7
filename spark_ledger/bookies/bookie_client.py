"""Requests to bookies, over a `Network` (frame_network.py; tests have others).

Always true:
- every failure on the way (no address, no response, a malformed response) is returned as a status
  of class *unknown* with its reason, never as a negative and never as an exception; only a request
  of a closed client raises ClientClosed. After a failure, the bookie may have carried the request
  out or not;
- after the status BUSY the client repeats the request to the same bookie, until the request's time
  is over;
- every outcome goes to `quarantine`, which decides which bookies to choose last; BUSY counts as a
  response;
- messages of a stream arrive in the order they were sent; if one is lost, so are all after it.
"""

import asyncio
from collections import deque
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple, Protocol, TypeVar, cast

from bookie_server.api import codec
from bookie_server.api.entry import Buffer
from bookie_server.api.messages import (
    Add,
    AddResponse,
    AddResult,
    ClearLimboRequest,
    ClearLimboResponse,
    EntryIds,
    InfoRequest,
    InfoResponse,
    PackedAddRequest,
    ReadLacRequest,
    ReadLacResponse,
    ReadRequest,
    ReadResponse,
    ReadStreamRequest,
    Request,
    Response,
    Span,
    StoredRequest,
    StoredResponse,
    WriteLacRequest,
    WriteLacResponse,
)
from bookie_server.api.status import Status
from spark_ledger.async_tasks import BackgroundTasks
from spark_ledger.bookies.directory import BookieDirectory, Quarantine
from spark_ledger.bookies.local_reads import HostFiles, LocalReads, Locations
from spark_ledger.config import ClientConfig
from spark_ledger.errors import ClientClosed
from spark_ledger.metadata.store import StoreError

RETRY_AFTER_MS = 50
WORTH_A_FRAME = 1 / 16  # of `frame_bytes_max`: adds with fewer bytes wait for frames under way
FRAME_ADDS_MAX = 256  # so that the next frame is encoded while bookies work on this one

AnyResponse = TypeVar(
    "AnyResponse",
    ReadResponse,
    ReadLacResponse,
    WriteLacResponse,
    ClearLimboResponse,
    StoredResponse,
)


class CallFailed(Exception):
    """No response came: refused, lost, too late. The bookie may have carried out the request."""


class TooLate(CallFailed):
    """No response came in the time that the caller allowed."""


class Unreachable(Exception):
    """A bookie gave no response, or a malformed one; it may have carried out the request."""


class Stream(Protocol):
    """Messages in both directions, each the bytes of a message of bookie.proto. One task uses it
    at a time."""

    async def send(self, message: bytes) -> None:
        """Raises CallFailed."""

    async def receive(self, timeout_s: float) -> Buffer | None:
        """The next message; None: the bookie has ended the stream. Raises CallFailed (TooLate
        after `timeout_s`); the stream is over then."""

    def give_up(self) -> None:
        """End the stream, also at the bookie. May be called twice, or after the stream's end."""


class Network(Protocol):
    """Calls and streams to the bookie at an address."""

    async def call(
        self, address: str, method: str, request: Sequence[Buffer], timeout_s: float
    ) -> Buffer:
        """Send a request of `method`, the bytes of the buffers one after the other, and return the
        response; both are messages of bookie.proto. `address` is "host:port".

        Raises CallFailed after `timeout_s` at the latest.
        """

    def stream(self, address: str, method: str) -> Stream:
        """A stream of `method`; it begins with the first message that is sent."""

    def is_here(self, address: str) -> bool:
        """Whether the bookie at the address is on this host; False if that is not known yet."""

    async def close(self) -> None:
        """Give connections back; calls under way fail."""


class PackedAdd(Protocol):
    """What a lane needs of an add: the buffers of codec.encode_add, and the size of the entry."""

    packed: Sequence[Buffer]
    size: int


OnResults = Callable[[Sequence[Any], Sequence[AddResult]], object]
SendFrame = Callable[[list[Sequence[Buffer]]], Awaitable[Sequence[AddResult]]]


class _Run(NamedTuple):
    """Adds that follow each other in the lane and whose results `on_results` takes together."""

    on_results: OnResults
    adds: list[PackedAdd]


class AddLane:
    """The queue of the adds of all ledgers to one bookie, which are sent together in frames. `send`
    sends a frame to the bookie and raises Unreachable if the bookie does not respond.

    Always true: adds are sent in the order they came, and no timer delays them. If no frame is
    under way, all adds that wait are sent in one frame, up to `frame_bytes_max`. While frames are
    under way, the next one is sent only if it would have a sixteenth of `frame_bytes_max` (or
    FRAME_ADDS_MAX adds), because each frame has a fixed cost. If a frame gets no response, the adds
    that wait behind it fail with it. Adds that wait are bounded by the in-flight bytes of writers.
    """

    def __init__(self, send: SendFrame, frame_bytes_max: int, frames_in_flight: int) -> None:
        self._send = send
        self._frame_bytes_max = frame_bytes_max
        self._frames_max = frames_in_flight
        self._waiting: deque[_Run] = deque()
        self._waiting_bytes = 0
        self._waiting_adds = 0
        self._frames_under_way = BackgroundTasks(ended=self._pump)  # a task for each
        self._pump_scheduled = False

    def submit(self, add: PackedAdd, on_results: OnResults) -> None:
        """Send `add`. Later, never from inside this call, the lane calls `on_results` with the add
        and its result: the bookie's, or an unknown if the bookie does not respond. One call has all
        adds of a frame that were submitted one after the other with the same `on_results`."""
        waiting = self._waiting
        if waiting and waiting[-1].on_results is on_results:
            waiting[-1].adds.append(add)
        else:
            waiting.append(_Run(on_results, [add]))
        self._waiting_bytes += add.size
        self._waiting_adds += 1
        if not self._pump_scheduled and len(self._frames_under_way) < self._frames_max:
            self._pump_scheduled = True
            asyncio.get_running_loop().call_soon(self._pump)

    def close(self) -> None:
        """Give up all adds, without calling `on_results` for them."""
        self._take_all()
        self._frames_under_way.cancel()

    def _pump(self) -> None:
        self._pump_scheduled = False
        while self._waiting and len(self._frames_under_way) < self._frames_max:
            if self._frames_under_way and not self._worth_a_frame():
                return
            self._frames_under_way.start(self._send_and_report(self._take_frame()))

    def _worth_a_frame(self) -> bool:
        return (
            self._waiting_bytes >= self._frame_bytes_max * WORTH_A_FRAME
            or self._waiting_adds >= FRAME_ADDS_MAX
        )

    def _take_frame(self) -> list[_Run]:
        """The adds of the next frame: at least one, then as many as fit."""
        if self._waiting_bytes <= self._frame_bytes_max and self._waiting_adds <= FRAME_ADDS_MAX:
            return self._take_all()
        frame: list[_Run] = []
        bytes_left, adds_left = self._frame_bytes_max, FRAME_ADDS_MAX
        while self._waiting:
            on_results, adds = self._waiting[0]
            count = 0
            for add in adds[:adds_left]:
                if (count or frame) and add.size > bytes_left:
                    break
                bytes_left -= add.size
                count += 1
            if not count:
                break
            adds_left -= count
            frame.append(_Run(on_results, adds[:count]))
            self._waiting_bytes -= sum([add.size for add in adds[:count]])
            self._waiting_adds -= count
            if count < len(adds):
                self._waiting[0] = _Run(on_results, adds[count:])
                break
            self._waiting.popleft()
        return frame

    def _take_all(self) -> list[_Run]:
        taken = list(self._waiting)
        self._waiting.clear()
        self._waiting_bytes = self._waiting_adds = 0
        return taken

    async def _send_and_report(self, frame: list[_Run]) -> None:
        try:
            results = await self._send([add.packed for run in frame for add in run.adds])
        except Unreachable as failure:
            frame += self._take_all()
            unknown = AddResult(Status.IO_ERROR, 0, str(failure))
            results = [unknown] * sum([len(run.adds) for run in frame])
        first = 0
        for on_results, adds in frame:
            on_results(adds, results[first : first + len(adds)])
            first += len(adds)


class Silent(Unreachable):
    """No response came in the time allowed. It does not count as a failure of the bookie."""


class ReadStream:
    """A long read from one bookie, response after response, as far as the reader grants credit
    (bytes). Made by BookieClient.read_stream. One task uses it, and always calls `give_up` after.

    Always true: a missing, late or malformed response raises, and then the stream is over; it never
    counts as a negative.
    """

    def __init__(self, stream: Stream, report: Callable[[bool], None]) -> None:
        """Calls `report` with True for each response of the bookie, with False for a failure."""
        self._stream = stream
        self._report = report
        self.received_bytes = 0
        """Bytes of messages, as credit counts them."""

    async def begin(self, request: ReadRequest, credit_bytes: int) -> None:
        """Raises CallFailed."""
        await self._stream.send(codec.encode(ReadStreamRequest(request, credit_bytes)))

    async def grant(self, credit_bytes: int) -> None:
        """Allow the bookie to send so many bytes more. Raises Unreachable."""
        try:
            await self._stream.send(codec.encode(ReadStreamRequest(credit_bytes=credit_bytes)))
        except CallFailed as failure:
            self._report(False)
            raise Unreachable(str(failure)) from failure

    async def next(self, timeout_s: float) -> ReadResponse:
        """The next response. Raises Silent after `timeout_s`, Unreachable."""
        try:
            message = await self._stream.receive(timeout_s)
            if message is None:
                raise CallFailed("the bookie ended the stream")
            response = codec.decode_response("Read", message)
        except TooLate as failure:
            raise Silent(str(failure)) from failure
        except (CallFailed, codec.BadMessage) as failure:
            self._report(False)
            raise Unreachable(str(failure)) from failure
        self._report(True)
        self.received_bytes += len(message)
        return cast(ReadResponse, response)

    def give_up(self) -> None:
        """End the stream; later responses are dropped."""
        self._stream.give_up()


@dataclass(slots=True)
class _SingleAdd:
    """The PackedAdd of BookieClient.add, which sends an add without a writer."""

    packed: Sequence[Buffer]
    size: int


class BookieClient:
    """Sends requests to all bookies of a cluster over one Network, and reads `files` of bookies on
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
        """The lane of adds to the bookie, which all ledgers share. Adds of recoveries have a second
        lane: they neither wait behind normal adds nor share a frame with them."""
        lane = self._lanes.get((bookie_id, recovery))
        if lane is None:
            config, send = self._config, partial(self._send_frame, bookie_id)
            lane = AddLane(send, config.frame_bytes_max, config.frames_in_flight)
            self._lanes[bookie_id, recovery] = lane
        return lane

    async def _send_frame(
        self, bookie_id: str, adds: list[Sequence[Buffer]]
    ) -> Sequence[AddResult]:
        """Raises Unreachable."""
        request = PackedAddRequest(bookie_id, adds)
        response = await self._call(bookie_id, "Add", request, self._config.replica_timeout_s)
        results = cast(AddResponse, response).results
        if len(results) != len(adds):
            raise Unreachable(f"{len(results)} answers to {len(adds)} adds")
        return results

    async def add(self, bookie_id: str, add: Add) -> AddResult:
        """Send one add and wait for its response. BUSY is returned, not retried."""
        response: asyncio.Future[AddResult] = asyncio.get_running_loop().create_future()

        def responded(_: Sequence[_SingleAdd], results: Sequence[AddResult]) -> None:
            if not response.done():
                response.set_result(results[0])

        packed = _SingleAdd(codec.encode_add(add), sum(map(len, add.entry)))
        self.lane(bookie_id, recovery=add.recovery).submit(packed, responded)
        return await response

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
        tail_entries: int = 0,
    ) -> ReadResponse:
        """The entries from first to last, both included, and then those of the `further` spans, in
        rising order; the response ends where it would exceed `max_bytes`. `locations` is a map that
        the caller keeps from read to read: with it the client reads entries from the bookie's files
        if they are on this host, and the bookie also locates the entries `ahead`, which the caller
        will read later (LocalReads.read). With `tail_entries` a bookie that knows this field sends
        the last so many entries that it has, from `first_entry` on."""
        request = ReadRequest(
            *(bookie_id, ledger_id, first_entry, last_entry, max_bytes, fence, token, further),
            tail_entries=tail_entries,
        )

        async def ask(request: ReadRequest) -> ReadResponse:
            return await self._repeat_while_busy(bookie_id, "Read", request, ReadResponse)

        if locations is None or fence or not self.reads_files_of(bookie_id):
            return await ask(request)
        return await self._local_reads.read(request, locations, ahead, ask)

    def reads_files_of(self, bookie_id: str) -> bool:
        """Whether the bookie is on this host, and reading its files has not failed lately."""
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
        """Begin a stream of the entries. A response has `max_bytes` at most, and the bookie sends
        `credit_bytes` at most before the reader grants more. Raises Unreachable when the stream
        cannot begin."""
        address = await self._address(bookie_id)
        request = ReadRequest(bookie_id, ledger_id, first_entry, last_entry, max_bytes, token=token)
        try:
            stream = ReadStream(
                self._network.stream(address, "ReadStream"), partial(self._note_outcome, bookie_id)
            )
            await stream.begin(request, credit_bytes)
        except CallFailed as failure:
            self.quarantine.note_failure(bookie_id)
            raise Unreachable(f"no answer from {address}: {failure}") from failure
        return stream

    def _note_outcome(self, bookie_id: str, responded: bool) -> None:
        if responded:
            self.quarantine.note_response(bookie_id)
        elif not self._closed:
            self.quarantine.note_failure(bookie_id)

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
        """The bookie's last add confirmed; with `wait_ms` a long poll."""
        request = ReadLacRequest(bookie_id, ledger_id, fence, token, previous_lac, wait_ms)
        return await self._repeat_while_busy(
            bookie_id, "ReadLac", request, ReadLacResponse, wait_ms / 1000
        )

    async def write_lac(
        self, bookie_id: str, ledger_id: int, last_add_confirmed: int, *, token: bytes = b""
    ) -> WriteLacResponse:
        """Send the bookie the last add confirmed, so that readers see it."""
        request = WriteLacRequest(bookie_id, ledger_id, last_add_confirmed, token)
        return await self._repeat_while_busy(bookie_id, "WriteLac", request, WriteLacResponse)

    async def clear_limbo(
        self, bookie_id: str, ledger_id: int, revision: int | None = None, *, token: bytes = b""
    ) -> ClearLimboResponse:
        """Without `revision`: ask for the ledger's limbo at the bookie, and for the revision of
        that state. With it: take the ledger out of limbo, unless the revision has changed. The
        caller has compared the bookie's copies with those of others since it asked."""
        clear = revision is not None
        request = ClearLimboRequest(bookie_id, ledger_id, token, clear, revision or 0)
        return await self._repeat_while_busy(bookie_id, "ClearLimbo", request, ClearLimboResponse)

    async def stored_entries(
        self, bookie_id: str, ledger_id: int, first: int, last: int, *, token: bytes = b""
    ) -> StoredResponse:
        """Which of the entries first..last the bookie has in its index; the response is complete up
        to its field `through`."""
        request = StoredRequest(bookie_id, ledger_id, first, last, token)
        return await self._repeat_while_busy(bookie_id, "Stored", request, StoredResponse)

    # -- calls -------------------------------------------------------------------------------

    async def close(self) -> None:
        """Give up all that is under way and the connections."""
        self._closed = True
        for lane in self._lanes.values():
            lane.close()
        self._files.close()
        await self._network.close()

    async def _repeat_while_busy(
        self,
        bookie_id: str,
        method: str,
        request: Request,
        response_class: Callable[..., AnyResponse],
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
                return response_class(status=Status.IO_ERROR, reason=str(failure))
            pause_s = (response.retry_after_ms or RETRY_AFTER_MS) / 1000
            if response.status is not Status.BUSY or loop.time() + pause_s >= deadline:
                return response
            await asyncio.sleep(pause_s)

    async def _address(self, bookie_id: str) -> str:
        """Raises Unreachable."""
        try:
            address = self._directory.address(bookie_id) or await self._directory.find(bookie_id)
        except StoreError as failure:
            raise Unreachable(f"the bookie's address cannot be looked up: {failure!r}") from failure
        if address is None:
            raise Unreachable("the bookie never registered an address")
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
            self.quarantine.note_failure(bookie_id)
            raise Unreachable(f"no answer from {address}: {failure}") from failure
        if method == "Add" and loop.time() - began > self._config.slow_add_s:
            self.quarantine.note_slow(bookie_id)
        else:
            self.quarantine.note_response(bookie_id)
        return response


async def ask_info(network: Network, address: str, timeout_s: float) -> InfoResponse:
    """What the bookie at `address` ("host:port") responds to an Info request, whatever its id.
    Raises CallFailed."""
    body = await network.call(address, "Info", (codec.encode(InfoRequest()),), timeout_s)
    try:
        response = codec.decode_response("Info", body)
    except codec.BadMessage as error:
        raise CallFailed(f"no bookie answers there: {error}") from error
    assert isinstance(response, InfoResponse)
    return response


def why_not_ready(response: InfoResponse) -> str:
    """Why the bookie does not take new entries; "" if it is registered and takes them."""
    if response.status is Status.SHUTTING_DOWN:
        return "draining: it is stopping"
    if response.status is not Status.OK:
        return f"failed: {response.reason or response.status.name}"
    if response.state != "writable":
        return f"{response.state}: {response.reason}".rstrip(": ")
    return ""
