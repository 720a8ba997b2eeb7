"""Trimming a topic's log: commits that two checkpoints have are deleted.

Always true: only commits below the *previous* checkpoint go, oldest first, by number and never by
listing, so the newest never goes; each step is one multi with the checkpoint's record, set at the
version that was read: a record that moved on meanwhile stops the step, and `trimmed` says exactly
what is gone (hazards 1, 6, 7).
"""

from dataclasses import replace

from spark_ledger.metadata import paths
from spark_ledger.metadata.store import (
    Delete,
    MetadataStore,
    MultiFailed,
    NoNode,
    Operation,
    OutcomeUnknown,
    Set,
)
from spark_ledger.topic import checkpoint_record
from spark_ledger.topic.checkpoint_record import CheckpointRecord
from spark_ledger.topic.store_calls import TRIES_MAX, read

DELETED_AT_ONCE = 256
_LOG_VERSION = 0  # commits are written once


async def trim_log(store: MetadataStore, topic_id: str) -> CheckpointRecord | None:
    """Delete what may go; the checkpoint's record as it is then (None: there is none).

    Another process that trims or publishes at the same time makes this one stop, with nothing
    lost. Raises store.StoreUnavailable.
    """
    path = paths.topic_checkpoint(topic_id)
    record: CheckpointRecord | None = None
    for _ in range(TRIES_MAX):
        await store.sync(path)
        node = await read(store, path)
        if node is None:
            return None
        record, version = checkpoint_record.decode(node.value), node.version
        try:
            while record.trimmed < record.previous:
                record = await _trim_some(store, topic_id, record, version)
                version += 1
            return record
        except OutcomeUnknown:
            continue
        except MultiFailed:
            return record
    return record


async def _trim_some(
    store: MetadataStore, topic_id: str, record: CheckpointRecord, version: int
) -> CheckpointRecord:
    end = min(record.previous, record.trimmed + DELETED_AT_ONCE)
    trimmed = replace(record, trimmed=end)
    mark = Set(paths.topic_checkpoint(topic_id), checkpoint_record.encode(trimmed), version)
    doomed = [paths.topic_log(topic_id, number) for number in range(record.trimmed, end)]
    operations: list[Operation] = [mark, *(Delete(path, _LOG_VERSION) for path in doomed)]
    try:
        await store.multi(operations)
    except MultiFailed as failed:
        if failed.index == 0 or not isinstance(failed.cause, NoNode):
            raise
        there = [path for path in doomed if await read(store, path) is not None]  # somebody's hand
        await store.multi([mark, *(Delete(path, _LOG_VERSION) for path in there)])
    return trimmed
