"""A producer as Pulsar's clients are: batches with sequence ids, and each again until its receipt.

Always true: batches are sent in order, and again in order after a connection was lost; nothing is
given up. Now and then its program dies: the next one of its name goes on (with deduplication after
the sequence id that it is told), and what had no receipt is not sent again. So it is with an
exclusive one that another has fenced: it comes back as a new one. Once all is well each sends some
more: whatever the chaos left behind, its partition takes them.

Where the run has chunks some batches are a message in chunks, sent one after another, at times with
a pause between; some programs die between them. After a lost connection a message goes again from
its first chunk on, or, if some of its chunks had receipts, from the first one without.
"""

import asyncio
from collections import deque
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any
from zlib import crc32

from spark_ledger.broker.names import ledger_number
from spark_ledger.broker.wire.commands import AccessMode, ServerError, signed
from tests.kit.pulsar_batches import batch_of, lone, message
from tests.simulation import invariants
from tests.simulation.brokers import chunks
from tests.simulation.brokers.link import Link, Lost, session
from tests.simulation.brokers.wire import jitter
from tests.simulation.store import EPOCH_MS

if TYPE_CHECKING:
    from tests.simulation.brokers.work import BrokerWork

KEYS = 5
DELAYED = 0.3
"""Of messages outside of batches, where consumers share a subscription."""
SILENT_S = (3.0, 8.0, 20.0)
PRODUCER_ID = 1
DIES = 0.06
DIES_BETWEEN_CHUNKS = 0.1
PAUSES_S = (0.0, 0.0, 0.05, 0.5)
"""Between chunks of a message."""
LOOK_S = 0.5
FENCED_S = 2.0
"""A fenced producer takes its topic back after that, about."""


@dataclass
class Sent:
    """A batch, until its receipt."""

    first: int
    """Sequence id of its first message."""
    values: list[bytes]
    parts: list[bytes]
    """What is sent: of a message in chunks each chunk."""
    times: int = 0
    receipts: int = 0
    """Of so many parts."""
    offset: int = -1
    """That the first of them had; below 0 of what was stored before."""

    @property
    def last(self) -> int:
        return self.first + len(self.values) - 1


