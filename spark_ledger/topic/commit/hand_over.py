"""Commits to partitions with live segments: the owners are asked to hand their segments over.

    committer                                     owner (a broker, on its own port)
      MAGIC, size, live segments        ------->    stops its adds, waits for those under way
                                        <-------    size, a seal and an open for each segment
      commits ...                                   holds
      closes the connection             ------->    reads the log and goes on

Always true: a response is a proposal. The guards of the log decide whether its actions are
committed, so a late response changes nothing. An owner holds (adds nothing to the partition) while
the connection is open, but no longer than the request asks, and OWNER_HOLD_S_MAX at most. Both
frames have a version and a largest size; a side that cannot parse a frame closes the connection,
and the committer fences the ledger.
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
from spark_ledger.metadata.store_calls import Tries, call_each, read, unavailable_while
from spark_ledger.topic.commit.commit import Committer
from spark_ledger.topic.commit.draft import CommitOutcome, CommitRequest
from spark_ledger.topic.commit.seal import seal_live_segment
from spark_ledger.topic.log import actions
from spark_ledger.topic.log.actions import Action, Append, OpenLive, Overwrite, SealLive
from spark_ledger.topic.log.segments import LiveSegment
from spark_ledger.topic.log.state import TopicState

T = TypeVar("T")

MAGIC = b"SLHO"
"""The first bytes of a request. No frame of Pulsar begins with these bytes, because it would be
longer than Pulsar's frames may be."""
VERSION = 2
"""In version 1 the owner closed its ledger and went on in another ledger."""
HOLD_S, HOLD_S_MAX = 2.0, 8.0
"""How long owners are asked to hold after they responded: in a commit's first try, and at most."""
OWNER_HOLD_S_MAX = 20.0
RESPONSE_S_PER_SEGMENT = 0.01
OWNERS_SHARE = 0.8
"""The share of the committer's patience that the owner may use; the rest is for the network."""
REQUEST_BYTES_MAX = 1 << 20  # decoded in one step of the broker's loop
RESPONSE_BYTES_MAX = 16 << 20
_SIZE = struct.Struct(">I")
_BROKER = "broker "

EndHold = Callable[[], None]
AskOwner = Callable[[str, bytes], Awaitable[tuple[bytes, EndHold]]]
"""Takes a broker's URL and a request; returns the broker's response, and a function that ends the
hold. Raises OSError, EOFError, TimeoutError, BadHandOverFrame."""


class LiveSegmentId(NamedTuple):
    """`opened` is the number of the commit that opened the live segment in its ledger."""

    topic_id: str
    partition: int
    ledger_id: int
    opened: int


class BadHandOverFrame(Exception):
    """The frame is malformed, of another version, or too large."""


@dataclass(frozen=True, slots=True)
class HandOver:
    """What an owner proposes to a committer: the action that seals its live segment, and the action
    that opens its next live segment in the same ledger (None: the owner opens no segment now)."""

    topic_id: str
    seal: SealLive
    reopen: OpenLive | None = None


def patience_s(hold_s: float, segment_count: int) -> float:
    """How long a committer waits for an owner's response about its live segments before it fences
    their ledgers: half a second for a single segment in the first try. Later tries wait longer, so
    that slow owners and owners of many segments can respond in time."""
    return hold_s / 4 + RESPONSE_S_PER_SEGMENT * segment_count


def respond_within_s(requested_s: float, segment_count: int) -> float:
    """The time after which an owner responds with the segments that have stopped by then. The time
    is less than the committer's patience, so that a slow segment does not cause the ledgers of all
    other segments to be fenced. `requested_s` is the hold plus the committer's patience."""
    waiting_s = RESPONSE_S_PER_SEGMENT * segment_count
    quarter_hold_s = max(0.0, requested_s - waiting_s) / 5  # requested_s = 5/4 hold + waiting_s
    return OWNERS_SHARE * (quarter_hold_s + waiting_s)


def owner_name(broker_id: str) -> str:
    """The broker's name as an owner in the log."""
    return f"{_BROKER}{broker_id}"


def broker_of(owner: str) -> str | None:
    """The broker id in an owner's name; None if the owner is not a broker."""
    return owner.removeprefix(_BROKER) if owner.startswith(_BROKER) else None


# -- frames ----------------------------------------------------------------------------------------


def encode_request(segment_ids: Sequence[LiveSegmentId], hold_s: float) -> bytes:
    body = _json({"version": VERSION, "hold_ms": round(hold_s * 1000), "live": segment_ids})
    return MAGIC + _SIZE.pack(len(body)) + body


