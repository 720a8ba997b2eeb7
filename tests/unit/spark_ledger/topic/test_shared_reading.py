"""Tasks that read many partitions out of entries which these share."""

from collections import Counter

import pytest

from spark_ledger import errors
from spark_ledger.ledger.reader import AsyncLedgerReader
from spark_ledger.topic.log.actions import Append, Replace, Trim
from spark_ledger.topic.read import slice_reader
from spark_ledger.topic.read.plan import ReadTask, plan_read, segments_in
from spark_ledger.topic.task_reader import fetch_with_replans
from tests.kit.rows import parts_of
from tests.kit.segments_seen import end_of
from tests.unit.spark_ledger.topic.stage import play

PARTITIONS = 5


async def written(stage, runs=2, rows=60):
    """So many rows of each run, in a ledger of its own: the task that reads all of them."""
    for run in range(runs):
        intent = await stage.intent(f"run-{run}")
        values = [b"%d" % n for n in range(run * rows, (run + 1) * rows)]
        await stage.commit(intent, run, await stage.written(intent, values))
    return await whole(stage)


async def whole(stage):
    state = await stage.client.log(stage.topic.id).fold(fresh=True)
    ranges = [(p, 0, end) for p, end in state.end_offsets().items()]
    return ReadTask("t", stage.topic.id, *segments_in(state, ranges))


async def read(client, task, after_first=None, **options):
    """By partition (offset, value) in the order they come; `after_first` entries came, that is
    done."""
    found = {p: [] for p in range(PARTITIONS)}
    async for run in fetch_with_replans(client, task, **options):
        for rows in (rows for fetched in run for rows in parts_of(fetched.block())):
            values = rows.record_batch.column("value").to_pylist()
            found[rows.partition] += enumerate(values, rows.offset)
        if after_first is not None:
            await after_first()
            after_first = None
    return found


@pytest.fixture
def asked(monkeypatch):
    """How often each entry was asked for."""
    count, read_entries = Counter(), AsyncLedgerReader.read_entries

    def counting(reader, ids, **options):
        count.update((reader.ledger_id, entry_id) for entry_id in ids)
        return read_entries(reader, ids, **options)

    monkeypatch.setattr(AsyncLedgerReader, "read_entries", counting)
    return count


def test_an_entry_is_fetched_and_decoded_once_for_all_its_partitions(asked, monkeypatch):
    decoded, decode = [], slice_reader.decode_body_and_times

    def counting(payload, header, columns):
        decoded.append(header.shares)
        return decode(payload, header, columns)

    monkeypatch.setattr(slice_reader, "decode_body_and_times", counting)

    async def act(stage):
        await written(stage, runs=12)
        state = await stage.client.log(stage.topic.id).fold(fresh=True)
        ends = state.end_offsets()
        plan = plan_read(state, {p: (0, end) for p, end in ends.items()})
        found = {p: [] for p in range(PARTITIONS)}
        for task in plan:
            for p, some in (await read(stage.client, task)).items():
                found[p] += some

        assert {p: [at for at, _ in some] for p, some in found.items()} == {
            p: list(range(end)) for p, end in ends.items()
        }
        assert len(asked) == len(decoded) == 12
        assert set(asked.values()) == {1}
        assert all(len(shares) == PARTITIONS for shares in decoded)

    play(act, partitions=PARTITIONS)


