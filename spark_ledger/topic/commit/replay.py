"""Decides about a query's batch whose number is at or below the number in its transaction record.
Pure.

After a crash Spark repeats the newest batch of its checkpoint, with the same rows: then the record
has this number, and nothing is to be done. But a query whose checkpoint was restored, or lost its
newest files, plans new batches under numbers that the record has already passed, and their rows
were never committed. Always true: a batch counts as done only if the record has its number with the
same rows, or if the user's option skips it. Any other batch is refused, or committed again if the
option appends or replaces (hazard 11)."""

from dataclasses import dataclass
from enum import Enum

from spark_ledger import errors
from spark_ledger.topic.log.records import NO_COMMIT, Content, TxnRecord

_CAUSES = (
    "the checkpoint was restored or lost files, the query was changed, its source was trimmed, the"
    " query gives different rows each time, or two writes have the same txnAppId and txnVersion"
)
_APPEND_REMEDY = (
    "onReplay=append writes these rows, although the topic may have some of them already, and goes"
    " on from here: the checkpoint that was the newest must not be used after that"
)
_DIFFERS_REMEDY = (
    "If the query's checkpoint is the newest one, onReplay=skip keeps the committed rows. If it is"
    f" an older one, restore the newest checkpoint; if that is impossible, {_APPEND_REMEDY}."
)
_BEHIND_REMEDY = (
    "Restore the newest checkpoint, or start with a new checkpoint (and, in foreachBatch, a new"
    f" txnAppId). If both are impossible, {_APPEND_REMEDY}."
)


class OnReplay(Enum):
    """What happens to a batch whose number is recorded with other rows. Complete mode uses REPLACE.
    A batch job outside queries uses IGNORE: the job writes nothing if its version is at or below
    the recorded version. The other members are the values of the option `onReplay`."""

    FAIL = "fail"
    SKIP = "skip"
    APPEND = "append"
    REPLACE = "replace"
    IGNORE = "ignore"


class TaskWork(Enum):
    """What a task does with its rows."""

    WRITE = "write the rows"
    COMPARE = "count the rows and compute their fingerprint, and write no row"


@dataclass(frozen=True, slots=True)
class QueryBatch:
    """A streaming query's batch, or a job with a txnAppId: its content as its tasks counted it."""

    content: Content
    on_replay: OnReplay = OnReplay.FAIL


def task_work(record: TxnRecord, app_id: str, version: int, on_replay: OnReplay) -> TaskWork:
    """The work of a task of this batch, decided before the task reads a row. `record` must have
    been read after the run began. Raises errors.CheckpointBehind."""
    if record.version < version:
        return TaskWork.WRITE
    if on_replay is OnReplay.IGNORE:
        return TaskWork.COMPARE
    if record.version > version:
        check_not_behind(record, app_id, version, on_replay)
        return TaskWork.WRITE
    return TaskWork.COMPARE if on_replay in (OnReplay.FAIL, OnReplay.SKIP) else TaskWork.WRITE


def is_done(record: TxnRecord, app_id: str, version: int, batch: QueryBatch) -> bool:
    """Whether the batch counts as committed. The record's number must be at or above `version`. If
    not, the caller commits the batch again. Raises errors.CheckpointBehind,
    errors.ReplayDiffers."""
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
        f"batch {version} of query {app_id} was committed with {_description(record)}, but now it"
        f" has {batch.content.rows} rows ({batch.content.fingerprint}): {_CAUSES}",
        _DIFFERS_REMEDY,
        recorded_version=record.version,
        recorded_rows=_recorded_rows(record),
        rows=batch.content.rows,
    )


def check_not_behind(record: TxnRecord, app_id: str, version: int, on_replay: OnReplay) -> None:
    """Raises errors.CheckpointBehind for a version below the recorded version, unless the user
    wants this version committed."""
    if record.version > version and on_replay is not OnReplay.APPEND:
        raise errors.CheckpointBehind(
            f"batch {version} of query {app_id} is behind batch {record.version}, the last"
            " committed batch: the checkpoint was restored or lost files, and the query may plan"
            " other rows under the numbers of committed batches",
            _BEHIND_REMEDY,
            recorded_version=record.version,
        )


def is_same_batch(record: TxnRecord, content: Content) -> bool:
    """Whether these rows were committed, as far as the record shows. A record of an older version
    of this software has no fingerprint, and may lack the rows."""
    rows = _recorded_rows(record)
    if rows is not None and rows != content.rows:
        return False
    recorded = "" if record.content is None else record.content.fingerprint
    return recorded == content.fingerprint or not _have_same_algorithm(
        recorded, content.fingerprint
    )


def _have_same_algorithm(left: str, right: str) -> bool:
    """Whether both fingerprints exist and were made by the same algorithm."""
    return bool(left and right) and left.partition("-")[0] == right.partition("-")[0]


def _recorded_rows(record: TxnRecord) -> int | None:
    """How many rows were committed; None: the record does not show the number."""
    if record.content is not None:
        return record.content.rows
    topics = record.topics().values()
    if any(topic.number != NO_COMMIT and not topic.rows for topic in topics):
        return None  # left out of a large record
    return sum(sum(topic.rows.values()) for topic in topics)


def _description(record: TxnRecord) -> str:
    fingerprint = "" if record.content is None else f" ({record.content.fingerprint})"
    return f"{_recorded_rows(record)} rows{fingerprint}"
