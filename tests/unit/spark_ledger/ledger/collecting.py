"""Reads whose entries are collected, and the bytes that they hold."""

ENTRY = 74  # bytes of one of `written`


async def collect(reader, ids, **options):
    found = []
    await into(found, reader.read_entries(ids, **options))
    return found


async def into(found, runs):
    """The ids of the entries, as they come."""
    async for run in runs:
        for entry in run:
            assert entry.payload[0] == entry.header.entry_id
            found.append(entry.header.entry_id)
