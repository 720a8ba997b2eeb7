"""Offsets as Spark keeps them, and what a user may give: parse, check, admit.

    {"_ids": {"flights": "<uuid>"}, "flights": {"0": 120, "1": 98}}

An offset is the number of the next row of a partition (dense, 0-based, end exclusive: Kafka's
shape and meaning). `_ids` says which topic was meant: a topic of the same name made later is
another topic. Always true: keys are sorted, so equal offsets are equal texts, which is how Spark
compares them; no partition's end is below its start.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from spark_ledger.errors import (
    OffsetsMalformed,
    OffsetsNotAssigned,
    OffsetsOutOfRange,
    OffsetsStartAfterEnd,
    TopicRecreated,
)

IDS = "_ids"
EARLIEST = -2
LATEST = -1
_NAMED = {"earliest": EARLIEST, "latest": LATEST}

Positions = dict[str, tuple[int, ...]]
"""Topic, as the user wrote it -> the next offset of each of its partitions."""


@dataclass(frozen=True)
class TopicEnds:
    """What a topic holds: rows `starts[p]` to `ends[p]` (exclusive) of each partition p."""

    topic_id: str
    starts: tuple[int, ...]
    ends: tuple[int, ...]


Ends = Mapping[str, TopicEnds]


def encode(positions: Mapping[str, Sequence[int]], known: Ends) -> dict[str, Any]:
    """The offset as Spark stores it, with the ids of the topics."""
    offset: dict[str, Any] = {IDS: {topic: known[topic].topic_id for topic in sorted(positions)}}
    for topic in positions:
        by_name = {str(p): next_row for p, next_row in enumerate(positions[topic])}
        offset[topic] = dict(sorted(by_name.items()))
    return dict(sorted(offset.items()))


def decode(offset: Mapping[str, Any], known: Ends) -> Positions:
    """An offset that this source once returned, or text like it, as positions.

    A topic or partition that came since then starts at its beginning. Raises TopicRecreated,
    OffsetsMalformed, and OffsetsNotAssigned for a topic or partition that is not read any more.
    """
    _check_shape(offset, "the offset in the checkpoint")
    _check_topics(offset, known, "the offset in the checkpoint")
    positions: Positions = {}
    for topic, ends in known.items():
        by_partition = _by_partition(offset.get(topic, {}), topic, len(ends.ends))
        at = (by_partition.get(p, ends.starts[p]) for p in range(len(ends.ends)))
        positions[topic] = tuple(at)
        if any(next_row < 0 for next_row in positions[topic]):
            raise OffsetsMalformed(f"a negative offset in {json.dumps(dict(offset))}")
    return positions


def resolve(text: str, option: str, known: Ends) -> Positions:
    """What a user gave as `option`: earliest, latest, or JSON with an offset, -2 (earliest) or
    -1 (latest) for each partition.

    `known` must have been read after the user could know of it. Raises OffsetsMalformed,
    OffsetsNotAssigned, OffsetsOutOfRange, TopicRecreated.
    """
    named = _NAMED.get(text.strip().lower())
    if named is not None:
        return {topic: _at(named, ends) for topic, ends in known.items()}
    offset = _json(text, option)
    _check_shape(offset, option)
    _check_topics(offset, known, option)
    for topic in known:
        if topic not in offset:
            raise OffsetsNotAssigned(f"{option} does not name topic {topic!r}, which is read")
    return {topic: _one(offset[topic], topic, known[topic], option) for topic in known}


def check_order(start: Positions, end: Positions) -> None:
    """Raises OffsetsStartAfterEnd if any partition ends before it starts."""
    for topic, starts in start.items():
        for partition, (first, last) in enumerate(zip(starts, end[topic], strict=True)):
            if first > last:
                raise OffsetsStartAfterEnd(
                    f"partition {partition} of topic {topic!r} starts at {first}, ends at {last}"
                )


def check_within(positions: Positions, known: Ends, what: str) -> None:
    """Raises OffsetsOutOfRange if any position is past the end of its partition."""
    for topic, ends in known.items():
        for partition, (at, end) in enumerate(zip(positions[topic], ends.ends, strict=True)):
            if at > end:
                raise OffsetsOutOfRange(
                    f"{what} is {at} for partition {partition} of topic {topic!r}, "
                    f"which ends at {end}"
                )


def within(start: Positions, known: Ends) -> bool:
    """Whether no position is past the end of its partition."""
    return all(
        at <= end
        for topic, ends in known.items()
        for at, end in zip(start[topic], ends.ends, strict=True)
    )


def ends_of(known: Ends) -> Positions:
    return {topic: ends.ends for topic, ends in known.items()}


def furthest(one: Positions, other: Positions) -> Positions:
    """The later position of each partition."""
    return {
        topic: tuple(max(pair) for pair in zip(one[topic], other[topic], strict=True))
        for topic in one
    }


def nearest(one: Positions, other: Positions) -> Positions:
    """The earlier position of each partition; one that `other` does not have counts as 0 there,
    so a partition that came after `other` was taken does not advance."""
    return {topic: _nearest(one[topic], other.get(topic, ())) for topic in one}


def rows_between(start: Positions, end: Positions) -> int:
    return sum(sum(end[topic]) - sum(start[topic]) for topic in start)


def admit(start: Positions, end: Positions, rows_max: int) -> Positions:
    """An end at most `rows_max` rows beyond `start`, each partition getting its share of the
    backlog; what rounding leaves goes to the largest remainders, then to the first partitions."""
    backlog = rows_between(start, end)
    if backlog <= rows_max:
        return end
    slots = [
        (topic, p, end[topic][p] - start[topic][p])
        for topic in sorted(start)
        for p in range(len(start[topic]))
    ]
    shares = [rows_max * rows // backlog for _, _, rows in slots]
    remainders = [(-(rows_max * rows % backlog), i) for i, (_, _, rows) in enumerate(slots)]
    for _, i in sorted(remainders)[: rows_max - sum(shares)]:
        shares[i] += 1
    admitted = {topic: list(positions) for topic, positions in start.items()}
    for (topic, p, _), share in zip(slots, shares, strict=True):
        admitted[topic][p] += share
    return {topic: tuple(positions) for topic, positions in admitted.items()}


def _nearest(one: tuple[int, ...], other: tuple[int, ...]) -> tuple[int, ...]:
    padded = (*other, *(0 for _ in range(len(one) - len(other))))
    return tuple(min(pair) for pair in zip(one, padded, strict=False))


def _at(named: int, ends: TopicEnds) -> tuple[int, ...]:
    return ends.starts if named == EARLIEST else ends.ends


def _json(text: str, option: str) -> dict[str, Any]:
    try:
        offset = json.loads(text)
    except ValueError:
        raise OffsetsMalformed(f"{option} is {text!r}, which is not JSON") from None
    if not isinstance(offset, dict):
        raise OffsetsMalformed(f"{option} is {text!r}, not an object of topics")
    return offset


def _check_shape(offset: Mapping[str, Any], what: str) -> None:
    for topic, by_partition in offset.items():
        good = isinstance(by_partition, dict) and (
            topic == IDS
            or all(
                name.isdecimal() and isinstance(at, int) and not isinstance(at, bool)
                for name, at in by_partition.items()
            )
        )
        if not good:
            text = json.dumps(by_partition)
            raise OffsetsMalformed(
                f"{what} has {text} for {topic!r}, not whole numbers by partition number"
            )


def _check_topics(offset: Mapping[str, Any], known: Ends, what: str) -> None:
    for topic in offset:
        if topic != IDS and topic not in known:
            raise OffsetsNotAssigned(f"{what} names topic {topic!r}, which is not read")
    for topic, topic_id in offset.get(IDS, {}).items():
        if topic in known and known[topic].topic_id != topic_id:
            raise TopicRecreated(
                f"{what} is of topic {topic!r} with id {topic_id}; "
                f"the topic of that name now has id {known[topic].topic_id}"
            )


def _by_partition(named: Mapping[str, int], topic: str, partitions: int) -> dict[int, int]:
    by_partition = {int(name): at for name, at in named.items()}
    for partition in by_partition:
        if partition >= partitions:
            raise OffsetsNotAssigned(
                f"topic {topic!r} has no partition {partition}: it has {partitions}"
            )
    return by_partition


def _one(named: Mapping[str, int], topic: str, ends: TopicEnds, option: str) -> tuple[int, ...]:
    by_partition = _by_partition(named, topic, len(ends.ends))
    resolved = []
    for partition, (first, last) in enumerate(zip(ends.starts, ends.ends, strict=True)):
        if partition not in by_partition:
            raise OffsetsNotAssigned(f"{option} misses partition {partition} of topic {topic!r}")
        at = {EARLIEST: first, LATEST: last}.get(by_partition[partition], by_partition[partition])
        where = f"{option} is {at} for partition {partition} of topic {topic!r}"
        if at < 0:
            raise OffsetsMalformed(f"{where}: only -1 and -2 may be negative")
        if at > last:
            raise OffsetsOutOfRange(f"{where}, which ends at {last}")
        if at < first:
            raise OffsetsOutOfRange(f"{where}, which now begins at {first}")
        resolved.append(at)
    return tuple(resolved)
