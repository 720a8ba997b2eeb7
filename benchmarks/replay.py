"""What a restart costs: replaying a journal or direct logs; and one flush of a full half of the
write cache.

    python benchmarks/replay.py [--bytes 1073741824] [--entry 1024] [--ledgers 1] [--profile F]
    python benchmarks/replay.py --placed --entry 65536
    python benchmarks/replay.py --flush [--entry 1024]
    python benchmarks/replay.py --rebuild [--bytes 536870912] [--entry 65536] [--ledgers 20]

A journal of `bytes` of entries is written by the real Journal to a real disk; nothing of it is
flushed. A process of its own then opens the engine on it as a killed bookie does: seconds,
CPU-seconds of all its threads, and the most memory it held (VmHWM). The entries are in the journal
whatever their size; with `--placed` they are in direct logs, as large ones of a bookie are, whose
marks in the index are where they begin, and the journal has the ledgers' records alone. `--flush`
puts 48 MiB of entries into the engine instead and flushes them, five times; medians. `--rebuild`
makes the index of that many bytes in direct logs anew, five times; medians. `--profile`
writes what cProfile saw of the event loop's thread.
"""

import argparse
import asyncio
import cProfile
import gc
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Coroutine, Iterator
from pathlib import Path
from typing import Any, NamedTuple

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks.processes import most_memory_mib
from bookie_server.__main__ import GARBAGE_OBJECTS
from bookie_server.__main__ import _keep_the_heap_small as keep_the_heap_small
from bookie_server.api.entry import EntryHeader, pack_header, payload_crc
from bookie_server.config import StorageConfig
from bookie_server.disk.os_disk import OsDisk
from bookie_server.journal.format import Position, Record, RecordKind, body_crc
from bookie_server.journal.writer import FOLDER, Journal
from bookie_server.logs.direct_log import DirectLog
from bookie_server.logs.entry_log import EntryLogs
from bookie_server.logs.index import EVERY_LEDGER, LedgerState, encode_ledger_state
from bookie_server.logs.rebuild import rebuild
from bookie_server.logs.rocks_index import RocksIndex
from bookie_server.start.replay import open_storage
from bookie_server.storage.directories import Directories, JournalDirectory, LedgerDirectory

MIB = 1 << 20
GIB = 1 << 30
FLUSHED_BYTES, FLUSHES, REBUILDS = 48 * MIB, 5, 5
FRAME_BYTES = 256 << 10
"""What is appended at once, as frames of a client's lane are."""
HOME = "ledger-1"


class Cost(NamedTuple):
    """Of one restart or flush."""

    seconds: float
    cpu_s: float
    memory_mib: float


def replay_cost(
    size: int = GIB,
    entry_bytes: int = 1 << 10,
    ledgers: int = 1,
    profile: str = "",
    *,
    placed: bool = False,
) -> Cost:
    """Of opening the engine on a journal, or direct logs, of `size` bytes of entries with such
    payloads."""
    with tempfile.TemporaryDirectory(dir=os.environ.get("TMPDIR", "/var/tmp")) as folder:
        asyncio.run(write_entries(Path(folder), size, entry_bytes, ledgers, placed=placed))
        command = [sys.executable, __file__, "--open", folder, "--profile", profile]
        shown = subprocess.run(command, check=True, stdout=subprocess.PIPE).stdout
        return Cost(*map(float, shown.split()))


def flush_cost(entry_bytes: int = 1 << 10) -> Cost:
    """Of the flush of 48 MiB of entries: medians."""
    with tempfile.TemporaryDirectory(dir=os.environ.get("TMPDIR", "/var/tmp")) as folder:
        costs = asyncio.run(_flushes(Path(folder), entry_bytes))
    return _medians(costs)


def rebuild_cost(size: int, entry_bytes: int, ledgers: int) -> Cost:
    """Of making the index of `size` bytes of entries anew: medians."""
    with tempfile.TemporaryDirectory(dir=os.environ.get("TMPDIR", "/var/tmp")) as folder:
        costs = asyncio.run(_rebuilds(Path(folder), size, entry_bytes, ledgers))
    return _medians(costs)


def _medians(costs: list[Cost]) -> Cost:
    return Cost(
        statistics.median(each.seconds for each in costs),
        statistics.median(each.cpu_s for each in costs),
        costs[-1].memory_mib,
    )


# -- writing ----------------------------------------------------------------------------------


async def write_entries(
    folder: Path, size: int, entry_bytes: int, ledgers: int, *, placed: bool
) -> None:
    disk, ledger_disk = OsDisk(folder / "journal", "journal"), OsDisk(folder / "ledger", "ledger")
    logs = await EntryLogs.open(ledger_disk, StorageConfig())
    index = await RocksIndex.open(folder / "ledger" / "index")
    await index.put_ledgers([LedgerState(EVERY_LEDGER)])  # this is no first start
    await index.sync()
    log = DirectLog(ledger_disk, logs, index, StorageConfig())
    await disk.make_folder(FOLDER)
    journal = await Journal.open(disk, StorageConfig(), 1, Position(0, 0))
    for ledger_id in range(ledgers):
        body = encode_ledger_state(LedgerState(ledger_id, directories=(HOME,)))
        journal.append([Record(RecordKind.LEDGER, ledger_id, -1, body, body_crc(body))])
    await journal.append([])
    written = log if placed else journal
    for records in _frames(size, entry_bytes, ledgers):
        done = _place(log, records) if placed else journal.append(records)
        if written.pending_bytes >= 2 * StorageConfig().journal_batch_bytes_max:
            await done
    await done
    log.abandon()
    journal.abandon()
    await asyncio.sleep(0)
    await index.close()
    disk.shut_down()
    ledger_disk.shut_down()


