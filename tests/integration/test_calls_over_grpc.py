"""A bookie behind real gRPC: what stays of calls whose caller went away, and until when replies
count. The bookie's disks are simulated; the loop and the network are not."""

import asyncio
import os
import signal
import sys

import grpc
import pytest

from bookie_server import bookie as bookie_module
from bookie_server.api import bookie_pb2 as pb
from bookie_server.api import codec
from bookie_server.api import messages as m
from bookie_server.api.status import Status
from bookie_server.serve.gateway import SERVICE, BookieService
from tests.kit.bookie_pb2_grpc import BookieStub
from tests.kit.waiting import until
from tests.unit.bookie_server.node import ID, KIB, Node, entry

PATIENCE_S = 20
POLLS = 200


def over_grpc(test):
    async def main():
        node = await Node().start()
        await node.create_ledger(1)
        await node.add(*[entry(1, e, bytes(60 * KIB)) for e in range(3)])
        service = BookieService(node.bookie, 32 << 20)
        port = await service.start("127.0.0.1:0")
        try:
            await test(node, f"127.0.0.1:{port}")
        finally:
            await service.stop(0)
            node.bookie.abandon()

    asyncio.run(main())


def poll(channel):
    request = m.ReadLacRequest(ID, 1, previous_lac=9, wait_ms=60_000)
    return channel.unary_unary(f"/{SERVICE}/ReadLac")(codec.encode(request))


@pytest.mark.parametrize("how", ["cancelled", "disconnected"])
def test_long_polls_cost_no_thread_and_leave_nothing_when_their_caller_goes_away(how):
    async def test(node, address):
        handle = await node.handles.meet(1)
        channel = grpc.aio.insecure_channel(address)
        calls = [poll(channel) for _ in range(POLLS)]
        await until(lambda: node.bookie.long_polls == POLLS)
        assert handle.waiter_count == POLLS
        if how == "cancelled":
            for call in calls:
                call.cancel()
        else:
            await channel.close()
        await until(lambda: node.bookie.long_polls == 0)
        assert handle.waiter_count == 0
        await until(lambda: node.bookie.under_way == 0)
        await until(lambda: node.bookie.received.used == 0)
        await channel.close()

    over_grpc(test)


def waiting_request(wait_ms):
    return pb.ReadLacRequest(bookie_id=ID, ledger_id=1, previous_lac=9, wait_ms=wait_ms)


def test_a_thousand_polls_cancelled_timed_out_or_answered_leave_no_waiter_at_the_bookie():
    async def test(node, address):
        handle = await node.handles.meet(1)
        async with grpc.aio.insecure_channel(address) as channel:
            ask = BookieStub(channel).ReadLac
            cancelled = [ask(waiting_request(100_000), timeout=100) for _ in range(400)]
            await until(lambda: handle.waiter_count == 400)
            timed_out = [ask(waiting_request(100_000), timeout=7) for _ in range(300)]
            answered = [ask(waiting_request(7_000), timeout=100) for _ in range(300)]
            await until(lambda: handle.waiter_count == 1000)
            for call in cancelled:
                call.cancel()
            assert {await call.code() for call in timed_out} == {grpc.StatusCode.DEADLINE_EXCEEDED}
            assert {(await call).status for call in answered} == {pb.OK}
            await until(lambda: handle.waiter_count == 0)

    over_grpc(test)


def test_polls_of_a_process_that_was_killed_leave_no_waiter_at_the_bookie():
    async def test(node, address):
        handle = await node.handles.meet(1)
        request = waiting_request(50_000).SerializeToString()
        asker = await asyncio.create_subprocess_exec(
            *(sys.executable, "-c", ASKER, address, request.hex())
        )
        await until(lambda: handle.waiter_count == 50)
        os.kill(asker.pid, signal.SIGKILL)
        await asker.wait()
        await until(lambda: handle.waiter_count == 0)

    over_grpc(test)


