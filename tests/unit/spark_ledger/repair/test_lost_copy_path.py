"""docs/architecture.md walks a lost copy: each file that runs until it is made elsewhere is named
there."""

import asyncio

from spark_ledger.repair.service import Autorecovery
from tests.kit.paths import functions_that_run, named
from tests.unit.spark_ledger.ledger.fakes import cluster_of, simulated
from tests.unit.spark_ledger.repair.stage import copies_of, gone, healing, ledger_of


@simulated
async def test_the_page_walks_a_lost_copy():
    cluster, ledgers = await cluster_of(4)
    ledger_id = (await ledger_of(ledgers, 20)).ledger_id
    ensemble = (await ledgers.record(ledger_id)).record.last_fragment.ensemble
    await healing(ledgers)
    service = asyncio.create_task((await Autorecovery.start(ledgers)).run())
    await asyncio.sleep(30)
    with functions_that_run(threads=False) as ran:
        await gone(cluster, ensemble[0])
        for _ in range(600):
            await asyncio.sleep(1)
            if not (await ledgers.record(ledger_id, fresh=True)).record.names(ensemble[0]):
                break
        await asyncio.sleep(30)
    service.cancel()
    assert all(len(names) == 3 for names in (await copies_of(cluster, ledgers, ledger_id)).values())
    page = named("The path of a lost copy")
    others = named("The path of an append") | named("The path of a read")
    others |= named("What every path uses")
    assert sorted(ran.files - page - others) == [], "these ran, and the page does not name them"
    assert sorted(page - ran.files) == [], "the page names these, and they did not run"
