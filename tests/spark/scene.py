"""One wrong thing at a time, done by Spark in a batch or in a stream: what Spark then says.

The same lines of a case do both: `rows()` is a DataFrame of one kind or of the other, `reads` and
`writes` run it to its end.
"""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from pyspark.sql import DataFrame

import spark_ledger
from tests.spark.by_hand import Cluster
from tests.spark.topics import SparkTopics

WAIT_S = 120


def error_of(action: Callable[[], Any]) -> str:
    with pytest.raises(Exception) as caught:
        action()
    return str(caught.value)


class Scene:
    """`topic` is a name that nobody has used, `ten` a topic of one partition that holds the
    numbers 0 to 9 as text, each at its offset."""

    def __init__(
        self, topics: SparkTopics, streaming: bool, topic: str, ten: str, folder: Path
    ) -> None:
        self.topics = topics
        self.url = topics.service_url
        self.streaming = streaming
        self.topic = topic
        self.ten = ten
        self.by_hand = Cluster(self.url)
        self.admin = spark_ledger.Admin(self.url)
        self._checkpoint = folder / "checkpoint"

    def rows(self) -> DataFrame:
        if self.streaming:
            return self.topics.stream(self.ten, startingOffsets="earliest")
        return self.topics.read(self.ten)

    def new_topic(self, rows: int = 10, **options: Any) -> str:
        """Of one partition, with so many rows."""
        some = self.topics.read(self.ten, "value STRING").limit(rows).coalesce(1)
        self.topics.write(some, self.topic, **options)
        return self.topic

    def change_offset(self, change: Callable[[dict[str, Any]], dict[str, Any]]) -> None:
        """Of the last batch in the checkpoint, which `read` made."""
        folder = self._checkpoint / "offsets"
        file = max(folder.glob("[0-9]*"), key=lambda path: int(path.name))
        *lines, offset = file.read_text(encoding="utf-8").splitlines()
        file.write_text("\n".join([*lines, json.dumps(change(json.loads(offset)))]))
        (folder / f".{file.name}.crc").unlink(missing_ok=True)

    def read(self, topic: str | None = None, **options: Any) -> None:
        """To its end."""
        spark = self.topics.spark
        reader = (spark.readStream if self.streaming else spark.read).format("ledger")
        reader = reader.options(**{"serviceUrl": self.url, **options})
        rows = reader.load(topic) if topic else reader.load()
        if not self.streaming:
            rows.collect()
            return
        writer = rows.writeStream.format("noop").trigger(availableNow=True)
        self._await(writer.option("checkpointLocation", str(self._checkpoint)).start())

    def reads(self, topic: str | None = None, **options: Any) -> str:
        """How a read fails."""
        return error_of(lambda: self.read(topic, **options))

    def writes(
        self,
        columns: list[str] | DataFrame,
        topic: str | None = None,
        overwrite: bool = False,
        **options: Any,
    ) -> str:
        """How a write of the ten rows with these columns, or of these rows, fails."""
        rows = columns
        if not isinstance(rows, DataFrame):
            rows = self.rows().selectExpr(*rows)
        options = {"serviceUrl": self.url, **options}
        if topic is not None:
            options["topic"] = topic
        if not self.streaming:
            writer = rows.write.format("ledger").options(**options)
            return error_of(lambda: writer.mode("overwrite" if overwrite else "append").save())
        stream = rows.writeStream.format("ledger").options(**options).trigger(availableNow=True)
        stream = stream.outputMode("complete" if overwrite else "append")
        stream = stream.option("checkpointLocation", str(self._checkpoint))
        return error_of(lambda: self._await(stream.start()))

    def meanwhile(self, deed: Callable[[], None], columns: list[str]) -> DataFrame:
        """The ten rows, as a DataFrame in whose task this is done once while it is written."""

        def work(batches):
            for batch in batches:
                deed()
                yield batch

        rows = self.rows().selectExpr(*columns).coalesce(1)
        return rows.mapInArrow(work, rows.schema)

    def at(self, offset: int, topic: str | None = None) -> str:
        """An offset of the topic's only partition, as an option says it."""
        return json.dumps({topic or self.topic: {"0": offset}})

    def _await(self, query: Any) -> None:
        try:
            query.awaitTermination(WAIT_S)
        finally:
            query.stop()
