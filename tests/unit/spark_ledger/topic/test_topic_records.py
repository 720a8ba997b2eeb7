import json
from dataclasses import replace

import pytest

from spark_ledger import errors
from spark_ledger.topic.log import records
from spark_ledger.topic.log.actions import Append
from spark_ledger.topic.log.policies import TopicPolicies
from spark_ledger.topic.log.records import (
    Commit,
    Head,
    IdBlock,
    IntentRecord,
    IntentState,
    QueryPointer,
    TopicLife,
    TopicRecord,
    TopicRows,
    TxnRecord,
)
from spark_ledger.topic.log.segments import Segment

SEGMENT = Segment(1, 42, 3, ((0, 1), (4, 4)), (10, 20, 5), 35, 3500, 1000, 2000)
COMMIT = Commit("c1", "q", "t", 7, "r", "i", (Append((SEGMENT,)),))

TOPIC_ID = "00000000-0000-4000-8000-000000000000"
PAIRS = [
    (COMMIT, records.encode_commit, records.decode_commit),
    (Head(5, TopicLife.DELETED), records.encode_head, records.decode_head),
    (TopicRecord("persistent://a/b/c", 4), records.encode_topic, records.decode_topic),
    (Head(5, TopicLife.OPEN, "c1"), records.encode_head, records.decode_head),
    (TxnRecord(7, "r", "c1", "id", 3, {0: 10, 2: 5}), records.encode_txn, records.decode_txn),
    (
        TxnRecord(7, "r", "c1", "id", 3, {0: 10}, {"other": TopicRows(4, {1: 2})}),
        records.encode_txn,
        records.decode_txn,
    ),
    (
        IntentRecord("query", "q", "r", "t", 6, 1, IntentState.CONDEMNED, "stale"),
        records.encode_intent,
        records.decode_intent,
    ),
    (
        IntentRecord("system", "q", "r", "t", 6, snapshots={"id": 12}),
        records.encode_intent,
        records.decode_intent,
    ),
    (QueryPointer("i", "r", 2), records.encode_query_pointer, records.decode_query_pointer),
    (IdBlock(8, 8), records.encode_block, records.decode_block),
    (TOPIC_ID, records.encode_topic_pointer, records.decode_topic_pointer),
]


@pytest.mark.parametrize(("record", "encode", "decode"), PAIRS)
def test_a_record_is_read_as_it_was_written(record, encode, decode):
    assert decode(encode(record)) == record


@pytest.mark.parametrize("grown_to", [0, 7])
@pytest.mark.parametrize("is_partitioned", [True, False])
def test_a_list_of_topics_reads_their_partitions_as_a_whole_record_has_them(
    grown_to, is_partitioned
):
    policies = TopicPolicies(partitioned=is_partitioned)
    record = TopicRecord("persistent://a/b/c", 4, policies, grown_to=grown_to)
    value = records.encode_topic(record)
    assert records.decode_partitions(value) == (max(4, grown_to), is_partitioned)
    later = json.loads(value) | {"min_reader": records.READER_VERSION + 1}
    for unreadable in (value[:-1], b"{}", json.dumps(later).encode()):
        with pytest.raises(errors.UnsupportedFormat):
            records.decode_partitions(unreadable)


def test_partitions_of_records_that_were_seen_are_kept_within_a_limit_of_bytes(monkeypatch):
    decoded, decode = [], records.decode_partitions
    monkeypatch.setattr(
        records, "decode_partitions", lambda value: decoded.append(value) or decode(value)
    )
    one, two = (records.encode_topic(TopicRecord("persistent://a/b/c", n)) for n in (1, 2))
    seen = records.PartitionsSeen()
    assert [seen.of(value) for value in (one, one, two)] == [(1, True), (1, True), (2, True)]
    assert decoded == [one, two]
    seen.BYTES_MAX = len(one)
    three = records.encode_topic(TopicRecord("persistent://a/b/c", 3))
    assert [seen.of(value)[0] for value in (three, three, one)] == [3, 3, 1]
    assert decoded == [one, two, three, one]


