"""Work that callers share, and tasks kept until they are done."""

import asyncio
import gc

import pytest

from spark_ledger.async_tasks import BackgroundTasks, SharedReads, SharedTasks, cancel, woken


class Work:
    """Counts how often it begins; ends when the test lets it."""

    def __init__(self):
        self.begun = 0
        self.begins = asyncio.Semaphore(0)
        self.gate = asyncio.Event()
        self.error: Exception | None = None

    async def run(self) -> int:
        self.begun += 1
        self.begins.release()
        number = self.begun
        await self.gate.wait()
        if self.error is not None:
            raise self.error
        return number


def scenario(main):
    """Runs it, and returns what the event loop's exception handler got."""
    reported = []

    async def run():
        asyncio.get_running_loop().set_exception_handler(
            lambda _, context: reported.append(context)
        )
        await main()
        gc.collect()  # a task whose error no caller retrieved reports it when it is freed
        await asyncio.sleep(0)

    asyncio.run(run())
    return reported


async def begun(work: Work, times: int = 1) -> None:
    async with asyncio.timeout(5):
        for _ in range(times):
            await work.begins.acquire()


def test_callers_of_one_key_share_one_task_and_another_key_has_its_own():
    async def main():
        shared, work = SharedTasks[str, int](), Work()
        calls = [asyncio.ensure_future(shared.result(key, work.run)) for key in ("a", "a", "b")]
        await begun(work, 2)
        work.gate.set()
        assert await asyncio.gather(*calls) == [1, 1, 2]
        assert await shared.result("a", work.run) == 3  # the work before it is over
        assert len(shared) == 0

    assert scenario(main) == []


def test_a_caller_that_is_cancelled_cancels_neither_the_work_nor_the_other_callers():
    async def main():
        shared, work = SharedTasks[str, int](), Work()
        gone, waiting = (asyncio.ensure_future(shared.result("a", work.run)) for _ in range(2))
        await begun(work)
        await cancel(gone)
        assert gone.cancelled()
        work.gate.set()
        assert await waiting == 1

    assert scenario(main) == []


def test_an_error_reaches_every_caller_and_the_next_call_begins_anew():
    async def main():
        shared, work = SharedTasks[str, int](keep=True), Work()
        calls = [asyncio.ensure_future(shared.result("a", work.run)) for _ in range(2)]
        await begun(work)
        work.error = OSError("lost")
        work.gate.set()
        assert await asyncio.gather(*calls, return_exceptions=True) == [work.error] * 2
        assert "a" not in shared
        work.error = None
        assert await shared.result("a", work.run) == 2

    assert scenario(main) == []


def test_a_hundred_callers_share_a_read_that_is_not_older_than_any_call():
    async def main():
        work = Work()
        reads = SharedReads[str, int](lambda _: work.run())
        first = [asyncio.ensure_future(reads("a")) for _ in range(100)]
        await begun(work)
        late = [asyncio.ensure_future(reads("a")) for _ in range(100)]
        other = asyncio.ensure_future(reads("b"))
        await begun(work)
        work.gate.set()
        assert await asyncio.gather(*first) == [1] * 100
        assert await other == 2
        assert await asyncio.gather(*late) == [3] * 100

    assert scenario(main) == []


def test_a_read_that_fails_fails_for_its_callers_only():
    async def main():
        work = Work()
        reads = SharedReads[str, int](lambda _: work.run())
        work.error = OSError("lost")
        calls = [asyncio.ensure_future(reads("a")) for _ in range(2)]
        await begun(work)
        work.gate.set()
        assert await asyncio.gather(*calls, return_exceptions=True) == [work.error] * 2
        work.error = None
        assert await reads("a") == 2

    assert scenario(main) == []


def test_an_error_is_not_reported_if_every_caller_was_cancelled():
    async def main():
        shared, work = SharedTasks[str, int](), Work()
        call = asyncio.ensure_future(shared.result("a", work.run))
        await begun(work)
        await cancel(call)
        work.error = OSError("lost")
        work.gate.set()
        await shared.idle()

    assert scenario(main) == []


