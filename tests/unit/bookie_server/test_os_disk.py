import asyncio
import errno
import os
import threading
import time

import pytest

from bookie_server.disk import os_disk
from bookie_server.disk.interface import DiskFailed, DiskFull, NoSuchFile
from bookie_server.disk.os_disk import OsDisk


def on_a_disk(tmp_path, test):
    async def main():
        disk = OsDisk(tmp_path / "disk", "journal")
        try:
            await test(disk)
        finally:
            disk.shut_down()

    asyncio.run(main())


def test_appends_follow_each_other_and_reads_end_at_the_end(tmp_path):
    async def test(disk):
        file = await disk.create("a", reserve_bytes=1 << 16)
        assert file.end == 0
        assert await file.append([b"ab", bytearray(b"cd"), memoryview(b"efg")[1:]]) == 0
        assert await file.append([b"hi"], sync=True) == 6
        assert await file.read(1, 4) == b"bcdf"
        assert os.stat(tmp_path / "disk/a").st_size == 1 << 16
        await file.close()
        again = await disk.open("a")
        assert again.end == 1 << 16
        assert await again.read(0, 10) == b"abcdfghi\0\0"
        assert await again.read((1 << 16) - 2, 10) == b"\0\0"

    on_a_disk(tmp_path, test)


def test_more_buffers_than_one_call_takes_are_all_written(tmp_path):
    async def test(disk):
        buffers = [b"%04d" % number for number in range(5000)]
        file = await disk.create("a")
        await file.append(buffers, sync=True)
        assert await file.read(0, 1 << 20) == b"".join(buffers)

    on_a_disk(tmp_path, test)


def test_a_write_that_the_kernel_cuts_short_is_continued(tmp_path, monkeypatch):
    whole = os.pwritev

    def short(fd, buffers, position):
        return whole(fd, [b"".join(buffers)[:7]], position)

    monkeypatch.setattr(os, "pwritev", short)

    async def test(disk):
        file = await disk.create("a")
        await file.append([b"abcdefghij", b"", b"klm", b"nopqrstuvwxyz"])
        assert await file.read(0, 100) == b"abcdefghijklmnopqrstuvwxyz"

    on_a_disk(tmp_path, test)


@pytest.mark.parametrize("call", ["pwritev", "fdatasync"])
def test_after_a_failed_write_or_sync_the_file_refuses_everything(tmp_path, monkeypatch, call):
    async def test(disk):
        file = await disk.create("a")

        def fail(*_):
            raise OSError(errno.EIO, "bad disk")

        with monkeypatch.context() as patch:
            patch.setattr(os, call, fail)
            with pytest.raises(DiskFailed, match="bad disk"):
                await file.append([b"x"], sync=True)
        with pytest.raises(DiskFailed, match="earlier write or sync failed"):
            await file.append([b"x"])
        with pytest.raises(DiskFailed):
            await file.sync()

    on_a_disk(tmp_path, test)


def test_where_fallocate_is_missing_zeros_are_written(tmp_path, monkeypatch):
    monkeypatch.delattr(os, "posix_fallocate")

    async def test(disk):
        await disk.create("a", reserve_bytes=(1 << 20) + 5)
        assert os.stat(tmp_path / "disk/a").st_blocks * 512 >= 1 << 20
        assert os.stat(tmp_path / "disk/a").st_size == (1 << 20) + 5

    on_a_disk(tmp_path, test)


def test_where_fdatasync_is_missing_the_stronger_call_is_made(tmp_path, monkeypatch):
    import fcntl

    calls = []
    monkeypatch.delattr(os, "fdatasync")
    monkeypatch.setattr(fcntl, "F_FULLFSYNC", 51, raising=False)
    monkeypatch.setattr(fcntl, "fcntl", lambda fd, call: calls.append(call))

    async def test(disk):
        file = await disk.create("a")
        await file.append([b"x"], sync=True)
        assert calls == [51]

    on_a_disk(tmp_path, test)


