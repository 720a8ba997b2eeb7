"""Schemas that Pulsar's clients declare: versions of the topic's schema, returned as declared."""

import asyncio
import json

import pyarrow as pa
import pytest

from spark_ledger import errors
from spark_ledger.broker.serve.commands import COMMANDS, refusal_of
from spark_ledger.broker.wire.commands import ServerError, command
from spark_ledger.broker.wire.frames import PulsarFrameReader
from spark_ledger.broker.wire.link import ClientFacts
from spark_ledger.topic.schema import registry
from tests.unit.spark_ledger.broker.two_brokers import Brokers
from tests.unit.spark_ledger.topic.counted_calls import Counted
from tests.unit.spark_ledger.topic.stage import play

TEXT, BYTES, JSON, AVRO, INT32, AUTO_CONSUME = 1, 0, 2, 4, 8, 21
VERSION = bytes(8)
A, C, B, B_OR_0 = (
    {"name": "a", "type": "int"},
    {"name": "c", "type": "int"},
    {"name": "b", "type": "int"},
    {"name": "b", "type": "int", "default": 0},
)


def number(version):
    return version.to_bytes(8, "big")


def fields(*fields):
    return json.dumps({"type": "record", "name": "R", "fields": fields}).encode()


class Client:
    """A connection to the broker; `answer` is the last response."""

    def __init__(self, broker):
        self.link = self.intake = self
        self.broker, self.open = broker, True
        self.producers, self.answer = {}, None
        self.consumers, self.subscribing, self.ids = {}, {}, iter(range(100))

    def send(self, frame):
        (one,) = PulsarFrameReader().feed(frame)
        self.answer = one.command

    def add(self, producer):
        self.producers[producer.id] = producer

    async def answers(self):
        """It does."""

    def facts(self, metadata):
        """What statistics show of a client."""
        return ClientFacts("", "", 0, {})

    def send_consumer_away(self, consumer):
        """The consumer is not sent away here."""

    async def ask(self, name, **fields):
        """The answer, or the error by which it is refused."""
        schema, data = fields.pop("schema", None), fields.pop("data", b"")
        properties = fields.pop("properties", {})
        asked = command(name, request_id=1, **fields)
        part = getattr(asked, name)
        if schema is not None:
            part.schema.type, part.schema.schema_data = schema, data
            for key, value in properties.items():
                part.schema.properties.add(key=key.encode(), value=value.encode())
        try:
            await COMMANDS[name].carry_out(self, part)
        except Exception as error:
            return refusal_of(error).code
        return self.answer


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
        assert (registered.head.has_text, registered.versions) == (True, ())
        await client.broker.close()

    play(act)


def test_a_hundred_producers_that_come_at_once_read_policies_and_schema_a_few_times():
    async def act(stage):
        client = Client(await Brokers(stage).new("a"))

        async def come(attempt):
            answers = await asyncio.gather(
                *(
                    client.ask(
                        "producer",
                        topic=f"t-partition-{number}",
                        producer_id=100 * attempt + number,
                        producer_name=f"{attempt}-{number}",
                        schema=JSON,
                        data=fields(A),
                    )
                    for number in range(100)
                )
            )
            assert not [answer for answer in answers if isinstance(answer, ServerError)]

        await come(0)  # the broker takes the partitions
        counted = Counted(client.broker.client)
        await come(1)
        assert len(client.producers) == 200
        assert 0 < sum(counted.taken().values()) <= 20
        await client.broker.close()

    play(act, partitions=100)


def test_a_schema_is_made_and_told_without_a_producer():
    async def act(stage):
        client = Client(await Brokers(stage).new("a"))
        for schema, version in ((BYTES, b""), (TEXT, VERSION), (TEXT, VERSION)):
            made = await client.ask("get_or_create_schema", topic="t", schema=schema)
            assert made.get_or_create_schema_response.schema_version == version
        refused = await client.ask("get_or_create_schema", topic="t", schema=INT32)
        assert refused == ServerError.INCOMPATIBLE_SCHEMA
        for name in ("get_or_create_schema", "get_schema"):
            missing = await client.ask(
                name, topic="none", **({"schema": TEXT} if "or" in name else {})
            )
            assert missing == ServerError.TOPIC_NOT_FOUND
        await client.broker.close()

    play(act)


