"""`spark-ledger metadata status|accept`: shows whether the metadata store went back in time and is
held (takes no writes), and lets an operator accept such a store (metadata/hold.py)."""

import asyncio
import time
from typing import TYPE_CHECKING, Annotated, Any

import typer

from spark_ledger import units
from spark_ledger.cli.common import App, JsonOption, UrlOption, print_facts, print_json, print_table
from spark_ledger.cli.nodes import ask_store
from spark_ledger.config import resolve_service_url
from spark_ledger.errors import counted

if TYPE_CHECKING:
    from spark_ledger.metadata.hold import StoreStatus

app = App(
    help="The metadata store: whether it went back in time, and the acceptance of such a store.",
    no_args_is_help=True,
)
REPORTS_WAIT_S, REPORTS_PAUSE_S = 10.0, 0.5
ROWS_SHOWN = 50
NOT_LISTED = (
    "an accept also gives up facts newer than this store that no bookie has and no command can"
    " list: rows of small commits (they are in the commit itself), topics, policies, schemas,"
    " subscriptions and their positions"
)


def store_status(service_url: str) -> "StoreStatus":
    """The state of the store at the URL. Raises errors.Unavailable, errors.UnsupportedFormat."""
    from spark_ledger.metadata import hold

    return asyncio.run(ask_store(service_url, hold.status))


def facts_of(status: "StoreStatus") -> dict[str, Any]:
    """The state of the store, for JSON."""
    cluster, hold = status.cluster, status.cluster.hold
    newest = status.newest
    return {
        "cluster": cluster.cluster_id,
        "epoch": cluster.epoch,
        "newest_link": None if newest is None else {"number": newest[0], "token": newest[1]},
        "held": None if hold is None else {"why": hold.why, "bookie": hold.by},
        "not_listed": None if hold is None else NOT_LISTED,
        "unnamed": [
            {"ledger": ledger, "last_entry": last, "bytes": size}
            for ledger, (last, size) in status.missing.items()
        ],
        "unnamed_by_bookie": {report.bookie_id: report.ledgers for report in status.reports},
        "other_ledgers": sorted({i for report in status.reports for i in report.others}),
        "buried": sorted({i for report in status.reports for i in report.buried}),
        "silent_bookies": list(status.silent),
    }


def sentence(status: "StoreStatus") -> str:
    """The epoch, the newest link and the hold, in one line."""
    cluster = status.cluster
    link = "no link yet" if status.newest is None else f"newest link {status.newest[0]}"
    hold_text = "" if cluster.hold is None else f"; HELD: {cluster.hold.why}"
    return f"epoch {cluster.epoch}, {link}{hold_text}"


@app.command("status")
def status(json: JsonOption = False, service_url: UrlOption = None) -> None:
    """The store's epoch, the newest link of its chain, and whether the store is held. Exit status 1
    if the store is held."""
    store = store_status(resolve_service_url(service_url))
    if json:
        print_json(facts_of(store))
        exit_if_held(store)
        return
    hold, newest = store.cluster.hold, store.newest
    print_facts(
        {
            "cluster": store.cluster.cluster_id,
            "epoch": store.cluster.epoch,
            "newest link": "none" if newest is None else f"{newest[0]} ({newest[1]})",
            "held": "no" if hold is None else f"{hold.why} (bookie {hold.by})",
        }
    )
    if hold is not None:
        _show(store)
    exit_if_held(store)


def exit_if_held(status: "StoreStatus") -> None:
    """End with status 1 if the store is held; for commands that show the state of the cluster."""
    if status.cluster.hold is not None:
        raise typer.Exit(1)


@app.command("accept")
def accept(
    yes: Annotated[bool, typer.Option("--yes", help="Do not ask.")] = False,
    json: JsonOption = False,
    service_url: UrlOption = None,
) -> None:
    """Accept a store that went back in time. The command lists the ledgers that bookies have and
    the store does not name, and asks. Afterwards ids of new ledgers are above all ids that were
    given out before. With --json and without --yes the command prints the list as JSON before the
    question, and the outcome after it."""
    from spark_ledger.metadata import hold

    url = resolve_service_url(service_url)
    before = store_status(url)
    end_s = time.monotonic() + REPORTS_WAIT_S
    while before.cluster.hold and before.silent and time.monotonic() < end_s:
        time.sleep(REPORTS_PAUSE_S)  # bookies report their ledgers soon after they see the hold
        before = store_status(url)
    if before.cluster.hold is None:
        if json:
            print_json({"accepted": False, **facts_of(before)})
        else:
            print(f"the metadata store is not held, so there is nothing to accept: {url}")
        return
    if not json:
        print(f"the metadata store is held: {before.cluster.hold.why}")
        _show(before)
        print("stop producers first: rows that they send to ledgers of this list are in no topic")
    elif not yes:
        print_json({"accepted": False, **facts_of(before)})
    if not yes:
        question = "Accept the store as it is? The ledgers listed stay on the bookies, unread."
        typer.confirm(question, abort=True, err=json)
    after = asyncio.run(ask_store(url, hold.accept))
    if json:
        print_json({"accepted": True, **facts_of(before), "epoch": after.cluster.epoch})
    else:
        print(f"accepted: {sentence(after)}")
        print("brokers open their topics anew within some ten seconds. Start queries that ran")
        print("meanwhile again: a query that has read rows that are in no topic any more ends with")
        print("an error, and goes on under a new checkpoint (docs/operations.md)")


def _show(status: "StoreStatus") -> None:
    """Print the ledgers of bookies that an accept gives up."""
    missing = status.missing
    size = units.shown(sum(size for _, size in missing.values()))
    is_cut = any(report.ledgers > len(report.missing) for report in status.reports)
    least = "at least " if is_cut else ""
    ledgers = counted(len(missing), "ledger")
    print(f"bookies have {least}{ledgers} that the store does not name, {size}")
    rows = [
        (ledger, last + 1, units.shown(size))
        for ledger, (last, size) in [*missing.items()][:ROWS_SHOWN]
    ]
    print_table(("LEDGER", "ENTRIES", "SIZE"), rows, "no ledgers to list")
    print(NOT_LISTED)
    if len(missing) > ROWS_SHOWN:
        print(f"... and {least}{len(missing) - ROWS_SHOWN} more (--json lists them)")
    others = sorted({i for report in status.reports for i in report.others})
    buried = sorted({i for report in status.reports for i in report.buried})
    if others:
        print(f"ids that the store gave out again, to other ledgers: {', '.join(map(str, others))}")
    if buried:
        print(f"the store names ledgers that bookies have buried: {', '.join(map(str, buried))}")
    for bookie in status.silent:
        print(f"bookie {bookie} has not reported: it is down, or still compares its ledgers")
