import json
import random
import re
import zlib
from pathlib import Path

import pyarrow as pa
import pytest

from spark_ledger import errors
from spark_ledger.topic.entry.routing import (
    Router,
    Routing,
    boost_string,
    crc32,
    go_string,
    java_string,
    key_hashes,
    keys_repeat,
    murmur2,
    murmur3_32,
    partitions_of,
)

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

# What Kafka's clients hash these keys to (org.apache.kafka.common.utils.Utils.murmur2).
KAFKAS = {
    b"21": -973932308,
    b"foobar": -790332482,
    b"a-little-bit-long-string": -985981536,
    b"a-little-bit-longer-string": -1486304829,
    b"lkjh234lh9fiuh90y23oiuhsafujhadof229phr9h19h89h8": -58897971,
    b"abc": 479470107,
}


@pytest.mark.parametrize("copies", [1, 40])
def test_the_hash_is_murmur3(copies):
    keys = pa.array(list(VECTORS) * copies, pa.binary())

    assert murmur3_32(keys).tolist() == list(VECTORS.values()) * copies


@pytest.mark.parametrize("copies", [1, 40])
def test_murmur2_is_that_of_kafka(copies):
    keys = pa.array(list(KAFKAS) * copies, pa.binary())

    assert murmur2(keys).view("i4").tolist() == list(KAFKAS.values()) * copies


def test_a_key_is_routed_by_murmur2_to_the_partition_that_kafka_chooses():
    route = router(Routing.MURMUR2, partitions=7, task_index=3).route
    keys = [*KAFKAS, None]

    wanted = [(n & 0x7FFFFFFF) % 7 for n in KAFKAS.values()]
    assert route(len(keys), binary(*keys), None, None).tolist() == [*wanted, 3]
    many = binary(*keys * 1000)
    hashes = key_hashes(many)  # an encoder has these for its filters: they do not decide
    assert route(len(many), many, hashes, None).tolist() == [*wanted, 3] * 1000
    assert router(Routing.MURMUR2, partitions=7, task_index=3).route(2, None, None, None) == 3


CLIENTS = json.loads((Path(__file__).parent / "client_partitions.json").read_text())
KEYS = [key.encode() for key in CLIENTS.pop("keys")]
"""200 keys, and the partitions that clients chose for them: librdkafka (crc32, and murmur2 by its
murmur2_random), Pulsar's Python client 3.13, Java's own hashCode, the source of the Go client."""


@pytest.mark.parametrize("name", CLIENTS)
def test_a_key_goes_to_the_partition_that_the_client_chooses(name):
    partitions, chosen = CLIENTS[name].values()
    route = router(Routing(name), partitions=partitions, task_index=3).route
    keys = binary(*KEYS, None)

    assert len(KEYS) == len(chosen) == 200
    assert route(len(keys), keys, None, None).tolist() == [*chosen, 3]
    assert route(200, keys.slice(0, 200), key_hashes(keys), None).tolist() == chosen
    many = binary(*[*KEYS, None] * 50)
    assert route(len(many), many, None, None).tolist() == [*chosen, 3] * 50


def test_keys_that_are_empty_or_no_text_go_where_the_clients_send_them():
    def of(name, *keys):
        route = router(Routing(name), partitions=101, task_index=7).route
        return route(len(keys), binary(*keys), None, None).tolist()

    assert of("crc32", b"", b"a") == [7, zlib.crc32(b"a") % 101], "an empty key is none"
    assert of("pulsarJava", b"", b"test") == [0, 0x364492 % 101]
    base64_of_ff = 47 * 31**3 + 119 * 31**2 + 61 * 31 + 61  # "/w=="
    assert of("pulsarJava", b"\xff") == [base64_of_ff % 101]
    assert of("pulsarGo", b"\xff") == [255 % 101]


@pytest.mark.parametrize(
    "hash_of", [murmur3_32, murmur2, crc32, go_string, java_string, boost_string]
)
def test_a_key_hashes_alike_alone_in_a_crowd_in_a_slice_and_when_far_longer_than_the_rest(hash_of):
    rng = random.Random(7)
    keys = [rng.randbytes(rng.randrange(40)) for _ in range(100)] + [rng.randbytes(5001), None]
    crowd = pa.array(keys, pa.binary())

    together = hash_of(crowd).tolist()

    assert together == [int(hash_of(pa.array([key], pa.binary()))[0]) for key in keys]
    assert together[30:] == hash_of(crowd.slice(30)).tolist()


