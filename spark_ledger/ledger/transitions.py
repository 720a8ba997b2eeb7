"""The moves (changes of state) of a ledger's record, each with the condition that allows it.

    no record -> OPEN -> CLOSED               by its writer
              OPEN -> OPEN                    ensemble change, by its writer
              OPEN -> IN_RECOVERY -> CLOSED   by a recoverer
    a bookie joins for a slot -> it takes the slot, or leaves   by repair, where the fragment is
                                                                complete

Always true: a move is computed from the record as it is in the store. Its function returns
`NoWriteNeeded` if the move is already made, so the caller can repeat it after a lost response; it
returns `MoveRefusal` with the reason if the move is not allowed. Of a CLOSED ledger only the
members of slots change, never its end or the first entry of a fragment.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace

from spark_ledger.metadata.ledger_record import Fragment, JoiningBookie, LedgerRecord, RecordState


@dataclass(frozen=True, slots=True)
class Write:
    """Write this record in the place of the one from which the move was computed."""

    record: LedgerRecord


@dataclass(frozen=True, slots=True)
class NoWriteNeeded:
    """The record in the store already has the move's result."""


@dataclass(frozen=True, slots=True)
class MoveRefusal:
    """The record in the store does not allow the move."""

    why: str


Move = Write | NoWriteNeeded | MoveRefusal


@dataclass(frozen=True, slots=True)
class LastEntry:
    """Where a ledger ends: its last entry (-1: it is empty) and the counts in that entry's
    header."""

    last_entry: int
    length_bytes: int
    rows: int


def end_of(record: LedgerRecord) -> LastEntry:
    """The end of a closed ledger."""
    assert record.last_entry is not None
    assert record.length_bytes is not None
    assert record.rows is not None
    return LastEntry(record.last_entry, record.length_bytes, record.rows)


def with_replacements(
    record: LedgerRecord, replacements: Mapping[int, str], first_entry: int
) -> LedgerRecord:
    """The record with a further fragment from `first_entry` on, in which the `replacements` own
    their slots. If the last fragment begins at `first_entry`, it has no entry, and the new one
    takes its place."""
    last = record.last_fragment
    if first_entry < last.first_entry:
        raise AssertionError(f"a fragment at {first_entry} below the last at {last.first_entry}")
    ensemble = tuple(replacements.get(slot, bookie) for slot, bookie in enumerate(last.ensemble))
    kept = record.fragments[:-1] if first_entry == last.first_entry else record.fragments
    return replace(record, fragments=(*kept, Fragment(first_entry, ensemble)))


def change_ensemble(
    record: LedgerRecord,
    failed: Mapping[int, str],
    replacements: Mapping[int, str],
    first_entry: int,
) -> Move:
    """OPEN -> OPEN: from `first_entry` (last add confirmed + 1) on, the `replacements` own the
    slots of the `failed` bookies (both by slot). Refused if no failed bookie owns its slot now."""
    if record.state is not RecordState.OPEN:
        return MoveRefusal(f"the ledger is {record.state.value}")
    last = record.last_fragment
    if all(last.ensemble[slot] == bookie for slot, bookie in replacements.items()):
        return NoWriteNeeded()
    if not any(last.ensemble[slot] == bookie for slot, bookie in failed.items()):
        return MoveRefusal("other bookies own the slots: another process changed the ensemble")
    return Write(with_replacements(record, replacements, first_entry))


def close(record: LedgerRecord, end: LastEntry) -> Move:
    """OPEN -> CLOSED at the last entry that the writer acknowledged."""
    if record.state is RecordState.CLOSED:
        closed = end_of(record)
        return (
            NoWriteNeeded()
            if closed == end
            else MoveRefusal(f"the ledger is CLOSED at {closed.last_entry}")
        )
    if record.state is RecordState.IN_RECOVERY:
        return MoveRefusal("the ledger is IN_RECOVERY")
    return Write(_closed_record(record, record.fragments, end))


def mark_in_recovery(record: LedgerRecord) -> Move:
    """OPEN -> IN_RECOVERY. A ledger that is in recovery or closed already needs no write."""
    if record.state is not RecordState.OPEN:
        return NoWriteNeeded()
    return Write(replace(record, state=RecordState.IN_RECOVERY))


