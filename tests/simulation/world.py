"""A cluster in simulated time: bookies running the real Bookie, clients the real ledger code.

Always true:
- a bookie killed loses its memory and, by chance, what it had not synced; started again it is the
  same identity on the same disk; `blank` gives its address a new disk and a new identity;
- nothing that a killed process still does has an effect: its doors are shut before its tasks end;
- after each restart the bookie is asked for all it ever acknowledged (invariants 13, 15).
"""

import asyncio
import random
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import asdict
from functools import partial
from typing import Any

from bookie_server.bookie import Bookie
from bookie_server.config import StorageConfig
from bookie_server.disk.interface import DiskFailed
from bookie_server.journal.writer import JournalFailed
from bookie_server.storage.directories import Directories, JournalDirectory, LedgerDirectory
from spark_ledger.bookies.bookie_client import BookieClient
from spark_ledger.bookies.directory import BookieDirectory
from spark_ledger.config import ClientConfig
from spark_ledger.ledger.placement import Placement, choose
from spark_ledger.metadata import autorecovery, cluster, paths
from spark_ledger.metadata.autorecovery import AutorecoverySettings
from spark_ledger.metadata.store import SessionState, StoreError
from tests.kit.budgets import CLIENT, STORAGE
from tests.simulation import invariants, promises, registering
from tests.simulation.contents import REPAIR_TOKEN
from tests.simulation.direct_log_watch import DirectLogWatch
from tests.simulation.disk import Keep, SimDisk
from tests.simulation.ghost import BookieGhost, Ghost, Home
from tests.simulation.index import SimIndex
from tests.simulation.invariants import Violation
from tests.simulation.local_files import NearClient, SimFiles, root
from tests.simulation.loop import SimLoop, current
from tests.simulation.network import SimClient, SimNetwork
from tests.simulation.observers import Observers
from tests.simulation.store import SimStore
from tests.simulation.trace import Trace
from tests.simulation.watching import (
    WatchedLedgerStore,
    half_written,
    watch_copies,
    watch_local_reads,
    watch_session,
)

CLUSTER_ID = "simulated"
CREDENTIAL = REPAIR_TOKEN.decode()
REGISTER_RETRY_S = 1.0
RESTART_S = 2.0  # after which a node that exited by itself is started again


class World:
    """The network, the store, the bookies, the clients, and the watchers of all of them."""

    def __init__(
        self,
        storage: StorageConfig = STORAGE,
        config: ClientConfig = CLIENT,
        directories: tuple[int, int] = (1, 1),
        placement: Placement = choose,
    ) -> None:
        """`directories`: how many journal and ledger directories each bookie has. Where bookies
        tell the places of entries, clients are on the hosts of all of them."""
        self.placement = placement
        self.loop: SimLoop = current()
        self.storage = storage
        self.directories = directories
        self.config = config
        self.network = SimNetwork(self.loop.random_for("network"))
        self.store = SimStore(self.loop.random_for("store"))
        self.ghost = Ghost()
        self.trace = Trace()
        self.observers = Observers(self.ghost, self.trace)
        self.network.taps.append(self.observers.exchange)
        self.network.deliveries.append(self.observers.delivered)
        self.store.listeners.append(self.observers.committed)
        self.nodes: list[BookieNode] = []
        self.clients: list[Client] = []
        self.newcomers: list[Callable[[Client], None]] = []
        """Called with each client that starts."""
        self.drained: dict[str, None] = {}
        """Bookies that an operator has drained: they are read-only."""
        self.exit_keeps: Keep = "random"
        """What a bookie's disks keep when it exits by itself."""
        self._names: dict[str, int] = {}

    async def prepare(
        self, bookies: int, racks: Sequence[str] = (), healing: AutorecoverySettings | None = None
    ) -> None:
        """The folders every cluster has, and so many bookies, registered, on these racks; how it
        heals itself, if that is not as usual."""
        session = self.store.session("founder")
        for folder in (paths.BOOKIES_AVAILABLE, paths.BOOKIES_READONLY, paths.BOOKIES_KNOWN):
            await session.create(folder, parents=True)
        await session.create(paths.LEDGERS)
        await session.create(paths.CLUSTER, cluster.encode(cluster.ClusterRecord(CLUSTER_ID)))
        await session.create(paths.REPAIR_CREDENTIAL, CREDENTIAL.encode(), parents=True)
        if healing is not None:
            await autorecovery.change_settings(session, **asdict(healing))
        await session.close()
        numbered = enumerate(racks or [""] * bookies, start=1)
        self.nodes = [BookieNode(self, number, rack) for number, rack in numbered]
        await asyncio.gather(*(node.start() for node in self.nodes))

    def network_of(self, name: str) -> SimClient:
        if not self.storage.place_bytes_min:
            return self.network.client(name)
        files = SimFiles(self.nodes, self.loop.random_for(f"files {name}"))
        return NearClient(self.network, name, files)

    async def client(self, name: str) -> "Client":
        """A new process with a session and a ledger store of its own; one that cannot start, or
        is killed while it does, is started again."""
        while True:
            client = self._new_client(name)
            try:
                await client.start()
                return client
            except StoreError:
                client.kill()
            except asyncio.CancelledError:
                if client.process.alive:
                    raise
            await asyncio.sleep(1)

    def _new_client(self, name: str) -> "Client":
        count = self._names[name] = self._names.get(name, 0) + 1
        client = Client(self, f"{name}.{count}")
        self.clients.append(client)
        return client

    def check(self) -> None:
        """Raise the first violation that observers saw, or a defect of a handler."""
        if self.observers.violations:
            raise self.observers.violations[0]
        if self.network.defects:
            defect = self.network.defects[0]
            raise Violation("no defect", f"a bookie's handler raised {defect!r}") from defect

    def calm(self) -> None:
        """No fault from now on: every process runs, everything arrives."""
        self.network.calm()
        self.store.calm()
        for node in self.nodes:
            node.calm()
        for client in self.clients:
            client.process.resume()


