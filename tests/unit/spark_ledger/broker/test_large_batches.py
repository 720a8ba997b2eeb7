"""Batches that are larger than what the bookies, or this process, take as an entry."""

import asyncio

import pytest

from spark_ledger import errors
from tests.kit.settings import with_settings
from tests.unit.spark_ledger.broker.owners import Sent, owner_of
from tests.unit.spark_ledger.topic.stage import CALM, play


def small_entries(bytes_max):
    return with_settings(CALM, entry_bytes_max=bytes_max)


@pytest.mark.parametrize("size", [5_000, 9_000], ids=["for-bookies", "for-this-process"])
def test_a_batch_that_is_too_large_is_refused_and_what_is_beside_it_is_stored(size):
    async def act(stage):
        owner = await owner_of(stage)
        small, large, after, other = (
            Sent(b"a"),
            Sent(b"x" * size, first=1),
            Sent(b"b", first=2),
            Sent(b"c", producer="other"),
        )
        for run in (small, large, other, after):
            owner.writer.append(run)
        await asyncio.gather(*(run.over.wait() for run in (small, large, other, after)))

        assert [type(error) for error in large.errors] == [errors.MessageTooBig]
        assert (len(small.offsets), len(other.offsets)) == (1, 1)
        # its producer sends again what came after the refused batch
        assert after.offsets or isinstance(after.errors[0], errors.LedgerClosed)
        again = Sent(b"d", first=3)
        owner.writer.append(again)
        await owner.all_stored([again])
        await owner.writer.close()
        await owner.commits.close()
        values = [value for _, value in await stage.rows()]
        assert sorted(values) == sorted(
            value
            for value, run in ((b"a", small), (b"b", after), (b"c", other), (b"d", again))
            if run.offsets
        )
        assert (await owner.commits.state()).next < 12

    play(act, storage=small_entries(4096))


def test_small_batches_that_are_too_large_together_are_stored_in_more_entries():
    async def act(stage):
        owner = await owner_of(stage)
        sent = owner.send(*([b"%d" % number * 800] for number in range(40)))
        await owner.all_stored(sent)
        await owner.writer.close()
        await owner.commits.close()
        assert len(await stage.rows()) == 40

    play(act, storage=small_entries(4096))
