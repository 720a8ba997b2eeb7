"""The hand-written encoding is the one the generated code reads and writes."""

import contextlib
from itertools import chain, pairwise

import pytest

from bookie_server.api import bookie_pb2, codec
from bookie_server.api import messages as m
from bookie_server.api.status import Status, StopReason

EDGES = [0, 1, 127, 128, 300, 2**31, 2**32, 2**53, 2**63 - 1]
NEGATIVES = [-1, -(2**63)]


def add_request():
    adds = [
        m.Add([b"one"]),
        m.Add([b"t", bytearray(b"w"), memoryview(b"o" * 300)], recovery=True, token=b"\0\xff"),
        m.Add([b""]),
    ]
    return m.AddRequest("bookie-ü", adds)


def add_response():
    return m.AddResponse(
        [
            m.AddResult(Status.OK),
            m.AddResult(Status.BUSY, 200, ""),
            m.AddResult(Status.FENCED, 0, "é"),
        ]
    )


def read_request(ledger=7, first=0, last=9):
    return m.ReadRequest("b", ledger, first, last, 4 << 20, fence=True, token=b"t")


def read_response(lac=-1):
    results = [
        m.EntryResult(Status.OK, b"x" * 200),
        m.EntryResult(Status.NO_SUCH_ENTRY),
        m.EntryResult(Status.OK, location=m.EntryLocation("/ü", "entrylog/1.log", 2**40, 2**31)),
    ]
    ahead = [m.EntryLocation("/ü", "entrylog/2.log", 2**41, n) for n in (1, 2**31)]
    return m.ReadResponse(Status.OK, results, lac, StopReason.BYTE_LIMIT, 3, "why", ahead)


REQUESTS = [
    add_request(),
    m.AddRequest("", []),
    *[read_request(e, e, e) for e in [*EDGES, *NEGATIVES]],
    read_request(1, 3, 4)._replace(further=[(6, 6), (7, 9), (2**40, 2**63 - 1)]),
    read_request()._replace(fence=False, locations=True),
    read_request()._replace(fence=False, locations=True, ahead=[(10, 10), (12, 2**40)]),
    read_request()._replace(further=[(20, 30)], ahead=[(32, 40), (2**40, 2**62)]),
    m.ReadStreamRequest(read_request(), 2**40),
    m.ReadLacRequest("b", 2**63 - 1, True, b"t", -1, 60_000),
    m.ReadLacRequest("b", 1, previous_lac=2**62),
    m.WriteLacRequest("b", 7, 2**40, b"t"),
    m.WriteLacRequest("b", 7, -1),
    m.ClearLimboRequest("b", 2**40, b"t", True, 2**63),
    m.ClearLimboRequest("b", 0),
    m.ReadRequest("b", 7, 0, 511, 1 << 14, True, b"t", tail_entries=8),
    m.InfoRequest(),
    m.InfoRequest("b"),
    m.StoredRequest("b", 2**40, 0, 2**62, b"t"),
]
RESPONSES = [
    add_response(),
    m.AddResponse([]),
    *[read_response(lac) for lac in [*EDGES, *NEGATIVES]],
    m.ReadResponse(Status.NO_SUCH_LEDGER),
    m.ReadResponse(
        Status.OK,
        [m.EntryResult(Status.NO_SUCH_ENTRY)],
        3,
        StopReason.REST_IS_ABSENT,
        skipped=2**40,
    ),
    m.ReadLacResponse(Status.OK, -1, True, taken=4),
    m.WriteLacResponse(Status.BUSY, 20, "later"),
    m.ClearLimboResponse(Status.LIMBO, "lost", 2**63, 0, "why"),
    m.ReadResponse(Status.LIMBO_TORN),
    m.StoredResponse(Status.OK, 2**62, [(0, 0), (2, 7), (2**61, 2**62)]),
    m.StoredResponse(Status.BUSY, retry_after_ms=20, reason="later"),
    m.InfoResponse(Status.OK, "b", "readonly", "full", 1, 2**40, 3, 16 << 20, "0.1.0"),
    m.InfoResponse(
        Status.OK,
        directories=[
            m.DirectoryInfo("/j", "journal", 1, 2**40, True),
            m.DirectoryInfo("/l", "ledger", failure="EIO"),
        ],
        limbo_ledgers=7,
        reclaim="3 logs",
    ),
]


def plain(value):
    """A message as dictionaries, lists and bytes, whichever code made it."""
    if hasattr(value, "ListFields"):
        return {f.name: plain(getattr(value, f.name)) for f in value.DESCRIPTOR.fields}
    if isinstance(value, m.EntryResult):
        location = value.location or m.EntryLocation("", "", 0, 0)
        return {"status": value.status, "entry": bytes(value.entry), "location": plain(location)}
    if hasattr(value, "_fields"):
        return {name: plain(getattr(value, name)) for name in value._fields}
    if isinstance(value, bytes | bytearray | memoryview):
        return bytes(value)
    if isinstance(value, int | str):
        return value
    return [plain(each) for each in value]


