"""What a user of Pulsar's Java client expects, in checks by name (Checks.java).

What cannot pass is in DIFFERENCES with the reason; docs/pulsar.md has each of them.
"""

import re
import uuid
from pathlib import Path

import pytest

from spark_ledger_demo.jars import JarsMissing
from tests.kit import pulsar_java

FILES = [Path(__file__).with_name(name) for name in ("Checks.java", "Calls.java")]
CHECKS = re.findall(r'^ +check\("(.+?)", topic', FILES[0].read_text(), re.M)
COUNT = 54
LINE = re.compile(r"(OK|FAILED) ([^:]+)(?:: (.*))?")
DIFFERENCES = {
    "a reader of a compacted topic gets the last value of each key": "no topic is compacted",
    "messages of a transaction come once it is committed": "there are no transactions",
}


@pytest.fixture(scope="module")
def results(cluster, tmp_path_factory):
    """By check why it failed, or None."""
    arguments = (cluster.broker_url, cluster.admin_url, f"checks-{uuid.uuid4().hex[:8]}")
    try:
        printed = pulsar_java.run_files(FILES, tmp_path_factory.mktemp("classes"), *arguments)
    except JarsMissing as missing:
        pytest.skip(f"Pulsar's Java client is not here: {missing}")
    print(printed)  # of a check that fails, whether its first try failed likewise
    lines = map(LINE.fullmatch, printed.splitlines())
    return {line[2]: line[3] for line in lines if line}


@pytest.mark.parametrize("name", [name for name in CHECKS if name not in DIFFERENCES])
def test_a_program_in_java_finds_what_it_expects(results, name):
    assert name in results
    assert results[name] is None, results[name]


def test_every_difference_is_one(results):
    assert len(results) == len(CHECKS) == COUNT
    assert {name for name in DIFFERENCES if results[name]} == set(DIFFERENCES)
