"""Administration of topics, subscriptions, schemas and bookies from blocking code:
`spark_ledger.Admin`.

    with spark_ledger.Admin() as admin:
        admin.create_topic("flights", partitions=4, retention_ms=7 * 24 * 3600 * 1000)
        admin.seek("flights", "dashboard", to="earliest")

Always true: every method may be called again, as a cell of a notebook is run again: a change that
is made already, and a deletion of a missing thing, have no effect and raise no error. A change that
would take rows from a subscription that needs them is refused unless it is forced. All admins of a
process share its connection to a cluster, and any thread may use an admin.
"""

from collections.abc import Awaitable, Callable, Coroutine, Mapping
from contextlib import aclosing
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any, Self, TypeVar

from spark_ledger import errors
from spark_ledger.config import resolve_service_url, whole
from spark_ledger.metadata.store_calls import store_now_ms
from spark_ledger.process import Calls, background_loop
from spark_ledger.repair import status as autorecovery
from spark_ledger.repair.decommission import DrainProgress, cancel, decommission
from spark_ledger.repair.status import AutorecoveryStatus
from spark_ledger.repair.work_list import ListedLedger
from spark_ledger.topic import blocking
from spark_ledger.topic.log.policies import NamespacePolicies, TopicPolicies, with_changes
from spark_ledger.topic.log.topics import TopicInfo
from spark_ledger.topic.schema.records import Compatibility, SchemaVersion
from spark_ledger.topic.schema.registry import TopicSchema
from spark_ledger.topic.subscription.lag import PartitionLag
from spark_ledger.topic.subscription.listing import SubscriptionInfo
from spark_ledger.topic.subscription.seek_target import CommittedSince, End, SeekTarget
from spark_ledger.topic.upkeep import compactor
from spark_ledger.topic.upkeep.admin import TopicAdmin, TopicFacts, TrimResult
from spark_ledger.topic.upkeep.compactor import CompactionResult
from spark_ledger.topic.upkeep.merge_plan import MergeLimits
from spark_ledger.topic.upkeep.upkeep import Upkeep, UpkeepReport

if TYPE_CHECKING:
    import pyarrow as pa

    from spark_ledger.spark.rows.typed_values import SparkSchema

T = TypeVar("T")
Place = str | datetime | Mapping[int, int]
"""A place in a topic: "earliest"; "latest", the offset after the last committed row; a time: the
first row committed at this time or later by ZooKeeper's clock (a datetime with its time zone, or
ISO text, UTC without a zone); or {partition: offset}."""


