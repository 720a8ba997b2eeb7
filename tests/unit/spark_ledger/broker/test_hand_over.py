"""Live segments that their owners hand over to who commits past them, on the simulated cluster."""

import asyncio
from contextlib import suppress
from dataclasses import replace
from itertools import pairwise

import pytest

from spark_ledger import errors
from spark_ledger.broker.log.holds import SegmentHold
from spark_ledger.broker.log.ownership import Deposed
from spark_ledger.broker.log.topic_commits import RollLimits
from spark_ledger.broker.produce.live_writer import LiveWriter
from spark_ledger.metadata import paths
from spark_ledger.topic.commit import hand_over
from spark_ledger.topic.commit.commit import TxnKey
from spark_ledger.topic.subscription.seek_target import End
from spark_ledger.topic.upkeep.admin import TopicAdmin
from tests.unit.spark_ledger.broker.hand_overs import (
    another_process,
    before_the_commit,
    by_spark,
    dies,
    live_segment,
    now_s,
    reached,
    request_for,
    values,
)
from tests.unit.spark_ledger.broker.owners import (
    Owner,
    Sent,
    another_of,
    deduplicating,
    owner_of,
    sent_by,
)
from tests.unit.spark_ledger.topic.stage import play


async def live(owner):
    held = await live_segment(owner)
    return None if held is None else held.ledger_id


def test_an_owner_goes_on_in_the_same_ledger_that_the_batchs_own_commit_opened_again():
    async def act(stage):
        owner = reached(await owner_of(stage))
        await owner.all_stored(owner.send([b"a"]))
        first = await live(owner)
        began_s = now_s()
        await by_spark(stage)
        assert now_s() - began_s < 1
        state = await owner.commits.state()
        assert state.next == 2  # the owner's opening, and the batch
        assert await live(owner) == first
        assert await owner.all_stored(owner.send([b"b"])) == [[2]]
        assert (await owner.commits.state()).next == 2
        await owner.writer.close()
        assert await values(stage) == [b"a", b"of spark", b"b"]

    play(act)


@pytest.mark.parametrize("seed", range(6))
def test_what_is_under_way_when_it_is_asked_for_is_stored_once_and_in_order(seed):
    async def act(stage):
        owner = reached(await owner_of(stage))
        sent = owner.send(*([b"%d" % i] for i in range(30)))
        await asyncio.sleep(0.002 * (seed + 1))
        await by_spark(stage)
        sent += owner.send(*([b"%d" % i] for i in range(30, 40)))
        offsets = await owner.all_stored(sent)
        await owner.writer.close()
        rows = dict(await stage.rows())
        assert [rows[at] for (at,) in offsets] == [b"%d" % i for i in range(40)]
        assert sorted(rows) == list(range(41))

    play(act, seed=seed)


@pytest.mark.parametrize("closed", [True, False])
def test_an_owner_goes_on_by_itself_after_a_committer_that_died(closed):
    async def act(stage):
        owner = reached(await owner_of(stage))
        await owner.all_stored(owner.send([b"a"]))
        request = await request_for(owner)
        answer, let_go = await stage.owners.ask(owner.ownership.url, request)
        (handed,) = hand_over.decode_response(answer)
        assert (handed.seal.segment.rows, handed.reopen is None) == (1, False)
        sent, began_s = owner.send([b"b"]), now_s()
        if closed:  # its connection tells
            let_go()
        assert await owner.all_stored(sent) == [[1]]
        assert (now_s() - began_s < 0.5) == closed
        assert now_s() - began_s < 3
        await owner.writer.close()
        assert await values(stage) == [b"a", b"b"]

    play(act)


def test_an_owner_that_dies_after_it_answered_leaves_an_open_end_to_its_successor():
    async def act(stage):
        old = reached(await owner_of(stage))
        await old.all_stored(old.send([b"a"]))
        before_the_commit(stage, lambda: dies(old))
        await by_spark(stage)
        ledger = await live(old)
        assert ledger is not None
        new = await (await another_of(stage)).take()
        assert await live(new) is None
        assert await new.all_stored(new.send([b"b"])) == [[2]]
        await new.writer.close()
        assert await values(stage) == [b"a", b"of spark", b"b"]

    play(act)


def test_of_a_batch_and_an_owner_whose_hold_is_over_one_wins_and_both_go_on():
    async def act(stage):
        owner = reached(await owner_of(stage))
        batches = await another_process(stage)
        await owner.all_stored(owner.send([b"a"]))
        await by_spark(batches, 1)
        sent = owner.send([b"b"])
        await owner.all_stored(sent)

        async def late():
            sent.extend(owner.send([b"c"]))
            await asyncio.sleep(3)

        before_the_commit(batches, late)
        await by_spark(batches, 2, b"late")
        assert await owner.all_stored(sent) == [[2], [3]]
        assert await owner.all_stored(owner.send([b"d"])) == [[5]]
        await owner.writer.close()
        assert await values(stage) == [b"a", b"of spark", b"b", b"c", b"late", b"d"]
        assert len(stage.owners.asked) == 3

    play(act)


