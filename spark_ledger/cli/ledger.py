"""`spark-ledger ledger list|show|read|recover|limbo|unrecorded|underreplicated|audit`."""

import base64
from collections.abc import Awaitable
from typing import TYPE_CHECKING, Annotated, TypeVar

import typer

from spark_ledger.cli.common import (
    App,
    JsonOption,
    UrlOption,
    in_utc,
    print_facts,
    print_json,
    print_table,
    readable,
    tell_unreadable,
    with_ledgers,
    with_topics,
)
from spark_ledger.config import LEDGER_ID_MAX, resolve_service_url
from spark_ledger.errors import BadConfig, LedgerError, NoSuchLedger, UnsupportedFormat, counted

if TYPE_CHECKING:
    from spark_ledger.ledger.client import LedgerStore
    from spark_ledger.metadata.ledger_record import LedgerRecord
    from spark_ledger.repair.audit import Audit, LedgerCheck
    from spark_ledger.repair.status import AutorecoveryStatus
    from spark_ledger.repair.work_list import ListedLedger
    from spark_ledger.topic.client import TopicClient

T = TypeVar("T")
app = App(help="Ledgers: replicated, append-only sequences of entries.", no_args_is_help=True)
Id = Annotated[int, typer.Argument(help="The ledger's id.", min=0, max=LEDGER_ID_MAX)]
Password = Annotated[str, typer.Option("--password", help="The ledger's password.")]
IDLE_S = 300.0
"""`limbo --repair` closes an open ledger that gets no entry for this time."""


@app.command("list")
def list_ledgers(json: JsonOption = False, service_url: UrlOption = None) -> None:
    """Every ledger, by id."""

    unreadable: dict[int, LedgerError] = {}

    async def work(ledgers: "LedgerStore") -> "list[LedgerRecord]":
        records = []
        async for ledger_id in ledgers.list():
            try:
                records.append((await ledgers.record(ledger_id)).record)
            except NoSuchLedger:  # the ledger was deleted meanwhile
                continue
            except UnsupportedFormat as error:
                unreadable[ledger_id] = error
        return records

    records = with_ledgers(service_url, work)
    if json:
        print_json([_record_facts(record) for record in records])
        tell_unreadable("ledger", unreadable)
        return
    rows = [
        (
            r.ledger_id,
            r.state.value,
            _entries(r),
            _or_not_closed(r.length_bytes),
            len(r.fragments),
            r.topic,
        )
        for r in records
    ]
    print_table(("LEDGER", "STATE", "ENTRIES", "BYTES", "FRAGMENTS", "TOPIC"), rows, "no ledgers")
    tell_unreadable("ledger", unreadable)


@app.command()
def show(ledger_id: Id, json: JsonOption = False, service_url: UrlOption = None) -> None:
    """The record of a ledger in the metadata store."""

    async def work(ledgers: "LedgerStore") -> "LedgerRecord":
        return (await ledgers.record(ledger_id, fresh=True)).record

    _print_record(with_ledgers(service_url, work), json)


@app.command()
def recover(
    ledger_id: Id,
    password: Password = "",
    gone: Annotated[
        list[str] | None,
        typer.Option(
            help="Id of a bookie that will never come back: entries at the end that only this"
            " bookie may have are given up. Repeat the option for each bookie.",
        ),
    ] = None,
    json: JsonOption = False,
    service_url: UrlOption = None,
) -> None:
    """Fence a ledger, find its end and close it: its writer can add no more entries. Then ask every
    bookie that keeps copies for each entry that it should have, and bring back the entries that the
    bookie lacks or cannot deliver. Exit status 1 if an entry is still missing or a bookie does not
    respond."""

    from spark_ledger.repair.limbo import repair_everywhere

    secret, gone_bookies = password.encode(), set(gone or ())
    record, repairs = with_ledgers(
        service_url, lambda ledgers: repair_everywhere(ledgers, ledger_id, secret, gone_bookies)
    )
    if json:
        print_json({**_record_facts(record), "repaired": [repair._asdict() for repair in repairs]})
    else:
        _print_record(record, json)
        print()
        rows = [(r.bookie_id, r.compared, r.copied, r.why or "whole") for r in repairs]
        print_table(("BOOKIE", "COMPARED", "COPIED", "NOW"), rows, "no bookie keeps copies")
    if not all(repair.cleared or repair.bookie_id in gone_bookies for repair in repairs):
        raise typer.Exit(1)


