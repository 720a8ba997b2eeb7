"""A write and its topics. The driver checks a write before a task writes a row. A new topic is made
when its first rows arrive.

Always true: the driver checks columns, types, options and the topics that options name. Tasks check
the rows (topics in a column, sizes, null topics); if such a check fails, no row of the write is
visible. An existing topic keeps its partitions and policies. If the options give other quorums,
these apply only to the ledgers of this write; another number of partitions is an error. Rows are
routed over the partitions that the topic has now. Rows that are not typed are *rows of bytes*. A
topic with a schema refuses them unless the user sets schemaMode=none: typed reads would fail.
"""

from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial

from pyspark.sql.types import StructType

from spark_ledger.errors import (
    CommitOverTooManyTopics,
    LedgerError,
    OptionConflict,
    OptionInvalid,
    OptionMissing,
    SchemaIncompatible,
    SchemaNotRegistered,
    TopicDeleted,
    TopicExists,
    TopicTerminated,
)
from spark_ledger.metadata.store_calls import call_each
from spark_ledger.spark.options.options import WriteOptions
from spark_ledger.spark.options.table import NO_SCHEMA
from spark_ledger.spark.rows.typed_values import SCHEMA, ValueWriter
from spark_ledger.spark.rows.written import WritePlan, payload_of, plan_write
from spark_ledger.topic.client import TopicClient
from spark_ledger.topic.commit.draft import (
    USER_METADATA_BYTES_MAX,
    RowKind,
    check_no_subscription_holds,
    check_takes_bytes,
    check_takes_columns,
)
from spark_ledger.topic.commit.replay import OnReplay
from spark_ledger.topic.log.actions import Overwrite
from spark_ledger.topic.log.policies import TopicPolicies
from spark_ledger.topic.log.topics import TopicInfo
from spark_ledger.topic.schema.rules import SchemaMode

TOPICS_AT_ONCE = 32

_DEFAULTS = TopicPolicies()


@dataclass(frozen=True, slots=True)
class WrittenTopic:
    """A topic and its present number of partitions; `info` has the number at its creation."""

    info: TopicInfo
    partitions: int

    @property
    def txn_target(self) -> str:
        """The target of transactions on this topic alone. It has the topic's id, so a later topic
        of the same name begins without these transactions."""
        return f"{self.info.name.short}@{self.info.id}"


def policies_of(options: WriteOptions, base: TopicPolicies = _DEFAULTS) -> TopicPolicies:
    """The policies by the options. A quorum without an option is that of `base`, or the nearest
    number that fits the options' quorums. Raises OptionInvalid if quorums do not fit each other."""
    ensemble = options.ensemble_size or max(base.ensemble_size, options.write_quorum or 0)
    write = options.write_quorum or min(base.write_quorum, ensemble)
    ack = options.ack_quorum or min(base.ack_quorum, write)
    if not ensemble >= write >= ack >= 1:
        raise OptionInvalid(
            f"ensembleSize {ensemble}, writeQuorum {write}, ackQuorum {ack}",
            "Give ensembleSize >= writeQuorum >= ackQuorum.",
        )
    return replace(
        base,
        ensemble_size=ensemble,
        write_quorum=write,
        ack_quorum=ack,
        durability=options.durability or base.durability,
    )


def check_fits(options: WriteOptions, topic: WrittenTopic) -> None:
    """Checks that the options fit the existing topic that they name. The number of partitions at
    the topic's creation also fits, so that the query that created the topic can go on after the
    topic has grown. Raises OptionConflict, OptionInvalid."""
    policies_of(options, topic.info.policies)  # raises if the quorums do not fit
    count = options.partitions
    if count is not None and count not in (topic.info.partitions, topic.partitions):
        raise OptionConflict(
            f"partitions is {count}, but topic '{topic.info.name}' exists with {topic.partitions}"
            " partitions",
            "Leave the option out, or grow the topic: spark-ledger topic grow.",
        )


async def check_bookies(client: TopicClient, options: WriteOptions, name: str) -> None:
    """Checks that there are enough bookies for the ledgers of a new topic with these options.
    Raises NotEnoughBookies, OptionInvalid."""
    policies_of(options)  # raises if the quorums do not fit
    count = options.ensemble_size or options.write_quorum
    if count:
        await client.ledgers.check_registered(count, f"a ledger of topic '{name}'")