def test_each_try_holds_longer_so_a_slow_batch_comes_through():
    async def act(stage):
        owner = reached(await owner_of(stage))
        batches = await another_process(stage)
        sent = owner.send([b"a"])
        await owner.all_stored(sent)
        store = batches.client.store
        multi = store.multi

        async def slow(operations):
            await asyncio.sleep(3)
            return await multi(operations)

        async def produce():
            while True:
                sent.extend(owner.send([b"p"]))
                await asyncio.sleep(0.5)

        producing = asyncio.create_task(produce())
        store.multi = slow
        await by_spark(batches)
        producing.cancel()
        await owner.all_stored(sent)
        assert len(stage.owners.asked) == 2

    play(act)


def test_two_batches_at_once_share_an_answer_and_both_come():
    async def act(stage):
        owner = reached(await owner_of(stage))
        other = await another_process(stage)
        sent = owner.send([b"a"])
        await owner.all_stored(sent)
        mine, theirs = await stage.intent(), await another_intent(other)
        written = await stage.written(mine, [b"1"]), await other.written(theirs, [b"2"])
        sent += owner.send([b"b"])
        await asyncio.gather(stage.commit(mine, 1, written[0]), other.commit(theirs, 1, written[1]))
        sent += owner.send([b"c"])
        await owner.all_stored(sent)
        await owner.writer.close()
        found = await values(stage)
        assert sorted(found) == [b"1", b"2", b"a", b"b", b"c"]
        assert [one for one in found if one.isalpha()] == [b"a", b"b", b"c"]

    play(act)


async def another_intent(stage):
    return await stage.client.intents.open_query_intent("other query", "run", "t")


@pytest.mark.parametrize("silent", [False, True])
def test_one_commit_goes_past_live_segments_of_several_owners_and_topics(silent):
    async def act(stage):
        topic = await stage.client.topics.create("u", 1)
        second = replace(stage, topic=topic)
        one = reached(await owner_of(stage))
        two = await Owner(second, await stage.another(), "b").take()
        if not silent:
            reached(two)
        for owner in (one, two):
            await owner.all_stored(owner.send([b"a"]))
        intent = await stage.intent()
        results = {at.topic.id: [await at.written(intent, [b"x"])] for at in (stage, second)}
        txn = TxnKey(intent.app_id, intent.target, 1, intent.run_id)
        await stage.client.commit_topics(results, txn, intent.id)
        for owner in (one, two):
            assert await owner.all_stored(owner.send([b"b"])) == [[2]]
            await owner.writer.close()
        assert await values(stage) == await values(second) == [b"a", b"x", b"b"]
        assert (await stage.client.log(topic.id).fold()).shared_commits[-1].others == (
            stage.topic.id,
        )

    play(act)


def test_an_owner_that_does_not_answer_is_fenced_after_half_a_second():
    async def act(stage):
        owner = await owner_of(stage)
        sent = owner.send([b"a"])
        await owner.all_stored(sent)

        async def hangs(url, request):
            await asyncio.sleep(3600)

        stage.owners.ask = hangs
        began_s = now_s()
        await by_spark(stage)
        assert 0.5 <= now_s() - began_s < 1.5
        assert await owner.all_stored(owner.send([b"b"])) == [[2]]
        await owner.writer.close()
        assert await values(stage) == [b"a", b"of spark", b"b"]

    play(act)


def test_an_answer_for_an_earlier_segment_of_the_ledger_changes_nothing():
    async def act(stage):
        owner = reached(await owner_of(stage))
        ask, answers = stage.owners.ask, []

        async def first_answer_again(url, request):
            if not answers:
                answers.append(await ask(url, request))
            return answers[0]

        stage.owners.ask = first_answer_again
        for version in range(1, 4):
            await owner.all_stored(owner.send([b"%d" % version]))
            await by_spark(stage, version, b"of spark %d" % version)
        await owner.writer.close()
        assert await values(stage) == [
            one for n in (b"1", b"2", b"3") for one in (n, b"of spark " + n)
        ]

    play(act)


