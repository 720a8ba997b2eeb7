"""Rules of the topic layer taken out, each of which its scope must find, without luck."""

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from typing import Any

from spark_ledger.metadata import paths
from spark_ledger.metadata.store_calls import ensure, read
from spark_ledger.topic.checkpointer import Checkpointer
from spark_ledger.topic.commit import commit
from spark_ledger.topic.commit import draft as commit_draft
from spark_ledger.topic.log import records, state, topic_log
from spark_ledger.topic.log.names import escape
from spark_ledger.topic.log.records import IntentState, TxnRecord
from spark_ledger.topic.log.topic_log import TopicLog
from spark_ledger.topic.upkeep.janitor import Janitor
from tests.simulation.exhaustive.topics import live
from tests.simulation.mutants.mutant import Mutant
from tests.simulation.mutants.topics import (
    a_missing_commit_is_the_end,
    always_of_this_run,
    never_torn,
    publishes_whatever_is_there,
    sets_head_whatever_it_is,
)

Make = Callable[[Any], Any]


@dataclass(frozen=True)
class Rule:
    """A hazard's rule taken out: what it replaces, and the scope that finds it."""

    name: str
    hazard: str
    scope: str
    parts: tuple[tuple[Any, str, Make], ...]

    @contextmanager
    def applied(self) -> Iterator[None]:
        with ExitStack() as stack:
            for owner, attribute, make in self.parts:
                one = Mutant(self.name, self.hazard, owner, attribute, make)
                stack.enter_context(one.applied())
            yield


def asks_the_log(record_of: Any) -> Any:
    """Whether a commit was made is told by its node in the log, not by the transaction record."""

    async def looked_up(self: Any, fresh: bool) -> Any:
        record, version = await record_of(self, fresh)
        if record.commit_id != self._commit_id:
            return record, version
        node = await read(self._store, paths.topic_log(record.topic_id, record.number))
        if node is not None and records.decode_commit(node.value).commit_id == self._commit_id:
            return record, version
        return TxnRecord(record.version - 1), version

    return looked_up


def key_of_each_topic(run: Any) -> Any:
    """The transaction record is that of the first topic alone."""

    async def with_own_key(self: Any, timeout_s: float) -> Any:
        txn, target = self._request.txn, f"{self._request.txn.target}@{self._topic_ids[0]}"
        self._txn_path = paths.txn(escape(txn.app_id), escape(target))
        await ensure(self._store, self._txn_path, records.encode_txn(TxnRecord()))
        return await run(self, timeout_s)

    return with_own_key


def condemns_in_memory(condemn: Any) -> Any:
    async def assumed(self: Any, intents: Any, stale: Any) -> Any:
        ended = [replace(one.record, state=IntentState.CONDEMNED) for one in intents]
        return [
            replace(one, record=record) if one.id in stale else one
            for one, record in zip(intents, ended, strict=True)
        ]

    return assumed


def anything_holds(check: Any) -> Any:
    return lambda *_, **__: None


def sends_without_looking(reopen: Any) -> Any:
    """The owner takes what it sent for what was done."""

    async def believed(self: Any) -> None:
        self._looks = False
        await reopen(self)

    return believed


RULES = (
    Rule(
        *("head set at any version", "1", "commits"),
        ((commit._Commit, "_head", sets_head_whatever_it_is),),
    ),
    Rule(
        *("outcome looked up in the log", "2", "commits"),
        ((commit._Commit, "_record", asks_the_log),),
    ),
    Rule(
        *("janitor condemns nobody", "4", "cleaning"),
        ((Janitor, "_condemn", condemns_in_memory),),
    ),
    Rule(
        *("checkpoint set at any version", "6", "commits"),
        ((Checkpointer, "_set", publishes_whatever_is_there),),
    ),
    Rule(
        *("missing commit taken for the end", "7", "commits"),
        ((TopicLog, "_apply_commits", a_missing_commit_is_the_end),),
    ),
    Rule(
        *("transaction key of each topic", "10", "runs"),
        ((commit._Commit, "run", key_of_each_topic),),
    ),
    Rule(
        *("no-op whichever run recorded the version", "11", "runs"),
        ((commit._Commit, "_record", always_of_this_run),),
    ),
    Rule(
        *("topics folded one by one", "14", "runs"),
        ((topic_log, "disagreeing_topics", never_torn),),
    ),
    Rule(
        *("owner adds before it has read its open back", "28", "live"),
        ((live.Owner, "_reopen", sends_without_looking),),
    ),
    Rule(
        *("seal without guard", "29", "live"),
        (
            (commit_draft, "_check_guard", anything_holds),
            (state._Folding, "_check", anything_holds),
        ),
    ),
)


def rule_like(text: str) -> Rule:
    """By its name, its hazard, or a part of the name. Raises ValueError."""
    exact = [rule for rule in RULES if text.removeprefix("hazard ") in (rule.hazard, rule.name)]
    found = exact or [rule for rule in RULES if text in rule.name]
    if len(found) != 1:
        known = ", ".join(f"{rule.name} (hazard {rule.hazard})" for rule in RULES)
        raise ValueError(f"{text!r} is not one of: {known}")
    return found[0]
