"""Entry logs read through: every whole record, whatever is damaged around it."""

import random

import pytest

from bookie_server.logs.entry_log import BLOCK_BYTES, EntryLogs, log_path, record_end
from bookie_server.logs.scan import CHUNK_BYTES, scan
from tests.kit.settings import with_settings
from tests.simulation.disk import SimDisk
from tests.simulation.loop import run
from tests.unit.bookie_server.node import CONFIG, entry

ONE_LOG = with_settings(CONFIG, entry_log_bytes_max=1 << 30)


async def log_with(disk, *entries):
    """Log 1 with the entries, without footer; their locations."""
    logs = await EntryLogs.open(disk, ONE_LOG)
    return await logs.write((ledger, e, data) for ledger, e, data in entries)


def some(count, payload=1000, ledger=1):
    return [(ledger, e, entry(ledger, e, bytes([e % 251]) * payload)) for e in range(count)]


async def read_through(disk, end=None):
    file = await disk.open(log_path(1))
    records, damage = [], []
    async for chunk in scan(file, 1, file.end if end is None else end):
        records += [(r.location, bytes(r.entry)) for r in chunk.records]
        damage += chunk.damage
    return records, damage


def test_a_scan_finds_every_record_in_its_place():
    async def main():
        disk = SimDisk()
        written = [*some(700), (2, 5, entry(2, 5, b"y"))]
        places = await log_with(disk, *written)
        records, damage = await read_through(disk)
        assert damage == []
        assert records == [(p, data) for p, (_, _, data) in zip(places, written, strict=True)]

    run(main())


def test_a_record_larger_than_a_chunk_is_read_whole():
    async def main():
        disk = SimDisk()
        written = [(1, 0, entry(1, 0, bytes(3 * CHUNK_BYTES))), *some(3, ledger=2)]
        places = await log_with(disk, *written)
        records, damage = await read_through(disk)
        assert [r[0] for r in records] == places
        assert damage == []

    run(main())


def test_only_one_chunk_is_asked_for_at_a_time():
    async def main():
        disk = SimDisk()
        await log_with(disk, *some(3000))
        file = await disk.open(log_path(1))
        lengths, plain = [], file.read

        async def read(position, length):
            lengths.append(length)
            return await plain(position, length)

        file.read = read
        async for chunk in scan(file, 1, file.end):
            assert len(chunk.records) <= 512
        assert max(lengths) <= CHUNK_BYTES

    run(main())


@pytest.mark.parametrize("where", ["header", "payload"])
def test_a_damaged_record_is_named_and_all_others_are_found(where):
    async def main():
        disk = SimDisk()
        places = await log_with(disk, *some(20))
        at = places[7].position + (9 if where == "header" else 300)
        disk.flip_bit(log_path(1), 8 * at)
        records, damage = await read_through(disk)
        assert [r[0] for r in records] == [p for p in places if p.entry_id != 7]
        (bad,) = damage
        assert (bad.start, bad.end) == (places[7].position, places[8].position)
        assert bad.location == (places[7] if where == "payload" else None)

    run(main())


def test_a_lost_sector_costs_the_records_in_it_and_no_others():
    async def main():
        disk = SimDisk()
        places = await log_with(disk, *some(40))
        inode = disk.inode_of(log_path(1))
        inode.cache[8192:12288] = bytes(4096)
        records, damage = await read_through(disk)
        lost = [p for p in places if p.position < 12288 and p.position + 1112 > 8192]
        assert [r[0] for r in records] == [p for p in places if p not in lost]
        assert damage

    run(main())


def test_a_log_cut_off_anywhere_gives_its_whole_records():
    async def main():
        rng = random.Random(3)
        for _ in range(20):
            disk = SimDisk()
            places = await log_with(disk, *some(30))
            length = rng.randrange(1, len(disk.content(log_path(1))))
            disk.truncate(log_path(1), length)
            records, _ = await read_through(disk)
            whole = [p for p in places if p.position + 48 + p.entry_bytes <= length]
            assert [r[0] for r in records] == whole

    run(main())


