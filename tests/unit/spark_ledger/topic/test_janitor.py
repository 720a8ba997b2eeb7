import asyncio
import random
from dataclasses import replace

import pytest

from spark_ledger import errors
from spark_ledger.metadata import paths
from spark_ledger.metadata.store import ANY_VERSION, NoNode, OutcomeUnknown
from spark_ledger.topic.log.intents import STALE
from spark_ledger.topic.log.policies import TopicPolicies
from spark_ledger.topic.upkeep.garbage import PAUSE_LEASES
from spark_ledger.topic.upkeep.janitor import remove_tree
from tests.unit.spark_ledger.topic.janitors import DELAY_S, delayed, janitor_of, ledger_of, trimmed
from tests.unit.spark_ledger.topic.stage import play


def nodes(stage):
    """Every node there is, but the one that tells the time."""
    return {path: node for path, node in every_node(stage.world.store) if path != paths.STORE_CLOCK}


def every_node(store, path=""):
    for name in store.peek_children(path or "/"):
        below = f"{path}/{name}"
        yield below, store.peek(below)
        yield from every_node(store, below)


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
        wrote = await stage.written(intent, [b"a"])

        report = await (await janitor_of(stage)).clean(condemn=[intent.id])

        assert report.condemned == (intent.id,)
        assert report.deleted == (wrote.segments[0].ledger_id,)
        with pytest.raises(errors.LedgerFenced, match=r"condemned \(stale\)"):
            await stage.commit(intent, 0, wrote, finish_intent=finish)
        assert await stage.rows() == []

    play(act)


@pytest.mark.parametrize("lost_answers", [0.0, 0.3])
@pytest.mark.parametrize("seed", range(12))
def test_a_janitor_at_any_step_of_a_commit_leaves_the_rows_or_a_clear_failure(seed, lost_answers):
    async def act(stage):
        rng = random.Random(seed)
        intent = await stage.client.intents.open_batch_intent("app", "r", "t")
        wrote = [await stage.written(intent, [b"%d" % n] * 3, task_index=n) for n in range(2)]
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
                return await stage.commit(intent, 0, *wrote, finish_intent=True)
            except errors.LedgerFenced as error:
                return error

        _, outcome = await asyncio.gather(clean(), commit())
        stage.world.store.calm()
        await janitor.clean(condemn=[intent.id])
        rows = [value for _, value in await stage.rows()]
        if isinstance(outcome, errors.LedgerFenced):
            assert rows == []
            assert not any(exists(stage, result) for result in wrote)
        else:
            assert rows == [b"0"] * 3 + [b"1"] * 3

    play(act, seed=seed)


@pytest.mark.parametrize("step", range(12))
def test_a_janitor_before_each_single_call_of_a_commit_leaves_no_hole(step):
    async def act(stage):
        intent = await stage.intent()
        first = await stage.written(intent, [b"kept"])
        await stage.commit(intent, 0, first)
        wrote = await stage.written(intent, [b"a"])
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
            await stage.commit(intent, 1, wrote)
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
        assert (await stage.client.intents.get(busy.id)).is_open

    play(act)


def test_a_batch_whose_first_task_waits_long_for_its_rows_is_not_taken_for_dead():
    async def act(stage):
        planned = await stage.client.intents.open_batch_intent("app", "r", "t")
        begun = await stage.client.intents.open_batch_intent("begun", "r", "t")
        await stage.client.intents.heartbeat(begun)
        janitor = await janitor_of(stage, lease_s=30)
        await janitor.clean()
        await asyncio.sleep(95 * 30)
        assert (await janitor.clean()).condemned == (begun.id,)

        wrote = await stage.written(planned, [b"a"])
        await stage.commit(planned, 0, wrote, finish_intent=True)
        assert await stage.rows() == [(0, b"a")]

    play(act)


def test_a_batch_that_never_began_is_taken_for_dead_in_the_end():
    async def act(stage):
        planned = await stage.client.intents.open_batch_intent("app", "r", "t")
        janitor = await janitor_of(stage, lease_s=30)
        await janitor.clean()
        await asyncio.sleep(96 * 30)
        assert (await janitor.clean()).condemned == (planned.id,)

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


