import struct

import pytest

from bookie_server.entry_index import Location
from bookie_server.journal_format import (
    BATCH_HEADER_BYTES,
    RECORD_HEADER_BYTES,
    Kind,
    Position,
    body_crc,
    decode_batch_header,
    decode_records,
    encode_batch,
)
from bookie_server.placed import Place, decode_place, encode_place

PLACE = Place("ledger-2", Location(7, 3, 5, 8192, 100_064))


def test_the_bytes_of_a_place():
    kind, ledger_id, entry_id, body, crc = encode_place(PLACE)
    assert (kind, kind.value, ledger_id, entry_id) == (Kind.PLACED, 6, 7, 3)
    assert body.hex() == (
        "0500000000000000" "0020000000000000" "e0860100"  # log, position, bytes of the entry
        "6c65646765722d32"  # "ledger-2"
    )  # fmt: skip
    assert crc == body_crc(body)


@pytest.mark.parametrize("directory", ["d", "0f5a-" * 20, "Verzeichnis-ä"])
@pytest.mark.parametrize("where", [(1, 4096, 1), (2**63 - 1, 2**40, 2**32 - 1)])
def test_a_place_that_is_written_is_read(directory: str, where: tuple[int, int, int]):
    place = Place(directory, Location(2**63 - 1, 0, *where))
    assert decode_place(encode_place(place)) == place


def test_a_place_is_read_from_a_batch_and_its_size_is_that_of_no_entry():
    record = encode_place(PLACE)
    data = bytearray(b"".join(encode_batch(9, 4096, 1, Position(9, 4096), [record, record])))
    records, suspects = decode_records(data, decode_batch_header(data, 9, 4096))
    assert [decode_place(each) for each in records] == [PLACE, PLACE]
    assert not suspects
    assert len(record.body) == struct.calcsize("<QQI") + len("ledger-2")


@pytest.mark.parametrize("at", range(28))
def test_a_place_of_which_a_bit_is_another_is_suspect_and_says_whose_it_was(at: int):
    data = bytearray(b"".join(encode_batch(9, 4096, 1, Position(9, 4096), [encode_place(PLACE)])))
    data[BATCH_HEADER_BYTES + RECORD_HEADER_BYTES + at] ^= 1
    records, (suspect,) = decode_records(data, decode_batch_header(data, 9, 4096))
    assert not records
    assert (suspect.ledger_id, suspect.kind) == (7, Kind.PLACED)
