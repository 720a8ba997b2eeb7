"""The calls of one process to the outside, counted, and what becomes of it at one of them.

Always true: a call is one to the metadata store or one message to a bookie; the n-th call of a deed
is the same in each of its runs, up to the call at which its process meets its fate.
"""

import asyncio
from collections.abc import Awaitable, Callable
from enum import Enum
from functools import partial
from typing import Any

from spark_ledger.metadata.store import OutcomeUnknown
from tests.simulation.world import Client

STORE = ("get", "children", "create", "set", "delete", "multi", "sync")
WRITES = ("create", "set", "delete", "multi")
ENDLESS = 1 << 62
BROKEN_S = 0.3
"""So long the session has no connection after an answer was lost."""
AWAY_S = 26.0
"""The same, where that lasts: calls to the store are given up, and later ones are not sent."""

Send = Callable[..., Awaitable[Any]]


class Fate(Enum):
    """Before a call nothing happens that did not happen after the one before."""

    KILLED = "killed"  # the call was carried out, and nobody hears its answer
    PAUSED = "paused"  # its answer is heard when the process goes on
    ANSWER_LOST = "answer lost"  # of a write that was applied
    REQUEST_LOST = "request lost"  # of a write: it was not applied, which its sender cannot tell
    ANSWER_LOST_AWAY = "answer lost, store away"  # for longer than a call to it is tried
    REQUEST_LOST_AWAY = "request lost, store away"
    BESIDE = "beside"  # others act before its answer is heard, in no time: its session is whole

    def meets(self, call: str) -> bool:
        """Whether the fate makes a difference there: a call that only reads leaves nothing behind
        a process that is killed, and can be sent again."""
        if self in (Fate.PAUSED, Fate.BESIDE):
            return True
        what = call.split()[1] if call.startswith("store ") else ""
        return what in WRITES or (self is Fate.KILLED and not what)


ALONE = (Fate.KILLED, Fate.PAUSED, Fate.ANSWER_LOST, Fate.REQUEST_LOST)


class Boundary:
    """Of one client, from `begin` to `end`."""

    def __init__(self, client: Client, at: int = ENDLESS, fate: Fate | None = None) -> None:
        self.log: list[str] = []
        """The calls so far, in words."""
        self.met = asyncio.get_running_loop().create_future()
        """Done once the process was killed or stands still."""
        self._client = client
        self._at, self._fate = at, fate
        self._counting = False
        session, network = client.session, client.network
        for name in STORE:
            send = getattr(session, name)
            setattr(session, name, partial(self._call, f"store {name}", send))
        network.call = partial(self._message, network.call)  # type: ignore[method-assign]

    def begin(self) -> None:
        self._counting = True

    def end(self) -> None:
        self._counting = False

    async def _message(self, send: Send, address: str, method: str, *args: Any) -> Any:
        return await self._call(f"{method} to {address}", partial(send, address, method, *args))

    async def _call(self, what: str, plain: Send, *args: Any, **options: Any) -> Any:
        send = partial(plain, *args, **options)
        if not self._counting:
            return await send()
        self.log.append(f"{what} {_where(args)}".strip())
        if len(self.log) != self._at + 1 or self._fate is None:
            return await send()
        if self._fate in (Fate.KILLED, Fate.PAUSED, Fate.BESIDE):
            return await self._halt(send)
        if self._fate in (Fate.ANSWER_LOST, Fate.ANSWER_LOST_AWAY):
            await send()
        away = self._fate in (Fate.ANSWER_LOST_AWAY, Fate.REQUEST_LOST_AWAY)
        self._client.session.suspend(AWAY_S if away else BROKEN_S)
        raise OutcomeUnknown("the answer was lost at a point")

    async def _halt(self, send: Send) -> Any:
        """Carried out; then the process is killed, or nothing of it runs until it is let go on."""
        try:
            return await send()
        finally:
            if self._fate is Fate.KILLED:
                self._client.kill()
            else:
                self._client.process.pause()
            self.met.set_result(None)
            await asyncio.sleep(0)


def _where(args: tuple[Any, ...]) -> str:
    if not args:
        return ""
    if isinstance(args[0], str):
        return args[0]
    return ", ".join(f"{type(one).__name__} {one.path}" for one in args[0])
