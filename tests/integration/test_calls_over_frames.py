"""A bookie behind frames on a real socket: calls, streams, what is left of callers that went away,
what is done about those that send nonsense or take nothing. The bookie's disks are simulated; the
loop and the network are not."""

import asyncio
import socket

import pytest

from bookie_server.api import codec, frames
from bookie_server.api import messages as m
from bookie_server.api.frames import FrameKind, pack_head
from bookie_server.api.status import Status, StopReason
from bookie_server.serve import frames as frame_service
from bookie_server.serve.frames import FrameService
from bookie_server.serve.gateway import CannotListen
from bookie_server.serve.handler import REQUEST_OVERHEAD_BYTES
from spark_ledger.bookies.bookie_client import CallFailed, TooLate
from spark_ledger.bookies.frame_network import FrameNetwork, NotConnected
from tests.kit.settings import with_settings
from tests.kit.waiting import until
from tests.unit.bookie_server.node import CONFIG, ID, KIB, Node, entry

PATIENCE_S = 20
POLLS = 200
ADD = frames.METHOD_NUMBERS["Add"]


class Rig:
    def __init__(self, node, service, address):
        self.node, self.service, self.address = node, service, address
        self.bookie = node.bookie
        self.network = FrameNetwork()

    async def ask(self, method, request, timeout_s=PATIENCE_S):
        data = await self.network.call(self.address, method, [codec.encode(request)], timeout_s)
        return codec.decode_response(method, data)

    def poll(self):
        request = m.ReadLacRequest(ID, 1, previous_lac=9, wait_ms=60_000)
        return asyncio.ensure_future(self.ask("ReadLac", request))

    async def raw(self):
        """A connection that says what the test says, after the bookie's HELLO."""
        host, port = self.address.split(":")
        reader, writer = await asyncio.open_connection(host, int(port))
        assert await reader.readexactly(16) == pack_head(FrameKind.HELLO)
        return reader, writer

    async def nothing_is_left(self):
        await until(lambda: self.bookie.under_way == 0)
        await until(lambda: self.bookie.received.used == 0)
        await until(lambda: self.bookie.responses.used == 0)


def over_frames(test, config=CONFIG):
    async def main():
        node = await Node(config).start()
        await node.create_ledger(1)
        await node.add(*[entry(1, e, bytes(60 * KIB)) for e in range(3)])
        service = FrameService(node.bookie, 32 << 20)
        rig = Rig(node, service, f"127.0.0.1:{await service.start('127.0.0.1:0')}")
        try:
            await test(rig)
            await rig.nothing_is_left()
        finally:
            await rig.network.close()
            await service.stop(0)
            node.bookie.abandon()

    asyncio.run(main())


def test_adds_and_reads_are_answered():
    async def test(rig):
        added = await rig.ask("Add", m.AddRequest(ID, [m.Add([entry(1, 3, bytes(50 * KIB))])]))
        assert [result.status for result in added.results] == [Status.OK]
        read = await rig.ask("Read", m.ReadRequest(ID, 1, 3, 3, 1 << 20))
        assert bytes(read.results[0].entry) == entry(1, 3, bytes(50 * KIB))
        assert (await rig.ask("Info", m.InfoRequest())).bookie_id == ID

    over_frames(test)


def test_many_calls_are_under_way_on_one_connection_and_answered_in_any_order():
    async def test(rig):
        polls = [rig.poll() for _ in range(POLLS)]
        await until(lambda: rig.bookie.long_polls == POLLS)
        assert len(rig.service.connections) == 1
        assert (await rig.ask("ReadLac", m.ReadLacRequest(ID, 1))).status is Status.OK
        await rig.node.add(entry(1, 3, lac=10))
        answers = await asyncio.gather(*polls)
        assert [answer.last_add_confirmed for answer in answers] == [10] * POLLS

    over_frames(test)


