"""The processes of a cluster: `spark-ledger bookie list|info|ready|forget|decommission`,
`spark-ledger broker start|list` and `spark-ledger autorecovery start|status|enable|disable|set`."""

import asyncio
import sys
from collections.abc import Awaitable, Callable, Mapping
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NoReturn, TypeVar

import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn

from spark_ledger import net, units
from spark_ledger.broker.settings import BrokerSettings
from spark_ledger.cli.common import (
    App,
    JsonOption,
    UrlOption,
    fail,
    in_utc,
    print_facts,
    print_json,
    print_table,
    tell_unreadable,
    with_ledgers,
)
from spark_ledger.config import resolve_service_url, settings_of
from spark_ledger.errors import BadConfig, LedgerError, Unavailable, UnsupportedFormat, counted
from spark_ledger.topic.log.policies import PASS_BYTES

if TYPE_CHECKING:
    from bookie_server.api.messages import DirectoryInfo, InfoResponse
    from spark_ledger.ledger.client import LedgerStore
    from spark_ledger.metadata.autorecovery import AutorecoverySettings
    from spark_ledger.metadata.store import MetadataStore
    from spark_ledger.repair.decommission import DrainProgress
    from spark_ledger.repair.status import AutorecoveryStatus


bookies = App(help="Bookies: the nodes that store entries.", no_args_is_help=True)
brokers = App(help="The broker: Pulsar's clients write and read topics.", no_args_is_help=True)
autorecovery = App(
    help="Autorecovery, which makes lost copies again, and upkeep of topics.", no_args_is_help=True
)
Timeout = Annotated[
    float, typer.Option("--timeout", help="Seconds to wait for the answer.", min=0.1)
]
T = TypeVar("T")
TIMEOUT_S = 5.0
INTERRUPTED = 130


@bookies.command("list")
def list_bookies(json: JsonOption = False, service_url: UrlOption = None) -> None:
    """Every known bookie: its state (rw, ro or down), and the reason."""
    known_bookies = asyncio.run(bookies_registered(resolve_service_url(service_url)))
    rows = [_row_of(bookie) for bookie in known_bookies]
    malformed = {
        bookie["id"]: UnsupportedFormat(bookie["reason"])
        for bookie in known_bookies
        if bookie.get("malformed")
    }
    if json:
        print_json(rows)
        tell_unreadable("bookie", malformed)
        return
    if hold := next((bookie["held"] for bookie in known_bookies if bookie.get("held")), ""):
        print(f"the metadata store is HELD: {hold}")
        print("no bookie registers until the store is accepted: `spark-ledger metadata status`")
    columns = ("BOOKIE", "STATE", "FRAMES", "GRPC", "RACK", "FREE", "LIMBO", "VERSION", "WHY")
    cells = [
        (
            *(r["id"], r["state"], r["frames"], r["address"], r["rack"]),
            *(units.shown(r["free_bytes"]), r["limbo_ledgers"], r["version"], r["why"]),
        )
        for r in rows
    ]
    print_table(columns, cells, "no bookies")
    tell_unreadable("bookie", malformed)


@bookies.command()
def info(
    bookie: Annotated[str, typer.Argument(help="host:port of its frames, or the id of a bookie.")],
    json: JsonOption = False,
    timeout: Timeout = TIMEOUT_S,
    service_url: UrlOption = None,
) -> None:
    """The state of one bookie. With host:port the command asks only this bookie, and not the
    metadata store."""
    is_address = ":" in bookie
    address = checked_address(bookie) if is_address else asyncio.run(_address(bookie, service_url))
    response = asyncio.run(request_info(address, timeout))
    if json:
        facts = {**response._asdict(), "address": address, "status": response.status.name}
        facts["directories"] = [directory._asdict() for directory in response.directories]
        print_json(facts)
        return
    print_facts(_info_facts(address, response))
    columns = ("DIRECTORY", "ROLE", "FREE", "TOTAL", "STATE")
    rows = [
        (d.path, d.role, units.shown(d.free_bytes), units.shown(d.total_bytes), _directory_state(d))
        for d in response.directories
    ]
    if rows:
        print()
        print_table(columns, rows, "")


