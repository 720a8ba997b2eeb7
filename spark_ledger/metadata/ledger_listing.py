"""Which ledgers there are: the tree below /ledgers, read folder by folder.

Always true: a listing begins with a sync, and is whole or an error; folders are never deleted, so
one that is missing, or a name that is none of ours, means that the listing is broken.
"""

from collections.abc import AsyncIterator, Sequence

from spark_ledger.metadata import paths
from spark_ledger.metadata.store import MetadataStore, NoNode, StoreError

DIGITS = 19


class BrokenListing(StoreError):
    """The tree is not as it should be; what was listed so far is no list of ledgers."""


async def ledger_ids(metadata: MetadataStore) -> AsyncIterator[int]:
    """Ids of all ledgers that there were when it began and still are, ascending; others may be
    among them. One folder of names for each level of the tree is in memory at a time.

    Raises StoreError, also BrokenListing: never a short list.
    """
    await metadata.sync(paths.LEDGERS)
    folders = [paths.LEDGERS]
    while folders:
        folder = folders.pop()
        above = folder.removeprefix(paths.LEDGERS).replace("/", "")
        digits = paths.digits_below(len(above))
        if len(above) + digits == DIGITS:
            for name in await _names(metadata, folder, digits):
                yield int(above + name)
        else:
            below = reversed(await _names(metadata, folder, digits))
            folders += [f"{folder}/{name}" for name in below]


async def _names(metadata: MetadataStore, folder: str, digits: int) -> Sequence[str]:
    """What is in a folder of the tree: names of so many digits."""
    try:
        names = await metadata.children(folder)
    except NoNode:  # folders are never deleted
        raise BrokenListing(f"the listing of ledgers is broken: {folder} is missing") from None
    foreign = [name for name in names if not (len(name) == digits and name.isdecimal())]
    if foreign:
        raise BrokenListing(f"the listing of ledgers is broken: {folder} holds {foreign[0]!r}")
    return names
