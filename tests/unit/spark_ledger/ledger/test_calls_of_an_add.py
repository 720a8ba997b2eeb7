"""What an add costs its writer: the calls of Python functions, and copies of its bytes."""

import asyncio
from types import SimpleNamespace

from bookie_server.api.messages import AddResult
from bookie_server.api.status import Status
from spark_ledger.bookies.bookie_client import AddLane
from spark_ledger.config import ClientConfig
from spark_ledger.ledger.records import VersionedRecord
from spark_ledger.ledger.writer import AsyncLedgerWriter
from spark_ledger.metadata.ledger_record import Fragment, LedgerRecord, Tokens
from tests.kit.python_calls import calls_counted, calls_that_grow
from tests.unit.spark_ledger.ledger.fakes import simulated

FEW, MANY = 10, 110
COPIES = 3


class Frames:
    """Stores nothing: each frame is kept and its adds are acknowledged."""

    def __init__(self):
        self.frames = []
        self.lanes = {}

    def lane(self, bookie_id, *, recovery):
        return self.lanes.setdefault(bookie_id, AddLane(self.send, 8 << 20, 2))

    async def send(self, adds):
        self.frames.append(adds)
        await asyncio.sleep(0)
        return [AddResult(Status.OK)] * len(adds)


class Outcome:
    def set_result(self, entry_id):
        self.entry_id = entry_id


def writer_over(frames):
    record = LedgerRecord(7, COPIES, COPIES, 2, fragments=(Fragment(0, ("a", "b", "c")),))
    cluster = SimpleNamespace(
        config=ClientConfig(),
        bookies=frames,
        directory=SimpleNamespace(
            is_registered=lambda bookie_id: True,
            add_listener=lambda listener: None,
        ),
    )
    return AsyncLedgerWriter(cluster, VersionedRecord(record, 0), Tokens(b"", b""), None)


async def calls_of_adds(writer, count):
    outcomes = [Outcome() for _ in range(count)]
    with calls_counted() as calls:
        for outcome in outcomes:
            writer.append_for(outcome, b"x" * 1024)
        await asyncio.sleep(1)  # of simulated time
    assert not writer.held_bytes
    entry_ids = [outcome.entry_id for outcome in outcomes]
    assert entry_ids == list(range(entry_ids[0], entry_ids[0] + count))
    return calls


@simulated
async def test_an_add_of_three_copies_costs_its_writer_nineteen_calls():
    writer = writer_over(Frames())
    few = await calls_of_adds(writer, FEW)
    many = await calls_of_adds(writer, MANY)
    calls = calls_that_grow(few, many, MANY - FEW)
    constructors = "<lambda>"  # of the header and of the add: both are named tuples
    often = {name: count for name, count in calls.items() if count > 1}
    assert often == {"AddLane.submit": COPIES, constructors: 2}
    assert round(sum(calls.values())) == 19, calls


@simulated
async def test_no_byte_of_a_large_entry_is_copied_for_any_of_its_copies():
    frames = Frames()
    writer = writer_over(frames)
    payload = bytes(64 << 10)
    writer.append_for(Outcome(), payload)
    await writer.held_below(0)
    assert len(frames.frames) == COPIES
    for adds in frames.frames:
        assert [buffer is payload for buffer in adds[0]].count(True) == 1
