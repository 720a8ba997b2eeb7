"""Offsets as Spark keeps them: encode, decode, and check against the rows that the topics have.

    {"_ids": {"flights": "<uuid>"}, "flights": {"0": 120, "1": 98}}

A partition's offset is the number of the next row to read: Kafka's shape and meaning. `_ids` has
the id of each topic, as a later topic of the same name is another topic. `_commits`, in the same
shape, has for each offset the token (32 random bits) of the commit that made the last row before
the offset, if the source has the token. After the metadata store was restored from an older
backup, another commit with another token may make another row there.

Always true: keys are sorted, so equal offsets are equal texts (Spark compares texts); positions
name exactly the partitions that are read; no partition's end is below its start; a topic or
partition that is newer than an offset starts at its beginning.
"""

import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from spark_ledger.errors import (
    OffsetsMalformed,
    OffsetsNotAssigned,
    OffsetsOutOfRange,
    OffsetsStartAfterEnd,
    PartitionRemoved,
    RowsTrimmed,
    TimestampNotFound,
    TopicDeleted,
    TopicRecreated,
)
from spark_ledger.spark.options.start_positions import (
    EARLIEST,
    IDS,
    LATEST,
    AtEdge,
    AtOffsets,
    AtSubscription,
    AtTime,
    ByPartition,
    ReadPosition,
    as_text,
    key_of,
    offsets_and_ids,
)

Positions = dict[str, dict[int, int]]
"""Topic, by its short name -> partition -> its next offset; partitions ascend."""
IN_CHECKPOINT = "the offset in the checkpoint"
TOPIC_DELETED_REMEDY = (
    "Set failOnDataLoss to false to go on without the topic, or create the topic again and start"
    " with a new checkpoint."
)

DRIVER_ZONE_HINT = (
    "The time has no zone, and counts in the driver's zone: option timeZone gives another zone."
)
NOT_READ_REMEDY = (
    "Name the topic in subscribe again, or set failOnDataLoss to false to go on without it (if it"
    " is named again later, it is read from its beginning)."
)


@dataclass(frozen=True, slots=True)
class TopicEnds:
    """The offsets that a topic has: `starts[p]` to `ends[p]` (exclusive) of each partition p. The
    query reads the partitions `assigned`, ascending; None: all."""

    topic_id: str
    starts: tuple[int, ...]
    ends: tuple[int, ...]
    assigned: tuple[int, ...] | None = None

    @property
    def partitions(self) -> Sequence[int]:
        """The partitions that exist and that the query reads."""
        if self.assigned is None:
            return range(len(self.ends))
        return [p for p in self.assigned if p < len(self.ends)]


Ends = Mapping[str, TopicEnds]
COMMITS = "_commits"


@dataclass(frozen=True, slots=True)
class TrimmedRange:
    """Requested offsets [start, end) of a partition whose rows were removed; the read needs `rows`
    of them."""

    topic: str
    partition: int
    start: int
    end: int
    rows: int


def encode(
    positions: Positions, topic_ends: Ends, tokens: Positions | None = None
) -> dict[str, Any]:
    """The offset as Spark stores it, with the topics' ids and the commits' `tokens`."""
    ids = {key_of(topic): topic_ends[topic].topic_id for topic in positions}
    offset: dict[str, Any] = {IDS: dict(sorted(ids.items()))}
    for topic, by_partition in positions.items():
        by_name = {str(p): next_row for p, next_row in by_partition.items()}
        offset[key_of(topic)] = dict(sorted(by_name.items()))
    if tokens:
        offset[COMMITS] = {
            key_of(topic): dict(sorted((str(p), token) for p, token in by_partition.items()))
            for topic, by_partition in sorted(tokens.items())
        }
    return dict(sorted(offset.items()))


def tokens_of(offset: Mapping[str, Any]) -> Positions:
    """The tokens of an offset that `encode` made. Raises OffsetsMalformed."""
    tokens = offset.get(COMMITS, {})
    if not isinstance(tokens, dict):
        raise OffsetsMalformed(f"{IN_CHECKPOINT} has {json.dumps(tokens)} for {COMMITS!r}")
    return {
        topic: dict(by_partition)
        for topic, by_partition in offsets_and_ids(tokens, IN_CHECKPOINT)[0].items()
    }


