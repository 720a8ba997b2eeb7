"""What a commit costs the metadata store: the steady state is one write and no read."""

import asyncio
from dataclasses import replace

import pytest

from spark_ledger.metadata import paths
from spark_ledger.metadata.store import Check, Create, Set
from spark_ledger.topic.commit import draft as commit_draft
from spark_ledger.topic.upkeep.compactor import Compaction, MergePace
from spark_ledger.topic.write import TaskResult
from tests.unit.spark_ledger.broker.hand_overs import another_process, reached
from tests.unit.spark_ledger.broker.owners import owner_of
from tests.unit.spark_ledger.topic.counted_calls import Counted
from tests.unit.spark_ledger.topic.leftovers import ledgers_made
from tests.unit.spark_ledger.topic.stage import play, segment


def results(stage, intent, number, partitions=1):
    """One task's result, of entries that no other result has."""
    segments = tuple(segment(number, 1, partition=p, first=p) for p in range(partitions))
    return TaskResult(stage.topic.id, intent.id, 0, 0, segments)


def test_the_steady_state_of_a_query_is_one_multi_and_nothing_else():
    async def act(stage):
        intent = await stage.intent()
        counted = Counted(stage.client)
        await stage.commit(intent, 0, results(stage, intent, 0))
        first = counted.taken()
        for version in range(1, 10):
            await stage.commit(intent, version, results(stage, intent, version))
            assert counted.taken() == {"multi": 1}
        await stage.commit(intent, 10)  # a batch without rows
        assert counted.taken() == {"multi": 1}
        assert first["multi"] == 1
        assert sum(first.values()) <= 9, f"the run's first commit looks at everything: {first}"

    play(act)


@pytest.mark.parametrize("partitions", [1, 100])
def test_a_commit_writes_three_nodes_however_many_partitions_it_has(partitions):
    async def act(stage):
        intent = await stage.intent()
        counted = Counted(stage.client)
        for version in range(3):
            await stage.commit(intent, version, results(stage, intent, version, partitions))

        for operations in counted.multis:
            assert [type(one) for one in operations] == [Check, Set, Check, Set, Create]
        assert counted.calls["multi"] == 3

    play(act, partitions=partitions)


def test_over_many_commits_reads_stay_few_though_states_are_folded_now_and_then():
    async def act(stage):
        intent = await stage.intent()
        counted = Counted(stage.client)
        for version in range(200):
            await stage.commit(intent, version, results(stage, intent, version))
        await stage.client.checkpoints.idle()

        calls = counted.taken()
        assert calls["get"] <= 2 * 200, "each commit is read back once when it is folded"
        assert calls["multi"] <= 210

    play(act)


def test_two_committers_in_turn_read_head_first_instead_of_losing_each_race():
    async def act(stage):
        stages = [stage, replace(stage, client=await stage.another())]
        intents = [
            await one.client.intents.open_batch_intent(f"app-{n}", "r", "t")
            for n, one in enumerate(stages)
        ]
        counted = [Counted(one.client) for one in stages]
        for version in range(10):
            for n, one in enumerate(stages):
                await one.commit(intents[n], version, results(one, intents[n], 2 * version + n))

        for one in counted:
            assert one.calls["multi"] <= 12, "the first lost race is a lesson"
            assert one.calls["get"] <= 5 * 10

    play(act)


def test_a_committer_that_is_alone_again_stops_reading():
    async def act(stage):
        other = replace(stage, client=await stage.another())
        mine = await stage.intent()
        theirs = await other.client.intents.open_batch_intent("app", "r", "t")
        await stage.commit(mine, 0, results(stage, mine, 0))
        await other.commit(theirs, 0, results(other, theirs, 1))
        await stage.commit(mine, 1, results(stage, mine, 2))
        await stage.commit(mine, 2, results(stage, mine, 3))
        counted = Counted(stage.client)

        await stage.commit(mine, 3, results(stage, mine, 4))

        assert counted.taken() == {"multi": 1}

    play(act)


def test_a_commit_past_an_owner_reads_head_and_a_moment_later_is_folded():
    async def act(stage):
        owner = reached(await owner_of(stage))
        await owner.all_stored(owner.send([b"a"]))
        batches = await another_process(stage)
        intent = await batches.intent()
        await batches.commit(intent, 1, await batches.written(intent, [b"of spark"]))
        log, counted = batches.client.log(stage.topic.id), Counted(batches.client)
        for version in range(2, 5):
            await asyncio.sleep(1)
            assert log.last_state.next == version  # the owner's opening, and the commits so far
            result = await batches.written(intent, [b"of spark"])
            counted.taken()
            await batches.commit(intent, version, result)
            assert counted.taken() == {"get": 1, "multi": 1}
        await owner.writer.close()

    play(act)


@pytest.mark.parametrize("body_in_a_ledger", [False, True])
def test_a_round_of_merges_makes_one_ledger_and_one_more_for_a_large_body(
    body_in_a_ledger, monkeypatch
):
    if body_in_a_ledger:
        monkeypatch.setattr(commit_draft, "BODY_INLINE_BYTES_MAX", 200)

    async def act(stage):
        batches = replace(stage, client=await stage.another())
        intent = await batches.intent()
        own = await stage.client.intents.open_system_intent("merge", "topics")
        counted = Counted(stage.client)

        async def one_for_all():
            return own

        for first in (0, 6):
            for version in range(first, first + 6):
                row = await batches.written(intent, [b"%d" % version] * 2)
                await batches.commit(intent, version, row)
            counted.taken(), counted.multis.clear()
            before = len(ledgers_made(stage.world))
            compaction = Compaction(stage.client, stage.topic, open_intent=one_for_all)
            await compaction.carry_out(await compaction.plan(), MergePace(None))
            await stage.client.cache.close()

        made = 1 + body_in_a_ledger
        assert len(ledgers_made(stage.world)) - before == made
        calls = counted.taken()
        assert (calls["multi"], calls["set"]) == (1 + made, made), "ledgers made and closed"
        commit = counted.multis[-1]
        assert [type(one) for one in commit] == [Check, Set, *[Check] * (1 + made), Set, Create]
        assert sum(one.path.startswith(paths.LEDGERS) for one in commit) == made

    play(act)


def test_a_view_is_as_new_as_its_fold_though_the_log_was_let_go_of_meanwhile():
    async def act(stage):
        intent = await stage.intent()
        await stage.commit(intent, 0, results(stage, intent, 0))
        mine, other = stage.client, await another_process(stage)
        theirs = await other.client.intents.open_query_intent("another", "run", "t")
        views = mine.committer.views
        await other.commit(theirs, 0, results(stage, theirs, 1))
        log = mine.log(stage.topic.id)
        fold = log.fold

        async def forgotten(**options):
            found = await fold(**options)
            mine.forget_log(stage.topic.id)
            return found

        log.fold = forgotten
        assert (await views.state(stage.topic.id, fold=True, fresh=True)).next == 2
        assert views.newest_state(stage.topic.id).next == 2

    play(act)
