import random

import pyarrow as pa
import pytest

from spark_ledger.topic.routing import murmur3_32, partitions_of

# The published test vectors of murmur3_32 with seed 0: these values may never change.
VECTORS = {
    b"": 0,
    b"a": 0x3C2569B2,
    b"abc": 0xB3DD93FA,
    b"test": 0xBA6BD213,
    b"hello": 0x248BFA47,
    b"Hello, world!": 0xC0363E43,
    b"The quick brown fox jumps over the lazy dog": 0x2E4FF723,
}


@pytest.mark.parametrize("copies", [1, 40])
def test_the_hash_is_murmur3(copies):
    keys = pa.array(list(VECTORS) * copies, pa.binary())

    assert murmur3_32(keys).tolist() == list(VECTORS.values()) * copies


def test_a_key_hashes_alike_alone_in_a_crowd_in_a_slice_and_when_far_longer_than_the_rest():
    rng = random.Random(7)
    keys = [rng.randbytes(rng.randrange(40)) for _ in range(100)] + [rng.randbytes(5001), None]
    crowd = pa.array(keys, pa.binary())

    together = murmur3_32(crowd).tolist()

    assert together == [int(murmur3_32(pa.array([key], pa.binary()))[0]) for key in keys]
    assert together[30:] == murmur3_32(crowd.slice(30)).tolist()


def test_a_partition_is_the_hash_without_its_sign_modulo_partitions_and_null_is_sticky():
    keys = pa.array([b"test", None, b"hello", None], pa.binary())

    assert partitions_of(keys, 7, sticky=5).tolist() == [
        (0xBA6BD213 & 0x7FFFFFFF) % 7,
        5,
        0x248BFA47 % 7,
        5,
    ]


def test_a_column_without_rows_or_without_bytes_is_hashed():
    assert murmur3_32(pa.array([], pa.binary())).tolist() == []
    assert murmur3_32(pa.nulls(2, pa.binary())).tolist() == [0, 0]
