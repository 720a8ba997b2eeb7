"""`python -m bookie_server --rebuild-index`: what is made anew, and whose states count."""

import asyncio

import pytest

from bookie_server.__main__ import BAD_CONFIG, parse_arguments
from bookie_server.api.settings import load, parse_overrides
from bookie_server.config import BookieConfig
from bookie_server.disk.identity import Identity
from bookie_server.disk.interface import DiskFull
from bookie_server.journal import checkpoint
from bookie_server.journal.checkpoint import JournalMark
from bookie_server.journal.format import Position
from bookie_server.logs import rocks_index
from bookie_server.logs.entry_log import EntryLogs
from bookie_server.logs.index import EVERY_LEDGER, LedgerState
from bookie_server.start.opening import BookieDirectories
from tests.unit.bookie_server.log_store import SMALL_LOGS, text

BOOKIE_ID, CLUSTER_ID = (
    "6d1b6c7e-0000-4000-8000-000000000001",
    "6d1b6c7e-0000-4000-8000-000000000002",
)
STATES = [LedgerState(EVERY_LEDGER), LedgerState(1, fenced=True, revision=2)]


def on_disk(tmp_path):
    names = ("journal", "one", "two")
    for name in names:
        (tmp_path / name).mkdir(exist_ok=True)
    journal, one, two = (tmp_path / name for name in names)
    settings = [f"journal_directory={journal}", f"ledger_directories={one},{two}"]
    config = load(BookieConfig, None, parse_overrides(settings))
    return BookieDirectories(config), config


async def prepare(disks, offsets):
    """Entries of ledger 1 in both directories, whose checkpoints are at these offsets."""
    await disks.format(Identity(BOOKIE_ID, CLUSTER_ID))
    for directory, offset in zip((await disks.open()).ledgers, offsets, strict=True):
        logs = await EntryLogs.open(directory.disk, SMALL_LOGS)
        await directory.index.put(await logs.write((1, e, text(1, e)) for e in range(10)))
        await directory.index.put_ledgers(STATES)
        await directory.index.sync()
        await directory.index.close()
        await logs.close()
        await checkpoint.write(directory.disk, {"j": JournalMark(Position(1, offset))})


@pytest.mark.parametrize(("offsets", "limbo"), [((4096, 4096), ""), ((8192, 4096), "lost")])
def test_states_come_from_a_directory_that_was_there_to_the_last(tmp_path, offsets, limbo):
    """One that was left out for a while may not know of a fence: then nothing is known."""

    async def main():
        disks, config = on_disk(tmp_path)
        await prepare(disks, offsets)
        (tmp_path / "one" / "index" / "CURRENT").write_bytes(b"rot")
        await disks.rebuild_indexes(config)
        directories = await disks.open()
        states = {s.ledger_id: s for s in await directories.ledgers[0].index.ledgers()}
        assert states[1].fenced
        assert (states[EVERY_LEDGER].limbo, states[1].limbo) == (limbo, limbo)
        for directory in directories.ledgers:
            assert len(await directory.index.range(1, 0, 100, 1 << 40)) == 10
            await directory.index.close()

    asyncio.run(main())


async def close(*directories):
    for directory in directories:
        await directory.index.close()


def no_space_in(monkeypatch, *folders):
    """RocksDB can open nothing in these folders, as on a disk without a free byte."""
    opened = rocks_index.Rdict

    def refuse(path, options):
        if path in map(str, folders):
            raise Exception("IO error: No space left on device: While appending to file")
        return opened(path, options)

    monkeypatch.setattr(rocks_index, "Rdict", refuse)


def test_an_index_that_lacks_space_is_not_taken_for_a_lost_one(tmp_path, monkeypatch):
    async def main():
        disks, config = on_disk(tmp_path)
        await prepare(disks, (4096, 4096))
        no_space_in(monkeypatch, tmp_path / "one" / "index")
        for asked in (disks.open, disks.broken_indexes, lambda: disks.rebuild_indexes(config)):
            with pytest.raises(DiskFull, match=f"open the entry index in {tmp_path}/one.* free"):
                await asked()
        monkeypatch.undo()
        await close(*(await disks.open()).ledgers)

    asyncio.run(main())


def test_a_rebuild_that_lacks_space_leaves_the_directory_as_it_was(tmp_path, monkeypatch):
    async def main():
        disks, config = on_disk(tmp_path)
        await prepare(disks, (4096, 4096))
        no_space_in(monkeypatch, tmp_path / "one" / "index.new")
        with pytest.raises(DiskFull, match="is unchanged"):
            await disks.rebuild_indexes(config)
        monkeypatch.undo()
        first, second = (await disks.open()).ledgers
        assert len(await first.index.range(1, 0, 9, 1 << 20)) == 10
        await close(first, second)

    asyncio.run(main())


def test_force_without_rebuild_index_is_refused(capsys):
    """Who gives it wants all indexes made anew, and would get a bookie that starts."""
    assert parse_arguments(["--rebuild-index", "--force"]).force
    with pytest.raises(SystemExit) as end:
        parse_arguments(["--force"])
    assert end.value.code == BAD_CONFIG
    assert "--rebuild-index" in capsys.readouterr().err
