"""Who this bookie is: a UUID minted when its disks are formatted, and the cluster they belong to.

Always true: every disk of a bookie carries the same identity; a disk gets one only while no disk
of the bookie holds anything else, so a wiped disk is never taken for the old one, and a format
that was interrupted is taken up again. The file `bookie.identity` is one line of text:

    spark-ledger-bookie 1 <bookie id> <cluster id> <CRC32C of all before the last space, 8 hex>
"""

from collections.abc import Sequence
from dataclasses import dataclass
from uuid import UUID

from crc32c import crc32c

from bookie_server.disk import Disk, NoSuchFile

FILE = "bookie.identity"
LOCK_FILE = "bookie.lock"
_NEW_FILE = FILE + ".new"
_MAGIC, _VERSION = "spark-ledger-bookie", "1"
_FILE_BYTES_MAX = 1024
_NOT_OURS = frozenset({LOCK_FILE, _NEW_FILE, "lost+found"})


class BadIdentity(Exception):
    """Disks that no bookie can be started on; the text says which and what to do."""


@dataclass(frozen=True, slots=True)
class Identity:
    """Two UUIDs in their canonical text."""

    bookie_id: str
    cluster_id: str


def encode(identity: Identity) -> bytes:
    """The bytes of the identity file; see the opening."""
    body = " ".join((_MAGIC, _VERSION, identity.bookie_id, identity.cluster_id))
    return f"{body} {crc32c(body.encode()):08x}\n".encode()


def decode(data: bytes) -> Identity:
    """Raises BadIdentity when the bytes are damaged or of another version."""
    body, _, crc = data.removesuffix(b"\n").rpartition(b" ")
    if not data.endswith(b"\n") or crc != b"%08x" % crc32c(body):
        raise BadIdentity("the identity file is damaged")
    magic, version, *ids = body.decode().split(" ")
    if magic != _MAGIC or version != _VERSION or len(ids) != 2:
        raise BadIdentity(f"the identity file is of version {version!r}, not {_VERSION}")
    return Identity(*(str(UUID(text)) for text in ids))


async def read(disks: Sequence[tuple[str, Disk]]) -> Identity | None:
    """The identity on the disks, given with names for messages; None: they are to be formatted.

    Raises BadIdentity when they disagree, or some lack it while any holds something; DiskFailed.
    """
    found = {name: await _read_one(name, disk) for name, disk in disks}
    known = {identity for identity in found.values() if identity is not None}
    if len(known) > 1:
        raise BadIdentity(f"disks of different bookies: {found}")
    missing = [name for name, identity in found.items() if identity is None]
    used = [name for name, disk in disks if await _is_used(disk)]
    if missing and used:
        raise BadIdentity(
            f"{', '.join(missing)} has no {FILE} but {', '.join(used)} holds entries; bring back "
            "the missing disk, or empty all of them to make a new bookie"
        )
    return known.pop() if known else None


async def write(disks: Sequence[tuple[str, Disk]], identity: Identity) -> None:
    """Durable on every disk when it returns; disks that have it are left alone."""
    for name, disk in disks:
        if await _read_one(name, disk) is None:
            await _write_one(disk, identity)


async def _is_used(disk: Disk) -> bool:
    return any(name != FILE and name not in _NOT_OURS for name in await disk.list())


async def _read_one(name: str, disk: Disk) -> Identity | None:
    try:
        file = await disk.open(FILE)
    except NoSuchFile:
        return None
    try:
        return decode(await file.read(0, _FILE_BYTES_MAX))
    except (BadIdentity, ValueError) as error:
        raise BadIdentity(f"{name}: {error}") from error
    finally:
        await file.close()


async def _write_one(disk: Disk, identity: Identity) -> None:
    if _NEW_FILE in await disk.list():
        await disk.remove(_NEW_FILE)
    file = await disk.create(_NEW_FILE)
    try:
        await file.append([encode(identity)], sync=True)
    finally:
        await file.close()
    await disk.rename(_NEW_FILE, FILE)
    await disk.sync_dir()
