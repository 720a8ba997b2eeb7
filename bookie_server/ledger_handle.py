"""A ledger as this node knows it while it runs: one object per ledger, the owner of its order.

Always true: what a handle decides and what it changes happen in one step of the event loop, so
an add is either before a fence or refused by it; the last add confirmed heard never goes back.
"""

import asyncio
import contextlib
from dataclasses import replace

from bookie_server.api.entry import EntryHeader
from bookie_server.api.status import Status
from bookie_server.entry_index import LedgerState
from bookie_server.lanes import Lane
from spark_ledger.metadata import ledger_record

PAGE_CACHE = "page-cache"  # a ledger's durability: acknowledged before the sync
_TOKENS_REMEMBERED_MAX = 8


class LedgerHandle:
    """Made once per ledger and run of the node, after first contact."""

    def __init__(self, state: LedgerState, last_entry: int, last_add_confirmed: int) -> None:
        self.state = state
        self.lane = Lane.PAGE_CACHE if state.durability == PAGE_CACHE else Lane.BULK  # of adds
        self.doubted = False
        """A fence of the ledger may be forgotten here: LedgerHandles.make_sure reads its record."""
        self.forgotten = False
        self.adds = 0  # frames that came
        self.last_entry = last_entry
        self.last_add_confirmed = max(last_add_confirmed, state.explicit_lac)
        self.fence_durable: asyncio.Future[None] | None = None
        self._waiters: dict[asyncio.Future[None], None] = {}
        self._quiet_for_good = state.fenced or state.deleted
        self._checked: dict[tuple[str, bytes], bool] = {}

    def allows(self, use: str, token: bytes) -> bool:
        """Whether the token may be used for "read", "add" or "recover"."""
        if self.state.verifiers is None:
            return True
        key = (use, token)
        if key not in self._checked:
            if len(self._checked) >= _TOKENS_REMEMBERED_MAX:
                self._checked.clear()
            self._checked[key] = ledger_record.allows(self.state.verifiers, use, token)
        return self._checked[key]

    def refusal_of_add(self, token: bytes, recovery: bool) -> Status | None:
        """Why an add may not be taken, whatever its entry is; None when it may."""
        if not self.allows("recover" if recovery else "add", token):
            return Status.UNAUTHORIZED
        if self.forgotten:
            return Status.BUSY  # again, please: it is met anew
        if recovery:
            return None
        if self.state.deleted:
            return Status.LEDGER_DELETED
        if self.state.fenced:
            return Status.FENCED
        return Status.METADATA_UNAVAILABLE if self.doubted else None

    def heard(self, header: EntryHeader) -> None:
        """An add was taken."""
        self.last_entry = max(self.last_entry, header.entry_id)
        self.heard_lac(header.last_add_confirmed)

    def heard_lac(self, last_add_confirmed: int) -> None:
        if last_add_confirmed > self.last_add_confirmed:
            self.last_add_confirmed = last_add_confirmed
            self._wake()

    def explicit_lac(self, last_add_confirmed: int) -> LedgerState:
        """The state after WriteLac."""
        lac = max(self.state.explicit_lac, last_add_confirmed)
        self.state = replace(self.state, explicit_lac=lac)
        self.heard_lac(lac)
        return self.state

    def fence(self) -> LedgerState:
        """From this moment on normal adds are refused; nobody is told before it is durable."""
        self.state = replace(self.state, fenced=True)
        self.end_waiting()
        return self.state

    def bury(self, state: LedgerState) -> None:
        """The ledger was deleted, as `state` says: normal adds are refused, and nobody is kept
        waiting for news of it."""
        assert state.deleted
        self.state = state
        self.end_waiting()

    def forget(self) -> None:
        """The node knows nothing of the ledger any more; nothing is taken by this handle."""
        self.forgotten = True
        self.end_waiting()

    async def wait_beyond(self, previous_lac: int, wait_s: float) -> None:
        """Return when the last add confirmed exceeds `previous_lac`, the ledger is fenced or
        deleted or the node stops, or after `wait_s`. A waiter is forgotten when it stops
        waiting."""
        if wait_s <= 0:
            return
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(wait_s):
                while self.last_add_confirmed <= previous_lac and not self._quiet_for_good:
                    await self._news()

    async def _news(self) -> None:
        waiter: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiters[waiter] = None
        try:
            await waiter
        finally:
            self._waiters.pop(waiter, None)

    @property
    def waiter_count(self) -> int:
        return len(self._waiters)

    def end_waiting(self) -> None:
        """Nobody is kept waiting any more, now or later."""
        self._quiet_for_good = True
        self._wake()

    def _wake(self) -> None:
        """Let everybody who waits look again."""
        waiters, self._waiters = self._waiters, {}
        for waiter in waiters:
            if not waiter.done():
                waiter.set_result(None)
