"""Which messages are delayed, in the records of an ack ledger, beside plain dictionaries."""

import base64

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from pyroaring import BitMap64

from spark_ledger.topic.acks.delayed import (
    DUE_MS_MAX,
    PREFIX,
    ROWS_MAX,
    DelayedRows,
    DelayRecords,
    decoded,
    encoded,
)
from spark_ledger.topic.acks.entries import (
    AckFold,
    AckKey,
    AckRecord,
    AckState,
    WriteKind,
    decode,
    encode,
    record_bytes,
    state_records,
)

DELAYED = st.dictionaries(st.integers(0, 1 << 40), st.integers(0, 1 << 42), max_size=50)
KEY = AckKey("s", "token", 1)
STATE = AckState(3, BitMap64([5, 7]), 2)


def rows_of(delayed):
    offsets = sorted(delayed)
    return DelayedRows(
        np.array(offsets, np.int64), np.array([delayed[o] for o in offsets], np.int64)
    )


def plain(rows):
    return dict(zip(rows.offsets.tolist(), rows.dues_ms.tolist(), strict=True))


class Index:
    """As a broker has it."""

    def __init__(self, delayed):
        self.delayed, self.added, self.loaded = dict(delayed), dict(delayed), None
        self.on_added = None

    @property
    def bytes(self):
        return 32 * len(self.delayed)

    def load(self, rows):
        self.loaded = plain(rows)
        others = bool(self.delayed)
        self.delayed |= self.loaded
        return others

    def take_added(self):
        added, self.added = self.added, {}
        return rows_of(added)

    def take_all(self):
        self.added = {}
        return rows_of(self.delayed)


@given(DELAYED)
def test_what_is_encoded_is_decoded(delayed):
    assert plain(decoded(list(encoded(rows_of(delayed), 1)))) == delayed


def test_a_time_that_no_clock_will_show_costs_no_other_message_its_place_in_the_record():
    delayed = {1: 5, 2: (1 << 63) - 1, 3: DUE_MS_MAX + 1}
    stored = plain(decoded(list(encoded(rows_of(delayed), 1))))
    assert stored == {1: 5, 2: DUE_MS_MAX, 3: DUE_MS_MAX}
    assert plain(decoded(list(encoded(rows_of({2: 1 << 62}), 1)))) == {2: DUE_MS_MAX}


def test_a_million_messages_take_few_bytes_whether_their_times_rise_or_not():
    count = 1_000_000
    offsets, random = np.arange(count, dtype=np.int64), np.random.default_rng(1)
    rising = DelayedRows(offsets, 1_000_000_000_000 + offsets // 16)
    apart = DelayedRows(
        np.sort(random.choice(10 * count, count, replace=False)).astype(np.int64),
        1_000_000_000_000 + random.integers(0, 30 * 86_400_000, count),
    )
    for rows, bytes_max in ((rising, 4 << 20), (apart, 8 << 20)):
        records = list(encoded(rows, 1))
        assert len(records) == -(-count // ROWS_MAX)
        assert sum(map(record_bytes, records)) < bytes_max
        entries = encode(WriteKind.SNAPSHOT, 1, records)  # no name is too long
        assert sum(map(len, entries)) < bytes_max


def test_changes_and_snapshots_give_the_index_to_the_next_owner():
    owner, index, dirty = DelayRecords(lambda: None), Index({1: 10}), []
    owner.keep(index)
    fold = AckFold()

    def write(kind, records):
        for entry in encode(kind, 1, [*state_records({KEY: STATE}), *records]):
            fold.add(decode(entry))

    write(WriteKind.SNAPSHOT, owner.records(1, 1000, is_whole=True))
    index.added = {4: 40, 9: 90}
    index.delayed |= index.added
    write(WriteKind.CHANGES, owner.records(1, 1000, is_whole=False))
    states = fold.states
    following = DelayRecords(lambda: dirty.append(1))
    following.take_from(states)
    assert states == {KEY: STATE} and not dirty
    taken = Index({2: 20})
    following.keep(taken)
    assert taken.loaded == {1: 10, 4: 40, 9: 90}
    assert dirty and following.is_dirty


def test_an_index_that_nothing_uses_is_carried_on_by_owners_that_know_it_and_by_those_that_do_not():
    records = list(encoded(rows_of({1: 10, 4: 40}), 1))
    fold = AckFold()
    for entry in encode(WriteKind.SNAPSHOT, 1, [*state_records({KEY: STATE}), *records]):
        fold.add(decode(entry))
    older = [*state_records(fold.states)]  # an owner that takes the records for states
    for carried in (older, None):
        owner, states = DelayRecords(lambda: None), {}
        for record in records if carried is None else carried:
            states[record.key] = AckState(record.position, record.rows, record.owner_epoch)
        owner.take_from(states)
        index = Index({})
        again = DelayRecords(lambda: None)
        again.take_from(
            {
                record.key: AckState(record.position, record.rows, record.owner_epoch)
                for record in owner.records(2, 1000, is_whole=True)
            }
        )
        again.keep(index)
        assert index.loaded == {1: 10, 4: 40}


@given(st.binary(max_size=80) | st.builds(bytes, st.lists(st.sampled_from([0, 1, 255]))))
def test_malformed_records_are_left_out(payload):
    good = list(encoded(rows_of({3: 30}), 1))
    token = PREFIX + base64.b64encode(payload).decode()
    bad = AckRecord(AckKey("delayed messages", token, 0), 1, 0, BitMap64(), replaces=True)
    rows = decoded([bad, *good])
    assert 3 in rows.offsets
    assert np.all(np.diff(rows.offsets) > 0) and np.all(rows.offsets >= 0)


@pytest.mark.parametrize("token", [PREFIX + "%%%", PREFIX, PREFIX + "AAAA"])
def test_a_record_that_is_cut_off_is_left_out(token):
    bad = AckRecord(AckKey("delayed messages", token, 0), 1, 0, BitMap64(), replaces=True)
    assert plain(decoded([bad])) == {}
