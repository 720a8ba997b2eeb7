"""Writes one task's rows to their topics: the topic that the row or the option names, or the topic
for bad records.

Always true: rows of a topic keep their order. Each row is written once: to its topic or, if the row
is bad, to the topic for bad records, in the same commit. `maxInFlightBytes` bounds the memory of
all topics' writers together.
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
    topic_names,
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

FindTopics = Callable[[Sequence[str]], Mapping[str, WrittenTopic]]


@dataclass(frozen=True, slots=True)
class Task:
    """The task that writes, and the intent under which it makes ledgers; each bad record also has
    the `bad_record_headers`."""

    intent: Intent
    index: int
    attempt: int
    bad_record_headers: Mapping[str, str]


@dataclass(frozen=True, slots=True)
class _OpenTopic:
    topic: WrittenTopic
    writer: TaskWriter
    version: SchemaVersion | None = None


class TopicWriters:
    """The writers of one thread. `find` finds topics by their short names, or makes them."""

    def __init__(
        self, cluster: BlockingTopics, job: WriteJob, task: Task, find: FindTopics
    ) -> None:
        self._cluster = cluster
        self._job = job
        self._task = task
        self._find = find
        self._open: dict[str, _OpenTopic] = {}
        self._entry_bytes_max = cluster.client.ledgers.config.entry_bytes_max

    def write(self, rows: WrittenRows) -> None:
        """Raises NullTopic, TopicNameInvalid, MessageTooBig, PartitionInvalid (unless there is a
        topic for bad records), SchemaIncompatible and other errors of a schema,
        CommitOverTooManyTopics, and the errors of `find` and TaskWriter.write."""
        if rows.topics is None:
            self._write_to(self._job.options.target, rows)
            return
        bad_records_topic = self._job.options.bad_records_topic
        if bad_records_topic is not None:
            reasons = misfits(rows, entry_bytes_max=None, bad_records_topic=bad_records_topic)
            rows = self._write_bad_rows(rows, reasons, {})
        if not len(rows):
            return
        self._open_all(topic_names(rows))
        for name, rows_of_topic in by_topic(rows):
            self._write_to(name, rows_of_topic)
            self._bound_memory()

    def finish(self) -> tuple[TaskResult, ...]:
        """The results for each topic, after all rows are acknowledged."""
        waits = [topic.writer.start_finish() for topic in self._open.values()]
        return tuple(wait() for wait in waits)

    @property
    def versions(self) -> dict[str, frozenset[int]]:
        """The schema version of each topic's typed rows, by the topic's id, without topics that
        have no version."""
        versions = {opened.topic.info.id: opened.version for opened in self._open.values()}
        return {id_: frozenset({v.number}) for id_, v in versions.items() if v is not None}

    def abort(self) -> None:
        """Abandon the written rows. Close the process's ledgers to which no task writes, as many as
        ABORT_S allows: Spark ends a Python worker whose task has failed."""
        for opened in self._open.values():
            opened.writer.abort()
        self._cluster.run(self._cluster.client.cache.close(ABORT_S))

    def _write_to(self, name: str, rows: WrittenRows) -> None:
        if not len(rows):
            return
        target = self._open_topic(name)
        rows = self._writable(target, rows)
        if len(rows):
            target.writer.write(
                rows.keys,
                rows.values,
                event_times=rows.event_times,
                headers=rows.headers,
                partitions=rows.partitions,
            )

    def _writable(self, target: _OpenTopic, rows: WrittenRows) -> WrittenRows:
        """The rows that can be written, with their values as the topic has them. If there is a
        topic for bad records, writes all other rows to that topic."""
        values = self._job.values
        has_bad_records_topic = self._job.options.bad_records_topic is not None
        extra_headers = {"topic": target.topic.info.name.short}
        if values is not None:
            assert isinstance(rows.values, pa.RecordBatch), "a typed row's payload is columns"
            if has_bad_records_topic:
                rows = self._write_bad_rows(
                    rows, values.misfits(rows.values, target.version), extra_headers
                )
            rows = replace(rows, values=values.values(rows.values, target.version))
        if not has_bad_records_topic:
            return rows
        reasons = misfits(
            rows, entry_bytes_max=self._entry_bytes_max, partitions=target.topic.partitions
        )
        return self._write_bad_rows(rows, reasons, extra_headers)

    def _write_bad_rows(
        self, rows: WrittenRows, reasons: pa.Array | None, extra_headers: Mapping[str, str]
    ) -> WrittenRows:
        """Write the rows that have a reason to the topic for bad records; returns the good rows."""
        if reasons is None:
            return rows
        headers = {**extra_headers, **self._task.bad_record_headers}
        good, bad = good_and_bad(rows, reasons, headers)
        name = self._job.options.bad_records_topic
        assert name is not None, "bad rows are looked for only if there is a topic for them"
        writer = self._open_topic(name).writer
        writer.write(bad.keys, bad.values, event_times=bad.event_times, headers=bad.headers)
        return good

    def _open_topic(self, name: str) -> _OpenTopic:
        self._open_all([name])
        return self._open[name]

    def _open_all(self, names: Sequence[str]) -> None:
        """Open writers for the topics that have no writer. If there are more topics than a commit
        takes, opens no writer and raises CommitOverTooManyTopics."""
        new = [name for name in names if name not in self._open]
        count = len(self._open) + len(new)
        if count > TOPICS_MAX:
            text = (
                f"a task has rows for {count} topics or more, the last is '{new[-1]}'; a commit"
                f" takes {TOPICS_MAX}"
            )
            ids = [topic.topic.info.id for topic in self._open.values()]
            raise self._cluster.run(too_many_topics(self._cluster.client, text, ids))
        if not new:
            return
        topics = self._find(new)
        versions = self._versions(
            [topics[name] for name in new if not self._is_bad_records_topic(name)]
        )
        for name in new:
            version = versions.get(topics[name].info.id)
            self._open[name] = self._new_writer(name, topics[name], version)

    def _versions(self, topics: Sequence[WrittenTopic]) -> Mapping[str, SchemaVersion | None]:
        """The schema version for typed rows, by the topic's id; empty for rows of bytes."""
        values, schemas = self._job.values, self._cluster.client.schemas
        if values is None or not topics:
            return {}

        async def version(topic: WrittenTopic) -> SchemaVersion | None:
            return await values.version(schemas, topic.info)

        versions = self._cluster.run(call_each(version, topics, TOPICS_AT_ONCE))
        ids = (topic.info.id for topic in topics)
        return dict(zip(ids, versions, strict=True))

    def _is_bad_records_topic(self, name: str) -> bool:
        return name == self._job.options.bad_records_topic

    def _new_writer(
        self, name: str, topic: WrittenTopic, version: SchemaVersion | None
    ) -> _OpenTopic:
        job, is_bad_records_topic = self._job, self._is_bad_records_topic(name)
        settings = TaskSettings(
            compression=job.options.compression,
            routing=Routing.HASH if is_bad_records_topic else Routing(job.plan.routing),
            inflight_bytes_max=self._bytes_max(is_bad_records_topic),
            policies=policies_of(job.options, topic.info.policies),
        )
        if job.values is not None and not is_bad_records_topic:
            settings = replace(settings, schema_version=job.values.schema_version(version))
        writer = self._cluster.task_writer(
            topic.info,
            self._task.intent,
            task_index=self._task.index,
            attempt=self._task.attempt,
            partitions=topic.partitions,
            settings=settings,
        )
        return _OpenTopic(topic, writer, version)

    def _bytes_max(self, is_bad_records_topic: bool) -> int:
        """The bytes that one topic's writer may hold: a quarter of maxInFlightBytes for bad
        records, and also if rows name their topics (see _bound_memory)."""
        options = self._job.options
        total = options.max_in_flight_bytes
        if options.topic is None or is_bad_records_topic:
            return total // 4
        return total if options.bad_records_topic is None else total - total // 4

    def _bound_memory(self) -> None:
        """Keep all writers together within maxInFlightBytes. Above three quarters of this limit, a
        writer that fills its quarter could exceed the limit. So drain the writers (write, and wait
        for acks), the writer with most bytes first, until all together hold at most half. If the
        writers still hold more than three quarters, also wait for the last copies of their entries,
        which a bookie that hangs may delay."""
        total = self._job.options.max_in_flight_bytes
        if self._held_bytes() <= total * 3 // 4:
            return
        self._call_largest_first(lambda writer: writer.drain(), total // 2)
        self._call_largest_first(lambda writer: writer.drain_copies(), total * 3 // 4)

    def _call_largest_first(self, wait: Callable[[TaskWriter], None], bound: int) -> None:
        """Call `wait` for the writers, the writer with most bytes first, until all together hold at
        most `bound`."""
        writers = [opened.writer for opened in self._open.values()]
        for writer in sorted(writers, key=lambda writer: -writer.held_bytes):
            if self._held_bytes() <= bound:
                return
            wait(writer)

    def _held_bytes(self) -> int:
        return sum(opened.writer.held_bytes for opened in self._open.values())
