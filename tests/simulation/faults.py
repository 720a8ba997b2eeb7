"""Each class of fault: one function that makes one such fault happen.

Always true: a fault draws from the generator it is given and from no other, so that leaving one
out changes no draw of another; it returns what it did, "" when there was nothing to do it to;
whatever it does is undone after a while or when the chaos ends, but for lost and rotten disks,
which only `chaos.may_lose` allows.
"""

import asyncio
import random
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from spark_ledger.metadata import paths
from spark_ledger.metadata.store import NoNode, Versioned, Watcher
from tests.simulation.decay import rot
from tests.simulation.disk import SimDisk
from tests.simulation.network import ANY
from tests.simulation.store import SimSession
from tests.simulation.world import BookieNode, Client

if TYPE_CHECKING:
    from tests.simulation.chaos import Chaos

Fault = Callable[["Chaos", random.Random], str]
STEADY: dict[str, Fault] = {}
"""Begun once, at the start; they last until the chaos ends."""
EVENTS: dict[str, Fault] = {}
"""Drawn again and again."""


def steady(name: str) -> Callable[[Fault], Fault]:
    return lambda fault: STEADY.setdefault(name, fault)


def event(name: str) -> Callable[[Fault], Fault]:
    return lambda fault: EVENTS.setdefault(name, fault)


# -- messages ------------------------------------------------------------------------------------


@steady("loss")
def loss(chaos: "Chaos", rng: random.Random) -> str:
    faults = chaos.world.network.faults
    faults.loss = rng.choice((0.005, 0.02, 0.1))
    return f"{faults.loss:.1%} of the messages"


@steady("slow network")
def slow_network(chaos: "Chaos", rng: random.Random) -> str:
    faults = chaos.world.network.faults
    drawn = rng.choice((0.01, 0.05, 0.2))
    faults.slow = chaos.plan.slow or drawn
    return f"{faults.slow:.1%} of the messages take up to {faults.slow_s[1]} s"


@steady("duplicate")
def duplicate(chaos: "Chaos", rng: random.Random) -> str:
    faults = chaos.world.network.faults
    faults.duplicate, faults.late = 0.1, rng.choice((0.0, 0.2, 0.5))
    return f"a tenth of the requests, {faults.late:.0%} of the copies late"


@steady("astray")
def astray(chaos: "Chaos", rng: random.Random) -> str:
    """Requests meet a bookie that is not the one they name."""
    chaos.world.network.faults.astray = rng.choice((0.005, 0.03))
    return f"{chaos.world.network.faults.astray:.1%} of the requests"


@steady("garbled copies")
def garbled_copies(chaos: "Chaos", rng: random.Random) -> str:
    """Entries arrive damaged at whoever reads them."""
    chaos.world.network.faults.garbled = rng.choice((0.01, 0.1, 0.3))
    return f"{chaos.world.network.faults.garbled:.0%} of the answers to reads"


@event("partition")
def partition(chaos: "Chaos", rng: random.Random) -> str:
    """One way between a client, or everybody, and a bookie is cut for a while."""
    sender, receiver, seconds = _one_way(chaos, rng)
    network = chaos.world.network
    network.cut(sender, receiver)
    chaos.after(seconds, lambda: network.heal(sender, receiver))
    return f"{sender} to {receiver} for {seconds:.1f} s"


@event("clog")
def clog(chaos: "Chaos", rng: random.Random) -> str:
    """One way delivers nothing for a while and then everything at once."""
    sender, receiver, seconds = _one_way(chaos, rng)
    network = chaos.world.network
    network.clog(sender, receiver)
    chaos.after(seconds, lambda: network.unclog(sender, receiver))
    return f"{sender} to {receiver} for {seconds:.1f} s"


@event("slow receiver")
def slow_receiver(chaos: "Chaos", rng: random.Random) -> str:
    """One bookie begins everything late."""
    node = rng.choice(chaos.world.nodes)
    late_s, seconds = rng.choice((0.3, 2.0, 7.0)), rng.uniform(1, 15)
    network = chaos.world.network
    network.slow_down(node.address, (late_s / 3, late_s))
    chaos.after(seconds, lambda: network.quicken(node.address))
    return f"{node.address} begins up to {late_s} s late for {seconds:.1f} s"


