import asyncio
import contextlib
import random
import shutil
from dataclasses import replace

import pytest
from rocksdict import Rdict

from bookie_server.disk.interface import DiskFailed
from bookie_server.logs import rocks_index
from bookie_server.logs.index import (
    EVERY_LEDGER,
    BadIndexRecord,
    LedgerState,
    Location,
    decode_ledger_state,
    decode_location,
    decode_log_mark,
    encode_ledger_state,
    encode_location,
    encode_log_mark,
    entry_key,
    ledger_key,
    log_key,
    merge_by_revision,
)
from bookie_server.logs.rocks_index import RocksIndex
from spark_ledger.metadata.ledger_record import Verifiers
from tests.simulation.disk import SimDisk
from tests.simulation.index import SimIndex
from tests.simulation.loop import run

PLACE = Location(7, 3, 5, 64, 69)
STATE = LedgerState(
    *(7, Verifiers("a", "b", "c"), "synced", True, 4, "torn"),
    directories=("d", "e"),
    revision=3,
)


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
        b'{"deleted":false,"directories":["d","e"],"durability":"synced","explicit_lac":4,'
        b'"fenced":true,"ledger_id":7,"limbo":"torn","met":true,"revision":3,'
        b'"verifiers":{"add":"b","read":"a","recover":"c"}}'
    )
    assert decode_ledger_state(value) == STATE
    old = (
        b'{"deleted":false,"durability":"synced","explicit_lac":4,"fenced":true,"ledger_id":7,'
        b'"limbo":true,"met":true,"verifiers":null}'
    )
    before = LedgerState(7, fenced=True, explicit_lac=4, limbo="lost")
    assert decode_ledger_state(old) == before
    assert decode_ledger_state(old.replace(b'true,"met', b'false,"met')).limbo == ""
    for bad in (b"{}", b"", b"[]", value[:-1], value.replace(b"fenced", b"fence")):
        with pytest.raises(BadIndexRecord):
            decode_ledger_state(bad)


def test_the_bytes_of_a_direct_logs_mark():
    key, value = log_key(5), encode_log_mark(4096)
    assert (key.hex(), value.hex()) == ("700000000000000005", "0010000000000000")
    assert decode_log_mark(key, value) == (5, 4096)
    for bad in ((key, value[:-1]), (key + b"\0", value), (b"", b"")):
        with pytest.raises(BadIndexRecord):
            decode_log_mark(*bad)


def test_keys_sort_by_ledger_and_entry():
    ids = [0, 1, 255, 256, 2**31, 2**32, 2**53, 2**63 - 1]
    keys = [entry_key(ledger, e) for ledger in ids for e in ids]
    assert keys == sorted(keys)
    assert keys[-1] < ledger_key(0) < ledger_key(2**63 - 1) < ledger_key(EVERY_LEDGER)


def test_of_two_states_the_later_is_right_and_nothing_for_good_is_taken_back():
    early = LedgerState(7, fenced=True, limbo="lost", directories=("a",), revision=1)
    late = LedgerState(7, explicit_lac=5, deleted=True, directories=("a", "b"), revision=2)
    both = merge_by_revision(early, late)
    assert both == merge_by_revision(late, early)
    assert both == replace(late, fenced=True)
    assert merge_by_revision(early, replace(late, directories=("b",))).directories == ("a", "b")
    same = merge_by_revision(replace(early, limbo="torn"), replace(late, revision=1))
    assert (same.limbo, same.revision) == ("torn", 1)
    placeholder = LedgerState(7, met=False, limbo="lost", revision=9)
    merged = merge_by_revision(replace(early, verifiers=STATE.verifiers), placeholder)
    assert (merged.met, merged.verifiers, merged.limbo) == (True, STATE.verifiers, "lost")


