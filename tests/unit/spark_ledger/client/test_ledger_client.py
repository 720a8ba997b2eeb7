"""The blocking writer between its callers' threads and the loop."""

import threading
from concurrent.futures import CancelledError

import pytest

from bookie_server.api.entry import unpack_entry
from spark_ledger import errors
from spark_ledger.client.ledger_client import LedgerReader, LedgerWriter
from spark_ledger.process import Calls, background_loop
from tests.unit.spark_ledger.ledger.fakes import cluster_of


@pytest.fixture
def writer():
    background = background_loop()
    _, ledgers = background.run(cluster_of(3, entry_bytes_max=1000))
    core = background.run(ledgers.create(3, 3, 2))
    yield LedgerWriter(Calls(background), core, ledgers.config.inflight_bytes)
    background.run(ledgers.close())


@pytest.fixture
def loop_held():
    """The loop does nothing until the event is set."""
    held = threading.Event()
    background_loop().loop.call_soon_threadsafe(held.wait)
    yield held
    held.set()


@pytest.mark.parametrize("refused", [(b"x" * 2000, 0), (b"x", -1)], ids=["too large", "rows"])
def test_an_append_given_up_before_it_is_refused_keeps_back_none_after_it(
    writer, loop_held, refused
):
    given_up = writer.append_async(*refused)
    assert given_up.cancel()
    after = writer.append_async(b"1")
    loop_held.set()
    assert after.result(timeout=30) == 0
    with pytest.raises(CancelledError):
        given_up.result()


def test_an_append_given_up_before_it_is_sent_is_written_all_the_same(writer, loop_held):
    given_up, after = writer.append_async(b"0"), writer.append_async(b"1")
    assert given_up.cancel()
    loop_held.set()
    assert after.result(timeout=30) == 1


@pytest.mark.parametrize("wrap", [lambda b: b, memoryview, lambda b: [b"", b]])
def test_a_buffer_may_be_used_again_as_soon_as_append_async_returned(wrap):
    background = background_loop()
    cluster, ledgers = background.run(cluster_of(3))
    core = background.run(ledgers.create(3, 3, 2))
    writer = LedgerWriter(Calls(background), core, ledgers.config.inflight_bytes)
    held, buffer = threading.Event(), bytearray(b"first")
    background.loop.call_soon_threadsafe(held.wait)
    added = writer.append_async(wrap(buffer))
    buffer[:] = b"other"
    held.set()
    assert added.result(timeout=30) == 0
    writer.close()
    for bookie in cluster.bookies.values():
        stored = unpack_entry(bookie.entries[core.ledger_id, 0])
        assert bytes(stored.payload) == b"first"
    background.run(ledgers.close())


def test_what_is_refused_fails_alone(writer):
    with pytest.raises(errors.MessageTooBig):
        writer.append(b"x" * 2000)
    assert writer.append(b"0") == 0


def test_what_can_be_read_before_an_entry_that_cannot_is_read():
    background = background_loop()
    cluster, ledgers = background.run(cluster_of(3))
    core = background.run(ledgers.create(3, 3, 2))
    with LedgerWriter(Calls(background), core, ledgers.config.inflight_bytes) as writer:
        for number in range(10):
            writer.append(b"%d" % number)
    for bookie in cluster.bookies.values():
        bookie.entries.pop((core.ledger_id, 7))
    reader = background.run(ledgers.open(core.ledger_id, recover=False))
    for read in (
        LedgerReader(Calls(background), reader).read(0, 9),
        LedgerReader(Calls(background), reader).tail(),
    ):
        found = []
        with pytest.raises(errors.DataUnavailable, match="entry 7"):
            for entry_id, payload in read:
                assert bytes(payload) == b"%d" % entry_id
                found.append(entry_id)
        assert found == list(range(7))
    background.run(ledgers.close())