@app.command()
def limbo(
    repair: Annotated[
        bool, typer.Option("--repair", help="Repair each ledger once; exit 1 if any is left.")
    ] = False,
    idle_s: Annotated[
        float,
        typer.Option(
            help="With --repair: seconds to watch open ledgers; ledgers that get no entry are"
            " closed.",
            min=0,
        ),
    ] = IDLE_S,
    json: JsonOption = False,
    service_url: UrlOption = None,
) -> None:
    """Ledgers in limbo: a bookie may have lost entries of such a ledger, and the ledger is not
    repaired yet. Reason torn: after an unclean stop with a torn write (for a page-cache ledger:
    after any unclean stop); lost: after damage or the loss of a directory."""

    if repair:
        _repair_all(idle_s, json, service_url)
        return

    from spark_ledger.repair.limbo import list_limbo

    listings = with_ledgers(service_url, lambda ledgers: list_limbo(ledgers.metadata))
    if json:
        print_json([listing._asdict() for listing in listings])
        return
    rows = [(li.ledger_id, li.bookie_id, li.reason, in_utc(li.since_ms)) for li in listings]
    print_table(("LEDGER", "IN LIMBO AT", "REASON", "SINCE"), rows, "no ledger is in limbo")


def _repair_all(idle_s: float, json: bool, service_url: str | None) -> None:
    """Repair each ledger and print the results; exit status 1 when a ledger stays in limbo."""
    from spark_ledger.repair.service import repair_once

    report = with_ledgers(service_url, lambda ledgers: repair_once(ledgers, idle_s))
    cleared = sum(result.cleared for result in report.repaired)
    copied = sum(result.copied for result in report.repaired)
    failed = len(report.repaired) - cleared
    summary = {"repaired": cleared, "copied": copied, "failed": failed, "left": len(report.left)}
    if json:
        results = [result._asdict() for result in report.repaired]
        left = [{"ledger_id": i, "why": why} for i, why in report.left.items()]
        print_json({**summary, "results": results, "left_alone": left})
    else:
        rows: list[tuple[object, ...]] = [
            (r.ledger_id, r.bookie_id, r.compared, r.copied, r.why or "whole")
            for r in report.repaired
        ]
        rows += [(ledger_id, "", "", "", why) for ledger_id, why in report.left.items()]
        columns = ("LEDGER", "BOOKIE", "COMPARED", "COPIED", "NOW")
        print_table(columns, rows, "no ledger is in limbo")
        print(", ".join(f"{name}: {count}" for name, count in summary.items()))
    if failed or report.left:
        raise typer.Exit(1)


