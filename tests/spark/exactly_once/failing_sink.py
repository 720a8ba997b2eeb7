"""format("failing-ledger"): the ledger sink, whose commit raises after it was applied while the
file named by its option `failing` exists. Spark then calls abort, which is noted beside it."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
from pyspark.sql.datasource import (
    DataSource,
    DataSourceStreamArrowWriter,
    DataSourceStreamWriter,
    WriterCommitMessage,
)

from spark_ledger.spark.data_source import LedgerDataSource


class FailingLedger(DataSource):
    @classmethod
    def name(cls) -> str:
        return "failing-ledger"

    def streamWriter(self, schema: Any, overwrite: bool) -> DataSourceStreamWriter:
        options = {name: value for name, value in self.options.items() if name != "failing"}
        writer = LedgerDataSource(options).streamWriter(schema, overwrite)
        return FailingWriter(writer, Path(self.options["failing"]))


class FailingWriter(DataSourceStreamArrowWriter):
    def __init__(self, writer: DataSourceStreamWriter, failing: Path) -> None:
        self._writer = writer
        self._failing = failing

    def write(self, iterator: Iterator[pa.RecordBatch]) -> WriterCommitMessage:
        return self._writer.write(iterator)

    def commit(self, messages: list[WriterCommitMessage | None], batchId: int) -> None:
        self._writer.commit(messages, batchId)
        if self._failing.exists():
            raise RuntimeError(f"the commit of batch {batchId} was applied, and is said to fail")

    def abort(self, messages: list[WriterCommitMessage | None], batchId: int) -> None:
        self._writer.abort(messages, batchId)
        self._failing.with_suffix(".aborted").touch()