def test_intents_that_fall_silent_together_are_left_alone_at_first_and_then_go_a_few_at_a_time():
    async def act(stage):
        for number in range(10):
            intent = await stage.client.intents.open_batch_intent(f"app-{number}", "r", "t")
            await stage.client.intents.heartbeat(intent)
        janitor = await janitor_of(stage, lease_s=300)
        await janitor.clean()
        await asyncio.sleep(400)

        alarmed = await janitor.clean()
        assert (alarmed.condemned, alarmed.is_eventful) == ((), True)
        assert "10 of 10 writers fell silent together" in alarmed.alarm
        await asyncio.sleep(PAUSE_LEASES * 300)
        assert [len((await janitor.clean()).condemned) for _ in range(2)] == [2, 1]

    play(act)


def test_a_dry_run_says_what_it_would_do_and_changes_nothing():
    async def act(stage):
        intent = await stage.client.intents.open_batch_intent("app", "r", "t")
        wrote = await stage.written(intent, [b"a"])
        ledger_id = wrote.segments[0].ledger_id
        await stage.client.topics.create("other")
        await stage.client.topics.delete("other")
        before = nodes(stage)

        report = await (await janitor_of(stage)).clean(dry_run=True, condemn=[intent.id])

        assert (report.condemned, report.closed, report.deleted) == (
            (intent.id,),
            (ledger_id,),
            (ledger_id,),
        )
        assert nodes(stage) == before
        await stage.commit(intent, 0, wrote, finish_intent=True)
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


def test_a_ledger_that_cannot_be_closed_stays_and_is_said_and_the_others_go():
    async def act(stage):
        intent = await stage.client.intents.open_batch_intent("app", "r", "t")
        wrote = await stage.written(intent, [b"a"])
        await stage.client.cache.close()
        stuck = await stage.written(intent, [b"b"])
        for node in stage.world.nodes:
            node.kill("all")

        report = await (await janitor_of(stage)).clean(condemn=[intent.id])

        ledger_id = stuck.segments[0].ledger_id
        assert list(report.unclosed) == [ledger_id]
        assert report.deleted == (wrote.segments[0].ledger_id,)
        assert exists(stage, stuck)

    play(act)


def test_a_listing_that_fails_ends_the_pass_with_nothing_deleted():
    async def act(stage):
        intent = await stage.client.intents.open_batch_intent("app", "r", "t")
        wrote = await stage.written(intent, [b"a"])
        janitor = await janitor_of(stage)
        listing = janitor.store.children

        async def broken(path, watch=None):
            if path.endswith("/blocks"):
                raise NoNode(path)
            return await listing(path, watch)

        janitor.store.children = broken
        with pytest.raises(errors.Unavailable):
            await janitor.clean(condemn=[intent.id])

        assert exists(stage, wrote)

    play(act)


def test_a_store_that_holds_another_cluster_than_before_stops_the_janitor():
    async def act(stage):
        janitor = await janitor_of(stage)
        await janitor.clean()
        await stage.client.store.set(paths.CLUSTER, b"another", 0)

        with pytest.raises(errors.Unavailable, match="another cluster"):
            await janitor.clean()

    play(act)


def test_what_a_topic_dropped_goes_after_the_delete_delay_and_not_before():
    async def act(stage):
        await delayed(stage)
        intent = await stage.client.intents.open_batch_intent("app", "r", "t")
        wrote = await stage.written(intent, [b"a"])
        await stage.commit(intent, 0, wrote, finish_intent=True)
        await trimmed(stage)
        janitor = await janitor_of(stage)

        await asyncio.sleep(DELAY_S - 100)
        waiting = await janitor.clean()
        assert (waiting.deleted, list(waiting.waiting)) == ((), [ledger_of(wrote)])
        assert "the delete delay ends in" in waiting.waiting[ledger_of(wrote)]
        await asyncio.sleep(100)
        assert (await janitor.clean()).deleted == (ledger_of(wrote),)

    play(act)


