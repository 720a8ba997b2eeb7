"""What a commit depends on beside the heads of its topics: subscriptions, schemas, and the records
of ledgers that were written before a person accepted an older metadata store.

Always true: subscriptions and schemas are read and judged before the multi. The multi checks the
versions of the nodes that were read, or of a head that changes with these nodes; so if another
process changes a node in between, the multi fails, and the commit judges again. A schema comes into
force only together with a new version of its topic's head, so a commit of bytes that read no schema
loses to the commit that puts a schema into force.
"""

from collections.abc import Awaitable, Callable, Mapping

from spark_ledger import errors
from spark_ledger.metadata import ledger_record, paths
from spark_ledger.metadata.cluster import IDS_PER_EPOCH
from spark_ledger.metadata.store import Check, MetadataStore, Operation, Set
from spark_ledger.topic.commit import draft as commit_draft
from spark_ledger.topic.commit.draft import Actions, CommitRequest, RowKind
from spark_ledger.topic.commit.views import CommitViews
from spark_ledger.topic.log.actions import segments_of
from spark_ledger.topic.log.holds import Holds
from spark_ledger.topic.log.records import Head, encode_head
from spark_ledger.topic.log.segments import INLINE
from spark_ledger.topic.log.state import TopicState
from spark_ledger.topic.schema import records as schema_records

HoldsOf = Callable[[str, int], Awaitable[Holds]]
"""Takes a topic's id and its number of partitions; returns the rows that its subscriptions hold."""
Changes = Mapping[str, tuple[TopicState, Actions]]
"""For each topic in whose log the commit takes a number: the state that the commit follows, and the
actions."""


async def check_ledgers(
    store: MetadataStore, epoch: int, changes: Changes, creators: Mapping[int, str]
) -> None:
    """Checks that the ledgers of the new rows have their own records, if their ids are from an
    earlier epoch. If a person accepted an older store after such a ledger was written, the ledger
    may have no record, or its id may belong to another ledger that was made before the hold; then
    no reader would find the rows. A ledger whose creator is not in `creators` was written by the
    committing process, which the epoch fences. Raises errors.LedgerFenced, StoreUnavailable."""
    first_id = epoch * IDS_PER_EPOCH
    old_ledgers = {
        segment.ledger_id: None
        for _, actions in changes.values()
        for action in actions
        for segment in segments_of(action)
        if INLINE < segment.ledger_id < first_id
    }
    if not old_ledgers:
        return
    nodes = await store.get_many([paths.ledger(ledger_id) for ledger_id in old_ledgers])
    for ledger_id, node in zip(old_ledgers, nodes, strict=True):
        if node is not None and _has_creator(node.value, creators.get(ledger_id, "")):
            continue
        what = "no record" if node is None else "the record of another ledger"
        raise errors.LedgerFenced(
            f"ledger {ledger_id} has {what}: it was written before the metadata store went back in"
            " time and a person accepted the store",
            "Run the job again.",
        )


def _has_creator(value: bytes, creator: str) -> bool:
    """Whether this may be the record of the creator's ledger. Raises errors.UnsupportedFormat."""
    if not creator:
        return True
    try:
        return ledger_record.decode(value).creator in ("", creator)
    except ledger_record.BadLedgerRecord as damage:
        raise errors.UnsupportedFormat(
            f"the record of a ledger that tasks wrote: {damage}"
        ) from None


async def checks_of_holds(
    holds_of: HoldsOf, changes: Changes, topic_names: Mapping[str, str]
) -> list[Check]:
    """Checks that no subscription holds a row that an overwrite takes away. Returns a check for the
    multi for each topic that is overwritten: it fails if a subscription was made, or went back,
    after this function read the subscriptions (hazard 37). Raises errors.SubscriptionBusy,
    errors.Unavailable."""
    checks = []
    for topic_id, (state, actions) in changes.items():
        if commit_draft.overwrites(actions):
            holds = await holds_of(topic_id, len(state.partitions))
            commit_draft.check_no_subscription_holds(state, actions, holds, topic_names[topic_id])
            checks.append(holds.check)
    return checks


async def check_quotas(request: CommitRequest, changes: Changes) -> None:
    """Raises errors.BacklogQuotaExceeded, and as the request's `check_quotas`."""
    if request.check_quotas is not None:
        rows = {
            topic_id: frozenset(s.partition for action in actions for s in segments_of(action))
            for topic_id, (_, actions) in changes.items()
        }
        await request.check_quotas(rows)


async def schema_operations(
    views: CommitViews,
    row_kinds: Mapping[str, RowKind],
    changes: Changes,
    topic_names: Mapping[str, str],
    *,
    fresh: bool,
) -> dict[str, list[Operation]]:
    """By topic the operations that check its schema, put the schema into force, or add a version to
    the schema. Raises errors.SchemaIncompatible, errors.SchemaNotRegistered, StoreUnavailable."""
    operations: dict[str, list[Operation]] = {}
    for topic_id, kind in row_kinds.items():
        change = changes.get(topic_id)
        if change is None and not kind.versions:
            continue
        schema = await views.schema(topic_id, fresh=fresh)
        if change is None:
            change = await views.state(topic_id, fold=False, fresh=False), ()
        state, actions = change
        registered = {}
        if kind.versions & schema.head.proposed:
            registered = await views.schema_versions(topic_id, schema.head)
        head = commit_draft.schema_after(
            schema.head, kind, state, actions, topic_names[topic_id], registered
        )
        path = paths.topic_schema(topic_id)
        if schema.version is None or (head is None and topic_id not in changes):
            continue
        if head is None:
            operations[topic_id] = [Check(path, schema.version)]
            continue
        operations[topic_id] = [Set(path, schema_records.encode_head(head), schema.version)]
        if topic_id not in changes:
            value = encode_head(Head(state.next))
            operations[topic_id] += [Set(paths.topic_head(topic_id), value, state.head_version)]
    return operations
