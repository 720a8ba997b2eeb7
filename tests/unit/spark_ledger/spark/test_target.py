"""The topics that a write goes to, and what of it is known before a row is written."""

import asyncio
from dataclasses import replace

import pytest
from pyspark.sql.types import DoubleType, StringType, StructField, StructType

from spark_ledger import errors
from spark_ledger.errors import OptionConflict, OptionInvalid, OptionMissing
from spark_ledger.metadata import paths
from spark_ledger.spark.options.options import stream_write_options
from spark_ledger.spark.write import job as write_job
from spark_ledger.spark.write.job import (
    WriteJob,
    WrittenTopic,
    check_fits,
    check_values,
    find_or_make,
    find_or_make_all,
    look_up,
    policies_of,
    too_many_topics,
)
from spark_ledger.topic.log.names import parse_topic
from spark_ledger.topic.log.policies import TopicPolicies
from spark_ledger.topic.log.topics import TopicInfo
from spark_ledger.topic.upkeep.admin import TopicAdmin
from tests.unit.spark_ledger.topic.stage import play

PLAIN = StructType([StructField("value", StringType())])
TYPED = StructType([StructField("name", StringType()), StructField("price", DoubleType())])


def options(**given: str):
    return stream_write_options({"topic": "t", **given})


def quorums(policies: TopicPolicies) -> tuple[int, int, int]:
    return policies.ensemble_size, policies.write_quorum, policies.ack_quorum


def of_defaults(**given: str) -> tuple[int, int, int]:
    return quorums(policies_of(options(**given)))


def test_quorums_that_are_not_given_are_the_nearest_to_the_defaults():
    assert of_defaults() == (3, 3, 2)
    assert of_defaults(ensembleSize="1") == (1, 1, 1)
    assert of_defaults(ensembleSize="5") == (5, 3, 2)
    assert of_defaults(writeQuorum="4") == (4, 4, 2)
    assert of_defaults(ensembleSize="5", writeQuorum="4", ackQuorum="4") == (5, 4, 4)


def test_quorums_that_do_not_fit_are_refused():
    with pytest.raises(OptionInvalid, match="ackQuorum 3"):
        of_defaults(writeQuorum="2", ackQuorum="3")


def test_of_a_topic_that_is_there_only_what_is_given_is_otherwise():
    base = TopicPolicies(5, 4, 3, ledger_bytes_max=7, retention_ms=9)
    assert policies_of(options(), base) == base
    less = policies_of(options(writeQuorum="2", durability="page-cache"), base)
    assert quorums(less) == (5, 2, 2)
    assert (less.durability, less.ledger_bytes_max, less.retention_ms) == ("page-cache", 7, 9)


def test_a_topic_is_the_same_target_however_it_is_spelled():
    full = stream_write_options({"topic": "persistent://public/default/t"})
    assert full.txn_target == stream_write_options({"path": "t"}).txn_target == "t"


def test_other_partitions_than_a_topic_has_or_was_made_with_are_refused():
    info = TopicInfo("id", parse_topic("t"), 2, TopicPolicies())
    grown = WrittenTopic(info, 4)
    for fine in ({}, {"partitions": "2"}, {"partitions": "4"}):
        check_fits(options(**fine), grown)
    with pytest.raises(OptionConflict, match="partitions is 3, but topic 't' exists with 4"):
        check_fits(options(partitions="3"), grown)


def test_a_topic_is_made_once_and_then_seen_as_it_has_grown():
    async def act(stage):
        wanted = replace(options(partitions="2", ensembleSize="2"), topic="new")
        assert await look_up(stage.client, "new", fresh=True) is None
        made = await find_or_make(stage.client, wanted, "new")
        assert (made.partitions, quorums(made.info.policies)) == (2, (2, 2, 2))
        await TopicAdmin(stage.client).grow("new", 5)
        again = await find_or_make(stage.client, wanted, "new", fresh=True)
        assert (again.info.id, again.partitions) == (made.info.id, 5)

    play(act)


