"""The topic layer for callers without an event loop: Spark's driver and tasks, the CLI, notebooks.

Always true: rows are decoded in the caller's thread; only fetching runs on the background loop, so
both run at once; at most AHEAD_BYTES and one more run are fetched ahead.

A cursor's `advance` and `check` never wait, neither for a bookie nor for the metadata store
(hazard 38): the cursor writes in the background. A process has one cursor of a subscription and
run, as Spark may make a query's source again at any time.
"""

import asyncio
import logging
import os
import random
import time
from collections.abc import Collection, Coroutine, Iterator, Mapping, Sequence
from concurrent.futures import Future
from typing import TYPE_CHECKING, Any, TypeVar

from spark_ledger import errors
from spark_ledger.async_tasks import cancel
from spark_ledger.config import DEFAULTS, ClientConfig, client_config
from spark_ledger.ledger.client import LedgerStore
from spark_ledger.metadata.store import SessionState
from spark_ledger.metadata.store_calls import reachable
from spark_ledger.process import OncePerProcess, background_loop, ledger_store
from spark_ledger.topic.client import TopicClient
from spark_ledger.topic.entry.key_filter import hashes_of
from spark_ledger.topic.log.intents import Intent
from spark_ledger.topic.log.topics import TopicInfo
from spark_ledger.topic.read.bad_entries import BadEntries, OnBadEntry
from spark_ledger.topic.read.plan import ReadTask
from spark_ledger.topic.read.row_blocks import Block, BlockJoiner
from spark_ledger.topic.read.slice_reader import Fetched, FetchedEntry
from spark_ledger.topic.subscription.seek_target import End, SeekTarget
from spark_ledger.topic.task_reader import fetch_kept, with_chunks
from spark_ledger.topic.write import (
    DEFAULT_SETTINGS,
    EntrySender,
    TaskResult,
    TaskSettings,
    TaskWriter,
)

if TYPE_CHECKING:
    from spark_ledger.topic.subscription.cursor import Cursor

T = TypeVar("T")

AHEAD_BYTES = 4 * 1024 * 1024  # of each of two handfuls: one decoded, one fetched

_connected: OncePerProcess[tuple[str, float], "BlockingTopics"] = OncePerProcess()


def topics(
    service_url: str,
    outage_timeout_s: float = DEFAULTS.outage_timeout_s,
    *,
    fail_fast: bool = False,
) -> "BlockingTopics":
    """The process's client of that cluster, connected at first use. In an outage of the metadata
    store, connecting and all calls wait up to `outage_timeout_s` for its end (0: the default). With
    `fail_fast` connecting waits `connect_timeout_s` only, so that a new query with a wrong URL
    fails soon.

    Raises errors.Unavailable, errors.BadConfig.
    """
    ledgers = ledger_store(service_url, _config(service_url, outage_timeout_s, fail_fast=fail_fast))
    return _connected.get(
        (service_url, outage_timeout_s),
        lambda: BlockingTopics(background_loop().run(_wire(ledgers))),
        lambda found: found.client.ledgers is ledgers,
    )


def _config(service_url: str, outage_timeout_s: float, *, fail_fast: bool) -> ClientConfig | None:
    if not outage_timeout_s:
        return None
    config = client_config(service_url=service_url, outage_timeout_s=outage_timeout_s)
    patience = {
        "connect_timeout_s": config.connect_timeout_s if fail_fast else outage_timeout_s,
        "metadata_timeout_s": min(config.metadata_timeout_s, outage_timeout_s),
    }
    return config.model_copy(update=patience)


