"""A cluster of scripted bookies that loses some, and the repair of its ledgers."""

import asyncio

from spark_ledger.metadata import autorecovery, paths
from spark_ledger.repair.auditor import Auditor
from spark_ledger.repair.worker import Worker

DELAY_S = 20.0
TOKENS = autorecovery.repair_tokens("secret")


async def healing(ledgers, **settings):
    """An auditor and a worker."""
    settings = {"lost_bookie_delay_s": DELAY_S, "repair_bytes_per_s": 0, **settings}
    await autorecovery.change_settings(ledgers.metadata, **settings)
    return Auditor(ledgers, TOKENS), Worker(ledgers, TOKENS)


async def gone(cluster, *names):
    for name in names:
        cluster.bookies[name].refusing = True
        await cluster.deregister(name)
    await asyncio.sleep(1)  # for clients to hear of it


async def look_for(auditor, worker, seconds, step_s=1.0):
    """Look again and again; the last report and all outcomes."""
    outcomes = []
    for _ in range(int(seconds / step_s)):
        report = await auditor.look()
        outcomes += await worker.round()
        await asyncio.sleep(step_s)
    return report, outcomes


async def copies_of(cluster, ledgers, ledger_id):
    """By entry who of those that the record names has it."""
    record = (await ledgers.record(ledger_id, fresh=True)).record
    found = {}
    for entry_id in range((record.last_entry or 0) + 1):
        ensemble = record.fragment_of(entry_id).ensemble
        found[entry_id] = sorted(
            name for name in ensemble if (ledger_id, entry_id) in cluster.bookies[name].entries
        )
    return found


async def ledger_of(ledgers, entries, sizes=(3, 3, 2), *, close=True, **options):
    """A ledger of so many entries; its writer."""
    writer = await ledgers.create(*sizes, **options)
    await asyncio.gather(*[writer.append([b"payload %d" % number]) for number in range(entries)])
    await asyncio.sleep(1)  # for the last copies
    if close:
        await writer.close()
    return writer


async def in_limbo(cluster, name, ledger_id, reason="lost"):
    cluster.bookies[name].limbo[ledger_id] = 1
    value = b'{"reason":"%s"}' % reason.encode()
    await cluster.admin.create(paths.limbo(name, ledger_id), value, parents=True)


def lose(cluster, name, *keys):
    for key in keys:
        del cluster.bookies[name].entries[key]


async def known(cluster, *names):
    for name in names:
        await cluster.admin.create(f"{paths.BOOKIES_KNOWN}/{name}", b"", parents=True)
