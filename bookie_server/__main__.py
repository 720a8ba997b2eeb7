"""Runs one bookie: `python -m bookie_server [--config FILE] [--set KEY=VALUE ...]`.

Always true: the process binds its ports before it writes anything, and registers last. Then it
writes one line of JSON on standard output ({"bookie_id": ..., "address": ..., "frames": ...}: where
it serves gRPC and frames), and nothing else there.
After SIGTERM or SIGINT it deregisters, drains, flushes and seals. If the exit status is not 0, one
line on standard error has the error and the remedy; a failed start never has status 0 (BK#4815).
The process does not wait for its threads at its end: all acknowledged data is synced. Exit status:

    0  stopped          2  a setting is wrong            3  the metadata store is unreachable
    4  cannot listen    5  the parent is gone            6  a disk failed
    7  the disks belong to another cluster or another bookie, or journal and ledger directories are
       swapped, or the disks are a copy of the disks of a bookie that runs
    8  the disks are in use, or damaged, or hold files that no bookie wrote
    9  a second signal to stop came: the process ended at once; the next start replays the journal
    1  a defect of ours; the log has the traceback

The bookie also hosts the process of autorecovery, which repairs ledgers and does the upkeep of
topics; adds never wait for it. Always true of that process: at most one runs at a time, and only
inside of `hosting_autorecovery`; it ends with the bookie, however the bookie ends, as it holds the
reading end of a pipe; when it ends by itself it is started again, each time after a longer pause.
"""

import argparse
import asyncio
import contextlib
import ctypes
import gc
import json
import logging
import os
import secrets
import signal
import sys
import threading
import time
import uuid
from collections.abc import AsyncIterator, Callable, Sequence
from functools import partial
from pathlib import Path
from typing import NoReturn

from bookie_server.api.settings import BadSettings, load, parse_overrides
from bookie_server.bookie import Bookie
from bookie_server.config import (
    BookieConfig,
    advertised_address,
    advertised_frames,
    frames_listen,
)
from bookie_server.disk.identity import BadIdentity, Identity, WrongDisks
from bookie_server.disk.interface import DiskFailed
from bookie_server.disk.monitor import (
    degraded_reason,
    total_space,
)
from bookie_server.journal.writer import JournalFailed
from bookie_server.ledgers.lineage import Lineage
from bookie_server.serve.frames import FrameService
from bookie_server.serve.gateway import BookieService, CannotListen
from bookie_server.serve.registration import (
    Registration,
    RegistrationState,
    refuse_beside_twin,
    stored_at,
    who_is,
)
from bookie_server.serve.twin import TwinWatch
from bookie_server.start.opening import BadLayout, BookieDirectories
from spark_ledger.async_tasks import cancel
from spark_ledger.errors import BadConfig, Unavailable
from spark_ledger.metadata import autorecovery, cluster, paths
from spark_ledger.metadata.store import MetadataStore, NoNode, StoreError
from spark_ledger.metadata.zookeeper import connect
from spark_ledger.net import raise_descriptor_limit

GARBAGE_OBJECTS = 50_000  # a bookie makes few cycles; by default the search took 1/10 of its time
M_TRIM_THRESHOLD, M_MMAP_THRESHOLD, M_ARENA_MAX = -1, -3, -8
HEAP_KEPT_BYTES = 64 << 20  # free bytes kept at the end of the heap; more goes to the kernel
STOPPED, DEFECT, BAD_CONFIG, NO_METADATA, CANNOT_LISTEN, ORPHANED = 0, 1, 2, 3, 4, 5
DISK_FAILED, WRONG_DISKS, BAD_DISKS, SECOND_SIGNAL = 6, 7, 8, 9
FILES_OF_A_DIRECTORY = 512  # descriptors for its index and its entry logs
PAUSE_S, PAUSE_MAX_S = 1.0, 60.0  # between two processes of autorecovery
STEADY_S = 60.0  # a process of autorecovery that ran so long begins with the first pause again
AUTORECOVERY_STOP_S = 5.0
log = logging.getLogger("bookie_server")

