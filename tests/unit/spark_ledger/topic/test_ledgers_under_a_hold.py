"""New ledgers while the metadata store is held, and their ids after an accept. An id of a block
that was taken before is not used: a store that is put back, or accepted, may not have given it
out."""

import asyncio

import pytest

from spark_ledger import errors
from spark_ledger.ledger.records import IdSpent
from spark_ledger.metadata import hold, paths
from spark_ledger.metadata.cluster import IDS_PER_EPOCH, Hold
from spark_ledger.metadata.store import Check, Create
from tests.simulation.restoring import copied, go_back
from tests.simulation.world import CLUSTER_ID
from tests.unit.spark_ledger.broker.owners import owner_of
from tests.unit.spark_ledger.topic.counted_calls import Counted
from tests.unit.spark_ledger.topic.stage import Stage, play

WHY = Hold("link 7 is not in it", "b1")
QUORUMS = (3, 3, 2)


async def held(stage: Stage) -> None:
    await hold.put(stage.world.store.session("bookie"), CLUSTER_ID, WHY)


async def accepted(stage: Stage) -> None:
    await hold.accept(stage.world.store.session("person"))


def records_of(stage: Stage) -> list[str]:
    return [path for path in copied(stage.world.store) if path.startswith(f"{paths.LEDGERS}/")]


async def plain(stage: Stage, intent) -> int:
    return (await stage.client.ledgers.create(*QUORUMS)).ledger_id


async def by_intent(stage: Stage, intent) -> int:
    while True:
        ledger_id = await stage.client.intents.ledger_id(intent)
        try:
            made = await stage.client.ledgers.create(
                *QUORUMS, topic=stage.topic.id, intent=intent.id, ledger_id=ledger_id
            )
        except IdSpent:
            continue
        return made.ledger_id


async def several(stage: Stage, intent) -> int:
    while True:
        ids = [await stage.client.intents.ledger_id(intent) for _ in range(2)]
        try:
            made = await stage.client.ledgers.create_several(
                ids, *QUORUMS, topic=stage.topic.id, intent=intent.id, durability="synced"
            )
        except IdSpent:
            continue
        return min(writer.ledger_id for writer in made)


WAYS = pytest.mark.parametrize("make", [plain, by_intent, several])


@WAYS
def test_no_ledger_is_made_while_the_store_is_held_though_ids_are_left(make):
    async def act(stage):
        intent = await stage.intent()
        await make(stage, intent)
        await held(stage)
        before = records_of(stage)
        for _ in range(2):
            with pytest.raises(errors.MetadataHeld, match="metadata accept"):
                await make(stage, intent)
        assert records_of(stage) == before

    play(act)


@WAYS
def test_a_hold_that_comes_just_before_the_multi_stops_the_ledger(make):
    async def act(stage):
        intent = await stage.intent()
        await make(stage, intent)
        before, multi = records_of(stage), stage.client.store.multi

        async def multi_beside_a_bookie(operations):
            await held(stage)
            await multi(operations)

        stage.client.store.multi = multi_beside_a_bookie
        with pytest.raises(errors.MetadataHeld):
            await make(stage, intent)
        assert records_of(stage) == before

    play(act)


@WAYS
@pytest.mark.parametrize("tried", [False, True])
def test_ids_begin_at_the_epoch_after_an_accept_in_a_process_that_ran_through_it(make, tried):
    async def act(stage):
        intent = await stage.intent()
        assert await make(stage, intent) < IDS_PER_EPOCH
        await held(stage)
        if tried:
            with pytest.raises(errors.MetadataHeld):
                await make(stage, intent)
        await accepted(stage)
        for _ in range(10):
            assert await make(stage, intent) >= IDS_PER_EPOCH

    play(act)


@WAYS
def test_an_id_that_is_left_of_an_older_store_is_not_used_once_the_newest_copy_is_back(make):
    async def act(stage):
        intent = await stage.intent()
        older = copied(stage.world.store)
        other = await stage.another()
        mine = {(await other.ledgers.create(*QUORUMS)).ledger_id for _ in range(20)}
        newest = copied(stage.world.store)
        go_back(stage.world.store, older)
        await make(stage, intent)  # out of a block that the newest copy gave to another
        await held(stage)
        with pytest.raises(errors.MetadataHeld):
            await make(stage, intent)
        go_back(stage.world.store, newest)
        assert await make(stage, intent) > max(mine)

    play(act)


@WAYS
def test_a_new_ledger_costs_one_multi_with_a_check_of_the_hold(make):
    async def act(stage):
        intent = await stage.intent()
        await make(stage, intent)
        counted = Counted(stage.client)
        await make(stage, intent)
        assert counted.taken() == {"multi": 1}
        kinds = [type(operation) for operation in counted.multis[0]]
        creates = [Create] * (2 if make is several else 1)
        assert kinds == [Check, *([] if make is plain else [Check]), *creates]
        assert counted.multis[0][0].path == paths.CLUSTER

    play(act)


def test_a_partition_that_stays_closed_is_logged_with_its_topic_and_opens_after_an_accept(caplog):
    async def act(stage):
        owner = await owner_of(stage)
        await held(stage)
        sent = owner.send([b"a"])
        await asyncio.sleep(30)
        (line,) = {r.getMessage() for r in caplog.records if "stays closed" in r.getMessage()}
        assert str(stage.topic.name) in line
        assert "metadata accept" in line
        await accepted(stage)
        await owner.all_stored(sent)

    play(act)
