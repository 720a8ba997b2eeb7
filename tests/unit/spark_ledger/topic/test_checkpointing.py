"""Checkpoints made, read and trimmed behind, on simulated bookies and a simulated store."""

import asyncio
from dataclasses import replace

import pytest

from spark_ledger import errors
from spark_ledger.metadata import paths
from spark_ledger.metadata.store import Create, Set
from spark_ledger.topic import checkpointer
from spark_ledger.topic.log import checkpoint, records
from spark_ledger.topic.log.actions import Append, Trim
from spark_ledger.topic.log.blobs import pack
from spark_ledger.topic.log.records import Commit, Head, SpilledBody
from tests.kit.segments_seen import segments_of
from tests.unit.spark_ledger.topic.checkpoints import commits
from tests.unit.spark_ledger.topic.stage import play, segment


def record_of(stage):
    node = stage.world.store.peek(paths.topic_checkpoint(stage.topic.id))
    return None if node is None else checkpoint.decode_record(node.value)


def logged(stage):
    """The numbers of the commits that are left in the log."""
    return [int(n) for n in stage.world.store.peek_children(paths.topic_log(stage.topic.id))]


async def folded(stage):
    """The topic as a new reader finds it."""
    return await (await stage.another()).log(stage.topic.id).fold(fresh=True)


def test_a_topic_is_the_same_from_its_checkpoint_and_the_commits_after_it():
    async def act(stage):
        intent = await stage.intent()
        await commits(stage, intent, 5)
        await stage.client.checkpoints.make(stage.topic.id, intent.id)
        await commits(stage, intent, 3)

        state = await folded(stage)

        assert state.next == 8 and state.end_offsets() == {0: 24}
        assert record_of(stage).next == 5
        assert logged(stage) == list(range(8))

    play(act)


def test_a_root_is_decoded_once_until_there_is_another(monkeypatch):
    decoded = []
    decode_root = checkpoint.decode_root

    def counted(value):
        decoded.append(value)
        return decode_root(value)

    async def act(stage):
        intent = await stage.intent()
        await commits(stage, intent, 2)
        await stage.client.checkpoints.make(stage.topic.id, intent.id)
        log = (await stage.another()).log(stage.topic.id)
        monkeypatch.setattr(checkpoint, "decode_root", counted)

        first, again = await log.newest_checkpoint(), await log.newest_checkpoint()
        looked = len(decoded)
        await commits(stage, intent, 2)
        await stage.client.checkpoints.make(stage.topic.id, intent.id)
        newer = await log.newest_checkpoint()

        assert first.root == again.root and first.root.state.next == 2
        assert newer.root.state.next == 4
        assert looked == 1

    play(act)


def test_what_was_in_commits_is_read_from_a_ledger_after_a_checkpoint():
    async def act(stage):
        intent = await stage.intent()
        await commits(stage, intent, 2)
        await stage.client.checkpoints.make(stage.topic.id, intent.id)

        state = await folded(stage)

        placed = segments_of(state.partitions[0])
        assert [one.segment.inline for one in placed] == [(), ()]
        assert [one.segment.entries for one in placed] == [((0, 1),), ((2, 3),)]
        assert [(one.base, one.commit) for one in placed] == [(0, 0), (3, 1)]
        reader = await stage.client.ledgers.open(placed[0].segment.ledger_id, recover=False)
        entries = [bytes(e.payload) async for _, e in reader.read(0, 3, known_confirmed=3)]
        assert entries == [b"p0", b"p1", b"p0", b"p1"]

    play(act)


def test_the_log_is_trimmed_up_to_the_checkpoint_before_the_last():
    async def act(stage):
        intent = await stage.intent()
        make = stage.client.checkpoints.make
        await commits(stage, intent, 3)
        first = await make(stage.topic.id, intent.id)
        await commits(stage, intent, 4)
        second = await make(stage.topic.id, intent.id)
        await commits(stage, intent, 1)
        third = await make(stage.topic.id, intent.id)
        again = await make(stage.topic.id, intent.id)

        assert [(r.next, r.previous, r.trimmed) for r in (first, second, third)] == [
            (3, 0, 0),
            (7, 3, 3),
            (8, 7, 7),
        ]
        assert again == third
        assert logged(stage) == [7]
        assert (await folded(stage)).end_offsets() == {0: 24}

    play(act)


