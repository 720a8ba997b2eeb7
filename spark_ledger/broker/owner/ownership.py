"""Which broker has which topic: a record for each topic, one ephemeral for each broker.

    /brokers/alive/<id>          ephemeral: where the broker is reached
    /brokers/topics/<topic id>   {"broker": id, "epoch": n, "url": ...}, stays when the broker goes

Always true: the record only says whom clients are sent to, and it changes by compare-and-set with
the epoch raised; that an owner's successor may write is decided by the fence of the live ledger
alone (hazard 45: one ephemeral a process, however many topics). A broker that finds another in the
record gives the topic up.
"""

import asyncio
import hashlib
import json
from collections.abc import Awaitable, Callable
from contextlib import suppress
from dataclasses import asdict, dataclass

from spark_ledger import errors
from spark_ledger.metadata import paths
from spark_ledger.metadata.store import (
    BadVersion,
    MetadataStore,
    NodeExists,
    NoNode,
    OutcomeUnknown,
    SessionState,
)
from spark_ledger.metadata.store_calls import TRIES_MAX, ensure, reachable, read

PROBE_S = 1.0


@dataclass(frozen=True, slots=True)
class Owner:
    """Of a topic. `version` is that of its record."""

    broker: str
    epoch: int
    url: str
    version: int = -1


class Deposed(errors.LedgerFenced):
    """Another broker has the topic."""


class Ownership:
    """Of one broker, whose clients reach it at `url`. Methods raise errors.Unavailable."""

    def __init__(
        self,
        store: MetadataStore,
        broker_id: str,
        url: str,
        answers: Callable[[str], Awaitable[bool]] | None = None,
    ) -> None:
        """`answers`: whether something listens at a URL."""
        self.broker_id = broker_id
        self.url = url
        self._store = store
        self._answers = answers or _answers
        self._session_lost = False
        store.add_session_listener(self._session_changed)

    async def register(self) -> None:
        """Say that this broker lives; again after the session was lost."""
        with reachable("registering a broker"):
            await ensure(self._store, paths.BROKERS_ALIVE)
            await ensure(self._store, paths.BROKERS_TOPICS)
            value = json.dumps({"url": self.url}).encode()
            with suppress(NodeExists, OutcomeUnknown):
                await self._store.create(self._path, value, ephemeral=True)
        self._session_lost = False

    async def keep(self) -> None:
        """Register again if the session that did is over."""
        if self._session_lost and self._store.session_state is SessionState.CONNECTED:
            await self.register()

    async def leave(self) -> None:
        with suppress(NoNode, OutcomeUnknown):
            await self._store.delete(self._path)

    async def brokers(self) -> dict[str, str]:
        """The URL of each broker that is alive, by id."""
        with reachable("listing brokers"):
            found = {}
            for broker_id in await self._store.children(paths.BROKERS_ALIVE):
                node = await read(self._store, paths.broker(broker_id))
                if node is not None:
                    found[broker_id] = str(json.loads(node.value)["url"])
            return found

    async def owner(self, topic_id: str, *, fresh: bool = False) -> Owner | None:
        path = paths.broker_of_topic(topic_id)
        with reachable(f"reading who owns topic {topic_id}"):
            if fresh:
                await self._store.sync(path)
            node = await read(self._store, path)
        return None if node is None else _decoded(node.value, node.version)

    async def check(self, topic_id: str, epoch: int) -> None:
        """Raises Deposed unless this broker has the topic in that epoch."""
        now = await self.owner(topic_id, fresh=True)
        if now is None or (now.broker, now.epoch) != (self.broker_id, epoch):
            raise Deposed(f"broker {now.broker if now else 'none'} has topic {topic_id} now")

    async def choose(self, topic_id: str, *, here: bool) -> Owner:
        """The owner to which clients of the topic are sent. A topic without a living owner gets
        one: this broker if `here` (another broker has chosen it), else the one of those alive on
        which the topic's id falls."""
        path = paths.broker_of_topic(topic_id)
        for _ in range(TRIES_MAX):
            now = await self.owner(topic_id, fresh=True)
            if now is not None and now.broker == self.broker_id:
                return now
            alive = await self.brokers()
            for broker, url in list(alive.items()):
                if url == self.url:  # one that was killed: its session lives on for a while
                    del alive[broker]
            if now is not None and now.broker in alive and await self._answers(now.url):
                return now
            if now is not None:
                alive.pop(now.broker, None)
            wanted = self.broker_id if here else _chosen(topic_id, [*alive, self.broker_id])
            if wanted != self.broker_id:
                return Owner(wanted, 0 if now is None else now.epoch, alive[wanted])
            mine = Owner(self.broker_id, 1 if now is None else now.epoch + 1, self.url)
            with (
                reachable(f"taking topic {topic_id}"),
                suppress(NodeExists, BadVersion, NoNode, OutcomeUnknown),
            ):
                if now is None:
                    await self._store.create(path, _encoded(mine), parents=True)
                else:
                    await self._store.set(path, _encoded(mine), now.version)
        raise errors.CommitContended(f"brokers took topic {topic_id} from each other again")

    @property
    def _path(self) -> str:
        return paths.broker(self.broker_id)

    def _session_changed(self, state: SessionState) -> None:
        if state is SessionState.LOST:
            self._session_lost = True


def _chosen(topic_id: str, brokers: list[str]) -> str:
    """The same one for all who ask: topics spread over brokers, and stay where they are when
    another broker comes or goes."""

    def weight(broker: str) -> bytes:
        return hashlib.blake2b(f"{topic_id}/{broker}".encode(), digest_size=8).digest()

    return max(sorted(dict.fromkeys(brokers)), key=weight)


async def _answers(url: str) -> bool:
    """Whether something listens there: a killed broker's port refuses long before its session
    ends. One that merely is slow is not taken for dead."""
    host, _, port = url.rpartition("://")[2].rpartition(":")
    try:
        async with asyncio.timeout(PROBE_S):
            _, writer = await asyncio.open_connection(host, int(port))
    except TimeoutError:
        return True
    except OSError:
        return False
    writer.close()
    return True


def _encoded(owner: Owner) -> bytes:
    plain = asdict(owner)
    del plain["version"]
    return json.dumps(plain).encode()


def _decoded(value: bytes, version: int) -> Owner:
    plain = json.loads(value)
    return Owner(str(plain["broker"]), int(plain["epoch"]), str(plain["url"]), version)