def test_beside_columns_only_json_that_fits_is_declared_and_columns_stay_in_force():
    async def act(stage):
        schemas = stage.client.schemas
        await schemas.register(stage.topic, pa.schema([("a", pa.int32())]))
        client = Client(await Brokers(stage).new("a"))
        null_or_int = {"name": "a", "type": ["null", "int"]}
        assert await produced(client, AVRO, fields(null_or_int)) == ServerError.INCOMPATIBLE_SCHEMA
        assert await produced(client, JSON, fields(B)) == ServerError.INCOMPATIBLE_SCHEMA
        own = (await client.ask("get_schema", topic="t")).get_schema_response.schema.schema_data
        assert await produced(client, JSON, own) == number(0)
        assert await produced(client, JSON, fields(null_or_int, B_OR_0)) == number(1)
        current = await schemas.of(stage.topic)
        assert not current.head.takes_bytes
        assert [(v.number, v.of_columns) for v in current.client_versions] == [
            *((0, True), (1, False))
        ]
        with pytest.raises(errors.SchemaIncompatible, match="column 'b' is null or string"):
            await schemas.register(stage.topic, pa.schema([("a", pa.int32()), ("b", pa.string())]))
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
        (version,) = (await stage.client.schemas.of(stage.topic)).client_versions
        assert (version.number, version.of_columns) == (0, True)
        found = (await client.ask("get_schema", topic="t")).get_schema_response
        assert (found.schema_version, found.schema.type) == (number(0), JSON)
        assert [field["name"] for field in json.loads(found.schema.schema_data)["fields"]] == ["a"]
        await client.broker.close()

    play(act)


def test_a_deleted_schema_is_given_for_old_messages_unless_it_was_deleted_with_force():
    async def act(stage):
        brokers, schemas = Brokers(stage), stage.client.schemas
        client = Client(await brokers.new("a"))
        assert await produced(client, AVRO, fields(A)) == number(0)
        assert await schemas.delete_for_clients(stage.topic, erase=False) == 0
        assert await client.ask("get_schema", topic="t") == ServerError.TOPIC_NOT_FOUND
        old = await client.ask("get_schema", topic="t", schema_version=number(0))
        assert old.get_schema_response.schema.schema_data == fields(A)
        assert await produced(client, TEXT) == number(1)
        assert await schemas.delete_for_clients(stage.topic, erase=True) == 1
        await client.broker.close()
        client = Client(await brokers.new("b"))  # which has no version in memory
        for version in (0, 1):
            asked = await client.ask("get_schema", topic="t", schema_version=number(version))
            assert asked == ServerError.TOPIC_NOT_FOUND
        await client.broker.close()

    play(act)


def test_columns_that_are_deleted_for_clients_are_read_as_before_and_come_back_with_spark():
    async def act(stage):
        schemas, columns = stage.client.schemas, pa.schema([("a", pa.int32())])
        version = await schemas.register(stage.topic, columns)
        assert await schemas.delete_for_clients(stage.topic, erase=True) == 0
        after = await schemas.of(stage.topic)
        assert after.head.takes_bytes and after.client_versions == ()
        assert after.versions == (version,) and after.client_version(0) is None
        assert await schemas.register(stage.topic, columns) == version
        (again,) = (await schemas.of(stage.topic)).client_versions
        assert again == await schemas.client_version(stage.topic, 0)

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


async def produced(client, schema=None, data=b"", **more):
    """The version for messages of a new producer that declares this schema, or the refusal."""
    answer = await client.ask(
        "producer", topic="t", producer_id=next(client.ids), schema=schema, data=data, **more
    )
    return answer if isinstance(answer, ServerError) else answer.producer_success.schema_version


