"""Commits past live segments: asking their owners to hand them over, the responses, the frames.

    committer                                     owner (a broker, on its own port)
      MAGIC, size, live segments        ------->    stops its adds, settles
                                        <-------    size, seals of them, opens of the next ones
      commits ...                                   holds
      closes the connection             ------->    reads the log and goes on

Always true: a response is a proposal; the guards of the log decide whether it is committed, so a
response that comes late changes nothing. An owner holds while the connection is open, and no longer
than the request asks for, HOLDS_S_MAX at most. Both frames have a version and a largest size; a
side that does not understand a frame closes the connection, and the committer fences the ledger.
"""

import asyncio
import json
import logging
import struct
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Sequence
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from dataclasses import dataclass, replace
from typing import Any, NamedTuple, TypeVar

from spark_ledger import errors, net
from spark_ledger.async_tasks import BackgroundTasks
from spark_ledger.ledger.client import LedgerStore
from spark_ledger.metadata import paths
from spark_ledger.metadata.store import StoreError
from spark_ledger.metadata.store_calls import Tries, call_each, reachable, read
from spark_ledger.topic.commit.commit import Committer
from spark_ledger.topic.commit.draft import CommitOutcome, CommitRequest
from spark_ledger.topic.commit.seal import sealed
from spark_ledger.topic.log import actions
from spark_ledger.topic.log.actions import Action, Append, OpenLive, Overwrite, SealLive
from spark_ledger.topic.log.segments import LiveSegment
from spark_ledger.topic.log.state import TopicState

T = TypeVar("T")

MAGIC = b"SLHO"
"""The begin of the first frame. A frame of Pulsar that began like it would be longer than Pulsar's
frames may be."""
VERSION = 2
"""In version 1 the owner closed its ledger and went on in another ledger."""
HOLD_S, HOLD_S_MAX = 2.0, 8.0
"""How long an owner is asked to hold after its response: by the first try, and by later ones."""
HOLDS_S_MAX = 20.0
ANSWER_S_EACH = 0.01
ANSWERS_WITHIN = 0.8
"""The part of the committer's patience that the owner may use: the rest is for the network."""
REQUEST_BYTES_MAX = 1 << 20  # decoded in one step of the broker's loop
ANSWER_BYTES_MAX = 16 << 20
_SIZE = struct.Struct(">I")
_BROKER = "broker "

LetGo = Callable[[], None]
Ask = Callable[[str, bytes], Awaitable[tuple[bytes, LetGo]]]
"""Takes a broker's URL and a request; returns its response, and a function that ends the hold.
Raises OSError, EOFError, TimeoutError, NotUnderstood."""


class LiveName(NamedTuple):
    """Names a live segment: `opened` is the commit that opened it in its ledger."""

    topic_id: str
    partition: int
    ledger_id: int
    opened: int


class NotUnderstood(Exception):
    """Not a frame of this kind and version, or a frame that is too large."""


@dataclass(frozen=True, slots=True)
class Handed:
    """The action that seals a live segment, and the action that opens the next live segment of its
    owner in the same ledger (None: the owner does not go on now)."""

    topic_id: str
    seal: SealLive
    opened: OpenLive | None = None


def patience_s(hold_s: float, lives: int) -> float:
    """How long a committer waits for a response about so many live segments before it fences them:
    half a second for one segment in the first try. Later tries wait longer, so that slow owners and
    owners of many segments can respond in time."""
    return hold_s / 4 + ANSWER_S_EACH * lives


def answer_within_s(asked_s: float, lives: int) -> float:
    """The time after which an owner responds with the segments that it has settled, before the
    committer's patience ends: one slow segment must not cause all others to be fenced. `asked_s`:
    how long the owner is asked to hold in all."""
    settling_s = ANSWER_S_EACH * lives
    return ANSWERS_WITHIN * (max(0.0, asked_s - settling_s) / 5 + settling_s)


def owner_name(broker_id: str) -> str:
    """The owner that the log has for a segment that this broker opened."""
    return f"{_BROKER}{broker_id}"


def broker_of(owner: str) -> str | None:
    """The broker id in an owner's name; None if the owner is not a broker."""
    return owner.removeprefix(_BROKER) if owner.startswith(_BROKER) else None


