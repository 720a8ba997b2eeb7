"""How a cluster repairs itself: settings that all of its processes share and that an operator
changes while they run, the bookies that are being drained (their copies are moved to others), and
the credential of repair.

Always true: a setting without a value has its default; a setting that a later version wrote is
kept; the credential is made once. Every client that can read the metadata store can read the
credential. It lets repair read, fence and write back copies of every ledger, also of a ledger with
a password, but not add a new entry.
"""

import json
from contextlib import suppress
from dataclasses import asdict, dataclass, fields, replace
from typing import Any

from spark_ledger import errors
from spark_ledger.metadata import paths
from spark_ledger.metadata.ledger_record import Tokens
from spark_ledger.metadata.store import BadVersion, MetadataStore, NodeExists, StoreUnavailable
from spark_ledger.metadata.store_calls import TRIES_MAX, ensure, names_in, read


@dataclass(frozen=True, slots=True)
class AutorecoverySettings:
    """`enabled`: ledgers are repaired. A bookie counts as lost when it was not registered for
    `lost_bookie_delay_s`; a worker copies `repair_bytes_per_s` at most (0: no limit).
    `accepted`: bookies that may count as lost even if more than a third of all bookies do."""

    enabled: bool = True
    lost_bookie_delay_s: float = 600.0
    repair_bytes_per_s: int = 32 << 20
    accepted: tuple[str, ...] = ()


class BadAutorecoverySettings(ValueError):
    """A wrong value of a setting."""


class DamagedSettings(BadAutorecoverySettings):
    """The stored settings are malformed."""


def check_settings(settings: AutorecoverySettings) -> AutorecoverySettings:
    """Returns the settings. Raises BadAutorecoverySettings for a wrong value."""
    if not 0 < settings.lost_bookie_delay_s <= 366 * 86_400:
        raise BadAutorecoverySettings(
            f"lost_bookie_delay_s = {settings.lost_bookie_delay_s} is not between 0 and a year"
        )
    if settings.repair_bytes_per_s < 0:
        raise BadAutorecoverySettings(
            f"repair_bytes_per_s = {settings.repair_bytes_per_s} is below 0"
        )
    return settings


def decode(value: bytes) -> AutorecoverySettings:
    """Raises DamagedSettings."""
    try:
        plain: dict[str, Any] = json.loads(value)
        names = {field.name for field in fields(AutorecoverySettings)}
        given = {name: plain[name] for name in names & plain.keys()}
        given["accepted"] = tuple(given.get("accepted", ()))
        return check_settings(AutorecoverySettings(**given))
    except errors.MALFORMED as error:
        raise DamagedSettings(f"{paths.AUTORECOVERY} is damaged: {error}") from error


async def read_settings(store: MetadataStore) -> AutorecoverySettings:
    """The settings as this session sees them. Raises StoreError, BadAutorecoverySettings."""
    node = await read(store, paths.AUTORECOVERY)
    return AutorecoverySettings() if node is None else decode(node.value)


async def change_settings(store: MetadataStore, **changes: Any) -> AutorecoverySettings:
    """Change these settings only. Returns all settings; they are durable on return. Raises
    BadAutorecoverySettings, StoreError; after OutcomeUnknown they may be set."""
    for _ in range(TRIES_MAX):
        await store.sync(paths.AUTORECOVERY)
        node = await read(store, paths.AUTORECOVERY)
        before = b"{}" if node is None else node.value
        settings = check_settings(replace(decode(before), **changes))
        value = json.dumps({**json.loads(before), **asdict(settings)}, sort_keys=True).encode()
        with suppress(NodeExists, BadVersion):
            if node is None:
                await store.create(paths.AUTORECOVERY, value, parents=True)
            else:
                await store.set(paths.AUTORECOVERY, value, node.version)
            return settings
    raise StoreUnavailable("the settings of autorecovery change all the time")


async def repair_credential(store: MetadataStore, new: str) -> str:
    """The cluster's credential; the random text `new` becomes the credential of a cluster without
    one. Raises StoreError."""
    await ensure(store, paths.REPAIR_CREDENTIAL, new.encode())
    await store.sync(paths.REPAIR_CREDENTIAL)
    return (await store.get(paths.REPAIR_CREDENTIAL)).value.decode()


def repair_tokens(credential: str) -> Tokens:
    """The tokens that repair sends with its requests."""
    return Tokens(credential.encode(), b"", credential.encode(), repair=True)


async def draining_bookies(store: MetadataStore) -> list[str]:
    """The bookies that are being drained of their copies. Raises StoreError."""
    return await names_in(store, paths.BOOKIES_DRAINING)
