"""Events told so that a person can follow them.

Always true: what a bookie answers, and what is durable there at that moment, is looked up in the
bookie itself: it is run again through its part of the story.
"""

import re
from collections.abc import Iterable, Sequence
from itertools import permutations
from typing import Any, NamedTuple

from bookie_server.api import codec
from bookie_server.api import messages as m
from bookie_server.api.entry import unpack_header
from spark_ledger.metadata import ledger_record, paths
from tests.simulation.exhaustive.actors import Actor
from tests.simulation.exhaustive.messages import CRASH, RESTART, STORE, SYNC, Event, Message
from tests.simulation.exhaustive.stage import Stage

_OWN = {
    SYNC: "the journal's sync ends",
    CRASH: "loses power, and with it what was not synced",
    RESTART: "starts again",
}


class Line(NamedTuple):
    """`place`: of the event in the story; 0 if it tells what came of the one before."""

    place: int
    name: str
    text: str

    def __str__(self) -> str:
        return f"{self.place or '':>3} {_short(self.name):<10} {_short(self.text)}"


def told(story: Iterable[tuple[str, Event]], stage: Stage | None = None) -> list[Line]:
    """One line for each event. With the stage of a scope with crashes (and the production code as
    it was) also one for each answer that leaves a bookie, and what a loss of power takes."""
    lines = []
    bookies = Bookies(stage) if stage is not None and stage.scope.crash else None
    for place, (name, event) in enumerate(story, 1):
        lost, answers = bookies.take(name, event) if bookies else ("", [])
        lines.append(Line(place, name, _event(event) + lost))
        lines += [Line(0, name, answer) for answer in answers]
    return lines


def alike(one: Sequence[Line], other: Sequence[Line], bookies: Sequence[str]) -> dict[str, str]:
    """What the bookies of `one` are called in `other`, if everybody there does and meets the same
    things in the same order; {} if they do not."""
    wanted = _by_name(other, {})
    for order in permutations(bookies):
        names = dict(zip(bookies, order, strict=True))
        if _by_name(one, names) == wanted:
            there = " ".join(f"{line.name} {line.text}" for line in one)
            return {was: now for was, now in names.items() if was in there}
    return {}


def _by_name(lines: Sequence[Line], names: dict[str, str]) -> dict[str, list[str]]:
    found: dict[str, list[str]] = {}
    for line in lines:
        text = re.sub(r"\bb\d+:1\b", lambda met: names.get(met[0], met[0]), line.text)
        found.setdefault(names.get(line.name, line.name), []).append(text)
    return found


def _short(text: str) -> str:
    return re.sub(r"\b(b\d+):1\b", r"\1", text)


class Bookies:
    """The bookies of a stage, taken through a story."""

    def __init__(self, stage: Stage) -> None:
        self._stage = stage
        self._past: dict[str, list[Event]] = {name: [] for name in stage.scope.addresses}

    def take(self, name: str, event: Event) -> tuple[str, list[str]]:
        """What a loss of power took (": the fence"), or "", and the answers that left."""
        past = self._past.get(name)
        if past is None:
            return "", []
        actor = self._after(name, past)
        knew = [] if actor.down else _known(actor)
        sent = [message for message in actor.do(event).sent if message.answer]
        actor.discard()
        past.append(event)
        durable = self._durable(name, past) if sent or event == CRASH else []
        lost = [one for one in knew if one not in durable] if event == CRASH else []
        now = f"; durable there by now: {_listed(durable)}"
        return (f": {_listed(lost)}" if event == CRASH else ""), [
            _answer(message) + now for message in sent if message.body is not None
        ]

    def _after(self, name: str, past: Sequence[Event]) -> Any:
        actor = self._stage.fresh(name)
        for event in past:
            actor.do(event)
        return actor

    def _durable(self, name: str, past: Sequence[Event]) -> list[str]:
        """What it would know if it lost power now."""
        actor = self._after(name, past)
        if not actor.down:
            actor.do(CRASH)
        actor.do(RESTART)
        known = _known(actor)
        actor.discard()
        return known


def _known(actor: Actor) -> list[str]:
    lac, read = actor.facts()
    state, entries = codec.decode_response("ReadLac", lac), codec.decode_response("Read", read)
    assert isinstance(state, m.ReadLacResponse) and isinstance(entries, m.ReadResponse)
    found = ["the fence"] if state.fenced else []
    return found + [
        f"entry {e}" for e, one in enumerate(entries.results) if one.status.name == "OK"
    ]


def _listed(known: Sequence[str]) -> str:
    return ", ".join(known) or "nothing"


def _answer(message: Message) -> str:
    call, request = message.asked
    said = _response(call.method, message.body)
    return f"answers {call.caller}'s {_request(call.method, request)}: {said}"


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