def test_names_are_made_listed_renamed_and_removed(tmp_path):
    async def test(disk):
        await disk.make_folder("x/y")
        await disk.create("x/y/b")
        await disk.create("x/y/a")
        assert await disk.list("x/y") == ["a", "b"]
        assert await disk.list("nowhere") == []
        await disk.rename("x/y/a", "x/y/b")
        await disk.sync_dir("x/y")
        assert await disk.list("x/y") == ["b"]
        with pytest.raises(DiskFailed):
            await disk.create("x/y/b")
        await disk.remove("x/y/b")
        for call in (disk.remove, disk.open):
            with pytest.raises(NoSuchFile):
                await call("x/y/b")
        assert 0 < await disk.free_bytes() <= await disk.total_bytes()

    on_a_disk(tmp_path, test)


def test_the_space_of_a_file_that_nobody_reads_is_given_back_in_parts_after_its_name(
    tmp_path, monkeypatch
):
    ends = []
    truncate, sync = os.ftruncate, os.fsync

    def noted(fd, end):
        assert not (tmp_path / "disk/a").exists()
        ends.append(end)
        truncate(fd, end)

    def synced(fd):
        ends.append(f"synced at {os.fstat(fd).st_size}")
        sync(fd)

    async def test(disk):
        for path in ("a", "b"):
            await (await disk.create(path, (8 << 20) + 5)).close()
        monkeypatch.setattr(os, "ftruncate", noted)
        monkeypatch.setattr(os, "fsync", synced)
        await disk.remove("a", unread=True)
        parts = [(4 << 20) + 5, 5, 0]
        assert ends == [each for end in parts for each in (end, f"synced at {end}")]
        await disk.remove("b")
        assert len(ends) == 6
        assert await disk.list() == []
        with pytest.raises(NoSuchFile):
            await disk.remove("a", unread=True)

    on_a_disk(tmp_path, test)


def test_a_disk_that_is_slow_with_each_part_of_a_removed_file_has_not_hung(tmp_path, monkeypatch):
    monkeypatch.setattr(os_disk, "FREED_BYTES", 4096)
    monkeypatch.setattr(os, "fsync", lambda _: time.sleep(0.1))

    async def main():
        disk = OsDisk(tmp_path / "disk", "journal", limit_s=2.0)
        await (await disk.create("a", 32 * 4096)).close()
        await disk.remove("a", unread=True)
        await disk.create("b")
        disk.shut_down()

    asyncio.run(main())


def test_a_file_is_removed_although_its_space_cannot_be_given_back_in_parts(tmp_path, monkeypatch):
    def fails(fd):
        raise OSError(errno.EIO, "an earlier write failed")

    monkeypatch.setattr(os, "fsync", fails)

    async def test(disk):
        await (await disk.create("a", 8192)).close()
        await disk.remove("a", unread=True)
        assert await disk.list() == []

    on_a_disk(tmp_path, test)


def test_of_a_file_that_is_being_read_the_rest_can_be_read_after_its_removal(tmp_path):
    async def test(disk):
        file = await disk.create("a")
        await file.append([b"abc"])
        await disk.remove("a")
        assert await file.read(0, 3) == b"abc"

    on_a_disk(tmp_path, test)


def test_threads_are_named_by_their_work(tmp_path, monkeypatch):
    names = set()
    monkeypatch.setattr(os, "fdatasync", lambda _: names.add(threading.current_thread().name))
    monkeypatch.setattr(os, "pread", lambda *_: names.add(threading.current_thread().name) or b"")

    async def test(disk):
        file = await disk.create("a")
        await file.sync()
        await file.read(0, 1)
        kinds = sorted(name.rsplit("_", 1)[0] for name in names)
        assert kinds == ["journal-read", "journal-write"]

    on_a_disk(tmp_path, test)


def refuse_direct(monkeypatch):
    whole = os.open

    def refusing(path, flags, *mode):
        if flags & os.O_DIRECT:
            raise OSError(errno.EINVAL, "no O_DIRECT here")
        return whole(path, flags, *mode)

    monkeypatch.setattr(os, "open", refusing)


