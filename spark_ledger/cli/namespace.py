"""`spark-ledger namespace set|show|list`."""

from typing import TYPE_CHECKING, Annotated

import typer

from spark_ledger.cli.common import (
    App,
    JsonOption,
    UrlOption,
    print_facts,
    print_json,
    print_table,
    with_topics,
)
from spark_ledger.cli.topic import changes_of

if TYPE_CHECKING:
    from spark_ledger.topic.log.policies import NamespacePolicies

app = App(help="Namespaces: what their topics have.", no_args_is_help=True)
Name = Annotated[str, typer.Argument(help="tenant/name")]


@app.command("set")
def change(
    name: Name,
    policy: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="[NAME=VALUE]...",
            help="As `topic set` takes it; and auto_create, auto_create_partitions.",
        ),
    ] = None,
    json: JsonOption = False,
    service_url: UrlOption = None,
) -> None:
    """Change what its topics have where it was not set on them; it is made if it is not there.
    NAME=inherit: it says nothing of that any more."""
    changes = changes_of(policy or [])
    _print(with_topics(service_url, lambda t: t.topics.set_namespace(name, changes)), json)


@app.command()
def show(name: Name, json: JsonOption = False, service_url: UrlOption = None) -> None:
    """What it says of its topics; policies left out are the defaults."""
    from spark_ledger.topic.log.policies import NamespacePolicies

    found = with_topics(service_url, lambda client: client.topics.namespace(name))
    _print(found or NamespacePolicies(), json)


@app.command("list")
def list_namespaces(json: JsonOption = False, service_url: UrlOption = None) -> None:
    """Every namespace."""
    found = with_topics(service_url, lambda client: client.topics.namespaces())
    if json:
        print_json(found)
    else:
        print_table(("NAMESPACE",), [(name,) for name in found], "no namespaces")


def _print(found: "NamespacePolicies", json: bool) -> None:
    own = {name: getattr(found, name) for name in ("auto_create", "auto_create_partitions")}
    facts = {**own, **found.topics}
    if json:
        print_json(facts)
    else:
        shown = {name: "as the broker says" if facts[name] is None else facts[name] for name in own}
        print_facts({**facts, **shown})
