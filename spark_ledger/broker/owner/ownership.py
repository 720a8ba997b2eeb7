"""Which broker has which partition: a record for each topic, one ephemeral for each broker.

    /brokers/alive/<id>          ephemeral: {"url": where the broker is reached, "incomplete": how
                                 many chunked messages its producers left incomplete}
    /brokers/topics/<topic id>   {"brokers": {id: {"url": ..., "partitions": [[number, epoch]]}}},
                                 stays when the brokers go

Always true: a partition has one owner in the record; that only says where clients are sent, and it
changes by compare-and-set with the partition's epoch raised. That an owner's successor may write is
decided by the fence of the live ledger (hazard 45: one ephemeral a process, however many topics),
and no owner opens one in a commit that is made after the record has changed. A broker that finds
another in the record gives the partition up, and keeps the others.

Whether another broker lives is asked by the protocol that it serves. One is taken for dead whose
port refuses, or which misses PROBES_MAX probes of PROBE_S, NEXT_S apart (who asks and stood still
itself gives the last of them its whole time): one that is stopped or hung has a port that accepts,
and a session that lives on, but its loop answers nothing. To be wrong does no harm: who writes is
decided by the fence. A broker is asked once at a time however many want to know, and not again for
FRESH_S after it has answered.
"""

import asyncio
import hashlib
import json
import logging
from collections.abc import Awaitable, Callable, Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from enum import Enum
from functools import lru_cache
from typing import Any

from spark_ledger import errors
from spark_ledger.broker.wire.commands import PROTOCOL_VERSION, command, name_of
from spark_ledger.broker.wire.frames import FrameReader, MalformedFrame, encode
from spark_ledger.metadata import paths
from spark_ledger.metadata.store import (
    BadVersion,
    Check,
    MetadataStore,
    NodeExists,
    NoNode,
    OutcomeUnknown,
    SessionState,
)
from spark_ledger.metadata.store_calls import TRIES_MAX, ensure, reachable, read

NOT_THERE = -1
RECORDS_KEPT = 16
PROBE_S = 1.0
PROBES_MAX = 2
NEXT_S = 0.5
FRESH_S = 0.4
NEIGHBOURS_MAX = 3
_READ_BYTES = 4096

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Owner:
    """Of a partition."""

    broker: str
    epoch: int
    url: str


@dataclass(frozen=True, slots=True)
class Owners:
    """Of a topic's partitions, by number. `version` is the record's."""

    by_partition: Mapping[int, Owner] = field(default_factory=dict)
    version: int = NOT_THERE

    def of(self, partition: int) -> Owner | None:
        return self.by_partition.get(partition)

    def epochs_of(self, broker: str) -> dict[int, int]:
        """The partitions of that broker, each with its epoch."""
        return {p: one.epoch for p, one in self.by_partition.items() if one.broker == broker}

    def with_taken(self, broker: str, url: str, some: Iterable[int]) -> "Owners":
        """With these partitions in that broker's hands."""
        made = dict(self.by_partition)
        for number in some:
            before = made.get(number)
            made[number] = Owner(broker, 1 if before is None else before.epoch + 1, url)
        return Owners(made, self.version)


class Deposed(errors.LedgerFenced):
    """Another broker has the partition."""


async def brokers_alive(store: MetadataStore) -> dict[str, dict[str, Any]]:
    """What each broker that is alive says of itself, by id. Raises errors.Unavailable."""
    with reachable("listing brokers"):
        try:
            ids = await store.children(paths.BROKERS_ALIVE)
        except NoNode:
            return {}
        nodes = await store.get_many([paths.broker(one) for one in ids])
        there = zip(ids, nodes, strict=True)
        return {one: json.loads(node.value) for one, node in there if node}


