"""Which replica is asked for which entries, and which one next.

Always true: an entry is asked of members of its write set only, of each at most once; of the next
one only when no answer is expected any more (or the caller expects none in time: then one more,
and again one more once that one keeps it waiting, too). Slots are
preferred in one order, in which suspects come last and, of the others, those first whose files
the reader can read; among equals the order begins at another slot each time, so that load is
spread, and with few slots that hold everything between them.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from bookie_server.api.entry_ids import EntryIds, has, neat
from spark_ledger.ledger.quorum import Quorum


@dataclass(slots=True, eq=False)
class Question:
    """Entries asked of one slot; `open` until it is answered; an answer after `due_at` (seconds
    of the loop's clock) keeps the reader waiting for too long."""

    slot: int
    ids: EntryIds
    due_at: float
    open: bool = True

    def about(self, entry_id: int) -> bool:
        return has(self.ids, entry_id)


@dataclass(frozen=True, slots=True)
class Ask:
    """What is to be asked of one slot."""

    slot: int
    ids: EntryIds


def preference(
    quorum: Quorum, turn: int, suspects: Iterable[int], near: Iterable[int] = ()
) -> list[int]:
    """All slots, the one to be asked first in front. `turn` is any number; with the next one
    another slot comes first. `suspects` are the slots to be asked last, `near` those to be asked
    first where they are none."""
    size = quorum.ensemble_size
    cover = quorum.cover(turn % size)
    others = [slot for step in range(size) if (slot := (turn + step) % size) not in cover]
    last, first = sum(1 << slot for slot in suspects), sum(1 << slot for slot in near)
    return sorted((*cover, *others), key=lambda slot: (last >> slot & 1, ~first >> slot & 1))


def first_asks(quorum: Quorum, ids: EntryIds, order: Sequence[int]) -> list[Ask]:
    """Whom to ask for these entries to begin with: every entry of one slot."""
    size = quorum.ensemble_size
    apart = not isinstance(ids, range)
    if apart or len(ids) <= 2 * size:
        return next_asks(quorum, ids, [], None, order, apart=apart)
    # Each slot's first and last entries are among these, however long the range is.
    edges = (*ids[:size], *ids[-size:])
    return next_asks(quorum, edges, [], None, order)


def next_asks(
    quorum: Quorum,
    missing: Iterable[int],
    asked: Sequence[Question],
    now: float | None,
    order: Sequence[int],
    *,
    apart: bool = False,
) -> list[Ask]:
    """Whom to ask next for the entries that are missing, given the questions `asked` before.

    An entry is left alone while a question about it is open that is not overdue at `now` (None:
    none ever is), and once all its write set was asked. A slot is asked for a range, which may
    hold entries that nobody needs of it; or with `apart` for the ones that are needed.
    """
    masks, size = quorum.write_masks(), quorum.ensemble_size
    wanted = {}
    for entry_id in missing:
        left = _may_be_asked(masks[entry_id % size], entry_id, asked, now)
        if left:
            wanted[entry_id] = left
    asks = []
    for slot in order:
        own = [entry_id for entry_id, left in wanted.items() if left >> slot & 1]
        if own:
            asks.append(Ask(slot, neat(own) if apart else range(own[0], own[-1] + 1)))
            for entry_id in own:
                del wanted[entry_id]
    return asks


def _may_be_asked(holders: int, entry_id: int, asked: Sequence[Question], now: float | None) -> int:
    """The mask of slots that may be asked for one entry now."""
    for question in asked:
        if question.about(entry_id) and holders >> question.slot & 1:
            holders &= ~(1 << question.slot)
            if question.open and (now is None or question.due_at > now):
                return 0
    return holders
