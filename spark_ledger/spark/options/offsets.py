"""Offsets as Spark keeps them: encoded, decoded, checked against what the topics hold.

    {"_ids": {"flights": "<uuid>"}, "flights": {"0": 120, "1": 98}}

An offset is the number of the next row of a partition (dense, 0-based, end exclusive: Kafka's
shape and meaning). `_ids` says which topic was meant: a topic of the same name made later is
another topic. `_commits`, of the same shape as the offset, has the token of the commit that made
the last row before each offset, where it is known: a metadata store that was restored from an
older backup gives that offset to another row. Always true: keys are sorted, so equal offsets are
equal texts, which is how Spark compares them; positions name exactly the partitions that are read;
no partition's end is below its start; a topic or partition that came after an offset was taken
starts at its beginning.
"""

import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

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
    AtSubscription,
    AtTime,
    ByPartition,
    Explicit,
    Named,
    ReadPosition,
    as_text,
    key_of,
    split,
)

Positions = dict[str, dict[int, int]]
"""Topic, by its short name -> partition -> its next offset; partitions ascend."""
IN_CHECKPOINT = "the offset in the checkpoint"
GO_ON = (
    "Set failOnDataLoss to false to go on without it, or create it again and start with a new"
    " checkpoint."
)

OF_THE_DRIVER = "The time says no zone and is in the driver's: option timeZone names another."
GO_ON_WITHOUT = (
    "Set failOnDataLoss to false to go on without it (named again later, it is read from its"
    " beginning), or name it in subscribe again."
)


@dataclass(frozen=True, slots=True)
class TopicEnds:
    """What a topic holds: rows `starts[p]` to `ends[p]` (exclusive) of each partition p. Of these
    `assigned` are read, ascending; None: all."""

    topic_id: str
    starts: tuple[int, ...]
    ends: tuple[int, ...]
    assigned: tuple[int, ...] | None = None

    @property
    def partitions(self) -> Sequence[int]:
        """Those that are read and there."""
        if self.assigned is None:
            return range(len(self.ends))
        return [p for p in self.assigned if p < len(self.ends)]


Ends = Mapping[str, TopicEnds]
COMMITS = "_commits"


@dataclass(frozen=True, slots=True)
class Trimmed:
    """Offsets [start, end) of a partition that were asked for and are kept no more."""

    topic: str
    partition: int
    start: int
    end: int


def encode(positions: Positions, known: Ends, tokens: Positions | None = None) -> dict[str, Any]:
    """The offset as Spark stores it, with the ids of the topics, and the tokens that are known of
    the commits which made the last rows before it."""
    ids = {key_of(topic): known[topic].topic_id for topic in positions}
    offset: dict[str, Any] = {IDS: dict(sorted(ids.items()))}
    for topic, by_partition in positions.items():
        by_name = {str(p): next_row for p, next_row in by_partition.items()}
        offset[key_of(topic)] = dict(sorted(by_name.items()))
    if tokens:
        offset[COMMITS] = {
            key_of(topic): dict(sorted((str(p), token) for p, token in some.items()))
            for topic, some in sorted(tokens.items())
        }
    return dict(sorted(offset.items()))


def tokens_of(offset: Mapping[str, Any]) -> Positions:
    """The tokens that `encode` was given. Raises OffsetsMalformed."""
    tokens = offset.get(COMMITS, {})
    if not isinstance(tokens, dict):
        raise OffsetsMalformed(f"{IN_CHECKPOINT} has {json.dumps(tokens)} for {COMMITS!r}")
    return {topic: dict(some) for topic, some in split(tokens, IN_CHECKPOINT)[0].items()}


def tokens_kept(
    before: Positions, tokens: Positions, moved: Callable[[str, int], bool]
) -> Positions:
    """The tokens of an offset: those of the offset before for partitions that did not move, so that
    the same offset stays the same text."""
    return {
        topic: {
            p: before.get(topic, {}).get(p, token) if not moved(topic, p) else token
            for p, token in some.items()
        }
        for topic, some in tokens.items()
    }


def decode(
    offset: Mapping[str, Any], known: Ends, *, by_pattern: bool = False, lossy: bool = False
) -> Positions:
    """An offset that this source once returned, or text like it, as positions.

    Raises OffsetsMalformed, TopicRecreated. What it names and is not there or not read any more
    is left out if `lossy` (the user accepts losses), else it raises PartitionRemoved for a
    partition; for a topic OffsetsNotAssigned, or TopicDeleted if topics are read `by_pattern`.
    """
    offsets, ids = split(offset, IN_CHECKPOINT)
    _check_ids(ids, known, IN_CHECKPOINT)
    for topic, named in () if lossy else offsets.items():
        _check_still_read(topic, named, known.get(topic), by_pattern)
    positions: Positions = {}
    for topic, ends in known.items():
        named = offsets.get(topic, {})
        positions[topic] = {p: named.get(p, ends.starts[p]) for p in ends.partitions}
        if any(at < 0 for at in named.values()):
            raise OffsetsMalformed(f"{IN_CHECKPOINT} has a negative offset: {json.dumps(offset)}")
    return positions


