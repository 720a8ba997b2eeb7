"""Decides which ledgers that were made for topics are closed, kept and deleted, and when; and which
intents count as abandoned. Pure: the janitor reads, this file decides, the janitor acts.

Always true of a ledger that is deleted: it is CLOSED; its topic is deleted, or was folded after
this ledger was seen CLOSED and does not refer to it (hazard 4); a ledger that the topic dropped
stayed for the topic's delete delay after that (hazard 34). Under an open intent, the decision
depends on how often that intent's commits name a ledger (hazard 5):
- A query's tasks write to one ledger for batch after batch. The ledger goes only if a version was
  committed after the ledger was CLOSED: tasks of later versions began after that commit, and cannot
  have written to it. The numbers of the metadata store's transactions show the order of commit and
  close, also to an observer that began later. Only a streaming query allows this conclusion,
  because its versions come one after another from one run.
- A ledger of a broker, of maintenance, of a batch job or of a task that commits its part is named
  by no further commit once it is CLOSED and the topic has dropped it. So the ledger goes although
  the intent may stay open for months: a seal covers all entries of a live ledger; each round of
  merges, and each part, writes its rows to its own ledgers (compactor.py, parts.py); and the bodies
  of a commit, or a checkpoint, are in ledgers without other entries (log/blobs.py). If the topic
  never referred to such a ledger, a commit may be about to name it: it stays while the intent is
  open.
- About other kinds of intents nothing is certain, and all their ledgers are kept.

Always true of an intent that is abandoned: one observer saw its heartbeat stand still in one
unbroken session; a difference of two hosts' clocks never counts. Many intents that fall silent
together are a sign of trouble with the network or with the metadata store, not of dead writers
(hazard 44): then no intent is condemned for a while, and after that only a few at a time.
"""

from collections.abc import Container, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum

from spark_ledger.topic.log.intents import BATCH, NAMED_ONCE_KINDS, PARTS, QUERY
from spark_ledger.topic.log.policies import OWN_ROLL_S_MAX, TopicPolicies

COUNTING_KINDS = (QUERY,)
"""Kinds of intents whose versions are committed by one run, in order, one at a time."""
POLICY_KINDS = (QUERY, PARTS, BATCH)
"""Kinds of intents whose ledgers are all rolled by the topic's policies."""
DELETED_PART_MAX = 0.1  # the part of all ledgers that a pass deletes as never referred to
DELETED_UNGUARDED = 20  # a pass deletes so many in any case
UNPUBLISHED_MS = 3600 * 1000
"""A checkpoint may take this time from its first entry in a ledger until the record that names the
ledger is published. A slower checkpoint has to begin again."""


@dataclass(frozen=True, slots=True)
class IntentSeen:
    """An intent. `committed_in` is the number of the store's transaction with the last commit of
    its app id and target."""

    id: str
    kind: str
    open: bool
    committed_in: int = 0

    @property
    def counts(self) -> bool:
        """Whether a commit of this intent shows that no batch under way uses a ledger."""
        return self.open and self.kind in COUNTING_KINDS


@dataclass(frozen=True, slots=True)
class LedgerSeen:
    """A ledger with a record. Times are by the store's clock. `stuck`: it was in recovery at two
    looks; `closed_in`: the number of the store's transaction that CLOSED it, or of a later one;
    `closed_ms`: when the observer first saw it CLOSED."""

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
    """A folded topic: the ledgers to which it refers, and the ledgers that it dropped, with the
    time. `checkpoint` is the version that its checkpoint's node had before the fold (None: no
    node). `deleted_ms`: when the topic was deleted. `problem`: why its references cannot be read;
    all its ledgers are kept then."""

    id: str
    policies: TopicPolicies = field(default_factory=TopicPolicies)
    referred: Container[int] = frozenset()
    dropped: Mapping[int, int] = field(default_factory=dict)
    checkpoint: int | None = None
    deleted_ms: int | None = None
    problem: str = ""


class Fate(Enum):
    KEPT = "kept"  # a topic refers to it
    WAITS = "waits"  # it stays now: `why` has the reason
    NEVER_REFERRED = "never referred to"  # deleted, although nothing shows that a topic dropped it
    RECLAIMED = "reclaimed"  # deleted: its topic dropped it, or is deleted itself


@dataclass(frozen=True, slots=True)
class GarbageVerdict:
    ledger: int
    fate: Fate
    why: str = ""


def to_close(
    ledgers: Iterable[LedgerSeen],
    intents: Mapping[str, IntentSeen],
    topics: Mapping[str, TopicSeen],
    now_ms: int,
) -> list[int]:
    """The open ledgers that no writer will close: all open ledgers of ended intents and of deleted
    topics, and older ledgers than a writer keeps open (hazard 19), whether or not a topic refers to
    them."""
    open_ledgers = (ledger for ledger in ledgers if not ledger.closed)
    return [ledger.id for ledger in open_ledgers if _is_abandoned(ledger, intents, topics, now_ms)]


