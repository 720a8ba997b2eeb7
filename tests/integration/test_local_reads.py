"""Large entries read from the files of real bookies on this host: while those work on them, with
damage, and when a bookie dies."""

import os
import signal
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

import pytest

from spark_ledger import LedgerClient
from spark_ledger.bookies import local_reads
from spark_ledger.config import ClientConfig
from spark_ledger.local import LocalCluster
from spark_ledger.process import background_loop, connect, ledger_store
from tests.integration.damage import files, flip_in_the_entry_log, in_limbo
from tests.kit.processes import eventually

KIB, MIB = 1 << 10, 1 << 20
FLUSHED: dict[str, object] = {
    "flush_interval_s": 0.2,
    "read_cache_bytes": 0,  # of an entry in it a bookie gives the bytes, no location
}
RECLAIMING: dict[str, object] = {
    **FLUSHED,
    "large_entry_bytes": 0,  # ledgers share logs
    "entry_log_bytes_max": 2 * MIB,
    "tombstone_sweep_s": 0.7,
    "gc_interval_s": 0.3,
    "minor_compaction_share": 0.8,
    "minor_compaction_s": 0.5,
    "major_compaction_share": 0.95,
    "major_compaction_s": 1.1,
}
PATIENT = ClientConfig(read_request_bytes=200_000, read_ahead_bytes=400_000)
"""One that has much to ask while something happens."""


@dataclass
class Reads:
    """What was read of the bookies' files: payload and header of each entry, and the rest."""

    count: int = 0
    bytes: int = 0
    meanwhile: list[Callable[[], None]] = field(default_factory=list)
    """Each is done once, before one of the next reads."""
    lock: threading.Lock = field(default_factory=threading.Lock)


@pytest.fixture(scope="module")
def flushed() -> Iterator[LocalCluster]:
    """Three bookies that run, whose entries are soon in logs."""
    with LocalCluster(bookies=3, bookie_settings=FLUSHED, autorecovery=False) as cluster:
        yield cluster


@pytest.fixture
def reads(monkeypatch) -> Reads:
    found, pread = Reads(), os.pread

    def counted(file, length, position):
        if length < 64 * KIB:  # which bookie's directory it is
            return pread(file, length, position)
        with found.lock:
            if found.meanwhile:
                found.meanwhile.pop()()
        result = pread(file, length, position)
        with found.lock:
            found.count += 1
            found.bytes += length
        return result

    monkeypatch.setattr(local_reads.os, "pread", counted)
    return found


