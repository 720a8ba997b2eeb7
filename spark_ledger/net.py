"""Hosts and ports as text, and the one place that dials and listens.

Always true:
- a connection of Spark Ledger begins in `dial` (or `dial_blocking`), or is accepted by a
  `Listener`; only the libraries for ZooKeeper and gRPC make others. tests/tidy/test_net.py lists
  them;
- a dial ends within its deadline, whether or not the host responds;
- an IPv6 address has brackets in every text, and none as an argument of a socket;
- a process takes connections while less than ACCEPT_SHARE of its descriptors are in use. The rest
  is for files and for connections that it makes itself: a client that opens many connections takes
  connections from other clients, but never the process's files or metadata store.

A connection gets the lowest free number as its descriptor. So the number is a lower bound of the
descriptors in use, and no code has to count them.
"""

import asyncio
import errno
import logging
import os
import re
import resource
import socket
from collections.abc import Callable
from contextlib import suppress
from functools import lru_cache, partial
from ipaddress import ip_address

from spark_ledger.async_tasks import BackgroundTasks

PORT_MAX = 65535
DIAL_S = 10.0
BACKLOG = 256
DESCRIPTORS_MAX = 1 << 20
"""The highest limit that a process sets for itself: some systems have no limit, and some kernels
refuse a higher one."""
_DESCRIPTORS = DESCRIPTORS_MAX, 65_536, 10_240  # the limits to try
ACCEPT_SHARE = 0.8
FILES_SHARE_MAX = 0.5
AGAIN_S = 0.5  # until a Listener without free descriptors looks for them again
WARN_EVERY_S = 60.0
_ACCEPTS_MAX = 100  # connections that are taken in one step of the event loop
_HOST = re.compile(r"[A-Za-z0-9_.-]+|\[[0-9A-Fa-f:.]+(?:%[A-Za-z0-9_.-]+)?\]")
_log = logging.getLogger(__name__)


# -- addresses -------------------------------------------------------------------------------------


def is_host(text: str) -> bool:
    """Whether the text is a host name, an IPv4 address, or an IPv6 address in brackets."""
    return _HOST.fullmatch(text) is not None


def parse(text: str) -> tuple[str, int | None]:
    """The host, without brackets, and the port of "host:port"; the port is None for "host" alone.
    Raises ValueError."""
    if is_host(text):
        return text.strip("[]"), None
    host, _, port = text.rpartition(":")
    if not is_host(host) or not (port.isascii() and port.isdigit() and int(port) <= PORT_MAX):
        raise ValueError(f"{text!r} is no host:port, with an IPv6 address in brackets")
    return host.strip("[]"), int(port)


def split(address: str) -> tuple[str, int]:
    """The host, without brackets, and the port of "host:port". Raises ValueError."""
    host, port = parse(address)
    if port is None:
        raise ValueError(f"{address!r} has no port")
    return host, port


def split_url(url: str) -> tuple[str, int]:
    """As `split`, for "scheme://host:port"."""
    return split(url.rpartition("://")[2].rstrip("/"))


def host_of(address: str) -> str:
    """The host, without brackets, of a text that was registered as host:port; "" if it has
    none."""
    return address.rpartition(":")[0].strip("[]")


def bracketed(host: str) -> str:
    """The host as it is written before a port; a host in brackets stays as it is."""
    return f"[{host}]" if ":" in host and not host.startswith("[") else host


def join(host: str, port: int) -> str:
    """ "host:port"."""
    return f"{bracketed(host)}:{port}"


# -- dialling --------------------------------------------------------------------------------------