class ProducerModel:
    """Of one partition. `mode`: other than SHARED it is to be the only one."""

    def __init__(
        self,
        work: "BrokerWork",
        name: str,
        partition: int,
        mode: AccessMode = AccessMode.SHARED,
    ) -> None:
        self.mode = mode
        self.work = work
        self.name = name
        self.partition = partition
        self.process = work.world.loop.process(f"producer {name} {partition}")
        self.rng = work.world.loop.random_for(f"producer {name} {partition}")
        self.waiting: deque[Sent] = deque()
        self._epoch = 0
        self._topic_epoch = 0
        self._made_ready: Any = None
        self._life = 0
        self._number = 0
        self._next = 0
        self._received = -1
        self._new_life = True
        self._ends = False
        self._owner = ""
        self.silent_s = self.rng.choice(SILENT_S)
        self.left = self.rng.randint(4, 40)
        self._delays_rng = work.world.loop.random_for(f"delays of {name} {partition}")
        self.chunks_rng = work.world.loop.random_for(f"chunks of producer {name} {partition}")
        self.rest_s = self.rng.choice((0.0, 0.1, 0.5, 1.5))
        self.dies = DIES

    @property
    def done(self) -> bool:
        return self._ends and self._rests

    @property
    def _rests(self) -> bool:
        return not (self.waiting or self._has_more)

    @property
    def _has_more(self) -> bool:
        return self.left > 0 and (self._ends or not self.work.over)

    def told(self) -> str:
        return f"producer {self.name} of partition {self.partition}: {len(self.waiting)} wait"

    async def run(self) -> None:
        await self._sends()
        while self.work.world.observers.well_since is None:  # noqa: ASYNC110
            await asyncio.sleep(LOOK_S)
        self._ends, self.left = True, 1
        await self._sends()

    async def _sends(self) -> None:
        """Until each batch has its receipt."""
        world, brokers = self.work.world, self.work.brokers
        while not self._rests:
            await session(world, brokers, self.process, self.rng, self._topic, self._session)
            if self._rests:
                return
            if self.rng.random() < self.dies and not self.work.over:
                self._dies()
            await asyncio.sleep(jitter(self.rng))

    @property
    def _topic(self) -> str:
        return self.work.partition_name(self.partition)

    def _dies(self) -> None:
        """The program ends, and is started again."""
        self.work.world.ghost.meet("producer's program died")
        self.waiting.clear()
        self._life += 1
        self._number = self._epoch = self._topic_epoch = 0
        self._new_life = True

    async def _session(self, link: Link) -> None:
        self._owner = f"broker {link.server.broker.id}"
        link.heard = lambda name, part, batch: self._heard(link, name, part)
        options = {"topic_epoch": self._topic_epoch} if self._topic_epoch else {}
        if self.mode is not AccessMode.SHARED:
            self.work.truth.claims.setdefault(self.partition, {})[self.name] = None
        self._made_ready = None
        try:
            _, made = await link.ask(
                "producer",
                topic=self._topic,
                producer_id=PRODUCER_ID,
                producer_name=self.name,
                epoch=self._epoch,
                producer_access_mode=self.mode,
                **options,
            )
        except Lost as lost:
            if lost.code == ServerError.PRODUCER_FENCED:
                await self._is_fenced()
            raise
        self._epoch += 1
        if made.producer_ready:  # else it hears of its turn, or has heard of it by now
            self._made_ready = made
        while self._made_ready is None:
            await asyncio.sleep(LOOK_S)
            if link.gone or self._loop.now > link.heard_s + self.silent_s:
                return
            link.send("ping")
        made = self._made_ready
        self._topic_epoch = made.topic_epoch
        if made.topic_epoch:
            self.work.truth.is_alone(self.partition, self._owner, made.topic_epoch)
        if self.work.truth.deduplicates:
            invariants.a_producer_that_comes_back_hears_how_far_it_came(
                self.work.world.ghost, self.name, made.last_sequence_id, self._received
            )
        if self._new_life:
            self._next, self._new_life = made.last_sequence_id + 1, False
        for sent in list(self.waiting):
            await self._send(link, sent)
        while not link.gone and not self._rests:
            if self._has_more:
                for _ in range(self.rng.choice((1, 1, 2, 6, 14))):
                    await self._send(link, self._made())
            await asyncio.sleep(self.rest_s + self.rng.uniform(0.01, 0.3))
            if self.waiting and self.work.world.loop.now > link.heard_s + self.silent_s:
                self.work.world.ghost.meet("producer left a silent broker")
                return

    async def _is_fenced(self) -> None:
        """Another has taken the topic; what has no receipt is lost to its program."""
        ghost, truth = self.work.world.ghost, self.work.truth
        ghost.meet("exclusive producer refused")
        if self.mode is AccessMode.EXCLUSIVE_WITH_FENCING:
            others = [name for name in truth.claims[self.partition] if name != self.name]
            self.work.judged(
                invariants.who_is_alone_is_not_fenced, ghost, self.process.name, others
            )
        self._dies()
        await asyncio.sleep(self.rng.expovariate(1 / FENCED_S))

    @property
    def _loop(self) -> Any:
        return self.work.world.loop

    def _made(self) -> Sent:
        rng, count = self.rng, self.rng.choice((0, 0, 1, 2, 3, 5))
        name = f"{self.name}.{self.partition}.{self._life}"
        numbers = range(self._number, self._number + max(1, count))
        values = [f"{name}:0:{number}".encode() for number in numbers]
        padding = {"padding": "x" * rng.choice((0, 0, 100, 400))}
        key = f"{crc32(values[0]) % KEYS}" if self.work.shares_by_key else None
        self.work.keys.update(dict.fromkeys(values, key))
        due_ms = None
        if not count and self.work.delays and self._delays_rng.random() < DELAYED:
            due_ms = EPOCH_MS + int((self._loop.now + self._delays_rng.uniform(0.1, 8.0)) * 1000)
            self.work.due_ms[values[0]] = due_ms
        messages = [message(value, key, padding) for value in values]
        if self.work.chunks and self.chunks_rng.random() < chunks.SHARE:
            values = values[:1]
            parts = chunks.cut(self.chunks_rng, values[0], self.name, self._next)
        elif count:
            parts = [batch_of(messages, producer=self.name, sequence_id=self._next, key=key)]
        else:
            place = {"producer": self.name, "sequence_id": self._next}
            parts = [lone(messages[0], deliver_at_ms=due_ms, **place)]
        sent = Sent(self._next, values, parts)
        self._number += len(values)
        self._next += len(values)
        self.left -= 1
        self.waiting.append(sent)
        return sent

    async def _send(self, link: Link, sent: Sent) -> None:
        sent.times += 1
        for number in range(sent.receipts, len(sent.parts) - 1):
            self._send_part(link, sent, number)
            await self._between_chunks(link)
        self.work.truth.is_sent(sent.values, self._owner, self._topic_epoch, self._loop.now)
        self._send_part(link, sent, len(sent.parts) - 1)

    def _send_part(self, link: Link, sent: Sent, number: int) -> None:
        in_chunks = len(sent.parts) > 1
        link.send(
            "send",
            sent.parts[number],
            producer_id=PRODUCER_ID,
            sequence_id=sent.first,
            num_messages=len(sent.values),
            **({"is_chunk": True} if in_chunks else {"highest_sequence_id": sent.last}),
        )

    async def _between_chunks(self, link: Link) -> None:
        """Raises Lost where the connection is gone, or the program dies."""
        pause_s = self.chunks_rng.choice(PAUSES_S)
        if self.chunks_rng.random() < DIES_BETWEEN_CHUNKS and not self.work.over:
            self.work.world.ghost.meet("producer's program died between chunks")
            self._dies()
            raise Lost("its program died between chunks")
        if pause_s:
            await asyncio.sleep(pause_s)
        if link.gone:
            self.work.world.ghost.meet("connection lost between chunks")
            raise Lost("the connection is gone between chunks")

    def _heard(self, link: Link, name: str, part: Any) -> None:
        if name == "send_receipt":
            self.work.judged(self._receipt, part)
        elif name == "producer_success":
            self._made_ready = part
        elif name in ("close_producer", "send_error"):
            if name == "send_error":
                self.work.world.trace.note(self.process.name, f"refused: {part.message}")
                self.work.world.ghost.meet(f"send refused: {part.error}")
            link.close()

    def _receipt(self, part: Any) -> None:
        work, ghost = self.work, self.work.world.ghost
        waiting = self.waiting[0].first if self.waiting else None
        invariants.receipts_come_in_the_order_of_batches(
            ghost, self.process.name, part.sequence_id, waiting
        )
        sent = self.waiting[0]
        ledger, offset = signed(part.message_id.ledgerId), signed(part.message_id.entryId)
        ghost.meet("receipt")
        if offset < 0:
            ghost.meet("receipt of what was stored before")
            before = work.truth.deduplicates or sent.receipts > 0
            allowed = 1 if sent.times > 1 and before else 0
            invariants.a_message_is_stored_as_often_as_it_was_sent(
                ghost, f"duplicate of {sent.values[0]!r}", 1, allowed
            )
            there = work.truth.is_there(self.partition, sent.values[-1])
            invariants.what_has_a_receipt_is_there(ghost, sent.values[-1], there)
        else:
            number = ledger_number(work.log.topic_id)
            invariants.nothing_of_one_topic_is_in_another(
                ghost, (self.partition, offset), f"{ledger}", f"{number}"
            )
            end = offset + len(sent.values)
            invariants.nothing_is_told_that_is_not_confirmed(
                ghost, self.process.name, self.partition, end, work.truth.confirmed(self.partition)
            )
            work.rows_are(self.partition, offset, sent.values)
            work.batches.receipt(self.partition, end)
        if sent.receipts and min(offset, sent.offset) >= 0:
            invariants.chunks_of_a_message_have_one_id(
                ghost, self.process.name, sent.offset, offset
            )
        sent.receipts, sent.offset = sent.receipts + 1, max(sent.offset, offset)
        if len(sent.parts) > 1:
            ghost.meet("receipt of a chunk")
        if sent.receipts == len(sent.parts):
            self.waiting.popleft()
        self._received = max(self._received, sent.last)
        for value in sent.values:
            work.truth.received[value] = work.world.loop.now
