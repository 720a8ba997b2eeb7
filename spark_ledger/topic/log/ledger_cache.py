"""Open task ledgers kept from batch to batch: a thousand small batches need not make a thousand
ledgers.

Always true: a ledger belongs to one intent, topic and set of policies, and one task uses it at a
time. A ledger is closed after 30 s without use, when it is full or old, when its query goes on
under another run's intent, or when its task is cancelled while the ledger is made. A cache
belongs to one process and one cluster. The janitor closes a ledger that the cache fails to
close.
"""

import asyncio
import logging
from collections.abc import Awaitable, Callable
from contextlib import suppress
from dataclasses import dataclass
from functools import partial

from spark_ledger import errors
from spark_ledger.async_tasks import BackgroundTasks
from spark_ledger.ledger.client import LedgerStore
from spark_ledger.ledger.records import IdSpent
from spark_ledger.ledger.writer import AsyncLedgerWriter
from spark_ledger.metadata import paths
from spark_ledger.metadata.store import StoreError
from spark_ledger.metadata.store_calls import read
from spark_ledger.topic.log import records
from spark_ledger.topic.log.intents import Intent, Intents
from spark_ledger.topic.log.names import parse_topic
from spark_ledger.topic.log.policies import TopicPolicies
from spark_ledger.topic.log.topics import read_policies

IDLE_S = 30.0
IDLE_LEDGERS_MAX = 16

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class LedgerKey:
    """Two tasks may use a ledger one after the other only if their keys are equal (hazard 22)."""

    intent_id: str
    topic_id: str
    policies: TopicPolicies


@dataclass(slots=True, eq=False)
class TaskLedger:
    """An open ledger with the values that decide when it is rolled."""

    key: LedgerKey
    app_id: str
    writer: AsyncLedgerWriter
    opened_s: float
    fragments_max: int
    bytes: int = 0

    def is_usable(self, now_s: float) -> bool:
        """Whether a task may append to the ledger: it has not failed, is neither full nor old, and
        has not too many fragments."""
        policies = self.key.policies
        return (
            self.writer.failure is None
            and self.bytes < policies.ledger_bytes_max
            and now_s - self.opened_s < policies.ledger_age_s_max
            and len(self.writer.record.fragments) < self.fragments_max
        )


