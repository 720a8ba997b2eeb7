"""The options of format("ledger"), checked: the instructions for a reader and a writer.

Always true: an option that options/table.py does not list for this kind of query is refused, and
the error has the name of the most similar option. A value is refused if it is wrong or empty, if it
conflicts with another option, or if it has no effect because another option is absent; the error
has the option's name. Topics have their short names here.
"""

import difflib
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

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
    SPARK_OPTIONS,
    STREAMS,
    WRITE_OPTIONS,
    Option,
    Use,
    default_of,
    kafka_remedy,
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


class FollowedSubscription(NamedTuple):
    """The subscription that follows a query, and what the query does if it was moved (one of
    table.ON_MOVED)."""

    name: str
    on_moved: str


@dataclass(frozen=True)
class ReadOptions:
    """A read of `topics` (of their partitions in `assigned` only, unless that is None), or of the
    topics that `pattern` matches. With `metadata`: a listing of these topics; of all topics if
    there are neither names nor a pattern."""

    service_url: str
    topics: tuple[str, ...]
    starting: ReadPosition
    ending: ReadPosition
    pattern: str | None
    assigned: Mapping[str, tuple[int, ...]] | None
    subscription: FollowedSubscription | None
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
    def zoneless_times(self) -> tuple[tuple[str, int], ...]:
        """The start's and the end's texts without a zone, each with its moment in the driver's."""
        by_time = (place for place in (self.starting, self.ending) if isinstance(place, AtTime))
        return tuple(time for place in by_time for time in place.zoneless_times)

    def matching(self, names: Iterable[str]) -> list[str]:
        """The short names of topics that the pattern matches as a whole, sorted."""
        pattern = re.compile(self.pattern or "")
        return sorted(name for name in names if pattern.fullmatch(name))


@dataclass(frozen=True)
class WriteOptions:
    """The target of a write, and how it writes. `topic` None: each row names its topic. A topic
    that the write creates has `partitions` partitions (None: the user gave no number; the topic has
    one). Quorums or durability None: the topic's values."""

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
        """The target of the transaction records before the topic's id is read: the topic's name, or
        ANY_TOPIC. (WrittenTopic.txn_target has the id.)"""
        return self.topic or ANY_TOPIC

    @property
    def target(self) -> str:
        """The topic of all rows. Raises OptionMissing without it."""
        if self.topic is None:
            raise _no_topic("topic")
        return self.topic

    @property
    def typed(self) -> bool:
        """Whether the rows are typed rows."""
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
    return _read_options(_parse(options, Use.BATCH_READ), starting="earliest")


def stream_read_options(options: Mapping[str, str]) -> ReadOptions:
    """Raises LEDGER_OPTION.*, OffsetsMalformed, TopicNameInvalid."""
    return _read_options(_parse(options, Use.STREAM_READ), starting="latest")


def batch_write_options(options: Mapping[str, str]) -> WriteOptions:
    """Raises LEDGER_OPTION.*, LEDGER_TXN.VERSION_REQUIRED, TopicNameInvalid."""
    given = _parse(options, Use.BATCH_WRITE)
    if given.has("txnAppId") and not given.has("txnVersion"):
        raise TxnVersionRequired(f"txnAppId is {given['txnAppId']!r}, but no txnVersion is given")
    given.needs("txnVersion", "txnAppId")
    given.needs("onReplay", "txnAppId")
    return _write_options(given, given["txnAppId"], given["txnVersion"])


def stream_write_options(options: Mapping[str, str]) -> WriteOptions:
    """Raises LEDGER_OPTION.*, TopicNameInvalid."""
    return _write_options(_parse(options, Use.STREAM_WRITE), app_id=None, version=None)


