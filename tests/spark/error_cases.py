"""How each class of error comes to a user of Spark: the case that raises it, in a batch and in a
stream.

Always true: a class of errors.py is in CASES or in ELSEWHERE. A case is for both kinds of query
unless it says why one of them cannot raise it.
"""

import json
from collections.abc import Callable
from dataclasses import dataclass

from spark_ledger.metadata import paths
from spark_ledger.topic.subscription.seek_target import End
from tests.spark.scene import Scene, error_of
from tests.spark.topics import too_large_for_a_commit, wait_until

MIB = 1 << 20
Act = Callable[[Scene], str]
"""What is done, and what Spark says then."""

ELSEWHERE = {
    "LEDGER_UNAVAILABLE": "it takes long: test_faults.py, in a batch and in a stream",
    "LEDGER_OPTION.NEWER_SPARK_NEEDED": "Spark 4.1 raises it: ../spark41/test_spark41.py",
    "LEDGER_CLIENT.CLOSED": "a query closes no client",
    "LEDGER_SCHEMA.UNREADABLE": "a client of Pulsar declares it: unit broker/test_schemas.py",
    "LEDGER_WRITE.CLOSED": "a task goes on in another ledger",
    "LEDGER_WRITE.TIMEOUT": "bookies that do not answer are not enough bookies before that:"
    " unit ledger/test_add_pipeline.py",
    "LEDGER_WRITE.NOT_CLOSED": "a query deletes no ledger",
    "LEDGER_WRITE.IN_USE": "a query deletes no ledger",
    "LEDGER_WRITE.UNAUTHORIZED": "ledgers of topics have no password",
    "LEDGER_WRITE.RECORD_TOO_BIG": "ledgers of topics have no metadata of a user's",
    "LEDGER_WRITE.COMMIT_TOO_BIG": "a body of 64 MiB: unit tests of commits",
    "LEDGER_WRITE.OUTCOME_UNKNOWN": "batch and stream: test_unknown_outcome.py",
    "LEDGER_WRITE.REPLAY_DIFFERS": "a stream and foreachBatch: test_replays.py",
    "LEDGER_WRITE.CHECKPOINT_BEHIND": "a stream and foreachBatch: test_replays.py",
    "LEDGER_TOPIC.BAD_ENTRY": "what a producer of Pulsar's sent, in a batch: test_pulsar.py",
    "LEDGER_METADATA.HELD": "a cluster whose metadata store was put back: ../integration/"
    "test_older_store.py",
    "LEDGER_TOPIC.ALREADY_EXISTS": "Admin and the command line",
    "LEDGER_TOPIC.NAMESPACE_NOT_FOUND": "the admin API: unit topic/test_namespaces.py",
    "LEDGER_TOPIC.NAMESPACE_ALREADY_EXISTS": "the admin API: unit topic/test_namespaces.py",
    "LEDGER_TOPIC.NAMESPACE_IN_USE": "the admin API: unit topic/test_namespaces.py",
    "LEDGER_SUBSCRIPTION.ALREADY_EXISTS": "Admin and the command line",
    "LEDGER_SUBSCRIPTION.MOVED": "a query that comes back: test_moved_subscriptions.py",
    "LEDGER_SUBSCRIPTION.COPY_GONE": "acknowledgements of Pulsar's consumers: test_acked_starts.py",
    "LEDGER_DATA_LOSS.LEDGER_MISSING": "a ledger of rows that is gone is ROWS_MISSING: integration/"
    "test_ledger_client.py, unit topic/test_slice_reading.py",
    "LEDGER_DATA_LOSS.CHECKSUM": "a bookie hands out no damaged bytes, they are unavailable: unit"
    " ledger/test_reader.py, ledger/test_read_entries.py",
}
"""Classes that no query raises, or that it takes more than a case here, with why or where."""


@dataclass(frozen=True)
class Case:
    """`only`: of one kind of query, and why the other one cannot raise it."""

    error_class: str
    act: Act
    only: str = ""
    because: str = ""


CASES: dict[str, Case] = {}


def raises(error_class: str, only: str = "", because: str = "") -> Callable[[Act], Act]:
    def add(act: Act) -> Act:
        assert error_class not in CASES, "one case for a class"
        CASES[error_class] = Case(error_class, act, only, because)
        return act

    return add


# -- the cluster ---------------------------------------------------------------------------------


@raises("LEDGER_CONFIG.INVALID")
def no_service_url(scene: Scene) -> str:
    return scene.reads("t", serviceUrl="nonsense")


