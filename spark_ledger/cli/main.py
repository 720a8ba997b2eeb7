"""The `spark-ledger` command: its nouns, and the bare verbs up, down, status, demo."""

import asyncio
import os
from pathlib import Path
from shlex import quote
from typing import Annotated

import typer

from bookie_server.api.settings import DEFAULT_SERVICE_URL, PORT_DEFAULT
from spark_ledger import __version__, units
from spark_ledger.broker.settings import DEFAULTS, BrokerSettings
from spark_ledger.cli import ledger, metadata, nodes, rows, subscription, topic
from spark_ledger.cli.common import App, JsonOption, print_json, print_table
from spark_ledger.cli.nodes import bookies_registered, living_brokers
from spark_ledger.config import SERVICE_URL_VARIABLE, settings_of
from spark_ledger.errors import MetadataHeld, Unavailable
from spark_ledger.topic.log.policies import PASS_BYTES

FolderOption = Annotated[
    Path, typer.Option("--data-dir", help="The folder of the cluster's data.", file_okay=False)
]
FOLDER = Path(".spark-ledger")
NO_BROKERS = "no brokers (`spark-ledger broker start` starts one)"
app = App(
    help="Spark Ledger: a storage engine for streams.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)
app.add_typer(topic.app, name="topic")
app.add_typer(topic.namespaces, name="namespace")
app.add_typer(subscription.app, name="subscription")
app.add_typer(ledger.app, name="ledger")
app.add_typer(nodes.bookies, name="bookie")
app.add_typer(nodes.brokers, name="broker")
app.add_typer(nodes.autorecovery, name="autorecovery")
app.add_typer(metadata.app, name="metadata")
app.command()(rows.produce)
app.command()(rows.consume)


def _print_version(version: bool) -> None:
    if version:
        print(__version__)
        raise typer.Exit


@app.callback()
def options(
    version: Annotated[
        bool,
        typer.Option(
            "--version", help="Print the version.", is_eager=True, callback=_print_version
        ),
    ] = False,
) -> None:
    """The options that come before the noun (topic, ledger, ...)."""


@app.command()
def up(
    bookies: Annotated[int, typer.Option(help="The least number of bookies.", min=1)] = 3,
    port: Annotated[int, typer.Option(help="ZooKeeper's port.", min=1, max=65535)] = PORT_DEFAULT,
    data_dir: FolderOption = FOLDER,
    merge_bytes: Annotated[
        int,
        typer.Option(help="Bytes a minute that merging copies; 0: no merging.", min=0),
    ] = PASS_BYTES,
    broker_port: Annotated[
        int, typer.Option(help="The port for Pulsar's clients.", min=1, max=65535)
    ] = DEFAULTS.broker_port,
    admin_port: Annotated[
        int, typer.Option(help="The port for lookups and the admin API.", min=1, max=65535)
    ] = DEFAULTS.admin_port,
    broker: Annotated[
        bool, typer.Option(help="With a broker for Pulsar's clients, or without.")
    ] = True,
    broker_config: Annotated[
        Path | None,
        typer.Option(help="A file of the broker's other settings, as conf/broker.toml."),
    ] = None,
    json: JsonOption = False,
) -> None:
    """Start a cluster on this machine in the background; the cluster takes ledgers when the command
    returns. (If its metadata store is held, the cluster is up and the command fails.) A process
    that dies is not started again: `spark-ledger broker start` replaces a broker that was killed;
    `spark-ledger down`, then `up`, start ZooKeeper, the bookies and the broker."""
    from spark_ledger.local import background

    background.refuse_too_few(data_dir, bookies)
    settings_of(BrokerSettings, broker_config)  # refuses a wrong file before any process starts
    cluster = background.up(
        data_dir,
        bookies,
        port,
        merge_bytes=merge_bytes,
        broker_port=broker_port if broker else None,
        admin_port=admin_port if broker else None,
        broker_config=broker_config,
    )
    hold = metadata.store_status(cluster.service_url).cluster.hold
    if json:
        print_json(
            {
                "service_url": cluster.service_url,
                "broker_url": cluster.broker_url or None,
                "admin_url": cluster.admin_url or None,
                "pid": cluster.pid,
                "data_dir": cluster.data_dir,
            }
        )
    else:
        _print_up(cluster.service_url, cluster.data_dir, data_dir)
        if cluster.broker_url:
            print(f"Pulsar's clients connect to {cluster.broker_url} or {cluster.admin_url}")
    if hold is not None:
        raise MetadataHeld(
            f"the cluster is up and takes no writes, as its metadata store is held: {hold.why}"
        )


@app.command()
def down(data_dir: FolderOption = FOLDER) -> None:
    """Stop the cluster that `up` started; its data stay."""
    from spark_ledger.local import background

    background.down(data_dir)
    print(f"down; the data stay in {data_dir.absolute()}")


@app.command()
def status(
    data_dir: Annotated[
        Path | None,
        typer.Option(help="The folder of a cluster that `up` started.", file_okay=False),
    ] = None,
    json: JsonOption = False,
    service_url: Annotated[
        str | None,
        typer.Option(
            help="zk://host:port/root; else --data-dir, LEDGER_SERVICE_URL, ./.spark-ledger."
        ),
    ] = None,
) -> None:
    """The bookies and brokers of the cluster that `up` started, or of the cluster at the service
    URL. Ends with status 1 while the metadata store is held."""
    from spark_ledger.local import background

    if not service_url and data_dir is None:
        service_url = os.environ.get(SERVICE_URL_VARIABLE)
    url = service_url or background.find(data_dir or FOLDER).service_url
    try:
        bookies = asyncio.run(bookies_registered(url))
        brokers = asyncio.run(living_brokers(url))
        store = metadata.store_status(url)
    except Unavailable as error:
        if service_url:
            remedy = "Check the service URL, and that its ZooKeeper runs."
            raise Unavailable(error.what, remedy) from None
        remedy = "Its ZooKeeper has died: `spark-ledger down`, then `spark-ledger up`."
        raise Unavailable(error.what, remedy) from None
    if json:
        hold = None if store.cluster.hold is None else store.cluster.hold.why
        facts = {"epoch": store.cluster.epoch, "held": hold}
        print_json({"service_url": url, "bookies": bookies, "brokers": brokers, "metadata": facts})
        metadata.exit_if_held(store)
        return
    print(f"cluster at {url}")
    print(f"metadata: {metadata.sentence(store)}")
    if store.cluster.hold is not None:
        print("put a newer copy of the store back, or run `spark-ledger metadata accept`")
    columns = ("BOOKIE", "STATE", "FRAMES", "FREE", "REASON")
    rows = [
        (
            bookie["id"],
            bookie["state"],
            bookie.get("frames", ""),
            units.shown(bookie.get("free_bytes")),
            bookie.get("reason", ""),
        )
        for bookie in bookies
    ]
    print_table(columns, rows, "no bookies")
    print_table(
        ("BROKER", "URL"), [(broker["id"], broker["url"]) for broker in brokers], NO_BROKERS
    )
    metadata.exit_if_held(store)


@app.command()
def demo(
    rows: Annotated[int | None, typer.Option(help="Only this number of flights.", min=2000)] = None,
    keep: Annotated[bool, typer.Option("--keep", help="Leave the cluster up.")] = False,
    output: Annotated[
        Path, typer.Option(help="The folder for picture, table and logs.", file_okay=False)
    ] = Path("demo-output"),
) -> None:
    """A year of real flights through a replicated ledger, by Spark, exactly once."""
    from spark_ledger_demo.main import run

    raise typer.Exit(run(rows=rows, keep=keep, output=output))


def _print_up(service_url: str, folder: str, data_dir: Path) -> None:
    """Print how to use the cluster and how to stop it, without options that have their default
    values."""
    where = f" --data-dir {quote(str(data_dir))}" if data_dir != FOLDER else ""
    end = f"spark-ledger down{where}"
    print(f"up at {service_url}, data in {folder}; end it with: {end}")
    if service_url != DEFAULT_SERVICE_URL:
        print(f"for clients and other verbs: export LEDGER_SERVICE_URL={service_url}")


if __name__ == "__main__":
    app()
