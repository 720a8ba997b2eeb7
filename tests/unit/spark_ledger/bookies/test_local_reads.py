"""What a client makes of locations in files of this host. Files are a dict; time is a number."""

import pytest

from bookie_server.api.entry import EntryHeader, pack_header, payload_crc
from bookie_server.api.messages import (
    IDENTITY_FILE,
    EntryLocation,
    EntryResult,
    ReadRequest,
    ReadResponse,
    ids_in,
)
from bookie_server.api.status import Status, StopReason
from spark_ledger.bookies.local_reads import RETRY_S, LocalReads
from tests.unit.spark_ledger.ledger.fakes import simulated

BOOKIE, FOLDER, FILE = "00000000-0000-0000-0000-000000000001", "/data/1", "entrylog/1.log"
IDENTITY = f"some words {BOOKIE}\n".encode()
BYTES = 1 << 20


def entry(entry_id, payload=b"x" * 300, ledger_id=7):
    header = EntryHeader(ledger_id, entry_id, -1, 0, 0, len(payload), payload_crc([payload]))
    return pack_header(header) + payload


class Files:
    """HostFiles over a dict."""

    def __init__(self, log=b"", identity=IDENTITY):
        self.contents = {f"{FOLDER}/{FILE}": log, f"{FOLDER}/{IDENTITY_FILE}": identity}
        self.reads = []

    async def read(self, locations, check):
        self.reads += [[each[2:] for each in locations]] * (locations[0].file != IDENTITY_FILE)
        return check([self.there(each) for each in locations])

    def there(self, location):
        path = f"{location.directory}/{location.file}"
        if path not in self.contents:
            raise FileNotFoundError(path)
        return memoryview(self.contents[path])[location.position : location.end]


class Asking:
    """Reads of one reader from one bookie, which answers as `answer` says, or with bytes."""

    def __init__(self, files, now=lambda: 100.0):
        self.local = LocalReads(now, files)
        self.map = {}
        self.answer = None
        self.asked = []
        """Of each question: whether it was for locations, too."""

    async def read(self, first=0, last=2, *, ahead=(), max_bytes=BYTES, answer=None):
        self.answer = answer
        request = ReadRequest(BOOKIE, 7, first, last, max_bytes)
        return await self.local.read(request, self.map, ahead, self.ask)

    async def ask(self, request):
        self.asked.append(request.locations)
        if request.locations and self.answer is not None:
            return self.answer
        sent = [EntryResult(Status.OK, entry(each)) for each in ids_in(request.spans, 9)]
        return ReadResponse(Status.OK, sent, 2)


def locations(*spans):
    return [EntryLocation(FOLDER, FILE, position, length) for position, length in spans]


def located(*spans, ahead=()):
    results = [EntryResult(Status.OK, location=each) for each in locations(*spans)]
    return ReadResponse(Status.OK, results, 2, ahead=locations(*ahead))


def payloads(response):
    return [bytes(each.checked.payload) for each in response.results]


@simulated
async def test_the_entries_of_an_answer_are_read_at_once_and_each_is_checked():
    one, two = entry(0), entry(1, b"another")
    files = Files(log=b"....." + one + bytes(9000) + two)
    spans = [(5, len(one)), (5 + len(one) + 9000, len(two))]
    got = await Asking(files).read(answer=located(*spans))
    assert files.reads == [spans]
    assert payloads(got) == [b"x" * 300, b"another"]
    assert got.last_add_confirmed == 2


@simulated
async def test_what_the_bookie_sent_itself_stays_as_it_is():
    sent = EntryResult(Status.OK, entry(1))
    files = Files(log=entry(0))
    [result] = located((0, len(entry(0)))).results
    got = await Asking(files).read(answer=ReadResponse(Status.OK, [result, sent], 2))
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
async def test_of_what_is_bad_nothing_is_returned_and_the_bookie_is_asked_for_the_bytes(log):
    asking = Asking(Files(log=log))
    got = await asking.read(0, 0, answer=located((0, len(entry(0)))))
    assert [result.checked for result in got.results] == [None]
    assert asking.asked == [True, False]


@simulated
async def test_a_directory_of_another_bookie_is_not_read():
    files = Files(log=entry(0), identity=b"some words of 00000000-0000-0000-0000-000000000002")
    asking = Asking(files)
    await asking.read(answer=located((0, len(entry(0)))))
    assert asking.asked == [True, False]
    assert files.reads == []


