"""A checkpoint that takes longer than the janitor waits: one of the two loses, and no row does."""

import asyncio
import random

import pytest

from spark_ledger import errors
from spark_ledger.metadata import paths
from spark_ledger.topic import checkpointer
from spark_ledger.topic.log import checkpoint
from spark_ledger.topic.log.blobs import BlobWriter
from spark_ledger.topic.upkeep import garbage
from spark_ledger.topic.upkeep.janitor import Janitor
from tests.unit.spark_ledger.topic.stage import play

AGES_S = 1.6 * 3600  # the ledger of a checkpoint is open for at most half of that again


@pytest.fixture(autouse=True)
def _chunks_and_roots_are_in_ledgers(monkeypatch):
    monkeypatch.setattr(checkpoint, "TAIL_BYTES_MAX", 0)
    monkeypatch.setattr(checkpointer, "ROOT_INLINE_BYTES_MAX", 0)


class Paused:
    """A checkpoint under a query's intent that stops just before it is published."""

    def __init__(self, stage, intent, monkeypatch, *, checked):
        self.go = asyncio.Event()
        self.reached = asyncio.Event()
        self._path = paths.topic_checkpoint(stage.topic.id)
        self._stage = stage
        if checked:
            monkeypatch.setattr(stage.client.store, "multi", self._late(stage.client.store.multi))
        else:
            monkeypatch.setattr(BlobWriter, "checks", self._late(BlobWriter.checks))
        making = stage.client.checkpoints.make(stage.topic.id, intent.id)
        self.making = asyncio.create_task(making)

    def _late(self, plain):
        async def late(one):
            if isinstance(one, BlobWriter) or any(op.path == self._path for op in one):
                self.reached.set()
                await self.go.wait()
            return await plain(one)

        return late

    async def ledger(self):
        """The one that it is about to name."""
        await self.reached.wait()
        return max([one async for one in self._stage.client.ledgers.list()])


async def committed(stage, intent, *versions):
    for version in versions:
        await stage.commit(intent, version, await stage.written(intent, [b"%d" % version]))
        await stage.client.cache.close()


async def janitor_of(stage):
    client = await stage.another()
    return Janitor(client.store, client.ledgers, random.Random(1), lease_s=10**6)


async def long_after(stage, intent, janitor):
    """All that the janitor waits for has passed: ages, an hour, two more versions."""
    await asyncio.sleep(AGES_S)
    await janitor.clean()
    await committed(stage, intent, 5, 6)
    await asyncio.sleep(garbage.UNPUBLISHED_MS / 1000)


@pytest.mark.parametrize("checked", [False, True])
def test_a_checkpoint_whose_ledger_was_deleted_is_not_published(checked, monkeypatch):
    async def act(stage):
        intent = await stage.intent()
        await committed(stage, intent, *range(5))
        paused = Paused(stage, intent, monkeypatch, checked=checked)
        unnamed = await paused.ledger()
        janitor = await janitor_of(stage)
        await long_after(stage, intent, janitor)

        report = await janitor.clean()
        paused.go.set()

        assert unnamed in report.deleted
        with pytest.raises(errors.NoSuchLedger):
            await paused.making
        assert stage.world.store.peek(paths.topic_checkpoint(stage.topic.id)) is None
        assert [value for _, value in await stage.rows()] == [b"%d" % n for n in range(7)]

    play(act)


@pytest.mark.parametrize("before", [pytest.param(0, marks=pytest.mark.slow), 1])
def test_a_ledger_that_a_checkpoint_named_after_the_janitor_had_judged_it_stays(
    before, monkeypatch
):
    async def act(stage):
        intent = await stage.intent()
        await committed(stage, intent, *range(4))
        for _ in range(before):
            await stage.client.checkpoints.make(stage.topic.id, intent.id)
            await stage.client.cache.close()
        await committed(stage, intent, 4)
        paused = Paused(stage, intent, monkeypatch, checked=False)
        unnamed = await paused.ledger()
        janitor = await janitor_of(stage)
        await long_after(stage, intent, janitor)
        plain = janitor._delete

        async def judged(*about):
            paused.go.set()
            await paused.making
            return await plain(*about)

        janitor._delete = judged
        report = await janitor.clean()

        assert unnamed not in report.deleted
        assert "checkpoint" in report.waiting[unnamed]
        reader = await stage.another()
        newest = await reader.log(stage.topic.id).newest_checkpoint()
        assert newest.record.next == newest.root.state.next == 5, "its root can be read"
        state = await reader.log(stage.topic.id).fold(fresh=True)
        assert await reader.tables(state, {0: (0, 5)})

    play(act)


def test_what_nothing_names_goes_though_checkpoints_are_made_all_the_time():
    async def act(stage):
        intent = await stage.intent()
        lost = await stage.written(intent, [b"lost"])
        await stage.client.cache.close()
        janitor = await janitor_of(stage)
        await janitor.clean()
        for version in range(3):
            await committed(stage, intent, version)
            await stage.client.checkpoints.make(stage.topic.id, intent.id)
            await asyncio.sleep(garbage.UNPUBLISHED_MS / 1000)

        assert lost.segments[0].ledger_id in (await janitor.clean()).deleted

    play(act)