def keep_tokens(
    tokens_before: Positions, tokens: Positions, has_moved: Callable[[str, int], bool]
) -> Positions:
    """The tokens for the next offset. A partition that has not moved keeps its token of
    `tokens_before`, as equal offsets must be equal texts."""
    return {
        topic: {
            p: token if has_moved(topic, p) else tokens_before.get(topic, {}).get(p, token)
            for p, token in by_partition.items()
        }
        for topic, by_partition in tokens.items()
    }


def decode(
    offset: Mapping[str, Any], topic_ends: Ends, *, by_pattern: bool = False, lossy: bool = False
) -> Positions:
    """The positions of an offset that this source returned, or of another offset in its format.

    If `lossy` (the user accepts losses), topics and partitions that do not exist or are no longer
    read are left out. Else such a partition raises PartitionRemoved; such a topic raises
    TopicDeleted if topics are read `by_pattern`, OffsetsNotAssigned otherwise. Also raises
    OffsetsMalformed, TopicRecreated.
    """
    offsets, ids = offsets_and_ids(offset, IN_CHECKPOINT)
    _check_ids(ids, topic_ends, IN_CHECKPOINT)
    for topic, by_partition in () if lossy else offsets.items():
        _check_still_read(topic, by_partition, topic_ends.get(topic), by_pattern)
    positions: Positions = {}
    for topic, ends in topic_ends.items():
        by_partition = offsets.get(topic, {})
        positions[topic] = {p: by_partition.get(p, ends.starts[p]) for p in ends.partitions}
        if any(position < 0 for position in by_partition.values()):
            raise OffsetsMalformed(f"{IN_CHECKPOINT} has a negative offset: {json.dumps(offset)}")
    return positions


def resolve(
    place: ReadPosition,
    topic_ends: Ends,
    lookups: ByPartition | None = None,
    *,
    lossy: bool = False,
) -> Positions:
    """The positions of `place` in the topics. The caller reads `topic_ends` after the user has
    chosen the place. For an AtTime, `lookups` has the offsets of `times_to_look_up`, except of
    partitions that have no row so late. For an AtSubscription, `lookups` has the subscription's
    positions; a partition without a position starts at its beginning. An offset below a partition's
    first row is an error, unless `lossy`: then the partition starts at its first row.

    Raises OffsetsMalformed, OffsetsNotAssigned, OffsetsOutOfRange, TopicRecreated,
    TimestampNotFound.
    """
    _check_assigned(topic_ends, place.option)
    if isinstance(place, AtEdge):
        return {topic: _edge_offsets(place.at, ends) for topic, ends in topic_ends.items()}
    if isinstance(place, AtOffsets):
        return _explicit_positions(place, topic_ends, lossy)
    assert lookups is not None, f"the positions of {place.option} are looked up first"
    if isinstance(place, AtTime):
        return _at_time(place, topic_ends, lookups)
    assert isinstance(place, AtSubscription), place
    return _at_subscription(place, topic_ends, lookups)


def times_to_look_up(place: AtTime, topic_ends: Ends) -> dict[str, dict[int, int]]:
    """The milliseconds to look up for each partition that is read. Raises OffsetsNotAssigned."""
    if place.every_ms is not None:
        return {t: dict.fromkeys(ends.partitions, place.every_ms) for t, ends in topic_ends.items()}
    times = place.by_partition or {}
    _check_same_partitions(times, topic_ends, place.option)
    return {t: {p: times[t][p] for p in ends.partitions} for t, ends in topic_ends.items()}


def rows_trimmed(ranges: Sequence[TrimmedRange]) -> RowsTrimmed:
    """The error for these ranges, with the number of rows."""
    rows = sum(trimmed.rows for trimmed in ranges)
    texts = "; ".join(
        f"offsets {trimmed.start} to {trimmed.end - 1} of partition {trimmed.partition} of topic"
        f" {trimmed.topic!r}"
        for trimmed in ranges[:8]
    )
    ellipsis = "; ..." if len(ranges) > 8 else ""
    return RowsTrimmed(f"{rows} rows to be read were removed: {texts}{ellipsis}", rows=rows)


