"""What is known of each ledger, and which of it the indexes do not have yet.

Always true: each change gets a higher revision, so of two copies of a state the later is known; a
change made from an older copy takes back nothing that came in between (entry_index.merged). What
a directory says that was away is older, whatever its revisions (entry_index.brought_back); of a
ledger that only such a one knows, what came meanwhile was forgotten: a fence, say.
"""

from collections.abc import Iterable
from dataclasses import replace
from typing import NamedTuple

from bookie_server.logs.index import EVERY_LEDGER, LedgerState, LimboReason, brought_back, merged


class Changes(NamedTuple):
    """What a flush brings to every index: the forgotten ledgers' states go first."""

    states: list[LedgerState]
    forgotten: list[int]


class LedgerStates:
    """States by ledger id."""

    def __init__(self) -> None:
        self._states: dict[int, LedgerState] = {}
        self._dirty: dict[int, None] = {}
        self._forgotten: dict[int, None] = {}

    def __len__(self) -> int:
        return len(self._states) - (EVERY_LEDGER in self._states)

    def get(self, ledger_id: int) -> LedgerState | None:
        return self._states.get(ledger_id)

    def all(self) -> list[LedgerState]:
        """Of every ledger, and of EVERY_LEDGER, by id."""
        return [self._states[ledger_id] for ledger_id in sorted(self._states)]

    def set(self, state: LedgerState) -> LedgerState:
        """A change of now. Returns it with its revision."""
        known = self._states.get(state.ledger_id)
        if known is not None and state.revision < known.revision:
            state = merged(state, known)
        return self.restore(replace(state, revision=state.revision + 1))

    def restore(self, state: LedgerState) -> LedgerState:
        """A change of an earlier run, which has its revision already."""
        self._states[state.ledger_id] = state
        self._dirty[state.ledger_id] = None
        self._forgotten.pop(state.ledger_id, None)
        return state

    def forget(self, ledger_id: int) -> None:
        """Nothing is known of the ledger any more."""
        if self._states.pop(ledger_id, None) is not None:
            self._dirty.pop(ledger_id, None)
            self._forgotten[ledger_id] = None

    @property
    def has_changes(self) -> bool:
        return bool(self._dirty or self._forgotten)

    def take_changes(self) -> Changes:
        """What changed since the last call."""
        changes = Changes([self._states[i] for i in self._dirty], list(self._forgotten))
        self._dirty, self._forgotten = {}, {}
        return changes

    def load(
        self, copies: Iterable[Iterable[LedgerState]], away: Iterable[Iterable[LedgerState]] = ()
    ) -> None:
        """What each index says, those of directories that were `away` apart; where one lacks
        something, all are told with the next flush."""
        every = [{state.ledger_id: state for state in copy} for copy in copies]
        older = [{state.ledger_id: state for state in copy} for copy in away]
        for copy in every:
            for ledger_id, state in copy.items():
                known = self._states.get(ledger_id)
                self._states[ledger_id] = state if known is None else merged(state, known)
        for copy in older:
            for ledger_id, state in copy.items():
                known = self._states.get(ledger_id)
                self._states[ledger_id] = (
                    doubted(state) if known is None else brought_back(known, state)
                )
        for ledger_id, state in self._states.items():
            if any(copy.get(ledger_id) != state for copy in (*every, *older)):
                self._dirty[ledger_id] = None


def doubted(state: LedgerState) -> LedgerState:
    """As it may have been when it was forgotten; a tombstone says all there is to say."""
    if state.deleted or state.ledger_id == EVERY_LEDGER:
        return state
    return replace(state, fenced=True, limbo=LimboReason.LOST)
