"""Bookies of a few lines, for tests of the ledger that script every answer.

They keep entries in a dict, fence, and hear LACs, as the real ones; a test makes one silent (no
answer until the caller's time is over), refusing (an error at once) or gives it an `override`.
Time is simulated: waits cost nothing.
"""

import asyncio
import dataclasses
import functools
import json
import random
from collections.abc import Callable, Coroutine, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import pytest

from bookie_server.api import codec
from bookie_server.api import messages as m
from bookie_server.api.entry import Buffer, EntryHeader, pack_header, payload_crc, unpack_entry
from bookie_server.api.messages import ids_in, spans_of
from bookie_server.api.status import Status, StopReason
from spark_ledger import errors
from spark_ledger.bookies.bookie_client import BookieClient, CallFailed, TooLate
from spark_ledger.bookies.directory import BookieDirectory
from spark_ledger.config import ClientConfig
from spark_ledger.ledger.client import LedgerStore
from spark_ledger.ledger.placement import resolve
from spark_ledger.metadata import cluster, ledger_record, paths
from spark_ledger.metadata.ledger_record import Fragment
from tests.simulation.loop import run
from tests.simulation.store import SimSession, SimStore

Override = Callable[[Any], Any]
RESULTS_MAX = 16384  # as the real ones, whatever the range
STEPS_MAX = 200_000
"""Of a test: six times as many as the longest takes."""


@dataclass(frozen=True)
class SilentFor:
    """What an override gives for no answer."""

    seconds: float