ASKER = """
import sys, time
import grpc
from bookie_server.api.bookie_pb2 import ReadLacRequest
from tests.kit.bookie_pb2_grpc import BookieStub
ask = BookieStub(grpc.insecure_channel(sys.argv[1])).ReadLac
request = ReadLacRequest.FromString(bytes.fromhex(sys.argv[2]))
calls = [ask.future(request) for _ in range(50)]
time.sleep(100)
"""


def test_long_polls_beyond_their_number_are_busy_and_other_calls_are_not(monkeypatch):
    monkeypatch.setattr(bookie_module, "LONG_POLLS_MAX", 10)

    async def test(node, address):
        async with grpc.aio.insecure_channel(address) as channel:
            calls = [poll(channel) for _ in range(10)]
            await until(lambda: node.bookie.long_polls == 10)
            refused = codec.decode_response("ReadLac", await poll(channel))
            assert refused.status is Status.BUSY
            assert refused.retry_after_ms > 0
            request = codec.encode(m.ReadLacRequest(ID, 1))
            answer = await channel.unary_unary(f"/{SERVICE}/ReadLac")(request)
            assert codec.decode_response("ReadLac", answer).status is Status.OK
            await node.add(entry(1, 3, lac=10))
            for call in calls:
                assert codec.decode_response("ReadLac", await call).last_add_confirmed == 10
            assert node.bookie.long_polls == 0

    over_grpc(test)


def test_a_reply_counts_until_grpc_has_sent_it():
    async def test(node, address):
        seen = []
        take = node.bookie.responses.take
        node.bookie.responses.take = lambda count, *who: (take(count, *who), seen.append(count))[0]
        async with grpc.aio.insecure_channel(address) as channel:
            request = codec.encode(m.ReadRequest(ID, 1, 0, 2, 1 << 20))
            answer = await channel.unary_unary(f"/{SERVICE}/Read")(request)
            assert len(answer) in seen
            await until(lambda: node.bookie.responses.used == 0)

    over_grpc(test)


def test_before_the_bookie_is_ready_info_says_so_and_everything_else_is_unavailable():
    async def test(node, address):
        service = BookieService(None, 32 << 20)
        port = await service.start("127.0.0.1:0")
        async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
            stub = BookieStub(channel)
            assert (await stub.Info(pb.InfoRequest())).state == "starting"
            stream = stub.ReadStream(iter([pb.ReadStreamRequest(credit_bytes=1)]))
            for call in (stub.ReadLac(waiting_request(0)), stream.read()):
                with pytest.raises(grpc.aio.AioRpcError, match="the bookie is starting") as refused:
                    await call
                assert refused.value.code() is grpc.StatusCode.UNAVAILABLE
            service.serve(node.bookie)
            assert (await stub.ReadLac(waiting_request(0))).status == pb.OK
        await service.stop(0)

    over_grpc(test)


def test_a_request_under_way_when_the_service_stops_gets_its_answer():
    async def test(node, address):
        node.journal_disk.faults.sync_s = (0.5, 0.5)
        service = BookieService(node.bookie, 32 << 20)
        port = await service.start("127.0.0.1:0")
        async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
            add = codec.encode(m.AddRequest(ID, [m.Add([entry(1, 3)])]))
            call = channel.unary_unary(f"/{SERVICE}/Add")(add)
            polling = channel.unary_unary(f"/{SERVICE}/ReadLac")(
                codec.encode(m.ReadLacRequest(ID, 1, previous_lac=9, wait_ms=60_000))
            )
            await until(lambda: node.bookie.under_way == 2)
            stopping = asyncio.ensure_future(node.bookie.stop())
            await service.stop(PATIENCE_S)
            await stopping
            assert codec.decode_response("Add", await call).results[0].status is Status.OK
            assert codec.decode_response("ReadLac", await polling).status is Status.OK

    over_grpc(test)
