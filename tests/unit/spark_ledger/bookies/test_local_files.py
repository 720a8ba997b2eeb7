"""Files of bookies on this host, as they are really read."""

import asyncio
import os
import threading

import pytest

from spark_ledger.bookies.local_files import THREADS, HostFiles


def test_bytes_are_read_where_they_lie_and_fewer_where_the_file_ends(tmp_path):
    path = tmp_path / "file"
    path.write_bytes(bytes(range(100)))

    async def test():
        files = HostFiles()
        opened = len(os.listdir("/proc/self/fd"))
        assert await files.read(str(path), 10, 5, bytes) == bytes(range(10, 15))
        assert await files.read(str(path), 98, 5, bytes) == bytes([98, 99])
        assert len(os.listdir("/proc/self/fd")) == opened
        with pytest.raises(FileNotFoundError):
            await files.read(str(tmp_path / "other"), 0, 1, bytes)
        files.close()

    asyncio.run(test())


def test_what_waits_when_the_client_is_closed_is_read_and_nothing_after_it(tmp_path):
    path = tmp_path / "file"
    path.write_bytes(b"whole")
    may_go_on = threading.Event()

    def slowly(data):
        may_go_on.wait()
        return bytes(data)

    async def test():
        files = HostFiles()
        reads = [
            asyncio.create_task(files.read(str(path), 0, 5, slowly)) for _ in range(2 * THREADS)
        ]
        await asyncio.sleep(0)
        files.close()
        may_go_on.set()
        assert await asyncio.gather(*reads) == [b"whole"] * len(reads)
        with pytest.raises(OSError, match="closed"):
            await files.read(str(path), 0, 5, slowly)

    asyncio.run(test())
