"""What a write is, decided in the driver before a row of it is written.

Always true: columns, types, options and the topics that they name are checked here; what cannot be
known before the rows are seen (topics of a column, sizes, null topics) is checked in the tasks, and
then nothing of the write is visible.
"""

from dataclasses import dataclass

from pyspark.sql.types import StructType

from spark_ledger.errors import OptionInvalid, OptionMissing, SchemaNotRegistered
from spark_ledger.spark.options.options import WriteOptions
from spark_ledger.spark.rows.typed_values import SCHEMA, ValueWriter
from spark_ledger.spark.rows.written import WritePlan, payload_of, plan_write
from spark_ledger.spark.write.target import (
    WrittenTopic,
    check_bookies,
    check_fits,
    check_values,
    look_up,
)
from spark_ledger.topic.client import TopicClient
from spark_ledger.topic.commit.draft import USER_METADATA_BYTES_MAX
from spark_ledger.topic.commit.replay import OnReplay


@dataclass(frozen=True)
class WriteJob:
    """Goes from the driver to the tasks. `values` is how columns become values, None where there
    is a column `value`; with `overwrite` the rows take the place of all that the topic has."""

    options: WriteOptions
    plan: WritePlan
    values: ValueWriter | None
    overwrite: bool = False

    @property
    def on_replay(self) -> OnReplay:
        """Of a query's batch that was planned anew; complete mode replaces what it wrote before."""
        if self.options.on_replay is not None:
            return OnReplay(self.options.on_replay)
        return OnReplay.REPLACE if self.overwrite else OnReplay.FAIL

    @classmethod
    def of(cls, options: WriteOptions, schema: StructType, overwrite: bool = False) -> "WriteJob":
        """Raises what plan_write and ValueWriter.of raise, OptionMissing, OptionInvalid."""
        plan = plan_write(schema, options)
        values = None
        if options.typed:
            payload = payload_of(schema, plan)
            values = ValueWriter.of(options.value_format, payload, options.schema_mode)
        if overwrite and options.topic is None:
            raise OptionMissing(
                "the topic whose rows are to be replaced is not named",
                "Name it with option topic, or in save() or start(): a column cannot.",
            )
        size = len((options.user_metadata or "").encode())
        if size > USER_METADATA_BYTES_MAX:
            raise OptionInvalid(
                f"userMetadata has {size} bytes, at most {USER_METADATA_BYTES_MAX} are kept",
                "Give a shorter text.",
            )
        return cls(options, plan, values, overwrite)


async def check(client: TopicClient, job: WriteJob, *, fresh: bool) -> dict[str, WrittenTopic]:
    """The topics that the options name and that are there, by name; none is made, a schema may be
    registered. Raises as target.look_up and its checks, and as ValueWriter.version."""
    options, found = job.options, {}
    for name in (options.topic, options.bad_records_topic):
        topic = None if name is None else await look_up(client, name, fresh=fresh)
        if name is not None and topic is not None:
            found[name] = topic
            await check_values(client, options, topic)
    if options.topic is None:
        return found
    target = found.get(options.topic)
    if target is not None:
        check_fits(options, target)
        if job.values is not None:
            await job.values.version(client.schemas, target.info)
        return found
    await check_bookies(client, options, options.topic)
    if options.value_format == SCHEMA:
        raise SchemaNotRegistered(f"topic '{options.topic}' is not there, and has no schema")
    return found
