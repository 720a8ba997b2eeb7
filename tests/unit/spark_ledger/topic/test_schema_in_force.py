"""Columns and bytes in one topic: each commit judges whether its rows fit those that are there."""

import asyncio
from dataclasses import replace
from types import SimpleNamespace

import pyarrow as pa
import pytest

from spark_ledger import errors
from spark_ledger.metadata import paths
from spark_ledger.metadata.store import Check, Create
from spark_ledger.spark.write.job import check_columns
from spark_ledger.topic.commit import draft as commit_draft
from spark_ledger.topic.commit.draft import CommitKind, RowKind, TxnKey
from spark_ledger.topic.log.actions import OpenLive, Overwrite
from spark_ledger.topic.schema.client_rules import Strategy
from spark_ledger.topic.schema.client_schemas import ClientSchema, ClientSchemaType
from spark_ledger.topic.schema.records import Compatibility, decode_head, encode_head
from spark_ledger.topic.schema.rules import SchemaMode
from spark_ledger.topic.write import TaskResult
from tests.simulation.loop import current
from tests.unit.spark_ledger.topic.counted_calls import Counted
from tests.unit.spark_ledger.topic.stage import TARGET, play, segment

COLUMNS = pa.schema([("id", pa.int64())])
WRONG = pa.schema([("id", pa.string())])
MORE = COLUMNS.append(pa.field("more", pa.string()))
OTHERWISE = COLUMNS.append(pa.field("more", pa.int64()))
TYPED = RowKind(frozenset({1}))


async def commit(
    stage,
    kind,
    ledger,
    *,
    client=None,
    app="app",
    rows=5,
    overwrite=False,
    version=0,
    columns=COLUMNS,
    mode=SchemaMode.VALIDATE,
):
    client = client or stage.client
    overwrites = [stage.topic.id] if overwrite else []
    if kind is TYPED:
        under = await client.schemas.for_write(stage.topic, columns, mode)
        kind = RowKind(frozenset({under.number}), mode is SchemaMode.EVOLVE)
    intent = await client.intents.open_query_intent(app, "run", TARGET, overwrites=overwrites)
    some = (segment(ledger, rows),) if rows else ()
    results = {stage.topic.id: [TaskResult(stage.topic.id, intent.id, 0, 0, some)]}
    return await client.commit_topics(
        results,
        TxnKey(app, TARGET, version, "run"),
        intent.id,
        overwrite=overwrites,
        row_kinds={stage.topic.id: kind},
    )


def takes_bytes(stage):
    node = stage.world.store.peek(paths.topic_schema(stage.topic.id))
    return node is None or decode_head(node.value).takes_bytes


async def rows(stage):
    now = await (await stage.another()).log(stage.topic.id).fold(fresh=True)
    return [held.rows_between(held.start_offset, held.end_offset) for held in now.partitions]


def test_the_first_rows_of_columns_put_the_schema_in_force_and_bytes_come_no_more():
    async def act(stage):
        other = await stage.another()
        await commit(stage, TYPED, 1)
        assert not takes_bytes(stage)
        await commit(stage, TYPED, 2, version=1)

        with pytest.raises(errors.SchemaIncompatible, match=r"the rows are bytes.*--withdraw"):
            await commit(stage, RowKind.BYTES, 3, client=other, app="other")
        assert await rows(stage) == [10]

    play(act)


def test_columns_do_not_come_to_rows_of_bytes_and_bytes_go_on():
    async def act(stage):
        await commit(stage, RowKind.BYTES, 1)

        says = "partition 0 has 5 rows that follow no schema.*schemaMode=none"
        with pytest.raises(errors.SchemaIncompatible, match=says):
            await commit(stage, TYPED, 2, app="typed")
        assert takes_bytes(stage)
        await commit(stage, RowKind.BYTES, 3, version=1)
        assert await rows(stage) == [10]

    play(act)


def test_the_error_of_columns_beside_rows_of_clients_names_the_schema_that_these_follow():
    async def act(stage):
        await commit(stage, RowKind.BYTES, 1)
        schema = ClientSchema(ClientSchemaType.INT64)
        await stage.client.schemas.register_client(stage.topic, schema, Strategy.FULL)
        says = r"has 5 rows that follow the schema that Pulsar's clients declared \(type INT64\)"
        write = SimpleNamespace(overwrite=False), SimpleNamespace(info=stage.topic)
        with pytest.raises(errors.SchemaIncompatible, match=says):
            await check_columns(stage.client, *write)

    play(act)


