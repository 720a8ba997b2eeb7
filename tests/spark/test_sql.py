"""SQL: table functions, views and tables of format("ledger"), as Spark 4.2.0 lets a Python source
have them. What does not work there is stated by a test too: docs/spark.md shows the way around."""

import pytest
from pyspark.errors import PySparkException

import spark_ledger
from spark_ledger.spark.read import listings


@pytest.fixture(scope="module")
def functions(spark, cluster):
    return spark_ledger.sql_setup(spark, cluster.service_url)


@pytest.fixture
def database(spark, tmp_path):
    """A database of the test's own; its name."""
    spark.sql(f"CREATE DATABASE ledger_tables LOCATION '{tmp_path / 'tables'}'")
    yield "ledger_tables"
    spark.sql("DROP DATABASE ledger_tables CASCADE")


@pytest.fixture
def given(topics, topic):
    """The options that a table of the topic needs, as SQL has them."""
    return f"(serviceUrl '{topics.service_url}', topic '{topic}')"


def test_every_listing_is_a_function(spark, functions, topics, topic, keyed):
    assert functions == [*(f"ledger_{view}" for view in listings.VIEWS), "read_ledger"]
    topics.write(keyed(4000), topic)  # too many to be in the commit itself
    for name, view in zip(functions, listings.VIEWS, strict=False):
        found = spark.sql(f"SELECT * FROM {name}()")
        assert found.columns == listings.schema_of(view).names
        assert found.count() > 0 or view in ("subscriptions", "lag")


def test_a_function_takes_the_topic_by_place_or_name(spark, functions, topics, topic, keyed):
    topics.write(keyed(10), topic, partitions=2)
    (one,) = spark.sql(f"SELECT topic, rows FROM ledger_topics('{topic}')").collect()
    assert one == (topic, 10)
    total = f"SELECT sum(latestOffset) FROM ledger_partitions(topic => '{topic}')"
    assert spark.sql(total).first()[0] == 10
    with pytest.raises(PySparkException, match=r"LEDGER_TOPIC\.NOT_FOUND"):
        spark.sql("SELECT * FROM ledger_topics('there-is-none')").collect()
    with pytest.raises(
        PySparkException, match=r"LEDGER_OPTION\.INVALID_VALUE\] topic is 1, not text"
    ):
        spark.sql("SELECT * FROM ledger_topics(1)").collect()
    for call in ("ledger_topics('a', 'b')", "ledger_bookies('a')"):
        with pytest.raises(PySparkException, match=r"LEDGER_OPTION\.INVALID.* has [12] arguments"):
            spark.sql(f"SELECT * FROM {call}").collect()


def test_read_ledger_reads_a_topic_with_the_options_of_a_batch_read(
    spark, functions, topics, topic, keyed
):
    topics.write(keyed(10), topic)
    read = f"read_ledger(topic => '{topic}', startingOffsets => '{{\"{topic}\":{{\"0\":7}}}}')"
    rows = spark.sql(f"SELECT offset, CAST(value AS STRING) AS v FROM {read}").collect()
    assert [row.offset for row in rows] == [7, 8, 9]
    assert all(row.v.isdecimal() for row in rows)
    placed = f"read_ledger('{topic}', endingOffsets => 'earliest')"
    assert spark.sql(f"SELECT count(*) FROM {placed}").collect() == [(0,)]
    listed = f"read_ledger(metadata => 'topics', topic => '{topic}')"
    assert spark.sql(f"SELECT rows FROM {listed}").collect() == [(10,)]
    with pytest.raises(PySparkException, match=r"LEDGER_OPTION\.UNKNOWN"):
        spark.sql(f"SELECT * FROM read_ledger(topic => '{topic}', nothing => '1')").collect()
    with pytest.raises(PySparkException, match=r"LEDGER_OPTION\.CONFLICT"):
        spark.sql(f"SELECT * FROM read_ledger('{topic}', topic => 'another')").collect()


def test_a_time_without_a_zone_is_of_the_sessions_or_refused(
    spark, functions, topics, topic, keyed
):
    """The machine's zone is another, and a source is not told the session's."""
    topics.write(keyed(10), topic)
    zone = spark.conf.get("spark.sql.session.timeZone")
    hour_ago = spark.sql("SELECT string(current_timestamp() - INTERVAL 1 HOUR)").first()[0]
    read = f"read_ledger('{topic}', startingTimestamp => '{hour_ago}')"
    assert spark.sql(f"SELECT count(*) FROM {read}").first()[0] == 10
    assert len(topics.values(topic, startingTimestamp=hour_ago, timeZone=zone)) == 10
    with pytest.raises(PySparkException, match=f"Add option timeZone, '{zone}'"):
        topics.values(topic, startingTimestamp=hour_ago)


def test_a_temporary_view_keeps_its_options_and_is_read_and_written(
    spark, topics, topic, given, keyed
):
    topics.write(keyed(10), topic)
    columns = "(key STRING, value STRING)"
    spark.sql(f"CREATE OR REPLACE TEMPORARY VIEW flights {columns} USING ledger OPTIONS {given}")
    spark.sql("INSERT INTO flights VALUES ('k', '10')")
    keyed(1, start=11).write.insertInto("flights")
    assert topics.numbers(topic) == list(range(12))
    assert spark.sql("SELECT count(*) FROM flights").first()[0] == 12
    keyed(1, start=12).write.insertInto("flights")
    assert spark.sql("SELECT count(*) FROM flights").first()[0] == 12, "as Spark planned it first"
    assert topics.numbers(topic) == list(range(13))
    spark.catalog.dropTempView("flights")