def test_a_partition_is_the_hash_without_its_sign_modulo_partitions_and_null_is_sticky():
    keys = pa.array([b"test", None, b"hello", None], pa.binary())

    assert partitions_of(keys, 7, keyless_partition=5).tolist() == [
        (0xBA6BD213 & 0x7FFFFFFF) % 7,
        5,
        0x248BFA47 % 7,
        5,
    ]


def test_a_column_without_rows_or_without_bytes_is_hashed():
    assert murmur3_32(pa.array([], pa.binary())).tolist() == []
    assert murmur3_32(pa.nulls(2, pa.binary())).tolist() == [0, 0]
    assert murmur2(pa.array([], pa.binary())).tolist() == []
    assert murmur2(pa.nulls(2, pa.binary())).tolist() == [275646681] * 2


def router(routing, task_index=0, partitions=4):
    return Router(routing, partitions, task_index)


def binary(*values):
    return pa.array(values, pa.binary())


def test_rows_in_turn_begin_at_the_tasks_partition_and_go_on_over_calls():
    route = router(Routing.ROUND_ROBIN, task_index=6).route

    assert route(3, None, None, None).tolist() == [2, 3, 0]
    assert route(6, binary(*[b"k"] * 6), None, None).tolist() == [1, 2, 3, 0, 1, 2]


@pytest.mark.parametrize("routing", [Routing.SINGLE, Routing.SPARK])
def test_all_rows_of_a_task_go_to_one_partition_whatever_their_keys(routing):
    assert router(routing, task_index=6).route(2, binary(b"a", b"b"), None, None) == 2


def test_rows_without_keys_go_to_a_partition_by_the_index_of_their_task():
    assert router(Routing.HASH, task_index=7).route(3, None, None, None) == 3
    assert Router(Routing.SINGLE, 4, 5).route(3, None, None, None) == 1
    assert Router(Routing.HASH, 4, 5).route(1, binary(None), None, None).tolist() == [1]


def test_rows_with_keys_go_by_their_hash():
    keys = binary(b"test", b"hello")

    wanted = [(0xBA6BD213 & 0x7FFFFFFF) % 4, 0x248BFA47 % 4]
    assert router(Routing.HASH, task_index=3).route(2, keys, None, None).tolist() == wanted


@pytest.mark.parametrize("kind", [pa.int32(), pa.int64(), pa.uint8()])
def test_rows_go_to_the_partition_that_they_name(kind):
    column = pa.array([3, 0, 3], kind)

    assert router(Routing.COLUMN).route(3, None, None, column).tolist() == [3, 0, 3]
    assert router(Routing.COLUMN).route(2, None, None, column.slice(1)).tolist() == [0, 3]


@pytest.mark.parametrize("partitions", [1, 4])
def test_a_partition_that_is_none_of_the_topics_is_an_error_that_names_it(partitions):
    route = router(Routing.COLUMN, partitions=partitions).route

    with pytest.raises(errors.PartitionInvalid, match=r"PARTITION_INVALID\] .* partition 9, "):
        route(2, None, None, pa.array([0, 9], pa.int32()))
    with pytest.raises(errors.PartitionInvalid, match="row 1 of a batch is null"):
        route(2, None, None, pa.array([0, None], pa.int32()))
    for column in (None, pa.array(["0", "0"])):
        with pytest.raises(errors.ColumnTypeMismatch, match="column partition is"):
            route(2, None, None, column)


@pytest.mark.parametrize("distinct", [1, 100, 1000, 5000])
def test_keys_that_repeat_hash_as_they_do_alone(distinct):
    rng = random.Random(distinct)
    some = [b"%d" % rng.randrange(distinct) for _ in range(5000)]
    keys = binary(*[None if rng.random() < 0.02 else key for key in some])

    assert keys_repeat(keys) == (distinct <= 1000)
    assert key_hashes(keys).tolist() == murmur3_32(keys).tolist()
    assert key_hashes(keys.slice(7)).tolist() == murmur3_32(keys).tolist()[7:]


def test_the_page_on_topics_has_these_hashes():
    page = (Path(__file__).parents[4] / "docs" / "topics.md").read_text()
    listed = dict(re.findall(r"^\| (.*) \| `([0-9a-f]{8})` \|$", page, re.M))

    named = {f"`{key.decode()}`" if key else "(empty)": f"{n:08x}" for key, n in VECTORS.items()}
    assert listed == named
