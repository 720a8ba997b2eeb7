"""One case: operations against a node and its model, then a crash, a restart and every check.

Always true: what a case is follows from its bytes alone; requests are not waited for unless an
operation says so, so a crash meets them, flushes and checkpoints under way.
"""

import asyncio
import random
import time
from collections.abc import Coroutine
from typing import Any, NamedTuple

from bookie_server.api import messages as m
from bookie_server.api.status import Status
from bookie_server.disk.interface import DiskFailed
from bookie_server.journal.writer import JournalFailed
from tests.kit.budgets import ENGINE, SMALL_LOGS
from tests.kit.settings import with_settings
from tests.simulation.disk import SimDisk
from tests.simulation.loop import run
from tests.storage.model import (
    NEGATIVES,
    SIZES,
    Begun,
    Broken,
    Compared,
    LedgerModel,
    Model,
    entry_of,
    identity,
)
from tests.storage.operations import KEEPS, LEDGERS, OPERATION_BYTES, WAITS_S, Operation, operations
from tests.storage.rig import BOOKIE_ID, PAGE_CACHE, Down, Rig, Shape

LARGE_BYTES = (0, 800, 800, 1)
DIRECTORIES_MAX = 3
"""Of each kind."""


class Ran(NamedTuple):
    """What a case was."""

    operations: int
    crashes: int
    judged: int
    cpu_s: float = 0.0


def run_case(case: bytes) -> Ran:
    """Raises Broken, or what else went wrong."""
    started = time.process_time()
    ran = run(Case(case).main())
    return ran._replace(cpu_s=time.process_time() - started)


def case_of(seed: int, operations_min: int = 30, operations_max: int = 33) -> bytes:
    """The bytes of a numbered case."""
    rng = random.Random(seed)
    return rng.randbytes(OPERATION_BYTES * (1 + rng.randint(operations_min, operations_max)))


