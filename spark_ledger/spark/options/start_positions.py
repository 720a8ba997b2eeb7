"""Where a read begins or ends, as a user gives it: offsets, moments, a subscription.

    earliest | latest                                  Named
    {"t":{"0":23,"1":-2},"_ids":{"t":"<uuid>"}}        Explicit: -2 earliest, -1 latest; no ids: any
    1714557600000 | 2024-05-01T10:00:00Z               AtTime, every partition
    {"t":{"0":1714557600000,"1":"2024-05-01"}}         AtTime, by partition
    the name of a subscription                         AtSubscription

Always true: malformed text is refused here, without a connection; topics have their short names
here, however they were written. Names that begin with an underscore are not topics but remarks
(`_ids`, and additions of a progress to its latest offset); a topic of such a name is written in
full.

A moment is milliseconds since 1970 or ISO text. Text without a zone is a moment in the given zone,
else in this process's zone. In the driver that is the zone with which a session of Spark starts;
tasks see if the session was given another zone, and refuse to read by such a text (`check_zone`). A
moment before 1970 or beyond the year 9999 is refused. Parts of a millisecond are rounded up: a read
that starts at a moment has no row from before it. The time of a row is that of its commit, by the
metadata store's clock; for a row that came by a broker it is the time at which it was stored, by
the broker's clock, which follows the store's. No row committed at or after a moment is missed.
"""

import datetime
import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from datetime import tzinfo
from typing import Any

from spark_ledger.errors import OffsetsMalformed, OptionInvalid
from spark_ledger.spark.options.values import Zone, json_of, once, quoted
from spark_ledger.topic.log.names import parse_topic
from spark_ledger.topic.log.segment_table import TableChunk
from spark_ledger.topic.log.state import UNREAD, Tables, TopicState
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
    """The moment of a number or a text in milliseconds since 1970; None if it is not a moment. A
    text without a zone is in `zone` (None: this process's)."""
    if isinstance(value, str):
        text = value.strip()
        number = text.isascii() and text.isdigit() and len(text) < 19
        value = int(text) if number else _iso(text, zone)
    if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value <= MS_MAX:
        return None
    return value


def says_no_zone(value: object) -> bool:
    """Whether it is a text for a moment, but without a zone."""
    try:
        if not isinstance(value, str):
            return False
        return datetime.datetime.fromisoformat(value.strip()).tzinfo is None
    except ValueError:
        return False


def check_zone(
    zoneless: Iterable[tuple[str, int]], session: str | None, *, in_checkpoint: bool = False
) -> None:
    """`zoneless` are texts without a zone, and the milliseconds that they were taken for in the
    driver; `in_checkpoint`: a query's checkpoint begins there already. Raises OptionInvalid if a
    text is another moment in the zone that the session was given."""
    if session is None:
        return
    try:
        zone = Zone().parse("", session)
    except OptionInvalid:  # Spark knows more names than Python
        return
    begun = ", and start with a new checkpoint: this one begins there" if in_checkpoint else ""
    for text, millis in zoneless:
        if millis_of(text, zone) != millis:
            raise OptionInvalid(
                f"the time {text!r} has no zone, and was taken for {as_text(millis)}: Spark does"
                f" not show a source that the session's is {session}",
                f"Add option timeZone, {session!r}, or give the zone in the text{begun}.",
            )


def as_text(millis: int) -> str:
    """The moment in UTC, for messages."""
    return (_EPOCH + millis * _MS).isoformat(timespec="milliseconds").replace("+00:00", "Z")


def chunks_to_look_up(state: TopicState, times: Mapping[int, int]) -> list[TableChunk]:
    """The chunks that `look_up` needs in `read`."""
    moments = dict.fromkeys(times.values())
    by_moment = (chunks_needed(state, CommittedSince(millis)) for millis in moments)
    return list(dict.fromkeys(chunk for chunks in by_moment for chunk in chunks))


def look_up(state: TopicState, times: Mapping[int, int], read: Tables = UNREAD) -> dict[int, int]:
    """For each partition of `times` the first offset committed at or after its milliseconds,
    without partitions that have no such row. Only its entries have the times of the rows of a
    segment born live: the first row of a sealed one counts if a row was stored since, the first row
    of an open one always."""
    offsets = {}
    for partition, millis in times.items():
        held = state.partitions[partition]
        offset = offset_since(held, millis, read)
        if offset < held.end_offset or held.live is not None:
            offsets[partition] = offset
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
_NAMED = {"earliest": EARLIEST, "latest": LATEST}

ByPartition = Mapping[str, Mapping[int, int]]
"""Topic, by its short name -> partition -> offset, or milliseconds."""


@dataclass(frozen=True, slots=True)
class Named:
    """EARLIEST or LATEST of every partition."""

    option: str
    at: int


@dataclass(frozen=True, slots=True)
class Explicit:
    option: str
    offsets: ByPartition
    ids: Mapping[str, str]


@dataclass(frozen=True, slots=True)
class AtTime:
    """The first row committed at or after `every_ms`, or at or after the partition's own time. For
    a partition without such a row `missing` decides: error, latest or earliest."""

    option: str
    missing: str
    every_ms: int | None = None
    by_partition: ByPartition | None = None
    zoneless: tuple[tuple[str, int], ...] = ()
    """Texts without a zone, if no option gives it, and the milliseconds they were taken for."""


