import asyncio
import json
from dataclasses import replace

import pytest

from spark_ledger import errors
from spark_ledger.metadata import paths
from spark_ledger.metadata.store import MultiFailed, OutcomeUnknown
from spark_ledger.topic.commit.commit import CommitKind
from spark_ledger.topic.log import records
from spark_ledger.topic.write import TaskResult
from tests.unit.spark_ledger.topic.stage import TARGET, before_the_first_multi, play, segment


def log_length(stage):
    head = stage.world.store.peek(paths.topic_head(stage.topic.id))
    return records.decode_head(head.value).next


def result(stage, intent, *segments, task=0):
    return TaskResult(stage.topic.id, intent.id, task, 0, segments)


def test_a_batch_is_seen_whole_after_its_commit_and_not_at_all_before():
    async def act(stage):
        intent = await stage.intent()
        results = [await stage.written(intent, [b"%d" % n, b"x"], task_index=n) for n in (1, 0)]
        assert await stage.rows() == []

        outcome = await stage.commit(intent, 0, *results)

        assert (outcome.kind, outcome.number, outcome.rows) == (CommitKind.COMMITTED, 0, {0: 4})
        assert await stage.rows() == [(0, b"0"), (1, b"x"), (2, b"1"), (3, b"x")]

    play(act)


def test_a_version_committed_before_changes_nothing_and_is_silent_for_the_same_run():
    async def act(stage):
        intent = await stage.intent()
        await stage.commit(intent, 3, await stage.written(intent, [b"a"]))

        for version in (3, 2, 0):
            again = await stage.commit(intent, version, await stage.written(intent, [b"b"]))
            assert again.kind is CommitKind.ALREADY

        assert await stage.rows() == [(0, b"a")]
        assert log_length(stage) == 1

    play(act)


def test_a_restarted_query_replays_its_last_version_in_silence():
    async def act(stage):
        first = await stage.intent("run-1")
        await stage.commit(first, 3, await stage.written(first, [b"a"]))
        second = await stage.intent("run-2")

        replayed = await stage.commit(second, 3, await stage.written(second, [b"a"]))
        next_one = await stage.commit(second, 4, await stage.written(second, [b"b"]))

        assert replayed.kind is CommitKind.ALREADY
        assert replayed.rows == {0: 1}
        assert next_one.kind is CommitKind.COMMITTED
        assert await stage.rows() == [(0, b"a"), (1, b"b")]

    play(act)


def test_a_version_recorded_by_a_run_that_began_later_is_no_silent_no_op():
    async def act(stage):
        intents = stage.client.intents
        one = await intents.open_batch_intent("app", "run-a", TARGET)
        other = await intents.open_batch_intent("app", "run-b", TARGET)
        await stage.commit(other, 7, await stage.written(other, [b"b"]), finish_intent=True)

        with pytest.raises(errors.LedgerFenced, match=r"version 7 of 'app' .* by run run-b"):
            await stage.commit(one, 7, await stage.written(one, [b"a"]), finish_intent=True)

        assert await stage.rows() == [(0, b"b")]

    play(act)


def test_a_batch_jobs_intent_is_done_with_its_commit():
    async def act(stage):
        intent = await stage.client.intents.open_batch_intent("app", "r", TARGET)
        await stage.commit(intent, 0, await stage.written(intent, [b"a"]), finish_intent=True)

        ended = await stage.client.intents.get(intent.id)

        assert ended.record.state is records.IntentState.DONE
        again = await stage.commit(intent, 0, finish_intent=True)
        assert again.kind is CommitKind.ALREADY

    play(act)


def test_concurrent_commits_all_come_in_each_once():
    async def act(stage):
        async def job(number):
            client = await stage.another()
            other = replace(stage, client=client)
            intent = await client.intents.open_batch_intent(f"app-{number}", "r", TARGET)
            written = await other.written(intent, [b"%d" % number] * 3)
            return await other.commit(intent, 0, written, finish_intent=True)

        outcomes = await asyncio.gather(*(job(number) for number in range(8)))

        rows = await stage.rows()
        assert sorted(outcome.number for outcome in outcomes) == list(range(8))
        assert [offset for offset, _ in rows] == list(range(24))
        assert sorted(value for _, value in rows) == sorted([b"%d" % n for n in range(8)] * 3)

    play(act)


@pytest.mark.parametrize("seed", range(10))
def test_a_commit_whose_answers_are_lost_is_made_once(seed):
    async def act(stage):
        intent = await stage.intent()
        for version in range(5):
            written = await stage.written(intent, [b"%d" % version])
            stage.world.store.faults.unknown = 0.6
            await stage.commit(intent, version, written)
            stage.world.store.faults.unknown = 0.0
        assert await stage.rows() == [(n, b"%d" % n) for n in range(5)]

    play(act, seed=seed)


def test_a_commit_whose_outcome_cannot_be_looked_up_says_so_and_its_replay_settles_it():
    async def act(stage):
        intent = await stage.intent()
        written = await stage.written(intent, [b"a"])
        multi = stage.client.store.multi

        async def applied_but_unheard(operations):
            await multi(operations)
            stage.world.store.stall(100)
            raise OutcomeUnknown("the answer was lost")

        stage.client.store.multi = applied_but_unheard
        with pytest.raises(errors.CommitOutcomeUnknown, match="OUTCOME_UNKNOWN"):
            await stage.commit(intent, 0, written, timeout_s=20)
        stage.client.store.multi = multi
        await asyncio.sleep(200)

        replayed = await stage.commit(intent, 0, await stage.written(intent, [b"a"]))

        assert replayed.kind is CommitKind.ALREADY
        assert await stage.rows() == [(0, b"a")]

    play(act)


