"""Hosts and ports as text, and a listener that leaves descriptors to the rest of its process."""

import asyncio
import errno
import logging
import os
import resource
import socket
import subprocess
import sys

import pytest

from spark_ledger import net
from tests.kit.waiting import until


@pytest.mark.parametrize(
    ("text", "host", "port"),
    [
        ("localhost:6650", "localhost", 6650),
        ("10.0.0.1:0", "10.0.0.1", 0),
        ("[::1]:6650", "::1", 6650),
        ("[fe80::1%eth0]:65535", "fe80::1%eth0", 65535),
    ],
)
def test_an_address_is_split_and_joined_again(text, host, port):
    assert net.split(text) == (host, port)
    assert net.join(host, port) == text
    assert net.join(net.bracketed(host), port) == text
    assert net.split_url(f"pulsar://{text}") == (host, port)


@pytest.mark.parametrize(
    "text",
    ["", "host", "host:", ":1", "::1:6650", "host:x", "host:65536", "host:-1", "host:١", "[::1]"],
)
def test_what_is_no_host_and_port_is_refused(text):
    with pytest.raises(ValueError, match="port"):
        net.split(text)


def test_a_host_without_a_port_has_none():
    assert net.parse("[::1]") == ("::1", None)
    assert net.parse("node-1.example") == ("node-1.example", None)


def test_a_fifth_of_the_descriptors_is_kept_and_more_where_files_need_it():
    assert net.accepted_below(1000) == 800
    assert net.accepted_below(1000, files=300) == 700
    assert net.accepted_below(1000, files=100) == 800
    assert net.accepted_below(1000, files=900) == 500
    assert net.accepted_below(1 << 20, files=512) == int((1 << 20) * 0.8)


