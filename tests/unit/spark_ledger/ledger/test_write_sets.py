"""Writer, reader and recovery agree on who keeps an entry, also where ids are large.

Entries of a ledger whose last fragment begins near 2^31, 2^32, 2^53 or 2^63 are added, found by
recovery and read, each part running as it is, and the bookies tell who was given and asked what.
"""

import asyncio
from dataclasses import replace

import pytest

from bookie_server.api.codec import encode_add
from bookie_server.api.entry import EntryHeader, pack_header, payload_crc
from bookie_server.api.messages import Add
from spark_ledger.ledger.add_pipeline import AddPipeline
from spark_ledger.ledger.quorum import PendingAdd, Quorum
from spark_ledger.ledger.transitions import Write
from spark_ledger.metadata.ledger_record import Fragment
from tests.unit.spark_ledger.ledger.fakes import cluster_of, simulated

COUNT = 12
LAST = 2**63 - 1  # the largest id there can be


async def ledger_at(ledgers, base, sizes):
    """An open ledger whose last fragment begins at entry `base`."""
    writer = await ledgers.create(*sizes)
    first = writer.record.fragments[0]
    fragments = (first,) if base == 0 else (first, Fragment(base, first.ensemble))
    move = await ledgers.cluster.records.move(
        await ledgers.record(writer.ledger_id),
        lambda record: Write(replace(record, fragments=fragments)),
    )
    return move.record


async def add(ledgers, record, base):
    """Entries base, base + 1, ... by the writer's own pipeline."""
    pipeline = AddPipeline(ledgers.cluster, record, base - 1)
    futures = []
    for entry_id in range(base, base + COUNT):
        payload = str(entry_id).encode()
        sizes = ((entry_id - base + 1) * len(payload), entry_id - base + 1)
        header = EntryHeader(
            *(record.ledger_id, entry_id, base - 1, *sizes, len(payload), payload_crc([payload]))
        )
        future = asyncio.get_running_loop().create_future()
        message = encode_add(Add([pack_header(header), payload], False, b""))
        now = asyncio.get_running_loop().time()
        pipeline.push(PendingAdd(entry_id, message, len(payload), *sizes, now, future))
        futures.append(future)
    await asyncio.gather(*futures)
    await pipeline.wait_for_responses(1)


def keep_one_copy(cluster, record, entries, kept):
    """Of each entry only the `kept`-th member of its write set keeps its copy."""
    for entry in entries:
        for at, bookie in enumerate(keepers(record, entry)):
            if at != kept:
                del cluster.bookies[bookie].entries[record.ledger_id, entry]


def keepers(record, entry):
    size = record.ensemble_size
    ensemble = record.last_fragment.ensemble
    return [ensemble[(entry + step) % size] for step in range(record.write_quorum)]


@pytest.mark.parametrize("sizes", [(3, 2, 2), (5, 3, 2), (7, 4, 3), (4, 1, 1)], ids=str)
@pytest.mark.parametrize("base", [0, 2**31 - 5, 2**32 - 5, 2**53 - 5, LAST - 600], ids=hex)
def test_what_the_writer_gave_to_a_write_set_recovery_and_readers_find_there(base, sizes):
    @simulated
    async def test():
        cluster, ledgers = await cluster_of(sizes[0])
        entries = range(base, base + COUNT)
        for kept in range(sizes[1]):
            record = await ledger_at(ledgers, base, sizes)
            whole = {entry: sorted(keepers(record, entry)) for entry in entries}

            def holders(record=record):
                return {e: sorted(cluster.holders(record.ledger_id, e)) for e in entries}

            await add(ledgers, record, base)
            assert holders() == whole
            keep_one_copy(cluster, record, entries, kept)
            recovered = (await ledgers.recover(record.ledger_id)).record
            assert recovered.last_entry == entries[-1]
            assert holders() == whole
            keep_one_copy(cluster, record, entries, kept)
            reader = await ledgers.open(record.ledger_id, recover=False)
            found = [pair async for pair in reader.read(base, entries[-1])]
            assert [(e, bytes(entry.payload)) for e, entry in found] == [
                (e, str(e).encode()) for e in entries
            ]

    test()


def test_write_sets_at_the_very_last_ids_are_the_definition():
    for sizes in ((3, 2, 2), (5, 3, 2), (7, 4, 3)):
        quorum = Quorum(*sizes)
        for entry in range(LAST - 20, LAST + 1):
            expected = tuple((entry + step) % sizes[0] for step in range(sizes[1]))
            assert quorum.write_set(entry) == expected
