"""A task's way from rows to a result, on a real ledger client and on one that fails on demand."""

import asyncio
import pickle
from contextlib import aclosing
from dataclasses import dataclass, field, replace
from itertools import accumulate

import pyarrow as pa
import pytest

from spark_ledger import errors
from spark_ledger.config import ClientConfig
from spark_ledger.metadata import paths
from spark_ledger.metadata.ledger_record import Fragment, LedgerRecord, decode
from spark_ledger.topic import write
from spark_ledger.topic.entry.batch_encoder import EncodedEntry, EncodedShare
from spark_ledger.topic.entry.key_filter import KeyFilters, hashes_of, key_filter
from spark_ledger.topic.entry.message_batch import encode_body
from spark_ledger.topic.log.intents import Intent
from spark_ledger.topic.log.ledger_cache import LedgerCache
from spark_ledger.topic.log.policies import TopicPolicies
from spark_ledger.topic.log.records import IntentRecord
from spark_ledger.topic.log.segments import INLINE, NO_ENTRY, NO_MS
from spark_ledger.topic.read.plan import Cutting, plan_read
from spark_ledger.topic.read.slice_reader import fetch_task
from spark_ledger.topic.write import FAILED_LEDGERS_MAX, EntrySender, TaskSettings
from tests.kit.loop_task import LoopTask
from tests.kit.message_batches import decode_batch
from tests.kit.segments_seen import entry_ids, rows_of
from tests.kit.slices import as_planned
from tests.simulation.loop import run
from tests.unit.spark_ledger.topic.stage import TO_A_LEDGER, play

INTENT = Intent("i", IntentRecord("query", "q", "r", "t", -1), 0)
RECORD = LedgerRecord(0, 1, 1, 1, (Fragment(0, ("a",)),))


@dataclass
class FakeWriter:
    """Acknowledges `acks` entries, then fails the next ones with `error`."""

    ledger_id: int
    acks: int
    error: errors.LedgerError
    record: LedgerRecord = RECORD
    version: int = 4
    failure: errors.LedgerError | None = None
    payloads: list[bytes] = field(default_factory=list)
    first_entry: int = 10
    closed: bool = False
    waited: list[tuple[float, int]] = field(default_factory=list)
    held_bytes: int = 0

    def append(self, payload, rows):
        future = asyncio.get_running_loop().create_future()
        entry_id = self.first_entry + len(self.payloads)
        self.payloads.append(b"".join(payload))
        asyncio.get_running_loop().call_later(0.01, self._answer, future, entry_id)
        return future

    def _answer(self, future, entry_id):
        if entry_id - self.first_entry < self.acks:
            future.set_result(entry_id)
        else:
            self.failure = self.error
            future.set_exception(self.error)

    async def room(self):
        return

    async def wait_for_copies(self, timeout_s, first_entry=0):
        self.waited.append((timeout_s, first_entry))
        return []

    async def close(self):
        self.closed = True


class FakeLedgers:
    """Gives the writers in turn; also the intents' ids."""

    config = ClientConfig()

    def __init__(self, *writers):
        self.writers = list(writers)
        self.made = []

    async def create(self, *quorums, **_):
        self.made.append(self.writers.pop(0))
        return self.made[-1]

    async def ledger_id(self, intent):
        return 0

    async def heartbeat(self, intent):
        return


def writer(ledger_id, acks, error=None):
    return FakeWriter(ledger_id, acks, error or errors.LedgerFenced("another one took over"))


