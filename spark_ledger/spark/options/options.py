"""The options of format("ledger"), checked: the instructions for a reader and a writer.

Always true: an option that options/table.py does not list for this kind of query is refused with
the nearest name; a value that is wrong, empty, in conflict with another one, or of no effect
without another one that is absent, is an error that names the option; topics have their short names
here.
"""

import difflib
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from spark_ledger.config import resolve_service_url
from spark_ledger.errors import (
    LedgerError,
    NewerSparkNeeded,
    OffsetsStartAfterEnd,
    OptionConflict,
    OptionInvalid,
    OptionMissing,
    OptionUnknown,
    TxnVersionRequired,
)
from spark_ledger.spark.options import start_positions as places
from spark_ledger.spark.options.limits import Limits
from spark_ledger.spark.options.start_positions import AtSubscription, AtTime, ReadPosition
from spark_ledger.spark.options.table import (
    BELONGS_TO,
    NO_SCHEMA,
    PAYLOAD_FORMATS,
    READ_OPTIONS,
    SPARKS_OWN,
    STREAMS,
    WRITE_OPTIONS,
    Option,
    Use,
    default_of,
    kafkas,
    options_for,
)
from spark_ledger.spark.spark_version import check_limits
from spark_ledger.topic.log.names import parse_topic

IN_SQL = "In SQL a table has no options of its own: name it WITH (topic '...')."
NEAR = 0.7
"""How similar to an option's name a text must be to count as a misspelling of it."""
ANY_TOPIC = "*"
"""The target of a write whose rows name their topics."""
LIMITS = ("maxOffsetsPerTrigger", "maxBytesPerTrigger", "minOffsetsPerTrigger", "maxTriggerDelay")
STRATEGY = "startingOffsetsByTimestampStrategy"
WITH_METADATA = frozenset({"serviceUrl", "subscribe", "subscribePattern", "metadata"})


@dataclass(frozen=True)
class ReadOptions:
    """What to read: `topics` by name (with `assigned`: these partitions of them), or those that
    `pattern` matches; with `metadata`, a listing, maybe of all topics."""

    service_url: str
    topics: tuple[str, ...]
    starting: ReadPosition
    ending: ReadPosition
    pattern: str | None
    assigned: Mapping[str, tuple[int, ...]] | None
    subscription: str | None
    limits: Limits
    min_partitions: int | None
    task_rows: int | None
    task_bytes: int
    fail_on_data_loss: bool
    on_bad_entry: str
    on_other_format: str
    value_format: str
    include_headers: bool
    include_metadata: bool
    include_producer: bool
    key_filter: tuple[bytes, ...] | None
    metadata: str | None
    outage_timeout_s: float

    @property
    def zoneless(self) -> tuple[tuple[str, int], ...]:
        """Times of these options without a zone, and the milliseconds that they were taken for."""
        every = (place for place in (self.starting, self.ending) if isinstance(place, AtTime))
        return tuple(time for place in every for time in place.zoneless)

    def matching(self, names: Iterable[str]) -> list[str]:
        """The short names of topics that the pattern matches as a whole, sorted."""
        pattern = re.compile(self.pattern or "")
        return sorted(name for name in names if pattern.fullmatch(name))


@dataclass(frozen=True)
class WriteOptions:
    """Where to write and how. `topic` None: each row names its own. A topic that the write creates
    has `partitions` (None: not given, one); for the quorums and the durability None means the
    topic's own."""

    service_url: str
    topic: str | None
    partitions: int | None
    routing: str | None
    compression: str
    ensemble_size: int | None
    write_quorum: int | None
    ack_quorum: int | None
    durability: str | None
    txn_app_id: str | None
    txn_version: int | None
    on_replay: str | None
    bad_records_topic: str | None
    overwrite_held: bool
    user_metadata: str | None
    max_in_flight_bytes: int
    value_format: str
    schema_mode: str
    outage_timeout_s: float

    @property
    def txn_target(self) -> str:
        """The target under which transactions are recorded: the topic (see also
        WrittenTopic.txn_target), or ANY_TOPIC."""
        return self.topic or ANY_TOPIC

    @property
    def target(self) -> str:
        """The one topic. Raises OptionMissing without it."""
        if self.topic is None:
            raise _no_topic("topic")
        return self.topic

    @property
    def typed(self) -> bool:
        """Whether rows have columns of their own in place of `value`."""
        return self.value_format in PAYLOAD_FORMATS


