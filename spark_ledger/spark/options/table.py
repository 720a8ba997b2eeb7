"""Every option of format("ledger"): its names, the queries that take it, its default and meaning.

Always true: an option that is not in this table is refused, and so is an option of another kind of
query; names are compared without case; a user gives an option under only one of its names. This
table is used to parse the options, and to make the tables of docs/spark.md.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum
from typing import Any

from bookie_server.api.settings import DEFAULT_SERVICE_URL
from spark_ledger.config import SERVICE_URL_VARIABLE
from spark_ledger.spark.options.values import (
    Bytes,
    Choice,
    Flag,
    Keys,
    Millis,
    OptionKind,
    Pattern,
    Text,
    Whole,
    Zone,
)
from spark_ledger.topic.entry.routing import Routing
from spark_ledger.topic.log.policies import PARTITIONS_MAX
from spark_ledger.units import MIB

SPARK_OPTIONS = frozenset(
    {
        "checkpointlocation",
        "queryname",
        "outputmode",
        "asyncprogresstrackingenabled",
        "asyncprogresstrackingcheckpointintervalms",
        "_asyncprogresstrackingoverridesinksupportcheck",
    }
)
"""Options of Spark itself that Spark also gives to a stream's source or sink, which ignores
them."""

PAYLOAD_FORMATS = ("json", "arrow", "schema")
"""The formats of typed rows, which have the payload's columns in place of `value`."""
ON_MOVED = (CHECKPOINT, SUBSCRIPTION, FAIL) = ("checkpoint", "subscription", "fail")
FORMATS = ("binary", "string", *PAYLOAD_FORMATS)
NO_SCHEMA = "none"
"""The schemaMode that neither registers nor compares columns, and also allows rows of bytes."""
LISTINGS = (
    *("topics", "partitions", "segments", "ledgers"),
    *("subscriptions", "lag", "commits", "bookies"),
)
NAME_CHARS_MAX = 200
USER_METADATA_CHARS_MAX = 8192


_TLS = (
    "Leave it out: connections are not encrypted, and anyone with access to the ports may read and"
    " write."
)
_NO_COUNTERPART = "Leave it out: there is no such option here."
_RETRIES = "Leave it out: a failed read is repeated on the other copies."
_GROUP = "Leave it out, or name a durable cursor with subscription."
KAFKA_REMEDIES: Mapping[str, str] = {
    "kafka.bootstrap.servers": f"Here it is serviceUrl, as {DEFAULT_SERVICE_URL}.",
    "kafka.group.id": _GROUP,
    "groupIdPrefix": _GROUP,
    "kafkaConsumer.pollTimeoutMs": _RETRIES,
    "fetchOffset.numRetries": _RETRIES,
    "fetchOffset.retryIntervalMs": _RETRIES,
    "kafka.auto.offset.reset": "Here it is startingOffsets.",
    "kafka.enable.auto.commit": "Leave it out: a query's position is in its checkpoint.",
    "kafka.isolation.level": "Leave it out: only committed rows are read.",
    "kafka.max.partition.fetch.bytes": "Here it is maxBytesPerPartition, bytes of a task.",
    "kafka.max.poll.records": "Here it is maxOffsetsPerTrigger, rows of a micro-batch.",
    "kafka.acks": "Here it is ackQuorum, a number of copies.",
    "kafka.enable.idempotence": "Leave it out: a write is committed once.",
    "kafka.transactional.id": "Here it is txnAppId, with txnVersion; a stream needs neither.",
    "kafka.compression.type": "Here it is compression: none, lz4 or zstd.",
    "kafka.partitioner.class": (
        "Here it is routing: murmur2 is the Java client's default, crc32 librdkafka's."
    ),
    "kafka.buffer.memory": "Here it is maxInFlightBytes.",
    "kafka.batch.size": "Leave it out: rows are gathered to entries by maxInFlightBytes.",
    "kafka.linger.ms": "Leave it out: rows are gathered to entries by maxInFlightBytes.",
    "kafka.max.request.size": "Leave it out: a row must fit into an entry, entry_bytes_max.",
    "kafka.security.protocol": _TLS,
    "kafka.sasl.": _TLS,
    "kafka.ssl.": _TLS,
    "kafka.": _NO_COUNTERPART,
}
"""What to do instead of an option of Spark's Kafka source and sink that has another name or no
counterpart here. A name that ends with a dot stands for every option that begins with it."""


class Use(Enum):
    BATCH_READ = "a batch read"
    STREAM_READ = "a streaming read"
    BATCH_WRITE = "a batch write"
    STREAM_WRITE = "a streaming write"


