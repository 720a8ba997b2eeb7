"""What Pulsar's clients say of their values: kept as version 0 of the topic's schema, and told."""

import asyncio

import pyarrow as pa
import pytest

from spark_ledger.broker.serve.commands import COMMANDS, refusal_of
from spark_ledger.broker.wire.commands import ServerError, command
from spark_ledger.broker.wire.frames import PulsarFrameReader
from spark_ledger.topic.schema.records import ClientSchema
from tests.unit.spark_ledger.broker.two_brokers import Brokers
from tests.unit.spark_ledger.topic.stage import play

TEXT, BYTES, JSON = 1, 0, 2
VERSION = bytes(8)


class Client:
    """A connection to the broker; `said` is what it was answered last."""

    def __init__(self, broker):
        self.link = self.intake = self
        self.broker, self.open = broker, True
        self.producers, self.said = {}, None

    def send(self, frame):
        (one,) = PulsarFrameReader().feed(frame)
        self.said = one.command

    def add(self, producer):
        self.producers[producer.id] = producer

    async def answers(self):
        """It does."""

    def facts(self, metadata):
        """What statistics show of a client."""

    async def ask(self, name, **fields):
        """The answer, or the error by which it is refused."""
        schema = fields.pop("schema", None)
        asked = command(name, request_id=1, **fields)
        part = getattr(asked, name)
        if schema is not None:
            part.schema.type = schema
        try:
            await COMMANDS[name].carry_out(self, part)
        except Exception as error:
            return refusal_of(error).code
        return self.said


def test_text_that_a_producer_declares_is_version_0_of_the_topic_and_bytes_are_none():
    async def act(stage):
        client = Client(await Brokers(stage).new("a"))
        for number, schema in enumerate((BYTES, None)):
            made = await client.ask(
                "producer", topic="t", producer_id=number, producer_name=str(number), schema=schema
            )
            assert made.producer_success.schema_version == b""
            asked = await client.ask("get_schema", topic="t")
            assert asked == ServerError.TOPIC_NOT_FOUND
            of_bytes = await client.ask("get_schema", topic="t", schema_version=b"")
            assert of_bytes.get_schema_response.schema.type == BYTES
        for number in (5, 6):
            made = await client.ask(
                "producer", topic="t", producer_id=number, producer_name=str(number), schema=TEXT
            )
            assert made.producer_success.schema_version == VERSION
        for version in ({}, {"schema_version": VERSION}):
            found = (await client.ask("get_schema", topic="t", **version)).get_schema_response
            assert (found.schema.type, found.schema.schema_data) == (TEXT, b"")
            assert found.schema_version == VERSION
        other = await client.ask("get_schema", topic="t", schema_version=b"\x00" * 7 + b"\x01")
        assert other == ServerError.TOPIC_NOT_FOUND
        registered = await stage.client.schemas.of(stage.topic)
        assert (registered.head.clients, registered.versions) == (ClientSchema.STRING, ())
        await client.broker.close()

    play(act)


def test_a_schema_is_made_and_told_without_a_producer():
    async def act(stage):
        client = Client(await Brokers(stage).new("a"))
        for schema, version in ((BYTES, b""), (TEXT, VERSION), (TEXT, VERSION)):
            made = await client.ask("get_or_create_schema", topic="t", schema=schema)
            assert made.get_or_create_schema_response.schema_version == version
        refused = await client.ask("get_or_create_schema", topic="t", schema=JSON)
        assert refused == ServerError.INCOMPATIBLE_SCHEMA
        for name in ("get_or_create_schema", "get_schema"):
            missing = await client.ask(
                name, topic="none", **({"schema": TEXT} if "or" in name else {})
            )
            assert missing == ServerError.TOPIC_NOT_FOUND
        await client.broker.close()

    play(act)


@pytest.mark.parametrize("schema", [BYTES, TEXT])
def test_where_rows_are_typed_no_schema_of_a_client_is_taken(schema):
    async def act(stage):
        await stage.client.schemas.register(stage.topic, pa.schema([("a", pa.int32())]))
        client = Client(await Brokers(stage).new("a"))
        for name in ("producer", "get_or_create_schema"):
            refused = await client.ask(name, topic="t", schema=schema)
            assert refused == ServerError.INCOMPATIBLE_SCHEMA
        assert (await stage.client.schemas.of(stage.topic)).head.clients is None
        await client.broker.close()

    play(act)


def test_both_sides_of_two_producers_register_once():
    async def act(stage):
        brokers = Brokers(stage)
        clients = [Client(await brokers.new(name)) for name in "ab"]
        asked = [
            one.ask("get_or_create_schema", topic="t", schema=TEXT) for one in clients for _ in "12"
        ]
        for made in await asyncio.gather(*asked):
            assert made.get_or_create_schema_response.schema_version == VERSION
        for client in clients:
            await client.broker.close()

    play(act)