class Admin:
    """The topics of one cluster. `service_url` is `zk://host:port[,host:port...]/root`; None:
    LEDGER_SERVICE_URL, else the default.

    A change is durable when its method returns: a majority of ZooKeeper has it on disk, and later
    reads and commits of the topic see it (docs/topics.md). A method that raises
    errors.CommitOutcomeUnknown may have made its change; call it again. Rows that a method removes
    cannot be read afterwards; their ledgers stay for `delete_delay_ms`.

    Raises errors.BadConfig for a malformed URL, errors.Unavailable when ZooKeeper is unreachable.
    Every method raises errors.TopicNameInvalid, errors.Unavailable, errors.ClientClosed after
    `close`, and errors.TopicNotFound unless its text names another outcome. Methods that change a
    topic also raise errors.CommitContended (nothing changed) and errors.CommitOutcomeUnknown.
    """

    def __init__(self, service_url: str | None = None) -> None:
        self.service_url = resolve_service_url(service_url)
        self._client = blocking.topics(self.service_url).client
        self._topics = TopicAdmin(self._client)
        self._calls = Calls(background_loop())

    # -- topics --------------------------------------------------------------------------------

    def create_topic(self, topic: str, partitions: int | None = None, **policies: Any) -> TopicInfo:
        """Create the topic with `partitions` partitions (None: 1) and `policies` by name, such as
        retention_ms=86_400_000 (spark_ledger/topic/log/policies.py). A topic that is there with
        these policies and at least so many partitions is returned unchanged.

        Durable on return: the topic, its partitions and its policies. Raises errors.TopicExists
        if the topic has fewer partitions or another policy, errors.BadConfig,
        errors.NotEnoughBookies if fewer than the given `ensemble_size` bookies are registered.
        """
        count = 1 if partitions is None else whole("partitions", partitions)
        with_changes(TopicPolicies(), policies)  # raises for a wrong name, before any call

        async def work() -> TopicInfo:
            try:
                return await self._topics.create(topic, count, policies)
            except errors.TopicExists:
                facts = await self._topics.describe(topic)
                _check_same(facts, partitions, policies)
                return facts.info

        return self._run(work())

    def topics(self) -> list[TopicInfo]:
        """Every topic, sorted by name. Changes nothing."""
        return self._run(self._client.topics.list())

    def describe(self, topic: str) -> TopicFacts:
        """Partitions with their offsets [start, end), rows and bytes; ledgers and policies. Changes
        nothing."""
        return self._run(self._topics.describe(topic))

    def grow(self, topic: str, partitions: int) -> None:
        """Set the number of partitions. Rows stay in their partitions; new rows of a key may go to
        another partition.

        Durable on return: the new partitions. Raises errors.BadConfig for a lower number than the
        topic has."""
        count = whole("partitions", partitions)

        async def work() -> None:
            try:
                await self._topics.grow(topic, count)
            except errors.BadConfig:
                if len((await self._topics.describe(topic)).partitions) != count:
                    raise

        self._run(work())

    def set_policies(self, topic: str, **changes: Any) -> TopicInfo:
        """Change policies by name, such as retention_ms=None; the others stay.

        Durable on return: all changes, in one write. Ledgers that writers create afterwards follow
        the new policies; open ledgers keep their quorums. Raises errors.BadConfig,
        errors.NotEnoughBookies as `create_topic`."""
        return self._run(self._topics.change_policies(topic, changes))

    def namespace(self, namespace: str) -> NamespacePolicies:
        """The policies of the namespace `tenant/name` for topics in it. Changes nothing."""
        return self._run(self._namespace(namespace))

    async def _namespace(self, namespace: str) -> NamespacePolicies:
        return await self._client.topics.namespace(namespace) or NamespacePolicies()

    def set_namespace(self, namespace: str, **changes: Any) -> NamespacePolicies:
        """Change the policies of the namespace `tenant/name`: policies of topics by name, and
        auto_create and auto_create_partitions. The namespace is made if it does not exist.

        Durable on return: all of the changes, in one write. Raises errors.BadConfig."""
        return self._run(self._topics.set_namespace(namespace, changes))

    def truncate(self, topic: str, *, force: bool = False) -> TrimResult:
        """Remove all committed rows; the next row gets the next offset. Durable on return, and
        errors: as `trim`."""
        return self._run(self._topics.trim(topic, End.LATEST, force=force))

    def trim(self, topic: str, before: Place, *, force: bool = False) -> TrimResult:
        """Remove the rows before `before`: below offsets, or committed before a time. With `force`
        also rows that a subscription has not consumed.

        Durable on return: one commit that removes the rows of all partitions. Returns the new start
        offsets and the number of removed rows. Raises errors.SubscriptionBusy if a subscription
        needs such a row, errors.OffsetsOutOfRange, errors.OffsetsNotAssigned."""
        return self._run(self._topics.trim(topic, target_of(before), force=force))

    def terminate(self, topic: str) -> None:
        """End the topic: later appends raise errors.TopicTerminated, rows stay readable.
        Durable on return; the topic stays terminated for ever."""
        self._run(self._topics.terminate(topic))

    def delete_topic(self, topic: str) -> bool:
        """Delete the topic; False if there was none.

        Durable on return: no reader finds the name, no commit succeeds, and brokers can append no
        message. Rows and subscriptions go after `delete_delay_ms`."""

        async def work() -> bool:
            try:
                await self._topics.delete(topic)
            except errors.TopicNotFound:
                return False
            return True

        return self._run(work())

    def compact(
        self, topic: str, *, merged_bytes: int = 64 << 20, bytes_per_s: float | None = None
    ) -> CompactionResult:
        """Merge neighbouring small segments into segments of about `merged_bytes` bytes, copying at
        most `bytes_per_s` bytes a second on average (None: no limit). Rows keep offsets and times.

        Durable on return: every merge that the result counts; each is one commit, so a call that
        ends early leaves a valid topic, and the next call continues. Raises errors.BadConfig,
        errors.TxnConflict, errors.NotEnoughBookies, errors.DataUnavailable."""
        limits = MergeLimits(bytes_max=whole("merged_bytes", merged_bytes))
        return self._run(
            compactor.compact(self._client, topic, limits=limits, bytes_per_s=bytes_per_s)
        )

    def clean(self, *, dry_run: bool = False, force: bool = False) -> UpkeepReport:
        """One pass of the upkeep that a cluster does every minute, for all topics: remove rows that
        retention does not keep, delete ledgers that no topic needs, close ledgers that writers left
        open, merge small segments. With `dry_run` it only returns the report. Of ledgers to which
        no topic ever referred it deletes, without `force`, at most a tenth of all ledgers. Work
        that needs several passes (noticing that a writer is gone) is left to the cluster.

        Durable on return: the changes that the report names. Raises errors.Unavailable; the failure
        of one topic is in the report's `problems`."""

        async def work() -> UpkeepReport:
            upkeep = Upkeep(self._client)
            try:
                return await upkeep.once(dry_run=dry_run, force=force)
            finally:
                await upkeep.close()

        return self._run(work())

    # -- subscriptions -----------------------------------------------------------------------------

    def create_subscription(self, topic: str, name: str, at: Place = "latest") -> dict[int, int]:
        """Create a subscription at `at`; it holds the rows from there on against retention until a
        query consumes them. An existing subscription keeps its positions.

        Durable on return: the subscription. Returns {partition: first offset not consumed}. Raises
        errors.OffsetsOutOfRange."""
        target = target_of(at)

        async def work(info: TopicInfo) -> dict[int, int]:
            subscriptions = self._client.subscriptions
            return await subscriptions.create(info.id, name, target, exist_ok=True)

        return self._run_for(topic, work)

    def subscriptions(self, topic: str) -> list[SubscriptionInfo]:
        """Every subscription of the topic, sorted by name, with its positions. Changes nothing."""
        return self._run_for(
            topic, lambda info: self._client.subscriptions.list(info.id, exact=True)
        )

    def seek(self, topic: str, name: str, to: Place, *, force: bool = False) -> dict[int, int]:
        """Set the subscription's positions to `to`, or to the first remaining row if that is later;
        returns the positions, {partition: offset}. With `force` also while a query uses the
        subscription. A query with a checkpoint continues from its checkpoint;
        `startingSubscription` starts a new query at these positions.

        Durable on return: the positions. Raises errors.SubscriptionNotFound,
        errors.SubscriptionBusy (in use, and not forced), errors.OffsetsOutOfRange,
        errors.OffsetsNotAssigned.
        """
        target = target_of(to)

        async def work(info: TopicInfo) -> dict[int, int]:
            return await self._client.subscriptions.seek(info.id, name, target, force=force)

        return self._run_for(topic, work)

    def lag(self, topic: str, name: str) -> dict[int, PartitionLag]:
        """How far behind the subscription is, by partition: rows, bytes and milliseconds. Changes
        nothing. Raises errors.SubscriptionNotFound."""

        async def work(info: TopicInfo) -> dict[int, PartitionLag]:
            now_ms = await store_now_ms(self._client.store)
            return await self._client.subscriptions.lag(info.id, name, now_ms)

        return self._run_for(topic, work)

    def delete_subscription(self, topic: str, name: str, *, force: bool = False) -> bool:
        """Delete the subscription; False if there was none. Durable on return: afterwards it
        holds no rows. Raises errors.SubscriptionBusy (in use, and not forced)."""

        async def work(info: TopicInfo) -> bool:
            try:
                await self._client.subscriptions.delete(info.id, name, force=force)
            except errors.SubscriptionNotFound:
                return False
            return True

        return self._run_for(topic, work)

    # -- schemas -----------------------------------------------------------------------------------

    def schema(self, topic: str) -> TopicSchema:
        """The versions of the topic's schema, and the compatibility that a new version must have.
        Changes nothing."""
        return self._run_for(topic, lambda info: self._client.schemas.of(info))

    def withdraw_schema(self, topic: str) -> None:
        """Withdraw the topic's schema: Spark's writes and Pulsar's producers write bytes again, and
        no typed columns. Present rows keep their versions, and reads of them do not change.
        `register_schema` of a version makes the schema valid again.

        Durable on return: the withdrawal. Raises errors.SchemaNotRegistered."""
        self._run_for(topic, lambda info: self._client.schemas.withdraw(info))

    def register_schema(self, topic: str, schema: "SparkSchema | pa.Schema") -> SchemaVersion:
        """Register these columns (a Spark StructType or an Arrow schema) as a version of the
        topic's schema, or return the version that has exactly these columns.

        Durable on return: the version. Raises errors.SchemaIncompatible,
        errors.SchemaTypeMismatch, errors.SchemaReservedColumn."""
        columns = _arrow_schema(schema)
        return self._run_for(topic, lambda info: self._client.schemas.register(info, columns))

    def set_compatibility(self, topic: str, compatibility: str) -> None:
        """Set the compatibility that later versions of the schema must have: "none", "backward",
        "forward" or "full". Durable on return. Raises errors.BadConfig."""
        if compatibility not in (kind.value for kind in Compatibility):
            kinds = ", ".join(kind.value for kind in Compatibility)
            raise errors.BadConfig(f"there is no compatibility '{compatibility}'", f"Give {kinds}.")
        kind = Compatibility(compatibility)
        self._run_for(topic, lambda info: self._client.schemas.set_compatibility(info, kind))

    # -- bookies ---------------------------------------------------------------------------------

    def autorecovery_status(self) -> AutorecoveryStatus:
        """The status of autorecovery: settings, the auditor, the bookies that are lost, down or
        draining, how many ledgers are under-replicated and why. Changes nothing."""
        return self._run(autorecovery.status(self._client.store))

    def set_autorecovery(
        self,
        *,
        enabled: bool | None = None,
        force: bool = False,
        lost_bookie_delay_s: float | None = None,
        repair_bytes_per_s: int | None = None,
    ) -> AutorecoveryStatus:
        """Change settings of autorecovery for the whole cluster, while it runs; a setting that is
        None stays. With `enabled=True, force=True` the bookies that are gone now count as lost,
        even if they are more than a third.

        Durable on return: each of the settings. Raises errors.BadConfig, without a change."""
        settings = {
            "lost_bookie_delay_s": lost_bookie_delay_s,
            "repair_bytes_per_s": repair_bytes_per_s,
            "enabled": enabled,
        }
        changes = {name: value for name, value in settings.items() if value is not None}
        if force and not enabled:
            raise errors.BadConfig("force is given without enabled=True", "Give both.")

        async def work() -> AutorecoveryStatus:
            store = self._client.store
            await autorecovery.change_settings(store, **changes)
            if force:
                await autorecovery.enable(store, force=True)
            return await autorecovery.status(store)

        return self._run(work())

    def underreplicated(self) -> list[ListedLedger]:
        """The ledgers with copies that are missing or have to be moved, by id: with the bookies,
        the reasons, their times, and what prevents the repair. Changes nothing."""
        return self._run(autorecovery.underreplicated(self._client.store))

    def decommission_bookie(
        self, bookie_id: str, *, force: bool = False, wait: bool = True
    ) -> DrainProgress:
        """Drain a bookie that is up: it takes no new entries, and its copies are made on other
        bookies. Waits until the bookie is empty, unless `wait` is False, and returns what the
        bookie still has; call the method again to look again. An empty bookie may be stopped and
        forgotten. With `force` the bookie is drained even if some ledgers then have fewer copies,
        because no other bookie can take them; but never fewer than Qa.

        Durable on return: the bookie drains until it is empty or the draining is cancelled. Raises
        errors.BadConfig for an unknown bookie or one that is down, errors.NotEnoughBookies."""

        async def work() -> DrainProgress:
            ledgers = self._client.ledgers
            async with aclosing(decommission(ledgers, bookie_id, force=force)) as reports:
                progress = await anext(reports)
                if wait:
                    async for current in reports:
                        progress = current
            return progress

        return self._run(work())

    def cancel_decommission(self, bookie_id: str) -> bool:
        """End the draining: the bookie stays, and takes entries again; False if it was not being
        drained. Durable on return."""
        return self._run(cancel(self._client.ledgers, bookie_id))

    # -- for all calls -------------------------------------------------------------------------

    def close(self) -> None:
        """End the calls of other threads with errors.ClientClosed; the process keeps its
        connection, for Spark. Nothing durable changes."""
        self._calls.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _run(self, work: Coroutine[Any, Any, T]) -> T:
        return self._calls.run(work)

    def _run_for(self, topic: str, work: Callable[[TopicInfo], Awaitable[T]]) -> T:
        async def open_and_work() -> T:
            return await work(await self._client.topics.open(topic))

        return self._run(open_and_work())


