"""The bookie's identity: a UUID, made when its disks are formatted, and the id of its cluster.

Always true: every directory of a bookie has the bookie's identity and a UUID of its own. A
directory gets both only while it is empty, and only if another directory of its kind (journal,
ledger) has them or all directories are empty. So a wiped directory counts as a new directory, never
as the old one, and a format that was interrupted can be finished. The file `bookie.identity` is one
line of text (line_file.py has the checksum):

    spark-ledger-bookie 2 <bookie id> <cluster id> <directory id> <CRC32C>

A file of version 1 has no directory id, which is then computed from the bookie's id.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple
from uuid import UUID, uuid5

from bookie_server.api.messages import IDENTITY_FILE
from bookie_server.disk import seen_links, starts
from bookie_server.disk.interface import Disk, NoSuchFile, read_file, replace_file
from bookie_server.disk.line_file import BadLine, decode_line, encode_line

FILE = IDENTITY_FILE
LOCK_FILE = "bookie.lock"
_NEW_FILE = FILE + ".new"
_MAGIC, _VERSION = "spark-ledger-bookie", "2"
_IDS_BY_VERSION = {"1": 2, "2": 3}
_FILE_BYTES_MAX = 1024
_NAMES_IN_EMPTY_DIRECTORY = frozenset(
    {
        *(LOCK_FILE, _NEW_FILE, "lost+found"),
        *(name for file in (seen_links.FILE, starts.FILE) for name in (file.name, file.new_name)),
    }
)
"""A directory with only these files counts as empty."""


class BadIdentity(Exception):
    """No bookie can be started on these disks; the text has their names and the remedy."""


class WrongDisks(BadIdentity):
    """The disks are undamaged, but belong to another bookie, or their directories are swapped."""


@dataclass(frozen=True, slots=True)
class Identity:
    """Two UUIDs in their canonical text."""

    bookie_id: str
    cluster_id: str


class Stamp(NamedTuple):
    """The contents of an identity file. `directory_id` is empty in a file of version 1."""

    identity: Identity
    directory_id: str


class Directory(NamedTuple):
    """A directory: its kind ("journal" or "ledger"), its name in messages, its disk."""

    kind: str
    name: str
    disk: Disk


def encode(stamp: Stamp) -> bytes:
    """The bytes of the identity file; see the head of this file."""
    identity = stamp.identity
    words = _MAGIC, _VERSION, identity.bookie_id, identity.cluster_id, stamp.directory_id
    return encode_line(words)


def decode(data: bytes) -> Stamp:
    """Raises BadIdentity when the bytes are damaged or of another version."""
    try:
        magic, version, *ids = decode_line(data)
    except BadLine:
        raise BadIdentity(
            f"the identity file is damaged; bring {FILE} back from a backup, or empty the"
            " directory: if another directory of its kind exists, the bookie uses it as a new"
            " directory, and gets its entries back from other bookies"
        ) from None
    if magic != _MAGIC or _IDS_BY_VERSION.get(version) != len(ids):
        raise BadIdentity(f"the identity file is of version {version!r}, not {_VERSION}")
    bookie_id, cluster_id, *rest = (str(UUID(text)) for text in ids)
    return Stamp(Identity(bookie_id, cluster_id), rest[0] if rest else "")


async def read(directories: Sequence[Directory]) -> Identity | None:
    """The identity in the directories; None: they are to be formatted.

    Raises WrongDisks when the directories have different identities; BadIdentity when a directory
    has no identity although it has files, or although it is the only directory of its kind;
    DiskFailed.
    """
    stamps = {directory: await _read_stamp(directory) for directory in directories}
    owners = {d.name: stamp.identity for d, stamp in stamps.items() if stamp is not None}
    if len(set(owners.values())) > 1:
        pairs = ", ".join(f"{name} of {owner.bookie_id}" for name, owner in owners.items())
        raise WrongDisks(
            f"the directories belong to different bookies: {pairs}; give each bookie its own"
        )
    ids = [stamp.directory_id for stamp in stamps.values() if stamp and stamp.directory_id]
    if len(set(ids)) < len(ids):
        raise WrongDisks(
            f"two of {', '.join(owners)} are copies of one directory; remove one from the settings"
        )
    used_names = [d.name for d in directories if await _is_used(d.disk)]
    without_stamp = [d for d in directories if stamps[d] is None]
    kinds = [d.kind for d in directories if stamps[d] is not None]
    refused = [d.name for d in without_stamp if d.name in used_names or d.kind not in kinds]
    if refused and used_names:
        raise BadIdentity(_refusal(refused, used_names))
    return next(iter(owners.values()), None)


def _refusal(refused: Sequence[str], used_names: Sequence[str]) -> str:
    with_files = [name for name in refused if name in used_names]
    if with_files:
        return (
            f"{', '.join(with_files)} has no {FILE} but holds files: it is no bookie's directory,"
            " or lost that file; correct the setting, bring the file back, or empty all directories"
            " of the bookie to make a new one"
        )
    return (
        f"{', '.join(refused)} has no {FILE} but {', '.join(used_names)} holds entries; bring back "
        "the missing disk, or empty all of them to make a new bookie"
    )


async def write(disk: Disk, identity: Identity, directory_id: str) -> None:
    """Write the identity, durably, unless the directory has an identity."""
    if FILE not in await disk.list():
        await replace_file(disk, FILE, encode(Stamp(identity, directory_id)), _NEW_FILE)


async def directory_id(disk: Disk, kind: str) -> str:
    """The id of a directory that has an identity. Raises BadIdentity, DiskFailed."""
    stamp = await _read_stamp(Directory(kind, kind, disk))
    if stamp is None:
        raise BadIdentity(f"a {kind} directory has no {FILE} any more")
    return stamp.directory_id or str(uuid5(UUID(stamp.identity.bookie_id), kind))


async def _is_used(disk: Disk) -> bool:
    return any(name != FILE and name not in _NAMES_IN_EMPTY_DIRECTORY for name in await disk.list())


async def _read_stamp(directory: Directory) -> Stamp | None:
    try:
        return decode(await read_file(directory.disk, FILE, _FILE_BYTES_MAX))
    except NoSuchFile:
        return None
    except (BadIdentity, ValueError) as error:
        raise BadIdentity(f"{directory.name}: {error}") from error
