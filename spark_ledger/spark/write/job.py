"""What a write is, decided in the driver before a row of it is written, and the topics that it goes
to: found as they are now, or made when the first rows for them come.

Always true: columns, types, options and the topics that they name are checked in the driver; what
cannot be known before the rows are seen (topics of a column, sizes, null topics) is checked in the
tasks, and then nothing of the write is visible. A topic that is there keeps its partitions and
policies, whatever the options say: other quorums hold for the ledgers of this write only, another
number of partitions is an error; rows are routed over the partitions that the topic has now. Bytes
go to no topic that has a schema, for none of its readers could read them beside columns, unless the
user says so.
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
from spark_ledger.metadata.store_calls import each
from spark_ledger.spark.options.options import WriteOptions
from spark_ledger.spark.options.table import NO_SCHEMA
from spark_ledger.spark.rows.typed_values import SCHEMA, ValueWriter
from spark_ledger.spark.rows.written import WritePlan, payload_of, plan_write
from spark_ledger.topic.client import TopicClient
from spark_ledger.topic.commit.draft import (
    USER_METADATA_BYTES_MAX,
    RowKind,
    check_not_held,
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
    """A topic and how many partitions it has now; `info` has how many it was made with."""

    info: TopicInfo
    partitions: int

    @property
    def txn_target(self) -> str:
        """What transactions on it alone are recorded under: one of its name that is made anew has
        nothing of what this one got."""
        return f"{self.info.name.short}@{self.info.id}"


def policies_of(options: WriteOptions, base: TopicPolicies = _DEFAULTS) -> TopicPolicies:
    """What was given, the rest as near to `base` as it allows. Raises OptionInvalid."""
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
    """Whether the options can be meant for the topic that they name and that is there already. A
    query that made it goes on after it has grown. Raises OptionConflict, OptionInvalid."""
    policies_of(options, topic.info.policies)
    asked, made = options.partitions, topic.info.partitions
    if asked is not None and asked not in (made, topic.partitions):
        raise OptionConflict(
            f"partitions is {asked}, but topic '{topic.info.name}' is there with"
            f" {topic.partitions}",
            "Leave the option out, or grow the topic: spark-ledger topic grow.",
        )


async def check_bookies(client: TopicClient, options: WriteOptions, name: str) -> None:
    """Whether there are as many bookies as the options say that a new topic's ledgers need.
    Raises NotEnoughBookies, OptionInvalid."""
    policies_of(options)
    asked = options.ensemble_size or options.write_quorum
    if asked:
        await client.ledgers.check_registered(asked, f"a ledger of topic '{name}'")


async def check_values(client: TopicClient, options: WriteOptions, topic: WrittenTopic) -> None:
    """Whether the topic takes bytes, if that is what the options write to it: the topic of bad
    records gets nothing else. One read of the metadata store, none for typed values. It does not
    wait for a replica that lags: look the topic up first. Raises SchemaIncompatible."""
    name = topic.info.name.short
    bad = name == options.bad_records_topic
    if options.schema_mode == NO_SCHEMA or (options.typed and not bad):
        return
    head = (await client.schemas.of(topic.info, fresh=False)).head
    try:
        check_takes_bytes(head, name)
    except SchemaIncompatible as error:
        if bad:
            raise SchemaIncompatible(
                error.what, "Name another topic for badRecordsTopic."
            ) from None
        raise


async def check_columns(client: TopicClient, job: "WriteJob", topic: WrittenTopic) -> None:
    """Whether the topic takes columns, before a version of its schema is registered: the commit
    judges it again. Raises SchemaIncompatible."""
    head = (await client.schemas.of(topic.info, fresh=False)).head
    if not head.takes_bytes:
        return
    state = await client.log(topic.info.id).fold(fresh=True)
    actions = (Overwrite((), state.next),) if job.overwrite else ()
    check_takes_columns(state, actions, topic.info.name.short)


async def look_up(client: TopicClient, name: str, *, fresh: bool) -> WrittenTopic | None:
    """The topic if it is there. Raises TopicTerminated, TopicDeleted for one that was just now."""
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
    """The topic as it is, or made: with the options' quorums and durability, and their partitions
    but for the one of bad records, which has one. Raises as look_up, check_fits,
    check_bookies and check_values."""
    found = await look_up(client, name, fresh=fresh)
    if found is None:
        partitions = 1 if name == options.bad_records_topic else options.partitions or 1
        await check_bookies(client, options, name)
        try:
            policies = policies_of(options, await client.topics.inherited(name))
            made = await client.topics.create(name, partitions, policies)
            return WrittenTopic(made, partitions)  # as the options say, and without a schema
        except TopicExists:  # another task made it just now
            found = await look_up(client, name, fresh=True)
    if found is None:
        raise TopicDeleted(f"topic '{name}' was deleted as soon as it was made", topic=name)
    if name == options.topic:
        check_fits(options, found)
    await check_values(client, options, found)
    return found


async def find_or_make_all(
    client: TopicClient, options: WriteOptions, names: Sequence[str]
) -> list[WrittenTopic]:
    """`find_or_make` of each, TOPICS_AT_ONCE at a time. Raises what the first of them raised that
    failed, once none is under way any more."""

    async def one(name: str) -> WrittenTopic | Exception:
        try:
            return await find_or_make(client, options, name)
        except Exception as error:
            return error

    found = []
    for topic in await each(one, names, TOPICS_AT_ONCE):
        if isinstance(topic, Exception):
            raise topic
        found.append(topic)
    return found


async def too_many_topics(
    client: TopicClient, what: str, topic_ids: Sequence[str]
) -> CommitOverTooManyTopics:
    """The error of a batch for more topics than one commit takes. It names those of `topic_ids`
    that have no commit: the write made them, or they were there for nothing."""
    empty = [name for name in await each(partial(_if_empty, client), topic_ids) if name]
    remedy = "Write fewer topics in one batch, or one topic with more partitions."
    if empty:
        named = ", ".join(f"'{name}'" for name in empty)
        what = f"{what}; {len(empty)} of its topics are there without a row: {named}"
        remedy += " Remove the topics that this write made: spark-ledger topic delete NAME..."
    return CommitOverTooManyTopics(what, remedy, empty=tuple(empty))


async def _if_empty(client: TopicClient, topic_id: str) -> str | None:
    """The topic's name, if it is there and nothing was ever committed to it."""
    with suppress(LedgerError):
        state = await client.log(topic_id).fold(fresh=True)
        if state.next == 0 and not state.deleted:
            name = await client.topics.name_of(topic_id)
            return None if name is None else name.short
    return None


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

    def kinds(
        self, topic_ids: Iterable[str], versions: Mapping[str, frozenset[int]]
    ) -> dict[str, RowKind]:
        """What the commit judges the rows of these topics as: nothing with schemaMode=none.
        `versions` are those of the schemas that typed rows were written under, by topic's id;
        bad records are under none."""
        if self.options.schema_mode == NO_SCHEMA:
            return {}
        evolves = self.values is not None and self.values.mode is SchemaMode.EVOLVE
        under = {id_: versions.get(id_, frozenset()) for id_ in topic_ids}
        return {id_: RowKind(of, evolves and bool(of)) for id_, of in under.items()}

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
        if options.overwrite_held and not overwrite:
            raise OptionConflict(
                "overwriteHeld is true, but the write adds rows and replaces none",
                'Leave it out, or write with mode("overwrite") or outputMode("complete").',
            )
        size = len((options.user_metadata or "").encode())
        if size > USER_METADATA_BYTES_MAX:
            raise OptionInvalid(
                f"userMetadata has {size} bytes, at most {USER_METADATA_BYTES_MAX} are kept",
                "Give a shorter text.",
            )
        return cls(options, plan, values, overwrite)


async def check_replaceable(
    client: TopicClient, options: WriteOptions, topic: WrittenTopic
) -> None:
    """Whether no subscription holds a row of the topic now, unless it may. Raises
    SubscriptionBusy."""
    if options.overwrite_held:
        return
    state = await client.log(topic.info.id).fold(fresh=True)
    holds = await client.subscriptions.holds(topic.info.id, len(state.partitions))
    everything = (Overwrite((), state.next),)
    check_not_held(state, everything, holds, topic.info.name.short)


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
        if job.values is not None and job.values.mode is not None:
            await check_columns(client, job, target)
            await job.values.version(client.schemas, target.info)
        return found
    await check_bookies(client, options, options.topic)
    if options.value_format == SCHEMA:
        raise SchemaNotRegistered(f"topic '{options.topic}' is not there, and has no schema")
    return found
