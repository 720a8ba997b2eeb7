"""Topics by name: created, opened, listed, deleted.

Always true: a topic is its id, minted when it is created; a name deleted and created again is
another topic. Creating and deleting are one multi each: no process ever sees a name without a log,
and a log without a name takes no commits. While bookies hold the metadata store (it went back in
time), every change is refused.
"""

import builtins
import difflib
import random
import uuid
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field, replace
from types import MappingProxyType
from typing import Any, NamedTuple

from spark_ledger import errors
from spark_ledger.async_tasks import SharedReads
from spark_ledger.metadata import paths
from spark_ledger.metadata.cluster import multi_unless_held, not_held_checks
from spark_ledger.metadata.store import (
    Check,
    Create,
    Delete,
    MetadataStore,
    MultiFailed,
    NoNode,
    Operation,
    OutcomeUnknown,
    Set,
    Versioned,
    Watcher,
)
from spark_ledger.metadata.store_calls import (
    TRIES_MAX,
    Tries,
    call_each,
    ensure,
    names_in,
    read,
    unavailable_while,
)
from spark_ledger.topic.log import records
from spark_ledger.topic.log.names import (
    DEFAULT_FULL_NAMESPACE,
    TopicName,
    parse_namespace,
    parse_partition_name,
    parse_topic,
)
from spark_ledger.topic.log.policies import (
    PARTITIONS_MAX,
    POLICY_NAMES,
    NamespacePolicies,
    TopicPolicies,
    effective_policies,
    own_names,
    with_changes,
    with_own_changes,
)
from spark_ledger.topic.log.records import Head, TopicLife, TopicRecord

NEAREST_MAX = 3
READ_AT_ONCE = 200
"""So many records are decoded in one step of the loop."""
PARTS_AT_ONCE = 2
"""While one part is decoded, the next part is read."""
NO_PROPERTIES: Mapping[str, str] = MappingProxyType({})
Changes = Mapping[str, Any]
ChangesOf = Callable[[Changes, Changes], Changes]


@dataclass(frozen=True, slots=True)
class TopicInfo:
    """`partitions` is the number of partitions at creation, `grown_to` that after its growth, as
    `note_growth` noted it (0: it has not grown); the folded state has today's number, which is
    never smaller. `properties` are texts of the user. `created_ms`: when the topic was made, by the
    store's clock."""

    id: str
    name: TopicName
    partitions: int
    policies: TopicPolicies
    properties: Mapping[str, str] = field(default_factory=dict, hash=False)
    created_ms: int = field(default=0, compare=False)
    grown_to: int = 0

    @property
    def partitions_noted(self) -> int:
        """The number of partitions as far as the topic's record has it."""
        return max(self.partitions, self.grown_to)


class ListedTopic(NamedTuple):
    """What a list of many topics has of each. `partitions`: as far as the topic's record has the
    number. Not partitioned: the topic has one partition, without a name of its own."""

    id: str
    name: TopicName
    partitions: int
    is_partitioned: bool


@dataclass(frozen=True, slots=True)
class CheckedPolicies:
    """The policies that a topic has (its own ones, and its namespace's for the rest), and the
    checks that fail in a multi if these policies have changed.
    """

    policies: TopicPolicies
    checks: tuple[Check, ...]


async def read_policies(
    store: MetadataStore, topic_id: str, watch: Watcher | None = None
) -> CheckedPolicies:
    """`watch` is set on the records of the topic and its namespace. Raises StoreUnavailable,
    errors.TopicNotFound, errors.UnsupportedFormat."""
    node = await read(store, paths.topic(topic_id), watch)
    if node is None:
        raise errors.TopicNotFound(f"there is no topic with id {topic_id}", topic_id=topic_id)
    record = records.decode_topic(node.value)
    check = Check(paths.topic(topic_id), node.version)
    path = _namespace_of(parse_topic(record.name))
    inherits = record.own != POLICY_NAMES
    namespace_node = await read(store, path, watch) if inherits else None
    checks = (check,) if namespace_node is None else (check, Check(path, namespace_node.version))
    return CheckedPolicies(_effective_policies(record, namespace_node), checks)


def _effective_policies(record: TopicRecord, namespace_node: Versioned | None) -> TopicPolicies:
    return effective_policies(record.policies, record.own, _decode_namespace(namespace_node))