def resolve(
    place: ReadPosition, known: Ends, found: ByPartition | None = None, *, lossy: bool = False
) -> Positions:
    """Where `place` is in the topics of `known`, which must have been read after the user could
    know of it. `found` is for an AtTime what was looked up for `times_wanted` (partitions without
    such a row left out), for an AtSubscription its positions (others start at their beginning).
    An offset whose row is kept no more is an error, or the first that is kept if `lossy`.

    Raises OffsetsMalformed, OffsetsNotAssigned, OffsetsOutOfRange, TopicRecreated,
    TimestampNotFound.
    """
    _check_assigned(known, place.option)
    if isinstance(place, Named):
        return {topic: _at(place.at, ends) for topic, ends in known.items()}
    if isinstance(place, Explicit):
        return _explicit(place, known, lossy)
    assert found is not None, f"what {place.option} says is looked up first"
    if isinstance(place, AtTime):
        return _at_time(place, known, found)
    assert isinstance(place, AtSubscription), place
    return _at_subscription(place, known, found)


def times_wanted(place: AtTime, known: Ends) -> dict[str, dict[int, int]]:
    """The milliseconds to look up for each partition that is read. Raises OffsetsNotAssigned."""
    if place.every_ms is not None:
        return {t: dict.fromkeys(ends.partitions, place.every_ms) for t, ends in known.items()}
    named = place.by_partition or {}
    _check_named(named, known, place.option)
    return {t: {p: named[t][p] for p in ends.partitions} for t, ends in known.items()}


def rows_trimmed(lost: Sequence[Trimmed]) -> RowsTrimmed:
    """The error that says so, with how many rows."""
    rows = sum(one.end - one.start for one in lost)
    named = "; ".join(
        f"offsets {one.start} to {one.end - 1} of partition {one.partition} of topic {one.topic!r}"
        for one in lost[:8]
    )
    more = "; ..." if len(lost) > 8 else ""
    return RowsTrimmed(f"{rows} rows to be read were removed: {named}{more}", rows=rows)


def check_order(start: Positions, end: Positions) -> None:
    """Raises OffsetsStartAfterEnd if any partition ends before it starts."""
    for topic, partition, first in _each(start):
        last = end[topic][partition]
        if first > last:
            raise OffsetsStartAfterEnd(
                f"partition {partition} of topic {topic!r} starts at {first}, ends at {last}"
            )


def check_within(positions: Positions, known: Ends, what: str, remedy: str | None = None) -> None:
    """Raises OffsetsOutOfRange if any position is past the end of its partition."""
    for topic, partition, at in _each(positions):
        end = known[topic].ends[partition]
        if at > end:
            raise OffsetsOutOfRange(
                f"{what} is {at} for partition {partition} of topic {topic!r}, which ends at {end}",
                remedy,
            )


def within(start: Positions, known: Ends) -> bool:
    """Whether no position is past the end of its partition."""
    return all(
        topic in known and p < len(known[topic].ends) and at <= known[topic].ends[p]
        for topic, p, at in _each(start)
    )


def ends_of(known: Ends) -> Positions:
    return {topic: _at(LATEST, ends) for topic, ends in known.items()}


def furthest(one: Positions, other: Positions) -> Positions:
    """The later position of each partition of `one`."""
    return _merged(one, other, max)


def nearest(one: Positions, other: Positions) -> Positions:
    """The earlier position of each partition of `one`; one that `other` does not have counts as 0
    there, so a partition that came after `other` was taken does not advance."""
    return _merged(one, other, min)


def rows_between(start: Positions, end: Positions) -> int:
    return sum(end[topic][p] - at for topic, p, at in _each(start))


def _merged(one: Positions, other: Positions, choose: Callable[[int, int], int]) -> Positions:
    return {
        topic: {p: choose(at, other.get(topic, {}).get(p, 0)) for p, at in parts.items()}
        for topic, parts in one.items()
    }


def _each(positions: Positions) -> Iterator[tuple[str, int, int]]:
    for topic, by_partition in positions.items():
        for partition, at in by_partition.items():
            yield topic, partition, at


def _at(named: int, ends: TopicEnds) -> dict[int, int]:
    offsets = ends.starts if named == EARLIEST else ends.ends
    return {p: offsets[p] for p in ends.partitions}


