"""What writers of a topic leave behind on a simulated cluster: ledgers, nodes, and for how long a
ledger was open."""

from collections.abc import Iterator

from spark_ledger.metadata import ledger_record, paths
from spark_ledger.metadata.ledger_record import LedgerRecord
from tests.simulation.store import SimStore
from tests.simulation.world import World


def nodes_below(store: SimStore, path: str) -> int:
    names = store.peek_children(path)
    return len(names) + sum(nodes_below(store, f"{path}/{name}") for name in names)


def ledgers_made(world: World) -> dict[int, LedgerRecord]:
    """By id the last record of each ledger that was ever made."""
    return {ledger_id: record for _, ledger_id, record in _records(world)}


def longest_open_s(world: World, now_s: float) -> float:
    """For how long the ledger that was open longest was so; until now if it still is."""
    made_s: dict[int, float] = {}
    closed_s: dict[int, float] = {}
    for at_s, ledger_id, record in _records(world):
        made_s.setdefault(ledger_id, at_s)
        if record.closed:
            closed_s.setdefault(ledger_id, at_s)
    return max((closed_s.get(one, now_s) - since_s for one, since_s in made_s.items()), default=0.0)


def _records(world: World) -> Iterator[tuple[float, int, LedgerRecord]]:
    """(when, ledger, what then was its record), in the order in which they were written."""
    for commit in world.store.log:
        for change in commit.changes:
            name = change.path.removeprefix(f"{paths.LEDGERS}/").replace("/", "")
            is_ledger = change.path.startswith(f"{paths.LEDGERS}/") and len(name) == 19
            if is_ledger and change.after:
                yield commit.time, int(name), ledger_record.decode(change.after.value)