@dataclass(frozen=True)
class ShapeOptions:
    """The options that decide which columns a reader has."""

    value_format: str
    include_headers: bool
    include_metadata: bool
    include_producer: bool
    metadata: str | None


def batch_read_options(options: Mapping[str, str]) -> ReadOptions:
    """Raises LEDGER_OPTION.*, OffsetsMalformed, OffsetsStartAfterEnd, TopicNameInvalid."""
    return _read_options(_checked(options, Use.BATCH_READ), starting="earliest")


def stream_read_options(options: Mapping[str, str]) -> ReadOptions:
    """Raises LEDGER_OPTION.*, OffsetsMalformed, TopicNameInvalid."""
    return _read_options(_checked(options, Use.STREAM_READ), starting="latest")


def batch_write_options(options: Mapping[str, str]) -> WriteOptions:
    """Raises LEDGER_OPTION.*, LEDGER_TXN.VERSION_REQUIRED, TopicNameInvalid."""
    given = _checked(options, Use.BATCH_WRITE)
    if given.has("txnAppId") and not given.has("txnVersion"):
        raise TxnVersionRequired(f"txnAppId is {given['txnAppId']!r}, but no txnVersion is given")
    given.needs("txnVersion", "txnAppId")
    given.needs("onReplay", "txnAppId")
    return _write_options(given, given["txnAppId"], given["txnVersion"])


def stream_write_options(options: Mapping[str, str]) -> WriteOptions:
    """Raises LEDGER_OPTION.*, TopicNameInvalid."""
    return _write_options(_checked(options, Use.STREAM_WRITE), None, None)


def shape_options(options: Mapping[str, str]) -> ShapeOptions:
    """For the schema of a reader or a writer, before Spark reveals which of them it is: they check
    the other options later."""
    given = {key.lower(): text.strip() for key, text in options.items()}
    kinds = {option.name: option.kind for option in READ_OPTIONS}

    def value_of(name: str) -> Any:
        text = given.get(name.lower())
        return default_of(name) if text is None else kinds[name].parse(name, text)

    return ShapeOptions(
        value_format=value_of("valueFormat"),
        include_headers=value_of("includeHeaders"),
        include_metadata=value_of("includeMetadata"),
        include_producer=value_of("includeProducer"),
        metadata=value_of("metadata"),
    )


def either_read_options(options: Mapping[str, str]) -> ReadOptions:
    """The options of a stream or else of a batch: Spark asks for columns before it reveals which of
    them it is. An error is that of a batch, unless only a stream has some of these options."""
    try:
        return stream_read_options(options)
    except NewerSparkNeeded:
        raise
    except LedgerError as failure:
        try:
            return batch_read_options(options)
        except LedgerError:
            given = {key.lower() for key in options}
            stream, batch = _names(Use.STREAM_READ), _names(Use.BATCH_READ)
            if given & (stream - batch) and not given & (batch - stream):
                raise failure from None
            raise


def _names(use: Use) -> set[str]:
    return {name.lower() for option in options_for(use) for name in option.names}


class _Given:
    """Values by the options' proper names; an option that was not given has its default."""

    def __init__(self, use: Use, values: Mapping[str, Any], texts: Mapping[str, str]) -> None:
        self.use = use
        self._values = values
        self.texts = texts

    def __getitem__(self, name: str) -> Any:
        return self._values.get(name)

    def has(self, name: str) -> bool:
        return name in self.texts

    def needs(self, name: str, other: str) -> None:
        """Raises OptionMissing if `name` is given without `other`: alone it means nothing."""
        if self.has(name) and not self.has(other):
            raise OptionMissing(
                f"{other} is not given, and {name} means nothing without it",
                f"Add {other}, or leave {name} out.",
            )

    def excludes(self, name: str, others: Iterable[str]) -> None:
        """Raises OptionConflict if `name` is given and one of the others too."""
        for other in others:
            if self.has(name) and self.has(other):
                raise OptionConflict(
                    f"{name} is {self.texts[name]!r} and {other} is {self.texts[other]!r}"
                )


