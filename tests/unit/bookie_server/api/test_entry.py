import pytest

from bookie_server.api.entry import (
    DamagedEntry,
    EntryHeader,
    check_entries,
    check_entry,
    pack_header,
    payload_crc,
    unpack_entry,
    unpack_header,
)

HEADER = EntryHeader(7, 3, 2, 400, 40, 5, payload_crc([b"hello"]))
ENTRY = pack_header(HEADER) + b"hello"


def test_the_bytes_of_an_entry():
    assert ENTRY.hex() == (
        "534c4531" "01" "00" "0000"  # magic, version, flags, reserved
        "0700000000000000" "0300000000000000" "0200000000000000"  # ledger, entry, LAC
        "9001000000000000" "2800000000000000"  # cumulative bytes and rows
        "05000000" "4cbb719a" "00000000" "99bef94d"  # payload length and CRC, reserved, CRC
        "68656c6c6f"
    )  # fmt: skip


def test_an_entry_is_read_as_it_was_written():
    found = unpack_entry(ENTRY)
    assert found.header == HEADER
    assert found.payload == b"hello"
    assert payload_crc([b"he", bytearray(b"ll"), memoryview(b"o")]) == HEADER.payload_crc
    empty = HEADER._replace(payload_bytes=0, payload_crc=0, last_add_confirmed=-1)
    assert unpack_entry(pack_header(empty)).header == empty


def test_no_flipped_bit_and_no_missing_or_extra_byte_goes_unnoticed():
    for bit in range(8 * len(ENTRY)):
        data = bytearray(ENTRY)
        data[bit // 8] ^= 1 << bit % 8
        with pytest.raises(DamagedEntry):
            unpack_entry(data)
    for length in range(len(ENTRY)):
        with pytest.raises(DamagedEntry):
            unpack_entry(ENTRY[:length])
    with pytest.raises(DamagedEntry):
        unpack_entry(ENTRY + b"!")


def test_entries_checked_together_are_as_good_as_checked_one_by_one():
    other = HEADER._replace(entry_id=4, payload_bytes=2, payload_crc=payload_crc([b"me"]), flags=3)
    good = [memoryview(ENTRY), pack_header(other) + b"me"]
    assert check_entries(good) == [check_entry(entry) for entry in good] == [HEADER, other]
    assert check_entries([]) == []
    for bit in range(8 * len(ENTRY)):
        data = bytearray(ENTRY)
        data[bit // 8] ^= 1 << bit % 8
        assert check_entries([*good, data]) is None
    for bad in (ENTRY[:-1], ENTRY + b"!", ENTRY[:63], b"", *of_other_formats()):
        assert check_entries([bad, *good]) is None


def of_other_formats() -> list[bytes]:
    from crc32c import crc32c

    found = []
    for at, value in ((0, b"X"), (4, b"\2")):
        body = bytearray(ENTRY[:60])
        body[at : at + 1] = value
        whole = bytes(body) + crc32c(bytes(body)).to_bytes(4, "little") + ENTRY[64:]
        found.append(whole)
    return found


def test_an_entry_of_another_format_is_refused():
    for entry in of_other_formats():
        with pytest.raises(DamagedEntry, match="unknown entry format"):
            unpack_header(entry)


def test_identity_leaves_out_what_a_write_back_changes():
    assert HEADER.identity == HEADER._replace(last_add_confirmed=9, flags=1).identity
    for other in ({"entry_id": 4}, {"cumulative_rows": 41}, {"payload_crc": 1}):
        assert HEADER.identity != HEADER._replace(**other).identity
