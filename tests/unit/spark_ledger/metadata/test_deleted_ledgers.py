"""The set of deleted ledgers: its bytes, and what of damage it tells."""

import random

import pytest

from spark_ledger.metadata import deleted_ledgers, paths
from spark_ledger.metadata.deleted_ledgers import BadDeletedSet, decode, encode

FOLDER = paths.ledger_folder(0)
OF_EPOCH_3 = paths.ledger_folder(3 * 10**12 + 50_001)


def test_the_bytes_of_the_format():
    assert encode([0, 3, 17]) == b"SLD1" + bytes.fromhex("367f4f1c") + bytes([0b1001, 0, 0b10])
    assert encode([]) == b""


@pytest.mark.parametrize("share", [0.0001, 0.01, 0.5, 1.0])
@pytest.mark.parametrize("first", [0, 3 * 10**12 + 50_000, 2**63 // 10_000 * 10_000 - 10_000])
def test_what_is_encoded_is_decoded(share, first):
    rng = random.Random(7)
    ids = {first + i for i in range(10_000) if rng.random() < share}
    value = encode(ids)
    assert decode(value, paths.ledger_folder(first)) == ids
    assert len(value) <= 1258, "a full block is small"


def test_a_folder_without_a_value_as_earlier_versions_made_it_names_none():
    assert decode(b"", FOLDER) == frozenset()


def test_ids_are_of_their_folder():
    assert decode(encode([3 * 10**12 + 50_001]), OF_EPOCH_3) == {3 * 10**12 + 50_001}


@pytest.mark.parametrize("at", range(11))
def test_a_damaged_value_is_told(at):
    value = bytearray(encode([0, 3, 17]))
    value[at] ^= 4
    with pytest.raises(BadDeletedSet):
        decode(bytes(value), FOLDER)


@pytest.mark.parametrize("value", [b"SLD1", b"SLD2" + bytes(4), b"x", bytes(2000)])
def test_bytes_that_are_no_set_are_told(value):
    with pytest.raises(BadDeletedSet):
        decode(value, FOLDER)


def test_ledgers_are_grouped_by_the_folder_of_their_records():
    grouped = deleted_ledgers.by_folder([1, 9_999, 10_000, 2])
    assert [*grouped.values()] == [[1, 9_999, 2], [10_000]]