def test_a_ledger_that_is_made_for_one_who_waits_no_longer_is_left():
    async def act(stage):
        owner, made = await owner_of(stage), []
        create = stage.client.ledgers.create_several

        async def noted(*args, **options):
            made.extend(await create(*args, **options))
            return made

        stage.client.ledgers.create_several = noted
        waiting = asyncio.create_task(owner.commits.new_ledger())
        await asyncio.sleep(0.0001)
        waiting.cancel()
        await asyncio.sleep(1)
        assert [one.failure is not None for one in made] == [True]

    play(act)


def test_no_batch_past_it_costs_a_ledger_whether_it_took_anything_or_not():
    async def act(stage):
        owner = reached(await owner_of(stage))
        sent = owner.send([b"0"])
        await owner.all_stored(sent)
        ledger, made = await live(owner), made_by(owner)
        for version in range(1, 9):
            await by_spark(stage, version)
            assert await live(owner) == ledger
            if version % 2:
                await owner.all_stored(owner.send([b"%d" % version]))
        assert made == []
        await owner.writer.close()
        spark = b"of spark"
        assert await values(stage) == [
            *(b"0", spark, b"1", spark, spark, b"3", spark, spark, b"5", spark, spark, b"7"),
            spark,
        ]
        assert (await stage.client.ledgers.record(ledger)).record.last_entry == 4

    play(act)


def made_by(owner):
    """The ledgers that it makes from now on."""
    made, create = [], owner.commits.new_ledger

    async def noted():
        writer, intent = await create()
        made.append(writer.ledger_id)
        return writer, intent

    owner.commits.new_ledger = noted
    return made


def test_batches_without_pause_let_producers_on_between_them():
    async def act(stage):
        owner = reached(await owner_of(stage))
        intent = await stage.intent()
        sent, over = [], asyncio.Event()

        async def produce():
            while not over.is_set():
                sent.extend(owner.send([b"p"]))
                await asyncio.sleep(0.001)

        producing = asyncio.create_task(produce())
        stored = []
        for version in range(20):
            await stage.commit(intent, version, await stage.written(intent, [b"s"]))
            stored.append(sum(bool(one.offsets) for one in sent))
        over.set()
        await producing
        await owner.all_stored(sent)
        assert all(a < b for a, b in pairwise(stored[1:]))
        await owner.writer.close()
        found = await values(stage)
        assert (found.count(b"s"), found.count(b"p")) == (20, len(sent))

    play(act)


def test_a_successor_knows_of_producers_what_an_owner_handed_over():
    async def act(stage):
        old = reached(await deduplicating(Owner(stage, stage.client, "a")))
        await sent_by(old, 0, 2)
        await by_spark(stage)
        assert old.writer.backlog.sequence_ids.last("p") == 3
        new = await (await another_of(stage)).take()
        assert new.writer.backlog.sequence_ids.last("p") == 3
        assert await sent_by(new, 0, 2, 4) == [True, True, False]
        await new.writer.close()
        assert len(await values(stage)) == 1 + 6

    play(act)


def test_terminating_a_topic_opens_no_segment_again():
    async def act(stage):
        owner = reached(await owner_of(stage))
        await owner.all_stored(owner.send([b"a"]))
        await TopicAdmin(stage.client).terminate("t")
        assert len(stage.owners.asked) == 1
        (late,) = owner.send([b"b"])
        await late.over.wait()
        assert [type(one) for one in late.errors] == [errors.TopicTerminated]
        assert await values(stage) == [b"a"]

    play(act)


def test_truncating_a_topic_leaves_its_owner_an_open_end():
    async def act(stage):
        owner = reached(await owner_of(stage))
        await owner.all_stored(owner.send([b"a", b"b"]))
        await TopicAdmin(stage.client).trim("t", End.LATEST)
        assert await owner.all_stored(owner.send([b"c"])) == [[2]]
        assert (await owner.commits.state()).next == 3  # its opening, the seal with the next, trim
        await owner.writer.close()

    play(act)


def test_overwriting_past_a_live_segment_is_refused_where_others_came_between():
    async def act(stage):
        owner = reached(await owner_of(stage))
        overwriting = await stage.client.intents.open_batch_intent(
            "batch", "run", "t", overwrites=[stage.topic.id]
        )
        written = await stage.written(overwriting, [b"all"])
        await owner.all_stored(owner.send([b"a"]))
        with pytest.raises(errors.TxnConflict, match="another writer"):
            await stage.commit(overwriting, 0, written, overwrite=True)
        assert await owner.all_stored(owner.send([b"b"])) == [[1]]
        await owner.writer.close()

    play(act)


def test_an_owner_that_gives_its_topic_up_ends_the_hold():
    async def act(stage):
        owner = reached(await owner_of(stage))
        await owner.all_stored(owner.send([b"a"]))
        request = await request_for(owner)
        await stage.owners.ask(owner.ownership.url, request)
        began_s = now_s()
        await owner.writer.close()
        assert now_s() - began_s < 1
        assert await live(owner) is None
        assert await stage.client.store.get(paths.topic_head(stage.topic.id))

    play(act)