@bookies.command()
def ready(
    address: Annotated[str, typer.Argument(help="host:port of the bookie's frames.")],
    timeout: Timeout = TIMEOUT_S,
) -> None:
    """Exit status 0 if the bookie is registered and takes new entries, else 1 and the reason."""
    from spark_ledger.bookies.bookie_client import why_not_ready

    why = why_not_ready(asyncio.run(request_info(checked_address(address), timeout)))
    if why:
        fail(f"the bookie at {address} is not ready: {why}")
    print("ready")


@bookies.command()
def forget(
    bookie_id: Annotated[str, typer.Argument(help="The id of a bookie that will not come back.")],
    service_url: UrlOption = None,
) -> None:
    """Take a lost bookie off the list; refused while the bookie runs or a ledger names it."""
    from spark_ledger.repair import decommission as repair

    with_ledgers(service_url, lambda ledgers: repair.forget(ledgers, bookie_id))
    print(f"bookie {bookie_id} is forgotten")


@bookies.command()
def decommission(
    bookie_id: Annotated[str, typer.Argument(help="The id of the bookie to empty.")],
    force: Annotated[
        bool,
        typer.Option(
            "--force",
            help="Also if ledgers then keep fewer copies; never fewer than Qa.",
        ),
    ] = False,
    cancel: Annotated[
        bool, typer.Option("--cancel", help="The bookie stays, and takes entries again.")
    ] = False,
    json: JsonOption = False,
    service_url: UrlOption = None,
) -> None:
    """Drain a bookie that is up: it takes no new entries, and its copies are made on other bookies,
    until no ledger names it. Ctrl-C stops the progress display, not the draining; run the command
    again to watch the draining. With --json the command prints one line for each change."""
    if cancel:
        _cancel(bookie_id, service_url)
        return
    left: DrainProgress | None = None

    async def work(ledgers: "LedgerStore") -> None:
        from spark_ledger.repair.decommission import decommission

        nonlocal left
        display = _DrainDisplay(json)
        with display.progress:
            async for left in decommission(ledgers, bookie_id, force=force):
                display.show(left)

    try:
        with_ledgers(service_url, work)
    except KeyboardInterrupt:
        _exit_interrupted(bookie_id, has_begun=left is not None)
    assert left is not None
    if not left.done:
        fail(f"bookie {bookie_id} is not empty: {left.hindrance}")
    if json:
        return
    if left.stuck:
        print(
            f"bookie {bookie_id} may be stopped; {counted(left.stuck, 'ledger')} then have fewer"
            " copies, until another bookie can take the copies"
        )
    else:
        print(
            f"no ledger names bookie {bookie_id}: stop it, then"
            f" `spark-ledger bookie forget {bookie_id}`"
        )


def _exit_interrupted(bookie_id: str, *, has_begun: bool) -> NoReturn:
    outlook = "is drained all the same" if has_begun else "may be drained all the same"
    print(
        f"\nbookie {bookie_id} {outlook}: `spark-ledger bookie decommission {bookie_id}` watches"
        " the draining; with --cancel the bookie stays and takes entries again",
        file=sys.stderr,
    )
    sys.exit(INTERRUPTED)


def _cancel(bookie_id: str, service_url: str | None) -> None:
    from spark_ledger.repair.decommission import cancel

    if not with_ledgers(service_url, lambda ledgers: cancel(ledgers, bookie_id)):
        raise BadConfig(
            f"bookie {bookie_id} is not being drained",
            "`spark-ledger autorecovery status` lists the draining bookies.",
        )
    print(f"bookie {bookie_id} stays, and takes entries again")