@pytest.mark.parametrize("given", [{"ensembleSize": "9"}, {"writeQuorum": "9"}])
def test_no_topic_is_made_with_an_ensemble_larger_than_the_bookies_there_are(given):
    async def act(stage):
        for name in ("topic", "bad_records_topic"):
            wanted = replace(options(**given), **{name: "new"})
            with pytest.raises(errors.NotEnoughBookies) as caught:
                await find_or_make(stage.client, wanted, "new")
            assert "topic 'new' would need 9 bookies, and 4 are registered" in str(caught.value)
            assert "Start 5 more, or choose an ensemble size of 4 or less." in str(caught.value)
        job = WriteJob.of(replace(options(**given), topic="new"), PLAIN)
        with pytest.raises(errors.NotEnoughBookies):
            await write_job.check_topics(stage.client, job, fresh=True)
        assert [info.name.short for info in await stage.client.topics.list()] == ["t"]

    play(act)


def test_the_topic_of_bad_records_has_one_partition():
    async def act(stage):
        wanted = options(partitions="4", badRecordsTopic="bad")
        assert (await find_or_make(stage.client, wanted, "bad")).partitions == 1

    play(act)


def test_a_topic_that_takes_no_more_rows_is_refused_before_any_is_written():
    async def act(stage):
        await TopicAdmin(stage.client).terminate("t")
        with pytest.raises(errors.TopicTerminated, match="'t' takes no more rows"):
            await write_job.check_topics(stage.client, WriteJob.of(options(), PLAIN), fresh=True)

    play(act)


def test_checking_a_write_makes_no_topic():
    async def act(stage):
        job = WriteJob.of(replace(options(), topic="new", bad_records_topic="bad"), PLAIN)
        assert await write_job.check_topics(stage.client, job, fresh=True) == {}
        found = await write_job.check_topics(
            stage.client, WriteJob.of(options(), PLAIN), fresh=True
        )
        assert found["t"].info == stage.topic
        assert [info.name.short for info in await stage.client.topics.list()] == ["t"]

    play(act)


def test_columns_that_do_not_fit_the_topics_schema_are_refused_before_any_row_is_written():
    async def act(stage):
        typed = options(valueFormat="arrow")
        await write_job.check_topics(stage.client, WriteJob.of(typed, TYPED), fresh=True)
        schema = WriteJob.of(typed, TYPED).values.schema
        await stage.client.schemas.register(stage.topic, schema)
        less = StructType(TYPED.fields[:1])
        with pytest.raises(errors.SchemaIncompatible, match="price"):
            await write_job.check_topics(stage.client, WriteJob.of(typed, less), fresh=True)
        absent = replace(options(valueFormat="schema"), topic="new")
        with pytest.raises(errors.SchemaNotRegistered, match="'new' does not exist"):
            await write_job.check_topics(stage.client, WriteJob.of(absent, TYPED), fresh=True)

    play(act)


@pytest.mark.parametrize("kind", [{}, {"valueFormat": "binary"}, {"valueFormat": "string"}])
def test_bytes_are_refused_where_there_is_a_schema_unless_the_write_says_otherwise(kind):
    async def act(stage):
        bytes_to_t = options(**kind)
        await write_job.check_topics(stage.client, WriteJob.of(bytes_to_t, PLAIN), fresh=True)
        typed = WriteJob.of(options(valueFormat="arrow"), TYPED)
        await write_job.check_topics(stage.client, typed, fresh=True)
        await write_job.check_topics(stage.client, WriteJob.of(bytes_to_t, PLAIN), fresh=True)
        await stage.client.schemas.register(stage.topic, typed.values.schema)  # into force
        says = r"topic .t. has a schema \(version 1\).*valueFormat=arrow.*schemaMode=none"
        with pytest.raises(errors.SchemaIncompatible, match=says):
            await write_job.check_topics(stage.client, WriteJob.of(bytes_to_t, PLAIN), fresh=True)
        by_column = replace(bytes_to_t, topic=None)  # found in a task
        with pytest.raises(errors.SchemaIncompatible, match="topic 't' has a schema"):
            await find_or_make(stage.client, by_column, "t")
        anyway = options(schemaMode="none", **kind)
        await write_job.check_topics(stage.client, WriteJob.of(anyway, PLAIN), fresh=True)
        assert (await find_or_make(stage.client, anyway, "t")).info == stage.topic
        await write_job.check_topics(stage.client, typed, fresh=True)

    play(act)