@raises("LEDGER_WRITE.NOT_ENOUGH_BOOKIES")
def more_bookies_than_there_are(scene: Scene) -> str:
    return scene.writes(["repeat(value, 20000) AS value"], scene.topic, ensembleSize=9)


# -- options -------------------------------------------------------------------------------------


@raises("LEDGER_OPTION.MISSING")
def no_topic(scene: Scene) -> str:
    return scene.reads()


@raises("LEDGER_OPTION.INVALID_VALUE")
def a_word_for_a_number(scene: Scene) -> str:
    return scene.reads("t", minPartitions="many")


@raises("LEDGER_OPTION.UNKNOWN")
def a_misspelt_option(scene: Scene) -> str:
    return scene.writes(["value"], scene.topic, compresion="lz4")


@raises("LEDGER_OPTION.CONFLICT")
def two_topics(scene: Scene) -> str:
    return scene.reads("t", subscribe="u")


@raises("LEDGER_OPTION.TOO_MANY_TOPICS")
def rows_for_501_topics(scene: Scene) -> str:
    many = scene.rows().selectExpr("value", "explode(sequence(0, 500)) AS n")
    return scene.writes(many.selectExpr("value", "concat('one-of-many-', n) AS topic"))


@raises("LEDGER_TXN.VERSION_REQUIRED", "batch", "a stream has its batch ids")
def an_app_without_a_version(scene: Scene) -> str:
    return scene.writes(["value"], scene.topic, txnAppId="mine")


# -- topics --------------------------------------------------------------------------------------


@raises("LEDGER_TOPIC.NOT_FOUND")
def an_absent_topic(scene: Scene) -> str:
    return scene.reads("nobody-made-it")


@raises("LEDGER_TOPIC.INVALID_NAME")
def a_name_that_is_none(scene: Scene) -> str:
    return scene.writes(["value"], "no/good")


@raises("LEDGER_TOPIC.TERMINATED")
def a_topic_that_takes_no_more(scene: Scene) -> str:
    scene.admin.terminate(scene.new_topic())
    return scene.writes(["value"], scene.topic)


@raises("LEDGER_WRITE.BACKLOG_QUOTA")
def a_topic_whose_subscription_leaves_too_much_unread(scene: Scene) -> str:
    scene.admin.create_topic(scene.topic, backlog_bytes_max=1)
    scene.admin.create_subscription(scene.new_topic(), "slow", at="earliest")
    return scene.writes(["value"], scene.topic)


@raises("LEDGER_TOPIC.UNSUPPORTED_FORMAT")
def a_topic_of_a_later_version(scene: Scene) -> str:
    store = scene.by_hand.client.store
    head = paths.topic_head(scene.by_hand.info(scene.new_topic()).id)
    now = scene.by_hand.run(store.get(head))
    later = json.dumps({**json.loads(now.value), "min_reader": 99}).encode()
    version = scene.by_hand.run(store.set(head, later, now.version))
    try:
        return scene.reads(scene.topic, startingOffsets="earliest")
    finally:
        scene.by_hand.run(store.set(head, now.value, version))


@raises("LEDGER_NULL_TOPIC_IN_DATA")
def a_row_without_a_topic(scene: Scene) -> str:
    return scene.writes([f"if(value = '7', NULL, '{scene.topic}') AS topic", "value"])


# -- offsets -------------------------------------------------------------------------------------


@raises("LEDGER_OFFSETS.MALFORMED")
def no_offsets(scene: Scene) -> str:
    return scene.reads(scene.ten, startingOffsets="soon")


@raises("LEDGER_OFFSETS.NOT_ASSIGNED")
def offsets_of_another_topic(scene: Scene) -> str:
    return scene.reads(scene.ten, startingOffsets='{"other":{"0":0}}')


@raises("LEDGER_OFFSETS.OUT_OF_RANGE")
def an_offset_beyond_the_end(scene: Scene) -> str:
    return scene.reads(scene.ten, startingOffsets=scene.at(11, scene.ten))


@raises("LEDGER_OFFSETS.START_AFTER_END", "batch", "a stream has no end")
def an_end_before_its_start(scene: Scene) -> str:
    first, last = scene.at(7, scene.ten), scene.at(3, scene.ten)
    return scene.reads(scene.ten, startingOffsets=first, endingOffsets=last)


@raises("LEDGER_OFFSETS.TIMESTAMP_NOT_FOUND")
def a_start_in_the_future(scene: Scene) -> str:
    return scene.reads(scene.ten, startingTimestamp="2999-01-01T00:00Z")