async def check_values(client: TopicClient, options: WriteOptions, topic: WrittenTopic) -> None:
    """Checks that the topic takes rows of bytes, unless schemaMode is `none` or this write has only
    typed rows for the topic (bad records are rows of bytes). Reads the metadata store without a
    sync: for a fresh read call `look_up(..., fresh=True)` before. Raises SchemaIncompatible."""
    name = topic.info.name.short
    is_bad_records_topic = name == options.bad_records_topic
    if options.schema_mode == NO_SCHEMA or (options.typed and not is_bad_records_topic):
        return
    schema_head = (await client.schemas.of(topic.info, fresh=False)).head
    try:
        check_takes_bytes(schema_head, name)
    except SchemaIncompatible as error:
        if is_bad_records_topic:
            raise SchemaIncompatible(
                error.what, "Name another topic for badRecordsTopic."
            ) from None
        raise


async def check_columns(client: TopicClient, job: "WriteJob", topic: WrittenTopic) -> None:
    """Checks that the topic takes typed rows, before a version of its schema is registered; the
    commit makes this check again. Raises SchemaIncompatible."""
    schema = await client.schemas.of(topic.info, fresh=False)
    if not schema.head.takes_bytes:  # the schema is in force already
        return
    kinds = [v.schema.kind.name for v in schema.client_versions if not v.of_columns]
    follow = (
        f"the schema that Pulsar's clients declared (type {kinds[-1]})" if kinds else "no schema"
    )
    state = await client.log(topic.info.id).fold(fresh=True)
    actions = (Overwrite(segments=(), snapshot=state.next),) if job.overwrite else ()
    check_takes_columns(state, actions, topic.info.name.short, follow)


async def look_up(client: TopicClient, name: str, *, fresh: bool) -> WrittenTopic | None:
    """The topic if it exists. Raises TopicTerminated, or TopicDeleted if it was just deleted."""
    info = await client.topics.find(name, fresh=fresh)
    if info is None:
        return None
    state = await client.log(info.id).fold(fresh=fresh)
    if state.deleted:
        raise TopicDeleted(f"topic '{name}' (id {info.id}) was deleted", topic=name)
    if state.terminated:
        raise TopicTerminated(f"topic '{name}' takes no more rows", topic=name)
    return WrittenTopic(info, len(state.partitions))


async def find_or_make(
    client: TopicClient, options: WriteOptions, name: str, *, fresh: bool = False
) -> WrittenTopic:
    """The existing topic, or a new topic with the options' quorums, durability and partitions; a
    topic of bad records has one partition. Raises the errors of look_up, check_fits, check_bookies
    and check_values."""
    topic = await look_up(client, name, fresh=fresh)
    if topic is None:
        partitions = 1 if name == options.bad_records_topic else options.partitions or 1
        await check_bookies(client, options, name)
        try:
            policies = policies_of(options, await client.topics.inherited_policies(name))
            info = await client.topics.create(name, partitions, policies)
            return WrittenTopic(info, partitions)  # a new topic needs no check
        except TopicExists:  # another task made the topic at the same time
            topic = await look_up(client, name, fresh=True)
    if topic is None:
        raise TopicDeleted(f"topic '{name}' was deleted as soon as it was made", topic=name)
    if name == options.topic:
        check_fits(options, topic)
    await check_values(client, options, topic)
    return topic


async def find_or_make_all(
    client: TopicClient, options: WriteOptions, names: Sequence[str]
) -> list[WrittenTopic]:
    """`find_or_make` for each name, TOPICS_AT_ONCE at a time. When all calls have ended, raises the
    error of the first name whose call failed."""

    async def topic_or_error(name: str) -> WrittenTopic | Exception:
        try:
            return await find_or_make(client, options, name)
        except Exception as error:
            return error

    topics = []
    for topic in await call_each(topic_or_error, names, TOPICS_AT_ONCE):
        if isinstance(topic, Exception):
            raise topic
        topics.append(topic)
    return topics


async def too_many_topics(
    client: TopicClient, what: str, topic_ids: Sequence[str]
) -> CommitOverTooManyTopics:
    """The error for a batch that has more topics than one commit takes. The error names the topics
    among `topic_ids` to which no write has committed rows: this write may have made them."""
    empty = [name for name in await call_each(partial(_name_if_empty, client), topic_ids) if name]
    remedy = "Write fewer topics in one batch, or one topic with more partitions."
    if empty:
        names = ", ".join(f"'{name}'" for name in empty)
        what = f"{what}; {len(empty)} of its topics have no row: {names}"
        remedy += " Remove the topics that this write made: spark-ledger topic delete NAME..."
    return CommitOverTooManyTopics(what, remedy, empty=tuple(empty))


