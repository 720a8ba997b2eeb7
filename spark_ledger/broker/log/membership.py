"""Which brokers there are: the registration of this broker, and whether the others live.

    /brokers/alive/<id>          ephemeral: {"url": the address for clients, "incomplete": the
                                 number of chunked messages that the broker's producers left
                                 incomplete, "since_ms": the broker's start, by the store's clock,
                                 "admin_url": the address for HTTP, "ack_ledgers": whether the
                                 broker reads ack ledgers}

Always true: a node that cannot be decoded counts as no broker, and the other nodes are still read.
If two living brokers advertise one URL, the later one ends: no client could choose between them,
and neither could probe the other. probes.py finds out whether another broker lives.
"""

import asyncio
import json
import logging
from collections.abc import Awaitable, Callable
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import lru_cache

from spark_ledger import errors
from spark_ledger.broker.log.probes import Burials, Probes, neighbours
from spark_ledger.metadata import paths
from spark_ledger.metadata.store import (
    BadVersion,
    MetadataStore,
    NodeExists,
    NoNode,
    OutcomeUnknown,
    SessionState,
    Versioned,
)
from spark_ledger.metadata.store_calls import ensure, unavailable_while
from spark_ledger.metrics import Counter

NODES_KEPT = 16

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Registered:
    """The registration of a broker. `session`: the session of its ephemeral node; `created_ms`: the
    time at which the node was made."""

    url: str
    incomplete: int = 0
    since_ms: int = 0
    session: int = 0
    created_ms: int = 0
    admin_url: str = ""
    """Empty: the broker's version registers no address for HTTP."""
    reads_acks: bool = True
    """False: the broker's version has no ack ledgers, and reads positions from shares alone."""

    def encoded(self) -> bytes:
        fields = {
            "url": self.url,
            "incomplete": self.incomplete,
            "since_ms": self.since_ms,
            "admin_url": self.admin_url,
            "ack_ledgers": self.reads_acks,
        }
        return json.dumps(fields).encode()


async def brokers_alive(
    store: MetadataStore, unreadable: dict[str, errors.LedgerError] | None = None
) -> dict[str, Registered]:
    """The brokers that are registered, by id. A node that cannot be decoded is left out, and put
    into `unreadable`. Raises errors.Unavailable."""
    with unavailable_while("listing brokers"):
        try:
            ids = await store.children(paths.BROKERS_ALIVE)
        except NoNode:
            return {}
        nodes = await store.get_many([paths.broker(broker_id) for broker_id in ids])
    brokers = {
        broker_id: _decode(broker_id, node)
        for broker_id, node in zip(ids, nodes, strict=True)
        if node is not None
    }
    if unreadable is not None:
        damage = errors.UnsupportedFormat("its node cannot be decoded")
        unreadable |= {id_: damage for id_, broker in brokers.items() if broker is None}
    return {broker_id: broker for broker_id, broker in brokers.items() if broker is not None}


def _decode(broker_id: str, node: Versioned) -> Registered | None:
    try:
        fields = json.loads(node.value)
        url, incomplete = fields["url"], int(fields.get("incomplete", 0))
        if not isinstance(url, str):
            raise ValueError(f"a URL of {url!r}")
        since_ms = int(fields.get("since_ms", 0))
        admin_url, reads_acks = str(fields.get("admin_url", "")), bool(fields.get("ack_ledgers"))
        return Registered(
            url, incomplete, since_ms, node.owner, node.created_ms, admin_url, reads_acks
        )
    except errors.MALFORMED as error:
        _log_malformed(broker_id, node.value[:100], repr(error))
        return None


@lru_cache(maxsize=NODES_KEPT)
def _log_malformed(broker_id: str, value: bytes, error: str) -> None:
    """Logs a malformed node once, not each time that the node is read."""
    _log.warning("the node of broker %s cannot be decoded: %s (%r)", broker_id, error, value)


class UrlTaken(errors.BadConfig):
    """Another broker serves at this broker's URL, and was started earlier."""

    def __init__(self, url: str, broker_id: str) -> None:
        super().__init__(
            f"broker {broker_id} serves at {url} already",
            "Give each broker an address of its own: --advertised-host, --broker-port.",
        )


