"""A bookie one of whose folders is a small file system of its own, that tests can fill up.

Always true: the file system (a tmpfs in a mount namespace of the bookie's process) goes with the
process; where the machine allows no such namespace, `why_impossible` says so.
"""

import errno
import os
import subprocess
from pathlib import Path

from spark_ledger.local.processes import LocalBookie

_MOUNTS = 'mount -t tmpfs -o size="$1" tmpfs "$2" && shift 2 && exec "$@"'
_NAMESPACE = ["unshare", "--map-root-user", "--mount", "sh", "-c", _MOUNTS, "sh"]
_STEP = bytes(1 << 16)


def why_impossible(folder: Path) -> str:
    """Empty when this machine lets us have such a file system."""
    try:
        tried = subprocess.run(
            [*_NAMESPACE, "64k", str(folder), "true"], capture_output=True, text=True, check=False
        )
    except FileNotFoundError as error:
        return str(error)
    return tried.stderr.strip() if tried.returncode else ""


class SmallDiskBookie(LocalBookie):
    """`small` ("journal" or "ledgers") of its folder has `size_bytes`; empty at each start."""

    def __init__(
        self,
        folder: Path,
        service_url: str,
        settings: dict[str, object],
        small: str,
        size_bytes: int,
    ) -> None:
        super().__init__(folder, service_url, settings)
        self._small = folder / small
        self._size_bytes = size_bytes
        self._small.mkdir(parents=True)

    def command(self) -> list[str]:
        return [*_NAMESPACE, str(self._size_bytes), str(self._small), *super().command()]

    @property
    def small(self) -> Path:
        """The small folder as the bookie sees it."""
        return Path(f"/proc/{self.pid}/root{self._small}")

    def fill_up(self) -> None:
        """Somebody else takes all that is left, to the last block."""
        with (self.small / "somebody's").open("wb", buffering=0) as hog:
            step = _STEP
            while step:
                try:
                    if hog.write(step) < len(step):
                        step = step[: len(step) // 2]
                except OSError as error:
                    assert error.errno == errno.ENOSPC, error
                    step = step[: len(step) // 2]

    def empty_out(self) -> None:
        """It is gone again."""
        os.unlink(self.small / "somebody's")
