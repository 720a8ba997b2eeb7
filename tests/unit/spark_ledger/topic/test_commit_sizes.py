"""Commits that are too big for the metadata store, and rows that are too few for a ledger."""

from dataclasses import replace

import pytest

from spark_ledger import errors
from spark_ledger.metadata import paths
from spark_ledger.topic.commit import commit as commit_commit
from spark_ledger.topic.commit.draft import BODY_INLINE_BYTES_MAX, INLINE_COMMIT_BYTES_MAX, TxnKey
from spark_ledger.topic.log import records
from spark_ledger.topic.log.intents import STALE
from spark_ledger.topic.log.records import SpilledBody
from spark_ledger.topic.write import TaskResult
from tests.kit.segments_seen import segments_of
from tests.simulation.contents import is_record
from tests.unit.spark_ledger.topic.stage import TARGET, inline, play, segment


def result(stage, intent, *segments, task=0, topic_id=None):
    return TaskResult(topic_id or stage.topic.id, intent.id, task, 0, segments)


def many(count, first_ledger=0):
    """So many segments: a body of some 150 bytes for each."""
    return tuple(segment(first_ledger + n, 1) for n in range(count))


def large(filling):
    """More than a commit keeps."""
    return inline(*[filling * 8000] * 5)


def node_of(stage, number, topic_id=None):
    return stage.world.store.peek(paths.topic_log(topic_id or stage.topic.id, number))


async def state_of(stage):
    return await (await stage.another()).log(stage.topic.id).fold(fresh=True)


def ledgers_made(stage):
    return [path for path, _ in stage.world.store.walk(paths.LEDGERS) if is_record(path)]


async def entries_of(stage, segment):
    reader = await stage.client.ledgers.open(segment.ledger_id, recover=False)
    (first, last), *_ = segment.entries
    read = reader.read(first, last, known_confirmed=last)
    return [bytes(entry.payload) async for _, entry in read]


def before_the_first_multi_that(store, condition, act):
    multi = store.multi

    async def interrupted(operations):
        if condition(operations):
            store.multi = multi
            await act()
        return await multi(operations)

    store.multi = interrupted


def commits(operations):
    return any("/log/" in one.path for one in operations)


# -- bodies ------------------------------------------------------------------------------------


def test_a_large_body_goes_to_a_ledger_and_its_node_stays_small():
    async def act(stage):
        intent = await stage.intent()
        await stage.commit(intent, 0, result(stage, intent, *many(2000)))
        await stage.commit(intent, 1, result(stage, intent, *many(1, 5000)))

        node = records.decode_commit(node_of(stage, 0).value)
        state = await state_of(stage)
        assert isinstance(node, SpilledBody)
        assert len(node_of(stage, 0).value) <= commit_commit.POINTER_BYTES_MAX
        assert state.end_offsets() == {0: 2001}
        assert state.bodies == {node.body.ledger_id: 0}
        assert not isinstance(records.decode_commit(node_of(stage, 1).value), SpilledBody)

    play(act)


def test_a_body_that_just_fits_makes_no_ledger():
    async def act(stage):
        intent = await stage.intent()
        count = 300
        while len(body(stage, intent, count + 1)) <= BODY_INLINE_BYTES_MAX:
            count += 1
        await stage.commit(intent, 0, result(stage, intent, *many(count)))
        assert ledgers_made(stage) == []
        await stage.commit(intent, 1, result(stage, intent, *many(count + 10)))
        assert len(ledgers_made(stage)) == 1

    def body(stage, intent, count):
        commit = records.Commit(
            "c" * 32, intent.app_id, intent.target, 0, intent.run_id, intent.id,
            (records.actions.Append(many(count)),),
        )  # fmt: skip
        return records.encode_commit(commit)

    play(act)


def test_a_janitor_that_closes_the_bodys_ledger_before_the_commit_does_no_harm():
    async def act(stage):
        intent = await stage.intent()
        other = await stage.another()

        async def recovered():
            for path in ledgers_made(stage):
                await other.ledgers.recover(int(path.removeprefix(paths.LEDGERS).replace("/", "")))

        before_the_first_multi_that(stage.client.store, commits, recovered)
        await stage.commit(intent, 0, result(stage, intent, *many(2000)))

        assert (await state_of(stage)).end_offsets() == {0: 2000}

    play(act)


def test_a_janitor_that_deletes_the_bodys_ledger_before_the_commit_makes_it_be_written_again():
    async def act(stage):
        intent = await stage.intent()
        other = await stage.another()

        async def deleted():
            for path in ledgers_made(stage):
                ledger = int(path.removeprefix(paths.LEDGERS).replace("/", ""))
                await other.ledgers.recover(ledger)
                await other.ledgers.delete(ledger)

        before_the_first_multi_that(stage.client.store, commits, deleted)
        await stage.commit(intent, 0, result(stage, intent, *many(2000)))

        assert (await state_of(stage)).end_offsets() == {0: 2000}

    play(act)


def test_a_large_commit_that_loses_a_race_is_written_once():
    async def act(stage):
        intent = await stage.intent()
        other = replace(stage, client=await stage.another())
        theirs = await other.client.intents.open_batch_intent("app", "r", TARGET)

        async def overtaken():
            await other.commit(theirs, 0, result(other, theirs, segment(9000, 3)))

        before_the_first_multi_that(stage.client.store, commits, overtaken)
        outcome = await stage.commit(intent, 0, result(stage, intent, *many(2000)))

        assert outcome.number == 1
        assert len(ledgers_made(stage)) == 1
        assert records.decode_commit(node_of(stage, 1).value).body.first == 0
        assert (await state_of(stage)).end_offsets() == {0: 2003}

    play(act)