def test_a_process_raises_its_limit_as_far_as_it_may():
    code = (
        "import resource; from spark_ledger import net;"
        "resource.setrlimit(resource.RLIMIT_NOFILE, (256, 2048));"
        "print(net.raise_descriptor_limit(), resource.getrlimit(resource.RLIMIT_NOFILE))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split("\n")[0] == "2048 (2048, 2048)"


@pytest.fixture
def few_descriptors():
    """A limit below which 60 are free, whichever are in use."""
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    in_use = {int(number) for number in os.listdir("/proc/self/fd")}
    limit = next(n for n in range(before[0]) if len(set(range(n)) - in_use) == 60)
    resource.setrlimit(resource.RLIMIT_NOFILE, (limit, before[1]))
    yield limit
    resource.setrlimit(resource.RLIMIT_NOFILE, before)


def test_a_listener_stops_at_its_share_says_so_once_and_goes_on_when_connections_end(
    few_descriptors, monkeypatch, caplog
):
    monkeypatch.setattr(net, "AGAIN_S", 0.01)
    monkeypatch.setattr(net, "accepted_below", lambda limit, files: limit - 30)

    async def main():
        taken = []
        listener = net.Listener(await net.bound("127.0.0.1", 0), taken.append)
        listener.start()
        callers = []

        async def call():
            caller = socket.socket()
            caller.setblocking(False)
            await asyncio.get_running_loop().sock_connect(caller, ("127.0.0.1", listener.port))
            callers.append(caller)

        for _ in range(25):
            await call()
        await asyncio.sleep(0.1)
        assert len(taken) < 25, "each connection is two descriptors here"
        assert max(sock.fileno() for sock in taken) <= few_descriptors - 30 + len(callers)
        os.close(os.dup(0))  # the rest of the process goes on
        assert [record.levelno for record in caplog.records] == [logging.WARNING]
        for sock in [*taken, *callers]:
            sock.close()
        taken.clear()
        async with asyncio.timeout(5):
            while not taken:
                await call()
                await asyncio.sleep(0.02)
        for sock in [*taken, *callers]:
            sock.close()
        listener.close()

    with caplog.at_level(logging.WARNING):
        asyncio.run(main())


def test_a_listener_without_a_descriptor_does_not_spin(few_descriptors, monkeypatch):
    monkeypatch.setattr(net, "accepted_below", lambda limit, files: limit)
    accept, tries = net.Listener._accept, []

    def counted(self, sock):
        tries.append(sock)
        accept(self, sock)

    monkeypatch.setattr(net.Listener, "_accept", counted)

    async def main():
        listener = net.Listener(await net.bound("127.0.0.1", 0), lambda sock: sock.close())
        listener.start()
        caller = socket.create_connection(("127.0.0.1", listener.port))
        spare = []
        with pytest.raises(OSError, match="open files"):
            while True:
                spare.append(os.dup(0))
        await asyncio.sleep(0.2)
        assert len(tries) == 1
        for number in spare:
            os.close(number)
        caller.close()
        listener.close()

    asyncio.run(main())


@pytest.mark.parametrize("host", ["127.0.0.1", "localhost", "::1"])
def test_all_addresses_of_a_host_are_served_on_one_port(host):
    async def main():
        listener = net.Listener(await net.bound(host, 0), lambda sock: sock.close())
        with pytest.raises(ConnectionRefusedError):
            await asyncio.open_connection(host, listener.port)
        listener.start()
        reader, writer = await asyncio.open_connection(host, listener.port)
        assert await reader.read() == b""
        writer.close()
        with pytest.raises(OSError, match="in use"):
            await net.bound(host, listener.port)
        listener.close()

    asyncio.run(main())


def test_a_dial_reaches_a_listener_by_its_address_or_its_url_and_closes_what_it_gave_up():
    async def run():
        accepted = []
        listener = net.Listener(await net.bound("127.0.0.1", 0), accepted.append)
        with pytest.raises(ConnectionRefusedError):  # bound, but not listening yet
            await net.dial(f"127.0.0.1:{listener.port}")
        listener.start()
        sock = await net.dial(f"127.0.0.1:{listener.port}")
        _, writer = await net.dial_streams(f"pulsar://127.0.0.1:{listener.port}/")
        await until(lambda: len(accepted) == 2)
        assert net.ends_where_it_begins(sock)
        assert not net.is_free("127.0.0.1", listener.port)
        sock.close()
        writer.close()
        for taken in accepted:
            taken.close()
        listener.close()

    asyncio.run(run())


@pytest.mark.parametrize("address", ["", "host", "::1:80", "http://", f"{'a' * 64}.example:80"])
def test_a_dial_of_what_is_no_address_fails_as_a_refused_one_does(address):
    with pytest.raises(OSError, match="is no address"):
        asyncio.run(net.dial(address))


def test_a_dial_ends_within_its_deadline(monkeypatch):
    async def never(*_):
        await asyncio.Event().wait()

    async def run():
        monkeypatch.setattr(asyncio.get_running_loop(), "sock_connect", never)
        with pytest.raises(TimeoutError):
            await net.dial("127.0.0.1:1", within_s=0.01)

    asyncio.run(run())


def addressed(monkeypatch, *addresses):
    """Each host has these addresses, (family, where), in this order."""

    async def found(*_, **__):
        return [(family, socket.SOCK_STREAM, 0, "", where) for family, where in addresses]

    monkeypatch.setattr(asyncio.get_running_loop(), "getaddrinfo", found)


def test_a_dial_passes_over_an_address_of_a_family_that_the_system_lacks(monkeypatch):
    class WithoutIpv6(socket.socket):
        def __init__(self, family=-1, *others, **named):
            if family == socket.AF_INET6:
                raise OSError(errno.EAFNOSUPPORT, "Address family not supported by protocol")
            super().__init__(family, *others, **named)

    async def run():
        listener = net.Listener(await net.bound("127.0.0.1", 0), lambda sock: sock.close())
        listener.start()
        ipv6, ipv4 = ("::1", listener.port), ("127.0.0.1", listener.port)
        monkeypatch.setattr(socket, "socket", WithoutIpv6)
        addressed(monkeypatch, (socket.AF_INET6, ipv6), (socket.AF_INET, ipv4))
        (await net.dial(f"here:{listener.port}")).close()
        listener.close()

    asyncio.run(run())


def test_a_dial_is_refused_only_if_each_address_refuses(monkeypatch):
    """A probe takes a refusal for the end of the process."""

    async def run():
        unreachable, refusing = ("10.0.0.1", 1), ("127.0.0.1", 1)

        async def connect(_, where):
            if where == unreachable:
                raise OSError(errno.EHOSTUNREACH, "No route to host")
            raise ConnectionRefusedError

        monkeypatch.setattr(asyncio.get_running_loop(), "sock_connect", connect)
        for first, last in ((unreachable, refusing), (refusing, unreachable)):
            addressed(monkeypatch, (socket.AF_INET, first), (socket.AF_INET, last))
            with pytest.raises(OSError, match="No route to host"):
                await net.dial("here:1")
        addressed(monkeypatch, (socket.AF_INET, refusing), (socket.AF_INET, refusing))
        with pytest.raises(ConnectionRefusedError):
            await net.dial("here:1")

    asyncio.run(run())