def test_versions_count_from_0_and_a_schema_that_is_there_gets_its_old_version():
    async def act(stage):
        client = Client(await Brokers(stage).new("a"))
        first, second = fields(A), fields(A, B_OR_0)
        versions = [
            await produced(client, AVRO, data, properties={"__jsr310": "true"})
            for data in (first, second, first, json.dumps(json.loads(second), indent=2).encode())
        ]
        assert versions == [number(0), number(1), number(0), number(1)]
        assert await produced(client, AVRO, fields(A, C)) == ServerError.INCOMPATIBLE_SCHEMA
        assert await produced(client, AVRO, b"{") == ServerError.INCOMPATIBLE_SCHEMA
        assert await produced(client, JSON, first) == ServerError.INCOMPATIBLE_SCHEMA
        assert await produced(client, 99) == ServerError.NOT_ALLOWED
        assert await produced(client, BYTES) == b""
        for asked, version, data in (
            ({}, number(1), second),
            ({"schema_version": number(0)}, number(0), first),
            ({"schema_version": number(1)}, number(1), second),
        ):
            answer = (await client.ask("get_schema", topic="t", **asked)).get_schema_response
            assert (answer.schema_version, answer.schema.type) == (version, AVRO)
            assert answer.schema.schema_data == data
            assert answer.schema.properties[0].value == b"true"
        for missing in (number(2), b"\xff" * 8, b"\x00"):
            refused = await client.ask("get_schema", topic="t", schema_version=missing)
            assert refused == ServerError.TOPIC_NOT_FOUND
        await client.broker.close()

    play(act)


@pytest.fixture
def aside(monkeypatch):
    """The work that is done in threads, of which the simulation has none."""
    done = []

    async def at_once(work):
        done.append(work)
        return work()

    monkeypatch.setattr(asyncio, "to_thread", at_once)
    return done


def test_versions_are_bounded_by_bytes_and_large_ones_are_compared_in_a_thread(aside, monkeypatch):
    async def act(stage):
        monkeypatch.setattr(registry, "CLIENT_BYTES_MAX", 5_000)
        names = {"schema_compatibility": "always_compatible"}
        await stage.client.topics.change_policies("t", names)
        client = Client(await Brokers(stage).new("a"))
        large = fields({**A, "doc": "d" * 6_000})
        assert await produced(client, AVRO, large) == number(0)
        aside.clear()
        assert await produced(client, AVRO, large) == number(0)
        assert len(aside) == 2, "the check, and the comparison"
        aside.clear()
        assert await produced(client, AVRO, fields(A)) == ServerError.INCOMPATIBLE_SCHEMA
        assert len(aside) == 1, "a small schema is compared with a large one"
        await client.broker.close()

    play(act)


def test_a_schema_whose_record_the_metadata_store_would_not_take_is_refused(aside):
    async def act(stage):
        client = Client(await Brokers(stage).new("a"))
        texts = {"p": "\x01" * 60_000}
        answer = await produced(client, TEXT, b"\x01" * 120_000, properties=texts)
        assert answer == ServerError.INCOMPATIBLE_SCHEMA
        assert await produced(client, TEXT) == number(0)
        await client.broker.close()

    play(act)


def test_text_is_version_0_and_later_versions_count_on():
    async def act(stage):
        await stage.client.topics.change_policies(
            "t", {"schema_compatibility": "always_compatible"}
        )
        client = Client(await Brokers(stage).new("a"))
        assert await produced(client, TEXT) == number(0)
        assert await produced(client, INT32) == number(1)
        assert await produced(client, AVRO, fields(A)) == number(2)
        assert await produced(client, TEXT) == number(0)
        await client.broker.close()

    play(act)


def test_two_brokers_give_two_schemas_two_versions_and_one_schema_one():
    async def act(stage):
        brokers = Brokers(stage)
        clients = [Client(await brokers.new(name)) for name in "ab"]
        declared = (fields(A), fields(A, B_OR_0))
        requests = [
            client.ask("get_or_create_schema", topic="t", schema=AVRO, data=data)
            for client in clients
            for data in declared * 2
        ]
        answers = await asyncio.gather(*requests)
        versions = [answer.get_or_create_schema_response.schema_version for answer in answers]
        assert versions[:2] * 4 == versions
        assert set(versions) == {number(0), number(1)}
        for client in clients:
            await client.broker.close()

    play(act)


@pytest.mark.parametrize(
    ("changes", "first", "second", "without"),
    [
        ({"schema_compatibility": "backward"}, number(0), number(1), b""),
        (
            {"schema_compatibility": "always_incompatible"},
            number(0),
            ServerError.INCOMPATIBLE_SCHEMA,
            b"",
        ),
        (
            {"schema_validation_enforced": True},
            number(0),
            number(1),
            ServerError.INCOMPATIBLE_SCHEMA,
        ),
    ],
)
def test_policies_decide_what_a_producer_may_declare(changes, first, second, without):
    async def act(stage):
        await stage.client.topics.change_policies("t", changes)
        client = Client(await Brokers(stage).new("a"))
        assert await produced(client) == b""
        assert await produced(client, AVRO, fields(A)) == first
        assert await produced(client, AVRO, fields(A, B_OR_0)) == second
        assert await produced(client) == without
        await client.broker.close()

    play(act)