@dataclass(frozen=True, slots=True)
class AtSubscription:
    option: str
    name: str


ReadPosition = Named | Explicit | AtTime | AtSubscription


def parse_offsets(text: str, option: str) -> Named | Explicit:
    """Raises OffsetsMalformed, TopicNameInvalid."""
    named = _NAMED.get(text.strip().lower())
    if named is not None:
        return Named(option, named)
    try:
        offset = json.loads(text, object_pairs_hook=once)
    except (ValueError, RecursionError):
        raise OffsetsMalformed(f"{option} is {quoted(text)}, which is not JSON") from None
    if not isinstance(offset, dict):
        raise OffsetsMalformed(f"{option} is {quoted(text)}, not an object of topics")
    offsets, ids = split(offset, option)
    for topic, by_partition in offsets.items():
        for partition, at in by_partition.items():
            if at < EARLIEST:
                raise OffsetsMalformed(
                    f"{option} is {at} for partition {partition} of topic {topic!r}: "
                    "only -1 and -2 may be negative"
                )
    return Explicit(option, offsets, ids)


def split(offset: Mapping[str, Any], what: str) -> tuple[ByPartition, Mapping[str, str]]:
    """The offsets by topic and partition of an offset out of JSON, and the topics' ids.

    Raises OffsetsMalformed, TopicNameInvalid.
    """
    offsets: dict[str, dict[int, int]] = {}
    for key, by_partition in offset.items():
        if key.startswith("_"):
            continue
        topic = parse_topic(key).short
        numbers = _numbers(by_partition)
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
    """The name in an offset of a topic with this short name."""
    return parse_topic(topic).full if topic.startswith("_") else topic


def parse_time(text: str, option: str, missing: str, zone: tzinfo | None = None) -> AtTime:
    """`zone` as millis_of. Raises OptionInvalid."""
    millis = _millis(text, option, zone)
    zoneless = _zoneless(zone, [(text, millis)])
    return AtTime(option, missing, every_ms=millis, zoneless=zoneless)


def parse_times(text: str, option: str, missing: str, zone: tzinfo | None = None) -> AtTime:
    """`zone` as millis_of. Raises OptionInvalid, TopicNameInvalid."""
    example = '{"t":{"0":1714557600000,"1":"2024-05-01T10:00:00Z"}}'
    given = json_of(option, text, example)
    times: dict[str, dict[int, int]] = {}
    taken: list[tuple[Any, int]] = []
    for key, by_partition in given.items() if isinstance(given, dict) else [("", None)]:
        named = by_partition if isinstance(by_partition, dict) else {"": 0}
        good = all(map(_is_number, named))
        topic = parse_topic(key).short if good else ""
        if not good or topic in times:
            raise OptionInvalid(
                f"{option} is {quoted(text)}, not times by topic and partition number, each once",
                f"Give {option} as {example}.",
            )
        times[topic] = {int(p): _millis(at, option, zone) for p, at in named.items()}
        taken += zip(named.values(), times[topic].values(), strict=True)
    return AtTime(option, missing, by_partition=times, zoneless=_zoneless(zone, taken))


def parse_assigned(text: str, option: str) -> dict[str, tuple[int, ...]]:
    """Partitions by topic, ascending. Raises OptionInvalid, TopicNameInvalid."""
    given = json_of(option, text, '{"t":[0,1]}')
    assigned: dict[str, tuple[int, ...]] = {}
    for key, partitions in given.items() if isinstance(given, dict) else ():
        topic = parse_topic(key).short
        numbers = partitions if isinstance(partitions, list) else []
        good = all(type(number) is int and number >= 0 for number in numbers)
        if not numbers or not good or len(set(numbers)) != len(numbers) or topic in assigned:
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


def _numbers(by_partition: object) -> dict[int, int] | None:
    if not isinstance(by_partition, dict) or not all(map(_is_number, by_partition)):
        return None
    good = all(type(at) is int and at <= OFFSET_MAX for at in by_partition.values())
    return {int(name): at for name, at in by_partition.items()} if good else None


def _is_number(name: str) -> bool:
    """Whether it is a partition's number as JSON has it: 7, not 07."""
    return name.isascii() and name.isdigit() and len(name) < 10 and name == str(int(name))


def _zoneless(zone: tzinfo | None, taken: Iterable[tuple[Any, int]]) -> tuple[tuple[str, int], ...]:
    if zone is not None:
        return ()
    return tuple(time for time in taken if says_no_zone(time[0]))


def _millis(value: object, option: str, zone: tzinfo | None) -> int:
    text = value.strip() if isinstance(value, str) else str(value)
    if text.isascii() and text.isdigit() and in_seconds(int(text)):
        raise OptionInvalid(
            f"{option} is {text}, which as milliseconds since 1970 is before March 1973: those are"
            " seconds",
            f"Give milliseconds ({text}000), 0 for the beginning, or ISO text.",
        )
    millis = millis_of(value, zone)
    if millis is None:
        raise OptionInvalid(
            f"{option} is {value!r}, which is no moment",
            f"Give {option} milliseconds since 1970, or ISO text as 2024-05-01T10:00:00Z.",
        )
    return millis
