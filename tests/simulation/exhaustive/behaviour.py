"""What each actor does, for every order of events that can befall it: its local histories.

Always true:
- `Behaviours.learn` runs production code once for each local history, from the actor's beginning,
  until no actor sends a message that the others have not been given in every order. What may
  befall an actor is taken widely: any message that anybody may ever send it, once, at any moment
  (to a client: while it waits for it; to the store: in its caller's order), and the actor's own
  events. So every history of every interleaving is among those learnt, and others too;
- two histories are of one `kind` if the actor's facts are equal, the same events may follow, and
  each is followed by the same step and by one kind again: no future tells them apart. It is
  computed from the ends of the histories back, so it is exact, not guessed.
"""

import gc
import time
from collections.abc import Hashable, Iterator
from dataclasses import dataclass, field

from tests.simulation.exhaustive.actors import Actor
from tests.simulation.exhaustive.messages import STORE, Asked, Call, Event, Message, Step
from tests.simulation.exhaustive.stage import Stage

RUNS_PER_COLLECTION = 4000  # a run leaves cycles behind
ENDLESS = 200  # events of one local history: an actor that never comes to its end


@dataclass(eq=False)
class History:
    """One local history: what may follow of the actor's own accord, and what has followed."""

    parent: "History | None"
    event: Event | None
    own: tuple[str, ...]
    waiting: frozenset[Asked] | None
    """What a client waits for an answer to; None of who takes any request."""
    taken: dict[Call, None]
    """Requests that were delivered."""
    facts: Hashable
    broken: str = ""
    """The one bookie that broke connections of a client so far: only one crashes."""
    depth: int = 0
    next: dict[Event, tuple[Step, "History"]] = field(default_factory=dict)
    kind: int = -1

    def events(self) -> list[Event]:
        """Everything that happened, first to last."""
        found: list[Event] = []
        at = self
        while at.parent is not None:
            assert at.event is not None
            found.append(at.event)
            at = at.parent
        return found[::-1]


@dataclass(frozen=True)
class Kind:
    """Histories that no future tells apart. `next`: by event, the step and the kind after it."""

    facts: Hashable
    next: tuple[tuple[Event, Step, int], ...]
    example: History