def check_order(start: Positions, end: Positions) -> None:
    """Raises OffsetsStartAfterEnd if any partition ends before it starts."""
    for topic, partition, first in _each_position(start):
        last = end[topic][partition]
        if first > last:
            raise OffsetsStartAfterEnd(
                f"partition {partition} of topic {topic!r} starts at {first}, ends at {last}"
            )


def check_within(
    positions: Positions, topic_ends: Ends, what: str, remedy: str | None = None
) -> None:
    """Raises OffsetsOutOfRange if any position is past the end of its partition."""
    for topic, partition, offset in _each_position(positions):
        end = topic_ends[topic].ends[partition]
        if offset > end:
            raise OffsetsOutOfRange(
                f"{what} is {offset} for partition {partition} of topic {topic!r}, which ends at"
                f" {end}",
                remedy,
            )


def is_within(positions: Positions, topic_ends: Ends) -> bool:
    """Whether no position is past the end of its partition."""
    return all(
        topic in topic_ends and p < len(ends := topic_ends[topic].ends) and offset <= ends[p]
        for topic, p, offset in _each_position(positions)
    )


def ends_of(topic_ends: Ends) -> Positions:
    return {topic: _edge_offsets(LATEST, ends) for topic, ends in topic_ends.items()}


def later_positions(positions: Positions, other: Positions) -> Positions:
    """The later position of each partition of `positions`."""
    return _merged(positions, other, max)


def earlier_positions(positions: Positions, other: Positions) -> Positions:
    """The earlier position of each partition of `positions`. A partition that `other` lacks counts
    as at 0 there, so a partition that is newer than `other` does not advance."""
    return _merged(positions, other, min)


def _merged(positions: Positions, other: Positions, choose: Callable[[int, int], int]) -> Positions:
    return {
        topic: {p: choose(offset, other.get(topic, {}).get(p, 0)) for p, offset in offsets.items()}
        for topic, offsets in positions.items()
    }


class _Position(NamedTuple):
    topic: str
    partition: int
    offset: int


def _each_position(positions: Positions) -> Iterator[_Position]:
    for topic, by_partition in positions.items():
        for partition, offset in by_partition.items():
            yield _Position(topic, partition, offset)


def _edge_offsets(edge: int, ends: TopicEnds) -> dict[int, int]:
    offsets = ends.starts if edge == EARLIEST else ends.ends
    return {p: offsets[p] for p in ends.partitions}


def _explicit_positions(place: AtOffsets, topic_ends: Ends, lossy: bool) -> Positions:
    _check_ids(place.ids, topic_ends, place.option)
    _check_same_partitions(place.offsets, topic_ends, place.option)
    return {
        topic: {p: _explicit_offset(place, topic, p, ends, lossy) for p in ends.partitions}
        for topic, ends in topic_ends.items()
    }


def _explicit_offset(
    place: AtOffsets, topic: str, partition: int, ends: TopicEnds, lossy: bool
) -> int:
    first, last = ends.starts[partition], ends.ends[partition]
    named = place.offsets[topic][partition]
    offset = {EARLIEST: first, LATEST: last}.get(named, named)
    text = f"{place.option} is {offset} for partition {partition} of topic {topic!r}"
    if offset > last:
        raise OffsetsOutOfRange(f"{text}, which ends at {last}")
    if offset < first and not lossy:
        raise OffsetsOutOfRange(f"{text}, which now begins at {first}")
    return max(offset, first)


def _at_time(place: AtTime, topic_ends: Ends, lookups: ByPartition) -> Positions:
    times = times_to_look_up(place, topic_ends)
    positions: Positions = {}
    for topic, ends in topic_ends.items():
        offsets = lookups.get(topic, {})
        positions[topic] = {
            p: offsets[p]
            if p in offsets
            else _offset_without_row(place, topic, p, ends, times[topic][p])
            for p in ends.partitions
        }
    return positions