def fate_of(
    ledger: LedgerSeen, intent: IntentSeen, topic: TopicSeen, now_ms: int
) -> GarbageVerdict:
    """The fate of a ledger; `intent` and the ledger were read before the topic was folded."""
    if not topic.problem and topic.deleted_ms is None and ledger.id in topic.referred:
        return GarbageVerdict(ledger.id, Fate.KEPT)
    why = _waits_for(ledger, intent, topic, now_ms)
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
    is open for more than twice the roll age. The intents of brokers and of merging are both of kind
    SYSTEM, and merging rolls by the policies: the longer of both ages counts."""
    roll_s = policies.ledger_age_s_max
    return 1500 * (roll_s if kind in POLICY_KINDS else max(roll_s, OWN_ROLL_S_MAX))


def _waits_for(ledger: LedgerSeen, intent: IntentSeen, topic: TopicSeen, now_ms: int) -> str:
    """Why a ledger to which no topic refers must stay now; empty if it may go."""
    if topic.problem:
        return topic.problem
    if not ledger.closed:
        return "it is not closed"
    if topic.deleted_ms is not None:
        left_ms = topic.deleted_ms + topic.policies.delete_delay_ms - now_ms
        return _delay(left_ms, "its topic was deleted")
    is_dropped = ledger.id in topic.dropped
    if intent.open and not intent.counts and not (is_dropped and intent.kind in NAMED_ONCE_KINDS):
        return "its writer is at work"
    if intent.counts and not is_before(ledger.closed_in, intent.committed_in):
        return "its writer has not committed a version since it was closed"
    if is_dropped:
        left_ms = topic.dropped[ledger.id] + topic.policies.delete_delay_ms - now_ms
        return _delay(left_ms, "the last reference to it went")
    if intent.open and (ledger.closed_ms is None or now_ms < ledger.closed_ms + UNPUBLISHED_MS):
        return "its writer may be about to name it in a checkpoint"
    return ""


def is_before(closed_in: int, committed_in: int) -> bool:
    """Whether a ledger is certain to have been CLOSED before the last version was committed."""
    return 0 < closed_in < committed_in


def _delay(left_ms: int, what: str) -> str:
    return f"{what}; the delete delay ends in {-(-left_ms // 1000)} s" if left_ms > 0 else ""


def too_many(never_referred: int, ledgers: int) -> str:
    """Why a pass must not delete so many ledgers that no topic ever referred to: an empty or a
    wrong metadata store looks the same (hazard 50). Empty if the ledgers may go."""
    if never_referred <= max(DELETED_UNGUARDED, ledgers * DELETED_PART_MAX):
        return ""
    return (
        f"{never_referred} of {ledgers} ledgers would be deleted because no topic refers to them:"
        " look first, then clean with force"
    )


TOGETHER_PART_MAX = 0.2  # of the open intents
TOGETHER_MIN = 2
PAUSE_LEASES = 4
UNUSED_LEASES = 96
"""A batch job's writer is made when its query is planned. The rows may take long to compute, and
until the first task begins the writer has no heartbeat and no ledger."""


@dataclass(frozen=True, slots=True)
class Silence:
    """The judgement on silent intents: `condemn` are the intents to condemn now. If too many fell
    silent together, `since_s` is the time of the first such pass, and `alarm` the message."""

    condemn: tuple[str, ...]
    since_s: float | None = None
    alarm: str = ""


def lease_s(kind: str, heartbeats: int, lease_s: float) -> float:
    """How long an intent of this kind may be without a new heartbeat after so many heartbeats."""
    return UNUSED_LEASES * lease_s if kind == "batch" and heartbeats == 0 else lease_s


def judge(
    opened: int, silent: Sequence[str], since_s: float | None, now_s: float, lease_s: float
) -> Silence:
    """`silent` are the intents without a heartbeat for a lease, `opened` is the number of open
    intents, `since_s` is that of the judgement before."""
    if len(silent) < TOGETHER_MIN or len(silent) <= opened * TOGETHER_PART_MAX:
        return Silence(tuple(silent))
    since_s = now_s if since_s is None else since_s
    left_s = since_s + PAUSE_LEASES * lease_s - now_s
    if left_s > 0:
        alarm = (
            f"{len(silent)} of {opened} writers fell silent together: look whether they can reach"
            f" the metadata store; they count as gone, a few at a time, from {left_s:.0f} s on"
        )
        return Silence((), since_s, alarm)
    condemned_max = max(1, int(opened * TOGETHER_PART_MAX))
    return Silence(tuple(silent[:condemned_max]), since_s)