def shape_options(options: Mapping[str, str]) -> ShapeOptions:
    """The options that decide the schema. Spark has not revealed yet whether it reads or writes;
    the reader or writer checks all other options later."""
    texts = {key.lower(): text.strip() for key, text in options.items()}
    kinds = {option.name: option.kind for option in READ_OPTIONS}

    def value_of(name: str) -> Any:
        text = texts.get(name.lower())
        return default_of(name) if text is None else kinds[name].parse(name, text)

    return ShapeOptions(
        value_format=value_of("valueFormat"),
        include_headers=value_of("includeHeaders"),
        include_metadata=value_of("includeMetadata"),
        include_producer=value_of("includeProducer"),
        metadata=value_of("metadata"),
    )


def either_read_options(options: Mapping[str, str]) -> ReadOptions:
    """The options of a streaming read or, if this fails, of a batch read: Spark needs the columns
    before it reveals the kind of read. If both fail, raises the batch read's error, or the
    streaming read's error if some options belong only to streams."""
    try:
        return stream_read_options(options)
    except NewerSparkNeeded:
        raise
    except LedgerError as failure:
        try:
            return batch_read_options(options)
        except LedgerError:
            names = {key.lower() for key in options}
            stream, batch = _names(Use.STREAM_READ), _names(Use.BATCH_READ)
            if names & (stream - batch) and not names & (batch - stream):
                raise failure from None
            raise


def _names(use: Use) -> set[str]:
    return {name.lower() for option in options_for(use) for name in option.names}


class _OptionValues:
    """The options' values by their main names, with the defaults of options that the user did not
    give. `texts` has only the options that the user gave."""

    def __init__(self, use: Use, values: Mapping[str, Any], texts: Mapping[str, str]) -> None:
        self.use = use
        self._values = values
        self.texts = texts

    def __getitem__(self, name: str) -> Any:
        return self._values.get(name)

    def has(self, name: str) -> bool:
        return name in self.texts

    def needs(self, name: str, other: str) -> None:
        """Raises OptionMissing if the user gave `name` without `other`: it then has no effect."""
        if self.has(name) and not self.has(other):
            raise OptionMissing(
                f"{other} is not given, and {name} has no effect without it",
                f"Add {other}, or leave {name} out.",
            )

    def excludes(self, name: str, others: Iterable[str]) -> None:
        """Raises OptionConflict if `name` is given together with one of the others."""
        for other in others:
            if self.has(name) and self.has(other):
                raise OptionConflict(
                    f"{name} is {self.texts[name]!r} and {other} is {self.texts[other]!r}"
                )


def _read_options(given: _OptionValues, starting: str) -> ReadOptions:
    if given.has("metadata"):
        given.excludes("metadata", (name for name in given.texts if name not in WITH_METADATA))
    _check_no_filter_pushdown(given)
    topics, assigned = _topics_to_read(given)
    ending = ("endingTimestamp", "endingOffsetsByTimestamp", "endingOffsets")
    start, end = _start(given, starting), _first_given(given, ending, "latest", "latest")
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
        subscription=_followed(given),
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


def _check_no_filter_pushdown(given: _OptionValues) -> None:
    """Raises OptionInvalid for filterPushdown. If a reader has pushFilters, Spark 4.2.0 keeps the
    plan that the reader made for one query's filters, and uses the plan for every other query on
    the same DataFrame and for both sides of a self-join. Rows would be missing in these queries,
    and the reader cannot detect the error."""
    if given["filterPushdown"]:
        raise OptionInvalid(
            "filterPushdown is true, but Spark 4.2.0 uses the plan for one query's filters in other"
            " queries on the same DataFrame too: rows would be missing in those queries",
            "Leave it out: Spark applies the filters. The options assign, startingOffsets,"
            " endingOffsets, startingTimestamp, endingTimestamp and keyFilter limit a read safely.",
        )


def _write_options(given: _OptionValues, app_id: str | None, version: int | None) -> WriteOptions:
    topic, bad_records_topic = _short(given["topic"]), _short(given["badRecordsTopic"])
    if topic is not None and topic == bad_records_topic:
        raise OptionConflict(
            f"badRecordsTopic is {bad_records_topic!r}, the topic that the rows are written to",
            "Name another topic for bad records.",
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
        bad_records_topic=bad_records_topic,
        overwrite_held=given["overwriteHeld"],
        user_metadata=given["userMetadata"],
        max_in_flight_bytes=given["maxInFlightBytes"],
        value_format=given["valueFormat"],
        schema_mode=_schema_mode(given),
        outage_timeout_s=given["outageTimeout"] / 1000,
    )


