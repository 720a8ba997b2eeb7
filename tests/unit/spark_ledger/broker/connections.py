"""Connections of clients over scripted partitions."""

import asyncio
import socket
from contextlib import asynccontextmanager
from types import SimpleNamespace

from spark_ledger.broker.limits import SendLimits
from spark_ledger.broker.log.tail import Stored
from spark_ledger.broker.produce.producer import Producer
from spark_ledger.broker.produce.waiting import RefusedMessages
from spark_ledger.broker.serve.connection import Connection
from spark_ledger.broker.settings import DEFAULTS
from spark_ledger.broker.wire.commands import (
    AccessMode,
    command,
)
from spark_ledger.broker.wire.frames import PulsarFrameReader, encode
from tests.kit.pulsar_batches import lone, message

BATCH_BYTES, BATCHES = 1 << 18, 200


class Tail:
    """A partition of which every batch is in memory, all given by one read."""

    def __init__(self):
        data = bytes(BATCH_BYTES)
        self.number = self.number_in_ids = self.start = 0
        self.title = "partition 0 of topic t"
        self.ledger = 77
        self.is_terminated = False
        self.end = BATCHES
        self.stored = [Stored(at, 1, data, False) for at in range(BATCHES)]
        self.listeners = {}

    def messages_at(self, offset):
        """It has no batch in memory."""

    async def read(self, offset, bytes_max=None, *, lossy=False):
        return self.stored[offset:]

    def removed(self, lo, hi):
        return []


class Socket(asyncio.Transport):
    """A client's end of a connection; `answers` are the commands that came."""

    def __init__(self):
        super().__init__()
        self.answers, self._frames = asyncio.Queue(), PulsarFrameReader()
        self._reads = True

    def set_write_buffer_limits(self, high=None, low=None):
        pass

    def is_closing(self):
        return False

    def is_reading(self):
        return self._reads

    def pause_reading(self):
        self._reads = False

    def resume_reading(self):
        self._reads = True

    def write(self, data):
        for frame in self._frames.feed(data):
            self.answers.put_nowait(frame.command)

    async def answer(self, name):
        while True:
            command = await self.answers.get()
            if command.HasField(name):
                return getattr(command, name)


class Watched(Connection):
    def __init__(self, broker, on_end):
        super().__init__(broker, on_end)
        self.made, self.full = asyncio.Event(), asyncio.Event()

    def connection_made(self, transport):
        super().connection_made(transport)
        self.transport = transport
        self.made.set()

    def pause_writing(self):
        super().pause_writing()
        self.full.set()


@asynccontextmanager
async def connected(message_bytes_max=5 << 20):
    """A connection, and its client's socket, of which nothing is read."""
    loop = asyncio.get_running_loop()
    broker = SimpleNamespace(is_crowded=False, message_bytes_max=message_bytes_max, waiting_bytes=0)
    broker.settings = DEFAULTS

    def count_waiting(size):
        broker.waiting_bytes += size

    broker.count_waiting = count_waiting
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


class Partition:
    """And its writer. `runs`: what came, as its producer and the sequence ids of its batches."""

    def __init__(self, *, deduplication):
        self.number, self.number_in_ids, self.ledger, self.deduplicates = 0, 0, 7, deduplication
        self.refused, self.send_limits = RefusedMessages(), SendLimits()
        self.writer = self.log = self.backlog = self
        self.appended, self.came = [], asyncio.Event()

    @property
    def runs(self):
        return [(run.producer.id, [one.sequence_id for one in run._sends]) for run in self.appended]

    def append(self, run):
        self.appended.append(run)
        self.came.set()

    def drop(self, producers):
        self.dropped = [one.id for one in producers]

    def left(self, producer):
        pass

    def produce(self, connection, producer_id, *, may_send=True):
        connection.client.connected = True
        intake = connection.client.intake
        made = Producer(intake, producer_id, 1, "p", AccessMode.SHARED, 0, 0, self, self.left)
        made.may_send = may_send
        intake.add(made)


def sent(producer_id, sequence_id, data=None):
    said = command("send", producer_id=producer_id, sequence_id=sequence_id, num_messages=1)
    if data is None:
        data = lone(message(b"x"), sequence_id=sequence_id)
    return encode(said, data)


async def runs_of(frames, *, deduplication=False):
    """What a connection makes of what it gets in one go, and what it answers."""
    async with connected() as (connection, client):
        partition = Partition(deduplication=deduplication)
        for producer_id in (1, 2):
            partition.produce(connection, producer_id)
        connection.data_received(b"".join(frames))
        assert connection.client.broker.waiting_bytes == sum(
            one.waiting_bytes for one in partition.appended
        )
        for run in partition.appended:
            run.stored(10)
        connection.data_received(encode(command("ping")))
        loop, reader, answers = asyncio.get_running_loop(), PulsarFrameReader(), []
        async with asyncio.timeout(30):
            while not answers or not answers[-1].HasField("pong"):
                data = await loop.sock_recv(client, 1 << 20)
                answers += [one.command for one in reader.feed(data)]
        connection.connection_lost(None)
        assert partition.dropped == [1, 2]
        return partition.runs, answers[:-1]


LONG = "\u00e4" * 513
"""As a name: 1026 bytes."""
