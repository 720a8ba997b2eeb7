"""The audit as a Spark job finds what the audit without Spark finds."""

import json

import pytest
import typer

from spark_ledger import LedgerClient, errors
from spark_ledger.cli import ledger as cli
from spark_ledger.local import LocalCluster
from spark_ledger.metadata import paths
from spark_ledger.repair.audit import audit
from spark_ledger.repair.service import tokens_of
from spark_ledger.spark import jobs
from spark_ledger.topic import blocking
from spark_ledger.topic.upkeep.ledger_inventory import referred_by


def without_spark(service_url: str) -> "jobs.Audit":
    cluster = blocking.topics(service_url)

    async def work():
        ledgers = cluster.client.ledgers
        referred = await referred_by(cluster.client)
        return await audit(ledgers, await tokens_of(ledgers), referred=referred)

    return cluster.run(work())


@pytest.fixture(scope="module")
def own():
    """Where nobody else's ledgers are closed between two audits, as those that Spark's workers keep
    for their next batch."""
    with LocalCluster(bookies=3, autorecovery=False) as cluster:
        yield cluster.service_url


@pytest.fixture
def some(monkeypatch, own):
    """Ledgers enough for several tasks: the service URL."""
    monkeypatch.setattr(jobs, "TASK_LEDGERS_MIN", 2)
    with LedgerClient(own) as client:
        for number in range(5):
            with client.create_ledger(3, 3, 2) as writer:
                for _ in range(number):
                    writer.append(b"entry")
    return own


def test_counts_of_all_tasks_add_up_to_those_of_the_audit_without_spark(spark, some):
    found = jobs.audit(spark, some)
    assert found.is_whole and found.ledgers >= 5 and found.entries >= 10
    assert found.counts() == without_spark(some).counts()
    assert jobs.audit(spark, some, deep=True).counts() == found.counts()


def test_what_is_wrong_is_told_with_its_ledger_and_the_command_ends_with_1(spark, some, capsys):
    cluster = blocking.topics(some)
    store = cluster.client.store
    with LedgerClient(some) as client, client.create_ledger(3, 3, 2) as writer:
        writer.append(b"entry")
    before = jobs.audit(spark, some)
    path = paths.ledger(writer.ledger_id)
    node = cluster.run(store.get(path))
    record = json.loads(node.value)
    gone = {**record, "last_entry": record["last_entry"] + 1}
    cluster.run(store.set(path, json.dumps(gone).encode(), node.version))
    with pytest.raises(typer.Exit) as ended:
        cli.audit(deep=False, spark=True, json=True, service_url=some)
    assert ended.value.exit_code == 1
    assert json.loads(capsys.readouterr().out) == {
        **before.counts(),
        "entries": before.entries + 1,
        "under_replicated": before.under_replicated + 1,
        "damaged": before.damaged + 1,
    }
    (wrong,) = jobs.audit(spark, some).wrong
    assert (wrong.ledger_id, wrong.first_nowhere) == (writer.ledger_id, 1)
    now = cluster.run(store.get(path))
    cluster.run(store.set(path, node.value, now.version))


def test_an_error_of_ours_in_a_task_is_told_as_one_line(spark, monkeypatch, some):
    def away(*_):
        raise errors.Unavailable("the metadata store is away")

    monkeypatch.setattr(jobs, "audit_group", away)
    with pytest.raises(errors.Unavailable) as told:
        jobs.audit(spark, some)
    assert "the Spark job of the audit failed: [LEDGER_" in str(told.value)
    assert "the metadata store is away" in str(told.value)
    assert "\n" not in str(told.value)
