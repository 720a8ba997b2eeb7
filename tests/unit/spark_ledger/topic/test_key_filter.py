import random
import struct

import numpy as np
import pytest

from spark_ledger import errors
from spark_ledger.topic.entry.key_filter import (
    HEADER_BYTES,
    KeyFilters,
    encode_filters,
    hashes_of,
    key_filter,
)


def keys_of(name, count):
    return [b"%s-%d" % (name, n) for n in range(count)]


def filters_of(*keys):
    """One filter of each list of keys: entries 0, 1, ... of partition 5."""
    return KeyFilters(
        encode_filters((5, entry, key_filter(hashes_of(some))) for entry, some in enumerate(keys))
    )


@pytest.mark.parametrize("count", [1, 2, 5, 6, 100, 5000])
def test_a_filter_never_denies_a_key_that_its_entry_has(count):
    held = keys_of(b"held", count)
    filters = filters_of(held)

    for key in held:
        assert filters.might_contain(5, [0], hashes_of([key])).all()


@pytest.mark.parametrize("count", [100, 1000, 5000, 20_000])
def test_a_filter_takes_one_and_a_half_bytes_a_key_and_lets_few_others_pass(count):
    made = key_filter(hashes_of(keys_of(b"held", count)))
    filters = KeyFilters(encode_filters([(0, 0, made)]))

    others = hashes_of(keys_of(b"other", 20_000))
    passed = sum(
        bool(filters.might_contain(0, [0], others[n : n + 1])[0]) for n in range(0, 20_000, 4)
    )

    assert len(made) <= 1.5 * count + 8
    assert passed / 5_000 < 0.02


def test_keys_that_repeat_count_once():
    keys = keys_of(b"held", 50)
    assert key_filter(hashes_of(keys * 100)) == key_filter(hashes_of(keys))


def test_keys_whose_hashes_share_a_partition_pass_a_filter_no_more_often():
    """Of a partition of 64 all keys have the same low bits of their hash."""
    hashes = hashes_of(keys_of(b"k", 400_000))
    mine = hashes[hashes % 64 == 7]
    made, others = key_filter(mine[:3000]), mine[3000:6000]
    filters = KeyFilters(encode_filters([(0, 0, made)]))

    passed = sum(bool(filters.might_contain(0, [0], others[n : n + 1])[0]) for n in range(3000))

    assert passed < 90


def test_an_entry_passes_if_one_of_several_keys_may_be_there_and_if_nothing_is_known_of_it():
    filters = filters_of([b"a", b"b"], [b"c"], [])

    assert filters.might_contain(5, [0, 1, 2], hashes_of([b"x", b"c"])).tolist() == [0, 1, 0]
    assert filters.might_contain(5, [3], hashes_of([b"x"])).tolist() == [1]
    assert filters.might_contain(4, [0], hashes_of([b"x"])).tolist() == [1]
    assert filters.might_contain(5, [0], hashes_of([])).tolist() == [0]


def test_filters_of_an_entry_that_several_partitions_share_are_told_apart():
    some = [(1, 9, key_filter(hashes_of([b"a"]))), (0, 9, key_filter(hashes_of([b"b"])))]
    filters = KeyFilters(encode_filters(some))

    assert filters.might_contain(1, [9], hashes_of([b"a"])).all()
    assert not filters.might_contain(0, [9], hashes_of([b"a"])).any()


def test_filters_have_these_bytes():
    held = [(3, 7, key_filter(hashes_of([b"a", b"test"]))), (0, 8, b"")]

    assert encode_filters(held).hex() == (
        "534c4b310100000002000000"
        "00000000000000000800000000000000"
        "03000000080000000700000000000000"
        "7000020000420100"
    )


@pytest.mark.parametrize("at", [0, 4])
def test_another_magic_or_version_is_refused(at):
    payload = bytearray(encode_filters([(0, 0, b"x" * 8)]))
    payload[at] ^= 0xFF

    with pytest.raises(errors.UnsupportedFormat, match="an entry of key filters begins with magic"):
        KeyFilters(payload)


def test_filters_cut_short_or_too_long_are_refused():
    payload = encode_filters([(0, entry, bytes(8)) for entry in range(3)])

    for damaged in [payload[:kept] for kept in range(len(payload))] + [payload + b"x"]:
        with pytest.raises(errors.UnsupportedFormat, match="damaged entry of key filters"):
            KeyFilters(damaged)


def test_counts_that_do_not_fit_the_bytes_are_refused():
    rng = random.Random(1)
    payload = encode_filters([(0, entry, bytes(8)) for entry in range(3)])
    for at in (8, HEADER_BYTES + 4, HEADER_BYTES + 20):
        for value in (1, 7, 0xFFFFFFFF, rng.randrange(1 << 32)):
            damaged = bytearray(payload)
            struct.pack_into("<I", damaged, at, value)
            with pytest.raises(errors.UnsupportedFormat, match="damaged entry of key filters"):
                KeyFilters(damaged)


def test_hashes_given_for_a_filter_are_not_changed():
    hashes = hashes_of([b"b", b"a", b"b"])
    before = hashes.copy()

    key_filter(hashes)

    assert np.array_equal(hashes, before)
