"""Large entries that a client reads itself: one replica gives the locations of a block."""

import pytest

from spark_ledger.ledger import reader as reader_module
from spark_ledger.ledger.range_fetch import RangeFetch
from spark_ledger.ledger.reader import BLOCK_ENTRIES
from tests.unit.spark_ledger.ledger.collecting import ENTRY, collect
from tests.unit.spark_ledger.ledger.fakes import cluster_of, simulated
from tests.unit.spark_ledger.ledger.reads import written

COUNT = 3 * BLOCK_ENTRIES + 10


@pytest.fixture
def asks(monkeypatch):
    """Of each question: the bookie, the entries, and those of which it may give the locations."""
    asked = []
    ask = RangeFetch.ask

    async def noted(self, bookie_id, ids, bytes_max, later=()):
        asked.append((bookie_id, list(ids), list(later)))
        return await ask(self, bookie_id, ids, bytes_max, later)

    monkeypatch.setattr(RangeFetch, "ask", noted)
    monkeypatch.setattr(reader_module, "LOCAL_READ_BYTES_MIN", ENTRY)
    return asked


async def read(ids, sizes=(3, 3, 2)):
    """From a reader of its own; a request has room for four entries."""
    _, ledgers = await cluster_of(3, read_request_bytes=4 * ENTRY, read_ahead_bytes=4000)
    writer = await written(ledgers, COUNT, sizes=sizes)
    for _ in range(2):
        reader = await ledgers.open(writer.ledger_id, recover=False)
        assert await collect(reader, ids, entry_bytes=ENTRY) == list(ids)


def asked_by_two(asks, ids):
    """What each of two readers asked."""

    @simulated
    async def test():
        await read(ids)

    test()
    half = len(asks) // 2
    return asks[:half], asks[half:]


@pytest.fixture
def near(monkeypatch):
    monkeypatch.setattr(RangeFetch, "local_slots", lambda *_: [0, 1, 2])


@pytest.mark.usefixtures("near")
@pytest.mark.parametrize("step", [1, 2])
def test_one_replica_is_asked_for_all_of_a_block_and_of_the_next_another_one(asks, step):
    asked, again = asked_by_two(asks, range(0, COUNT, step))
    of_block = [
        {b for b, own, _ in asked if own[0] // BLOCK_ENTRIES == block} for block in range(4)
    ]
    assert [len(bookies) for bookies in of_block] == [1] * 4
    assert len(set.union(*of_block)) == 3
    assert again == asked, "what lies in memory of the host once is read from there"


@pytest.mark.usefixtures("near")
@pytest.mark.parametrize("step", [1, 2])
def test_with_a_question_go_all_entries_of_its_block_that_are_still_to_be_read(asks, step):
    ids = range(0, COUNT, step)
    asked, _ = asked_by_two(asks, ids)
    assert len(asked) > 3
    for _, own, later in asked:
        assert later == [
            e for e in ids if e > own[-1] and e // BLOCK_ENTRIES == own[0] // BLOCK_ENTRIES
        ]


@pytest.mark.usefixtures("near")
def test_of_striped_entries_a_replica_is_asked_for_the_locations_of_its_own(asks):
    @simulated
    async def test():
        cluster, ledgers = await cluster_of(3, read_request_bytes=4 * ENTRY, read_ahead_bytes=4000)
        writer = await written(ledgers, COUNT, sizes=(3, 2, 2))
        reader = await ledgers.open(writer.ledger_id, recover=False)
        await collect(reader, range(COUNT), entry_bytes=ENTRY)
        assert any(later for *_, later in asks)
        for bookie_id, _, later in asks:
            stored = cluster.bookies[bookie_id].entries
            assert all((writer.ledger_id, entry_id) in stored for entry_id in later)

    test()


@pytest.mark.parametrize("why", ["small", "elsewhere"])
def test_entries_that_bookies_send_are_asked_of_all_in_turn(monkeypatch, asks, near, why):
    if why == "small":
        monkeypatch.setattr(reader_module, "LOCAL_READ_BYTES_MIN", 1 << 20)
    else:
        monkeypatch.setattr(RangeFetch, "local_slots", lambda *_: [])
    asked, _ = asked_by_two(asks, range(0, COUNT, 2))
    first = [bookie for bookie, own, _ in asked if own[0] // BLOCK_ENTRIES == 0]
    assert len(set(first)) == 3
