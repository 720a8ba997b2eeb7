"""The options of format("ledger"), checked: what a reader and a writer were told.

Always true: option names are compared without case; an option that nobody here knows is refused
with the nearest name, and so is one given to the wrong kind of query; of the ways to name a topic
exactly one is used. Spark's own options that reach a source or sink are left alone.
"""

import difflib
from collections.abc import Mapping
from dataclasses import dataclass

from spark_ledger.config import resolve_service_url
from spark_ledger.errors import OptionConflict, OptionInvalid, OptionMissing, OptionUnknown

SPARKS_OWN = frozenset(
    {
        "checkpointlocation",
        "queryname",
        "outputmode",
        "asyncprogresstrackingenabled",
        "asyncprogresstrackingcheckpointintervalms",
        "_asyncprogresstrackingoverridesinksupportcheck",
    }
)
READ: tuple[str, ...] = ("serviceUrl", "subscribe", "topic", "path", "startingOffsets")
READ += ("minPartitions", "failOnDataLoss")
BATCH_READ = (*READ, "endingOffsets")
STREAM_READ = (*READ, "maxOffsetsPerTrigger")
WRITE: tuple[str, ...] = ("serviceUrl", "topic", "path", "partitions", "compression")
WRITE += ("ensembleSize", "writeQuorum", "ackQuorum")
BATCH_WRITE = (*WRITE, "txnAppId", "txnVersion")
STREAM_WRITE = WRITE
COMPRESSIONS = ("none", "lz4", "zstd")

_ELSEWHERE = {
    "partitions": "partitions belongs to a write; a read is cut by minPartitions",
    "endingoffsets": "endingOffsets belongs to a batch read (spark.read)",
    "maxoffsetspertrigger": "maxOffsetsPerTrigger belongs to a streaming read (spark.readStream)",
    "startingoffsets": "startingOffsets belongs to a read",
    "txnappid": "txnAppId belongs to a batch write; a streaming write has its query id",
    "txnversion": "txnVersion belongs to a batch write; a streaming write has its batch id",
}


@dataclass(frozen=True)
class ReadOptions:
    """What to read. `starting` and `ending` are texts, read by offsets.py."""

    service_url: str
    topics: tuple[str, ...]
    starting: str
    ending: str = "latest"
    max_offsets_per_trigger: int | None = None
    min_partitions: int | None = None
    fail_on_data_loss: bool = True


@dataclass(frozen=True)
class WriteOptions:
    """Where to write. `target` is the topic as the user wrote it. The quorums are used when the
    first write creates the topic, and so is `partitions`."""

    service_url: str
    target: str
    partitions: int = 1
    compression: str = "none"
    ensemble_size: int | None = None
    write_quorum: int | None = None
    ack_quorum: int | None = None
    txn_app_id: str | None = None
    txn_version: int | None = None


def batch_read_options(options: Mapping[str, str]) -> ReadOptions:
    given = _checked(options, BATCH_READ, "a batch read")
    return _read_options(given, starting="earliest")


def stream_read_options(options: Mapping[str, str]) -> ReadOptions:
    given = _checked(options, STREAM_READ, "a streaming read")
    return _read_options(given, starting="latest")


def batch_write_options(options: Mapping[str, str]) -> WriteOptions:
    given = _checked(options, BATCH_WRITE, "a batch write")
    app_id, version = given.get("txnAppId"), _integer(given, "txnVersion", at_least=0)
    if (app_id is None) != (version is None):
        absent = "txnAppId" if app_id is None else "txnVersion"
        raise OptionMissing(
            f"{absent} is not given, but its partner is",
            "Give txnAppId and txnVersion together, or neither.",
        )
    return _write_options(given, app_id, version)


def stream_write_options(options: Mapping[str, str]) -> WriteOptions:
    return _write_options(_checked(options, STREAM_WRITE, "a streaming write"), None, None)


def _read_options(given: Mapping[str, str], starting: str) -> ReadOptions:
    return ReadOptions(
        service_url=resolve_service_url(given.get("serviceUrl")),
        topics=_topics(given),
        starting=given.get("startingOffsets", starting),
        ending=given.get("endingOffsets", "latest"),
        max_offsets_per_trigger=_integer(given, "maxOffsetsPerTrigger"),
        min_partitions=_integer(given, "minPartitions"),
        fail_on_data_loss=_boolean(given, "failOnDataLoss", True),
    )


