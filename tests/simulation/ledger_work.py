"""What clients do with ledgers in a run: write, recover, tail, read, delete.

Always true: an actor meets errors of spark_ledger.errors only; any other exception fails the run.
Payloads are drawn from the actor's generator and known to the ghost by their append.
"""

import asyncio
import random
from typing import Any

from bookie_server.api.entry import NO_ENTRY
from spark_ledger.errors import LedgerError, NoSuchEntry, NoSuchLedger
from tests.simulation import invariants
from tests.simulation.chaos import Plan
from tests.simulation.invariants import Violation
from tests.simulation.world import Client, World


class LedgerWork:
    """The actors of one run that use ledgers directly."""

    def __init__(self, world: World, plan: Plan) -> None:
        self.world = world
        self.plan = plan
        self.made: list[int] = []

    # -- writing ---------------------------------------------------------------------------------

    async def write(self, client: Client) -> None:
        """Ledgers one after the other, until the chaos' time is over."""
        end = self.world.loop.time() + self.plan.chaos_s
        while self.world.loop.time() < end:
            try:
                writer = await client.ledgers.create(*self.plan.quorum)
            except LedgerError as error:
                self.met(client, "create", error)
                await asyncio.sleep(client.rng.uniform(0.1, 2))
                continue
            self.made.append(writer.ledger_id)
            await self.append(client, writer)
            await asyncio.sleep(client.rng.uniform(0, 3))

    async def append(self, client: Client, writer: Any) -> None:
        """A number of entries in bursts, then close it, or leave it as it is."""
        rng = client.rng
        appended: list[asyncio.Future[int]] = []
        calm = rng.choice((0.2, 0.6, 0.95))
        for _ in range(rng.randint(*self.plan.entries)):
            await writer.room()
            appended.append(writer.append(draw_payload(rng), rows=rng.randrange(4)))
            if rng.random() < calm:
                await asyncio.sleep(rng.expovariate(4))
            if writer.failure is not None:
                break
        if rng.random() < 0.7:
            await asyncio.gather(*appended, return_exceptions=True)
        if rng.random() < 0.7:
            await self.close(client, writer)
        for outcome in await asyncio.gather(*appended, return_exceptions=True):
            if isinstance(outcome, LedgerError):
                self.met(client, "append", outcome)
            elif isinstance(outcome, BaseException):
                raise Violation("only known errors", f"an append ended in {outcome!r}")

    async def close(self, client: Client, writer: Any) -> None:
        try:
            record = await writer.close()
        except LedgerError as error:
            self.met(client, "close", error)
            return
        if not record.closed:
            raise Violation("3", f"close of ledger {writer.ledger_id} returned {record.state}")
        ledger = self.world.ghost.ledgers[writer.ledger_id]
        if not ledger.deleted:
            invariants.all_opens_end_at_the_same_entry(self.world.ghost, ledger, record.last_entry)

    # -- recovering and reading ------------------------------------------------------------------

    async def recover(self, client: Client) -> None:
        """Take over whatever ledger is there, now and then; sometimes delete it afterwards."""
        end = self.world.loop.time() + self.plan.chaos_s
        while self.world.loop.time() < end:
            await asyncio.sleep(client.rng.uniform(0.2, 6))
            if self.made:
                ledger_id = client.rng.choice(self.made)
                await self.recover_one(client, ledger_id)
                if client.rng.random() < 0.1:
                    await self.delete(client, ledger_id)

    async def recover_one(self, client: Client, ledger_id: int) -> None:
        try:
            reader = await client.ledgers.open(ledger_id, recover=True)
        except LedgerError as error:
            self.met(client, "recover", error)
            return
        ghost = self.world.ghost
        ledger = ghost.ledgers[ledger_id]
        invariants.all_opens_end_at_the_same_entry(ghost, ledger, reader.last_add_confirmed)
        await self.read(client, reader, 0, reader.last_add_confirmed)

    async def tail(self, client: Client) -> None:
        """Follow a ledger that is written, reading what is confirmed."""
        end = self.world.loop.time() + self.plan.chaos_s
        while self.world.loop.time() < end:
            await asyncio.sleep(client.rng.uniform(0.1, 2))
            if not self.made:
                continue
            try:
                reader = await client.ledgers.open(client.rng.choice(self.made), recover=False)
                await self.follow(client, reader)
            except LedgerError as error:
                self.met(client, "tail", error)

    async def follow(self, client: Client, reader: Any) -> None:
        at, last = 0, NO_ENTRY
        for _ in range(6):
            confirmed = await reader.refresh_last_add_confirmed()
            if confirmed < last:
                raise Violation("9", f"a reader's LAC went back from {last} to {confirmed}")
            last = confirmed
            ledger = self.world.ghost.ledgers[reader.ledger_id]
            what = f"at reader {client.name}"
            invariants.a_confirmed_position_was_durable_when_it_was_said(
                self.world.ghost, ledger, confirmed, what
            )
            if confirmed >= at:
                read = await self.read(client, reader, at, confirmed)
                at += len(read)
            await asyncio.sleep(client.rng.uniform(0.05, 1.5))

    async def read(self, client: Client, reader: Any, first: int, last: int) -> dict[int, bytes]:
        """Read confirmed entries and judge what comes; errors that name a reason are no end."""
        ghost = self.world.ghost
        ledger = ghost.ledgers[reader.ledger_id]
        found: dict[int, bytes] = {}
        try:
            if last >= first:
                async for entry_id, entry in reader.read(first, last):
                    found[entry_id] = bytes(entry.payload)
                    ledger.returned = max(ledger.returned, entry_id)
        except NoSuchEntry as error:
            raise Violation("11", f"confirmed entries of {reader.ledger_id}: {error}") from error
        except NoSuchLedger as error:
            self.met(client, "read", error)
            if self.exists(reader.ledger_id):
                raise Violation("11", f"ledger {reader.ledger_id} is there, but {error}") from error
        except LedgerError as error:
            self.met(client, "read", error)
        else:
            wanted = range(first, last + 1)
            invariants.a_confirmed_read_ends_in_bytes(ghost, ledger, wanted, len(found))
        invariants.entries_come_whole_and_in_the_order_submitted(ghost, ledger, first, found)
        return found

    async def delete(self, client: Client, ledger_id: int) -> None:
        try:
            await client.ledgers.delete(ledger_id)
        except LedgerError as error:
            self.met(client, "delete", error)

    def exists(self, ledger_id: int) -> bool:
        ledger = self.world.ghost.ledgers[ledger_id]
        return not ledger.deleted

    def met(self, client: Client, doing: str, error: LedgerError) -> None:
        self.world.trace.note(client.name, f"{doing}: {error}")
        self.world.ghost.meet(f"{doing}: {type(error).__name__}")


def draw_payload(rng: random.Random) -> bytes:
    """Mostly small, sometimes beyond a sector or a read request, sometimes empty."""
    size = rng.choice((0, 1, 30, 100, 100, 300, 700, 5000))
    return rng.randbytes(size) if size < 400 else rng.randbytes(50) * (size // 50)
