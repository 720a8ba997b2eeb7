"""The simulated world's own parts keep their promises; otherwise a clean run proves nothing."""

import asyncio
import random

import pytest

from bookie_server.disk.interface import DiskFailed, NoSuchFile
from bookie_server.logs.index import LedgerState, Location
from spark_ledger.bookies.bookie_client import CallFailed
from spark_ledger.metadata.chain import new_token
from tests.simulation.brokers.acked import Acked
from tests.simulation.disk import DiskFaults, SimDisk
from tests.simulation.index import SimIndex
from tests.simulation.loop import Deadlock, Livelock, RealWorld, current, run
from tests.simulation.network import NetworkFaults, SimNetwork

# -- loop --------------------------------------------------------------------------------------


def test_an_hour_of_sleep_takes_no_time_and_timers_fire_in_order():
    async def main() -> list[str]:
        seen: list[str] = []

        async def after(seconds: float, name: str) -> None:
            await asyncio.sleep(seconds)
            seen.append(name)

        await asyncio.gather(after(3600, "late"), after(1, "first"), after(1, "second"))
        assert current().time() == 3600
        return seen

    assert run(main()) == ["first", "second", "late"]


def test_a_run_in_which_nothing_can_happen_any_more_is_a_deadlock():
    async def main() -> None:
        await asyncio.get_running_loop().create_future()

    with pytest.raises(Deadlock, match="main"):
        run(main())


def test_a_run_that_never_ends_is_a_livelock():
    async def main() -> None:
        for _ in range(1000):
            await asyncio.sleep(1)

    with pytest.raises(Livelock):
        run(main(), time_max_s=100)


def test_tokens_that_the_product_draws_are_the_same_each_time_a_seed_is_run():
    async def main() -> list[str]:
        return [new_token(), new_token()]

    first, again, other = run(main(), 7), run(main(), 7), run(main(), 8)
    assert first == again
    assert len({*first, *other, new_token()}) == 5


def test_threads_are_refused():
    async def main() -> None:
        await asyncio.to_thread(print)

    with pytest.raises(RealWorld):
        run(main())


def test_time_outs_and_cancellation_work_in_simulated_time():
    async def main() -> None:
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(5):
                await asyncio.sleep(6)
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(asyncio.sleep(10), 1)
        assert current().time() == 6

    run(main())


def test_a_callback_that_raises_fails_the_run():
    async def main() -> None:
        asyncio.get_running_loop().call_soon(lambda: 1 / 0)
        await asyncio.sleep(1)

    with pytest.raises(AssertionError, match="ZeroDivisionError"):
        run(main())


def test_a_killed_process_ends_with_all_the_tasks_it_made():
    async def main() -> None:
        process = current().process("victim")
        steps: list[int] = []

        async def forever() -> None:
            while True:
                await asyncio.sleep(1)
                steps.append(1)

        async def parent() -> None:
            asyncio.create_task(forever()).add_done_callback(lambda _: None)
            await forever()

        task = process.spawn(parent())
        await asyncio.sleep(3.5)
        process.kill()
        await asyncio.sleep(10)
        assert len(steps) == 6
        assert task.cancelled()
        assert not [name for name in current().waiting() if "forever" in name]

    run(main())


def test_a_clock_that_jumps_fires_the_timers_of_its_process_early_and_of_no_other():
    async def main() -> None:
        jumper, other = current().process("jumper"), current().process("other")
        seen: list[tuple[str, float, float]] = []

        async def sleeper(name: str) -> None:
            loop = asyncio.get_running_loop()
            begun = loop.time()
            await asyncio.sleep(20)
            seen.append((name, loop.time() - begun, current().now))
            with pytest.raises(TimeoutError):
                async with asyncio.timeout(5):
                    await asyncio.sleep(60)
            seen.append((name, loop.time() - begun, current().now))

        tasks = [jumper.spawn(sleeper("jumper")), other.spawn(sleeper("other"))]
        await asyncio.sleep(1)
        jumper.jump(15)
        await asyncio.gather(*tasks)
        assert [name for name, *_ in seen] == ["jumper", "jumper", "other", "other"]
        assert [then for *_, then in seen] == pytest.approx([5, 10, 20, 25])
        assert [took for _, took, _ in seen] == pytest.approx([20, 25, 20, 25])

    run(main())


# -- disk --------------------------------------------------------------------------------------


def test_what_was_synced_survives_the_worst_crash_and_the_rest_does_not():
    async def main() -> None:
        disk = SimDisk()
        file = await disk.create("a")
        await disk.sync_dir()
        assert await file.append([b"kept", b"!"], sync=True) == 0
        assert await file.append([b"lost"]) == 5
        assert await file.read(0, 100) == b"kept!lost"
        disk.crash("none")
        with pytest.raises(DiskFailed):
            await file.read(0, 1)
        again = await disk.open("a")
        assert await again.read(0, 100) == b"kept!"
        assert again.end == 5

    run(main())


