"""One task's rows to its topics: those that each row or the option names, and the bad records'.

Always true: the rows of a topic are written in their order, each to one topic; with a topic for bad
records every row is written either to its own topic or to that one, in the same commit;
`maxInFlightBytes` bounds the memory of all topics' writers together.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

import pyarrow as pa

from spark_ledger.metadata.store_calls import call_each
from spark_ledger.spark.rows.written import (
    WrittenRows,
    by_topic,
    good_and_bad,
    misfits,
    topics_named,
)
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
    """The task that writes, and its intent; each bad record also has the `extra_headers`."""

    intent: Intent
    index: int
    attempt: int
    extra_headers: Mapping[str, str]


@dataclass(frozen=True, slots=True)
class _OneTopic:
    topic: WrittenTopic
    writer: TaskWriter
    version: SchemaVersion | None = None


class TopicWriters:
    """The writers of one thread. `find` finds topics by their short names, or makes them."""

    def __init__(self, cluster: BlockingTopics, job: WriteJob, task: Task, find: Find) -> None:
        self._cluster = cluster
        self._job = job
        self._task = task
        self._find = find
        self._open: dict[str, _OneTopic] = {}
        self._entry_bytes_max = cluster.client.ledgers.config.entry_bytes_max

    def write(self, rows: WrittenRows) -> None:
        """Raises NullTopic, TopicNameInvalid, MessageTooBig, PartitionInvalid (unless there is a
        topic for bad records), SchemaIncompatible and other errors of a schema,
        CommitOverTooManyTopics, and as `find` and TaskWriter.write."""
        if rows.topics is None:
            self._write_to(self._job.options.target, rows)
            return
        aside = self._job.options.bad_records_topic
        if aside is not None:
            rows = self._set_aside(rows, misfits(rows, entry_bytes_max=None, aside=aside), {})
        if not len(rows):
            return
        self._open_all(topics_named(rows))
        for name, rows_of_topic in by_topic(rows):
            self._write_to(name, rows_of_topic)
            self._keep_in_bounds()

    def finish(self) -> tuple[TaskResult, ...]:
        """The results for each topic, once all rows are acknowledged."""
        ending = [opened.writer.finishing() for opened in self._open.values()]
        return tuple(wait() for wait in ending)

    @property
    def versions(self) -> dict[str, frozenset[int]]:
        """By topic's id the schema version under which its rows are written, if there is one."""
        under = {writer.topic.info.id: writer.version for writer in self._open.values()}
        return {id_: frozenset({v.number}) for id_, v in under.items() if v is not None}

    def abort(self) -> None:
        """Forget the written rows and close the process's ledgers that no task writes to, as many
        as ABORT_S allows: Spark ends a Python worker whose task has failed."""
        for opened in self._open.values():
            opened.writer.abort()
        self._cluster.run(self._cluster.client.cache.close(ABORT_S))

    def _write_to(self, name: str, rows: WrittenRows) -> None:
        if not len(rows):
            return
        opened = self._one(name)
        rows = self._fitting(opened, rows)
        if len(rows):
            opened.writer.write(
                rows.keys,
                rows.values,
                event_times=rows.event_times,
                headers=rows.headers,
                partitions=rows.partitions,
            )

    def _fitting(self, opened: _OneTopic, rows: WrittenRows) -> WrittenRows:
        """The rows that can be written, with their values as the topic has them."""
        values, aside = self._job.values, self._job.options.bad_records_topic is not None
        extra_headers = {"topic": opened.topic.info.name.short}
        if values is not None:
            assert isinstance(rows.values, pa.RecordBatch), "a typed row's payload is columns"
            if aside:
                rows = self._set_aside(
                    rows, values.misfits(rows.values, opened.version), extra_headers
                )
            rows = replace(rows, values=values.values(rows.values, opened.version))
        if not aside:
            return rows
        reasons = misfits(
            rows, entry_bytes_max=self._entry_bytes_max, partitions=opened.topic.partitions
        )
        return self._set_aside(rows, reasons, extra_headers)

    def _set_aside(
        self, rows: WrittenRows, reasons: pa.Array | None, extra_headers: Mapping[str, str]
    ) -> WrittenRows:
        """The good rows; the bad ones are written to the topic for bad records."""
        if reasons is None:
            return rows
        good, bad = good_and_bad(rows, reasons, {**extra_headers, **self._task.extra_headers})
        name = self._job.options.bad_records_topic
        assert name is not None, "rows are set aside only with a topic for bad records"
        writer = self._one(name).writer
        writer.write(bad.keys, bad.values, event_times=bad.event_times, headers=bad.headers)
        return good

    def _one(self, name: str) -> _OneTopic:
        self._open_all([name])
        return self._open[name]

    def _open_all(self, names: Sequence[str]) -> None:
        """Open writers to these topics too; none if a commit does not take so many topics."""
        new = [name for name in names if name not in self._open]
        count = len(self._open) + len(new)
        if count > TOPICS_MAX:
            what = (
                f"a task has rows for {count} topics or more, the last is '{new[-1]}'; a commit"
                f" takes {TOPICS_MAX}"
            )
            ids = [opened.topic.info.id for opened in self._open.values()]
            raise self._cluster.run(too_many_topics(self._cluster.client, what, ids))
        if not new:
            return
        topics = self._find(new)
        versions = self._versions([topics[name] for name in new if not self._is_bad(name)])
        for name in new:
            self._open[name] = self._opened(name, topics[name], versions.get(topics[name].info.id))

    def _versions(self, topics: Sequence[WrittenTopic]) -> Mapping[str, SchemaVersion | None]:
        """By topic's id the schema version for typed rows."""
        values, schemas = self._job.values, self._cluster.client.schemas
        if values is None or not topics:
            return {}

        async def version(topic: WrittenTopic) -> SchemaVersion | None:
            return await values.version(schemas, topic.info)

        versions = self._cluster.run(call_each(version, topics, TOPICS_AT_ONCE))
        return {topic.info.id: under for topic, under in zip(topics, versions, strict=True)}

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
        """The bytes that one topic's writer may hold: a quarter if there are many writers (see
        _keep_in_bounds)."""
        options = self._job.options
        whole = options.max_in_flight_bytes
        if options.topic is None or bad:
            return whole // 4
        return whole if options.bad_records_topic is None else whole - whole // 4

    def _keep_in_bounds(self) -> None:
        """If all writers together hold more than three quarters of their bound, one that takes its
        quarter could exceed it. Then drain the writers that hold most (write, and wait for acks)
        until all hold half. If they still hold three quarters, wait for last copies too: a bookie
        that hangs may delay these."""
        whole = self._job.options.max_in_flight_bytes
        if self._held_bytes() <= whole * 3 // 4:
            return
        self._largest_first(lambda writer: writer.drain(), whole // 2)
        self._largest_first(lambda writer: writer.settle(), whole * 3 // 4)

    def _largest_first(self, wait: Callable[[TaskWriter], None], bound: int) -> None:
        """Call `wait` for one writer after the other until all together hold at most `bound`."""
        writers = [opened.writer for opened in self._open.values()]
        for writer in sorted(writers, key=lambda writer: -writer.held_bytes):
            if self._held_bytes() <= bound:
                return
            wait(writer)

    def _held_bytes(self) -> int:
        return sum(opened.writer.held_bytes for opened in self._open.values())
