"""At start: is the disk as fast, and as honest, as a bookie needs? It warns and never refuses.

Always true: one line per directory at most, the gravest finding, with figures and remedy; the test
takes at most about BUDGET_S for each directory, and leaves no file behind. It measures in a thread
of its own; a plain function judges the figures.
"""

import asyncio
import logging
import os
import time
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

FILE = "self-test"
SYNCS_MAX = 50
SYNCS_MIN = 8  # fewer show no distribution
BUDGET_S = 0.3
SLOW_S = 0.010  # the slowest sync of most batches: a disk that is merely busy has good ones too
BATCH_SYNCS = 10
FAKE_S = 20e-6
_BLOCK = bytes(4096)
_MEMORY_TYPES = ("tmpfs", "ramfs")
_log = logging.getLogger(__name__)


class Measured(NamedTuple):
    """Times of small synced writes in seconds, and the file system's type ("" if not known)."""

    syncs_s: Sequence[float]
    file_system: str


async def run(directories: Sequence[tuple[str, Path]]) -> None:
    """Test each directory, given with its role, and log the finding. Never raises because of it."""
    for role, path in directories:
        try:
            measured = await asyncio.to_thread(measure, path)
        except OSError as error:
            _log.warning("%s directory %s: the sync test failed: %s", role, path, error)
            continue
        if (finding := verdict(measured)) is not None:
            _log.warning("%s directory %s %s", role, path, finding)


def verdict(measured: Measured) -> str | None:
    """What is wrong with the disk, with figures and remedy; None: nothing."""
    if measured.file_system in _MEMORY_TYPES:
        return (
            f"is in memory ({measured.file_system}): acknowledged entries are lost when the "
            "machine restarts; put it on a disk"
        )
    if len(measured.syncs_s) < SYNCS_MIN and sum(measured.syncs_s) < BUDGET_S:
        return None
    p50, p99 = _quantile(measured.syncs_s, 0.50), _quantile(measured.syncs_s, 0.99)
    figures = f"p50 {_ms(p50)}, p99 {_ms(p99)} of {len(measured.syncs_s)} synced writes"
    if p50 < FAKE_S:
        return (
            f"syncs faster than disks can ({figures}): it may not sync at all, and lose "
            "acknowledged entries with the power; check its mount options and virtual disk"
        )
    if _usual_slowest(measured.syncs_s) > SLOW_S:
        return (
            f"syncs slowly ({figures}): each add waits for a sync; use a disk with power-loss "
            "protection, or one without other users"
        )
    return None


def measure(directory: Path) -> Measured:
    """Write and sync small blocks for at most about BUDGET_S. Raises OSError."""
    path = directory / FILE
    fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
    try:
        os.unlink(path)  # at once: no file is left however this process ends
        return Measured(_time_syncs(fd), file_system(directory))
    finally:
        os.close(fd)


def _time_syncs(fd: int) -> list[float]:
    """Overwrite one reserved block: this times the disk, not allocation."""
    os.pwrite(fd, _BLOCK, 0)
    os.fsync(fd)
    sync = getattr(os, "fdatasync", os.fsync)
    times: list[float] = []
    begun = time.perf_counter()
    while len(times) < SYNCS_MAX and time.perf_counter() - begun < BUDGET_S:
        start = time.perf_counter()
        os.pwrite(fd, _BLOCK, 0)
        sync(fd)
        times.append(time.perf_counter() - start)
    return times


def file_system(directory: Path, mounts: Path = Path("/proc/self/mounts")) -> str:
    """The type of the file system that the directory is on; "" if it is unknown."""
    try:
        lines = mounts.read_text().splitlines()
    except OSError:
        return ""
    place = directory.resolve()
    best, kind = -1, ""
    for line in lines:
        _, point, mounted_kind, *_ = line.split(" ")
        mounted = Path(point.encode().decode("unicode_escape"))
        if place.is_relative_to(mounted) and len(mounted.parts) >= best:
            best, kind = len(mounted.parts), mounted_kind
    return kind


def _quantile(times_s: Sequence[float], share: float) -> float:
    return sorted(times_s)[min(len(times_s) - 1, int(share * len(times_s)))]


def _usual_slowest(times_s: Sequence[float]) -> float:
    """The median, over batches, of the slowest in each."""
    batches = [times_s[n : n + BATCH_SYNCS] for n in range(0, len(times_s), BATCH_SYNCS)]
    return _quantile([max(batch) for batch in batches], 0.50)


def _ms(seconds: float) -> str:
    return f"{seconds * 1000:.2g} ms"
