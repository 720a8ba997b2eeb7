"""Calls over frames to bookies that hang, vanish, come back or do not speak them."""

import asyncio

import pytest

from bookie_server.api.frames import HEAD_BYTES, FrameKind, pack_head, unpack_head
from spark_ledger.bookies import frame_network
from spark_ledger.bookies.bookie_client import CallFailed, TooLate
from spark_ledger.bookies.frame_network import FrameNetwork, NotConnected
from tests.kit.forward import forward, run
from tests.kit.waiting import until

PATIENCE_S = 20
CONNECT_S = 60.0
NOBODY = "127.0.0.1:1"
HELLO = pack_head(FrameKind.HELLO)
HTTP2_SETTINGS = bytes.fromhex("00000c040000000000000300004000000400400000")
"""What an HTTP/2 server begins with: its SETTINGS, here two of them."""


class Peer:
    """Says HELLO and then nothing but what a test says; keeps what it heard."""

    def __init__(self, hello=HELLO):
        self.hello = hello
        self.heard = []
        self.writers = []
        self.port = 0

    async def __aenter__(self):
        self.server = await asyncio.start_server(self._serve, "127.0.0.1", self.port)
        self.port = self.server.sockets[0].getsockname()[1]
        self.address = f"127.0.0.1:{self.port}"
        return self

    async def __aexit__(self, *_):
        self.server.close()
        for writer in self.writers:
            writer.transport.abort()

    async def _serve(self, reader, writer):
        self.writers.append(writer)
        if self.hello:
            writer.write(self.hello)
        try:
            while True:
                head = unpack_head(await reader.readexactly(HEAD_BYTES), 0, 1 << 20)
                self.heard.append((head, await reader.readexactly(head.length)))
        except (asyncio.IncompleteReadError, ConnectionError):
            pass

    def say(self, kind, call, body=b""):
        self.writers[-1].write(pack_head(kind, call, len(body)) + body)

    async def hears(self, count):
        await until(lambda: len(self.heard) >= count)
        return self.heard[count - 1]


def real(test):
    def real_test():
        async def main():
            network = FrameNetwork()
            try:
                await test(network)
            finally:
                await network.close()

        run(main())

    real_test.__name__ = test.__name__
    return real_test


def calling(network, address, timeout_s=PATIENCE_S, request=(b"how ", b"are you")):
    return asyncio.ensure_future(network.call(address, "Info", request, timeout_s))


@real
async def test_a_request_of_several_buffers_arrives_as_one_and_its_answer_comes_back(network):
    async with Peer() as peer:
        call = calling(network, peer.address)
        head, body = await peer.hears(1)
        assert (head.kind, body) == (FrameKind.CALL, b"how are you")
        peer.say(FrameKind.ANSWER, head.call, b"well")
        assert bytes(await call) == b"well"


@real
async def test_nobody_there_is_told_at_once(network):
    for _ in range(3):
        with pytest.raises(NotConnected):
            await asyncio.wait_for(network.call(NOBODY, "Info", [b""], PATIENCE_S), 5)


@real
async def test_a_call_that_is_too_late_is_given_up_at_the_bookie(network):
    async with Peer() as peer:
        other = calling(network, peer.address, 10 * PATIENCE_S)
        await peer.hears(1)
        call = calling(network, peer.address)
        head, _ = await peer.hears(2)
        peer.say(FrameKind.ANSWER, peer.heard[0][0].call)
        await other  # heard meanwhile, so the connection is alive
        forward(PATIENCE_S)
        with pytest.raises(TooLate):
            await call
        given_up, _ = await peer.hears(3)
        assert (given_up.kind, given_up.call) == (FrameKind.CANCEL, head.call)
        assert len(peer.writers) == 1
        peer.say(FrameKind.ANSWER, head.call, bytes(100_000))  # nobody waits for it any more
        call = calling(network, peer.address)
        head, _ = await peer.hears(4)
        peer.say(FrameKind.ANSWER, head.call, b"well")
        assert bytes(await call) == b"well"


@real
async def test_a_connection_on_which_nothing_is_heard_is_made_anew(network):
    async with Peer() as peer:
        other = calling(network, peer.address, 10 * PATIENCE_S)
        await peer.hears(1)
        call = calling(network, peer.address)
        await peer.hears(2)
        forward(PATIENCE_S)
        with pytest.raises(TooLate):
            await call
        with pytest.raises(CallFailed):
            await other
        call = calling(network, peer.address)
        head, _ = await peer.hears(3)
        assert len(peer.writers) == 2
        peer.say(FrameKind.ANSWER, head.call, b"well")
        assert bytes(await call) == b"well"


@real
async def test_calls_under_way_fail_when_the_connection_is_lost_or_given_back(network):
    async with Peer() as peer:
        calls = [calling(network, peer.address) for _ in range(3)]
        await peer.hears(3)
        peer.writers[-1].transport.abort()
        for call in calls:
            with pytest.raises(CallFailed):
                await call
        call = calling(network, peer.address)
        await peer.hears(4)
        await network.close()
        with pytest.raises(CallFailed):
            await call
        with pytest.raises(CallFailed, match="closed"):
            await network.call(peer.address, "Info", [b""], PATIENCE_S)