def test_bad_records_are_bytes_and_go_to_no_topic_with_a_schema():
    async def act(stage):
        typed = options(valueFormat="arrow")
        schema = WriteJob.of(typed, TYPED).values.schema
        await stage.client.schemas.register(stage.topic, schema)
        aside = replace(typed, topic="new", bad_records_topic="t")
        with pytest.raises(errors.SchemaIncompatible, match="another topic for badRecordsTopic"):
            await write_job.check_topics(stage.client, WriteJob.of(aside, TYPED), fresh=True)

    play(act)


def test_whether_a_topic_takes_bytes_costs_one_read_and_nothing_for_columns(monkeypatch):
    async def act(stage):
        found = await look_up(stage.client, "t", fresh=True)
        asked, get = [], stage.client.store.get

        async def noted(path, *rest):
            asked.append(path)
            return await get(path, *rest)

        monkeypatch.setattr(stage.client.store, "get", noted)
        await check_values(stage.client, options(), found)
        assert asked == [paths.topic_schema(found.info.id)]
        await check_values(stage.client, options(valueFormat="json"), found)
        await check_values(stage.client, options(schemaMode="none"), found)
        assert len(asked) == 1

    play(act)


def test_what_replaces_a_topic_names_it_by_the_option():
    named = StructType([*PLAIN.fields, StructField("topic", StringType())])
    by_column = replace(options(), topic=None)
    with pytest.raises(OptionMissing, match="no option names the topic"):
        WriteJob.of(by_column, named, overwrite=True)
    assert WriteJob.of(options(), named, overwrite=True).plan.topic is None


def test_what_adds_rows_has_no_rows_of_subscriptions_to_replace():
    may_go = replace(options(), overwrite_held=True)
    with pytest.raises(OptionConflict, match="only adds rows"):
        WriteJob.of(may_go, PLAIN)
    assert WriteJob.of(may_go, PLAIN, overwrite=True).options.overwrite_held


def test_metadata_that_a_commit_could_not_keep_is_refused_at_once():
    WriteJob.of(replace(options(), user_metadata="é" * 8192), PLAIN)
    with pytest.raises(OptionInvalid, match="16386 bytes"):
        WriteJob.of(replace(options(), user_metadata="é" * 8193), PLAIN)


def test_many_topics_are_found_or_made_at_once_also_by_two_tasks():
    async def act(stage):
        names = [f"many-{n}" for n in range(100)]
        began_s = asyncio.get_running_loop().time()
        one = await find_or_make(stage.client, options(), "alone")
        alone_s = asyncio.get_running_loop().time() - began_s

        other = await stage.another()
        ways = [find_or_make_all(client, options(), names) for client in (stage.client, other)]
        (mine, theirs) = await asyncio.gather(*ways)

        assert one.partitions == 1
        assert mine == theirs, "each was made once"
        assert [topic.info.name.short for topic in mine] == names
        assert asyncio.get_running_loop().time() - began_s < 50 * alone_s

    play(act)


def test_one_of_many_topics_that_cannot_be_had_is_the_error_and_the_others_are_as_they_are():
    async def act(stage):
        await TopicAdmin(stage.client).terminate("t")
        with pytest.raises(errors.TopicTerminated):
            await find_or_make_all(stage.client, options(), ["a", "t", "b"])
        assert [info.name.short for info in await stage.client.topics.list()] == ["a", "b", "t"]

    play(act)


def test_of_a_batch_for_too_many_topics_those_without_a_commit_are_named():
    async def act(stage):
        intent = await stage.intent()
        await stage.commit(intent, 0, await stage.written(intent, [b"x"]))
        made = await find_or_make_all(stage.client, options(), [f"e-{n}" for n in range(12)])
        await stage.client.topics.delete("e-11")
        ids = [stage.topic.id, *(topic.info.id for topic in made)]

        error = await too_many_topics(stage.client, "it was too much", ids)

        assert error.what.startswith("it was too much; 11 of its topics have no row:")
        assert "'t'" not in error.what and "'e-11'" not in error.what
        assert error.facts["empty"] == tuple(f"e-{n}" for n in range(11))

    play(act)