_STATUS: tuple[tuple[type[Exception], int], ...] = (
    (BadConfig, BAD_CONFIG),
    (BadLayout, BAD_CONFIG),
    (Unavailable, NO_METADATA),
    (StoreError, NO_METADATA),
    (CannotListen, CANNOT_LISTEN),
    (DiskFailed, DISK_FAILED),
    (JournalFailed, DISK_FAILED),
    (WrongDisks, WRONG_DISKS),
    (BadIdentity, BAD_DISKS),
)


def main() -> None:
    arguments = parse_arguments()
    try:
        config = load(BookieConfig, arguments.config, parse_overrides(arguments.set))
    except BadSettings as error:
        end_process(BAD_CONFIG, str(BadConfig(str(error))))
    logging.basicConfig(level=config.log_level, format="%(asctime)s %(levelname)s %(message)s")
    if arguments.parent_pipe:
        threading.Thread(target=_watch_parent, name="parent-watch", daemon=True).start()
    raise_descriptor_limit()
    _keep_the_heap_small()
    gc.set_threshold(GARBAGE_OBJECTS)
    try:
        asyncio.run(_rebuild(config, arguments.force) if arguments.rebuild_index else _run(config))
    except tuple(kind for kind, _ in _STATUS) as error:
        end_process(next(status for kind, status in _STATUS if isinstance(error, kind)), str(error))
    except Exception as error:
        log.exception("a defect")
        end_process(DEFECT, f"a defect, please report it: {error!r}")
    end_process(STOPPED, "stopped")