def _one_way(chaos: "Chaos", rng: random.Random) -> tuple[str, str, float]:
    """Sender, receiver, and for how long."""
    node = rng.choice(chaos.world.nodes).address
    seconds, outward = rng.uniform(0.5, 15), rng.random() < 0.5
    other = rng.choice([*(client.name for client in chaos.world.clients), ANY])
    return (other, node, seconds) if outward else (node, other, seconds)


# -- bookies -------------------------------------------------------------------------------------


@event("kill")
def kill(chaos: "Chaos", rng: random.Random) -> str:
    """One bookie is killed, and starts again after a while."""
    return _crash(chaos, rng, "all")


@event("power")
def power(chaos: "Chaos", rng: random.Random) -> str:
    """One bookie loses power, and with it what was not synced."""
    return _crash(chaos, rng, rng.choice(("random", "none")))


@event("power everywhere")
def power_everywhere(chaos: "Chaos", rng: random.Random) -> str:
    """All bookies lose power at once."""
    if rng.random() < 0.5:
        return ""  # rarer than the others
    running = chaos.running()
    for node in running:
        chaos.kill(node, rng.choice(("random", "none")), back_s=_back_s(rng))
    return f"{len(running)} bookies" if running else ""


@event("power cut while writing")
def power_cut_while_writing(chaos: "Chaos", rng: random.Random) -> str:
    """All bookies, or one, lose power in the middle of what they write, and it is torn."""
    running, everywhere = chaos.running(), rng.random() < 0.7
    slow_s, back_s, chosen = rng.uniform(0.05, 0.6), _back_s(rng), _choice(rng, chaos.running())
    if chosen is None or rng.random() < 0.5:
        return ""
    nodes = running if everywhere else [chosen]
    for node in nodes:
        for disk in node.journal_disks:  # so that there is such a moment
            disk.faults.sync_s = (2 * slow_s, 2 * slow_s)

    async def cut() -> None:
        await asyncio.sleep(slow_s)
        for node in nodes:
            for disk in node.journal_disks:
                disk.speed_up()
            if node.running:
                chaos.kill(node, "torn", back_s=back_s)

    chaos.spawn(cut(), "cuts the power")
    return f"{len(nodes)} bookies in {slow_s:.2f} s, back in {back_s} s"


@event("restart")
def restart(chaos: "Chaos", rng: random.Random) -> str:
    """One bookie is stopped in good order and started again; what it promised needs no more than
    what is durable when it has stopped."""
    node, back_s = _choice(rng, chaos.running()), _back_s(rng)
    if node is None or node.bookie is None:
        return ""
    chaos.spawn(chaos.restart(node, back_s), f"{node.address} is restarted")
    return f"{node.address}, back in {back_s} s"


@event("blank")
def blank(chaos: "Chaos", rng: random.Random) -> str:
    """One bookie's disk is lost for good, if the budget allows: its address gets a new one."""
    node, back_s = _choice(rng, chaos.running()), _back_s(rng)
    if node is None or not chaos.may_lose(node):
        return ""
    lost = node.bookie_id
    chaos.kill(node, "random", blank=True, back_s=back_s)
    return f"{lost} at {node.address}"


@event("hang")
def hang(chaos: "Chaos", rng: random.Random) -> str:
    """One bookie stands still, as after SIGSTOP: it neither answers nor refuses."""
    node, seconds = _choice(rng, chaos.running()), rng.uniform(1, 20)
    if node is None:
        return ""
    process = node.process
    process.pause()
    chaos.after(seconds, process.resume)
    return f"{node.address} for {seconds:.1f} s"


@event("overload")
def overload(chaos: "Chaos", rng: random.Random) -> str:
    """Others use up a bookie's budgets: it answers BUSY, to recovery too when it is bad."""
    node, seconds, bad = _choice(rng, chaos.running()), rng.uniform(0.5, 12), rng.random() < 0.3
    if node is None or node.bookie is None:
        return ""
    chaos.after(seconds, node.crowd(whole=bad))
    return f"{node.address} for {seconds:.1f} s{', its reserve too' if bad else ''}"


def _crash(chaos: "Chaos", rng: random.Random, keep: str) -> str:
    node, back_s = _choice(rng, chaos.running()), _back_s(rng)
    if node is None:
        return ""
    chaos.kill(node, keep, back_s=back_s)
    return f"{node.address}, keeps {keep}, back in {back_s} s"