def test_columns_take_the_place_of_all_bytes_by_overwriting():
    async def act(stage):
        await commit(stage, RowKind.BYTES, 1)
        await commit(stage, TYPED, 2, app="typed", rows=3, overwrite=True)
        assert (takes_bytes(stage), await rows(stage)) == (False, [3])

    play(act)


def test_a_broker_that_appends_keeps_columns_out_before_its_first_row():
    async def act(stage):
        opening = OpenLive(0, 9, 0, "broker b", 1)
        intent = await stage.client.intents.open_system_intent("broker", stage.topic.id)
        await stage.client.commit_actions(
            stage.topic.id, [opening], intent, row_kinds={stage.topic.id: RowKind.BYTES}
        )
        with pytest.raises(errors.SchemaIncompatible, match="broker b has partition 0 open"):
            await commit(stage, TYPED, 1, rows=0)
        now = await (await stage.another()).log(stage.topic.id).fold(fresh=True)
        with pytest.raises(errors.SchemaIncompatible, match="broker b has partition 0 open"):
            commit_draft.check_takes_columns(now, (Overwrite((), 0),), "t")

    play(act)


def test_a_broker_opens_nothing_where_a_schema_is_in_force():
    async def act(stage):
        await commit(stage, TYPED, 1)
        other = await stage.another()
        intent = await other.intents.open_system_intent("broker", stage.topic.id)
        opening = OpenLive(0, 9, 0, "broker b", 1)
        with pytest.raises(errors.SchemaIncompatible, match="the rows are bytes"):
            await other.commit_actions(
                stage.topic.id, [opening], intent, row_kinds={stage.topic.id: RowKind.BYTES}
            )

    play(act)


@pytest.mark.parametrize("some", [0, 5])
def test_a_write_of_bytes_that_saw_no_schema_loses_to_one_that_comes_into_force(some):
    async def act(stage):
        other = await stage.another()
        multi, once = other.store.multi, []

        async def late(operations):
            logs = any(isinstance(one, Create) and "/log/" in one.path for one in operations)
            if logs and not once:
                once.append(True)
                await commit(stage, TYPED, 1, rows=some)
            return await multi(operations)

        other.store.multi = late
        with pytest.raises(errors.SchemaIncompatible, match="the rows are bytes"):
            await commit(stage, RowKind.BYTES, 2, client=other, app="other")
        assert (once, takes_bytes(stage), await rows(stage)) == ([True], False, [some])

    play(act)


def test_of_columns_and_bytes_that_come_at_once_one_kind_is_there():
    async def act(stage):
        other = await stage.another()
        rng = current().random_for("at once")

        async def comes(kind, client, app):
            await asyncio.sleep(rng.uniform(0, 0.02))
            try:
                await commit(stage, kind, 1, client=client, app=app)
            except errors.SchemaIncompatible:
                return False
            return True

        columns, plain = await asyncio.gather(
            comes(TYPED, stage.client, "a"), comes(RowKind.BYTES, other, "b")
        )
        assert columns != plain
        assert takes_bytes(stage) == plain
        return columns

    assert {play(act, seed=seed) for seed in range(16)} == {True, False}


def test_after_a_withdrawal_bytes_come_and_columns_do_not():
    async def act(stage):
        other = await stage.another()
        await commit(stage, TYPED, 1)
        await other.schemas.withdraw(stage.topic)

        says = "partition 0 has 5 rows that follow no schema"
        with pytest.raises(errors.SchemaIncompatible, match=says):
            await commit(stage, TYPED, 2, version=1)
        again = await commit(stage, TYPED, 1)
        assert again.kind is CommitKind.ALREADY, "it is done, whatever holds now"
        await commit(stage, RowKind.BYTES, 3, client=other, app="other")
        await other.schemas.register(stage.topic, COLUMNS)
        await commit(stage, TYPED, 4, version=1)
        with pytest.raises(errors.SchemaIncompatible):
            await commit(stage, RowKind.BYTES, 5, client=other, app="other", version=1)
        assert await rows(stage) == [15]

    play(act)


def test_rows_of_no_kind_are_judged_by_nothing():
    async def act(stage):
        await commit(stage, TYPED, 1)
        intent = await stage.intent()
        written = TaskResult(stage.topic.id, intent.id, 0, 0, (segment(2, 5),))
        await stage.commit(intent, 0, written)
        assert await rows(stage) == [10]

    play(act)


