"""Commits of parts. A caller writes each epoch in parts, and commits each part by itself. Every
part is committed at least once, and exactly once if a repeated epoch has the same parts.

With Spark's `foreach`, an epoch is a micro-batch, and a part has the rows of one partition of the
query. When Spark repeats an epoch, it may put the rows into other partitions. So part 3 of the
repeated epoch may have other rows than the part 3 that is committed. Always true: a part is not
committed again only if the last commit of this part and epoch had the same content.

The transaction record is that of (`app id#part-number`, target). Its `version` is the part's epoch
* COMMITS_MAX_OF_EPOCH + the number of earlier commits of the part in this epoch (after a commit of
a later epoch: the last version + 1). Its `run_id` holds the digest of the part's content.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from spark_ledger import errors
from spark_ledger.metadata import paths
from spark_ledger.metadata.store_calls import Tries, ensure, unavailable_while
from spark_ledger.topic.client import NO_ROW_KINDS, TopicClient
from spark_ledger.topic.commit.draft import CommitKind, CommitOutcome, RowKind, TxnKey
from spark_ledger.topic.log import records
from spark_ledger.topic.log.intents import Intent
from spark_ledger.topic.log.names import escape
from spark_ledger.topic.log.records import TxnRecord
from spark_ledger.topic.write import TaskResult

COMMITS_MAX_OF_EPOCH = 1 << 16


@dataclass(frozen=True, slots=True)
class Part:
    """Part `number` of an epoch. Parts have equal digests only if they have the same rows in the
    same order."""

    number: int
    epoch: int
    digest: str


def next_version(record: TxnRecord, part: Part) -> int | None:
    """The version of the part's commit; None if the part is committed already."""
    if record.version // COMMITS_MAX_OF_EPOCH == part.epoch and record.run_id == part.digest:
        return None
    return max(record.version + 1, part.epoch * COMMITS_MAX_OF_EPOCH)


async def commit_part(
    client: TopicClient,
    results: Mapping[str, Sequence[TaskResult]],
    intent: Intent,
    part: Part,
    *,
    user_metadata: str = "",
    row_kinds: Mapping[str, RowKind] = NO_ROW_KINDS,
) -> CommitOutcome:
    """Commits the results of the part, by topic id, under the intent (of kind PARTS) of the run
    that wrote them. `row_kinds` as in TopicClient.commit_topics. Then this process closes
    the ledgers of the part, and writes the next part to other ledgers. So no two commits name the
    same ledger, and dropped ledgers may be deleted while the run goes on. Raises as
    TopicClient.commit_topics; errors.LedgerFenced if a newer run has taken over."""
    try:
        return await _commit(client, results, intent, part, user_metadata, row_kinds)
    finally:
        client.cache.retire(intent.id)


async def _commit(
    client: TopicClient,
    results: Mapping[str, Sequence[TaskResult]],
    intent: Intent,
    part: Part,
    user_metadata: str,
    row_kinds: Mapping[str, RowKind],
) -> CommitOutcome:
    app_id = f"{intent.app_id}#part-{part.number}"
    path = paths.txn(escape(app_id), escape(intent.target))
    tries = Tries()
    while True:
        with unavailable_while(
            f"looking for part {part.number} of epoch {part.epoch} of {intent.app_id}"
        ):
            await ensure(client.store, path, records.encode_txn(TxnRecord()))
            await client.store.sync(path)
            record = records.decode_txn((await client.store.get(path)).value)
        version = next_version(record, part)
        if version is None:
            return CommitOutcome(CommitKind.ALREADY, record.topics())
        txn = TxnKey(app_id, intent.target, version, part.digest)
        try:
            return await client.commit_topics(
                results, txn, intent.id, user_metadata=user_metadata, row_kinds=row_kinds
            )
        except errors.LedgerFenced as fenced:
            if "recorded_by" not in fenced.facts:
                raise
        # Another attempt of the task committed this version first.
        await tries.retry_or_raise(f"others committed part {part.number} of {intent.app_id} too")
