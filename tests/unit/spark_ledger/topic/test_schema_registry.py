import asyncio

import pyarrow as pa
import pytest

from spark_ledger import errors
from spark_ledger.metadata import paths
from spark_ledger.metadata.store import OutcomeUnknown
from spark_ledger.topic.commit.draft import RowKind, TxnKey
from spark_ledger.topic.schema import records as schema_records
from spark_ledger.topic.schema import registry as schema_registry
from spark_ledger.topic.schema.records import Compatibility, SchemaHead
from spark_ledger.topic.schema.registry import SchemaRegistry
from spark_ledger.topic.schema.rules import SchemaMode
from tests.unit.spark_ledger.topic.stage import TARGET, play

A = pa.schema([("a", pa.int32())])
WIDE = pa.schema([("a", pa.int64())])
AB = pa.schema([("a", pa.int32()), ("b", pa.string())])
AC = pa.schema([("a", pa.int32()), ("c", pa.string())])
TEXT = pa.schema([("a", pa.string())])


def registry(client):
    return SchemaRegistry(client.store, client.rng)


async def taken(stage, schemas, schema, mode=SchemaMode.VALIDATE, topic=None):
    """The version of a write without rows that was committed."""
    topic = topic or stage.topic
    made = await schemas.for_write(topic, schema, mode)
    await committed(stage, made, topic, evolves=mode is SchemaMode.EVOLVE)
    return made


async def committed(stage, version, topic, *, evolves):
    app = f"version {version.number} of {topic.id}"
    intent = await stage.client.intents.open_query_intent(app, "run", TARGET)
    row_kinds = {topic.id: RowKind(frozenset({version.number}), evolves)}
    txn = TxnKey(app, TARGET, 0, "run")
    await stage.client.commit_topics({topic.id: []}, txn, intent.id, row_kinds=row_kinds)


def nodes(stage):
    """What is stored: the head, and the versions by number."""
    store, path = stage.world.store, paths.topic_schema(stage.topic.id)
    head = schema_records.decode_head(store.peek(path).value)
    found = {
        int(name): schema_records.decode_version(store.peek(f"{path}/{name}").value)
        for name in store.peek_children(path)
    }
    assert {number: version.number for number, version in found.items()} == {n: n for n in found}
    assert sorted(found) == list(range(1, head.last + 1))
    return head, found


def counted(store, monkeypatch):
    """How often the store is called from now on."""
    calls = []
    for name in ("get", "sync", "multi"):
        monkeypatch.setattr(store, name, noted(getattr(store, name), calls, name))
    return calls


def noted(call, calls, name):
    def wrapper(*given):
        calls.append(name)
        return call(*given)

    return wrapper


def test_a_topic_without_a_schema_has_no_versions_and_is_not_read_by_one():
    async def act(stage):
        schemas = registry(stage.client)

        found = await schemas.of(stage.topic)

        assert (found.head, found.versions, found.union) == (SchemaHead(), (), None)
        with pytest.raises(errors.SchemaNotRegistered, match="topic 't' has no registered"):
            await schemas.for_read([stage.topic])
        with pytest.raises(errors.SchemaNotRegistered):
            await schemas.for_write(stage.topic, A, must_exist=True)
        assert stage.world.store.peek(paths.topic_schema(stage.topic.id)) is None

    play(act)


def test_the_first_write_registers_and_another_process_finds_it():
    async def act(stage):
        made = await registry(stage.client).for_write(stage.topic, A)
        other = registry(await stage.another())

        assert made.number == 1
        assert await other.for_write(stage.topic, A) == made
        assert (await other.of(stage.topic)).proposed == (made,)
        assert nodes(stage) == (SchemaHead(0, proposed=frozenset({1})), {1: made})
        await committed(stage, made, stage.topic, evolves=False)
        assert await other.for_write(stage.topic, A, must_exist=True) == made
        assert (await other.of(stage.topic)).versions == (made,)
        assert nodes(stage) == (SchemaHead(1), {1: made})

    play(act)


