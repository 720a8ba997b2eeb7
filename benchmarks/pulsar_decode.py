"""What it costs to make Arrow columns of Pulsar producers' batches, microseconds a message.

    python benchmarks/pulsar_decode.py
    python benchmarks/pulsar_decode.py --messages 100 --batches 10

Messages of 150 to 250 bytes, of several kinds; `one by one` is protobuf for each message, which
decodes what is odd. Processor time, the best of some rounds; nothing is stored or sent.
"""

import argparse
import random
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from spark_ledger.topic.entry import pulsar_batch, pulsar_columns
from tests.kit.pulsar_batches import Message, batch_of, message

KINDS: dict[str, Callable[[int], Message]] = {
    "value": lambda i: message(_value()),
    "key, value": lambda i: message(_value(), f"key-{i % 997}"),
    "key, value, time, two properties": lambda i: message(
        _value(), f"key-{i % 997}", {"unit": "C", "n": str(i)}, 1_764_147_600_000 + i
    ),
}
COLUMNS = (["value"], ["key", "value"], None)
ROUNDS = 10


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--messages", type=int, default=1000, help="in a batch")
    parser.add_argument("--batches", type=int, default=4, help="in an entry")
    given = parser.parse_args()
    random.seed(1)
    for kind, make in KINDS.items():
        sent = [batch_of([make(i) for i in range(given.messages)]) for _ in range(given.batches)]
        found = [pulsar_batch.parse(one) for one in sent]
        for columns in COLUMNS:
            rows = given.messages * given.batches
            decode = partial(pulsar_columns.decode_batches, found, columns)
            together = _us(decode, rows)
            few, pulsar_columns.ONE_BY_ONE_MESSAGES_MAX = (
                pulsar_columns.ONE_BY_ONE_MESSAGES_MAX,
                sys.maxsize,
            )
            one_by_one = _us(decode, rows)
            pulsar_columns.ONE_BY_ONE_MESSAGES_MAX = few
            asked = "all" if columns is None else ", ".join(columns)
            print(f"{kind:34} read {asked:10} {together:6.2f}   one by one {one_by_one:6.2f}")


def _value() -> bytes:
    return random.randbytes(random.randint(150, 250))


def _us(call: Callable[[], object], rows: int) -> float:
    best = float("inf")
    for _ in range(ROUNDS):
        begun = time.process_time()
        call()
        best = min(best, time.process_time() - begun)
    return best / rows * 1e6


if __name__ == "__main__":
    main()
