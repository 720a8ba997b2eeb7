"""The owner of a partition's open end, on the simulated cluster: fenced, taken over, idle."""

import asyncio
from collections import deque

import pytest

from spark_ledger import errors
from spark_ledger.broker.log.ownership import Deposed
from spark_ledger.broker.log.topic_commits import RollLimits
from spark_ledger.broker.produce import opening
from spark_ledger.broker.produce.live_writer import LiveWriter
from spark_ledger.broker.produce.waiting import ENTRY_UNPACKED_MAX, take_runs
from spark_ledger.topic.log import producers
from spark_ledger.topic.log.actions import OpenLive
from spark_ledger.topic.subscription.seek_target import End
from spark_ledger.topic.upkeep.admin import TopicAdmin
from tests.unit.spark_ledger.broker.owners import (
    Owner,
    Sent,
    another_of,
    deduplicating,
    fenced_by_another,
    owner_of,
    sent_by,
)
from tests.unit.spark_ledger.topic.stage import play


def test_batches_have_the_offsets_at_which_they_are_read_afterwards():
    async def act(stage):
        owner = await owner_of(stage)
        sent = owner.send([b"a", b"b"], [b"c"], [b"d", b"e", b"f"])
        assert await owner.all_stored(sent) == [[0], [2], [3]]
        assert [offset for offset, _ in owner.seen] == [0, 2, 3]
        await owner.writer.close()
        await owner.commits.close()
        assert await stage.rows() == [
            (i, b) for i, b in enumerate([b"a", b"b", b"c", b"d", b"e", b"f"])
        ]

    play(act)


def test_an_entry_has_a_bounded_number_of_bytes_when_it_is_decompressed():
    queue = deque(Sent(b"v") for _ in range(5))
    for run in queue:
        run.unpacked = ENTRY_UNPACKED_MAX // 2 - 1
    queue[3].unpacked = 10 * ENTRY_UNPACKED_MAX
    sizes = []
    while queue:
        sizes.append(len(take_runs(queue, 1 << 20)[0]))
    assert sizes == [2, 1, 1, 1]


def test_what_comes_while_the_partition_is_given_up_fails_after_the_receipts_of_what_came_before():
    async def act(stage):
        owner = await owner_of(stage)
        order = []
        early, late = owner.send([b"a"], [b"b"])[1], Sent(b"c")
        early.stored = lambda offset: order.append("early")
        late.failed = lambda error: order.append("late")
        closing = asyncio.create_task(owner.writer.close())
        await asyncio.sleep(0)
        owner.writer.append(late)
        assert order == []
        await closing
        assert order == ["early", "late"]
        owner.writer.append(late)
        assert order == ["early", "late", "late"]
        await owner.commits.close()

    play(act)


def test_nothing_is_sent_before_the_own_opening_was_read_back():
    async def act(stage):
        owner = await owner_of(stage)
        states, commit, lost = [], owner.commits.commit, asyncio.Event()

        async def lost_response(*asked):
            await commit(*asked)
            states.append(owner.writer.open_end.live)
            lost.set()
            raise errors.Unavailable("the response was lost")

        owner.commits.commit = lost_response
        sent = owner.send([b"a"])
        await lost.wait()
        owner.commits.commit = commit
        assert states == [None]
        assert await owner.all_stored(sent) == [[0]]
        await owner.writer.close()
        assert await stage.rows() == [(0, b"a")]

    play(act)


@pytest.mark.parametrize("seed", range(6))
def test_a_fenced_owner_lets_the_closed_record_decide_and_doubles_nothing(seed):
    async def act(stage):
        owner = await owner_of(stage)
        sent = owner.send(*([b"%d" % i] for i in range(30)))
        await asyncio.sleep(0.002 * (seed + 1))
        intent = await stage.intent()
        await stage.commit(intent, 1, await stage.written(intent, [b"of spark"]))
        sent += owner.send(*([b"%d" % i] for i in range(30, 40)))
        offsets = await owner.all_stored(sent)
        await owner.writer.close()
        rows = dict(await stage.rows())
        assert len(rows) == 41
        assert [rows[at] for (at,) in offsets] == [b"%d" % i for i in range(40)]
        assert sorted(rows) == list(range(41))

    play(act, seed=seed)


