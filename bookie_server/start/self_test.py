"""At start: does the disk sync fast enough for a bookie, and does it sync at all? The test warns
and never refuses.

Always true: the log gets at most one line per directory, the gravest finding, with figures and
remedy; the test takes at most about BUDGET_S for each directory, and leaves no file behind. The
test measures in a thread of its own; a pure function judges the figures.
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
SLOW_S = 0.010  # a disk is slow if most batches of syncs have a sync that takes longer
BATCH_SYNCS = 10  # so few that a fast disk that is busy has batches without a slow sync
FAKE_S = 20e-6  # no disk syncs faster
_BLOCK = bytes(4096)
_MEMORY_TYPES = ("tmpfs", "ramfs")
_log = logging.getLogger(__name__)


class Measurement(NamedTuple):
    """The times that small synced writes took, and the file system's type ("" if unknown)."""

    syncs_s: Sequence[float]
    file_system: str


async def run(directories: Sequence[tuple[str, Path]]) -> None:
    """Test each directory, by its role and path, and log the finding; a failed test is a log line,
    too."""
    for role, path in directories:
        try:
            measurement = await asyncio.to_thread(measure, path)
        except OSError as error:
            _log.warning("%s directory %s: the sync test failed: %s", role, path, error)
            continue
        if (finding := finding_of(measurement)) is not None:
            _log.warning("%s directory %s %s", role, path, finding)


def finding_of(measurement: Measurement) -> str | None:
    """What is wrong with the disk, with figures and remedy; None if nothing is wrong."""
    if measurement.file_system in _MEMORY_TYPES:
        return (
            f"is in memory ({measurement.file_system}): acknowledged entries are lost when the "
            "machine restarts; put it on a disk"
        )
    if len(measurement.syncs_s) < SYNCS_MIN and sum(measurement.syncs_s) < BUDGET_S:
        return None
    p50, p99 = _quantile(measurement.syncs_s, 0.50), _quantile(measurement.syncs_s, 0.99)
    figures = f"p50 {_ms(p50)}, p99 {_ms(p99)} of {len(measurement.syncs_s)} synced writes"
    if p50 < FAKE_S:
        return (
            f"syncs faster than disks can ({figures}): it may not sync at all, and lose "
            "acknowledged entries with the power; check its mount options and virtual disk"
        )
    if _usual_slowest(measurement.syncs_s) > SLOW_S:
        return (
            f"syncs slowly ({figures}): each add waits for a sync; use a disk with power-loss "
            "protection, or one without other users"
        )
    return None


def measure(directory: Path) -> Measurement:
    """Write and sync small blocks for at most about BUDGET_S. Raises OSError."""
    path = directory / FILE
    fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
    try:
        os.unlink(path)  # at once, so that no file stays if this process is killed
        return Measurement(_time_syncs(fd), file_system(directory))
    finally:
        os.close(fd)


def _time_syncs(fd: int) -> list[float]:
    """Times of synced writes to one block, in seconds. The block is allocated before."""
    os.pwrite(fd, _BLOCK, 0)
    os.fsync(fd)
    sync = getattr(os, "fdatasync", os.fsync)
    times: list[float] = []
    first_start = time.perf_counter()
    while len(times) < SYNCS_MAX and time.perf_counter() - first_start < BUDGET_S:
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
    path = directory.resolve()
    longest, kind = -1, ""
    for line in lines:
        _, point, point_kind, *_ = line.split(" ")
        mount_point = Path(point.encode().decode("unicode_escape"))
        if path.is_relative_to(mount_point) and len(mount_point.parts) >= longest:
            longest, kind = len(mount_point.parts), point_kind
    return kind


def _quantile(times_s: Sequence[float], share: float) -> float:
    return sorted(times_s)[min(len(times_s) - 1, int(share * len(times_s)))]


def _usual_slowest(times_s: Sequence[float]) -> float:
    """The median, over batches, of the slowest time in a batch."""
    batches = [times_s[n : n + BATCH_SYNCS] for n in range(0, len(times_s), BATCH_SYNCS)]
    return _quantile([max(batch) for batch in batches], 0.50)


def _ms(seconds: float) -> str:
    return f"{seconds * 1000:.2g} ms"
