"""Faults at the moments at which ledgers are decided, and not at any time: while a client writes a
record or a work list, or asks a bookie for something.

Always true: a strike is a fault like all others: it goes through chaos.py, within the budget of
losses, and draws from a generator of its own; it hits the caller, or a process that the call is
about, so short a time after the call began that it may come before, while or after that is carried
out. Strikes come in rows: for a second after one the next is more probable.

    Strikes(chaos)    # from now on, until everything heals
"""

import random
from collections.abc import Callable, Coroutine, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from spark_ledger.metadata import paths
from tests.simulation.world import BookieNode, Client

if TYPE_CHECKING:
    from tests.simulation.chaos import Chaos

NAME = "strike"
STORE = (0.05, 0.15, 0.4)
CALLS = (0.0, 0.01, 0.04, 0.12)
"""Shares of the writes to the store, and of the requests to bookies, that are struck."""
ADDS = (0.0, 0.003, 0.01, 0.04)
"""The same of a writer's requests: there are many, and few decide anything."""
IN_A_ROW, ROW_S = 4.0, 1.0
"""So much more probable are strikes for so long after one."""
MOST = 0.6
BACK_S = (0.1, 0.5, 2.0, 6.0)
AFTER_S = (0.0, 0.001, 0.003, 0.006, 0.02, 0.3)
"""A strike comes at most so long after the call began, which takes some milliseconds."""
STILL_S = (0.3, 1.5, 4.0, 8.0)
DECISIVE = (paths.LEDGERS, paths.UNDERREPLICATED, paths.LIMBO)
WRITES = ("create", "set", "delete", "multi")


class Moment(NamedTuple):
    """What is struck: a call of the client, to the bookie, or about the ledger."""

    client: Client
    node: BookieNode | None
    ledger_id: int | None


Strike = Callable[["Chaos", random.Random, Moment], str]


class Strikes:
    """Of one run."""

    def __init__(self, chaos: "Chaos") -> None:
        self._chaos = chaos
        self._world = chaos.world
        self._rng = rng = self._world.loop.random_for("strikes")
        self._store, self._adds = rng.choice(STORE), rng.choice(ADDS)
        self._calls = rng.choice(CALLS)
        self._row_until = 0.0
        self._nodes = {node.address: node for node in self._world.nodes}
        self._world.newcomers.append(self.watch)

    def watch(self, client: Client) -> None:
        """Every call that the client makes from now on may be struck."""
        for name in WRITES:
            self._watch_write(client, name)
        plain = client.network.call
        share = self._adds if client.name.startswith("writer") else self._calls

        async def call(address: str, *more: Any) -> bytes:
            if self._is_drawn(share):
                self._strike(Moment(client, self._nodes.get(address), None))
            return await plain(address, *more)

        client.network.call = call  # type: ignore[method-assign]

    def _watch_write(self, client: Client, name: str) -> None:
        plain: Callable[..., Coroutine[Any, Any, Any]] = getattr(client.session, name)

        async def write(what: Any, *more: Any, **options: Any) -> Any:
            touched = [what] if isinstance(what, str) else [operation.path for operation in what]
            decisive = [path for path in touched if path.startswith(DECISIVE)]
            if decisive and self._is_drawn(self._store):
                self._strike(Moment(client, None, ledger_of(decisive)))
            return await plain(what, *more, **options)

        setattr(client.session, name, write)

    def _is_drawn(self, share: float) -> bool:
        if self._chaos.heals:
            return False
        if self._world.loop.now < self._row_until:
            share = min(MOST, share * IN_A_ROW)
        return self._rng.random() < share

    def _strike(self, moment: Moment) -> None:
        loop = self._world.loop
        self._row_until = loop.now + ROW_S
        after_s = self._rng.uniform(0, self._rng.choice(AFTER_S))

        def happens() -> None:
            if not self._chaos.heals:
                self._chaos.strike(moment)

        loop.call_later(after_s, happens, context=loop.outside)


def ledger_of(touched: Sequence[str]) -> int | None:
    """The ledger whose record or work is at one of these paths."""
    for path in touched:
        for folder in (paths.LEDGERS, paths.UNDERREPLICATED):
            digits = path.removeprefix(folder).replace("/", "")
            if path.startswith(folder) and digits.isdecimal():
                return int(digits)
    return None


# -- what happens ----------------------------------------------------------------------------------


def struck(chaos: "Chaos", rng: random.Random, moment: Moment) -> str:
    """One strike; what it did, "" when there was nothing to do it to."""
    about_a_ledger = moment.ledger_id is not None
    kinds = (*OF_CLIENTS, *(OF_LEDGERS if about_a_ledger else ()), *OF_BOOKIES)
    shares = [share for share, _ in kinds]
    ((_, strike),) = rng.choices(kinds, shares)
    return strike(chaos, rng, moment)


def killed(chaos: "Chaos", rng: random.Random, moment: Moment) -> str:
    if not moment.client.process.alive:
        return ""
    moment.client.kill()
    return f"{moment.client.name} is killed"


