"""Hears all that happens in one run, for its story; it changes nothing and draws nothing.

Always true: a recorded run is the run that was not recorded, step by step. What a bookie holds is
asked of its disks, not of the bookie.
"""

import re
import struct
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from bookie_server.api import codec
from bookie_server.api import messages as m
from bookie_server.api.entry import HEADER_BYTES, DamagedEntry, unpack_header
from bookie_server.journal.format import RECORD_MAGIC, RecordKind
from bookie_server.logs.entry_log import log_path
from spark_ledger.bookies.bookie_client import CallFailed
from tests.simulation import scenario
from tests.simulation.disk import SimDisk
from tests.simulation.index import marks_on
from tests.simulation.network import Exchange
from tests.simulation.store import Commit
from tests.simulation.world import BookieNode, World

_RECORD = struct.Struct("<4sBBHqq")  # of a journal's record header: what and whose it is
_ENTRY_MAGIC = b"SLE1"


@dataclass(eq=False)
class Message:
    """A request and what became of it. Times in simulated seconds."""

    sent_s: float
    caller: str
    address: str
    method: str
    request: m.Request
    carried_out_s: float | None = None
    carried_out_at: str = ""
    """The address that did; another one when the request went astray."""
    response: m.Response | None = None
    """What the bookie answered, whether that arrived or not."""
    ended_s: float | None = None
    failure: str = ""
    """Why the caller was told of no answer."""


@dataclass(frozen=True)
class Note:
    """A line of the trace that is no message, or a metadata write (`commit`)."""

    time_s: float
    who: str
    what: str
    commit: Commit | None = None


@dataclass
class Held:
    """What one bookie's disks say of one ledger."""

    address: str
    bookie_id: str
    running: bool
    durable: set[int] = field(default_factory=set)
    cached: set[int] = field(default_factory=set)
    """Written and not yet synced: lost with the power."""
    placed: set[int] = field(default_factory=set)
    """That lie, durably, in a direct log beyond its mark."""
    fence: str = ""
    """"durable", "only in the page cache" or ""."""
    fence_replied: bool = False


@dataclass(frozen=True)
class Handle:
    """What the ledger's writer believes."""

    client: str
    last_add_confirmed: int
    pending: dict[int, int]
    """By entry: the mask of slots that acknowledged it."""
    ensemble: tuple[str, ...]
    failure: str


@dataclass
class Scene:
    """How things stood at one moment, for one ledger."""

    time_s: float
    violation: str
    ledger_id: int | None
    bookies: list[Held]
    handle: Handle | None


