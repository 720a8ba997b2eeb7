"""Commits over several topics: all or none, once, and seen whole."""

import asyncio
from dataclasses import replace

import pytest

from spark_ledger import errors
from spark_ledger.metadata import paths
from spark_ledger.metadata.store import OutcomeUnknown
from spark_ledger.topic.commit import views as commit_views
from spark_ledger.topic.commit.draft import CommitKind, TxnKey
from spark_ledger.topic.log import records, topic_log
from spark_ledger.topic.write import TaskResult
from tests.unit.spark_ledger.topic.stage import QUERY, play, segment

ANY = "*"


async def topics(stage, count):
    return [stage.topic.id] + [
        (await stage.client.topics.create(f"other-{n}")).id for n in range(1, count)
    ]


async def opened(client, run_id="run-1", app_id=QUERY):
    return await client.intents.open_query_intent(app_id, run_id, ANY)


def results(intent, version, topic_ids, rows=1):
    """One task's results, of ledgers that no other version has."""
    return {
        topic_id: [TaskResult(topic_id, intent.id, 0, 0, (segment(version * 100 + n, rows),))]
        for n, topic_id in enumerate(topic_ids)
    }


async def commit(client, intent, version, by_topic, **options):
    txn = TxnKey(intent.app_id, ANY, version, intent.run_id)
    return await client.commit_topics(by_topic, txn, intent.id, **options)


def rows_of(stage, topic_id):
    """How many rows each commit in the topic's log brought, by (app id, version)."""
    found = {}
    for path, node in stage.world.store.walk(paths.topic_log(topic_id)):
        if path.rpartition("/")[2].isdigit():
            one = records.decode_commit(node.value)
            rows = sum(s.rows for action in one.actions for s in action.segments)
            key = (one.app_id, one.version)
            assert key not in found, f"{key} is twice in {topic_id}"
            found[key] = rows
    return found


def test_a_commit_over_several_topics_is_in_all_of_them_and_each_names_the_others():
    async def act(stage):
        ids = await topics(stage, 3)
        intent = await opened(stage.client)

        outcome = await commit(stage.client, intent, 0, results(intent, 0, ids, rows=5))

        assert outcome.topics == {topic_id: records.TopicRows(0, {0: 5}) for topic_id in ids}
        for topic_id in ids:
            node = stage.world.store.peek(paths.topic_log(topic_id, 0))
            others = records.decode_commit(node.value).others
            assert sorted([*others, topic_id]) == sorted(ids)
        record = records.decode_txn(stage.world.store.peek(paths.txn(QUERY, "%2A")).value)
        assert record.topics() == outcome.topics

    play(act)


def test_a_replay_that_chooses_other_topics_changes_nothing_anywhere():
    async def act(stage):
        a, b, c = await topics(stage, 3)
        first = await opened(stage.client)
        await commit(stage.client, first, 7, results(first, 7, [a, b]))
        second = await opened(stage.client, "run-2")

        replayed = await commit(stage.client, second, 7, results(second, 8, [a, c]))

        assert (replayed.kind, list(replayed.topics)) == (CommitKind.ALREADY, sorted([a, b]))
        assert [rows_of(stage, one) for one in (a, b, c)] == [{(QUERY, 7): 1}] * 2 + [{}]

    play(act)


def test_one_app_id_and_version_is_done_once_for_each_target_that_the_user_named():
    """As in foreachBatch, which writes two topics with the same txnAppId and txnVersion."""

    async def act(stage):
        ids = await topics(stage, 2)
        kinds = []
        for topic_id in [*ids, ids[0]]:
            intent = await stage.client.intents.open_batch_intent("app", "run-1", topic_id)
            txn = TxnKey("app", topic_id, 7, "run-1")
            by_topic = results(intent, len(kinds), [topic_id])
            kinds.append((await stage.client.commit_topics(by_topic, txn, intent.id)).kind)
        return kinds, [rows_of(stage, topic_id) for topic_id in ids]

    kinds, rows = play(act)
    assert kinds == [CommitKind.COMMITTED, CommitKind.COMMITTED, CommitKind.ALREADY]
    assert rows == [{("app", 7): 1}, {("app", 7): 1}]


