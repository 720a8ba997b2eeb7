"""Reads, registers and caches the schema of each topic.

Always true: a version gets its number by one multi that also changes the head. So numbers have no
gaps, and the slower of two writers decides again. A writer also decides again after a lost
response, which is harmless: the same schema registered twice is one version. A write only proposes
a version; the multi of its commit (topic/commit) makes the proposed version a version of the
schema, so a write that fails does not hinder other versions. Versions never change, so their
records are cached (CACHE_BYTES_MAX), and a write with a cached schema makes no call. The multi that
puts a schema into force also gives the topic's head a new node version, so a commit that read no
schema fails.
"""

import random
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from typing import Protocol, TypeVar

import pyarrow as pa

from spark_ledger import errors
from spark_ledger.async_tasks import SharedReads
from spark_ledger.metadata import paths
from spark_ledger.metadata.cluster import multi_unless_held
from spark_ledger.metadata.store import (
    BadVersion,
    Create,
    MetadataStore,
    MultiFailed,
    NodeExists,
    NoNode,
    Operation,
    OutcomeUnknown,
    Set,
    Versioned,
)
from spark_ledger.metadata.store_calls import Tries, call_each, look_up, read, unavailable_while
from spark_ledger.process import LruCache
from spark_ledger.topic.log.records import TopicLife, decode_head
from spark_ledger.topic.log.topics import TopicInfo
from spark_ledger.topic.schema import client_rules
from spark_ledger.topic.schema import records as schema_records
from spark_ledger.topic.schema import rules as schema_rules
from spark_ledger.topic.schema.client_rules import Strategy
from spark_ledger.topic.schema.client_schemas import ClientSchema, ClientSchemaType, ClientVersion
from spark_ledger.topic.schema.column_schemas import client_schema
from spark_ledger.topic.schema.records import Compatibility, SchemaHead, SchemaVersion
from spark_ledger.topic.schema.rules import SchemaMode

CACHE_BYTES_MAX = 16 << 20  # of the records of versions, for all topics of a process
READS_AT_ONCE = 32
CLIENT_RECORD_BYTES_MAX, CLIENT_BYTES_MAX = 512 << 10, 4 << 20
"""The largest record of a version that a client declares, which the metadata store must take; and
the largest size of all these versions of a topic: a new schema is compared with each of them."""
_TEXT = ClientSchema(ClientSchemaType.STRING)
R = TypeVar("R")


class Compare(Protocol):
    """Runs a comparison of `size` bytes of schemas, and returns its result."""

    async def __call__(self, size: int, comparison: Callable[[], R]) -> R: ...


async def _compare_here(size: int, comparison: Callable[[], R]) -> R:
    return comparison()


@dataclass(frozen=True, slots=True)
class TopicSchema:
    """The registered `versions` of columns, oldest first, and the versions that are only
    `proposed`. `node_version` is the version of the head's node (None: there is no node)."""

    head: SchemaHead
    versions: tuple[SchemaVersion, ...]
    node_version: int | None
    proposed: tuple[SchemaVersion, ...]
    _cached: "CachedVersions"

    @property
    def client_versions(self) -> tuple[ClientVersion, ...]:
        """The versions that count for Pulsar's clients, by the clients' numbers, oldest first:
        without those that were deleted, and those of columns only while columns are in force."""
        return self._cached.client_versions

    def client_version(self, number: int) -> ClientVersion | None:
        """The version with this number of the clients, even if it was deleted, unless it was
        erased."""
        return self._cached.client_version(number)

    @property
    def union(self) -> pa.Schema | None:
        """The columns that a reader of all versions gets; None before the first version. Raises
        errors.SchemaIncompatible (only with compatibility none)."""
        schemas = [version.schema for version in self.versions]
        return schema_rules.union(schemas) if schemas else None


