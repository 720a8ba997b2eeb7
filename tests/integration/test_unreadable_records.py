"""A list of the command line shows what can be read and names what cannot: exit status 1."""

import asyncio
import contextlib
import json
from collections.abc import Iterator

from spark_ledger import LedgerClient
from spark_ledger.local import LocalCluster
from spark_ledger.metadata import paths
from spark_ledger.metadata.store import ANY_VERSION, NodeExists
from spark_ledger.metadata.zookeeper import connect
from tests.kit.cli import spark_ledger, succeeds


@contextlib.contextmanager
def damaged(cluster: LocalCluster, path: str) -> Iterator[None]:
    """There is no record in the node meanwhile; it may be there, and is as before then."""

    async def written(value: bytes | None) -> bytes | None:
        store = await connect(cluster.service_url)
        try:
            if value is None:
                return await store.delete(path)
            try:
                await store.create(path, value, parents=True)
            except NodeExists:
                before = (await store.get(path)).value
                await store.set(path, value, ANY_VERSION)
                return before
            return None
        finally:
            await store.close()

    before = asyncio.run(written(b"{"))
    try:
        yield
    finally:
        asyncio.run(written(before))


def test_a_record_that_cannot_be_read_hides_no_other(fresh_cluster):
    cluster = fresh_cluster(bookies=1)
    url = ("--service-url", cluster.service_url)
    with LedgerClient(cluster.service_url) as client:
        ledgers = [client.create_ledger(1, 1, 1) for _ in range(2)]
        first, second = (one.ledger_id for one in ledgers)
    topics = [
        json.loads(succeeds("topic", "create", f"t{n}", "--json", *url))["id"] for n in range(2)
    ]
    for name in ("a", "b"):
        succeeds("subscription", "create", "t1", name, "--to", "earliest", *url)
    (bookie,) = json.loads(succeeds("bookie", "list", "--json", *url))
    for path, verb, bad, good in (
        (paths.ledger(first), ("ledger",), f"ledger {first}", second),
        (paths.topic(topics[0]), ("topic",), "topic t0", "t1"),
        (paths.subscription(topics[1], "a"), ("subscription", "t1"), "subscription a", "b"),
        (f"{paths.BOOKIES_KNOWN}/ghost", ("bookie",), "bookie ghost", bookie["id"]),
        (paths.broker("ghost"), ("broker",), "broker ghost", "no brokers"),
    ):
        words = (verb[0], "list", *verb[1:], *url)
        with damaged(cluster, path):
            shown, plain = spark_ledger(*words), spark_ledger(*words, "--json")
        for listed in (shown, plain):
            assert (listed.returncode, f"{bad}: [LEDGER_" in listed.stderr) == (1, True), bad
        assert str(good) in shown.stdout
        assert len(json.loads(plain.stdout)) == {"broker": 0, "bookie": 2}.get(verb[0], 1)
        assert spark_ledger(*words).returncode == 0