def test_under_a_running_query_a_ledger_that_lost_its_rows_goes_only_after_one_more_version():
    async def act(stage):
        policies = TopicPolicies(delete_delay_ms=0)
        topic = await stage.client.topics.create("u", policies=policies)
        stage = replace(stage, topic=topic)
        intent = await stage.intent()
        first = await stage.written(intent, [b"a"])
        await stage.commit(intent, 0, first)
        await stage.client.cache.close()
        await trimmed(stage)
        janitor = await janitor_of(stage)

        deleted = [(await janitor.clean()).deleted]
        for version in (1, 2):
            await stage.commit(intent, version, await stage.written(intent, [b"b"]))
            deleted.append((await janitor.clean()).deleted)

        assert deleted == [(), (ledger_of(first),), ()]
        assert (await stage.client.intents.get(intent.id)).is_open

    play(act)


def test_what_a_failed_attempt_of_a_running_query_left_goes_an_hour_later():
    async def act(stage):
        intent = await stage.intent()
        lost = await stage.written(intent, [b"a"])
        await stage.client.cache.close()
        janitor = await janitor_of(stage)
        await janitor.clean()
        for version in range(2):
            await stage.commit(intent, version, await stage.written(intent, [b"b"]))
        assert (await janitor.clean()).deleted == ()

        await asyncio.sleep(3600)

        assert (await janitor.clean()).deleted == (ledger_of(lost),)

    play(act)


def test_a_ledger_that_a_killed_worker_left_open_is_closed_while_its_query_runs_on():
    async def act(stage):
        intent = await stage.intent()
        wrote = await stage.written(intent, [b"a"])
        await stage.commit(intent, 0, wrote)
        abandon(stage)
        janitor = await janitor_of(stage)
        assert (await janitor.clean()).closed == ()

        await asyncio.sleep(1.6 * stage.topic.policies.ledger_age_s_max)
        report = await janitor.clean()

        assert (report.closed, report.kept) == ((ledger_of(wrote),), (ledger_of(wrote),))
        assert await stage.rows() == [(0, b"a")]

    play(act)


def abandon(stage):
    """The worker is killed: nobody closes its idle ledgers any more."""
    for timer in stage.client.cache._idle.values():
        timer.cancel()


def test_of_a_deleted_topic_ledgers_and_nodes_go_after_its_delete_delay():
    async def act(stage):
        await delayed(stage)
        intent = await stage.client.intents.open_batch_intent("app", "r", "t")
        wrote = await stage.written(intent, [b"a"])
        await stage.commit(intent, 0, wrote, finish_intent=True)
        await stage.client.topics.delete("t")
        janitor = await janitor_of(stage)
        tree = paths.topic(stage.topic.id)

        await asyncio.sleep(DELAY_S - 100)
        early = await janitor.clean()
        assert (early.deleted, early.topics, exists(stage, wrote)) == ((), (), True)
        await asyncio.sleep(100)
        report = await janitor.clean()
        assert (report.deleted, report.topics) == ((ledger_of(wrote),), (stage.topic.id,))
        assert stage.world.store.peek(tree) is None

        assert (await janitor.clean()).topics == ()
        assert stage.world.store.peek_children(paths.TOPICS_DELETED) == []

    play(act)


def test_a_great_topic_is_deleted_without_being_asked_for():
    async def act(stage):
        await delayed(stage)
        intent = await stage.client.intents.open_batch_intent("app", "r", "t")
        wrote = []
        for number in range(21):
            wrote.append(await stage.written(intent, [b"a"], task_index=number))
            await stage.client.cache.close()
        await stage.commit(intent, 0, *wrote, finish_intent=True)
        await stage.client.topics.delete("t")
        await asyncio.sleep(DELAY_S + 1)

        report = await (await janitor_of(stage)).clean()

        assert (len(report.deleted), report.refused) == (21, "")

    play(act)


