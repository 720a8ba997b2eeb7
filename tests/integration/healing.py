"""What records and bookies show of self-healing, on real processes."""

import json
from collections.abc import Callable

from bookie_server.api.entry import Entry
from spark_ledger import LedgerClient
from spark_ledger.ledger.cluster import judge_response
from spark_ledger.local import LocalCluster
from spark_ledger.metadata.ledger_record import LedgerRecord, derive, entries_of, should_keep
from spark_ledger.process import background_loop, ledger_store
from tests.kit.cli import succeeds
from tests.kit.processes import eventually

PATIENCE_S = 90


def status(cluster: LocalCluster) -> dict:
    return json.loads(
        succeeds("autorecovery", "status", "--json", "--service-url", cluster.service_url)
    )


def ledger_of(client: LedgerClient, payloads: list[bytes], password: bytes = b"") -> int:
    with client.create_ledger(3, 3, 2, password=password) as writer:
        for payload in payloads:
            writer.append(payload)
        return writer.ledger_id


def record_of(cluster: LocalCluster, ledger_id: int) -> LedgerRecord:
    store = ledger_store(cluster.service_url)
    return background_loop().run(store.record(ledger_id, fresh=True)).record


def all_records(cluster: LocalCluster) -> list[LedgerRecord]:
    store = ledger_store(cluster.service_url)

    async def listed() -> list[LedgerRecord]:
        return [(await store.record(one, fresh=True)).record async for one in store.list()]

    return background_loop().run(listed())


def is_whole(cluster: LocalCluster, ledger_id: int, password: bytes = b"") -> bool:
    """Whether each bookie that the record names has every entry that it should have."""
    record = record_of(cluster, ledger_id)
    bookies = ledger_store(cluster.service_url).cluster.bookies
    token = derive(password).read
    assert record.last_entry is not None

    async def has(bookie_id: str, entry_id: int) -> bool:
        asked = (bookie_id, ledger_id, entry_id, entry_id)
        response = await bookies.read(*asked, max_bytes=1 << 20, fence=False, token=token)
        said = judge_response(response, ledger_id, 0, entry_id)
        return said is not None and isinstance(said[1], Entry)

    async def all_there() -> bool:
        return all(
            [
                await has(bookie_id, entry_id)
                for fragment, entries in entries_of(record, record.last_entry or 0)
                for slot, bookie_id in enumerate(fragment.ensemble)
                for entry_id in entries
                if should_keep(record, slot, entry_id)
            ]
        )

    return background_loop().run(all_there())


def heals(condition: Callable[[], bool]) -> bool:
    return eventually(condition, PATIENCE_S)
