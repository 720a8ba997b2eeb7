"""Where a read begins or ends, as a user gives it: offsets, moments, a subscription.

    earliest | latest                                  AtEdge
    {"t":{"0":23,"1":-2},"_ids":{"t":"<uuid>"}}        AtOffsets: -2 earliest, -1 latest
    1714557600000 | 2024-05-01T10:00:00Z               AtTime, every partition
    {"t":{"0":1714557600000,"1":"2024-05-01"}}         AtTime, by partition
    the name of a subscription                         AtSubscription

Always true: malformed text is refused here, without a connection; topics have their short names
here, whichever form of the name the user wrote. In an offset, keys that begin with an underscore
are not topics (`_ids`, and the keys that a progress adds to its latest offset). A topic whose name
begins with an underscore has its full name as the key.

A moment is milliseconds since 1970 or ISO text. Text without a zone is a moment in the zone of
option timeZone, else in this process's zone. In the driver this is the zone with which a session of
Spark starts. Tasks see whether the user set another zone for the session, and then refuse to read
by such a text (`check_zone`). A moment before 1970 or beyond the year 9999 is refused. Parts of a
millisecond are rounded up: a read that starts at a moment has no row from before that moment. A row
has the time of its commit, by the metadata store's clock. A row that came by a broker has the time
at which the broker stored the row, by the broker's clock, which follows the store's. A read that
starts at a moment misses no row committed at or after that moment.
"""

import datetime
import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from datetime import tzinfo
from typing import Any

from spark_ledger.errors import OffsetsMalformed, OptionInvalid
from spark_ledger.spark.options.values import Zone, json_of, quoted, unique_object
from spark_ledger.topic.log.names import parse_topic
from spark_ledger.topic.log.segment_table import TableChunk
from spark_ledger.topic.log.state import NO_TABLES, Tables, TopicState
from spark_ledger.topic.subscription.seek_target import (
    CommittedSince,
    chunks_needed,
    in_seconds,
    offset_since,
)

MS_MAX = 253_402_300_799_999
_EPOCH = datetime.datetime(1970, 1, 1, tzinfo=datetime.UTC)
_MS = datetime.timedelta(milliseconds=1)


def millis_of(value: object, zone: datetime.tzinfo | None = None) -> int | None:
    """The moment of a number or a text in milliseconds since 1970; None if the value is not a
    moment. A text without a zone is in `zone` (None: in this process's zone)."""
    if isinstance(value, str):
        text = value.strip()
        is_number = text.isascii() and text.isdigit() and len(text) < 19
        value = int(text) if is_number else _iso(text, zone)
    if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value <= MS_MAX:
        return None
    return value


def has_no_zone(value: object) -> bool:
    """Whether the value is ISO text of a moment, without a zone."""
    try:
        if not isinstance(value, str):
            return False
        return datetime.datetime.fromisoformat(value.strip()).tzinfo is None
    except ValueError:
        return False


def check_zone(
    zoneless_times: Iterable[tuple[str, int]], session: str | None, *, in_checkpoint: bool = False
) -> None:
    """Raises OptionInvalid if a text of `zoneless_times` is another moment in the session's zone
    than in the driver's zone. `zoneless_times` has texts without a zone, each with its milliseconds
    in the driver's zone. `session` is the zone that the user set for the session (None: no zone).
    `in_checkpoint`: the query's checkpoint already begins at these moments."""
    if session is None:
        return
    try:
        zone = Zone().parse("", session)
    except OptionInvalid:  # Spark knows more names than Python
        return
    restart = ", and start with a new checkpoint: this one begins there" if in_checkpoint else ""
    for text, millis in zoneless_times:
        if millis_of(text, zone) != millis:
            raise OptionInvalid(
                f"the time {text!r} has no zone, and was taken for {as_text(millis)} in the"
                f" driver's zone, but the session's zone is {session}",
                f"Add option timeZone, {session!r}, or give the zone in the text{restart}.",
            )


def as_text(millis: int) -> str:
    """The moment in UTC, for messages."""
    return (_EPOCH + millis * _MS).isoformat(timespec="milliseconds").replace("+00:00", "Z")


def chunks_for_times(state: TopicState, times: Mapping[int, int]) -> list[TableChunk]:
    """The chunks that `offsets_since` needs in `tables`."""
    moments = dict.fromkeys(times.values())
    by_moment = (chunks_needed(state, CommittedSince(millis)) for millis in moments)
    return list(dict.fromkeys(chunk for chunks in by_moment for chunk in chunks))