@pytest.mark.parametrize("how", ["cancelled", "too late", "disconnected"])
def test_long_polls_cost_no_thread_and_leave_nothing_when_their_caller_goes_away(how):
    async def test(rig):
        handle = await rig.bookie.ledgers.meet(1)
        polls = [rig.poll() for _ in range(POLLS)]
        await until(lambda: rig.bookie.long_polls == POLLS)
        assert handle.waiter_count == POLLS
        if how == "cancelled":
            for poll in polls:
                poll.cancel()
        elif how == "disconnected":
            await rig.network.close()
        else:
            request = m.ReadLacRequest(ID, 1, previous_lac=9, wait_ms=60_000)
            with pytest.raises(TooLate):
                await rig.ask("ReadLac", request, 0.1)  # hears nothing: gives the connection up
        await until(lambda: rig.bookie.long_polls == 0)
        assert handle.waiter_count == 0
        failed = await asyncio.gather(*polls, return_exceptions=True)
        assert {type(each) for each in failed} <= {CallFailed, asyncio.CancelledError}

    over_frames(test)


def test_a_stream_sends_what_credit_allows_and_ends():
    async def test(rig):
        stream = rig.network.stream(rig.address, "ReadStream")
        asked = m.ReadRequest(ID, 1, 0, 2, 60 * KIB + 64)
        await stream.send(codec.encode(m.ReadStreamRequest(asked, 1)))
        first = codec.decode_response("Read", await stream.receive(PATIENCE_S))
        assert (len(first.results), first.stop) == (1, StopReason.BYTE_LIMIT)
        with pytest.raises(TooLate):
            await stream.receive(0.1)
        stream = rig.network.stream(rig.address, "ReadStream")
        await stream.send(codec.encode(m.ReadStreamRequest(asked, 1)))
        found = [codec.decode_response("Read", await stream.receive(PATIENCE_S))]
        while found[-1].stop is not StopReason.END_OF_RANGE:
            await stream.send(codec.encode(m.ReadStreamRequest(credit_bytes=100 * KIB)))
            found.append(codec.decode_response("Read", await stream.receive(PATIENCE_S)))
        entries = [bytes(result.entry) for each in found for result in each.results]
        assert entries == [entry(1, e, bytes(60 * KIB)) for e in range(3)]
        stream.give_up()

    over_frames(test)


def test_a_stream_whose_connection_is_lost_has_failed():
    async def test(rig):
        stream = rig.network.stream(rig.address, "ReadStream")
        asked = m.ReadRequest(ID, 1, 0, 2, 60 * KIB + 64)
        await stream.send(codec.encode(m.ReadStreamRequest(asked, 1)))
        await stream.receive(PATIENCE_S)
        next(iter(rig.service.connections)).connection.close()
        with pytest.raises(CallFailed):
            await stream.receive(PATIENCE_S)
        with pytest.raises(CallFailed):
            await stream.send(codec.encode(m.ReadStreamRequest(credit_bytes=1)))

    over_frames(test)


# -- budgets -----------------------------------------------------------------------------------


def test_a_request_counts_from_its_head_on_and_no_more_when_its_caller_goes_away():
    async def test(rig):
        _, writer = await rig.raw()
        writer.write(pack_head(FrameKind.CALL, 1, 100 * KIB, ADD) + bytes(30 * KIB))
        await until(lambda: rig.bookie.received.used == 100 * KIB + REQUEST_OVERHEAD_BYTES)
        writer.close()

    over_frames(test)


def test_what_there_is_no_room_for_is_busy_and_not_kept_but_recovery_has_a_reserve():
    config = with_settings(CONFIG, receive_bytes_max=160 * KIB)

    async def test(rig):
        _, writer = await rig.raw()
        writer.write(pack_head(FrameKind.CALL, 1, 150 * KIB, ADD))
        await until(lambda: rig.bookie.received.used > 150 * KIB)
        counted = rig.bookie.received.used
        reader, other = await rig.raw()
        info = pack_head(FrameKind.CALL, 2, 0, frames.METHOD_NUMBERS["Info"])
        other.write(pack_head(FrameKind.CALL, 1, 100 * KIB, ADD) + bytes(100 * KIB) + info)
        head = frames.unpack_head(await reader.readexactly(16), 0, 1000)
        assert (head.kind, head.call) == (FrameKind.BUSY, 1)
        other.write(pack_head(FrameKind.CALL, 3, 100 * KIB, ADD) + bytes(90 * KIB))
        await reader.readexactly(4 + 16)  # Info is answered, so the head before it was seen
        assert rig.bookie.received.used == counted
        other.close()
        adds = [m.Add([entry(1, e, bytes(30 * KIB))]) for e in (3, 4)]
        answer = await rig.ask("Add", m.AddRequest(ID, adds))
        assert [result.status for result in answer.results] == [Status.BUSY] * 2
        assert answer.results[0].retry_after_ms > 0
        read = await rig.ask("Read", m.ReadRequest(ID, 1, 0, 0, 1, token=b"t" * 100 * KIB))
        assert read.status is Status.BUSY
        recovery = [each._replace(recovery=True) for each in adds[:1]]
        answer = await rig.ask("Add", m.AddRequest(ID, recovery))
        assert [result.status for result in answer.results] == [Status.OK]
        assert (await rig.ask("Info", m.InfoRequest())).status is Status.OK
        writer.close()

    over_frames(test, config)


