"""Runs one bookie: `python -m bookie_server [--config FILE] [--set KEY=VALUE ...]`.

Always true: it serves first and registers last; it says so with one line of JSON on standard
output ({"bookie_id": ..., "address": ...}) and writes nothing else there. SIGTERM and SIGINT undo
that in the opposite order: deregister, drain, flush, seal. Exit status:

    0  stopped          2  a setting is wrong            3  the metadata store is not there
    4  cannot listen    5  the parent is gone            6  a disk failed
    7  the disks belong to another cluster               8  the disks are no bookie's, or in use
"""

import argparse
import asyncio
import contextlib
import ctypes
import fcntl
import json
import logging
import os
import signal
import sys
import threading
import time
import uuid
from pathlib import Path

from bookie_server import identity as identities
from bookie_server.api.settings import BadSettings, load, parse_overrides
from bookie_server.bookie import Bookie
from bookie_server.config import BookieConfig, advertised_address
from bookie_server.disk import DiskFailed
from bookie_server.identity import BadIdentity, Identity
from bookie_server.journal import JournalFailed
from bookie_server.os_disk import OsDisk
from bookie_server.registration import Registration, Standing
from bookie_server.rocks_index import RocksIndex
from bookie_server.service import BookieService, CannotListen
from spark_ledger.errors import BadConfig, Unavailable
from spark_ledger.metadata import cluster
from spark_ledger.metadata.store import MetadataStore, StoreError
from spark_ledger.metadata.zookeeper import connect

STOPPED, BAD_CONFIG, NO_METADATA, CANNOT_LISTEN, ORPHANED = 0, 2, 3, 4, 5
DISK_FAILED, WRONG_CLUSTER, BAD_DISKS = 6, 7, 8
M_TRIM_THRESHOLD, M_MMAP_THRESHOLD, M_ARENA_MAX = -1, -3, -8
log = logging.getLogger("bookie_server")


class WrongCluster(Exception):
    """The disks belong to another cluster than the one at the service URL."""


_STATUS: tuple[tuple[type[Exception], int], ...] = (
    (BadConfig, BAD_CONFIG),
    (Unavailable, NO_METADATA),
    (StoreError, NO_METADATA),
    (CannotListen, CANNOT_LISTEN),
    (DiskFailed, DISK_FAILED),
    (JournalFailed, DISK_FAILED),
    (WrongCluster, WRONG_CLUSTER),
    (BadIdentity, BAD_DISKS),
)


def main() -> None:
    arguments = _parser().parse_args()
    try:
        config = load(BookieConfig, arguments.config, parse_overrides(arguments.set))
    except BadSettings as error:
        _exit(BAD_CONFIG, str(BadConfig(str(error))))
    logging.basicConfig(level=config.log_level, format="%(asctime)s %(levelname)s %(message)s")
    if arguments.parent_pipe:
        threading.Thread(target=_watch_parent, name="parent-watch", daemon=True).start()
    _keep_the_heap_small()
    try:
        asyncio.run(_run(config))
    except tuple(kind for kind, _ in _STATUS) as error:
        _exit(next(status for kind, status in _STATUS if isinstance(error, kind)), str(error))
    _exit(STOPPED, "stopped")


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser("bookie_server", description="One storage node.")
    parser.add_argument("--config", type=Path, help="settings, as in conf/bookie.toml")
    parser.add_argument(
        "--set", action="append", default=[], metavar="KEY=VALUE", help="overrides the file"
    )
    parser.add_argument(
        "--parent-pipe", action="store_true", help="end when standard input is closed"
    )
    return parser


async def _run(config: BookieConfig) -> None:
    """Start, serve until told to stop, stop. Raises what `_STATUS` names."""
    stop = _stop_signal()
    journal = _disk(config.journal_directory, "journal")
    ledgers = _disk(config.ledger_directory, "ledger")
    _lock(Path(config.journal_directory), Path(config.ledger_directory))
    async with contextlib.AsyncExitStack() as closing:
        store = await connect(
            config.service_url,
            session_timeout_s=config.session_timeout_s,
            connect_timeout_s=config.connect_timeout_s,
        )
        closing.push_async_callback(store.close)
        disks = (("journal_directory", journal), ("ledger_directory", ledgers))
        identity = await _identify(disks, store)
        index = await RocksIndex.open(Path(config.ledger_directory) / "index")
        bookie = await Bookie.start(
            *(identity.bookie_id, journal, ledgers, index, store, config.storage()),
            cluster_id=identity.cluster_id,
        )
        await _serve(config, bookie, ledgers, store, stop)


