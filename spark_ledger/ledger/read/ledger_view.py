"""What a reader knows of its ledger: the record, and how far entries are confirmed.

Always true: both only move forward, however old what is heard is. What is known to be confirmed
is a lower bound of what is: -1 (NO_ENTRY) does not mean that nothing was written, and only a
CLOSED record says where the ledger ends. A closed ledger that ends before an entry that was
confirmed has lost entries; that is said loudly, never adopted.
"""

import asyncio
from contextlib import aclosing

from bookie_server.api.entry import NO_ENTRY
from bookie_server.api.messages import ReadLacResponse
from bookie_server.api.status import Meaning, Status, meaning
from spark_ledger.errors import (
    DataUnavailable,
    LedgerError,
    NoSuchLedger,
    RowsLost,
    Unauthorized,
    Unavailable,
)
from spark_ledger.ledger.cluster import Cluster, as_responded, say
from spark_ledger.ledger.quorum import Quorum
from spark_ledger.ledger.records import VersionedRecord
from spark_ledger.metadata.ledger_record import LedgerRecord
from spark_ledger.metadata.store import Watcher


class LedgerView:
    """One ledger as one reader sees it; shared by the parts of that reader."""

    def __init__(self, cluster: Cluster, known: VersionedRecord, token: bytes) -> None:
        record = known.record
        self.ledger_id = record.ledger_id
        self.token = token
        self.quorum = Quorum(record.ensemble_size, record.write_quorum, record.ack_quorum)
        self._cluster = cluster
        self._known = known
        self._lac = NO_ENTRY

    @property
    def record(self) -> LedgerRecord:
        return self._known.record

    @property
    def version(self) -> int:
        return self._known.version

    @property
    def last_add_confirmed(self) -> int:
        """The last entry known to be confirmed; of a closed ledger, its last entry."""
        end = self.record.last_entry
        return self._lac if end is None else end

    def heard(self, lac: int) -> None:
        """A bookie says that entries up to `lac` are confirmed."""
        self._lac = max(self._lac, lac)

    # -- asking -------------------------------------------------------------------------------

    async def reread(self, *, fresh: bool = False, watch: Watcher | None = None) -> None:
        """Read the record again; with `fresh` after a sync, so that it is no older than this call.

        Raises NoSuchLedger (after a sync always), Unavailable, RowsLost.
        """
        records = self._cluster.records
        try:
            found = await records.read(self.ledger_id, fresh=fresh, watch=watch)
        except NoSuchLedger:
            if fresh:
                raise
            found = await records.read(self.ledger_id, fresh=True, watch=watch)
        self._adopt(found)

    async def refresh(self) -> bool:
        """Ask the record and, of an open ledger, the bookies; whether the store responded.

        A metadata store that does not respond keeps nobody from hearing the bookies: they are
        asked at its side when it takes longer than `speculative_read_delay_s`, and it is waited
        for no longer than `read_timeout_s`. Raises NoSuchLedger, RowsLost, DataUnavailable when
        no bookie responds, Unauthorized.
        """
        if self.record.closed:
            return True
        loop, config = asyncio.get_running_loop(), self._cluster.config
        began, looking = loop.time(), loop.create_task(self._look())
        try:
            told = await _told_by(began + config.speculative_read_delay_s, looking)
            if told is None:
                told = await self._ask_beside(looking, began + config.read_timeout_s)
            elif not self.record.closed:
                await self.ask_lac()
            return bool(told)
        finally:
            if not looking.cancel() and not looking.cancelled():
                looking.exception()  # met, also when we were cancelled in the same moment

    async def _ask_beside(self, looking: "asyncio.Task[bool]", deadline: float) -> bool | None:
        """Ask the bookies while the store does not respond, for what may turn out an old record."""
        asked, failure = self.record.last_fragment, None
        try:
            await self.ask_lac()
        except LedgerError as unheard:
            failure = unheard
        told = await _told_by(deadline, looking)
        if not self.record.closed and self.record.last_fragment != asked:
            await self.ask_lac()
        elif not self.record.closed and failure is not None:
            raise failure
        return told

    async def _look(self) -> bool:
        """Read the record again; False when the store does not respond."""
        try:
            await self.reread()
        except Unavailable:
            return False
        return True

    async def ask_lac(self) -> None:
        """Hear the bookies of the last fragment until they cover it: then nothing that was
        confirmed before this call by a later entry's header is missed.

        Bookies that lately did not respond are not waited for, once others have. Raises
        DataUnavailable when no bookie responds, Unauthorized.
        """
        ensemble = self.record.last_fragment.ensemble
        suspects = self._cluster.bookies.quarantine.suspects()
        hopeless = sum(1 << slot for slot, bookie in enumerate(ensemble) if bookie in suspects)
        requests = [
            self._cluster.bookies.read_lac(bookie, self.ledger_id, token=self.token)
            for bookie in ensemble
        ]
        silent, refused = (1 << len(ensemble)) - 1, {}
        async with aclosing(as_responded(requests)) as responses:
            async for slot, response in responses:
                if meaning(response.status) is Meaning.UNKNOWN:
                    refused[ensemble[slot]] = response
                    hopeless |= 1 << slot
                else:
                    silent &= ~(1 << slot)
                    self.heard(response.last_add_confirmed)
                heard_some = silent.bit_count() < len(ensemble)
                if self.quorum.covered(silent) or (heard_some and not silent & ~hopeless):
                    return
        raise self.nobody_tells(refused)

    def nobody_tells(self, refused: dict[str, ReadLacResponse]) -> LedgerError:
        """The error when no bookie says how far the ledger goes. Unauthorized if so many refuse
        the token that it cannot be the damage of a few."""
        said = "; ".join(
            f"{self._cluster.directory.describe(bookie)}: {say(response)}"
            for bookie, response in sorted(refused.items())
        )
        refusing = [response.status for response in refused.values()].count(Status.UNAUTHORIZED)
        if refusing >= self.quorum.ack_quorum:
            text = f"the password of ledger {self.ledger_id} is another: {said}"
            return Unauthorized(text, ledger_id=self.ledger_id)
        text = f"no bookie tells how far ledger {self.ledger_id} goes: {said}"
        return DataUnavailable(text, ledger_id=self.ledger_id)

    def _adopt(self, found: VersionedRecord) -> None:
        if found.version < self.version:
            return
        end = found.record.last_entry
        if end is not None and end < self._lac:
            raise RowsLost(
                f"ledger {self.ledger_id} is closed at entry {end}, but entries up to"
                f" {self._lac} were confirmed",
                "Restore the disks of its bookies; entries after its end are gone until then.",
                ledger_id=self.ledger_id,
                last_entry=end,
                last_add_confirmed=self._lac,
            )
        self._known = found


async def _told_by(deadline: float, looking: "asyncio.Task[bool]") -> bool | None:
    """What `looking` returns; None when it has not by the deadline, and goes on."""
    try:
        async with asyncio.timeout_at(deadline):
            return await asyncio.shield(looking)
    except TimeoutError:
        return None