# -- columns -------------------------------------------------------------------------------------


@raises("LEDGER_SCHEMA.MISSING_COLUMN")
def no_value(scene: Scene) -> str:
    return scene.writes(["key"], scene.topic)


@raises("LEDGER_SCHEMA.UNKNOWN_COLUMN")
def a_column_that_no_topic_has(scene: Scene) -> str:
    return scene.writes(["value", "1.5 AS price"], scene.topic)


@raises("LEDGER_SCHEMA.TYPE_MISMATCH")
def a_value_that_is_a_number(scene: Scene) -> str:
    return scene.writes(["1 AS value"], scene.topic)


@raises("LEDGER_SCHEMA.INCOMPATIBLE")
def columns_of_another_type(scene: Scene) -> str:
    some = scene.topics.read(scene.ten).selectExpr("offset AS n")
    scene.topics.write(some, scene.topic, valueFormat="arrow")
    return scene.writes(["'text' AS n"], scene.topic, valueFormat="arrow")


@raises("LEDGER_SCHEMA.RESERVED_COLUMN")
def a_column_with_the_name_of_a_reads(scene: Scene) -> str:
    return scene.writes(["1 AS __offset"], scene.topic, valueFormat="arrow")


@raises("LEDGER_SCHEMA.NOT_REGISTERED")
def a_topic_without_a_schema(scene: Scene) -> str:
    return scene.writes(["1 AS n"], scene.topic, valueFormat="schema")


# -- rows ----------------------------------------------------------------------------------------


@raises("LEDGER_WRITE.MESSAGE_TOO_BIG")
def a_row_larger_than_an_entry(scene: Scene) -> str:
    one = scene.rows().where("offset = 0")
    return scene.writes(one.selectExpr(f"repeat('x', {17 * MIB}) AS value"), scene.topic)


@raises("LEDGER_WRITE.PARTITION_INVALID")
def a_partition_that_is_not_there(scene: Scene) -> str:
    return scene.writes(["value", "9 AS partition"], scene.topic)


# -- others --------------------------------------------------------------------------------------


@raises("LEDGER_WRITE.FENCED")
def another_run_of_the_same(scene: Scene) -> str:
    """It comes in mid-task: a batch of the same txnAppId and version, a newer run of the query."""
    url, topic = scene.url, scene.new_topic()

    def take_over() -> None:
        from pyspark import TaskContext

        from spark_ledger.topic import blocking
        from spark_ledger.topic.commit.commit import TxnKey

        cluster = blocking.topics(url)
        query_id = TaskContext.get().getLocalProperty("sql.streaming.queryId")
        intents = cluster.client.intents
        info = cluster.run(cluster.client.topics.open(topic))
        target = f"{topic}@{info.id}"
        if query_id is not None:
            cluster.run(intents.open_query_intent(query_id, "a newer run", target))
            return
        intent = cluster.run(intents.open_batch_intent("mine", "another run", target))
        txn = TxnKey("mine", target, 1, "another run")
        cluster.run(cluster.client.commit_topics({info.id: []}, txn, intent.id))

    rows = scene.meanwhile(take_over, ["value"])
    given = {} if scene.streaming else {"txnAppId": "mine", "txnVersion": 1}
    return scene.writes(rows, topic, **given)


@raises("LEDGER_TXN.CONFLICT")
def another_writes_what_is_replaced(scene: Scene) -> str:
    """Between a run's begin and its commit: in complete mode, its second batch."""
    topic, url = scene.new_topic(), scene.url

    def write_too() -> None:
        from tests.spark.by_hand import Cluster

        Cluster(url).write(topic, [77])

    if scene.streaming:
        return _conflict_of_two_batches(scene, write_too)
    return scene.writes(scene.meanwhile(write_too, ["value"]), topic, overwrite=True)


def _conflict_of_two_batches(scene: Scene, write_too: Callable[[], None]) -> str:
    source = scene.topics.stream(scene.ten, startingOffsets="earliest", maxOffsetsPerTrigger=5)
    counts = source.groupBy("topic").count().selectExpr("cast(count AS STRING) AS value")

    def work(batches):
        for batch in batches:
            if batch.column("value").to_pylist() == ["10"]:
                write_too()
            yield batch

    return scene.writes(counts.mapInArrow(work, "value STRING"), scene.topic, overwrite=True)