def test_a_write_under_way_at_a_crash_is_whole_gone_or_torn_at_a_sector():
    outcomes = {"whole": 0, "gone": 0, "torn": 0}

    async def main(seed: int) -> None:
        disk = SimDisk(random.Random(seed))
        file = await disk.create("a")
        await disk.sync_dir()
        data = b"x" * 10_000
        await file.append([data])
        disk.crash()
        left = disk.content("a")
        if left == data:
            outcomes["whole"] += 1
        elif not left:
            outcomes["gone"] += 1
        else:
            outcomes["torn"] += 1
            assert len(left) % 512 == 0 or len(left) == len(data)

    for seed in range(50):
        run(main(seed))
    assert min(outcomes.values()) > 3


def test_a_name_is_durable_only_after_the_sync_of_its_folder():
    async def main() -> None:
        disk = SimDisk()
        await disk.make_folder("f")
        await (await disk.create("f/a")).append([b"a"], sync=True)
        disk.crash("none")
        with pytest.raises(NoSuchFile):
            await disk.open("f/a")
        await (await disk.create("f/a")).append([b"a"], sync=True)
        await disk.sync_dir("f")
        await disk.rename("f/a", "f/b")
        assert await disk.list("f") == ["b"]
        disk.crash("none")
        assert await disk.list("f") == ["a"]

    run(main())


def test_a_failed_sync_is_final_for_its_file_and_makes_nothing_durable():
    async def main() -> None:
        disk = SimDisk(faults=DiskFaults(sync_fails=1))
        file = await disk.create("a")
        with pytest.raises(DiskFailed, match="EIO"):
            await file.append([b"x"], sync=True)
        with pytest.raises(DiskFailed):
            await file.sync()
        assert disk.durable("a") == b""

    run(main())


def test_a_full_disk_refuses_appends_and_reserved_space_reads_as_zeros():
    async def main() -> None:
        disk = SimDisk(faults=DiskFaults(bytes_max=100))
        file = await disk.create("a", reserve_bytes=64)
        await file.append([b"abc"], sync=True)
        assert file.end == 3
        assert (await disk.open("a")).end == 64
        assert await file.read(0, 100) == b"abc" + bytes(61)
        with pytest.raises(DiskFailed, match="ENOSPC"):
            await (await disk.create("b")).append([bytes(40)])

    run(main())


def test_what_was_reserved_can_be_written_on_a_full_disk():
    async def main() -> None:
        disk = SimDisk()
        file = await disk.create("a", reserve_bytes=64)
        disk.fill_up(10)
        await file.append([bytes(60)], sync=True)
        with pytest.raises(DiskFailed, match="ENOSPC"):
            await disk.create("b", reserve_bytes=20)
        with pytest.raises(DiskFailed, match="ENOSPC"):
            await file.append([bytes(60)], sync=True)

    run(main())


# -- index -------------------------------------------------------------------------------------


def test_the_index_finds_again_after_a_crash_what_was_synced():
    async def main() -> None:
        disk = SimDisk()
        index = await SimIndex.open(disk)
        await index.put([Location(1, entry, 0, entry * 100, 100) for entry in (3, 1, 2)])
        await index.put_ledgers([LedgerState(1, fenced=True)])
        await index.sync()
        await index.put([Location(1, 9, 0, 900, 100)])
        late = asyncio.create_task(index.sync())
        await asyncio.sleep(0)
        disk.crash("none")
        late.cancel()
        index = await SimIndex.open(disk)
        assert [found.entry_id for found in await index.range(1, 0, 99, 1 << 20)] == [1, 2, 3]
        assert [found.entry_id for found in await index.range(1, 2, 99, 1)] == [2]
        assert await index.last(1) == 3
        assert await index.get(1, 9) is None
        assert await index.ledgers() == [LedgerState(1, fenced=True)]

    run(main())


def test_rot_in_the_index_is_an_error_and_never_an_absence():
    async def main() -> None:
        disk = SimDisk()
        index = await SimIndex.open(disk)
        for entry in range(5):
            await index.put([Location(1, entry, 0, entry * 100, 100)])
            await index.sync()
        disk.flip_bit("index/00000000", 1000)
        with pytest.raises(DiskFailed, match="corruption"):
            await index.get(1, 0)
        disk.crash("none")
        with pytest.raises(DiskFailed, match="corruption"):
            await SimIndex.open(disk)

    run(main())


# -- network -----------------------------------------------------------------------------------


async def _echo(method: str, request: bytes) -> bytes:
    await asyncio.sleep(0.001)
    return method.encode() + request