def test_topics_that_get_no_rows_have_no_number_but_are_checked():
    async def act(stage):
        a, b = await topics(stage, 2)
        intent = await opened(stage.client)
        by_topic = {**results(intent, 0, [a]), b: [TaskResult(b, intent.id, 0, 0)]}

        outcome = await commit(stage.client, intent, 0, by_topic)

        assert outcome.topics[b] == records.TopicRows(records.NO_COMMIT, {})
        node = stage.world.store.peek(paths.topic_log(a, 0))
        assert records.decode_commit(node.value).others == ()
        assert rows_of(stage, b) == {}
        await stage.client.topics.delete("other-1")
        by_topic = {**results(intent, 1, [a]), b: [TaskResult(b, intent.id, 0, 0)]}
        other = await stage.another()
        with pytest.raises(errors.TopicDeleted):
            await commit(other, intent, 1, by_topic)

    play(act)


def test_one_topic_that_refuses_keeps_the_rows_out_of_all():
    async def act(stage):
        a, b = await topics(stage, 2)
        intent = await opened(stage.client)
        await commit(stage.client, intent, 0, results(intent, 0, [a, b]))
        await (await stage.another()).topics.delete("other-1")

        with pytest.raises(errors.TopicDeleted):
            await commit(stage.client, intent, 1, results(intent, 1, [a, b]))

        assert rows_of(stage, a) == rows_of(stage, b) == {(QUERY, 0): 1}

    play(act)


def test_results_of_two_attempts_or_of_too_many_topics_are_refused_before_anything_is_written():
    async def act(stage):
        a, b = await topics(stage, 2)
        intent = await opened(stage.client)
        by_topic = results(intent, 0, [a, b])
        by_topic[b] = [replace(by_topic[b][0], attempt=1)]
        writes = stage.world.store.zxid

        with pytest.raises(ValueError, match="attempts 0 and 1 of task 0"):
            await commit(stage.client, intent, 0, by_topic)
        with pytest.raises(errors.CommitOverTooManyTopics, match="LEDGER_OPTION"):
            await commit(stage.client, intent, 0, {f"t{n}": [] for n in range(501)})

        assert stage.world.store.zxid == writes

    play(act)


@pytest.mark.parametrize("seed", range(12))
def test_with_answers_lost_and_replicas_behind_each_version_is_in_all_its_topics_once(seed):
    async def act(stage):
        ids = await topics(stage, 3)
        clients = [await stage.another() for _ in range(2)]
        faults = stage.world.store.faults

        async def job(n, client):
            intent = await client.intents.open_batch_intent(f"app-{n}", "r", ANY)
            for version in range(4):
                by_topic = results(intent, 10 * n + version, ids[n % 2 :])
                await commit(client, intent, version, by_topic, timeout_s=300)

        faults.unknown, faults.lag_s = 0.3, 1.0
        await asyncio.gather(*(job(n, client) for n, client in enumerate(clients)))
        faults.unknown = 0.0

        both = {(f"app-{n}", version): 1 for n in range(2) for version in range(4)}
        assert rows_of(stage, ids[1]) == rows_of(stage, ids[2]) == both
        assert rows_of(stage, ids[0]) == {key: 1 for key in both if key[0] == "app-0"}

    play(act, seed=seed)


@pytest.mark.parametrize("applied", [True, False])
def test_a_commit_that_nobody_answered_is_found_by_its_replay_in_all_topics_or_in_none(applied):
    async def act(stage):
        ids = await topics(stage, 3)
        intent = await opened(stage.client)
        multi = stage.client.store.multi

        async def unheard(operations):
            if applied:
                await multi(operations)
            stage.world.store.stall(100)
            raise OutcomeUnknown("the answer was lost")

        stage.client.store.multi = unheard
        with pytest.raises(errors.CommitOutcomeUnknown):
            await commit(stage.client, intent, 0, results(intent, 0, ids), timeout_s=20)
        stage.client.store.multi = multi
        await asyncio.sleep(200)
        assert [rows_of(stage, one) for one in ids] == [{(QUERY, 0): 1} if applied else {}] * 3

        replayed = await commit(stage.client, intent, 0, results(intent, 1, ids))

        assert replayed.kind is (CommitKind.ALREADY if applied else CommitKind.COMMITTED)
        assert [rows_of(stage, one) for one in ids] == [{(QUERY, 0): 1}] * 3

    play(act)


