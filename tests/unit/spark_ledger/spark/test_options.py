"""What a reader and a writer may be told, and what is refused by name."""

import re
import time
from pathlib import Path

import pytest

from spark_ledger.errors import (
    LedgerError,
    OffsetsMalformed,
    OffsetsStartAfterEnd,
    OptionConflict,
    OptionInvalid,
    OptionMissing,
    OptionUnknown,
    TopicNameInvalid,
    TxnVersionRequired,
)
from spark_ledger.spark.options import options
from spark_ledger.spark.options import table as option_table
from spark_ledger.spark.options.limits import Limits
from spark_ledger.spark.options.start_positions import (
    EARLIEST,
    LATEST,
    AtEdge,
    AtOffsets,
    AtSubscription,
    AtTime,
)
from spark_ledger.spark.options.table import READ_OPTIONS, WRITE_OPTIONS, Use, options_for
from tests.kit.option_pages import KAFKAS_TOO, as_markdown

DOCS = Path(__file__).parents[4] / "docs"
PAGE = DOCS / "spark.md"
FROM_KAFKA = DOCS / "from-kafka.md"
PARSERS = {
    Use.BATCH_READ: options.batch_read_options,
    Use.STREAM_READ: options.stream_read_options,
    Use.BATCH_WRITE: options.batch_write_options,
    Use.STREAM_WRITE: options.stream_write_options,
}
NOT_BUILT = (
    *("snapshot", "timestampAsOf", "readCompacted", "eventTimeOrder", "headerFilter"),
    *("isolationLevel", "pollTimeoutMs", "subscriptionPrefix"),
    *("deliverAt", "accessMode", "idempotent", "createTopic", "hashing", "batchRows"),
    *("deliverAfter", "batchBytes", "subscriptionType", "force", "withEventTimeOrder"),
)
GOOD = {
    "assign": '{"t":[0]}',
    "startingOffsets": "earliest",
    "startingTimestamp": "1700000000005",
    "startingOffsetsByTimestamp": '{"t":{"0":1700000000005}}',
    "startingOffsetsByTimestampStrategy": "latest",
    "endingOffsets": "latest",
    "endingTimestamp": "2030-01-01",
    "timeZone": "Asia/Kolkata",
    "endingOffsetsByTimestamp": '{"t":{"0":1700000000005}}',
    "failOnDataLoss": "false",
    **dict.fromkeys(("onBadEntry", "onOtherFormat"), "skip"),
    "onSubscriptionMoved": "fail",
    "overwriteHeld": "true",
    "valueFormat": "arrow",
    "includeHeaders": "true",
    "includeMetadata": "true",
    "includeProducer": "true",
    "filterPushdown": "false",
    "metadata": "topics",
    "routing": "single",
    "compression": "zstd",
    "durability": "page-cache",
    "onReplay": "append",
    "schemaMode": "evolve",
    "mergeSchema": "true",
    "maxInFlightBytes": "8m",
}
LONG = "x" * 201
HOUR_MS = 3_600_000
WRONG_TEXTS: dict[str, tuple[str, type[LedgerError], str]] = {
    "subscribe": ("no/good", TopicNameInvalid, "'no/good' is no name of a topic"),
    "topic": ("no/good", TopicNameInvalid, "'no/good' is no name of a topic"),
    "badRecordsTopic": ("no/good", TopicNameInvalid, "'no/good' is no name of a topic"),
    "assign": ('{"t":0}', OptionInvalid, "assign has '0' for 't'"),
    "startingOffsets": ("soon", OffsetsMalformed, "startingOffsets is 'soon'"),
    "endingOffsets": ("soon", OffsetsMalformed, "endingOffsets is 'soon'"),
    "startingTimestamp": ("soon", OptionInvalid, "startingTimestamp is 'soon'"),
    "endingTimestamp": ("soon", OptionInvalid, "endingTimestamp is 'soon'"),
    "startingOffsetsByTimestamp": ('{"t":5}', OptionInvalid, "startingOffsetsByTimestamp is"),
    "endingOffsetsByTimestamp": ('{"t":5}', OptionInvalid, "endingOffsetsByTimestamp is"),
    "startingSubscription": (LONG, OptionInvalid, "startingSubscription has 201 characters"),
    "subscription": (LONG, OptionInvalid, "subscription has 201 characters"),
    "txnAppId": (LONG, OptionInvalid, "txnAppId has 201 characters"),
    "userMetadata": ("x" * 8193, OptionInvalid, "userMetadata has 8193 characters"),
}
"""Of options that are text: a wrong value, and how it is refused."""
REFUSED_LATER = {"serviceUrl": "by who connects: metadata/test_service_url.py, error_cases.py"}
PARTNERS = {
    "timeZone": {"startingTimestamp": "1700000000005"},
    "startingOffsetsByTimestampStrategy": {"startingTimestamp": "1700000000005"},
    "maxTriggerDelay": {"minOffsetsPerTrigger": "5"},
    "onSubscriptionMoved": {"subscription": "s"},
    "txnAppId": {"txnVersion": "0"},
    "txnVersion": {"txnAppId": "a"},
    "onReplay": {"txnAppId": "a", "txnVersion": "0"},
    **{name: {"valueFormat": "arrow"} for name in ("schemaMode", "mergeSchema")},
}
WAYS = ("subscribe", "subscribePattern", "assign", "topic")
EVERY = [(use, option) for use in Use for option in options_for(use)]


