"""The broker of an embedded cluster, as a process.

Always true: it keeps the ports that it had first, so that clients find it again after a kill; it is
started again by `start` alone.
"""

import json
import sys
from pathlib import Path

from spark_ledger.local.child import Child, LocalProcess
from spark_ledger.local.embedded_zookeeper import free_port

START_TIMEOUT_S = 60.0


class LocalBroker(LocalProcess):
    """`log`: what it says. A port of None: a free one."""

    def __init__(
        self,
        log: Path,
        service_url: str,
        port: int | None = None,
        admin_port: int | None = None,
    ) -> None:
        super().__init__(log)
        self._service_url = service_url
        self._ports = {"--broker-port": port, "--admin-port": admin_port}
        self.url = ""
        """Where Pulsar's clients reach it, once it was started."""
        self.admin_url = ""
        """And by HTTP."""

    def start(self) -> None:
        """Start it, and return when it serves; of no effect if it runs. Raises
        errors.Unavailable, which quotes its log."""
        if self.running:
            return
        self._ports = {flag: port or free_port() for flag, port in self._ports.items()}
        options = ["--parent-pipe", "--service-url", self._service_url]
        for flag, port in self._ports.items():
            options += [flag, str(port)]
        command = [sys.executable, "-m", "spark_ledger.cli.main", "broker", "start", *options]
        self._child = Child("the broker", command, self.log)
        said = json.loads(self._child.first_line(START_TIMEOUT_S))
        self.url, self.admin_url = str(said["broker_url"]), str(said["admin_url"])
