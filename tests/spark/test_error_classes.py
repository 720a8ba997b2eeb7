"""Every class of error that a query can meet, through Spark, in a batch and in a stream. `make
test` meets each once, in a batch where it can come to one.
"""

import inspect

import pytest

from spark_ledger import errors
from tests.spark.error_cases import CASES, ELSEWHERE
from tests.spark.scene import Scene
from tests.spark.topics import SparkTopics

KINDS = ("batch", "stream")
EVERY = [
    pytest.param(
        case,
        kind,
        id=f"{case.error_class}-{kind}",
        marks=pytest.mark.slow if kind == "stream" and not case.only else (),
    )
    for case in CASES.values()
    for kind in KINDS
    if case.only in ("", kind)
]


@pytest.fixture(scope="module")
def ten(spark, cluster) -> str:
    topics = SparkTopics(spark, cluster.service_url)
    rows = spark.range(0, 10, 1, 1).selectExpr("cast(id AS STRING) AS key", "string(id) AS value")
    topics.write(rows, "ten-rows-of-errors")
    return "ten-rows-of-errors"


@pytest.mark.parametrize(("case", "kind"), EVERY)
def test_the_class_is_in_what_spark_says(topics, topic, ten, tmp_path, case, kind):
    said = case.act(Scene(topics, kind == "stream", topic, ten, tmp_path))
    assert f"[{case.error_class}]" in said


def test_every_class_of_error_has_a_case_or_cannot_come_to_a_query():
    found = [kind for _, kind in inspect.getmembers(errors, inspect.isclass)]
    classes = {kind.error_class for kind in found if issubclass(kind, errors.LedgerError)}
    classes.remove(errors.LedgerError.error_class)
    assert not CASES.keys() & ELSEWHERE.keys()
    assert classes == CASES.keys() | ELSEWHERE.keys()
    assert all(
        case.only in ("", *KINDS) and bool(case.only) == bool(case.because)
        for case in CASES.values()
    )
