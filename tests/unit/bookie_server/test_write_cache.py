from bookie_server.logs.index import Location
from bookie_server.storage.write_cache import ENTRY_OVERHEAD_BYTES, DirectLocation, WriteCache


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
    assert cache.is_half_used
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


def place(ledger: int, e: int, directory: str = "d0") -> DirectLocation:
    return DirectLocation(directory, Location(ledger, e, 1, 4096, 3))


def written(half, *ledgers):
    return [(ledger, e) for ledger, e, _ in half.to_write(ledgers)]


def test_what_has_a_place_is_not_written_nor_counted_as_such():
    half = filled((1, 0), (1, 1), (2, 0)).active
    half.set_locations(1, [place(1, 1)])
    half.set_locations(2, [])
    assert written(half, 1, 2) == [(1, 0), (2, 0)]
    assert half.bytes_to_write([1, 2]) == (6, 2)
    assert half.bytes_to_write([1]) == (3, 1)
    half.set_locations(1, [place(1, 0)])
    assert written(half, 1) == [] and half.bytes_to_write([1]) == (0, 0)


def test_an_entry_counts_as_unflushed_while_it_has_no_place():
    cache = WriteCache(20_000, 1000)
    half = cache.active
    half.put(1, 0, bytes(900))
    half.put(1, 1, bytes(700))
    assert cache.unflushed_bytes == cache.bytes == 1600 + 2 * ENTRY_OVERHEAD_BYTES
    half.set_locations(1, [place(1, 0), place(1, 1, "d1"), place(1, 2)])
    half.set_locations(1, [place(1, 1, "d1")])
    assert cache.unflushed_bytes == cache.bytes - 1600
    cache.swap()
    cache.active.put(2, 0, bytes(50))
    assert cache.unflushed_bytes == cache.bytes - 1600
    half.drop_locations(lambda directory: directory == "d0")
    assert cache.unflushed_bytes == cache.bytes - 900
    half.put(1, 0, bytes(300))
    assert cache.unflushed_bytes == cache.bytes
    half.set_locations(1, [place(1, 0), place(1, 1)])
    assert cache.unflushed_bytes == cache.bytes - 1000
    half.put_all(1, {0: bytes(10), 1: bytes(10), 2: bytes(10)})
    assert cache.unflushed_bytes == cache.bytes
    cache.drop_flushed()
    assert cache.unflushed_bytes == 50 + ENTRY_OVERHEAD_BYTES


def test_an_entry_that_is_put_again_has_no_place_any_more():
    for put_again in ("put", "put_all"):
        cache = filled((1, 0), (1, 1))
        cache.active.set_locations(1, [place(1, 0), place(1, 1)])
        if put_again == "put":
            cache.active.put(1, 1, b"again")
        else:
            cache.active.put_all(1, {1: b"again"})
        assert written(cache.active, 1) == [(1, 1)]
        assert cache.ids_with_location(1, 0, 9) == [0]


def test_places_of_both_halves_are_known_until_they_are_in_the_index():
    cache = filled((1, 0), (1, 1))
    cache.active.set_locations(1, [place(1, 0), place(1, 1)])
    cache.swap()
    cache.active.replay_all(1, [place(1, 7)])
    assert cache.ids_with_location(1, 1, 9) == [1, 7]
    assert cache.ids_with_location(2, 0, 9) == []
    cache.drop_flushed()
    assert cache.ids_with_location(1, 0, 9) == [7]


def test_a_replayed_place_takes_room_and_is_no_entry_that_could_be_read_or_written():
    cache = filled()
    cache.active.replay_all(1, [place(1, 0), place(1, 1)])
    assert cache.bytes == 2 * ENTRY_OVERHEAD_BYTES
    assert cache.get(1, 0) is None and cache.range(1, 0, 9) == {}
    assert written(cache.active, 1) == [] and list(cache.active.ledgers) == [1]


def lives(directory: str) -> bool:
    return directory == "d1"


def test_places_in_directories_that_do_not_live_are_forgotten_and_what_is_in_memory_is_written():
    cache = filled((1, 0), (1, 1))
    half = cache.active
    half.set_locations(1, [place(1, 0), place(1, 1, "d1")])
    half.replay_all(2, [place(2, 5), place(2, 6, "d1")])
    half.drop_locations(lives)
    assert written(half, 1) == [(1, 0)]
    assert written(half, 2) == [], "nobody here has it"
    assert (cache.ids_with_location(1, 0, 9), cache.ids_with_location(2, 0, 9)) == ([1], [6])


def test_what_lies_in_directories_that_do_not_live_is_told_from_both_halves():
    cache = filled((1, 0), (1, 1), (2, 0))
    cache.active.set_locations(1, [place(1, 0), place(1, 1, "d1")])
    cache.active.set_locations(2, [place(2, 0)])
    cache.active.replay_all(1, [place(1, 9)])
    cache.swap()
    cache.active.put(1, 2, b"1:2")
    cache.active.set_locations(1, [place(1, 2)])
    cache.active.put(1, 3, b"1:3")
    assert cache.with_lost_locations(1, lives) == {0: b"1:0", 2: b"1:2"}
    assert cache.with_lost_locations(3, lives) == {}


def test_what_was_put_again_is_not_only_where_it_was_placed_first():
    cache = filled((1, 0), (1, 1))
    cache.active.set_locations(1, [place(1, 0), place(1, 1)])
    cache.swap()
    cache.active.put(1, 0, b"again")
    assert cache.with_lost_locations(1, lives) == {1: b"1:1"}


def test_the_half_into_which_an_entry_was_just_put_is_found_in_either():
    cache = filled((1, 0))
    flushing = cache.swap()
    cache.active.put(1, 1, b"1:1")
    assert cache.half_with(1, 0) is flushing and cache.half_with(1, 1) is cache.active
