"""Intents and their blocks of ledger ids go once nobody can need them (hazard 12)."""

import asyncio

import pytest

from spark_ledger import errors
from spark_ledger.metadata import paths
from spark_ledger.metadata.store import ANY_VERSION, MultiFailed, OutcomeUnknown
from spark_ledger.metadata.store_calls import store_now_ms
from spark_ledger.topic.commit.commit import CommitKind
from spark_ledger.topic.log import intents, records
from spark_ledger.topic.log.actions import Trim
from spark_ledger.topic.log.intents import IDS_PER_BLOCK
from spark_ledger.topic.log.names import escape
from spark_ledger.topic.upkeep import intent_expiry
from spark_ledger.topic.upkeep.intent_expiry import ExpiryResult, IntentExpiry
from spark_ledger.topic.upkeep.upkeep import Upkeep
from tests.unit.spark_ledger.topic.stage import QUERY, TARGET, play

KEPT_S = 60
ROUND_S = 100


@pytest.fixture(autouse=True)
def kept_for_minutes(monkeypatch):
    monkeypatch.setattr(intent_expiry, "KEPT_MS", KEPT_S * 1000)
    monkeypatch.setattr(intent_expiry, "ROUND_S", ROUND_S)
    monkeypatch.setattr(intents, "IDS_KEPT_S", KEPT_S / 2)
    records.log_unreadable.cache_clear()


async def removed(stage, expiry=None):
    """What a pass removes now, of a process that has not looked before."""
    client = await stage.another()
    expiry = expiry or IntentExpiry(client.store)
    return await expiry.once(await store_now_ms(client.store))


def there(stage, path):
    return stage.world.store.peek(path) is not None


def txn_of(intent):
    return paths.txn(escape(intent.app_id), escape(intent.target))


async def batch(stage, *rows, app="app", random=True, inline=True):
    """A batch write that is done."""
    intent = await stage.client.intents.open_batch_intent(app, "r", "t", random=random)
    written = await stage.written(intent, rows, inline=inline)
    await stage.commit(intent, 0, written, finish_intent=True)
    await stage.client.cache.close()
    return intent, written


def test_a_random_app_id_goes_with_its_intent_when_both_are_old():
    async def act(stage):
        intent, _ = await batch(stage, b"a")

        early = await removed(stage)
        await asyncio.sleep(KEPT_S)
        late = await removed(stage)

        assert (early, late) == (ExpiryResult(), ExpiryResult(1, 0))
        assert not stage.world.store.peek_children(paths.INTENTS)
        assert not there(stage, txn_of(intent).rpartition("/")[0])
        assert await stage.rows() == [(0, b"a")]

    play(act)


@pytest.mark.parametrize("what", ["intent", "block"])
def test_what_cannot_be_read_of_one_intent_stays_and_stops_no_other(what, caplog):
    async def act(stage):
        bad, _ = await batch(stage, b"a", app="bad", inline=False)
        await batch(stage, b"b")
        blocks = paths.intent_blocks(bad.id)
        (name,) = stage.world.store.peek_children(blocks)
        path = paths.intent(bad.id) if what == "intent" else f"{blocks}/{name}"
        await stage.client.store.set(path, b"{", ANY_VERSION)
        await asyncio.sleep(KEPT_S)
        assert await removed(stage) == ExpiryResult(1, 0)
        assert there(stage, path)
        assert bad.id in caplog.text

    play(act)


def test_the_record_of_a_named_app_id_stays_for_ever():
    async def act(stage):
        intent, _ = await batch(stage, b"a", random=False)
        await asyncio.sleep(KEPT_S)

        assert await removed(stage) == ExpiryResult(1, 0)

        assert there(stage, txn_of(intent))
        again = await stage.client.intents.open_batch_intent("app", "r2", "t")
        outcome = await stage.commit(again, 0, await stage.written(again, [b"a"]))
        assert (outcome.kind, again.record.w0) == (CommitKind.ALREADY, 0)

    play(act)


def test_the_time_begins_when_the_intent_ends():
    async def act(stage):
        intent = await stage.client.intents.open_batch_intent("app", "r", "t", random=True)
        await asyncio.sleep(2 * KEPT_S)
        assert await removed(stage) == ExpiryResult()
        await stage.client.intents.condemn(intent.id, "test")
        await asyncio.sleep(KEPT_S - 5)
        assert await removed(stage) == ExpiryResult()
        await asyncio.sleep(10)
        assert await removed(stage) == ExpiryResult(1, 0)

    play(act)


def test_an_intent_stays_as_long_as_one_of_its_ledgers_is_there():
    async def act(stage):
        intent, _ = await batch(stage, b"a", inline=False)
        await stage.client.topics.change_policies("t", {"delete_delay_ms": 1})
        await asyncio.sleep(KEPT_S)
        assert await removed(stage) == ExpiryResult()
        assert (await stage.janitor.clean()).kept

        trimming = await stage.client.intents.open_system_intent("trim", "t")
        await stage.client.commit_actions(stage.topic.id, [Trim(((0, 1),))], trimming)
        await asyncio.sleep(1)
        assert len((await stage.janitor.clean()).deleted) == 1

        assert await removed(stage) == ExpiryResult(1, 1)
        assert not there(stage, paths.intent(intent.id))

    play(act)


