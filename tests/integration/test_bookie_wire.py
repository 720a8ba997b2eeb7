"""A bookie as a client in any language meets it: plain gRPC and what the server tells of itself."""

import grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc

from bookie_server.api import codec
from bookie_server.api.messages import InfoRequest, InfoResponse
from bookie_server.api.status import Status
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
