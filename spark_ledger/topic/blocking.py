"""The topic layer for callers without an event loop: Spark's driver and tasks, the CLI, notebooks.

Always true: rows are encoded and decoded in the caller's thread; only sending and fetching run on
the background loop, so both go on at once; what is handed over and not yet sent is bounded by
HANDED_OVER_BYTES_MAX, what is fetched ahead by AHEAD_BYTES.
"""

import asyncio
import os
import random
import time
from collections import deque
from collections.abc import AsyncIterator, Coroutine, Iterator
from concurrent.futures import Future
from typing import Any, TypeVar

import pyarrow as pa

from spark_ledger.client.connections import ledger_store
from spark_ledger.client.loop import background_loop
from spark_ledger.topic.batch_encoder import BatchEncoder, EncodedEntry
from spark_ledger.topic.client import TopicClient
from spark_ledger.topic.entry_sender import EntrySender
from spark_ledger.topic.intents import Intent
from spark_ledger.topic.read_plan import ReadTask
from spark_ledger.topic.slice_reader import FetchedPiece, Rows, fetch_task
from spark_ledger.topic.task_writer import TaskIdentity, TaskResult
from spark_ledger.topic.topics import TopicInfo

T = TypeVar("T")

HANDED_OVER_BYTES_MAX = 8 * 1024 * 1024
AHEAD_BYTES = 4 * 1024 * 1024  # of each of two handfuls: one decoded, one fetched

_connected: dict[tuple[int, str], "BlockingTopics"] = {}


def topics(service_url: str) -> "BlockingTopics":
    """The process's client of that cluster, connected at first use; a forked child makes its own.

    Raises errors.Unavailable, errors.BadConfig.
    """
    key = (os.getpid(), service_url)
    if key not in _connected:
        ledgers = ledger_store(service_url)

        async def wire() -> TopicClient:
            return TopicClient(ledgers, random.Random(os.urandom(16)), _now_ms)

        _connected[key] = BlockingTopics(background_loop().run(wire()))
    return _connected[key]


class BlockingTopics:
    """`run(coroutine)` carries out anything of `.client` (a TopicClient) and waits:
    `b.run(b.client.topics.open("t"))`. Its errors are raised here."""

    def __init__(self, client: TopicClient) -> None:
        self.client = client

    def run(self, coroutine: Coroutine[Any, Any, T]) -> T:
        return background_loop().run(coroutine)

    def task_writer(
        self,
        topic: TopicInfo,
        intent: Intent,
        *,
        task_index: int,
        attempt: int = 0,
        compression: str = "none",
        partitions: int | None = None,
    ) -> "BlockingTaskWriter":
        """See TopicClient.task_writer."""

        async def make_sender() -> EntrySender:
            return self.client.sender(topic, intent)

        encoder = self.client.encoder(topic, task_index, compression, partitions)
        identity = TaskIdentity(topic.id, intent.id, task_index, attempt)
        return BlockingTaskWriter(identity, encoder, self.run(make_sender()))

    def read(self, task: ReadTask) -> Iterator[Rows]:
        """The task's rows in order, fetched ahead. Raises as slice_reader.read_task."""
        loop = background_loop()
        fetched = fetch_task(self.client.ledgers, task)
        ahead = loop.submit(_handful(fetched))
        try:
            while handful := ahead.result():
                ahead = loop.submit(_handful(fetched))
                for piece in handful:
                    yield piece.rows()
        finally:
            ahead.cancel()
            loop.run(_close(ahead, fetched))


class BlockingTaskWriter:
    """task_writer.TaskWriter for one thread that is not the loop's: same methods, same errors.
    An error of the sending may come out of a later call."""

    def __init__(self, identity: TaskIdentity, encoder: BatchEncoder, sender: EntrySender) -> None:
        self._identity = identity
        self._encoder = encoder
        self._sender = sender
        self._handed: deque[tuple[Future[None], int]] = deque()
        self._handed_bytes = 0

    def write(self, keys: pa.Array | None, values: pa.Array) -> None:
        """See TaskWriter.write."""
        for entry in self._encoder.add(keys, values):
            self._hand_over(entry)

    def finish(self) -> TaskResult:
        """See TaskWriter.finish."""
        for entry in self._encoder.flush():
            self._hand_over(entry)
        self._wait_until(0)
        return self._identity.result(*background_loop().run(self._sender.finish()))

    def abort(self) -> None:
        """See TaskWriter.abort."""
        for future, _ in self._handed:
            future.cancel()
        background_loop().run(self._sender.abort())

    def _hand_over(self, entry: EncodedEntry) -> None:
        self._handed.append((background_loop().submit(self._sender.send(entry)), entry.body.nbytes))
        self._handed_bytes += entry.body.nbytes
        self._wait_until(HANDED_OVER_BYTES_MAX)

    def _wait_until(self, bytes_left: int) -> None:
        """Take the results of what was sent; wait until at most so many bytes are not."""
        while self._handed and (self._handed_bytes > bytes_left or self._handed[0][0].done()):
            future, size = self._handed.popleft()
            self._handed_bytes -= size
            future.result()


async def _handful(fetched: AsyncIterator[FetchedPiece]) -> list[FetchedPiece]:
    """The next entries, AHEAD_BYTES of them or a few more; none at the end."""
    taken: list[FetchedPiece] = []
    size = 0
    async for piece in fetched:
        taken.append(piece)
        size += len(piece.entry.payload)
        if size >= AHEAD_BYTES:
            break
    return taken


async def _close(ahead: "Future[list[FetchedPiece]]", fetched: AsyncIterator[FetchedPiece]) -> None:
    """End the fetching, once the handful under way was cancelled or has ended."""
    await asyncio.wait([asyncio.wrap_future(ahead)])
    close = getattr(fetched, "aclose", None)
    if close is not None:
        await close()


def _now_ms() -> int:
    return time.time_ns() // 1_000_000
