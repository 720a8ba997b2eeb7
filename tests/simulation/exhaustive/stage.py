"""A scope: who takes part and what they do; and its set-up, made once and recorded.

Always true: the set-up (registrations, the ledger's record, first contact of every bookie with the
ledger) runs in one fixed order; afterwards each actor can be made again, alone, from the messages
that it got.
"""

import asyncio
import copy
import json
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from spark_ledger.metadata import paths
from spark_ledger.metadata.ledger_record import LedgerRecord
from tests.simulation.exhaustive.actors import Actor, BookieActor, ClientActor, StoreActor
from tests.simulation.exhaustive.messages import STORE, Message, Seen, Step
from tests.simulation.store import EPOCH_MS
from tests.simulation.store_tree import Tree, Write

LEDGER_ID = 7
WRITER, RECOVERER, AUDITOR = "writer", "recoverer", "auditor"


@dataclass(frozen=True)
class Scope:
    """What is explored. `closes`: the writer closes its ledger when its appends have ended.
    `crash`: one bookie, at any step, loses power and starts again."""

    name: str
    write_quorum: int
    ack_quorum: int
    ensemble_size: int = 3
    entries: int = 1
    closes: bool = False
    crash: bool = False
    resets: bool = False

    @property
    def addresses(self) -> list[str]:
        return [f"b{slot + 1}:1" for slot in range(self.ensemble_size)]

    def __str__(self) -> str:
        e, qw, qa = self.ensemble_size, self.write_quorum, self.ack_quorum
        more = ", the writer closes" if self.closes else ""
        more += ", one bookie crashes" if self.crash else ""
        return f"{self.name}: E={e} Qw={qw} Qa={qa}, entries: {self.entries}{more}"


def payload(entry_id: int) -> bytes:
    return b"entry %d" % entry_id


class Stage:
    """A scope set up. `fresh` makes an actor as it is when exploration begins."""

    def __init__(self, scope: Scope) -> None:
        self.scope = scope
        self._tree = _founded(scope)
        self._history: dict[str, list[Message]] = {}
        self.names = (WRITER, RECOVERER, STORE, *scope.addresses)
        self.seen: list[Seen] = []
        """What observers were told in the set-up."""
        self.began: dict[str, Step] = {}
        """What each actor did when the set-up ended."""
        actors = {name: self._make(name) for name in self.names}
        for actor in actors.values():
            actor.start()
        self._history, self.seen = pump(actors)
        for name, actor in actors.items():
            self.began[name] = _begun(actor)
            actor.discard()

    def fresh(self, name: str) -> Actor:
        actor = self._make(name)
        actor.start()
        sent_before = isinstance(actor, ClientActor) and actor.sent()
        for message in self._history.get(name, ()):
            actor.do(message)
        del sent_before
        began = _begun(actor)
        assert began == self.began[name], f"{name} does not begin as it did before"
        return actor

    def auditor(self) -> ClientActor:
        """Another client, which opens the ledger with recovery and reads it to its end."""
        return ClientActor(AUDITOR, _nothing, _audit)

    def _make(self, name: str) -> Actor:
        scope = self.scope
        if name == STORE:
            return StoreActor(copy.deepcopy(self._tree), paths.ledger(LEDGER_ID))
        if name == WRITER:
            return ClientActor(name, self._create, self._write)
        if name == RECOVERER:
            return ClientActor(name, _nothing, _recover)
        number = scope.addresses.index(name) + 1
        options = (LEDGER_ID, scope.entries, scope.crash, scope.resets)
        return BookieActor(name, _bookie_id(number), *options)

    async def _create(self, client: ClientActor) -> None:
        """Make the ledger and let every bookie meet it."""
        scope = self.scope
        quorums = (scope.ensemble_size, scope.write_quorum, scope.ack_quorum)
        writer = client.kept = await client.ledgers.create(*quorums, ledger_id=LEDGER_ID)
        for bookie_id in writer.record.last_fragment.ensemble:
            await client.bookies.read_lac(bookie_id, LEDGER_ID)

    async def _write(self, client: ClientActor) -> None:
        writer = client.kept
        appended = []
        for entry_id in range(self.scope.entries):
            client.see("submitted", LEDGER_ID, payload(entry_id), 1)
            appended.append(writer.append(payload(entry_id), rows=1))
            appended[-1].add_done_callback(_append_told(client, entry_id))
        await asyncio.gather(*appended, return_exceptions=True)
        if self.scope.closes:
            writer._recover = _never  # who meets IN_RECOVERY would be a second recoverer
            record = await writer.close()
            client.see("opened", LEDGER_ID, record.last_entry)
            client.told.append(("closed at", record.last_entry))