class BookieNode:
    """One address, its disks and the identity on them; at most one living process."""

    def __init__(self, world: World, number: int, rack: str) -> None:
        self.world = world
        self.rack = rack
        self.number = number
        self.address = f"b{number}:1"
        self.running = False
        self.bookie: Bookie | None = None
        self.repairing: asyncio.Task[None] | None = None
        """What has to be done before the next start."""
        self._crowds: list[Callable[[], None]] = []
        self._told_to_stop = 0
        self.boots = 0
        self._rng = world.loop.random_for(f"bookie {number}")
        self._generation = 0
        self._lost_directories = 0
        self._format()

    def _format(self) -> None:
        """A blank disk, and so a new identity."""
        self._generation += 1
        self.bookie_id = f"00000000-0000-0000-0000-0000000{self._generation:02d}{self.number:03d}"
        self.world.ghost.homes[self.bookie_id] = Home(self.address, self.rack)
        seed = f"{self._rng.random()}"
        journals, ledgers = self.world.directories
        self.journal_disks = [self._disk(f"{name} {seed}") for name in _names("journal", journals)]
        self.ledger_disks = [self._disk(f"{name} {seed}") for name in _names("ledger", ledgers)]
        self.ledger_names = _names("ledger", ledgers)
        self._to_miss: dict[int, None] = {}
        self.missing: dict[int, None] = {}
        self._missed: dict[int, None] = {}  # until a start has them again
        self._is_new = True
        self._lost: list[int] = []
        """Ledgers that it reported as lost when it ran last."""
        self._up_to_date: list[str] = []
        """Ledger directories that were there to the last, so that they know what became of all."""
        self.direct_log_watch = DirectLogWatch(self.world.ghost)

    def _disk(self, seed: str) -> SimDisk:
        return SimDisk(self.world.loop.keep(f"disk {seed}", random.Random(seed)))

    @property
    def disks(self) -> list[SimDisk]:
        return [*self.journal_disks, *self.ledger_disks]

    @property
    def journal_disk(self) -> SimDisk:
        """The first, mostly the only one."""
        return self.journal_disks[0]

    @property
    def ledger_disk(self) -> SimDisk:
        """The first, mostly the only one."""
        return self.ledger_disks[0]

    async def start(self) -> None:
        """Start the bookie, or wait for a start under way: running and registered on return. A disk
        failure or a kill meanwhile ends the start."""
        if self.repairing is not None:
            await asyncio.gather(self.repairing)
        if self.running:
            await asyncio.gather(self._booting, return_exceptions=True)
            return
        self.running = True
        self.boots += 1
        self.process = self.world.loop.process(f"{self.address}#{self.boots}")
        self.session = self.world.store.session(self.address)
        self._registering = asyncio.Lock()  # of this run: a killed one never lets go of it
        self.world.trace.note(self.address, f"starts as {self.bookie_id}")
        boots = self.boots
        try:
            self._booting = self.process.spawn(self._boot(), name=f"{self.address} boots")
            await self._booting
        except asyncio.CancelledError:
            if boots == self.boots and self.process.alive:
                raise
        except DiskFailed as error:
            if boots == self.boots:
                self.world.trace.note(self.address, f"cannot start: {error}")
                self.kill(self.world.exit_keeps)
        except Exception as error:
            self.world.network.defects.append(error)
            raise

    async def _directories(self) -> Directories:
        """Raises DiskFailed when no index can be opened."""
        self.missing, self._to_miss = self._to_miss, {}
        self._missed.update(self.missing)
        journals = zip(_names("journal", len(self.journal_disks)), self.journal_disks, strict=True)
        ledgers: list[LedgerDirectory] = []
        failed: dict[str, str] = {}
        named = list(zip(self.ledger_names, self.ledger_disks, strict=True))
        self.direct_log_watch.starts()
        for name, disk in [each for n, each in enumerate(named) if n not in self.missing]:
            try:
                path, index = root(self.address, name), await SimIndex.open(disk)
                ledgers.append(LedgerDirectory(name, disk, index, path=path))
                self.direct_log_watch.watch_index(name, ledgers[-1].index, disk)
            except DiskFailed as error:
                if len(self.ledger_disks) == 1:
                    raise
                failed[name] = str(error)
        if not ledgers:
            raise DiskFailed(f"no ledger directory can be opened: {failed}")
        known, self._up_to_date = self._up_to_date, [directory.id for directory in ledgers]
        if known and not any(each in known for each in self._up_to_date):
            self.world.ghost.bookie(self.bookie_id).unsure = True
        return Directories([JournalDirectory(*each) for each in journals], ledgers, failed)

    async def _boot(self) -> None:
        directories = await self._directories()
        self.bookie = await Bookie.start(
            *(self.bookie_id, directories, self.session, self.world.storage, CLUSTER_ID),
            repair_credential=CREDENTIAL.encode(),
            ask=partial(
                *(registering.stored_at, self.session, self.world.network.client(self.address))
            ),
        )
        self.direct_log_watch.watch(self.bookie.storage)
        self._watch_quarantine(self.bookie.storage)
        await self._check_promises()
        self.process.spawn(self._watch(self.bookie), name=f"{self.address} watches")
        handler = self.world.observers.listening(self.bookie)
        streams = self.world.observers.streaming(self.bookie)
        self.world.network.serve(self.address, handler, self.process, streams)
        self.world.ghost.serving[self.address] = self.bookie_id
        self.session.add_session_listener(self._session_changed)
        self.bookie.disks.listeners.append(self.standing_changed)
        await self._register()

    def _watch_quarantine(self, storage: Any) -> None:
        plain = storage.on_quarantine

        def quarantined(ledger_id: int) -> None:
            self.judge(invariants.a_healthy_node_quarantines_nothing, ledger_id)
            plain(ledger_id)

        storage.on_quarantine = quarantined

    async def _watch(self, bookie: Bookie) -> None:
        """A bookie whose journal or storage failed exits."""
        try:
            await asyncio.shield(bookie.failed)
        except Exception as error:
            self.world.trace.note(self.address, f"exits: {error!r}")
            self.world.ghost.meet("bookie exited by a failed disk")
            self.world.loop.call_soon(self._exit, context=self.world.loop.outside)

    def _exit(self) -> None:
        """The process ends, and its supervisor starts it again."""
        self.kill(self.world.exit_keeps)
        loop = self.world.loop
        loop.call_later(RESTART_S, self._start_again, context=loop.outside)

    def _start_again(self) -> None:
        self._restart = asyncio.ensure_future(self.start())

    async def stop(self) -> None:
        """Stop in good order, as after SIGTERM: what is durable then is all that it needs."""
        bookie, boots = self.bookie, self.boots
        if bookie is None or self.stopping:
            return
        self._told_to_stop = boots
        self.world.trace.note(self.address, "stops")
        stopping = self.process.spawn(bookie.stop(), name=f"{self.address} stops")
        (failure,) = await asyncio.gather(asyncio.shield(stopping), return_exceptions=True)
        if isinstance(failure, Exception) and not isinstance(failure, DiskFailed | JournalFailed):
            self.world.network.defects.append(failure)
        if boots == self.boots:
            self.kill(self.world.exit_keeps if failure else "none")

    def kill(self, keep: Keep = "random") -> None:
        """kill -9, and by `keep` the power with it."""
        if not self.running:
            return
        self.running = False
        if self.bookie is not None:
            self._lost = self._lost_now()
            stores = self.bookie.storage.directories
            self._up_to_date = [s.id for s in stores.live] or [*stores.failures][-1:]
        self.bookie = None
        self.world.trace.note(self.address, f"killed, keeps {keep}")
        self.world.network.down(self.address)
        self.session.abandon()
        self.world.observers.situations.crashed(any(map(half_written, self.ledger_disks)))
        self.direct_log_watch.crashes()
        self.world.ghost.bookie(self.bookie_id).shown.clear()
        for disk in self.disks:
            disk.crash(keep)
        self.process.kill()

    def blank(self) -> None:
        """The disk is lost for good: what was on it counts as one loss. The node must be down."""
        assert not self.running
        self.world.trace.note(self.address, "gets a blank disk")
        self.world.ghost.bookie(self.bookie_id).wiped = True
        self._format()

    def lose_directory(self) -> None:
        """Entry logs and index are gone, and that they were there is known. The node must be
        down."""
        assert not self.running
        self._bereave().rotten = True
        for folder in ("entrylog", "index"):
            self.ledger_disk.lose(folder)
        self.direct_log_watch.forgets_logs()

    def may_lose_one_directory(self, number: int) -> bool:
        """Whether another one would be left that has all that the node knows of its ledgers."""
        if self.bookie is None:
            return False
        living = [store.id for store in self.bookie.storage.stores]
        return self.ledger_names[number] in living and len(living) > 1

    def lose_one_directory(self, number: int) -> None:
        """One of several is gone, under the running node or while it is down; a new one is in its
        place at the next start."""
        self._bereave()
        lost, self._lost_directories = self.ledger_names[number], self._lost_directories + 1
        self.ledger_names[number] = f"{lost.partition('/')[0]}/{self._lost_directories}"
        self.ledger_disks[number] = self._disk(f"{self._rng.random()}")
        if self.bookie is not None:
            self.bookie.storage.drop(lost, DiskFailed("it is gone"))

    def miss_one_directory(self, number: int) -> None:
        """One of several is not given to the next start, and to the one after it again: nothing is
        lost. The node must be down."""
        assert not self.running
        self._to_miss[number] = None

    def _bereave(self) -> BookieGhost:
        mine = self.world.ghost.bookie(self.bookie_id)
        mine.bereft = True
        mine.compared.update(mine.cleared)
        mine.cleared.clear()
        return mine

    def calm(self) -> None:
        self._to_miss.clear()
        for disk in self.disks:
            disk.calm()
        for end_of_crowd in list(self._crowds):
            end_of_crowd()
        if self.running:
            self.process.resume()

    def crowd(self, *, whole: bool) -> Callable[[], None]:
        """Let others use up the budgets for adds and reads, with `whole` recovery's reserve too;
        returns what ends it."""
        bookie, storage = self.bookie, self.world.storage
        assert bookie is not None
        reserve = storage.recovery_reserve_bytes if whole else 0
        adds = storage.journal_pending_bytes_max + reserve
        reads = storage.read_pending_bytes_max + reserve
        adder = bookie._adder
        adder.undecided_bytes += adds
        bookie.responses.take(reads)

        def end_of_crowd() -> None:
            if end_of_crowd in self._crowds:
                self._crowds.remove(end_of_crowd)
                adder.undecided_bytes -= adds
                bookie.responses.give_back(reads)

        self._crowds.append(end_of_crowd)
        return end_of_crowd

    @property
    def stopping(self) -> bool:
        return self.running and self._told_to_stop == self.boots

    @property
    def doomed(self) -> bool:
        """It could not make its next journal segment, and exits once this one is full."""
        if self.bookie is None:
            return False
        journals = self.bookie.storage._journals._live.values()
        following = [journal._next_segment for journal in journals]
        return all(f.done() and not f.cancelled() and bool(f.exception()) for f in following)

    @property
    def unusable(self) -> bool:
        """It runs, but its index is rotten: it can take nothing and knows nothing."""
        return any(
            disk.rot(path)
            for disk in self.ledger_disks
            for path in disk.paths()
            if path.startswith("index/")
        )

    @property
    def degraded(self) -> bool:
        """It runs without a directory that failed or is away; a restart takes that up again."""
        if self.bookie is None:
            return False
        return bool(self.missing or self.bookie.storage.failures)

    @property
    def waiters(self) -> int:
        """Long polls that wait here."""
        assert self.bookie is not None
        return sum(handle.waiter_count for handle in self.bookie.ledgers._handles.values())

    @property
    def readonly(self) -> bool:
        if self.bookie is None:
            return False
        self.bookie.is_drained = self.bookie_id in self.world.drained
        return bool(self.bookie.readonly_reason)

    # -- what it promised before ---------------------------------------------------------------

    async def _check_promises(self) -> None:
        """Ask the restarted bookie, past the network, for all it acknowledged and fenced."""
        ghost = self.world.ghost
        mine = ghost.bookie(self.bookie_id)
        mine.partial = dict.fromkeys(self._partial())
        mine.unsure = mine.unsure or (self._is_new and bool(self.bookie.storage.failures))
        self._is_new = False
        self._up_to_date = [store.id for store in self.bookie.storage.stores]
        again = any(number not in self.missing for number in self._missed)
        self._missed = dict(self.missing)
        self.judge(invariants.who_lost_nothing_does_not_say_that_it_did, self._said_lost(), again)
        unsaid = self.direct_log_watch.unsaid()
        self.judge(invariants.what_a_start_cannot_read_is_said_to_be_lost, unsaid)
        await promises.check(self, self.bookie)

    def _partial(self) -> list[int]:
        """Ledgers of which a directory is not there."""
        ghost, storage = self.world.ghost.bookie(self.bookie_id), self.bookie.storage
        if self.bookie.ledgers.every_ledger_state().limbo == "lost":
            return [ledger_id for ledger_id, _ in ghost.stored]
        return [s.ledger_id for s in storage.states() if not storage.directories.is_whole(s)]

    def _said_lost(self) -> list[int]:
        """The ledgers that the starting bookie reports as lost, and did not report when it ran
        last: a walk through all ledgers may find that a torn one lacks entries that it never
        had."""
        said = [ledger_id for ledger_id in self._lost_now() if ledger_id not in self._lost]
        self._lost = self._lost_now()
        return said

    def _lost_now(self) -> list[int]:
        assert self.bookie is not None
        states = self.bookie.storage.states()
        return [state.ledger_id for state in states if state.limbo == "lost"]

    def judge(self, judge: Any, *args: Any) -> None:
        """Judge this bookie; a Violation is kept."""
        ghost = self.world.ghost
        try:
            judge(ghost, ghost.bookie(self.bookie_id), *args)
        except Violation as violation:
            self.world.observers.violated(violation)

    # -- registration --------------------------------------------------------------------------

    def _session_changed(self, state: SessionState) -> None:
        if state is SessionState.CONNECTED and self.process.alive:
            self.process.spawn(self._register(), name=f"{self.address} registers")

    def standing_changed(self) -> None:
        if self.process.alive:
            self.process.spawn(self._register(), name=f"{self.address} registers")

    async def _register(self) -> None:
        """As registration.py: an ephemeral node of ours, whatever was there before."""
        record = registering.record(self.address, self.rack)
        while True:
            try:
                async with self._registering:
                    await registering.publish(self.session, self.bookie_id, record, self.readonly)
                return
            except StoreError:
                await asyncio.sleep(REGISTER_RETRY_S)