def _schema_mode(given: _OptionValues) -> str:
    given.excludes("mergeSchema", ["schemaMode"])
    for name in ("schemaMode", "mergeSchema"):
        if given[name] == NO_SCHEMA:
            continue  # rows of bytes may also have this value
        given.needs(name, "valueFormat")
        if given.has(name) and given["valueFormat"] not in PAYLOAD_FORMATS:
            raise OptionConflict(
                f"{name} is given and valueFormat is {given['valueFormat']!r}: only values of "
                f"{', '.join(PAYLOAD_FORMATS)} have a schema",
                f"Write with valueFormat=arrow, or leave {name} out.",
            )
    return "evolve" if given["mergeSchema"] else str(given["schemaMode"])


def _topics_to_read(
    given: _OptionValues,
) -> tuple[tuple[str, ...], Mapping[str, tuple[int, ...]] | None]:
    """The topics that the options name, and the partitions if `assign` names them."""
    names = [name for name in ("subscribe", "subscribePattern", "assign") if given.has(name)]
    if len(names) > 1:
        ways = " and ".join(f"{name} ({given.texts[name]!r})" for name in names)
        raise OptionConflict(f"the topics to read are named in {len(names)} ways: {ways}")
    if not names and not given.has("metadata"):
        raise _no_topic("subscribe")
    if given.has("assign"):
        assigned = places.parse_assigned(given["assign"], "assign")
        return tuple(assigned), assigned
    return _topics(given["subscribe"]) if given.has("subscribe") else (), None


def _topics(text: str) -> tuple[str, ...]:
    names = [name.strip() for name in text.split(",")]
    if not all(names):
        raise OptionInvalid(f"a topic's name is empty in {text!r}", "Name topics as 'a,b'.")
    topics = [parse_topic(name).short for name in names]
    if len(set(topics)) != len(topics):
        raise OptionInvalid(f"a topic is named twice in {text!r}", "Name each topic once.")
    return tuple(topics)


def _start(given: _OptionValues, default: str) -> ReadPosition:
    """Kafka's precedence: startingTimestamp, startingOffsetsByTimestamp, startingOffsets."""
    by_time = ("startingTimestamp", "startingOffsetsByTimestamp")
    given.excludes("startingSubscription", (*by_time, "startingOffsets"))
    if given.has("startingSubscription"):
        return AtSubscription("startingSubscription", given["startingSubscription"])
    missing = given[STRATEGY]
    if given.has(STRATEGY) and not any(map(given.has, by_time)):
        given.needs(STRATEGY, by_time[0])
    return _first_given(given, (*by_time, "startingOffsets"), default, missing)


def _followed(given: _OptionValues) -> FollowedSubscription | None:
    given.needs("onSubscriptionMoved", "subscription")
    name = given["subscription"]
    return None if name is None else FollowedSubscription(name, given["onSubscriptionMoved"])


def _check_zone(given: _OptionValues) -> None:
    """Raises OptionMissing if the user gave a time zone but no time."""
    if not any("Timestamp" in name and name != STRATEGY for name in given.texts):
        given.needs("timeZone", "startingTimestamp")


def _first_given(
    given: _OptionValues, names: tuple[str, str, str], default: str, missing: str
) -> ReadPosition:
    """The position by the first option of `names` that the user gave. `names` are the options for a
    time, for times by partition, and for offsets. All three are parsed, so that each malformed text
    is refused."""
    (time, by_partition, offsets), zone = names, given["timeZone"]
    positions: list[ReadPosition] = []
    if given.has(time):
        positions.append(places.parse_time(given[time], time, missing, zone))
    if given.has(by_partition):
        positions.append(places.parse_times(given[by_partition], by_partition, missing, zone))
    positions.append(places.parse_offsets(given.texts.get(offsets, default), offsets))
    return positions[0]


