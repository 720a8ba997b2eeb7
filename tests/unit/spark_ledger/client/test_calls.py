"""Closing a client ends what other threads wait for."""

import asyncio
import threading
import time

import pytest

from spark_ledger import errors
from spark_ledger.client.ledger_client import LedgerReader, LedgerWriter
from spark_ledger.process import Calls, background_loop
from tests.kit.processes import eventually
from tests.unit.spark_ledger.ledger.fakes import cluster_of


@pytest.fixture
def calls():
    return Calls(background_loop())


def wait_until(condition):
    assert eventually(condition)


def in_a_thread(work):
    """Start it; what it raises is in the list once the thread has ended."""
    met = []

    def run():
        try:
            work()
        except BaseException as error:
            met.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    return thread, met


def test_a_call_under_way_ends_at_once_and_its_work_with_it(calls):
    begun, cancelled = threading.Event(), threading.Event()

    async def wait():
        begun.set()
        try:
            await asyncio.sleep(60)
        except asyncio.CancelledError:
            cancelled.set()
            raise

    thread, met = in_a_thread(lambda: calls.run(wait()))
    assert begun.wait(20)
    assert calls.close()
    thread.join(20)
    assert [type(error) for error in met] == [errors.ClientClosed]
    assert cancelled.wait(20)
    assert not calls.close()


def test_later_calls_say_the_same_and_earlier_results_stay(calls):
    assert calls.run(asyncio.sleep(0, "done")) == "done"
    calls.close()
    with pytest.raises(errors.ClientClosed):
        calls.run(asyncio.sleep(0))


def test_a_tail_and_appends_of_other_threads_end_with_the_client(calls):
    background = background_loop()
    cluster, ledgers = background.run(cluster_of(3))
    core = background.run(ledgers.create(3, 3, 2))
    writer = LedgerWriter(calls, core, ledgers.config.inflight_bytes)
    writer.append(b"first")
    reader = LedgerReader(calls, background.run(ledgers.open(core.ledger_id, recover=False)))
    for bookie in cluster.bookies.values():
        bookie.silent = True
    waiting = [
        in_a_thread(lambda: list(reader.tail(5))),
        in_a_thread(lambda: reader.read_when_confirmed(5, 60)),
        in_a_thread(lambda: writer.append(b"second")),
    ]
    wait_until(lambda: core.last_add_pushed == 1)
    waiting.append(in_a_thread(writer.close))
    wait_until(lambda: len(calls._under_way) == 3)
    began = time.monotonic()
    calls.close()
    background.run(ledgers.close())
    for thread, met in waiting:
        thread.join(20)
        assert [type(error) for error in met] == [errors.ClientClosed]
    assert time.monotonic() - began < ledgers.config.replica_timeout_s, "nothing was waited for"
    with pytest.raises(errors.ClientClosed):
        writer.append(b"third")
    with pytest.raises(errors.ClientClosed):
        next(reader.read(0, 0))