def test_small_slices_are_fetched_together_and_come_in_the_order_of_their_commits(asked):
    async def act(stage):
        intents = [
            await stage.client.intents.open_system_intent(name, "t") for name in ("one", "other")
        ]
        for n in range(8):
            intent = intents[n % 2]
            result = await stage.written(intent, [b"%d" % (n * 20 + row) for row in range(20)])
            await stage.client.commit_actions(stage.topic.id, [Append(result.segments)], intent)
        found = await read(stage.client, await whole(stage))

        assert len({ledger for ledger, _ in asked}) == 2
        assert set(asked.values()) == {1}
        for some in found.values():
            assert [at for at, _ in some] == list(range(len(some)))
            numbers = [int(value) // 20 for _, value in some]
            assert numbers == sorted(numbers)

    play(act, partitions=PARTITIONS)


@pytest.fixture
def one_at_a_time(monkeypatch):
    """Nothing is fetched before what comes before it was read."""
    monkeypatch.setattr(slice_reader, "WINDOW_ENTRIES_MIN", 1)
    monkeypatch.setattr(slice_reader, "WINDOW_ENTRIES_MAX", 1)


async def merged(stage, task, partitions):
    """What the second ledger has of these partitions is put elsewhere; the ledger's id."""
    rows = await read(stage.client, task)
    second = max(task.table.ledger_ids())
    intent = await stage.client.intents.open_system_intent("compact", stage.topic.id)
    replaced = []
    for placed in task.table:
        p = placed.segment.partition
        if placed.segment.ledger_id == second and p in partitions:
            values = [value for at, value in rows[p] if placed.base <= at < end_of(placed)]
            result = await stage.written(intent, values)
            state = await stage.client.log(stage.topic.id).fold(fresh=True)
            replaced.append(
                Replace(p, placed.base, end_of(placed), result.segments, state.next - 1, (second,))
            )
    await stage.client.commit_actions(stage.topic.id, replaced, intent)
    return second


async def deleted(stage, ledger_id):
    await stage.client.ledgers.recover(ledger_id)
    await stage.client.ledgers.delete(ledger_id)


@pytest.mark.usefixtures("one_at_a_time")
def test_a_task_whose_ledger_is_replaced_below_it_goes_on_in_each_partition_where_it_was():
    async def act(stage):
        task = await written(stage)
        wanted = await read(stage.client, task)

        async def replaced():
            await deleted(stage, await merged(stage, task, range(PARTITIONS)))

        assert await read(stage.client, task, replaced) == wanted

    play(act, partitions=PARTITIONS)


@pytest.mark.usefixtures("one_at_a_time")
@pytest.mark.parametrize("how", ["trimmed", "lost"])
def test_a_task_of_many_partitions_tells_exactly_which_rows_are_gone_or_leaves_them_out(how):
    async def act(stage):
        task = await written(stage)
        wanted = await read(stage.client, task)
        second = await merged(stage, task, (0, 1, 2))
        firsts = {s.segment.partition: s.base for s in task.table if s.segment.ledger_id == second}
        ends = {s.segment.partition: end_of(s) for s in task.table if s.segment.ledger_id == second}
        if how == "trimmed":
            intent = await stage.client.intents.open_system_intent("trim", stage.topic.id)
            trim = Trim(((3, ends[3]), (4, ends[4])), (second,))
            await stage.client.commit_actions(stage.topic.id, [trim], intent)

        async def gone():
            await deleted(stage, second)

        lost = sum(ends[p] - firsts[p] for p in (3, 4))
        kind, says = {
            "trimmed": (errors.RowsTrimmed, f"{lost} rows to be read were removed: offsets"),
            "lost": (errors.RowsLost, f"{lost} committed rows are gone: t partition 3 offsets"),
        }[how]
        with pytest.raises(kind, match=f"{says} {firsts[3]} to {ends[3] - 1} .*{ends[4] - 1} "):
            await read(stage.client, task, gone)
        found = await read(stage.client, task, lossy=True)
        assert found == {
            p: [(at, value) for at, value in rows if p < 3 or at < firsts[p]]
            for p, rows in wanted.items()
        }

    play(act, partitions=PARTITIONS)


def test_some_partitions_of_many_are_read_without_the_others_rows():
    async def act(stage):
        await written(stage, runs=3)
        state = await stage.client.log(stage.topic.id).fold(fresh=True)
        everything = await read(stage.client, await whole(stage))
        ranges = [(1, 5, 20), (4, 0, 9)]
        task = ReadTask("t", stage.topic.id, *segments_in(state, ranges))
        found = await read(stage.client, task)
        assert found[1] == everything[1][5:20]
        assert found[4] == everything[4][:9]
        assert not any(found[p] for p in (0, 2, 3))

    play(act, partitions=PARTITIONS)