class FakeBookie:
    """One bookie. `requests` is everything it was asked, in order."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.entries: dict[tuple[int, int], bytes] = {}
        self.fenced: dict[int, bool] = {}
        self.lac: dict[int, int] = {}
        self.limbo: dict[int, int] = {}
        """Ledgers in limbo, each with its revision."""
        self.silent = False
        self.refusing = False
        self.is_older = False
        """It does not know of the tail of a ledger."""
        self.delay_s = 0.001
        self.waiting = 0
        """Long polls that wait for news now."""
        self.override: Override | None = None
        self.requests: list[Any] = []
        self._news = asyncio.Event()

    async def handle(self, request: Any, timeout_s: float) -> Any:
        """The answer; None is no answer."""
        self.requests.append(request)
        if self.refusing:
            raise CallFailed("connection refused")
        if self.silent:
            await asyncio.sleep(timeout_s)
            raise CallFailed("too late")
        await asyncio.sleep(self.delay_s)
        answer = self.override(request) if self.override else None
        if answer is None and isinstance(request, m.ReadLacRequest) and request.wait_ms:
            await self.wait_for_news(request)
        if answer is None:
            answer = self.answer(request)
        if isinstance(answer, CallFailed):
            raise answer
        if isinstance(answer, SilentFor):
            await asyncio.sleep(min(answer.seconds, timeout_s))
            raise CallFailed("too late")
        return answer

    async def wait_for_news(self, request: m.ReadLacRequest) -> None:
        ledger_id = request.ledger_id
        self.waiting += 1
        try:
            async with asyncio.timeout(request.wait_ms / 1000):
                while self.lac.get(ledger_id, -1) <= request.previous_lac:
                    if self.fenced.get(ledger_id):
                        return
                    await self._news.wait()
        except TimeoutError:
            pass
        finally:
            self.waiting -= 1

    def answer(self, request: Any) -> Any:
        try:
            return self._answer(request)
        finally:
            self._news.set()  # whoever waits looks again
            self._news = asyncio.Event()

    def _answer(self, request: Any) -> Any:
        if isinstance(request, m.AddRequest):
            return m.AddResponse([m.AddResult(self.add(add)) for add in request.adds])
        if isinstance(request, m.ReadRequest):
            self.fenced[request.ledger_id] = self.fenced.get(request.ledger_id) or request.fence
            return self.read(request)
        if isinstance(request, m.ReadLacRequest):
            fenced = self.fenced.get(request.ledger_id, False) or request.fence
            self.fenced[request.ledger_id] = fenced
            return m.ReadLacResponse(Status.OK, self.lac.get(request.ledger_id, -1), fenced)
        if isinstance(request, m.ClearLimboRequest):
            return self.clear_limbo(request)
        if isinstance(request, m.StoredRequest):
            some = range(request.first_entry, request.last_entry + 1)
            here = [e for e in some if (request.ledger_id, e) in self.entries]
            return m.StoredResponse(Status.OK, request.last_entry, spans_of(here))
        lac = max(request.last_add_confirmed, self.lac.get(request.ledger_id, -1))
        self.lac[request.ledger_id] = lac
        return m.WriteLacResponse(Status.OK)

    def add(self, add: m.Add) -> Status:
        data = b"".join(add.entry)
        header = unpack_entry(data).header
        if self.fenced.get(header.ledger_id) and not add.recovery:
            return Status.FENCED
        if add.recovery:
            self.entries[header.ledger_id, header.entry_id] = data
        self.entries.setdefault((header.ledger_id, header.entry_id), data)
        lac = max(header.last_add_confirmed, self.lac.get(header.ledger_id, -1))
        self.lac[header.ledger_id] = lac
        return Status.OK

    def clear_limbo(self, request: m.ClearLimboRequest) -> m.ClearLimboResponse:
        revision = self.limbo.get(request.ledger_id)
        if revision is None:
            return m.ClearLimboResponse(Status.OK)
        if request.clear and request.revision == revision:
            del self.limbo[request.ledger_id]
            return m.ClearLimboResponse(Status.OK)
        status = Status.LIMBO if request.clear else Status.OK
        return m.ClearLimboResponse(status, "lost", revision)

    def read(self, request: m.ReadRequest) -> m.ReadResponse:
        results, size = [], 0
        if request.tail_entries and not self.is_older:
            return self.read_tail(request)
        for entry_id in ids_in(request.spans, RESULTS_MAX):
            data = self.entries.get((request.ledger_id, entry_id))
            size += len(data or b"")
            if results and size > request.max_bytes:
                break
            results.append(
                m.EntryResult(Status.NO_SUCH_ENTRY)
                if data is None
                else m.EntryResult(Status.OK, data)
            )
        return m.ReadResponse(Status.OK, results, self.lac.get(request.ledger_id, -1))

    def read_tail(self, request: m.ReadRequest) -> m.ReadResponse:
        last = max(
            (e for ledger_id, e in self.entries if ledger_id == request.ledger_id), default=-1
        )
        last = max(last, request.first_entry - 1)
        first = max(request.first_entry, last - request.tail_entries + 1)
        span = {"first_entry": first, "last_entry": min(last + 1, 2**63 - 1), "tail_entries": 0}
        response = self.read(request._replace(**span))
        is_whole = len(response.results) == last - first + 2
        stop = StopReason.REST_IS_ABSENT if is_whole else StopReason.BYTE_LIMIT
        return response._replace(stop=stop, skipped=first - request.first_entry)


class FakeNetwork:
    def __init__(self, bookies: dict[str, FakeBookie]) -> None:
        self.bookies = bookies
        self._under_way: dict[asyncio.Timeout, None] = {}
        self._closed = False

    async def call(
        self, address: str, method: str, request: Sequence[Buffer], timeout_s: float
    ) -> bytes:
        bookie = self._at(address)
        if self._closed:
            raise CallFailed("the connections were closed")
        try:
            async with asyncio.timeout(None) as until_closed:
                self._under_way[until_closed] = None
                asked = codec.decode_request(method, b"".join(request))
                answer = await bookie.handle(asked, timeout_s)
        except TimeoutError:
            raise CallFailed("the connection was given up") from None
        finally:
            del self._under_way[until_closed]
        return codec.encode(answer)

    def _at(self, address: str) -> FakeBookie:
        """At name:port, or at host:name."""
        first, _, last = address.partition(":")
        return self.bookies[first if first in self.bookies else last]

    def was_read(self, address: str, asked: m.ReadRequest, last: int) -> None:
        """Note a read of a stream as the range that it turned out to be."""
        requests = self._at(address).requests
        requests[requests.index(asked)] = asked._replace(last_entry=last)

    def stream(self, address: str, method: str) -> "FakeStream":
        return FakeStream(self, address)

    def is_here(self, address: str) -> bool:
        return False

    async def close(self) -> None:
        self._closed = True
        for call in self._under_way:
            call.reschedule(0)


class FakeStream:
    """A ReadStream of a fake bookie: each response is its answer to a Read."""

    def __init__(self, network: FakeNetwork, address: str) -> None:
        self._network = network
        self._address = address
        self._credit = 0
        self._granted = asyncio.Event()
        self._arrived: asyncio.Queue[bytes | CallFailed] = asyncio.Queue()
        self._serving: asyncio.Task[None] | None = None

    async def send(self, message: bytes) -> None:
        told = codec.decode_stream_request("ReadStream", message)
        self._credit += told.credit_bytes
        self._granted.set()
        if told.read is not None:
            self._serving = asyncio.ensure_future(self._serve(told.read))

    async def _serve(self, request: m.ReadRequest) -> None:
        while request.first_entry <= request.last_entry:
            while self._credit <= 0:
                self._granted.clear()
                await self._granted.wait()
            asked = request._replace(max_bytes=min(request.max_bytes, self._credit))
            try:
                request_bytes = (codec.encode(asked),)
                answer = await self._network.call(self._address, "Read", request_bytes, 1000)
            except CallFailed as failure:
                self._arrived.put_nowait(failure)
                return
            self._arrived.put_nowait(answer)
            self._credit -= len(answer)
            response = codec.decode_response("Read", answer)
            assert isinstance(response, m.ReadResponse)
            if not response.results:
                return
            first = request.first_entry + len(response.results)
            self._network.was_read(self._address, asked, first - 1)
            request = request._replace(first_entry=first)

    async def receive(self, timeout_s: float) -> bytes:
        try:
            async with asyncio.timeout(timeout_s):
                arrived = await self._arrived.get()
        except TimeoutError:
            raise TooLate("silent") from None
        if isinstance(arrived, CallFailed):
            raise arrived
        return arrived

    def give_up(self) -> None:
        if self._serving is not None:
            self._serving.cancel()


class FakeCluster:
    """Bookies "a", "b", ... and clients of them over one metadata store."""

    def __init__(self, bookies: int, **settings: Any) -> None:
        names = [chr(ord("a") + number) for number in range(bookies)]
        self.bookies = {name: FakeBookie(name) for name in names}
        self.store = SimStore()
        self.config = ClientConfig(**settings)
        self.admin: SimSession = self.store.session("admin")
        self.network = FakeNetwork(self.bookies)
        """That of the client made last."""

    async def start(self) -> None:
        for folder in cluster.FOLDERS:
            await self.admin.create(folder, parents=True)
        for name in self.bookies:
            await self.register(name)

    async def register(self, name: str, rack: str = "", port: int = 1, host: str = "") -> None:
        """`host`: where it runs; else on a host of its own."""
        self.bookies.setdefault(name, FakeBookie(name))
        address = f"{host}:{name}" if host else f"{name}:{port}"
        registered = {"address": address, "free_bytes": 1000, "rack": rack}
        value = json.dumps(registered).encode()
        await self.admin.create(f"{paths.BOOKIES_AVAILABLE}/{name}", value, ephemeral=True)

    async def deregister(self, name: str) -> None:
        await self.admin.delete(f"{paths.BOOKIES_AVAILABLE}/{name}")

    async def readonly(self, name: str, reason: str) -> None:
        """The bookie still serves reads, for the reason given."""
        await self.deregister(name)
        value = json.dumps({"address": f"{name}:1", "reason": reason}).encode()
        await self.admin.create(f"{paths.BOOKIES_READONLY}/{name}", value, ephemeral=True)

    async def client(self, name: str = "client", seed: int = 0) -> LedgerStore:
        session = self.store.session(name)
        directory = BookieDirectory(session, self.config.directory_refresh_s)
        await directory.start()
        self.network = FakeNetwork(self.bookies)
        bookies = BookieClient(self.network, directory, self.config)
        placement = resolve(self.config.placement)
        return LedgerStore(session, bookies, directory, self.config, random.Random(seed), placement)

    def holders(self, ledger_id: int, entry_id: int) -> list[str]:
        return [n for n, b in self.bookies.items() if (ledger_id, entry_id) in b.entries]


def simulated(test: Callable[..., Coroutine[Any, Any, None]]) -> Callable[..., None]:
    """Run an async test in simulated time. One that does not end fails within seconds."""

    @functools.wraps(test)
    def wrapped(*args: Any, **fixtures: Any) -> None:
        run(test(*args, **fixtures), seed=1, time_max_s=3600, steps_max=STEPS_MAX)

    return wrapped


async def cluster_of(bookies: int, **settings: Any) -> tuple[FakeCluster, LedgerStore]:
    cluster = FakeCluster(bookies, **settings)
    await cluster.start()
    return cluster, await cluster.client()


async def cluster_on(*racks: str, **settings: Any) -> tuple[FakeCluster, LedgerStore]:
    """As `cluster_of`, with one bookie on each rack named: "a" on the first, "b" on the next."""
    cluster = FakeCluster(0, **settings)
    await cluster.start()
    for number, rack in enumerate(racks):
        await cluster.register(chr(ord("a") + number), rack)
    return cluster, await cluster.client()


def entry_bytes(ledger_id: int, entry_id: int, lac: int) -> bytes:
    """What a bookie keeps of the entry, whose payload is two bytes long up to entry 9."""
    payload = b"p%d" % entry_id
    size = 2 * (entry_id + 1)
    crc = payload_crc([payload])
    header = EntryHeader(ledger_id, entry_id, lac, size, entry_id + 1, len(payload), crc)
    return pack_header(header) + payload


def put(
    cluster: FakeCluster, ledger_id: int, entry_id: int, holders: Iterable[str], lac: int = -1
) -> None:
    """The entry lies on these bookies, whoever wrote it there."""
    for name in holders:
        bookie = cluster.bookies[name]
        bookie.entries[ledger_id, entry_id] = entry_bytes(ledger_id, entry_id, lac)
        bookie.lac[ledger_id] = max(lac, bookie.lac.get(ledger_id, -1))


async def ledger_on(
    cluster: FakeCluster,
    ledgers: LedgerStore,
    sizes: tuple[int, int, int] = (3, 3, 2),
    **fields: Any,
) -> int:
    """An open ledger on bookies a, b, c, ... in this order."""
    writer = await ledgers.create(*sizes)
    ensemble = tuple(cluster.bookies)[: sizes[0]]
    record = dataclasses.replace(writer.record, fragments=(Fragment(0, ensemble),), **fields)
    path = paths.ledger(writer.ledger_id)
    await cluster.admin.set(path, ledger_record.encode(record), writer.version)
    return writer.ledger_id


def refuses(status, **fields):
    """An override that answers adds with a status and leaves other requests alone."""

    def override(request):
        if isinstance(request, m.AddRequest):
            return m.AddResponse([m.AddResult(status, **fields) for _ in request.adds])
        return None

    return override


async def failure_of(future):
    with pytest.raises(errors.LedgerError) as caught:
        await future
    return caught.value
