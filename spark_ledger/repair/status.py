"""How a cluster's self-healing stands, and the verbs that an operator changes it with.

Always true: what the auditor found last is in the value of its ephemeral node, so it is never
older than its session; a wrong setting is refused before anything is written.
"""

import json
from collections import Counter
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass, field, fields, replace
from typing import Any

from spark_ledger.errors import BadConfig
from spark_ledger.metadata import autorecovery, paths
from spark_ledger.metadata.autorecovery import BadSettings, DamagedSettings, Settings
from spark_ledger.metadata.cluster import why_held
from spark_ledger.metadata.store import BadVersion, MetadataStore, NoNode, OutcomeUnknown
from spark_ledger.metadata.store_calls import each, names_in, reachable
from spark_ledger.repair import work_list
from spark_ledger.repair.auditor import alarm
from spark_ledger.repair.work_list import Work
from spark_ledger.repair.worker import bookies

READS_AT_ONCE = 64
DELAY_MIN_S = 1.0
SETTABLE: Mapping[str, type] = {"lost_bookie_delay_s": float, "repair_bytes_per_s": int}


@dataclass(frozen=True, slots=True)
class Found:
    """What the auditor, process `pid` of `host`, found last. `absent`: the bookies that are not
    registered, and since when by its clock, in ms; `lost`, `too_many`: as auditor.Judgement;
    `unlisted`: of so many ledgers the latter keep copies."""

    host: str = ""
    pid: int = 0
    absent: Mapping[str, int] = field(default_factory=dict)
    lost: tuple[str, ...] = ()
    too_many: tuple[str, ...] = ()
    unlisted: int = 0


async def publish(store: MetadataStore, found: Found) -> None:
    """Called by the auditor alone. Raises Unavailable."""
    value = json.dumps(asdict(found), sort_keys=True).encode()
    with reachable("saying what the auditor found"), suppress(NoNode, BadVersion, OutcomeUnknown):
        node = await store.get(paths.AUDITOR)
        if node.owner == store.session_id and node.value != value:
            await store.set(paths.AUDITOR, value, node.version)


async def _found(store: MetadataStore) -> Found | None:
    """None: nobody is the auditor. Raises StoreError."""
    try:
        value = (await store.get(paths.AUDITOR)).value
    except NoNode:
        return None
    try:
        plain: dict[str, Any] = json.loads(value)
        found = Found(**{one.name: plain[one.name] for one in fields(Found)})
        return replace(found, lost=tuple(found.lost), too_many=tuple(found.too_many))
    except (KeyError, TypeError, ValueError):
        return Found("elected just now")


@dataclass(frozen=True, slots=True)
class Status:
    """`auditor`: "host:pid" of its process, empty if there is none. `lost`, `down`: id of a
    bookie, and since when it is not registered, in ms; `lost` are those whose copies are to be made
    elsewhere, `down` the others. `under_replicated`: ledgers on the list that lack copies, or are
    to lose some; `by_reason`: how many ledgers are listed for each reason; `blocked` are stuck for
    now, and `damaged` lack entries that no bookie supplies. `unlisted`: ledgers that bookies keep
    copies of that are gone, and so many are that they do not count as lost. `held`: why the
    metadata store is held, which stops repair, empty where it is not."""

    enabled: bool
    lost_bookie_delay_s: float
    repair_bytes_per_s: int
    accepted: tuple[str, ...]
    auditor: str
    lost: Mapping[str, int]
    down: Mapping[str, int]
    draining: tuple[str, ...]
    under_replicated: int
    by_reason: Mapping[str, int]
    blocked: int
    damaged: int
    unlisted: int
    alarm: str
    held: str


