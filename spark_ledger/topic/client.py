"""The topic layer of one process and cluster, wired: what drivers, tasks, the CLI and plain Python
use. Nothing is decided here; each part is in its own file."""

import asyncio
import random
from collections.abc import AsyncGenerator, Callable, Sequence

from spark_ledger.ledger.client import LedgerStore
from spark_ledger.topic import slice_reader
from spark_ledger.topic.batch_encoder import BatchEncoder
from spark_ledger.topic.blobs import Blobs
from spark_ledger.topic.commit import CommitKind, CommitOutcome, TxnKey, commit
from spark_ledger.topic.entry_sender import EntrySender
from spark_ledger.topic.follower import TopicFollower
from spark_ledger.topic.intents import Intent, Intents
from spark_ledger.topic.janitor import Janitor
from spark_ledger.topic.ledger_cache import LedgerCache
from spark_ledger.topic.read_plan import ReadTask
from spark_ledger.topic.slice_reader import Rows
from spark_ledger.topic.task_writer import TaskIdentity, TaskResult, TaskWriter
from spark_ledger.topic.topic_log import TopicLog
from spark_ledger.topic.topics import TopicInfo, Topics


class TopicClient:
    """All on one event loop. `now_ms` is the clock that rows are stamped with."""

    def __init__(self, ledgers: LedgerStore, rng: random.Random, now_ms: Callable[[], int]) -> None:
        self.ledgers = ledgers
        self.store = ledgers.metadata
        self.topics = Topics(self.store, rng)
        self.intents = Intents(self.store, ledgers, rng)
        self.cache = LedgerCache(ledgers, self.intents)
        self.blobs = Blobs(ledgers, self.cache)
        self.janitor = Janitor(self.store, ledgers, rng)
        self._rng = rng
        self._now_ms = now_ms
        self._logs: dict[str, TopicLog] = {}
        self._followers: dict[str, asyncio.Task[TopicFollower]] = {}

    def log(self, topic_id: str) -> TopicLog:
        """The topic's log; the same object for the same topic, so folds are incremental."""
        if topic_id not in self._logs:
            self._logs[topic_id] = TopicLog(self.store, topic_id)
        return self._logs[topic_id]

    async def follow(self, topic_id: str) -> TopicFollower:
        """The topic's follower, started; one for each topic. A failed start is tried again."""
        task = self._followers.get(topic_id)
        if task is None or (task.done() and (task.cancelled() or task.exception() is not None)):
            task = asyncio.get_running_loop().create_task(self._start_follower(topic_id))
            self._followers[topic_id] = task
        return await asyncio.shield(task)

    def task_writer(
        self,
        topic: TopicInfo,
        intent: Intent,
        *,
        task_index: int,
        attempt: int = 0,
        compression: str = "none",
        partitions: int | None = None,
    ) -> TaskWriter:
        """A writer for one task attempt, on ledgers of this process's cache. `partitions` is
        today's number of them where the topic has grown. Raises errors.BadConfig."""
        encoder = self.encoder(topic, task_index, compression, partitions)
        identity = TaskIdentity(topic.id, intent.id, task_index, attempt)
        return TaskWriter(identity, encoder, self.sender(topic, intent))

    def encoder(
        self, topic: TopicInfo, task_index: int, compression: str, partitions: int | None = None
    ) -> BatchEncoder:
        """What turns a task's rows into entries. Raises errors.BadConfig."""
        count = partitions or topic.partitions
        return BatchEncoder(
            count,
            task_index % count,
            self._now_ms,
            compression=compression,
            entry_bytes_max=self.ledgers.config.entry_bytes_max,
        )

    def sender(self, topic: TopicInfo, intent: Intent) -> EntrySender:
        """What sends a task's entries; call it on the loop."""
        return EntrySender(self.cache, self.intents, intent, topic.id, topic.policies)

    async def commit(
        self,
        topic_id: str,
        txn: TxnKey,
        intent_id: str,
        results: Sequence[TaskResult],
        *,
        finish_intent: bool = False,
        timeout_s: float = 60.0,
    ) -> CommitOutcome:
        """See commit.commit. With `finish_intent` the intent is done afterwards in any case."""
        outcome = await commit(
            self.store,
            self.log(topic_id),
            txn=txn,
            intent_id=intent_id,
            results=results,
            rng=self._rng,
            finish_intent=finish_intent,
            timeout_s=timeout_s,
        )
        if finish_intent and outcome.kind is CommitKind.ALREADY:
            await self.intents.finish(intent_id)
        return outcome

    def read(self, task: ReadTask) -> AsyncGenerator[Rows, None]:
        """See slice_reader.read_task."""
        return slice_reader.read_task(self.ledgers, task)

    async def close(self) -> None:
        """Close cached ledgers and followers; the ledger store stays open."""
        for task in self._followers.values():
            task.cancel()
        started = await asyncio.gather(*self._followers.values(), return_exceptions=True)
        for follower in started:
            if isinstance(follower, TopicFollower):
                await follower.close()
        self._followers.clear()
        await self.cache.close()

    async def _start_follower(self, topic_id: str) -> TopicFollower:
        follower = TopicFollower(self.log(topic_id))
        await follower.start()
        return follower