async def _wire(ledgers: LedgerStore) -> TopicClient:
    rng = random.Random(os.urandom(16))
    return TopicClient(ledgers, rng, lambda: time.time_ns() // 1_000_000)


class BlockingTopics:
    """`run(coroutine)` runs a coroutine of `.client` (a TopicClient) and waits for it:
    `b.run(b.client.topics.open("t"))`. It raises the coroutine's errors; every error of the
    metadata store as errors.Unavailable."""

    def __init__(self, client: TopicClient) -> None:
        self.client = client

    def run(self, coroutine: Coroutine[Any, Any, T]) -> T:
        with reachable("topics were worked on"):
            return background_loop().run(coroutine)

    @property
    def away(self) -> bool:
        """Whether the process has no contact to the metadata store, as far as it knows."""
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
        """A writer for one task attempt, on ledgers of this process's cache. `partitions` is the
        topic's present number of partitions if it has grown. Raises errors.BadConfig."""

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
        on_bad_entry: OnBadEntry = OnBadEntry.FAIL,
    ) -> Iterator[Block]:
        """The task's rows, those of a partition in order, fetched ahead. `columns` are the columns
        to decode, by their names in entries (None: all). With `keys` some entries without any of
        these keys are left out. Raises as task_reader.fetch_kept, and errors.BadEntry if
        `on_bad_entry` is FAIL."""
        loop = background_loop()
        hashes = None if keys is None else hashes_of(keys)
        kept = fetch_kept(self.client, task, keys=hashes, lossy=lossy)
        ahead = _Ahead(with_chunks(self.client, task, kept, columns, lossy=lossy))
        bad = BadEntries(task.topic, on_bad_entry)
        try:
            while handful := self.run(ahead.next()):
                joining = BlockJoiner()
                for fetched in handful:
                    for block in fetched.blocks(columns, bad):
                        yield from joining.add(block)
                yield from joining.end()
        finally:
            bad.end()
            loop.run(ahead.close())


class _Ahead:
    """Fetches the next handful of entries while the caller decodes the last. On the loop."""

    def __init__(self, runs: Fetched) -> None:
        self._runs = runs
        self._next: asyncio.Task[list[FetchedEntry]] | None = None

    async def next(self) -> list[FetchedEntry]:
        """The next entries in order; an empty list at the end."""
        loop = asyncio.get_running_loop()
        handful = await (self._next or loop.create_task(self._fetch()))
        self._next = loop.create_task(self._fetch())
        return handful

    async def close(self) -> None:
        if self._next is not None:
            await cancel(self._next)
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


_log = logging.getLogger(__name__)

_open: OncePerProcess[tuple[str, str, str], "BlockingCursor"] = OncePerProcess()
"""By topic id, subscription and run."""


def open_cursor(
    topics: BlockingTopics,
    topic: TopicInfo,
    name: str,
    query_id: str,
    run_id: str,
    *,
    start: SeekTarget = End.LATEST,
    partitions: tuple[int, ...] | None = None,
) -> "BlockingCursor":
    """See Subscriptions.open; the same cursor again for the same run while it is not released."""

    def opened() -> BlockingCursor:
        return BlockingCursor(
            topics.run(
                topics.client.subscriptions.open(
                    topic, name, query_id, run_id, start=start, partitions=partitions
                )
            )
        )

    _open.forget(lambda cursor: cursor.released)
    return _open.get((topic.id, name, run_id), opened, lambda cursor: not cursor.released)


def release_all() -> None:
    """Release every subscription of this process."""
    for cursor in _open.values():
        cursor.release()


class BlockingCursor:
    """A Cursor that may be used from any thread."""

    def __init__(self, cursor: "Cursor") -> None:
        self.cursor = cursor
        self._releasing: Future[None] | None = None
        self._told: dict[int, int] = {}

    def advance(self, positions: Mapping[int, int]) -> None:
        """See Cursor.advance. The same positions again cost nothing."""
        if positions != self._told:
            self._told = dict(positions)
            background_loop().loop.call_soon_threadsafe(self.cursor.advance, self._told)

    def check(self) -> None:
        """See Cursor.check."""
        self.cursor.check()

    @property
    def released(self) -> bool:
        """Whether the cursor is released, or will be soon."""
        return self._releasing is not None

    def release(self, timeout_s: float = 10.0) -> None:
        """See Cursor.release. Never raises: a query that ends could not act on an error. A signal
        handler may call this while the interrupted thread is in it: both wait for the same end."""
        try:
            if self._releasing is None:
                self._releasing = background_loop().start(self.cursor.release(timeout_s))
            self._releasing.result()
        except (errors.LedgerError, RuntimeError) as error:
            _log.warning("a subscription was not released: %s", error)