@pytest.fixture(params=["RocksDB", "its twin"])
def an_index(request, tmp_path):
    """Runs tests on an index; given several, each finds what the one before left, after a close
    ("closed") or a power loss ("crashed") that spared what was synced only."""

    async def in_rocksdb(tests, end):
        folder = tmp_path / "index"
        for test in tests:
            index = await RocksIndex.open(folder)
            try:
                await test(index)
                if end == "crashed":
                    shutil.copytree(tmp_path, tmp_path.with_name(f"{folder.parent.name}-crashed"))
            finally:
                await index.close()
            if end == "crashed":
                folder = tmp_path.with_name(f"{folder.parent.name}-crashed") / "index"

    async def in_the_twin(tests, end):
        disk = SimDisk()
        for test in tests:
            index = await SimIndex.open(disk)
            await test(index)
            await index.close()
            if end == "crashed":
                disk.crash("none")

    def on_an_index(*tests, end="closed"):
        if request.param == "RocksDB":
            asyncio.run(in_rocksdb(tests, end))
        else:
            run(in_the_twin(tests, end))

    return on_an_index


PLACES = [Location(7, e, 1, 100 * e, 100) for e in range(0, 20, 2)]
OTHERS = [Location(6, 2**62, 1, 0, 1), Location(8, 0, 1, 0, 1)]


@pytest.mark.parametrize("end", ["closed", "crashed"])
def test_what_was_synced_is_found_again(an_index, end):
    async def put(index):
        await index.put([*PLACES, *OTHERS])
        await index.put_ledgers([LedgerState(9), STATE, LedgerState(EVERY_LEDGER)])
        await look(index)
        await index.sync()

    async def look(index):
        assert await index.get(7, 4) == PLACES[2]
        assert await index.get(7, 5) is None
        assert await index.range(7, 3, 9, 1 << 30) == PLACES[2:5]
        assert await index.range(7, 0, 2**63 - 1, 1 << 30) == PLACES
        assert await index.range(7, 0, 100, 250) == PLACES[:3]
        assert await index.range(7, 5, 5, 100) == []
        assert [await index.last(i) for i in (5, 6, 7, 8, 9)] == [None, 2**62, 18, 0, None]
        assert await index.ledger_ids() == [6, 7, 8]
        states = await index.ledgers()
        assert states == [STATE, LedgerState(9), LedgerState(EVERY_LEDGER)]

    an_index(put, look, end=end)


def test_what_was_not_synced_is_lost_when_the_power_is(an_index):
    """Nothing may rely on it; that it is so shows that nothing is written twice."""

    async def put(index):
        await index.put(OTHERS)
        await index.sync()
        await index.put(PLACES)
        await index.delete_ledger(8)

    async def look(index):
        assert await index.range(7, 0, 100, 1 << 30) == []
        assert await index.ledger_ids() == [6, 8]

    an_index(put, look, end="crashed")


def test_a_sync_whose_caller_was_cancelled_is_no_failure_and_the_next_covers_it(an_index):
    async def put(index):
        for places in (OTHERS, PLACES):
            await index.put(places)
            syncing = asyncio.ensure_future(index.sync())
            await asyncio.sleep(0)
            syncing.cancel()
            await asyncio.gather(syncing, return_exceptions=True)
            assert syncing.cancelled()
        await index.sync()

    async def look(index):
        assert await index.ledger_ids() == [6, 7, 8]

    an_index(put, look, end="crashed")


@pytest.mark.parametrize("end", ["closed", "crashed"])
def test_deleted_entries_are_gone_and_their_neighbours_are_not(an_index, end):
    async def delete(index):
        await index.put([*PLACES, *OTHERS])
        await index.sync()
        await index.delete(7, [0, 5, 6, 18, 99])
        await index.delete(8, [0])
        await look(index)
        await index.sync()

    async def look(index):
        assert await index.range(7, 0, 100, 1 << 30) == [*PLACES[1:3], *PLACES[4:-1]]
        assert await index.get(7, 6) is None
        assert [await index.last(i) for i in (6, 7, 8)] == [2**62, 16, None]
        assert await index.ledger_ids() == [6, 7]

    an_index(delete, look, end=end)


