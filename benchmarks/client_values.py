"""How fast values that Pulsar's clients encoded by a schema become columns, messages a second.

    python benchmarks/client_values.py
    python benchmarks/client_values.py --messages 1000

Ten fields: numbers, text, a time, a truth, nullable and not; JSON of some 170 bytes, AVRO of 40.
`two versions`: half of the messages are of an older version. `nested`: a record, a list and a map
beside two of these fields. `a map in a record` and `a union` are an eleventh field, which JSON does
not decode over whole columns. `one by one` is the file that decodes what is odd. Processor time,
the best of some rounds; nothing is stored or sent.
"""

import argparse
import json
import random
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from spark_ledger.topic.read.row_blocks import Block
from spark_ledger.topic.schema.shapes import shape_of
from spark_ledger.topic.values.plain import read_avro, read_json
from spark_ledger.topic.values.reader import ClientReader
from tests.kit.client_values import avro_bytes, block_of, reader_of, record, schema_of

TIME = {"type": "long", "logicalType": "timestamp-millis"}
FIELDS = (
    *(("id", "long"), ("carrier", ["null", "string"]), ("delay", "int"), ("distance", "double")),
    *(("origin", "string"), ("dest", "string"), ("at", TIME), ("on_time", "boolean")),
    *(("air_time", ["null", "float"]), ("tail", ["null", "string"])),
)
FLIGHT = record(*FIELDS)
OLDER = record(*FIELDS[:-1], ("dropped", "string"))
NEWER = record(*FIELDS[:-1], (*FIELDS[-1], None))
ADDRESS = record(("street", "string"), ("zip", ["null", "int"]), name="Address")
NESTED = record(
    *FIELDS[:2],
    ("address", ["null", ADDRESS]),
    ("stops", {"type": "array", "items": "string"}),
    ("delays", {"type": "map", "values": "int"}),
)
COUNTS = record(("counts", {"type": "map", "values": "int"}), name="Counts")
ODD: dict[str, tuple[Any, tuple[Any, ...]]] = {
    "a map in a record": (COUNTS, ({"counts": {}}, {"counts": {"k": 1}})),
    "a union": (["null", "int", "string"], (None, 1, "a")),
}
"""Fields with values that they have in turn."""
DISTINCT = 5_000
ROUNDS = 7


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--messages", type=int, default=100_000, help="decoded together")
    count = parser.parse_args().messages
    random.seed(1)
    for kind, encode in (("AVRO", _avro), ("JSON", _json)):
        flights = _repeated([encode(FLIGHT, _flight(i)) for i in range(DISTINCT)], count)
        older = [encode(OLDER, _flight(i) | {"dropped": "x"}) for i in range(DISTINCT)]
        pairs = zip(flights, _repeated(older, count), strict=True)
        mixed = [pair[i % 2] for i, pair in enumerate(pairs)]
        nested = _repeated([encode(NESTED, _nested(i)) for i in range(DISTINCT)], count)
        one = reader_of(schema_of(kind, FLIGHT))
        two = reader_of(schema_of(kind, NEWER), schema_of(kind, OLDER), schema_of(kind, NEWER))
        _show(f"{kind}, ten fields", one, block_of(flights))
        _show(f"{kind}, two versions", two, block_of(mixed, [i % 2 for i in range(count)]))
        _show(f"{kind}, nested", reader_of(schema_of(kind, NESTED)), block_of(nested))
        for what, (plain, values) in ODD.items():
            odd = record(*FIELDS, ("odd", plain))
            flights_odd = [
                encode(odd, _flight(i) | {"odd": values[i % len(values)]}) for i in range(DISTINCT)
            ]
            _show(f"{kind}, {what}", reader_of(schema_of(kind, odd)), block_of(flights_odd))
        shape = shape_of(schema_of(kind, FLIGHT))
        read = partial(read_avro if kind == "AVRO" else read_json, shape=shape)
        seconds = _seconds(partial(_one_by_one, read, flights[:DISTINCT]))
        _print(f"{kind}, ten fields, one by one", DISTINCT, seconds)


def _one_by_one(read: Callable[[bytes], Any], values: list[bytes]) -> None:
    for data in values:
        read(data)


def _flight(i: int) -> dict[str, Any]:
    return {
        "id": i,
        "carrier": random.choice(["AA", "DL", None]),
        "delay": random.randint(-50, 900),
        "distance": random.random() * 3000,
        "origin": "JFK",
        "dest": f"LAX{i % 7}",
        "at": 1_764_147_600_000 + i,
        "on_time": i % 2 == 0,
        "air_time": random.choice([None, 1.5]),
        "tail": f"N{i:05d}",
    }


def _nested(i: int) -> dict[str, Any]:
    return {
        "id": i,
        "carrier": "AA",
        "address": {"street": f"s{i}", "zip": i} if i % 4 else None,
        "stops": ["JFK", "LAX", "EWR"][: i % 4],
        "delays": {f"k{n}": n for n in range(i % 3)},
    }


def _avro(plain: Any, value: Any) -> bytes:
    named = {field["name"]: value[field["name"]] for field in plain["fields"]}
    return avro_bytes(json.loads(json.dumps(plain).replace("logicalType", "unused")), named)


def _json(plain: Any, value: Any) -> bytes:
    return json.dumps(value).encode()


def _repeated(values: list[bytes], count: int) -> list[bytes]:
    return (values * (count // len(values) + 1))[:count]


def _show(what: str, reader: ClientReader, block: Block) -> None:
    assert not reader.read(block).bad, "every value is decoded"
    _print(what, block.num_rows, _seconds(partial(reader.read, block)))


def _print(what: str, messages: int, seconds: float) -> None:
    print(f"{what:32} {messages / seconds / 1e6:6.2f} M messages/s")


def _seconds(call: Callable[[], object]) -> float:
    best = float("inf")
    for _ in range(ROUNDS):
        begun = time.process_time()
        call()
        best = min(best, time.process_time() - begun)
    return best


if __name__ == "__main__":
    main()
