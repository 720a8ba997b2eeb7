"""A cursor ledger: in the form of ack ledgers, and in the form that earlier versions wrote."""

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pyroaring import BitMap64

from spark_ledger import errors
from spark_ledger.metadata import paths
from spark_ledger.metadata.store import ANY_VERSION
from spark_ledger.topic.acks.entries import (
    AckFold,
    AckKey,
    AckRecord,
    BadAckEntry,
    WriteKind,
    decode,
    encode,
)
from spark_ledger.topic.acks.ledger import OpenAckLedger
from spark_ledger.topic.subscription.cursor_ledger import CursorLedger, decode_either, decode_old
from spark_ledger.topic.subscription.records import SubscriptionKind, SubscriptionRecord
from tests.simulation.loop import run
from tests.unit.spark_ledger.topic.stage import play
from tests.unit.spark_ledger.topic.subscription_stage import (
    NAME,
    fill,
    intent_of,
    listed,
    opened,
    positions,
    told,
)

OLD = bytes.fromhex(
    "534c4331"  # magic
    "01" "00" "0000"  # version, flags, reserved
    "0300000000000000"  # epoch
    "02000000" "00000000"  # two positions, reserved
    "00000000" "02000000"  # their partitions
    "0a00000000000000" "0000000000010000"  # the positions
)  # fmt: skip
OLD_LEDGER = [  # two entries as a version with the earlier form wrote them, of epoch 1
    bytes.fromhex("534c4331 01 00 0000 0100000000000000 01000000 00000000 00000000" + end)
    for end in ("0300000000000000", "0700000000000000")
]
RECORD = SubscriptionRecord(SubscriptionKind.QUERY, 3, owner="t" * 32)


class Entries:
    """A writer that keeps what is appended."""

    def __init__(self):
        self.entries = []

    @property
    def record(self):
        return self

    fragments = ()

    async def append(self, entry):
        self.entries.append(entry)


def held(entry):
    return {int(record.key.name): record.position for record in entry.records}


def test_an_entry_of_the_earlier_form_is_a_snapshot():
    entry = decode_old(memoryview(OLD))
    assert held(entry) == {0: 10, 2: 2**40}
    assert entry.is_whole_snapshot
    assert {record.key.epoch for record in entry.records} == {3}


@pytest.mark.parametrize(
    ("at", "bytes_", "what"),
    [
        (16, b"\x03", "3 positions in"),
        (24, b"\x02", "do not rise"),
        (39, b"\x80", "negative"),
    ],
)
def test_a_damaged_entry_of_the_earlier_form_is_told_from_a_good_one(at, bytes_, what):
    with pytest.raises(BadAckEntry, match=what):
        decode_old(OLD[:at] + bytes_ + OLD[at + len(bytes_) :])


@pytest.mark.parametrize("length", [4, 23, 24, len(OLD) - 1])
def test_a_cut_entry_of_the_earlier_form_is_damaged(length):
    with pytest.raises(BadAckEntry):
        decode_old(OLD[:length])


@pytest.mark.parametrize("at", [4, 5])
def test_an_entry_of_a_later_version_or_with_unknown_flags_is_not_guessed(at):
    with pytest.raises(errors.UnsupportedFormat, match="version"):
        decode_old(OLD[:at] + b"\x02" + OLD[at + 1 :])


@pytest.mark.parametrize(
    ("name", "rows"), [("9" * 5000, ()), ("", ()), ("s", ()), ("\u0663", ()), ("3", (9,))]
)
def test_an_entry_that_has_more_than_positions_of_partitions_is_damaged(name, rows):
    record = AckRecord(AckKey(name, "t", 1), 0, 7, BitMap64(rows), replaces=True)
    (entry,) = encode(WriteKind.SNAPSHOT, 0, [record])
    assert decode(entry).records == (record,)
    with pytest.raises(BadAckEntry, match="more than positions"):
        decode_either(entry)


MOVES = st.lists(
    st.dictionaries(st.integers(0, 9), st.integers(0, 2**40), max_size=4), min_size=1, max_size=80
)


