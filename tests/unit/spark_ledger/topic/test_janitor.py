import asyncio
import random
from dataclasses import replace

import pytest

from spark_ledger import errors
from spark_ledger.metadata import paths
from spark_ledger.metadata.store import OutcomeUnknown
from spark_ledger.topic.intents import STALE
from spark_ledger.topic.janitor import Janitor
from tests.unit.spark_ledger.topic.stage import play


async def janitor_of(stage, **options):
    client = await stage.another()
    return Janitor(client.store, client.ledgers, random.Random(1), **options)


def exists(stage, result):
    return stage.world.store.peek(paths.ledger(result.segments[0].ledger_id)) is not None


def test_what_a_failed_attempt_left_is_deleted_and_what_a_topic_refers_to_stays():
    async def act(stage):
        intent = await stage.client.intents.open_batch_intent("app", "r", "t")
        attempts = await asyncio.gather(
            *(stage.written(intent, [b"%d" % n], task_index=n) for n in range(2))
        )
        await stage.commit(intent, 0, attempts[1], finish_intent=True)

        report = await (await janitor_of(stage)).clean()

        assert report.deleted == (attempts[0].segments[0].ledger_id,)
        assert report.kept == (attempts[1].segments[0].ledger_id,)
        assert not exists(stage, attempts[0])
        assert await stage.rows() == [(0, b"1")]

    play(act)


@pytest.mark.parametrize("finish", [True, False])
def test_between_a_tasks_write_and_its_commit_the_janitor_wins_or_the_commit_does(finish):
    async def act(stage):
        intent = await stage.client.intents.open_batch_intent("app", "r", "t")
        written = await stage.written(intent, [b"a"])

        report = await (await janitor_of(stage)).clean(condemn=[intent.id])

        assert report.condemned == (intent.id,)
        assert report.deleted == (written.segments[0].ledger_id,)
        with pytest.raises(errors.LedgerFenced, match=r"condemned \(stale\)"):
            await stage.commit(intent, 0, written, finish_intent=finish)
        assert await stage.rows() == []

    play(act)


@pytest.mark.parametrize("lost_answers", [0.0, 0.3])
@pytest.mark.parametrize("seed", range(12))
def test_a_janitor_at_any_step_of_a_commit_leaves_the_rows_or_a_clear_failure(seed, lost_answers):
    async def act(stage):
        rng = random.Random(seed)
        intent = await stage.client.intents.open_batch_intent("app", "r", "t")
        written = [await stage.written(intent, [b"%d" % n] * 3, task_index=n) for n in range(2)]
        janitor = await janitor_of(stage)
        stage.world.store.faults.unknown = lost_answers
        stage.world.store.faults.lag_s = 0.5

        async def clean():
            await asyncio.sleep(rng.uniform(0, 0.02))
            try:
                return await janitor.clean(condemn=[intent.id])
            except (errors.LedgerError, OutcomeUnknown) as error:
                return error

        async def commit():
            await asyncio.sleep(rng.uniform(0, 0.02))
            try:
                return await stage.commit(intent, 0, *written, finish_intent=True)
            except errors.LedgerFenced as error:
                return error

        _, outcome = await asyncio.gather(clean(), commit())
        stage.world.store.calm()
        await janitor.clean(condemn=[intent.id])
        rows = [value for _, value in await stage.rows()]
        if isinstance(outcome, errors.LedgerFenced):
            assert rows == []
            assert not any(exists(stage, result) for result in written)
        else:
            assert rows == [b"0"] * 3 + [b"1"] * 3

    play(act, seed=seed)


@pytest.mark.parametrize("step", range(12))
def test_a_janitor_before_each_single_call_of_a_commit_leaves_no_hole(step):
    async def act(stage):
        intent = await stage.intent()
        first = await stage.written(intent, [b"kept"])
        await stage.commit(intent, 0, first)
        written = await stage.written(intent, [b"a"])
        janitor = await janitor_of(stage)
        store = stage.client.store
        calls = 0

        def interposed(call):
            async def called(*args, **options):
                nonlocal calls
                calls += 1
                if calls == step + 1:
                    await janitor.clean(condemn=[intent.id])
                return await call(*args, **options)

            return called

        for name in ("get", "sync", "multi"):
            setattr(store, name, interposed(getattr(store, name)))
        try:
            await stage.commit(intent, 1, written)
            committed = True
        except errors.LedgerFenced:
            committed = False

        assert committed is (step >= calls)
        expected = [b"kept", b"a"] if committed else [b"kept"]
        assert [value for _, value in await stage.rows()] == expected

    play(act)


