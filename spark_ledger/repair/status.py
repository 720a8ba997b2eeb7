"""The status of a cluster's autorecovery, and the calls with which an operator changes it.

Always true: the auditor writes its latest findings into its ephemeral node, so the findings go when
the auditor's session ends. A wrong setting is refused before any write.
"""

import json
from collections import Counter
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass, field, fields, replace
from typing import Any

from spark_ledger import errors
from spark_ledger.errors import BadConfig
from spark_ledger.metadata import autorecovery, paths
from spark_ledger.metadata.autorecovery import (
    AutorecoverySettings,
    BadAutorecoverySettings,
    DamagedSettings,
)
from spark_ledger.metadata.cluster import hold_reason
from spark_ledger.metadata.store import BadVersion, MetadataStore, NoNode, OutcomeUnknown
from spark_ledger.metadata.store_calls import call_each, names_in, unavailable_while
from spark_ledger.repair import work_list
from spark_ledger.repair.auditor import alarm
from spark_ledger.repair.work_list import ListedLedger
from spark_ledger.repair.worker import bookies

READS_AT_ONCE = 64
DELAY_MIN_S = 1.0
SETTABLE: Mapping[str, type] = {"lost_bookie_delay_s": float, "repair_bytes_per_s": int}


@dataclass(frozen=True, slots=True)
class Findings:
    """The latest findings of the auditor, process `pid` of `host`. `absent`: bookies that are not
    registered, each with the time when the auditor first missed it (ms). `too_many`: bookies that
    would be lost, but are over a third of all. `unlisted`: how many ledgers have copies there."""

    host: str = ""
    pid: int = 0
    absent: Mapping[str, int] = field(default_factory=dict)
    lost: tuple[str, ...] = ()
    too_many: tuple[str, ...] = ()
    unlisted: int = 0


async def publish(store: MetadataStore, findings: Findings) -> None:
    """Write the findings into the auditor's node; only the auditor calls this. Raises
    Unavailable."""
    value = json.dumps(asdict(findings), sort_keys=True).encode()
    with (
        unavailable_while("publishing the auditor's findings"),
        suppress(NoNode, BadVersion, OutcomeUnknown),
    ):
        node = await store.get(paths.AUDITOR)
        if node.owner == store.session_id and node.value != value:
            await store.set(paths.AUDITOR, value, node.version)


async def _findings(store: MetadataStore) -> Findings | None:
    """The published findings; None: no process is the auditor. Raises StoreError."""
    try:
        value = (await store.get(paths.AUDITOR)).value
    except NoNode:
        return None
    try:
        published: dict[str, Any] = json.loads(value)
        findings = Findings(**{field.name: published[field.name] for field in fields(Findings)})
        return replace(findings, lost=tuple(findings.lost), too_many=tuple(findings.too_many))
    except errors.MALFORMED:
        return Findings(host="elected just now")  # the status shows this text as the auditor


@dataclass(frozen=True, slots=True)
class AutorecoveryStatus:
    """`accepted`: bookies that an operator let count as lost (`enable` with `force`). `auditor`:
    "host:pid" of its process, or "". `lost`, `down`: bookies that are not registered, each with the
    time when the auditor first missed it (ms). Only copies of `lost` bookies are made on other
    bookies. `under_replicated`: how many listed ledgers lack copies, or will lose some. `blocked`:
    how many ledgers a worker could not repair. `damaged`: how many ledgers lack entries that no
    bookie supplies. `unlisted`: as in Findings. `alarm`: what the operator must read now, or "".
    `held`: why the metadata store is held, which stops repair, or ""."""

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


