"""What stays of calls that were answered or broken off, over real sockets and with the collector of
cycles off: a bookie looks for them by the number of objects, so what is in one stays for long."""

import asyncio
import gc
import tracemalloc

import grpc
import pytest

from bookie_server.api import codec
from bookie_server.api import messages as m
from bookie_server.api.frames import METHOD_NUMBERS, FrameKind, pack_head
from bookie_server.serve.frames import FrameService
from bookie_server.serve.gateway import SERVICE, BookieService
from spark_ledger.bookies.frame_network import FrameNetwork
from tests.kit.settings import with_settings
from tests.kit.waiting import until
from tests.unit.bookie_server.node import CONFIG, ID, KIB, Node, entry

READS = 100
SIZE = 60 * KIB
ENTRIES = 12
COLD = with_settings(CONFIG, flush_interval_s=0.02, read_cache_bytes=0)
"""Each read makes a buffer of its own."""
HALF_SENT_BYTES = 8 << 20
LEFT_BYTES_MAX = READS * SIZE // 6


class PlainGrpc:
    """What a client without this package does, as far as `served` needs it."""

    async def call(self, address, method, request, timeout_s):
        async with grpc.aio.insecure_channel(address) as channel:
            return await channel.unary_unary(f"/{SERVICE}/{method}")(
                b"".join(request), timeout=timeout_s
            )

    async def close(self):
        pass


TRANSPORTS = {"grpc": (BookieService, PlainGrpc), "frames": (FrameService, FrameNetwork)}


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_the_bytes_of_a_reply_are_gone_once_it_is_sent(transport):
    async def test(bookie, read):
        gc.collect()
        gc.disable()
        tracemalloc.start()
        try:
            for number in range(READS):
                await read(number % ENTRIES)
            await until(lambda: bookie.responses.used == 0)
            left, _ = tracemalloc.get_traced_memory()
        finally:
            tracemalloc.stop()
            gc.enable()
        assert left < LEFT_BYTES_MAX

    asyncio.run(served(transport, test))


def test_the_bytes_of_a_request_that_was_broken_off_are_gone_with_its_connection():
    async def scenario():
        node = await Node(COLD).start()
        service = FrameService(node.bookie, 32 << 20)
        port = await service.start("127.0.0.1:0")
        head = pack_head(FrameKind.CALL, 1, HALF_SENT_BYTES, METHOD_NUMBERS["Add"])
        gc.collect()
        gc.disable()
        tracemalloc.start()
        try:
            for _ in range(3):
                _, writer = await asyncio.open_connection("127.0.0.1", port)
                writer.write(head + bytes(HALF_SENT_BYTES // 2))
                await writer.drain()
                await until(lambda: service.connections)
                writer.close()
                await until(lambda: not service.connections)
            left, _ = tracemalloc.get_traced_memory()
        finally:
            tracemalloc.stop()
            gc.enable()
            await service.stop(0)
            node.bookie.abandon()
        assert left < HALF_SENT_BYTES

    asyncio.run(scenario())


async def served(transport, test):
    serve, connect = TRANSPORTS[transport]
    node = await Node(COLD).start()
    await node.create_ledger(1)
    for number in range(ENTRIES):
        await node.add(entry(1, number, bytes(SIZE)))
        await until(lambda: node.storage.cache.unflushed_bytes == 0)
    service, network = serve(node.bookie, 32 << 20), connect()
    address = f"127.0.0.1:{await service.start('127.0.0.1:0')}"

    async def read(number):
        request = m.ReadRequest(ID, 1, number, number, 0)
        assert len(await network.call(address, "Read", [codec.encode(request)], 20)) > SIZE

    try:
        await test(node.bookie, read)
    finally:
        await network.close()
        await service.stop(0)
        node.bookie.abandon()