class SchemaRegistry:
    """The schemas for one process. Every method raises errors.Unavailable if the store does not
    respond, errors.UnsupportedFormat for records of a later version."""

    def __init__(self, store: MetadataStore, rng: random.Random) -> None:
        self._store = store
        self._rng = rng
        self._cache = LruCache[str, CachedVersions](CACHE_BYTES_MAX, lambda cached: cached.size)
        self._fresh = SharedReads(self._read_fresh)

    async def of(self, topic: TopicInfo, *, fresh: bool = True) -> TopicSchema:
        """The schema of the topic. With `fresh` it has all versions that were registered before
        this call."""
        with unavailable_while(f"reading the schema of topic '{topic.name}'"):
            return await (self._fresh(topic) if fresh else self._read(topic))

    async def _read_fresh(self, topic: TopicInfo) -> TopicSchema:
        await self._store.sync(self._node(topic))
        return await self._read(topic)

    async def for_read(self, topics: Iterable[TopicInfo]) -> pa.Schema:
        """The columns of a typed read: the union of all versions of all the topics, by name.

        Raises errors.SchemaNotRegistered, errors.SchemaIncompatible.
        """
        schemas: list[pa.Schema] = []
        for topic in topics:
            schema = (await self.of(topic)).union
            if schema is None:
                raise not_registered(topic)
            schemas.insert(0, schema)  # the columns of the first topic come first
        return schema_rules.union(schemas)

    async def for_write(
        self,
        topic: TopicInfo,
        schema: pa.Schema,
        mode: SchemaMode = SchemaMode.VALIDATE,
        *,
        must_exist: bool = False,
    ) -> SchemaVersion:
        """The version under which rows with these columns are written. When this returns, the
        version's number is durable: no other version gets the number.

        The order and case of columns do not matter. Nor does it matter which columns may be null:
        the task that writes rows checks them against the version's NOT NULL. The first write
        proposes a version, unless a version `must_exist`. The first commit under the proposed
        version makes it a version of the topic's schema, and puts the schema into force
        (topic/commit).

        Raises errors.SchemaIncompatible, errors.SchemaNotRegistered, errors.SchemaTypeMismatch,
        errors.SchemaReservedColumn, errors.TopicDeleted.
        """
        canonical = schema_records.canonical(schema)
        version = schema_rules.matching(canonical, self._cached(topic.id).registered)
        if version is not None:
            return version

        def decide(current: TopicSchema) -> SchemaVersion:
            if must_exist and not current.versions:
                raise not_registered(topic)
            name = topic.name.short
            return schema_rules.decide(
                name, canonical, current.head, current.versions, mode, current.proposed
            )

        return await self._register(topic, decide)

    async def register(self, topic: TopicInfo, schema: pa.Schema) -> SchemaVersion:
        """Make `schema`, with its NOT NULLs, a version of the topic's schema, unless a version is
        exactly this schema; return the version. On return the schema is in force. Raises as
        for_write."""
        canonical = schema_records.canonical(schema)

        def decide(current: TopicSchema) -> SchemaVersion:
            name = topic.name.short
            return schema_rules.decide_registration(
                name, canonical, current.head, current.versions, current.proposed
            )

        return await self._register(topic, decide, in_force=True)

    async def withdraw(self, topic: TopicInfo) -> SchemaHead:
        """Put the schema out of force: the topic takes bytes again. The rows in the topic keep
        their versions. Raises errors.SchemaNotRegistered, errors.TopicDeleted."""
        head = SchemaHead()

        def change(current: TopicSchema) -> tuple[SchemaHead, list[Operation]] | None:
            nonlocal head
            if not current.versions:
                raise not_registered(topic)
            head = replace(current.head, in_force=False)
            return None if head == current.head else (head, [])

        with unavailable_while(f"withdrawing the schema of topic '{topic.name}'"):
            await self._change(topic, change)
        return head

    async def set_compatibility(self, topic: TopicInfo, compatibility: Compatibility) -> None:
        """Set the compatibility, which is checked only for later versions."""

        def change(current: TopicSchema) -> tuple[SchemaHead, list[Operation]] | None:
            if current.node_version is not None and current.head.compatibility is compatibility:
                return None
            return replace(current.head, compatibility=compatibility), []

        with unavailable_while(f"setting the schema of topic '{topic.name}'"):
            await self._change(topic, change)

    async def register_client(
        self,
        topic: TopicInfo,
        schema: ClientSchema,
        strategy: Strategy,
        *,
        may_add: bool = True,
        compare: Compare = _compare_here,
    ) -> ClientVersion:
        """Make the schema that a client of Pulsar declares a version of the topic's schema, unless
        it is a version; return the version, by the clients' number. Rows of the client stay bytes;
        where rows are columns, only JSON schemas that fit these are taken. Without `may_add` no
        version is added. `compare` runs the comparisons, which take up to a
        second for large schemas. Raises errors.SchemaIncompatible, errors.TopicDeleted."""
        current = await self.of(topic)
        _check_beside_columns(topic, schema, current.head)
        judged = current.client_versions
        while True:
            comparison = partial(_version_or_misfit, judged, schema, strategy)
            version, misfit = await compare(size_of(judged) + schema.size, comparison)
            if version is not None:
                return version
            if misfit is None and not may_add:
                misfit = "Schema not found and schema auto updating is disabled"
            if misfit is not None:
                raise _takes_no_schema(topic, schema, misfit)
            judged = await self._add_client_version(topic, schema, judged)

    async def _add_client_version(
        self, topic: TopicInfo, schema: ClientSchema, judged: Sequence[ClientVersion]
    ) -> tuple[ClientVersion, ...]:
        """Add `schema` if the clients' versions are those that were `judged`; return the clients'
        versions after that. Raises errors.SchemaIncompatible, errors.TopicDeleted."""
        versions: tuple[ClientVersion, ...] = ()

        def change(current: TopicSchema) -> tuple[SchemaHead, list[Operation]] | None:
            nonlocal versions
            versions, head = current.client_versions, current.head
            if [v.number for v in versions] != [v.number for v in judged]:
                return None
            _check_beside_columns(topic, schema, head)
            # a record that earlier software reads too
            if head.last == 0 > head.deleted and schema == _TEXT:
                versions = (ClientVersion(0, schema),)
                return replace(head, has_text=True), []
            number = schema_records.checked_number(head.last + 1)
            record = schema_records.encode_version(ClientVersion(number, schema))
            if len(record) > CLIENT_RECORD_BYTES_MAX or size_of(versions) > CLIENT_BYTES_MAX:
                why = f"its record has {len(record)} bytes, earlier versions {size_of(versions)}"
                limits = f"at most {CLIENT_RECORD_BYTES_MAX} and {CLIENT_BYTES_MAX} fit"
                raise _takes_no_schema(topic, schema, f"{why}: {limits}")
            versions = (*versions, ClientVersion(head.number_for_clients(number), schema))
            after = replace(head.with_version(number), in_force=not head.takes_bytes)
            return after, [Create(self._node(topic, number), record)]

        with unavailable_while(f"registering a schema of topic '{topic.name}'"):
            await self._change(topic, change)
        return versions

    def has_columns(self, topic: TopicInfo) -> bool:
        """Whether the rows are columns, as of the last read or change of this process."""
        return not self._cached(topic.id).head.takes_bytes

    async def client_version(self, topic: TopicInfo, number: int) -> ClientVersion | None:
        """The version with this number of the clients, which never changes: out of memory if it was
        read before. None if there is none, or if it was erased."""
        cached = self._cached(topic.id).client_version(number)
        if cached is not None:
            return cached
        return (await self.of(topic)).client_version(number)

    async def registered_ms(self, topic: TopicInfo, number: int) -> int:
        """When the version with this number of the clients was registered, by the store's clock; 0:
        it is not known. The schema was read before."""
        has_text = self._cached(topic.id).head.has_text
        own = number if has_text else number + 1
        path = self._node(topic, own or None)
        with unavailable_while(f"reading the schema of topic '{topic.name}'"):
            node = await look_up(self._store, path)
        return 0 if node is None else node.created_ms

    async def delete_for_clients(self, topic: TopicInfo, *, erase: bool) -> int | None:
        """Take the schema away: no version counts for clients any more, and the topic takes bytes.
        Messages keep their versions, which are given to clients, unless `erase` is set. Numbers go
        on. Returns the clients' number of the last version; None if there was no version. Raises
        errors.TopicDeleted."""
        last: int | None = None

        def change(current: TopicSchema) -> tuple[SchemaHead, list[Operation]] | None:
            nonlocal last
            head, number = current.head, current.head.last
            if not (number or head.has_text):
                return None
            last = head.number_for_clients(number)
            erased = number if erase else head.erased
            head = replace(head, in_force=False, deleted=number, erased=erased)
            return None if head == current.head else (head, [])

        with unavailable_while(f"deleting the schema of topic '{topic.name}'"):
            await self._change(topic, change)
        return last

    async def number_for_clients(self, topic: TopicInfo, number: int) -> int:
        """The clients' number of a version that rows have: out of memory if a version was read
        before."""
        head = self._cached(topic.id).head
        if head.last < number:
            head = (await self.of(topic, fresh=False)).head
        return head.number_for_clients(number)

    async def _register(
        self,
        topic: TopicInfo,
        decide: Callable[[TopicSchema], SchemaVersion],
        *,
        in_force: bool = False,
    ) -> SchemaVersion:
        """Record the version that `decide` returns. With `in_force` it becomes a version of the
        schema at once, and the schema is in force; otherwise the version is only proposed."""
        version: SchemaVersion | None = None

        def change(current: TopicSchema) -> tuple[SchemaHead, list[Operation]] | None:
            nonlocal version
            version = decide(current)
            number, head = version.number, current.head
            if not head.has(number):
                _check_clients_versions(topic, version, current)
            if in_force:
                head = replace(head.with_version(number), in_force=True)
            elif not head.has(number):
                head = replace(head, proposed=head.proposed | {number})
            if number <= current.head.last:
                return None if head == current.head else (head, [])
            record = schema_records.encode_version(version)
            return head, [Create(self._node(topic, number), record)]

        with unavailable_while(f"registering a schema of topic '{topic.name}'"):
            await self._change(topic, change)
        assert version is not None, "a change begins with a decision"
        cached = self._cached(topic.id)
        if version.number == len(cached.versions) + 1:
            size = cached.size + len(schema_records.encode_version(version))
            head = cached.head.with_version(version.number) if in_force else cached.head
            self._cache.put(topic.id, CachedVersions((*cached.versions, version), size, head))
        return version

    async def _change(
        self,
        topic: TopicInfo,
        change: Callable[[TopicSchema], tuple[SchemaHead, list[Operation]] | None],
    ) -> None:
        """Repeat `change` until it returns None (no change is needed), or its multi is applied."""
        path = self._node(topic)
        number_is_taken = False  # whether a version that the head does not name has the number
        tries = Tries(self._rng)
        while True:
            await self._store.sync(path)
            current = await self._read(topic, with_unnamed=number_is_taken)
            changes = change(current)
            if changes is None and number_is_taken:
                changes = current.head, []
            if changes is None:
                return
            head, operations = changes
            topics_head = await self._head(topic)
            value = schema_records.encode_head(head)
            write: Operation = Create(path, value)
            if current.node_version is not None:
                write = Set(path, value, current.node_version)
            if current.head.takes_bytes and not head.takes_bytes:
                head_path = paths.topic_head(topic.id)
                operations = [*operations, Set(head_path, topics_head.value, topics_head.version)]
            try:
                await multi_unless_held(self._store, [write, *operations])
                return
            except OutcomeUnknown:
                pass
            except MultiFailed as failed:
                if not isinstance(failed.cause, BadVersion | NodeExists | NoNode):
                    raise
                number_is_taken = failed.index > 0 and isinstance(failed.cause, NodeExists)
            await tries.retry_or_raise(
                f"others changed the schema of topic '{topic.name}' again and again"
            )

    def _node(self, topic: TopicInfo, version: int | None = None) -> str:
        """The path of the topic's record of its schema, or of one version."""
        return paths.topic_schema(topic.id, version)

    async def _head(self, topic: TopicInfo) -> Versioned:
        """The head of the topic's log. Raises errors.TopicDeleted."""
        node = await read(self._store, paths.topic_head(topic.id))
        if node is None or decode_head(node.value).life is TopicLife.DELETED:
            raise errors.TopicDeleted(f"topic '{topic.name}' (id {topic.id}) was deleted")
        return node

    async def _read(self, topic: TopicInfo, *, with_unnamed: bool = False) -> TopicSchema:
        """The topic's schema. With `with_unnamed`, versions that the head does not name count as
        proposed (software of an earlier version drops proposed versions from a head that it
        writes)."""
        node = await read(self._store, self._node(topic))
        if node is None:
            return TopicSchema(SchemaHead(), (), None, (), _NO_VERSIONS)
        head = schema_records.decode_head(node.value)
        while with_unnamed and await read(self._store, self._node(topic, head.last + 1)):
            head = replace(head, proposed=head.proposed | {head.last + 1})
        cached = self._cached(topic.id)
        numbers = range(len(cached.versions) + 1, head.last + 1)

        async def record_of(number: int) -> bytes:
            record = await look_up(self._store, self._node(topic, number))
            if record is None:
                raise errors.UnsupportedFormat(
                    f"version {number} of the schema of topic id {topic.id} is missing"
                )
            return record.value

        values = await call_each(record_of, numbers, READS_AT_ONCE)
        if values or head != cached.head:
            versions = (*cached.versions, *map(schema_records.decode_version, values))
            cached = CachedVersions(versions, cached.size + sum(map(len, values)), head)
            self._cache.put(topic.id, cached)
        proposed = tuple(v for v in cached.column_versions if v.number in head.proposed)
        return TopicSchema(head, cached.registered, node.version, proposed, cached)

    def _cached(self, topic_id: str) -> "CachedVersions":
        return self._cache.get(topic_id) or _NO_VERSIONS


