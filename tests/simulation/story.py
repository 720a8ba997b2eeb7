"""The story of a failed run for the ledger that its violation names: each message with its sender,
receiver and outcome, the faults, the record, and the contents of each disk at the end.

Always true: a story is a selection of what recorder.py heard, in the order of time; it names what
it leaves out. Bookies are called by their address without the port, and by b1', b1'' after their
disk was lost once or twice.
"""

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from bookie_server.api import messages as m
from bookie_server.api.entry import DamagedEntry, unpack_header
from bookie_server.api.status import Status
from spark_ledger.metadata import ledger_record
from spark_ledger.metadata.ledger_record import LedgerRecord
from tests.simulation.chaos import Plan
from tests.simulation.naming import named
from tests.simulation.recorder import Message, Recorder, Scene, ledger_in, recording
from tests.simulation.scenario import SeedFailed, run_seed

LINES_MAX = 76
TOGETHER_S = 0.05
"""Equal requests to several bookies that were sent within this time are one line."""
_TURNS = ("killed", "starts", "exits", "cannot start", "gets a blank")
"""How the notes of a bookie's life begin."""


@dataclass
class Told:
    """One line of a story. `plain`: nothing special happened, it may share a line with others."""

    time_s: float
    text: str
    plain: bool = False
    entry_id: int | None = None


def tell(seed: int, plan: Plan, lines_max: int = LINES_MAX) -> str:
    """Run the seed again, recorded, and tell what happened; or that it did not fail again."""
    with recording() as recorders:
        try:
            run_seed(seed, plan)
        except SeedFailed as failure:
            return "\n".join(_story(recorders[0], failure, lines_max))
    return f"seed {seed} failed, but not when it was run again: it is not deterministic"


def _story(recorder: Recorder, failure: SeedFailed, lines_max: int) -> list[str]:
    cause = str(failure.cause) or repr(failure.cause)
    scene = recorder.broken or recorder.scene(cause, ledger_in(cause))
    ledger_id = scene.ledger_id
    told = [*_notes(recorder, ledger_id, scene.time_s)]
    if ledger_id is not None:
        told += _messages(recorder.messages, ledger_id, scene.time_s)
    told.sort(key=lambda line: line.time_s)
    entry = re.search(r"entr(?:y|ies) (\d+)", scene.violation)
    merged = merged_lines(told, int(entry[1]) if entry else None)
    events = shortened(repeated(merged), lines_max - 24)
    head = [f"seed {failure.seed}: {named(scene.violation)[:300]}"]
    return [*head, *(f"{t.time_s:11.4f}  {t.text}"[:200] for t in events), *_ending(scene)]


# -- metadata, faults, acks ---------------------------------------------------------------------


def _notes(recorder: Recorder, ledger_id: int | None, until_s: float) -> Iterable[Told]:
    mine = f"ledger {ledger_id}"
    for note in recorder.notes:
        if note.time_s > until_s:
            return
        if note.commit is not None:
            for change in note.commit.changes:
                before, after = _record(change.before), _record(change.after)
                one = after or before
                if one is not None and one.ledger_id == ledger_id:
                    who = note.who or "the store"
                    yield Told(note.time_s, f"{who} writes the record: {_moved(before, after)}")
        elif note.who == mine:
            acked = re.fullmatch(r"entry (\d+) acked", note.what)
            entry = int(acked[1]) if acked else None
            yield Told(note.time_s, f"its writer: {note.what}", acked is not None, entry)
        elif _concerns(note.who, note.what, mine):
            yield Told(note.time_s, f"{_short(note.who)}: {named(note.what)}")


def _concerns(who: str, what: str, mine: str) -> bool:
    if who in ("chaos", "VIOLATION"):
        return True
    if who == "store" or who.startswith("ledger "):
        return False
    told_of_life = what.startswith(_TURNS)
    return told_of_life or re.search(rf"\b{mine}\b", what) is not None


def _record(node: object) -> LedgerRecord | None:
    value = getattr(node, "value", b"")
    try:
        return ledger_record.decode(value) if value else None
    except ledger_record.BadLedgerRecord:
        return None


def _moved(before: LedgerRecord | None, after: LedgerRecord | None) -> str:
    if after is None:
        return "deleted"
    end = f" at {after.last_entry}" if after.closed else ""
    was = "" if before is None or before.state is after.state else f"{before.state.value} -> "
    if before is not None and before.fragments == after.fragments:
        return f"{was}{after.state.value}{end}"
    last = after.last_fragment
    members = named(" ".join(last.ensemble))
    return f"{was}{after.state.value}{end}, from entry {last.first_entry} on {members}"