def _read_options(given: _Given, starting: str) -> ReadOptions:
    if given.has("metadata"):
        given.excludes("metadata", (name for name in given.texts if name not in WITH_METADATA))
    _check_nothing_is_pushed_down(given)
    topics, assigned = _selected(given)
    ending = ("endingTimestamp", "endingOffsetsByTimestamp", "endingOffsets")
    start, end = _starting(given, starting), _place(given, ending, "latest", "latest")
    _check_zone(given)
    _check_times(start, end)
    if given["onBadEntry"] == "raw" and given["valueFormat"] in PAYLOAD_FORMATS:
        raise OptionConflict(
            f"onBadEntry is 'raw' and valueFormat is {given['valueFormat']!r}, whose rows have no"
            " column value",
            "Give onBadEntry=skip, or read with valueFormat=binary.",
        )
    if given["onOtherFormat"] != "fail" and given["valueFormat"] == "json":
        raise OptionConflict(
            f"onOtherFormat is {given['onOtherFormat']!r} and valueFormat is 'json', which reads"
            " rows of columns and the JSON text of rows of bytes",
            "Leave it out, or read with valueFormat=arrow.",
        )
    return ReadOptions(
        service_url=resolve_service_url(given["serviceUrl"]),
        topics=topics,
        starting=start,
        ending=end,
        pattern=given["subscribePattern"],
        assigned=assigned,
        subscription=given["subscription"],
        limits=_limits(given),
        min_partitions=given["minPartitions"],
        task_rows=given["maxRecordsPerPartition"],
        task_bytes=given["maxBytesPerPartition"],
        fail_on_data_loss=given["failOnDataLoss"],
        on_bad_entry=given["onBadEntry"],
        on_other_format=given["onOtherFormat"],
        value_format=given["valueFormat"],
        include_headers=given["includeHeaders"],
        include_metadata=given["includeMetadata"],
        include_producer=given["includeProducer"],
        key_filter=given["keyFilter"],
        metadata=given["metadata"],
        outage_timeout_s=given["outageTimeout"] / 1000,
    )


def _check_nothing_is_pushed_down(given: _Given) -> None:
    """Raises OptionInvalid for filterPushdown. Spark 4.2.0 keeps the plan that a reader with
    pushFilters made for one query, and uses it for every other query on the same DataFrame, and for
    both sides of a self-join: rows would be missing there, and no reader can know of it."""
    if given["filterPushdown"]:
        raise OptionInvalid(
            "filterPushdown is true, but Spark 4.2.0 reads what was planned for one query's filters"
            " in other queries on the same DataFrame too: rows would be missing there",
            "Leave it out: Spark applies the filters. The options assign, startingOffsets,"
            " endingOffsets, startingTimestamp, endingTimestamp and keyFilter limit a read safely.",
        )


def _write_options(given: _Given, app_id: str | None, version: int | None) -> WriteOptions:
    topic, bad = _short(given["topic"]), _short(given["badRecordsTopic"])
    if topic is not None and topic == bad:
        raise OptionConflict(
            f"badRecordsTopic is {bad!r}, the topic that is written", "Name another topic for it."
        )
    return WriteOptions(
        service_url=resolve_service_url(given["serviceUrl"]),
        topic=topic,
        partitions=given["partitions"] if given.has("partitions") else None,
        routing=given["routing"],
        compression=given["compression"],
        ensemble_size=given["ensembleSize"],
        write_quorum=given["writeQuorum"],
        ack_quorum=given["ackQuorum"],
        durability=given["durability"],
        txn_app_id=app_id,
        txn_version=version,
        on_replay=given["onReplay"],
        bad_records_topic=bad,
        overwrite_held=given["overwriteHeld"],
        user_metadata=given["userMetadata"],
        max_in_flight_bytes=given["maxInFlightBytes"],
        value_format=given["valueFormat"],
        schema_mode=_schema_mode(given),
        outage_timeout_s=given["outageTimeout"] / 1000,
    )