def read(**given: str) -> options.ReadOptions:
    return options.batch_read_options({"topic": "t", **given})


def stream(**given: str) -> options.ReadOptions:
    return options.stream_read_options({"topic": "t", **given})


def write(**given: str) -> options.WriteOptions:
    return options.batch_write_options({"topic": "t", **given})


def alone(use: Use, option: option_table.Option) -> dict[str, str]:
    """What must stand beside the option."""
    beside = {} if option.name in WAYS else {"path": "t"}
    taken = {one.name for one in options_for(use)}
    partners = PARTNERS.get(option.name, {})
    return beside | {name: text for name, text in partners.items() if name in taken}


def test_the_page_has_exactly_the_options_that_are_taken():
    page = PAGE.read_text()
    for table in (READ_OPTIONS, WRITE_OPTIONS):
        wanted = as_markdown(table)
        assert f"|---|---|---|\n{wanted}\n" in page, f"docs/spark.md should have:\n{wanted}"


@pytest.mark.parametrize(("use", "option"), EVERY, ids=lambda one: getattr(one, "name", None))
def test_every_option_is_taken_by_each_of_its_names_whatever_their_case(use, option):
    value = GOOD.get(option.name, "7")
    for name in option.names:
        PARSERS[use]({**alone(use, option), name.swapcase(): value})


@pytest.mark.parametrize(("use", "option"), EVERY, ids=lambda one: getattr(one, "name", None))
def test_every_option_is_refused_by_name_when_it_is_empty(use, option):
    with pytest.raises(OptionInvalid, match=f"option {option.name} is empty"):
        PARSERS[use]({**alone(use, option), option.name: "  "})


@pytest.mark.parametrize(("use", "option"), EVERY, ids=lambda one: getattr(one, "name", None))
def test_every_misspelt_option_is_refused_with_the_name_that_was_meant(use, option):
    with pytest.raises(OptionUnknown, match=f"Did you mean {option.name}"):
        PARSERS[use]({**alone(use, option), f"{option.name}X": GOOD.get(option.name, "7")})


@pytest.mark.parametrize(
    ("use", "option"),
    [(use, one) for use, one in EVERY if not isinstance(one.kind, option_table.Text)],
    ids=lambda one: getattr(one, "name", None),
)
def test_every_option_that_is_no_text_is_refused_by_name_when_its_value_is_wrong(use, option):
    with pytest.raises(OptionInvalid, match=rf"LEDGER_OPTION.INVALID_VALUE\] {option.name} is"):
        PARSERS[use]({**alone(use, option), option.name: "[?"})


@pytest.mark.parametrize(
    ("use", "option"),
    [
        (use, one)
        for use, one in EVERY
        if isinstance(one.kind, option_table.Text) and one.name not in REFUSED_LATER
    ],
    ids=lambda one: getattr(one, "name", None),
)
def test_every_option_that_is_text_is_refused_when_its_value_is_wrong(use, option):
    assert option.name in WRONG_TEXTS, "a wrong value for each, or why it is refused later"
    value, error, said = WRONG_TEXTS[option.name]
    with pytest.raises(error, match=re.escape(said)):
        PARSERS[use]({**alone(use, option), option.name: value})