def offsets_since(
    state: TopicState, times: Mapping[int, int], tables: Tables = NO_TABLES
) -> dict[int, int]:
    """For each partition of `times`, the first offset committed at or after the partition's time; a
    partition without such a row is left out. The times of rows that a broker stored are only in
    their entries, so the result for such a row is the first offset of its segment. A live segment
    always counts as having such a row, a sealed segment if a row was stored at or after the
    time."""
    offsets = {}
    for number, millis in times.items():
        partition = state.partitions[number]
        offset = offset_since(partition, millis, tables)
        if offset < partition.end_offset or partition.live is not None:
            offsets[number] = offset
    return offsets


def _iso(text: str, zone: datetime.tzinfo | None) -> int | None:
    try:
        moment = datetime.datetime.fromisoformat(text)
        if moment.tzinfo is None:
            moment = moment.astimezone() if zone is None else moment.replace(tzinfo=zone)
        return -((_EPOCH - moment) // _MS)
    except (ValueError, OverflowError):
        return None


IDS = "_ids"
EARLIEST = -2
LATEST = -1
OFFSET_MAX = 2**63 - 1
_EDGES = {"earliest": EARLIEST, "latest": LATEST}

ByPartition = Mapping[str, Mapping[int, int]]
"""Topic, by its short name -> partition -> offset, or milliseconds."""


@dataclass(frozen=True, slots=True)
class AtEdge:
    """The EARLIEST or LATEST offset of every partition."""

    option: str
    at: int


@dataclass(frozen=True, slots=True)
class AtOffsets:
    option: str
    offsets: ByPartition
    ids: Mapping[str, str]


@dataclass(frozen=True, slots=True)
class AtTime:
    """The first row committed at or after `every_ms`, or at or after the partition's time in
    `by_partition`. For a partition without such a row, `missing` decides: error, latest or
    earliest."""

    option: str
    missing: str
    every_ms: int | None = None
    by_partition: ByPartition | None = None
    zoneless_times: tuple[tuple[str, int], ...] = ()
    """If no option gives a zone: each text without a zone, and its moment in the driver's zone."""


@dataclass(frozen=True, slots=True)
class AtSubscription:
    option: str
    name: str


ReadPosition = AtEdge | AtOffsets | AtTime | AtSubscription


def parse_offsets(text: str, option: str) -> AtEdge | AtOffsets:
    """Raises OffsetsMalformed, TopicNameInvalid."""
    edge = _EDGES.get(text.strip().lower())
    if edge is not None:
        return AtEdge(option, edge)
    try:
        offset = json.loads(text, object_pairs_hook=unique_object)
    except (ValueError, RecursionError):
        raise OffsetsMalformed(f"{option} is {quoted(text)}, which is not JSON") from None
    if not isinstance(offset, dict):
        raise OffsetsMalformed(f"{option} is {quoted(text)}, not an object of topics")
    offsets, ids = offsets_and_ids(offset, option)
    for topic, by_partition in offsets.items():
        for partition, number in by_partition.items():
            if number < EARLIEST:
                raise OffsetsMalformed(
                    f"{option} is {number} for partition {partition} of topic {topic!r}: "
                    "only -1 and -2 may be negative"
                )
    return AtOffsets(option, offsets, ids)


def offsets_and_ids(offset: Mapping[str, Any], what: str) -> tuple[ByPartition, Mapping[str, str]]:
    """The offsets by topic and partition, and the topics' ids, of an offset's parsed JSON.

    Raises OffsetsMalformed, TopicNameInvalid.
    """
    offsets: dict[str, dict[int, int]] = {}
    for key, by_partition in offset.items():
        if key.startswith("_"):
            continue
        topic = parse_topic(key).short
        numbers = _offsets_by_number(by_partition)
        if numbers is None or topic in offsets:
            raise OffsetsMalformed(
                f"{what} has {quoted(json.dumps(by_partition))} for {key!r}, "
                "not whole numbers by partition number, each once"
            )
        offsets[topic] = numbers
    ids = offset.get(IDS, {})
    if not isinstance(ids, dict) or not all(isinstance(id_, str) for id_ in ids.values()):
        raise OffsetsMalformed(f"{what} has {quoted(json.dumps(ids))} for {IDS!r}, not ids")
    return offsets, {parse_topic(key).short: id_ for key, id_ in ids.items()}


def key_of(topic: str) -> str:
    """The key in an offset of the topic with this short name."""
    return parse_topic(topic).full if topic.startswith("_") else topic


def parse_time(text: str, option: str, missing: str, zone: tzinfo | None = None) -> AtTime:
    """A text without a zone is in `zone` (None: in this process's zone). Raises OptionInvalid."""
    millis = _millis(text, option, zone)
    zoneless_times = _zoneless(zone, [(text, millis)])
    return AtTime(option, missing, every_ms=millis, zoneless_times=zoneless_times)


def parse_times(text: str, option: str, missing: str, zone: tzinfo | None = None) -> AtTime:
    """As parse_time, for times by topic and partition. Raises OptionInvalid, TopicNameInvalid."""
    example = '{"t":{"0":1714557600000,"1":"2024-05-01T10:00:00Z"}}'
    topics = json_of(option, text, example)
    times: dict[str, dict[int, int]] = {}
    parsed: list[tuple[Any, int]] = []
    for key, by_partition in topics.items() if isinstance(topics, dict) else [("", None)]:
        texts = by_partition if isinstance(by_partition, dict) else {"": 0}
        is_valid = all(map(_is_number, texts))
        topic = parse_topic(key).short if is_valid else ""
        if not is_valid or topic in times:
            raise OptionInvalid(
                f"{option} is {quoted(text)}, not times by topic and partition number, each once",
                f"Give {option} as {example}.",
            )
        times[topic] = {int(p): _millis(time, option, zone) for p, time in texts.items()}
        parsed += zip(texts.values(), times[topic].values(), strict=True)
    return AtTime(option, missing, by_partition=times, zoneless_times=_zoneless(zone, parsed))


def parse_assigned(text: str, option: str) -> dict[str, tuple[int, ...]]:
    """Partitions by topic, ascending. Raises OptionInvalid, TopicNameInvalid."""
    topics = json_of(option, text, '{"t":[0,1]}')
    assigned: dict[str, tuple[int, ...]] = {}
    for key, partitions in topics.items() if isinstance(topics, dict) else ():
        topic = parse_topic(key).short
        numbers = partitions if isinstance(partitions, list) else []
        is_valid = all(type(number) is int and number >= 0 for number in numbers)
        if not numbers or not is_valid or len(set(numbers)) != len(numbers) or topic in assigned:
            raise OptionInvalid(
                f"{option} has {quoted(json.dumps(partitions))} for {key!r}, "
                "not a list of partition numbers, each once",
                f'Give {option} as {{"t":[0,1]}}.',
            )
        assigned[topic] = tuple(sorted(numbers))
    if not assigned:
        raise OptionInvalid(
            f"{option} is {quoted(text)}, which names no partition",
            f'Give {option} as {{"t":[0,1]}}.',
        )
    return assigned


def _offsets_by_number(by_partition: object) -> dict[int, int] | None:
    if not isinstance(by_partition, dict) or not all(map(_is_number, by_partition)):
        return None
    is_valid = all(type(number) is int and number <= OFFSET_MAX for number in by_partition.values())
    return {int(name): number for name, number in by_partition.items()} if is_valid else None


def _is_number(name: str) -> bool:
    """Whether the name is a partition's number without leading zeros: 7, not 07."""
    return name.isascii() and name.isdigit() and len(name) < 10 and name == str(int(name))


def _zoneless(zone: tzinfo | None, times: Iterable[tuple[Any, int]]) -> tuple[tuple[str, int], ...]:
    """The times whose text has no zone; empty if the option gives a `zone`."""
    if zone is not None:
        return ()
    return tuple(time for time in times if has_no_zone(time[0]))


def _millis(value: object, option: str, zone: tzinfo | None) -> int:
    text = value.strip() if isinstance(value, str) else str(value)
    if text.isascii() and text.isdigit() and in_seconds(int(text)):
        raise OptionInvalid(
            f"{option} is {text}, which as milliseconds since 1970 is before March 1973: probably"
            " seconds",
            f"Give milliseconds ({text}000), 0 for the beginning, or ISO text.",
        )
    millis = millis_of(value, zone)
    if millis is None:
        raise OptionInvalid(
            f"{option} is {value!r}, which is not a moment",
            f"Give {option} milliseconds since 1970, or ISO text as 2024-05-01T10:00:00Z.",
        )
    return millis
