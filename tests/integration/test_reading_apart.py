"""Entries that lie apart, read together from real bookies: one dies on the way, one has damage."""

import signal

from spark_ledger import LedgerClient
from spark_ledger.config import ClientConfig
from spark_ledger.process import background_loop, ledger_store
from tests.integration.damage import PAYLOADS, SETTINGS, flip_in_the_entry_log, is_flushed, write
from tests.kit.processes import eventually


async def collect(ledgers, ledger_id, ids, meanwhile=None):
    """(entry id, payload) of the entries; `meanwhile` is done when the first are there."""
    reader = await ledgers.open(ledger_id, recover=False)
    found = []
    async for run in reader.read_entries(ids, entry_bytes=len(PAYLOADS[0])):
        found += [(entry.header.entry_id, bytes(entry.payload)) for entry in run]
        if meanwhile is not None:
            meanwhile()
            meanwhile = None
    return found


def test_a_bookie_killed_while_entries_apart_are_read_costs_none_of_them(fresh_cluster):
    cluster = fresh_cluster(bookies=3)
    config = ClientConfig(read_request_bytes=40_000, read_ahead_bytes=200_000)
    payloads = [b"%03d" % n * 3000 for n in range(300)]
    with LedgerClient(cluster.service_url, config) as client:
        with client.create_ledger(3, 3, 2) as writer:
            for future in [writer.append_async(payload) for payload in payloads]:
                future.result()
        ids = [n for n in range(300) if n % 3 != 1]
        ledgers = ledger_store(cluster.service_url, config)
        for turn, bookie in enumerate(cluster.bookies[:2]):
            read = collect(
                ledgers, writer.ledger_id, ids, lambda b=bookie: b.signal(signal.SIGKILL)
            )
            assert background_loop().run(read) == [(n, payloads[n]) for n in ids], turn


def test_a_damaged_copy_among_entries_apart_comes_from_another_bookie(fresh_cluster):
    cluster = fresh_cluster(bookies=3, bookie_settings=SETTINGS)
    with LedgerClient(cluster.service_url) as client:
        (ledger_id,) = write(client)
        assert eventually(lambda: all(is_flushed(b, PAYLOADS[-1]) for b in cluster.bookies))
        for bookie, damaged in zip(cluster.bookies, (6, 12, 18), strict=True):
            flip_in_the_entry_log(bookie, PAYLOADS[damaged])
        ids = list(range(0, len(PAYLOADS), 3))
        for _ in cluster.bookies:  # each is asked first once
            read = collect(ledger_store(cluster.service_url), ledger_id, ids)
            assert background_loop().run(read) == [(n, PAYLOADS[n]) for n in ids]
