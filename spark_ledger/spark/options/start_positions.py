"""Where a read begins or ends, as a user says it, before any topic is known.

    earliest | latest                                  Named
    {"t":{"0":23,"1":-2},"_ids":{"t":"<uuid>"}}        Explicit: -2 earliest, -1 latest; no ids: any
    1714557600000 | 2024-05-01T10:00:00Z               AtTime, every partition
    {"t":{"0":1714557600000,"1":"2024-05-01"}}         AtTime, by partition
    the name of a subscription                         AtSubscription

Always true: what is malformed is refused here, without a connection; topics are known by their
short names, however they were written. Names that begin with an underscore are not topics but
remarks (`_ids`, and what a progress adds to its latest offset); a topic of such a name is written
in full.
"""

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from datetime import tzinfo
from typing import Any

from spark_ledger.errors import OffsetsMalformed, OptionInvalid
from spark_ledger.spark.options import timestamps
from spark_ledger.spark.options.values import json_of, once, quoted
from spark_ledger.topic.log.names import parse_topic

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
    """The first row committed at or after `every_ms`, or at or after the partition's own time.
    Where there is none, `missing` says what then: error, latest or earliest."""

    option: str
    missing: str
    every_ms: int | None = None
    by_partition: ByPartition | None = None
    zoneless: tuple[tuple[str, int], ...] = ()
    """Texts that say no zone, where no option says it, and what they were taken for."""


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
    """An offset as JSON has it, as offsets by topic and partition, and the topics' ids.

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
    """What a topic of that short name is called in an offset."""
    return parse_topic(topic).full if topic.startswith("_") else topic


def parse_time(text: str, option: str, missing: str, zone: tzinfo | None = None) -> AtTime:
    """`zone` as timestamps.millis_of. Raises OptionInvalid."""
    millis = _millis(text, option, zone)
    zoneless = _zoneless(zone, [(text, millis)])
    return AtTime(option, missing, every_ms=millis, zoneless=zoneless)


def parse_times(text: str, option: str, missing: str, zone: tzinfo | None = None) -> AtTime:
    """`zone` as timestamps.millis_of. Raises OptionInvalid, TopicNameInvalid."""
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
    return tuple(one for one in taken if timestamps.says_no_zone(one[0]))


def _millis(value: object, option: str, zone: tzinfo | None) -> int:
    millis = timestamps.millis_of(value, zone)
    if millis is None:
        raise OptionInvalid(
            f"{option} is {value!r}, which is no moment",
            f"Give {option} milliseconds since 1970, or ISO text as 2024-05-01T10:00:00Z.",
        )
    return millis
