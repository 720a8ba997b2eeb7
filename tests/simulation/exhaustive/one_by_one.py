"""Every run, one by one: actors all alive at the same time, nothing learnt, nothing merged.

Far too slow for a real scope; it is what the explorer is compared with.
"""

from typing import Any

from tests.simulation.exhaustive.actors import Actor
from tests.simulation.exhaustive.messages import Event, Message, Step

Choice = tuple[str, Event]


class Live:
    """All actors of a stage after some choices."""

    def __init__(self, stage: Any) -> None:
        self.actors: dict[str, Actor] = {name: stage.fresh(name) for name in stage.names}
        self.on_their_way = [m for name in stage.names for m in stage.began[name].sent]
        self.histories: dict[str, tuple[Event, ...]] = dict.fromkeys(stage.names, ())

    def choices(self) -> list[Choice]:
        """Everything that may happen next. An answer to nobody is nothing that happens."""
        found: list[Choice] = []
        for name, actor in self.actors.items():
            found += [(name, event) for event in actor.choices()]
        for message in self.on_their_way:
            actor = self.actors[message.to]
            if not message.answer or actor.waits_for(message.asked):
                found.append((message.to, message))
        return found

    def take(self, choice: Choice) -> Step:
        name, event = choice
        if isinstance(event, Message):
            self.on_their_way.remove(event)
        step = self.actors[name].do(event)
        self.on_their_way += step.sent
        self.histories[name] = (*self.histories[name], event)
        return step

    def discard(self) -> None:
        for actor in self.actors.values():
            actor.discard()


def every_run(stage: Any) -> tuple[int, int]:
    """(how many runs there are, of how many traces)."""
    runs, traces = 0, set()
    stack: list[list[Choice]] = [[]]
    while stack:
        taken = stack.pop()
        live = Live(stage)
        for choice in taken:
            live.take(choice)
        while choices := live.choices():
            stack += [[*taken, other] for other in choices[1:]]
            taken = [*taken, choices[0]]
            live.take(choices[0])
        runs += 1
        traces.add(tuple(live.histories.items()))
        live.discard()
    return runs, len(traces)
