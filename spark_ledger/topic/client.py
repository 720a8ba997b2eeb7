"""The topic layer of one process and cluster, wired: what drivers, tasks, the CLI and plain Python
use. It owns nothing that decides; each part is in its own file."""

import random
from collections.abc import AsyncIterator, Callable, Sequence

from spark_ledger.ledger.client import LedgerStore
from spark_ledger.topic import slice_reader
from spark_ledger.topic.commit import CommitOutcome, TxnKey
from spark_ledger.topic.follower import TopicFollower
from spark_ledger.topic.intents import Intent, Intents
from spark_ledger.topic.read_plan import ReadTask
from spark_ledger.topic.slice_reader import Rows
from spark_ledger.topic.task_writer import TaskResult, TaskWriter
from spark_ledger.topic.topic_log import TopicLog
from spark_ledger.topic.topics import TopicInfo, Topics


class TopicClient:
    """All on one event loop. `now_ms` is the clock that rows are stamped with."""

    topics: Topics
    intents: Intents

    def __init__(self, ledgers: LedgerStore, rng: random.Random, now_ms: Callable[[], int]) -> None:
        self.ledgers = ledgers
        self.store = ledgers.metadata

    def log(self, topic_id: str) -> TopicLog:
        """The topic's log; the same object for the same topic, so folds are incremental."""
        raise NotImplementedError

    async def follow(self, topic_id: str) -> TopicFollower:
        """The topic's follower, started; one for each topic."""
        raise NotImplementedError

    def task_writer(
        self,
        topic: TopicInfo,
        intent: Intent,
        *,
        task_index: int,
        attempt: int = 0,
        compression: str = "none",
    ) -> TaskWriter:
        """A writer for one task attempt, on a ledger of this process's cache."""
        raise NotImplementedError

    async def commit(
        self,
        topic_id: str,
        txn: TxnKey,
        intent_id: str,
        results: Sequence[TaskResult],
        *,
        finish_intent: bool = False,
    ) -> CommitOutcome:
        """See commit.commit."""
        raise NotImplementedError

    def read(self, task: ReadTask) -> AsyncIterator[Rows]:
        """See slice_reader.read_task."""
        return slice_reader.read_task(self.ledgers, task)

    async def close(self) -> None:
        """Close cached ledgers and followers; the ledger store stays open."""
        raise NotImplementedError