def decode_request(received: bytes) -> tuple[list[LiveSegmentId], float] | None:
    """The live segments, and for how many seconds to hold them. None while bytes of the frame are
    missing. Raises BadHandOverFrame."""
    head = len(MAGIC) + _SIZE.size
    if not (received.startswith(MAGIC) or MAGIC.startswith(received)):
        raise BadHandOverFrame("no request to hand over")
    if len(received) < head:
        return None
    (size,) = _SIZE.unpack_from(received, len(MAGIC))
    if size > REQUEST_BYTES_MAX or len(received) > head + size:
        raise BadHandOverFrame(f"a request of {size} bytes, at most {REQUEST_BYTES_MAX} fit")
    if len(received) < head + size:
        return None
    return _decode(received[head:], _request_from_json)


def encode_response(hand_overs: Sequence[HandOver]) -> bytes:
    body = _json({"version": VERSION, "handed": [_to_json(hand_over) for hand_over in hand_overs]})
    return _SIZE.pack(len(body)) + body


def decode_response(body: bytes) -> list[HandOver]:
    """`body` is the part of a response after its size. Raises BadHandOverFrame."""
    return _decode(body, lambda plain: [_from_json(hand_over) for hand_over in plain["handed"]])


def _json(plain: dict[str, Any]) -> bytes:
    return json.dumps(plain, separators=(",", ":")).encode()


def _decode(body: bytes, build: Callable[[dict[str, Any]], T]) -> T:
    try:
        plain = json.loads(body)
        if plain["version"] != VERSION:
            raise BadHandOverFrame(f"version {plain['version']}, this is version {VERSION}")
        return build(plain)
    except (*errors.MALFORMED, errors.UnsupportedFormat) as error:
        raise BadHandOverFrame(f"a malformed frame: {error!r}") from error


def _request_from_json(plain: dict[str, Any]) -> tuple[list[LiveSegmentId], float]:
    segment_ids = [
        LiveSegmentId(str(topic), int(partition), int(ledger), int(opened))
        for topic, partition, ledger, opened in plain["live"]
    ]
    return segment_ids, min(OWNER_HOLD_S_MAX, max(0.0, plain["hold_ms"] / 1000))


def _to_json(hand_over: HandOver) -> dict[str, Any]:
    plain: dict[str, Any] = {"topic": hand_over.topic_id, "seal": actions.to_json(hand_over.seal)}
    if hand_over.reopen is not None:
        plain["open"] = actions.to_json(hand_over.reopen)
    return plain


def _from_json(plain: dict[str, Any]) -> HandOver:
    seal = actions.from_json(plain["seal"])
    reopen = actions.from_json(plain["open"]) if "open" in plain else None
    if not isinstance(seal, SealLive) or not isinstance(reopen, OpenLive | None):
        raise ValueError("the actions are not a seal and an open")
    if reopen is not None and (reopen.partition, reopen.ledger_id) != (
        seal.partition,
        seal.ledger_id,
    ):
        raise ValueError(f"a seal of ledger {seal.ledger_id}, an open of {reopen.ledger_id}")
    return HandOver(str(plain["topic"]), seal, reopen)


# -- asking ----------------------------------------------------------------------------------------


async def ask_over_tcp(url: str, request: bytes) -> tuple[bytes, EndHold]:
    """An AskOwner that sends the request over a new TCP connection."""
    reader, writer = await net.dial_streams(url)
    try:
        writer.write(request)
        (size,) = _SIZE.unpack(await reader.readexactly(_SIZE.size))
        if size > RESPONSE_BYTES_MAX:
            raise BadHandOverFrame(f"a response of {size} bytes, at most {RESPONSE_BYTES_MAX} fit")
        return await reader.readexactly(size), writer.close
    except BaseException:
        writer.close()
        raise


# -- commits to partitions with live segments ------------------------------------------------------
#
# A commit that adds rows to a partition ends the partition's live segment first, in the same multi
# (hazard 29).
#
#     ask each owner -> fence the other ledgers -> seals + rows + opens, one multi -> end the holds
#
# Always true: an owner that hands a segment over has stopped, so nothing is added to the segment
# after its seal was made. The owner holds until the multi is decided or the time of its hold is
# over. If the time is over first, the owner seals the segment and opens the next segment by itself,
# and the guards let only one of the two commits win. Each try asks for a longer hold and waits
# longer for the response, so that slow owners can respond in time. The owner of a segment that was
# handed over in an earlier try still holds, so each try has fewer owners to wait for. The log names
# every ledger to which an owner adds, so the janitor keeps this ledger even after its intent has
# ended (hazard 4). The ledger of an owner that does not respond is fenced.

