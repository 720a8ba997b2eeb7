"""Streams of the simulated network: order, cuts, kills; and what a long scan makes of them."""

import asyncio
import random
from collections.abc import AsyncGenerator, AsyncIterator

import pytest

from spark_ledger.bookies.bookie_client import CallFailed, TooLate
from tests.simulation.loop import current, run
from tests.simulation.network import ANY, NetworkFaults, SimNetwork


async def _never(method: str, request: bytes) -> bytes:
    raise AssertionError("nobody calls")


async def _echo(
    _method: str, messages: AsyncIterator[bytes]
) -> AsyncGenerator[tuple[bytes, bytes], None]:
    async for message in messages:
        yield message, b"re: " + message


def _network(**faults: object) -> SimNetwork:
    network = SimNetwork(random.Random(3), NetworkFaults(**faults))  # type: ignore[arg-type]
    network.serve("b:1", _never, streams=_echo)
    return network


def test_messages_of_a_stream_arrive_in_order_however_they_are_delayed():
    async def main() -> None:
        network = _network(slow=0.3, slow_s=(0.1, 5.0))
        stream = network.client("c").stream("b:1", "ReadStream")
        for number in range(50):
            await stream.send(b"%d" % number)
        assert [await stream.receive(100) for _ in range(50)] == [
            b"re: %d" % number for number in range(50)
        ]
        stream.give_up()

    run(main())


@pytest.mark.parametrize("way", [("c", "b:1"), ("b:1", "c"), (ANY, ANY)])
def test_after_a_cut_in_mid_stream_nothing_arrives_even_when_it_is_healed(way):
    async def main() -> None:
        network = _network()
        stream = network.client("c").stream("b:1", "ReadStream")
        await stream.send(b"one")
        assert await stream.receive(1) == b"re: one"
        network.cut(*way)
        await stream.send(b"two")
        await asyncio.sleep(1)
        network.heal()
        await stream.send(b"three")
        began = current().time()
        with pytest.raises(TooLate):
            await stream.receive(2)
        assert current().time() - began == 2

    run(main())


def test_a_caller_hears_that_a_killed_server_reset_the_stream_or_waits_for_his_time():
    async def main() -> None:
        for reset, kind in ((1.0, CallFailed), (0.0, TooLate)):
            network = _network(reset=reset)
            stream = network.client("c").stream("b:1", "ReadStream")
            await stream.send(b"one")
            assert await stream.receive(1) == b"re: one"
            network.down("b:1")
            with pytest.raises(kind):
                await stream.receive(5)

    run(main())


def test_a_stream_to_nobody_is_refused():
    async def main() -> None:
        stream = _network().client("c").stream("nobody:1", "ReadStream")
        await stream.send(b"one")
        with pytest.raises(CallFailed, match="refused"):
            await stream.receive(5)

    run(main())


def test_what_is_held_back_arrives_in_order_when_it_is_let_go():
    async def main() -> None:
        network = _network(delay_s=(0.5, 1.0))
        stream = network.client("c").stream("b:1", "ReadStream")
        await stream.send(b"one")
        network.clog("c", "b:1")
        await stream.send(b"two")
        network.unclog("c", "b:1")
        await stream.send(b"three")
        found = [await stream.receive(10) for _ in range(3)]
        assert found == [b"re: one", b"re: two", b"re: three"]
        stream.give_up()

    run(main())


def test_a_stream_that_is_given_up_ends_at_its_server():
    async def main() -> None:
        ended = asyncio.Event()

        async def serve(
            _method: str, messages: AsyncIterator[bytes]
        ) -> AsyncGenerator[tuple[bytes, bytes], None]:
            async for message in messages:
                yield message, message
            ended.set()

        network = SimNetwork(random.Random(1))
        network.serve("b:1", _never, streams=serve)
        stream = network.client("c").stream("b:1", "ReadStream")
        await stream.send(b"one")
        await stream.receive(1)
        stream.give_up()
        async with asyncio.timeout(5):
            await ended.wait()

    run(main())
