"""Files of bookies on this host, as they are really read."""

import asyncio
import os
import threading

import pytest

from bookie_server.api.messages import EntryLocation
from spark_ledger.bookies import local_reads
from spark_ledger.bookies.local_reads import GAP_BYTES_MAX, RUN_BYTES_MAX, THREADS, HostFiles


def at(path, position, length):
    return EntryLocation(str(path.parent), path.name, position, length)


def everything(found):
    return [bytes(each) for each in found]


def reading(test):
    async def main():
        files = HostFiles()
        await test(files)
        files.close()

    asyncio.run(main())


@pytest.fixture
def preads(monkeypatch):
    """Position and length of each."""
    seen, pread = [], os.pread

    def noted(file, length, position):
        seen.append((position, length))
        return pread(file, length, position)

    monkeypatch.setattr(local_reads.os, "pread", noted)
    return seen


def test_bytes_are_read_at_their_locations_and_fewer_where_the_file_ends(tmp_path):
    path = tmp_path / "file"
    path.write_bytes(bytes(range(100)))

    async def test(files):
        opened = len(os.listdir("/proc/self/fd"))
        assert await files.read([at(path, 10, 5)], everything) == [bytes(range(10, 15))]
        assert await files.read([at(path, 98, 5)], everything) == [bytes([98, 99])]
        assert len(os.listdir("/proc/self/fd")) == opened
        with pytest.raises(FileNotFoundError):
            await files.read([at(tmp_path / "other", 0, 1)], everything)

    reading(test)


def test_what_lies_together_is_one_read(tmp_path, preads):
    path = tmp_path / "file"
    path.write_bytes(bytes(5) + b"one" + bytes(GAP_BYTES_MAX) + b"two" + b"three")
    second = 8 + GAP_BYTES_MAX

    async def test(files):
        locations = [at(path, 5, 3), at(path, second, 3), at(path, second + 3, 5)]
        assert await files.read(locations, everything) == [b"one", b"two", b"three"]
        assert preads == [(5, 3 + GAP_BYTES_MAX + 3 + 5)]

    reading(test)


def test_what_lies_apart_or_back_or_in_another_file_is_read_apart(tmp_path, preads):
    one, two = tmp_path / "one", tmp_path / "two"
    one.write_bytes(b"one" + bytes(GAP_BYTES_MAX + 1) + b"two")
    two.write_bytes(bytes(3) + b"six" + b"end")
    end = one.stat().st_size

    async def test(files):
        locations = [at(one, 0, 3), at(one, end - 3, 3), at(one, 0, 3), at(two, 3, 3)]
        assert await files.read(locations, everything) == [b"one", b"two", b"one", b"six"]
        assert preads == [(0, 3), (end - 3, 3), (0, 3), (3, 3)]

    reading(test)


def test_one_read_has_no_more_than_its_limit(tmp_path, preads):
    path = tmp_path / "file"
    path.write_bytes(bytes(RUN_BYTES_MAX + 1))

    async def test(files):
        await files.read([at(path, 0, 1), at(path, 1, RUN_BYTES_MAX - 1)], len)
        await files.read([at(path, 0, 2), at(path, 2, RUN_BYTES_MAX - 1)], len)
        assert [length for _, length in preads] == [RUN_BYTES_MAX, 2, RUN_BYTES_MAX - 1]

    reading(test)


def test_what_waits_when_the_client_is_closed_is_read_and_nothing_after_it(tmp_path):
    path = tmp_path / "file"
    path.write_bytes(b"whole")
    may_go_on = threading.Event()

    def slowly(found):
        may_go_on.wait()
        return everything(found)

    async def test():
        files = HostFiles()
        reads = [
            asyncio.create_task(files.read([at(path, 0, 5)], slowly)) for _ in range(2 * THREADS)
        ]
        await asyncio.sleep(0)
        files.close()
        may_go_on.set()
        assert await asyncio.gather(*reads) == [[b"whole"]] * len(reads)
        with pytest.raises(OSError, match="closed"):
            await files.read([at(path, 0, 5)], slowly)

    asyncio.run(test())