def _info_of(
    topic_id: str, name: TopicName, node: Versioned, namespace_node: Versioned | None
) -> TopicInfo:
    record = records.decode_topic(node.value)
    policies = _effective_policies(record, namespace_node)
    return TopicInfo(
        *(topic_id, name, record.partitions, policies),
        *(record.properties, node.created_ms, record.grown_to),
    )


def _decode_namespace(namespace_node: Versioned | None) -> NamespacePolicies | None:
    return None if namespace_node is None else records.decode_namespace(namespace_node.value)


def policies_in(namespace_node: Versioned | None) -> TopicPolicies:
    """The policies of a topic that has no policy of its own, by the record of its namespace."""
    return _inherited(_decode_namespace(namespace_node))


def check_topics_max(topic: TopicName, namespace: NamespacePolicies, count: int, more: int) -> None:
    """Raises errors.BadConfig if beside `count` partitions there is no room for so many more."""
    if namespace.topics_max is not None and more and count + more > namespace.topics_max:
        raise errors.BadConfig(
            f"Exceed maximum number of topics in namespace: '{topic.tenant}/{topic.namespace}' has"
            f" {count} partitions of topics, topics_max={namespace.topics_max}, and topic '{topic}'"
            f" would add {more}",
            "Delete topics, or set another topics_max of the namespace.",
        )


def _inherited(namespace: NamespacePolicies | None) -> TopicPolicies:
    return with_changes(TopicPolicies(), {} if namespace is None else namespace.topics)


def _namespace_of(topic: TopicName) -> str:
    return paths.namespace(topic.tenant, topic.namespace)


def namespace_not_found(namespace: str) -> errors.NamespaceNotFound:
    return errors.NamespaceNotFound(f"there is no namespace '{namespace}'")


