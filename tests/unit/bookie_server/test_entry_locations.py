"""A client that asks for locations gets those of large entries instead of the entries."""

import asyncio
import os
import random
from uuid import UUID

import pytest

from bookie_server.api import messages as m
from bookie_server.api.status import Status, StopReason
from bookie_server.bookie import Bookie
from bookie_server.config import BookieConfig
from bookie_server.disk.identity import Identity
from bookie_server.logs.entry_log import log_path
from bookie_server.start.opening import BookieDirectories
from bookie_server.storage.directories import Directories, JournalDirectory, LedgerDirectory
from bookie_server.storage.entry_reader import Undeliverable
from tests.kit.nodes import on_a_node
from tests.kit.settings import with_settings
from tests.simulation.disk import SimDisk
from tests.simulation.index import SimIndex
from tests.unit.bookie_server.entry_reading import SMALL, Reading, reading
from tests.unit.bookie_server.node import CONFIG, ID, KIB, Node, entry

LEAST = 2 * KIB
TELLING = with_settings(SMALL, place_bytes_min=LEAST)
HERE, THERE = "/disks/here", "/disks/there"
FLUSHED_S = 20
IDS = range(8)
OK, ABSENT, UNKNOWN = Status.OK, Status.NO_SUCH_ENTRY, Status.IO_ERROR


def of(entry_id: int, *, large: bool = True, ledger_id: int = 1) -> bytes:
    """An entry of LEAST bytes, or of one fewer."""
    payload_bytes = LEAST - len(entry(1, 0, b"")) - (not large)
    return entry(ledger_id, entry_id, bytes([entry_id % 251]) * payload_bytes)


async def stored(r: Reading, *numbers: int, large: bool = True, at: int = 0):
    """In a log, at once; `r` has a path."""
    places = []
    for number in numbers:
        (place,) = await r.store_entries((1, number), payload=of(number, large=large)[64:], at=at)
        places.append(place)
    r.stores[at].path = getattr(r.stores[at], "path", HERE)
    return places


async def told(r: Reading, ids=IDS, max_bytes: int = 1 << 20) -> dict:
    return (await r.reader.read(1, ids, max_bytes, locate=True)).entries


def lies_at(r: Reading, location: m.EntryLocation) -> bytes:
    """What the disk has where a client is to look."""
    assert (type(location), location.directory) == (m.EntryLocation, HERE)
    content: bytes = r.disk.content(location.file)
    return bytes(content[location.position : location.position + location.entry_bytes])


# -- of the reader of entries -----------------------------------------------------------------


def test_a_location_is_where_the_bytes_of_the_entry_are():
    async def test(r: Reading) -> None:
        await stored(r, *IDS)
        found = await told(r)
        assert [lies_at(r, found[number]) for number in IDS] == [of(number) for number in IDS]
        assert r.reads == [], "the bookie reads nothing of what it tells"

    reading(test, TELLING)


def test_the_bytes_are_sent_to_a_client_that_does_not_ask_for_locations():
    async def test(r: Reading) -> None:
        await stored(r, 0, 1)
        assert await r.read(0, 1) == {0: of(0), 1: of(1)}

    reading(test, TELLING)


def test_entries_below_the_least_are_sent_between_those_that_are_told_of_in_their_order():
    async def test(r: Reading) -> None:
        for number in IDS:
            await stored(r, number, large=number % 3 == 0)
        found = await told(r)
        assert list(found) == [*IDS]
        for number in IDS:
            if number % 3 == 0:
                assert lies_at(r, found[number]) == of(number)
            else:
                assert found[number] == of(number, large=False)

    reading(test, TELLING)


@pytest.mark.parametrize("least", [0, LEAST + 1])
def test_nothing_is_told_of_where_the_least_is_nothing_or_more_than_the_entry_has(least):
    async def test(r: Reading) -> None:
        await stored(r, 0)
        assert await told(r) == {0: of(0)}

    reading(test, with_settings(TELLING, place_bytes_min=least))