@pytest.mark.parametrize("kind", [RowKind.BYTES, TYPED])
def test_what_a_commit_judges_costs_no_read_in_the_steady_state(kind):
    async def act(stage):
        await commit(stage, kind, 1)
        counted = Counted(stage.client)
        intent = await stage.client.intents.open_query_intent("app", "run", TARGET)
        for version in range(1, 5):
            counted.taken()
            written = TaskResult(stage.topic.id, intent.id, 0, 0, (segment(1 + version, 5),))
            await stage.commit(intent, version, written, row_kinds={stage.topic.id: kind})
            if version > 1:
                assert counted.taken() == {"multi": 1}
        checked = [one.path for one in counted.multis[-1] if isinstance(one, Check)]
        assert (paths.topic_schema(stage.topic.id) in checked) == (kind is TYPED)

    play(act)


def test_a_first_write_that_fails_keeps_no_later_one_with_other_columns_out():
    async def act(stage):
        await stage.client.schemas.for_write(stage.topic, WRONG)
        with pytest.raises(errors.SchemaNotRegistered):
            await stage.client.schemas.for_read([stage.topic])

        await commit(stage, TYPED, 1)
        await commit(stage, TYPED, 2, version=1)

        seen = await stage.client.schemas.of(stage.topic)
        assert [version.number for version in seen.versions] == [2]
        assert await stage.client.schemas.for_read([stage.topic]) == COLUMNS
        assert await rows(stage) == [10]

    play(act)


def test_a_change_of_columns_that_fails_keeps_no_later_one_out():
    async def act(stage):
        await commit(stage, TYPED, 1)
        await stage.client.schemas.for_write(stage.topic, MORE, SchemaMode.EVOLVE)
        assert await stage.client.schemas.for_read([stage.topic]) == COLUMNS

        await commit(stage, TYPED, 2, version=1, columns=OTHERWISE, mode=SchemaMode.EVOLVE)

        assert await stage.client.schemas.for_read([stage.topic]) == OTHERWISE

    play(act)


@pytest.mark.parametrize("some", [0, 5])
def test_of_two_first_writes_with_other_columns_the_one_that_commits_first_is_taken(some):
    async def act(stage):
        other = await stage.another()
        late = await other.schemas.for_write(stage.topic, WRONG)
        await commit(stage, TYPED, 1, rows=some)

        intent = await other.intents.open_query_intent("late", "run", TARGET)
        written = TaskResult(stage.topic.id, intent.id, 0, 0, (segment(2, 5),))
        for evolves in (False, True):
            row_kinds = {stage.topic.id: RowKind(frozenset({late.number}), evolves)}
            with pytest.raises(errors.SchemaIncompatible, match="column 'id'"):
                await other.commit_topics(
                    {stage.topic.id: [written]},
                    TxnKey("late", TARGET, 0, "run"),
                    intent.id,
                    row_kinds=row_kinds,
                )
        assert await rows(stage) == [some]
        assert await other.schemas.for_read([stage.topic]) == COLUMNS

    play(act)


def test_a_proposed_version_that_somebody_registers_is_one_of_the_schema_at_once():
    async def act(stage):
        made = await stage.client.schemas.for_write(stage.topic, COLUMNS)
        assert takes_bytes(stage)
        assert await (await stage.another()).schemas.register(stage.topic, COLUMNS) == made
        assert not takes_bytes(stage)

    play(act)


@pytest.mark.parametrize("columns", [COLUMNS, WRONG])
def test_typed_writes_go_on_where_an_earlier_process_took_the_proposed_version_off_the_head(
    columns,
):
    async def act(stage):
        await stage.client.schemas.for_write(stage.topic, COLUMNS, SchemaMode.VALIDATE)
        path = paths.topic_schema(stage.topic.id)
        node = await stage.client.store.get(path)
        head = replace(decode_head(node.value), compatibility=Compatibility.NONE)
        await stage.client.store.set(
            path, encode_head(replace(head, proposed=frozenset())), node.version
        )
        await commit(stage, TYPED, 1, columns=columns)
        other = await stage.another()
        await commit(stage, TYPED, 2, client=other, app="other", columns=columns)
        head = decode_head(stage.world.store.peek(path).value)
        assert head.has(1 if columns is COLUMNS else 2)
        assert not head.takes_bytes

    play(act)