def test_of_a_query_the_intent_stays_when_it_has_ended_and_its_empty_blocks_go():
    async def act(stage):
        old = await stage.intent("run-1")
        await stage.written(old, [b"failed"])
        await stage.client.cache.close()
        new = await stage.intent("run-2")
        await stage.janitor.clean()
        await asyncio.sleep(KEPT_S)

        assert await removed(stage) == ExpiryResult(0, 1)

        assert there(stage, paths.intent(old.id))
        with pytest.raises(errors.LedgerFenced):
            await stage.client.intents.open_query_intent(QUERY, "run-1", TARGET)
        assert (await stage.intent("run-2")).id == new.id

    play(act)


def test_what_is_left_of_an_old_block_is_not_used_so_an_open_intents_old_block_goes():
    async def act(stage):
        intent = await stage.intent()
        first = await stage.client.intents.ledger_id(intent)
        await asyncio.sleep(KEPT_S / 2 - 1)
        assert await stage.client.intents.ledger_id(intent) == first + 1
        await asyncio.sleep(KEPT_S / 2)

        assert await stage.client.intents.ledger_id(intent) >= first + IDS_PER_BLOCK
        await asyncio.sleep(2)
        assert await removed(stage) == ExpiryResult(0, 1)

    play(act)


def test_a_committer_that_finds_neither_says_that_it_does_not_know():
    async def act(stage):
        with pytest.raises(errors.CommitOutcomeUnknown, match="the run ended long ago"):
            await looked_up_late(stage, random=True)
        assert await stage.rows() == [(0, b"a")]

    play(act)


def test_a_committer_of_a_named_app_finds_its_commit_without_its_intent():
    async def act(stage):
        assert (await looked_up_late(stage, random=False)).kind is CommitKind.COMMITTED

    play(act)


async def looked_up_late(stage, random):
    """A batch commit that is applied, whose answer is lost while its process stands still until its
    intent has expired."""
    intents, store = stage.client.intents, stage.client.store
    intent = await intents.open_batch_intent("app", "r", "t", random=random)
    written = await stage.written(intent, [b"a"], inline=True)
    multi = store.multi

    async def lost(operations):
        store.multi = multi
        await multi(operations)
        await asyncio.sleep(KEPT_S)
        assert await removed(stage) == ExpiryResult(1, 0)
        raise OutcomeUnknown

    store.multi = lost
    options = {"finish_intent": True, "timeout_s": 10 * KEPT_S}
    return await stage.commit(intent, 0, written, **options)


def test_a_committer_that_never_sent_anything_does_not_know_either():
    async def act(stage):
        intent, written = await batch(stage, b"a")
        await asyncio.sleep(KEPT_S)
        assert await removed(stage) == ExpiryResult(1, 0)

        with pytest.raises(errors.CommitOutcomeUnknown, match="the run ended long ago"):
            await stage.commit(intent, 0, written)

    play(act)


def test_a_pass_does_a_bounded_part_and_the_next_one_goes_on(monkeypatch):
    monkeypatch.setattr(intent_expiry, "INTENTS_PER_PASS", 3)

    async def act(stage):
        for n in range(7):
            intent = await stage.client.intents.open_batch_intent(f"a{n}", "r", "t", random=True)
            await stage.client.intents.finish(intent.id)
        await asyncio.sleep(KEPT_S)
        expiry = IntentExpiry((await stage.another()).store)

        assert [(await removed(stage, expiry)).intents for _ in range(4)] == [3, 3, 1, 0]

        intent = await stage.client.intents.open_batch_intent("b", "r", "t", random=True)
        await stage.client.intents.finish(intent.id)
        await asyncio.sleep(KEPT_S)
        assert (await removed(stage, expiry)).intents == 0
        await asyncio.sleep(ROUND_S)
        assert (await removed(stage, expiry)).intents == 1

    play(act)


def test_a_removal_that_fails_is_done_by_a_later_round():
    async def act(stage):
        await batch(stage, b"a")
        await asyncio.sleep(KEPT_S)
        client = await stage.another()
        expiry, multi = IntentExpiry(client.store), client.store.multi

        async def fails(operations):
            client.store.multi = multi
            raise MultiFailed(0, OutcomeUnknown())

        client.store.multi = fails
        assert await removed(stage, expiry) == ExpiryResult()
        await asyncio.sleep(ROUND_S)
        assert await removed(stage, expiry) == ExpiryResult(1, 0)

    play(act)


def test_maintenance_removes_what_ended_long_ago_and_a_janitor_that_knew_of_it_goes_on():
    async def act(stage):
        await batch(stage, b"a")
        upkeep = Upkeep(stage.client)
        first = await upkeep.once()
        await asyncio.sleep(KEPT_S + ROUND_S)
        dry = await upkeep.once(dry_run=True)
        second = await upkeep.once()
        third = await upkeep.once()

        assert [one.expired.intents for one in (first, dry, second, third)] == [0, 0, 1, 0]
        assert (second.is_eventful, third.is_eventful) == (True, False)
        assert "1 writer(s) of long ago forgotten" in second.summary()

    play(act)