def test_a_checkpoint_is_made_in_the_background_every_sixty_four_commits():
    async def act(stage):
        intent = await stage.intent()
        await commits(stage, intent, 63)
        assert record_of(stage) is None
        await commits(stage, intent, 1)
        await stage.client.checkpoints.idle()
        assert record_of(stage).next == 64
        await commits(stage, intent, 64 * 3)
        await stage.client.checkpoints.idle()
        assert record_of(stage).next >= 64 * 3
        assert len(logged(stage)) < 64 * 3

    play(act)


def test_the_moment_after_a_commit_belongs_to_those_who_wait_for_it_and_not_to_a_checkpoint():
    async def act(stage):
        checkpoints, loop = stage.client.checkpoints, asyncio.get_running_loop()
        make, began = checkpoints.make, []

        async def noted(*arguments, **options):
            began.append(loop.time())
            return await make(*arguments, **options)

        checkpoints.make = noted
        await commits(stage, await stage.intent(), 64)
        committed = loop.time()
        await checkpoints.idle()
        assert began == [pytest.approx(committed + checkpointer.PAUSE_S)]
        assert record_of(stage).next == 64

    play(act)


def test_a_thousand_small_commits_leave_a_short_log_and_a_small_state():
    async def act(stage):
        intent = await stage.intent()
        for _ in range(5):
            await commits(stage, intent, 200, partition=1)
            await stage.client.checkpoints.idle()
            await folded_in(stage.client, stage)
            assert len(logged(stage)) <= 3 * 64
            assert intervals(stage.client.log(stage.topic.id).last_state) <= 2 * 64

        state = await folded(stage)
        assert state.end_offsets() == {0: 0, 1: 3000}
        assert intervals(state) <= 2 * 64
        ledgers = [c.path for c in changes(stage) if c.path.startswith(f"{paths.LEDGERS}/")]
        assert len(set(ledgers)) < 10

    play(act, partitions=2)


async def folded_in(client, stage):
    return await client.log(stage.topic.id).fold(fresh=True)


def intervals(state):
    return sum(len(held.intervals) for held in state.partitions)


def changes(stage):
    return [change for commit in stage.world.store.log for change in commit.changes]


def test_a_reader_that_slept_through_checkpoints_and_their_trimming_catches_up():
    async def act(stage):
        intent = await stage.intent()
        await commits(stage, intent, 2)
        sleeper = await stage.another()
        before = await folded_in(sleeper, stage)
        for _ in range(3):
            await commits(stage, intent, 5)
            await stage.client.checkpoints.make(stage.topic.id, intent.id)
        assert min(logged(stage)) > before.next

        after = await folded_in(sleeper, stage)

        assert before.next == 2 and after.next == 17
        assert after.end_offsets() == {0: 51}
        assert after.head_version == (await folded(stage)).head_version

    play(act)


def test_a_checkpoint_that_was_overtaken_while_it_was_made_changes_nothing():
    async def act(stage):
        intent = await stage.intent()
        slow, fast = stage.client, await stage.another()
        await commits(stage, intent, 3)
        published, go_on = slow.store.multi, asyncio.Event()

        async def waits(operations):
            if any(o.path == paths.topic_checkpoint(stage.topic.id) for o in operations):
                await go_on.wait()
            await published(operations)

        slow.store.multi = waits
        task = asyncio.create_task(slow.checkpoints.make(stage.topic.id, intent.id))
        await asyncio.sleep(5)
        await commits(stage, intent, 4, client=fast)
        await fast.checkpoints.make(stage.topic.id, intent.id)
        await commits(stage, intent, 1, client=fast)
        newest = await fast.checkpoints.make(stage.topic.id, intent.id)
        go_on.set()

        assert await task == newest == record_of(stage)
        assert (newest.next, newest.trimmed) == (8, 7)
        assert (await folded_in(slow, stage)).end_offsets() == {0: 24}

    play(act)


def test_a_checkpoint_that_cannot_have_every_copy_is_not_published_and_no_commit_goes():
    async def act(stage):
        intent = await stage.intent()
        await commits(stage, intent, 3)
        stage.world.nodes[0].kill()
        stage.world.nodes[1].kill()
        with pytest.raises((errors.NotEnoughBookies, errors.Unavailable)):
            await stage.client.checkpoints.make(stage.topic.id, intent.id)

        assert record_of(stage) is None and logged(stage) == [0, 1, 2]

    play(act)


