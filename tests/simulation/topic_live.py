"""Producers of a live segment: owners that append to the open end of a topic's only partition, who
take over from one another, and readers that follow it up to what is confirmed (T7).

Always true: an owner sends no add before it has read back its own `open` in the folded log, seals
what it finds in one commit with its own `open`, and decides what is in a ledger only by its CLOSED
record (hazards 28, 30, 31). This is what a broker will do; the actions, guards and readers are
production code, the owner is not built yet.
"""

import asyncio
from contextlib import aclosing

import pyarrow as pa

from spark_ledger.errors import LedgerError
from spark_ledger.ledger.writer import AsyncLedgerWriter
from spark_ledger.metadata.store import StoreError
from spark_ledger.topic.client import TopicClient
from spark_ledger.topic.commit.seal import seal_live_segment
from spark_ledger.topic.entry.message_batch import Share
from spark_ledger.topic.log.actions import Action, OpenLive
from spark_ledger.topic.log.intents import Intent
from spark_ledger.topic.log.policies import TopicPolicies
from spark_ledger.topic.log.segment_table import NO_SEGMENTS
from spark_ledger.topic.log.segments import LiveSegment
from spark_ledger.topic.log.topics import TopicInfo
from spark_ledger.topic.read.live import LiveEnds
from spark_ledger.topic.read.pieces import LiveRows
from spark_ledger.topic.read.plan import ReadTask
from tests.kit.message_batches import encode_batch
from tests.kit.slices import read_task
from tests.simulation import invariants
from tests.simulation.store import EPOCH_MS
from tests.simulation.topic_ghost import LIVE, LogGhost, live_name
from tests.simulation.topic_work import TopicWork
from tests.simulation.world import Client


