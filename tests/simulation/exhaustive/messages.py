"""What passes between actors, what can happen to one, and what observers are told of it."""

from collections.abc import Hashable
from typing import Any, NamedTuple

from tests.simulation.network import Exchange
from tests.simulation.store import Commit

SYNC, TIMER, CRASH, RESTART = "sync", "timer", "crash", "restart"
STORE = "store"


class Call(NamedTuple):
    """The n-th call (from 1) of a method of `callee` by `caller`, in every interleaving."""

    caller: str
    callee: str
    method: str
    number: int


class Asked(NamedTuple):
    """A call and what it asks: bytes; of the store, an operation."""

    call: Call
    body: Hashable


class Message(NamedTuple):
    """A request on its way, or its answer: `body` is then bytes (of the store, an outcome; None
    tells of a connection that broke)."""

    asked: Asked
    answer: bool = False
    body: Hashable = None

    @property
    def call(self) -> Call:
        return self.asked.call

    @property
    def to(self) -> str:
        return self.asked.call.caller if self.answer else self.asked.call.callee


Event = Message | str
"""What happens to one actor: a message is delivered, or one of SYNC, TIMER, CRASH, RESTART."""


class Seen(NamedTuple):
    """Something observers are told: `what` is the name of the Judge's method, `facts` its args."""

    what: str
    facts: tuple[Any, ...]


class Step(NamedTuple):
    """What an actor did in answer to one event, until it came to rest."""

    sent: tuple[Message, ...] = ()
    seen: tuple[Seen, ...] = ()


__all__ = [
    "CRASH",
    "RESTART",
    "STORE",
    "SYNC",
    "TIMER",
    "Asked",
    "Call",
    "Commit",
    "Event",
    "Exchange",
    "Message",
    "Seen",
    "Step",
]
