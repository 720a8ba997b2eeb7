"""One lane of adds per bookie: adds of all ledgers, gathered into frames while frames travel.

Always true: adds leave in the order they came; no timer delays one. When the wire to the bookie
is free, all that waits leaves as one frame (up to `frame_bytes_max`); while frames are under way
another leaves only if it is worth one of its own (a sixteenth of `frame_bytes_max`), since a
message costs the same whatever its size. When a frame gets no response, what waits behind it is
given up with it: the bookie does not respond. What waits is bounded by the in-flight bytes of the
writers.
"""

import asyncio
from collections import deque
from collections.abc import Awaitable, Callable, Sequence
from typing import Any, NamedTuple, Protocol

from bookie_server.api.entry import Buffer
from bookie_server.api.messages import AddResult
from bookie_server.api.status import Status

WORTH_A_FRAME = 16  # the part of `frame_bytes_max` that is worth a frame of its own

FRAME_ADDS_MAX = 256  # so that the next frame is encoded while bookies work on this one


class Packed(Protocol):
    """An add as the lane takes it: the buffers of codec.encode_add, and the entry's bytes."""

    packed: Sequence[Buffer]
    size: int


Done = Callable[[Sequence[Any], Sequence[AddResult]], object]
SendFrame = Callable[[list[Sequence[Buffer]]], Awaitable[Sequence[AddResult]]]


class Unreachable(Exception):
    """A frame got no response, or a malformed one; what was stored is unknown."""


class _Run(NamedTuple):
    """Adds that follow each other in the lane and whose responses `done` takes at once."""

    done: Done
    adds: list[Packed]


class AddLane:
    """`send` carries a frame to the bookie and raises Unreachable if it does not respond."""

    def __init__(self, send: SendFrame, frame_bytes_max: int, frames_in_flight: int) -> None:
        self._send = send
        self._frame_bytes_max = frame_bytes_max
        self._frames_max = frames_in_flight
        self._waiting: deque[_Run] = deque()
        self._waiting_bytes = 0
        self._waiting_adds = 0
        self._frames: dict[asyncio.Task[None], None] = {}
        self._pump_scheduled = False

    def submit(self, add: Packed, done: Done) -> None:
        """Send `add`. `done` is called once with it, never from inside this call, and with the
        bookie's response or an unknown in its place; adds that were submitted one after the other
        with the same `done`, and left in one frame, are handed to it together."""
        waiting = self._waiting
        if waiting and waiting[-1].done is done:
            waiting[-1].adds.append(add)
        else:
            waiting.append(_Run(done, [add]))
        self._waiting_bytes += add.size
        self._waiting_adds += 1
        if not self._pump_scheduled and len(self._frames) < self._frames_max:
            self._pump_scheduled = True
            asyncio.get_running_loop().call_soon(self._pump)

    def close(self) -> None:
        """Give up frames under way and all that waits; no `done` is called any more."""
        self._take_all()
        for task in list(self._frames):
            task.cancel()

    def _pump(self) -> None:
        self._pump_scheduled = False
        while self._waiting and len(self._frames) < self._frames_max:
            if self._frames and not self._worth_a_frame():
                return
            task = asyncio.get_running_loop().create_task(self._carry(self._take_frame()))
            self._frames[task] = None
            task.add_done_callback(self._arrived)

    def _worth_a_frame(self) -> bool:
        return (
            self._waiting_bytes * WORTH_A_FRAME >= self._frame_bytes_max
            or self._waiting_adds >= FRAME_ADDS_MAX
        )

    def _take_frame(self) -> list[_Run]:
        """What goes into the next frame: at least one add, then as many as fit."""
        if self._waiting_bytes <= self._frame_bytes_max and self._waiting_adds <= FRAME_ADDS_MAX:
            return self._take_all()
        frame: list[_Run] = []
        bytes_left, adds_left = self._frame_bytes_max, FRAME_ADDS_MAX
        while self._waiting:
            done, adds = self._waiting[0]
            count = 0
            for add in adds[:adds_left]:
                if (count or frame) and add.size > bytes_left:
                    break
                bytes_left -= add.size
                count += 1
            if not count:
                break
            adds_left -= count
            frame.append(_Run(done, adds[:count]))
            self._waiting_bytes -= sum([add.size for add in adds[:count]])
            self._waiting_adds -= count
            if count < len(adds):
                self._waiting[0] = _Run(done, adds[count:])
                break
            self._waiting.popleft()
        return frame

    def _take_all(self) -> list[_Run]:
        taken = list(self._waiting)
        self._waiting.clear()
        self._waiting_bytes = self._waiting_adds = 0
        return taken

    async def _carry(self, frame: list[_Run]) -> None:
        try:
            results = await self._send([add.packed for run in frame for add in run.adds])
        except Unreachable as failure:
            frame += self._take_all()
            unknown = AddResult(Status.IO_ERROR, 0, str(failure))
            results = [unknown] * sum([len(run.adds) for run in frame])
        at = 0
        for done, adds in frame:
            done(adds, results[at : at + len(adds)])
            at += len(adds)

    def _arrived(self, task: asyncio.Task[None]) -> None:
        del self._frames[task]
        if not task.cancelled():
            task.result()  # a defect in a `done` is raised into the loop's exception handler
            self._pump()