def test_only_entries_of_directories_that_have_a_path_are_told_of():
    async def test(r: Reading) -> None:
        r.stores.append(await r.store(SimDisk(random.Random(1))))
        r.stores[1].path = ""
        await stored(r, 0, 2)
        await stored(r, 1, 3, at=1)
        found = await told(r)
        assert list(found) == [0, 1, 2, 3]
        assert (lies_at(r, found[0]), lies_at(r, found[2])) == (of(0), of(2))
        assert (found[1], found[3]) == (of(1), of(3))

    reading(test, TELLING)


def test_of_two_directories_that_hold_an_entry_the_location_in_the_later_is_told():
    async def test(r: Reading) -> None:
        r.stores.append(await r.store(SimDisk(random.Random(1))))
        r.stores[1].path = THERE
        await stored(r, 0)
        await stored(r, 0, at=1)
        assert (await told(r))[0].directory == THERE

    reading(test, TELLING)


def test_an_entry_in_the_write_cache_is_sent_whatever_an_older_location_says():
    async def test(r: Reading) -> None:
        await stored(r, 0, 1)
        newer = entry(1, 0, b"newer" * KIB)
        r.cache.active.put(1, 0, newer)
        found = await told(r)
        assert found[0] == newer
        assert lies_at(r, found[1]) == of(1)

    reading(test, TELLING)


def test_what_is_told_counts_towards_the_bytes_of_an_answer_as_if_it_were_sent():
    async def test(r: Reading) -> None:
        await stored(r, *IDS)
        for max_bytes, count in ((1, 1), (LEAST, 1), (LEAST + 1, 2), (3 * LEAST, 3)):
            answer = await r.reader.read(1, IDS, max_bytes, locate=True)
            assert (list(answer.entries), answer.known_through) == ([*IDS[:count]], count - 1)
        r.cache.active.put(1, 8, of(8))
        await stored(r, 9, 10)
        answer = await r.reader.read(1, range(8, 11), 2 * LEAST, locate=True)
        assert (list(answer.entries), answer.known_through) == ([8, 9], 9)

    reading(test, with_settings(TELLING, read_cache_bytes=0))


def test_nothing_is_read_ahead_of_a_reader_who_reads_himself():
    async def test(r: Reading) -> None:
        await stored(r, *range(16))
        for first in (0, 2, 4):
            await told(r, range(first, first + 2))
            await asyncio.sleep(1)
        assert r.reads == []
        for first in (6, 8):  # as a reader who does not is read ahead for
            await r.read(first, first + 1)
            await asyncio.sleep(1)
        assert (1, 10) in r.reads

    reading(test, TELLING)


async def ahead(r: Reading, ids=IDS) -> list[bytes]:
    """The bytes at the locations that are told ahead."""
    return [lies_at(r, location) for location in await r.reader.locations(1, ids)]


def test_locations_are_told_ahead_of_all_that_lie_in_logs_without_reading_them():
    async def test(r: Reading) -> None:
        await stored(r, *IDS)
        assert await ahead(r) == [of(number) for number in IDS]
        assert await ahead(r, (1, 4, 6)) == [of(number) for number in (1, 4, 6)]
        assert r.reads == []

    reading(test, TELLING)


@pytest.mark.parametrize("what", ["small", "absent", "cached", "just read"])
def test_locations_are_told_ahead_up_to_the_first_that_has_none(what):
    async def test(r: Reading) -> None:
        await stored(r, 0, 1, 2, 4, 5)
        if what == "small":
            await stored(r, 3, large=False)
        elif what == "cached":
            await stored(r, 3)
            r.cache.active.put(1, 3, of(3))
        elif what == "just read":
            await stored(r, 3)
            await r.read(3, 3)
        assert await ahead(r) == [of(0), of(1), of(2)]

    reading(test, TELLING)


