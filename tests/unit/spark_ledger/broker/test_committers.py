"""Who commits past live segments, on a real socket to the broker's port, without a cluster."""

import asyncio
import contextlib
from types import SimpleNamespace

import pytest

from spark_ledger.broker.log.holds import SegmentHold
from spark_ledger.broker.serve.connection import Connection
from spark_ledger.broker.settings import DEFAULTS
from spark_ledger.broker.wire.commands import command
from spark_ledger.broker.wire.frames import encode
from spark_ledger.topic.commit.hand_over import (
    MAGIC,
    HandOver,
    ask_over_tcp,
    decode_response,
    encode_request,
)
from spark_ledger.topic.log.actions import SealLive

HANDED = HandOver("t", SealLive(0, 7, None, (), 3))


class Writer:
    """The open end of partition 0 of topic t."""

    def __init__(self):
        self.holds = []
        self.asked = asyncio.Event()

    def hand_over(self, ledger_id, opened, until_s):
        if (ledger_id, opened) != (7, 3):
            return None
        self.holds.append(SegmentHold(ledger_id, opened, until_s))
        self.holds[-1].join()
        self.asked.set()
        return self.holds[-1]


@contextlib.asynccontextmanager
async def listening(writer):
    """A broker's port, and what of its clients' connections has ended."""
    broker = SimpleNamespace(
        settings=DEFAULTS,
        is_crowded=False,
        message_bytes_max=5 << 20,
        live_writer=lambda topic, partition: writer if (topic, partition) == ("t", 0) else None,
    )
    ended = []
    loop = asyncio.get_running_loop()
    server = await loop.create_server(lambda: Connection(broker, ended.append), "127.0.0.1", 0)
    host, port = server.sockets[0].getsockname()
    try:
        yield f"pulsar://{host}:{port}", ended
    finally:
        server.close()


async def soon(event):
    async with asyncio.timeout(20):
        await event.wait()


def test_what_is_handed_over_is_held_until_the_connection_ends():
    async def act():
        writer = Writer()
        async with listening(writer) as (url, ended):
            wanted = [("t", 0, 7, 3), ("t", 0, 8, 3), ("u", 0, 7, 3)]
            asking = asyncio.create_task(ask_over_tcp(url, encode_request(wanted, 2.0)))
            await soon(writer.asked)
            (hold,) = writer.holds
            hold.reply(HANDED)
            answer, let_go = await asking
            assert decode_response(answer) == [HANDED]
            assert len(ended) == 1  # it is no client's any more
            assert not hold.over.is_set()
            let_go()
            await soon(hold.over)

    asyncio.run(act())


def test_who_gives_up_before_the_answer_holds_nothing():
    async def act():
        writer = Writer()
        async with listening(writer) as (url, _):
            request = encode_request([("t", 0, 7, 3)], 2.0)
            asking = asyncio.create_task(ask_over_tcp(url, request))
            await soon(writer.asked)
            asking.cancel()
            with pytest.raises(asyncio.CancelledError):
                await asking
            (hold,) = writer.holds
            await soon(hold.over)

    asyncio.run(act())


@pytest.mark.parametrize("frame", [b"SLHX" + bytes(8), MAGIC + b"\xff" * 8, b"S" * 100])
def test_what_is_not_understood_ends_the_connection(frame):
    async def act():
        async with listening(Writer()) as (url, _):
            with pytest.raises((asyncio.IncompleteReadError, ConnectionError)):
                await ask_over_tcp(url, frame)

    asyncio.run(act())


def test_a_clients_frame_that_comes_in_pieces_is_no_committers():
    async def act():
        connect = encode(command("connect", client_version="S", protocol_version=20))
        at = connect.index(b"S")
        async with listening(Writer()) as (url, _):
            port = int(url.rpartition(":")[2])
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            writer.write(connect[:at])
            await writer.drain()
            await asyncio.sleep(0.05)
            writer.write(connect[at:])
            async with asyncio.timeout(20):
                assert await reader.readexactly(4)
            writer.close()

    asyncio.run(act())