PARTITIONS = 8


def test_partitions_that_are_opened_meanwhile_do_not_keep_a_batch_from_committing():
    async def act(stage):
        owner = reached(await owner_of(stage))
        batches = await another_process(stage)
        rest = range(1, PARTITIONS)
        writers = {n: LiveWriter(owner.commits, n, RollLimits(), owner.stored) for n in rest}
        writers[0] = owner.writer
        stage.owners.brokers[owner.ownership.url].live_writer = lambda _, n: writers[n]
        turns = iter(range(10**6))

        async def opens_another():
            """A producer comes to a partition that nobody has open."""
            one = Sent(b"p")
            writers[next(turns) % PARTITIONS].append(one)
            await one.over.wait()

        multi, batches_own = batches.client.store.multi, paths.topic_head(stage.topic.id)
        raced = []

        async def interrupted(operations):
            if any(one.path == batches_own for one in operations) and len(raced) < 3 * PARTITIONS:
                with suppress(TimeoutError):
                    async with asyncio.timeout(0.2):  # one that is held is not stored now
                        await opens_another()
                raced.append(1)
            return await multi(operations)

        batches.client.store.multi = interrupted
        intent = await batches.intent()
        rows = [b"%d" % i for i in range(200)]  # some to every partition
        await batches.commit(intent, 1, await batches.written(intent, rows))
        assert len(stage.owners.asked) <= PARTITIONS
        assert sorted(lives for some in stage.owners.asked for lives in some) == sorted(
            {lives for some in stage.owners.asked for lives in some}
        )
        await asyncio.gather(*(writer.close() for writer in writers.values()))

    play(act, partitions=PARTITIONS)


def test_who_asks_for_a_ledger_that_was_left_does_not_stop_the_next_one():
    async def act(stage):
        owner = reached(await owner_of(stage, limits=RollLimits(entries=2)))
        await owner.all_stored(owner.send([b"a"]))
        old = await live_segment(owner)
        asked = (stage.topic.id, 0, old.ledger_id, old.opened)
        commit, answers = owner.commits.commit, []

        async def asked_meanwhile(*args):
            owner.commits.commit = commit
            request = hand_over.encode_request([asked], 2.0)
            answer, let_go = await stage.owners.ask(owner.ownership.url, request)
            answers.extend(hand_over.decode_response(answer))
            let_go()
            await commit(*args)

        owner.commits.commit = asked_meanwhile
        await owner.all_stored(owner.send([b"b"]))
        await asyncio.sleep(0.1)
        began_s = now_s()
        await owner.all_stored(owner.send([b"c"]))
        took_s = now_s() - began_s
        assert answers == []
        assert (await live_segment(owner)).ledger_id != old.ledger_id
        assert took_s < 0.5
        await owner.writer.close()

    play(act)


class NeverStops:
    """A partition's writer that is asked, and is not done with what is under way."""

    def hand_over(self, ledger_id, opened, until_s):
        hold = SegmentHold(ledger_id, opened, until_s)
        hold.join()
        return hold


def test_one_segment_that_is_slow_does_not_have_the_others_of_its_owner_fenced():
    async def act(stage):
        owner = reached(await owner_of(stage))
        slow = LiveWriter(owner.commits, 1, RollLimits(), owner.stored)
        for writer in (owner.writer, slow):
            sent = Sent(b"p")
            writer.append(sent)
            await owner.all_stored([sent])
        ledger, writers = await live(owner), [owner.writer, NeverStops()]
        stage.owners.brokers[owner.ownership.url].live_writer = lambda _, n: writers[n]
        batches = await another_process(stage)
        intent, began_s = await batches.intent(), now_s()
        rows = [b"%d" % i for i in range(50)]  # some to every partition
        await batches.commit(intent, 1, await batches.written(intent, rows))
        assert now_s() - began_s < 1.5
        await owner.all_stored(owner.send([b"q"]))
        assert await live(owner) == ledger
        await asyncio.gather(owner.writer.close(), slow.close())

    play(act, partitions=2)


def test_who_was_deposed_while_it_opened_a_ledger_opens_none_after_its_successor_has_looked():
    async def act(stage):
        old = await deduplicating(Owner(stage, stage.client, "a"))
        new = await another_of(stage)
        before_the_commit(stage, new.take)
        (late,) = old.send([b"late"])
        await late.over.wait()
        assert [type(error) for error in late.errors] == [Deposed]
        assert (await new.commits.state()).partitions[0].live is None
        assert await sent_by(new, 0) == [False]
        await new.writer.close()

    play(act)
