"""The moves a ledger's record may make, each with its guard.

    absent -> OPEN -> CLOSED                  by its writer
              OPEN -> OPEN                    ensemble change, by its writer
              OPEN -> IN_RECOVERY -> CLOSED   by a recoverer
    a bookie joins for a slot -> it takes the slot, or leaves   by repair, of a CLOSED ledger or a
                                                  fragment that is not an OPEN one's last

Always true: a move is computed from the record as it is in the store; a guard that finds the move
already made says so (`Done`), so that a write whose response was lost may be judged again after a
re-read; a guard that finds the move impossible says why (`Refused`). Of a CLOSED ledger only the
members of a slot change: where it ends, and where its fragments begin, never do.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace

from spark_ledger.metadata.ledger_record import Fragment, Joining, LedgerRecord, LedgerState


@dataclass(frozen=True, slots=True)
class Write:
    """Put this record in the place of the one the move was computed from."""

    record: LedgerRecord


@dataclass(frozen=True, slots=True)
class Done:
    """Nothing to write: the store's record is already what the move would make of it."""


@dataclass(frozen=True, slots=True)
class Refused:
    """The move is not allowed from the record's state."""

    why: str


Move = Write | Done | Refused


@dataclass(frozen=True, slots=True)
class End:
    """Where a ledger ends: its last entry (-1 for none) and what that entry's header counts."""

    last_entry: int
    length_bytes: int
    rows: int


def end_of(record: LedgerRecord) -> End:
    """The end of a closed ledger."""
    assert record.last_entry is not None
    assert record.length_bytes is not None
    assert record.rows is not None
    return End(record.last_entry, record.length_bytes, record.rows)


def with_replacements(
    record: LedgerRecord, replacements: Mapping[int, str], first_entry: int
) -> LedgerRecord:
    """The record with a fragment from `first_entry` on in which slot i is `replacements[i]`.

    A last fragment that begins at `first_entry` is replaced: it holds no entry.
    """
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
    """OPEN -> OPEN: from `first_entry` (last add confirmed + 1) on, the `failed` bookies' slots
    belong to the `replacements`. Needed as long as one failed bookie still sits in its slot."""
    if record.state is not LedgerState.OPEN:
        return Refused(f"the ledger is {record.state.value}")
    last = record.last_fragment
    if all(last.ensemble[slot] == bookie for slot, bookie in replacements.items()):
        return Done()
    if not any(last.ensemble[slot] == bookie for slot, bookie in failed.items()):
        return Refused("other bookies sit in the slots: somebody else changed the ensemble")
    return Write(with_replacements(record, replacements, first_entry))


def close(record: LedgerRecord, end: End) -> Move:
    """OPEN -> CLOSED at what the writer acknowledged."""
    if record.state is LedgerState.CLOSED:
        found = end_of(record)
        return Done() if found == end else Refused(f"the ledger is CLOSED at {found.last_entry}")
    if record.state is LedgerState.IN_RECOVERY:
        return Refused("the ledger is IN_RECOVERY")
    return Write(_closed(record, record.fragments, end))


def mark_in_recovery(record: LedgerRecord) -> Move:
    """OPEN -> IN_RECOVERY. In recovery already: join. Closed already: nothing to recover."""
    if record.state is not LedgerState.OPEN:
        return Done()
    return Write(replace(record, state=LedgerState.IN_RECOVERY))


def close_recovered(
    record: LedgerRecord, began: Fragment, tail: tuple[Fragment, ...], end: End
) -> Move:
    """IN_RECOVERY -> CLOSED, with the ensemble changes made during recovery, in this one write.

    `tail` are the fragments that take the place of the last one, which was `began` when recovery
    began and must be still: from its members the tail was read. A record that is CLOSED by now is
    somebody's result: adopt it.
    """
    if record.state is LedgerState.CLOSED:
        return Done()
    if record.state is LedgerState.OPEN:
        return Refused("the ledger is OPEN again")
    if record.last_fragment != began:
        return Refused("the last fragment is another than recovery began from")
    assert tail[0].first_entry == began.first_entry, "recovery writes nothing below"
    return Write(_closed(record, (*record.fragments[:-1], *tail), end))


# -- members of a slot -------------------------------------------------------------------------


def is_settled(record: LedgerRecord, first_entry: int) -> bool:
    """Whether nothing more comes to the fragment that begins there: it may be repaired."""
    if record.state is LedgerState.OPEN:
        return first_entry < record.last_fragment.first_entry
    return record.closed


def join(record: LedgerRecord, old: str, new: Joining, instead_of: Joining | None = None) -> Move:
    """`new` is named beside the member `old` of its slot, in the place of `instead_of` if that
    one is joining. From then on what it stores of the ledger is no garbage there."""
    refusal = _refusal(record, old, new)
    if refusal is not None:
        return refusal
    found = record.joining_at(new.first_entry, new.slot)
    if found == new:
        return Done()
    if found not in (None, instead_of):
        return Refused(f"bookie {found.bookie_id if found else ''} is joining for the slot")
    others = tuple(one for one in record.joining if one != found)
    place = new.first_entry, new.bookie_id
    if any(place == (one.first_entry, one.bookie_id) for one in others):
        return Refused(f"bookie {new.bookie_id} is joining for another slot")
    return Write(replace(record, joining=(*others, new)))


def swap(record: LedgerRecord, old: str, new: Joining) -> Move:
    """`new`, which was seen to have every entry of its slot since it joined, takes the place of
    `old`."""
    fragment = next((f for f in record.fragments if f.first_entry == new.first_entry), None)
    if fragment is not None and fragment.ensemble[new.slot] == new.bookie_id:
        return Done()
    refusal = _refusal(record, old, new)
    if refusal is not None:
        return refusal
    if record.joining_at(new.first_entry, new.slot) != new:
        return Refused(f"bookie {new.bookie_id} is joining no more, or joined anew")
    assert fragment is not None
    members = {**dict(enumerate(fragment.ensemble)), new.slot: new.bookie_id}
    swapped = Fragment(new.first_entry, tuple(members.values()))
    fragments = tuple(swapped if f is fragment else f for f in record.fragments)
    others = tuple(one for one in record.joining if one != new)
    return Write(replace(record, fragments=fragments, joining=others))


def leave(record: LedgerRecord, one: Joining) -> Move:
    """`one` joins no more: the member whose place it was to take is back."""
    if one not in record.joining:
        return Done()
    return Write(replace(record, joining=tuple(each for each in record.joining if each != one)))


def _refusal(record: LedgerRecord, old: str, new: Joining) -> Refused | None:
    fragment = next((f for f in record.fragments if f.first_entry == new.first_entry), None)
    if fragment is None:
        return Refused(f"no fragment begins at entry {new.first_entry}")
    if not is_settled(record, new.first_entry):
        return Refused(f"the ledger is {record.state.value} and its end undecided")
    if fragment.ensemble[new.slot] != old:
        return Refused(f"bookie {fragment.ensemble[new.slot]} sits in the slot")
    if new.bookie_id in fragment.ensemble:
        return Refused(f"bookie {new.bookie_id} sits in another slot")
    return None


def _closed(record: LedgerRecord, fragments: tuple[Fragment, ...], end: End) -> LedgerRecord:
    return replace(
        record,
        state=LedgerState.CLOSED,
        fragments=fragments,
        last_entry=end.last_entry,
        length_bytes=end.length_bytes,
        rows=end.rows,
    )
