"""Whatever a bookie does comes back as a value, and its quarantine hears of it."""

import asyncio
from types import SimpleNamespace

import pytest

from bookie_server.api import codec
from bookie_server.api import messages as m
from bookie_server.api.status import Status
from spark_ledger.bookies.bookie_client import BookieClient, CallFailed
from spark_ledger.config import ClientConfig
from spark_ledger.metadata.store import StoreUnavailable
from tests.simulation.loop import current
from tests.unit.spark_ledger.ledger.fakes import simulated

ADD = m.Add([b"entry"], False, b"")


class Scripted:
    """A network whose answers are what `answers` holds: a response after a time, or a failure."""

    def __init__(self, *answers):
        self.answers = list(answers)
        self.calls = 0

    async def call(self, address, method, request, timeout_s):
        self.calls += 1
        after_s, answer = self.answers.pop(0)
        await asyncio.sleep(after_s)
        if isinstance(answer, Exception):
            raise answer
        return answer if isinstance(answer, bytes) else codec.encode(answer)

    def is_here(self, address):
        return False


class Addresses:
    """A directory that knows where "a" is."""

    def address(self, bookie_id):
        return "a:1" if bookie_id == "a" else None

    async def find(self, bookie_id):
        if bookie_id == "lost":
            raise StoreUnavailable("not sent")
        return self.address(bookie_id)


def client(*answers, **settings):
    network = Scripted(*answers)
    bookies = BookieClient(network, Addresses(), ClientConfig(**settings))
    return SimpleNamespace(network=network, bookies=bookies, quarantine=bookies.quarantine)


def added(status, **fields):
    return m.AddResponse([m.AddResult(status, **fields)])


@simulated
async def test_an_answer_is_no_reason_to_suspect_whatever_it_says():
    for status in (Status.OK, Status.BUSY, Status.FENCED, Status.IO_ERROR):
        made = client((0.01, added(status)))
        assert (await made.bookies.add("a", ADD)).status is status
        assert made.quarantine.suspects() == []


@pytest.mark.parametrize("answer", [CallFailed("refused"), b"\xff\xff no message"], ids=str)
def test_no_answer_or_one_that_makes_no_sense_is_unknown_and_doubt(answer):
    @simulated
    async def test():
        made = client((0.01, answer), (0.01, answer), (0.01, m.ReadLacResponse(Status.OK)))
        assert (await made.bookies.add("a", ADD)).status is Status.IO_ERROR
        assert (await made.bookies.read_lac("a", 7)).status is Status.IO_ERROR
        assert made.quarantine.ids_in_doubt() == ["a"]
        assert (await made.bookies.read_lac("a", 7)).status is Status.OK
        assert made.quarantine.suspects() == []

    test()


@simulated
async def test_adds_slower_than_the_setting_are_slow_and_questions_are_not():
    slow = (2.5, added(Status.OK))
    made = client(slow, slow, slow, (2.5, m.ReadLacResponse(Status.OK)))
    for _ in range(3):
        assert made.quarantine.suspects() == []
        await made.bookies.add("a", ADD)
    assert made.quarantine.suspects() == ["a"]
    patient = client(*[(2.5, m.ReadLacResponse(Status.OK))] * 5)
    for _ in range(5):
        await patient.bookies.read_lac("a", 7)
    assert patient.quarantine.suspects() == []


@simulated
async def test_settings_say_how_many_failures_and_for_how_long():
    settings = {"quarantine_failures": 2, "quarantine_window_s": 5, "quarantine_s": 30}
    made = client(*[(0, CallFailed("refused"))] * 2, (0, m.ReadLacResponse(Status.OK)), **settings)
    for _ in range(2):
        await made.bookies.read_lac("a", 7)
        await asyncio.sleep(2)
    await made.bookies.read_lac("a", 7)
    assert made.quarantine.suspects() == ["a"]
    await asyncio.sleep(29)
    assert made.quarantine.suspects() == []


@simulated
async def test_a_bookie_without_an_address_is_unknown_and_nobody_is_called():
    made = client()
    assert (await made.bookies.read_lac("b", 7)).reason == "the bookie never registered an address"
    answer = await made.bookies.read_lac("lost", 7)
    assert (answer.status, "cannot be looked up" in answer.reason) == (Status.IO_ERROR, True)
    assert made.network.calls == 0
    assert made.quarantine.suspects() == []


@simulated
async def test_busy_is_asked_again_until_the_time_is_over():
    busy = (0.1, m.ReadLacResponse(Status.BUSY, retry_after_ms=400))
    made = client(busy, busy, (0.1, m.ReadLacResponse(Status.OK, 5)))
    assert (await made.bookies.read_lac("a", 7)).last_add_confirmed == 5
    made = client(*[busy] * 20, read_timeout_s=3)
    began = current().time()
    assert (await made.bookies.read_lac("a", 7)).status is Status.BUSY
    assert current().time() - began <= 3


@simulated
async def test_answers_that_do_not_match_the_adds_are_no_answer():
    made = client((0, m.AddResponse([])))
    result = await made.bookies.add("a", ADD)
    assert (result.status, result.reason) == (Status.IO_ERROR, "0 answers to 1 adds")


@simulated
async def test_a_recovery_add_waits_behind_no_other_adds_and_shares_no_frame_with_them():
    slow, quick = (5, added(Status.OK)), (0.1, added(Status.OK))
    rig = client(slow, quick, slow, frames_in_flight=1)
    bulk = [asyncio.ensure_future(rig.bookies.add("a", ADD)) for _ in range(1)]
    await asyncio.sleep(0.1)
    bulk.append(asyncio.ensure_future(rig.bookies.add("a", ADD)))  # waits for the frame under way
    before = current().time()
    result = await rig.bookies.add("a", m.Add([b"entry"], True, b""))
    assert result.status is Status.OK
    assert current().time() - before < 1
    assert not bulk[0].done()
    await asyncio.gather(*bulk)