class Ownership:
    """Of one broker, whose clients reach it at `url`. Methods raise errors.Unavailable."""

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
        self.incomplete = 0
        """Of its producers' chunked messages; `keep` writes it."""
        self._store = store
        self._answers = answers or Probes().answers
        self._session_lost = False
        store.add_session_listener(self._session_changed)

    async def register(self) -> None:
        """Say that this broker lives; again after the session was lost. One of this URL that is
        still there was killed."""
        with reachable("registering a broker"):
            await ensure(self._store, paths.BROKERS_ALIVE)
            await ensure(self._store, paths.BROKERS_TOPICS)
            with suppress(NodeExists, OutcomeUnknown):
                await self._store.create(self._path, self._said, ephemeral=True)
        self._session_lost = False
        for broker, url in (await self.brokers()).items():
            if url == self.url and broker != self.broker_id:
                await self.bury(broker)

    async def keep(self) -> bool:
        """Register again if the session that did is over, or another broker took this one for
        dead; whether that was so. One that is registered says `incomplete` anew if it changed."""
        if self._store.session_state is not SessionState.CONNECTED:
            return False
        with reachable("looking whether this broker is registered"):
            node = None if self._session_lost else await read(self._store, self._path)
            if node is not None:
                if node.value != self._said:
                    with suppress(NoNode, BadVersion, OutcomeUnknown):
                        await self._store.set(self._path, self._said, node.version)
                return False
        await self.register()
        return True

    async def leave(self) -> None:
        with suppress(NoNode, OutcomeUnknown):
            await self._store.delete(self._path)

    async def brokers(self) -> dict[str, str]:
        """The URL of each broker that is alive, by id."""
        return {one: str(said["url"]) for one, said in (await brokers_alive(self._store)).items()}

    async def bury(self, broker_id: str) -> None:
        """It is dead: all brokers see it, whatever its session says. One that is not registers
        again."""
        _log.warning("broker %s does not answer: others take its partitions over", broker_id)
        with reachable("removing a dead broker"), suppress(NoNode, OutcomeUnknown):
            await self._store.delete(paths.broker(broker_id))

    async def probe(self) -> frozenset[str]:
        """Ask some of the others whether they live, and bury those that do not; returns the
        brokers that are alive."""
        others = await self._others_alive()
        asked = neighbours(self.broker_id, others)
        lives = await asyncio.gather(*(self._answers(others[one]) for one in asked))
        for one, alive in zip(asked, lives, strict=True):
            if not alive:
                await self.bury(one)
                del others[one]
        return frozenset(others)

    async def take_over(self) -> dict[str, Owners]:
        """Take the partitions of dead brokers that fall on this one; returns their topics, each
        with its owners from now on. One look at all records finds the topics that need more."""
        with reachable("listing topics that brokers have"):
            await self._store.sync(paths.BROKERS_TOPICS)
            topics = await self._store.children(paths.BROKERS_TOPICS)
            nodes = await self._store.get_many([paths.brokers_of_topic(id_) for id_ in topics])
        alive = await self._others_alive()
        found = {}
        for topic_id, node in zip(topics, nodes, strict=True):
            now = Owners() if node is None else _decoded(node.value, node.version)
            for _ in range(TRIES_MAX):
                vacant = self._vacant(topic_id, now, sorted(now.by_partition), alive)
                if not vacant:
                    break
                if await self._take(topic_id, now, vacant):
                    found[topic_id] = await self.owners(topic_id)
                    break
                now, alive = await self.owners(topic_id, fresh=True), await self._others_alive()
        return found

    async def owners(self, topic_id: str, *, fresh: bool = False) -> Owners:
        path = paths.brokers_of_topic(topic_id)
        with reachable(f"reading which brokers have topic {topic_id}"):
            if fresh:
                await self._store.sync(path)
            node = await read(self._store, path)
        return Owners() if node is None else _decoded(node.value, node.version)

    async def check(self, topic_id: str, partition: int, epoch: int) -> Check:
        """What holds as long as the record is this one. Raises Deposed unless this broker has the
        partition in that epoch."""
        found = await self.owners(topic_id, fresh=True)
        now, version = found.of(partition), found.version
        if now is None or (now.broker, now.epoch) != (self.broker_id, epoch):
            raise Deposed(
                f"broker {now.broker if now else 'none'} has partition {partition} of topic"
                f" {topic_id} now"
            )
        return Check(paths.brokers_of_topic(topic_id), version)

    async def give(self, topic_id: str, some_max: int) -> int:
        """Give partitions that fall on other brokers to these, so many at most; returns how many.
        This broker then finds itself deposed, as by any other."""
        now = await self.owners(topic_id, fresh=True)
        others = await self._others_alive()
        mine = now.epochs_of(self.broker_id)
        falls = {number: self._falls_on(topic_id, number, others) for number in mine}
        given = {number: to for number, to in falls.items() if to != self.broker_id}
        given = dict(list(given.items())[:some_max])
        after = now
        for to in sorted(set(given.values())):
            some = [number for number, broker in given.items() if broker == to]
            after = after.with_taken(to, others[to], some)
        if given and not await self._put(topic_id, after):
            return 0
        return len(given)

    async def pass_on(self, topic_id: str, partition: int) -> bool:
        """Give a partition that this broker cannot open to the next one in an order that all have,
        so that each has its turn: one of a later version may read what this one cannot. False:
        there is no other, or the record is another by now."""
        now = await self.owners(topic_id, fresh=True)
        owner, others = now.of(partition), await self._others_alive()
        if owner is None or owner.broker != self.broker_id or not others:
            return False
        to = min(others, key=lambda broker: (broker < self.broker_id, broker))
        return await self._put(topic_id, now.with_taken(to, others[to], [partition]))

    async def choose(
        self, topic_id: str, partition: int = 0, partitions: int = 1, *, here: bool
    ) -> Owner:
        """The owner to which clients of the partition are sent. One without a living owner gets
        one: this broker if `here` (another broker has chosen it), else the one of those alive on
        which it falls. Who takes one takes all of the topic's that fall on it and have none."""
        for _ in range(TRIES_MAX):
            now = await self.owners(topic_id, fresh=True)
            owner = now.of(partition)
            if owner is not None and owner.broker == self.broker_id:
                return owner
            alive = await self._others_alive()
            if owner is not None and owner.broker in alive and await self._answers(owner.url):
                return owner
            if owner is not None and alive.pop(owner.broker, None) is not None:
                await self.bury(owner.broker)
            wanted = self.broker_id if here else self._falls_on(topic_id, partition, alive)
            if wanted != self.broker_id:
                return Owner(wanted, 0 if owner is None else owner.epoch, alive[wanted])
            vacant = self._vacant(topic_id, now, range(partitions), alive)
            await self._take(topic_id, now, [partition, *vacant])
        raise errors.CommitContended(f"brokers took topic {topic_id} from each other again")

    async def _others_alive(self) -> dict[str, str]:
        """By id the URLs of the other brokers; not of one that was killed and whose port this one
        has: its session lives on for a while."""
        alive = await self.brokers()
        return {broker: url for broker, url in alive.items() if url != self.url}

    def _falls_on(self, topic_id: str, partition: int, others: Iterable[str]) -> str:
        return _chosen(f"{topic_id}/{partition}", [*others, self.broker_id])

    def _vacant(
        self, topic_id: str, now: Owners, some: Iterable[int], others: Mapping[str, str]
    ) -> list[int]:
        """Those of these partitions without a living owner that fall on this broker."""
        there = {*others, self.broker_id}
        return [
            number
            for number in some
            if ((one := now.of(number)) is None or one.broker not in there)
            and self._falls_on(topic_id, number, others) == self.broker_id
        ]

    async def _take(self, topic_id: str, now: Owners, some: list[int]) -> bool:
        """Try once to have these; False: the record is another by now, or it is not known."""
        mine = now.with_taken(self.broker_id, self.url, dict.fromkeys(some))
        return await self._put(topic_id, mine)

    async def _put(self, topic_id: str, owners: Owners) -> bool:
        """Whether that is the record now, in the place of the one of its version."""
        path, value = paths.brokers_of_topic(topic_id), _encoded(owners)
        with (
            reachable(f"writing which brokers have topic {topic_id}"),
            suppress(NodeExists, BadVersion, NoNode, OutcomeUnknown),
        ):
            if owners.version == NOT_THERE:
                await self._store.create(path, value, parents=True)
            else:
                await self._store.set(path, value, owners.version)
            return True
        return False

    @property
    def _said(self) -> bytes:
        return json.dumps({"url": self.url, "incomplete": self.incomplete}).encode()

    @property
    def _path(self) -> str:
        return paths.broker(self.broker_id)

    def _session_changed(self, state: SessionState) -> None:
        if state is SessionState.LOST:
            self._session_lost = True


