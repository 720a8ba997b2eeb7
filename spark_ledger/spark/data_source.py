"""format("ledger"): the entry point for Spark. Every session that looks for any Python source
imports this file, so it imports all other modules of the package only when they are used."""

from pyspark.sql.datasource import (
    DataSource,
    DataSourceReader,
    DataSourceStreamReader,
    DataSourceStreamWriter,
    DataSourceWriter,
)
from pyspark.sql.types import StructType

from spark_ledger.spark.worker import Moment, exclude_from_gc


class LedgerDataSource(DataSource):
    """Reads and writes topics, in batches and streams. docs/spark.md lists the options.

    Spark makes instances in several processes for one query; the options are an instance's only
    state.
    """

    @classmethod
    def name(cls) -> str:
        return "ledger"

    def schema(self) -> StructType:
        """The columns of a read for which the user declares no schema. The options decide these
        columns; for typed rows, the topics' registered schemas too. Raises LEDGER_OPTION.*;
        SchemaNotRegistered, SchemaIncompatible, TopicNotFound, Unavailable."""
        exclude_from_gc(Moment.LOADING)
        from spark_ledger.spark.options import options
        from spark_ledger.spark.rows.columns import has_payload, read_schema

        shape = options.shape_options(self.options)
        if shape.metadata is not None:
            from spark_ledger.spark.read import listings

            return listings.schema_of(shape.metadata)
        if not has_payload(shape.value_format):
            return read_schema(shape)
        from spark_ledger.spark.read.topics_read import TopicsRead
        from spark_ledger.spark.rows.typed_values import spark_payload

        topics = TopicsRead(options.either_read_options(self.options))
        registered = topics.read_schema(declared=None)
        assert registered.columns is not None, "a topic without a registered schema raises"
        payload = spark_payload(registered.columns)
        return read_schema(shape, payload, with_version=registered.with_version)

    def reader(self, schema: StructType) -> DataSourceReader:
        exclude_from_gc(Moment.LOADING)
        from spark_ledger.spark.options import options

        read_options = options.batch_read_options(self.options)
        if read_options.metadata is not None:
            from spark_ledger.spark.read import listings

            return listings.ListingReader(read_options, schema)
        from spark_ledger.spark.read import source

        return source.LedgerBatchReader(read_options, schema)

    def streamReader(self, schema: StructType) -> DataSourceStreamReader:
        exclude_from_gc(Moment.LOADING)
        from spark_ledger.spark import spark_version
        from spark_ledger.spark.options import options
        from spark_ledger.spark.read import source

        read_options = options.stream_read_options(self.options)
        return spark_version.stream_reader(source.LedgerStreamReader(read_options, schema))

    def writer(self, schema: StructType, overwrite: bool) -> DataSourceWriter:
        exclude_from_gc(Moment.LOADING)
        from spark_ledger.spark.options import options
        from spark_ledger.spark.write import sink

        write_options = options.batch_write_options(self.options)
        return sink.open_batch_writer(write_options, schema, overwrite)

    def streamWriter(self, schema: StructType, overwrite: bool) -> DataSourceStreamWriter:
        exclude_from_gc(Moment.LOADING)
        from spark_ledger.spark.options import options
        from spark_ledger.spark.write import sink

        write_options = options.stream_write_options(self.options)
        return sink.LedgerStreamWriter(write_options, schema, overwrite)
