"""Entries that a bookie on this host has in its files, through the client, real files and threads.

Whatever is wrong with a file costs one more question: the bookie is asked for the bytes.
"""

import asyncio
import os
import subprocess
import sys
import threading
import time
from types import SimpleNamespace

import pytest

from bookie_server.api import messages as m
from spark_ledger.bookies import local_reads
from spark_ledger.bookies.local_reads import RETRY_S
from spark_ledger.config import ClientConfig
from spark_ledger.errors import ClientClosed
from spark_ledger.ledger.quorum import Quorum
from spark_ledger.ledger.range_fetch import RangeFetch, ReadChunk
from tests.kit.forward import forward
from tests.kit.processes import eventually
from tests.unit.spark_ledger.bookies.local_files import (
    BOOKIE,
    COUNT,
    FILE,
    HARMS,
    LEDGER,
    LIES,
    Bookie,
    Rig,
    a_folder_instead,
    cut,
    damage,
    gone,
    lies,
    on_this_host,
    said,
)

EXIT_S = 60
LOCAL_READ_S = 30.0
"""In place of the product's: no machine takes so long for a read."""


@pytest.fixture(autouse=True)
def patient(monkeypatch):
    monkeypatch.setattr(local_reads, "LOCAL_READ_S", LOCAL_READ_S)


def open_files() -> list[str]:
    """What the process has open now that lies in files."""
    found = []
    for number in os.listdir("/proc/self/fd"):
        try:
            found.append(os.readlink(f"/proc/self/fd/{number}"))
        except FileNotFoundError:
            continue  # the one that lists them
    return sorted(each for each in found if each.startswith("/"))


# -- what is read -----------------------------------------------------------------------------


def test_an_answer_out_of_the_files_is_the_one_that_the_bookie_would_send(tmp_path):
    async def test(rig: Rig) -> None:
        local, wire = await rig.read(), await rig.read(local=False)
        assert rig.bookie.asked == [True, False]
        assert said(local) == said(wire)
        assert [r.checked is not None for r in local.results] == [
            number in rig.bookie.locations for number in range(COUNT)
        ]
        apart = {"further": [(2, 2), (4, 5)]}
        assert said(await rig.read(0, 0, **apart)) == said(
            await rig.read(0, 0, local=False, **apart)
        )
        assert rig.bookie.asked == [True, False, True, False]

    on_this_host(test, tmp_path)


def test_neighbours_are_one_read_of_their_file(tmp_path, monkeypatch):
    reads = []
    pread = os.pread

    def counted(file: int, length: int, position: int) -> bytes:
        reads.append((position, length))
        return pread(file, length, position)

    async def test(rig: Rig) -> None:
        await rig.read(1, 1)  # the directory is known then
        monkeypatch.setattr(local_reads.os, "pread", counted)
        await rig.read()
        first, last = rig.bookie.locations[1], rig.bookie.locations[COUNT - 1]
        length = last.position + last.entry_bytes - first.position
        assert reads == [(first.position, length)]

    on_this_host(test, tmp_path)


def test_no_file_is_open_between_reads_whatever_came_of_them(tmp_path):
    async def test(rig: Rig) -> None:
        before = open_files()
        assert await rig.asked() == [True]
        assert open_files() == before
        for harm in (damage, cut, a_folder_instead, gone):
            harm(rig.bookie)
            forward(RETRY_S)
            assert await rig.asked() == [True, False]
            assert open_files() == before

    on_this_host(test, tmp_path)


# -- what is wrong with files -----------------------------------------------------------------


def repaired(bookie: Bookie) -> None:
    kept = bookie.folder.with_suffix(".kept")
    if kept.exists():
        kept.rename(bookie.folder)
    for path in (bookie.file, bookie.folder / m.IDENTITY_FILE):
        if path.is_dir():
            path.rmdir()
        else:
            path.unlink(missing_ok=True)
    bookie.locations.clear()
    bookie.write()


@pytest.mark.parametrize(
    "harm", [*HARMS, *(lies(**wrong) for wrong in LIES)],
    ids=[*(harm.__name__ for harm in HARMS), *map(str, LIES)],
)  # fmt: skip
def test_where_the_files_are_wrong_the_bookie_is_asked_and_they_are_left_alone_for_a_while(
    tmp_path, harm
):
    async def test(rig: Rig) -> None:
        harm(rig.bookie)
        began = time.monotonic()
        assert await rig.asked() == [True, False]
        assert time.monotonic() - began < LOCAL_READ_S, "nothing hangs"
        assert await rig.asked() == [False], "for now"
        forward(RETRY_S)
        assert await rig.asked() == [True, False], "it is tried again, once"
        assert await rig.asked() == [False]
        repaired(rig.bookie)
        forward(RETRY_S)
        assert await rig.asked() == [True]
        assert await rig.asked() == [True]

    (tmp_path / "disk").mkdir()
    on_this_host(test, tmp_path / "disk")


def test_files_that_went_wrong_after_a_directory_was_known_are_asked_of_the_bookie(tmp_path):
    async def test(rig: Rig) -> None:
        assert await rig.asked() == [True]
        damage(rig.bookie)
        assert await rig.asked() == [True, False]

    on_this_host(test, tmp_path)


# -- who never reads files --------------------------------------------------------------------