@app.command()
def unrecorded(
    ids: Annotated[
        list[int] | None,
        typer.Argument(help="Only these ledgers; else all.", min=0, max=LEDGER_ID_MAX),
    ] = None,
    delete: Annotated[
        bool, typer.Option("--delete", help="Name the ledgers as deleted: bookies drop the copies.")
    ] = False,
    yes: Annotated[bool, typer.Option("--yes", help="Do not ask.")] = False,
    json: JsonOption = False,
    service_url: UrlOption = None,
) -> None:
    """Ledgers of which bookies keep copies, but which have no record and are not named as deleted.
    Causes: the metadata store was restored from an older copy, a record was lost, or an earlier
    version of Spark Ledger deleted the ledgers. Bookies count such ledgers every
    overreplicated_wait_s (an hour), and once more when the metadata store is held."""
    from spark_ledger.metadata.unrecorded import name_as_deleted, read_unrecorded

    by_ledger, counted_ms, hold = with_ledgers(
        service_url, lambda ledgers: with_store_errors(read_unrecorded(ledgers.metadata))
    )
    chosen = {i: bookies for i, bookies in by_ledger.items() if not ids or i in ids}
    named_as_deleted: list[int] = []
    if delete and chosen:
        question = f"Name {counted(len(chosen), 'ledger')} as deleted, for ever?"
        if not yes:
            typer.confirm(question, abort=True, err=json)
        named_as_deleted = with_ledgers(
            service_url,
            lambda ledgers: with_store_errors(name_as_deleted(ledgers.metadata, chosen)),
        )
    if json:
        facts = {
            "ledgers": [{"ledger": i, "bookies": bookies} for i, bookies in chosen.items()],
            "named_as_deleted": named_as_deleted,
            "counted_ms": counted_ms,
        }
        print_json({**facts, "held": hold or None})
        return
    if hold:
        print(f"the metadata store is held ({hold}): `spark-ledger metadata status` has the sizes")
    rows = [(i, ", ".join(bookies)) for i, bookies in chosen.items()]
    print_table(("LEDGER", "KEPT BY"), rows, NONE_UNRECORDED)
    for bookie_id, at_ms in counted_ms.items():
        print(
            f"bookie {bookie_id} counted at {in_utc(at_ms)}; ledgers that came later are not listed"
        )
    if delete:
        print(f"named as deleted: {len(named_as_deleted)}")


NONE_UNRECORDED = "no bookie reports a ledger without a record; bookies count once an hour"


async def with_store_errors(work: "Awaitable[T]") -> "T":
    """The result of the work. Turns an error of the store into an errors.LedgerError."""
    from spark_ledger.metadata.cluster import BadClusterRecord
    from spark_ledger.metadata.deleted_ledgers import BadDeletedSet
    from spark_ledger.metadata.store_calls import unavailable_while

    try:
        with unavailable_while("asking for ledgers without a record"):
            return await work
    except (BadClusterRecord, BadDeletedSet) as damage:
        raise UnsupportedFormat(str(damage)) from damage


@app.command()
def underreplicated(json: JsonOption = False, service_url: UrlOption = None) -> None:
    """Ledgers with copies that are missing, or will be moved: the bookie, the reason, since when,
    and the obstacle."""

    async def work(ledgers: "LedgerStore") -> "tuple[list[ListedLedger], str]":
        from spark_ledger.repair.status import status, underreplicated

        listed = await underreplicated(ledgers.metadata)
        return listed, _why_unlisted(await status(ledgers.metadata))

    listed, why_unlisted = with_ledgers(service_url, work)
    if json:
        print_json([_reasons_of(ledger) for ledger in listed])
        return
    rows = [
        (ledger.ledger_id, reason.bookie_id, reason.why, in_utc(reason.since_ms), ledger.blocked)
        for ledger in listed
        for reason in ledger.reasons
    ]
    columns = ("LEDGER", "BOOKIE", "REASON", "SINCE", "BLOCKED BY")
    empty = "no ledger is listed" if why_unlisted else "no ledger is under-replicated"
    print_table(columns, rows, empty)
    if why_unlisted:
        print(why_unlisted, "`spark-ledger ledger audit` looks at every ledger.", sep="\n")


def _why_unlisted(now: "AutorecoveryStatus") -> str:
    """Why the list may be incomplete; empty if it has every ledger that lacks copies."""
    if not now.enabled:
        return "autorecovery is disabled, so lost copies are not listed."
    if not now.auditor:
        return "No process hosts autorecovery, so lost copies are not listed."
    return now.alarm


