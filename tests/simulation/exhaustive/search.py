"""Every state of the actors together: each choice of which event happens next, at whom.

Always true: a state is the kind of each actor, the messages on their way, and the ghost; it holds
everything that can matter, so a state met again is not followed again, and every step out of every
state is taken and judged once. States are numbers: a bit for each message on its way, then a field
for each actor's kind, then the ghost's number. They are met in the order of events that lead there,
so the first violation has a shortest story.
"""

import time
from array import array
from collections.abc import Callable, Hashable, Mapping
from dataclasses import dataclass, field

from tests.simulation.exhaustive.behaviour import Behaviours, Kind
from tests.simulation.exhaustive.finish import Finish
from tests.simulation.exhaustive.judge import Judge
from tests.simulation.exhaustive.messages import CRASH, Event, Message, Seen
from tests.simulation.exhaustive.stage import Stage

_Row = tuple[int, int, int, tuple[Seen, ...], int]
"""Bits needed, bits changed, bits kept, what is seen, the number of the choice."""


@dataclass
class Found:
    """What an exploration found. `story`: the events that led to the violation, in order."""

    states: int = 0
    steps: int = 0
    longest: int = 0
    complete: bool = False
    ends: dict[Hashable, int] = field(default_factory=dict)
    """How many final states have which outcome."""
    audits: int = 0
    """How many ways the clients' death in some state was followed by a fresh client's recovery."""
    depth_done: int = 0
    """Every run of up to so many events was followed to its last."""
    open: int = 0
    """States that were met and not followed."""
    runs: int = 0
    """Complete orders of events; 0 if they were not counted."""
    traces: int = 0
    violation: str = ""
    story: list[tuple[str, Event]] = field(default_factory=list)
    seconds: float = 0.0


