"""Asking the owners of live segments to hand them over: who asks, what they answer, and the frames.

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
import struct
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from spark_ledger import errors
from spark_ledger.topic.log import actions
from spark_ledger.topic.log.actions import OpenLive, SealLive

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
    host, _, port = url.rpartition("://")[2].rpartition(":")
    reader, writer = await asyncio.open_connection(host.strip("[]"), int(port))
    try:
        writer.write(request)
        (size,) = _SIZE.unpack(await reader.readexactly(_SIZE.size))
        if size > ANSWER_BYTES_MAX:
            raise NotUnderstood(f"an answer of {size} bytes, at most {ANSWER_BYTES_MAX} are taken")
        return await reader.readexactly(size), writer.close
    except BaseException:
        writer.close()
        raise
