"""Calls over frames to bookies that hang, vanish or do not speak them, and when gRPC is taken."""

import asyncio

import pytest

from bookie_server.api.frames import HEAD_BYTES, Kind, pack_head, unpack_head
from spark_ledger.bookies import frame_network
from spark_ledger.bookies.best_network import BestNetwork
from spark_ledger.bookies.frame_network import FrameNetwork, NotConnected
from spark_ledger.bookies.network import CallFailed, TooLate

PATIENCE_S = 20
NOBODY = "127.0.0.1:1"


class Peer:
    """Says HELLO and then nothing but what a test says; keeps what it heard."""

    def __init__(self, hello=True):
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
            writer.write(pack_head(Kind.HELLO))
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


async def until(condition):
    for _ in range(100 * PATIENCE_S):
        if condition():
            return
        await asyncio.sleep(0.01)
    raise AssertionError("it did not come about")


def real(test):
    def run():
        async def main():
            network = FrameNetwork()
            try:
                await test(network)
            finally:
                await network.close()

        asyncio.run(main())

    run.__name__ = test.__name__
    return run


def calling(network, address, timeout_s=PATIENCE_S, request=(b"how ", b"are you")):
    return asyncio.ensure_future(network.call_buffers(address, "Info", request, timeout_s))


@real
async def test_a_request_of_several_buffers_arrives_as_one_and_its_answer_comes_back(network):
    async with Peer() as peer:
        call = calling(network, peer.address)
        head, body = await peer.hears(1)
        assert (head.kind, body) == (Kind.CALL, b"how are you")
        peer.say(Kind.ANSWER, head.call, b"well")
        assert bytes(await call) == b"well"


@real
async def test_nobody_there_is_told_at_once(network):
    for _ in range(3):
        with pytest.raises(NotConnected):
            await asyncio.wait_for(network.call(NOBODY, "Info", b"", PATIENCE_S), 5)


@real
async def test_a_call_that_is_too_late_is_given_up_at_the_bookie(network):
    async with Peer() as peer:
        call = calling(network, peer.address, 0.3)
        other = calling(network, peer.address)
        head, _ = await peer.hears(1)
        await peer.hears(2)
        peer.say(Kind.ANSWER, peer.heard[1][0].call)
        await other  # heard meanwhile, so the connection is alive
        with pytest.raises(TooLate):
            await call
        given_up, _ = await peer.hears(3)
        assert (given_up.kind, given_up.call) == (Kind.CANCEL, head.call)
        assert len(peer.writers) == 1
        peer.say(Kind.ANSWER, head.call, bytes(100_000))  # nobody waits for it any more
        call = calling(network, peer.address)
        head, _ = await peer.hears(4)
        peer.say(Kind.ANSWER, head.call, b"well")
        assert bytes(await call) == b"well"


@real
async def test_a_connection_on_which_nothing_is_heard_is_made_anew(network):
    async with Peer() as peer:
        other = calling(network, peer.address)
        with pytest.raises(TooLate):
            await calling(network, peer.address, 0.2)
        with pytest.raises(CallFailed):
            await other
        call = calling(network, peer.address)
        head, _ = await peer.hears(3)
        assert len(peer.writers) == 2
        peer.say(Kind.ANSWER, head.call, b"well")
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
            await network.call(peer.address, "Info", b"", PATIENCE_S)


@real
async def test_what_a_bookie_never_says_ends_the_connection(network):
    async with Peer() as peer:
        call = calling(network, peer.address)
        head, _ = await peer.hears(1)
        peer.say(Kind.CALL, head.call)
        with pytest.raises(CallFailed):
            await call


def test_a_bookie_that_says_no_hello_costs_one_call_some_time_and_later_calls_none(monkeypatch):
    monkeypatch.setattr(frame_network, "CONNECT_S", 0.3)
    monkeypatch.setattr(frame_network, "RETRY_S", 0)  # each call begins an attempt
    asyncio.run(_a_bookie_that_says_no_hello())


async def _a_bookie_that_says_no_hello():
    network = FrameNetwork()
    async with Peer(hello=False) as peer:
        loop = asyncio.get_running_loop()
        with pytest.raises(NotConnected):
            await network.call(peer.address, "Info", b"", PATIENCE_S)
        for _ in range(3):
            began = loop.time()
            with pytest.raises(NotConnected):
                await network.call(peer.address, "Info", b"", PATIENCE_S)
            assert loop.time() - began < 0.2
        peer.hello = True

        async def again():
            while True:
                try:
                    return await network.call(peer.address, "Info", b"", 5)
                except NotConnected:
                    await asyncio.sleep(0.02)

        answered = asyncio.ensure_future(again())
        head, _ = await peer.hears(1)
        peer.say(Kind.ANSWER, head.call, b"back")
        assert bytes(await answered) == b"back"
    await network.close()


class Grpc:
    """A network that answers everything with "grpc"."""

    def __init__(self):
        self.calls = []
        self.closed = False

    async def call(self, address, method, request, timeout_s):
        self.calls.append((address, method, request))
        return b"grpc"

    def stream(self, address, method):
        return self

    async def send(self, message):
        self.calls.append(message)

    async def receive(self, timeout_s):
        return b"grpc"

    async def close(self):
        self.closed = True


@real
async def test_grpc_is_taken_where_frames_are_not_spoken_or_cannot_be_reached(frames):
    for where in (None, NOBODY):
        grpc = Grpc()
        network = BestNetwork(frames, lambda made=grpc: made, {"a:1": where}.get)
        assert await network.call_buffers("a:1", "Info", (b"x", b"y"), 5) == b"grpc"
        assert grpc.calls == [("a:1", "Info", b"xy")]
        stream = network.stream("a:1", "ReadStream")
        await stream.send(b"first")
        assert await stream.receive(5) == b"grpc"
        assert grpc.calls[1:] == [b"first"]


@real
async def test_grpc_is_made_when_it_is_first_needed_and_closed_if_it_was(frames):
    made = []

    def make():
        made.append(Grpc())
        return made[-1]

    network = BestNetwork(frames, make, {"a:1": None}.get)
    assert made == []
    for _ in range(2):
        await network.call("a:1", "Info", b"x", 5)
    await network.close()
    assert [grpc.closed for grpc in made] == [True]


@real
async def test_a_network_that_was_closed_makes_no_grpc(frames):
    network = BestNetwork(frames, Grpc, {"a:1": None}.get)
    await network.close()
    with pytest.raises(CallFailed, match="closed"):
        await network.call("a:1", "Info", b"x", 5)
    with pytest.raises(CallFailed, match="closed"):
        await network.stream("a:1", "ReadStream").send(b"x")


@real
async def test_a_call_that_was_sent_as_frames_is_not_sent_again_over_grpc(frames):
    async with Peer() as peer:
        grpc = Grpc()
        network = BestNetwork(frames, lambda: grpc, {"a:1": peer.address}.get)
        call = asyncio.ensure_future(network.call("a:1", "Info", b"x", PATIENCE_S))
        await peer.hears(1)
        peer.writers[-1].transport.abort()
        with pytest.raises(CallFailed):
            await call
        assert grpc.calls == []


@pytest.mark.parametrize(
    ("address", "here"),
    [("127.0.0.1:1", True), ("192.0.2.1:1", False), ("name:1", False), ("", False)],
)
def test_a_bookie_is_here_if_a_connection_to_it_would_begin_at_its_address(address, here):
    assert FrameNetwork().is_here(address) is here