@pytest.mark.parametrize("end", ["closed", "crashed"])
def test_a_deleted_ledger_is_gone_and_its_neighbours_are_not(an_index, end):
    last = Location(7, 2**63 - 1, 1, 0, 1)

    async def delete(index):
        await index.put([*PLACES, *OTHERS, last])
        await index.put_ledgers([LedgerState(6), STATE, LedgerState(8)])
        await index.sync()
        await index.delete_ledger(7)
        await index.delete_states([6, 8, 99])
        await look(index)
        await index.sync()

    async def look(index):
        assert await index.range(7, 0, 2**63 - 1, 1 << 30) == []
        assert await index.get(7, 4) is None
        assert [await index.last(i) for i in (6, 7, 8)] == [2**62, None, 0]
        assert await index.ledger_ids() == [6, 8]
        assert await index.ledgers() == [STATE]

    async def put_again(index):
        await index.put(PLACES[:1])
        assert await index.range(7, 0, 100, 1 << 30) == PLACES[:1]

    an_index(delete, look, put_again, end=end)


def test_an_entry_is_moved_only_from_where_it_lies(an_index):
    moved = [place._replace(log_id=2) for place in PLACES]
    elsewhere = PLACES[1]._replace(log_id=9)

    async def move(index):
        await index.put(PLACES)
        await index.put([elsewhere])
        await index.move([*zip(PLACES[:3], moved[:3], strict=True), (OTHERS[1], OTHERS[0])])
        await index.sync()

    async def look(index):
        expected = [moved[0], elsewhere, moved[2], *PLACES[3:]]
        assert await index.range(7, 0, 100, 1 << 30) == expected
        assert await index.ledger_ids() == [7]

    an_index(move, look, end="crashed")


def test_an_entry_put_again_lies_at_its_new_place(an_index):
    async def test(index):
        await index.put([PLACE])
        await index.put([PLACE._replace(log_id=6)])
        assert await index.get(7, 3) == PLACE._replace(log_id=6)

    an_index(test)


def test_more_locations_than_one_batch_are_all_there(an_index):
    places = [Location(1, e, 1, e, 1) for e in range(10_000)]

    async def put(index):
        await index.put(places)
        await index.sync()

    async def look(index):
        assert await index.range(1, 0, 20_000, 1 << 30) == places

    an_index(put, look)


MARKS = {256: 4096, 2: 2**40, 1: 4096}


@pytest.mark.parametrize("end", ["closed", "crashed"])
@pytest.mark.parametrize("deed", ["put", "moved", "removed"])
def test_marks_of_logs_are_put_moved_and_removed_beside_all_else(an_index, deed, end):
    expected = {"put": MARKS, "moved": {1: 4096, 2: 2**41, 7: 12288, 256: 4096}, "removed": {}}

    async def write(index):
        await index.put([*PLACES, *OTHERS])
        await index.put_ledgers([STATE, LedgerState(EVERY_LEDGER)])
        await index.mark_logs(MARKS)
        await index.sync()
        if deed == "moved":
            await index.mark_logs({2: 2**41, 7: 12288})
        elif deed == "removed":
            await index.mark_logs({**dict.fromkeys(MARKS), 99: None})
        await look(index)
        await index.sync()

    async def look(index):
        marks = await index.marked_logs()
        assert marks == expected[deed] and list(marks) == sorted(marks)
        assert await index.range(7, 0, 100, 1 << 30) == PLACES
        assert await index.ledger_ids() == [6, 7, 8]
        assert await index.ledgers() == [STATE, LedgerState(EVERY_LEDGER)]
        assert [await index.last(i) for i in (6, 7, 8)] == [2**62, 18, 0]

    an_index(write, look, end=end)


def test_marks_that_were_not_synced_are_as_before_when_the_power_is_lost(an_index):
    async def put(index):
        await index.mark_logs({1: 4096, 2: 4096})
        await index.sync()
        await index.mark_logs({1: 8192, 2: None, 3: 4096})

    async def look(index):
        assert await index.marked_logs() == {1: 4096, 2: 4096}

    an_index(put, look, end="crashed")


