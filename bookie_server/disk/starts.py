"""The starts of a bookie, on each of its directories: a number and a random token for each start.
By them the bookie sees whether a start in the metadata store was its own (serve/twin.py).

Always true: the file is replaced as a whole, so a crash leaves the old one or the new; a token in
one directory counts even if others lack it, as this bookie drew it, or the bookie of which these
directories are a copy; a damaged file counts as missing. The file is one line of text, of the KEPT
newest starts:

    spark-ledger-starts 1 <bookie id> <number>:<token> ... <CRC32C of all before it, 8 hex>

(of all before the last space).
"""

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from crc32c import crc32c

from bookie_server.disk.interface import Disk, DiskFailed, NoSuchFile, read_file, replace_file

FILE = "bookie.starts"
NEW_FILE = FILE + ".new"
KEPT = 100
_MAGIC, _VERSION = "spark-ledger-starts", "1"
_FILE_BYTES_MAX = 64 * 1024
_log = logging.getLogger(__name__)


class BadStarts(Exception):
    """A malformed file of starts, or one of another version."""


@dataclass(frozen=True, slots=True)
class Starts:
    """`tokens`: by number; empty before the first start that keeps them."""

    bookie_id: str
    tokens: Mapping[int, str]

    @property
    def newest(self) -> int:
        return max(self.tokens, default=0)

    def knows(self, number: int, token: str) -> bool:
        """Whether that was a start of these directories; a start before the oldest that is kept
        counts as theirs."""
        return token in self.tokens.values() or (bool(self.tokens) and number < min(self.tokens))

    def with_start(self, number: int, token: str) -> "Starts":
        every = {**self.tokens, number: token}
        return Starts(self.bookie_id, {n: every[n] for n in sorted(every)[-KEPT:]})


def encode(starts: Starts) -> bytes:
    tokens = [f"{number}:{starts.tokens[number]}" for number in sorted(starts.tokens)]
    body = " ".join((_MAGIC, _VERSION, starts.bookie_id, *tokens))
    return f"{body} {crc32c(body.encode()):08x}\n".encode()


def decode(data: bytes) -> Starts:
    """Raises BadStarts."""
    body, _, crc = data.removesuffix(b"\n").rpartition(b" ")
    if not data.endswith(b"\n") or crc != b"%08x" % crc32c(body):
        raise BadStarts("its checksum is wrong")
    try:
        magic, version, bookie_id, *pairs = body.decode().split(" ")
        if (magic, version) != (_MAGIC, _VERSION):
            raise BadStarts(f"it is of version {version!r}, not {_VERSION}")
        starts = [pair.split(":") for pair in pairs]
        return Starts(bookie_id, {int(number): token for number, token in starts})
    except ValueError as error:
        raise BadStarts(str(error)) from error


async def read(disks: Sequence[Disk], bookie_id: str) -> Starts:
    """The starts on all disks together."""
    stored = [starts for disk in disks if (starts := await _read_one(disk)) is not None]
    tokens: dict[int, str] = {}
    for starts in sorted(stored, key=lambda starts: starts.newest):
        if starts.bookie_id == bookie_id:
            tokens |= starts.tokens
    return Starts(bookie_id, tokens)


async def write(disks: Sequence[Disk], starts: Starts) -> None:
    """Durable on each disk that works when it returns. Raises DiskFailed when no disk works."""
    failures: list[DiskFailed] = []
    for disk in disks:
        try:
            await replace_file(disk, FILE, encode(starts), NEW_FILE)
        except DiskFailed as failure:
            failures.append(failure)
            _log.warning("a start is not kept in a directory: %s", failure)
    if failures and len(failures) == len(disks):
        raise failures[0]


async def _read_one(disk: Disk) -> Starts | None:
    try:
        return decode(await read_file(disk, FILE, _FILE_BYTES_MAX))
    except NoSuchFile:
        return None
    except (BadStarts, DiskFailed) as error:
        _log.warning("%s cannot be read, it counts as missing: %s", FILE, error)
        return None
