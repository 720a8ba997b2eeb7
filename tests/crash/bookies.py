"""SIGKILL for bookies under load, at moments drawn by a printed seed; nothing acked may be missing.

    python -m tests.crash.bookies --kills 50 --seed 7

Three bookies with several journal and ledger directories, small journal segments and entry logs,
garbage collection and compaction that never rest; writers that append, close and delete ledgers.
After each restart every acknowledged entry of every ledger that was not deleted is compared byte
by byte: as a client reads it, and as each bookie that acknowledged it answers for itself. Somebody
reads all the while, kills or not: what was acknowledged before he asked.
"""

import argparse
import asyncio
import random
import secrets
import tempfile
import time
from collections.abc import Hashable, Iterator
from typing import Any

from bookie_server.api import codec
from bookie_server.api.entry import HEADER_BYTES, unpack_entry
from bookie_server.api.messages import AddRequest, AddResponse, PackedAddRequest
from bookie_server.api.status import Status
from spark_ledger.config import ClientConfig
from spark_ledger.errors import LedgerError
from spark_ledger.ledger.client import LedgerStore
from spark_ledger.local import LocalBookie, LocalCluster
from spark_ledger.process import connect
from tests.kit.history import History, Place
from tests.kit.waiting import until

KIB, MIB = 1 << 10, 1 << 20
BOOKIES = 3
WRITERS = 3
LEDGERS_KEPT = 16
ENTRIES = (20, 160)
INFLIGHT_MAX = 40
PAUSE_S = (0.1, 0.9)
"""How long the load goes on between two kills."""
VERIFY_BYTES = 2 * MIB
SETTINGS: dict[str, object] = {
    "journal_bytes_max": MIB,
    "journal_batch_bytes_max": 256 * KIB,
    "journal_pending_bytes_max": 2 * MIB,
    "write_cache_bytes": MIB,
    "flush_interval_s": 0.4,
    "entry_log_bytes_max": 512 * KIB,
    "entry_bytes_max": 64 * KIB,
    "large_entry_bytes": 2 * KIB,
    "tombstone_sweep_s": 0.7,
    "gc_interval_s": 0.6,
    "minor_compaction_share": 0.5,
    "minor_compaction_s": 1.1,
    "major_compaction_share": 0.8,
    "major_compaction_s": 2.3,
    "read_cache_bytes": 256 * KIB,
    "read_ahead_bytes": 128 * KIB,
}
_POOL = random.Random(5).randbytes(256 * KIB)


def several_directories(folder: str) -> dict[str, object]:
    return {
        "journal_directories": f"{folder}/journal-0,{folder}/journal-1",
        "ledger_directories": f"{folder}/ledgers-0,{folder}/ledgers-1",
    }


def payload(ledger_id: int, entry_id: int) -> bytes:
    """What the entry of that id holds: between 60 bytes and 24 KiB, mostly little."""
    rng = random.Random(ledger_id << 32 | entry_id)
    size = rng.choice((60, 300, 1000, 1000, 4000, 24_000))
    start = rng.randrange(len(_POOL) - size)
    return b"%d:%d " % (ledger_id, entry_id) + _POOL[start : start + size]


