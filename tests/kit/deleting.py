"""Deleting a ledger at the metadata store as its client does: it is named, and its record goes."""

from spark_ledger.metadata import deleted_ledgers, paths
from spark_ledger.metadata.store import ANY_VERSION, Delete, MetadataStore


async def delete_ledgers(store: MetadataStore, *ledger_ids: int) -> None:
    await store.sync()
    for ledger_id in ledger_ids:
        writes = await deleted_ledgers.writes_that_name(store, [ledger_id])
        await store.multi([*writes, Delete(paths.ledger(ledger_id), ANY_VERSION)])


async def lose_records(store: MetadataStore, *ledger_ids: int) -> None:
    """As an older copy of the store lacks them, or an operator's mistake takes them."""
    for ledger_id in ledger_ids:
        await store.delete(paths.ledger(ledger_id))
