"""Multis that several callers share."""

import asyncio

import pytest

from spark_ledger.metadata.shared_multis import SharedMultis
from spark_ledger.metadata.store import (
    BadVersion,
    Create,
    MultiFailed,
    OutcomeUnknown,
    SessionState,
    Set,
)
from tests.unit.spark_ledger.ledger.fakes import simulated

FIRST = 1  # the number of the connection


class Store:
    """Takes the multis that are scripted; each waits until the test lets it end."""

    def __init__(self, *outcomes):
        self.outcomes = list(outcomes)
        self.sent = []
        self.ending = asyncio.Event()
        self.connections = FIRST
        self.session_state = SessionState.CONNECTED

    async def multi(self, operations):
        self.sent.append([operation.path for operation in operations])
        outcome = self.outcomes.pop(0) if self.outcomes else None
        await self.ending.wait()
        if outcome is not None:
            raise outcome

    async def set(self, path, value, version):
        try:
            await self.multi([Set(path, value, version)])
        except MultiFailed as failed:
            raise failed.cause from None
        return version + 1


def begun(multis, path, **options):
    return asyncio.ensure_future(multis.multi([Set(path, b"", 3)], **options))


async def turned():
    for _ in range(5):
        await asyncio.sleep(0)


@simulated
async def test_multis_that_come_while_one_is_under_way_share_the_next():
    store = Store()
    multis = SharedMultis(store)
    calls = [begun(multis, "/a")]
    await turned()
    calls += [begun(multis, path) for path in ("/b", "/c")]
    await turned()
    assert store.sent == [["/a"]]
    store.ending.set()
    await asyncio.gather(*calls)
    assert store.sent == [["/a"], ["/b", "/c"]]


@simulated
async def test_of_multis_that_failed_together_each_has_its_own_outcome():
    refusal = BadVersion("/b")
    store = Store(MultiFailed(1, refusal), None, MultiFailed(0, refusal))
    store.ending.set()
    multis = SharedMultis(store)
    first, second = begun(multis, "/a"), begun(multis, "/b")
    await first
    with pytest.raises(MultiFailed) as failed:
        await second
    assert (failed.value.index, failed.value.cause) == (0, refusal)
    assert store.sent == [["/a", "/b"], ["/a"], ["/b"]]


@simulated
async def test_a_lost_response_is_lost_for_all_that_share_the_multi_and_none_is_sent_again():
    store = Store(OutcomeUnknown("lost"))
    store.ending.set()
    multis = SharedMultis(store)
    outcomes = await asyncio.gather(
        begun(multis, "/a"), begun(multis, "/b"), return_exceptions=True
    )
    assert [type(outcome) for outcome in outcomes] == [OutcomeUnknown] * 2
    assert store.sent == [["/a", "/b"]]


@simulated
async def test_a_multi_for_a_connection_that_has_ended_is_not_sent():
    store = Store()
    multis = SharedMultis(store)
    first = begun(multis, "/a")
    await turned()
    late, in_time = begun(multis, "/late", on=FIRST), begun(multis, "/other")
    await turned()
    store.connections += 1
    store.ending.set()
    await asyncio.gather(first, in_time)
    with pytest.raises(OutcomeUnknown):
        await late
    assert store.sent == [["/a"], ["/other"]]


@simulated
async def test_a_multi_whose_caller_was_cancelled_before_it_was_sent_is_not_sent():
    store = Store()
    multis = SharedMultis(store)
    first = begun(multis, "/a")
    await turned()
    gone = begun(multis, "/gone")
    await turned()
    gone.cancel()
    await turned()
    store.ending.set()
    await first
    await turned()
    assert store.sent == [["/a"]]


@simulated
async def test_a_shared_multi_has_a_bounded_number_of_operations_and_bytes():
    store = Store()
    multis = SharedMultis(store)
    store.ending.set()
    many = [Set(f"/{number}", b"", 0) for number in range(150)]
    await asyncio.gather(multis.multi(many), multis.multi(many))
    assert [len(paths) for paths in store.sent] == [150, 150]
    store.sent.clear()
    large = [Create("/large", bytes(200_000))]
    await asyncio.gather(*(multis.multi(large) for _ in range(3)))
    assert [len(paths) for paths in store.sent] == [1, 1, 1]
