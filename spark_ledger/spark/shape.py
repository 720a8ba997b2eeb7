"""The columns that a reader offers who declares none: by the options alone (those of a listing
too) or, where a payload is columns of its own, by the schemas registered on the topics."""

from collections.abc import Mapping

from pyspark.sql.types import StructType

from spark_ledger.spark.options.options import either_read_options, shape_options
from spark_ledger.spark.rows.schema import has_payload, read_schema


def offered(options: Mapping[str, str]) -> StructType:
    """Raises LEDGER_OPTION.*; where payloads are columns also SchemaNotRegistered,
    SchemaIncompatible, TopicNotFound, Unavailable."""
    shape = shape_options(options)
    if shape.metadata is not None:
        from spark_ledger.spark.read import listings  # not loaded for every reader of rows

        return listings.schema_of(shape.metadata)
    if not has_payload(shape.value_format):
        return read_schema(shape)
    from spark_ledger.spark.read.topics_read import TopicsRead  # nor what connects
    from spark_ledger.spark.rows.typed_values import registered_schema, spark_payload

    topics = TopicsRead(either_read_options(options))
    registered = topics.cluster.run(
        registered_schema(
            *(topics.cluster.client.schemas, list(topics.infos.values())),
            shape.value_format,
            declared=False,
        )
    )
    assert registered is not None, "nothing was declared, so it is there or an error"
    return read_schema(shape, spark_payload(registered))
