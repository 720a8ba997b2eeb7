"""What a seed draws before anything runs.

Always true: the classes of fault are drawn one by one (a run with few kinds finds what a run with
all of them hides); what is switched off by `without` or `skip` was drawn all the same, so that
nothing else of the run is drawn differently.
"""

import random
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

QUORUMS = (
    *((3, 3, 2), (3, 3, 2), (3, 3, 2), (3, 3, 3), (3, 2, 2), (2, 2, 2)),
    *((4, 3, 2), (4, 3, 2), (5, 3, 2), (5, 3, 2), (4, 2, 2), (5, 2, 2), (4, 3, 3), (4, 2, 1)),
)
"""E, Qw, Qa: mostly such as bear a loss, more than half of them striped."""
QUORUMS_OF_LEDGERS = (
    *((2, 2, 2), (2, 2, 2), (3, 2, 2), (3, 3, 2), (3, 3, 2), (4, 3, 2), (5, 3, 2), (3, 3, 3)),
)
"""Where Qa is Qw no copy is to spare, and a missing one shows."""
FAULTS_OF_LEDGERS = (
    *("loss", "slow network", "duplicate", "partition", "clog", "slow receiver", "kill", "restart"),
    *("blank", "hang", "overload", "unknown outcomes", "lagging store", "missed watches"),
    *("slow store", "suspension", "expiry", "stall", "pause", "zombie", "client killed"),
)
"""Beside the strikes (strikes.py): none that harms a disk otherwise than as a whole."""
DISK_LOSSES = ("blank", "bit rot", "lost directory")  # of a run over budget all are on
"""Classes that use up the budget of losses."""
OVER_BY = 2
WITHIN_BUDGET = ("topics", "page_cache", "lasting", "healing", "ledgers")
"""What no run over budget has: whose actors, or whose judges, count on every acked entry."""
LARGE = (0, 0, 300, 300, 65)
"""Sizes from which on entries are written once (StorageConfig.large_entry_bytes): none is, three in
eight of what ledger_work.draw_payload makes, all but the empty ones."""
PLACES = (0, 0, 0, 0, 0, 0, 0, 1, 1, 300)
"""Sizes from which on bookies give places of entries (StorageConfig.place_bytes_min)."""
LATE_ALSO = {"keys": 0.4, "live cuts": 0.5}
"""As ALSO, drawn later: a client reads rows of a few keys only (topic_keys.py); live segments are
read from the middle of an entry to the middle of another (topic_live.py)."""
RACKS = ("", "", "", "soft", "hard")
OWN_POLICY = 0.2
"""The share of the runs whose clients have a placement policy of their own."""
PAGE_CACHE = 0.2
"""The share of the runs in which some ledgers are of page-cache durability."""
LASTING = 0.25
"""The share of the runs in which ways stay cut for ever, if there are bookies to spare."""
HEALING = 0.15
"""The share of the runs, within the budget, in which bookies are lost for good one after another
and their copies are made elsewhere (healing.py)."""
HARM, ALONE = ("bit rot", "lost directory", "misdirected write", "index lost"), 0.7
"""In this share of those, disks are lost whole, and not harmed otherwise: a harmed one stays in the
budget of losses to the end, and where that is one disk no other is lost any more."""
OPERATORS = 0.25
"""The share of the runs with operators."""
BROKERS = 0.35
"""The share of the runs with topics in which brokers serve one (brokers/work.py)."""
ALSO = {"sources": 0.4, "janitors": 0.4, "growth": 0.4, "overwrites": 0.4, "replacements": 0.2}
"""What more may happen to topics in a run: queries that read them go on where they saved that they
were (topic_source.py); two janitors clean at once, topics get more partitions, topics are deleted
and made again over and over (topic_upkeep.py); each batch of a query takes the place of all rows
(topic_work.py). With the share of the runs with topics in which each does."""
REWINDS = {"rewinds": 0.3}
"""As ALSO, drawn beside all else: checkpoints of queries that write go back (topic_replays.py)."""
CHUNKS = {"chunks": 0.0, "sharing": 0.0, "keys": 0.0, "queries": 0.0}
"""As REWINDS, of the runs with brokers: producers send some messages in chunks
(brokers/chunks.py), consumers share a subscription, in turns or by keys (brokers/sharing.py), and
queries take such a subscription over and give it back (brokers/queries.py).
No seed draws it until 200 of them passed: plans ask for it."""


