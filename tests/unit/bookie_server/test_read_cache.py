"""What the read cache keeps, what leaves it first, and what it may never give out."""

from bookie_server.api.entry import Buffer
from bookie_server.storage.read_cache import BLOCK_OVERHEAD_BYTES, ENTRY_OVERHEAD_BYTES, ReadCache

KIB = 1 << 10
_AROUND = BLOCK_OVERHEAD_BYTES + ENTRY_OVERHEAD_BYTES  # what a block of one entry counts besides


def put(cache: ReadCache, ledger_id: int, *entry_ids: int, size: int = KIB, uses: int = 1) -> None:
    """One read that brought these entries, of `size` bytes each."""
    buffer = memoryview(bytes(size * len(entry_ids)))
    views: dict[int, Buffer] = {
        entry_id: buffer[at * size : (at + 1) * size] for at, entry_id in enumerate(entry_ids)
    }
    ticket = cache.begin(ledger_id)
    cache.put(ticket, views, len(buffer), uses=uses)
    cache.end(ticket)


def room_for(blocks: int, size: int = KIB) -> ReadCache:
    return ReadCache(blocks * (size + _AROUND))


def test_an_entry_is_found_until_it_is_dropped() -> None:
    cache = room_for(10)
    put(cache, 1, 0)
    assert cache.get(1, 0) is not None
    cache.drop(1, 0)
    assert cache.get(1, 0) is None
    assert cache.bytes == 0


def test_a_view_that_keeps_a_large_read_alive_counts_all_of_it() -> None:
    cache = ReadCache(64 * KIB)
    put(cache, 1, 0, 1, 2, 3)
    assert cache.bytes == 4 * KIB + BLOCK_OVERHEAD_BYTES + 4 * ENTRY_OVERHEAD_BYTES
    for entry_id in (0, 1, 2):
        cache.drop(1, entry_id)
    assert cache.bytes >= 4 * KIB, "the last view still holds the buffer"
    cache.drop(1, 3)
    assert cache.bytes == 0


def test_the_budget_holds_whatever_is_put_in() -> None:
    cache = room_for(10)
    for entry_id in range(100):
        put(cache, entry_id % 3, entry_id, size=KIB - entry_id)
        cache.get(entry_id % 3, entry_id - 3)
        assert cache.bytes <= cache.bytes_max
    assert cache.bytes > cache.bytes_max // 2


def test_without_a_budget_nothing_is_kept() -> None:
    cache = ReadCache(0)
    put(cache, 1, 0)
    assert cache.get(1, 0) is None
    assert cache.bytes == 0


def test_a_block_that_would_take_most_of_the_budget_is_not_kept() -> None:
    cache = ReadCache(64 * KIB)
    put(cache, 1, 0, size=32 * KIB)
    assert not cache.has(1, 0)


def test_one_long_scan_does_not_throw_out_what_is_read_again_and_again() -> None:
    cache = room_for(20)
    for entry_id in range(10):
        put(cache, 1, entry_id)
        cache.get(1, entry_id)
    for entry_id in range(1000):
        put(cache, 2, entry_id)
    assert all(cache.has(1, entry_id) for entry_id in range(10))


def test_what_nobody_reads_again_leaves_in_the_order_it_came() -> None:
    cache = room_for(10)
    for entry_id in range(15):
        put(cache, 1, entry_id)
    assert [cache.has(1, e) for e in range(15)] == [False] * 5 + [True] * 10


def test_what_was_in_favour_long_ago_leaves_at_last() -> None:
    cache = room_for(20)
    for ledger_id in (1, 2, 3):
        for entry_id in range(20):
            put(cache, ledger_id, entry_id)
            cache.get(ledger_id, entry_id)
    assert not any(cache.has(1, entry_id) for entry_id in range(20))
    assert all(cache.has(3, entry_id) for entry_id in range(10, 20))


def test_the_first_reader_of_what_was_read_ahead_is_its_first_use() -> None:
    cache = room_for(20)
    for entry_id in range(15):
        put(cache, 1, entry_id, uses=0)
        cache.get(1, entry_id)  # a scan: each once
    for entry_id in range(20):
        put(cache, 2, entry_id)
    assert not any(cache.has(1, entry_id) for entry_id in range(15))


def test_a_range_ends_at_the_first_entry_that_is_not_there_and_at_its_bytes() -> None:
    cache = ReadCache(64 * KIB)
    put(cache, 1, 0, 1, 2)
    put(cache, 1, 4)
    assert list(cache.leading(1, range(10), 1 << 20)) == [0, 1, 2]
    assert list(cache.leading(1, range(10), KIB + 1)) == [0, 1]
    assert list(cache.leading(1, range(3, 10), 1 << 20)) == []
    assert list(cache.leading(1, range(4, 5), 1 << 20)) == [4]


def test_a_range_over_one_block_is_one_use_of_it() -> None:
    cache = ReadCache(64 * KIB)
    put(cache, 1, 0, 1, 2, 3)
    cache.leading(1, range(4), 1 << 20)
    for entry_id in range(100):
        put(cache, 2, entry_id)
    assert cache.has(1, 0), "used twice: by the read that brought it and by this one"
    put(cache, 3, 0, 1, 2, 3, uses=0)
    cache.leading(3, range(4), 1 << 20)
    for entry_id in range(100):
        put(cache, 2, entry_id)
    assert not cache.has(3, 0), "used once"


def test_a_read_that_began_before_an_entry_was_overwritten_does_not_bring_it_back() -> None:
    cache = ReadCache(64 * KIB)
    ticket = cache.begin(1)
    cache.drop(1, 5)
    cache.put(ticket, {5: memoryview(b"old"), 6: memoryview(b"good")}, 7)
    cache.end(ticket)
    assert not cache.has(1, 5)
    assert cache.has(1, 6)


def test_a_read_that_began_before_its_ledger_was_deleted_brings_nothing_back() -> None:
    cache = ReadCache(64 * KIB)
    put(cache, 1, 0, 1)
    put(cache, 2, 0)
    ticket = cache.begin(1)
    cache.drop_ledger(1)
    cache.put(ticket, {5: memoryview(b"old")}, 3)
    assert not any(cache.has(1, entry_id) for entry_id in (0, 1, 5))
    assert cache.has(2, 0)


def test_after_clear_nothing_is_held() -> None:
    cache = ReadCache(64 * KIB)
    put(cache, 1, 0, 1)
    put(cache, 2, 0)
    cache.get(2, 0)
    cache.clear()
    assert cache.bytes == 0
    assert not cache.has(2, 0)
