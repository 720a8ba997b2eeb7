"""The broker as a process: it listens, serves until told to stop, and leaves in good order."""

import asyncio
import contextlib
import gc
import json
import logging
import os
import random
import signal
from collections.abc import Awaitable, Iterator

from spark_ledger.broker.broker import Broker, BrokerSettings
from spark_ledger.broker.connection import Connection
from spark_ledger.broker.http_lookup import HEAD_BYTES_MAX, HttpLookup
from spark_ledger.broker.requests import refusal_of
from spark_ledger.config import client_config
from spark_ledger.errors import BadConfig
from spark_ledger.process import connect, end_with_parent

PORT, ADMIN_PORT = 6650, 8080
SESSION_TIMEOUT_S = 10.0
GC_THRESHOLDS = 50_000, 20, 100
"""Each message that is kept is objects, none of which are in a cycle: by Python's own thresholds a
quarter of the time of a lone message went into looking for some."""


class BrokerServer:
    """A broker and the ports that it listens on."""

    def __init__(
        self, broker: Broker, servers: list[asyncio.Server], url: str, admin_url: str
    ) -> None:
        self.broker = broker
        self.url = url
        self.admin_url = admin_url
        self._servers = servers
        self._connections: dict[Connection, None] = {}

    @staticmethod
    async def start(
        service_url: str,
        *,
        host: str = "127.0.0.1",
        port: int = PORT,
        admin_port: int = ADMIN_PORT,
        advertised_host: str | None = None,
        settings: BrokerSettings | None = None,
    ) -> "BrokerServer":
        """Listen, then register. A port of 0: a free one. Raises errors.BadConfig (a port is
        taken, the URL is malformed), errors.Unavailable."""
        config = client_config(service_url=service_url, session_timeout_s=SESSION_TIMEOUT_S)
        made: list[BrokerServer] = []

        def accept() -> Connection:
            server = made[0]
            one = Connection(server.broker, lambda gone: server._connections.pop(gone, None))
            server._connections[one] = None
            return one

        def ask(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> Awaitable[None]:
            return HttpLookup(made[0].broker, refusal_of).serve(reader, writer)

        loop = asyncio.get_running_loop()
        listening: list[asyncio.Server] = []
        try:
            with _taken(host, port, "--broker-port"):
                listening.append(await loop.create_server(accept, host, port, start_serving=False))
            with _taken(host, admin_port, "--admin-port"):
                asked = asyncio.start_server(
                    ask, host, admin_port, limit=HEAD_BYTES_MAX, start_serving=False
                )
                listening.append(await asked)
            number, admin = (one.sockets[0].getsockname()[1] for one in listening)
            shown = advertised_host or host
            url, admin_url = f"pulsar://{shown}:{number}", f"http://{shown}:{admin}"
            ledgers = await connect(service_url, config)
            broker = Broker(ledgers, random.Random(os.urandom(16)), url, settings)
            made.append(BrokerServer(broker, listening, url, admin_url))
            await broker.start()
        except BaseException:
            for one in listening:
                one.close()
            raise
        for one in listening:
            await one.start_serving()
        return made[0]

    async def close(self) -> None:
        """Take no more, store what waits, and end."""
        await self.broker.seal()
        for one in self._servers:
            one.close()  # from now on others take over
        await self.broker.close()
        await asyncio.gather(*(one.close_and_wait() for one in list(self._connections)))
        await self.broker.client.ledgers.close()


@contextlib.contextmanager
def _taken(host: str, port: int, flag: str) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise BadConfig(
            f"the broker cannot listen on {host}:{port}: {error.strerror}",
            f"Stop what uses the port, or give another with {flag}.",
        ) from None


def serve(
    service_url: str,
    *,
    host: str,
    port: int,
    admin_port: int,
    advertised_host: str | None,
    settings: BrokerSettings,
    parent_pipe: bool = False,
) -> None:
    """Serve in this process until SIGTERM or SIGINT; says in a line of JSON where. `parent_pipe`:
    it ends when its standard input is closed. Raises as BrokerServer.start."""
    logging.basicConfig(level="INFO", format="%(asctime)s %(levelname)s %(message)s")
    if parent_pipe:
        end_with_parent()

    async def work() -> None:
        server = await BrokerServer.start(
            service_url,
            host=host,
            port=port,
            admin_port=admin_port,
            advertised_host=advertised_host,
            settings=settings,
        )
        gc.freeze()
        gc.set_threshold(*GC_THRESHOLDS)
        stop = asyncio.Event()
        for number in (signal.SIGTERM, signal.SIGINT):
            asyncio.get_running_loop().add_signal_handler(number, stop.set)
        print(json.dumps({"broker_url": server.url, "admin_url": server.admin_url}), flush=True)
        try:
            await stop.wait()
        finally:
            with contextlib.suppress(asyncio.CancelledError):
                await server.close()

    asyncio.run(work())
