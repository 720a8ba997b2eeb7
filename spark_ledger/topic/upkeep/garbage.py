"""Decides which ledgers that were made for topics are closed, kept and deleted, and when; and which
intents count as abandoned. Pure: the janitor reads, this file decides, the janitor acts.

Always true of a ledger that is deleted: it is CLOSED. Its topic is deleted, or was folded after
the ledger was seen CLOSED, and does not refer to the ledger (hazard 4). If the topic dropped the
ledger, the topic's delete delay has passed since then (hazard 34). If the ledger's intent is open,
the decision depends on how often commits under such an intent name a ledger (hazard 5):
- A query's tasks write to one ledger for batch after batch. The ledger goes only if a version was
  committed after the ledger was CLOSED: tasks of later versions began after this commit, and cannot
  have written to the ledger. The numbers of the metadata store's transactions show the order of
  commit and close, also to an observer that began later. Only for a streaming query is this
  certain, because its versions come one after another from one run.
- Other writers (NAMED_ONCE_KINDS) are brokers, maintenance, batch jobs and tasks that commit their
  part. After a ledger of such a writer is CLOSED and dropped, no commit names the ledger again. So
  the ledger goes, although the intent may stay open for months. The reasons: a seal covers all
  entries of a live ledger; each round of merges, and each part, writes its rows to its own ledgers
  (compactor.py, parts.py); and the bodies of a commit, or a checkpoint, are in ledgers without
  other entries (log/blobs.py). If the topic never referred to the ledger, a commit may be about to
  name it: the ledger stays while the intent is open.
- For other kinds of intents nothing is certain, and all their ledgers are kept.

Always true of an intent that counts as abandoned: one observer saw its heartbeat stand still in one
unbroken session; a difference of two hosts' clocks never counts. If many intents fall silent
together, the cause is the network or the metadata store, not dead writers (hazard 44): then no
intent is condemned for a while, and later only a few at a time.
"""

from collections.abc import Container, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum

from spark_ledger.topic.log.intents import BATCH, NAMED_ONCE_KINDS, PARTS, QUERY
from spark_ledger.topic.log.policies import ROLL_AGE_S_MAX, TopicPolicies

IN_ORDER_KINDS = (QUERY,)
"""Kinds of intents for which one run commits the versions, in order, one at a time."""
POLICY_KINDS = (QUERY, PARTS, BATCH)
"""Kinds of intents whose ledgers all follow the topic's policies for rolling."""
DELETED_SHARE_MAX = 0.1  # the share of all ledgers that a pass may delete as never referred to
DELETED_ALWAYS = 20  # a pass may always delete this many as never referred to
UNPUBLISHED_MS = 3600 * 1000
"""The time that a checkpoint may take from its first entry in a ledger until the record that names
the ledger is published. A slower checkpoint has to begin again."""


@dataclass(frozen=True, slots=True)
class IntentSeen:
    """An intent as the janitor read it. `committed_in` is the number of the store's transaction
    with the last commit of the intent's app id and target."""

    id: str
    kind: str
    open: bool
    committed_in: int = 0

    @property
    def in_order(self) -> bool:
        """Whether a commit under this intent proves that no task still uses an older ledger."""
        return self.open and self.kind in IN_ORDER_KINDS


@dataclass(frozen=True, slots=True)
class LedgerSeen:
    """A ledger with a record, as the janitor read it. Times are by the store's clock. `stuck`: the
    ledger was in recovery in two passes. `closed_in`: the number of the store's transaction that
    CLOSED the ledger, or a later number. `closed_ms`: when the janitor first saw the ledger
    CLOSED."""

    id: int
    intent: str
    topic: str
    closed: bool
    made_ms: int = 0
    stuck: bool = False
    closed_in: int = 0
    closed_ms: int | None = None


@dataclass(frozen=True, slots=True)
class TopicSeen:
    """A folded topic: the ledgers to which it refers (`referred`), and the ledgers that it dropped,
    with the time. `checkpoint` is the version that its checkpoint's node had before the fold (None:
    there was no node). `deleted_ms`: when the topic was deleted. `problem`: why its references
    cannot be read; then all its ledgers are kept."""

    id: str
    policies: TopicPolicies = field(default_factory=TopicPolicies)
    referred: Container[int] = frozenset()
    dropped: Mapping[int, int] = field(default_factory=dict)
    checkpoint: int | None = None
    deleted_ms: int | None = None
    problem: str = ""


class Fate(Enum):
    KEPT = "kept"  # a topic refers to the ledger
    WAITS = "waits"  # the ledger stays for now: `why` has the reason
    NEVER_REFERRED = "never referred to"  # deleted: no topic refers to the ledger or has dropped it
    RECLAIMED = "reclaimed"  # deleted: its topic dropped the ledger, or the topic is deleted


@dataclass(frozen=True, slots=True)
class GarbageVerdict:
    ledger: int
    fate: Fate
    why: str = ""


def abandoned_ledgers(
    ledgers: Iterable[LedgerSeen],
    intents: Mapping[str, IntentSeen],
    topics: Mapping[str, TopicSeen],
    now_ms: int,
) -> list[int]:
    """The open ledgers that no writer will close: all open ledgers of ended intents and of deleted
    topics, and ledgers that are open for more than `open_ms_max` (hazard 19). A topic may refer to
    such a ledger."""
    open_ledgers = (ledger for ledger in ledgers if not ledger.closed)
    return [ledger.id for ledger in open_ledgers if _is_abandoned(ledger, intents, topics, now_ms)]