@pytest.mark.parametrize("use", Use, ids=lambda use: use.name)
@pytest.mark.parametrize("name", NOT_BUILT)
def test_what_is_not_built_is_refused_as_an_unknown_option(use, name):
    with pytest.raises(OptionUnknown, match=f"{use.value} has no option '{name.lower()}'"):
        PARSERS[use]({"topic": "t", name: "true"})


def test_a_value_format_that_is_not_built_is_refused_as_any_wrong_value():
    for parse in PARSERS.values():
        with pytest.raises(OptionInvalid, match="valueFormat is 'avro'"):
            parse({"topic": "t", "valueFormat": "avro"})


@pytest.mark.parametrize(
    ("use", "option"),
    [(use, one) for use, one in EVERY if one.aliases],
    ids=lambda one: getattr(one, "name", None),
)
def test_an_option_given_by_two_of_its_names_is_a_conflict(use, option):
    value = GOOD.get(option.name, "7")
    for other in option.aliases:
        with pytest.raises(OptionConflict):
            PARSERS[use]({**alone(use, option), option.name: value, other: value})


def test_more_partitions_than_a_topic_has_are_refused():
    with pytest.raises(OptionInvalid, match="from 1 to 100000"):
        write(partitions="100001")


def test_an_unknown_option_that_is_near_nothing_is_refused_with_all_names():
    with pytest.raises(OptionUnknown, match=r"zzz.*The options are: .*compression"):
        options.stream_write_options({"topic": "t", "zzz": "1"})


@pytest.mark.parametrize("name", ["checkpointLocation", "queryName", "outputMode"])
def test_options_of_spark_itself_are_left_alone(name):
    assert options.stream_write_options({"topic": "t", name: "x"}).target == "t"


def test_an_option_of_the_other_kind_of_query_says_where_it_belongs():
    with pytest.raises(OptionUnknown, match=r"belongs to a batch read.*this is a streaming read"):
        stream(endingOffsets="latest")
    with pytest.raises(OptionUnknown, match="belongs to a write"):
        read(partitions="3")
    with pytest.raises(OptionUnknown, match="belongs to a streaming read"):
        read(maxOffsetsPerTrigger="1")
    with pytest.raises(OptionUnknown, match="belongs to a batch write"):
        options.stream_write_options({"topic": "t", "txnAppId": "a"})
    with pytest.raises(OptionUnknown, match="belongs to a read"):
        write(failOnDataLoss="false")


@pytest.mark.parametrize("use", Use, ids=lambda use: use.name)
@pytest.mark.parametrize(
    ("name", "remedy"),
    [
        ("kafka.bootstrap.servers", "Here it is serviceUrl"),
        ("kafka.group.id", "Leave it out, or name a durable cursor with subscription"),
        ("groupIdPrefix", "Leave it out, or name a durable cursor with subscription"),
        ("kafkaConsumer.pollTimeoutMs", "Leave it out"),
        ("fetchOffset.numRetries", "Leave it out"),
        ("fetchOffset.retryIntervalMs", "Leave it out"),
        ("kafka.acks", "Here it is ackQuorum"),
        ("kafka.sasl.mechanism", "Leave it out: connections are not encrypted"),
        ("kafka.request.timeout.ms", "Leave it out: there is no such option"),
    ],
)
def test_an_option_of_kafka_is_refused_with_what_it_is_here(use, name, remedy):
    with pytest.raises(OptionUnknown, match=f"option of Kafka's source, not of this one. {remedy}"):
        PARSERS[use]({"topic": "t", name: "x"})


def test_what_is_an_option_here_is_not_refused_as_one_of_kafka():
    taken = {name.lower() for one in (*READ_OPTIONS, *WRITE_OPTIONS) for name in one.names}
    assert not any(map(option_table.kafka_remedy, taken))
    for remedy in option_table.KAFKA_REMEDIES.values():
        for name in re.findall(r"Here it is (\w+)", remedy):
            assert name.lower() in taken, f"{remedy} names an option that there is"