def test_an_entry_that_moves_while_it_is_looked_up_is_told_of_where_it_lies_then():
    async def test(r: Reading) -> None:
        r.stores.append(await r.store(SimDisk(random.Random(1))))
        r.stores[1].path = THERE
        await stored(r, 0, at=1)
        index_range = r.stores[1].index.range

        async def moves_meanwhile(*args):
            r.stores[1].index.range = index_range
            await stored(r, 0)
            r.reader.note_move()
            await r.stores[1].index.delete(1, [0])
            return await index_range(*args)

        r.stores[1].index.range = moves_meanwhile
        assert lies_at(r, (await told(r))[0]) == of(0)

    reading(test, TELLING)


def test_a_damaged_entry_is_told_of_and_is_undeliverable_to_who_then_asks_for_its_bytes():
    async def test(r: Reading) -> None:
        (place,) = await stored(r, 0)
        r.rot(log_path(place.log_id), place.position + 200)
        assert lies_at(r, (await told(r))[0]) != of(0)
        assert r.quarantined == [], "nobody has read it"
        assert isinstance((await r.read(0, 0))[0], Undeliverable)
        assert r.quarantined == [(1, 0)]

    reading(test, TELLING)


# -- of the bookie ----------------------------------------------------------------------------


class Telling(Node):
    """A node whose ledger directory has a path."""

    async def start(self) -> "Telling":
        index = await SimIndex.open(self.ledger_disk)
        directories = Directories(
            [JournalDirectory("journal-1", self.journal_disk)],
            [LedgerDirectory("ledger-1", self.ledger_disk, index, path=HERE)],
        )
        self.bookie = await Bookie.start(ID, directories, self.store.session("b"), self.config)
        return self


async def with_entries(*entries: bytes, least: int = LEAST):
    """Its logs have the entries."""
    node = await Telling(with_settings(CONFIG, place_bytes_min=least)).start()
    await node.create_ledger(1)
    for at in range(0, len(entries), 16):  # what fits into its queue
        await node.add_all(*entries[at : at + 16])
    await asyncio.sleep(FLUSHED_S)
    return node


def located(response: m.ReadResponse) -> list[int]:
    return [at for at, result in enumerate(response.results) if result.location is not None]


def test_a_bookie_gives_locations_only_where_they_are_asked_for_and_never_with_a_fence():
    async def test(node: Telling) -> None:
        assert located(await node.read(1, 0, 2, locations=True)) == [0, 1, 2]
        for asked in ({"fence": True, "locations": True}, {"fence": True}, {}):
            response = await node.read(1, 0, 2, **asked)
            assert [bytes(result.entry) for result in response.results] == [of(n) for n in range(3)]
            assert located(response) == []

    on_a_node(test, with_entries(of(0), of(1), of(2)))


def test_a_bookie_gives_locations_ahead_only_to_who_asks_for_locations_and_sends_none_of_those():
    async def test(node: Telling) -> None:
        asked = {"ahead": [(2, 3), (5, 6)]}
        response = await node.read(1, 0, 0, locations=True, **asked)
        assert [result.location is not None for result in response.results] == [True]
        alone = await node.read(1, 2, 3, locations=True, further=[(5, 6)])
        assert response.ahead == [result.location for result in alone.results]
        assert response.stop is StopReason.END_OF_RANGE
        for more in ({}, {"locations": True, "fence": True}):
            response = await node.read(1, 0, 0, **asked, **more)
            assert (len(response.results), list(response.ahead)) == (1, [])

    on_a_node(test, with_entries(*(of(number) for number in range(8))))


def test_a_bookie_whose_setting_is_nothing_gives_no_location():
    async def test(node: Telling) -> None:
        assert located(await node.read(1, 0, 0, locations=True)) == []

    on_a_node(test, with_entries(of(0), least=0))


