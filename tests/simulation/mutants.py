"""Known bugs, put into the production code for the length of a run: the simulation must find them.

Always true: a mutant replaces one production function by one that does what the cited report
describes; it is caught when an invariant (or the liveness bound) fails, not when it raises. The
same seeds are clean without it.
"""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

from bookie_server import bookie, journal, ledger_handle, replay
from spark_ledger.bookies import bookie_client
from spark_ledger.ledger import add_pipeline, pending_adds, quorum, recovery
from spark_ledger.metadata.store import ANY_VERSION
from spark_ledger.topic import commit as topic_commit
from spark_ledger.topic.records import IntentState
from tests.simulation.chaos import draw_plan
from tests.simulation.invariants import Violation
from tests.simulation.loop import SimLoop
from tests.simulation.scenario import SeedFailed, run_seed

SEEDS_MAX = 400  # tried when a mutant's own seed does not catch it any more


@dataclass(frozen=True)
class Mutant:
    """`owner.name` is replaced by `make(the original)`; `seed` is one that catches it."""

    name: str
    what: str
    owner: Any
    attribute: str
    make: Callable[[Any], Any]
    seed: int
    changes: Mapping[str, Any] = field(default_factory=dict)
    """What the plan of its runs has, whatever the seed draws."""

    @contextmanager
    def applied(self) -> Iterator[None]:
        original = self.owner.__dict__[self.attribute]
        plain = original.__func__ if isinstance(original, staticmethod) else original
        setattr(self.owner, self.attribute, self.make(plain))
        try:
            yield
        finally:
            setattr(self.owner, self.attribute, original)

    def caught(self, seed: int) -> str | None:
        """The invariant that fails under the mutant in this seed; None if none does, also when
        the mutant merely raises."""
        with self.applied():
            try:
                return run_changed(seed, self.changes)
            except SeedFailed:
                return None

    def catching_seed(self) -> int | None:
        """Its seed, or when the code has moved on since, the first other one that catches it."""
        tried = (seed for seed in (self.seed, *range(SEEDS_MAX)) if self.caught(seed))
        return next(tried, None)


def run_changed(seed: int, changes: Mapping[str, Any]) -> str | None:
    """Run a seed with a plan changed; the number of the invariant that failed, if one did."""
    plan = replace(draw_plan(SimLoop(seed).random_for("plan")), **{"topics": False, **changes})
    try:
        run_seed(seed, plan)
    except SeedFailed as failure:
        if isinstance(failure.cause, Violation):
            return failure.cause.name
        raise
    return None


def _ack_before_sync(append: Any) -> Any:
    def appended(self: Any, records: Any) -> Any:
        append(self, records)
        done = self.task.get_loop().create_future()
        done.set_result(None)
        return done

    return appended


def _never_fences(read: Any) -> Any:
    async def unfenced(self: Any, *args: Any, **options: Any) -> Any:
        options["fence"] = False
        return await read(self, *args, **options)

    return unfenced


def _forgets_fences(apply: Any) -> Any:
    async def applied(record: Any, storage: Any) -> None:
        if record.kind is not replay.Kind.FENCE:
            await apply(record, storage)

    return applied


def _replies_before_fence_is_durable(fence: Any) -> Any:
    async def fenced(self: Any, handle: Any) -> None:
        if not handle.state.fenced:
            state = handle.fence()
            self._storage.set_state(state)
            self._journal.append([bookie.Record(bookie.Kind.FENCE, state.ledger_id, -1, b"", 0)])

    return fenced


def _takes_adds_when_fenced(refusal: Any) -> Any:
    def never_fenced(self: Any, token: bytes, recovery: bool) -> Any:
        return refusal(self, token, True)

    return never_fenced


def _keeps_acks_of_the_replaced(drop_acks: Any) -> Any:
    return lambda self, slots: None


