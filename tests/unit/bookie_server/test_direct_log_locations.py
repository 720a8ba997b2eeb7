"""What of a direct log is records, and what is missing: torn by a crash, or damaged since."""

from typing import NamedTuple

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from bookie_server.logs.entry_log import (
    BLOCK_BYTES,
    encode_record_headers,
    record_end,
)
from bookie_server.logs.index import Location
from bookie_server.logs.scan import Scanned, parse
from bookie_server.start.applier import Coverage, LogHole
from tests.unit.bookie_server.node import entry

LOG_ID = 3
LEAST = 4 * BLOCK_BYTES  # bytes of payload in an entry here: they are large


class Written(NamedTuple):
    """A log's bytes, its records by write, and where records end."""

    data: bytes
    writes: list[list[Location]]

    def begins(self, write: int) -> int:
        return self.writes[write][0].position


def blocks(position: int) -> int:
    return -(-position // BLOCK_BYTES)


def log(*writes: tuple[int, ...]) -> Written:
    """Payload sizes, by write; the n-th record is entry n of ledger n."""
    data = bytearray(BLOCK_BYTES)
    places: list[list[Location]] = []
    for sizes in writes:
        data += bytes(-len(data) % BLOCK_BYTES)
        begun, of_write = len(data), []
        for size in sizes:
            number = sum(map(len, places)) + len(of_write)
            body = entry(number, number, bytes([number % 250 + 1]) * size)
            place = Location(number, number, LOG_ID, len(data), len(body))
            (head,) = encode_record_headers([place], [(len(data) - begun) // BLOCK_BYTES])
            data += head + body
            of_write.append(place)
        places.append(of_write)
    return Written(bytes(data) + bytes(-len(data) % BLOCK_BYTES), places)


def judged(
    data: bytes, start: int = BLOCK_BYTES, synced: int = 0, piece: int = 1 << 30
) -> tuple[list[LogHole], list[LogHole]]:
    coverage = Coverage(start)
    position, end, wanted = start, len(data), piece
    while position < end:
        parsed = parse(data[position : position + wanted], position, end, LOG_ID)
        coverage.take(Scanned(parsed.records, parsed.damage, parsed.position - position))
        position, wanted = parsed.position, max(piece, parsed.bytes_min)
    return coverage.judge(end, synced)


def flipped(data: bytes, position: int) -> bytes:
    return data[:position] + bytes([data[position] ^ 1]) + data[position + 1 :]


def zeroed(data: bytes, start: int, end: int) -> bytes:
    return data[:start] + bytes(end - start) + data[end:]


WHOLE = log((LEAST,), (LEAST, LEAST + 1, 3 * LEAST), (LEAST + 1000,), (LEAST, LEAST))


@pytest.mark.parametrize("piece", [1 << 30, 48, 5000, 20_000])
def test_a_log_that_is_whole_has_no_hole_from_wherever_a_record_ended(piece):
    ends = [record_end(place) for of_write in WHOLE.writes for place in of_write]
    for start in (BLOCK_BYTES, *ends):
        assert judged(WHOLE.data, start, piece=piece) == ([], [])


def test_a_log_that_nothing_was_written_to_has_no_hole():
    assert judged(bytes(BLOCK_BYTES)) == ([], [])


def test_a_record_that_is_bad_in_a_write_before_the_last_is_damage_of_its_ledger():
    place = WHOLE.writes[1][1]
    damaged, torn = judged(flipped(WHOLE.data, place.position + 1000))
    assert damaged == [LogHole(place.position, record_end(place), [place.ledger_id])] and torn == []


def test_records_that_are_bad_one_after_the_other_are_damage_of_their_ledgers():
    first, second = WHOLE.writes[1][1:]
    data = flipped(flipped(WHOLE.data, first.position + 1000), second.position + 1000)
    (hole,), torn = judged(data)
    assert hole.ledger_ids == [first.ledger_id, second.ledger_id] and torn == []


def test_a_record_whose_header_is_bad_is_damage_of_nobody_knows_whom():
    place = WHOLE.writes[1][1]
    damaged, torn = judged(flipped(WHOLE.data, place.position + 1))
    assert damaged == [LogHole(place.position, record_end(place), None)] and torn == []


def test_a_bad_record_beside_one_whose_header_is_bad_tells_not_whose_all_of_it_is():
    first, second = WHOLE.writes[1][1:]
    for bad, worse in ((first, second), (second, first)):
        data = flipped(flipped(WHOLE.data, bad.position + 1000), worse.position + 1)
        (hole,), torn = judged(data)
        assert hole.ledger_ids is None and torn == []
        assert (hole.start, hole.end) == (first.position, WHOLE.begins(2))


def test_rot_in_what_fills_a_block_up_is_damage_for_a_small_record_may_have_begun_there():
    end = record_end(WHOLE.writes[1][-1])
    damaged, torn = judged(flipped(WHOLE.data, end + 100))
    assert damaged == [LogHole(end, WHOLE.begins(2), None)] and torn == []


@pytest.mark.parametrize("write", [1, 2, 3])
def test_the_first_record_of_a_write_that_is_bad_is_that_of_its_ledger(write):
    place = WHOLE.writes[write][0]
    damaged, torn = judged(flipped(WHOLE.data, place.position + 1000))
    (hole,) = [*damaged, *torn]
    assert hole.ledger_ids == [place.ledger_id]
    assert bool(damaged) == (write < 3)


@pytest.mark.parametrize("missing", [0, 1])
@pytest.mark.parametrize("how", ["header", "zeros"])
def test_what_is_missing_in_the_last_write_is_torn(missing, how):
    place = WHOLE.writes[3][missing]
    end = record_end(place)
    if how == "zeros":
        data = zeroed(WHOLE.data, place.position, end)
    else:
        data = flipped(WHOLE.data, place.position + 1)
    damaged, torn = judged(data)
    assert damaged == []
    (hole,) = torn
    assert hole.ledger_ids is None
    assert blocks(hole.start) == blocks(place.position) and hole.end >= end


def test_a_write_that_is_missing_before_the_last_is_damage_though_there_are_zeros():
    for write in (0, 1, 2):
        start, end = WHOLE.begins(write), WHOLE.begins(write + 1)
        damaged, torn = judged(zeroed(WHOLE.data, start, end))
        (hole,) = damaged
        assert blocks(hole.start) * BLOCK_BYTES == start and hole.end == end
        assert hole.ledger_ids is None and torn == []


def test_a_last_write_of_which_nothing_is_there_is_torn():
    (hole,) = judged(zeroed(WHOLE.data, WHOLE.begins(3), len(WHOLE.data)))[1]
    assert blocks(hole.start) * BLOCK_BYTES == WHOLE.begins(3) and hole.end == len(WHOLE.data)


def test_a_log_cut_off_where_a_write_ends_has_no_hole_and_one_cut_off_elsewhere_is_torn():
    for write in (1, 2, 3):
        whole = WHOLE.data[: WHOLE.begins(write)]
        assert judged(whole) == ([], [])
        damaged, torn = judged(WHOLE.data[: WHOLE.begins(write) + BLOCK_BYTES])
        assert damaged == [] and len(torn) == 1


@pytest.mark.parametrize("write", [1, 3])
def test_whatever_is_known_to_be_synced_is_damage_wherever_it_lies(write):
    data = flipped(WHOLE.data, WHOLE.writes[write][1].position + 1)
    damaged, torn = judged(data, synced=len(data))
    assert len(damaged) == 1 and torn == []


SIZES = st.lists(
    st.lists(st.integers(LEAST, 3 * LEAST), min_size=1, max_size=4).map(tuple),
    min_size=1,
    max_size=5,
)


@settings(deadline=None, derandomize=True)
@given(sizes=SIZES, piece=st.sampled_from([1 << 30, 48, 4096, 30_000]), data=st.data())
def test_no_log_that_is_whole_has_a_hole(sizes, piece, data):
    written = log(*sizes)
    ends = [record_end(place) for of_write in written.writes for place in of_write]
    start = data.draw(st.sampled_from([BLOCK_BYTES, *ends]))
    assert judged(written.data, start, piece=piece) == ([], [])


DEEDS = st.sampled_from(["zeroed", "flipped", "garbage", "cut off"])


@settings(deadline=None, derandomize=True)
@given(
    sizes=SIZES,
    deeds=st.lists(
        st.tuples(DEEDS, st.floats(0, 1, exclude_max=True), st.integers(1, 4)), max_size=3
    ),
    piece=st.sampled_from([1 << 30, 48, 30_000]),
)
def test_what_was_touched_below_the_last_write_that_left_a_record_is_damage_and_no_record_is_lost(
    sizes, deeds, piece
):
    written = log(*sizes)
    data = written.data
    places = [place for of_write in written.writes for place in of_write]
    for deed, where, count in deeds:
        position = BLOCK_BYTES + int(where * (len(written.data) - BLOCK_BYTES))
        block = position // BLOCK_BYTES * BLOCK_BYTES
        if position >= len(data):
            continue
        if deed == "flipped":
            data = flipped(data, position)
        elif deed == "cut off":
            data = data[:block]
        else:
            end = min(block + count * BLOCK_BYTES, len(data))
            junk = bytes(end - block) if deed == "zeroed" else b"\xff" * (end - block)
            data = data[:block] + junk + data[end:]
    assume(len(data) > BLOCK_BYTES)
    whole = [
        place
        for place in places
        if data[place.position : record_end(place)]
        == written.data[place.position : record_end(place)]
    ]
    begun = {place: of_write[0].position for of_write in written.writes for place in of_write}
    synced = max([begun[place] for place in whole], default=0)
    damaged, torn = judged(data, piece=piece)
    for place in places:
        if place in whole or place.position >= len(data):
            continue
        stop = min(record_end(place), len(data))
        told = [h for h in (*damaged, *torn) if h.start <= place.position and stop <= h.end]
        assert len(told) == 1, (place, damaged, torn)
        ids = told[0].ledger_ids
        if told[0] in damaged:  # what is torn puts every ledger in doubt
            assert ids is None or place.ledger_id in ids
        if begun[place] < synced:
            assert told[0] in damaged
    for hole in damaged:
        assert all(record_end(p) <= hole.start or hole.end <= p.position for p in whole)


@settings(deadline=None, derandomize=True)
@given(sizes=SIZES, data=st.data())
def test_a_power_loss_under_the_last_write_leaves_no_damage_whatever_it_spares(sizes, data):
    written = log(*sizes)
    start = written.begins(-1)
    sectors = range(start, len(written.data), 512)
    lost = data.draw(st.lists(st.sampled_from(sectors), max_size=20))
    image = written.data
    for at in lost:
        image = zeroed(image, at, at + 512)
    damaged, _ = judged(image)
    assert damaged == []