def test_of_a_topic_of_a_later_version_nothing_goes_and_it_is_said():
    async def act(stage):
        intent = await stage.client.intents.open_batch_intent("app", "r", "t")
        wrote = await stage.written(intent, [b"a"])
        head = paths.topic_head(stage.topic.id)
        await stage.client.store.set(head, b'{"min_reader":99}', ANY_VERSION)

        report = await (await janitor_of(stage)).clean(condemn=[intent.id])

        assert report.deleted == ()
        assert "reader version 99" in report.waiting[ledger_of(wrote)]

    play(act)


def test_a_ledger_of_a_topic_that_nobody_knows_is_kept():
    async def act(stage):
        intent = await stage.client.intents.open_batch_intent("app", "r", "t")
        wrote = await stage.written(intent, [b"a"])
        await remove_tree(stage.client.store, stage.topic.id)

        report = await (await janitor_of(stage)).clean(condemn=[intent.id])

        assert (report.deleted, list(report.waiting)) == ((), [ledger_of(wrote)])

    play(act)


def test_a_ledger_made_for_a_topic_while_a_pass_takes_its_tree_is_deleted_too(monkeypatch):
    async def act(stage):
        await delayed(stage)
        intent = await stage.client.intents.open_batch_intent("app", "r", "t")
        ids = [await stage.client.intents.ledger_id(intent) for _ in range(2)]
        await stage.client.topics.delete("t")
        janitor = await janitor_of(stage)
        await janitor.clean(condemn=[intent.id])
        made = []

        async def make(ledger_id):
            return await stage.client.ledgers.create(
                3, 3, 2, ledger_id=ledger_id, intent=intent.id, topic=stage.topic.id
            )

        async def made_just_before(store, topic_id):
            made.append(await make(ids[0]))
            return await remove_tree(store, topic_id)

        await asyncio.sleep(DELAY_S)
        monkeypatch.setattr("spark_ledger.topic.upkeep.janitor.remove_tree", made_just_before)
        taken = await janitor.clean()
        monkeypatch.undo()
        with pytest.raises(errors.TopicDeleted):
            await make(ids[1])
        reports = [await janitor.clean() for _ in range(2)]

        assert [report.deleted for report in reports] == [(made[0].ledger_id,), ()]
        assert [one.topics for one in (taken, *reports)] == [(stage.topic.id,), (), ()]
        assert stage.world.store.peek_children(paths.TOPICS_DELETED) == []

    play(act)


def test_what_a_late_writer_makes_after_its_end_is_found_too():
    async def act(stage):
        intent = await stage.client.intents.open_batch_intent("app", "r", "t")
        ledger_id = await stage.client.intents.ledger_id(intent)
        janitor = await janitor_of(stage)
        await janitor.clean(condemn=[intent.id])
        late = await stage.client.ledgers.create(
            3, 3, 2, ledger_id=ledger_id, intent=intent.id, topic=stage.topic.id
        )

        await asyncio.sleep(3700)
        report = await janitor.clean()

        assert report.deleted == (late.ledger_id,)

    play(act)


def test_versions_that_are_committed_while_a_pass_looks_are_seen_with_what_they_refer_to():
    async def act(stage):
        intent = await stage.intent()
        await stage.commit(intent, 0, await stage.written(intent, [b"a"]))
        await stage.client.cache.close()
        in_flight = await stage.written(intent, [b"b"])
        await stage.client.cache.close()
        janitor = await janitor_of(stage, lease_s=10_000)
        await janitor.clean()
        await asyncio.sleep(4000)
        get = janitor.store.get

        async def interposed(path, watch=None):
            if path.startswith(paths.TXNS):
                janitor.store.get = get
                await stage.commit(intent, 1, in_flight)
                await stage.commit(intent, 2, await stage.written(intent, [b"c"]))
                await janitor.store.sync()
            return await get(path, watch)

        janitor.store.get = interposed
        report = await janitor.clean()

        assert (report.deleted, ledger_of(in_flight) in report.kept) == ((), True)
        assert await stage.rows() == [(0, b"a"), (1, b"b"), (2, b"c")]

    play(act)
