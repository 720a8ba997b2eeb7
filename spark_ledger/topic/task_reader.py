"""Reading a task to its end although the topic moves on below it.

Always true: the rows of each partition come in order of offsets, each once. A ledger that is not
there any more means: fold the topic again, and go on in each partition where it was. What was put
elsewhere is read there; what was trimmed is errors.RowsTrimmed with the count; what the topic still
says is in that ledger is errors.RowsLost. A reader that accepts losses (`lossy`) gets exactly the
other rows.
"""

import asyncio
import itertools
from dataclasses import replace

from spark_ledger import errors
from spark_ledger.topic.client import TopicClient
from spark_ledger.topic.entry.routing import Hashes
from spark_ledger.topic.log.state import PartitionState, Tables, TopicState
from spark_ledger.topic.read.pieces import LiveRows
from spark_ledger.topic.read.plan import (
    NAMED_MAX,
    NOTHING,
    ReadTask,
    lost_of,
    rows_lost,
    segments_in,
    without,
)
from spark_ledger.topic.read.slice_reader import Fetched, fetch_task

FOLDS_MAX = 20
PAUSE_S = 0.05

Left = list[tuple[int, int, int]]
"""Offsets [start, end) of partitions that are still to be read."""


def fetch_kept(
    client: TopicClient, task: ReadTask, *, keys: Hashes | None = None, lossy: bool = False
) -> Fetched:
    """The entries of the task, in order, some at a time, not decoded yet; with `keys` (hashes)
    without those that are known to have none of them.

    Raises errors.RowsTrimmed, errors.RowsLost (neither if `lossy`), errors.TopicDeleted,
    errors.NoSuchLedger when a ledger is gone whenever the topic is folded again,
    errors.DataUnavailable, errors.DigestMismatch, errors.UnsupportedFormat, errors.Unavailable.
    """
    tries = itertools.count()

    async def again(left: ReadTask, error: errors.NoSuchLedger | errors.RowsLost) -> ReadTask:
        if isinstance(error, errors.RowsLost):
            if not lossy:
                raise error
            return _without_lost(left, error)
        tried = next(tries)
        if tried >= FOLDS_MAX:
            raise error
        folded = await _folded_again(client, left, error, lossy)
        await asyncio.sleep(PAUSE_S * tried)
        return folded

    return fetch_task(client.ledgers, task, keys, again)


def _without_lost(task: ReadTask, error: errors.RowsLost) -> ReadTask:
    """The task without what the error tells. Raises it where it tells no rows."""
    ended, start, end = (error.facts.get(name) for name in ("ended", "start", "end"))
    if isinstance(ended, tuple):
        return without(task, lost_of(task, dict([ended])))
    if isinstance(start, int) and isinstance(end, int):
        return _live_until(task, start, error)
    raise error


async def _folded_again(
    client: TopicClient, task: ReadTask, gone: errors.NoSuchLedger, lossy: bool
) -> ReadTask:
    """The task by the newest state, from where it is."""
    left: Left = [(one.partition, one.lo, one.hi) for one in task.spans]
    if task.live is not None:
        left.append((task.live.live.partition, task.live.start, task.live.end))
    state, read = await _newest(client, task, left)
    starts = state.start_offsets()
    trimmed = [(p, lo, min(hi, starts[p])) for p, lo, hi in left if lo < starts[p]]
    if trimmed and not lossy:
        raise _rows_trimmed(task, trimmed)
    live = None
    if task.live is not None:
        live = _still_live(state.partitions[task.live.live.partition], task.live)
        nowhere = _end_of_known(state, task.live, live)
        if nowhere < task.live.end and not lossy:
            raise _confirmed_lost(task, task.live, nowhere)
    spans, table = segments_in(state, _committed(state, left), read)
    return _without_ledger(replace(task, spans=spans, table=table, live=live), gone, lossy)