@dataclass(frozen=True)
class Plan:
    """Times in simulated seconds."""

    quorum: tuple[int, int, int]
    bookies: int
    faults: tuple[str, ...]
    """Classes that are on, from chaos.FAULTS."""
    chaos_s: float
    between_s: float
    """Mean time from one event to the next."""
    writers: int
    recoverers: int
    tailers: int
    topics: bool
    slow: float | None = None
    """The share of slow messages, when it is not to be drawn."""
    entries: tuple[int, int] = field(default=(3, 22))
    streams: int = 1
    """Ledgers that a writer writes at a time."""
    password: bool = False
    """Most ledgers have one."""
    announce: bool = False
    """Writers announce their last add confirmed when appends pause."""
    delayed: bool = False
    """Ensembles change only when they must (config.ensemble_change)."""
    old_readers: bool = False
    """Some readers are opened before the ledger's ensembles change, and used until the end."""
    add_timeout_s: float = 30.0
    """After which an append fails as a whole (config.add_timeout_s)."""
    journals: int = 1
    """Journal directories of each bookie."""
    directories: int = 1
    """Ledger directories of each bookie."""
    tight: bool = False
    """Small segments, logs and caches; collection and compaction without a rest."""
    large: int = 0
    """Entries of so many bytes are placed: written once, to a ledger directory; 0: none is."""
    churn: bool = False
    """Topics change all the time: more batches, upkeep and janitor without a rest."""
    also: tuple[str, ...] = ()
    """What more happens to topics, from ALSO and LATE_ALSO."""
    places: int = 0
    """Clients run on the hosts of all bookies, and get the places of entries of so many bytes and
    more; 0: they run elsewhere."""
    operators: bool = False
    """Somebody looks at everything and changes what may be changed, by what the command line offers
    (operators.py)."""
    lasting: bool = False
    """Some ways stay cut when all else heals (lasting.py)."""
    racks: str = ""
    """Bookies have racks, and copies are to be on different ones: "soft", "hard"; "": they have
    none."""
    own_policy: bool = False
    """Clients have a placement policy of their own, if there are bookies to spare (racks.py)."""
    page_cache: bool = False
    """Half of the ledgers are acknowledged before they are synced; a bookie that loses power counts
    as one that lost its disk."""
    healing: bool = False
    """Bookies are lost for good, one after another, and drained; what they held is made elsewhere,
    and the budget of losses is for what was not yet (healing.py)."""
    brokers: bool = False
    """Brokers serve a topic to producers and consumers (brokers/work.py)."""
    ledgers: bool = False
    """Ledgers alone, many and short, and strikes where they are decided (strikes.py)."""
    over_budget: bool = False
    """More than Qa - 1 disks may be lost or rot: entries may be unavailable, never wrong."""
    without: frozenset[str] = frozenset()
    """Classes whose events are drawn and not carried out."""
    skip: frozenset[int] = frozenset()
    """Events, by their index, that are drawn and not carried out."""
    reseeds: tuple[tuple[str, int], ...] = ()
    """Where the run first meets that situation, all that is to be drawn is drawn anew, by that
    number (forking.py)."""

    @property
    def losses_max(self) -> int:
        """How many disks may be lost or rot in the whole run, in which no process repairs."""
        return self.quorum[2] - 1 + (OVER_BY if self.over_budget else 0)

    def __str__(self) -> str:
        """For people: the faults that are on, and those that were drawn and are off."""
        on = [name for name in self.faults if name not in self.without]
        off = [name for name in self.faults if name in self.without]
        drawn = f" (drawn but off: {', '.join(off)})" if off else ""
        skipped = ", ".join(map(str, sorted(self.skip)))
        return (
            f"{self._numbers()} faults={', '.join(on) or 'none'}{drawn}"
            f"{' left out=' + skipped if skipped else ''}"
            f" options={', '.join(self._options()) or 'none'}"
            f"{' reseeded at ' + ', '.join(map(str, self.reseeds)) if self.reseeds else ''}"
        )

    def noted(self) -> str:
        """As the first line of a trace has it: another word there would change every digest."""
        off = [*sorted(self.without), *map(str, sorted(self.skip))]
        return (
            f"{self._numbers()} faults={', '.join(self.faults) or 'none'}"
            f"{''.join(f', {option}' for option in self._options())}"
            f"{' without ' + ', '.join(off) if off else ''}"
        )

    def _options(self) -> list[str]:
        ways = ("password", "announce", "delayed", "old_readers", "over_budget", "tight", "churn")
        several = f"directories {self.journals}+{self.directories}"
        return [
            *(name.replace("_", " ") for name in ways if getattr(self, name)),
            *([several] if (self.journals, self.directories) != (1, 1) else []),
            *([f"large {self.large}"] if self.large else []),
            *([f"places {self.places}"] if self.places else []),
            *self.also,
            *(name for name in ("operators", "lasting") if getattr(self, name)),
            *([f"racks {self.racks}"] if self.racks else []),
            *(["own policy"] if self.own_policy else []),
            *(["page cache"] if self.page_cache else []),
            *(["healing"] if self.healing else []),
            *(["brokers"] if self.brokers else []),
            *(["ledgers"] if self.ledgers else []),
        ]

    def _numbers(self) -> str:
        e, qw, qa = self.quorum
        return (
            f"E={e} Qw={qw} Qa={qa} bookies={self.bookies} writers={self.writers}x{self.streams}"
            f" recoverers={self.recoverers} tailers={self.tailers} topics={self.topics}"
            f" chaos={self.chaos_s:.1f}s adds={self.add_timeout_s:.0f}s"
        )