def test_a_query_whose_idle_intent_was_condemned_goes_on_with_its_next_batch():
    async def act(stage):
        intent = await stage.intent()
        await stage.commit(intent, 0, await stage.written(intent, [b"a"]))
        await (await janitor_of(stage)).clean(condemn=[intent.id])

        renewed = await stage.intent()
        await stage.commit(renewed, 1, await stage.written(renewed, [b"b"]))

        assert renewed.record.generation == 1
        assert await stage.rows() == [(0, b"a"), (1, b"b")]

    play(act)


def test_an_intent_is_stale_only_after_a_whole_lease_without_heartbeat_under_the_same_eyes():
    async def act(stage):
        idle = await stage.intent("run-1")
        busy = await stage.client.intents.open_query_intent("other", "run-1", "t")
        janitor = await janitor_of(stage, lease_s=300)
        condemned = []
        for _ in range(8):
            condemned += (await janitor.clean()).condemned
            await stage.client.intents.heartbeat(busy)
            await asyncio.sleep(100)

        assert condemned == [idle.id]
        assert (await stage.client.intents.get(idle.id)).record.why == STALE
        assert (await stage.client.intents.get(busy.id)).open

    play(act)


def test_a_lease_begins_anew_when_the_observers_session_was_in_doubt():
    async def act(stage):
        await stage.intent()
        janitor = await janitor_of(stage, lease_s=300)
        await janitor.clean()
        await asyncio.sleep(290)
        janitor.store.suspend(5)
        await asyncio.sleep(20)

        assert (await janitor.clean()).condemned == ()

    play(act)


def test_intents_that_fall_silent_together_are_condemned_a_few_at_a_time():
    async def act(stage):
        for number in range(10):
            await stage.client.intents.open_batch_intent(f"app-{number}", "r", "t")
        janitor = await janitor_of(stage, lease_s=300)
        await janitor.clean()
        await asyncio.sleep(400)

        assert len((await janitor.clean()).condemned) == 2

    play(act)


def test_a_dry_run_says_what_it_would_do_and_changes_nothing():
    async def act(stage):
        intent = await stage.client.intents.open_batch_intent("app", "r", "t")
        written = await stage.written(intent, [b"a"])
        ledger_id = written.segments[0].ledger_id
        before = stage.world.store.zxid

        report = await (await janitor_of(stage)).clean(dry_run=True, condemn=[intent.id])

        assert (report.condemned, report.closed, report.deleted) == (
            (intent.id,),
            (ledger_id,),
            (ledger_id,),
        )
        assert stage.world.store.zxid == before
        await stage.commit(intent, 0, written, finish_intent=True)
        assert await stage.rows() == [(0, b"a")]

    play(act)


def test_a_pass_that_would_delete_a_great_part_stops_and_asks():
    async def act(stage):
        intent = await stage.client.intents.open_batch_intent("app", "r", "t")
        await asyncio.gather(*(stage.written(intent, [b"a"], task_index=n) for n in range(21)))
        janitor = await janitor_of(stage)

        refused = await janitor.clean(condemn=[intent.id])
        forced = await janitor.clean(force=True)

        assert (refused.deleted, "21 of 21" in refused.refused) == ((), True)
        assert len(forced.deleted) == 21

    play(act)


def test_ledgers_made_without_an_intent_are_never_touched():
    async def act(stage):
        intent = await stage.client.intents.open_batch_intent("app", "r", "t")
        ledger_id = await stage.client.intents.ledger_id(intent)
        users = await stage.client.ledgers.create(3, 3, 2, ledger_id=ledger_id)
        other = await stage.client.ledgers.create(3, 3, 2)

        report = await (await janitor_of(stage)).clean(condemn=[intent.id])

        assert (report.closed, report.deleted) == ((), ())
        for writer in (users, other):
            assert stage.world.store.peek(paths.ledger(writer.ledger_id)) is not None

    play(act)


def test_an_error_ends_the_pass_with_nothing_deleted():
    async def act(stage):
        intent = await stage.client.intents.open_batch_intent("app", "r", "t")
        written = await stage.written(intent, [b"a"])
        janitor = await janitor_of(stage)
        for node in stage.world.nodes:
            node.kill("all")

        with pytest.raises(errors.LedgerError):
            await janitor.clean(condemn=[intent.id])

        assert exists(stage, written)

    play(act)


def test_a_store_that_holds_another_cluster_than_before_stops_the_janitor():
    async def act(stage):
        janitor = await janitor_of(stage)
        await janitor.clean()
        await stage.client.store.set(paths.CLUSTER, b"another", 0)

        with pytest.raises(errors.Unavailable, match="another cluster"):
            await janitor.clean()

    play(act)


def test_what_a_deleted_topic_refers_to_is_kept_for_now():
    async def act(stage):
        intent = await stage.client.intents.open_batch_intent("app", "r", "t")
        written = await stage.written(intent, [b"a"])
        await stage.commit(intent, 0, written, finish_intent=True)
        await stage.client.topics.delete("t")

        await (await janitor_of(stage)).clean()

        assert exists(replace(stage), written)

    play(act)