def test_calls_beyond_their_number_on_a_connection_are_busy(monkeypatch):
    monkeypatch.setattr(frame_service, "CALLS_MAX", 3)

    async def test(rig):
        polls = [rig.poll() for _ in range(3)]
        await until(lambda: rig.bookie.long_polls == 3)
        assert (await rig.ask("ReadLac", m.ReadLacRequest(ID, 1))).status is Status.BUSY
        assert (await rig.ask("Info", m.InfoRequest())).status is Status.OK
        for poll in polls:
            poll.cancel()

    over_frames(test)


def test_replies_count_until_the_caller_takes_them_and_then_he_is_heard_again(monkeypatch):
    monkeypatch.setattr(frame_service, "UNSENT_BYTES_MAX", 100 * KIB)
    config = with_settings(CONFIG, read_pending_bytes_max=64 << 20)

    async def test(rig):
        loop = asyncio.get_running_loop()
        read = codec.encode(m.ReadRequest(ID, 1, 0, 2, 1 << 20))
        host, port = rig.address.split(":")
        with socket.socket() as sock:
            sock.setblocking(False)
            await loop.sock_connect(sock, (host, int(port)))
            await until(lambda: rig.service.connections)
            (caller,) = rig.service.connections
            asked = 0
            while caller.connection.unsent_bytes <= 100 * KIB:
                asked += 1
                head = pack_head(FrameKind.CALL, asked, len(read), frames.METHOD_NUMBERS["Read"])
                await loop.sock_sendall(sock, head + read)
                await asyncio.sleep(0.001)
            assert rig.bookie.responses.used >= 60 * KIB
            taken = 0
            while taken < 16 + asked * 60 * KIB:
                taken += len(await loop.sock_recv(sock, 1 << 20))
            await until(lambda: rig.bookie.responses.used == 0)
            await loop.sock_sendall(sock, head + read)
            async with asyncio.timeout(10):
                assert await loop.sock_recv(sock, 1)

    over_frames(test, config)


def test_who_takes_nothing_for_too_long_is_cut_off(monkeypatch):
    monkeypatch.setattr("bookie_server.api.frames.STUCK_S", 0.3)

    async def test(rig):
        read = codec.encode(m.ReadRequest(ID, 1, 0, 2, 1 << 20))
        head = pack_head(FrameKind.CALL, 1, len(read), frames.METHOD_NUMBERS["Read"])
        _, writer = await rig.raw()
        writer.transport.pause_reading()
        (caller,) = rig.service.connections
        while not caller.connection.unsent_bytes:
            writer.write(head + read)
            await asyncio.sleep(0.001)
        await until(lambda: not rig.service.connections)
        writer.close()

    over_frames(test)


# -- nonsense ----------------------------------------------------------------------------------


NONSENSE = {
    "garbage": b"GET / HTTP/1.1\r\nHost: bookie\r\n\r\n",
    "another version": b"SLF1\x02" + bytes(11),
    "too long": pack_head(FrameKind.CALL, 1, 33 << 20, ADD),
    "what a bookie says": pack_head(FrameKind.HELLO),
    "an answer": pack_head(FrameKind.ANSWER, 1, 3) + b"abc",
    "one number twice": 2 * (pack_head(FrameKind.CALL, 7, 0, frames.METHOD_NUMBERS["Read"]))
    + bytes(16),
}


