"""What the stored cluster holds and how it is read, for `make.py` and for the test.

Only what users may rely on is used here, so that the same lines run before and after a change.
"""

import hashlib
import json
import tarfile
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from kazoo.client import KazooClient
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql.streaming import StreamingQuery

from spark_ledger import LedgerClient

FOLDER = Path(__file__).resolve().parent
ARCHIVE, EXPECTED = FOLDER / "cluster-1.tar.xz", FOLDER / "expected.json"
CLUSTER, CHECKPOINTS = "cluster", "checkpoints"
BOOKIES, ENTRIES = 4, 24
"""How many there are, and how many each ledger has."""
TYPED, PASSWORD = "typed", b"sesame"
LEFT_OPEN = ("killed", "only-on-0")
"""Ledgers that nobody closed; every entry was acknowledged."""
QUERIES = ("stopped", "repeated", "interrupted")
"""Each copies `<name>-in` to `<name>-out` and has a subscription of its name."""

COLUMNS = (
    *("topic", "partition", "offset", "hex(key) AS key", "sha2(value, 256) AS value"),
    *("unix_micros(timestamp) AS written", "unix_micros(eventTime) AS event"),
    "to_json(headers) AS headers",
)
TYPED_COLUMNS = (
    *("__topic AS topic", "__partition AS partition", "__offset AS offset"),
    *("hex(__key) AS key", "unix_micros(__publishTime) AS written"),
)

Facts = dict[str, Any]


def expected() -> Facts:
    return json.loads(EXPECTED.read_text(encoding="utf-8"))  # type: ignore[no-any-return]


def unpack(folder: Path) -> None:
    """The folders CLUSTER and CHECKPOINTS, as they were when the cluster had stopped."""
    with tarfile.open(ARCHIVE) as archive:
        archive.extractall(folder, filter="data")


# -- topics ---------------------------------------------------------------------------------------


def reading(spark: SparkSession, url: str, topics: Iterable[str], **options: Any) -> DataFrame:
    reader = spark.read.format("ledger").option("serviceUrl", url)
    return reader.option("subscribe", ",".join(topics)).options(**options).load()


def rows_of(spark: SparkSession, url: str, topics: Sequence[str]) -> dict[str, Facts]:
    """How many rows each topic has, and one hash over all their columns."""
    rows = reading(spark, url, topics, includeHeaders=True, includeMetadata=True)
    return _facts(topics, rows.selectExpr(*COLUMNS))


def typed_rows_of(spark: SparkSession, url: str, topic: str) -> dict[str, Facts]:
    rows = reading(spark, url, [topic], valueFormat="arrow")
    payload = [name for name in rows.columns if not name.startswith("__")]
    told = f"to_json(struct({', '.join(payload)})) AS value"
    return _facts([topic], rows.selectExpr(*TYPED_COLUMNS, told))


def values_of(spark: SparkSession, url: str, topic: str) -> list[str]:
    """Every value, sorted."""
    rows = reading(spark, url, [topic]).selectExpr("string(value) AS value").collect()
    return sorted(row.value for row in rows)


def _facts(topics: Sequence[str], rows: DataFrame) -> dict[str, Facts]:
    found: dict[str, list[list[Any]]] = {topic: [] for topic in topics}
    for row in rows.orderBy("topic", "partition", "offset").collect():
        found[row.topic].append(list(row))
    return {
        topic: {"rows": len(some), "sha256": sha256(json.dumps(row).encode() for row in some)}
        for topic, some in found.items()
    }


def numbered(spark: SparkSession, start: int, end: int, repeated: int = 1) -> DataFrame:
    """Rows `start` to `end`, with five keys; `repeated` makes values longer by so many words."""
    value = f"concat(string(id), repeat(' value', {repeated}))"
    rows = spark.range(start, end, 1, 2)
    return rows.selectExpr("concat('k', string(id % 5)) AS key", f"{value} AS value")


def append(
    rows: DataFrame, url: str, topic: str | None, mode: str = "append", **options: Any
) -> None:
    """Without a topic each row names its own."""
    writer = rows.write.format("ledger").option("serviceUrl", url).options(**options)
    writer.mode(mode).save(topic)


# -- streaming queries ----------------------------------------------------------------------------


def source(spark: SparkSession, url: str, query: str) -> DataFrame:
    reader = spark.readStream.format("ledger").option("serviceUrl", url)
    reader = reader.option("startingOffsets", "earliest").option("subscription", query)
    return reader.load(f"{query}-in").select("key", "value")


def start(
    rows: DataFrame, url: str, query: str, checkpoints: Path, *, ends: bool = False, **more: Any
) -> StreamingQuery:
    """With `ends` the query ends after what is there now."""
    writer = rows.writeStream.format("ledger").option("serviceUrl", url).options(**more)
    writer = writer.queryName(query).option("checkpointLocation", str(checkpoints / query))
    if ends:
        writer = writer.trigger(availableNow=True)
    return writer.start(f"{query}-out")


def batches(log: Path) -> list[int]:
    """The numbers in one of a checkpoint's logs, `offsets` or `commits`."""
    return sorted(int(path.name) for path in log.glob("[0-9]*") if path.name.isdigit())


# -- ledgers and records --------------------------------------------------------------------------


def payload(ledger: str, entry_id: int) -> bytes:
    """Every eighth entry is large: it is written to a direct log."""
    return f"{ledger} {entry_id}".encode() + (b" large" * 20_000 if entry_id % 8 == 5 else b"")


def ledger_facts(client: LedgerClient, ledger_id: int, password: bytes = b"") -> Facts:
    """How many entries the ledger has and one hash over their payloads; closes it if it is open."""
    with client.open_ledger(ledger_id, password=password) as reader:
        last = reader.last_add_confirmed
        payloads = [bytes(payload) for _, payload in reader.read(0, last)] if last >= 0 else []
    return {"entries": last + 1, "sha256": sha256(payloads)}


def records_below(url: str, path: str) -> dict[str, Facts]:
    """The JSON records right below a node of the metadata store (docs/topics.md), by name; nodes
    without a value are left out."""
    hosts, _, root = url.removeprefix("zk://").partition("/")
    store = KazooClient(hosts=hosts)
    store.start()
    try:
        whole = f"/{root}{path}"
        names = sorted(store.get_children(whole))
        values = {name: store.get(f"{whole}/{name}")[0] for name in names}
        return {name: json.loads(value) for name, value in values.items() if value}
    finally:
        store.stop()
        store.close()


def sha256(parts: Iterable[bytes]) -> str:
    """Of the parts, each behind its length."""
    digest = hashlib.sha256()
    for part in parts:
        digest.update(len(part).to_bytes(8, "little") + part)
    return digest.hexdigest()
