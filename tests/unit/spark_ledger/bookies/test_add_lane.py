"""The lane of adds to one bookie: frames, their sizes, their failures."""

import asyncio

from bookie_server.api.messages import Add, AddResult
from bookie_server.api.status import Status
from spark_ledger.bookies.add_lane import WORTH_A_FRAME, AddLane, NoAnswer
from tests.simulation.loop import run


class Wire:
    """A bookie behind a lane that answers a frame when it is told to."""

    def __init__(self, frame_bytes_max=1 << 20, frames_in_flight=4):
        self.frames = []
        self.open = []
        self.answered = []
        self.lane = AddLane(self.send, frame_bytes_max, frames_in_flight)

    async def send(self, adds):
        self.frames.append([add.entry[0] for add in adds])
        waiting = asyncio.get_running_loop().create_future()
        self.open.append(waiting)
        await waiting
        return [AddResult(Status.OK, 0, str(add.entry[0])) for add in adds]

    def submit(self, name, size=1):
        self.lane.submit(Add([name]), size, lambda result: self.answered.append((name, result)))

    async def arrive(self, failure=None):
        waiting = self.open.pop(0)
        waiting.set_result(None) if failure is None else waiting.set_exception(failure)
        await asyncio.sleep(0.001)


def test_what_is_submitted_together_leaves_together_and_is_answered_one_by_one():
    async def main():
        wire = Wire()
        for name in "abc":
            wire.submit(name)
        assert wire.answered == []
        await asyncio.sleep(0.001)
        assert wire.frames == [["a", "b", "c"]]
        await wire.arrive()
        assert [(name, result.reason) for name, result in wire.answered] == [
            ("a", "a"),
            ("b", "b"),
            ("c", "c"),
        ]

    run(main())


def test_small_adds_gather_while_a_frame_is_under_way():
    async def main():
        wire = Wire()
        wire.submit("a")
        await asyncio.sleep(0.001)
        for name in "bcd":
            wire.submit(name)
            await asyncio.sleep(0.001)
        assert wire.frames == [["a"]]
        await wire.arrive()
        assert wire.frames == [["a"], ["b", "c", "d"]]

    run(main())


def test_large_adds_do_not_wait_for_each_other_up_to_the_frames_in_flight():
    async def main():
        wire = Wire(frame_bytes_max=1600, frames_in_flight=2)
        for name in "abc":
            wire.submit(name, 1600)
        await asyncio.sleep(0.001)
        assert wire.frames == [["a"], ["b"]]
        await wire.arrive()
        assert wire.frames == [["a"], ["b"], ["c"]]

    run(main())


def test_what_waits_behind_a_frame_leaves_once_it_is_worth_a_frame():
    async def main():
        wire = Wire(frame_bytes_max=1600, frames_in_flight=2)
        wire.submit("a", 10)
        await asyncio.sleep(0.001)
        wire.submit("b", 1600 // WORTH_A_FRAME - 1)
        await asyncio.sleep(0.001)
        assert wire.frames == [["a"]]
        wire.submit("c", 1)
        await asyncio.sleep(0.001)
        assert wire.frames == [["a"], ["b", "c"]]

    run(main())


def test_a_frame_holds_no_more_than_its_bytes_but_at_least_one_add():
    async def main():
        wire = Wire(frame_bytes_max=10, frames_in_flight=1)
        for name, size in (("a", 99), ("b", 5), ("c", 5), ("d", 1)):
            wire.submit(name, size)
        for _ in range(3):
            await asyncio.sleep(0.001)
            await wire.arrive()
        assert wire.frames == [["a"], ["b", "c"], ["d"]]

    run(main())


def test_a_frame_without_an_answer_is_unknown_for_it_and_for_all_that_waits():
    async def main():
        wire = Wire()
        wire.submit("a")
        await asyncio.sleep(0.001)
        wire.submit("b")
        await wire.arrive(NoAnswer("too late"))
        assert [(n, r.status, r.reason) for n, r in wire.answered] == [
            ("a", Status.IO_ERROR, "too late"),
            ("b", Status.IO_ERROR, "too late"),
        ]
        wire.submit("c")
        await asyncio.sleep(0.001)
        assert wire.frames[-1] == ["c"]

    run(main())