@pytest.mark.parametrize("refused", [False, True])
def test_a_direct_file_holds_what_was_appended_in_any_pieces(tmp_path, monkeypatch, refused):
    if refused:
        refuse_direct(monkeypatch)

    async def test(disk):
        file = await disk.create("a", 8 << 20, direct=True)
        pieces = [os.urandom(size) for size in (1, 4095, 0, 3 << 20, 4097, 12287)]
        assert await file.append(pieces, sync=True) == 0
        assert await file.append([bytes(4096)]) == (3 << 20) + 5 * 4096
        await file.close()
        again = await disk.open("a")
        assert await again.read(0, (3 << 20) + 5 * 4096) == b"".join(pieces)

    on_a_disk(tmp_path, test)


def test_a_file_whose_opener_gave_up_waiting_is_closed(tmp_path, monkeypatch):
    (tmp_path / "log").write_bytes(b"x")
    begun, go_on, fds = threading.Event(), threading.Event(), []
    open_plain = os.open

    def open_slowly(path, *how):
        begun.set()
        go_on.wait(20)
        fds.append(open_plain(path, *how))
        return fds[-1]

    monkeypatch.setattr(os, "open", open_slowly)

    async def main():
        disk = OsDisk(tmp_path)
        opening = asyncio.ensure_future(disk.open("log"))
        await asyncio.to_thread(begun.wait, 20)
        opening.cancel()
        with pytest.raises(asyncio.CancelledError):
            await opening
        go_on.set()
        await asyncio.to_thread(disk.shut_down)
        for _ in range(10):  # the thread's answer is on its way through the loop
            await asyncio.sleep(0)
        with pytest.raises(OSError, match="Bad file descriptor"):
            os.fstat(fds[0])

    asyncio.run(main())


def test_a_file_that_finds_no_space_is_disk_full_and_leaves_nothing(tmp_path, monkeypatch):
    def no_space(*_):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr("os.posix_fallocate", no_space)

    async def test(disk):
        with pytest.raises(DiskFull, match="No space left"):
            await disk.create("segment", reserve_bytes=4096, direct=True)
        assert await disk.list() == []

    on_a_disk(tmp_path, test)


def test_the_total_is_what_is_used_and_what_is_free_to_us_without_what_is_kept_for_root(
    tmp_path, monkeypatch
):
    blocks = os.statvfs_result((4096, 4096, 100, 60, 55, 0, 0, 0, 0, 255))
    monkeypatch.setattr("os.statvfs", lambda _: blocks)

    async def test(disk):
        assert await disk.free_bytes() == 55 * 4096
        assert await disk.total_bytes() == (40 + 55) * 4096

    on_a_disk(tmp_path, test)


def test_a_call_that_finds_no_descriptor_waits_for_one_and_says_nothing_of_the_disk(
    tmp_path, monkeypatch
):
    monkeypatch.setattr(os_disk, "_DESCRIPTOR_RETRY_S", 0.01)
    opens, lacking = os.open, {"times": 0}

    def without(path, flags, *mode, **named):
        if lacking["times"]:
            lacking["times"] -= 1
            raise OSError(errno.EMFILE, os.strerror(errno.EMFILE), str(path))
        return opens(path, flags, *mode, **named)

    monkeypatch.setattr(os, "open", without)

    async def test(disk):
        for direct in (False, True):
            lacking["times"] = 3
            file = await disk.create(f"made-{direct}", 4096, direct=direct)
            await file.append([bytes(4096)], sync=True)
            await file.close()
        lacking["times"] = 3
        await disk.make_folder("folder/below")
        lacking["times"] = 3
        await disk.sync_dir("folder")
        lacking["times"] = 3
        opened = await disk.open("made-True")
        assert await opened.read(0, 1 << 20) == bytes(4096)
        await opened.close()
        lacking["times"] = 3
        await disk.remove("made-True", unread=True)
        assert await disk.list() == ["folder", "made-False"]

    on_a_disk(tmp_path, test)