TRIES_MAX = 20
"""Tries of one commit; each meets live segments that owners opened after the previous try."""
URLS_KEPT_MAX = 1000
FOLD_AFTER_S = 0.1

_log = logging.getLogger(__name__)


class EndingSegment(NamedTuple):
    """A live segment that is to end."""

    topic_id: str
    live: LiveSegment

    @property
    def id(self) -> LiveSegmentId:
        live = self.live
        return LiveSegmentId(self.topic_id, live.partition, live.ledger_id, live.opened)


@dataclass(frozen=True, slots=True)
class EndedSegments:
    """The seals of live segments that ended, because their owners handed them over or their ledgers
    were fenced, and the opens of the owners that handed over."""

    hand_overs: tuple[HandOver, ...] = ()

    def seals(self, topic_id: str) -> list[Action]:
        return [hand_over.seal for hand_over in self.hand_overs if hand_over.topic_id == topic_id]

    def opens(self, topic_id: str) -> list[Action]:
        """The actions that open the next segments of their owners."""
        opens = (
            hand_over.reopen for hand_over in self.hand_overs if hand_over.topic_id == topic_id
        )
        return [reopen for reopen in opens if reopen is not None]


class LivePartitionCommitter:
    """Makes the commits of one process that add rows to partitions with live segments."""

    def __init__(self, ledgers: LedgerStore, committer: Committer, ask: AskOwner) -> None:
        self._ledgers = ledgers
        self._committer = committer
        self._ask = ask
        self._urls: dict[str, str] = {}
        self._folding = BackgroundTasks()

    async def commit(self, request: CommitRequest, timeout_s: float) -> CommitOutcome:
        """Makes the commit, which also ends the live segments of its partitions. Raises as
        Committer.commit and `end_segments`."""
        fresh, hold_s = False, HOLD_S
        hand_overs: dict[LiveSegmentId, HandOver] = {}
        async with AsyncExitStack() as holds:
            tries = Tries(tries_max=TRIES_MAX)
            while True:
                segments = await self._segments_to_end(request, fresh=fresh)
                new_segments = [segment for segment in segments if segment.id not in hand_overs]
                newly_ended = await holds.enter_async_context(
                    self.end_segments(new_segments, hold_s)
                )
                new_ids = [segment.id for segment in new_segments]
                hand_overs |= dict(zip(new_ids, newly_ended.hand_overs, strict=True))
                ended = EndedSegments(tuple(hand_overs[segment.id] for segment in segments))
                try:
                    outcome = await self._committer.commit(_with_seals(request, ended), timeout_s)
                except errors.TxnConflict as conflict:
                    if not conflict.facts.get("live"):
                        raise
                else:
                    for topic_id, _ in segments:
                        self._fold_later(topic_id)
                    return outcome
                await tries.retry_or_raise(
                    "the owners of live segments opened new segments before each try"
                )
                fresh, hold_s = True, min(2 * hold_s, HOLD_S_MAX)

    async def _segments_to_end(self, request: CommitRequest, *, fresh: bool) -> list[EndingSegment]:
        """The live segments of partitions to which rows are to be added."""
        segments: list[EndingSegment] = []
        for topic_id, draft in request.drafts.items():
            overwrites = any(isinstance(action, Overwrite) for action in draft)
            rows = (s for a in draft if isinstance(a, Append | Overwrite) for s in a.segments)
            partitions = {segment.partition for segment in rows}
            state = await self._state(topic_id, fresh=fresh)
            for partition in state.partitions if state else ():
                if partition.live and (overwrites or partition.live.partition in partitions):
                    segments.append(EndingSegment(topic_id, partition.live))
        return segments

    async def _state(self, topic_id: str, *, fresh: bool) -> TopicState | None:
        """The topic's state. None without `fresh`, if this process has seen no live segment of the
        topic: if there is a live segment after all, a guard refuses the commit, and the next try
        is fresh."""
        views = self._committer.views
        state = views.newest_state(topic_id)
        if not fresh and not (state and any(partition.live for partition in state.partitions)):
            return None
        with unavailable_while(f"reading topic {topic_id}"):
            if not fresh and state and await views.is_newest(state):
                return state
            return await views.state(topic_id, fold=True, fresh=fresh)

    def _fold_later(self, topic_id: str) -> None:
        """Folds this process' own commit FOLD_AFTER_S later: the owners, for which the next commit
        may already wait, go on first."""
        if topic_id not in self._folding:
            self._folding.start(self._fold(topic_id), name=topic_id)

    async def _fold(self, topic_id: str) -> None:
        await asyncio.sleep(FOLD_AFTER_S)
        with suppress(errors.LedgerError, StoreError):  # the next commit gets the error again
            await self._committer.views.state(topic_id, fold=True, fresh=False)

    async def close(self) -> None:
        """Stops folding."""
        await self._folding.close()

    @asynccontextmanager
    async def end_segments(
        self, segments: Sequence[EndingSegment], hold_s: float = HOLD_S
    ) -> AsyncIterator[EndedSegments]:
        """Ends these live segments; their owners hold while the context lasts, `hold_s` at most.
        While the metadata store is held, no segment is ended, because its owner could not go on.
        Raises as seal.seal_live_segment, errors.MetadataHeld."""
        holds: list[EndHold] = []
        if segments:
            with unavailable_while("asking whether the metadata store is held"):
                await self._committer.guard.checks()
        try:
            hand_overs = await self._request_hand_over(segments, hold_s, holds) if segments else {}
            to_fence = [segment for segment in segments if segment.id not in hand_overs]

            async def fence_and_seal(segment: EndingSegment) -> HandOver:
                return HandOver(
                    segment.topic_id, await seal_live_segment(self._ledgers, segment.live)
                )

            names = [segment.id for segment in to_fence]
            hand_overs |= dict(zip(names, await call_each(fence_and_seal, to_fence), strict=True))
            yield EndedSegments(tuple(hand_overs[segment.id] for segment in segments))
        finally:
            for end_hold in holds:
                end_hold()

    async def _request_hand_over(
        self, segments: Iterable[EndingSegment], hold_s: float, holds: list[EndHold]
    ) -> dict[LiveSegmentId, HandOver]:
        """What owners hand over, by segment. `holds` gets, for each hold that begins, the function
        that ends the hold."""
        by_broker: dict[str, list[LiveSegmentId]] = {}
        for segment in segments:
            broker = broker_of(segment.live.owner)
            if broker is not None:
                by_broker.setdefault(broker, []).append(segment.id)

        async def ask(broker: str) -> list[HandOver]:
            try:
                response_s = patience_s(hold_s, len(by_broker[broker]))
                async with asyncio.timeout(response_s):
                    return await self._ask_broker(
                        broker, by_broker[broker], response_s + hold_s, holds
                    )
            except (OSError, EOFError, TimeoutError, BadHandOverFrame) as error:
                _log.warning(
                    "broker %s hands nothing over, its ledgers are fenced: %r", broker, error
                )
                return []

        hand_overs: dict[LiveSegmentId, HandOver] = {}
        for broker, response in zip(by_broker, await call_each(ask, by_broker), strict=True):
            requested = {
                (id_.topic_id, id_.partition, id_.ledger_id): id_ for id_ in by_broker[broker]
            }
            for hand_over in response:
                seal = hand_over.seal
                id_ = requested.get((hand_over.topic_id, seal.partition, seal.ledger_id))
                # the owner may have opened a later segment in the same ledger
                if id_ is not None and seal.opened >= id_.opened:
                    hand_overs[id_] = hand_over
        return hand_overs

    async def _ask_broker(
        self, broker: str, segment_ids: Sequence[LiveSegmentId], hold_s: float, holds: list[EndHold]
    ) -> list[HandOver]:
        url = await self._url(broker)
        if url is None:
            return []
        response, end_hold = await self._ask(url, encode_request(segment_ids, hold_s))
        holds.append(end_hold)
        return decode_response(response)

    async def _url(self, broker: str) -> str | None:
        """The broker's URL; None if the broker is gone. A broker id belongs to one process, whose
        URL never changes. Raises BadHandOverFrame."""
        if broker not in self._urls:
            with unavailable_while("reading a broker's node"):
                node = await read(self._ledgers.metadata, paths.broker(broker))
            if node is None:
                return None
            if len(self._urls) >= URLS_KEPT_MAX:
                self._urls.clear()
            try:
                self._urls[broker] = str(json.loads(node.value)["url"])
            except errors.MALFORMED as error:
                raise BadHandOverFrame(f"the node of broker {broker}: {error!r}") from error
        return self._urls[broker]


def _with_seals(request: CommitRequest, ended: EndedSegments) -> CommitRequest:
    if not ended.hand_overs:
        return request
    drafts = {
        id_: (*ended.seals(id_), *draft, *ended.opens(id_)) for id_, draft in request.drafts.items()
    }
    return replace(request, drafts=drafts)