def test_a_kept_result_is_given_without_new_work_until_it_is_popped():
    async def main():
        shared, work = SharedTasks[str, int](keep=True), Work()
        work.gate.set()
        assert shared.kept("a") is None
        assert [await shared.result("a", work.run) for _ in range(2)] == [1, 1]
        assert shared.kept("a") == 1 and list(shared) == ["a"]
        assert shared.pop("a") is not None and shared.pop("a") is None
        assert await shared.result("a", work.run) == 2

    assert scenario(main) == []


def test_close_cancels_the_work_under_way_and_returns_what_was_kept():
    async def main():
        shared, work = SharedTasks[str, int](keep=True), Work()
        work.gate.set()
        await shared.result("a", work.run)
        work.gate.clear()
        call = asyncio.ensure_future(shared.result("b", work.run))
        await begun(work, 2)
        assert await shared.close() == [1]
        with pytest.raises(asyncio.CancelledError):
            await call
        assert len(shared) == 0

    assert scenario(main) == []


def test_a_wait_for_all_shared_work_cancels_the_work_if_it_is_cancelled():
    """A broker that stops without its store does not leave topics half open."""

    async def main():
        shared, work = SharedTasks[str, int](keep=True), Work()
        call = asyncio.ensure_future(shared.result("a", work.run))
        await begun(work, 1)
        waiting = asyncio.ensure_future(shared.idle())
        await asyncio.sleep(0)
        await cancel(waiting)
        with pytest.raises(asyncio.CancelledError):
            await call
        assert len(shared) == 0

    assert scenario(main) == []


def test_a_wait_for_an_event_ends_when_it_is_set_or_its_time_is_over():
    async def main():
        event = asyncio.Event()
        assert not await woken(event, 0.001)
        waiting = asyncio.ensure_future(woken(event, None))
        await asyncio.sleep(0)
        event.set()
        assert await waiting and await woken(event, 0)

    assert scenario(main) == []


def test_a_background_task_is_kept_until_it_is_done():
    async def main():
        tasks, work = BackgroundTasks(), Work()
        tasks.start(work.run(), name="the upload")
        await begun(work)
        gc.collect()
        assert len(tasks) == 1 and "the upload" in tasks
        work.gate.set()
        await tasks.idle()
        assert len(tasks) == 0 and "the upload" not in tasks

    assert scenario(main) == []


def test_the_error_of_a_background_task_goes_to_the_exception_handler_or_to_failed():
    error, errors, ends = OSError("lost"), [], []

    async def main():
        for tasks in (BackgroundTasks(), BackgroundTasks(errors.append, lambda: ends.append(True))):
            work = Work()
            work.error = error
            work.gate.set()
            tasks.start(work.run(), name="the upload")
            await tasks.idle()

    (reported,) = scenario(main)
    assert reported["exception"] is error and reported["message"] == "the upload has failed"
    assert errors == [error] and ends == [True]


def test_close_cancels_background_tasks_and_waits_until_they_have_ended():
    ended = []

    async def slow_to_end():
        try:
            await asyncio.Event().wait()
        finally:
            await asyncio.sleep(0)
            ended.append(True)

    async def main():
        tasks = BackgroundTasks()
        tasks.start(slow_to_end())
        await asyncio.sleep(0)
        await tasks.close()
        assert ended == [True] and len(tasks) == 0

    assert scenario(main) == []


def test_a_caller_that_stops_waiting_for_background_tasks_cancels_none():
    async def main():
        tasks, work = BackgroundTasks(), Work()
        task = tasks.start(work.run())
        waiting = asyncio.ensure_future(tasks.idle())
        await begun(work)
        await cancel(waiting)
        work.gate.set()
        assert await task == 1

    assert scenario(main) == []


def test_work_that_begins_while_shared_tasks_close_is_cancelled_too():
    async def run():
        shared = SharedTasks()

        async def slow_to_end():
            try:
                await asyncio.sleep(60)
            finally:
                await asyncio.sleep(0)

        shared.start("first", slow_to_end)
        await asyncio.sleep(0)
        closing = asyncio.ensure_future(shared.close())
        await asyncio.sleep(0)
        later = shared.start("second", slow_to_end)
        await closing
        assert later.cancelled()
        assert len(shared) == 0

    asyncio.run(run())
