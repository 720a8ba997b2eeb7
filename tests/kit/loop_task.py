"""A task's writing on an event loop: what TaskWriter (topic/write.py) does in a task's thread, for
tests (and the simulation) that are on the loop themselves. Rows, entries and ledgers are made by
the product's BatchEncoder and EntrySender."""

from dataclasses import replace
from typing import Any

from spark_ledger.topic.client import TopicClient
from spark_ledger.topic.log.intents import Intent
from spark_ledger.topic.log.topics import TopicInfo
from spark_ledger.topic.write import (
    DEFAULT_SETTINGS,
    TaskResult,
    TaskSettings,
    inline_segments,
)


class LoopTask:
    """One task attempt. Methods, arguments and errors are TaskWriter's."""

    def __init__(
        self,
        client: TopicClient,
        topic: TopicInfo,
        intent: Intent,
        *,
        task_index: int,
        attempt: int = 0,
        partitions: int | None = None,
        settings: TaskSettings = DEFAULT_SETTINGS,
    ) -> None:
        self._nothing = TaskResult(topic.id, intent.id, task_index, attempt)
        self._encoder = client.encoder(topic, task_index, partitions, settings)
        self._sender = client.sender(topic, intent, settings)
        self._inline_bytes_max = settings.inline_bytes_max

    async def write(self, keys: Any, values: Any, **columns: Any) -> None:
        for entry in self._encoder.add(keys, values, **columns):
            await self._sender.send(entry)

    async def finish(self) -> TaskResult:
        small = self._encoder.flush_small(self._inline_bytes_max)
        if small is not None:
            return replace(self._nothing, segments=inline_segments(small))
        for entry in self._encoder.flush():
            await self._sender.send(entry)
        segments = await self._sender.finish()
        return replace(self._nothing, segments=segments, creators=dict(self._sender.creators))

    async def abort(self) -> None:
        await self._sender.abort()