def _schema_mode(given: _Given) -> str:
    given.excludes("mergeSchema", ["schemaMode"])
    for name in ("schemaMode", "mergeSchema"):
        if given[name] == NO_SCHEMA:
            continue  # bytes may go to a topic with a schema
        given.needs(name, "valueFormat")
        if given.has(name) and given["valueFormat"] not in PAYLOAD_FORMATS:
            raise OptionConflict(
                f"{name} is given and valueFormat is {given['valueFormat']!r}: only values of "
                f"{', '.join(PAYLOAD_FORMATS)} have a schema",
                f"Write with valueFormat=arrow, or leave {name} out.",
            )
    return "evolve" if given["mergeSchema"] else str(given["schemaMode"])


def _selected(given: _Given) -> tuple[tuple[str, ...], Mapping[str, tuple[int, ...]] | None]:
    """The named topics, and their partitions if `assign` names them."""
    ways = [name for name in ("subscribe", "subscribePattern", "assign") if given.has(name)]
    if len(ways) > 1:
        named = " and ".join(f"{way} ({given.texts[way]!r})" for way in ways)
        raise OptionConflict(f"what to read is named in {len(ways)} ways: {named}")
    if not ways and not given.has("metadata"):
        raise _no_topic("subscribe")
    if given.has("assign"):
        assigned = places.parse_assigned(given["assign"], "assign")
        return tuple(assigned), assigned
    return _topics(given["subscribe"]) if given.has("subscribe") else (), None


def _topics(named: str) -> tuple[str, ...]:
    names = [name.strip() for name in named.split(",")]
    if not all(names):
        raise OptionInvalid(f"a topic's name is empty in {named!r}", "Name topics as 'a,b'.")
    topics = [parse_topic(name).short for name in names]
    if len(set(topics)) != len(topics):
        raise OptionInvalid(f"a topic is named twice in {named!r}", "Name each topic once.")
    return tuple(topics)


def _starting(given: _Given, default: str) -> ReadPosition:
    """Kafka's precedence: startingTimestamp, startingOffsetsByTimestamp, startingOffsets."""
    by_time = ("startingTimestamp", "startingOffsetsByTimestamp")
    given.excludes("startingSubscription", (*by_time, "startingOffsets"))
    if given.has("startingSubscription"):
        return AtSubscription("startingSubscription", given["startingSubscription"])
    missing = given[STRATEGY]
    if given.has(STRATEGY) and not any(map(given.has, by_time)):
        given.needs(STRATEGY, by_time[0])
    return _place(given, (*by_time, "startingOffsets"), default, missing)


def _check_zone(given: _Given) -> None:
    """Raises OptionMissing for a time zone without a time."""
    if not any("Timestamp" in name and name != STRATEGY for name in given.texts):
        given.needs("timeZone", "startingTimestamp")


def _place(given: _Given, ways: tuple[str, str, str], default: str, missing: str) -> ReadPosition:
    """The position by the first of the ways that is used; all that are used must be well formed."""
    (every, by_partition, offsets), zone = ways, given["timeZone"]
    used: list[ReadPosition] = []
    if given.has(every):
        used.append(places.parse_time(given[every], every, missing, zone))
    if given.has(by_partition):
        used.append(places.parse_times(given[by_partition], by_partition, missing, zone))
    used.append(places.parse_offsets(given.texts.get(offsets, default), offsets))
    return used[0]


def _check_times(start: ReadPosition, end: ReadPosition) -> None:
    """Raises OffsetsStartAfterEnd for two moments in the wrong order."""
    moments = [place.every_ms for place in (start, end) if isinstance(place, AtTime)]
    first, last = moments if len(moments) == 2 else (None, None)
    if first is not None and last is not None and first > last:
        raise OffsetsStartAfterEnd(
            f"{start.option} is {first}, which is after {end.option} {last}",
            "Give startingTimestamp at or before endingTimestamp.",
        )


