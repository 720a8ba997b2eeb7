"""The set of deleted ledgers, in the metadata store: the process that deletes a ledger names its id
here. A missing record proves no deletion: it is also missing if the store was restored from an
older backup, or if the record was lost.

Always true: the multi that deletes a ledger's record also names its id; a named id stays named. So
an older copy of the store never names more ledgers, and a lost record adds no name. Bookies remove
their copies of a ledger only if it is named AND has no record
(bookie_server/ledgers/cluster_ledgers.py).

Each folder of records keeps its part of the set: a folder (paths.ledger_folder) has the records of
IDS_PER_FOLDER ids, and its value is a bitmap of the deleted ledgers among them. A million deleted
ledgers are 100 values of 1.3 KB; a bookie reads one value for each folder with ledgers of its own.
An empty value, which earlier versions left, names no ledger.

    0        4        8
    +--------+--------+---------------------------------------------------------------+
    | "SLD1" | CRC32C | bit i of byte j: id 8 * j + i of the folder; no zeros at the end |
    +--------+--------+---------------------------------------------------------------+
    The CRC (little-endian) is of the bitmap.
"""

from collections.abc import Iterable, Mapping, Sequence

from bookie_server.api.entry import crc32c
from spark_ledger.metadata import paths
from spark_ledger.metadata.store import MetadataStore, NoNode, Set

MAGIC = b"SLD1"
IDS_PER_FOLDER = 10_000
_HEADER_BYTES = 8
_BITMAP_BYTES_MAX = IDS_PER_FOLDER // 8


class BadDeletedSet(ValueError):
    """A malformed set of deleted ledgers."""


def encode(ledger_ids: Iterable[int]) -> bytes:
    """The folder's value that names these ids; empty if there are no ids."""
    bitmap = bytearray(_BITMAP_BYTES_MAX)
    for ledger_id in ledger_ids:
        byte, bit = divmod(ledger_id % IDS_PER_FOLDER, 8)
        bitmap[byte] |= 1 << bit
    body = bytes(bitmap).rstrip(b"\0")
    return MAGIC + crc32c(body).to_bytes(4, "little") + body if body else b""


def decode(value: bytes, folder: str) -> frozenset[int]:
    """The ids that the value of the folder names. Raises BadDeletedSet."""
    if not value:
        return frozenset()
    body = value[_HEADER_BYTES:]
    if value[:4] != MAGIC or len(body) > _BITMAP_BYTES_MAX:
        raise BadDeletedSet(f"{folder} holds {len(value)} bytes that are no set of deleted ledgers")
    if value[4:_HEADER_BYTES] != crc32c(body).to_bytes(4, "little"):
        raise BadDeletedSet(f"the set of deleted ledgers in {folder} is damaged")
    first = paths.first_in_folder(folder)
    return frozenset(
        first + 8 * index + bit
        for index, byte in enumerate(body)
        if byte
        for bit in range(8)
        if byte >> bit & 1
    )


async def read_deleted(store: MetadataStore, folder: str) -> frozenset[int]:
    """The deleted ledgers of the folder. Raises BadDeletedSet, StoreError."""
    try:
        return decode((await store.get(folder)).value, folder)
    except NoNode:
        return frozenset()


async def writes_that_name(store: MetadataStore, ledger_ids: Sequence[int]) -> list[Set]:
    """Writes, one for each folder, that name these ledgers as deleted. Raises BadDeletedSet,
    StoreError (NoNode if the folder of an id never had a record)."""
    writes = []
    for folder, ids in by_folder(ledger_ids).items():
        node = await store.get(folder)
        value = encode(decode(node.value, folder).union(ids))
        writes.append(Set(folder, value, node.version))
    return writes


def by_folder(ledger_ids: Iterable[int]) -> Mapping[str, list[int]]:
    """The ids, grouped by the folder of their records."""
    folders: dict[str, list[int]] = {}
    for ledger_id in ledger_ids:
        folders.setdefault(paths.ledger_folder(ledger_id), []).append(ledger_id)
    return folders