# -- messages -------------------------------------------------------------------------------------


def _messages(messages: Sequence[Message], ledger_id: int, until_s: float) -> Iterable[Told]:
    """Requests about the ledger; equal ones sent together are one line."""
    groups: dict[tuple[str, str], list[Message]] = {}
    for message in messages:
        if message.sent_s > until_s:
            break
        what = _asked(message.request, ledger_id)
        if not what:
            continue
        key = (message.caller, what)
        group = groups.get(key)
        if group is not None and message.sent_s - group[0].sent_s > TOGETHER_S:
            yield _line(key, group, ledger_id)
            group = None
        if group is None:
            group = groups[key] = []
        group.append(message)
    for key, group in groups.items():
        yield _line(key, group, ledger_id)


def _line(key: tuple[str, str], group: Sequence[Message], ledger_id: int) -> Told:
    caller, what = key
    fates = [_fate(message, ledger_id) for message in group]
    told = ", ".join(
        f"{_short(message.address)} {fate}" for message, fate in zip(group, fates, strict=True)
    )
    plain = what.startswith("adds") and all(fate == "OK" for fate in fates)
    entry = re.search(r"adds \w*\s?(\d+)$", what.partition(" (")[0])
    return Told(
        group[0].sent_s, f"{caller} {what}: {told}", plain, int(entry[1]) if entry else None
    )


def _asked(request: m.Request, ledger_id: int) -> str:
    """What a request wants of the ledger; "" if nothing."""
    if isinstance(request, m.AddRequest):
        return _added(request, ledger_id)
    if getattr(request, "ledger_id", None) != ledger_id:
        return ""
    if isinstance(request, m.ReadRequest):
        fencing = "fences and reads" if request.fence else "reads"
        return f"{fencing} {', '.join(_span(*span) for span in request.spans)}"
    if isinstance(request, m.ReadLacRequest):
        waits = f", waiting for more than {request.previous_lac}" if request.wait_ms else ""
        return f"{'fences and asks' if request.fence else 'asks'} for the LAC{waits}"
    if isinstance(request, m.WriteLacRequest):
        return f"announces LAC {request.last_add_confirmed}"
    return ""


def _added(request: m.AddRequest, ledger_id: int) -> str:
    entries, lac, recovery = [], -1, ""
    for add in request.adds:
        try:
            header = unpack_header(b"".join(add.entry)[:64])
        except DamagedEntry:
            continue
        if header.ledger_id == ledger_id:
            entries.append(header.entry_id)
            lac, recovery = header.last_add_confirmed, "in recovery " if add.recovery else ""
    return f"adds {recovery}{_ranges(entries)} (lac {lac})" if entries else ""


def _fate(message: Message, ledger_id: int) -> str:
    if message.carried_out_s is None:
        if message.ended_s is None:
            return "on its way"
        return f"LOST ({message.failure})"
    answered = _answered(message, ledger_id)
    if message.carried_out_at != message.address:
        answered += f" of {_short(message.carried_out_at)}, where it went astray"
    if message.ended_s is not None and message.failure:
        when = "late" if message.carried_out_s > message.ended_s else "answer lost"
        return f"{answered} at {message.carried_out_s:.3f}, {when} ({message.failure})"
    if message.ended_s is None:
        return f"{answered}, answer on its way"
    late = message.ended_s - message.sent_s > 1.0
    return f"{answered} at {message.carried_out_s:.3f}" if late else answered


def _answered(message: Message, ledger_id: int) -> str:
    request, response = message.request, message.response
    if isinstance(request, m.AddRequest) and isinstance(response, m.AddResponse):
        names = {
            result.status.name
            for add, result in zip(request.adds, response.results, strict=False)
            if _is_of(add, ledger_id)
        }
        return "/".join(sorted(names)) or "nothing"
    if isinstance(response, m.ReadResponse):
        lac = f" lac {response.last_add_confirmed}"
        if not response.results:
            return response.status.name + lac
        return _statuses([result.status for result in response.results]) + lac
    if isinstance(response, m.ReadLacResponse):
        return f"{response.status.name} lac {response.last_add_confirmed}"
    return getattr(response, "status", Status.OK).name


def _is_of(add: m.Add, ledger_id: int) -> bool:
    try:
        return unpack_header(b"".join(add.entry)[:64]).ledger_id == ledger_id
    except DamagedEntry:
        return False


