"""What bookies truly have of closed ledgers, asked past the network."""

from bookie_server.api import messages as m
from bookie_server.api.status import Status
from spark_ledger.metadata.ledger_record import LedgerRecord, derive
from tests.simulation import invariants
from tests.simulation.promises import PASSWORD
from tests.simulation.world import BookieNode, World


async def every_entry_has_its_copies(world: World) -> None:
    """Judge each closed ledger, once nothing is under way."""
    for ledger in list(world.ghost.ledgers.values()):
        if ledger.closed and not ledger.deleted:
            has = {
                node.bookie_id: await entries_at(node, ledger.record)
                for node in world.nodes
                if node.bookie is not None and ledger.names(node.bookie_id)
            }
            invariants.every_entry_has_its_copies(world.ghost, ledger, has)


async def entries_at(node: BookieNode, record: LedgerRecord) -> set[int]:
    """The entries of the ledger that the bookie gives."""
    assert record.last_entry is not None and node.bookie is not None
    token = derive(PASSWORD).read if record.verifiers is not None else b""
    found, at = set(), 0
    while at <= record.last_entry:
        where = node.bookie_id, record.ledger_id, at, record.last_entry
        answer = await node.bookie.handle(m.ReadRequest(*where, 1 << 20, token=token))
        assert isinstance(answer, m.ReadResponse)
        for result in answer.results:
            if result.status is Status.OK:
                found.add(at)
            at += 1
        if not answer.results:
            break
    return found