def _write_options(
    given: Mapping[str, str], app_id: str | None, version: int | None
) -> WriteOptions:
    return WriteOptions(
        service_url=resolve_service_url(given.get("serviceUrl")),
        target=_one_of(given, ("topic", "path"), "topic"),
        partitions=_integer(given, "partitions") or 1,
        compression=_choice(given, "compression", COMPRESSIONS),
        ensemble_size=_integer(given, "ensembleSize"),
        write_quorum=_integer(given, "writeQuorum"),
        ack_quorum=_integer(given, "ackQuorum"),
        txn_app_id=app_id,
        txn_version=version,
    )


def _checked(options: Mapping[str, str], known: tuple[str, ...], use: str) -> dict[str, str]:
    """`options` under their proper names. Raises for the first one that `use` does not know."""
    names = {name.lower(): name for name in known}
    given = {}
    for key, value in options.items():
        lower = key.lower()
        if lower in names:
            given[names[lower]] = value
        elif lower not in SPARKS_OWN:
            raise _unknown(lower, names, use)
    return given


def _unknown(lower: str, names: Mapping[str, str], use: str) -> OptionUnknown:
    if lower in _ELSEWHERE:
        return OptionUnknown(f"{_ELSEWHERE[lower]}; this is {use}", "Leave the option out.")
    near = difflib.get_close_matches(lower, names, n=1, cutoff=0.5)
    if near:
        remedy = f"Did you mean {names[near[0]]}?"
    else:
        remedy = f"Known are: {', '.join(sorted(names.values()))}."
    return OptionUnknown(f"{use} has no option {lower!r}", remedy)


def _topics(given: Mapping[str, str]) -> tuple[str, ...]:
    named = _one_of(given, ("subscribe", "topic", "path"), "subscribe")
    topics = tuple(name.strip() for name in named.split(",") if name.strip())
    if not topics:
        raise OptionInvalid(f"no topic is named in {named!r}", "Name a topic.")
    if len(set(topics)) != len(topics):
        raise OptionInvalid(f"a topic is named twice in {named!r}", "Name each topic once.")
    return topics


def _one_of(given: Mapping[str, str], ways: tuple[str, ...], usual: str) -> str:
    """The topic, named in exactly one of `ways`."""
    used = [way for way in ways if way in given]
    if not used:
        raise OptionMissing(
            "no topic is named",
            f"Add option {usual!r}, or give the topic to load(), save() or start().",
        )
    if len(used) > 1:
        named = " and ".join(f"{_way(way)} ({given[way]!r})" for way in used)
        raise OptionConflict(f"the topic is named in {len(used)} ways: {named}")
    if not given[used[0]].strip():
        raise OptionInvalid(f"{_way(used[0])} is empty", "Name a topic.")
    return given[used[0]].strip()


def _way(option: str) -> str:
    return "the path of load(), save() or start()" if option == "path" else f"option {option}"


def _integer(given: Mapping[str, str], name: str, at_least: int = 1) -> int | None:
    if name not in given:
        return None
    text = given[name].strip()
    try:
        value = int(text)
    except ValueError:
        value = at_least - 1
    if value < at_least:
        raise OptionInvalid(
            f"{name} is {text!r}, not a whole number of {at_least} or more",
            f"Give {name} such a number.",
        )
    return value


def _boolean(given: Mapping[str, str], name: str, default: bool) -> bool:
    text = given.get(name, str(default)).strip().lower()
    if text not in ("true", "false"):
        raise OptionInvalid(f"{name} is {text!r}", f"Give {name} true or false.")
    return text == "true"


def _choice(given: Mapping[str, str], name: str, choices: tuple[str, ...]) -> str:
    text = given.get(name, choices[0]).strip().lower()
    if text not in choices:
        raise OptionInvalid(f"{name} is {text!r}", f"Give {name} one of {', '.join(choices)}.")
    return text
