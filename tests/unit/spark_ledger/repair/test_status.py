"""How self-healing stands, and what an operator may change of it, against scripted bookies."""

import asyncio

import pytest

from spark_ledger.errors import BadConfig
from spark_ledger.metadata import autorecovery, paths
from spark_ledger.repair import status, work_list
from spark_ledger.repair.service import Autorecovery
from tests.unit.spark_ledger.ledger.fakes import cluster_of, simulated
from tests.unit.spark_ledger.repair.stage import gone, known, ledger_of

DELAY_S = 20.0


async def looks(healing, seconds):
    for _ in range(int(seconds)):
        await healing.look()
        await asyncio.sleep(1)


@simulated
async def test_status_tells_who_is_absent_since_when_then_lost_and_what_is_listed_for_it():
    cluster, ledgers = await cluster_of(4)
    await known(cluster, *"abcd")
    ledger_id = (await ledger_of(ledgers, 3)).ledger_id
    name = (await ledgers.record(ledger_id)).record.last_fragment.ensemble[0]
    assert (await status.status(ledgers.metadata)).auditor == ""
    await status.change_settings(ledgers.metadata, lost_bookie_delay_s=DELAY_S)
    healing = await Autorecovery.start(ledgers)
    await looks(healing, 2)
    await gone(cluster, name)
    await looks(healing, 5)
    first = await status.status(ledgers.metadata)
    assert first.auditor and list(first.down) == [name] and not first.lost
    await looks(healing, DELAY_S)
    now = await status.status(ledgers.metadata)
    assert (now.lost, now.down, now.alarm) == (first.down, {}, "")
    assert (now.under_replicated, now.by_reason) == (1, {"lost": 1})
    assert [work.ledger_id for work in await status.underreplicated(ledgers.metadata)] == [
        ledger_id
    ]


@simulated
async def test_too_many_are_an_alarm_until_they_are_accepted_and_that_holds_while_they_are_gone():
    cluster, ledgers = await cluster_of(4)
    await known(cluster, *"abcd")
    for _ in range(8):
        await ledger_of(ledgers, 1)
    await status.change_settings(ledgers.metadata, lost_bookie_delay_s=DELAY_S)
    healing = await Autorecovery.start(ledgers)
    await looks(healing, 2)
    await gone(cluster, "a", "b")
    await looks(healing, DELAY_S + 2)
    found = await status.status(ledgers.metadata)
    assert "--force" in found.alarm and set(found.lost) == {"a", "b"}
    assert await work_list.listed_ledgers(ledgers.metadata) == []
    naming = [(await ledgers.record(one)).record async for one in ledgers.list()]
    assert found.unlisted == sum(one.names("a") or one.names("b") for one in naming) > 0
    assert (await status.enable(ledgers.metadata, force=True)).accepted == ("a", "b")
    await looks(healing, 2)
    found = await status.status(ledgers.metadata)
    assert (found.alarm, found.accepted) == ("", ("a", "b"))
    assert found.under_replicated > 0 == found.unlisted
    await cluster.register("a")
    await looks(healing, 2)
    assert (await status.status(ledgers.metadata)).accepted == ("b",)


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"lost_bookie_delay_s": "0"}, "lost_bookie_delay_s = 0.0 is not between 0 and a year"),
        ({"lost_bookie_delay_s": "0.5"}, "0.5 is shorter than the restart of a bookie"),
        ({"lost_bookie_delay_s": "nan"}, "'nan' is not a number"),
        ({"lost_bookie_delay_s": "inf"}, "= inf is not between 0 and a year"),
        ({"lost_bookie_delay_s": None}, "= None is not a number"),
        ({"repair_bytes_per_s": "-1"}, "repair_bytes_per_s = -1 is below 0"),
        ({"repair_bytes_per_s": 1.5}, "1.5 is not a whole number"),
        ({"repair_bytes_per_s": True}, "True is not a whole number"),
        ({"delay": 5}, "no setting 'delay'. It has lost_bookie_delay_s and repair_bytes_per_s"),
    ],
)
@simulated
async def test_a_wrong_setting_is_refused_before_anything_is_written(given, said):
    _, ledgers = await cluster_of(3)
    with pytest.raises(BadConfig) as refused:
        await status.change_settings(ledgers.metadata, **{"repair_bytes_per_s": 7, **given})
    assert said in str(refused.value)
    assert await autorecovery.read_settings(ledgers.metadata) == autorecovery.AutorecoverySettings()


@simulated
async def test_damaged_settings_are_told_with_what_to_do():
    cluster, ledgers = await cluster_of(3)
    await cluster.admin.create(paths.AUTORECOVERY, b"{", parents=True)
    for call in (
        status.status(ledgers.metadata),
        status.change_settings(ledgers.metadata, enabled=False),
    ):
        with pytest.raises(BadConfig, match=r"cannot be read.*Delete the node /autorecovery"):
            await call
