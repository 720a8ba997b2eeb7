"""What a reader and a writer may be told, and what is refused by name."""

import pytest

from spark_ledger.errors import OptionConflict, OptionInvalid, OptionMissing, OptionUnknown
from spark_ledger.spark import options


def test_names_are_compared_without_case():
    read = options.stream_read_options({"SUBSCRIBE": "t", "maxoffsetspertrigger": "7"})
    assert (read.topics, read.max_offsets_per_trigger) == (("t",), 7)


def test_a_stream_starts_at_the_latest_row_and_a_batch_at_the_earliest():
    assert options.stream_read_options({"topic": "t"}).starting == "latest"
    assert options.batch_read_options({"topic": "t"}).starting == "earliest"


def test_the_path_of_load_and_start_names_the_topic():
    assert options.batch_read_options({"path": "t"}).topics == ("t",)
    assert options.stream_write_options({"path": "t"}).target == "t"


def test_several_topics_are_separated_by_commas():
    assert options.batch_read_options({"subscribe": "a, b"}).topics == ("a", "b")


def test_an_unknown_option_is_refused_with_the_nearest_name():
    with pytest.raises(OptionUnknown, match=r"LEDGER_OPTION.UNKNOWN.*startingofsets.*mean startin"):
        options.batch_read_options({"topic": "t", "startingofsets": "earliest"})


def test_an_unknown_option_that_is_near_nothing_is_refused_with_all_names():
    with pytest.raises(OptionUnknown, match=r"zzz.*Known are: .*compression"):
        options.stream_write_options({"topic": "t", "zzz": "1"})


@pytest.mark.parametrize("given", [{}, {"subscribe": "  "}, {"subscribe": ","}])
def test_no_topic_is_an_error(given):
    with pytest.raises((OptionMissing, OptionInvalid), match=r"topic|empty"):
        options.batch_read_options(given)


def test_a_topic_named_in_two_ways_is_an_error_naming_both():
    with pytest.raises(OptionConflict, match=r"subscribe \('a'\).*path.*\('b'\)"):
        options.stream_read_options({"subscribe": "a", "path": "b"})


@pytest.mark.parametrize("name", ["checkpointLocation", "queryName", "outputMode"])
def test_options_of_spark_itself_are_left_alone(name):
    assert options.stream_write_options({"topic": "t", name: "x"}).target == "t"


@pytest.mark.parametrize(
    "given",
    [
        {"minPartitions": "0"},
        {"minPartitions": "two"},
        {"failOnDataLoss": "maybe"},
    ],
)
def test_a_value_of_the_wrong_kind_is_refused_by_name(given):
    with pytest.raises(OptionInvalid, match=next(iter(given))):
        options.batch_read_options({"topic": "t", **given})


def test_an_option_of_the_other_kind_of_query_says_where_it_belongs():
    with pytest.raises(OptionUnknown, match="belongs to a batch read"):
        options.stream_read_options({"topic": "t", "endingOffsets": "latest"})
    with pytest.raises(OptionUnknown, match="belongs to a write"):
        options.batch_read_options({"topic": "t", "partitions": "3"})
    with pytest.raises(OptionUnknown, match="belongs to a streaming read"):
        options.batch_read_options({"topic": "t", "maxOffsetsPerTrigger": "1"})


def test_compression_is_none_lz4_or_zstd():
    assert options.stream_write_options({"topic": "t"}).compression == "none"
    assert options.stream_write_options({"topic": "t", "compression": "LZ4"}).compression == "lz4"
    with pytest.raises(OptionInvalid, match="none, lz4, zstd"):
        options.stream_write_options({"topic": "t", "compression": "gzip"})


def test_a_batch_version_needs_its_app_id():
    with pytest.raises(OptionMissing, match="txnAppId"):
        options.batch_write_options({"topic": "t", "txnVersion": "3"})
    both = options.batch_write_options({"topic": "t", "txnVersion": "3", "txnAppId": "a"})
    assert (both.txn_app_id, both.txn_version) == ("a", 3)


def test_the_service_url_falls_back_to_the_environment(monkeypatch):
    monkeypatch.setenv("LEDGER_SERVICE_URL", "zk://elsewhere:1/x")
    assert options.batch_read_options({"topic": "t"}).service_url == "zk://elsewhere:1/x"