# -- disks ---------------------------------------------------------------------------------------


def _one_of(rng: random.Random, disks: Sequence[SimDisk]) -> SimDisk:
    """A run with one disk of a kind draws nothing."""
    return disks[0] if len(disks) == 1 else rng.choice(disks)


def _would_doubt(chaos: "Chaos", node: BookieNode) -> bool:
    """A start without one of several ledger directories does not know what that holds: a forged
    entry that comes then, however late, cannot be told from one that was lost."""
    return "forgery" in chaos.plan.faults and len(node.ledger_disks) > 1


@event("disk error")
def disk_error(chaos: "Chaos", rng: random.Random) -> str:
    """The next sync or write of one bookie's journal or ledger disk fails: it exits, or goes on
    with the others."""
    node, journal, sync, back_s = (
        _choice(rng, chaos.running()),
        rng.random() < 0.7,
        rng.random() < 0.7,
        _back_s(rng),
    )
    if node is None:
        return ""
    faults = _one_of(rng, node.journal_disks if journal else node.ledger_disks).faults
    if not journal and _would_doubt(chaos, node):
        return ""
    if sync:
        faults.sync_fails = 1
    else:
        faults.append_fails = 1
    chaos.start_later(node, back_s)
    return f"{node.address}, {'journal' if journal else 'ledger'} {'sync' if sync else 'write'}"


@event("disk full")
def disk_full(chaos: "Chaos", rng: random.Random) -> str:
    """One bookie's disk takes no more for a while: what it writes then fails, it exits, and it
    serves again when there is space."""
    node = rng.choice(chaos.world.nodes)
    disk = _one_of(rng, rng.choice((node.journal_disks, node.ledger_disks)))
    left, seconds, back_s = rng.choice((0, 4_000, 40_000)), rng.uniform(1, 15), _back_s(rng)
    if disk in node.ledger_disks and _would_doubt(chaos, node):
        return ""
    disk.fill_up(left)

    def space() -> None:
        disk.empty_out()
        chaos.start_later(node, back_s)

    chaos.after(seconds, space)
    which = "journal" if disk in node.journal_disks else "ledger"
    return f"{node.address}, {which} disk, {left} bytes left, for {seconds:.1f} s"


@event("bit rot")
def bit_rot(chaos: "Chaos", rng: random.Random) -> str:
    """Bits of what one bookie has on disk are flipped, if the budget allows; it may notice when it
    reads them, when it starts again, or never."""
    node = rng.choice(chaos.world.nodes)
    if not chaos.may_lose(node) or "forgery" in chaos.plan.faults:
        return ""  # who lost an entry cannot tell a forged one from it
    damage = rot((_one_of(rng, node.journal_disks), _one_of(rng, node.ledger_disks)), rng)
    if not damage:
        return ""
    chaos.lose(node)
    mine = chaos.world.ghost.bookie(node.bookie_id)
    mine.rotten = mine.decayed = True
    return f"{node.bookie_id} {damage}"


@event("lost directory")
def lost_directory(chaos: "Chaos", rng: random.Random) -> str:
    """A ledger directory of one bookie is lost as a whole, its journal and identity are not, if
    the budget allows: it comes back, and whatever it lacks may have been there. One of several may
    go while the bookie runs; the others may be slow to take what it has to write again."""
    node, back_s = _choice(rng, chaos.running()), _back_s(rng)
    running, which, slow = rng.random() < 0.5, rng.random(), rng.random() < 0.7
    if node is None or not chaos.may_lose(node) or "forgery" in chaos.plan.faults:
        return ""  # who lost an entry cannot tell a forged one from it
    count = len(node.ledger_disks)
    number = int(which * count)
    if count > 1 and not node.may_lose_one_directory(number):
        return ""
    chaos.lose(node)
    if count > 1:
        chaos.world.ghost.meet("one of several directories lost")
        if not running:
            chaos.kill(node, "random", back_s=back_s)
        elif slow:
            for disk in node.ledger_disks:
                disk.faults.sync_s = (2.0, 10.0)
                chaos.after(12.0, disk.speed_up)
        node.lose_one_directory(number)
        how = "while it runs" if running else f"back in {back_s} s"
        return f"number {number} of {node.bookie_id} at {node.address}, {how}"
    chaos.kill(node, "random", back_s=back_s)
    node.lose_directory()
    return f"of {node.bookie_id} at {node.address}, back in {back_s} s"


