"""Passwords, with real bookies: whoever has another one changes nothing and decides nothing."""

import asyncio

import pytest

from bookie_server.api.entry import EntryHeader, pack_header, payload_crc
from bookie_server.api.messages import Add
from bookie_server.api.status import Meaning, Status, meaning
from spark_ledger import errors
from spark_ledger.metadata.ledger_record import RecordState, Tokens, derive
from tests.simulation.world import World
from tests.unit.spark_ledger.ledger.fakes import simulated

GOOD, WRONG = derive(b"secret"), derive(b"guess")
UNAUTHORIZED = Status.UNAUTHORIZED


async def a_world():
    """A cluster of three, the rightful client and a stranger."""
    world = World()
    await world.prepare(3)
    return world, (await world.client("rightful")).ledgers, await world.client("stranger")


def an_entry(ledger_id, entry_id, payload=b"forged"):
    crc = payload_crc([payload])
    header = EntryHeader(ledger_id, entry_id, -1, len(payload), 1, len(payload), crc)
    return [pack_header(header), payload]


async def stored(world, ledger_id, token):
    """What each bookie says of entry 0 to one who may read."""
    asking = (await world.client("asking")).bookies
    return [
        (await asking.read(n.bookie_id, ledger_id, 0, 0, max_bytes=1000, token=token))
        for n in world.nodes
    ]


@pytest.mark.parametrize("password", [b"guess", b""])
@simulated
async def test_fences_and_adds_with_a_wrong_password_come_first_and_change_nothing(password):
    """First contact of every bookie with the ledger is the stranger's: the verifiers come from the
    metadata and not from what came with that request."""
    world, ledgers, stranger = await a_world()
    writer = await ledgers.create(3, 3, 2, password=b"secret")
    tokens = derive(password)
    for node in world.nodes:
        ask = (node.bookie_id, writer.ledger_id)
        for token in (tokens.recover, tokens.read, tokens.add, GOOD.read, GOOD.add):
            fence = await stranger.bookies.read_lac(*ask, fence=True, token=token)
            read = await stranger.bookies.read(*ask, 0, 9, max_bytes=1000, fence=True, token=token)
            assert [fence.status, read.status] == [UNAUTHORIZED] * 2
            add = Add(an_entry(writer.ledger_id, 0), True, token)
            assert (await stranger.bookies.add(ask[0], add)).status is UNAUTHORIZED
        for token in (tokens.add, GOOD.read):
            add = Add(an_entry(writer.ledger_id, 0), False, token)
            assert (await stranger.bookies.add(ask[0], add)).status is UNAUTHORIZED
            lac = await stranger.bookies.write_lac(*ask, 5, token=token)
            assert lac.status is UNAUTHORIZED
    for node in world.nodes:  # what they were told survives
        node.kill("none")
        await node.start()
    assert await writer.append(b"mine") == 0
    assert (await writer.close()).last_entry == 0
    for answer in await stored(world, writer.ledger_id, GOOD.read):
        assert bytes(answer.results[0].entry).endswith(b"mine"), "and not forged"
    reader = await ledgers.open(writer.ledger_id, recover=True, password=b"secret")
    assert [bytes(entry.payload) async for _, entry in reader.read(0, 0)] == [b"mine"]


@simulated
async def test_a_stranger_recovers_nothing_and_leaves_the_ledger_to_its_writer():
    _, ledgers, stranger = await a_world()
    writer = await ledgers.create(3, 3, 2, password=b"secret")
    assert await writer.append(b"one") == 0
    for password in (b"guess", b""):
        with pytest.raises(errors.Unauthorized):
            await stranger.ledgers.open(writer.ledger_id, recover=True, password=password)
    known = await ledgers.record(writer.ledger_id, fresh=True)
    assert known.record.state is RecordState.OPEN
    assert await writer.append(b"two") == 1
    recovered = await stranger.ledgers.recover(writer.ledger_id, password=b"secret")
    assert recovered.record.last_entry == 1


@simulated
async def test_a_reader_with_a_wrong_password_is_told_so_and_reads_nothing():
    _, ledgers, stranger = await a_world()
    writer = await ledgers.create(3, 3, 2, password=b"secret")
    await writer.append(b"one")
    await writer.close()
    reader = await stranger.ledgers.open(writer.ledger_id, recover=False, password=b"guess")
    with pytest.raises(errors.Unauthorized):
        [entry async for entry in reader.read(0, 0)]


@simulated
async def test_a_writer_whose_password_is_refused_is_over_and_nothing_of_it_counts():
    world, _, stranger = await a_world()
    writer = await stranger.ledgers.create(3, 3, 2, password=b"secret")
    writer._tokens = Tokens(GOOD.read, WRONG.add, GOOD.recover)
    outcomes = await asyncio.gather(
        *(writer.append(b"x") for _ in range(5)), return_exceptions=True
    )
    assert [type(outcome) for outcome in outcomes] == [errors.Unauthorized] * 5
    assert isinstance(writer.failure, errors.Unauthorized)
    assert writer.last_add_confirmed == -1
    assert (await writer.close()).last_entry == -1
    for answer in await stored(world, writer.ledger_id, GOOD.read):
        assert [result.status for result in answer.results] == [Status.NO_SUCH_ENTRY]


def test_a_refused_password_is_neither_a_copy_nor_a_denial():
    assert meaning(UNAUTHORIZED) is Meaning.UNKNOWN