def test_a_call_brings_the_answer_and_a_cut_only_a_time_out():
    async def main() -> None:
        network = SimNetwork()
        network.serve("b:1", _echo)
        client = network.client("c")
        assert await client.call("b:1", "Add", [b"1"], 5) == b"Add1"
        network.cut("c", "b:1")
        begun = current().time()
        with pytest.raises(CallFailed):
            await client.call("b:1", "Add", [b"2"], 5)
        assert current().time() - begun == pytest.approx(5)
        network.heal()
        assert await client.call("b:1", "Add", [b"3"], 5) == b"Add3"
        with pytest.raises(CallFailed, match="refused"):
            await client.call("b:2", "Add", [b""], 5)

    run(main())


def test_a_lost_answer_leaves_the_request_carried_out():
    async def main() -> None:
        network = SimNetwork()
        carried_out: list[bytes] = []

        async def keep(method: str, request: bytes) -> bytes:
            carried_out.append(request)
            return b""

        network.serve("b:1", keep)
        network.cut("b:1", "c")
        with pytest.raises(CallFailed):
            await network.client("c").call("b:1", "Add", [b"x"], 1)
        assert carried_out == [b"x"]

    run(main())


def test_calls_to_a_killed_server_fail_and_its_work_stops():
    async def main() -> None:
        network = SimNetwork()
        process = current().process("server")
        ended: list[int] = []

        async def slow(method: str, request: bytes) -> bytes:
            await asyncio.sleep(3)
            ended.append(1)
            return b""

        network.serve("b:1", slow, process)
        call = asyncio.create_task(network.client("c").call("b:1", "Add", [b""], 60))
        await asyncio.sleep(1)
        network.down("b:1")
        process.kill()
        with pytest.raises(CallFailed):
            await call
        await asyncio.sleep(10)
        assert not ended
        assert not network.defects

    run(main())


def test_a_clogged_way_delivers_nothing_and_then_everything_at_once():
    async def main() -> None:
        network = SimNetwork()
        arrived: list[tuple[bytes, float]] = []

        async def note(method: str, request: bytes) -> bytes:
            arrived.append((request, current().time()))
            return b"done"

        network.serve("b:1", note)
        client = network.client("c")
        network.clog("c", "b:1")
        calls = [asyncio.create_task(client.call("b:1", "Add", [b"%d" % n], 20)) for n in range(3)]
        await asyncio.sleep(7)
        assert arrived == []
        network.unclog("c", "b:1")
        assert await asyncio.gather(*calls) == [b"done"] * 3
        assert arrived == [(b"0", 7.0), (b"1", 7.0), (b"2", 7.0)]

    run(main())


def test_a_slow_receiver_carries_everything_out_late_even_what_nobody_waits_for():
    async def main() -> None:
        network = SimNetwork()
        arrived: list[float] = []

        async def note(method: str, request: bytes) -> bytes:
            arrived.append(current().time())
            return b""

        network.serve("b:1", note)
        network.slow_down("b:1", (3.0, 3.0))
        with pytest.raises(CallFailed):
            await network.client("c").call("b:1", "Add", [b""], 1)
        assert not arrived
        await asyncio.sleep(5)
        assert arrived == [pytest.approx(3.0, abs=0.01)]

    run(main())


def test_a_late_duplicate_reaches_whoever_serves_the_address_then():
    async def main() -> None:
        network = SimNetwork(faults=NetworkFaults(duplicate=1.0, late=1.0, late_s=(9.0, 9.0)))
        met: list[str] = []

        async def first(method: str, request: bytes) -> bytes:
            met.append("first")
            return b""

        async def second(method: str, request: bytes) -> bytes:
            met.append("second")
            return b""

        network.serve("b:1", first)
        await network.client("c").call("b:1", "Add", [b""], 1)
        network.down("b:1")
        network.serve("b:1", second)
        await asyncio.sleep(10)
        assert met == ["first", "second"]

    run(main())


def test_a_request_gone_astray_is_carried_out_by_another_address():
    async def main() -> None:
        network = SimNetwork(random.Random(1), NetworkFaults(astray=1.0))
        met: list[str] = []
        for address in ("a:1", "b:1", "c:1"):

            async def serve(method: str, request: bytes, address: str = address) -> bytes:
                met.append(address)
                return b""

            network.serve(address, serve)
        for _ in range(20):
            await network.client("c").call("b:1", "Add", [b""], 1)
        assert sorted({*met}) == ["a:1", "b:1", "c:1"]

    run(main())


# -- what is known of a subscription ---------------------------------------------------------


def test_a_move_that_keeps_acknowledgements_leaves_an_unknown_position_unknown():
    acked = Acked()
    acked.asks(1.0)
    acked.unanswered()
    acked.asks(2.0, keeps=True)
    acked.answered(3.0, 5, 5)
    assert not acked.sure and not acked.asking, "a reset may have forgotten what is beyond"
    acked.asks(4.0)
    acked.answered(5.0, 7, 7)
    assert acked.sure and acked.left_out(0, 9) == [7, 8]
    acked.asks(6.0, keeps=True)
    acked.answered(7.0, 8, 8)
    assert acked.sure and acked.left_out(0, 9) == [8]
