"""One bookie of the embedded cluster: a process of its own on a folder of its own."""

import json
import shutil
import sys
from pathlib import Path

from spark_ledger.errors import Unavailable
from spark_ledger.local.child import Child, LocalProcess

START_TIMEOUT_S = 30.0


class LocalBookie(LocalProcess):
    """`folder` keeps its disks and its log; what is on them makes it the bookie that it is. To
    `stop` it: deregistered, flushed, sealed."""

    def __init__(self, folder: Path, service_url: str, settings: dict[str, object]) -> None:
        super().__init__(folder / "bookie.log")
        self.folder = folder
        self._service_url = service_url
        self.settings = settings
        self.id = ""
        """The bookie's UUID; empty before its first start."""
        self.address = ""
        """host:port at which it serves, or last served, gRPC."""
        self.frames = ""
        """host:port at which it speaks, or last spoke, frames, as clients do."""

    def start(self) -> None:
        """Start it; returns when it is registered as writable. Raises errors.Unavailable."""
        self.launch()
        self.wait_until_registered()

    def launch(self) -> None:
        """Start it and return at once; to be followed by `wait_until_registered`."""
        if self.running:
            raise ValueError(f"bookie {self.id} is running already")
        self.folder.mkdir(parents=True, exist_ok=True)
        self._child = Child(f"bookie in {self.folder.name}", self.command(), self.log)

    def wait_until_registered(self) -> None:
        if self._child is None:
            raise Unavailable(f"the bookie in {self.folder} was not started")
        said = json.loads(self._child.first_line(START_TIMEOUT_S))
        self.id, self.address, self.frames = said["bookie_id"], said["address"], said["frames"]

    def destroy(self) -> None:
        """SIGKILL, and its directories are gone for good, as if its machine had burnt. `start`
        makes a new bookie, with another id, on empty folders."""
        self.kill()
        for directory in self._directories():
            shutil.rmtree(directory, ignore_errors=True)

    def command(self) -> list[str]:
        overrides = [part for one in self._overrides() for part in ("--set", one)]
        return [sys.executable, "-m", "bookie_server", "--parent-pipe", *overrides]

    def _overrides(self) -> list[str]:
        settings = self._all_settings()
        return [f"{key}={_text(value)}" for key, value in settings.items()]

    def _all_settings(self) -> dict[str, object]:
        """One process heals the whole cluster (local_autorecovery.py), so a bookie hosts none."""
        ours = {"service_url": self._service_url, "listen": "127.0.0.1:0", "autorecovery": False}
        settings = {**ours, **self.settings}
        for kind, name in (("journal", "journal"), ("ledger", "ledgers")):
            if f"{kind}_directories" not in settings:
                settings.setdefault(f"{kind}_directory", self.folder / name)
        return settings

    def _directories(self) -> list[Path]:
        """Those that its settings name."""
        found: list[object] = []
        for kind in ("journal", "ledger"):
            several = self._all_settings().get(f"{kind}_directories")
            if isinstance(several, list | tuple):
                found += several
            elif several:
                found += [name.strip() for name in str(several).split(",")]
            else:
                found.append(self._all_settings()[f"{kind}_directory"])
        return [Path(str(name)) for name in found]


def _text(value: object) -> str:
    """The value as --set takes it; a list as in TOML, whose strings are JSON's."""
    if isinstance(value, list | tuple):
        return json.dumps([str(each) for each in value], ensure_ascii=False)
    return str(value)
