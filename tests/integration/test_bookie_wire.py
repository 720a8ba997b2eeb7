"""A bookie as a client in any language meets it: gRPC by the stub that bookie.proto gives, what the
server tells of itself, and what it says to those who are wrong."""

import queue
import time
from collections.abc import Iterator
from contextlib import contextmanager

import grpc
import pytest
from google.protobuf.descriptor_pb2 import FileDescriptorProto
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc

from bookie_server import __version__
from bookie_server.api import bookie_pb2 as pb
from bookie_server.api.entry import EntryHeader, pack_header, payload_crc
from spark_ledger import LedgerClient
from spark_ledger.local import LocalBookie, LocalCluster
from tests.kit.bookie_pb2_grpc import BookieStub

SERVICE = "spark_ledger.bookie.v1.Bookie"
TIMEOUT_S = 20
PASSWORD = b"secret"


@contextmanager
def stub_of(bookie: LocalBookie) -> Iterator[BookieStub]:
    with grpc.insecure_channel(bookie.address) as channel:
        yield BookieStub(channel)


@pytest.fixture
def client(cluster: LocalCluster) -> Iterator[LedgerClient]:
    with LedgerClient(cluster.service_url) as client:
        yield client


def entry(ledger_id: int, entry_id: int, payload: bytes = b"hello") -> bytes:
    """One of a ledger whose payloads are all as long, each of one row."""
    counts = (entry_id - 1, (entry_id + 1) * len(payload), entry_id + 1, len(payload))
    header = EntryHeader(ledger_id, entry_id, *counts, payload_crc([payload]))
    return pack_header(header) + payload


def add(stub: BookieStub, bookie: LocalBookie, *entries: bytes, recovery: bool = False) -> list:
    adds = [pb.Add(entry=each, recovery=recovery) for each in entries]
    results = stub.Add(pb.AddRequest(bookie_id=bookie.id, adds=adds), timeout=TIMEOUT_S).results
    return [each.status for each in results]


def read(stub: BookieStub, bookie: LocalBookie, ledger_id: int, last: int) -> pb.ReadResponse:
    request = pb.ReadRequest(
        bookie_id=bookie.id, ledger_id=ledger_id, last_entry=last, max_bytes=1 << 20
    )
    return stub.Read(request, timeout=TIMEOUT_S)


def read_lac(stub: BookieStub, bookie: LocalBookie, ledger_id: int, **more) -> pb.ReadLacResponse:
    request = pb.ReadLacRequest(bookie_id=bookie.id, ledger_id=ledger_id, **more)
    return stub.ReadLac(request, timeout=TIMEOUT_S)


# -- what the stub can do --------------------------------------------------------------------------


def test_entries_added_by_the_plain_stub_are_read_by_it_and_by_our_own_client(cluster, client):
    ledger_id = client.create_ledger(3, 3, 2).ledger_id
    entries = [entry(ledger_id, 0, b"first"), entry(ledger_id, 1, b"later")]
    for bookie in cluster.bookies:
        with stub_of(bookie) as stub:
            assert add(stub, bookie, *entries) == [pb.OK, pb.OK]
            found = read(stub, bookie, ledger_id, 1)
            assert (found.status, found.stop) == (pb.OK, pb.END_OF_RANGE)
            assert [result.entry for result in found.results] == entries
    with client.open_ledger(ledger_id) as reader:
        assert [bytes(payload) for _, payload in reader.read(0, 1)] == [b"first", b"later"]


def test_the_last_add_confirmed_is_what_the_newest_entry_or_the_writer_says(cluster, client):
    bookie, ledger_id = cluster.bookies[0], client.create_ledger(3, 3, 2).ledger_id
    with stub_of(bookie) as stub:
        add(stub, bookie, entry(ledger_id, 0), entry(ledger_id, 1))
        assert read_lac(stub, bookie, ledger_id).last_add_confirmed == 0
        polling = stub.ReadLac.future(
            pb.ReadLacRequest(
                bookie_id=bookie.id, ledger_id=ledger_id, previous_lac=0, wait_ms=60_000
            ),
            timeout=TIMEOUT_S,
        )
        told = pb.WriteLacRequest(bookie_id=bookie.id, ledger_id=ledger_id, last_add_confirmed=1)
        assert stub.WriteLac(told, timeout=TIMEOUT_S).status == pb.OK
        assert polling.result().last_add_confirmed == 1
        assert read_lac(stub, bookie, ledger_id).last_add_confirmed == 1


@pytest.mark.parametrize("how", ["Read", "ReadLac"])
def test_a_fence_refuses_the_writer_and_lets_recovery_add(cluster, client, how):
    bookie, ledger_id = cluster.bookies[0], client.create_ledger(3, 3, 2).ledger_id
    with stub_of(bookie) as stub:
        assert add(stub, bookie, entry(ledger_id, 0)) == [pb.OK]
        assert not read_lac(stub, bookie, ledger_id).fenced
        request = getattr(pb, f"{how}Request")(bookie_id=bookie.id, ledger_id=ledger_id, fence=True)
        assert getattr(stub, how)(request, timeout=TIMEOUT_S).status == pb.OK
        assert read_lac(stub, bookie, ledger_id).fenced
        assert add(stub, bookie, entry(ledger_id, 1)) == [pb.FENCED]
        assert add(stub, bookie, entry(ledger_id, 1), recovery=True) == [pb.OK]


