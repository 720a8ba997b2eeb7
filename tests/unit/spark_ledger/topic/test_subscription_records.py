import json
from dataclasses import replace

import pytest

from spark_ledger import errors
from spark_ledger.topic.subscription import records
from spark_ledger.topic.subscription.records import (
    SubscriptionKind,
    SubscriptionLife,
    SubscriptionRecord,
)

RECORD = SubscriptionRecord(
    SubscriptionKind.QUERY,
    4,
    SubscriptionLife.LIVE,
    "query",
    "run",
    "token",
    "intent",
    42,
    {10: 7, 2: 5},
    (2, 10),
)
GOLDEN = (
    b'{"min_reader":1,"min_writer":1,"query_id":"query","run_id":"run","owner":"token",'
    b'"intent":"intent","kind":"query","epoch":4,"state":"live",'
    b'"cursor":{"ledger":null,"floor":{"2":5,"10":7},"entries":42},"partitions":[2,10]}'
)


def test_a_record_is_json_that_anybody_reads():
    assert records.encode_subscription(RECORD) == GOLDEN
    assert records.decode_subscription(GOLDEN) == RECORD


def test_a_record_names_the_consumers_whose_acknowledgements_it_keeps():
    kept = replace(RECORD, acked_by=("consumers", 3))
    assert records.encode_subscription(kept) == GOLDEN[:-1] + b',"acked_by":["consumers",3]}'
    assert records.decode_subscription(records.encode_subscription(kept)) == kept


@pytest.mark.parametrize("acked_by", [[], ["token"], ["token", 1, 2], ["token", "x"], 7, {"a": 1}])
def test_malformed_names_of_these_consumers_are_refused(acked_by):
    plain = {**json.loads(GOLDEN), "acked_by": acked_by}
    with pytest.raises(errors.UnsupportedFormat, match="not a subscription"):
        records.decode_subscription(json.dumps(plain).encode())


def test_a_record_of_an_earlier_version_is_read_and_names_its_ledger():
    earlier = GOLDEN.replace(b'"ledger":null', b'"ledger":42').replace(b',"entries":42', b"")
    assert records.decode_subscription(earlier) == RECORD


def test_a_record_that_nobody_owned_and_a_mark_come_back_as_they_were():
    fresh = SubscriptionRecord(SubscriptionKind.CONSUMER, floor={0: 3})
    assert records.decode_subscription(records.encode_subscription(fresh)) == fresh
    assert records.decode_mark(records.encode_mark({1: 2, 0: 9})) == {0: 9, 1: 2}


@pytest.mark.parametrize("gone", ["epoch", "kind", "state", "cursor", "owner", "min_reader"])
def test_a_record_without_a_field_is_damaged(gone):
    plain = json.loads(GOLDEN)
    del plain[gone]
    with pytest.raises(errors.UnsupportedFormat, match="not a subscription"):
        records.decode_subscription(json.dumps(plain).encode())


@pytest.mark.parametrize("value", [b"", b"[]", b"{", b'{"min_reader":1}', b"null"])
def test_other_bytes_are_no_record(value):
    with pytest.raises(errors.UnsupportedFormat):
        records.decode_subscription(value)
    with pytest.raises(errors.UnsupportedFormat):
        records.decode_mark(value)


def test_a_record_of_a_later_version_is_not_guessed():
    plain = {**json.loads(GOLDEN), "min_reader": 4}
    with pytest.raises(errors.UnsupportedFormat, match="needs reader version 4"):
        records.decode_subscription(json.dumps(plain).encode())


def test_a_field_that_a_later_version_adds_is_left_alone():
    plain = {**json.loads(GOLDEN), "colour": "red"}
    assert records.decode_subscription(json.dumps(plain).encode()) == RECORD


def test_positions_of_a_few_thousand_partitions_fit_into_a_node_and_more_do_not():
    assert records.fits({p: 10**6 for p in range(3000)})
    assert not records.fits({p: 10**6 for p in range(6000)})
