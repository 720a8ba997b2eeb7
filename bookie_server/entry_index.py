"""The entry index as the storage engine sees it: where each entry lies, and each ledger's state.

Always true of an implementation: what `put` and `put_ledgers` were given is durable when they
return; a later put of the same key replaces the earlier one; any failure is DiskFailed.
docs/formats.md pictures the keys.
"""

import json
import struct
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

from bookie_server.api.entry import NO_ENTRY
from spark_ledger.metadata.ledger_record import Verifiers, shallow

EVERY_LEDGER = -1  # a state with this id speaks of all ledgers this bookie may have served


class Location(NamedTuple):
    """Entry `entry_id` of `ledger_id`: a record that starts at byte `position` of entry log
    `log_id` and carries `entry_bytes` bytes of entry (header and payload)."""

    ledger_id: int
    entry_id: int
    log_id: int
    position: int
    entry_bytes: int


@dataclass(frozen=True, slots=True)
class LedgerState:
    """What a bookie knows of a ledger besides its entries, and must not forget.

    fenced: normal adds are refused, for ever. explicit_lac: highest LAC written by WriteLac.
    limbo: entries may have been lost here, so its negatives are unknown. deleted: a tombstone.
    met: the verifiers were read from the metadata (not so only when the journal was damaged).
    """

    ledger_id: int
    verifiers: Verifiers | None = None
    durability: str = "synced"
    fenced: bool = False
    explicit_lac: int = NO_ENTRY
    limbo: bool = False
    deleted: bool = False
    met: bool = True


class BadIndexRecord(ValueError):
    """Bytes that are no record of the index."""


ENTRY_PREFIX, LEDGER_PREFIX = b"e", b"l"
_ENTRY_KEY = struct.Struct(">cqq")
_LEDGER_KEY = struct.Struct(">cq")
_ENTRY_VALUE = struct.Struct("<QQI")


def entry_key(ledger_id: int, entry_id: int) -> bytes:
    """17 bytes, big-endian, so that keys sort by (ledger, entry); neither is ever negative."""
    return _ENTRY_KEY.pack(ENTRY_PREFIX, ledger_id, entry_id)


def ledger_key(ledger_id: int) -> bytes:
    """9 bytes; the key of EVERY_LEDGER sorts last."""
    return _LEDGER_KEY.pack(LEDGER_PREFIX, ledger_id)


def encode_location(location: Location) -> bytes:
    """The 20 bytes under `entry_key`: log id, position, entry bytes."""
    return _ENTRY_VALUE.pack(location.log_id, location.position, location.entry_bytes)


def decode_location(key: bytes, value: bytes) -> Location:
    """Raises BadIndexRecord when key or value have another size."""
    try:
        return Location(*_ENTRY_KEY.unpack(key)[1:], *_ENTRY_VALUE.unpack(value))
    except struct.error as error:
        raise BadIndexRecord(f"not an entry's location: {error}") from error


def encode_ledger_state(state: LedgerState) -> bytes:
    """JSON with sorted keys; also the body of the journal's ledger record."""
    plain = shallow(state)
    plain["verifiers"] = None if state.verifiers is None else shallow(state.verifiers)
    return json.dumps(plain, sort_keys=True, separators=(",", ":")).encode()


def decode_ledger_state(value: bytes) -> LedgerState:
    """Raises BadIndexRecord when the bytes are no ledger state."""
    try:
        plain: dict[str, Any] = json.loads(value)
        if plain["verifiers"] is not None:
            plain["verifiers"] = Verifiers(**plain["verifiers"])
        return LedgerState(**plain)
    except (KeyError, TypeError, ValueError) as error:
        raise BadIndexRecord(f"not a ledger state: {error}") from error


class EntryIndex(Protocol):
    """(ledger, entry) to location, and ledger id to state. All raise DiskFailed."""

    async def put(self, locations: Sequence[Location]) -> None:
        """Durable when it returns. An entry put again lies at the new place."""

    async def get(self, ledger_id: int, entry_id: int) -> Location | None: ...

    async def range(
        self, ledger_id: int, first_entry: int, last_entry: int, max_bytes: int
    ) -> list[Location]:
        """Locations of the entries that exist between first and last, both included, ascending.

        Ends early after the location whose entry brings their sum to `max_bytes` or more.
        """

    async def last(self, ledger_id: int) -> int | None:
        """The highest entry id of the ledger."""

    async def put_ledgers(self, states: Sequence[LedgerState]) -> None:
        """Durable when it returns."""

    async def ledgers(self) -> list[LedgerState]:
        """Every ledger state, by ledger id."""

    async def close(self) -> None: ...