def _chosen(what: str, brokers: list[str]) -> str:
    """The same one for all who ask: partitions spread over brokers, and stay where they are when
    another broker comes or goes."""

    def weight(broker: str) -> bytes:
        return hashlib.blake2b(f"{what}/{broker}".encode(), digest_size=8).digest()

    return max(sorted(dict.fromkeys(brokers)), key=weight)


def _encoded(owners: Owners) -> bytes:
    plain: dict[str, dict[str, Any]] = {}
    for number, owner in sorted(owners.by_partition.items()):
        there = plain.setdefault(owner.broker, {"url": owner.url, "partitions": []})
        there["partitions"].append([number, owner.epoch])
    return json.dumps({"brokers": plain}, separators=(",", ":")).encode()


@lru_cache(maxsize=RECORDS_KEPT)
def _decoded(value: bytes, version: int) -> Owners:
    """Each lookup reads the record, which changes seldom and may be of thousands of partitions. One
    without "brokers" is of a time when a broker had all of a topic; no process of then lives."""
    found = {
        int(number): Owner(broker, int(epoch), str(there["url"]))
        for broker, there in json.loads(value).get("brokers", {}).items()
        for number, epoch in there["partitions"]
    }
    return Owners(found, version)


# -- whether others live ---------------------------------------------------------------------------