class Acked:
    """What was acknowledged, of ledgers that nobody has asked to delete."""

    def __init__(self) -> None:
        self.by_client: dict[int, int] = {}
        """By ledger: the last entry that its writer was told of; all before were told too."""
        self.told_at: dict[int, list[float]] = {}
        """By ledger, the deleted ones too: when the writer was told of each entry."""
        self.by_bookie: dict[str, dict[int, dict[int, None]]] = {}
        """By bookie and ledger: the entries that it answered OK to."""
        self.entries = 0
        self._deleted: set[int] = set()

    def listen(self, store: LedgerStore) -> None:
        """Hear what each bookie answers to each add of this store."""
        bookies = store.cluster.bookies
        call = bookies._call

        async def heard(bookie_id: str, method: str, request: Any, timeout_s: float) -> Any:
            response = await call(bookie_id, method, request, timeout_s)
            if isinstance(request, PackedAddRequest):
                asked = codec.decode_request("Add", b"".join(codec.encode_buffers(request)))
                assert isinstance(asked, AddRequest) and isinstance(response, AddResponse)
                self._hear(bookie_id, asked, response)
            return response

        bookies._call = heard  # type: ignore[method-assign]

    def _hear(self, bookie_id: str, request: AddRequest, response: AddResponse) -> None:
        of_bookie = self.by_bookie.setdefault(bookie_id, {})
        for add, result in zip(request.adds, response.results, strict=True):
            if result.status is Status.OK:
                header = unpack_entry(b"".join(add.entry)).header
                if header.ledger_id in self._deleted:
                    continue  # the third copy's answer, later than the word to delete
                of_bookie.setdefault(header.ledger_id, {})[header.entry_id] = None

    def forget(self, ledger_id: int) -> None:
        self._deleted.add(ledger_id)
        self.by_client.pop(ledger_id, None)
        for ledgers in self.by_bookie.values():
            ledgers.pop(ledger_id, None)


class Load:
    """Writers, each with one ledger after the other; old ledgers are deleted."""

    def __init__(self, store: LedgerStore, acked: Acked, rng: random.Random) -> None:
        self._store = store
        self._acked = acked
        self._rng = rng
        self._closed: list[int] = []
        self.deleted = 0
        self.failed = 0
        self.stopping = False

    async def write(self) -> None:
        while not self.stopping:
            try:
                await self._write_one()
                while len(self._closed) > LEDGERS_KEPT:
                    await self._delete(self._closed.pop(self._rng.randrange(len(self._closed))))
            except LedgerError:  # a quorum was down for too long: another ledger
                self.failed += 1
                await asyncio.sleep(0.1)

    async def _write_one(self) -> None:
        writer = await self._store.create(3, 3, 2)
        ledger_id = writer.ledger_id
        waiting: list[asyncio.Future[int]] = []
        try:
            for entry_id in range(self._rng.randint(*ENTRIES)):
                waiting.append(writer.append(payload(ledger_id, entry_id)))
                if len(waiting) > INFLIGHT_MAX or self._rng.random() < 0.1:
                    self._told(ledger_id, await waiting.pop(0))
                if self.stopping:
                    break
            for future in waiting:
                self._told(ledger_id, await future)
            await writer.close()
        except LedgerError:
            await asyncio.gather(*waiting, return_exceptions=True)
            await self._store.recover(ledger_id)
        self._closed.append(ledger_id)

    def _told(self, ledger_id: int, entry_id: int) -> None:
        self._acked.by_client[ledger_id] = entry_id
        self._acked.told_at.setdefault(ledger_id, []).append(time.monotonic())
        self._acked.entries += 1

    async def _delete(self, ledger_id: int) -> None:
        self._acked.forget(ledger_id)
        await self._store.delete(ledger_id)
        self.deleted += 1


class Onlooker:
    """Reads from the first entry to the last that was acknowledged, one ledger after the other."""

    def __init__(self, store: LedgerStore, acked: Acked, rng: random.Random) -> None:
        self._store = store
        self._acked = acked
        self._rng = rng
        self._history = History()
        self.reads = 0
        self.in_vain = 0

    async def read(self) -> None:
        while True:
            await asyncio.sleep(self._rng.uniform(0.0, 0.1))
            if self._acked.by_client:
                ledger_id, last = self._rng.choice(list(self._acked.by_client.items()))
                await self._read(ledger_id, last)

    async def _read(self, ledger_id: int, last: int) -> None:
        begun, whole, found = time.monotonic(), True, []
        try:
            reader = await self._store.open(ledger_id, recover=False)
            async for entry_id, entry in reader.read(0, last, known_confirmed=last):
                same = bytes(entry.payload) == payload(ledger_id, entry_id)
                found.append(((0, entry_id), entry_id if same else bytes(entry.payload)))
        except LedgerError:  # too few were up, or it was deleted: what came is right all the same
            whole = False
        self.reads += whole
        self.in_vain += not whole
        rows: list[tuple[Place, Hashable]] = [*found]
        self._history.read(f"ledger {ledger_id}", rows, begun=begun, whole=whole, start=0)

    def judge(self) -> None:
        """Raises AssertionError."""
        for ledger_id, told_at in self._acked.told_at.items():
            for entry_id, at in enumerate(told_at):
                place = (0, entry_id)
                self._history.promised(f"ledger {ledger_id}", entry_id, at=at, place=place)
        self._history.check()


