"""A bookie as a client in any language meets it: plain gRPC and what the server tells of itself."""

import queue
import time

import grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc

from bookie_server.api import codec
from bookie_server.api.messages import InfoRequest, InfoResponse, ReadRequest, ReadStreamRequest
from bookie_server.api.status import Status, StopReason
from spark_ledger import LedgerClient
from spark_ledger.local import LocalCluster

SERVICE = "spark_ledger.bookie.v1.Bookie"
TIMEOUT_S = 20


def test_a_bookie_tells_which_service_it_speaks(cluster: LocalCluster):
    with grpc.insecure_channel(cluster.bookies[0].address) as channel:
        ask = reflection_pb2.ServerReflectionRequest(list_services="")
        stub = reflection_pb2_grpc.ServerReflectionStub(channel)
        (answer,) = stub.ServerReflectionInfo(iter([ask]), timeout=TIMEOUT_S)
    assert SERVICE in [service.name for service in answer.list_services_response.service]


def info(address: str, bookie_id: str) -> InfoResponse:
    with grpc.insecure_channel(address) as channel:
        call = channel.unary_unary(f"/{SERVICE}/Info")
        answer = call(codec.encode(InfoRequest(bookie_id)), timeout=TIMEOUT_S)
    return codec.decode_response("Info", answer)


def test_a_bookie_answers_for_itself_and_for_no_other(cluster: LocalCluster):
    mine, other, _ = cluster.bookies
    answer = info(mine.address, mine.id)
    assert (answer.status, answer.bookie_id) == (Status.OK, mine.id)
    assert answer.total_bytes >= answer.free_bytes > 0
    assert info(mine.address, other.id).status is Status.WRONG_BOOKIE


def test_bytes_that_are_no_request_are_answered_and_the_bookie_goes_on(cluster: LocalCluster):
    bookie = cluster.bookies[0]
    with grpc.insecure_channel(bookie.address) as channel:
        answer = channel.unary_unary(f"/{SERVICE}/Read")(b"\xff\xff\xff", timeout=TIMEOUT_S)
    assert codec.decode_response("Read", answer).status is Status.BAD_REQUEST
    assert info(bookie.address, bookie.id).status is Status.OK


def test_a_long_range_is_streamed_as_credit_allows_and_an_idle_stream_holds_up_no_stop():
    with LocalCluster(bookies=1) as cluster, LedgerClient(cluster.service_url) as client:
        with client.create_ledger(1, 1, 1) as writer:
            for number in range(8):
                writer.append_async(bytes([number]) * 1000)
        bookie = cluster.bookies[0]
        read = ReadRequest(bookie.id, writer.ledger_id, 0, 7, 2500)
        messages: queue.Queue[bytes] = queue.Queue()
        messages.put(codec.encode(ReadStreamRequest(read, 1)))
        with grpc.insecure_channel(bookie.address) as channel:
            call = channel.stream_stream(f"/{SERVICE}/ReadStream")
            answers = call(iter(messages.get, None), timeout=60)
            response = codec.decode_response("Read", next(answers))
            assert (len(response.results), response.stop) == (1, StopReason.BYTE_LIMIT)
            messages.put(codec.encode(ReadStreamRequest(credit_bytes=5000)))
            payloads = [bytes(response.results[0].entry[64:])]
            while len(payloads) < 5:
                response = codec.decode_response("Read", next(answers))
                payloads += [bytes(result.entry[64:]) for result in response.results]
            assert payloads == [bytes([number]) * 1000 for number in range(len(payloads))]
            began = time.monotonic()
            bookie.stop()
            assert time.monotonic() - began < 8, "the stream waits for credit, the stop not for it"
            messages.put(None)