def test_a_successor_seals_what_was_left_open_and_the_deposed_one_sends_its_producers_away():
    async def act(stage):
        old = await owner_of(stage)
        await old.all_stored(old.send([b"a", b"b"]))
        new = await (await another_of(stage)).take()
        assert new.commits.epochs[0] == old.commits.epochs[0] + 1
        state = await new.commits.state()
        assert (state.partitions[0].live, state.partitions[0].end_offset) == (None, 2)
        lost = old.send([b"lost"])
        assert await new.all_stored(new.send([b"c"])) == [[2]]
        await lost[0].over.wait()
        assert isinstance(lost[0].errors[0], Deposed)
        assert lost[0].offsets == []
        await new.writer.close()
        assert await stage.rows() == [(0, b"a"), (1, b"b"), (2, b"c")]

    play(act)


def test_a_full_ledger_is_sealed_and_the_next_opened_in_one_commit():
    async def act(stage):
        owner = await owner_of(stage, limits=RollLimits(entries=2))
        sent = []
        for i in range(5):
            sent += owner.send([b"%d" % i])
            await owner.all_stored(sent)
        state = await owner.commits.state()
        assert state.partitions[0].end_offset == 4
        assert state.next == 3  # open; seal and open; seal and open
        await owner.writer.close()
        assert [value for _, value in await stage.rows()] == [b"%d" % i for i in range(5)]

    play(act)


def test_an_idle_partition_has_no_open_ledger():
    async def act(stage):
        owner = await owner_of(stage)
        await owner.all_stored(owner.send([b"a"]))
        assert owner.writer.open_end.live is not None
        await asyncio.sleep(70)
        state = await owner.commits.state()
        assert (state.partitions[0].live, state.partitions[0].end_offset) == (None, 1)
        assert await owner.all_stored(owner.send([b"b"])) == [[1]]
        await owner.writer.close()

    play(act)


def test_batches_share_an_entry_while_others_are_under_way():
    async def act(stage):
        owner = await owner_of(stage)
        await owner.all_stored(owner.send([b"first"]))
        ledger = owner.writer.open_end.live.ledger_id
        await owner.all_stored(owner.send(*([b"%d" % i] for i in range(100))))
        await owner.writer.close()
        record = (await stage.client.ledgers.record(ledger)).record
        assert record.rows == 101
        assert record.last_entry < 20
        assert len(await stage.rows()) == 101

    play(act)


def test_what_a_defect_keeps_from_being_sent_has_failed(monkeypatch):
    def defect(*args, **options):
        raise RuntimeError("a defect")

    async def act(stage):
        owner = await owner_of(stage)
        await owner.all_stored(owner.send([b"a"]))
        monkeypatch.setattr(opening, "encode_entry", defect)
        (sent,) = owner.send([b"b"])
        async with asyncio.timeout(10):
            await sent.over.wait()
        assert len(sent.errors) == 1
        monkeypatch.undo()
        assert await owner.all_stored(owner.send([b"b"])) == [[1]]

    play(act)


def test_batches_that_say_they_have_many_messages_share_no_entry_that_cannot_count_them():
    async def act(stage):
        owner = await owner_of(stage)
        many = [Sent(b"x") for _ in range(200)]
        for one in many:
            one.messages, one.counts = 1 << 25, [1 << 25]
            owner.writer.append(one)
        await owner.all_stored([*many, *owner.send([b"y"])])

    play(act)


def test_the_topics_partitions_are_opened_by_few_commits():
    async def act(stage):
        owner = await owner_of(stage)
        writers = [LiveWriter(owner.commits, n, RollLimits(), owner.stored) for n in range(1, 8)]
        sent = [Sent(b"x") for _ in writers]
        for writer, one in zip(writers, sent, strict=True):
            writer.append(one)
        await owner.all_stored(sent)
        assert (await owner.commits.state()).next <= 4
        await asyncio.gather(*(writer.close() for writer in writers))

    play(act, partitions=8)


def test_a_deleted_topic_fails_what_waits():
    async def act(stage):
        owner = await owner_of(stage)
        await stage.client.topics.delete("t")
        (sent,) = owner.send([b"a"])
        await sent.over.wait()
        assert isinstance(sent.errors[0], errors.TopicDeleted | errors.TopicNotFound)

    play(act)


def test_what_a_producer_sends_again_is_stored_once_and_has_its_receipt():
    async def act(stage):
        owner = await deduplicating(Owner(stage, stage.client, "a"))
        assert await sent_by(owner, 0, 2, 0, 2, 4) == [False, False, True, True, False]
        assert owner.writer.backlog.sequence_ids.last("p") == 5
        await owner.writer.close()
        assert [value for _, value in await stage.rows()] == [b"%d" % i for i in range(6)]

    play(act)


