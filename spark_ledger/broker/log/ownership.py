"""Which broker has which partition: a record for each topic.

    /brokers/topics/<topic id>   {"brokers": {id: {"url": ..., "partitions": [[number, epoch]]}}},
                                 stays when the brokers go

Always true: a partition has one owner in the record. The record only decides where clients are sent
(hazard 45: one ephemeral a process, however many topics). The owner changes by compare-and-set, and
the partition's epoch rises. By the fence of the live ledger the next owner gets the right to write;
no owner opens a live ledger in a commit that is made after the record has changed. A broker that
reads another owner in the record gives the partition up, and keeps its other partitions.
membership.py decides which brokers there are.
"""

import hashlib
import json
import logging
from collections.abc import Awaitable, Callable, Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any

from spark_ledger import errors
from spark_ledger.async_tasks import SharedReads
from spark_ledger.broker.log.membership import Membership, UrlTaken
from spark_ledger.metadata import paths
from spark_ledger.metadata.store import (
    BadVersion,
    Check,
    MetadataStore,
    NodeExists,
    NoNode,
    OutcomeUnknown,
    Versioned,
    Watcher,
)
from spark_ledger.metadata.store_calls import TRIES_MAX, Tries, read, unavailable_while

NO_RECORD = -1
RECORDS_KEPT = 16

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Owner:
    """The owner of a partition."""

    broker: str
    epoch: int
    url: str


@dataclass(frozen=True, slots=True)
class Owners:
    """The owners of a topic's partitions, by number. `version` is the version of the record."""

    by_partition: Mapping[int, Owner] = field(default_factory=dict)
    version: int = NO_RECORD

    def of(self, partition: int) -> Owner | None:
        return self.by_partition.get(partition)

    def epochs_of(self, broker: str) -> dict[int, int]:
        """The partitions of that broker, each with its epoch."""
        owners = self.by_partition
        return {number: owner.epoch for number, owner in owners.items() if owner.broker == broker}

    def with_owner(self, broker: str, url: str, numbers: Iterable[int]) -> "Owners":
        """The owners after that broker gets these partitions."""
        owners = dict(self.by_partition)
        for number in numbers:
            before = owners.get(number)
            owners[number] = Owner(broker, 1 if before is None else before.epoch + 1, url)
        return Owners(owners, self.version)


class Deposed(errors.LedgerFenced):
    """Another broker has the partition."""


