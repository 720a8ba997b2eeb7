"""Copies move to where they are placed better: real bookies on several addresses."""

import json

from spark_ledger import LedgerClient
from spark_ledger.local import LocalCluster
from tests.integration.healing import heals, is_whole, ledger_of, record_of
from tests.kit.cli import succeeds

HOSTS = ("127.0.0.1", "127.0.0.1", "127.0.0.2", "127.0.0.3")
PAYLOADS = [b"payload %d" % number for number in range(50)]


def misplaced(cluster: LocalCluster) -> int:
    said = succeeds("ledger", "audit", "--json", "--service-url", cluster.service_url)
    return json.loads(said)["misplaced"]


def has(cluster: LocalCluster, ledger_id: int, bookie_id: str) -> bool:
    return record_of(cluster, ledger_id).names(bookie_id)


def test_a_bookie_on_another_host_gets_one_of_two_copies_that_were_on_one():
    def on_hosts(number: int) -> dict[str, object]:
        return {"listen": f"{HOSTS[number]}:0"}

    with (
        LocalCluster(bookies=3, bookie_settings=on_hosts, lost_bookie_delay_s=5) as cluster,
        LedgerClient(cluster.service_url) as client,
    ):
        ledger_ids = [ledger_of(client, PAYLOADS) for _ in range(5)]
        assert misplaced(cluster) == 0, "there is no other host"
        newcomer = cluster.add_bookie()
        assert heals(lambda: all(has(cluster, one, newcomer.id) for one in ledger_ids))
        assert heals(lambda: misplaced(cluster) == 0)
        for ledger_id in ledger_ids:
            assert not all(has(cluster, ledger_id, one.id) for one in cluster.bookies[:2])
            assert is_whole(cluster, ledger_id)
            with client.open_ledger(ledger_id) as reader:
                assert [bytes(p) for _, p in reader.read(0, len(PAYLOADS) - 1)] == PAYLOADS