def test_a_schema_grows_only_when_its_writer_says_so():
    async def act(stage):
        schemas = registry(stage.client)
        await taken(stage, schemas, A)

        with pytest.raises(errors.SchemaIncompatible, match="column 'b' is new"):
            await schemas.for_write(stage.topic, AB)
        grown = await taken(stage, schemas, AB, SchemaMode.EVOLVE)
        wider = await taken(stage, schemas, WIDE, SchemaMode.EVOLVE)
        old = await taken(stage, schemas, A)

        assert (grown.number, wider.number, old.number) == (2, 3, 1)
        assert await schemas.for_read([stage.topic]) == pa.schema(
            [("a", pa.int64()), ("b", pa.string())]
        )
        with pytest.raises(errors.SchemaIncompatible, match="compatible 'backward': column 'a'"):
            await schemas.for_write(stage.topic, TEXT, SchemaMode.EVOLVE)
        assert nodes(stage)[0].current == 3

    play(act)


def test_a_schema_that_is_known_costs_a_write_nothing(monkeypatch):
    async def act(stage):
        schemas = registry(stage.client)
        made = await taken(stage, schemas, AB)
        await schemas.of(stage.topic)
        calls = counted(stage.client.store, monkeypatch)

        for _ in range(100):
            assert await schemas.for_write(stage.topic, AB) == made
        assert calls == []

        await schemas.of(stage.topic)
        assert calls == ["sync", "get"]

    play(act)


@pytest.mark.parametrize("seed", range(12))
def test_writers_at_once_register_one_version_each_or_the_same(seed):
    async def act(stage):
        stage.world.store.faults.unknown = 0.3
        registries = [registry(await stage.another()) for _ in range(5)]
        wanted = [AB, AC, AB, WIDE, A]

        made = await asyncio.gather(
            *(
                one.for_write(stage.topic, schema, SchemaMode.EVOLVE)
                for one, schema in zip(registries, wanted, strict=True)
            ),
            return_exceptions=True,
        )

        stage.world.store.calm()
        head, found = nodes(stage)
        kept = [version for version in made if not isinstance(version, BaseException)]
        failed = [error for error in made if isinstance(error, BaseException)]
        assert all(isinstance(error, errors.SchemaIncompatible) for error in failed), failed
        assert all(found[version.number] == version for version in kept)
        assert len({version.fingerprint for version in found.values()}) == head.last
        if not isinstance(made[0], BaseException):
            assert made[0] == made[2]

    play(act, seed=seed)


@pytest.mark.parametrize("applied", [True, False])
def test_a_lost_answer_is_resolved_by_looking(applied, monkeypatch):
    async def act(stage):
        store = stage.client.store
        multi, lost = store.multi, []

        async def lossy(operations):
            if not lost:
                lost.append(operations)
                if applied:
                    await multi(operations)
                raise OutcomeUnknown("the answer was lost")
            await multi(operations)

        monkeypatch.setattr(store, "multi", lossy)
        schemas = registry(stage.client)

        first = await schemas.for_write(stage.topic, A)
        lost.clear()
        second = await schemas.for_write(stage.topic, AB)

        assert (first.number, second.number) == (1, 2)
        assert nodes(stage)[0].proposed == {1, 2}

    play(act)


def test_who_reads_from_a_server_that_lags_decides_on_all_that_was_registered():
    async def act(stage):
        stage.world.store.faults.lag_s = 60.0
        first, other = registry(stage.client), registry(await stage.another())
        made = await taken(stage, first, AB)

        assert await other.for_write(stage.topic, AB, must_exist=True) == made
        await taken(stage, first, AC, SchemaMode.EVOLVE)
        assert (await other.of(stage.topic)).head.current == 2

    play(act)


@pytest.mark.parametrize("seed", range(6))
def test_a_change_of_compatibility_takes_no_version_back(seed):
    async def act(stage):
        schemas = [registry(await stage.another()) for _ in range(3)]
        await taken(stage, schemas[0], A)

        await asyncio.gather(
            schemas[0].set_compatibility(stage.topic, Compatibility.FULL),
            schemas[1].for_write(stage.topic, AB, SchemaMode.EVOLVE),
            schemas[2].for_write(stage.topic, AC, SchemaMode.EVOLVE),
        )

        assert nodes(stage)[0] == SchemaHead(1, Compatibility.FULL, proposed=frozenset({2, 3}))

    play(act, seed=seed)


