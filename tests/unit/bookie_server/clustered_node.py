"""A node of several directories that belongs to a cluster."""

import json

from bookie_server.api import messages as m
from bookie_server.api.status import Status
from bookie_server.config import StorageConfig
from spark_ledger.metadata import cluster, paths
from spark_ledger.metadata.store import NoNode
from tests.kit.settings import with_settings
from tests.unit.bookie_server.node import CONFIG, ID, entry
from tests.unit.bookie_server.wide_node import LEDGERS, Wide

OK, ABSENT, LIMBO = Status.OK, Status.NO_SUCH_ENTRY, Status.LIMBO


CLUSTER_ID = "cluster-1"
SETTINGS = with_settings(CONFIG, limbo_check_s=5.0, gc_interval_s=20.0, tombstone_sweep_s=20.0)


class Clustered(Wide):
    """A wide node that knows its cluster, so it lists and collects."""

    def __init__(
        self, journals: int = 1, ledgers: int = 2, config: StorageConfig = SETTINGS
    ) -> None:
        super().__init__(journals, ledgers, config)
        self.cluster_id = CLUSTER_ID

    async def listed(self) -> dict[int, str]:
        admin = self.store.session("admin")
        await admin.sync()
        try:
            names = await admin.children(paths.limbo(ID))
        except NoNode:
            return {}
        nodes = {int(name): await admin.get(paths.limbo(ID, int(name))) for name in names}
        return {i: json.loads(nodes[i].value)["reason"] for i in sorted(nodes)}

    async def ask(self, ledger_id: int, revision: int | None = None) -> m.ClearLimboResponse:
        clear = revision is not None
        request = m.ClearLimboRequest(ID, ledger_id, b"", clear, revision or 0)
        response: m.ClearLimboResponse = await self.request("ClearLimbo", request)
        return response


async def spread_over_directories(journals=1, ledgers=2):
    """Odd ledgers are on d1, even ones on d0, two entries each."""
    node = Clustered(journals, ledgers)
    await cluster.ensure(node.store.session("admin"), CLUSTER_ID)
    await node.start()
    await node.create_ledger(*LEDGERS)
    for ledger in LEDGERS:
        full = node.ledgers["d0" if ledger % 2 or ledgers == 1 else "d1"]
        full.fill_up(1 << 30)
        await node.bookie.disks.look()
        assert await node.add(entry(ledger, 0), entry(ledger, 1)) == [OK, OK]
        full.empty_out()
    return node


def home_of(node, journal):
    """A ledger whose records go to that journal."""
    homes = node.journal_homes
    return next(i for i in LEDGERS if homes.get(i) == journal)