def test_a_mark_that_a_crash_spared_brings_all_that_was_put_before_it(tmp_path, monkeypatch):
    """RocksDB writes more than was synced: here it was not asked to sync at all."""
    monkeypatch.setattr(rocks_index, "WRITE_BUFFER_BYTES", 2 << 20)

    async def main():
        index = await RocksIndex.open(tmp_path / "alive" / "index")
        for start in range(0, 100_000, 5_000):
            await index.put([Location(7, e, 1, e, 100) for e in range(start, start + 5_000)])
            await index.mark_logs({1: start + 5_000})
        shutil.copytree(tmp_path / "alive", tmp_path / "crashed")
        await index.close()
        after = await RocksIndex.open(tmp_path / "crashed" / "index")
        mark = (await after.marked_logs()).get(1, 0)
        spared = await after.range(7, 0, 2**62, 1 << 60)
        await after.close()
        assert 0 < mark <= len(spared) < 100_000

    asyncio.run(main())


# -- RocksDB alone ---------------------------------------------------------------------------


def on_rocksdb(tmp_path, test):
    async def main():
        index = await RocksIndex.open(tmp_path / "index")
        try:
            return await test(index)
        finally:
            await index.close()

    return asyncio.run(main())


@pytest.fixture(scope="module")
def crashed(tmp_path_factory):
    """The folder of an index that was synced three times and then lost its power."""
    folder = tmp_path_factory.mktemp("crashed")

    async def main():
        index = await RocksIndex.open(folder / "alive" / "index")
        for sync in range(3):
            await index.put(PLACES[3 * sync : 3 * sync + 3])
            await index.put_ledgers([LedgerState(sync)])
            await index.sync()
        shutil.copytree(folder / "alive", folder / "crashed")
        await index.close()

    asyncio.run(main())
    return folder / "crashed"


async def _what_it_says(folder):
    """Whether everything synced is there; an index may also say that it is damaged."""
    try:
        index = await RocksIndex.open(folder / "index")
    except DiskFailed as error:
        assert "--rebuild-index" in str(error)
        return "damaged"
    try:
        found = await index.range(7, 0, 100, 1 << 30)
        states = [state.ledger_id for state in await index.ledgers()]
        singly = [await index.get(7, place.entry_id) for place in PLACES[:9]]
        return "whole" if (found, singly, states) == (PLACES[:9],) * 2 + ([0, 1, 2],) else "denied"
    except DiskFailed:
        return "damaged"
    finally:
        with contextlib.suppress(DiskFailed):
            await index.close()


