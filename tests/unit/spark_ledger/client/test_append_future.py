"""The future of an append is a Future to everybody who looks at it."""

import threading
from concurrent.futures import CancelledError, Future, as_completed, wait

import pytest

from spark_ledger.client.ledger_client import AppendFuture, SharedLock


@pytest.fixture
def futures():
    lock = SharedLock()
    return [AppendFuture(lock) for _ in range(3)]


def later(action):
    timer = threading.Timer(0.01, action)
    timer.start()
    return timer


def test_who_waits_is_told_the_result_when_it_comes(futures):
    later(lambda: futures[1].set_result(7))
    assert futures[1].result(10) == 7
    assert futures[1].result() == 7
    assert futures[1].exception() is None


def test_who_waits_is_told_the_failure(futures):
    later(lambda: futures[0].set_exception(ValueError("no")))
    assert isinstance(futures[0].exception(10), ValueError)
    with pytest.raises(ValueError, match="no"):
        futures[0].result()


def test_a_wait_ends_after_its_time_and_with_a_cancellation(futures):
    with pytest.raises(TimeoutError):
        futures[0].result(0.001)
    with pytest.raises(TimeoutError):
        futures[0].exception(0)
    later(futures[0].cancel)
    with pytest.raises(CancelledError):
        futures[0].result(10)


def test_several_are_waited_for_as_any_futures_are(futures):
    plain = Future()
    later(lambda: [future.set_result(3) for future in [*futures, plain]])
    assert wait([*futures, plain], 10).not_done == set()
    assert [future.result() for future in as_completed(futures)] == [3, 3, 3]


def test_callbacks_are_called_once_also_when_it_is_done_already(futures):
    called = []
    futures[0].add_done_callback(called.append)
    futures[0].set_result(1)
    futures[0].add_done_callback(called.append)
    assert called == [futures[0]] * 2