class LedgerCache:
    """Keeps open task ledgers. For one event loop."""

    def __init__(self, ledgers: LedgerStore, intents: Intents) -> None:
        self._ledgers = ledgers
        self._intents = intents
        self._idle: dict[TaskLedger, asyncio.TimerHandle] = {}
        self._closing = BackgroundTasks()

    async def acquire(
        self, topic_id: str, policies: TopicPolicies, intent: Intent, *, new: bool = False
    ) -> TaskLedger:
        """An open ledger for one task: an idle ledger of the cache, or a new ledger (with `new`
        always a new ledger). The task then calls `release` or `discard`.

        Raises errors.LedgerFenced (the intent ended), errors.NotEnoughBookies, errors.Unavailable.
        """
        key = LedgerKey(intent.id, topic_id, policies)
        self._close_older_runs(key, intent.record.app_id)
        now = asyncio.get_running_loop().time()
        for ledger in list(self._idle):
            if ledger.key == key and not new:
                self._idle.pop(ledger).cancel()
                if ledger.is_usable(now):
                    return ledger
                self.discard(ledger)
        return await self._create(key, intent)

    def release(self, ledger: TaskLedger) -> None:
        """Keep the ledger for the next task, or close it in the background."""
        loop = asyncio.get_running_loop()
        if not ledger.is_usable(loop.time()):
            self.discard(ledger)
            return
        self._idle[ledger] = loop.call_later(IDLE_S, self._expire, ledger)
        if len(self._idle) > IDLE_LEDGERS_MAX:
            self._expire(next(iter(self._idle)))

    def retire(self, intent_id: str) -> None:
        """Close the intent's idle ledgers: later writes of the intent go to new ones."""
        for ledger in [ledger for ledger in self._idle if ledger.key.intent_id == intent_id]:
            self._expire(ledger)

    def discard(self, ledger: TaskLedger) -> None:
        """Close the ledger in the background, whatever state it is in."""
        self._close_in_background(ledger.writer.ledger_id, ledger.writer.close)

    async def close(self, timeout_s: float | None = None) -> None:
        """Close every idle ledger; wait, `timeout_s` at most, for all ledgers that are closing."""
        for ledger in list(self._idle):
            self._expire(ledger)
        with suppress(TimeoutError):
            async with asyncio.timeout(timeout_s):
                await self._closing.idle()

    async def _create(self, key: LedgerKey, intent: Intent) -> TaskLedger:
        writer: AsyncLedgerWriter | None = None
        while writer is None:
            with suppress(IdSpent):  # no ledger may be made with this id: take the next id
                writer = await self._make(key, await self._intents.ledger_id(intent))
        now = asyncio.get_running_loop().time()
        fragments_max = self._ledgers.config.fragments_max
        return TaskLedger(key, intent.record.app_id, writer, now, fragments_max)

    async def _make(self, key: LedgerKey, ledger_id: int) -> AsyncLedgerWriter:
        policies = key.policies
        try:
            return await self._ledgers.create(
                policies.ensemble_size,
                policies.write_quorum,
                policies.ack_quorum,
                intent=key.intent_id,
                topic=key.topic_id,
                durability=policies.durability,
                ledger_id=ledger_id,
            )
        except asyncio.CancelledError:  # the store may have the ledger's record
            self._close_in_background(ledger_id, partial(self._ledgers.recover, ledger_id))
            raise
        except errors.NotEnoughBookies as failure:
            raise await self._failure_with_policy(failure, key) from failure

    async def _failure_with_policy(
        self, failure: errors.NotEnoughBookies, key: LedgerKey
    ) -> errors.NotEnoughBookies:
        """The failure, with a better text if fewer bookies are writable than the ensemble needs:
        the text names the policy, or the write, that asks for this ensemble. If the cluster never
        had enough bookies for the ensemble, the remedy names a smaller ensemble, too."""
        writable, size = failure.facts.get("writable"), key.policies.ensemble_size
        if not isinstance(writable, list) or len(writable) >= size:
            return failure
        with suppress(StoreError, errors.UnsupportedFormat):
            bookies = await self._ledgers.cluster.directory.count_ever_registered()
            node = await read(self._ledgers.metadata, paths.topic(key.topic_id))
            if node is None:
                return failure
            topic = records.decode_topic(node.value)
            current = await read_policies(self._ledgers.metadata, key.topic_id)
            name, policy_size = parse_topic(topic.name).short, current.policies.ensemble_size
            why = f"policy ensemble_size of topic '{name}' is {size}"
            alternative = "write with a smaller ensemble"
            if size != policy_size:
                why = f"this write asks for an ensemble of {size}, policy ensemble_size of '{name}'"
                why += f" is {policy_size}"
            elif 0 < bookies < size:
                alternative = _smaller_ensemble_command(name, key.policies, bookies)
            remedy = (
                failure.remedy
                if bookies >= size
                else f"Start the missing bookies, or {alternative}."
            )
            return errors.NotEnoughBookies(f"{failure.what}; {why}", remedy, **failure.facts)
        return failure

    def _close_older_runs(self, key: LedgerKey, app_id: str) -> None:
        for ledger in list(self._idle):
            same_writer = (ledger.app_id, ledger.key.topic_id) == (app_id, key.topic_id)
            if same_writer and ledger.key.intent_id != key.intent_id:
                self._expire(ledger)

    def _expire(self, ledger: TaskLedger) -> None:
        timer = self._idle.pop(ledger, None)
        if timer is not None:
            timer.cancel()
            self.discard(ledger)

    def _close_in_background(
        self, ledger_id: int, closing: Callable[[], Awaitable[object]]
    ) -> None:
        self._closing.start(self._close_quietly(ledger_id, closing))

    async def _close_quietly(
        self, ledger_id: int, closing: Callable[[], Awaitable[object]]
    ) -> None:
        try:
            await closing()
        except errors.NoSuchLedger:
            return
        except (errors.LedgerError, StoreError) as error:
            _log.info("ledger %d stays open: %s", ledger_id, error)


def _smaller_ensemble_command(name: str, policies: TopicPolicies, bookies: int) -> str:
    """The command after which a topic's ledgers need no more than `bookies` bookies."""
    write = min(policies.write_quorum, bookies)
    ack = min(policies.ack_quorum, write)
    command = f"spark-ledger topic set {name} ensemble_size={bookies}"
    return f"{command} write_quorum={write} ack_quorum={ack}"
