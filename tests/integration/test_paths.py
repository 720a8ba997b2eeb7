"""docs/architecture.md walks an append, a commit and a read: each file that runs is named there.

One of each is run under a profiler, the client's part on a real cluster and the bookie's on a node
in this process; then the files that ran are compared with those that the page names.
"""

import asyncio
import time
import uuid
from collections.abc import Iterator
from contextlib import contextmanager

import pyarrow as pa
import pytest

from spark_ledger import process
from spark_ledger.spark.data_source import LedgerDataSource
from spark_ledger.spark.options.options import stream_write_options
from spark_ledger.spark.write.job import WriteJob
from spark_ledger.spark.write.tasks import commit_rows, query_intent, write_rows
from spark_ledger.spark.write.topic_writers import Task
from tests.integration.topic_rows import VALUE
from tests.kit.paths import functions_that_run, named
from tests.kit.processes import eventually
from tests.kit.settings import with_settings
from tests.simulation.loop import run
from tests.unit.bookie_server.node import CONFIG, KIB, Node, entry

ROWS = pa.record_batch({"value": ["x" * 1000] * 4000})
ADDS = "spark_ledger/ledger/add_pipeline.py"
QUIET_S = 0.5


@contextmanager
def files_that_run() -> Iterator[set[str]]:
    seen: set[str] = set()
    with functions_that_run() as ran:
        yield seen
    seen |= ran.files


def of_a_bookie() -> tuple[set[str], set[str]]:
    """What runs on a bookie for an add of a small and of a large entry, and for reads of both, out
    of the write cache and out of logs."""
    large = bytes(40 * KIB)

    async def all_of_it() -> tuple[set[str], set[str]]:
        node = await Node(with_settings(CONFIG, large_entry_bytes=16 * KIB)).start()
        await node.create_ledger(1)
        await node.add(entry(1, 0))
        with files_that_run() as adding:
            await node.add(entry(1, 1))
            await node.add(entry(1, 2, large))
        with files_that_run() as reading:
            await node.read(1, 1, 2)
        await asyncio.sleep(3 * CONFIG.flush_interval_s)
        with files_that_run() as from_logs:
            await node.read(1, 0, 2)
        return adding, reading | from_logs

    return run(all_of_it())


@pytest.fixture(scope="module", autouse=True)
def of_its_own() -> Iterator[None]:
    """A loop and connections, as in a process that has begun: what other tests' clients do by and
    by, as to close ledgers that nobody used for long, is no part of a path."""
    with pytest.MonkeyPatch.context() as patched:
        for kept in process._kept:
            patched.setattr(kept, "_made", {})
        yield


@pytest.fixture(scope="module")
def written(cluster) -> tuple[WriteJob, set[str], set[str]]:
    """A job, and what ran while a task of it wrote, and while its batch was committed."""
    given = {"topic": f"w-{uuid.uuid4().hex}", "serviceUrl": cluster.service_url}
    job = WriteJob.of(stream_write_options(given), VALUE)
    intent = query_intent(job, "query", "run")
    write_rows(job, Task(intent, 0, 0, {}), [ROWS], version=0)  # connected, topic made
    intent = query_intent(job, "query", "run")
    with files_that_run() as writing:
        result = write_rows(job, Task(intent, 0, 0, {}), [ROWS], version=0)
    assert eventually(no_add_is_acknowledged)
    with files_that_run() as committing:
        commit_rows(job, intent, 0, [result], ends_intent=False)
    return job, writing, committing


def no_add_is_acknowledged() -> bool:
    """A writer goes on once two of three bookies have: the last one's response may come late."""
    with files_that_run() as ran:
        time.sleep(QUIET_S)
    return ADDS not in ran


@pytest.fixture(scope="module")
def of_bookie() -> tuple[set[str], set[str]]:
    return of_a_bookie()


def compare(heading: str, ran: set[str]) -> None:
    page, common = named(heading), named("What every path uses")
    assert sorted(ran - page - common) == [], "these ran, and the page does not name them"
    assert sorted(page - ran) == [], "the page names these, and they did not run"


def test_the_page_walks_an_append(written, of_bookie):
    compare("The path of an append", written[1] | of_bookie[0])


def test_the_page_walks_a_commit(written):
    compare("The path of a commit", written[2])


def test_the_page_walks_a_read(written, of_bookie):
    job, _, _ = written
    source = LedgerDataSource({"topic": job.options.topic, "serviceUrl": job.options.service_url})
    with files_that_run() as reading:
        reader = source.reader(source.schema())
        tasks = reader.partitions()
        rows = sum(block.num_rows for task in tasks for block in reader.read(task))
    assert rows == ROWS.num_rows
    compare("The path of a read", reading | of_bookie[1])
