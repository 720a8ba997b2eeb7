"""Members of a writer's ensemble that are registered no more, or are being drained: they are
replaced also while nothing is appended.

Always true: a member is replaced only if this client saw it not registered, in a session without a
break, for half of the cluster's `lost_bookie_delay_s` and ABSENT_MIN_S, or if it is read-only and
the store says that it is drained; this comes before a worker of repair takes a ledger that still
names it for one without a writer (repair/worker.py).
"""

import asyncio

from spark_ledger.ledger.add_pipeline import AddPipeline
from spark_ledger.metadata.autorecovery import BadSettings, Settings, draining, read_settings
from spark_ledger.metadata.store import SessionState, StoreError

ABSENT_MIN_S, ABSENT_MAX_S = 5.0, 3600.0  # between looks
SHARE = 0.5  # of the delay
DRAINED = "it is being drained"


class AbsentMembers:
    """Of one pipeline. `changed` is to be called when registrations have changed."""

    def __init__(self, pipeline: AddPipeline) -> None:
        self._pipeline = pipeline
        self._cluster = pipeline.cluster
        self._loop = asyncio.get_running_loop()
        self._since: dict[str, float] = {}
        self._readonly: list[str] = []
        self._watching: asyncio.Task[None] | None = None
        self.overdue: dict[str, None] = {}
        """Those that are absent too long, or drained."""

    def changed(self) -> None:
        self._look()
        if (self._since or self._readonly) and self._watching is None:
            self._watching = self._loop.create_task(
                self._watch(), name=f"absent members of ledger {self._pipeline.ledger_id}"
            )

    def stop(self) -> None:
        """Watch no more."""
        if self._watching is not None:
            self._watching.cancel()

    def _look(self) -> None:
        """Who is absent, and since when, and who takes no adds."""
        directory, now = self._cluster.directory, self._loop.time()
        if self._cluster.records.metadata.session_state is not SessionState.CONNECTED:
            self._since = dict.fromkeys(self._since, now)
            return
        members = [slot.bookie_id for slot in self._pipeline.slots]
        away = [bookie for bookie in members if not directory.is_registered(bookie)]
        readonly = [bookie for bookie in members if directory.is_readonly(bookie)]
        if self._pipeline.recovery:  # read-only members take what it writes back
            readonly = []
        self._since = {bookie: self._since.get(bookie, now) for bookie in away}
        self._readonly = readonly
        self.overdue = {one: None for one in self.overdue if one in (*away, *readonly)}

    async def _watch(self) -> None:
        try:
            pause_s = ABSENT_MIN_S
            while self._pipeline.failure is None:
                await asyncio.sleep(pause_s)
                self._look()
                if not (self._since or self._readonly):
                    return
                due_s = await self._due_s()
                drained = await self._drained() if due_s < float("inf") else []
                self._fail_overdue(due_s, drained)
                left = [since + due_s - self._loop.time() for since in self._since.values()]
                if self._readonly:  # for another reason: it may be drained, too, later
                    left.append(due_s / 2)
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

    async def _drained(self) -> list[str]:
        """Those of the read-only members that are."""
        if not self._readonly:
            return []
        try:
            named = await draining(self._cluster.records.metadata)
        except StoreError:
            return []  # asked again
        return [bookie for bookie in self._readonly if bookie in named]

    def _fail_overdue(self, due_s: float, drained: list[str]) -> None:
        """Fail the slots of members that are absent too long, or drained."""
        now = self._loop.time()
        for index, slot in enumerate(self._pipeline.slots):
            since = self._since.get(slot.bookie_id)
            why = DRAINED if slot.bookie_id in drained else ""
            if since is not None and now - since >= due_s:
                why = f"not registered for {now - since:.0f} s"
            if why:
                self.overdue[slot.bookie_id] = None
                self._pipeline.slot_failed(index, why)