def kafkas_options_on_the_page() -> dict[str, str]:
    """What the page says of each option of Kafka's, by the name that the code has for it."""
    text = FROM_KAFKA.read_text()
    rows = text.partition("| Kafka's | here |")[2].partition("\n\n")[0]
    found = re.findall(r"^\| `([\w.]+)\*?`(?:, any other)? \| (.+) \|$", rows, re.M)
    assert len(found) == len(dict(found)) == rows.count("\n") - 1, "a line each, none twice"
    return dict(found)


def test_from_kafka_says_of_each_option_of_kafkas_what_its_error_says():
    page = kafkas_options_on_the_page()
    assert set(page) == {*option_table.KAFKA_REMEDIES, *KAFKAS_TOO}
    for name, remedy in option_table.KAFKA_REMEDIES.items():
        assert page[name] == remedy


def test_an_option_that_has_kafkas_name_is_taken_and_from_kafka_calls_it_the_same():
    page = kafkas_options_on_the_page()
    taken = {one.name for one in (*READ_OPTIONS, *WRITE_OPTIONS)}
    for name in KAFKAS_TOO:
        assert name in taken
        assert page[name].startswith("The same")


def test_where_no_topic_is_named_it_is_said_how_sql_names_one():
    for parse in PARSERS.values():
        with pytest.raises(OptionMissing, match=r"WITH \(topic '...'\)"):
            parsed = parse({})
            assert isinstance(parsed, options.WriteOptions), "each row of a write may name its own"
            assert parsed.target


# -- what is read ----------------------------------------------------------------------------


def test_the_path_of_load_and_start_names_the_topic():
    assert options.batch_read_options({"path": "t"}).topics == ("t",)
    assert options.stream_write_options({"path": "t"}).target == "t"


def test_several_topics_are_separated_by_commas_and_known_by_their_short_names():
    given = {"subscribe": "a, persistent://public/default/b, x/y/z"}
    assert options.batch_read_options(given).topics == ("a", "b", "persistent://x/y/z")


@pytest.mark.parametrize("given", [{}, {"subscribe": "  "}, {"subscribe": ","}])
def test_no_topic_is_an_error(given):
    with pytest.raises((OptionMissing, OptionInvalid), match=r"topic|empty"):
        options.batch_read_options(given)


def test_a_topic_named_twice_or_badly_is_an_error():
    with pytest.raises(OptionInvalid, match="twice"):
        options.batch_read_options({"subscribe": "a,public/default/a"})
    with pytest.raises(TopicNameInvalid, match="no/good"):
        options.batch_read_options({"subscribe": "no/good"})


def test_a_topic_named_in_two_ways_is_an_error_naming_both():
    with pytest.raises(OptionConflict, match=r"subscribe \('a'\).*path.*\('b'\)"):
        options.stream_read_options({"subscribe": "a", "path": "b"})
    with pytest.raises(OptionConflict, match=r"subscribe \('a'\) and subscribePattern \('b'\)"):
        options.stream_read_options({"topic": "a", "subscribePattern": "b"})
    with pytest.raises(OptionConflict, match=r"serviceUrl is given in 2 ways"):
        read(serviceUrl="a", **{"bootstrap.servers": "b"})


def test_a_pattern_takes_the_whole_names_that_it_matches():
    given = options.stream_read_options({"topicsPattern": "fl.*|x"})
    assert given.topics == ()
    assert given.matching(["xy", "flights", "x", "afl"]) == ["flights", "x"]


def test_assigned_partitions_are_read_of_their_topics():
    given = options.batch_read_options({"assign": '{"t":[1,0]}'})
    assert (given.topics, given.assigned) == (("t",), {"t": (0, 1)})


def test_the_service_url_falls_back_to_the_environment(monkeypatch):
    monkeypatch.setenv("LEDGER_SERVICE_URL", "zk://elsewhere:1/x")
    assert read().service_url == "zk://elsewhere:1/x"
    assert read(**{"service.url": "zk://here:1/x"}).service_url == "zk://here:1/x"


