"""What becomes of a call whose connection goes: CallFailed, never a cancellation."""

import asyncio
import os
import subprocess
import sys

import grpc
import pytest

from spark_ledger.bookies.grpc_network import SERVICE, GrpcNetwork
from spark_ledger.bookies.network import CallFailed
from spark_ledger.errors import Unavailable


async def a_call_that_is_never_answered(then):
    """Run `then(network, the task of the call)` while a bookie lets a call wait."""
    arrived = asyncio.Event()

    async def wait(_request, _context):
        arrived.set()
        await asyncio.sleep(60)

    server = grpc.aio.server()
    methods = {"Read": grpc.unary_unary_rpc_method_handler(wait)}
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(SERVICE, methods),))
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    network = GrpcNetwork()
    try:
        calling = asyncio.ensure_future(network.call(f"127.0.0.1:{port}", "Read", b"", 30))
        await asyncio.wait_for(arrived.wait(), 20)
        await then(network, calling)
    finally:
        await network.close()
        await server.stop(0)


def test_a_call_under_way_fails_when_its_connection_is_given_up():
    async def then(network, calling):
        await network.close()
        with pytest.raises(CallFailed):
            await calling

    asyncio.run(a_call_that_is_never_answered(then))


def test_a_call_that_its_caller_cancels_is_cancelled():
    async def then(_network, calling):
        calling.cancel()
        with pytest.raises(asyncio.CancelledError):
            await calling

    asyncio.run(a_call_that_is_never_answered(then))


def test_a_process_forked_after_connecting_is_refused_instead_of_hanging():
    GrpcNetwork()
    child = os.fork()
    if child == 0:
        try:
            GrpcNetwork()
        except Unavailable:
            os._exit(0)
        os._exit(1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


FORKS = """
import asyncio, os
from spark_ledger.bookies.forks import refuse_after_fork
from spark_ledger.config import client_config
from spark_ledger.errors import Unavailable
from spark_ledger.ledger.connect import connect
refuse_after_fork()
child = os.fork()
try:
    asyncio.run(connect("zk://127.0.0.1:1/nobody", client_config(connect_timeout_s=0.01)))
except Unavailable as error:
    refused = "forked" in str(error)
if not child:
    os._exit(10 + refused)
assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 11
assert not refused
"""


def test_a_process_forked_after_connecting_is_refused_before_it_connects():
    subprocess.run([sys.executable, "-c", FORKS], check=True, timeout=60)


def test_a_network_that_was_closed_makes_no_new_connection():
    async def then(network, calling):
        await network.close()
        await asyncio.gather(calling, return_exceptions=True)
        for method in ("Read", "Info"):
            with pytest.raises(CallFailed, match="closed"):
                await network.call("127.0.0.1:1", method, b"", 5)

    asyncio.run(a_call_that_is_never_answered(then))