class _DrainDisplay:
    """Shows the ledgers and bytes that are left: a bar in a terminal, otherwise a line for each
    change."""

    def __init__(self, json: bool) -> None:
        self._json = json
        self._last_state: object = None
        self._ledgers_max = 0
        self.progress = Progress(
            *(TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn()),
            TextColumn("ledgers moved, {task.fields[left]}"),
            console=Console(stderr=True),
            disable=json or not sys.stderr.isatty(),
        )
        self._bar: TaskID | None = None

    def show(self, left: "DrainProgress") -> None:
        self._ledgers_max = max(self._ledgers_max, left.ledgers)
        size, why = units.shown(left.bytes), _obstacle(left)
        if self._bar is None:
            self._bar = self.progress.add_task("draining", total=self._ledgers_max, left="")
        self.progress.update(
            self._bar,
            total=self._ledgers_max,
            completed=self._ledgers_max - left.ledgers,
            left=f"{size} left{why}",
        )
        state = (left.ledgers, left.bytes, why)
        if state == self._last_state:
            return
        self._last_state = state
        if self._json:
            print_json({**asdict(left), "done": left.done})
        elif self.progress.disable:
            print(f"{counted(left.ledgers, 'ledger')} left, {size}{why}", flush=True)


def _obstacle(left: "DrainProgress") -> str:
    """The text of the obstacle; empty without an obstacle."""
    if left.hindrance:
        return f"; {left.hindrance}"
    if not left.blocked:
        return ""
    ledger_id, why = next(iter(sorted(left.blocked.items())))
    return f"; {len(left.blocked)} blocked, ledger {ledger_id}: {why}"


async def bookies_registered(service_url: str) -> list[dict[str, Any]]:
    """Every bookie that was registered, down ones too, each as a dict. Raises Unavailable."""
    from spark_ledger.bookies import directory

    return await ask_store(service_url, directory.registered)


async def living_brokers(
    service_url: str, unreadable: dict[str, LedgerError] | None = None
) -> list[dict[str, str | int]]:
    """The living brokers, each with `id`, `url` and `incomplete_messages`. Raises Unavailable."""
    from spark_ledger.broker.log.membership import brokers_alive

    brokers = await ask_store(service_url, lambda store: brokers_alive(store, unreadable))
    return [
        {"id": broker_id, "url": broker.url, "incomplete_messages": broker.incomplete}
        for broker_id, broker in sorted(brokers.items())
    ]


async def ask_store(service_url: str, ask: "Callable[[MetadataStore], Awaitable[T]]") -> T:
    """The result of `ask` on the store of a cluster. Raises Unavailable, and the errors of
    `ask`."""
    from spark_ledger.metadata.store import StoreUnavailable
    from spark_ledger.metadata.zookeeper import connect
    from spark_ledger.process import cluster_at

    store = await connect(service_url, make_root=False)
    try:
        await cluster_at(store, service_url)
        return await ask(store)
    except StoreUnavailable as error:
        remedy = "The cluster's ZooKeeper is down, or very slow: try again."
        raise Unavailable(str(error), remedy) from None
    finally:
        await store.close()


_SHORT = {"writable": "rw", "read-only": "ro"}


def _row_of(bookie: dict[str, Any]) -> dict[str, Any]:
    """A bookie as `list` shows it."""
    from spark_ledger.bookies.directory import listed_status

    return {**listed_status(bookie), "state": _SHORT.get(bookie["state"], bookie["state"])}


def checked_address(address: str) -> str:
    """The address. Raises BadConfig if it is not host:port, as no request could reach a bookie
    there."""
    with suppress(ValueError):
        if net.split(address)[1]:
            return address
    raise BadConfig(
        f"'{address}' is not an address of a bookie: an address is host:port, with a port from 1 to"
        f" {net.PORT_MAX} and an IPv6 address in brackets",
        "`spark-ledger bookie list` has the address of each bookie's frames.",
    )


async def _address(bookie_id: str, service_url: str | None) -> str:
    """The bookie's present address, or the last one if it is down. Raises BadConfig,
    Unavailable."""
    from spark_ledger.bookies.directory import client_address

    for bookie in await bookies_registered(resolve_service_url(service_url)):
        if bookie["id"] == bookie_id:
            return client_address(bookie)
    raise BadConfig(
        f"no bookie {bookie_id!r} was ever registered in this cluster",
        "`spark-ledger bookie list` lists all bookies that were registered.",
    )


async def request_info(address: str, timeout_s: float) -> "InfoResponse":
    from spark_ledger.bookies.bookie_client import CallFailed, ask_info
    from spark_ledger.bookies.frame_network import FrameNetwork

    network = FrameNetwork(timeout_s)
    try:
        return await ask_info(network, address, timeout_s)
    except CallFailed as failure:
        raise Unavailable(
            f"the bookie at {address} does not answer: {failure}",
            "The bookie is down or has not opened its port yet (see its log), or its port for"
            " frames is another: `spark-ledger bookie list` has the port.",
        ) from None
    finally:
        await network.close()


