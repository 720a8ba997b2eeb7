"""A connection over a pair of sockets: order, slow takers, stuck takers, the end."""

import asyncio
import socket

from bookie_server.api import frames
from bookie_server.api.frames import HEAD_BYTES, FrameConnection, FrameKind, FrameReader, pack_head
from tests.kit.forward import forward, run

PATIENCE_S = 60


class Ends:
    """A connection, and the other end of its socket."""

    def __init__(self, unsent_bytes_max=1 << 30):
        mine, self.other = socket.socketpair()
        mine.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)
        self.other.setblocking(False)
        self.frames, self.lost = [], []
        self.ended = asyncio.Event()
        reader = FrameReader(1 << 20, lambda head: True)
        self.connection = FrameConnection(mine, reader, self._arrived, self._lost, unsent_bytes_max)
        self.ends_after_a_frame = False

    def _arrived(self, frame):
        self.frames.append(frame)
        if self.ends_after_a_frame:
            self.connection.close()

    def _lost(self, why):
        self.lost.append(why)
        self.ended.set()

    async def take(self, count):
        return await asyncio.get_running_loop().sock_recv(self.other, count)


def over(test, **settings):
    async def main():
        ends = Ends(**settings)
        try:
            await asyncio.wait_for(test(ends), PATIENCE_S)
        finally:
            ends.connection.close()
            ends.other.close()

    run(main())


def test_what_is_sent_arrives_in_order_whatever_pieces_it_is_in_and_is_told_when_taken():
    async def test(ends):
        data = bytes(range(256)) * 400
        told, at, sizes = [], 0, [1, 5000, 0, 40_000, 3, 57_396]
        for size in sizes:
            part = data[at : at + size]
            cut = size // 3
            pieces = (memoryview(part)[:cut], b"", bytearray(part[cut:]))
            ends.connection.send(pieces, size, lambda n=at + size: told.append(n))
            at += size
        assert at == len(data)
        found = b""
        while len(found) < at:
            found += await ends.take(700)
        assert found == data
        await ends.connection.wait_until_sent()
        assert told == [1, 5001, 5001, 45_001, 45_004, 102_400]
        assert ends.connection.unsent_bytes == 0

    over(test)


def test_who_takes_slowly_is_waited_for_and_who_takes_nothing_is_cut_off(monkeypatch):
    monkeypatch.setattr(frames, "STUCK_S", 10.0)

    async def test(ends):
        connection = ends.connection
        connection.send((bytes(120_000),), 120_000)
        for _ in range(4):
            before = connection.unsent_bytes
            while connection.unsent_bytes == before:
                await ends.take(5_000)
                await asyncio.sleep(0)
            forward(frames.STUCK_S / 2)  # it is slow
        await asyncio.sleep(0)
        assert connection.unsent_bytes and not ends.lost
        forward(frames.STUCK_S)
        await ends.ended.wait()
        assert "took no byte" in ends.lost[0]

    over(test)


def test_a_connection_that_is_lost_says_so_once_and_forgets_what_was_to_be_sent():
    async def test(ends):
        told = []
        ends.connection.send((bytes(100_000),), 100_000, lambda: told.append("first"))
        draining = asyncio.ensure_future(ends.connection.wait_until_sent())
        await asyncio.sleep(0)
        ends.other.close()
        await draining
        assert told == ["first"]
        ends.connection.send((b"more",), 4, lambda: told.append("second"))
        ends.connection.close()
        assert (told, len(ends.lost)) == (["first", "second"], 1)

    over(test)


def test_nothing_arrives_after_the_end_though_it_came_in_the_same_piece():
    async def test(ends):
        ends.ends_after_a_frame = True
        ends.other.send(pack_head(FrameKind.CANCEL, 1) + pack_head(FrameKind.CANCEL, 2))
        await ends.ended.wait()
        assert [frame.head.call for frame in ends.frames] == [1]

    over(test)


def test_bytes_that_are_no_frame_end_the_connection():
    async def test(ends):
        ends.other.send(b"\0" * HEAD_BYTES)
        await ends.ended.wait()
        assert "not a frame" in ends.lost[0]

    over(test)