@simulated
async def test_after_a_failure_the_files_of_that_bookie_are_left_alone_for_a_while():
    moment = 100.0
    asking = Asking(Files(), now=lambda: moment)
    assert asking.local.may_read(BOOKIE)
    await asking.read(answer=located((0, 300)))
    assert asking.asked == [True, False]
    assert not asking.local.may_read(BOOKIE)
    assert asking.local.may_read("another")
    await asking.read(answer=located((0, 300)))
    assert asking.asked == [True, False, False]
    moment += RETRY_S
    assert asking.local.may_read(BOOKIE)


# -- the map of locations ---------------------------------------------------------------------


async def told_ahead(count=4, ahead=None):
    """A reader that has read entry 0 and has the locations of `ahead`, of 1 to `count` - 1."""
    each = len(entry(0))
    spans = [(number * each, each) for number in range(count)]
    files = Files(log=b"".join(map(entry, range(count))))
    asking = Asking(files)
    ids = range(1, count) if ahead is None else ahead
    await asking.read(0, 0, ahead=ids, answer=located(spans[0], ahead=[spans[n] for n in ids]))
    assert list(asking.map) == list(ids)
    asking.asked.clear()
    files.reads.clear()
    return asking, files


@simulated
async def test_a_location_is_used_once():
    asking, files = await told_ahead()
    got = await asking.read(1, 3)
    assert [each.checked.header.entry_id for each in got.results] == [1, 2, 3]
    assert (got.stop, asking.asked, asking.map) == (StopReason.END_OF_RANGE, [], {})
    assert len(files.reads) == 1
    await asking.read(1, 1)
    assert asking.asked == [True]


@pytest.mark.parametrize(("max_bytes", "count"), [(1, 1), (364, 1), (365, 2), (BYTES, 3)])
@simulated
async def test_bytes_end_what_the_map_answers_after_one_entry_at_least(max_bytes, count):
    asking, _ = await told_ahead()
    got = await asking.read(1, 3, max_bytes=max_bytes)
    assert [each.checked.header.entry_id for each in got.results] == [1, 2, 3][:count]
    assert got.stop is (StopReason.END_OF_RANGE if count == 3 else StopReason.BYTE_LIMIT)
    assert (asking.asked, list(asking.map)) == ([], [1, 2, 3][count:])


@pytest.mark.parametrize("ahead", [(1,), (1, 3), (2, 3)])
@simulated
async def test_where_one_location_is_not_in_the_map_the_bookie_is_asked_for_all(ahead):
    asking, files = await told_ahead(ahead=ahead)
    await asking.read(1, 3)
    assert asking.asked == [True]
    assert files.reads == []


@pytest.mark.parametrize("ahead", [(), (5,), (5, 6)])
@simulated
async def test_the_map_has_what_the_latest_answer_says_and_nothing_else(ahead):
    asking, _ = await told_ahead()
    newer = [(number, 10) for number in ahead]
    await asking.read(3, 4, ahead=(5, 6), answer=located(ahead=newer))
    assert asking.map == dict(zip(ahead, locations(*newer), strict=True))


@simulated
async def test_a_bookie_that_gives_no_locations_or_too_many_fills_no_map():
    asking, _ = await told_ahead()
    await asking.read(4, 4, ahead=(5, 6))
    assert asking.map == {}
    await asking.read(4, 4, ahead=(5,), answer=located(ahead=[(0, 1), (1, 1), (2, 1)]))
    assert list(asking.map) == [5]
    await asking.read(0, 0, answer=located(*[(0, len(entry(0)))] * 3, ahead=[(0, 1)]))
    assert asking.map == {}


@simulated
async def test_after_one_entry_was_not_at_its_location_none_of_the_map_is_looked_for():
    asking, files = await told_ahead()
    files.contents.clear()
    await asking.read(1, 1)
    assert (len(files.reads), asking.asked) == (1, [True])
    await asking.read(2, 2)
    assert (len(files.reads), asking.asked) == (1, [True, True])
    assert asking.local.may_read(BOOKIE)


@simulated
async def test_what_a_bookie_was_asked_for_is_not_read_at_an_earlier_location():
    asking, _ = await told_ahead()
    await asking.read(0, 1)  # which the map has a part of
    assert asking.map == {}
    await asking.read(1, 1)
    assert asking.asked == [True, True]