@pytest.mark.parametrize("by_spark", [False, True])
def test_a_successor_knows_what_producers_have_sent_to_those_before(by_spark):
    async def act(stage):
        old = await deduplicating(Owner(stage, stage.client, "a"))
        await sent_by(old, 0, 2)
        if by_spark:  # whoever seals tells
            intent = await stage.intent()
            await stage.commit(intent, 1, await stage.written(intent, [b"of spark"]))
        new = await (await another_of(stage)).take()
        assert new.writer.backlog.sequence_ids.last("p") == 3
        assert await sent_by(new, 0, 2, 4) == [True, True, False]
        await new.writer.close()
        third = await (await another_of(stage, "c")).take()
        assert third.writer.backlog.sequence_ids.last("p") == 5
        values = [value for _, value in await stage.rows() if value != b"of spark"]
        assert values == [b"%d" % i for i in range(6)]

    play(act)


@pytest.mark.parametrize("dies", [False, True])
def test_of_too_many_producers_a_successor_knows_those_that_sent_last(dies, monkeypatch):
    monkeypatch.setattr(producers, "PRODUCERS_MAX", 2)

    async def act(stage):
        old = await deduplicating(Owner(stage, stage.client, "a"))
        for number, name in enumerate(("b", "y", "z", "b", "a")):
            one = Sent(b"%d" % number, first=number, producer=name)
            old.writer.append(one)
            await one.over.wait()
        if not dies:
            await old.writer.close()
        new = await (await another_of(stage)).take()
        last = {name: new.writer.backlog.sequence_ids.last(name) for name in "abyz"}
        assert last == {"a": 4, "b": 3, "y": -1, "z": -1}

    play(act)


def test_without_the_policy_sequence_ids_mean_nothing():
    async def act(stage):
        owner = await owner_of(stage)
        assert await sent_by(owner, 0, 0) == [False, False]
        assert owner.writer.backlog.sequence_ids.last("p") == -1
        await owner.writer.close()
        assert len(await stage.rows()) == 4

    play(act)


def test_a_terminated_topic_takes_no_batch_into_the_ledger_that_was_open():
    async def act(stage):
        owner = await owner_of(stage)
        await owner.all_stored(owner.send([b"a"]))
        await TopicAdmin(stage.client).terminate("t")
        for value in (b"b", b"c"):
            (late,) = owner.send([value])
            await late.over.wait()
            assert (late.offsets, [type(one) for one in late.errors]) == (
                [],
                [errors.TopicTerminated],
            )
        assert (await owner.commits.state()).partitions[0].live is None
        assert await stage.rows() == [(0, b"a")]

    play(act)


def test_a_ledger_that_is_opened_while_the_topic_is_terminated_ends_too():
    async def act(stage):
        owner = await owner_of(stage)
        commit, tries = stage.client.commit_actions, []

        async def late(topic_id, actions, intent, **options):
            stage.client.commit_actions = commit
            tries.append(actions)
            await owner.all_stored(owner.send([b"a"]))
            return await commit(topic_id, actions, intent, **options)

        stage.client.commit_actions = late
        await TopicAdmin(stage.client).terminate("t")
        state = await owner.commits.state()
        assert (state.terminated, state.partitions[0].live, len(tries)) == (True, None, 1)
        assert await stage.rows() == [(0, b"a")]

    play(act)


def test_truncating_takes_the_rows_of_the_open_ledger_and_its_owner_goes_on_after_them():
    async def act(stage):
        owner = await owner_of(stage)
        await owner.all_stored(owner.send([b"a", b"b"], [b"c"]))
        trimmed = await TopicAdmin(stage.client).trim("t", End.LATEST)
        assert (dict(trimmed.starts), trimmed.rows) == ({0: 3}, 3)
        assert await owner.all_stored(owner.send([b"d"])) == [[3]]
        await owner.writer.close()
        state = await owner.commits.state()
        assert (state.partitions[0].start_offset, state.partitions[0].end_offset) == (3, 4)

    play(act)


def test_who_waits_no_longer_for_what_cannot_be_decided_leaves_no_batch_untold():
    async def act(stage):
        owner = await owner_of(stage)
        await owner.all_stored(owner.send([b"a"]))
        for node in stage.world.nodes:
            node.process.pause()
        sent = owner.send([b"b"], [b"c"])
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(3):
                await owner.writer.close()
        assert [len(one.errors) for one in sent] == [1, 1]
        for node in stage.world.nodes:
            node.process.resume()

    play(act)


