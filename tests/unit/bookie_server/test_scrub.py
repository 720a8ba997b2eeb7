"""The scrub: rot is found entry by entry, slowly, and nothing else is disturbed."""

import asyncio

import pytest

from bookie_server.disk.interface import DiskFailed
from bookie_server.lanes import Pace
from bookie_server.logs.entry_log import log_path
from bookie_server.reclaim.compact import Compactor
from bookie_server.reclaim.scrub import Scrub
from tests.kit.settings import with_settings
from tests.simulation.loop import current, run
from tests.unit.bookie_server.log_store import ONE_LOG, SMALL_LOGS, LogStore

KIB = 1 << 10


async def three_logs():
    store = await LogStore().start()
    for ledger_id in (1, 2, 3):
        await store.flush(*((ledger_id, e) for e in range(ONE_LOG)))
    await store.fill(4, count=1)
    assert store.logs.sealed_ids() == [1, 2, 3]
    return store


def scrub_of(store, **settings):
    config = with_settings(SMALL_LOGS, **settings)
    return Scrub(lambda: [store], store.quarantine, config)


def test_whole_logs_are_read_once_and_nothing_is_quarantined():
    async def main():
        store = await three_logs()
        scrub = scrub_of(store)
        await scrub.once(0)
        assert store.quarantined == {}
        assert scrub.read_bytes >= 3 * ONE_LOG * 1112
        assert scrub.read_bytes < 4 * 64 * KIB

    run(main())


@pytest.mark.parametrize("where", [9, 300])
def test_a_bad_entry_is_quarantined_and_the_scrub_goes_on(where):
    async def main():
        store = await three_logs()
        for ledger_id in (1, 3):
            place = await store.index.get(ledger_id, 7)
            store.disk.flip_bit(log_path(place.log_id), 8 * (place.position + where))
        scrub = scrub_of(store)
        await scrub.once(0)
        assert sorted(store.quarantined) == [(1, 7), (3, 7)]
        assert scrub.bad_entries == 2

    run(main())


def test_zeroed_records_are_found_by_the_count_in_the_footer():
    async def main():
        store = await three_logs()
        inode = store.disk.inode_of(log_path(1))
        inode.cache[4096:8192] = bytes(4096)
        await scrub_of(store).once(0)
        assert sorted(store.quarantined) == [(1, e) for e in range(4)]

    run(main())


def test_what_is_bad_and_no_longer_wanted_is_nobodys_loss():
    async def main():
        store = await three_logs()
        place = await store.index.get(1, 7)
        store.disk.flip_bit(log_path(1), 8 * (place.position + 300))
        await store.flush((1, 7))
        await scrub_of(store).once(0)
        assert store.quarantined == {}

    run(main())


def test_bk2264_a_log_that_cannot_be_read_costs_its_entries_and_no_others():
    async def main():
        store = await three_logs()
        plain = store.disk.open

        async def refuse(path):
            if path == log_path(2):
                raise DiskFailed("EIO")
            return await plain(path)

        store.disk.open = refuse
        place = await store.index.get(3, 7)
        store.disk.flip_bit(log_path(3), 8 * (place.position + 300))
        await scrub_of(store).once(0)
        assert sorted(store.quarantined) == sorted([*((2, e) for e in range(ONE_LOG)), (3, 7)])

    run(main())


def test_a_log_that_is_compacted_away_meanwhile_is_let_go():
    async def main():
        store = await three_logs()
        await store.flush(*((1, e) for e in range(30)))
        store.disk.faults.read_s = (0.1, 0.1)
        scrubbing = asyncio.ensure_future(scrub_of(store, scrub_bytes_per_s=20 * KIB).once(0))
        await asyncio.sleep(0.15)
        await Compactor(store, store.quarantine, Pace(1 << 40)).compact(await store.map(1))
        await scrubbing
        assert store.quarantined == {}
        assert "1.log" not in store.names()

    run(main())


def test_a_log_that_goes_is_not_held_open_until_it_is_read(monkeypatch):
    monkeypatch.setattr("bookie_server.logs.scan.CHUNK_BYTES", 8 * KIB)

    async def main():
        store = await three_logs()
        scrub = scrub_of(store, scrub_bytes_per_s=8 * KIB)
        scrubbing = asyncio.ensure_future(scrub.once(0))
        await asyncio.sleep(2.5)
        await store.delete(1)
        await store.logs.remove(1)
        await asyncio.sleep(2)
        read_bytes = scrub.read_bytes
        assert read_bytes < 50 * KIB
        await scrubbing
        assert scrub.read_bytes < read_bytes + 160 * KIB, "logs 2 and 3"

    run(main())


def test_an_entry_that_moves_while_it_is_looked_at_is_not_taken_for_lost():
    async def main():
        store = await three_logs()
        store.disk.flip_bit(log_path(1), 8 * 5000)
        plain = store.logs.read

        async def read(places):
            found = await plain(places)
            await store.flush(*((1, e) for e in range(ONE_LOG)))
            return found

        store.logs.read = read
        await scrub_of(store).once(0)
        assert store.quarantined == {}

    run(main())


def test_it_reads_at_most_so_many_bytes_per_second():
    async def main():
        store = await three_logs()
        scrub = scrub_of(store, scrub_bytes_per_s=16 * KIB)
        began = current().time()
        await scrub.once(0)
        assert scrub.read_bytes / (current().time() - began) <= 17 * KIB

    run(main())


def test_a_pass_is_spread_over_its_interval():
    async def main():
        store = await three_logs()
        scrub = scrub_of(store, scrub_interval_s=10_000.0)
        scrubbing = asyncio.ensure_future(scrub.run())
        await asyncio.sleep(9_000)
        assert scrub.passes == 0
        await asyncio.sleep(2_000)
        assert scrub.passes == 1
        scrubbing.cancel()

    run(main(), time_max_s=100_000)


def test_a_node_without_logs_idles():
    async def main():
        store = await LogStore().start()
        scrubbing = asyncio.ensure_future(scrub_of(store).run())
        await asyncio.sleep(86_400)
        assert scrubbing.cancel()

    run(main(), time_max_s=100_000)


def test_a_log_of_bad_entries_is_told_of_in_one_line(caplog):
    async def main():
        store = await three_logs()
        inode = store.disk.inode_of(log_path(1))
        inode.cache[4096:32768] = bytes(32768 - 4096)
        await scrub_of(store).once(0)
        assert len(store.quarantined) > 20
        errors = [line for line in caplog.messages if "scrub" in line]
        assert len(errors) == 1
        assert f"{len(store.quarantined)} entries of 1 ledgers" in errors[0]

    run(main())


def test_a_log_that_is_not_there_is_noticed_though_nobody_reads_it(caplog):
    async def main():
        store = await three_logs()
        await store.flush((1, 0), (1, ONE_LOG - 1))  # its first and last entry lie elsewhere now
        await store.disk.remove(log_path(1))
        await store.crash("all")
        scrub = scrub_of(store)
        await scrub.find_missing()
        assert [ledger_id for ledger_id, _ in store.quarantined] == [1]
        assert [line for line in caplog.messages if "log 1 is not there: 1 ledgers" in line]
        assert len(caplog.messages) == 1

    run(main())


def test_where_all_logs_are_there_no_ledger_is_quarantined():
    async def main():
        store = await three_logs()
        await scrub_of(store).find_missing()
        assert store.quarantined == {}

    run(main())
