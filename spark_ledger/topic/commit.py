"""Commit: a batch's segments become visible in a topic, all at once, exactly once.

One multi: set head at the version it was folded from, create log/<n>, set the transaction record
at its known version, check (or end) the intent. Always true: whoever loses a race changes
nothing; a lost answer is resolved only by sync and the transaction record, never from the log and
never by sending again first (hazards 1, 2); a version at or below the recorded one changes
nothing, and is silent only if this run or one before this run's beginning recorded it (hazard 11).
"""

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import Enum

from spark_ledger.metadata.store import MetadataStore
from spark_ledger.topic.intents import Intent
from spark_ledger.topic.task_writer import TaskResult
from spark_ledger.topic.topic_log import TopicLog

BODY_BYTES_MAX = 900 * 1024


@dataclass(frozen=True, slots=True)
class TxnKey:
    """(app id, target) name the transaction record, `version` is what is committed to it.
    Streaming: query id, the sink's target as written by the user, batch id, run id of the query.
    Batch: txnAppId and txnVersion, or a random app id, version 0 and the intent's run id."""

    app_id: str
    target: str
    version: int
    run_id: str


class CommitKind(Enum):
    COMMITTED = "committed"
    ALREADY = "already"


@dataclass(frozen=True, slots=True)
class CommitOutcome:
    """`number` in the topic's log (-1: no rows, no number); `rows` per partition."""

    kind: CommitKind
    number: int
    rows: Mapping[int, int]


async def commit(
    store: MetadataStore,
    log: TopicLog,
    *,
    txn: TxnKey,
    intent: Intent | str,
    results: Sequence[TaskResult],
    rng: random.Random,
    finish_intent: bool = False,
    timeout_s: float = 60.0,
) -> CommitOutcome:
    """Commit the tasks' results in order of task index. Returns when it is durable.

    `finish_intent` sets the intent to done in the same multi: a batch job's only commit.
    Raises errors.Fenced (intent ended, another run recorded the version, results of another
    intent), errors.TopicDeleted, errors.TopicRecreated (results of another topic),
    errors.CommitContended, errors.CommitTooBig, errors.CommitOutcomeUnknown (the deadline passed
    with an answer lost: replay it), errors.Unavailable (nothing was sent).
    """
    raise NotImplementedError