def test_a_view_over_a_tables_options_or_a_function_sees_what_is_there_at_each_query(
    spark, functions, topics, topic, given, keyed, database
):
    topics.write(keyed(10), topic)
    spark.sql(f"CREATE TABLE {database}.t (key STRING, value STRING) USING ledger")
    for name, over in (("w", f"{database}.t WITH {given}"), ("f", f"read_ledger('{topic}')")):
        spark.sql(f"CREATE OR REPLACE TEMPORARY VIEW {name} AS SELECT * FROM {over}")
    spark.sql(f"CREATE VIEW {database}.v AS SELECT * FROM {database}.t WITH {given}")
    views = ("w", "f", f"{database}.v")
    assert [spark.table(view).count() for view in views] == [10] * 3
    topics.write(keyed(5, start=10), topic)
    assert [spark.table(view).count() for view in views] == [15] * 3
    topics.write(keyed(2), topic, mode="overwrite")
    assert [spark.table(view).count() for view in views] == [2] * 3


def test_a_table_is_read_with_the_options_that_the_query_gives(
    spark, topics, topic, given, keyed, database
):
    topics.write(keyed(10), topic)
    spark.sql(f"CREATE TABLE {database}.t USING ledger")
    assert spark.sql(f"SELECT count(*) FROM {database}.t WITH {given}").first()[0] == 10
    options = {"serviceUrl": topics.service_url, "subscribe": topic}
    assert spark.read.options(**options).table(f"{database}.t").count() == 10


def test_a_table_is_written_with_the_options_that_the_write_gives(
    spark, topics, topic, given, keyed, database
):
    table = f"{database}.w"
    options = {"serviceUrl": topics.service_url, "topic": topic}
    keyed(3).write.format("ledger").options(**options).saveAsTable(table)
    keyed(3, start=3).write.format("ledger").options(**options).mode("append").saveAsTable(table)
    keyed(2, start=6).writeTo(table).options(**options).append()
    spark.sql(f"INSERT INTO {table} WITH {given} VALUES ('k', '8'), ('k', '9')")
    assert topics.numbers(topic) == list(range(10))


def test_a_stream_is_written_to_a_table(spark, topics, topic, keyed, database, tmp_path):
    source = f"{topic}-source"
    topics.write(keyed(10), source)
    spark.sql(f"CREATE TABLE {database}.s (key STRING, value STRING) USING ledger")
    rows = topics.stream(source, startingOffsets="earliest")
    rows = rows.selectExpr("CAST(key AS STRING) AS key", "CAST(value AS STRING) AS value")
    writer = rows.writeStream.option("serviceUrl", topics.service_url).option("topic", topic)
    writer = writer.option("checkpointLocation", str(tmp_path / "checkpoint"))
    query = writer.trigger(availableNow=True).toTable(f"{database}.s")
    query.awaitTermination(120)
    assert topics.numbers(topic) == list(range(10))


def test_one_table_twice_in_a_statement_is_one_topic_and_a_table_for_each_topic_is_right(
    spark, topics, topic, database
):
    """Spark's analysis keeps one relation for each table in a statement, without its options: the
    advice of docs/spark.md is a table for each topic, and views over those."""
    one, other, copy = f"{topic}-a", f"{topic}-b", f"{topic}-copy"
    for name, keys in ((one, "aa"), (other, "b")):
        rows = spark.createDataFrame([(key, "v") for key in keys], "key STRING, value STRING")
        topics.write(rows, name)
    for table in ("a", "b"):
        spark.sql(f"CREATE TABLE {database}.{table} (key STRING, value STRING) USING ledger")
    url = f"serviceUrl '{topics.service_url}'"
    of_one, of_other = (f"WITH ({url}, topic '{name}')" for name in (one, other))
    both = "SELECT key FROM {0} {1} UNION ALL SELECT key FROM {2} {3}"

    def keys(statement):
        return sorted(row.key for row in spark.sql(statement).collect())

    twice = both.format(f"{database}.a", of_one, f"{database}.a", of_other)
    assert keys(twice) == list("aaaa"), "Spark asks for the second topic: the advice may change"
    assert keys(both.format(f"{database}.a", of_one, f"{database}.b", of_other)) == list("aab")
    for name, options in (("a", of_one), ("b", of_other)):
        spark.sql(f"CREATE VIEW {database}.v{name} AS SELECT * FROM {database}.{name} {options}")
    assert keys(both.format(f"{database}.va", "", f"{database}.vb", "")) == list("aab")
    of_copy = f"WITH ({url}, topic '{copy}')"
    spark.sql(f"INSERT INTO {database}.b {of_copy} SELECT key, value FROM {database}.va")
    assert [row.key for row in topics.read(copy, "key STRING").collect()] == ["a", "a"]
    assert [row.key for row in topics.read(one, "key STRING").collect()] == ["a", "a"]


@pytest.mark.parametrize("kept", ["OPTIONS {}", "TBLPROPERTIES {}"])
def test_what_a_table_was_made_with_does_not_reach_its_source(spark, given, database, kept):
    spark.sql(f"CREATE TABLE {database}.t (value STRING) USING ledger {kept.format(given)}")
    with pytest.raises(PySparkException, match=r"LEDGER_OPTION\.MISSING"):
        spark.sql(f"SELECT * FROM {database}.t").collect()
    with pytest.raises(PySparkException, match=r"LEDGER_OPTION\.MISSING.*WITH \(topic '...'\)"):
        spark.sql(f"INSERT INTO {database}.t VALUES ('x')")
    with pytest.raises(PySparkException, match=r"LEDGER_OPTION\.MISSING"):
        spark.sql(f"CREATE TABLE {database}.c USING ledger OPTIONS {given} AS SELECT 'x' AS value")
