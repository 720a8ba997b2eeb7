"""Members of a writer's ensemble that are registered no more: they are replaced before the auditor
takes them for lost, also while nothing is appended.

Always true: a member is replaced only if this client saw it not registered, in a session without a
break, for half of the cluster's `lost_bookie_delay_s` and ABSENT_MIN_S; an auditor takes a ledger
that still names it after the whole delay for one without a writer (repair/worker.py).
"""

import asyncio

from spark_ledger.ledger.add_pipeline import AddPipeline
from spark_ledger.metadata.autorecovery import BadSettings, Settings, read_settings
from spark_ledger.metadata.store import SessionState, StoreError

ABSENT_MIN_S, ABSENT_MAX_S = 5.0, 3600.0  # between looks
SHARE = 0.5  # of the delay


class AbsentMembers:
    """Of one pipeline. `changed` is to be called when registrations have changed."""

    def __init__(self, pipeline: AddPipeline) -> None:
        self._pipeline = pipeline
        self._cluster = pipeline.cluster
        self._loop = asyncio.get_running_loop()
        self._since: dict[str, float] = {}
        self._watching: asyncio.Task[None] | None = None
        self.overdue: dict[str, None] = {}
        """Those that are absent too long."""

    def changed(self) -> None:
        self._look()
        if self._since and self._watching is None:
            self._watching = self._loop.create_task(
                self._watch(), name=f"absent members of ledger {self._pipeline.ledger_id}"
            )

    def stop(self) -> None:
        """Watch no more."""
        if self._watching is not None:
            self._watching.cancel()

    def _look(self) -> None:
        """Who is absent, and since when."""
        directory, now = self._cluster.directory, self._loop.time()
        if self._cluster.records.metadata.session_state is not SessionState.CONNECTED:
            self._since = dict.fromkeys(self._since, now)
            return
        here = {each.id for each in (*directory.writable(), *directory.readonly())}
        members = [slot.bookie_id for slot in self._pipeline.slots if slot.bookie_id not in here]
        self._since = {bookie: self._since.get(bookie, now) for bookie in members}
        self.overdue = {bookie: None for bookie in self.overdue if bookie in self._since}

    async def _watch(self) -> None:
        try:
            pause_s = ABSENT_MIN_S
            while self._pipeline.failure is None:
                await asyncio.sleep(pause_s)
                self._look()
                if not self._since:
                    return
                due_s = await self._due_s()
                self._fail_overdue(due_s)
                left = [since + due_s - self._loop.time() for since in self._since.values()]
                pause_s = min([s for s in left if 0 < s < ABSENT_MAX_S], default=ABSENT_MIN_S)
        finally:
            self._watching = None

    async def _due_s(self) -> float:
        """After how long an absent member is replaced; inf: never."""
        try:
            settings = await read_settings(self._cluster.records.metadata)
        except (StoreError, BadSettings):
            settings = Settings()
        if not settings.enabled:
            return float("inf")
        return max(ABSENT_MIN_S, settings.lost_bookie_delay_s * SHARE)

    def _fail_overdue(self, due_s: float) -> None:
        """Fail the slots of members that are absent too long."""
        now = self._loop.time()
        for index, slot in enumerate(self._pipeline.slots):
            since = self._since.get(slot.bookie_id)
            if since is not None and now - since >= due_s:
                self.overdue[slot.bookie_id] = None
                self._pipeline.slot_failed(index, f"not registered for {now - since:.0f} s")
