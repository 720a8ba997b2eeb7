"""Topics by name: created, opened, listed, deleted.

Always true: a topic is its id, minted when it is created; a name deleted and created again is
another topic. Creating and deleting are one multi each: a name without a log, or a log that can
be committed to without a name, is never seen. Nothing here is changed while the cluster is held.
"""

import asyncio
import builtins
import difflib
import random
import uuid
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any

from spark_ledger import errors
from spark_ledger.metadata import paths
from spark_ledger.metadata.cluster import multi_unless_held, not_held
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
)
from spark_ledger.metadata.store_calls import TRIES_MAX, ensure, names_in, pause_s, reachable, read
from spark_ledger.topic.log import records
from spark_ledger.topic.log.names import (
    TopicName,
    of_partition,
    parse_namespace,
    parse_topic,
)
from spark_ledger.topic.log.policies import (
    NAMES,
    NamespacePolicies,
    TopicPolicies,
    changed,
    changed_own,
    effective,
    own_names,
)
from spark_ledger.topic.log.records import Head, TopicLife, TopicRecord

PARTITIONS_MAX = 100_000
NEAREST_MAX = 3


@dataclass(frozen=True, slots=True)
class TopicInfo:
    """`partitions` are those at creation; they only grow (the folded state has today's)."""

    id: str
    name: TopicName
    partitions: int
    policies: TopicPolicies


@dataclass(frozen=True, slots=True)
class PoliciesNow:
    """What a topic has, its own or its namespace's, and what a multi checks so that it still has
    that."""

    policies: TopicPolicies
    checks: tuple[Check, ...]


async def policies_now(store: MetadataStore, topic_id: str) -> PoliciesNow:
    """Raises StoreUnavailable, errors.TopicNotFound, errors.UnsupportedFormat."""
    node = await read(store, paths.topic(topic_id))
    if node is None:
        raise errors.TopicNotFound(f"there is no topic with id {topic_id}", topic_id=topic_id)
    record = records.decode_topic(node.value)
    check = Check(paths.topic(topic_id), node.version)
    path = _namespace_of(parse_topic(record.name))
    inherits = record.own != NAMES
    above = await read(store, path) if inherits else None
    checks = (check,) if above is None else (check, Check(path, above.version))
    return PoliciesNow(_effective(record, above), checks)


def _effective(record: TopicRecord, above: Versioned | None) -> TopicPolicies:
    return effective(record.policies, record.own, _decoded(above))


def _decoded(above: Versioned | None) -> NamespacePolicies | None:
    return None if above is None else records.decode_namespace(above.value)


def _namespace_of(topic: TopicName) -> str:
    return paths.namespace(topic.tenant, topic.namespace)