def test_a_log_with_as_many_commits_as_it_may_have_is_checkpointed_before_the_next():
    async def act(stage):
        intent = await stage.intent()
        vars(stage.client)["checkpoints"] = checkpointer.Checkpointer(
            *(stage.client.ledgers, stage.client.intents, stage.client.blobs),
            *(stage.client.chunks, stage.client.log),
            commits_apart=10**9,
            log_nodes_max=150,
        )
        longest = 0
        for _ in range(300):
            await commits(stage, intent, 1)
            longest = max(longest, len(logged(stage)))

        assert 50 <= longest <= 150
        assert (await folded(stage)).end_offsets() == {0: 900}

    play(act)


def test_under_an_intent_that_ended_a_checkpoint_is_made_under_one_of_its_own():
    async def act(stage):
        intent = await stage.intent()
        await commits(stage, intent, 3)
        await stage.client.intents.condemn(intent.id, "stale")

        record = await stage.client.checkpoints.make(stage.topic.id, intent.id)

        assert record.next == 3 and record.intent != intent.id
        assert not (await stage.client.intents.get(record.intent)).is_open

    play(act)


@pytest.fixture
def small(monkeypatch):
    """Whatever may be in a ledger is in one."""
    monkeypatch.setattr(checkpoint, "TAIL_BYTES_MAX", 0)
    monkeypatch.setattr(checkpointer, "ROOT_INLINE_BYTES_MAX", 0)


def test_a_large_topic_has_chunks_and_its_root_in_ledgers(small):
    async def act(stage):
        intent = await stage.intent()
        made, states = [], []
        for _ in range(4):
            await commits(stage, intent, 5)
            made.append(await stage.client.checkpoints.make(stage.topic.id, intent.id))
            states.append(await folded(stage))

        assert [len(one.chunks()) for one in states] == [1, 2, 3, 4]
        assert [one.previous_root for one in made] == [None, *(one.root for one in made[:3])]
        reader = await stage.another()
        read = await reader.tables(states[-1], {0: (0, 60)})
        assert len(segments_of(states[-1].partitions[0], 0, 60, read)) == 20
        with pytest.raises(KeyError):
            segments_of(states[-1].partitions[0], 0, 60)

    play(act)


def test_a_plan_on_a_state_whose_chunks_are_gone_is_made_on_the_newest_checkpoint(small):
    async def act(stage):
        intent = await stage.intent()
        await commits(stage, intent, 5)
        await stage.client.checkpoints.make(stage.topic.id, intent.id)
        reader = await stage.another()
        before = await folded_in(reader, stage)
        (old,) = before.chunks()
        await stage.client.cache.close()
        trim = Trim(((0, 12),))
        await stage.client.commit_actions(stage.topic.id, [trim], intent)
        await stage.client.checkpoints.make(stage.topic.id, intent.id)
        (chunk,) = (await folded(stage)).chunks()
        assert chunk != old
        await stage.client.ledgers.delete(old.pointer.ledger_id)

        state, read = await reader.state_with_tables(before, {0: (13, 15)})

        assert list(read) == [chunk] and state.start_offsets() == {0: 12}

    play(act)


def test_a_root_that_lost_the_race_is_not_folded_on_by_who_made_it(small):
    async def act(stage):
        intent = await stage.intent()
        slow, fast = stage.client, await stage.another()
        await commits(stage, intent, 5)

        async def beside_another():
            await fast.checkpoints.make(stage.topic.id, intent.id)

        before_the_first_publishing(slow.store, stage, beside_another)
        await slow.checkpoints.make(stage.topic.id, intent.id)
        await commits(stage, intent, 1, client=fast)
        (published,) = (await folded(stage)).chunks()
        assert set((await folded_in(slow, stage)).chunks()) <= {published}

    play(act)


def before_the_first_publishing(store, stage, act):
    """Let `act` happen when the store's next multi that publishes a checkpoint is to be sent."""
    multi = store.multi

    async def interrupted(operations):
        if any(o.path == paths.topic_checkpoint(stage.topic.id) for o in operations):
            store.multi = multi
            await act()
        return await multi(operations)

    store.multi = interrupted


def test_ledgers_of_roots_that_two_later_ones_followed_are_dropped(monkeypatch):
    monkeypatch.setattr(checkpointer, "ROOT_INLINE_BYTES_MAX", 0)

    async def act(stage):
        intent = await stage.intent()
        made, dropped = [], []
        for _ in range(4):
            await commits(stage, intent, 5)
            await stage.client.cache.close()  # so that each checkpoint has a ledger of its own
            made.append(await stage.client.checkpoints.make(stage.topic.id, intent.id))
            dropped.append(sorted((await folded(stage)).dropped))

        roots = [one.root.ledger_id for one in made]
        assert len(set(roots)) == 4
        assert dropped == [[], [], roots[:1], roots[:2]]

    play(act)