def draw(rng: random.Random, classes: Sequence[str]) -> Plan:
    """The plan of a run whose faults are of these classes."""
    quorum = rng.choice(QUORUMS)
    share = rng.choice((0.0, 0.15, 0.3, 0.3, 0.5, 0.5, 0.8))
    of_each = f"{rng.random()}"
    on = [name for name in classes if _beside(of_each, name) < share]
    over_budget = rng.random() < 0.1
    topics = rng.random() < 0.3 and not over_budget
    if over_budget:
        on += [name for name in DISK_LOSSES if name not in on]
    plan = Plan(
        quorum=quorum,
        bookies=quorum[0] + rng.choice((0, 0, 1, 1, 2)),
        faults=tuple(on),
        chaos_s=rng.uniform(6, 18),
        between_s=rng.uniform(0.3, 2.6),
        writers=rng.choice((0, 1, 1) if topics else (1, 1, 2)),
        recoverers=rng.choice((0, 1, 1, 2, 3)),
        tailers=rng.choice((0, 0, 1)),
        topics=topics,
        streams=1 if topics else rng.choice((1, 1, 2)),
        password=rng.random() < 0.4,
        announce=rng.random() < 0.4,
        delayed=rng.random() < 0.3,
        old_readers=rng.random() < 0.3,
        over_budget=over_budget,
        add_timeout_s=rng.choice((30.0, 30.0, 60.0)),
        journals=rng.choice((1, 1, 2)),
        directories=rng.choice((1, 1, 1, 2, 3)),
        tight=rng.random() < 0.35,
        large=rng.choice(LARGE),  # drawn late, as what follows: older seeds draw what they drew
        churn=topics and rng.random() < 0.2,
        also=(
            *(name for name, share in ALSO.items() if topics and rng.random() < share),
            *(name for name, share in REWINDS.items() if topics and _beside(of_each, name) < share),
        ),
        places=rng.choice(PLACES),
        operators=rng.random() < OPERATORS,
        lasting=rng.random() < LASTING and not over_budget,
    )
    late = [name for name, share in LATE_ALSO.items() if rng.random() < share and topics]
    plan = replace(
        plan,
        also=(*plan.also, *late),
        racks=rng.choice(RACKS),
        own_policy=rng.random() < OWN_POLICY,
        page_cache=rng.random() < PAGE_CACHE and not over_budget,
        brokers=topics and _beside(of_each, "brokers") < BROKERS,
    )
    chunks = [name for name, share in CHUNKS.items() if _beside(of_each, name) < share]
    if plan.brokers:
        plan = replace(plan, also=(*plan.also, *chunks))
    heals = _beside(of_each, "healing") < HEALING and not over_budget
    return healed(plan, alone=_beside(of_each, "losses alone") < ALONE) if heals else plan


def of_ledgers(plan: Plan, rng: random.Random) -> Plan:
    """The plan with ledgers alone: short ones, on few disks; in half of them bookies are lost one
    after another, and copies are made elsewhere."""
    quorum = rng.choice(QUORUMS_OF_LEDGERS)
    share = rng.choice((0.0, 0.0, 0.1, 0.3))
    alone = Plan(
        quorum=quorum,
        bookies=quorum[0] + rng.choice((0, 1, 1, 2)),
        faults=tuple(name for name in FAULTS_OF_LEDGERS if rng.random() < share),
        chaos_s=rng.uniform(3, 8),
        between_s=rng.uniform(0.3, 2.0),
        writers=rng.choice((1, 2, 2)),
        recoverers=rng.choice((1, 1, 2)),
        tailers=0,
        topics=False,
        entries=(1, rng.choice((4, 8, 12))),
        streams=rng.choice((1, 2)),
        delayed=plan.delayed,
        add_timeout_s=8.0,
        ledgers=True,
    )
    if rng.random() < 0.5:
        return alone
    return replace(healed(alone, alone=True), chaos_s=1.5 * alone.chaos_s)


def within_budget(plan: Plan) -> Plan:
    """The plan, brought back within the budget of losses if it has what no run over budget has."""
    is_over = plan.over_budget and any(getattr(plan, name) for name in WITHIN_BUDGET)
    return replace(plan, over_budget=False) if is_over else plan


def healed(plan: Plan, *, alone: bool) -> Plan:
    """The plan with bookies lost for good, at least one at once, so many there that one can be
    spared, and time. (With racks "hard" one that is lost and the next one at its address have the
    same rack.)"""
    spared = 1 + plan.own_policy + (plan.racks == "hard")
    size, write_quorum, ack_quorum = plan.quorum
    return replace(
        plan,
        healing=True,
        quorum=(size, write_quorum, max(ack_quorum, min(2, write_quorum))),
        faults=tuple(name for name in plan.faults if not (alone and name in HARM)),
        page_cache=plan.page_cache and not alone,
        bookies=max(plan.bookies, plan.quorum[0] + spared),
        chaos_s=2.5 * plan.chaos_s,
        lasting=False,
    )


def _beside(of_each: str, name: str) -> float:
    """Drawn for that name alone: whatever else is drawn, it is the same."""
    return random.Random(f"{of_each} {name}").random()