@dataclass(frozen=True)
class CachedVersions:
    """The cached records of a topic: versions 1, 2 ..., `size` bytes in all, and the head."""

    versions: tuple[SchemaVersion | ClientVersion, ...] = ()
    size: int = 0
    head: SchemaHead = field(default_factory=SchemaHead)

    @property
    def column_versions(self) -> tuple[SchemaVersion, ...]:
        return tuple(v for v in self.versions if isinstance(v, SchemaVersion))

    @property
    def registered(self) -> tuple[SchemaVersion, ...]:
        return tuple(version for version in self.column_versions if self.head.has(version.number))

    @cached_property
    def client_versions(self) -> tuple[ClientVersion, ...]:
        return tuple(
            version
            for version in self._all_client_versions
            if self._is_after(version, self.head.deleted)
            and not (version.of_columns and self.head.takes_bytes)
        )

    def client_version(self, number: int) -> ClientVersion | None:
        for version in self._all_client_versions:
            if version.number == number and self._is_after(version, self.head.erased):
                return version
        return None

    def _is_after(self, version: ClientVersion, number: int) -> bool:
        """Whether the version is above the topic's version `number`. Versions of columns always
        are, while columns are in force."""
        is_of_present_columns = version.of_columns and not self.head.takes_bytes
        return is_of_present_columns or version.number > self.head.number_for_clients(number)

    @cached_property
    def _all_client_versions(self) -> tuple[ClientVersion, ...]:
        counted = (
            self._for_clients(version)
            for version in self.versions
            if isinstance(version, ClientVersion) or self.head.has(version.number)
        )
        return (*([ClientVersion(0, _TEXT)] if self.head.has_text else []), *counted)

    def _for_clients(self, version: SchemaVersion | ClientVersion) -> ClientVersion:
        number = self.head.number_for_clients(version.number)
        if isinstance(version, ClientVersion):
            return ClientVersion(number, version.schema)
        return ClientVersion(number, client_schema(version.schema), version.schema)