# -- frames ----------------------------------------------------------------------------------------


def encode_request(lives: Sequence[LiveName], hold_s: float) -> bytes:
    body = _json({"version": VERSION, "hold_ms": round(hold_s * 1000), "live": lives})
    return MAGIC + _SIZE.pack(len(body)) + body


def decode_request(received: bytes) -> tuple[list[LiveName], float] | None:
    """The live segments, and how long to hold them; None while the frame is not whole. Raises
    NotUnderstood."""
    head = len(MAGIC) + _SIZE.size
    if not (received.startswith(MAGIC) or MAGIC.startswith(received)):
        raise NotUnderstood("no request to hand over")
    if len(received) < head:
        return None
    (size,) = _SIZE.unpack_from(received, len(MAGIC))
    if size > REQUEST_BYTES_MAX or len(received) > head + size:
        raise NotUnderstood(f"a request of {size} bytes, at most {REQUEST_BYTES_MAX} are taken")
    if len(received) < head + size:
        return None
    return _understood(received[head:], _request)


def encode_answer(segments: Sequence[Handed]) -> bytes:
    body = _json({"version": VERSION, "handed": [_to_json(handed) for handed in segments]})
    return _SIZE.pack(len(body)) + body


def decode_answer(body: bytes) -> list[Handed]:
    """`body` is the part of a response after its size. Raises NotUnderstood."""
    return _understood(body, lambda plain: [_from_json(handed) for handed in plain["handed"]])


def _json(plain: dict[str, Any]) -> bytes:
    return json.dumps(plain, separators=(",", ":")).encode()


def _understood(body: bytes, build: Callable[[dict[str, Any]], T]) -> T:
    try:
        plain = json.loads(body)
        if plain["version"] != VERSION:
            raise NotUnderstood(f"version {plain['version']}, this is version {VERSION}")
        return build(plain)
    except (*errors.MALFORMED, errors.UnsupportedFormat) as error:
        raise NotUnderstood(f"a malformed frame: {error!r}") from error


def _request(plain: dict[str, Any]) -> tuple[list[LiveName], float]:
    lives = [
        LiveName(str(topic), int(partition), int(ledger), int(opened))
        for topic, partition, ledger, opened in plain["live"]
    ]
    return lives, min(HOLDS_S_MAX, max(0.0, plain["hold_ms"] / 1000))


def _to_json(handed: Handed) -> dict[str, Any]:
    plain: dict[str, Any] = {"topic": handed.topic_id, "seal": actions.to_json(handed.seal)}
    if handed.opened is not None:
        plain["open"] = actions.to_json(handed.opened)
    return plain


def _from_json(plain: dict[str, Any]) -> Handed:
    seal = actions.from_json(plain["seal"])
    opened = actions.from_json(plain["open"]) if "open" in plain else None
    if not isinstance(seal, SealLive) or not isinstance(opened, OpenLive | None):
        raise ValueError("other actions than a seal and an open")
    if opened is not None and (opened.partition, opened.ledger_id) != (
        seal.partition,
        seal.ledger_id,
    ):
        raise ValueError(f"a seal of ledger {seal.ledger_id}, an open of {opened.ledger_id}")
    return Handed(str(plain["topic"]), seal, opened)


# -- asking ----------------------------------------------------------------------------------------


async def ask_over_tcp(url: str, request: bytes) -> tuple[bytes, LetGo]:
    """As Ask."""
    reader, writer = await net.dial_streams(url)
    try:
        writer.write(request)
        (size,) = _SIZE.unpack(await reader.readexactly(_SIZE.size))
        if size > ANSWER_BYTES_MAX:
            raise NotUnderstood(f"an answer of {size} bytes, at most {ANSWER_BYTES_MAX} are taken")
        return await reader.readexactly(size), writer.close
    except BaseException:
        writer.close()
        raise


