"""Committers, checkpointers and readers at once, on a store that lags and loses answers.

A watcher sees every write the store applied and judges it: a checkpoint only goes forward, what is
trimmed is what the checkpoint before has, and each reader's state is the fold of all commits ever.
"""

import asyncio
import random

import pytest

from spark_ledger import errors
from spark_ledger.metadata import paths
from spark_ledger.metadata.store import StoreError
from spark_ledger.topic.log import checkpoint, records, state
from spark_ledger.topic.log.actions import Append
from spark_ledger.topic.log.segments import INLINE, Segment
from tests.kit.segments_seen import segments_of
from tests.unit.spark_ledger.topic.stage import play

PASSING = (errors.LedgerError, StoreError)


class Watcher:
    """Judges the store's writes, one by one, and folds the commits it sees."""

    def __init__(self, world, topic):
        self.store = world.store
        self.topic_id = topic.id
        self.whole = state.empty(topic.id, 1)
        self.record = None
        self.trimmed = 0
        self.problems = []
        self.published = 0
        world.store.listeners.append(self.applied)

    def applied(self, commit):
        try:
            self.judge(commit.changes)
        except AssertionError as problem:
            self.problems.append(problem)

    def judge(self, changes):
        log = paths.topic_log(self.topic_id) + "/"
        gone = []
        for change in changes:
            if change.path == paths.topic_checkpoint(self.topic_id):
                self.judge_record(checkpoint.decode_record(change.after.value))
            elif change.path.startswith(log) and change.after is None:
                gone.append(int(change.path[len(log) :]))
            elif change.path.startswith(log):
                commit = records.decode_commit(change.after.value)
                number = int(change.path[len(log) :])
                self.whole = state.apply(self.whole, number, commit, change.after.created_ms)
        if gone:
            assert gone == list(range(gone[0], gone[-1] + 1)), f"with a hole: {gone}"
            assert gone[0] == self.trimmed, f"from {gone[0]}, not {self.trimmed} on"
            self.trimmed = gone[-1] + 1
            assert self.record.trimmed == self.trimmed <= self.record.previous < self.whole.next

    def judge_record(self, new):
        old, self.record = self.record, new
        assert new.next <= self.whole.next
        if old is None:
            assert (new.previous, new.trimmed) == (0, 0)
        elif new.next == old.next:
            assert new.trimmed > old.trimmed
            assert (new.root, new.previous) == (old.root, old.previous)
        else:
            assert new.next > old.next == new.previous
            assert new.trimmed == old.trimmed
        self.published += old is None or new.next > old.next


def contents(topic):
    """(base, rows, commit, time) of each segment."""
    found = [
        (one.base, one.segment.rows, one.commit, one.commit_ms)
        for held in topic.partitions
        for one in segments_of(held)
    ]
    return topic.next, topic.end_offsets(), topic.commit_ms, found


def inline(rng):
    rows = rng.randrange(1, 9)
    return Segment(0, INLINE, 0, ((0, 0),), (rows,), rows, 9, 1, 2, inline=(b"x",))


async def committing(stage, client, intent, rng, until):
    while asyncio.get_running_loop().time() < until:
        try:
            await client.commit_actions(stage.topic.id, [Append((inline(rng),))], intent)
        except PASSING:
            await asyncio.sleep(0.1)
        await asyncio.sleep(rng.uniform(0, 0.3))


async def checkpointing(stage, client, intent, rng, until):
    while asyncio.get_running_loop().time() < until:
        await asyncio.sleep(rng.uniform(0, 3))
        try:
            await client.checkpoints.make(stage.topic.id, intent.id)
        except PASSING:
            continue


async def reading(stage, client, watcher, rng, until):
    last = 0
    while asyncio.get_running_loop().time() < until:
        await asyncio.sleep(rng.choice((0.1, 1, 12)))
        try:
            folded = await client.log(stage.topic.id).fold(fresh=rng.random() < 0.3)
        except PASSING as error:
            assert not isinstance(error, errors.UnsupportedFormat), error
            continue
        assert folded.next >= last, "a fold never goes back"
        last = folded.next
        whole = contents(watcher.whole)
        assert contents(folded)[3] == whole[3][: len(contents(folded)[3])]


@pytest.mark.parametrize(
    "seed", [0, 1, *(pytest.param(seed, marks=pytest.mark.slow) for seed in range(2, 6))]
)
def test_whatever_answers_are_lost_no_commit_is_and_no_checkpoint_goes_back(seed):
    async def act(stage):
        rng = random.Random(seed)
        watcher = Watcher(stage.world, stage.topic)
        intent = await stage.intent()
        faults = stage.world.store.faults
        faults.unknown, faults.lag_s = rng.choice((0.1, 0.3)), rng.choice((0.0, 0.5, 2.0))
        until = asyncio.get_running_loop().time() + 40
        others = [await stage.another() for _ in range(4)]
        work = [
            committing(stage, stage.client, intent, rng, until),
            committing(stage, others[0], intent, rng, until),
            *(checkpointing(stage, one, intent, rng, until) for one in (stage.client, *others[:2])),
            *(reading(stage, one, watcher, rng, until) for one in others[1:]),
        ]
        sessions = [one.store for one in (stage.client, *others)]
        disturbing = asyncio.create_task(disturb(sessions, rng))
        await asyncio.gather(*work)
        disturbing.cancel()
        stage.world.calm()
        assert not watcher.problems, watcher.problems[0]
        assert watcher.published >= 3 and watcher.trimmed > 0
        for reader in (*others, await stage.another()):
            folded = await reader.log(stage.topic.id).fold(fresh=True)
            assert contents(folded) == contents(watcher.whole)

    play(act, seed=seed)


async def disturb(sessions, rng):
    while True:
        await asyncio.sleep(rng.uniform(1, 6))
        rng.choice(sessions).suspend(rng.uniform(0.1, 8))
