"""A bookie is asked about entries window by window: where the next one begins."""

import asyncio

from bookie_server.api.messages import EntryResult, ReadResponse, StoredResponse
from bookie_server.api.status import Status
from spark_ledger.repair.copies import ask_in_windows


def walked(entries, responses, **limits):
    """(asked, window) of each of the responses, in order."""
    asked = []

    async def ask(first, last):
        asked.append((first, last))
        return responses[len(asked) - 1]

    async def run():
        return [window async for window, _ in ask_in_windows(entries, ask, **limits)]

    return list(zip(asked, asyncio.run(run()), strict=True))


def results(count):
    return ReadResponse(Status.OK, results=[EntryResult(Status.OK, b"")] * count)


def test_after_a_response_that_ends_early_the_next_request_begins_where_it_ended():
    steps = walked(range(3, 10), [results(2), results(4), results(9)])
    assert steps == [((3, 9), range(3, 5)), ((5, 9), range(5, 9)), ((9, 9), range(9, 10))]


def test_a_refusal_is_about_all_entries_that_were_asked():
    refused = ReadResponse(Status.NO_SUCH_LEDGER)
    steps = walked(range(10), [refused, results(3), refused], at_once=4)
    assert steps == [((0, 3), range(4)), ((4, 7), range(4, 7)), ((7, 9), range(7, 10))]


def test_a_response_about_the_index_reaches_as_far_as_it_states():
    steps = walked(range(10), [StoredResponse(Status.OK, through=6), StoredResponse(Status.OK)])
    assert steps == [((0, 9), range(7)), ((7, 9), range(7, 10))]