async def status(store: MetadataStore) -> Status:
    """As it is now. Raises Unavailable, BadConfig for settings that are damaged."""
    works = await underreplicated(store)
    with reachable("asking how autorecovery stands"):
        await store.sync(paths.AUTORECOVERY)
        try:
            settings = await autorecovery.read_settings(store)
        except BadSettings as damage:
            raise _damaged(damage) from damage
        found = await _found(store)
        draining = await autorecovery.draining(store)
        held = await why_held(store)
    reasons = Counter(why for work in works for why in {reason.why for reason in work.reasons})
    known = found or Found()
    gone = {*known.lost, *known.too_many}
    return Status(
        **asdict(settings),
        auditor=f"{known.host}:{known.pid}" if known.pid else known.host,
        lost={one: since for one, since in known.absent.items() if one in gone},
        down={one: since for one, since in known.absent.items() if one not in gone},
        draining=tuple(sorted(draining)),
        under_replicated=sum(map(work_list.lacks, works)),
        by_reason=dict(sorted(reasons.items())),
        blocked=sum(bool(work.blocked) for work in works),
        damaged=sum(bool(work.damaged) for work in works),
        unlisted=known.unlisted if settings.enabled else 0,
        alarm=alarm(known.too_many) if settings.enabled else "",
        held=held,
    )


async def underreplicated(store: MetadataStore) -> list[Work]:
    """Every ledger on the list, by id. Raises Unavailable."""
    ledger_ids = await work_list.listed(store)
    with reachable("reading what is under-replicated"):
        found = await each(lambda one: work_list.find(store, one), ledger_ids, READS_AT_ONCE)
    return [work for work in found if work is not None]


async def enable(store: MetadataStore, *, force: bool = False) -> Settings:
    """Repair from now on. `force`: the bookies that are gone now count as lost, even if they are
    more than a third. Durable on return. Raises Unavailable, BadConfig."""
    if not force:
        return await change(store, enabled=True)
    with reachable("asking which bookies are gone"):
        registered = (await bookies(store)).registered
        known = await names_in(store, paths.BOOKIES_KNOWN)
    accepted = tuple(sorted(one for one in known if one not in registered))
    return await change(store, enabled=True, accepted=accepted)


async def change(store: MetadataStore, **changes: Any) -> Settings:
    """Set these, and leave the others. Durable on return. Raises Unavailable; BadConfig: nothing
    was written."""
    for name in SETTABLE.keys() & changes.keys():
        changes[name] = _number(name, changes[name])
    unknown = sorted(changes.keys() - {*SETTABLE, "enabled", "accepted"})
    if unknown:
        raise BadConfig(
            f"autorecovery has no setting '{unknown[0]}'", f"It has {' and '.join(SETTABLE)}."
        )
    with reachable("changing the settings of autorecovery"):
        try:
            return await autorecovery.change_settings(store, **changes)
        except DamagedSettings as wrong:
            raise _damaged(wrong) from wrong
        except BadSettings as wrong:
            raise BadConfig(
                str(wrong), "A delay is above 0 seconds and a year at most; a rate is 0 or above."
            ) from wrong


def _number(name: str, value: object) -> float | int:
    """Raises BadConfig for what is none."""
    try:
        number = SETTABLE[name](value)
        if isinstance(value, bool) or number != float(value):  # type: ignore[arg-type]
            raise ValueError
    except (TypeError, ValueError, OverflowError):
        kind = "a whole number" if SETTABLE[name] is int else "a number"
        raise BadConfig(f"{name} = {value!r} is not {kind}", f"Give {name}=NUMBER.") from None
    if name == "lost_bookie_delay_s" and 0 < number < DELAY_MIN_S:
        raise BadConfig(
            f"lost_bookie_delay_s = {number} is shorter than the restart of a bookie",
            "Its default is 600; a test may do with 5.",
        )
    return number  # type: ignore[no-any-return]


def _damaged(damage: BadSettings) -> BadConfig:
    return BadConfig(
        f"the settings of autorecovery cannot be read: {damage}",
        f"Delete the node {paths.AUTORECOVERY} below the cluster's root in ZooKeeper, and set them"
        " again.",
    )
