"""Whether states of several topics show each commit over them in all of them or in none (T9).

A reader folds topics one after another, and a commit over two of them may come in between: then one
state has it and the other has not, and they are folded again until they agree (hazard 14). Always
true: two topics have the commits that they share in one order, so their states agree on all of them
if they agree on the last. A state keeps the last ACROSS_KEPT_MAX of these; what it may have
forgotten is taken to be in it.
"""

import asyncio
from collections.abc import Iterable, Sequence

from spark_ledger import errors
from spark_ledger.topic.state import ACROSS_KEPT_MAX, TopicState
from spark_ledger.topic.topic_log import TopicLog

FOLDS_MAX = 50


def agree(states: Iterable[TopicState]) -> bool:
    """Whether every commit over several topics is in all of these states or in none."""
    return not torn(states)


def torn(states: Iterable[TopicState]) -> list[str]:
    """The topics, by id, of which one has a commit that it shares with the other, which has not."""
    by_id = {state.topic_id: state for state in states}
    last = {
        (topic_id, other): shared.commit_id
        for topic_id, state in by_id.items()
        for shared in state.across
        for other in shared.others
        if other in by_id
    }
    found: dict[str, None] = {}
    for (topic_id, other), commit_id in last.items():
        seen = last.get((other, topic_id))
        forgotten = seen is None and len(by_id[other].across) >= ACROSS_KEPT_MAX
        if seen != commit_id and not forgotten:
            found |= dict.fromkeys((topic_id, other))
    return sorted(found)


async def fold_agreeing(logs: Sequence[TopicLog], *, fresh: bool = True) -> list[TopicState]:
    """The topics' states at one moment, as far as commits over several of them go.

    Raises as TopicLog.fold; errors.Unavailable when no such moment was met in FOLDS_MAX folds.
    """
    folded = await asyncio.gather(*(log.fold(fresh=fresh) for log in logs))
    states = {state.topic_id: state for state in folded}
    for _ in range(FOLDS_MAX):
        late = torn(states.values())
        if not late:
            return [states[log.topic_id] for log in logs]
        again = [log for log in logs if log.topic_id in late]
        for log, state in zip(
            again, await asyncio.gather(*(log.fold(fresh=True) for log in again)), strict=True
        ):
            states[log.topic_id] = state
    raise errors.Unavailable(
        f"{len(logs)} topics are committed to together faster than they can be read"
    )