def test_what_comes_again_after_the_work_has_ended_is_failed_when_the_partition_is_given_up():
    async def act(stage):
        owner = await deduplicating(Owner(stage, stage.client, "a"))
        await owner.all_stored(owner.send([b"a"]))
        await (await another_of(stage)).take()
        failed = Sent(b"b", first=1)
        owner.writer.append(failed)
        await failed.over.wait()
        again = Sent(b"b", first=1)
        owner.writer.append(again)
        await owner.writer.close()
        assert isinstance(failed.errors[0], Deposed)
        assert len(again.errors) == 1

    play(act)


def fails(calls, error, times=1):
    """The next calls fail so often."""
    left = [error] * times

    async def failing(*some, **named):
        if left:
            raise left.pop()
        return await calls(*some, **named)

    return failing


def test_while_the_metadata_store_is_away_what_a_fenced_ledger_has_stays_to_be_decided():
    async def act(stage):
        owner = await owner_of(stage)
        await owner.all_stored(owner.send([b"a", b"b"]))
        await fenced_by_another(stage, owner)
        ledgers, commits, away = stage.client.ledgers, owner.commits, errors.Unavailable("away")
        ledgers.recover = fails(ledgers.recover, away)
        commits.check_owner = fails(commits.check_owner, away)
        assert await owner.all_stored(owner.send([b"c"])) == [[2]]
        await owner.writer.close()
        assert await stage.rows() == [(0, b"a"), (1, b"b"), (2, b"c")]

    play(act)


def test_after_a_failure_the_next_ledger_counts_from_its_own_first_row():
    async def act(stage):
        owner = await owner_of(stage)
        await owner.all_stored(owner.send([b"a", b"b"]))
        await fenced_by_another(stage, owner)
        ledgers = stage.client.ledgers
        ledgers.recover = fails(ledgers.recover, errors.LedgerError("a defect"))
        (lost,) = owner.send([b"lost"])
        await lost.over.wait()
        assert lost.errors
        assert await owner.all_stored(owner.send([b"c"])) == [[2]]
        await owner.writer.close()
        assert await stage.rows() == [(0, b"a"), (1, b"b"), (2, b"c")]

    play(act)


def test_what_has_failed_is_stored_when_its_producer_sends_it_again():
    async def act(stage):
        owner = await deduplicating(Owner(stage, stage.client, "a"))
        await sent_by(owner, 0)
        await fenced_by_another(stage, owner)
        ledgers = stage.client.ledgers
        ledgers.recover = fails(ledgers.recover, errors.LedgerError("a defect"))
        lost = Sent(b"2", b"3", first=2)
        owner.writer.append(lost)
        await lost.over.wait()
        assert lost.errors
        assert await sent_by(owner, 0, 2, 2, 4) == [True, False, True, False]
        await owner.writer.close()
        assert [value for _, value in await stage.rows()] == [b"%d" % i for i in range(6)]

    play(act)


def test_an_owner_learns_of_producers_from_the_ledger_of_one_that_was_deposed_and_opened_it_late():
    async def act(stage):
        old = await deduplicating(Owner(stage, stage.client, "a"))
        await sent_by(old, 0)
        new = await (await another_of(stage)).take()

        async def does_not_know():
            return None

        old.commits.check_owner = lambda number: does_not_know()
        assert await sent_by(old, 2) == [False]
        assert await sent_by(new, 2, 4) == [True, False]
        await new.writer.close()
        assert [value for _, value in await stage.rows()] == [b"%d" % i for i in range(6)]

    play(act)


def test_a_ledger_of_an_intent_that_has_ended_is_not_opened_under_the_one_that_follows():
    async def act(stage):
        owner = await owner_of(stage)
        commits = owner.commits
        writer, intent = await commits.new_ledger()
        opening = OpenLive(0, writer.ledger_id, writer.version, commits.owner_name, 1)
        await stage.client.intents.condemn(intent.id, "silent")
        with pytest.raises(errors.LedgerFenced):  # of another partition, that finds it out
            await commits.commit([OpenLive(0, 99, 0, commits.owner_name, 1)])
        assert (await commits.intent()).id != intent.id
        with pytest.raises(errors.LedgerFenced, match="was made has ended"):
            await commits.commit([opening], intent)
        assert (await commits.state()).partitions[0].live is None

    play(act)


def test_who_hears_late_that_an_intent_has_ended_does_not_end_the_one_that_follows():
    async def act(stage):
        owner = await owner_of(stage)
        commits = owner.commits
        ended = await commits.intent()
        await stage.client.intents.condemn(ended.id, "silent")
        await commits.renew_intent(ended)
        following = await commits.intent()
        await commits.renew_intent(ended)
        assert await commits.intent() is following
        assert (await stage.client.intents.get(following.id)).is_open

    play(act)