def _statuses(statuses: Sequence[Status]) -> str:
    """OK x3 NO_SUCH_ENTRY: runs of the same status."""
    runs: list[list[Status]] = []
    for status in statuses:
        if runs and runs[-1][0] is status:
            runs[-1].append(status)
        else:
            runs.append([status])
    return " ".join(run[0].name + (f" x{len(run)}" if len(run) > 1 else "") for run in runs)


# -- fewer lines ----------------------------------------------------------------------------------


def merged_lines(told: Sequence[Told], about: int | None) -> list[Told]:
    """Plain lines in a row as one, unless they speak of the entry it is all about."""
    merged: list[Told] = []
    row: list[Told] = []
    for line in told:
        if line.plain and (about is None or line.entry_id != about):
            row.append(line)
            continue
        merged += _as_one(row)
        row = []
        merged.append(line)
    return merged + _as_one(row)


def _as_one(row: Sequence[Told]) -> list[Told]:
    if len(row) < 3:
        return list(row)
    acked = [line.entry_id for line in row if " acked" in line.text and line.entry_id is not None]
    told = f"its writer adds and is answered OK by all; acked: {_ranges(acked) or 'none'}"
    return [Told(row[0].time_s, f"{told} ({len(row)} events until {row[-1].time_s:.4f})")]


def repeated(told: Sequence[Told]) -> list[Told]:
    """Lines in a row that say the same, but for the entry, as one."""
    kept: list[Told] = []
    count, said, ids = 1, "", [""]
    for line in told:
        number = re.search(r"^its writer: entry (\d+) failed$", line.text)
        same = "its writer: entries failed" if number else line.text
        if kept and same == said:
            count += 1
            ids.append(number[1] if number else "")
            more = f"{said}: {ids[0]} to {ids[-1]}" if number else f"{said} ({count} times)"
            kept[-1] = replace(kept[-1], text=more)
        else:
            count, said, ids = 1, same, [number[1] if number else ""]
            kept.append(line)
    return kept


def shortened(told: list[Told], lines_max: int) -> list[Told]:
    """The beginning and, for the most part, what came last."""
    if len(told) <= lines_max:
        return told
    head, tail = told[: lines_max // 4], told[len(told) - (lines_max - lines_max // 4 - 1) :]
    left_out = len(told) - len(head) - len(tail)
    return [*head, Told(head[-1].time_s, f"... {left_out} events are left out ..."), *tail]


# -- how it stood ---------------------------------------------------------------------------------


def _ending(scene: Scene) -> list[str]:
    if scene.ledger_id is None:
        return []
    lines = [f"at {scene.time_s:.4f}, of ledger {scene.ledger_id}:"]
    for held in scene.bookies:
        kept = f"durable: {_ranges(sorted(held.durable)) or 'nothing'}"
        if held.cached:
            kept += f"; only in the page cache: {_ranges(sorted(held.cached))}"
        if held.placed:
            kept += f"; in a direct log beyond its mark: {_ranges(sorted(held.placed))}"
        fence = f"fence record {held.fence}" if held.fence else "no fence record"
        if held.fence_replied:
            fence += ", and it had said that it was fenced"
        down = "" if held.running else " (down)"
        lines.append(f"  {named(held.bookie_id)}{down} {kept}; {fence}")
    if scene.handle is not None:
        handle = scene.handle
        pending = ", ".join(f"{e}: slots {_slots(mask)}" for e, mask in handle.pending.items())
        lines.append(
            f"  its writer: LAC {handle.last_add_confirmed}, pending {pending or 'nothing'},"
            f" ensemble {named(' '.join(handle.ensemble))}"
            + (f", failed: {handle.failure}" if handle.failure else "")
        )
    return lines


def _slots(mask: int) -> str:
    slots = [str(slot) for slot in range(mask.bit_length()) if mask >> slot & 1]
    return "+".join(slots) if slots else "none"


def _ranges(entries: Sequence[int]) -> str:
    """0-3, 7: consecutive ids together."""
    runs: list[list[int]] = []
    for entry in entries:
        if runs and entry == runs[-1][-1] + 1:
            runs[-1].append(entry)
        else:
            runs.append([entry])
    return ", ".join(_span(run[0], run[-1]) for run in runs)


def _span(first: int, last: int) -> str:
    return str(first) if first == last else f"{first}-{last}"


def _short(address: str) -> str:
    return address.removesuffix(":1")