def test_a_record_of_another_log_or_place_is_not_taken_for_one():
    async def main():
        disk = SimDisk()
        places = await log_with(disk, *some(20))
        inode = disk.inode_of(log_path(1))
        third, ninth = places[3].position, places[9].position
        inode.cache[ninth : ninth + 1112] = inode.cache[third : third + 1112]
        records, damage = await read_through(disk)
        assert [r[0] for r in records] == [p for p in places if p.entry_id != 9]
        assert len(damage) == 1

    run(main())


def test_a_payload_that_looks_like_a_record_is_not_one():
    async def main():
        disk = SimDisk()
        inner = disk.content
        places = await log_with(disk, *some(1))
        copy = inner(log_path(1))[places[0].position :][:1112]
        other = SimDisk()
        places = await log_with(other, (1, 0, entry(1, 0, b"x" * 100 + copy)), *some(3, ledger=2))
        other.flip_bit(log_path(1), 8 * (places[0].position + 5))
        records, damage = await read_through(other)
        assert [r[0] for r in records] == places[1:]
        assert len(damage) == 1

    run(main())


def test_random_damage_never_ends_a_scan_or_lets_a_false_record_through():
    async def main():
        for seed in range(60):
            rng = random.Random(seed)
            disk = SimDisk()
            written = some(60, payload=rng.choice([10, 900, 5000]))
            places = await log_with(disk, *written)
            truth = dict(zip(places, [data for _, _, data in written], strict=True))
            cache = disk.inode_of(log_path(1)).cache
            for _ in range(rng.randrange(1, 6)):
                at, length = rng.randrange(len(cache)), rng.choice([1, 100, 512, 4096])
                filler = rng.choice([bytes(length), rng.randbytes(length)])
                cache[at : at + length] = filler[: len(cache) - at]
            records, damage = await read_through(disk)
            assert all(truth[location] == data for location, data in records)
            lost = [p for p in places if p not in dict(records)]
            for place in lost:
                end = place.position + 48 + place.entry_bytes
                assert any(b.start < end and b.end > place.position for b in damage) or not any(
                    cache[place.position : place.position + 48]
                )

    run(main())


def test_a_log_whose_first_bytes_are_damaged_is_read_all_the_same():
    async def main():
        disk = SimDisk()
        places = await log_with(disk, *some(5))
        disk.flip_bit(log_path(1), 3)
        records, damage = await read_through(disk)
        assert [r[0] for r in records] == places
        assert [(bad.start, bad.end) for bad in damage] == [(0, 64)]

    run(main())


async def direct_log(disk, *counts):
    """A log of as many writes as there are counts, with so many entries each; their locations by
    write."""
    logs = await EntryLogs.open(disk, ONE_LOG)
    log = await logs.begin()
    places = []
    for count in counts:
        first = sum(map(len, places))
        written = [(1, e, entry(1, e, bytes([e]) * 6000)) for e in range(first, first + count)]
        places.append(await log.append(written, sync=True))
    return places


async def scanned_from(disk, start):
    file = await disk.open(log_path(1))
    return [chunk async for chunk in scan(file, 1, file.end, start)]


def test_a_scan_from_where_a_record_ends_gives_what_comes_after_it_and_where_its_write_began():
    async def main():
        disk = SimDisk()
        writes = await direct_log(disk, 1, 3, 2)
        begun = {each: of_write[0].position for of_write in writes for each in of_write}
        places = list(begun)
        for number, place in enumerate([None, *places]):
            start = BLOCK_BYTES if place is None else record_end(place)
            chunks = await scanned_from(disk, start)
            found = [record for chunk in chunks for record in chunk.records]
            assert [record.location for record in found] == places[number:]
            assert [record.write_start for record in found] == [*begun.values()][number:]
            assert not any(chunk.damage for chunk in chunks)

    run(main())


def test_a_scan_from_a_position_does_not_look_at_what_lies_before():
    async def main():
        disk = SimDisk()
        writes = await direct_log(disk, 1, 1)
        for path_position in (3, writes[0][0].position + 10):
            disk.flip_bit(log_path(1), 8 * path_position)
        (chunk,) = await scanned_from(disk, record_end(writes[0][0]))
        assert not chunk.damage and [r.location for r in chunk.records] == writes[1]
        assert (await read_through(disk))[1]

    run(main())


def test_a_scan_from_beyond_the_end_finds_nothing():
    async def main():
        disk = SimDisk()
        await direct_log(disk, 1)
        assert await scanned_from(disk, 1 << 20) == []

    run(main())
