"""A bookie that will never come back, taken off the list of those ever seen.

Always true: one that is registered, or that any ledger's record names, stays on the list: its
copies may be wanted still. What it listed as in limbo, that it was drained, and that it was
accepted as lost, goes with it.
"""

import contextlib

from spark_ledger.errors import BadConfig, NoSuchLedger, counted
from spark_ledger.ledger.client import LedgerStore
from spark_ledger.metadata import autorecovery, paths
from spark_ledger.metadata.autorecovery import BadSettings
from spark_ledger.metadata.store import MetadataStore, NoNode
from spark_ledger.metadata.store_calls import names_in, reachable


async def forget(ledgers: LedgerStore, bookie_id: str) -> None:
    """Raises BadConfig when the bookie was never seen, is registered, or is named by a ledger;
    Unavailable: what was taken off already stays off, and a second call goes on."""
    with reachable("forgetting a bookie"):
        await _forget(ledgers, bookie_id)


async def _forget(ledgers: LedgerStore, bookie_id: str) -> None:
    store = ledgers.metadata
    await store.sync()
    if bookie_id not in await names_in(store, paths.BOOKIES_KNOWN):
        raise BadConfig(
            f"no bookie {bookie_id!r} was ever registered there",
            "`spark-ledger bookie list` tells which were.",
        )
    for folder in (paths.BOOKIES_AVAILABLE, paths.BOOKIES_READONLY):
        if bookie_id in await names_in(store, folder):
            raise BadConfig(f"bookie {bookie_id} is registered: it runs", "Stop it first.")
    named = await _named_by(ledgers, bookie_id)
    if named:
        raise BadConfig(
            f"{counted(len(named), 'ledger')} still on bookie {bookie_id}, the first is {named[0]}",
            "It may hold the copy that is needed: bring it back, or wait until its copies were made"
            " elsewhere (`spark-ledger autorecovery status`).",
        )
    for name in await names_in(store, paths.limbo(bookie_id)):
        await _delete(store, f"{paths.limbo(bookie_id)}/{name}")
    await _delete(store, paths.limbo(bookie_id))
    await _delete(store, paths.draining(bookie_id))
    with contextlib.suppress(BadSettings):
        accepted = (await autorecovery.read_settings(store)).accepted
        if bookie_id in accepted:
            others = tuple(one for one in accepted if one != bookie_id)
            await autorecovery.change_settings(store, accepted=others)
    await _delete(store, f"{paths.BOOKIES_KNOWN}/{bookie_id}")


async def _named_by(ledgers: LedgerStore, bookie_id: str) -> list[int]:
    found = []
    async for ledger_id in ledgers.list():
        with contextlib.suppress(NoSuchLedger):  # deleted meanwhile
            record = (await ledgers.record(ledger_id, fresh=True)).record
            if record.names(bookie_id):
                found.append(ledger_id)
    return found


async def _delete(store: MetadataStore, path: str) -> None:
    with contextlib.suppress(NoNode):
        await store.delete(path)
