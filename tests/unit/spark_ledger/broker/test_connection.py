"""A client's connection on a real socket, without a cluster."""

import asyncio
import socket
from contextlib import asynccontextmanager
from types import SimpleNamespace

from spark_ledger.broker.connection import UNSENT_BYTES_MAX, Connection
from spark_ledger.broker.consumers.subscription import Consumer, Subscription
from spark_ledger.broker.owner.tail import Stored
from spark_ledger.broker.wire.commands import ServerError, SubscriptionType, command
from spark_ledger.broker.wire.frames import FrameReader, encode, encode_with_batch
from tests.kit.pulsar_batches import lone, message

BATCH_BYTES, BATCHES = 1 << 18, 200


class Tail:
    """A partition of which every batch is in memory, all given by one read."""

    def __init__(self):
        data = bytes(BATCH_BYTES)
        self.number = self.shown = self.start = 0
        self.end = BATCHES
        self.stored = [Stored(at, 1, data, False) for at in range(BATCHES)]
        self.listeners = {}

    async def read(self, offset):
        return self.stored[offset:]


class Watched(Connection):
    def __init__(self, broker, on_end):
        super().__init__(broker, on_end)
        self.made, self.full = asyncio.Event(), asyncio.Event()

    def connection_made(self, transport):
        super().connection_made(transport)
        self.made.set()

    def pause_writing(self):
        super().pause_writing()
        self.full.set()


@asynccontextmanager
async def connected():
    """A connection, and its client's socket, of which nothing is read."""
    loop = asyncio.get_running_loop()
    broker = SimpleNamespace(crowded=False, message_bytes_max=5 << 20)
    gone = asyncio.Event()
    made = Watched(broker, lambda _: gone.set())
    server = await loop.create_server(lambda: made, "127.0.0.1", 0)
    with socket.socket() as client:
        client.setblocking(False)
        await loop.sock_connect(client, server.sockets[0].getsockname())
        await made.made.wait()
        yield made, client
    await gone.wait()
    server.close()


def test_of_a_client_that_does_not_read_little_is_kept():
    async def main():
        async with connected() as (connection, client):
            subscription = Subscription("s", SubscriptionType.EXCLUSIVE, None)
            place = subscription.place(Tail(), 77, 0)
            one = Consumer(connection, 1, "a", 0, place, lambda _: None)
            subscription.join(one)
            one.flow(1000)
            async with asyncio.timeout(10):
                await connection.full.wait()
            for _ in range(100):
                await asyncio.sleep(0)
            unsent = connection._transport.get_write_buffer_size()
            assert UNSENT_BYTES_MAX < unsent < UNSENT_BYTES_MAX + 2 * BATCH_BYTES
            loop, came = asyncio.get_running_loop(), 0
            async with asyncio.timeout(10):  # and as it reads, the rest comes
                while came < BATCHES * BATCH_BYTES:
                    came += len(await loop.sock_recv(client, 1 << 20))
            await one.close()

    asyncio.run(main())


def test_what_a_producer_sends_that_was_never_here_is_answered_by_its_end():
    async def main():
        async with connected() as (_, client):
            loop, reader = asyncio.get_running_loop(), FrameReader()
            hello = command("connect", client_version="raw", protocol_version=19)
            lost = command("send", producer_id=5, sequence_id=0, num_messages=1)
            await loop.sock_sendall(client, encode(hello))
            await loop.sock_sendall(client, encode_with_batch(lost, lone(message(b"x"))))
            found = []
            async with asyncio.timeout(10):
                while len(found) < 2:
                    found += reader.feed(await loop.sock_recv(client, 1 << 16))
            assert found[1].command.close_producer.producer_id == 5

    asyncio.run(main())


def test_a_name_that_is_not_utf_8_is_refused_and_logged_as_no_defect(caplog):
    async def main():
        async with connected() as (_, client):
            loop, reader = asyncio.get_running_loop(), FrameReader()
            hello = command("connect", client_version="raw", protocol_version=19)
            asked = encode(command("partitioned_metadata", topic="abc", request_id=1))
            await loop.sock_sendall(client, encode(hello) + asked.replace(b"abc", b"a\xffc"))
            found = []
            async with asyncio.timeout(10):
                while len(found) < 2:
                    found += reader.feed(await loop.sock_recv(client, 1 << 16))
            said = found[1].command.partitioned_metadata_response
            assert said.error == ServerError.NOT_ALLOWED

    asyncio.run(main())
    assert not caplog.records
