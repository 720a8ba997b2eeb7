"""Clients of a broker of a simulated cluster, by the commands that they send."""

from spark_ledger.broker import names
from spark_ledger.broker.serve.connection import Connection
from spark_ledger.broker.wire.commands import command
from spark_ledger.broker.wire.frames import encode
from tests.unit.spark_ledger.broker.background import Brokers
from tests.unit.spark_ledger.broker.connections import Socket

TOPIC = "persistent://public/default/t-partition-0"


class Session:
    """A client of a broker that has the topic."""

    def __init__(self, broker):
        self.connection, self.socket = Connection(broker, lambda _: None), Socket()
        self.connection.connection_made(self.socket)

    def ask(self, name, data=b"", **fields):
        self.connection.data_received(encode(command(name, **fields), data or b""))

    async def answer(self, name, *asked, **fields):
        self.ask(*asked, **fields)
        return await self.socket.answer(name)


async def session_of(stage):
    broker = await Brokers(stage).new("a")
    broker.message_bytes_max = 4 << 10  # entries of the simulation are small
    session = Session(broker)
    await session.answer("connected", "connect", client_version="raw", protocol_version=19)
    await broker.lookup(names.parse(TOPIC), authoritative=True)
    return broker, session
