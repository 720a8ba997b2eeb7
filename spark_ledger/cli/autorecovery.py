"""`spark-ledger autorecovery start|status|enable|disable|set`."""

from collections.abc import Mapping
from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated

import typer

from spark_ledger.cli.common import (
    App,
    JsonOption,
    UrlOption,
    in_utc,
    print_facts,
    print_json,
    with_ledgers,
)
from spark_ledger.config import resolve_service_url
from spark_ledger.errors import BadConfig, counted

if TYPE_CHECKING:
    from spark_ledger.metadata.autorecovery import Settings
    from spark_ledger.repair.status import Status

app = App(
    help="Self-healing: lost copies are made again, and topics are kept up.", no_args_is_help=True
)
MERGE_BYTES = 128 << 20  # as topic/upkeep/upkeep.py, which takes a while to import


@app.command()
def start(
    merge_bytes: Annotated[
        int,
        typer.Option(help="Bytes a minute to copy for merging small segments; 0: none.", min=0),
    ] = MERGE_BYTES,
    parent_pipe: Annotated[
        bool,
        typer.Option(
            "--parent-pipe",
            help="End when standard input is closed, and wait for a cluster that is not there yet.",
        ),
    ] = False,
    service_url: UrlOption = None,
) -> None:
    """Host self-healing and upkeep of topics in this process, until it is told to stop."""
    from spark_ledger.local.maintenance import serve

    serve(resolve_service_url(service_url), merge_bytes=merge_bytes, parent_pipe=parent_pipe)


@app.command()
def status(json: JsonOption = False, service_url: UrlOption = None) -> None:
    """How self-healing stands: settings, who audits, which bookies are lost, what is listed."""
    from spark_ledger.repair.status import status

    found = with_ledgers(service_url, lambda ledgers: status(ledgers.metadata))
    if json:
        print_json(asdict(found))
        return
    by_reason = ", ".join(f"{why}: {count}" for why, count in found.by_reason.items())
    listed = counted(found.under_replicated, "ledger") + (by_reason and f" (listed as {by_reason})")
    if found.alarm:
        more = counted(found.unlisted, "ledger")
        listed += f"; {more} of the bookies that are gone not listed while the alarm lasts"
    elif not found.enabled:
        listed += "; ledgers of lost bookies are not listed while it is disabled"
    facts: dict[str, object] = {
        **({"ALARM": found.alarm} if found.alarm else {}),
        "enabled": "yes" if found.enabled else "no",
        **_settings(found),
        "auditor": found.auditor or "none: no process hosts autorecovery",
        "lost": _since(found.lost),
        "down": _since(found.down),
        "draining": ", ".join(found.draining) or "none",
        "under-replicated": listed,
        "blocked": found.blocked,
        "damaged": found.damaged,
    }
    if found.accepted:
        facts["accepted as lost"] = ", ".join(found.accepted)
    print_facts(facts)


@app.command()
def enable(
    force: Annotated[
        bool,
        typer.Option(
            "--force", help="The bookies that are gone now are lost, even more than a third."
        ),
    ] = False,
    service_url: UrlOption = None,
) -> None:
    """Repair from now on."""
    from spark_ledger.repair.status import enable

    settings = with_ledgers(service_url, lambda ledgers: enable(ledgers.metadata, force=force))
    lost = f"; accepted as lost: {', '.join(settings.accepted) or 'none'}" if force else ""
    print(f"autorecovery is enabled{lost}")


@app.command()
def disable(service_url: UrlOption = None) -> None:
    """Repair nothing until it is enabled again."""
    _change(service_url, {"enabled": False})
    print("autorecovery is disabled")


@app.command("set")
def set_(
    settings: Annotated[
        list[str],
        typer.Argument(help="lost_bookie_delay_s=SECONDS, repair_bytes_per_s=BYTES; 0: no limit."),
    ],
    service_url: UrlOption = None,
) -> None:
    """Change settings for the whole cluster, while it runs."""
    changes: dict[str, object] = {}
    for one in settings:
        name, equals, value = one.partition("=")
        if not equals:
            raise BadConfig(f"'{one}' is no setting with a value", "Give NAME=VALUE.")
        if name in ("enabled", "accepted"):
            raise BadConfig(f"'{name}' is not set so", "Use `autorecovery enable` or `disable`.")
        changes[name] = value
    now = _change(service_url, changes)
    print_facts({name: shown for name, shown in _settings(now).items() if name in changes})


def _change(service_url: str | None, changes: dict[str, object]) -> "Settings":
    from spark_ledger.repair.status import change

    return with_ledgers(service_url, lambda ledgers: change(ledgers.metadata, **changes))


def _settings(now: "Settings | Status") -> dict[str, str]:
    """Those that are set by name, as people read them."""
    rate = now.repair_bytes_per_s
    return {
        "lost_bookie_delay_s": f"{now.lost_bookie_delay_s:g}",
        "repair_bytes_per_s": f"{rate:_}" if rate else "0 (no limit)",
    }


def _since(bookies: Mapping[str, int]) -> str:
    """Each with the time since when."""
    told = [f"{one} since {in_utc(since_ms)}" for one, since_ms in bookies.items()]
    return ", ".join(told) or "none"
