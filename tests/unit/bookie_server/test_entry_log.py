import asyncio

import pytest

from bookie_server.api.entry import EntryHeader, pack_header, payload_crc
from bookie_server.disk.interface import DiskFailed, NoSuchFile
from bookie_server.logs.entry_log import (
    BLOCK_BYTES,
    BadEntryLog,
    EntryLogs,
    LedgerShare,
    decode_footer,
    decode_log_header,
    decode_record,
    decode_record_header,
    encode_footer,
    encode_log_header,
    encode_record_headers,
    held_bytes,
    log_path,
    run_bytes,
    runs,
    write_start,
)
from bookie_server.logs.index import Location
from tests.simulation.disk import SimDisk
from tests.simulation.loop import current, run
from tests.unit.bookie_server.node import CONFIG, KIB, entry

PLACE = Location(7, 3, 5, 64, 69)
HEADER = EntryHeader(7, 3, 2, 400, 40, 5, payload_crc([b"hello"]))
RECORD = encode_record_headers([PLACE])[0] + pack_header(HEADER) + b"hello"


def test_the_bytes_of_a_log_header():
    header = encode_log_header(5)
    assert header[:20].hex() == "534c454c010000000500000000000000ac80d578"
    assert header[20:] == bytes(44)
    decode_log_header(header, 5)


def test_the_bytes_of_a_record():
    assert RECORD[:48].hex() == (
        "534c4552" "0100" "0000" "0700000000000000" "0300000000000000"  # ledger, entry
        "0500000000000000" "4000000000000000" "45000000" "7d14f448"  # log, position, bytes, CRC
    )  # fmt: skip
    assert decode_record_header(RECORD) == PLACE
    assert bytes(decode_record(RECORD, PLACE)) == RECORD[48:]


def test_the_bytes_of_a_footer():
    shares = {9: LedgerShare(1000, 10), 7: LedgerShare(117, 1)}
    footer = encode_footer(5, 4096, shares)
    assert footer.hex() == (
        "0700000000000000" "7500000000000000" "0100000000000000"  # ledger, bytes, entries
        "0900000000000000" "e803000000000000" "0a00000000000000"
        "534c4546" "0100" "0000" "0500000000000000"  # magic, version, reserved, log
        "0010000000000000" "0200000000000000" "3a6dd907" "89fdfe3a"  # map at, ledgers, CRCs
    )  # fmt: skip
    assert decode_footer(5, footer, 4096 + len(footer)) == shares