def fate_of(
    ledger: LedgerSeen, intent: IntentSeen, topic: TopicSeen, now_ms: int
) -> GarbageVerdict:
    """The fate of a ledger. The intent and the ledger must have been read before the topic was
    folded."""
    if not topic.problem and topic.deleted_ms is None and ledger.id in topic.referred:
        return GarbageVerdict(ledger.id, Fate.KEPT)
    why = _reason_to_wait(ledger, intent, topic, now_ms)
    if why:
        return GarbageVerdict(ledger.id, Fate.WAITS, why)
    was_referred = topic.deleted_ms is not None or ledger.id in topic.dropped
    return GarbageVerdict(ledger.id, Fate.RECLAIMED if was_referred else Fate.NEVER_REFERRED)


def _is_abandoned(
    ledger: LedgerSeen,
    intents: Mapping[str, IntentSeen],
    topics: Mapping[str, TopicSeen],
    now_ms: int,
) -> bool:
    topic = topics.get(ledger.topic) or TopicSeen(ledger.topic)
    if not intents[ledger.intent].open or ledger.stuck or topic.deleted_ms is not None:
        return True
    return now_ms - ledger.made_ms > open_ms_max(topic.policies, intents[ledger.intent].kind)


def open_ms_max(policies: TopicPolicies, kind: str = "query") -> int:
    """How long a ledger may be open: one and a half times its writer's roll age, so that no ledger
    is open for more than twice the roll age. Tasks and merging roll by the policies, brokers
    and cursors after ROLL_AGE_S_MAX at most. For SYSTEM, the kind of brokers and of merging, the
    longer roll age counts."""
    roll_s = policies.ledger_age_s_max
    return 1500 * (roll_s if kind in POLICY_KINDS else max(roll_s, ROLL_AGE_S_MAX))


def _reason_to_wait(ledger: LedgerSeen, intent: IntentSeen, topic: TopicSeen, now_ms: int) -> str:
    """Why a ledger to which no topic refers must stay for now; empty if the ledger may go."""
    if topic.problem:
        return topic.problem
    if not ledger.closed:
        return "the ledger is not closed"
    if topic.deleted_ms is not None:
        left_ms = topic.deleted_ms + topic.policies.delete_delay_ms - now_ms
        return _delay(left_ms, "its topic was deleted")
    is_dropped = ledger.id in topic.dropped
    if intent.open and not intent.in_order and not (is_dropped and intent.kind in NAMED_ONCE_KINDS):
        return "its writer is at work"
    if intent.in_order and not is_before(ledger.closed_in, intent.committed_in):
        return "its writer has not committed a version since the ledger was closed"
    if is_dropped:
        left_ms = topic.dropped[ledger.id] + topic.policies.delete_delay_ms - now_ms
        return _delay(left_ms, "its topic dropped it")
    if intent.open and (ledger.closed_ms is None or now_ms < ledger.closed_ms + UNPUBLISHED_MS):
        return "its writer may be about to name it in a checkpoint"
    return ""


def is_before(closed_in: int, committed_in: int) -> bool:
    """Whether a ledger was certainly CLOSED before the last version was committed."""
    return 0 < closed_in < committed_in


def _delay(left_ms: int, what: str) -> str:
    """Empty if the delay is over."""
    return f"{what}; the delete delay ends in {-(-left_ms // 1000)} s" if left_ms > 0 else ""


def refusal_to_delete(never_referred: int, ledgers: int) -> str:
    """Why a pass must not delete so many ledgers that no topic ever referred to; empty if it may.
    With an empty or wrong metadata store, the ledgers of all topics look like this (hazard 50)."""
    if never_referred <= max(DELETED_ALWAYS, ledgers * DELETED_SHARE_MAX):
        return ""
    return (
        f"{never_referred} of {ledgers} ledgers would be deleted because no topic refers to them:"
        " check that this is right, then clean with force"
    )


TOGETHER_SHARE_MAX = 0.2  # the share of the open intents that may fall silent at the same time
TOGETHER_MIN = 2
PAUSE_LEASES = 4  # for so many leases no intent is condemned after many fell silent together
UNUSED_LEASES = 96
"""The leases that a batch job's intent gets before its first heartbeat. Its writer is made when the
query is planned; the rows may take long to compute, and until the first task begins the writer has
no heartbeat and no ledger."""


@dataclass(frozen=True, slots=True)
class Silence:
    """The judgement on silent intents: `condemn` are the intents to condemn now. If too many fell
    silent together, `since_s` is the time of the first pass that saw this, and `alarm` the message
    for the operator."""

    condemn: tuple[str, ...]
    since_s: float | None = None
    alarm: str = ""


def intent_lease_s(kind: str, heartbeats: int, lease_s: float) -> float:
    """How long an intent of this kind, which had `heartbeats` heartbeats, may be silent."""
    return UNUSED_LEASES * lease_s if kind == "batch" and heartbeats == 0 else lease_s


def judge(
    opened: int, silent: Sequence[str], since_s: float | None, now_s: float, lease_s: float
) -> Silence:
    """Judges the `silent` intents, which had no heartbeat for a lease. `opened` is the number of
    open intents, `since_s` the value in the previous judgement."""
    if len(silent) < TOGETHER_MIN or len(silent) <= opened * TOGETHER_SHARE_MAX:
        return Silence(tuple(silent))
    since_s = now_s if since_s is None else since_s
    left_s = since_s + PAUSE_LEASES * lease_s - now_s
    if left_s > 0:
        alarm = (
            f"{len(silent)} of {opened} writers fell silent together: check that they can reach the"
            f" metadata store; in {left_s:.0f} s they begin to count as gone, a few at a time"
        )
        return Silence((), since_s, alarm)
    condemned_max = max(1, int(opened * TOGETHER_SHARE_MAX))
    return Silence(tuple(silent[:condemned_max]), since_s)