_NO_VERSIONS = CachedVersions()


def find_client_version(
    versions: Iterable[ClientVersion], schema: ClientSchema
) -> ClientVersion | None:
    """The version with this schema; None if no version has it. Takes long if versions are large."""
    identity = schema.identity
    equal_versions = (version for version in versions if version.schema.identity == identity)
    return next(equal_versions, None)


def size_of(versions: Iterable[ClientVersion]) -> int:
    return sum(version.schema.size for version in versions)


def _version_or_misfit(
    versions: Sequence[ClientVersion], schema: ClientSchema, strategy: Strategy
) -> tuple[ClientVersion | None, str | None]:
    """The version with this schema, or why the schema cannot be the next version."""
    version = find_client_version(versions, schema)
    if version is not None:
        return version, None
    return None, client_rules.producer_misfit(schema, versions, strategy)


def _check_clients_versions(topic: TopicInfo, version: SchemaVersion, current: TopicSchema) -> None:
    """Checks that new columns fit the JSON schemas that clients declared, by the topic's strategy
    for clients. Raises errors.SchemaIncompatible."""
    declared = [v for v in current.client_versions if not v.of_columns]
    if declared and declared[-1].schema.kind is ClientSchemaType.JSON:
        strategy = Strategy(topic.policies.schema_compatibility)
        schema = client_schema(version.schema)
        misfit = client_rules.columns_misfit(schema, declared, strategy)
        if misfit is not None:
            raise errors.SchemaIncompatible(
                f"topic '{topic.name}' has a schema of Pulsar's clients: {misfit}",
                "Cast or rename the column, or set the topic's policy schema_compatibility.",
            )


def _check_beside_columns(topic: TopicInfo, schema: ClientSchema, head: SchemaHead) -> None:
    if not head.takes_bytes and schema.kind is not ClientSchemaType.JSON:
        raise _takes_no_schema(topic, schema, "its rows are columns, which only JSON schemas fit")


def _takes_no_schema(topic: TopicInfo, schema: ClientSchema, why: str) -> errors.SchemaIncompatible:
    return errors.SchemaIncompatible(
        f"topic '{topic.name}' takes no schema of type {schema.kind.name}: {why}",
        "Declare a schema that fits, or set the topic's policy schema_compatibility or"
        " schema_auto_update.",
    )


def not_registered(topic: TopicInfo) -> errors.SchemaNotRegistered:
    """The error for a read or write that needs a schema, on a topic without a schema."""
    return errors.SchemaNotRegistered(f"topic '{topic.name}' has no registered schema")