def expected(message):
    """`plain`, with an add's buffers joined and a read's spans counted, as they travel."""
    whole = plain(message)
    for read in (whole, whole.get("read") or {}):
        last = read.get("last_entry")
        for name in ("further", "ahead") if "further" in read else ():
            ends = [last, *chain.from_iterable(read[name])]
            gaps = [after - before for before, after in pairwise(ends)]
            read[name] = [gap + (-1) ** (n % 2 + 1) for n, gap in enumerate(gaps)]
            last = ends[-1]
    if "spans" in whole:
        ends = [-1, *chain.from_iterable(whole.pop("spans"))]
        gaps = [after - before for before, after in pairwise(ends)]
        whole["stored"] = [gap + (-1) ** (n % 2 + 1) for n, gap in enumerate(gaps)]
    for add in whole.get("adds", []):
        add["entry"] = b"".join(add["entry"])
    return whole


def generated(message):
    return getattr(bookie_pb2, type(message).__name__)


@pytest.mark.parametrize("message", REQUESTS + RESPONSES, ids=lambda each: type(each).__name__)
def test_the_generated_code_reads_what_is_written_by_hand(message):
    assert plain(generated(message).FromString(codec.encode(message))) == expected(message)


@pytest.mark.parametrize("message", REQUESTS + RESPONSES, ids=lambda each: type(each).__name__)
def test_what_the_generated_code_writes_is_read_by_hand(message):
    kind = type(message).__name__
    method = kind.removesuffix("Request").removesuffix("Response")
    decode = codec.decode_request if kind.endswith("Request") else codec.decode_response
    written = generated(message)(**expected(message)).SerializeToString()
    assert expected(decode(method, written)) == expected(message)


def test_more_credit_is_a_message_without_a_range():
    more = m.ReadStreamRequest(credit_bytes=300)
    written = bookie_pb2.ReadStreamRequest(credit_bytes=300).SerializeToString()
    assert codec.encode(more) == written
    assert codec.decode_stream_request("ReadStream", written) == more


def test_entries_are_views_into_the_message():
    data = codec.encode(add_request())
    request = codec.decode_request("Add", data)
    assert all(buffer.obj is data for add in request.adds for buffer in add.entry if len(buffer))


@pytest.mark.parametrize(
    "further", [[1], [0, 0], [1, 0], [1, 2, 3], [0, 2**63], [2**63, 1]], ids=str
)
def test_spans_that_are_none_are_refused(further):
    for name in ("further", "ahead"):
        refused(bookie_pb2.ReadRequest(first_entry=3, last_entry=4, **{name: further}))


def refused(wrong):
    with pytest.raises(codec.BadMessage):
        codec.decode_request("Read", wrong.SerializeToString())


@pytest.mark.parametrize("further", [[(4, 4)], [(2, 2)], [(7, 6)], [(6, 8), (8, 9)]], ids=str)
def test_spans_that_do_not_rise_are_never_sent(further):
    with pytest.raises(ValueError, match="rise"):
        codec.encode(m.ReadRequest("b", 1, 3, 4, 100, further=further))
    with pytest.raises(ValueError, match="rise"):
        codec.encode(m.ReadRequest("b", 1, 3, 4, 100, ahead=further))


def test_a_request_for_neighbours_has_the_bytes_that_it_always_had():
    whole = codec.encode(m.ReadRequest("b", 1, 3, 4, 100))
    assert whole == b"\x0a\x01b\x10\x01\x18\x03\x20\x04\x28\x64"
    apart = codec.encode(m.ReadRequest("b", 1, 3, 4, 100, further=[(6, 6), (10, 12)]))
    assert apart == whole + b"\x42\x04\x01\x01\x03\x03"


def test_locations_have_the_bytes_that_clients_and_bookies_of_earlier_versions_know():
    asked = m.ReadRequest("b", 7, 0, 1, 100, locations=True, ahead=[(3, 4)])
    assert codec.encode(asked).hex() == "0a0162100720012864480152020102"
    at = m.EntryLocation("/d", "1.log", 300, 40)
    located = m.EntryResult(Status.OK, location=at)
    response = m.ReadResponse(Status.OK, [located], 5, StopReason.END_OF_RANGE, ahead=[at])
    of_entry = "0a022f641205312e6c6f6718ac022028"
    assert codec.encode(response).hex() == f"200a2a121a10{of_entry}3a10{of_entry}"