class Verifier:
    """Compares what is read with what was acknowledged, once all bookies are up."""

    def __init__(self, store: LedgerStore, acked: Acked) -> None:
        self._store = store
        self._acked = acked
        self.compared = 0

    async def everything(self) -> None:
        """Raises AssertionError."""
        await self._store.cluster.directory.refresh()  # each bookie is asked where it is now
        for bookie_id in sorted(self._acked.by_bookie):
            await self._of_bookie(bookie_id)
        for ledger_id, last in list(self._acked.by_client.items()):
            await self._of_ledger(ledger_id, last)

    async def _of_bookie(self, bookie_id: str) -> None:
        ledgers = self._acked.by_bookie[bookie_id]
        for ledger_id, entries in [(ledger, list(ids)) for ledger, ids in ledgers.items()]:
            for first, last in _runs(sorted(entries)):
                await self._of_run(bookie_id, ledger_id, first, last)

    async def _of_run(self, bookie_id: str, ledger_id: int, first: int, last: int) -> None:
        bookies = self._store.cluster.bookies
        while first <= last:
            answer = await bookies.read(bookie_id, ledger_id, first, last, max_bytes=VERIFY_BYTES)
            if ledger_id not in self._acked.by_bookie[bookie_id]:
                return  # deleted meanwhile
            where = f"bookie {bookie_id} acknowledged {ledger_id}:{first}"
            assert answer.status is Status.OK, f"{where}: {answer.status.name} {answer.reason}"
            rows: list[tuple[int, bytes]] = []
            for result in answer.results:
                where = f"bookie {bookie_id} acknowledged {ledger_id}:{first}"
                assert result.status is Status.OK, f"{where}, and answers {result.status.name}"
                entry = unpack_entry(result.entry)
                assert (entry.header.ledger_id, entry.header.entry_id) == (ledger_id, first)
                rows.append((first, bytes(result.entry[HEADER_BYTES:])))
                first += 1
            self._judge(ledger_id, range(first - len(rows), first), rows)

    async def _of_ledger(self, ledger_id: int, last: int) -> None:
        try:
            reader = await self._store.open(ledger_id, recover=False)
            read = reader.read(0, last, known_confirmed=last)
            rows = [(entry_id, bytes(entry.payload)) async for entry_id, entry in read]
            self._judge(ledger_id, range(last + 1), rows)
        except LedgerError as error:
            assert ledger_id not in self._acked.by_client, f"ledger {ledger_id}: {error}"

    def _judge(self, ledger_id: int, acked: range, rows: list[tuple[int, bytes]]) -> None:
        """What was acknowledged of the entries, and what was read of them."""
        history, log = History(), f"ledger {ledger_id}"
        for entry_id in acked:
            history.promised(log, payload(ledger_id, entry_id), place=(0, entry_id))
        history.read(log, [((0, entry_id), found) for entry_id, found in rows])
        history.check()
        self.compared += len(rows)


def _runs(entry_ids: list[int]) -> Iterator[tuple[int, int]]:
    """Cut sorted ids into (first, last) of neighbours."""
    first = previous = None
    for entry_id in entry_ids:
        if previous is None or entry_id != previous + 1:
            if first is not None and previous is not None:
                yield first, previous
            first = entry_id
        previous = entry_id
    if first is not None and previous is not None:
        yield first, previous