READ = (Use.BATCH_READ, Use.STREAM_READ)
STREAMS = (Use.STREAM_READ, Use.STREAM_WRITE)
WRITE = (Use.BATCH_WRITE, Use.STREAM_WRITE)
BELONGS_TO = {
    READ: "a read",
    WRITE: "a write",
    (Use.BATCH_READ,): "a batch read (spark.read)",
    (Use.STREAM_READ,): "a streaming read (spark.readStream)",
    (Use.BATCH_WRITE,): "a batch write (df.write)",
}
"""The words for the queries that take an option."""


@dataclass(frozen=True, slots=True)
class Option:
    """`default` is the text that is parsed if the option is not given (None: no default).
    `default_in_docs` replaces `default` in the documentation."""

    name: str
    uses: tuple[Use, ...]
    kind: OptionKind
    default: str | None
    meaning: str
    aliases: tuple[str, ...] = ()
    default_in_docs: str = ""

    @property
    def names(self) -> tuple[str, ...]:
        return (self.name, *self.aliases)


def _service_url(uses: tuple[Use, ...]) -> Option:
    return Option(
        *("serviceUrl", uses, Text(), None),
        "where the cluster is",
        aliases=("bootstrap.servers", "service.url"),
        default_in_docs=f"`{SERVICE_URL_VARIABLE}`, else `{DEFAULT_SERVICE_URL}`",
    )


def _outage_timeout(uses: tuple[Use, ...]) -> Option:
    return Option(
        *("outageTimeout", uses, Millis(), "5m"),
        "how long the query waits for a metadata store that gives no response before it fails with "
        "`LEDGER_UNAVAILABLE` (see Outages); `0`: 15 s for each response",
    )


