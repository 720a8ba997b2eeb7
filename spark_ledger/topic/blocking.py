"""The topic layer for callers without an event loop: Spark's driver and tasks, the CLI, notebooks.

Always true: rows are decoded in the caller's thread, and entries are fetched on the background
loop, so both happen at once; at most AHEAD_BYTES and one more list of entries are fetched ahead.

A cursor's `advance` and `check` never wait, neither for a bookie nor for the metadata store
(hazard 38): the cursor writes in the background. A process has one cursor for each subscription and
run, because Spark may make a query's source again at any time.
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
from spark_ledger.metadata.store_calls import unavailable_while
from spark_ledger.process import OncePerProcess, background_loop, ledger_store
from spark_ledger.topic.client import TopicClient
from spark_ledger.topic.entry.key_filter import hashes_of
from spark_ledger.topic.log.intents import Intent
from spark_ledger.topic.log.topics import TopicInfo
from spark_ledger.topic.read.bad_entries import BadEntries, OnBadEntry
from spark_ledger.topic.read.plan import ReadTask
from spark_ledger.topic.read.row_blocks import Block, BlockJoiner
from spark_ledger.topic.read.slice_reader import FetchedEntry, FetchedRuns
from spark_ledger.topic.subscription.seek_target import End, SeekTarget
from spark_ledger.topic.task_reader import fetch_with_replans, with_chunks
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

AHEAD_BYTES = 4 * 1024 * 1024  # in memory twice: entries being decoded, and entries being fetched

_clients: OncePerProcess[tuple[str, float], "BlockingTopics"] = OncePerProcess()


def topics(
    service_url: str,
    outage_timeout_s: float = DEFAULTS.outage_timeout_s,
    *,
    fail_fast: bool = False,
) -> "BlockingTopics":
    """The process's client of the cluster, connected at first use. In an outage of the metadata
    store, the connection and all calls wait up to `outage_timeout_s` for the outage's end (0: the
    default). With `fail_fast` the connection waits only `connect_timeout_s`, so that a new query
    with a wrong URL fails soon.

    Raises errors.Unavailable, errors.BadConfig.
    """
    ledgers = ledger_store(service_url, _config(service_url, outage_timeout_s, fail_fast=fail_fast))
    return _clients.get(
        (service_url, outage_timeout_s),
        lambda: BlockingTopics(background_loop().run(_wire(ledgers))),
        lambda client: client.client.ledgers is ledgers,
    )


def _config(service_url: str, outage_timeout_s: float, *, fail_fast: bool) -> ClientConfig | None:
    if not outage_timeout_s:
        return None
    config = client_config(service_url=service_url, outage_timeout_s=outage_timeout_s)
    timeouts = {
        "connect_timeout_s": config.connect_timeout_s if fail_fast else outage_timeout_s,
        "metadata_timeout_s": min(config.metadata_timeout_s, outage_timeout_s),
    }
    return config.model_copy(update=timeouts)


async def _wire(ledgers: LedgerStore) -> TopicClient:
    rng = random.Random(os.urandom(16))
    return TopicClient(ledgers, rng, lambda: time.time_ns() // 1_000_000)


class BlockingTopics:
    """A TopicClient (`client`) for blocking callers. `run` runs a coroutine of the client and waits
    for its result: `b.run(b.client.topics.open("t"))`. It raises the coroutine's errors; an error
    of the metadata store becomes errors.Unavailable."""

    def __init__(self, client: TopicClient) -> None:
        self.client = client

    def run(self, coroutine: Coroutine[Any, Any, T]) -> T:
        with unavailable_while("a call on topics ran"):
            return background_loop().run(coroutine)

    @property
    def is_disconnected(self) -> bool:
        """Whether the process's connection to the metadata store is interrupted."""
        return self.client.store.session_state is not SessionState.CONNECTED

    def wait_for_store(self) -> None:
        """Wait for the end of an outage of the metadata store. Raises errors.Unavailable."""
        if self.is_disconnected:
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
        topic's present number of partitions, which may have grown. Raises errors.BadConfig."""

        async def make_sender() -> EntrySender:
            return self.client.sender(topic, intent, settings)

        encoder = self.client.encoder(topic, task_index, partitions, settings)
        empty_result = TaskResult(topic.id, intent.id, task_index, attempt)
        return TaskWriter(empty_result, encoder, self.run(make_sender()), settings)

    def read(
        self,
        task: ReadTask,
        columns: Collection[str] | None = None,
        *,
        keys: Sequence[bytes] | None = None,
        lossy: bool = False,
        on_bad_entry: OnBadEntry = OnBadEntry.FAIL,
    ) -> Iterator[Block]:
        """The task's rows; entries are fetched ahead. The rows of a partition are in order.
        `columns` are the columns to decode, by their names in entries (None: all columns). With
        `keys`, some entries that have none of these keys are left out. Raises as
        task_reader.fetch_with_replans, and errors.BadEntry if `on_bad_entry` is FAIL."""
        loop = background_loop()
        hashes = None if keys is None else hashes_of(keys)
        fetched_runs = fetch_with_replans(self.client, task, keys=hashes, lossy=lossy)
        read_ahead = _ReadAhead(with_chunks(self.client, task, fetched_runs, columns, lossy=lossy))
        bad = BadEntries(task.topic, on_bad_entry)
        try:
            while entries := self.run(read_ahead.next()):
                joining = BlockJoiner()
                for fetched in entries:
                    for block in fetched.blocks(columns, bad):
                        yield from joining.add(block)
                yield from joining.end()
        finally:
            bad.log_counts()
            loop.run(read_ahead.close())


