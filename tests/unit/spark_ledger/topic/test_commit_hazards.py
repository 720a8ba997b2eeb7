"""What loses, doubles or hides a batch elsewhere (hazards 1, 2, 4, 11), played against commits that
go by what their process saw last."""

import asyncio
from dataclasses import replace

import pytest

from spark_ledger import errors
from spark_ledger.metadata import paths
from spark_ledger.metadata.store import OutcomeUnknown
from spark_ledger.topic.commit.draft import CommitKind, TxnKey
from spark_ledger.topic.log import records
from spark_ledger.topic.log.intents import STALE
from spark_ledger.topic.write import TaskResult
from tests.kit.segments_seen import segments_of
from tests.unit.spark_ledger.topic.stage import QUERY, TARGET, play, segment


def result(stage, intent, ledger, rows=1):
    return TaskResult(stage.topic.id, intent.id, 0, 0, (segment(ledger, rows),))


async def others_commit(stage, count, first_ledger):
    """Commits of another process, checkpointed and trimmed behind."""
    other = replace(stage, client=await stage.another())
    intent = await other.client.intents.open_batch_intent(f"app-{first_ledger}", "r", TARGET)
    for n in range(count):
        await other.commit(intent, n, result(other, intent, first_ledger + n))
    for _ in range(2):  # the log goes up to the checkpoint before the last
        await other.client.checkpoints.make(other.topic.id)
        await other.commit(intent, count, result(other, intent, first_ledger + count))
        count += 1
    return count


async def ledgers_in_order(stage):
    """The ledgers of the topic's rows, by offset, as a new reader folds them."""
    client = await stage.another()
    state = await client.log(stage.topic.id).fold(fresh=True)
    held = state.partitions[0]
    read = await client.tables(state, {0: (0, held.end_offset)})
    return [one.segment.ledger_id for one in segments_of(held, 0, held.end_offset, read)]


def log_numbers(stage):
    return [int(name) for name in stage.world.store.peek_children(paths.topic_log(stage.topic.id))]


def test_a_committer_that_slept_over_a_checkpoint_commits_behind_all_others_and_is_seen():
    async def act(stage):
        intent = await stage.intent()
        await stage.commit(intent, 0, result(stage, intent, 1))
        came = await others_commit(stage, 100, 1000)
        assert min(log_numbers(stage)) > 2, "the number it would have used is free again"

        outcome = await stage.commit(intent, 1, result(stage, intent, 2))

        assert outcome.number == came + 1
        assert await ledgers_in_order(stage) == [1, *range(1000, 1000 + came), 2]

    play(act)


def test_a_commit_whose_answer_was_lost_is_found_though_the_log_has_lost_it():
    async def act(stage):
        intent = await stage.intent()
        await stage.commit(intent, 0, result(stage, intent, 1))
        multi = stage.client.store.multi

        async def applied_but_unheard(operations):
            stage.client.store.multi = multi
            await multi(operations)
            await others_commit(stage, 100, 1000)
            raise OutcomeUnknown("the answer was lost")

        stage.client.store.multi = applied_but_unheard
        outcome = await stage.commit(intent, 1, result(stage, intent, 2), timeout_s=600)

        assert (outcome.kind, outcome.number) == (CommitKind.COMMITTED, 1)
        assert 1 not in log_numbers(stage)
        assert (await ledgers_in_order(stage)).count(2) == 1

    play(act)


@pytest.mark.parametrize("why", ["superseded", "stale"])
def test_a_run_that_committed_just_now_is_fenced_once_its_intent_is_condemned(why):
    async def act(stage):
        old = await stage.intent()
        await stage.commit(old, 0, result(stage, old, 1))
        other = await stage.another()
        if why == "stale":
            await other.intents.condemn(old.id, STALE)
        else:
            await other.intents.open_query_intent(QUERY, "run-2", TARGET)

        with pytest.raises(errors.LedgerFenced, match=why):
            await stage.commit(old, 1, result(stage, old, 2))

        assert await ledgers_in_order(stage) == [1]

    play(act)


def test_a_deleted_topic_takes_nothing_from_a_process_that_has_not_heard_of_it():
    async def act(stage):
        intent = await stage.intent()
        await stage.commit(intent, 0, result(stage, intent, 1))
        other = await stage.another()
        await other.topics.delete("t")
        again = await other.topics.create("t")

        with pytest.raises(errors.TopicDeleted):
            await stage.commit(intent, 1, result(stage, intent, 2))

        head = records.decode_head(stage.world.store.peek(paths.topic_head(again.id)).value)
        assert head.next == 0

    play(act)


def test_a_topic_that_grew_meanwhile_takes_rows_of_its_new_partitions():
    async def act(stage):
        intent = await stage.intent()
        await stage.commit(intent, 0, result(stage, intent, 1))
        other = await stage.another()
        system = await other.intents.open_system_intent("grow", stage.topic.id)
        await other.commit_actions(stage.topic.id, [records.actions.Grow(3)], system)
        written = segment(2, 5, partition=2)

        outcome = await stage.commit(
            intent, 1, TaskResult(stage.topic.id, intent.id, 0, 0, (written,))
        )

        assert outcome.rows == {2: 5}

    play(act)


@pytest.mark.parametrize("seed", range(25))
def test_two_runs_of_a_query_bring_each_version_in_once_over_all_its_topics(seed):
    """Success means that one's own rows are there, or those from before one began. Answers are
    lost both ways, replicas lag, the runs choose different topics."""

    async def act(stage):
        second_topic = (await stage.client.topics.create("u")).id
        faults = stage.world.store.faults
        faults.unknown, faults.lag_s = 0.3, 1.0
        told, fenced = [], []

        async def run(name, topic_ids, delay_s):
            await asyncio.sleep(delay_s)
            client = await stage.another()
            try:
                intent = await client.intents.open_query_intent(QUERY, name, "*")
                for version in range(3):
                    txn = TxnKey(QUERY, "*", version, name)
                    by_topic = {
                        id_: [TaskResult(id_, intent.id, 0, 0, (segment(n + 10 * version, 1),))]
                        for n, id_ in enumerate(topic_ids)
                    }
                    outcome = await client.commit_topics(by_topic, txn, intent.id, timeout_s=300)
                    told.append((name, version, outcome, intent.record.w0))
            except errors.LedgerFenced:
                fenced.append(name)

        first, second = stage.topic.id, second_topic
        rng = stage.client.committer.rng
        await asyncio.gather(
            run("run-1", [first, second], 0),
            run("run-2", [second], rng.uniform(0, 3)),
        )
        faults.unknown = 0.0

        came = {first: {}, second: {}}
        for topic_id, found in came.items():
            for name in stage.world.store.peek_children(paths.topic_log(topic_id)):
                node = stage.world.store.peek(paths.topic_log(topic_id, int(name)))
                one = records.decode_commit(node.value)
                assert one.version not in found, f"version {one.version} is twice in {topic_id}"
                found[one.version] = one.run_id
        for version in range(3):
            runs = {found.get(version) for found in came.values()} - {None}
            assert len(runs) <= 1, f"version {version} is of {runs}"
            if runs == {"run-1"}:
                assert version in came[first]
                assert version in came[second]
        for name, version, outcome, w0 in told:
            of = came[second].get(version)
            earlier = outcome.kind is CommitKind.ALREADY and version <= w0
            assert of == name or (of is not None and earlier)
        assert len(fenced) <= 1, "nobody took over from the run that began last"
        assert len(came[second]) == 3

    play(act, seed=seed)
