from bookie_server.write_cache import ENTRY_OVERHEAD_BYTES, WriteCache


def filled(*keys):
    cache = WriteCache(20_000, 1000)
    for ledger, e in keys:
        cache.active.put(ledger, e, b"%d:%d" % (ledger, e))
    return cache


def test_a_flush_sees_entries_sorted_by_ledger_and_entry():
    cache = filled((2, 1), (1, 5), (2, 0), (1, 3))
    order = [(ledger, e) for ledger, e, _ in cache.swap().to_write([2, 1])]
    assert order == [(1, 3), (1, 5), (2, 0), (2, 1)]


def test_both_halves_are_looked_into_until_the_flush_is_over():
    cache = filled((1, 0), (1, 1))
    cache.swap()
    cache.active.put(1, 2, b"new")
    assert cache.get(1, 0) == b"1:0"
    assert cache.range(1, 0, 5) == {0: b"1:0", 1: b"1:1", 2: b"new"}
    assert cache.range(1, 1, 1) == {1: b"1:1"}
    assert cache.last(1) == 2
    cache.drop_flushed()
    assert cache.get(1, 0) is None
    assert cache.range(1, 0, 5) == {2: b"new"}
    assert cache.last(7) is None


def test_the_budget_counts_bytes_and_what_keeps_them():
    cache = WriteCache(2 * (1000 + ENTRY_OVERHEAD_BYTES), 500)
    cache.active.put(1, 0, bytes(900))
    assert cache.half_used
    assert cache.has_room(100, reserve=False)
    assert not cache.has_room(101, reserve=False)
    assert cache.has_room(600, reserve=True)
    assert not cache.has_room(601, reserve=True)


def test_an_empty_half_takes_any_entry():
    assert WriteCache(100, 0).has_room(1000, reserve=False)


def test_a_compacted_entry_lets_its_frame_go():
    frame = bytes(range(100))
    cache = WriteCache(20_000, 0)
    cache.active.put(1, 0, memoryview(frame)[10:20])
    assert cache.compact(1, 0) == frame[10:20]
    assert isinstance(cache.get(1, 0), bytes)