def paused(chaos: "Chaos", rng: random.Random, moment: Moment) -> str:
    process, seconds = moment.client.process, rng.choice(STILL_S)
    if not process.alive:
        return ""
    process.pause()
    chaos.after(seconds, process.resume)
    return f"{moment.client.name} stands still for {seconds} s"


def suspended(chaos: "Chaos", rng: random.Random, moment: Moment) -> str:
    """What was on its way is carried out or not; nothing is sent for a while."""
    seconds = rng.choice((0.05, *STILL_S))
    moment.client.session.suspend(seconds)
    return f"{moment.client.name} loses the store for {seconds} s"


def expired(chaos: "Chaos", rng: random.Random, moment: Moment) -> str:
    moment.client.session.expire()
    return f"the session of {moment.client.name} ends"


def taken_over(chaos: "Chaos", rng: random.Random, moment: Moment) -> str:
    """Another recovers the ledger at the same time."""
    ledger_id = moment.ledger_id
    if ledger_id not in chaos.work.made or not chaos.work.exists(ledger_id):
        return ""
    chaos.spawn(chaos.work.rescue(ledger_id), f"rescues {ledger_id}")
    return f"another recovers ledger {ledger_id}"


def overtaken(chaos: "Chaos", rng: random.Random, moment: Moment) -> str:
    """The caller stands still until another process has recovered the ledger."""
    taken, process = taken_over(chaos, rng, moment), moment.client.process
    if taken and process.alive:
        process.pause()
        chaos.after(rng.choice((0.1, *STILL_S)), process.resume)
        return f"{taken}, while {moment.client.name} stands still"
    return taken


def _bookie(chaos: "Chaos", rng: random.Random, moment: Moment) -> BookieNode | None:
    """The one that is asked, or a member of the ledger; some bookie, if it is about none."""
    if moment.node is not None:
        return moment.node
    ledger = chaos.world.ghost.ledgers.get(-1 if moment.ledger_id is None else moment.ledger_id)
    members = ledger.record.last_fragment.ensemble if ledger is not None else ()
    among = [node for node in chaos.world.nodes if node.bookie_id in members]
    return rng.choice(among or chaos.world.nodes)


def down(chaos: "Chaos", rng: random.Random, moment: Moment) -> str:
    node, back_s = _bookie(chaos, rng, moment), rng.choice(BACK_S)
    if node is None or not node.running:
        return ""
    chaos.kill(node, "random", back_s=back_s)
    return f"{node.address} is killed, back in {back_s} s"


def gone(chaos: "Chaos", rng: random.Random, moment: Moment) -> str:
    node, back_s = _bookie(chaos, rng, moment), rng.choice(BACK_S)
    if node is None or not node.running or not chaos.may_lose(node):
        return ""
    lost = node.bookie_id
    chaos.kill(node, "random", blank=True, back_s=back_s)
    return f"{lost} at {node.address} is lost"


def hung(chaos: "Chaos", rng: random.Random, moment: Moment) -> str:
    node, seconds = _bookie(chaos, rng, moment), rng.choice(STILL_S)
    if node is None or not node.running:
        return ""
    process = node.process
    process.pause()
    chaos.after(seconds, process.resume)
    return f"{node.address} stands still for {seconds} s"


def cut(chaos: "Chaos", rng: random.Random, moment: Moment) -> str:
    """One way between the caller and a bookie."""
    node, seconds, outward = _bookie(chaos, rng, moment), rng.choice(STILL_S), rng.random() < 0.5
    if node is None:
        return ""
    client, network = moment.client.name, chaos.world.network
    sender, receiver = (client, node.address) if outward else (node.address, client)
    network.cut(sender, receiver)
    chaos.after(seconds, lambda: network.heal(sender, receiver))
    return f"{sender} to {receiver} is cut for {seconds} s"


def sluggish(chaos: "Chaos", rng: random.Random, moment: Moment) -> str:
    node, late_s, seconds = _bookie(chaos, rng, moment), rng.choice((0.1, 1.0)), rng.choice(STILL_S)
    if node is None:
        return ""
    network = chaos.world.network
    network.slow_down(node.address, (late_s / 3, late_s))
    chaos.after(seconds, lambda: network.quicken(node.address))
    return f"{node.address} begins up to {late_s} s late for {seconds} s"


def busy(chaos: "Chaos", rng: random.Random, moment: Moment) -> str:
    node, seconds = _bookie(chaos, rng, moment), rng.choice(STILL_S)
    if node is None or not node.running or node.bookie is None:
        return ""
    chaos.after(seconds, node.crowd(whole=rng.random() < 0.3))
    return f"{node.address} is busy for {seconds} s"


Kinds = tuple[tuple[float, Strike], ...]
OF_CLIENTS: Kinds = ((3, killed), (2, paused), (3, suspended), (1, expired))
OF_LEDGERS: Kinds = ((2, taken_over), (2, overtaken))
OF_BOOKIES: Kinds = ((2, down), (2, gone), (1, hung), (2, cut), (1, sluggish), (2, busy))
"""With how often each is drawn."""