def _place(log: DirectLog, records: list[Record]) -> "asyncio.Future[Any]":
    entries = [(record.ledger_id, record.entry_id, record.body) for record in records]
    return log.put(records[0].ledger_id, entries)


def _frames(size: int, entry_bytes: int, ledgers: int) -> Iterator[list[Record]]:
    """Frames of the ledgers in turn; each is bytes of its own, the entries are views into it."""
    per_frame = max(1, FRAME_BYTES // entry_bytes)
    next_ids = dict.fromkeys(range(ledgers), 0)
    for number in range(-(-size // (per_frame * entry_bytes))):
        ledger_id = number % ledgers
        first = next_ids[ledger_id]
        next_ids[ledger_id] += per_frame
        yield _frame(ledger_id, range(first, first + per_frame), entry_bytes)


def _frame(ledger_id: int, entry_ids: range, entry_bytes: int) -> list[Record]:
    payload = os.urandom(entry_bytes)
    crc = payload_crc([payload])
    parts = []
    for entry_id in entry_ids:
        so_far = (entry_id + 1) * entry_bytes
        header = EntryHeader(ledger_id, entry_id, -1, so_far, entry_id + 1, entry_bytes, crc)
        parts += (pack_header(header), payload)
    frame, length = memoryview(b"".join(parts)), 64 + entry_bytes
    starts = zip(entry_ids, range(0, len(frame), length), strict=True)
    return [
        Record(RecordKind.ENTRY, ledger_id, e, frame[at : at + length], crc) for e, at in starts
    ]


# -- opening ----------------------------------------------------------------------------------


async def _directories(folder: Path) -> Directories:
    journal = JournalDirectory("journal-1", OsDisk(folder / "journal", "journal"))
    index = await RocksIndex.open(folder / "ledger" / "index")
    ledger = LedgerDirectory(HOME, OsDisk(folder / "ledger", "ledger"), index)
    return Directories([journal], [ledger])


async def _open(folder: Path) -> Cost:
    directories = await _directories(folder)
    began, cpu = time.monotonic(), time.process_time()
    engine = await open_storage(directories, StorageConfig())
    cost = Cost(time.monotonic() - began, time.process_time() - cpu, most_memory_mib(os.getpid()))
    await engine.close()
    return cost


async def _flushes(folder: Path, entry_bytes: int) -> list[Cost]:
    directories = await _directories(folder)
    engine = await open_storage(directories, StorageConfig(write_cache_bytes=4 * FLUSHED_BYTES))
    engine.set_state(LedgerState(0))
    frames = _frames(FLUSHES * FLUSHED_BYTES, entry_bytes, 1)
    costs = []
    for _ in range(FLUSHES):
        for _ in range(FLUSHED_BYTES // max(entry_bytes, FRAME_BYTES)):
            records = next(frames)
            engine.put_all(0, {record.entry_id: record.body for record in records})
        began, cpu = time.monotonic(), time.process_time()
        await engine.flush()
        costs.append(
            Cost(time.monotonic() - began, time.process_time() - cpu, most_memory_mib(os.getpid()))
        )
    await engine.close()
    return costs


def _profiled(work: Coroutine[Any, Any, Cost], path: str) -> Cost:
    if not path:
        return asyncio.run(work)
    profile = cProfile.Profile()
    cost = profile.runcall(asyncio.run, work)
    profile.dump_stats(path)
    return cost


async def _rebuilds(folder: Path, size: int, entry_bytes: int, ledgers: int) -> list[Cost]:
    await write_entries(folder, size, entry_bytes, ledgers, placed=True)
    home = folder / "ledger"
    disk, costs = OsDisk(home, "ledger"), []
    for _ in range(REBUILDS):
        shutil.rmtree(home / "index")
        began_s, own_s = time.monotonic(), time.process_time()
        made = await rebuild(disk, "d", lambda name: RocksIndex.open(home / name), StorageConfig())
        took_s, own_s = time.monotonic() - began_s, time.process_time() - own_s
        costs.append(Cost(took_s, own_s, most_memory_mib(os.getpid())))
        assert made.entries >= size // entry_bytes and not made.damaged
    disk.shut_down()
    return costs


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--bytes", type=int, default=GIB)
    parser.add_argument("--entry", type=int, default=1 << 10)
    parser.add_argument("--ledgers", type=int, default=1)
    parser.add_argument("--profile", default="")
    parser.add_argument("--placed", action="store_true")
    parser.add_argument("--flush", action="store_true")
    parser.add_argument("--rebuild", action="store_true")
    parser.add_argument("--open", default="", help=argparse.SUPPRESS)
    options = parser.parse_args()
    keep_the_heap_small()
    gc.set_threshold(GARBAGE_OBJECTS)
    if options.open:
        print(*_profiled(_open(Path(options.open)), options.profile))
        return
    if options.flush:
        cost, count = flush_cost(options.entry), FLUSHED_BYTES // options.entry
    elif options.rebuild:
        cost = rebuild_cost(options.bytes, options.entry, options.ledgers)
        count = options.bytes // options.entry
    else:
        cost = replay_cost(
            options.bytes,
            options.entry,
            options.ledgers,
            options.profile,
            placed=options.placed,
        )
        count = options.bytes // options.entry
    print(
        f"{cost.seconds:.2f} s, CPU {cost.cpu_s:.2f} s ({cost.cpu_s / count * 1e6:.1f} us an"
        f" entry), VmHWM {cost.memory_mib:.0f} MiB"
    )


if __name__ == "__main__":
    main()
