"""Entries whose locations a bookie on this host gives before they are asked for: real files."""

import pytest

from bookie_server.api.entry import unpack_entry
from bookie_server.api.status import StopReason
from tests.unit.spark_ledger.bookies.local_files import (
    HARMS,
    LIES,
    Bookie,
    Rig,
    lies,
    of_another_bookie,
    on_this_host,
)

AHEAD = {"ahead": (2, 4, 5)}


def test_what_was_located_ahead_is_read_without_a_question(tmp_path):
    async def test(rig: Rig) -> None:
        await rig.read(1, 1, **AHEAD)
        found = [*(await rig.read(2, 2, further=[(4, 4)])).results, *(await rig.read(5, 5)).results]
        assert [bytes(result.checked.payload) for result in found] == [
            unpack_entry(rig.bookie.entries[number]).payload for number in (2, 4, 5)
        ]
        assert rig.bookie.asked == [True]
        await rig.read(2, 2)
        assert rig.bookie.asked == [True, True], "a location is used once"

    on_this_host(test, tmp_path)


def test_what_is_read_at_locations_given_ahead_ends_where_its_bytes_do(tmp_path):
    async def test(rig: Rig) -> None:
        await rig.read(1, 1, **AHEAD)
        short = await rig.read(4, 5, max_bytes=1)
        assert (len(short.results), short.stop) == (1, StopReason.BYTE_LIMIT)
        rest = await rig.read(5, 5, max_bytes=1)
        assert (len(rest.results), rest.stop) == (1, StopReason.END_OF_RANGE)
        assert rig.bookie.asked == [True]

    on_this_host(test, tmp_path)


def test_a_read_of_which_one_location_is_not_known_is_asked_of_the_bookie(tmp_path):
    async def test(rig: Rig) -> None:
        await rig.read(1, 1, **AHEAD)
        await rig.read(2, 4)
        assert rig.bookie.asked == [True, True]

    on_this_host(test, tmp_path)


def test_a_bookie_that_locates_nothing_ahead_is_asked_each_time(tmp_path):
    async def test(rig: Rig) -> None:
        rig.bookie.tells_ahead = False
        await rig.read(1, 1, **AHEAD)
        await rig.read(2, 2)
        assert rig.bookie.asked == [True, True]

    on_this_host(test, tmp_path)


def moved(bookie: Bookie) -> None:
    """Compacted: its log is gone, and it lies in another one."""
    bookie.file.rename(bookie.file.with_name("0000000002.log"))
    for number, location in bookie.locations.items():
        bookie.locations[number] = location._replace(file="entrylog/0000000002.log")


async def payloads(rig: Rig) -> list[bytes]:
    """Of what AHEAD tells, read at once."""
    results = (await rig.read(2, 2, further=[(4, 5)])).results
    return [bytes((each.checked or unpack_entry(each.entry)).payload) for each in results]


def stored(rig: Rig) -> list[bytes]:
    return [bytes(unpack_entry(rig.bookie.entries[number]).payload) for number in (2, 4, 5)]


@pytest.mark.parametrize("harm", [h for h in HARMS if "identity" not in h.__name__])
def test_a_file_that_went_wrong_after_it_was_located_ahead_is_left_alone(tmp_path, harm):
    async def test(rig: Rig) -> None:
        await rig.read(1, 1, **AHEAD)
        harm(rig.bookie)
        wrong = harm is not of_another_bookie  # the directory is known
        assert await payloads(rig) == stored(rig)
        assert rig.bookie.asked == [True, *([True, False] if wrong else [])]
        assert await rig.asked() == [not wrong]

    (tmp_path / "disk").mkdir()
    on_this_host(test, tmp_path / "disk")


@pytest.mark.parametrize("told", [moved, *(lies(**wrong) for wrong in LIES)],
    ids=["moved", *map(str, LIES)],
)  # fmt: skip
def test_where_an_entry_is_not_at_the_location_given_ahead_the_bookie_is_asked_for_it_again(
    tmp_path, told
):
    async def test(rig: Rig) -> None:
        locations = dict(rig.bookie.locations)
        if told is not moved:
            told(rig.bookie)
        await rig.read(1, 1, **AHEAD)
        rig.bookie.locations = locations
        if told is moved:
            moved(rig.bookie)
        assert await payloads(rig) == stored(rig)
        assert rig.bookie.asked == [True, True], "which is no failure of its files"

    on_this_host(test, tmp_path)
