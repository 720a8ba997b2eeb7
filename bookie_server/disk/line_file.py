"""A small file of one line of text, with a copy in each directory of a bookie.

Always true: the file is replaced as a whole, so after a crash there is the old file or the new
file; a damaged file counts as missing, as a directory can be missing as well. The line has words
with a space between them: the kind of file, its version, the words of its value, and the CRC32C of
all bytes before the last space:

    spark-ledger-links 1 <word> ... <8 hex digits>
"""

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

from crc32c import crc32c

from bookie_server.disk.interface import Disk, DiskFailed, NoSuchFile, read_file, replace_file

T = TypeVar("T")
_log = logging.getLogger(__name__)


class BadLine(Exception):
    """The file is malformed, or of another kind or version."""


def encode_line(words: Sequence[str]) -> bytes:
    body = " ".join(words)
    return f"{body} {crc32c(body.encode()):08x}\n".encode()


def decode_line(data: bytes) -> list[str]:
    """The words before the checksum. Raises BadLine."""
    body, _, crc = data.removesuffix(b"\n").rpartition(b" ")
    if not data.endswith(b"\n") or crc != b"%08x" % crc32c(body):
        raise BadLine("the line's checksum is wrong")
    return body.decode().split(" ")


@dataclass(frozen=True)
class LineFile(Generic[T]):
    """A kind of file. `words_of` makes the words of a value; `parse` is its inverse, and may raise
    ValueError."""

    name: str
    kind: str
    bytes_max: int
    words_of: Callable[[T], Sequence[str]]
    parse: Callable[[list[str]], T]
    version = "1"

    @property
    def new_name(self) -> str:
        return f"{self.name}.new"

    def encode(self, value: T) -> bytes:
        return encode_line((self.kind, self.version, *self.words_of(value)))

    def decode(self, data: bytes) -> T:
        """Raises BadLine."""
        try:
            kind, version, *words = decode_line(data)
            if (kind, version) != (self.kind, self.version):
                raise BadLine(f"the file is of version {version!r}, not {self.version}")
            return self.parse(words)
        except ValueError as error:
            raise BadLine(str(error)) from error

    async def read(self, disks: Sequence[Disk]) -> list[T]:
        """The values of the disks whose file exists and can be read."""
        values = []
        for disk in disks:
            try:
                values.append(self.decode(await read_file(disk, self.name, self.bytes_max)))
            except NoSuchFile:
                continue
            except (BadLine, DiskFailed) as error:
                _log.warning("%s cannot be read, it counts as missing: %s", self.name, error)
        return values

    async def write(self, disks: Sequence[Disk], value: T) -> None:
        """Write the value to every disk, durably. Raises DiskFailed when all disks fail."""
        failures: list[DiskFailed] = []
        for disk in disks:
            try:
                await replace_file(disk, self.name, self.encode(value), self.new_name)
            except DiskFailed as failure:
                failures.append(failure)
                _log.warning("%s is not kept in a directory: %s", self.name, failure)
        if failures and len(failures) == len(disks):
            raise failures[0]


def words_of_numbers(numbered: Mapping[int, str]) -> list[str]:
    return [f"{number}:{numbered[number]}" for number in sorted(numbered)]


def parse_numbers(words: Sequence[str]) -> dict[int, str]:
    """The inverse of `words_of_numbers`. Raises ValueError."""
    pairs = [word.split(":") for word in words]
    return {int(number): text for number, text in pairs}