def parse_arguments(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """Parse the given arguments, or the process' own. Wrong arguments end the process with
    BAD_CONFIG."""
    parser = argparse.ArgumentParser("bookie_server", description="One storage node.")
    parser.add_argument("--config", type=Path, help="settings, as in conf/bookie.toml")
    parser.add_argument(
        "--set", action="append", default=[], metavar="KEY=VALUE", help="overrides the file"
    )
    parser.add_argument(
        "--parent-pipe", action="store_true", help="end when standard input is closed"
    )
    parser.add_argument(
        "--rebuild-index",
        action="store_true",
        help="rebuild from the entry logs each index that cannot be opened, and end. If no other"
        " index of the bookie has the states of its ledgers, the states are lost: then all ledgers"
        " are in limbo, and the bookie read-only, until the ledgers were compared with their copies"
        " on other bookies",
    )
    parser.add_argument(
        "--force",
        action="store_true",
        help="with --rebuild-index: also when every index can be opened",
    )
    parsed = parser.parse_args(arguments)
    if parsed.force and not parsed.rebuild_index:
        parser.error("--force is for --rebuild-index, which is not given")
    return parsed


async def _rebuild(config: BookieConfig, force: bool) -> None:
    """Raises the exceptions of `_STATUS`."""
    disks = BookieDirectories(config)
    if await disks.identity() is None:
        raise BadIdentity("the directories hold no entry logs to make an index from")
    if not force and not await disks.broken_indexes():
        raise BadConfig(
            "every index can be opened, so no index needs to be made anew",
            "Start the bookie without --rebuild-index; --force makes all of them anew.",
        )
    await disks.rebuild_indexes(config)


async def _run(config: BookieConfig) -> None:
    """Start, serve until a signal to stop, stop. Raises the exceptions of `_STATUS`."""
    stop = _Stop()
    disks = BookieDirectories(config)
    async with contextlib.AsyncExitStack() as closing:
        service = BookieService(None, config.message_bytes_max)
        port = await service.start(config.listen)
        files = FILES_OF_A_DIRECTORY * len(config.directories("ledger"))
        frames = FrameService(None, config.message_bytes_max, files)
        frames_at = advertised_frames(config, await frames.start(frames_listen(config)))
        await disks.test()
        store = await connect(
            config.service_url,
            session_timeout_s=config.session_timeout_s,
            connect_timeout_s=config.connect_timeout_s,
        )
        closing.push_async_callback(store.close)
        identity = await _identify(disks, store)
        lineage = await Lineage.open(store, identity.bookie_id, identity.cluster_id, disks.disks)
        await lineage.look()
        address = advertised_address(config, port)
        await refuse_beside_twin(store, identity.bookie_id, address, who_is)
        credential = await autorecovery.repair_credential(store, secrets.token_hex(32))
        await disks.make_space(config)
        twin = await TwinWatch.open(store, identity.bookie_id, disks.disks)
        has_foreign_token = await twin.begin()
        bookie = await Bookie.start(
            *(identity.bookie_id, await disks.open(), store, config),
            cluster_id=identity.cluster_id,
            repair_credential=credential.encode(),
            ask=partial(stored_at, store),
        )
        if has_foreign_token:
            log.error("another process served as this bookie since its last start: all is in limbo")
            await bookie.put_all_in_limbo()
        lineage.attach(bookie.storage, bookie.ledgers)
        bookie.phase = "starting"
        service.serve(bookie)
        frames.serve(bookie)
        registration = _registration(config, bookie, store, address, frames_at, lineage)
        closing.push_async_callback(cancel, asyncio.create_task(lineage.run(), name="lineage"))
        bookie.run_in_background(twin.run(partial(bookie.put_all_in_limbo, until_restart=True)))
        async with hosting_autorecovery(config.service_url, enabled=config.autorecovery):
            await _serve(bookie, (service, frames), registration, stop, config.drain_timeout_s)


def _registration(
    config: BookieConfig,
    bookie: Bookie,
    store: MetadataStore,
    address: str,
    frames_at: str,
    lineage: Lineage,
) -> Registration:
    async def read_state() -> RegistrationState:
        await read_is_drained(bookie, store, lambda: registration.publish_soon())
        directories = bookie.disks.states
        return RegistrationState(
            *total_space(directories), bookie.readonly_reason, degraded_reason(directories)
        )

    registration = Registration(
        *(store, bookie.bookie_id, address, frames_at, config.rack, read_state, config.refresh_s),
        lineage.may_register,
    )
    lineage.listeners.append(registration.publish_soon)
    return registration


async def read_is_drained(
    bookie: Bookie, store: MetadataStore, changed: Callable[[], None]
) -> None:
    """Set `bookie.is_drained`. The store calls `changed` when the caller should read again. Raises
    StoreError."""
    try:
        await store.get(paths.draining(bookie.bookie_id), changed)
        bookie.is_drained = True
    except NoNode:
        bookie.is_drained = False


async def _serve(
    bookie: Bookie,
    services: tuple[BookieService, FrameService],
    registration: Registration,
    stop: "_Stop",
    drain_timeout_s: float,
) -> None:
    """Register, go on until a signal to stop, stop."""
    bookie.disks.listeners.append(registration.publish_soon)
    stop.is_serving = True
    await registration.start(first_seen_ms=time.time_ns() // 1_000_000)
    bookie.phase = ""
    served = {"address": registration.address, "frames": registration.frames}
    is_registered = "is registered" if registration.is_registered else "waits to register"
    text = "bookie %s %s; it serves gRPC at %s, frames at %s"
    log.info(text, bookie.bookie_id, is_registered, *served.values())
    print(json.dumps({"bookie_id": bookie.bookie_id, **served}), flush=True)
    try:
        await _until_stopped_or_failed(stop, bookie)
    finally:
        bookie.phase = "draining"
        await registration.stop()
    bookie.drain()
    await asyncio.gather(*(service.stop(drain_timeout_s) for service in services))
    await bookie.stop()


async def _until_stopped_or_failed(stop: "_Stop", bookie: Bookie) -> None:
    """Returns at a signal to stop. Raises DiskFailed when a disk ended the storage; a defect that
    ended the storage is raised unchanged."""
    bookie.failed.add_done_callback(lambda _: stop.requested.set())
    await stop.requested.wait()
    if bookie.failed.done() and (error := bookie.failed.exception()) is not None:
        if isinstance(error, DiskFailed | JournalFailed):
            raise DiskFailed(f"the storage failed: {error}") from error
        raise error


async def _identify(disks: BookieDirectories, store: MetadataStore) -> Identity:
    """This node's identity; empty disks are formatted for the cluster in the store."""
    identity = await disks.identity()
    if identity is None:
        ours = await cluster.ensure(store, str(uuid.uuid4()))
        identity = Identity(str(uuid.uuid4()), ours.cluster_id)
        log.info("formatting the disks of new bookie %s", identity.bookie_id)
    else:
        stored = await cluster.read(store)
        if stored is None or stored.cluster_id != identity.cluster_id:
            in_store = f"cluster {stored.cluster_id}" if stored else "no cluster"
            raise WrongDisks(
                f"the disks of bookie {identity.bookie_id} belong to cluster "
                f"{identity.cluster_id}, and at the service URL is {in_store}; correct "
                "service_url, or give the bookie empty directories"
            )
    await disks.format(identity)
    return identity


class _Stop:
    """The signals to stop. Always true: while `is_serving` is False, a signal ends the process at
    once, as there is nothing to drain; later the first signal sets `requested`; a second signal
    ends the process at once, as a crash would."""

    def __init__(self) -> None:
        self.requested = asyncio.Event()
        self.is_serving = False
        for number in (signal.SIGTERM, signal.SIGINT):
            asyncio.get_running_loop().add_signal_handler(number, self._signalled)

    def _signalled(self) -> None:
        if self.requested.is_set():
            text = "a second signal to stop: ended at once; the next start replays the journal"
            end_process(SECOND_SIGNAL, text)
        if not self.is_serving:
            end_process(STOPPED, "stopped while starting")
        self.requested.set()


@contextlib.asynccontextmanager
async def hosting_autorecovery(service_url: str, *, enabled: bool) -> AsyncIterator[None]:
    """The context in which the process of autorecovery runs, if it is `enabled`; the process writes
    to the bookie's log."""
    if not enabled:
        yield
        return
    command = [sys.executable, "-m", "spark_ledger.cli.main", "autorecovery", "start"]
    command += ["--parent-pipe", "--service-url", service_url]
    hosting = asyncio.create_task(keep_running(command))
    try:
        yield
    finally:
        await cancel(hosting)


async def keep_running(command: list[str], pause_s: float = PAUSE_S) -> None:
    """Run the command again and again, until cancelled."""
    clock = asyncio.get_running_loop().time
    wait_s = pause_s
    while True:
        start_s = clock()
        ending = await _run_once(command)
        if clock() - start_s >= STEADY_S:
            wait_s = pause_s
        log.warning("the process of autorecovery %s; it is started again in %g s", ending, wait_s)
        await asyncio.sleep(wait_s)
        wait_s = min(2 * wait_s, PAUSE_MAX_S)


async def _run_once(command: list[str]) -> str:
    """Run the command; returns how it ended."""
    try:
        process = await asyncio.create_subprocess_exec(
            *command,
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.DEVNULL,
            start_new_session=True,
        )
    except OSError as failure:
        return f"cannot be started: {failure}"
    try:
        return f"ended with exit status {await process.wait()}"
    finally:
        await _end(process)


async def _end(process: asyncio.subprocess.Process) -> None:
    """End the process; with SIGTERM at first, so that it ends its session in the metadata store."""
    if process.returncode is not None:
        return
    with contextlib.suppress(ProcessLookupError):
        process.terminate()
    try:
        async with asyncio.timeout(AUTORECOVERY_STOP_S):
            await process.wait()
    except TimeoutError:
        with contextlib.suppress(ProcessLookupError):
            process.kill()
        await process.wait()


def _watch_parent() -> None:
    """End the process when the parent is gone; acknowledged entries are in the journal."""
    while os.read(sys.stdin.fileno(), 4096):
        pass
    end_process(ORPHANED, "the parent is gone")


def _keep_the_heap_small() -> None:
    """Bound the number of glibc's arenas (else one for each thread) and the freed bytes that it
    keeps (Linux only). HEAP_KEPT_BYTES stay: the next burst of large entries needs the memory that
    the last burst freed, and memory that the kernel gives again costs a page fault for every 4 KiB
    (docs/performance-trials.md)."""
    with contextlib.suppress(OSError, AttributeError):
        libc = ctypes.CDLL("libc.so.6")
        libc.mallopt(M_ARENA_MAX, 2)
        libc.mallopt(M_MMAP_THRESHOLD, 4 << 20)
        libc.mallopt(M_TRIM_THRESHOLD, HEAP_KEPT_BYTES)


def end_process(status: int, why: str) -> NoReturn:
    """End the process."""
    with contextlib.suppress(OSError):  # standard error may go to the disk that failed
        if status != STOPPED:
            print(f"bookie_server: {' '.join(why.split())}", file=sys.stderr)
        sys.stderr.flush()
        logging.shutdown()
    os._exit(status)


if __name__ == "__main__":
    main()