def test_a_store_that_is_away_before_anything_was_sent_is_said_to_be():
    async def act(stage):
        intent = await stage.intent()
        written = await stage.written(intent, [b"a"])
        stage.world.store.stall(100)

        with pytest.raises(errors.Unavailable, match="LEDGER_UNAVAILABLE"):
            await stage.commit(intent, 0, written, timeout_s=20)

    play(act)


def test_a_commit_that_loses_every_race_gives_up_and_says_that_nothing_was_committed():
    async def act(stage):
        intent = await stage.intent()
        written = await stage.written(intent, [b"a"])

        async def lost(operations):
            raise MultiFailed(0, OutcomeUnknown("another one won"))

        stage.client.store.multi = lost
        with pytest.raises(errors.CommitContended, match=r"LEDGER_TXN.CONFLICT"):
            await stage.commit(intent, 0, written, timeout_s=5)

    play(act)


def test_results_of_another_topic_or_intent_or_of_one_task_twice_are_refused():
    async def act(stage):
        intent = await stage.intent()
        good = result(stage, intent, segment(1, 5))

        with pytest.raises(errors.TopicRecreated):
            await stage.commit(intent, 0, replace(good, topic_id="another"))
        with pytest.raises(errors.LedgerFenced, match="wrote under intent other"):
            await stage.commit(intent, 0, replace(good, intent_id="other"))
        with pytest.raises(ValueError, match="two results of one task"):
            await stage.commit(intent, 0, good, good)
        with pytest.raises(ValueError, match="claimed twice"):
            await stage.commit(intent, 0, good, replace(good, task_index=1))
        with pytest.raises(ValueError, match="partition 3 of 1"):
            await stage.commit(intent, 0, result(stage, intent, segment(1, 5, partition=3)))
        assert log_length(stage) == 0

    play(act)


def test_a_batch_without_rows_is_recorded_without_a_number_in_the_log():
    async def act(stage):
        intent = await stage.intent()

        outcome = await stage.commit(intent, 5, await stage.written(intent, []))
        again = await stage.commit(intent, 5, await stage.written(intent, [b"late"]))

        assert (outcome.kind, outcome.number) == (CommitKind.COMMITTED, records.NO_COMMIT)
        assert again.kind is CommitKind.ALREADY
        assert log_length(stage) == 0

    play(act)


def test_nothing_is_committed_to_a_topic_that_a_newer_writer_has_changed():
    async def act(stage):
        intent = await stage.intent()
        await stage.commit(intent, 0, await stage.written(intent, [b"a"]))
        path = paths.topic_log(stage.topic.id, 0)
        node = stage.world.store.peek(path)
        newer = json.loads(node.value) | {"min_writer": 4}
        await stage.client.store.set(path, json.dumps(newer).encode(), node.version)
        other = replace(stage, client=await stage.another())

        with pytest.raises(errors.UnsupportedFormat, match="needs writer version 4"):
            await other.commit(intent, 1, await other.written(intent, [b"b"]))

    play(act)


def test_a_committer_that_slept_while_its_number_was_used_and_trimmed_commits_behind_the_others():
    async def act(stage):
        slow = await stage.intent()
        written = await stage.written(slow, [b"slow"])
        other = replace(stage, client=await stage.another())

        async def others_commit_and_the_log_is_trimmed():
            for number in range(3):
                intent = await other.client.intents.open_batch_intent("app", f"r{number}", TARGET)
                result = await other.written(intent, [b"%d" % number])
                await other.commit(intent, number, result, finish_intent=True)
            for number in range(2):
                await other.client.store.delete(paths.topic_log(stage.topic.id, number))

        await stage.client.log(stage.topic.id).fold()
        before_the_first_multi(stage.client.store, others_commit_and_the_log_is_trimmed)
        with pytest.raises(errors.UnsupportedFormat, match="missing below its head"):
            await stage.commit(slow, 0, written)  # later: it folds from the checkpoint

        assert stage.world.store.peek(paths.topic_log(stage.topic.id, 0)) is None
        assert log_length(stage) == 3

    play(act)


def test_the_recorded_version_never_goes_back():
    async def act(stage):
        intent = await stage.intent()
        other = replace(stage, client=await stage.another())

        async def a_later_version_is_committed():
            await other.commit(intent, 4, await other.written(intent, [b"4"]))

        before_the_first_multi(stage.client.store, a_later_version_is_committed)
        outcome = await stage.commit(intent, 3)

        record = stage.world.store.peek(paths.txn("q", TARGET))
        assert outcome.kind is CommitKind.ALREADY
        assert records.decode_txn(record.value).version == 4

    play(act)


def test_a_driver_whose_replica_lags_finds_what_its_tasks_made():
    async def act(stage):
        driver = replace(stage, client=await stage.another())
        await driver.client.store.sync()
        stage.world.store.faults.lag_s = 30.0
        for version in range(3):
            intent = await stage.intent(f"run-{version}")
            written = await stage.written(intent, [b"%d" % version])
            await driver.commit(intent, version, written)

        assert await stage.rows() == [(n, b"%d" % n) for n in range(3)]

    play(act)