# -- commits past live segments --------------------------------------------------------------------
#
# A commit that brings rows to a partition ends its live segment first, in the same multi (hazard
# 29).
#
#     ask each owner -> fence the other ledgers -> seals + rows + opens, one multi -> let go
#
# Always true: an owner that hands a segment over has stopped, so nothing is added to it after its
# seal was made. The owner holds until the multi is decided or its hold is over; then it seals and
# opens by itself, the live segment becomes another one, and the guards let one of the two win. Each
# try asks for a longer hold and waits longer for the response, so that slow owners can respond in
# time. A segment that was handed over in an earlier try stays held, so that each try has fewer
# owners to wait for. A ledger in which an owner goes on is in the log all the time, so it needs no
# open intent (hazard 4). The ledger of an owner that does not respond is fenced.

TRIES_MAX = 20
"""Of one commit past live segments."""
URLS_KEPT_MAX = 1000
FOLD_AFTER_S = 0.1

_log = logging.getLogger(__name__)


class EndingSegment(NamedTuple):
    """A live segment that is to end."""

    topic_id: str
    live: LiveSegment

    @property
    def name(self) -> LiveName:
        live = self.live
        return LiveName(self.topic_id, live.partition, live.ledger_id, live.opened)


@dataclass(frozen=True, slots=True)
class Ended:
    """Live segments that ended: their owners handed them over, or their ledgers were fenced."""

    handed: tuple[Handed, ...] = ()

    def seals(self, topic_id: str) -> list[Action]:
        return [handed.seal for handed in self.handed if handed.topic_id == topic_id]

    def opens(self, topic_id: str) -> list[Action]:
        """The actions that open the next segments of their owners."""
        opens = (handed.opened for handed in self.handed if handed.topic_id == topic_id)
        return [opened for opened in opens if opened is not None]