async def dial(address: str, within_s: float = DIAL_S) -> socket.socket:
    """A connection to "host:port" or "scheme://host:port"; its caller closes it. Each address of
    the host is tried. Raises OSError, also for a text that is no address; ConnectionRefusedError
    only if every address refused."""
    loop = asyncio.get_running_loop()
    failure = OSError(f"{address} is no address")
    async with asyncio.timeout(within_s):
        try:
            host, port = split_url(address)
            addresses = await loop.getaddrinfo(host, port, type=socket.SOCK_STREAM)
        except ValueError:  # UnicodeError is one
            raise failure from None
        failures: list[OSError] = []
        for family, kind, protocol, _, where in addresses:
            try:
                return await _connected(socket.socket(family, kind, protocol), where)
            except OSError as error:
                failures.append(error)
    others = (error for error in failures if not isinstance(error, ConnectionRefusedError))
    raise next(others, failures[-1] if failures else failure)


async def _connected(sock: socket.socket, where: tuple[object, ...]) -> socket.socket:
    """The socket, connected; closed if that fails."""
    try:
        sock.setblocking(False)
        await asyncio.get_running_loop().sock_connect(sock, where)
    except BaseException:
        sock.close()
        raise
    return sock


async def dial_streams(address: str) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    """As `dial`, for a caller that reads and writes streams."""
    return await asyncio.open_connection(sock=await dial(address))


def dial_blocking(host: str, port: int, within_s: float) -> socket.socket:
    """As `dial`, for a thread without an event loop; `within_s` also bounds each later call."""
    return socket.create_connection((host, port), timeout=within_s)


@lru_cache(256)
def is_own(address: str) -> bool:
    """Whether "host:port" has an IP address of this host. No packet is sent."""
    try:
        host, port = split(address)
        ip = ip_address(host)
        family = socket.AF_INET if ip.version == 4 else socket.AF_INET6
        with socket.socket(family, socket.SOCK_DGRAM) as sock:
            sock.connect((str(ip), port))
            return ends_where_it_begins(sock)
    except (OSError, ValueError):
        return False


def ends_where_it_begins(sock: socket.socket) -> bool:
    """Whether both ends of a connection have one IP address."""
    return bool(sock.getsockname()[0] == sock.getpeername()[0])


# -- descriptors -----------------------------------------------------------------------------------


def lacks_descriptors(error: BaseException) -> bool:
    """Whether the process, or the machine, has no descriptor left: the caller may try again."""
    return isinstance(error, OSError) and error.errno in (errno.EMFILE, errno.ENFILE)