def _explicit(place: Explicit, known: Ends, lossy: bool) -> Positions:
    _check_ids(place.ids, known, place.option)
    _check_named(place.offsets, known, place.option)
    return {
        topic: {p: _one(place, topic, p, ends, lossy) for p in ends.partitions}
        for topic, ends in known.items()
    }


def _one(place: Explicit, topic: str, partition: int, ends: TopicEnds, lossy: bool) -> int:
    first, last = ends.starts[partition], ends.ends[partition]
    given = place.offsets[topic][partition]
    at = {EARLIEST: first, LATEST: last}.get(given, given)
    where = f"{place.option} is {at} for partition {partition} of topic {topic!r}"
    if at > last:
        raise OffsetsOutOfRange(f"{where}, which ends at {last}")
    if at < first and not lossy:
        raise OffsetsOutOfRange(f"{where}, which now begins at {first}")
    return max(at, first)


def _at_time(place: AtTime, known: Ends, found: ByPartition) -> Positions:
    wanted = times_wanted(place, known)
    positions: Positions = {}
    for topic, ends in known.items():
        there = found.get(topic, {})
        positions[topic] = {
            p: there[p] if p in there else _missing(place, topic, p, ends, wanted[topic][p])
            for p in ends.partitions
        }
    return positions


def _missing(place: AtTime, topic: str, partition: int, ends: TopicEnds, millis: int) -> int:
    if place.missing == "error":
        where = f"{place.option} is {as_text(millis)} ({millis}) for partition"
        if ends.starts[partition] == ends.ends[partition]:
            raise TimestampNotFound(
                f"{where} {partition} of topic {topic!r}, which has no row at all",
                "Say where to begin there: startingOffsetsByTimestampStrategy=latest or earliest.",
            )
        raise TimestampNotFound(
            f"{where} {partition} of topic {topic!r}, which has no row committed then or later",
            f"{OF_THE_DRIVER} {TimestampNotFound.remedy}" if place.zoneless else None,
        )
    return (ends.starts if place.missing == "earliest" else ends.ends)[partition]


def _at_subscription(place: AtSubscription, known: Ends, found: ByPartition) -> Positions:
    positions = {
        topic: {p: found.get(topic, {}).get(p, ends.starts[p]) for p in ends.partitions}
        for topic, ends in known.items()
    }
    check_within(positions, known, f"subscription {place.name!r}")
    return positions


def _check_assigned(known: Ends, option: str) -> None:
    """That each partition which is to be read is there."""
    for topic, ends in known.items():
        _check_there(topic, ends.assigned or (), ends, f"assign (beside {option})")


def _check_there(topic: str, numbers: Iterable[int], ends: TopicEnds, what: str) -> None:
    for p in numbers:
        if p >= len(ends.ends):
            raise OffsetsNotAssigned(
                f"topic {topic!r} has no partition {p}, which {what} names: it has {len(ends.ends)}"
            )


def _check_named(named: ByPartition, known: Ends, option: str) -> None:
    """That every partition that is read is named, and no other."""
    for topic in named:
        if topic not in known:
            raise OffsetsNotAssigned(f"{option} names topic {topic!r}, which is not read")
    for topic, ends in known.items():
        if topic not in named:
            raise OffsetsNotAssigned(f"{option} does not name topic {topic!r}, which is read")
        _check_there(topic, named[topic], ends, option)
        read = set(ends.partitions)
        for p in named[topic]:
            if p not in read:
                raise OffsetsNotAssigned(
                    f"{option} names partition {p} of topic {topic!r}, which is not read"
                )
        for p in ends.partitions:
            if p not in named[topic]:
                raise OffsetsNotAssigned(f"{option} misses partition {p} of topic {topic!r}")


def _check_ids(ids: Mapping[str, str], known: Ends, what: str) -> None:
    for topic, topic_id in ids.items():
        if topic in known and known[topic].topic_id != topic_id:
            raise TopicRecreated(
                f"{what} is of topic {topic!r} with id {topic_id}; "
                f"the topic of that name now has id {known[topic].topic_id}"
            )


def _check_still_read(
    topic: str, named: Mapping[int, int], ends: TopicEnds | None, by_pattern: bool
) -> None:
    if ends is None and by_pattern:
        what = f"{IN_CHECKPOINT} names topic {topic!r}, which is gone"
        raise TopicDeleted(what, GO_ON, topic=topic)
    if ends is None:
        what = f"{IN_CHECKPOINT} names topic {topic!r}, which is not read any more"
        raise OffsetsNotAssigned(what, GO_ON_WITHOUT)
    read = set(ends.partitions)
    for p in named:
        if p not in read:
            why = "is not read any more" if p < len(ends.ends) else "the topic does not have"
            raise PartitionRemoved(
                f"{IN_CHECKPOINT} names partition {p} of topic {topic!r}, which {why}"
            )