# -- where it begins and ends ----------------------------------------------------------------


def test_a_stream_starts_at_the_latest_row_and_a_batch_at_the_earliest():
    assert stream().starting == AtEdge("startingOffsets", LATEST)
    assert read().starting == AtEdge("startingOffsets", EARLIEST)
    assert read().ending == AtEdge("endingOffsets", LATEST)


def test_a_timestamp_goes_before_those_by_partition_and_these_before_offsets():
    every = {
        "startingOffsets": '{"t":{"0":1}}',
        "startingOffsetsByTimestamp": '{"t":{"0":1700000000002}}',
    }
    assert read(**every, startingTimestamp="1700000000003").starting == AtTime(
        "startingTimestamp", "error", 1_700_000_000_003
    )
    by_partition = {"t": {0: 1_700_000_000_002}}
    assert read(**every).starting == AtTime(
        "startingOffsetsByTimestamp", "error", by_partition=by_partition
    )
    del every["startingOffsetsByTimestamp"]
    assert read(**every).starting == AtOffsets("startingOffsets", {"t": {0: 1}}, {})
    ends = {"endingOffsets": "latest", "endingTimestamp": "1970-01-01T00:00:01Z"}
    assert read(**ends).ending == AtTime("endingTimestamp", "latest", 1000)


def test_one_that_another_goes_before_must_be_well_formed_too():
    with pytest.raises(OffsetsMalformed, match="soon"):
        read(startingTimestamp="1700000000003", startingOffsets="soon")


def test_the_strategy_says_what_a_missing_row_means():
    given = {"startingTimestamp": "1700000000003", "startingOffsetsByTimestampStrategy": "Earliest"}
    assert read(**given).starting == AtTime("startingTimestamp", "earliest", 1_700_000_000_003)
    with pytest.raises(
        OptionMissing, match="startingTimestamp is not given, and startingOffsetsByT"
    ):
        read(startingOffsetsByTimestampStrategy="latest")


def test_a_read_starts_at_a_subscription_and_at_nothing_else():
    assert stream(startingSubscription="s").starting == AtSubscription("startingSubscription", "s")
    for other in ("startingOffsets", "startingTimestamp", "startingOffsetsByTimestamp"):
        with pytest.raises(OptionConflict, match=f"startingSubscription is 's' and {other}"):
            stream(startingSubscription="s", **{other: GOOD[other]})


