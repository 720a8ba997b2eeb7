"""What is believed of files of bookies on this host. The files are a dict; time is a number."""

import asyncio

import pytest

from bookie_server.api.entry import EntryHeader, pack_header, payload_crc
from bookie_server.api.messages import EntryPlace, EntryResult, ReadRequest, ReadResponse
from bookie_server.api.status import Status
from spark_ledger.bookies.local_files import HostFiles
from spark_ledger.bookies.local_reads import RETRY_S, LocalReads
from tests.unit.spark_ledger.ledger.fakes import simulated

BOOKIE, FOLDER, FILE = "00000000-0000-0000-0000-000000000001", "/data/1", "entrylog/1.log"
REQUEST = ReadRequest(BOOKIE, 7, 0, 2, 1 << 20, places=True)


def entry(entry_id, payload=b"x" * 300, ledger_id=7):
    header = EntryHeader(ledger_id, entry_id, -1, 0, 0, len(payload), payload_crc([payload]))
    return pack_header(header) + payload


class Files:
    """network.LocalFiles over a dict."""

    def __init__(self, **contents):
        self.contents = {f"{FOLDER}/{FILE}": contents.get("log", b"")}
        self.identified = contents.get("identity", f"some words {BOOKIE}\n".encode())
        self.reads = []

    async def identity(self, directory):
        assert directory == FOLDER
        return self.identified

    async def read(self, path, position, length, taken):
        self.reads.append((position, length))
        if path not in self.contents:
            raise FileNotFoundError(path)
        return taken(memoryview(self.contents[path])[position : position + length])

    def close(self):
        pass


def told(*spans):
    places = [EntryPlace(FOLDER, FILE, position, length) for position, length in spans]
    return ReadResponse(Status.OK, [EntryResult(Status.OK, place=place) for place in places], 2)


def new(files, now=lambda: 100.0):
    return LocalReads(now, files)


@simulated
async def test_entries_that_lie_together_are_read_at_once_and_each_is_checked():
    one, two = entry(0), entry(1, b"another")
    files = Files(log=b"....." + one + b"gap" + two)
    response = told((5, len(one)), (5 + len(one) + 3, len(two)))
    got = await new(files).carried_out(REQUEST, response)
    assert files.reads == [(5, len(one) + 3 + len(two))]
    assert [bytes(each.checked.payload) for each in got.results] == [b"x" * 300, b"another"]
    assert got.last_add_confirmed == 2


@simulated
async def test_entries_that_lie_apart_are_read_apart():
    one, two = entry(0), entry(1)
    files = Files(log=one + bytes(9000) + two)
    response = told((0, len(one)), (len(one) + 9000, len(two)))
    got = await new(files).carried_out(REQUEST, response)
    assert len(files.reads) == 2
    assert [each.checked.header.entry_id for each in got.results] == [0, 1]


@simulated
async def test_what_the_bookie_sent_itself_stays_as_it_is():
    sent = EntryResult(Status.OK, entry(1))
    files = Files(log=entry(0))
    [place] = told((0, len(entry(0)))).results
    got = await new(files).carried_out(REQUEST, ReadResponse(Status.OK, [place, sent], 2))
    assert got.results[0].checked.header.entry_id == 0
    assert got.results[1] is sent


@pytest.mark.parametrize(
    "log",
    [
        entry(0)[:-1] + b"?",
        b"?" + entry(0)[1:],
        entry(0)[:-1],
        entry(0)[:10],
        b"",
        entry(1),
        entry(0, ledger_id=8),
    ],
    ids=["payload", "header", "cut", "cut header", "nothing", "other entry", "other ledger"],
)
@simulated
async def test_of_what_is_bad_nothing_is_returned(log):
    assert await new(Files(log=log)).carried_out(REQUEST, told((0, len(entry(0))))) is None


@simulated
async def test_a_directory_of_another_bookie_is_not_read():
    files = Files(log=entry(0), identity=b"some words of 00000000-0000-0000-0000-000000000002")
    assert await new(files).carried_out(REQUEST, told((0, len(entry(0))))) is None
    assert files.reads == []


@simulated
async def test_after_a_failure_the_files_of_that_bookie_are_left_alone_for_a_while():
    moment = 100.0
    reads = new(Files(), now=lambda: moment)
    assert reads.may_be_read(BOOKIE)
    assert await reads.carried_out(REQUEST, told((0, 300))) is None
    assert not reads.may_be_read(BOOKIE)
    assert reads.may_be_read("another")
    moment += RETRY_S
    assert reads.may_be_read(BOOKIE)


def told_ahead(*spans):
    response = told()
    places = [EntryPlace(FOLDER, FILE, position, length) for position, length in spans]
    return response._replace(ahead=places)


@simulated
async def test_after_one_entry_was_not_where_it_was_told_ahead_none_of_the_others_is_looked_for():
    one = entry(1)
    files = Files(log=one + one)
    reads = new(files)
    asking = REQUEST._replace(first_entry=0, last_entry=0, ahead=[(1, 2)])
    await reads.carried_out(asking, told_ahead((len(one), len(one)), (0, len(one))))
    files.contents.clear()
    assert await reads.known(REQUEST._replace(first_entry=1, last_entry=1)) is None
    assert len(files.reads) == 1
    assert await reads.known(REQUEST._replace(first_entry=2, last_entry=2)) is None
    assert len(files.reads) == 1
    assert reads.may_be_read(BOOKIE)


@simulated
async def test_what_a_bookie_was_asked_for_is_not_read_by_a_place_it_told_before():
    one = entry(1)
    files = Files(log=one)
    reads = new(files)
    asking = REQUEST._replace(first_entry=0, last_entry=0, ahead=[(1, 1)])
    await reads.carried_out(asking, told_ahead((0, len(one))))
    again = REQUEST._replace(first_entry=1, last_entry=1)
    await reads.carried_out(again, told((0, len(one))))
    assert await reads.known(again) is None


def test_files_of_the_host_are_read_in_threads_where_they_are_and_end(tmp_path):
    (tmp_path / "log").write_bytes(b"0123456789")
    (tmp_path / "bookie.identity").write_bytes(b"words")

    async def read():
        files = HostFiles()
        assert await files.read(str(tmp_path / "log"), 2, 3, bytes) == b"234"
        assert await files.read(str(tmp_path / "log"), 8, 5, bytes) == b"89"
        assert await files.identity(str(tmp_path)) == b"words"
        with pytest.raises(FileNotFoundError):
            await files.read(str(tmp_path / "gone"), 0, 1, bytes)
        with pytest.raises(FileNotFoundError):
            await files.identity(str(tmp_path / "gone"))
        files.close()

    asyncio.run(read())