READ_OPTIONS = (
    _service_url(READ),
    Option(
        *("subscribe", READ, Text(), None),
        "a topic, or several separated by commas; also the path of `load(...)`",
        aliases=("topic", "topics", "path"),
        default_in_docs="one of three",
    ),
    Option(
        *("subscribePattern", READ, Pattern(), None),
        "a regular expression for whole names of topics; a stream finds topics made"
        " later and reads them from their beginning",
        aliases=("topicsPattern",),
        default_in_docs="one of three",
    ),
    Option(
        *("assign", READ, Text(), None),
        'these partitions only, as `{"t":[0,1]}`',
        default_in_docs="one of three",
    ),
    Option(
        *("startingOffsets", READ, Text(), None),
        '`earliest`, `latest`, or JSON `{"t":{"0":23,"1":-2}}`: every partition, -2'
        " earliest, -1 latest; also the text of any progress's `endOffset`. A "
        "stream starts there if it has no checkpoint; partitions and topics that "
        "come later start at their beginning",
        default_in_docs="batch `earliest`, stream `latest`",
    ),
    Option(
        *("startingTimestamp", READ, Text(64), None),
        "start at the first row committed at or after this time (a row that came by a broker: "
        "stored): milliseconds since 1970 (a number below 10^11 is refused: it would be seconds; 0 "
        "is the beginning), or ISO text as `2024-05-01T12:00:00Z`. Goes before "
        "`startingOffsetsByTimestamp`",
    ),
    Option(
        *("startingOffsetsByTimestamp", READ, Text(), None),
        "as `startingTimestamp`, for each partition:"
        ' `{"t":{"0":1714557600000,"1":"2024-05-01T00:00Z"}}`. Goes before `startingOffsets`',
    ),
    Option(
        *(
            "startingOffsetsByTimestampStrategy",
            READ,
            Choice(("error", "latest", "earliest")),
            "error",
        ),
        "the start of a partition that has no such row: `error`, `latest` or `earliest`",
    ),
    Option(
        *("timeZone", READ, Zone(), None),
        "the zone of times without a zone in these options, as `Europe/Berlin`, `UTC` or `+01:00`"
        " (see Time zones)",
        default_in_docs="the driver's zone, which a session starts with",
    ),
    Option(
        *("startingSubscription", READ, Text(NAME_CHARS_MAX), None),
        "start at the position of the subscription of this name, without the rows beyond it that"
        " its consumers have acknowledged one by one. Of several topics, those without this"
        " subscription are read from their beginning",
    ),
    Option("endingOffsets", (Use.BATCH_READ,), Text(), "latest", "as `startingOffsets`; exclusive"),
    Option(
        *("endingTimestamp", (Use.BATCH_READ,), Text(64), None),
        "end before the first row committed at or after this time; without such a row, at the"
        " latest",
    ),
    Option(
        *("endingOffsetsByTimestamp", (Use.BATCH_READ,), Text(), None),
        "as `endingTimestamp`, for each partition",
    ),
    Option(
        *("subscription", (Use.STREAM_READ,), Text(NAME_CHARS_MAX), None),
        "a subscription of this name follows the query, holds rows against retention and shows"
        " in lag; one live query per name",
        aliases=("predefinedSubscription",),
    ),
    Option(
        *("onSubscriptionMoved", (Use.STREAM_READ,), Choice(ON_MOVED), CHECKPOINT),
        "where a query goes on that comes back after consumers, another query or an operator moved "
        "its `subscription`: `checkpoint`: at its checkpoint; `subscription`: where the "
        "subscription is now, without the rows that consumers acknowledged one by one; `fail`: "
        "with both positions",
    ),
    Option(
        *("maxOffsetsPerTrigger", (Use.STREAM_READ,), Whole(), None),
        "rows in one micro-batch at most, shared by the partitions according to their backlog; "
        "rows that were removed do not count",
    ),
    Option(
        *("maxBytesPerTrigger", (Use.STREAM_READ,), Bytes(), None),
        "stored bytes in one micro-batch at most, shared in the same way, but always at least one"
        " row; `64m`, `1g`",
    ),
    Option(
        *("minOffsetsPerTrigger", (Use.STREAM_READ,), Whole(), None),
        "wait for this number of rows, but no longer than `maxTriggerDelay`; not under"
        " `availableNow`",
    ),
    Option(
        *("maxTriggerDelay", (Use.STREAM_READ,), Millis(), "15m"),
        "the longest time that `minOffsetsPerTrigger` holds rows back",
    ),
    Option(
        *("minPartitions", READ, Whole(), None),
        "at least this number of tasks, unless there are fewer rows; several tasks may read one"
        " partition",
    ),
    Option("maxRecordsPerPartition", READ, Whole(), None, "rows that one task reads at most"),
    Option(
        "maxBytesPerPartition", READ, Bytes(), "256m", "stored bytes of one task at most, about"
    ),
    Option(
        "failOnDataLoss", READ, Flag(), "true", "`false`: leave out exactly the rows that are lost"
    ),
    Option(
        *("onBadEntry", READ, Choice(("fail", "skip", "raw")), "fail"),
        "for stored rows, and values of clients' schemas, that cannot be decoded: `fail`, with"
        " their place; `skip` them; `raw`: one row with the bytes as `value` (see Rows that cannot"
        " be decoded)",
    ),
    Option(
        *("onOtherFormat", READ, Choice(("fail", "skip", "null")), "fail"),
        "for typed rows in a read of bytes, and rows of bytes in a read of columns: `fail`, with"
        " their place; `skip` them; `null`: a payload of nulls (see Typed values)",
    ),
    _outage_timeout(READ),
    Option(
        *("valueFormat", READ, Choice(FORMATS), "binary"),
        "`binary`; `string`: `value` is text; `json`: the columns are the fields of the JSON text"
        " in `value`; `arrow`: the columns that were written; `schema`: the columns of the topic's"
        " registered schema, also of a schema that Pulsar's clients declared (see Typed values)",
    ),
    Option("includeHeaders", READ, Flag(), "false", "adds Kafka's column `headers`"),
    Option("includeMetadata", READ, Flag(), "false", "adds columns with the place of a row"),
    Option(
        *("includeProducer", READ, Flag(), "false"),
        "adds the name and the sequence id that a Pulsar producer gave a row",
    ),
    Option(
        *("keyFilter", READ, Keys(), None),
        'only rows with this key, or with one of several keys: `["AA","DL"]`; an entry whose filter'
        " of keys shows that it has no such row is not fetched",
    ),
    Option(
        *("filterPushdown", (Use.BATCH_READ,), Flag(), "false"),
        "`true` is refused, as Spark 4.2.0 would give other queries the rows of one query's "
        "filters (see Known limits)",
    ),
    Option(
        *("metadata", (Use.BATCH_READ,), Choice(LISTINGS), None),
        "a listing instead of rows: `topics`, `partitions`, `segments`, `ledgers`, "
        "`subscriptions`, `lag`, `commits`, `bookies`",
    ),
)
WRITE_OPTIONS = (
    _service_url(WRITE),
    Option(
        *("topic", WRITE, Text(), None),
        "the topic of all rows; the first write makes a topic that does not exist; also the path of"
        " `save(...)` and `start(...)`. The option goes before a column `topic`",
        aliases=("path",),
        default_in_docs="the column `topic`",
    ),
    Option(
        *("partitions", WRITE, Whole(1, PARTITIONS_MAX), "1"),
        "the number of partitions of a topic that this write makes; it is an error if the topic of"
        " option `topic` exists with another number",
    ),
    Option(
        *(
            "routing",
            WRITE,
            Choice(tuple(routing.value for routing in Routing)),
            None,
        ),
        "how a row's partition is chosen. By its key: `hash`, or as a client's default does:"
        " `murmur2` (Kafka's Java client), `crc32` (librdkafka), `pulsarJava`, `pulsarCpp` (C++ and"
        " Python), `pulsarGo`. Or: `roundRobin`, `single` (one for each task), `column` (column"
        " `partition`), `spark` (Spark's task modulo partitions). The option goes before a column"
        " `partition`",
        default_in_docs="`column` if there is a column `partition`, else `hash`",
    ),
    Option(
        "compression",
        WRITE,
        Choice(("none", "lz4", "zstd")),
        "lz4",
        "compression of entries: `none`, `lz4`, `zstd`",
    ),
    Option(
        *("ensembleSize", WRITE, Whole(), None),
        "bookies over which a ledger of this write is striped; no more than are registered when "
        "the topic is made",
        default_in_docs="the topic's, else 3",
    ),
    Option(
        *("writeQuorum", WRITE, Whole(), None),
        "copies of each entry",
        default_in_docs="the topic's, else 3",
    ),
    Option(
        *("ackQuorum", WRITE, Whole(), None),
        "how many copies must be acknowledged before a row counts as written",
        default_in_docs="the topic's, else 2",
    ),
    Option(
        *("durability", WRITE, Choice(("synced", "page-cache")), None),
        "`synced`: rows are acknowledged when they are on disk; `page-cache`: earlier, which is "
        "faster, but a power failure of all copies loses them",
        default_in_docs="the topic's, else `synced`",
    ),
    Option(
        *("txnAppId", (Use.BATCH_WRITE,), Text(NAME_CHARS_MAX), None),
        "with `txnVersion`: the name of the writer (see Exactly once). A streaming write uses its"
        " query id",
    ),
    Option(
        *("txnVersion", (Use.BATCH_WRITE,), Whole(0), None),
        "a write whose version is not above the last committed version of this `txnAppId` changes "
        "nothing. A streaming write uses its batch id",
    ),
    Option(
        *("onReplay", WRITE, Choice(("fail", "skip", "append")), None),
        "for a query's batch whose number was committed with other rows (see Exactly once):"
        " `fail`; `skip` keeps the committed rows; `append` writes the new rows too, even under a"
        " lower number, and continues from this number. In a batch write: with `txnAppId`, inside"
        " `foreachBatch`",
        default_in_docs="`fail`; complete mode replaces",
    ),
    Option(
        *("overwriteHeld", WRITE, Flag(), "false"),
        "for a write that replaces rows: `true` also removes rows that a subscription holds",
    ),
    Option(
        *("badRecordsTopic", WRITE, Text(), None),
        "the topic for bad rows, with the reason; without the option, a bad row fails the write",
    ),
    Option(
        *("userMetadata", WRITE, Text(USER_METADATA_CHARS_MAX), None),
        "text kept with the commit, seen in `metadata=commits`",
    ),
    Option(
        *("maxInFlightBytes", WRITE, Bytes(MIB), "64m"),
        "bytes that a task holds in memory: gathered and not acknowledged",
    ),
    _outage_timeout(WRITE),
    Option(
        *("valueFormat", WRITE, Choice(FORMATS), "binary"),
        "`binary` or `string`: a column `value`; `json`: your columns as JSON text; "
        "`arrow`: your columns in Arrow's format; `schema`: as `arrow`, by a schema that is "
        "registered already (see Typed values)",
    ),
    Option(
        *("schemaMode", WRITE, Choice(("validate", "evolve", NO_SCHEMA)), "validate"),
        "for `json`, `arrow` and `schema`: `validate` the columns against the topic's schema, "
        "`evolve` the schema if that is compatible, or `none`: compare and register nothing; "
        "for `binary` and `string`: `none` also writes to a topic that has a schema",
    ),
    Option("mergeSchema", WRITE, Flag(), "false", "`true`: as `schemaMode` `evolve`"),
)


def default_of(name: str) -> Any:
    """The default value of an option of a read."""
    (option,) = (option for option in READ_OPTIONS if option.name == name)
    return None if option.default is None else option.kind.parse(name, option.default)


def options_for(use: Use) -> tuple[Option, ...]:
    table = READ_OPTIONS if use in READ else WRITE_OPTIONS
    return tuple(option for option in table if use in option.uses)


def kafka_remedy(lower: str) -> str | None:
    """The text of KAFKA_REMEDIES for the option with this name in lower case; None: Kafka's source
    and sink have no such option."""
    for name, remedy in KAFKA_REMEDIES.items():
        prefix = name.lower()
        if lower == prefix or (prefix.endswith(".") and lower.startswith(prefix)):
            return remedy
    return None