@pytest.mark.parametrize("seed", range(5))
def test_a_reader_of_several_topics_sees_each_commit_in_all_of_them_or_in_none(seed):
    async def act(stage):
        ids = await topics(stage, 3)
        intent = await opened(stage.client)
        torn = []

        async def write():
            for version in range(60):
                await commit(stage.client, intent, version, results(intent, version, ids))

        async def read():
            client = await stage.another()
            logs = [client.log(one) for one in ids]
            while not writing.done():
                apart = [await log.fold() for log in logs]
                torn.append(not topic_log.states_agree(apart))
                states = await topic_log.fold_agreeing(logs)
                assert len({state.next for state in states}) == 1

        writing = asyncio.get_running_loop().create_task(write())
        await asyncio.gather(writing, read(), read())
        assert any(torn), "read one after another they disagree now and then"

    play(act, seed=seed)


async def beside_busy_writers(stage, count, timeout_s):
    """How many times each of `count` topics was written while one commit over all was made."""
    ids = await topics(stage, count)
    intent = await opened(stage.client)
    done = asyncio.Event()

    async def busy(n, topic_id):
        client = await stage.another()
        mine = await client.intents.open_batch_intent(f"busy-{n}", "r", ANY)
        version = 0
        while not done.is_set():
            await commit(client, mine, version, results(mine, 1000 * n + version, [topic_id]))
            version += 1
            await asyncio.sleep(client.committer.rng.uniform(0, 0.001))
        return version

    async def wide():
        await asyncio.sleep(0.05)
        try:
            by_topic = results(intent, 99_999, ids)
            return await commit(stage.client, intent, 0, by_topic, timeout_s=timeout_s)
        finally:
            done.set()

    outcome, *_ = await asyncio.gather(wide(), *(busy(n, one) for n, one in enumerate(ids)))
    assert all((QUERY, 0) in rows_of(stage, one) for one in ids)
    return outcome


def test_a_commit_over_many_busy_topics_gets_its_turn():
    async def act(stage):
        outcome = await beside_busy_writers(stage, 5, 20.0)
        assert outcome.kind is CommitKind.COMMITTED

    play(act)


@pytest.mark.slow
def test_without_turns_a_commit_over_many_busy_topics_starves(monkeypatch):
    async def act(stage):
        monkeypatch.setattr("spark_ledger.topic.commit.commit.LOSSES_MAX", 1_000_000)
        with pytest.raises(errors.CommitContended, match=r"lost every race for 0.3 s"):
            await beside_busy_writers(stage, 5, 0.3)

    play(act)


def test_a_turn_is_waited_for_at_most_two_seconds_and_the_next_commit_takes_it_out():
    async def act(stage):
        intent = await stage.intent()
        gone = commit_views.Turns(stage.client.store, "gone", [stage.topic.id])
        await gone.take()
        head = records.decode_head(stage.world.store.peek(paths.topic_head(stage.topic.id)).value)
        assert head == records.Head(0, turn="gone")
        began_s = asyncio.get_running_loop().time()

        await stage.commit(intent, 0, TaskResult(stage.topic.id, intent.id, 0, 0, (segment(1, 1),)))

        took_s = asyncio.get_running_loop().time() - began_s
        assert commit_views.TURN_WAIT_S_MAX <= took_s < commit_views.TURN_WAIT_S_MAX + 0.5
        head = records.decode_head(stage.world.store.peek(paths.topic_head(stage.topic.id)).value)
        assert head == records.Head(1)

    play(act)


def test_a_turn_that_is_given_back_is_not_waited_for_any_longer():
    async def act(stage):
        intent = await stage.intent()
        first = commit_views.Turns(stage.client.store, "first", [stage.topic.id])
        await first.take()
        asyncio.get_running_loop().call_later(0.3, lambda: asyncio.ensure_future(first.give_back()))
        began_s = asyncio.get_running_loop().time()

        await stage.commit(intent, 0, TaskResult(stage.topic.id, intent.id, 0, 0, (segment(1, 1),)))

        assert 0.3 <= asyncio.get_running_loop().time() - began_s < 0.6

    play(act)