async def status(store: MetadataStore) -> AutorecoveryStatus:
    """The present state. Raises Unavailable, BadConfig for settings that are damaged."""
    works = await underreplicated(store)
    with unavailable_while("reading the status of autorecovery"):
        await store.sync(paths.AUTORECOVERY)
        try:
            settings = await autorecovery.read_settings(store)
        except BadAutorecoverySettings as damage:
            raise _damaged(damage) from damage
        published = await _findings(store)
        draining = await autorecovery.draining_bookies(store)
        held = await hold_reason(store)
    reasons = Counter(why for work in works for why in {cause.why.value for cause in work.reasons})
    findings = published or Findings()
    absent_too_long = {*findings.lost, *findings.too_many}
    return AutorecoveryStatus(
        **asdict(settings),
        auditor=f"{findings.host}:{findings.pid}" if findings.pid else findings.host,
        lost={id_: ms for id_, ms in findings.absent.items() if id_ in absent_too_long},
        down={id_: ms for id_, ms in findings.absent.items() if id_ not in absent_too_long},
        draining=tuple(sorted(draining)),
        under_replicated=sum(map(work_list.lacks_copies, works)),
        by_reason=dict(sorted(reasons.items())),
        blocked=sum(bool(work.blocked) for work in works),
        damaged=sum(bool(work.damaged) for work in works),
        unlisted=findings.unlisted if settings.enabled else 0,
        alarm=alarm(findings.too_many) if settings.enabled else "",
        held=held,
    )


async def underreplicated(store: MetadataStore) -> list[ListedLedger]:
    """Every ledger on the list, by id. Raises Unavailable."""
    ledger_ids = await work_list.listed_ledgers(store)
    with unavailable_while("reading the list of under-replicated ledgers"):
        works = await call_each(
            lambda number: work_list.find(store, number), ledger_ids, READS_AT_ONCE
        )
    return [work for work in works if work is not None]


async def enable(store: MetadataStore, *, force: bool = False) -> AutorecoverySettings:
    """Enable repair. With `force` the bookies that are not registered now count as lost, even if
    they are more than a third of all. Durable on return. Raises Unavailable, BadConfig."""
    if not force:
        return await change_settings(store, enabled=True)
    with unavailable_while("asking which bookies are registered"):
        registered = (await bookies(store)).registered
        seen = await names_in(store, paths.BOOKIES_KNOWN)
    accepted = tuple(sorted(bookie for bookie in seen if bookie not in registered))
    return await change_settings(store, enabled=True, accepted=accepted)


async def change_settings(store: MetadataStore, **changes: Any) -> AutorecoverySettings:
    """Change the given settings. Durable on return. Raises Unavailable; BadConfig, without any
    change."""
    for name in SETTABLE.keys() & changes.keys():
        changes[name] = _number(name, changes[name])
    unknown = sorted(changes.keys() - {*SETTABLE, "enabled", "accepted"})
    if unknown:
        raise BadConfig(
            f"autorecovery has no setting '{unknown[0]}'", f"It has {' and '.join(SETTABLE)}."
        )
    with unavailable_while("changing the settings of autorecovery"):
        try:
            return await autorecovery.change_settings(store, **changes)
        except DamagedSettings as wrong:
            raise _damaged(wrong) from wrong
        except BadAutorecoverySettings as wrong:
            raise BadConfig(
                str(wrong), "A delay is above 0 seconds and a year at most; a rate is 0 or above."
            ) from wrong


def _number(name: str, value: object) -> float | int:
    """Raises BadConfig if the value is not a number of the setting's type."""
    try:
        number = SETTABLE[name](value)
        if isinstance(value, bool) or number != float(value):  # type: ignore[arg-type]
            raise ValueError
    except errors.MALFORMED:
        kind = "a whole number" if SETTABLE[name] is int else "a number"
        raise BadConfig(f"{name} = {value!r} is not {kind}", f"Give {name}=NUMBER.") from None
    if name == "lost_bookie_delay_s" and 0 < number < DELAY_MIN_S:
        raise BadConfig(
            f"lost_bookie_delay_s = {number} is shorter than the restart of a bookie",
            "The default is 600; in a test, 5 may be enough.",
        )
    return number  # type: ignore[no-any-return]


def _damaged(damage: BadAutorecoverySettings) -> BadConfig:
    return BadConfig(
        f"the settings of autorecovery cannot be read: {damage}",
        f"Delete the node {paths.AUTORECOVERY} below the cluster's root in ZooKeeper, and give the"
        " settings again.",
    )