def test_fields_of_a_later_version_are_skipped():
    later = codec.encode(read_request()) + bytes([15 << 3 | 0, 5, 14 << 3 | 2, 2, 1, 1])
    later += bytes([13 << 3 | 5, 0, 0, 0, 0, 12 << 3 | 1]) + bytes(8)
    assert codec.decode_request("Read", later) == read_request()


@pytest.mark.parametrize("method", list(m.METHODS))
def test_bytes_that_are_no_message_are_refused_or_read_but_never_crash(method):
    whole = codec.encode(add_request())
    for length in range(len(whole)):
        for decode in (codec.decode_request, codec.decode_response):
            with contextlib.suppress(codec.BadMessage):
                decode(method, whole[:length])


def test_a_message_cut_off_inside_a_field_is_refused():
    for method, message in (("Add", add_request()), ("Read", read_request())):
        with pytest.raises(codec.BadMessage):
            codec.decode_request(method, codec.encode(message)[:-1])
    with pytest.raises(codec.BadMessage):
        codec.decode_request("Add", b"\x0a" + b"\xff" * 11)


def test_statuses_and_stop_reasons_have_the_numbers_of_the_contract():
    assert {s.name: s.value for s in Status} == dict(bookie_pb2.Status.items())
    assert {s.name: s.value for s in StopReason} == dict(bookie_pb2.StopReason.items())


def adds_of(*entries, recovery=False, token=b"token"):
    return [m.Add([entry], recovery, token) for entry in entries]


@pytest.mark.parametrize(
    "adds",
    [
        adds_of(b"a" * 900, b"b" * 900, b"c" * 900),
        adds_of(b"a" * 900, b"b" * 901, b"c" * 900, b"", b"", b"d"),
        adds_of(b"a" * 90, b"b" * 90, token=b"") + adds_of(b"c" * 90, recovery=True, token=b""),
        adds_of(b"a" * 90) + adds_of(b"b" * 90, token=b"other") + adds_of(b"c" * 90),
        adds_of(*[bytes([n]) * (codec.JOINED_BYTES_MAX + n % 2) for n in range(6)]),
    ],
    ids=["alike", "other lengths", "other flags", "other tokens", "large"],
)
def test_adds_that_are_alike_and_such_that_are_not_are_read_as_they_were_written(adds):
    data = codec.encode(m.AddRequest("b", adds))
    packed = m.PackedAddRequest("b", [codec.encode_add(add) for add in adds])
    assert codec.encode(packed) == data
    found = codec.decode_request("Add", data)
    assert [(bytes(a.entry[0]), a.recovery, a.token) for a in found.adds] == [
        (a.entry[0], a.recovery, a.token) for a in adds
    ]
    assert plain(bookie_pb2.AddRequest.FromString(data)) == expected(m.AddRequest("b", adds))


def test_an_add_cut_off_after_others_like_it_is_no_add():
    data = codec.encode(m.AddRequest("b", adds_of(*[b"x" * 900] * 3)))
    for length in (1, 899, 920):
        with pytest.raises(codec.BadMessage):
            codec.decode_request("Add", data[:-length])


def test_results_that_are_all_ok_or_not_are_read_as_they_were_written():
    ok, busy = m.AddResult(Status.OK), m.AddResult(Status.BUSY, 20)
    for results in ([], [ok], [ok] * 300, [busy], [ok, busy, ok], [ok, ok, busy]):
        response = m.AddResponse(results)
        assert codec.decode_response("Add", codec.encode(response)) == response
    with pytest.raises(codec.BadMessage):
        codec.decode_response("Add", codec.encode(m.AddResponse([ok] * 3))[:-1])


def test_more_bytes_than_the_contract_can_say_are_asked_for_as_all_that_it_can_say():
    asked = m.ReadRequest("bookie", 7, 0, 9, max_bytes=1 << 40)
    read = codec.decode_request("Read", codec.encode(asked))
    assert read == asked._replace(max_bytes=2**32 - 1)
    streamed = codec.encode(m.ReadStreamRequest(asked, 1 << 40))
    assert codec.decode_stream_request("ReadStream", streamed).read == read


def test_a_last_result_of_a_read_stands_for_later_entries_only_where_the_bookie_says_so():
    absent, stored = m.EntryResult(Status.NO_SUCH_ENTRY), m.EntryResult(Status.OK, b"x")
    rest = StopReason.REST_IS_ABSENT
    folded = m.ReadResponse(Status.OK, [stored, absent], stop=rest, skipped=3)
    assert [folded.result(at) for at in (2, 3, 4, 99)] == [None, stored, absent, absent]
    for no_proof in (
        m.ReadResponse(Status.OK, [stored, absent]),
        m.ReadResponse(Status.OK, [absent, stored], stop=rest),
        m.ReadResponse(Status.OK, stop=rest),
    ):
        assert no_proof.result(2) is None