class Learner:
    """All local histories of one actor."""

    def __init__(self, stage: Stage, name: str, events_max: int, deadline: float) -> None:
        self.name = name
        self._deadline = deadline
        self._events_max = events_max
        self.runs = 0
        """How often the actor was run from its beginning."""
        self.cut = False
        """Some histories were not followed to their ends."""
        self.kinds: list[Kind] = []
        self._stage = stage
        self.alphabet: dict[Message, None] = {}
        self._live: Actor | None = None
        self._live_at: History | None = None
        self._known: dict[Hashable, History] = {}
        self._first_of_caller: dict[str, int] = {}
        actor = self._run_to(None)
        self.root = self._history(actor, None, None)
        self._live_at = self.root
        self.all: list[History] = [self.root]

    def hear(self, message: Message) -> None:
        """From now on this message may be delivered."""
        self.alphabet[message] = None
        if self.name == STORE:
            number = message.call.number
            known = self._first_of_caller.setdefault(message.call.caller, number)
            self._first_of_caller[message.call.caller] = min(known, number)

    def grow(self) -> Iterator[Message]:
        """Let everything happen that may and has not yet; yields what is sent."""
        stack = [self.root]
        visited: dict[int, None] = {}
        while stack and time.monotonic() < self._deadline:
            history = stack.pop()
            if id(history) in visited:
                continue
            visited[id(history)] = None
            if history.depth >= self._events_max:
                self.cut = True
                continue
            for event in self._possible(history):
                if event not in history.next:
                    yield from self._follow(history, event).sent
            stack.extend(after for _, after in history.next.values())  # the live one on top

    def _possible(self, history: History) -> list[Event]:
        if history.waiting is not None:
            heard: list[Event] = [
                m
                for m in self.alphabet
                if m.asked in history.waiting
                and (m.body is not None or history.broken in ("", m.call.callee))
            ]
        else:
            heard = [m for m in self.alphabet if self._deliverable(history, m.call)]
        return [*history.own, *heard]

    def _deliverable(self, history: History, call: Call) -> bool:
        if call in history.taken:
            return False
        if self.name != STORE or call.number == self._first_of_caller[call.caller]:
            return True
        return call._replace(number=call.number - 1) in history.taken

    def _follow(self, history: History, event: Event) -> Step:
        if self._live_at is not history:
            self._run_to(history)
        assert self._live is not None
        step = self._live.do(event)
        after = self._history(self._live, history, event)
        assert after.depth < ENDLESS, f"{self.name} has no end: {after.events()}"
        history.next[event] = (step, after)
        self._live_at = after if after.event == event and after.parent is history else None
        return step

    def _history(self, actor: Actor, parent: History | None, event: Event | None) -> History:
        taken = dict(parent.taken) if parent is not None else {}
        if isinstance(event, Message) and not event.answer:
            taken[event.call] = None
        identity = actor.identity()
        if identity is not None:
            key = (identity, frozenset(taken))
            if key in self._known:
                return self._known[key]
        made = History(
            parent,
            event,
            actor.choices(),
            actor.waiting(),
            taken,
            actor.facts(),
            _broken(parent, event),
            depth=parent.depth + 1 if parent is not None else 0,
        )
        if identity is not None:
            self._known[key] = made
        if parent is not None:
            self.all.append(made)
        return made

    def _run_to(self, history: History | None) -> Actor:
        """Run the actor from its beginning through the history; it must do what it did before."""
        self.runs += 1
        if self.runs % RUNS_PER_COLLECTION == 0:
            gc.collect()
        if self._live is not None:
            self._live.discard()
        actor = self._live = self._stage.fresh(self.name)
        self._live_at = history
        at = getattr(self, "root", None)
        for event in history.events() if history is not None else ():
            assert at is not None
            expected, at = at.next[event]
            step = actor.do(event)
            assert step == expected, f"{self.name} does not do again what it did: {event}"
        return actor

    def discard(self) -> None:
        """Free the actor that is alive."""
        if self._live is not None:
            self._live.discard()
            self._live = self._live_at = None

    def minimize(self) -> None:
        """Give every history its kind."""
        self.discard()
        kinds: dict[Hashable, int] = {}
        for history in _last_first(self.root):
            after = tuple((event, step, h.kind) for event, (step, h) in history.next.items())
            key = (history.facts, frozenset(after))
            kind = kinds.get(key)
            if kind is None:
                kind = kinds[key] = len(self.kinds)
                self.kinds.append(Kind(history.facts, after, history))
            history.kind = kind


def _broken(parent: History | None, event: Event | None) -> str:
    if isinstance(event, Message) and event.answer and event.body is None:
        return event.call.callee
    return parent.broken if parent is not None else ""


def _last_first(root: History) -> list[History]:
    """Every history, after all that follow it."""
    order: list[History] = []
    done: dict[int, None] = {}
    stack: list[tuple[History, bool]] = [(root, False)]
    while stack:
        history, ready = stack.pop()
        if ready:
            order.append(history)
        elif id(history) not in done:
            done[id(history)] = None
            stack.append((history, True))
            stack.extend((after, False) for _, after in history.next.values())
    return order


class Behaviours:
    """The learners of all actors of a scope, complete once `learn` returned: or up to local
    histories of `events_max` events, if that is given. When `deadline` (of time.monotonic()) has
    passed before, they are `unfinished`, and of no use."""

    def __init__(
        self, stage: Stage, events_max: int = ENDLESS, deadline: float = float("inf")
    ) -> None:
        self.stage = stage
        self.unfinished = False
        self._deadline = deadline
        self.learners = {name: Learner(stage, name, events_max, deadline) for name in stage.names}
        self.rounds = 0

    @property
    def complete(self) -> bool:
        return not any(learner.cut for learner in self.learners.values())

    def learn(self) -> "Behaviours":
        """Returns itself."""
        heard: dict[Message, None] = {}
        news = [message for step in self.stage.began.values() for message in step.sent]
        while news:
            self.rounds += 1
            for message in news:
                if message not in heard:
                    heard[message] = None
                    self.learners[message.to].hear(message)
            sent = dict.fromkeys(m for learner in self.learners.values() for m in learner.grow())
            if time.monotonic() >= self._deadline:
                self.unfinished = True
                for learner in self.learners.values():
                    learner.discard()
                return self
            news = [message for message in sent if message not in heard]
        for learner in self.learners.values():
            learner.minimize()
        return self

    @property
    def histories(self) -> int:
        return sum(len(learner.all) for learner in self.learners.values())

    @property
    def runs(self) -> int:
        return sum(learner.runs for learner in self.learners.values())
