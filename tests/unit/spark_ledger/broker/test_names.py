"""Names of partitions and ids of messages."""

import uuid
from types import SimpleNamespace

import pytest

from spark_ledger.broker import names
from spark_ledger.broker.dispatch import positions
from spark_ledger.broker.names import (
    ledger_number,
    message_id,
    offset_of,
    parse,
    parse_for_lookup,
)
from spark_ledger.broker.wire.commands import LATEST, MessageId, Refusal, ServerError


@pytest.mark.parametrize(
    ("text", "topic", "partition"),
    [
        ("persistent://public/default/t", "t", None),
        ("t-partition-3", "t", 3),
        ("persistent://a/b/t-partition-0", "persistent://a/b/t", 0),
        ("t-partition-x", "t-partition-x", None),
    ],
)
def test_a_name_says_its_topic_and_partition(text, topic, partition):
    found = parse(text)
    assert (found.topic.short, found.partition) == (topic, partition)


@pytest.mark.parametrize(
    "text",
    [
        "non-persistent://public/t",
        "non-persistent://non-persistent://public/default/t",
        "persistent://public/t",
        "a b",
        "x" * 201,
        "x" * 100_000,
    ],
)
def test_a_name_that_is_none_is_refused_by_the_code_after_which_no_client_asks_again(text):
    with pytest.raises(Refusal) as refused:
        parse(text)
    assert refused.value.code is ServerError.NOT_ALLOWED
    assert len(refused.value.message) <= 1000


def test_a_pattern_is_looked_up_by_its_namespace():
    assert parse_for_lookup("persistent://public/default/w-.*") is None
    assert parse_for_lookup("t-partition-3") == parse("t-partition-3")
    for text in (
        "persistent://public/de*/a",
        "persistent://a/b/c/.*",
        "persistent://a/b/c d",
        "a*",
    ):
        with pytest.raises(Refusal):
            parse_for_lookup(text)


def test_a_ledger_number_is_positive_and_the_topics_own():
    ids = [str(uuid.UUID(int=n << 100, version=4)) for n in range(1, 9)]
    numbers = [ledger_number(one) for one in ids]
    assert numbers == [ledger_number(one) for one in ids]
    assert all(0 < number < 2**47 for number in numbers)
    assert len(set(numbers)) >= 4


def test_an_id_names_an_offset_and_one_of_another_topic_is_refused():
    assert offset_of(message_id(9, 100, 0, 7), 9) == 107
    assert offset_of(message_id(9, 100, 0), 9) == 100
    with pytest.raises(Refusal, match="another topic"):
        offset_of(MessageId(ledgerId=8, entryId=1), 9)


def test_a_reader_and_a_seek_begin_at_the_message_that_their_id_names():
    partition = SimpleNamespace(ledger=7, start=100, end=1000)
    whole = positions.offset_named(partition, names.message_id(7, 500, 0))
    within = positions.offset_named(partition, names.message_id(7, 500, 0, 3))
    assert (whole, within) == (500, 503)
    assert positions.offset_named(partition, names.message_id(7, 5, 0, 3)) == 100  # it was trimmed
    assert positions.offset_named(partition, names.id_of_no_message(0)) == 100
    latest = MessageId(ledgerId=LATEST, entryId=LATEST)
    assert positions.offset_named(partition, latest) == 1000
