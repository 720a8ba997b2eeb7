"""A broker's live ledger whose end no bookie can decide: one lost its disk, the other is torn."""

import pytest

from bookie_server.ledgers.registry import LedgerJudgement
from bookie_server.logs.index import LimboReason
from spark_ledger.metadata.ledger_record import RecordState
from tests.simulation import replay
from tests.simulation.brokers import work as broker_work
from tests.simulation.brokers.work import BrokerWork
from tests.simulation.chaos import Chaos
from tests.simulation.scenario import SeedFailed, run_seed
from tests.simulation.undecided import Undecided

OFF = ("over_budget", "healing", "lasting", "operators", "page_cache")
ALONE = {
    "brokers": True,
    "topics": True,
    "quorum": (2, 2, 2),
    "bookies": 3,
    "faults": (),
    **dict.fromkeys(OFF, False),
}
SEEDS = range(12)
"""In the first of them in which a ledger is left that no bookie can decide, it is looked at."""


@pytest.fixture
def declared(monkeypatch):
    """At the end of the chaos a broker's live ledger is made so; which ledgers were then closed by
    whom with a bookie declared gone."""
    made, declared, heal, begun = [], [], Chaos.heal, BrokerWork.__init__
    plain = Undecided.recover_without_the_lost

    def remembered(work, *args):
        made[:] = [work]  # each seed has its own
        begun(work, *args)

    async def harmed(chaos):
        (work,) = made
        ledgers = [
            ledger
            for ledger in chaos.world.ghost.ledgers.values()
            if ledger.record.state is RecordState.OPEN and ledger.acked >= 0
            if ledger.record.topic == work.log.topic_id and not ledger.deleted
        ]
        for broker in work.living():
            broker.kill()
        lost, torn = ledgers[-1].record.last_fragment.ensemble
        for node in chaos.world.nodes:
            if node.bookie_id == torn:
                torn_ones = [LedgerJudgement(i.ledger_id, LimboReason.TORN, False) for i in ledgers]
                await node.bookie.ledgers.put_in_limbo_or_fence(torn_ones)
            elif node.bookie_id == lost:
                chaos.kill(node, "none", back_s=0.1, blank=True)
        await heal(chaos)

    async def noted(undecided, client, ledger):
        declared.append((client.name, ledger.record.topic == made[0].log.topic_id))
        await plain(undecided, client, ledger)

    monkeypatch.setattr(BrokerWork, "__init__", remembered)
    monkeypatch.setattr(Chaos, "heal", harmed)
    monkeypatch.setattr(Undecided, "recover_without_the_lost", noted)
    return declared


def with_an_operator(declared):
    """The first seed in which an operator declares the bookies gone, if that comes to the end."""
    for seed in SEEDS:
        run_seed(seed, replay.changed_plan(seed, ALONE))
        if ("operator of undecided ledgers.1", True) in declared:
            return seed
        declared.clear()
    raise AssertionError(f"in no seed of {SEEDS} a ledger is left undecided")


def test_all_who_use_brokers_come_to_the_end_once_an_operator_declares_the_lost_bookie_gone(
    declared,
):
    with_an_operator(declared)


@pytest.mark.slow
def test_without_an_operator_they_do_not(declared, monkeypatch):
    seed = with_an_operator(declared)
    declared.clear()
    monkeypatch.setattr(broker_work, "DECIDED_S", 1e9)
    with pytest.raises(SeedFailed, match=r"invariant (B10|34)"):
        run_seed(seed, replay.changed_plan(seed, ALONE))
    assert declared == []
