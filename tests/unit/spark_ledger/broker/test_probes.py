"""Whether another broker lives, and who asks."""

import asyncio

from spark_ledger.broker.log.probes import (
    FRESH_S,
    NEIGHBOURS_MAX,
    NEXT_S,
    PROBE_S,
    Heard,
    Probes,
    connects,
    neighbours,
)
from spark_ledger.broker.wire.commands import command
from spark_ledger.broker.wire.frames import encode
from tests.simulation.loop import current, run


class Asked:
    """Gives these answers, and counts."""

    def __init__(self, *heard):
        self.heard, self.times = list(heard), 0

    async def __call__(self, url):
        self.times += 1
        await asyncio.sleep(0.1)
        return self.heard.pop(0)


def test_one_missed_probe_is_forgiven_two_in_a_row_and_a_refusal_are_not():
    async def lives(*heard):
        return await Probes(Asked(*heard)).answers("pulsar://a:1")

    async def main():
        assert await lives(Heard.NOTHING, Heard.ANSWER)
        assert not await lives(Heard.NOTHING, Heard.NOTHING)
        assert not await lives(Heard.REFUSAL)

    run(main(), 0)


def test_a_broker_that_hangs_is_taken_for_dead_after_a_second_and_a_half():
    async def main():
        asked = []

        async def hung(url):
            asked.append(loop.time())
            await asyncio.sleep(PROBE_S)
            return Heard.NOTHING

        loop = asyncio.get_running_loop()
        assert not await Probes(hung).answers("u")
        assert asked == [0, NEXT_S]
        assert loop.time() == PROBE_S + NEXT_S

    run(main(), 0)


def test_who_stood_still_itself_gives_the_other_a_whole_probe_before_it_buries_it():
    async def main():
        async def slow(url):
            try:
                async with asyncio.timeout(PROBE_S):
                    await asyncio.sleep(0.9 * PROBE_S)
                    return Heard.ANSWER
            except TimeoutError:
                return Heard.NOTHING

        process = current().process("who asks")
        probing = process.spawn(Probes(slow).answers("u"))
        await asyncio.sleep(0.1)
        process.pause()
        await asyncio.sleep(1.5)
        process.resume()
        assert await probing

    run(main(), 0)


def test_a_broker_is_asked_once_however_many_want_to_know_and_again_after_a_while():
    async def main():
        asked = Asked(Heard.ANSWER, Heard.REFUSAL)
        probes = Probes(asked)
        assert all(await asyncio.gather(*(probes.answers("u") for _ in range(50))))
        assert await probes.answers("u")
        assert asked.times == 1
        await asyncio.sleep(FRESH_S)
        assert not await probes.answers("u")

    run(main(), 0)


def test_each_is_probed_by_a_few_and_by_one_at_least():
    brokers = [f"{i:02d}" for i in range(20)]
    asked = {one: neighbours(one, [b for b in brokers if b != one]) for one in brokers}
    for one in brokers:
        assert sum(one in some for some in asked.values()) == NEIGHBOURS_MAX
    assert neighbours("a", ["b"]) == ["b"]
    assert neighbours("a", []) == []


def test_a_broker_answers_by_its_loop_and_a_port_that_only_accepts_is_no_answer(monkeypatch):
    def given(probe_s):
        monkeypatch.setattr("spark_ledger.broker.log.probes.PROBE_S", probe_s)

    async def main():
        async def serve(reader, writer):
            await reader.read(1000)
            writer.write(encode(command("connected", server_version="x", protocol_version=20)))

        async def silent(reader, writer):
            await reader.read(-1)
            writer.close()

        for what, heard, probe_s in ((serve, Heard.ANSWER, 30), (silent, Heard.NOTHING, 0.3)):
            given(probe_s)
            server = await asyncio.start_server(what, "127.0.0.1", 0)
            port = server.sockets[0].getsockname()[1]
            assert await connects(f"pulsar://127.0.0.1:{port}") is heard
            server.close()
        given(30)
        assert await connects(f"pulsar://127.0.0.1:{port}") is Heard.REFUSAL

    asyncio.run(main())