def test_a_root_that_cannot_be_read_is_not_the_end_while_the_one_before_can(small):
    async def act(stage):
        intent = await stage.intent()
        for _ in range(2):
            await commits(stage, intent, 5)
            record = await stage.client.checkpoints.make(stage.topic.id, intent.id)
        damaged = replace(record, root=replace(record.root, crc=record.root.crc ^ 1))
        path = paths.topic_checkpoint(stage.topic.id)
        node = stage.world.store.peek(path)
        await stage.client.store.set(path, checkpoint.encode_record(damaged), node.version)

        assert (await folded(stage)).end_offsets() == {0: 30}

    play(act)


def test_commits_that_are_in_ledgers_are_folded_as_those_in_the_log():
    async def act(stage):
        intent = await stage.intent()
        await commits(stage, intent, 2)
        log = stage.client.log(stage.topic.id)
        for number in range(2, 8):
            some = tuple(segment(900 + number, 3, 4) for _ in range(3))
            commit = Commit(f"c{number}", "a", "t", 0, "r", intent.id, (Append(some),))
            state = await log.fold()
            async with stage.client.blobs.writer(
                intent, stage.topic.id, stage.topic.policies
            ) as held:
                body = await held.write(pack(records.encode_commit(commit)))
            spilled = records.encode_spilled(SpilledBody(commit.commit_id, body))
            head = paths.topic_head(stage.topic.id)
            await stage.client.store.multi(
                [
                    Set(head, records.encode_head(Head(number + 1)), state.head_version),
                    Create(paths.topic_log(stage.topic.id, number), spilled),
                ]
            )
        state = await folded(stage)
        assert state.end_offsets() == {0: 6 + 6 * 21}
        assert state.bodies == {body.ledger_id: 7}
        await stage.client.checkpoints.make(stage.topic.id, intent.id)
        await commits(stage, intent, 1)
        await stage.client.checkpoints.make(stage.topic.id, intent.id)
        state = await folded(stage)
        assert state.bodies == {} and body.ledger_id in state.dropped

    play(act)


def test_a_new_root_and_an_old_head_do_not_take_a_fold_back():
    async def act(stage):
        intent = await stage.intent()
        reader = await stage.another()
        log = reader.log(stage.topic.id)
        await commits(stage, intent, 3)
        root = await log.fold(fresh=True)
        head = paths.topic_head(stage.topic.id)
        old = await reader.store.get(head)
        await commits(stage, intent, 4)
        known = await log.fold(fresh=True)
        get = reader.store.get

        async def behind(path, watch=None):
            return old if path == head else await get(path, watch)

        reader.store.get = behind
        log.start_next_fold_at(root)
        folded_again = await log.fold()

        assert log.checkpoint_end == 3
        assert folded_again.next == known.next == 7
        assert folded_again.head_version == known.head_version > old.version

    play(act)


def test_a_commit_that_is_missing_for_good_is_an_error_and_not_the_end():
    async def act(stage):
        intent = await stage.intent()
        await commits(stage, intent, 3)
        await stage.client.checkpoints.make(stage.topic.id, intent.id)
        await commits(stage, intent, 3)
        await stage.client.store.delete(paths.topic_log(stage.topic.id, 4))

        with pytest.raises(errors.UnsupportedFormat, match="commit 4 is missing below its head"):
            await folded(stage)

    play(act)


def test_a_checkpoint_of_a_deleted_topic_is_not_made():
    async def act(stage):
        intent = await stage.intent()
        await commits(stage, intent, 3)
        await stage.client.topics.delete("t")

        assert await stage.client.checkpoints.make(stage.topic.id, intent.id) is None
        assert record_of(stage) is None

    play(act)


def test_closing_gives_up_a_checkpoint_that_is_being_made():
    async def act(stage):
        intent = await stage.intent()
        await commits(stage, intent, 3)
        stage.world.store.stall(60)
        stage.client.checkpoints.after_commit(stage.topic.id, 500, intent.id)
        await asyncio.sleep(1)

        async with asyncio.timeout(10):
            await stage.client.checkpoints.close()

        await asyncio.sleep(600)
        assert record_of(stage) is None

    play(act)