@event("directory away")
def directory_away(chaos: "Chaos", rng: random.Random) -> str:
    """One of a bookie's ledger directories is not there at its next start, and back at the one
    after it: nothing is lost."""
    node, back_s, which = _choice(rng, chaos.running()), _back_s(rng), rng.random()
    if node is None or "forgery" in chaos.plan.faults:
        return ""  # as above
    number = int(which * len(node.ledger_disks))
    if not node.may_lose_one_directory(number):
        return ""
    chaos.kill(node, "random", back_s=back_s)
    node.miss_one_directory(number)
    return f"number {number} of {node.bookie_id} at {node.address}, back in {back_s} s"


@event("slow disk")
def slow_disk(chaos: "Chaos", rng: random.Random) -> str:
    node = rng.choice(chaos.world.nodes)
    disk = _one_of(rng, node.journal_disks if rng.random() < 0.7 else node.ledger_disks)
    slow_s, seconds = rng.choice((0.5, 4.0, 10.0)), rng.uniform(1, 10)
    disk.faults.sync_s = (0.05, slow_s)
    disk.faults.read_s = (0.0, slow_s / 4)
    chaos.after(seconds, disk.speed_up)
    which = "journal" if disk in node.journal_disks else "ledger"
    return f"{node.address}, {which} disk up to {slow_s} s a sync for {seconds:.1f} s"


# -- the metadata store --------------------------------------------------------------------------


@steady("unknown outcomes")
def unknown_outcomes(chaos: "Chaos", rng: random.Random) -> str:
    faults = chaos.world.store.faults
    faults.unknown = rng.choice((0.02, 0.1, 0.3))
    return f"{faults.unknown:.0%} of the writes"


@steady("lagging store")
def lagging_store(chaos: "Chaos", rng: random.Random) -> str:
    faults = chaos.world.store.faults
    faults.lag_s = rng.choice((0.05, 1.0, 5.0))
    return f"up to {faults.lag_s} s"


@steady("missed watches")
def missed_watches(chaos: "Chaos", rng: random.Random) -> str:
    faults = chaos.world.store.faults
    faults.missed = rng.choice((0.1, 0.5))
    return f"{faults.missed:.0%} of the changes"


@steady("slow store")
def slow_store(chaos: "Chaos", rng: random.Random) -> str:
    faults = chaos.world.store.faults
    faults.delay_s = (0.0002, rng.choice((0.03, 0.2, 0.6)))
    return f"up to {faults.delay_s[1]} s each way"


@event("older store")
def older_store(chaos: "Chaos", rng: random.Random) -> str:
    """One bookie finds no record of some ledgers that it knows, as in an older copy of the store,
    until the newer one is put back: a few sweeps later."""
    node, share, seconds = _choice(rng, chaos.running()), rng.random(), rng.uniform(4, 25)
    if node is None or node.bookie is None:
        return ""
    known = node.bookie.ledgers.unburied_ids()
    hidden = {paths.ledger(i): None for i in known if rng.random() < share}
    _hide(node.session, hidden)
    count = len(hidden)
    chaos.after(seconds, hidden.clear)
    return f"{node.address} lacks {count} records for {seconds:.1f} s" if count else ""


def _hide(session: SimSession, hidden: dict[str, None]) -> None:
    """The session does not find these nodes, as long as they are in it."""
    plain_get, plain_children = session.get, session.children

    async def get(path: str, watch: Watcher | None = None) -> Versioned:
        if path in hidden:
            raise NoNode(path)
        return await plain_get(path, watch)

    async def children(path: str, watch: Watcher | None = None) -> list[str]:
        names = await plain_children(path, watch)
        return [name for name in names if f"{path}/{name}" not in hidden]

    session.get, session.children = get, children  # type: ignore[method-assign]


@event("suspension")
def suspension(chaos: "Chaos", rng: random.Random) -> str:
    session, seconds = _session(chaos, rng), rng.choice((0.5, 3.0, 20.0, 40.0))
    session.suspend(seconds)
    return f"{session.name} for {seconds} s"


@event("expiry")
def expiry(chaos: "Chaos", rng: random.Random) -> str:
    session = _session(chaos, rng)
    session.expire()
    return str(session.name)