def test_no_flipped_bit_of_a_record_goes_unnoticed():
    for bit in range(8 * len(RECORD)):
        data = bytearray(RECORD)
        data[bit // 8] ^= 1 << bit % 8
        with pytest.raises(BadEntryLog):
            decode_record(data, PLACE)


def test_no_flipped_bit_of_a_footer_goes_unnoticed():
    footer = encode_footer(5, 4096, {7: LedgerShare(117, 1)})
    for bit in range(8 * len(footer)):
        data = bytearray(footer)
        data[bit // 8] ^= 1 << bit % 8
        with pytest.raises(BadEntryLog):
            decode_footer(5, data, 4096 + len(footer))


@pytest.mark.parametrize(
    "place",
    [PLACE._replace(**other) for other in (
        {"ledger_id": 8}, {"entry_id": 4}, {"log_id": 6}, {"position": 0}, {"entry_bytes": 68},
    )],
)  # fmt: skip
def test_a_record_of_another_place_is_refused(place):
    with pytest.raises(BadEntryLog):
        decode_record(RECORD, place)


def test_a_record_whose_entry_is_another_is_refused():
    other = RECORD[:48] + entry(7, 4, b"hello")
    with pytest.raises(BadEntryLog, match="holds another entry"):
        decode_record(other, PLACE)


@pytest.mark.parametrize("length", [0, 20, 47, 48, 116])
def test_a_record_that_is_cut_off_is_refused(length):
    with pytest.raises(BadEntryLog):
        decode_record(RECORD[:length], PLACE)


def test_headers_of_other_logs_are_refused():
    with pytest.raises(BadEntryLog):
        decode_log_header(encode_log_header(5), 6)
    with pytest.raises(BadEntryLog):
        decode_footer(6, encode_footer(5, 0, {}), 40)
    with pytest.raises(BadEntryLog):
        decode_footer(5, encode_footer(5, 0, {}), 41)


def entries(*keys, payload=b"x" * 1000):
    return ((ledger, e, entry(ledger, e, payload)) for ledger, e in keys)


def test_what_write_returned_for_is_read_after_the_worst_crash():
    async def main():
        disk = SimDisk()
        logs = await EntryLogs.open(disk, CONFIG)
        keys = [(1, e) for e in range(3)] + [(2, 5)]
        places = await logs.write(entries(*keys))
        assert [(p.ledger_id, p.entry_id) for p in places] == keys
        disk.crash("none")
        logs = await EntryLogs.open(disk, CONFIG)
        found = await logs.read(places)
        assert [bytes(each) for each in found] == [e for _, _, e in entries(*keys)]

    run(main())


def test_neighbours_are_read_at_once_and_others_are_found_too():
    async def main():
        disk = SimDisk()
        disk.faults.read_s = (1.0, 1.0)
        logs = await EntryLogs.open(disk, CONFIG)
        places = await logs.write(entries(*[(1, e) for e in range(20)]))
        before = current().time()
        assert len(await logs.read(places)) == 20
        assert current().time() - before < 1.5
        some = await logs.read([places[3], places[9], places[4]])
        assert [bytes(each) for each in some] == [entry(1, e, b"x" * 1000) for e in (3, 9, 4)]

    run(main())


def test_a_full_log_is_closed_with_the_map_of_what_each_ledger_has_in_it():
    async def main():
        disk = SimDisk()
        logs = await EntryLogs.open(disk, CONFIG)
        keys = [(1, e) for e in range(150)] + [(2, e) for e in range(150)]
        places = await logs.write(entries(*keys))
        await logs.close()
        assert {place.log_id for place in places} == {1, 2}
        total = {1: 0, 2: 0}
        for log_id in (1, 2):
            data = disk.durable(log_path(log_id))
            assert len(data) < CONFIG.entry_log_bytes_max + 64 * KIB
            for ledger_id, share in decode_footer(log_id, data, len(data)).items():
                mine = [p for p in places if (p.log_id, p.ledger_id) == (log_id, ledger_id)]
                assert share.entries == len(mine)
                assert share.bytes == sum(48 + p.entry_bytes for p in mine)
                total[ledger_id] += share.entries
        assert total == {1: 150, 2: 150}

    run(main())


def test_a_log_that_many_read_for_the_first_time_is_left_open_once():
    async def main():
        disk = SimDisk()
        logs = await EntryLogs.open(disk, CONFIG)
        (place,) = await logs.write(entries((1, 0)))
        open_plain, durations_s, left_open = disk.open, [1.0, 2.0, 2.5], []

        async def open_slowly(path):
            await asyncio.sleep(durations_s.pop(0))
            file = await open_plain(path)
            left_open.append(file)

            async def close():
                await asyncio.sleep(1.0)
                left_open.remove(file)

            file.close = close
            return file

        disk.open = open_slowly
        await asyncio.gather(*(logs.read([place]) for _ in range(3)))
        assert len(left_open) == 1
        await logs.close()
        assert left_open == []

    run(main())


def test_after_a_restart_a_new_log_is_begun():
    async def main():
        disk = SimDisk()
        for log_id in (1, 2, 3):
            logs = await EntryLogs.open(disk, CONFIG)
            places = await logs.write(entries((1, log_id)))
            assert places[0].log_id == log_id

    run(main())


def test_what_cannot_be_read_is_said_entry_by_entry():
    async def main():
        disk = SimDisk()
        logs = await EntryLogs.open(disk, CONFIG)
        places = await logs.write(entries((1, 0), (1, 1), (1, 2)))
        disk.flip_bit(log_path(1), 8 * (places[1].position + 200))
        gone = places[0]._replace(log_id=9)
        found = await logs.read([*places, gone])
        kinds = [type(each) for each in found]
        assert kinds == [memoryview, BadEntryLog, memoryview, NoSuchFile]

    run(main())


def test_a_failed_sync_is_an_error_of_the_write():
    async def main():
        disk = SimDisk()
        logs = await EntryLogs.open(disk, CONFIG)
        disk.faults.sync_fails = 1
        with pytest.raises(DiskFailed):
            await logs.write(entries((1, 0)))

    run(main())


@pytest.mark.parametrize("away", ["removed", "set aside"])
def test_a_read_that_comes_while_a_log_goes_does_not_keep_its_space(away):
    """An open file keeps the bytes of a removed one until it is closed."""

    async def main():
        disk = SimDisk()
        logs = await EntryLogs.open(disk, CONFIG)
        (place,) = await logs.write(iter([(7, 0, entry(7, 0))]))
        await logs.close()
        logs = await EntryLogs.open(disk, CONFIG)
        remove, rename = disk.remove, disk.rename

        async def slow_remove(path):
            await logs.read([place])
            await remove(path)

        async def slow_rename(old, new):
            await logs.read([place])
            await rename(old, new)

        disk.remove, disk.rename = slow_remove, slow_rename
        await (logs.remove(1) if away == "removed" else logs.set_aside(1))
        disk.remove, disk.rename = remove, rename
        (found,) = await logs.read([place])
        assert isinstance(found, NoSuchFile)

    run(main())


def test_records_with_less_than_a_block_of_filler_between_them_are_read_at_once():
    near = [Location(1, 0, 5, 64, 52), Location(1, 1, 5, 4096, 52), Location(1, 2, 5, 4196, 4000)]
    far = [Location(1, 3, 5, 12_340, 52), Location(1, 4, 6, 12_440, 52)]
    assert list(runs([*near, *far], 1 << 20)) == [near, far[:1], far[1:]]
    assert run_bytes(near) == 4196 + 48 + 4000 - 64


async def written_one_by_one(disk):
    """Six entries, each with a write of its own: the logs, the log's path, entries, places."""
    logs = await EntryLogs.open(disk, CONFIG)
    log = await logs.begin()
    whole = [entry(1, e, bytes(3000)) for e in range(6)]
    places = [(await log.append([(1, e, whole[e])], sync=True))[0] for e in range(6)]
    return logs, log_path(log.log_id), whole, places


def test_entries_that_were_written_one_by_one_are_read_at_once_and_each_checked():
    async def main():
        disk = SimDisk()
        logs, path, whole, places = await written_one_by_one(disk)
        assert [p.position // 4096 for p in places] == list(range(1, 7))
        assert list(runs(places, 1 << 20)) == [places]
        assert [bytes(each) for each in await logs.read(places)] == whole
        disk.flip_bit(path, 8 * (places[2].position + 200))
        read = await logs.read(places)
        assert [type(each) is BadEntryLog for each in read] == [e == 2 for e in range(6)]

    run(main())


def test_a_block_that_cannot_be_read_costs_no_entry_that_was_written_beside_it():
    async def main():
        disk = SimDisk()
        logs, path, whole, places = await written_one_by_one(disk)
        disk.make_unreadable(path, places[2].position)
        read = await logs.read(places)
        assert [isinstance(each, DiskFailed) for each in read] == [e == 2 for e in range(6)]
        assert [bytes(read[e]) for e in (0, 1, 3, 4, 5)] == [whole[e] for e in (0, 1, 3, 4, 5)]

    run(main())


@pytest.mark.parametrize(("payload_bytes", "held"), [(100, 12 * 212), (3000, 11 * 4096 + 3112)])
def test_small_entries_among_much_filler_hold_no_memory_but_their_own(payload_bytes, held):
    async def main():
        disk = SimDisk()
        logs = await EntryLogs.open(disk, CONFIG)
        log = await logs.begin()
        whole = [entry(1, e, bytes(payload_bytes)) for e in range(12)]
        places = [(await log.append([(1, e, whole[e])], sync=True))[0] for e in range(12)]
        read = await logs.read_run(places)
        assert [bytes(each) for each in read] == whole
        buffers = {id(buffer): len(buffer) for buffer in (memoryview(e).obj for e in read)}
        assert sum(buffers.values()) == held == held_bytes(places)

    run(main())


def test_each_record_of_a_synced_write_says_in_which_block_the_write_began():
    async def main():
        disk = SimDisk()
        logs = await EntryLogs.open(disk, CONFIG)
        log = await logs.begin()
        begun = []
        places = []
        for count in (1, 3, 1, 5):
            begun.append(log.file.end)
            written = [(1, e, entry(1, e, bytes(e % 3 * 5000))) for e in range(count)]
            places.append(await log.append(written, sync=True))
        data = disk.content(log_path(log.log_id))
        assert begun[0] == BLOCK_BYTES and all(at % BLOCK_BYTES == 0 for at in begun)
        for start, of_write in zip(begun, places, strict=True):
            assert of_write[0].position == start
            found = [write_start(data[each.position :], each.position) for each in of_write]
            assert found == [start] * len(of_write)

    run(main())


def test_a_record_that_is_not_synced_at_once_says_that_it_begins_a_write():
    async def main():
        disk = SimDisk()
        logs = await EntryLogs.open(disk, CONFIG)
        log = await logs.begin()
        places = await log.append([(1, e, entry(1, e, bytes(5000))) for e in range(3)])
        data = disk.content(log_path(log.log_id))
        for each in places:
            start = write_start(data[each.position :], each.position)
            assert start == each.position // BLOCK_BYTES * BLOCK_BYTES

    run(main())


def test_where_a_write_began_is_covered_by_the_checksum_of_the_records_header():
    (head,) = encode_record_headers([Location(1, 2, 3, 5 * BLOCK_BYTES, 100)], [4])
    assert write_start(head, 5 * BLOCK_BYTES) == BLOCK_BYTES
    assert decode_record_header(head) == Location(1, 2, 3, 5 * BLOCK_BYTES, 100)
    other = head[:6] + b"\x03" + head[7:]
    with pytest.raises(BadEntryLog, match="CRC"):
        decode_record_header(other)