def test_bodies_of_many_topics_that_do_not_fit_into_one_multi_go_to_ledgers():
    async def act(stage):
        ids = [stage.topic.id]
        ids += [(await stage.client.topics.create(f"other-{n}")).id for n in range(14)]
        intent = await stage.intent()
        by_topic = {
            topic_id: [result(stage, intent, *many(350, 1000 * n), topic_id=topic_id)]
            for n, topic_id in enumerate(ids)
        }
        txn = TxnKey(intent.app_id, intent.target, 0, intent.run_id)

        await stage.client.commit_topics(by_topic, txn, intent.id)

        nodes = [records.decode_commit(node_of(stage, 0, one).value) for one in ids]
        spilled = [isinstance(node, SpilledBody) for node in nodes]
        assert 0 < sum(spilled) < 15
        size = sum(len(node_of(stage, 0, one).value) for one in ids)
        assert size < 512 * 1024

    play(act)


def test_a_commit_beyond_all_measure_is_refused_before_anything_is_written(monkeypatch):
    async def act(stage):
        intent = await stage.intent()
        monkeypatch.setattr(commit_commit, "BODY_BYTES_MAX", 100_000)

        with pytest.raises(errors.CommitTooBig, match="at most 100000 fit"):
            await stage.commit(intent, 0, result(stage, intent, *many(2000)))

        assert ledgers_made(stage) == []
        assert (await state_of(stage)).next == 0

    play(act)


# -- payloads inline ---------------------------------------------------------------------------


def test_few_rows_stay_in_the_commit_and_make_no_ledger():
    async def act(stage):
        intent = await stage.intent()
        small = [result(stage, intent, inline(b"x" * 8000), task=n) for n in range(4)]

        await stage.commit(intent, 0, *small)

        assert sum(4 * [8000]) <= INLINE_COMMIT_BYTES_MAX
        assert ledgers_made(stage) == []
        held = [placed.segment for placed in segments_of((await state_of(stage)).partitions[0])]
        assert held == [inline(b"x" * 8000)] * 4

    play(act)


def test_many_small_results_together_go_to_one_ledger_of_the_committers():
    async def act(stage):
        intent = await stage.intent()
        payloads = [bytes([n]) * 4000 for n in range(10)]
        results = [
            result(stage, intent, inline(*payloads[2 * n : 2 * n + 2], partition=n % 2), task=n)
            for n in range(5)
        ]

        outcome = await stage.commit(
            intent, 0, *results, result(stage, intent, segment(99, 5), task=9)
        )

        state = await state_of(stage)
        held = [placed.segment for p in state.partitions for placed in segments_of(p)]
        moved = [one for one in held if one.ledger_id != 99]
        assert outcome.rows == {0: 11, 1: 4}
        assert len(ledgers_made(stage)) == 1
        assert sorted([p for one in moved for p in await entries_of(stage, one)]) == payloads
        assert sorted(one.entries for one in moved) == [((2 * n, 2 * n + 1),) for n in range(5)]
        assert len(node_of(stage, 0).value) < 4000

    play(act, partitions=2)


def test_payloads_are_written_once_though_the_race_is_lost_or_the_answer():
    async def act(stage):
        intent = await stage.intent()
        other = replace(stage, client=await stage.another())
        theirs = await other.client.intents.open_batch_intent("app", "r", TARGET)

        async def overtaken():
            await other.commit(theirs, 0, result(other, theirs, segment(9000, 3)))

        before_the_first_multi_that(stage.client.store, commits, overtaken)
        await stage.commit(intent, 0, result(stage, intent, large(b"x")))
        stage.world.store.faults.unknown = 0.5
        await stage.commit(intent, 1, result(stage, intent, large(b"y")))
        stage.world.store.faults.unknown = 0.0

        ours = [p.segment for p in segments_of((await state_of(stage)).partitions[0])][1:]
        assert [one.entries for one in ours] == [((0, 4),), ((5, 9),)]
        assert [await entries_of(stage, one) for one in ours] == [
            [b"x" * 8000] * 5,
            [b"y" * 8000] * 5,
        ]

    play(act)


def test_payloads_whose_ledger_a_janitor_deleted_are_written_again():
    async def act(stage):
        intent = await stage.intent()
        other = await stage.another()

        async def deleted():
            for path in ledgers_made(stage):
                ledger = int(path.removeprefix(paths.LEDGERS).replace("/", ""))
                await other.ledgers.recover(ledger)
                await other.ledgers.delete(ledger)

        before_the_first_multi_that(stage.client.store, commits, deleted)
        await stage.commit(intent, 0, result(stage, intent, large(b"x")))

        (held,) = segments_of((await state_of(stage)).partitions[0])
        assert await entries_of(stage, held.segment) == [b"x" * 8000] * 5

    play(act)


def test_nothing_is_written_for_a_version_that_is_committed_or_an_intent_that_ended():
    async def act(stage):
        intent = await stage.intent()
        await stage.commit(intent, 0, result(stage, intent, segment(1, 1)))
        await stage.commit(intent, 0, result(stage, intent, large(b"x")))
        await (await stage.another()).intents.condemn(intent.id, STALE)
        with pytest.raises(errors.LedgerFenced):
            await stage.commit(intent, 1, result(stage, intent, large(b"x")))

        assert ledgers_made(stage) == []

    play(act)


def test_the_committers_ledger_goes_back_and_serves_the_next_commit():
    async def act(stage):
        intent = await stage.intent()
        for version in range(5):
            await stage.commit(intent, version, result(stage, intent, large(b"x")))
        assert len(ledgers_made(stage)) == 1

    play(act)
