"""A ledger as this node knows it while it runs: one object per ledger, the owner of its order.

Always true: what a handle decides and what it changes happen in one step of the event loop, so
an add is either before a fence or refused by it; the last add confirmed heard never goes back.
Whether the ledger is fenced, deleted or in limbo is kept by the storage (storage/states.py) alone:
a handle has no copy of it.
"""

import asyncio
import contextlib
import hmac
from collections.abc import Callable

from bookie_server.api.entry import EntryHeader
from bookie_server.api.status import Status
from bookie_server.lanes import Lane
from bookie_server.logs.index import LedgerState
from spark_ledger.metadata import ledger_record

PAGE_CACHE = "page-cache"  # a ledger's durability: acknowledged before the sync
_TOKENS_REMEMBERED_MAX = 8


class LedgerHandle:
    """Made once per ledger and run of the node, after first contact. `state_of` is what the storage
    knows of a ledger: this one is known there until the handle is forgotten."""

    def __init__(
        self,
        ledger_id: int,
        state_of: Callable[[int], LedgerState | None],
        last_entry: int,
        last_add_confirmed: int,
        repair_credential: bytes = b"",
    ) -> None:
        self.ledger_id = ledger_id
        self._repair_credential = repair_credential
        self._state_of = state_of
        state = self.state
        self.lane = Lane.PAGE_CACHE if state.durability == PAGE_CACHE else Lane.BULK  # of adds
        self.doubted = False
        """A fence of the ledger may be forgotten here: LedgerHandles.make_sure reads its record."""
        self.forgotten = False
        self.adds = 0  # frames that came, and fencing reads
        self.last_entry = last_entry
        self.last_add_confirmed = max(last_add_confirmed, state.explicit_lac)
        self.fence_durable: asyncio.Future[None] | None = None
        self._waiters: dict[asyncio.Future[None], None] = {}
        self._quiet_for_good = state.fenced or state.deleted
        self._checked: dict[tuple[str, bytes], bool] = {}

    @property
    def state(self) -> LedgerState:
        state = self._state_of(self.ledger_id)
        assert state is not None, f"ledger {self.ledger_id} was forgotten"
        return state

    def allows(self, use: str, token: bytes) -> bool:
        """Whether the token may be used for "read", "add" or "recover". That of the cluster's
        repair reads and recovers any ledger."""
        if (verifiers := self.state.verifiers) is None:
            return True
        if use != "add" and token and hmac.compare_digest(token, self._repair_credential):
            return True
        key = (use, token)
        if key not in self._checked:
            if len(self._checked) >= _TOKENS_REMEMBERED_MAX:
                self._checked.clear()
            self._checked[key] = ledger_record.allows(verifiers, use, token)
        return self._checked[key]

    def refusal_of_add(self, token: bytes, recovery: bool) -> Status | None:
        """Why an add may not be taken, whatever its entry is; None when it may."""
        if not self.allows("recover" if recovery else "add", token):
            return Status.UNAUTHORIZED
        if self.forgotten:
            return Status.BUSY  # again, please: it is met anew
        if recovery:
            return None
        state = self.state
        if state.deleted:
            return Status.LEDGER_DELETED
        if state.fenced:
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

    def forget(self) -> None:
        """The node knows nothing of the ledger from the end of this step on. This handle takes
        nothing more, and tells requests that still have it what was known last."""
        last = self.state
        self._state_of = lambda _: last
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
        """End all waiting, now and later."""
        self._quiet_for_good = True
        self._wake()

    def _wake(self) -> None:
        """Wake all waiting calls; each looks again."""
        waiters, self._waiters = self._waiters, {}
        for waiter in waiters:
            if not waiter.done():
                waiter.set_result(None)
