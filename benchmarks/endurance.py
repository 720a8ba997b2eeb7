"""A bookie over time: its restart after a kill, its memory under everything at once, its idling."""

import os
import random
import threading
import time
from collections import deque
from collections.abc import Callable
from pathlib import Path

from benchmarks.processes import cpu_s, most_memory_mib
from spark_ledger import LedgerClient
from spark_ledger.local import LocalCluster

MIB = 1 << 20
GIB = 1 << 30

REPLAYED_BYTES = GIB
LARGE_BYTES = 32 << 10
UNFLUSHED = {
    "write_cache_bytes": 6 * GIB,
    "flush_interval_s": 86_400,
    "large_entry_bytes": LARGE_BYTES,
}

BUSY_COMPACTION = {
    "gc_interval_s": 10,
    "minor_compaction_s": 30,
    "major_compaction_s": 60,
}
"""Budgets as they are by default; but what happens once an hour or a day happens in ten minutes."""
ENTRY_SIZES = (1 << 10, 16 << 10, 64 << 10, 1 << 20)
"""Of both kinds: those that go to the journal, and those that go straight to an entry log."""
LEDGER_BYTES = 64 * MIB
KEPT_LEDGERS, KEPT_ONE_IN = 40, 4
WRITTEN_BYTES_PER_S = 24 * MIB
IDLE_S, SETTLED_S = 60.0, 15.0


def restart_s(entry_bytes: int) -> float:
    """Seconds from the start of a bookie that was killed with 1 GiB of such entries and nothing of
    it flushed, until it is registered as writable. Small entries are in its journal, large ones
    (LARGE_BYTES and more) in direct logs."""
    is_small = entry_bytes < LARGE_BYTES
    with LocalCluster(bookies=1, bookie_settings=dict(UNFLUSHED), autorecovery=False) as cluster:
        bookie = cluster.bookies[0]
        with LedgerClient(cluster.service_url) as client:
            ledger_id, last = _fill(client, 1, entry_bytes, REPLAYED_BYTES)
        journal = sum(path.stat().st_blocks * 512 for path in _segments(bookie.folder))
        assert (journal >= REPLAYED_BYTES) == is_small, f"{journal} bytes of journal"
        bookie.kill()
        began = time.monotonic()
        bookie.start()
        took = time.monotonic() - began
        with LedgerClient(cluster.service_url) as client:
            reader = client.open_ledger(ledger_id)
            assert reader.last_add_confirmed == last
            assert [entry_id for entry_id, _ in reader.read(last - 9, last)][-1] == last
    return took


def memory_mib(seconds: float) -> float:
    """VmHWM, the highest of three bookies, after `seconds` of writes in entries of four sizes,
    reads of old and new ledgers, deletions and the compaction that they make necessary."""
    settings = dict(BUSY_COMPACTION)
    with LocalCluster(bookies=3, bookie_settings=settings, autorecovery=False) as cluster:
        work = _Everything(cluster, time.monotonic() + seconds)
        work.run()
        return max(most_memory_mib(b.pid) for b in cluster.bookies if b.pid is not None)


def idle_share() -> float:
    """Of a core, that one of three bookies uses while nobody asks for anything."""
    with LocalCluster(bookies=3, autorecovery=False) as cluster:
        with LedgerClient(cluster.service_url) as client:
            _fill(client, 3, 64 << 10, 16 * MIB)
        time.sleep(SETTLED_S)
        pids = [bookie.pid for bookie in cluster.bookies if bookie.pid is not None]
        before = sum(map(cpu_s, pids))
        time.sleep(IDLE_S)
        return (sum(map(cpu_s, pids)) - before) / len(pids) / IDLE_S


class _Everything:
    """One thread writes and deletes ledgers, two read them, until the time is over."""

    def __init__(self, cluster: LocalCluster, ends: float) -> None:
        self._url = cluster.service_url
        self._ends = ends
        self._kept: deque[tuple[int, int]] = deque(maxlen=KEPT_LEDGERS)
        self._failure: BaseException | None = None

    def run(self) -> None:
        works = (self._write, self._read, self._read)
        threads = [threading.Thread(target=self._safely, args=(work,)) for work in works]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        if self._failure is not None:
            raise self._failure

    def _safely(self, work: Callable[[], None]) -> None:
        try:
            work()
        except BaseException as failure:
            self._failure, self._ends = failure, 0.0

    def _write(self) -> None:
        number, began, written = 0, time.monotonic(), 0
        with LedgerClient(self._url) as client:
            while time.monotonic() < self._ends:
                size = ENTRY_SIZES[number % len(ENTRY_SIZES)]
                ledger_id, last = _fill(client, 3, size, LEDGER_BYTES)
                written += LEDGER_BYTES
                if number % KEPT_ONE_IN == 0:
                    self._kept.append((ledger_id, last))
                else:
                    client.delete_ledger(ledger_id)
                number += 1
                ahead_s = written / WRITTEN_BYTES_PER_S - (time.monotonic() - began)
                time.sleep(max(0.0, ahead_s))

    def _read(self) -> None:
        chosen = random.Random(threading.get_ident())
        with LedgerClient(self._url) as client:
            while time.monotonic() < self._ends:
                kept = list(self._kept)
                if not kept:
                    time.sleep(0.1)
                    continue
                ledger_id, last = chosen.choice(kept)
                for _ in client.open_ledger(ledger_id).read(0, last):
                    pass


def _fill(client: LedgerClient, copies: int, entry_bytes: int, size: int) -> tuple[int, int]:
    """A closed ledger of `size` bytes: its id and its last entry."""
    payload = os.urandom(entry_bytes)
    acks = min(2, copies)
    with client.create_ledger(copies, copies, acks) as writer:
        for _ in range(size // entry_bytes):
            last = writer.append_async(payload)
        end = last.result()
    return writer.ledger_id, end


def _segments(folder: Path) -> list[Path]:
    return [path for path in (folder / "journal").rglob("*") if path.is_file()]
