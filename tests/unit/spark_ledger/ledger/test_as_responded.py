"""Responses in the order of arrival."""

import asyncio
import gc
import warnings
from contextlib import aclosing

from spark_ledger.ledger.cluster import responses_on_arrival


def test_requests_that_are_given_up_before_they_began_are_no_forgotten_coroutines() -> None:
    begun = []

    async def request(number: int) -> int:
        begun.append(number)
        return number

    async def ask() -> None:
        async with aclosing(responses_on_arrival([request(0), request(1)])) as responses:
            async for _ in responses:
                raise AssertionError("cancelled before the first response")

    async def end_at_once() -> None:
        asking = asyncio.ensure_future(ask())
        await asyncio.sleep(0)
        for task in asyncio.all_tasks() - {asyncio.current_task()}:
            task.cancel()  # as the end of a process does
        await asyncio.gather(asking, return_exceptions=True)

    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        asyncio.run(end_at_once())
        gc.collect()
    assert begun == []
    assert [str(one.message) for one in told] == []


def test_responses_come_in_the_order_of_arrival_with_the_index_of_their_request() -> None:
    async def request(number: int, turns: int) -> int:
        for _ in range(turns):
            await asyncio.sleep(0)
        return number

    async def ask() -> list[tuple[int, int]]:
        async with aclosing(responses_on_arrival([request(10, 5), request(11, 0)])) as responses:
            return [one async for one in responses]

    assert asyncio.run(ask()) == [(1, 11), (0, 10)]
