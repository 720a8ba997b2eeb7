"""Asking a bookie for its id, as one that starts on a copy of its directories does."""

import asyncio

import pytest

from bookie_server.serve import registration
from spark_ledger.local.cluster import LocalCluster


def test_a_bookie_says_its_id_at_its_port_of_frames(cluster: LocalCluster):
    bookie = cluster.bookies[0]
    assert asyncio.run(registration.who_is(bookie.frames)) == bookie.id


def test_whatever_else_is_there_is_no_bookie(cluster: LocalCluster):
    at = cluster.bookies[0].address  # gRPC is served there
    for address in (at, "127.0.0.1:1", "127.0.0.1", "", "localhost:http"):
        assert asyncio.run(registration.who_is(address)) == "", address


@pytest.mark.parametrize("said", [b"", b"SLF1 and then nothing", b"\0" * 64])
def test_a_server_that_is_silent_or_speaks_something_else_is_no_bookie(said, monkeypatch):
    monkeypatch.setattr(registration, "RESPONSE_S", 0.2)

    async def act() -> str:
        async def speak(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            writer.write(said)
            await reader.read()
            writer.close()

        server = await asyncio.start_server(speak, "127.0.0.1", 0)
        async with server:
            host, port = server.sockets[0].getsockname()
            return await registration.who_is(f"{host}:{port}")

    assert asyncio.run(act()) == ""
