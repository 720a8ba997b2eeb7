"""The broker as a process: it listens, serves until a signal stops it, and leaves in good order."""

import asyncio
import contextlib
import gc
import json
import logging
import os
import random
import signal
from collections.abc import Callable, Iterator

from spark_ledger import http, net
from spark_ledger.broker.broker import Broker
from spark_ledger.broker.serve.connection import Connection
from spark_ledger.broker.serve.routes import routes
from spark_ledger.broker.settings import BrokerSettings
from spark_ledger.config import client_config
from spark_ledger.errors import BadConfig
from spark_ledger.process import connect, end_with_parent

GC_THRESHOLDS = 50_000, 20, 100
"""How seldom Python's garbage collector runs. The messages in memory are in no cycle of objects;
with Python's own thresholds the collector took a quarter of the time of a lone message."""


def serve(service_url: str, settings: BrokerSettings, *, parent_pipe: bool = False) -> None:
    """Listen, register, and serve in this process until SIGTERM or SIGINT. Prints the broker's
    addresses as a line of JSON. `parent_pipe`: end when the standard input is closed. Raises
    errors.BadConfig (a port is taken, the URL is malformed), errors.Unavailable."""
    logging.basicConfig(level="INFO", format="%(asctime)s %(levelname)s %(message)s")
    net.raise_descriptor_limit()
    if parent_pipe:
        end_with_parent()
    asyncio.run(_serve(service_url, settings))


async def _serve(service_url: str, settings: BrokerSettings) -> None:
    broker: Broker
    connections: dict[Connection, None] = {}

    def accept() -> Connection:
        connection = Connection(broker, lambda closed: connections.pop(closed, None))
        connections[connection] = None
        return connection

    settings = settings.model_copy(update={"service_url": service_url})
    config = client_config(service_url=service_url, session_timeout_s=settings.session_timeout_s)
    loop, stop = asyncio.get_running_loop(), asyncio.Event()
    host, public_host = settings.host, settings.advertised_host or settings.host
    client_listener = await _listener(host, settings.broker_port, "--broker-port", accept)
    admin = await http.protocol_of(routes(lambda: broker, settings))
    admin_listener = await _listener(host, settings.admin_port, "--admin-port", admin)
    url = f"pulsar://{net.join(public_host, client_listener.port)}"
    admin_url = f"http://{net.join(public_host, admin_listener.port)}"
    ledgers = await connect(service_url, config)
    broker = Broker(ledgers, random.Random(os.urandom(16)), url, settings)
    broker.ownership.membership.admin_url = admin_url
    broker.watch.on_failure = stop.set

    def listen() -> None:
        with _port_errors(host, client_listener.port, "--broker-port"):
            client_listener.start()
        with _port_errors(host, admin_listener.port, "--admin-port"):
            admin_listener.start()

    await broker.start(listen)
    gc.freeze()
    gc.set_threshold(*GC_THRESHOLDS)
    for signal_number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(signal_number, stop.set)
    print(json.dumps({"broker_url": url, "admin_url": admin_url}), flush=True)
    await stop.wait()
    await broker.seal()
    client_listener.close()  # from now on other brokers take over
    admin_listener.close()
    await broker.close()
    await asyncio.gather(*(connection.close_and_wait() for connection in list(connections)))
    await ledgers.close()
    if broker.watch.failure is not None:
        raise broker.watch.failure


async def _listener(
    host: str, port: int, flag: str, protocol: Callable[[], asyncio.BaseProtocol]
) -> net.Listener:
    """A listener on the port; it takes connections after its `start`. Raises errors.BadConfig."""
    with _port_errors(host, port, flag):
        return net.Listener(await net.bound(host.strip("[]"), port), net.served_by(protocol))


@contextlib.contextmanager
def _port_errors(host: str, port: int, flag: str) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise BadConfig(
            f"the broker cannot listen on {net.join(host, port)}: {error.strerror}",
            f"Stop what uses the port, or give another with {flag}.",
        ) from None
