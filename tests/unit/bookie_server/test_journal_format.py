import pytest

from bookie_server.api.entry import EntryHeader, pack_header, payload_crc
from bookie_server.journal import format as journal_format
from bookie_server.journal.format import (
    BATCH_HEADER_BYTES,
    BLOCK_BYTES,
    RECORD_HEADER_BYTES,
    BadJournal,
    Position,
    Record,
    RecordKind,
    body_crc,
    decode_batch_header,
    decode_file_header,
    decode_records,
    encode_batch,
    encode_file_header,
)

HEADER = EntryHeader(7, 3, 2, 400, 40, 5, payload_crc([b"hello"]))
ENTRY = Record(RecordKind.ENTRY, 7, 3, pack_header(HEADER) + b"hello", HEADER.payload_crc)
STATE = Record(RecordKind.LEDGER, 7, -1, b"{}", body_crc(b"{}"))
FENCE = Record(RecordKind.FENCE, 7, -1, b"", 0)
FIRST = BATCH_HEADER_BYTES
SECOND = FIRST + RECORD_HEADER_BYTES + 69


def batch(*records, offset=8192):
    return bytearray(b"".join(encode_batch(9, offset, 1, Position(9, offset), records)))


def read(data, offset=8192):
    return decode_records(data, decode_batch_header(data, 9, offset))


def test_the_bytes_of_a_segment_header():
    header = encode_file_header(9, 1 << 20)
    assert header[:28].hex() == "534c4a460200000009000000000000000000100000000000da248414"
    assert header[28:] == bytes(BLOCK_BYTES - 28)
    assert decode_file_header(header, 9) == 1 << 20


def test_no_flipped_bit_of_a_segment_header_goes_unnoticed():
    header = encode_file_header(9, 1 << 20)
    for bit in range(8 * 28):
        bad = bytearray(header)
        bad[bit // 8] ^= 1 << bit % 8
        with pytest.raises(BadJournal):
            decode_file_header(bad, 9)


def test_the_bytes_of_a_batch():
    data = batch(ENTRY, FENCE)
    assert data[:FIRST].hex() == (
        "534c4a42" "0100" "0000"  # magic, version, reserved
        "0900000000000000" "0020000000000000" "0100000000000000"  # file, offset, batch number
        "0900000000000000" "0020000000000000"  # synced up to
        "c5000000" "02000000" "00000000" "fe08f023"  # bytes, records, reserved, CRC
    )  # fmt: skip
    assert data[FIRST : FIRST + 64].hex() == (
        "534c4a52" "01" "01" "0000"  # magic, version, kind, reserved
        "0700000000000000" "0300000000000000"  # ledger, entry
        "0900000000000000" "4020000000000000" "0100000000000000"  # file, offset, batch number
        "45000000" "4cbb719a" "00000000" "359bb0c7"  # body bytes, payload CRC, reserved, CRC
    )  # fmt: skip
    assert data[FIRST + 64 : SECOND] == ENTRY.body
    assert data[SECOND : SECOND + 64].hex() == (
        "534c4a52" "01" "03" "0000" "0700000000000000" "ffffffffffffffff"
        "0900000000000000" "c520000000000000" "0100000000000000"
        "00000000" "00000000" "00000000" "302fc053"
    )  # fmt: skip
    assert data[SECOND + 64 :] == bytes(BLOCK_BYTES - SECOND - 64)
    assert len(data) == BLOCK_BYTES


def test_what_is_written_is_read():
    records, suspects = read(batch(ENTRY, STATE, FENCE))
    assert records == [ENTRY, STATE, FENCE]
    assert not suspects


def test_no_flipped_bit_goes_unnoticed():
    whole = batch(ENTRY, STATE, FENCE)
    end = decode_batch_header(whole, 9, 8192).records_bytes + FIRST
    for bit in range(8 * end):
        data = bytearray(whole)
        data[bit // 8] ^= 1 << bit % 8
        try:
            records, suspects = read(data)
        except BadJournal:
            assert bit < 8 * FIRST
            continue
        assert suspects, f"bit {bit}"
        assert all(record in (ENTRY, STATE, FENCE) for record in records)


def test_a_damaged_body_costs_its_record_only_and_says_whose_it_is():
    data = batch(ENTRY, STATE, FENCE)
    data[SECOND - 1] ^= 1
    records, suspects = read(data)
    assert records == [STATE, FENCE]
    assert [(s.ledger_id, s.kind) for s in suspects] == [(7, RecordKind.ENTRY)]


def test_a_damaged_record_header_costs_the_rest_of_the_batch():
    data = batch(ENTRY, STATE, FENCE)
    data[SECOND + 10] ^= 1
    records, suspects = read(data)
    assert records == [ENTRY]
    assert [(s.ledger_id, s.kind) for s in suspects] == [(None, None)]


@pytest.mark.parametrize("length", [FIRST, FIRST + 10, SECOND - 1, SECOND + 63])
def test_a_batch_that_is_cut_off_gives_what_is_whole(length):
    records, suspects = read(batch(ENTRY, STATE)[:length])
    assert records == ([ENTRY] if length > SECOND else [])
    assert suspects


def test_a_batch_of_another_place_or_file_is_none():
    data = batch(ENTRY)
    for file_id, offset in ((9, 4096), (8, 8192)):
        with pytest.raises(BadJournal):
            decode_batch_header(data, file_id, offset)


def test_a_record_of_another_batch_is_none():
    data, stale = batch(ENTRY, STATE), batch(ENTRY, STATE, offset=4096)
    data[SECOND:] = stale[SECOND:]
    records, suspects = read(data)
    assert (records, len(suspects)) == ([ENTRY], 1)


def test_a_segment_header_of_another_file_or_damaged_is_refused():
    header = bytearray(encode_file_header(9, 1 << 20))
    with pytest.raises(BadJournal, match="file 9"):
        decode_file_header(header, 8)
    header[3] ^= 1
    with pytest.raises(BadJournal, match="CRC"):
        decode_file_header(header, 9)
    with pytest.raises(BadJournal, match="shorter"):
        decode_file_header(header[:10], 9)


def test_entries_taken_together_are_judged_as_one_by_one(monkeypatch):
    whole = batch(ENTRY, FENCE, ENTRY, ENTRY, STATE)
    damaged = [bytearray(whole) for _ in range(8 * FIRST, 8 * len(whole), 5)]
    for bit, data in zip(range(8 * FIRST, 8 * len(whole), 5), damaged, strict=True):
        data[bit // 8] ^= 1 << bit % 8
    cut = [whole[:length] for length in range(FIRST, len(whole), 7)]
    found = [read(data) for data in [whole, *damaged, *cut]]
    monkeypatch.setattr(journal_format, "_take_entries", lambda view, at, *_: at)
    assert found == [read(data) for data in [whole, *damaged, *cut]]
    assert any(suspects for _, suspects in found) and len(found[0][0]) == 5