class Storm:
    """Kills bookies one after the other, sometimes all at once, sometimes while they start."""

    def __init__(self, cluster: LocalCluster, seed: int) -> None:
        self._cluster = cluster
        self._rng = random.Random(seed)
        self._started = time.monotonic()
        self.killed = 0

    async def run(self, kills: int) -> None:
        """Raises AssertionError when something acknowledged is missing or another."""
        store = await connect(self._cluster.service_url, ClientConfig(read_timeout_s=10.0))
        acked = Acked()
        acked.listen(store)
        load = Load(store, acked, random.Random(self._rng.random()))
        verifier = Verifier(store, acked)
        onlooker = Onlooker(store, acked, random.Random(self._rng.random()))
        writers = [asyncio.create_task(load.write()) for _ in range(WRITERS)]
        looking = asyncio.create_task(onlooker.read())
        try:
            while self.killed < kills:
                await asyncio.sleep(self._rng.uniform(*PAUSE_S))
                await self._kill_some(kills - self.killed)
                before = verifier.compared
                await verifier.everything()
                self._say(f"{acked.entries:,} acked, {verifier.compared - before:,} compared")
                for writer in writers:
                    assert not writer.done(), writer.exception()
                assert not looking.done(), looking.exception()
            least = 100 * kills / 5
            await until(lambda: onlooker.reads and load.deleted and acked.entries > least)
            load.stopping = True
            await asyncio.gather(*writers)
            await verifier.everything()
        finally:
            for task in (*writers, looking):
                task.cancel()
            await asyncio.gather(*writers, looking, return_exceptions=True)
            await store.close()
        onlooker.judge()
        self._say(
            f"{self.killed} kills, {acked.entries:,} entries acked, {load.deleted} ledgers"
            f" deleted, {load.failed} given up, {verifier.compared:,} comparisons,"
            f" {onlooker.reads} ledgers read meanwhile and {onlooker.in_vain} in part:"
            " nothing missing"
        )
        assert len(acked.by_bookie) == BOOKIES, "nobody heard what the bookies answered"

    async def _kill_some(self, most: int) -> None:
        everybody = self._rng.random() < 0.2 and most >= BOOKIES
        victims = self._cluster.bookies if everybody else [self._rng.choice(self._cluster.bookies)]
        for victim in victims:
            self._kill(victim)
        if most > len(victims) and self._rng.random() < 0.3:
            victims[0].launch()
            await asyncio.sleep(self._rng.uniform(0.3, 1.2))  # somewhere in its start
            self._kill(victims[0])
        else:
            await asyncio.sleep(self._rng.uniform(0.0, 0.5))
        await asyncio.gather(*(asyncio.to_thread(victim.start) for victim in victims))

    def _kill(self, bookie: LocalBookie) -> None:
        bookie.kill()
        self.killed += 1
        self._say(f"killed {bookie.folder.name}")

    def _say(self, text: str) -> None:
        print(f"{time.monotonic() - self._started:6.1f} s  {text}", flush=True)


def run(kills: int, seed: int) -> None:
    print(f"\nchaos of bookies: seed {seed}, {kills} kills", flush=True)

    def settings(number: int) -> dict[str, object]:
        return {**SETTINGS, **several_directories(f"{data_dir}/bookies/{number}")}

    with (
        tempfile.TemporaryDirectory(prefix="spark-ledger-") as data_dir,
        LocalCluster(BOOKIES, data_dir, bookie_settings=settings, autorecovery=False) as cluster,
    ):
        asyncio.run(Storm(cluster, seed).run(kills))


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--kills", type=int, default=5)
    parser.add_argument("--seed", type=int, default=secrets.randbelow(1 << 32))
    options = parser.parse_args()
    run(options.kills, options.seed)


if __name__ == "__main__":
    main()