class Topics:
    """Names have the forms that parse_topic takes. Every method raises errors.TopicNameInvalid,
    and errors.Unavailable if the metadata store does not respond."""

    def __init__(self, store: MetadataStore, rng: random.Random) -> None:
        self.store = store
        self._rng = rng
        self._ids = SharedReads(self._read_id)
        self._infos = SharedReads(self._read_again)
        self._partitions = records.PartitionsSeen()

    async def create(
        self,
        name: str,
        partitions: int = 1,
        policies: TopicPolicies | Mapping[str, Any] | None = None,
        *,
        exist_ok: bool = False,
        makes_namespace: bool = True,
        properties: Mapping[str, str] = NO_PROPERTIES,
    ) -> TopicInfo:
        """Makes a topic. With `exist_ok` an existing topic is returned unchanged. If `policies` is
        a mapping, its policies are the topic's own, and the topic's other policies follow its
        namespace. If `policies` is a TopicPolicies, all policies are the topic's own. With
        `makes_namespace` a missing namespace is made.

        Raises errors.TopicExists, errors.NamespaceNotFound, errors.BadConfig for partitions out of
        1 .. PARTITIONS_MAX, or beyond the namespace's topics_max.
        """
        topic = parse_topic(name)
        partition = parse_partition_name(topic)
        if partition is not None:
            raise errors.TopicNameInvalid(
                f"'{topic}' is the name of partition {partition[1]} of topic '{partition[0]}'",
                "Choose a name that does not end in -partition- and a number.",
                topic=topic.full,
            )
        if not 1 <= partitions <= PARTITIONS_MAX:
            raise errors.BadConfig(f"partitions must be 1 to {PARTITIONS_MAX}, got {partitions}")
        namespace = await self.namespace(f"{topic.tenant}/{topic.namespace}")
        if isinstance(policies, TopicPolicies):
            record = TopicRecord(topic.full, partitions, policies)
        else:
            effective = with_changes(_inherited(namespace), policies or {})
            record = TopicRecord(topic.full, partitions, effective, own_names(policies or {}))
        record = replace(record, properties=records.checked_properties(properties))
        with unavailable_while(f"creating topic '{topic}'"):
            if namespace is not None and namespace.topics_max is not None:
                is_new = await self._find(topic) is None
                await self._check_room(topic, namespace, partitions if is_new else 0)
            created = await self._create(topic, record, makes_namespace)
            info = created or await self._find(topic)
        if created is None and not exist_ok:
            raise errors.TopicExists(f"there is a topic '{topic}' already", topic=topic.full)
        return info or await self.create(
            *(name, partitions, policies),
            exist_ok=exist_ok,
            makes_namespace=makes_namespace,
            properties=properties,
        )

    async def open(self, name: str, *, fresh: bool = True) -> TopicInfo:
        """The topic of this name. Raises errors.TopicNotFound, which lists the nearest names."""
        topic = await self.find(name, fresh=fresh)
        if topic is not None:
            return topic
        existing = [name.short for name in await self.names()]
        raise self._not_found(parse_topic(name), existing)

    async def find(self, name: str, *, fresh: bool = True) -> TopicInfo | None:
        """The topic of this name, None if there is no such topic. With `fresh` the answer is not
        older than this call."""
        topic = parse_topic(name)
        with unavailable_while(f"opening topic '{topic}'"):
            if fresh:
                await self.store.sync(topic.path)
            return await self._find(topic)

    async def again(self, info: TopicInfo) -> TopicInfo | None:
        """The topic with today's policies; None if another topic, or no topic, has its name by now.
        Not synced, as `id_of`."""
        return await self._infos(info)

    async def _read_again(self, info: TopicInfo) -> TopicInfo | None:
        nodes = [info.name.path, paths.topic(info.id), _namespace_of(info.name)]
        with unavailable_while(f"opening topic '{info.name}'"):
            pointer, node, namespace_node = await self.store.get_many(nodes)
        if pointer is None or records.decode_topic_pointer(pointer.value) != info.id:
            return None
        return None if node is None else _info_of(info.id, info.name, node, namespace_node)

    async def own_policies(self, info: TopicInfo) -> dict[str, Any]:
        """The values of the policies that were set on the topic, by name. Raises
        errors.TopicNotFound."""
        with unavailable_while(f"reading the policies of topic '{info.name}'"):
            node = await read(self.store, paths.topic(info.id))
        if node is None:
            raise errors.TopicNotFound(f"there is no topic '{info.name}'", topic=info.name.full)
        record = records.decode_topic(node.value)
        return {name: getattr(record.policies, name) for name in record.own}

    async def id_of(self, topic: TopicName) -> str | None:
        """The id of the topic of this name, None if there is no such topic. Not synced: an answer
        may be as old as what this session has read."""
        return await self._ids(topic)

    async def _read_id(self, topic: TopicName) -> str | None:
        with unavailable_while(f"opening topic '{topic}'"):
            pointer = await read(self.store, topic.path)
        return None if pointer is None else records.decode_topic_pointer(pointer.value)

    async def name_of(self, topic_id: str) -> TopicName | None:
        """The name that the topic has or had; None if its record is gone."""
        with unavailable_while(f"reading the name of topic {topic_id}"):
            node = await read(self.store, paths.topic(topic_id))
        return None if node is None else parse_topic(records.decode_topic(node.value).name)

    async def list(
        self, unreadable: dict[str, errors.LedgerError] | None = None
    ) -> list[TopicInfo]:
        """Every topic, ordered by full name. If a topic's record cannot be read, the error goes
        into `unreadable` under the topic's short name, and the other topics are returned. Without
        `unreadable` the error is raised.
        """
        topics = []
        with unavailable_while("listing topics"):
            for name in await self.names():
                try:
                    info = await self._find(name)
                except errors.UnsupportedFormat as error:
                    if unreadable is None:
                        raise
                    unreadable[name.short] = error
                else:
                    topics += [] if info is None else [info]
        return topics

    async def in_namespace(self, namespace: str) -> builtins.list[ListedTopic]:
        """The topics of a namespace, ordered by name. A topic that cannot be read is left out."""
        tenant, name = parse_namespace(namespace)
        with unavailable_while(f"listing the topics of namespace '{namespace}'"):
            await self.store.sync(paths.namespace(tenant, name))
        names = await self.names_in(namespace)
        return await self.listed([TopicName(tenant, name, topic) for topic in names])

    async def names_in(self, namespace: str, watch: Watcher | None = None) -> builtins.list[str]:
        """The names of the topics in a namespace, sorted, without tenant and namespace. `watch` is
        set before they are read, also where the namespace is missing. Not synced, as `id_of`."""
        path = paths.namespace(*parse_namespace(namespace))
        with unavailable_while(f"listing the topics of namespace '{namespace}'"):
            while True:
                try:
                    return await self.store.children(path, watch)
                except NoNode:  # it may be made at this moment: then its children are watched
                    if await read(self.store, path, watch) is None:
                        return []

    async def listed(self, names: Sequence[TopicName]) -> builtins.list[ListedTopic]:
        """Those of these topics that exist and can be read. Not synced."""
        starts = range(0, len(names), READ_AT_ONCE)
        parts = [names[start : start + READ_AT_ONCE] for start in starts]
        with unavailable_while("reading the records of topics"):
            listed = await call_each(self._listed, parts, PARTS_AT_ONCE)
        return [topic for part in listed for topic in part]

    async def _listed(self, names: Sequence[TopicName]) -> builtins.list[ListedTopic]:
        pointers = await self.store.get_many([name.path for name in names])
        ids = {}
        for name, pointer in zip(names, pointers, strict=True):
            decode = records.decode_topic_pointer
            topic_id = records.readable(f"the id of topic {name}", pointer, decode)
            if topic_id is not None:
                ids[topic_id] = name
        nodes = await self.store.get_many([paths.topic(topic_id) for topic_id in ids])
        topics = []
        for (topic_id, name), node in zip(ids.items(), nodes, strict=True):
            noted = records.readable(f"topic {name}", node, self._partitions.of)
            if noted is not None:
                topics.append(ListedTopic(topic_id, name, *noted))
        return topics

    async def names(self) -> builtins.list[TopicName]:
        """Every topic's name, with one read for each namespace and no read for a topic."""
        topics = []
        with unavailable_while("listing the names of topics"):
            for tenant in await names_in(self.store, paths.TOPICS):
                for namespace in await names_in(self.store, f"{paths.TOPICS}/{tenant}"):
                    names = await names_in(self.store, f"{paths.TOPICS}/{tenant}/{namespace}")
                    topics += [TopicName(tenant, namespace, name) for name in names]
        return topics

    async def delete(self, name: str) -> TopicInfo:
        """Removes the name and sets the head to deleted, in one multi: when this returns, no
        process can commit to the topic. Its ledgers are deleted later. Raises
        errors.TopicNotFound."""
        topic = parse_topic(name)
        info = await self.open(name)
        with unavailable_while(f"deleting topic '{topic}'"):
            tries = Tries(self._rng)
            while not await self._delete_once(info):
                await tries.retry_or_raise(
                    f"topic '{topic}' was not deleted: a commit came before each try"
                )
                await self.store.sync(topic.path)
                current = await self._find(topic)
                if current is None or current.id != info.id:
                    break
        return info

    async def change_policies(self, name: str, changes: Changes | ChangesOf) -> TopicInfo:
        """Changes policies of the topic: `changes` has their new values by name (policies.py). The
        value INHERIT gives the topic its namespace's policy again. Ledgers made from now on follow
        the changes. A client that has the topic open uses the changes once it opens the topic
        again. A function makes them of the present policies, and of the topic's own.

        Raises errors.TopicNotFound, errors.BadConfig, errors.CommitContended.
        """

        def changed(record: TopicRecord, namespace: NamespacePolicies | None) -> TopicRecord:
            present = asdict(effective_policies(record.policies, record.own, namespace))
            own_values = {name: present[name] for name in record.own}
            new = changes(present, own_values) if callable(changes) else changes
            values, own = with_own_changes(record.policies, record.own, namespace, new)
            return replace(record, policies=values, own=own)

        return await self._change(await self.open(name), changed)

    async def change_properties(self, name: str, changes: Mapping[str, str | None]) -> TopicInfo:
        """Changes properties of the topic; None removes a property. Raises errors.TopicNotFound,
        errors.BadConfig, errors.CommitContended."""

        def changed(record: TopicRecord, _: NamespacePolicies | None) -> TopicRecord:
            after = {**record.properties, **changes}
            kept = {key: value for key, value in after.items() if value is not None}
            return replace(record, properties=records.checked_properties(kept))

        return await self._change(await self.open(name), changed)

    async def _change(
        self,
        info: TopicInfo,
        changed: Callable[[TopicRecord, NamespacePolicies | None], TopicRecord],
    ) -> TopicInfo:
        """Change the topic's record, which is read again after each lost race."""
        topic = info.name
        with unavailable_while(f"changing topic '{topic}'"):
            tries = Tries(self._rng)
            while True:
                node = await self.store.get(paths.topic(info.id))
                record = records.decode_topic(node.value)
                namespace_node = await read(self.store, _namespace_of(topic))
                after = changed(record, _decode_namespace(namespace_node))
                with suppress(MultiFailed, OutcomeUnknown):  # if the response is lost, read again
                    if after != record:
                        value = records.encode_topic(after)
                        change = Set(paths.topic(info.id), value, node.version)
                        await multi_unless_held(self.store, [change])
                    policies = _effective_policies(after, namespace_node)
                    return replace(info, policies=policies, properties=after.properties)
                await tries.retry_or_raise(f"others changed topic '{topic}' again and again")
                await self.store.sync(topic.path)

    async def note_growth(self, info: TopicInfo, partitions: int) -> None:
        """Notes a commit's growth in the record, for lists. Raises errors.CommitContended."""
        with unavailable_while(f"noting the growth of topic '{info.name}'"):
            tries = Tries(self._rng)
            while (node := await read(self.store, paths.topic(info.id))) is not None:
                record = records.decode_topic(node.value)
                if max(record.partitions, record.grown_to) >= partitions:
                    return
                value = records.encode_topic(replace(record, grown_to=partitions))
                with suppress(MultiFailed, OutcomeUnknown):
                    change = Set(paths.topic(info.id), value, node.version)
                    await multi_unless_held(self.store, [change])
                    return
                await tries.retry_or_raise(f"others changed topic '{info.name}' again and again")
                await self.store.sync(paths.topic(info.id))

    # -- namespaces --------------------------------------------------------------------------

    async def inherited_policies(self, name: str) -> TopicPolicies:
        """The policies that a topic of this name has if it has no policy of its own."""
        topic = parse_topic(name)
        return _inherited(await self.namespace(f"{topic.tenant}/{topic.namespace}"))

    async def namespace(self, namespace: str) -> NamespacePolicies | None:
        """The namespace's policies; None if there is no such namespace. Raises
        errors.TopicNameInvalid."""
        path = paths.namespace(*parse_namespace(namespace))
        with unavailable_while(f"reading namespace '{namespace}'"):
            await self.store.sync(path)
            node = await read(self.store, path)
        return _decode_namespace(node)

    async def check_room(self, topic: TopicName, more: int) -> None:
        """Raises errors.BadConfig if the topic may not have so many more partitions, because of its
        namespace's topics_max."""
        namespace = await self.namespace(f"{topic.tenant}/{topic.namespace}")
        if namespace is not None:
            await self._check_room(topic, namespace, more)

    async def _check_room(self, topic: TopicName, namespace: NamespacePolicies, more: int) -> None:
        if namespace.topics_max is not None and more:
            listed = await self.in_namespace(f"{topic.tenant}/{topic.namespace}")
            check_topics_max(topic, namespace, sum(info.partitions for info in listed), more)

    async def set_namespace(self, namespace: str, changes: Mapping[str, Any]) -> NamespacePolicies:
        """Changes policies of the namespace: `changes` has their new values by name; the value
        INHERIT unsets a policy. Makes the namespace if it does not exist. A topic of the namespace
        follows a policy unless the policy was set on the topic. Raises errors.TopicNameInvalid,
        errors.BadConfig, errors.CommitContended."""
        NamespacePolicies().with_changes(changes)  # raises before the namespace is made
        return await self.change_namespace(namespace, lambda _: changes)

    async def change_namespace(
        self, namespace: str, changes_of: Callable[[NamespacePolicies], Mapping[str, Any]]
    ) -> NamespacePolicies:
        """As `set_namespace`; `changes_of` makes the changes of the present policies, again after
        each lost race."""
        path = paths.namespace(*parse_namespace(namespace))
        with unavailable_while(f"changing namespace '{namespace}'"):
            await not_held_checks(self.store)
            await ensure(self.store, path)
            tries = Tries(self._rng)
            while True:
                node = await self.store.get(path)
                present = records.decode_namespace(node.value)
                after = present.with_changes(changes_of(present))
                value = records.encode_namespace(after)
                if value == node.value:
                    return after
                with suppress(MultiFailed, OutcomeUnknown):
                    await multi_unless_held(self.store, [Set(path, value, node.version)])
                    return after
                await tries.retry_or_raise(
                    f"others changed namespace '{namespace}' again and again"
                )
                await self.store.sync(path)

    async def namespaces(self) -> builtins.list[str]:
        """All namespaces, as `tenant/name`."""
        with unavailable_while("listing namespaces"):
            return [
                f"{tenant}/{name}"
                for tenant in await names_in(self.store, paths.TOPICS)
                for name in await names_in(self.store, f"{paths.TOPICS}/{tenant}")
            ]

    async def _create(
        self, topic: TopicName, record: TopicRecord, makes_namespace: bool
    ) -> TopicInfo | None:
        """The new topic, None if another topic has the name."""
        bits = self._rng.getrandbits(128)
        topic_id = str(uuid.UUID(int=bits, version=4))
        created = TopicInfo(topic_id, topic, record.partitions, record.policies, record.properties)
        operations: builtins.list[Operation] = [
            Create(topic.path, records.encode_topic_pointer(created.id)),
            Create(paths.topic(created.id), records.encode_topic(record)),
            Create(paths.topic_head(created.id), records.encode_head(Head(0))),
            Create(paths.topic_log(created.id)),
        ]
        for _ in range(TRIES_MAX):
            try:
                await multi_unless_held(self.store, operations)
                node = await read(self.store, paths.topic(topic_id))  # for the store's time
                return created if node is None else replace(created, created_ms=node.created_ms)
            except MultiFailed as failed:
                if not isinstance(failed.cause, NoNode):
                    break
                await self._ensure_namespace(topic, makes_namespace)
                await ensure(self.store, paths.TOPIC_IDS)
            except OutcomeUnknown:
                await self.store.sync(topic.path)
                if await read(self.store, topic.path) is not None:
                    break
        current = await self._find(topic)
        return current if current is not None and current.id == created.id else None

    async def _ensure_namespace(self, topic: TopicName, makes: bool) -> None:
        path, name = _namespace_of(topic), f"{topic.tenant}/{topic.namespace}"
        is_missing = name != DEFAULT_FULL_NAMESPACE and await read(self.store, path) is None
        if is_missing and not makes:
            raise namespace_not_found(name)
        await ensure(self.store, path)

    async def _delete_once(self, info: TopicInfo) -> bool:
        pointer = await read(self.store, info.name.path)
        if pointer is None or records.decode_topic_pointer(pointer.value) != info.id:
            return True
        node = await self.store.get(paths.topic_head(info.id))
        head = replace(records.decode_head(node.value), life=TopicLife.DELETED)
        await ensure(self.store, paths.TOPICS_DELETED)
        operations: builtins.list[Operation] = [
            Delete(info.name.path, pointer.version),
            Set(paths.topic_head(info.id), records.encode_head(head), node.version),
            Create(paths.topic_deleted(info.id), records.encode_topic_pointer(info.id)),
        ]
        try:
            await multi_unless_held(self.store, operations)
            return True
        except (MultiFailed, OutcomeUnknown):
            return False

    async def _find(self, topic: TopicName) -> TopicInfo | None:
        pointer = await read(self.store, topic.path)
        if pointer is None:
            return None
        topic_id = records.decode_topic_pointer(pointer.value)
        node, namespace_node = await self.store.get_many(
            [paths.topic(topic_id), _namespace_of(topic)]
        )
        if node is None:  # the name was read before the topic was removed
            await self.store.sync(topic.path)
            return await self._find(topic)
        return _info_of(topic_id, topic, node, namespace_node)

    def _not_found(self, topic: TopicName, names: builtins.list[str]) -> errors.TopicNotFound:
        nearest = difflib.get_close_matches(topic.short, names, n=NEAREST_MAX)
        hint = f"; similar names: {', '.join(nearest)}" if nearest else ""
        return errors.TopicNotFound(f"there is no topic '{topic}'{hint}", topic=topic.full)
