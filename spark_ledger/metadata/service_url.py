"""The service URL: which ZooKeeper, and which cluster in it.

    zk://host:port[,host:port...]/root

Always true of a parsed URL: at least one host, every host with a port, and a root that is a path
of at least one name ("/ledger"); writing it out and parsing it again gives the same URL.
"""

import re
from dataclasses import dataclass

from spark_ledger.errors import BadConfig

SCHEME = "zk"
PORT_DEFAULT = 2281
_EXAMPLE = "zk://127.0.0.1:2281/ledger"
_HOST = re.compile(r"^(\[[0-9A-Fa-f:.]+\]|[A-Za-z0-9._-]+)(?::(\d+))?$")
_ROOT = re.compile(r"^(/[A-Za-z0-9._-]+)+$")


@dataclass(frozen=True, slots=True)
class ServiceUrl:
    """`hosts` are "host:port"; `root` is the path of the cluster's root node."""

    hosts: tuple[str, ...]
    root: str

    def __str__(self) -> str:
        return f"{SCHEME}://{','.join(self.hosts)}{self.root}"


def parse(text: str) -> ServiceUrl:
    """The parts of a service URL; a port left out is 2281. Raises errors.BadConfig."""
    scheme, separator, rest = text.strip().partition("://")
    if not separator or scheme != SCHEME:
        raise _bad(text, f"it must begin with {SCHEME}://")
    hosts, slash, root = rest.partition("/")
    root = "/" + root.rstrip("/")
    if not slash or not _ROOT.match(root) or {".", ".."} & set(root.split("/")):
        raise _bad(text, "after the hosts comes the cluster's root, like /ledger")
    return ServiceUrl(tuple(_host(part, text) for part in hosts.split(",")), root)


def _host(part: str, text: str) -> str:
    match = _HOST.match(part.strip())
    if match is None:
        raise _bad(text, f"{part!r} is not host:port")
    port = int(match.group(2) or PORT_DEFAULT)
    if not 0 < port < 65536:
        raise _bad(text, f"{port} is no port")
    return f"{match.group(1)}:{port}"


def _bad(text: str, why: str) -> BadConfig:
    return BadConfig(f"{text!r} is no service URL: {why}", f"Write it like {_EXAMPLE}.")
