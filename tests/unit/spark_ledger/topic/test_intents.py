import asyncio
from dataclasses import replace

import pytest

from spark_ledger import errors
from spark_ledger.metadata import paths
from spark_ledger.topic.client import TopicClient
from spark_ledger.topic.log import records
from spark_ledger.topic.log.intents import STALE, SUPERSEDED
from tests.unit.spark_ledger.topic.stage import NOW_MS, QUERY, TARGET, play


def test_all_tasks_of_a_run_get_the_same_intent_whoever_asks_first():
    async def act(stage):
        clients = [stage.client, *[await stage.another() for _ in range(4)]]
        intents = await asyncio.gather(
            *(client.intents.open_query_intent(QUERY, "r", TARGET) for client in clients)
        )

        assert [intent.id for intent in intents] == [intents[0].id] * 5
        assert intents[0].is_open

    play(act)


def test_a_task_that_reads_the_pointer_just_before_another_moves_it_is_not_superseded():
    async def act(stage):
        await stage.intent("run-0")
        late = await stage.another()
        get, made = late.store.get, []

        async def overtaken(path, watch=None):
            found = await get(path, watch)
            if path.startswith(paths.QUERIES) and not made:
                made.append(await stage.intent("run-1"))
            return found

        late.store.get = overtaken
        intent = await late.intents.open_query_intent(QUERY, "run-1", TARGET)

        assert intent == made[0]

    play(act)


def test_a_new_run_condemns_the_older_run_which_can_do_nothing_more():
    async def act(stage):
        old = await stage.intent("run-1")
        result = await stage.written(old, [b"a"])
        new = await stage.intent("run-2")

        ended = await stage.client.intents.get(old.id)
        assert (ended.record.why, new.is_open) == (SUPERSEDED, True)
        with pytest.raises(errors.LedgerFenced, match="superseded"):
            await stage.commit(old, 0, result)
        with pytest.raises(errors.LedgerFenced):
            await stage.intent("run-1")
        other = await stage.another()
        with pytest.raises(errors.LedgerFenced):
            await other.intents.ledger_id(old)

    play(act)


def test_a_run_condemned_as_stale_goes_on_under_a_new_generation():
    async def act(stage):
        first = await stage.intent()
        await stage.client.intents.condemn(first.id, STALE)

        second = await stage.intent()

        assert (second.record.generation, second.is_open, second.id != first.id) == (1, True, True)
        assert (await stage.intent()).id == second.id

    play(act)


def test_an_intent_notes_the_version_that_was_recorded_when_it_was_made():
    async def act(stage):
        first = await stage.intent("run-1")
        await stage.commit(first, 4, await stage.written(first, [b"a"]))

        second = await stage.intent("run-2")

        assert (first.record.w0, second.record.w0) == (records.NO_VERSION, 4)

    play(act)


def test_an_intent_ends_once():
    async def act(stage):
        intents = stage.client.intents
        intent = await intents.open_batch_intent("app", "r", TARGET)

        await intents.finish(intent.id)
        after = await intents.condemn(intent.id, STALE)

        assert after.record.state is records.IntentState.DONE
        with pytest.raises(errors.LedgerFenced, match="no intent"):
            await intents.get("never")

    play(act)


def test_ledger_ids_are_recorded_under_their_intent_before_they_are_used():
    async def act(stage):
        one, other = [
            await stage.client.intents.open_batch_intent("app", f"{n}", TARGET) for n in range(2)
        ]
        ids = [await stage.client.intents.ledger_id(one) for _ in range(10)]
        theirs = await stage.client.intents.ledger_id(other)

        recorded = []
        for name in stage.world.store.peek_children(paths.intent_blocks(one.id)):
            node = stage.world.store.peek(f"{paths.intent_blocks(one.id)}/{name}")
            block = records.decode_block(node.value)
            recorded += range(block.first, block.first + block.count)
        assert set(ids) <= set(recorded)
        assert len(set(ids)) == 10
        assert theirs not in recorded

    play(act)


def test_heartbeats_are_shown_now_and_then_and_their_failure_is_no_error():
    async def act(stage):
        intent = await stage.intent()
        path = paths.intent_heartbeat(intent.id)
        for _ in range(10):
            await stage.client.intents.heartbeat(intent)
        assert stage.world.store.peek(path).version == 1

        await asyncio.sleep(100)
        await stage.client.intents.heartbeat(intent)
        assert stage.world.store.peek(path).version == 2

        await asyncio.sleep(100)
        stage.world.store.stall(60)
        await stage.client.intents.heartbeat(intent)

    play(act)


def test_a_process_remembers_no_more_than_so_many_intents(monkeypatch):
    monkeypatch.setattr("spark_ledger.topic.log.intents.INTENTS_REMEMBERED_MAX", 3)

    async def act(stage):
        intents, ids = stage.client.intents, []
        opened = [await intents.open_batch_intent("app", f"{n}", TARGET) for n in range(6)]
        for intent in (*opened, *opened):  # of the first ones nothing is remembered any more
            await intents.heartbeat(intent)
            ids.append(await intents.ledger_id(intent))
        writes = []
        stage.world.store.listeners.append(lambda *_: writes.append(None))
        for intent in (*opened[3:], opened[0]):
            await intents.heartbeat(intent)
            assert bool(writes) == (intent is opened[0]), "it beat a moment ago"
            writes.clear()
            ids.append(await intents.ledger_id(intent))
            assert bool(writes) == (intent is opened[0]), "a block of ids is at hand"
        assert len(set(ids)) == len(ids)

    play(act)


@pytest.mark.parametrize("seed", range(5))
def test_intents_are_opened_and_ended_while_answers_are_lost_and_replicas_lag(seed):
    async def act(stage):
        stage.world.store.faults.unknown = 0.3
        stage.world.store.faults.lag_s = 1.0
        for number in range(5):
            intent = await stage.intent(f"run-{number}")
            assert intent.is_open
            await stage.client.intents.ledger_id(intent)
            batch = await stage.client.intents.open_batch_intent("app", "r", TARGET)
            await stage.client.intents.finish(batch.id)

    play(act, seed=seed)


def test_a_commit_of_the_older_run_at_the_last_moment_is_noted_by_the_new_runs_intent():
    async def act(stage):
        old = await stage.intent("run-1")
        written = await stage.written(old, [b"a"])
        newer = await stage.another()
        multi = newer.store.multi

        async def late(operations):
            newer.store.multi = multi
            await stage.commit(old, 5, written)
            return await multi(operations)

        newer.store.multi = late
        intent = await newer.intents.open_query_intent(QUERY, "run-2", TARGET)

        assert intent.record.w0 == 5

    play(act)


def test_an_intent_to_overwrite_notes_how_far_the_topic_had_come_and_keeps_it_over_generations():
    async def act(stage):
        def opened(run_id):
            return stage.client.intents.open_query_intent(
                QUERY, run_id, TARGET, overwrites=[stage.topic.id]
            )

        other = await stage.client.intents.open_batch_intent("app", "r", TARGET)
        await stage.commit(other, 0, await stage.written(other, [b"a"]))
        first = await opened("run-1")
        await stage.commit(other, 1, await stage.written(other, [b"b"]))
        await stage.client.intents.condemn(first.id, STALE)

        again = await opened("run-1")
        newer = await opened("run-2")

        assert first.record.snapshots == {stage.topic.id: 1}
        assert (again.record.generation, again.record.snapshots) == (1, {stage.topic.id: 1})
        assert newer.record.snapshots == {stage.topic.id: 2}
        with pytest.raises(errors.TopicNotFound, match="no topic with id nothing"):
            await stage.client.intents.open_batch_intent("x", "r", TARGET, overwrites=["nothing"])

    play(act)


def test_a_driver_that_lags_notes_no_older_snapshot():
    async def act(stage):
        other = replace(stage, client=await stage.another())
        await other.client.store.sync()
        stage.world.store.faults.lag_s = 30.0
        writer = await stage.intent()
        await stage.commit(writer, 0, await stage.written(writer, [b"a"]))

        intent = await other.client.intents.open_batch_intent(
            "app", "r", TARGET, overwrites=[stage.topic.id]
        )

        assert intent.record.snapshots == {stage.topic.id: 1}

    play(act)


def test_each_system_intent_is_one_of_its_own():
    async def act(stage):
        intents = stage.client.intents
        one, other = [await intents.open_system_intent("compact", "t") for _ in range(2)]

        assert one.record.kind == "system"
        assert (one.id != other.id, one.app_id != other.app_id) == (True, True)
        assert one.app_id.startswith("compact-")
        assert (await intents.get(one.id)).is_open

    play(act)


def test_a_driver_that_dies_while_it_makes_an_intent_leaves_no_record_of_a_random_app_id():
    async def act(stage):
        store = stage.world.store
        for step in range(40):
            process = await stage.world.client("doomed")
            client = TopicClient(process.ledgers, process.rng, lambda: NOW_MS)
            opening = client.intents.open_batch_intent(f"app-{step}", "r", TARGET, random=True)
            asked = process.run(opening)
            await asyncio.wait([asked], timeout=step * 0.0005)
            process.kill()
        made = [
            store.peek(f"{paths.INTENTS}/{name}") for name in store.peek_children(paths.INTENTS)
        ]
        known = {records.decode_intent(node.value).app_id for node in made}
        assert sorted(known) == sorted(store.peek_children(paths.TXNS))
        assert 0 < len(known) < 40

    play(act)
