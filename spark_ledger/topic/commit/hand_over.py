"""Commits past live segments: asking their owners to hand them over, what these answer, the frames.

    committer                                     owner (a broker, on its own port)
      MAGIC, size, which live segments  ------->    stops its adds, settles
                                        <-------    size, what seals them, where it goes on
      commits ...                                   holds
      closes the connection             ------->    reads the log and goes on

Always true: an answer is a proposal; the guards of the log decide whether it is committed, so one
that comes late changes nothing. An owner holds while the connection is open, and no longer than was
asked for, HOLDS_S_MAX at most. Both frames have a version and a largest size; who does not
understand the other closes the connection, and the ledger is fenced.
"""

import asyncio
import json
import logging
import struct
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Sequence
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from dataclasses import dataclass, replace
from typing import Any, TypeVar

from spark_ledger import errors, net
from spark_ledger.ledger.client import LedgerStore
from spark_ledger.metadata import paths
from spark_ledger.metadata.store import StoreError
from spark_ledger.metadata.store_calls import each, reachable, read
from spark_ledger.topic.commit.commit import Committer
from spark_ledger.topic.commit.draft import CommitOutcome, Wanted
from spark_ledger.topic.commit.seal import sealed
from spark_ledger.topic.log import actions
from spark_ledger.topic.log.actions import Action, Append, OpenLive, Overwrite, SealLive
from spark_ledger.topic.log.segments import LiveSegment
from spark_ledger.topic.log.state import TopicState

T = TypeVar("T")

MAGIC = b"SLHO"
"""Of the first frame. No frame of Pulsar's is so long that it begins like it."""
VERSION = 2
"""Of version 1 the owner closed its ledger and went on in another."""
HOLD_S, HOLD_S_MAX = 2.0, 8.0
"""After its answer an owner is asked to hold for so long: by a first try, and by later ones."""
HOLDS_S_MAX = 20.0
ANSWER_S_EACH = 0.01
ANSWERS_WITHIN = 0.8
"""Of the patience of who asks: the rest is for the way."""
REQUEST_BYTES_MAX = 4 << 20
ANSWER_BYTES_MAX = 16 << 20
_SIZE = struct.Struct(">I")
_BROKER = "broker "

Live = tuple[str, int, int, int]
"""A topic's id, a partition, its live ledger, and the commit that opened it there."""
LetGo = Callable[[], None]
Ask = Callable[[str, bytes], Awaitable[tuple[bytes, LetGo]]]
"""Takes a broker's URL and a request; returns its answer, and what ends the hold. Raises OSError,
EOFError, TimeoutError, NotUnderstood."""


class NotUnderstood(Exception):
    """Not a frame of this kind and version, or one that is too large."""


@dataclass(frozen=True, slots=True)
class Handed:
    """What seals a live segment that is over, and what opens the one in which its owner goes on, in
    the same ledger (None: in none now)."""

    topic_id: str
    seal: SealLive
    opened: OpenLive | None = None


def patience_s(hold_s: float, lives: int) -> float:
    """How long an answer of so many live segments is waited for, before they are fenced: half a
    second of one by a first try; owners of many, or that are slow, come through by and by."""
    return hold_s / 4 + ANSWER_S_EACH * lives


def answer_within_s(asked_s: float, lives: int) -> float:
    """By then an owner that is asked to hold for so long in all answers with what it has, before
    who asked loses patience: one segment that is slow is not to have all others fenced."""
    settling_s = ANSWER_S_EACH * lives
    return ANSWERS_WITHIN * (max(0.0, asked_s - settling_s) / 5 + settling_s)


def owner_name(broker_id: str) -> str:
    """What the log says of who opened a segment."""
    return f"{_BROKER}{broker_id}"


def broker_of(owner: str) -> str | None:
    """The broker of that name in the log; None of who is none, and cannot be asked."""
    return owner.removeprefix(_BROKER) if owner.startswith(_BROKER) else None


# -- frames ----------------------------------------------------------------------------------------


def encode_request(lives: Sequence[Live], hold_s: float) -> bytes:
    body = _json({"version": VERSION, "hold_ms": round(hold_s * 1000), "live": lives})
    return MAGIC + _SIZE.pack(len(body)) + body