def test_a_flipped_bit_anywhere_is_an_error_or_changes_nothing(crashed, tmp_path):
    """In RocksDB's own log, which is not used any more, it silently dropped all that followed; of
    a damaged manifest RocksDB may drop the end."""
    rng = random.Random(5)
    flips = []
    for path in sorted(each for each in crashed.rglob("*") if each.is_file()):
        bits = 8 * path.stat().st_size
        often = 16 if path.name.startswith("MANIFEST") else 3
        if bits and not path.name.startswith(("LOG", "OPTIONS", "rocksdict")):
            flips += [(path, rng.randrange(bits)) for _ in range(often)]
    said = {"whole": 0, "damaged": 0}
    for number, (path, bit) in enumerate(flips):
        copy = shutil.copytree(crashed, tmp_path / str(number))
        damaged = copy / path.relative_to(crashed)
        data = bytearray(damaged.read_bytes())
        data[bit // 8] ^= 1 << bit % 8
        damaged.write_bytes(data)
        said[asyncio.run(_what_it_says(copy))] += 1  # KeyError: denied
        shutil.rmtree(copy)
    assert said["damaged"] > len(flips) / 3


@pytest.mark.parametrize("lost", ["the end of the manifest", "a table"])
def test_an_index_without_its_end_is_not_opened(crashed, tmp_path, lost):
    copy = shutil.copytree(crashed, tmp_path / "copy")
    if lost == "a table":
        max(copy.rglob("*.sst")).unlink()
    else:
        (manifest,) = copy.rglob("MANIFEST*")
        manifest.write_bytes(manifest.read_bytes()[:-100])
    assert asyncio.run(_what_it_says(copy)) == "damaged"


@pytest.fixture
def databases(monkeypatch):
    """Every database of RocksDB that is opened."""
    opened, open_plain = [], rocks_index.Rdict

    def noted(*arguments):
        opened.append(open_plain(*arguments))
        return opened[-1]

    monkeypatch.setattr(rocks_index, "Rdict", noted)
    return opened


def test_errors_of_rocksdb_are_disk_failures(tmp_path, databases):
    (tmp_path / "index").write_text("not a folder")
    with pytest.raises(DiskFailed, match="cannot be opened"):
        on_rocksdb(tmp_path, None)

    async def damaged(index):
        databases[-1][entry_key(7, 3)] = b"short"
        for question in (index.get(7, 3), index.range(7, 0, 9, 100), index.last(7)):
            with pytest.raises(DiskFailed, match="not an entry's location"):
                await question
        databases[-1][log_key(3)] = b"short"
        with pytest.raises(DiskFailed, match="not a log's mark"):
            await index.marked_logs()

    on_rocksdb(tmp_path / "damaged", damaged)

    async def closed():
        index = await RocksIndex.open(tmp_path / "good")
        databases[-1].close()
        with pytest.raises(DiskFailed):
            await index.put([PLACE])
        with pytest.raises(DiskFailed):
            await index.get(7, 3)

    asyncio.run(closed())


@pytest.mark.parametrize("kind", ["RocksDB", "its twin"])
def test_after_a_sync_that_failed_none_succeeds(kind, tmp_path, monkeypatch):
    """What was visible and is not durable must not be taken for durable by the next one."""

    class Broken:
        def __init__(self, db):
            self.db, self.fails = db, True

        def __getattr__(self, name):
            if name == "flush" and self.fails:
                self.fails = False
                raise OSError("input/output error")
            return getattr(self.db, name)

    async def test(index):
        await index.put([PLACE])
        with pytest.raises(DiskFailed):
            await index.sync()
        for write in (
            index.sync,
            lambda: index.put([PLACE]),
            lambda: index.delete_ledger(7),
            lambda: index.mark_logs({1: 4096}),
        ):
            with pytest.raises(DiskFailed):
                await write()
        assert await index.get(7, 3) == PLACE, "it is read still"

    async def on_rocks():
        monkeypatch.setattr(rocks_index, "Rdict", lambda *of: Broken(Rdict(*of)))
        index = await RocksIndex.open(tmp_path / "index")
        await test(index)
        await index.close()

    async def on_its_twin():
        disk = SimDisk()
        index = await SimIndex.open(disk)
        disk.faults.sync_fails = 1
        await test(index)

    if kind == "RocksDB":
        asyncio.run(on_rocks())
    else:
        run(on_its_twin())


def test_of_ids_that_lie_apart_those_are_found_that_exist_up_to_the_bytes_asked_for(an_index):
    async def look(index):
        known = [place.entry_id for place in PLACES]
        for step in (1, 2, 1000):  # stepped over, and looked up one by one
            asked = [*known[:-1:2], *range(known[-1], known[-1] + 9 * step, step)]
            expected = [place for place in PLACES if place.entry_id in asked]
            assert await index.among(7, asked, 1 << 30) == expected
            total = expected[0].entry_bytes + 1
            assert await index.among(7, asked, total) == expected[:2]
            assert await index.among(7, asked, 1) == expected[:1]
        assert await index.among(7, [5, 10**6], 1 << 30) == []
        assert await index.among(99, known, 1 << 30) == []

    async def put(index):
        await index.put([*PLACES, *OTHERS])
        await look(index)
        await index.sync()

    an_index(put, look)
