"""One multi for the writes of several callers.

Always true: the operations of a caller are carried out together or not at all; operations that come
while a multi is under way share the next one; no caller fails because of another: if a shared multi
fails, each caller's operations are sent in a multi of their own.
"""

import asyncio
from collections import deque
from collections.abc import Sequence
from typing import NamedTuple

from spark_ledger.metadata.store import (
    BadVersion,
    Create,
    MetadataStore,
    MultiFailed,
    NoNode,
    Operation,
    OutcomeUnknown,
    SessionState,
    Set,
)

OPERATIONS_MAX, BYTES_MAX = 200, 256 * 1024  # of one multi, if several callers share it


class _Waiting(NamedTuple):
    operations: Sequence[Operation]
    on: int | None
    done: "asyncio.Future[None]"

    @property
    def bytes(self) -> int:
        writes = (write for write in self.operations if isinstance(write, Create | Set))
        return sum(len(write.value) for write in writes)


class SharedMultis:
    """The multis of one process to one store."""

    def __init__(self, store: MetadataStore) -> None:
        self.store = store
        self._waiting: deque[_Waiting] = deque()
        self._task: asyncio.Task[None] | None = None

    async def multi(self, operations: Sequence[Operation], *, on: int | None = None) -> None:
        """As MetadataStore.multi. `on`: raises OutcomeUnknown, and sends nothing, after this
        connection to the store."""
        loop = asyncio.get_running_loop()
        waiting = _Waiting(operations, on, loop.create_future())
        self._waiting.append(waiting)
        if self._task is None:
            self._task = loop.create_task(self._work())
        await waiting.done

    async def _work(self) -> None:
        try:
            while self._waiting:
                await self._write(self._next_batch())
        finally:
            self._task = None

    def _next_batch(self) -> list[_Waiting]:
        batch: list[_Waiting] = []
        count = size = 0
        while self._waiting:
            count += len(self._waiting[0].operations)
            size += self._waiting[0].bytes
            if batch and (count > OPERATIONS_MAX or size > BYTES_MAX):
                break
            waiting = self._waiting.popleft()
            if not waiting.done.done():  # else the caller was cancelled
                batch.append(waiting)
        return batch

    async def _write(self, batch: Sequence[_Waiting]) -> None:
        sent = [waiting for waiting in batch if self._is_in_time(waiting)]
        if not sent:
            return
        try:
            await self._send([operation for waiting in sent for operation in waiting.operations])
        except MultiFailed as failed:
            if len(sent) == 1:
                _end(sent, failed)
            else:  # it changed nothing
                await asyncio.gather(*(self._write([waiting]) for waiting in sent))
        except Exception as error:
            _end(sent, error)
        else:
            _end(sent, None)

    async def _send(self, operations: Sequence[Operation]) -> None:
        if len(operations) == 1 and isinstance(write := operations[0], Set):
            try:
                await self.store.set(write.path, write.value, write.version)
            except (BadVersion, NoNode) as error:
                raise MultiFailed(0, error) from None
        else:
            await self.store.multi(operations)

    def _is_in_time(self, waiting: _Waiting) -> bool:
        if waiting.on is None or is_on(self.store, waiting.on):
            return True
        _end([waiting], OutcomeUnknown("the connection has ended"))
        return False


def is_on(store: MetadataStore, connection: int) -> bool:
    """Whether a write that begins now is sent on this connection."""
    return store.session_state is SessionState.CONNECTED and store.connections == connection


def _end(sent: Sequence[_Waiting], error: Exception | None) -> None:
    for waiting in sent:
        if waiting.done.done():
            continue
        if error is None:
            waiting.done.set_result(None)
        else:
            waiting.done.set_exception(error)
