"""Pulsar's client for Go, where its module and Go are on the machine: programs that use it."""

import os
import subprocess
from pathlib import Path
from shutil import which

CLIENT = "github.com/apache/pulsar-client-go@v0.19.0"
GO = Path("/usr/local/go/bin/go")
TIMEOUT_S = 300


class GoMissing(Exception):
    """Go, or the client's module, is not on this machine."""


def run(program: Path, binary: Path, *arguments: str) -> str:
    """The output of the program, which is compiled to the file `binary`. Raises GoMissing, and
    AssertionError with the end of its standard error if it fails."""
    go = which("go") or (str(GO) if GO.exists() else None)
    if go is None:
        raise GoMissing("there is no Go")
    client = Path(_output([go, "env", "GOMODCACHE"]).strip(), CLIENT)
    if not client.exists():
        raise GoMissing(f"`go mod download` has not fetched {CLIENT}")
    # in the client's folder a file of any other place finds the modules that the client needs
    _output([go, "build", "-o", str(binary), str(program)], client)
    return _output([str(binary), *arguments])


def _output(command: list[str], folder: Path | None = None) -> str:
    done = subprocess.run(
        command,
        cwd=folder,
        env={**os.environ, "GOPROXY": "off", "GOTOOLCHAIN": "local"},
        capture_output=True,
        text=True,
        timeout=TIMEOUT_S,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout
