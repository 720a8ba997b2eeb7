"""A task's way from rows to a result, on a real ledger client and on one that fails on demand."""

import asyncio
import pickle
from dataclasses import dataclass, field, replace

import pyarrow as pa
import pytest

from spark_ledger import errors
from spark_ledger.config import ClientConfig
from spark_ledger.ledger.missing_copies import MissingCopy
from spark_ledger.metadata import paths
from spark_ledger.metadata.ledger_record import Fragment, LedgerRecord, decode
from spark_ledger.topic.batch_encoder import EncodedEntry
from spark_ledger.topic.entry_sender import FAILED_LEDGERS_MAX, EntrySender
from spark_ledger.topic.intents import Intent
from spark_ledger.topic.ledger_cache import LedgerCache
from spark_ledger.topic.message_batch import decode_batch
from spark_ledger.topic.policies import TopicPolicies
from spark_ledger.topic.records import IntentRecord
from tests.simulation.loop import run
from tests.unit.spark_ledger.topic.stage import play

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
    missing: list[MissingCopy] = field(default_factory=list)

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

    async def fully_replicated(self, timeout_s, first_entry=0):
        return self.missing

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


def entry(number, partition=0, rows=2):
    column = pa.array([b"%d" % number] * rows, pa.binary())
    batch = pa.RecordBatch.from_arrays([column, column], names=["key", "value"])
    stream = pa.BufferOutputStream()
    with pa.ipc.new_stream(stream, batch.schema) as ipc:
        ipc.write_batch(batch)
    return EncodedEntry(partition, rows, 1000 + number, memoryview(stream.getvalue()))


def sender(ledgers, policies=None):
    cache = LedgerCache(ledgers, ledgers)
    return EntrySender(cache, ledgers, INTENT, "topic", policies or TopicPolicies())


def sent_rows(ledgers, segments):
    """(partition, first row, value) of each entry that a segment names, in segment order."""
    by_id = {one.ledger_id: one for one in ledgers.made}
    found = []
    for segment in segments:
        held = by_id[segment.ledger_id]
        expected = segment.first_rows()
        for entry_id, first_row in zip(segment.entry_ids(), expected, strict=True):
            batch = decode_batch(held.payloads[entry_id - held.first_entry])
            assert (batch.partition, batch.first_row) == (segment.partition, first_row)
            found.append((batch.partition, int(batch.record_batch["value"][0].as_py())))
    return found


@pytest.mark.parametrize("acks", range(7))
def test_when_a_ledger_fails_the_acked_prefix_stays_and_only_the_rest_is_sent_again(acks):
    async def main():
        ledgers = FakeLedgers(writer(1, acks), writer(2, 100))
        out = sender(ledgers)
        for number in range(6):
            await out.send(entry(number, partition=number % 2))
            if number == 3:
                await asyncio.sleep(1)  # the failure is heard in the middle
        segments, _ = await out.finish()

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
            await out.send(entry(number))
        segments, _ = await out.finish()

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
        segments, _ = await out.finish()

        assert [(s.ledger_id, len(s.entry_rows)) for s in segments] == [(1, 3), (2, 3)]
        assert ledgers.made[0].closed
        assert ledgers.made[0].failure is None
        assert [n for _, n in sent_rows(ledgers, segments)] == list(range(6))

    run(main())


def test_copies_that_are_missing_when_the_task_ends_are_in_its_result():
    async def main():
        one = writer(7, 100)
        one.missing = [MissingCopy(10, 11, "bookie-3", "no answer yet")]
        out = sender(FakeLedgers(one))
        await out.send(entry(0))
        _, (missing,) = await out.finish()

        assert (missing.ledger_id, missing.first_entry, missing.last_entry) == (7, 10, 11)
        assert missing.bookie_id == "bookie-3"

    run(main())


def test_a_task_without_rows_makes_no_ledger():
    async def main():
        ledgers = FakeLedgers()
        assert await sender(ledgers).finish() == ((), ())

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
        assert (result.rows, len(result.segments)) == (3, 1)
        assert result.bytes > 8_000

    play(act)


def test_a_ledger_fenced_in_the_middle_of_a_task_costs_no_row_and_doubles_none():
    async def act(stage):
        intent = await stage.intent()
        task = stage.client.task_writer(stage.topic, intent, task_index=0)
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
        task = stage.client.task_writer(stage.topic, intent, task_index=0)
        column = pa.array([b"x" * 3000] * 10, pa.binary())
        await task.write(column, column)
        await task.abort()

        assert await stage.rows() == []

    play(act)
