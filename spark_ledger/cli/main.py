"""The `spark-ledger` command: nouns and the bare verbs, put together."""

from typing import Annotated

import typer

from spark_ledger import __version__
from spark_ledger.cli import (
    autorecovery,
    bookie,
    broker,
    cluster,
    ledger,
    namespace,
    subscription,
    topic,
)
from spark_ledger.cli.common import App

app = App(
    help="Spark Ledger: a storage engine for streams.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)
cluster.add_to(app)
app.add_typer(topic.app, name="topic")
app.add_typer(namespace.app, name="namespace")
app.add_typer(subscription.app, name="subscription")
app.add_typer(ledger.app, name="ledger")
app.add_typer(bookie.app, name="bookie")
app.add_typer(broker.app, name="broker")
app.add_typer(autorecovery.app, name="autorecovery")


def _tell(version: bool) -> None:
    if version:
        print(__version__)
        raise typer.Exit


@app.callback()
def options(
    version: Annotated[
        bool,
        typer.Option("--version", help="Print the version.", is_eager=True, callback=_tell),
    ] = False,
) -> None:
    """What comes before the noun."""


if __name__ == "__main__":
    app()