def test_an_answer_with_locations_says_of_every_entry_what_one_without_says():
    async def test(node: Telling) -> None:
        await node.add_all(of(7))  # in memory
        for asked in ({}, {"further": [(3, 3), (5, 9)]}, {"max_bytes": 3 * LEAST}):
            last = 0 if "further" in asked else 9
            plain = await node.read(1, 0, last, **asked)
            answer = await node.read(1, 0, last, locations=True, **asked)
            assert [r.status for r in answer.results] == [r.status for r in plain.results]
            assert (answer.stop, answer.last_add_confirmed) == (
                plain.stop,
                plain.last_add_confirmed,
            )
            for result, by_wire in zip(answer.results, plain.results, strict=True):
                if (at := result.location) is not None:
                    found = node.ledger_disk.content(at.file)[at.position : at.end]
                    assert bytes(found) == bytes(by_wire.entry)
                    assert not result.entry
                else:
                    assert result == by_wire
        assert answer.stop is StopReason.BYTE_LIMIT

    on_a_node(
        test, with_entries(*(of(number, large=number != 3) for number in range(7) if number != 2))
    )


def test_what_is_not_there_is_denied_or_in_limbo_unknown_between_locations():
    async def test(node: Telling) -> None:
        response = await node.read(1, 0, 2, locations=True)
        assert [r.status for r in response.results] == [OK, ABSENT, OK]
        node.storage.quarantine(1, 1, "a test says so")
        response = await node.read(1, 0, 2, locations=True)
        assert [r.status for r in response.results] == [OK, Status.LIMBO, OK]
        assert located(response) == [0, 2]
        assert (await node.read(77, 0, 0, locations=True)).status is Status.NO_SUCH_LEDGER

    on_a_node(test, with_entries(of(0), of(2)))


def test_a_small_entry_that_is_damaged_is_unknown_between_locations():
    async def test(node: Telling) -> None:
        small = of(1, large=False)
        for path in node.files(node.ledger_disk, "entrylog"):
            at = bytes(node.ledger_disk.content(path)).find(small)
            if at >= 0:
                node.ledger_disk.flip_bit(path, 8 * (at + 100))
        response = await node.read(1, 0, 2, locations=True)
        assert [r.status for r in response.results] == [OK, UNKNOWN, OK]
        assert located(response) == [0, 2]

    on_a_node(test, with_entries(of(0), of(1, large=False), of(2)))


def test_an_answer_names_the_file_that_compaction_has_made_once_the_index_points_there():
    count = CONFIG.entry_log_bytes_max // LEAST + 1  # the first log is full

    async def test(node: Telling) -> None:
        (before,) = (await node.read(1, 0, 0, locations=True)).results
        await node.add_all(of(count))
        await asyncio.sleep(FLUSHED_S)
        await node.bookie.reclaim.compact(1.1)
        (after,) = (await node.read(1, 0, 0, locations=True)).results
        assert before.location.file not in node.files(node.ledger_disk, "entrylog")
        content = node.ledger_disk.content(after.location.file)
        assert bytes(content[after.location.position :][: after.location.entry_bytes]) == of(0)

    on_a_node(test, with_entries(*map(of, range(count))))


@pytest.mark.parametrize(("name", "is_told"), [(b"caf\xc3\xa9", True), (b"caf\xe9", False)])
def test_a_directory_that_really_lies_where_no_text_can_say_is_told_of_to_nobody(
    tmp_path, name, is_told
):
    really = os.fsencode(tmp_path) + b"/" + name
    os.mkdir(really)
    (tmp_path / "link").symlink_to(os.fsdecode(really))
    config = BookieConfig(
        journal_directory=str(tmp_path / "journal"), ledger_directory=str(tmp_path / "link" / "1")
    )

    async def main() -> None:
        disks = BookieDirectories(config)
        await disks.format(Identity(str(UUID(int=1)), str(UUID(int=2))))
        (directory,) = (await disks.open()).ledgers
        await directory.index.close()
        assert directory.path == (os.fsdecode(really) + "/1" if is_told else "")

    asyncio.run(main())
