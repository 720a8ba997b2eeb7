"""What clients do with ledgers in a run: write, close, recover, read, tail, delete.

Always true: an actor meets errors of spark_ledger.errors only; any other exception fails the run.
Payloads are drawn from the actor's generator and known to the ghost by their append. Every ledger
with a password has the same one.
"""

import asyncio
import random
from contextlib import aclosing, suppress
from typing import Any

from bookie_server.api.entry import NO_ENTRY
from spark_ledger.errors import LedgerError, NoSuchEntry, NoSuchLedger
from tests.simulation import invariants
from tests.simulation.intruder import forge, intrude
from tests.simulation.invariants import Violation
from tests.simulation.plan import Plan
from tests.simulation.promises import PASSWORD
from tests.simulation.world import Client, World

LOOKS = 6  # at an open ledger, before a tailing reader takes another


class LedgerWork:
    """The actors of one run that use ledgers directly."""

    def __init__(self, world: World, plan: Plan) -> None:
        self.world = world
        self.plan = plan
        self.made: list[int] = []
        self.custom: dict[int, dict[str, str]] = {}
        self.writer_of: dict[int, Client] = {}
        self.writers: list[tuple[Client, Any]] = []
        """Every writer there ever was, for what must be left of it in the end: nothing."""
        self.old_readers: dict[int, tuple[Client, Any]] = {}
        self.onlooker: Client | None = None
        self._races: asyncio.Queue[int] = asyncio.Queue()
        """Ledgers that recoverers are to take over at this moment."""

    def password_of(self, ledger_id: int) -> bytes:
        verifiers = self.world.ghost.ledgers[ledger_id].record.verifiers
        return PASSWORD if verifiers is not None else b""

    def being_written(self) -> list[int]:
        """Open ledgers whose writer lives and runs."""
        return [
            ledger_id
            for ledger_id, client in self.writer_of.items()
            if client.process.alive and not client.process.paused and self._open(ledger_id)
        ]

    def with_password(self) -> list[int]:
        return [i for i in self.made if self.exists(i) and self.password_of(i)]

    # -- writing ---------------------------------------------------------------------------------

    async def write(self, client: Client) -> None:
        """Ledgers one after the other, until the chaos' time is over; several at a time."""
        await asyncio.gather(*(self._write(client) for _ in range(self.plan.streams)))

    async def _write(self, client: Client) -> None:
        end = self.world.loop.now + self.plan.chaos_s
        while self.world.loop.now < end:
            try:
                writer = await client.ledgers.create(
                    *self.plan.quorum,
                    password=PASSWORD if self._with_password(client) else b"",
                    announce_lac=self.plan.announce,
                    custom={"made by": client.name},
                    durability=self._durability(client),
                )
            except LedgerError as error:
                self.met(client, "create", error)
                invariants.an_id_of_its_own_is_never_taken(self.world.ghost, error)
                await asyncio.sleep(client.rng.uniform(0.1, 2))
                continue
            self.made.append(writer.ledger_id)
            self.custom[writer.ledger_id] = {"made by": client.name}
            self.writers.append((client, writer))
            self.writer_of[writer.ledger_id] = client
            if self.onlooker is not None and client.rng.random() < 0.5:
                await self._open_for_later(self.onlooker, writer.ledger_id)
            await self.append(client, writer)
            self.writer_of.pop(writer.ledger_id)
            await asyncio.sleep(client.rng.uniform(0, 0.3 if self.plan.ledgers else 3))

    def _durability(self, client: Client) -> str:
        cached = self.plan.page_cache and client.rng.random() < 0.5
        return "page-cache" if cached else "synced"

    def _with_password(self, client: Client) -> bool:
        return self.plan.password and client.rng.random() < 0.7

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
            await self._race(rng, writer.ledger_id)
            await self.close(client, writer)
        for outcome in await asyncio.gather(*appended, return_exceptions=True):
            if isinstance(outcome, LedgerError):
                self.met(client, "append", outcome)
            elif isinstance(outcome, BaseException):
                raise Violation("only known errors", f"an append ended in {outcome!r}")

    async def _race(self, rng: random.Random, ledger_id: int) -> None:
        """Let recoverers loose on a ledger that is about to be closed."""
        racers, head_start_s = rng.choice((0, 0, 1, 2, 3)), rng.choice((0.0, 0.0, 0.003, 0.03))
        for _ in range(min(racers, self.plan.recoverers)):
            self._races.put_nowait(ledger_id)
        if racers:
            await asyncio.sleep(head_start_s)

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

    # -- recovering ------------------------------------------------------------------------------

    async def recover(self, client: Client) -> None:
        """Take over whatever ledger is there, now and then; sometimes delete it afterwards."""
        end = self.world.loop.now + self.plan.chaos_s
        while self.world.loop.now < end:
            ledger_id = await self._next_to_recover(client)
            if ledger_id is None:
                continue
            if client.rng.random() < 0.05:
                await self.delete(client, ledger_id)  # perhaps while it is written
            await self.recover_one(client, ledger_id)
            if client.rng.random() < 0.15:
                await self.delete(client, ledger_id)

    async def _next_to_recover(self, client: Client) -> int | None:
        with suppress(TimeoutError):
            async with asyncio.timeout(client.rng.uniform(0.2, 1.5 if self.plan.ledgers else 6)):
                return await self._races.get()
        among = [i for i in self.made if self._open(i)] if self.plan.ledgers else self.made
        return client.rng.choice(among) if among else None

    async def recover_one(self, client: Client, ledger_id: int) -> None:
        begun_s = self.world.loop.now
        options = {"password": self.password_of(ledger_id), "small": ledger_id % 2 == 0}
        try:
            reader = await client.ledgers.open(ledger_id, recover=True, **options)
        except LedgerError as error:
            self.met(client, "recover", error)
            return
        ghost = self.world.ghost
        ledger = ghost.ledgers[ledger_id]
        invariants.all_opens_end_at_the_same_entry(ghost, ledger, reader.last_add_confirmed)
        await self.read(client, reader, 0, reader.last_add_confirmed, recovered_s=begun_s)

    async def rescue(self, ledger_id: int) -> None:
        """One more process recovers the ledger, beside those that do."""
        rescuer = await self.world.client("rescuer")
        await rescuer.run(self.recover_one(rescuer, ledger_id), f"recovers {ledger_id}")

    async def take_over(self, ledger_id: int, more_s: float) -> None:
        """Recover a ledger whose writer stands still, and then let the writer go on."""
        writer = self.writer_of[ledger_id]
        rescuer = await self.world.client("rescuer")
        try:
            await rescuer.run(self.recover_one(rescuer, ledger_id), f"recovers {ledger_id}")
            await asyncio.sleep(more_s)
        finally:
            writer.process.resume()

    async def intrude(self, ledger_id: int, rng: random.Random) -> None:
        """Somebody without the password tries something; nothing may come of it."""
        intruder = await self.world.client("intruder")
        record = self.world.ghost.ledgers[ledger_id].record
        await intruder.run(intrude(intruder, record, rng), f"intrudes into {ledger_id}")

    def held_entries(self) -> list[tuple[str, tuple[int, int]]]:
        """(bookie, (ledger, entry)) of what bookies acknowledged and must still have."""
        ghost = self.world.ghost
        bookies = [
            ghost.bookie(node.bookie_id)
            for node in self.world.nodes
            if node.running and not ghost.bookie(node.bookie_id).rotten
        ]
        return [(b.bookie_id, key) for b in bookies for key in b.stored if self.exists(key[0])]

    async def forge(self, bookie_id: str, ledger_id: int, entry_id: int) -> None:
        """Send a bookie another entry in the place of one it has; observers judge its answer."""
        forger = await self.world.client("forger")
        password = self.password_of(ledger_id)
        await forger.run(
            forge(forger, bookie_id, ledger_id, entry_id, password), f"forges {ledger_id}"
        )

    # -- reading ---------------------------------------------------------------------------------

    async def tail(self, client: Client) -> None:
        """Follow ledgers that are written, reading what is confirmed."""
        end = self.world.loop.now + self.plan.chaos_s
        while self.world.loop.now < end:
            await asyncio.sleep(client.rng.uniform(0.1, 2))
            if not self.made:
                continue
            ledger_id = client.rng.choice(self.made[-3:])
            try:
                reader = await client.ledgers.open(
                    ledger_id, recover=False, password=self.password_of(ledger_id)
                )
                if client.rng.random() < 0.5:
                    await self.follow(client, reader)
                else:
                    await self.poll(client, reader)
            except LedgerError as error:
                self.met(client, "tail", error)

    async def follow(self, client: Client, reader: Any) -> None:
        """Ask again and again how far it goes."""
        at, last = 0, NO_ENTRY
        for _ in range(LOOKS):
            confirmed = await reader.refresh_last_add_confirmed()
            self._heard(client, reader, last)
            last = confirmed
            if confirmed >= at:
                read = await self.read(client, reader, at, confirmed)
                at += len(read)
            await asyncio.sleep(client.rng.uniform(0.05, 1.5))
        await self._beyond(reader)

    async def _beyond(self, reader: Any) -> None:
        """Ask for more than is known to be confirmed: it comes if it is by then, else that is said
        (10 judges what comes)."""
        first = reader.last_add_confirmed + 1
        try:
            async for _ in reader.read(first, first):
                pass
        except NoSuchEntry:
            self.world.ghost.meet("read beyond what is confirmed refused")

    async def poll(self, client: Client, reader: Any) -> None:
        """Follow by long polls, as far as the reader offers them."""
        if not hasattr(reader, "read_when_confirmed"):
            await self.follow(client, reader)
        elif client.rng.random() < 0.5:
            await self._poll(client, reader)
        else:
            await self._tail(client, reader)

    async def _poll(self, client: Client, reader: Any) -> None:
        """Ask for what comes after the last entry read."""
        last = NO_ENTRY
        for _ in range(LOOKS):
            wait_s = client.rng.choice((0.2, 1.5, 7.0))
            before = reader.last_add_confirmed
            found = await reader.read_when_confirmed(last, wait_s)
            self._heard(client, reader, before)
            self._judge(reader, last + 1, {i: bytes(entry.payload) for i, entry in found})
            last += len(found)

    async def _tail(self, client: Client, reader: Any) -> None:
        """Read to the end of the ledger, or until the patience ends."""
        found: dict[int, bytes] = {}
        try:
            async with asyncio.timeout(client.rng.uniform(1, 12)):
                async with aclosing(reader.tail(0)) as entries:
                    async for entry_id, entry in entries:
                        found[entry_id] = bytes(entry.payload)
        except TimeoutError:
            self.world.ghost.meet("tail: given up")
        else:
            record, ledger = reader.record, self.world.ghost.ledgers[reader.ledger_id]
            ghost, open_ = self.world.ghost, not record.closed and not ledger.deleted
            told = "its tail just ended" if open_ else ""
            invariants.what_is_there_has_no_end(ghost, reader.ledger_id, told)
            if record.closed:
                wanted = range(record.last_entry + 1)
                invariants.a_confirmed_read_ends_in_bytes(ghost, ledger, wanted, len(found))
            self.world.ghost.meet("tail: to the end")
        finally:
            self._judge(reader, 0, found)

    def _heard(self, client: Client, reader: Any, before: int) -> None:
        """Of a reader's last add confirmed: it never goes back, and was durable."""
        confirmed = reader.last_add_confirmed
        invariants.a_handle_never_goes_back(
            self.world.ghost, reader.ledger_id, before, confirmed, client.name
        )
        ledger = self.world.ghost.ledgers[reader.ledger_id]
        invariants.a_confirmed_position_was_durable_when_it_was_said(
            self.world.ghost, ledger, confirmed, f"at reader {client.name}"
        )

    def _judge(
        self, reader: Any, first: int, found: dict[int, bytes], opened_s: float | None = None
    ) -> None:
        """What a read from `first` on returned; of everything, if a recovery began then."""
        ghost = self.world.ghost
        ledger = ghost.ledgers[reader.ledger_id]
        ledger.returned = max([ledger.returned, *found])
        whole = opened_s is not None and not ghost.over_budget
        ledger.was_read(opened_s or 0.0, found, whole)
        invariants.entries_come_whole_and_in_the_order_submitted(ghost, ledger, first, found)

    async def read(
        self,
        client: Client,
        reader: Any,
        first: int,
        last: int,
        known_confirmed: int | None = None,
        recovered_s: float | None = None,
    ) -> dict[int, bytes]:
        """Read confirmed entries and judge what comes; errors that name a reason are no end. Who
        recovered the ledger says since when, and reads all of it."""
        ghost = self.world.ghost
        ledger = ghost.ledgers[reader.ledger_id]
        found: dict[int, bytes] = {}
        try:
            if last >= first:
                async for entry_id, entry in reader.read(
                    first, last, known_confirmed=known_confirmed
                ):
                    found[entry_id] = bytes(entry.payload)
                    ledger.returned = max(ledger.returned, entry_id)
        except NoSuchEntry as error:
            invariants.what_is_there_has_no_end(ghost, reader.ledger_id, str(error))
        except NoSuchLedger as error:
            self.met(client, "read", error)
            told = str(error) if self.exists(reader.ledger_id) else ""
            invariants.what_is_there_has_no_end(ghost, reader.ledger_id, told)
        except LedgerError as error:
            self.met(client, "read", error)
        else:
            wanted = range(first, last + 1)
            invariants.a_confirmed_read_ends_in_bytes(ghost, ledger, wanted, len(found))
        whole = len(found) == last + 1 - first
        self._judge(reader, first, found, recovered_s if whole else None)
        return found

    async def _open_for_later(self, onlooker: Client, ledger_id: int) -> None:
        """A reader that knows the ledger as it was when it was made."""
        if not onlooker.process.alive:
            return
        password = self.password_of(ledger_id)
        opening = onlooker.run(onlooker.ledgers.open(ledger_id, recover=False, password=password))
        (reader,) = await asyncio.gather(asyncio.shield(opening), return_exceptions=True)
        if isinstance(reader, LedgerError):
            self.met(onlooker, "open", reader)
        elif isinstance(reader, Exception):
            raise reader
        elif not isinstance(reader, BaseException):
            self.old_readers[ledger_id] = (onlooker, reader)

    # -- deleting --------------------------------------------------------------------------------

    async def delete(self, client: Client, ledger_id: int) -> None:
        try:
            await client.ledgers.delete(ledger_id)
        except LedgerError as error:
            self.met(client, "delete", error)

    def exists(self, ledger_id: int) -> bool:
        ledger = self.world.ghost.ledgers[ledger_id]
        return not ledger.deleted

    def _open(self, ledger_id: int) -> bool:
        ledger = self.world.ghost.ledgers[ledger_id]
        return not ledger.deleted and not ledger.closed

    def met(self, client: Client, doing: str, error: LedgerError) -> None:
        self.world.trace.note(client.name, f"{doing}: {error}")
        self.world.ghost.meet(f"{doing}: {type(error).__name__}")


def draw_payload(rng: random.Random) -> bytes:
    """Mostly small, sometimes beyond a sector or a read request, sometimes empty."""
    size = rng.choice((0, 1, 30, 100, 100, 300, 700, 5000))
    return rng.randbytes(size) if size < 400 else rng.randbytes(50) * (size // 50)
