"""The newest links of the metadata store's chain that a bookie saw, on each of its directories: by
them it recognises the store (spark_ledger/metadata/chain.py).

Always true: the file is replaced as a whole, so a crash leaves the old one or the new; of the
directories' files the one with the highest epoch and link counts, so a directory that was away
brings no older one back; a damaged file counts as missing, as a directory can be lost as well. The
file is one line of text, with the cluster's epoch when the links were seen:

    spark-ledger-links 1 <cluster id> <epoch> <number>:<token> ... <CRC32C of all before it, 8 hex>

(of all before the last space).
"""

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType

from crc32c import crc32c

from bookie_server.disk.interface import Disk, DiskFailed, NoSuchFile, read_file, replace_file

FILE = "metadata.links"
NEW_FILE = FILE + ".new"
_MAGIC, _VERSION = "spark-ledger-links", "1"
_FILE_BYTES_MAX = 4096
_log = logging.getLogger(__name__)


class BadLinks(Exception):
    """A malformed file of links, or one of another version."""


@dataclass(frozen=True, slots=True)
class SeenLinks:
    """`links`: number to token; empty before the first look at the store."""

    cluster_id: str
    epoch: int = 0
    links: Mapping[int, str] = field(default_factory=lambda: MappingProxyType({}))

    @property
    def newest(self) -> int:
        return max(self.links, default=-1)


def encode(seen: SeenLinks) -> bytes:
    links = [f"{number}:{seen.links[number]}" for number in sorted(seen.links)]
    body = " ".join((_MAGIC, _VERSION, seen.cluster_id, str(seen.epoch), *links))
    return f"{body} {crc32c(body.encode()):08x}\n".encode()


def decode(data: bytes) -> SeenLinks:
    """Raises BadLinks."""
    body, _, crc = data.removesuffix(b"\n").rpartition(b" ")
    if not data.endswith(b"\n") or crc != b"%08x" % crc32c(body):
        raise BadLinks("its checksum is wrong")
    try:
        magic, version, cluster_id, epoch, *links = body.decode().split(" ")
        if (magic, version) != (_MAGIC, _VERSION):
            raise BadLinks(f"it is of version {version!r}, not {_VERSION}")
        pairs = [link.split(":") for link in links]
        tokens = {int(number): token for number, token in pairs}
        return SeenLinks(cluster_id, int(epoch), MappingProxyType(tokens))
    except ValueError as error:
        raise BadLinks(str(error)) from error


async def read(disks: Sequence[Disk], cluster_id: str) -> SeenLinks:
    """The newest links on the disks."""
    stored = [seen for disk in disks if (seen := await _read_one(disk)) is not None]
    ours = [seen for seen in stored if seen.cluster_id == cluster_id]
    return max(ours, key=lambda seen: (seen.epoch, seen.newest), default=SeenLinks(cluster_id))


async def write(disks: Sequence[Disk], seen: SeenLinks) -> None:
    """Durable on each disk that works when it returns. Raises DiskFailed when no disk works."""
    failures: list[DiskFailed] = []
    for disk in disks:
        try:
            await replace_file(disk, FILE, encode(seen), NEW_FILE)
        except DiskFailed as failure:
            failures.append(failure)
            _log.warning("the links of the metadata store's chain are not kept: %s", failure)
    if failures and len(failures) == len(disks):
        raise failures[0]


async def _read_one(disk: Disk) -> SeenLinks | None:
    try:
        return decode(await read_file(disk, FILE, _FILE_BYTES_MAX))
    except NoSuchFile:
        return None
    except (BadLinks, DiskFailed) as error:
        _log.warning("%s cannot be read, it counts as missing: %s", FILE, error)
        return None
