"""Blocking calls in threads: who waits for them, and what they leave behind."""

import asyncio
import threading
import time

import pytest

from bookie_server.disk.os_disk import DiskThreads


def on_threads(count, test):
    threads = DiskThreads(count, "disk")
    try:
        return asyncio.run(asyncio.wait_for(test(threads), 30))
    finally:
        threads.shut_down()


def test_a_call_gives_its_result_or_raises_what_it_raised():
    async def test(threads):
        assert await threads.run(divmod, 7, 2) == (3, 1)
        with pytest.raises(ZeroDivisionError):
            await threads.run(divmod, 7, 0)

    on_threads(2, test)


def test_no_more_threads_than_allowed_are_made_and_none_before_it_is_needed():
    async def test(threads):
        go, names = threading.Event(), []
        all_wait = threading.Barrier(4)

        def wait():
            names.append(threading.current_thread().name)
            if len(names) <= 3:
                all_wait.wait()
            go.wait()

        for _ in range(5):
            await threads.run(time.sleep, 0)
        waiting = [threads.run(wait) for _ in range(8)]
        await asyncio.to_thread(all_wait.wait)
        assert len(names) == 3
        go.set()
        await asyncio.gather(*waiting)
        assert {*names} <= {"disk_0", "disk_1", "disk_2"}

    on_threads(3, test)
    assert not [each for each in threading.enumerate() if each.name.startswith("disk_")]


def test_calls_begin_in_the_order_they_came():
    async def test(threads):
        begun = []
        await asyncio.gather(*(threads.run(begun.append, number) for number in range(100)))
        assert begun == list(range(100))

    on_threads(1, test)


def test_a_call_given_up_before_it_began_is_not_made():
    async def test(threads):
        go, made = threading.Event(), []
        first = threads.run(go.wait)
        second = threads.run(made.append, 1)
        second.cancel()
        go.set()
        await first
        await threads.run(made.append, 2)
        assert made == [2]

    on_threads(1, test)


def test_what_a_call_made_for_nobody_any_more_is_disposed_of():
    async def test(threads):
        begun, go, discard = threading.Event(), threading.Event(), []

        def make():
            begun.set()
            go.wait()
            return "made"

        making = threads.run(make, discard=discard.append)
        await asyncio.to_thread(begun.wait)
        making.cancel()
        go.set()
        assert await threads.run(str, discard=discard.append) == ""
        assert discard == ["made"]

    on_threads(1, test)


def test_a_result_that_comes_after_its_loop_is_gone_harms_nobody():
    threads, go = DiskThreads(1, "disk"), threading.Event()

    async def leave():
        threads.run(go.wait)

    asyncio.run(leave())
    go.set()

    async def again():
        return await threads.run(divmod, 9, 2)

    assert asyncio.run(again()) == (4, 1)
    threads.shut_down()


def test_after_the_end_nothing_is_taken():
    async def test(threads):
        threads.shut_down()
        with pytest.raises(RuntimeError, match="have ended"):
            threads.run(divmod, 1, 1)

    on_threads(1, test)


def test_where_no_thread_can_be_made_a_call_is_not_made_and_a_later_one_is(monkeypatch):
    made = []

    async def test(threads):
        with monkeypatch.context() as patch:
            patch.setattr(threading.Thread, "start", refuse)
            with pytest.raises(RuntimeError, match="start new thread"):
                threads.run(made.append, 1)
        await threads.run(made.append, 2)

    on_threads(1, test)
    assert made == [2]


def test_where_no_more_threads_can_be_made_calls_wait_for_those_there_are(monkeypatch):
    async def test(threads):
        go = threading.Event()
        first = threads.run(go.wait)
        with monkeypatch.context() as patch:
            patch.setattr(threading.Thread, "start", refuse)
            second = threads.run(divmod, 7, 2)
        go.set()
        assert (await first, await second) == (True, (3, 1))

    on_threads(2, test)


def refuse(_thread):
    raise RuntimeError("can't start new thread")