@pytest.mark.parametrize("data", NONSENSE.values(), ids=NONSENSE)
def test_who_sends_nonsense_is_cut_off_and_nobody_else(data):
    async def test(rig):
        await rig.ask("Info", m.InfoRequest())
        reader, writer = await rig.raw()
        writer.write(data)
        await asyncio.wait_for(reader.read(), PATIENCE_S)  # to its end
        writer.close()
        assert len(rig.service.connections) == 1
        assert (await rig.ask("ReadLac", m.ReadLacRequest(ID, 1))).status is Status.OK

    over_frames(test)


def test_bytes_that_are_no_message_are_a_bad_request_and_other_calls_go_on():
    async def test(rig):
        data = await rig.network.call(rig.address, "Read", [b"\xff\xff\xff"], PATIENCE_S)
        assert codec.decode_response("Read", data).status is Status.BAD_REQUEST
        reader, writer = await rig.raw()
        writer.write(pack_head(FrameKind.CALL, 5, 3, 99) + b"abc")
        head = frames.unpack_head(await reader.readexactly(16), 0, 1000)
        assert (head.kind, head.call) == (FrameKind.REFUSED, 5)
        writer.close()

    over_frames(test)


def test_half_a_frame_and_then_nothing_holds_up_nobody_else():
    async def test(rig):
        _, writer = await rig.raw()
        writer.write(pack_head(FrameKind.CALL, 1, 50 * KIB, ADD)[:9])
        assert (await rig.ask("ReadLac", m.ReadLacRequest(ID, 1))).status is Status.OK
        writer.write_eof()
        await until(lambda: len(rig.service.connections) == 1)
        writer.close()

    over_frames(test)


# -- beginning and end --------------------------------------------------------------------------


def test_before_the_bookie_is_ready_info_says_so_and_everything_else_is_refused():
    async def test(rig):
        service = FrameService(None, 32 << 20)
        port = await service.start("127.0.0.1:0")
        rig.address = f"127.0.0.1:{port}"
        assert (await rig.ask("Info", m.InfoRequest())).state == "starting"
        with pytest.raises(CallFailed, match="starting"):
            await rig.ask("ReadLac", m.ReadLacRequest(ID, 1))
        service.serve(rig.bookie)
        assert (await rig.ask("ReadLac", m.ReadLacRequest(ID, 1))).status is Status.OK
        await service.stop(0)

    over_frames(test)


def test_a_request_under_way_when_the_service_stops_gets_its_answer():
    async def test(rig):
        rig.node.journal_disk.faults.sync_s = (0.5, 0.5)
        adding = asyncio.ensure_future(rig.ask("Add", m.AddRequest(ID, [m.Add([entry(1, 3)])])))
        polling = rig.poll()
        await until(lambda: rig.bookie.under_way == 2)
        stopping = asyncio.ensure_future(rig.bookie.stop())
        await rig.service.stop(PATIENCE_S)
        await stopping
        assert (await adding).results[0].status is Status.OK
        assert (await polling).status is Status.OK
        with pytest.raises(NotConnected):
            await rig.ask("Info", m.InfoRequest())

    over_frames(test)


def test_a_stop_waits_no_longer_than_it_may():
    async def test(rig):
        polling = rig.poll()
        await until(lambda: rig.bookie.long_polls == 1)
        await rig.service.stop(0.1)
        with pytest.raises(CallFailed):
            await polling

    over_frames(test)


def test_an_address_that_is_taken_is_an_error():
    async def test(rig):
        for listen in (rig.address, "no.such.host.invalid:0"):
            with pytest.raises(CannotListen):
                await FrameService(None, 1000).start(listen)

    over_frames(test)


def test_a_caller_that_connects_to_something_else_gives_up():
    async def test(rig):
        network = FrameNetwork(connect_s=0.2)

        async def babble(_, writer):
            writer.write(b"220 mail.example.org ESMTP\r\n")

        for talk in (babble, lambda *_: asyncio.sleep(60)):
            server = await asyncio.start_server(talk, "127.0.0.1", 0)
            address = f"127.0.0.1:{server.sockets[0].getsockname()[1]}"
            with pytest.raises(NotConnected):
                await network.call(address, "Info", [b""], PATIENCE_S)
            server.close()

    over_frames(test)
