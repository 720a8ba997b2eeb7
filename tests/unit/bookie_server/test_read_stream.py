"""What a bookie sends in a stream, when it waits, and what it holds while it does."""

import asyncio
from collections.abc import Awaitable, Callable
from contextlib import aclosing

from bookie_server.api import codec
from bookie_server.api.status import Status, StopReason
from tests.simulation.loop import run
from tests.unit.bookie_server.node import KIB, Node, entry
from tests.unit.bookie_server.stream_caller import Caller

SIZE = 4 * KIB


def streaming(test: Callable[[Node], Awaitable[None]], count: int = 12) -> None:
    async def main() -> None:
        node = await Node().start()
        await node.create_ledger(1)
        await node.add_all(*(entry(1, number, bytes(SIZE)) for number in range(count)))
        await test(node)
        assert node.bookie.responses.used == 0
        await node.bookie.stop()

    run(main())


def test_a_stream_goes_on_where_the_response_before_stopped_to_the_end_of_the_range():
    async def test(node: Node) -> None:
        caller = Caller(node).begin(2, 9, 1 << 20)
        found, stops = [], []
        while (response := await caller.next()) is not None:
            found += [result.entry for result in response.results]
            stops.append(response.stop)
            if response.stop is StopReason.END_OF_RANGE:
                caller.end()
        assert found == [entry(1, number, bytes(SIZE)) for number in range(2, 10)]
        assert stops == [StopReason.BYTE_LIMIT] * (len(stops) - 1) + [StopReason.END_OF_RANGE]
        assert len(stops) > 2

    streaming(test)


def test_nothing_is_sent_without_credit_and_more_as_more_is_granted():
    async def test(node: Node) -> None:
        caller = Caller(node).begin(0, 11, 2 * SIZE)
        sent = 0
        while (response := await caller.next()) is not None:
            sent += len(response.results)
        assert 2 <= sent <= 3
        caller = Caller(node).begin(0, 11, 1)
        first = await caller.next()
        assert first is not None and len(first.results) == 1
        async with aclosing(caller.replies):
            following = asyncio.ensure_future(anext(caller.replies))
            await asyncio.sleep(1)
            assert not following.done()
            caller.grant(SIZE * 2)
            _, reply = await following
            reply.sent()
            assert len(codec.decode_response("Read", reply.data).results) >= 1

    streaming(test)


def test_an_unknown_or_absent_entry_is_told_as_by_read():
    async def test(node: Node) -> None:
        caller = Caller(node).begin(11, 14, 1 << 20)
        response = await caller.next()
        assert response is not None
        statuses = [result.status for result in response.results]
        assert statuses == [Status.OK] + [Status.NO_SUCH_ENTRY] * 3
        await caller.replies.aclose()

    streaming(test)


def test_a_stream_that_fences_or_has_no_range_or_several_is_refused():
    async def test(node: Node) -> None:
        for caller in (
            Caller(node).begin(0, 1, 1000, fence=True),
            Caller(node).begin(0, 1, 1000, further=[(3, 3)]),
            Caller(node),
        ):
            caller.grant(1000)
            response = await caller.next()
            assert response is not None and response.status is Status.BAD_REQUEST
            await caller.replies.aclose()
        caller = Caller(node)
        caller.send(b"\xff\xff")
        response = await caller.next()
        assert response is not None and response.status is Status.BAD_REQUEST
        await caller.replies.aclose()
        assert await node.add(entry(1, 12, bytes(SIZE))) == [Status.OK], "not fenced"

    streaming(test)


def test_a_stream_for_another_bookie_ends_with_its_refusal():
    async def test(node: Node) -> None:
        caller = Caller(node).begin(0, 5, 1 << 20, bookie_id="another")
        response = await caller.next()
        assert response is not None and response.status is Status.WRONG_BOOKIE
        assert await caller.next() is None
        await caller.replies.aclose()

    streaming(test)


def test_without_room_for_replies_the_answer_is_busy():
    async def test(node: Node) -> None:
        node.bookie.responses.take(node.config.read_pending_bytes_max)
        caller = Caller(node).begin(0, 5, 1 << 20)
        response = await caller.next()
        assert response is not None and response.status is Status.BUSY
        assert response.retry_after_ms > 0
        await caller.replies.aclose()
        node.bookie.responses.give_back(node.config.read_pending_bytes_max)

    streaming(test)


def test_what_is_ready_and_not_sent_counts_and_is_given_back_when_the_caller_gives_up():
    async def test(node: Node) -> None:
        caller = Caller(node).begin(0, 11, 1 << 20)
        _, reply = await anext(caller.replies)
        await asyncio.sleep(1)
        ready = node.bookie.responses.used
        assert len(reply.data) < ready <= 3 * len(reply.data), "one being sent, one read ahead"
        await caller.replies.aclose()
        reply.sent()

    streaming(test)


def test_a_caller_that_ends_without_giving_more_credit_ends_the_stream():
    async def test(node: Node) -> None:
        caller = Caller(node).begin(0, 11, 1)
        assert await caller.next() is not None
        caller.end()
        async with asyncio.timeout(1):
            assert [each async for each in caller.replies] == []

    streaming(test)