async def _name_if_empty(client: TopicClient, topic_id: str) -> str | None:
    """The topic's short name, if the topic exists and has no commit."""
    with suppress(LedgerError):
        state = await client.log(topic_id).fold(fresh=True)
        if state.next == 0 and not state.deleted:
            name = await client.topics.name_of(topic_id)
            return None if name is None else name.short
    return None


@dataclass(frozen=True)
class WriteJob:
    """A checked write, which Spark sends from the driver to the tasks. `plan` has the role of each
    column. `values` makes the values of typed rows (None: rows of bytes). With `overwrite` the rows
    replace all rows of the topic."""

    options: WriteOptions
    plan: WritePlan
    values: ValueWriter | None
    overwrite: bool = False

    @property
    def on_replay(self) -> OnReplay:
        """What happens to a batch that Spark repeats with other rows. In complete mode the new rows
        replace the rows that the batch had before."""
        if self.options.on_replay is not None:
            return OnReplay(self.options.on_replay)
        return OnReplay.REPLACE if self.overwrite else OnReplay.FAIL

    def row_kinds(
        self, topic_ids: Iterable[str], versions: Mapping[str, frozenset[int]]
    ) -> dict[str, RowKind]:
        """By topic id, the kind of this write's rows: bytes, or typed rows with their schema
        versions. The commit checks the kinds. Empty with schemaMode=none. `versions` has the schema
        versions of typed rows, by topic id; bad records have no version."""
        if self.options.schema_mode == NO_SCHEMA:
            return {}
        evolves = self.values is not None and self.values.mode is SchemaMode.EVOLVE
        numbers = {id_: versions.get(id_, frozenset()) for id_ in topic_ids}
        return {
            id_: RowKind(numbers_of_id, evolves and bool(numbers_of_id))
            for id_, numbers_of_id in numbers.items()
        }

    @classmethod
    def of(cls, options: WriteOptions, schema: StructType, overwrite: bool = False) -> "WriteJob":
        """Raises the errors of plan_write and ValueWriter.of, and LEDGER_OPTION.*."""
        plan = plan_write(schema, options)
        values = None
        if options.typed:
            payload = payload_of(schema, plan)
            values = ValueWriter.of(options.value_format, payload, options.schema_mode)
        if overwrite and options.topic is None:
            raise OptionMissing(
                "the write replaces rows, and no option names the topic",
                "Name the topic in option topic, save() or start(); a topic column is not enough.",
            )
        if options.overwrite_held and not overwrite:
            raise OptionConflict(
                "overwriteHeld is true, but the write only adds rows",
                'Leave it out, or write with mode("overwrite") or outputMode("complete").',
            )
        size = len((options.user_metadata or "").encode())
        if size > USER_METADATA_BYTES_MAX:
            raise OptionInvalid(
                f"userMetadata has {size} bytes, at most {USER_METADATA_BYTES_MAX} are allowed",
                "Give a shorter text.",
            )
        return cls(options, plan, values, overwrite)


async def check_replaceable(
    client: TopicClient, options: WriteOptions, topic: WrittenTopic
) -> None:
    """Raises SubscriptionBusy if a subscription holds a row of the topic now, unless
    `overwrite_held`."""
    if options.overwrite_held:
        return
    state = await client.log(topic.info.id).fold(fresh=True)
    holds = await client.subscriptions.holds(topic.info.id, len(state.partitions))
    actions = (Overwrite(segments=(), snapshot=state.next),)
    check_no_subscription_holds(state, actions, holds, topic.info.name.short)


async def check_topics(
    client: TopicClient, job: WriteJob, *, fresh: bool
) -> dict[str, WrittenTopic]:
    """Checks the existing topics that the options name, and returns them by name. Makes no topic,
    but may register a schema version. Raises the errors of look_up, of the checks and of
    ValueWriter.version."""
    options, topics = job.options, {}
    for name in (options.topic, options.bad_records_topic):
        topic = None if name is None else await look_up(client, name, fresh=fresh)
        if name is not None and topic is not None:
            topics[name] = topic
            await check_values(client, options, topic)
    if options.topic is None:
        return topics
    target = topics.get(options.topic)
    if target is not None:
        check_fits(options, target)
        if job.values is not None and job.values.mode is not None:  # not schemaMode=none
            await check_columns(client, job, target)
            await job.values.version(client.schemas, target.info)  # registers the schema, if new
        return topics
    await check_bookies(client, options, options.topic)
    if options.value_format == SCHEMA:
        raise SchemaNotRegistered(f"topic '{options.topic}' does not exist, and has no schema")
    return topics
