"""What the commands share: options, the connection to a cluster, printing.

Always true: with --json standard output has only JSON, as one document or one line per item. An
error is one line on standard error, and the exit status is not 0.
"""

import asyncio
import json
import random
import sys
import time
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Annotated, Any, TypeVar

import typer
from rich.console import Console
from rich.table import Table
from typer.core import TyperCommand

from bookie_server.api.settings import DEFAULT_SERVICE_URL
from spark_ledger.config import SERVICE_URL_VARIABLE, resolve_service_url
from spark_ledger.errors import BadConfig, LedgerError

if TYPE_CHECKING:
    from spark_ledger.ledger.client import LedgerStore
    from spark_ledger.topic.client import TopicClient
    from spark_ledger.topic.subscription.seek_target import SeekTarget

JsonOption = Annotated[bool, typer.Option("--json", help="Print JSON.")]
UrlOption = Annotated[
    str | None,
    typer.Option(
        "--service-url",
        help=f"zk://host:port/root; else {SERVICE_URL_VARIABLE}, else {DEFAULT_SERVICE_URL}.",
    ),
]
T = TypeVar("T")
F = TypeVar("F", bound=Callable[..., Any])
FAILED = 1


class Command(TyperCommand):
    """A command that refuses a negative number by what is wrong with it; typer takes the number for
    an unknown option."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        words = list(args)
        try:
            return super().parse_args(ctx, args)
        except Exception as error:
            option = getattr(error, "option_name", None) or ""
            if not option[1:].isdecimal():
                raise
            word = next((word for word in words if word.startswith(option)), option)
            raise BadConfig(
                f"'{word}' is not an option, and a number must not be negative here",
                "Give a number from 0 on; before a text that begins with '-', give --.",
            ) from None


class App(typer.Typer):
    """A typer application that prints an error of this package as one line."""

    def command(self, name: str | None = None, **settings: Any) -> Callable[[F], F]:
        return super().command(name, cls=Command, **settings)

    def __call__(self, *arguments: Any, **options: Any) -> Any:
        try:
            return super().__call__(*arguments, **options)
        except LedgerError as error:
            fail(str(error))
        except BrokenPipeError:  # the process that reads the output has ended
            sys.stderr.close()
            sys.exit(FAILED)


def fail(message: str) -> None:
    """Print the error as one line, and end the process."""
    print(f"spark-ledger: {' '.join(message.split())}", file=sys.stderr)
    sys.exit(FAILED)


def in_utc(ms: int) -> str:
    """A time in milliseconds since 1970 as text for people."""
    return datetime.fromtimestamp(ms / 1000, UTC).strftime("%Y-%m-%d %H:%M:%S UTC")


def with_ledgers(service_url: str | None, work: Callable[["LedgerStore"], Awaitable[T]]) -> T:
    """The result of `work` on a connection to the cluster. Raises errors.LedgerError."""

    async def run_connected() -> T:
        from spark_ledger.process import connect

        ledgers = await connect(resolve_service_url(service_url))
        try:
            return await work(ledgers)
        finally:
            await ledgers.close()

    return asyncio.run(run_connected())


def with_topics(service_url: str | None, work: Callable[["TopicClient"], Awaitable[T]]) -> T:
    """The result of `work` on a client for the cluster's topics. Raises errors.LedgerError."""
    from spark_ledger.topic.client import TopicClient

    async def on_topics(ledgers: "LedgerStore") -> T:
        client = TopicClient(ledgers, random.Random(), lambda: time.time_ns() // 1_000_000)
        try:
            return await work(client)
        finally:
            await client.close()

    return with_ledgers(service_url, on_topics)


def by_partition(offsets: Mapping[int, int]) -> dict[str, int]:
    """The offsets for JSON, with partitions as text, since JSON has only text as names."""
    return {str(partition): offset for partition, offset in sorted(offsets.items())}


def in_json(value: object) -> str:
    """The value as JSON; kinds of values that JSON lacks (bytes, times, decimals) become text."""
    return json.dumps(value, ensure_ascii=False, default=_as_text)


def print_json(value: object) -> None:
    print(in_json(value))


def answer(json: bool, facts: object, text: str) -> None:
    """Print the result of a command: `facts` as JSON with --json, otherwise the text."""
    print(in_json(facts) if json else text)


def _as_text(value: object) -> str:
    return readable(value) if isinstance(value, bytes) else str(value)


def print_table(columns: Sequence[str], rows: Iterable[Sequence[object]], empty: str) -> None:
    """Print rows below the names of their columns; without rows, print the text `empty`."""
    table = Table(box=None, pad_edge=False, header_style="bold")
    for column in columns:
        table.add_column(column, overflow="fold")
    for row in rows:
        table.add_row(*(str(cell) for cell in row))
    console = Console(width=None if sys.stdout.isatty() else 200, highlight=False)
    console.print(table if table.rows else empty)


def tell_unreadable(kind: str, unreadable: Mapping[Any, LedgerError]) -> None:
    """After a listing: for each item of this kind that could not be read, print a line on standard
    error; then end with status 1. Without such items do nothing."""
    for name, error in sorted(unreadable.items()):
        print(f"spark-ledger: {kind} {name}: {' '.join(str(error).split())}", file=sys.stderr)
    if unreadable:
        raise typer.Exit(FAILED)


def print_facts(facts: Mapping[str, object]) -> None:
    """Print one line per fact."""
    width = max(len(name) for name in facts)
    for name, value in facts.items():
        print(f"{name:<{width}}  {value}")


def readable(data: bytes | memoryview | None) -> str:
    """Bytes for a terminal: as text if they are text, otherwise as hexadecimal digits."""
    if data is None:
        return "null"
    try:
        text = bytes(data).decode()
    except UnicodeDecodeError:
        return f"0x{bytes(data).hex()}"
    return text if text.isprintable() or not text else repr(text)[1:-1]


# -- offsets and times as a user types them -----------------------------------------------------


def target_of(to: str | None, offsets: list[str]) -> "SeekTarget":
    """Where a subscription is to go, by `to` (`earliest`, `latest` or a time) or by `offsets`
    (PARTITION=OFFSET texts). Raises errors.BadConfig unless the user gave exactly one of both."""
    from spark_ledger.topic.subscription.seek_target import CommittedSince, End

    if bool(offsets) == (to is not None):
        raise BadConfig("exactly one target is needed", "Give either --to or --to-offset.")
    if to is None:
        return offsets_of(offsets)
    if to in (end.value for end in End):
        return End(to)
    return CommittedSince(time_ms(to))


def offsets_of(texts: list[str]) -> dict[int, int]:
    """Offsets by partition, from PARTITION=OFFSET texts. Raises errors.BadConfig."""
    try:
        pairs = [text.split("=") for text in texts]
        offsets = {int(partition): int(offset) for partition, offset in pairs}
    except ValueError as error:
        raise BadConfig(
            f"{' '.join(texts)} is not a position in a topic", "Give PARTITION=OFFSET, e.g. 0=1200."
        ) from error
    if len(offsets) < len(texts):
        raise BadConfig(f"{' '.join(texts)} name a partition twice", "Name each partition once.")
    return offsets


def time_ms(text: str) -> int:
    """The time in milliseconds, from a text in ISO 8601 (local time, if it has no zone) or in
    milliseconds. Raises errors.BadConfig."""
    if text.isdecimal():
        from spark_ledger.topic.subscription.seek_target import in_seconds

        if in_seconds(int(text)):
            raise BadConfig(
                f"{text}, as milliseconds since 1970, is before March 1973: probably seconds",
                f"Give milliseconds ({text}000), 0 for the beginning, or ISO 8601.",
            )
        return int(text)
    try:
        at = datetime.fromisoformat(text)
    except ValueError as error:
        raise BadConfig(
            f"'{text}' is not a time", "Give ISO 8601, e.g. 2026-01-31T12:00:00Z, or milliseconds."
        ) from error
    return round((at if at.tzinfo else at.astimezone()).timestamp() * 1000)