@pytest.mark.parametrize("local", [True, False])
def test_a_reader_asks_for_locations_only_if_its_setting_says_so(tmp_path, local):
    async def test(rig: Rig) -> None:
        cluster = SimpleNamespace(bookies=rig.client, config=ClientConfig(local_reads=local))
        view = SimpleNamespace(cluster=cluster, quorum=Quorum(1, 1, 1), ledger_id=LEDGER, token=b"")
        view.note_lac = lambda lac: None
        fetch = RangeFetch(view)
        chunk = ReadChunk(range(2), (BOOKIE,), 0, 1 << 20)
        await fetch.fill(chunk)
        assert sorted(chunk.entries) == [0, 1]
        assert rig.bookie.asked == [local]

    on_this_host(test, tmp_path)


def test_who_fences_or_has_no_map_never_asks_for_locations(tmp_path):
    async def test(rig: Rig) -> None:
        await rig.read(fence=True)
        await rig.client.read(BOOKIE, LEDGER, 0, 5, max_bytes=1 << 20)
        assert rig.bookie.asked == [False, False]

    on_this_host(test, tmp_path)


def test_a_bookie_elsewhere_is_never_asked_for_locations(tmp_path):
    async def test(rig: Rig) -> None:
        rig.bookie.is_here = lambda address: False
        await rig.read()
        assert rig.bookie.asked == [False]

    on_this_host(test, tmp_path)


# -- a disk that hangs ------------------------------------------------------------------------


@pytest.fixture
def hung(monkeypatch):
    """Reads of files hang until the test is over; set when one has begun."""
    begun, over = threading.Event(), threading.Event()

    def hangs(*_: int) -> bytes:
        begun.set()
        over.wait(60)
        raise OSError("too late")

    monkeypatch.setattr(local_reads.os, "pread", hangs)
    yield begun
    over.set()


async def awaited(task: "asyncio.Task[list[bool]]") -> tuple[list[bool], float, int]:
    """Its result after time was put forward step by step, the time that it took, and the steps:
    they are turns of the event loop."""
    now, steps = asyncio.get_running_loop().time, 0
    began = now()
    while not task.done():
        forward(LOCAL_READ_S / 1000)
        steps += 1
        await asyncio.sleep(0)
    return await task, now() - began, steps


def test_a_disk_that_hangs_holds_a_reader_up_for_a_moment_and_the_event_loop_not_at_all(
    tmp_path, hung, monkeypatch
):
    monkeypatch.setattr(local_reads, "THREADS", 2)

    async def test(rig: Rig) -> None:
        for _ in range(local_reads.THREADS + 2):  # more than there are threads
            asked, took_s, turns = await awaited(asyncio.create_task(rig.asked()))
            assert asked == [True, False]
            assert LOCAL_READ_S <= took_s < 3 * LOCAL_READ_S
            assert turns > 500
            asked, took_s, _ = await awaited(asyncio.create_task(rig.asked()))
            assert asked == [False]
            assert took_s < LOCAL_READ_S
            forward(RETRY_S)

    on_this_host(test, tmp_path)


def test_closing_a_client_ends_its_reads_of_a_disk_that_hangs(tmp_path, hung):
    async def test(rig: Rig) -> None:
        reads = [asyncio.ensure_future(rig.read()) for _ in range(2 * local_reads.THREADS)]
        assert await asyncio.to_thread(hung.wait, 30)
        await rig.client.close()
        forward(LOCAL_READ_S)
        for ended in await asyncio.gather(*reads, return_exceptions=True):
            assert isinstance(ended, ClientClosed)
        with pytest.raises(ClientClosed):
            await rig.read()

    on_this_host(test, tmp_path)


def test_where_no_thread_can_be_made_the_bookie_is_asked(tmp_path, monkeypatch):
    def none_left(*_: object) -> None:
        raise RuntimeError("can't start new thread")

    async def test(rig: Rig) -> None:
        monkeypatch.setattr(threading.Thread, "start", none_left)
        assert await rig.asked() == [True, False]

    on_this_host(test, tmp_path)


def test_files_that_were_closed_are_read_no_more_and_keep_no_thread(tmp_path):
    before = set(threading.enumerate())  # of other tests, some of which are about to end

    def threads() -> int:
        new = set(threading.enumerate()) - before
        return sum(one.name.startswith("local-reads") for one in new)

    async def test(rig: Rig) -> None:
        files = local_reads.HostFiles()
        there = m.EntryLocation(str(rig.bookie.folder), FILE, 0, 2)
        for _ in range(2 * local_reads.THREADS):
            assert await files.read([there], lambda found: bytes(found[0])) == b"\0\0"
        assert threads() == local_reads.THREADS
        files.close()
        assert await asyncio.to_thread(eventually, lambda: threads() == 0)
        with pytest.raises(OSError, match="closed"):
            await files.read([there], len)

    on_this_host(test, tmp_path)


HANGS_AT_EXIT = """
import asyncio, os, threading
from bookie_server.api.messages import EntryLocation
from spark_ledger.bookies.local_reads import HostFiles

os.pread = lambda *_: threading.Event().wait()


async def read():
    async with asyncio.timeout(0.1):
        await HostFiles().read([EntryLocation("", __file__, 0, 1)], len)


try:
    asyncio.run(read())
except TimeoutError:
    print("ended", flush=True)
"""


def test_a_disk_that_hangs_holds_up_no_exit_of_the_process(tmp_path):
    script = tmp_path / "reads.py"
    script.write_text(HANGS_AT_EXIT)
    ended = subprocess.run([sys.executable, script], capture_output=True, timeout=EXIT_S)
    assert (ended.returncode, ended.stdout) == (0, b"ended\n"), ended.stderr