@settings(deadline=None, max_examples=60)
@given(MOVES, st.data())
def test_what_was_written_is_read_from_any_good_snapshot_on_and_damage_costs_only_what_it_hits(
    moves, data
):
    writer, written = Entries(), []
    ledger, now = CursorLedger(OpenAckLedger(writer, 0.0), 10), dict.fromkeys(range(10), 0)
    for move in moves:
        now = {p: max(offset, move.get(p, 0)) for p, offset in now.items()}
        run(ledger.append(RECORD, now))
        written.append(now)
    entries = list(map(decode, writer.entries))
    assert len(entries) == len(moves)
    assert {entry.snapshot for entry in entries} <= {-1, *range(len(entries))}

    fold, first = AckFold(only_rises=True), max(0, entries[-1].snapshot)
    for entry in entries[first:]:
        fold.add(entry)
    assert {int(key.name): state.position for key, state in fold.states.items()} == written[-1]
    since = max(at for at, entry in enumerate(entries) if entry.kind is WriteKind.SNAPSHOT)
    assert len(entries) - since <= 51, "a reader reads few changes"

    damaged = data.draw(st.integers(0, len(entries) - 1))
    fold = AckFold(only_rises=True)
    for at, entry in enumerate(entries):
        if at == damaged:
            fold.damaged()
        else:
            fold.add(entry)
    for key, state in fold.states.items():
        assert state.position <= written[-1][int(key.name)]
    if damaged < since:
        assert {int(key.name): state.position for key, state in fold.states.items()} == written[-1]


def test_a_hundred_thousand_partitions_take_less_than_a_megabyte():
    writer = Entries()
    ledger = CursorLedger(OpenAckLedger(writer, 0.0), 10)
    many = {p: p * 1000 for p in range(100_000)}
    run(ledger.append(RECORD, many))
    entries = list(map(decode, writer.entries))
    assert {p: offset for entry in entries for p, offset in held(entry).items()} == many
    assert sum(map(len, writer.entries)) < 1 << 20


def test_few_positions_among_many_are_written_alone():
    writer = Entries()
    ledger = CursorLedger(OpenAckLedger(writer, 0.0), 10)
    before = dict.fromkeys(range(100), 5)
    run(ledger.append(RECORD, before))
    run(ledger.append(RECORD, before | {7: 6}))
    run(ledger.append(RECORD, dict.fromkeys(range(100), 9)))
    assert [len(decode(entry).records) for entry in writer.entries] == [100, 1, 100]


def test_a_subscription_is_resumed_whose_ledger_a_version_with_the_earlier_form_wrote():
    async def act(stage):
        await fill(stage, 100)
        client, first = stage.client, await opened(stage, run="r1")
        await told(first, 1)
        intent = await client.intents.get(await intent_of(stage))
        ledger_id = await client.intents.ledger_id(intent)
        purpose = {"intent": intent.id, "topic": stage.topic.id, "ledger_id": ledger_id}
        writer = await client.ledgers.create(3, 2, 2, **purpose)
        for entry in OLD_LEDGER:
            await writer.append(entry)
        await first.abandon()
        path = paths.subscription(stage.topic.id, NAME)
        record = json.loads((await client.store.get(path)).value)
        record["cursor"] = {"ledger": ledger_id, "floor": {"0": 1}}
        await client.store.set(path, json.dumps(record).encode(), ANY_VERSION)

        again = await opened(stage, run="r2")

        assert await again.recovered() == {0: 7}
        with pytest.raises(errors.LedgerFenced):
            await writer.append(OLD_LEDGER[0])
        await told(again, 8, 9, 10)
        assert (await listed(stage)).ledger_id not in (None, ledger_id)
        assert await positions(stage) == {0: 10}

    play(act)


def test_positions_of_an_earlier_metadata_store_do_not_count(monkeypatch):
    """Other rows may have these offsets now."""

    async def act(stage):
        await fill(stage, 100)
        cursor = await opened(stage, run="r1")
        await told(cursor, 1, 2, 3)
        in_record = (await listed(stage)).positions
        assert in_record != {0: 3}
        await cursor.abandon()
        monkeypatch.setattr("spark_ledger.topic.acks.ledger.IDS_PER_EPOCH", cursor._ledger.id)

        assert await positions(stage) == in_record
        assert await (await opened(stage, run="r2")).recovered() == in_record

    play(act)
