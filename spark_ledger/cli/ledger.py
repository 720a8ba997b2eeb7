"""`spark-ledger ledger list|show|read|recover`."""

import base64
from typing import TYPE_CHECKING, Annotated

import typer

from spark_ledger.cli.common import (
    App,
    JsonOption,
    UrlOption,
    print_facts,
    print_json,
    print_table,
    readable,
    with_ledgers,
)
from spark_ledger.client.arguments import LEDGER_ID_MAX
from spark_ledger.errors import BadConfig

if TYPE_CHECKING:
    from spark_ledger.ledger.client import LedgerStore
    from spark_ledger.metadata.ledger_record import LedgerRecord

app = App(help="Ledgers: replicated, append-only sequences of entries.", no_args_is_help=True)
Id = Annotated[int, typer.Argument(help="The ledger's id.", min=0, max=LEDGER_ID_MAX)]
Password = Annotated[str, typer.Option("--password", help="The ledger's password.")]


@app.command("list")
def list_ledgers(json: JsonOption = False, service_url: UrlOption = None) -> None:
    """Every ledger, by id."""

    async def work(ledgers: "LedgerStore") -> "list[LedgerRecord]":
        return [(await ledgers.record(ledger_id)).record async for ledger_id in ledgers.list()]

    records = with_ledgers(service_url, work)
    if json:
        print_json([_plain(record) for record in records])
        return
    rows = [
        (
            r.ledger_id,
            r.state.value,
            _entries(r),
            _unknown(r.length_bytes),
            len(r.fragments),
            r.topic,
        )
        for r in records
    ]
    print_table(("LEDGER", "STATE", "ENTRIES", "BYTES", "FRAGMENTS", "TOPIC"), rows, "no ledgers")


@app.command()
def show(ledger_id: Id, json: JsonOption = False, service_url: UrlOption = None) -> None:
    """What the metadata say of a ledger."""

    async def work(ledgers: "LedgerStore") -> "LedgerRecord":
        return (await ledgers.record(ledger_id, fresh=True)).record

    _print(with_ledgers(service_url, work), json)


@app.command()
def recover(
    ledger_id: Id,
    password: Password = "",
    json: JsonOption = False,
    service_url: UrlOption = None,
) -> None:
    """Fence a ledger, find its end and close it: its writer can add nothing any more."""

    async def work(ledgers: "LedgerStore") -> "LedgerRecord":
        return (await ledgers.recover(ledger_id, password=password.encode())).record

    _print(with_ledgers(service_url, work), json)


@app.command()
def read(
    ledger_id: Id,
    first: Annotated[int, typer.Option(help="First entry.", min=0)] = 0,
    last: Annotated[int | None, typer.Option(help="Last entry; else the confirmed end.")] = None,
    password: Password = "",
    json: JsonOption = False,
    service_url: UrlOption = None,
) -> None:
    """The confirmed entries of a ledger; does not disturb its writer."""

    if last is not None and last < first:
        raise BadConfig(f"--last {last} is below --first {first}", "Give it at or after --first.")

    async def work(ledgers: "LedgerStore") -> None:
        reader = await ledgers.open(ledger_id, recover=False, password=password.encode())
        end = await reader.refresh_last_add_confirmed() if last is None else last
        if end < first:
            return
        async for entry_id, entry in reader.read(first, end):
            if json:
                payload = base64.b64encode(entry.payload).decode()
                print_json({"entry": entry_id, "payload_base64": payload})
            else:
                print(f"{entry_id}\t{readable(entry.payload)}")

    with_ledgers(service_url, work)


def _print(record: "LedgerRecord", json: bool) -> None:
    if json:
        print_json(_plain(record))
        return
    quorums = (record.ensemble_size, record.write_quorum, record.ack_quorum)
    print_facts(
        {
            "ledger": record.ledger_id,
            "state": record.state.value,
            "E, Qw, Qa": ", ".join(map(str, quorums)),
            "last entry": _unknown(record.last_entry),
            "bytes": _unknown(record.length_bytes),
            "rows": _unknown(record.rows),
            "durability": record.durability,
            "password": "yes" if record.verifiers else "no",
            "topic": record.topic or "none",
            "intent": record.intent or "none",
            **{f"  {key}": value for key, value in sorted(record.custom.items())},
        }
    )
    print()
    rows = [(f.first_entry, " ".join(f.ensemble)) for f in record.fragments]
    print_table(("FROM ENTRY", "BOOKIES"), rows, "no fragments")


def _plain(record: "LedgerRecord") -> dict[str, object]:
    """The record as JSON; what checks passwords stays away."""
    return {
        "ledger_id": record.ledger_id,
        "state": record.state.value,
        "ensemble_size": record.ensemble_size,
        "write_quorum": record.write_quorum,
        "ack_quorum": record.ack_quorum,
        "last_entry": record.last_entry,
        "length_bytes": record.length_bytes,
        "rows": record.rows,
        "durability": record.durability,
        "topic": record.topic,
        "intent": record.intent,
        "custom": dict(record.custom),
        "fragments": [
            {"first_entry": f.first_entry, "ensemble": list(f.ensemble)} for f in record.fragments
        ],
    }


def _entries(record: "LedgerRecord") -> object:
    return "open" if record.last_entry is None else record.last_entry + 1


def _unknown(value: int | None) -> object:
    return "not closed" if value is None else value
