"""The entries of an ack ledger, compared with plain sets of offsets."""

import zlib
from itertools import islice

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pyroaring import BitMap64

from spark_ledger import errors
from spark_ledger.topic.acks.entries import (
    NO_SNAPSHOT,
    AckFold,
    AckKey,
    AckRecord,
    AckState,
    BadAckEntry,
    WriteKind,
    decode,
    encode,
    state_records,
)

KEY = AckKey("s", "t", 2)
RECORD = AckRecord(KEY, 5, 7, BitMap64([9, 10]), replaces=True)
GOLDEN = bytes.fromhex(
    "534c4131 01 01 0000 0500000000000000 0300000000000000 00000000 01000000 01000000 00000000"
    "0200000000000000 0500000000000000 0700000000000000 0100 0100 01 000000 20000000"
    "74 73 0100000000000000 00000000 3a300000 01000000 0000 0100 10000000 0900 0a00"
)
BOMB = zlib.compress(bytes(3 << 20))
KEYS = [AckKey("a", "x", 1), AckKey("a", "y", 2), AckKey("b", "z", 1)]
STEP = st.tuples(
    st.sampled_from(["add", "move", "reset", "snapshot", "forget"]),
    st.sampled_from(KEYS),
    st.integers(0, 400_000),
    st.integers(1, 40),
)


def test_a_state_that_was_read_can_be_written_again():
    changes = AckRecord(KEY, 5, 10, BitMap64([12]), replaces=False)
    fold = AckFold()
    for kind, record in ((WriteKind.SNAPSHOT, RECORD), (WriteKind.CHANGES, changes)):
        for entry in encode(kind, 5, [record]):
            fold.add(decode(entry))
    assert fold.states == {KEY: AckState(10, BitMap64([10, 12]), 5)}
    assert encode(WriteKind.SNAPSHOT, 6, state_records(fold.states))


class Writer:
    """Writes as an owner does; beside it what each subscription has acknowledged, in plain sets."""

    def __init__(self, bytes_max):
        self.entries, self.bytes_max, self.snapshot = [], bytes_max, NO_SNAPSHOT
        self.model, self.after = {}, []

    def write(self, kind, records):
        at = len(self.entries)
        made = encode(kind, 1, records, self.snapshot, self.bytes_max)
        self.after += [None] * (len(made) - 1)
        self.entries += made
        if kind is WriteKind.SNAPSHOT:
            self.snapshot = at
        self.after.append({key: (at, set(rows)) for key, (at, rows) in self.model.items()})

    def step(self, step, key, offset, count):
        if step == "snapshot":
            states = {k: AckState(at, BitMap64(rows), 1) for k, (at, rows) in self.model.items()}
            self.write(WriteKind.SNAPSHOT, state_records(states))
            return
        if step == "forget":  # the next snapshot will not have it
            return
        position, rows = self.model.get(key, (0, set()))
        replaces, added = key not in self.model, set()
        if step == "add":
            added = {position + offset + 977 * n for n in range(count)}
        elif step == "move":
            position += offset
        else:
            position, rows, replaces = offset, set(), True
        rows = {row for row in rows | added if row >= position}
        self.model[key] = position, rows
        delta = BitMap64(rows if replaces else added)
        self.write(WriteKind.CHANGES, [AckRecord(key, 1, position, delta, replaces)])


def folded(entries, damaged=()):
    fold = AckFold()
    for at, entry in enumerate(entries):
        if at in damaged:
            fold.damaged()
        else:
            fold.add(decode(entry))
    return fold


def plain(fold):
    return {key: (state.position, set(state.rows)) for key, state in fold.states.items()}


def written(steps, bytes_max):
    writer = Writer(bytes_max)
    for step in steps:
        writer.step(*step)
    return writer


def test_the_bytes_of_an_entry_stay_as_they_are():
    (made,) = encode(WriteKind.SNAPSHOT, 5, [RECORD], snapshot=3)
    assert made == GOLDEN
    entry = decode(memoryview(GOLDEN))
    assert entry.records == (RECORD,)
    assert (entry.kind, entry.owner_epoch, entry.snapshot) == (WriteKind.SNAPSHOT, 5, 3)
    assert (entry.part, entry.parts) == (0, 1)


@settings(deadline=None, max_examples=150)
@given(st.lists(STEP, min_size=1, max_size=25), st.integers(60, 400), st.data())
def test_entries_cut_at_any_place_give_what_the_last_whole_write_had(steps, bytes_max, data):
    writer = written(steps, bytes_max)
    if not writer.entries:
        return
    cut = data.draw(st.integers(1, len(writer.entries)))
    whole = [at for at in range(cut) if writer.after[at] is not None]
    expected = writer.after[whole[-1]] if whole else {}
    assert plain(folded(writer.entries[:cut])) == expected


@settings(deadline=None, max_examples=100)
@given(st.lists(STEP, min_size=1, max_size=25), st.integers(60, 400))
def test_a_reader_that_begins_at_the_last_whole_snapshot_gets_the_same_states(steps, bytes_max):
    writer = written(steps, bytes_max)
    if writer.entries:
        begin = max(decode(writer.entries[-1]).snapshot, 0)
        assert plain(folded(writer.entries[begin:])) == plain(folded(writer.entries))


