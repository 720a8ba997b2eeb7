"""`spark-ledger broker start|list`."""

import asyncio
from typing import Annotated

import typer

from spark_ledger.cli.common import App, JsonOption, UrlOption, print_json, print_table
from spark_ledger.config import resolve_service_url

app = App(help="The broker: Pulsar's clients write and read topics.", no_args_is_help=True)
PORT, ADMIN_PORT = 6650, 8080  # as broker/server.py, which takes a while to import


@app.command()
def start(
    broker_port: Annotated[
        int, typer.Option(help="Where it listens; 0: a free port.", min=0, max=65535)
    ] = PORT,
    admin_port: Annotated[
        int,
        typer.Option(help="Where it answers lookups by HTTP; 0: a free port.", min=0, max=65535),
    ] = ADMIN_PORT,
    host: Annotated[str, typer.Option(help="The address it listens on.")] = "127.0.0.1",
    advertised_host: Annotated[
        str | None, typer.Option(help="What clients are told to connect to; else --host.")
    ] = None,
    auto_create: Annotated[
        bool, typer.Option(help="Make a topic that a client names and that is not there.")
    ] = True,
    auto_create_partitions: Annotated[
        int, typer.Option(help="With so many partitions; 0: one that is not partitioned.", min=0)
    ] = 0,
    parent_pipe: Annotated[
        bool, typer.Option("--parent-pipe", help="End when standard input is closed.")
    ] = False,
    service_url: UrlOption = None,
) -> None:
    """Serve Pulsar's clients in this process, until it is told to stop."""
    from spark_ledger.broker.broker import BrokerSettings
    from spark_ledger.broker.server import serve

    serve(
        resolve_service_url(service_url),
        host=host,
        port=broker_port,
        admin_port=admin_port,
        advertised_host=advertised_host,
        settings=BrokerSettings(auto_create, auto_create_partitions),
        parent_pipe=parent_pipe,
    )


@app.command("list")
def list_them(json: JsonOption = False, service_url: UrlOption = None) -> None:
    """The brokers that are alive, where clients reach them, and how many chunked messages their
    producers left incomplete since they started."""
    found = asyncio.run(alive(resolve_service_url(service_url)))
    if json:
        print_json(found)
    else:
        heads = ("BROKER", "URL", "INCOMPLETE MESSAGES")
        print_table(heads, [tuple(one.values()) for one in found], "no brokers")


async def alive(service_url: str) -> list[dict[str, str | int]]:
    """Brokers by `id`, `url` and `incomplete_messages`. Raises Unavailable."""
    from spark_ledger.broker.owner.ownership import brokers_alive
    from spark_ledger.metadata.zookeeper import connect

    store = await connect(service_url, make_root=False)
    try:
        found = await brokers_alive(store)
        return [
            {"id": one, "url": said["url"], "incomplete_messages": said.get("incomplete", 0)}
            for one, said in sorted(found.items())
        ]
    finally:
        await store.close()
