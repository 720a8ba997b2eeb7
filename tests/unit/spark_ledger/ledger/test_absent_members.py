"""Members that are not registered any more, or drained, are replaced, also where nothing is
appended."""

import asyncio

import pytest

from spark_ledger.metadata import paths
from spark_ledger.metadata.autorecovery import change_settings
from tests.unit.spark_ledger.ledger.fakes import cluster_of, simulated

DELAY_S = 60.0


async def idle_writer(cluster, ledgers):
    await change_settings(ledgers.metadata, lost_bookie_delay_s=DELAY_S)
    writer = await ledgers.create(3, 3, 2)
    await writer.append([b"first"])
    await asyncio.sleep(1)
    return writer


async def lose(cluster, name):
    cluster.bookies[name].refusing = True
    await cluster.deregister(name)


@pytest.mark.parametrize("change", ["at-once", "delayed"])
@simulated
async def test_an_idle_writer_replaces_a_member_that_is_absent_for_half_of_the_delay(change):
    cluster, ledgers = await cluster_of(4, ensemble_change=change)
    writer = await idle_writer(cluster, ledgers)
    gone = writer.record.last_fragment.ensemble[1]
    await lose(cluster, gone)
    await asyncio.sleep(DELAY_S / 2 - 2)
    assert gone in writer.record.last_fragment.ensemble
    await asyncio.sleep(6)
    assert gone not in writer.record.last_fragment.ensemble
    assert [fragment.first_entry for fragment in writer.record.fragments] == [0, 1]
    await writer.append([b"second"])
    await writer.close()


@simulated
async def test_a_member_that_is_back_in_time_keeps_its_slot():
    cluster, ledgers = await cluster_of(4)
    writer = await idle_writer(cluster, ledgers)
    ensemble = writer.record.last_fragment.ensemble
    for _ in range(3):
        await lose(cluster, ensemble[0])
        await asyncio.sleep(DELAY_S / 2 - 2)
        cluster.bookies[ensemble[0]].refusing = False
        await cluster.register(ensemble[0])
        await asyncio.sleep(2)
    assert writer.record.fragments[0].ensemble == ensemble
    assert len(writer.record.fragments) == 1
    await writer.close()


@simulated
async def test_nobody_is_replaced_for_its_absence_while_autorecovery_is_off():
    cluster, ledgers = await cluster_of(4)
    writer = await idle_writer(cluster, ledgers)
    await change_settings(ledgers.metadata, enabled=False)
    await lose(cluster, writer.record.last_fragment.ensemble[0])
    await asyncio.sleep(10 * DELAY_S)
    assert len(writer.record.fragments) == 1
    await change_settings(ledgers.metadata, enabled=True)
    await asyncio.sleep(DELAY_S)
    assert len(writer.record.fragments) == 2


@simulated
async def test_a_writer_that_is_closed_leaves_nothing_that_watches():
    cluster, ledgers = await cluster_of(4)
    writer = await idle_writer(cluster, ledgers)
    await lose(cluster, writer.record.last_fragment.ensemble[2])
    await asyncio.sleep(1)
    await writer.close()
    await asyncio.sleep(1)
    names = [task.get_name() for task in asyncio.all_tasks()]
    assert not [name for name in names if name.startswith("absent members")]


async def drain(cluster, name):
    """As an operator and the bookie do."""
    await cluster.admin.create(paths.draining(name), parents=True)
    await cluster.readonly(name, "it is being drained")


@pytest.mark.parametrize("change", ["at-once", "delayed"])
@simulated
async def test_an_idle_writer_replaces_a_member_that_is_drained_soon(change):
    cluster, ledgers = await cluster_of(4, ensemble_change=change)
    writer = await idle_writer(cluster, ledgers)
    going = writer.record.last_fragment.ensemble[1]
    await drain(cluster, going)
    await asyncio.sleep(6)
    assert going not in writer.record.last_fragment.ensemble
    assert await writer.append([b"second"]) == 1
    await writer.close()


@simulated
async def test_an_idle_writer_leaves_a_member_that_is_read_only_until_it_is_drained():
    cluster, ledgers = await cluster_of(4)
    writer = await idle_writer(cluster, ledgers)
    full = writer.record.last_fragment.ensemble[1]
    await cluster.readonly(full, "its disk is full")
    await asyncio.sleep(10 * DELAY_S)
    assert len(writer.record.fragments) == 1
    await cluster.admin.create(paths.draining(full), parents=True)
    await asyncio.sleep(DELAY_S / 4 + 1)
    assert full not in writer.record.last_fragment.ensemble
    await writer.close()


@simulated
async def test_a_drained_member_without_a_spare_is_replaced_when_there_is_one_or_taken_back():
    cluster, ledgers = await cluster_of(3)
    writer = await idle_writer(cluster, ledgers)
    first, second, _ = writer.record.last_fragment.ensemble
    await drain(cluster, first)
    await asyncio.sleep(DELAY_S)
    assert len(writer.record.fragments) == 1
    await cluster.register("d")
    await asyncio.sleep(1)
    assert writer.record.last_fragment.ensemble[0] == "d"
    await drain(cluster, second)
    await asyncio.sleep(DELAY_S)
    await cluster.admin.delete(paths.draining(second))
    await cluster.admin.delete(f"{paths.BOOKIES_READONLY}/{second}")
    await cluster.register(second)
    await asyncio.sleep(1)
    await writer.append([b"second"])
    await asyncio.sleep(1)
    assert (writer.ledger_id, 1) in cluster.bookies[second].entries
    await writer.close()
