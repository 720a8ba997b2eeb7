"""Work that is spread over Spark's tasks, with the same code inside as without Spark."""

import pickle
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any, TypeVar

import pyarrow as pa
from pyspark.sql import SparkSession

A = TypeVar("A")
B = TypeVar("B")


def run_each(spark: SparkSession, do: Callable[[A], B], items: Sequence[A]) -> list[B]:
    """What `do` made of each item, in their order, by a Spark task for each. An item may be done
    more than once; what is returned is of one attempt. Raises what Spark's job raises."""
    numbers = spark.range(0, len(items), 1, max(1, len(items)))  # one to a Spark task
    packed = [pickle.dumps(item) for item in items]
    made = numbers.mapInArrow(partial(_each, do, packed), "number LONG, made BINARY")
    found = {row.number: row.made for row in made.collect()}
    return [pickle.loads(found[number]) for number in range(len(items))]


def _each(
    do: Callable[[Any], Any], packed: Sequence[bytes], batches: Iterator[pa.RecordBatch]
) -> Iterator[pa.RecordBatch]:
    for batch in batches:
        for number in batch.column(0).to_pylist():
            made = pickle.dumps(do(pickle.loads(packed[number])))
            columns = [pa.array([number], pa.int64()), pa.array([made], pa.binary())]
            yield pa.RecordBatch.from_arrays(columns, names=["number", "made"])
