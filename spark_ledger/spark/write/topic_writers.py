"""One task's rows to its topics: those that each row or the option names, and the bad records'.

Always true: the rows of a topic are written in their order, each to one topic; with a topic for bad
records every row is written either where it belongs or there, in the same commit; what all topics
hold in memory together is bounded by `maxInFlightBytes`.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

import pyarrow as pa

from spark_ledger.metadata.store_calls import each
from spark_ledger.spark.rows.written import WrittenRows, by_topic, misfits, told_apart, topics_named
from spark_ledger.spark.write.job import (
    TOPICS_AT_ONCE,
    WriteJob,
    WrittenTopic,
    policies_of,
    too_many_topics,
)
from spark_ledger.topic.blocking import BlockingTopics
from spark_ledger.topic.commit.draft import TOPICS_MAX
from spark_ledger.topic.entry.routing import Routing
from spark_ledger.topic.log.intents import Intent
from spark_ledger.topic.schema.records import SchemaVersion
from spark_ledger.topic.write import TaskResult, TaskSettings, TaskWriter

ABORT_S = 5.0

Find = Callable[[Sequence[str]], Mapping[str, WrittenTopic]]


@dataclass(frozen=True, slots=True)
class Task:
    """Which task writes, under which intent; `about` is told of each bad record."""

    intent: Intent
    index: int
    attempt: int
    about: Mapping[str, str]


@dataclass(frozen=True, slots=True)
class _OneTopic:
    topic: WrittenTopic
    writer: TaskWriter
    version: SchemaVersion | None = None


class TopicWriters:
    """For one thread. `find` finds topics by their short names, or makes them."""

    def __init__(self, cluster: BlockingTopics, job: WriteJob, task: Task, find: Find) -> None:
        self._cluster = cluster
        self._job = job
        self._task = task
        self._find = find
        self._open: dict[str, _OneTopic] = {}
        self._entry_bytes_max = cluster.client.ledgers.config.entry_bytes_max

    def write(self, rows: WrittenRows) -> None:
        """Raises NullTopic, TopicNameInvalid, MessageTooBig, PartitionInvalid (unless there is a
        topic for bad records), SchemaIncompatible and the others of a schema,
        CommitOverTooManyTopics, and what finding a topic and TaskWriter.write raise."""
        if rows.topics is None:
            self._write_to(self._job.options.target, rows)
            return
        aside = self._job.options.bad_records_topic
        if aside is not None:
            rows = self._set_aside(rows, misfits(rows, entry_bytes_max=None, aside=aside), {})
        if not len(rows):
            return
        self._open_all(topics_named(rows))
        for name, some in by_topic(rows):
            self._write_to(name, some)
            self._keep_in_bounds()

    def finish(self) -> tuple[TaskResult, ...]:
        """What was written to each topic; all of it is acknowledged."""
        ending = [one.writer.finishing() for one in self._open.values()]
        return tuple(wait() for wait in ending)

    @property
    def versions(self) -> dict[str, frozenset[int]]:
        """By topic's id the version of its schema that the rows are written under, if any."""
        under = {writer.topic.info.id: writer.version for writer in self._open.values()}
        return {id_: frozenset({v.number}) for id_, v in under.items() if v is not None}

    def abort(self) -> None:
        """Forget what was written and close the process's ledgers that no task writes to, as far as
        that can be done in ABORT_S: Spark ends a Python worker whose task has failed."""
        for one in self._open.values():
            one.writer.abort()
        self._cluster.run(self._cluster.client.cache.close(ABORT_S))

    def _write_to(self, name: str, rows: WrittenRows) -> None:
        if not len(rows):
            return
        one = self._one(name)
        rows = self._fitting(one, rows)
        if len(rows):
            one.writer.write(
                rows.keys,
                rows.values,
                event_times=rows.event_times,
                headers=rows.headers,
                partitions=rows.partitions,
            )

    def _fitting(self, one: _OneTopic, rows: WrittenRows) -> WrittenRows:
        """The rows that can be written, with their values as the topic has them."""
        values, aside = self._job.values, self._job.options.bad_records_topic is not None
        about = {"topic": one.topic.info.name.short}
        if values is not None:
            assert isinstance(rows.values, pa.RecordBatch), "a typed row's payload is columns"
            if aside:
                rows = self._set_aside(rows, values.misfits(rows.values, one.version), about)
            rows = replace(rows, values=values.values(rows.values, one.version))
        if not aside:
            return rows
        reasons = misfits(
            rows, entry_bytes_max=self._entry_bytes_max, partitions=one.topic.partitions
        )
        return self._set_aside(rows, reasons, about)

    def _set_aside(
        self, rows: WrittenRows, reasons: pa.Array | None, about: Mapping[str, str]
    ) -> WrittenRows:
        """The good rows; the others are written to the topic for such."""
        if reasons is None:
            return rows
        good, bad = told_apart(rows, reasons, {**about, **self._task.about})
        name = self._job.options.bad_records_topic
        assert name is not None, "rows are set aside where there is a topic for it"
        writer = self._one(name).writer
        writer.write(bad.keys, bad.values, event_times=bad.event_times, headers=bad.headers)
        return good

    def _one(self, name: str) -> _OneTopic:
        self._open_all([name])
        return self._open[name]

    def _open_all(self, names: Sequence[str]) -> None:
        """Writers to these topics, too; none is made where they are more than a commit takes."""
        new = [name for name in names if name not in self._open]
        count = len(self._open) + len(new)
        if count > TOPICS_MAX:
            what = (
                f"a task has rows for {count} topics or more, the last is '{new[-1]}'; a commit"
                f" takes {TOPICS_MAX}"
            )
            ids = [one.topic.info.id for one in self._open.values()]
            raise self._cluster.run(too_many_topics(self._cluster.client, what, ids))
        if not new:
            return
        found = self._find(new)
        versions = self._versions([found[name] for name in new if not self._is_bad(name)])
        for name in new:
            self._open[name] = self._opened(name, found[name], versions.get(found[name].info.id))

    def _versions(self, topics: Sequence[WrittenTopic]) -> Mapping[str, SchemaVersion | None]:
        """By topic's id the version that typed rows are written under."""
        values, schemas = self._job.values, self._cluster.client.schemas
        if values is None or not topics:
            return {}

        async def version(topic: WrittenTopic) -> SchemaVersion | None:
            return await values.version(schemas, topic.info)

        found = self._cluster.run(each(version, topics, TOPICS_AT_ONCE))
        return {topic.info.id: one for topic, one in zip(topics, found, strict=True)}

    def _is_bad(self, name: str) -> bool:
        return name == self._job.options.bad_records_topic

    def _opened(self, name: str, topic: WrittenTopic, version: SchemaVersion | None) -> _OneTopic:
        job, bad = self._job, self._is_bad(name)
        settings = TaskSettings(
            compression=job.options.compression,
            routing=Routing.HASH if bad else Routing(job.plan.routing),
            inflight_bytes_max=self._share_bytes(bad),
            policies=policies_of(job.options, topic.info.policies),
        )
        if job.values is not None and not bad:
            settings = replace(settings, schema_version=job.values.schema_version(version))
        writer = self._cluster.task_writer(
            topic.info,
            self._task.intent,
            task_index=self._task.index,
            attempt=self._task.attempt,
            partitions=topic.partitions,
            settings=settings,
        )
        return _OneTopic(topic, writer, version)

    def _share_bytes(self, bad: bool) -> int:
        """What one topic's writer may hold. One of many: a quarter (see _keep_in_bounds)."""
        options = self._job.options
        whole = options.max_in_flight_bytes
        if options.topic is None or bad:
            return whole // 4
        return whole if options.bad_records_topic is None else whole - whole // 4

    def _keep_in_bounds(self) -> None:
        """When all hold more than three quarters of what they may, so that one that takes its
        quarter could be too much, those that hold most are written, and their acknowledgements
        waited for, until it is half; and their last copies too, which a bookie that hangs keeps
        waiting, if it is three quarters still."""
        whole = self._job.options.max_in_flight_bytes
        if self._held_bytes() <= whole * 3 // 4:
            return
        self._largest_first(lambda writer: writer.drain(), whole // 2)
        self._largest_first(lambda writer: writer.settle(), whole * 3 // 4)

    def _largest_first(self, wait: Callable[[TaskWriter], None], bound: int) -> None:
        """One after the other until all hold so little."""
        writers = [one.writer for one in self._open.values()]
        for writer in sorted(writers, key=lambda writer: -writer.held_bytes):
            if self._held_bytes() <= bound:
                return
            wait(writer)

    def _held_bytes(self) -> int:
        return sum(one.writer.held_bytes for one in self._open.values())
