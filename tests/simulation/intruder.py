"""Somebody without the right password, who tries every door of a ledger that has one.

Always true: nothing it is answered is OK, and no entry is read; what it does to the ledger's record
(anybody may move it to IN_RECOVERY) loses nothing.
"""

import random
from collections.abc import Awaitable, Callable

from bookie_server.api.entry import NO_ENTRY, EntryHeader, pack_header, payload_crc
from bookie_server.api.messages import Add
from bookie_server.api.status import Status
from spark_ledger.errors import LedgerError
from spark_ledger.ledger import transitions
from spark_ledger.ledger.recovery import Recovery
from spark_ledger.metadata.ledger_record import LedgerRecord, derive
from tests.simulation.invariants import Violation
from tests.simulation.promises import PASSWORD
from tests.simulation.world import Client

WRONG = b"another"
BEYOND = 10**6
FAKE = b"never appended"


async def intrude(client: Client, record: LedgerRecord, rng: random.Random) -> None:
    """Try one of the doors. Raises Violation when it opens."""
    client.world.ghost.meet("intruder")
    await rng.choice(_DOORS)(client, record, rng)


async def _open(client: Client, record: LedgerRecord, rng: random.Random) -> None:
    """Open, with recovery or without, and read."""
    password, take_over = rng.choice((WRONG, b"")), rng.random() < 0.5
    try:
        reader = await client.ledgers.open(record.ledger_id, recover=take_over, password=password)
        last = reader.last_add_confirmed
        async for entry_id, _ in reader.read(0, max(0, last), known_confirmed=max(0, last)):
            raise Violation("tokens", f"{record.ledger_id}:{entry_id} read without the password")
    except LedgerError as error:
        client.world.trace.note(client.name, f"kept out: {error}")


async def _add(client: Client, record: LedgerRecord, rng: random.Random) -> None:
    """Add an entry of its own making, as a writer or as a recoverer."""
    recovery = rng.random() < 0.5
    token = _wrong_token(rng, derive(PASSWORD).add if recovery else derive(PASSWORD).read)
    entry_id = rng.choice((record.last_fragment.first_entry, BEYOND))
    bookie = _member(record, entry_id, rng)
    result = await client.bookies.add(
        bookie, Add(_fake(record.ledger_id, entry_id), recovery, token)
    )
    _require_refused(result.status, f"an add of {record.ledger_id}:{entry_id}")


async def _fence(client: Client, record: LedgerRecord, rng: random.Random) -> None:
    bookie = rng.choice(record.last_fragment.ensemble)
    token = _wrong_token(rng, derive(PASSWORD).add)
    answer = await client.bookies.read_lac(bookie, record.ledger_id, fence=True, token=token)
    _require_refused(answer.status, f"a fence of ledger {record.ledger_id}")


async def _announce(client: Client, record: LedgerRecord, rng: random.Random) -> None:
    bookie = _member(record, BEYOND, rng)
    token = _wrong_token(rng, derive(PASSWORD).read)
    answer = await client.bookies.write_lac(bookie, record.ledger_id, BEYOND, token=token)
    _require_refused(answer.status, f"a last add confirmed of ledger {record.ledger_id}")


async def forge(
    client: Client, bookie_id: str, ledger_id: int, entry_id: int, password: bytes
) -> None:
    """Somebody who has the password: another entry under an id that the bookie has."""
    fake = _fake(ledger_id, entry_id)
    await client.bookies.add(bookie_id, Add(fake, False, derive(password).add))


async def _take_over(client: Client, record: LedgerRecord, rng: random.Random) -> None:
    """Recover without asking oneself for the password first, as an honest client does."""
    cluster, tokens = client.ledgers.cluster, derive(WRONG)
    try:
        known = await cluster.records.read(record.ledger_id, fresh=True)
        known = await cluster.records.move(known, transitions.mark_in_recovery)
        if known.record.closed:
            return
        recovery = Recovery(cluster, known, tokens)
        try:
            await recovery.run()
        finally:
            await recovery.stop()
    except LedgerError as error:
        client.world.trace.note(client.name, f"kept out: {error}")
    else:
        raise Violation("tokens", f"ledger {record.ledger_id} was recovered with a wrong token")


def _fake(ledger_id: int, entry_id: int) -> list[bytes]:
    header = EntryHeader(
        *(ledger_id, entry_id, NO_ENTRY, len(FAKE), 1, len(FAKE)), payload_crc([FAKE])
    )
    return [pack_header(header), FAKE]


def _wrong_token(rng: random.Random, too_weak: bytes) -> bytes:
    """One of another password, none, or one that is good for less only."""
    return rng.choice((derive(WRONG).recover, b"", too_weak))


def _member(record: LedgerRecord, entry_id: int, rng: random.Random) -> str:
    """One of the last fragment's write set of the entry."""
    slot = entry_id + rng.randrange(record.write_quorum)
    return record.last_fragment.ensemble[slot % record.ensemble_size]


def _require_refused(status: Status, what: str) -> None:
    if status is Status.OK:
        raise Violation("tokens", f"{what} was accepted with a wrong token")


_DOORS: tuple[Callable[[Client, LedgerRecord, random.Random], Awaitable[None]], ...] = (
    _open,
    _take_over,
    _add,
    _fence,
    _announce,
)