def target_of(place: Place) -> SeekTarget:
    """The target of a seek or trim. Raises errors.BadConfig for a text that is no place, or a
    datetime without its zone."""
    if isinstance(place, Mapping):
        return {whole("a partition", p): whole("an offset", at) for p, at in place.items()}
    if isinstance(place, datetime):
        if place.tzinfo is None:
            raise errors.BadConfig(
                f"the time {place} has no time zone", "Add it: tzinfo=timezone.utc."
            )
        return CommittedSince(round(place.timestamp() * 1000))
    if not isinstance(place, str):
        raise TypeError(f"a place is text, a datetime or offsets by partition, not {place!r}")
    if place in (end.value for end in End):
        return End(place)
    try:
        at = datetime.fromisoformat(place)
    except ValueError as error:
        raise errors.BadConfig(
            f"'{place}' is no place in a topic",
            "Give earliest, latest, an ISO time, or offsets by partition as {0: 1200}.",
        ) from error
    return target_of(at if at.tzinfo else at.replace(tzinfo=UTC))


def _check_same(facts: TopicFacts, partitions: int | None, policies: Mapping[str, Any]) -> None:
    """Raises errors.TopicExists if the topic differs from the request."""
    count = len(facts.partitions)
    name = facts.info.name
    if partitions is not None and count < partitions:
        raise errors.TopicExists(
            f"there is a topic '{name}' already, with {count} partitions, not {partitions}",
            "Use grow.",
            topic=name.full,
        )
    for policy, value in policies.items():
        current = getattr(facts.info.policies, policy)
        if current != value:
            raise errors.TopicExists(
                f"there is a topic '{name}' already, with {policy} {current}, not {value}",
                "Use set_policies.",
                topic=name.full,
            )


def _arrow_schema(schema: "SparkSchema | pa.Schema") -> "pa.Schema":
    """The Arrow schema of a Spark or Arrow schema. Raises TypeError for another value."""
    import pyarrow as pa

    if isinstance(schema, pa.Schema):
        return schema
    if not hasattr(schema, "fields"):
        raise TypeError(f"a schema is Spark's StructType or Arrow's, not {type(schema).__name__}")
    from spark_ledger.spark.rows.typed_values import arrow_payload

    return arrow_payload(schema)