def _limits(given: _Given) -> Limits:
    check_limits(name for name in LIMITS if given.has(name))
    given.needs("maxTriggerDelay", "minOffsetsPerTrigger")
    most, fewest = given["maxOffsetsPerTrigger"], given["minOffsetsPerTrigger"]
    if most is not None and fewest is not None and fewest > most:
        raise OptionConflict(
            f"minOffsetsPerTrigger is {fewest}, more than maxOffsetsPerTrigger {most}",
            "Give maxOffsetsPerTrigger at least minOffsetsPerTrigger.",
        )
    if given.use is not Use.STREAM_READ:
        return Limits()
    return Limits(most, given["maxBytesPerTrigger"], fewest, given["maxTriggerDelay"])


def _checked(options: Mapping[str, str], use: Use) -> _Given:
    """The options' values under their proper names. Raises for the first that is wrong."""
    table = options_for(use)
    by_name = {name.lower(): (option, name) for option in table for name in option.names}
    used: dict[str, list[tuple[str, str]]] = {}
    for key, text in options.items():
        if key.lower() in by_name:
            option, name = by_name[key.lower()]
            used.setdefault(option.name, []).append((name, text.strip()))
        elif use not in STREAMS or key.lower() not in SPARKS_OWN:
            raise _unknown(key.lower(), table, use)
    texts = {name: _one_text(name, ways) for name, ways in used.items()}
    values = {}
    for option in table:
        value = texts.get(option.name, option.default)
        given_as = used[option.name][0][0] if option.name in used else option.name
        values[option.name] = None if value is None else option.kind.parse(given_as, value)
    return _Given(use, values, texts)


def _one_text(name: str, ways: list[tuple[str, str]]) -> str:
    if len(ways) > 1:
        named = " and ".join(f"{_way(way)} ({text!r})" for way, text in ways)
        what = "the topic is named" if name in ("subscribe", "topic") else f"{name} is given"
        raise OptionConflict(f"{what} in {len(ways)} ways: {named}")
    ((way, text),) = ways
    if not text:
        raise OptionInvalid(f"{_way(way)} is empty", "Give it a value, or leave it out.")
    return text


def _way(option: str) -> str:
    return "the path of load(), save() or start()" if option == "path" else f"option {option}"


def _unknown(lower: str, table: Iterable[Option], use: Use) -> LedgerError:
    if lower == "paths":
        return OptionInvalid(
            "the path of load() is a list", "Name several topics in one text: load('a,b')."
        )
    names = {name.lower(): name for option in table for name in option.names if name != "path"}
    for option in (*READ_OPTIONS, *WRITE_OPTIONS):
        if lower in (name.lower() for name in option.names):
            return OptionUnknown(
                f"{option.name} belongs to {BELONGS_TO[option.uses]}; this is {use.value}",
                "Leave the option out.",
            )
    if lower in SPARKS_OWN:
        return OptionUnknown(
            f"{lower!r} belongs to a streaming query; this is {use.value}", "Leave the option out."
        )
    remedy = kafkas(lower)
    if remedy is not None:
        return OptionUnknown(f"{lower!r} is an option of Kafka's, which is not here", remedy)
    near = difflib.get_close_matches(lower, names, n=1, cutoff=NEAR)
    if near:
        remedy = f"Did you mean {names[near[0]]}?"
    else:
        remedy = f"Known are: {', '.join(sorted(names.values()))}."
    return OptionUnknown(f"{use.value} has no option {lower!r}", remedy)


def _no_topic(option: str) -> OptionMissing:
    return OptionMissing(
        "no topic is named",
        f"Add option {option!r}, or give the topic to load(), save() or start(). {IN_SQL}",
    )


def _short(name: str | None) -> str | None:
    return None if name is None else parse_topic(name).short