class Composition:
    """The actors of a scope put together. `crashing`: the only bookie that may crash, if given;
    `final` judges final states; `only`: the one invariant that is judged, of final states
    too (see Judge)."""

    def __init__(
        self,
        behaviours: Behaviours,
        crashing: str | None = None,
        final: "Callable[[Mapping[str, Kind], int, Judge], tuple[Hashable, str]] | None" = None,
        only: str = "",
    ) -> None:
        self.stage: Stage = behaviours.stage
        self.judge = Judge(only)
        self._learners = behaviours.learners
        self._names = list(self.stage.names)
        self._crashing = crashing
        alphabet = [m for learner in self._learners.values() for m in learner.alphabet]
        self._bits = {message: 1 << place for place, message in enumerate(alphabet)}
        self._requests = sum(bit for message, bit in self._bits.items() if not message.answer)
        self._token = 1 << len(alphabet)
        self._choices: list[tuple[str, Event]] = []
        self._shifts: list[int] = []
        shift = len(alphabet) + 1
        for name in self._names:
            self._shifts.append(shift)
            shift += max(1, len(self._learners[name].kinds).bit_length())
        self._ghost_shift = shift
        self._masks = [(1 << len(self._learners[n].kinds).bit_length()) - 1 for n in self._names]
        self._keeps = [self._kept(name) for name in self._names]
        self._rows = [self._table(place, name) for place, name in enumerate(self._names)]
        finish = Finish(behaviours.stage, only)
        self._judge_final = final or finish.judge
        self._interrupted = None if final else finish.interrupted
        self._shown = [self._facts_of(name) for name in self._names]

    # -- tables --------------------------------------------------------------------------------

    def _kept(self, name: str) -> list[int]:
        """By kind of a client: all bits but those of answers that it does not wait for."""
        learner = self._learners[name]
        answers = sum(self._bits[m] for m in learner.alphabet if m.answer)
        kept = []
        for kind in learner.kinds:
            awaited = sum(self._bits[e] for e, _, _ in kind.next if isinstance(e, Message))
            kept.append(~(answers & ~awaited))
        return kept

    def _table(self, place: int, name: str) -> list[list[_Row]]:
        kinds = self._learners[name].kinds
        return [self._rows_of(place, name, number, kind) for number, kind in enumerate(kinds)]

    def _facts_of(self, name: str) -> list[int]:
        """By kind, a number for what a bookie or the store shows; clients show nothing."""
        numbers: dict[Hashable, int] = {}
        kinds = self._learners[name].kinds
        if kinds[0].example.waiting is not None:
            return [0] * len(kinds)
        return [numbers.setdefault(kind.facts, len(numbers)) for kind in kinds]

    def _rows_of(self, place: int, name: str, number: int, kind: Kind) -> list[_Row]:
        rows = []
        for event, step, after in kind.next:
            need = 0
            if isinstance(event, Message):
                need = self._bits[event]
            elif event == CRASH:
                if self._crashing not in (None, name):
                    continue
                need = self._token
            change = need ^ ((number ^ after) << self._shifts[place])
            for message in step.sent:
                change ^= self._bits[message]
            self._choices.append((name, event))
            kept = self._keeps[place][after]
            rows.append((need, change, kept, step.seen, len(self._choices) - 1))
        return rows

    def first(self) -> int:
        """The state in which exploration begins."""
        ghost = self.judge.after(self.judge.first, tuple(self.stage.seen))
        state = self._token if self.stage.scope.crash else 0
        for place, name in enumerate(self._names):
            learner = self._learners[name]
            began = self.stage.began[name]
            state |= learner.root.kind << self._shifts[place]
            for message in began.sent:
                state |= self._bits[message]
            if began.seen:
                ghost = self.judge.after(ghost, began.seen)
        assert ghost >= 0, self.judge.violations
        return state | ghost << self._ghost_shift

    def steps(self, state: int) -> list[tuple[int, int, int]]:
        """(place of the actor, number of the choice, state after it) of all that may happen. For
        counting: `explore` does the same, faster. No invariant may be broken."""
        ghost, keep, found = state >> self._ghost_shift, -1, []
        kinds = [state >> s & m for s, m in zip(self._shifts, self._masks, strict=True)]
        for kept, kind in zip(self._keeps, kinds, strict=True):
            keep &= kept[kind]
        for place, kind in enumerate(kinds):
            for need, change, kept_after, seen, choice in self._rows[place][kind]:
                if need & state == need:
                    new = (state ^ change) & keep & kept_after
                    after = self.judge.after(ghost, seen) if seen else ghost
                    assert after >= 0, self.judge.violations
                    found.append((place, choice, new ^ (ghost ^ after) << self._ghost_shift))
        return found

    # -- exploring -----------------------------------------------------------------------------

    def explore(self, *, seconds: float = float("inf"), states_max: int = 1 << 60) -> Found:
        """Meet every state. Ends early at a violation, or when time or states run out."""
        found = Found()
        began = time.perf_counter()
        first = self.first()
        order, met = [first], {first}
        parents, choices = array("I", [0]), array("H", [0])
        depth_ends, depth = 1, 0
        at = 0
        after, ghost_shift = self.judge.after, self._ghost_shift
        columns = (self._rows, self._keeps, self._shown, self._shifts, self._masks)
        fields = list(zip(*columns, strict=True))
        audited: dict[tuple[int, ...], None] = {}
        while at < len(order):
            if at == depth_ends:
                depth, depth_ends = depth + 1, len(order)
            if not at & 4095 and (time.perf_counter() - began > seconds or at > states_max):
                break
            state = order[at]
            ghost = state >> ghost_shift
            keep, enabled, shown = -1, [], [ghost]
            for rows, keeps, shows, shift, mask in fields:
                kind = state >> shift & mask
                keep &= keeps[kind]
                enabled.append(rows[kind])
                shown.append(shows[kind])
            key = tuple(shown)
            if key not in audited:
                audited[key] = None
                if self._dying(found, state):
                    return self._ended(found, began, at, None, (order, parents, choices))
            steps = found.steps
            for rows_now in enabled:
                for need, change, kept, seen, choice in rows_now:
                    if need & state != need:
                        continue
                    found.steps += 1
                    new = (state ^ change) & keep & kept
                    if seen:
                        ghost_after = after(ghost, seen)
                        if ghost_after < 0:
                            return self._ended(found, began, at, choice, (order, parents, choices))
                        new ^= (ghost ^ ghost_after) << ghost_shift
                    if new not in met:
                        met.add(new)
                        order.append(new)
                        parents.append(at)
                        choices.append(choice)
            if found.steps == steps and not self._final(found, state):
                return self._ended(found, began, at, None, (order, parents, choices))
            at += 1
        found.complete = at == len(order)
        found.states, found.longest, found.audits = len(order), depth, len(audited)
        found.depth_done, found.open = max(0, depth - 1), len(order) - at
        found.seconds = time.perf_counter() - began
        return found

    def _kinds(self, state: int) -> dict[str, Kind]:
        return {
            name: self._learners[name].kinds[state >> shift & mask]
            for name, shift, mask in zip(self._names, self._shifts, self._masks, strict=True)
        }

    def _dying(self, found: Found, state: int) -> bool:
        """Whether something is lost if both clients die in this state."""
        if self._interrupted is not None:
            ghost = state >> self._ghost_shift
            found.violation = self._interrupted(self._kinds(state), ghost, self.judge)
        return bool(found.violation)

    def _final(self, found: Found, state: int) -> bool:
        """Judge a state in which nothing can happen any more; whether it is as it must be."""
        assert not state & self._requests, "a request is left that nobody was given when learning"
        ghost = state >> self._ghost_shift
        outcome, violation = self._judge_final(self._kinds(state), ghost, self.judge)
        found.ends[outcome] = found.ends.get(outcome, 0) + 1
        if violation:
            found.violation = violation
        return not violation

    def _ended(
        self,
        found: Found,
        began: float,
        at: int,
        last: int | None,
        met: "tuple[list[int], array[int], array[int]]",
    ) -> Found:
        """The story that ends at state `at`, with the choice `last` on top."""
        order, parents, choices = met
        story = [] if last is None else [last]
        while at:
            story.append(choices[at])
            at = parents[at]
        found.story = [self._choices[choice] for choice in reversed(story)]
        if not found.violation:
            found.violation = str(self.judge.violations[0])
        found.states, found.longest = len(order), len(story)
        found.seconds = time.perf_counter() - began
        return found
