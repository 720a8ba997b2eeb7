"""A toy cluster whose runs can be counted by hand: clients ask servers, and nothing is production
code. What the explorer makes of it is compared with every linearisation, enumerated one by one."""

from collections.abc import Hashable, Mapping
from types import SimpleNamespace

from tests.simulation.exhaustive.actors import Actor
from tests.simulation.exhaustive.messages import SYNC, Asked, Call, Event, Message, Step


class Asker(Actor):
    """Asks every server of `rounds[0]` at once, those of `rounds[1]` after `needed` answers, and
    so on; answers of an older round are not waited for."""

    def __init__(self, name: str, rounds: list[list[str]], needed: int) -> None:
        super().__init__(name)
        self._rounds = rounds
        self._needed = needed
        self._round = -1
        self._open: dict[Asked, None] = {}
        self._heard: list[Hashable] = []

    def next_round(self) -> Step:
        self._round += 1
        self._open = {}
        if self._round == len(self._rounds):
            return Step()
        for server in self._rounds[self._round]:
            self._open[Asked(Call(self.name, server, "ask", self._round + 1), self._round)] = None
        return Step(tuple(Message(asked) for asked in self._open))

    def do(self, event: Event) -> Step:
        assert isinstance(event, Message)
        del self._open[event.asked]
        self._heard.append((event.call.callee, event.body))
        asked = len(self._rounds[self._round])
        return self.next_round() if asked - len(self._open) == self._needed else Step()

    def waiting(self) -> frozenset[Asked]:
        return frozenset(self._open)

    def waits_for(self, asked: Asked) -> bool:
        return asked in self._open

    def facts(self) -> Hashable:
        return tuple(self._heard)


class Server(Actor):
    """Answers with how many it has answered, when its sync ends; one sync covers all that wait."""

    def __init__(self, name: str) -> None:
        super().__init__(name)
        self._waiting: list[Asked] = []
        self._answered = 0

    def do(self, event: Event) -> Step:
        if isinstance(event, Message):
            self._waiting.append(event.asked)
            return Step()
        asked, self._waiting = self._waiting, []
        self._answered += len(asked)
        return Step(tuple(Message(one, True, self._answered) for one in asked))

    def choices(self) -> tuple[str, ...]:
        return (SYNC,) if self._waiting else ()

    def facts(self) -> Hashable:
        return self._answered


class ToyStage:
    """What `Behaviours` and `Composition` need of a Stage."""

    def __init__(self, askers: Mapping[str, list[list[str]]], servers: list[str], needed: int):
        self.scope = SimpleNamespace(crash=False)
        self._askers, self._needed = askers, needed
        self.names = (*askers, *servers)
        self.seen: list[object] = []
        self.began = {name: self._begun(name)[1] for name in self.names}

    def fresh(self, name: str) -> Actor:
        return self._begun(name)[0]

    def _begun(self, name: str) -> tuple[Actor, Step]:
        if name not in self._askers:
            return Server(name), Step()
        asker = Asker(name, self._askers[name], self._needed)
        return asker, asker.next_round()