def close_recovered(
    record: LedgerRecord, began: Fragment, tail: tuple[Fragment, ...], end: LastEntry
) -> Move:
    """IN_RECOVERY -> CLOSED, with the ensemble changes made during recovery, in this one write.

    The last fragment must still be `began`, as it was when recovery began, because recovery read
    the tail of the ledger from its members; the fragments `tail` take its place. If the record is
    CLOSED now, another recoverer has closed the ledger, and the caller adopts its result.
    """
    if record.state is RecordState.CLOSED:
        return NoWriteNeeded()
    if record.state is RecordState.OPEN:
        return MoveRefusal("the ledger is OPEN again")
    if record.last_fragment != began:
        return MoveRefusal("the last fragment has changed since recovery began")
    assert tail[0].first_entry == began.first_entry, "recovery writes nothing below"
    return Write(_closed_record(record, (*record.fragments[:-1], *tail), end))


# -- members of a slot -------------------------------------------------------------------------


def is_fragment_complete(record: LedgerRecord, first_entry: int) -> bool:
    """Whether no further entry will be added to the fragment that begins at `first_entry`, so that
    it may be repaired."""
    if record.state is RecordState.OPEN:
        return first_entry < record.last_fragment.first_entry
    return record.closed


def join(
    record: LedgerRecord, old: str, new: JoiningBookie, instead_of: JoiningBookie | None = None
) -> Move:
    """`new` joins for the slot of the member `old`; if `instead_of` is joining now, it takes the
    place of `instead_of`. From then on the bookie of `new` keeps its copies of the ledger."""
    refusal = _refusal(record, old, new)
    if refusal is not None:
        return refusal
    present = record.joining_at(new.first_entry, new.slot)
    if present == new:
        return NoWriteNeeded()
    if present not in (None, instead_of):
        return MoveRefusal(f"bookie {present.bookie_id if present else ''} is joining for the slot")
    others = tuple(joining for joining in record.joining if joining != present)
    place = new.first_entry, new.bookie_id
    if any(place == (joining.first_entry, joining.bookie_id) for joining in others):
        return MoveRefusal(f"bookie {new.bookie_id} is joining for another slot")
    return Write(replace(record, joining=(*others, new)))


def swap(record: LedgerRecord, old: str, new: JoiningBookie) -> Move:
    """`new` takes the slot of `old`. The caller has checked, after `new` joined, that it has every
    entry of the slot."""
    fragment = next((f for f in record.fragments if f.first_entry == new.first_entry), None)
    if fragment is not None and fragment.ensemble[new.slot] == new.bookie_id:
        return NoWriteNeeded()
    refusal = _refusal(record, old, new)
    if refusal is not None:
        return refusal
    if record.joining_at(new.first_entry, new.slot) != new:
        return MoveRefusal(f"bookie {new.bookie_id} has left the slot, or joined again")
    assert fragment is not None
    members = {**dict(enumerate(fragment.ensemble)), new.slot: new.bookie_id}
    swapped = Fragment(new.first_entry, tuple(members.values()))
    fragments = tuple(swapped if f is fragment else f for f in record.fragments)
    others = tuple(joining for joining in record.joining if joining != new)
    return Write(replace(record, fragments=fragments, joining=others))


def leave(record: LedgerRecord, leaving: JoiningBookie) -> Move:
    """`leaving` no longer joins, because the member of the slot is back."""
    if leaving not in record.joining:
        return NoWriteNeeded()
    others = tuple(joining for joining in record.joining if joining != leaving)
    return Write(replace(record, joining=others))


def _refusal(record: LedgerRecord, old: str, new: JoiningBookie) -> MoveRefusal | None:
    fragment = next((f for f in record.fragments if f.first_entry == new.first_entry), None)
    if fragment is None:
        return MoveRefusal(f"no fragment begins at entry {new.first_entry}")
    if not is_fragment_complete(record, new.first_entry):
        return MoveRefusal(f"the ledger is {record.state.value} and its end undecided")
    if fragment.ensemble[new.slot] != old:
        return MoveRefusal(f"bookie {fragment.ensemble[new.slot]} owns the slot")
    if new.bookie_id in fragment.ensemble:
        return MoveRefusal(f"bookie {new.bookie_id} owns another slot")
    return None


def _closed_record(
    record: LedgerRecord, fragments: tuple[Fragment, ...], end: LastEntry
) -> LedgerRecord:
    return replace(
        record,
        state=RecordState.CLOSED,
        fragments=fragments,
        last_entry=end.last_entry,
        length_bytes=end.length_bytes,
        rows=end.rows,
    )