class PastLive:
    """Makes the commits of one process that bring rows to partitions with live segments."""

    def __init__(self, ledgers: LedgerStore, committer: Committer, ask: Ask) -> None:
        self._ledgers = ledgers
        self._committer = committer
        self._ask = ask
        self._urls: dict[str, str] = {}
        self._folding = BackgroundTasks()

    async def commit(self, request: CommitRequest, timeout_s: float) -> CommitOutcome:
        """Makes the commit, which also ends the live segments in its way. Raises as
        Committer.commit and `ended`."""
        fresh, hold_s = False, HOLD_S
        handed: dict[LiveName, Handed] = {}
        async with AsyncExitStack() as holds:
            tries = Tries(most=TRIES_MAX)
            while True:
                endings = await self._in_the_way(request, fresh=fresh)
                new = [ending for ending in endings if ending.name not in handed]
                more = await holds.enter_async_context(self.ended(new, hold_s))
                handed |= dict(zip((ending.name for ending in new), more.handed, strict=True))
                ended = Ended(tuple(handed[ending.name] for ending in endings))
                try:
                    outcome = await self._committer.commit(_past(request, ended), timeout_s)
                except errors.TxnConflict as conflict:
                    if not conflict.facts.get("live"):
                        raise
                else:
                    for topic_id, _ in endings:
                        self._fold_later(topic_id)
                    return outcome
                await tries.retry_or_raise(
                    "the owners of live segments opened new ones before each try"
                )
                fresh, hold_s = True, min(2 * hold_s, HOLD_S_MAX)

    async def _in_the_way(self, request: CommitRequest, *, fresh: bool) -> list[EndingSegment]:
        """The live segments of partitions to which rows are to be added."""
        endings: list[EndingSegment] = []
        for topic_id, draft in request.drafts.items():
            every = any(isinstance(action, Overwrite) for action in draft)
            rows = (s for a in draft if isinstance(a, Append | Overwrite) for s in a.segments)
            partitions = {segment.partition for segment in rows}
            state = await self._state(topic_id, fresh=fresh)
            for held in state.partitions if state else ():
                if held.live and (every or held.live.partition in partitions):
                    endings.append(EndingSegment(topic_id, held.live))
        return endings

    async def _state(self, topic_id: str, *, fresh: bool) -> TopicState | None:
        """The topic's state. None if it need not be fresh and this process has seen no live
        segment: if there is one, the commit meets it."""
        views = self._committer.views
        state = views.newest_state(topic_id)
        if not fresh and not (state and any(held.live for held in state.partitions)):
            return None
        with reachable(f"reading topic {topic_id}"):
            if not fresh and state and await views.is_newest(state):
                return state
            return await views.state(topic_id, fold=True, fresh=fresh)

    def _fold_later(self, topic_id: str) -> None:
        """Folds this process's own commit once the owners go on, not while the next commit holds
        them."""
        if topic_id not in self._folding:
            self._folding.start(self._fold(topic_id), name=topic_id)

    async def _fold(self, topic_id: str) -> None:
        await asyncio.sleep(FOLD_AFTER_S)
        with suppress(errors.LedgerError, StoreError):  # the next commit meets it again
            await self._committer.views.state(topic_id, fold=True, fresh=False)

    async def close(self) -> None:
        """Stops folding."""
        await self._folding.close()

    @asynccontextmanager
    async def ended(
        self, lives: Sequence[EndingSegment], hold_s: float = HOLD_S
    ) -> AsyncIterator[Ended]:
        """Ends these live segments, in their order. Their owners hold while the context lasts,
        `hold_s` at most. Ends none if the metadata store is held, as the owners could not go on.
        Raises as seal.sealed, errors.MetadataHeld."""
        holds: list[LetGo] = []
        if lives:
            with reachable("asking whether the metadata store is held"):
                await self._committer.guard.checks()
        try:
            handed = await self._handed(lives, hold_s, holds) if lives else {}
            left = [ending for ending in lives if ending.name not in handed]

            async def fenced(ending: EndingSegment) -> Handed:
                return Handed(ending.topic_id, await sealed(self._ledgers, ending.live))

            names = [ending.name for ending in left]
            handed |= dict(zip(names, await call_each(fenced, left), strict=True))
            yield Ended(tuple(handed[ending.name] for ending in lives))
        finally:
            for let_go in holds:
                let_go()

    async def _handed(
        self, lives: Iterable[EndingSegment], hold_s: float, holds: list[LetGo]
    ) -> dict[LiveName, Handed]:
        """The segments that owners hand over; `holds` gets each hold that begins."""
        by_broker: dict[str, list[LiveName]] = {}
        for ending in lives:
            broker = broker_of(ending.live.owner)
            if broker is not None:
                by_broker.setdefault(broker, []).append(ending.name)

        async def asked(broker: str) -> list[Handed]:
            try:
                answer_s = patience_s(hold_s, len(by_broker[broker]))
                async with asyncio.timeout(answer_s):
                    return await self._asked(broker, by_broker[broker], answer_s + hold_s, holds)
            except (OSError, EOFError, TimeoutError, NotUnderstood) as error:
                _log.warning(
                    "broker %s hands nothing over, its ledgers are fenced: %r", broker, error
                )
                return []

        by_live: dict[LiveName, Handed] = {}
        for broker, response in zip(by_broker, await call_each(asked, by_broker), strict=True):
            requested = {live[:3]: live for live in by_broker[broker]}
            for handed in response:
                seal = handed.seal
                live = requested.get((handed.topic_id, seal.partition, seal.ledger_id))
                if (
                    live is not None and seal.opened >= live.opened
                ):  # its owner may have a later one
                    by_live[live] = handed
        return by_live

    async def _asked(
        self, broker: str, lives: Sequence[LiveName], hold_s: float, holds: list[LetGo]
    ) -> list[Handed]:
        url = await self._url(broker)
        if url is None:
            return []
        answer, let_go = await self._ask(url, encode_request(lives, hold_s))
        holds.append(let_go)
        return decode_answer(answer)

    async def _url(self, broker: str) -> str | None:
        """The broker's URL; None if the broker is gone. An id is that of one process, and its URL
        never changes. Raises NotUnderstood."""
        if broker not in self._urls:
            with reachable("reading a broker's node"):
                node = await read(self._ledgers.metadata, paths.broker(broker))
            if node is None:
                return None
            if len(self._urls) >= URLS_KEPT_MAX:
                self._urls.clear()
            try:
                self._urls[broker] = str(json.loads(node.value)["url"])
            except errors.MALFORMED as error:
                raise NotUnderstood(f"the node of broker {broker}: {error!r}") from error
        return self._urls[broker]


def _past(request: CommitRequest, ended: Ended) -> CommitRequest:
    if not ended.handed:
        return request
    drafts = {
        id_: (*ended.seals(id_), *draft, *ended.opens(id_)) for id_, draft in request.drafts.items()
    }
    return replace(request, drafts=drafts)
