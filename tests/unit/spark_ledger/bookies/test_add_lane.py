"""The lane of adds to one bookie: frames, their sizes, their failures."""

import asyncio
from types import SimpleNamespace

from bookie_server.api.messages import AddResult
from bookie_server.api.status import Status
from spark_ledger.bookies.bookie_client import FRAME_ADDS_MAX, WORTH_A_FRAME, AddLane, Unreachable
from tests.simulation.loop import run


class Wire:
    """A bookie behind a lane that answers a frame when it is told to."""

    def __init__(self, frame_bytes_max=1 << 20, frames_in_flight=4):
        self.frames = []
        self.open = []
        self.answered = []
        self.lane = AddLane(self.send, frame_bytes_max, frames_in_flight)

    async def send(self, adds):
        self.frames.append([packed[0] for packed in adds])
        waiting = asyncio.get_running_loop().create_future()
        self.open.append(waiting)
        await waiting
        return [AddResult(Status.OK, 0, str(packed[0])) for packed in adds]

    def submit(self, name, size=1, done=None):
        self.lane.submit(SimpleNamespace(packed=(name,), size=size), done or self.answer)

    def answer(self, adds, results):
        self.answered += [
            (add.packed[0], result) for add, result in zip(adds, results, strict=True)
        ]

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
        wire.submit("b", int(1600 * WORTH_A_FRAME) - 1)
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
        await wire.arrive(Unreachable("too late"))
        assert [(n, r.status, r.reason) for n, r in wire.answered] == [
            ("a", Status.IO_ERROR, "too late"),
            ("b", Status.IO_ERROR, "too late"),
        ]
        wire.submit("c")
        await asyncio.sleep(0.001)
        assert wire.frames[-1] == ["c"]

    run(main())


def test_answers_are_handed_over_by_the_frame_and_to_whom_each_belongs():
    async def main():
        wire = Wire()
        taken = []

        def mine(adds, results):
            taken.append(("mine", [a.packed[0] for a in adds], results))

        for name in "abc":
            wire.submit(name, done=mine)
        wire.submit("d")
        wire.submit("e", done=mine)
        await asyncio.sleep(0.001)
        await wire.arrive()
        assert [(who, names, [r.reason for r in results]) for who, names, results in taken] == [
            ("mine", ["a", "b", "c"], ["a", "b", "c"]),
            ("mine", ["e"], ["e"]),
        ]
        assert [name for name, _ in wire.answered] == ["d"]

    run(main())


def test_many_small_adds_leave_in_several_frames_so_that_bookies_need_not_wait_for_the_last():
    async def main():
        wire = Wire(frames_in_flight=2)
        for name in range(2 * FRAME_ADDS_MAX + 10):
            wire.submit(name)
        await asyncio.sleep(0.001)
        assert [len(frame) for frame in wire.frames] == [FRAME_ADDS_MAX] * 2
        await wire.arrive()
        assert len(wire.frames) == 2  # ten are not worth a frame while one is under way
        await wire.arrive()
        assert [name for frame in wire.frames for name in frame] == list(range(522))

    run(main())
