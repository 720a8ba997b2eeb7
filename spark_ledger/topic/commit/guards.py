"""Whether an action still holds on the state it would follow (hazard 9). Pure.

Always true: a guard is evaluated on the state folded up to the number that is being created, and
that number is set from that state's version of head, so what it saw is what the action follows.
"""

from spark_ledger import errors
from spark_ledger.topic.log.actions import (
    Action,
    Append,
    Grow,
    Hole,
    OpenLive,
    Overwrite,
    Replace,
    SealLive,
    Terminate,
    Trim,
    adds_rows,
    segments_of,
)
from spark_ledger.topic.log.records import WRITER_VERSION
from spark_ledger.topic.log.state import PartitionState, TopicState, is_of


def check(state: TopicState, app_id: str, actions: tuple[Action, ...]) -> None:
    """Whether a commit of these actions by that app may follow on the state.

    Raises errors.TopicDeleted, errors.TopicTerminated, errors.UnsupportedFormat (another writer
    version is needed), errors.TxnConflict (what the action was planned on has changed: plan again),
    ValueError for what never held.
    """
    if state.deleted:
        raise errors.TopicDeleted(f"topic {state.topic_id} was deleted", topic_id=state.topic_id)
    if state.min_writer > WRITER_VERSION:
        raise errors.UnsupportedFormat(
            f"topic {state.topic_id} needs writer version {state.min_writer}, this is version"
            f" {WRITER_VERSION}"
        )
    if state.terminated and any(adds_rows(action) for action in actions):
        raise errors.TopicTerminated(f"topic {state.topic_id} takes no more rows")
    sealed = {action.partition for action in actions if isinstance(action, SealLive)}
    for action in actions:
        _check(state, app_id, action, sealed)


def _check(state: TopicState, app_id: str, action: Action, sealed: set[int]) -> None:
    match action:
        case Append() | Overwrite():
            _check_added(state, action, sealed)
        case Replace():
            _check_replaced(_partition(state, action.partition), action)
        case Trim():
            for partition, offset in action.offsets:
                _check_trimmed(_partition(state, partition), offset)
        case Hole():
            held = _partition(state, action.partition)
            if not held.start_offset <= action.start < action.end <= held.end_offset:
                raise errors.TxnConflict(f"{action} is not within what is kept")
        case Grow():
            if action.partitions <= len(state.partitions):
                raise errors.TxnConflict(
                    f"topic {state.topic_id} has {len(state.partitions)} partitions, not fewer"
                    f" than {action.partitions}"
                )
        case OpenLive():
            live = _partition(state, action.partition).live
            if live is not None and action.partition not in sealed:
                raise errors.TxnConflict(
                    f"partition {action.partition} has the live ledger {live.ledger_id}"
                )
        case SealLive():
            if not is_of(action, _partition(state, action.partition).live):
                raise errors.TxnConflict(
                    f"ledger {action.ledger_id} is not live any more, as commit {action.opened}"
                    " opened it",
                    live=True,
                )
        case Terminate():
            for held in state.partitions:
                _check_not_live(held, sealed)
    if isinstance(action, Overwrite) and state.last_foreign(app_id) >= action.snapshot:
        raise errors.TxnConflict(
            f"commit {state.last_foreign(app_id)} of another writer came after commit"
            f" {action.snapshot - 1}, the last that was to be overwritten"
        )


def _check_added(state: TopicState, action: Append | Overwrite, sealed: set[int]) -> None:
    for segment in segments_of(action):
        _check_not_live(_partition(state, segment.partition), sealed)


def _check_not_live(held: PartitionState, sealed: set[int]) -> None:
    if held.live is not None and held.number not in sealed:
        raise errors.TxnConflict(
            f"partition {held.number} has the live ledger {held.live.ledger_id}: it is sealed"
            " first",
            live=True,
        )


def _check_replaced(held: PartitionState, action: Replace) -> None:
    if held.start_offset > action.start:
        raise errors.TxnConflict(
            f"partition {held.number} starts at {held.start_offset} now: rows from {action.start}"
            " on cannot be replaced"
        )
    if held.rearranged >= action.snapshot:
        raise errors.TxnConflict(
            f"partition {held.number} was rearranged by commit {held.rearranged}, the replacement"
            f" was planned on those before {action.snapshot}"
        )


def _check_trimmed(held: PartitionState, offset: int) -> None:
    if offset > held.end_offset:
        raise errors.TxnConflict(
            f"partition {held.number} ends at {held.end_offset}: it cannot be trimmed to {offset}"
        )


def _partition(state: TopicState, partition: int) -> PartitionState:
    if not 0 <= partition < len(state.partitions):
        raise ValueError(f"partition {partition} of {len(state.partitions)} was written")
    return state.partitions[partition]
