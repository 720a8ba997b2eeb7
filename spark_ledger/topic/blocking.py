"""The topic layer for callers without an event loop: Spark's driver and tasks, the CLI, notebooks.

Always true: rows are encoded and decoded in the caller's thread; only sending and fetching run on
the background loop, so both go on at once; what is handed over and not yet sent is bounded.
"""

from collections.abc import Coroutine, Iterator
from typing import Any, TypeVar

import pyarrow as pa

from spark_ledger.topic.client import TopicClient
from spark_ledger.topic.intents import Intent
from spark_ledger.topic.read_plan import ReadTask
from spark_ledger.topic.slice_reader import Rows
from spark_ledger.topic.task_writer import TaskResult
from spark_ledger.topic.topics import TopicInfo

T = TypeVar("T")


class BlockingTopics:
    """One per (process, service URL); get it from `topics(service_url)`.

    `run(coroutine)` carries out anything of `.client` (a TopicClient) and waits:
    `b.run(b.client.topics.open("t"))`.
    """

    client: TopicClient

    def run(self, coroutine: Coroutine[Any, Any, T]) -> T:
        raise NotImplementedError

    def task_writer(
        self,
        topic: TopicInfo,
        intent: Intent,
        *,
        task_index: int,
        attempt: int = 0,
        compression: str = "none",
    ) -> "BlockingTaskWriter":
        raise NotImplementedError

    def read(self, task: ReadTask) -> Iterator[Rows]:
        """The task's rows in order, fetched ahead. Raises as slice_reader.read_slice."""
        raise NotImplementedError


class BlockingTaskWriter:
    """task_writer.TaskWriter for a thread of its own: same methods, same errors."""

    def write(self, keys: pa.Array | None, values: pa.Array) -> None:
        raise NotImplementedError

    def finish(self) -> TaskResult:
        raise NotImplementedError

    def abort(self) -> None:
        raise NotImplementedError


def topics(service_url: str) -> BlockingTopics:
    """The process's client of that cluster, connected at first use.

    Raises errors.Unavailable, errors.BadConfig.
    """
    raise NotImplementedError
