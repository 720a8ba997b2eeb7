"""What a fresh client finds, in a final state and when the others die before.

Always true: the fresh client is the real one, and asks the real bookies and store as they are in
that state; it is asked once for each way in which they can differ.
"""

from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping
from typing import Any

from spark_ledger.metadata import ledger_record
from tests.simulation import invariants
from tests.simulation.exhaustive.actors import Actor, BookieActor
from tests.simulation.exhaustive.behaviour import Kind
from tests.simulation.exhaustive.judge import Judge
from tests.simulation.exhaustive.messages import RESTART, STORE
from tests.simulation.exhaustive.stage import AUDITOR, LEDGER_ID, RECOVERER, WRITER, Stage, pump
from tests.simulation.ghost import Ghost
from tests.simulation.invariants import Violation


class Finish:
    """Judges the states of one scope. With `only`, by that one invariant: the others may be
    broken."""

    def __init__(self, stage: Stage, only: str = "") -> None:
        self._stage = stage
        self._only = only
        self._audits: dict[Hashable, Hashable] = {}
        self.audits = 0

    def judge(self, kinds: Mapping[str, Kind], number: int, judge: Judge) -> tuple[Hashable, str]:
        """(what came out, what is wrong with it or "")."""
        writer, recoverer = kinds[WRITER].facts, kinds[RECOVERER].facts
        node = kinds[STORE].facts
        record = ledger_record.decode(node.value)
        outcome = (
            ("writer", _ended(writer)),
            ("recoverer", _ended(recoverer)),
            ("ledger", f"{record.state.value} at {record.last_entry}"),
        )
        ghost = judge.ghost(number)
        ended = () if self._stage.scope.crash else self._everybody_ended(kinds)
        return outcome, self._first([*ended, *self._read_again(kinds, ghost)], ghost, judge)

    def interrupted(self, kinds: Mapping[str, Kind], number: int, judge: Judge) -> str:
        """Both clients die and what is on its way is lost; what is then wrong, or ""."""
        ghost = judge.ghost(number)
        return self._first(self._read_again(kinds, ghost), ghost, judge)

    def _first(self, broken: Iterable[Violation], ghost: Ghost, judge: Judge) -> str:
        """The first that counts, or ""."""
        counts = [one for one in broken if self._only in ("", one.name)]
        judge.count(ghost)
        return str(counts[0]) if counts else ""

    def _everybody_ended(self, kinds: Mapping[str, Kind]) -> Iterator[Violation]:
        """Without a crash nothing may be left waiting: 34."""
        for name in (WRITER, RECOVERER):
            ended = kinds[name].facts[-1]
            if ended is None and not self._stage.scope.closes:
                yield Violation("34", f"the {name} never ends")
            if name == RECOVERER and (ended is None or ended[0] != "ended"):
                yield Violation("35", f"the recovery ended as {ended}")

    def _read_again(self, kinds: Mapping[str, Kind], ghost: Ghost) -> Iterator[Violation]:
        """1, 2, 4, 6: what a fresh client finds when it opens the ledger with recovery; 35 if it
        cannot."""
        try:
            last, entries = self._audited(kinds)
        except Violation as violation:
            yield violation
            return
        ledger = ghost.ledgers[LEDGER_ID]
        read = dict(entries)
        if ledger.closed:
            yield from _broken(invariants.all_opens_end_at_the_same_entry, ghost, ledger, last)
        if last < ledger.acked:
            yield Violation("2", f"recovered up to {last}, but {ledger.acked} was acked")
        if len(read) != last + 1:
            yield Violation("6", f"a ledger that ends at {last} reads as {list(read)}")
        in_order = invariants.entries_come_whole_and_in_the_order_submitted
        yield from _broken(in_order, ghost, ledger, 0, read)
        readable = invariants.an_acked_entry_is_readable_byte_for_byte
        yield from _broken(readable, ghost, ledger, read)

    def _audited(self, kinds: Mapping[str, Kind]) -> Hashable:
        asked = [STORE, *self._stage.scope.addresses]
        key = tuple(kinds[name].facts for name in asked)
        if key not in self._audits:
            self.audits += 1
            actors = {name: self._as_in(name, kinds[name]) for name in asked}
            auditor = self._stage.auditor()
            actors[AUDITOR] = auditor
            auditor.start()
            pump(actors)
            auditor.begin()
            pump(actors)
            *_, ended = auditor.facts()
            for actor in actors.values():
                actor.discard()
            if ended is None or ended[0] != "ended":
                raise Violation("35", f"a fresh client cannot recover the ledger: {ended}")
            self._audits[key] = ended[1]
        return self._audits[key]

    def _as_in(self, name: str, kind: Kind) -> Actor:
        actor = self._stage.fresh(name)
        for event in kind.example.events():
            actor.do(event)
        if isinstance(actor, BookieActor):
            if actor.down:
                actor.do(RESTART)
            actor.set_free()
        return actor


def _broken(judge: Callable[..., None], *args: Any) -> Iterator[Violation]:
    try:
        judge(*args)
    except Violation as violation:
        yield violation


def _ended(facts: Any) -> str:
    """What a client was told, and how its program ended."""
    *told, end = facts
    said = [f"{what} {entry}" for what, entry in told]
    if end is None:
        said.append("waits")
    elif end[0] == "raised":
        said.append(end[1])
    elif end[1] is not None:
        said.append(f"told {end[1]}")
    return ", ".join(said)
