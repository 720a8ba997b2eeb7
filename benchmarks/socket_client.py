"""Many consumers on one connection to a broker, each asked for by its own request.

Always true: a request has one outcome, the broker's response or RuntimeError with its error; PING
is answered; messages of a consumer go to its `on_message`, with their batches.
"""

import asyncio
from collections.abc import Callable, Sequence
from itertools import count
from typing import Any

from spark_ledger.broker.wire.commands import BaseCommand, command
from spark_ledger.broker.wire.frames import PulsarFrameReader, encode

OnMessage = Callable[[Any, bytes], None]
ERRORS = ("error", "send_error")


class SocketClient:
    """Made by `connected`."""

    on_end: Callable[[], None] | None = None
    """Called when the broker ends the connection, or closes a consumer."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader, self._writer = reader, writer
        self._requests = count(1)
        self._waiting: dict[int, asyncio.Future[BaseCommand]] = {}
        self._consumers: dict[int, OnMessage] = {}
        self._receipts: dict[int, asyncio.Future[None]] = {}
        self.is_closed = False
        self.closed_consumers: set[int] = set()
        self._connected = asyncio.get_running_loop().create_future()
        self._task = asyncio.get_running_loop().create_task(self._receive())

    @staticmethod
    async def connected(url: str) -> "SocketClient":
        """Raises OSError."""
        host, _, port = url.removeprefix("pulsar://").rpartition(":")
        made = SocketClient(*await asyncio.open_connection(host, int(port)))
        made.send(command("connect", client_version="benchmark", protocol_version=19))
        await made._connected
        return made

    def send(self, asked: BaseCommand, batch: bytes = b"") -> None:
        self._writer.write(encode(asked, batch))

    async def ask(self, name: str, **fields: Any) -> BaseCommand:
        """The response to a request. Raises RuntimeError, OSError."""
        if self.is_closed:
            raise ConnectionError("the connection is closed")
        request = next(self._requests)
        future = self._waiting[request] = asyncio.get_running_loop().create_future()
        self.send(command(name, request_id=request, **fields))
        await self._writer.drain()
        return await future

    async def look_up(self, topic: str) -> str:
        """The URL of the topic's broker."""
        response = await self.ask("lookup", topic=topic, authoritative=True)
        lookup = response.lookup_response
        if lookup.response == 2:
            raise RuntimeError(lookup.message)
        return str(lookup.brokerServiceUrl)

    async def subscribe(
        self, topic: str, name: str, number: int, on_message: OnMessage, permits: int, **fields: Any
    ) -> None:
        """A consumer with that number, which begins at the earliest message."""
        self._consumers[number] = on_message
        self.closed_consumers.discard(number)
        asked = {"subType": 0, "durable": True, "initialPosition": 1} | fields
        await self.ask("subscribe", topic=topic, subscription=name, consumer_id=number, **asked)
        if permits:
            self.send(command("flow", consumer_id=number, messagePermits=permits))

    async def close_consumer(self, number: int) -> None:
        await self.ask("close_consumer", consumer_id=number)
        self._consumers.pop(number, None)

    async def acknowledge(self, number: int, ids: list[Any]) -> None:
        """One by one; durable when this returns."""
        await self.ask("ack", consumer_id=number, ack_type=0, message_id=ids)

    async def produce(
        self, topic: str, number: int, messages: int, batches: Sequence[bytes]
    ) -> None:
        """So many lone messages, these in turn, each with its receipt when this returns."""
        await self.ask("producer", topic=topic, producer_id=number)
        loop = asyncio.get_running_loop()
        waits = []
        for sequence in range(messages):
            wait = self._receipts[number << 32 | sequence] = loop.create_future()
            waits.append(wait)
            self.send(
                command("send", producer_id=number, sequence_id=sequence, num_messages=1),
                batches[sequence % len(batches)],
            )
            if not len(waits) % 1000:
                await self._writer.drain()
                await waits[len(waits) - 1000]
        await asyncio.gather(*waits)
        await self.ask("close_producer", producer_id=number)

    async def close(self) -> None:
        self._task.cancel()
        self._writer.close()
        self._end()

    def _end(self) -> None:
        self.is_closed = True
        if self.on_end is not None:
            self.on_end()
        for future in (*self._waiting.values(), *self._receipts.values()):
            if not future.done():
                future.set_exception(ConnectionError("the connection is closed"))
                future.exception()
        self._waiting.clear()
        self._receipts.clear()

    async def _receive(self) -> None:
        frames = PulsarFrameReader()
        try:
            while data := await self._reader.read(1 << 20):
                for frame in frames.feed(data):
                    self._handle(frame.command, frame.batch or b"")
        except OSError:
            pass
        self._end()

    def _handle(self, received: BaseCommand, batch: bytes) -> None:
        field = received.ListFields()[-1][0].name
        part: Any = getattr(received, field)
        if field == "message":
            self._consumers[part.consumer_id](part, batch)
        elif field == "ping":
            self.send(command("pong"))
        elif field == "connected":
            if not self._connected.done():
                self._connected.set_result(None)
        elif field == "send_receipt":
            self._receipts.pop(part.producer_id << 32 | part.sequence_id).set_result(None)
        elif field == "close_consumer":
            self.closed_consumers.add(part.consumer_id)
            if self.on_end is not None:
                self.on_end()
        elif (future := self._waiting.pop(getattr(part, "request_id", 0), None)) is not None:
            error = getattr(part, "message", "") if field in ERRORS else ""
            error = error or (field == "ack_response" and part.message) or ""
            if field in ERRORS or error:
                future.set_exception(RuntimeError(error))
            else:
                future.set_result(received)