def _names(kind: str, count: int) -> list[str]:
    return [kind, *(f"{kind}-{number}" for number in range(2, count + 1))]


class Client:
    """A process that uses ledgers: a session, a network, a LedgerStore."""

    def __init__(self, world: World, name: str) -> None:
        self.world = world
        self.name = name
        self.process = world.loop.process(name)
        self.session = world.store.session(name)
        watch_session(self.session, world.store, world.observers)
        self.rng = world.loop.random_for(name)

    async def start(self) -> None:
        await self.process.spawn(self._start(), name=f"{self.name} starts")

    async def _start(self) -> None:
        world = self.world
        self.directory = BookieDirectory(self.session, world.config.directory_refresh_s)
        await self.directory.start()
        self.network = world.network_of(self.name)
        self.bookies = BookieClient(
            self.network, self.directory, world.config, self.network.local_files
        )
        watch_copies(self.bookies, self.name, world.observers)
        watch_local_reads(self.bookies, world.observers)
        parts = self.session, self.bookies, self.directory, world.config, self.rng
        store = WatchedLedgerStore(*parts, world.placement)
        store.observers, store.client = world.observers, self.name
        self.ledgers = store
        for look in world.newcomers:
            look(self)

    def run(self, work: Coroutine[Any, Any, Any], name: str = "") -> "asyncio.Task[Any]":
        """Run `work` as a task of this process."""
        return self.process.spawn(work, name=f"{self.name} {name}".strip())

    def kill(self) -> None:
        """kill -9: no request that is under way gets an answer."""
        self.world.trace.note(self.name, "killed")
        self.session.abandon()
        self.process.kill()