def test_a_time_is_of_the_zone_that_it_says_else_of_the_option_else_of_this_process(monkeypatch):
    monkeypatch.setenv("TZ", "America/New_York")
    time.tzset()
    try:
        local = read(startingTimestamp="2024-05-01T12:00:00").starting
        told = read(startingTimestamp="2024-04-01T12:00:00Z", endingTimestamp="2024-05-01").ending
        zoned = read(startingTimestamp="2024-05-01T12:00:00", timeZone="asia/kolkata".title())
        away = read(startingTimestamp="2024-05-01T12:00:00", timeZone="-03:30").starting
    finally:
        monkeypatch.undo()
        time.tzset()
    noon = 1_714_564_800_000
    assert isinstance(local, AtTime) and isinstance(zoned.starting, AtTime)
    assert (local.every_ms, local.zoneless_times) == (
        noon + 4 * HOUR_MS,
        (("2024-05-01T12:00:00", noon + 4 * HOUR_MS),),
    )
    assert isinstance(told, AtTime) and told.every_ms == noon - 8 * HOUR_MS
    assert (zoned.starting.every_ms, zoned.zoneless_times) == (noon - 11 * HOUR_MS // 2, ())
    assert isinstance(away, AtTime) and away.every_ms == noon + 7 * HOUR_MS // 2


def test_every_time_that_says_no_zone_is_kept_for_the_tasks_to_compare():
    times = '{"t":{"0":0,"1":"2024-05-01","2":"2024-05-01T00:00Z"}}'
    given = read(startingOffsetsByTimestamp=times, endingTimestamp="2024-05-02")
    assert [text for text, _ in given.zoneless_times] == ["2024-05-01", "2024-05-02"]


def test_an_end_before_its_start_is_refused():
    with pytest.raises(
        OffsetsStartAfterEnd, match="startingTimestamp is 1700000000005, which is after"
    ):
        read(startingTimestamp="1700000000005", endingTimestamp="1700000000004")
    read(startingTimestamp="1700000000005", endingTimestamp="1700000000005")


def test_filters_that_spark_would_give_to_other_queries_too_are_refused():
    with pytest.raises(OptionInvalid, match=r"filterPushdown is true, but Spark .* assign"):
        read(filterPushdown="true")


# -- how much ---------------------------------------------------------------------------------


def test_limits_are_rows_bytes_and_a_delay():
    given = {"maxOffsetsPerTrigger": "9", "maxBytesPerTrigger": "2mb", "minOffsetsPerTrigger": "3"}
    assert stream(**given).limits == Limits(9, 2 << 20, 3, 900_000)
    assert stream(**given, maxTriggerDelay="30s").limits.delay_ms_max == 30_000
    assert stream().limits == Limits()


def test_limits_that_contradict_each_other_or_mean_nothing_are_refused():
    with pytest.raises(OptionConflict, match=r"minOffsetsPerTrigger is 9, more than .* 8"):
        stream(maxOffsetsPerTrigger="8", minOffsetsPerTrigger="9")
    with pytest.raises(
        OptionMissing, match=r"minOffsetsPerTrigger is not given, and maxTriggerDelay"
    ):
        stream(maxTriggerDelay="1s")


@pytest.mark.parametrize(
    ("text", "size"),
    [("1", 1), ("5b", 5), ("2k", 2048), ("64M", 64 << 20), ("1 gb", 1 << 30), ("1t", 1 << 40)],
)
def test_a_size_has_units_of_1024(text, size):
    assert read(maxBytesPerPartition=text).task_bytes == size


@pytest.mark.parametrize("text", ["0", "-1", "1.5m", "m", "64x", "1kbb", "9" * 30, "٣"])
def test_what_is_no_size_is_refused(text):
    with pytest.raises(OptionInvalid, match=r"maxBytesPerPartition is .* 64m"):
        read(maxBytesPerPartition=text)


@pytest.mark.parametrize("text", ["-1s", "1.5h", "soon", "15 minutes of"])
def test_what_is_no_length_of_time_is_refused(text):
    with pytest.raises(OptionInvalid, match=r"maxTriggerDelay is .* 15m"):
        stream(minOffsetsPerTrigger="1", maxTriggerDelay=text)


@pytest.mark.parametrize("text", ["0", "two", "1.0", "+-1", "9223372036854775808"])
def test_what_is_no_number_is_refused(text):
    with pytest.raises(OptionInvalid, match=r"minPartitions is .* 1 or more"):
        read(minPartitions=text)


def test_tasks_are_bounded_by_rows_and_bytes():
    given = read(maxRecordsPerPartition="5", minPartitions="3")
    assert (given.task_rows, given.task_bytes, given.min_partitions) == (5, 256 << 20, 3)


def test_a_key_filter_is_one_key_or_a_list():
    assert read(keyFilter="AA").key_filter == (b"AA",)
    assert read(keyFilter='["é","b","é"]').key_filter == ("é".encode(), b"b")
    for text in ("[]", "[1]", '["a"', '["\\ud800"]'):
        with pytest.raises(OptionInvalid, match="keyFilter is"):
            read(keyFilter=text)


def test_a_listing_may_be_of_all_topics_and_takes_no_option_of_a_read():
    assert options.batch_read_options({"metadata": "Lag"}).metadata == "lag"
    assert read(metadata="lag").topics == ("t",)
    with pytest.raises(OptionConflict, match="metadata is 'lag' and startingOffsets"):
        read(metadata="lag", startingOffsets="latest")


def test_the_shape_of_a_read_is_known_before_its_kind():
    shape = options.shape_options({"TOPIC": "t", "includeheaders": "true", "nonsense": "1"})
    assert (shape.value_format, shape.include_headers, shape.metadata) == ("binary", True, None)
    with pytest.raises(OptionInvalid, match="valueFormat is 'avro'"):
        options.shape_options({"valueFormat": "avro"})


# -- writes -----------------------------------------------------------------------------------


def test_a_write_without_a_topic_takes_it_from_each_row():
    given = options.stream_write_options({})
    assert (given.topic, given.txn_target) == (None, "*")
    with pytest.raises(OptionMissing, match="no topic is named"):
        _ = given.target
    assert write().txn_target == "t"


def test_compression_is_none_lz4_or_zstd():
    assert write().compression == "lz4"
    assert write(compression="ZSTD").compression == "zstd"
    with pytest.raises(OptionInvalid, match="none, lz4, zstd"):
        write(compression="gzip")


def test_a_batch_version_needs_its_app_id_and_the_other_way_round():
    with pytest.raises(OptionMissing, match="txnAppId"):
        write(txnVersion="3")
    with pytest.raises(TxnVersionRequired, match="txnAppId is 'a'"):
        write(txnAppId="a")
    both = write(txnVersion="3", txnAppId="a")
    assert (both.txn_app_id, both.txn_version) == ("a", 3)


def test_bad_records_go_to_another_topic():
    assert write(badRecordsTopic="bad").bad_records_topic == "bad"
    with pytest.raises(
        OptionConflict, match="badRecordsTopic is 't', the topic that the rows are written to"
    ):
        write(badRecordsTopic="public/default/t")


def test_memory_in_flight_is_at_least_one_entry():
    assert write().max_in_flight_bytes == 64 << 20
    with pytest.raises(OptionInvalid, match="1048576 bytes or more"):
        write(maxInFlightBytes="1000k")


def test_a_schema_mode_needs_typed_values():
    assert write(valueFormat="schema", schemaMode="evolve").schema_mode == "evolve"
    assert write(valueFormat="arrow", mergeSchema="true").schema_mode == "evolve"
    assert write(valueFormat="arrow", mergeSchema="false").schema_mode == "validate"
    with pytest.raises(OptionMissing, match="valueFormat"):
        write(schemaMode="evolve")
    with pytest.raises(OptionConflict, match="valueFormat is 'string': only values of json"):
        write(schemaMode="evolve", valueFormat="string")
    with pytest.raises(OptionConflict, match="mergeSchema is 'true' and schemaMode is 'evolve'"):
        write(schemaMode="evolve", mergeSchema="true", valueFormat="arrow")


def test_bytes_may_say_that_no_schema_counts():
    assert write().schema_mode == "validate"
    assert write(schemaMode="none").schema_mode == "none"
    assert write(schemaMode="none", valueFormat="string").schema_mode == "none"


def test_every_refusal_is_an_error_of_ours_with_a_class_and_a_remedy():
    with pytest.raises(LedgerError, match=r"^\[LEDGER_OPTION.UNKNOWN\] .*\?$"):
        read(minPartition="3")


@pytest.mark.parametrize("named", ["a,,b", "a,", ",a", " , "])
def test_an_empty_name_among_topics_is_refused(named):
    with pytest.raises(OptionInvalid, match="name is empty"):
        options.stream_read_options({"subscribe": named})


@pytest.mark.parametrize("use", Use, ids=lambda use: use.name)
def test_what_spark_itself_is_told_of_a_stream_is_left_alone_there_and_refused_in_a_batch(use):
    given = {"topic": "t", "checkpointLocation": "/somewhere"}
    if use in option_table.STREAMS:
        PARSERS[use](given)
        return
    with pytest.raises(OptionUnknown, match=f"belongs to a streaming query; this is {use.value}"):
        PARSERS[use](given)


def test_a_path_that_is_a_list_is_a_wrong_value():
    with pytest.raises(OptionInvalid, match="is a list"):
        options.batch_read_options({"paths": '["a","b"]'})


@pytest.mark.parametrize("value_format", ["json", "arrow", "schema"])
def test_bytes_as_they_are_need_a_format_with_a_column_for_them(value_format):
    given = {"topic": "t", "onBadEntry": "raw", "valueFormat": value_format}
    with pytest.raises(OptionConflict, match="onBadEntry is 'raw'"):
        options.batch_read_options(given)
    for kept in ({**given, "onBadEntry": "skip"}, {**given, "valueFormat": "string"}):
        assert options.batch_read_options(kept).on_bad_entry == kept["onBadEntry"]