def _info_facts(address: str, response: "InfoResponse") -> dict[str, object]:
    facts = {
        "bookie": response.bookie_id,
        "address": address,
        "version": response.version,
        "state": response.state or response.status.name,
        "reason": response.reason,
        "ledgers": response.ledgers,
        "in limbo": response.limbo_ledgers,
        "free": f"{units.shown(response.free_bytes)} of {units.shown(response.total_bytes)}",
        "reclaim": response.reclaim,
    }
    return {name: value for name, value in facts.items() if value != ""}


def _directory_state(directory: "DirectoryInfo") -> str:
    if directory.failure:
        return f"failed: {directory.failure}"
    return "full" if directory.full else "ok"


def _setting(name: str, *flags: str, **limits: Any) -> Any:
    """The command's option for a setting of the broker. Without the option the value comes from the
    file of settings, or is the default."""
    field = BrokerSettings.model_fields[name]
    default: Any = field.default
    text: bool | str = name.replace("_", "-") if default is True else str(default) or False
    return typer.Option(*flags, help=field.description, show_default=text, **limits)


@brokers.command("start")
def start_broker(
    broker_port: Annotated[int | None, _setting("broker_port", min=0, max=65535)] = None,
    admin_port: Annotated[int | None, _setting("admin_port", min=0, max=65535)] = None,
    host: Annotated[str | None, _setting("host")] = None,
    advertised_host: Annotated[str | None, _setting("advertised_host")] = None,
    admin_open: Annotated[bool | None, _setting("admin_open", "--admin-open")] = None,
    auto_create: Annotated[
        bool | None, _setting("auto_create", "--auto-create/--no-auto-create")
    ] = None,
    auto_create_partitions: Annotated[int | None, _setting("auto_create_partitions", min=0)] = None,
    config: Annotated[
        Path | None,
        typer.Option(help="A file of settings, as conf/broker.toml; options go before its values."),
    ] = None,
    parent_pipe: Annotated[
        bool, typer.Option("--parent-pipe", help="End when standard input is closed.")
    ] = False,
    service_url: UrlOption = None,
) -> None:
    """Serve Pulsar's clients in this process, until it is stopped."""
    from spark_ledger.broker.server import serve

    settings = settings_of(
        BrokerSettings,
        config,
        broker_port=broker_port,
        admin_port=admin_port,
        host=host,
        advertised_host=advertised_host,
        admin_open=admin_open,
        auto_create=auto_create,
        auto_create_partitions=auto_create_partitions,
    )
    in_file = settings.service_url if "service_url" in settings.model_fields_set else None
    serve(resolve_service_url(service_url or in_file), settings, parent_pipe=parent_pipe)


@brokers.command("list")
def list_brokers(json: JsonOption = False, service_url: UrlOption = None) -> None:
    """The brokers that are alive, each with its URL for clients and the number of chunked messages
    that its producers have left incomplete since its start."""
    unreadable: dict[str, LedgerError] = {}
    brokers = asyncio.run(living_brokers(resolve_service_url(service_url), unreadable))
    if json:
        print_json(brokers)
    else:
        heads = ("BROKER", "URL", "INCOMPLETE MESSAGES")
        print_table(heads, [tuple(broker.values()) for broker in brokers], "no brokers")
    tell_unreadable("broker", unreadable)


@autorecovery.command("start")
def start_autorecovery(
    merge_bytes: Annotated[
        int,
        typer.Option(
            help="Bytes a minute to copy for merging small segments; 0: no merging.", min=0
        ),
    ] = PASS_BYTES,
    parent_pipe: Annotated[
        bool,
        typer.Option(
            "--parent-pipe",
            help="End when standard input is closed; wait for a cluster that is not up yet.",
        ),
    ] = False,
    service_url: UrlOption = None,
) -> None:
    """Host autorecovery and upkeep of topics in this process, until it is stopped."""
    from spark_ledger.local.maintenance import serve

    serve(resolve_service_url(service_url), merge_bytes=merge_bytes, parent_pipe=parent_pipe)