def decode_request(received: bytes) -> tuple[list[Live], float] | None:
    """What is asked for, and how long to hold; None while the frame is not whole. Raises
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


def encode_answer(some: Sequence[Handed]) -> bytes:
    body = _json({"version": VERSION, "handed": [_to_json(one) for one in some]})
    return _SIZE.pack(len(body)) + body


def decode_answer(body: bytes) -> list[Handed]:
    """Of an answer what follows its size. Raises NotUnderstood."""
    return _understood(body, lambda plain: [_from_json(one) for one in plain["handed"]])


def _json(plain: dict[str, Any]) -> bytes:
    return json.dumps(plain, separators=(",", ":")).encode()


def _understood(body: bytes, build: Callable[[dict[str, Any]], T]) -> T:
    try:
        plain = json.loads(body)
        if plain["version"] != VERSION:
            raise NotUnderstood(f"version {plain['version']}, this is version {VERSION}")
        return build(plain)
    except (ValueError, TypeError, KeyError, errors.UnsupportedFormat) as error:
        raise NotUnderstood(f"a malformed frame: {error!r}") from error


def _request(plain: dict[str, Any]) -> tuple[list[Live], float]:
    lives = [
        (str(topic), int(partition), int(ledger), int(opened))
        for topic, partition, ledger, opened in plain["live"]
    ]
    return lives, min(HOLDS_S_MAX, max(0.0, plain["hold_ms"] / 1000))


def _to_json(one: Handed) -> dict[str, Any]:
    plain: dict[str, Any] = {"topic": one.topic_id, "seal": actions.to_json(one.seal)}
    if one.opened is not None:
        plain["open"] = actions.to_json(one.opened)
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
    try:
        host, port = net.split_url(url)
    except ValueError as error:
        raise OSError(f"a broker's URL: {error}") from error
    reader, writer = await asyncio.open_connection(host, port)
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
# What brings rows to a partition ends its live segment first, in the same multi (hazard 29).
#
#     ask each owner -> fence what nobody hands over -> seals + rows + opens, one multi -> let go
#
# Always true: an owner that hands over has stopped, so nothing is added to what its seal says, and
# holds until the multi is decided or its hold is over; then it seals and opens by itself, which
# makes it another segment, and the guards let one of the two win. Each try asks for a longer hold
# and waits longer for the answer, so that slow ones come through. What was handed over by an
# earlier try stays held, so that each try has fewer owners to wait for. A ledger in which an owner
# goes on is in the log all the time, so it needs no intent that is open (hazard 4). One that does
# not answer is fenced.

TRIES_MAX = 20
"""Of one commit to come past live segments."""
URLS_KEPT_MAX = 1000
FOLD_AFTER_S = 0.1

_log = logging.getLogger(__name__)
Ending = tuple[str, LiveSegment]
"""A topic's id, and a live segment of it."""


@dataclass(frozen=True, slots=True)
class Ended:
    """Live segments that are over, as their owners handed them over or as a fence left them."""

    handed: tuple[Handed, ...] = ()

    def seals(self, topic_id: str) -> list[Action]:
        return [one.seal for one in self.handed if one.topic_id == topic_id]

    def opens(self, topic_id: str) -> list[Action]:
        """What their owners go on in."""
        some = (one.opened for one in self.handed if one.topic_id == topic_id)
        return [opened for opened in some if opened is not None]