class Case:
    """A node, its model, and what is under way."""

    def __init__(self, case: bytes, shape: Shape | None = None) -> None:
        self.case = case
        self.rig = Rig(shape or _shape(case[:OPERATION_BYTES]), random.Random(0))
        self.model = Model(LEDGERS)
        self.model.ledgers[LEDGERS[-1]].page_cache = self.rig.shape.page_cache
        for ledger in self.model.ledgers.values():
            durability = "page-cache" if ledger.page_cache else "synced"
            self.rig.records.add_ledger(ledger.ledger_id, BOOKIE_ID, durability)
        self.crashes = 0
        self._starts_without: int | None = None  # starts for which a directory is away; None: any
        self._under_way: list[asyncio.Task[None]] = []

    async def main(self) -> Ran:
        await self.rig.start()
        count = 0
        for operation in operations(self.case):
            count += 1
            await getattr(self, f"_{operation.kind}")(operation)
            if self.rig.failed:
                if not self.model.failing:
                    raise Broken(f"the node failed: {self.rig.bookie.failed.exception()!r}")
                await self._crash(operation)
        await self._crash(Operation("crash", 0, count >> 8, count & 255))
        await self._works()
        self.rig.crash("all")
        return Ran(count, self.crashes, self.model.judged)

    # -- operations ------------------------------------------------------------------------------

    async def _add(self, op: Operation) -> None:
        ledger = self.model.ledgers[op.ledger_id]
        first = _first_entry(op, ledger.next_entry)
        variant, recovery = int(op.c & 7 == 7), op.c >> 3 & 3 == 3
        adds, sent = [], []
        for entry_id in range(first, first + 1 + (op.a >> 2 & 7)):
            lac = entry_id - 1 if op.b & 8 else min(first - 1, entry_id - 1)
            size = SIZES[(op.c >> 5) + entry_id & 7]
            entry = entry_of(ledger.ledger_id, entry_id, variant, lac, size)
            self.model.sends(ledger, entry_id, entry, lac)
            adds.append(m.Add([entry], recovery))
            sent.append((entry_id, entry))
        begun = Begun(recovery, ledger.fenced, ledger.buried, compared=ledger.compared)
        await self._begin(self._added(ledger, adds, sent, begun), op)

    async def _added(
        self,
        ledger: LedgerModel,
        adds: list[m.Add],
        sent: list[tuple[int, bytes]],
        begun: Begun,
    ) -> None:
        answer = await self.rig.ask(m.AddRequest(BOOKIE_ID, adds))
        for (entry_id, entry), result in zip(sent, answer.results, strict=True):
            self.model.added(ledger, entry_id, entry, result.status, begun)

    async def _read(self, op: Operation) -> None:
        ledger = self.model.ledgers[op.ledger_id]
        first = op.b % (ledger.next_entry + 1)
        await self._begin(self._read_range(ledger, first, first + op.c % 32), op)

    async def _read_range(
        self, ledger: LedgerModel, first: int, last: int
    ) -> dict[int, m.EntryResult]:
        """Ask until the range has an answer for each of its entries."""
        found: dict[int, m.EntryResult] = {}
        acked = {e: what for e, what in ledger.acked.items() if first <= e <= last}
        begun = Begun(acked=acked)
        while first <= last:
            request = m.ReadRequest(BOOKIE_ID, ledger.ledger_id, first, last, 1 << 20)
            answer: m.ReadResponse = await self.rig.ask(request)
            if answer.status is Status.BUSY:
                await asyncio.sleep(0.02)
                continue
            whole = [m.EntryResult(answer.status)] * (last - first + 1)
            for result in whole if answer.status is not Status.OK else answer.results:
                self.model.read(ledger, first, result.status, bytes(result.entry), begun)
                found[first] = result
                first += 1
        return found

    async def _lac(self, op: Operation) -> None:
        ledger = self.model.ledgers[op.ledger_id]
        lac = op.b % (ledger.next_entry + 1) - 1
        if op.c & 1:
            await self._begin(self._read_lac(ledger), op)
        else:
            ledger.lac_sent = max(ledger.lac_sent, lac)
            await self._begin(self._write_lac(ledger, lac), op)

    async def _write_lac(self, ledger: LedgerModel, lac: int) -> None:
        answer = await self.rig.ask(m.WriteLacRequest(BOOKIE_ID, ledger.ledger_id, lac))
        if answer.status is Status.OK:
            ledger.explicit_lac = max(ledger.explicit_lac, lac)

    async def _read_lac(self, ledger: LedgerModel) -> None:
        answer = await self.rig.ask(m.ReadLacRequest(BOOKIE_ID, ledger.ledger_id))
        self.model.lac_read(ledger, answer.status, answer.last_add_confirmed, answer.fenced)

    async def _fence(self, op: Operation) -> None:
        ledger = self.model.ledgers[op.ledger_id]
        ledger.fence_asked = True
        await self._begin(self._fenced(ledger, by_read=bool(op.b & 1)), op)

    async def _fenced(self, ledger: LedgerModel, *, by_read: bool) -> None:
        if by_read:
            request = m.ReadRequest(BOOKIE_ID, ledger.ledger_id, 0, 0, 1, fence=True)
            status = (await self.rig.ask(request)).status
            fenced = status in (Status.OK, *NEGATIVES)
        else:
            request = m.ReadLacRequest(BOOKIE_ID, ledger.ledger_id, fence=True)
            fenced = (await self.rig.ask(request)).status is Status.OK
        ledger.fenced = ledger.fenced or fenced

    async def _wait(self, op: Operation) -> None:
        await asyncio.sleep(WAITS_S[op.b & 7])

    async def _flush(self, op: Operation) -> None:
        if not self.rig.failed:
            self.rig.begin_flush()
        await self._pause(op)

    async def _delete(self, op: Operation) -> None:
        ledger = self.model.ledgers[op.ledger_id]
        if op.b & 1 and not ledger.deleted:
            ledger.deleted = True
            self.rig.records.drop_ledger(ledger.ledger_id)

    async def _fail(self, op: Operation) -> None:
        """The next sync or append of a disk fails; the node then exits and is started again."""
        self.model.failing = True
        disk = self.rig.disks[op.b % len(self.rig.disks)]
        if op.c & 1:
            disk.faults.sync_fails = 1
        else:
            disk.faults.append_fails = 1

    async def _grow(self, op: Operation) -> None:
        """The next start finds one directory more, of either kind."""
        if op.b & 1 and len(self.rig.journal_disks) < DIRECTORIES_MAX:
            self.rig.add_journal_directory()
        elif len(self.rig.ledger_disks) < DIRECTORIES_MAX:
            self.rig.add_ledger_directory()
        await self._crash(op)

    async def _lose(self, op: Operation) -> None:
        """The next start lacks a ledger directory, or finds again the one that was lacking."""
        if self.rig.missing:
            self.finds_again()
        elif len(self.rig.ledger_disks) > 1:
            self.misses(self.rig.ledger_disks[op.b % len(self.rig.ledger_disks)])
        await self._crash(op)

    async def _drop(self, op: Operation) -> None:
        """A ledger directory is lost while the node runs. It is there at the next start, or at the
        one after that."""
        living = [] if self.rig.failed else self.rig.living
        if len(living) > 1:
            disk = living[op.b % len(living)]
            self.model.loses(self.rig.ids[disk])
            if op.c & 1 and not self.rig.missing:
                self.rig.missing.append(disk)
                self._starts_without = 1
            self.rig.drop(disk)
        await self._pause(op)

    async def _clear(self, op: Operation) -> None:
        """Compare a ledger that is in limbo, repair it or not, and take it out of limbo; or only
        the first, or only the last: by a comparison that may have been long ago."""
        ledger = self.model.ledgers[op.ledger_id]
        what = op.b & 3
        if ledger.clearing:
            return
        if what < 3:
            await self._begin(self._compare(ledger, repair=what == 1, clear=what < 2), op)
        elif ledger.compared is not None:
            await self._begin(self._clear_by(ledger, ledger.compared), op)

    async def _compare(self, ledger: LedgerModel, *, repair: bool, clear: bool) -> None:
        acked = {**dict.fromkeys(ledger.lost), **ledger.acked}
        with ledger.being_cleared():
            told = await self.rig.ask(m.ClearLimboRequest(BOOKIE_ID, ledger.ledger_id))
            if told.status not in (Status.OK, Status.LIMBO):
                self.model.limbo_unanswered(ledger, told.status)
            if told.status is not Status.OK or not told.limbo:
                return
            found = await self._read_range(ledger, 0, ledger.next_entry)
            here = [e for e, result in found.items() if result.status is Status.OK]
            lacking = {e: what for e, what in acked.items() if e not in here}
            compared = ledger.compared = Compared(told.revision, lacking)
            if repair:
                await self._repair(ledger, compared)
        if clear:
            await self._clear_by(ledger, compared)

    async def _repair(self, ledger: LedgerModel, compared: Compared) -> None:
        sent = []
        for entry_id, what in compared.lacking.items():
            possible = ledger.sent.get(entry_id, [])
            sent += [(entry_id, e) for e in possible if what in (None, identity(e))][:1]
        for entry_id, entry in sent:
            self.model.sends(ledger, entry_id, entry, -1)
        begun = Begun(True, ledger.fenced, ledger.buried, compared=compared)
        if sent:
            await self._added(ledger, [m.Add([e], recovery=True) for _, e in sent], sent, begun)

    async def _clear_by(self, ledger: LedgerModel, compared: Compared) -> None:
        lost = list(self.model.lost)
        with ledger.being_cleared():
            forgiven = self.model.clears(ledger, compared)
            request = m.ClearLimboRequest(
                BOOKIE_ID, ledger.ledger_id, clear=True, revision=compared.revision
            )
            answer = await self.rig.ask(request)
            self.model.cleared(ledger, forgiven, lost, answer.status)

    def misses(self, disk: SimDisk) -> None:
        """The node is about to crash, and starts without this ledger directory."""
        self.rig.missing.append(disk)
        self.model.loses(self.rig.ids[disk])

    def finds_again(self) -> None:
        """The next start lacks no directory."""
        self.rig.missing.clear()
        self._starts_without = None

    async def _crash(self, op: Operation) -> None:
        self.rig.crash(KEEPS[op.a & 7], op.seed)
        self.model.crashed(power=KEEPS[op.a & 7] != "all")
        await self._come_back(again=bool(op.a & 64))

    async def _stop(self, op: Operation) -> None:
        try:
            await self.rig.stop()
        except (DiskFailed, JournalFailed):
            if not self.model.failing:
                raise
            self.rig.crash("random", op.seed)
            self.model.crashed(power=True)
        await self._come_back(again=False)

    # -- after a restart -------------------------------------------------------------------------

    async def _come_back(self, *, again: bool) -> None:
        """Start, with a second crash while the node starts if `again`, and verify everything."""
        self.crashes += 1
        await self._answered()
        self.model.failing = False
        self._finds_directories()
        for disk in self.rig.disks:
            disk.calm()
        if again:
            starting = asyncio.ensure_future(self.rig.start())
            await asyncio.sleep(0.0007 * (1 + self.crashes % 16))
            self.rig.crash("random", self.crashes)
            await asyncio.gather(starting, return_exceptions=True)
        await self.rig.start()
        await self._started()
        await self._verify()

    async def _started(self) -> None:
        """It serves at once."""

    def _finds_directories(self) -> None:
        """The node is about to start, and finds what is not missing."""
        if self._starts_without == 0:
            self.finds_again()
        elif self._starts_without is not None:
            self._starts_without -= 1
        missing = [self.rig.ids[disk] for disk in self.rig.missing]
        for directory_id in [each for each in self.model.lost if each not in missing]:
            self.model.back(directory_id)

    async def _verify(self, *, restarted: bool = True) -> None:
        """Read everything. Without a restart what a deleted ledger lacks may be in the journal, and
        be there again after one."""
        for ledger in self.model.ledgers.values():
            found = await self._read_range(ledger, 0, ledger.next_entry + 1)
            served = {e: bytes(r.entry) for e, r in found.items() if r.status is Status.OK}
            denied = [e for e, r in found.items() if r.status in NEGATIVES]
            denied = denied if restarted or not ledger.deleted else []
            self.model.settle(ledger, served, denied)
            await self._read_lac(ledger)
            if ledger.fenced and not ledger.deleted:
                await self._refuses(ledger)

    async def _refuses(self, ledger: LedgerModel) -> None:
        """A fenced ledger takes no normal add."""
        entry_id = ledger.next_entry
        entry = entry_of(ledger.ledger_id, entry_id, 0, -1, SIZES[0])
        answer = await self.rig.ask(m.AddRequest(BOOKIE_ID, [m.Add([entry])]))
        begun = Begun(False, ledger.fenced, ledger.buried, compared=ledger.compared)
        self.model.added(ledger, entry_id, entry, answer.results[0].status, begun)

    async def _works(self) -> None:
        """A node that lost nothing takes what it is given, at once."""
        for ledger in self.model.ledgers.values():
            if not ledger.deleted and not self.model.unknown(ledger):
                entry_id = ledger.next_entry
                entry = entry_of(ledger.ledger_id, entry_id, 0, -1, SIZES[0])
                self.model.sends(ledger, entry_id, entry, -1)
                add = m.Add([entry], recovery=ledger.fence_asked)
                answer = await self.rig.ask(m.AddRequest(BOOKIE_ID, [add]))
                if answer.results[0].status is not Status.OK:
                    raise Broken(f"an add after all was answered {answer.results[0].status.name}")

    # -- means -----------------------------------------------------------------------------------

    async def _begin(self, work: Coroutine[Any, Any, Any], op: Operation) -> None:
        task = asyncio.ensure_future(work)
        self._under_way.append(task)
        await self._pause(op)

    async def _answered(self) -> None:
        """What was under way is judged, or died with the node."""
        under_way, self._under_way = self._under_way, []
        for outcome in await asyncio.gather(*under_way, return_exceptions=True):
            if isinstance(outcome, Exception) and not isinstance(outcome, Down):
                raise outcome

    async def _pause(self, op: Operation) -> None:
        if op.pause_s is not None:
            await asyncio.sleep(op.pause_s)


def _first_entry(op: Operation, next_entry: int) -> int:
    """Mostly the next; some of those before again, some with a gap."""
    where = op.b & 7
    if where == 7:
        return next_entry + 1 + (op.b >> 4)
    if where >= 5:
        return max(0, next_entry - 1 - (op.b >> 4))
    return next_entry


def _shape(head: bytes) -> Shape:
    """What the first bytes of a case say that the node is made of."""
    directories = 1 + head[0] % 3 % 2, (1, 1, 1, 2, 2, 3)[head[0] // 3 % 6]
    return Shape(
        *directories,
        page_cache=PAGE_CACHE and head[1] % 4 == 3,
        eager_index=head[1] % 8 >= 4,
        config=with_settings(
            (ENGINE, ENGINE, SMALL_LOGS)[head[2] % 3], large_entry_bytes=LARGE_BYTES[head[3] % 4]
        ),
    )