@raises("LEDGER_DATA_LOSS.TOPIC_DELETED")
def a_topic_deleted_in_use(scene: Scene) -> str:
    """While it is written by a batch; while a stream waits for more of it."""
    topic, url = scene.new_topic(), scene.url
    if scene.streaming:
        return _deleted_under_a_stream(scene)

    def delete() -> None:
        import spark_ledger

        with spark_ledger.Admin(url) as admin:
            admin.delete_topic(topic)

    return scene.writes(scene.meanwhile(delete, ["value"]), topic)


def _deleted_under_a_stream(scene: Scene) -> str:
    rows = scene.topics.stream(scene.topic, startingOffsets="earliest")
    query = rows.writeStream.format("noop").start()
    try:
        wait_until(lambda: query.lastProgress is not None)
        scene.admin.delete_topic(scene.topic)
        return error_of(lambda: query.awaitTermination(120))
    finally:
        query.stop()


@raises("LEDGER_DATA_LOSS.TOPIC_RECREATED")
def offsets_of_an_older_topic(scene: Scene) -> str:
    offsets = {**json.loads(scene.at(1, scene.ten)), "_ids": {scene.ten: "another"}}
    return scene.reads(scene.ten, startingOffsets=json.dumps(offsets))


@raises("LEDGER_DATA_LOSS.OFFSET_OF_ANOTHER_STORE", "stream", "a batch has no checkpoint")
def an_offset_whose_row_another_commit_made(scene: Scene) -> str:
    topic = scene.new_topic()
    scene.read(topic, startingOffsets="earliest")
    scene.change_offset(lambda offset: {**offset, "_commits": {topic: {"0": 1}}})
    return scene.reads(topic)


@raises("LEDGER_DATA_LOSS.PARTITION_REMOVED", "stream", "a batch has no checkpoint")
def a_partition_that_is_not_read_any_more(scene: Scene) -> str:
    topic = scene.new_topic(partitions=2)
    scene.read(topic, startingOffsets="earliest")
    return scene.reads(assign=json.dumps({topic: [0]}))


@raises("LEDGER_DATA_LOSS.TRIMMED")
def rows_removed_before_they_were_read(scene: Scene) -> str:
    """After a stream's checkpoint named them; after a batch was planned, with their ledgers."""
    some = scene.topics.read(scene.ten, "value STRING")
    scene.topics.write(too_large_for_a_commit(some), scene.topic)
    if scene.streaming:
        scene.read(scene.topic, startingOffsets="earliest")
        scene.topics.write(some, scene.topic)
        scene.admin.trim(scene.topic, {0: 12})
        return scene.reads(scene.topic, startingOffsets="earliest")
    planned = scene.topics.read(scene.topic)
    assert len(planned.collect()) == 10
    ledgers = _ledgers(scene)
    scene.admin.trim(scene.topic, {0: 10})
    _delete(scene, ledgers)
    return error_of(planned.collect)


@raises("LEDGER_DATA_LOSS.ROWS_MISSING")
def rows_whose_ledger_is_gone(scene: Scene) -> str:
    rows = scene.topics.read(scene.ten, "value STRING")
    scene.topics.write(too_large_for_a_commit(rows), scene.topic)
    _delete(scene, _ledgers(scene))
    return scene.reads(scene.topic, startingOffsets="earliest")


def _ledgers(scene: Scene) -> list[int]:
    log = scene.by_hand.client.log(scene.by_hand.info(scene.topic).id)
    return scene.by_hand.run(log.fold(fresh=True)).ledgers()


def _delete(scene: Scene, ledger_ids: list[int]) -> None:
    for ledger_id in ledger_ids:
        scene.by_hand.run(scene.by_hand.client.ledgers.recover(ledger_id))
        scene.by_hand.run(scene.by_hand.client.ledgers.delete(ledger_id))


# -- subscriptions -------------------------------------------------------------------------------


@raises("LEDGER_SUBSCRIPTION.NOT_FOUND")
def an_absent_subscription(scene: Scene) -> str:
    return scene.reads(scene.ten, startingSubscription="nobody-made-it")


@raises("LEDGER_SUBSCRIPTION.BUSY", "stream", "only a stream moves a subscription")
def a_subscription_in_use(scene: Scene) -> str:
    client, info = scene.by_hand.client, scene.by_hand.info(scene.new_topic())
    other = scene.by_hand.run(
        client.subscriptions.open(info, "mine", "another query", "its run", start=End.EARLIEST)
    )
    try:
        return scene.reads(scene.topic, subscription="mine")
    finally:
        scene.by_hand.run(other.release(10))
