import asyncio

import pytest

from bookie_server.disk import DiskFailed
from bookie_server.entry_index import (
    EVERY_LEDGER,
    BadIndexRecord,
    LedgerState,
    Location,
    decode_ledger_state,
    decode_location,
    encode_ledger_state,
    encode_location,
    entry_key,
    ledger_key,
)
from bookie_server.rocks_index import RocksIndex
from spark_ledger.metadata.ledger_record import Verifiers

PLACE = Location(7, 3, 5, 64, 69)
STATE = LedgerState(7, Verifiers("a", "b", "c"), fenced=True, explicit_lac=4)


def test_the_bytes_of_an_entrys_location():
    key, value = entry_key(7, 3), encode_location(PLACE)
    assert key.hex() == "6500000000000000070000000000000003"
    assert value.hex() == "0500000000000000400000000000000045000000"
    assert decode_location(key, value) == PLACE
    for bad in (value[:-1], value + b"\0", b""):
        with pytest.raises(BadIndexRecord):
            decode_location(key, bad)


def test_the_bytes_of_a_ledgers_state():
    assert ledger_key(7).hex() == "6c0000000000000007"
    value = encode_ledger_state(STATE)
    assert value == (
        b'{"deleted":false,"durability":"synced","explicit_lac":4,"fenced":true,"ledger_id":7,'
        b'"limbo":false,"met":true,"verifiers":{"add":"b","read":"a","recover":"c"}}'
    )
    assert decode_ledger_state(value) == STATE
    for bad in (b"{}", b"", b"[]", value[:-1], value.replace(b"fenced", b"fence")):
        with pytest.raises(BadIndexRecord):
            decode_ledger_state(bad)


def test_keys_sort_by_ledger_and_entry():
    ids = [0, 1, 255, 256, 2**31, 2**32, 2**53, 2**63 - 1]
    keys = [entry_key(ledger, e) for ledger in ids for e in ids]
    assert keys == sorted(keys)
    assert keys[-1] < ledger_key(0) < ledger_key(2**63 - 1) < ledger_key(EVERY_LEDGER)


def on_an_index(tmp_path, test):
    async def main():
        index = await RocksIndex.open(tmp_path / "index")
        try:
            return await test(index)
        finally:
            await index.close()

    return asyncio.run(main())


def test_what_was_put_is_found_again_also_after_closing(tmp_path):
    places = [Location(7, e, 1, 100 * e, 100) for e in range(0, 20, 2)]
    others = [Location(6, 2**62, 1, 0, 1), Location(8, 0, 1, 0, 1)]

    async def put(index):
        await index.put([*places, *others])
        await index.put_ledgers([LedgerState(9), STATE, LedgerState(EVERY_LEDGER)])

    async def look(index):
        assert await index.get(7, 4) == places[2]
        assert await index.get(7, 5) is None
        assert await index.range(7, 3, 9, 1 << 30) == places[2:5]
        assert await index.range(7, 0, 2**63 - 1, 1 << 30) == places
        assert await index.range(7, 0, 100, 250) == places[:3]
        assert await index.range(7, 5, 5, 100) == []
        assert [await index.last(i) for i in (5, 6, 7, 8, 9)] == [None, 2**62, 18, 0, None]
        states = await index.ledgers()
        assert states == [STATE, LedgerState(9), LedgerState(EVERY_LEDGER)]

    on_an_index(tmp_path, put)
    on_an_index(tmp_path, look)


def test_an_entry_put_again_lies_at_its_new_place(tmp_path):
    async def test(index):
        await index.put([PLACE])
        await index.put([PLACE._replace(log_id=6)])
        assert await index.get(7, 3) == PLACE._replace(log_id=6)

    on_an_index(tmp_path, test)


def test_more_locations_than_one_batch_are_all_there(tmp_path):
    places = [Location(1, e, 1, e, 1) for e in range(10_000)]

    async def test(index):
        await index.put(places)
        assert await index.range(1, 0, 20_000, 1 << 30) == places

    on_an_index(tmp_path, test)


def test_errors_of_rocksdb_are_disk_failures(tmp_path):
    (tmp_path / "index").write_text("not a folder")
    with pytest.raises(DiskFailed, match="cannot be opened"):
        on_an_index(tmp_path, None)

    async def damaged(index):
        index._db[entry_key(7, 3)] = b"short"
        for question in (index.get(7, 3), index.range(7, 0, 9, 100), index.last(7)):
            with pytest.raises(DiskFailed, match="not an entry's location"):
                await question

    on_an_index(tmp_path / "damaged", damaged)

    async def closed():
        index = await RocksIndex.open(tmp_path / "good")
        index._db.close()
        with pytest.raises(DiskFailed):
            await index.put([PLACE])
        with pytest.raises(DiskFailed):
            await index.get(7, 3)

    asyncio.run(closed())