def _delivers_while_unacking(adopt: Any) -> Any:
    def one_pass(self: Any, record: Any, replacements: Any) -> None:
        self.record = record
        self.pending.change_in_flight = False
        mask = sum(1 << index for index in replacements)
        for add in list(self.pending):
            add.acks &= ~mask
            self.confirm()  # the rest of the queue still carries acks of the replaced
        self.pending.change_in_flight = True
        adopt(self, record, replacements)

    return one_pass


def _one_negative_is_enough(needed: Any) -> Any:
    return property(lambda self: 1)


def _closes_at_what_was_heard(write_back_tail: Any) -> Any:
    async def nothing(self: Any, pipeline: Any, start: int) -> None:
        return

    return nothing


def _advancing_lac_in_write_backs(write_back: Any) -> Any:
    def advancing(self: Any, entry: Any, frozen_lac: int) -> Any:
        return write_back(self, entry, entry.header.entry_id - 1)

    return advancing


def _length_of_what_was_heard(end_at: Any) -> Any:
    async def nothing_counted(self: Any, last: int) -> Any:
        return recovery.End(last, 0, 0)

    return nothing_counted


def _never_settled(settled: Any) -> Any:
    return lambda record, draft, w0: None


def _believes_its_intent_open(intent: Any) -> Any:
    async def opened(self: Any) -> Any:
        found = await intent(self)
        record = replace(found.record, state=IntentState.OPEN)
        return replace(found, record=record, version=ANY_VERSION)

    return opened


J, P = journal.Journal, add_pipeline.AddPipeline
R, Q = recovery.Recovery, quorum.Quorum
B, C = bookie.Bookie, topic_commit._Committer
TOPIC = {"topics": True}
SLOW = {
    "quorum": (3, 3, 2),
    "bookies": 3,
    "faults": ("slow network",),
    "slow": 0.3,
    "writers": 2,
    "recoverers": 2,
}
STRIPED = {
    "quorum": (5, 3, 2),
    "bookies": 7,
    "faults": ("slow network", "kill", "stall"),
    "slow": 0.1,
    "between_s": 0.6,
    "writers": 2,
    "recoverers": 0,
    "tailers": 0,
    "entries": (20, 60),
}
MUTANTS = (
    Mutant("ack before sync", "15: OK leaves before the sync", J, "append", _ack_before_sync, 12),
    Mutant(
        "recovery reads do not fence",
        "BK#2614",
        bookie_client.BookieClient,
        "read",
        _never_fences,
        168,
        SLOW,
    ),
    Mutant("fence forgotten at replay", "12", replay, "_apply", _forgets_fences, 17),
    Mutant("reply before the fence", "D1", B, "_fence", _replies_before_fence_is_durable, 196),
    Mutant(
        "adds taken when fenced",
        "14",
        ledger_handle.LedgerHandle,
        "refusal_of_add",
        _takes_adds_when_fenced,
        6,
    ),
    Mutant(
        "acks of replaced bookies kept",
        "BK#4097",
        pending_adds.PendingAdds,
        "drop_acks",
        _keeps_acks_of_the_replaced,
        2,
    ),
    Mutant(
        "un-ack interleaved with delivery",
        "BK#3005",
        P,
        "adopt",
        _delivers_while_unacking,
        0,
        STRIPED,
    ),
    Mutant("one negative is enough", "1.2", Q, "negatives_needed", _one_negative_is_enough, 12),
    Mutant("recovery closes at the LAC", "2", R, "_write_back_tail", _closes_at_what_was_heard, 0),
    Mutant(
        "write-backs advance the LAC", "D5", R, "_write_back", _advancing_lac_in_write_backs, 16
    ),
    Mutant("length not of the last entry", "D3", R, "_end_at", _length_of_what_was_heard, 6),
    Mutant("recorded version ignored", "T2", topic_commit, "settled", _never_settled, 53, TOPIC),
    Mutant("intent believed open", "T4", C, "_intent", _believes_its_intent_open, 117, TOPIC),
)