class TopicLive:
    """The owners of one run, one after another or two at once."""

    def __init__(self, work: TopicWork) -> None:
        self.work = work
        self.world = work.world
        rng = self.world.loop.random_for("topic live")
        self.owners = rng.choice((1, 2, 3)) if work.plan.churn else rng.choice((0, 0, 0, 1))
        self._rng = rng
        self._cuts = self.world.loop.random_for("live cuts")
        self.ends_at = self.world.loop.now + work.plan.chaos_s
        self._acked: dict[str, int] = {}
        """By name of a live ledger's rows: so many were acknowledged, from the first on."""

    async def supervise(self) -> None:
        begun = []
        for _ in range(self.owners):
            await asyncio.sleep(self._rng.uniform(0, 4))
            client = await self.world.client("owner")
            begun.append(client.run(self._own(client), "owns"))
        if self.owners:
            reader = await self.world.client("live reader")
            begun.append(reader.run(self._read_often(reader), "reads"))
        for outcome in await asyncio.gather(*begun, return_exceptions=True):
            if isinstance(outcome, Exception):
                raise outcome

    # -- an owner ----------------------------------------------------------------------------------

    async def _own(self, client: Client) -> None:
        topics = self.work.client(client)
        while self.world.loop.now < self.ends_at:
            try:
                await self.owns_for_a_while(client, topics)
            except (LedgerError, StoreError) as error:
                self.work.met(client, "own", error)
                await asyncio.sleep(client.rng.uniform(0.2, 2))

    async def owns_for_a_while(self, client: Client, topics: TopicClient) -> None:
        """Own the partition for a few ledgers."""
        policies = TopicPolicies(*self.work.plan.quorum)
        info = await topics.topics.create(LIVE, 1, policies, exist_ok=True)
        intent = await topics.intents.open_system_intent("own", LIVE)
        for _ in range(client.rng.randint(1, 4)):
            writer = await self._open(client, topics, info, intent)
            if writer is None:
                return
            await self._produce(client, writer, self.work.ghost.logs[info.id])
            if client.rng.random() < 0.5:
                await writer.close()  # it may die before it seals
            await asyncio.sleep(client.rng.uniform(0, 0.5))

    async def _open(
        self, client: Client, topics: TopicClient, info: TopicInfo, intent: Intent
    ) -> AsyncLedgerWriter | None:
        """A ledger that the log names as live; None if another owner was faster."""
        state = await topics.log(info.id).fold(fresh=True)
        live = state.partitions[0].live
        actions: list[Action] = (
            [] if live is None else [await seal_live_segment(client.ledgers, live)]
        )
        writer = await client.ledgers.create(
            *self.work.plan.quorum,
            intent=intent.id,
            topic=info.id,
            announce_lac=True,
            ledger_id=await topics.intents.ledger_id(intent),
        )
        self.work.ghost.topic_of[live_name(writer.ledger_id)] = info.id
        actions.append(OpenLive(0, writer.ledger_id, 0, client.name, 1))
        await topics.commit_actions(info.id, actions, intent)
        self.world.ghost.meet("live segment sealed" if live else "live segment opened")
        state = await topics.log(info.id).fold(fresh=True)
        live = state.partitions[0].live
        return writer if live is not None and live.ledger_id == writer.ledger_id else None

    async def _produce(self, client: Client, writer: AsyncLedgerWriter, log: LogGhost) -> None:
        name, written = live_name(writer.ledger_id), 0
        for _ in range(client.rng.randint(1, 8)):
            rows = client.rng.randint(1, 4)
            values = [f"{name}:0:{row}".encode() for row in range(written, written + rows)]
            batch = pa.RecordBatch.from_arrays([pa.array(values, pa.binary())], ["value"])
            sent_s = self.world.loop.now
            payload = encode_batch(
                batch, [Share(0, rows, written)], written_ms=EPOCH_MS + int(sent_s * 1000)
            )
            await writer.append(payload, rows=rows)
            written += rows
            self._acked[name] = written
            self.world.ghost.meet("live row acknowledged")
            ghost = self.world.ghost
            invariants.an_acked_row_is_in_the_log(
                ghost, writer.ledger_id, written, writer.ledger_id in log.lives
            )
            late = log.gone_s is not None and sent_s > log.gone_s
            invariants.nothing_is_acked_once_a_topic_was_deleted(ghost, log.topic_id, late)
            since = log.lives.get(writer.ledger_id, 0.0)
            later = any(since < opened_s < sent_s for opened_s in log.lives.values())
            invariants.one_owner_at_a_time_is_acked(ghost, writer.ledger_id, later)
            await asyncio.sleep(client.rng.uniform(0, 0.4))

    # -- readers -----------------------------------------------------------------------------------

    async def _read_often(self, client: Client) -> None:
        """Follow the open end, and read what is confirmed of it."""
        topics, ends = self.work.client(client), LiveEnds(client.ledgers)
        while self.world.loop.now < self.ends_at:
            await asyncio.sleep(client.rng.uniform(0.2, 2))
            log = self.work.ghost.named(LIVE)
            if log is None:
                continue
            try:
                state = await topics.log(log.topic_id).fold(fresh=False)
                live = state.partitions[0].live
                ends.follow([] if live is None else [live])
                await asyncio.sleep(client.rng.uniform(0, 1))
                if live is not None:
                    await self.read_live(topics, ends, log, live)
            except (LedgerError, StoreError) as error:
                self.work.met(client, "read live", error)
        await ends.close()

    async def read_live(
        self, topics: TopicClient, ends: LiveEnds, log: LogGhost, live: LiveSegment
    ) -> list[bytes]:
        """What is confirmed of the live segment, judged row by row."""
        known, ghost = ends.end_of(live), self.world.ghost
        if not known.rows:
            return []
        end = live.base + known.rows
        found = await self._read_between(topics, log, live, (live.base, end), known.last_entry)
        self.world.ghost.meet("live rows read")
        if "live cuts" in self.work.plan.also:
            start = self._cuts.randint(live.base, end - 1)
            cut = (start, self._cuts.randint(start + 1, end))
            some = await self._read_between(topics, log, live, cut, known.last_entry)
            same = some == found[start - live.base : cut[1] - live.base]
            invariants.offsets_are_dense(ghost, 0, [*range(*cut)] if same else [], *cut)
            ghost.meet("live segment cut")
        return found

    async def _read_between(
        self,
        topics: TopicClient,
        log: LogGhost,
        live: LiveSegment,
        span: tuple[int, int],
        last_entry: int,
    ) -> list[bytes]:
        """The rows of these offsets, which may begin and end within an entry."""
        found: list[bytes] = []
        offsets: list[int] = []
        part = LiveRows(live, *span, last_entry)
        task = ReadTask(LIVE, log.topic_id, (), NO_SEGMENTS, part)
        async with aclosing(read_task(topics.ledgers, task)) as read:
            async for rows in read:
                values = rows.record_batch.column("value").to_pylist()
                for place, value in enumerate(values, rows.offset):
                    self.work.judge_live_row(log, place, value, live.ledger_id)
                    found.append(value)
                    offsets.append(place)
        invariants.offsets_are_dense(self.world.ghost, 0, offsets, *span)
        return found

    async def audit(self, client: Client) -> None:
        """Every row that was acknowledged to a producer is there once: in a segment, or in the
        live one that the log names. Every ledger is closed."""
        log = self.work.ghost.named(LIVE)
        if log is None:
            return
        topics, ends = self.work.client(client), LiveEnds(client.ledgers)
        found = await self.work.read_all(topics, fresh=True)
        state = await topics.log(log.topic_id).fold(fresh=True)
        values, live = list(found[log.topic_id][0]), state.partitions[0].live
        if live is not None:
            await ends.refresh([live])
            values += await self.read_live(topics, ends, log, live)
        self._judge_order(log, values)
        times: dict[bytes, int] = {}
        for value in values:
            times[value] = times.get(value, 0) + 1
        trimmed = log.trimmed_attempts()
        for name, rows in self._acked.items():
            if self.work.ghost.topic_of[name] != log.topic_id or name in trimmed:
                continue
            for row in range(rows):
                there = times.get(f"{name}:0:{row}".encode(), 0)
                invariants.acked_rows_of_producers_are_there_once(
                    self.world.ghost, name, row, there
                )

    def _judge_order(self, log: LogGhost, values: list[bytes]) -> None:
        index = {live_name(ledger_id): at for at, ledger_id in enumerate(log.lives)}
        before = (-1, -1)
        for value in values:
            name, _, row = value.decode().split(":")
            place = (index[name], int(row))
            invariants.a_chain_is_read_in_the_order_of_its_acks(self.world.ghost, 0, before, place)
            before = place
