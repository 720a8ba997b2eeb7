"""How long a call waits for the metadata store, and what is said meanwhile."""

import asyncio
import logging

import pytest

from spark_ledger.metadata.outage import Outage
from tests.unit.spark_ledger.ledger.fakes import simulated


@pytest.fixture(autouse=True)
def said(caplog):
    caplog.set_level(logging.WARNING)
    return caplog


def outage(timeout_s: float = 300.0) -> Outage:
    made = Outage(lambda: "the store", 15.0, timeout_s)
    made.on_contact()
    return made


@simulated
async def test_a_call_waits_as_long_as_is_left_of_the_outage_and_for_one_answer_at_least():
    one, now = outage(), asyncio.get_running_loop().time()
    assert one.deadline_s(now) == now + 300
    one.on_contact_lost()
    await asyncio.sleep(200)
    one.on_contact_lost()
    later = now + 200
    assert one.deadline_s(later) == now + 300
    await asyncio.sleep(95)
    assert one.deadline_s(now + 295) == now + 310
    one.on_contact()
    assert one.deadline_s(now + 295) == now + 595
    assert outage(0.0).deadline_s(now) == now + 15


def test_an_outage_is_told_after_seconds_now_and_then_and_at_its_end(said):
    @simulated
    async def test():
        one = outage()
        with one.call("/quick"):
            await asyncio.sleep(4)
        with one.call("/a"):
            one.on_contact_lost()
            await asyncio.sleep(66)
            one.on_contact()
            one.on_response()
        one.on_response()
        one.close()

    test()
    assert [record.getMessage() for record in said.records] == [
        "the store has not answered for 5 s; calls that wait: 1, the oldest for /a, for 295 s"
        " more (option outageTimeout is 300 s)",
        "the store has not answered for 35 s; calls that wait: 1, the oldest for /a, for 265 s"
        " more (option outageTimeout is 300 s)",
        "the store has not answered for 65 s; calls that wait: 1, the oldest for /a, for 235 s"
        " more (option outageTimeout is 300 s)",
        "the store answers again, after 66 s",
    ]


def test_nothing_is_told_while_no_call_waits_nor_by_who_waits_for_one_answer_only(said):
    @simulated
    async def test():
        idle, impatient = outage(), outage(0.0)
        with idle.call("/a"):
            await asyncio.sleep(1)
        idle.on_contact_lost()
        with impatient.call("/a"):
            await asyncio.sleep(100)
        impatient.on_response()
        idle.on_response()

    test()
    assert not said.records