@settings(deadline=None, max_examples=150)
@given(st.lists(STEP, min_size=1, max_size=25), st.integers(60, 400), st.data())
def test_after_a_damaged_entry_states_are_unknown_until_a_whole_snapshot(steps, bytes_max, data):
    writer = written(steps, bytes_max)
    if not writer.entries:
        return
    damaged = data.draw(st.integers(0, len(writer.entries) - 1))
    fold = folded(writer.entries, {damaged})
    snapshots = [
        at
        for at in range(damaged + 1, len(writer.entries))
        if (entry := decode(writer.entries[at])).kind is WriteKind.SNAPSHOT
        and entry.part == entry.parts - 1
        and at - entry.parts + 1 > damaged
    ]
    assert fold.is_lost is not bool(snapshots)
    whole = [after for after in writer.after if after is not None]
    assert plain(fold) == (whole[-1] if snapshots else {})


def test_changes_without_a_state_before_them_are_dropped():
    added = AckRecord(KEY, 5, 7, BitMap64([9]), replaces=False)
    other = AckRecord(AckKey("s", "t", 1), 5, 99, BitMap64(), replaces=False)
    fold = folded([*encode(WriteKind.CHANGES, 5, [added])])
    assert plain(fold) == {}
    fold = folded([GOLDEN, *encode(WriteKind.CHANGES, 5, [added, other])])
    assert plain(fold) == {KEY: (7, {9, 10})}, "of another epoch"


def test_changes_that_did_not_become_whole_make_later_ones_unknown():
    large = AckRecord(KEY, 5, 7, BitMap64(range(7, 4_000_000, 70_000)), replaces=False)
    parts = encode(WriteKind.CHANGES, 5, [large], bytes_max=100)
    assert len(parts) > 2
    after = encode(WriteKind.CHANGES, 5, [RECORD])
    fold = folded([GOLDEN, *parts[:-1], *after])
    assert (fold.is_lost, plain(fold)) == (True, {})
    fold = folded([GOLDEN, *parts[1:], *after])
    assert fold.is_lost


def test_a_million_holes_fit_into_entries_of_a_bounded_size():
    rows = BitMap64(range(1, 2_000_000, 2))
    entries = encode(WriteKind.SNAPSHOT, 1, [AckRecord(KEY, 1, 0, rows, replaces=True)])
    assert sum(map(len, entries)) < 400_000
    sparse = BitMap64(range(1, 1 << 42, 1 << 23))
    entries = encode(WriteKind.SNAPSHOT, 1, [AckRecord(KEY, 1, 0, sparse, replaces=True)])
    assert len(entries) > 2
    assert max(map(len, entries)) <= 1 << 20
    assert folded(entries).states[KEY].rows == sparse


@pytest.mark.parametrize("length", [0, 39, 40, 75, 78, len(GOLDEN) - 1])
def test_an_entry_that_is_cut_is_refused(length):
    with pytest.raises(BadAckEntry):
        decode(GOLDEN[:length])


@pytest.mark.parametrize(
    ("at", "byte"),
    [(0, 0), (16, 0xFF), (24, 1), (28, 0), (32, 2), (56, 20), (64, 2), (68, 2), (72, 0x21)],
)
def test_an_entry_that_contradicts_itself_is_refused(at, byte):
    damaged = bytearray(GOLDEN)
    damaged[at] = byte
    if at == 16:
        damaged[17:24] = b"\xff" * 7
        damaged[16] = 0xFE
    with pytest.raises(BadAckEntry):
        decode(bytes(damaged))


@settings(deadline=None, max_examples=500)
@given(st.lists(st.tuples(st.integers(0, len(GOLDEN) - 1), st.integers(0, 255)), max_size=6))
def test_no_damaged_bytes_give_anything_but_an_entry_or_a_refusal(changes):
    damaged = bytearray(GOLDEN)
    for at, byte in changes:
        damaged[at] = byte
    try:
        entry = decode(bytes(damaged))
    except (BadAckEntry, errors.UnsupportedFormat):
        return
    for record in entry.records:
        assert all(record.position <= row < 1 << 63 for row in islice(record.rows, 1000))


@pytest.mark.parametrize("at", [4, 5])
def test_an_entry_of_a_later_version_is_not_supported(at):
    with pytest.raises(errors.UnsupportedFormat):
        decode(GOLDEN[:at] + b"\x03" + GOLDEN[at + 1 :])


def test_records_that_break_the_rules_are_not_written():
    for position, rows in ((-1, []), (5, [4]), (0, [1 << 63])):
        with pytest.raises(ValueError, match="acknowledged"):
            encode(WriteKind.CHANGES, 1, [AckRecord(KEY, 1, position, BitMap64(rows), True)])


def test_compressed_records_come_back_and_earlier_versions_refuse_them():
    (made,) = encode(WriteKind.SNAPSHOT, 5, [RECORD], snapshot=3, compressed=True)
    assert made[:4] + made[6:40] == GOLDEN[:4] + GOLDEN[6:40]
    assert made[4] == 2
    assert decode(made) == decode(GOLDEN)


@pytest.mark.parametrize("body", [b"", b"plain", zlib.compress(bytes(76))[:-1], BOMB, BOMB + b"x"])
def test_compressed_records_that_are_damaged_or_too_many_are_refused(body):
    (made,) = encode(WriteKind.SNAPSHOT, 5, [RECORD], compressed=True)
    with pytest.raises(BadAckEntry):
        decode(made[:40] + body)
    with pytest.raises(BadAckEntry):
        decode(made + b"x")
