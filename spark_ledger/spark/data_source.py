"""format("ledger"): the entry point for Spark. It imports all else at first use, as every session
that looks for any Python source imports this file."""

from pyspark.sql.datasource import (
    DataSource,
    DataSourceReader,
    DataSourceStreamReader,
    DataSourceStreamWriter,
    DataSourceWriter,
)
from pyspark.sql.types import StructType

from spark_ledger.spark.worker import Moment, set_aside


class LedgerDataSource(DataSource):
    """Reads and writes topics, in batches and streams. docs/spark.md lists the options.

    Spark makes one of these in several processes for one query; it holds the options only.
    """

    @classmethod
    def name(cls) -> str:
        return "ledger"

    def schema(self) -> StructType:
        """The columns of a reader that declares none: by the options alone (also for a listing) or,
        if a payload has columns of its own, by the schemas registered for the topics. Raises
        LEDGER_OPTION.*; SchemaNotRegistered, SchemaIncompatible, TopicNotFound, Unavailable."""
        set_aside(Moment.LOADING)
        from spark_ledger.spark.options import options
        from spark_ledger.spark.rows.columns import has_payload, read_schema

        shape = options.shape_options(self.options)
        if shape.metadata is not None:
            from spark_ledger.spark.read import listings

            return listings.schema_of(shape.metadata)
        if not has_payload(shape.value_format):
            return read_schema(shape)
        from spark_ledger.spark.read.topics_read import TopicsRead
        from spark_ledger.spark.rows.typed_values import registered_schema, spark_payload

        topics = TopicsRead(options.either_read_options(self.options))
        registered = topics.cluster.run(
            registered_schema(
                *(topics.cluster.client.schemas, list(topics.infos.values())),
                shape.value_format,
                declared=False,
            )
        )
        assert registered is not None, "nothing was declared, so it is there or an error"
        return read_schema(shape, spark_payload(registered))

    def reader(self, schema: StructType) -> DataSourceReader:
        set_aside(Moment.LOADING)
        from spark_ledger.spark.options import options

        given = options.batch_read_options(self.options)
        if given.metadata is not None:
            from spark_ledger.spark.read import listings

            return listings.ListingReader(given, schema)
        from spark_ledger.spark.read import source

        return source.LedgerBatchReader(given, schema)

    def streamReader(self, schema: StructType) -> DataSourceStreamReader:
        set_aside(Moment.LOADING)
        from spark_ledger.spark import spark_version
        from spark_ledger.spark.options import options
        from spark_ledger.spark.read import source

        given = options.stream_read_options(self.options)
        return spark_version.stream_reader(source.LedgerStreamReader(given, schema))

    def writer(self, schema: StructType, overwrite: bool) -> DataSourceWriter:
        set_aside(Moment.LOADING)
        from spark_ledger.spark.options import options
        from spark_ledger.spark.write import sink

        written = options.batch_write_options(self.options)
        return sink.planned_writer(written, schema, overwrite)

    def streamWriter(self, schema: StructType, overwrite: bool) -> DataSourceStreamWriter:
        set_aside(Moment.LOADING)
        from spark_ledger.spark.options import options
        from spark_ledger.spark.write import sink

        written = options.stream_write_options(self.options)
        return sink.LedgerStreamWriter(written, schema, overwrite)