def _disk(directory: str, name: str) -> OsDisk:
    try:
        return OsDisk(Path(directory), name)
    except OSError as error:
        raise BadConfig(f"{name}_directory {directory} cannot be used: {error.strerror}") from error


async def _serve(
    config: BookieConfig, bookie: Bookie, disk: OsDisk, store: MetadataStore, stop: asyncio.Event
) -> None:
    service = BookieService(bookie, config.message_bytes_max)
    address = advertised_address(config, await service.start(config.listen))

    async def standing() -> Standing:
        free, total = await disk.free_bytes(), await disk.total_bytes()
        return Standing(free, total, bookie.readonly_reason)

    registration = Registration(
        store, bookie.bookie_id, address, config.rack, standing, config.refresh_s
    )
    await registration.start(first_seen_ms=time.time_ns() // 1_000_000)
    _say_ready(bookie.bookie_id, address)
    try:
        await _until_stopped_or_failed(stop, bookie)
    finally:
        await registration.stop()
    await service.stop(config.drain_timeout_s)
    await bookie.stop()


async def _until_stopped_or_failed(stop: asyncio.Event, bookie: Bookie) -> None:
    """Returns when told to stop; raises DiskFailed when the storage did: nothing more is kept."""
    bookie.failed.add_done_callback(lambda _: stop.set())
    await stop.wait()
    if bookie.failed.done():
        raise DiskFailed(f"the storage failed: {bookie.failed.exception()!r}")


async def _identify(disks: tuple[tuple[str, OsDisk], ...], store: MetadataStore) -> Identity:
    """Who we are; disks without anything on them are formatted for the cluster at the store."""
    identity = await identities.read(disks)
    if identity is None:
        found = await cluster.ensure(store, str(uuid.uuid4()))
        identity = Identity(str(uuid.uuid4()), found.cluster_id)
        log.info("formatting the disks of new bookie %s", identity.bookie_id)
    else:
        existing = await cluster.read(store)
        if existing is None or existing.cluster_id != identity.cluster_id:
            theirs = f"cluster {existing.cluster_id}" if existing else "no cluster"
            raise WrongCluster(
                f"the disks of bookie {identity.bookie_id} belong to cluster "
                f"{identity.cluster_id}, and at the service URL is {theirs}"
            )
    await identities.write(disks, identity)
    return identity


def _say_ready(bookie_id: str, address: str) -> None:
    log.info("bookie %s serves at %s and is registered", bookie_id, address)
    print(json.dumps({"bookie_id": bookie_id, "address": address}), flush=True)


def _stop_signal() -> asyncio.Event:
    stop = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, stop.set)
    return stop


def _lock(*directories: Path) -> None:
    """One process per disk; the lock goes with the process. Raises BadIdentity."""
    for directory in dict.fromkeys(directories):
        fd = os.open(directory / identities.LOCK_FILE, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC)
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            raise BadIdentity(f"another bookie is running on {directory}") from None


def _watch_parent() -> None:
    """What is acknowledged is in the journal, so there is nothing to say goodbye to."""
    while os.read(sys.stdin.fileno(), 4096):
        pass
    _exit(ORPHANED, "the parent is gone")


def _keep_the_heap_small() -> None:
    """glibc keeps an arena per thread and lets freed megabytes lie: bound both (Linux only)."""
    with contextlib.suppress(OSError, AttributeError):
        libc = ctypes.CDLL("libc.so.6")
        libc.mallopt(M_ARENA_MAX, 2)
        libc.mallopt(M_MMAP_THRESHOLD, 4 << 20)
        libc.mallopt(M_TRIM_THRESHOLD, 8 << 20)


def _exit(status: int, why: str) -> None:
    """Leave at once, whatever threads are still at work: what counts has been synced."""
    with contextlib.suppress(OSError):  # the log may be on the disk that failed
        if status != STOPPED:
            print(f"bookie_server: {why}", file=sys.stderr)
        sys.stderr.flush()
        logging.shutdown()
    os._exit(status)


if __name__ == "__main__":
    main()