class Topics:
    """Every method takes a name as a user types it and raises errors.TopicNameInvalid, and
    errors.Unavailable when the metadata store does not respond."""

    def __init__(self, store: MetadataStore, rng: random.Random) -> None:
        self.store = store
        self._rng = rng

    async def create(
        self,
        name: str,
        partitions: int = 1,
        policies: TopicPolicies | Mapping[str, Any] | None = None,
        *,
        exist_ok: bool = False,
    ) -> TopicInfo:
        """Make a topic. With `exist_ok` the topic that is there is returned as it is. `policies`
        by name are its own, and the rest its namespace's, now and later; a TopicPolicies is all its
        own.

        Raises errors.TopicExists, errors.BadConfig for partitions out of 1 .. PARTITIONS_MAX.
        """
        topic = parse_topic(name)
        partition = of_partition(topic)
        if partition is not None:
            raise errors.TopicNameInvalid(
                f"'{topic}' is the name of partition {partition[1]} of topic '{partition[0]}'",
                "Choose a name that does not end in -partition- and a number.",
                topic=topic.full,
            )
        if not 1 <= partitions <= PARTITIONS_MAX:
            raise errors.BadConfig(f"partitions must be 1 to {PARTITIONS_MAX}, got {partitions}")
        if isinstance(policies, TopicPolicies):
            record = TopicRecord(topic.full, partitions, policies)
        else:
            has = changed(await self.inherited(name), policies or {})
            record = TopicRecord(topic.full, partitions, has, own_names(policies or {}))
        with reachable(f"creating topic '{topic}'"):
            made = await self._create(topic, record)
            existing = made or await self._find(topic)
        if made is None and not exist_ok:
            raise errors.TopicExists(f"there is a topic '{topic}' already", topic=topic.full)
        return existing or await self.create(name, partitions, policies, exist_ok=exist_ok)

    async def open(self, name: str, *, fresh: bool = True) -> TopicInfo:
        """The topic of that name. Raises errors.TopicNotFound, which lists the nearest names."""
        found = await self.find(name, fresh=fresh)
        if found is not None:
            return found
        there = [name.short for name in await self.names()]
        raise self._not_found(parse_topic(name), there)

    async def find(self, name: str, *, fresh: bool = True) -> TopicInfo | None:
        """The topic of that name if there is one; with `fresh` as it was when this was called."""
        topic = parse_topic(name)
        with reachable(f"opening topic '{topic}'"):
            if fresh:
                await self.store.sync(topic.path)
            return await self._find(topic)

    async def name_of(self, topic_id: str) -> TopicName | None:
        """The name that the topic has or had; None if nothing is left of the topic."""
        with reachable(f"looking for the name of topic {topic_id}"):
            node = await read(self.store, paths.topic(topic_id))
        return None if node is None else parse_topic(records.decode_topic(node.value).name)

    async def list(
        self, unreadable: dict[str, errors.LedgerError] | None = None
    ) -> list[TopicInfo]:
        """Every topic, by full name. One whose record cannot be read is put into `unreadable`, by
        its short name, and hides no other; without that its error is raised."""
        topics = []
        with reachable("listing topics"):
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

    async def names(self) -> builtins.list[TopicName]:
        """Every topic's name, with one read for each namespace and none for each topic."""
        found = []
        with reachable("listing the names of topics"):
            for tenant in await names_in(self.store, paths.TOPICS):
                for namespace in await names_in(self.store, f"{paths.TOPICS}/{tenant}"):
                    names = await names_in(self.store, f"{paths.TOPICS}/{tenant}/{namespace}")
                    found += [TopicName(tenant, namespace, name) for name in names]
        return found

    async def delete(self, name: str) -> TopicInfo:
        """Remove the name and set the head to deleted, in one multi: when it returns no process can
        commit to the topic. Its ledgers go later. Raises errors.TopicNotFound."""
        topic = parse_topic(name)
        info = await self.open(name)
        with reachable(f"deleting topic '{topic}'"):
            for tries in range(TRIES_MAX):
                if await self._delete_once(info):
                    return info
                await asyncio.sleep(pause_s(self._rng, tries))
                await self.store.sync(topic.path)
                now = await self._find(topic)
                if now is None or now.id != info.id:
                    return info
        raise errors.CommitContended(f"topic '{topic}' is written to so often that it stays")

    async def change_policies(self, name: str, changes: Mapping[str, Any]) -> TopicInfo:
        """The topic with these policies changed, by name; see policies.py. INHERIT: it has its
        namespace's again. Ledgers made from now on follow them; a client that has the topic open
        uses them once it opens it again.

        Raises errors.TopicNotFound, errors.BadConfig, errors.CommitContended.
        """
        topic = parse_topic(name)
        info = await self.open(name)
        with reachable(f"changing topic '{topic}'"):
            for tries in range(TRIES_MAX):
                node = await self.store.get(paths.topic(info.id))
                record = records.decode_topic(node.value)
                above = await read(self.store, _namespace_of(topic))
                kept, own = changed_own(record.policies, record.own, _decoded(above), changes)
                wanted = replace(record, policies=kept, own=own)
                with suppress(MultiFailed, OutcomeUnknown):  # if the response is lost, look
                    if wanted != record:
                        value = records.encode_topic(wanted)
                        change = Set(paths.topic(info.id), value, node.version)
                        await multi_unless_held(self.store, [change])
                    return replace(info, policies=_effective(wanted, above))
                await asyncio.sleep(pause_s(self._rng, tries))
                await self.store.sync(topic.path)
        raise errors.CommitContended(f"others changed topic '{topic}' again and again")

    # -- namespaces --------------------------------------------------------------------------

    async def inherited(self, name: str) -> TopicPolicies:
        """What a topic of that name has where it has no policies of its own."""
        topic = parse_topic(name)
        there = await self.namespace(f"{topic.tenant}/{topic.namespace}")
        return changed(TopicPolicies(), {} if there is None else there.topics)

    async def namespace(self, namespace: str) -> NamespacePolicies | None:
        """None where nothing was made of that name. Raises errors.TopicNameInvalid."""
        path = paths.namespace(*parse_namespace(namespace))
        with reachable(f"reading namespace '{namespace}'"):
            await self.store.sync(path)
            node = await read(self.store, path)
        return _decoded(node)

    async def set_namespace(self, namespace: str, changes: Mapping[str, Any]) -> NamespacePolicies:
        """The namespace, made if it is not there, with these policies changed, by name (INHERIT: it
        says nothing of it any more); topics have those that were not set on them. Raises
        errors.TopicNameInvalid, errors.BadConfig, errors.CommitContended."""
        path = paths.namespace(*parse_namespace(namespace))
        NamespacePolicies().changed(changes)  # before it is made
        with reachable(f"changing namespace '{namespace}'"):
            await not_held(self.store)
            await ensure(self.store, path)
            for tries in range(TRIES_MAX):
                node = await self.store.get(path)
                wanted = records.decode_namespace(node.value).changed(changes)
                value = records.encode_namespace(wanted)
                if value == node.value:
                    return wanted
                with suppress(MultiFailed, OutcomeUnknown):
                    await multi_unless_held(self.store, [Set(path, value, node.version)])
                    return wanted
                await asyncio.sleep(pause_s(self._rng, tries))
                await self.store.sync(path)
        raise errors.CommitContended(f"others changed namespace '{namespace}' again and again")

    async def namespaces(self) -> builtins.list[str]:
        """All that were made, as `tenant/name`."""
        with reachable("listing namespaces"):
            return [
                f"{tenant}/{name}"
                for tenant in await names_in(self.store, paths.TOPICS)
                for name in await names_in(self.store, f"{paths.TOPICS}/{tenant}")
            ]

    async def _create(self, topic: TopicName, record: TopicRecord) -> TopicInfo | None:
        """The new topic, or None when another has the name."""
        bits = self._rng.getrandbits(128)
        topic_id = str(uuid.UUID(int=bits, version=4))
        made = TopicInfo(topic_id, topic, record.partitions, record.policies)
        operations: builtins.list[Operation] = [
            Create(topic.path, records.encode_topic_pointer(made.id)),
            Create(paths.topic(made.id), records.encode_topic(record)),
            Create(paths.topic_head(made.id), records.encode_head(Head(0))),
            Create(paths.topic_log(made.id)),
        ]
        for _ in range(TRIES_MAX):
            try:
                await multi_unless_held(self.store, operations)
                return made
            except MultiFailed as failed:
                if not isinstance(failed.cause, NoNode):
                    break
                await ensure(self.store, topic.path.rpartition("/")[0])
                await ensure(self.store, paths.TOPIC_IDS)
            except OutcomeUnknown:
                await self.store.sync(topic.path)
                if await read(self.store, topic.path) is not None:
                    break
        now = await self._find(topic)
        return made if now is not None and now.id == made.id else None

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
        node, above = await self.store.get_many([paths.topic(topic_id), _namespace_of(topic)])
        if node is None:  # the name is older than the removal of what it names
            await self.store.sync(topic.path)
            return await self._find(topic)
        record = records.decode_topic(node.value)
        return TopicInfo(topic_id, topic, record.partitions, _effective(record, above))

    def _not_found(self, topic: TopicName, known: builtins.list[str]) -> errors.TopicNotFound:
        nearest = difflib.get_close_matches(topic.short, known, n=NEAREST_MAX)
        hint = f"; near to it: {', '.join(nearest)}" if nearest else ""
        return errors.TopicNotFound(f"there is no topic '{topic}'{hint}", topic=topic.full)