class _ReadAhead:
    """Fetches the next entries while the caller decodes earlier entries. Belongs to the loop."""

    def __init__(self, runs: FetchedRuns) -> None:
        self._runs = runs
        self._next: asyncio.Task[list[FetchedEntry]] | None = None

    async def next(self) -> list[FetchedEntry]:
        """The next entries in order; an empty list at the end."""
        loop = asyncio.get_running_loop()
        entries = await (self._next or loop.create_task(self._fetch()))
        self._next = loop.create_task(self._fetch())
        return entries

    async def close(self) -> None:
        if self._next is not None:
            await cancel(self._next)
        await self._runs.aclose()

    async def _fetch(self) -> list[FetchedEntry]:
        """The next entries, in whole runs, until they reach AHEAD_BYTES."""
        entries: list[FetchedEntry] = []
        size = 0
        async for run in self._runs:
            entries += run
            size += sum(fetched.bytes for fetched in run)
            if size >= AHEAD_BYTES:
                break
        return entries


_log = logging.getLogger(__name__)

_cursors: OncePerProcess[tuple[str, str, str], "BlockingCursor"] = OncePerProcess()
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
    """Opens a cursor (Subscriptions.open). Until it is released, calls for the same run return the
    same cursor."""

    def open_anew() -> BlockingCursor:
        return BlockingCursor(
            topics.run(
                topics.client.subscriptions.open(
                    topic, name, query_id, run_id, start=start, partitions=partitions
                )
            )
        )

    _cursors.forget(lambda cursor: cursor.is_released)
    return _cursors.get((topic.id, name, run_id), open_anew, lambda cursor: not cursor.is_released)


def release_all() -> None:
    """Release every subscription of this process."""
    for cursor in _cursors.values():
        cursor.release()


class BlockingCursor:
    """A Cursor that may be used from any thread."""

    def __init__(self, cursor: "Cursor") -> None:
        self.cursor = cursor
        self._releasing: Future[None] | None = None
        self._last_positions: dict[int, int] = {}

    def advance(self, positions: Mapping[int, int]) -> None:
        """See Cursor.advance. A call with unchanged positions does nothing."""
        if positions != self._last_positions:
            self._last_positions = dict(positions)
            background_loop().loop.call_soon_threadsafe(self.cursor.advance, self._last_positions)

    def check(self) -> None:
        """See Cursor.check."""
        self.cursor.check()

    @property
    def is_released(self) -> bool:
        """Whether the cursor is released, or will be soon."""
        return self._releasing is not None

    def release(self, timeout_s: float = 10.0) -> None:
        """See Cursor.release. Never raises: a query that ends could not act on an error. A signal
        handler may call this method while the interrupted thread is in it: both calls wait for the
        same release."""
        try:
            if self._releasing is None:
                self._releasing = background_loop().start(self.cursor.release(timeout_s))
            self._releasing.result()
        except (errors.LedgerError, RuntimeError) as error:
            _log.warning("a subscription was not released: %s", error)
