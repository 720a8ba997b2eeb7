"""Reading a task to its end although the topic moves on below it.

Always true: rows come in order of offsets, each once. A ledger that is not there any more means:
fold the topic again. What was put elsewhere is read there; what was trimmed is errors.RowsTrimmed
with the count; what the topic still says is in that ledger is errors.RowsLost. Who accepts losses
(`lossy`) gets exactly the other rows.
"""

import asyncio
from collections.abc import AsyncGenerator
from contextlib import aclosing
from dataclasses import replace

from spark_ledger import errors
from spark_ledger.topic import slice_reader
from spark_ledger.topic.client import TopicClient
from spark_ledger.topic.lost_rows import lost_of, rows_lost, since, without
from spark_ledger.topic.read_plan import LiveRows, ReadTask
from spark_ledger.topic.routing import Hashes
from spark_ledger.topic.slice_reader import FetchedPiece
from spark_ledger.topic.state import PartitionState, Tables, TopicState

FOLDS_MAX = 20
PAUSE_S = 0.05


async def fetch_kept(
    client: TopicClient, task: ReadTask, *, keys: Hashes | None = None, lossy: bool = False
) -> AsyncGenerator[FetchedPiece, None]:
    """The entries of the task, in order, not decoded yet; with `keys` (hashes) without those that
    are known to have none of them.

    Raises errors.RowsTrimmed, errors.RowsLost (neither if `lossy`), errors.TopicDeleted,
    errors.NoSuchLedger when a ledger is gone whenever the topic is folded again,
    errors.DataUnavailable, errors.DigestMismatch, errors.UnsupportedFormat, errors.Unavailable.
    """
    at, tries = task.start, 0
    while True:
        try:
            async with aclosing(slice_reader.fetch_task(client.ledgers, task, keys)) as pieces:
                async for fetched in pieces:
                    yield fetched
                    at = fetched.piece.offset + fetched.piece.take
            return
        except errors.NoSuchLedger as error:
            tries += 1
            if tries > FOLDS_MAX:
                raise
            task = await _folded_again(client, since(task, at), error, lossy)
            await asyncio.sleep(PAUSE_S * (tries - 1))
        except errors.RowsLost as error:
            start, end = error.facts.get("start"), error.facts.get("end")
            if not lossy or not isinstance(start, int) or not isinstance(end, int):
                raise
            task = without(_live_until(since(task, at), start, error), [(start, end)])


async def _folded_again(
    client: TopicClient, task: ReadTask, gone: errors.NoSuchLedger, lossy: bool
) -> ReadTask:
    """The task by the newest state, from where it is."""
    state, read = await _newest(client, task)
    held = state.partitions[task.partition]
    start = min(max(task.start, held.start_offset), task.end)
    if start > task.start and not lossy:
        raise errors.RowsTrimmed(
            f"{start - task.start} rows to be read were removed: offsets {task.start} to"
            f" {start - 1} of partition {task.partition} of topic {task.topic!r}",
            rows=start - task.start,
        )
    lo, hi = _committed(held, replace(task, start=start))
    live = _still_live(held, task.live, hi, task.end)
    nowhere = max(start, hi) if live is None else task.end
    if nowhere < task.end and not lossy:
        raise errors.RowsLost(
            f"{task.end - nowhere} confirmed rows are gone: offsets {nowhere} to {task.end - 1} of"
            f" partition {task.partition} of topic {task.topic!r}, whose live segment ended before",
            rows=task.end - nowhere,
        )
    stretches = tuple(held.stretches(lo, hi, read))
    place = (task.topic, task.topic_id, task.partition)
    return _without_ledger(ReadTask(*place, start, task.end, stretches, live), gone, lossy)


async def _newest(client: TopicClient, task: ReadTask) -> tuple[TopicState, Tables]:
    """The topic's state with what the task needs of chunks; again if those are gone, or rows are,
    before they were read."""
    for tries in range(FOLDS_MAX):
        if (state := await _folded(client, task.topic_id)) is None:
            raise errors.TopicDeleted(
                f"topic {task.topic!r} (id {task.topic_id}) was deleted", topic=task.topic
            )
        start, end = _committed(state.partitions[task.partition], task)
        asked = {task.partition: (start, end)} if start < end else {}  # none where all is gone
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


def _committed(held: PartitionState, task: ReadTask) -> tuple[int, int]:
    """What commits hold of what the task reads."""
    start = min(max(task.start, held.start_offset), task.end)
    return min(start, held.end_offset), max(start, min(task.end, held.end_offset))


def _still_live(
    held: PartitionState, live: LiveRows | None, start: int, end: int
) -> LiveRows | None:
    """The rows [start, end) of the live segment, which no commit has yet."""
    if live is None or start >= end or held.live is None:
        return None
    if held.live.ledger_id != live.live.ledger_id:
        return None
    return replace(live, start=max(start, live.start), end=end)


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
    lost = lost_of(task, {ledger_id: -1})
    if lost and not lossy:
        raise rows_lost(lost)
    return without(task, [(one.start, one.end) for one in lost])
