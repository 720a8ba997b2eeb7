"""Events told so that a person can follow them."""

from collections.abc import Iterable
from typing import Any

from bookie_server.api import codec
from bookie_server.api import messages as m
from bookie_server.api.entry import unpack_header
from spark_ledger.metadata import ledger_record, paths
from tests.simulation.exhaustive.messages import CRASH, RESTART, STORE, SYNC, Event, Message

_OWN = {
    SYNC: "the journal's sync ends",
    CRASH: "loses power: what was not synced is gone",
    RESTART: "starts again",
}


def told(story: Iterable[tuple[str, Event]]) -> list[str]:
    """One line for each event."""
    return [f"{place:3} {name:<10} {_event(event)}" for place, (name, event) in enumerate(story, 1)]


def _event(event: Event) -> str:
    if not isinstance(event, Message):
        return _OWN.get(event, "the grace for late answers is over")
    call, request = event.asked
    if call.callee == STORE:
        return f"{call.caller}: {_operation(request)}" if not event.answer else _outcome(event)
    if not event.answer:
        return f"gets {call.caller}'s {_request(call.method, request)}"
    answer = "connection reset" if event.body is None else _response(call.method, event.body)
    return f"is answered by {call.callee} to its {_request(call.method, request)}: {answer}"


def _operation(operation: Any) -> str:
    kind, *args = operation
    if kind == "set" and str(args[0]).startswith(paths.LEDGERS):
        record = ledger_record.decode(args[1])
        end = f" at {record.last_entry}" if record.closed else ""
        return f"sets the record (if at version {args[2]}) to {record.state.value}{end}"
    return f"{kind} {args[0]}"


def _outcome(event: Message) -> str:
    outcome, *facts = event.body
    said = "done" if outcome == "ok" else facts[0].__name__
    return f"is answered by the store to its {event.asked.body[0]}: {said}"


def _request(method: str, body: Any) -> str:
    request = codec.decode_request(method, body)
    if isinstance(request, m.AddRequest):
        kind = "recovery add" if request.adds[0].recovery else "add"
        ids = [unpack_header(b"".join(add.entry)[:64]).entry_id for add in request.adds]
        return f"{kind} of {ids}"
    fence = " (fencing)" if getattr(request, "fence", False) else ""
    if isinstance(request, m.ReadRequest):
        return f"read from {request.first_entry}{fence}"
    return f"{method}{fence}"


def _response(method: str, body: Any) -> str:
    response = codec.decode_response(method, body)
    if isinstance(response, m.AddResponse):
        return ", ".join(result.status.name for result in response.results)
    if isinstance(response, m.ReadResponse):
        found = [result.status.name for result in response.results]
        present = [place for place, status in enumerate(found) if status == "OK"]
        return f"{response.status.name}, entries {present}"
    if isinstance(response, m.ReadLacResponse):
        fenced = ", fenced" if response.fenced else ""
        return f"{response.status.name}, LAC {response.last_add_confirmed}{fenced}"
    return response.status.name if hasattr(response, "status") else "?"