def test_without_auto_update_clients_declare_only_a_schema_that_the_topic_has():
    async def act(stage):
        client, refused = Client(await Brokers(stage).new("a")), ServerError.INCOMPATIBLE_SCHEMA

        async def declared():
            return [
                await subscribed(client, AVRO, fields(A)),
                await produced(client, AVRO, fields(A)),
                await produced(client, AVRO, fields(A, B_OR_0)),
            ]

        await stage.client.topics.change_policies("t", {"schema_auto_update": False})
        assert await declared() == [refused] * 3
        assert (await stage.client.schemas.of(stage.topic)).client_versions == ()
        assert await produced(client) == b""
        await stage.client.topics.change_policies("t", {"schema_auto_update": True})
        assert await produced(client, AVRO, fields(A)) == number(0)
        await stage.client.topics.change_policies("t", {"schema_auto_update": False})
        consumer, *answers = await declared()
        assert not isinstance(consumer, ServerError) and answers == [number(0), refused]
        await client.broker.close()

    play(act)


def test_a_changed_policy_of_schemas_counts_for_the_next_client_of_a_topic_that_is_served():
    async def act(stage):
        client = Client(await Brokers(stage).new("a"))
        assert await produced(client, AVRO, fields(A)) == number(0)
        assert await produced(client, AVRO, fields(A, B)) == ServerError.INCOMPATIBLE_SCHEMA
        changes = {"schema_compatibility": "always_compatible", "schema_validation_enforced": True}
        await stage.client.topics.change_policies("t", changes)
        assert not isinstance(await subscribed(client, AVRO, fields(A, B)), ServerError)
        assert await produced(client, AVRO, fields(A, B)) == number(1)
        assert await produced(client) == ServerError.INCOMPATIBLE_SCHEMA
        await client.broker.close()

    play(act)


def subscribed(client, schema=None, data=b""):
    consumer_id = next(client.ids)
    return client.ask(
        "subscribe",
        topic="t",
        subscription=f"s{consumer_id}",
        subType=0,
        consumer_id=consumer_id,
        schema=schema,
        data=data,
    )


def test_a_consumers_schema_is_the_first_of_an_empty_topic_and_must_read_the_topics():
    async def act(stage):
        client = Client(await Brokers(stage).new("a"))
        await subscribed(client, AUTO_CONSUME)
        assert (await stage.client.schemas.of(stage.topic)).client_versions == ()
        assert not isinstance(await subscribed(client, AVRO, fields(A, B)), ServerError)
        assert await produced(client, AVRO, fields(A, B)) == number(0)
        assert not isinstance(await subscribed(client, AVRO, fields(A)), ServerError)
        for schema, data in ((INT32, b""), (AVRO, fields(A, C))):
            assert await subscribed(client, schema, data) == ServerError.INCOMPATIBLE_SCHEMA
        assert len((await stage.client.schemas.of(stage.topic)).client_versions) == 1
        await client.broker.close()

    play(act)


def test_columns_of_spark_come_after_a_clients_version_and_then_clients_declare_no_more():
    async def act(stage):
        client = Client(await Brokers(stage).new("a"))
        assert await produced(client, AVRO, fields(A)) == number(0)
        schemas = stage.client.schemas
        assert (await schemas.of(stage.topic)).union is None
        with pytest.raises(errors.SchemaNotRegistered):
            await schemas.withdraw(stage.topic)
        version = await schemas.register(stage.topic, pa.schema([("a", pa.int32())]))
        assert version.number == 2
        assert await produced(client, AVRO, fields(A, B_OR_0)) == ServerError.INCOMPATIBLE_SCHEMA
        current = await schemas.of(stage.topic)
        assert [v.number for v in current.versions] == [2]
        assert [(v.number, v.of_columns) for v in current.client_versions] == [
            *((0, False), (1, True))
        ]
        await schemas.withdraw(stage.topic)
        assert await produced(client, AVRO, fields(A, B_OR_0)) == number(2)
        await client.broker.close()

    play(act)
