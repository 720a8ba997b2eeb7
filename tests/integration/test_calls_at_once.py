"""However many call, a bookie has so many calls under way in gRPC and no more."""

import asyncio

import grpc
import pytest

from bookie_server.bookie import LONG_POLLS_MAX
from bookie_server.serve import gateway as service
from bookie_server.serve.handler import EncodedResponse

METHOD = f"/{service.SERVICE}/ReadLac"
TIMEOUT_S = 20


def test_beyond_the_calls_that_grpc_may_have_under_way_it_refuses_at_once(monkeypatch):
    answering = asyncio.Event()

    async def answer(bookie, method, request):
        await answering.wait()
        return EncodedResponse([b"done"], 4, lambda: None)

    async def main():
        served = service.BookieService(object(), 1 << 20)
        port = await served.start("127.0.0.1:0")
        async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
            call = channel.unary_unary(METHOD)
            waiting = [asyncio.ensure_future(call(b"", timeout=TIMEOUT_S)) for _ in range(3)]
            with pytest.raises(grpc.aio.AioRpcError) as refused:
                await asyncio.gather(*waiting)
            assert refused.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
            answering.set()
            outcomes = await asyncio.gather(*waiting, return_exceptions=True)
            assert outcomes.count(b"done") == 2
            assert await call(b"", timeout=TIMEOUT_S) == b"done", "there is room again"
        await served.stop(0)

    monkeypatch.setattr(service, "CALLS_MAX", 2)
    monkeypatch.setattr(service, "respond", answer)
    asyncio.run(main())


def test_long_polls_leave_calls_to_others():
    assert service.CALLS_MAX >= 2 * LONG_POLLS_MAX
