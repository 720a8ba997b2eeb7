"""The contents of messages and of records of the store, for observers: the ledger and sender of a
message, its meaning, and its text in a trace.
"""

import zlib
from functools import lru_cache
from typing import Any

from bookie_server.api import codec
from bookie_server.api import messages as m
from bookie_server.api.entry import DamagedEntry, EntryHeader, unpack_header
from bookie_server.api.messages import ids_in
from bookie_server.api.status import Meaning, Status, meaning
from spark_ledger.metadata import deleted_ledgers, ledger_record, paths
from spark_ledger.metadata.ledger_record import LedgerRecord
from tests.simulation.ghost import LedgerGhost
from tests.simulation.network import Exchange
from tests.simulation.store import Change, Commit

LEDGERS = paths.LEDGERS + "/"
REPAIR_TOKEN = b"of repair"
"""What bookies of the simulated cluster know repair by."""


def is_of_repair(ledger: LedgerGhost, request: m.ReadRequest) -> bool:
    """Repair fences with its reads of a CLOSED ledger, which go to every fragment and are no
    recovery's."""
    by_repair = request.token == REPAIR_TOKEN or ledger.record.durability == "page-cache"
    return ledger.closed and by_repair


def entitled(ledger: LedgerGhost, caller: str, status: Status) -> bool:
    """Whether a message counts: it was taken, or comes from the ledger's writer or from a client
    that fenced it, and not from an intruder, which may send anything."""
    if status is Status.OK or caller == ledger.author:
        return True
    told = ledger.recoveries.get(caller)
    return told is not None and bool(told.fenced)


def headers(request: m.Request) -> list[EntryHeader | None]:
    """The headers of a request's adds; None for an add without a header."""
    if not isinstance(request, m.AddRequest):
        return []
    found: list[EntryHeader | None] = []
    for add in request.adds:
        parts = add.entry
        try:
            found.append(unpack_header(parts[0] if len(parts[0]) >= 64 else b"".join(parts)))
        except DamagedEntry:
            found.append(None)
    return found


def results(
    request: m.ReadRequest, response: m.ReadResponse, entries: int
) -> list[tuple[int, m.EntryResult]]:
    """(entry, result) of a read. A negative for the whole request speaks of each of the range, of
    which only the first `entries` of the ledger and one more matter."""
    if response.results or meaning(response.status) is Meaning.POSITIVE:
        count, first = len(response.results), request.first_entry + response.skipped
        spans = [(first, first + count)] if request.tail_entries else request.spans
        told = list(zip(ids_in(spans, count), response.results, strict=True))
        rest = range(first + count, entries + 1)
        later = [(id_, response.result(id_ - request.first_entry)) for id_ in rest]
        return told + [(id_, result) for id_, result in later if result is not None]
    spans = [(first, min(last, entries)) for first, last in request.spans if first <= entries]
    ids = ids_in(spans or [(request.first_entry, request.first_entry)], entries + 1)
    return [(entry_id, m.EntryResult(response.status)) for entry_id in ids]


def statuses(response: m.Response) -> list[Status]:
    """Every status in a response."""
    if isinstance(response, m.AddResponse):
        return [result.status for result in response.results]
    if isinstance(response, m.ReadResponse):
        return [response.status, *(result.status for result in response.results)]
    return [response.status]


_RECORD_LENGTH = len(paths.ledger(0))


def is_record(path: str) -> bool:
    """Whether a node below LEDGERS is a ledger's record; else it is a folder of them."""
    return len(path) == _RECORD_LENGTH


def named_deleted(change: Change) -> tuple[frozenset[int], frozenset[int]]:
    """The ledgers that the folder names as deleted, before the change and after it."""
    before, after = (b"" if node is None else node.value for node in (change.before, change.after))
    return deleted_ledgers.decode(before, change.path), deleted_ledgers.decode(after, change.path)


def named_in(commit: Commit) -> frozenset[int]:
    """The ledgers that folders name as deleted which the write changed."""
    folders = [one for one in commit.changes if one.path.startswith(LEDGERS)]
    named = [named_deleted(one)[1] for one in folders if not is_record(one.path)]
    return frozenset().union(*named)


def record(node: Any) -> LedgerRecord | None:
    return decoded_record(node.value) if node is not None and node.value else None


decoded_record = lru_cache(maxsize=256)(ledger_record.decode)
"""The same bytes are decoded several times: as the old record, as the new one, as an answer."""


def decoded(exchange: Exchange) -> tuple[m.Request, m.Response]:
    request = codec.decode_request(exchange.method, exchange.request)
    return request, codec.decode_response(exchange.method, exchange.answer)


def changed(change: Change) -> str:
    if change.after is None:
        return f"-{change.path}"
    version = change.after.version
    crc = zlib.crc32(change.after.value)
    told = f"{'+' if change.before is None else ''}{change.path} v{version} {crc:08x}"
    is_ledger = change.path.startswith(LEDGERS) and is_record(change.path)
    found = record(change.after) if is_ledger else None
    if found is not None:
        last = found.last_fragment
        told += f" {found.state.value} end {found.last_entry} from {last.first_entry}"
        told += f" on {' '.join(last.ensemble)}"
    return told


def told(request: m.Request, response: m.Response, headers: list[EntryHeader | None]) -> str:
    if isinstance(request, m.AddRequest) and isinstance(response, m.AddResponse):
        parts = []
        for add, header, result in zip(request.adds, headers, response.results, strict=False):
            entry = f"{header.ledger_id}:{header.entry_id}" if header is not None else "?"
            recovery = " recovery" if add.recovery else ""
            parts.append(f"{entry}{recovery} {result.status.name}")
        return ", ".join(parts)
    if isinstance(request, m.ReadRequest) and isinstance(response, m.ReadResponse):
        fence = " fence" if request.fence else ""
        found = [result.status.name for result in response.results]
        spans = " ".join(f"{first}-{last}" for first, last in request.spans)
        span = f"{request.ledger_id}:{spans}{fence}"
        return f"{span} {response.status.name} {found} lac {response.last_add_confirmed}"
    if isinstance(request, m.ReadLacRequest) and isinstance(response, m.ReadLacResponse):
        fence = " fence" if request.fence else ""
        return f"{request.ledger_id}{fence} {response.status.name} {response.last_add_confirmed}"
    return type(request).__name__