@real
async def test_what_a_bookie_never_says_ends_the_connection(network):
    async with Peer() as peer:
        call = calling(network, peer.address)
        head, _ = await peer.hears(1)
        peer.say(FrameKind.CALL, head.call)
        with pytest.raises(CallFailed):
            await call


def test_a_bookie_that_says_no_hello_costs_one_call_some_time_and_later_calls_none(monkeypatch):
    monkeypatch.setattr(frame_network, "RETRY_S", 0)  # each call begins an attempt
    run(_a_bookie_that_says_no_hello())


async def _a_bookie_that_says_no_hello():
    network = FrameNetwork(connect_s=CONNECT_S)
    async with Peer(hello=b"") as peer:
        loop = asyncio.get_running_loop()
        first = calling(network, peer.address, 2 * CONNECT_S)
        await until(lambda: peer.writers)
        forward(CONNECT_S)
        with pytest.raises(NotConnected, match=f"no frames at {peer.address}: no answer"):
            await first
        for _ in range(3):
            began = loop.time()
            with pytest.raises(NotConnected):
                await network.call(peer.address, "Info", [b""], 2 * CONNECT_S)
            assert loop.time() - began < CONNECT_S
        peer.hello = HELLO
        forward(CONNECT_S)  # the attempt under way ends

        async def again():
            while True:
                try:
                    return await network.call(peer.address, "Info", [b""], PATIENCE_S)
                except NotConnected:
                    await asyncio.sleep(0.02)

        answered = asyncio.ensure_future(again())
        head, _ = await peer.hears(1)
        peer.say(FrameKind.ANSWER, head.call, b"back")
        assert bytes(await answered) == b"back"
    await network.close()


@real
async def test_the_time_of_a_call_begins_when_it_is_asked_for_not_when_there_is_a_connection(_):
    slow = FrameNetwork(connect_s=CONNECT_S)
    async with Peer(hello=b"") as peer:
        loop = asyncio.get_running_loop()
        began = loop.time()
        call = calling(slow, peer.address, CONNECT_S)
        await until(lambda: peer.writers)
        forward(CONNECT_S / 2)
        peer.writers[-1].write(HELLO)
        await peer.hears(1)
        forward(CONNECT_S / 2)
        with pytest.raises(TooLate):
            await call
        assert loop.time() - began < 1.4 * CONNECT_S
        assert len(peer.heard) == 1
    await slow.close()


def test_a_bookie_that_refused_a_connection_and_came_back_gets_the_very_next_call(monkeypatch):
    monkeypatch.setattr(frame_network, "RETRY_S", 0)  # each call begins an attempt
    monkeypatch.setattr(frame_network, "RETRY_CONNECT_S", PATIENCE_S)
    _a_bookie_that_came_back()


@real
async def _a_bookie_that_came_back(network):
    async with Peer() as peer:
        pass
    for _ in range(3):
        with pytest.raises(NotConnected):
            await network.call(peer.address, "Info", [b""], PATIENCE_S)
    async with peer:
        call = calling(network, peer.address)
        head, _ = await peer.hears(1)
        peer.say(FrameKind.ANSWER, head.call, b"back")
        assert bytes(await call) == b"back"


@real
async def test_a_call_that_its_caller_cancels_is_cancelled_and_given_up_at_the_bookie(network):
    async with Peer() as peer:
        call = calling(network, peer.address)
        head, _ = await peer.hears(1)
        call.cancel()
        with pytest.raises(asyncio.CancelledError):
            await call
        given_up, _ = await peer.hears(2)
        assert (given_up.kind, given_up.call) == (FrameKind.CANCEL, head.call)


@real
async def test_a_network_that_was_closed_makes_no_new_connection(network):
    async with Peer() as peer:
        await network.close()
        with pytest.raises(CallFailed, match="closed"):
            await network.call(peer.address, "Info", [b"x"], 5)
        with pytest.raises(CallFailed, match="closed"):
            await network.stream(peer.address, "ReadStream").send(b"x")
        assert peer.writers == []


@real
async def test_a_call_that_was_sent_is_not_sent_again_when_its_connection_is_lost(network):
    async with Peer() as peer:
        call = calling(network, peer.address)
        await peer.hears(1)
        peer.writers[-1].transport.abort()
        with pytest.raises(CallFailed) as failed:
            await call
        assert not isinstance(failed.value, NotConnected)
        assert (len(peer.heard), len(peer.writers)) == (1, 1)


@real
async def test_where_grpc_is_served_instead_the_failure_says_so(network):
    async with Peer(hello=HTTP2_SETTINGS) as peer:
        with pytest.raises(NotConnected, match=f"at {peer.address}: gRPC is served there"):
            await network.call(peer.address, "Info", [b""], PATIENCE_S)
        with pytest.raises(NotConnected, match="gRPC is served there"):
            await network.stream(peer.address, "ReadStream").send(b"x")


@pytest.mark.parametrize(
    ("address", "here"),
    [("127.0.0.1:1", True), ("192.0.2.1:1", False), ("name:1", False), ("", False)],
)
def test_a_bookie_is_here_if_a_connection_to_it_would_begin_at_its_address(address, here):
    assert FrameNetwork().is_here(address) is here