def raise_descriptor_limit() -> int:
    """Raise this process's limit of descriptors as far as the system allows, to DESCRIPTORS_MAX at
    most; returns the limit."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    for most in _DESCRIPTORS if soft != resource.RLIM_INFINITY else ():
        limit = most if hard == resource.RLIM_INFINITY else min(hard, most)
        if limit <= soft:
            break
        with suppress(OSError, ValueError):
            resource.setrlimit(resource.RLIMIT_NOFILE, (limit, hard))
            break
    return descriptor_limit()


def descriptor_limit() -> int:
    """How many descriptors this process may have."""
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return DESCRIPTORS_MAX if soft == resource.RLIM_INFINITY else soft


def accepted_below(limit: int, files: int = 0) -> int:
    """The number below which the descriptor of a new connection must be; if it is not, no more
    connections are taken. `files`: how many descriptors to keep for files, at most half of the
    limit."""
    kept = max(limit - int(limit * ACCEPT_SHARE), min(files, int(limit * FILES_SHARE_MAX)))
    return limit - kept


class RareWarning:
    """A warning that is logged once in WARN_EVERY_S, however often `warn` is called. Any thread may
    call it."""

    def __init__(self) -> None:
        self._next_s = float("-inf")

    def warn(self, now_s: float, text: str, *arguments: object) -> None:
        if now_s >= self._next_s:
            self._next_s = now_s + WARN_EVERY_S
            _log.warning(text, *arguments)


# -- listening -------------------------------------------------------------------------------------


class Listener:
    """Takes connections at the bound `sockets` from `start` on, and gives each to `accepted`, which
    owns it from then on. It belongs to one event loop."""

    def __init__(
        self,
        sockets: list[socket.socket],
        accepted: Callable[[socket.socket], None],
        files: int = 0,
    ) -> None:
        self._sockets = sockets
        self._accepted = accepted
        self._below = accepted_below(descriptor_limit(), files)
        self._warning = RareWarning()
        self._timer: asyncio.TimerHandle | None = None

    @property
    def port(self) -> int:
        bound: int = self._sockets[0].getsockname()[1]
        return bound

    def start(self) -> None:
        """Begin to listen; before this call every attempt to connect is refused. Raises OSError if
        another process listens by now."""
        for sock in self._sockets:
            sock.listen(BACKLOG)
        self._go_on()

    def _go_on(self) -> None:
        self._timer = None
        for sock in self._sockets:
            asyncio.get_running_loop().add_reader(sock, self._accept, sock)

    def close(self) -> None:
        """Take no more connections, and give the address back."""
        if self._timer is not None:
            self._timer.cancel()
        for sock in self._sockets:
            asyncio.get_running_loop().remove_reader(sock)
            sock.close()
        self._sockets = []

    def _accept(self, sock: socket.socket) -> None:
        for _ in range(_ACCEPTS_MAX):
            try:
                made, _ = sock.accept()
            except (BlockingIOError, InterruptedError, ConnectionAbortedError):
                return
            except OSError as error:
                self._pause(f"connections cannot be accepted: {error.strerror}")
                return
            made.setblocking(False)
            in_use = made.fileno()
            self._accepted(made)
            if in_use >= self._below:
                self._pause(f"{in_use} descriptors are in use, of {descriptor_limit()}")
                return

    def _pause(self, why: str) -> None:
        loop = asyncio.get_running_loop()
        self._warning.warn(
            loop.time(),
            "port %d: %s. No more connections are taken until some have ended; raise the limit"
            " (ulimit -n) if so many clients are right",
            *(self.port, why),
        )
        for sock in self._sockets:
            loop.remove_reader(sock)
        self._timer = loop.call_later(AGAIN_S, self._look)

    def _look(self) -> None:
        """Take connections again if descriptors are free again."""
        try:
            lowest_free = os.dup(self._sockets[0].fileno())
        except OSError:
            lowest_free = self._below
        else:
            os.close(lowest_free)
        if lowest_free < self._below:
            self._go_on()
        else:
            self._timer = asyncio.get_running_loop().call_later(AGAIN_S, self._look)


def served_by(protocol: Callable[[], asyncio.BaseProtocol]) -> Callable[[socket.socket], None]:
    """A function for a Listener, which gives each connection to a new `protocol` on the running
    event loop."""
    loop = asyncio.get_running_loop()
    beginning = BackgroundTasks(partial(_log.warning, "a connection ends before it has begun: %r"))

    def accepted(sock: socket.socket) -> None:
        beginning.start(loop.connect_accepted_socket(protocol, sock))

    return accepted


def is_free(host: str, port: int) -> bool:
    """Whether a process could listen there now; `host` is an IPv4 address."""
    try:
        _bound(socket.AF_INET, (host, port), alone=True).close()
    except OSError:
        return False
    return True


async def bound(host: str, port: int) -> list[socket.socket]:
    """Sockets that are bound to each address of the host (on one port, if `port` is 0). Raises
    OSError."""
    addresses = await asyncio.get_running_loop().getaddrinfo(
        host or None, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
    )
    made: list[socket.socket] = []
    try:
        for family, *_, address in dict.fromkeys(addresses):
            at = (address[0], port or (made[0].getsockname()[1] if made else 0), *address[2:])
            made.append(_bound(family, at, alone=len(addresses) == 1))
    except BaseException:
        for sock in made:
            sock.close()
        raise
    return made


def _bound(family: int, address: tuple[object, ...], *, alone: bool) -> socket.socket:
    """A socket that is bound to the address. `alone`: it is the only one, so a socket for all IPv6
    addresses also takes IPv4."""
    sock = socket.socket(family, socket.SOCK_STREAM)
    try:
        sock.setblocking(False)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if family == socket.AF_INET6:
            both = alone and address[0] == "::"
            sock.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, not both)
        sock.bind(address)
    except BaseException:
        sock.close()
        raise
    return sock