def _append_told(client: ClientActor, entry_id: int) -> Any:
    def told(done: "asyncio.Future[int]") -> None:
        if done.cancelled():
            return
        error = done.exception()
        outcome = done.result() if error is None else type(error)
        client.see("appended", LEDGER_ID, entry_id, outcome, client.kept.last_add_confirmed)
        client.told.append(("acked" if error is None else type(error).__name__, entry_id))

    return told


async def _nothing(_: ClientActor) -> None: ...


async def _never(_: int) -> Any:
    await asyncio.get_running_loop().create_future()


async def _recover(client: ClientActor) -> int:
    reader = await client.ledgers.open(LEDGER_ID, recover=True)
    assert reader.is_closed
    client.see("opened", LEDGER_ID, reader.last_add_confirmed)
    return reader.last_add_confirmed


async def _audit(client: ClientActor) -> tuple[int, tuple[tuple[int, bytes], ...]]:
    reader = await client.ledgers.open(LEDGER_ID, recover=True)
    last = reader.last_add_confirmed
    found = []
    if last >= 0:
        async for entry_id, entry in reader.read(0, last):
            found.append((entry_id, bytes(entry.payload)))
    return last, tuple(found)


def _begun(actor: Actor) -> Step:
    actor.begin()
    if isinstance(actor, ClientActor):
        return Step(actor.sent(), actor.take_seen())
    return Step()


def pump(actors: Mapping[str, Actor]) -> tuple[dict[str, list[Message]], list[Seen]]:
    """Deliver all that is sent in the order of sending until nothing is left, and let graces pass
    when nothing else happens; who got what, and what was seen."""
    queue: deque[Message] = deque()
    history: dict[str, list[Message]] = {}
    seen: list[Seen] = []
    clients = [actor for actor in actors.values() if isinstance(actor, ClientActor)]
    for client in clients:
        queue.extend(client.sent())
    while True:
        if queue:
            message = queue.popleft()
            actor = actors.get(message.to)
            if actor is None or (message.answer and not actor.waits_for(message.asked)):
                continue
            history.setdefault(message.to, []).append(message)
            step = actor.do(message)
        else:
            late = next((client for client in clients if client.choices()), None)
            if late is None:
                return history, seen
            step = late.do(late.choices()[0])
        queue.extend(step.sent)
        seen.extend(step.seen)


def _bookie_id(number: int) -> str:
    return f"00000000-0000-0000-0000-00000000000{number}"


def _founded(scope: Scope) -> Tree:
    """A cluster's folders, and its bookies registered."""
    tree = Tree()
    write = Write(tree, EPOCH_MS)
    for folder in (paths.BOOKIES_READONLY, paths.BOOKIES_KNOWN, paths.BOOKIES_AVAILABLE):
        write.create_parents(folder)
        write.create(folder, b"")
    write.create(paths.LEDGERS, b"")
    for number, address in enumerate(scope.addresses, 1):
        plain = {"address": address, "rack": "", "free_bytes": 1 << 30, "total_bytes": 1 << 31}
        value = json.dumps({**plain, "version": 1}, sort_keys=True).encode()
        write.create(f"{paths.BOOKIES_KNOWN}/{_bookie_id(number)}", value)
        write.create(f"{paths.BOOKIES_AVAILABLE}/{_bookie_id(number)}", value)
    return tree


__all__ = ["LEDGER_ID", "LedgerRecord", "Scope", "Stage", "payload", "pump"]
