"""What a cursor must not name, and what it must not delete: each rule of it taken alone."""

import asyncio

import pytest

from spark_ledger import errors
from spark_ledger.topic.log.intents import HEARTBEAT_S, STALE
from spark_ledger.topic.subscription import cursor_ledger
from tests.unit.spark_ledger.topic.stage import play
from tests.unit.spark_ledger.topic.subscription_stage import (
    fill,
    intent_of,
    listed,
    opened,
    positions,
    told,
)


def test_a_cursor_ledger_whose_intent_ended_before_it_was_named_is_never_named(monkeypatch):
    """The janitor may have closed and judged it by then."""

    async def act(stage):
        await fill(stage, 1000)
        cursor = await opened(stage)
        await told(cursor, 1)
        made = []
        create = cursor_ledger.create

        async def condemned_meanwhile(ledgers, intents, intent, *of):
            made.append(await create(ledgers, intents, intent, *of))
            if len(made) == 1:
                await stage.client.intents.condemn(intent.id, STALE)
            return made[-1]

        monkeypatch.setattr(cursor_ledger, "create", condemned_meanwhile)
        await told(cursor, 2)

        named = (await listed(stage)).ledger_id
        assert named not in (None, made[0].id)
        record = (await stage.client.ledgers.record(named, fresh=True)).record
        assert (await stage.client.intents.get(record.intent)).is_open
        assert await positions(stage) == {0: 2}

    play(act)


def test_a_ledger_that_the_record_still_names_is_left_and_not_deleted():
    async def act(stage):
        await fill(stage, 1000)
        cursor = await opened(stage)
        await told(cursor, 1, 2, 3)
        named = (await listed(stage)).ledger_id
        await stage.client.intents.condemn(await intent_of(stage), STALE)
        await asyncio.sleep(HEARTBEAT_S + 5)  # it looks, and goes on under another intent

        assert (await listed(stage)).ledger_id == named
        assert await positions(stage) == {0: 3}
        await cursor.abandon()
        again = await opened(stage, run="r2")
        assert await again.recovered() == {0: 3}
        await asyncio.sleep(1)
        assert (await listed(stage)).ledger_id is None
        with pytest.raises(errors.NoSuchLedger):
            await stage.client.ledgers.record(named, fresh=True)

    play(act)