@autorecovery.command()
def status(json: JsonOption = False, service_url: UrlOption = None) -> None:
    """The state of autorecovery: settings, auditor, lost bookies, listed ledgers."""
    from spark_ledger.repair.status import status

    now = with_ledgers(service_url, lambda ledgers: status(ledgers.metadata))
    if json:
        print_json(asdict(now))
        return
    by_reason = ", ".join(f"{why}: {count}" for why, count in now.by_reason.items())
    listed = counted(now.under_replicated, "ledger") + (by_reason and f" (listed as {by_reason})")
    if now.alarm:
        unlisted = counted(now.unlisted, "ledger")
        listed += f"; {unlisted} of bookies that are gone not listed while the alarm lasts"
    elif not now.enabled:
        listed += "; ledgers of lost bookies are not listed while autorecovery is disabled"
    facts: dict[str, object] = {
        **({"ALARM": now.alarm} if now.alarm else {}),
        **({"HELD": f"no ledger is repaired: {now.held}"} if now.held else {}),
        "enabled": "yes" if now.enabled else "no",
        **_settings(now),
        "auditor": now.auditor or "none: no process hosts autorecovery",
        "lost": _with_times(now.lost),
        "down": _with_times(now.down),
        "draining": ", ".join(now.draining) or "none",
        "under-replicated": listed,
        "blocked": now.blocked,
        "damaged": now.damaged,
    }
    if now.accepted:
        facts["accepted as lost"] = ", ".join(now.accepted)
    print_facts(facts)


@autorecovery.command()
def enable(
    force: Annotated[
        bool,
        typer.Option(
            "--force", help="Bookies that are gone now count as lost, even more than a third."
        ),
    ] = False,
    service_url: UrlOption = None,
) -> None:
    """Enable repair."""
    from spark_ledger.repair.status import enable

    settings = with_ledgers(service_url, lambda ledgers: enable(ledgers.metadata, force=force))
    lost = f"; accepted as lost: {', '.join(settings.accepted) or 'none'}" if force else ""
    print(f"autorecovery is enabled{lost}")


@autorecovery.command()
def disable(service_url: UrlOption = None) -> None:
    """Repair no ledger until autorecovery is enabled again."""
    _change(service_url, {"enabled": False})
    print("autorecovery is disabled")


@autorecovery.command("set")
def set_(
    settings: Annotated[
        list[str],
        typer.Argument(help="lost_bookie_delay_s=SECONDS, repair_bytes_per_s=BYTES; 0: no limit."),
    ],
    service_url: UrlOption = None,
) -> None:
    """Change settings of the whole cluster, while it runs."""
    changes: dict[str, object] = {}
    for text in settings:
        name, equals, value = text.partition("=")
        if not equals:
            raise BadConfig(f"'{text}' is not a setting with a value", "Give NAME=VALUE.")
        if name in ("enabled", "accepted"):
            raise BadConfig(
                f"'{name}' cannot be set here", "Use `autorecovery enable` or `disable`."
            )
        changes[name] = value
    now = _change(service_url, changes)
    print_facts({name: text for name, text in _settings(now).items() if name in changes})


def _change(service_url: str | None, changes: dict[str, object]) -> "AutorecoverySettings":
    from spark_ledger.repair.status import change_settings

    return with_ledgers(service_url, lambda ledgers: change_settings(ledgers.metadata, **changes))


def _settings(now: "AutorecoverySettings | AutorecoveryStatus") -> dict[str, str]:
    """The settings that an operator sets by name, as text for people."""
    rate = now.repair_bytes_per_s
    return {
        "lost_bookie_delay_s": f"{now.lost_bookie_delay_s:g}",
        "repair_bytes_per_s": f"{rate:_}" if rate else "0 (no limit)",
    }


def _with_times(bookies: Mapping[str, int]) -> str:
    """The bookies, each with the time at which it went down."""
    texts = [f"{bookie} since {in_utc(since_ms)}" for bookie, since_ms in bookies.items()]
    return ", ".join(texts) or "none"
