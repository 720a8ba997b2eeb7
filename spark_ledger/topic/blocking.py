"""The topic layer for callers without an event loop: Spark's driver and tasks, the CLI, notebooks.

Always true: rows are decoded in the caller's thread; only fetching runs on the background loop, so
both go on at once; what is fetched ahead is bounded by AHEAD_BYTES and a run more.
"""

import asyncio
import os
import random
import time
from collections.abc import Collection, Coroutine, Iterator, Sequence
from typing import Any, TypeVar

from spark_ledger.config import ClientConfig, client_config
from spark_ledger.ledger.client import LedgerStore
from spark_ledger.metadata.store import SessionState
from spark_ledger.metadata.store_calls import reachable
from spark_ledger.process import OncePerProcess, background_loop, ledger_store
from spark_ledger.topic.client import TopicClient
from spark_ledger.topic.entry.key_filter import hashes_of
from spark_ledger.topic.log.intents import Intent
from spark_ledger.topic.log.topics import TopicInfo
from spark_ledger.topic.message_chunks import with_chunks
from spark_ledger.topic.read.plan import ReadTask
from spark_ledger.topic.read.row_blocks import Block, Joining
from spark_ledger.topic.read.slice_reader import Fetched, FetchedEntry
from spark_ledger.topic.task_reader import fetch_kept
from spark_ledger.topic.write import (
    DEFAULT_SETTINGS,
    EntrySender,
    TaskResult,
    TaskSettings,
    TaskWriter,
)

T = TypeVar("T")

AHEAD_BYTES = 4 * 1024 * 1024  # of each of two handfuls: one decoded, one fetched

_connected: OncePerProcess[tuple[str, float], "BlockingTopics"] = OncePerProcess()


def topics(
    service_url: str, outage_timeout_s: float = 0.0, *, begins: bool = False
) -> "BlockingTopics":
    """The process's client of that cluster, connected at first use. Its calls wait so long for the
    end of an outage of the metadata store (0: as the defaults say). So does connecting, unless the
    query only `begins`: a wrong URL is told soon.

    Raises errors.Unavailable, errors.BadConfig.
    """
    ledgers = ledger_store(service_url, _config(service_url, outage_timeout_s, begins=begins))
    return _connected.get(
        (service_url, outage_timeout_s),
        lambda: BlockingTopics(background_loop().run(_wire(ledgers))),
        lambda found: found.client.ledgers is ledgers,
    )


def _config(service_url: str, outage_timeout_s: float, *, begins: bool) -> ClientConfig | None:
    if not outage_timeout_s:
        return None
    config = client_config(service_url=service_url, outage_timeout_s=outage_timeout_s)
    patience = {
        "connect_timeout_s": config.connect_timeout_s if begins else outage_timeout_s,
        "metadata_timeout_s": min(config.metadata_timeout_s, outage_timeout_s),
    }
    return config.model_copy(update=patience)


async def _wire(ledgers: LedgerStore) -> TopicClient:
    rng = random.Random(os.urandom(16))
    return TopicClient(ledgers, rng, lambda: time.time_ns() // 1_000_000)


class BlockingTopics:
    """`run(coroutine)` carries out anything of `.client` (a TopicClient) and waits:
    `b.run(b.client.topics.open("t"))`. Its errors are raised here; those of the metadata store, of
    whatever kind, as errors.Unavailable."""

    def __init__(self, client: TopicClient) -> None:
        self.client = client

    def run(self, coroutine: Coroutine[Any, Any, T]) -> T:
        with reachable("topics were worked on"):
            return background_loop().run(coroutine)

    @property
    def away(self) -> bool:
        """Whether there is no contact to the metadata store, as far as is known."""
        return self.client.store.session_state is not SessionState.CONNECTED

    def until_back(self) -> None:
        """Wait while the metadata store is away. Raises errors.Unavailable."""
        if self.away:
            self.run(self.client.store.sync())

    def task_writer(
        self,
        topic: TopicInfo,
        intent: Intent,
        *,
        task_index: int,
        attempt: int = 0,
        partitions: int | None = None,
        settings: TaskSettings = DEFAULT_SETTINGS,
    ) -> TaskWriter:
        """A writer for one task attempt, on ledgers of this process's cache. `partitions` is
        today's number of them where the topic has grown. Raises errors.BadConfig."""

        async def make_sender() -> EntrySender:
            return self.client.sender(topic, intent, settings)

        encoder = self.client.encoder(topic, task_index, partitions, settings)
        nothing = TaskResult(topic.id, intent.id, task_index, attempt)
        return TaskWriter(nothing, encoder, self.run(make_sender()), settings)

    def read(
        self,
        task: ReadTask,
        columns: Collection[str] | None = None,
        *,
        keys: Sequence[bytes] | None = None,
        lossy: bool = False,
    ) -> Iterator[Block]:
        """The task's rows, those of a partition in order, fetched ahead. `columns` are those that
        are decoded, by their names in entries (None: all). With `keys` some entries without any of
        these are left out. Raises as task_reader.fetch_kept."""
        loop = background_loop()
        hashes = None if keys is None else hashes_of(keys)
        kept = fetch_kept(self.client, task, keys=hashes, lossy=lossy)
        ahead = _Ahead(with_chunks(self.client, task, kept, columns, lossy=lossy))
        try:
            while handful := self.run(ahead.next()):
                joining = Joining()
                for fetched in handful:
                    yield from joining.add(fetched.block(columns))
                yield from joining.end()
        finally:
            loop.run(ahead.close())


class _Ahead:
    """Fetches the next handful of entries while the caller decodes the last. On the loop."""

    def __init__(self, runs: Fetched) -> None:
        self._runs = runs
        self._next: asyncio.Task[list[FetchedEntry]] | None = None

    async def next(self) -> list[FetchedEntry]:
        """The next entries in order; none at the end."""
        loop = asyncio.get_running_loop()
        handful = await (self._next or loop.create_task(self._fetch()))
        self._next = loop.create_task(self._fetch())
        return handful

    async def close(self) -> None:
        if self._next is not None:
            self._next.cancel()
            await asyncio.gather(self._next, return_exceptions=True)
        await self._runs.aclose()

    async def _fetch(self) -> list[FetchedEntry]:
        """AHEAD_BYTES of entries, or one run more."""
        taken: list[FetchedEntry] = []
        size = 0
        async for run in self._runs:
            taken += run
            size += sum(fetched.bytes for fetched in run)
            if size >= AHEAD_BYTES:
                break
        return taken