def _check_times(start: ReadPosition, end: ReadPosition) -> None:
    """Raises OffsetsStartAfterEnd if both are moments, and the start is after the end."""
    moments = [place.every_ms for place in (start, end) if isinstance(place, AtTime)]
    first, last = moments if len(moments) == 2 else (None, None)
    if first is not None and last is not None and first > last:
        raise OffsetsStartAfterEnd(
            f"{start.option} is {first}, which is after {end.option} {last}",
            "Give startingTimestamp at or before endingTimestamp.",
        )


def _limits(given: _OptionValues) -> Limits:
    check_limits(name for name in LIMITS if given.has(name))
    given.needs("maxTriggerDelay", "minOffsetsPerTrigger")
    rows_max, rows_min = given["maxOffsetsPerTrigger"], given["minOffsetsPerTrigger"]
    if rows_max is not None and rows_min is not None and rows_min > rows_max:
        raise OptionConflict(
            f"minOffsetsPerTrigger is {rows_min}, more than maxOffsetsPerTrigger {rows_max}",
            "Give maxOffsetsPerTrigger at least minOffsetsPerTrigger.",
        )
    if given.use is not Use.STREAM_READ:
        return Limits()
    return Limits(rows_max, given["maxBytesPerTrigger"], rows_min, given["maxTriggerDelay"])


def _parse(options: Mapping[str, str], use: Use) -> _OptionValues:
    """The options' values under their main names. Raises for the first option that is wrong."""
    table = options_for(use)
    by_name = {name.lower(): (option, name) for option in table for name in option.names}
    given: dict[str, list[tuple[str, str]]] = {}  # by main name: names as given, with their texts
    for key, text in options.items():
        if key.lower() in by_name:
            option, name = by_name[key.lower()]
            given.setdefault(option.name, []).append((name, text.strip()))
        elif use not in STREAMS or key.lower() not in SPARK_OPTIONS:
            raise _unknown(key.lower(), table, use)
    texts = {name: _only_text(name, ways) for name, ways in given.items()}
    values = {}
    for option in table:
        text_or_default = texts.get(option.name, option.default)
        name = given[option.name][0][0] if option.name in given else option.name
        values[option.name] = (
            None if text_or_default is None else option.kind.parse(name, text_or_default)
        )
    return _OptionValues(use, values, texts)


def _only_text(name: str, ways: list[tuple[str, str]]) -> str:
    """The text of an option; raises OptionConflict if it is given under several of its names."""
    if len(ways) > 1:
        quotes = " and ".join(f"{_name_in_error(alias)} ({text!r})" for alias, text in ways)
        text = "the topic is named" if name in ("subscribe", "topic") else f"{name} is given"
        raise OptionConflict(f"{text} in {len(ways)} ways: {quotes}")
    ((alias, text),) = ways
    if not text:
        raise OptionInvalid(
            f"{_name_in_error(alias)} is empty", "Give it a value, or leave it out."
        )
    return text


def _name_in_error(option: str) -> str:
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
    if lower in SPARK_OPTIONS:
        return OptionUnknown(
            f"{lower!r} belongs to a streaming query; this is {use.value}", "Leave the option out."
        )
    remedy = kafka_remedy(lower)
    if remedy is not None:
        return OptionUnknown(f"{lower!r} is an option of Kafka's source, not of this one", remedy)
    near = difflib.get_close_matches(lower, names, n=1, cutoff=NEAR)
    if near:
        remedy = f"Did you mean {names[near[0]]}?"
    else:
        remedy = f"The options are: {', '.join(sorted(names.values()))}."
    return OptionUnknown(f"{use.value} has no option {lower!r}", remedy)


def _no_topic(option: str) -> OptionMissing:
    return OptionMissing(
        "no topic is named",
        f"Add option {option!r}, or give the topic to load(), save() or start(). {IN_SQL}",
    )


def _short(name: str | None) -> str | None:
    return None if name is None else parse_topic(name).short