class Recorder:
    """Attached to a world before anything runs."""

    def __init__(self, world: World) -> None:
        self.world = world
        self.messages: list[Message] = []
        self.notes: list[Note] = []
        self.broken: Scene | None = None
        """How things stood when the first invariant was found broken, if an observer found it."""
        self._by_request: dict[int, Message] = {}
        self._requests: list[bytes] = []  # kept alive, so that their ids stay theirs
        self._call, self._note = world.network.call, world.trace.note
        world.network.call = self.call  # type: ignore[method-assign]
        world.trace.note = self.note  # type: ignore[method-assign]
        world.network.taps.insert(0, self.carried_out)
        world.store.listeners.insert(0, self.committed)

    @property
    def now(self) -> float:
        return self.world.loop.now

    async def call(
        self, caller: str, address: str, method: str, request: bytes, timeout_s: float
    ) -> bytes:
        whole = bytes(request)
        message = Message(self.now, caller, address, method, codec.decode_request(method, whole))
        self.messages.append(message)
        self._by_request[id(whole)] = message
        self._requests.append(whole)
        try:
            answer = await self._call(caller, address, method, whole, timeout_s)
            message.response = codec.decode_response(method, answer)
            return answer
        except CallFailed as error:
            message.failure = str(error).partition(": ")[2]
            raise
        except BaseException:
            message.failure = "no longer waited for"
            raise
        finally:
            message.ended_s = self.now

    def carried_out(self, exchange: Exchange) -> None:
        message = self._by_request.get(id(exchange.request))
        if message is not None and message.carried_out_s is None:
            message.carried_out_s, message.carried_out_at = self.now, exchange.address
            message.response = codec.decode_response(exchange.method, exchange.answer)

    def note(self, who: str, what: str) -> None:
        self._note(who, what)
        self.notes.append(Note(self.now, who, what))
        if who == "VIOLATION" and self.broken is None:
            self.broken = self.scene(what, ledger_in(what))

    def committed(self, commit: Commit) -> None:
        self.notes.append(Note(self.now, commit.session, "", commit))

    # -- how things stand ----------------------------------------------------------------------

    def scene(self, violation: str, ledger_id: int | None) -> Scene:
        """Everything about the ledger, now; without one, only when it was."""
        if ledger_id is None:
            return Scene(self.now, violation, None, [], None)
        bookies = [self._held(node, ledger_id) for node in self.world.nodes]
        return Scene(self.now, violation, ledger_id, bookies, self._handle(ledger_id))

    def _held(self, node: BookieNode, ledger_id: int) -> Held:
        held = Held(node.address, node.bookie_id, node.running)
        for disk in node.disks:
            for path in disk.paths():
                _scan(disk, path, ledger_id, held)
        for disk in node.ledger_disks:
            for log_id, mark in marks_on(disk).items():
                held.placed |= _entries(disk.durable(log_path(log_id))[mark:], ledger_id)
        held.cached -= held.durable
        replied = self.world.ghost.bookie(node.bookie_id).fence_replied
        held.fence_replied = ledger_id in replied
        return held

    def _handle(self, ledger_id: int) -> Handle | None:
        writer = getattr(self.world.observers, "_writers", {}).get(ledger_id)
        if writer is None:
            return None
        pipeline = writer._pipeline
        return Handle(
            getattr(writer, "owner", "the writer"),
            pipeline.pending.last_add_confirmed,
            {add.entry_id: add.acks for add in pipeline.pending},
            pipeline.record.last_fragment.ensemble,
            "" if pipeline.failure is None else type(pipeline.failure).__name__,
        )


def ledger_in(text: str) -> int | None:
    """The ledger that a violation names first."""
    named = re.search(r"ledger (\d+)", text)
    return int(named[1]) if named else None


def _scan(disk: SimDisk, path: str, ledger_id: int, held: Held) -> None:
    for image, entries in ((disk.durable(path), held.durable), (disk.content(path), held.cached)):
        entries |= _entries(image, ledger_id)
        if _fenced(image, ledger_id) and held.fence != "durable":
            held.fence = "durable" if entries is held.durable else "only in the page cache"


def _entries(image: bytes, ledger_id: int) -> set[int]:
    """Ids of the ledger's entries whose headers are whole in the image."""
    found: set[int] = set()
    for at in _places(image, _ENTRY_MAGIC):
        try:
            header = unpack_header(image[at : at + HEADER_BYTES])
        except DamagedEntry:
            continue
        if header.ledger_id == ledger_id:
            found.add(header.entry_id)
    return found


def _fenced(image: bytes, ledger_id: int) -> bool:
    """A fence record of the journal, or a state of the ledger (in the journal or the index)."""
    if b'"fenced":true,"ledger_id":%d,' % ledger_id in image:
        return True
    return any(kind == RecordKind.FENCE for kind in _kinds(image, ledger_id))


def _kinds(image: bytes, ledger_id: int) -> Iterator[int]:
    """The kinds of the journal's records of the ledger."""
    for at in _places(image, RECORD_MAGIC):
        if len(image) >= at + _RECORD.size:
            _, _, kind, _, ledger, _ = _RECORD.unpack_from(image, at)
            if ledger == ledger_id:
                yield kind


def _places(image: bytes, magic: bytes) -> Iterator[int]:
    at = image.find(magic)
    while at >= 0:
        yield at
        at = image.find(magic, at + 1)


@contextmanager
def recording() -> Iterator[list[Recorder]]:
    """Every run inside is recorded; the list grows by one recorder for each."""
    recorders: list[Recorder] = []
    plain = scenario.World

    class RecordedWorld(plain):  # type: ignore[misc,valid-type]
        def __init__(self, *args: Any, **options: Any) -> None:
            super().__init__(*args, **options)
            recorders.append(Recorder(self))

    scenario.World = RecordedWorld  # type: ignore[misc]
    try:
        yield recorders
    finally:
        scenario.World = plain  # type: ignore[misc]