@app.command()
def audit(
    deep: Annotated[
        bool, typer.Option("--deep", help="Read every entry at every bookie, and check it.")
    ] = False,
    spark: Annotated[
        bool,
        typer.Option("--spark", help="As a Spark job: for clusters of more than 100,000 ledgers."),
    ] = False,
    json: JsonOption = False,
    service_url: UrlOption = None,
) -> None:
    """Check that every entry has all its copies at the bookies that its ledger names, and that the
    copies are well placed; changes nothing. Exit status 1 if a ledger is under-replicated, damaged
    (no bookie has an entry) or blocked (its repair cannot go on)."""

    async def work(topics: "TopicClient") -> "Audit":
        from spark_ledger.repair.audit import audit
        from spark_ledger.repair.service import tokens_of
        from spark_ledger.topic.upkeep.ledger_inventory import referred_by

        tokens = await tokens_of(topics.ledgers)
        referred = await referred_by(topics)
        return await audit(topics.ledgers, tokens, deep=deep, referred=referred)

    result = _audit_on_spark(service_url, deep) if spark else with_topics(service_url, work)
    if json:
        print_json(result.counts())
    else:
        rows = [
            (
                ledger.ledger_id,
                _lacking_text(ledger),
                ledger.nowhere or "",
                ledger.misplaced_slots or "",
                ledger.blocked,
            )
            for ledger in sorted(result.wrong, key=lambda ledger: ledger.ledger_id)
        ]
        if rows:
            columns = ("LEDGER", "LACKING AT", "NOWHERE", "MISPLACED", "BLOCKED BY")
            print_table(columns, rows, "")
            print()
        print(", ".join(f"{name}: {count}" for name, count in result.counts().items()))
        if result.silent:
            names = ", ".join(sorted(result.silent))
            print(f"bookies without a response, whose copies count as missing: {names}")
    if not result.is_whole:
        raise typer.Exit(1)


def _audit_on_spark(service_url: str | None, deep: bool) -> "Audit":
    """The audit as a Spark job. Raises BadConfig if Spark is not installed, or cannot start."""
    try:
        from spark_ledger.spark import jobs
    except ModuleNotFoundError as missing:
        if (missing.name or "").partition(".")[0] != "pyspark":
            raise
        raise BadConfig(
            "--spark needs PySpark, which is not installed",
            "Install it (`pip install pyspark`), or audit without --spark.",
        ) from None
    return jobs.audit(jobs.session(), resolve_service_url(service_url), deep=deep)


def _lacking_text(checked: "LedgerCheck") -> str:
    return " ".join(f"{bookie}: {count}" for bookie, count in sorted(checked.lacking.items()))


def _reasons_of(listed: "ListedLedger") -> dict[str, object]:
    facts = {name: getattr(listed, name) for name in ("ledger_id", "blocked", "damaged")}
    return {**facts, "reasons": [reason._asdict() for reason in listed.reasons]}


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
        raise BadConfig(f"--last {last} is below --first {first}", "Give --last at least --first.")

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


def _print_record(record: "LedgerRecord", json: bool) -> None:
    if json:
        print_json(_record_facts(record))
        return
    quorums = (record.ensemble_size, record.write_quorum, record.ack_quorum)
    print_facts(
        {
            "ledger": record.ledger_id,
            "state": record.state.value,
            "E, Qw, Qa": ", ".join(map(str, quorums)),
            "last entry": _or_not_closed(record.last_entry),
            "bytes": _or_not_closed(record.length_bytes),
            "rows": _or_not_closed(record.rows),
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


def _record_facts(record: "LedgerRecord") -> dict[str, object]:
    """The record for JSON, without the verifiers of its password."""
    names = (
        *("ledger_id", "ensemble_size", "write_quorum", "ack_quorum", "last_entry"),
        *("length_bytes", "rows", "durability", "topic", "intent"),
    )
    fragments = [{"first_entry": f.first_entry, "ensemble": f.ensemble} for f in record.fragments]
    facts = {name: getattr(record, name) for name in names}
    facts |= {"state": record.state.value, "custom": dict(record.custom), "fragments": fragments}
    return facts


def _entries(record: "LedgerRecord") -> object:
    return "open" if record.last_entry is None else record.last_entry + 1


def _or_not_closed(value: int | None) -> object:
    return "not closed" if value is None else value
