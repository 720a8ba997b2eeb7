"""Short ways for tests to write and read topics with Spark."""

import json
import socket
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql.streaming import StreamingQuery

PATIENCE_S = 120.0


class SparkTopics:
    def __init__(self, spark: SparkSession, service_url: str) -> None:
        self.spark = spark
        self.service_url = service_url

    def write(self, rows: DataFrame, topic: str, mode: str = "append", **options: Any) -> None:
        written = rows.write.format("ledger").option("serviceUrl", self.service_url)
        written.options(**options).mode(mode).save(topic)

    def read(self, topic: str, schema: str | None = None, **options: Any) -> DataFrame:
        reader = self.spark.read.format("ledger").option("serviceUrl", self.service_url)
        if schema is not None:
            reader = reader.schema(schema)
        return reader.options(**options).load(topic)

    def stream(self, topic: str, **options: Any) -> DataFrame:
        reader = self.spark.readStream.format("ledger").option("serviceUrl", self.service_url)
        return reader.options(**options).load(topic)

    def values(self, topic: str, **options: Any) -> list[str]:
        """Every value, as text, by partition and offset."""
        rows = self.read(topic, "value STRING, partition INT, offset BIGINT", **options).collect()
        return [row.value for row in sorted(rows, key=lambda row: (row.partition, row.offset))]

    def numbers(self, topic: str, **options: Any) -> list[int]:
        """Every value, as a number, ascending."""
        return sorted(int(value) for value in self.values(topic, **options))

    def start_copy(
        self, rows: DataFrame, topic: str, checkpoint: Path, once: bool = True, **options: Any
    ) -> StreamingQuery:
        """A query that writes `rows` to `topic`; with `once` it ends by itself."""
        writer = rows.writeStream.format("ledger").option("serviceUrl", self.service_url)
        writer = writer.options(**options).option("checkpointLocation", str(checkpoint))
        if once:
            writer = writer.trigger(availableNow=True)
        return writer.start(topic)

    def copy(self, rows: DataFrame, topic: str, checkpoint: Path, **options: Any) -> StreamingQuery:
        query = self.start_copy(rows, topic, checkpoint, **options)
        query.awaitTermination(PATIENCE_S)
        return query


def too_large_for_a_commit(rows: DataFrame) -> DataFrame:
    """The rows with keys so large that they go to a ledger and not along with their commit."""
    return rows.selectExpr("randstr(20000) AS key", "value")


def files_of_numbers(folder: Path, *batches: range) -> None:
    """One file of numbered rows for each batch, in the order of their names; each is there whole or
    not at all, for a query may be looking."""
    folder.mkdir(exist_ok=True)
    have = len(list(folder.iterdir()))
    for at, numbers in enumerate(batches, have):
        lines = (json.dumps({"key": f"k{n % 5}", "value": str(n)}) for n in numbers)
        hidden = folder / f".{at:05d}.json"
        hidden.write_text("\n".join(lines))
        hidden.rename(folder / f"{at:05d}.json")


def stream_of_files(spark: SparkSession, folder: Path) -> DataFrame:
    """The rows of `files_of_numbers`, one file a micro-batch."""
    reader = spark.readStream.schema("key STRING, value STRING").option("maxFilesPerTrigger", 1)
    return reader.json(str(folder))


def forget_the_newest(folder: Path) -> None:
    """Delete the newest file of a checkpoint's log, and Hadoop's checksum beside it."""
    numbered = (path for path in folder.iterdir() if path.name.isdigit())
    newest = max(numbered, key=lambda path: int(path.name))
    newest.unlink()
    (folder / f".{newest.name}.crc").unlink(missing_ok=True)


def wait_until(holds: Callable[[], object]) -> None:
    """Until it is true. Raises AssertionError after PATIENCE_S."""
    deadline = time.monotonic() + PATIENCE_S
    while not holds():
        assert time.monotonic() < deadline, "it did not come true in time"
        time.sleep(0.05)


def error_of(action) -> str:
    with pytest.raises(Exception) as caught:
        action()
    return str(caught.value)


_nobodys: list[socket.socket] = []


def nobody_listens() -> int:
    """A port that is taken until the process ends, so that nobody else begins to listen there."""
    taken = socket.socket()
    taken.bind(("127.0.0.1", 0))
    _nobodys.append(taken)
    return taken.getsockname()[1]