def test_what_somebody_registers_has_its_not_nulls_and_binds_writers():
    required = pa.schema([pa.field("id", pa.int64(), nullable=False), ("b", pa.string())])

    async def act(stage):
        schemas = registry(stage.client)
        made = await schemas.register(stage.topic, required)

        assert (made.number, made.schema) == (1, required)
        assert await schemas.register(stage.topic, required) == made
        loose = pa.schema([("b", pa.string()), ("id", pa.int64())])
        assert await schemas.for_write(stage.topic, loose, must_exist=True) == made

    play(act)


def test_compatibility_is_set_before_or_after_the_first_version():
    async def act(stage):
        schemas = registry(stage.client)
        await schemas.set_compatibility(stage.topic, Compatibility.FULL)
        await taken(stage, schemas, A)
        with pytest.raises(errors.SchemaIncompatible, match="'full': column 'a'"):
            await schemas.for_write(stage.topic, WIDE, SchemaMode.EVOLVE)

        await schemas.set_compatibility(stage.topic, Compatibility.NONE)
        await taken(stage, schemas, TEXT, SchemaMode.EVOLVE)

        assert nodes(stage)[0] == SchemaHead(2, Compatibility.NONE)
        with pytest.raises(errors.SchemaIncompatible, match="int32 in older rows and string"):
            await schemas.for_read([stage.topic])

    play(act)


def test_a_schema_that_somebody_registers_is_in_force_until_it_is_withdrawn():
    async def act(stage):
        schemas = registry(stage.client)
        with pytest.raises(errors.SchemaNotRegistered):
            await schemas.withdraw(stage.topic)
        await schemas.for_write(stage.topic, A)
        assert nodes(stage)[0].takes_bytes
        await schemas.register(stage.topic, A)
        assert not nodes(stage)[0].takes_bytes
        await taken(stage, schemas, AB, SchemaMode.EVOLVE)
        assert not nodes(stage)[0].takes_bytes

        for _ in range(2):
            assert (await schemas.withdraw(stage.topic)).takes_bytes
            assert nodes(stage)[0] == SchemaHead(2, in_force=False)
        await taken(stage, schemas, AC, SchemaMode.EVOLVE)
        assert nodes(stage)[0] == SchemaHead(3)
        await schemas.withdraw(stage.topic)
        await schemas.register(stage.topic, AB)
        assert nodes(stage)[0] == SchemaHead(3)

    play(act)


def test_a_read_of_several_topics_sees_the_columns_of_all():
    async def act(stage):
        schemas = registry(stage.client)
        other = await stage.client.topics.create("other")
        await taken(stage, schemas, AB)
        await taken(stage, schemas, pa.schema([("c", pa.int8()), ("a", pa.int64())]), topic=other)

        seen = await schemas.for_read([stage.topic, other])

        assert seen == pa.schema([("a", pa.int64()), ("b", pa.string()), ("c", pa.int8())])

    play(act)


def test_a_deleted_topic_takes_no_schema_and_one_made_again_has_its_own():
    async def act(stage):
        schemas = registry(stage.client)
        await schemas.for_write(stage.topic, A)
        await stage.client.topics.delete("t")
        with pytest.raises(errors.TopicDeleted):
            await schemas.for_write(stage.topic, AB, SchemaMode.EVOLVE)

        again = await stage.client.topics.create("t")

        assert (await schemas.for_write(again, TEXT)).number == 1

    play(act)


def test_what_is_kept_is_bounded_in_bytes(monkeypatch):
    async def act(stage):
        monkeypatch.setattr(schema_registry, "CACHE_BYTES_MAX", 300)
        schemas = registry(stage.client)
        topics = [stage.topic, await stage.client.topics.create("u")]
        for topic in topics:
            await taken(stage, schemas, A, topic=topic)
        calls = counted(stage.client.store, monkeypatch)

        async def versions_read(topic):
            calls.clear()
            await schemas.of(topic)
            return calls.count("get") - 1  # the head is read always

        assert [await versions_read(topic) for topic in topics[::-1]] == [0, 1]
        assert [await versions_read(topic) for topic in topics] == [0, 1]
        assert [await versions_read(topic) for topic in topics[::-1]] == [0, 1]
        await taken(stage, schemas, AB, SchemaMode.EVOLVE, topics[1])
        assert [await versions_read(topics[1]) for _ in range(2)] == [2, 2], "it is too large alone"
        assert (await schemas.of(topics[1])).head.current == 2

    play(act)