class Ownership:
    """Takes and gives partitions for one broker. `url`: where clients reach this broker. Methods
    raise errors.Unavailable. Methods that look at other brokers also raise UrlTaken, after which
    this broker has to end."""

    def __init__(
        self,
        store: MetadataStore,
        broker_id: str,
        url: str,
        answers: Callable[[str], Awaitable[bool]] | None = None,
    ) -> None:
        """`answers`: whether a broker lives at a URL."""
        self.broker_id = broker_id
        self.url = url
        self.membership = Membership(store, broker_id, url, answers)
        self._store = store
        self._records = SharedReads(self._read)

    async def take_over(self) -> dict[str, Owners]:
        """Take the partitions of dead brokers that fall on this broker; returns the topics of these
        partitions, each with its new owners. One read gets the records of all topics."""
        with unavailable_while("listing topics that brokers have"):
            await self._store.sync(paths.BROKERS_TOPICS)
            topics = await self._store.children(paths.BROKERS_TOPICS)
            nodes = await self._store.get_many([paths.brokers_of_topic(id_) for id_ in topics])
        alive = await self.membership.others_alive()
        self.membership.has_buried = False  # if the rest fails, lookups take the partitions
        taken = {}
        for topic_id, node in zip(topics, nodes, strict=True):
            try:
                if await self._take_vacant(topic_id, node, alive):
                    taken[topic_id] = await self.owners(topic_id)
            except (errors.Unavailable, UrlTaken):
                raise
            except Exception:  # of this topic alone
                _log.exception("topic %s cannot be taken over", topic_id)
        return taken

    async def _take_vacant(
        self, topic_id: str, node: Versioned | None, alive: Mapping[str, str]
    ) -> bool:
        """Take the topic's partitions that need an owner; returns whether this broker took any.
        `node`: the topic's record as it was read last."""
        now = Owners() if node is None else _decoded(node.value, node.version)
        for _ in range(TRIES_MAX):
            vacant = self._vacant(topic_id, now, sorted(now.by_partition), alive)
            if not vacant:
                return False
            if await self._take(topic_id, now, vacant):
                return True
            now = await self.owners(topic_id, fresh=True)
            alive = await self.membership.others_alive()
        return False

    async def owners(
        self, topic_id: str, *, fresh: bool = False, watch: Watcher | None = None
    ) -> Owners:
        """The owners by the topic's record. `fresh`: the record is read after a sync of the store.
        `watch` is set on the record before the read."""
        path = paths.brokers_of_topic(topic_id)
        with unavailable_while(f"reading which brokers have topic {topic_id}"):
            if fresh:
                await self._store.sync(path)
            node = await (read(self._store, path, watch) if watch else self._records(path))
        return Owners() if node is None else _decoded(node.value, node.version)

    async def _read(self, path: str) -> Versioned | None:
        return await read(self._store, path)

    async def check(self, topic_id: str, partition: int, epoch: int) -> Check:
        """A check that holds as long as the record does not change. Raises Deposed unless this
        broker has the partition in that epoch."""
        owners = await self.owners(topic_id, fresh=True)
        owner = owners.of(partition)
        if owner is None or (owner.broker, owner.epoch) != (self.broker_id, epoch):
            raise Deposed(
                f"broker {owner.broker if owner else 'none'} has partition {partition} of topic"
                f" {topic_id} now"
            )
        return Check(paths.brokers_of_topic(topic_id), owners.version)

    async def give(self, topic_id: str, partitions_max: int) -> int:
        """Give partitions that fall on other brokers to those brokers, `partitions_max` at most;
        returns how many are given. This broker then notices that other brokers own them."""
        now = await self.owners(topic_id, fresh=True)
        others = await self.membership.others_alive()
        mine = now.epochs_of(self.broker_id)
        targets = {number: self.falls_on(topic_id, number, others) for number in mine}
        moves = {number: to for number, to in targets.items() if to != self.broker_id}
        moves = dict(list(moves.items())[:partitions_max])
        after = now
        for to in sorted(set(moves.values())):
            numbers = [number for number, broker in moves.items() if broker == to]
            after = after.with_owner(to, others[to], numbers)
        if moves and not await self._put(topic_id, after):
            return 0
        return len(moves)

    async def pass_on(self, topic_id: str, partition: int) -> bool:
        """Give a partition that this broker cannot open to the next broker by id. So each broker
        gets the partition in turn: a broker of a later version may be able to open it. False: there
        is no other broker, or the record has changed."""
        now = await self.owners(topic_id, fresh=True)
        owner, others = now.of(partition), await self.membership.others_alive()
        if owner is None or owner.broker != self.broker_id or not others:
            return False
        to = min(others, key=lambda broker: (broker < self.broker_id, broker))
        return await self._put(topic_id, now.with_owner(to, others[to], [partition]))

    async def choose(
        self,
        topic_id: str,
        partition: int = 0,
        partitions: int = 1,
        *,
        here: bool,
        first_here: bool = False,
    ) -> Owner:
        """The owner to which clients of the partition are sent. A partition without a living owner
        gets an owner: this broker if `here` (another broker has chosen this broker), or if
        `first_here` and the partition has never had an owner, else the living broker on which the
        partition falls. A broker that takes a partition also takes the topic's other partitions
        that fall on this broker and have no living owner."""
        tries = Tries()
        while True:
            now = await self.owners(topic_id, fresh=True)
            owner = now.of(partition)
            if owner is not None and owner.broker == self.broker_id:
                return owner
            alive = await self.membership.others_alive()
            if owner is not None and owner.broker in alive:
                if await self.membership.lives(owner.broker, owner.url):
                    return owner
                del alive[owner.broker]
                await self.membership.bury(owner.broker)
                self.membership.has_buried = True
            is_here = here or (first_here and owner is None)
            chosen = self.broker_id if is_here else self.falls_on(topic_id, partition, alive)
            if chosen != self.broker_id:
                return Owner(chosen, 0 if owner is None else owner.epoch, alive[chosen])
            vacant = self._vacant(topic_id, now, range(partitions), alive)
            await self._take(topic_id, now, [partition, *vacant])
            await tries.retry_or_raise(f"brokers took topic {topic_id} from each other again")

    async def broker_for(self, name: str, partition: int = 0) -> tuple[str, str]:
        """The id and the URL of the living broker on which a name's partition falls."""
        others = await self.membership.others_alive()
        chosen = self.falls_on(name, partition, others)
        return chosen, others.get(chosen, self.url)

    def falls_on(self, topic_id: str, partition: int, others: Iterable[str]) -> str:
        """The id of the broker on which the partition falls, among this one and the others."""
        return _choose_broker(f"{topic_id}/{partition}", [*others, self.broker_id])

    def _vacant(
        self, topic_id: str, now: Owners, numbers: Iterable[int], others: Mapping[str, str]
    ) -> list[int]:
        """The partitions among `numbers` that have no living owner and fall on this broker."""
        live_brokers = {*others, self.broker_id}
        return [
            number
            for number in numbers
            if ((owner := now.of(number)) is None or owner.broker not in live_brokers)
            and self.falls_on(topic_id, number, others) == self.broker_id
        ]

    async def _take(self, topic_id: str, now: Owners, numbers: list[int]) -> bool:
        """Try to take these partitions, without a retry. False: the record has changed, or the
        outcome is unknown."""
        after = now.with_owner(self.broker_id, self.url, dict.fromkeys(numbers))
        return await self._put(topic_id, after)

    async def _put(self, topic_id: str, owners: Owners) -> bool:
        """Write the record, if it still has the version of `owners`; returns whether the record was
        written."""
        path, value = paths.brokers_of_topic(topic_id), _encoded(owners)
        with (
            unavailable_while(f"writing which brokers have topic {topic_id}"),
            suppress(NodeExists, BadVersion, NoNode, OutcomeUnknown),
        ):
            if owners.version == NO_RECORD:
                await self._store.create(path, value, parents=True)
            else:
                await self._store.set(path, value, owners.version)
            return True
        return False