class Membership:
    """The registration of one broker, and its view of the others. `url`: where clients reach this
    broker. Methods raise errors.Unavailable. Methods that look at other brokers also raise
    UrlTaken, after which this broker has to end."""

    def __init__(
        self,
        store: MetadataStore,
        broker_id: str,
        url: str,
        answers: Callable[[str], Awaitable[bool]] | None = None,
    ) -> None:
        """`answers`: whether a broker lives at a URL."""
        self._broker_id = broker_id
        self._url = url
        self.incomplete = Counter(
            "incomplete_messages", "chunked messages that producers left incomplete"
        )
        """`keep` writes the counter's value into this broker's node."""
        self.since_ms = 0
        """The time of this broker's start, by the store's clock."""
        self.admin_url = ""
        """This broker's address for HTTP."""
        self.has_buried = False
        """Whether a broker was buried (its registration removed) since the last `take_over`."""
        self.has_older = False
        """Whether the last list of brokers had another broker that does not read ack ledgers."""
        self.stirred = asyncio.Event()
        """Set when `keep` has to be called at once."""
        self._store = store
        self._answers = answers or Probes().answers
        self._burials = Burials()
        self._earlier_here: dict[str, Registered] | None = None
        """The brokers with this URL that were registered before this broker; None until this broker
        registers."""
        self._is_url_free = False
        self._session_lost = False
        store.add_session_listener(self._session_changed)

    async def check_url(self) -> None:
        """Call this before the broker listens. Raises UrlTaken if another broker answers at this
        broker's URL."""
        for broker_id in await self._of_this_url():
            if await self._answers(self._url):
                raise UrlTaken(self._url, broker_id)
        self._is_url_free = True

    async def register(self) -> None:
        """Register this broker, for the first time or again. At the first time, another broker that
        is registered with this URL counts as killed, unless it answers. Raises UrlTaken."""
        if not self._is_url_free:
            await self.check_url()
        with unavailable_while("registering a broker"):
            await ensure(self._store, paths.BROKERS_ALIVE)
            await ensure(self._store, paths.BROKERS_TOPICS)
            with suppress(NodeExists, OutcomeUnknown):
                await self._store.create(self._path, self._encoded, ephemeral=True)
        self._session_lost = False
        self.stirred.set()
        if self._earlier_here is None:
            self._earlier_here = await self._of_this_url()
            for broker_id in self._earlier_here:
                await self.bury(broker_id)

    async def _of_this_url(self) -> dict[str, Registered]:
        """The other brokers that are registered with this broker's URL."""
        registered = await brokers_alive(self._store)
        return {
            broker_id: broker
            for broker_id, broker in registered.items()
            if broker.url == self._url and broker_id != self._broker_id
        }

    async def keep(self) -> bool:
        """Register again if the session of the registration is over, or another broker took this
        broker for dead; returns whether this broker registered again. If the registration is still
        there, write a changed count of incomplete messages into its node."""
        if self._store.session_state is not SessionState.CONNECTED:
            return False
        with unavailable_while("looking whether this broker is registered"), suppress(NoNode):
            node = await self._store.get(self._path, self.stirred.set)
            if not self._session_lost:
                await self._renew(node)
                return False
        await self.register()
        return True

    async def _renew(self, node: Versioned) -> None:
        if node.value != self._encoded:
            with suppress(NoNode, BadVersion, OutcomeUnknown):
                await self._store.set(self._path, self._encoded, node.version)

    async def leave(self) -> None:
        with suppress(NoNode, OutcomeUnknown):
            await self._store.delete(self._path)

    async def brokers(self) -> dict[str, str]:
        """The URL of each broker that is alive, by id."""
        registered = await brokers_alive(self._store)
        return {broker_id: broker.url for broker_id, broker in registered.items()}

    async def bury(self, broker_id: str) -> None:
        """Remove the node of a dead broker, even if its session still lives, so that all brokers
        take it for dead. If the broker is alive, it registers again."""
        _log.warning("broker %s does not answer: others take its partitions over", broker_id)
        with unavailable_while("removing a dead broker"), suppress(NoNode, OutcomeUnknown):
            await self._store.delete(paths.broker(broker_id))
        self._burials.buried(broker_id, asyncio.get_running_loop().time())

    async def probe(self) -> frozenset[str]:
        """Probe some of the other brokers, and bury those that do not live; returns the brokers
        that are alive."""
        others = await self.others_alive()
        asked = neighbours(self._broker_id, others)
        answers = await asyncio.gather(
            *(self.lives(broker_id, others[broker_id]) for broker_id in asked)
        )
        for broker_id, lives in zip(asked, answers, strict=True):
            if not lives:
                await self.bury(broker_id)
                self.has_buried = True
                del others[broker_id]
        return frozenset(others)

    async def others_alive(self) -> dict[str, str]:
        """The URLs of the other brokers by id. Killed brokers that had this broker's URL are left
        out, although their sessions live on for a while. Raises UrlTaken."""
        registered = await brokers_alive(self._store)
        now_s = asyncio.get_running_loop().time()
        sessions = {broker_id: broker.session for broker_id, broker in registered.items()}
        self._burials.registered(sessions, now_s)
        earlier_here = self._earlier_here or {}
        self.has_older = not all(
            broker.reads_acks for id_, broker in registered.items() if id_ != self._broker_id
        )
        others = {}
        for broker_id, broker in registered.items():
            if broker.url != self._url:
                others[broker_id] = broker.url
            elif earlier_here.get(broker_id) == broker:  # the deletion of its node failed
                await self.bury(broker_id)
            elif broker_id in earlier_here or self._is_later_than(broker_id, broker):
                raise UrlTaken(self._url, broker_id)
        return others

    def _is_later_than(self, broker_id: str, other: Registered) -> bool:
        """Whether this broker was started after the other one, which has the same URL."""
        mine = self.since_ms, self._broker_id
        return broker_id != self._broker_id and (other.since_ms, broker_id) < mine

    async def lives(self, broker_id: str, url: str) -> bool:
        """Whether the other broker answers a probe, or is spared."""
        loop = asyncio.get_running_loop()
        if self._burials.spares(broker_id, loop.time()):
            return True
        if not await self._answers(url):
            return False
        self._burials.answered(broker_id, loop.time())
        return True

    @property
    def _encoded(self) -> bytes:
        registered = Registered(self._url, self.incomplete.value, self.since_ms)
        return replace(registered, admin_url=self.admin_url).encoded()

    @property
    def _path(self) -> str:
        return paths.broker(self._broker_id)

    def _session_changed(self, state: SessionState) -> None:
        if state is SessionState.LOST:
            self._session_lost = True