class Heard(Enum):
    ANSWER = "answer"
    REFUSAL = "refusal"
    NOTHING = "nothing"


async def connects(url: str) -> Heard:
    """CONNECT, which a broker answers by CONNECTED from its loop."""
    host, _, port = url.rpartition("://")[2].rpartition(":")
    writer: asyncio.StreamWriter | None = None
    try:
        async with asyncio.timeout(PROBE_S):
            reader, writer = await asyncio.open_connection(host, int(port))
            asked = command(
                "connect",
                client_version="Spark Ledger probe",
                protocol_version=PROTOCOL_VERSION,
            )
            writer.write(encode(asked))
            frames = FrameReader()
            while data := await reader.read(_READ_BYTES):
                if any(name_of(frame.command) == "connected" for frame in frames.feed(data)):
                    return Heard.ANSWER
            return Heard.NOTHING
    except ConnectionRefusedError:
        return Heard.REFUSAL
    except (TimeoutError, OSError, MalformedFrame):
        return Heard.NOTHING
    finally:
        if writer is not None:
            writer.close()
            with suppress(OSError):
                writer.transport.abort()


class Probes:
    """Of one broker. On one event loop."""

    def __init__(self, ask: Callable[[str], Awaitable[Heard]] = connects) -> None:
        self._ask = ask
        self._answered_s: dict[str, float] = {}
        self._asking: dict[str, asyncio.Task[bool]] = {}

    async def answers(self, url: str) -> bool:
        """Whether a broker lives at that URL."""
        now_s = asyncio.get_running_loop().time()
        if now_s < self._answered_s.get(url, float("-inf")) + FRESH_S:
            return True
        task = self._asking.get(url)
        if task is None:
            task = asyncio.get_running_loop().create_task(self._probe(url))
            self._asking[url] = task
            task.add_done_callback(lambda _: self._asking.pop(url, None))
        return await asyncio.shield(task)

    async def _probe(self, url: str) -> bool:
        self._answered_s.pop(url, None)
        loop = asyncio.get_running_loop()
        asked = [loop.create_task(self._ask_later(url, n * NEXT_S)) for n in range(PROBES_MAX)]
        try:
            for one in asyncio.as_completed(asked):
                heard = await one
                if heard is Heard.ANSWER:
                    self._note_answer(url, loop.time())
                if heard is not Heard.NOTHING:
                    return heard is Heard.ANSWER
            return False
        finally:
            for task in asked:
                task.cancel()
            await asyncio.gather(*asked, return_exceptions=True)

    def _note_answer(self, url: str, now_s: float) -> None:
        """What is no longer fresh is forgotten: brokers come and go, each under its own URL."""
        fresh = {one: s for one, s in self._answered_s.items() if now_s < s + FRESH_S}
        self._answered_s = {**fresh, url: now_s}

    async def _ask_later(self, url: str, after_s: float) -> Heard:
        await asyncio.sleep(after_s)
        return await self._ask(url)


def neighbours(broker_id: str, others: Iterable[str]) -> list[str]:
    """Those that a broker probes: the next ones in the ring of ids. So each is probed by
    NEIGHBOURS_MAX others at most, however many there are, and by one at least."""
    ordered = sorted(others)
    after = [one for one in ordered if one > broker_id]
    return [*after, *(one for one in ordered if one < broker_id)][:NEIGHBOURS_MAX]