def test_a_bookie_answers_for_itself_and_for_no_other(cluster: LocalCluster):
    mine, other, _ = cluster.bookies
    with stub_of(mine) as stub:
        for asked in (mine.id, ""):
            answer = stub.Info(pb.InfoRequest(bookie_id=asked), timeout=TIMEOUT_S)
            assert (answer.status, answer.bookie_id, answer.state) == (pb.OK, mine.id, "writable")
            assert answer.total_bytes >= answer.free_bytes > 0
            assert answer.version == __version__
            assert sorted(each.role for each in answer.directories) == ["journal", "ledger"]
        wrong = stub.Info(pb.InfoRequest(bookie_id=other.id), timeout=TIMEOUT_S)
        assert wrong.status == pb.WRONG_BOOKIE


def test_how_a_ledger_stands_in_limbo_is_told(cluster, client):
    bookie, ledger_id = cluster.bookies[0], client.create_ledger(3, 3, 2).ledger_id
    with stub_of(bookie) as stub:
        add(stub, bookie, entry(ledger_id, 0))
        request = pb.ClearLimboRequest(bookie_id=bookie.id, ledger_id=ledger_id)
        answer = stub.ClearLimbo(request, timeout=TIMEOUT_S)
        assert (answer.status, answer.limbo) == (pb.OK, "")


def test_a_long_range_is_streamed_as_credit_allows_and_an_idle_stream_holds_up_no_stop():
    with (
        LocalCluster(bookies=1, autorecovery=False) as cluster,
        LedgerClient(cluster.service_url) as client,
    ):
        with client.create_ledger(1, 1, 1) as writer:
            for number in range(8):
                writer.append_async(bytes([number]) * 1000)
        bookie = cluster.bookies[0]
        read = pb.ReadRequest(
            bookie_id=bookie.id, ledger_id=writer.ledger_id, last_entry=7, max_bytes=2500
        )
        messages: queue.Queue[pb.ReadStreamRequest | None] = queue.Queue()
        messages.put(pb.ReadStreamRequest(read=read, credit_bytes=1))
        with stub_of(bookie) as stub:
            answers = stub.ReadStream(iter(messages.get, None), timeout=60)
            response = next(answers)
            assert (len(response.results), response.stop) == (1, pb.BYTE_LIMIT)
            messages.put(pb.ReadStreamRequest(credit_bytes=5000))
            payloads = [response.results[0].entry[64:]]
            while len(payloads) < 5:
                payloads += [result.entry[64:] for result in next(answers).results]
            assert payloads == [bytes([number]) * 1000 for number in range(len(payloads))]
            began = time.monotonic()
            bookie.stop()
            assert time.monotonic() - began < 8, "the stream waits for credit, the stop not for it"
            messages.put(None)


# -- what it is told when it is wrong --------------------------------------------------------------


def test_each_add_and_each_entry_has_a_status_of_its_own(cluster, client):
    bookie, ledger_id = cluster.bookies[0], client.create_ledger(3, 3, 2).ledger_id
    with stub_of(bookie) as stub:
        damaged = bytearray(entry(ledger_id, 1))
        damaged[-1] ^= 1
        adds = (entry(ledger_id, 0), bytes(damaged), entry(ledger_id, 0, b"other"))
        assert add(stub, bookie, *adds) == [pb.OK, pb.BAD_DIGEST, pb.CONFLICTING_ENTRY]
        found = read(stub, bookie, ledger_id, 1)
        assert found.status == pb.OK
        assert [result.status for result in found.results] == [pb.OK, pb.NO_SUCH_ENTRY]
        assert read(stub, bookie, 1 << 40, 0).status == pb.NO_SUCH_LEDGER


def test_without_the_token_of_a_ledger_with_a_password_nothing_is_told(cluster, client):
    bookie = cluster.bookies[0]
    ledger_id = client.create_ledger(3, 3, 2, password=PASSWORD).ledger_id
    with stub_of(bookie) as stub:
        assert add(stub, bookie, entry(ledger_id, 0)) == [pb.UNAUTHORIZED]
        assert read_lac(stub, bookie, ledger_id).status == pb.UNAUTHORIZED


def test_bytes_that_are_no_request_are_answered_and_the_bookie_goes_on(cluster: LocalCluster):
    bookie = cluster.bookies[0]
    with grpc.insecure_channel(bookie.address) as channel:
        answer = channel.unary_unary(f"/{SERVICE}/Read")(b"\xff\xff\xff", timeout=TIMEOUT_S)
        assert pb.ReadResponse.FromString(answer).status == pb.BAD_REQUEST
        assert BookieStub(channel).Info(pb.InfoRequest(), timeout=TIMEOUT_S).status == pb.OK


def test_a_method_that_there_is_not_is_an_error_of_grpc(cluster: LocalCluster):
    with grpc.insecure_channel(cluster.bookies[0].address) as channel:
        with pytest.raises(grpc.RpcError) as refused:
            channel.unary_unary(f"/{SERVICE}/Write")(b"", timeout=TIMEOUT_S)
        assert refused.value.code() is grpc.StatusCode.UNIMPLEMENTED


# -- what the server tells of itself ---------------------------------------------------------------


def test_a_bookie_tells_which_service_it_speaks_and_with_which_messages(cluster: LocalCluster):
    with grpc.insecure_channel(cluster.bookies[0].address) as channel:
        asked = [
            reflection_pb2.ServerReflectionRequest(list_services=""),
            reflection_pb2.ServerReflectionRequest(file_containing_symbol=SERVICE),
        ]
        stub = reflection_pb2_grpc.ServerReflectionStub(channel)
        listed, described = stub.ServerReflectionInfo(iter(asked), timeout=TIMEOUT_S)
    assert SERVICE in [service.name for service in listed.list_services_response.service]
    (file,) = described.file_descriptor_response.file_descriptor_proto
    told = FileDescriptorProto.FromString(file)
    assert file == pb.DESCRIPTOR.serialized_pb
    assert [method.name for method in told.service[0].method] == [
        *("Add", "Read", "ReadStream", "ReadLac", "WriteLac", "ClearLimbo", "Info", "Stored")
    ]
