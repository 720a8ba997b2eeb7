"""Ledgers that are written, and reads of them."""

import asyncio

from bookie_server.api import messages as m


async def written(ledgers, count, size=10, sizes=(3, 3, 2), close=True):
    writer = await ledgers.create(*sizes)
    await asyncio.gather(*(writer.append(bytes([n % 256]) * size, 1) for n in range(count)))
    await writer.wait_for_copies(1)
    if close:
        await writer.close()
    return writer


async def collect(reader, first, last, **options):
    found = []
    async for entry_id, entry in reader.read(first, last, **options):
        assert entry.header.entry_id == entry_id
        assert bytes(entry.payload[:1]) == bytes([entry_id % 256])
        found.append(entry_id)
    return found


def reads_of(cluster, *names):
    return [
        r
        for name in names or cluster.bookies
        for r in cluster.bookies[name].requests
        if isinstance(r, m.ReadRequest)
    ]


def watch_bytes(cluster):
    """The most bytes that reads under way could bring at a time, once it is over."""
    under_way, most = {}, [0]
    for bookie in cluster.bookies.values():

        async def handle(request, timeout_s, handle=bookie.handle):
            if isinstance(request, m.ReadRequest):
                under_way[id(request)] = request.max_bytes
                most.append(sum(under_way.values()))
            try:
                return await handle(request, timeout_s)
            finally:
                under_way.pop(id(request), None)

        bookie.handle = handle
    return most
