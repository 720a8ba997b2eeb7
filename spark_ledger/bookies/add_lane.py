"""One lane of adds per bookie: adds of all ledgers, gathered into frames while frames travel.

Always true: adds leave in the order they came; no timer delays one. When the wire to the bookie
is free, all that waits leaves as one frame (up to `frame_bytes_max`); while frames are under way
another leaves only if it is worth one of its own (a sixteenth of `frame_bytes_max`), since a
message costs the same whatever its size. When a frame gets no answer, what waits behind it is
answered the same: the bookie does not answer. What waits is bounded by the in-flight bytes of the
writers.
"""

import asyncio
from collections import deque
from collections.abc import Awaitable, Callable
from itertools import islice

from bookie_server.api.messages import Add, AddResult
from bookie_server.api.status import Status

WORTH_A_FRAME = 16  # the part of `frame_bytes_max` that is worth a frame of its own

Done = Callable[[AddResult], object]
SendFrame = Callable[[list[Add]], Awaitable[list[AddResult]]]


class NoAnswer(Exception):
    """A frame got no answer, or none that makes sense; says nothing about what was stored."""


def unanswered(reason: str) -> AddResult:
    """The value of class *unknown* that stands for an answer that did not come."""
    return AddResult(Status.IO_ERROR, 0, reason)


class AddLane:
    """`send` carries a frame to the bookie and raises NoAnswer if it does not answer."""

    def __init__(self, send: SendFrame, frame_bytes_max: int, frames_in_flight: int) -> None:
        self._send = send
        self._frame_bytes_max = frame_bytes_max
        self._frames_max = frames_in_flight
        self._waiting: deque[tuple[Add, int, Done]] = deque()
        self._waiting_bytes = 0
        self._frames: dict[asyncio.Task[None], None] = {}
        self._pump_scheduled = False

    def submit(self, add: Add, size: int, done: Done) -> None:
        """Send `add` of `size` bytes; `done` is called once, with the bookie's answer or an
        unknown in its place, and never from inside this call."""
        self._waiting.append((add, size, done))
        self._waiting_bytes += size
        if not self._pump_scheduled and len(self._frames) < self._frames_max:
            self._pump_scheduled = True
            asyncio.get_running_loop().call_soon(self._pump)

    def close(self) -> None:
        """Give up frames under way and all that waits; nobody is answered any more."""
        self._waiting.clear()
        for task in list(self._frames):
            task.cancel()

    def _pump(self) -> None:
        self._pump_scheduled = False
        while self._waiting and len(self._frames) < self._frames_max:
            if self._frames and self._waiting_bytes * WORTH_A_FRAME < self._frame_bytes_max:
                return
            task = asyncio.get_running_loop().create_task(self._carry(self._take_frame()))
            self._frames[task] = None
            task.add_done_callback(self._arrived)

    def _take_frame(self) -> list[tuple[Add, int, Done]]:
        """What goes into the next frame: at least one add, then as many as fit."""
        room, count = self._frame_bytes_max, 0
        for _, size, _ in self._waiting:
            if count and size > room:
                break
            room -= size
            count += 1
        frame = list(islice(self._waiting, count))
        for _, size, _ in frame:
            self._waiting.popleft()
            self._waiting_bytes -= size
        return frame

    async def _carry(self, frame: list[tuple[Add, int, Done]]) -> None:
        try:
            results = await self._send([add for add, _, _ in frame])
        except NoAnswer as failure:
            frame += self._waiting
            self._waiting.clear()
            self._waiting_bytes = 0
            results = [unanswered(str(failure))] * len(frame)
        for (_, _, done), result in zip(frame, results, strict=True):
            done(result)

    def _arrived(self, task: asyncio.Task[None]) -> None:
        del self._frames[task]
        if not task.cancelled():
            task.result()  # a defect in a `done` is raised into the loop's exception handler
            self._pump()