def payloads(count: int, size: int) -> list[bytes]:
    return [(b"%06d " % number * (size // 7 + 1))[:size] for number in range(count)]


def write(client: LedgerClient, *written: list[bytes], write_quorum: int = 3) -> list[int]:
    """Closed ledgers, written at once; ensemble of three."""
    writers = [client.create_ledger(3, write_quorum, 2) for _ in written]
    for some in zip(*written, strict=True):
        pairs = zip(writers, some, strict=True)
        for future in [writer.append_async(payload) for writer, payload in pairs]:
            future.result()
    for writer in writers:
        writer.close()
    return [writer.ledger_id for writer in writers]


def read_through(
    cluster: LocalCluster,
    ledger_id: int,
    count: int,
    config: ClientConfig | None = None,
) -> list[bytes]:
    """The payloads, as a client of its own reads them."""

    async def read() -> list[bytes]:
        store = await connect(cluster.service_url, config)
        try:
            reader = await store.open(ledger_id, recover=False)
            runs = reader.read_entries(range(count))
            return [bytes(entry.payload) async for run in runs for entry in run]
        finally:
            await store.close()

    return background_loop().run(read())


def lies_in_logs(cluster: LocalCluster, ledger_id: int, count: int) -> bool:
    """Whether every bookie gives the locations of all of them that it has."""

    bookies = ledger_store(cluster.service_url).cluster.bookies

    async def ask() -> bool:
        found = []
        for bookie in cluster.bookies:
            answer = await bookies.read(
                *(bookie.id, ledger_id, 0, count - 1), max_bytes=1 << 30, locations={}
            )
            there = [result for result in answer.results if result.status == 0]
            found.append(all(result.checked is not None for result in there))
        return all(found)

    return background_loop().run(ask())


@pytest.mark.parametrize(("count", "size"), [(40, 64 * KIB), (6, MIB)])
@pytest.mark.parametrize("write_quorum", [2, 3])
def test_large_entries_are_read_from_files_as_they_come_from_bookies(
    flushed, reads, count, size, write_quorum
):
    cluster = flushed
    written = payloads(count, size)
    with LedgerClient(cluster.service_url) as client:
        (ledger_id,) = write(client, written, write_quorum=write_quorum)

    def from_files() -> bool:
        reads.count = reads.bytes = 0
        assert read_through(cluster, ledger_id, count) == written
        return reads.bytes >= count * size

    assert eventually(from_files), "the third copy of the last ones may come after the close"
    assert reads.count < count * size / MIB + 3, "neighbours are read at once"
    reads.count = 0
    assert read_through(cluster, ledger_id, count, ClientConfig(local_reads=False)) == written
    assert reads.count == 0


def test_a_damaged_entry_comes_from_another_bookie_and_its_own_learns_of_it(fresh_cluster, reads):
    settings = {**FLUSHED, "limbo_check_s": 600, "refresh_s": 600}
    cluster = fresh_cluster(bookies=3, bookie_settings=settings)
    written = payloads(10, 64 * KIB)
    with LedgerClient(cluster.service_url) as client:
        (ledger_id,) = write(client, written)
    assert eventually(lambda: lies_in_logs(cluster, ledger_id, 10))
    assert in_limbo(cluster) == {}
    for bookie, payload in zip(cluster.bookies, written[5:8], strict=True):
        flip_in_the_entry_log(bookie, payload)  # one of them serves them all
    assert read_through(cluster, ledger_id, 10) == written
    assert reads.count > 0
    assert eventually(lambda: list(in_limbo(cluster)) == [ledger_id])


def test_entries_are_read_from_files_while_others_go_and_their_logs_are_compacted(
    fresh_cluster, reads
):
    cluster = fresh_cluster(bookies=3, bookie_settings=RECLAIMING)
    written = [payloads(40, 64 * KIB) for _ in range(3)]
    with LedgerClient(cluster.service_url) as client:
        kept, *others = write(client, *written)
        assert eventually(lambda: lies_in_logs(cluster, kept, 40))
        before = {path for bookie in cluster.bookies for path in files(bookie, "entrylog/*.log")}
        for ledger_id in others:
            client.delete_ledger(ledger_id)
            assert read_through(cluster, kept, 40) == written[0]

        def compacted() -> bool:
            assert read_through(cluster, kept, 40, PATIENT) == written[0]
            return sum(path.exists() for path in before) <= len(before) // 2

        def come_from_files() -> bool:
            reads.bytes = 0
            assert read_through(cluster, kept, 40) == written[0]
            return reads.bytes >= 40 * 64 * KIB

        assert eventually(compacted)
        assert eventually(come_from_files), "where they lie now, unless a log just goes"


def test_a_bookie_killed_while_its_files_are_read_costs_nothing_nor_does_its_restart(
    flushed, reads
):
    cluster = flushed
    written = payloads(60, 64 * KIB)
    with LedgerClient(cluster.service_url) as client:
        (ledger_id,) = write(client, written)
    assert eventually(lambda: lies_in_logs(cluster, ledger_id, 60))
    for bookie in cluster.bookies[:2]:
        reads.meanwhile = [lambda b=bookie: b.signal(signal.SIGKILL), lambda: None, lambda: None]
        assert read_through(cluster, ledger_id, 60, PATIENT) == written
        assert reads.meanwhile == []
        assert eventually(lambda b=bookie: not b.running)
        assert read_through(cluster, ledger_id, 60, PATIENT) == written
        bookie.start()
    assert eventually(lambda: lies_in_logs(cluster, ledger_id, 60))
    reads.bytes = 0
    assert read_through(cluster, ledger_id, 60) == written
    assert reads.bytes >= 60 * 64 * KIB


def test_a_bookie_that_hangs_is_not_waited_for_because_its_files_are_here(flushed, reads):
    cluster = flushed
    written = payloads(20, 64 * KIB)
    with LedgerClient(cluster.service_url) as client:
        (ledger_id,) = write(client, written)
    assert eventually(lambda: lies_in_logs(cluster, ledger_id, 20))
    hung = cluster.bookies[2]
    hung.signal(signal.SIGSTOP)
    try:
        reads.bytes = 0
        for _ in cluster.bookies:
            assert read_through(cluster, ledger_id, 20) == written
        assert reads.bytes >= 20 * 64 * KIB
    finally:
        hung.signal(signal.SIGCONT)
