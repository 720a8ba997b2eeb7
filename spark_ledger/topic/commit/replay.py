"""Decides about a query's batch whose number its transaction record has reached. Pure.

After a crash Spark repeats the newest batch of its checkpoint, with the same rows: then the record
has that number, and nothing is to be done. But a query whose checkpoint was restored, or lost its
newest files, plans new batches under numbers that the record has already passed, and their rows
were never committed. Always true: a batch counts as done only if the record has its number with the
same rows, or if the user's option demands it; any other batch is refused, or committed again if the
option demands that (hazard 11)."""

from dataclasses import dataclass
from enum import Enum

from spark_ledger import errors
from spark_ledger.topic.log.records import NO_COMMIT, Content, TxnRecord

_CAUSES = (
    "the checkpoint was restored or lost files, the query was changed, its source was trimmed, the"
    " query gives other rows each time, or two writes have the same txnAppId and txnVersion"
)
_APPEND = (
    "onReplay=append writes these rows, although some may be there already, and goes on from here:"
    " the checkpoint that was the newest must not be used after that"
)
_DIFFERS = (
    "If the checkpoint is the newest one, onReplay=skip keeps what was committed. If it is an older"
    f" one, restore the newest; without one {_APPEND}."
)
_BEHIND = (
    "Restore the newest checkpoint, or start with a new one (and, in foreachBatch, a new txnAppId)."
    f" Without one {_APPEND}."
)


class OnReplay(Enum):
    """What happens to a batch whose number is recorded with other rows. Complete mode uses REPLACE.
    A batch job outside queries uses IGNORE: it writes nothing at or below the recorded version. The
    other members are the values of the option `onReplay`."""

    FAIL = "fail"
    SKIP = "skip"
    APPEND = "append"
    REPLACE = "replace"
    IGNORE = "ignore"


class TaskWork(Enum):
    """The work of a task on its rows."""

    WRITE = "write them"
    COMPARE = "count them and compute their fingerprint, and write none"


@dataclass(frozen=True, slots=True)
class QueryBatch:
    """A batch of a streaming query, or a job with a txnAppId, as its tasks counted it."""

    content: Content
    on_replay: OnReplay = OnReplay.FAIL


def work_of(record: TxnRecord, app_id: str, version: int, on_replay: OnReplay) -> TaskWork:
    """The work of a task of this batch, decided before the task takes a row. `record` was read
    after the run began. Raises errors.CheckpointBehind."""
    if record.version < version:
        return TaskWork.WRITE
    if on_replay is OnReplay.IGNORE:
        return TaskWork.COMPARE
    if record.version > version:
        check_not_behind(record, app_id, version, on_replay)
        return TaskWork.WRITE
    return TaskWork.COMPARE if on_replay in (OnReplay.FAIL, OnReplay.SKIP) else TaskWork.WRITE


def is_done(record: TxnRecord, app_id: str, version: int, batch: QueryBatch) -> bool:
    """Whether the batch counts as committed, now that the record has reached its number; if not,
    the caller commits it again. Raises errors.CheckpointBehind, errors.ReplayDiffers."""
    if batch.on_replay is OnReplay.IGNORE:
        return True
    if record.version > version:
        check_not_behind(record, app_id, version, batch.on_replay)
        return False
    if is_same_batch(record, batch.content):
        return True
    if batch.on_replay is not OnReplay.FAIL:
        return batch.on_replay is OnReplay.SKIP
    raise errors.ReplayDiffers(
        f"batch {version} of query {app_id} was committed with {_description(record)}, and has"
        f" {batch.content.rows} rows ({batch.content.fingerprint}) now: {_CAUSES}",
        _DIFFERS,
        recorded_version=record.version,
        recorded_rows=_rows(record),
        rows=batch.content.rows,
    )


def check_not_behind(record: TxnRecord, app_id: str, version: int, on_replay: OnReplay) -> None:
    """Raises errors.CheckpointBehind for a version below the recorded one, unless the user wants
    that version committed."""
    if record.version > version and on_replay is not OnReplay.APPEND:
        raise errors.CheckpointBehind(
            f"batch {version} of query {app_id} is behind batch {record.version}, the last that is"
            " committed: the checkpoint was restored or lost files, and the rows that it plans"
            " under numbers of committed batches may be other rows",
            _BEHIND,
            recorded_version=record.version,
        )


def is_same_batch(record: TxnRecord, content: Content) -> bool:
    """Whether these rows were committed, as far as the record shows. A record of an older version
    of this software has no fingerprint, and may lack the rows."""
    rows = _rows(record)
    if rows is not None and rows != content.rows:
        return False
    recorded = "" if record.content is None else record.content.fingerprint
    return recorded == content.fingerprint or not _are_comparable(recorded, content.fingerprint)


def _are_comparable(left: str, right: str) -> bool:
    """Whether neither is empty and both were made by the same algorithm."""
    return bool(left and right) and left.partition("-")[0] == right.partition("-")[0]


def _rows(record: TxnRecord) -> int | None:
    """How many rows were committed; None: the record does not have the number."""
    if record.content is not None:
        return record.content.rows
    topics = record.topics().values()
    if any(topic.number != NO_COMMIT and not topic.rows for topic in topics):
        return None  # left out of a large record
    return sum(sum(topic.rows.values()) for topic in topics)


def _description(record: TxnRecord) -> str:
    fingerprint = "" if record.content is None else f" ({record.content.fingerprint})"
    return f"{_rows(record)} rows{fingerprint}"