def test_a_commit_has_these_bytes():
    assert records.encode_commit(COMMIT) == (
        b'{"actions":[{"action":"append","segments":[{"bytes":3500,"entries":[[0,1],[4,4]],'
        b'"entry_rows":[10,20,5],"ledger":42,"partition":1,"version":3,"written_ms":[1000,2000]}'
        b']}],"app_id":"q","commit_id":"c1","intent":"i","min_reader":1,"min_writer":1,'
        b'"run_id":"r","target":"t","version":7}'
    )


def test_head_and_transaction_record_have_these_bytes():
    assert records.encode_head(Head(5)) == (
        b'{"min_reader":1,"min_writer":1,"next":5,"state":"open"}'
    )
    assert records.encode_txn(TxnRecord(7, "r", "c1", "id", 3, {0: 10})) == (
        b'{"commit_id":"c1","min_reader":1,"min_writer":1,"number":3,"rows":{"0":10},'
        b'"run_id":"r","topic_id":"id","version":7}'
    )


def test_what_earlier_versions_wrote_into_intents_and_transactions_is_read_as_it_was():
    intent = (
        b'{"app_id":"q","generation":0,"kind":"query","min_reader":1,"min_writer":1,'
        b'"run_id":"r","state":"open","target":"t","w0":6,"why":""}'
    )
    assert records.decode_intent(intent) == IntentRecord("query", "q", "r", "t", 6)
    assert records.encode_intent(IntentRecord("query", "q", "r", "t", 6)) == intent


def test_a_transaction_record_stays_small_however_many_partitions_a_commit_has():
    many = {partition: 1_000_000 for partition in range(100_000)}
    record = TxnRecord(7, "r", "c1", "id", 3, many, {"other": TopicRows(4, {0: 1})})

    kept = records.decode_txn(records.encode_txn(record))

    assert len(records.encode_txn(record)) <= records.TXN_BYTES_MAX
    assert kept.topics() == {"id": TopicRows(3), "other": TopicRows(4)}


@pytest.mark.parametrize(("record", "encode", "decode"), PAIRS)
def test_a_record_that_needs_a_newer_reader_is_an_error(record, encode, decode):
    plain = json.loads(encode(record)) | {"min_reader": 4}

    with pytest.raises(errors.UnsupportedFormat, match="needs reader version 4"):
        decode(json.dumps(plain).encode())


@pytest.mark.parametrize(("record", "encode", "decode"), PAIRS)
@pytest.mark.parametrize("damage", [b"", b"{", b"[]", b"null", b'{"min_reader":1}', b"\xff"])
def test_bytes_that_are_no_record_are_an_error(record, encode, decode, damage):
    with pytest.raises(errors.UnsupportedFormat):
        decode(damage)


def test_an_action_that_is_not_known_is_an_error_and_never_skipped():
    plain = json.loads(records.encode_commit(COMMIT))
    plain["actions"].append({"action": "shuffle", "ranges": []})

    with pytest.raises(errors.UnsupportedFormat, match="unknown action 'shuffle'"):
        records.decode_commit(json.dumps(plain).encode())


def test_a_field_that_is_not_known_is_left_alone():
    plain = json.loads(records.encode_head(Head(5))) | {"later": 1}

    assert records.decode_head(json.dumps(plain).encode()) == Head(5)


def test_what_a_commit_demands_of_writers_is_kept():
    strict = replace(COMMIT, min_writer=3)

    assert records.decode_commit(records.encode_commit(strict)).min_writer == 3


@pytest.mark.parametrize(
    ("entries", "entry_rows"),
    [((), ()), (((2, 1),), (1,)), (((0, 1), (1, 2)), (1, 1, 1, 1)), (((0, 1),), (1,)),
     (((0, 0),), (0,)), (((-1, -1),), (1,))],
)  # fmt: skip
def test_a_segment_whose_entries_and_rows_do_not_agree_is_refused(entries, entry_rows):
    with pytest.raises(ValueError, match="entr"):
        Segment(0, 1, 0, entries, entry_rows, sum(entry_rows), 10, 1, 1)


def test_policies_with_quorums_in_the_wrong_order_are_refused():
    with pytest.raises(errors.BadConfig, match="3/2/3"):
        TopicPolicies(3, 2, 3)