def _offset_without_row(
    place: AtTime, topic: str, partition: int, ends: TopicEnds, millis: int
) -> int:
    """The position of a partition that has no row at or after the time."""
    if place.missing == "error":
        text = f"{place.option} is {as_text(millis)} ({millis}) for partition"
        if ends.starts[partition] == ends.ends[partition]:
            raise TimestampNotFound(
                f"{text} {partition} of topic {topic!r}, which has no row at all",
                "Set its start: startingOffsetsByTimestampStrategy=latest or earliest.",
            )
        raise TimestampNotFound(
            f"{text} {partition} of topic {topic!r}, which has no row committed then or later",
            f"{DRIVER_ZONE_HINT} {TimestampNotFound.remedy}" if place.zoneless_times else None,
        )
    return (ends.starts if place.missing == "earliest" else ends.ends)[partition]


def _at_subscription(place: AtSubscription, topic_ends: Ends, lookups: ByPartition) -> Positions:
    positions = {
        topic: {p: lookups.get(topic, {}).get(p, ends.starts[p]) for p in ends.partitions}
        for topic, ends in topic_ends.items()
    }
    check_within(positions, topic_ends, f"subscription {place.name!r}")
    return positions


def _check_assigned(topic_ends: Ends, option: str) -> None:
    """Raises OffsetsNotAssigned if an assigned partition does not exist."""
    for topic, ends in topic_ends.items():
        _check_partitions_exist(topic, ends.assigned or (), ends, f"assign (beside {option})")


def _check_partitions_exist(topic: str, numbers: Iterable[int], ends: TopicEnds, what: str) -> None:
    for p in numbers:
        if p >= len(ends.ends):
            raise OffsetsNotAssigned(
                f"topic {topic!r} has no partition {p}, which {what} names: it has {len(ends.ends)}"
            )


def _check_same_partitions(by_partition: ByPartition, topic_ends: Ends, option: str) -> None:
    """Raises OffsetsNotAssigned unless `by_partition` has exactly the partitions that are read."""
    for topic in by_partition:
        if topic not in topic_ends:
            raise OffsetsNotAssigned(f"{option} names topic {topic!r}, which is not read")
    for topic, ends in topic_ends.items():
        if topic not in by_partition:
            raise OffsetsNotAssigned(f"{option} does not name topic {topic!r}, which is read")
        _check_partitions_exist(topic, by_partition[topic], ends, option)
        partitions_read = set(ends.partitions)
        for p in by_partition[topic]:
            if p not in partitions_read:
                raise OffsetsNotAssigned(
                    f"{option} names partition {p} of topic {topic!r}, which is not read"
                )
        for p in ends.partitions:
            if p not in by_partition[topic]:
                raise OffsetsNotAssigned(f"{option} misses partition {p} of topic {topic!r}")


def _check_ids(ids: Mapping[str, str], topic_ends: Ends, what: str) -> None:
    for topic, topic_id in ids.items():
        if topic in topic_ends and topic_ends[topic].topic_id != topic_id:
            raise TopicRecreated(
                f"{what} is of topic {topic!r} with id {topic_id}; "
                f"the topic of that name now has id {topic_ends[topic].topic_id}"
            )


def _check_still_read(
    topic: str, by_partition: Mapping[int, int], ends: TopicEnds | None, by_pattern: bool
) -> None:
    if ends is None and by_pattern:
        message = f"{IN_CHECKPOINT} names topic {topic!r}, which was deleted"
        raise TopicDeleted(message, TOPIC_DELETED_REMEDY, topic=topic)
    if ends is None:
        message = f"{IN_CHECKPOINT} names topic {topic!r}, which is not read any more"
        raise OffsetsNotAssigned(message, NOT_READ_REMEDY)
    partitions_read = set(ends.partitions)
    for p in by_partition:
        if p not in partitions_read:
            reason = "is not read any more" if p < len(ends.ends) else "does not exist"
            raise PartitionRemoved(
                f"{IN_CHECKPOINT} names partition {p} of topic {topic!r}, which {reason}"
            )
