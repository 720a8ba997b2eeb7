"""A node whose ledgers are in all states, and what limbo makes of them."""

import asyncio
import dataclasses

from bookie_server.api import messages as m
from bookie_server.api.status import Status
from bookie_server.journal.writer import segment_ids, segment_path
from spark_ledger.metadata import cluster, ledger_record, paths
from spark_ledger.metadata.ledger_record import (
    Fragment,
    RecordState,
)
from spark_ledger.metadata.store import NoNode
from tests.kit.settings import with_settings
from tests.unit.bookie_server.node import CONFIG, ID, Node, entry

OK, ABSENT, LIMBO, TORN = (
    Status.OK,
    Status.NO_SUCH_ENTRY,
    Status.LIMBO,
    Status.LIMBO_TORN,
)


CLUSTER_ID = "cluster-1"


OPEN, RECOVERING, CLOSED, OURS_NOT, UNMET = 1, 2, 3, 4, 5


async def change(node, ledger_id, **fields):
    """Write the ledger's record as a client would have left it."""
    admin = node.store.session("admin")
    found = await admin.get(paths.ledger(ledger_id))
    record = dataclasses.replace(ledger_record.decode(found.value), **fields)
    await admin.set(paths.ledger(ledger_id), ledger_record.encode(record), found.version)


async def with_ledgers_in_all_states(check_s=5.0):
    """A bookie with two entries of ledgers 1 to 4, which are OPEN, IN_RECOVERY,
    CLOSED, and another bookie's; ledger 5 is OPEN and names it, but it never met it."""

    node = Node(with_settings(CONFIG, limbo_check_s=check_s), cluster_id=CLUSTER_ID)
    await cluster.ensure(node.store.session("admin"), CLUSTER_ID)
    await node.create_ledger(OPEN, RECOVERING, CLOSED, OURS_NOT, UNMET)
    await node.start()
    for ledger_id in (OPEN, RECOVERING, CLOSED, OURS_NOT):
        for entry_id in range(2):
            assert await node.add(entry(ledger_id, entry_id)) == [OK]
    await change(node, RECOVERING, state=RecordState.IN_RECOVERY)
    end = {"last_entry": 1, "length_bytes": 14, "rows": 2}
    await change(node, CLOSED, state=RecordState.CLOSED, **end)
    await change(node, OURS_NOT, fragments=(Fragment(0, ("another",)),))
    return node


async def tear(node):
    """Crash in the middle of the write of entry 7 of the open ledger; it is not started again."""
    tail = asyncio.ensure_future(node.add(entry(OPEN, 7)))
    await asyncio.sleep(0.0001)
    assert not tail.done(), "written, and not synced yet"
    node.die("all")
    tail.cancel()
    path = segment_path((await segment_ids(node.journal_disk))[-1])
    if entry(OPEN, 7) not in node.journal_disk.content(path):
        path = segment_path((await segment_ids(node.journal_disk))[-2])
    at = node.journal_disk.content(path).index(entry(OPEN, 7))
    node.journal_disk.flip_bit(path, 8 * (at + 9))


async def listed(node):
    admin = node.store.session("admin")
    await admin.sync()
    try:
        names = await admin.children(paths.limbo(ID))
    except NoNode:
        return {}
    return {
        int(name): (await admin.get(paths.limbo(ID, int(name)))).value.decode()
        for name in sorted(names, key=int)
    }


async def lacks(node, ledger_id):
    """What is said of an entry that is not stored."""
    (status,) = await node.statuses(ledger_id, 9, 9)
    return status


async def ask(node, ledger_id, revision=None, token=b""):
    clear = revision is not None
    request = m.ClearLimboRequest(ID, ledger_id, token, clear, revision or 0)
    return await node.request("ClearLimbo", request)