class PastLive:
    """Of one process."""

    def __init__(self, ledgers: LedgerStore, committer: Committer, ask: Ask) -> None:
        self._ledgers = ledgers
        self._committer = committer
        self._ask = ask
        self._urls: dict[str, str] = {}
        self._folding: dict[str, asyncio.Task[None]] = {}

    async def commit(self, wanted: Wanted, timeout_s: float) -> CommitOutcome:
        """The commit, with what ends the live segments that are in its way. Raises as
        Committer.commit and `ended`."""
        fresh, hold_s = False, HOLD_S
        known: dict[Live, Handed] = {}
        async with AsyncExitStack() as holds:
            for _ in range(TRIES_MAX):
                lives = await self._in_the_way(wanted, fresh=fresh)
                new = [one for one in lives if _asked(one) not in known]
                more = await holds.enter_async_context(self.ended(new, hold_s))
                known |= dict(zip(map(_asked, new), more.handed, strict=True))
                ended = Ended(tuple(known[_asked(one)] for one in lives))
                try:
                    outcome = await self._committer.commit(_past(wanted, ended), timeout_s)
                except errors.TxnConflict as conflict:
                    if not conflict.facts.get("live"):
                        raise
                else:
                    for topic_id, _ in lives:
                        self._fold_later(topic_id)
                    return outcome
                fresh, hold_s = True, min(2 * hold_s, HOLD_S_MAX)
        raise errors.CommitContended(
            f"the owners of live segments opened others {TRIES_MAX} times before the commit"
        )

    async def _in_the_way(self, wanted: Wanted, *, fresh: bool) -> list[Ending]:
        """The live segments of partitions to which rows are to be added."""
        found: list[Ending] = []
        for topic_id, some in wanted.drafts.items():
            every = any(isinstance(action, Overwrite) for action in some)
            rows = (s for a in some if isinstance(a, Append | Overwrite) for s in a.segments)
            meant = {segment.partition for segment in rows}
            state = await self._state(topic_id, fresh=fresh)
            lives = (held.live for held in state.partitions) if state else ()
            found += [(topic_id, one) for one in lives if one and (every or one.partition in meant)]
        return found

    async def _state(self, topic_id: str, *, fresh: bool) -> TopicState | None:
        """The topic; unless it is to be fresh, None where this process knows of no live segment: if
        there is one, the commit finds it."""
        views = self._committer.views
        known = views.known(topic_id)
        if not fresh and not (known and any(held.live for held in known.partitions)):
            return None
        with reachable(f"reading topic {topic_id}"):
            if not fresh and known and await views.is_newest(known):
                return known
            return await views.state(topic_id, fold=True, fresh=fresh)

    def _fold_later(self, topic_id: str) -> None:
        """An own commit is folded once owners go on, not while the next one holds them."""
        if topic_id not in self._folding:
            task = asyncio.get_running_loop().create_task(self._fold(topic_id))
            self._folding[topic_id] = task
            task.add_done_callback(lambda _: self._folding.pop(topic_id, None))

    async def _fold(self, topic_id: str) -> None:
        await asyncio.sleep(FOLD_AFTER_S)
        with suppress(errors.LedgerError, StoreError):  # the next commit meets it again
            await self._committer.views.state(topic_id, fold=True, fresh=False)

    async def close(self) -> None:
        """Fold nothing more."""
        folding = list(self._folding.values())
        for task in folding:
            task.cancel()
        await asyncio.gather(*folding, return_exceptions=True)

    @asynccontextmanager
    async def ended(self, lives: Sequence[Ending], hold_s: float = HOLD_S) -> AsyncIterator[Ended]:
        """Ends these live segments, in their order. Their owners hold while the context lasts, so
        long at most; none once this process knows that the cluster is held, as their owners could
        not go on. Raises as seal.sealed, errors.MetadataHeld."""
        holds: list[LetGo] = []
        if lives:
            with reachable("asking whether the metadata store is held"):
                await self._committer.guard.checks()
        try:
            handed = await self._handed(lives, hold_s, holds) if lives else {}
            left = [one for one in lives if _asked(one) not in handed]

            async def fenced(one: Ending) -> Handed:
                return Handed(one[0], await sealed(self._ledgers, one[1]))

            some = await each(fenced, left)
            handed |= dict(zip(map(_asked, left), some, strict=True))
            yield Ended(tuple(handed[_asked(one)] for one in lives))
        finally:
            for let_go in holds:
                let_go()

    async def _handed(
        self, lives: Iterable[Ending], hold_s: float, holds: list[LetGo]
    ) -> dict[Live, Handed]:
        """What owners hand over; each hold that begins is put to `holds`."""
        by_broker: dict[str, list[Live]] = {}
        for one in lives:
            broker = broker_of(one[1].owner)
            if broker is not None:
                by_broker.setdefault(broker, []).append(_asked(one))

        async def asked(broker: str) -> list[Handed]:
            try:
                answer_s = patience_s(hold_s, len(by_broker[broker]))
                async with asyncio.timeout(answer_s):
                    return await self._asked(broker, by_broker[broker], answer_s + hold_s, holds)
            except (OSError, EOFError, TimeoutError, NotUnderstood) as error:
                _log.warning("broker %s hands nothing over, it is fenced: %r", broker, error)
                return []

        found: dict[Live, Handed] = {}
        for broker, some in zip(by_broker, await each(asked, by_broker), strict=True):
            wanted = {one[:3]: one for one in by_broker[broker]}
            for given in some:
                live = wanted.get((given.topic_id, given.seal.partition, given.seal.ledger_id))
                if live is not None and given.seal.opened >= live[3]:  # it may know of a later one
                    found[live] = given
        return found

    async def _asked(
        self, broker: str, lives: Sequence[Live], hold_s: float, holds: list[LetGo]
    ) -> list[Handed]:
        url = await self._url(broker)
        if url is None:
            return []
        answer, let_go = await self._ask(url, encode_request(lives, hold_s))
        holds.append(let_go)
        return decode_answer(answer)

    async def _url(self, broker: str) -> str | None:
        """Where the broker is reached; None of one that is gone. An id is one process's, whose URL
        stays. Raises NotUnderstood."""
        if broker not in self._urls:
            with reachable("looking a broker up"):
                node = await read(self._ledgers.metadata, paths.broker(broker))
            if node is None:
                return None
            if len(self._urls) >= URLS_KEPT_MAX:
                self._urls.clear()
            try:
                self._urls[broker] = str(json.loads(node.value)["url"])
            except (ValueError, KeyError, TypeError) as error:
                raise NotUnderstood(f"the node of broker {broker}: {error!r}") from error
        return self._urls[broker]


def _asked(one: Ending) -> Live:
    topic_id, live = one
    return topic_id, live.partition, live.ledger_id, live.opened


def _past(wanted: Wanted, ended: Ended) -> Wanted:
    if not ended.handed:
        return wanted
    drafts = {
        id_: (*ended.seals(id_), *some, *ended.opens(id_)) for id_, some in wanted.drafts.items()
    }
    return replace(wanted, drafts=drafts)