async def _newest(client: TopicClient, task: ReadTask, left: Left) -> tuple[TopicState, Tables]:
    """The topic's state with what is needed of chunks; again if those are gone, or rows are,
    before they were read."""
    for tries in range(FOLDS_MAX):
        if (state := await _folded(client, task.topic_id)) is None:
            raise errors.TopicDeleted(
                f"topic {task.topic!r} (id {task.topic_id}) was deleted", topic=task.topic
            )
        asked: dict[int, tuple[int, int]] = {}
        for p, lo, hi in _committed(state, left):
            first, last = asked.get(p, (lo, hi))
            asked[p] = (min(first, lo), max(last, hi))
        try:
            return await client.readable(state, asked)
        except (errors.NoSuchLedger, errors.NoSuchEntry):
            await asyncio.sleep(PAUSE_S * tries)
    raise errors.DataUnavailable(
        f"topic {task.topic!r} changes faster than what it says can be read"
    )


async def _folded(client: TopicClient, topic_id: str) -> TopicState | None:
    """None: the topic was deleted."""
    try:
        state = await client.log(topic_id).fold(fresh=True)
    except (errors.TopicDeleted, errors.TopicNotFound):
        return None
    return None if state.deleted else state


def _committed(state: TopicState, left: Left) -> Left:
    """What commits hold of it, and keep."""
    found = []
    for p, lo, hi in left:
        held = state.partitions[p]
        lo, hi = max(lo, held.start_offset), min(hi, held.end_offset)
        if lo < hi:
            found.append((p, lo, hi))
    return found


def _still_live(held: PartitionState, live: LiveRows) -> LiveRows | None:
    """The rows of the live segment which no commit has yet."""
    start = max(live.start, held.end_offset)
    now, before = held.live, live.live
    if start >= live.end or now is None or now.ledger_id != before.ledger_id:
        return None
    return replace(live, start=start) if now.origin == before.origin else None


def _end_of_known(state: TopicState, wanted: LiveRows, live: LiveRows | None) -> int:
    """Up to where the rows wanted are in a commit or still live."""
    held = state.partitions[wanted.live.partition]
    known = max(wanted.start, held.start_offset, held.end_offset) if live is None else wanted.end
    return min(known, wanted.end)


def _confirmed_lost(task: ReadTask, live: LiveRows, start: int) -> errors.RowsLost:
    return errors.RowsLost(
        f"{live.end - start} confirmed rows are gone: offsets {start} to {live.end - 1} of"
        f" partition {live.live.partition} of topic {task.topic!r}, whose live segment ended"
        " before",
        rows=live.end - start,
    )


def _rows_trimmed(task: ReadTask, trimmed: Left) -> errors.RowsTrimmed:
    rows = sum(hi - lo for _, lo, hi in trimmed)
    named = [f"offsets {lo} to {hi - 1} of partition {p}" for p, lo, hi in trimmed[:NAMED_MAX]]
    more = ", ..." if len(trimmed) > NAMED_MAX else ""
    return errors.RowsTrimmed(
        f"{rows} rows to be read were removed: {', '.join(named)}{more} of topic {task.topic!r}",
        rows=rows,
    )


def _live_until(task: ReadTask, start: int, lost: errors.RowsLost) -> ReadTask:
    """The task without rows of its live segment from `start` on, if it is these that are lost."""
    live, last = task.live, lost.facts.get("last_entry")
    if live is None or not live.start <= start < live.end or not isinstance(last, int):
        return task
    return replace(
        task, live=replace(live, end=start, last_entry=last) if start > live.start else None
    )


def _without_ledger(task: ReadTask, gone: errors.NoSuchLedger, lossy: bool) -> ReadTask:
    """The task if it does not read that ledger any more; without those rows if `lossy`."""
    ledger_id = gone.facts.get("ledger_id")
    if not isinstance(ledger_id, int):
        return task
    lost = lost_of(task, {ledger_id: NOTHING})
    if lost and not lossy:
        raise rows_lost(lost)
    return without(task, lost)