@event("stall")
def stall(chaos: "Chaos", rng: random.Random) -> str:
    seconds = rng.uniform(0.5, 20)
    chaos.world.store.stall(seconds)
    return f"for {seconds:.1f} s"


# -- clients -------------------------------------------------------------------------------------


@event("pause")
def pause(chaos: "Chaos", rng: random.Random) -> str:
    """A client stands still, as in a long collection, and goes on as if nothing were."""
    client, seconds = _choice(rng, _living(chaos)), rng.uniform(1, 25)
    if client is None:
        return ""
    client.process.pause()
    chaos.after(seconds, client.process.resume)
    return f"{client.name} for {seconds:.1f} s"


@event("zombie")
def zombie(chaos: "Chaos", rng: random.Random) -> str:
    """A writer stands still until its ledger was recovered, and then goes on."""
    ledger_id, more_s = _choice(rng, chaos.work.being_written()), rng.choice((0.0, 0.5, 5.0))
    if ledger_id is None:
        return ""
    writer = chaos.work.writer_of[ledger_id]
    writer.process.pause()
    chaos.spawn(chaos.work.take_over(ledger_id, more_s), f"takes over {ledger_id}")
    chaos.after(30.0, writer.process.resume)
    return f"{writer.name} until {more_s} s after ledger {ledger_id} was recovered"


@event("client killed")
def client_killed(chaos: "Chaos", rng: random.Random) -> str:
    client, spared = _choice(rng, _living(chaos)), rng.random() < 0.5
    if client is None or spared:
        return ""
    client.kill()
    return str(client.name)


@event("wrong token")
def wrong_token(chaos: "Chaos", rng: random.Random) -> str:
    """Somebody without the right password opens, fences, reads or writes a ledger that has one."""
    ledger_id, seed = _choice(rng, chaos.work.with_password()), rng.random()
    if ledger_id is None:
        return ""
    chaos.spawn(chaos.work.intrude(ledger_id, random.Random(seed)), f"intrudes into {ledger_id}")
    return f"ledger {ledger_id}"


@event("forgery")
def forgery(chaos: "Chaos", rng: random.Random) -> str:
    """Somebody who has the password sends a bookie another entry under an id that it holds. (Who
    knows that it may have lost something cannot tell a forged entry from what it lost, nor can who
    let go of a copy that was surplus.)"""
    doubtful = {
        (node.bookie_id, ledger_id)
        for node in chaos.running()
        if node.bookie is not None
        for ledger_id in node.bookie.ledgers.limbo_reasons()
    }
    ledgers = chaos.world.ghost.ledgers
    held = _choice(
        rng,
        [
            (bookie_id, (ledger_id, entry_id))
            for bookie_id, (ledger_id, entry_id) in chaos.work.held_entries()
            if (bookie_id, ledger_id) not in doubtful and ledgers[ledger_id].names(bookie_id)
        ],
    )
    if held is None:
        return ""
    bookie_id, (ledger_id, entry_id) = held
    chaos.spawn(chaos.work.forge(bookie_id, ledger_id, entry_id), f"forges {ledger_id}:{entry_id}")
    return f"entry {ledger_id}:{entry_id} to {bookie_id}"


@event("clock jump")
def clock_jump(chaos: "Chaos", rng: random.Random) -> str:
    """The clock of one client or bookie jumps ahead: its timers fire early."""
    everybody = [(client.name, client.process) for client in _living(chaos)]
    everybody += [(node.address, node.process) for node in chaos.running()]
    seconds = rng.choice((0.5, 6.0, 40.0))
    chosen = _choice(rng, everybody)
    if chosen is None:
        return ""
    name, process = chosen
    process.jump(seconds)
    return f"{name} by {seconds} s"


# -- means ---------------------------------------------------------------------------------------


def _choice(rng: random.Random, among: list):
    """One of them, or None; draws once in any case."""
    at = rng.random()
    return among[int(at * len(among))] if among else None


def _back_s(rng: random.Random) -> float:
    return rng.choice((0.1, 2.0, 12.0))


def _living(chaos: "Chaos") -> list[Client]:
    return [client for client in chaos.world.clients if client.process.alive]


def _session(chaos: "Chaos", rng: random.Random):
    sessions = [client.session for client in chaos.world.clients]
    sessions += [node.session for node in chaos.running()]
    return _choice(rng, sessions) or chaos.world.store.session("nobody")
