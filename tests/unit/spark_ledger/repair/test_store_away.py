"""ZooKeeper goes away in the middle of an operator's verb: one error of ours, and it can be said
again."""

import random
from contextlib import aclosing, contextmanager

import pytest

from spark_ledger.errors import LedgerError
from spark_ledger.metadata import autorecovery, paths
from spark_ledger.metadata.store import StoreUnavailable
from spark_ledger.repair import decommission, status
from spark_ledger.repair.audit import audit
from spark_ledger.repair.auditor import Auditor
from spark_ledger.repair.decommission import forget
from spark_ledger.repair.limbo import repair_everywhere
from spark_ledger.repair.service import repair_once
from spark_ledger.repair.worker import Worker
from spark_ledger.topic.client import TopicClient
from spark_ledger.topic.upkeep.ledger_inventory import referred_by
from tests.unit.spark_ledger.ledger.fakes import cluster_of, simulated
from tests.unit.spark_ledger.repair.stage import in_limbo, known, ledger_of

CALLS = ("sync", "get", "set", "create", "delete", "children", "multi")
CALLS_MAX = 200
TOKENS = autorecovery.repair_tokens("secret")


@contextmanager
def away_from(store, call, monkeypatch):
    """The store fails each call from the `call`-th on, and does nothing then."""
    made = 0

    def failing(plain):
        async def called(*arguments, **options):
            nonlocal made
            made += 1
            if made > call:
                raise StoreUnavailable("it is away")
            return await plain(*arguments, **options)

        return called

    with monkeypatch.context() as patched:
        for name in CALLS:
            patched.setattr(store, name, failing(getattr(store, name)))
        yield


async def drain(ledgers):
    async with aclosing(decommission.decommission(ledgers, "a")) as looks:
        return (await anext(looks)).ledgers


async def whole(ledgers):
    topics = TopicClient(ledgers, random.Random(1), lambda: 0)
    return (await audit(ledgers, TOKENS, referred=await referred_by(topics))).ledgers


async def recover(ledgers):
    return (await repair_everywhere(ledgers, 1))[0].closed


VERBS = {
    "audit": whole,
    "auditor": lambda ledgers: Auditor(ledgers, TOKENS).look(),
    "cancel": lambda ledgers: decommission.cancel(ledgers, "d"),
    "change": lambda ledgers: status.change_settings(ledgers.metadata, lost_bookie_delay_s=7),
    "decommission": drain,
    "enable": lambda ledgers: status.enable(ledgers.metadata, force=True),
    "forget": lambda ledgers: forget(ledgers, "gone"),
    "recover": recover,
    "repair": lambda ledgers: repair_once(ledgers, idle_s=1),
    "status": lambda ledgers: status.status(ledgers.metadata),
    "underreplicated": lambda ledgers: status.underreplicated(ledgers.metadata),
    "worker": lambda ledgers: Worker(ledgers, TOKENS).round(),
}


@pytest.mark.parametrize("verb", VERBS)
def test_whichever_call_fails_the_error_is_ours_and_the_verb_can_be_said_again(verb, monkeypatch):
    @simulated
    async def scenario():
        cluster, ledgers = await cluster_of(5)
        await known(cluster, *"abcde", "gone")
        for number in range(3):
            await ledger_of(ledgers, 2, close=bool(number))
        await in_limbo(cluster, "b", 2)
        await ledgers.metadata.create(paths.draining("d"), parents=True)
        for call in range(CALLS_MAX):
            with away_from(ledgers.metadata, call, monkeypatch):
                try:
                    return await VERBS[verb](ledgers)
                except LedgerError as failure:
                    assert "it is away" in str(failure)
        raise AssertionError("it never ended well")

    scenario()
