"""The doors of an actor: network, metadata store and disk as its production code sees them.

Always true: a door decides nothing. What goes out of it is noted as sent; what comes in is what the
explorer chose to deliver.
"""

import asyncio
from collections.abc import Callable, Sequence
from typing import Any

from bookie_server.api.entry import Buffer
from spark_ledger.bookies.bookie_client import CallFailed, Stream
from spark_ledger.metadata.store import ANY_VERSION, Operation, SessionState, Versioned, Watcher
from tests.simulation.disk import SimDisk
from tests.simulation.exhaustive.messages import STORE, Asked, Call, Message


class Calls:
    """The calls of one actor: numbered, and answered when the explorer says so."""

    def __init__(self, caller: str, loop: asyncio.AbstractEventLoop) -> None:
        self.open: dict[Asked, asyncio.Future[Any]] = {}
        """Questions whose caller still waits."""
        self.sent: list[Message] = []
        self._caller = caller
        self._loop = loop
        self._numbers: dict[tuple[str, str], int] = {}

    async def ask(self, callee: str, method: str, body: Any) -> Any:
        number = self._numbers[callee, method] = self._numbers.get((callee, method), 0) + 1
        asked = Asked(Call(self._caller, callee, method, number), body)
        answer = self.open[asked] = self._loop.create_future()
        self.sent.append(Message(asked))
        try:
            return await answer
        finally:
            del self.open[asked]

    def answered(self, message: Message) -> None:
        self.open[message.asked].set_result(message.body)

    def take_sent(self) -> tuple[Message, ...]:
        sent, self.sent = tuple(self.sent), []
        return sent


class NetworkDoor:
    """spark_ledger.bookies.bookie_client.Network. A call that gets no answer waits for ever; one
    that is told so (`None` for an answer) failed."""

    def __init__(self, calls: Calls) -> None:
        self._calls = calls

    async def call(
        self, address: str, method: str, request: Sequence[Buffer], timeout_s: float
    ) -> bytes:
        answer = await self._calls.ask(address, method, b"".join(request))
        if answer is None:
            raise CallFailed(f"{method} to {address}: the connection was reset")
        return answer

    def stream(self, address: str, method: str) -> Stream:
        raise CallFailed("nothing is streamed here")

    def is_here(self, address: str) -> bool:
        return False

    async def close(self) -> None: ...


class StoreDoor:
    """spark_ledger.metadata.store.MetadataStore, connected all the time. Watches never fire: what
    they would tell (a registration, a record that others change) may always come too late."""

    session_state = SessionState.CONNECTED
    connections = 1
    session_id = 1

    def __init__(self, calls: Calls) -> None:
        self._calls = calls

    def add_session_listener(self, listener: Callable[[SessionState], None]) -> None: ...

    async def get(self, path: str, watch: Watcher | None = None) -> Versioned:
        return await self._ask("get", path)

    async def children(self, path: str, watch: Watcher | None = None) -> list[str]:
        return list(await self._ask("children", path))

    async def create(
        self, path: str, value: bytes = b"", *, ephemeral: bool = False, parents: bool = False
    ) -> None:
        await self._ask("create", path, bytes(value), parents)

    async def set(self, path: str, value: bytes, version: int) -> int:
        return await self._ask("set", path, bytes(value), version)

    async def delete(self, path: str, version: int = ANY_VERSION) -> None:
        await self._ask("delete", path, version)

    async def multi(self, operations: Sequence[Operation]) -> None:
        await self._ask("multi", tuple(operations))

    async def sync(self, path: str = "/") -> None:
        await self._ask("sync", path)

    async def close(self) -> None: ...

    async def _ask(self, *operation: Any) -> Any:
        outcome, *facts = await self._calls.ask(STORE, "store", operation)
        if outcome == "raised":
            kind, args = facts
            raise kind(*args)
        return facts[0]


class GatedDisk(SimDisk):
    """A disk whose syncs end when they are told to; while it is `free` they take no time."""

    def __init__(self) -> None:
        super().__init__()
        self.free = True
        self._syncing: list[asyncio.Future[None]] = []

    @property
    def syncing(self) -> bool:
        """Whether a sync is under way."""
        return bool(self._syncing)

    def end_sync(self) -> None:
        """The sync that began first ends."""
        self._syncing.pop(0).set_result(None)

    def crash(self, *args: Any, **options: Any) -> None:
        self._syncing.clear()
        super().crash(*args, **options)

    async def pause(self, between_s: tuple[float, float], *, alters: bool = False) -> None:
        if not self.free and between_s == self.faults.sync_s:
            done = asyncio.get_running_loop().create_future()
            self._syncing.append(done)
            await done