def entry(number, *partitions, rows=2, keys=True, event_ms=None):
    """An entry with so many rows of each partition."""
    partitions = partitions or (0,)
    column = pa.array([b"%d" % number] * rows * len(partitions), pa.binary())
    body = encode_body(pa.RecordBatch.from_arrays([column, column], names=["key", "value"]))
    made = key_filter(hashes_of([b"%d" % number])) if keys else None
    taken = 32 + sum(map(len, body)) + (16 * len(partitions) if len(partitions) > 1 else 0)
    shares = [EncodedShare(p, rows, taken // len(partitions), event_ms, made) for p in partitions]
    return EncodedEntry(tuple(shares), 1000 + number, body)


def sender(ledgers, policies=None, **options):
    cache = LedgerCache(ledgers, ledgers)
    return EntrySender(cache, ledgers, INTENT, "topic", policies or TopicPolicies(), **options)


def sent_rows(ledgers, segments):
    """(partition, first row, value) of each entry that a segment names, in segment order."""
    by_id = {one.ledger_id: one for one in ledgers.made}
    found = []
    for segment in segments:
        held = by_id[segment.ledger_id]
        expected = list(accumulate(segment.entry_rows, initial=0))[:-1]
        for entry_id, first_row in zip(entry_ids(segment), expected, strict=True):
            payload = held.payloads[entry_id - held.first_entry]
            batch = decode_batch(payload, partition=segment.partition)
            assert (batch.partition, batch.first_row) == (segment.partition, first_row)
            found.append((batch.partition, int(batch.record_batch["value"][0].as_py())))
    return found


@pytest.mark.parametrize("acks", range(7))
def test_when_a_ledger_fails_the_acked_prefix_stays_and_only_the_rest_is_sent_again(acks):
    async def main():
        ledgers = FakeLedgers(writer(1, acks), writer(2, 100))
        out = sender(ledgers)
        for number in range(6):
            await out.send(entry(number, number % 2))
            if number == 3:
                await asyncio.sleep(1)  # the failure is heard in the middle
        segments = await out.finish()

        assert sorted(sent_rows(ledgers, segments)) == sorted((n % 2, n) for n in range(6))
        for partition in (0, 1):
            mine = [n for p, n in sent_rows(ledgers, segments) if p == partition]
            assert mine == sorted(mine)
        acked = [s for s in segments if s.ledger_id == 1]
        assert sum(len(s.entry_rows) for s in acked) == min(acks, 6)
        assert all(s.metadata_version == 4 for s in segments)
        assert ledgers.made[0].closed or acks == 6

    run(main())


def test_a_task_gives_up_when_ledger_after_ledger_fails_with_what_the_last_one_said():
    async def main():
        ledgers = FakeLedgers(*(writer(n, 0) for n in range(FAILED_LEDGERS_MAX)))
        out = sender(ledgers)
        await out.send(entry(0))
        with pytest.raises(errors.LedgerFenced):
            await out.finish()
        await out.abort()

    run(main())


def test_an_error_that_no_other_ledger_mends_ends_the_task_at_once():
    async def main():
        ledgers = FakeLedgers(writer(1, 0, errors.Unauthorized("no")), writer(2, 9))
        out = sender(ledgers)
        await out.send(entry(0))
        with pytest.raises(errors.Unauthorized):
            await out.finish()
        assert len(ledgers.made) == 1

    run(main())


def test_a_full_ledger_is_left_with_all_its_acks_and_the_next_one_goes_on():
    async def main():
        ledgers = FakeLedgers(*(writer(n, 100) for n in range(4)))
        size = entry(0).payload_bytes
        out = sender(ledgers, TopicPolicies(ledger_bytes_max=3 * size))
        for number in range(8):
            await out.send(entry(number, keys=False))
        segments = await out.finish()

        assert [len(s.entry_rows) for s in segments] == [3, 3, 2]
        assert [n for _, n in sent_rows(ledgers, segments)] == list(range(8))

    run(main())


def test_a_ledger_with_the_most_fragments_is_left_before_it_refuses_the_next_change():
    async def main():
        fragments_max = FakeLedgers.config.fragments_max
        ledgers = FakeLedgers(writer(1, 100), writer(2, 100))
        out = sender(ledgers)
        for number in range(6):
            if number == 3:
                many = tuple(Fragment(at, ("a",)) for at in range(fragments_max))
                ledgers.made[0].record = replace(RECORD, fragments=many)
            await out.send(entry(number))
        segments = await out.finish()

        assert [(s.ledger_id, len(s.entry_rows)) for s in segments] == [(1, 3), (2, 3)]
        assert ledgers.made[0].closed
        assert ledgers.made[0].failure is None
        assert [n for _, n in sent_rows(ledgers, segments)] == list(range(6))

    run(main())


def test_a_task_that_ends_waits_for_the_copies_of_its_own_entries_but_not_for_long():
    async def main():
        one = writer(7, 100)
        out = sender(FakeLedgers(one))
        await out.send(entry(0))
        await out.finish()

        assert one.waited == [(write.COPIES_WAIT_S, 10)]

    run(main())


def test_a_task_without_rows_makes_no_ledger():
    async def main():
        ledgers = FakeLedgers()
        assert await sender(ledgers).finish() == ()

    run(main())


# -- on the real client ------------------------------------------------------------------------


def test_batch_after_batch_is_written_to_one_ledger_and_an_idle_one_closes_itself():
    async def act(stage):
        intent = await stage.intent()
        results = [await stage.written(intent, [b"%d" % n]) for n in range(20)]
        ledgers = {s.ledger_id for result in results for s in result.segments}
        assert len(ledgers) == 1
        (ledger_id,) = ledgers

        await asyncio.sleep(60)

        record = decode(stage.world.store.peek(paths.ledger(ledger_id)).value)
        assert record.closed
        assert (record.intent, record.topic) == (intent.id, stage.topic.id)
        later = await stage.written(intent, [b"x"])
        assert later.segments[0].ledger_id != ledger_id

    play(act)


def test_another_run_of_the_query_gets_a_ledger_of_its_own_and_the_older_ones_is_closed():
    async def act(stage):
        first = await stage.written(await stage.intent("run-1"), [b"a"])
        second = await stage.written(await stage.intent("run-2"), [b"b"])
        await asyncio.sleep(5)

        older, newer = first.segments[0].ledger_id, second.segments[0].ledger_id
        assert older != newer
        assert decode(stage.world.store.peek(paths.ledger(older)).value).closed

    play(act)


def test_two_tasks_at_once_use_two_ledgers():
    async def act(stage):
        intent = await stage.intent()
        results = await asyncio.gather(
            *(stage.written(intent, [b"%d" % n], task_index=n) for n in range(3))
        )
        assert len({result.segments[0].ledger_id for result in results}) == 3

    play(act)


def test_a_result_survives_pickling_and_counts_its_rows():
    async def act(stage):
        result = await stage.written(await stage.intent(), [b"a" * 2000, b"b" * 2000, b"c"])

        assert pickle.loads(pickle.dumps(result)) == result
        (only,) = result.segments
        assert only.rows == 3 and only.bytes > 8_000

    play(act)


def test_a_ledger_fenced_in_the_middle_of_a_task_costs_no_row_and_doubles_none():
    async def act(stage):
        intent = await stage.intent()
        task = LoopTask(stage.client, stage.topic, intent, task_index=0)
        other = await stage.another()
        for number in range(30):
            column = pa.array([b"%d" % number + b"x" * 3000], pa.binary())
            await task.write(column, column)
            if number in (10, 20):
                for name in stage.world.store.peek_children(paths.intent_blocks(intent.id)):
                    for ledger_id in range(int(name), int(name) + 8):
                        if stage.world.store.peek(paths.ledger(ledger_id)):
                            await other.ledgers.recover(ledger_id)
        result = await task.finish()
        await stage.commit(intent, 0, result)

        values = [value for _, value in await stage.rows()]
        assert values == [b"%d" % n + b"x" * 3000 for n in range(30)]
        assert len({s.ledger_id for s in result.segments}) == 3

    play(act)


def test_a_task_of_a_run_that_was_superseded_makes_no_ledger():
    async def act(stage):
        old = await stage.intent("run-1")
        await stage.intent("run-2")
        other = replace(stage, client=await stage.another())

        with pytest.raises(errors.LedgerFenced):
            await other.written(old, [b"a"])

    play(act)


def test_aborting_a_task_leaves_nothing_in_the_topic():
    async def act(stage):
        intent = await stage.intent()
        task = LoopTask(stage.client, stage.topic, intent, task_index=0)
        column = pa.array([b"x" * 3000] * 10, pa.binary())
        await task.write(column, column)
        await task.abort()

        assert await stage.rows() == []

    play(act)


# -- entries of several partitions, filters, event times, bytes in flight --------------------------


@pytest.mark.parametrize("acks", [0, 2, 3, 9])
def test_a_shared_entry_is_in_a_segment_of_each_of_its_partitions(acks):
    async def main():
        ledgers = FakeLedgers(writer(1, acks), writer(2, 100))
        out = sender(ledgers)
        for number, partitions in enumerate([(0,), (0, 2, 5), (5,), (2, 5)]):
            await out.send(entry(number, *partitions))
        segments = await out.finish()

        assert sorted(sent_rows(ledgers, segments)) == [
            (0, 0), (0, 1), (2, 1), (2, 3), (5, 1), (5, 2), (5, 3),
        ]  # fmt: skip
        held = {(s.ledger_id, i): s for s in segments for i in entry_ids(s)}
        for segment in segments:
            several = [i for i in entry_ids(segment) if held[segment.ledger_id, i] != segment]
            assert segment.shared or not several
        assert sum(s.bytes for s in segments) > 0

    run(main())


def test_segments_of_four_entries_or_more_get_filters_in_one_entry_behind_them():
    async def main():
        ledgers = FakeLedgers(writer(1, 100))
        out = sender(ledgers)
        for number in range(4):
            await out.send(entry(number, 3))
        for number in range(4, 9):
            await out.send(entry(number, 1))
        await out.send(entry(9, 2))
        three, one, two = await out.finish()

        held = ledgers.made[0]
        assert (three.filter_entry, one.filter_entry, two.filter_entry) == (20, 20, NO_ENTRY)
        assert len(held.payloads) == 11
        assert three.metadata_version == 4
        filters = KeyFilters(held.payloads[10])
        ids = list(entry_ids(three))
        assert filters.might_contain(3, ids, hashes_of([b"2"])).tolist() == [0, 0, 1, 0]
        ids = list(entry_ids(one))
        assert filters.might_contain(1, ids, hashes_of([b"4", b"8"])).tolist() == [1, 0, 0, 0, 1]

    run(main())


def test_filters_that_cannot_be_written_are_left_out_and_no_row_with_them():
    async def main():
        ledgers = FakeLedgers(writer(1, 6))
        out = sender(ledgers)
        for number in range(6):
            await out.send(entry(number))
        (segment,) = await out.finish()

        assert segment.filter_entry == NO_ENTRY
        assert [n for _, n in sent_rows(ledgers, [segment])] == list(range(6))

    run(main())


def test_when_filters_take_their_bytes_they_are_written_and_new_segments_begin(monkeypatch):
    monkeypatch.setattr(write, "FILTER_BYTES_MAX", 5 * 8)

    async def main():
        ledgers = FakeLedgers(writer(1, 100))
        out = sender(ledgers)
        for number in range(17):
            await out.send(entry(number, number % 2))
            await asyncio.sleep(0.02)
        segments = await out.finish()

        assert [(s.partition, len(s.entry_rows)) for s in segments] == [
            (0, 3), (1, 3), (0, 3), (1, 3), (0, 3), (1, 2),
        ]  # fmt: skip
        assert sorted(sent_rows(ledgers, segments)) == sorted((n % 2, n) for n in range(17))
        assert out._filter_bytes == 0

    run(main())


def test_a_segment_says_between_which_event_times_its_rows_are():
    async def main():
        ledgers = FakeLedgers(writer(1, 100))
        out = sender(ledgers)
        for number, (partition, event_ms) in enumerate(
            [(0, (50, 70)), (0, None), (0, (40, 60)), (1, None), (2, (-1, -1))]
        ):
            await out.send(entry(number, partition, event_ms=event_ms))
        segments = await out.finish()

        bounds = [(s.event_min_ms, s.event_max_ms) for s in segments]
        assert bounds == [(40, 70), (NO_MS, NO_MS), (-2, 0)]

    run(main())


def test_no_more_bytes_wait_for_their_acks_than_the_task_may_have():
    async def main():
        size = entry(0).payload_bytes
        held = writer(1, 100)
        out = sender(FakeLedgers(held), unacked_bytes_max=3 * size)
        waiting = []
        append = held.append

        def counting(payload, rows):
            future = append(payload, rows)
            waiting.append(future)
            assert sum(not one.done() for one in waiting) <= 3
            return future

        held.append = counting
        for number in range(20):
            await out.send(entry(number, keys=False))
        segments = await out.finish()
        assert sum(s.rows for s in segments) == 40

    run(main())


def column(*values):
    return pa.array(values, pa.binary())


def test_a_task_that_writes_little_makes_no_ledger_and_its_rows_are_read():
    async def act(stage):
        intent = await stage.intent()
        before = stage.world.store.peek_children(paths.intent_blocks(intent.id))
        result = await stage.written(intent, [b"%d" % n for n in range(9)], inline=True)
        await stage.commit(intent, 0, result)

        assert {s.ledger_id for s in result.segments} == {INLINE}
        assert not any(s.shared for s in result.segments)
        assert stage.world.store.peek_children(paths.intent_blocks(intent.id)) == before
        rows = [await stage.rows(partition) for partition in range(3)]
        assert [[offset for offset, _ in some] for some in rows] == [
            list(range(len(some))) for some in rows
        ]
        assert sorted(v for some in rows for _, v in some) == [b"%d" % n for n in range(9)]

    play(act, partitions=3)


@pytest.mark.parametrize("settings", [TO_A_LEDGER, TaskSettings(inline_bytes_max=300)])
def test_a_task_that_writes_more_than_may_be_inline_makes_a_ledger(settings):
    async def act(stage):
        intent = await stage.intent()
        task = LoopTask(stage.client, stage.topic, intent, task_index=0, settings=settings)
        await task.write(None, column(b"x"))
        result = await task.finish()
        await stage.commit(intent, 0, result)

        assert result.segments[0].ledger_id >= 0
        assert await stage.rows() == [(0, b"x")]

    play(act)


def test_rows_of_many_partitions_in_one_entry_are_read_by_partition():
    async def act(stage):
        intent = await stage.intent()
        results = []
        for task_index in range(2):
            rows = [b"%d-%03d" % (task_index, n) for n in range(150)]
            results.append(await stage.written(intent, rows, task_index))
        await stage.commit(intent, 0, *results)

        segments = [s for result in results for s in result.segments]
        assert all(s.shared for s in segments)
        assert len({(s.ledger_id, *s.entries) for s in segments}) < len(segments) / 5
        found = [await stage.rows(partition, cutting=Cutting(3)) for partition in range(40)]
        values = [[value for _, value in some] for some in found]
        assert sorted(value for some in values for value in some) == sorted(
            b"%d-%03d" % (t, n) for t in range(2) for n in range(150)
        )
        assert all(some == sorted(some) for some in values)

    play(act, partitions=40)


def test_all_columns_come_back_from_a_ledger_and_only_those_asked_for():
    async def act(stage):
        intent = await stage.intent()
        task = LoopTask(stage.client, stage.topic, intent, task_index=0, settings=TO_A_LEDGER)
        headers = pa.array([[{"key": "h", "value": b"1"}], None])
        times = pa.array([5_000_000, 7_000_000], pa.timestamp("us", tz="UTC"))
        await task.write(column(b"k", None), column(b"v", b"w"), event_times=times, headers=headers)
        result = await task.finish()
        await stage.commit(intent, 0, result)
        state = await stage.client.log(stage.topic.id).fold(fresh=True)
        (planned,) = plan_read(state, {0: (0, 2)})
        async with aclosing(fetch_task(stage.client.ledgers, planned, None, as_planned)) as fetched:
            (piece,) = [one async for run in fetched for one in run]

        whole = rows_of(piece)
        assert whole.record_batch["headers"].to_pylist() == headers.to_pylist()
        assert whole.record_batch["event_time"].equals(times)
        assert whole.ledger_id == result.segments[0].ledger_id
        assert rows_of(piece, {"value"}).record_batch.schema.names == ["value"]
        (segment,) = result.segments
        assert (segment.event_min_ms, segment.event_max_ms) == (5_000, 7_000)

    play(act)


def test_the_keys_of_a_long_segment_are_found_in_its_filter_entry():
    async def act(stage):
        intent = await stage.intent()
        keys = [b"k%d" % n for n in range(40)]
        task = LoopTask(stage.client, stage.topic, intent, task_index=0)
        for key in keys:
            await task.write(column(key), column(b"x" * 1000))
        (segment,) = (await task.finish()).segments
        reader = await stage.client.ledgers.open(
            segment.ledger_id, recover=False, min_version=segment.metadata_version
        )
        at = segment.filter_entry
        async with aclosing(reader.read(at, at, known_confirmed=at)) as read:
            ((_, found),) = [one async for one in read]
        filters = KeyFilters(found.payload)

        ids = list(entry_ids(segment))
        assert len(ids) >= 4
        assert at > ids[-1]
        for key in keys:
            assert filters.might_contain(0, ids, hashes_of([key])).any()
        others = [filters.might_contain(0, ids, hashes_of([b"o%d" % n])).sum() for n in range(300)]
        assert sum(others) < 0.05 * 300 * len(ids)

    play(act)


def test_too_few_bytes_in_flight_are_refused():
    with pytest.raises(errors.BadConfig, match="262144 bytes in flight or more, not 1000"):
        TaskSettings(inflight_bytes_max=1000)