def _choose_broker(partition: str, brokers: list[str]) -> str:
    """The broker on which a partition falls: every process chooses the same broker. Partitions
    spread over brokers, and few partitions move when a broker comes or goes."""

    def weight(broker: str) -> bytes:
        return hashlib.blake2b(f"{partition}/{broker}".encode(), digest_size=8).digest()

    return max(sorted(dict.fromkeys(brokers)), key=weight)


def _encoded(owners: Owners) -> bytes:
    brokers: dict[str, dict[str, Any]] = {}
    for number, owner in sorted(owners.by_partition.items()):
        item = brokers.setdefault(owner.broker, {"url": owner.url, "partitions": []})
        item["partitions"].append([number, owner.epoch])
    return json.dumps({"brokers": brokers}, separators=(",", ":")).encode()


@lru_cache(maxsize=RECORDS_KEPT)
def _decoded(value: bytes, version: int) -> Owners:
    """Cached: each lookup reads the record, which changes seldom and may have thousands of
    partitions. A record without "brokers" is from a version in which one broker owned a whole
    topic: it names no owner, as no broker of that version lives any more."""
    try:
        by_partition = {
            int(number): Owner(broker, int(epoch), str(item["url"]))
            for broker, item in json.loads(value).get("brokers", {}).items()
            for number, epoch in item["partitions"]
        }
    except errors.MALFORMED as why:
        raise errors.UnsupportedFormat(
            f"which brokers have a topic is unreadable: {why!r}"
        ) from why
    return Owners(by_partition, version)
